//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const journalHelperEnv = "JOURNAL_TEST_HELPER"

// openTestStore gives the session store of a fresh home, and its directory.
func openTestStore(t *testing.T) (*os.Root, string) {
	t.Helper()
	home := t.TempDir()
	root, err := openStore(home)
	needNil(t, err)
	t.Cleanup(func() { _ = root.Close() })
	return root, filepath.Join(home, "sessions")
}

// quoted is text as a JSON string that keeps "<", "&" and U+2028 as they are.
func quoted(text string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(text)
	return strings.ReplaceAll(strings.TrimSpace(b.String()), `\u2028`, "\u2028")
}

func userMsg(text string) json.RawMessage {
	return json.RawMessage(`{"role":"user","content":` + quoted(text) + `}`)
}

func replyMsg(text string) json.RawMessage {
	return json.RawMessage(`{"role":"assistant","content":` + quoted(text) + `}`)
}

// callsMsg is a reply with calls of the ids.
func callsMsg(ids ...string) json.RawMessage {
	var calls []string
	for _, id := range ids {
		calls = append(calls, fmt.Sprintf(`{"id":%q,"type":"function","function":{"name":"Bash","arguments":"{\"command\":\"a < b && c\"}"}}`, id))
	}
	return json.RawMessage(`{"role":"assistant","content":"","tool_calls":[` + strings.Join(calls, ",") + `]}`)
}

func toolMsg(id, text string) json.RawMessage {
	return json.RawMessage(`{"role":"tool","tool_call_id":` + quoted(id) + `,"content":` + quoted(text) + `}`)
}

// addAll adds records and fails the test at the first error.
func addAll(t *testing.T, j *journal, recs ...record) {
	t.Helper()
	for _, rec := range recs {
		needNil(t, j.add(rec))
	}
}

// oneTurn is a whole turn with one call.
func oneTurn(question string) []record {
	return []record{
		{Type: recTurnStart, Message: userMsg(question)},
		{Type: recAssistant, Message: callsMsg("c1"), Calls: []string{"c1"}},
		{Type: recToolStart, Call: "c1", Name: "Bash"},
		{Type: recToolResult, Call: "c1", Message: toolMsg("c1", "ok\nexit code 0")},
		{Type: recAssistant, Message: replyMsg("It works. <é> \u2028")},
		{Type: recTurnEnd, Stop: "end"},
	}
}

// history joins the messages that the model would get.
func history(j *journal) string {
	return string(bytes.Join(rawSlices(j.messages), []byte("\n")))
}

func rawSlices(in []json.RawMessage) [][]byte {
	var out [][]byte
	for _, m := range in {
		out = append(out, m)
	}
	return out
}

// readRecords reads a journal's lines and fails the test unless each is one
// record and n runs from 0 without gaps.
func readRecords(t testing.TB, path string) []record {
	t.Helper()
	data, err := os.ReadFile(path)
	needNil(t, err)
	if len(data) > 0 && data[len(data)-1] != '\n' {
		t.Fatalf("the journal ends without a newline: %q", data)
	}
	var recs []record
	for i, line := range strings.Split(strings.TrimSuffix(string(data), "\n"), "\n") {
		var rec record
		if err := strictly([]byte(line), &rec); err != nil || !json.Valid([]byte(line)) || rec.N != int64(i) {
			t.Fatalf("line %d is %q (%v)", i, line, err)
		}
		recs = append(recs, rec)
	}
	return recs
}

func kinds(recs []record) string {
	var names []string
	for _, rec := range recs {
		names = append(names, rec.Type)
	}
	return strings.Join(names, " ")
}

func TestASessionIsReadBackByteForByte(t *testing.T) {
	root, dir := openTestStore(t)
	j, err := openSession(root, "fix-build", false, "demo-1", "/work")
	needNil(t, err)
	addAll(t, j, oneTurn("fix <the> build & test\u2028\x00")...)
	addAll(t, j, oneTurn("again")...)
	want, turn := history(j), j.turn
	j.close()
	if sent := string(userMsg("fix <the> build & test\u2028\x00")); turn != 2 || !strings.HasPrefix(want, sent+"\n") || !strings.Contains(want, `a < b && c`) {
		t.Errorf("turn %d, history %s", turn, want)
	}

	recs := readRecords(t, filepath.Join(dir, "fix-build", journalName))
	if first := recs[0]; first.Type != recSession || first.Format != 1 || first.Session != "fix-build" || first.Model != "demo-1" || first.Workspace != "/work" || first.Time.IsZero() {
		t.Errorf("first record %+v", first)
	}
	const turnKinds = " turn_start assistant tool_start tool_result assistant turn_end"
	if got := kinds(recs); got != "session"+turnKinds+turnKinds {
		t.Errorf("records %s", got)
	}
	again, err := openSession(root, "fix-build", true, "other", "/other")
	needNil(t, err)
	defer again.close()
	if got := history(again); got != want || again.turn != 2 || again.running || again.next != 13 {
		t.Errorf("read back: turn %d, running %v, next %d, history\n%s\nwant\n%s", again.turn, again.running, again.next, got, want)
	}
	for path, mode := range map[string]os.FileMode{dir: os.ModeDir | 0o700, filepath.Join(dir, "fix-build"): os.ModeDir | 0o700, filepath.Join(dir, "fix-build", journalName): 0o600} {
		if st, err := os.Lstat(path); err != nil || st.Mode() != mode {
			t.Errorf("%s: %v %v, want %v", path, st.Mode(), err, mode)
		}
	}
}

func TestResumeAndCreate(t *testing.T) {
	root, dir := openTestStore(t)
	if _, err := openSession(root, "a", true, "m", "w"); !errors.Is(err, errNoSession) {
		t.Errorf("resume of nothing: %v, want errNoSession", err)
	}
	if got := treeOf(t, dir); strings.Count(got, "\n") != 1 {
		t.Errorf("resume of nothing wrote\n%s", got)
	}
	j, err := openSession(root, "a", false, "m", "w")
	needNil(t, err)
	if _, err := openSession(root, "a", true, "m", "w"); !errors.Is(err, errHeld) {
		t.Errorf("a second writer: %v, want errHeld", err)
	}
	if _, err := openSession(root, "a", false, "m", "w"); !errors.Is(err, errHeld) {
		t.Errorf("creation of an open one: %v, want errHeld", err)
	}
	j.close()
	// Without a turn it is what a first one without room left: the same request comes again.
	j, err = openSession(root, "a", false, "m", "w")
	needNil(t, err)
	addAll(t, j, oneTurn("x")...)
	j.close()
	if _, err := openSession(root, "a", false, "m", "w"); !errors.Is(err, errExists) {
		t.Errorf("creation of an old one: %v, want errExists", err)
	}
	// What a crash between making the file and its first record leaves.
	needNil(t, os.Mkdir(filepath.Join(dir, "b"), 0o700))
	needNil(t, os.WriteFile(filepath.Join(dir, "b", journalName), nil, 0o600))
	j, err = openSession(root, "b", true, "m", "w")
	needNil(t, err)
	j.close()
	// And a crash before: a directory alone is no session.
	needNil(t, os.Mkdir(filepath.Join(dir, "c"), 0o700))
	if _, err := openSession(root, "c", true, "m", "w"); !errors.Is(err, errNoSession) {
		t.Errorf("a directory alone: %v, want errNoSession", err)
	}
	needNil(t, os.WriteFile(filepath.Join(dir, "stray"), nil, 0o600))
	needNil(t, os.MkdirAll(filepath.Join(dir, "Not.An.Id"), 0o700))
	needNil(t, os.WriteFile(filepath.Join(dir, "Not.An.Id", journalName), []byte("x"), 0o600))
	list, err := listSessions(root)
	needNil(t, err)
	if len(list) != 2 || list[0].Session != "a" || list[1].Session != "b" || list[0].Bytes == 0 || list[0].Modified.IsZero() {
		t.Errorf("list %+v, want a and b", list)
	}
}

// TestACutAtEveryByte: wherever a crash tears the last record, the earlier ones
// are whole, the torn part is kept, and no two records share a line.
func TestACutAtEveryByte(t *testing.T) {
	root, dir := openTestStore(t)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(t, err)
	addAll(t, j, oneTurn("first")...)
	before, size := history(j), j.size
	addAll(t, j, record{Type: recTurnStart, Message: userMsg("second, torn\u00e9")})
	j.close()
	path := filepath.Join(dir, "s", journalName)
	whole, err := os.ReadFile(path)
	needNil(t, err)

	for cut := size; cut < int64(len(whole)); cut++ {
		torn := whole[size:cut]
		resetSession(t, filepath.Dir(path), whole[:cut])
		j, err := openSession(root, "s", true, "m", "w")
		if err != nil {
			t.Fatalf("cut at %d: %v", cut-size, err)
		}
		if got := history(j); got != before || j.running {
			t.Fatalf("cut at %d: history\n%s\nwant\n%s", cut-size, got, before)
		}
		addAll(t, j, oneTurn("after the repair")...)
		j.close()
		recs := readRecords(t, path)
		saved, err := filepath.Glob(filepath.Join(dir, "s", "torn-*.bin"))
		needNil(t, err)
		if len(torn) == 0 {
			if len(saved) != 0 || strings.Contains(kinds(recs), recRecovered) {
				t.Fatalf("nothing was torn, yet %v, %s", saved, kinds(recs))
			}
			continue
		}
		note := recs[7]
		if note.Type != recRecovered || note.Bytes != len(torn) || len(saved) != 1 || filepath.Base(saved[0]) != note.Saved {
			t.Fatalf("cut at %d: note %+v, saved %v", cut-size, note, saved)
		}
		if kept, err := os.ReadFile(saved[0]); err != nil || !bytes.Equal(kept, torn) {
			t.Fatalf("cut at %d: kept %q, want %q (%v)", cut-size, kept, torn, err)
		}
		if st, err := os.Stat(saved[0]); err != nil || st.Mode() != 0o600 {
			t.Fatalf("the torn part has mode %v (%v)", st.Mode(), err)
		}
	}
}

// resetSession makes the session's directory hold this journal alone.
func resetSession(t *testing.T, dir string, data []byte) {
	t.Helper()
	needNil(t, os.RemoveAll(dir))
	needNil(t, os.Mkdir(dir, 0o700))
	needNil(t, os.WriteFile(filepath.Join(dir, journalName), data, 0o600))
}

// TestTornAndDamaged: what may be cut and what must be left as it is.
func TestTornAndDamaged(t *testing.T) {
	root, dir := openTestStore(t)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(t, err)
	addAll(t, j, oneTurn("first")...)
	j.close()
	data, err := os.ReadFile(filepath.Join(dir, "s", journalName))
	needNil(t, err)
	lines := strings.SplitAfter(strings.TrimSuffix(string(data), "\n"), "\n")
	lines[len(lines)-1] += "\n"
	join := func(change func(l []string) []string) string {
		return strings.Join(change(append([]string(nil), lines...)), "")
	}
	with := func(i int, line string) string {
		return join(func(l []string) []string { l[i] = line; return l })
	}
	tests := []struct {
		name, data string
		damaged    string // the record that the error names
	}{
		{"NUL bytes behind", string(data) + strings.Repeat("\x00", 4096), ""},
		{"a line of NUL bytes behind", string(data) + "\x00\x00\n", ""},
		{"an empty line behind", string(data) + "\n", ""},
		{"two torn lines behind", string(data) + "{\"n\":7,\n\"type\":", ""},
		{"a whole record without its newline", string(data) + strings.TrimSuffix(strings.Replace(lines[1], `"n":1`, `"n":7`, 1), "\n"), ""},
		{"a bad last line", with(6, "{\"n\":6,\"type\":\"turn_e\n"), ""},
		{"two records on the last line", with(6, strings.TrimSuffix(lines[6], "\n")+lines[6]), ""},
		{"a bad line in the middle", with(3, "garbage\n"), "record 3"},
		{"a byte that is no UTF-8 in the middle", with(3, strings.Replace(lines[3], `"type":"`, "\"type\":\"\xff", 1)), "record 3"},
		{"a byte that is no UTF-8 in the last line", with(6, strings.Replace(lines[6], `"type":"`, "\"type\":\"\xff", 1)), ""},
		{"a bad line in the middle and a torn tail", with(3, "garbage\n") + "{\"n\"", "record 3"},
		{"a lost line", join(func(l []string) []string { return append(l[:3], l[4:]...) }), "record 3"},
		{"a line twice", join(func(l []string) []string { return append(l, l[6]) }), "record 7"},
		{"lines swapped", join(func(l []string) []string { l[2], l[3] = l[3], l[2]; return l }), "record 2"},
		{"two records on a line in the middle", with(3, strings.TrimSuffix(lines[3], "\n")+lines[3]), "record 3"},
		{"an empty line in the middle", with(3, "\n"+lines[3]), "record 3"},
		{"no first record", join(func(l []string) []string { return l[1:] }), "record 0"},
		{"a record of a wrong type", with(6, "{\"n\":\"6\"}\n"), "record 6"},
		{"a number as a line", with(6, "6\n"), "record 6"},
		{"a later format", with(0, strings.Replace(lines[0], `"format":1`, `"format":2`, 1)), "record 0"},
		{"another session's journal", with(0, strings.Replace(lines[0], `"session":"s"`, `"session":"t"`, 1)), "record 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			resetSession(t, filepath.Join(dir, "s"), []byte(tt.data))
			before := treeOf(t, dir)
			j, err := openSession(root, "s", true, "m", "w")
			if tt.damaged != "" {
				if !errors.Is(err, errDamaged) || !strings.HasSuffix(err.Error(), tt.damaged) {
					t.Errorf("error %v, want errDamaged at %s", err, tt.damaged)
				}
				got, _ := os.ReadFile(filepath.Join(dir, "s", journalName))
				if after := treeOf(t, dir); string(got) != tt.data || after != before {
					t.Errorf("the damaged session was changed\n%s\nto\n%s", before, after)
				}
				return
			}
			needNil(t, err)
			j.close()
			recs := readRecords(t, filepath.Join(dir, "s", journalName))
			if recs[len(recs)-1].Type != recRecovered && recs[len(recs)-2].Type != recRecovered {
				t.Errorf("records %s, want one that says what was cut", kinds(recs))
			}
			saved, _ := filepath.Glob(filepath.Join(dir, "s", "torn-*.bin"))
			if len(saved) != 1 {
				t.Fatalf("saved %v", saved)
			}
			kept, err := os.ReadFile(saved[0])
			needNil(t, err)
			if i := strings.LastIndex(tt.data, string(kept)); i < 0 || i+len(kept) != len(tt.data) {
				t.Errorf("kept %q is not the end of the journal", kept)
			}
		})
	}
}

func TestATornFirstRecordIsWrittenAnew(t *testing.T) {
	root, dir := openTestStore(t)
	resetSession(t, filepath.Join(dir, "s"), []byte(`{"n":0,"type":"sess`))
	j, err := openSession(root, "s", true, "m", "w")
	needNil(t, err)
	defer j.close()
	if recs := readRecords(t, filepath.Join(dir, "s", journalName)); kinds(recs) != recSession {
		t.Errorf("records %s", kinds(recs))
	}
}

// TestATurnLeftOpenIsEnded: killed after any record of a turn, the next open gives
// a history in which each call has a result and the turn an answer.
func TestATurnLeftOpenIsEnded(t *testing.T) {
	turn := []record{
		{Type: recTurnStart, Message: userMsg("do it")},
		{Type: recAssistant, Message: callsMsg("c1", "c2"), Calls: []string{"c1", "c2"}},
		{Type: recToolStart, Call: "c1", Name: "Bash"},
		{Type: recToolResult, Call: "c1", Message: toolMsg("c1", "ok")},
		{Type: recToolStart, Call: "c2", Name: "Bash"},
		{Type: recToolResult, Call: "c2", Message: toolMsg("c2", "ok")},
		{Type: recAssistant, Message: replyMsg("so far")},
		{Type: recNote, Message: userMsg("go on")},
		{Type: recAssistant, Message: replyMsg("done")},
	}
	const notStarted, unknown = "was not started: the daemon was stopped", "outcome of this call is unknown: the daemon was stopped while it ran"
	wants := [][]string{ // behind the messages of the turn, in order
		{"no answer: the daemon was stopped"},
		{"c1 " + notStarted, "c2 " + notStarted, "no answer"},
		{"c1 " + unknown, "c2 " + notStarted, "no answer"},
		{"c2 " + notStarted, "no answer"},
		{"c2 " + unknown, "no answer"},
		{"no answer"},
		nil,
		{"no answer"},
		nil,
	}
	for i := range turn {
		t.Run(fmt.Sprintf("after %d %s", i, turn[i].Type), func(t *testing.T) {
			root, dir := openTestStore(t)
			j, err := openSession(root, "s", false, "m", "w")
			needNil(t, err)
			addAll(t, j, turn[:i+1]...)
			had := len(j.messages)
			j.close()
			j, err = openSession(root, "s", true, "m", "w")
			needNil(t, err)
			added := j.messages[had:]
			if len(added) != len(wants[i]) {
				t.Fatalf("added %s, want %q", added, wants[i])
			}
			for k, want := range wants[i] {
				var msg struct {
					Role, Content string
					ToolCallID    string `json:"tool_call_id"`
				}
				needNil(t, json.Unmarshal(added[k], &msg))
				role, id, text := "assistant", "", want
				if strings.HasPrefix(want, "c") {
					role = "tool"
					id, text, _ = strings.Cut(want, " ")
				}
				if msg.Role != role || msg.ToolCallID != id || !strings.Contains(msg.Content, text) {
					t.Errorf("message %s, want %q", added[k], want)
				}
			}
			want, records := history(j), j.next
			j.close()
			recs := readRecords(t, filepath.Join(dir, "s", journalName))
			if last := recs[len(recs)-1]; last.Type != recTurnEnd || last.Stop != "interrupted" {
				t.Errorf("last record %+v", last)
			}
			j, err = openSession(root, "s", true, "m", "w")
			needNil(t, err)
			defer j.close()
			if history(j) != want || j.next != records {
				t.Error("a second open changed the session again")
			}
		})
	}
}

func TestEndTurnClosesWhatACancelLeft(t *testing.T) {
	root, _ := openTestStore(t)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(t, err)
	defer j.close()
	addAll(t, j, record{Type: recTurnStart, Message: userMsg("do it")}, record{Type: recAssistant, Message: callsMsg("c1"), Calls: []string{"c1"}})
	needNil(t, j.endTurn("cancelled", "the user cancelled the turn"))
	if j.running || len(j.messages) != 4 || !strings.Contains(history(j), "not started: the user cancelled the turn") {
		t.Errorf("history %s", history(j))
	}
}

func TestTwoWritersOfASession(t *testing.T) {
	root, dir := openTestStore(t)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(t, err)
	j.close()
	const writers, turns = 4, 10
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for done := 0; done < turns; {
				j, err := openSession(root, "s", true, "m", "w")
				if errors.Is(err, errHeld) {
					continue // session_busy: the client comes again
				}
				if err != nil {
					t.Error(err)
					return
				}
				for _, rec := range oneTurn(fmt.Sprintf("writer %d turn %d", w, done)) {
					if err := j.add(rec); err != nil {
						t.Error(err)
					}
				}
				j.close()
				done++
			}
		})
	}
	wg.Wait()
	if recs := readRecords(t, filepath.Join(dir, "s", journalName)); len(recs) != 1+writers*turns*6 {
		t.Errorf("%d records, want %d", len(recs), 1+writers*turns*6)
	}
}

func TestHostileIDsTouchNoFile(t *testing.T) {
	root, dir := openTestStore(t)
	before := treeOf(t, filepath.Dir(dir))
	for _, id := range []string{
		"", ".", "..", "../x", "a/b", "a/../b", "/etc", "a\\b", "A", "aB", "a.b", ".a", "a.", "-a", "a-", "_a", "a_", "-", "_",
		"a\x00b", "a b", "a\n", "\na", "%2e%2e", "ä", "a\u0301", strings.Repeat("a", 65), strings.Repeat("a", 10_000), "a$", "a\xff", "journal.jsonl",
	} {
		for _, resume := range []bool{true, false} {
			if _, err := openSession(root, id, resume, "m", "w"); !errors.Is(err, errBadSessionID) {
				t.Errorf("id %.80q, resume %v: %v, want errBadSessionID", id, resume, err)
			}
		}
	}
	if after := treeOf(t, filepath.Dir(dir)); after != before {
		t.Errorf("files were touched\n%s\nbefore\n%s", after, before)
	}
	for _, id := range []string{"a", "0", "ab", "a-b", "a_b", "a--b", "0-9", strings.Repeat("a", 64)} {
		if !validSessionID(id) {
			t.Errorf("id %q was refused", id)
		}
	}
}

func TestPlantedSymlinksLeadNowhere(t *testing.T) {
	root, dir := openTestStore(t)
	outside := t.TempDir()
	j, err := openSession(root, "real", false, "m", "w")
	needNil(t, err)
	addAll(t, j, oneTurn("secret")...)
	j.close()
	real, err := os.ReadFile(filepath.Join(dir, "real", journalName))
	needNil(t, err)
	needNil(t, os.WriteFile(filepath.Join(outside, journalName), bytes.Replace(real, []byte(`"real"`), []byte(`"dir"`), 1), 0o600))
	needNil(t, os.Symlink(outside, filepath.Join(dir, "dir")))
	needNil(t, os.Symlink(filepath.Join(outside, "gone"), filepath.Join(dir, "dangling")))
	needNil(t, os.Symlink("real", filepath.Join(dir, "inside")))
	for id, target := range map[string]string{"file": filepath.Join(outside, journalName), "new": filepath.Join(outside, "new"), "up": "../../../new"} {
		needNil(t, os.Mkdir(filepath.Join(dir, id), 0o700))
		needNil(t, os.Symlink(target, filepath.Join(dir, id, journalName)))
	}
	before, beforeIn := treeOf(t, outside), treeOf(t, filepath.Dir(dir))
	for _, id := range []string{"dir", "dangling", "inside", "file", "new", "up"} {
		for _, resume := range []bool{true, false} {
			j, err := openSession(root, id, resume, "m", "w")
			if err == nil {
				j.close()
				t.Errorf("%s, resume %v: it was opened", id, resume)
			}
		}
	}
	if after := treeOf(t, outside); after != before {
		t.Errorf("outside was changed\n%s\nto\n%s", before, after)
	}
	if after := treeOf(t, filepath.Dir(dir)); after != beforeIn {
		t.Errorf("the home was changed\n%s\nto\n%s", beforeIn, after)
	}
	list, err := listSessions(root)
	needNil(t, err)
	for _, s := range list {
		if s.Session != "real" && s.Session != "inside" {
			t.Errorf("%s is listed", s.Session)
		}
	}
}

// TestHelperJournal is the child of TestNoRoom and nothing by itself: it changes
// limits and mounts, which cannot be undone in the test's own process.
func TestHelperJournal(t *testing.T) {
	mode, home := os.Getenv(journalHelperEnv), os.Getenv("JOURNAL_TEST_HOME")
	if mode == "" {
		return // the parent's own run
	}
	if mode == "tmpfs" {
		if err := unix.Mount("tmpfs", home, "tmpfs", 0, "size=64k"); err != nil {
			fmt.Println("cannot mount:", err)
			return
		}
	}
	root, err := openStore(home)
	needNil(t, err)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(t, err)
	addAll(t, j, oneTurn("fits")...)
	if mode == "limit" {
		limit := unix.Rlimit{Cur: uint64(j.size) + 500, Max: unix.RLIM_INFINITY}
		needNil(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &limit))
	}
	path := filepath.Join(home, "sessions", "s", journalName)
	want, err := os.ReadFile(path)
	needNil(t, err)
	big := record{Type: recTurnStart, Message: userMsg(strings.Repeat("x", 256<<10))}
	for range 3 {
		if err := j.add(big); !storageFull(err) {
			t.Fatalf("a record without room: %v, want one that storageFull knows", err)
		}
		got, err := os.ReadFile(path)
		needNil(t, err)
		if !bytes.Equal(got, want) {
			t.Fatalf("the journal has %d bytes, want its %d as before", len(got), len(want))
		}
	}
	small := record{Type: recTurnStart, Message: userMsg("small")}
	needNil(t, j.add(small)) // there is still room for this one
	needNil(t, j.endTurn("storage_full", "no room"))
	if last := readRecords(t, path); kinds(last[7:]) != "turn_start turn_end" {
		t.Errorf("records behind: %s", kinds(last[7:]))
	}
	j.close()
	if mode == "tmpfs" { // without room to save a torn end nothing is cut, and no part of it is left
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		needNil(t, err)
		_, err = f.WriteString(strings.Repeat("x", 20<<10))
		needNil(t, err)
		torn, err := os.ReadFile(path)
		needNil(t, err)
		os.WriteFile(filepath.Join(home, "filler"), make([]byte, 64<<10), 0o600) // as far as it goes
		for range 3 {
			if _, err := openSession(root, "s", true, "m", "w"); !storageFull(err) {
				t.Fatalf("a torn end without room to save it: %v", err)
			}
		}
		left, _ := os.ReadDir(filepath.Dir(path))
		if got, _ := os.ReadFile(path); len(left) != 1 || !bytes.Equal(got, torn) {
			t.Fatalf("left %v, and the journal has %d bytes, want %d", left, len(got), len(torn))
		}
	}
	fmt.Println("passed")
}

func TestNoRoom(t *testing.T) {
	for _, mode := range []string{"limit", "tmpfs"} {
		t.Run(mode, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestHelperJournal$", "-test.timeout=60s")
			cmd.Env = append(os.Environ(), journalHelperEnv+"="+mode, "JOURNAL_TEST_HOME="+t.TempDir())
			if mode == "tmpfs" {
				if os.Geteuid() != 0 {
					t.Skip("only root can mount a small tmpfs for ENOSPC; EFBIG is tested by the limit")
				}
				cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			}
			out, err := cmd.CombinedOutput()
			if mode == "tmpfs" && (errors.Is(err, syscall.EPERM) || strings.Contains(string(out), "cannot mount:")) {
				t.Skipf("this container may not mount a small tmpfs for ENOSPC (%v %s); EFBIG is tested by the limit", err, out)
			}
			if err != nil || !strings.Contains(string(out), "passed") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestABrokenJournalTakesNothingMore: after an error that is not for lack of room
// nobody knows what is on disk, so that nothing is added behind it.
func TestABrokenJournalTakesNothingMore(t *testing.T) {
	root, dir := openTestStore(t)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(t, err)
	if err := j.add(record{Type: recAssistant, Message: json.RawMessage("{broken")}); err == nil || storageFull(err) {
		t.Fatalf("a broken message: %v", err)
	}
	if err := j.add(record{Type: recTurnStart, Message: userMsg("x")}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after it: %v, want that the journal is closed", err)
	}
	if recs := readRecords(t, filepath.Join(dir, "s", journalName)); kinds(recs) != recSession {
		t.Errorf("records %s", kinds(recs))
	}
	j, err = openSession(root, "s", true, "m", "w")
	needNil(t, err)
	j.close()
}

// FuzzJournal: whatever lies behind whole records, either the session is damaged and
// not a byte is changed, or it opens, keeps them all, and opens again unchanged.
func FuzzJournal(f *testing.F) {
	f.Add([]byte("{\"n\":1,\"type\":\"turn_start\"}\n{\"n\":2,"))
	f.Add([]byte("\x00\x00\n\n"))
	f.Add([]byte("{\"n\":1,\"type\":\"assistant\",\"calls\":[\"a\",\"a\"]}\n{\"n\":2,\"type\":\"turn_start\"}\n"))
	f.Add([]byte("{\"n\":1,\"type\":\"later\",\"new\":{}}\n"))
	f.Fuzz(func(t *testing.T, tail []byte) {
		root, dir := openTestStore(t)
		head := []byte(`{"n":0,"type":"session","time":"2026-01-02T03:04:05Z","format":1,"session":"s"}` + "\n")
		data := append(head, tail...)
		resetSession(t, filepath.Join(dir, "s"), data)
		path := filepath.Join(dir, "s", journalName)
		j, err := openSession(root, "s", true, "m", "w")
		got, readErr := os.ReadFile(path)
		needNil(t, readErr)
		if err != nil {
			if !errors.Is(err, errDamaged) || !bytes.Equal(got, data) {
				t.Fatalf("%v; the journal is %q, was %q", err, got, data)
			}
			return
		}
		want, next := history(j), j.next
		if j.running {
			t.Fatal("a turn is left open")
		}
		j.close()
		j, err = openSession(root, "s", true, "m", "w")
		needNil(t, err)
		j.close()
		if history(j) != want || j.next != next {
			t.Fatalf("a second open reads\n%s\nwant\n%s", history(j), want)
		}
		again, err := os.ReadFile(path)
		needNil(t, err)
		if !bytes.Equal(again, got) {
			t.Fatal("a second open changed the journal")
		}
	})
}

// newSession makes a store with one session, s, both closed at the end.
func newSession(tb testing.TB) (*os.Root, *journal) {
	root, err := openStore(tb.TempDir())
	needNil(tb, err)
	j, err := openSession(root, "s", false, "m", "w")
	needNil(tb, err)
	tb.Cleanup(func() { j.close(); root.Close() })
	return root, j
}

func BenchmarkOpenSession(b *testing.B) {
	root, j := newSession(b)
	for j.size < 4<<20 {
		if err := j.add(record{Type: recAssistant, Message: replyMsg(strings.Repeat("some text ", 1000))}); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(j.size)
	j.close()
	for b.Loop() {
		j, err := openSession(root, "s", true, "m", "w")
		if err != nil {
			b.Fatal(err)
		}
		j.close()
	}
}

func BenchmarkAddSynced(b *testing.B) {
	_, j := newSession(b)
	for b.Loop() {
		if err := j.add(record{Type: recToolStart, Call: "c", Name: "Bash"}); err != nil {
			b.Fatal(err)
		}
	}
}

//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// serve_test.go runs the built daemon under the name loopd against a fake
// llama-server on a unix socket. Nothing here asserts a time.

const fakeTemplate = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

// fakeLlama is the server: /props, /tokenize, and completions, of which those
// of the check are told from those of turns by what they ask.
type fakeLlama struct {
	t    testing.TB
	path string

	mu      sync.Mutex
	srv     *http.Server
	props   map[string]any                       // guarded by mu, as is all below
	answers map[string]any                       // of the check, by "props", "tokenize", "tool_call", "turn1", "turn2"
	turn    func(n int, body map[string]any) any // the answer to completion n of the turns, from 0
	seen    []string                             // every request: its path, completions by their kind
	bodies  []map[string]any                     // of the turns
}

func newFakeLlama(t testing.TB) *fakeLlama {
	dir := shortHome(t)
	needNil(t, os.Chmod(dir, 0o755))
	f := &fakeLlama{t: t, path: filepath.Join(dir, "l.sock"), answers: map[string]any{},
		props: map[string]any{"total_slots": 2, "chat_template": fakeTemplate, "eos_token": "</s>", "default_generation_settings": map[string]any{"n_ctx": 131072}},
		turn:  func(int, map[string]any) any { return say("fine") }}
	f.start()
	t.Cleanup(f.stop)
	return f
}

func (f *fakeLlama) start() {
	f.t.Helper()
	os.Remove(f.path)
	ln, err := net.Listen("unix", f.path)
	needNil(f.t, err)
	needNil(f.t, os.Chmod(f.path, 0o777)) // the daemon may be another user
	srv := &http.Server{Handler: f}
	f.mu.Lock()
	f.srv = srv
	f.mu.Unlock()
	go srv.Serve(ln)
}

func (f *fakeLlama) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.srv.Close()
}

// usageReply is a reply of the check with its counts.
func usageReply(text string, input, cached int) string {
	return delta(map[string]any{"content": text}, nil) + chunk(map[string]any{"choices": []any{map[string]any{"index": 0, "delta": map[string]any{}, "finish_reason": "stop"}},
		"usage": map[string]any{"prompt_tokens": input, "completion_tokens": 2, "prompt_tokens_details": map[string]any{"cached_tokens": cached}}}) + "data: [DONE]\n\n"
}

func (f *fakeLlama) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return // the daemon was killed while it sent
	}
	var body map[string]any
	json.Unmarshal(raw, &body)
	kind := strings.TrimPrefix(r.URL.Path, "/")
	var reply any
	f.mu.Lock()
	switch {
	case kind == "props":
		reply = f.props
	case kind == "tokenize":
		reply = map[string]any{"tokens": make([]int, max(1, len(body["content"].(string))/4))}
	case bytes.Contains(raw, []byte("loop_selftest")):
		kind, reply = "tool_call", calls("loop_selftest", map[string]any{"word": "ready"})
	case bytes.Contains(raw, []byte("Answer with the word two.")):
		kind, reply = "turn2", usageReply("two", 1320, 1290)
	case bytes.Contains(raw, []byte("Answer with the word one.")):
		kind, reply = "turn1", usageReply("one", 1300, 0)
	default:
		kind = "turn"
		reply = f.turn(len(f.bodies), body)
		f.bodies = append(f.bodies, body)
	}
	f.seen = append(f.seen, kind)
	if other := f.answers[kind]; other != nil {
		reply = other
	}
	f.mu.Unlock()
	switch reply := reply.(type) {
	case string:
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, reply)
	case func(http.ResponseWriter, *http.Request):
		reply(w, r)
	default:
		json.NewEncoder(w).Encode(reply)
	}
}

// count gives the number of requests of the kinds.
func (f *fakeLlama) count(kinds ...string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range f.seen {
		if slices.Contains(kinds, k) {
			n++
		}
	}
	return n
}

func (f *fakeLlama) body(n int) map[string]any {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bodies[n]
}

// home is a home with the configuration of the acceptance test.
func (f *fakeLlama) home(more string) string {
	f.t.Helper()
	home := shortHome(f.t)
	needNil(f.t, os.Chmod(home, 0o755))
	text := fmt.Sprintf("%s\n[infer]\nsocket = %q\nmodel = \"test-model\"\n[slots]\nmain = 0\nbackground = 1\n[expect]\ntemplate_sha256 = %q\nn_ctx = 131072\nslots = 2\n"+
		"[limits]\npoll_ms = 40\nliveness_ms = 500\nretry_backoff_ms = [10]\n%s\n[paths]\nhome = %q\n", "# belay", f.path, templateSum(fakeTemplate), more, home)
	needNil(f.t, os.WriteFile(filepath.Join(home, "config.toml"), []byte(text), 0o644))
	return home
}

// testDaemon is one loopd under test.
type testDaemon struct {
	t      testing.TB
	home   string
	cmd    *exec.Cmd
	err    lockedBuffer
	waited chan struct{}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// loopd starts the daemon of a home by its second name.
func loopd(t testing.TB, home string, args ...string) *testDaemon {
	t.Helper()
	d := &testDaemon{t: t, home: home, waited: make(chan struct{})}
	d.cmd = exec.Command(filepath.Join(filepath.Dir(belayBinary(t)), "loopd"), append([]string{"serve", "--config", filepath.Join(home, "config.toml")}, args...)...)
	d.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + os.TempDir()}
	d.cmd.Dir, d.cmd.Stderr = "/", &d.err
	return d
}

func (d *testDaemon) start() *testDaemon {
	d.t.Helper()
	needNil(d.t, d.cmd.Start())
	go func() { d.cmd.Wait(); close(d.waited) }()
	d.t.Cleanup(func() {
		d.cmd.Process.Kill()
		<-d.waited
		if strings.Contains(d.err.String(), "DATA RACE") || strings.Contains(d.err.String(), "panic") {
			d.t.Errorf("the daemon's stderr:\n%s", d.err.String())
		}
	})
	return d
}

// serving starts the daemon and waits until it answers.
func (d *testDaemon) serving() *testDaemon {
	d.t.Helper()
	d.start()
	until(d.t, "the daemon answers; stderr: "+d.err.String(), deadline, func() bool {
		select {
		case <-d.waited:
			d.t.Fatalf("the daemon ended:\n%s", d.err.String())
		default:
		}
		return d.answers()
	})
	return d
}

func (d *testDaemon) end() int {
	d.t.Helper()
	select {
	case <-d.waited:
	case <-time.After(deadline):
		d.cmd.Process.Signal(syscall.SIGQUIT)
		<-d.waited
		d.t.Fatalf("the daemon did not end:\n%s", d.err.String())
	}
	return d.cmd.ProcessState.ExitCode()
}

// signalToTheEnd sends a signal to a process until it has ended.
func signalToTheEnd(t testing.TB, what string, p *os.Process, sig syscall.Signal, waited <-chan struct{}) {
	t.Helper()
	until(t, what, deadline, func() bool {
		p.Signal(sig)
		select {
		case <-waited:
			return true
		case <-time.After(50 * time.Millisecond):
			return false
		}
	})
}

func (d *testDaemon) kill() {
	d.cmd.Process.Kill()
	<-d.waited
}

func (d *testDaemon) socket() string { return socketPath(d.home) }

// answers: a turn that resumes a session that does not exist gets its error.
func (d *testDaemon) answers() bool {
	c, err := net.Dial("unix", d.socket())
	if err != nil {
		return false
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	frame, _ := encodeFrame(1<<20, 7, true, &wireRequest{Type: "turn", Session: "probe", Content: "are you there", Resume: true})
	c.Write(frame)
	e, err := readFrame(c, 1<<20, func() {})
	var m wireError
	return err == nil && json.Unmarshal(e.Msg, &m) == nil && e.ID == 7 && e.Final && m.Code == codeNoSuchSession
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	fi, err := os.Lstat(path)
	needNil(t, err)
	return fi.Sys().(*syscall.Stat_t).Ino
}

func hasLine(text, line string) bool {
	return slices.Contains(strings.Split(text, "\n"), line)
}

func TestSeedASecondDaemonIsRefusedAndTheFirstServesOn(t *testing.T) {
	f := newFakeLlama(t)
	first := loopd(t, f.home("")).serving()
	before, sent := inode(t, first.socket()), f.count("props", "tokenize", "tool_call", "turn1", "turn2")
	if n := f.count("tool_call", "turn1", "turn2"); n != 3 {
		t.Errorf("the check made %d completions, want 3", n)
	}
	second := loopd(t, first.home).start()
	code, line := second.end(), fmt.Sprintf("loopd: another loopd is running (it holds %s/run/loopd.lock); see docs/runbook.md#already-running", first.home)
	if stderr := second.err.String(); code != 1 || !hasLine(stderr, line) || strings.Contains(stderr, "selftest") {
		t.Errorf("code %d, stderr:\n%s", code, stderr)
	}
	if n := f.count("props", "tokenize", "tool_call", "turn1", "turn2"); n != sent {
		t.Errorf("the second sent the server %d requests", n-sent)
	}
	if inode(t, first.socket()) != before || !first.answers() {
		t.Error("the first serves no more, or on another socket")
	}
}

func TestSeedAfterAKillTheNextRemovesTheStaleSocketAndServes(t *testing.T) {
	f := newFakeLlama(t)
	first := loopd(t, f.home("")).serving()
	first.kill()
	if _, err := os.Lstat(first.socket()); err != nil || first.answers() {
		t.Fatalf("a killed daemon leaves its socket and serves nobody: %v", err)
	}
	next := loopd(t, first.home).serving()
	fi, err := os.Stat(lockPath(next.home))
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("lock: %v %v", fi, err)
	}
	if n := f.count("tool_call", "turn1", "turn2"); n != 6 {
		t.Errorf("%d completions, want 6", n)
	}
}

func TestSeedARunDirectoryThatCannotBeWritten(t *testing.T) {
	f := newFakeLlama(t)
	home := f.home("")
	run := filepath.Join(home, "run")
	d := loopd(t, home)
	needNil(t, os.Mkdir(run, 0o700))
	if os.Geteuid() == 0 {
		needNil(t, errors.Join(os.Chown(home, nobodyID, nobodyID), os.Chown(run, nobodyID, nobodyID)))
		d.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobodyID, Gid: nobodyID}}
	}
	needNil(t, os.Chmod(run, 0o500))
	t.Cleanup(func() { os.Chmod(run, 0o700) })
	code := d.start().end()
	line := fmt.Sprintf("loopd: cannot take the lock %s/loopd.lock: Permission denied (os error 13); see docs/runbook.md#already-running", run)
	if code != 1 || !hasLine(d.err.String(), line) {
		t.Errorf("code %d, stderr:\n%s", code, d.err.String())
	}
	if n := f.count("props", "tokenize", "tool_call"); n > 0 {
		t.Errorf("the server got %d requests", n)
	}
	if _, err := os.Lstat(d.socket()); err == nil {
		t.Error("there is a socket")
	}
}

// wire is a client's end of a connection.
type wire struct {
	t testing.TB
	net.Conn
}

func (d *testDaemon) dial() *wire {
	d.t.Helper()
	c, err := net.Dial("unix", d.socket())
	needNil(d.t, err)
	d.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(deadline))
	return &wire{d.t, c}
}

func (w *wire) send(id int64, r wireRequest) *wire {
	w.t.Helper()
	frame, err := encodeFrame(8<<20, id, true, &r)
	needNil(w.t, err)
	_, err = w.Write(frame)
	needNil(w.t, err)
	return w
}

// anyReply is whatever the daemon says.
type anyReply struct {
	wireReply
	Code    errorCode
	Message string
	Retry   string
	Anchor  string
	Data    json.RawMessage `json:"data"`
	id      int64
	final   bool
}

func (m anyReply) kind() string {
	if m.Type == "event" {
		return str(parse(m.Event).get("type"))
	}
	return m.Type + string(m.Code) + m.Stop
}

func (w *wire) next() anyReply {
	w.t.Helper()
	e, err := readFrame(w, 15<<20, func() {})
	needNil(w.t, err)
	var m anyReply
	needNil(w.t, json.Unmarshal(e.Msg, &m))
	m.id, m.final = e.ID, e.Final
	return m
}

// final reads to the last frame of a request and gives it with the kinds of all.
func (w *wire) final(id int64) (anyReply, []string) {
	w.t.Helper()
	for kinds := []string(nil); ; {
		m := w.next()
		if m.id == id {
			kinds = append(kinds, m.kind())
		}
		if m.id == id && m.final {
			return m, kinds
		}
	}
}

// until reads to an event of a kind.
func (w *wire) until(kind string) anyReply {
	w.t.Helper()
	for {
		if m := w.next(); m.kind() == kind {
			return m
		} else if m.final {
			w.t.Fatalf("%s %s came before %s", m.kind(), m.Message, kind)
		}
	}
}

func (w *wire) want(id int64, kind string) anyReply {
	w.t.Helper()
	m, kinds := w.final(id)
	if m.kind() != kind {
		w.t.Errorf("request %d ended with %s (%s), want %s; %v", id, m.kind(), m.Message, kind, kinds)
	}
	return m
}

func aTurn(session, content string, resume bool) wireRequest {
	return wireRequest{Type: "turn", Session: session, Content: content, Resume: resume}
}

func (d *testDaemon) status() (s struct {
	Phase           string
	Running         []string
	Queued, Clients int
	Tools           bool
}) {
	d.t.Helper()
	needNil(d.t, json.Unmarshal(d.dial().send(1, wireRequest{Type: "status"}).want(1, "status").Status, &s))
	return s
}

func (d *testDaemon) journal(session string) []record {
	d.t.Helper()
	return readRecords(d.t, filepath.Join(d.home, "sessions", session, journalName))
}

// streaming begins an answer and holds it until the client leaves or release is closed.
func streaming(release <-chan struct{}) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, delta(map[string]any{"content": "first "}, nil))
		w.(http.Flusher).Flush()
		for {
			select {
			case <-release:
				io.WriteString(w, say("last"))
				return
			case <-r.Context().Done():
				return
			case <-time.After(50 * time.Millisecond): // the limit of silence is 500 ms
				io.WriteString(w, ":\n\n")
				w.(http.Flusher).Flush()
			}
		}
	}
}

// held has the first turn wait for release in the middle of its answer; the
// others get text at once.
func (f *fakeLlama) held(text string) (release chan struct{}) {
	release = make(chan struct{})
	f.turn = func(n int, _ map[string]any) any { return []any{streaming(release), say(text)}[min(n, 1)] }
	return release
}

func TestCheckOfTheServer(t *testing.T) {
	t.Parallel()
	props := func(change func(map[string]any)) map[string]any {
		p := map[string]any{"total_slots": 2, "chat_template": fakeTemplate, "eos_token": "</s>", "default_generation_settings": map[string]any{"n_ctx": 131072}}
		change(p)
		return p
	}
	set := func(key string, v any) map[string]any { return props(func(p map[string]any) { p[key] = v }) }
	length := delta(map[string]any{"content": "I think"}, nil) + delta(map[string]any{}, "length") + "data: [DONE]\n\n"
	for _, c := range []struct {
		anchor, what string // anchor "": the check passes, and its lines hold what
		kind         string
		answer       any
		completions  int
	}{
		{"server-auth", "401", "props", status(401, `{"error":{"code":401,"message":"Invalid API Key"}}`), 0},
		{"server-loading", "503", "props", status(503, `{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`), 0},
		{"server-not-llama", "expected 200: llama-server gives n_ctx, total_slots and chat_template there; it said \"<html>\"", "props", status(200, "<html>"), 0},
		{"server-router", "router", "props", set("role", "router"), 0},
		{"template-mismatch", "observed-template.jinja", "props", set("chat_template", "other"), 0},
		{"template-mismatch", "last newline", "props", set("chat_template", fakeTemplate+"\n"), 0},
		{"n-ctx-mismatch", "n_ctx, which is per slot, is 65536, the configuration expects 131072", "props", set("default_generation_settings", map[string]any{"n_ctx": 65536}), 0},
		{"slots-mismatch", "total_slots is 4, the configuration expects 2", "props", set("total_slots", 4), 0},
		{"tokenizer", "POST /tokenize: 0 tokens", "tokenize", map[string]any{"tokens": []int{-1}}, 0},
		{"tokenizer", "POST /tokenize: 0 tokens", "tokenize", map[string]any{"tokens": []int{}}, 0},
		{"tool-call-jinja", "--jinja", "tool_call", status(500, `{"error":{"code":500,"message":"tools param requires --jinja flag","type":"server_error"}}`), 1},
		{"tool-call-unparsed", "loop_selftest", "tool_call", say(`<tool_call>{"name": "loop_selftest"}</tool_call>`), 1},
		{"no-tool-call", "I cannot", "tool_call", say("I cannot"), 1},
		{"tool-call-cut", "I think", "tool_call", length, 1},
		{"tool-call-arguments", `"{\"wor"`, "tool_call", delta(map[string]any{"tool_calls": []any{map[string]any{"index": 0, "id": "x", "function": map[string]any{"name": "loop_selftest", "arguments": `{"wor`}}}}, nil) + delta(map[string]any{}, "tool_calls") + "data: [DONE]\n\n", 1},
		{"server-error", "boom", "turn1", status(500, `{"error":{"code":500,"message":"boom"}}`), 2},
		{"prompt-truncated", "2051 prompt tokens"[4:], "turn1", usageReply("one", 51, 0), 2},
		{"no-prefix-cache", "12 of turn 1's 1300", "turn2", usageReply("two", 1320, 12), 3},
		{"no-prefix-cache", "12 of turn 1's 1300", "turn2", strings.Replace(usageReply("two", 1320, 0), `,"prompt_tokens_details":{"cached_tokens":0}}`, `},"timings":{"cache_n":12}`, 1), 3},
		{"", "warning: POST /v1/chat/completions, tool call: called \"other_tool\"", "tool_call", calls("other_tool", map[string]any{"word": "no"}), 3},
		{"", "warning: POST /v1/chat/completions, turn 2: 800 of", "turn2", usageReply("two", 1320, 800), 3},
		{"", "but the server does not count them", "turn2", say("two"), 3},
		{"", "1290 of turn 1's 1300", "none", nil, 3},
	} {
		t.Run(c.anchor+" "+c.kind, func(t *testing.T) {
			f := newFakeLlama(t)
			f.answers[c.kind] = c.answer
			d := loopd(t, f.home("load_timeout_ms = 1000"))
			if c.anchor == "" {
				if d.serving(); !strings.Contains(d.err.String(), c.what) {
					t.Errorf("stderr lacks %q:\n%s", c.what, d.err.String())
				}
				return
			}
			code := d.start().end()
			all := strings.Split(strings.TrimSpace(d.err.String()), "\n")
			if last := fmt.Sprintf("loopd: selftest failed: %s; see docs/runbook.md#%s", c.anchor, c.anchor); code != 1 || all[len(all)-1] != last || !strings.Contains(d.err.String(), c.what) {
				t.Errorf("code %d, want 1, %q and as last line\n%s\nstderr:\n%s", code, c.what, last, d.err.String())
			}
			if n := f.count("tool_call", "turn1", "turn2"); n != c.completions {
				t.Errorf("%d completions, want %d: nothing is sent after a failure", n, c.completions)
			}
			for _, line := range all {
				if !strings.HasPrefix(line, "loopd: selftest") {
					t.Errorf("a line of the check does not begin so: %s", line)
				}
			}
		})
	}
}

// Some servers show the request that they refuse.
func TestACheckShowsNoKey(t *testing.T) {
	t.Parallel()
	noHTTP := func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		needNil(t, err)
		fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\n%s%s\r\n\r\n", testKey, strings.Repeat("x", 1<<20))
		conn.Close()
	}
	cut := strings.Repeat("x", saidMax-9) + testKey // what is shown ends in the middle of it
	for name, answers := range map[string]map[string]any{
		"refused":   {"props": status(401, "no luck with "+testKey)},
		"cut":       {"props": status(500, cut)},
		"no HTTP":   {"props": noHTTP},
		"tokenizer": {"tokenize": status(200, testKey)},
		"a call":    {"tool_call": calls("loop_selftest", map[string]any{"word": testKey}), "turn1": status(401, testKey)},
		"no call":   {"tool_call": say(testKey)},
	} {
		f := newFakeLlama(t)
		f.answers = answers
		d := loopd(t, f.home(""))
		d.cmd.Env = append(d.cmd.Env, "BELAY_API_KEY="+testKey)
		if code := d.start().end(); code != 1 || d.err.b.Len() > 2*maxMessage || strings.Contains(d.err.String(), testKey[:9]) || !strings.Contains(d.err.String(), "[key]") && name != "cut" {
			t.Errorf("%s: code %d, stderr:\n%s", name, code, d.err.String())
		}
		if answers["props"] != nil {
			probe := prepare(t, []string{"BELAY_API_KEY=" + testKey}, "probe", "--config", filepath.Join(d.home, "config.toml")).finish(1)
			if strings.Contains(probe.err.String(), testKey[:9]) {
				t.Errorf("%s: probe says %s", name, probe.err.String())
			}
		}
	}
}

func TestServerThatIsNotThere(t *testing.T) {
	f := newFakeLlama(t)
	f.stop()
	d := loopd(t, f.home(""))
	if code := d.start().end(); code != 1 || !strings.Contains(d.err.String(), "selftest failed: server-unreachable;") || !regexp.MustCompile(`: selftest: GET /props at .* \(os error \d+\)\n`).MatchString(d.err.String()) {
		t.Errorf("code %d:\n%s", code, d.err.String())
	}
	waiting := loopd(t, d.home, "--set", "infer.wait_for_server=true", "--set", "limits.poll_ms=60000").start()
	until(t, "it waits", deadline, func() bool { return strings.Contains(waiting.err.String(), "selftest: waiting") })
	waiting.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-waiting.waited:
	case <-time.After(deadline / 3):
		t.Error("the signal waits for the next look at the server")
	}
	if code := waiting.end(); code != 0 {
		t.Errorf("code %d of one that was told to end while it waited:\n%s", code, waiting.err.String())
	}
	waiting = loopd(t, d.home, "--set", "infer.wait_for_server=true").start()
	until(t, "it waits", deadline, func() bool { return strings.Contains(waiting.err.String(), "selftest: waiting") })
	f.start()
	until(t, "it serves once the server is there", deadline, waiting.answers)
}

func TestATurnFromItsStreamToItsJournal(t *testing.T) {
	f := newFakeLlama(t)
	work := t.TempDir()
	needNil(t, os.WriteFile(filepath.Join(work, "a.txt"), []byte("hello\n"), 0o644))
	f.turn = func(n int, _ map[string]any) any {
		return []any{bash("cat a.txt"), say("it says hello"), bash("cat a.txt"), say("again")}[n]
	}
	d := loopd(t, f.home("max_queue = 2"), "--workspace", work, "--set", "exec.sandbox=danger-full-access").serving()
	w := d.dial()
	m, order := w.send(7, aTurn("s", "read it", false)).final(7)
	if want := "started start tool_use turn_usage tool_result content turn_usage resultend"; strings.Join(order, " ") != strings.Replace(want, "tool_use turn_usage", "turn_usage tool_use", 1) || m.Text != "it says hello" || m.Turn != 1 || len(m.Usage) == 0 {
		t.Errorf("%v %+v", order, m)
	}
	if got := kinds(d.journal("s")); got != "session turn_start assistant tool_start tool_result assistant turn_end" {
		t.Error(got)
	}
	second := aTurn("s", "again", true)
	second.From = 99 // a field of attach, as another client may know it: here it counts for nothing
	if m, seen := w.send(8, second).final(8); m.Turn != 2 || !slices.Equal(seen, order) {
		t.Errorf("turn %d: %v %s", m.Turn, seen, m.Message)
	}
	body := f.body(3)
	if body["id_slot"] != 0.0 || body["cache_prompt"] != true || body["stream"] != true {
		t.Errorf("%v", body)
	}
	// The whole history goes out, each call with its own id although the server repeats them.
	ids := map[any]bool{}
	for _, m := range body["messages"].([]any) {
		if id := m.(map[string]any)["tool_call_id"]; id != nil {
			ids[id] = true
		}
	}
	if len(ids) != 2 {
		t.Errorf("call ids %v, want 2 of them", ids)
	}
	// What was sent once is sent again byte for byte.
	first, _ := json.Marshal(f.body(1)["messages"])
	last, _ := json.Marshal(body["messages"])
	if !bytes.HasPrefix(last, bytes.TrimSuffix(first, []byte("]"))) {
		t.Errorf("%s\nis no start of\n%s", first, last)
	}
	w.send(9, aTurn("s", "x", false)).want(9, "errorsession_exists")
	w.send(10, aTurn("none", "x", true)).want(10, "errorno_such_session")
	w.send(11, aTurn("../x", "x", true)).want(11, "errorbad_session_id")
	w.send(12, aTurn("s", strings.Repeat("x", contentMax+1), true)).want(12, "errorcontent_too_large")
	w.send(13, aTurn("s", "", true)).want(13, "errorbad_request")
	w.send(14, wireRequest{Type: "dance"}).want(14, "errorunknown_message")
	if m = w.send(15, wireRequest{Type: "attach", Session: "s"}).want(15, "resultend"); m.Text != "again" || m.Turn != 2 {
		t.Errorf("%+v", m)
	}
	w.send(16, wireRequest{Type: "ping", Data: "x"}).want(16, "pong")
	w.send(17, wireRequest{Type: "cancel", Session: "s"}).want(17, "ok")
	var list []sessionInfo
	if json.Unmarshal(w.send(18, wireRequest{Type: "sessions"}).want(18, "sessions").Sessions, &list); len(list) != 1 || list[0].Session != "s" {
		t.Errorf("%v", list)
	}
	if _, err := os.Stat(filepath.Join(d.home, "sessions", "none")); err == nil {
		t.Error("a refused turn left a session")
	}
}

func TestCancelFromElsewhereAtEveryPoint(t *testing.T) {
	f := newFakeLlama(t)
	tag := newTag(t)
	gone := make(chan struct{}, 10)
	f.turn = func(n int, body map[string]any) any {
		all, _ := json.Marshal(body["messages"].([]any)[len(body["messages"].([]any))-1])
		switch {
		case bytes.Contains(all, []byte("PROMPT")):
			return func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(w, chunk(map[string]any{"choices": []any{}, "prompt_progress": map[string]any{"processed": 10, "total": 100}}))
				w.(http.Flusher).Flush()
				hang(w, r)
				gone <- struct{}{}
			}
		case bytes.Contains(all, []byte("STREAM")):
			return func(w http.ResponseWriter, r *http.Request) { streaming(nil)(w, r); gone <- struct{}{} }
		case bytes.Contains(all, []byte("TOOL")):
			return bash("/proc/self/exe victim " + tag + " setsid & sleep 600; : " + tag)
		}
		return say("ok")
	}
	d := loopd(t, f.home(""), "--workspace", t.TempDir(), "--set", "exec.sandbox=danger-full-access", "--set", "limits.liveness_ms=20000").serving()
	for _, c := range []struct{ content, event string }{{"PROMPT", "progress"}, {"STREAM", "content"}, {"TOOL", "tool_use"}} {
		w, name := d.dial(), strings.ToLower(c.content)
		w.send(1, aTurn(name, c.content, false)).until(c.event)
		d.dial().send(1, aTurn(name, "x", true)).want(1, "errorsession_busy")
		d.dial().send(1, wireRequest{Type: "cancel", Session: name}).want(1, "ok")
		w.want(1, "resultcancelled")
		if c.event != "tool_use" {
			<-gone // the server saw the connection close
		}
		recs := d.journal(name)
		if last := recs[len(recs)-1]; last.Type != recTurnEnd || last.Stop != "cancelled" {
			t.Errorf("%s: %s %+v", name, kinds(recs), last)
		}
		// The history stays one that a server takes, and the session goes on.
		w.send(2, aTurn(name, "go on", true)).want(2, "resultend")
	}
	noneLeft(t, tag)
}

func TestAKilledClientsTurnGoesOnAndAnotherAttaches(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("other")
	d := loopd(t, f.home("")).serving()
	first := d.dial()
	first.send(1, aTurn("s", "x", false)).until("content")
	first.Close()
	queued := d.dial()
	m := queued.send(1, aTurn("other", "x", false)).until("queued")
	if string(m.Event) != `{"type":"queued","position":1}` {
		t.Errorf("%s", m.Event)
	}
	if s := d.status(); s.Queued != 1 || len(s.Running) != 1 || s.Running[0] != "s" || s.Phase != "serving" {
		t.Errorf("%+v", s)
	}
	second, late := d.dial(), d.dial()
	second.send(5, wireRequest{Type: "attach", Session: "s"})
	late.send(5, wireRequest{Type: "attach", Session: "s", From: 3})
	if m := late.next(); m.Seq != 3 {
		t.Errorf("attach from 3 began with %d", m.Seq)
	}
	close(release)
	m, order := second.final(5)
	if strings.Join(order, " ") != "started start content content turn_usage resultend" || m.Text != "first last" {
		t.Errorf("%v %+v", order, m)
	}
	late.want(5, "resultend")
	queued.want(1, "resultend")
}

func TestDisconnectCancelsWhereAsked(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any { return []any{streaming(nil), say("fine")}[min(n, 1)] }
	d := loopd(t, f.home("")).serving()
	w, r := d.dial(), aTurn("s", "x", false)
	r.OnDisconnect = "cancel"
	w.send(1, r).until("content")
	w.Close()
	d.dial().send(1, aTurn("other", "y", false)).want(1, "resultend") // once the slot is free
	if m := d.dial().send(1, wireRequest{Type: "attach", Session: "s"}).want(1, "resultcancelled"); m.Turn != 1 {
		t.Errorf("%+v", m)
	}
}

func TestTheQueueIsFirstComeFirstServedAndBounded(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("fine")
	d := loopd(t, f.home("max_queue = 3")).serving()
	w := d.dial()
	w.send(1, aTurn("s1", "turn 1", false)).until("content")
	for i := 2; i <= 4; i++ {
		w.send(int64(i), aTurn(fmt.Sprintf("s%d", i), fmt.Sprint("turn ", i), false)).until("queued")
	}
	d.dial().send(1, aTurn("s5", "x", false)).want(1, "erroroverloaded")
	d.dial().send(1, wireRequest{Type: "cancel", Session: "s3"}).want(1, "ok") // one that waits
	for n := 0; n < 4; {
		if m := w.next(); m.final {
			if n++; n == 1 {
				close(release)
			}
			if n == 1 && m.id != 3 {
				t.Errorf("the first final frame is that of %d", m.id)
			}
		}
	}
	order := ""
	for i := range 3 { // as the server saw them
		all := f.body(i)["messages"].([]any)
		order += fmt.Sprint(all[len(all)-1].(map[string]any)["content"], " ")
	}
	if order != "turn 1 turn 2 turn 4 " {
		t.Errorf("turns in the order %q", order)
	}
}

func TestDrain(t *testing.T) {
	f := newFakeLlama(t)
	tag := newTag(t)
	release := make(chan struct{})
	f.turn = func(n int, _ map[string]any) any {
		return []any{streaming(release), bash("sleep 600; : " + tag), say("x")}[n]
	}
	d := loopd(t, f.home(""), "--workspace", t.TempDir(), "--set", "exec.sandbox=danger-full-access").serving()
	w, q, idle := d.dial(), d.dial(), d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	q.send(1, aTurn("queued", "x", false)).until("queued")
	idle.send(1, wireRequest{Type: "ping"}).want(1, "pong")
	d.cmd.Process.Signal(syscall.SIGTERM)
	q.want(1, "resultinterrupted")
	w.send(2, aTurn("new", "x", false))
	w.want(2, "errordraining")
	close(release) // the running step ends within drain_ms, with its whole answer
	if m := w.want(1, "resultend"); m.Text != "first last" {
		t.Errorf("%+v", m)
	}
	for _, c := range []*wire{w, q, idle} {
		if m := c.next(); m.Type != "bye" || m.id != 0 {
			t.Errorf("%+v", m)
		}
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("after bye: %v", err)
		}
	}
	if code := d.end(); code != 0 {
		t.Errorf("exit code %d\n%s", code, d.err.String())
	}
	if _, err := os.Lstat(d.socket()); err == nil {
		t.Error("the socket is left")
	}
	// The second signal ends a tool that the first one let run, and everything below it.
	d = loopd(t, d.home, "--workspace", t.TempDir(), "--set", "exec.sandbox=danger-full-access").serving()
	w = d.dial()
	w.send(1, aTurn("tool", "x", false)).until("tool_use")
	until(t, "the tool runs", deadline, func() bool { return len(taggedIn(tag)) > 0 })
	d.cmd.Process.Signal(syscall.SIGTERM)
	d2 := d.dial()
	until(t, "it drains", deadline, func() bool { return d.status().Phase == "draining" })
	d2.send(1, wireRequest{Type: "shutdown", Mode: "now"}).want(1, "ok")
	w.want(1, "resultinterrupted")
	if code := d.end(); code != 0 {
		t.Errorf("exit code %d\n%s", code, d.err.String())
	}
	until(t, "the tool is gone", leftWait, func() bool { return len(taggedIn(tag)) == 0 })
	if got := kinds(d.journal("tool")); got != "session turn_start assistant tool_start tool_result turn_end" {
		t.Error(got)
	}
}

// taggedIn gives the processes of a shell command that holds a tag.
func taggedIn(tag string) (pids []string) {
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range names {
		if b, _ := os.ReadFile(name); bytes.Contains(b, []byte(tag)) && !strings.Contains(name, fmt.Sprintf("/%d/", os.Getpid())) {
			pids = append(pids, name)
		}
	}
	return pids
}

// Clients that ask without a pause get every answer before bye, and bye.
func TestByeComesLast(t *testing.T) {
	f := newFakeLlama(t)
	home := f.home("")
	for round := range 4 {
		d := loopd(t, home).serving()
		if round == 0 {
			d.dial().send(1, aTurn("s", "x", false)).want(1, "resultend")
		}
		var clients sync.WaitGroup
		var sent atomic.Int64
		for i := range 30 {
			w, told := d.dial(), ""
			w.send(1, wireRequest{Type: "ping"}).want(1, "pong")
			clients.Go(func() {
				for e, err := readFrame(w, 1<<20, func() {}); err == nil; e, err = readFrame(w, 1<<20, func() {}) {
					told = string(e.Msg)
				}
				if !strings.Contains(told, `"bye"`) {
					t.Errorf("round %d: a client was told %.100s, and no bye", round, told)
				}
			})
			go func() {
				for id := int64(1); ; id++ {
					frame, _ := encodeFrame(1<<20, id, true, &wireRequest{Type: "attach", Session: []string{"s", "none"}[i%2]})
					if _, err := w.Write(frame); err != nil {
						return
					}
					sent.Add(1)
				}
			}()
		}
		until(t, "they ask", deadline, func() bool { return sent.Load() > 500 })
		w := d.dial()
		if m := w.send(1, wireRequest{Type: "shutdown"}).next(); m.Type != "ok" || w.next().Type != "bye" {
			t.Errorf("shutdown: %+v", m)
		}
		clients.Wait()
		if code := d.end(); code != 0 {
			t.Fatalf("code %d:\n%s", code, d.err.String())
		}
	}
}

// Clients that ask for a drain again and again do not keep another one from more.
func TestShutdownNowIsHeardAmongDrains(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(int, map[string]any) any { return streaming(nil) }
	home := f.home("drain_ms = 3600000")
	for round := range 3 {
		d := loopd(t, home).serving()
		d.dial().send(1, aTurn(fmt.Sprint("s", round), "x", false)).until("content")
		var sent atomic.Int64
		for range 8 {
			c := d.dial()
			frame, _ := encodeFrame(1<<20, 1, true, &wireRequest{Type: "shutdown"})
			go io.Copy(io.Discard, c)
			go func() {
				for _, err := c.Write(frame); err == nil; _, err = c.Write(frame) {
					sent.Add(1)
				}
			}()
		}
		until(t, "they ask", deadline, func() bool { return sent.Load() > 100 })
		d.dial().send(1, wireRequest{Type: "shutdown", Mode: "now"}).want(1, "ok")
		if code := d.end(); code != 0 {
			t.Errorf("code %d", code)
		}
	}
}

func TestSignalsAfterTheFirst(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(int, map[string]any) any { return streaming(nil) }
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	d.cmd.Process.Signal(syscall.SIGTERM)
	until(t, "it drains", deadline, func() bool { return d.status().Phase == "draining" })
	// Within a second a signal counts as the same one: it is sent until it counts as the next.
	signalToTheEnd(t, "the second signal cancels", d.cmd.Process, syscall.SIGTERM, d.waited)
	w.want(1, "resultinterrupted")
	if recs := d.journal("s"); recs[len(recs)-1].Stop != "interrupted" {
		t.Errorf("%+v", recs)
	}
}

// The third signal does not wait for what cannot be ended: here a keeper that is stopped.
func TestTheThirdSignalKillsAndLeaves(t *testing.T) {
	t.Parallel()
	f := newFakeLlama(t)
	tag := newTag(t)
	f.turn = func(int, map[string]any) any { return bash("trap '' TERM; sleep 600; : " + tag) }
	d := loopd(t, f.home(""), "--workspace", t.TempDir(), "--set", "exec.sandbox=danger-full-access").serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("tool_use")
	until(t, "the tool runs", deadline, func() bool { return len(taggedIn(tag)) > 0 })
	var keepers []int
	for _, p := range processes() {
		if p.ppid == d.cmd.Process.Pid {
			needNil(t, syscall.Kill(p.pid, syscall.SIGSTOP))
			keepers = append(keepers, p.pid)
		}
	}
	// Within a second a signal counts as the one before it: it is sent until all three have come.
	signalToTheEnd(t, "the third signal ends the daemon", d.cmd.Process, syscall.SIGTERM, d.waited)
	if code := d.end(); code != 143 {
		t.Errorf("code %d, want 143\n%s", code, d.err.String())
	}
	for _, pid := range keepers { // it ends its tree as soon as it can
		needNil(t, syscall.Kill(pid, syscall.SIGCONT))
	}
	noneLeft(t, tag)
	// The next daemon ends the turn that was left open.
	d = loopd(t, d.home).serving()
	if recs := d.journal("s"); recs[len(recs)-1].Stop != "interrupted" {
		t.Errorf("%s", kinds(recs))
	}
}

func TestADeletedSocketComesBack(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("fine")
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	needNil(t, os.Remove(d.socket()))
	until(t, "the socket is back", deadline, d.answers)
	close(release)
	w.want(1, "resultend")
	// Somebody else's socket in its place stays.
	needNil(t, os.Remove(d.socket()))
	ln, err := net.Listen("unix", d.socket())
	needNil(t, err)
	defer ln.Close()
	until(t, "the daemon says that nobody reaches it", deadline, func() bool {
		return strings.Contains(d.err.String(), d.socket()+" is no longer this daemon's")
	})
	d.cmd.Process.Signal(syscall.SIGTERM)
	d.end()
	if _, err := os.Lstat(d.socket()); err != nil {
		t.Error("a foreign socket was removed")
	}
	if n := strings.Count(d.err.String(), "is no longer this daemon's"); n != 1 {
		t.Errorf("it says so %d times", n)
	}
}

// A reader of the daemon's stderr that stands still holds up neither it nor its end.
func TestAStalledLogHoldsUpNobody(t *testing.T) {
	f := newFakeLlama(t)
	read, write, err := os.Pipe()
	needNil(t, err)
	defer read.Close()
	defer write.Close()
	d := loopd(t, f.home(""))
	d.cmd.Stderr = write
	d.serving()
	// Opened anew: what is not to block here is to block there.
	own, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", write.Fd()), os.O_WRONLY|syscall.O_NONBLOCK, 0)
	needNil(t, err)
	defer own.Close()
	needNil(t, own.SetWriteDeadline(time.Now().Add(time.Second)))
	for err == nil {
		_, err = own.Write(make([]byte, 512))
	}
	needNil(t, os.Remove(d.socket()))
	until(t, "the socket is back", deadline, d.answers)
	d.cmd.Process.Signal(syscall.SIGTERM)
	if code := d.end(); code != 0 {
		t.Errorf("code %d", code)
	}
}

// A daemon whose lock file is gone cannot keep another one out: it finishes what it has and ends.
func TestALostLockEndsTheDaemon(t *testing.T) {
	f := newFakeLlama(t)
	for name, lose := range map[string]func(home string) error{
		"deleted":    func(home string) error { return os.Remove(lockPath(home)) },
		"replaced":   func(home string) error { return os.Rename(filepath.Join(home, "config.toml"), lockPath(home)) },
		"run moved":  func(home string) error { return os.Rename(filepath.Join(home, "run"), filepath.Join(home, "moved")) },
		"home moved": func(home string) error { return os.Rename(home, home+".moved") },
		"home gone":  os.RemoveAll,
	} {
		t.Run(name, func(t *testing.T) {
			release := f.held("fine")
			f.mu.Lock()
			f.bodies = nil
			f.mu.Unlock()
			d := loopd(t, f.home("")).serving()
			w := d.dial()
			w.send(1, aTurn("s", "x", false)).until("content")
			needNil(t, lose(d.home))
			t.Cleanup(func() { os.RemoveAll(d.home + ".moved") })
			w.send(2, aTurn("t", "x", false)).final(2) // accepted or refused, not lost
			until(t, "it drains", deadline, func() bool { return strings.Contains(d.err.String(), "was deleted or replaced, so this daemon ends") })
			close(release)
			w.want(1, "resultend")
			if code := d.end(); code != 1 {
				t.Errorf("code %d", code)
			}
			if n := strings.Count(d.err.String(), "was deleted"); n != 1 {
				t.Errorf("it says so %d times:\n%s", n, d.err.String())
			}
			if _, err := os.Lstat(d.socket()); err == nil && name != "replaced" && name != "deleted" {
				t.Error("there is a new socket")
			}
		})
	}
}

func TestAServerThatWasReplacedGetsNoHistory(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any { return say(fmt.Sprint("answer ", n)) }
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).want(1, "resultend")
	f.stop()
	f.mu.Lock()
	f.props["chat_template"] = "another"
	f.mu.Unlock()
	f.start()
	if m := w.send(2, aTurn("s", "y", true)).want(2, "errornot_ready"); m.Anchor != "template-mismatch" || m.Retry != "later" {
		t.Errorf("%+v", m)
	}
	if s := d.status(); s.Phase != "not ready: template-mismatch" {
		t.Errorf("%+v", s)
	}
	if n := f.count("turn"); n != 1 {
		t.Errorf("%d histories were sent, want 1", n)
	}
	w.send(3, aTurn("s", "y", true)).want(3, "errornot_ready")
	f.mu.Lock()
	f.props["chat_template"] = fakeTemplate
	f.mu.Unlock()
	id := int64(3)
	until(t, "it is checked again and serves", deadline, func() bool {
		id++
		m, _ := w.send(id, aTurn("s", "z", true)).final(id)
		return m.kind() == "resultend"
	})
	if n := f.count("tool_call"); n != 2 {
		t.Errorf("%d checks, want 2", n)
	}
}

func TestAServerThatFailsATurn(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any {
		return []any{
			status(500, `{"error":{"code":500,"message":"boom","type":"server_error"}}`), status(500, `{"error":{"code":500,"message":"boom","type":"server_error"}}`),
			status(400, `{"error":{"code":400,"message":"request (40034 tokens) exceeds the available context size (32768 tokens)","type":"exceed_context_size_error"}}`),
			status(400, `{"error":{"code":400,"message":"bad","type":"invalid_request_error"}}`),
			delta(map[string]any{"content": "half"}, nil), say("whole"),
		}[n]
	}
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).want(1, "errorserver_unavailable")
	w.send(2, aTurn("s", "x", true)).want(2, "errorcontext_full")
	w.send(3, aTurn("s", "x", true)).want(3, "errorserver_error")
	if m, kinds := w.send(4, aTurn("s", "x", true)).final(4); m.Text != "whole" || !slices.Contains(kinds, "retry") {
		t.Errorf("a cut stream is sent again: %+v %v", m, kinds)
	}
	// Neither is it another server that fails or is not there for a moment, before the request.
	f.turn = func(int, map[string]any) any { return say("whole") }
	for id, broken := range map[int64]int{10: 500, 11: 502, 12: 200} {
		looks := atomic.Int32{}
		f.mu.Lock()
		f.answers["props"] = func(w http.ResponseWriter, r *http.Request) {
			if looks.Add(1) == 1 {
				status(broken, "one moment")(w, r)
			} else {
				json.NewEncoder(w).Encode(f.props)
			}
		}
		f.mu.Unlock()
		if m, kinds := w.send(id, aTurn("s", "x", true)).final(id); m.Text != "whole" || !slices.Contains(kinds, "retry") {
			t.Errorf("status %d of /props: %s %+v %v", broken, m.kind(), m, kinds)
		}
	}
	if n := f.count("tool_call"); n != 1 {
		t.Errorf("%d checks, want 1", n)
	}
	w.send(5, wireRequest{Type: "attach", Session: "s"}).want(5, "resultend")
}

// Attaching where nothing runs is reading: neither others who do nor a turn notice.
func TestAttachToAnIdleSession(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any { return say(strings.Repeat("y", max(1, (1-n)*(3<<20)))) }
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).want(1, "resultend")
	attach := func(kinds ...string) (stop func()) {
		var all sync.WaitGroup
		done := make(chan struct{})
		for range 6 {
			c := d.dial()
			all.Go(func() {
				for id := int64(1); ; id++ {
					select {
					case <-done:
						return
					default:
					}
					if m, _ := c.send(id, wireRequest{Type: "attach", Session: "s"}).final(id); !slices.Contains(kinds, m.kind()) {
						t.Errorf("%s %s", m.kind(), m.Message)
						return
					}
				}
			})
		}
		return func() { close(done); all.Wait() }
	}
	stop := attach("resultend")
	time.Sleep(time.Second)
	stop()
	stop = attach("resultend", "errorsession_busy") // it may have begun since the daemon looked
	for id := int64(2); id < 12; id++ {
		w.send(id, aTurn("s", "x", true)).want(id, "resultend")
	}
	stop()
	// Another process that has the session open is none that runs a turn.
	held, err := os.Open(filepath.Join(d.home, "sessions", "s", journalName))
	needNil(t, errors.Join(err, flockFile(held)))
	w.send(20, aTurn("s", "x", true)).want(20, "errorsession_busy")
	w.send(21, wireRequest{Type: "attach", Session: "s"}).want(21, "resultend")
	held.Close()
	// A journal that somebody made.
	needNil(t, os.Mkdir(filepath.Join(d.home, "sessions", "made"), 0o700))
	needNil(t, os.WriteFile(filepath.Join(d.home, "sessions", "made", journalName), []byte(`{"n":0,"type":"session","time":"2026-01-02T03:04:05Z","format":1,"session":"made"}
{"n":1,"type":"turn_end","time":"2026-01-02T03:04:05Z","stop":"end"}
`), 0o600))
	w.send(22, wireRequest{Type: "attach", Session: "made"}).want(22, "resultend")
}

func TestHostileClientsLeaveARunningTurnUntouched(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("fine")
	d := loopd(t, f.home("max_frame_bytes = 65536")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	for _, c := range []struct {
		what, bytes, kind string
		id                int64
		closed            bool
	}{
		{"HTTP", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "errorbad_frame", 0, true},
		{"length 0", "\x00\x00\x00\x00", "errorbad_frame", 0, true},
		{"length 2^32-1", "\xff\xff\xff\xff", "errorbad_frame", 0, true},
		{"over the limit", "\x00\x01\x00\x01", "errorframe_too_large", 0, true},
		{"invalid UTF-8", string(rawFrame("{\"v\":1,\"id\":1,\"final\":true,\"msg\":{\"type\":\"\xff\"}}")), "errorbad_frame", 0, true},
		{"a key twice", string(rawFrame(`{"v":1,"id":4,"final":true,"msg":{"type":"ping","type":"ping"}}`)), "errorbad_frame", 4, true},
		{"version 2", string(rawFrame(`{"v":2,"id":4,"final":true,"msg":{"type":"ping"}}`)), "errorunsupported_version", 4, true},
		{"id 0", string(rawFrame(`{"v":1,"id":0,"final":true,"msg":{"type":"ping"}}`)), "errorbad_request", 0, false},
		{"not final", string(rawFrame(`{"v":1,"id":4,"final":false,"msg":{"type":"ping"}}`)), "errorbad_request", 4, false},
		{"a wrong type", string(rawFrame(`{"v":1,"id":4,"final":true,"msg":{"type":"ping","data":5}}`)), "errorbad_request", 4, false},
		{"a type of a later version", string(rawFrame(`{"v":1,"id":4,"final":true,"msg":{"type":"dance","mode":"fast","session":5}}`)), "errorunknown_message", 4, false},
		{"a field of another type", string(rawFrame(`{"v":1,"id":4,"final":true,"msg":{"type":"ping","mode":"fast","from":-1}}`)), "pong", 4, false},
		{"a wrong mode", string(rawFrame(`{"v":1,"id":4,"final":true,"msg":{"type":"shutdown","mode":"x"}}`)), "errorbad_request", 4, false},
	} {
		c2 := d.dial()
		io.WriteString(c2, c.bytes)
		if m := c2.next(); m.kind() != c.kind || m.id != c.id || !m.final {
			t.Errorf("%s: %s for id %d (%s)", c.what, m.kind(), m.id, m.Message)
		}
		if c.closed {
			// With bytes unread the close is a reset.
			if _, err := c2.Read(make([]byte, 1)); err != io.EOF && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: the connection lives on: %v", c.what, err)
			}
		} else {
			c2.send(9, wireRequest{Type: "ping"}).want(9, "pong")
		}
	}
	half := d.dial()
	io.WriteString(half, "\x00\x00\x00\x20{\"v\":1")
	half.Close()
	// A reused id: an error under id 0, and the turn's own final frame still comes.
	for _, r := range []wireRequest{{Type: "ping"}, {Type: "sessions"}, {Type: "turn"}, {Type: "attach", Session: "../x"}} {
		m := w.send(1, r).next()
		for !m.final {
			m = w.next()
		}
		if m.id != 0 || m.Code != codeDuplicateID {
			t.Errorf("%+v: %+v", r, m)
		}
	}
	close(release)
	w.want(1, "resultend")
}

func TestTheOpenRequestsOfAConnectionAreBounded(t *testing.T) {
	f := newFakeLlama(t)
	release := make(chan struct{})
	f.turn = func(int, map[string]any) any { return streaming(release) }
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	w.send(1000, wireRequest{Type: "attach", Session: "none"}).want(1000, "errorno_such_session")
	for id := int64(2); id <= openMax; id++ {
		w.send(id, wireRequest{Type: "attach", Session: "s"})
	}
	w.send(1001, wireRequest{Type: "attach", Session: "s"}).want(1001, "erroroverloaded")
	w.send(1002, wireRequest{Type: "ping"}).want(1002, "pong") // and no other request is refused
	d.dial().send(1, wireRequest{Type: "attach", Session: "s"}).until("content")
	close(release)
	for open := openMax; open > 0; {
		if m := w.next(); m.final {
			open--
		}
	}
	w.send(1, aTurn("s", "x", true)).want(1, "resultend")
}

func TestManyIdleConnections(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("fine")
	d := loopd(t, f.home("max_clients = 8")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	id := int64(1)
	until(t, "it is the only client: the one that asked whether the daemon answers has left", deadline, func() bool {
		id++
		return *number(parse(w.send(id, wireRequest{Type: "status"}).want(id, "status").Status).get("clients")) == 1
	})
	before := residentOf(t, d.cmd.Process.Pid)
	refused := 0
	for range 10_000 { // each is closed by us or by the daemon before the next hundred are made
		c, err := net.Dial("unix", d.socket())
		if err != nil {
			t.Fatal(err)
		}
		if refused < 7 { // with w they are the eight that are taken
			c.SetDeadline(time.Now().Add(deadline))
			(&wire{t, c}).send(1, wireRequest{Type: "ping"}).want(1, "pong")
		}
		if refused < 8 {
			t.Cleanup(func() { c.Close() })
		} else {
			defer c.Close()
		}
		refused++
		if refused%100 == 0 { // the backlog of the socket is not endless
			c.SetDeadline(time.Now().Add(deadline))
			e, err := readFrame(c, 1<<20, func() {})
			if err != nil || !bytes.Contains(e.Msg, []byte("overloaded")) {
				t.Fatalf("connection %d: %s %v", refused, e.Msg, err)
			}
		}
	}
	if after := residentOf(t, d.cmd.Process.Pid); after > before+64<<10 {
		t.Errorf("resident memory went from %d to %d KiB", before, after)
	}
	close(release)
	w.want(1, "resultend")
}

// memoryOf gives the peak resident size of a process in KiB.
func residentOf(t testing.TB, pid int) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	needNil(t, err)
	for line := range strings.Lines(string(b)) {
		fmt.Sscanf(line, "VmHWM: %d kB", &kib)
	}
	return kib
}

func TestAClientThatNeverReadsLosesEventsAndNobodyElseDoes(t *testing.T) {
	ofTheBinary(t)
	f := newFakeLlama(t)
	start := make(chan struct{}, 2)
	const pieces, size = 5000, 10_000 // 50 MB
	f.turn = func(int, map[string]any) any {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			piece := delta(map[string]any{"content": strings.Repeat("x", size)}, nil)
			for i := range pieces {
				if i%100 == 0 { // as fast as the good client reads, less than a backlog ahead
					<-start
				}
				io.WriteString(w, piece)
			}
			io.WriteString(w, say("end"))
		}
	}
	d := loopd(t, f.home("max_frame_bytes = 15728640"), "--set", "limits.liveness_ms=20000").serving()
	slow, good := d.dial(), d.dial()
	slow.send(1, aTurn("s", "x", false)).until("start")
	good.send(1, wireRequest{Type: "attach", Session: "s"}).until("start")
	start <- struct{}{}
	start <- struct{}{}
	seen := 0
	for {
		m := good.next()
		if m.kind() == "lagged" {
			t.Errorf("the good client lost events: %s", m.Event)
		} else if m.kind() == "content" {
			if seen++; seen%100 == 0 && seen <= pieces-200 {
				start <- struct{}{}
			}
		}
		if m.final {
			if m.kind() != "errorframe_too_large" { // 50 MB of text are more than a frame
				t.Errorf("%s", m.kind())
			}
			break
		}
	}
	if seen != pieces+1 {
		t.Errorf("the good client saw %d of %d pieces", seen, pieces+1)
	}
	t.Logf("peak %d KiB, the answer itself is 50 MB", residentOf(t, d.cmd.Process.Pid))
	m := slow.until("lagged")
	if dropped := *number(parse(m.Event).get("dropped")); dropped < pieces/2 {
		t.Errorf("%d dropped", dropped)
	}
	if peak := residentOf(t, d.cmd.Process.Pid); peak > 450<<10 {
		t.Errorf("peak resident memory %d KiB", peak)
	}
	d.dial().send(1, wireRequest{Type: "ping"}).want(1, "pong")
}

// What is dropped would otherwise live as long as the array that held it: many
// small events make a large one, which large events then fill.
func TestAnEventThatIsNoLongerKeptIsFreed(t *testing.T) {
	d, long := &daemon{}, &turn{}
	d.moved.L = &d.mu
	for range 60_000 {
		d.emitLocked(long, bytes.Repeat([]byte("x"), 90))
	}
	for range 500 {
		d.emitLocked(long, bytes.Repeat([]byte("x"), 1<<20))
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	if m.HeapAlloc > 100<<20 {
		t.Errorf("%d MiB are in use, of which %d are kept", m.HeapAlloc>>20, long.keptSize>>20)
	}
}

// Clients that never read have many open requests, and more of their own to say.
func TestClientsThatDoNotReadDoNotHoldUpTheEnd(t *testing.T) {
	ofTheBinary(t)
	f := newFakeLlama(t)
	f.turn = func(int, map[string]any) any {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for r.Context().Err() == nil {
				io.WriteString(w, delta(map[string]any{"content": strings.Repeat("x", 20_000)}, nil))
				w.(http.Flusher).Flush()
				time.Sleep(2 * time.Millisecond)
			}
		}
	}
	d := loopd(t, f.home("drain_ms = 500"), "--set", "limits.liveness_ms=60000").serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	var attaches, pings []byte
	for id := range int64(600) {
		frame, _ := encodeFrame(1<<20, id+1, true, &wireRequest{Type: "attach", Session: "s"})
		attaches = append(attaches, frame...)
		frame, _ = encodeFrame(1<<20, id+1000, true, &wireRequest{Type: "ping", Data: strings.Repeat("x", 1000)})
		pings = append(pings, frame...)
	}
	for range 50 {
		c := d.dial()
		go c.Write(append(attaches, pings...)) // to the end of the daemon, or until it is closed
	}
	for range 300 {
		w.until("content")
	}
	go io.Copy(io.Discard, w)
	d.cmd.Process.Signal(syscall.SIGTERM)
	if code := d.end(); code != 0 {
		t.Errorf("code %d", code)
	}
	if recs := d.journal("s"); recs[len(recs)-1].Stop != "interrupted" {
		t.Errorf("%+v", recs[len(recs)-1])
	}
}

func TestAClientThatTakesNoFinalFrameIsClosed(t *testing.T) {
	t.Parallel()
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any { return say(strings.Repeat("x", 2<<20)) } // more than a socket holds
	d := loopd(t, f.home("")).serving()
	slow := d.dial()
	slow.send(1, aTurn("s", "x", false))
	other, id := d.dial(), int64(0)
	clients := func(n int64) bool {
		id++
		return *number(parse(other.send(id, wireRequest{Type: "status"}).want(id, "status").Status).get("clients")) == n
	}
	until(t, "both are there and the turn is over", deadline, func() bool {
		recs, _ := os.ReadFile(filepath.Join(d.home, "sessions", "s", journalName))
		return bytes.Contains(recs, []byte(`"turn_end"`)) && clients(2)
	})
	until(t, "the slow one is closed", deadline, func() bool { return clients(1) })
	if b, err := io.ReadAll(slow); err != nil && !errors.Is(err, syscall.ECONNRESET) || bytes.Contains(b, []byte(`"final":true`)) {
		t.Errorf("the slow client got its final frame in %d bytes, or: %v", len(b), err)
	}
}

// It takes some events after the end of the turn, and then no more.
func TestAClientThatStopsBeforeTheFinalFrameIsClosed(t *testing.T) {
	t.Parallel()
	f := newFakeLlama(t)
	release := make(chan struct{})
	f.turn = func(int, map[string]any) any {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 30 {
				io.WriteString(w, delta(map[string]any{"content": strings.Repeat("x", 100_000)}, nil))
			}
			streaming(release)(w, r)
		}
	}
	d := loopd(t, f.home("")).serving()
	w, slow := d.dial(), d.dial()
	w.send(1, aTurn("s", "x", false))
	for range 30 {
		w.until("content")
	}
	slow.send(1, wireRequest{Type: "attach", Session: "s"}).until("content") // the socket is full behind it
	time.Sleep(300 * time.Millisecond)
	close(release)
	w.want(1, "resultend")
	slow.until("content")
	slow.until("content")
	id := int64(1)
	until(t, "the slow one is closed", deadline, func() bool {
		id++
		return *number(parse(w.send(id, wireRequest{Type: "status"}).want(id, "status").Status).get("clients")) == 1
	})
}

func TestAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to be another user; lock_test.go tests the rule itself")
	}
	f := newFakeLlama(t)
	d := loopd(t, f.home("")).serving()
	for _, dir := range []string{d.home, filepath.Join(d.home, "run"), filepath.Join(d.home, "run", "loop")} {
		needNil(t, os.Chmod(dir, 0o755))
	}
	needNil(t, os.Chmod(d.socket(), 0o666)) // somebody opened everything
	c := exec.Command(belayBinary(t), "--home", d.home, "status")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobodyID, Gid: nobodyID}}
	if out, err := c.CombinedOutput(); err == nil || !bytes.Contains(out, []byte("permission_denied")) {
		t.Errorf("%v %s", err, out)
	}
}

func TestFortyStartsAndOneServes(t *testing.T) {
	ofTheBinary(t)
	f := newFakeLlama(t)
	for round := range 10 {
		home := f.home("")
		all := make([]*testDaemon, 40)
		for i := range all {
			all[i] = loopd(t, home)
		}
		for _, d := range all {
			d.start()
		}
		refused := 0
		var serving *testDaemon
		until(t, "39 are refused", deadline, func() bool {
			refused, serving = 0, nil
			for _, d := range all {
				select {
				case <-d.waited:
					refused++
				default:
					serving = d
				}
			}
			return refused == 39
		})
		until(t, "the one serves", deadline, serving.answers)
		line := fmt.Sprintf("loopd: another loopd is running (it holds %s/run/loopd.lock); see docs/runbook.md#already-running", home)
		for _, d := range all {
			if d != serving && (d.end() != 1 || !hasLine(d.err.String(), line)) {
				t.Errorf("round %d: %s", round, d.err.String())
			}
		}
		serving.kill()
	}
	if n := f.count("tool_call", "turn1", "turn2"); n != 30 {
		t.Errorf("%d completions in 10 rounds, want 30", n)
	}
}

// soakRounds is 40, or BELAY_SOAK.
func soakRounds(t *testing.T) int {
	n := 40
	if s := os.Getenv("BELAY_SOAK"); s != "" {
		_, err := fmt.Sscan(s, &n)
		needNil(t, err)
	}
	return n
}

// TestAKillAtAnyMomentLosesNothingThatWasTold kills the daemon at random moments
// of running turns. The moment is that of the n-th frame, with n at random.
func TestAKillAtAnyMomentLosesNothingThatWasTold(t *testing.T) {
	ofTheBinary(t)
	f := newFakeLlama(t)
	tag := newTag(t)
	f.turn = func(n int, body map[string]any) any {
		last := body["messages"].([]any)[len(body["messages"].([]any))-1].(map[string]any)
		if last["role"] == "user" {
			return bash("echo hi; : " + tag)
		}
		return say("done")
	}
	home, work := f.home(""), t.TempDir()
	told := map[string]int64{}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(1, seed))
	for round := range soakRounds(t) {
		d := loopd(t, home, "--workspace", work, "--set", "exec.sandbox=danger-full-access", "--set", "limits.liveness_ms=20000").serving()
		var clients sync.WaitGroup
		var mu sync.Mutex
		stop := random.IntN(30)
		var frames atomic.Int64
		reached := make(chan struct{})
		for i := range 2 {
			session := fmt.Sprint("s", i)
			mu.Lock()
			turn := told[session]
			mu.Unlock()
			clients.Go(func() {
				c, err := net.Dial("unix", d.socket())
				if err != nil {
					return
				}
				defer c.Close()
				for id := int64(1); ; id++ {
					frame, _ := encodeFrame(1<<20, id, true, &wireRequest{Type: "turn", Session: session, Content: "go", Resume: turn > 0 || id > 1 || round > 0})
					c.Write(frame)
					for {
						e, err := readFrame(c, 1<<20, func() {})
						if err != nil {
							return
						}
						if frames.Add(1) == int64(stop)+1 {
							close(reached)
						}
						var m anyReply
						json.Unmarshal(e.Msg, &m)
						if m.Type == "result" {
							mu.Lock()
							told[session] = m.Turn
							mu.Unlock()
						}
						if m.Code == codeNoSuchSession { // killed before it was made
							frame, _ := encodeFrame(1<<20, id+1000, true, &wireRequest{Type: "turn", Session: session, Content: "go"})
							c.Write(frame)
							continue
						}
						if m.Code != "" {
							t.Errorf("round %d: %s %s", round, m.Code, m.Message)
							return
						}
						if e.Final {
							break
						}
					}
				}
			})
		}
		select {
		case <-reached:
		case <-time.After(deadline):
			t.Fatalf("no %d frames came:\n%s", stop, d.err.String())
		}
		d.kill()
		clients.Wait()
		for session, turn := range told {
			// Whole lines only: a kill within a write leaves a torn one, which the next start cuts.
			raw, err := os.ReadFile(filepath.Join(home, "sessions", session, journalName))
			needNil(t, err)
			ends := int64(0)
			for line := range bytes.Lines(raw) {
				if bytes.Contains(line, []byte(`"type":"turn_end"`)) && bytes.HasSuffix(line, []byte("\n")) {
					ends++
				}
			}
			if ends < turn {
				t.Fatalf("round %d: session %s: turn %d was told, the journal has %d ends", round, session, turn, ends)
			}
		}
	}
	d := loopd(t, home, "--set", "limits.liveness_ms=20000").serving()
	for session := range told {
		d.dial().send(1, aTurn(session, "go", true)).want(1, "resultend")
	}
	until(t, "no process is left", leftWait, func() bool { return len(taggedIn(tag)) == 0 })
	t.Logf("told: %v", told)
}

// client runs a command of belay against the daemon's home.
func (d *testDaemon) client(args ...string) *belayRun {
	r := prepare(d.t.(*testing.T), nil, append([]string{"--home", d.home}, args...)...)
	return r
}

func TestClientCommands(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any {
		return []any{bash("true"), say("the answer"), say("more"), streaming(nil)}[min(n, 3)]
	}
	d := loopd(t, f.home(""), "--workspace", t.TempDir(), "--set", "exec.sandbox=danger-full-access").serving()
	r := d.client("turn", "--session", "s", "do", "it").finish(0)
	if r.out.String() != "the answer\n" || !strings.Contains(r.err.String(), "tool_result") || strings.Contains(r.err.String(), `"content"`) {
		t.Errorf("%q %q", r.out.String(), r.err.String())
	}
	r = d.client("turn", "--session", "s", "--resume", "--json", "more").finish(0)
	all := strings.Split(strings.TrimSpace(r.out.String()), "\n")
	for _, line := range all {
		if !json.Valid([]byte(line)) {
			t.Errorf("no JSON: %s", line)
		}
	}
	if !strings.Contains(all[len(all)-1], `"stop":"end"`) {
		t.Errorf("%s", all)
	}
	if r = d.client("turn", "--session", "none", "--resume", "x").finish(1); !strings.Contains(r.err.String(), "(no_such_session)") {
		t.Error(r.err.String())
	}
	if r = d.client("status").finish(0); !strings.Contains(r.out.String(), "phase: serving\n") {
		t.Error(r.out.String())
	}
	d.client("status", "--json").finish(0)
	if r = d.client("sessions").finish(0); !strings.HasPrefix(r.out.String(), "session:s  ") {
		t.Error(r.out.String())
	}
	d.client("sessions", "--json").finish(0)
	// Ctrl-C cancels; twice, while the daemon does not answer, leaves.
	r = d.client("turn", "--json", "--session", "long", "x").start()
	until(t, "the turn runs", deadline, func() bool { return f.count("turn") == 4 })
	r.cmd.Process.Signal(syscall.SIGINT)
	if code := r.wait(); code != 130 || !strings.Contains(r.out.String(), `"stop":"cancelled"`) {
		t.Errorf("code %d %s %s", code, r.out.String(), r.err.String())
	}
	r = d.client("turn", "--json", "--session", "long2", "x").start()
	until(t, "the turn runs", deadline, func() bool { return f.count("turn") == 5 })
	d.cmd.Process.Signal(syscall.SIGSTOP)
	signalToTheEnd(t, "the second signal leaves", r.cmd.Process, syscall.SIGINT, r.waited)
	large, said := d.client("turn", "-"), &lockedBuffer{} // more than the socket takes
	large.cmd.Stdin, large.cmd.Stderr = strings.NewReader(strings.Repeat("x", contentMax)), said
	large.start()
	until(t, "it has begun", deadline, func() bool { return strings.Contains(said.String(), ": session s-") })
	signalToTheEnd(t, "the second signal leaves while the request is written, too", large.cmd.Process, syscall.SIGINT, large.waited)
	d.cmd.Process.Signal(syscall.SIGCONT)
	if r.wait(); r.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGINT { // 130 in a shell
		t.Errorf("%v", r.cmd.ProcessState)
	}
	d.client("cancel", "long2").finish(0)
	if r = d.client("shutdown").finish(0); r.out.String() != "ok\nbye\n" {
		t.Error(r.out.String())
	}
	if code := d.end(); code != 0 {
		t.Errorf("code %d", code)
	}
	if r = d.client("status").finish(1); !strings.Contains(r.err.String(), "no daemon answers at "+d.socket()+": No such file or directory (os error 2); start one") || !strings.Contains(r.err.String(), "serve --config") {
		t.Error(r.err.String())
	}
	d.home += "/" + strings.Repeat("x", 100)
	if r = d.client("status").finish(1); !strings.Contains(r.err.String(), fmt.Sprintf("(os error 22): the path has %d bytes, the limit is 107; ", len(d.socket()))) {
		t.Error(r.err.String())
	}
}

// An answer that nobody can have read is no success: neither on a full disk nor where the reader has left.
func TestLinesThatCannotBeWritten(t *testing.T) {
	f := newFakeLlama(t)
	f.turn = func(int, map[string]any) any { return say("the answer") }
	d := loopd(t, f.home("")).serving()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	needNil(t, err)
	defer full.Close()
	read, left, err := os.Pipe()
	needNil(t, err)
	needNil(t, read.Close())
	defer left.Close()
	needNil(t, os.Mkdir(d.home+"/services", 0o700))
	needNil(t, os.WriteFile(d.home+"/services/released.jsonl", []byte(`{"task_id":"shell_00000000","boot_id":"another"}`+"\n"), 0o600))
	for _, args := range [][]string{{"status"}, {"sessions", "--json"}, {"turn", "x"}, {"turn", "--json", "x"}, {"probe", "--config", filepath.Join(d.home, "config.toml")},
		{"version"}, {"config"}, {"help"}, {"help", "turn"}, {"services"}, {"services", "stop", "shell_00000000"}} {
		for code, stdout := range map[int]*os.File{1: full, 141: left} {
			r := d.client(args...)
			r.cmd.Stdout = stdout
			if got := r.start().wait(); got != code || r.err.Len() == 0 {
				t.Errorf("%v: code %d, want %d; stderr %q", args, got, code, r.err.String())
			}
		}
	}
}

// A request that no frame can hold is refused by the client: nobody would answer it.
// fullPipe gives a pipe that takes nothing until it is read.
func fullPipe(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	needNil(t, err)
	t.Cleanup(func() { reader.Close(); writer.Close() })
	_, err = writer.Write(make([]byte, 64<<10))
	needNil(t, err)
	return reader, writer
}

// A turn is told on stderr what became of its daemon, whether or not that takes it.
func TestADaemonThatLeftATurnWithAStalledStderr(t *testing.T) {
	t.Parallel()
	f := newFakeLlama(t)
	f.turn = func(int, map[string]any) any { return streaming(nil) }
	d := loopd(t, f.home("")).serving()
	_, theirs := fullPipe(t)
	r := d.client("turn", "--session", "s", "x")
	r.cmd.Stderr = theirs
	r.start()
	until(t, "the turn runs", deadline, func() bool { return f.count("turn") == 1 })
	d.kill()
	select {
	case <-r.waited:
	case <-time.After(deadline / 3):
		t.Error("it waits for the reader of stderr")
	}
	if r.cmd.Process.Kill(); r.wait() != 1 {
		t.Errorf("%v", r.cmd.ProcessState)
	}
}

// A daemon that heard of the cancel first would know no such turn, and then run it.
func TestACancelComesBehindItsTurn(t *testing.T) {
	t.Parallel()
	f := newFakeLlama(t)
	f.turn = func(int, map[string]any) any { return streaming(nil) }
	d := loopd(t, f.home("")).serving()
	r := d.client("turn", "-")
	// belay waits to name the session
	stderr, theirs := fullPipe(t)
	r.cmd.Stdin, r.cmd.Stderr = strings.NewReader(strings.Repeat("x", contentMax)), theirs // which takes a while to encode
	r.start()
	theirs.Close()
	w, id := d.dial(), int64(0)
	until(t, "it is connected", deadline, func() bool {
		id++
		return strings.Contains(string(w.send(id, wireRequest{Type: "status"}).want(id, "status").Status), `"clients":2`)
	})
	time.Sleep(lastLines / 4) // signals are caught a moment later
	r.cmd.Process.Signal(syscall.SIGINT)
	time.Sleep(lastLines / 4)
	go io.Copy(io.Discard, stderr)
	select {
	case <-r.waited:
	case <-time.After(deadline / 3):
		t.Errorf("the turn runs on: %+v", d.status())
	}
	if r.cmd.Process.Kill(); r.wait() != 130 {
		t.Errorf("%v", r.cmd.ProcessState)
	}
}

func TestAPromptThatNoFrameHolds(t *testing.T) {
	f := newFakeLlama(t)
	r := loopd(t, f.home("")).serving().client("turn", "--session", "s", "-")
	r.cmd.Stdin = strings.NewReader(strings.Repeat("x", clientFrame))
	if r.finish(1); !strings.Contains(r.err.String(), "over the limit of 15728640") {
		t.Error(r.err.String())
	}
}

func TestNohupOfAClient(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("")
	d := loopd(t, f.home("")).serving()
	r := d.client("turn", "--session", "s", "--json", "x")
	r.cmd.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$0" "$@"`, r.cmd.Path}, r.cmd.Args[1:]...)
	r.cmd.Path = "/bin/sh"
	r.start()
	until(t, "the turn runs", deadline, func() bool { return f.count("turn") == 1 })
	r.cmd.Process.Signal(syscall.SIGHUP)
	d.dial().send(1, wireRequest{Type: "attach", Session: "s"}).until("content")
	time.Sleep(100 * time.Millisecond)
	close(release)
	if code := r.wait(); code != 0 || strings.Contains(r.err.String(), "cancelling") {
		t.Errorf("code %d %s", code, r.err.String())
	}
}

// A request that reaches the daemon when it says bye gets that and no answer.
func TestByeIsNoAnswer(t *testing.T) {
	d := &testDaemon{t: t, home: shortHome(t)}
	needNil(t, os.Chmod(d.home, 0o755))
	needNil(t, os.MkdirAll(filepath.Dir(d.socket()), 0o755))
	ln, err := net.Listen("unix", d.socket())
	needNil(t, err)
	defer ln.Close()
	needNil(t, os.Chmod(d.socket(), 0o777))
	go func() {
		for c, err := ln.Accept(); err == nil; c, err = ln.Accept() {
			frame, _ := encodeFrame(1<<20, 0, true, &wireReply{Type: "bye", Reason: "shutdown"})
			c.Write(frame)
			c.Close()
		}
	}()
	for _, args := range [][]string{{"turn", "x"}, {"turn", "--json", "x"}, {"status"}, {"sessions"}, {"cancel", "s"}} {
		if r := d.client(args...).finish(1); r.out.Len() > 0 || !strings.Contains(r.err.String(), "the daemon closed the connection; see docs/runbook.md#no-daemon") {
			t.Errorf("%s: %q %q", args, r.out.String(), r.err.String())
		}
	}
	d.client("shutdown").finish(0)
}

func TestProbePrintsWhatServeExpects(t *testing.T) {
	f := newFakeLlama(t)
	home := f.home("")
	r := prepare(t, nil, "probe", "--config", filepath.Join(home, "config.toml")).finish(0)
	if want := fmt.Sprintf("[expect]\ntemplate_sha256 = %q\nn_ctx = 131072\nslots = 2\n", templateSum(fakeTemplate)); r.out.String() != want {
		t.Errorf("%s", r.out.String())
	}
	r = prepare(t, nil, "probe", "--json", "--config", filepath.Join(home, "config.toml")).finish(0)
	if !json.Valid(r.out.Bytes()) {
		t.Error(r.out.String())
	}
	f.stop()
	r = prepare(t, nil, "probe", "--config", filepath.Join(home, "config.toml")).finish(1)
	if !strings.Contains(r.err.String(), "runbook.md#server-unreachable") {
		t.Error(r.err.String())
	}
}

func TestReadinessIsTold(t *testing.T) {
	f := newFakeLlama(t)
	home := f.home("")
	path := filepath.Join(home, "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	needNil(t, err)
	defer c.Close()
	d := loopd(t, home)
	d.cmd.Env = append(d.cmd.Env, "NOTIFY_SOCKET="+path)
	d.start()
	c.SetDeadline(time.Now().Add(deadline))
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil || string(b[:n]) != "READY=1\n" || !d.answers() {
		t.Errorf("%q %v", b[:n], err)
	}
	d.kill()
	// A manager that reads nothing holds up nobody.
	full, err := net.Dial("unixgram", path)
	needNil(t, err)
	defer full.Close()
	full.SetWriteDeadline(time.Now().Add(time.Second))
	for err == nil {
		_, err = full.Write([]byte("x"))
	}
	d = loopd(t, home)
	d.cmd.Env = append(d.cmd.Env, "NOTIFY_SOCKET="+path)
	d.serving().cmd.Process.Signal(syscall.SIGTERM)
	if code := d.end(); code != 0 {
		t.Errorf("code %d", code)
	}
}

func TestTheDaemonsSessionStore(t *testing.T) {
	f := newFakeLlama(t)
	d := loopd(t, f.home("")).serving()
	d.dial().send(1, aTurn("s", "x", false)).want(1, "resultend")
	d.kill()
	path := filepath.Join(d.home, "sessions", "s", journalName)
	whole, err := os.ReadFile(path)
	needNil(t, err)
	// A turn that was open when the daemon died is ended by the next start.
	cut := whole[:bytes.LastIndexByte(whole[:len(whole)-1], '\n')+4]
	needNil(t, os.WriteFile(path, cut, 0o600))
	outside := t.TempDir()
	needNil(t, os.Symlink(outside, filepath.Join(d.home, "sessions", "link")))
	needNil(t, os.Mkdir(filepath.Join(d.home, "sessions", "begun"), 0o700))
	needNil(t, os.WriteFile(filepath.Join(d.home, "sessions", "begun", journalName), nil, 0o600))
	d = loopd(t, d.home).serving()
	if recs := d.journal("begun"); len(recs) != 1 || recs[0].Model != "test-model" {
		t.Errorf("%+v", recs)
	}
	if got := kinds(d.journal("s")); got != "session turn_start assistant recovered turn_end" {
		t.Error(got)
	}
	d.dial().send(1, wireRequest{Type: "attach", Session: "s"}).want(1, "resultinterrupted")
	d.dial().send(1, aTurn("link", "x", false)).want(1, "errorstorage_error")
	if left, _ := os.ReadDir(outside); len(left) > 0 {
		t.Errorf("%v", left)
	}
	for _, id := range []string{"..", "a/b", "A", "", strings.Repeat("a", 65), "a\x00", "%2e%2e", ".", "-a"} {
		d.dial().send(1, aTurn(id, "x", false)).want(1, "errorbad_session_id")
	}
	// Two clients at once: one turn, the other is told.
	a, b := d.dial(), d.dial()
	for i := range 100 {
		id, session := int64(i+1), fmt.Sprint("two", i)
		var both sync.WaitGroup
		both.Go(func() { a.send(id, aTurn(session, "x", false)) })
		b.send(id, aTurn(session, "x", false))
		both.Wait()
		first, _ := a.final(id)
		second, _ := b.final(id)
		got := []string{first.kind(), second.kind()}
		slices.Sort(got)
		if got[1] != "resultend" || got[0] != "errorsession_busy" && got[0] != "errorsession_exists" {
			t.Fatalf("round %d: %v", i, got)
		}
		if got := kinds(d.journal(session)); got != "session turn_start assistant turn_end" {
			t.Fatal(got)
		}
	}
	// Damage in the middle is left alone.
	damaged := bytes.Replace(whole, []byte(`{"n":1`), []byte(`{"n":9`), 1)
	needNil(t, os.WriteFile(path, damaged, 0o600))
	d.dial().send(1, aTurn("s", "x", true)).want(1, "errorsession_damaged")
	if now, _ := os.ReadFile(path); !bytes.Equal(now, damaged) {
		t.Error("the damaged journal was changed")
	}
	// A FIFO is no journal, and whoever asks for it holds up nobody.
	needNil(t, os.Mkdir(filepath.Join(d.home, "sessions", "fifo"), 0o700))
	needNil(t, syscall.Mkfifo(filepath.Join(d.home, "sessions", "fifo", journalName), 0o600))
	d.dial().send(1, wireRequest{Type: "attach", Session: "fifo"}).want(1, "errorsession_damaged")
	d.dial().send(1, aTurn("fifo", "x", true)).want(1, "errorsession_damaged")
	d.dial().send(1, aTurn("other", "x", false)).want(1, "resultend")
}

func TestAFullDiskIsTold(t *testing.T) {
	f := newFakeLlama(t)
	d := loopd(t, f.home(""))
	// The limit of a file's size stands for a full disk: EFBIG is treated alike.
	d.cmd.Args = append([]string{"sh", "-c", `ulimit -f 8; exec "$0" "$@"`, d.cmd.Path}, d.cmd.Args[1:]...)
	d.cmd.Path = "/bin/sh"
	d.serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).want(1, "resultend")
	w.send(2, aTurn("s", strings.Repeat("x", 5000), true)).want(2, "errorstorage_full")
	w.send(3, aTurn("s", "y", true)).want(3, "resultend") // nothing but the refused turn is lost
	f.turn = func(int, map[string]any) any { return say(strings.Repeat("y", 6000)) }
	m, _ := w.send(4, aTurn("s", "z", true)).final(4)
	if m.kind() != "errorstorage_full" {
		t.Errorf("%s %s", m.kind(), m.Message)
	}
	if got := d.journal("s"); got[0].Type != recSession {
		t.Error(kinds(got))
	}
	w.send(5, wireRequest{Type: "ping"}).want(5, "pong")
	// "later" is meant: the same request may succeed, although the session has its directory by now.
	w.send(6, aTurn("large", strings.Repeat("x", 5000), false)).want(6, "errorstorage_full")
	w.send(7, aTurn("large", strings.Repeat("x", 5000), false)).want(7, "errorstorage_full")
	f.mu.Lock()
	f.turn = func(int, map[string]any) any { return say("fine") }
	f.mu.Unlock()
	w.send(8, aTurn("large", "z", false)).want(8, "resultend")
	w.send(9, aTurn("large", "z", false)).want(9, "errorsession_exists")
}

// An error of the disk is told as what it was, and not as what comes of it.
func TestADiskThatFailsIsTold(t *testing.T) {
	f := newFakeLlama(t)
	release := f.held("fine")
	d := loopd(t, f.home("")).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).until("content")
	journal := filepath.Join(d.home, "sessions", "s", journalName)
	if out, err := exec.Command("chattr", "+i", journal).CombinedOutput(); err != nil {
		t.Skipf("no file can be made immutable here: %v %s", err, out)
	}
	t.Cleanup(func() { exec.Command("chattr", "-i", journal).Run() })
	close(release)
	if m, _ := w.final(1); m.kind() != "errorstorage_error" || !strings.Contains(m.Message, "operation not permitted") {
		t.Errorf("%s %s", m.kind(), m.Message)
	}
	needNil(t, exec.Command("chattr", "-i", journal).Run())
	w.send(2, aTurn("s", "y", true)).want(2, "resultend")
}

// A turn is told of only when the names of its session are on disk, too: an error of
// that is one of the next try as well.
func TestNamesThatCannotBeSynced(t *testing.T) {
	f := newFakeLlama(t)
	for _, dir := range []string{"sessions", "sessions/s"} {
		d := loopd(t, f.home(""))
		failing(t, d.cmd, "", "-P "+filepath.Join(d.home, dir)+" -e trace=fsync -e inject=fsync:error=EIO")
		w := d.serving().dial()
		w.send(1, aTurn("s", "x", false)).want(1, "errorstorage_error")
		w.send(2, aTurn("s", "x", false)).want(2, "errorstorage_error")
		w.send(3, aTurn("s", "x", true)).want(3, "errorstorage_error")
	}
}

// A command that puts a FIFO in place of .git holds up neither the next turn, which
// looks there for the repository of a worktree, nor the end.
func TestAFIFOInPlaceOfGitHoldsNobody(t *testing.T) {
	needLandlock(t)
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any {
		return []any{bash("mkfifo .git; ls -l .git"), say("one"), say("two")}[min(n, 2)]
	}
	d := loopd(t, f.home(""), "--workspace", t.TempDir()).serving()
	w := d.dial()
	w.send(1, aTurn("s", "x", false)).want(1, "resultend")
	w.send(2, aTurn("s", "x", true)).want(2, "resultend")
	if b := fmt.Sprint(f.body(1)); !strings.Contains(b, "prw") {
		t.Errorf("no FIFO: %s", b)
	}
}

// A connection of HTTP/2 outlives its requests, those of the daemon, too.
func TestAResendOfTheDaemonTakesAnotherConnection(t *testing.T) {
	t.Parallel()
	f := newFakeLlama(t)
	var mu sync.Mutex
	var dead string
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.URL.Path = strings.TrimPrefix(r.URL.Path, "/v1")
		mu.Lock()
		silent := dead == r.RemoteAddr
		mu.Unlock()
		if silent {
			<-r.Context().Done()
			return
		}
		f.ServeHTTP(w, r)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	f.turn = func(n int, _ map[string]any) any {
		return func(w http.ResponseWriter, r *http.Request) {
			if n > 0 {
				io.WriteString(w, say(r.Proto))
				return
			}
			mu.Lock()
			dead = r.RemoteAddr
			mu.Unlock()
			<-r.Context().Done()
		}
	}
	home := f.home("")
	path, ca := filepath.Join(home, "config.toml"), filepath.Join(home, "ca.pem")
	text, err := os.ReadFile(path)
	needNil(t, err)
	needNil(t, os.WriteFile(path, bytes.Replace(text, fmt.Appendf(nil, "socket = %q", f.path), fmt.Appendf(nil, "base_url = %q", server.URL), 1), 0o644))
	needNil(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o644))
	d := loopd(t, home)
	d.cmd.Env = append(d.cmd.Env, "SSL_CERT_FILE="+ca)
	final, _ := d.serving().dial().send(1, aTurn("s", "go", false)).final(1)
	if final.Text != "HTTP/2.0" {
		t.Errorf("got %+v", final)
	}
}

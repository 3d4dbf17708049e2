//go:build linux

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"
	"unicode/utf8"
)

// This file is the session store: below <home>/sessions one directory and one
// journal a session. It owns the ids, the records, what is synced when, and the
// repair of what a crash left. It never talks to the model, never changes a chat
// message (what was sent is sent again, byte for byte), never drops a whole
// record, and opens every file through an os.Root, so that neither a name nor a
// symbolic link leads out of the sessions directory.
//
// A record is one line of JSON in one write, and its newline is the commit: what
// lies behind the last newline was promised to nobody.

const journalFormat, journalName = 1, "journal.jsonl"

// The types of records. A note is a message that belay itself puts into the
// conversation within a turn, such as "go on": it is kept because it is sent again.
const (
	recSession, recTurnStart, recTurnEnd, recRecovered = "session", "turn_start", "turn_end", "recovered"
	recAssistant, recToolStart, recToolResult, recNote = "assistant", "tool_start", "tool_result", "note"
)

// The session's fate by sentinel, besides errHeld of lock.go: a turn of it runs.
var (
	errBadSessionID = errors.New("a session id has 1 to 64 of a-z 0-9 _ - and begins and ends with a letter or digit")
	errNoSession    = fs.ErrNotExist // the journal is the session
	errExists       = fs.ErrExist
	errDamaged      = errors.New("the journal is damaged and was left as it is")
)

// record is one line of a journal. Who adds one gives the type and what the type
// needs of the fields below the blank line.
type record struct {
	N    int64     `json:"n"` // from 0, without gaps
	Type string    `json:"type"`
	Time time.Time `json:"time"` // UTC

	Format    int             `json:"format,omitempty"`    // session: journalFormat
	Session   string          `json:"session,omitempty"`   // session: the id, as the directory has it
	Model     string          `json:"model,omitempty"`     // session
	Workspace string          `json:"workspace,omitempty"` // session
	Calls     []string        `json:"calls,omitempty"`     // assistant: ids of its tool calls, in order
	Call      string          `json:"call,omitempty"`      // tool_start, tool_result: the id
	Name      string          `json:"name,omitempty"`      // tool_start: the tool
	Stop      string          `json:"stop,omitempty"`      // turn_end: a stop of the protocol, or an error code
	Bytes     int             `json:"bytes,omitempty"`     // recovered: how many were cut
	Saved     string          `json:"saved,omitempty"`     // recovered: the file beside the journal with them
	Message   json.RawMessage `json:"message,omitempty"`   // of the chat, compact; not in session, tool_start, recovered
}

// sessionInfo is what a listing tells of a session.
type sessionInfo struct {
	Session  string    `json:"session"`
	Bytes    int64     `json:"bytes"`    // size of the journal
	Modified time.Time `json:"modified"` // UTC, of the last write
}

// journal is an open session. Its flock, from open to close, is the right to run
// a turn; one goroutine uses it at a time. messages is the history for the model.
type journal struct {
	root *os.Root // set once, as are the next two: the sessions directory; nil: nothing is written
	id   string
	file *os.File // O_APPEND

	size, next, turn  int64 // bytes of the whole records; n of the next one; number of the last turn, from 1
	messages          []json.RawMessage
	running, answered bool     // the last turn has no end; the last message is a reply without calls
	pending           []string // calls of the last reply that have no result
	started, stop     string   // the one of them that began; how the last turn ended
}

// openStore makes and opens the sessions directory of a home, as private as the
// run directory. The caller closes it.
func openStore(home string) (*os.Root, error) {
	dir := filepath.Join(home, "sessions")
	if err := privateDir(dir); err != nil {
		return nil, fmt.Errorf("open the session store: %w", err)
	}
	return os.OpenRoot(dir)
}

// listSessions gives what has a journal, by id. Other things in the directory are
// somebody's affair and passed over. With an error the list is not complete.
func listSessions(root *os.Root) ([]sessionInfo, error) {
	entries, err := fs.ReadDir(root.FS(), ".")
	found := []sessionInfo{}
	for _, e := range entries {
		st, err := root.Lstat(filepath.Join(e.Name(), journalName))
		if err == nil && st.Mode().IsRegular() && validSessionID(e.Name()) {
			found = append(found, sessionInfo{e.Name(), st.Size(), st.ModTime().UTC()})
		}
	}
	return found, err
}

// openSession locks a session, reads its journal and repairs what a crash left.
// With resume it must exist, else errNoSession, and nothing was written. Without,
// it must have no turn yet, else errExists: it is made, or what was made when no
// room was found for its first turn is taken again. model and workspace are for its
// first record. Further errors: errBadSessionID before any file is touched, errHeld
// while a turn of it runs, errDamaged; storageFull tells of the rest.
func openSession(root *os.Root, id string, resume bool, model, workspace string) (*journal, error) {
	if !validSessionID(id) {
		return nil, errBadSessionID
	}
	// O_APPEND: a write goes to the end even if the cut after a failed one did not work.
	j, name, err := &journal{root: root, id: id}, filepath.Join(id, journalName), error(nil)
	if j.file, err = root.OpenFile(name, os.O_RDWR|os.O_APPEND, 0); !resume && errors.Is(err, errNoSession) {
		// O_EXCL decides between two that make the same session, and makes no link's target.
		if err = root.MkdirAll(id, dirMode); err == nil {
			j.file, err = root.OpenFile(name, os.O_RDWR|os.O_APPEND|os.O_CREATE|os.O_EXCL, fileMode)
		}
	}
	// The lock comes before the first look: what is read and repaired is nobody else's.
	if err == nil {
		if err = flockFile(j.file); err == nil {
			err = j.read()
		}
	}
	err = cmp.Or(err, map[bool]error{true: errExists}[!resume && j.turn > 0])
	if err == nil && j.next == 0 {
		err = j.add(record{Type: recSession, Format: journalFormat, Session: id, Model: model, Workspace: workspace})
	}
	if err == nil && j.turn == 0 {
		// Without the synced directories a power cut could take the new names with the synced bytes. Not with the
		// first record alone: behind it whoever made the session may have been killed, or have got an error.
		err = cmp.Or(syncDir(root, id), syncDir(root, "."))
	}
	if err == nil && j.running {
		err = j.endTurn("interrupted", "the daemon was stopped")
	}
	if err != nil {
		j.close()
		return nil, fmt.Errorf("session %s: %w", id, err)
	}
	return j, nil
}

// close gives the session free. Everything that was promised is on disk by then.
func (j *journal) close() { _ = j.file.Close() }

// read replays the journal, at a memory of about twice its size, which the model's
// context keeps to a few MiB in practice. Lines at its end that are no JSON, or have
// no newline, are a write that a crash tore: they are cut. Before a whole line they
// are damage, as is a whole line out of order; then nothing is changed, since a reader
// that skipped it would send a history that never was. Without a root nothing is cut:
// for who only looks.
func (j *journal) read() error {
	if st, err := j.file.Stat(); err != nil || !st.Mode().IsRegular() { // the read of a FIFO would never end
		return fmt.Errorf("%w: it is no regular file", errDamaged)
	}
	data, err := io.ReadAll(j.file)
	if err != nil {
		return err
	}
	torn := false
	for line := range bytes.SplitAfterSeq(data, []byte("\n")) {
		whole := bytes.HasSuffix(line, []byte("\n")) && json.Valid(line) && utf8.Valid(line) // which encoding/json does not look at, and servers refuse
		if whole && (torn || !j.replay(line)) {
			return fmt.Errorf("%w: record %d", errDamaged, j.next)
		}
		torn = torn || !whole
	}
	return j.cut(data[j.size:])
}

// cut saves torn, the bytes behind the last whole record, beside the journal, cuts
// them off and notes it. Appending behind them would put two records on a line. A
// crash in between leaves them in both places; without room to save, nothing is cut.
func (j *journal) cut(torn []byte) error {
	if len(torn) == 0 || j.root == nil {
		return nil
	}
	name := fmt.Sprintf("torn-%d.bin", time.Now().UnixNano())
	f, err := j.root.OpenFile(filepath.Join(j.id, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
	_, writeErr := f.Write(torn) // after a failed open these only return an error
	err = cmp.Or(err, writeErr, f.Sync(), f.Close())
	if err == nil {
		err = j.file.Truncate(j.size)
	} else if f != nil { // a part of them, and the next try makes its own
		_ = j.root.Remove(filepath.Join(j.id, name))
	}
	if err != nil || j.next == 0 { // before the first record there is no place for a note
		return err
	}
	return j.add(record{Type: recRecovered, Bytes: len(torn), Saved: name})
}

// add appends a record. When it returns nil after a turn_start, tool_start or
// turn_end, that record and all before it are on disk; the others wait for the
// next of these, since they are of no use without it. A write that found no room
// (storageFull) leaves the journal as it was, and add may be tried again; after any
// other error, and that of a sync whatever it is, the journal is closed.
func (j *journal) add(rec record) error {
	rec.N, rec.Time = j.next, time.Now().UTC()
	var line bytes.Buffer
	enc := json.NewEncoder(&line) // not Marshal: it would change the message's "<" and "&"
	enc.SetEscapeHTML(false)
	err := enc.Encode(rec)
	if err == nil {
		_, err = j.file.Write(line.Bytes())
	}
	again := storageFull(err) // nothing but this record is lost; after a failed sync, who knows
	if err == nil && rec.Type != recAssistant && rec.Type != recToolResult && rec.Type != recNote {
		err = j.file.Sync()
	}
	if err != nil {
		if j.file.Truncate(j.size) != nil || !again {
			j.close()
		}
		return fmt.Errorf("write a %s record: %w", rec.Type, err)
	}
	j.replay(line.Bytes())
	return nil
}

// replay takes over a whole line and tells whether it is the record that must come
// next. What was just written passes here, too: memory is what a reader would get.
// Unknown types and fields, which a later version may add, are kept and ignored.
func (j *journal) replay(line []byte) bool {
	var rec record
	if json.Unmarshal(line, &rec) != nil || rec.N != j.next ||
		rec.N == 0 && (rec.Type != recSession || rec.Format != journalFormat || rec.Session != j.id) {
		return false
	}
	switch rec.Type {
	case recTurnStart:
		j.turn, j.running, j.answered = j.turn+1, true, false
	case recAssistant:
		j.pending, j.started, j.answered = rec.Calls, "", len(rec.Calls) == 0
	case recToolStart:
		j.started = rec.Call
	case recToolResult: // servers match results to calls by id: one answers all of the same id
		j.pending = slices.DeleteFunc(j.pending, func(id string) bool { return id == rec.Call })
	case recNote:
		j.answered = false
	case recTurnEnd:
		j.running, j.pending, j.stop = false, nil, rec.Stop
	}
	if rec.Message != nil {
		j.messages = append(j.messages, rec.Message)
	}
	j.next, j.size = j.next+1, j.size+int64(len(line))
	return true
}

// endTurn ends the running turn. First it makes the history one that any server
// takes: each call gets a result, since a call without one makes every later
// request fail, and a turn without an answer gets a few words in its place, since
// many chat templates refuse two user messages in a row. why is for the model.
func (j *journal) endTurn(stop, why string) error {
	for len(j.pending) > 0 {
		call, text := j.pending[0], "this call was not started: "+why
		if call == j.started {
			text = "the outcome of this call is unknown: " + why + " while it ran"
		}
		msg, _ := json.Marshal(map[string]string{"role": "tool", "tool_call_id": call, "content": text})
		if err := j.add(record{Type: recToolResult, Call: call, Message: msg}); err != nil {
			return err
		}
	}
	end := record{Type: recTurnEnd, Stop: stop}
	if !j.answered {
		end.Message, _ = json.Marshal(map[string]string{"role": "assistant", "content": "[no answer: " + why + "]"})
	}
	return j.add(end)
}

// validSessionID keeps separators, dots, capitals (two ids must not meet on a file
// system that folds case) and everything that could be escaped out of file names.
func validSessionID(id string) bool {
	return regexp.MustCompile(`^[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?$`).MatchString(id)
}

// syncDir makes the names in a directory last.
func syncDir(root *os.Root, name string) error {
	d, err := root.Open(name)
	return cmp.Or(err, d.Sync(), d.Close()) // of a nil d: only errors
}

// storageFull tells the errors that pass when there is room again: the disk, a
// quota, the process's limit of file size.
func storageFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
}

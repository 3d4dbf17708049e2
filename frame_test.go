//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

const frameTestLimit = 1 << 20

// rawFrame puts a length before a body.
func rawFrame(body string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// readOne reads one frame and gives what a caller can tell of the outcome: the
// code of a wireError, and how often the hook was called.
func readOne(r io.Reader) (envelope, errorCode, int, error) {
	started := 0
	e, err := readFrame(r, frameTestLimit, func() { started++ })
	var wire *wireError
	if errors.As(err, &wire) {
		return e, wire.Code, started, err
	}
	return e, "", started, err
}

func TestReadFrame(t *testing.T) {
	const good = `{"v":1,"id":7,"final":true,"msg":{"type":"ping"}}`
	length := func(n uint32, rest string) []byte { return append(binary.BigEndian.AppendUint32(nil, n), rest...) }
	tests := []struct {
		name    string
		in      []byte
		code    errorCode
		err     error // when it is no wireError
		id      int64 // that the error frame can carry
		started int
	}{
		{name: "good", in: rawFrame(good), id: 7, started: 1},
		{name: "unknown fields and white space", in: rawFrame(" \n{\"x\":[1,{\"x\":2}],\"v\":1,\"id\":0,\"final\":false,\"msg\":{\"type\":\"y\",\"z\":{\"k\":1,\"k\":2}}}\n "), started: 1},
		{name: "largest id", in: rawFrame(`{"v":1,"id":9007199254740991,"final":true,"msg":{}}`), id: frameIDMax, started: 1},
		{name: "nothing", in: nil, err: io.EOF},
		{name: "one byte", in: []byte{0}, err: io.ErrUnexpectedEOF, started: 1},
		{name: "half a length", in: []byte{0, 0}, err: io.ErrUnexpectedEOF, started: 1},
		{name: "length alone", in: length(2, ""), err: io.ErrUnexpectedEOF, started: 1},
		{name: "half a body", in: rawFrame(good)[:20], err: io.ErrUnexpectedEOF, started: 1},
		{name: "length 0", in: length(0, ""), code: codeBadFrame, started: 1},
		{name: "length 1", in: length(1, "{"), code: codeBadFrame, started: 1},
		{name: "length 2^32-1", in: length(math.MaxUint32, good), code: codeBadFrame, started: 1},
		{name: "length 2^24", in: length(1<<24, good), code: codeBadFrame, started: 1},
		{name: "at the limit, cut", in: length(frameTestLimit, good), err: io.ErrUnexpectedEOF, started: 1},
		{name: "over the limit", in: length(frameTestLimit+1, good), code: codeFrameTooLarge, started: 1},
		{name: "HTTP", in: []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), code: codeBadFrame, started: 1},
		{name: "HTTP cut", in: []byte("G"), code: codeBadFrame, started: 1},
		{name: "JSON line", in: []byte(good + "\n"), code: codeBadFrame, started: 1},
		{name: "TLS", in: []byte("\x16\x03\x01\x02\x00\x01"), code: codeBadFrame, started: 1},
		{name: "not JSON", in: rawFrame("hello"), code: codeBadFrame, started: 1},
		{name: "empty object", in: rawFrame("{}"), code: codeUnsupportedVersion, started: 1},
		{name: "null", in: rawFrame("null"), code: codeBadFrame, started: 1},
		{name: "array", in: rawFrame("[" + good + "]"), code: codeBadFrame, started: 1},
		{name: "two objects", in: rawFrame(good + good), code: codeBadFrame, started: 1},
		{name: "cut object", in: rawFrame(good[:len(good)-1]), code: codeBadFrame, started: 1},
		{name: "NUL bytes", in: rawFrame("\x00\x00\x00\x00"), code: codeBadFrame, started: 1},
		{name: "byte order mark", in: rawFrame("\ufeff" + good), code: codeBadFrame, started: 1},
		{name: "invalid UTF-8", in: rawFrame("{\"v\":1,\"id\":7,\"final\":true,\"msg\":{\"type\":\"turn\",\"content\":\"\xff\"}}"), code: codeBadFrame, started: 1},
		{name: "surrogate in UTF-8", in: rawFrame("{\"v\":1,\"id\":7,\"final\":true,\"msg\":{\"content\":\"\xed\xa0\x80\"}}"), code: codeBadFrame, started: 1},
		{name: "id twice", in: rawFrame(`{"v":1,"id":7,"id":8,"final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "msg twice", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":{"type":"ping"},"msg":{"type":"shutdown"}}`), code: codeBadFrame, started: 1},
		{name: "unknown twice", in: rawFrame(`{"v":1,"id":7,"x":1,"x":1,"final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "twice in other case", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":{"type":"ping","Type":"shutdown"}}`), code: codeBadFrame, id: 7, started: 1},
		{name: "twice by the long s", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":{"session":"a","ſession":"b"}}`), code: codeBadFrame, id: 7, started: 1},
		{name: "twice by an escape", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":{"type":"ping","\u0074ype":"shutdown"}}`), code: codeBadFrame, id: 7, started: 1},
		{name: "version 2", in: rawFrame(`{"v":2,"id":7,"final":true,"msg":{"type":"ping"}}`), code: codeUnsupportedVersion, id: 7, started: 1},
		{name: "version 2 of another shape", in: rawFrame(`{"v":2,"id":7,"final":"yes","msg":[1]}`), code: codeUnsupportedVersion, id: 7, started: 1},
		{name: "version as a string", in: rawFrame(`{"v":"1","id":7,"final":true,"msg":{}}`), code: codeUnsupportedVersion, id: 7, started: 1},
		{name: "no version", in: rawFrame(`{"id":7,"final":true,"msg":{}}`), code: codeUnsupportedVersion, id: 7, started: 1},
		{name: "id as a string", in: rawFrame(`{"v":1,"id":"7","final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "id of half", in: rawFrame(`{"v":1,"id":0.5,"final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "id below 0", in: rawFrame(`{"v":1,"id":-1,"final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "id below 0 of version 2", in: rawFrame(`{"v":2,"id":-1,"final":true,"msg":{}}`), code: codeUnsupportedVersion, started: 1},
		{name: "id of 2^53", in: rawFrame(`{"v":1,"id":9007199254740992,"final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "id of 2^64", in: rawFrame(`{"v":1,"id":18446744073709551616,"final":true,"msg":{}}`), code: codeBadFrame, started: 1},
		{name: "no msg", in: rawFrame(`{"v":1,"id":7,"final":true}`), code: codeBadFrame, id: 7, started: 1},
		{name: "msg null", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":null}`), code: codeBadFrame, id: 7, started: 1},
		{name: "msg a string", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":"ping"}`), code: codeBadFrame, id: 7, started: 1},
		{name: "nested without end", in: rawFrame(strings.Repeat(`{"v":`, 100_000)), code: codeBadFrame, started: 1},
		{name: "nested too deep", in: rawFrame(`{"v":1,"id":7,"final":true,"msg":{"x":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}}`), code: codeBadFrame, started: 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e, code, started, err := readOne(bytes.NewReader(tt.in))
			if code != tt.code || e.ID != tt.id || started != tt.started {
				t.Errorf("code %q, id %d, started %d; want %q, %d, %d (error %v)", code, e.ID, started, tt.code, tt.id, tt.started, err)
			}
			if tt.code == "" && !errors.Is(err, tt.err) {
				t.Errorf("error %v, want %v", err, tt.err)
			}
			if code == codeUnsupportedVersion {
				b, err := encodeFrame(frameTestLimit, e.ID, true, asWire(t, err))
				if err != nil || !strings.Contains(string(b), `"supported":[1]`) {
					t.Errorf("error frame %q, %v: want the supported versions", b, err)
				}
			}
		})
	}
}

func asWire(t *testing.T, err error) *wireError {
	t.Helper()
	var wire *wireError
	if !errors.As(err, &wire) {
		t.Fatalf("%v is no wireError", err)
	}
	return wire
}

func TestFramesRoundTripOneAfterAnother(t *testing.T) {
	msgs := []any{
		&wireRequest{Type: "turn", Session: "a-1", Content: "x < y && \"z\" \u2028 \x00 ü", Resume: true, OnDisconnect: "cancel"},
		&wireRequest{Type: "attach", Session: "a-1", From: 12},
		&wireRequest{Type: "shutdown", Mode: "now"},
		&wireReply{Type: "event", Session: "a-1", Turn: 3, Seq: 1, Event: json.RawMessage(`{"type":"content","content":"<b>"}`)},
		&wireReply{Type: "result", Session: "a-1", Turn: 3, Stop: "end", Text: "done", Usage: json.RawMessage(`{"input_tokens":1}`)},
		&wireReply{Type: "bye", Reason: "shutdown"},
	}
	var wire bytes.Buffer
	for i, msg := range msgs {
		b, err := encodeFrame(frameTestLimit, int64(i), i%2 == 0, msg)
		needNil(t, err)
		wire.Write(b)
	}
	if strings.Contains(wire.String(), `\u003c`) {
		t.Error("text was swollen by HTML escapes")
	}
	for i, msg := range msgs {
		e, _, _, err := readOne(&wire)
		needNil(t, err)
		got := reflect.New(reflect.TypeOf(msg).Elem()).Interface()
		needNil(t, json.Unmarshal(e.Msg, got))
		if e.V != 1 || e.ID != int64(i) || e.Final != (i%2 == 0) || !reflect.DeepEqual(got, msg) {
			t.Errorf("frame %d: %+v %+v, want %+v", i, e, got, msg)
		}
	}
	if _, _, _, err := readOne(&wire); err != io.EOF {
		t.Errorf("after the last frame: %v, want EOF", err)
	}
}

func TestEncodeFrameRefusesWhatIsTooLarge(t *testing.T) {
	b, err := encodeFrame(frameTestLimit, 1, true, &wireReply{Type: "pong"})
	needNil(t, err)
	size := len(b) - frameHeader
	if _, err := encodeFrame(size, 1, true, &wireReply{Type: "pong"}); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	_, err = encodeFrame(size-1, 1, true, &wireReply{Type: "pong"})
	if wire := asWire(t, err); wire.Code != codeFrameTooLarge || wire.Retry != "never" {
		t.Errorf("over the limit: %+v", wire)
	}
	if _, err := encodeFrame(frameTestLimit, 1, true, &wireReply{Type: "event", Event: json.RawMessage("{")}); err == nil {
		t.Error("broken JSON was sent")
	}
}

// TestMemoryFollowsWhatArrives: who announces 1 MiB and sends 10 bytes costs little.
func TestMemoryFollowsWhatArrives(t *testing.T) {
	in := append(binary.BigEndian.AppendUint32(nil, frameTestLimit), "0123456789"...)
	var before, after runtime.MemStats
	const times = 100
	runtime.ReadMemStats(&before)
	for range times {
		if _, _, _, err := readOne(bytes.NewReader(in)); err != io.ErrUnexpectedEOF {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	if per := (after.TotalAlloc - before.TotalAlloc) / times; per > 16<<10 {
		t.Errorf("%d bytes allocated for each, want at most 16 KiB", per)
	}
}

// TestAStartedFrameCanBeTimed: the hook is the place for a deadline, between
// frames there is none.
func TestAStartedFrameCanBeTimed(t *testing.T) {
	us, peer := net.Pipe()
	defer us.Close()
	defer peer.Close()
	done := make(chan error, 1)
	// owner: this test; ends when readFrame returns; joined by the receive from done.
	go func() {
		_, err := readFrame(us, frameTestLimit, func() { _ = us.SetReadDeadline(time.Now()) })
		done <- err
	}()
	if _, err := peer.Write([]byte{0}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("error %v, want the deadline's", err)
	}
}

func TestRetryIsSaidByTheCode(t *testing.T) {
	for code, want := range map[errorCode]string{
		codeSessionBusy: "later", codeOverloaded: "later", codeDraining: "later", codeNotReady: "later", codeInternal: "later",
		codeServerUnavailable: "later", codeServerError: "later", codeStorageFull: "later", codeStorageError: "later",
		codeNoSuchSession: "never", codeSessionExists: "never", codeSessionDamaged: "never", codeBadRequest: "never",
		codeContextFull: "never", codeContentTooLarge: "never", codePermissionDenied: "never", codeUnknownMessage: "never",
		codeDuplicateID: "never", codeBadSessionID: "never", codeBadFrame: "never", codeFrameTooLarge: "never", codeUnsupportedVersion: "never",
	} {
		e := newWireError(code, "why")
		if e.Type != "error" || e.Code != code || e.Retry != want || e.Error() != "why" {
			t.Errorf("%s: %+v, want retry %s", code, e, want)
		}
	}
}

// chunks gives n bytes a read, then n more, whatever is asked for.
type chunks struct {
	r io.Reader
	n int
}

func (c *chunks) Read(p []byte) (int, error) { return c.r.Read(p[:min(len(p), c.n)]) }

// FuzzFrame: whatever the bytes are and however they are split, the outcome is the
// same, the memory is bounded, and a frame that was taken can be sent again.
func FuzzFrame(f *testing.F) {
	for _, body := range []string{
		`{"v":1,"id":7,"final":true,"msg":{"type":"turn","session":"a","content":"hi","resume":true}}`,
		`{"v":1,"id":0,"final":false,"msg":{"type":"event","event":{"a":1,"a":2}}}`,
		`{"v":2,"id":1}`, `{"v":1,"v":1}`, `{}`, "\xff\xff", `{"v":1,"id":1,"final":true,"msg":{"type":"a","TYPE":"b"}}`,
	} {
		f.Add(rawFrame(body), 1)
		f.Add(append(rawFrame(body), rawFrame(body)...), 3)
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), 2)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, 1)
	f.Add([]byte{0, 0, 0, 1, '{'}, 4)
	outcome := func(r io.Reader) string {
		var b strings.Builder
		for {
			e, err := readFrame(r, 1<<12, func() {})
			fmt.Fprintf(&b, "%d %d %t %s %v\n", e.V, e.ID, e.Final, e.Msg, err)
			if err != nil {
				return b.String()
			}
			again, err := encodeFrame(1<<13, e.ID, e.Final, e.Msg)
			if err != nil {
				return "cannot be sent again: " + err.Error()
			}
			if back, err := readFrame(bytes.NewReader(again), 1<<13, func() {}); err != nil || back.ID != e.ID || back.Final != e.Final {
				return fmt.Sprintf("sent again it is %+v, %v", back, err)
			}
		}
	}
	f.Fuzz(func(t *testing.T, in []byte, n int) {
		if n < 1 || n > 1<<13 {
			n = 1
		}
		want := outcome(bytes.NewReader(in))
		if strings.Contains(want, "again") {
			t.Fatal(want)
		}
		for name, r := range map[string]io.Reader{
			"chunks": &chunks{bytes.NewReader(in), n}, "one byte": iotest.OneByteReader(bytes.NewReader(in)),
			"half": iotest.HalfReader(bytes.NewReader(in)), "data with EOF": iotest.DataErrReader(bytes.NewReader(in)),
		} {
			if got := outcome(r); got != want {
				t.Errorf("%s:\n%s\nwhole:\n%s", name, got, want)
			}
		}
	})
}

// TestProtocolDocument decodes every example of docs/protocol.md with nothing
// unknown in it, and looks for every word of the wire in its text.
func TestProtocolDocument(t *testing.T) {
	text, err := os.ReadFile("docs/protocol.md")
	needNil(t, err)
	blocks := regexp.MustCompile("(?s)```json\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	var journalLines []string
	count := map[string]int{}
	for _, block := range blocks {
		for _, line := range strings.Split(strings.TrimSpace(block[1]), "\n") {
			var shape map[string]json.RawMessage
			if err := json.Unmarshal([]byte(line), &shape); err != nil {
				t.Errorf("%s: %v", line, err)
				continue
			}
			kind := ""
			switch {
			case shape["v"] != nil:
				kind, err = "frame", decodeExampleFrame(line)
			case shape["n"] != nil:
				kind, journalLines = "record", append(journalLines, line+"\n")
			case shape["exit_code"] != nil && shape["type"] == nil:
				kind = "result"
				wantFields(t, []byte(line), metaFields+" output tools? services?")
			case shape["boot_id"] != nil:
				kind, err = "receipt", strictly([]byte(line), &receipt{})
			case shape["status"] != nil && shape["type"] == nil:
				kind = "replay"
			case shape["schema"] != nil:
				kind, err = "event", decodeExampleEvent(line)
			default:
				kind, err = "unknown", errors.New("neither frame, record, event nor replay line")
			}
			count[kind]++
			if err != nil {
				t.Errorf("%s: %v", line, err)
			}
		}
	}
	j := &journal{id: "fix-build"}
	for _, line := range journalLines {
		if err := strictly([]byte(line), &record{}); err != nil || !j.replay([]byte(line)) {
			t.Errorf("%s: not the record that must come next (%v)", line, err)
		}
	}
	if j.running || len(j.pending) > 0 {
		t.Error("the example journal ends within a turn")
	}
	for kind, least := range map[string]int{"frame": 20, "record": 8, "event": 13, "replay": 2, "result": 1, "receipt": 1} {
		if count[kind] < least {
			t.Errorf("%d examples of kind %s, want at least %d", count[kind], kind, least)
		}
	}
	for _, word := range []errorCode{
		codeBadFrame, codeFrameTooLarge, codeUnsupportedVersion, codeBadRequest, codeUnknownMessage, codeDuplicateID,
		codePermissionDenied, codeBadSessionID, codeNoSuchSession, codeSessionExists, codeSessionBusy, codeSessionDamaged,
		codeContentTooLarge, codeContextFull, codeNotReady, codeOverloaded, codeDraining, codeServerUnavailable,
		codeServerError, codeStorageFull, codeStorageError, codeInternal,
		recSession, recTurnStart, recAssistant, recToolStart, recToolResult, recNote, recTurnEnd, recRecovered,
	} {
		if !bytes.Contains(text, []byte("`"+string(word)+"`")) {
			t.Errorf("docs/protocol.md does not name %s", word)
		}
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[envelope](), reflect.TypeFor[wireRequest](), reflect.TypeFor[wireReply](), reflect.TypeFor[wireError](), reflect.TypeFor[record](), reflect.TypeFor[sessionInfo](), reflect.TypeFor[receipt]()} {
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			if !bytes.Contains(text, []byte("`"+name+"`")) {
				t.Errorf("docs/protocol.md does not name the field %s of %s", name, typ.Name())
			}
		}
	}
}

// strictly decodes one JSON value and refuses unknown fields.
func strictly(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

func decodeExampleFrame(line string) error {
	e, err := readFrame(bytes.NewReader(rawFrame(line)), frameTestLimit, func() {})
	if err != nil {
		return err
	}
	if err := strictly([]byte(line), &envelope{}); err != nil {
		return err
	}
	var typ struct{ Type string }
	if err := json.Unmarshal(e.Msg, &typ); err != nil {
		return err
	}
	var asRequest, asReply, asError error
	switch typ.Type {
	case "error":
		asError = strictly(e.Msg, &wireError{})
	case "pong", "ok", "bye", "event", "result":
		asReply = strictly(e.Msg, &wireReply{})
	case "ping", "turn", "attach", "cancel", "shutdown":
		asRequest = strictly(e.Msg, &wireRequest{})
	case "status", "sessions": // both ways under one name
		if asRequest = strictly(e.Msg, &wireRequest{}); asRequest != nil {
			asRequest, asReply = nil, strictly(e.Msg, &wireReply{})
		}
	default:
		return fmt.Errorf("unknown message type %q", typ.Type)
	}
	return errors.Join(asRequest, asReply, asError)
}

func decodeExampleEvent(line string) error {
	var e struct {
		Type    string `json:"type"`
		Schema  string `json:"schema"`
		Version int    `json:"schema_version"`
	}
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		return err
	}
	known := " start content reasoning tool_use tool_result turn_usage retry service_released service_stopped notice error metadata done "
	if e.Schema != "belay.exec-stream" || e.Version != 1 || !strings.Contains(known, " "+e.Type+" ") {
		return errors.New("no event of schema version 1")
	}
	if !strings.HasPrefix(line, `{"type":"`+e.Type+`"`) || !strings.HasSuffix(line, `"schema":"belay.exec-stream","schema_version":1}`) {
		return errors.New("the type must come first and the schema last")
	}
	return nil
}

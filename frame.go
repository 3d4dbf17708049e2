//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// This file is the wire form of what the daemon and its clients say to each
// other: frame, envelope, messages and error codes, as docs/protocol.md lists
// them. It owns the limits of a frame and the words on the wire. It knows no
// sockets and no sessions, sets no deadline, and never looks into what it
// carries for others: events, usage, status.
//
// A frame, all of it from a peer that may be anybody:
//
//	offset 0, 4 bytes: n, unsigned, big-endian, frameMin <= n <= the reader's limit,
//	                   which is never over 15 MiB, so that the first byte is 0
//	offset 4, n bytes: one JSON object in UTF-8, the envelope

const (
	protocolVersion, frameHeader, frameMin = 1, 4, 2 // the latter two in bytes: of n, and of "{}"

	frameIDMax = int64(1)<<53 - 1 // the largest integer that every JSON reader keeps exact

	// frameWhole is how long a started frame may take: the deadline for the
	// caller of readFrame to set in its hook. A slow peer costs one goroutine
	// for so long; between frames it may be silent for ever.
	frameWhole = 30 * time.Second
)

// errorCode is the stable word for a failure. A client that does not know a
// code goes by the error's retry. The daemon closes the connection after the first
// three, and after any that answers a connection that it does not take.
type errorCode string

const (
	codeBadFrame, codeFrameTooLarge, codeUnsupportedVersion errorCode = "bad_frame", "frame_too_large", "unsupported_version"
	codeBadRequest, codeUnknownMessage, codeDuplicateID     errorCode = "bad_request", "unknown_message", "duplicate_id"
	codePermissionDenied, codeBadSessionID                  errorCode = "permission_denied", "bad_session_id"
	codeNoSuchSession, codeSessionExists                    errorCode = "no_such_session", "session_exists"
	codeSessionBusy, codeSessionDamaged                     errorCode = "session_busy", "session_damaged"
	codeContentTooLarge, codeContextFull                    errorCode = "content_too_large", "context_full"
	codeNotReady, codeOverloaded, codeDraining              errorCode = "not_ready", "overloaded", "draining"
	codeServerUnavailable, codeServerError                  errorCode = "server_unavailable", "server_error"
	codeStorageFull, codeStorageError, codeInternal         errorCode = "storage_full", "storage_error", "internal"
)

// envelope is the body of every frame.
type envelope struct {
	V     int             `json:"v"`     // protocolVersion
	ID    int64           `json:"id"`    // the request's, 1 to frameIDMax; 0 is the server's own
	Final bool            `json:"final"` // the last frame of its direction for this id
	Msg   json.RawMessage `json:"msg"`   // an object: request, reply or wireError by its "type"
}

// wireRequest is any message of a client; its type says which fields count.
type wireRequest struct {
	Type         string `json:"type"`                    // ping status turn attach cancel sessions shutdown
	Data         string `json:"data,omitempty"`          // ping: comes back in the pong
	Session      string `json:"session,omitempty"`       // turn, attach, cancel
	Content      string `json:"content,omitempty"`       // turn: the user's words
	Resume       bool   `json:"resume,omitempty"`        // turn: true, the session must exist; false, it must not
	OnDisconnect string `json:"on_disconnect,omitempty"` // turn: continue (or absent), cancel
	From         int64  `json:"from,omitempty"`          // attach: the first seq that is wanted
	Mode         string `json:"mode,omitempty"`          // shutdown: drain (or absent), now
}

// wireReply is any message of the daemon but an error; its type says which fields count.
type wireReply struct {
	Type     string          `json:"type"`               // pong status sessions ok bye event result
	Data     string          `json:"data,omitempty"`     // pong
	Status   json.RawMessage `json:"status,omitempty"`   // status: an object
	Sessions json.RawMessage `json:"sessions,omitempty"` // sessions: an array of objects
	Reason   string          `json:"reason,omitempty"`   // bye
	Session  string          `json:"session,omitempty"`  // event, result
	Turn     int64           `json:"turn,omitempty"`     // event, result: number in the session, from 1
	Seq      int64           `json:"seq,omitempty"`      // event: number in the turn, from 1; a gap is what was dropped
	Event    json.RawMessage `json:"event,omitempty"`    // event: an object with its own type
	Stop     string          `json:"stop,omitempty"`     // result: end, max_turns, cancelled, interrupted
	Text     string          `json:"text,omitempty"`     // result: the answer, absent when empty
	Usage    json.RawMessage `json:"usage,omitempty"`    // result: tokens, as far as the server reported them
}

// wireError is the error reply, always final, and the Go error for it on both sides.
type wireError struct {
	Type    string         `json:"type"` // error
	Code    errorCode      `json:"code"`
	Message string         `json:"message"`          // one sentence for people, no payload
	Retry   string         `json:"retry"`            // never: it would fail again; later: it may not
	Anchor  string         `json:"anchor,omitempty"` // section of docs/runbook.md
	Data    map[string]any `json:"data,omitempty"`   // facts by name
}

func (e *wireError) Error() string { return e.Message }

// newWireError makes an error reply. The code alone decides whether to try again.
func newWireError(code errorCode, message string) *wireError {
	e := &wireError{Type: "error", Code: code, Message: message, Retry: "never"}
	switch code {
	case codeSessionBusy, codeNotReady, codeOverloaded, codeDraining, codeServerUnavailable, codeServerError, codeStorageFull, codeStorageError, codeInternal:
		e.Retry = "later"
	}
	return e
}

// encodeFrame gives a whole frame for one write, so that the frames of several
// writers never mix. msg is a *wireRequest, *wireReply or *wireError. A body of
// more than limit bytes is a *wireError, frame_too_large.
func encodeFrame(limit int, id int64, final bool, msg any) ([]byte, error) {
	b := bytes.NewBuffer(make([]byte, frameHeader))
	fmt.Fprintf(b, `{"v":%d,"id":%d,"final":%t,"msg":`, protocolVersion, id, final)
	enc := json.NewEncoder(b) // not Marshal: it would swell every "<" to six bytes
	enc.SetEscapeHTML(false)
	if err := enc.Encode(msg); err != nil {
		return nil, fmt.Errorf("encode a frame: %w", err)
	}
	b.WriteByte('}')
	n := b.Len() - frameHeader
	if n > limit {
		return nil, newWireError(codeFrameTooLarge, fmt.Sprintf("a frame of %d bytes is over the limit of %d", n, limit))
	}
	binary.BigEndian.PutUint32(b.Bytes(), uint32(n))
	return b.Bytes(), nil
}

// readFrame reads one frame of at most limit bytes. It calls started when the
// first byte is there: the caller's moment to set a deadline of frameWhole and,
// after the return, to lift it. Errors: io.EOF, the peer ended between frames;
// io.ErrUnexpectedEOF, within one; a *wireError, it broke the protocol, to be
// sent with the envelope's id (0 when that could not be read) before closing,
// since the stream cannot be followed any further; else the reader's own.
func readFrame(r io.Reader, limit int, started func()) (envelope, error) {
	first := make([]byte, 1, frameHeader)
	if _, err := io.ReadFull(r, first); err != nil {
		return envelope{}, err
	}
	// One byte is enough to tell a stranger at once, who may be waiting for an answer.
	started()
	if first[0] != 0 { // "G" of an HTTP request, "{" of a JSON line, or 16 MiB and more
		return envelope{}, newWireError(codeBadFrame, "this socket speaks frames, a length and then JSON: see docs/protocol.md")
	}
	rest, err := readWhole(r, frameHeader-1)
	if err != nil {
		return envelope{}, err
	}
	n := int(binary.BigEndian.Uint32(append(first, rest...)))
	if n < frameMin {
		return envelope{}, newWireError(codeBadFrame, fmt.Sprintf("a frame of %d bytes: the least is %d", n, frameMin))
	}
	if n > limit {
		return envelope{}, newWireError(codeFrameTooLarge, fmt.Sprintf("a frame of %d bytes: the limit is %d", n, limit))
	}
	body, err := readWhole(r, n)
	if err != nil {
		return envelope{}, err
	}
	return decodeEnvelope(body)
}

// decodeEnvelope reads a frame's body. The version is judged before the message
// and before the types of the other fields, which another version may change.
func decodeEnvelope(body []byte) (envelope, error) {
	var e envelope
	if !utf8.Valid(body) || !json.Valid(body) || !plainObject(body) {
		return e, newWireError(codeBadFrame, "a frame must hold one JSON object in UTF-8 that names no member twice")
	}
	err := json.Unmarshal(body, &e)    // of a wrong type: that field stays zero, the others are set
	if e.ID < 0 || e.ID > frameIDMax { // the range is the wire's; that a request may not use 0 is the daemon's
		e.ID, err = 0, fmt.Errorf("the id %d, under which no error could go out", e.ID)
	}
	if e.V != protocolVersion {
		bad := newWireError(codeUnsupportedVersion, fmt.Sprintf("version %d of the protocol is not spoken here", e.V))
		bad.Data = map[string]any{"supported": []int{protocolVersion}}
		return e, bad
	}
	if err != nil || !plainObject(e.Msg) {
		return e, newWireError(codeBadFrame, "an envelope needs an id from 0 to 2^53-1, a boolean final, and a msg that is an object and names no member twice")
	}
	return e, nil
}

// plainObject tells whether b, which is valid JSON or nothing, is an object whose
// members have different names. encoding/json takes the last of two, and "Type"
// for "type": another reader of the same frame might not, so neither gets
// through. What lies deeper is not ours to judge: a tool's input may hold any names.
func plainObject(b []byte) bool {
	d := json.NewDecoder(bytes.NewReader(b))
	if t, _ := d.Token(); t != json.Delim('{') {
		return false
	}
	seen := map[string]bool{}
	for d.More() {
		t, _ := d.Token()
		// Up and down again folds the two letters outside ASCII that encoding/json
		// takes for ASCII ones, the long s and the Kelvin sign.
		name := strings.ToLower(strings.ToUpper(fmt.Sprint(t)))
		if seen[name] {
			return false
		}
		seen[name] = true
		_ = d.Decode(new(json.RawMessage))
	}
	return true
}

// readWhole reads exactly n bytes; fewer are io.ErrUnexpectedEOF. Memory grows
// with what arrives, not with what was announced.
func readWhole(r io.Reader, n int) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && len(b) < n {
		err = io.ErrUnexpectedEOF
	}
	return b, err
}

//go:build linux

package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// This file is the whole conversation with the model server: it builds request
// bodies, sends one model call with a bounded number of re-sends, reads the
// answer (event stream, plain JSON or error page), assembles text and tool
// calls, sorts every failure into one category, and records and replays
// responses. It owns nothing between calls: what a run learns about its server
// is handed in. It never decides what a tool does and never prints the key.
//
// An answer counts only if the server said that it ended: by a finish reason,
// by the sentinel, or by being one whole message. Everything else is an error,
// however much text arrived, and no call of it is ever handed out.

const (
	maxEvent       = 64 << 20               // bytes of one event, and kept of one answer: arguments of 32 MB are real, a server gone wild must end
	readSize       = 32 << 10               // bytes of one read: two TLS records
	maxErrorBody   = 256 << 10              // bytes read of an error answer or web page
	maxMessage     = 2000                   // bytes of a server's words shown to the user
	maxFaultDepth  = 8                      // nesting of an error: array, error, message, detail, list is 5
	callCost       = 256                    // bytes that a call costs beside its text, for the bound on an answer
	connectTimeout = 30 * time.Second       // for TCP and for TLS; a far host under load takes 10
	finishGrace    = 2 * time.Second        // wait for usage and sentinel after a finish reason
	lateChance     = 100 * time.Millisecond // after a limit has passed: what waits in the socket may still be read
	maxRetryAfter  = 5 * time.Minute        // longer is for the caller's scheduler, not for a held runner
	farFuture      = 365 * 24 * time.Hour   // what any longer Retry-After is taken for
	idleConnection = 2 * time.Second        // llama-server drops idle connections after 5 s; ours must go first
	madeUpID       = 9                      // letters and digits of our ids: the only form that Mistral's templates take

	sentinel = "[DONE]"
	inside   = "the answer holds an error: "
	// How messages are encoded here: merging and the null repair work on these
	// bytes, so that what was sent once stays as it is.
	userStart, emptyTurn = `{"role":"user","content":"`, `{"content":"",`
)

var (
	errSilent    = errors.New("nothing arrived within limits.liveness_ms")
	errLongEvent = errors.New("an event is longer than 64 MiB")
	errReplayEnd = errors.New("the recording holds no further response")
)

// clientOptions are plain values, set once. url is that of chat/completions
// with its query (http://localhost/... when socket names a unix socket).
// header carries the key, "" = Authorization: Bearer; keyNote says why a key
// was withheld. Zero values of the parameters are not sent. liveness is the
// longest silence before and after headers; the length of backoff bounds the
// re-sends. transport replaces the network; record and trace may be nil.
type clientOptions struct {
	url, socket, header, key, keyNote, model, reasoningEffort, version string
	maxTokens                                                          int
	temperature, topP                                                  *float64
	seed                                                               *int64
	liveness                                                           time.Duration
	backoff                                                            []time.Duration
	transport                                                          http.RoundTripper
	record                                                             io.Writer
	trace                                                              func(string)
}

// learned is what one run found out about its server; the caller keeps it.
// dropped: parameters refused once ("content": empty content is sent as null).
// ids: the call ids of the history.
type learned struct{ dropped, ids map[string]bool }

// request is one model call. Its messages come from the functions below; no
// tools leaves the key out, since many servers refuse []. extra: more top-level keys.
type request struct {
	messages []json.RawMessage
	tools    json.RawMessage
	offered  []string
	extra    map[string]any
	learned  *learned
}

// sink hears of an answer while it arrives; functions may be nil. Text is valid
// UTF-8. progress counts tokens of the prompt (llama-server's prompt_progress).
type sink struct {
	text, reasoning func(string)
	retry           func(retryNotice)
	progress        func(processed, total int64)
}

// retryNotice announces re-send number attempt, from 1. discard: forget this call's text.
type retryNotice struct {
	attempt           int
	delay             time.Duration
	category, message string
	discard           bool
}

// reply is an answer that the server ended. finish is stop, tool_calls, length,
// content_filter or the server's own word. reasoningKey is the name that
// reasoning came under; details are the elements of reasoning_details.
type reply struct {
	text, reasoning, reasoningKey, finish string
	details                               []json.RawMessage
	calls                                 []call
	usage                                 *usage
}

// call is one tool call. args is a JSON object, or nil when raw is none. extra
// are unknown keys: Gemini refuses the next turn without its own.
type call struct {
	id, name, raw string
	args          json.RawMessage
	extra         map[string]json.RawMessage
}

// usage counts tokens; nil = not reported.
type usage struct{ input, output, cached, reasoning *int64 }

// apiError is every failure of a model call but the caller's own cancellation.
// text and reasoning are what had arrived; said is what a repair looks at;
// status 0 = no HTTP answer; retryable: the same request may be sent again.
type apiError struct {
	category, message, said, text, reasoning string
	status                                   int
	retryable, hasRetryAfter                 bool
	retryAfter                               time.Duration
}

func (e *apiError) Error() string { return e.message }

// client sends model calls to one server. Set once; where names it in messages.
type client struct {
	clientOptions
	grace time.Duration
	where string
}

func newClient(o clientOptions) *client {
	c := &client{o, finishGrace, bareURL(o.url)}
	dialer := &net.Dialer{Timeout: connectTimeout}
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, TLSHandshakeTimeout: connectTimeout,
		IdleConnTimeout: idleConnection, ForceAttemptHTTP2: true, DisableCompression: true}
	if o.socket != "" { // a proxy would be asked for the host name that stands in for the socket
		c.where, t.Proxy = "unix:"+o.socket, nil
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", o.socket)
		}
	}
	c.transport = cmp.Or[http.RoundTripper](o.transport, t)
	return c
}

// complete makes one model call. Re-sends of every cause share one bound; a
// repair is none, and happens once each. The error is an *apiError, or wraps
// the cause of ctx.
func (c *client) complete(ctx context.Context, r *request, s sink) (*reply, error) {
	if r.learned.dropped == nil || r.learned.ids == nil {
		r.learned.dropped, r.learned.ids = map[string]bool{}, map[string]bool{}
	}
	body, err := c.body(r)
	for sent := 0; err == nil; {
		rep, failed := c.attempt(ctx, r, body, s)
		if failed == nil {
			return rep, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("wait for the model: %w", context.Cause(ctx))
		}
		if repaired := c.repair(r, body, failed); repaired != nil {
			body = repaired
			continue
		}
		if !failed.retryable || sent == len(c.backoff) || failed.retryAfter > maxRetryAfter {
			return nil, failed
		}
		delay := cmp.Or(failed.retryAfter, c.backoff[sent]) // a date that has passed asks for nothing beyond our own wait
		sent++
		tell(s.retry, retryNotice{sent, delay, failed.category, failed.message, failed.text+failed.reasoning != ""})
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait before sending again: %w", context.Cause(ctx))
		case <-time.After(delay):
		}
	}
	return nil, err
}

// repair drops or renames the one parameter that a refusal names, once each in
// a run. It gives the new body, nil if that does not differ.
func (c *client) repair(r *request, body []byte, e *apiError) []byte {
	for _, name := range []string{"stream_options", "parallel_tool_calls", "temperature", "max_tokens", "content"} {
		if (e.status == 400 || e.status == 422) && e.category != "context_length" && !r.learned.dropped[name] && mentions(e.said, name) {
			r.learned.dropped[name] = true
			if repaired, err := c.body(r); err == nil && !bytes.Equal(repaired, body) {
				return repaired
			}
			delete(r.learned.dropped, name)
		}
	}
	return nil
}

// body encodes a request. The same request and the same learned give the same
// bytes; what is unset is left out, since servers refuse keys they do not know.
func (c *client) body(r *request) ([]byte, error) {
	dropped := r.learned.dropped
	m := map[string]any{"model": c.model, "stream": true, "stream_options": map[string]bool{"include_usage": true}, "messages": merge(r.messages, dropped["content"]),
		"tools": r.tools, "temperature": c.temperature, "top_p": c.topP, "seed": c.seed, "reasoning_effort": c.reasoningEffort, "max_tokens": c.maxTokens}
	unset := map[string]bool{"tools": len(r.tools) <= len("[]"), "temperature": c.temperature == nil, "top_p": c.topP == nil, "seed": c.seed == nil,
		"reasoning_effort": c.reasoningEffort == "", "max_tokens": c.maxTokens == 0}
	maps.DeleteFunc(m, func(key string, _ any) bool { return unset[key] })
	maps.Copy(m, r.extra)
	if limit, set := m["max_tokens"]; set && dropped["max_tokens"] {
		m["max_completion_tokens"] = limit
	}
	maps.DeleteFunc(m, func(key string, _ any) bool { return dropped[key] })
	return json.Marshal(m)
}

// merge gives messages as they are, except that neighbours from the user become
// one, since many templates demand that roles alternate, and that with null the
// empty content of an assistant's turn is null.
func merge(messages []json.RawMessage, null bool) (out []json.RawMessage) {
	for _, m := range messages {
		text, user := bytes.CutPrefix(m, []byte(userStart))
		rest, empty := bytes.CutPrefix(m, []byte(emptyTurn))
		switch last := len(out) - 1; {
		case user && last >= 0 && bytes.HasPrefix(out[last], []byte(userStart)):
			out[last] = slices.Concat(bytes.TrimSuffix(out[last], []byte(`"}`)), []byte(`\n\n`), text)
		case empty && null:
			out = append(out, slices.Concat([]byte(`{"content":null,`), rest))
		default:
			out = append(out, m)
		}
	}
	return out
}

func systemMessage(text string) json.RawMessage {
	return json.RawMessage(`{"role":"system","content":` + quote(text) + "}")
}

func userMessage(text string) json.RawMessage {
	return json.RawMessage(strings.TrimSuffix(userStart, `"`) + quote(text) + "}")
}

// toolMessage is the result of a call. Its content is always a string: servers refuse parts and objects.
func toolMessage(id, content string) json.RawMessage {
	return json.RawMessage(`{"role":"tool","tool_call_id":` + quote(id) + `,"content":` + quote(content) + "}")
}

// assistantMessage encodes a turn for the history. Thinking goes back only on
// turns with calls, under the name it came with: DeepSeek refuses a history
// without it and ignores it elsewhere. Arguments are a string of valid JSON,
// {} where they were none: bad text fails the next turn, and the result says
// what was wrong. Keys without a value are left out.
func assistantMessage(r *reply, calls []call) json.RawMessage {
	m := map[string]any{"role": "assistant", "content": r.text}
	var list []map[string]any
	for _, c := range calls {
		if c.args == nil {
			c.args = json.RawMessage("{}")
		}
		list = append(list, map[string]any{"id": c.id, "type": "function", "function": map[string]string{"name": c.name, "arguments": string(c.args)}})
		for key, val := range c.extra {
			list[len(list)-1][key] = val
		}
	}
	if len(list) > 0 {
		m["tool_calls"], m["reasoning_details"], m[r.reasoningKey] = list, r.details, r.reasoning
	}
	maps.DeleteFunc(m, func(key string, _ any) bool { return key == "" || key == "reasoning_details" && len(r.details) == 0 })
	raw, _ := json.Marshal(m) // strings and valid JSON cannot fail
	return raw
}

// attempt sends body once and reads the answer to its end. Call ids become
// unique in the whole history, since a repeated one is refused or sends a
// result to the wrong call.
func (c *client) attempt(ctx context.Context, r *request, body []byte, s sink) (*reply, *apiError) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	b := &builder{sink: s, offered: r.offered, at: map[string]*partial{}}
	resp, failed := c.send(ctx, cancel, body)
	if failed == nil {
		failed = c.receive(ctx, cancel, resp, b)
	}
	if failed == nil {
		for i := range b.done.calls {
			made := &b.done.calls[i].id
			for *made == "" || r.learned.ids[*made] {
				*made = rand.Text()[:madeUpID]
			}
			r.learned.ids[*made] = true
		}
		return b.done, nil
	}
	failed.text, failed.reasoning = b.text.String(), b.reasoning.String()
	if failed.category == "auth" && c.keyNote != "" {
		failed.message += "; " + c.keyNote
	}
	// Some servers repeat the key in their refusal.
	failed.message = strings.ReplaceAll("POST "+c.where+": "+failed.message, cmp.Or(c.key, "\x00"), "[key]")
	return nil, failed
}

// send posts body and waits for the headers. No redirect is followed: 301 to
// 303 turn a POST into a GET, and the key is meant for this server only.
func (c *client) send(ctx context.Context, cancel context.CancelCauseFunc, body []byte) (*http.Response, *apiError) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return nil, &apiError{category: "bad_request", message: "make the request: " + err.Error()}
	}
	req.GetBody = nil // or net/http sends it again by itself, unseen and uncounted
	req.Header = http.Header{"Content-Type": {"application/json"}, "Accept": {"text/event-stream, application/json"},
		"Accept-Encoding": {"identity"}, "User-Agent": {"belay/" + c.version}} // a compressing proxy would deliver in blocks
	if c.key != "" && c.header != "" {
		req.Header.Set(c.header, c.key)
	} else if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	began, stop := time.Now(), watch(c.liveness, cancel)
	resp, err := c.transport.RoundTrip(req)
	if stop(); err == nil {
		tell(c.trace, fmt.Sprintf("POST %s: status %d after %d ms, %d bytes sent", c.where, resp.StatusCode, time.Since(began).Milliseconds(), len(body)))
		return resp, nil
	}
	e := &apiError{category: "network", message: err.Error(), retryable: !errors.Is(err, errReplayEnd)}
	if context.Cause(ctx) == errSilent {
		e.category, e.message = "stall", errSilent.Error()
	}
	if certificate := (*tls.CertificateVerificationError)(nil); errors.As(err, &certificate) {
		e.message, e.retryable = e.message+"; if the server is right, name the file with its CA in SSL_CERT_FILE", false
	}
	if proxy, err := http.ProxyFromEnvironment(req); err == nil && proxy != nil && c.socket == "" {
		e.message += "; it was sent through the proxy " + proxy.Host
	}
	return nil, e
}

// receive reads a response into b and records it. A read ends when nothing
// arrives within the liveness limit, or within the grace after a finish reason;
// only time spent waiting counts, so a slow consumer is no stall.
func (c *client) receive(ctx context.Context, cancel context.CancelCauseFunc, resp *http.Response, b *builder) (failed *apiError) {
	tape := &recorded{Status: resp.StatusCode, Headers: resp.Header, Body: []recordedPiece{}, End: "open"}
	var until time.Time
	src := io.Reader(readerFunc(func(p []byte) (int, error) {
		d := c.liveness
		if !until.IsZero() {
			d = min(d, time.Until(until))
		}
		stop := watch(d, cancel)
		n, err := resp.Body.Read(p)
		stop()
		if err != nil && err != io.EOF {
			err = cmp.Or(context.Cause(ctx), err)
		}
		if c.record != nil {
			tape.add(p[:n], err, ctx.Err() != nil)
		}
		return n, err
	}))
	defer func() {
		cancel(nil) // before Close: a stream that may not end is never drained, and the server stops generating
		resp.Body.Close()
		if c.record == nil {
			return
		}
		if err := tape.write(c.record); err != nil {
			failed = &apiError{category: "internal", message: "write the recording: " + err.Error()}
		}
	}()
	if strings.Contains(resp.Header.Get("Content-Encoding"), "gzip") { // though we asked for identity
		if plain, err := gzip.NewReader(src); err == nil {
			src = plain
		}
	}
	if resp.StatusCode/100 == 2 {
		return b.read(src, func() { until = time.Now().Add(c.grace) })
	}
	raw, _ := io.ReadAll(io.LimitReader(src, maxErrorBody)) // a body that breaks off still has its status
	e := readFault(raw).error(resp.StatusCode, fmt.Sprintf("%d %s: ", resp.StatusCode, http.StatusText(resp.StatusCode)))
	if e.retryAfter, e.hasRetryAfter = retryAfter(resp.Header, time.Now()); e.retryAfter > maxRetryAfter {
		e.message += "; the server asks to come back after " + time.Now().Add(e.retryAfter).UTC().Format(time.RFC3339)
	}
	if e.status/100 == 3 {
		e.message += "; redirects are not followed, set the base URL to where it leads: " + bareURL(resp.Header.Get("Location"))
	}
	return e
}

// watch cancels with errSilent unless stop is called within d. The clock goes
// on while the process is stopped (SIGSTOP, a suspended host): when the limit
// has passed, a reader gets lateChance to pick up what arrived meanwhile.
func watch(d time.Duration, cancel context.CancelCauseFunc) (stop func()) {
	done := make(chan struct{})
	t := time.AfterFunc(d, func() {
		select {
		case <-done:
		case <-time.After(lateChance):
			cancel(errSilent)
		}
	})
	return func() { t.Stop(); close(done) }
}

// eventReader splits a body into events by the WHATWG grammar. name and tail
// belong to the event at hand; tail: the body ended before its blank line, so
// it may be a fragment. begun: a line came; bare: the body is no event stream. stray is the last line that is no field, from its first
// brace: older llama-servers send "error: {...}".
type eventReader struct {
	src               io.Reader
	name              string
	line, data, stray []byte
	open, skipLF      bool // a data line was seen; the last line ended with CR
	begun, bare, tail bool
}

// events yields the data of each event that has some, valid until the next one,
// then what ended the body. Each byte is searched once, however the reads fall.
func (r *eventReader) events(yield func([]byte, error) bool) {
	for buf := make([]byte, readSize); ; {
		n, err := r.src.Read(buf)
		for p := buf[:n]; len(p) > 0; {
			if r.skipLF { // a CR ends a line at once; an LF after it, which may come much later, belongs to it
				r.skipLF, p = false, bytes.TrimPrefix(p, []byte("\n"))
				continue
			}
			line, rest, whole := bytes.Cut(p, []byte("\n"))
			if before, _, cr := bytes.Cut(line, []byte("\r")); cr {
				line, rest, whole, r.skipLF = before, p[len(before)+1:], true, true
			}
			if r.line, p = append(r.line, line...), rest; len(r.line)+len(r.data) > maxEvent {
				yield(nil, errLongEvent)
				return
			}
			if whole && r.take() {
				if !yield(r.data, nil) {
					return
				}
				r.open, r.name, r.data = false, "", r.data[:0]
			}
		}
		if err != nil {
			r.take()
			if r.tail = true; !r.open || yield(r.data, nil) {
				yield(nil, err)
			}
			return
		}
	}
}

// take reads the line and says whether it completes an event. The sentinel
// needs no blank line. A body that begins like JSON or a web page is no stream:
// all its lines are the data of one event.
func (r *eventReader) take() bool {
	line := r.line
	if r.line = r.line[:0]; !r.begun {
		line = bytes.TrimPrefix(line, []byte("\ufeff"))
		trimmed := bytes.TrimSpace(line)
		r.begun, r.bare = len(trimmed) > 0, len(trimmed) > 0 && bytes.ContainsAny(trimmed[:1], "{[<")
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	if value = bytes.TrimPrefix(value, []byte(" ")); r.bare {
		name, value = []byte("data"), line
	}
	switch string(name) {
	case "data":
		if r.open {
			r.data = append(r.data, '\n')
		}
		r.open, r.data = true, append(r.data, value...)
	case "event":
		r.name = string(value)
	case "", "id", "retry": // blank, or a comment; nothing is ever resumed, so ids and delays mean nothing
	default:
		line = line[max(bytes.IndexByte(line, '{'), 0):]
		r.stray = append(r.stray[:0], line[:min(len(line), maxErrorBody)]...)
	}
	if len(line) == 0 && !r.open {
		r.name = ""
	}
	return r.open && !r.bare && (len(line) == 0 || bytes.HasPrefix(r.data, []byte(sentinel)))
}

// builder assembles one answer. It lives for one attempt. at finds calls by id
// and by NUL + index: never an array, an index may be two billion. reason is
// the server's, "" = none yet; whole: one complete message came; seen: any
// choice came; kept: bytes held, bounded by maxEvent; done is set by end.
type builder struct {
	sink                  sink
	offered               []string
	text, reasoning       strings.Builder
	reasoningKey, reason  string
	details               []json.RawMessage
	calls                 []*partial
	at                    map[string]*partial
	usage                 *usage
	sentinel, whole, seen bool
	kept                  int
	done                  *reply
}

// partial is a call under assembly. ends tells its argument pieces apart: only
// the end shows whether they were appended, cumulative or repeated.
type partial struct {
	call
	names []string
	text  []byte
	ends  []int
}

// read reads the body of a 2xx. It calls ended after each event that follows a
// finish reason.
func (b *builder) read(src io.Reader, ended func()) *apiError {
	r := &eventReader{src: src}
	for data, err := range r.events {
		if err == nil {
			err = b.event(data, r)
		}
		if err != nil {
			return b.end(err, r.stray)
		}
		if b.reason != "" {
			ended()
		}
	}
	return nil // cannot be: an error ends every body
}

// event takes the data of one event; io.EOF says that nothing after it counts.
// Heartbeats of proxies that know no comments are skipped; broken JSON is not,
// since words or arguments would be lost. Several values in one event come from
// servers that leave blank lines out, or glue the sentinel to a whole answer.
func (b *builder) event(data []byte, r *eventReader) error {
	var first json.RawMessage
	data = bytes.TrimSpace(bytes.TrimPrefix(bytes.TrimSpace(data), []byte("data:")))
	switch {
	case bytes.HasPrefix(data, []byte(sentinel)):
		b.sentinel = true
		return io.EOF
	case len(data) == 0 || data[0] == ':' || string(data) == "null":
		return nil
	case r.name == "error":
		return readFault(data).error(http.StatusOK, inside)
	case data[0] == '<' && r.bare:
		return &apiError{category: "not_sse", message: "the answer is a web page, not an event stream; check the base URL: " + readFault(data).message}
	case data[0] != '{' && data[0] != '[' && r.name != "" && r.name != "message": // "event: ping" with a time stamp
		return nil
	case (data[0] == '{' || data[0] == '[') && json.Valid(data):
		return b.value(data)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&first); err == nil && (first[0] == '{' || first[0] == '[') {
		if err = b.value(first); err != nil {
			return err
		}
		return b.event(data[d.InputOffset():], r)
	}
	if b.seen = true; r.tail {
		return nil
	}
	return &apiError{category: "malformed", message: "an event is not valid JSON", retryable: true}
}

// value takes a chunk, a whole answer, an error, or a list of them.
func (b *builder) value(raw []byte) (err error) {
	o := parse(raw)
	choices := parse(o.get("choices"))
	bad := present(o.get("error")) || present(parse(o.get("base_resp")).get("status_code")) || // MiniMax
		len(choices) == 0 && (present(o.get("message", "detail")) || string(o.get("type", "object")) == `"error"`)
	b.addUsage(parse(o.get("usage")))
	for _, m := range choices {
		bad = b.choice(parse(m.val)) || bad
	}
	for i := 0; i < len(o) && raw[0] == '[' && err == nil; i++ {
		err = b.value(o[i].val)
	}
	switch p := parse(o.get("prompt_progress")); {
	case bad:
		return readFault(raw).error(http.StatusOK, inside)
	case b.kept > maxEvent:
		return &apiError{category: "malformed", message: "the answer is longer than 64 MiB"}
	case b.whole:
		return io.EOF
	case p != nil && b.sink.progress != nil:
		b.sink.progress(*cmp.Or(number(p.get("processed")), new(int64)), *cmp.Or(number(p.get("total")), new(int64)))
	}
	return err
}

// choice takes one choice, of which only number 0 was asked for. It says
// whether it carries an error. A later stop does not undo tool_calls or length.
func (b *builder) choice(o object) bool {
	if n := word(o.get("index")); n != "" && n != "0" {
		return false
	}
	b.seen = true
	b.delta(parse(o.get("delta")))
	if m := parse(o.get("message")); m != nil && b.text.Len()+b.reasoning.Len()+len(b.calls) == 0 { // else it repeats the deltas
		b.delta(m)
		b.whole = !present(o.get("delta"))
	}
	b.emit(&b.text, b.sink.text, str(o.get("text")))
	b.addUsage(parse(o.get("usage"))) // Moonshot
	if reason := str(o.get("finish_reason")); reason != "" && reason != "null" && (b.reason == "" || normal(reason) != "stop") {
		b.reason = reason
	}
	return present(o.get("error"))
}

// delta takes a delta or a message. Thinking may come under two names at once,
// or as parts of the content (Mistral).
func (b *builder) delta(o object) {
	key := "reasoning"
	if str(o.get("reasoning_content")) != "" {
		key = "reasoning_content"
	}
	thought := str(o.get(key))
	if thought != "" {
		b.reasoningKey = cmp.Or(b.reasoningKey, key)
	}
	for _, m := range parse(o.get("reasoning_details")) {
		b.details, b.kept = append(b.details, bytes.Clone(m.val)), b.kept+len(m.val)
	}
	b.emit(&b.reasoning, b.sink.reasoning, thought)
	b.emit(&b.text, b.sink.text, str(o.get("content"))+str(o.get("refusal")))
	for _, m := range parse(o.get("content")) {
		if str(parse(m.val).get("type")) == "thinking" {
			b.emit(&b.reasoning, b.sink.reasoning, words(m.val))
		} else {
			b.emit(&b.text, b.sink.text, words(m.val))
		}
	}
	calls := parse(o.get("tool_calls"))
	if old := o.get("function_call"); len(calls) == 0 && present(old) {
		calls = object{{nil, old}}
	}
	for _, m := range calls {
		b.call(parse(m.val))
	}
}

func (b *builder) emit(to *strings.Builder, hear func(string), s string) {
	to.WriteString(s)
	if b.kept += len(s); s != "" {
		tell(hear, s)
	}
}

// call takes a tool call or a piece of one. Empty and null mean absent; the
// first id stays; arguments are text, or an object that stands for its text.
func (b *builder) call(o object) {
	fn := o
	if f := parse(o.get("function")); f != nil {
		fn = f
	}
	index, id, name, piece := word(o.get("index")), word(o.get("id")), str(fn.get("name")), word(fn.get("arguments"))
	p := b.at["\x00"+index]
	if index == "" {
		if p = b.at[id]; p == nil && len(b.calls) > 0 {
			p = b.calls[len(b.calls)-1]
		}
	}
	if p == nil || name != "" && (id != "" && p.id != "" && id != p.id || p.restarts([]byte(piece), id != "" && id == p.id)) {
		p = &partial{call: call{extra: map[string]json.RawMessage{}}}
		b.calls, b.kept = append(b.calls, p), b.kept+callCost
	}
	b.at["\x00"+index], p.id = p, cmp.Or(p.id, id)
	if p.id != "" {
		b.at[p.id] = p
	}
	if name != "" {
		p.names = append(p.names, name)
	}
	if piece != "" {
		p.text = append(p.text, piece...)
		p.ends = append(p.ends, len(p.text))
	}
	for _, m := range o {
		if !slices.Contains([]string{"index", "id", "type", "function", "name", "arguments"}, string(m.key)) && string(m.val) != "null" {
			p.extra[string(m.key)], b.kept = bytes.Clone(m.val), b.kept+len(m.val)
		}
	}
	b.kept += len(piece) + len(name)
}

// restarts says whether piece begins another object after complete arguments,
// not just a longer or equal copy of them. With the id repeated it must be
// complete too, and {} is the placeholder that some servers begin with.
func (p *partial) restarts(piece []byte, sameID bool) bool {
	old, piece := bytes.TrimSpace(p.text), bytes.TrimSpace(piece)
	if len(p.names) == 0 || !bytes.HasPrefix(piece, []byte("{")) || !isObject(old) || sameID && (string(old) == "{}" || !isObject(piece)) {
		return false
	}
	last := len(old) - 1
	return !bytes.HasPrefix(piece, old[:last]) || len(piece) <= last || piece[last] != ',' && piece[last] != '}'
}

// finish gives the call that the pieces mean. Its name is the first piece, or
// all joined if only that was offered. Its arguments are the first reading that
// is an object, or nil. cut: the output limit ended the answer, so nothing may
// be read into missing arguments.
func (p *partial) finish(offered []string, cut bool) call {
	if names := slices.Compact(p.names); len(names) > 0 {
		if p.name = strings.Join(names, ""); slices.Contains(offered, names[0]) || !slices.Contains(offered, p.name) {
			p.name = names[0]
		}
	}
	all := bytes.TrimSpace(p.text)
	if !cut && (len(all) == 0 || string(all) == "null") {
		all = []byte("{}")
	}
	var last []byte // of cumulative pieces, each of which begins with the one before
	for i, start := 0, 0; i < len(p.ends) && bytes.HasPrefix(p.text[start:p.ends[i]], last); i++ {
		last, start = p.text[start:p.ends[i]], p.ends[i]
	}
	for _, reading := range []func() []byte{func() []byte { return all }, func() []byte { return bytes.TrimPrefix(all, []byte("{}")) },
		func() []byte { return last }, func() []byte { return escapeControls(all) }} {
		if p.args = reading(); isObject(p.args) {
			return p.call
		}
	}
	p.args, p.raw = nil, string(p.text)
	return p.call
}

// end decides what the answer is once nothing more will come. err is what ended
// the body. After a finish reason a read error is noise. stray, a line outside
// the grammar, may be the server's error.
func (b *builder) end(err error, stray []byte) *apiError {
	failed := &apiError{category: "truncated", message: "the answer broke off without a finish reason: " + err.Error(), retryable: true}
	switch odd := readFault(stray).message; {
	case errors.As(err, &failed):
	case b.reason == "error":
		failed.category, failed.message = "stream_error", "the server ended the answer with the reason error"
	case b.reason == "" && !b.whole && odd != "" && stray[0] == '{':
		return readFault(stray).error(http.StatusOK, inside)
	case b.reason != "" || b.whole || b.sentinel:
		if b.done = b.reply(); len(b.done.calls) > 0 || strings.TrimSpace(b.done.text) != "" || b.done.finish != "stop" && b.done.finish != "tool_calls" {
			return nil
		}
		failed.category, failed.message = "empty", "the answer has neither text nor tool calls"
	case errors.Is(err, errSilent):
		failed.category, failed.message = "stall", "the answer stopped: "+err.Error()
	case errors.Is(err, errLongEvent):
		failed.category, failed.message = "malformed", "read the answer: "+err.Error()
	case err == io.EOF && !b.seen && odd != "":
		failed.category, failed.message, failed.retryable = "not_sse", "the answer is no event stream: "+odd, false
	case err == io.EOF && !b.seen:
		failed.category, failed.message = "empty", "the answer has no body"
	}
	return failed
}

// reply gives the ended answer. Calls are kept after a proper end, invalid ones
// for a refusal; after the output limit only complete ones; else none.
func (b *builder) reply() *reply {
	r := &reply{text: b.text.String(), reasoning: b.reasoning.String(), reasoningKey: b.reasoningKey, details: b.details, usage: b.usage, finish: normal(b.reason)}
	proper := r.finish == "stop" || r.finish == "tool_calls"
	for _, p := range b.calls {
		if c := p.finish(b.offered, !proper); c.name+string(p.text) != "" && (proper || r.finish == "length" && c.args != nil) {
			r.calls = append(r.calls, c)
		}
	}
	if proper && len(r.calls) > 0 {
		r.finish = "tool_calls"
	}
	return r
}

// normal gives finish reasons that mean the same one name; others stay as they
// are. Without one the sentinel ended the answer.
func normal(reason string) string {
	for name, words := range map[string]string{"stop": "  stop stop_sequence eos eos_token end_turn end complete completed ",
		"tool_calls": " tool_calls tool_call tool_use function_call ", "length": " length max_tokens max_output_tokens model_length "} {
		if strings.Contains(words, " "+strings.ToLower(reason)+" ") {
			return name
		}
	}
	return reason
}

// addUsage takes a usage object. Its counts are running totals, so the last one
// stands; zeros are a placeholder.
func (b *builder) addUsage(o object) {
	in, out := parse(o.get("prompt_tokens_details", "input_tokens_details")), parse(o.get("completion_tokens_details", "output_tokens_details"))
	u := &usage{number(o.get("prompt_tokens", "input_tokens")), number(o.get("completion_tokens", "output_tokens")),
		cmp.Or(number(in.get("cached_tokens")), number(o.get("prompt_cache_hit_tokens"))), number(out.get("reasoning_tokens"))}
	if *cmp.Or(u.input, new(int64))+*cmp.Or(u.output, new(int64)) > 0 {
		b.usage = u
	}
}

// fault is what an error body says: its message, an HTTP status among its
// fields (0 = none), and its codes, types and parameter names.
type fault struct {
	message, words string
	code           int
}

// readFault finds the error in a body: JSON, the data of an event stream, a web page or plain text.
func readFault(raw []byte) *fault {
	f := &fault{}
	for data, err := range (&eventReader{src: bytes.NewReader(raw)}).events {
		if err == nil {
			raw = data
		}
		break
	}
	f.read(raw, 0)
	return f
}

// read walks down the keys under which servers and gateways put their errors; a string may hold JSON again.
func (f *fault) read(raw []byte, depth int) {
	plain := strings.Join(strings.Fields(strings.ToValidUTF8(string(raw[:min(len(raw), maxErrorBody)]), "\ufffd")), " ")
	o := object(nil)
	if json.Valid(raw) {
		o = parse(bytes.TrimSpace(raw))
	}
	if page := regexp.MustCompile(`(?i)^<.*?(<title[^>]*>(.*?)</title>|$)`).FindStringSubmatch(plain); page != nil && depth == 0 {
		plain = cmp.Or(page[2], regexp.MustCompile(`<[^>]*>`).ReplaceAllString(plain, " "))
	}
	switch {
	case depth > maxFaultDepth || plain == "null" || strings.Contains(f.message, plain):
	case plain[0] == '"' && json.Valid(raw):
		f.read([]byte(str(bytes.TrimSpace(raw))), depth+1)
	case o == nil:
		f.message += strings.Repeat("; ", min(len(f.message), 1)) + plain
		f.message = strings.ToValidUTF8(f.message[:min(len(f.message), maxMessage)], "")
	}
	for _, m := range o {
		switch word := word(m.val); string(m.key) {
		case "", "error", "errors", "message", "detail", "msg", "loc", "status_msg", "base_resp", "metadata", "raw", "error_description":
			f.read(m.val, depth+1)
		case "code", "status", "status_code", "type", "param", "error_type", "details":
			if n, _ := strconv.Atoi(word); n >= 400 && n < 600 {
				f.code = cmp.Or(f.code, n)
			}
			f.words += " " + word[:min(len(word), maxMessage)]
		}
	}
}

// error gives the fault as ours.
func (f *fault) error(status int, prefix string) *apiError {
	e := &apiError{message: prefix + f.message, said: strings.ToLower(f.message + f.words), status: status}
	if status < 300 {
		e.status = f.code
	}
	e.category, e.retryable = classify(e.status, status < 300, e.said)
	return e
}

// classify gives a server's answer its category, once for the whole program,
// and says whether the same request may be sent again. Status and code decide;
// words only where they are known to mean something else. inside: the error
// came in an answer with status 200. vague: the status does not say whose fault
// it is.
func classify(status int, inside bool, said string) (category string, retryable bool) {
	vague := status == 0 || status >= 500
	has := func(words string) bool { return regexp.MustCompile(words).MatchString(said) }
	for _, rule := range []struct {
		category           string
		retryable, applies bool
	}{
		{"context_length", false, status == 413 || !slices.Contains([]int{401, 403, 404, 429}, status) &&
			has(`context[_ ](length|size|window)|maximum context|(prompt|input) (is )?too long`)},
		{"billing", false, status == 402 || !has(`resource_exhausted`) && // Gemini says that with its quota per minute
			has(`insufficient[_ ](quota|balance|credit|funds)|credit balance|billing_|payment required|exceeded your current quota`)},
		{"auth", false, status == 401 || status == 403 || vague && has(`invalid[_ ]api[_ ]key|authentication_error|unauthorized|permission_denied`)},
		{"not_found", false, status == 404 || status == 405 || status/100 == 3 || has(`model_not_found`) || vague && has(`not_found_error`)},
		{"rate_limit", true, status == 429 || vague && has(`rate[_ ]limit|too many (requests|tokens)|resource_exhausted`)},
		{"bad_request", false, vague && has(`jinja|chat template|must alternate|server flag| --[a-z]`)}, // of the model or the server's start: it will fail again
		{"server", false, vague && has(`(failed to|unable to|could not|cannot be) load`)},
		{"overloaded", true, status == 503 || status == 529 || vague && has(`overloaded|loading model|model is loading|at capacity|unavailable|server is busy`)},
		{"bad_request", false, status == 0 && has(`invalid[_ ]request|bad_?request|invalid_argument`)},
		{"stream_error", true, inside && vague},
		{"server", true, status >= 500 || status == 408 || status == 425},
		{"unsupported_param", false, has(`unsupported_(parameter|value)|extra_forbidden|\b(stream_options|parallel_tool_calls|temperature|top_p|max_tokens|max_completion_tokens|seed|reasoning_effort)\b`)},
	} {
		if rule.applies {
			return rule.category, rule.retryable
		}
	}
	return "bad_request", false
}

// retryAfter reads what the server asks to wait: milliseconds if given, else
// seconds or a date. ok is false for anything else, such as nan or a negative.
func retryAfter(h http.Header, now time.Time) (wait time.Duration, ok bool) {
	if at, err := http.ParseTime(h.Get("Retry-After")); err == nil {
		wait, ok = max(at.Sub(now), 0), true
	}
	for _, name := range []string{"Retry-After", "Retry-After-Ms"} {
		if n, err := strconv.ParseFloat(strings.TrimSpace(h.Get(name)), 64); err == nil && n >= 0 {
			unit := map[string]time.Duration{"Retry-After": time.Second, "Retry-After-Ms": time.Millisecond}[name]
			wait, ok = time.Duration(min(n*float64(unit), float64(farFuture))), true
		}
	}
	return wait, ok
}

// recorded is one line of a recording: one response as received. end is eof,
// cut for a read error, or open where we closed first.
type recorded struct {
	Status  int             `json:"status"`
	Headers http.Header     `json:"headers"`
	Body    []recordedPiece `json:"body"`
	End     string          `json:"end"`
}

// recordedPiece is what one read gave; base64 when it is not UTF-8.
type recordedPiece struct {
	Text   string `json:"text,omitempty"`
	Base64 []byte `json:"base64,omitempty"`
}

// add records a read; ours: we cancelled it.
func (t *recorded) add(p []byte, err error, ours bool) {
	piece := recordedPiece{Text: string(p)}
	if !utf8.Valid(p) {
		piece = recordedPiece{Base64: bytes.Clone(p)}
	}
	if t.Body = append(t.Body, piece); err == io.EOF {
		t.End = "eof"
	} else if err != nil && !ours {
		t.End = "cut"
	}
}

// write appends the line to w. Requests, keys and cookies never get there.
func (t *recorded) write(w io.Writer) error {
	t.Headers = t.Headers.Clone()
	maps.DeleteFunc(t.Headers, func(key string, _ []string) bool {
		return !slices.Contains([]string{"Content-Type", "Content-Encoding", "Location", "Retry-After", "Retry-After-Ms"}, key)
	})
	raw, err := json.Marshal(t)
	if err == nil {
		_, err = w.Write(append(raw, '\n'))
	}
	return err
}

// newReplayer gives a transport that answers from a recording, in order,
// without network. It refuses a recording whole if any line is not as written.
func newReplayer(data []byte) (http.RoundTripper, error) {
	var lines []recorded
	for raw := range bytes.Lines(data) {
		var line recorded
		d := json.NewDecoder(bytes.NewReader(raw))
		d.DisallowUnknownFields()
		if err := d.Decode(&line); err != nil || d.More() || raw[len(raw)-1] != '\n' || line.Status < 100 || !slices.Contains([]string{"eof", "cut", "open"}, line.End) {
			return nil, fmt.Errorf("read the recording, line %d: it is no whole response as --record writes it: %w", len(lines)+1, cmp.Or(err, errReplayEnd))
		}
		lines = append(lines, line)
	}
	next := 0
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		if next == len(lines) {
			return nil, fmt.Errorf("%w after %d", errReplayEnd, next)
		}
		line, rest := lines[next], []byte(nil)
		next++
		return &http.Response{StatusCode: line.Status, Header: line.Headers, Body: io.NopCloser(readerFunc(func(p []byte) (int, error) {
			if len(rest) == 0 && len(line.Body) == 0 {
				if line.End == "open" {
					<-req.Context().Done()
				}
				return 0, map[bool]error{true: io.EOF, false: io.ErrUnexpectedEOF}[line.End == "eof"]
			}
			if len(rest) == 0 {
				rest, line.Body = append(line.Body[0].Base64, line.Body[0].Text...), line.Body[1:]
			}
			n := copy(p, rest)
			rest = rest[n:]
			return n, nil
		}))}, nil
	}), nil
}

// roundTripper and readerFunc make a function a transport and a reader.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// object is the members of a JSON object, or the elements of a list with nil keys.
type object []struct{ key, val []byte }

// parse splits an object or list one level deep; anything else has no members.
// raw has passed json.Valid. Keys compare byte for byte (encoding/json would
// let "Content" overwrite "content") and values are not copied, which makes
// this three times as fast.
func parse(raw []byte) (o object) {
	if len(raw) < 2 || raw[0] != '{' && raw[0] != '[' {
		return nil
	}
	var key []byte
	for i, depth, start := 0, 0, 1; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '"':
			for i++; raw[i] != '"'; i++ {
				if raw[i] == '\\' {
					i++
				}
			}
		case c == '{' || c == '[':
			depth++
		case c == ':' && depth == 1:
			key, start = bytes.Trim(raw[start:i], " \t\r\n\""), i+1
		case depth == 1 && (c == ',' || c == '}' || c == ']'):
			if val := bytes.TrimSpace(raw[start:i]); len(val) > 0 {
				o = append(o, struct{ key, val []byte }{key, val})
			}
			start = i + 1
		case c == '}' || c == ']':
			depth--
		}
	}
	return o
}

// get gives the last value under one of keys, nil if there is none.
func (o object) get(keys ...string) []byte {
	for _, m := range slices.Backward(o) {
		if slices.Contains(keys, string(m.key)) {
			return m.val
		}
	}
	return nil
}

// str decodes a JSON string, with bad UTF-8 replaced; anything else is "".
func str(raw []byte) (s string) {
	if len(raw) > 0 && raw[0] == '"' && json.Unmarshal(raw, &s) != nil {
		return "" // cannot be: raw is valid
	}
	return s
}

// word gives a string, or the text of any other value; null is absent.
func word(raw []byte) string {
	if len(raw) == 0 || raw[0] == '"' || raw[0] == 'n' {
		return str(raw)
	}
	return string(raw)
}

// words joins the text in a part of a content list.
func words(raw []byte) string {
	s := str(raw)
	for _, m := range parse(raw) {
		if slices.Contains([]string{"", "text", "thinking"}, string(m.key)) {
			s += words(m.val)
		}
	}
	return s
}

// number gives a count; nil for what is none. Some servers send 12.0 or "12".
func number(raw []byte) *int64 {
	f, err := strconv.ParseFloat(word(raw), 64)
	if n := int64(f); err == nil && f >= 0 && f < 1<<53 {
		return &n
	}
	return nil
}

// present says whether a value is there and means something.
func present(raw []byte) bool {
	return !slices.Contains([]string{"", "null", `""`, "{}", "[]", "false", "0"}, string(raw))
}

func isObject(raw []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{")) && json.Valid(raw)
}

// escapeControls repairs the one fault of arguments that leaves their meaning
// clear: control characters that stand bare in strings.
func escapeControls(raw []byte) []byte {
	return regexp.MustCompile(`"(?s:[^"\\]|\\.)*"`).ReplaceAllFunc(raw, func(s []byte) []byte {
		return regexp.MustCompile(`[\x00-\x1f]`).ReplaceAllFunc(s, func(c []byte) []byte { return fmt.Appendf(nil, `\u%04x`, c) })
	})
}

// mentions says whether text has name as a whole word: reasoning_content is no complaint about content.
func mentions(text, name string) bool {
	return regexp.MustCompile(`(^|[^\w-])` + name + `($|[^\w-])`).MatchString(text)
}

// bareURL is a URL without user, query and fragment, which may hold secrets.
func bareURL(raw string) string { return regexp.MustCompile(`[?#].*|[^/]*@`).ReplaceAllString(raw, "") }

func quote(s string) string {
	raw, _ := json.Marshal(s) // a string cannot fail
	return string(raw)
}

// tell calls f if there is one.
func tell[T any](f func(T), v T) {
	if f != nil {
		f(v)
	}
}

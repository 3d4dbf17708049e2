//go:build linux

package main

import (
	"bufio"
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
	"log"
	"maps"
	"net"
	"net/http"
	"net/url"
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
	// Bytes of one event, and kept of one answer: arguments of 32 MB are real, a server gone wild must end; of one read: two TLS records.
	maxEvent, readSize = 64 << 20, 32 << 10
	// Nesting of an error: array, error, message, detail, list is 5; letters and digits of our ids: the only form that
	// Mistral's templates take.
	maxFaultDepth, madeUpID = 8, 9
	// For TCP and for TLS, where a far host under load takes 10; llama-server drops idle connections after 5, ours must go first.
	connectTimeout, idleConnection = 30 * time.Second, 2 * time.Second
	// Bytes of arguments that no piece repeats by chance; bytes that a call costs beside its text, for the bound on an answer.
	cumulative, callCost = 1000, 256
	// Wait for usage and sentinel after a finish reason; after a limit has passed, what waits in the socket may still be read.
	finishGrace, lateChance = 2 * time.Second, 100 * time.Millisecond
	// A longer Retry-After is for the caller's scheduler, not for a held runner; what any longer one is taken for.
	maxRetryAfter, farFuture = 5 * time.Minute, 365 * 24 * time.Hour
	// Bytes read of an error answer or web page, and of a server's words shown to the user.
	maxErrorBody, maxMessage = 256 << 10, 2000
	sentinel, inside         = "[DONE]", "the answer holds an error: "
	// How messages are encoded here: merging and the null repair work on these
	// bytes, so that what was sent once stays as it is.
	userStart, emptyTurn = `{"role":"user","content":"`, `{"content":"",`
)

var errSilent, errNoAnswer, errReplayEnd = errors.New("nothing arrived within limits.liveness_ms"), errors.New("the server closed the connection without an answer"), errors.New("the recording holds no further response")

// clientOptions are plain values, set once.
type clientOptions struct {
	// url is that of chat/completions, with its query; http://localhost/... when
	// socket, the path of a unix socket, is not "". header carries the key, "" =
	// Authorization: Bearer; an empty key sends none. keyNote says why a key was
	// withheld and ends the message of a 401 or 403.
	url, socket, header, key, keyNote, model, reasoningEffort, version string
	// Zero and nil are not sent: reasoning models refuse temperature, and servers
	// disagree about the name of the output limit.
	maxTokens         int
	temperature, topP *float64
	seed              *int64
	// The longest silence on a response, before and after its headers.
	liveness time.Duration
	// The wait before each re-send of one model call; its length bounds them.
	backoff []time.Duration
	// A replay; nil = the network.
	transport http.RoundTripper
	// Gets one line per response; nil = nothing is recorded.
	record io.Writer
	// Hears status, time and size of each request, never a body; may be nil.
	trace func(string)
}

// learned is what one run found out about its server. The caller makes both
// maps and keeps them: it seeds ids with those of a history that it read back.
// dropped: parameters refused once ("content": empty content is sent as null).
// ids: the call ids of the history.
type learned struct{ dropped, ids map[string]bool }

// request is one model call. Its messages come from the functions below; no
// tools leaves the key out, since many servers refuse []. extra: more top-level
// keys. reported gets the tokens of each attempt, of those that failed too.
type request struct {
	messages []json.RawMessage
	tools    json.RawMessage
	offered  []string
	extra    map[string]any
	learned  *learned
	reported []*usage
}

// emitter hears of an answer while it arrives, as the events content, reasoning,
// retry and progress of docs/protocol.md: their names, and pairs of field and
// value. Text is valid UTF-8.
type emitter func(kind string, pairs ...any)

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
// are unknown keys, inner those of its function: Gemini refuses the next turn
// without its own, which LiteLLM puts there.
type call struct {
	id, name, raw string
	args          json.RawMessage
	extra, inner  map[string]any
}

// usage counts tokens; nil = not reported.
type usage struct{ input, output, cached, reasoning *int64 }

// apiError is every failure of a model call but the caller's own cancellation.
// category is one of auth, billing, rate_limit, overloaded, server,
// bad_request, unsupported_param, context_length, not_found, not_sse, empty,
// stream_error, truncated, stall, malformed, network, internal; message is what
// the user reads. said is all that decides a class or a repair, lower case.
// status 0 = no HTTP status was told. retryable: the same request may be sent
// again and may then succeed. heard: text or thinking had arrived, which then
// does not count.
type apiError struct {
	category, message, said string
	status                  int
	retryable, heard        bool
	retryAfter              time.Duration
}

func (e *apiError) Error() string { return e.message }

// client sends model calls to one server. Set once; where names it in messages.
type client struct {
	clientOptions
	grace time.Duration
	where string
}

// newClient makes a client; nothing is dialled yet. The transport undoes no gzip:
// receive does, above the reads that count as signs of life.
// http.Client.Timeout and ResponseHeaderTimeout stay unset: local servers hold
// the headers until the prompt is processed, and a long answer is no fault.
func newClient(o clientOptions) *client {
	log.SetOutput(io.Discard) // net/http prints there what a server sends unasked: to our stderr, and with the key, should that be in it
	c := &client{o, finishGrace, cmp.Or(bareURL(o.url), "(recording)")}
	dial := (&net.Dialer{Timeout: connectTimeout}).DialContext
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dial, TLSHandshakeTimeout: connectTimeout, IdleConnTimeout: idleConnection, ForceAttemptHTTP2: true, DisableCompression: true}
	if o.socket != "" { // a proxy would be asked for the host name that stands in for the socket
		c.where, t.Proxy = c.where+" over unix:"+o.socket, nil
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, "unix", o.socket) }
	}
	t.OnProxyConnectResponse = func(_ context.Context, proxy *url.URL, _ *http.Request, resp *http.Response) error { // else Forbidden would be all that is told
		_, again := classify(resp.StatusCode, false, "")
		return map[bool]error{false: &apiError{category: "network", message: "the proxy " + proxy.Host + " answers " + resp.Status, retryable: again, retryAfter: retryAfter(resp.Header, time.Now())}}[resp.StatusCode == http.StatusOK]
	}
	c.transport = cmp.Or[http.RoundTripper](o.transport, t)
	return c
}

// complete makes one model call. Re-sends of every cause share one bound and
// repeat the same bytes; a repair is none, and happens once each. A server that
// asks to wait longer than maxRetryAfter ends the call, still retryable. The
// error is an *apiError, or wraps the cause of ctx. It runs in the caller's
// goroutine, as does emit.
func (c *client) complete(ctx context.Context, r *request, emit emitter) (*reply, error) {
	body, err := c.body(r)
	for sent := 0; err == nil; {
		rep, failed := c.attempt(ctx, r, body, emit)
		if failed == nil {
			return rep, nil
		}
		switch repaired := c.repair(r, body, failed); {
		case ctx.Err() != nil:
			return nil, fmt.Errorf("wait for the model: %w", context.Cause(ctx))
		case repaired != nil:
			body = repaired
			continue
		case !failed.retryable || sent == len(c.backoff) || failed.retryAfter > maxRetryAfter:
			return nil, failed
		}
		delay := cmp.Or(failed.retryAfter, c.backoff[sent]) // a date that has passed asks for nothing beyond our own wait
		sent++
		emit("retry", "attempt", sent, "delay_ms", delay.Milliseconds(), "error_category", failed.category, "error", failed.message, "discard_content", failed.heard)
		select {
		case <-ctx.Done(): // seen by the next attempt
		case <-time.After(delay):
			c.CloseIdleConnections() // HTTP/2 would take a dead one again
		}
	}
	return nil, err
}

// CloseIdleConnections is asked of a transport, and upstream of serve.go is one.
func (c *client) CloseIdleConnections() {
	(&http.Client{Transport: c.transport}).CloseIdleConnections()
}

// repair drops or renames the one parameter that a refusal names, once each in
// a run, and gives the new body; nil if there is nothing to repair. Servers
// word this refusal in a hundred ways, but they all name the parameter. A
// prompt that is too long names max_tokens as well, hence the category.
func (c *client) repair(r *request, body []byte, e *apiError) []byte {
	for _, name := range []string{"stream_options", "parallel_tool_calls", "temperature", "max_tokens", "content"} {
		sent := bytes.Contains(body, []byte(cmp.Or(map[string]string{"content": emptyTurn}[name], quote(name)+":")))
		if sent && (e.status == 400 || e.status == 422) && e.category != "context_length" && !r.learned.dropped[name] && regexp.MustCompile(`\b`+name+`\b`).MatchString(e.said) {
			r.learned.dropped[name] = true
			repaired, _ := c.body(r) // it was encoded before
			return repaired
		}
	}
	return nil
}

// body encodes a request. The same request and the same learned give the same
// bytes, since encoding/json sorts the keys of a map. What is unset is left
// out: servers refuse keys they do not know, and null where they do.
func (c *client) body(r *request) ([]byte, error) {
	dropped, unset := r.learned.dropped, map[string]bool{"tools": len(r.tools) <= len("[]"), "temperature": c.temperature == nil, "top_p": c.topP == nil, "seed": c.seed == nil, "reasoning_effort": c.reasoningEffort == "", "max_tokens": c.maxTokens == 0}
	m := map[string]any{"model": c.model, "stream": true, "stream_options": map[string]bool{"include_usage": true}, "messages": merge(r.messages, dropped["content"]),
		"tools": r.tools, "temperature": c.temperature, "top_p": c.topP, "seed": c.seed, "reasoning_effort": c.reasoningEffort, "max_tokens": c.maxTokens}
	maps.DeleteFunc(m, func(key string, _ any) bool { return unset[key] })
	maps.Copy(m, r.extra)
	m["max_completion_tokens"] = map[bool]any{true: m["max_tokens"]}[dropped["max_tokens"]]
	maps.DeleteFunc(m, func(key string, v any) bool { return dropped[key] || v == nil })
	return json.Marshal(m)
}

// merge gives messages as they are, except that neighbours of the user become
// one, since many templates demand that roles alternate, and that with null the
// empty content of an assistant's turn is null.
func merge(messages []json.RawMessage, null bool) (out []json.RawMessage) {
	for _, m := range messages {
		if text, user := bytes.CutPrefix(m, []byte(userStart)); user && len(out) > 0 && bytes.HasPrefix(out[len(out)-1], []byte(userStart)) {
			m, out = slices.Concat(bytes.TrimSuffix(out[len(out)-1], []byte(`"}`)), []byte(`\n\n`), text), out[:len(out)-1]
		}
		if rest, empty := bytes.CutPrefix(m, []byte(emptyTurn)); empty && null {
			m = slices.Concat([]byte(`{"content":null,`), rest)
		}
		out = append(out, m)
	}
	return out
}

func systemMessage(text string) json.RawMessage { return plainMessage("system", text) }

func userMessage(text string) json.RawMessage { return plainMessage("user", text) }

func plainMessage(role, text string) json.RawMessage {
	return json.RawMessage(`{"role":` + quote(role) + `,"content":` + quote(text) + "}")
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
	m, list := map[string]any{"role": "assistant", "content": r.text}, []map[string]any(nil)
	for _, c := range calls {
		fn := map[string]any{"name": c.name, "arguments": cmp.Or(string(c.args), "{}")}
		maps.Copy(fn, c.inner)
		list = append(list, map[string]any{"id": c.id, "type": "function", "function": fn})
		maps.Copy(list[len(list)-1], c.extra)
	}
	if len(list) > 0 {
		m["tool_calls"], m["reasoning_details"], m[r.reasoningKey] = list, r.details, r.reasoning
	}
	maps.DeleteFunc(m, func(key string, _ any) bool { return key == "" || key == "reasoning_details" && len(r.details) == 0 })
	raw, _ := json.Marshal(m) // strings and valid JSON cannot fail
	return raw
}

// attempt sends body once and reads the answer to its end. Everything that an
// answer leaves behind is in the builder and goes with it: a re-send knows
// nothing of the text and calls of a broken answer.
func (c *client) attempt(ctx context.Context, r *request, body []byte, emit emitter) (*reply, *apiError) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	b := &builder{emit: emit, offered: r.offered, ids: r.learned.ids, at: map[string]*partial{}}
	failed := c.send(ctx, cancel, body, b)
	r.reported = append(r.reported, cmp.Or(b.usage, &usage{}))
	if failed == nil {
		return &b.reply, nil
	}
	failed.heard = b.said.Len()+b.thought.Len() > 0
	note := cmp.Or(c.keyNote, map[bool]string{true: "no key was sent, since none is set (BELAY_API_KEY)"}[c.key == ""])
	// A server that speaks no HTTP is repeated whole in the error of net/http, and a Location may be as long.
	failed.message = fmt.Sprintf("%.*s", 2*maxMessage, c.clean("POST "+c.where+": "+failed.message)) + map[bool]string{true: "; " + note}[failed.category == "auth" && note != ""]
	return nil, failed
}

// send posts body, waits for the headers and receives the answer. It calls the
// transport directly: http.Client would follow redirects, where 301 to 303 turn
// the POST into a GET and the key goes to a server that it is not meant for,
// and would put the query of the URL, which may be a secret, into its errors.
func (c *client) send(ctx context.Context, cancel context.CancelCauseFunc, body []byte, b *builder) *apiError {
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body)) // of a URL that config.go made
	req.GetBody = nil                                                                        // or net/http sends it again by itself, unseen and uncounted
	// A compressing proxy would deliver in blocks, hence identity.
	req.Header = http.Header{"Content-Type": {"application/json"}, "Accept": {"text/event-stream, application/json"}, "Accept-Encoding": {"identity"}, "User-Agent": {"belay/" + c.version}}
	if c.key != "" {
		req.Header.Set(cmp.Or(c.header, "Authorization"), map[bool]string{true: "Bearer "}[c.header == ""]+c.key)
	}
	began, stop := time.Now(), watch(c.liveness, cancel)
	resp, err := c.transport.RoundTrip(req)
	if stop(); err == nil {
		if c.trace != nil {
			c.trace(fmt.Sprintf("POST %s: status %d after %d ms, %d bytes sent", c.where, resp.StatusCode, time.Since(began).Milliseconds(), len(body)))
		}
		return c.receive(ctx, cancel, resp, b)
	}
	silent := context.Cause(ctx) == errSilent || errors.Is(err, errSilent)
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	first, _ := errors.AsType[tls.RecordHeaderError](err)
	hint := cmp.Or(map[bool]string{true: "; if the server is right, name the file with its CA in SSL_CERT_FILE"}[untrusted], map[bool]string{true: "; the URL says https, and what answers there is plain http"}[string(first.RecordHeader[:]) == "HTTP/"])
	e := &apiError{category: map[bool]string{true: "stall", false: "network"}[silent], retryable: hint == "" && !errors.Is(err, errReplayEnd), message: cmp.Or(map[bool]error{true: errSilent}[silent], map[bool]error{true: errNoAnswer}[errors.Is(err, io.EOF)], err).Error() + hint}
	// What a proxy answered is one of our errors by now, and so is what a recording says that no re-send would change.
	_ = errors.As(err, &e)
	if c.record != nil && (silent || ctx.Err() == nil) { // no response is one too, or a replay would lack its retry; an error shows with the next
		json.NewEncoder(c.record).Encode(recorded{Headers: map[bool]http.Header{true: {"Retry-After": {fmt.Sprint(e.retryAfter.Seconds())}}}[e.retryAfter > 0], Body: []recordedPiece{}, End: cmp.Or(map[bool]string{true: "open"}[silent], c.clean(e.message)), Final: !e.retryable})
	}
	return e
}

// clean takes the key, and the query of the URL, which may hold one, out of what
// a server said, or of an error that repeats it: some servers show the request
// that they refuse. It looks twice, the second time behind the escapes that PHP,
// .NET, Go and Gson put into JSON, and Go and .NET into a page, for what stands in
// keys and queries; \\ is a backslash, whatever follows. Where no secret is behind
// them, they stay as they are.
func (c *client) clean(words string) string {
	_, query, _ := strings.Cut(c.url, "?")
	secrets := strings.NewReplacer(cmp.Or(c.key, "\xff(no key)"), "[key]", "?"+cmp.Or(query, "\xff(no query)"), "?[redacted]")
	words = secrets.Replace(words)
	plain := strings.NewReplacer(`\\`, `\\`, `\/`, "/", `\u0026`, "&", `\u002B`, "+", `\u002b`, "+", `\u003D`, "=", `\u003d`, "=", "&amp;", "&", "&#43;", "+", "&#x2B;", "+").Replace(words)
	clean := secrets.Replace(plain)
	return map[bool]string{true: words, false: clean}[clean == plain]
}

// receive reads a response into b and records it. A read ends when nothing
// arrives within the liveness limit, or within the grace after a finish reason;
// only time spent waiting counts, so a slow consumer is no stall. From the first
// read behind the limit lateChance is left: we may have been stopped. An error,
// whose status says most of it, has the limit for the whole: beats do not prolong it.
func (c *client) receive(ctx context.Context, cancel context.CancelCauseFunc, resp *http.Response, b *builder) (failed *apiError) {
	h := resp.Header
	tape := &recorded{Status: resp.StatusCode, End: "open", Headers: http.Header{"Content-Type": h["Content-Type"],
		"Content-Encoding": h["Content-Encoding"], "Date": h["Date"], "Location": strings.Fields(bareURL(h.Get("Location"))), "Retry-After": h["Retry-After"], "Retry-After-Ms": h["Retry-After-Ms"]}}
	reads, until, late := [][]byte(nil), time.Now().Add(map[bool]time.Duration{true: farFuture, false: c.liveness}[resp.StatusCode/100 == 2]), time.Time{}
	wire := bufio.NewReader(readerFunc(func(p []byte) (int, error) {
		stop := watch(min(c.liveness, time.Until(until)), cancel)
		n, err := resp.Body.Read(p)
		stop()
		if err != nil && err != io.EOF {
			err = cmp.Or(context.Cause(ctx), err)
		}
		if c.record != nil {
			reads = append(reads, bytes.Clone(p[:n]))
		}
		if err != nil && ctx.Err() == nil { // else we closed it
			tape.End = err.Error()
		}
		late = cmp.Or(late, map[bool]time.Time{true: time.Now()}[time.Until(until) < 0])
		return n, cmp.Or(err, map[bool]error{true: errSilent}[late != time.Time{} && time.Since(late) > lateChance]) // or a beat within each lateChance would go on for ever
	}))
	defer func() {
		cancel(nil) // before Close: a stream that may not end is never drained, and the server stops generating
		resp.Body.Close()
		tape.Body = c.redact(reads)
		line, _ := json.Marshal(tape) // cannot fail; a header may repeat the key, too
		if _, err := cmp.Or(c.record, io.Discard).Write([]byte(c.clean(string(line)) + "\n")); err != nil {
			failed = &apiError{category: "internal", message: "write the recording: " + err.Error()}
		}
	}()
	src, plain := io.Reader(wire), new(gzip.Reader)
	if magic, _ := wire.Peek(2); string(magic) == "\x1f\x8b" { // though we asked for identity; a proxy may add or take off the label alone
		plain.Reset(wire) // what fails here fails in the first read
		src = plain
	}
	if resp.StatusCode/100 == 2 {
		return b.read(src, func() { until, late = time.Now().Add(c.grace), time.Time{} })
	}
	raw, _ := io.ReadAll(io.LimitReader(src, maxErrorBody)) // a body that breaks off still has its status
	e := refusal([]byte(c.clean(string(raw))), resp.StatusCode, strings.TrimSpace(fmt.Sprint(resp.StatusCode, " ", http.StatusText(resp.StatusCode)))+": ")
	e.retryAfter = retryAfter(h, time.Now())
	e.message += map[bool]string{true: "; the server asks to come back after " + time.Now().Add(e.retryAfter).UTC().Format(time.RFC3339)}[e.retryAfter > maxRetryAfter] + map[bool]string{true: "; redirects are not followed, set the base URL to where it leads: " + bareURL(h.Get("Location"))}[e.status/100 == 3]
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
// it may be a fragment. open: a data line was seen; skipLF: the last line ended
// with CR; begun: a line came; bare: the body is no event stream.
type eventReader struct {
	src                             io.Reader
	name                            string
	line, data                      []byte
	open, skipLF, begun, bare, tail bool
}

// events yields the data of each event that has some, valid until the next one,
// then what ended the body: io.EOF, a read error, or an event longer than
// maxEvent. Bytes that came with an error count first. Each byte is searched
// once, however the reads fall, and nothing is allocated per event.
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
				err, whole, p = errors.New("an event is longer than 64 MiB"), false, nil
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
// all its lines are the data of one event. Two deviations find more errors: a
// field named error (older llama-servers), and a line that is bare JSON.
func (r *eventReader) take() bool {
	line := r.line
	if r.line = r.line[:0]; len(line) > 0 && !r.begun {
		line = bytes.TrimPrefix(line, []byte("\ufeff"))
		r.begun, r.bare = true, regexp.MustCompile(`^\s*[{[<]`).Match(line)
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	if value = bytes.TrimPrefix(value, []byte(" ")); r.bare || bytes.HasPrefix(line, []byte("{")) {
		name, value = []byte("data"), line
	}
	switch string(name) {
	case "event":
		r.name = string(value)
	case "error":
		r.name = "error"
		fallthrough
	case "data":
		if r.open {
			r.data = append(r.data, '\n')
		}
		r.open, r.data = true, append(r.data, value...)
	}
	if len(line) == 0 && !r.open {
		r.name = ""
	}
	return r.open && !r.bare && (len(line) == 0 || bytes.HasPrefix(r.data, []byte(sentinel)))
}

// builder assembles one answer, for one attempt. at finds calls by id ("" the
// last one) and by NUL + index: never an array, an index may be two billion. reason is the
// server's, "" = none yet; whole: a message came in place of deltas; seen: any choice
// came; kept: bytes held, bounded by maxEvent; reply is complete after end.
type builder struct {
	reply
	emit                  emitter
	offered               []string
	ids                   map[string]bool
	said, thought         strings.Builder
	parts                 []*partial
	at                    map[string]*partial
	reason                string
	sentinel, whole, seen bool
	kept                  int
}

// partial is a call under assembly. Whether its argument pieces were appended,
// cumulative or repeated shows only at the end, or once they are long: last is the
// last of pieces that each began with the one before, a NUL once one did not.
// joined is the whole name.
type partial struct {
	call
	joined, text []byte
	last         string
}

// read reads the body of a 2xx. It calls ended after a finish reason and after
// each event that brings more text or calls; heartbeats do not hold the answer.
func (b *builder) read(src io.Reader, ended func()) *apiError {
	r, held := &eventReader{src: src}, -1
	for data, err := range r.events {
		if err == nil {
			err = b.event(data, r)
		}
		if err != nil {
			return b.end(err, r.bare)
		}
		if b.reason != "" && b.kept > held {
			held = b.kept
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
	if data = bytes.TrimSpace(data); !utf8.Valid(data) {
		data = bytes.ToValidUTF8(data, []byte("\ufffd"))
	}
	switch {
	case len(data) == 0 || data[0] == ':' || string(data) == "null" || r.name != "" && r.name != "message" && r.name != "error" && data[0] != '{' && data[0] != '[':
		return nil
	case r.name == "error":
		return refusal(data, 0, inside)
	case data[0] == '<' && r.bare:
		return &apiError{category: "not_sse", message: refusal(data, 0, "the answer is a web page, not an event stream; check the base URL: ").message}
	case json.Valid(data):
		return b.value(data)
	}
	d, raw := json.NewDecoder(bytes.NewReader(data)), json.RawMessage(nil)
	for d.Decode(&raw) == nil && raw[0] == '{' {
		if err := b.value(raw); err != nil {
			return err
		}
	}
	rest := bytes.TrimSpace(data[d.InputOffset():])
	switch {
	case bytes.HasPrefix(bytes.TrimSpace(bytes.TrimPrefix(rest, []byte("data:"))), []byte(sentinel)):
		b.sentinel = true
		return io.EOF
	case len(rest) > 0 && !r.tail:
		return &apiError{category: "malformed", message: "an event is not valid JSON", retryable: true}
	}
	b.seen, b.whole = true, b.whole && !r.bare // several messages, or a part of one, are no body that ends by itself
	return nil
}

// value takes a chunk, a whole answer, an error, or a list of them (Gemini).
// An error is an object under error, a status of MiniMax, or a message without
// choices; "error": null is none. Text beside an error is kept.
func (b *builder) value(raw []byte) (err error) {
	o := parse(raw)
	choices := parse(o.get("choices"))
	bad := present(o.get("error")) || present(parse(o.get("base_resp")).get("status_code")) || // MiniMax
		len(choices) == 0 && (present(o.get("message", "detail", "errors", "error_msg", "error_message", "msg")) || string(o.get("type", "object")) == `"error"`)
	b.addUsage(parse(o.get("usage")), parse(o.get("timings")))
	for i, m := range choices {
		bad = b.choice(parse(m.val), i) || bad
	}
	for i := 0; i < len(o) && raw[0] == '[' && err == nil; i++ {
		err = b.value(o[i].val)
	}
	switch p := parse(o.get("prompt_progress")); {
	case bad:
		return refusal(raw, 0, inside)
	case b.kept > maxEvent:
		return &apiError{category: "malformed", message: "the answer is longer than 64 MiB"}
	case p != nil:
		b.emit("progress", "processed", cmp.Or(number(p.get("processed")), new(int64)), "total", cmp.Or(number(p.get("total")), new(int64)))
	}
	return err
}

// choice takes one choice, of which only number 0 was asked for; place is its
// own in the list, for servers that do not number. It says whether it carries an
// error. A later stop does not undo tool_calls or length. The reasons null and
// None are those of a server that prints its empty value.
func (b *builder) choice(o object, place int) bool {
	if n := strings.TrimSuffix(word(o.get("index")), ".0"); n != "" && n != "0" || n == "" && place > 0 {
		return false
	}
	b.seen, b.whole = true, b.whole && !present(o.get("delta")) // deltas repeat nothing, whatever came before
	b.hear(&b.said, "content", text(o.get("text")))             // the shape of plain completions
	b.delta(parse(o.get("delta")))
	if m := parse(o.get("message")); m != nil && (b.whole || b.said.Len()+b.thought.Len()+len(b.parts) == 0) { // else it repeats the deltas
		b.delta(m)
		b.whole = !present(o.get("delta"))
	}
	b.addUsage(parse(o.get("usage")), nil) // Moonshot
	if reason := strings.TrimSpace(str(o.get("finish_reason"))); reason != "" && !strings.EqualFold(reason, "null") && !strings.EqualFold(reason, "none") && (b.reason == "" || normal(reason) != "stop") {
		b.reason = reason
	}
	return present(o.get("error"))
}

// delta takes a delta or a message. Thinking may come under two names at once
// with the same text, of which one is taken, or as parts of the content
// (Mistral). Empty thinking has a name, too: DeepSeek and Kimi refuse a turn with
// calls that lacks it. Text after the reason counts: an inner step of a gateway may have
// said stop. A refusal is text, or the user would see an empty answer.
func (b *builder) delta(o object) {
	keys := []string{"reasoning_content", "reasoning", "reasoning_text", "thinking"}
	key := keys[max(0, slices.IndexFunc(keys, func(key string) bool { return text(o.get(key)) != "" }))]
	if v := string(o.get(key)); b.thought.Len() == 0 && v != "" && v != "null" {
		b.reasoningKey = key
	}
	b.hear(&b.thought, "reasoning", text(o.get(key)))
	for _, m := range parse(o.get("reasoning_details")) {
		b.details, b.kept = append(b.details, bytes.Clone(m.val)), b.kept+len(m.val)
	}
	for _, m := range parse(o.get("content")) {
		b.hear(&b.thought, "reasoning", text(parse(m.val).get("thinking")))
	}
	b.hear(&b.said, "content", text(o.get("content"))+str(o.get("refusal")))
	calls := parse(o.get("tool_calls"))
	if one := o.get("tool_calls"); len(one) > 0 && one[0] == '{' {
		calls = object{{val: one}}
	}
	if old := o.get("function_call"); len(calls) == 0 && present(old) {
		calls = object{{val: slices.Concat([]byte(`{"function":`), old, []byte("}"))}}
	}
	for _, m := range calls {
		b.call(parse(m.val))
	}
}

// hear takes a piece of visible text or of thinking; kind is its event. A later
// message in a stream begins with the one before, or is a piece itself.
func (b *builder) hear(to *strings.Builder, kind, s string) {
	s = strings.TrimPrefix(s, map[bool]string{true: to.String()}[b.whole])
	to.WriteString(s)
	if b.kept += len(s); s != "" {
		b.emit(kind, "content", s)
	}
}

// call takes a tool call or a piece of one, which belongs to the call with its
// index, else with its id, else to the last one; a nameless piece with a new
// index belongs to the call with its id, or to the last one without index. It
// opens a call if there is none, if a name comes with another id, or if it comes
// with another object after a complete one. Empty and null mean absent; the first
// id and name stay; arguments are text, or an object that stands for its text.
func (b *builder) call(o object) {
	fn := parse(o.get("function"))
	index, id, name, piece := strings.TrimSuffix(word(o.get("index")), ".0"), word(o.get("id")), str(fn.get("name")), word(fn.get("arguments"))
	p := cmp.Or(b.at["\x00"+index], map[bool]*partial{true: b.at[cmp.Or(id, "\x00")]}[name == ""])
	if index == "" {
		p = cmp.Or(b.at[id], b.at[""])
	}
	if p == nil || name != "" && (id != "" && p.id != "" && id != p.id || p.restarts([]byte(piece), id != "" && id == p.id)) {
		p = &partial{call: call{extra: map[string]any{}, inner: map[string]any{}}}
		b.parts, b.at[""], b.kept = append(b.parts, p), p, b.kept+callCost
	}
	p.id, p.name, p.joined, b.kept = cmp.Or(p.id, id), cmp.Or(p.name, name), append(p.joined, name...), b.kept+len(piece)+len(name)
	b.at["\x00"+index], b.at[p.id] = p, p
	switch {
	case piece == "" || p.repeats([]byte(piece)):
	case fn.get("arguments")[0] == '{': // a server that sends objects sends each one whole
		p.text, p.last = []byte(piece), piece
	case len(p.last) > cumulative && strings.HasPrefix(piece, p.last): // all of them are kept once, or a file of 100 kB would be 1 GB
		p.text, p.last, b.kept = []byte(piece), piece, b.kept-len(p.text)
	case strings.HasPrefix(piece, p.last):
		p.text, p.last = append(p.text, piece...), piece
	default:
		p.text, p.last = append(p.text, piece...), "\x00"
	}
	for i, m := range slices.Concat(o, fn) {
		if !slices.Contains([]string{"index", "id", "type", "function", "name", "arguments"}, string(m.key)) && string(m.val) != "null" {
			map[bool]map[string]any{true: p.extra, false: p.inner}[i < len(o)][string(m.key)], b.kept = json.RawMessage(bytes.Clone(m.val)), b.kept+len(m.val)
		}
	}
}

// restarts says whether piece begins another object after complete arguments,
// not just a longer or equal copy of them. With the id repeated it must be
// complete too, and {} is the placeholder that some servers begin with.
func (p *partial) restarts(piece []byte, sameID bool) bool {
	old, piece := bytes.TrimSpace(p.text), bytes.TrimSpace(piece)
	if p.name == "" || !bytes.HasPrefix(piece, []byte("{")) || !isObject(old) || sameID && (string(old) == "{}" || !isObject(piece)) || p.repeats(piece) {
		return false
	}
	return !bytes.HasPrefix(piece, old[:len(old)-1]) || len(piece) < len(old) || piece[len(old)-1] != ',' && piece[len(old)-1] != '}'
}

// repeats says whether piece is all of the arguments once more, though with other
// blanks: vLLM ends some calls with what it has parsed. A length that differs much
// is looked at no further, so that this costs no more than the pieces.
func (p *partial) repeats(piece []byte) bool {
	var old, again bytes.Buffer
	return 2*len(piece) >= len(p.text) && isObject(piece) && json.Compact(&old, p.text) == nil && json.Compact(&again, piece) == nil && bytes.Equal(old.Bytes(), again.Bytes())
}

// finish gives the call that the pieces mean. Its name is the first piece, or
// all joined if only that was offered; if neither was, all joined unless the
// first comes again in it: no tool runs, but the refusal says what was meant. Its
// arguments are the first reading that is an object, or nil. cut: the output limit
// ended the answer, so nothing may be read into missing arguments.
func (p *partial) finish(offered []string, cut bool) call {
	if joined := string(p.joined); !slices.Contains(offered, p.name) && (slices.Contains(offered, joined) || strings.Count(joined, p.name) == 1) {
		p.name = joined
	}
	all := bytes.TrimSpace(p.text)
	all = map[bool][]byte{true: []byte("{}"), false: all}[!cut && (len(all) == 0 || string(all) == "null")]
	// As appended; after a placeholder; cumulative; with all of it once more at the end.
	readings := [][]byte{all, bytes.TrimSpace(bytes.TrimPrefix(all, []byte("{}"))), bytes.TrimSpace([]byte(p.last)), bytes.TrimPrefix(all, all[len(all)/2:])}
	if i := slices.IndexFunc(readings, isObject); i >= 0 {
		p.args = readings[i]
	} else if p.args = escapeControls(all); !isObject(p.args) {
		p.args, p.raw = nil, string(p.text)
	}
	return p.call
}

// end decides what the answer is once nothing more will come; err is what ended
// it. A message ends an answer by itself if it is the body; in a stream more of
// it may follow. After a finish reason a read error is noise: the answer is complete and
// only the last chunk of the transfer is missing. Before it, a clean end of the
// body is a broken answer like any other.
func (b *builder) end(err error, bare bool) *apiError {
	failed := &apiError{category: "truncated", message: "the answer broke off without a finish reason: " + err.Error(), retryable: true}
	switch {
	case errors.As(err, &failed):
	case b.reason == "error":
		failed.category, failed.message = "stream_error", "the server ended the answer with the reason error"
	case b.reason != "" || b.whole && bare || b.sentinel:
		if b.settle() {
			return nil
		}
		fallthrough
	case err == io.EOF && !b.seen:
		failed.category, failed.message = "empty", "the answer has neither text nor tool calls"
	case errors.Is(err, errSilent):
		failed.category, failed.message = "stall", "the answer stopped: "+err.Error()
	}
	return failed
}

// settle makes the reply of an ended answer and says whether it holds anything.
// After a proper end all calls are kept, invalid ones for a refusal; after the
// output limit the complete ones; else none. Ids become unique in the whole
// history: a repeated one is refused, or sends a result to the wrong call.
func (b *builder) settle() bool {
	b.text, b.reasoning, b.finish = b.said.String(), b.thought.String(), normal(b.reason)
	proper := b.finish == "stop" || b.finish == "tool_calls"
	for _, p := range b.parts {
		c := p.finish(b.offered, !proper)
		if c.name+string(p.text) != "" && (proper || b.finish == "length" && c.args != nil) {
			for c.id == "" || b.ids[c.id] {
				c.id = rand.Text()[:madeUpID]
			}
			b.ids[c.id], b.calls = true, append(b.calls, c)
		}
	}
	b.finish = cmp.Or(map[bool]string{true: "tool_calls"}[proper && len(b.calls) > 0], b.finish)
	return !proper || len(b.calls) > 0 || strings.TrimSpace(b.text) != ""
}

// normal gives finish reasons that mean the same one name; others stay as they
// are. Without one the sentinel ended the answer.
func normal(reason string) string {
	return cmp.Or(map[string]string{"": "stop", "stop": "stop", "stop_sequence": "stop", "eos": "stop", "eos_token": "stop", "end_turn": "stop", "end": "stop", "complete": "stop", "completed": "stop",
		"tool_calls": "tool_calls", "tool_call": "tool_calls", "tool_use": "tool_calls", "function_call": "tool_calls", "length": "length", "max_tokens": "length", "max_output_tokens": "length", "model_length": "length"}[strings.ToLower(reason)], reason)
}

// addUsage takes a usage object. Its counts are running totals, so the last one
// stands; zeros are a placeholder. Before 2026 llama-server had what was cached in
// its timings alone.
func (b *builder) addUsage(o, timings object) {
	if o == nil {
		return
	}
	in, out := parse(o.get("prompt_tokens_details", "input_tokens_details")), parse(o.get("completion_tokens_details", "output_tokens_details"))
	cached := cmp.Or(number(in.get("cached_tokens")), number(o.get("prompt_cache_hit_tokens", "cached_tokens")), number(timings.get("cache_n")))
	u := &usage{number(o.get("prompt_tokens", "input_tokens")), number(o.get("completion_tokens", "output_tokens")), cached, number(out.get("reasoning_tokens"))}
	b.usage = map[bool]*usage{true: u, false: b.usage}[*cmp.Or(u.input, new(int64))+*cmp.Or(u.output, new(int64)) > 0]
}

// refusal finds the error in a body: JSON, the data of an event stream (also
// with a 4xx), a web page, of which the title is shown, or plain text. status 0:
// it came inside an answer, and a status among its fields counts instead.
func refusal(raw []byte, status int, prefix string) *apiError {
	e := &apiError{}
	e.read(regexp.MustCompile(`(?s)^\s*(?:\w*:[^\n]*\n)*?data:(.*?)(?:\r?\n\r?\n.*)?$`).ReplaceAll(raw, []byte("$1")), 0)
	e.status, e.said, e.message = cmp.Or(status, e.status), strings.ToLower(e.message+e.said), strings.TrimSuffix(prefix+cmp.Or(e.message, strings.Join(strings.Fields(strings.ToValidUTF8(string(raw[:min(len(raw), maxMessage)]), "")), " ")), ": ")
	e.category, e.retryable = classify(e.status, status == 0, e.said)
	return e
}

// read walks down the keys under which servers and gateways put their errors; a
// string may hold JSON again. It collects the message, the codes and names, and
// a status among them.
func (e *apiError) read(raw []byte, depth int) {
	plain, o := strings.Join(strings.Fields(strings.ToValidUTF8(string(raw), "\ufffd")), " "), object(nil)
	if page := regexp.MustCompile(`(?i)^<.*?(<title[^>]*>(.*?)</title>|$)`).FindStringSubmatch(plain); page != nil && depth == 0 {
		plain = cmp.Or(page[2], regexp.MustCompile(`<[^>]*>`).ReplaceAllString(plain, " "))
	} else if raw = bytes.TrimSpace(raw); json.Valid(raw) {
		o = parse(raw)
	}
	switch again := str(raw); {
	case depth > maxFaultDepth || plain == "null" || strings.Contains(e.message, plain):
	case again != "":
		e.read([]byte(again), depth+1)
	case o == nil:
		e.message += strings.Repeat("; ", min(len(e.message), 1)) + plain
		e.message = strings.ToValidUTF8(e.message[:min(len(e.message), maxMessage)], "")
	}
	for _, m := range o {
		switch word := word(m.val); string(m.key) {
		case "", "choices", "error", "errors", "message", "detail", "msg", "loc", "status_msg", "base_resp", "metadata", "raw", "error_description", "error_msg", "error_message", "title":
			e.read(m.val, depth+1)
		case "code", "status", "status_code", "type", "param", "error_type", "details":
			n, _ := strconv.Atoi(word)
			e.status = cmp.Or(e.status, map[bool]int{true: n}[n >= 400 && n < 600])
			e.said += " " + word[:min(len(word), max(0, maxMessage-len(e.said)))]
		}
	}
}

// classify gives a server's answer its category, once for the whole program,
// and says whether the same request may be sent again. Status and code decide;
// words only where they are known to mean something else. The first rule that
// applies wins, so those that forbid a re-send stand before those that allow
// one. inside: the error came in an answer with status 200. vague: the status
// does not say whose fault it is. Codes are snake case and messages are not, so
// one pattern serves both.
func classify(status int, inside bool, said string) (category string, retryable bool) {
	vague := status == 0 || status >= 500
	has := func(words string) bool { return regexp.MustCompile(words).MatchString(said) }
	type rule struct {
		category           string
		retryable, applies bool
	}
	rules := []rule{
		// Outside of a plain refusal, tokens that exceed something may be those of a minute.
		{"context_length", false, status == 413 || !slices.Contains([]int{401, 403, 404, 429}, status) && (has(`context[_ ](length|size|window|limit|shift)|maximum (context|prompt)|(prompt|input) (is )?too long`) || slices.Contains([]int{400, 422, 500}, status) && has(`\b(prompt|input)\b.{0,40} too (long|large|big)|\b(prompt|(input|total) length|tokens?)\b.{0,40} exceed|exceed.{0,40} (token limit|number of tokens)|(longer|more) than (the )?max|max_seq_len|tokens.? \+ .?max_new_tokens|tokens_limit|reduce the length|range of input length|token count .{0,40} supports up to`))},
		{"billing", false, status == 402 || !has(`resource_exhausted`) && has(`insufficient[_ ](user_)?(quota|balance|credit|funds)|balance is insufficient|no remaining balance|overdue|arrear|credit balance|available credits|spending limit|billing_|payment required|exceeded[_ ](your )?current[_ ]quota`)}, // Gemini says RESOURCE_EXHAUSTED with its quota per minute
		{"auth", false, status == 401 || status == 403 || vague && has(`(invalid|incorrect)[_ ]api[_ ]key|authentication[_ ](error|failed)|unauthorized|permission[_ ]denied`)},
		{"not_found", false, status == 404 || status == 405 || status/100 == 3 || has(`model_not_found`) || vague && has(`not_found_error|unexpected endpoint|\bmodel\b.{1,200}(not found|does not exist)`)},
		{"rate_limit", true, status == 429 || vague && has(`rate[-_ ]limit|too many (requests|tokens)|resource_exhausted`)},
		{"bad_request", false, vague && has(`jinja|chat template|must alternate|server flag| --[a-z]`)}, // the model or the server's start is wrong: it will fail again
		{"server", false, vague && has(`(failed to|unable to|could not|cannot be) load`)},
		{"overloaded", true, status == 503 || status == 529 || vague && has(`overloaded|loading model|model is loading|at capacity|unavailable|server is busy`)},
		{"bad_request", false, status == 0 && has(`invalid[_ ]?(request|argument|parameter)|bad_?request`)},
		{"stream_error", true, inside && vague},
		{"server", true, status >= 500 || status == 408 || status == 425},
		{"unsupported_param", false, has(`unsupported_(parameter|value)|extra_forbidden|\b(stream_options|parallel_tool_calls|temperature|top_p|max_tokens|max_completion_tokens|seed|reasoning_effort)\b`)},
		{"bad_request", false, true},
	}
	first := rules[slices.IndexFunc(rules, func(r rule) bool { return r.applies })]
	return first.category, first.retryable
}

// retryAfter reads what the server asks to wait: milliseconds if given, else
// seconds (1.5 was seen) or a date, of which a past one is 0. A date is one of the
// server's clock, which may be far from ours. Anything else, such as nan or a
// negative, is 0, too; the wait is at most farFuture.
func retryAfter(h http.Header, now time.Time) (wait time.Duration) {
	at, _ := http.ParseTime(h.Get("Retry-After")) // what is no date is long past
	said, _ := http.ParseTime(h.Get("Date"))
	wait = min(max(at.Sub(cmp.Or(said, now)), 0), farFuture)
	for i, name := range []string{"Retry-After", "Retry-After-Ms"} {
		if n, err := strconv.ParseFloat(strings.TrimSpace(h.Get(name)), 64); err == nil && n >= 0 {
			wait = time.Duration(min(n*[]float64{1e9, 1e6}[i], float64(farFuture)))
		}
	}
	return wait
}

// recorded is one line of a recording: one response as received. end is what
// ended the body: EOF, the text of a read error, or open where we closed first.
// final: no response came, and the request was not sent again.
type recorded struct {
	Status  int             `json:"status"`
	Headers http.Header     `json:"headers"`
	Body    []recordedPiece `json:"body"`
	End     string          `json:"end"`
	Final   bool            `json:"final,omitempty"`
}

// recordedPiece is what one read gave; base64 when it is not UTF-8.
type recordedPiece struct {
	Text   string `json:"text,omitempty"`
	Base64 []byte `json:"base64,omitempty"`
}

// redact gives what was read in the form of a recording, without the key. A body
// that repeats it loses its read boundaries, where it may be split, and its gzip.
func (c *client) redact(reads [][]byte) []recordedPiece {
	whole, plain := bytes.Join(reads, nil), new(gzip.Reader)
	if plain.Reset(bytes.NewReader(whole)) == nil {
		whole, _ = io.ReadAll(io.LimitReader(plain, maxEvent))
	}
	if clean := c.clean(string(whole)); clean != string(whole) {
		reads = [][]byte{[]byte(clean)}
	}
	body := []recordedPiece{}
	for _, p := range reads {
		body = append(body, map[bool]recordedPiece{true: {Text: string(p)}, false: {Base64: p}}[utf8.Valid(p)])
	}
	return body
}

// newReplayer gives a transport that answers from a recording, in order,
// without network, and with one read per recorded read. It refuses a recording
// whole if any line is not as written, with the number of the line; a line
// without its newline was cut. When it runs out, requests fail with errReplayEnd.
// It serves one goroutine.
func newReplayer(data []byte) (http.RoundTripper, error) {
	lines, next := []recorded(nil), 0
	for raw := range bytes.Lines(data) {
		line, d := recorded{}, json.NewDecoder(bytes.NewReader(raw))
		d.DisallowUnknownFields()
		if err := d.Decode(&line); err != nil || d.More() || raw[len(raw)-1] != '\n' || line.Status < 100 && (line.Status != 0 || len(line.Body) > 0) || line.End == "" {
			return nil, fmt.Errorf("read the recording, line %d: no whole response as --record writes it: %w", len(lines)+1, cmp.Or(err, io.ErrUnexpectedEOF))
		}
		lines = append(lines, line)
	}
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		if next == len(lines) {
			return nil, fmt.Errorf("%w after %d", errReplayEnd, next)
		}
		line, body := lines[next], []io.Reader(nil)
		for _, piece := range line.Body { // a MultiReader gives each piece as a read of its own
			body = append(body, strings.NewReader(piece.Text), bytes.NewReader(piece.Base64))
		}
		end := cmp.Or(map[string]error{io.EOF.Error(): io.EOF, "open": errSilent}[line.End], errors.New(line.End))
		if next++; line.Status == 0 {
			return nil, map[bool]error{true: &apiError{category: "network", message: line.End, retryable: !line.Final, retryAfter: retryAfter(line.Headers, time.Now())}, false: end}[line.Final || line.Headers != nil]
		}
		return &http.Response{StatusCode: line.Status, Header: line.Headers, Body: io.NopCloser(io.MultiReader(append(body, readerFunc(func([]byte) (int, error) { return 0, end }))...))}, nil
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
	for i, depth, start, key := 0, 0, 1, []byte(nil); i < len(raw); i++ {
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
			key, start = bytes.Trim(raw[start:i], "\" \t\r\n"), i+1
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

// get gives the last value under key, or the last present one under one of
// keys, of which gateways fill in some and leave null or 0 under the others.
func (o object) get(keys ...string) (val []byte) {
	for i := len(o) - 1; i >= 0 && (val == nil || len(keys) > 1 && !present(val)); i-- {
		if slices.Contains(keys, string(o[i].key)) {
			val = o[i].val
		}
	}
	return val
}

// str decodes a JSON string, a lone surrogate replaced; anything else is "".
func str(raw []byte) string {
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	var s string
	_ = json.Unmarshal(raw, &s) // cannot fail: raw is valid
	return s
}

// text gives what a piece of text says: a string, a bare number (Cloudflare
// prints the token 6 so), or what stands under text in an object or in those of
// a list. Deeper lists are none, so that this takes no longer than to read them.
func text(raw []byte) string {
	if len(raw) > 0 && raw[0] <= '9' { // a quote, a minus or a digit
		return word(raw)
	}
	var s strings.Builder
	for _, m := range parse(raw) {
		if m.key == nil && m.val[0] != '[' || string(m.key) == "text" && m.val[0] <= '9' {
			s.WriteString(text(m.val))
		}
	}
	return s.String()
}

// word gives a string, or the text of any other value; null is absent. An id of
// 7 becomes "7", arguments that are an object become their text. Of all values but
// strings null alone begins or ends with a letter of the set that is cut off.
func word(raw []byte) string { return cmp.Or(str(raw), strings.Trim(string(raw), "\"nul")) }

// number gives a count; nil for what is none. Some servers send 12.0 or "12".
func number(raw []byte) *int64 {
	f, err := strconv.ParseFloat(word(raw), 64)
	return map[bool]*int64{true: new(int64(f))}[err == nil && f >= 0 && f < 1<<53]
}

// present says whether a value is there and means something: it is none of this
// list, of which no single value spans two.
func present(v []byte) bool { return !strings.Contains(`,,null,"",{},[],false,0,`, ","+string(v)+",") }

func isObject(raw []byte) bool { return len(raw) > 1 && raw[0] == '{' && json.Valid(raw) }

// escapeControls repairs the one fault of arguments that leaves their meaning
// clear: control characters that stand bare in strings.
func escapeControls(raw []byte) []byte {
	return regexp.MustCompile(`"(?s:[^"\\]|\\.)*"`).ReplaceAllFunc(raw, func(s []byte) []byte {
		return regexp.MustCompile(`[\x00-\x1f]`).ReplaceAllFunc(s, func(c []byte) []byte { return fmt.Appendf(nil, `\u%04x`, c) })
	})
}

// bareURL is a URL without user, query and fragment, which may hold secrets.
func bareURL(raw string) string { return regexp.MustCompile(`[?#].*|[^/]*@`).ReplaceAllString(raw, "") }

func quote(s string) string {
	raw, _ := json.Marshal(s) // a string cannot fail
	return string(raw)
}

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"
	"unicode/utf8"
)

// The limits that the case files were written for.
const (
	caseIdle  = 800 * time.Millisecond
	caseGrace = 200 * time.Millisecond
	caseGap   = 3 * time.Millisecond
	// testDeadline is generous: it only ends a test that hangs.
	testDeadline = 60 * time.Second
)

// streamCase is one file of testdata/stream; README.md there says what the keys mean.
type streamCase struct {
	Name     string
	Request  struct{ Tools []string }
	Response struct {
		Status    int
		Headers   map[string]string
		Body      *string
		BodyB64   *string `json:"body_b64"`
		Chunks    []string
		ChunksB64 []string `json:"chunks_b64"`
		Split     int      `json:"split_every"`
		Delay     int      `json:"chunk_delay_ms"`
		Expand    map[string]struct {
			Text  string
			Times int
		}
		Hang, Reset bool
	}
	Expect map[string]any
}

// expand replaces the markers of a case in s.
func (c *streamCase) expand(s string) string {
	for marker, e := range c.Response.Expand {
		s = strings.ReplaceAll(s, marker, strings.Repeat(e.Text, e.Times))
	}
	return s
}

// pieces gives the body as the reads that the client must see.
func (c *streamCase) pieces(t *testing.T) (out [][]byte) {
	t.Helper()
	plain := slices.Clone(c.Response.Chunks)
	if c.Response.Body != nil {
		plain = append(plain, *c.Response.Body)
	}
	for _, s := range plain {
		out = append(out, []byte(c.expand(s)))
	}
	coded := c.Response.ChunksB64
	if c.Response.BodyB64 != nil {
		coded = append(coded, *c.Response.BodyB64)
	}
	for _, s := range coded {
		raw, err := base64.StdEncoding.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, raw)
	}
	if n := c.Response.Split; n > 0 {
		out = slices.Collect(slices.Chunk(bytes.Join(out, nil), n))
	}
	return out
}

// serveRaw accepts connections until the test ends and hands each to handle,
// which writes HTTP by hand. It gives the URL.
func serveRaw(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() { l.Close(); all.Wait() })
	// owner: serveRaw; ends when the listener is closed; joined by the cleanup.
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			// owner: serveRaw; ends when handle returns; joined by the cleanup.
			all.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(testDeadline))
				handle(conn)
			})
		}
	})
	return "http://" + l.Addr().String() + "/v1/chat/completions?api-version=1"
}

// readRequest reads one request from conn, whole.
func readRequest(conn net.Conn) (*http.Request, []byte, error) {
	req, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil {
		return nil, nil, err
	}
	body, err := io.ReadAll(req.Body)
	return req, body, err
}

// waitGone waits until the other side has closed the connection.
func waitGone(conn net.Conn) { io.Copy(io.Discard, conn) }

// play answers one request with the response of c, byte for byte.
func (c *streamCase) play(t *testing.T, conn net.Conn) {
	if _, _, err := readRequest(conn); err != nil {
		return
	}
	var head strings.Builder
	fmt.Fprintf(&head, "HTTP/1.1 %d Status\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n", c.Response.Status)
	for key, val := range c.Response.Headers {
		if val != "" {
			fmt.Fprintf(&head, "%s: %s\r\n", key, val)
		}
	}
	io.WriteString(conn, head.String()+"\r\n")
	gap := max(caseGap, time.Duration(c.Response.Delay)*time.Millisecond)
	pace := time.NewTicker(gap) // the pace of the pieces is what the case is about
	defer pace.Stop()
	for _, piece := range c.pieces(t) {
		<-pace.C
		if len(piece) == 0 {
			continue
		}
		if _, err := fmt.Fprintf(conn, "%x\r\n%s\r\n", len(piece), piece); err != nil {
			return
		}
	}
	switch {
	case c.Response.Hang:
		waitGone(conn)
	case c.Response.Reset:
		<-pace.C
		<-pace.C // let the client read first: a reset throws away what waits in its socket
		conn.(*net.TCPConn).SetLinger(0)
	default:
		io.WriteString(conn, "0\r\n\r\n")
	}
}

// heard collects what was emitted.
type heard struct {
	text, reasoning strings.Builder
	retries         []map[string]any
	progress        []int64
}

func (h *heard) emit(kind string, pairs ...any) {
	fields := map[string]any{}
	for pair := range slices.Chunk(pairs, 2) {
		fields[pair[0].(string)] = pair[1]
	}
	switch kind {
	case "content":
		h.text.WriteString(fields["content"].(string))
	case "reasoning":
		h.reasoning.WriteString(fields["content"].(string))
	case "retry":
		h.retries = append(h.retries, fields)
	case "progress":
		h.progress = append(h.progress, *fields["processed"].(*int64), *fields["total"].(*int64))
	}
}

// quiet hears nothing.
func quiet(string, ...any) {}

func newLearned() *learned { return &learned{map[string]bool{}, map[string]bool{}} }

// ask sends one plain question with tools offered.
func ask(c *client, h *heard, tools ...string) (*reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testDeadline)
	defer cancel()
	r := &request{messages: []json.RawMessage{userMessage("hi")}, offered: tools, learned: newLearned()}
	return c.complete(ctx, r, h.emit)
}

// outcome puts a result in the form of a case's expectation.
func outcome(h *heard, rep *reply, err error) map[string]any {
	got := map[string]any{"text": h.text.String(), "reasoning": h.reasoning.String(), "tool_calls": []any{}, "finish": "", "error": nil, "retryable": false}
	var api *apiError
	if errors.As(err, &api) {
		got["error"], got["message"], got["retryable"] = api.category, api.message, api.retryable
		got["retry_after_ms"] = float64(api.retryAfter.Milliseconds())
		return got
	}
	got["finish"] = rep.finish
	var calls []any
	for _, c := range rep.calls {
		call := map[string]any{"id": c.id, "name": c.name, "arguments": string(c.args) + c.raw}
		for key, val := range c.extra {
			var v any
			json.Unmarshal(val.(json.RawMessage), &v)
			call[key] = v
		}
		calls = append(calls, call)
	}
	got["tool_calls"] = calls
	if rep.usage != nil {
		got["usage"] = map[string]any{"prompt_tokens": tokens(rep.usage.input), "completion_tokens": tokens(rep.usage.output)}
	}
	return got
}

func tokens(n *int64) any {
	if n == nil {
		return nil
	}
	return float64(*n)
}

// differs says how got misses want, "" if it does not.
func (c *streamCase) differs(got, want map[string]any) string {
	for key, w := range want {
		g := got[key]
		switch key {
		case "also_ok":
			continue
		case "error_contains":
			if message, _ := got["message"].(string); !strings.Contains(strings.ToLower(message), strings.ToLower(w.(string))) {
				return fmt.Sprintf("message %q lacks %q", message, w)
			}
			continue
		case "text":
			w = c.expand(w.(string))
		case "retryable":
			if got["error"] == nil {
				continue
			}
		case "tool_calls":
			if s := c.callsDiffer(g, w); s != "" {
				return s
			}
			continue
		}
		if !reflect.DeepEqual(g, w) {
			return fmt.Sprintf("%s: got %.300v, want %.300v", key, g, w)
		}
	}
	return ""
}

func (c *streamCase) callsDiffer(got, want any) string {
	g, _ := got.([]any)
	w, _ := want.([]any)
	if len(g) != len(w) {
		return fmt.Sprintf("calls: got %.300v, want %.300v", g, w)
	}
	ids := map[any]bool{}
	for i := range w {
		gc, wc := g[i].(map[string]any), w[i].(map[string]any)
		if gc["id"] == "" || ids[gc["id"]] {
			return fmt.Sprintf("call id %q is empty or repeated", gc["id"])
		}
		ids[gc["id"]] = true
		for key, v := range wc {
			switch key {
			case "id":
				if v != "*" && v != gc["id"] {
					return fmt.Sprintf("call id: got %v, want %v", gc["id"], v)
				}
			case "arguments":
				var a, b any
				text := c.expand(v.(string))
				e1, e2 := json.Unmarshal([]byte(gc["arguments"].(string)), &a), json.Unmarshal([]byte(text), &b)
				if (e1 != nil || e2 != nil) && gc["arguments"] != text || !reflect.DeepEqual(a, b) {
					return fmt.Sprintf("arguments: got %.200v, want %.200s", gc["arguments"], text)
				}
			default:
				if !reflect.DeepEqual(gc[key], v) {
					return fmt.Sprintf("call key %s: got %v, want %v", key, gc[key], v)
				}
			}
		}
	}
	return ""
}

// matches tries the main outcome and then each of also_ok laid over it.
func (c *streamCase) matches(got map[string]any) string {
	first := c.differs(got, c.Expect)
	others, _ := c.Expect["also_ok"].([]any)
	for _, o := range others {
		want := map[string]any{}
		for key, v := range c.Expect {
			want[key] = v
		}
		for key, v := range o.(map[string]any) {
			want[key] = v
		}
		if want["error"] != nil {
			want["finish"] = ""
		}
		if want["error"] == nil {
			delete(want, "error_contains")
		}
		if first != "" && c.differs(got, want) == "" {
			first = ""
		}
	}
	return first
}

func loadCases(t testing.TB) (cases []streamCase) {
	t.Helper()
	files, _ := filepath.Glob("testdata/stream/*.json")
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var c streamCase
		if err := json.Unmarshal(raw, &c); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if c.Response.Status == 0 {
			c.Response.Status = 200
		}
		cases = append(cases, c)
	}
	if len(cases) != 128 {
		t.Fatalf("%d case files, want 128", len(cases))
	}
	return cases
}

func caseClient(url string) *client {
	c := newClient(clientOptions{url: url, model: "demo-1", version: "test", liveness: caseIdle})
	c.grace = caseGrace
	return c
}

func TestEveryServerCaseOverARealConnection(t *testing.T) {
	for _, c := range loadCases(t) {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			url := serveRaw(t, func(conn net.Conn) { c.play(t, conn) })
			var h heard
			rep, err := ask(caseClient(url), &h, c.Request.Tools...)
			if s := c.matches(outcome(&h, rep, err)); s != "" {
				t.Errorf("%s\nerror: %v", s, err)
			}
		})
	}
}

// chunk is a usual chunk with one delta and, if given, a finish reason.
func sseChunk(delta string, finish ...string) string {
	reason := "null"
	if len(finish) > 0 {
		reason = quote(finish[0])
	}
	return `data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":` + delta + `,"finish_reason":` + reason + "}]}\n\n"
}

const done = "data: [DONE]\n\n"

// messageEvent is an event that holds a message in place of a delta.
func messageEvent(text, finish string) string {
	return `data: {"choices":[{"index":0,"message":{"role":"assistant","content":` + quote(text) + `},"finish_reason":` + finish + "}]}\n\n"
}

// answer is a whole plain stream with one text.
func sseAnswer(text string) string {
	return sseChunk(`{"content":`+quote(text)+`}`) + sseChunk(`{}`, "stop") + done
}

// callDelta is a delta with the elements of tool_calls.
func callDelta(elements ...string) string {
	return `{"tool_calls":[` + strings.Join(elements, ",") + `]}`
}

// splitReader gives at most n bytes a read.
type splitReader struct {
	r io.Reader
	n int
}

func (s splitReader) Read(p []byte) (int, error) { return s.r.Read(p[:min(len(p), s.n)]) }

// result is what an answer came to, in one comparable line.
func result(body string, step int, offered ...string) string {
	var h heard
	b := &builder{emit: h.emit, offered: offered, ids: map[string]bool{}, at: map[string]*partial{}}
	failed := b.read(splitReader{strings.NewReader(body), step}, func() {})
	var out strings.Builder
	fmt.Fprintf(&out, "text=%q", h.text.String())
	if h.reasoning.Len() > 0 {
		fmt.Fprintf(&out, " reasoning=%q", h.reasoning.String())
	}
	if failed != nil {
		fmt.Fprintf(&out, " error=%s retry=%v %q", failed.category, failed.retryable, failed.message)
		return out.String()
	}
	for _, c := range b.calls {
		id := c.id
		if len(id) == madeUpID && id == strings.ToUpper(id) {
			id = "*"
		}
		fmt.Fprintf(&out, " %s:%s(%s)", id, c.name, string(c.args)+c.raw)
		if c.args == nil {
			out.WriteString("!")
		}
		for _, key := range slices.Sorted(maps.Keys(c.extra)) {
			fmt.Fprintf(&out, "+%s=%s", key, c.extra[key])
		}
	}
	fmt.Fprintf(&out, " finish=%s", b.finish)
	if b.usage != nil {
		fmt.Fprintf(&out, " usage=%v/%v/%v/%v", tokens(b.usage.input), tokens(b.usage.output), tokens(b.usage.cached), tokens(b.usage.reasoning))
	}
	return out.String()
}

func TestAnswersOfEveryKind(t *testing.T) {
	list := func(args string) string {
		return sseChunk(callDelta(`{"index":0,"id":"a","type":"function","function":{"name":"ls","arguments":` + args + `}}`))
	}
	end := sseChunk(`{}`, "tool_calls") + done
	for _, c := range []struct{ name, body, want string }{
		// framing
		{"crlf everywhere", strings.ReplaceAll(sseAnswer("ok"), "\n", "\r\n"), `text="ok" finish=stop`},
		{"mixed line ends", "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\r\r\n" + sseChunk(`{"content":"b"}`) + strings.ReplaceAll(sseChunk(`{}`, "stop"), "\n", "\r") + done, `text="ab" finish=stop`},
		{"byte order mark inside is content", sseChunk(`{"content":"`+"\ufeff"+`x"}`) + sseChunk(`{}`, "stop") + done, `text="\ufeffx" finish=stop`},
		{"byte order mark before a later field hides it", sseAnswer("a")[:len(sseAnswer("a"))-len(done)] + "\ufeffdata: {\"error\":\"x\"}\n\n", `text="a" finish=stop`},
		{"comment without blank line", ": ping\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"comment inside an event", ": ping\ndata: {\"choices\":[{\"delta\":{\"content\":\"x\"}\n: ping\ndata: }]}\n\n" + sseChunk(`{}`, "stop"), `text="x" finish=stop`},
		{"unknown event names", "event: ping\ndata: 17\n\nevent: chunk\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"event name does not leak", "event: error\n\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"no blank after the colon", strings.ReplaceAll(sseAnswer("ok"), "data: ", "data:"), `text="ok" finish=stop`},
		{"data null", "data: null\n\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"data is a field without colon", "data\n\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"field names are exact", "Data: x\ndata : y\nretry: 10\nid: \x00\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"sentinel without blank line", sseChunk(`{"content":"ok"}`) + "data: [DONE]\n", `text="ok" finish=stop`},
		{"sentinel without line end", sseChunk(`{"content":"ok"}`) + "data: [DONE]", `text="ok" finish=stop`},
		{"fragment of a sentinel is none", sseChunk(`{"content":"ok"}`) + "data: [DO", `text="ok" error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"last chunk without line end", sseChunk(`{"content":"ok"}`) + strings.TrimSpace(sseChunk(`{}`, "stop")), `text="ok" finish=stop`},
		{"huge comment", ": " + strings.Repeat("x", 1<<20) + "\n\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"events without blank lines", strings.ReplaceAll(sseAnswer("ok"), "\n\n", "\n"), `text="ok" finish=stop`},
		{"bad bytes in an unknown key", sseChunk("{\"tool_calls\":[{\"id\":\"a\",\"function\":{\"name\":\"ls\",\"arguments\":{\"p\":\"\xe4\xbd\"}},\"\xdf\":1}]}") + sseChunk(`{}`, "stop"), "text=\"\" a:ls({\"p\":\"\ufffd\"})+\ufffd=1 finish=tool_calls"},
		{"bad bytes are replaced", sseChunk("{\"content\":\"a\xffb\"}") + sseChunk(`{}`, "stop"), `text="a` + "\ufffd" + `b" finish=stop`},
		{"lone surrogate", sseChunk(`{"content":"\ud83dx"}`) + sseChunk(`{}`, "stop"), `text="` + "\ufffd" + `x" finish=stop`},
		// chunks
		{"first chunk with filter results", "data: {\"choices\":[],\"prompt_filter_results\":[{}]}\n\n" + sseAnswer("ok"), `text="ok" finish=stop`},
		{"keys that differ by case", sseChunk(`{"content":"a","Content":"b","CONTENT":null}`) + sseChunk(`{}`, "stop"), `text="a" finish=stop`},
		{"unknown keys", sseChunk(`{"content":"a","audio":{"x":[1,{"content":"no"}]},"annotations":[]}`) + sseChunk(`{}`, "stop"), `text="a" finish=stop`},
		{"error null", "data: {\"error\":null,\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n" + sseChunk(`{}`, "stop"), `text="a" finish=stop`},
		{"bare numbers are text", sseChunk(`{"content":"costs $"}`) + sseChunk(`{"content":0.005}`) + sseChunk(`{"content":" or "}`) + sseChunk(`{"content":-0}`) + sseChunk(`{}`, "stop"), `text="costs $0.005 or -0" finish=stop`},
		{"a part in no list, strings in one", sseChunk(`{"content":{"type":"text","text":"a"}}`) + sseChunk(`{"content":["b",1,null,{"text":"c"},{"type":"reference","ids":[2]}]}`) + sseChunk(`{"content":{}}`) + sseChunk(`{}`, "stop"), `text="ab1c" finish=stop`},
		{"thinking as a number and as an object", sseChunk(`{"reasoning_content":4}`) + sseChunk(`{"reasoning_content":{"text":" mull"}}`) + sseAnswer("ok"), `text="ok" reasoning="4 mull" finish=stop`},
		{"refusal is text", sseChunk(`{"refusal":"I cannot."}`) + sseChunk(`{}`, "stop"), `text="I cannot." finish=stop`},
		{"cached tokens in the timings", sseChunk(`{"content":"a"}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3},"timings":{"cache_n":5,"prompt_n":2}}` + "\n\n" + done, `text="a" finish=stop usage=7/3/5/<nil>`},
		{"usage with details", sseChunk(`{"content":"a"}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":"7","completion_tokens":3.0,"prompt_tokens_details":{"cached_tokens":5},"completion_tokens_details":{"reasoning_tokens":2}}}` + "\n\n" + done, `text="a" finish=stop usage=7/3/5/2`},
		{"usage of DeepSeek", sseChunk(`{"content":"a"}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_cache_hit_tokens":4}}` + "\n\n", `text="a" finish=stop usage=7/3/4/<nil>`},
		{"usage under two names, one without counts", sseChunk(`{"content":"a"}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":2},"input_tokens":0,"output_tokens":0,"input_tokens_details":null}}` + "\n\n", `text="a" finish=stop usage=7/3/4/2`},
		{"usage under two names, the other without counts", sseChunk(`{"content":"a"}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0,"input_tokens":7,"output_tokens":3}}` + "\n\n", `text="a" finish=stop usage=7/3/<nil>/<nil>`},
		{"usage of Moonshot", `data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop","usage":{"prompt_tokens":7,"completion_tokens":3,"cached_tokens":4}}]}` + "\n\n", `text="a" finish=stop usage=7/3/4/<nil>`},
		{"usage of zeros is none", sseChunk(`{"content":"a"}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}` + "\n\n", `text="a" finish=stop`},
		{"usage in the choice", `data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop","usage":{"prompt_tokens":1,"completion_tokens":2}}]}` + "\n\n", `text="a" finish=stop usage=1/2/<nil>/<nil>`},
		{"index of a choice as text", `data: {"choices":[{"index":"0","delta":{"content":"a"},"finish_reason":"stop"},{"index":"1","delta":{"content":"b"}}]}` + "\n\n", `text="a" finish=stop`},
		{"index of a choice as a fraction", `data: {"choices":[{"index":0.0,"delta":{"content":"a"},"finish_reason":"stop"}]}` + "\n\n", `text="a" finish=stop`},
		{"choices without index", `data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"},{"delta":{"content":"b"},"finish_reason":"length"}]}` + "\n\n", `text="a" finish=stop`},
		// reasoning
		{"reasoning under other names", sseChunk(`{"reasoning_text":"mu"}`) + sseChunk(`{"thinking":"ll"}`) + sseAnswer("ok"), `text="ok" reasoning="mull" finish=stop`},
		{"reasoning", sseChunk(`{"reasoning":"mull"}`) + sseAnswer("ok"), `text="ok" reasoning="mull" finish=stop`},
		{"reasoning alone is empty", sseChunk(`{"reasoning_content":"mull"}`) + sseChunk(`{}`, "stop") + done, `text="" reasoning="mull" error=empty retry=true "the answer has neither text nor tool calls"`},
		{"thinking as a string", sseChunk(`{"content":[{"type":"thinking","thinking":"mull"},{"type":"text","text":"ok"}]}`) + sseChunk(`{}`, "stop"), `text="ok" reasoning="mull" finish=stop`},
		// ends
		{"stop in every chunk", sseChunk(`{"content":"a"}`, "stop") + sseChunk(`{"content":"b"}`, "stop"), `text="ab" finish=stop`},
		{"the words None and NULL are no reason", sseChunk(`{"content":"a"}`, "None") + sseChunk(`{"content":"b"}`, "NULL") + sseChunk(`{}`, "stop"), `text="ab" finish=stop`},
		{"the word None alone ends nothing", sseChunk(`{"content":"a"}`, "None"), `text="a" error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"sentinel without reason", sseChunk(`{"content":"a"}`) + done, `text="a" finish=stop`},
		{"length", sseChunk(`{"content":"a"}`) + sseChunk(`{}`, "max_tokens") + done, `text="a" finish=length`},
		{"length then stop", sseChunk(`{"content":"a"}`, "length") + sseChunk(`{}`, "stop") + done, `text="a" finish=length`},
		{"length without anything", sseChunk(`{}`, "length") + done, `text="" finish=length`},
		{"filter runs no call", list(`"{}"`) + sseChunk(`{}`, "content_filter") + done, `text="" finish=content_filter`},
		{"unknown word runs no call", list(`"{}"`) + sseChunk(`{}`, "abort") + done, `text="" finish=abort`},
		{"blank text is empty", sseChunk(`{"content":" \n"}`) + sseChunk(`{}`, "stop") + done, `text=" \n" error=empty retry=true "the answer has neither text nor tool calls"`},
		{"role then end", sseChunk(`{"role":"assistant"}`), `text="" error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"error as finish reason", sseChunk(`{"content":"a"}`) + sseChunk(`{}`, "error") + done, `text="a" error=stream_error retry=true "the server ended the answer with the reason error"`},
		// calls
		{"two calls interleaved", sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"ls","arguments":"{\"p\":"}}`, `{"index":1,"id":"b","function":{"name":"rm","arguments":"{\"q\":"}}`)) +
			sseChunk(callDelta(`{"index":1,"function":{"arguments":"2}"}}`, `{"index":0,"function":{"arguments":"1}"}}`)) + end, `text="" a:ls({"p":1}) b:rm({"q":2}) finish=tool_calls`},
		{"index as text", sseChunk(callDelta(`{"index":"0","id":"a","function":{"name":"ls","arguments":"{"}}`)) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"}"}}`)) + end, `text="" a:ls({}) finish=tool_calls`},
		{"gap in the indexes", sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"ls","arguments":"{}"}}`, `{"index":4,"id":"b","function":{"name":"rm","arguments":"{}"}}`)) + end, `text="" a:ls({}) b:rm({}) finish=tool_calls`},
		{"negative index", sseChunk(callDelta(`{"index":-1,"id":"a","function":{"name":"ls","arguments":"{}"}}`)) + end, `text="" a:ls({}) finish=tool_calls`},
		{"index zero, other id, fragments", sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"ls","arguments":"{\"p\":"}}`)) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"1}"}}`)) +
			sseChunk(callDelta(`{"index":0,"id":"b","function":{"name":"ls","arguments":""}}`)) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"{\"p\":2}"}}`)) + end, `text="" a:ls({"p":1}) b:ls({"p":2}) finish=tool_calls`},
		{"empty strings in continuation", list(`"{\"p\":"`) + sseChunk(callDelta(`{"index":0,"id":"","type":"","function":{"name":"","arguments":"1}"}}`)) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"name in every piece with ids", list(`"{\"p\":"`) + list(`"1}"`) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"whole copy at the end", list(`"{\"p\":"`) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"1}"}}`)) + list(`"{\"p\":1}"`) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"cumulative objects", list(`{"p":1}`) + list(`{"p":1,"q":2}`) + end, `text="" a:ls({"p":1,"q":2}) finish=tool_calls`},
		{"repeated whole arguments", list(`"{\"p\":1}"`) + list(`"{\"p\":1}"`) + list(`"{\"p\":1}"`) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"repeated without name", list(`"{\"p\":1}"`) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"{\"p\":1}"}}`)) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"appended then cut is no prefix", list(`"{\"p\":1}"`) + sseChunk(callDelta(`{"index":0,"function":{"arguments":",\"q\":"}}`)) + end, `text="" a:ls({"p":1},"q":)! finish=tool_calls`},
		{"empty arguments", list(`""`) + end, `text="" a:ls({}) finish=tool_calls`},
		{"arguments are the word null", list(`"null"`) + end, `text="" a:ls({}) finish=tool_calls`},
		{"bare control characters", list(`"{\"p\":\"a\nb\"}"`) + end, `text="" a:ls({"p":"a\u000ab"}) finish=tool_calls`},
		{"broken arguments are kept as text", list(`"{\"p\": oops}"`) + end, `text="" a:ls({"p": oops})! finish=tool_calls`},
		{"a list is no object", list(`"[1]"`) + end, `text="" a:ls([1])! finish=tool_calls`},
		{"type is null", sseChunk(callDelta(`{"index":0,"id":"a","type":null,"function":{"name":"ls","arguments":"{}"}}`)) + end, `text="" a:ls({}) finish=tool_calls`},
		{"id is missing", sseChunk(callDelta(`{"index":0,"id":"","function":{"name":"ls","arguments":"{}"}}`)) + end, `text="" *:ls({}) finish=tool_calls`},
		{"same id without index", sseChunk(callDelta(`{"id":"x","function":{"name":"ls","arguments":"{\"p\":1}"}}`)) + sseChunk(callDelta(`{"id":"x","function":{"name":"ls","arguments":"{\"p\":2}"}}`)) + end, `text="" x:ls({"p":1}) *:ls({"p":2}) finish=tool_calls`},
		{"filler is dropped", sseChunk(callDelta(`{"index":0}`, `{"index":1,"id":"a","function":{"name":"ls","arguments":"{}"}}`)) + end, `text="" a:ls({}) finish=tool_calls`},
		{"length keeps whole calls", list(`"{\"p\":1}"`) + sseChunk(callDelta(`{"index":1,"id":"b","function":{"name":"rm","arguments":"{\"q\":"}}`, `{"index":2,"id":"c","function":{"name":"rm"}}`)) + sseChunk(`{}`, "length") + done, `text="" a:ls({"p":1}) finish=length`},
		{"extra keys", sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"ls","arguments":"{}"},"extra_content":{"s":"x"},"z":null}`)) + end, `text="" a:ls({})+extra_content={"s":"x"} finish=tool_calls`},
		{"message with calls in an event", `data: {"choices":[{"message":{"content":null,"tool_calls":[{"id":"a","function":{"name":"ls","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}` + "\n\n" + done, `text="" a:ls({}) finish=tool_calls`},
		{"messages that grow", messageEvent("one ", "null") + messageEvent("one two", `"stop"`) + done, `text="one two" finish=stop`},
		{"messages in pieces", messageEvent("one ", "null") + messageEvent("two", "null") + messageEvent("", `"stop"`), `text="one two" finish=stop`},
		{"messages that break off", messageEvent("one ", "null") + messageEvent("two", "null"), `text="one two" error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"messages without a stream", `{"choices":[{"message":{"content":"one "}}]}` + "\n" + `{"choices":[{"message":{"content":"two"}}]}` + "\n", `text="one two" error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"messages without a stream, cut", `{"choices":[{"message":{"content":"one "}}]}` + "\n" + `{"choices":[{"mess`, `text="one " error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"messages without a stream, with a reason", `{"choices":[{"message":{"content":"one "}}]}` + "\n" + `{"choices":[{"message":{"content":"two"},"finish_reason":"stop"}]}`, `text="one two" finish=stop`},
		{"deltas after a message", messageEvent("", "null") + sseChunk(`{"content":"a"}`) + sseChunk(`{"content":"ab"}`) + sseChunk(`{}`, "stop"), `text="aab" finish=stop`},
		{"error after a message", messageEvent("one", "null") + `data: {"error":{"message":"boom"}}` + "\n\n", `text="one" error=stream_error retry=true "the answer holds an error: boom"`},
		{"output limit after a message", messageEvent("one", "null") + sseChunk(`{}`, "length") + done, `text="one" finish=length`},
		{"usage after a message", messageEvent("one", `"stop"`) + `data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}` + "\n\n" + done, `text="one" finish=stop usage=5/2/<nil>/<nil>`},
		{"thinking in parts of a whole answer", `{"choices":[{"message":{"content":[{"thinking":"a"},{"thinking":"ab"},{"text":"ok"}]},"finish_reason":"stop"}]}`, `text="ok" reasoning="aab" finish=stop`},
		{"reason tool_calls without calls", sseChunk(`{"content":"a"}`, "tool_calls") + done, `text="a" finish=tool_calls`},
		{"index changes in continuation", list(`"{\"p\":"`) + sseChunk(callDelta(`{"index":1,"id":"a","function":{"arguments":"1}"}}`)) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"index comes late", sseChunk(callDelta(`{"id":"a","function":{"name":"ls","arguments":"{\"p\":"}}`)) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"1}"}}`)) +
			sseChunk(callDelta(`{"id":"b","function":{"name":"rm","arguments":"{\"q\":"}}`)) + sseChunk(callDelta(`{"index":1,"function":{"arguments":"2}"}}`)) + end, `text="" a:ls({"p":1}) b:rm({"q":2}) finish=tool_calls`},
		{"name after arguments of a second call", list(`"{}"`) + sseChunk(callDelta(`{"index":1,"function":{"arguments":"{\"q\":2}"}}`)) + sseChunk(callDelta(`{"index":1,"id":"b","function":{"name":"rm"}}`)) + end, `text="" a:ls({}) b:rm({"q":2}) finish=tool_calls`},
		{"index as a fraction", sseChunk(callDelta(`{"index":0.0,"id":"a","function":{"name":"ls","arguments":"{"}}`)) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"}"}}`)) + end, `text="" a:ls({}) finish=tool_calls`},
		{"placeholder, blank, arguments", list(`"{}"`) + sseChunk(callDelta(`{"index":0,"function":{"arguments":" {\"p\":"}}`)) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"1}"}}`)) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"cumulative after blanks", list(`" {\"p\":"`) + list(`" {\"p\":1}"`) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"whole copy with other blanks at the end", list(`"{\"p\": "`) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"\"a b\"}"}}`)) + list(`"{\"p\":\"a b\"}"`) + end, `text="" a:ls({"p": "a b"}) finish=tool_calls`},
		{"whole copy with other blanks and without name", list(`"{\"p\":1}"`) + sseChunk(callDelta(`{"index":0,"function":{"arguments":"{\"p\": 1}"}}`)) + end, `text="" a:ls({"p":1}) finish=tool_calls`},
		{"whole copy with other blanks and without id", sseChunk(callDelta(`{"index":0,"function":{"name":"ls","arguments":"{\"p\":1}"}}`)) + sseChunk(callDelta(`{"index":0,"function":{"name":"ls","arguments":"{\"p\": 1}"}}`)) + end, `text="" *:ls({"p":1}) finish=tool_calls`},
		{"blanks in a string are no other blanks", sseChunk(callDelta(`{"function":{"name":"ls","arguments":"{\"p\":\"ab\"}"}}`)) + sseChunk(callDelta(`{"function":{"name":"ls","arguments":"{\"p\":\"a b\"}"}}`)) + end, `text="" *:ls({"p":"ab"}) *:ls({"p":"a b"}) finish=tool_calls`},
		{"name in pieces, none offered", sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"read_","arguments":""}}`)) + sseChunk(callDelta(`{"index":0,"function":{"name":"file","arguments":"{}"}}`)) + end, `text="" a:read_file({}) finish=tool_calls`},
		// errors inside
		{"errors in a list", `data: {"errors":[{"message":"boom"}]}` + "\n\n", `text="" error=stream_error retry=true "the answer holds an error: boom"`},
		{"error_msg", `{"error_code":17,"error_msg":"boom"}`, `text="" error=stream_error retry=true "the answer holds an error: boom"`},
		{"msg", `data: {"code":50505,"msg":"boom"}` + "\n\n", `text="" error=stream_error retry=true "the answer holds an error: boom"`},
		{"error_message", `{"error_message":"boom"}`, `text="" error=stream_error retry=true "the answer holds an error: boom"`},
		{"msg of a chunk is none", `data: {"code":0,"msg":"ok","choices":[{"delta":{"content":"a"}}]}` + "\n\n" + sseChunk(`{}`, "stop"), `text="a" finish=stop`},
		{"message beside a detail of null", `data: {"message":"boom","detail":null}` + "\n\n", `text="" error=stream_error retry=true "the answer holds an error: boom"`},
		{"error without words", `data: {"error":{"code":"server_error"}}` + "\n\n", `text="" error=stream_error retry=true "the answer holds an error: {\"error\":{\"code\":\"server_error\"}}"`},
		{"error as text", "data: {\"error\":\"boom\"}\n\n", `text="" error=stream_error retry=true "the answer holds an error: boom"`},
		{"error in the choice", `data: {"choices":[{"delta":{},"error":{"code":429,"message":"slow"},"finish_reason":"error"}]}` + "\n\n", `text="" error=rate_limit retry=true "the answer holds an error: slow"`},
		{"error as a field", sseChunk(`{"content":"a"}`) + `error: {"code":500,"message":"broken pipe","type":"server_error"}` + "\n\n", `text="a" error=stream_error retry=true "the answer holds an error: broken pipe"`},
		{"error on a line without field", sseChunk(`{"content":"a"}`) + `{"error":{"code":503,"message":"away"}}` + "\n\n", `text="a" error=overloaded retry=true "the answer holds an error: away"`},
		{"sentinel in a named event", sseChunk(`{"content":"a"}`) + "event: done\n" + done, `text="a" finish=stop`},
		{"error of vLLM", `data: {"object":"error","message":"bad temperature","type":"BadRequestError","code":400}` + "\n\n" + done, `text="" error=unsupported_param retry=false "the answer holds an error: bad temperature"`},
		{"error after the reason", sseAnswer("a")[:len(sseAnswer("a"))-len(done)] + `data: {"error":{"message":"late"}}` + "\n\n", `text="a" error=stream_error retry=true "the answer holds an error: late"`},
		{"upstream error as text in metadata", `data: {"error":{"code":400,"message":"Provider returned error","metadata":{"raw":"{\"error\":{\"message\":\"maximum context length is 8\"}}"}}}` + "\n\n", `text="" error=context_length retry=false "the answer holds an error: Provider returned error; maximum context length is 8"`},
		{"unknown model inside", `{"error":{"code":"model_not_found","message":"no such model"}}`, `text="" error=not_found retry=false "the answer holds an error: no such model"`},
		// other bodies
		{"json after blank lines", "\r\n\r\n" + `{"choices":[{"message":{"content":"a"}}]}`, `text="a" finish=stop`},
		{"json in lines", `{"choices":[{"delta":{"content":"a"}}]}` + "\n" + `{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}` + "\n", `text="ab" finish=stop`},
		{"pretty json with a glued sentinel", "{\n \"choices\": [\n{\"message\": {\"content\": \"a\"}, \"finish_reason\": \"stop\"}\n]\n}\n\ndata: [DONE]\n\n", `text="a" finish=stop`},
		{"json list of chunks", `[{"choices":[{"delta":{"content":"a"}}]},{"choices":[{"delta":{},"finish_reason":"stop"}]}]`, `text="a" finish=stop`},
		{"json list with an error", `[{"error":{"code":503,"message":"busy"}}]`, `text="" error=overloaded retry=true "the answer holds an error: busy"`},
		{"json cut off", `{"choices":[{"message":{"content":"a`, `text="" error=truncated retry=true "the answer broke off without a finish reason: EOF"`},
		{"web page", "\n<!doctype html><html><head><title>Log in</title></head></html>", `text="" error=not_sse retry=false "the answer is a web page, not an event stream; check the base URL: Log in"`},
		{"plain text", "upstream is away", `text="" error=empty retry=true "the answer has neither text nor tool calls"`},
		{"flat detail", `{"detail":"Not Found"}`, `text="" error=stream_error retry=true "the answer holds an error: Not Found"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, step := range []int{1 << 20, 1, 7} {
				if got := result(c.body, step); got != c.want {
					t.Fatalf("%d bytes a read:\n got %s\nwant %s", step, got, c.want)
				}
			}
		})
	}
}

// serveStream answers every request with stream as an event stream.
func serveStream(t testing.TB, stream []byte) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		w.Write(stream)
	}))
	t.Cleanup(server.Close)
	return server.URL + "/v1/chat/completions"
}

// sent is one request as a fake server saw it.
type sent struct {
	header http.Header
	query  string
	raw    []byte
	body   map[string]any
}

// fake is a server that gives its replies in turn, the last for ever, and keeps what it was asked.
type fake struct {
	mu      sync.Mutex // guards got
	got     []sent
	replies []func(w http.ResponseWriter)
	url     string
}

func newFake(t testing.TB, replies ...func(w http.ResponseWriter)) *fake {
	t.Helper()
	f := &fake{replies: replies}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	f.url = server.URL + "/v1/chat/completions?api-version=7&code=hidden"
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	s := sent{header: r.Header, query: r.URL.RawQuery, raw: raw}
	json.Unmarshal(raw, &s.body)
	f.mu.Lock()
	f.got = append(f.got, s)
	n := min(len(f.got), len(f.replies)) - 1
	f.mu.Unlock()
	f.replies[n](w)
}

// status answers with an error; headers are pairs.
func sseStatus(code int, body string, headers ...string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

// stream answers with an event stream.
func stream(body string) func(http.ResponseWriter) {
	return sseStatus(200, body, "Content-Type", "text/event-stream")
}

func (f *fake) client(o clientOptions) *client {
	o.url, o.model, o.version = cmp.Or(o.url, f.url), cmp.Or(o.model, "demo-1"), "test"
	o.liveness = cmp.Or(o.liveness, testDeadline)
	c := newClient(o)
	c.grace = caseGrace
	return c
}

// send makes one model call that must succeed.
func (f *fake) send(t *testing.T, c *client, r *request) *reply {
	t.Helper()
	if r.learned == nil {
		r.learned = newLearned()
	}
	ctx, cancel := context.WithTimeout(context.Background(), testDeadline)
	defer cancel()
	rep, err := c.complete(ctx, r, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func TestRequestCarriesOnlyWhatIsSet(t *testing.T) {
	f := newFake(t, stream(sseAnswer("ok")))
	f.send(t, f.client(clientOptions{key: "k-1"}), &request{messages: []json.RawMessage{systemMessage("s"), userMessage("<hi> & bye")}})
	got := f.got[0]
	want := `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"\u003chi\u003e \u0026 bye"}],"model":"demo-1","stream":true,"stream_options":{"include_usage":true}}`
	if string(got.raw) != want {
		t.Errorf("body:\n got %s\nwant %s", got.raw, want)
	}
	for key, val := range map[string]string{"Authorization": "Bearer k-1", "Accept-Encoding": "identity", "User-Agent": "belay/test", "Content-Type": "application/json"} {
		if got.header.Get(key) != val {
			t.Errorf("%s: got %q, want %q", key, got.header.Get(key), val)
		}
	}
	if got.query != "api-version=7&code=hidden" {
		t.Errorf("query: got %q", got.query)
	}
}

func TestRequestCarriesAllThatIsSet(t *testing.T) {
	temperature, topP, seed := 0.0, 0.5, int64(0)
	f := newFake(t, stream(sseAnswer("ok")))
	c := f.client(clientOptions{key: "k-1", header: "api-key", maxTokens: 5, temperature: &temperature, topP: &topP, seed: &seed, reasoningEffort: "low"})
	f.send(t, c, &request{messages: []json.RawMessage{userMessage("hi")}, tools: json.RawMessage(`[{"type":"function"}]`), offered: []string{"x"},
		extra: map[string]any{"id_slot": 0, "cache_prompt": true}})
	got := f.got[0]
	for key, want := range map[string]any{"max_tokens": 5.0, "temperature": 0.0, "top_p": 0.5, "seed": 0.0, "reasoning_effort": "low", "id_slot": 0.0, "cache_prompt": true} {
		if got.body[key] != want {
			t.Errorf("%s: got %v, want %v", key, got.body[key], want)
		}
	}
	if got.header.Get("api-key") != "k-1" || got.header.Get("Authorization") != "" {
		t.Error("the key is not in the header that was asked for, alone")
	}
	if tools, _ := got.body["tools"].([]any); len(tools) != 1 {
		t.Errorf("tools: got %v", got.body["tools"])
	}
}

func TestEmptyToolsAreLeftOut(t *testing.T) {
	f := newFake(t, stream(sseAnswer("ok")))
	f.send(t, f.client(clientOptions{}), &request{messages: []json.RawMessage{userMessage("hi")}, tools: json.RawMessage(`[]`)})
	for key := range f.got[0].body {
		if slices.Contains([]string{"tools", "tool_choice", "parallel_tool_calls", "max_tokens", "temperature", "Authorization"}, key) {
			t.Errorf("%s was sent", key)
		}
	}
}

// TestATurnGoesBackAsItCame plays a turn with calls and looks at the history of the next request.
func TestATurnGoesBackAsItCame(t *testing.T) {
	turn := sseChunk(`{"reasoning":"mull <b>","reasoning_details":[{"type":"reasoning.encrypted","data":"x"}]}`) + sseChunk(`{"reasoning_details":[{"type":"reasoning.text","text":"y"}]}`) +
		sseChunk(callDelta(`{"index":0,"id":"a","type":"function","function":{"name":"ls","arguments":"{\"p\": \"\\u00e9\"}"},"extra_content":{"google":{"thought_signature":"c2ln"}}}`,
			`{"index":1,"id":"a","type":"function","function":{"name":"rm","arguments":"{oops","provider_specific_fields":{"thought_signature":"c2ln"},"strict":null}}`)) + sseChunk(`{}`, "tool_calls") + done
	f := newFake(t, stream(turn), stream(turn), stream(sseAnswer("ok")))
	c := f.client(clientOptions{})
	r := &request{messages: []json.RawMessage{userMessage("hi")}, learned: newLearned()}
	ids := map[string]bool{}
	for range 2 {
		rep := f.send(t, c, r)
		r.messages = append(r.messages, assistantMessage(rep, rep.calls))
		for _, call := range rep.calls {
			if ids[call.id] || call.id == "" {
				t.Errorf("the id %q is used twice in one history", call.id)
			}
			ids[call.id] = true
			r.messages = append(r.messages, toolMessage(call.id, "done"))
		}
	}
	f.send(t, c, r)
	var body struct{ Messages []map[string]any }
	if err := json.Unmarshal(f.got[2].raw, &body); err != nil {
		t.Fatal(err)
	}
	m := body.Messages[1]
	if m["content"] != "" || m["reasoning"] != "mull <b>" || m["reasoning_content"] != nil {
		t.Errorf("assistant turn: %v", m)
	}
	if d := fmt.Sprint(m["reasoning_details"]); d != "[map[data:x type:reasoning.encrypted] map[text:y type:reasoning.text]]" {
		t.Errorf("reasoning_details: %s", d)
	}
	calls := m["tool_calls"].([]any)
	first, second := calls[0].(map[string]any), calls[1].(map[string]any)
	if first["id"] != "a" || first["type"] != "function" || fmt.Sprint(first["extra_content"]) != "map[google:map[thought_signature:c2ln]]" {
		t.Errorf("first call: %v", first)
	}
	if args := first["function"].(map[string]any)["arguments"]; args != `{"p": "\u00e9"}` {
		t.Errorf("arguments are no string of the same JSON: %v", args)
	}
	if fn := second["function"].(map[string]any); fn["arguments"] != `{}` || fmt.Sprint(fn["provider_specific_fields"]) != "map[thought_signature:c2ln]" || len(fn) != 3 {
		t.Errorf("function of the call with invalid arguments: %v", fn)
	}
	for _, m := range body.Messages {
		if m["role"] == "tool" {
			if _, text := m["content"].(string); !text {
				t.Errorf("the content of a result is no text: %v", m)
			}
		}
	}
	if !bytes.HasPrefix(f.got[2].raw, f.got[1].raw[:bytes.Index(f.got[1].raw, []byte(`],"model"`))]) {
		t.Error("what was sent once is not sent again byte for byte")
	}
}

// TestEmptyThinkingGoesBack: DeepSeek and Kimi answer 400 to a turn with calls
// that lacks the field, although they sent it empty.
func TestEmptyThinkingGoesBack(t *testing.T) {
	ls := sseChunk(callDelta(`{"index":0,"id":"a","type":"function","function":{"name":"ls","arguments":"{}"}}`), "tool_calls")
	for first, want := range map[string]string{
		`{"reasoning_content":""}`:                  `"reasoning_content":"",`,
		`{"reasoning_content":"","reasoning":"hm"}`: `"reasoning":"hm",`,
		`{"reasoning_content":null}`:                `{"content":"","role":"assistant","tool_calls":`,
	} {
		f := newFake(t, stream(sseChunk(first)+sseChunk(`{"reasoning_content":null,"content":null}`)+ls))
		rep := f.send(t, f.client(clientOptions{}), &request{messages: []json.RawMessage{userMessage("hi")}, learned: newLearned()})
		raw := assistantMessage(rep, rep.calls)
		if !strings.Contains(string(raw), want) {
			t.Errorf("%s: went back as %s, want %s", first, raw, want)
		}
	}
}

func TestATurnWithoutCallsHasNoThinkingAndNoCalls(t *testing.T) {
	if got := string(assistantMessage(&reply{text: "a", reasoning: "m", reasoningKey: "reasoning_content", details: []json.RawMessage{json.RawMessage("{}")}}, nil)); got != `{"content":"a","role":"assistant"}` {
		t.Errorf("got %s", got)
	}
	if got := string(assistantMessage(&reply{reasoning: "m", finish: "tool_calls"}, []call{{id: "a", name: "ls"}})); got != `{"content":"","role":"assistant","tool_calls":[{"function":{"arguments":"{}","name":"ls"},"id":"a","type":"function"}]}` {
		t.Errorf("got %s", got)
	}
}

func TestNeighbouringUserMessagesBecomeOne(t *testing.T) {
	f := newFake(t, stream(sseAnswer("ok")))
	f.send(t, f.client(clientOptions{}), &request{messages: []json.RawMessage{systemMessage("s"), userMessage(`a"`), userMessage("b"), userMessage("c"),
		assistantMessage(&reply{text: "x"}, nil), userMessage("d"), toolMessage("1", ""), userMessage("e")}})
	var roles []string
	for _, m := range f.got[0].body["messages"].([]any) {
		roles = append(roles, fmt.Sprintf("%v:%v", m.(map[string]any)["role"], m.(map[string]any)["content"]))
	}
	want := []string{"system:s", "user:a\"\n\nb\n\nc", "assistant:x", "user:d", "tool:", "user:e"}
	if !slices.Equal(roles, want) {
		t.Errorf("got %q, want %q", roles, want)
	}
}

func TestARefusedParameterIsRepairedOnceAndRemembered(t *testing.T) {
	temperature := 0.5
	empty := assistantMessage(&reply{}, []call{{id: "a", name: "ls"}})
	for _, c := range []struct {
		name, refusal string
		code          int
		check         func(map[string]any) bool
	}{
		{"stream_options", `{"error":{"message":"extra field 'stream_options' is not allowed"}}`, 400, func(b map[string]any) bool { return b["stream_options"] == nil }},
		{"stream_options", `{"message":{"detail":[{"loc":["body","stream_options","include_usage"],"msg":"extra"}]}}`, 422, func(b map[string]any) bool { return b["stream_options"] == nil }},
		{"parallel_tool_calls", `{"error":{"message":"no","param":"parallel_tool_calls"}}`, 400, func(b map[string]any) bool { return b["parallel_tool_calls"] == nil }},
		{"temperature", `{"error":{"message":"'temperature' has to stay at 1"}}`, 400, func(b map[string]any) bool { return b["temperature"] == nil }},
		{"max_tokens", `{"error":{"message":"use 'max_completion_tokens' instead of 'max_tokens'"}}`, 400, func(b map[string]any) bool { return b["max_tokens"] == nil && b["max_completion_tokens"] == 9.0 }},
		{"content", `{"error":{"message":"content must not be empty"}}`, 400, func(b map[string]any) bool {
			m := b["messages"].([]any)[1].(map[string]any)
			return m["content"] == nil && m["tool_calls"] != nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, sseStatus(c.code, c.refusal), stream(sseAnswer("ok")))
			client := f.client(clientOptions{maxTokens: 9, temperature: &temperature})
			r := &request{messages: []json.RawMessage{userMessage("a"), empty, toolMessage("a", "x")}, extra: map[string]any{"parallel_tool_calls": false}, learned: newLearned()}
			f.send(t, client, r)
			f.send(t, client, r)
			if len(f.got) != 3 {
				t.Fatalf("%d requests, want 3: the refused, the repaired, the next", len(f.got))
			}
			if c.check(f.got[0].body) || !c.check(f.got[1].body) || !c.check(f.got[2].body) {
				t.Errorf("bodies:\n%s\n%s\n%s", f.got[0].raw, f.got[1].raw, f.got[2].raw)
			}
		})
	}
}

func TestARefusalIsNotRepairedTwiceNorSentAgain(t *testing.T) {
	for _, body := range []string{
		`{"error":{"message":"'temperature' and 'stream_options' are not known"}}`,
		`{"error":{"message":"assistant message 4 lacks reasoning_content"}}`,
		`{"error":{"message":"maximum context length is 8, lower max_tokens"}}`,
	} {
		f := newFake(t, sseStatus(400, body))
		var h heard
		_, err := ask(f.client(clientOptions{backoff: []time.Duration{0, 0, 0}}), &h)
		var api *apiError
		if !errors.As(err, &api) || api.retryable || len(h.retries) != 0 {
			t.Fatalf("%s: %v", body, err)
		}
		want := 1
		if strings.Contains(body, "stream_options") {
			want = 2
		}
		if len(f.got) != want {
			t.Errorf("%s: %d requests, want %d", body, len(f.got), want)
		}
	}
}

func TestResendsAreIdenticalBoundedAndSharedByAllCauses(t *testing.T) {
	cut := sseChunk(`{"content":"half"}`) + sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"ls","arguments":"{}"}}`))
	f := newFake(t, sseStatus(503, "busy"), stream(cut), stream(done), sseStatus(429, `{"error":"slow"}`, "Retry-After-Ms", "1"))
	var h heard
	_, err := ask(f.client(clientOptions{backoff: []time.Duration{time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond, 4 * time.Millisecond}}), &h)
	var api *apiError
	if !errors.As(err, &api) || api.category != "rate_limit" || !api.retryable {
		t.Fatalf("got %v", err)
	}
	if len(f.got) != 5 {
		t.Fatalf("%d requests, want 5", len(f.got))
	}
	for _, s := range f.got[1:] {
		if !bytes.Equal(s.raw, f.got[0].raw) {
			t.Errorf("a re-send differs:\n%s\n%s", f.got[0].raw, s.raw)
		}
	}
	var notices []string
	for _, r := range h.retries {
		notices = append(notices, fmt.Sprintf("%d %dms %s %v", r["attempt"], r["delay_ms"], r["error_category"], r["discard_content"]))
	}
	want := []string{"1 1ms overloaded false", "2 2ms truncated true", "3 3ms empty false", "4 1ms rate_limit false"}
	if !slices.Equal(notices, want) {
		t.Errorf("notices:\n got %q\nwant %q", notices, want)
	}
	if api.heard {
		t.Error("the last error counts text of an earlier attempt")
	}
}

func TestAReplyAfterAResendHoldsNothingOfTheBrokenOne(t *testing.T) {
	cut := sseChunk(`{"content":"half","reasoning":"m"}`) + sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"ls","arguments":"{}"}}`))
	f := newFake(t, stream(cut), stream(sseAnswer("whole")))
	var h heard
	rep, err := ask(f.client(clientOptions{backoff: []time.Duration{0}}), &h)
	if err != nil || rep.text != "whole" || rep.reasoning != "" || len(rep.calls) != 0 {
		t.Errorf("got %+v, %v", rep, err)
	}
	if h.text.String() != "halfwhole" || len(h.retries) != 1 || h.retries[0]["discard_content"] != true {
		t.Errorf("heard %q, %+v", h.text.String(), h.retries)
	}
}

func TestALongRetryAfterEndsTheCallAndSaysWhen(t *testing.T) {
	f := newFake(t, sseStatus(429, `{"error":"slow"}`, "Retry-After", "3600"))
	_, err := ask(f.client(clientOptions{backoff: []time.Duration{0, 0}}), &heard{})
	var api *apiError
	if !errors.As(err, &api) || !api.retryable || api.retryAfter != time.Hour || !strings.Contains(err.Error(), "come back after 20") || len(f.got) != 1 {
		t.Errorf("got %v after %d requests", err, len(f.got))
	}
}

func TestCancellationIsTheCallersOwnError(t *testing.T) {
	cause := errors.New("the user went away")
	for _, when := range []string{"headers", "body", "wait"} {
		ctx, cancel := context.WithCancelCause(context.Background())
		f := newFake(t, func(w http.ResponseWriter) {
			switch when {
			case "headers":
				cancel(cause)
				<-ctx.Done()
			case "body":
				io.WriteString(w, sseChunk(`{"content":"x"}`))
				w.(http.Flusher).Flush()
				cancel(cause)
				<-ctx.Done()
			case "wait":
				w.WriteHeader(503)
			}
		})
		emit := func(kind string, _ ...any) {
			if kind == "retry" {
				cancel(cause)
			}
		}
		_, err := f.client(clientOptions{backoff: []time.Duration{time.Hour}}).complete(ctx, &request{learned: newLearned()}, emit)
		var api *apiError
		if !errors.Is(err, cause) || errors.As(err, &api) {
			t.Errorf("%s: got %v", when, err)
		}
		cancel(nil)
	}
}

func TestRetryAfterForms(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		seconds, ms string
		want        time.Duration
	}{
		{"", "", 0}, {"2", "", 2 * time.Second}, {"1.5", "", 1500 * time.Millisecond}, {"1", "250", 250 * time.Millisecond},
		{"0", "", 0}, {"-5", "", 0}, {"nan", "", 0}, {"1e300", "", farFuture}, {"inf", "", farFuture}, {"soon", "", 0},
		{" 3 ", "x", 3 * time.Second}, {"Fri, 01 May 2026 12:00:07 GMT", "", 7 * time.Second}, {"Wed, 21 Oct 2015 07:28:00 GMT", "", 0}, {"Fri, 31 Dec 9999 23:59:59 GMT", "", farFuture},
	} {
		h := http.Header{"Retry-After": {c.seconds}, "Retry-After-Ms": {c.ms}}
		if got := retryAfter(h, now); got != c.want {
			t.Errorf("%q %q: got %v, want %v", c.seconds, c.ms, got, c.want)
		}
	}
	// The server's clock decides, whatever ours says.
	for date, want := range map[string]time.Duration{"Fri, 01 May 2026 12:00:05 GMT": 2 * time.Second, "Fri, 01 May 2026 11:00:05 GMT": time.Hour + 2*time.Second, "Fri, 01 May 2026 13:00:00 GMT": 0, "today": 7 * time.Second} {
		h := http.Header{"Retry-After": {"Fri, 01 May 2026 12:00:07 GMT"}, "Date": {date}}
		if got := retryAfter(h, now); got != want {
			t.Errorf("at %s: got %v, want %v", date, got, want)
		}
	}
}

// A date that was far when it was recorded is past when it is replayed.
func TestARecordedDateAsksForTheSameWait(t *testing.T) {
	f := newFake(t, sseStatus(429, "slow", "Date", "Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After", "Wed, 21 Oct 2015 08:28:00 GMT"))
	var tape bytes.Buffer
	if _, err := ask(f.client(clientOptions{record: &tape, backoff: []time.Duration{0}}), &heard{}); len(f.got) != 1 || !strings.Contains(err.Error(), "come back after") {
		t.Errorf("%d requests, %v", len(f.got), err)
	}
	player, err := newReplayer(tape.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ask(f.client(clientOptions{transport: player, backoff: []time.Duration{0}}), &heard{}); !strings.Contains(err.Error(), "come back after") {
		t.Errorf("replayed: %v", err)
	}
}

func TestRefusalsOfEveryKind(t *testing.T) {
	for _, c := range []struct {
		status     int
		body, want string
	}{
		{400, `{"error":{"message":"Unsupported parameter: 'max_tokens'","param":"max_tokens","code":"unsupported_parameter"}}`, "unsupported_param false"},
		{400, `{"error":{"message":"This model's maximum context length is 8192 tokens","code":"context_length_exceeded"}}`, "context_length false"},
		{400, `{"error":{"message":"bad schema"}}`, "bad_request false"},
		{400, `[{"error":{"code":400,"message":"The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).","status":"INVALID_ARGUMENT"}}]`, "context_length false"},
		{400, `{"error":{"message":"The input token count is 32825 but the model only supports up to 32768."}}`, "context_length false"},
		{400, `{"code":"Client specified an invalid argument","error":"This model's maximum prompt length is 131072 but the request contains 140000 tokens."}`, "context_length false"},
		{400, `{"message":"too many tokens: the number of tokens in the prompt cannot exceed 4081"}`, "context_length false"},
		{400, `{"error":{"message":"Your request exceeded model token limit: 8192","type":"invalid_request_error"}}`, "context_length false"},
		{400, `{"error":{"code":"1261","message":"Prompt exceeds max length"}}`, "context_length false"},
		{400, `{"error":{"message":"tokens in request more than max tokens allowed"}}`, "context_length false"},
		{400, `{"error":{"message":"prompt token count of 140000 exceeds the limit of 128000","code":"model_max_prompt_tokens_exceeded"}}`, "context_length false"},
		{400, `{"error":{"message":"Input length 131393 exceeds the maximum allowed input length of 131040 tokens."}}`, "context_length false"},
		{400, `{"error":{"message":"The decoder prompt (length 5000) is longer than the maximum model length of 4096."}}`, "context_length false"},
		{400, `{"error":{"message":"Range of input length should be [1, 129024]","code":"invalid_parameter_error"}}`, "context_length false"},
		{400, `{"code":20015,"message":"length of prompt_tokens (140000) must be less than max_seq_len (131072)."}`, "context_length false"},
		{422, "{\"error\":\"`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens\",\"error_type\":\"validation\"}", "context_length false"},
		{500, `{"error":{"code":500,"message":"input (5000 tokens) is too large to process. increase the physical batch size","type":"server_error"}}`, "context_length false"},
		{500, `{"error":{"code":500,"message":"context shift is disabled","type":"server_error"}}`, "context_length false"},
		{400, `{"error":{"message":"max_tokens is too large: 999999. This model supports at most 4096 completion tokens","param":"max_tokens"}}`, "unsupported_param false"},
		{400, `{"error":"Please reduce the length of the messages or completion."}`, "context_length false"},
		{422, "{\"error\":\"Input validation error: `max_new_tokens` must be strictly positive\"}", "bad_request false"},
		{400, `{"error":{"message":"Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40"}}`, "bad_request false"},
		{503, `{"error":{"message":"tokens per minute exceeded"}}`, "overloaded true"},
		{0, `{"error":{"message":"Too many tokens, please wait before trying again"}}`, "rate_limit true"},
		{400, ``, "bad_request false"},
		{0, `{"error":{"message":"Incorrect API key provided"}}`, "auth false"},
		{0, `{"error":{"message":"Permission denied: no access"}}`, "auth false"},
		{0, `{"error":{"message":"model 'x' not found, try pulling it first"}}`, "not_found false"},
		{0, `{"error":{"message":"The model x does not exist"}}`, "not_found false"},
		{0, `{"error":{"message":"x is temporarily rate-limited upstream"}}`, "rate_limit true"},
		{0, `{"error":{"message":"input length and max_tokens exceed context limit"}}`, "context_length false"},
		{0, `{"code":"InvalidParameter","message":"bad range"}`, "bad_request false"},
		{403, `{"error":{"message":"no","code":"insufficient_user_quota"}}`, "billing false"},
		{401, `{"error":{"message":"Incorrect API key"}}`, "auth false"},
		{402, `{"error":{"message":"Insufficient Balance"}}`, "billing false"},
		{403, `<html><title>Forbidden</title></html>`, "auth false"},
		{403, `{"error":{"message":"insufficient balance"}}`, "billing false"},
		{429, `{"error":{"message":"Your account is suspended, please check your plan and billing details","type":"exceeded_current_quota_error"}}`, "billing false"},
		{429, `{"error":"Your team has used all available credits or reached its monthly spending limit."}`, "billing false"},
		{429, `{"error":{"message":"You have no remaining balance, please recharge"}}`, "billing false"},
		{403, `{"code":30001,"message":"Sorry, your account balance is insufficient"}`, "billing false"},
		{403, `{"error":{"code":"AccountOverdueError","message":"your account has an overdue balance"}}`, "billing false"},
		{400, `{"code":"Arrearage","message":"Access denied, please make sure your account is in good standing."}`, "billing false"},
		{429, `{"error":{"message":"Rate limit reached: max RPM 3, see your plan and billing details","type":"rate_limit_reached_error"}}`, "rate_limit true"},
		{404, `{"error":{"message":"model not found"}}`, "not_found false"},
		{405, `Method Not Allowed`, "not_found false"},
		{408, ``, "server true"},
		{409, ``, "bad_request false"},
		{413, `<html><title>413 Request Entity Too Large</title></html>`, "context_length false"},
		{422, `{"detail":[{"loc":["body","x"],"msg":"field required"}]}`, "bad_request false"},
		{425, ``, "server true"},
		{429, `{"error":{"message":"Rate limit reached"}}`, "rate_limit true"},
		{429, `{"error":{"code":429,"message":"You exceeded your current quota","status":"RESOURCE_EXHAUSTED"}}`, "rate_limit true"},
		{429, `{"error":{"message":"You exceeded your current quota","code":"insufficient_quota"}}`, "billing false"},
		{500, `{"error":{"message":"Loading model"}}`, "overloaded true"},
		{500, `{"error":{"message":"boom"}}`, "server true"},
		{500, `{"error":{"message":"the request exceeds the available context size"}}`, "context_length false"},
		{501, ``, "server true"},
		{503, `<html><title>503 Service Temporarily Unavailable</title></html>`, "overloaded true"},
		{524, `<html>timeout</html>`, "server true"},
		{529, `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`, "overloaded true"},
	} {
		e := refusal([]byte(c.body), c.status, "")
		if got := fmt.Sprint(e.category, " ", e.retryable); got != c.want {
			t.Errorf("%d %s: got %s, want %s", c.status, c.body, got, c.want)
		}
	}
}

func TestMessagesSayWhatTheUserNeeds(t *testing.T) {
	const key = "sk-very-secret"
	page := "<html><head><title>404 Not\n Found</title></head><body>" + strings.Repeat("<p>x</p>", 5000)
	for _, c := range []struct {
		reply    func(http.ResponseWriter)
		has, not []string
	}{
		{sseStatus(404, page), []string{"/v1/chat/completions", "404 Not Found"}, []string{"hidden", "<p>", "x x"}},
		{sseStatus(401, `{"error":"key `+key+` is wrong"}`), []string{"[key] is wrong", "withheld because"}, []string{key}},
		{sseStatus(401, strings.Repeat("x", maxMessage-6)+key), nil, []string{key[:6]}},
		{sseStatus(400, `{"reason":"odd"}`), []string{"odd"}, nil},
		{sseStatus(499, `{"error":"gone"}`), []string{": 499: gone"}, nil}, // a status without words
		{sseStatus(404, `{"message":"Route POST:/v1/chat/completions?api-version=7&code=hidden not found"}`), []string{"/v1/chat/completions?[redacted] not found"}, []string{"hidden"}},
		{sseStatus(400, `{"title":"Odd","status":400}`), []string{"400 Bad Request: Odd"}, nil},
		{sseStatus(302, "", "Location", "https://login.test/page?token=abc"), []string{"302 Found; redirects", "https://login.test/page"}, []string{"token"}},
		{sseStatus(400, `{"error":{"message":"`+strings.Repeat("é", 5000)+`"}}`), []string{"é"}, []string{strings.Repeat("é", maxMessage)}},
		{sseStatus(302, "", "Location", "https://login.test/"+strings.Repeat("x", 100<<10)), []string{"https://login.test/"}, []string{strings.Repeat("x", 2*maxMessage)}},
		{sseStatus(500, "line one\nline two"), []string{"line one line two"}, []string{"\n"}},
		{stream("<html><title>Log in</title>"), []string{"web page", "Log in", "/v1/chat/completions"}, []string{"hidden"}},
	} {
		f := newFake(t, c.reply)
		_, err := ask(f.client(clientOptions{key: key, keyNote: "withheld because"}), &heard{})
		for _, s := range c.has {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("the message lacks %q: %v", s, err)
			}
		}
		for _, s := range c.not {
			if strings.Contains(err.Error(), s) {
				t.Errorf("the message holds %q: %.300v", s, err)
			}
		}
		if len(f.got) != 1 {
			t.Errorf("%d requests", len(f.got))
		}
	}
	// What is no HTTP comes back in an error of net/http.
	url := serveRaw(t, func(conn net.Conn) {
		readRequest(conn)
		io.WriteString(conn, strings.Repeat("\xff", 1<<20)+"\r\n\r\n")
	})
	if _, err := ask(newClient(clientOptions{url: url, liveness: testDeadline}), &heard{}); len(err.Error()) > 2*maxMessage || !strings.Contains(err.Error(), "malformed HTTP response") {
		t.Errorf("%d bytes: %.300v", len(err.Error()), err)
	}
	// A secret that a runner does not hand out is the usual reason.
	_, err := ask(newFake(t, sseStatus(401, "")).client(clientOptions{}), &heard{})
	if !strings.HasSuffix(err.Error(), ": 401 Unauthorized; no key was sent, since none is set (BELAY_API_KEY)") {
		t.Error(err)
	}
}

func TestNetworkFailures(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := "http://" + l.Addr().String() + "/v1/chat/completions"
	l.Close()
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	tls.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer tls.Close()
	silent := serveRaw(t, waitGone)
	rude := serveRaw(t, func(conn net.Conn) { readRequest(conn); conn.(*net.TCPConn).SetLinger(0) })
	for _, c := range []struct {
		url, socket, category string
		retryable             bool
		has                   string
		liveness              time.Duration
	}{
		{closed, "", "network", true, closed, testDeadline},
		{tls.URL + "/v1/chat/completions", "", "network", false, "SSL_CERT_FILE", testDeadline},
		{strings.Replace(serveRaw(t, func(conn net.Conn) { io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n\r\n") }), "http:", "https:", 1), "", "network", false, "is plain http", testDeadline},
		{strings.Replace(serveRaw(t, func(conn net.Conn) { io.WriteString(conn, "SSH-2.0-x\r\n") }), "http:", "https:", 1), "", "network", true, "tls", testDeadline},
		{silent, "", "stall", true, "liveness_ms", 200 * time.Millisecond},
		{rude, "", "network", true, "127.0.0.1", testDeadline},
		{serveRaw(t, func(conn net.Conn) { readRequest(conn) }), "", "network", true, ": the server closed the connection without an answer", testDeadline},
		{"http://localhost/v1/chat/completions", filepath.Join(t.TempDir(), "none.sock"), "network", true, "none.sock", testDeadline},
	} {
		var h heard
		_, err := ask(newClient(clientOptions{url: c.url, socket: c.socket, liveness: c.liveness, backoff: []time.Duration{0}}), &h)
		var api *apiError
		if !errors.As(err, &api) || api.category != c.category || api.retryable != c.retryable || !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(c.has)) || len(h.retries) == 1 != c.retryable {
			t.Errorf("%s%s: got %v (%+v)", c.url, c.socket, err, h.retries)
		}
	}
}

// A connection of HTTP/2 outlives its requests: one that is dead, such as behind a
// NAT that has forgotten it, would be given each re-send.
func TestAResendTakesAnotherConnection(t *testing.T) {
	var mu sync.Mutex
	var dead string
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		dead = cmp.Or(dead, r.RemoteAddr)
		silent := dead == r.RemoteAddr
		mu.Unlock()
		if silent {
			<-r.Context().Done()
		}
		io.WriteString(w, sseAnswer(r.Proto))
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	c := newClient(clientOptions{url: server.URL + "/v1/chat/completions", liveness: 300 * time.Millisecond, backoff: []time.Duration{50 * time.Millisecond}})
	c.transport.(*http.Transport).TLSClientConfig = server.Client().Transport.(*http.Transport).TLSClientConfig
	if rep, err := ask(c, &heard{}); err != nil || rep.text != "HTTP/2.0" {
		t.Errorf("got %+v, %v", rep, err)
	}
}

func TestUnixSocket(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	path := filepath.Join(t.TempDir(), "s.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{replies: []func(http.ResponseWriter){stream(sseAnswer("ok"))}}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: f}}
	server.Start()
	defer server.Close()
	c := f.client(clientOptions{url: "http://localhost/v1/chat/completions", socket: path})
	if rep := f.send(t, c, &request{messages: []json.RawMessage{userMessage("hi")}}); rep.text != "ok" {
		t.Errorf("got %q", rep.text)
	}
}

func TestASlowListenerIsNoStall(t *testing.T) {
	const limit = 100 * time.Millisecond
	f := newFake(t, stream(sseChunk(`{"content":"a"}`)+sseAnswer("b")))
	c := f.client(clientOptions{liveness: limit})
	var text strings.Builder
	slow := time.NewTicker(4 * limit)
	defer slow.Stop()
	rep, err := c.complete(context.Background(), &request{learned: newLearned()}, func(_ string, pairs ...any) {
		<-slow.C
		text.WriteString(pairs[1].(string))
	})
	if err != nil || rep.text != "ab" || text.String() != "ab" {
		t.Errorf("got %+v, %v", rep, err)
	}
}

// A process that was stopped finds its limits passed and its data waiting. A
// limit of a nanosecond is the same: passed before each read.
func TestWhatWaitsInTheSocketIsReadThoughTheLimitHasPassed(t *testing.T) {
	f := newFake(t, stream(sseAnswer("ok")))
	if rep := f.send(t, f.client(clientOptions{liveness: 1}), &request{messages: []json.RawMessage{userMessage("hi")}}); rep.text != "ok" {
		t.Errorf("got %q", rep.text)
	}
}

func TestProgressIsPassedOn(t *testing.T) {
	f := newFake(t, stream(`data: {"choices":[],"prompt_progress":{"total":10,"processed":4,"cache":0}}`+"\n\n"+sseAnswer("ok")))
	var h heard
	if _, err := ask(f.client(clientOptions{}), &h); err != nil || !slices.Equal(h.progress, []int64{4, 10}) {
		t.Errorf("got %v, %v", h.progress, err)
	}
}

func TestTraceShowsStatusNeverBodies(t *testing.T) {
	f := newFake(t, stream(sseAnswer("secret answer")))
	var lines []string
	f.send(t, f.client(clientOptions{key: "sk-1", trace: func(s string) { lines = append(lines, s) }}), &request{messages: []json.RawMessage{userMessage("secret question")}})
	if len(lines) != 1 || !strings.Contains(lines[0], "status 200") || strings.Contains(lines[0], "secret") || strings.Contains(lines[0], "sk-1") {
		t.Errorf("got %q", lines)
	}
}

// playAll gives what three calls come to, to compare a recorded run with its replay.
func playAll(c *client) (out []string) {
	for range 3 {
		var h heard
		rep, err := ask(c, &h)
		out = append(out, fmt.Sprint(outcome(&h, rep, err), h.retries))
	}
	return out
}

func TestAReplayIsTheSameAsWhatWasRecorded(t *testing.T) {
	whole, _ := json.Marshal("torn ö")
	body := sseChunk(`{"content":` + string(whole) + `}`)
	at := strings.Index(body, "ö") + 1
	f := newFake(t, sseStatus(503, "busy", "Retry-After", "0", "Set-Cookie", "secret=1"),
		func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			for _, s := range []string{body[:at], body[at:], sseChunk(`{}`, "stop"), done} {
				io.WriteString(w, s)
				w.(http.Flusher).Flush()
			}
		},
		func(w http.ResponseWriter) {
			io.WriteString(w, sseChunk(`{"content":"cut"}`))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		stream(sseAnswer("after the cut")),
		func(w http.ResponseWriter) {
			io.WriteString(w, sseChunk(`{"content":"a"}`))
			w.(http.Flusher).Flush()
		},
		stream(sseAnswer("last")))
	var tape bytes.Buffer
	o := clientOptions{key: "sk-secret", record: &tape, backoff: []time.Duration{0}}
	first := playAll(f.client(o))
	if strings.Contains(tape.String(), "secret") || strings.Count(tape.String(), "\n") != len(f.got) {
		t.Errorf("recording of %d requests:\n%s", len(f.got), tape.String())
	}
	player, err := newReplayer(tape.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	o.record, o.transport = nil, player
	c := f.client(o)
	if again := playAll(c); !slices.Equal(first, again) {
		t.Errorf("recorded %q\nreplayed %q", first, again)
	}
	_, err = ask(c, &heard{})
	var api *apiError
	if !errors.As(err, &api) || api.retryable || !strings.Contains(err.Error(), "no further response") {
		t.Errorf("at the end of the recording: %v", err)
	}
	lines := strings.SplitAfter(tape.String(), "\n")
	for _, c := range []struct{ name, data, want string }{
		{"cut in a line", tape.String()[:tape.Len()-3], "line 6"},
		{"cut at the line end", tape.String()[:tape.Len()-1], "line 6"},
		{"edited key", strings.Replace(tape.String(), `"end"`, `"END "`, 1), "line 1"},
		{"no status", lines[0] + strings.Replace(lines[1], `"status":200`, `"status":0`, 1), "line 2"},
		{"no end", lines[0] + strings.Replace(lines[1], `"end":"`, `"end":"","end":"`, 1)[:0] + `{"status":200,"headers":{},"body":[]}` + "\n", "line 2"},
		{"two values", lines[0] + strings.TrimSpace(lines[1]) + lines[2], "line 2"},
		{"not base64", `{"status":200,"headers":{},"body":[{"base64":"*"}],"end":"EOF"}` + "\n", "line 1"},
	} {
		if _, err := newReplayer([]byte(c.data)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
	}
}

// A server may repeat the key in headers, across reads and compressed.
func TestARecordingHoldsNoKey(t *testing.T) {
	const key = "sk-very/secret+="
	body := sseAnswer("your key is " + key)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, body)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	inPieces := func(body string, size int, headers ...string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			for pair := range slices.Chunk(headers, 2) {
				w.Header().Set(pair[0], pair[1])
			}
			for piece := range slices.Chunk([]byte(body), size) {
				w.Write(piece)
				w.(http.Flusher).Flush()
			}
		}
	}
	for name, reply := range map[string]func(http.ResponseWriter){
		"header": sseStatus(302, "", "Location", "https://login.test/"+key+"?api-version=1", "Retry-After", key),
		"no HTTP": func(w http.ResponseWriter) {
			if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
				io.WriteString(conn, key+"\r\n\r\n")
				conn.Close()
			}
		},
		"PHP":         sseStatus(400, `{"error":"your key is sk-very\/secret+="}`),
		".NET":        sseStatus(400, `{"error":"your key is sk-very/secret\u002B="}`),
		"query":       sseStatus(404, "Route POST:/v1/chat/completions?api-version=7&code=hidden not found"),
		"query, Go":   sseStatus(404, `{"error":"no route /v1/chat/completions?api-version=7\u0026code=hidden"}`),
		"query, Gson": sseStatus(404, `{"path":"C:\\u0026","error":"no route /v1/chat/completions?api-version\u003d7\u0026code\u003dhidden"}`),
		"page":        sseStatus(404, "<p>No route /v1/chat/completions?api-version=7&amp;code=hidden for sk-very/secret&#43;="),
		"reads":       inPieces(body, 5),
		"gzip":        inPieces(packed.String(), 5, "Content-Encoding", "gzip"),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, reply)
			var tape bytes.Buffer
			o := clientOptions{key: key, record: &tape}
			first := playAll(f.client(o))
			player, err := newReplayer(tape.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			o.record, o.transport, o.key = nil, player, ""
			if again := playAll(f.client(o)); !slices.Equal(again, strings.Split(strings.ReplaceAll(strings.Join(first, "\n"), key, "[key]"), "\n")) {
				t.Errorf("recorded %q\nreplayed %q", first, again)
			}
			if strings.Contains(tape.String(), "sk-very") || strings.Contains(tape.String(), "base64") || strings.Contains(tape.String(), "api-version") || strings.Contains(strings.Join(first, ""), "hidden") {
				t.Errorf("the recording: %s", tape.String())
			}
		})
	}
}

// endless is a server that goes on with heartbeats after its answer.
func endless(t *testing.T, answer string) (url string) {
	return serveRaw(t, func(conn net.Conn) {
		readRequest(conn)
		io.WriteString(conn, answer)
		beat := time.NewTicker(lateChance / 10)
		defer beat.Stop()
		for err := error(nil); err == nil; <-beat.C {
			_, err = io.WriteString(conn, ": beat\n\n")
		}
	})
}

func TestFastHeartbeatsDoNotHoldAnAnswer(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), testDeadline/10)
	defer cancel()
	rep, err := caseClient(endless(t, "HTTP/1.1 200 OK\r\n\r\n"+sseChunk(`{"content":"ok"}`, "stop"))).complete(ctx, &request{learned: newLearned()}, quiet)
	if err != nil || rep.text != "ok" || ctx.Err() != nil {
		t.Errorf("got %+v, %v; %v", rep, err, ctx.Err())
	}
}

func TestHeartbeatsDoNotHoldAnError(t *testing.T) {
	url := endless(t, "HTTP/1.1 503 Busy\r\n\r\ndata: {\"error\":\"too many\"}\n\n")
	ctx, cancel := context.WithTimeout(context.Background(), testDeadline/10)
	defer cancel()
	_, err := caseClient(url).complete(ctx, &request{learned: newLearned()}, quiet)
	if api, _ := errors.AsType[*apiError](err); api == nil || api.category != "overloaded" || !strings.HasSuffix(api.message, "503 Service Unavailable: too many") {
		t.Errorf("got %v", err)
	}
}

func TestAProxyThatAsksToWaitIsReplayedAsOne(t *testing.T) {
	for _, wait := range []string{"0.002", "3600"} {
		proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { sseStatus(503, "", "Retry-After", wait)(w) }))
		defer proxy.Close()
		u, err := url.Parse(proxy.URL)
		needNil(t, err)
		var tape bytes.Buffer
		o := clientOptions{url: "https://models.test/v1/chat/completions", liveness: testDeadline, backoff: []time.Duration{time.Millisecond}, record: &tape}
		c := newClient(o)
		c.transport.(*http.Transport).Proxy = http.ProxyURL(u)
		first := playAll(c)
		o.transport, err = newReplayer(tape.Bytes())
		needNil(t, err)
		o.record = nil
		if again := playAll(newClient(o)); !slices.Equal(first, again) {
			t.Errorf("%s: recorded %q\nreplayed %q", wait, first, again)
		}
	}
}

func TestAServerWithoutTrustIsReplayedAsOne(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer server.Close()
	var tape bytes.Buffer
	o := clientOptions{url: server.URL, liveness: testDeadline, backoff: []time.Duration{0}, record: &tape}
	first := playAll(newClient(o))
	player, err := newReplayer(tape.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	o.record, o.transport = nil, player
	if again := playAll(newClient(o)); !slices.Equal(first, again) || !strings.Contains(again[0], "SSL_CERT_FILE") {
		t.Errorf("recorded %q\nreplayed %q", first, again)
	}
}

func TestAStallIsReplayedAsAStall(t *testing.T) {
	url := serveRaw(t, func(conn net.Conn) {
		readRequest(conn)
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"+sseChunk(`{"content":"a"}`))
		waitGone(conn)
	})
	var tape bytes.Buffer
	c := newClient(clientOptions{url: url, liveness: 200 * time.Millisecond, record: &tape})
	_, first := ask(c, &heard{})
	player, err := newReplayer(tape.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	_, again := ask(newClient(clientOptions{url: url, liveness: testDeadline, transport: player}), &heard{})
	if first == nil || again == nil || first.Error() != again.Error() {
		t.Errorf("recorded %v, replayed %v", first, again)
	}
}

// failingWriter is a full disk.
type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestARecordingThatCannotBeWrittenFailsTheCall(t *testing.T) {
	f := newFake(t, stream(sseAnswer("ok")))
	_, err := ask(f.client(clientOptions{record: failingWriter{}}), &heard{})
	var api *apiError
	if !errors.As(err, &api) || api.category != "internal" || api.retryable || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("got %v", err)
	}
}

func TestALargeArgumentIsAssembled(t *testing.T) {
	big := strings.Repeat("z", 4<<20)
	one := sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"w","arguments":"{\"d\":\"`+big+`\"}"}}`)) + sseChunk(`{}`, "tool_calls") + done
	b := &builder{emit: quiet, ids: map[string]bool{}, at: map[string]*partial{}}
	if failed := b.read(strings.NewReader(one), func() {}); failed != nil || len(b.calls) != 1 || len(b.calls[0].args) != len(big)+len(`{"d":""}`) {
		t.Errorf("the call is not whole: %v", failed)
	}
}

// Each piece repeats all before it: 60 kB are 225 MB on the way.
func TestLongCumulativeArgumentsAreKeptOnce(t *testing.T) {
	args := `{"p":"` + strings.Repeat("x", 60_000) + `"}`
	b := &builder{emit: quiet, ids: map[string]bool{}, at: map[string]*partial{}}
	for n := 8; n < len(args)+8; n += 8 {
		piece := quote(args[:min(n, len(args))])
		if err := b.value([]byte(bit(`"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"ls","arguments":` + piece + `}}]}`))); err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	}
	b.reason = "tool_calls"
	if !b.settle() || len(b.calls) != 1 || string(b.calls[0].args) != args {
		t.Errorf("got %.200v", b.calls)
	}
}

func TestWhatAServerCanMakeUsHoldIsBounded(t *testing.T) {
	block := bytes.Repeat([]byte("0"), 1<<20)
	endless := io.LimitReader(readerFunc(func(p []byte) (int, error) { return copy(p, block), nil }), 2*maxEvent)
	b := &builder{emit: quiet, ids: map[string]bool{}, at: map[string]*partial{}}
	if failed := b.read(io.MultiReader(strings.NewReader(sseChunk(`{"content":"a"}`)+"data: "), endless), func() {}); failed == nil || !strings.Contains(failed.message, "64 MiB") {
		t.Errorf("an endless event: got %v", failed)
	}
	for _, body := range []string{sseChunk(`{"content":"a"}`), sseChunk(`{"reasoning":"a"}`), sseChunk(`{"reasoning_details":[{}]}`), sseChunk(callDelta(`{"index":1}`)), sseChunk(callDelta(`{"function":{"arguments":"x"}}`))} {
		b := &builder{emit: quiet, ids: map[string]bool{}, at: map[string]*partial{}, kept: maxEvent}
		if failed := b.read(strings.NewReader(body), func() {}); failed == nil || failed.category != "malformed" || failed.retryable {
			t.Errorf("one more %s: got %v", body, failed)
		}
	}
}

// seeds gives a fuzz target the bodies of all cases and a few odd ones.
func seeds(f *testing.F) {
	for _, c := range loadCases(f) {
		if body := c.Response.Body; body != nil && len(*body) < 8<<10 {
			f.Add([]byte(*body), uint8(3))
		}
	}
	for _, s := range []string{"data\r\r\n:\n", "\xef\xbb\xbfdata: x\n\n", "{", "[[", `"`, "<title>", "data: {}{}\n\n", "error: {\"message\":\"x\"}\n\n"} {
		f.Add([]byte(s), uint8(1))
	}
}

// framed lists all events of a body, with their names.
func framed(src io.Reader) string {
	var out strings.Builder
	r := &eventReader{src: src}
	for data, err := range r.events {
		fmt.Fprintf(&out, "%q %q %v %v\n", r.name, data, r.tail && data != nil, err)
		if err != nil {
			break
		}
	}
	return out.String()
}

func FuzzEvents(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, body []byte, step uint8) {
		whole := framed(bytes.NewReader(body))
		for _, src := range []io.Reader{splitReader{bytes.NewReader(body), max(1, int(step))}, iotest.OneByteReader(bytes.NewReader(body)), iotest.DataErrReader(bytes.NewReader(body))} {
			if got := framed(src); got != whole {
				t.Fatalf("split:\n%s\nwhole:\n%s", got, whole)
			}
		}
	})
}

func FuzzReply(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, body []byte, step uint8) {
		whole := result(string(body), len(body)+1)
		if got := result(string(body), max(1, int(step))); got != whole {
			t.Fatalf("split: %s\nwhole: %s", got, whole)
		}
		if !utf8.ValidString(whole) {
			t.Fatalf("not UTF-8: %q", whole)
		}
	})
}

func FuzzClassify(f *testing.F) {
	for _, c := range loadCases(f) {
		if body := c.Response.Body; body != nil && len(*body) < 8<<10 {
			f.Add([]byte(*body), uint8(3), uint16(c.Response.Status))
		}
	}
	known := []string{"auth", "billing", "rate_limit", "overloaded", "server", "bad_request", "unsupported_param", "context_length", "not_found", "stream_error"}
	f.Fuzz(func(t *testing.T, body []byte, step uint8, code uint16) {
		sseStatus := 300 + int(code)%300
		split, _ := io.ReadAll(splitReader{bytes.NewReader(body), max(1, int(step))})
		a, b := refusal(body, sseStatus, ""), refusal(split, sseStatus, "")
		if !reflect.DeepEqual(a, b) || !slices.Contains(known, a.category) || !utf8.ValidString(a.message) || len(a.message) > maxMessage || a.status != sseStatus {
			t.Fatalf("%+v\n%+v", a, b)
		}
		if inside := refusal(body, 0, ""); !slices.Contains(known, inside.category) {
			t.Fatalf("%+v", inside)
		}
	})
}

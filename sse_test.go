//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"
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
	req, err := http.ReadRequest(newLineReader(conn))
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

// heard collects what a sink was told.
type heard struct {
	text, reasoning strings.Builder
	retries         []retryNotice
	progress        []int64
}

func (h *heard) sink() sink {
	return sink{text: func(s string) { h.text.WriteString(s) }, reasoning: func(s string) { h.reasoning.WriteString(s) },
		retry: func(r retryNotice) { h.retries = append(h.retries, r) }, progress: func(a, b int64) { h.progress = append(h.progress, a, b) }}
}

func newLearned() *learned { return &learned{map[string]bool{}, map[string]bool{}} }

// ask sends one plain question with tools offered.
func ask(c *client, h *heard, tools ...string) (*reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testDeadline)
	defer cancel()
	r := &request{messages: []json.RawMessage{userMessage("hi")}, offered: tools, learned: newLearned()}
	return c.complete(ctx, r, h.sink())
}

// outcome puts a result in the form of a case's expectation.
func outcome(h *heard, rep *reply, err error) map[string]any {
	got := map[string]any{"text": h.text.String(), "reasoning": h.reasoning.String(), "tool_calls": []any{}, "finish": "", "error": nil, "retryable": false}
	var api *apiError
	if errors.As(err, &api) {
		got["error"], got["message"], got["retryable"] = api.category, api.message, api.retryable
		if api.hasRetryAfter {
			got["retry_after_ms"] = float64(api.retryAfter.Milliseconds())
		}
		return got
	}
	got["finish"] = rep.finish
	var calls []any
	for _, c := range rep.calls {
		call := map[string]any{"id": c.id, "name": c.name, "arguments": string(c.args) + c.raw}
		for key, val := range c.extra {
			var v any
			json.Unmarshal(val, &v)
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

// newLineReader is a buffered reader, as http.ReadRequest wants it.
func newLineReader(r io.Reader) *bufio.Reader { return bufio.NewReader(r) }

var _ = strconv.Itoa
var _ = iotest.ErrReader

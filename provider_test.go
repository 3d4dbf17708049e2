//go:build linux

package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode"
)

// provider_test.go looks at the provider client from outside, with the built
// binary: the server cases and what stands close to them, fakes of the servers
// that people use, re-sends, repairs, keys, recordings. The fakes are written
// from public reports; no real model was asked.

const (
	atOnce = 8 // runs of belay at the same time: most of them wait, and no other test runs beside them
	// afterwards is the answer to the request that follows a reply with calls.
	afterwards = "(and then the end)"
)

// sse makes an event stream of the data of its events.
func sse(data ...string) string { return "data: " + strings.Join(data, "\n\ndata: ") + "\n\n" }

// bit is one chunk: the inside of its choice, such as `"delta":{}`.
func bit(inside string) string { return `{"choices":[{"index":0,` + inside + `}]}` }

func textBit(s string) string { return bit(`"delta":{"content":` + quote(s) + `}`) }

// callBit is one element of delta.tool_calls.
func callBit(call string) string { return bit(`"delta":{"tool_calls":[` + call + `]}`) }

func endBit(reason string) string {
	return bit(`"delta":{},"finish_reason":"` + reason + `"`)
}

// fromOutside runs the case against the built binary and gives what came out
// in the form of a case's expectation. The first request gets the case; later
// ones too, unless its reply is one that belay continues after.
func (c *streamCase) fromOutside(t *testing.T) map[string]any {
	t.Helper()
	var mu sync.Mutex
	var second []byte
	asked, goesOn := 0, c.continues()
	url := serveRaw(t, func(conn net.Conn) {
		mu.Lock()
		asked++
		first := asked == 1
		mu.Unlock()
		if first || !goesOn {
			c.play(t, conn)
			return
		}
		_, body, err := readRequest(conn)
		if err != nil {
			return
		}
		mu.Lock()
		second = body
		mu.Unlock()
		answer := say(afterwards)
		fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(answer), answer)
	})
	r := prepare(t, []string{"BELAY_BASE_URL=" + url, "BELAY_MODEL=demo-1"}, "exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json",
		"--set", "limits.liveness_ms=800", "--set", "limits.retry_backoff_ms=[]", "do it").start()
	code := r.wait()
	r.meta() // the last lines are there, and in order
	got := seenFromOutside(r, code)
	mu.Lock()
	defer mu.Unlock()
	sentBack(t, got["tool_calls"].([]any), second)
	return got
}

// continues says whether an expected outcome leads to a second request.
func (c *streamCase) continues() bool {
	others, _ := c.Expect["also_ok"].([]any)
	for _, o := range append(others, any(c.Expect)) {
		want := o.(map[string]any)
		if calls, _ := want["tool_calls"].([]any); len(calls) > 0 || want["finish"] == "length" {
			return true
		}
	}
	return false
}

// seenFromOutside reads the events. The exit code is what tells whether a
// re-send may help, and it must agree with the error.
func seenFromOutside(r *belayRun, code int) map[string]any {
	got := map[string]any{"error": nil, "retryable": code == 75, "finish": "stop", "tool_calls": []any{}}
	var text, reasoning strings.Builder
	var calls []any
	for _, e := range r.events("") {
		switch e["type"] {
		case "content":
			text.WriteString(e["content"].(string))
		case "reasoning":
			reasoning.WriteString(e["content"].(string))
		case "tool_use":
			input, isText := e["input"].(string)
			if !isText {
				input = string(jsonOf(e["input"]))
			}
			calls = append(calls, map[string]any{"id": e["id"], "name": e["name"], "arguments": input})
		case "turn_usage":
			if got["usage"] == nil {
				got["usage"] = map[string]any{"prompt_tokens": e["input_tokens"], "completion_tokens": e["output_tokens"]}
			}
		case "error":
			got["error"], got["message"], got["finish"] = e["error_category"], e["error"], ""
		}
	}
	first, more := strings.CutSuffix(text.String(), afterwards)
	got["text"], got["reasoning"] = first, reasoning.String()
	switch {
	case len(calls) > 0:
		got["tool_calls"], got["finish"] = calls, "tool_calls"
	case more:
		got["finish"] = "length"
	case got["error"] == "content_filter": // an answer that ended, but not one to call a success
		got["error"], got["finish"] = nil, "content_filter"
	}
	meta := r.meta()
	category, _ := meta["error_category"].(string)
	if said, _ := got["error"].(string); code != 0 && code != 1 && code != 75 || (code == 0) != (category == "") || said != "" && said != category || float64(code) != meta["exit_code"] {
		r.t.Errorf("exit code %d, error event %q, metadata %v", code, said, meta)
	}
	return got
}

// sentBack checks that the second request repeats the calls and takes over the
// keys of a call that belay does not know, which no event shows.
func sentBack(t *testing.T, calls []any, request []byte) {
	t.Helper()
	var body struct {
		Messages []struct {
			Role  string
			Calls []map[string]any `json:"tool_calls"`
			ID    string           `json:"tool_call_id"`
		}
	}
	if len(calls) == 0 {
		return
	}
	if err := json.Unmarshal(request, &body); err != nil || len(body.Messages) < 3 {
		t.Fatalf("the request after calls: %v: %.500s", err, request)
	}
	turn, results := body.Messages[2], body.Messages[3:min(len(body.Messages), 3+len(calls))] // a note may follow
	if len(turn.Calls) != len(calls) || len(results) != len(calls) {
		t.Fatalf("%d calls came, %d went back with %d results", len(calls), len(turn.Calls), len(results))
	}
	for i, c := range calls {
		seen, back := c.(map[string]any), turn.Calls[i]
		if back["id"] != seen["id"] || results[i].ID != seen["id"] || results[i].Role != "tool" {
			t.Errorf("call %v went back as %v, its result to %q", seen["id"], back["id"], results[i].ID)
		}
		for key, v := range back {
			if seen[key] == nil && key != "type" && key != "function" {
				seen[key] = v
			}
		}
	}
}

// eachAtOnce runs f for all cases as subtests, atOnce of them together.
// Subtests that call Parallel would be as few as there are processors.
func eachAtOnce(t *testing.T, cases []streamCase, f func(*testing.T, *streamCase)) {
	queue := make(chan *streamCase)
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for c := range queue {
				t.Run(c.Name, func(t *testing.T) { f(t, c) })
			}
		})
	}
	for i := range cases {
		queue <- &cases[i]
	}
	close(queue)
	all.Wait()
}

func checkFromOutside(t *testing.T, c *streamCase) {
	got := c.fromOutside(t)
	if s := c.matches(got); s != "" {
		t.Errorf("%s\nseen: %.2000v", s, got)
	}
}

// Every case file but those whose outcome depends on offered tools that exec
// does not have; they run against the client. The delay that a server asks for
// shows only where there is a re-send: TestRetryAfterInItsForms.
func TestServerCasesFromOutside(t *testing.T) {
	cases := slices.DeleteFunc(loadCases(t), func(c streamCase) bool { return len(c.Request.Tools) > 0 })
	for _, c := range cases {
		delete(c.Expect, "retry_after_ms")
	}
	eachAtOnce(t, cases, checkFromOutside)
}

// neighbour makes a case that stands close to those of the files: an event
// stream in one read for each of chunks.
func neighbour(name string, want map[string]any, chunks ...string) streamCase {
	c := streamCase{Name: name, Expect: want}
	c.Response.Status, c.Response.Headers, c.Response.Chunks = http.StatusOK, map[string]string{"Content-Type": "text/event-stream"}, chunks
	return c
}

// answered makes a case of another status, or of another body than a stream.
func answered(name string, code int, body string, want map[string]any, headers ...string) streamCase {
	c := neighbour(name, want, body)
	c.Response.Status, c.Response.Headers = code, map[string]string{"Content-Type": "application/json"}
	for pair := range slices.Chunk(headers, 2) {
		c.Response.Headers[pair[0]] = pair[1]
	}
	return c
}

func hanging(c streamCase) streamCase { c.Response.Hang = true; return c }

func resetting(c streamCase) streamCase { c.Response.Reset = true; return c }

// What a case wants. stops: a complete answer.
func stops(text string) map[string]any {
	return map[string]any{"text": text, "tool_calls": []any{}, "finish": "stop", "error": nil, "retryable": false}
}

func thinks(reasoning, text string) map[string]any {
	w := stops(text)
	w["reasoning"] = reasoning
	return w
}

// calledFor wants calls, given as names and arguments; ids may be any.
func calledFor(text string, calls ...string) map[string]any {
	w, list := stops(text), []any{}
	for c := range slices.Chunk(calls, 2) {
		list = append(list, map[string]any{"id": "*", "name": c[0], "arguments": c[1]})
	}
	w["tool_calls"], w["finish"] = list, "tool_calls"
	return w
}

// cutAt wants a reply that the output limit ended, and that belay goes on after.
func cutAt(text string) map[string]any {
	w := stops(text)
	w["finish"] = "length"
	return w
}

// breaks wants an error of one of categories that a re-send may help against.
func breaks(text string, categories ...string) map[string]any {
	w := refuses("", categories...)
	w["text"], w["retryable"] = text, true
	return w
}

// refuses wants an error that a re-send cannot help against, whose message has words.
func refuses(words string, categories ...string) map[string]any {
	w, others := stops(""), []any{}
	for _, category := range categories[1:] {
		others = append(others, map[string]any{"error": category})
	}
	w["finish"], w["error"], w["also_ok"], w["error_contains"] = "", categories[0], others, words
	return w
}

func TestNeighboursOfServerCases(t *testing.T) {
	cases := slices.Concat(framingNeighbours(t), chunkNeighbours(), endNeighbours(), callNeighbours(), faultNeighbours(), statusNeighbours())
	eachAtOnce(t, cases, checkFromOutside)
}

func framingNeighbours(t *testing.T) []streamCase {
	plain := sse(textBit("o"), textBit("k"), endBit("stop"), "[DONE]")
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, plain)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	zipped := neighbour("gzip-in-one-byte-reads", stops("ok"), packed.String())
	zipped.Response.Split, zipped.Response.Headers = 1, map[string]string{"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
	chatter := hanging(neighbour("comments-after-finish-do-not-hold-the-answer", stops("ok"),
		append([]string{sse(textBit("ok"), endBit("stop"))}, strings.Split(strings.Repeat(": on\n\n|", 30), "|")...)...))
	chatter.Response.Delay = 200
	pings := hanging(neighbour("heartbeat-events-after-finish-do-not-hold-the-answer", stops("ok"),
		append([]string{sse(textBit("ok"), endBit("stop"))}, strings.Split(strings.Repeat(sse(`{"choices":[]}`)+"|", 10)+sse(textBit(" and more")), "|")...)...))
	pings.Response.Delay = 400
	packing := func(name, label, body string) streamCase {
		c := neighbour(name, stops("ok"), body[:1], body[1:])
		c.Response.Headers = map[string]string{"Content-Type": "text/event-stream", "Content-Encoding": label}
		return c
	}
	typed := func(kind string) streamCase {
		c := neighbour("stream-labelled-"+kind, stops("ok"), plain)
		c.Response.Headers = map[string]string{"Content-Type": kind}
		return c
	}
	half := sse(textBit("half"))
	return []streamCase{zipped, chatter, pings, packing("gzip-in-capitals", "GZIP", packed.String()), packing("gzip-without-label", "", packed.String()), packing("gzip-undone-by-a-proxy", "gzip", plain), typed("application/json"), typed("text/plain"), typed("text/html"),
		neighbour("crlf-everywhere", stops("ok"), strings.ReplaceAll(plain, "\n", "\r\n")),
		neighbour("line-ends-mixed", stops("ok"), "data: "+textBit("o")+"\r\r\ndata: "+textBit("k")+"\n\r\ndata: "+endBit("stop")+"\r\n\ndata: [DONE]\r\r"),
		neighbour("later-byte-order-mark-is-text", stops("\ufeffok"), sse(textBit("\ufeffok"), endBit("stop"))),
		neighbour("comment-between-data-lines", stops("ok"), "data: {\"choices\":\n: ping\ndata: [{\"index\":0,\"delta\":{\"content\":\"ok\"}}]}\n\n", sse(endBit("stop"), "[DONE]")),
		neighbour("no-blank-after-colon", stops("ok"), strings.ReplaceAll(plain, "data: ", "data:")),
		neighbour("retry-and-id-alone", stops("ok"), "retry: 3000\nid: 4\n\n"+plain),
		neighbour("name-without-data-is-forgotten", stops("ok"), "event: error\n\n"+plain),
		neighbour("data-without-colon", stops("ok"), "data\n\n"+plain),
		neighbour("data-null", stops("ok"), sse("null")+plain),
		neighbour("sentinel-without-blank-line", stops("ok"), sse(textBit("ok"), endBit("stop"))+"data: [DONE]"),
		neighbour("unknown-fields-and-other-case", stops("ok"), "Data: x\ndata : y\nerror\n\n"+plain),
		neighbour("blank-lines-first", stops("ok"), "\n\n\r\n\n"+plain),
		neighbour("invalid-utf8", stops("a\ufffdb"), "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\xffb\"}}]}\n\n"+sse(endBit("stop"), "[DONE]")),
		neighbour("four-byte-character-torn", stops("x\U0001f980"), "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\xf0", "\x9f", "\xa6", "\x80\"}}]}\n\n"+sse(endBit("stop"))),
		neighbour("last-chunk-without-any-line-end", stops("ok"), sse(textBit("ok"))+"data: "+endBit("stop")),
		neighbour("fragment-after-finish", stops("ok"), sse(textBit("ok"), endBit("stop"))+`data: {"choi`),
		neighbour("five-thousand-events-in-one-read", stops(strings.Repeat("x", 5000)), strings.Repeat(sse(textBit("x")), 5000)+sse(endBit("stop"))),
		neighbour("two-chunks-in-one-event", stops("ok"), "data: "+textBit("o")+"\ndata: "+textBit("k")+"\n\n"+sse(endBit("stop"))),
		neighbour("ping-with-time-stamp", stops("ok"), "event: ping\ndata: 2026-11-30\n\n"+plain),
		hanging(neighbour("sentinel-then-open-socket", stops("ok"), plain)),
		hanging(neighbour("stall-in-mid-text", breaks("half", "stall"), half)),
		hanging(neighbour("stall-inside-a-line", breaks("half", "stall"), half+`data: {"choices`)),
		hanging(neighbour("stall-after-comments", breaks("", "stall"), ": one\n\n", ": two\n\n")),
		hanging(neighbour("stall-inside-arguments", breaks("", "stall"), sse(callBit(`{"index":0,"id":"a","function":{"name":"list_dir","arguments":"{}"}}`)))),
		resetting(neighbour("reset-inside-arguments", breaks("", "truncated", "network"), sse(callBit(`{"index":0,"id":"a","function":{"name":"list_dir","arguments":"{\"p"}}`)))),
		resetting(neighbour("reset-after-sentinel", stops("ok"), plain)),
		resetting(neighbour("reset-before-any-event", breaks("", "truncated", "network", "empty"), ": hello\n\n")),
		neighbour("chunks-as-lines-of-json", stops("ok"), textBit("o")+"\n"+textBit("k")+"\n"+endBit("stop")+"\n"),
		neighbour("chunks-as-lines-of-json-without-end", breaks("ok", "truncated"), textBit("o")+"\n", textBit("k")+"\n"),
		neighbour("named-sentinel", stops("ok"), sse(textBit("ok"))+"event: done\ndata: [DONE]\n\n"),
		hanging(neighbour("sentinel-line-then-open-socket", stops("ok"), sse(textBit("ok"))+"data: [DONE]\n")),
		hanging(neighbour("finish-line-then-open-socket", stops("ok"), sse(textBit("ok"), endBit("stop"))+"data: "+endBit("stop")+"\n")),
	}
}

func chunkNeighbours() []streamCase {
	counted := stops("ok")
	counted["usage"] = map[string]any{"prompt_tokens": 12.0, "completion_tokens": 3.0}
	thinkTags := stops("<think>hm</think>ok")
	thinkTags["also_ok"] = []any{map[string]any{"text": "ok", "reasoning": "hm"}}
	stalled := breaks("", "stall")
	stalled["reasoning"] = "hm"
	end := []string{endBit("stop"), "[DONE]"}
	streamTo := func(name string, want map[string]any, data ...string) streamCase {
		return neighbour(name, want, sse(append(data, end...)...))
	}
	return []streamCase{
		streamTo("usage-in-the-middle-with-empty-choices", counted, textBit("o"), `{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3}}`, textBit("k")),
		streamTo("usage-with-fractions", counted, textBit("ok"), `{"choices":[],"usage":{"prompt_tokens":12.0,"completion_tokens":3.0}}`),
		streamTo("usage-zero-then-real", counted, textBit("ok"), `{"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}`, `{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3}}`),
		streamTo("usage-real-then-null", counted, `{"choices":[{"index":0,"delta":{"content":"ok"}}],"usage":{"prompt_tokens":12,"completion_tokens":3}}`, `{"choices":[],"usage":null}`),
		streamTo("usage-empty-object", stops("ok"), textBit("ok"), `{"choices":[],"usage":{}}`),
		streamTo("prompt-filter-first", stops("ok"), `{"choices":[],"created":0,"id":"","model":"","prompt_filter_results":[{"prompt_index":0,"content_filter_results":{}}]}`, textBit("ok")),
		streamTo("choice-without-index", stops("ok"), `{"choices":[{"delta":{"content":"ok"}}]}`),
		streamTo("second-choice-alone", stops("ok"), textBit("ok"), `{"choices":[{"index":1,"delta":{"content":"other"},"finish_reason":"length"}]}`),
		streamTo("keys-that-differ-in-case", stops("ok"), `{"choices":[{"index":0,"Delta":{"content":"no"},"delta":{"content":"ok","Content":"no"}}]}`),
		streamTo("text-completion-shape", stops("ok"), `{"choices":[{"index":0,"text":"ok"}]}`),
		streamTo("refusal-is-text", stops("I will not"), bit(`"delta":{"refusal":"I will not","content":null}`)),
		streamTo("content-as-text-parts", stops("ok"), bit(`"delta":{"content":[{"type":"text","text":"o"},{"type":"text","text":"k"}]}`)),
		streamTo("escapes", stops("é😀\u0000"), bit(`"delta":{"content":"\u00e9\ud83d\ude00\u0000"}`)),
		streamTo("lone-surrogate", stops("\ufffd."), bit(`"delta":{"content":"\ud83d."}`)),
		streamTo("message-beside-empty-delta", stops("ok"), `{"choices":[{"index":0,"delta":{},"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}`),
		streamTo("reasoning-field", thinks("hm", "ok"), bit(`"delta":{"reasoning":"hm","content":""}`), textBit("ok")),
		streamTo("reasoning-mirrored-in-details", thinks("hm", "ok"), bit(`"delta":{"reasoning":"hm","reasoning_details":[{"type":"reasoning.text","text":"hm"}]}`), textBit("ok")),
		streamTo("reasoning-null-and-empty", thinks("", "ok"), bit(`"delta":{"reasoning":null,"reasoning_content":"","content":"ok"}`)),
		streamTo("thinking-part-as-string", thinks("hm", "ok"), bit(`"delta":{"content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"ok"}]}`)),
		streamTo("reasoning-after-text", thinks("hm", "ok"), textBit("o"), bit(`"delta":{"reasoning_content":"hm"}`), textBit("k")),
		streamTo("think-tags-around-thinking", thinkTags, textBit("<think>hm"), textBit("</think>ok")),
		streamTo("reasoning-and-nothing-else", breaks("", "empty"), bit(`"delta":{"reasoning_content":"hm"}`)),
		hanging(neighbour("stall-while-thinking", stalled, sse(bit(`"delta":{"reasoning_content":"hm"}`)))),
		neighbour("broken-json-in-the-last-event", breaks("ok", "malformed", "truncated"), sse(textBit("ok"), `{"choices":[{"index":0,"delta":{"content":"lost"}`)),
		streamTo("empty-object-and-list", stops("ok"), "{}", "[]", textBit("ok")),
		streamTo("choice-null", stops("ok"), `{"choices":[null]}`, textBit("ok")),
		streamTo("choices-as-object", stops("ok"), `{"choices":{}}`, textBit("ok")),
	}
}

func endNeighbours() []streamCase {
	filtered := stops("a")
	filtered["finish"] = "content_filter"
	one := `{"index":0,"id":"a","type":"function","function":{"name":"list_dir","arguments":"{}"}}`
	cut := calledFor("", "list_dir", "{}")
	return []streamCase{
		neighbour("finish-beside-the-last-text", stops("ok"), sse(textBit("o"), bit(`"delta":{"content":"k"},"finish_reason":"stop"`), "[DONE]")),
		neighbour("sentinel-without-finish", stops("ok"), sse(textBit("ok"), "[DONE]")),
		neighbour("finish-empty-then-sentinel", stops("ok"), sse(bit(`"delta":{"content":"ok"},"finish_reason":""`), "[DONE]")),
		neighbour("finish-word-null-then-end-of-body", breaks("ok", "truncated"), sse(bit(`"delta":{"content":"ok"},"finish_reason":"null"`))),
		neighbour("finish-in-capitals", stops("ok"), sse(textBit("ok"), endBit("STOP"))),
		neighbour("finish-end-turn", stops("ok"), sse(textBit("ok"), endBit("end_turn"))),
		neighbour("tool-calls-reason-without-calls", stops("ok"), sse(textBit("ok"), endBit("tool_calls"), "[DONE]")),
		neighbour("tool-calls-reason-with-nothing", breaks("", "empty"), sse(endBit("tool_calls"), "[DONE]")),
		neighbour("stop-with-nothing", breaks("", "empty"), sse(textBit(""), endBit("stop"), "[DONE]")),
		neighbour("stop-with-blanks", breaks(" \n", "empty"), sse(textBit(" \n"), endBit("stop"), "[DONE]")),
		neighbour("call-with-reason-stop", calledFor("", "list_dir", "{}"), sse(callBit(one), endBit("stop"), "[DONE]")),
		neighbour("call-with-finish-in-one-chunk", calledFor("", "list_dir", "{}"), sse(bit(`"delta":{"tool_calls":[`+one+`]},"finish_reason":"tool_calls"`))),
		neighbour("length", cutAt("half"), sse(textBit("half"), endBit("length"), "[DONE]")),
		neighbour("max-tokens-reason", cutAt("half"), sse(textBit("half"), endBit("max_tokens"), "[DONE]")),
		neighbour("max-tokens-in-capitals", cutAt("half"), sse(textBit("half"), endBit("MAX_TOKENS"), "[DONE]")),
		neighbour("length-then-stop", cutAt("half"), sse(textBit("half"), endBit("length"), endBit("stop"), "[DONE]")),
		neighbour("length-without-text", cutAt(""), sse(bit(`"delta":{"reasoning_content":"hm"}`), endBit("length"), "[DONE]")),
		neighbour("length-inside-arguments", cutAt("half"), sse(textBit("half"), callBit(`{"index":0,"id":"a","function":{"name":"list_dir","arguments":"{\"path"}}`), endBit("length"))),
		neighbour("length-inside-second-call", cut, sse(callBit(one), callBit(`{"index":1,"id":"b","function":{"name":"list_dir","arguments":"{\"path"}}`), endBit("length"))),
		neighbour("content-filter-after-a-call", filtered, sse(textBit("a"), callBit(one), endBit("content_filter"), "[DONE]")),
		neighbour("reason-error", breaks("a", "stream_error"), sse(textBit("a"), endBit("error"), "[DONE]")),
		neighbour("unknown-reason", refusesAfter("a", "resource", "malformed"), sse(textBit("a"), endBit("insufficient_system_resource"), "[DONE]")),
		neighbour("end-of-body-after-complete-call", breaks("", "truncated"), sse(callBit(one))),
		neighbour("role-only-then-end-of-body", breaks("", "truncated", "empty"), sse(bit(`"delta":{"role":"assistant"}`))),
		resetting(neighbour("reset-after-calls-and-finish", calledFor("", "list_dir", "{}"), sse(callBit(one), endBit("tool_calls")))),
		neighbour("finish-as-number", breaks("ok", "truncated"), sse(bit(`"delta":{"content":"ok"},"finish_reason":1`))),
		hanging(neighbour("calls-and-finish-then-open-socket", calledFor("", "list_dir", "{}"), sse(callBit(one), endBit("tool_calls")))),
	}
}

// refusesAfter is refuses after some text.
func refusesAfter(text, words string, categories ...string) map[string]any {
	w := refuses(words, categories...)
	w["text"] = text
	return w
}

func callNeighbours() []streamCase {
	streamTo := func(name string, want map[string]any, pieces ...string) streamCase {
		data := []string{bit(`"delta":{"role":"assistant","content":null}`)}
		for _, p := range pieces {
			data = append(data, callBit(p))
		}
		return neighbour(name, want, sse(append(data, endBit("tool_calls"), "[DONE]")...))
	}
	fn := func(name, arguments string) string {
		return fmt.Sprintf(`"type":"function","function":{"name":%s,"arguments":%s}`, quote(name), quote(arguments))
	}
	piece := func(s string) string { return `"function":{"arguments":` + quote(s) + `}` }
	a, b := `{"p":"a"}`, `{"p":"b"}`
	two := calledFor("", "f", a, "g", b)
	whole := func(message string) string {
		return `{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":null,` + message + `},"finish_reason":"tool_calls"}]}`
	}
	kept := calledFor("", "f", a)
	kept["tool_calls"].([]any)[0].(map[string]any)["extra_content"] = map[string]any{"k": "v"}
	return []streamCase{
		streamTo("interleaved-by-index", two, `{"index":0,"id":"x",`+fn("f", "")+`},{"index":1,"id":"y",`+fn("g", "")+`}`, `{"index":1,`+piece(b[:4])+`}`, `{"index":0,`+piece(a[:3])+`}`, `{"index":0,`+piece(a[3:])+`}`, `{"index":1,`+piece(b[4:])+`}`),
		streamTo("index-as-string", two, `{"index":"0","id":"x",`+fn("f", "")+`}`, `{"index":"1","id":"y",`+fn("g", "")+`}`, `{"index":"0",`+piece(a)+`}`, `{"index":"1",`+piece(b)+`}`),
		streamTo("index-with-gaps", two, `{"index":1,"id":"x",`+fn("f", a)+`}`, `{"index":4,"id":"y",`+fn("g", "")+`}`, `{"index":4,`+piece(b)+`}`),
		streamTo("index-negative", calledFor("", "f", a), `{"index":-1,"id":"x",`+fn("f", "")+`}`, `{"index":-1,`+piece(a)+`}`),
		streamTo("index-zero-for-all-in-pieces", two, `{"index":0,"id":"x",`+fn("f", "")+`}`, `{"index":0,`+piece(a)+`}`, `{"index":0,"id":"y",`+fn("g", "")+`}`, `{"index":0,`+piece(b)+`}`),
		streamTo("no-index-pieces-by-id", two, `{"id":"x",`+fn("f", "")+`}`, `{"id":"y",`+fn("g", "")+`}`, `{"id":"x",`+piece(a)+`}`, `{"id":"y",`+piece(b)+`}`),
		streamTo("no-index-no-ids-two-names", two, `{`+fn("f", a)+`}`, `{`+fn("g", b)+`}`),
		streamTo("whole-calls-in-one-list-without-index", two, `{"id":"x",`+fn("f", a)+`},{"id":"y",`+fn("g", b)+`}`),
		streamTo("same-id-without-index", calledFor("", "f", a, "f", b), `{"id":"f",`+fn("f", a)+`}`, `{"id":"f",`+fn("f", b)+`}`),
		streamTo("empty-id-in-continuation", calledFor("", "f", a), `{"index":0,"id":"x",`+fn("f", "")+`}`, `{"index":0,"id":"",`+fn("", a)+`}`),
		streamTo("id-null-throughout", calledFor("", "f", a), `{"index":0,"id":null,`+fn("f", a)+`}`),
		streamTo("id-empty-for-two", two, `{"index":0,"id":"",`+fn("f", a)+`}`, `{"index":1,"id":"",`+fn("g", b)+`}`),
		streamTo("name-in-every-piece-with-id", calledFor("", "f", a), `{"index":0,"id":"x",`+fn("f", a[:4])+`}`, `{"index":0,"id":"x",`+fn("f", a[4:])+`}`),
		streamTo("name-after-id", calledFor("", "f", a), `{"index":0,"id":"x","type":"function"}`, `{"index":0,"function":{"name":"f"}}`, `{"index":0,`+piece(a)+`}`),
		streamTo("name-after-arguments", calledFor("", "f", a), `{"index":0,"id":"x",`+piece(a)+`}`, `{"index":0,"function":{"name":"f"}}`),
		streamTo("arguments-empty", calledFor("", "f", "{}"), `{"index":0,"id":"x",`+fn("f", "")+`}`),
		streamTo("arguments-the-word-null", calledFor("", "f", "{}"), `{"index":0,"id":"x",`+fn("f", "null")+`}`),
		streamTo("arguments-sent-twice", calledFor("", "f", a), `{"index":0,"id":"x",`+fn("f", a)+`}`, `{"index":0,`+piece(a)+`}`),
		streamTo("arguments-sent-twice-with-everything", calledFor("", "f", a), `{"index":0,"id":"x",`+fn("f", a)+`}`, `{"index":0,"id":"x",`+fn("f", a)+`}`),
		streamTo("arguments-cumulative-with-name", calledFor("", "f", a), `{"index":0,"id":"x",`+fn("f", a[:2])+`}`, `{"index":0,"id":"x",`+fn("f", a[:6])+`}`, `{"index":0,"id":"x",`+fn("f", a)+`}`),
		streamTo("arguments-with-bare-line-end", calledFor("", "f", `{"p":"a\nb"}`), `{"index":0,"id":"x",`+fn("f", "{\"p\":\"a\nb\"}")+`}`),
		streamTo("arguments-with-blanks-around", calledFor("", "f", a), `{"index":0,"id":"x",`+fn("f", "\n "+a+" \n")+`}`),
		streamTo("arguments-no-json", calledFor("", "f", `{'p': 1}`), `{"index":0,"id":"x",`+fn("f", `{'p': 1}`)+`}`),
		streamTo("arguments-a-list", calledFor("", "f", `[1]`), `{"index":0,"id":"x",`+fn("f", `[1]`)+`}`),
		streamTo("arguments-cut-though-it-ended", calledFor("", "f", `{"p":"a`), `{"index":0,"id":"x",`+fn("f", `{"p":"a`)+`}`),
		streamTo("arguments-object-empty", calledFor("", "f", "{}"), `{"index":0,"id":"x","function":{"name":"f","arguments":{}}}`),
		streamTo("arguments-split-inside-a-character", calledFor("", "f", `{"p":"é"}`), `{"index":0,"id":"x",`+fn("f", `{"p":"\u00`)+`}`, `{"index":0,`+piece(`e9"}`)+`}`),
		streamTo("type-empty", calledFor("", "f", a), `{"index":0,"id":"x","type":"","function":{"name":"f","arguments":`+quote(a)+`}}`),
		streamTo("unknown-key-in-later-piece", kept, `{"index":0,"id":"x",`+fn("f", a)+`}`, `{"index":0,"extra_content":{"k":"v"}}`),
		streamTo("call-key-null-is-left-out", calledFor("", "f", a), `{"index":0,"id":"x","extra_content":null,`+fn("f", a)+`}`),
		answered("whole-answer-with-calls", 200, whole(`"tool_calls":[{"id":"x",`+fn("f", a)+`},{"id":"y",`+fn("g", b)+`}]`), two),
		answered("whole-answer-with-old-call", 200, whole(`"function_call":{"name":"f","arguments":`+quote(a)+`}`), calledFor("", "f", a)),
		neighbour("whole-message-with-calls-in-one-event", calledFor("", "f", a), sse(whole(`"tool_calls":[{"id":"x",`+fn("f", a)+`}]`), "[DONE]")),
		neighbour("old-call-with-object", calledFor("", "f", a), sse(bit(`"delta":{"function_call":{"name":"f","arguments":`+a+`}}`), endBit("function_call"), "[DONE]")),
		streamTo("index-zero-no-ids-two-names", two, `{"index":0,`+fn("f", a)+`}`, `{"index":0,`+fn("g", b)+`}`),
		streamTo("arguments-empty-object-then-text", calledFor("", "f", a), `{"index":0,"id":"x","function":{"name":"f","arguments":{}}}`, `{"index":0,`+piece(a)+`}`),
		streamTo("arguments-with-a-tail", calledFor("", "f", a+"</tool_call>"), `{"index":0,"id":"x",`+fn("f", a+"</tool_call>")+`}`),
		streamTo("arguments-encoded-twice", calledFor("", "f", quote(a)), `{"index":0,"id":"x",`+fn("f", quote(a))+`}`),
		neighbour("calls-as-object", calledFor("", "f", a), sse(bit(`"delta":{"tool_calls":{"index":0,"id":"x",`+fn("f", a)+`}}`), endBit("tool_calls"), "[DONE]")),
	}
}

func faultNeighbours() []streamCase {
	inside := func(name string, want map[string]any, event string) streamCase {
		want["text"] = "half"
		return neighbour(name, want, sse(textBit("half"), event, "[DONE]"))
	}
	return []streamCase{
		inside("error-as-text", breaks("", "stream_error", "server"), `{"error":"boom"}`),
		inside("error-in-the-choice", breaks("", "stream_error", "server", "overloaded"), `{"choices":[{"index":0,"delta":{"content":""},"error":{"code":502,"message":"upstream is down"},"finish_reason":"error"}]}`),
		inside("error-overloaded", breaks("", "overloaded", "stream_error", "server"), `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`),
		inside("error-with-code-429", breaks("", "rate_limit"), `{"error":{"code":429,"message":"slow down"}}`),
		inside("error-with-code-as-text", breaks("", "server", "overloaded", "stream_error"), `{"error":{"code":"503","message":"no capacity"}}`),
		inside("error-refuses-the-key", refuses("key", "auth"), `{"error":{"code":401,"message":"bad key"}}`),
		inside("error-refuses-the-request", refuses("field", "bad_request"), `{"error":{"code":400,"message":"a field is wrong"}}`),
		inside("error-context", refuses("context", "context_length"), `{"error":{"message":"This model's maximum context length is 4096 tokens","type":"invalid_request_error","code":"context_length_exceeded"}}`),
		inside("error-balance", refuses("balance", "billing"), `{"error":{"code":402,"message":"Insufficient Balance"}}`),
		neighbour("error-null-is-none", stops("ok"), sse(`{"error":null,"choices":[{"index":0,"delta":{"content":"ok"}}]}`, endBit("stop"), "[DONE]")),
		neighbour("error-empty-is-none", stops("ok"), sse(`{"error":"","choices":[{"index":0,"delta":{"content":"ok"}}]}`, endBit("stop"), "[DONE]")),
		neighbour("named-error-with-object", breaks("", "stream_error", "server"), "event: error\ndata: {\"error\":{\"message\":\"engine died\",\"type\":\"internal_error\"}}\n\n"),
		neighbour("named-error-over-two-lines", breaks("", "stream_error", "server"), "event: error\ndata: engine\ndata: died\n\n"),
		neighbour("error-line-without-data", breaks("", "stream_error", "server"), "error: {\"code\":500,\"message\":\"engine died\",\"type\":\"server_error\"}\n\n"),
		neighbour("error-line-after-text", breaks("half", "stream_error", "server"), sse(textBit("half"))+"error: {\"code\":500,\"message\":\"engine died\",\"type\":\"server_error\"}\n\n"),
		neighbour("vendor-status-rate-limit", breaks("", "rate_limit", "stream_error"), sse(`{"choices":null,"base_resp":{"status_code":1002,"status_msg":"rate limit exceeded"}}`)),
		neighbour("vendor-status-zero-is-none", stops("ok"), sse(`{"choices":[{"index":0,"delta":{"content":"ok"}}],"base_resp":{"status_code":0,"status_msg":""}}`, endBit("stop"))),
		neighbour("detail-in-an-event", breaks("", "stream_error", "server"), sse(`{"detail":"engine died"}`)),
		neighbour("object-error", breaks("", "stream_error", "server"), sse(`{"object":"error","message":"engine died","code":500}`)),
		neighbour("wrong-path-of-LM-Studio", refuses("/v1/chat/completions", "not_found"), `{"error":"Unexpected endpoint or method. (POST /chat/completions)"}`),
	}
}

func statusNeighbours() []streamCase {
	said := func(text string) string { return `{"error":{"message":` + quote(text) + `}}` }
	typed := func(text, kind, code string) string {
		return fmt.Sprintf(`{"error":{"message":%s,"type":%s,"param":null,"code":%s}}`, quote(text), quote(kind), quote(code))
	}
	page := "<html><head><title>Welcome</title></head><body>hello</body></html>"
	html := []string{"Content-Type", "text/html"}
	return []streamCase{
		answered("401", 401, typed("Incorrect API key provided", "invalid_request_error", "invalid_api_key"), refuses("key", "auth")),
		answered("401-without-body", 401, "", refuses("401", "auth")),
		answered("403", 403, said("not for your region"), refuses("region", "auth")),
		answered("402", 402, said("Insufficient Balance"), refuses("balance", "billing")),
		answered("404-model", 404, typed("The model demo-1 does not exist", "invalid_request_error", "model_not_found"), refuses("demo-1", "not_found")),
		answered("404-without-body", 404, "", refuses("/v1/chat/completions", "not_found")),
		answered("405", 405, `{"detail":"Method Not Allowed"}`, refuses("allowed", "not_found")),
		answered("400-model", 400, typed("demo-1 is unknown", "invalid_request_error", "model_not_found"), refuses("unknown", "not_found", "bad_request")),
		answered("400-text", 400, "bad thing", refuses("bad thing", "bad_request"), "Content-Type", "text/plain"),
		answered("400-json-string", 400, `"bad thing"`, refuses("bad thing", "bad_request")),
		answered("400-without-body", 400, "", refuses("400", "bad_request")),
		answered("400-error-string", 400, `{"error":"bad thing"}`, refuses("bad thing", "bad_request")),
		answered("400-context", 400, typed("maximum context length is 8192 tokens, you asked for 9000", "invalid_request_error", "context_length_exceeded"), refuses("8192", "context_length")),
		answered("400-too-long", 400, said("prompt is too long: 210000 tokens > 200000 maximum"), refuses("too long", "context_length")),
		answered("500-context", 500, typed("the request exceeds the available context size", "server_error", "x"), refuses("context size", "context_length")),
		answered("413", 413, "", refuses("413", "context_length", "bad_request")),
		answered("400-max-tokens", 400, typed("Unsupported parameter: 'max_tokens', use 'max_completion_tokens'", "invalid_request_error", "unsupported_parameter"), refuses("max_tokens", "unsupported_param")),
		answered("422-list", 422, `{"detail":[{"loc":["body","messages"],"msg":"field required","type":"value_error.missing"}]}`, refuses("field required", "bad_request")),
		answered("408", 408, "", breaks("", "server", "network", "stall")),
		answered("425", 425, "", breaks("", "server")),
		answered("429-seconds", 429, said("slow down"), breaks("", "rate_limit"), "Retry-After", "2"),
		answered("429-far-date", 429, said("slow down"), breaks("", "rate_limit"), "Retry-After", "Wed, 21 Oct 2099 07:28:00 GMT"),
		answered("429-nonsense-delay", 429, said("slow down"), breaks("", "rate_limit"), "Retry-After", "soon"),
		answered("429-text", 429, "Too Many Requests", breaks("", "rate_limit"), "Content-Type", "text/plain"),
		answered("429-quota-of-a-minute", 429, `[{"error":{"code":429,"message":"You exceeded your current quota","status":"RESOURCE_EXHAUSTED"}}]`, breaks("", "rate_limit")),
		answered("429-balance", 429, typed("You exceeded your current quota, please check your plan", "insufficient_quota", "insufficient_quota"), refuses("quota", "billing", "rate_limit")),
		answered("500", 500, typed("Internal error", "server_error", "x"), breaks("", "server")),
		answered("500-without-body", 500, "", breaks("", "server")),
		answered("502-text", 502, "upstream connect error", breaks("", "server"), "Content-Type", "text/plain"),
		answered("503", 503, said("no worker is free"), breaks("", "overloaded", "server"), "Retry-After", "1"),
		answered("504-page", 504, "<html><head><title>504 Gateway Time-out</title></head></html>", breaks("", "server", "overloaded"), html...),
		answered("524", 524, "error code: 524", breaks("", "server", "overloaded"), "Content-Type", "text/plain"),
		answered("529", 529, `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`, breaks("", "overloaded")),
		answered("500-out-of-memory-while-loading", 500, said("unable to load model: out of memory"), refuses("load", "server")),
		answered("500-template", 500, said("Jinja Exception: Conversation roles must alternate"), refuses("alternate", "bad_request", "server")),
		answered("302", 302, "", refuses("elsewhere.example", "not_found"), "Location", "https://elsewhere.example/login"),
		answered("308", 308, "", refuses("elsewhere.example", "not_found"), "Location", "https://elsewhere.example/v1/chat/completions"),
		answered("200-page", 200, page, refuses("welcome", "not_sse"), html...),
		answered("200-text", 200, "Hello, I am up.", breaks("", "empty", "not_sse"), "Content-Type", "text/plain"),
		answered("200-empty-object", 200, "{}", breaks("", "empty", "malformed", "not_sse", "truncated")),
		answered("200-blanks", 200, "\n\n  \n", breaks("", "empty")),
		answered("200-cut-json", 200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"hal`, breaks("", "truncated", "malformed", "empty")),
		answered("200-blanks-before-whole-answer", 200, "\n\n  \n"+`{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}`, stops("ok")),
		answered("200-whole-answer-without-finish", 200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}]}`, stops("ok")),
		answered("200-whole-answer-filtered", 200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"o"},"finish_reason":"content_filter"}]}`, map[string]any{"text": "o", "tool_calls": []any{}, "finish": "content_filter", "error": nil, "retryable": false}),
		answered("200-json-error-context", 200, typed("maximum context length is 4096 tokens", "invalid_request_error", "context_length_exceeded"), refuses("4096", "context_length")),
		answered("200-json-error-auth", 200, `{"error":{"code":401,"message":"no such key"}}`, refuses("key", "auth")),
		answered("403-balance", 403, said("insufficient balance"), refuses("balance", "billing", "auth")),
		answered("404-of-Ollama", 404, typed("model 'demo-1' not found, try pulling it first", "api_error", "x"), refuses("pulling", "not_found")),
		answered("409", 409, said("conflict"), refuses("conflict", "bad_request", "server")),
		answered("400-error-null", 400, `{"error":null,"message":"odd"}`, refuses("odd", "bad_request")),
		answered("500-out-of-memory", 500, said("CUDA out of memory"), breaks("", "server")),
		answered("520", 520, "", breaks("", "server")),
		hanging(answered("500-then-open-socket", 500, said("x"), breaks("", "server"))),
		resetting(answered("500-then-reset", 500, said("x"), breaks("", "server"))),
		answered("200-page-labelled-event-stream", 200, page, refuses("welcome", "not_sse"), "Content-Type", "text/event-stream"),
		answered("200-whole-answer-empty", 200, `{"choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}]}`, breaks("", "empty")),
		answered("200-whole-answer-without-choices", 200, `{"choices":[]}`, breaks("", "empty")),
		answered("200-whole-answer-at-the-limit", 200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"half"},"finish_reason":"length"}]}`, cutAt("half")),
		hanging(answered("200-whole-answer-then-open-socket", 200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}`, stops("ok"))),
	}
}

// fakeServer plays one kind of server: what it refuses, and how it words and
// cuts what it sends. Its answers lead through two turns with tools to "done".
type fakeServer struct {
	name, base string // base: path and query of the base URL
	args, env  []string
	keys       string // beside those that every request has: allowed keys of the request
	back       string // keys that an assistant's turn with calls must bring back
	only       bool   // refuse any other key of a message
	refuse     func(r *http.Request, body map[string]any) string
	refusal    string // its form, %s is the message
	code       int
	answers    []any // in order, a status handler or a stream; a refused request uses none up

	wantRefused, wantRetries, wantCalls int
	wantReasoning                       string
}

// messagesOf gives the messages of a request.
func messagesOf(body map[string]any) (out []map[string]any) {
	list, _ := body["messages"].([]any)
	for _, m := range list {
		out = append(out, m.(map[string]any))
	}
	return out
}

// callsOf gives the calls of a message.
func callsOf(m map[string]any) (out []map[string]any) {
	list, _ := m["tool_calls"].([]any)
	for _, c := range list {
		out = append(out, c.(map[string]any))
	}
	return out
}

// ill says what is wrong with a request by the rules that some server or other
// enforces, "" if nothing is.
func ill(body map[string]any, keys, back string, only bool) string {
	for key, v := range body {
		if !slices.Contains(strings.Fields("model messages stream stream_options tools "+keys), key) || v == nil {
			return "key " + key + " is not wanted"
		}
	}
	if tools, _ := body["tools"].([]any); len(tools) == 0 || body["stream"] != true {
		return "tools must not be empty, stream must be true"
	}
	ids, role, open := map[any]bool{}, "", []any{}
	messages := messagesOf(body)
	for i, m := range messages {
		content, isText := m["content"].(string)
		calls := callsOf(m)
		switch {
		case !isText:
			return fmt.Sprintf("content of message %d is no text", i)
		case (m["role"] == "system") != (i == 0) || m["role"] == "user" && role == "user":
			return "roles must alternate, the system message stands first"
		case m["tool_calls"] != nil && len(calls) == 0, m["role"] == "assistant" && content == "" && len(calls) == 0:
			return "an assistant's turn must not be empty"
		case m["role"] == "tool" && (len(open) == 0 || open[0] != m["tool_call_id"]), m["role"] != "tool" && len(open) > 0:
			return "each call needs its result right after it"
		case m["role"] == "tool":
			open = open[1:]
		}
		allowed := "role content tool_calls tool_call_id"
		if !only {
			allowed += " reasoning reasoning_content reasoning_details"
		}
		for key, v := range m {
			if v == nil || !slices.Contains(strings.Fields(allowed), key) {
				return fmt.Sprintf("message %d has %s", i, key)
			}
		}
		for _, c := range calls {
			f := c["function"].(map[string]any)
			arguments, _ := f["arguments"].(string)
			if id, _ := c["id"].(string); id == "" || ids[id] || c["type"] != "function" || !isObject([]byte(arguments)) {
				return fmt.Sprintf("call %v is wrong or its id is not its own", c)
			}
			ids[c["id"]], open = true, append(open, c["id"])
		}
		for _, key := range strings.Fields(back) {
			if len(calls) > 0 && m[key] == nil {
				return fmt.Sprintf("message %d lacks %s", i, key)
			}
		}
		role = m["role"].(string)
	}
	if role != "user" && role != "tool" || len(open) > 0 {
		return "the last message must be the user's or a result"
	}
	return ""
}

// witness is a server that keeps every request as it came.
type witness struct {
	*provider
	bodies []string        // guarded by provider.mu
	seen   []*http.Request // guarded by provider.mu
}

// witnessed starts one. Request n, from 0, is for answer.
func witnessed(t *testing.T, answer func(n int, w http.ResponseWriter, r *http.Request, body map[string]any)) *witness {
	s := &witness{provider: &provider{}}
	s.Server = httptest.NewServer(s.handler(answer))
	t.Cleanup(func() { s.Listener.Close(); s.CloseClientConnections() })
	return s
}

func (s *witness) handler(answer func(n int, w http.ResponseWriter, r *http.Request, body map[string]any)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		var body map[string]any
		json.Unmarshal(raw, &body)
		s.mu.Lock()
		n := len(s.bodies)
		s.bodies, s.seen = append(s.bodies, string(raw)), append(s.seen, r)
		s.mu.Unlock()
		answer(n, w, r, body)
	})
}

// got gives the bodies and heads of all requests so far.
func (s *witness) got() ([]string, []*http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.bodies), slices.Clone(s.seen)
}

// stream answers with an event stream, flushed line by line as servers do.
func streamTo(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	for line := range strings.Lines(body) {
		io.WriteString(w, line)
		w.(http.Flusher).Flush()
	}
}

// start serves the fake. refused counts the requests it turned down.
func (f *fakeServer) start(t *testing.T) (s *witness, refused *atomic.Int32) {
	refused = &atomic.Int32{}
	return witnessed(t, func(n int, w http.ResponseWriter, r *http.Request, body map[string]any) {
		path, query, _ := strings.Cut(f.base, "?")
		fault := ill(body, f.keys, f.back, f.only)
		if r.URL.Path != path+"/chat/completions" || r.URL.RawQuery != query || r.Method != http.MethodPost {
			fault = "unexpected endpoint " + r.URL.String()
		}
		if fault == "" && f.refuse != nil {
			fault = f.refuse(r, body)
		}
		if fault != "" {
			refused.Add(1)
			status(f.code, fmt.Sprintf(f.refusal, quote(fault)))(w, r)
			return
		}
		switch answer := f.answers[min(n-int(refused.Load()), len(f.answers)-1)].(type) {
		case string:
			streamTo(w, answer)
		case func(http.ResponseWriter, *http.Request):
			answer(w, r)
		}
	}), refused
}

// onlyGrows checks that what was sent once is sent again byte for byte, since a
// server's prefix cache lives on that.
func (s *witness) onlyGrows(t *testing.T) {
	t.Helper()
	var before []json.RawMessage
	bodies, _ := s.got()
	for n, raw := range bodies {
		var body struct{ Messages []json.RawMessage }
		if err := json.Unmarshal([]byte(raw), &body); err != nil || len(body.Messages) < len(before) {
			t.Fatalf("request %d: %v, %d messages after %d", n, err, len(body.Messages), len(before))
		}
		for i, m := range before {
			if string(m) != string(body.Messages[i]) {
				t.Errorf("request %d, message %d became %s, was %s", n, i, body.Messages[i], m)
			}
		}
		before = body.Messages
	}
}

// The two commands that the fakes ask for.
const (
	firstCommand  = `{"command":"echo one > one.txt"}`
	secondCommand = `{"command":"cat one.txt"}`
)

func TestTwoToolTurnsWithEachServer(t *testing.T) {
	for _, f := range []fakeServer{fakeLlamaServer(), fakeVLLM(), fakeOllama(), fakeDeepSeek(), fakeOpenRouter(), fakeGemini(), fakeMistral(), fakeAzure(), fakeLMStudio()} {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			p, refused := f.start(t)
			r := execRun(t, p.provider, append([]string{"--set", "limits.retry_backoff_ms=[1, 1]"}, f.args...)...)
			r.cmd.Env = append(r.cmd.Env, append(f.env, "BELAY_BASE_URL="+p.URL+f.base)...)
			r.finish(0)
			one, err := os.ReadFile(r.workspace + "/one.txt")
			results := r.events("tool_result")
			if err != nil || string(one) != "one\n" || len(results) != f.wantCalls {
				t.Errorf("%d results, want %d; the file: %q, %v", len(results), f.wantCalls, one, err)
			}
			for _, result := range results {
				if result["status"] != "success" {
					t.Errorf("result %v", result)
				}
			}
			if last := results[len(results)-1]; !strings.HasPrefix(last["output"].(string), "one\n") {
				t.Errorf("the last result is %q", last["output"])
			}
			if int(refused.Load()) != f.wantRefused || len(r.events("retry")) != f.wantRetries || r.meta()["turns"] != 3.0 {
				t.Errorf("%d refused, want %d; retries %v, want %d; metadata %v", refused.Load(), f.wantRefused, r.events("retry"), f.wantRetries, r.meta())
			}
			content, reasoning := r.texts()
			if !strings.HasSuffix(content, "done") || reasoning != f.wantReasoning {
				t.Errorf("text %q, reasoning %q, want %q", content, reasoning, f.wantReasoning)
			}
			p.onlyGrows(t)
		})
	}
}

// texts gives all visible and all thinking text of a run.
func (r *belayRun) texts() (content, reasoning string) {
	for _, e := range r.events("content") {
		content += e["content"].(string)
	}
	for _, e := range r.events("reasoning") {
		reasoning += e["content"].(string)
	}
	return content, reasoning
}

// event makes a chunk with a server's envelope around the inside of its choice.
func event(envelope, inside string) string {
	return "data: {" + envelope + `,"choices":[{"index":0,` + inside + "}]}\n\n"
}

// inPieces gives a call as llama-server and vLLM cut it: the head, then pieces
// of the arguments of size bytes.
func inPieces(envelope, head, arguments string, size int) (out string) {
	out = event(envelope, `"delta":{"tool_calls":[{"index":0,`+head+`}]},"finish_reason":null`)
	for piece := range slices.Chunk([]byte(arguments), size) {
		out += event(envelope, `"delta":{"tool_calls":[{"index":0,"function":{"arguments":`+quote(string(piece))+`}}]},"finish_reason":null`)
	}
	return out
}

// fakeLlamaServer loads its model first, sends its counts in a chunk without
// choices, and words template errors as 500.
func fakeLlamaServer() fakeServer {
	const e = `"created":1764500000,"id":"chatcmpl-q1","model":"m.gguf","system_fingerprint":"b7000-0","object":"chat.completion.chunk"`
	end := func(reason string) string {
		return event(e, `"finish_reason":"`+reason+`","delta":{}`) + "data: {" + e + `,"choices":[],"usage":{"completion_tokens":7,"prompt_tokens":90,"total_tokens":97},"timings":{"prompt_n":90,"predicted_per_second":41.5}}` + "\n\ndata: [DONE]\n\n"
	}
	turn := func(id, arguments string) string {
		return event(e, `"finish_reason":null,"delta":{"role":"assistant","content":null}`) + event(e, `"finish_reason":null,"delta":{"reasoning_content":"hm "}`) +
			inPieces(e, `"id":"`+id+`","type":"function","function":{"name":"Bash","arguments":"{"}`, arguments[1:], 3) + end("tool_calls")
	}
	return fakeServer{name: "llama-server", code: 500, refusal: `{"error":{"code":500,"message":%s,"type":"server_error"}}`, back: "reasoning_content", base: "/v1",
		answers: []any{status(503, `{"error":{"message":"Loading model","type":"unavailable_error","code":503}}`),
			turn("wGBUkcbRDKRSNZQJcdTrpmEqfQhCsYwn", firstCommand), turn("Vy5oPz2kWlq8nXt0aRbCdEfGhIjKlMnO", secondCommand),
			event(e, `"finish_reason":null,"delta":{"role":"assistant","content":null}`) + event(e, `"finish_reason":null,"delta":{"content":"done"}`) + end("stop")},
		wantRetries: 1, wantCalls: 2, wantReasoning: "hm hm "}
}

// fakeVLLM names thinking "reasoning", fills what it does not use with null and
// words its refusals as a flat object.
func fakeVLLM() fakeServer {
	const e = `"id":"chatcmpl-5f","object":"chat.completion.chunk","created":1764500000,"model":"m"`
	end := func(reason string) string {
		return event(e, `"delta":{"content":""},"logprobs":null,"finish_reason":"`+reason+`","stop_reason":null,"token_ids":null`) +
			"data: {" + e + `,"choices":[],"usage":{"prompt_tokens":200,"total_tokens":220,"completion_tokens":20}}` + "\n\ndata: [DONE]\n\n"
	}
	turn := func(id, arguments string) string {
		return event(e, `"delta":{"role":"assistant","content":"","reasoning":null},"logprobs":null,"finish_reason":null,"prompt_token_ids":null`) +
			event(e, `"delta":{"reasoning":"so "},"logprobs":null,"finish_reason":null,"token_ids":null`) +
			inPieces(e, `"id":"chatcmpl-tool-`+id+`","type":"function","function":{"name":"Bash"}`, arguments, 5) + end("tool_calls")
	}
	return fakeServer{name: "vLLM", code: 400, refusal: `{"object":"error","message":%s,"type":"BadRequestError","param":null,"code":400}`, back: "reasoning", base: "/v1",
		answers:   []any{turn("8f2ad1", firstCommand), turn("9b7cc3", secondCommand), event(e, `"delta":{"role":"assistant","content":"done"}`) + end("stop")},
		wantCalls: 2, wantReasoning: "so so "}
}

// fakeOllama gives whole calls that all have index 0, ends them with stop, and
// refuses content that is null.
func fakeOllama() fakeServer {
	const e = `"id":"chatcmpl-207","object":"chat.completion.chunk","created":1764500000,"model":"m:8b","system_fingerprint":"fp_ollama"`
	call := func(id, arguments string) string {
		return event(e, `"delta":{"role":"assistant","content":"","tool_calls":[{"id":"call_`+id+`","index":0,"type":"function","function":{"name":"Bash","arguments":`+quote(arguments)+`}}]},"finish_reason":null`)
	}
	end := event(e, `"delta":{"role":"assistant","content":""},"finish_reason":"stop"`) + "data: {" + e + `,"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":9,"total_tokens":39}}` + "\n\ndata: [DONE]\n\n"
	return fakeServer{name: "Ollama", code: 400, refusal: `{"error":{"message":%s,"type":"invalid_request_error","param":null,"code":null}}`, base: "/v1",
		refuse: func(r *http.Request, body map[string]any) string {
			for _, m := range messagesOf(body) {
				if m["content"] == nil {
					return "invalid message content type: <nil>"
				}
			}
			return ""
		},
		answers:   []any{call("a1b2c3d4", firstCommand) + call("e5f6a7b8", `{"command":"true"}`) + end, call("c9d0e1f2", secondCommand) + end, event(e, `"delta":{"role":"assistant","content":"done"},"finish_reason":null`) + end},
		wantCalls: 3}
}

// fakeDeepSeek keeps the line open with comments and refuses a history without
// the thinking of its turns with calls.
func fakeDeepSeek() fakeServer {
	const e = `"id":"4f0","object":"chat.completion.chunk","created":1764500000,"model":"m","system_fingerprint":"fp_x"`
	end := func(reason string) string {
		return "data: {" + e + `,"choices":[{"index":0,"delta":{"content":"","reasoning_content":null},"logprobs":null,"finish_reason":"` + reason +
			`"}],"usage":{"prompt_tokens":80,"completion_tokens":5,"total_tokens":85,"prompt_tokens_details":{"cached_tokens":64},"prompt_cache_hit_tokens":64,"prompt_cache_miss_tokens":16}}` + "\n\ndata: [DONE]\n\n"
	}
	turn := func(id, thought, arguments string) string {
		return ": keep-alive\n\n: keep-alive\n\n" + event(e, `"delta":{"role":"assistant","content":null,"reasoning_content":""},"logprobs":null,"finish_reason":null`) +
			event(e, `"delta":{"content":null,"reasoning_content":"`+thought+`"},"logprobs":null,"finish_reason":null`) +
			inPieces(e, `"id":"call_0_`+id+`","type":"function","function":{"name":"Bash","arguments":""}`, arguments, 8) + end("tool_calls")
	}
	return fakeServer{name: "DeepSeek", code: 400, refusal: `{"error":{"message":%s,"type":"invalid_request_error","param":null,"code":"invalid_request_error"}}`, back: "reasoning_content", base: "/v1",
		refuse: func(r *http.Request, body map[string]any) string {
			for i, m := range messagesOf(body) {
				if want := map[int]string{2: "first", 4: "second"}[i]; m["role"] == "assistant" && m["reasoning_content"] != want {
					return fmt.Sprintf("the reasoning_content of message %d must be passed back", i)
				}
			}
			return ""
		},
		answers:   []any{turn("a", "first", firstCommand), turn("b", "second", secondCommand), event(e, `"delta":{"role":"assistant","content":"done"},"finish_reason":null`) + end("stop")},
		wantCalls: 2, wantReasoning: "firstsecond"}
}

// fakeOpenRouter breaks off once with an error beside its choices, after some
// text, and wants the details of its thinking back as they came.
func fakeOpenRouter() fakeServer {
	const e = `"id":"gen-17","provider":"P","model":"v/m","object":"chat.completion.chunk","created":1764500000`
	const busy = ": OPENROUTER PROCESSING\n\n"
	details := func(n int) string {
		return fmt.Sprintf(`{"type":"reasoning.encrypted","data":"c2lnbmVk%d==","format":"f-v1","id":"rs_%d","index":0}`, n, n)
	}
	turn := func(n int, arguments string) string {
		return busy + event(e, `"delta":{"role":"assistant","content":"","reasoning":"hm","reasoning_details":[`+details(n)+`]},"finish_reason":null,"native_finish_reason":null,"logprobs":null`) + busy +
			inPieces(e, fmt.Sprintf(`"id":"toolu_%d","type":"function","function":{"name":"Bash","arguments":""}`, n), arguments, 11) +
			event(e, `"delta":{"role":"assistant","content":""},"finish_reason":"tool_calls","native_finish_reason":"tool_use"`) +
			"data: {" + e + `,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null,"native_finish_reason":null}],"usage":{"prompt_tokens":10,"completion_tokens":4,"cost":0.0001,"is_byok":false}}` + "\n\ndata: [DONE]\n\n"
	}
	broken := busy + event(e, `"delta":{"role":"assistant","content":"I will"},"finish_reason":null`) +
		"data: {" + e + `,"error":{"code":502,"message":"Provider disconnected unexpectedly"},"choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}]}` + "\n\n"
	return fakeServer{name: "OpenRouter", code: 400, refusal: `{"error":{"message":%s,"code":400},"user_id":"u"}`, back: "reasoning_details reasoning", base: "/api/v1",
		refuse: func(r *http.Request, body map[string]any) string {
			for i, m := range messagesOf(body) {
				if list, _ := m["reasoning_details"].([]any); m["role"] == "assistant" {
					var want any
					json.Unmarshal([]byte(details(i/2)), &want)
					if len(list) != 1 || !reflect.DeepEqual(list[0], want) {
						return fmt.Sprintf("the reasoning_details of message %d are not as they were", i)
					}
				} else if strings.Contains(fmt.Sprint(m), "I will") {
					return "text of a broken answer came back"
				}
			}
			return ""
		},
		answers:     []any{broken, turn(1, firstCommand), turn(2, secondCommand), busy + event(e, `"delta":{"role":"assistant","content":"done"},"finish_reason":"stop","native_finish_reason":"stop"`) + "data: [DONE]\n\n"},
		wantRetries: 1, wantCalls: 2, wantReasoning: "hmhm"}
}

// fakeGemini is the compatible endpoint: errors in an array, calls without ids
// that end with stop, and a signature on the first call of a turn that must
// come back.
func fakeGemini() fakeServer {
	const e = `"created":1764500000,"id":"x9","model":"models/m","object":"chat.completion.chunk"`
	call := func(signature, arguments string) string {
		if signature != "" {
			signature = `"extra_content":{"google":{"thought_signature":"` + signature + `"}},`
		}
		return event(e, `"delta":{"role":"assistant","tool_calls":[{`+signature+`"function":{"arguments":`+quote(arguments)+`,"name":"Bash"},"id":"","type":"function"}]}`)
	}
	end := "data: {" + e + `,"choices":[{"delta":{"role":"assistant"},"finish_reason":"stop","index":0}],"usage":{"completion_tokens":12,"prompt_tokens":60,"total_tokens":150}}` + "\n\ndata: [DONE]\n\n"
	return fakeServer{name: "Gemini", code: 400, refusal: `[{"error":{"code":400,"message":%s,"status":"INVALID_ARGUMENT"}}]`, base: "/v1beta/openai",
		refuse: func(r *http.Request, body map[string]any) string {
			for i, m := range messagesOf(body) {
				if calls := callsOf(m); len(calls) > 0 && !strings.Contains(fmt.Sprint(calls[0]["extra_content"]), fmt.Sprintf("thought_signature:c2ln%d", i)) {
					return "function call is missing a thought_signature"
				}
			}
			return ""
		},
		answers:   []any{call("c2ln2", firstCommand) + call("", `{"command":"true"}`) + end, call("c2ln5", secondCommand) + end, event(e, `"delta":{"content":"done","role":"assistant"}`) + end},
		wantCalls: 3}
}

// fakeMistral takes nothing that it does not know, neither parameters nor keys
// of messages, and no ids but of nine letters and digits.
func fakeMistral() fakeServer {
	const e = `"id":"c3","object":"chat.completion.chunk","created":1764500000,"model":"m"`
	turn := func(id, arguments string) string {
		return event(e, `"delta":{"role":"assistant","content":""},"finish_reason":null`) +
			event(e, `"delta":{"content":[{"type":"thinking","thinking":[{"type":"text","text":"hm"}]}]},"finish_reason":null`) +
			"data: {" + e + `,"choices":[{"index":0,"delta":{"content":"","tool_calls":[{"id":"` + id + `","function":{"name":"Bash","arguments":` + quote(arguments) + `},"index":0}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":50,"total_tokens":60,"completion_tokens":10}}` + "\n\ndata: [DONE]\n\n"
	}
	return fakeServer{name: "Mistral", code: 422, only: true, refusal: `{"object":"error","message":{"detail":[{"type":"extra_forbidden","loc":["body",%[1]s],"msg":%[1]s}]},"type":"invalid_request_error","param":null,"code":null}`, base: "/v1",
		refuse: func(r *http.Request, body map[string]any) string {
			if body["stream_options"] != nil {
				return "stream_options"
			}
			for _, m := range messagesOf(body) {
				for _, c := range callsOf(m) {
					if id := c["id"].(string); len(id) != 9 || strings.ContainsFunc(id, func(r rune) bool { return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) }) || len(c) != 3 {
						return "a call's id must be nine letters or digits, nothing else may stand beside it"
					}
				}
			}
			return ""
		},
		answers: []any{turn("aB3xK9mP2", firstCommand), turn("aB3xK9mP2", secondCommand), // the same id again: ours must fit as well
			event(e, `"delta":{"content":"do"},"finish_reason":null`) + event(e, `"delta":{"content":[{"type":"text","text":"ne"}]},"finish_reason":"stop"`) + "data: [DONE]\n\n"},
		wantRefused: 1, wantCalls: 2, wantReasoning: "hmhm"}
}

// fakeAzure wants its own header and a version in the query, filters in chunks
// of its own, and its newer models refuse max_tokens.
func fakeAzure() fakeServer {
	const e = `"id":"chatcmpl-A","object":"chat.completion.chunk","created":1764500000,"model":"m-2026","system_fingerprint":null`
	const filters = `"content_filter_results":{"hate":{"filtered":false,"severity":"safe"}}`
	first := `data: {"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0,` + filters + `}]}` + "\n\n"
	turn := func(id, arguments string) string {
		return first + event(e, filters+`,"delta":{"content":null,"refusal":null,"role":"assistant"},"finish_reason":null,"logprobs":null`) +
			inPieces(e, `"id":"call_`+id+`","type":"function","function":{"name":"Bash","arguments":""}`, arguments, 6) +
			event(e, filters+`,"delta":{},"finish_reason":"tool_calls","logprobs":null`) + "data: [DONE]\n\n"
	}
	const key = "azure-key-not-real"
	return fakeServer{name: "Azure", code: 400, keys: "max_completion_tokens", base: "/openai/deployments/d-1?api-version=2026-06-01",
		args: []string{"--set", "infer.api_key_header=api-key", "--set", "infer.max_tokens=512"}, env: []string{"BELAY_API_KEY=" + key},
		refusal: `{"error":{"message":%s,"type":"invalid_request_error","param":null,"code":"unsupported_parameter"}}`,
		refuse: func(r *http.Request, body map[string]any) string {
			switch {
			case r.Header.Get("api-key") != key || r.Header.Get("Authorization") != "":
				return "access denied due to invalid subscription key"
			case body["max_completion_tokens"] != 512.0:
				return "the limit must be 512"
			}
			return ""
		},
		answers: []any{turn("Zq1", firstCommand), turn("Zq2", secondCommand), first + event(e, filters+`,"delta":{"content":"done"},"finish_reason":null`) +
			"data: {" + e + `,"choices":[{"content_filter_offsets":{"check_offset":4,"start_offset":0,"end_offset":4},` + filters + `,"finish_reason":null,"index":0}]}` + "\n\n" + event(e, `"delta":{},"finish_reason":"stop"`) + "data: [DONE]\n\n"},
		wantRefused: 1, wantCalls: 2}
}

// fakeLMStudio answers a wrong path with 200, breaks off with a named event,
// and numbers its calls anew in each turn.
func fakeLMStudio() fakeServer {
	const e = `"id":"chatcmpl-zz","object":"chat.completion.chunk","created":1764500000,"model":"m","system_fingerprint":"m"`
	turn := func(arguments string) string {
		return event(e, `"delta":{"role":"assistant","content":"\n\n"},"logprobs":null,"finish_reason":null`) +
			inPieces(e, `"id":"365174485","type":"function","function":{"name":"Bash","arguments":""}`, arguments, 4) +
			event(e, `"delta":{},"logprobs":null,"finish_reason":"tool_calls"`) + "data: [DONE]\n\n"
	}
	return fakeServer{name: "LM Studio", code: 200, refusal: `{"error":%s}`, base: "/v1",
		answers: []any{turn(firstCommand), event(e, `"delta":{"role":"assistant","content":"par"}`) + "event: error\ndata: {\"error\":{\"message\":\"Model reloaded\"}}\n\n",
			turn(secondCommand), event(e, `"delta":{"role":"assistant","content":"done"},"logprobs":null,"finish_reason":"stop"`) + "data: [DONE]\n\n"},
		wantRetries: 1, wantCalls: 2}
}

// resend sets the waits before re-sends; the last setting of a key counts.
func resend(waits string) []string { return []string{"--set", "limits.retry_backoff_ms=" + waits} }

// cutOff sends body and aborts the connection, so that the client sees a reset.
func cutOff(body string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		conn, out, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		fmt.Fprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 100000\r\n\r\n%s", body)
		out.Flush()
		conn.(*net.TCPConn).CloseWrite() // the client reads all, then finds the body short
		conn.Close()
	}
}

// stalled sends body and then nothing more until the client goes away.
func stalled(body string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		streamTo(w, body)
		hang(w, r)
	}
}

// delayed is a status with a header that asks for a wait.
func delayed(code int, body string, header ...string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		for pair := range slices.Chunk(header, 2) {
			w.Header().Set(pair[0], pair[1])
		}
		status(code, body)(w, r)
	}
}

// scripted is a witness with answers like those of serve.
func scripted(t *testing.T, answers ...any) *witness {
	return witnessed(t, func(n int, w http.ResponseWriter, r *http.Request, _ map[string]any) {
		switch answer := answers[min(n, len(answers)-1)].(type) {
		case string:
			streamTo(w, answer)
		case func(http.ResponseWriter, *http.Request):
			answer(w, r)
		}
	})
}

// A call of a broken reply would leave a file; its text would show in what the
// server gets next.
func TestResendIsIdenticalAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	whole := delta(map[string]any{"content": "half of it"}, nil) + callOf(`{"command":"touch broken.txt"}`)
	p := scripted(t, status(503, `{"error":"busy"}`), whole, cutOff(whole), stalled(whole), whole+sse(`{"error":{"code":500,"message":"gone"}}`),
		delayed(429, `{"error":"slow"}`, "Retry-After-Ms", "7"), status(500, ""), bash("echo good > good.txt"), say("done"))
	r := execRun(t, p.provider, append(resend("[1, 2, 3, 4, 5, 6, 8]"), "--set", "limits.liveness_ms=3000")...).finish(0) // long: a busy machine is no stall
	bodies, _ := p.got()
	if len(bodies) != 9 {
		t.Fatalf("%d requests, want 9", len(bodies))
	}
	for n, body := range bodies[:8] {
		if body != bodies[0] {
			t.Errorf("request %d differs from the first:\n%s\n%s", n, body, bodies[0])
		}
	}
	if strings.Contains(bodies[8], "half of it") || strings.Contains(bodies[8], "broken") {
		t.Errorf("a broken reply went into the history: %s", bodies[8])
	}
	want := []struct {
		delay    float64
		category string
		discard  bool
	}{{1, "overloaded", false}, {2, "truncated", true}, {3, "truncated", true}, {4, "stall", true}, {5, "stream_error", true}, {7, "rate_limit", false}, {8, "server", false}}
	for i, e := range r.events("retry") {
		if e["attempt"] != float64(i+1) || e["delay_ms"] != want[i].delay || e["error_category"] != want[i].category || e["discard_content"] != want[i].discard || e["error"] == "" {
			t.Errorf("retry %d is %v, want %v", i, e, want[i])
		}
	}
	if n := len(r.events("retry")); n != len(want) {
		t.Errorf("%d retries, want %d", n, len(want))
	}
	_, broken := os.Stat(r.workspace + "/broken.txt")
	_, good := os.Stat(r.workspace + "/good.txt")
	if !errors.Is(broken, os.ErrNotExist) || good != nil || len(r.events("tool_use")) != 1 {
		t.Errorf("the call of a broken reply ran (%v), or that of the whole one did not (%v): %v", broken, good, r.events("tool_use"))
	}
}

// callOf is a chunk with a whole call of Bash.
func callOf(arguments string) string {
	return sse(callBit(`{"index":0,"id":"call_0","type":"function","function":{"name":"Bash","arguments":` + quote(arguments) + `}}`))
}

func TestServerThatFailsForeverIsTemporary(t *testing.T) {
	half := delta(map[string]any{"content": "half"}, nil)
	for _, c := range []struct {
		name, category string
		answer         any
	}{
		{"500", "server", status(500, `{"error":"broken"}`)}, {"529", "overloaded", status(529, "")}, {"429", "rate_limit", status(429, "")},
		{"cut", "truncated", half}, {"reset", "truncated", cutOff(half)}, {"no-answer-at-all", "network", func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }},
		{"stall-before-headers", "stall", hang}, {"stall-after-headers", "stall", stalled("")}, {"stall-in-text", "stall", stalled(half)},
		{"empty", "empty", say("")}, {"error-event", "stream_error", half + sse(`{"error":{"message":"it died"}}`)}, {"broken-json", "malformed", half + sse(`{"choices":`, "[DONE]")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, c.answer)
			args := resend("[1, 2]")
			if c.category == "stall" {
				args = append(args, "--set", "limits.liveness_ms=300")
			}
			r := execRun(t, p.provider, args...).finish(75)
			bodies, _ := p.got()
			if len(bodies) != 3 || bodies[0] != bodies[1] || bodies[1] != bodies[2] || len(r.events("retry")) != 2 {
				t.Errorf("%d requests, retries %v", len(bodies), r.events("retry"))
			}
			if e, m := r.one("error"), r.meta(); e["error_category"] != c.category || m["error_category"] != c.category || m["status"] != "failed" || m["exit_code"] != 75.0 {
				t.Errorf("error %v, metadata %v, want category %s", e, m, c.category)
			}
		})
	}
	t.Run("refused-connection", func(t *testing.T) {
		t.Parallel()
		gone := httptest.NewServer(nil)
		gone.Close()
		r := execRun(t, &provider{Server: gone}, resend("[1, 2]")...).finish(75)
		if e := r.one("error"); e["error_category"] != "network" || len(r.events("retry")) != 2 || !strings.Contains(e["error"].(string), gone.URL) {
			t.Errorf("error %v, retries %v", e, r.events("retry"))
		}
	})
}

func TestRefusalEndsAtOnce(t *testing.T) {
	for _, c := range []struct {
		name, category string
		answer         any
	}{
		{"400", "bad_request", status(400, `{"error":"a field is wrong"}`)}, {"401", "auth", status(401, "")}, {"402", "billing", status(402, "")},
		{"403", "auth", status(403, "")}, {"404", "not_found", status(404, "")}, {"422", "bad_request", status(422, `{"detail":"a field is wrong"}`)},
		{"quota", "billing", status(429, `{"error":{"message":"quota","type":"insufficient_quota","code":"insufficient_quota"}}`)},
		{"template", "bad_request", status(500, `{"error":{"message":"Jinja Exception: no system role"}}`)},
		{"web-page", "not_sse", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "<html><title>Login</title></html>") }},
		{"content-filter", "content_filter", ends("x", "content_filter")}, {"unknown-reason", "malformed", ends("x", "out_of_luck")},
		{"refused-inside-a-stream", "auth", delta(map[string]any{"content": "x"}, nil) + sse(`{"error":{"code":401,"message":"no"}}`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, c.answer)
			r := execRun(t, p.provider, resend("[1, 2]")...).finish(1)
			if bodies, _ := p.got(); len(bodies) != 1 || len(r.events("retry")) != 0 || r.one("error")["error_category"] != c.category {
				t.Errorf("%d requests, retries %v, error %v, want category %s", len(bodies), r.events("retry"), r.one("error"), c.category)
			}
		})
	}
}

func TestRetryAfterInItsForms(t *testing.T) {
	in := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(http.TimeFormat) }
	for _, c := range []struct {
		name      string
		header    []string
		low, high float64 // of delay_ms
	}{
		{"seconds", []string{"Retry-After", "1"}, 1000, 1000},
		{"fraction", []string{"Retry-After", "0.05"}, 50, 50},
		{"milliseconds", []string{"Retry-After-Ms", "20"}, 20, 20},
		{"milliseconds-win", []string{"Retry-After", "30", "Retry-After-Ms", "20"}, 20, 20},
		{"date", []string{"Retry-After", in(3 * time.Second)}, 1, 3000},
		{"past-date-asks-for-nothing-more", []string{"Retry-After", in(-time.Hour)}, 3, 3},
		{"nonsense", []string{"Retry-After", "soon"}, 3, 3},
		{"negative", []string{"Retry-After", "-5"}, 3, 3},
		{"none", nil, 3, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, delayed(429, `{"error":"slow down"}`, c.header...), say("done"))
			r := execRun(t, p.provider, resend("[3]")...).finish(0)
			if d := r.one("retry")["delay_ms"].(float64); d < c.low || d > c.high {
				t.Errorf("delay %v ms, want %v to %v", d, c.low, c.high)
			}
		})
	}
	for name, value := range map[string]string{"an-hour": "3600", "a-far-date": in(24 * time.Hour)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, delayed(503, `{"error":"maintenance"}`, "Retry-After", value))
			r := execRun(t, p.provider, resend("[1, 2]")...).finish(75)
			words := r.one("error")["error"].(string)
			if bodies, _ := p.got(); len(bodies) != 1 || !strings.Contains(words, "come back after 20") {
				t.Errorf("%d requests, %q", len(bodies), words)
			}
		})
	}
}

func TestServerThatNeverAnswersAndTimeout(t *testing.T) {
	for name, answer := range map[string]any{"no-headers": hang, "silent-stream": stalled(delta(map[string]any{"content": "half"}, nil)), "waiting-to-send-again": delayed(503, "", "Retry-After", "200")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, answer)
			r := execRun(t, p.provider, append(resend("[1]"), "--timeout", "500ms")...).finish(124)
			if m := r.meta(); m["status"] != "failed" || m["error_category"] != "timeout" || r.one("error")["error_category"] != "timeout" {
				t.Errorf("metadata %v", m)
			}
		})
	}
}

// A proxy must not be asked for the name that stands in for the socket.
func TestUnixSocketAsBaseURL(t *testing.T) {
	for _, form := range []string{"unix:%s", "unix://%s", "infer.socket"} {
		t.Run(strings.ReplaceAll(form, "/", "_"), func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "b") // short: a socket's path has 107 bytes
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			l, err := net.Listen("unix", dir+"/model.sock")
			if err != nil {
				t.Fatal(err)
			}
			s := &witness{provider: &provider{}}
			answers := []string{bash("echo one > one.txt"), say("done")}
			s.Server = httptest.NewUnstartedServer(s.handler(func(n int, w http.ResponseWriter, r *http.Request, _ map[string]any) { streamTo(w, answers[n]) }))
			s.Listener.Close()
			s.Listener = l
			s.Start()
			t.Cleanup(s.Close)
			env := []string{"BELAY_MODEL=m", "HTTP_PROXY=http://127.0.0.1:9", "http_proxy=http://127.0.0.1:9", "ALL_PROXY=http://127.0.0.1:9", "BELAY_API_KEY=k-not-real"}
			args := []string{"exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json"}
			if form == "infer.socket" {
				args = append(args, "--set", "infer.socket="+dir+"/model.sock")
			} else {
				env = append(env, "BELAY_BASE_URL="+fmt.Sprintf(form, dir+"/model.sock"))
			}
			r := prepare(t, env, append(args, "do it")...).finish(0)
			_, heads := s.got()
			if content, _ := r.texts(); content != "done" || len(heads) != 2 || heads[0].URL.Path != "/v1/chat/completions" || heads[0].Header.Get("Authorization") != "Bearer k-not-real" {
				t.Errorf("text %q, %d requests, %v", content, len(heads), heads)
			}
		})
	}
}

// A refused parameter is dropped or renamed once, in silence, and stays so for
// the run. Each server here refuses it for ever, in the words of a real one.
func TestRefusedParameterIsDroppedOnceAndRemembered(t *testing.T) {
	has := func(key string) func(map[string]any) bool {
		return func(body map[string]any) bool { return body[key] != nil }
	}
	emptyContent := func(body map[string]any) bool {
		return slices.ContainsFunc(messagesOf(body), func(m map[string]any) bool { return m["content"] == "" })
	}
	temperature, limit := []string{"--set", "infer.temperature=0.5"}, []string{"--set", "infer.max_tokens=512"}
	for _, c := range []struct {
		name    string
		args    []string
		code    int
		body    string
		refuses func(map[string]any) bool
		then    func(map[string]any) bool // of every later request
	}{
		{"stream_options", nil, 400, `{"error":{"object":"error","type":"invalid_request_error","message":"extra field 'stream_options' is not allowed"}}`, has("stream_options"), nil},
		{"stream_options-422", nil, 422, `{"detail":[{"type":"extra_forbidden","loc":["body","stream_options"],"msg":"Extra inputs are not permitted"}]}`, has("stream_options"), nil},
		{"temperature", temperature, 400, `{"error":{"message":"'temperature' has to stay at its default of 1 for this model.","param":"temperature","code":"unsupported_value"}}`, has("temperature"), has("stream_options")},
		{"max_tokens", limit, 400, `{"error":{"message":"Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.","param":"max_tokens","code":"unsupported_parameter"}}`, has("max_tokens"),
			func(body map[string]any) bool { return body["max_completion_tokens"] == 512.0 }},
		{"empty-content", nil, 400, `{"error":{"message":"messages.2: content must not be empty"}}`, emptyContent, func(body map[string]any) bool {
			_, there := messagesOf(body)[2]["content"]
			return there && messagesOf(body)[2]["content"] == nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var refused, answered atomic.Int32
			answers := []string{bash("true"), bash("true"), say("done")}
			p := witnessed(t, func(n int, w http.ResponseWriter, r *http.Request, body map[string]any) {
				if c.refuses(body) {
					refused.Add(1)
					status(c.code, c.body)(w, r)
					return
				}
				if refused.Load() > 0 && c.then != nil && !c.then(body) {
					t.Errorf("request %d after the repair: %v", n, body)
				}
				streamTo(w, answers[answered.Add(1)-1])
			})
			r := execRun(t, p.provider, c.args...).finish(0)
			if refused.Load() != 1 || len(r.events("retry"))+len(r.events("notice")) != 0 || len(r.events("tool_result")) != 2 {
				t.Errorf("refused %d times, events %s", refused.Load(), r.out.String())
			}
		})
	}
}

func TestRepairsAreBounded(t *testing.T) {
	for _, c := range []struct {
		name  string
		args  []string
		words string // of the refusal
		asked int
	}{
		{"still-refused", nil, "extra field 'stream_options' is not allowed", 2},
		{"two-named-at-once", []string{"--set", "infer.temperature=1"}, "'stream_options' and 'temperature' are not allowed", 3},
		{"never-sent", nil, "'parallel_tool_calls' is not allowed", 1},
		{"the-user-asked-for-it", []string{"--set", "infer.top_p=0.5"}, "'top_p' is not allowed", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, status(400, `{"error":{"message":`+quote(c.words)+`}}`))
			r := execRun(t, p.provider, append(resend("[1, 2]"), c.args...)...).finish(1)
			if bodies, _ := p.got(); len(bodies) != c.asked || len(r.events("retry")) != 0 || !strings.Contains(r.one("error")["error"].(string), c.words) {
				t.Errorf("%d requests, want %d; error %v", len(bodies), c.asked, r.one("error"))
			}
		})
	}
}

// The key in the tests of keys. Nothing that belay writes may hold it.
const testKey = "sk-test-0123456789-not-real"

// keyIsNowhere looks for the key in all that a run wrote: both streams, its
// home, its workspace.
func (r *belayRun) keyIsNowhere() {
	r.t.Helper()
	texts := map[string]string{"stdout": r.out.String(), "stderr": r.err.String()}
	for _, dir := range []string{r.home, r.workspace} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				var b []byte
				b, err = os.ReadFile(path)
				texts[path] = string(b)
			}
			return err
		})
		if err != nil {
			r.t.Error(err)
		}
	}
	for name, text := range texts {
		if strings.Contains(text, testKey) {
			r.t.Errorf("%s holds the key: %.2000s", name, text)
		}
	}
}

func TestKeyGoesOnlyWhereItBelongs(t *testing.T) {
	const here = "@" // stands for the server's own URL
	for _, c := range []struct {
		name string
		env  []string
		args []string
		sent string
		note string // about a key that was withheld
	}{
		{"vendor-elsewhere", []string{"DEEPSEEK_API_KEY=" + testKey}, nil, "", "DEEPSEEK_API_KEY not sent to 127.0.0.1"},
		{"vendor-elsewhere-2", []string{"OPENAI_API_KEY=" + testKey}, nil, "", "OPENAI_API_KEY not sent to 127.0.0.1"},
		{"vendor-with-another-vendors-url", []string{"OPENAI_API_KEY=" + testKey, "DEEPSEEK_BASE_URL=" + here}, nil, "", "OPENAI_API_KEY not sent to 127.0.0.1"},
		{"vendor-with-its-own-url", []string{"OPENAI_API_KEY=" + testKey, "OPENAI_BASE_URL=" + here + "/v1/"}, nil, "Bearer " + testKey, ""},
		{"vendor-with-its-other-path", []string{"OPENAI_API_KEY=" + testKey, "OPENAI_BASE_URL=" + here + "/v2"}, nil, "", "OPENAI_API_KEY not sent to 127.0.0.1"},
		{"ours", []string{"BELAY_API_KEY= " + testKey + "\n"}, nil, "Bearer " + testKey, ""},
		{"codewhale", []string{"CODEWHALE_API_KEY=" + testKey}, nil, "Bearer " + testKey, ""},
		{"named-variable", []string{"OPENAI_API_KEY=" + testKey}, []string{"--set", "infer.api_key_env=OPENAI_API_KEY"}, "Bearer " + testKey, ""},
		{"none", nil, nil, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, status(401, `{"error":{"message":"Incorrect API key provided: `+testKey+`"}}`))
			r := execRun(t, p.provider, append(c.args, "--verbose")...)
			for _, v := range c.env {
				r.cmd.Env = append(r.cmd.Env, strings.ReplaceAll(v, here, p.URL))
			}
			r.finish(1)
			_, heads := p.got()
			if got := heads[0].Header.Get("Authorization"); len(heads) != 1 || got != c.sent {
				t.Errorf("%d requests, Authorization %q, want %q", len(heads), got, c.sent)
			}
			notices, words := r.events("notice"), r.one("error")["error"].(string)
			if (c.note != "") != (len(notices) == 1) || c.note != "" && !strings.HasPrefix(notices[0]["message"].(string), c.note) || !strings.Contains(words, c.note) || !strings.Contains(words, "401") {
				t.Errorf("notices %v, error %q, want %q", notices, words, c.note)
			}
			if c.sent != "" { // else the server of this test repeats a key that belay withheld and does not look for
				r.keyIsNowhere()
			}
		})
	}
}

// Every redirect ends the run: the other host never hears of the key, nor of
// the prompt.
func TestRedirectCarriesNothingToAnotherHost(t *testing.T) {
	for _, code := range []int{301, 302, 303, 307, 308} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			other := scripted(t, say("caught"))
			p := scripted(t, delayed(code, "", "Location", other.URL+"/v1/chat/completions?token=secret-in-url"))
			r := execRun(t, p.provider, resend("[1, 2]")...)
			r.cmd.Env = append(r.cmd.Env, "BELAY_API_KEY="+testKey)
			r.finish(1)
			at, _ := p.got()
			caught, _ := other.got()
			if words := r.one("error")["error"].(string); len(at) != 1 || len(caught) != 0 || !strings.Contains(words, other.URL) || strings.Contains(words, "secret-in-url") {
				t.Errorf("%d requests, %d at the other host, %q", len(at), len(caught), words)
			}
			r.keyIsNowhere()
		})
	}
}

// What a proxy answers to CONNECT counts as what a server answers, and says whose
// words they are. Its password is in nothing that belay writes.
func TestAProxyThatDoesNotConnect(t *testing.T) {
	const password = "pr0xy-pass"
	for line, want := range map[string]int{"403 Forbidden": 1, "407 Proxy Authentication Required": 1, "404 Not Found": 1, "302 Found": 1, "429 Slow": 75, "502 Bad Gateway": 75, "504 Gateway Timeout": 75} {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			at, _, _ := strings.Cut(strings.TrimPrefix(serveRaw(t, func(conn net.Conn) {
				if req, _, err := readRequest(conn); err == nil && req.Method == "CONNECT" && req.Header.Get("Proxy-Authorization") != "" {
					asked.Add(1)
				}
				fmt.Fprintf(conn, "HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n", line)
			}), "http://"), "/")
			r := prepare(t, []string{"HTTPS_PROXY=http://user:" + password + "@" + at}, append([]string{"--base-url", "https://api.test", "--model", "m", "exec", "--output-format", "stream-json"}, append(resend("[1, 2]"), "do it")...)...)
			r.finish(want)
			words, times := r.one("error")["error"].(string), map[int]int{1: 1, 75: 3}[want]
			if !strings.HasSuffix(words, ": the proxy "+at+" answers "+line) || int(asked.Load()) != times || len(r.events("retry")) != times-1 || strings.Contains(r.out.String()+r.err.String(), password) {
				t.Errorf("asked %d times, %q, retries %v\n%s", asked.Load(), words, r.events("retry"), r.err.String())
			}
		})
	}
}

// A server that repeats the key wherever it can, a tool that looks for it, and
// a recording of it all.
func TestKeyIsInNothingThatBelayWrites(t *testing.T) {
	t.Parallel()
	echo := func(text string) string {
		return `{"error":{"message":` + quote("no luck with "+testKey+" "+text) + `}}`
	}
	inTwo := func(w http.ResponseWriter, r *http.Request) { // between two reads
		io.WriteString(w, "event: error\ndata: "+testKey[:9])
		w.(http.Flusher).Flush()
		io.WriteString(w, testKey[9:]+"\n\n")
	}
	p := scripted(t, status(429, echo("yet")), delta(map[string]any{"content": "x"}, nil)+sse(echo("now")),
		"event: error\ndata: "+testKey+"\n\n", inTwo, delayed(503, "<html><title>"+testKey+"</title></html>", "Content-Type", "text/html", "Set-Cookie", "k="+testKey),
		bash(`env; cat /proc/$PPID/environ /proc/$PPID/cmdline; tr '\0' ' ' < /proc/self/environ; true`), status(401, echo("ever")))
	r := execRun(t, p.provider, append(resend("[1, 2, 3, 4, 5, 6]"), "--verbose", "--record", "tape.jsonl")...)
	r.cmd.Env = append(r.cmd.Env, "BELAY_API_KEY="+testKey)
	r.finish(1)
	if _, heads := p.got(); len(heads) != 7 || heads[6].Header.Get("Authorization") != "Bearer "+testKey || len(r.events("retry")) != 5 {
		t.Errorf("%d requests, retries %v", len(heads), r.events("retry"))
	}
	r.keyIsNowhere()
}

// Bytes behind the end of an answer are nobody's: net/http would print them.
func TestUnaskedBytesAreNotShown(t *testing.T) {
	t.Parallel()
	p := scripted(t, func(w http.ResponseWriter, _ *http.Request) {
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			io.WriteString(conn, "HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy, "+testKey)
			conn.(*net.TCPConn).CloseWrite()
			waitGone(conn)
			conn.Close()
		}
	}, say("done"))
	r := execRun(t, p.provider, resend("[300]")...)
	r.cmd.Env = append(r.cmd.Env, "BELAY_API_KEY="+testKey)
	r.finish(0)
	r.keyIsNowhere()
	if strings.Contains(r.err.String(), "nsolicited") {
		t.Errorf("stderr: %s", r.err.String())
	}
}

// alike takes out of events what may differ between a run and its replay:
// times, pids and ids.
func alike(events string) string {
	events = regexp.MustCompile(`"(session_id|id|started_at|completed_at)":"[^"]*"`).ReplaceAllString(events, `"$1":"*"`)
	return regexp.MustCompile(`"(duration_ms|pid|process_group_id)":[0-9]+`).ReplaceAllString(events, `"$1":0`)
}

// replay prepares a run from a recording, in the workspace of another, with
// neither URL nor key.
func replay(t *testing.T, of *belayRun, tape string, args ...string) *belayRun {
	t.Helper()
	all := append([]string{"exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json", "--model", "test-model", "--replay", tape}, resend("[1, 2]")...)
	r := prepare(t, nil, append(append(all, args...), "do it")...)
	r.cmd.Dir = of.workspace
	return r
}

// recordedRun makes a run whose recording has everything that a recording can
// hold: errors, a broken reply, bytes that are no text, calls, thinking.
func recordedRun(t *testing.T, answers ...any) (r *belayRun, tape string) {
	t.Helper()
	p := scripted(t, answers...)
	r = execRun(t, p.provider, resend("[1, 2]")...)
	tape = r.home + "/tape.jsonl"
	r.cmd.Args = slices.Insert(r.cmd.Args, 2, "--record", tape)
	r.cmd.Env = append(r.cmd.Env, "BELAY_API_KEY="+testKey)
	r.finish(0)
	return r, tape
}

// hangUp closes the connection without a response.
func hangUp(w http.ResponseWriter, _ *http.Request) {
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		conn.Close()
	}
}

func torn(w http.ResponseWriter, r *http.Request) {
	for _, piece := range []string{"data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"hm \xf0\x9f", "\xa6\x80\"}}]}\n\n", callOf(`{"command":"echo one; exit 3"}`), sse(endBit("tool_calls"), "[DONE]")} {
		io.WriteString(w, piece)
		w.(http.Flusher).Flush()
	}
}

func TestReplayGivesTheSameEvents(t *testing.T) {
	t.Parallel()
	for name, answers := range map[string][]any{
		"tools":  {torn, calls("Bash", map[string]any{"command": "echo two"}, map[string]any{"action": "none"}), say("done")},
		"errors": {delayed(429, `{"error":"slow"}`, "Retry-After-Ms", "5"), delta(map[string]any{"content": "half"}, nil), torn, status(503, ""), say("done")},
		"gone":   {hangUp, torn, say("done")},
		"cut":    {cutOff(delta(map[string]any{"content": "half"}, nil)), torn, say("done")},
		"whole":  {status(200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"done"},"finish_reason":"stop"}]}`)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first, tape := recordedRun(t, answers...)
			a := alike(first.out.String())
			again := replay(t, first, tape)
			again.cmd.Env = append(again.cmd.Env, slices.DeleteFunc(slices.Clone(first.cmd.Env), func(v string) bool { return !strings.HasPrefix(v, "BELAY_BASE_URL=") })...) // nobody is asked there
			if b := alike(again.finish(0).out.String()); a != b {
				t.Errorf("the replay differs.\nfirst:\n%s\nagain:\n%s", a, b)
			}
			a = regexp.MustCompile(`POST http://[^ ]*:`).ReplaceAllString(a, "POST (recording):") // errors name the place
			if b := alike(replay(t, first, tape).finish(0).out.String()); a != b {
				t.Errorf("the replay without a URL differs.\nfirst:\n%s\nagain:\n%s", a, b)
			}
		})
	}
}

// A recording is refused before the run starts where it is damaged, and during
// the run where it ends too early; neither is worth running again.
func TestDamagedRecordingFailsClearly(t *testing.T) {
	t.Parallel()
	first, tape := recordedRun(t, torn, say("done"))
	whole, err := os.ReadFile(tape)
	if err != nil || strings.Count(string(whole), "\n") != 2 {
		t.Fatalf("the recording: %v\n%s", err, whole)
	}
	line, _, _ := strings.Cut(string(whole), "\n")
	for _, c := range []struct {
		name, data string
		code       int
		words      string
	}{
		{"torn-in-the-last-line", string(whole[:len(whole)-20]), 2, "line 2"},
		{"without-the-last-line-end", string(whole[:len(whole)-1]), 2, "line 2"},
		{"without-the-last-line", line + "\n", 1, "no further response"},
		{"empty", "", 1, "no further response"},
		{"a-quote-less", strings.Replace(string(whole), `"status"`, `status"`, 1), 2, "line 1"},
		{"an-unknown-key", strings.Replace(string(whole), `{"status"`, `{"more":1,"status"`, 1), 2, "line 1"},
		{"a-key-renamed", strings.Replace(string(whole), `"end"`, `"ending"`, 1), 2, "line 1"},
		{"no-status", strings.Replace(string(whole), `"status":200`, `"status":0`, 1), 2, "line 1"},
		{"two-on-a-line", line + " " + string(whole), 2, "line 1"},
		{"no-recording", "this is a text\n", 2, "line 1"},
		{"blank-line", string(whole) + "\n", 2, "line 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			damaged := t.TempDir() + "/tape.jsonl"
			if err := os.WriteFile(damaged, []byte(c.data), 0o600); err != nil {
				t.Fatal(err)
			}
			r := replay(t, first, damaged).finish(c.code)
			said := r.err.String()
			if c.code == 2 && r.out.Len() > 0 {
				t.Errorf("a refused recording printed %s", r.out.String())
			}
			if c.code == 1 {
				said = r.one("error")["error"].(string)
				if len(r.events("retry")) > 0 {
					t.Errorf("re-sent: %v", r.events("retry"))
				}
			}
			if !strings.Contains(said, c.words) {
				t.Errorf("said %q, want %q", said, c.words)
			}
		})
	}
	t.Run("missing", func(t *testing.T) {
		t.Parallel()
		if r := replay(t, first, "/nowhere/tape.jsonl").finish(2); !strings.Contains(r.err.String(), "/nowhere/tape.jsonl") {
			t.Errorf("said %q", r.err.String())
		}
	})
	t.Run("both", func(t *testing.T) {
		t.Parallel()
		if r := replay(t, first, tape, "--record", tape).finish(2); !strings.Contains(r.err.String(), "replay") {
			t.Errorf("said %q", r.err.String())
		}
	})
}

func TestRecordingIsPrivateAndAppends(t *testing.T) {
	t.Parallel()
	r, tape := recordedRun(t, say("one"))
	info, err := os.Stat(tape)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("the recording: %v, %v", info, err)
	}
	p := scripted(t, say("two"))
	more := execRun(t, p.provider)
	more.cmd.Args = slices.Insert(more.cmd.Args, 2, "--record", tape)
	more.finish(0)
	b, err := os.ReadFile(tape)
	if err != nil || strings.Count(string(b), "\n") != 2 || strings.Contains(string(b), "do it") || strings.Contains(string(b), "You are belay") {
		t.Errorf("the recording holds a prompt or no two answers (%v): %s", err, b)
	}
	r.keyIsNowhere()
}

// noteMark is what stands in place of a result that was left out.
const noteMark = "was left out to make room"

// A server that counts: it takes no request above a size. Each turn adds 6,000
// bytes, so the oldest results must make room again and again, each once, and
// those of the newest two turns stay.
func TestContextThatFillsUpMakesRoom(t *testing.T) {
	for name, refusal := range map[string]string{
		"llama-server": `{"error":{"code":400,"message":"request (9012 tokens) exceeds the available context size (8192 tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":9012,"n_ctx":8192}}`,
		"vLLM":         `{"object":"error","message":"This model's maximum context length is 8192 tokens. However, your request has 9012 input tokens.","type":"BadRequestError","param":null,"code":400}`,
		"OpenAI":       `{"error":{"message":"Your input is over the limit of this model.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const turns, room = 7, 20_000
			var refused, answered, base atomic.Int32
			p := witnessed(t, func(n int, w http.ResponseWriter, r *http.Request, body map[string]any) {
				size := int32(len(jsonOf(body)))
				base.CompareAndSwap(0, size)
				if size > base.Load()+room {
					refused.Add(1)
					status(400, refusal)(w, r)
				} else if n := answered.Add(1); n > turns {
					streamTo(w, say("done"))
				} else {
					streamTo(w, sse(callBit(fmt.Sprintf(`{"index":0,"id":"call_%d","function":{"name":"Bash","arguments":"{\"command\":\"head -c 6000 /dev/zero | tr '\\\\0' x\"}"}}`, n)), endBit("tool_calls"), "[DONE]"))
				}
			})
			r := execRun(t, p.provider).finish(0)
			notices, bodies := r.events("notice"), []string(nil)
			if bodies, _ = p.got(); len(notices) != int(refused.Load()) || len(notices) != 4 || len(r.events("retry")) != 0 {
				t.Fatalf("%d refused, %d requests, notices %v, retries %v", refused.Load(), len(bodies), notices, r.events("retry"))
			}
			for i, notice := range notices {
				if words := notice["message"].(string); !strings.HasSuffix(words, fmt.Sprintf(": call_%d", i+1)) {
					t.Errorf("notice %d says %q", i, words)
				}
			}
			var last map[string]any
			json.Unmarshal([]byte(bodies[len(bodies)-1]), &last)
			for i, m := range messagesOf(last) {
				if content, _ := m["content"].(string); m["role"] == "tool" && strings.Contains(content, noteMark) != (i/2 <= len(notices)) {
					t.Errorf("message %d, after %d notices: %.60q", i, len(notices), content)
				}
			}
			if fault := ill(last, "stream_options", "", false); fault != "" {
				t.Error(fault)
			}
		})
	}
}

func TestContextThatNeverFitsFails(t *testing.T) {
	t.Parallel()
	var answered, refused atomic.Int32
	p := witnessed(t, func(n int, w http.ResponseWriter, r *http.Request, body map[string]any) {
		if answered.Add(1) <= 5 {
			streamTo(w, bash("echo one"))
			return
		}
		refused.Add(1)
		status(400, `{"error":{"message":"too many","code":"context_length_exceeded"}}`)(w, r)
	})
	r := execRun(t, p.provider, resend("[1, 2]")...).finish(1)
	if e := r.one("error"); refused.Load() != 3 || e["error_category"] != "context_length" || len(r.events("notice")) != 2 || len(r.events("retry")) != 0 {
		t.Errorf("%d refused, error %v, notices %v", refused.Load(), e, r.events("notice"))
	}
}

// LM Studio says it in the middle of an answer, whose text is then void.
func TestContextThatFillsUpInAnAnswerVoidsItsText(t *testing.T) {
	t.Parallel()
	full := delta(map[string]any{"content": "half of it"}, nil) + sse(`{"error":{"message":"Reached context length of 4096 tokens"}}`)
	p := scripted(t, bash("echo one"), bash("echo two"), bash("echo three"), full, say("whole"))
	r := execRun(t, p.provider).finish(0)
	kept := ""
	for _, e := range r.events("") {
		if e["type"] == "content" {
			kept += e["content"].(string)
		} else if e["type"] == "retry" && e["discard_content"] == true && e["error_category"] == "context_length" {
			kept = ""
		}
	}
	if kept != "whole" || len(r.events("notice")) != 1 || len(r.events("retry")) != 1 {
		t.Errorf("a reader of the events has %q; notices %v, retries %v", kept, r.events("notice"), r.events("retry"))
	}
}

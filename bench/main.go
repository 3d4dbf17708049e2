//go:build linux

// Command bench compares belay's stream client with two widely used libraries
// over the same synthetic stream: framing alone, framing with JSON, and a whole
// answer received by a process. It is a module of its own, so that what it
// compares with is no dependency of belay; sse.go is a link to belay's own.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	peer "github.com/sashabaranov/go-openai"
)

// main.go makes the stream, runs each reader of it and prints one table. It
// asserts no time; a reader that gives another text than was sent is an error.

const (
	oneRead   = 16 << 10             // bytes that the memory source gives at once, about what TLS does
	rowLimit  = 2 * time.Minute      // of one reader, all its rounds: slow ones are stopped, not waited for
	silence   = time.Minute          // of belay's client; nothing here is silent
	lookEvery = 5 * time.Millisecond // for the peak memory of a process
	perEvent  = " word%06d"          // text of one event, of constant length
)

// reader takes a whole stream from memory and gives the number of bytes of text
// in it, or of data where it only frames.
type reader struct {
	name string
	text bool
	read func(ctx context.Context, body io.Reader) (int, error)
}

func main() {
	size := flag.Int("mb", 50, "size of the stream in MB (10^6 bytes)")
	rounds := flag.Int("rounds", 3, "rounds of each reader; the best one counts")
	belay := flag.String("belay", "", "binary of belay (default: built from ..)")
	asPeer := flag.String("peer", "", "receive a stream with this library and print its text: openai-go, go-openai")
	flag.Parse()
	var err error
	if *asPeer != "" {
		err = receiveAs(*asPeer, flag.Arg(0))
	} else {
		err = compare(*size*1_000_000, *rounds, *belay)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// synthetic makes an answer of about size bytes with events of about 300.
func synthetic(size int) (body []byte, events int, text string) {
	var b, t bytes.Buffer
	for b.Len() < size {
		word := fmt.Sprintf(perEvent, events%1_000_000)
		fmt.Fprintf(&b, `data: {"id":"chatcmpl-9f8e7d6c5b4a39281706f5e4d3c2b1a0","object":"chat.completion.chunk","created":1764500000,"model":"a-model-of-common-size","service_tier":"default","system_fingerprint":"fp_0123456789","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}],"obfuscation":"aQ9"}`+"\n\n", word)
		t.WriteString(word)
		events++
	}
	b.WriteString(`data: {"id":"c","object":"chat.completion.chunk","created":1764500000,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n")
	return b.Bytes(), events + 2, t.String()
}

// compare prints the table.
func compare(size, rounds int, belay string) error {
	body, events, text := synthetic(size)
	fmt.Printf("%.1f MB, %d events, best of %d, %s, %d processors\n\n", float64(len(body))/1e6, events, rounds, runtime.Version(), runtime.NumCPU())
	fmt.Println("| in one process, from memory | MB/s wall | MB/s CPU | allocations an event | bytes an event |\n|---|---|---|---|---|")
	for _, r := range readers() {
		if err := r.measure(body, events, text, rounds); err != nil {
			return err
		}
	}
	fmt.Println("\n| a process, over loopback | MB/s wall | MB/s CPU | peak memory, MB |\n|---|---|---|---|")
	return processes(body, text, rounds, belay)
}

// memory is a source that gives oneRead at a time, as a network would.
type memory struct{ rest []byte }

func (m *memory) Read(p []byte) (int, error) {
	n := copy(p[:min(len(p), oneRead)], m.rest)
	if m.rest = m.rest[n:]; n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// measure prints the row of the best rounds.
func (r *reader) measure(body []byte, events int, text string, rounds int) error {
	ctx, cancel := context.WithTimeout(context.Background(), rowLimit)
	defer cancel()
	var wall, cpu time.Duration
	var before, after runtime.MemStats
	for range rounds {
		runtime.GC()
		runtime.ReadMemStats(&before)
		began, burnt := time.Now(), cpuOf(syscall.RUSAGE_SELF)
		n, err := r.read(ctx, &memory{body})
		took, burnt := time.Since(began), cpuOf(syscall.RUSAGE_SELF)-burnt
		runtime.ReadMemStats(&after)
		if ctx.Err() != nil {
			fmt.Printf("| %s | stopped after %s | | | |\n", r.name, rowLimit)
			return nil
		}
		if err != nil || r.text && n != len(text) {
			return fmt.Errorf("%s gave %d bytes of text, want %d: %w", r.name, n, len(text), err)
		}
		wall, cpu = shorter(wall, took), shorter(cpu, burnt)
	}
	fmt.Printf("| %s | %s | %s | %.1f | %.0f |\n", r.name, rate(len(body), wall), rate(len(body), cpu),
		float64(after.Mallocs-before.Mallocs)/float64(events), float64(after.TotalAlloc-before.TotalAlloc)/float64(events))
	return nil
}

// shorter is the better of two rounds; 0 is none yet. Wall and processor time
// have each their own best round, since other work may run beside.
func shorter(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

func rate(n int, d time.Duration) string { return fmt.Sprintf("%.1f", float64(n)/1e6/d.Seconds()) }

// cpuOf is the processor time used so far.
func cpuOf(who int) time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(who, &u) // cannot fail with these arguments
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// doer answers every request with a body from memory.
type doer struct{ body io.Reader }

func (d doer) Do(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(d.body)}, nil
}

func readers() []reader {
	return []reader{
		{"floor: bytes.IndexByte to every line end", false, lineEnds},
		{"framing: belay", false, func(_ context.Context, body io.Reader) (n int, err error) {
			for data, err := range (&eventReader{src: body}).events {
				if n += len(data); err != nil && err != io.EOF {
					return n, err
				}
			}
			return n, nil
		}},
		{"framing: openai-go", false, func(_ context.Context, body io.Reader) (n int, err error) {
			resp, _ := doer{body}.Do(nil)
			d := ssestream.NewDecoder(resp)
			for d.Next() {
				n += len(d.Event().Data)
			}
			return n, d.Err()
		}},
		{"framing: go-openai", false, func(ctx context.Context, body io.Reader) (n int, err error) {
			return withGoOpenAI(ctx, "http://memory/v1", doer{body}, true, io.Discard)
		}},
		{"with JSON: belay", true, withBelay},
		{"with JSON: openai-go", true, func(ctx context.Context, body io.Reader) (int, error) {
			return withOpenAI(ctx, "http://memory/v1/", doer{body}, io.Discard)
		}},
		{"with JSON: go-openai", true, func(ctx context.Context, body io.Reader) (int, error) {
			return withGoOpenAI(ctx, "http://memory/v1", doer{body}, false, io.Discard)
		}},
	}
}

// lineEnds is what the memory and the search for line ends cost by themselves.
func lineEnds(_ context.Context, body io.Reader) (n int, err error) {
	buf := make([]byte, oneRead)
	for {
		got, err := body.Read(buf)
		for p := buf[:got]; ; n++ {
			i := bytes.IndexByte(p, '\n')
			if i < 0 {
				break
			}
			p = p[i+1:]
		}
		if err == io.EOF {
			return n, nil
		}
	}
}

// withBelay is one whole model call of belay.
func withBelay(ctx context.Context, body io.Reader) (n int, err error) {
	c := newClient(clientOptions{url: "http://memory/v1/chat/completions", model: "m", liveness: silence,
		transport: roundTripper(func(r *http.Request) (*http.Response, error) { return doer{body}.Do(r) })})
	count := func(kind string, pairs ...any) {
		if kind == "content" {
			n += len(pairs[1].(string))
		}
	}
	_, err = c.complete(ctx, &request{messages: []json.RawMessage{userMessage("hi")}, learned: &learned{}}, count)
	return n, err
}

// withOpenAI makes one call with openai-go and writes its text.
func withOpenAI(ctx context.Context, url string, d option.HTTPClient, out io.Writer) (n int, err error) {
	c := openai.NewClient(option.WithBaseURL(url), option.WithAPIKey("none"), option.WithHTTPClient(d), option.WithMaxRetries(0))
	s := c.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")}})
	defer s.Close()
	for s.Next() {
		for _, choice := range s.Current().Choices {
			n += len(choice.Delta.Content)
			io.WriteString(out, choice.Delta.Content)
		}
	}
	return n, s.Err()
}

// withGoOpenAI makes one call with go-openai; raw: without looking at the JSON.
func withGoOpenAI(ctx context.Context, url string, d peer.HTTPDoer, raw bool, out io.Writer) (n int, err error) {
	cfg := peer.DefaultConfig("none")
	cfg.BaseURL, cfg.HTTPClient = url, d
	s, err := peer.NewClientWithConfig(cfg).CreateChatCompletionStream(ctx, peer.ChatCompletionRequest{Model: "m", Messages: []peer.ChatCompletionMessage{{Role: "user", Content: "hi"}}})
	if err != nil {
		return 0, err
	}
	defer s.Close()
	for {
		var data []byte
		var chunk peer.ChatCompletionStreamResponse
		if raw {
			data, err = s.RecvRaw()
			n += len(data)
		} else if chunk, err = s.Recv(); len(chunk.Choices) > 0 {
			n += len(chunk.Choices[0].Delta.Content)
			io.WriteString(out, chunk.Choices[0].Delta.Content)
		}
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// receiveAs is the process of a library: it prints the text of an answer.
func receiveAs(library, url string) (err error) {
	switch library {
	case "openai-go":
		_, err = withOpenAI(context.Background(), url+"/v1/", http.DefaultClient, os.Stdout)
	case "go-openai":
		_, err = withGoOpenAI(context.Background(), url+"/v1", http.DefaultClient, false, os.Stdout)
	default:
		err = fmt.Errorf("no library %q", library)
	}
	return err
}

// processes runs belay and the libraries as processes against one server.
func processes(body []byte, text string, rounds int, belay string) error {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.Write(body)
	}))
	defer server.Close()
	dir, err := os.MkdirTemp("", "belay-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if belay == "" {
		belay = filepath.Join(dir, "belay")
		build := exec.Command("go", "build", "-C", "..", "-trimpath", "-o", belay, ".")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build belay: %w: %s", err, out)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	run := []string{belay, "--home", dir, "-C", dir, "--base-url", server.URL, "--model", "m", "exec", "--output-format"}
	for _, row := range []struct {
		name string
		argv []string
	}{
		{"belay exec, text", append(run[:len(run):len(run)], "text", "hi")},
		{"belay exec, stream-json", append(run[:len(run):len(run)], "stream-json", "hi")},
		{"openai-go, text", []string{self, "-peer", "openai-go", server.URL}},
		{"go-openai, text", []string{self, "-peer", "go-openai", server.URL}},
	} {
		if err := process(row.name, row.argv, body, text, rounds); err != nil {
			return err
		}
	}
	return nil
}

// process prints the row of the best rounds of a command.
func process(name string, argv []string, body []byte, text string, rounds int) error {
	ctx, cancel := context.WithTimeout(context.Background(), rowLimit)
	defer cancel()
	var wall, cpu time.Duration
	peak := 0 // kB
	for range rounds {
		out, said := &counter{}, &bytes.Buffer{}
		c := exec.CommandContext(ctx, argv[0], argv[1:]...)
		c.Stdout, c.Stderr = out, said
		c.Env = []string{"PATH=" + os.Getenv("PATH")}
		began := time.Now()
		if err := c.Start(); err != nil {
			return err
		}
		gone, high := make(chan struct{}), make(chan int)
		// owner: process; ends when gone is closed; joined by high
		go func() { high <- highWater(c.Process.Pid, gone) }()
		err := c.Wait()
		took := time.Since(began)
		close(gone)
		peak = max(peak, <-high)
		if ctx.Err() != nil {
			fmt.Printf("| %s | stopped after %s | | |\n", name, rowLimit)
			return nil
		}
		if err != nil || strings.HasSuffix(name, "text") && out.n != len(text) && out.n != len(text)+1 { // belay ends the line
			return fmt.Errorf("%s printed %d bytes, want %d: %w\n%s", name, out.n, len(text), err, said)
		}
		wall, cpu = shorter(wall, took), shorter(cpu, c.ProcessState.UserTime()+c.ProcessState.SystemTime())
	}
	fmt.Printf("| %s | %s | %s | %.1f |\n", name, rate(len(body), wall), rate(len(body), cpu), float64(peak)/1e3)
	return nil
}

// highWater is the peak memory of a process in kB, as seen last before it was
// gone. What wait4(2) says would be ours: the peak of the process that forked
// counts as the child's.
func highWater(pid int, gone <-chan struct{}) (peak int) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // gone: nothing more to see
		if _, rest, ok := strings.Cut(string(status), "VmHWM:"); ok {
			fmt.Sscan(rest, &peak)
		}
		select {
		case <-gone:
			return peak
		case <-tick.C:
		}
	}
}

// counter counts what is written to it.
type counter struct{ n int }

func (c *counter) Write(p []byte) (int, error) { c.n += len(p); return len(p), nil }

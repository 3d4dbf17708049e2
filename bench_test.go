//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
)

// benchBytes is the size of the synthetic stream, as in the figures of the README.
const benchBytes = 50 << 20

// benchStream makes a chat stream of about 300 bytes an event: text with an
// escape now and then, a finish reason, usage and the sentinel.
func benchStream(size int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, `data: {"id":"chatcmpl-9f8e7d6c5b4a","object":"chat.completion.chunk","created":1700000000,"model":"bench-model-large-2026","system_fingerprint":"fp_0123456789","service_tier":"default","choices":[{"index":0,"delta":{"content":" token%d\n"},"logprobs":null,"finish_reason":null}],"usage":null}`+"\n\n", i%1000)
	}
	b.WriteString(sseChunk(`{}`, "stop") + `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}` + "\n\n" + done)
	return b.Bytes()
}

// slowReads hands the stream out 16 KiB a read, as a connection does.
func slowReads(stream []byte) io.Reader { return splitReader{bytes.NewReader(stream), 16 << 10} }

// BenchmarkIndexByteFloor is what any reader has to pay: find every line end.
func BenchmarkIndexByteFloor(b *testing.B) {
	stream := benchStream(benchBytes)
	b.SetBytes(int64(len(stream)))
	for b.Loop() {
		lines := 0
		for rest := stream; ; lines++ {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			rest = rest[i+1:]
		}
		b.ReportMetric(float64(lines), "lines")
	}
}

// BenchmarkFraming splits the stream into events and does nothing with them.
func BenchmarkFraming(b *testing.B) {
	stream := benchStream(benchBytes)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		events := 0
		for _, err := range (&eventReader{src: slowReads(stream)}).events {
			if err != nil {
				break
			}
			events++
		}
		b.ReportMetric(float64(events), "events")
	}
}

// BenchmarkFramingJSON decodes the stream into a reply that nobody listens to.
func BenchmarkFramingJSON(b *testing.B) {
	stream := benchStream(benchBytes)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		bl := &builder{emit: quiet, ids: map[string]bool{}, at: map[string]*partial{}}
		if failed := bl.read(slowReads(stream), func() {}); failed != nil {
			b.Fatal(failed)
		}
	}
}

// BenchmarkReply50MB sends the stream through a whole model call over a real
// connection, with a listener for its text.
func BenchmarkReply50MB(b *testing.B) {
	stream := benchStream(benchBytes)
	url := serveStream(b, stream)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		var h heard
		if _, err := ask(caseClient(url), &h); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPeak50000Chunks reports the peak of the heap while 5 MB of text
// arrive in 50,000 chunks.
func BenchmarkPeak50000Chunks(b *testing.B) {
	one := sseChunk(`{"content":"` + strings.Repeat("x", 100) + `"}`)
	stream := []byte(strings.Repeat(one, 50000) + sseChunk(`{}`, "stop") + done)
	for b.Loop() {
		runtime.GC()
		var before, now runtime.MemStats
		runtime.ReadMemStats(&before)
		peak, n := uint64(0), 0
		bl := &builder{ids: map[string]bool{}, at: map[string]*partial{}, emit: func(string, ...any) {
			if n++; n%1000 == 0 {
				runtime.ReadMemStats(&now)
				peak = max(peak, now.HeapInuse)
			}
		}}
		if failed := bl.read(slowReads(stream), func() {}); failed != nil {
			b.Fatal(failed)
		}
		b.ReportMetric(float64(peak-min(peak, before.HeapInuse))/1e6, "peakMB")
	}
}

// BenchmarkArgument32MB assembles one tool argument of 32 MB from small pieces.
func BenchmarkArgument32MB(b *testing.B) {
	piece := sseChunk(callDelta(`{"index":0,"function":{"arguments":"` + strings.Repeat("y", 1000) + `"}}`))
	stream := []byte(sseChunk(callDelta(`{"index":0,"id":"a","function":{"name":"w","arguments":"{\"d\":\""}}`)) + strings.Repeat(piece, 32000) +
		sseChunk(callDelta(`{"index":0,"function":{"arguments":"\"}"}}`)) + sseChunk(`{}`, "tool_calls") + done)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		bl := &builder{emit: quiet, ids: map[string]bool{}, at: map[string]*partial{}}
		if failed := bl.read(slowReads(stream), func() {}); failed != nil || len(bl.calls) != 1 || bl.calls[0].args == nil {
			b.Fatal("the call is not whole", failed)
		}
	}
}

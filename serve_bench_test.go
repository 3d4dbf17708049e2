//go:build linux

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// serve_bench_test.go measures the daemon from outside, against the fake server
// that answers at once. Each turn has a session of its own, so that no history grows.

// BenchmarkServeTurn is a turn from its request to its result: turns a second
// are the inverse. What the daemon adds is the difference to BenchmarkServeExecLoop.
func BenchmarkServeTurn(b *testing.B) {
	f := newFakeLlama(b)
	d := loopd(b, f.home("")).serving()
	w := d.dial()
	w.SetDeadline(time.Time{})
	for i := int64(1); b.Loop(); i++ {
		w.send(i, aTurn(fmt.Sprint("s", i), "x", false)).want(i, "resultend")
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "turns/s")
}

// BenchmarkServeTurnResumed is a turn of a session that is there: two records are
// synced, no directory.
func BenchmarkServeTurnResumed(b *testing.B) {
	f := newFakeLlama(b)
	d := loopd(b, f.home("")).serving()
	w := d.dial()
	w.SetDeadline(time.Time{})
	i := int64(0)
	for b.Loop() {
		if i++; i%100 == 1 { // and a short history
			w.send(i, aTurn(fmt.Sprint("s", i), "x", false)).want(i, "resultend")
			i++
		}
		w.send(i, aTurn(fmt.Sprint("s", i-(i-1)%100), "x", true)).want(i, "resultend")
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "turns/s")
}

// BenchmarkServeExecLoop is the loop of exec for the same request to the same
// server, in this process: no daemon, no journal.
func BenchmarkServeExecLoop(b *testing.B) {
	f := newFakeLlama(b)
	c := newClient(clientOptions{url: "http://localhost/v1/chat/completions", socket: f.path, model: "test-model", liveness: time.Minute})
	for b.Loop() {
		a := &agent{cfg: &config{maxTurns: 1}, client: c, emit: func(string, ...any) {}, journal: func(record) error { return nil }, learned: learned{map[string]bool{}, map[string]bool{}}}
		a.history = append(a.history, systemMessage("You are belay."), userMessage("x"))
		if answer, err := a.run(context.Background()); err != nil || answer != "fine" {
			b.Fatal(answer, err)
		}
	}
}

// manySessions makes 1,000 journals.
func manySessions(b *testing.B, home string) {
	b.Helper()
	store, err := openStore(home)
	needNil(b, err)
	defer store.Close()
	for i := range 1000 {
		j, err := openSession(store, fmt.Sprint("n", i), false, "m", "")
		needNil(b, err)
		needNil(b, j.add(record{Type: recTurnStart, Message: userMessage("x")}))
		needNil(b, j.endTurn("end", ""))
		j.close()
	}
}

// BenchmarkServeStart is from the start of the process to its first answer, the
// check of the server with it, with no journals and with 1,000.
func BenchmarkServeStart(b *testing.B) {
	for _, journals := range []int{0, 1000} {
		b.Run(fmt.Sprint(journals, "-journals"), func(b *testing.B) {
			f := newFakeLlama(b)
			home := f.home("")
			if journals > 0 {
				manySessions(b, home)
			}
			for b.Loop() {
				loopd(b, home).serving().kill()
			}
		})
	}
}

// BenchmarkServeMemory is the peak resident memory of the daemon with 64 clients
// attached to one turn and 1,000 sessions on disk.
func BenchmarkServeMemory(b *testing.B) {
	f := newFakeLlama(b)
	home := f.home("")
	manySessions(b, home)
	peak, idle := 0, 0
	for b.Loop() {
		release := make(chan struct{})
		f.turn = func(int, map[string]any) any { return streaming(release) }
		d := loopd(b, home).serving()
		idle = residentOf(b, d.cmd.Process.Pid)
		session := fmt.Sprint("t", time.Now().UnixNano())
		var clients []*wire
		for i := range 64 {
			w := d.dial()
			if i == 0 {
				w.send(1, aTurn(session, "x", false)).until("content")
			} else {
				w.send(1, wireRequest{Type: "attach", Session: session}).until("content")
			}
			clients = append(clients, w)
		}
		close(release)
		for _, w := range clients {
			w.want(1, "resultend")
			w.Close()
		}
		peak = residentOf(b, d.cmd.Process.Pid)
		d.kill()
	}
	sessions, _ := filepath.Glob(filepath.Join(home, "sessions", "*"))
	b.ReportMetric(float64(idle), "KiB-idle")
	b.ReportMetric(float64(peak), "KiB-peak")
	b.ReportMetric(float64(len(sessions)), "sessions")
}

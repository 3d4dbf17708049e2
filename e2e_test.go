//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// e2e_test.go runs the built binary against scripted servers on loopback. Every
// promise has its test here. Every process that a test starts carries a tag in
// its argv and is looked for by it, so that a leak fails the test that made it.

const (
	deadline = 60 * time.Second // generous: nothing here asserts a time
	leftWait = 15 * time.Second // after a teardown nothing may be left for longer
	nobodyID = 65534            // a user whom file permissions bind
)

// TestMain is also the victim processes of the tests and, because the package's
// own tests start keepers of the test binary, a keeper.
func TestMain(m *testing.M) {
	switch {
	case os.Args[0] == keeperName:
		os.Exit(keeperMain())
	case len(os.Args) > 3 && os.Args[1] == "victim":
		victim(os.Args[2], os.Args[3])
		os.Exit(0)
	case len(os.Args) > 2 && os.Args[1] == "attack":
		attack(os.Args[2:])
		os.Exit(0)
	case len(os.Args) > 4 && os.Args[1] == "without-call":
		withoutCall(os.Args[2], os.Args[3], os.Args[4:])
		os.Exit(1)
	}
	// Of programs that other users start: theirs to read, unlike t.TempDir.
	dir, err := os.MkdirTemp("", "belay-test-")
	if err = errors.Join(err, os.Chmod(dir, 0o755)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	programs = dir
	if signal.Ignored(syscall.SIGHUP) { // as by nohup, and then in every belay that is started here
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// victim is a process that is hard to end. It ends by itself after 120 s.
func victim(tag, kind string) {
	nap := func() { time.Sleep(120 * time.Second) }
	again := func(kind string, session bool, env []string) *exec.Cmd {
		c := exec.Command("/proc/self/exe", "victim", tag, kind)
		c.Env, c.Dir = env, "/" // nil descriptors: the null device
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: session}
		if err := c.Start(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return c
	}
	switch kind {
	case "plain":
		nap()
	case "setsid":
		again("plain", true, nil)
		nap()
	case "daemon": // double fork, own session, no inherited descriptor
		again("fork-plain", true, nil).Wait()
	case "fork-plain":
		again("plain", false, nil)
	case "envless":
		again("fork-envless", true, nil).Wait()
	case "fork-envless":
		again("plain", false, []string{})
	case "termign":
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
		nap()
	case "stopped":
		again("stop", false, nil)
		nap()
	case "stop":
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		nap()
	case "stopdaemon":
		again("fork-stop", true, nil).Wait()
	case "fork-stop":
		again("stop", false, nil)
	case "tracer": // of the keeper, which then stops on its way out, even on SIGKILL, until we let it go
		runtime.LockOSThread()
		shell, _ := readProc(os.Getppid())
		if _, _, e := syscall.Syscall6(syscall.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(shell.ppid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0); e != 0 {
			fmt.Println("cannot trace:", e)
		}
		os.WriteFile("traced", nil, 0o644)
		nap()
	case "headless": // in the background: its first thread has ended, which looks like a zombie
		again("fork-headless", true, nil).Wait()
	case "fork-headless":
		again("no-head", false, nil)
	case "no-head":
		go nap()
		for { // until one of us is on the first thread
			go func() {
				runtime.LockOSThread()
				if syscall.Gettid() == os.Getpid() {
					syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0) // of the thread
				}
				nap()
			}()
			time.Sleep(time.Millisecond)
			if p, _ := readProc(os.Getpid()); p.state == 'Z' {
				nap()
			}
		}
	}
}

// argsOf gives the arguments of a process; of one without its first thread only
// the other threads tell them.
func argsOf(pid int) []string {
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/cmdline", pid))
	for _, name := range append([]string{fmt.Sprintf("/proc/%d/cmdline", pid)}, names...) {
		if b, _ := os.ReadFile(name); len(b) > 0 {
			return strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
		}
	}
	return nil
}

// tagged gives the pids of the living processes that carry tag in their argv
// and are no keeper, no belay and no test.
func tagged(tag string) (pids []int) {
	for _, p := range processes() {
		if !p.dead() && p.pid != os.Getpid() && slices.Contains(argsOf(p.pid), tag) {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

// until waits for a condition, not for a time.
func until(t testing.TB, what string, limit time.Duration, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("did not happen within %s: %s", limit, what)
		}
	}
}

// newTag makes a tag and, at the end of the test, fails it if anything with
// the tag is left.
func newTag(t *testing.T) string {
	tag := "belay-test-" + randomHex()
	t.Cleanup(func() {
		left := tagged(tag)
		for _, pid := range left {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return tag
}

func noneLeft(t *testing.T, tag string) {
	t.Helper()
	until(t, "every process of "+tag+" is gone", leftWait, func() bool { return len(tagged(tag)) == 0 })
}

var programs string // directory of what the tests build and copy; set once, by TestMain

// built is the binary under test. BELAY_BINARY names one where there is no Go
// to build it with; loopd, its other name, stands beside it.
var built = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("BELAY_BINARY"); path != "" {
		return path, nil
	}
	c := exec.Command("go", "build", "-trimpath", "-o", programs+"/belay", ".")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return programs + "/belay", os.Symlink("belay", programs+"/loopd")
})

// ofTheBinary marks a long test that looks at the built binary alone. -short
// leaves it out: .ci/run gives it with -race, which sees only this process.
func ofTheBinary(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("long, and about the built binary alone: not in -short")
	}
}

func belayBinary(t testing.TB) string { t.Helper(); return pathOf(t, built) }

// pathOf gives what was built, once in a run of the tests.
func pathOf(t testing.TB, build func() (string, error)) string {
	t.Helper()
	path, err := build()
	needNil(t, err)
	return path
}

// chunk is one event of a stream.
func chunk(v any) string {
	b, _ := json.Marshal(v)
	return "data: " + string(b) + "\n\n"
}

func delta(fields map[string]any, finish any) string {
	return chunk(map[string]any{"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": []any{map[string]any{"index": 0, "delta": fields, "finish_reason": finish}},
		"usage": map[string]any{"prompt_tokens": 12, "completion_tokens": 4}})
}

// say is a complete answer.
func say(text string) string { return ends(text, "stop") }

// ends is an answer with another finish reason.
func ends(text, finish string) string {
	return delta(map[string]any{"content": text}, nil) + delta(map[string]any{}, finish) + "data: [DONE]\n\n"
}

// calls is a reply with calls of a tool, one for each object of arguments.
func calls(tool string, arguments ...map[string]any) string {
	var out strings.Builder
	for i, a := range arguments {
		b, _ := json.Marshal(a)
		out.WriteString(delta(map[string]any{"tool_calls": []any{map[string]any{"index": i, "id": fmt.Sprintf("call_%d", i), "type": "function",
			"function": map[string]any{"name": tool, "arguments": string(b)}}}}, nil))
	}
	return out.String() + delta(map[string]any{}, "tool_calls") + "data: [DONE]\n\n"
}

func bash(command string) string { return calls("Bash", map[string]any{"command": command}) }

// provider is a scripted server: request n gets reply n, the last reply again
// and again. A reply is the body of an event stream or a handler.
type provider struct {
	*httptest.Server
	mu       sync.Mutex
	requests []map[string]any // guarded by mu
	headers  []http.Header    // guarded by mu
}

func serve(t testing.TB, replies ...any) *provider {
	p := &provider{}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		var body map[string]any
		json.Unmarshal(b, &body)
		p.mu.Lock()
		n := min(len(p.requests), len(replies)-1)
		p.requests, p.headers = append(p.requests, body), append(p.headers, r.Header)
		p.mu.Unlock()
		switch reply := replies[n].(type) {
		case string:
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, reply)
		case func(http.ResponseWriter, *http.Request):
			reply(w, r)
		}
	}))
	t.Cleanup(func() { p.Listener.Close(); p.CloseClientConnections() }) // without waiting for a handler that a failed test holds
	return p
}

func (p *provider) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.requests)
}

// hang holds a request's headers until the client goes away.
func hang(w http.ResponseWriter, r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-time.After(deadline):
	}
}

// status answers with a status and a JSON error.
func status(code int, body string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

// belayRun is one process of belay under test.
type belayRun struct {
	t         *testing.T
	cmd       *exec.Cmd
	workspace string
	home      string
	out, err  bytes.Buffer
	waited    chan struct{}
}

// prepare makes a run that is not started: belay with env and args, in a new
// workspace with a new home.
func prepare(t *testing.T, env []string, args ...string) *belayRun {
	t.Helper()
	r := &belayRun{t: t, waited: make(chan struct{}), workspace: t.TempDir(), home: t.TempDir()}
	for _, dir := range []string{r.workspace, r.home, filepath.Dir(r.workspace), filepath.Dir(filepath.Dir(r.workspace))} {
		os.Chmod(dir, 0o777) // the child may be another user
	}
	r.cmd = exec.Command(belayBinary(t), args...)
	r.cmd.Dir = r.workspace
	r.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + r.home, "TMPDIR=" + os.TempDir()}, env...)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.err
	r.cmd.WaitDelay = 2 * time.Second // a child that belay must not touch may hold its output
	return r
}

// execRun prepares `belay exec` in stream-json with all tools.
func execRun(t *testing.T, p *provider, args ...string) *belayRun {
	t.Helper()
	all := append([]string{"exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json", "--set", "limits.retry_backoff_ms=[]"}, args...)
	return prepare(t, []string{"BELAY_BASE_URL=" + p.URL, "BELAY_MODEL=test-model"}, append(all, "do it")...)
}

func (r *belayRun) start() *belayRun {
	r.t.Helper()
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	go func() { r.cmd.Wait(); close(r.waited) }()
	r.t.Cleanup(func() {
		r.cmd.Process.Kill()
		<-r.waited
	})
	return r
}

// piped starts the run with its stdout in a pipe and gives the end that the
// test reads from, or leaves.
func (r *belayRun) piped() *os.File {
	r.t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { read.Close() })
	r.cmd.Stdout = write
	r.start()
	write.Close()
	return read
}

// wait gives the exit code; a process that does not end fails the test.
func (r *belayRun) wait() int {
	r.t.Helper()
	select {
	case <-r.waited:
	case <-time.After(deadline):
		r.cmd.Process.Signal(syscall.SIGQUIT)
		<-r.waited
		r.t.Fatalf("did not end\nstdout:\n%s\nstderr:\n%s", r.out.String(), r.err.String())
	}
	return r.cmd.ProcessState.ExitCode()
}

func (r *belayRun) finish(want int) *belayRun {
	r.t.Helper()
	r.start()
	if code := r.wait(); code != want {
		r.t.Fatalf("exit code %d, want %d\nstdout:\n%s\nstderr:\n%s", code, want, r.out.String(), r.err.String())
	}
	return r
}

// events gives the events of a kind; "" is all. Every line must be an object
// with the schema, the type first.
func (r *belayRun) events(kind string) (out []map[string]any) {
	r.t.Helper()
	for line := range strings.Lines(r.out.String()) {
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil || e["schema"] != "belay.exec-stream" || e["schema_version"] != 1.0 || !strings.HasPrefix(line, `{"type":"`) {
			r.t.Fatalf("no event (%v): %s", err, line)
		}
		if kind == "" || e["type"] == kind {
			out = append(out, e)
		}
	}
	return out
}

// one gives the only event of a kind.
func (r *belayRun) one(kind string) map[string]any {
	r.t.Helper()
	all := r.events(kind)
	if len(all) != 1 {
		r.t.Fatalf("%d events %s, want 1\n%s\nstderr:\n%s", len(all), kind, r.out.String(), r.err.String())
	}
	return all[0]
}

// meta gives the metadata and checks the order of the last lines.
func (r *belayRun) meta() map[string]any {
	r.t.Helper()
	all := r.events("")
	if len(all) < 2 || all[len(all)-1]["type"] != "done" || all[len(all)-2]["type"] != "metadata" {
		r.t.Fatalf("metadata and done are not the last lines:\n%s\nstderr:\n%s", r.out.String(), r.err.String())
	}
	return all[len(all)-2]["meta"].(map[string]any)
}

func (r *belayRun) as(uid uint32) *belayRun {
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return r
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// stopService ends a released service at the end of a test.
func stopService(t *testing.T, pid int) {
	t.Cleanup(func() { syscall.Kill(-pid, syscall.SIGKILL) })
}

func pidFile(t *testing.T, path string) (pid int) {
	t.Helper()
	until(t, path+" holds a pid", deadline, func() bool {
		b, _ := os.ReadFile(path)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		return pid > 0 && strings.HasSuffix(string(b), "\n")
	})
	return pid
}

const serviceCommand = "echo $$ > service.pid; exec sleep 600"

func persist(command string) map[string]any {
	return map[string]any{"command": command, "background": true, "persist": true}
}

// seedRun has exactly the command line and the environment of the acceptance
// test that the project was created from.
func seedRun(t *testing.T, p *provider) *belayRun {
	r := prepare(t, nil)
	r.cmd.Args = []string{r.cmd.Path, "--workspace", r.workspace, "--no-project-config", "exec", "--auto", "--sandbox", "danger-full-access",
		"--model", "persist-service-model", "--output-format", "stream-json", "start the service, then confirm"}
	r.cmd.Env = nil
	for _, name := range []string{"PATH", "SHELL", "TEMP", "TMP", "TERM", "COLORTERM", "LANG", "LC_ALL"} {
		if v, ok := os.LookupEnv(name); ok {
			r.cmd.Env = append(r.cmd.Env, name+"="+v)
		}
	}
	r.cmd.Env = append(r.cmd.Env, "HOME="+r.home, "USERPROFILE="+r.home, "XDG_CONFIG_HOME="+r.home+"/.config", "XDG_DATA_HOME="+r.home+"/.local/share", "XDG_CACHE_HOME="+r.home+"/.cache",
		"CODEWHALE_CONFIG_PATH="+r.home+"/.codewhale/config.toml", "DEEPSEEK_CONFIG_PATH="+r.home+"/.deepseek/config.toml",
		"DEEPSEEK_API_KEY=ci-test-key-not-real", "DEEPSEEK_BASE_URL="+p.URL, "CODEWHALE_BASE_URL="+p.URL, "DEEPSEEK_MODEL=persist-service-model", "CODEWHALE_MODEL=persist-service-model", "RUST_LOG=warn")
	return r
}

func TestSeedCompletedRunReleasesService(t *testing.T) {
	t.Parallel()
	r := seedRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("service is up"))).finish(0)
	released := r.one("service_released")
	pid := pidFile(t, r.workspace+"/service.pid")
	stopService(t, pid)
	if released["pid"] != float64(pid) || released["process_group_id"] != float64(pid) || released["ownership"] != "external" || !alive(pid) {
		t.Errorf("service %d alive=%v, receipt %v", pid, alive(pid), released)
	}
}

// The service may reach its first instruction after belay has exited.
func TestSeedReleaseOfServiceThatIsSlowToStart(t *testing.T) {
	t.Parallel()
	r := seedRun(t, serve(t, calls("Bash", persist("sleep 1; "+serviceCommand)), say("up"))).finish(0)
	pid := int(r.one("service_released")["pid"].(float64))
	stopService(t, pid)
	if got := pidFile(t, r.workspace+"/service.pid"); got != pid {
		t.Errorf("service %d, receipt %d", got, pid)
	}
}

func TestSeedFailedRunKillsPendingService(t *testing.T) {
	t.Parallel()
	ready := make(chan struct{})
	r := seedRun(t, serve(t, calls("Bash", persist(serviceCommand)), func(w http.ResponseWriter, q *http.Request) {
		<-ready
		io.WriteString(w, ends("partial", "content_filter"))
	})).start()
	pid := pidFile(t, r.workspace+"/service.pid")
	if !alive(pid) {
		t.Error("the service was not alive before the model failed")
	}
	close(ready)
	if code := r.wait(); code != 1 || len(r.events("service_released")) > 0 {
		t.Errorf("exit code %d, events:\n%s", code, r.out.String())
	}
	if alive(pid) {
		t.Errorf("service %d still answers kill(pid, 0)", pid)
	}
	if m := r.meta(); m["status"] != "failed" || m["error_category"] != "content_filter" {
		t.Errorf("metadata %v", m)
	}
}

func TestSeedSignalKillsPendingService(t *testing.T) {
	t.Parallel()
	p := serve(t, calls("Bash", persist(serviceCommand)), hang)
	r := seedRun(t, p).start()
	pid := pidFile(t, r.workspace+"/service.pid")
	until(t, "the second request", deadline, func() bool { return p.count() == 2 })
	r.cmd.Process.Signal(syscall.SIGTERM)
	if code := r.wait(); code != 143 || len(r.events("service_released")) > 0 || alive(pid) {
		t.Errorf("exit code %d, service alive=%v, events:\n%s", code, alive(pid), r.out.String())
	}
}

// lines reads a pipe line by line.
func lines(r io.Reader) <-chan string {
	out := make(chan string, 1000)
	go func() {
		defer close(out)
		for in := bufio.NewScanner(r); in.Scan(); {
			out <- in.Text()
		}
	}()
	return out
}

// victims says whether the processes of a kind are all there, and in the state
// that makes them hard to end.
func victims(tag, kind string) bool {
	want := map[string]map[string]int{"plain": {"plain": 1}, "setsid": {"setsid": 1, "plain": 1}, "daemon": {"plain": 1}, "envless": {"plain": 1},
		"termign": {"termign": 1}, "stopped": {"stopped": 1, "stop": 1}, "stopdaemon": {"stop": 1}, "headless": {"no-head": 1}}[kind]
	have := map[string]int{}
	for _, pid := range tagged(tag) {
		args := argsOf(pid)
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		last := append([]string{""}, args...)[len(args)]
		if last == "stop" && !strings.Contains(string(status), "State:\tT") || last == "termign" && !strings.Contains(string(status), "SigIgn:\t0000000000004007") || last == "no-head" && !strings.Contains(string(status), "State:\tZ") {
			continue
		}
		have[last]++
	}
	for name, n := range want {
		if have[name] != n {
			return false
		}
	}
	return len(want) == len(have)
}

func keepersOf(belay int) (pids []int) {
	for _, p := range processes() {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.pid))
		if p.ppid == belay && !p.dead() && strings.TrimSpace(string(comm)) == keeperName {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

// TestNothingIsLeft is the matrix: every kind of process under every way for
// it to end. Each case first sees its victims alive.
func TestNothingIsLeft(t *testing.T) {
	ofTheBinary(t)
	kinds := []string{"plain", "setsid", "daemon", "envless", "termign", "stopped", "stopdaemon", "headless"}
	events := []string{"command ends", "timeout", "cancel", "run ends", "SIGINT", "SIGTERM", "SIGHUP", "reader leaves", "SIGKILL of belay", "SIGKILL of keeper"}
	for _, kind := range kinds {
		for _, event := range events {
			t.Run(kind+"/"+event, func(t *testing.T) {
				t.Parallel()
				matrixCase(t, kind, event)
			})
		}
	}
}

func matrixCase(t *testing.T, kind, event string) {
	tag := newTag(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	hold := filepath.Join(t.TempDir(), "hold")
	os.WriteFile(hold, nil, 0o600)
	args := map[string]any{"command": fmt.Sprintf("%s victim %s %s & while test -e %s; do sleep 0.02; done", self, tag, kind, hold), "background": event != "command ends" && event != "timeout"}
	if event == "timeout" {
		args["timeout_ms"] = 4000 // the victims must be seen before
	}
	seen := func(next string) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) {
			until(t, "the victims are there", deadline, func() bool { return victims(tag, kind) })
			io.WriteString(w, next)
		}
	}
	replies := []any{calls("Bash", args), hang}
	switch event {
	case "cancel":
		replies = []any{calls("Bash", args), seen(calls("Bash", map[string]any{"action": "cancel", "all": true})), hang}
	case "run ends":
		replies = []any{calls("Bash", args), seen(say("done"))}
	}
	p := serve(t, replies...)
	r := execRun(t, p)
	read := r.piped()
	drained := make(chan struct{})
	if event != "reader leaves" {
		go func() { io.Copy(&r.out, read); close(drained) }()
	}
	if event != "cancel" && event != "run ends" {
		until(t, "the victims are there", deadline, func() bool { return victims(tag, kind) })
	}
	want, running := 0, true
	switch event {
	case "command ends":
		os.Remove(hold)
	case "timeout":
	case "cancel":
		until(t, "the request after the cancel", deadline, func() bool { return p.count() == 3 })
	case "SIGKILL of keeper":
		for _, pid := range keepersOf(r.cmd.Process.Pid) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	case "run ends":
		running = false
	case "reader leaves":
		bufio.NewReader(read).ReadString('\n')
		read.Close()
		want, running = 141, false
	default:
		sig := map[string]syscall.Signal{"SIGINT": syscall.SIGINT, "SIGTERM": syscall.SIGTERM, "SIGHUP": syscall.SIGHUP, "SIGKILL of belay": syscall.SIGKILL}[event]
		r.cmd.Process.Signal(sig)
		if want = 128 + int(sig); sig == syscall.SIGKILL {
			want = -1
		}
		running = false
	}
	if running {
		noneLeft(t, tag)
		if !alive(r.cmd.Process.Pid) {
			t.Errorf("belay ended by itself: %s", r.err.String())
		}
		r.cmd.Process.Signal(syscall.SIGTERM)
		want = 143
	}
	if code := r.wait(); code != want {
		t.Errorf("exit code %d, want %d\n%s", code, want, r.err.String())
	}
	noneLeft(t, tag)
	if event != "reader leaves" {
		<-drained
	}
}

func TestForkStormDies(t *testing.T) {
	ofTheBinary(t)
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc: the storm is written in C, a Go program forks too slowly")
	}
	storm := filepath.Join(t.TempDir(), "storm") // the directory of the binary may not be ours
	if out, err := exec.Command(gcc, "-O1", "-o", storm, "testdata/storm.c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, event := range []string{"end", "SIGKILL"} {
		t.Run(event, func(t *testing.T) {
			tag := newTag(t)
			end := make(chan struct{})
			r := execRun(t, serve(t, calls("Bash", map[string]any{"command": storm + " " + tag + " 200", "background": true}), func(w http.ResponseWriter, q *http.Request) {
				<-end
				io.WriteString(w, say("done"))
			})).start()
			until(t, "the storm is there", deadline, func() bool { return len(tagged(tag)) > 150 })
			if event == "SIGKILL" {
				r.cmd.Process.Kill()
			}
			close(end)
			r.wait()
			noneLeft(t, tag)
		})
	}
}

func TestTwoSignalsAreOneTeardown(t *testing.T) {
	t.Parallel()
	tag := newTag(t)
	self, _ := os.Executable()
	r := execRun(t, serve(t, bash(self+" victim "+tag+" termign"))).start()
	until(t, "the victim", deadline, func() bool { return victims(tag, "termign") })
	r.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(20 * time.Millisecond)
	<-timer.C
	r.cmd.Process.Signal(syscall.SIGTERM)
	if code := r.wait(); code != 143 {
		t.Errorf("exit code %d", code)
	}
	if m := r.meta(); m["status"] != "interrupted" || m["exit_code"] != 143.0 {
		t.Errorf("metadata %v", m)
	}
	if left := tagged(tag); len(left) > 0 {
		t.Errorf("left at exit: %v", left)
	}
}

// A child that belay had before its first line is the caller's.
func TestEarlierChildIsNotTouched(t *testing.T) {
	t.Parallel()
	p := serve(t, bash("until test -s late; do sleep 0.05; done; sleep 0.2; kill -9 $PPID"), bash("setsid -f sleep 300; kill -9 $PPID"), say("done"))
	r := execRun(t, p)
	r.cmd.Args = append([]string{"sh", "-c", `sleep 300 & echo $! > earlier; setsid sh -c 'sleep 0.5; sleep 300 & echo $! > late' & sh -c 'sleep 300 & echo $! > orphan'; exec "$0" "$@"`, r.cmd.Path}, r.cmd.Args[1:]...)
	r.cmd.Path = "/bin/sh"
	r.finish(0)
	for _, name := range []string{"earlier", "orphan", "late"} {
		pid := pidFile(t, filepath.Join(r.workspace, name))
		if !alive(pid) {
			t.Errorf("%s child %d was ended", name, pid)
		}
		syscall.Kill(pid, syscall.SIGKILL)
	}
}

// The number of an earlier process that has ended, child or below one, may be given
// again, to a process of a command or its session: those are not the earlier one's.
func TestNumberOfAnEarlierChild(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/sys/kernel/ns_last_pid"); err != nil {
		t.Skipf("no kernel that lets us choose the next number: %v", err)
	}
	for earlier, inner := range map[string]string{"child": `setsid sleep 0.2 & echo $! > earlier; `, "below a child": `(setsid sleep 0.2 & echo $! > earlier; wait; exec tail -f /dev/null) & `} {
		for again, command := range map[string]string{"process": "sleep 600", "session without its leader": `sh -c "sleep 600 & exit"`} {
			t.Run(earlier+"/"+again, func(t *testing.T) {
				t.Parallel()
				take := "x=$(cat earlier); for i in 1 2 3 4 5 6 7 8 9; do echo $((x-1)) > /proc/sys/kernel/ns_last_pid; sh -c 'test $$ = '$x' && exec setsid " + command + "' > /dev/null 2>&1 & " +
					"test $! = $x && break; done; echo got $!, want $x; sleep 0.2; kill -KILL $PPID; sleep 600"
				r := execRun(t, serve(t, bash("sleep 0.5; kill -KILL $PPID; sleep 600"), bash(take), say("done")))
				r.inNamespace(`sh -c '`+inner+`exec "$@"' sh "$@"; code=$?; grep -qsx sleep /proc/[0-9]*/comm && echo left; exit $code`, "--pid", "--fork", "--mount-proc").start()
				code := r.wait()
				got := regexp.MustCompile(`got (\d+), want (\d+)`).FindStringSubmatch(r.out.String())
				if code != 0 || strings.HasSuffix(r.out.String(), "left\n") || got == nil || (got[1] == got[2]) == (earlier == "child") {
					t.Errorf("exit code %d: %s", code, r.out.String())
				}
			})
		}
	}
}

// A descriptor that the caller left open, here a lock, is not the service's.
func TestInheritedDescriptorIsNotHeldByService(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("up")))
	lock, err := os.Create(filepath.Join(r.workspace, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	for range 6 {
		r.cmd.ExtraFiles = append(r.cmd.ExtraFiles, nil)
	}
	r.cmd.ExtraFiles = append(r.cmd.ExtraFiles, lock) // descriptor 9
	r.finish(0)
	lock.Close()
	pid := pidFile(t, r.workspace+"/service.pid")
	stopService(t, pid)
	again, err := os.Open(filepath.Join(r.workspace, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := syscall.Flock(int(again.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Errorf("the lock is held by the service: %v", err)
	}
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if len(fds) != 3 {
		t.Errorf("the service has %d descriptors, want 3", len(fds))
	}
}

// A reader that leaves is noticed although nothing is written.
func TestReaderThatLeavesIsNoticedInSilence(t *testing.T) {
	t.Parallel()
	p := serve(t, bash("sleep 300"))
	r := execRun(t, p)
	read := r.piped()
	in := bufio.NewReader(read)
	until(t, "the tool_use event", deadline, func() bool { line, _ := in.ReadString('\n'); return strings.Contains(line, `"tool_use"`) })
	read.Close()
	if code := r.wait(); code != 141 {
		t.Errorf("exit code %d", code)
	}
}

func TestBackgroundChildOfForegroundCommandIsEnded(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, bash("sleep 300 & echo $! > pid; echo started"), say("done"))).finish(0)
	result := r.one("tool_result")
	if out := result["output"].(string); !strings.Contains(out, "started\nexit code 0\n(1 processes that the command had left running were ended") || result["status"] != "success" {
		t.Errorf("result %q", out)
	}
	if pid := pidFile(t, r.workspace+"/pid"); alive(pid) {
		t.Errorf("%d is left", pid)
	}
}

func TestNohupSurvivesHangup(t *testing.T) {
	t.Parallel()
	p := serve(t, bash("true"), hang)
	r := execRun(t, p)
	r.cmd.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$0" "$@"`, r.cmd.Path}, r.cmd.Args[1:]...)
	r.cmd.Path = "/bin/sh"
	r.start()
	until(t, "the second request", deadline, func() bool { return p.count() == 2 })
	r.cmd.Process.Signal(syscall.SIGHUP)
	r.cmd.Process.Signal(syscall.SIGTERM)
	if code := r.wait(); code != 143 {
		t.Errorf("exit code %d, want 143 of the SIGTERM", code)
	}
}

// -- services --

func TestServiceThatExitedFailsTheRun(t *testing.T) {
	t.Parallel()
	p := serve(t, calls("Bash", persist("echo first line; echo cannot bind >&2; exit 3")), func(w http.ResponseWriter, q *http.Request) {
		io.WriteString(w, bash("sleep 0.2"))
	}, say("done"))
	r := execRun(t, p).finish(1)
	m := r.meta()
	if text, _ := m["error"].(string); m["error_category"] != "service_exited" || !strings.HasSuffix(text, ":\nfirst line\ncannot bind") {
		t.Errorf("metadata %v", m)
	}
	if len(r.events("service_released")) > 0 || len(r.events("service_stopped")) != 1 {
		t.Errorf("events:\n%s", r.out.String())
	}
}

// A keeper that says nothing, for want of processor time or because somebody stopped
// it, is no news of its service: that must not be told as dead.
func TestServiceThatNobodyKnowsOf(t *testing.T) {
	t.Parallel()
	stop := bash("until test -s service.pid; do sleep 0.01; done; kill -STOP $(cut -d ' ' -f 4 /proc/$(cat service.pid)/stat)")
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), stop, say("up"))).finish(1)
	if e := r.one("error"); e["error_category"] != "service_exited" || !strings.Contains(e["error"].(string), "or its keeper did not say in a second that it lives") {
		t.Errorf("%v", e)
	}
	until(t, "the service is gone", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && !r.keepers() })
}

func TestOneDeadServiceReleasesNone(t *testing.T) {
	t.Parallel()
	p := serve(t, calls("Bash", persist("echo $$ > one.pid; exec sleep 600"), persist("exit 0")), bash("until test -s one.pid; do sleep 0.05; done; sleep 0.2"), say("done"))
	r := execRun(t, p).finish(1)
	if n := len(r.events("service_released")); n > 0 || !strings.HasSuffix(r.meta()["error"].(string), ":\n(empty)") {
		t.Errorf("%d services released, %v", n, r.meta())
	}
	if pid := pidFile(t, r.workspace+"/one.pid"); alive(pid) {
		t.Errorf("the living one, %d, is left", pid)
	}
	if b, _ := os.ReadFile(r.home + "/.belay/services/released.jsonl"); len(b) > 0 {
		t.Errorf("recorded: %s", b)
	}
}

func TestCancelledServiceDoesNotCount(t *testing.T) {
	t.Parallel()
	p := serve(t, calls("Bash", persist(serviceCommand)), calls("Bash", map[string]any{"action": "cancel", "all": true}), say("done"))
	r := execRun(t, p).finish(0)
	if n := len(r.events("service_released")); n > 0 {
		t.Errorf("%d services released", n)
	}
}

func TestTwoServicesAreReleasedInTaskOrder(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist("exec sleep 600"), persist("exec sleep 601")), say("done"))).finish(0)
	all := r.events("service_released")
	if len(all) != 2 || all[0]["task_id"].(string) >= all[1]["task_id"].(string) {
		t.Fatalf("receipts %v", all)
	}
	for _, e := range all {
		pid := int(e["pid"].(float64))
		stopService(t, pid)
		if !alive(pid) {
			t.Errorf("%d is not alive", pid)
		}
	}
}

func TestPersistAdmission(t *testing.T) {
	t.Parallel()
	full := []string{"exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json", "do it"}
	for _, c := range []struct {
		name, want string
		args       []string
		call       map[string]any
	}{
		{"without background", "persist needs background:true", full, map[string]any{"command": "sleep 9", "persist": true}},
		{"with stdin", "and no stdin", full, map[string]any{"command": "sleep 9", "persist": true, "background": true, "stdin": "x"}},
		{"sandbox not by flag", "needs --sandbox danger-full-access on the command line", []string{"--set", "exec.sandbox=danger-full-access", "exec", "--auto", "--output-format", "stream-json", "do it"}, persist("sleep 9")},
		{"another sandbox", "needs --sandbox danger-full-access", []string{"exec", "--auto", "--sandbox", "external-sandbox", "--output-format", "stream-json", "do it"}, persist("sleep 9")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := prepare(t, []string{"BELAY_BASE_URL=" + serve(t, calls("Bash", c.call), say("done")).URL, "BELAY_MODEL=m"}, c.args...).finish(0)
			if e := r.one("tool_result"); e["status"] != "error" || !strings.Contains(e["output"].(string), c.want) || len(r.events("service_released")) > 0 {
				t.Errorf("result %v", e)
			}
		})
	}
	t.Run("the ninth", func(t *testing.T) {
		t.Parallel()
		var nine []map[string]any
		for range 9 {
			nine = append(nine, persist("exec sleep 600"))
		}
		r := execRun(t, serve(t, calls("Bash", nine...), say("done"))).finish(0)
		for _, e := range r.events("service_released") {
			stopService(t, int(e["pid"].(float64)))
		}
		results := r.events("tool_result")
		if len(r.events("service_released")) != 8 || !strings.Contains(results[8]["output"].(string), "8 pending services already") {
			t.Errorf("results %v", results[8])
		}
	})
}

// The reader leaves after the last tool_result, then the provider sends the
// answer: no service is left, and the exit code says why.
func TestReaderThatLeavesBeforeTheAnswerReleasesNothing(t *testing.T) {
	t.Parallel()
	left := make(chan struct{})
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), func(w http.ResponseWriter, q *http.Request) {
		<-left
		io.WriteString(w, say("done"))
	}))
	read := r.piped()
	in := bufio.NewReader(read)
	until(t, "tool_result", deadline, func() bool { line, _ := in.ReadString('\n'); return strings.Contains(line, `"tool_result"`) })
	pid := pidFile(t, r.workspace+"/service.pid")
	read.Close()
	close(left)
	if code := r.wait(); code != 141 || alive(pid) {
		t.Errorf("exit code %d, service alive=%v", code, alive(pid))
	}
	if b, _ := os.ReadFile(r.home + "/.belay/services/released.jsonl"); bytes.Count(b, []byte("\n")) != bytes.Count(b, []byte(`"withdrawn":true`))*2 {
		t.Errorf("recorded: %s", b)
	}
}

// A kill of belay at any moment leaves no service whose receipt was not
// written.
func TestKillAtAnyMomentLeavesNoServiceWithoutReceipt(t *testing.T) {
	ofTheBinary(t)
	rounds := 40
	if n, err := strconv.Atoi(os.Getenv("BELAY_SOAK")); err == nil {
		rounds = n
	}
	released, killed := 0, 0
	for i := range rounds {
		r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("done"))).start()
		wait := time.Duration(i%40) * 1500 * time.Microsecond
		select {
		case <-time.After(wait):
			r.cmd.Process.Kill()
		case <-r.waited:
		}
		r.wait()
		receipts := strings.Count(r.out.String(), `"type":"service_released"`)
		b, _ := os.ReadFile(r.workspace + "/service.pid")
		pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		if receipts > 0 {
			released++
		} else {
			killed++
			until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 })
		}
		if pid > 0 {
			syscall.Kill(-pid, syscall.SIGKILL)
		}
		for _, pid := range inDir(r.workspace) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	t.Logf("%d runs: %d released, %d killed before", rounds, released, killed)
	if killed == 0 {
		t.Error("no run was killed before its release: nothing was tested")
	}
}

// inDir gives the living processes whose working directory is dir.
func inDir(dir string) (pids []int) {
	for _, p := range processes() {
		if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.pid)); err == nil && cwd == dir && !p.dead() {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

func TestServicesCommand(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("up"))).finish(0)
	pid := pidFile(t, r.workspace+"/service.pid")
	stopService(t, pid)
	task := r.one("service_released")["task_id"].(string)
	command := func(want int, args ...string) string {
		t.Helper()
		s := prepare(t, nil, args...)
		s.cmd.Env = r.cmd.Env
		s.finish(want)
		return s.out.String() + s.err.String()
	}
	// A disk that was full tore the record of an earlier run: the next one follows in its line.
	file := r.home + "/.belay/services/released.jsonl"
	whole, _ := os.ReadFile(file)
	needNil(t, os.WriteFile(file, append([]byte(`{"task_id":"shell_00000000","pid":12`), whole...), 0o600))
	if out := command(0, "services"); !strings.Contains(out, task+"  running") || !strings.Contains(out, serviceCommand) {
		t.Errorf("services: %q", out)
	}
	var listed map[string]any
	if err := json.Unmarshal([]byte(command(0, "services", "--json")), &listed); err != nil || listed["state"] != "running" || listed["pid"] != float64(pid) {
		t.Errorf("services --json: %v %v", err, listed)
	}
	if _, err := services(&config{program: "loopd", home: t.TempDir(), args: []string{"stop", "x"}}, bufio.NewWriter(io.Discard)); !strings.Contains(fmt.Sprint(err), "; loopd services lists them") {
		t.Error(err)
	}
	if out := command(1, "services", "stop", "shell_00000000"); !strings.Contains(out, "no released service") {
		t.Errorf("stop of an unknown one: %q", out)
	}
	if out := command(0, "services", "stop", task); !strings.Contains(out, "ended") || alive(pid) && !zombie(pid) {
		t.Errorf("stop: %q, alive=%v", out, alive(pid))
	}
	if out := command(0, "services", "stop", task); !strings.Contains(out, "gone") {
		t.Errorf("second stop: %q", out)
	}
}

func zombie(pid int) bool { p, ok := readProc(pid); return ok && p.dead() }

// A pid that now belongs to somebody else is not touched.
func TestReusedPidIsRefused(t *testing.T) {
	t.Parallel()
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { other.Process.Kill(); other.Wait() }()
	p, _ := readProc(other.Process.Pid)
	home := t.TempDir()
	os.MkdirAll(home+"/services", 0o700)
	for _, c := range []struct {
		name, state string
		change      func(*receipt)
		code        int
	}{
		{"start time", "pid reused", func(r *receipt) { r.StartTime++ }, 1},
		{"boot", "gone", func(r *receipt) { r.BootID = "other" }, 0},
		{"boot that was not known", "unknown", func(r *receipt) { r.BootID = "" }, 1},
		{"pid namespace", "unknown", func(r *receipt) { r.PIDNS = "pid:[1]" }, 1},
	} {
		boot, ns := place()
		rec := receipt{TaskID: "shell_00000001", PID: p.pid, PGID: p.pid, StartTime: p.start, BootID: boot, PIDNS: ns}
		c.change(&rec)
		os.WriteFile(home+"/services/released.jsonl", append(jsonOf(rec), '\n'), 0o600)
		r := prepare(t, nil, "--home", home, "services", "stop", rec.TaskID).finish(c.code)
		if out := r.out.String() + r.err.String(); !strings.Contains(out, c.state) || !alive(p.pid) {
			t.Errorf("%s: %q", c.name, out)
		}
	}
}

// Where /proc is of another PID namespace than we are (nsenter -p), the number of a
// service is somebody else's there, or nobody's: nothing is known of the service.
func TestServicesWithAnotherProc(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist("exec sleep 600")), say("up")))
	line := `"$@" && umount -l /proc && "$1" services && "$1" services stop $(cd $HOME/.belay/services && ls shell_* | cut -d . -f 1); exit $?`
	r.inNamespace(line, "--pid", "--fork", "--mount-proc").finish(1)
	if out := r.out.String() + r.err.String(); !strings.Contains(out, "  unknown  ") || !strings.Contains(out, `is not touched, its state is "unknown"`) {
		t.Errorf("services: %q", out)
	}
}

// Processes are known by number and start. Those that began with the machine, or
// where the clock of a time namespace does, have the start 0, and none of them is
// the service's.
func TestStopLeavesStartZeroAlone(t *testing.T) {
	if exec.Command("unshare", "--time", "--boottime", "-1", "true").Run() != nil {
		t.Skip("it needs root and time namespaces")
	}
	t.Parallel()
	sleeper := func() (p proc) {
		c := exec.Command("sleep", "60")
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		needNil(t, c.Start())
		go c.Wait()
		t.Cleanup(func() { c.Process.Kill() })
		p, _ = readProc(c.Process.Pid)
		return p
	}
	var zero proc
	until(t, "a process begins with a second", deadline, func() bool {
		var now unix.Timespec
		needNil(t, unix.ClockGettime(unix.CLOCK_BOOTTIME, &now))
		<-time.After(time.Duration(1_000_000_000 - now.Nsec))
		zero = sleeper()
		return zero.start%100 == 0
	})
	until(t, "the next tick", deadline, func() bool { p := sleeper(); return p.start > zero.start })
	service, home := sleeper(), t.TempDir()
	boot, ns := place()
	needNil(t, os.MkdirAll(home+"/services", 0o700))
	rec := receipt{TaskID: "shell_00000001", PID: service.pid, PGID: service.pid, StartTime: service.start - zero.start, BootID: boot, PIDNS: ns}
	needNil(t, os.WriteFile(home+"/services/released.jsonl", append(jsonOf(rec), '\n'), 0o600))
	r := prepare(t, nil, "--home", home, "services", "stop", rec.TaskID)
	r.inNamespace(`exec "$@"`, "--time", "--boottime", fmt.Sprintf("-%d", zero.start/100), "--fork").finish(0)
	if p, ok := readProc(service.pid); ok && p.start == service.start && !p.dead() {
		t.Error("the service lives")
	}
	if p, ok := readProc(zero.pid); !ok || p.start != zero.start || p.dead() {
		t.Error("a process that is not the service's was ended")
	}
}

// While a service that ignores TERM is being stopped, the number of its leader,
// which did not, may be given to the leader of somebody else's session.
func TestStopWhileTheNumberIsGivenAnew(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	home, dir := t.TempDir(), t.TempDir()
	boot, _ := place()
	rec := receipt{TaskID: "shell_00000001", BootID: boot, PIDNS: "NS", Command: "c"}
	line := strings.NewReplacer(`"pid":0`, `"pid":'$pid'`, `"start_time":0`, `"start_time":'$start'`, "NS", `'$(readlink /proc/self/ns/pid)'`).Replace(string(jsonOf(rec)))
	r := prepare(t, nil, "--home", home, "services", "stop", rec.TaskID)
	r.inNamespace(`cd `+dir+`; mkdir `+home+`/services
setsid sh -c 'echo $$ > pid; setsid sh -c "trap \"\" TERM; echo > ready; sleep 60; sleep 60" & sleep 60 & wait' > /dev/null 2>&1 &
until test -s pid && test -e ready; do sleep 0.02; done
pid=$(cat pid); start=$(cut -d ' ' -f 22 /proc/$pid/stat)
echo '`+line+`' > `+home+`/services/released.jsonl
{ while test -d /proc/$pid && ! grep -q ') Z' /proc/$pid/stat; do sleep 0.02; done
  for i in 1 2 3 4 5 6 7 8 9; do test -d /proc/$pid/task && break; echo $((pid-1)) > /proc/sys/kernel/ns_last_pid; setsid sleep 600 & done
  test $! = $pid && echo anew; } > anew 2>&1 &
"$@"; code=$?; cat anew; test -d /proc/$pid && echo lives; exit $code`, "--pid", "--fork", "--mount-proc").start()
	if code, text := r.wait(), r.out.String()+r.err.String(); code != 0 || !strings.HasSuffix(text, "anew\nlives\n") {
		t.Errorf("exit code %d: %s", code, text)
	}
}

// As PID 1 of a PID namespace a service cannot outlive belay.
func TestPid1RefusesPersistReapsAndEndsOnTerm(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("a PID namespace needs root here")
	}
	t.Parallel()
	p := serve(t, calls("Bash", persist(serviceCommand)), bash("setsid -f sh -c 'sleep 0.1'; kill -9 $PPID; true"), bash("sleep 1.5; ps -e -o stat= | grep -c Z || true"), hang)
	r := execRun(t, p)
	r.cmd.Args = append([]string{"unshare", "--pid", "--fork", "--mount-proc", r.cmd.Path}, r.cmd.Args[1:]...)
	path, err := exec.LookPath("unshare")
	if err != nil {
		t.Skip("no unshare")
	}
	r.cmd.Path = path
	r.start()
	until(t, "the fourth request", deadline, func() bool { return p.count() == 4 })
	for _, q := range processes() {
		if q.ppid == r.cmd.Process.Pid {
			syscall.Kill(q.pid, syscall.SIGTERM)
		}
	}
	if code := r.wait(); code != 143 {
		t.Errorf("exit code %d\n%s", code, r.err.String())
	}
	results := r.events("tool_result")
	if !strings.Contains(results[0]["output"].(string), "PID 1") || !strings.HasPrefix(results[2]["output"].(string), "0\n") {
		t.Errorf("results: %v\n%v", results[0], results[2])
	}
}

func TestHomeThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"read-only", "missing", "unset"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("up")))
			switch kind {
			case "read-only":
				os.Mkdir(r.home+"/.belay", 0o500)
				os.Chown(r.home+"/.belay", 0, 0)
				if os.Getuid() == 0 {
					r.as(nobodyID)
				}
			case "missing":
				r.cmd.Env = append(r.cmd.Env, "HOME=/nonexistent/home")
				if os.Getuid() == 0 {
					r.as(nobodyID)
				}
			case "unset":
				r.cmd.Env = slices.DeleteFunc(r.cmd.Env, func(kv string) bool { return strings.HasPrefix(kv, "HOME=") })
			}
			r.finish(0)
			e := r.one("service_released")
			stopService(t, int(e["pid"].(float64)))
			if e["log"] != "/dev/null" || len(r.events("notice")) == 0 {
				t.Errorf("receipt %v, notices %v", e, r.events("notice"))
			}
		})
	}
}

// Nor is anything known of it in a namespace below its own (unshare -p) with the
// /proc of that: it shows the service, and its number means somebody else here.
func TestServicesBelowTheirNamespace(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist("exec sleep 600")), say("up")))
	line := `"$@" && unshare --pid --fork sh -c '"$0" services; exec "$0" services stop $(cd $HOME/.belay/services && ls shell_* | cut -d . -f 1)' "$1"; exit $?`
	r.inNamespace(line, "--pid", "--fork", "--mount-proc").finish(1)
	if out := r.out.String() + r.err.String(); !strings.Contains(out, "  unknown  ") || !strings.Contains(out, `is not touched, its state is "unknown"`) {
		t.Errorf("services: %q", out)
	}
}

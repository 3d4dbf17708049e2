//go:build linux

package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// exec_test.go runs `belay exec` against scripted servers: every tool field,
// limit and refusal, every format and exit code, every error of the command
// line and the configuration. The harness is in e2e_test.go.

// rawCall is a reply with one call whose arguments are any text.
func rawCall(tool, arguments string) string {
	return delta(map[string]any{"tool_calls": []any{map[string]any{"index": 0, "id": "call_0", "type": "function",
		"function": map[string]any{"name": tool, "arguments": arguments}}}}, nil) + delta(map[string]any{}, "tool_calls") + "data: [DONE]\n\n"
}

// answer is a handler that plays body after do.
func answer(do func() string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, do())
	}
}

// messages gives the history that request n carried.
func (p *provider) messages(n int) (all []map[string]any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list, _ := p.requests[n]["messages"].([]any)
	for _, m := range list {
		all = append(all, m.(map[string]any))
	}
	return all
}

// lastTask gives the task id that the newest request names last.
func (p *provider) lastTask() string {
	all := p.messages(p.count() - 1)
	ids := regexp.MustCompile(`shell_[0-9a-f]{8}`).FindAllString(fmt.Sprint(all), -1)
	return ids[len(ids)-1]
}

// outputs runs one reply with calls of a tool and gives their results.
func outputs(t *testing.T, workspace func(dir string), tool string, arguments ...map[string]any) []map[string]any {
	t.Helper()
	r := execRun(t, serve(t, calls(tool, arguments...), say("done")))
	if workspace != nil {
		workspace(r.workspace)
	}
	results := r.finish(0).events("tool_result")
	if len(results) != len(arguments) {
		t.Fatalf("%d results of %d calls\n%s", len(results), len(arguments), r.err.String())
	}
	return results
}

type args = map[string]any

// program is belay's name in its messages.
func (r *belayRun) program() string { return filepath.Base(r.cmd.Path) }

func TestBashArguments(t *testing.T) {
	t.Parallel()
	long := "true #" + strings.Repeat("x", commandMax-6)
	table := []struct {
		name     string
		call     args
		status   string
		category any
		exit     any
		want     string // the output begins with it
		also     string // and holds it
	}{
		{"null is absent", args{"action": nil, "command": "echo hi", "timeout_ms": nil, "background": nil, "persist": nil, "stdin": nil, "cwd": nil, "task_id": nil, "all": nil}, "success", nil, 0.0, "hi\nexit code 0", ""},
		{"number for text", args{"command": 5}, "error", "invalid_input", nil, `command must be {"type":"string"`, ""},
		{"text for boolean", args{"command": "true", "background": "yes"}, "error", "invalid_input", nil, `background must be {"type":"boolean"`, ""},
		{"text for integer", args{"command": "true", "timeout_ms": "5000"}, "error", "invalid_input", nil, `timeout_ms must be {"type":"integer"`, ""},
		{"fraction", args{"command": "true", "timeout_ms": 1500.5}, "error", "invalid_input", nil, `timeout_ms must be {"type":"integer"`, ""},
		{"clamped from nothing", args{"command": "echo hi", "timeout_ms": 0}, "success", nil, 0.0, "hi\nexit code 0", "(timeout_ms 0 was taken as 1000: 1000 to 600000 are possible)"},
		{"clamped from below zero", args{"command": "echo hi", "timeout_ms": -1}, "success", nil, 0.0, "hi\nexit code 0", "(timeout_ms -1 was taken as 1000: 1000 to 600000 are possible)"},
		{"list for text", args{"command": []any{"true"}}, "error", "invalid_input", nil, `command must be {"type":"string"`, ""},
		{"unknown action", args{"action": "stop"}, "error", "invalid_input", nil, "action must be one of run, wait, cancel", ""},
		{"a comma for an action", args{"action": ",", "all": true}, "error", "invalid_input", nil, "action must be one of run, wait, cancel", ""},
		{"unknown arguments are named", args{"command": "echo hi", "zeal": 1, "colour": "red"}, "success", nil, 0.0, "hi\nexit code 0", "(unknown arguments ignored: colour, zeal)"},
		{"clamped from below", args{"command": "echo hi", "timeout_ms": 5}, "success", nil, 0.0, "hi\nexit code 0", "(timeout_ms 5 was taken as 1000: 1000 to 600000 are possible)"},
		{"clamped from above", args{"command": "echo hi", "timeout_ms": 9999999}, "success", nil, 0.0, "hi\nexit code 0", "(timeout_ms 9999999 was taken as 600000"},
		{"clamped from far above", args{"command": "echo hi", "timeout_ms": 1e12}, "success", nil, 0.0, "hi\nexit code 0", "(timeout_ms 1000000000000 was taken as 600000"},
		{"a float without fraction", args{"command": "echo hi", "timeout_ms": 5000.0}, "success", nil, 0.0, "hi\nexit code 0", ""},
		{"no command", args{}, "error", "invalid_input", nil, "run needs a command", ""},
		{"blank command", args{"command": " \n"}, "error", "invalid_input", nil, "run needs a command", ""},
		{"cwd", args{"command": "pwd", "cwd": "sub"}, "success", nil, 0.0, "", "/sub\nexit code 0"},
		{"cwd missing", args{"command": "pwd", "cwd": "/nowhere/at/all"}, "error", "execution_failed", nil, "cannot start /bin/sh with cwd /nowhere/at/all: no such file", ""},
		{"cwd is a file", args{"command": "pwd", "cwd": "file"}, "error", "execution_failed", nil, "cannot start /bin/sh with cwd ", "/file: not a directory"},
		{"longest command", args{"command": long}, "success", nil, 0.0, "(no output)\nexit code 0", ""},
		{"longer command", args{"command": long + "x"}, "error", "execution_failed", nil, "the command has 131072 bytes, at most 131071", ""},
		{"command begins with a dash", args{"command": "-e; echo $?"}, "success", nil, 0.0, "", "exit code 0"},
		{"NUL in a command", args{"command": "echo \x00"}, "error", "execution_failed", nil, "cannot start /bin/sh", ""},
		{"exit code", args{"command": "exit 3"}, "error", "exit_status", 3.0, "(no output)\nexit code 3", ""},
		{"signal", args{"command": "kill -SEGV $$"}, "error", "exit_status", nil, "", "killed by SIGSEGV"},
		{"timeout", args{"command": "echo a; sleep 30", "timeout_ms": 1000}, "error", "timeout", nil, "a\ntimed out after 1000 ms; for long work use background:true", ""},
		{"invalid UTF-8", args{"command": `printf 'a\377b'`}, "success", nil, 0.0, "a\uFFFDb\nexit code 0", ""},
		{"no stdin", args{"command": "cat; cat"}, "success", nil, 0.0, "(no output)\nexit code 0", ""},
		{"stdin", args{"command": "cat", "stdin": "x\ny"}, "success", nil, 0.0, "x\ny\nexit code 0", ""},
		{"stdin that nobody reads", args{"command": "exec sleep 0.1", "stdin": strings.Repeat("x", 1<<20)}, "success", nil, 0.0, "(no output)\nexit code 0", ""},
		{"one stream in order", args{"command": "echo 1; echo 2 >&2; echo 3"}, "success", nil, 0.0, "1\n2\n3\nexit code 0", ""},
		{"output that stays open", args{"command": "setsid sh -c 'trap \"\" TERM; sleep 60' & echo out"}, "success", nil, 0.0, "out\nexit code 0", "had left running were ended"},
		{"wait for what is not there", args{"action": "wait", "task_id": "shell_00000000"}, "error", "invalid_input", nil, `there is no task "shell_00000000"`, ""},
		{"cancel what is not there", args{"action": "cancel"}, "error", "invalid_input", nil, "there is no task", ""},
		{"cancel all of none", args{"action": "cancel", "all": true}, "success", nil, nil, "0 tasks ended", ""},
	}
	var all []args
	for _, c := range table {
		all = append(all, c.call)
	}
	results := outputs(t, func(dir string) {
		os.Mkdir(dir+"/sub", 0o777)
		os.WriteFile(dir+"/file", nil, 0o666)
	}, "Bash", all...)
	for i, c := range table {
		e := results[i]
		out := e["output"].(string)
		if e["status"] != c.status || e["error_category"] != c.category || e["exit_code"] != c.exit || !strings.HasPrefix(out, c.want) || !strings.Contains(out, c.also) {
			t.Errorf("%s: %v", c.name, e)
		}
	}
}

func TestArgumentsThatAreNoObject(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{"[1]", "not json", `{"command":"true"`, `"text"`, "5"} {
		t.Run(raw, func(t *testing.T) {
			t.Parallel()
			r := execRun(t, serve(t, rawCall("Bash", raw), say("done"))).finish(0)
			if use, e := r.one("tool_use"), r.one("tool_result"); use["input"] != raw || e["status"] != "error" || !strings.Contains(e["output"].(string), "no JSON object") {
				t.Errorf("%v\n%v", use, e)
			}
		})
	}
}

// A number that no float64 holds is a number all the same, of the wrong type.
func TestNumberOutOfRangeIsRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"cwd", "stdin", "background", "timeout_ms"} {
		r := execRun(t, serve(t, rawCall("Bash", `{"command":"touch ran","`+name+`":1e400}`), say("done"))).finish(0)
		// Go's decoder takes no event with such a number, hence a look at the text.
		if _, err := os.Stat(r.workspace + "/ran"); err == nil || !strings.Contains(r.out.String(), "or hold a number out of range") {
			t.Errorf("%s: ran %v: %s", name, err == nil, r.out.String())
		}
	}
}

func TestUnknownToolAndMissingArgument(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Fly", args{"to": "x"}), calls("Read", args{}), calls("Edit", args{"path": "x", "old": "a"}), say("done"))).finish(0)
	for i, want := range []string{`there is no tool "Fly"; the tools are Bash, Edit, Read, Write`, `path is missing; Read needs ["path"]`, `new is missing; Edit needs ["path","old","new"]`} {
		if e := r.events("tool_result")[i]; e["status"] != "error" || e["output"] != want {
			t.Errorf("%v, want %s", e, want)
		}
	}
}

func TestShellOfTheCaller(t *testing.T) {
	t.Parallel()
	for shell, want := range map[string]string{"/bin/bash": "bash", "/usr/bin/fish": "sh", "": "sh"} {
		if _, err := os.Stat("/bin/bash"); err != nil && want == "bash" {
			continue
		}
		r := execRun(t, serve(t, bash("cat /proc/$$/comm; :"), say("done")))
		r.cmd.Env = append(r.cmd.Env, "SHELL="+shell)
		if out := r.finish(0).one("tool_result")["output"]; !strings.HasPrefix(out.(string), want+"\n") {
			t.Errorf("SHELL=%s: %v", shell, out)
		}
	}
	r := execRun(t, serve(t, bash("true"), say("done")))
	r.cmd.Env = append(r.cmd.Env, "SHELL=/nowhere/bash")
	if out := r.finish(0).one("tool_result")["output"].(string); !strings.Contains(out, "cannot start /nowhere/bash") {
		t.Errorf("missing shell: %s", out)
	}
}

// wait gives only what came since the last one, and cancel ends the task.
func TestBackgroundWaitAndCancel(t *testing.T) {
	t.Parallel()
	var p *provider
	var r *belayRun
	task := ""
	wait := func(ms int) func(http.ResponseWriter, *http.Request) {
		return answer(func() string { return calls("Bash", args{"action": "wait", "task_id": task, "timeout_ms": ms}) })
	}
	p = serve(t, calls("Bash", args{"command": "echo one; until test -e go; do sleep 0.02; done; echo two", "background": true}),
		answer(func() string {
			task = p.lastTask()
			return calls("Bash", args{"action": "wait", "task_id": task, "timeout_ms": 1000})
		}),
		answer(func() string {
			os.WriteFile(r.workspace+"/go", nil, 0o666)
			return calls("Bash", args{"action": "wait", "task_id": task})
		}),
		wait(1000),
		calls("Bash", args{"command": "echo $$ > pid; exec sleep 100", "background": true}),
		answer(func() string {
			task = p.lastTask()
			pidFile(t, r.workspace+"/pid")
			return calls("Bash", args{"action": "cancel", "task_id": task}, args{"action": "wait", "task_id": task}, args{"action": "cancel", "task_id": task})
		}), say("done"))
	r = execRun(t, p)
	r.finish(0)
	for i, want := range []string{`^started in the background as shell_[0-9a-f]{8} \(pid [0-9]+\); it ends with this run$`, `^one\nstill running after [0-9.]+m?s$`, `^two\nexit code 0$`, `^\(no output\)\nexit code 0$`,
		`^started`, `^1 tasks ended$`, `^\(no output\)\ncancelled$`} {
		if out := r.events("tool_result")[i]["output"].(string); !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("result %d: %q, want %s", i, out, want)
		}
	}
	if pid := pidFile(t, r.workspace+"/pid"); alive(pid) {
		t.Errorf("the cancelled task %d is alive", pid)
	}
}

// memoryOf gives the peak memory of a process in KiB. Not by rusage: that of a
// child includes what the parent had when it forked.
func memoryOf(pid int) int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(b)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(string(m[1]))
	return n
}

func TestGigabyteOfOutput(t *testing.T) {
	t.Parallel()
	var p *provider
	var r *belayRun
	path, size, peak := "", int64(0), 0
	p = serve(t, bash(`head -c 1073741824 /dev/zero | tr '\0' x`), answer(func() string {
		peak = memoryOf(r.cmd.Process.Pid)
		all := p.messages(1)
		path = regexp.MustCompile(`/\S*/belay-[0-9a-f]{8}/shell_[0-9a-f]{8}\.out`).FindString(all[len(all)-1]["content"].(string))
		if fi, err := os.Stat(path); err == nil {
			size = fi.Size()
		}
		return calls("Bash", args{"command": "head -c 5 " + path})
	}), say("done"))
	r = execRun(t, p)
	r.finish(0)
	e := r.events("tool_result")
	out := e[0]["output"].(string)
	if n := strings.Count(out, "x"); n != headKeep+tailKeep+strings.Count(path, "x")+strings.Count("exit", "x") || len(out) > headKeep+tailKeep+500 {
		t.Errorf("%d bytes, %d of them output", len(out), n)
	}
	if !strings.Contains(out, fmt.Sprintf("\n… %d bytes left out …\n", 1<<30-headKeep-tailKeep)) || e[0]["truncated"] != true || e[0]["output_path"] != path {
		t.Errorf("truncated=%v path=%v, end %q", e[0]["truncated"], e[0]["output_path"], out[len(out)-200:])
	}
	if size != spillMax || !strings.HasPrefix(e[1]["output"].(string), "xxxxx\nexit code 0") {
		t.Errorf("file of %d bytes, read as %v", size, e[1]["output"])
	}
	if _, err := os.Stat(filepath.Dir(path)); !os.IsNotExist(err) {
		t.Errorf("the scratch directory is there after the run: %v", err)
	}
	t.Logf("peak memory %d KiB", peak)
	if peak == 0 || peak > 32<<10 {
		t.Errorf("peak memory %d KiB, want at most 32 MiB", peak)
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	results := outputs(t, func(dir string) {
		os.WriteFile(dir+"/three", []byte("a\nb\r\nc"), 0o666)
		os.WriteFile(dir+"/empty", nil, 0o666)
		os.WriteFile(dir+"/binary", []byte("a\x00b"), 0o666)
		os.WriteFile(dir+"/latin", []byte("a\xffb\n"), 0o666)
		os.WriteFile(dir+"/many", bytes.Repeat([]byte("line\n"), 3000), 0o666)
		os.WriteFile(dir+"/wide", bytes.Repeat([]byte("é"), 60<<10), 0o666)
		syscall.Mkfifo(dir+"/fifo", 0o666)
		os.Symlink("/proc/self/environ", dir+"/link")
		os.Truncate(dir+"/empty", 0)
		os.WriteFile(dir+"/huge", nil, 0o666)
		os.Truncate(dir+"/huge", fileMax+1)
	}, "Read", args{"path": "three"}, args{"path": "three", "offset": 2, "limit": 1}, args{"path": "three", "offset": 9}, args{"path": "empty"}, args{"path": "binary"}, args{"path": "latin"},
		args{"path": "many"}, args{"path": "wide"}, args{"path": "fifo"}, args{"path": "/proc/self/environ"}, args{"path": "link"}, args{"path": "."}, args{"path": "/dev/zero"}, args{"path": "missing"}, args{"path": "huge"},
		args{"path": "three", "limit": 1e300}, args{"path": "three", "extra": 1})
	for i, want := range []string{`^     1\ta\n     2\tb\n     3\tc\n$`, `^     2\tb\n… lines 3 to 3 follow`, `has only 3 lines$`, `^$`, `is a binary file$`, "^     1\ta\uFFFDb\n$",
		`(?s)^     1\tline\n.*  2000\tline\n… lines 2001 to 3000 follow`, `^     1\té+\n… cut in line 1 of 1`, `no regular file, or lies in /proc: refused$`, `no regular file, or lies in /proc: refused$`,
		`no regular file, or lies in /proc: refused$`, `no regular file`, `no regular file`, `no such file or directory$`, `has 67108865 bytes, at most 67108864 can be read`, `^limit must be {"type":"integer"`, `unknown arguments ignored: extra`} {
		out := results[i]["output"].(string)
		refused := !strings.HasPrefix(out, "     ") && out != ""
		if !regexp.MustCompile(want).MatchString(out) || (results[i]["status"] == "error") != refused || len(out) > readBytes+200 {
			t.Errorf("Read %d: %s %.300q, want %s", i, results[i]["status"], out, want)
		}
	}
}

func TestWriteAndEdit(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Write", args{"path": "a/b/new", "content": "one\n"}, args{"path": "script", "content": "two\n"}, args{"path": "link", "content": "three\n"}, args{"path": "dangling", "content": "x"},
		args{"path": "directory", "content": "x"}, args{"path": "fifo", "content": "x"}, args{"path": "/proc/self/comm", "content": "x"}, args{"path": "none"}),
		calls("Edit", args{"path": "edited", "old": "nowhere", "new": "x"}, args{"path": "edited", "old": "twice", "new": "x"}, args{"path": "edited", "old": "twice", "new": "2", "all": true}, args{"path": "edited", "old": "once", "new": "1"},
			args{"path": "edited", "old": "", "new": "x"}, args{"path": "edited", "old": "1", "new": "1"}, args{"path": "missing", "old": "1", "new": "2"}, args{"path": "fifo", "old": "1", "new": "2"}), say("done")))
	w := r.workspace
	os.WriteFile(w+"/script", []byte("old\n"), 0o600)
	os.Chmod(w+"/script", 0o750)
	os.WriteFile(w+"/target", []byte("old\n"), 0o640)
	os.Symlink("target", w+"/link")
	os.Symlink("nowhere", w+"/dangling")
	os.Mkdir(w+"/directory", 0o777)
	syscall.Mkfifo(w+"/fifo", 0o666)
	os.WriteFile(w+"/edited", []byte("twice once twice\n"), 0o711)
	if os.Getuid() == 0 {
		os.Chown(w+"/script", nobodyID, nobodyID)
	}
	old, err := os.Open(w + "/script")
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	r.finish(0)
	for i, want := range []string{"wrote 4 bytes", "wrote 4 bytes", "wrote 6 bytes", "no regular file", "no regular file", "no regular file", "cannot write /proc/", "content is missing",
		"old occurs 0 times", "old occurs 2 times in", "replaced 2 occurrences", "replaced 1 occurrences", "old must not be empty", "new must differ", "no such file", "no regular file"} {
		if e := r.events("tool_result")[i]; !strings.Contains(e["output"].(string), want) || (e["status"] == "success") != (strings.HasPrefix(want, "wrote") || strings.HasPrefix(want, "replaced")) {
			t.Errorf("call %d: %v, want %s", i, e, want)
		}
	}
	for name, want := range map[string]string{"a/b/new": "one\n", "script": "two\n", "target": "three\n", "edited": "2 1 2\n"} {
		if b, _ := os.ReadFile(filepath.Join(w, name)); string(b) != want {
			t.Errorf("%s holds %q", name, b)
		}
	}
	if b, _ := io.ReadAll(old); string(b) != "old\n" {
		t.Errorf("the open old file holds %q: it was not replaced but overwritten", b)
	}
	for name, want := range map[string]os.FileMode{"script": 0o750, "target": 0o640, "edited": 0o711} {
		if fi, err := os.Stat(filepath.Join(w, name)); err != nil || fi.Mode() != want {
			t.Errorf("%s has mode %v (%v), want %v", name, fi.Mode(), err, want)
		} else if name == "script" && os.Getuid() == 0 && fi.Sys().(*syscall.Stat_t).Uid != nobodyID {
			t.Errorf("%s has changed its owner", name)
		}
	}
	if to, err := os.Readlink(w + "/link"); err != nil || to != "target" {
		t.Errorf("the link is %q, %v", to, err)
	}
	if left, _ := filepath.Glob(w + "/.belay-*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// -- exit codes --

func TestExitCodes(t *testing.T) {
	t.Parallel()
	overloaded := status(503, `{"error":{"message":"overloaded"}}`)
	for _, c := range []struct {
		name    string
		code    int
		args    []string
		replies []any
		signal  syscall.Signal
		meta    string // status and category
	}{
		{"complete", 0, nil, []any{say("done")}, 0, "completed <nil>"},
		{"refused", 1, nil, []any{status(401, `{"error":{"message":"no"}}`)}, 0, "failed auth"},
		{"rate limit", 75, nil, []any{status(429, `{"error":{"message":"slow down"}}`)}, 0, "failed rate_limit"},
		{"quota", 1, nil, []any{status(429, `{"error":{"message":"You exceeded your current quota","code":"insufficient_quota"}}`)}, 0, "failed billing"},
		{"overloaded", 75, nil, []any{overloaded}, 0, "failed overloaded"},
		{"cut", 75, nil, []any{delta(args{"content": "half"}, nil)}, 0, "failed truncated"},
		{"stall", 75, []string{"--set", "limits.liveness_ms=100"}, []any{hang}, 0, "failed stall"},
		{"empty", 75, nil, []any{say("")}, 0, "failed empty"},
		{"web page", 1, nil, []any{"<html><title>login</title></html>"}, 0, "failed not_sse"},
		{"timeout", 124, []string{"--timeout", "300ms"}, []any{hang}, 0, "failed timeout"},
		{"timeout of a tool", 124, []string{"--timeout", "300ms"}, []any{bash("sleep 60")}, 0, "failed timeout"},
		{"SIGHUP", 129, nil, []any{hang}, syscall.SIGHUP, "interrupted interrupted"},
		{"SIGINT", 130, nil, []any{hang}, syscall.SIGINT, "interrupted interrupted"},
		{"SIGTERM", 143, nil, []any{hang}, syscall.SIGTERM, "interrupted interrupted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := serve(t, c.replies...)
			r := execRun(t, p, c.args...).start()
			if c.signal != 0 {
				until(t, "the request", deadline, func() bool { return p.count() > 0 })
				r.cmd.Process.Signal(c.signal)
			}
			if code := r.wait(); code != c.code || r.cmd.ProcessState.Exited() == false {
				t.Fatalf("exit code %d, want %d\n%s\n%s", code, c.code, r.out.String(), r.err.String())
			}
			m := r.meta()
			if got := fmt.Sprint(m["status"], " ", m["error_category"]); got != c.meta || m["exit_code"] != float64(c.code) {
				t.Errorf("%s, want %s: %v", got, c.meta, m)
			}
			all := r.events("")
			last := []any{all[len(all)-2]["type"], all[len(all)-1]["type"]}
			if c.code != 0 {
				e := r.one("error")
				last = append([]any{all[len(all)-3]["type"]}, last...)
				if e["error"] != m["error"] || e["error_category"] != m["error_category"] || last[0] != "error" {
					t.Errorf("error %v, metadata %v, last lines %v", e, m, last)
				}
			}
		})
	}
}

// The reader that has left before the first line, and a full disk: neither is a success.
func TestStdoutThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	for _, format := range []string{"stream-json", "json", "text"} {
		for _, kind := range []string{"no reader", "full"} {
			t.Run(format+"/"+kind, func(t *testing.T) {
				t.Parallel()
				r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), bash("until test -s service.pid; do sleep 0.02; done"), say("done")), "--output-format", format)
				want := 141
				read, write, err := os.Pipe()
				if kind == "full" {
					want = 1
					write, err = os.OpenFile("/dev/full", os.O_WRONLY, 0)
				}
				if err != nil {
					t.Fatal(err)
				}
				read.Close()
				r.cmd.Stdout = write
				r.finish(want)
				write.Close()
				b, _ := os.ReadFile(r.workspace + "/service.pid")
				if pid, _ := strconv.Atoi(strings.TrimSpace(string(b))); pid > 0 && alive(pid) {
					stopService(t, pid)
					t.Errorf("the service %d is alive", pid)
				}
			})
		}
	}
}

// A prompt that is awaited on stdin does not make belay deaf to signals.
func TestSignalWhileThePromptIsAwaited(t *testing.T) {
	t.Parallel()
	p := serve(t, say("done"))
	r := execRun(t, p)
	r.cmd.Args[len(r.cmd.Args)-1] = "-"
	in, err := r.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	r.start()
	until(t, "belay waits for its stdin", deadline, func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
		return bytes.Contains(b, []byte("("+r.program()+") S"))
	})
	r.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-r.waited:
	case <-time.After(leftWait):
		t.Error("belay did not end on SIGTERM")
	}
}

func TestPromptFromStdin(t *testing.T) {
	t.Parallel()
	p := serve(t, say("done"))
	for text, code := range map[string]int{"do this\n": 0, "": 2, " \n": 2} {
		r := execRun(t, p, "--record", filepath.Join(t.TempDir(), "tape"))
		r.cmd.Args[len(r.cmd.Args)-1], r.cmd.Stdin = "-", strings.NewReader(text)
		r.finish(code)
		if code == 2 && (r.out.Len() > 0 || r.err.String() != r.program()+": the prompt on stdin: it is empty or blank\n") {
			t.Errorf("%s%s", r.out.String(), r.err.String())
		}
	}
	if all := p.messages(0); p.count() != 1 || all[1]["content"] != "do this\n" {
		t.Errorf("%d requests, %v", p.count(), all)
	}
}

// stuck gives a pipe that takes nothing.
func stuck(t *testing.T) (read, write *os.File) {
	t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { read.Close() })
	fd := int(write.Fd()) // once: each call makes it blocking
	syscall.SetNonblock(fd, true)
	for n := 4096; n > 0; n /= 2 {
		for err = nil; err == nil; {
			_, err = syscall.Write(fd, bytes.Repeat([]byte("\n"), n))
		}
	}
	syscall.SetNonblock(fd, false)
	return read, write
}

// A stdout or stderr that stands still holds up neither a signal nor --timeout.
func TestReaderThatStandsStill(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		format, stream string
		code           int
	}{{"stream-json", "stdout", 124}, {"stream-json", "stdout", 143}, {"json", "stdout", 143}, {"text", "stdout", 143}, {"text", "stderr", 143}, {"text", "stderr", 124}} {
		t.Run(fmt.Sprint(c.format, " ", c.stream, " ", c.code), func(t *testing.T) {
			t.Parallel()
			tag := newTag(t)
			self, _ := os.Executable()
			args := []string{"--output-format", c.format}
			if c.code == 124 {
				args = append(args, "--timeout", "1500ms")
			}
			p := serve(t, calls("Bash", args_(self+" victim "+tag+" daemon; "+self+" victim "+tag+" plain", true)), bash("exit 1"), say("done"))
			r := execRun(t, p, args...)
			_, write := stuck(t)
			if c.stream == "stdout" {
				r.cmd.Stdout = write
			} else {
				r.cmd.Stderr = write
			}
			r.start()
			write.Close()
			if c.code == 143 {
				until(t, "it is about to write", deadline, func() bool {
					return c.stream == "stderr" && len(tagged(tag)) > 0 || c.stream == "stdout" && (c.format == "stream-json" || p.count() == 3)
				})
				<-time.After(300 * time.Millisecond) // nothing shows that it is stuck
				r.cmd.Process.Signal(syscall.SIGTERM)
			}
			r.endsWith(c.code)
			noneLeft(t, tag)
		})
	}
}

// endsWith waits for a run that may be stuck, and kills it then.
func (r *belayRun) endsWith(want int) {
	r.t.Helper()
	select {
	case <-r.waited:
	case <-time.After(leftWait):
		r.t.Error("belay did not end")
		r.cmd.Process.Kill()
		<-r.waited
	}
	if code := r.cmd.ProcessState.ExitCode(); code != want {
		r.t.Errorf("exit code %d, want %d", code, want)
	}
}

// terminal gives both ends of one: what is written to the second, nobody reads.
func terminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	needNil(t, err)
	t.Cleanup(func() { master.Close() })
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	needNil(t, err)
	needNil(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	needNil(t, err)
	return master, slave
}

// A terminal that stands still says that it takes a line, and takes a part of it.
// That holds up neither a signal nor --timeout.
func TestTerminalThatStandsStill(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	many := make([]map[string]any, 1500) // each is refused, with a long line
	for i := range many {
		many[i] = map[string]any{"action": "wait", "task_id": "none"}
	}
	for _, c := range []struct {
		stream string
		code   int
	}{{"stdout", 124}, {"stdout", 143}, {"stderr", 124}, {"stderr", 143}} {
		t.Run(fmt.Sprint(c.stream, " ", c.code), func(t *testing.T) {
			t.Parallel()
			p := serve(t, calls("Bash", many...), say(strings.Repeat("word ", 40_000)))
			r := execRun(t, p, "--output-format", "text", "--timeout", map[int]string{124: "5s", 143: "1h"}[c.code])
			_, slave := terminal(t)
			if c.stream == "stdout" {
				r.cmd.Stdout = slave
			} else {
				r.cmd.Stderr = slave
			}
			r.start()
			slave.Close()
			if c.code == 143 {
				<-time.After(5 * time.Second) // nothing shows that it is stuck
				r.cmd.Process.Signal(syscall.SIGTERM)
			}
			r.endsWith(c.code)
		})
	}
}

func args_(command string, background bool) args {
	return args{"command": command, "background": background}
}

// The last lines wait for a stderr that stands still together, not one by one for each service.
func TestStderrThatStandsStillAtTheEnd(t *testing.T) {
	t.Parallel()
	p := serve(t, append(slices.Repeat([]any{calls("Bash", persist("exec sleep 600"))}, maxPending), hang)...)
	r := execRun(t, p, "--output-format", "text")
	_, r.cmd.Stderr = stuck(t)
	r.start()
	until(t, "all services are pending", deadline, func() bool { return p.count() == maxPending+1 })
	began := time.Now()
	r.cmd.Process.Signal(syscall.SIGTERM)
	if code, took := r.wait(), time.Since(began); code != 143 || took > 5*time.Second {
		t.Errorf("code %d after %s, want 143 after the teardown and a second at most", code, took)
	}
}

// A json object or an answer that was not taken whole when a signal came is not
// completed afterwards: it would say completed although the services were ended.
func TestSignalWhileTheResultIsWritten(t *testing.T) {
	t.Parallel()
	p := serve(t, calls("Bash", persist(serviceCommand)), bash("until test -s service.pid; do sleep 0.02; done"), say(strings.Repeat("word ", 40_000)))
	r := execRun(t, p, "--output-format", "json")
	read := r.piped()
	pid := pidFile(t, r.workspace+"/service.pid")
	until(t, "the receipt is recorded", deadline, func() bool {
		b, _ := os.ReadFile(r.home + "/.belay/services/released.jsonl")
		return len(b) > 0
	})
	first := make([]byte, 1)
	read.Read(first) // it is being written
	r.cmd.Process.Signal(syscall.SIGTERM)
	rest := make(chan []byte)
	go func() { b, _ := io.ReadAll(read); rest <- b }()
	code := r.wait()
	b := append(first, <-rest...)
	if code == 0 { // the reader was faster than the signal
		stopService(t, pid)
		if !json.Valid(b) || !alive(pid) {
			t.Errorf("exit code 0, service alive=%v, valid=%v", alive(pid), json.Valid(b))
		}
		return
	}
	if line, _, whole := bytes.Cut(b, []byte("\n")); code != 143 || alive(pid) || whole && json.Valid(line) && bytes.Contains(line, []byte(`"completed"`)) {
		t.Errorf("exit code %d, service alive=%v, %d bytes ending in %q", code, alive(pid), len(b), b[max(0, len(b)-400):])
	}
}

// A service that ends while stdout waits for its reader is not released: no
// receipt stands in the output of a run that exits with 0.
func TestServiceEndsWhileStdoutWaits(t *testing.T) {
	t.Parallel()
	command := "trap '' TERM; echo $$ > service.pid; until test -e stop; do sleep 0.02; done"
	for _, format := range []string{"json", "text"} {
		for _, how := range []string{"exits", "keeper gets SIGTERM", "keeper gets SIGKILL"} {
			t.Run(format+"/"+how, func(t *testing.T) {
				t.Parallel()
				r := execRun(t, serve(t, calls("Bash", persist(command)), bash("until test -s service.pid; do sleep 0.02; done"), say("done")), "--output-format", format)
				read, write := stuck(t)
				r.cmd.Stdout = write
				r.start()
				write.Close()
				pid := pidFile(t, r.workspace+"/service.pid")
				stopService(t, pid)
				until(t, "the receipt is recorded", deadline, func() bool {
					b, _ := os.ReadFile(r.home + "/.belay/services/released.jsonl")
					return len(b) > 0
				})
				switch p, _ := readProc(pid); how {
				case "exits":
					needNil(t, os.WriteFile(r.workspace+"/stop", nil, 0o644))
				case "keeper gets SIGTERM":
					syscall.Kill(p.ppid, syscall.SIGTERM)
				default:
					syscall.Kill(p.ppid, syscall.SIGKILL)
				}
				until(t, "the service has ended", deadline, func() bool { return !alive(pid) })
				b, _ := io.ReadAll(read)
				if code := r.wait(); code != 1 || !strings.Contains(r.err.String()+string(b), "a service ended before it was let go") || strings.Contains(r.err.String()+string(b), "process_group_id") {
					t.Errorf("exit code %d\n%s%s", code, bytes.TrimLeft(b, "\n"), r.err.String())
				}
				if list, err := receipts(r.home + "/.belay"); err != nil || len(list) > 0 {
					t.Errorf("recorded: %v %v", list, err)
				}
			})
		}
	}
}

// The same while stderr, where the text format has its receipts, waits: they died
// before the first of them was out.
func TestServiceEndsWhileStderrWaits(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist("echo $$ > 0.pid; exec sleep 600"), persist("echo $$ > 1.pid; exec sleep 600")),
		bash("until test -s 0.pid -a -s 1.pid; do sleep 0.02; done"), say("done")), "--output-format", "text")
	stderr, write := stuck(t)
	r.cmd.Stderr = write
	stdout := r.piped()
	write.Close()
	io.ReadFull(stdout, make([]byte, len("done\n"))) // the receipts are next
	first, second := pidFile(t, r.workspace+"/0.pid"), pidFile(t, r.workspace+"/1.pid")
	stopService(t, first)
	stopService(t, second)
	syscall.Kill(first, syscall.SIGKILL)
	syscall.Kill(second, syscall.SIGKILL)
	until(t, "the services have ended", deadline, func() bool { return !alive(first) && !alive(second) })
	b, _ := io.ReadAll(stderr)
	if code := r.wait(); code != 1 || !bytes.Contains(b, []byte("a service ended before it was let go")) {
		t.Errorf("exit code %d\n%s", code, bytes.TrimLeft(b, "\n"))
	}
	if list, err := receipts(r.home + "/.belay"); err != nil || len(list) > 0 {
		t.Errorf("recorded: %v %v", list, err)
	}
}

// A keeper that dies just before the receipts go out: belay may be in the middle
// of ending its service, which must not pass for alive. Where belay has not seen
// it yet the service is let go, and is not stopped.
func TestKeeperDiesBeforeTheReceipts(t *testing.T) {
	ofTheBinary(t)
	for range 5 { // many processes make belay's look at them take long enough
		many := exec.Command("sh", "-c", "for i in $(seq 600); do sleep 60 & done; wait")
		many.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		needNil(t, many.Start())
		defer many.Wait()
		defer syscall.Kill(-many.Process.Pid, syscall.SIGKILL)
		r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), bash("until test -s service.pid; do sleep 0.02; done"), say("done")), "--output-format", "json")
		read, write := stuck(t)
		r.cmd.Stdout = write
		r.start()
		write.Close()
		pid := pidFile(t, r.workspace+"/service.pid")
		until(t, "the receipt is recorded", deadline, func() bool {
			b, _ := os.ReadFile(r.home + "/.belay/services/released.jsonl")
			return len(b) > 0
		})
		p, _ := readProc(pid)
		syscall.Kill(p.ppid, syscall.SIGKILL)
		<-time.After(5 * time.Millisecond) // until belay looks for what it left
		io.ReadAll(read)
		code := r.wait()
		q, _ := readProc(pid)
		syscall.Kill(-pid, syscall.SIGKILL)
		if released := q.start == p.start && q.state == 'S'; released != (code == 0) {
			t.Errorf("exit code %d, the service is in state %q", code, q.state)
		}
	}
}

// To remove a large scratch directory takes time. Signals in it must not end a run
// that has released its services with another code than 0, so it goes first.
func TestScratchGoesBeforeTheReceipts(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), bash("echo $TMPDIR > scratch; until test -s service.pid; do sleep 0.02; done; cd $TMPDIR; seq 20000 | xargs touch"), say("done")))
	for line := range lines(r.piped()) {
		b, _ := os.ReadFile(r.workspace + "/scratch")
		if _, err := os.Stat(strings.TrimSpace(string(b))); strings.Contains(line, `"service_released"`) && (err == nil || len(b) == 0) {
			t.Errorf("scratch %s is there beside the receipt", b)
		}
	}
	stopService(t, pidFile(t, r.workspace+"/service.pid"))
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// The text format has its receipts on stderr. Where that does not take them, no
// service stays, and a second signal meanwhile does not leave some of them.
func TestStderrThatTakesNoReceipt(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"full", "left by its reader", "stuck", "stuck, two signals"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var services []map[string]any
			for i := range 4 {
				services = append(services, persist(fmt.Sprintf("echo $$ > %d.pid; exec sleep 600", i)))
			}
			r := execRun(t, serve(t, calls("Bash", services...), bash("until test -s 0.pid -a -s 1.pid -a -s 2.pid -a -s 3.pid; do sleep 0.02; done"), say("done")), "--output-format", "text")
			taken, write := stuck(t)
			if kind == "full" {
				var err error
				write, err = os.OpenFile("/dev/full", os.O_WRONLY, 0)
				needNil(t, err)
			} else if kind == "left by its reader" {
				taken.Close()
			}
			r.cmd.Stderr = write
			read := r.piped()
			write.Close()
			want := 1
			io.ReadFull(read, make([]byte, len("done\n")))
			if kind == "stuck, two signals" {
				want = 143
				r.cmd.Process.Signal(syscall.SIGTERM)
				<-time.After(sameSignal + 100*time.Millisecond) // until another one counts
				r.cmd.Process.Signal(syscall.SIGTERM)
			}
			if code := r.wait(); code != want {
				t.Errorf("exit code %d, want %d", code, want)
			}
			for i := range services {
				stopService(t, pidFile(t, fmt.Sprintf("%s/%d.pid", r.workspace, i)))
			}
			until(t, "no service is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 })
		})
	}
}

// A stopped keeper cannot see that belay was killed: the kernel must wake it.
func TestStoppedKeeperAndKilledBelay(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			tag := newTag(t)
			self, _ := os.Executable()
			r := execRun(t, serve(t, bash(self+" victim "+tag+" daemon; kill -STOP $PPID; "+self+" victim "+tag+" plain"))).start()
			until(t, "both victims, below a stopped keeper", deadline, func() bool {
				keepers := keepersOf(r.cmd.Process.Pid)
				if len(keepers) != 1 || len(tagged(tag)) != 2 {
					return false
				}
				p, _ := readProc(keepers[0])
				return p.state == 'T'
			})
			r.cmd.Process.Signal(sig)
			r.wait()
			noneLeft(t, tag)
		})
	}
}

// A keeper that is stopped before it has started its command holds up neither
// the run nor its end. (A command may do that; here the test does, as fast.)
func TestKeepersThatAreStoppedAtTheirStart(t *testing.T) {
	t.Parallel()
	var r *belayRun
	stopped := make(chan struct{})
	p := serve(t, bash("true"), answer(func() string {
		go func() { // ends with belay, and then wakes what it stopped too late for belay to see
			defer close(stopped)
			seen := map[int]bool{}
			defer func() {
				for pid := range seen {
					if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.HasPrefix(string(name), keeperName) {
						syscall.Kill(pid, syscall.SIGCONT)
					}
				}
			}()
			for alive(r.cmd.Process.Pid) {
				b, _ := os.ReadFile("/proc/loadavg") // its last word is the newest pid
				f := strings.Fields(string(b))
				newest, _ := strconv.Atoi(f[len(f)-1])
				for pid := newest - 4; pid <= newest; pid++ {
					name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // its own from its execve(2) on
					if q, ok := readProc(pid); ok && q.ppid == r.cmd.Process.Pid && !seen[pid] && strings.HasPrefix(string(name), keeperName) {
						seen[pid] = true
						syscall.Kill(pid, syscall.SIGSTOP)
					}
				}
			}
		}()
		long := "true #" + strings.Repeat("\x01", 120_000) // as JSON more than a socket takes before the keeper reads
		return calls("Bash", args{"command": "true", "timeout_ms": 1000}, args{"command": long, "timeout_ms": 1000})
	}), say("done"))
	r = execRun(t, p)
	r.finish(0)
	<-stopped
	for _, e := range r.events("tool_result")[1:] {
		t.Logf("%v ms: %v", e["duration_ms"], e["output"])
	}
	if left := inDir(r.workspace); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A directory that its owner cannot write, as in Go's module cache, or not even read
// is removed with the scratch directory all the same, also that of a dead run, and what
// a link leads to is not.
func TestScratchThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, bash("mkdir -p $TMPDIR/mod/deep $TMPDIR/none && touch $TMPDIR/mod/deep/f && ln -s $PWD $TMPDIR/mod/link && chmod -R a-w $TMPDIR/mod && chmod 0 $TMPDIR/none && chmod 711 ."), say("done")))
	tmp := t.TempDir()
	dead := tmp + "/belay-0123abcd"
	needNil(t, errors.Join(os.MkdirAll(dead+"/mod/deep", 0o700), os.WriteFile(dead+"/mod/f", nil, 0o600), os.Symlink(r.workspace, dead+"/link")))
	if os.Chmod(tmp, 0o777); os.Getuid() == 0 { // whom no mode keeps out
		for _, path := range []string{r.workspace, dead, dead + "/mod", dead + "/mod/deep", dead + "/mod/f"} {
			needNil(t, os.Chown(path, nobodyID, nobodyID))
		}
		r.as(nobodyID)
	}
	needNil(t, errors.Join(os.Chmod(dead+"/mod/deep", 0), os.Chmod(dead+"/mod", 0o500)))
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+tmp)
	r.finish(0)
	if left, _ := filepath.Glob(tmp + "/*"); len(left) > 0 || r.one("tool_result")["status"] != "success" {
		t.Errorf("left %v, %v", left, r.one("tool_result"))
	}
	if fi, err := os.Stat(r.workspace); err != nil || fi.Mode().Perm() != 0o711 {
		t.Errorf("the workspace is %v %v", fi.Mode(), err)
	}
}

// A directory of the user is no leftover of a dead run, whatever its name, nor is one of
// another user.
func TestScratchLeavesOtherDirectoriesAlone(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, bash("echo $TMPDIR"), say("done")))
	tmp := t.TempDir()
	os.Chmod(tmp, 0o777)
	for _, name := range []string{"belay-projects", "belay-0123abcd", "belay-demo-123"} {
		os.Mkdir(filepath.Join(tmp, name), 0o700)
		os.WriteFile(filepath.Join(tmp, name, "file"), nil, 0o600)
	}
	want := []string{"belay-demo-123", "belay-projects"}
	if os.Getuid() == 0 { // who can remove what others made, and fill meanwhile
		want = slices.Insert(want, 0, "belay-00abcdef")
		needNil(t, errors.Join(os.Mkdir(tmp+"/belay-00abcdef", 0o777), os.Chown(tmp+"/belay-00abcdef", nobodyID, nobodyID)))
	}
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+tmp)
	r.finish(0)
	left, _ := os.ReadDir(tmp)
	var names []string
	for _, e := range left {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, want) {
		t.Errorf("after the run: %v", names)
	}
	if out := r.one("tool_result")["output"].(string); !strings.HasPrefix(out, tmp+"/belay-") {
		t.Errorf("TMPDIR of a command: %s", out)
	}
}

// -- formats --

// The fields of each event, in order of docs/protocol.md; ? may be absent.
func eventFields() map[string]string {
	return map[string]string{
		"start": "session_id model workspace sandbox network version", "content": "content", "reasoning": "content", "tool_use": "id name input started_at",
		"tool_result": "id name output status exit_code? error_category? truncated? output_path? started_at completed_at duration_ms",
		"turn_usage":  "turn input_tokens? output_tokens? cached_tokens? reasoning_tokens? duration_ms", "retry": "attempt delay_ms error_category error discard_content",
		"service_released": "task_id pid process_group_id ownership log", "service_stopped": "task_id pid reason", "notice": "message", "error": "error error_category", "metadata": "meta", "done": "",
	}
}

const metaFields = "status exit_code stop_reason error_category? error? session_id model workspace sandbox turns tool_calls input_tokens? output_tokens? cached_tokens? reasoning_tokens? duration_ms"

// wantFields checks the names of an object and their order.
func wantFields(t *testing.T, line []byte, want string) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(line))
	d.Token()
	rest := strings.Fields(want)
	for d.More() {
		name, err := d.Token()
		var v json.RawMessage
		if err != nil || d.Decode(&v) != nil || string(v) == "null" {
			t.Fatalf("%v in %s", err, line)
		}
		for len(rest) > 0 && rest[0] != name && rest[0] == strings.TrimSuffix(rest[0], "?")+"?" && strings.TrimSuffix(rest[0], "?") != name {
			rest = rest[1:]
		}
		if len(rest) == 0 || strings.TrimSuffix(rest[0], "?") != name {
			t.Fatalf("field %v, want %v in %s", name, rest, line)
		}
		rest = rest[1:]
	}
	for _, name := range rest {
		if !strings.HasSuffix(name, "?") {
			t.Fatalf("field %s is missing in %s", name, line)
		}
	}
}

func (r *belayRun) types() (out []string) {
	for _, e := range r.events("") {
		out = append(out, e["type"].(string))
	}
	return out
}

func TestStreamJSONIsExact(t *testing.T) {
	t.Parallel()
	thinking := delta(args{"reasoning_content": "hm\u2028"}, nil) + delta(args{"content": "I look: <b>&\x1b\n"}, nil)
	p := serve(t, thinking+bash("echo out"), status(503, `{"error":"busy"}`), calls("Bash", persist(serviceCommand)), say("do"+"ne"))
	r := execRun(t, p, "--set", "limits.retry_backoff_ms=[1]").finish(0)
	stopService(t, int(r.one("service_released")["pid"].(float64)))
	if got, want := r.types(), []string{"start", "reasoning", "content", "turn_usage", "tool_use", "tool_result", "retry", "turn_usage", "tool_use", "tool_result", "content", "turn_usage", "service_released", "metadata", "done"}; !slices.Equal(got, want) {
		t.Errorf("events %v,\nwant   %v", got, want)
	}
	checkEvents(t, r)
	if strings.Contains(r.out.String(), `\u003c`) || r.events("content")[0]["content"] != "I look: <b>&\x1b\n" || strings.ContainsRune(r.out.String(), '\x1b') {
		t.Errorf("content %q", r.events("content")[0])
	}
	if retry := r.one("retry"); retry["attempt"] != 1.0 || retry["delay_ms"] != 1.0 || retry["error_category"] != "overloaded" || retry["discard_content"] != false {
		t.Errorf("retry %v", retry)
	}
	if u := r.events("turn_usage"); u[0]["turn"] != 1.0 || u[2]["turn"] != 3.0 || u[0]["input_tokens"] != 12.0 || u[0]["output_tokens"] != 4.0 {
		t.Errorf("usage %v", u)
	}
	if m := r.meta(); m["turns"] != 3.0 || m["tool_calls"] != 2.0 || m["input_tokens"] != 36.0 || m["output_tokens"] != 12.0 || m["stop_reason"] != "end" || m["session_id"] != r.one("start")["session_id"] {
		t.Errorf("metadata %v", m)
	}
}

// checkEvents holds every line against the table of the contract.
func checkEvents(t *testing.T, r *belayRun) {
	t.Helper()
	fields := eventFields()
	for line := range strings.Lines(r.out.String()) {
		var e struct {
			Type string
			Meta json.RawMessage
		}
		json.Unmarshal([]byte(line), &e)
		names, known := fields[e.Type]
		if !known || !strings.HasSuffix(line, `"schema":"belay.exec-stream","schema_version":1}`+"\n") {
			t.Fatalf("unknown type or no schema at the end: %s", line)
		}
		wantFields(t, []byte(line), "type "+names+" schema schema_version")
		if e.Type == "metadata" {
			wantFields(t, e.Meta, metaFields)
		}
	}
}

// What was not reported is absent, never zero.
func TestUsageThatIsNotReported(t *testing.T) {
	t.Parallel()
	plain := chunk(args{"choices": []any{args{"index": 0, "delta": args{"content": "done"}, "finish_reason": "stop"}}})
	r := execRun(t, serve(t, plain+"data: [DONE]\n\n")).finish(0)
	if m := r.meta(); len(r.events("turn_usage")) > 0 || m["input_tokens"] != nil || m["output_tokens"] != nil {
		t.Errorf("metadata %v", m)
	}
	half := chunk(args{"choices": []any{args{"index": 0, "delta": args{"content": "done"}, "finish_reason": "stop"}}, "usage": args{"prompt_tokens": 7}})
	r = execRun(t, serve(t, half+"data: [DONE]\n\n")).finish(0)
	if u := r.one("turn_usage"); u["input_tokens"] != 7.0 || u["output_tokens"] != nil || u["cached_tokens"] != nil {
		t.Errorf("usage %v", u)
	}
}

// What failed attempts reported was paid for, and counts.
func TestUsageOfFailedAttempts(t *testing.T) {
	t.Parallel()
	p := serve(t, say(""), say(""), bash("true"), say("done"))
	r := execRun(t, p, "--set", "limits.retry_backoff_ms=[1, 1]").finish(0)
	if u, m := r.events("turn_usage"), r.meta(); len(u) != 2 || u[0]["input_tokens"] != 36.0 || u[0]["output_tokens"] != 12.0 || u[1]["input_tokens"] != 12.0 || m["input_tokens"] != 48.0 || m["output_tokens"] != 16.0 {
		t.Errorf("usage %v, metadata %v", u, m)
	}
	p = serve(t, say(""), say(""), bash("true"), say("done"))
	r = execRun(t, p, "--set", "limits.retry_backoff_ms=[1, 1]", "--set", "limits.max_total_tokens=40").finish(1)
	if m := r.meta(); m["error_category"] != "budget_exhausted" || p.count() != 3 {
		t.Errorf("%d requests, metadata %v", p.count(), m)
	}
	r = execRun(t, serve(t, say("")), "--set", "limits.retry_backoff_ms=[1]").finish(75)
	if m := r.meta(); m["input_tokens"] != 24.0 {
		t.Errorf("metadata %v", m)
	}
}

// A cut stream is sent again, byte for byte, and its text is not in the history.
func TestCutStreamIsSentAgain(t *testing.T) {
	t.Parallel()
	p := serve(t, delta(args{"content": "half an ans"}, nil), bash("true"), say("whole"))
	r := execRun(t, p, "--set", "limits.retry_backoff_ms=[1]").finish(0)
	if e := r.one("retry"); e["discard_content"] != true || e["error_category"] != "truncated" {
		t.Errorf("retry %v", e)
	}
	if a, b := fmt.Sprint(p.messages(0)), fmt.Sprint(p.messages(1)); a != b || strings.Contains(fmt.Sprint(p.messages(2)), "half an ans") {
		t.Errorf("%s\n%s\n%v", a, b, p.messages(2))
	}
	checkEvents(t, r)
}

func TestJSONFormat(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, bash("echo out"), calls("Bash", persist(serviceCommand)), say("done")), "--output-format", "json").finish(0)
	var o struct {
		Status, Output  string
		Exit            int `json:"exit_code"`
		Tools, Services []map[string]any
	}
	if err := json.Unmarshal(r.out.Bytes(), &o); err != nil || bytes.Count(r.out.Bytes(), []byte("\n")) != 1 {
		t.Fatalf("%v in %s", err, r.out.String())
	}
	wantFields(t, r.out.Bytes(), metaFields+" output tools? services?")
	if o.Status != "completed" || o.Output != "done" || len(o.Tools) != 2 || len(o.Services) != 1 || o.Tools[0]["output"] != "out\nexit code 0" {
		t.Fatalf("%s", r.out.String())
	}
	stopService(t, int(o.Services[0]["pid"].(float64)))

	r = execRun(t, serve(t, bash("echo out"), ends("partial", "content_filter")), "--output-format", "json").finish(1)
	o.Output = ""
	if err := json.Unmarshal(r.out.Bytes(), &o); err != nil || o.Status != "failed" || o.Exit != 1 || o.Output != "" {
		t.Errorf("%v: %s", err, r.out.String())
	}
}

func TestTextFormat(t *testing.T) {
	t.Parallel()
	first := delta(args{"content": "I look first."}, nil)
	r := execRun(t, serve(t, first+bash("echo out"), calls("Bash", persist(serviceCommand)), say("the answer\nin two lines\n\n")), "--output-format", "text").finish(0)
	if r.out.String() != "the answer\nin two lines\n\n" && r.out.String() != "the answer\nin two lines\n" {
		t.Errorf("stdout %q", r.out.String())
	}
	m := regexp.MustCompile(`service_released \{"task_id":"shell_[0-9a-f]{8}","pid":(\d+)`).FindStringSubmatch(r.err.String())
	if m == nil || !regexp.MustCompile(`(?m)^  success in \d+ ms: Bash \{"command":"echo out"\}$`).MatchString(r.err.String()) {
		t.Fatalf("stderr %q", r.err.String())
	}
	pid, _ := strconv.Atoi(m[1])
	stopService(t, pid)

	// What a log has to say of a command that failed, however long its output, and of a wait.
	r = execRun(t, serve(t, bash("seq 100; exit 3"), bash("exit 7"), bash("echo a; echo exit code 4 it was; exit 4"), status(503, "busy"), calls("Read", args{"path": "nope"}), say("x")), "--output-format", "text", "--set", "limits.retry_backoff_ms=[5]").finish(0)
	for _, want := range []string{`(?m)^  error in \d+ ms: Bash .*\n  \| exit code 3: 1 2 3 `, `(?m)^  \| exit code 7: \(no output\)$`, `(?m)^  \| exit code 4: a exit code 4 it was$`, `(?m)^  retry: POST .* 503 Service Unavailable: busy; again in 5 ms$`, `(?m)^  error in \d+ ms: Read .*\n  \| open /`} {
		if !regexp.MustCompile(want).MatchString(r.err.String()) {
			t.Errorf("stderr %q lacks %s", r.err.String(), want)
		}
	}
	for _, replies := range [][]any{{ends("partial", "content_filter")}, {first + bash("true"), status(500, "no")}, {ends("cut ", "length")}} {
		r = execRun(t, serve(t, replies...), "--output-format", "text")
		if r.start().wait() == 0 || r.out.Len() > 0 || !strings.Contains("\n"+r.err.String(), "\n"+r.program()+": ") {
			t.Errorf("stdout %q, stderr %q", r.out.String(), r.err.String())
		}
	}
}

// Neither a terminal nor a CI runner obeys what a model or a tool said. GitHub
// takes ::command:: after blanks at the start of a line and ##[command]
// anywhere, Azure ##vso[command] anywhere.
func TestStderrObeysNobody(t *testing.T) {
	t.Parallel()
	evil := "\x1b]0;title\x07\x9b31m\r::error::x\n::add-mask::a\n  ::stop-commands::b\n##[error]c\n###[set-env name=d]e\n##vso[task.x]f\x7f"
	replies := []any{bash("printf '%s' '" + evil + "'; exit 1"), calls(evil, args{"x": evil}), calls("Read", args{"path": evil}), status(400, string(jsonOf(args{"error": args{"message": evil}})))}
	for _, format := range []string{"text", "json"} {
		r := execRun(t, serve(t, replies...), "--output-format", format, "--verbose").finish(1)
		for _, c := range r.err.String() {
			if c != '\n' && c != '\t' && (c < ' ' || c >= 0x7f && c < 0xa0) {
				t.Fatalf("control character %q in %q", c, r.err.String())
			}
		}
		for line := range strings.Lines(r.err.String()) {
			if strings.HasPrefix(strings.TrimSpace(line), "::") || strings.Contains(line, "##") {
				t.Errorf("a CI runner may obey %q", line)
			}
		}
	}
}

// The README tells a crash, which also ends with 2, by a line of stderr. It need
// not be the first one: progress, or more of the runtime, may stand before it.
func TestCrashIsToldFromUsage(t *testing.T) {
	t.Parallel()
	row := regexp.MustCompile(`(?m)^\| 2 \|.* a line of stderr then begins (.*) \|$`).FindStringSubmatch(document(t, "README.md"))
	if row == nil {
		t.Fatal("README.md does not say how stderr tells a crash")
	}
	words := "(?m)^(" + strings.NewReplacer("`", "", ", ", "|", " or ", "|").Replace(row[1]) + ")"
	p := serve(t, calls("Bash", map[string]any{"command": "setsid sleep 600 & wait", "background": true}), hang)
	quit := execRun(t, p, "--output-format", "text").start()
	until(t, "the model is asked", deadline, func() bool { return p.count() == 2 })
	quit.cmd.Process.Signal(syscall.SIGQUIT)
	memory := execRun(t, p).through(`ulimit -v 200000; exec "$@"`).start()
	for _, r := range []*belayRun{quit, memory} {
		if code := r.wait(); code != 2 || !regexp.MustCompile(words).MatchString(r.err.String()) {
			t.Errorf("exit code %d, no line is %s:\n%.300s", code, words, r.err.String())
		}
		until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && !r.keepers() })
	}
	usage := prepare(t, nil, "fly").finish(2)
	if regexp.MustCompile(words).MatchString(usage.err.String()) {
		t.Errorf("%s", usage.err.String())
	}
}

// -- the command line and the configuration --

func TestBadInputStartsNothing(t *testing.T) {
	t.Parallel()
	p := serve(t, say("never"))
	file := func(r *belayRun, text string) string {
		path := filepath.Join(r.workspace, "config.toml")
		os.WriteFile(path, []byte(text), 0o666)
		return path
	}
	for _, c := range []struct {
		name  string
		want  []string
		setup func(*belayRun)
	}{
		{"unknown flag", []string{"--colour"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--colour", "red", "do it") }},
		{"no command", []string{"found command"}, func(r *belayRun) {}},
		{"unknown command", []string{`found command "fly"`}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "fly") }},
		{"no prompt", []string{"found no prompt"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec") }},
		{"empty prompt", []string{"found no prompt"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", " ") }},
		{"missing model", []string{"found no model", "BELAY_MODEL"}, func(r *belayRun) {
			r.cmd.Env = append(r.cmd.Env, "BELAY_MODEL=")
			r.cmd.Args = append(r.cmd.Args, "exec", "do it")
		}},
		{"no URL", []string{"export BELAY_BASE_URL=", "export BELAY_MODEL=", "export BELAY_API_KEY="}, func(r *belayRun) {
			r.cmd.Env = append(r.cmd.Env, "BELAY_BASE_URL=")
			r.cmd.Args = append(r.cmd.Args, "exec", "do it")
		}},
		{"bad URL", []string{"--base-url"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--base-url", "ftp://x", "do it") }},
		{"plain http", []string{"plain http to 127.example.com", "BELAY_ALLOW_INSECURE_HTTP"}, func(r *belayRun) {
			r.cmd.Args = append(r.cmd.Args, "exec", "--base-url", "http://127.example.com", "do it")
		}},
		{"config missing", []string{"no such file"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "--config", "/nowhere.toml", "exec", "do it") }},
		{"config unreadable", []string{"is a directory"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "--config", r.workspace, "exec", "do it") }},
		{"config invalid", []string{"config.toml:1:", "config.toml:2:", "config.toml:3:"}, func(r *belayRun) {
			r.cmd.Args = append(r.cmd.Args, "--config", file(r, "limits.max_turns = 0\ninfer.nodel = \"x\"\nexec.network = \"yes\"\n"), "exec", "do it")
		}},
		{"config is no TOML", []string{"config.toml:2:"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "--config", file(r, "\nx\n"), "exec", "do it") }},
		{"unknown sandbox", []string{"--sandbox", "strict", "read-only|workspace-write|external-sandbox|danger-full-access"}, func(r *belayRun) {
			r.cmd.Args = append(r.cmd.Args, "exec", "--auto", "--sandbox", "strict", "do it")
		}},
		{"sandbox of the environment", []string{"BELAY_SANDBOX", "strict"}, func(r *belayRun) {
			r.cmd.Env = append(r.cmd.Env, "BELAY_SANDBOX=strict")
			r.cmd.Args = append(r.cmd.Args, "exec", "--auto", "do it")
		}},
		{"workspace missing", []string{"/nowhere", "allowed a directory that exists"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "-C", "/nowhere", "exec", "do it") }},
		{"workspace is a file", []string{"config.toml", "allowed a directory that exists"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "--workspace", file(r, ""), "exec", "do it") }},
		// As JSON names it to a keeper it is another directory, in which commands would do their work.
		{"workspace is no UTF-8", []string{`w\ufffdrk`, "allowed an absolute path in UTF-8"}, func(r *belayRun) {
			os.Mkdir(r.workspace+"/w\xfcrk", 0o777)
			r.cmd.Args = append(r.cmd.Args, "--workspace", r.workspace+"/w\xfcrk", "exec", "do it")
		}},
		{"current directory is no UTF-8", []string{`w\ufffdrk`, "allowed an absolute path in UTF-8"}, func(r *belayRun) {
			r.cmd.Dir += "/w\xfcrk"
			os.Mkdir(r.cmd.Dir, 0o777)
			r.cmd.Args = append(r.cmd.Args, "exec", "do it")
		}},
		{"two formats", []string{"--json"}, func(r *belayRun) {
			r.cmd.Args = append(r.cmd.Args, "exec", "--json", "--output-format", "text", "do it")
		}},
		{"record and replay", []string{"--record"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--record", "a", "--replay", "b", "do it") }},
		{"replay missing", []string{"no such file"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--replay", "b", "do it") }},
		{"replay is none", []string{"read the recording, line 1"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--replay", file(r, "x\n"), "do it") }},
		{"bad timeout", []string{"--timeout"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--timeout", "soon", "do it") }},
		{"bad --max-turns", []string{"--max-turns"}, func(r *belayRun) { r.cmd.Args = append(r.cmd.Args, "exec", "--max-turns", "0", "do it") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := prepare(t, []string{"BELAY_BASE_URL=" + p.URL, "BELAY_MODEL=m", "BELAY_API_KEY=sk-hidden-key"})
			c.setup(r)
			r.finish(2)
			for _, want := range c.want {
				if !strings.Contains(r.err.String(), want) {
					t.Errorf("stderr %q, want %q", r.err.String(), want)
				}
			}
			if r.out.Len() > 0 || !strings.HasPrefix(r.err.String(), r.program()+": ") || strings.Contains(r.err.String(), "sk-hidden-key") {
				t.Errorf("stdout %q, stderr %q", r.out.String(), r.err.String())
			}
		})
	}
	t.Cleanup(func() {
		if n := p.count(); n > 0 {
			t.Errorf("%d requests were sent", n)
		}
	})
}

// A sandbox that cannot be enforced is a refusal before any request: exit 1.
func TestRefusedWorkspaceOfTheSandbox(t *testing.T) {
	t.Parallel()
	p := serve(t, say("never"))
	r := prepare(t, []string{"BELAY_BASE_URL=" + p.URL, "BELAY_MODEL=m"}, "-C", "/", "exec", "--auto", "do it").finish(1)
	if p.count() > 0 || r.out.Len() > 0 || !strings.Contains(r.err.String(), "belay exec --sandbox external-sandbox") {
		t.Errorf("%d requests, stdout %q, stderr %q", p.count(), r.out.String(), r.err.String())
	}
}

func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	for _, a := range [][]string{{"help"}, {"--help"}, {"exec", "--help"}, {"help", "exec"}} {
		if r := prepare(t, nil, a...).finish(0); !strings.Contains(r.out.String(), "belay [global flags] exec") || r.err.Len() > 0 {
			t.Errorf("%v: %q %q", a, r.out.String(), r.err.String())
		}
	}
	for _, a := range [][]string{{"version"}, {"--version"}} {
		r := prepare(t, nil, a...).finish(0)
		info, err := buildinfo.ReadFile(r.cmd.Path)
		if err != nil {
			t.Fatal(err)
		}
		want := r.program() + " " + info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				want += " commit " + s.Value[:12]
			}
		}
		if want += " " + info.GoVersion + " linux/" + runtime.GOARCH + "\n"; r.out.String() != want || r.err.Len() > 0 {
			t.Errorf("%v: %q %q, want %q", a, r.out.String(), r.err.String(), want)
		}
	}
}

// A directory that was deleted under a shell or a runner is nobody's who needs none.
func TestDeletedCurrentDirectory(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{"version": "0", "help": "0", "services": "0", "config": "0", "exec --model=m --base-url=http://127.0.0.1:1 x": "2", "exec -C / --set limits.retry_backoff_ms=[] --model=m --base-url=http://127.0.0.1:1 x": "75"} {
		c := exec.Command("sh", "-c", `d=$(mktemp -d) && cd "$d" && rmdir "$d" && "$0" `+args+"; echo $?", belayBinary(t))
		c.Env = []string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.TempDir()}
		out, _ := c.CombinedOutput()
		if said := string(out); !strings.HasSuffix(said, "\n"+want+"\n") && said != want+"\n" || want == "2" && !strings.Contains(said, `paths.workspace: found "", allowed a directory that exists`) {
			t.Errorf("%s: %s, want %s", args, out, want)
		}
	}
}

// -- the turn loop --

func system(p *provider) string { s, _ := p.messages(0)[0]["content"].(string); return s }

func TestAgentsFile(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, want, notice string
		absent             bool
		args               []string
		setup              func(path string)
	}{
		{name: "read", want: "be kind", setup: func(path string) { os.WriteFile(path, []byte("be kind"), 0o666) }},
		{name: "cut", want: "xxx", notice: "longer than 32768 bytes", setup: func(path string) {
			os.WriteFile(path, append(bytes.Repeat([]byte("x"), agentsMax), "be kind"...), 0o666)
		}, absent: true},
		{name: "not asked for", args: []string{"--no-project-config"}, setup: func(path string) { os.WriteFile(path, []byte("be kind"), 0o666) }, absent: true},
		{name: "link within", want: "be kind", setup: func(path string) {
			os.WriteFile(filepath.Dir(path)+"/other", []byte("be kind"), 0o666)
			os.Symlink("other", path)
		}},
		{name: "link out", notice: "AGENTS.md cannot be read", setup: func(path string) {
			other := filepath.Join(filepath.Dir(filepath.Dir(path)), "secret")
			os.WriteFile(other, []byte("be kind"), 0o666)
			os.Symlink(other, path)
		}, absent: true},
		{name: "FIFO", notice: "no regular file", setup: func(path string) { syscall.Mkfifo(path, 0o666) }, absent: true},
		{name: "directory", notice: "no regular file", setup: func(path string) { os.Mkdir(path, 0o777) }, absent: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := serve(t, say("done"))
			r := execRun(t, p, append(c.args, "--append-system-prompt", "the very end")...)
			c.setup(r.workspace + "/AGENTS.md")
			r.finish(0)
			s := system(p)
			if !strings.Contains(s, c.want) || strings.Contains(s, "be kind") == c.absent || !strings.HasSuffix(s, "the very end") || !strings.Contains(s, r.workspace) {
				t.Errorf("system prompt %q", s)
			}
			if notices := r.events("notice"); (c.notice == "") != (len(notices) == 0) || c.notice != "" && !strings.Contains(notices[0]["message"].(string), c.notice) {
				t.Errorf("notices %v", notices)
			}
		})
	}
}

func TestWithoutAutoThereAreNoTools(t *testing.T) {
	t.Parallel()
	p := serve(t, bash("touch ran"), say("done"))
	r := prepare(t, []string{"BELAY_BASE_URL=" + p.URL, "BELAY_MODEL=m"}, "exec", "--output-format", "stream-json", "do it").finish(0)
	if p.requests[0]["tools"] != nil || r.one("tool_result")["status"] != "error" || !strings.Contains(r.one("notice")["message"].(string), "--auto") {
		t.Errorf("%v\n%s", p.requests[0]["tools"], r.out.String())
	}
	if _, err := os.Stat(r.workspace + "/ran"); err == nil {
		t.Error("a tool ran without --auto")
	}
}

func TestBudgets(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args  []string
		want  string
		calls int
	}{{[]string{"--max-turns", "2"}, "--max-turns", 2}, {[]string{"--set", "limits.max_total_tokens=20"}, "limits.max_total_tokens", 2}} {
		p := serve(t, bash("true"))
		r := execRun(t, p, c.args...).finish(1)
		if m := r.meta(); m["error_category"] != "budget_exhausted" || !strings.Contains(m["error"].(string), c.want) || p.count() != c.calls || m["turns"] != float64(c.calls) {
			t.Errorf("%d requests, metadata %v", p.count(), m)
		}
	}
	execRun(t, serve(t, bash("true"), say("done")), "--max-turns", "2").finish(0)
}

func TestLengthEndings(t *testing.T) {
	t.Parallel()
	two := func(second string) string {
		return delta(args{"tool_calls": []any{
			args{"index": 0, "id": "a", "type": "function", "function": args{"name": "Bash", "arguments": `{"command":"touch first"}`}},
			args{"index": 1, "id": "b", "type": "function", "function": args{"name": "Bash", "arguments": second}}}}, nil) + delta(args{}, "length") + "data: [DONE]\n\n"
	}
	p := serve(t, ends("Hello ", "length"), ends("", "max_tokens"), say("world"))
	if r := execRun(t, p, "--output-format", "text").finish(0); r.out.String() != "Hello world\n" {
		t.Errorf("stdout %q", r.out.String())
	}
	if roles := fmt.Sprint(p.messages(2)); strings.Count(roles, "role:assistant") != 1 || !strings.Contains(roles, "Continue where it ended") {
		t.Errorf("history %s", roles)
	}

	p = serve(t, two(`{"command":"touch second`), say("done"))
	r := execRun(t, p).finish(0)
	if _, err := os.Stat(r.workspace + "/first"); err != nil || len(r.events("tool_result")) != 1 || strings.Contains(fmt.Sprint(p.messages(1)), "second") {
		t.Errorf("%v, %s", err, r.out.String())
	}

	p = serve(t, ends("a", "length"))
	if m := execRun(t, p).finish(1).meta(); m["error_category"] != "length" || p.count() != 3 {
		t.Errorf("%d requests, metadata %v", p.count(), m)
	}
	p = serve(t, ends("a", "length"), ends("b", "length"), bash("true"), ends("c", "length"), ends("d", "length"), say("e"))
	execRun(t, p).finish(0)
}

// Finish words that are not known mean an answer that may be incomplete.
func TestFinishWords(t *testing.T) {
	t.Parallel()
	for word, category := range map[string]any{"banana": "malformed", "content_filter": "content_filter", "stop": nil, "end_turn": nil} {
		code := 1
		if category == nil {
			code = 0
		}
		reply := ends("text", word)
		if code == 1 { // with a call, which must not run
			reply = strings.Replace(bash("touch ran"), `"finish_reason":"tool_calls"`, `"finish_reason":"`+word+`"`, 1)
		}
		r := execRun(t, serve(t, reply)).finish(code)
		if m := r.meta(); m["error_category"] != category {
			t.Errorf("%s: %v", word, m)
		}
		if _, err := os.Stat(r.workspace + "/ran"); err == nil || len(r.events("tool_use")) > 0 {
			t.Errorf("%s: the call ran", word)
		}
	}
}

// A server that counts: results of older turns make room, the newest two stay.
func TestContextIsShortened(t *testing.T) {
	t.Parallel()
	const room = 9000 // bytes of tool results
	var p *provider
	turn, refusals := 0, 0
	p = serve(t, func(w http.ResponseWriter, r *http.Request) {
		size := 0
		all := p.messages(p.count() - 1)
		for _, m := range all {
			if m["role"] == "tool" {
				size += len(m["content"].(string))
			}
		}
		if size > room {
			refusals++
			status(400, `{"error":{"message":"This model's maximum context length is 9000","code":"context_length_exceeded"}}`)(w, r)
			return
		}
		if turn++; turn == 6 {
			io.WriteString(w, say("done"))
			return
		}
		io.WriteString(w, bash(fmt.Sprintf("echo begin%d; head -c 2900 /dev/zero | tr '\\0' %d", turn, turn)))
	})
	r := execRun(t, p).finish(0)
	last := ""
	for _, m := range p.messages(p.count() - 1) {
		if m["role"] == "tool" {
			last += m["content"].(string)
		}
	}
	for n := 1; n <= 5; n++ {
		if whole := strings.Contains(last, fmt.Sprintf("begin%d", n)); n >= 4 && !whole {
			t.Errorf("result %d is not there", n)
		} else if n == 1 && whole {
			t.Errorf("result %d is there", n)
		}
	}
	if refusals == 0 || !strings.Contains(last, "bytes was left out to make room]") || len(r.events("retry")) > 0 || len(r.events("notice")) == 0 {
		t.Errorf("%d refusals, events %v", refusals, r.types())
	}

	p = serve(t, bash("true"), bash("true"), bash("true"), bash("true"), status(400, `{"error":{"message":"x","code":"context_length_exceeded"}}`))
	r = execRun(t, p).finish(1)
	if m := r.meta(); m["error_category"] != "context_length" || p.count() > 7 {
		t.Errorf("%d requests, metadata %v", p.count(), m)
	}
	p = serve(t, status(400, `{"error":{"message":"x","code":"context_length_exceeded"}}`))
	r = execRun(t, p).finish(1)
	if p.count() != 1 || len(r.events("notice")) > 0 {
		t.Errorf("%d requests, notices %v", p.count(), r.events("notice"))
	}
}

func TestUnixSocketServer(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "b") // short: a socket path has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", dir+"/s")
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, say(r.URL.Path)) }))
	s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	r := prepare(t, []string{"BELAY_MODEL=m", "BELAY_BASE_URL=unix:" + dir + "/s", "http_proxy=http://127.0.0.1:1"}, "exec", "do it").finish(0)
	if r.out.String() != "/v1/chat/completions\n" {
		t.Errorf("stdout %q, stderr %q", r.out.String(), r.err.String())
	}
}

func TestRecordAndReplay(t *testing.T) {
	t.Parallel()
	p := serve(t, bash("echo out"), say("done"))
	r := execRun(t, p, "--record", "tape")
	r.cmd.Env = append(r.cmd.Env, "BELAY_API_KEY=sk-very-secret")
	r.finish(0)
	tape, err := os.ReadFile(r.workspace + "/tape")
	if err != nil || bytes.Count(tape, []byte("\n")) != 2 || bytes.Contains(tape, []byte("sk-very-secret")) || bytes.Contains(tape, []byte("do it")) {
		t.Fatalf("%v: %s", err, tape)
	}
	if fi, _ := os.Stat(r.workspace + "/tape"); fi.Mode() != 0o600 {
		t.Errorf("mode %v", fi.Mode())
	}
	again := prepare(t, nil, "exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json", "--replay", r.workspace+"/tape", "do it").finish(0)
	if again.one("tool_result")["output"] != "out\nexit code 0" || p.count() != 2 {
		t.Errorf("%d requests, %s", p.count(), again.out.String())
	}
	one, _, _ := bytes.Cut(tape, []byte("\n"))
	os.WriteFile(r.workspace+"/tape", append(one, '\n'), 0o600)
	short := prepare(t, nil, "exec", "--auto", "--sandbox", "danger-full-access", "--output-format", "stream-json", "--replay", r.workspace+"/tape", "do it").finish(1)
	if m := short.meta(); !strings.Contains(m["error"].(string), "holds no further response") {
		t.Errorf("metadata %v", m)
	}
}

// The key reaches the server and nothing else.
func TestKeyIsNowhereButInTheRequest(t *testing.T) {
	t.Parallel()
	const key = "sk-very-secret"
	p := serve(t, bash("env; cat /proc/$PPID/environ /proc/$PPID/cmdline | tr '\\0' '\\n'; cat /proc/self/environ | tr '\\0' '\\n'"), status(401, `{"error":{"message":"bad key `+key+`"}}`))
	r := execRun(t, p, "--verbose")
	r.cmd.Env = append(r.cmd.Env, "BELAY_API_KEY="+key, "MY_TOKEN=t-secret", "PGPASSWORD=p-secret", "KEEP_ME=kept")
	r.finish(1)
	if p.headers[0].Get("Authorization") != "Bearer "+key {
		t.Errorf("headers %v", p.headers[0])
	}
	if all := r.out.String() + r.err.String(); strings.Contains(all, key) || strings.Contains(all, "-secret") || !strings.Contains(all, "KEEP_ME=kept") || !strings.Contains(all, "BELAY_RUN="+r.one("start")["session_id"].(string)) {
		t.Errorf("%s\n%s", r.out.String(), r.err.String())
	}
}

// -- demo --

func TestDemo(t *testing.T) {
	t.Parallel()
	for _, user := range []uint32{uint32(os.Getuid()), nobodyID} {
		if os.Getuid() != 0 && int(user) != os.Getuid() {
			continue
		}
		t.Run(fmt.Sprint("uid ", user), func(t *testing.T) {
			t.Parallel()
			r := prepare(t, nil, "demo", "--output-format", "stream-json")
			if int(user) != os.Getuid() {
				r.as(user)
				os.Chown(r.home, int(user), int(user))
			}
			r.cmd.Env = append(r.cmd.Env, "TMPDIR="+r.workspace)
			r.finish(0)
			checkEvents(t, r)
			released := r.one("service_released")
			pid := int(released["pid"].(float64))
			stopService(t, pid)
			if !alive(pid) || !strings.Contains(r.err.String(), r.program()+" services stop "+released["task_id"].(string)+"\n") {
				t.Errorf("alive=%v, stderr %q", alive(pid), r.err.String())
			}
			command := func(want int, args ...string) string {
				s := prepare(t, nil, args...)
				s.cmd.Env, s.cmd.SysProcAttr = r.cmd.Env, r.cmd.SysProcAttr
				s.finish(want)
				return s.out.String() + s.err.String()
			}
			task := released["task_id"].(string)
			if out := command(0, "services"); !strings.Contains(out, task+"  running") {
				t.Errorf("services: %s", out)
			}
			if out := command(0, "services", "stop", task); out != task+": ended\n" || alive(pid) && !zombie(pid) {
				t.Errorf("stop: %s", out)
			}
			if out := command(0, "services", "stop", task); out != task+": gone already\n" {
				t.Errorf("second stop: %s", out)
			}
		})
	}
}

// Where no list has the service, nobody is sent to the list.
func TestDemoWithoutHome(t *testing.T) {
	t.Parallel()
	r := prepare(t, nil, "demo", "--output-format", "stream-json")
	r.cmd.Env = append(slices.DeleteFunc(r.cmd.Env, func(kv string) bool { return strings.HasPrefix(kv, "HOME=") }), "TMPDIR="+r.workspace)
	r.finish(0)
	stopService(t, int(r.one("service_released")["pid"].(float64)))
	if strings.Contains(r.err.String(), "services") {
		t.Errorf("stderr %q", r.err.String())
	}
}

func TestDemoInText(t *testing.T) {
	t.Parallel()
	r := prepare(t, nil, "demo")
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+r.workspace)
	r.finish(0)
	m := regexp.MustCompile(`"pid":(\d+)`).FindStringSubmatch(r.err.String())
	if m == nil || r.out.String() != "The service is up and answered the probe.\n" {
		t.Fatalf("stdout %q, stderr %q", r.out.String(), r.err.String())
	}
	pid, _ := strconv.Atoi(m[1])
	stopService(t, pid)
}

// How to see and stop the service is said after its release: to a stderr that stands still, not for ever.
func TestDemoWhoseStderrStandsStill(t *testing.T) {
	t.Parallel()
	r := prepare(t, nil, "demo", "--output-format", "stream-json")
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+r.workspace)
	_, r.cmd.Stderr = stuck(t)
	r.start()
	select {
	case <-r.waited:
	case <-time.After(leftWait):
		t.Error("the demo does not end")
		r.cmd.Process.Kill()
		<-r.waited
	}
	stopService(t, int(r.one("service_released")["pid"].(float64)))
}

//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fault_test.go takes things away from belay: disk, descriptors, processes,
// /proc, the reader of stdout, the next instant. Each fault has one right
// outcome, and after each nothing is left.

// soak is the number of rounds of a long test: BELAY_SOAK, or what CI can pay.
func soak(rounds int) int {
	if n, err := strconv.Atoi(os.Getenv("BELAY_SOAK")); err == nil {
		return n
	}
	return rounds
}

// through starts the run from a shell line that prepares it; "$@" is belay.
func (r *belayRun) through(line string) *belayRun {
	r.cmd.Args = append([]string{"sh", "-c", line, "sh", r.cmd.Path}, r.cmd.Args[1:]...)
	r.cmd.Path = "/bin/sh"
	return r
}

// inNamespace does the same as root of a mount namespace of its own, where
// directories can be covered and taken away.
func (r *belayRun) inNamespace(line string, more ...string) *belayRun {
	r.t.Helper()
	path, err := exec.LookPath("unshare")
	if err != nil || os.Getuid() != 0 {
		r.t.Skip("mounting needs root and unshare")
	}
	r.through(line)
	r.cmd.Args = append(append([]string{"unshare", "--mount"}, more...), append([]string{"/bin/sh"}, r.cmd.Args[1:]...)...)
	r.cmd.Path = path
	return r
}

// A full scratch directory stops the file of the whole output, never the
// command or the run.
func TestScratchFull(t *testing.T) {
	t.Parallel()
	command := "seq 400000 | head -c 2000000; echo; echo the end"
	t.Run("RLIMIT_FSIZE", func(t *testing.T) {
		t.Parallel()
		r := execRun(t, serve(t, bash(command), say("done"))).through(`ulimit -f 100; exec "$@"`).finish(0)
		scratchResult(t, r)
	})
	t.Run("tmpfs", func(t *testing.T) {
		t.Parallel()
		r := execRun(t, serve(t, bash(command), say("done")))
		dir := t.TempDir()
		r.inNamespace(`mount -t tmpfs -o size=64k x ` + dir + ` && TMPDIR=` + dir + ` exec "$@"`).finish(0)
		scratchResult(t, r)
	})
}

func scratchResult(t *testing.T, r *belayRun) {
	t.Helper()
	out := r.one("tool_result")["output"].(string)
	if !strings.Contains(out, "the end\n(the output") || !strings.HasSuffix(out, "so the rest is lost)\nexit code 0") {
		t.Errorf("result ends %q", out[max(0, len(out)-300):])
	}
}

// A home that cannot be written any more is told with the first service whose output
// goes nowhere, although an earlier one has its log, and once.
func TestHomeThatCannotBeWrittenAnyMore(t *testing.T) {
	t.Parallel()
	spoil := bash("mv $HOME/.belay/services $HOME/.belay/old && touch $HOME/.belay/services")
	two := calls("Bash", persist("exec sleep 600"), persist("exec sleep 600"))
	r := execRun(t, serve(t, calls("Bash", persist("exec sleep 600")), spoil, two, say("up"))).finish(0)
	logs, told := "", ""
	for _, e := range r.events("service_released") {
		stopService(t, int(e["pid"].(float64)))
		logs += filepath.Base(e["log"].(string)) + "\n"
	}
	for _, e := range r.events("notice") {
		told += e["message"].(string) + "\n"
	}
	if strings.Count(logs, "null\n") != 2 || strings.Count(logs, ".log\n") != 1 || strings.Count(told, "the service's output goes to /dev/null") != 1 {
		t.Errorf("logs %q, notices %q", logs, told)
	}
}

// A full home is as a read-only one: the run goes on, the printed receipt is
// the only one.
func TestHomeFull(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("up")))
	dir := t.TempDir()
	r.inNamespace(`mount -t tmpfs -o size=4k,nr_inodes=1 x ` + dir + ` && HOME=` + dir + ` exec "$@"`).finish(0)
	e := r.one("service_released")
	stopService(t, int(e["pid"].(float64)))
	if e["log"] != "/dev/null" || len(r.events("notice")) == 0 {
		t.Errorf("receipt %v, notices %v", e, r.events("notice"))
	}
}

// Nobody reads stdout and the pipe is full: TERM ends the run all the same.
func TestStalledReaderThenTerm(t *testing.T) {
	t.Parallel()
	tag := newTag(t)
	self, _ := os.Executable()
	long := strings.Repeat("x", 60_000)
	p := serve(t, calls("Bash", map[string]any{"command": self + " victim " + tag + " daemon; sleep 300", "background": true}), delta(map[string]any{"content": long}, nil)+delta(map[string]any{"content": long}, nil)+bash("echo never"), hang)
	r := execRun(t, p)
	read := r.piped()
	until(t, "the victim and the second request", deadline, func() bool { return victims(tag, "daemon") && p.count() == 2 })
	until(t, "the pipe is full", deadline, func() bool { return !takesOneWrite(int(read.Fd()), 0) && queued(read) >= 60_000 })
	began := time.Now()
	r.cmd.Process.Signal(syscall.SIGTERM)
	if code := r.wait(); code != 143 {
		t.Errorf("exit code %d", code)
	}
	if took := time.Since(began); took > 12*time.Second {
		t.Errorf("took %s", took)
	}
	noneLeft(t, tag)
}

// A reader that stands still in the middle of a long line and comes back while
// belay ends gets the rest of it, and then the last lines.
func TestReaderThatComesBackGetsWholeLines(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 60_000)
	p := serve(t, delta(map[string]any{"content": long}, nil)+delta(map[string]any{"content": long}, nil)+bash("echo never"), hang)
	r := execRun(t, p)
	read := r.piped()
	until(t, "the pipe is full", deadline, func() bool { return !takesOneWrite(int(read.Fd()), 0) && queued(read) >= 60_000 })
	r.cmd.Process.Signal(syscall.SIGTERM)
	out, err := io.ReadAll(read)
	if code := r.wait(); code != 143 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	last := ""
	for line := range strings.Lines(string(out)) {
		var e struct{ Type string }
		if json.Unmarshal([]byte(line), &e) != nil {
			t.Errorf("a line of %d bytes is no JSON: %.100s … %s", len(line), line, line[max(0, len(line)-100):])
		}
		last = e.Type
	}
	if last != "done" {
		t.Errorf("the last line is %q", last)
	}
}

// queued is how many bytes wait in a pipe.
func queued(f *os.File) int {
	n, _ := unix.IoctlGetInt(int(f.Fd()), unix.TIOCINQ)
	return n
}

// Closed standard descriptors: nothing that belay opens may land on them.
func TestClosedDescriptors(t *testing.T) {
	t.Parallel()
	for _, closed := range []string{"2>&-", "<&-", "<&- 2>&-"} {
		for range 2 {
			r := execRun(t, serve(t, bash("echo $((6 * 7)); echo err >&2; cat"), say("done"))).through(`exec "$@" ` + closed).finish(0)
			if out := r.one("tool_result")["output"]; out != "42\nerr\nexit code 0" {
				t.Errorf("%s: result %q", closed, out)
			}
			r.meta()
		}
	}
	// The runtime puts the null device in place of a closed stdout: it is as
	// if the caller had sent the receipt there. The record in the home stays.
	t.Run("stdout", func(t *testing.T) {
		r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("done"))).through(`exec "$@" >&-`).finish(0)
		pid := pidFile(t, r.workspace+"/service.pid")
		stopService(t, pid)
		list, err := receipts(r.home + "/.belay")
		if err != nil || len(list) != 1 || list[0].PID != pid || list[0].state() != "running" {
			t.Errorf("service %d, recorded %v %v", pid, list, err)
		}
	})
}

func TestFewDescriptors(t *testing.T) {
	t.Parallel()
	many := []map[string]any{}
	for range 12 {
		many = append(many, map[string]any{"command": "echo x", "background": true})
	}
	r := execRun(t, serve(t, bash("ulimit -n"), calls("Bash", many...), bash("echo y"), say("done"))).through(`ulimit -n 32; exec "$@"`).finish(0)
	results := r.events("tool_result")
	if out := results[0]["output"]; out != "32\nexit code 0" {
		t.Errorf("the command's limit: %q", out)
	}
	if out := results[len(results)-1]["output"]; out != "y\nexit code 0" {
		t.Errorf("last result: %q", out)
	}
}

// Where no more processes can be started the run fails, or tells the model and
// goes on; nothing is left, and no command is said to have done its work. Around
// a limit of 18 belay ends first and its keepers find that no thread can be had.
func TestFewProcesses(t *testing.T) {
	if _, err := exec.LookPath("prlimit"); err != nil {
		t.Skip("no prlimit here: not every sh can set this limit")
	}
	t.Parallel()
	bound := 0
	for _, limit := range []int{1, 4, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32, 40} {
		r := execRun(t, serve(t, calls("Bash", map[string]any{"command": "sleep 300", "background": true}), bash("sleep 300 & sleep 300 & wait"), say("done")), "--timeout", "3s")
		if os.Getuid() == 0 {
			r.as(uint32(200_000 + rand.IntN(1_000_000))) // the limit counts all processes of a user
		} else {
			limit += processesOf(os.Getuid())
		}
		r.through(fmt.Sprintf(`exec prlimit --nproc=%d "$@"`, limit)).start()
		switch code := r.wait(); {
		case code == 0 && r.events("tool_result")[1]["status"] != "error":
			t.Errorf("limit %d: a command of 300 s succeeded: %s", limit, r.out.String())
		case code != 124:
			bound++
		}
		until(t, fmt.Sprintf("no process of the run with limit %d is left", limit), leftWait, func() bool { return len(inDir(r.workspace)) == 0 })
	}
	if bound == 0 {
		t.Error("the limit was never felt: nothing was tested")
	}
}

// A keeper that ends before its command is not always killed: where it can have no
// thread it ends as every Go program does then, and as this signal ends one.
func TestKeeperThatEndsTooEarly(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", map[string]any{"command": "kill -ABRT $PPID; sleep 600"}, map[string]any{"command": "kill -KILL $PPID; sleep 600"}), say("done"))).finish(0)
	for i, want := range []string{"exit status 2", "signal: killed"} {
		if out, _ := r.events("tool_result")[i]["output"].(string); !strings.Contains(out, "the keeper ended too early ("+want+"): it was killed, or could have no thread") {
			t.Errorf("result %q, want %s", out, want)
		}
	}
}

// An unsandboxed command may take its keeper's descriptors. Then the keeper sees
// no process any more; it must not say that there is none.
func TestKeeperWithoutDescriptors(t *testing.T) {
	if _, err := exec.LookPath("prlimit"); err != nil {
		t.Skip("no prlimit here: not every sh can set another process's limit")
	}
	t.Parallel()
	r := execRun(t, serve(t, bash("prlimit --pid $PPID --nofile=0:0; setsid sleep 600 > /dev/null 2>&1 & sleep 0.3; exit 0"), say("done"))).finish(0)
	if out, _ := r.one("tool_result")["output"].(string); !strings.Contains(out, "could not be ended: children that /proc does not show") {
		t.Errorf("result %q", out)
	}
	until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 })
	// Nor may belay, which still has the connection to the provider.
	r = execRun(t, serve(t, bash("prlimit --pid $PPID --nofile=0:0; prlimit --pid $(cut -d ' ' -f 4 /proc/$PPID/stat) --nofile=0:0; setsid sleep 600 > /dev/null 2>&1 & sleep 0.3; exit 0"), say("done")))
	r.finish(1)
	for _, pid := range inDir(r.workspace) {
		syscall.Kill(pid, syscall.SIGKILL) // init's by now
	}
}

// Nobody in the process list is no proof that nobody is left: where each process
// forks its successor and exits, a look at the list comes too late for all of
// them, and where /proc is mounted with hidepid it does not show a child that
// made itself undumpable, as agents that hold keys do. Neither outlives the run,
// with a keeper or after its death. The lock is held while one of them lives.
func TestNobodyToBeSeen(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc: the processes that cannot be seen are written in C")
	}
	dir, err := os.MkdirTemp("", "belay-unseen-") // readable by other users, unlike t.TempDir
	needNil(t, err)
	os.Chmod(dir, 0o755)
	t.Cleanup(func() { os.RemoveAll(dir) })
	if out, err := exec.Command(gcc, "-O1", "-o", dir+"/unseen", "testdata/unseen.c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, kind := range []string{"chain", "sessions", "hidden"} {
		for _, end := range []string{"exit 0", "kill -KILL $PPID; sleep 600"} {
			t.Run(kind+"/"+end, func(t *testing.T) { // one after the other: a chain takes a processor
				r := execRun(t, serve(t, bash("exec 9> lock; flock 9; "+dir+"/unseen "+kind+" > /dev/null 2>&1 & sleep 0.3; "+end), say("done")))
				if kind == "hidden" {
					r.inNamespace(`mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"`)
				}
				r.finish(0)
				if out, _ := r.one("tool_result")["output"].(string); strings.Contains(out, "could not be ended") {
					t.Errorf("result %q", out)
				}
				lock, err := os.Open(r.workspace + "/lock")
				needNil(t, err)
				defer lock.Close()
				if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
					t.Errorf("left behind by a run that completed: %v", err)
				}
			})
		}
	}
}

// A file system that never answers holds a process so that SIGKILL does not end
// it: a FUSE server that a command started, a server that went away. The run ends
// by its signal all the same, and what held on ends with the server.
func TestFileToolInADirectoryThatHangs(t *testing.T) {
	ofTheBinary(t)
	gcc, err := exec.LookPath("gcc")
	if _, fuse := os.Stat("/dev/fuse"); err != nil || fuse != nil || os.Getuid() != 0 {
		t.Skip("it needs root, gcc and /dev/fuse")
	}
	t.Parallel()
	hangs := t.TempDir() + "/hangs"
	if out, err := exec.Command(gcc, "-O1", "-o", hangs, "testdata/hangs.c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	server := map[string]any{"command": hangs + " $PWD/mnt; echo no server", "background": true}
	for name, call := range map[string]string{"Read": calls("Read", map[string]any{"path": "mnt/x"}), "cwd": calls("Bash", map[string]any{"command": "pwd", "cwd": "mnt/x"})} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := serve(t, calls("Bash", server), bash("until grep -q $PWD/mnt /proc/mounts; do sleep 0.02; done"), call, say("done"))
			r := execRun(t, p)
			needNil(t, os.Mkdir(r.workspace+"/mnt", 0o755))
			r.inNamespace(`exec "$@"`).start()
			until(t, "the call has its keeper", deadline, func() bool { return p.count() == 3 && len(keepersOf(r.cmd.Process.Pid)) == 2 })
			time.Sleep(200 * time.Millisecond) // until it hangs, which no state tells before the kill
			r.cmd.Process.Signal(syscall.SIGTERM)
			if code := r.wait(); code != 143 {
				t.Errorf("exit code %d", code)
			}
			until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && !r.keepers() })
		})
	}
}

// freezer gives the call of a command that freezes its keeper, and what thaws it:
// the SIGKILL of a frozen process waits for that.
func freezer(t *testing.T) (call map[string]any, thaw func()) {
	t.Helper()
	dir := "/sys/fs/cgroup/freezer/belay-test-" + randomHex()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("it needs root and the freezer of cgroup version 1: %v", err)
	}
	t.Cleanup(func() { until(t, "the cgroup is empty", leftWait, func() bool { return os.Remove(dir) == nil }) })
	command := "echo $PPID > " + dir + "/cgroup.procs; echo FROZEN > " + dir + "/freezer.state; sleep 600"
	return map[string]any{"command": command, "timeout_ms": 1000}, func() { os.WriteFile(dir+"/freezer.state", []byte("THAWED"), 0) }
}

// A keeper in a frozen cgroup (version 1) cannot be killed. Its command had a
// limit of time, which ends nothing then; the run ends what is not frozen, and
// must not say that it completed.
func TestKeeperThatIsFrozen(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	frozen, thaw := freezer(t)
	r := execRun(t, serve(t, calls("Bash", frozen), say("done"))).start()
	code := r.wait()
	thaw()
	if text := r.out.String(); code != 1 || !strings.Contains(text, "keeper pid") {
		t.Errorf("exit code %d: %s", code, text)
	}
	until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && !r.keepers() })
}

// Nor is the turn of a daemon a success then, or the end of the daemon.
func TestKeeperThatIsFrozenUnderServe(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	frozen, thaw := freezer(t)
	f := newFakeLlama(t)
	f.turn = func(n int, _ map[string]any) any { return []any{calls("Bash", frozen), say("done"), say("again")}[n] }
	d := loopd(t, f.home(""), "--workspace", t.TempDir(), "--set", "exec.sandbox=danger-full-access").serving()
	t.Cleanup(thaw)
	if m := d.dial().send(1, aTurn("s", "x", false)).want(1, "errorinternal"); !strings.Contains(m.Message, "but processes could not be ended: ") || !strings.Contains(m.Message, "keeper pid") {
		t.Error(m.Message)
	}
	if recs := d.journal("s"); recs[len(recs)-1].Stop != string(codeInternal) {
		t.Errorf("%+v", recs[len(recs)-1])
	}
	d.cmd.Process.Signal(syscall.SIGTERM)
	if code := d.end(); code != 1 || !strings.Contains(d.err.String(), "loopd: all turns\n  | could not be ended: ") {
		t.Errorf("code %d:\n%s", code, d.err.String())
	}
}

// A keeper that is traced by its own command cannot be killed either, as long as
// the tracer lives. It does not protect what is below it.
func TestKeeperThatIsTraced(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	tag := newTag(t)
	self, _ := os.Executable()
	command := self + " victim " + tag + " tracer & until test -e traced; do sleep 0.02; done; kill -KILL $PPID; sleep 600"
	r := execRun(t, serve(t, calls("Bash", map[string]any{"command": command, "timeout_ms": 1000}), say("done"))).start()
	code := r.wait()
	text := r.out.String()
	if strings.Contains(text, "cannot trace") {
		t.Skip("processes may not trace each other here")
	}
	if code != 1 || !strings.Contains(text, "keeper pid") {
		t.Errorf("exit code %d: %s", code, text)
	}
	noneLeft(t, tag)
	until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && !r.keepers() })
}

// Whoever sends a signal again and again does not hold up the exit by that: the
// second one that counts sets its moment, whatever the teardown still waits for.
func TestSignalsThatDoNotStop(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	self, _ := os.Executable()
	p := serve(t, bash(self+" victim "+t.Name()+" tracer & until test -e traced; do sleep 0.02; done; kill -KILL $PPID; sleep 600"))
	r := execRun(t, p).start()
	defer func() {
		for _, pid := range inDir(r.workspace) { // below a keeper that cannot be killed, and a second signal does not wait for it
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}()
	until(t, "the keeper is traced", deadline, func() bool { _, err := os.Stat(r.workspace + "/traced"); return err == nil })
	for began := time.Now(); ; r.cmd.Process.Signal(syscall.SIGTERM) {
		select {
		case <-r.waited:
			if code := r.cmd.ProcessState.ExitCode(); code != 143 {
				t.Errorf("exit code %d", code)
			}
			return
		case <-time.After(400 * time.Millisecond):
		}
		if time.Since(began) > wedged+endBound { // what the teardown takes at least
			t.Fatal("belay waits for the teardown")
		}
	}
}

// Where memory ends the kernel kills the largest process, which belay is among many
// small ones, and then its keeper, which leaves them behind. So they go first; a
// service has the score that belay was given.
func TestMemoryEnds(t *testing.T) {
	ofTheBinary(t)
	t.Parallel()
	t.Run("scores", func(t *testing.T) {
		t.Parallel()
		service := persist("cat /proc/self/oom_score_adj > score.new; mv score.new score; exec sleep 600")
		r := execRun(t, serve(t, bash("cat /proc/self/oom_score_adj"), bash("until grep 800 /proc/$PPID/oom_score_adj; do sleep 0.01; done"), calls("Bash", service), bash("until test -e score; do sleep 0.01; done; cat score"), say("up")))
		r.through(`echo 800 > /proc/self/oom_score_adj; exec "$@"`).finish(0)
		stopService(t, int(r.one("service_released")["pid"].(float64)))
		for i, want := range map[int]string{0: "1000", 1: "800", 3: "800"} {
			if out := r.events("tool_result")[i]["output"]; out != want+"\nexit code 0" {
				t.Errorf("command %d: %q, want %s", i, out, want)
			}
		}
	})
	t.Run("many small ones", func(t *testing.T) {
		t.Parallel()
		group := "/sys/fs/cgroup/memory/belay-test-" + randomHex()
		if err := os.Mkdir(group, 0o755); err != nil {
			t.Skipf("it needs root and the memory controller of cgroup version 1: %v", err)
		}
		t.Cleanup(func() { until(t, "the cgroup is empty", leftWait, func() bool { return os.Remove(group) == nil }) })
		needNil(t, os.WriteFile(group+"/memory.limit_in_bytes", []byte("50M"), 0))
		small := `for i in $(seq 150); do setsid sh -c 'x=$(head -c 500000 /dev/zero | tr "\0" x); sleep 600' & done; wait`
		r := execRun(t, serve(t, calls("Bash", map[string]any{"command": small, "timeout_ms": 3000}), say("done")))
		r.through("echo $$ > " + group + `/cgroup.procs; exec "$@"`).start()
		if code := r.wait(); code != 0 {
			t.Errorf("exit code %d: %s", code, r.cmd.ProcessState)
		}
		t.Cleanup(func() { // before the group is removed, if the test has failed
			for _, pid := range inDir(r.workspace) {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		})
		until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && !r.keepers() })
	})
}

// processesOf counts threads too, as the limit does.
func processesOf(uid int) (n int) {
	for _, p := range processes() {
		if fi, err := os.Stat(fmt.Sprintf("/proc/%d", p.pid)); err == nil && int(fi.Sys().(*syscall.Stat_t).Uid) == uid {
			tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.pid))
			n += len(tasks)
		}
	}
	return n
}

func TestNoProc(t *testing.T) {
	t.Parallel()
	p := serve(t, say("done"))
	r := execRun(t, p).inNamespace(`umount -l /proc && exec "$@"`).finish(1)
	if text := r.err.String(); !strings.Contains(text, "/proc") || p.count() != 0 || r.out.Len() != 0 {
		t.Errorf("stdout %q, stderr %q, %d requests", r.out.String(), text, p.count())
	}
}

// In a PID namespace that still has the /proc around it, every pid there is
// that of another process: what a killed keeper leaves is not found.
func TestProcOfAnotherNamespace(t *testing.T) {
	t.Parallel()
	p := serve(t, bash("setsid sleep 600 > /dev/null 2>&1 & sleep 0.2; kill -KILL $PPID; sleep 600"), say("done"))
	r := execRun(t, p).inNamespace(`"$@"; exit $?`, "--pid", "--fork").finish(1) // what the shell as PID 1 leaves ends with it
	if text := r.err.String(); !strings.Contains(text, "another PID namespace; see docs/runbook.md#environment") || p.count() != 0 || r.out.Len() != 0 {
		t.Errorf("stdout %q, stderr %q, %d requests", r.out.String(), text, p.count())
	}
}

func TestBareEnvironment(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*belayRun){
		"TMPDIR missing":  func(r *belayRun) { r.cmd.Env = append(r.cmd.Env, "TMPDIR="+r.home+"/none") },
		"TMPDIR relative": func(r *belayRun) { r.cmd.Env = append(r.cmd.Env, "TMPDIR=none") },
		"no variables but the URL": func(r *belayRun) {
			r.cmd.Env = slices.DeleteFunc(r.cmd.Env, func(kv string) bool { return !strings.HasPrefix(kv, "BELAY_") })
		},
		"HOME relative": func(r *belayRun) { r.cmd.Env = append(r.cmd.Env, "HOME=none") },
		"no /dev/shm":   func(r *belayRun) { r.inNamespace(`umount -l /dev/shm; exec "$@"`) },
		"no scratch at all": func(r *belayRun) {
			r.inNamespace(`mount -t tmpfs -o ro x /tmp; mount -t tmpfs -o ro x /dev/shm; exec "$@"`)
		},
	} {
		for _, mode := range []string{"danger-full-access", "workspace-write"} {
			t.Run(name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				if mode == "workspace-write" {
					needLandlock(t)
				}
				r := execRun(t, serve(t, bash("echo fine"), calls("Write", map[string]any{"path": "f", "content": "x"}), say("done")), "--sandbox", mode)
				// Where /tmp is covered, what the test made there is gone.
				if base, err := os.MkdirTemp("/var/tmp", "belay-bare-"); err == nil {
					t.Cleanup(func() { os.RemoveAll(base) })
					b, _ := os.ReadFile(r.cmd.Path)
					os.WriteFile(base+"/belay", b, 0o755)
					r.cmd.Path, r.cmd.Dir, r.workspace, r.home = base+"/belay", base+"/w", base+"/w", base+"/home"
					os.Mkdir(r.workspace, 0o755)
					r.cmd.Env = append(r.cmd.Env, "HOME="+r.home)
				}
				change(r)
				r.finish(0)
				results := r.events("tool_result")
				if results[0]["output"] != "fine\nexit code 0" || results[1]["status"] != "success" {
					t.Errorf("results %v", results)
				}
			})
		}
	}
}

// A process that was stopped past the idle limit finds its answer waiting: it
// reads once more before it calls that a stall.
func TestStoppedPastTheIdleLimit(t *testing.T) {
	t.Parallel()
	half, rest := make(chan struct{}), make(chan struct{})
	r := execRun(t, serve(t, func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, delta(map[string]any{"content": "first "}, nil))
		w.(http.Flusher).Flush()
		close(half)
		<-rest
		io.WriteString(w, say("second"))
	}), "--set", "limits.liveness_ms=1000").start()
	<-half
	r.cmd.Process.Signal(syscall.SIGSTOP)
	close(rest)
	timer := time.NewTimer(2500 * time.Millisecond) // past the limit: this is the condition itself
	<-timer.C
	r.cmd.Process.Signal(syscall.SIGCONT)
	if code := r.wait(); code != 0 {
		t.Errorf("exit code %d\n%s", code, r.out.String())
	}
}

// A command that ended within its limit of time did not run out of it because belay
// was stopped past that, as by Ctrl-Z.
func TestStoppedPastTheLimitOfACommand(t *testing.T) {
	t.Parallel()
	for range soak(8) { // what belay sees first is chance
		t.Run("", func(t *testing.T) {
			t.Parallel()
			r := execRun(t, serve(t, calls("Bash", map[string]any{"command": "touch begun; sleep 0.3; seq 9000", "timeout_ms": minTimeout}), say("done"))).start()
			until(t, "the command runs", deadline, func() bool { _, err := os.Stat(r.workspace + "/begun"); return err == nil })
			r.cmd.Process.Signal(syscall.SIGSTOP)
			time.Sleep(2 * minTimeout * time.Millisecond) // past the limit: this is the condition itself
			r.cmd.Process.Signal(syscall.SIGCONT)
			if code, e := r.wait(), r.one("tool_result"); code != 0 || e["status"] != "success" {
				t.Errorf("exit code %d, result %.100s", code, e["output"].(string)[max(0, len(e["output"].(string))-100):])
			}
		})
	}
}

// doomed is a run with all that must not be left: a pending service, a daemon
// in its own session, a background command, and a command that ends.
func doomed(t *testing.T, tag, format string) *belayRun {
	self, _ := os.Executable()
	r := execRun(t, serve(t, calls("Bash", persist(serviceCommand), map[string]any{"command": self + " victim " + tag + " daemon; exec sleep 300", "background": true}, map[string]any{"command": "echo x; sleep 0.01"}),
		calls("Write", map[string]any{"path": "file", "content": strings.Repeat("whole\n", 1000)}), say("done")), "--output-format", format)
	return r
}

// verdict compares a run that is over with its service. A receipt is what
// belay told whoever started it; recorded ones that are not withdrawn count
// only where the run ended by itself.
func verdict(t *testing.T, r *belayRun, format string) (receipt, alive bool) {
	t.Helper()
	said := map[string]string{"stream-json": r.out.String(), "json": r.out.String(), "text": r.err.String()}[format]
	receipt = strings.Contains(said, `"process_group_id"`)
	b, _ := os.ReadFile(r.workspace + "/service.pid")
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	if p, ok := readProc(pid); receipt || pid > 0 && ok && !p.dead() {
		alive = pid > 0 && ok && !p.dead()
	}
	if file, err := os.ReadFile(r.workspace + "/file"); err == nil && len(file) != 6000 {
		t.Errorf("a torn file of %d bytes", len(file))
	}
	if format == "stream-json" {
		r.events("") // each line is whole
	}
	list, _ := os.ReadFile(r.home + "/.belay/services/released.jsonl")
	for line := range strings.Lines(string(list)) {
		if !json.Valid([]byte(line)) || !strings.HasSuffix(line, "\n") {
			t.Errorf("a torn record: %q", line)
		}
	}
	return receipt, alive
}

// clear ends a released service and then nothing may be left.
func (r *belayRun) clear(t *testing.T, tag string) {
	t.Helper()
	b, _ := os.ReadFile(r.workspace + "/service.pid")
	if pid, _ := strconv.Atoi(strings.TrimSpace(string(b))); pid > 1 && slices.Contains(inDir(r.workspace), pid) {
		syscall.Kill(-pid, syscall.SIGKILL)
	}
	until(t, "no process of the run is left", leftWait, func() bool { return len(inDir(r.workspace)) == 0 && len(tagged(tag)) == 0 && !r.keepers() })
}

// keepers says whether any keeper of the run lives: one that was started just
// before belay was killed may still be about to start its command, and to end it.
func (r *belayRun) keepers() bool {
	return slices.ContainsFunc(processes(), func(p proc) bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
		return bytes.HasPrefix(name, []byte(keeperName)) && bytes.Contains(env, []byte("HOME="+r.home+"\x00"))
	})
}

// SIGKILL of belay at a random moment: nothing left without a receipt, nothing
// torn. A receipt whose service is gone is possible, between the write and the
// moment that the keepers let go: whoever sees no exit code 0 must not trust it.
func TestKillAtRandomMoments(t *testing.T) {
	ofTheBinary(t)
	tally := map[string]int{}
	span := deadline
	for round := range soak(40) {
		tag := newTag(t)
		began := time.Now()
		r := doomed(t, tag, "stream-json").start()
		if round > 0 { // the first one runs to its end and shows how long that takes
			timer := time.NewTimer(time.Duration(rand.Int64N(int64(span + span/2))))
			select {
			case <-timer.C:
				r.cmd.Process.Kill()
			case <-r.waited:
			}
		}
		code := r.wait()
		if code == 0 {
			span = (min(span, time.Since(began)) + time.Since(began)) / 2 // of runs that completed: the moments are spread over it
		}
		receipt, _ := verdict(t, r, "stream-json")
		left := func() bool { _, alive := verdict(t, r, "stream-json"); return alive }
		switch {
		case code == 0 && (!receipt || !left()):
			t.Errorf("exit code 0, receipt %v, service alive %v", receipt, left())
		case code == 0:
			tally["completed"]++
		case receipt:
			tally["killed after the receipt"]++
		default:
			tally["killed before"]++
			until(t, "the service without a receipt is gone", leftWait, func() bool { return !left() })
		}
		r.clear(t, tag)
	}
	t.Logf("%d rounds: %v", soak(40), tally)
	if tally["killed before"] == 0 || tally["completed"] == 0 {
		t.Errorf("one side was never seen, so nothing was tested: %v", tally)
	}
}

// SIGTERM at each event: a receipt and alive, or no receipt and gone.
func TestTermAtEveryEventBoundary(t *testing.T) {
	ofTheBinary(t)
	released, stopped := 0, 0
	for boundary := 0; ; boundary++ {
		last := false
		for _, jitter := range []time.Duration{0, 300 * time.Microsecond, time.Millisecond, 3 * time.Millisecond} {
			tag := newTag(t)
			r := doomed(t, tag, "stream-json")
			read, write, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			r.cmd.Stdout = write
			r.start()
			write.Close()
			in, seen := lines(read), 0
			for ; seen < boundary; seen++ {
				line, ok := <-in
				if !ok {
					break
				}
				r.out.WriteString(line + "\n")
			}
			timer := time.NewTimer(jitter)
			<-timer.C
			r.cmd.Process.Signal(syscall.SIGTERM)
			for line := range in {
				r.out.WriteString(line + "\n")
			}
			read.Close()
			code := r.wait()
			termVerdict(t, r, "stream-json", code, fmt.Sprintf("after event %d and %s", boundary, jitter))
			if code == 0 {
				released++
			} else {
				stopped++
			}
			last = last || seen < boundary
			r.clear(t, tag)
		}
		if last {
			break
		}
	}
	t.Logf("%d released, %d stopped", released, stopped)
	if released == 0 || stopped == 0 {
		t.Errorf("one side was never seen: %d released, %d stopped", released, stopped)
	}
}

func termVerdict(t *testing.T, r *belayRun, format string, code int, when string) {
	t.Helper()
	receipt, alive := verdict(t, r, format)
	early := r.cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() && r.out.Len() == 0 // before the signals were armed nothing was started
	switch {
	case early && !receipt && !alive:
	case code == 0 && receipt && alive:
	case code == 143 && !receipt && !alive:
	default:
		t.Errorf("%s: exit code %d, receipt %v, service alive %v\nstdout:\n%s\nstderr:\n%s", when, code, receipt, alive, r.out.String(), r.err.String())
	}
}

// The same for the formats whose signals stay live up to the last byte, at
// random moments near the end.
func TestTermAtRandomMomentsInTextAndJSON(t *testing.T) {
	ofTheBinary(t)
	for _, format := range []string{"text", "json"} {
		tally := map[int]int{}
		span := deadline
		for round := range soak(20) {
			tag := newTag(t)
			began := time.Now()
			r := doomed(t, tag, format).start()
			if round > 0 {
				timer := time.NewTimer(span/2 + time.Duration(rand.Int64N(int64(span))))
				select {
				case <-timer.C:
					r.cmd.Process.Signal(syscall.SIGTERM)
				case <-r.waited:
				}
			}
			code := r.wait()
			if code == 0 {
				span = (min(span, time.Since(began)) + time.Since(began)) / 2
			}
			termVerdict(t, r, format, code, fmt.Sprintf("%s, round %d", format, round))
			tally[code]++
			r.clear(t, tag)
		}
		t.Logf("%s: exit codes %v", format, tally)
		if tally[0] == 0 || tally[143] == 0 {
			t.Errorf("%s: one side was never seen: %v", format, tally)
		}
	}
}

// As PID 1 of a container belay is the parent of every orphan, and signals
// without a handler do not reach it: it reaps, and ends with the right code.
func TestPid1(t *testing.T) {
	ofTheBinary(t)
	zombies := `n=0; for f in /proc/[0-9]*/stat; do read -r line < $f && case "$line" in *") Z "*) n=$((n+1));; esac; done 2>/dev/null; test $n -lt 2 && echo "zombies: few"`
	orphans := "for i in 1 2 3 4 5; do setsid -f sh -c 'setsid -f true'; done; kill -9 $PPID"
	for _, c := range []struct {
		name    string
		replies []any
		sig     syscall.Signal
		code    int
	}{
		{"completed", []any{bash(orphans), bash("sleep 1.2; " + zombies), say("done")}, 0, 0},
		{"failed", []any{bash(orphans), ends("x", "content_filter")}, 0, 1},
		{"temporary", []any{status(503, "{}")}, 0, 75},
		{"TERM", []any{bash("setsid -f sleep 300; sleep 300")}, syscall.SIGTERM, 143},
		{"INT", []any{bash("setsid -f sleep 300; sleep 300")}, syscall.SIGINT, 130},
		{"HUP while the model thinks", []any{hang}, syscall.SIGHUP, 129},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := serve(t, c.replies...)
			r := execRun(t, p).inNamespace(`exec "$@"`, "--pid", "--fork", "--mount-proc", "--kill-child").start()
			if c.sig != 0 {
				until(t, "belay is at work", deadline, func() bool {
					return p.count() == 1 && (c.name[0] == 'H' || len(inDir(r.workspace)) > 2)
				})
				for _, q := range processes() {
					if q.ppid == r.cmd.Process.Pid {
						syscall.Kill(q.pid, c.sig)
					}
				}
			}
			if code := r.wait(); code != c.code {
				t.Errorf("exit code %d, want %d\n%s", code, c.code, r.err.String())
			}
			r.meta()
			if c.code == 0 && !strings.Contains(r.out.String(), "zombies: few") {
				t.Errorf("zombies: %s", r.out.String())
			}
			until(t, "the namespace is empty", leftWait, func() bool { return len(inDir(r.workspace)) == 0 })
		})
	}
}

// usage is what a process holds: descriptors (-1 where they are not ours to
// see), threads, resident KiB.
func usageOf(pid int) (fds, threads, rss int) {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if fds = len(list); err != nil {
		fds = -1
	}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch f[0] {
		case "Threads:":
			threads, _ = strconv.Atoi(f[1])
		case "VmRSS:":
			rss, _ = strconv.Atoi(f[1])
		}
	}
	return fds, threads, rss
}

// Many commands in one run: nothing grows but the history.
func TestManyCommands(t *testing.T) {
	ofTheBinary(t)
	total := 300
	if soak(0) > 0 {
		total = 10_000
	}
	const perReply = 20 // the number of replies
	var batch []map[string]any
	for range total / perReply {
		batch = append(batch, map[string]any{"command": "echo x"})
	}
	type sample struct{ fds, threads, rss, orphans int }
	var samples []sample         // of the handlers, which running orders
	running := make(chan int, 1) // belay's pid, once it is known
	look := func(next string) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, q *http.Request) {
			pid := <-running
			defer func() { running <- pid }()
			fds, threads, rss := usageOf(pid)
			samples = append(samples, sample{fds, threads, rss, len(below(processes(), pid, nil))})
			io.WriteString(w, next)
		}
	}
	replies := []any{}
	for range perReply {
		replies = append(replies, look(calls("Bash", batch...)))
	}
	r := execRun(t, serve(t, append(replies, look(say("done")))...)).start()
	running <- r.cmd.Process.Pid
	select {
	case <-r.waited:
	case <-time.After(deadline * time.Duration(1+total/2500)): // a minute for CI's number, five for 10,000
	}
	if code := r.wait(); code != 0 {
		t.Fatalf("exit code %d\n%s", code, r.err.String())
	}
	if n := len(r.events("tool_result")); n != total {
		t.Errorf("%d results, want %d", n, total)
	}
	<-running
	early, last := samples[perReply/5], samples[len(samples)-1]
	t.Logf("%d commands: after a fifth %+v, at the end %+v", total, early, last)
	// Threads come and go with the runtime; a result in the history takes less than 2 KiB.
	if last.fds > early.fds+4 || last.threads > early.threads+8 || last.rss > early.rss+2*total+16<<10 || last.orphans > 0 {
		t.Errorf("growth: after a fifth %+v, at the end %+v", early, last)
	}
}

// The same from inside, where goroutines can be counted.
func TestManyCommandsLeaveNoGoroutine(t *testing.T) {
	all := confinedJobs(0, nil)
	all.confine = nil
	one := func() {
		outputOf(t, all, "echo x")
		for _, j := range all.list(func(*job) bool { return true }) {
			<-j.gone
			all.forget(j)
		}
	}
	one()
	before := runtime.NumGoroutine()
	for range 50 {
		one()
	}
	until(t, "no goroutine more than before", deadline, func() bool { return runtime.NumGoroutine() <= before })
	if n := len(all.host.keepers); n > 0 {
		t.Errorf("%d keepers left in the table", n)
	}
}

// failing makes a command run under strace, behind a shell line, which answers the
// calls that args choose with an error. The command keeps the pid of the shell, $$.
func failing(t testing.TB, cmd *exec.Cmd, before, args string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("belay is not dumpable, so that root alone may look at the paths of its calls")
	}
	if out, err := exec.Command("strace", "-D", "-qq", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("no strace that may trace: %v %s", err, out)
	}
	cmd.Args = append([]string{"sh", "-c", before + ` exec strace -D -f -qq -o /dev/null ` + args + ` "$@"`, "sh", cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
}

func (r *belayRun) failing(before, args string) *belayRun {
	r.t.Helper()
	failing(r.t, r.cmd, before, args)
	return r
}

// A process list that cannot be read, as where the system's file table is full, says
// nothing: neither that belay has no children yet, nor that a service is gone.
func TestProcessListThatCannotBeRead(t *testing.T) {
	t.Parallel()
	const full = " -e trace=openat -e inject=openat:error=ENFILE:when="
	t.Run("at the start", func(t *testing.T) {
		t.Parallel()
		for _, path := range []string{"/proc/$$/stat", "/proc/$!/stat"} {
			p := serve(t, bash("true"), say("done"))
			r := execRun(t, p).failing("sleep 300 > /dev/null 2>&1 & echo $! > earlier;", "-P "+path+full+"1").finish(1)
			pid := pidFile(t, r.workspace+"/earlier")
			if q, ok := readProc(pid); !ok || q.dead() || p.count() != 0 || !strings.Contains(r.err.String(), "cannot list the processes in /proc") {
				t.Errorf("%s: child %v, %d requests, stderr %q", path, q, p.count(), r.err.String())
			}
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	t.Run("services stop", func(t *testing.T) {
		t.Parallel()
		r := execRun(t, serve(t, calls("Bash", persist(serviceCommand)), say("up"))).finish(0)
		e := r.one("service_released")
		pid := int(e["pid"].(float64))
		stopService(t, pid)
		stop := prepare(t, nil, "--home", r.home+"/.belay", "services", "stop", e["task_id"].(string)).failing("", fmt.Sprintf("-P /proc/%d/stat", pid)+full+"1").finish(1)
		if !alive(pid) || !strings.Contains(stop.err.String(), `its state is "unknown"`) {
			t.Errorf("stdout %q, stderr %q", stop.out.String(), stop.err.String())
		}
	})
}

// A key file whose mode cannot be asked for is not taken for a private one.
func TestKeyFileOfUnknownMode(t *testing.T) {
	t.Parallel()
	r := prepare(t, nil)
	file := writeConfig(t, r.home+"/key", "sk-secret", 0o644)
	r.cmd.Args = append(r.cmd.Args, "--set", "infer.api_key_file="+file, "config")
	r.failing("", "-P "+file+" -e trace=newfstatat -e inject=newfstatat:error=EIO").finish(2)
	if text := r.err.String(); !strings.Contains(text, "infer.api_key_file: stat "+file+": input/output error") {
		t.Errorf("stderr %q", text)
	}
}

// A file whose mode and owner cannot be asked for is not replaced by one of others.
func TestWriteToAFileOfUnknownMode(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Write", map[string]any{"path": "f", "content": "new"}), calls("Write", map[string]any{"path": "g", "content": "new"}), say("done")))
	file := writeConfig(t, r.workspace+"/f", "old", 0o700)
	// The first look is the one for links.
	r.failing("", "-P "+file+" -e trace=newfstatat -e inject=newfstatat:error=EIO:when=2").finish(0)
	first, second := r.events("tool_result")[0], r.events("tool_result")[1]
	b, _ := os.ReadFile(file)
	if fi, err := os.Stat(file); err != nil || fi.Mode() != 0o700 || string(b) != "old" || first["status"] != "error" || second["status"] != "success" {
		t.Errorf("%v of mode %v: %q, %v %v", err, fi.Mode(), b, first, second)
	}
}

// Where a file system has no locks nothing is left of the try to use it for scratch.
func TestScratchWithoutLocks(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, bash("ls $TMPDIR"), say("done"))).failing("mkdir tmp; TMPDIR=$PWD/tmp", "-e trace=flock -e inject=flock:error=ENOLCK").finish(0)
	left, err := os.ReadDir(r.workspace + "/tmp")
	if err != nil || len(left) != 0 || len(r.events("notice")) != 1 {
		t.Errorf("%v: left %v, notices %v", err, left, r.events("notice"))
	}
}

// Of an AGENTS.md that cannot be read to its end no part is sent, and that is said.
func TestAgentsFileThatBreaksOff(t *testing.T) {
	t.Parallel()
	p := serve(t, say("done"))
	r := execRun(t, p)
	file := writeConfig(t, r.workspace+"/AGENTS.md", strings.Repeat("Do this.\n", 500)+"Never do that.\n", 0o644)
	r.failing("", "-P "+file+" -e trace=read -e inject=read:error=EIO:when=2").finish(0)
	if text := system(p); strings.Contains(text, "Do this.") || !strings.Contains(fmt.Sprint(r.events("notice")), "AGENTS.md cannot be read") {
		t.Errorf("notices %v, system prompt %q", r.events("notice"), text)
	}
}

// Where poll(2) gives an error a run neither waits for stdout for ever nor says that
// nobody takes its receipts.
func TestStdoutThatCannotBeAskedFor(t *testing.T) {
	t.Parallel()
	for _, persistent := range []bool{false, true} {
		r := execRun(t, serve(t, calls("Bash", map[string]any{"command": serviceCommand, "background": true, "persist": persistent}), say("done")))
		r.cmd.Args = append([]string{"attacker", "without-call", strconv.Itoa(unix.SYS_PPOLL), strconv.Itoa(int(unix.ENOMEM)), r.cmd.Path}, r.cmd.Args[1:]...)
		r.cmd.Path = attackerBinary(t)
		r.finish(0)
		for _, e := range r.events("service_released") {
			stopService(t, int(e["pid"].(float64)))
		}
	}
}

// A FIFO in place of the list of receipts holds neither the run nor who looks at it.
func TestListOfReceiptsThatIsAFIFO(t *testing.T) {
	t.Parallel()
	r := execRun(t, serve(t, calls("Bash", persist("mkfifo $HOME/.belay/services/released.jsonl; exec sleep 600")), bash("until test -p $HOME/.belay/services/released.jsonl; do sleep 0.02; done"), say("up"))).finish(0)
	stopService(t, int(r.one("service_released")["pid"].(float64)))
	if said := fmt.Sprint(r.events("notice")); !strings.Contains(said, "the release is not recorded") {
		t.Errorf("notices %s", said)
	}
	list := prepare(t, nil, "--home", r.home+"/.belay", "services").finish(1)
	if !strings.Contains(list.err.String(), "released.jsonl is no regular file") {
		t.Errorf("stdout %q, stderr %q", list.out.String(), list.err.String())
	}
}

// A service that puts a FIFO in the place of its log, and ends, does not hold the run.
func TestServiceLogThatIsAFIFO(t *testing.T) {
	t.Parallel()
	const swap = `f=$(readlink /proc/$$/fd/1); rm $f; mkfifo $f; touch swapped`
	r := execRun(t, serve(t, calls("Bash", persist(swap)), bash("until test -e swapped; do sleep 0.02; done"), say("up")), "--timeout", "10s").finish(1)
	if said := fmt.Sprint(r.events("error")); !strings.Contains(said, "had exited before the run was complete") {
		t.Errorf("errors %s", said)
	}
}

// Nor does a FIFO that a service has filled and reads no more, in place of that list.
func TestListOfReceiptsThatIsAFullFIFO(t *testing.T) {
	t.Parallel()
	const fill = `f=$HOME/.belay/services/released.jsonl; mkfifo $f; exec 3<>$f; dd if=/dev/zero of=$f bs=4096 oflag=nonblock 2>/dev/null; touch full; exec sleep 600`
	r := execRun(t, serve(t, calls("Bash", persist(fill)), bash("until test -e full; do sleep 0.02; done"), say("up")), "--timeout", "10s").finish(0)
	stopService(t, int(r.one("service_released")["pid"].(float64)))
	if said := fmt.Sprint(r.events("notice")); !strings.Contains(said, "the release is not recorded") {
		t.Errorf("notices %s", said)
	}
}

// A host that was suspended behind a finish reason finds the rest in the socket,
// and more of it than one read takes.
func TestStoppedBehindAFinishReason(t *testing.T) {
	t.Parallel()
	const pieces = 1000
	stdout, err := os.Create(filepath.Join(t.TempDir(), "stdout"))
	needNil(t, err)
	defer stdout.Close()
	said := func() string { b, _ := os.ReadFile(stdout.Name()); return string(b) }
	var r *belayRun
	r = execRun(t, serve(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, delta(map[string]any{"content": "begun"}, "stop"))
		w.(http.Flusher).Flush()
		until(t, "the first text is out", deadline, func() bool { return strings.Contains(said(), "begun") })
		r.cmd.Process.Signal(syscall.SIGSTOP)
		io.WriteString(w, strings.Repeat(delta(map[string]any{"content": "more"}, nil), pieces)+say("done"))
		w.(http.Flusher).Flush()
		time.Sleep(finishGrace + 5*lateChance) // past the limit: this is the condition itself
		r.cmd.Process.Signal(syscall.SIGCONT)
	}))
	r.cmd.Stdout = stdout
	if code, n := r.start().wait(), strings.Count(said(), `"content":"more"`); code != 0 || n != pieces || !strings.Contains(said(), `"content":"done"`) {
		t.Errorf("exit code %d, %d pieces of %d came out", code, n, pieces)
	}
}

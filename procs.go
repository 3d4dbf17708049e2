//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/sys/unix"
)

// procs.go owns every process that belay starts, and every system call but
// those on locks and sockets. It never writes to belay's stdout and never
// holds a lock over a wait.
//
// Each command runs under a keeper of its own: belay re-executed, a child
// subreaper in its own session, with the command as its only direct child in
// another one. Whatever the command forks stays below its keeper. A socketpair
// is control channel and lifeline at once: EOF on it ends the tree, so a
// SIGKILL of belay does too. belay is a subreaper itself, so that a SIGKILL of
// a keeper brings its orphans here.
//
// Order: the process list and how trees end · the keeper · its file tools ·
// its sandbox · belay's side: host, jobs, output · persistent services.

// Times and sizes: what takes longer is reported as left, what is larger is cut.
const (
	keeperName, ctlFD = "cmd-keeper", 3                       // argv[0] and comm: kill by name must not hit belay and all keepers at once; the socketpair's end
	wedged, endBound  = grace + time.Second, 10 * time.Second // until a keeper that ends its tree is killed itself; until a tree is given up
	// Between TERM and KILL, of a command and of a released service; for the end of the output once the tree is gone;
	// between two looks at a tree; from a keeper to its command (milliseconds, unless somebody stopped it or a directory
	// hangs); one Read, Write or Edit; for belay to read what keepers have said.
	grace, stopGrace, eofWait, pause = 500 * time.Millisecond, 5 * time.Second, time.Second, 3 * time.Millisecond
	startBound, fileBound, lookAgain = 5 * time.Second, 30 * time.Second, 500 * time.Millisecond

	// Bytes of a long output that are shown from its start and from its end, and kept in the scratch directory; of a
	// file for Read and Edit; threads of a keeper.
	headKeep, tailKeep, spillMax, fileMax, spareMax = 6000, 24000, 64 << 20, 64 << 20, 6
	// One Read; bytes of one argument (MAX_ARG_STRLEN less the NUL, execve(2)); of a dead service's log in the error;
	// thousandths of the memory that count as a command's own when it ends, and the most that can.
	readLines, readBytes, commandMax, logTail, oomMore, oomMost = 2000, 50 << 10, 131071, 2000, 300, 1000
)

// proc is one line of the process list. pid and start together name a process
// for good within one boot.
type proc struct {
	pid, ppid, sid, threads int
	state                   byte   // of the first thread
	start                   uint64 // clock ticks since boot
}

// dead is false of a process whose first thread alone has ended: it is a zombie
// by its state, and its other threads run on.
func (p proc) dead() bool { return (p.state == 'Z' || p.state == 'X') && p.threads <= 1 }

// String names what could not be ended: pid, owner and state.
func (p proc) String() string {
	owner := "not shown by /proc"
	if fi, err := os.Stat("/proc/" + strconv.Itoa(p.pid)); err == nil {
		owner = strconv.Itoa(int(fi.Sys().(*syscall.Stat_t).Uid))
	}
	return fmt.Sprintf("pid %d (uid %s, state %c)", p.pid, owner, cmp.Or(p.state, '?'))
}

// readProc parses /proc/PID/stat, false for a pid that is gone or hidden. Any other
// error, such as that of a full file table, tells neither: the state is then '?'. The
// command name may hold blanks and ')', so fields count from the last ')'
// (proc_pid_stat(5)).
func readProc(pid int) (p proc, ok bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return proc{state: when[byte](err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) && !errors.Is(err, unix.ESRCH), '?')}, false
	}
	p.pid, p.state = pid, f[0][0]
	p.ppid, _ = strconv.Atoi(f[1])
	p.sid, _ = strconv.Atoi(f[3])
	p.threads, _ = strconv.Atoi(f[17])
	p.start, _ = strconv.ParseUint(f[19], 10, 64)
	return p, true
}

// processes lists all processes. One that vanishes or is hidden is left out:
// a cleanup must not stop because of it. Where one cannot be read, or /proc shows
// nothing, who is there is not known, which must not pass for nobody: the list is
// then one proc of the state '?'.
func processes() (all []proc) {
	entries, err := os.ReadDir("/proc")
	for _, e := range entries {
		pid, _ := strconv.Atoi(e.Name())
		if p, ok := readProc(pid); ok || p.state == '?' {
			all = append(all, p)
		}
	}
	if err != nil || len(all) == 0 || slices.ContainsFunc(all, func(p proc) bool { return p.state == '?' }) {
		return []proc{{state: '?'}}
	}
	return all
}

// children lists what the kernel says of our own children, where it is built to:
// those that /proc hides too (hidepid), and while each process forks its successor
// and exits the newest, for which a look at all processes is always too late.
func children() (all []proc) {
	// Orphans come to the first thread; no file without CONFIG_PROC_CHILDREN, proc(5).
	b, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	for _, f := range strings.Fields(string(b)) {
		pid, _ := strconv.Atoi(f)
		p, _ := readProc(pid) // of a hidden one only what is set here is known
		p.pid, p.ppid, p.sid = pid, os.Getpid(), cmp.Or(p.sid, pid)
		all = append(all, p)
	}
	return all
}

// below gives the living descendants of root in all, without those that skip,
// if there is one, names and what is below them. A look is not of one moment: when
// our parent dies in it, and its number is given anew below us, we seem to be our
// own descendant.
func below(all []proc, root int, skip func(proc) bool) (out []proc) {
	for _, p := range all {
		if p.ppid == root && p.pid != os.Getpid() && (skip == nil || !skip(p)) {
			if !p.dead() {
				out = append(out, p)
			}
			out = append(out, below(all, p.pid, skip)...)
		}
	}
	return out
}

// signalAll signals the processes that were listed and no others: FindProcess
// takes a pidfd first and the start time is compared afterwards, so a reused
// pid is never hit. It counts what somebody else owns (EPERM), once for each
// signal; what is gone is no error.
func signalAll(list []proc, sigs ...os.Signal) (denied int) {
	for _, p := range list {
		h, _ := os.FindProcess(p.pid) // never fails on Linux
		q, _ := readProc(p.pid)
		for _, sig := range sigs {
			// Both starts are 0 of a child that /proc hides.
			if q.start == p.start && p.pid > 1 && errors.Is(h.Signal(sig), unix.EPERM) {
				denied++
			}
		}
		h.Release()
	}
	return denied
}

// endTree stops what list gives until a look finds nothing new, then kills it,
// again and again until list gives nothing. A stopped process cannot fork and
// keeps its pid; without that a respawning tree of 200 outlives list-and-kill
// for many seconds (measured). It ends early when all that is left belongs to
// others, at the latest after endBound, and names what is left then, "" for
// nothing.
func endTree(list func() []proc) string {
	seen := map[int]uint64{}
	for bound := time.Now().Add(endBound); ; {
		left, late := list(), time.Now().After(bound)
		fresh := slices.DeleteFunc(slices.Clone(left), func(p proc) bool { old := seen[p.pid]; seen[p.pid] = p.start; return old == p.start })
		switch {
		case len(fresh) > 0 && !late:
			signalAll(fresh, unix.SIGSTOP)
		case signalAll(left, unix.SIGKILL) == len(left) || late:
			return strings.Trim(fmt.Sprint(left), "[]")
		default:
			time.Sleep(pause)
		}
	}
}

// when gives v where it holds, else the zero value.
func when[T any](holds bool, v T) (out T) {
	if holds {
		out = v
	}
	return out
}

// signalName gives SIGTERM and the like, from a table of x/sys: no system call.
func signalName(sig syscall.Signal) string { return cmp.Or(unix.SignalName(sig), sig.String()) }

// jobSpec travels to the keeper over fd 3 as JSON: never in argv, which every
// user may read. It is one line; after it each order is one byte.
type jobSpec struct {
	Argv    []string
	Dir     string
	Persist bool // no Pdeathsig: the service must survive its keeper's exit
	Confine *confinement
	File    *fileRequest // instead of Argv
}

// An order is one byte, and a keeper takes it as it takes a signal; none has the
// number of one. TERM, grace and KILL · KILL now · does the command itself live?
// · exit and touch nothing.
const orderEnd, orderKill, orderAlive, orderLetGo syscall.Signal = 'T', 'K', 'A', 'R'

// note is what a keeper tells belay, one JSON object a line. One without a kind
// says who the command is, at its start and when asked whether it lives; the
// last one is failed, file, gone or released.
type note struct {
	Kind, Text, Left string          // Text: of failed and file; Left: of gone, processes that could not be ended
	Pid, Strays      int             // 0: the command itself is over; of gone: processes that it had left behind
	Status           unix.WaitStatus // of gone
}

// keeper is the process between belay and one command. Its main goroutine is
// locked to a thread: Pdeathsig follows the thread that forked (prctl(2)),
// Landlock and seccomp hold for one thread.
type keeper struct {
	ctl, oom      *os.File // oom: the file of score
	leader, score int      // the command, 0 once it is reaped; the keeper's, for the choice of whom to kill when memory ends
	last          note
}

// keeperMain is the whole life of a keeper; it gives the exit code. Its start
// costs every command about 3 ms, so nothing comes before it.
func keeperMain() int {
	runtime.LockOSThread()
	k := &keeper{ctl: os.NewFile(ctlFD, keeperName)}
	// Where no thread can be had (RLIMIT_NPROC, pids.max) the Go runtime ends a process that wants one, and an ended
	// keeper leaves its tree. So it takes all that it can need before there is a tree; the runtime keeps idle threads.
	var there, idle sync.WaitGroup
	runtime.GOMAXPROCS(1)
	there.Add(spareMax)
	for range spareMax {
		// owner: keeperMain; ends when as many threads are there; joined by idle
		idle.Go(func() { runtime.LockOSThread(); there.Done(); there.Wait(); runtime.UnlockOSThread() })
	}
	idle.Wait()
	in, spec := bufio.NewReader(k.ctl), jobSpec{}
	line, _ := in.ReadBytes('\n')
	if json.Unmarshal(line, &spec) != nil {
		return 2 // started by hand, or belay died
	}
	// PR_SET_NAME, but of the main thread, whichever this one is.
	os.WriteFile("/proc/self/comm", []byte(keeperName), 0)
	// proc_pid_oom_score_adj(5), opened before a sandbox forbids it; without it nothing is written.
	k.oom, _ = os.OpenFile("/proc/self/oom_score_adj", os.O_RDWR, 0)
	fmt.Fscan(k.oom, &k.score)
	err := beParent()
	if err == nil && spec.Confine != nil {
		err = spec.Confine.apply()
	}
	switch {
	case err != nil:
		err = fmt.Errorf("the sandbox cannot be applied, so nothing was run: %w", err)
	case spec.File != nil:
		k.last.Kind = "file"
		k.last.Text, err = spec.File.do()
	default:
		k.last.Kind, err = k.run(spec, in)
	}
	if err != nil {
		k.last = note{Kind: "failed", Text: err.Error()}
	}
	k.tell(k.last)
	return 0
}

// tell has no error: belay may be dead, which the orders show.
func (k *keeper) tell(n note) { json.NewEncoder(k.ctl).Encode(n) }

// run starts the command and stays until its tree is gone or it may let go,
// and says which. orders is the rest of what belay sends.
func (k *keeper) run(spec jobSpec, orders io.ByteReader) (kind string, err error) {
	attr := &syscall.ProcAttr{Dir: spec.Dir, Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: when(!spec.Persist, unix.SIGKILL)}}
	// When memory ends, what the command has forked goes before belay and the keeper, both of which may be larger than any
	// of it and would leave it behind. A service is to live on with the score that belay was given.
	fmt.Fprint(k.oom, min(k.score+when(!spec.Persist, oomMore), oomMost))
	// fork and execve(2) with descriptors 0, 1 and 2 only; an error such as ENOENT is the command's.
	if k.leader, err = syscall.ForkExec(spec.Argv[0], spec.Argv, attr); err != nil {
		return "", fmt.Errorf("cannot start %s with cwd %s: %w", spec.Argv[0], spec.Dir, err)
	}
	fmt.Fprint(k.oom, k.score)
	k.tell(note{Pid: k.leader})
	// Only now, off the command's critical path: a signal before this point kills the keeper, which is safe.
	// They are caught and not ignored: an ignored signal stays ignored in the command (execve(2)).
	events := make(chan os.Signal, 16)
	signal.Notify(events, unix.SIGCHLD, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP)
	// owner: keeper.run; ends when belay is gone or the keeper exits; joined by its exit
	go func() {
		for order, err := byte(0), error(nil); err == nil; events <- syscall.Signal(order) {
			order, err = orders.ReadByte() // 0, which ends the tree, when belay is gone
		}
	}()
	var kill <-chan time.Time // nil until the tree is ending
	for ending := false; !k.reap(); {
		if ending = ending || k.leader == 0; ending && kill == nil {
			all := k.tree()
			kill, k.last.Strays = time.After(grace), when(k.leader == 0, len(all))
			signalAll(all, unix.SIGTERM, unix.SIGCONT) // a stopped process acts on TERM only after CONT (signal(7))
		}
		select {
		case sig := <-events:
			switch sig {
			case orderKill:
				kill = time.After(0)
			case orderAlive:
				k.reap()
				k.tell(note{Pid: when(!ending, k.leader)}) // what is being ended does not count as alive
			case orderLetGo:
				return "released", nil
			default:
				ending = ending || sig != unix.SIGCHLD // reaped above
			}
		case <-kill:
			if k.leader > 1 {
				// kill(2) on the group while its leader is not reaped, so that the number is still its own.
				unix.Kill(-k.leader, unix.SIGKILL)
			}
			// Once everything is dead the second leaves no zombie: it is all the keeper's.
			k.last.Left = cmp.Or(endTree(k.tree), when(!k.reap(), "children that /proc does not show"))
			return "gone", nil
		}
	}
	return "gone", nil
}

// reap collects every dead child. True is the proof that the tree is gone:
// ECHILD, no child, hence no descendant of a subreaper.
func (k *keeper) reap() bool {
	for {
		var ws unix.WaitStatus
		// wait4(2), which does not block and so is never interrupted: nothing else in a keeper waits, os/exec is not used here.
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if pid <= 0 {
			return err == unix.ECHILD
		}
		if pid == k.leader {
			k.leader, k.last.Status = 0, ws
		}
	}
}

// tree lists what lives below the keeper. That nobody is seen is no proof.
func (k *keeper) tree() (all []proc) {
	if all = below(processes(), os.Getpid(), nil); len(all) == 0 && !k.reap() {
		all = children()
	}
	return all
}

// beParent readies belay or a keeper for what it starts: every descriptor above
// 2 stays out of that, those that belay's caller left open among them (a lock,
// for example), and its orphans come here. A loop and not close_range(2), whose
// flag for this came with Linux 5.11.
func beParent() error {
	open, err := os.ReadDir("/proc/self/fd")
	for _, e := range open {
		if fd, _ := strconv.Atoi(e.Name()); fd >= ctlFD {
			// fcntl(2) F_SETFD; EBADF for the directory just read.
			unix.CloseOnExec(fd)
		}
	}
	// prctl(2): the orphans of a tree, or of a killed keeper, become our children.
	return cmp.Or(err, os.NewSyscallError("prctl PR_SET_CHILD_SUBREAPER", unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)))
}

// fileRequest is one Read, Write or Edit. Its keeper is confined as for Bash,
// so Landlock is the one boundary; belay itself opens no path of the model.
type fileRequest struct {
	Tool, Path, Content, Old, New string
	All                           bool
	Offset, Limit                 int // of Read: first line from 1, number of lines
}

func (r *fileRequest) do() (string, error) {
	if r.Tool == "Write" {
		return fmt.Sprintf("wrote %d bytes to %s", len(r.Content), r.Path), cmp.Or(os.MkdirAll(filepath.Dir(r.Path), 0o777), replaceFile(r.Path, []byte(r.Content)))
	}
	b, err := readRegular(r.Path)
	n := bytes.Count(b, []byte(r.Old))
	switch {
	case err != nil:
		return "", err
	case r.Tool == "Read":
		return r.number(b)
	case n == 0 || n > 1 && !r.All:
		return "", fmt.Errorf("old occurs %d times in %s: it must match exactly, blanks and line ends included, and once unless all:true", n, r.Path)
	}
	return fmt.Sprintf("replaced %d occurrences in %s", n, r.Path), replaceFile(r.Path, bytes.ReplaceAll(b, []byte(r.Old), []byte(r.New)))
}

// number gives numbered lines, at most readLines and readBytes of them.
func (r *fileRequest) number(b []byte) (string, error) {
	lines, first := slices.Collect(strings.Lines(strings.ToValidUTF8(string(b), "\uFFFD"))), max(r.Offset, 1)
	switch {
	case bytes.IndexByte(b, 0) >= 0:
		return "", fmt.Errorf("%s is a binary file", r.Path)
	case first > max(len(lines), 1):
		return "", fmt.Errorf("%s has only %d lines", r.Path, len(lines))
	}
	out, n := []byte(nil), first
	for last := min(len(lines), first-1+cmp.Or(min(max(r.Limit, 0), readLines), readLines)); n <= last && len(out) <= readBytes; n++ {
		out = fmt.Appendf(out, "%6d\t%s\n", n, strings.TrimRight(lines[n-1], "\r\n"))
	}
	if len(out) > readBytes {
		out = fmt.Appendf(out[:readBytes-unfinished(out[:readBytes])], "\n… cut in line %d of %d", n-1, len(lines))
	} else if n <= len(lines) {
		out = fmt.Appendf(out, "… lines %d to %d follow", n, len(lines))
	}
	return string(out), nil
}

// readRegular reads a file without waiting for a FIFO's writer. What is no
// regular file or lies in procfs is refused: a file there may be another
// process's memory or environment.
func readRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	fi, statErr := f.Stat() // f is nil after an error, which its methods bear
	defer f.Close()
	var fs unix.Statfs_t
	// fstatfs(2) on the descriptor that is read afterwards: no race with a rename.
	err = cmp.Or(err, statErr, unix.Fstatfs(int(f.Fd()), &fs))
	switch {
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular() || fs.Type == unix.PROC_SUPER_MAGIC:
		return nil, fmt.Errorf("%s is no regular file, or lies in /proc: refused", path)
	case fi.Size() > fileMax:
		return nil, fmt.Errorf("%s has %d bytes, at most %d can be read", path, fi.Size(), fileMax)
	}
	return io.ReadAll(io.LimitReader(f, fileMax))
}

// replaceFile puts a whole file in place: a reader sees the old or the new one
// whatever crashes when. A symbolic link is followed; mode and owner stay.
func replaceFile(path string, data []byte) error {
	path = realPath(path)
	temp := filepath.Join(filepath.Dir(path), ".belay-"+randomHex())
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", path, err) // by its own name, not only by that of temp
	}
	defer os.Remove(temp) // ENOENT once it was renamed
	defer f.Close()
	_, err = f.Write(data)
	old, statErr := os.Lstat(path)
	if statErr == nil {
		if owner := old.Sys().(*syscall.Stat_t); os.Geteuid() == 0 {
			err = cmp.Or(err, f.Chown(int(owner.Uid), int(owner.Gid)))
		}
		if err = cmp.Or(err, f.Chmod(old.Mode())); !old.Mode().IsRegular() {
			err = fmt.Errorf("%s is no regular file", path)
		}
	}
	// Without mode and owner of what is there they would be lost.
	if err = cmp.Or(err, when(!errors.Is(statErr, os.ErrNotExist), statErr), f.Sync()); err == nil {
		err = os.Rename(temp, path)
	}
	dir, _ := os.Open(filepath.Dir(path))
	dir.Sync() // makes the rename last; not every file system can
	dir.Close()
	return err
}

// confinement is what a sandboxed keeper applies to itself.
type confinement struct {
	Write   []string // what may be written, with all below it; a missing path is skipped
	Network bool
	ABI     int // of Landlock, as belay found it; tests lower it
}

// planSandbox decides what a mode means here: nil for no limits of ours, else
// what to confine to. It fails closed.
func planSandbox(o jobOptions, abi int) (*confinement, error) {
	if o.sandbox == "external-sandbox" || o.sandbox == "danger-full-access" {
		return nil, nil
	}
	c := &confinement{Network: o.network, ABI: abi, Write: []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts", "/dev/shm"}}
	workspace, why := realPath(o.workspace), ""
	if o.sandbox == "workspace-write" {
		c.grant(append([]string{workspace}, o.writable...)...)
		c.grant(c.gitCommon(workspace))
	}
	// seccomp(2) without a filter does nothing. EFAULT is normal: one would be taken. EINVAL: not built in; EPERM or
	// ENOSYS: filtered by the container.
	switch _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, 0); {
	case abi < 2:
		why = fmt.Sprintf("it needs Landlock ABI 2 (Linux 5.19), this kernel offers %d", abi)
	case !slices.Contains([]string{"amd64", "arm64"}, runtime.GOARCH) || e != unix.EFAULT:
		why = fmt.Sprintf("it needs system call filters on amd64 or arm64, this is %s, where seccomp says: %v", runtime.GOARCH, e)
	case c.grants("/") || o.home != "" && c.grants(o.home):
		why = fmt.Sprintf("workspace %s or another writable directory is / or holds belay's home %s, so that commands could write the next run's configuration: take another --workspace or --home", o.workspace, o.home)
	}
	if why != "" {
		return nil, fmt.Errorf("sandbox %s refused: %s\nif the container is your sandbox: belay exec --sandbox external-sandbox …; see docs/runbook.md#sandbox", o.sandbox, why)
	}
	return c, nil
}

// grant lets absolute paths be written. Links are resolved once, and a path
// below another one is no grant of its own: a command could put a link in its
// place, and the next keeper would open what it leads to. Nor is one that is no
// UTF-8: in JSON it is the name of something else.
func (c *confinement) grant(paths ...string) {
	for _, path := range paths {
		if path = realPath(path); filepath.IsAbs(path) && utf8.ValidString(path) && !c.grants(path) {
			c.Write = append(slices.DeleteFunc(c.Write, func(w string) bool { return within(w, path) }), path)
		}
	}
}

// grants is true for what may be written, there or not.
func (c *confinement) grants(path string) bool {
	return slices.ContainsFunc(c.Write, func(w string) bool { return within(realPath(path), w) })
}

// lacks names what this kernel's Landlock cannot do, "" for nothing.
func (c *confinement) lacks() string {
	return when(c.ABI < 6, "sandbox: Landlock lacks "+when(c.ABI < 3, "truncate, which is filtered instead, and ")+"scopes of signals and abstract sockets here")
}

// gitCommon is the repository of a linked worktree, "" where there is none.
// The workspace's own .git file may be forged, so the repository must name it
// in return, from where no command can write (gitrepository-layout(5)).
func (c *confinement) gitCommon(workspace string) string {
	named := func(file, prefix string) string { // the path in a file of one line, the root for another text
		b, _ := readRegular(file) // a command may have put a FIFO there
		path, ok := strings.CutPrefix(strings.TrimSpace(string(b)), prefix)
		path = filepath.Join(when(!filepath.IsAbs(path), filepath.Dir(file)), path)
		return realPath(cmp.Or(when(ok, path), "/"))
	}
	ours := filepath.Join(workspace, ".git")
	dir := named(ours, "gitdir: ")
	return when(!c.grants(dir) && filepath.Base(filepath.Dir(dir)) == "worktrees" && named(filepath.Join(dir, "gitdir"), "") == ours, filepath.Dir(filepath.Dir(dir)))
}

// realPath is an absolute path without links, as far as it exists.
func realPath(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil || path == "/" {
		return real
	}
	return filepath.Join(realPath(filepath.Dir(path)), filepath.Base(path))
}

// within compares clean paths.
func within(path, dir string) bool { return dir == "/" || strings.HasPrefix(path+"/", dir+"/") }

// landlockABI is 0 where Landlock is not built in (ENOSYS), not enabled
// (EOPNOTSUPP) or filtered by the container (EPERM).
func landlockABI() int {
	// landlock_create_ruleset(2) with the version flag makes nothing; it gives -1 for an error.
	abi, _, _ := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	return max(0, int(abi))
}

// apply restricts the calling thread and so all that it forks from now on, in
// the order below; any piece that fails is an error, and the command is not
// started.
func (c *confinement) apply() error {
	return cmp.Or(
		// prctl(2): this thread alone is confined. A command that could trace us (as it may trace what it started)
		// would write the code of our other threads, or take the control socket. The exec gives it a new memory image.
		os.NewSyscallError("prctl PR_SET_DUMPABLE", unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)),
		// prctl(2): what follows needs it without privileges, and it ends setuid programs.
		os.NewSyscallError("prctl PR_SET_NO_NEW_PRIVS", unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
		c.landlock(), dropCapabilities(), c.filterCalls())
}

// landlock allows writing below c.Write only. All write rights go together:
// an atomic replacement needs REMOVE, REFER and TRUNCATE beside WRITE. IOCTL
// stays free, it would break terminals for little.
func (c *confinement) landlock() error {
	const file, read = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE, unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	attr := unix.LandlockRulesetAttr{ // the newest right that we handle, and all before it
		Handled_access_fs:  (2*unix.LANDLOCK_ACCESS_FS_TRUNCATE - 1) &^ read &^ when[uint64](c.ABI < 3, unix.LANDLOCK_ACCESS_FS_TRUNCATE),
		Handled_access_net: when[uint64](c.ABI >= 4 && !c.Network, unix.LANDLOCK_ACCESS_NET_BIND_TCP|unix.LANDLOCK_ACCESS_NET_CONNECT_TCP),
		Scoped:             when[uint64](c.ABI >= 6, unix.LANDLOCK_SCOPE_SIGNAL|unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET),
	}
	// landlock_create_ruleset(2): a longer attribute than the kernel knows is fine while its tail is zero.
	rules, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	for _, path := range c.Write {
		f, err := os.OpenFile(path, unix.O_PATH, 0) // needs no permission on the file itself
		if e != 0 || err != nil {                   // what cannot be opened so could not be written either
			continue
		}
		rule := unix.LandlockPathBeneathAttr{Allowed_access: attr.Handled_access_fs, Parent_fd: int32(f.Fd())}
		if fi, err := f.Stat(); err != nil || !fi.IsDir() {
			rule.Allowed_access &= file // rights that only directories have are EINVAL on a file
		}
		// landlock_add_rule(2); the rule set keeps the file, not the descriptor.
		_, _, e = unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, rules, unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
		f.Close()
	}
	if e == 0 {
		// landlock_restrict_self(2): E2BIG when 16 layers are in use. The descriptor closes at the exec.
		_, _, e = unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, rules, 0, 0)
	}
	return os.NewSyscallError("landlock", when[error](e != 0, e))
}

// dropCapabilities leaves what package managers and compilers need as root.
// With no_new_privs an exec cannot bring the others back (capabilities(7)).
func dropCapabilities() error {
	const keep = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID | 1<<unix.CAP_KILL
	head, data := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{} // all kept ones are in the first word
	// capget(2) of this thread.
	err := os.NewSyscallError("capget", unix.Capget(&head, &data[0]))
	data = [2]unix.CapUserData{{Effective: data[0].Permitted & keep, Permitted: data[0].Permitted & keep}}
	// capset(2) of this thread; lowering is always allowed.
	return cmp.Or(err, os.NewSyscallError("capset", unix.Capset(&head, &data[0])))
}

// filterCalls installs a seccomp filter. Foreign ABIs and io_uring (which
// opens sockets past a filter) do not exist; prlimit(2) is for the caller itself,
// since a limit of memory or descriptors would keep belay and keepers from
// ending what they started; without network, socket(2) is for
// AF_UNIX and AF_NETLINK only; below Landlock ABI 3, truncate(2) and O_TRUNC
// without writing are refused, and openat2(2), whose flags are behind a
// pointer, does not exist.
func (c *confinement) filterCalls() error {
	const (
		load, and     = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		is, from, ret = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		nosys, deny   = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS), unix.SECCOMP_RET_ERRNO | uint32(unix.EACCES)

		// Offsets in struct seccomp_data (args are 8 bytes each, low half first); open(2), which arm64 does not have;
		// the first call of amd64's x32 ABI.
		nr, arch, args, openAMD64, x32 = 0, 4, 16, 2, 0x40000000
	)
	type op unix.SockFilter // code, jumps for yes and no in instructions, operand
	// Others were refused by planSandbox.
	native := map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[runtime.GOARCH]
	ops := []op{{load, 0, 0, arch}, {is, 1, 0, native}, {ret, 0, 0, nosys},
		{load, 0, 0, nr}, {from, 0, 1, x32}, {ret, 0, 0, nosys}, {is, 0, 1, unix.SYS_IO_URING_SETUP}, {ret, 0, 0, nosys},
		{is, 0, 4, unix.SYS_PRLIMIT64}, {load, 0, 0, args}, {is, 0, 1, 0}, {ret, 0, 0, unix.SECCOMP_RET_ALLOW}, {ret, 0, 0, deny}}
	if c.ABI < 3 {
		ops = append(ops, op{is, 0, 1, unix.SYS_TRUNCATE}, op{ret, 0, 0, deny}, op{is, 0, 1, unix.SYS_OPENAT2}, op{ret, 0, 0, nosys})
		// Of the flags of each call that opens.
		offsets := map[string]map[uint32]uint32{"amd64": {openAMD64: args + 8, unix.SYS_OPENAT: args + 16}, "arm64": {unix.SYS_OPENAT: args + 16}}
		for call, offset := range offsets[runtime.GOARCH] {
			ops = append(ops, op{is, 0, 6, call}, op{load, 0, 0, offset}, op{and, 0, 0, unix.O_ACCMODE | unix.O_TRUNC}, op{is, 1, 0, unix.O_TRUNC},
				op{is, 0, 1, unix.O_TRUNC | unix.O_ACCMODE}, op{ret, 0, 0, deny}, op{ret, 0, 0, unix.SECCOMP_RET_ALLOW}) // mode 3 is neither reading nor writing to Landlock
		}
	}
	if !c.Network {
		ops = append(ops, op{is, 0, 4, unix.SYS_SOCKET}, op{load, 0, 0, args}, op{is, 2, 0, unix.AF_UNIX}, op{is, 1, 0, unix.AF_NETLINK}, op{ret, 0, 0, deny})
	}
	ops = append(ops, op{ret, 0, 0, unix.SECCOMP_RET_ALLOW})
	prog := unix.SockFprog{Len: uint16(len(ops)), Filter: (*unix.SockFilter)(&ops[0])}
	// seccomp(2) on this thread; EINVAL would be a bug in the filter.
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	return os.NewSyscallError("seccomp", when[error](e != 0, e))
}

// host is belay as the ancestor of all keepers: one in a process.
type host struct {
	// set once: children that belay had before its first line; sessions, theirs and belay's own, in which none of our commands can be
	pid               int
	foreign, sessions map[int]bool
	newest            uint64 // start of the last of them: what has one of these numbers and is younger has it anew, and is ours

	mu      sync.Mutex   // starting a keeper and looking for orphans exclude each other
	keepers map[int]*job // guarded by mu: keepers not yet waited for by os/exec, by pid
	held    bool         // guarded by mu: nothing is signalled now
}

// newHost prepares the process before anything is started.
func newHost() (*host, error) {
	// In a PID namespace of our own without a /proc of its own (unshare -p -f), pids there are those of other processes.
	own, err := os.Readlink("/proc/self")
	// prctl(2): the key in our environment and memory is not for commands, which run as the same user.
	if err = cmp.Or(err, when(own != strconv.Itoa(os.Getpid()), errors.New("/proc is of another PID namespace")), beParent(), os.NewSyscallError("prctl PR_SET_DUMPABLE", unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0))); err != nil {
		return nil, fmt.Errorf("cannot prepare the process, which needs /proc mounted to see and end what it starts: %w; see docs/runbook.md#environment", err)
	}
	h, all := &host{pid: os.Getpid(), foreign: map[int]bool{}, sessions: map[int]bool{}, keepers: map[int]*job{}}, processes()
	self, ok := readProc(h.pid)
	for _, p := range append(below(all, h.pid, nil), append(children(), self)...) {
		h.foreign[p.pid], h.sessions[p.sid], h.newest = true, true, max(h.newest, p.start)
	}
	// Without them an earlier child would be taken for an orphan.
	return h, when(!ok || all[0].state == '?', errors.New("cannot list the processes in /proc, so what was there before could not be told from what is started: run it again; see docs/runbook.md#environment"))
}

// hold keeps everything alive while receipts are written, and for good once
// services are let go: from then on belay signals nothing.
func (h *host) hold(on bool) { h.mu.Lock(); h.held = on; h.mu.Unlock() }

// waited drops a keeper that os/exec has reaped.
func (h *host) waited(pid int) { h.mu.Lock(); delete(h.keepers, pid); h.mu.Unlock() }

// killAll orders every keeper to kill at once: a second signal.
func (h *host) killAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, j := range when(!h.held, h.keepers) {
		j.order(orderKill)
	}
}

// orphans reaps by pid what has died and is nobody's (never wait4(-1), which
// would steal from os/exec) and lists what killed keepers left.
func (h *host) orphans() (left []proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := processes()
	if h.held || all[0].state == '?' {
		return when(!h.held, all)
	}
	skip := func(p proc) bool {
		// While an earlier child is a zombie, neither its number nor that of its session is given again.
		earlier := h.foreign[p.pid] && p.start <= h.newest
		if p.ppid == h.pid && h.keepers[p.pid] == nil && !earlier {
			// wait4(2), not blocking: 0 while it lives, ECHILD when it was not ours after all.
			unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
		}
		// A session is still an earlier one while somebody is in it who was there at the start; its leader may have gone.
		return p.ppid == h.pid && (h.keepers[p.pid] != nil && !h.keepers[p.pid].stuck.Load() || earlier || h.sessions[p.sid] && slices.ContainsFunc(all, func(q proc) bool { return q.sid == p.sid && q.start <= h.newest }))
	}
	// One that skip reaps here counts all the same: the next look shows who came after it.
	if left = below(all, h.pid, skip); len(left) == 0 {
		left = slices.DeleteFunc(children(), skip)
	}
	return left
}

// pollFD says what is true of fd (POLLERR of a pipe or POLLHUP of a socket that
// nobody reads, whatever was asked for), after at most wait.
func pollFD(fd int, events int16, wait time.Duration) int16 {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for end := time.Now().Add(wait); ; {
		// poll(2): EINTR is normal. What cannot be asked, as without memory, is taken as one hopes: the write shows it.
		if _, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds()))); err != unix.EINTR {
			return fds[0].Revents | when(err != nil, events)
		}
	}
}

// readerLeft is true when nobody can read fd any more: never of a file.
func readerLeft(fd int) bool { return pollFD(fd, 0, 0)&(unix.POLLERR|unix.POLLHUP) != 0 }

// takesOneWrite is true when fd takes PIPE_BUF bytes at once, after at most d.
func takesOneWrite(fd int, d time.Duration) bool { return pollFD(fd, unix.POLLOUT, d) == unix.POLLOUT }

// jobOptions: plain values of the configuration.
type jobOptions struct {
	runID, home, workspace, sandbox string // home "": nothing is recorded
	network                         bool
	writable, dropNames, keepNames  []string // directories; names that children never see; names that the scrub keeps
}

// jobs is the table of one run's commands.
type jobs struct {
	// set once, but all
	host    *host
	opts    jobOptions
	scratch *os.File // the directory, locked; nil where none can be written
	root    *os.Root // the same: a command may put a link in its place where it lies in the workspace
	confine *confinement
	env     []string
	all     []*job // in order of their start, owned by the goroutine of the run, which ends them when it starts no more
}

// job is one command, or one file tool, with its keeper.
type job struct {
	// set once
	id, command, log string // log: of a persistent service, else ""
	cmd              *exec.Cmd
	ctl              *os.File
	out              output
	began            time.Time
	said             chan int      // who the command is, as the keeper says it; closed when no more can come
	gone             chan struct{} // closed when nothing below the keeper is left and the output is whole
	// over: gone is closed; stuck: the keeper cannot be killed, so what is below it is nobody's; waited: the keeper is
	// dead, so if it left anything belay ends that now
	over, cancelled, stuck, waited atomic.Bool

	pid int // of the command, set before start returns
	// owned by follow until gone is closed
	last note
}

// newJobs makes the scratch directory and decides about the sandbox, before
// anything is sent to a provider.
func newJobs(h *host, o jobOptions) (*jobs, error) {
	confine, err := planSandbox(o, landlockABI())
	if err != nil {
		return nil, err
	}
	t := &jobs{host: h, opts: o, confine: confine, scratch: makeScratch(os.Getenv("TMPDIR")), env: append(scrub(os.Environ(), o.dropNames, o.keepNames), "BELAY_RUN="+o.runID)}
	if t.scratch != nil {
		if t.root, err = os.OpenRoot(t.scratch.Name()); err == nil && confine != nil {
			confine.grant(t.scratch.Name())
			t.env = append(t.env, confine.redirects(t.scratch.Name())...)
		}
	}
	return t, err
}

// makeScratch makes and locks a directory in the first place that can be
// written, nil where there is none, and removes what dead runs left there: a
// directory is in use while its flock is held.
func makeScratch(tmp string) *os.File {
	for _, parent := range []string{tmp, "/tmp", "/dev/shm"} {
		path := filepath.Join(parent, "belay-"+randomHex())
		// No JSON can name other bytes than UTF-8 to a keeper or to the model.
		if !filepath.IsAbs(parent) || !utf8.ValidString(parent) || os.Mkdir(path, 0o700) != nil {
			continue
		}
		ours := lockDir(path, true) // nil: another run that starts now took it for a leftover, or there are no locks here
		// Not belay-projects, which is somebody's work.
		old, _ := filepath.Glob(filepath.Join(parent, "belay-"+strings.Repeat("[0-9a-f]", 8)))
		for _, path := range old {
			removeDir(lockDir(path, false))
		}
		if ours != nil {
			return ours
		}
		os.Remove(path)
	}
	return nil
}

// lockDir locks a directory, nil when it is none, in use or removed meanwhile; or
// another user's, unless we made it, for a network may give it any owner: whoever
// fills one faster than it is removed would hold us up.
func lockDir(path string, made bool) *os.File {
	d, _ := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	// flock(2) ends with the process whatever kills it; EWOULDBLOCK: in use; EBADF: it was not opened.
	err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if fi, removed := os.Lstat(path); cmp.Or(err, removed) == nil && (made || int(fi.Sys().(*syscall.Stat_t).Uid) == os.Geteuid()) {
		return d
	}
	d.Close()
	return nil
}

// removeDir removes what lockDir gave, if anything; it is the last step of a run. A
// directory that cannot be written, as those of Go's module cache, keeps what is in
// it, so where something stays all of them get that right: below the one that is
// locked, should others be able to put links there meanwhile.
func removeDir(d *os.File) {
	if d != nil && os.RemoveAll(d.Name()) != nil && d.Chmod(0o700) == nil {
		if root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", d.Fd())); err == nil {
			filepath.WalkDir(d.Name(), func(path string, e os.DirEntry, _ error) error {
				if e != nil && e.IsDir() {
					root.Chmod("."+strings.TrimPrefix(path, d.Name()), 0o700)
				}
				return nil
			})
			root.Close()
		}
		os.RemoveAll(d.Name())
	}
	d.Close()
}

// scrub gives the environment without what looks like a secret and without
// belay's own names.
func scrub(env, drop, keep []string) []string {
	suffixes := []string{"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS", "_PASS", "_PWD", "_PAT", "_JWT", "_AUTH", "_AUTH_CONFIG"}
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		secret := slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(strings.ToUpper(name), s) })
		return slices.Contains(drop, name) || secret && !slices.Contains(keep, name)
	})
}

// redirects points caches and git's own configuration into scratch where the
// sandbox forbids the real ones.
func (c *confinement) redirects(scratch string) (env []string) {
	home := os.Getenv("HOME")
	for name, real := range map[string]string{"XDG_CACHE_HOME": home + "/.cache", "GOCACHE": home + "/.cache/go-build", "npm_config_cache": home + "/.npm"} {
		if !c.grants(cmp.Or(os.Getenv(name), real)) {
			env = append(env, name+"="+scratch+"/cache/"+name)
		}
	}
	// As git reads a text, which knows fewer escapes than %q has: HOME may hold any bytes.
	text := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace
	// On a full disk git can write nothing either.
	os.WriteFile(scratch+"/gitconfig", fmt.Appendf(nil, "[include]\n\tpath = \"%s\"\n\tpath = \"%s\"\n", text(cmp.Or(os.Getenv("XDG_CONFIG_HOME"), home+"/.config")+"/git/config"), text(cmp.Or(os.Getenv("GIT_CONFIG_GLOBAL"), home+"/.gitconfig"))), 0o600)
	return append(env, "GIT_CONFIG_GLOBAL="+scratch+"/gitconfig")
}

func randomHex() string { return fmt.Sprintf("%08x", rand.Uint32()) }

// start runs a command under a keeper of its own and returns when it runs or
// why it does not. log, which it closes, makes it a persistent service; stdin
// nil is the null device.
func (t *jobs) start(command, dir string, stdin *string, log *os.File) (*job, error) {
	shell := os.Getenv("SHELL")
	if base := filepath.Base(shell); base != "bash" && base != "zsh" || exec.Command(shell).Err != nil || !filepath.IsAbs(shell) {
		shell = "/bin/sh"
	}
	j := &job{id: "shell_" + randomHex(), command: command, cmd: &exec.Cmd{Env: t.env, WaitDelay: eofWait}}
	j.cmd.Stdout, j.cmd.Stderr = &j.out, &j.out
	if stdin != nil {
		j.cmd.Stdin = strings.NewReader(*stdin)
	}
	if log != nil {
		defer log.Close()
		j.log, j.cmd.Stdout, j.cmd.Stderr = log.Name(), log, log
		j.id = cmp.Or(when(j.log != os.DevNull, strings.TrimSuffix(filepath.Base(j.log), ".log")), j.id)
	} else if t.scratch != nil {
		j.cmd.Env = append(slices.Clone(t.env), "TMPDIR="+t.scratch.Name())
		j.out.file, _ = t.root.OpenFile(j.id+".out", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if len(command) > commandMax {
		return nil, fmt.Errorf("the command has %d bytes, at most %d are possible: write it to a file and run that", len(command), commandMax)
	}
	if err := t.launch(j, jobSpec{Argv: []string{shell, "-c", "--", command}, Dir: dir, Persist: log != nil, Confine: t.confine}); err != nil {
		return nil, err
	}
	select {
	case j.pid = <-j.said:
	case <-time.After(startBound):
		t.all = append(t.all, j) // if it is left now, the end of the run tries again and names it
		return nil, fmt.Errorf("the keeper did not start the command within %s, so it was killed; what is left: %q", startBound, end(orderKill, j))
	}
	if j.pid == 0 {
		return nil, errors.New(j.last.Text)
	}
	t.all = append(t.all, j)
	return j, nil
}

// launch starts the keeper and notes that it is one in one step, so that no look
// for orphans can take it for one.
func (t *jobs) launch(j *job, spec jobSpec) error {
	// socketpair(2), close-on-exec: belay's end exists nowhere else, so its end is belay's end. Reads go through the
	// runtime's poller; os/exec makes the keeper's end block.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("cannot start a keeper: socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), keeperName)
	defer theirs.Close()
	j.ctl, j.said, j.gone, j.began = os.NewFile(uintptr(fds[0]), keeperName), make(chan int, 1), make(chan struct{}), time.Now()
	j.cmd.Path, j.cmd.Args, j.cmd.Dir = "/proc/self/exe", []string{keeperName}, "/"
	// SIGCONT for belay's death wakes a keeper that its command has stopped, which would not see the socket's end.
	j.cmd.ExtraFiles, j.cmd.SysProcAttr = []*os.File{theirs}, &syscall.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGCONT}
	t.host.mu.Lock()
	defer t.host.mu.Unlock()
	if err = j.cmd.Start(); err != nil {
		j.ctl.Close()
		return fmt.Errorf("cannot start a keeper: %w", err)
	}
	t.host.keepers[j.cmd.Process.Pid] = j
	// owner: job; ends when the keeper has exited and its output was read; joined by job.gone
	go j.follow(t.host, spec)
	return nil
}

// follow hands the keeper its job, hears it to its end and, if it died before
// its tree, ends what it left.
func (j *job) follow(h *host, spec jobSpec) {
	json.NewEncoder(j.ctl).Encode(spec) // an error shows below as the end of the notes
	for in := json.NewDecoder(j.ctl); in.Decode(&j.last) == nil && j.last.Kind == ""; {
		j.said <- j.last.Pid
	}
	j.ctl.Close()
	j.cmd.Process.Kill() // it has said its last word, is dead, or says nonsense
	j.cmd.Wait()         // for eofWait longer than the keeper lives, if the output has no end
	h.waited(j.cmd.Process.Pid)
	j.waited.Store(true)
	if j.last.Kind == "" {
		j.last = note{Text: fmt.Sprintf("the keeper ended too early (%s): it was killed, or could have no thread or no memory", j.cmd.ProcessState), Left: endTree(h.orphans)}
	}
	if f := j.out.file; f.Close() == nil && j.out.spilled <= headKeep+tailKeep {
		os.Remove(f.Name()) // it says no more than the results did
	}
	j.over.Store(true)
	close(j.said)
	close(j.gone)
}

func (j *job) order(o syscall.Signal) { j.ctl.Write([]byte{byte(o)}) } // an error means that the keeper has exited

// wait is true when the job is gone, false after timeout or with ctx. It looks
// twice: a belay that was stopped meanwhile finds its timer run out, and what the
// keeper said long ago not yet read.
func (j *job) wait(ctx context.Context, timeout time.Duration) bool {
	for _, d := range []time.Duration{timeout, lookAgain} {
		select {
		case <-j.gone:
		case <-ctx.Done():
		case <-time.After(d):
		}
	}
	return j.over.Load()
}

// end ends jobs, or lets them go, all at once, and names what could not be ended.
// A keeper that has not done it in time, stopped or wedged, is killed, and belay
// does it; that lets go of a service, which has no Pdeathsig and, since the host
// is held by then, is signalled by nobody.
func end(order syscall.Signal, list ...*job) (left string) {
	start := time.Now()
	for _, j := range list {
		// First, since a keeper that was stopped before it read all of its job takes no order. To let go needs no grace.
		// An error means that it has exited.
		time.AfterFunc(wedged-when(order == orderLetGo, grace), func() { j.cmd.Process.Kill() })
		j.order(order)
	}
	for _, j := range list {
		if j.wait(context.Background(), when(!j.stuck.Load(), wedged+endBound)-time.Since(start)) {
			left += strings.TrimSuffix(" "+j.last.Left, " ")
		} else {
			j.stuck.Store(true) // frozen, or traced by what it keeps
			left += fmt.Sprintf(" keeper pid %d", j.cmd.Process.Pid)
		}
	}
	return left
}

// file has a keeper do one Read, Write or Edit.
func (t *jobs) file(ctx context.Context, r *fileRequest) (string, error) {
	j := &job{id: r.Tool, cmd: &exec.Cmd{Env: t.env}}
	if err := t.launch(j, jobSpec{File: r, Confine: t.confine}); err != nil {
		return "", err
	}
	// A keeper in a directory that hangs (FUSE, NFS) cannot even be killed. Then the end of the run tries again, and names it.
	if !j.wait(ctx, fileBound) && end(orderKill, j) != "" {
		t.all = append(t.all, j)
		return "", fmt.Errorf("%s hangs, so that nothing is known of it", r.Path)
	}
	return j.last.Text, when(j.last.Kind != "file", errors.New(j.last.Text))
}

// forget drops a finished job, so that a long run does not grow. One that could
// not be ended stays: the end of the run tries again, and names it.
func (t *jobs) forget(j *job) { t.all = t.list(func(k *job) bool { return k != j || !j.over.Load() }) }

// list gives the jobs that which names, in order of their start.
func (t *jobs) list(which func(*job) bool) []*job {
	return slices.DeleteFunc(slices.Clone(t.all), func(j *job) bool { return !which(j) })
}

// pending: a persistent service that was not cancelled, alive or not.
func (j *job) pending() bool { return j.log != "" && !j.cancelled.Load() }

// endAll ends every job that which names, and what killed keepers left.
func (t *jobs) endAll(order syscall.Signal, which func(*job) bool) string {
	return end(order, t.list(which)...) + strings.TrimSuffix(" "+endTree(t.host.orphans), " ")
}

// output keeps the two ends of what a command prints, whatever that is, and
// its first spillMax bytes in a file.
type output struct {
	file *os.File // set once; nil: none

	mu               sync.Mutex
	buf              []byte // guarded by mu, as all below: what came since the last take, less dropped bytes after headKeep
	dropped, spilled int
	failed           bool // the file cannot be written: a full disk stops it, never the command
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := min(len(b), spillMax-o.spilled); o.file != nil && !o.failed && n > 0 {
		_, err := o.file.Write(b[:n])
		o.spilled, o.failed = o.spilled+n, err != nil
	}
	o.buf = append(o.buf, b...)
	o.trim(2 * (headKeep + tailKeep))
	return len(b), nil
}

// trim cuts the middle out of a buffer of more than limit bytes.
func (o *output) trim(limit int) {
	if over := len(o.buf) - headKeep - tailKeep; len(o.buf) > limit {
		o.buf, o.dropped = slices.Delete(o.buf, headKeep, headKeep+over), o.dropped+over
	}
}

// take gives what came since the last take, cut on characters, and how many
// bytes were left out; lost: the file has not all of them. While the command
// runs, an unfinished character at the end waits for the next take.
func (o *output) take(running bool) (text string, omitted int, lost bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.trim(headKeep + tailKeep)
	b := o.buf[:len(o.buf)-when(running, unfinished(o.buf))]
	o.buf = slices.Clone(o.buf[len(b):])
	if omitted, o.dropped = o.dropped, 0; omitted > 0 {
		head, tail := b[:headKeep-unfinished(b[:headKeep])], b[headKeep:]
		for n := 1; n < utf8.UTFMax && len(tail) > 0 && !utf8.RuneStart(tail[0]); n++ {
			tail = tail[1:]
		}
		omitted += len(b) - len(head) - len(tail)
		text, b = strings.ToValidUTF8(string(head), "\uFFFD")+fmt.Sprintf("\n… %d bytes left out …\n", omitted), tail
	}
	return text + strings.ToValidUTF8(string(b), "\uFFFD"), omitted, o.failed
}

// unfinished counts the bytes of an unfinished character at the end of b.
func unfinished(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if last := b[len(b)-n:]; utf8.RuneStart(last[0]) && !utf8.FullRune(last) {
			return n
		}
	}
	return 0
}

// receipt is one line of <home>/services/released.jsonl.
type receipt struct {
	TaskID    string `json:"task_id"`
	PID       int    `json:"pid"`
	PGID      int    `json:"process_group_id"`
	StartTime uint64 `json:"start_time"` // field 22 of /proc/PID/stat: clock ticks since boot
	BootID    string `json:"boot_id"`
	PIDNS     string `json:"pid_ns"`
	Command   string `json:"command"`
	Workspace string `json:"workspace"`
	Log       string `json:"log"`
	At        string `json:"released_at"`
	Withdrawn bool   `json:"withdrawn,omitempty"` // the run failed after this record: the service was ended
}

// place names this boot and this PID namespace, which is not known where /proc is
// of another one (nsenter -p, unshare -p): there none of our threads has our number.
func place() (boot, ns string) {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	ns, _ = os.Readlink(fmt.Sprintf("/proc/self/task/%d/ns/pid", os.Getpid()))
	return strings.TrimSpace(string(b)), ns
}

// serviceLog makes the log of a new service: the null device and a reason
// where the home cannot be written.
func (t *jobs) serviceLog() (f *os.File, why error) {
	path := filepath.Join(t.opts.home, "services", "shell_"+randomHex()+".log")
	if why = errors.New("HOME is not set"); t.opts.home != "" {
		os.MkdirAll(filepath.Dir(path), 0o700) // its error shows in the next line
		f, why = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	}
	if why != nil {
		f, _ = os.OpenFile(os.DevNull, os.O_WRONLY, 0) // nil would make the command no service; belay does not run without it
	}
	return f, why
}

// confirm has the keeper say that its service lives. The error ends with the
// last lines of its log.
func (t *jobs) confirm(j *job) (receipt, error) {
	p, ok := readProc(j.pid)
	boot, ns := place()
	j.order(orderAlive)
	select {
	case pid := <-j.said:
		if ok && pid == p.pid {
			return receipt{TaskID: j.id, PID: j.pid, PGID: j.pid, StartTime: p.start, BootID: boot, PIDNS: ns,
				Command: j.command, Workspace: t.opts.workspace, Log: j.log, At: time.Now().UTC().Format(time.RFC3339)}, nil
		}
	case <-time.After(time.Second):
	}
	f, _ := os.OpenFile(j.log, unix.O_NONBLOCK|unix.O_NOCTTY, 0) // without it there is nothing to read; as in recordRelease
	f.SetDeadline(time.Now())
	f.Seek(-logTail, io.SeekEnd) // an error means that it is shorter
	b, _ := io.ReadAll(io.LimitReader(f, logTail))
	f.Close()
	return receipt{}, fmt.Errorf("service %s (pid %d) had exited before the run was complete, or its keeper did not say in a second that it lives; the end of its log:\n%s", j.id, j.pid, cmp.Or(strings.TrimRight(strings.ToValidUTF8(string(b), "\uFFFD"), "\n"), "(empty)"))
}

// recordRelease appends receipts to the list of a home, if there are both, and
// syncs it.
func recordRelease(home string, receipts []receipt) error {
	var b bytes.Buffer
	for _, r := range receipts {
		json.NewEncoder(&b).Encode(r) // strings and numbers always encode
	}
	if home == "" || b.Len() == 0 {
		return nil
	}
	// O_NONBLOCK, and no time: a FIFO that a command put there would hold the run, and no signal would end it.
	f, err := os.OpenFile(filepath.Join(home, "services", "released.jsonl"), os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	f.SetDeadline(time.Now())         // which a file does not know
	_, writeErr := f.Write(b.Bytes()) // without the file an error too, as Sync and Close give then
	return cmp.Or(err, writeErr, f.Sync(), f.Close())
}

// ended is false while the service that was confirmed lives.
func (r receipt) ended() bool { p, _ := readProc(r.PID); return p.start != r.StartTime || p.dead() }

// stop ends the service's session and everything below it: TERM, stopGrace,
// KILL. What was seen once is ended even if it leaves the session meanwhile.
func (r receipt) stop() (left string) {
	seen := map[[2]int]bool{{r.PID, int(r.StartTime)}: true} // pid and start of each: in a fresh VM a start may be 0
	list := func() (out []proc) {
		all := processes()
		for _, p := range all {
			leader, there := readProc(p.sid) // of a session that has the number anew it is another one
			if p.sid == r.PID && (!there || leader.start == r.StartTime) || seen[[2]int{p.pid, int(p.start)}] {
				for _, q := range append(below(all, p.pid, nil), p) {
					seen[[2]int{q.pid, int(q.start)}] = true
				}
			}
		}
		return slices.DeleteFunc(all, func(p proc) bool { return p.dead() || p.state != '?' && !seen[[2]int{p.pid, int(p.start)}] })
	}
	signalAll(list(), unix.SIGTERM, unix.SIGCONT)
	for end := time.Now().Add(stopGrace); len(list()) > 0 && time.Now().Before(end); time.Sleep(pause) {
	}
	return endTree(list)
}

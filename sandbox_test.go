//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sandbox_test.go attacks the sandbox. A run of belay gets one command that
// tries every way out, one process for each try, with the test binary as the
// attacker, so that nothing depends on which interpreters an image has. What
// SECURITY.md says is closed must be refused here, and what it says is open
// must work here: a limit that is not tested is a guess.

// attackUsers are the users that a battery runs as: root and one whom file
// permissions bind, or the one that the tests run as.
func attackUsers() []int {
	if os.Getuid() == 0 {
		return []int{0, nobodyID}
	}
	return []int{os.Getuid()}
}

// attacker is a copy of the test binary that every user may start.
var attacker = sync.OnceValues(func() (string, error) {
	b, err := os.ReadFile("/proc/self/exe")
	return programs + "/attacker", errors.Join(err, os.WriteFile(programs+"/attacker", b, 0o755))
})

func attackerBinary(t testing.TB) string { t.Helper(); return pathOf(t, attacker) }

func needLandlock(t *testing.T) {
	t.Helper()
	if abi := landlockABI(); abi < 2 {
		t.Skipf("Landlock ABI %d here, 2 is needed: the sandbox itself cannot be tested, its refusal is", abi)
	}
}

// attack is the attacker's main: one system call by name, its outcome on
// stdout: ok, or the name of the errno.
func attack(args []string) {
	result := "ok"
	if err := attackCall(args[0], args[1:]); err != nil {
		var e syscall.Errno
		if result = err.Error(); errors.As(err, &e) {
			result = unix.ErrnoName(e)
		}
	}
	fmt.Println(result)
}

// attackCall tries the calls on files, then the others.
func attackCall(call string, args []string) error {
	number := func(i int) int { n, _ := strconv.ParseInt(args[i], 0, 64); return int(n) }
	switch call {
	case "open": // PATH FLAGS
		fd, err := unix.Open(args[0], number(1)|unix.O_CLOEXEC, 0o600)
		unix.Close(fd)
		return err
	case "openat2":
		fd, err := unix.Openat2(unix.AT_FDCWD, args[0], &unix.OpenHow{Flags: uint64(number(1))})
		unix.Close(fd)
		return err
	case "truncate":
		return unix.Truncate(args[0], 0)
	case "link":
		return unix.Link(args[0], args[1])
	case "symlink":
		return unix.Symlink(args[0], args[1])
	case "rename":
		return unix.Rename(args[0], args[1])
	case "exchange":
		return unix.Renameat2(unix.AT_FDCWD, args[0], unix.AT_FDCWD, args[1], unix.RENAME_EXCHANGE)
	case "mkdir":
		return unix.Mkdir(args[0], 0o700)
	case "rmdir":
		return unix.Rmdir(args[0])
	case "unlink":
		return unix.Unlink(args[0])
	case "fifo":
		return unix.Mkfifo(args[0], 0o600)
	case "device":
		return unix.Mknod(args[0], unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
	case "bind": // a pathname socket
		fd, _ := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		return unix.Bind(fd, &unix.SockaddrUnix{Name: args[0]})
	case "mount":
		return unix.Mount("x", args[0], "tmpfs", 0, "")
	case "mount in a user namespace":
		c := exec.Command("/proc/self/exe", "attack", "mount", args[0])
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS}
		out, err := c.Output()
		return cmp.Or(err, errors.New(strings.TrimSpace(string(out))))
	case "chmod":
		return unix.Chmod(args[0], uint32(number(1)))
	case "swap": // a directory and a symlink to outside, again and again: DIR LINK TOUCH-WHEN-STARTED
		os.WriteFile(args[2], nil, 0o600)
		for {
			unix.Renameat2(unix.AT_FDCWD, args[0], unix.AT_FDCWD, args[1], unix.RENAME_EXCHANGE)
		}
	}
	return attackBeyond(call, args, number)
}

func attackBeyond(call string, args []string, number func(int) int) error {
	errno := func(_, _ uintptr, e syscall.Errno) error {
		if e == 0 {
			return nil
		}
		return e
	}
	switch call {
	case "socket": // DOMAIN TYPE
		_, err := unix.Socket(number(0), number(1), 0)
		return err
	case "socketpair":
		_, err := unix.Socketpair(number(0), number(1), 0)
		return err
	case "connect": // a unix socket, @ for an abstract one
		fd, _ := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		return unix.Connect(fd, &unix.SockaddrUnix{Name: args[0]})
	case "tcp":
		c, err := net.Dial("tcp", args[0])
		if err == nil {
			c.Close()
		}
		return err
	case "lookup":
		_, err := net.DefaultResolver.LookupHost(context.Background(), args[0])
		var d *net.DNSError
		if errors.As(err, &d) {
			return errors.New("no name")
		}
		return err
	case "io_uring":
		params := make([]byte, 120) // struct io_uring_params
		return errno(unix.Syscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params[0])), 0))
	case "x32": // getpid of the x32 ABI
		return errno(unix.Syscall(0x40000000+39, 0, 0, 0))
	case "kill": // WHO SIGNAL
		return unix.Kill(relative(args[0]), unix.Signal(number(1)))
	case "limit": // of core files, which belay does not write
		return unix.Prlimit(relative(args[0]), unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
	case "ptrace":
		return errno(unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(relative(args[0])), 0, 0, 0, 0))
	case "write memory":
		b := make([]byte, 1)
		local, far := []unix.Iovec{{Base: &b[0], Len: 1}}, []unix.RemoteIovec{{Base: 1, Len: 1}}
		_, err := unix.ProcessVMWritev(relative(args[0]), local, far, 0)
		return err // EFAULT: we were let in, and only the address is bad
	case "take descriptor":
		fd, err := unix.PidfdOpen(relative(args[0]), 0)
		if err == nil {
			_, err = unix.PidfdGetfd(fd, ctlFD, 0)
		}
		return err
	case "read": // a file of /proc, WHO FILE
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", relative(args[0]), args[1]))
		if err == nil && len(args) > 2 && !strings.Contains(string(b), args[2]) {
			return errors.New("other text")
		}
		return err
	case "keeper": // start belay as a keeper of our own, without a sandbox: BELAY COMMAND
		return attackKeeper(args[0], args[1])
	case "capabilities":
		b, _ := os.ReadFile("/proc/self/status")
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, "CapEff:\t"); ok {
				return errors.New(strings.TrimSpace(v))
			}
		}
	}
	return errors.New("no such attack")
}

// relative gives the pid of belay, of our keeper, or of a number.
func relative(who string) int {
	if pid, err := strconv.Atoi(who); err == nil {
		return pid
	}
	for p, ok := readProc(os.Getpid()); ok; p, ok = readProc(p.ppid) {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.pid))
		if strings.TrimSpace(string(comm)) == keeperName {
			return map[string]int{"keeper": p.pid, "belay": p.ppid}[who]
		}
	}
	return -1
}

func attackKeeper(belay, command string) error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	c := &exec.Cmd{Path: belay, Args: []string{keeperName}, ExtraFiles: []*os.File{theirs}}
	if err := c.Start(); err != nil {
		return err
	}
	theirs.Close()
	json.NewEncoder(ours).Encode(jobSpec{Argv: []string{"/bin/sh", "-c", command}, Dir: "/"})
	all, _ := io.ReadAll(ours)
	c.Wait()
	if !bytes.Contains(all, []byte(`"Kind":"gone","Text":"","Left":"","Pid":0,"Strays":0,"Status":0}`)) {
		return errors.New("refused")
	}
	return nil
}

// attempt is one attack: want is every outcome that is right, parted by |.
type attempt struct{ name, command, want string }

// front is what a battery runs in: a run of belay and a directory outside its
// workspace that its user may write, were it not for the sandbox.
type front struct {
	run               *belayRun
	outside, attacker string
	provider          *provider
}

// newFront prepares a run of one command as uid.
func newFront(t *testing.T, uid int, script string, args ...string) *front {
	t.Helper()
	f := &front{attacker: attackerBinary(t), outside: t.TempDir()}
	f.provider = serve(t, bash(script), say("done"))
	f.run = prepare(t, []string{"BELAY_BASE_URL=" + f.provider.URL, "BELAY_MODEL=m"},
		append(append([]string{"exec", "--auto", "--output-format", "stream-json", "--set", "limits.retry_backoff_ms=[]"}, args...), "do it")...)
	for _, path := range []string{f.outside, f.outside + "/d", f.outside + "/f", f.outside + "/swap"} {
		if strings.HasSuffix(path, "/f") {
			os.WriteFile(path, []byte("precious\n"), 0o600)
		} else {
			os.Mkdir(path, 0o700)
		}
		if os.Getuid() == 0 {
			os.Chown(path, uid, uid)
		}
	}
	os.Chmod(filepath.Dir(f.outside), 0o755)
	if os.Getuid() == 0 {
		os.Chown(f.run.workspace, uid, uid)
		os.Chown(f.run.home, uid, uid)
		f.run.as(uint32(uid))
	}
	f.run.cmd.Env = append(f.run.cmd.Env, "A="+f.attacker+" attack", "OUT="+f.outside, "BELAY="+belayBinary(t))
	return f
}

// contents is every name below dir with the size and text of its files.
func contents(dir string) map[string]string {
	out := map[string]string{}
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		text, _ := os.ReadFile(path)
		out[path] = d.Type().String() + " " + string(text)
		return nil
	})
	return out
}

// script runs each attempt in a shell of its own and shows the last word of
// what it said; a plain command is worth ok or refused.
func script(all []attempt) string {
	var b strings.Builder
	for _, a := range all {
		command := a.command
		if !strings.HasPrefix(command, "$A ") {
			command = "if (" + command + "\n) >/dev/null 2>&1; then echo ok; else echo refused; fi"
		}
		fmt.Fprintf(&b, "printf '%s: '; (%s\n) 2>/dev/null | tail -n 1\n", a.name, command)
	}
	return b.String() + "exit 7\n"
}

// attackAll runs a battery, compares each outcome, and then what is outside.
func (f *front) attackAll(t *testing.T, all []attempt) {
	t.Helper()
	before := contents(f.outside)
	f.run.finish(0)
	output := f.run.one("tool_result")["output"].(string)
	for _, a := range all {
		got := "(nothing)"
		for line := range strings.Lines(output) {
			if rest, ok := strings.CutPrefix(line, a.name+": "); ok {
				got = strings.TrimSpace(rest)
			}
		}
		if !slices.Contains(strings.Split(a.want, "|"), got) {
			t.Errorf("%s: %s, want %s", a.name, got, a.want)
		}
	}
	if after := contents(f.outside); !maps.Equal(before, after) {
		t.Errorf("outside was changed:\nbefore %q\nafter  %q\n%s", before, after, output)
	}
}

// fileAttacks are the ways to write outside of what a mode grants.
func fileAttacks() []attempt {
	return []attempt{
		{"write", "$A open $OUT/f 1", "EACCES"},
		{"append", "$A open $OUT/f 0x401", "EACCES"},
		{"read and write", "$A open $OUT/f 2", "EACCES"},
		{"access mode 3 and truncate", "$A open $OUT/f 0x203", "EACCES"},
		{"read and truncate", "$A open $OUT/f 0x200", "EACCES"},
		{"create", "$A open $OUT/new 0x41", "EACCES"},
		{"unnamed file", "$A open $OUT 0x410001|$A open $OUT 0x410002", "EACCES|EOPNOTSUPP"},
		{"truncate", "$A truncate $OUT/f", "EACCES"},
		{"link out", "$A link $TMPDIR/own $OUT/linked", "EACCES|EXDEV"},
		{"link in", "$A link $OUT/f $TMPDIR/linked", "EACCES|EXDEV|EPERM"},
		{"rename out", "$A rename $TMPDIR/own $OUT/moved", "EACCES|EXDEV"},
		{"rename in", "$A rename $OUT/f $TMPDIR/moved", "EACCES|EXDEV"},
		{"rename outside", "$A rename $OUT/f $OUT/g", "EACCES"},
		{"exchange", "$A exchange $OUT/d $TMPDIR/dir", "EACCES|EXDEV"},
		{"symlink outside", "$A symlink /x $OUT/symlink", "EACCES"},
		{"through a symlink", "ln -s $OUT/f $TMPDIR/s && echo x > $TMPDIR/s", "refused"},
		{"through a directory symlink", "ln -s $OUT $TMPDIR/sd && echo x > $TMPDIR/sd/new", "refused"},
		{"through dots", "echo x > $TMPDIR/../../../../../../../../../../$OUT/f", "refused"},
		{"through /proc", "cd $OUT && echo x > /proc/self/cwd/f", "refused"},
		{"mkdir", "$A mkdir $OUT/new", "EACCES"},
		{"rmdir", "$A rmdir $OUT/d", "EACCES"},
		{"unlink", "$A unlink $OUT/f", "EACCES"},
		{"fifo", "$A fifo $OUT/fifo", "EACCES"},
		{"device", "$A device $OUT/null", "EACCES|EPERM"},
		{"bind", "$A bind $OUT/bound", "EACCES"},
		{"mount", "$A mount $OUT/d", "EPERM|EACCES"},
		{"mount in a user namespace", "$A 'mount in a user namespace' $OUT/d", "EPERM|EACCES|ENOSPC"},
		{"a keeper of its own", "$A keeper $BELAY 'echo x > $OUT/f'", "refused"},
		{"belay demo inside", "HOME=$TMPDIR $BELAY exec --auto --sandbox danger-full-access --replay $TMPDIR/missing x; echo x > $OUT/f", "refused"},
		{"a device", "echo x > /dev/kmsg || echo x > /dev/mem", "refused"},
		{"sysctl", "echo 1 > /proc/sys/kernel/sysrq", "refused"},
		{"core pattern", "echo x > /proc/sys/kernel/core_pattern", "refused"},
		{"cgroup", "mkdir /sys/fs/cgroup/belay-test", "refused"},
		// What is known to stay open.
		{"chmod", "$A chmod $OUT/f 0600", "ok"},
		{"read outside", "cat $OUT/f", "ok"},
		{"shared memory", "echo x > /dev/shm/belay-$$ && rm /dev/shm/belay-$$", "ok"},
		// What has to work.
		{"own file", "echo x > $TMPDIR/own2", "ok"},
		{"own rename across directories", "mkdir $TMPDIR/a $TMPDIR/b && echo x > $TMPDIR/a/f && mv $TMPDIR/a/f $TMPDIR/b/", "ok"},
		{"own truncate", "echo xx > $TMPDIR/own3 && $A truncate $TMPDIR/own3 && test ! -s $TMPDIR/own3", "ok"},
		{"devices", "echo x > /dev/null && head -c 1 /dev/zero > /dev/null", "ok"},
		{"here-document", "cat <<END\nx\nEND", "ok"},
		{"mktemp", "mktemp && mktemp -d", "ok"},
	}
}

const setUp = "echo x > $TMPDIR/own; mkdir $TMPDIR/dir\n"

func TestSandboxKeepsFilesOutside(t *testing.T) {
	ofTheBinary(t)
	needLandlock(t)
	for _, mode := range []string{"read-only", "workspace-write"} {
		for _, uid := range attackUsers() {
			t.Run(fmt.Sprintf("%s/uid %d", mode, uid), func(t *testing.T) {
				t.Parallel()
				all := append(fileAttacks(), attempt{"workspace", "echo x > file && mkdir dir && mv file dir/ && rm -r dir", map[string]string{"read-only": "refused", "workspace-write": "ok"}[mode]})
				newFront(t, uid, setUp+script(all), "--sandbox", mode).attackAll(t, all)
			})
		}
	}
}

// processAttacks are the ways to reach what runs outside the sandbox. victim
// is a process of the same user, uid what belay runs as.
func processAttacks(abi, victim int) []attempt {
	scoped := map[bool]string{true: "EPERM", false: "ok"}[abi >= 6]
	return []attempt{
		{"signal to a stranger", fmt.Sprintf("$A kill %d 0", victim), scoped},
		{"signal to belay", "$A kill belay 0", scoped},
		{"trace a stranger", fmt.Sprintf("$A ptrace %d", victim), "EPERM"},
		{"trace belay", "$A ptrace belay", "EPERM"},
		{"trace the keeper", "$A ptrace keeper", "EPERM"},
		{"memory of a stranger", fmt.Sprintf("$A 'write memory' %d", victim), "EPERM"},
		{"memory of belay", "$A 'write memory' belay", "EPERM"},
		{"memory of the keeper", "$A 'write memory' keeper", "EPERM"},
		{"descriptor of belay", "$A 'take descriptor' belay", "EPERM"},
		{"descriptor of the keeper", "$A 'take descriptor' keeper", "EPERM"},
		{"environment of a stranger", fmt.Sprintf("$A read %d environ", victim), "EACCES"},
		{"environment of belay", "$A read belay environ", "EACCES"},
		{"environment of the keeper", "$A read keeper environ", "EACCES"},
		{"io_uring", "$A io_uring", "ENOSYS"},
		{"x32", "$A x32", "ENOSYS"},
		{"capabilities", "$A capabilities", "0000000000000000|000000000000003b"},
		{"limits of belay", "$A limit belay", "EACCES"}, // without descriptors or memory it could not end what it started
		{"limits of the keeper", "$A limit keeper", "EACCES"},
		{"limits of a stranger", fmt.Sprintf("$A limit %d", victim), "EACCES"},
		{"limits of its own", "$A limit 0 && ulimit -c 0", "ok"},
		{"command line of belay", "$A read belay cmdline exec", "ok"}, // readable: no secret may be in it
		{"signal among its own", "sleep 60 & kill $!", "ok"},
	}
}

// networkAttacks: on is with --network.
func networkAttacks(abi int, on bool, tcp, abstract, path string) []attempt {
	refused := func(what string) string { return map[bool]string{true: "ok", false: what}[on] }
	scoped := map[bool]string{true: "EPERM", false: "ok"}[abi >= 6]
	return []attempt{
		{"TCP socket", "$A socket 2 1", refused("EACCES")},
		{"UDP socket", "$A socket 2 2", refused("EACCES")},
		{"TCP over IPv6", "$A socket 10 1", refused("EACCES")},
		{"vsock", "$A socket 40 1", refused("EACCES") + "|EAFNOSUPPORT"},
		{"connect", "$A tcp " + tcp, refused("EACCES")},
		{"a name", "$A lookup belay.invalid", "no name"},
		{"a pair", "$A socketpair 1 1", "ok"},
		{"pair of another family", "$A socketpair 2 1", "ENOTSUP"},
		{"netlink", "$A socket 16 3", "ok"},
		{"abstract socket", "$A connect " + abstract, scoped},
		{"pathname socket", "$A connect " + path, "ok"}, // a known limit: SECURITY.md
		{"io_uring", "$A io_uring", "ENOSYS"},
	}
}

// stranger is a process of a user that has nothing to do with belay.
func stranger(t *testing.T, uid int) int {
	t.Helper()
	c := exec.Command("sleep", "120")
	if os.Getuid() == 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	return c.Process.Pid
}

func TestSandboxReachesNoOtherProcess(t *testing.T) {
	ofTheBinary(t)
	needLandlock(t)
	for _, uid := range attackUsers() {
		t.Run(fmt.Sprintf("uid %d", uid), func(t *testing.T) {
			t.Parallel()
			all := processAttacks(landlockABI(), stranger(t, uid))
			newFront(t, uid, script(all)).attackAll(t, all)
		})
	}
}

// listenUnix accepts on a socket until the test ends.
func listenUnix(t *testing.T, name string) {
	t.Helper()
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
}

func TestSandboxReachesNoNetwork(t *testing.T) {
	ofTheBinary(t)
	needLandlock(t)
	for _, on := range []bool{false, true} {
		for _, uid := range attackUsers() {
			t.Run(fmt.Sprintf("network %v/uid %d", on, uid), func(t *testing.T) {
				t.Parallel()
				dir, err := os.MkdirTemp("", "belay-socket-")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(dir) })
				abstract, path := "@belay-test-"+randomHex(), dir+"/s"
				listenUnix(t, abstract)
				listenUnix(t, path)
				os.Chmod(dir, 0o755)
				os.Chmod(path, 0o777)
				tcp, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { tcp.Close() })
				all := networkAttacks(landlockABI(), on, tcp.Addr().String(), abstract, path)
				f := newFront(t, uid, script(all), "--network="+strconv.FormatBool(on))
				f.attackAll(t, all)
				hint := strings.HasSuffix(f.run.one("tool_result")["output"].(string), "exit code 7\nnetwork is off in this sandbox, loopback included (belay --network)")
				if hint == on {
					t.Errorf("the hint about the network: %v with network %v", hint, on)
				}
			})
		}
	}
}

// confinedJobs is belay's side of a sandbox that pretends to be on an older
// kernel: the rights that this ABI lacks are not handled, so what is refused
// is refused by what stands in for them.
func confinedJobs(abi int, env []string, write ...string) *jobs {
	self, _ := readProc(os.Getpid())
	h := &host{pid: self.pid, foreign: map[int]bool{}, sessions: map[int]bool{self.sid: true}, keepers: map[int]*job{}}
	return &jobs{host: h, env: append(os.Environ(), env...), confine: &confinement{Write: append(write, "/dev/null"), ABI: abi}}
}

// outputOf runs one command to its end.
func outputOf(t *testing.T, all *jobs, command string) string {
	t.Helper()
	j, err := all.start(command, "/", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !j.wait(t.Context(), deadline) {
		end(orderKill, j)
		t.Fatal("the command did not end")
	}
	text, _, _ := j.out.take(false)
	return text
}

// On ABI 2 nothing of Landlock stops a truncation: the filter must.
func TestSandboxOnLandlockABI2(t *testing.T) {
	needLandlock(t)
	inside, outside := t.TempDir(), t.TempDir()
	os.WriteFile(outside+"/f", []byte("precious"), 0o600)
	os.WriteFile(outside+"/g", []byte("precious"), 0o600)
	env := []string{"A=" + attackerBinary(t) + " attack", "OUT=" + outside, "IN=" + inside}
	for _, a := range []attempt{
		{"truncate", "$A truncate $OUT/f", "EACCES"},
		{"open to read and truncate", "$A open $OUT/f 0x200", "EACCES"},
		{"access mode 3 and truncate", "$A open $OUT/f 0x203", "EACCES"},
		{"open to write and truncate", "$A open $OUT/f 0x201", "EACCES"},
		{"openat2", "$A openat2 $OUT/f 0x200", "ENOSYS"},
		{"rename out", "echo x > $IN/x; $A rename $IN/x $OUT/f", "EACCES|EXDEV"},
		{"own truncate by the shell", "echo x > $IN/x; : > $IN/x; test -s $IN/x || echo ok", "ok"},
		{"own rename across directories", "mkdir $IN/a; echo x > $IN/a/f; $A rename $IN/a/f $IN/f", "ok"},
		{"TCP socket", "$A socket 2 1", "EACCES"},
	} {
		got := strings.TrimSpace(outputOf(t, confinedJobs(2, env, inside), a.command))
		if !slices.Contains(strings.Split(a.want, "|"), got) {
			t.Errorf("%s: %q, want %s", a.name, got, a.want)
		}
	}
	for path, text := range contents(outside) {
		if strings.HasPrefix(text, "-") && !strings.HasSuffix(text, "precious") {
			t.Errorf("%s was changed: %q", path, text)
		}
	}
	for abi, want := range map[int]string{2: "truncate", 5: "scopes", 6: ""} {
		if got := (&confinement{ABI: abi}).lacks(); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("ABI %d: reported %q, want %q in it", abi, got, want)
		}
	}
}

// planned is what a mode may write, "" and an error where it is refused.
func planned(o jobOptions) (string, error) {
	c, err := planSandbox(o, 7)
	if c == nil {
		return "", err
	}
	return strings.Join(c.Write, ":") + ":", err
}

// The next run's configuration, and with it its sandbox, must not be
// writable, however the home is named and whether or not it is there.
func TestHomeInsideTheGrantIsRefused(t *testing.T) {
	dir := realPath(t.TempDir())
	os.MkdirAll(dir+"/work/home", 0o700)
	os.Mkdir(dir+"/home", 0o700)
	os.Symlink(dir+"/work", dir+"/link")
	for _, c := range []struct {
		name, home, workspace, mode string
		writable                    []string
		refused                     bool
	}{
		{"apart", dir + "/home", dir + "/work", "workspace-write", nil, false},
		{"inside", dir + "/work/home", dir + "/work", "workspace-write", nil, true},
		{"the workspace itself", dir + "/work", dir + "/work", "workspace-write", nil, true},
		{"by a link", dir + "/link/home", dir + "/work", "workspace-write", nil, true},
		{"workspace by a link", dir + "/work/home", dir + "/link", "workspace-write", nil, true},
		{"not there yet", dir + "/work/new/home", dir + "/work", "workspace-write", nil, true},
		{"by a link, not there yet", dir + "/link/new", dir + "/work", "workspace-write", nil, true},
		{"in a writable directory", dir + "/link/new", dir + "/home", "workspace-write", []string{dir + "/work"}, true},
		{"in a writable directory by a link", dir + "/work/home", dir + "/home", "workspace-write", []string{dir + "/link"}, true},
		{"in shared memory", "/dev/shm/belay-home", dir + "/work", "read-only", nil, true},
		{"read-only", dir + "/work/home", dir + "/work", "read-only", nil, false},
		{"root", dir + "/home", "/", "workspace-write", nil, true},
		{"root without a home", "", "/", "workspace-write", nil, true},
		{"not ours to confine", dir + "/work/home", dir + "/work", "external-sandbox", nil, false},
	} {
		_, err := planned(jobOptions{home: c.home, workspace: c.workspace, sandbox: c.mode, writable: c.writable})
		if (err != nil) != c.refused {
			t.Errorf("%s: %v, refused should be %v", c.name, err, c.refused)
		}
		if err != nil && !strings.Contains(err.Error(), "\nif the container is your sandbox: belay exec --sandbox external-sandbox …") {
			t.Errorf("%s: no way out in %q", c.name, err)
		}
	}
}

// What a command may replace by a symlink must not be opened by name for the
// next command's grant.
func TestGrantInsideTheGrantIsDropped(t *testing.T) {
	dir := realPath(t.TempDir())
	os.MkdirAll(dir+"/work/out", 0o700)
	for _, writable := range [][]string{{dir + "/work/out"}, {dir + "/work/out", dir}, {dir + "/work/not-there"}} {
		got, err := planned(jobOptions{workspace: dir + "/work", sandbox: "workspace-write", writable: writable})
		if err != nil || strings.Contains(got, writable[0]+":") {
			t.Errorf("writable %v: %s %v", writable, got, err)
		}
	}
}

// A keeper is told of its grants in JSON, which has U+FFFD for bytes that are no
// UTF-8: of a workspace that is a link to such a directory it opened another one.
func TestGrantThatIsNoUTF8IsDropped(t *testing.T) {
	needLandlock(t)
	r := execRun(t, serve(t, bash("touch ../w\ufffdrk/escaped"), say("done")), "--sandbox", "workspace-write")
	for _, name := range []string{"/w\xfcrk", "/w\ufffdrk"} {
		needNil(t, os.Mkdir(r.workspace+name, 0o777))
	}
	needNil(t, os.Symlink("w\xfcrk", r.workspace+"/link"))
	r.cmd.Args = slices.Insert(r.cmd.Args, 1, "--workspace", r.workspace+"/link")
	r.finish(0)
	if names, _ := os.ReadDir(r.workspace + "/w\ufffdrk"); len(names) > 0 || r.one("tool_result")["status"] != "error" {
		t.Errorf("written outside: %v, %v", names, r.one("tool_result"))
	}
}

// A workspace names its repository, and the repository must name it in return
// from a place that commands cannot write.
func TestForgedGitFileGrantsNothing(t *testing.T) {
	for _, c := range []struct {
		name, workspace, gitdir string
		back                    bool // <gitdir>/gitdir names the workspace
		granted                 string
	}{
		{"a linked worktree", "work", "repo/.git/worktrees/w", true, "repo/.git"},
		{"nothing in return", "work", "repo/.git/worktrees/w", false, ""},
		{"not below worktrees", "work", "repo/.git/other/w", true, ""},
		{"the workspace as its own repository", "home/worktrees/w", "home/worktrees/w", true, ""},
		{"a repository inside", "work", "work/x/worktrees/w", true, ""},
		{"a workspace called worktrees", "home/worktrees", "home/worktrees/w", true, ""},
		{"inside a writable directory", "work", "extra/worktrees/w", true, ""},
	} {
		dir := realPath(t.TempDir())
		for _, sub := range []string{c.workspace, c.gitdir, "extra"} {
			os.MkdirAll(filepath.Join(dir, sub), 0o700)
		}
		os.WriteFile(filepath.Join(dir, c.workspace, ".git"), []byte("gitdir: "+filepath.Join(dir, c.gitdir)+"\n"), 0o600)
		if c.back {
			os.WriteFile(filepath.Join(dir, c.gitdir, "gitdir"), []byte(filepath.Join(dir, c.workspace, ".git")+"\n"), 0o600)
		}
		got, err := planned(jobOptions{workspace: filepath.Join(dir, c.workspace), sandbox: "workspace-write", writable: []string{dir + "/extra/worktrees"}})
		if err != nil {
			t.Fatal(err)
		}
		granted := []string{}
		for path := range strings.SplitSeq(strings.Trim(got, ":"), ":") {
			if within(path, dir) && path != filepath.Join(dir, c.workspace) && path != dir+"/extra/worktrees" {
				granted = append(granted, strings.TrimPrefix(path, dir+"/"))
			}
		}
		if strings.Join(granted, " ") != c.granted {
			t.Errorf("%s: granted %v, want %q", c.name, granted, c.granted)
		}
	}
}

// A scratch directory inside the workspace is the commands' to replace: what
// stands in its place then is not granted, and belay writes nothing there.
func TestScratchReplacedByLink(t *testing.T) {
	needLandlock(t)
	for _, uid := range attackUsers() {
		f := newFront(t, uid, `mkdir tmp/x && mv "$TMPDIR" tmp/x/ && ln -s "$OUT" "$TMPDIR" && echo swapped`)
		f.provider = serve(t, bash(`mkdir tmp/x && mv "$TMPDIR" tmp/x/ && ln -s "$OUT" "$TMPDIR" && echo swapped`),
			bash(`echo x > "$TMPDIR/f"; echo x > "$OUT/g"; seq 20000`), calls("Write", map[string]any{"path": f.outside + "/h", "content": "x"}), say("done"))
		os.Mkdir(f.run.workspace+"/tmp", 0o777)
		os.Chmod(f.run.workspace+"/tmp", 0o777)
		f.run.cmd.Env = append(f.run.cmd.Env, "TMPDIR="+f.run.workspace+"/tmp", "BELAY_BASE_URL="+f.provider.URL)
		before := contents(f.outside)
		f.run.finish(0)
		results := f.run.events("tool_result")
		if !strings.Contains(results[0]["output"].(string), "swapped") || results[1]["truncated"] != true || results[2]["status"] != "error" {
			t.Errorf("results: %v", results)
		}
		if after := contents(f.outside); !maps.Equal(before, after) {
			t.Errorf("outside was changed:\nbefore %q\nafter  %q", before, after)
		}
	}
}

// The file tools are confined like commands, whatever the model names.
func TestFileToolsStayInside(t *testing.T) {
	needLandlock(t)
	for _, mode := range []string{"read-only", "workspace-write"} {
		for _, uid := range attackUsers() {
			t.Run(fmt.Sprintf("%s/uid %d", mode, uid), func(t *testing.T) {
				t.Parallel()
				f := newFront(t, uid, "", "--sandbox", mode)
				rel, _ := filepath.Rel(f.run.workspace, f.outside)
				os.Symlink(f.outside, f.run.workspace+"/dir")
				os.Symlink(f.outside+"/f", f.run.workspace+"/file")
				var writes, edits, reads []map[string]any
				for _, path := range []string{f.outside + "/f", rel + "/f", "x/../" + rel + "/f", "dir/f", "file", f.outside + "/new", "dir/new", "dir/new/deeper/x", "/proc/self/mem", "/proc/self/oom_score_adj", "/dev/kmsg"} {
					writes = append(writes, map[string]any{"path": path, "content": "x"})
					edits = append(edits, map[string]any{"path": path, "old": "precious", "new": "x"})
				}
				for _, path := range []string{"/proc/self/environ", "/proc/1/environ", "/proc/self/root/proc/self/environ", "/dev/zero", "fifo", "dir"} {
					reads = append(reads, map[string]any{"path": path})
				}
				syscall.Mkfifo(f.run.workspace+"/fifo", 0o666)
				f.provider = serve(t, calls("Write", writes...), calls("Edit", edits...), calls("Read", reads...),
					calls("Write", map[string]any{"path": "inside/a", "content": "one"}), calls("Edit", map[string]any{"path": "inside/a", "old": "one", "new": "two"}), say("done"))
				f.run.cmd.Env = append(f.run.cmd.Env, "BELAY_BASE_URL="+f.provider.URL)
				before := contents(f.outside)
				f.run.finish(0)
				results := f.run.events("tool_result")
				refused := len(writes) + len(edits) + len(reads)
				for i, e := range results {
					if want := map[bool]string{true: "error", false: "success"}[i < refused || mode == "read-only"]; e["status"] != want {
						t.Errorf("call %d (%s): %v, want %s", i, e["name"], e["output"], want)
					}
				}
				if after := contents(f.outside); !maps.Equal(before, after) {
					t.Errorf("outside was changed:\nbefore %q\nafter  %q", before, after)
				}
				b, _ := os.ReadFile(f.run.workspace + "/inside/a")
				if want := map[bool]string{true: "", false: "two"}[mode == "read-only"]; string(b) != want {
					t.Errorf("inside: %q, want %q", b, want)
				}
			})
		}
	}
}

// A directory that is swapped for a link to outside while the tools write.
func TestFileToolsAgainstASwappedDirectory(t *testing.T) {
	ofTheBinary(t)
	needLandlock(t)
	for _, uid := range attackUsers() {
		f := newFront(t, uid, "")
		swap := calls("Bash", map[string]any{"command": "mkdir d; ln -s $OUT/swap link; exec $A swap d link started", "background": true})
		var writes []map[string]any
		for i := range 40 {
			writes = append(writes, map[string]any{"path": fmt.Sprintf("d/f%d", i), "content": "x"})
		}
		f.provider = serve(t, swap, bash("until test -e started; do sleep 0.02; done"), calls("Write", writes...), say("done"))
		f.run.cmd.Env = append(f.run.cmd.Env, "BELAY_BASE_URL="+f.provider.URL)
		before := contents(f.outside)
		f.run.finish(0)
		tally := map[any]int{}
		for _, e := range f.run.events("tool_result")[2:] {
			tally[e["status"]]++
		}
		if after := contents(f.outside); !maps.Equal(before, after) || tally["success"] == 0 || tally["error"] == 0 {
			t.Errorf("results %v, outside before %q, after %q", tally, before, after)
		}
	}
}

// withoutCall becomes a program on a kernel that answers a system call with an errno.
func withoutCall(number, errno string, args []string) {
	runtime.LockOSThread()
	call, _ := strconv.Atoi(number)
	n, _ := strconv.Atoi(errno)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the number of the call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(call), Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(n)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog))); e != 0 {
		err = e
	}
	if err == nil {
		err = unix.Exec(args[0], args, os.Environ())
	}
	fmt.Println("without-call:", err)
}

// A kernel or container without Landlock or seccomp: refused before any request,
// with the way out; and where no sandbox was asked for, nothing is refused.
func TestKernelWithoutLandlock(t *testing.T) {
	t.Parallel()
	landlock, seccomp := "it needs Landlock ABI 2 (Linux 5.19), this kernel offers 0", "it needs system call filters on amd64 or arm64, this is "+runtime.GOARCH+", where seccomp says: "
	for _, f := range []struct {
		call  int
		errno syscall.Errno
		words string
	}{
		{unix.SYS_LANDLOCK_CREATE_RULESET, unix.ENOSYS, landlock}, {unix.SYS_LANDLOCK_CREATE_RULESET, unix.EOPNOTSUPP, landlock}, {unix.SYS_LANDLOCK_CREATE_RULESET, unix.EPERM, landlock},
		{unix.SYS_SECCOMP, unix.ENOSYS, seccomp + "function not implemented"}, {unix.SYS_SECCOMP, unix.EINVAL, seccomp + "invalid argument"}, {unix.SYS_SECCOMP, unix.EPERM, seccomp + "operation not permitted"},
	} {
		if f.call == unix.SYS_SECCOMP && landlockABI() < 2 {
			continue
		}
		for _, c := range []struct {
			args []string
			code int
		}{
			{[]string{"exec", "--auto"}, 1},
			{[]string{"exec", "--auto", "--sandbox", "read-only"}, 1},
			{[]string{"exec", "--auto", "--sandbox", "external-sandbox"}, 0},
			{[]string{"exec", "--auto", "--sandbox", "danger-full-access"}, 0},
			{[]string{"exec"}, 0},
		} {
			p := serve(t, say("done"))
			r := prepare(t, []string{"BELAY_BASE_URL=" + p.URL, "BELAY_MODEL=m"}, append(c.args, "do it")...)
			r.cmd.Args = append([]string{"attacker", "without-call", strconv.Itoa(f.call), strconv.Itoa(int(f.errno)), r.cmd.Path}, r.cmd.Args[1:]...)
			r.cmd.Path = attackerBinary(t)
			r.finish(c.code)
			if c.code == 0 {
				continue
			}
			text := r.err.String()
			if p.count() != 0 || r.out.Len() != 0 || !strings.Contains(text, "refused: "+f.words) ||
				!strings.Contains(text, "if the container is your sandbox: belay exec --sandbox external-sandbox …") {
				t.Errorf("%v %v %v: %d requests, stdout %q, stderr %q", f.call, f.errno, c.args, p.count(), r.out.String(), text)
			}
		}
	}
}

// A container that refuses a call that belay or its sandbox cannot do without is told
// which one, and nothing is run.
func TestRefusedCallIsNamed(t *testing.T) {
	t.Parallel()
	needLandlock(t)
	for call, want := range map[int]string{
		unix.SYS_PRCTL: "prctl PR_SET_CHILD_SUBREAPER: operation not permitted", unix.SYS_CAPGET: "capget: operation not permitted", unix.SYS_CAPSET: "capset: operation not permitted",
		unix.SYS_LANDLOCK_RESTRICT_SELF: "landlock: operation not permitted", unix.SYS_SOCKETPAIR: "socketpair: operation not permitted",
	} {
		r := prepare(t, []string{"BELAY_BASE_URL=" + serve(t, bash("touch ran"), say("done")).URL, "BELAY_MODEL=m"}, "exec", "--auto", "--output-format", "stream-json", "do it")
		r.cmd.Args = append([]string{"attacker", "without-call", strconv.Itoa(call), strconv.Itoa(int(unix.EPERM)), r.cmd.Path}, r.cmd.Args[1:]...)
		r.cmd.Path = attackerBinary(t)
		r.finish(map[bool]int{true: 1}[call == unix.SYS_PRCTL])
		if _, err := os.Stat(r.workspace + "/ran"); err == nil || !strings.Contains(r.out.String()+r.err.String(), want) {
			t.Errorf("%s: %v, stdout %q, stderr %q", want, err, r.out.String(), r.err.String())
		}
	}
}

// What people do in a workspace works in the sandbox.
func TestToolsWorkInsideTheSandbox(t *testing.T) {
	needLandlock(t)
	const identity = "-c user.name=a -c user.email=a@b -c init.defaultBranch=main -c commit.gpgsign=false"
	for _, c := range []struct{ name, needs, command string }{
		{"git", "git", "git " + identity + " init -q r && cd r && echo x > f && git add f && git " + identity + " commit -qm x && git gc -q && git config --global --list >/dev/null; git log --oneline | grep -q x"},
		{"git clone of a path", "git", "git " + identity + " init -q a && git -C a " + identity + " commit -q --allow-empty -m x && git clone -q a b && git -C b log | grep -q x"},
		{"gcc", "gcc", "echo 'int main(){return 0;}' > a.c && gcc a.c -o a.out && ./a.out"},
		{"python with semaphores", "python3", "python3 -c 'import multiprocessing as m, tempfile; m.Lock(); tempfile.TemporaryFile().write(b\"x\")'"},
		{"node", "node", "node -e 'require(\"fs\").writeFileSync(\"x\", \"y\")'"},
		{"go build", "go", "printf 'module g\\ngo 1.26\\n' > go.mod && printf 'package main\\nfunc main(){println(1)}\\n' > main.go && CGO_ENABLED=0 GOFLAGS=-mod=mod GOTOOLCHAIN=local GOTELEMETRY=off go build -o g . && ./g"},
		{"here-documents and pipes", "sh", "cat <<END | grep -q x && mktemp >/dev/null && echo y > /dev/stdout\nx\nEND\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if _, err := exec.LookPath(c.needs); err != nil {
				t.Skipf("no %s here", c.needs)
			}
			if testing.Short() && c.needs == "go" {
				t.Skip("a build with an empty cache is too much for -short")
			}
			f := newFront(t, os.Getuid(), c.command)
			f.run.finish(0)
			if e := f.run.one("tool_result"); e["status"] != "success" {
				t.Errorf("%v", e["output"])
			}
		})
	}
}

// The repository of a linked worktree can be written, and nothing beside it.
func TestLinkedWorktree(t *testing.T) {
	needLandlock(t)
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("no git here")
	}
	f := newFront(t, os.Getuid(), "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m inside; git log --oneline | grep inside; echo x > $OUT/new && echo escaped")
	for _, args := range [][]string{{"init", "-q", f.outside + "/main"}, {"-C", f.outside + "/main", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"},
		{"-C", f.outside + "/main", "worktree", "add", "-q", f.run.workspace + "/wt", "-b", "wt"}} {
		if out, err := exec.Command(git, args...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v %s", args, err, out)
		}
	}
	f.run.cmd.Args = slices.Insert(f.run.cmd.Args, 1, "--workspace", f.run.workspace+"/wt")
	f.run.finish(0)
	out := f.run.one("tool_result")["output"].(string)
	if !strings.Contains(out, " inside\n") || strings.Contains(out, "escaped") {
		t.Errorf("result: %s", out)
	}
}

// --writable grants one more directory; caches and git's configuration point
// into scratch where the real ones cannot be written.
func TestWritableAndRedirections(t *testing.T) {
	needLandlock(t)
	command := `echo x > $OUT/f && echo "writable"; git config --global a.b c 2>/dev/null; env | grep -E '^(XDG_CACHE_HOME|GOCACHE|npm_config_cache|GIT_CONFIG_GLOBAL|TMPDIR)='`
	f := newFront(t, os.Getuid(), command)
	f.run.cmd.Args = slices.Insert(f.run.cmd.Args, 2, "--writable", f.outside)
	f.run.cmd.Env = append(f.run.cmd.Env, "GOCACHE="+f.outside+"/go")
	f.run.finish(0)
	out := f.run.one("tool_result")["output"].(string)
	scratch := ""
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "TMPDIR="); ok {
			scratch = strings.TrimSpace(v)
		}
	}
	for _, want := range []string{"writable\n", "XDG_CACHE_HOME=" + scratch + "/cache/", "npm_config_cache=" + scratch + "/cache/", "GIT_CONFIG_GLOBAL=" + scratch + "/gitconfig", "GOCACHE=" + f.outside + "/go\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	if _, err := os.Stat(scratch); !errors.Is(err, os.ErrNotExist) || scratch == "" {
		t.Errorf("the scratch directory %q is left: %v", scratch, err)
	}
}

// The file that takes the place of the user's git configuration includes that one,
// whatever the bytes of its name are; one that git cannot read ends every git command.
func TestGitConfigurationOfAnyHome(t *testing.T) {
	needLandlock(t)
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("no git here")
	}
	for _, name := range []string{"plain", "h\xfc", "soft\u00adhyphen", `a"b\c`, "a\nb\tc"} {
		r := execRun(t, serve(t, bash("git config user.name"), say("done")), "--sandbox", "workspace-write", "--home", t.TempDir())
		home := r.home + "/" + name
		needNil(t, os.Mkdir(home, 0o755))
		needNil(t, os.WriteFile(home+"/.gitconfig", []byte("[user]\n\tname = Me\n"), 0o644))
		r.cmd.Env = append(r.cmd.Env, "HOME="+home)
		if out := r.finish(0).one("tool_result")["output"]; out != "Me\nexit code 0" {
			t.Errorf("HOME %q: %q", name, out)
		}
	}
	r := execRun(t, serve(t, bash("git config user.name"), say("done")), "--sandbox", "workspace-write")
	needNil(t, os.MkdirAll(r.home+"/xdg/git", 0o755))
	needNil(t, os.WriteFile(r.home+"/xdg/git/config", []byte("[user]\n\tname = Me\n"), 0o644))
	r.cmd.Env = append(r.cmd.Env, "XDG_CONFIG_HOME="+r.home+"/xdg")
	if out := r.finish(0).one("tool_result")["output"]; out != "Me\nexit code 0" {
		t.Errorf("XDG_CONFIG_HOME: %q", out)
	}
}

// A leftover scratch directory is removed, what only looks like one is not.
func TestOnlyScratchOfDeadRunsIsRemoved(t *testing.T) {
	t.Parallel()
	tmp := t.TempDir()
	os.Chmod(tmp, 0o777)
	for _, name := range []string{"belay-0123abcd", "belay-projects", "belay-ABCDEF01"} {
		os.MkdirAll(tmp+"/"+name+"/x", 0o700)
	}
	r := execRun(t, serve(t, say("done")))
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+tmp)
	r.finish(0)
	left, _ := filepath.Glob(tmp + "/*")
	if want := []string{tmp + "/belay-ABCDEF01", tmp + "/belay-projects"}; !slices.Equal(left, want) {
		t.Errorf("left: %v, want %v", left, want)
	}
}

// belay inside belay's sandbox: the inner run has no more than the outer one,
// whatever it is told, and what the inner one releases ends with the outer.
func TestBelayInsideItsSandbox(t *testing.T) {
	needLandlock(t)
	for _, uid := range attackUsers() {
		t.Run(fmt.Sprintf("uid %d", uid), func(t *testing.T) {
			t.Parallel()
			f := newFront(t, uid, `export HOME=$TMPDIR; $BELAY demo --output-format stream-json > demo; echo "demo $?"; $BELAY exec --auto --replay demo.jsonl x > nested; echo "nested $?"`)
			os.WriteFile(f.run.workspace+"/demo.jsonl", demoRecording, 0o644)
			f.run.finish(0)
			out := f.run.one("tool_result")["output"].(string)
			if !strings.Contains(out, "demo 0\n") || !strings.Contains(out, "nested 0\n") || !strings.Contains(out, " processes that the command had left running were ended") {
				t.Errorf("result: %s", out)
			}
			b, _ := os.ReadFile(f.run.workspace + "/demo")
			inner := &belayRun{t: t}
			inner.out.Write(b)
			if pid := int(inner.one("service_released")["pid"].(float64)); alive(pid) {
				t.Errorf("the inner run's service %d is left", pid)
			}
		})
	}
}

// canary is a key that must be found nowhere.
const canary = "sk-belay-canary-0d9f4c1e7b"

// keyAttacks look for the key from inside a command.
const keyAttacks = `env; echo "environment: $(env | grep -c canary)"
$A read keeper environ canary | sed 's/^/keeper: /'
$A read belay environ canary | sed 's/^/belay: /'
$A read belay cmdline canary | sed 's/^/arguments: /'
$A 'write memory' belay | sed 's/^/memory: /'
cat /proc/[0-9]*/cmdline | tr '\0' '\n' | grep -c sk-belay-canar[y] | sed 's/^/argv of anybody: /'`

// keyFront is a run with a key in its environment, all formats of its output
// in files, and commands that look for it.
func keyFront(t *testing.T, uid int, mode string, replies ...any) *front {
	f := newFront(t, uid, "", "--sandbox", mode)
	f.provider = serve(t, replies...)
	f.run.cmd.Args = append(f.run.cmd.Args[:len(f.run.cmd.Args)-1], "--verbose", "--record", f.run.workspace+"/recording", "do it")
	f.run.cmd.Env = append(f.run.cmd.Env, "BELAY_BASE_URL="+f.provider.URL, "BELAY_API_KEY="+canary, "OPENAI_API_KEY="+canary+"2", "MY_TOKEN="+canary, "PGPASSWORD="+canary, "my_secret="+canary, "PLAIN=seen")
	return f
}

// nowhere looks for the key in all that a run wrote.
func (f *front) nowhere(t *testing.T) {
	t.Helper()
	all := f.run.out.String() + f.run.err.String()
	for _, dir := range []string{f.run.workspace, f.run.home, f.outside} {
		all += fmt.Sprint(contents(dir))
	}
	if strings.Contains(all, canary) {
		t.Errorf("the key was written:\n%s", all)
	}
	for _, h := range f.provider.headers {
		if h.Get("Authorization") != "Bearer "+canary {
			t.Errorf("the key was not sent, so nothing was tested: %v", h)
		}
	}
}

func TestKeyIsNotReadableByCommands(t *testing.T) {
	needLandlock(t)
	for _, mode := range []string{"read-only", "workspace-write", "external-sandbox", "danger-full-access"} {
		for _, uid := range attackUsers() {
			t.Run(fmt.Sprintf("%s/uid %d", mode, uid), func(t *testing.T) {
				t.Parallel()
				f := keyFront(t, uid, mode, bash(keyAttacks), say("done"))
				open := mode == "external-sandbox" || mode == "danger-full-access"
				if open && uid == 0 { // without the two capabilities that let root look (CAP_SYS_ADMIN counts as CAP_PERFMON)
					setpriv, err := exec.LookPath("setpriv")
					if err != nil {
						t.Skip("no setpriv here to take capabilities from root")
					}
					f.run.cmd.Args = append([]string{"setpriv", "--bounding-set=-sys_ptrace,-perfmon,-sys_admin", f.run.cmd.Path}, f.run.cmd.Args[1:]...)
					f.run.cmd.Path = setpriv
				}
				f.run.finish(0)
				out := f.run.one("tool_result")["output"].(string)
				keeper := map[bool]string{true: "other text", false: "EACCES"}[open]
				for _, want := range []string{"PLAIN=seen\n", "environment: 0\n", "keeper: " + keeper + "\n", "belay: EACCES\n", "arguments: other text\n", "memory: EPERM\n", "argv of anybody: 0\n"} {
					if !strings.Contains(out, want) {
						t.Errorf("no %q in:\n%s", want, out)
					}
				}
				f.nowhere(t)
			})
		}
	}
}

// Whatever the server answers, and wherever a run fails, the key is not told.
func TestKeyIsInNoError(t *testing.T) {
	t.Parallel()
	echo := func(w http.ResponseWriter, r *http.Request) { // a server that repeats what it was sent
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprintf(w, `{"error":{"message":"incorrect API key provided: %s","code":"invalid_api_key"}}`, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
	}
	for name, reply := range map[string]any{"401": status(401, `{"error":{"message":"no"}}`), "echo": echo, "500": status(500, "oops"), "filter": ends("x", "content_filter"), "cut": "data: {\"choices\"", "redirect": func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
	}} {
		t.Run(name, func(t *testing.T) {
			f := keyFront(t, os.Getuid(), "danger-full-access", reply)
			f.run.start()
			if code := f.run.wait(); code != 1 && code != 75 {
				t.Errorf("exit code %d", code)
			}
			f.nowhere(t)
		})
	}
}

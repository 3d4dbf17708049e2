//go:build linux

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// These tests start the test binary again as a second process: a lock that a
// process takes twice proves little. The child runs TestHelperLock alone, says
// one line on stdout and then lives until its stdin ends.

const (
	lockHelperEnv    = "LOCK_TEST_HELPER"
	nobodyUID        = 65534 // a user whom file permissions bind
	lockTestPatience = 20 * time.Second
)

// TestHelperLock is the child of the tests below and nothing by itself.
func TestHelperLock(t *testing.T) {
	mode := os.Getenv(lockHelperEnv)
	home := os.Getenv("LOCK_TEST_HOME")
	say := func(l *instanceLock, err error) {
		if err != nil {
			fmt.Printf("loopd: %v\n", err)
			return
		}
		fmt.Println("held")
		_, _ = io.Copy(io.Discard, os.Stdin)
		l.release()
	}
	switch mode {
	case "": // the parent's own run
	case "hold":
		say(takeLock(home, "loopd"))
	case "serve", "serve-umask-0", "serve-umask-077":
		switch mode {
		case "serve-umask-0":
			unix.Umask(0)
		case "serve-umask-077":
			unix.Umask(0o077)
		}
		l, err := takeLock(home, "loopd")
		if err == nil {
			l.note("serving")
			_, err = l.listen()
		}
		say(l, err)
	case "wait":
		say(&instanceLock{}, nil)
	case "connect":
		c, err := net.Dial("unix", home)
		if err == nil {
			defer c.Close()
		}
		say(&instanceLock{}, err)
	default:
		t.Fatalf("unknown mode %q", mode)
	}
}

// lockChild is a started child.
type lockChild struct {
	cmd   *exec.Cmd
	stdin io.Closer
	out   *bufio.Reader
	first string // the first line that it said
}

// startLockChild starts the child and waits for its first line. uid 0 keeps ours.
func startLockChild(t *testing.T, mode, home string, uid int) *lockChild {
	t.Helper()
	// Not os.Args[0]: another user may not enter the directory where go test built it.
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestHelperLock$", "-test.timeout=60s")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), lockHelperEnv+"="+mode, "LOCK_TEST_HOME="+home)
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h := &lockChild{cmd: cmd, stdin: stdin, out: bufio.NewReader(stdout)}
	t.Cleanup(h.end)
	h.first, err = h.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the child said nothing: %v", err)
	}
	h.first = strings.TrimSpace(h.first)
	return h
}

// end lets the child go and reaps it; after kill it only reaps.
func (h *lockChild) end() {
	_ = h.stdin.Close()
	_, _ = io.Copy(io.Discard, h.out)
	_ = h.cmd.Wait()
}

// kill is SIGKILL, and a wait until the kernel has cleaned up.
func (h *lockChild) kill(t *testing.T) {
	t.Helper()
	if err := h.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = h.cmd.Wait()
}

// boundUser gives a home that belongs to a user whom permissions bind, and the
// uid to start the child with: nobody as root, else ourselves.
func boundUser(t *testing.T) (home string, uid int) {
	t.Helper()
	home = t.TempDir()
	if os.Geteuid() != 0 {
		return home, 0
	}
	for dir := home; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		needNil(t, os.Chmod(dir, 0o755))
	}
	needNil(t, os.Chown(home, nobodyUID, nobodyUID))
	return home, nobodyUID
}

func needNil(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shortHome is a home whose socket path fits, whatever the test is called.
func shortHome(t testing.TB) string {
	t.Helper()
	home, err := os.MkdirTemp("", "h")
	needNil(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	return home
}

func TestOfManyTakersOneWins(t *testing.T) {
	home := shortHome(t)
	const takers = 40
	var wg sync.WaitGroup
	var mu sync.Mutex
	var winners []*instanceLock
	want := "another loopd is running (it holds " + filepath.Join(home, "run", "loopd.lock") + "); see docs/runbook.md#already-running"
	start := make(chan struct{})
	for range takers {
		wg.Go(func() {
			<-start
			l, err := takeLock(home, "loopd")
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				winners = append(winners, l)
				return
			}
			if line, _, _ := strings.Cut(err.Error(), "\n"); !errors.Is(err, errHeld) || line != want {
				t.Errorf("refused with %q, want errHeld and %q", line, want)
			}
		})
	}
	close(start)
	wg.Wait()
	if len(winners) != 1 {
		t.Fatalf("%d of %d takers won, want 1", len(winners), takers)
	}
	winners[0].release()
}

func TestAKilledHolderFreesTheLockAndItsSocketIsReplaced(t *testing.T) {
	home := shortHome(t)
	h := startLockChild(t, "serve", home, 0)
	if h.first != "held" {
		t.Fatalf("the child said %q", h.first)
	}
	before, err := os.Lstat(socketPath(home))
	needNil(t, err)

	_, err = takeLock(home, "loopd")
	if !errors.Is(err, errHeld) {
		t.Fatalf("a second taker got %v, want errHeld", err)
	}
	lines := strings.Split("loopd: "+err.Error(), "\n")
	if want := "loopd: another loopd is running (it holds " + home + "/run/loopd.lock); see docs/runbook.md#already-running"; lines[0] != want {
		t.Errorf("first line\n%s\nwant\n%s", lines[0], want)
	}
	if len(lines) != 3 || !strings.Contains(lines[1], fmt.Sprintf("pid %d, serving since 2", h.cmd.Process.Pid)) ||
		lines[2] != "to stop it: loopd --home "+home+" shutdown; before it serves: kill that pid" {
		t.Errorf("further lines %q", lines[1:])
	}
	if strings.Contains(err.Error(), "selftest") {
		t.Errorf("the refusal holds the self-test's word: %v", err)
	}
	if now, err := os.Lstat(socketPath(home)); err != nil || !os.SameFile(before, now) {
		t.Error("the refused taker touched the socket")
	}

	h.kill(t)
	if _, err := os.Lstat(socketPath(home)); err != nil {
		t.Fatalf("a killed daemon leaves its socket: %v", err)
	}
	l, err := takeLock(home, "loopd")
	needNil(t, err)
	defer l.release()
	ln, err := l.listen()
	needNil(t, err)
	c, err := net.Dial("unix", socketPath(home))
	needNil(t, err)
	defer c.Close()
	got, err := ln.AcceptUnix()
	needNil(t, err)
	defer got.Close()
	if !peerAllowed(got) {
		t.Error("a peer of our own uid was refused")
	}
}

func TestModesWhateverTheUmask(t *testing.T) {
	for _, mode := range []string{"serve-umask-0", "serve-umask-077", "serve"} {
		t.Run(mode, func(t *testing.T) {
			home := filepath.Join(shortHome(t), "made", "by", "it")
			if h := startLockChild(t, mode, home, 0); h.first != "held" {
				t.Fatalf("the child said %q", h.first)
			}
			for path, want := range map[string]os.FileMode{
				home:                           os.ModeDir | 0o700,
				filepath.Join(home, "run"):     os.ModeDir | 0o700,
				lockPath(home):                 0o600,
				filepath.Dir(socketPath(home)): os.ModeDir | 0o700,
				socketPath(home):               os.ModeSocket | 0o600,
			} {
				if st, err := os.Lstat(path); err != nil || st.Mode() != want {
					t.Errorf("%s: %v %v, want %v", path, st.Mode(), err, want)
				}
			}
		})
	}
}

func TestAnOldWideLockFileIsNarrowed(t *testing.T) {
	home := shortHome(t)
	needNil(t, os.MkdirAll(filepath.Join(home, "run"), 0o700))
	needNil(t, os.WriteFile(lockPath(home), []byte(strings.Repeat("old text ", 100)), 0o600))
	needNil(t, os.Chmod(lockPath(home), 0o666))
	l, err := takeLock(home, "loopd")
	needNil(t, err)
	defer l.release()
	st, err := os.Stat(lockPath(home))
	needNil(t, err)
	text, err := os.ReadFile(lockPath(home))
	needNil(t, err)
	if st.Mode() != 0o600 || !strings.HasPrefix(string(text), fmt.Sprintf("pid %d, starting since ", os.Getpid())) || strings.Count(string(text), "\n") != 1 {
		t.Errorf("mode %v, text %q", st.Mode(), text)
	}
}

// TestRefusals: what lies in the home is wrong, the message names it exactly,
// and nothing is changed.
func TestRefusals(t *testing.T) {
	tests := []struct {
		name   string
		root   bool // only root can set it up
		set    func(t *testing.T, home string)
		want   string // after "cannot take the lock PATH: "; HOME stands for the home
		absent string // must not exist afterwards, below the home
	}{
		{name: "symlink as the lock", set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, os.Symlink(filepath.Join(home, "target"), lockPath(home)))
		}, want: "Too many levels of symbolic links (os error 40)", absent: "target"},
		{name: "directory as the lock", set: func(t *testing.T, home string) {
			needNil(t, os.MkdirAll(lockPath(home), 0o700))
		}, want: "Is a directory (os error 21)"},
		{name: "file as the run directory", set: func(t *testing.T, home string) {
			needNil(t, os.WriteFile(filepath.Join(home, "run"), nil, 0o600))
		}, want: "Not a directory (os error 20)"},
		{name: "symlink as the run directory", set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "elsewhere"), 0o700))
			needNil(t, os.Symlink("elsewhere", filepath.Join(home, "run")))
		}, want: "HOME/run is Lrwxrwxrwx of uid", absent: "elsewhere/loopd.lock"},
		{name: "run directory open to all", set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, os.Chmod(filepath.Join(home, "run"), 0o777))
		}, want: "HOME/run is drwxrwxrwx of uid", absent: "run/loopd.lock"},
		{name: "run directory open to the group", set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, os.Chmod(filepath.Join(home, "run"), 0o720))
		}, want: "HOME/run is drwx-w---- of uid", absent: "run/loopd.lock"},
		{name: "hard link as the lock", set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, os.WriteFile(filepath.Join(home, "precious"), []byte("data"), 0o640))
			needNil(t, os.Link(filepath.Join(home, "precious"), lockPath(home)))
		}, want: "it is -rw-r----- of uid"},
		{name: "fifo as the lock", set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, unix.Mkfifo(lockPath(home), 0o600))
		}, want: "it is prw------- of uid"},
		{name: "lock of another user", root: true, set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, os.WriteFile(lockPath(home), nil, 0o600))
			needNil(t, os.Chown(lockPath(home), nobodyUID, nobodyUID))
		}, want: "it is -rw------- of uid 65534"},
		{name: "run directory of another user", root: true, set: func(t *testing.T, home string) {
			needNil(t, os.Mkdir(filepath.Join(home, "run"), 0o700))
			needNil(t, os.Chown(filepath.Join(home, "run"), nobodyUID, nobodyUID))
		}, want: "HOME/run is drwx------ of uid 65534", absent: "run/loopd.lock"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.root && os.Geteuid() != 0 {
				t.Skip("only root can give a file to another user")
			}
			home := shortHome(t)
			tt.set(t, home)
			before := treeOf(t, home)
			l, err := takeLock(home, "loopd")
			if err == nil {
				l.release()
				t.Fatal("the lock was given")
			}
			want := "cannot take the lock " + lockPath(home) + ": " + strings.ReplaceAll(tt.want, "HOME", home)
			if errors.Is(err, errHeld) || !strings.HasPrefix(err.Error(), want) || !strings.HasSuffix(err.Error(), "; see docs/runbook.md#already-running") {
				t.Errorf("error\n%v\nwant\n%s", err, want)
			}
			if tt.absent != "" {
				if _, err := os.Lstat(filepath.Join(home, tt.absent)); err == nil {
					t.Errorf("%s was made", tt.absent)
				}
			}
			if after := treeOf(t, home); after != before {
				t.Errorf("the home was changed\n%s\nto\n%s", before, after)
			}
		})
	}
}

// treeOf lists names, modes and sizes below dir.
func treeOf(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	needNil(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		size := st.Size()
		if st.IsDir() {
			size = 0
		}
		_, err = fmt.Fprintln(&b, path, st.Mode(), size)
		return err
	}))
	return b.String()
}

// TestUnwritableDirectories is the contract's own case, as a user whom
// permissions bind: root passes mode 0500.
func TestUnwritableDirectories(t *testing.T) {
	for _, missing := range []bool{false, true} {
		home, uid := boundUser(t)
		dir := filepath.Join(home, "run")
		if missing {
			dir = home // the run directory cannot be made
		} else {
			needNil(t, os.Mkdir(dir, 0o700))
			if uid != 0 {
				needNil(t, os.Chown(dir, uid, uid))
			}
		}
		needNil(t, os.Chmod(dir, 0o500))
		h := startLockChild(t, "hold", home, uid)
		needNil(t, os.Chmod(dir, 0o700))
		want := "loopd: cannot take the lock " + home + "/run/loopd.lock: Permission denied (os error 13); see docs/runbook.md#already-running"
		if h.first != want {
			t.Errorf("missing %v: the child said\n%s\nwant\n%s", missing, h.first, want)
		}
	}
}

func TestALongSocketPathIsRefusedWithBothLengths(t *testing.T) {
	base := shortHome(t)
	for n := socketPathMax - 1; n <= socketPathMax+1; n++ {
		home := filepath.Join(base, strings.Repeat("d", n-len(socketPath(base))-1))
		if len(socketPath(home)) != n {
			t.Fatalf("made a path of %d bytes, want %d", len(socketPath(home)), n)
		}
		l, err := takeLock(home, "loopd")
		if n > socketPathMax {
			want := fmt.Sprintf("is %d bytes, the limit is %d", n, socketPathMax)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.HasSuffix(err.Error(), "; see docs/runbook.md#socket-path") {
				t.Errorf("%d bytes: %v, want %q", n, err, want)
			}
			if _, err := os.Lstat(home); err == nil {
				t.Error("the refused home was made")
			}
			continue
		}
		needNil(t, err)
		if _, err := l.listen(); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		l.release()
	}
}

func TestWhatIsNoSocketIsLeftAlone(t *testing.T) {
	home := shortHome(t)
	l, err := takeLock(home, "loopd")
	needNil(t, err)
	defer l.release()
	needNil(t, os.MkdirAll(filepath.Dir(socketPath(home)), 0o700))
	for name, set := range map[string]func() error{
		"file":    func() error { return os.WriteFile(socketPath(home), []byte("data"), 0o644) },
		"symlink": func() error { return os.Symlink(lockPath(home), socketPath(home)) },
	} {
		needNil(t, set())
		before := treeOf(t, home)
		if _, err := l.listen(); err == nil || !strings.Contains(err.Error(), socketPath(home)+" is not a socket and was left alone") {
			t.Errorf("%s: %v", name, err)
		}
		if after := treeOf(t, home); after != before {
			t.Errorf("%s: the home was changed\n%s\nto\n%s", name, before, after)
		}
		needNil(t, os.Remove(socketPath(home)))
	}
	needNil(t, os.Chmod(filepath.Dir(socketPath(home)), 0o770))
	if _, err := l.listen(); err == nil || !strings.Contains(err.Error(), "only its owner may write") {
		t.Errorf("a socket directory open to the group: %v", err)
	}
}

func TestUnlistenRemovesOnlyItsOwnSocket(t *testing.T) {
	home := shortHome(t)
	l, err := takeLock(home, "loopd")
	needNil(t, err)
	_, err = l.listen()
	needNil(t, err)
	l.unlisten()
	if _, err := os.Lstat(socketPath(home)); err == nil {
		t.Error("our own socket stayed")
	}
	_, err = l.listen()
	needNil(t, err)
	needNil(t, os.Remove(socketPath(home)))
	other, err := net.Listen("unix", socketPath(home))
	needNil(t, err)
	defer other.Close()
	l.release()
	l.release() // harmless
	if _, err := net.Dial("unix", socketPath(home)); err != nil {
		t.Errorf("the other's socket: %v", err)
	}
}

func TestAChildOfTheHolderDoesNotKeepTheLock(t *testing.T) {
	home := shortHome(t)
	l, err := takeLock(home, "loopd")
	needNil(t, err)
	h := startLockChild(t, "wait", home, 0) // lives on, as a tool of a killed daemon would
	if h.first != "held" {
		t.Fatalf("the child said %q", h.first)
	}
	l.release()
	l, err = takeLock(home, "loopd")
	if err != nil {
		t.Fatalf("the child kept the lock: %v", err)
	}
	l.release()
	if _, err := os.Lstat(lockPath(home)); err != nil {
		t.Errorf("the lock file was removed: %v", err)
	}
}

func TestAReplacedLockFileIsNoLock(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "lock")
	f, err := os.Create(path)
	needNil(t, err)
	defer f.Close()
	needNil(t, os.Rename(path, path+".old"))
	if err := claim(f, path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("deleted: %v", err)
	}
	needNil(t, os.WriteFile(path, nil, 0o600))
	if err := claim(f, path); err == nil || !strings.Contains(err.Error(), "was replaced just now") {
		t.Errorf("replaced: %v", err)
	}
}

// An error of our own descriptor, as a network file system gives, says nothing of
// who has the lock.
func TestAnErrorIsNoLostLock(t *testing.T) {
	l, err := takeLock(shortHome(t), "loopd")
	needNil(t, err)
	lock := l.file
	defer lock.Close()
	l.file, err = os.Open(t.TempDir())
	needNil(t, err)
	if !l.lost() {
		t.Error("another file: not lost")
	}
	l.file.Close()
	if l.lost() {
		t.Error("an error: lost")
	}
}

func TestAForeignNoteIsQuotedAndCut(t *testing.T) {
	home := shortHome(t)
	l, err := takeLock(home, "loopd")
	needNil(t, err)
	defer l.release()
	_, err = l.file.WriteAt([]byte("\x1b[2Jred\n::error::"+strings.Repeat("x", 1<<16)), 0)
	needNil(t, err)
	_, err = takeLock(home, "loopd")
	if !errors.Is(err, errHeld) {
		t.Fatal(err)
	}
	if lines := strings.Split(err.Error(), "\n"); len(lines) != 3 || len(err.Error()) > 800 || strings.ContainsRune(err.Error(), 0x1b) {
		t.Errorf("refusal of %d lines, %d bytes: %q", len(lines), len(err.Error()), err)
	}
}

func TestAPeerOfAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	home, uid := boundUser(t)
	path := filepath.Join(home, "open.sock")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	needNil(t, err)
	defer ln.Close()
	needNil(t, os.Chmod(path, 0o777))
	h := startLockChild(t, "connect", path, uid)
	if h.first != "held" {
		t.Fatalf("the child said %q", h.first)
	}
	needNil(t, ln.SetDeadline(time.Now().Add(lockTestPatience)))
	c, err := ln.AcceptUnix()
	needNil(t, err)
	if peerAllowed(c) {
		t.Error("a peer of another uid was let in")
	}
	needNil(t, c.Close())
	if peerAllowed(c) {
		t.Error("a closed connection was let in")
	}
}

// Where the kernel does not say who connects nobody is taken for the user, or for root.
func TestAPeerOfUnknownUserIsRefused(t *testing.T) {
	d := loopd(t, newFakeLlama(t).home(""))
	failing(t, d.cmd, "", "-e trace=getsockopt -e inject=getsockopt:error=EPERM")
	d.start()
	var sock net.Conn
	until(t, "the daemon takes connections", deadline, func() bool {
		c, err := net.Dial("unix", d.socket())
		sock = c
		return err == nil
	})
	defer sock.Close()
	ping, err := encodeFrame(clientFrame, 1, true, &wireRequest{Type: "ping"})
	needNil(t, err)
	sock.Write(ping) // it may be closed already
	e, err := readFrame(sock, clientFrame, func() {})
	if err != nil || !strings.Contains(string(e.Msg), string(codePermissionDenied)) {
		t.Errorf("%v, got %s", err, e.Msg)
	}
}

func TestErrnoText(t *testing.T) {
	for errno, want := range map[syscall.Errno]string{
		syscall.EPERM: "Operation not permitted (os error 1)", syscall.ENOENT: "No such file or directory (os error 2)",
		syscall.EIO: "Input/output error (os error 5)", syscall.EACCES: "Permission denied (os error 13)",
		syscall.ENOTDIR: "Not a directory (os error 20)", syscall.ENOSPC: "No space left on device (os error 28)",
		syscall.EROFS: "Read-only file system (os error 30)", syscall.ENOLCK: "No locks available (os error 37)",
		syscall.EDQUOT: "Disk quota exceeded (os error 122)", syscall.Errno(4095): "Errno 4095 (os error 4095)",
	} {
		if got := errnoText(fmt.Errorf("wrapped: %w", &os.PathError{Op: "open", Path: "x", Err: errno})); got != want {
			t.Errorf("errno %d: %q, want %q", int(errno), got, want)
		}
	}
	if got := errnoText(errors.New("no errno here")); got != "no errno here" {
		t.Errorf("%q", got)
	}
}

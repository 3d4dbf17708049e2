//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This file makes "one daemon per home" true. It owns where the lock and the
// socket lie, the instance lock, the socket file, the flock of a session and
// the check of who connects. The truth is the kernel's flock alone: it ends with
// the process, however that ends; the text in the file is a note for people.
// It never unlinks a lock file (a second daemon could then lock a new one beside
// the first), never waits longer than lockPatience, never changes the mode of a
// directory, and never touches the socket without the lock in hand.

const (
	// Directories and files below the home hold conversations and sockets.
	dirMode, fileMode = 0o700, 0o600

	// lockPatience bounds the wait for a lock, lockPause lies between two tries.
	// A dead holder's child keeps a copy of the descriptor between fork and exec,
	// for about 1 ms, even with O_CLOEXEC (golang/go#22315). Whatever lasts
	// longer is a live holder.
	lockPatience, lockPause = 100 * time.Millisecond, 5 * time.Millisecond

	// Bytes of a holder's note that are shown, ours has about 50; of a socket's path: sun_path of unix(7) has 108, the last
	// is the final NUL.
	noteMax, socketPathMax = 200, 107
)

// errHeld says that a live process has the flock. Its words stand as they are
// in the refusal that takeLock's contract fixes.
var errHeld = errors.New("is running")

// instanceLock is the right to be the daemon of a home.
type instanceLock struct {
	home string   // set once
	file *os.File // set once; open as long as the right lasts, O_CLOEXEC keeps it from children

	// owned by the goroutine that calls listen and release
	listener *net.UnixListener
	bound    os.FileInfo // the socket file that our bind made
}

// lockPath and socketPath are not configurable: clients find a daemon from the
// home alone.
func lockPath(home string) string   { return filepath.Join(home, "run", "loopd.lock") }
func socketPath(home string) string { return filepath.Join(home, "run", "loop", "loop.sock") }

// takeLock makes this process the daemon of home until release. name is the
// program's name in the messages, which scripts compare: they are exact, and
// foreign to the house style, once main has put "NAME: " before them. errHeld
// means that somebody else is the daemon; nothing was changed then, and further
// lines say who and how to stop it. A socket path that no bind could take is
// refused here, before a server is asked anything.
func takeLock(home, name string) (*instanceLock, error) {
	path, socket := lockPath(home), socketPath(home)
	if len(socket) > socketPathMax {
		return nil, fmt.Errorf("socket path %s is %d bytes, the limit is %d: use a shorter home or a symbolic link to it; see docs/runbook.md#socket-path", socket, len(socket), socketPathMax)
	}
	l, err := &instanceLock{home: home}, privateDir(filepath.Dir(path))
	if err == nil {
		// O_NONBLOCK: a planted fifo must not hang us. ELOOP: a planted link, left alone.
		l.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, fileMode)
	}
	if err == nil {
		if err = claim(l.file, path); err == nil {
			l.note("starting")
			return l, nil
		}
	}
	defer l.file.Close() // of nil, too: Close then only returns an error
	if errors.Is(err, errHeld) {
		note := make([]byte, noteMax)
		n, _ := l.file.ReadAt(note, 0) // quoted below: a file's bytes go to a terminal
		return nil, fmt.Errorf("another %s %w (it holds %s); see docs/runbook.md#already-running\nits note: %q\nto stop it: %s --home %s shutdown; before it serves: kill that pid", name, err, path, strings.TrimSpace(string(note[:n])), name, home)
	}
	return nil, fmt.Errorf("cannot take the lock %s: %s; see docs/runbook.md#already-running", path, errnoText(err))
}

// claim takes the lock of the opened file and insists that it is a plain file of
// ours with one name, and that the path still leads to it: who deleted it in
// between let somebody else lock a new one. Until then nothing is written to it.
func claim(f *os.File, path string) error {
	err := flockFile(f)
	held, heldErr := f.Stat()
	now, nowErr := os.Lstat(path)
	if err = cmp.Or(err, heldErr, nowErr); err != nil {
		return err
	}
	st := now.Sys().(*syscall.Stat_t)
	if !now.Mode().IsRegular() || int(st.Uid) != os.Geteuid() || st.Nlink != 1 || !os.SameFile(now, held) {
		return fmt.Errorf("it is %s of uid %d with %d links, or was replaced just now: it must be a plain file of uid %d with one link", now.Mode(), st.Uid, st.Nlink, os.Geteuid())
	}
	return f.Chmod(fileMode) // the umask may have taken bits, an older file may have more
}

// lost tells whether the path no longer leads to our lock: whoever deleted or
// replaced the file, or moved the home, let another daemon in. An error that says
// nothing of that, such as one of a network, is none.
func (l *instanceLock) lost() bool {
	ours, oursErr := l.file.Stat()
	now, err := os.Lstat(lockPath(l.home))
	return errors.Is(err, os.ErrNotExist) || err == nil && oursErr == nil && !os.SameFile(now, ours)
}

// note rewrites the lock file's text in place, since a new file would be a new
// lock. phase is shown to whoever is refused: it must be printable and may not
// hold the word that heads the lines of the self-test, because scripts take
// that word for its start. A full disk costs only the note, so errors are let go.
func (l *instanceLock) note(phase string) {
	n, _ := l.file.WriteAt(fmt.Appendf(nil, "pid %d, %s since %s\n", os.Getpid(), phase, time.Now().UTC().Format(time.RFC3339)), 0)
	_ = l.file.Truncate(int64(n))
}

// listen binds the daemon's socket, at mode 0600 from its first instant. With
// the lock in hand a socket at the path is a dead daemon's and is removed
// without a probe. Anything else there is an error and left alone.
func (l *instanceLock) listen() (*net.UnixListener, error) {
	path := socketPath(l.home)
	if err := privateDir(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("make the socket's directory: %w; see docs/runbook.md#socket-path", err)
	}
	if old, err := os.Lstat(path); err == nil && old.Mode().Type() != os.ModeSocket {
		return nil, fmt.Errorf("%s is not a socket and was left alone: move it away; see docs/runbook.md#socket-path", path)
	}
	_ = os.Remove(path) // if it stays, bind says EADDRINUSE
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		// fchmod(2) between socket and bind, whose file has this mode less the umask: chmod
		// afterwards leaves a window. No errno is normal; a crash leaves nothing.
		return raw.Control(func(fd uintptr) { _ = unix.Fchmod(int(fd), fileMode) })
	}}
	ln, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("bind the daemon's socket %s: %w; see docs/runbook.md#socket-path", path, err)
	}
	l.listener = ln.(*net.UnixListener)
	// Go unlinks by name at every Close, a successor's socket too (golang/go#17131).
	l.listener.SetUnlinkOnClose(false)
	l.bound, _ = os.Lstat(path) // nil: unlisten then leaves the file to the next daemon
	return l.listener, nil
}

// unlisten removes the socket file, if it is still the one that we bound, and
// closes the listener. In this order: while the socket is open its inode number
// cannot be given to another file. A second call finds nothing to do.
func (l *instanceLock) unlisten() {
	if now, err := os.Lstat(socketPath(l.home)); err == nil && os.SameFile(now, l.bound) {
		_ = os.Remove(socketPath(l.home)) // if it stays, the next daemon removes it
	}
	_ = l.listener.Close() // of nil, too
}

// release ends the right: the socket first, the lock last, so that whoever gets
// the lock finds a home at rest. Closing is the whole unlock; LOCK_UN in one
// process would also free the lock of every other that shares the descriptor.
func (l *instanceLock) release() {
	l.unlisten()
	_ = l.file.Close()
}

// peerAllowed tells whether a connection comes from our uid or root, and is
// false when that cannot be learnt. The 0700 directories keep others out
// already; this holds where somebody opened them. Commands that we run have our
// uid and pass.
func peerAllowed(c *net.UnixConn) bool {
	cred, err := (*unix.Ucred)(nil), net.ErrClosed // until the kernel was asked
	if raw, rawErr := c.SyscallConn(); rawErr == nil {
		// getsockopt(2) SO_PEERCRED: the kernel's word on who connected, at that time.
		// No errno is normal on a unix socket, and with one the answer is uid 0; a crash leaves nothing.
		_ = raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	}
	return err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Geteuid())
}

// flockFile takes the exclusive flock of an open file, or gives errHeld after
// lockPatience. It ends when the last copy of the descriptor is closed.
func flockFile(f *os.File) error {
	for start := time.Now(); ; time.Sleep(lockPause) {
		// flock(2), since an fcntl(2) lock ends when any descriptor of the file is closed.
		// EWOULDBLOCK is normal: held. ENOLCK, ENOSYS and EOPNOTSUPP: a file system without
		// locks, refused. A crash leaves nothing: the kernel unlocks.
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err != unix.EWOULDBLOCK && err != unix.EINTR:
			return os.NewSyscallError("flock", err) // nil: the lock is ours
		case time.Since(start) >= lockPatience:
			return errHeld
		}
	}
}

// privateDir makes dir and its parents, 0700, and insists on a real directory of
// ours that nobody else may write: who can write it can swap what is in it. The
// parents are the user's affair: a mounted home may well be root's or a group's.
func privateDir(dir string) error {
	madeErr := os.MkdirAll(dir, dirMode)
	st, err := os.Lstat(dir)
	if err = cmp.Or(madeErr, err); err != nil {
		return err
	}
	if uid := int(st.Sys().(*syscall.Stat_t).Uid); !st.IsDir() || uid != os.Geteuid() || st.Mode()&0o022 != 0 {
		return fmt.Errorf("%s is %s of uid %d: it must be a directory of uid %d that only its owner may write (chown it, or chmod go-w it)", dir, st.Mode(), uid, os.Geteuid())
	}
	return nil
}

// errnoText words an error as the lock's messages want it: "Permission denied
// (os error 13)". Go's table has strerror's words without the first capital.
func errnoText(err error) string {
	errno, ok := errors.AsType[syscall.Errno](err)
	if !ok {
		return err.Error()
	}
	return fmt.Sprintf("%s%s (os error %d)", strings.ToUpper(errno.Error()[:1]), errno.Error()[1:], int(errno))
}

//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// procs_test.go holds the parts of procs.go that need no second process: the
// capture of output, the scrub, the sandbox's plan, the process list. What
// starts processes is proved with the binary.

func TestOutputIsCutOnCharacters(t *testing.T) {
	for _, c := range []struct {
		name, in string
		dropped  int
	}{
		{"nothing", "", 0},
		{"short", "hello", 0},
		{"exactly the bound", strings.Repeat("x", headKeep+tailKeep), 0},
		{"one more", strings.Repeat("x", headKeep+tailKeep+1), 1},
		{"two bytes each, even", strings.Repeat("é", 40_000), 80_000 - headKeep - tailKeep},
		{"three bytes each", strings.Repeat("€", 40_000), -1},
		{"three bytes each, shifted", "x" + strings.Repeat("€", 40_000), -1},
		{"four bytes each, shifted", "xy" + strings.Repeat("😀", 40_000), -1},
	} {
		for _, piece := range []int{1, 7, 4096, 1 << 20} {
			if piece == 1 && len(c.in) > 50_000 {
				continue // slow, and 7 cuts characters as well
			}
			o := &output{}
			for b := range slices.Chunk([]byte(c.in), piece) {
				o.Write(b)
			}
			text, omitted, _ := o.take(false)
			head, tail, cut := strings.Cut(text, fmt.Sprintf("\n… %d bytes left out …\n", omitted))
			switch {
			case !utf8.ValidString(text) || strings.ContainsRune(text, utf8.RuneError):
				t.Errorf("%s by %d: a character was cut", c.name, piece)
			case cut != (omitted > 0) || c.dropped >= 0 && omitted != c.dropped:
				t.Errorf("%s by %d: %d left out, want %d", c.name, piece, omitted, c.dropped)
			case len(head)+len(tail)+omitted != len(c.in) || !strings.HasPrefix(c.in, head) || !strings.HasSuffix(c.in, tail) || len(head)+len(tail) > headKeep+tailKeep:
				t.Errorf("%s by %d: %d and %d bytes of %d, %d left out", c.name, piece, len(head), len(tail), len(c.in), omitted)
			}
			if again, n, _ := o.take(false); again != "" || n != 0 {
				t.Errorf("%s by %d: given twice: %q", c.name, piece, again)
			}
		}
	}
}

// While a command runs, an unfinished character waits for its rest; once it is
// over, it is replaced.
func TestOutputWaitsForTheRestOfACharacter(t *testing.T) {
	o := &output{}
	o.Write([]byte("a€")[:3])
	if text, _, _ := o.take(true); text != "a" {
		t.Errorf("%q", text)
	}
	o.Write([]byte("a€b")[3:])
	if text, _, _ := o.take(true); text != "€b" {
		t.Errorf("%q", text)
	}
	o.Write([]byte("\xe2\x82"))
	o.take(true)
	if text, _, _ := o.take(false); text != "\uFFFD" {
		t.Errorf("%q", text)
	}
	o.Write([]byte("\xff\xfe ok"))
	if text, _, _ := o.take(true); text != "\uFFFD ok" {
		t.Errorf("%q", text)
	}
}

func TestOutputIsBounded(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "spill"))
	if err != nil {
		t.Fatal(err)
	}
	o := &output{file: file, spilled: spillMax - 1000}
	block := bytes.Repeat([]byte("x"), 32<<10)
	for range 1000 {
		o.Write(block)
		if len(o.buf) > 2*(headKeep+tailKeep) {
			t.Fatalf("%d bytes are held", len(o.buf))
		}
	}
	if fi, _ := file.Stat(); fi.Size() != 1000 || o.spilled != spillMax {
		t.Errorf("the file has %d bytes, want 1000 up to the limit", fi.Size())
	}
	if _, omitted, _ := o.take(false); omitted != 1000*len(block)-headKeep-tailKeep {
		t.Errorf("%d left out", omitted)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	o = &output{file: full}
	if n, err := o.Write(block); n != len(block) || err != nil || !o.failed {
		t.Errorf("a full disk stopped the command: %d %v", n, err)
	}
}

func TestScrub(t *testing.T) {
	gone := []string{"OPENAI_API_KEY", "api_key", "Github_Token", "AWS_SECRET", "PGPASSWORD", "MYSQL_PASSWD", "GOOGLE_CREDENTIALS", "DB_PASS", "MYSQL_PWD", "GH_PAT", "A_JWT", "NPM_AUTH", "DOCKER_AUTH_CONFIG", "KEY", "BELAY_HOME", "NAMED"}
	stays := []string{"PATH", "HOME", "PWD", "OLDPWD", "KEYBOARD", "TOKENS_USED", "AUTHOR", "COMPASS", "SPAT", "GOFLAGS", "EMPTY", "KEPT_TOKEN", "SECRET_SANTA"}
	var env []string
	for _, name := range append(slices.Clone(gone), stays...) {
		env = append(env, name+"=value=with=signs")
	}
	var want []string
	for _, name := range stays {
		want = append(want, name+"=value=with=signs")
	}
	got := scrub(env, []string{"BELAY_HOME", "NAMED"}, []string{"KEPT_TOKEN", "NAMED", "BELAY_HOME"})
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if len(env) != len(gone)+len(stays) || env[0] != "OPENAI_API_KEY=value=with=signs" {
		t.Error("the caller's environment was changed")
	}
}

func TestReadProcWithOddNames(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"plain", "a b", "x) R 1 (y", ") Z 1 1 1", "new\nline", "(((", "))))"} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.Symlink(sleep, path); err != nil {
			t.Fatal(err)
		}
		c := exec.Command(path, "60")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		p, ok := readProc(c.Process.Pid)
		if !ok || p.pid != c.Process.Pid || p.ppid != os.Getpid() || p.dead() || p.start == 0 {
			t.Errorf("%q: %+v %v", name, p, ok)
		}
		self, _ := readProc(os.Getpid())
		if p.sid != self.sid || p.start < self.start {
			t.Errorf("%q: session %d, start %d; ours %d, %d", name, p.sid, p.start, self.sid, self.start)
		}
		c.Process.Kill()
		c.Wait()
		if _, ok := readProc(p.pid); ok {
			t.Errorf("%q is there after its end", name)
		}
	}
	for _, pid := range []int{0, -1, 1 << 30} {
		if p, ok := readProc(pid); ok {
			t.Errorf("pid %d: %+v", pid, p)
		}
	}
}

func TestBelowSkipsWholeSubtrees(t *testing.T) {
	all := []proc{{pid: 1}, {pid: 10, ppid: 1}, {pid: 11, ppid: 10}, {pid: 12, ppid: 11, state: 'Z'}, {pid: 13, ppid: 12}, {pid: 20, ppid: 1}, {pid: 21, ppid: 20}}
	var got []int
	for _, p := range below(all, 1, func(p proc) bool { return p.pid == 20 }) {
		got = append(got, p.pid)
	}
	if !slices.Equal(got, []int{10, 11, 13}) {
		t.Errorf("%v", got)
	}
}

// Our parent was read as alive, and what has its number by the end of the look is
// our own descendant: a ring, as in a namespace with few numbers.
func TestBelowARing(t *testing.T) {
	self := os.Getpid()
	all := []proc{{pid: self, ppid: self + 1}, {pid: self + 1, ppid: self + 2}, {pid: self + 2, ppid: self}}
	var got []int
	for _, p := range below(all, self, nil) {
		got = append(got, p.pid)
	}
	if !slices.Equal(got, []int{self + 2, self + 1}) {
		t.Errorf("%v", got)
	}
}

func TestGitCommon(t *testing.T) {
	dir := realPath(t.TempDir())
	repo, tree := filepath.Join(dir, "repo"), filepath.Join(dir, "tree")
	entry := filepath.Join(repo, ".git", "worktrees", "tree")
	os.MkdirAll(entry, 0o755)
	os.Mkdir(tree, 0o755)
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ name, ours, theirs, want string }{
		{"both name each other", "gitdir: " + entry + "\n", tree + "/.git\n", repo + "/.git"},
		{"relative paths", "gitdir: ../repo/.git/worktrees/tree\n", "../../../../tree/.git\n", repo + "/.git"},
		{"forged", "gitdir: " + entry + "\n", dir + "/other/.git\n", ""},
		{"no answer", "gitdir: " + entry + "\n", "", ""},
		{"not below worktrees", "gitdir: " + repo + "/.git\n", tree + "/.git\n", ""},
		{"home of somebody", "gitdir: /root\n", tree + "/.git\n", ""},
		{"no prefix", entry + "\n", tree + "/.git\n", ""},
		{"empty", "", tree + "/.git\n", ""},
	} {
		write(tree+"/.git", c.ours)
		write(entry+"/gitdir", c.theirs)
		if got := new(confinement).gitCommon(tree); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if got := new(confinement).gitCommon(repo); got != "" {
		t.Errorf("an ordinary repository: %q", got)
	}
	if git, err := exec.LookPath("git"); err == nil { // as git itself makes them
		real := filepath.Join(dir, "real")
		script := `set -e; git init -q "$0"; cd "$0"; git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x; git worktree add -q ../linked`
		c := exec.Command("sh", "-c", script, real)
		c.Env = append(os.Environ(), "HOME="+dir, "GIT_CONFIG_NOSYSTEM=1", "PATH="+filepath.Dir(git)+":"+os.Getenv("PATH"))
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if got := new(confinement).gitCommon(filepath.Join(dir, "linked")); got != real+"/.git" {
			t.Errorf("a worktree that git made: %q", got)
		}
	}
}

func TestPlanSandboxFailsClosed(t *testing.T) {
	dir := realPath(t.TempDir())
	home := filepath.Join(dir, "work", "home")
	os.MkdirAll(home, 0o700)
	os.Symlink(dir, filepath.Join(dir, "work", "link"))
	for _, c := range []struct {
		name, mode, workspace string
		abi                   int
		want                  string // of the error; "" = none
	}{
		{"no Landlock", "workspace-write", dir, 0, "it needs Landlock ABI 2"},
		{"old Landlock", "read-only", dir, 1, "this kernel offers 1"},
		{"root as workspace", "workspace-write", "/", 5, "workspace / or another writable directory is / or holds"},
		{"workspace holds the home", "workspace-write", dir + "/work", 5, "could write the next run's configuration: take another --workspace or --home"},
		{"workspace is the home", "workspace-write", home, 5, "could write the next run's configuration: take another --workspace or --home"},
		{"by a link", "workspace-write", dir + "/work/link", 5, "could write the next run's configuration: take another --workspace or --home"},
		{"read-only may hold it", "read-only", dir + "/work", 5, ""},
		{"beside it", "workspace-write", dir + "/work/home/../..", 5, "could write"},
		{"elsewhere", "workspace-write", t.TempDir(), 5, ""},
		{"no limits asked for", "danger-full-access", "/", 0, ""},
		{"the container's", "external-sandbox", "/", 0, ""},
	} {
		plan, err := planSandbox(jobOptions{sandbox: c.mode, workspace: c.workspace, home: home, writable: []string{"/extra"}}, c.abi)
		if (err != nil) != (c.want != "") || err != nil && (!strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "sandbox "+c.mode+" refused: ") || !strings.Contains(err.Error(), "--sandbox external-sandbox")) {
			t.Errorf("%s: %v", c.name, err)
		}
		limits := c.mode == "read-only" || c.mode == "workspace-write"
		switch {
		case err != nil && plan != nil, err == nil && (plan != nil) != limits:
			t.Errorf("%s: plan %v", c.name, plan)
		case plan != nil && slices.Contains(plan.Write, "/extra") != (c.mode == "workspace-write"), plan != nil && slices.Contains(plan.Write, realPath(c.workspace)) != (c.mode == "workspace-write"):
			t.Errorf("%s: may write %v", c.name, plan.Write)
		}
	}
}

// A keeper that was started by hand, without belay at its socket, does nothing.
func TestKeeperByHandIsRefused(t *testing.T) {
	c := exec.Command(belayBinary(t))
	c.Args = []string{keeperName, "-c", "touch ran"}
	c.Dir = t.TempDir()
	out, err := c.CombinedOutput()
	if c.ProcessState.ExitCode() != 2 || len(out) > 0 {
		t.Errorf("%v: %s", err, out)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	write.WriteString("no job\n")
	write.Close()
	c = exec.Command(belayBinary(t))
	c.Args, c.ExtraFiles = []string{keeperName}, []*os.File{read}
	if c.Run(); c.ProcessState.ExitCode() != 2 {
		t.Errorf("exit code %d on nonsense", c.ProcessState.ExitCode())
	}
}

// The sandbox grants the directory by a name that travels as JSON, and the model
// reads in it by such a name.
func TestScratchIsNamedInUTF8(t *testing.T) {
	tmp := t.TempDir() + "/t\xfc"
	needNil(t, os.Mkdir(tmp, 0o755))
	scratch := makeScratch(tmp)
	if scratch == nil {
		t.Skip("there is no other place for scratch here")
	}
	defer os.RemoveAll(scratch.Name())
	defer scratch.Close()
	if filepath.Dir(scratch.Name()) == tmp {
		t.Errorf("scratch in %q", scratch.Name())
	}
}

// A directory whose lock is held belongs to a run that lives.
func TestScratchLeftovers(t *testing.T) {
	tmp := t.TempDir()
	for _, name := range []string{"belay-00000001", "belay-00000002", "belay-ABCDEF01", "belay-projects", "belay-000000011"} {
		os.MkdirAll(filepath.Join(tmp, name, "deep"), 0o700)
	}
	os.WriteFile(filepath.Join(tmp, "belay-00000003"), nil, 0o600)
	os.Symlink("belay-projects", filepath.Join(tmp, "belay-00000004"))
	live := lockDir(filepath.Join(tmp, "belay-00000002"), false)
	if live == nil {
		t.Fatal("cannot lock a directory of our own")
	}
	defer live.Close()
	scratch := makeScratch(tmp)
	if scratch == nil {
		t.Fatal("no scratch directory")
	}
	defer scratch.Close()
	entries, _ := os.ReadDir(tmp)
	var names []string
	for _, e := range entries {
		if filepath.Join(tmp, e.Name()) != scratch.Name() {
			names = append(names, e.Name())
		}
	}
	if want := []string{"belay-000000011", "belay-00000002", "belay-00000003", "belay-00000004", "belay-ABCDEF01", "belay-projects"}; !slices.Equal(names, want) {
		t.Errorf("left %v\nwant %v", names, want)
	}
	if fi, err := scratch.Stat(); err != nil || fi.Mode().Perm() != 0o700 || filepath.Dir(scratch.Name()) != tmp {
		t.Errorf("%v %v in %s", fi.Mode(), err, scratch.Name())
	}
	if other := lockDir(scratch.Name(), false); other != nil {
		t.Error("the scratch directory could be locked twice")
	}
	for _, bad := range []string{"", "relative", filepath.Join(tmp, "missing")} {
		d := makeScratch(bad)
		if d == nil || filepath.Dir(d.Name()) != "/tmp" && filepath.Dir(d.Name()) != "/dev/shm" {
			t.Fatalf("TMPDIR=%q: %v", bad, d)
		}
		os.Remove(d.Name())
		d.Close()
	}
}

// BenchmarkKeeper is a command that does nothing under a keeper of the built
// binary, less the same command by itself; and a keeper's resident memory.
func BenchmarkKeeper(b *testing.B) {
	binary := belayBinary(b)
	keeper := func(command string, running func(pid int)) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		needNil(b, err)
		ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
		c := &exec.Cmd{Path: binary, Args: []string{keeperName}, ExtraFiles: []*os.File{theirs}}
		needNil(b, c.Start())
		theirs.Close()
		in := json.NewDecoder(ours)
		needNil(b, json.NewEncoder(ours).Encode(jobSpec{Argv: []string{"/bin/sh", "-c", "--", command}, Dir: "/"}))
		var n note
		needNil(b, in.Decode(&n))
		running(c.Process.Pid)
		needNil(b, in.Decode(&n))
		ours.Close()
		needNil(b, c.Wait())
	}
	var alone time.Duration
	for b.Loop() {
		keeper("true", func(int) {})
		b.StopTimer()
		start := time.Now()
		needNil(b, exec.Command("/bin/sh", "-c", "--", "true").Run())
		alone += time.Since(start)
		b.StartTimer()
	}
	b.ReportMetric(float64((b.Elapsed()-alone).Microseconds())/float64(b.N)/1000, "ms-over-sh")
	keeper("sleep 1", func(pid int) { b.ReportMetric(float64(residentOf(b, pid)), "KiB-resident") })
}

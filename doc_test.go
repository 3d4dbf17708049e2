//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"go/ast"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// doc_test.go compares what the documents and the examples say with the
// program: the lists of AUDIT.md, the manual page, names of tests, transcripts
// of the README, and each example as far as a machine without its system can.

const linesPerHour = 300 // of code that an auditor reads, the measure of AUDIT.md

// cells gives the table rows of a section of AUDIT.md, without head and rule.
func cells(t *testing.T, section string) (rows [][]string) {
	t.Helper()
	_, text, found := strings.Cut(document(t, "AUDIT.md"), "\n## "+section+"\n")
	if !found {
		t.Fatalf("AUDIT.md has no section %q", section)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "|---") {
			row := strings.Split(strings.Trim(line, "|"), "|")
			for i := range row {
				row[i] = strings.Trim(strings.TrimSpace(row[i]), "`")
			}
			rows = append(rows, row)
		}
	}
	if len(rows) < 2 {
		t.Fatalf("section %q of AUDIT.md has no table", section)
	}
	return rows[1:]
}

// inEachFunction calls f for every node, with the name of the function around it.
func (s *sources) inEachFunction(f func(file, function string, n ast.Node)) {
	s.each(func(name string, file *ast.File) {
		for _, d := range file.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				ast.Inspect(fn, func(n ast.Node) bool { f(name, fn.Name.Name, n); return true })
			}
		}
	})
}

// sameRows compares a list of a document with that of the code.
func sameRows(t *testing.T, what string, doc, code []string) {
	t.Helper()
	slices.Sort(doc)
	slices.Sort(code)
	for _, row := range code {
		if !slices.Contains(doc, row) {
			t.Errorf("AUDIT.md, %s, lacks: | %s |", what, row)
		}
	}
	for _, row := range doc {
		if !slices.Contains(code, row) {
			t.Errorf("AUDIT.md, %s, has what the code has not: | %s |", what, row)
		}
	}
	if len(slices.Compact(slices.Clone(doc))) != len(doc) {
		t.Errorf("AUDIT.md, %s, says a row twice", what)
	}
}

func TestAuditListsEverySystemCall(t *testing.T) {
	var code, doc []string
	s := loadSources(t)
	s.inEachFunction(func(file, function string, n ast.Node) {
		c, _ := n.(*ast.CallExpr)
		if c == nil {
			return
		}
		sel, _ := c.Fun.(*ast.SelectorExpr)
		if sel == nil {
			return
		}
		of, _ := sel.X.(*ast.Ident)
		if of == nil || of.Name != "unix" && of.Name != "syscall" || conversion(sel.Sel.Name) {
			return
		}
		call := of.Name + "." + sel.Sel.Name
		if what, ok := c.Args[0].(*ast.SelectorExpr); ok && strings.HasPrefix(sel.Sel.Name, "Syscall") {
			call += "(" + what.Sel.Name + ")" // a raw call is told by its number
		}
		if row := file + " | " + function + " | " + call; !slices.Contains(code, row) {
			code = append(code, row)
		}
	})
	for _, row := range cells(t, "System calls") {
		doc = append(doc, strings.Join(row[:3], " | "))
	}
	sameRows(t, "System calls", doc, code)
}

func TestAuditListsEveryGoroutine(t *testing.T) {
	var code, doc []string
	s := loadSources(t)
	owner := regexp.MustCompile(`owner: ([^;]+); ends (?:when|with) `)
	s.inEachFunction(func(file, function string, n ast.Node) {
		if !startsGoroutine(n) {
			return
		}
		for _, g := range s.files[file].Comments {
			if m := owner.FindStringSubmatch(g.Text()); m != nil && s.fset.Position(g.End()).Line == s.fset.Position(n.Pos()).Line-1 {
				code = append(code, file+" | "+function+" | "+m[1])
				return
			}
		}
		t.Errorf("%s: no owner", s.at(n))
	})
	for _, row := range cells(t, "Goroutines") {
		n, _ := strconv.Atoi(row[3])
		for range n {
			doc = append(doc, strings.Join(row[:3], " | "))
		}
	}
	count := func(rows []string) (out []string) { // "2 of ..." instead of two equal rows
		number := map[string]int{}
		for _, row := range rows {
			number[row]++
		}
		for row, n := range number {
			out = append(out, fmt.Sprintf("%s | %d", row, n))
		}
		return out
	}
	sameRows(t, "Goroutines", count(doc), count(code))
}

// The sizes of AUDIT.md may be off by a tenth, so that a small change needs no
// edit; minutes follow from them.
func TestAuditReadingTimes(t *testing.T) {
	s := loadSources(t)
	blank := regexp.MustCompile(`(?m)^[ \t]*(//.*)?$`)
	size, sum, wrong := map[string]int{}, 0, false
	s.each(func(name string, _ *ast.File) {
		for line := range strings.Lines(string(s.text[name])) {
			if !blank.MatchString(strings.TrimSuffix(line, "\n")) {
				size[name]++
			}
		}
		sum += size[name]
	})
	size["sum"], size["budget"], size["over the budget"] = sum, codeBudget, max(0, sum-codeBudget)
	minutes := func(lines int) int { return (lines*60/linesPerHour + 2) / 5 * 5 }
	seen := map[string]bool{}
	for _, row := range cells(t, "Reading order") {
		said, _ := strconv.Atoi(strings.ReplaceAll(row[1], ",", ""))
		least := float64(size[row[0]]) * 0.1
		if row[0] == "over the budget" {
			least = float64(sum) * 0.1
		}
		if lines, known := size[row[0]]; !known || math.Abs(float64(said-lines)) > least || row[2] != strconv.Itoa(minutes(said)) {
			wrong = true
		}
		seen[row[0]] = true
	}
	if wrong || len(seen) != len(size) {
		for _, name := range slices.Sorted(maps.Keys(size)) {
			t.Errorf("want: | %s | %d | %d |", name, size[name], minutes(size[name]))
		}
	}
}

// A test that a document names must be there.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	names, _ := filepath.Glob("*_test.go")
	all := ""
	for _, name := range names {
		all += document(t, name)
	}
	for _, doc := range []string{"README.md", "AUDIT.md", "SECURITY.md", "docs/configuration.md", "docs/runbook.md", "docs/protocol.md"} {
		for _, name := range regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*|\b\w+_test\.go\b`).FindAllString(document(t, doc), -1) {
			if strings.HasSuffix(name, ".go") && !slices.Contains(names, name) || !strings.HasSuffix(name, ".go") && !strings.Contains(all, "\nfunc "+name+"(") {
				t.Errorf("%s names %s, which does not exist", doc, name)
			}
		}
	}
}

// Every invariant has a function that keeps it and a test that proves it.
func TestAuditInvariantsNameWhatExists(t *testing.T) {
	functions := map[string]bool{}
	loadSources(t).inEachFunction(func(_, function string, _ ast.Node) { functions[function] = true })
	for _, row := range cells(t, "Invariants") {
		for name := range strings.FieldsFuncSeq(row[1], func(r rune) bool { return r == ',' || r == '`' || r == ' ' }) {
			if !functions[name[strings.LastIndex(name, ".")+1:]] {
				t.Errorf("%q is kept by %s, which is no function", row[0], name)
			}
		}
		if !strings.Contains(row[2], "Test") {
			t.Errorf("%q is proved by no test", row[0])
		}
	}
}

// The links of the documents lead to files.
func TestDocumentsLinkToFiles(t *testing.T) {
	for _, doc := range []string{"README.md", "AUDIT.md", "SECURITY.md", "CHANGELOG.md"} {
		for _, m := range regexp.MustCompile(`\]\(([^):#]+)`).FindAllStringSubmatch(document(t, doc), -1) {
			if _, err := os.Stat(m[1]); err != nil {
				t.Errorf("%s: %v", doc, err)
			}
		}
	}
}

// A unit that the runbook asks for is one of the examples.
func TestRunbookNamesUnits(t *testing.T) {
	for _, m := range regexp.MustCompile(`journalctl -u ([\w.-]+)`).FindAllStringSubmatch(document(t, "docs/runbook.md"), -1) {
		document(t, "examples/systemd/"+m[1]+".service")
	}
}

// usageWords gives the flags of a text.
func usageWords(text string) (flags []string) {
	for _, f := range regexp.MustCompile(`--[a-z][a-z-]*|\B-C\b`).FindAllString(text, -1) {
		if !slices.Contains(flags, f) {
			flags = append(flags, f)
		}
	}
	slices.Sort(flags)
	return flags
}

func TestManPage(t *testing.T) {
	page := strings.NewReplacer(`\-`, "-", `\fB`, "", `\fI`, "", `\fR`, "").Replace(document(t, "belay.1"))
	want := append(usageWords(usageText), "--help", "--version")
	slices.Sort(want)
	if have := usageWords(page); !slices.Equal(have, want) {
		t.Errorf("flags of the page %q, of the usage text %q", have, want)
	}
	_, commands, _ := strings.Cut(page, "\n.SH COMMANDS\n")
	commands, _, _ = strings.Cut(commands, "\n.SH ")
	for name := range strings.FieldsSeq(allCommands) {
		if !regexp.MustCompile(`(?m)^\.BR? "?` + name + `\b`).MatchString(commands) {
			t.Errorf("the command %s is not in the page", name)
		}
	}
	for code := range strings.FieldsSeq("0 1 2 75 124 129 130 143 141") {
		if !regexp.MustCompile(`(?m)^\.B.*\b` + code + `\b`).MatchString(page) {
			t.Errorf("the exit code %s is not in the page", code)
		}
	}
	if path, err := exec.LookPath("groff"); err == nil {
		out, err := exec.Command(path, "-man", "-Tascii", "-ww", "belay.1").CombinedOutput()
		if err != nil || strings.Contains(string(out), "warning") {
			t.Errorf("groff: %v %s", err, regexp.MustCompile(`(?m)^.*warning.*$`).FindAllString(string(out), -1))
		}
	}
}

func TestHelpOnEveryCommand(t *testing.T) {
	for name := range strings.FieldsSeq(allCommands) {
		var usage, example []string
		for line := range strings.Lines(helpOn(name)) {
			switch {
			case strings.Contains(examples, "\n"+line) && strings.HasPrefix(line, "  belay "+name):
				example = append(example, line)
			case strings.HasPrefix(line, "  belay "):
				usage = append(usage, line)
			}
		}
		if len(usage) != 1 || len(example) != 1 {
			t.Errorf("help %s: %q %q", name, usage, example)
		}
	}
	if !strings.HasPrefix(helpOn(""), usageText) || !strings.Contains(helpOn("exec"), "--append-system-prompt") {
		t.Error(helpOn("exec"))
	}
	for line := range strings.Lines(helpOn("")) {
		if utf8.RuneCountInString(line) > 80+len("\n") {
			t.Errorf("wider than 80 columns: %s", line)
		}
	}
	// Each example is a command line that belay takes, but for what is not there to be read.
	for line := range strings.Lines(strings.TrimPrefix(examples, "\nExamples:\n")) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "#")
		words := regexp.MustCompile(`"[^"]*"|[^ ]+`).FindAllString(strings.TrimSpace(line), -1)
		if i := slices.IndexFunc(words, func(w string) bool { return w == ">>" || w == "|" }); i > 0 {
			words = words[:i]
		}
		_, err := loadArgs(t, []string{"HOME=" + t.TempDir(), "BELAY_BASE_URL=http://localhost", "BELAY_MODEL=m"}, words[1:]...)
		if err != nil && !strings.HasPrefix(err.Error(), "help ") && !(strings.Contains(line, "--config") && strings.Contains(err.Error(), "no such file")) {
			t.Errorf("%s: %v", line, err)
		}
	}
}

// transcripts gives the console blocks of the documents: commands with what they print.
func transcripts(t *testing.T) (blocks [][][2]string) {
	t.Helper()
	for _, m := range regexp.MustCompile("(?s)\n```console\n(.*?)```\n").FindAllStringSubmatch(document(t, "README.md")+document(t, "docs/transcripts.md"), -1) {
		var block [][2]string
		for line := range strings.Lines(m[1]) {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				block = append(block, [2]string{strings.TrimSpace(command), ""})
			} else {
				block[len(block)-1][1] += line
			}
		}
		blocks = append(blocks, block)
	}
	return blocks
}

// steady takes out what differs from run to run.
func steady(text string, places ...string) string {
	text = strings.NewReplacer(places...).Replace(text)
	for _, p := range [][2]string{{`shell_[0-9a-f]{8}`, "shell_0a1b2c3d"}, {`(pid"?:? ?)\d+`, "${1}4242"}, {`("process_group_id":)\d+`, "${1}4242"}, {`20\d\d-\d\d-\d\dT[\d:.]+Z`, "2026-01-02T03:04:05Z"},
		{`\d+ ms`, "20 ms"}, {` +\d+ bytes`, " 1000 bytes"}, {`pid +\d+`, "pid 4242"}, {`version: .*`, "version: 0.1.0"}, {`bytes:\d+`, "bytes:1000"}, {`probe has \d+ tokens`, "probe has 700 tokens"}} {
		text = regexp.MustCompile(p[0]).ReplaceAllString(text, p[1])
	}
	return text
}

// The transcripts of the README are what happens: the demo with its service
// started and stopped, a run and a daemon, each with a scripted server.
func TestReadmeTranscripts(t *testing.T) {
	t.Parallel()
	blocks := transcripts(t)
	if len(blocks) != 3 {
		t.Fatalf("%d transcripts", len(blocks))
	}
	bin, home, workspace := t.TempDir(), shortHome(t), t.TempDir()
	path, err := filepath.Abs(belayBinary(t))
	needNil(t, err)
	needNil(t, os.Symlink(path, filepath.Join(bin, "belay")))
	needNil(t, os.WriteFile(filepath.Join(workspace, "go.mod"), []byte(document(t, "go.mod")), 0o644))
	p := serve(t, bash("wc -l go.mod"), say("go.mod has 5 lines."))
	llama := newFakeLlama(t)
	llama.turn = func(n int, _ map[string]any) any {
		return []any{say("flock(2) locks an open file."), say("fcntl(2) locks ranges of a file, for a process.")}[n]
	}
	needNil(t, os.WriteFile(filepath.Join(workspace, "belay.toml"), []byte(fmt.Sprintf("[infer]\nsocket = %q\nmodel = \"local\"\n[expect]\ntemplate_sha256 = %q\nn_ctx = 131072\nslots = 2\n", llama.path, templateSum(fakeTemplate))), 0o600))
	shell := func(command string) *exec.Cmd {
		c := exec.Command("sh", "-c", command)
		c.Dir = workspace
		c.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home, "BELAY_BASE_URL=" + p.URL, "BELAY_MODEL=m"}
		return c
	}
	places := []string{home + "/.belay", "/home/you/.belay", workspace, "/work", home, "/tmp", llama.path, "/run/llama/llama.sock"}
	task := ""
	for i, block := range blocks {
		for _, step := range block {
			command := step[0]
			if task != "" {
				command = strings.ReplaceAll(command, "shell_0a1b2c3d", task)
			}
			if background, ok := strings.CutSuffix(command, " &"); ok {
				c := shell("exec " + background)
				needNil(t, c.Start())
				waited := make(chan struct{})
				go func() { c.Wait(); close(waited) }()
				t.Cleanup(func() { c.Process.Kill(); <-waited })
				until(t, command, deadline, func() bool { return shell("belay status").Run() == nil })
				continue
			}
			out, _ := shell("{ " + command + "\n} 2>&1").CombinedOutput()
			if m := regexp.MustCompile(`"task_id":"(\w+)","pid":(\d+)`).FindSubmatch(out); m != nil {
				task = string(m[1])
				pid, _ := strconv.Atoi(string(m[2]))
				stopService(t, pid)
			}
			if got, want := steady(string(out), places...), steady(step[1]); got != want {
				t.Errorf("transcript %d: $ %s\n%s\nthe document has\n%s", i+1, step[0], got, want)
			}
		}
	}
}

// A release build says which commit it is of.
func TestReleaseBuildNamesItsCommit(t *testing.T) {
	head, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		t.Skip("no repository here: there is no commit to name")
	}
	binary := filepath.Join(t.TempDir(), "belay")
	c := exec.Command("go", "build", "-trimpath", "-buildvcs=true", "-ldflags=-s -w", "-o", binary, ".")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	out, err := exec.Command(binary, "version").Output()
	if want := "commit " + strings.TrimSpace(string(head)); err != nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), runtime.Version()) {
		t.Errorf("belay version prints %q, without %q or the version of Go: %v", out, want, err)
	}
}

// The page of the settings has each with its bounds, default, flag and variable.
func TestConfigurationPage(t *testing.T) {
	page := document(t, "docs/configuration.md")
	rows := map[string][]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| (`[a-z]+\\.[^|]*) \\|(.*)\\|$").FindAllStringSubmatch(page, -1) {
		for name := range strings.SplitSeq(m[1], ", ") {
			rows[strings.Trim(name, "`")] = strings.Split(m[2], " |")
		}
	}
	l := &loader{config: &config{command: "exec"}, environ: map[string]string{}}
	known := 0
	for _, f := range l.schema() {
		row := rows[f.key]
		if f.key == "" {
			continue
		}
		if known++; len(row) < 4 {
			t.Errorf("%s is not in the page", f.key)
			continue
		}
		standard, _ := json.Marshal(f.def)
		kind := reflect.TypeOf(f.dst).Elem().Kind()
		want := [][2]string{{row[1], cmp.Or(keep(string(standard), f.def != nil && f.def != "" && !strings.HasPrefix(f.key, "paths.")), " ")}}
		if bounded := f.hi != 0 && f.hi != math.MaxInt64; bounded {
			want = append(want, [2]string{row[2], fmt.Sprintf("%d–%d", f.lo, f.hi)})
		}
		if f.most > 0 {
			want = append(want, [2]string{row[2], fmt.Sprintf("at most %d ", f.most)})
		}
		want = append(want, [2]string{row[2], keep("true, false", kind == reflect.Bool)})
		for _, name := range strings.Fields(f.flag) {
			want = append(want, [2]string{row[3], "-" + name + "`"})
		}
		for _, name := range strings.Fields(f.env) {
			_, kind, many := strings.Cut(name, "_")
			want = append(want, [2]string{row[3], cmp.Or(keep("`X_"+kind+"`", many && strings.Contains(f.env, " ")), "`"+name+"`")})
		}
		for _, w := range want {
			if !strings.Contains(w[0], w[1]) {
				t.Errorf("%s: the page has %q, which lacks %q", f.key, w[0], w[1])
			}
		}
		if len(strings.Fields(f.flag+f.env)) == 0 && strings.TrimSpace(row[3]) != "" {
			t.Errorf("%s has neither flag nor variable: %q", f.key, row[3])
		}
	}
	if known != len(rows) {
		t.Errorf("%d settings, the page has %d", known, len(rows))
	}
	// Names that look like secrets, as scrub has them.
	_, list, _ := strings.Cut(string(loadSources(t).text["procs.go"]), "suffixes := []string{")
	list, _, _ = strings.Cut(list, "}")
	if said := "`" + strings.NewReplacer(`", "`, "`, `", `"`, "").Replace(list) + "`;"; !strings.Contains(page, said) {
		t.Errorf("the page lacks %s", said)
	}
	// The example is a file that is taken.
	_, example, _ := strings.Cut(page, "```toml\n")
	example, _, _ = strings.Cut(example, "```")
	mustLoad(t, []string{"MODELS_EXAMPLE_KEY=k"}, "exec", "--config", writeConfig(t, t.TempDir()+"/c.toml", example, 0o644), "x")
}

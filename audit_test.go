//go:build linux

package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// audit_test.go holds the house rules: budgets, the file graph, imports, what
// stands above system calls and go statements, and documents that say what the
// program does.

// fileBudgets gives the most code lines of each file: not blank, not a comment
// alone. What is over budget is to be cut, not this table raised.
func fileBudgets() map[string]int {
	return map[string]int{"main.go": 200, "config.go": 430, "lock.go": 140, "frame.go": 160, "journal.go": 220,
		"sse.go": 780, "procs.go": 880, "agent.go": 640, "serve.go": 550}
}

// presentLines gives the code lines of the files that are over their budget
// today. They may only shrink: a number here goes down with its file, and the
// entry goes when the file fits.
func presentLines() map[string]int {
	return map[string]int{"agent.go": 778, "serve.go": 881}
}

const (
	codeBudget    = 4000
	allBudget     = 5400 // lines with comments
	functionLines = 80
)

// fileGraph gives the files that each file may refer to.
func fileGraph() map[string][]string {
	return map[string][]string{"main.go": {"serve.go", "agent.go", "procs.go", "config.go"}, "serve.go": {"agent.go", "sse.go", "journal.go", "lock.go", "frame.go", "config.go"},
		"agent.go": {"procs.go", "sse.go", "journal.go", "config.go"}, "journal.go": {"lock.go"}, "procs.go": {}, "sse.go": {}, "lock.go": {}, "frame.go": {}, "config.go": {}}
}

// startsGoroutine is true of go statements and of calls such as WaitGroup.Go.
func startsGoroutine(n ast.Node) bool {
	if call, ok := n.(*ast.CallExpr); ok {
		sel, method := call.Fun.(*ast.SelectorExpr)
		return method && sel.Sel.Name == "Go" && len(call.Args) == 1
	}
	_, ok := n.(*ast.GoStmt)
	return ok
}

// kernelFile is one that may make system calls.
func kernelFile(name string) bool { return name == "lock.go" || name == "procs.go" }

// dependencies is every package outside the standard library, and why.
func dependencies() map[string]string {
	return map[string]string{"golang.org/x/sys/unix": "subreaper, Landlock, seccomp and capability calls that package syscall lacks"}
}

// noImports gives empty packages, enough to resolve our own names.
type noImports struct{}

func (noImports) Import(path string) (*types.Package, error) {
	p := types.NewPackage(path, path[strings.LastIndex(path, "/")+1:])
	p.MarkComplete()
	return p, nil
}

// sources is the program as the rules look at it.
type sources struct {
	fset  *token.FileSet
	files map[string]*ast.File
	text  map[string][]byte
	info  *types.Info
	pkg   *types.Package
}

func loadSources(t *testing.T) *sources {
	t.Helper()
	s := &sources{fset: token.NewFileSet(), files: map[string]*ast.File{}, text: map[string][]byte{}, info: &types.Info{Uses: map[*ast.Ident]types.Object{}}}
	names, _ := filepath.Glob("*.go") // the pattern is right
	var all []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		var err error
		if s.text[name], err = os.ReadFile(name); err == nil {
			s.files[name], err = parser.ParseFile(s.fset, name, s.text[name], parser.ParseComments|parser.SkipObjectResolution)
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s.files[name])
	}
	conf := types.Config{Importer: noImports{}, Error: func(error) {}}
	s.pkg, _ = conf.Check("main", s.fset, all, s.info) // errors: the imports are empty
	if len(all) == 0 {
		t.Fatal("no sources: the test must run in the repository")
	}
	return s
}

func (s *sources) at(n ast.Node) string { return s.fset.Position(n.Pos()).String() }

// each calls f for every file, in the order of their names.
func (s *sources) each(f func(name string, file *ast.File)) {
	for _, name := range slices.Sorted(maps.Keys(s.files)) {
		f(name, s.files[name])
	}
}

func TestBudgetsOfLines(t *testing.T) {
	s := loadSources(t)
	blank := regexp.MustCompile(`(?m)^\s*(//.*)?$`)
	code, all, budgets := 0, 0, fileBudgets()
	s.each(func(name string, _ *ast.File) {
		whole := bytes.Count(s.text[name], []byte("\n"))
		lines, commented := 0, 0
		for line := range bytes.Lines(s.text[name]) {
			line = bytes.TrimSpace(line)
			if !blank.Match(line) {
				lines++
			}
			if bytes.Contains(line, []byte("//")) && !bytes.Contains(line, []byte("://")) {
				commented++
			}
		}
		code, all = code+lines, all+whole
		t.Logf("%-10s %4d code lines of %4d, %4d in all, comments on %d %%", name, lines, budgets[name], whole, commented*100/whole)
		most, ok := budgets[name]
		if now := presentLines()[name]; now > 0 && (lines != now || now <= most) {
			t.Errorf("%s: %d code lines, presentLines says %d, budget %d", name, lines, now, most)
		} else if !ok || now == 0 && lines > most {
			t.Errorf("%s: %d code lines, budget %d", name, lines, most)
		}
	})
	t.Logf("%d code lines of %d, %d lines of %d", code, codeBudget, all, allBudget)
	if len(presentLines()) == 0 && (code > codeBudget || all > allBudget) {
		t.Errorf("%d code lines of %d, %d lines of %d", code, codeBudget, all, allBudget)
	}
}

func TestDeclarations(t *testing.T) {
	s := loadSources(t)
	s.each(func(name string, f *ast.File) {
		if !bytes.HasPrefix(s.text[name], []byte("//go:build linux\n")) {
			t.Errorf("%s does not begin with its build constraint", name)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil && (d.Name.Name == "init" || d.Name.IsExported()) {
					t.Errorf("%s: function %s", s.at(d), d.Name.Name)
				}
				if n := s.fset.Position(d.End()).Line - s.fset.Position(d.Pos()).Line + 1; n > functionLines {
					t.Errorf("%s: %s has %d lines, want at most %d", s.at(d), d.Name.Name, n, functionLines)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					s.declared(t, name, d, spec)
				}
			}
		}
	})
}

// declared checks one type, variable or constant.
func (s *sources) declared(t *testing.T, name string, d *ast.GenDecl, spec ast.Spec) {
	t.Helper()
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		if spec.Name.IsExported() {
			t.Errorf("%s: exported type %s", s.at(spec), spec.Name)
		}
	case *ast.ValueSpec:
		for _, id := range spec.Names {
			embedded := d.Doc != nil && strings.Contains(string(s.text[name][d.Pos()-s.files[name].FileStart-100:d.Pos()-s.files[name].FileStart]), "//go:embed")
			if id.IsExported() || d.Tok == token.VAR && id.Name != "_" && !strings.HasPrefix(id.Name, "err") && !embedded {
				t.Errorf("%s: package-level %s %s", s.at(id), d.Tok, id.Name)
			}
		}
	}
}

// After the imports comes what the file is for.
func TestEveryFileSaysWhatItIsFor(t *testing.T) {
	s := loadSources(t)
	s.each(func(name string, f *ast.File) {
		if name == "main.go" {
			if f.Doc == nil {
				t.Errorf("%s has no package comment", name)
			}
			return
		}
		end := f.Name.End()
		for _, d := range f.Decls {
			if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.IMPORT {
				end = g.End()
			}
		}
		i := slices.IndexFunc(f.Comments, func(g *ast.CommentGroup) bool { return g.Pos() > end })
		if i < 0 || s.fset.Position(f.Comments[i].Pos()).Line != s.fset.Position(end).Line+2 || !regexp.MustCompile(`never|nothing|only`).MatchString(f.Comments[i].Text()) {
			t.Errorf("%s: no comment after the imports that says what it does and never does", name)
		}
	})
}

func TestCallsAndGoroutines(t *testing.T) {
	s := loadSources(t)
	owner := regexp.MustCompile(`owner: .+; ends when .+; joined by .+`)
	s.each(func(name string, f *ast.File) {
		comments := map[int]string{} // by the line that a group ends on
		for _, g := range f.Comments {
			comments[s.fset.Position(g.End()).Line] = strings.ReplaceAll(g.Text(), "\n", " ")
		}
		above := func(n ast.Node) string { return comments[s.fset.Position(n.Pos()).Line-1] }
		var stmt ast.Stmt // the innermost, to look above a call inside "if err := ..."
		ast.Inspect(f, func(n ast.Node) bool {
			if in, ok := n.(ast.Stmt); ok {
				if _, block := in.(*ast.BlockStmt); !block {
					stmt = in
				}
			}
			if startsGoroutine(n) && !owner.MatchString(above(n)) {
				t.Errorf("%s: a goroutine without // owner: X; ends when Y; joined by Z", s.at(n))
			}
			switch n := n.(type) {
			case *ast.CallExpr:
				sel, _ := n.Fun.(*ast.SelectorExpr)
				if sel == nil {
					break
				}
				of, _ := sel.X.(*ast.Ident)
				if of == nil {
					break
				}
				call := of.Name + "." + sel.Sel.Name
				kernel := of.Name == "unix" || of.Name == "syscall" && !conversion(sel.Sel.Name)
				switch {
				case kernel && !kernelFile(name):
					t.Errorf("%s: %s outside lock.go and procs.go", s.at(n), call)
				case kernel && above(n) == "" && (stmt == nil || above(stmt) == ""):
					t.Errorf("%s: %s without a comment on the line above", s.at(n), call)
				case name != "main.go" && (call == "os.Exit" || strings.HasPrefix(call, "log.Fatal")):
					t.Errorf("%s: %s outside main.go", s.at(n), call)
				}
			}
			return true
		})
	})
}

// conversion says whether a call of package syscall converts and calls nothing.
func conversion(name string) bool {
	return slices.Contains([]string{"Signal", "Errno", "WaitStatus"}, name)
}

// A file refers only to the files that the graph gives it.
func TestFileGraph(t *testing.T) {
	s := loadSources(t)
	graph, wrong := fileGraph(), map[string]bool{}
	for id, obj := range s.info.Uses {
		if v, ok := obj.(*types.Var); obj.Pkg() != s.pkg || !obj.Pos().IsValid() || ok && v.IsField() {
			continue
		}
		from, to := s.fset.Position(id.Pos()).Filename, s.fset.Position(obj.Pos()).Filename
		if from != to && !slices.Contains(graph[from], to) {
			wrong[fmt.Sprintf("%s uses %s of %s", from, obj.Name(), to)] = true
		}
	}
	for _, msg := range slices.Sorted(maps.Keys(wrong)) {
		t.Error(msg)
	}
	// Acyclic: whatever is taken away when nothing refers to it is all there is.
	for len(graph) > 0 {
		free := ""
		for name := range graph {
			if !slices.ContainsFunc(slices.Collect(maps.Values(graph)), func(to []string) bool { return slices.Contains(to, name) }) {
				free = name
			}
		}
		if free == "" {
			t.Fatalf("a cycle among %v", graph)
		}
		delete(graph, free)
	}
}

func TestDependencies(t *testing.T) {
	if os.Getenv("BELAY_BINARY") != "" {
		t.Skip("a prebuilt binary is tested: there may be no Go here to list the dependencies with")
	}
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	allowed, found := dependencies(), 0
	for _, path := range strings.Fields(string(out)) {
		if found++; path != "belay" && allowed[path] == "" {
			t.Errorf("dependency %s is not on the list", path)
		}
	}
	if found != len(allowed)+1 {
		t.Errorf("%d packages outside the standard library, want belay and %v", found, allowed)
	}
}

// -- documents --

func document(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Each pointer in a message has its section in the runbook, and the other way round.
func TestRunbook(t *testing.T) {
	have, used := map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^## ([a-z0-9-]+)$`).FindAllStringSubmatch(document(t, "docs/runbook.md"), -1) {
		have[m[1]] = true
	}
	s := loadSources(t)
	for name, text := range s.text {
		for _, m := range regexp.MustCompile(`see docs/runbook\.md#([a-z0-9-]+)`).FindAllStringSubmatch(string(text), -1) {
			if used[m[1]] = true; !have[m[1]] {
				t.Errorf("%s points at the missing section %s", name, m[1])
			}
		}
	}
	for slug := range have {
		// The check of the server hands its anchors on as words of their own.
		if !used[slug] && !bytes.Contains(s.text["serve.go"], []byte(`"`+slug+`"`)) {
			t.Errorf("no message points at the section %s of the runbook", slug)
		}
	}
}

func TestReadme(t *testing.T) {
	readme := document(t, "README.md")
	if n := strings.Count(readme, "\n"); n > 200 {
		t.Errorf("%d lines, want at most 200", n)
	}
	if !strings.Contains(readme, "\n```text\n"+usageText+"```\n") {
		t.Error("the usage text is not the one of the program")
	}
	first, _, _ := strings.Cut(readme, "\n## ")
	for _, want := range []string{"go run . demo", "go test ./..."} {
		if !strings.Contains(first, want) {
			t.Errorf("%s is not in the first screen", want)
		}
	}
	if n := strings.Count(first, "\n"); n > 40 {
		t.Errorf("the first screen has %d lines", n)
	}
	for kind := range eventFields() {
		if !strings.Contains(readme, "| `"+kind+"` |") {
			t.Errorf("the event %s is not in the table", kind)
		}
	}
}

// The codes of the README, of the package comment and of the program are the same.
func TestExitCodesAreDocumented(t *testing.T) {
	s := loadSources(t)
	inCode := map[string]bool{"0": true, "2": true} // of run
	s.each(func(_ string, f *ast.File) {
		ast.Inspect(f, func(n ast.Node) bool {
			lit, _ := n.(*ast.CompositeLit)
			if lit == nil {
				return true
			}
			if id, ok := lit.Type.(*ast.Ident); ok && id.Name == "ending" && len(lit.Elts) > 0 {
				switch code := lit.Elts[0].(type) {
				case *ast.BasicLit:
					inCode[code.Value] = true
				case *ast.BinaryExpr: // 128 and the signal
					inCode["129"], inCode["130"], inCode["143"] = true, true, true
				}
			}
			return true
		})
	})
	inReadme := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\| ([0-9, ]+) \|`).FindAllStringSubmatch(document(t, "README.md"), -1) {
		for _, code := range strings.Split(m[1], ", ") {
			inReadme[code] = true
		}
	}
	if !maps.Equal(inCode, inReadme) {
		t.Errorf("codes of the program %v, of the README %v", slices.Sorted(maps.Keys(inCode)), slices.Sorted(maps.Keys(inReadme)))
	}
	_, doc, _ := strings.Cut(s.files["main.go"].Doc.Text(), "Exit codes:")
	for code := range inCode {
		if _, err := strconv.Atoi(code); err != nil || !regexp.MustCompile(`\b`+code+`\b`).MatchString(doc) {
			t.Errorf("code %s is not in the package comment", code)
		}
	}
}

// The fields of docs/protocol.md are those that the events are held to.
func TestProtocolNamesEveryField(t *testing.T) {
	section, _, _ := strings.Cut(document(t, "docs/protocol.md"), "\n## 2.")
	for kind, fields := range eventFields() {
		if !strings.Contains(section, "\n| `"+kind+"` |") {
			t.Errorf("event %s is not there", kind)
		}
		for _, field := range strings.Fields(fields + " " + metaFields) {
			if !strings.Contains(section, "`"+strings.TrimSuffix(field, "?")+"`") {
				t.Errorf("field %s of %s is not there", field, kind)
			}
		}
	}
}

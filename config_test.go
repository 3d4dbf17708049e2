//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// readTOML is parseTOML without a listener.
func readTOML(data []byte) (map[string]any, error) {
	return parseTOML(data, func(string, any, int) {})
}

func TestTOMLReadsWhatItSupports(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     map[string]any // without the tables that hold something
	}{
		{"empty", "", map[string]any{}},
		{"no final line end", "a = 1", map[string]any{"a": int64(1)}},
		{"comments and blanks", "# c\n\n \t a\t=\t1 # c\n#", map[string]any{"a": int64(1)}},
		{"table", "[t]\na=1\nb=2\n[ u ] # c\na=3", map[string]any{"t.a": int64(1), "t.b": int64(2), "u.a": int64(3)}},
		{"empty table", "[t]", map[string]any{"t": nil}},
		{"dotted", "t . a = 1\nt.b=2", map[string]any{"t.a": int64(1), "t.b": int64(2)}},
		{"quoted keys", "\"t\".'a' = 1\n'u' . \"b\" = 2\n[ 'w' ]\n\"a\" = 3", map[string]any{"t.a": int64(1), "u.b": int64(2), "w.a": int64(3)}},
		{"digits as key", "12 = 1\n-_- = 2", map[string]any{"12": int64(1), "-_-": int64(2)}},
		{"numbers as dotted key", "3.14 = 1", map[string]any{"3.14": int64(1)}},
		{"escapes", `a = "\b\t\n\f\r\"\\\u00e9\U0001F600\\a"`, map[string]any{"a": "\b\t\n\f\r\"\\é😀\\a"}},
		{"backslashes", `a = "\\\\\"\\x"`, map[string]any{"a": `\\"\x`}},
		{"raw tab and quotes", "a = \"x\ty'`\"", map[string]any{"a": "x\ty'`"}},
		{"literal", `a = 'C:\new "x" # no'`, map[string]any{"a": `C:\new "x" # no`}},
		{"empty texts", "a = \"\"\nb = ''", map[string]any{"a": "", "b": ""}},
		{"hash in text", `a = "x # y" # z`, map[string]any{"a": "x # y"}},
		{"integers", "a = +99\nb = -17\nc = 0\nd = -0\ne = +0\nf = 1_000_000", map[string]any{"a": int64(99), "b": int64(-17), "c": int64(0), "d": int64(0), "e": int64(0), "f": int64(1000000)}},
		{"bases", "a = 0xDEAD_beef\nb = 0o755\nc = 0b1101_0110\nd = 0x00ff", map[string]any{"a": int64(0xdeadbeef), "b": int64(0o755), "c": int64(0xd6), "d": int64(255)}},
		{"limits", "a = 9223372036854775807\nb = -9223372036854775808", map[string]any{"a": int64(math.MaxInt64), "b": int64(math.MinInt64)}},
		{"floats", "a = 1.5\nb = -0.01\nc = 5e+22\nd = 1e06\ne = -2E-2\nf = 6.626e-34\ng = 224_617.445_991\nh = 0.0\ni = 0e0", map[string]any{"a": 1.5, "b": -0.01, "c": 5e22, "d": 1e6, "e": -2e-2, "f": 6.626e-34, "g": 224617.445991, "h": 0.0, "i": 0.0}},
		{"booleans", "a = true\nb=false", map[string]any{"a": true, "b": false}},
		{"lists", "a = []\nb = [1,2]\nc = [ 1 , \"x\" , true , 1.5 , ]", map[string]any{"a": []any{}, "b": []any{int64(1), int64(2)}, "c": []any{int64(1), "x", true, 1.5}}},
		{"comments in lists", "a = [ # 'no' 2 ]\n '# yes', # \"\n \"#\" ]", map[string]any{"a": []any{"# yes", "#"}}},
		{"list over lines", "a = [ # c\n\n 1, # one\n 2\n # end\n , \n]\nb = 1", map[string]any{"a": []any{int64(1), int64(2)}, "b": int64(1)}},
		{"table after list", "a = [\n1]\n[t]\nb=1", map[string]any{"a": []any{int64(1)}, "t.b": int64(1)}},
	} {
		for _, form := range []string{c.in, strings.ReplaceAll(c.in, "\n", "\r\n")} {
			got, err := readTOML([]byte(form))
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
				continue
			}
			for name, v := range got {
				if _, wanted := c.want[name]; v == nil && !wanted {
					delete(got, name)
				}
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s: got %v, want %v", c.name, got, c.want)
			}
		}
	}
}

func TestTOMLRefusesTheRestWithItsLine(t *testing.T) {
	for _, c := range []struct {
		in   string
		line int
	}{
		// Valid TOML 1.0 that is not supported.
		{"\na = 1979-05-27T07:32:00Z", 2}, {"a = 1979-05-27", 1}, {"a = 07:32:00", 1}, {"\n\na = 1979-05-27 07:32:00", 3},
		{"a = {b = 1}", 1}, {"a = {}", 1}, {"b=1\na = [{}]", 2}, {"a=1\n[[t]]", 2}, {"a = \"\"\"x\"\"\"", 1}, {"a = '''\nx'''", 1}, {"a = ''''''", 1},
		{"a = inf", 1}, {"a = -inf", 1}, {"a = nan", 1}, {"a = +nan", 1}, {"[t.u]", 1}, {"\n[t]\nu.v = 1", 3}, {"a.b.c = 1", 1},
		// No TOML.
		{"a", 1}, {"a =", 1}, {"= 1", 1}, {"a = 1 b = 2", 1}, {"a = 1\n b = \n", 2}, {"a b = 1", 1}, {"a\n= 1", 1}, {"a =\n1", 1},
		{"[]", 1}, {"[a", 1}, {"[a]]", 1}, {"[a] b = 1", 1}, {"[a\n]", 1}, {"[.a]", 1}, {"[a.]", 1}, {"[a..b]", 1}, {".a = 1", 1}, {"a. = 1", 1}, {"[ [a]]", 1},
		{"é = 1", 1}, {"\"\"\"a\"\"\" = 1", 1}, {"a\"b\" = 1", 1}, {"\"a\"b = 1", 1}, {"`a` = 1", 1}, {"'a = 1", 1}, {"\"a = 1", 1},
		{"a = x", 1}, {"a = True", 1}, {"a = truefalse", 1}, {"a = true1", 1}, {"a = `x`", 1}, {"a = 'x", 1}, {"a = \"x", 1}, {"a = \"x\ny\"", 1}, {"a = 'x\ny'", 1},
		{"a = 'x\n'[1]", 1}, {"a = \"x\n\"[1]", 1}, {"a = x\"y\"", 1}, {"a = \"x\"y", 1}, {"a = \"x\"\"y\"", 1},
		{`a = "\a"`, 1}, {`a = "\v"`, 1}, {`a = "\x41"`, 1}, {`a = "\101"`, 1}, {`a = "\'"`, 1}, {`a = "\e"`, 1}, {`a = "\/"`, 1}, {`a = "\ "`, 1}, {`a = "\u12"`, 1}, {`a = "\ud800"`, 1}, {`a = "\U00110000"`, 1}, {`a = "\"`, 1}, {`a = "\\\a"`, 1},
		{"a = 01", 1}, {"a = 0_1", 1}, {"a = -01", 1}, {"a = 1__0", 1}, {"a = _1", 1}, {"a = 1_", 1}, {"a = 0x", 1}, {"a = 0x_1", 1}, {"a = 0X1", 1}, {"a = 0B1", 1}, {"a = 0O1", 1}, {"a = +0x1", 1}, {"a = -0b1", 1}, {"a = 0o8", 1}, {"a = 0b2", 1}, {"a = 0xg", 1}, {"a = 0777", 1}, {"a = ++1", 1}, {"a = +-1", 1}, {"a = +", 1}, {"a = - 1", 1},
		{"a = 9223372036854775808", 1}, {"a = -9223372036854775809", 1}, {"a = 0x8000000000000000", 1},
		{"a = 1.", 1}, {"a = .5", 1}, {"a = -.5", 1}, {"a = +.5", 1}, {"a = 1.e5", 1}, {"a = 1e", 1}, {"a = 1e5.5", 1}, {"a = 1._5", 1}, {"a = 1_.5", 1}, {"a = 1.5_", 1}, {"a = 1e_5", 1}, {"a = 01.5", 1}, {"a = 00e1", 1}, {"a = 0x1p-2", 1}, {"a = 1e999", 1}, {"a = 1.2.3", 1}, {"a = e5", 1}, {"a = E", 1}, {"a = .", 1}, {"a = 1.+5", 1}, {"a = infinity", 1},
		{"a = [1 2]", 1}, {"a = [,]", 1}, {"a = [1,,2]", 1}, {"a = [1", 1}, {"\na = [\n1,\n", 2}, {"a = [1]]", 1}, {"a = ]", 1}, {"a = [1 # ]\n2]", 1}, {"a = " + strings.Repeat("[", 100), 1}, {"a = [1, 9223372036854775808]", 1},
		// Keys that need their quotes, lists in lists: right, and of no use here.
		{"\"a b\" = 1", 1}, {"'' = 1", 1}, {"\"c.d\" = 1", 1}, {"\"\\u0061\" = 1", 1}, {"a = [[1],[],]", 1}, {"a = [[]]", 1},
		// Twice.
		{"a=1\na=2", 2}, {"a=1\n\"a\"=2", 2}, {"[t]\n[t]", 2}, {"[t]\n[u]\n[\"t\"]", 3}, {"t=1\n[t]", 2}, {"t.a=1\n[t]", 2}, {"t=1\nt.a=2", 2}, {"t.a=1\nt=2", 2}, {"t.a=1\nt.a=2", 2}, {"a=1\na=[\n\n]", 2}, {"t=[1]\n[t]", 2}, {"t=[1]\nt.a=1", 2},
		// Characters.
		{"a = 1\n# \x01", 2}, {"a = \"\x00\"", 1}, {"a = '\x7f'", 1}, {"\n\na = \"\xff\"", 3}, {"a = 1\r", 1}, {"a = 1\rb = 2", 1}, {"# x\ry", 1}, {"a = 1\r\r\n", 1}, {"a = \"\u0085\"", 1}, {"\x0ba = 1", 1}, {"\ufeffa = 1", 1}, {"a = 1\u00a0", 1},
	} {
		got, err := readTOML([]byte(c.in))
		want := fmt.Sprintf("%d: found ", c.line)
		if err == nil || got != nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got %v, %v, want an error that begins %q", c.in, got, err, want)
		}
	}
}

// encodeTOML writes a flat map so that parseTOML gives it back.
func encodeTOML(m map[string]any) string {
	var value func(v any) string
	value = func(v any) string {
		switch v := v.(type) {
		case string:
			var b strings.Builder
			for _, r := range v {
				fmt.Fprintf(&b, `\U%08X`, r)
			}
			return `"` + b.String() + `"`
		case float64:
			return strconv.FormatFloat(v, 'e', -1, 64)
		case []any:
			parts := make([]string, len(v))
			for i := range v {
				parts[i] = value(v[i])
			}
			return "[\n" + strings.Join(parts, ",\n") + "]"
		}
		return fmt.Sprint(v)
	}
	var keys, tables strings.Builder
	for name, v := range m {
		holds := func(n string) bool { return strings.HasPrefix(n, name+".") }
		if v != nil {
			fmt.Fprintf(&keys, "%s = %s\n", name, value(v))
		} else if !slices.ContainsFunc(slices.Collect(maps.Keys(m)), holds) {
			fmt.Fprintf(&tables, "[%s]\n", name)
		}
	}
	return keys.String() + tables.String()
}

func FuzzTOML(f *testing.F) {
	for _, seed := range []string{
		"[infer]\nmodel = \"m\"\nmax_tokens = 0x10\n", "a.b = [1, 2.5, 'x', true, [[]]] # c\n", "\"q k\" = \"\\u00e9\\\\\"\n'' = +1_0.0e-1\n",
		"[t]\r\na = 1\r\n", "a = 1979-05-27", "a = '''x'''", "a = {b = 1}", "[[t]]", "a = \"\\a\"", "a = [1,\n#\n]", "[\"a.b\"]\nc=1", "a = -0.0",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := readTOML(data)
		if !strings.Contains(string(data), "\r") {
			crlf, crlfErr := readTOML([]byte(strings.ReplaceAll(string(data), "\n", "\r\n")))
			if fmt.Sprint(err) != fmt.Sprint(crlfErr) || !reflect.DeepEqual(m, crlf) {
				t.Errorf("line ends matter: %v, %v and %v, %v", m, err, crlf, crlfErr)
			}
		}
		if err != nil {
			if m != nil {
				t.Errorf("an error came with values: %v", m)
			}
			return
		}
		textKey := encodeTOML(m)
		again, err := readTOML([]byte(textKey))
		if err != nil || !reflect.DeepEqual(m, again) {
			t.Errorf("%q read as %v, written as %q, read as %v, %v", data, m, textKey, again, err)
		}
	})
}

// loadArgs runs loadConfig in a directory of its own; args is without the program.
func loadArgs(t *testing.T, env []string, args ...string) (*config, error) {
	t.Helper()
	return loadConfig(append([]string{"/bin/belay"}, args...), env, t.TempDir())
}

func mustLoad(t *testing.T, env []string, args ...string) *config {
	t.Helper()
	c, err := loadArgs(t, env, args...)
	if err != nil {
		t.Fatalf("%q with %q: %v", args, env, err)
	}
	return c
}

func wantUsage(t *testing.T, env []string, args []string, wants ...string) {
	t.Helper()
	c, err := loadArgs(t, env, args...)
	var help *helpRequest
	if err == nil || errors.As(err, &help) {
		t.Errorf("%q with %q: got %v, %v, want a usage error", args, env, c, err)
		return
	}
	for _, want := range wants {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %q, want it to contain %q", args, err, want)
		}
	}
}

func writeConfig(t *testing.T, path, textKey string, mode os.FileMode) string {
	t.Helper()
	for _, err := range []error{os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(textKey), mode), os.Chmod(path, mode)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// originOf gives value and origin as `belay config` shows them.
func originOf(c *config, key string) string {
	for _, s := range c.values {
		if s.key == key {
			return s.value + " " + s.origin
		}
	}
	return "missing"
}

const testTemplate = "f55f52930aa8bf44ab5cb85f99370fcc3c56e9a85640b812086d5330bce5d86b"

func TestSeedCommandLines(t *testing.T) {
	home, work, url := t.TempDir(), t.TempDir(), "http://127.0.0.1:4321"
	env := []string{
		"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "HOME=" + home, "USERPROFILE=" + home,
		"XDG_CONFIG_HOME=" + home + "/.config", "XDG_DATA_HOME=" + home + "/.local/share", "XDG_CACHE_HOME=" + home + "/.cache",
		"CODEWHALE_CONFIG_PATH=" + home + "/.codewhale/config.toml", "DEEPSEEK_CONFIG_PATH=" + home + "/.deepseek/config.toml",
		"DEEPSEEK_API_KEY=ci-test-key-not-real", "DEEPSEEK_BASE_URL=" + url, "CODEWHALE_BASE_URL=" + url,
		"DEEPSEEK_MODEL=deepseek-chat", "CODEWHALE_MODEL=deepseek-chat", "RUST_LOG=warn",
	}
	c := mustLoad(t, env, "--workspace", work, "--no-project-config", "exec", "--auto", "--sandbox", "danger-full-access",
		"--model", "deepseek-chat", "--output-format", "stream-json", "start the service, then confirm")
	if c.command != "exec" || c.workspace != work || !c.noProjectConfig || !c.auto || c.sandbox != "danger-full-access" || !c.sandboxFlag ||
		c.format != "stream-json" || c.prompt != "start the service, then confirm" || c.url != url+"/v1/chat/completions" ||
		c.key.reveal() != "ci-test-key-not-real" || c.keyNote != "" || c.home != home+"/.belay" || c.maxTokens != 0 {
		t.Errorf("exec: %v", c.values)
	}

	dir := t.TempDir()
	file := writeConfig(t, filepath.Join(dir, "config.toml"), "\n[infer]\nsocket = \""+dir+"/server.sock\"\nmodel = \"test-model\"\n[slots]\nmain = 0\nbackground = 1\n[expect]\ntemplate_sha256 = \""+testTemplate+"\"\nn_ctx = 131072\nslots = 2\n[limits]\npoll_ms = 40\nliveness_ms = 500\nretry_backoff_ms = [10]\n[paths]\nhome = \""+dir+"\"\n", 0o644)
	c, err := loadConfig([]string{"/x/loopd", "serve", "--config", file}, []string{"PATH=/bin", "HOME=" + home}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if c.program != "loopd" || c.socket != dir+"/server.sock" || c.home != dir || c.expectTemplate != testTemplate || c.expectCtx != 131072 ||
		c.expectSlots != 2 || c.poll != 40*time.Millisecond || c.liveness != 500*time.Millisecond || !slices.Equal(c.backoff, []time.Duration{10 * time.Millisecond}) ||
		c.maxTokens != 8192 || c.workspace != "" || c.url != "http://localhost/v1/chat/completions" || c.key.reveal() != "" {
		t.Errorf("serve: %v", c.values)
	}
}

func TestServeIsDeafToTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	base := "[infer]\nbase_url = \"http://127.0.0.1:1\"\nmodel = \"m\"\n[expect]\ntemplate_sha256 = \"" + testTemplate + "\"\nn_ctx = 4096\nslots = 2\n"
	file := writeConfig(t, dir+"/c.toml", base, 0o644)
	withHome := writeConfig(t, dir+"/h.toml", base+"[paths]\nhome = \""+dir+"/in-file\"\n", 0o644)
	env := []string{"HOME=" + dir, "BELAY_HOME=" + dir + "/in-env"}
	loud := append(slices.Clone(env), "BELAY_MODEL=x", "OPENAI_MODEL=x", "BELAY_BASE_URL=http://127.0.0.1:2", "OPENAI_BASE_URL=http://127.0.0.1:1", "BELAY_CONFIG_PATH="+writeConfig(t, dir+"/bad.toml", "?", 0o644), "BELAY_SANDBOX=nonsense", "BELAY_NETWORK=true", "BELAY_ALLOW_INSECURE_HTTP=maybe", "OPENAI_API_KEY=k")
	for _, command := range []string{"serve", "probe", "status", "sessions", "shutdown"} {
		for file, want := range map[string]string{file: dir + "/in-env", withHome: dir + "/in-file"} {
			quiet := mustLoad(t, env, command, "--config", file)
			c := mustLoad(t, loud, command, "--config", file)
			if asks := command == "serve" || command == "probe"; (c.keyNote != "") != asks {
				t.Errorf("%s: note %q", command, c.keyNote)
			}
			c.keyNote = ""
			if !reflect.DeepEqual(quiet, c) || c.home != want || c.network || c.sandbox != "workspace-write" {
				t.Errorf("%s: %v\nand %v", command, quiet.values, c.values)
			}
			if c := mustLoad(t, loud, command, "--config", file, "--home", dir+"/in-flag"); c.home != dir+"/in-flag" {
				t.Errorf("%s: home %s", command, c.home)
			}
		}
	}
	// The file of a daemon is found in its home, and the key is the one thing that it takes.
	writeConfig(t, dir+"/in-env/config.toml", base, 0o644)
	if c := mustLoad(t, append(loud, "BELAY_API_KEY=general"), "serve"); originOf(c, "infer.model") != `"m" file:3` || c.key.reveal() != "general" {
		t.Errorf("model %s, key %s", originOf(c, "infer.model"), c.key)
	}
}

func TestPrecedence(t *testing.T) {
	dir := t.TempDir()
	writeConfig(t, dir+"/home/config.toml", "[infer]\nbase_url = \"http://127.0.0.1:3/file\"\nmodel = \"file\"\nallow_insecure_http = true\n[limits]\nmax_turns = 3\n[exec]\nsandbox = \"read-only\"\nnetwork = true\nwritable = [\"/file\"]\n[paths]\nhome = \"/file-home\"\nworkspace = \"/\"\n", 0o644)
	bare := []string{"HOME=" + dir + "/x", "BELAY_BASE_URL=http://127.0.0.1", "BELAY_MODEL=m"}
	inFile := []string{"HOME=" + dir, "BELAY_HOME=" + dir + "/home"}
	inEnv := append(slices.Clone(inFile), "BELAY_BASE_URL= ", "CODEWHALE_BASE_URL=http://127.0.0.1:2/env", "DEEPSEEK_BASE_URL=http://127.0.0.1:9", "OPENAI_MODEL=openai", "DEEPSEEK_MODEL=env", "BELAY_SANDBOX=external-sandbox", "BELAY_NETWORK=false", "BELAY_ALLOW_INSECURE_HTTP=false")
	flags := []string{"--model", "flag", "--base-url=http://127.0.0.1:1/flag", "--home", dir + "/home", "--workspace", dir, "exec", "--sandbox", "danger-full-access", "-network", "--writable", "/a", "--writable", "b", "--max-turns", "7", "--set", "infer.allow_insecure_http=true", "hi"}
	for _, c := range []struct {
		env, args []string
		want      map[string]string
	}{
		{bare, []string{"exec", "hi"}, map[string]string{
			"infer.model": `"m" env BELAY_MODEL`, "exec.sandbox": `"workspace-write" default`, "exec.network": "false default", "exec.writable": "[] default", "limits.max_turns": "200 default",
			"paths.home": strconv.Quote(dir+"/x/.belay") + " default", "infer.max_tokens": "unset default", "infer.allow_insecure_http": "false default", "limits.retry_backoff_ms": "[500,2000,8000,20000] default", "infer.api_key": "[unset] default"}},
		{inFile, []string{"exec", "hi"}, map[string]string{
			"infer.base_url": `"http://127.0.0.1:3/file" file:2`, "infer.model": `"file" file:3`, "infer.allow_insecure_http": "true file:4", "limits.max_turns": "3 file:6", "exec.sandbox": `"read-only" file:8`,
			"exec.network": "true file:9", "exec.writable": `["/file"] file:10`, "paths.home": strconv.Quote(dir+"/home") + " env BELAY_HOME", "paths.workspace": `"/" file:13`}},
		{inEnv, []string{"exec", "hi"}, map[string]string{
			"infer.base_url": `"http://127.0.0.1:2/env" env CODEWHALE_BASE_URL`, "infer.model": `"env" env DEEPSEEK_MODEL`, "infer.allow_insecure_http": "false env BELAY_ALLOW_INSECURE_HTTP",
			"exec.sandbox": `"external-sandbox" env BELAY_SANDBOX`, "exec.network": "false env BELAY_NETWORK"}},
		{inEnv, flags, map[string]string{
			"infer.base_url": `"http://127.0.0.1:1/flag" flag`, "infer.model": `"flag" flag`, "infer.allow_insecure_http": "true flag", "exec.sandbox": `"danger-full-access" flag`, "exec.network": "true flag",
			"limits.max_turns": "7 flag", "paths.home": strconv.Quote(dir+"/home") + " flag", "paths.workspace": strconv.Quote(dir) + " flag"}},
		{inFile, []string{"--home", dir + "/nowhere", "exec", "--base-url=http://127.0.0.1", "--model=m", "hi"}, map[string]string{"paths.home": strconv.Quote(dir+"/nowhere") + " flag", "exec.sandbox": `"workspace-write" default`}},
		{append(slices.Clone(inFile), "BELAY_BASE_URL=unix:///s"), []string{"exec", "hi"}, map[string]string{"infer.base_url": `"unix:///s" env BELAY_BASE_URL`, "infer.socket": "unset default"}},
		{inFile, []string{"exec", "--set", "infer.socket=/s", "hi"}, map[string]string{"infer.base_url": "unset default", "infer.socket": `"/s" flag`}},
		{[]string{"OPENAI_API_KEY=k", "BELAY_MODEL=a?b"}, []string{"config"}, map[string]string{"infer.base_url": `"https://api.openai.com" env OPENAI_API_KEY`, "infer.model": `"a?b" env BELAY_MODEL`}},
		{[]string{"HOME=" + dir, "BELAY_CONFIG_PATH=~/home/config.toml"}, []string{"config"}, map[string]string{"infer.model": `"file" file:3`, "paths.home": `"/file-home" file:12`}},
	} {
		got := mustLoad(t, c.env, c.args...)
		for key, want := range c.want {
			if have := originOf(got, key); have != want {
				t.Errorf("%q: %s is %s, want %s", c.args, key, have, want)
			}
		}
	}
	c := mustLoad(t, inEnv, flags...)
	if len(c.writable) != 2 || c.writable[0] != "/a" || filepath.Base(c.writable[1]) != "b" || !filepath.IsAbs(c.writable[1]) || c.maxTurns != 7 {
		t.Errorf("writable %q", c.writable)
	}
}

func TestSetTakesEveryKeyAndConfigShowsIt(t *testing.T) {
	home := t.TempDir()
	file := writeConfig(t, home+"/key", "k\n", 0o600)
	// The settings table of the contract with a valid value each.
	table := map[string]string{
		"infer.socket": "/s", "infer.base_url": "http://localhost:1/v1?a=b&c", "infer.model": "qwen-2.5:7b", "infer.api_key_env": "SOME_KEY", "infer.api_key_file": file, "infer.max_tokens": "1_000",
		"infer.api_key_header": "api-key", "infer.temperature": "0.7", "infer.top_p": "1", "infer.seed": "-5", "infer.reasoning_effort": "high", "infer.allow_insecure_http": "true", "infer.wait_for_server": "true",
		"slots.main": "2", "slots.background": "3", "expect.template_sha256": strings.ToUpper(testTemplate), "expect.n_ctx": "512", "expect.slots": "128",
		"limits.poll_ms": "10", "limits.liveness_ms": "100", "limits.retry_backoff_ms": "[]", "limits.max_turns": "1", "limits.command_timeout_ms": "1000", "limits.max_total_tokens": "5", "limits.drain_ms": "0",
		"limits.load_timeout_ms": "1000", "limits.max_frame_bytes": "65536", "limits.max_clients": "1", "limits.max_queue": "0", "exec.sandbox": "read-only", "exec.network": "true",
		"exec.writable": `["/w"]`, "exec.env_keep": `["A_TOKEN"]`, "paths.home": home, "paths.workspace": "/tmp",
	}
	env := []string{"HOME=" + home, "BELAY_BASE_URL=http://localhost", "BELAY_MODEL=m", "SOME_KEY=k"}
	var have []string
	for _, s := range mustLoad(t, env, "config").values {
		if have = append(have, s.key); s.key != "infer.api_key" && table[s.key] == "" {
			t.Errorf("%s is not in the table of the contract", s.key)
		}
	}
	for key, v := range table {
		if !slices.Contains(have, key) {
			t.Errorf("belay config does not show %s", key)
		}
		c := mustLoad(t, env, "config", "--set", key+"="+v)
		if got := originOf(c, key); !strings.HasSuffix(got, " flag") || c.sandboxFlag {
			t.Errorf("%s after --set: %s, literal sandbox %v", key, got, c.sandboxFlag)
		}
	}
	c := mustLoad(t, env, "config", "--set", "expect.template_sha256="+table["expect.template_sha256"], "--set", "infer.seed=-5", "--set", "infer.temperature=1", "--set", "limits.retry_backoff_ms=[1,2]")
	if c.expectTemplate != testTemplate || *c.seed != -5 || *c.temperature != 1 || c.topP != nil || !slices.Equal(c.backoff, []time.Duration{1e6, 2e6}) {
		t.Errorf("got %v", c.values)
	}
	for key, bad := range map[string]string{
		"infer.socket": "rel", "infer.base_url": "ftp://x", "infer.model": "''", "infer.api_key_env": "sk-secret", "infer.api_key_file": "rel", "infer.max_tokens": "0", "infer.api_key_header": "a:b", "infer.temperature": "-1", "infer.top_p": "1.1",
		"infer.seed": "1.0", "infer.reasoning_effort": "''", "infer.allow_insecure_http": "1", "infer.wait_for_server": "yes", "slots.main": "128", "slots.background": "-1", "expect.template_sha256": "abc", "expect.n_ctx": "511", "expect.slots": "0",
		"limits.poll_ms": "9", "limits.liveness_ms": "99", "limits.retry_backoff_ms": "[-1]", "limits.max_turns": "0", "limits.command_timeout_ms": "999", "limits.max_total_tokens": "-1", "limits.drain_ms": "-1", "limits.load_timeout_ms": "0",
		"limits.max_frame_bytes": "16777216", "limits.max_clients": "0", "limits.max_queue": "true", "exec.sandbox": "full", "exec.network": "on", "exec.writable": "/w", "exec.env_keep": "[1]", "paths.home": "rel", "paths.workspace": "['/']",
	} {
		wantUsage(t, env, []string{"config", "--set", key + "=" + bad}, "--set "+key+": found ", ", allowed ")
	}
}

func TestFileErrorsComeAllAtOnce(t *testing.T) {
	dir := t.TempDir()
	file := writeConfig(t, dir+"/c.toml", `infre.x = 1
[infer]
modle = "sk-very-secret"
max_tokens = "many"
api_key_env = "sk-very-secret"
socket = "/`+strings.Repeat("x", 120)+`"
base_url = "http://u:sk-very-secret@h"
[slots]
main = 200
[nonsense]
[limits]
poll_ms = 1.5
retry_backoff_ms = [1,2,3,4,5,6,7,8,9,10,11]
[exec]
sandbox = "none"
network = 0
env_keep = ["a b"]
[limits]
`, 0o644)
	_, err := loadArgs(t, nil, "exec", "--config", file, "hi")
	want := []string{
		file + ":1: infre.x: found an unknown name, allowed the keys of infer slots ",
		file + ":3: infer.modle: found an unknown name, allowed infer.socket infer.wait_for_server ",
		file + ":4: infer.max_tokens: found 4 bytes of text, allowed an integer from 1 to",
		file + ":5: infer.api_key_env: found 14 bytes of text, allowed text that matches [A-Za-z_]",
		file + ":6: infer.socket: found 121 bytes of text, allowed an absolute path of at most 107 bytes",
		file + ":7: infer.base_url: found 25 bytes of text, allowed http://",
		file + ":7: infer.base_url: found infer.socket as well, allowed one of them",
		file + ":9: slots.main: found 200, allowed an integer from 0 to 127",
		file + ":10: nonsense: found an unknown name, allowed the keys of infer slots ",
		file + ":12: limits.poll_ms: found 1.5, allowed an integer without point or exponent from 10 to 60000",
		file + ":13: limits.retry_backoff_ms: found [1,2,3,4,5,6,7,8,9,10,11], allowed a list of at most 10",
		file + `:15: exec.sandbox: found "none", allowed text that matches read-only|workspace-write|`,
		file + ":16: exec.network: found 0, allowed true or false",
		file + `:17: exec.env_keep: found ["a b"], allowed text that matches [A-Za-z_]`,
		file + ":18: found limits a second time",
	}
	lines := strings.Split(fmt.Sprint(err), "\n")
	for i, line := range lines {
		if i >= len(want) || !strings.HasPrefix(line, want[i]) {
			t.Errorf("line %d: got %q", i, line)
		}
	}
	if len(lines) != len(want) || strings.Contains(fmt.Sprint(err), "secret") {
		t.Errorf("%d lines, want %d:\n%v", len(lines), len(want), err)
	}
	both := writeConfig(t, dir+"/both.toml", "[infer]\nsocket = \"/s\"\nbase_url = \"http://localhost\"\napi_key_env = \"A\"\napi_key_file = \"/k\"\n", 0o644)
	wantUsage(t, nil, []string{"config", "--config", both}, both+":3: infer.base_url: found infer.socket as well", both+":5: infer.api_key_file: found infer.api_key_env as well")
	wantUsage(t, nil, []string{"config", "--config", both, "--base-url", "http://localhost"}, both+":3: infer.base_url: found infer.socket as well")
	wantUsage(t, nil, []string{"config", "--set", "infer.socket=/s", "--base-url", "http://localhost"}, "--base-url: found infer.socket as well")
}

func TestConfigFileIsFound(t *testing.T) {
	dir := t.TempDir()
	bad := writeConfig(t, dir+"/.belay/config.toml", "\n?", 0o644)
	wantUsage(t, []string{"HOME=" + dir}, []string{"config"}, bad+":2: found neither")
	wantUsage(t, nil, []string{"config", "--config", dir + "/none"}, "--config: open "+dir+"/none: no such file")
	wantUsage(t, nil, []string{"config", "--config", dir}, "--config: ", "is a directory")
	wantUsage(t, []string{"BELAY_CONFIG_PATH=" + dir}, []string{"config"}, "reading the configuration: ", dir+": is a directory")
	wantUsage(t, nil, []string{"config", "--config", ""}, "--config: found")
	wantUsage(t, []string{"BELAY_CONFIG_PATH=rel"}, []string{"config"}, "BELAY_CONFIG_PATH: found \"rel\", allowed an absolute path")
	wantUsage(t, []string{"BELAY_CONFIG_PATH=~/x"}, []string{"config"}, "BELAY_CONFIG_PATH: found")
	// What may be there and cannot be read may ask for a stricter sandbox.
	needNil(t, os.Symlink("loop", dir+"/loop"))
	wantUsage(t, []string{"BELAY_CONFIG_PATH=" + dir + "/loop"}, []string{"config"}, "reading the configuration: ", dir+"/loop: too many levels of symbolic links")
	mustLoad(t, []string{"BELAY_CONFIG_PATH=" + dir + "/none"}, "config")
	mustLoad(t, []string{"HOME=" + bad}, "config") // ENOTDIR: nothing is there
	if c := mustLoad(t, []string{"HOME=" + dir, "BELAY_CONFIG_PATH=" + dir + "/none"}, "config"); strings.Contains(fmt.Sprint(c.values), "file:") {
		t.Errorf("read a file: %v", c.values)
	}
	// Nothing is read for the one that must always work.
	for _, args := range [][]string{{"version"}, {"--version"}, {"exec", "--version"}} {
		if c := mustLoad(t, []string{"HOME=" + dir}, args...); c.command != "version" {
			t.Errorf("%q: %s", args, c.command)
		}
	}
}

func TestCommandLine(t *testing.T) {
	env := []string{"HOME=" + t.TempDir(), "BELAY_BASE_URL=http://localhost:1", "BELAY_MODEL=m"}
	for _, c := range []struct {
		args  []string
		check func(c *config) bool
	}{
		{[]string{"exec", "a", "b"}, func(c *config) bool { return c.prompt == "a b" && c.format == "text" && !c.auto }},
		{[]string{"exec", "a", "--auto", "-x"}, func(c *config) bool { return c.prompt == "a --auto -x" && !c.auto }},
		{[]string{"exec", "--", "--auto"}, func(c *config) bool { return c.prompt == "--auto" && !c.promptFromStdin }},
		{[]string{"exec", "-"}, func(c *config) bool { return c.promptFromStdin }},
		{[]string{"exec", "-", "x"}, func(c *config) bool { return !c.promptFromStdin && c.prompt == "- x" }},
		{[]string{"-model", "x", "exec", "-auto", "hi"}, func(c *config) bool { return c.model == "x" && c.auto }},
		{[]string{"exec", "--auto=false", "hi"}, func(c *config) bool { return !c.auto }},
		{[]string{"exec", "--json", "hi"}, func(c *config) bool { return c.format == "json" }},
		{[]string{"exec", "--json", "--output-format", "json", "hi"}, func(c *config) bool { return c.format == "json" }},
		{[]string{"exec", "--timeout", "90s", "hi"}, func(c *config) bool { return c.timeout == 90*time.Second }},
		{[]string{"exec", "-C", "/tmp/", "hi"}, func(c *config) bool { return c.workspace == "/tmp" }},
		{[]string{"exec", "-C", "~/", "hi"}, func(c *config) bool { return filepath.IsAbs(c.workspace) }},
		{[]string{"exec", "-C", "..", "hi"}, func(c *config) bool { return filepath.IsAbs(c.workspace) }},
		{[]string{"exec", "--append-system-prompt", "x", "--record", "r", "hi"}, func(c *config) bool { return c.appendPrompt == "x" && c.record == "r" }},
		{[]string{"exec", "--sandbox", "read-only", "hi"}, func(c *config) bool { return c.sandboxFlag && c.sandbox == "read-only" }},
		{[]string{"exec", "--sandbox", "read-only", "--set", "exec.sandbox=danger-full-access", "hi"}, func(c *config) bool { return !c.sandboxFlag }},
		{[]string{"--set", "exec.sandbox=danger-full-access", "exec", "hi"}, func(c *config) bool { return !c.sandboxFlag && c.sandbox == "danger-full-access" }},
		{[]string{"--set", "infer.model='a b'", "exec", "hi"}, func(c *config) bool { return c.model == "a b" }},
		{[]string{"--set", "infer.model=2.5-flash", "exec", "hi"}, func(c *config) bool { return c.model == "2.5-flash" }},
		{[]string{"--set", "infer.base_url=http://[::1]:8080", "exec", "hi"}, func(c *config) bool { return c.url == "http://[::1]:8080/v1/chat/completions" }},
		{[]string{"turn", "--session", "s", "--resume", "hi", "you"}, func(c *config) bool { return c.session == "s" && c.resume && c.prompt == "hi you" }},
		{[]string{"cancel", "--json", "s"}, func(c *config) bool { return c.args[0] == "s" && c.jsonOut }},
		{[]string{"shutdown", "--now"}, func(c *config) bool { return c.now }},
		{[]string{"services", "--json"}, func(c *config) bool { return c.jsonOut && len(c.args) == 0 }},
		{[]string{"services", "stop", "shell_1"}, func(c *config) bool { return slices.Equal(c.args, []string{"stop", "shell_1"}) }},
		{[]string{"demo", "--output-format", "stream-json"}, func(c *config) bool { return c.format == "stream-json" && c.auto && c.sandboxFlag && c.url == "" }},
		{[]string{"--verbose", "status"}, func(c *config) bool { return c.verbose && c.workspace == "" }},
	} {
		if got := mustLoad(t, env, c.args...); !c.check(got) {
			t.Errorf("%q: %q %v %v", c.args, got.prompt, got.args, got.values)
		}
	}
	for args, want := range map[string]string{
		"": `found command "", allowed exec serve`, "run x": `found command "run", allowed exec serve`, "run --help": `found command "run", allowed exec serve`, "exec": "exec: found no prompt", "exec  ": "no prompt", "turn": "turn: found no prompt",
		"exec --nope x": "--nope", "--nope exec x": "--nope: flag provided but not defined; see belay help", "exec --model": "--model: flag needs an argument", "exec --max-turns 0 x": "--max-turns: found 0, allowed an integer from 1", "exec --max-turns x y": `--max-turns: found "x", allowed an integer`,
		"exec --timeout -1s x": "--timeout: found \"-1s\", allowed a duration", "exec --timeout 5 x": "--timeout", "exec --sandbox full x": `--sandbox: found "full", allowed text that matches read-only|workspace-write|`, "exec --output-format xml x": `--output-format: found "xml", allowed text that matches text|json|stream-json`,
		"exec --json --output-format text x": "--json: found --output-format text", "exec --json --output-format stream-json x": "--json: found --output-format", "exec --record a --replay b x": "--record: found --replay", "exec --auto=maybe x": `--auto: found "maybe", allowed true or false`,
		"serve --auto": "--auto: found after serve, allowed after exec", "exec --now x": "--now: found after exec, allowed after shutdown", "exec --session s x": "--session: found after exec, allowed after turn",
		"exec --set x": "--set: found no =, allowed KEY=VALUE", "exec --set infer.nope=1 x": "infer.wait_for_server", "exec --set infer=1 x": "--set infer: found an unknown name", "exec --set infer.model=1 x": "--set infer.model: found 1, allowed", "exec --set infer.model=\"x y": "--set infer.model: found 3 bytes of text, allowed",
		"exec --set limits.max_turns=x y": `--set limits.max_turns: found "x"`, "exec --record= x": "--record: found \"\"",
		"cancel a b": `cancel: found "a b", allowed the ID`, "status x": `status: found "x", allowed nothing`, "services start x": `services: found "start x", allowed nothing or stop TASK`,
		"exec --workspace /nonexistent x": `--workspace: found "/nonexistent", allowed a directory`, "exec -C /etc/passwd x": "allowed a directory", "exec --writable / x": "exec.writable: found [\"/\"], allowed nothing that holds / or ", "exec --home /a/b --writable /a x": "exec.writable: found [\"/a\"], allowed", "exec --home /a --writable /a x": "exec.writable: found [\"/a\"],",
	} {
		wantUsage(t, env, strings.Split(args, " "), want)
	}
	for args, topic := range map[string]string{"help": "", "--help": "", "-h": "", "help exec": "exec", "--help exec": "", "help --help": "help", "exec --help": "exec", "exec -h x": "exec", "--model x serve -h": "serve"} {
		var help *helpRequest
		if _, err := loadArgs(t, env, strings.Split(args, " ")...); !errors.As(err, &help) || help.topic != topic {
			t.Errorf("%q: got %v, want help for %q", args, err, topic)
		}
	}
	wantUsage(t, env, []string{"exec", "--set", "limits.max_turns=1\nb=2", "x"}, "--set limits.max_turns: found \"1\\nb=2\", allowed an integer")
	if c := mustLoad(t, env, "exec", "--home", "/a/b", "--writable", "/a/bc", "x"); len(c.writable) != 1 {
		t.Errorf("writable %q", c.writable)
	}
}

func TestWhatEachCommandDemands(t *testing.T) {
	dir := t.TempDir()
	for _, command := range []string{"version", "config", "services", "demo", "status", "sessions", "shutdown", "cancel x", "turn x"} {
		mustLoad(t, []string{"HOME=" + dir}, strings.Split(command, " ")...)
	}
	wantUsage(t, nil, []string{"exec", "x"}, "export BELAY_BASE_URL=", "export BELAY_MODEL=", "export BELAY_API_KEY=", "no model")
	wantUsage(t, []string{"BELAY_BASE_URL=http://localhost"}, []string{"exec", "x"}, "found no model, allowed infer.model, --model or")
	if c := mustLoad(t, nil, "exec", "--replay", "f", "x"); c.home != "" || c.model != "replay" || c.url != "" {
		t.Errorf("home %q, model %q", c.home, c.model)
	}
	for _, command := range []string{"serve", "services", "status", "sessions", "shutdown"} {
		wantUsage(t, nil, []string{command}, command+" needs a home: set HOME")
		wantUsage(t, []string{"HOME=rel"}, []string{command}, command+" needs a home")
	}
	mustLoad(t, nil, "services", "--home", dir)
	mustLoad(t, []string{"BELAY_HOME=" + dir}, "services")
	wantUsage(t, []string{"HOME=" + dir}, []string{"probe"}, "found no server")
	mustLoad(t, []string{"HOME=" + dir}, "probe", "--set", "infer.socket=/s")
	wantUsage(t, []string{"HOME=" + dir}, []string{"serve"}, "found no server", "found no model", "expect: found not all of template_sha256, n_ctx and slots, which belay probe --config FILE prints")
	full := []string{"serve", "--set", "infer.socket=/s", "--set", "infer.model=m", "--set", "expect.template_sha256=" + testTemplate, "--set", "expect.n_ctx=512"}
	for slots, ok := range map[string]bool{"2 0 1": true, "2 1 0": true, "2 0 0": false, "2 2 0": false, "2 0 2": false, "1 0 0": true, "1 0 1": false} {
		n := strings.Fields(slots)
		args := append(slices.Clone(full), "--set", "expect.slots="+n[0], "--set", "slots.main="+n[1], "--set", "slots.background="+n[2])
		if _, err := loadArgs(t, []string{"HOME=" + dir}, args...); (err == nil) != ok {
			t.Errorf("slots %s: %v", slots, err)
		}
	}
	wantUsage(t, []string{"HOME=" + dir}, append(full, "--set", "expect.slots=2", "--workspace", "/nonexistent"), "allowed a directory that exists")
}

func TestURLRules(t *testing.T) {
	for in, want := range map[string]string{
		"https://h": "https://h/v1/chat/completions", " https://h/ ": "https://h/v1/chat/completions", "https://h///": "https://h/v1/chat/completions", "https://h/v1": "https://h/v1/chat/completions", "https://h/v1/": "https://h/v1/chat/completions",
		"https://h/v1/chat/completions": "https://h/v1/chat/completions", "https://h/v1/chat/completions/": "https://h/v1/chat/completions", "https://h/chat/completions": "https://h/chat/completions", "https://h/api/v3": "https://h/api/v3/chat/completions",
		"https://h/openai/deployments/d?api-version=1": "https://h/openai/deployments/d/chat/completions?api-version=1", "https://h/openai/d/chat/completions?a=/": "https://h/openai/d/chat/completions?a=/", "https://h?a=b": "https://h/v1/chat/completions?a=b",
		"HTTPS://Host.Example:443/V1": "https://host.example/V1/chat/completions", "http://127.0.0.1:80": "http://127.0.0.1/v1/chat/completions", "https://h:80": "https://h:80/v1/chat/completions", "https://h/a%2Fb": "https://h/a%2Fb/chat/completions", "https://h/a//b": "https://h/a//b/chat/completions",
		"http://[::1]:8080": "http://[::1]:8080/v1/chat/completions", "unix:/s.sock": "unix:/s.sock", "unix:///s.sock": "unix:/s.sock",
		"": "", "h": "", "h:8080": "", "localhost:8080/v1": "", "/v1": "", "//h": "", "ftp://h": "", "http://": "", "http:///v1": "", "http:h": "", "https://u@h": "", "https://u:p@h": "", "https://h#f": "", "http://h:x": "", "http://h:0": "", "http://h:65536": "", "http://h:80808080808080808080": "", "http://h:65535": "http://h:65535/v1/chat/completions", "http://h:/": "http://h:/v1/chat/completions", "http://h h": "", "http://[fe80::1%25eth0]": "", "http://h/%zz": "",
	} {
		got := endpoint(in)
		if got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
		if again := endpoint(got); got != "" && again != got {
			t.Errorf("%q: twice gives %q", in, again)
		}
	}
	for host, good := range map[string]bool{
		"localhost": true, "LOCALHOST": true, "127.0.0.1": true, "127.9.9.9": true, "[::1]": true, "127.0.0.1.evil.example": false, "localhost.evil.example": false, "127.1": false, "0.0.0.0": false, "[::]": false, "10.0.0.1": false, "h": false, "128.0.0.1": false, "localhost.": false,
	} {
		_, err := loadArgs(t, nil, "--model=m", "--base-url", "http://"+host+":8080", "exec", "x")
		if (err == nil) != good {
			t.Errorf("plain http to %s: %v", host, err)
		}
		mustLoad(t, nil, "--model=m", "--base-url", "https://"+host, "exec", "x")
		mustLoad(t, []string{"BELAY_ALLOW_INSECURE_HTTP=true"}, "--model=m", "--base-url", "http://"+host, "exec", "x")
	}
	long := "/" + strings.Repeat("s", 106)
	if c := mustLoad(t, []string{"BELAY_MODEL=m"}, "--base-url", "unix:"+long, "exec", "x"); c.socket != long {
		t.Errorf("socket %q", c.socket)
	}
	wantUsage(t, []string{"BELAY_MODEL=m"}, []string{"--base-url", "unix:" + long + "s", "exec", "x"}, "--base-url: found 113 bytes of text, allowed http:// or", "of at most 112 bytes")
	wantUsage(t, []string{"BELAY_MODEL=m"}, []string{"--base-url", "unix:rel", "exec", "x"}, "--base-url: found")
}

func TestKeyRules(t *testing.T) {
	const deepseek, openai = "https://api.deepseek.com", "https://api.openai.com"
	dir := t.TempDir()
	keyFile := writeConfig(t, dir+"/key", " from-file \r\nsecond\n", 0o600)
	for _, c := range []struct {
		name, url, env, set string
		key, note           string
	}{
		{"none", "https://h", "", "", "", ""},
		{"own general key", "https://h", "BELAY_API_KEY=b", "", "b", ""},
		{"codewhale", "https://h", "CODEWHALE_API_KEY=c", "", "c", ""},
		{"order", "https://h", "BELAY_API_KEY= ;CODEWHALE_API_KEY=c;OPENAI_API_KEY=o", "", "c", ""},
		{"vendor at home", openai, "OPENAI_API_KEY=o", "", "o", ""},
		{"vendor at home, written out", openai + ":443/v1/chat/completions", "OPENAI_API_KEY=o", "", "o", ""},
		{"vendor elsewhere", "https://h:9", "OPENAI_API_KEY=o", "", "", "OPENAI_API_KEY not sent to h: it belongs to api.openai.com or OPENAI_BASE_URL; set BELAY_API_KEY to send it"},
		{"vendor with its base url", "https://h/v1/", "OPENAI_API_KEY=o;OPENAI_BASE_URL=https://H", "", "o", ""},
		{"vendor with another base url", "https://h/v2", "OPENAI_API_KEY=o;OPENAI_BASE_URL=https://h", "", "", "OPENAI_API_KEY not sent to h"},
		{"other vendor's base url", "https://h", "OPENAI_API_KEY=o;DEEPSEEK_BASE_URL=https://h", "", "", "OPENAI_API_KEY not sent"},
		{"second vendor fits", openai, "DEEPSEEK_API_KEY=d;OPENAI_API_KEY=o", "", "o", ""},
		{"first note only", "https://h", "DEEPSEEK_API_KEY=d;OPENAI_API_KEY=o", "", "", "DEEPSEEK_API_KEY not sent to h: it belongs to api.deepseek.com or DEEPSEEK_BASE_URL"},
		{"lookalike", "https://api.openai.com.evil.example", "OPENAI_API_KEY=o", "", "", "OPENAI_API_KEY not sent to api.openai.com.evil.example"},
		{"vendor over plain http", "http://api.openai.com", "OPENAI_API_KEY=o;BELAY_ALLOW_INSECURE_HTTP=true", "", "", "OPENAI_API_KEY not sent"},
		{"socket", "unix:/s", "DEEPSEEK_API_KEY=d", "", "", "DEEPSEEK_API_KEY not sent to /s"},
		{"socket like a broken escape", "unix:/a%zz", "OPENAI_API_KEY=o", "", "", "OPENAI_API_KEY not sent to /a%zz"},
		{"socket beside", "unix:/s", "DEEPSEEK_API_KEY=d;DEEPSEEK_BASE_URL=unix:///s", "", "d", ""},
		{"binding", "https://h", "MY=m", "infer.api_key_env=MY", "m", ""},
		{"binding of a vendor's name", "https://h", "OPENAI_API_KEY=o", "infer.api_key_env=OPENAI_API_KEY", "o", ""},
		{"binding as a flag wins", "https://h", "MY=m;BELAY_API_KEY=b", "infer.api_key_env=MY", "m", ""},
		{"file", "https://h", "", "infer.api_key_file=" + keyFile, "from-file", ""},
	} {
		args := []string{"--model=m", "--base-url", c.url, "--set", cmp.Or(c.set, "slots.main=0"), "exec", "x"}
		got := mustLoad(t, strings.Split("HOME="+dir+";"+c.env, ";"), args...)
		if got.key.reveal() != c.key || !strings.HasPrefix(got.keyNote, c.note) || (c.note == "") != (got.keyNote == "") {
			t.Errorf("%s: got key %q, note %q", c.name, got.key.reveal(), got.keyNote)
		}
		bound, isName := strings.CutPrefix(c.set, "infer.api_key_env=")
		bound = keep(bound, isName)
		for _, name := range strings.Fields("BELAY_API_KEY CODEWHALE_MODEL OPENAI_BASE_URL DEEPSEEK_API_KEY BELAY_HOME BELAY_CONFIG_PATH BELAY_SANDBOX BELAY_NETWORK BELAY_ALLOW_INSECURE_HTTP NOTIFY_SOCKET " + bound) {
			if !slices.Contains(got.keyNames, name) {
				t.Errorf("%s is not scrubbed", name)
			}
		}
	}
	// Below the environment when the file names it, and no URL means the vendor's own.
	writeConfig(t, dir+"/.belay/config.toml", "[infer]\nmodel = \"m\"\napi_key_env = \"MY\"\n", 0o600)
	for env, want := range map[string]string{
		"MY=m;OPENAI_API_KEY=o": "o " + openai, "MY=m;DEEPSEEK_API_KEY=d;OPENAI_API_KEY=o": "d " + deepseek, "MY=m;BELAY_API_KEY=b;OPENAI_API_KEY=o": "b " + openai, "MY=m;OPENAI_API_KEY=o;BELAY_BASE_URL=https://h": "m https://h",
	} {
		c := mustLoad(t, strings.Split("HOME="+dir+";"+env, ";"), "exec", "x")
		if got := c.key.reveal() + " " + strings.TrimSuffix(c.url, "/v1/chat/completions"); got != want {
			t.Errorf("%s: got %s, want %s", env, got, want)
		}
	}
	exec := func(set string) []string {
		return []string{"exec", "--base-url=https://h", "--model=m", "--set", set, "x"}
	}
	wantUsage(t, nil, exec("infer.api_key_env=NOT_SET"), "infer.api_key_env: found no key there, allowed one line")
	wantUsage(t, nil, exec("infer.api_key_file="+dir+"/none"), "infer.api_key_file: ", "no such file")
	wantUsage(t, nil, exec("infer.api_key_file="+writeConfig(t, dir+"/empty", "\nk\n", 0o600)), "infer.api_key_file: found no key there, allowed one line")
	for _, mode := range []os.FileMode{0o640, 0o604, 0o610, 0o601, 0o620, 0o602} {
		wantUsage(t, nil, exec("infer.api_key_file="+writeConfig(t, dir+"/open", "sk-secret", mode)), "found rights of group or others, allowed mode 0600")
	}
	for _, env := range []string{"BELAY_API_KEY=sk-\x01secret", "BELAY_API_KEY=sk\r\nsecret: x", "BELAY_API_KEY=sk\x7fsecret"} {
		_, err := loadArgs(t, []string{env}, exec("slots.main=0")...)
		if err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "BELAY_API_KEY: found no key there, allowed one line") {
			t.Errorf("%q: %v", env, err)
		}
	}
}

func TestSecretNeverPrints(t *testing.T) {
	plain := "sk-very-secret"
	key := secret{&plain}
	c := &config{command: "exec", key: key}
	nested := struct {
		S secret
		P *secret
		L []secret
		M map[secret]secret
	}{key, new(secret), []secret{key}, map[secret]secret{key: key}}
	*nested.P = key
	for verb := range 128 {
		if verb == 'p' || verb == 'w' {
			continue // these ask no method of a text; go vet refuses both
		}
		for _, flags := range []string{"", "+", "#", "-10", " ", "010.3"} {
			format := "%" + flags + string(rune(verb))
			for _, v := range []any{key, &nested, nested, []any{key}, c, *c} {
				s := strings.ToLower(fmt.Sprintf(format, v))
				for _, leak := range []string{"very", "766572", "76 65 72", "zxj5"} { // as text, hex and base64
					if strings.Contains(s, leak) {
						t.Fatalf("%s of %T prints %s", format, v, s)
					}
				}
			}
		}
	}
	for _, s := range []string{fmt.Sprint(key), key.String(), fmt.Sprintln(key), fmt.Errorf("x: %v", key).Error()} {
		if !strings.Contains(s, "[redacted]") {
			t.Errorf("got %s", s)
		}
	}
	data, err := json.Marshal([]any{key, secret{}, &nested.S, nested.L, c})
	if want := `[{},{},{},[{}],{}]`; err != nil || string(data) != want {
		t.Errorf("got %s, %v, want %s", data, err, want)
	}
	if key.reveal() != "sk-very-secret" {
		t.Error("the key is lost")
	}
	got := mustLoad(t, []string{"BELAY_API_KEY=sk-very-secret", "BELAY_BASE_URL=https://h?key=sk-very-secret", "BELAY_MODEL=m"}, "config")
	if s := fmt.Sprint(got.values); strings.Contains(s, "very") || !strings.Contains(s, `"https://h?[redacted]"`) || originOf(got, "infer.api_key") != "[redacted] env BELAY_API_KEY" {
		t.Errorf("belay config shows %s", s)
	}
}

// A variable that some source names as the key's place is a key, also where another key is in force.
func TestEveryVariableBoundToAKeyIsScrubbed(t *testing.T) {
	dir := t.TempDir()
	writeConfig(t, dir+"/.belay/config.toml", "[infer]\napi_key_env = \"LLM_CRED\"\n", 0o600)
	env := []string{"HOME=" + dir, "BELAY_BASE_URL=https://h", "BELAY_MODEL=m", "LLM_CRED=c", "OTHER=o"}
	for key, c := range map[string]*config{
		"c": mustLoad(t, env, "exec", "x"), "b": mustLoad(t, append(env, "BELAY_API_KEY=b"), "exec", "x"), "o": mustLoad(t, env, "exec", "--set", "infer.api_key_env=OTHER", "x"),
	} {
		if !slices.Contains(c.keyNames, "LLM_CRED") || c.key.reveal() != key {
			t.Errorf("key %q, scrubbed %q, want %q and LLM_CRED", c.key.reveal(), c.keyNames, key)
		}
	}
}

// A recording that was made with a key and a far server is replayed without either.
func TestReplayNeedsNoKey(t *testing.T) {
	for _, set := range []string{"infer.api_key_env=NOT_SET", "infer.api_key_file=/nonexistent", "infer.base_url=http://far"} {
		mustLoad(t, nil, "exec", "--set", set, "--replay", "f", "x")
	}
	c := mustLoad(t, []string{"OPENAI_API_KEY=o", "BELAY_BASE_URL=https://h"}, "exec", "--replay", "f", "x")
	if c.key.reveal() != "" || c.keyNote != "" || c.url != "https://h/v1/chat/completions" {
		t.Errorf("key %q, note %q, URL %q", c.key.reveal(), c.keyNote, c.url)
	}
}

// What a message has to say beside the bare fact, and what it must not repeat.
func TestUsageErrorsHelp(t *testing.T) {
	dir := t.TempDir()
	keyFile := writeConfig(t, dir+"/key", "k", 0o600)
	for args, want := range map[string]string{
		"--set sk-secret exec x":                      "--set: found no =, allowed KEY=VALUE",
		"--set infer.model exec x":                    "--set: found no =, allowed KEY=VALUE",
		"--set limits.max_turns=2.0 exec x":           "found 2, allowed an integer without point or exponent from 1 to 2147483647",
		"exec --max-turns 1e3 x":                      "found 1000, allowed an integer without point or exponent from 1",
		"--set infer.seed=9223372036854775808 exec x": "allowed an integer from -9223372036854775808 to 9223372036854775807",
		"--set slots.mian=1 exec x":                   "--set slots.mian: found an unknown name, allowed slots.main slots.background",
		"--auto exec x":                               "--auto: found before the command, allowed after exec",
		"--timeout 10m exec x":                        "--timeout: found before the command, allowed after exec",
		"demo --auto":                                 "--auto: found after demo, allowed after exec",
		"config --json":                               "--json: found after config, allowed after exec demo turn",
		"cancel":                                      `cancel: found "", allowed the ID of a session`,
		"help nope":                                   `help: found "nope", allowed nothing or one of exec serve`,
		"services stop":                               `services: found "stop", allowed nothing or stop TASK`,
		"exec -C /nonexistent --model=m --base-url=https://h x": `--C: found "/nonexistent", allowed a directory that exists`,
		"--set max_turns=1 exec x":                              "--set max_turns: found an unknown name, allowed limits.max_turns",
		"--set nope.nope=1 exec x":                              "allowed the keys of infer slots expect limits exec paths, which belay config lists",
		"--set \xff.x=1 exec x":                                 "allowed the keys of infer slots expect limits exec paths, which belay config lists",
		"--set =1 exec x":                                       "allowed the keys of infer slots expect limits exec paths, which belay config lists",
		"exec --model=m --base-url=http://h x":                  "--base-url: found plain http to h, allowed https",
		"exec --model=m --base-url=https://h --set infer.api_key_file=" + keyFile + "/x x": "not a directory",
		"exec --model=m --base-url=https://h --set infer.api_key_file=" + dir + " x":       "is a directory",
	} {
		wantUsage(t, nil, strings.Fields(args), want)
		if _, err := loadArgs(t, nil, strings.Fields(args)...); strings.Contains(fmt.Sprint(err), "secret") || strings.Contains(args, "slots") && strings.Contains(fmt.Sprint(err), "limits") {
			t.Errorf("%s: %v", args, err)
		}
	}
	tables := ""
	for _, f := range (&loader{config: &config{}}).schema() {
		if table, _, _ := strings.Cut(f.key, "."); !in(tables, table) {
			tables += " " + table
		}
	}
	wantUsage(t, nil, []string{"--set", "nope=1", "exec", "x"}, "allowed the keys of"+strings.TrimRight(tables, " ")+", which")
	wantUsage(t, []string{"BELAY_HOME=rel"}, []string{"status"}, "set HOME or BELAY_HOME to an absolute path")
	if _, err := readTOML([]byte("[a.b]")); !strings.Contains(fmt.Sprint(err), "tables of one level") {
		t.Error(err)
	}
}

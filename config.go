//go:build linux

package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// config.go turns argv, the environment and one file into a config that is never written again.
// It owns the precedence of settings, the schema, the TOML subset, the rules for URLs and the
// choice of the key. It never opens anything but the config file and the key file, and never
// prints a secret: text of the infer table is described by its length in errors, because that is
// where keys get pasted.
//
// Precedence, highest first. One source gives the whole value of a setting; lists are not
// merged.
//
//	               exec demo config services          serve probe turn status sessions cancel shutdown
//	1 flag         --model and the like, --set        the same
//	2 environment  the env column of schema           not read
//	3 file         --config, else BELAY_CONFIG_PATH,  --config, else <home>/config.toml
//	               else <home>/config.toml
//	4              -                                  BELAY_HOME, for paths.home
//	5 default      the def column, and settle         the same
//
// The home that holds the file is found before the file is read: --home, else BELAY_HOME, else
// ~/.belay; paths.home of the file then moves everything but the file. Keys follow their own
// rules, see findKey. infer.socket and infer.base_url are one setting, and so are
// infer.api_key_env and infer.api_key_file: the highest source that names either wins, both in
// one source is an error.

// Sets of names, blank-separated; see in. A set that one place alone uses stands there.
const (
	// help and version read no file and no environment, so that they work when everything else is
	// broken.
	allCommands = "exec serve turn status sessions cancel shutdown services probe config demo version help"
	envCommands = "exec demo config services" // the environment gives settings
	modes       = "read-only workspace-write external-sandbox danger-full-access"
	tables      = "infer slots expect limits exec paths" // of the configuration file
	formats     = "text json stream-json"
	// The first one that is set and not blank counts. The names of three other programs are there
	// so that an image or a CI job that was set up for one of them runs belay unchanged.
	modelVars = "BELAY_MODEL CODEWHALE_MODEL DEEPSEEK_MODEL OPENAI_MODEL"
	urlVars   = "BELAY_BASE_URL CODEWHALE_BASE_URL DEEPSEEK_BASE_URL OPENAI_BASE_URL"
	keyVars   = "BELAY_API_KEY CODEWHALE_API_KEY DEEPSEEK_API_KEY OPENAI_API_KEY"
)

const (
	maxSocketPath = 107 // bytes: sun_path of unix(7) is 108 with its NUL
	maxModelName  = 200 // bytes of a text that goes to a server: no name is longer, a pasted file is
	maxShown      = 64  // bytes of a refused value that an error repeats
	maxResends    = 10  // more waiting is better left to the CI system
	maxList       = 100 // directories or names: more is a mistake, and Landlock takes an open file for each
	maxNested     = 8   // arrays in arrays: the schema needs one; bounds the recursion
	minute        = 60_000
	hour          = 60 * minute // milliseconds, as minute

	// bareKey is what TOML 1.0 allows in a key without quotes.
	bareKey = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
)

// secret is a key. It is compared with "" and converted like a string, and nothing else.
// Printing shows only whether it is set; a grep for reveal lists every use. The verbs %p and %w
// of a text ask no method: go vet refuses both.
type secret string

func (s secret) reveal() string               { return string(s) }
func (s secret) String() string               { return cmp.Or(keep("[unset]", s == ""), "[redacted]") }
func (s secret) GoString() string             { return s.String() }
func (s secret) Format(f fmt.State, _ rune)   { _, _ = io.WriteString(f, s.String()) }
func (s secret) MarshalJSON() ([]byte, error) { return []byte(strconv.Quote(s.String())), nil }

// usageError is a mistake of the caller: exit 2. The message has one problem a line.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

// helpRequest asks for the usage text of one command, "" = of the program.
type helpRequest struct{ topic string }

func (e *helpRequest) Error() string { return "help " + e.topic }

// setting is one line of `belay config`. origin: flag, env NAME, file:LINE or default.
type setting struct{ key, value, origin string }

// config is set once, by loadConfig, and only read from then on; everybody may read it without a
// lock. A field has a value of its schema row's range whatever the command, or its zero where
// the row has no default.
type config struct {
	// program is the base name of argv[0]; command one word of allCommands; args its operands.
	program, command string
	args             []string
	// Absolute and clean. workspace: "" = none (only serve and its clients). home: "" only where
	// the command does without. file: the configuration that was read, "" = none. socket: "" =
	// TCP.
	workspace, home, file, socket string
	// sandboxFlag: sandbox is what --sandbox said, literally; persist depends on it.
	auto, sandboxFlag, network, noProjectConfig, verbose, jsonOut  bool
	resume, now, promptFromStdin, waitForServer, allowHTTP         bool
	sandbox, format, prompt, appendPrompt, session, record, replay string
	writable, envKeep                                              []string
	// maxTokens: of one answer, 0 = not sent. maxTotalTokens: of a run, 0 = no cap. maxFrame:
	// bytes.
	maxTurns, maxTokens, maxFrame, maxClients, maxQueue int
	maxTotalTokens                                      int64
	// timeout: of the whole run, 0 = none.
	timeout, poll, liveness, commandTimeout, drain, loadTimeout time.Duration
	backoff                                                     []time.Duration
	// baseURL is as given, "" = socket; url is what is asked, with chat/completions and query.
	baseURL, url, model, keyHeader, reasoningEffort, keyEnv, keyFile string
	// key goes to url, whatever it is. keyNote says why one that is there is not sent, "" =
	// nothing to say.
	key     secret
	keyNote string
	// nil = not sent.
	temperature, topP *float64
	seed              *int64
	// What serve demands of the server. expectTemplate is a SHA-256 in lower-case hex, expectCtx
	// is in tokens a slot.
	expectTemplate                                   string
	expectCtx, expectSlots, slotMain, slotBackground int
	// keyNames are the environment names that no child may see: all that this file reads (with
	// HOME excepted), NOTIFY_SOCKET, through which a child could declare us ready, and the one in
	// infer.api_key_env.
	keyNames []string
	values   []setting
}

// Format keeps a config out of messages: fmt prints unexported fields without asking their
// methods, so %v of the struct would show the key.
func (c config) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "config of "+c.command) }

// field is one row of the schema, with the value in force. A row without a key is a flag alone:
// it has no other source, and its set is called while the command line is read. def also tells
// the type that the text of a flag or variable is to have: a bool makes the flag a switch, see
// typed.
type field struct {
	key, flag, on string           // flag: names, blank-separated; on: commands that know it, "" = all
	env           string           // variables, blank-separated, the first one set counts
	set           func(any) string // stores a value, or says what is allowed instead
	def, value    any              // default and what is in force, as TOML gives it; nil or "" = unset
	given         []any            // items of a list that came as flags
	twin, origin  string           // twin: the other name of the same setting
}

// loader is the state of one loadConfig. It collects problems instead of ending at the first,
// because a user who mends a configuration in CI pays minutes for each run.
type loader struct {
	*config
	environ                        map[string]string // trimmed; blank values left out: blank means unset
	cwd, userHome, conf, keyOrigin string            // userHome: "" = HOME unset or not absolute; conf: --config
	version                        bool
	fields                         []field
	rows                           map[string]*field // fields by key
	flags                          []func()          // apply the settings that were given as flags, in order
	problems                       []string
}

// loadConfig is the only maker of a config. args is os.Args, env os.Environ(), cwd absolute:
// relative paths of flags start there, while the paths of files and variables have to be
// absolute, since nobody knows from where a service manager starts us. It reads at most two
// files, changes nothing, and may be called again. Errors are *usageError with everything that
// was found wrong, or *helpRequest; the config is then nil.
func loadConfig(args, env []string, cwd string) (*config, error) {
	l := &loader{config: &config{program: "belay"}, environ: map[string]string{}, rows: map[string]*field{}, cwd: cwd}
	if len(args) > 0 {
		l.program, args = filepath.Base(args[0]), args[1:]
	}
	// Blanks around a value are never meant: they come from files with one NAME=VALUE a line and
	// from secrets that end in a line end.
	for _, kv := range env {
		if name, value, _ := strings.Cut(kv, "="); strings.TrimSpace(value) != "" {
			l.environ[name] = strings.TrimSpace(value)
		}
	}
	// A relative HOME would put the journal and the services of a run wherever it was started.
	if filepath.IsAbs(l.environ["HOME"]) {
		l.userHome = l.environ["HOME"]
	}
	l.fields = l.schema()
	for i := range l.fields {
		l.rows[l.fields[i].key] = &l.fields[i]
	}
	delete(l.rows, "") // flags alone
	if err := l.parse(args); err != nil {
		return nil, err
	}
	if len(l.problems) == 0 && l.command != "version" {
		l.settle()
	}
	if len(l.problems) > 0 {
		return nil, &usageError{strings.Join(l.problems, "\n")}
	}
	return l.config, nil
}

// schema is every key and every flag, in the order in which `belay config` shows them. The unit
// is in the name of a key, so no value needs a suffix: _ms are milliseconds, _bytes are bytes. A
// value is checked against its row whatever its source, defaults included. Where no reason
// stands beside a bound it keeps typing errors out and is far from any value that makes sense.
func (l *loader) schema() []field {
	const aPath, aWord, aVar = "an absolute path, or ~/ with HOME set", "1 to 200 bytes of printable text", "the name of a variable"
	const ms, maxInt = time.Millisecond, 1<<31 - 1
	file := func(p *string) func(any) string { return textKey(p, l.path, aPath) }
	name := func(p *string) func(any) string { return textKey(p, variable, aVar) }
	wait := func(p *time.Duration) func(any) string { return numberKey(p, ms, 0, 10*minute) }
	word := func(p *string, set string) func(any) string {
		return textKey(p, func(s string) string { return keep(s, in(set, s)) }, "one of "+set)
	}
	free := func(p *string) func(any) string { return textKey(p, strings.Clone, "a text that is not empty") }
	return []field{
		{key: "infer.socket", set: textKey(&l.socket, l.socketPath, "an absolute path of at most 107 bytes"), twin: "infer.base_url"},
		{key: "infer.base_url", flag: "base-url", env: urlVars, set: textKey(&l.baseURL, serverURL, "http:// or https:// with a host and no user name, or unix:/PATH"), twin: "infer.socket"},
		{key: "infer.model", flag: "model", env: modelVars, set: textKey(&l.model, printable, aWord)},
		{key: "infer.api_key_env", set: textKey(&l.keyEnv, variable, aVar+", never the key itself"), twin: "infer.api_key_file"},
		{key: "infer.api_key_file", set: file(&l.keyFile), twin: "infer.api_key_env"},
		{key: "infer.api_key_header", set: textKey(&l.keyHeader, headerName, "a header name of letters, digits, _ and -")},
		{key: "infer.max_tokens", set: numberKey(&l.maxTokens, 1, 1, maxInt)},
		{key: "infer.temperature", set: decimalKey(&l.temperature, 100)}, // vendors stop at 2, local servers do not
		{key: "infer.top_p", set: decimalKey(&l.topP, 1)},
		{key: "infer.seed", set: func(v any) string { l.seed = new(int64); return numberKey(l.seed, 1, -1<<63, 1<<63-1)(v) }},
		{key: "infer.reasoning_effort", set: textKey(&l.reasoningEffort, printable, aWord)},
		{key: "infer.allow_insecure_http", env: "BELAY_ALLOW_INSECURE_HTTP", set: toggleKey(&l.allowHTTP), def: false},
		{key: "infer.wait_for_server", set: toggleKey(&l.waitForServer), def: false},
		{key: "slots.main", set: numberKey(&l.slotMain, 1, 0, 127), def: int64(0)},
		{key: "slots.background", set: numberKey(&l.slotBackground, 1, 0, 127), def: int64(1)},
		{key: "expect.template_sha256", set: textKey(&l.expectTemplate, sha256Hex, "64 hex digits")},
		{key: "expect.n_ctx", set: numberKey(&l.expectCtx, 1, 512, 16_777_216)},
		{key: "expect.slots", set: numberKey(&l.expectSlots, 1, 1, 128)},
		{key: "limits.poll_ms", set: numberKey(&l.poll, ms, 10, minute), def: int64(1000)},
		{key: "limits.liveness_ms", set: numberKey(&l.liveness, ms, 100, hour), def: int64(5 * minute)}, // a long prompt is silent for minutes
		{key: "limits.retry_backoff_ms", set: listKey(&l.backoff, maxResends, wait), def: []any{int64(500), int64(2000), int64(8000), int64(20_000)}},
		{key: "limits.max_turns", flag: "max-turns", on: "exec", set: numberKey(&l.maxTurns, 1, 1, maxInt), def: int64(200)},
		{key: "limits.command_timeout_ms", set: numberKey(&l.commandTimeout, ms, 1000, 10*minute), def: int64(2 * minute)}, // the Bash tool's clamp
		{key: "limits.max_total_tokens", set: numberKey(&l.maxTotalTokens, 1, 0, 1<<63-1), def: int64(0)},
		{key: "limits.drain_ms", set: numberKey(&l.drain, ms, 0, hour), def: int64(minute / 2)},
		{key: "limits.load_timeout_ms", set: numberKey(&l.loadTimeout, ms, 1000, 24*hour), def: int64(10 * minute)}, // weights from a slow disk
		{key: "limits.max_frame_bytes", set: numberKey(&l.maxFrame, 1, 64<<10, 15<<20), def: int64(8 << 20)},        // first byte of the length is 0
		{key: "limits.max_clients", set: numberKey(&l.maxClients, 1, 1, 1024), def: int64(64)},                      // 4 MiB of queue each
		{key: "limits.max_queue", set: numberKey(&l.maxQueue, 1, 0, 1024), def: int64(16)},
		{key: "exec.sandbox", flag: "sandbox", on: "exec", env: "BELAY_SANDBOX", set: word(&l.sandbox, modes), def: "workspace-write"},
		{key: "exec.network", flag: "network", on: "exec", env: "BELAY_NETWORK", set: toggleKey(&l.network), def: false},
		{key: "exec.writable", flag: "writable", on: "exec", set: listKey(&l.writable, maxList, file), def: []any{}},
		{key: "exec.env_keep", set: listKey(&l.envKeep, maxList, name), def: []any{}},
		{key: "paths.home", flag: "home", env: "BELAY_HOME", set: file(&l.home), def: l.path("~/.belay")},
		{key: "paths.workspace", flag: "workspace C", set: file(&l.workspace)},
		{flag: "config", set: file(&l.conf)}, {flag: "set", set: l.assign},
		{flag: "no-project-config", set: toggleKey(&l.noProjectConfig), def: false},
		{flag: "verbose", set: toggleKey(&l.verbose), def: false}, {flag: "version", set: toggleKey(&l.version), def: false},
		{flag: "auto", on: "exec", set: toggleKey(&l.auto), def: false}, {flag: "timeout", on: "exec", set: l.setTimeout},
		{flag: "output-format", on: "exec demo", set: word(&l.format, formats)},
		{flag: "json", on: "exec demo turn status sessions cancel shutdown services", set: toggleKey(&l.jsonOut), def: false},
		{flag: "append-system-prompt", on: "exec", set: free(&l.appendPrompt)},
		{flag: "record", on: "exec", set: free(&l.record)}, {flag: "replay", on: "exec", set: free(&l.replay)},
		{flag: "session", on: "turn", set: free(&l.session)}, {flag: "resume", on: "turn", set: toggleKey(&l.resume), def: false},
		{flag: "now", on: "shutdown", set: toggleKey(&l.now), def: false},
	}
}

// text, toggle, number, decimal and list make the set column of the schema: each stores at p and
// returns "", or returns what is allowed, in words that end an error; what is at p then no
// longer matters. The types are those of TOML and are not converted: "5" is no number and 1 is
// no truth. check returns a text as it is kept, "" = refused; so no setting can be an empty
// text, which is what unset looks like.
func textKey(p *string, check func(string) string, allowed string) func(any) string {
	return func(v any) string { s, _ := v.(string); *p = check(s); return keep(allowed, *p == "") }
}

func toggleKey(p *bool) func(any) string {
	return func(v any) string { b, ok := v.(bool); *p = b; return keep("true or false", !ok) }
}

// number counts in unit, which is 1 or, for durations, a millisecond. lo and hi are inclusive
// and leave room for the product: a day of nanoseconds is far below 63 bits.
func numberKey[T ~int | ~int64](p *T, unit T, lo, hi int64) func(any) string {
	return func(v any) string {
		n, ok := v.(int64)
		*p = T(n) * unit
		return keep(fmt.Sprintf("an integer from %d to %d", lo, hi), !ok || n < lo || n > hi)
	}
}

// decimal takes integers too; all its settings start at 0.
func decimalKey(p **float64, hi float64) func(any) string {
	return func(v any) string {
		x, ok := v.(float64)
		if n, isInt := v.(int64); isInt {
			x, ok = float64(n), true
		}
		*p = &x
		return keep(fmt.Sprintf("a number from 0 to %v", hi), !ok || x < 0 || x > hi)
	}
}

// list sets up each item as item would set up a single value. An empty list is a value, not
// unset.
func listKey[T any](p *[]T, most int, item func(*T) func(any) string) func(any) string {
	return func(v any) string {
		items, ok := v.([]any)
		*p = make([]T, len(items))
		for i := range items {
			if allowed := item(&(*p)[i])(items[i]); allowed != "" {
				return "a list, each " + allowed
			}
		}
		return keep(fmt.Sprintf("a list of at most %d", most), !ok || len(items) > most)
	}
}

// parse reads the command line with package flag, which takes -x and --x alike and ends at -- or
// at the first word that is no flag. It is run twice: up to the command, and behind it. Flags
// may stand on both sides of the command, and after it before its first operand: from the first
// word of a prompt on everything is prompt.
func (l *loader) parse(args []string) error {
	fs := flag.NewFlagSet(l.program, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	for i := range l.fields {
		for _, name := range strings.Fields(l.fields[i].flag) {
			add := fs.Func
			if _, isSwitch := l.fields[i].def.(bool); isSwitch {
				add = fs.BoolFunc
			}
			add(name, "", func(s string) error { l.take(&l.fields[i], name, s); return nil })
		}
	}
	// The second run sets l.command first, since the flags behind it are checked against it.
	err := fs.Parse(args)
	if err == nil && fs.NArg() > 0 {
		l.command = fs.Arg(0)
		err = fs.Parse(fs.Args()[1:])
	}
	if l.args = fs.Args(); errors.Is(err, flag.ErrHelp) {
		return &helpRequest{l.command}
	} else if err != nil {
		// Only misspelt and unfinished flags come here, since take never fails; no value is in the
		// text.
		l.demand(false, "%s", strings.Replace(err.Error(), " -", " --", 1))
		return nil
	}
	return l.operands()
}

// take is called by package flag for each flag, in the order given. It reports by itself what is
// wrong, for the errors of package flag repeat values. A flag of exec before the command is
// refused too: the command that it belongs to is not known yet, and a list of exceptions would
// be longer than the error. Settings wait in l.flags for their turn in settle. A relative path
// is meant from the current directory; a shell leaves the ~ of --home=~/x alone.
func (l *loader) take(f *field, name, s string) {
	if in("home workspace C writable config", name) && s != "" && !strings.HasPrefix(s, "~/") && !filepath.IsAbs(s) {
		s = filepath.Join(l.cwd, s)
	}
	switch v := f.typed(s); {
	case f.on != "" && !in(f.on, l.command):
		l.demand(false, "--%s belongs after the command %s", name, strings.ReplaceAll(f.on, " ", " or "))
	case f.key != "":
		// Applied later, since file and environment come first and the command's defaults are not
		// known yet.
		l.flags = append(l.flags, func() { l.apply(f.key, v, "flag", "--"+name) })
	default:
		allowed := f.set(v)
		l.demand(allowed == "", "--%s: found %s, allowed %s", name, shown(v, maxShown), allowed)
	}
}

// typed gives the text of a flag or variable the type of its setting, as far as it has the form;
// set then says what is wrong with the rest. A list takes one item a flag, so each further
// --writable gives a longer list.
func (f *field) typed(s string) any {
	switch f.def.(type) {
	case bool, int64:
		return literal(s)
	case []any:
		f.given = append(f.given, s)
		return f.given
	}
	return s
}

// literal reads a TOML value, or a bare word: what is no value and does not begin like a text or
// a list. So qwen-2.5 needs no quotes, which a shell would take away anyway, and "qwen with one
// quote is not taken for a name. nil = it is neither.
func literal(s string) any {
	m, err := parseTOML([]byte("v = " + s))
	if err != nil && strings.TrimLeft(s, "\"'[") == s {
		return s
	}
	if len(m) > 1 { // a line end in s smuggles in a second key
		return nil
	}
	return m["v"]
}

// assign takes one --set. What it was given is not repeated, it may hold a secret.
func (l *loader) assign(v any) string {
	key, word, ok := strings.Cut(fmt.Sprint(v), "=")
	value := literal(word)
	l.demand(ok && value != nil, "--set: found another form, allowed KEY=VALUE with VALUE as in TOML or a bare word")
	l.flags = append(l.flags, func() { l.apply(key, value, "flag", "--set "+key) })
	return ""
}

// setTimeout takes --timeout, the one duration that is written with its unit: it is typed by
// people.
func (l *loader) setTimeout(v any) string {
	d, err := time.ParseDuration(fmt.Sprint(v))
	l.timeout = d
	return keep("a duration such as 10m, not negative", err != nil || d < 0)
}

// operands checks what stands after the command, and how flags go together. Words of a prompt
// are joined by one blank; whoever needs the exact text quotes it. The word - alone is the one
// case in which stdin is read.
func (l *loader) operands() error {
	words := strings.Join(l.args, " ")
	switch c, n := l.command, len(l.args); {
	case l.version:
		l.command = "version"
	case !in(allCommands, c):
		l.demand(false, "found command %q, allowed %s", c, allCommands)
	case c == "help" && (n == 0 || in(allCommands, words)):
		return &helpRequest{words}
	case in("exec turn", c):
		l.prompt, l.promptFromStdin = words, words == "-"
		l.demand(strings.TrimSpace(words) != "", "%s: found no prompt, allowed words, or - to read it from stdin", c)
	default:
		fits := n == 0 && c != "cancel" || n == 1 && c == "cancel" || n == 2 && c == "services" && l.args[0] == "stop"
		l.demand(fits, "%s: found %d operands, allowed none, a command after help, ID after cancel, stop TASK after services", c, n)
	}
	l.demand(!l.jsonOut || in("json", cmp.Or(l.format, "json")), "--json: found --output-format %s as well, allowed one of them", l.format)
	l.demand(l.record == "" || l.replay == "", "--record: found --replay as well, allowed one of them")
	l.format = cmp.Or(l.format, keep("json", l.jsonOut), "text")
	return nil
}

// settle puts the sources in force, lowest first, so that a later one simply overwrites. For the
// commands that are deaf to the environment BELAY_HOME comes below the file, which is the same
// order with one step less. The home is needed before the file is read: BELAY_HOME and the flags
// count once before it and again in their turn.
func (l *loader) settle() {
	reads := in(envCommands, l.command)
	if reads {
		l.rows["paths.workspace"].def = l.cwd
	} else if l.command == "serve" {
		l.rows["infer.max_tokens"].def = int64(8192) // a local model that rambles holds the one slot
	}
	if l.replay != "" || l.command == "demo" {
		l.rows["infer.model"].def = "replay" // the recording answers whatever is asked
	}
	for _, f := range l.fields {
		if f.key != "" && f.def != nil && f.def != "" {
			l.apply(f.key, f.def, "default", f.key)
		}
	}
	l.environment("paths.home")
	l.applyFlags()
	l.readFile(reads)
	if reads {
		l.environment("")
	}
	l.applyFlags()
	if len(l.problems) == 0 {
		l.finish(reads)
	}
}

func (l *loader) applyFlags() {
	for _, apply := range l.flags {
		apply()
	}
}

// environment applies the variables of the rows whose key begins with start, "" = all rows.
func (l *loader) environment(start string) {
	for _, f := range l.fields {
		for _, name := range strings.Fields(f.env) {
			if s := l.environ[name]; s != "" && strings.HasPrefix(f.key, start) {
				l.apply(f.key, f.typed(s), "env "+name, name)
				break
			}
		}
	}
}

// readFile applies the configuration file. Only one that --config names has to be there. One
// that is there and cannot be read is an error, since it may ask for a stricter sandbox; one in
// a directory that we may not search counts as absent.
func (l *loader) readFile(reads bool) {
	file := cmp.Or(l.conf, keep(filepath.Join(l.home, "config.toml"), l.home != ""))
	if named := l.environ["BELAY_CONFIG_PATH"]; l.conf == "" && reads && named != "" {
		file = l.path(named)
		l.demand(file != "", "BELAY_CONFIG_PATH: found %s, allowed an absolute path, or ~/ with HOME set", shown(named, maxShown))
	}
	// Any error: a home below a file (ENOTDIR) or one that another user owns (EACCES, common where
	// a container runs with a foreign uid) holds no configuration that could be meant for us.
	if _, err := os.Stat(file); l.conf == "" && err != nil {
		return
	}
	data, err := os.ReadFile(file)
	l.demand(err == nil, "reading the configuration: %v", err)
	l.file = file
	// The statements above a syntax error are checked as well, so that one run tells everything.
	r := readTOML(data)
	for _, e := range r.entries {
		l.apply(e.name, e.value, fmt.Sprintf("file:%d", e.line), fmt.Sprintf("%s:%d: %s", file, e.line, e.name))
	}
	l.demand(r.msg == "", "%s:%d: %s", file, r.line, r.msg)
}

// apply puts v in force over what a lower source said; a refused value leaves the lower one in
// force, but the problem ends loadConfig anyway. where begins the error and names the source as
// its author wrote it. A base URL that begins with unix: is the socket setting under its other
// name. A text of the infer table may be a key that was pasted in the wrong place, so its length
// has to do.
func (l *loader) apply(key string, v any, origin, where string) {
	if s, _ := v.(string); key == "infer.base_url" && strings.HasPrefix(s, "unix:") {
		key, v = "infer.socket", strings.TrimPrefix(strings.TrimPrefix(s, "unix:"), "//")
	}
	f, limit := l.rows[key], maxShown
	if f == nil {
		l.unknown(key, v, where)
		return
	}
	if strings.HasPrefix(key, "infer.") {
		limit = -1
	}
	if allowed := f.set(v); allowed != "" {
		l.demand(false, "%s: found %s, allowed %s", where, shown(v, limit), allowed)
		return
	}
	if twin := l.rows[f.twin]; twin != nil && twin.value != nil {
		// The kinds of origin differ in their first four bytes.
		l.demand(twin.origin[:4] != origin[:4], "%s: found %s as well, allowed one of them", where, f.twin)
		twin.set("")
		twin.value, twin.origin = nil, ""
	}
	if f.value, f.origin = v, origin; key == "exec.sandbox" {
		l.sandboxFlag = where == "--sandbox"
	}
}

// unknown tells the keys of the table that an unknown key is in, or else the tables. The header
// of a known table is fine.
func (l *loader) unknown(key string, v any, where string) {
	table, _, _ := strings.Cut(key, ".")
	var keys []string
	for _, f := range l.fields {
		if strings.HasPrefix(f.key, table+".") {
			keys = append(keys, f.key)
		}
	}
	_, isHeader := v.(tomlTable)
	l.demand(isHeader && in(tables, key), "%s: found an unknown name, allowed %s", where, cmp.Or(strings.Join(keys, ", "), tables))
}

// finish checks what depends on several settings and on the command, and fills what follows from
// them. Only what a command uses can stop it: status does not care for a workspace, version for
// nothing at all. The slots of llama-server are counted from 0; with two requests on one slot
// they evict each other's cache.
func (l *loader) finish(reads bool) {
	c, slots := l.command, cmp.Or(l.expectSlots, 128)
	l.findServer(reads)
	l.demand(l.home != "" || !in("serve turn status sessions cancel shutdown services", c), "%s needs a home and HOME is not set: set HOME or BELAY_HOME, or give --home", c)
	l.demand(l.model != "" || !in("exec serve", c), "found no model, allowed infer.model, --model or, for exec, BELAY_MODEL")
	l.demand(c != "serve" || l.expectTemplate != "" && l.expectCtx > 0 && l.expectSlots > 0, "serve needs expect.template_sha256, expect.n_ctx and expect.slots: `%s probe --config FILE` prints them", l.program)
	l.demand(max(l.slotMain, l.slotBackground) < slots && (l.slotMain != l.slotBackground || slots == 1), "slots: found main %d and background %d, allowed two below expect.slots = %d that differ unless it is 1", l.slotMain, l.slotBackground, slots)
	// A workspace that is missing would fail each command of a run, one by one and on the model's
	// account.
	info, err := os.Stat(l.workspace)
	l.demand(l.workspace == "" || err == nil && info.IsDir() || !in("exec demo serve", c), "paths.workspace: found %s, which is not a directory", l.workspace)
	// A command that can write the home writes the next run's configuration, and with it its
	// sandbox. Without a home there is still the root to refuse.
	for _, dir := range l.writable {
		l.demand(!holds(dir, cmp.Or(l.home, "/")), "exec.writable: found %s, allowed a directory that is not / and does not hold belay's home %s", dir, l.home)
	}
	l.keyNames = strings.Fields(keyVars + " BELAY_CONFIG_PATH NOTIFY_SOCKET " + l.keyEnv)
	for _, f := range l.fields {
		if s, isText := f.value.(string); isText && f.key == "infer.base_url" {
			f.value, _, _ = strings.Cut(s, "?") // some servers want the key in the query
		}
		if f.key != "" {
			l.values = append(l.values, setting{f.key, shown(f.value, 1<<20), cmp.Or(f.origin, "default")})
		}
		l.keyNames = append(l.keyNames, strings.Fields(f.env)...)
	}
	l.values = append(l.values, setting{"infer.api_key", l.key.String(), cmp.Or(l.keyOrigin, "default")})
	if c == "demo" { // plays our own script, and persist asks for the literal flag
		l.auto, l.sandbox, l.sandboxFlag = true, "danger-full-access", true
	}
}

// findServer decides what is asked, and with which key. The name in the URL of a socket is made
// up, since HTTP demands one. A replayed run asks nobody. Without a URL it is the vendor whose
// key is set.
func (l *loader) findServer(reads bool) {
	if l.replay != "" || !in("exec serve probe config", l.command) {
		return
	}
	// In the order of keyVars. The URL is told as the variable's, whose presence decided it.
	for _, prefix := range []string{"DEEPSEEK", "OPENAI"} {
		if name := prefix + "_API_KEY"; reads && l.socket+l.baseURL == "" && l.environ[name] != "" {
			l.apply("infer.base_url", vendorURL(prefix), "env "+name, name)
		}
	}
	place, host := endpoint(cmp.Or(l.baseURL, keep("unix:"+l.socket, l.socket != "")))
	l.url = cmp.Or(keep("http://localhost/v1/chat/completions", l.socket != ""), place)
	l.demand(place != "" || l.command == "config", "found no server, allowed infer.socket, infer.base_url or, for exec, these variables:\n  export BELAY_BASE_URL=http://127.0.0.1:8080\n  export BELAY_MODEL=NAME\n  export BELAY_API_KEY=KEY, if the server wants one")
	// Key, prompts and code would cross the network as they are.
	l.demand(!strings.HasPrefix(place, "http:") || l.allowHTTP || loopback(host), "infer.base_url: found plain http to %s, allowed https, a loopback address, or infer.allow_insecure_http (BELAY_ALLOW_INSECURE_HTTP=true)", host)
	if place != "" {
		l.findKey(reads, place, host)
	}
}

// endpoint gives the URL that a base URL stands for. Whether users write the version into it
// differs from vendor to vendor, and some paste the whole address of the call, so: no path means
// /v1, a path is taken as given, less chat/completions at its end; then that is appended, before
// a query, which Azure needs for its version. It is normalised so that equal places have equal
// texts, and comes with its host; "" = it is none. unix:/PATH is a place as well. A user name is
// refused since it comes with a secret, an IPv6 zone since net/url gives it back unescaped.
func endpoint(raw string) (place, host string) {
	raw = strings.TrimSpace(raw)
	if path, isUnix := strings.CutPrefix(raw, "unix:"); isUnix {
		path = "unix:" + filepath.Clean(strings.TrimPrefix(path, "//"))
		return path, path
	}
	u, err := url.Parse(raw) // its error repeats the URL, so it goes no further
	if err != nil || u.Hostname() == "" || u.User != nil || u.Fragment != "" || strings.Contains(u.Host, "%") || !in("http https", u.Scheme) {
		return "", ""
	}
	// The path stays escaped, or a%2Fb would turn into two parts.
	path := cmp.Or(strings.TrimRight(u.EscapedPath(), "/"), "/v1")
	path = strings.TrimRight(strings.TrimSuffix(path, "/chat/completions"), "/")
	defaultPort := cmp.Or(keep(":443", u.Scheme == "https"), ":80")
	place = u.Scheme + "://" + strings.TrimSuffix(strings.ToLower(u.Host), defaultPort) + path + "/chat/completions"
	return place + keep("?"+u.RawQuery, u.RawQuery != ""), strings.ToLower(u.Hostname())
}

// findKey takes the first key that may go to place: a binding given as a flag, the environment
// in the order of keyVars, any other binding. The key of a vendor goes only to the vendor or,
// where the environment gives settings, to the BASE_URL that stands beside it.
func (l *loader) findKey(reads bool, place, host string) {
	// A flag is above the environment, as for all settings.
	if l.rows["infer.api_key_env"].origin == "flag" || l.rows["infer.api_key_file"].origin == "flag" {
		l.boundKey()
	}
	for _, name := range strings.Fields(keyVars) {
		prefix := strings.TrimSuffix(name, "_API_KEY")
		own, vendor := endpoint(vendorURL(prefix))
		beside, _ := endpoint(keep(l.environ[prefix+"_BASE_URL"], reads))
		// The whole texts are compared, scheme and path included: the same host may serve others
		// below another path, and plain http is another place than https.
		if own == "" || own == place || beside == place {
			l.useKey(name, l.environ[name], "env "+name)
		} else if l.environ[name] != "" {
			l.keyNote = cmp.Or(l.keyNote, fmt.Sprintf("%s not sent to %s: it belongs to %s or %s_BASE_URL; set BELAY_API_KEY to send it", name, host, vendor, prefix))
		}
	}
	l.boundKey()
	l.keyNote = keep(l.keyNote, l.key == "")
}

// boundKey takes the key that infer.api_key_env or infer.api_key_file points at: the first line
// of the file, which must give no right to group or others. Whoever names a place wants its key
// sent, so one that is not there is an error, where a variable that nobody named may be missing.
// The name of the variable is not repeated: it may be the key itself.
func (l *loader) boundKey() {
	if l.key != "" || l.keyEnv+l.keyFile == "" {
		return
	}
	key, where := l.environ[l.keyEnv], "infer.api_key_env"
	if l.keyFile != "" {
		where = "infer.api_key_file"
		info, err := os.Stat(l.keyFile)
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			err = fmt.Errorf("%s has mode %04o, allowed 0600", l.keyFile, info.Mode().Perm())
		}
		// Between the two calls the file may change; whoever can do that is us or root.
		data, readErr := os.ReadFile(l.keyFile)
		err = cmp.Or(err, readErr)
		l.demand(err == nil, "%s: %v", where, err)
		key, _, _ = strings.Cut(string(data), "\n")
	}
	l.demand(strings.TrimSpace(key) != "", "%s: found no key where it points", where)
	l.useKey(where, key, l.rows[where].origin)
}

// useKey keeps the first key it is given. A control character would end the header line that
// carries it.
func (l *loader) useKey(where, key, origin string) {
	if key = strings.TrimSpace(key); l.key == "" && key != "" {
		l.demand(!strings.ContainsFunc(key, unicode.IsControl), "%s: found a control character, allowed one line of text", where)
		l.key, l.keyOrigin = secret(key), origin
	}
}

// vendorURL is the own server of a key prefix, "" = the prefix is nobody's.
func vendorURL(prefix string) string {
	return map[string]string{"DEEPSEEK": "https://api.deepseek.com/v1", "OPENAI": "https://api.openai.com/v1"}[prefix]
}

// loopback looks at the parsed address, since 127.evil.example begins like one, and so do names
// below localhost.
func loopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// holds reports whether path is dir or lies below it, once symbolic links are followed. The home
// may not be there yet, then its parent counts.
func holds(dir, path string) bool {
	real := func(p string) string { r, _ := filepath.EvalSymlinks(p); return r }
	path = cmp.Or(real(path), filepath.Join(cmp.Or(real(filepath.Dir(path)), filepath.Dir(path)), filepath.Base(path)))
	return strings.HasPrefix(path+"/", strings.TrimRight(cmp.Or(real(dir), dir), "/")+"/")
}

// path makes a path absolute and clean, "" = it is relative or there is no HOME for its ~/.
func (l *loader) path(s string) string {
	if rest, ok := strings.CutPrefix(s, "~/"); ok && l.userHome != "" {
		s = filepath.Join(l.userHome, rest)
	}
	return keep(filepath.Clean(s), filepath.IsAbs(s))
}

func (l *loader) socketPath(s string) string {
	s = l.path(s)
	return keep(s, len(s) <= maxSocketPath)
}

func serverURL(s string) string  { place, _ := endpoint(s); return keep(s, place != "") }
func headerName(s string) string { return keep(s, strings.Trim(s, bareKey) == "") }
func variable(s string) string   { return keep(headerName(s), !strings.Contains(s, "-")) }

func printable(s string) string {
	odd := func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }
	return keep(s, len(s) <= maxModelName && !strings.ContainsFunc(s, odd) && strings.TrimSpace(s) != "")
}

func sha256Hex(s string) string {
	s = strings.ToLower(s)
	return keep(s, len(s) == 64 && strings.Trim(s, "0123456789abcdef") == "")
}

// keep gives s, or "" if it is not good: with cmp.Or it makes a choice of one line.
func keep(s string, good bool) string {
	if !good {
		return ""
	}
	return s
}

// shown is a value as TOML would write it; a text of more than limit bytes is only measured.
func shown(v any, limit int) string {
	switch v := v.(type) {
	case nil:
		return "unset"
	case tomlTable:
		return "a table"
	case string:
		if len(v) > limit {
			return fmt.Sprintf("%d bytes of text", len(v))
		}
		return strconv.Quote(v)
	case []any:
		var parts []string
		for _, item := range v {
			parts = append(parts, shown(item, limit))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	}
	return fmt.Sprint(v)
}

// demand notes a problem unless good holds. Flags and BELAY_HOME are applied twice, so what is
// found twice is told once.
func (l *loader) demand(good bool, format string, args ...any) {
	if msg := fmt.Sprintf(format, args...); !good && !slices.Contains(l.problems, msg) {
		l.problems = append(l.problems, msg)
	}
}

// in finds a name in a blank-separated set; "" is in none.
func in(set, name string) bool { return slices.Contains(strings.Fields(set), name) }

// tomlTable stands for a table among the values of a file.
type tomlTable struct{}

// tomlEntry is one statement of a file, line counted from 1.
type tomlEntry struct {
	name  string // dotted; parts that need quotes have them
	value any    // string, int64, float64, bool, []any or tomlTable
	line  int
}

// tomlReader is the part of TOML 1.0 that this schema needs: tables, keys, one-line strings,
// integers, floats, booleans and lists. The rest (dates, inline tables, arrays of tables,
// multi-line strings, inf and nan, tables in tables) is refused; nothing is read wrongly. The
// first error ends the reading.
type tomlReader struct {
	src     string // what is left; a line end closes it
	line    int
	msg     string // what is wrong in line, "" = nothing
	values  map[string]any
	entries []tomlEntry
}

// parseTOML reads a whole document into a flat map from dotted names to values; see tomlEntry. A
// table has an entry of its own, so that a.b and "a.b" differ and an empty table shows. An error
// begins with its line.
func parseTOML(data []byte) (map[string]any, error) {
	r := readTOML(data)
	if r.msg != "" {
		return nil, fmt.Errorf("line %d: %s", r.line, r.msg)
	}
	return r.values, nil
}

// readTOML never fails: what it found up to the first error is in entries, so that the schema
// errors of the lines above are told along with it. A CR is only good before an LF, and is
// dropped there.
func readTOML(data []byte) *tomlReader {
	r := &tomlReader{src: strings.ReplaceAll(string(data), "\r\n", "\n") + "\n", line: 1, values: map[string]any{}}
	// Checked at once for all places: TOML allows no control character but the tab, and only
	// UTF-8.
	odd := func(c rune) bool {
		return c == unicode.ReplacementChar || c != '\t' && c != '\n' && unicode.IsControl(c)
	}
	if i := strings.IndexFunc(r.src, odd); i >= 0 {
		r.fail("found a control character or bytes that are not UTF-8", 1+strings.Count(r.src[:i], "\n"))
	}
	var section []string
	for r.gap(); r.src != "" && r.msg == ""; r.gap() {
		if line := r.line; r.accept("[") {
			section = r.key("]")
			r.enter(section, tomlTable{}, line)
		} else {
			path := slices.Concat(section, r.key("="))
			r.enter(path, r.value(0), line)
		}
		if r.take(" \t"); !strings.HasPrefix(r.src, "\n") && !strings.HasPrefix(r.src, "#") {
			r.fail("found more after the value; dates and multi-line strings are not supported", r.line)
		}
	}
	return r
}

// enter notes one statement. A table is made once: by its header, or by dotted keys above all
// headers.
func (r *tomlReader) enter(path []string, v any, line int) {
	if r.msg != "" {
		return
	}
	name, top := strings.Join(path, "."), path[0]
	// Two levels are all that the schema has. Deeper ones, though right, are refused: the rules
	// for tables that are opened in pieces are the part of TOML that readers get wrong.
	_, isHeader := v.(tomlTable)
	_, inTable := r.values[top].(tomlTable)
	if len(path) > 2 || isHeader && len(path) > 1 {
		r.fail("found a table in a table, which is not supported", line)
	} else if r.values[name] != nil || r.values[top] != nil && !inTable {
		r.fail("found "+name+" a second time", line)
	}
	r.values[top] = tomlTable{}
	r.values[name] = v
	r.entries = append(r.entries, tomlEntry{name, v, line})
}

// key reads a key, dotted or not, and what has to follow it. Its parts come as they would be
// written, without quotes where none are needed, so that "a" and a are one key.
func (r *tomlReader) key(end string) (parts []string) {
	for more := true; more && r.msg == ""; more = r.accept(".") {
		r.take(" \t")
		part := r.take(bareKey)
		if part == "" {
			s, ok := r.textKey()
			if part = s; strings.Trim(s, bareKey) != "" || s == "" {
				part = strconv.Quote(s)
			}
			if !ok {
				r.fail("found no key where one has to be; arrays of tables are not supported", r.line)
			}
		}
		parts = append(parts, part)
		r.take(" \t")
	}
	if !r.accept(end) {
		r.fail("found no "+end+" after the key", r.line)
	}
	return parts
}

// value reads one value; depth is the number of lists around it. Between the brackets of a list,
// and only there, lines may end; a comma may stand before the closing one.
func (r *tomlReader) value(depth int) any {
	r.take(" \t")
	if s, ok := r.textKey(); ok {
		return s
	}
	if depth < maxNested && r.accept("[") {
		// Not nil, since an empty list is a value.
		items := []any{}
		for r.gap(); r.msg == "" && !r.accept("]"); r.gap() {
			items = append(items, r.value(depth+1))
			if r.gap(); !r.accept(",") && !strings.HasPrefix(r.src, "]") {
				r.fail("found neither , nor ] after an item of a list", r.line)
			}
		}
		return items
	}
	// The word is not repeated in the error: it may be a key without quotes.
	v, ok := tomlWord(r.take(bareKey + "+.:"))
	if !ok {
		r.fail("found no value: texts need quotes, numbers fit 64 bits; dates, inline tables, inf and nan are not supported", r.line)
	}
	return v
}

// text reads a string on one line, ok = there is a quote. Go's strings are TOML's basic strings
// with more escapes (\a \v \x and octal), which are refused; \\ is taken out first so that a \
// always begins an escape.
func (r *tomlReader) textKey() (s string, ok bool) {
	// Two quotes in a row are an empty text here, so the third one of """ is left over and
	// refused.
	if r.accept("'") {
		s, r.src, ok = strings.Cut(r.src, "'")
		ok = ok && !strings.Contains(s, "\n")
	} else if strings.HasPrefix(r.src, `"`) {
		quoted, err := strconv.QuotedPrefix(r.src)
		ok = err == nil
		for _, escape := range strings.Split(strings.ReplaceAll(quoted, `\\`, ""), `\`)[1:] {
			ok = ok && strings.Contains(`btnfr"uU`, escape[:1])
		}
		s, _ = strconv.Unquote(quoted)
		r.src = r.src[len(quoted):]
	} else {
		return "", false
	}
	if !ok {
		r.fail("found a text that does not end on its line or has an unknown escape", r.line)
	}
	return s, true
}

// tomlWord reads true, false, an integer (int64) or a float. An integer that does not fit is
// refused and not read as a float. strconv checks the underscores: they stand between digits in
// both languages. strconv knows Go's numbers, which are more (0777, 0x_1, -0x1, 1., .5, 0x1p-2,
// inf), so these are refused first.
func tomlWord(s string) (any, bool) {
	body := strings.TrimLeft(s, "+-")
	whole, fraction, hasDot := strings.Cut(body, ".")
	digit := func(s string) bool { return s != "" && s[0] >= '0' && s[0] <= '9' }
	n, err := strconv.ParseInt(s, 0, 64)
	switch {
	case s == "true" || s == "false":
		return s == "true", true
	// 0x, 0o and 0b in lower case, without a sign, and a digit right behind.
	case len(body) > 2 && body[0] == '0' && strings.Contains("xob", body[1:2]):
		return n, err == nil && body == s && body[2] != '_'
	case !digit(body), hasDot && !digit(fraction), strings.Trim(body, "0123456789_.eE+-") != "":
		return nil, false
	// Leading zeros: Go takes them for octal.
	case whole[0] == '0' && len(whole) > 1 && strings.Contains("0123456789_", whole[1:2]):
		return nil, false
	case !strings.ContainsAny(body, ".eE"):
		return n, err == nil
	}
	f, err := strconv.ParseFloat(s, 64)
	return f, err == nil
}

// gap passes blanks, comments and line ends.
func (r *tomlReader) gap() {
	for r.msg == "" {
		r.line += strings.Count(r.take(" \t\n"), "\n")
		if !strings.HasPrefix(r.src, "#") {
			return
		}
		r.src = r.src[strings.IndexByte(r.src, '\n'):]
	}
}

// take passes the characters of set and gives them.
func (r *tomlReader) take(set string) string {
	all := r.src
	r.src = strings.TrimLeft(all, set)
	return all[:len(all)-len(r.src)]
}

func (r *tomlReader) accept(s string) (ok bool) {
	r.src, ok = strings.CutPrefix(r.src, s)
	return ok
}

// fail keeps the first message and its line; later ones follow from it, and end the reading.
func (r *tomlReader) fail(msg string, line int) {
	if r.msg == "" {
		r.msg, r.line = msg, line
	}
}

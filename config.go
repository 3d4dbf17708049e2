//go:build linux

package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// config.go turns argv, the environment and one file into a config that is never written again.
// It owns the precedence of settings, the schema, the TOML subset, the rules for URLs and the
// choice of the key. It never opens anything but the config file and the key file, and never
// prints a secret: text of the infer table is described by its length in errors, because that is
// where keys get pasted.
//
// Precedence, highest first. One source gives the whole value of a setting; lists are not merged.
//
//	               exec demo config services          serve probe turn status sessions cancel shutdown
//	byFlag         --model and the like, --set        the same
//	byEnv          the env column of schema           not read
//	byFile         --config, else BELAY_CONFIG_PATH,  --config, else <home>/config.toml
//	               else <home>/config.toml
//	byHome         -                                  BELAY_HOME, for paths.home
//	byDefault      the def column, and settle         the same
//
// The home that holds the file is what flags and variables say; paths.home of the file then moves
// everything but the file. Keys follow their own rules, see findServer. infer.socket and
// infer.base_url are one setting, and so are infer.api_key_env and infer.api_key_file: the
// highest source that names either wins, both in one source is an error.

const (
	// help and version read no file and no environment: they work when everything else is broken.
	allCommands = "exec serve turn status sessions cancel shutdown services probe config demo version help"
	envCommands = "exec demo config services" // the environment gives settings

	bareKey       = `[A-Za-z0-9_-]+` // what TOML 1.0 allows in a key without quotes
	maxSocketPath = 107              // bytes: sun_path of unix(7) is 108 with its NUL
	maxShown      = 64               // bytes of a refused value that an error repeats
	maxNested     = 8                // arrays in arrays: the schema needs one; bounds the recursion
	minute        = 60_000
	hour          = 60 * minute // milliseconds, as minute

	byDefault, byHome, byFile, byEnv, byFlag = 0, 1, 2, 3, 4
)

// secret is a key. It is compared with "" and converted like a string, and nothing else. Printing
// shows only whether it is set; a grep for reveal lists every use. The verbs %p and %w of a text
// ask no method: go vet refuses both.
type secret string

func (s secret) reveal() string               { return string(s) }
func (s secret) String() string               { return cmp.Or(keep("[unset]", s == ""), "[redacted]") }
func (s secret) Format(f fmt.State, _ rune)   { _, _ = io.WriteString(f, s.String()) }
func (s secret) MarshalJSON() ([]byte, error) { return []byte(strconv.Quote(s.String())), nil }

// usageError is a mistake of the caller: exit 2. The message has one problem a line.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

// helpRequest asks for the help on one of allCommands, "" = of the program.
type helpRequest struct{ topic string }

func (e *helpRequest) Error() string { return "help " + e.topic }

// setting is one line of `belay config`. origin: flag, env NAME, file:LINE or default.
type setting struct{ key, value, origin string }

// config is set once, by loadConfig, and only read from then on; everybody may read it without a
// lock. A field has a value of its schema row's range whatever the command, or its zero where the
// row has no default.
type config struct {
	// program is the base name of argv[0]; command one word of allCommands; args its operands.
	// workspace, home, file (the configuration that was read) and socket are absolute and clean,
	// "" = none: no workspace only for serve and its clients, no home only where the command does
	// without, no socket means TCP.
	program, command, workspace, home, file, socket, sandbox, format, prompt, appendPrompt, session, record, replay string
	// baseURL is as given, "" = socket; url is what is asked, with chat/completions and query. Why
	// a key that is there is not sent is in keyNote. expectTemplate is a SHA-256 in lower-case hex.
	baseURL, url, model, keyHeader, reasoningEffort, keyNote, expectTemplate string
	// keyNames are the environment names that no child may see: all that this file reads (with
	// HOME excepted), NOTIFY_SOCKET, through which a child could declare us ready, and the one in
	// infer.api_key_env.
	args, writable, envKeep, keyNames []string
	// sandboxFlag: sandbox is what --sandbox said, literally; persist depends on it.
	auto, sandboxFlag, network, noProjectConfig, verbose, jsonOut, resume, now, promptFromStdin, waitForServer, allowHTTP bool
	// maxTokens: of one answer, 0 = not sent. maxFrame: bytes. expectCtx: tokens of a slot.
	maxTurns, maxTokens, maxFrame, maxClients, maxQueue, expectCtx, expectSlots, slotMain, slotBackground int
	maxTotalTokens                                                                                        int64 // of a run, 0 = no cap
	// timeout: of the whole run, 0 = none.
	timeout, poll, liveness, commandTimeout, drain, loadTimeout time.Duration
	backoff                                                     []time.Duration
	temperature, topP                                           *float64 // nil = not sent, as seed
	seed                                                        *int64
	key                                                         secret // goes to url, whatever it is
	values                                                      []setting
}

// Format keeps a config out of messages: fmt prints unexported fields without asking their
// methods, so %v of the struct would show the key.
func (c config) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "config of "+c.command) }

// field is one row of the schema. A row without a key is a flag alone and has no other source
// but the environment. lo and hi are inclusive and bound each number of a setting, most bounds
// the length of a list, form says what a text has to look like: see text.
type field struct {
	key, flag, on  string // flag: names, blank-separated; on: commands that know it, "" = all
	env, form, def string // env: variables, blank-separated, the first one set counts; def: as --set takes it
	dst            any    // where the value goes in config
	lo, hi         int64
	most           int
}

// given is what is in force at one dst. where is what an error about it begins with.
type given struct {
	key, origin, where string
	value              any // as TOML gives it
	rank               int // by…
}

// loader is the state of one loadConfig. It collects problems instead of ending at the first,
// because a user who mends a configuration in CI pays minutes for each run.
type loader struct {
	*config
	environ                                                     map[string]string // trimmed; "" means unset
	cwd, conf, server, keyFrom, keyOrigin, timeoutArg, problems string            // keyFrom: variable or absolute path
	help, version                                               bool
	fields                                                      []*field
	rows                                                        map[string]*field // fields by key
	inForce                                                     map[any]given     // by dst
	named                                                       map[[2]any]string // by dst and rank: the key that was used
	patterns                                                    map[string]*regexp.Regexp
}

// loadConfig is the only maker of a config. args is os.Args, env os.Environ(), cwd absolute:
// relative paths of flags start there, while the paths of files and variables have to be
// absolute, since nobody knows from where a service manager starts us. It reads at most two
// files, changes nothing, and may be called again. Errors are *usageError with everything that
// was found wrong, or *helpRequest; the config is then nil.
func loadConfig(args, env []string, cwd string) (*config, error) {
	l := &loader{config: &config{program: filepath.Base(args[0])}, environ: map[string]string{}, rows: map[string]*field{}, cwd: cwd,
		inForce: map[any]given{}, named: map[[2]any]string{}, patterns: map[string]*regexp.Regexp{}}
	// Blanks around a value are never meant: they come from files with one NAME=VALUE a line and
	// from secrets that end in a line end.
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		l.environ[name] = strings.TrimSpace(value)
	}
	l.fields = l.schema()
	for _, f := range l.fields {
		l.rows[f.key] = f
	}
	delete(l.rows, "") // flags alone
	if err := l.parse(args[1:]); err != nil {
		return nil, err
	}
	if l.problems == "" && l.command != "version" {
		l.settle()
	}
	if l.problems != "" {
		return nil, &usageError{strings.TrimSpace(l.problems)}
	}
	return l.config, nil
}

// schema is every key and every flag, in the order in which `belay config` shows them. The unit
// is in the name of a key, so no value needs a suffix: _ms are milliseconds, _bytes are bytes. A
// value is checked against its row whatever its source, defaults included. A bound without a
// reason keeps typing errors out and is far from any value that makes sense. Reasons: vendors
// stop at a temperature of 2, local servers do not; a long prompt is silent for minutes; a
// command's timeout is the Bash tool's clamp; weights may come from a slow disk; the first byte
// of a frame's length is 0; a client has a queue of 4 MiB, a writable directory an open file.
func (l *loader) schema() []*field {
	const models = "BELAY_MODEL CODEWHALE_MODEL DEEPSEEK_MODEL OPENAI_MODEL"
	const urls = "BELAY_BASE_URL CODEWHALE_BASE_URL DEEPSEEK_BASE_URL OPENAI_BASE_URL"
	const maxInt, variable, printable = 1<<31 - 1, "[A-Za-z_][A-Za-z0-9_]*", `[^[:cntrl:]"]{1,200}` // no name is longer, a pasted file is
	return []*field{
		{key: "infer.socket", form: "socket", dst: &l.server},
		{key: "infer.base_url", flag: "base-url", env: urls, form: "url", dst: &l.server},
		{key: "infer.model", flag: "model", env: models, form: printable, dst: &l.model},
		{key: "infer.api_key_env", form: variable, dst: &l.keyFrom}, {key: "infer.api_key_file", form: "path", dst: &l.keyFrom},
		{key: "infer.api_key_header", form: "[A-Za-z0-9_-]+", dst: &l.keyHeader},
		{key: "infer.max_tokens", dst: &l.maxTokens, lo: 1, hi: maxInt}, {key: "infer.seed", dst: &l.seed, lo: -1 << 63, hi: 1<<63 - 1},
		{key: "infer.temperature", dst: &l.temperature, hi: 100}, {key: "infer.top_p", dst: &l.topP, hi: 1},
		{key: "infer.reasoning_effort", form: printable, dst: &l.reasoningEffort},
		{key: "infer.allow_insecure_http", env: "BELAY_ALLOW_INSECURE_HTTP", dst: &l.allowHTTP, def: "false"},
		{key: "infer.wait_for_server", dst: &l.waitForServer, def: "false"},
		{key: "slots.main", dst: &l.slotMain, hi: 127, def: "0"}, {key: "slots.background", dst: &l.slotBackground, hi: 127, def: "1"},
		{key: "expect.template_sha256", form: "[0-9a-fA-F]{64}", dst: &l.expectTemplate},
		{key: "expect.n_ctx", dst: &l.expectCtx, lo: 512, hi: 16_777_216}, {key: "expect.slots", dst: &l.expectSlots, lo: 1, hi: 128},
		{key: "limits.poll_ms", dst: &l.poll, lo: 10, hi: minute, def: "1000"},
		{key: "limits.liveness_ms", dst: &l.liveness, lo: 100, hi: hour, def: "300000"},
		{key: "limits.retry_backoff_ms", dst: &l.backoff, hi: 10 * minute, most: 10, def: "[500, 2000, 8000, 20000]"},
		{key: "limits.max_turns", flag: "max-turns", on: "exec", dst: &l.maxTurns, lo: 1, hi: maxInt, def: "200"},
		{key: "limits.command_timeout_ms", dst: &l.commandTimeout, lo: 1000, hi: 10 * minute, def: "120000"},
		{key: "limits.max_total_tokens", dst: &l.maxTotalTokens, hi: 1<<63 - 1, def: "0"},
		{key: "limits.drain_ms", dst: &l.drain, hi: hour, def: "30000"},
		{key: "limits.load_timeout_ms", dst: &l.loadTimeout, lo: 1000, hi: 24 * hour, def: "600000"},
		{key: "limits.max_frame_bytes", dst: &l.maxFrame, lo: 64 << 10, hi: 15 << 20, def: "8388608"},
		{key: "limits.max_clients", dst: &l.maxClients, lo: 1, hi: 1024, def: "64"},
		{key: "limits.max_queue", dst: &l.maxQueue, hi: 1024, def: "16"},
		{key: "exec.sandbox", flag: "sandbox", on: "exec", env: "BELAY_SANDBOX", dst: &l.sandbox, def: "workspace-write",
			form: "read-only|workspace-write|external-sandbox|danger-full-access"},
		{key: "exec.network", flag: "network", on: "exec", env: "BELAY_NETWORK", dst: &l.network, def: "false"},
		{key: "exec.writable", flag: "writable", on: "exec", form: "path", dst: &l.writable, most: 100, def: "[]"},
		{key: "exec.env_keep", form: variable, dst: &l.envKeep, most: 100, def: "[]"},
		{key: "paths.home", flag: "home", env: "BELAY_HOME", form: "path", dst: &l.home, def: l.path("~/.belay")},
		{key: "paths.workspace", flag: "workspace C", form: "path", dst: &l.workspace},
		{flag: "config", env: "BELAY_CONFIG_PATH", form: "path", dst: &l.conf},
		{flag: "no-project-config", dst: &l.noProjectConfig}, {flag: "verbose", dst: &l.verbose},
		{flag: "help h", dst: &l.help}, {flag: "version", dst: &l.version}, {flag: "auto", on: "exec", dst: &l.auto},
		{flag: "timeout", on: "exec", form: "duration", dst: &l.timeoutArg},
		{flag: "json", on: "exec demo turn status sessions cancel shutdown services probe", dst: &l.jsonOut},
		{flag: "output-format", on: "exec demo", form: "text|json|stream-json", dst: &l.format},
		{flag: "append-system-prompt", on: "exec", dst: &l.appendPrompt}, {flag: "record", on: "exec", dst: &l.record},
		{flag: "replay", on: "exec", dst: &l.replay}, {flag: "now", on: "shutdown", dst: &l.now},
		{flag: "session", on: "turn", dst: &l.session}, {flag: "resume", on: "turn", dst: &l.resume},
	}
}

// parse reads the command line with package flag, which takes -x and --x alike and ends at -- or
// at the first word that is no flag. It is run twice: up to the command, and behind it. Flags may
// stand on both sides of the command, and after it before its first operand: from the first word
// of a prompt on everything is prompt.
func (l *loader) parse(args []string) error {
	fs := flag.NewFlagSet(l.program, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Func("set", "", func(s string) error {
		// What has not the form is not repeated, it may hold a secret.
		key, word, ok := strings.Cut(s, "=")
		if l.demand(ok, "--set: found another form, allowed KEY=VALUE with VALUE as in TOML or a bare word"); ok {
			l.lookup(key, l.literal(word), byFlag, "flag", "--set "+key)
		}
		return nil
	})
	for _, f := range l.fields {
		for _, name := range strings.Fields(f.flag) {
			add := fs.Func
			if _, isSwitch := f.dst.(*bool); isSwitch {
				add = fs.BoolFunc
			}
			add(name, "", func(s string) error { l.take(f, name, s); return nil })
		}
	}
	// The second run sets l.command first, since the flags behind it are checked against it.
	err := fs.Parse(args)
	if err == nil && fs.NArg() > 0 {
		l.command = fs.Arg(0)
		err = fs.Parse(fs.Args()[1:])
	}
	// Only misspelt and unfinished flags come here, since take never fails; no value is in the text.
	if l.args = fs.Args(); err != nil {
		return &usageError{strings.Replace(err.Error(), " -", " --", 1)}
	}
	return l.operands()
}

// take is called by package flag for each flag, in the order given. It reports by itself what is
// wrong, for the errors of package flag repeat values. A flag of exec before the command is
// refused too: the command that it belongs to is not known yet, and a list of exceptions would be
// longer than the error. A relative path is meant from the current directory; a shell leaves the
// ~ of --home=~/x alone.
func (l *loader) take(f *field, name, s string) {
	if f.form == "path" && s != "" && !strings.HasPrefix(s, "~/") && !filepath.IsAbs(s) {
		s = filepath.Join(l.cwd, s)
	}
	l.demand(f.on == "" || in(f.on, l.command), "--%s belongs after the command %s", name, strings.ReplaceAll(f.on, " ", " or "))
	l.put(f, l.typed(f, s), byFlag, "flag", "--"+name)
}

// typed gives the text of a flag or variable the type of its setting, as far as it has the form;
// put then says what is wrong with the rest. A list takes one item a flag, so each further
// --writable gives a longer list.
func (l *loader) typed(f *field, s string) any {
	switch f.dst.(type) {
	case *string:
		return s
	case *[]string:
		items, _ := l.inForce[f.dst].value.([]any)
		return append(items, s)
	}
	return l.literal(s)
}

// literal reads a TOML value, or else a bare word, so that qwen-2.5 needs no quotes, which a shell
// would take away anyway. A broken text or list is a word that no setting takes.
func (l *loader) literal(s string) any {
	r := &tomlReader{src: s + "\n", patterns: l.patterns}
	if v := r.value(0); r.src == "\n" {
		return v
	}
	return s
}

// operands checks what stands after the command, and how flags go together. Words of a prompt are
// joined by one blank; whoever needs the exact text quotes it. The word - alone is the one case
// in which stdin is read.
func (l *loader) operands() error {
	words := strings.Join(l.args, " ")
	switch c, n := l.command, len(l.args); {
	case l.help && (c == "" || in(allCommands, c)):
		return &helpRequest{c}
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
	l.timeout, _ = time.ParseDuration(cmp.Or(l.timeoutArg, "0"))
	return nil
}

// settle adds what the flags leave open: the defaults, the environment, and then the file, which
// is found in the home that the others say.
func (l *loader) settle() {
	reads, rank := in(envCommands, l.command), byHome
	if reads {
		rank, l.rows["paths.workspace"].def = byEnv, l.cwd
	}
	for _, f := range l.fields {
		if f.def != "" {
			l.put(f, l.literal(f.def), byDefault, "default", f.key)
		}
		for _, name := range strings.Fields(f.env) {
			if s := l.environ[name]; s != "" && (reads || f.key == "paths.home") {
				l.put(f, l.typed(f, s), rank, "env "+name, name)
				break
			}
		}
	}
	l.readFile()
	if l.problems == "" {
		l.finish(reads)
	}
}

// readFile applies the configuration file. Only one that --config names has to be there. One that
// is there and cannot be read is an error, since it may ask for a stricter sandbox; one in a
// directory that we may not search counts as absent.
func (l *loader) readFile() {
	file := cmp.Or(l.conf, keep(filepath.Join(l.home, "config.toml"), l.home != ""))
	// Any error: a home below a file (ENOTDIR) or one that another user owns (EACCES, common where
	// a container runs with a foreign uid) holds no configuration that could be meant for us.
	if _, err := os.Stat(file); err != nil && l.inForce[&l.conf].rank < byFlag {
		return
	}
	data, err := os.ReadFile(file)
	l.demand(err == nil, "reading the configuration: %v", err)
	// The statements above a syntax error are checked as well, so that one run tells everything.
	_, err = parseTOML(data, func(name string, v any, line int) {
		l.lookup(name, v, byFile, fmt.Sprintf("file:%d", line), fmt.Sprintf("%s:%d: %s", file, line, name))
	})
	l.demand(err == nil, "%s:%v", file, err)
	l.file = file
}

// lookup puts a value in force by its key. The header of a known table is fine.
func (l *loader) lookup(key string, v any, rank int, origin, where string) {
	_, isHeader := v.(tomlTable)
	if f := l.rows[key]; f != nil {
		l.put(f, v, rank, origin, where)
	} else if !isHeader || !in("infer slots expect limits exec paths", key) {
		l.demand(false, "%s: found an unknown name, allowed %s", where, strings.Join(slices.Sorted(maps.Keys(l.rows)), " "))
	}
}

// put puts v in force unless a higher source has spoken; it is checked all the same. where names
// the source as its author wrote it. A text of the infer table may be a key that was pasted in
// the wrong place, so its length has to do.
func (l *loader) put(f *field, v any, rank int, origin, where string) {
	fresh := reflect.New(reflect.TypeOf(f.dst).Elem()).Elem()
	if allowed := l.store(f, fresh, v); allowed != "" {
		found := shown(v)
		if strings.Contains(found, `"`) && (strings.HasPrefix(f.key, "infer.") || len(found) > maxShown) {
			found = fmt.Sprintf("%d bytes of text", len(found)-len(`""`))
		}
		l.demand(false, "%s: found %s, allowed %s", where, found, allowed)
		return
	}
	same := [2]any{f.dst, rank}
	l.demand(l.named[same] == "" || l.named[same] == f.key, "%s: found %s as well, allowed one of them", where, l.named[same])
	if l.named[same] = f.key; rank >= l.inForce[f.dst].rank {
		reflect.ValueOf(f.dst).Elem().Set(fresh)
		l.inForce[f.dst] = given{f.key, origin, where, v, rank}
	}
}

// store gives dst the value v, or says what is allowed, in words that end an error. The types are
// those of TOML and are not converted: "5" is no number and 1 is no truth; but a setting with a
// fraction takes integers too. No setting can be an empty text, which is what unset looks like.
func (l *loader) store(f *field, dst reflect.Value, v any) (allowed string) {
	if dst.Kind() == reflect.Slice { // an empty list is a value, not unset
		items, ok := v.([]any)
		dst.Set(reflect.MakeSlice(dst.Type(), len(items), len(items)))
		for i, item := range items {
			if each := l.store(f, dst.Index(i), item); each != "" {
				return "a list, each " + each
			}
		}
		return keep(fmt.Sprintf("a list of at most %d", f.most), !ok || len(items) > f.most)
	}
	n, isInt := v.(int64)
	ok, numbers := isInt && n >= f.lo && n <= f.hi, fmt.Sprintf("from %d to %d", f.lo, f.hi)
	allowed = "an integer " + numbers
	switch dst := dst.Addr().Interface().(type) {
	case *bool:
		*dst, ok = v.(bool)
		allowed = "true or false"
	case *string:
		*dst, _ = v.(string)
		*dst, allowed = l.text(f.form, *dst)
		ok = *dst != ""
	case **float64:
		x, isFloat := v.(float64)
		x = cmp.Or(x, float64(n))
		*dst, ok = &x, ok || isFloat && x >= float64(f.lo) && x <= float64(f.hi)
		allowed = "a number " + numbers
	case **int64:
		*dst = &n
	case *int64:
		*dst = n
	case *int:
		*dst = int(n)
	case *time.Duration:
		*dst = time.Duration(n) * time.Millisecond
	}
	return keep(allowed, !ok)
}

// text gives a text as it is kept, "" = refused, and says what is allowed. A form that is none of
// the names here is a regular expression for the whole text, "" = any.
func (l *loader) text(form, s string) (kept, allowed string) {
	switch form {
	case "path":
		return l.path(s), "an absolute path, or ~/ with HOME set"
	case "socket":
		return endpoint("unix:" + l.path(s)), "an absolute path of at most 107 bytes"
	case "url":
		return keep(s, endpoint(s) != ""), "http:// or https:// with a host and no user name, or unix:/PATH of at most 112 bytes"
	case "duration":
		d, err := time.ParseDuration(s)
		return keep(s, err == nil && d >= 0), "a duration such as 10m, not negative"
	}
	form = cmp.Or(form, "(?s).+")
	return keep(s, regexp.MustCompile("^("+form+")$").MatchString(s)), "text that matches " + form
}

// finish checks what depends on several settings and on the command, and fills what follows from
// them. Only what a command uses can stop it: status does not care for a workspace, version for
// nothing at all. The slots of llama-server are counted from 0; with two requests on one slot
// they evict each other's cache.
func (l *loader) finish(reads bool) {
	c, slots := l.command, cmp.Or(l.expectSlots, 128)
	if l.replay != "" { // asks nobody; the URL stands in its messages, so that they are those of the recorded run
		l.url = strings.Replace(endpoint(l.server), "unix:", "http://localhost/v1/chat/completions#", 1)
	} else if in("exec serve probe config", c) {
		l.findServer(reads)
	}
	l.demand(l.home != "" || !in("serve turn status sessions cancel shutdown services", c),
		"%s needs a home and HOME is not set: set HOME or BELAY_HOME, or give --home", c)
	l.model = cmp.Or(l.model, keep("replay", l.replay != "" || c == "demo")) // a recording answers whatever is asked
	l.demand(l.model != "" || !in("exec serve", c), "found no model, allowed infer.model, --model or, for exec, BELAY_MODEL")
	l.demand(c != "serve" || l.expectTemplate != "" && l.expectCtx > 0 && l.expectSlots > 0,
		"serve needs expect.template_sha256, expect.n_ctx and expect.slots: `%s probe --config FILE` prints them", l.program)
	l.demand(max(l.slotMain, l.slotBackground) < slots && (l.slotMain != l.slotBackground || slots == 1),
		"slots: found main %d and background %d, allowed two below %d that differ (1: equal)", l.slotMain, l.slotBackground, slots)
	// A workspace that is missing would fail each command of a run, one by one and on the model's
	// account.
	info, err := os.Stat(l.workspace)
	l.demand(l.workspace == "" || err == nil && info.IsDir() || !in("exec demo serve", c),
		"paths.workspace: found %s, which is not a directory", l.workspace)
	// A command that can write the home writes the next run's configuration, and with it its
	// sandbox. Without a home there is still the root to refuse.
	for _, dir := range l.writable {
		l.demand(!holds(dir, cmp.Or(l.home, "/")), "exec.writable: found %s, allowed neither / nor what holds belay's home %s", dir, l.home)
	}
	l.keyNames = strings.Fields("BELAY_API_KEY CODEWHALE_API_KEY DEEPSEEK_API_KEY OPENAI_API_KEY NOTIFY_SOCKET " + l.keyFrom)
	for _, f := range l.fields {
		l.keyNames = append(l.keyNames, strings.Fields(f.env)...)
		g := l.inForce[f.dst]
		if g.key != f.key {
			g = given{origin: "default"}
		}
		value, _, hasQuery := strings.Cut(shown(g.value), "?") // some servers want the key in the query
		if f.key != "" {
			l.values = append(l.values, setting{f.key, value + keep(`?…"`, hasQuery), g.origin})
		}
	}
	l.values = append(l.values, setting{"infer.api_key", l.key.String(), cmp.Or(l.keyOrigin, "default")})
	l.expectTemplate, l.sandboxFlag = strings.ToLower(l.expectTemplate), l.inForce[&l.sandbox].where == "--sandbox"
	switch c {
	case "demo": // plays our own script, and persist asks for the literal flag
		l.auto, l.sandbox, l.sandboxFlag = true, "danger-full-access", true
	case "serve": // a local model that rambles holds the one slot
		l.maxTokens = cmp.Or(l.maxTokens, 8192)
	}
}

// findServer decides what is asked, and with which key: the first that may go there of a binding
// given as a flag, the environment, any other binding. The key of a vendor goes only to the
// vendor or, where the environment gives settings, to the BASE_URL that stands beside it. Without
// a URL the vendor whose key is set is asked. The names of three other programs are there so that
// an image or a CI job that was set up for one of them runs belay unchanged.
func (l *loader) findServer(reads bool) {
	if l.inForce[&l.keyFrom].rank == byFlag {
		l.boundKey()
	}
	for _, p := range [][2]string{{"BELAY", ""}, {"CODEWHALE", ""}, {"DEEPSEEK", "api.deepseek.com"}, {"OPENAI", "api.openai.com"}} {
		name, vendor, key := p[0]+"_API_KEY", p[1], l.environ[p[0]+"_API_KEY"]
		if reads && l.server == "" && vendor != "" && key != "" {
			l.put(l.rows["infer.base_url"], "https://"+vendor, byEnv, "env "+name, name)
		}
		// The whole texts are compared, scheme and path included: the same host may serve others
		// below another path, and plain http is another place than https.
		place := endpoint(l.server)
		if vendor == "" || place == endpoint("https://"+vendor) || reads && place == endpoint(l.environ[p[0]+"_BASE_URL"]) {
			l.useKey(name, key, "env "+name)
		} else if key != "" {
			const note = "%s not sent to %s: it belongs to %s or %s_BASE_URL; set BELAY_API_KEY to send it"
			l.keyNote = cmp.Or(l.keyNote, fmt.Sprintf(note, name, cmp.Or(hostOf(place), place), vendor, p[0]))
		}
	}
	l.boundKey()
	l.keyNote = keep(l.keyNote, l.key == "")
	l.baseURL, l.url = l.server, endpoint(l.server)
	if path, isUnix := strings.CutPrefix(l.url, "unix:"); isUnix {
		l.baseURL, l.socket, l.url = "", path, "http://localhost/v1/chat/completions" // HTTP demands a name
	}
	l.demand(l.url != "" || l.command == "config", "found no server, allowed infer.socket, infer.base_url or, for exec, these variables:\n"+
		"  export BELAY_BASE_URL=http://127.0.0.1:8080\n  export BELAY_MODEL=NAME\n  export BELAY_API_KEY=KEY, if the server wants one")
	// Key, prompts and code would cross the network as they are. The parsed address counts, since
	// 127.evil.example begins like one, and so do names below localhost.
	host := hostOf(l.url)
	addr, err := netip.ParseAddr(host)
	l.demand(!strings.HasPrefix(l.url, "http:") || l.allowHTTP || host == "localhost" || err == nil && addr.IsLoopback(),
		"infer.base_url: found plain http to %s, allowed https, loopback or infer.allow_insecure_http (BELAY_ALLOW_INSECURE_HTTP)", host)
}

// boundKey takes the key that infer.api_key_env or infer.api_key_file points at: the first line
// of the file, which must give no right to group or others. Whoever names a place wants its key
// sent, so one that is not there is an error, where a variable that nobody named may be missing.
// The name of the variable is not repeated: it may be the key itself.
func (l *loader) boundKey() {
	if l.key != "" || l.keyFrom == "" {
		return
	}
	from, key := l.inForce[&l.keyFrom], l.environ[l.keyFrom]
	if filepath.IsAbs(l.keyFrom) {
		// Between the two calls the file may change; whoever can do that is us or root.
		info, err := os.Stat(l.keyFrom)
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			err = fmt.Errorf("%s has mode %04o, allowed 0600", l.keyFrom, info.Mode().Perm())
		}
		data, readErr := os.ReadFile(l.keyFrom)
		err = cmp.Or(err, readErr)
		l.demand(err == nil, "%s: %v", from.key, err)
		key, _, _ = strings.Cut(string(data), "\n")
	}
	l.demand(strings.TrimSpace(key) != "", "%s: found no key where it points", from.key)
	l.useKey(from.key, key, from.origin)
}

// useKey keeps the first key it is given. A control character would end the header line that
// carries it.
func (l *loader) useKey(where, key, origin string) {
	if key = strings.TrimSpace(key); l.key == "" && key != "" {
		l.demand(!regexp.MustCompile("[[:cntrl:]]").MatchString(key), "%s: found a control character, allowed one line of text", where)
		l.key, l.keyOrigin = secret(key), origin
	}
}

// endpoint gives the URL that a base URL stands for, "" = none. Whether users write the version
// into it differs from vendor to vendor, and some paste the whole address of the call, so: no
// path means /v1, a path is taken as given, less chat/completions at its end; then that is
// appended, before a query, which Azure needs for its version. It is normalised so that equal
// places have equal texts. unix:/PATH is a place as well. A user name is refused since it comes
// with a secret, an IPv6 zone since net/url gives it back unescaped.
func endpoint(raw string) string {
	raw = strings.TrimSpace(raw)
	if path, isUnix := strings.CutPrefix(raw, "unix:"); isUnix {
		path = filepath.Clean(strings.TrimPrefix(path, "//"))
		return keep("unix:"+path, filepath.IsAbs(path) && len(path) <= maxSocketPath)
	}
	u, err := url.Parse(raw) // its error repeats the URL, so it goes no further
	if err != nil || u.Hostname() == "" || u.User != nil || u.Fragment != "" || strings.Contains(u.Host, "%") || !in("http https", u.Scheme) {
		return ""
	}
	// The path stays escaped, or a%2Fb would turn into two parts.
	path := cmp.Or(strings.TrimRight(u.EscapedPath(), "/"), "/v1")
	path = strings.TrimRight(strings.TrimSuffix(path, "/chat/completions"), "/")
	host := strings.TrimSuffix(strings.ToLower(u.Host), cmp.Or(keep(":443", u.Scheme == "https"), ":80"))
	return u.Scheme + "://" + host + path + "/chat/completions" + keep("?"+u.RawQuery, u.RawQuery != "")
}

// hostOf gives the host of a place, "" = it is a socket.
func hostOf(place string) string {
	u, _ := url.Parse(place) // nil where the path of a socket looks like a broken escape
	return cmp.Or(u, &url.URL{}).Hostname()
}

// holds reports whether path is dir or lies below it, once symbolic links are followed. The home
// may not be there yet, then its parent counts.
func holds(dir, path string) bool {
	real := func(p string) string { r, _ := filepath.EvalSymlinks(p); return cmp.Or(r, p) }
	path = real(filepath.Join(real(filepath.Dir(path)), filepath.Base(path)))
	return strings.HasPrefix(path+"/", strings.TrimRight(real(dir), "/")+"/")
}

// path makes a path absolute and clean, "" = it is relative or there is no HOME for its ~/. A
// relative HOME would put the journal and the services of a run wherever it was started.
func (l *loader) path(s string) string {
	if rest, inHome := strings.CutPrefix(s, "~/"); inHome {
		s = filepath.Join(l.environ["HOME"], rest)
	}
	return keep(filepath.Clean(s), filepath.IsAbs(s))
}

// keep gives s, or "" if it is not good: with cmp.Or it makes a choice of one line.
func keep(s string, good bool) string {
	if !good {
		return ""
	}
	return s
}

// shown is a value as TOML would write it, which is as Go does but for lists.
func shown(v any) string {
	s := fmt.Sprintf("%#v", v)
	if items, isList := strings.CutPrefix(s, "[]interface {}{"); isList {
		s = "[" + strings.TrimSuffix(items, "}") + "]"
	}
	return cmp.Or(keep("unset", v == nil), s)
}

// demand notes a problem unless good holds.
func (l *loader) demand(good bool, format string, args ...any) {
	if !good {
		l.problems += fmt.Sprintf(format, args...) + "\n"
	}
}

// in finds a name in a blank-separated set; "" is in none.
func in(set, name string) bool { return slices.Contains(strings.Fields(set), name) }

// tomlTable stands for a table among the values of a file.
type tomlTable struct{}

// tomlReader is the part of TOML 1.0 that this schema needs: tables, keys, one-line strings,
// integers, floats, booleans and lists. The rest (dates, inline tables, arrays of tables,
// multi-line strings, inf and nan, tables in tables) is refused; nothing is read wrongly. What
// a pattern leaves of a word is what ends the reading.
type tomlReader struct {
	src, msg string // what is left, closed by a line end; what is wrong, "" = nothing
	line     int    // of src, from 1
	patterns map[string]*regexp.Regexp
}

// parseTOML reads a whole document into a flat map from dotted names to values: string, int64,
// float64, bool, []any or tomlTable. Parts of a name that need quotes have them. A table has an
// entry of its own, so that an empty one shows. each is told every statement that is right, with
// its line, up to the first error, which begins with its line and ends the reading.
func parseTOML(data []byte, each func(name string, v any, line int)) (map[string]any, error) {
	// A CR is only good before an LF, and is dropped there.
	r := &tomlReader{src: strings.ReplaceAll(string(data), "\r\n", "\n") + "\n", line: 1, patterns: map[string]*regexp.Regexp{}}
	values, section := map[string]any{}, []string{}
	// Checked at once for all places: TOML allows no control character but the tab, and only
	// UTF-8; a byte that is none is U+FFFD here.
	if i := regexp.MustCompile(`[\x00-\x08\x0b-\x1f\x7f-\x9f\x{fffd}]`).FindStringIndex(r.src); i != nil {
		r.line += strings.Count(r.src[:i[0]], "\n")
		r.fail("found a control character or bytes that are not UTF-8", r.line)
	}
	for r.gap(); r.src != ""; r.gap() {
		line, path, v := r.line, section, any(tomlTable{})
		if r.next(`\[`) != "" {
			section = r.key("]")
			path = section
		} else {
			path, v = slices.Concat(section, r.key("=")), r.value(0)
		}
		r.next(`[ \t]*(#[^\n]*)?`)
		name, top := strings.Join(path, "."), path[0]
		_, isHeader := v.(tomlTable)
		_, inTable := values[top].(tomlTable)
		// Two levels are all that the schema has. Deeper ones, though right, are refused: the rules
		// for tables that are opened in pieces are the part of TOML that readers get wrong. A table
		// is made once: by its header, or by dotted keys above all headers.
		switch {
		case !strings.HasPrefix(r.src, "\n"): // after a failure, too
			r.fail("found more after the value; dates and multi-line strings are not supported", r.line)
		case len(path) > 2 || isHeader && len(path) > 1:
			r.fail("found a table in a table, which is not supported", line)
		case values[name] != nil || values[top] != nil && !inTable:
			r.fail("found "+name+" a second time", line)
		default:
			values[top] = tomlTable{}
			values[name] = v
			each(name, v, line)
		}
	}
	if r.msg != "" {
		return nil, fmt.Errorf("%d: %s", r.line, r.msg)
	}
	return values, nil
}

// key reads a key, dotted or not, and what has to follow it. Its parts come as they would be
// written, without quotes where none are needed, so that "a" and a are one key.
func (r *tomlReader) key(end string) (parts []string) {
	for more := true; more; more = r.next(`\.`) != "" {
		r.next(`[ \t]+`)
		part := r.next(bareKey)
		if part == "" {
			if part = r.text(); !regexp.MustCompile("^" + bareKey + "$").MatchString(part) {
				part = strconv.Quote(part)
			}
		}
		parts = append(parts, part)
		r.next(`[ \t]+`)
	}
	if r.next(end) == "" {
		r.fail("found no "+end+" after the key", r.line)
	}
	return parts
}

// value reads one value; depth is the number of lists around it. Between the brackets of a list,
// and only there, lines may end; a comma may stand before the closing one. An integer that does
// not fit is refused and not read as a float. strconv checks the underscores: they stand between
// digits in both languages. It knows more numbers than TOML, so the pattern comes first.
func (r *tomlReader) value(depth int) any {
	r.next(`[ \t]+`)
	word := r.next(`true|false|0[xob][[:xdigit:]][[:xdigit:]_]*|[+-]?(0|[1-9][0-9_]*)(\.[0-9][0-9_]*)?([eE][+-]?[0-9][0-9_]*)?`)
	n, notInt := strconv.ParseInt(word, 0, 64)
	x, notFloat := strconv.ParseFloat(word, 64)
	switch {
	case word == "true" || word == "false":
		return word == "true"
	case notInt == nil:
		return n
	case notFloat == nil && strings.ContainsAny(word, ".eE"):
		return x
	case word != "" || depth == maxNested:
		r.fail("found a number that does not fit 64 bits, or lists in lists", r.line)
		return nil
	case r.next(`\[`) == "":
		return r.text()
	}
	items := []any{} // not nil, since an empty list is a value
	for r.gap(); r.msg == "" && r.next(`\]`) == ""; r.gap() {
		items = append(items, r.value(depth+1))
		if r.gap(); r.next(",") == "" && !strings.HasPrefix(r.src, "]") {
			r.fail("found neither , nor ] after an item of a list", r.line)
		}
	}
	return items
}

// text reads a string on one line. Go's strings are TOML's basic strings with more escapes, which
// the pattern refuses; strconv refuses what is no code point. Two quotes in a row are an empty
// text here, so the third one of """ is left over and refused. The text is not repeated in the
// error: it may be a key.
func (r *tomlReader) text() string {
	s := r.next(`'[^'\n]*'|"([^"\\\n]|\\(["\\btnfr]|u[[:xdigit:]]{4}|U[[:xdigit:]]{8}))*"`)
	if strings.HasPrefix(s, "'") {
		return s[1 : len(s)-1]
	}
	s, err := strconv.Unquote(s)
	if err != nil {
		r.fail("found no key or no value: texts need quotes; dates, inline tables, arrays of tables, inf and nan are not supported", r.line)
	}
	return s
}

// gap passes blanks, comments and line ends.
func (r *tomlReader) gap() { r.line += strings.Count(r.next(`([ \t\n]|#[^\n]*)*`), "\n") }

// next passes what pattern matches at the cursor, and gives it.
func (r *tomlReader) next(pattern string) string {
	if r.patterns[pattern] == nil {
		r.patterns[pattern] = regexp.MustCompile("^(" + pattern + ")")
	}
	found := r.patterns[pattern].FindString(r.src)
	r.src = r.src[len(found):]
	return found
}

// fail keeps the first message and its line; the others follow from it. Nothing is left to read.
func (r *tomlReader) fail(msg string, line int) {
	if r.msg == "" {
		r.msg, r.line = msg, line
	}
	r.src = ""
}

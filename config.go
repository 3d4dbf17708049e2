//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// config.go turns argv, the environment and one file into a config that is never written again.
// It owns the precedence of settings, the schema, the TOML subset, the rules for URLs and the
// choice of the key. It never opens anything but the config file and the key file, and never
// prints a secret: text of the infer table is described by its length in errors, because that is
// where keys get pasted.
//
// Precedence: sources are applied one over the other, as the steps of loadConfig. One source gives
// the whole value of a setting; lists are not merged. From the lowest to the highest:
//
//	              exec demo config services          serve probe turn status sessions cancel shutdown
//	default       the def column of schema           the same, but for workspace and URL
//	file          --config, else BELAY_CONFIG_PATH,  --config, else <home>/config.toml
//	              else <home>/config.toml
//	environment   the env column of schema           not read, but BELAY_HOME is a default
//	flag          --model and the like, --set        the same
//
// The home that holds the file is what flags and variables say; paths.home of the file then moves
// everything but the file. infer.socket and infer.base_url are one setting, and so are
// infer.api_key_env and infer.api_key_file: the highest source that names either wins, both in one
// source is an error. Which variable holds the key is decided by findServer.

const (
	// help and version read no file and no environment: they work when everything else is broken.
	allCommands = "exec serve turn status sessions cancel shutdown services probe config demo version help"
	envCommands = "exec demo config services" // the environment gives settings

	maxSocketPath = 107 // bytes: sun_path of unix(7) is 108 with its NUL
)

// secret is a key. It is behind a pointer because fmt, whatever the verb and however deep the
// value lies, prints an inner pointer as an address. A grep for reveal lists every use.
type secret struct{ text *string }

func (s secret) reveal() string { return *cmp.Or(s.text, new(string)) }
func (s secret) String() string { return cmp.Or(keep("[unset]", s.reveal() == ""), "[redacted]") }

// helpRequest asks for the help on one of allCommands, "" = of the program.
type helpRequest struct{ topic string }

func (e *helpRequest) Error() string { return "help " + e.topic }

// setting is one line of `belay config`. origin: flag, env NAME, file:LINE or default. where is
// what an error about it begins with.
type setting struct{ key, value, origin, where string }

// config is set once, by loadConfig, and only read from then on; everybody may read it without a
// lock. A field has a value of its schema row's range whatever the command, or its zero where the
// row has no default.
type config struct {
	// program is the base name of argv[0]; command one word of allCommands; args its operands.
	// workspace, home and socket are absolute and clean, "" = none: no workspace only for serve and
	// its clients, no home only where the command does without, no socket means TCP.
	program, command, workspace, home, socket, sandbox, format, prompt, appendPrompt, session, record, replay string
	// url is what is asked, with chat/completions and query. Why a key that is there is not sent
	// is in keyNote. expectTemplate is a SHA-256 in lower-case hex.
	url, model, keyHeader, reasoningEffort, keyNote, expectTemplate string
	// keyNames are the environment names that no child may see: all that this file reads (with
	// HOME excepted), NOTIFY_SOCKET, through which a child could declare us ready, and each that a
	// source has in infer.api_key_env, in force or not.
	args, writable, envKeep, keyNames []string
	// sandboxFlag: sandbox is what --sandbox said, literally; persist depends on it.
	auto, sandboxFlag, network, noProjectConfig, verbose, jsonOut, resume, now, promptFromStdin, waitForServer bool
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

// field is one row of the schema. A row without a key is a flag alone and has no other source
// but the environment. lo and hi are inclusive and bound each number of a setting, most bounds
// the length of a list. form says what a text has to look like: a name that store knows, or a
// regular expression for the whole; what is no text has none.
type field struct {
	key, flag, on, env, form, origin string // on: commands that know the flag, "" = all; env: the first variable set counts; sets are blank-separated; origin of def, "" = default
	def, dst                         any    // def: nil and "" = none; dst: a pointer to where the value goes
	lo, hi, most                     int64
}

// loader is the state of one loadConfig. It collects the problems of a step instead of ending at
// the first, because a user who mends a configuration in CI pays minutes for each run.
type loader struct {
	*config
	argv                               []string
	environ                            map[string]string // trimmed; "" means unset
	cwd, conf, server, keyFrom, period string            // keyFrom: variable or absolute path; period: --timeout
	version, allowHTTP                 bool
	inForce                            map[any]setting // by dst
	problems                           error           // one a line
}

// loadConfig is the only maker of a config. args is os.Args, env os.Environ(), cwd absolute:
// relative paths of flags start there, while the paths of files and variables have to be
// absolute, since nobody knows from where a service manager starts us. It reads at most two
// files, changes nothing, and may be called again. The error tells everything that one source has
// wrong, or is a *helpRequest; the config is then of no use.
func loadConfig(args, env []string, cwd string) (*config, error) {
	l := &loader{config: &config{program: filepath.Base(args[0])}, argv: args[1:], environ: map[string]string{}, cwd: cwd, inForce: map[any]setting{}}
	// Blanks around a value are never meant: they come from files with one NAME=VALUE a line and
	// from secrets that end in a line end.
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		l.environ[name] = strings.TrimSpace(value)
	}
	// The command line comes twice: first it says which command this is and where its file lies,
	// then it is the highest source. A step whose forerunner found problems would repeat them.
	for _, step := range []func(){l.commandLine, l.readFile, l.environment, l.commandLine, l.finish} {
		if l.problems == nil && l.command != "version" {
			step()
		}
	}
	return l.config, l.problems
}

// schema is every key and every flag, in the order in which `belay config` shows them. It is made
// anew for each use: what is fixed is the rows, and defaults depend on the command. The unit
// is in the name of a key, so no value needs a suffix: _ms are milliseconds, _bytes are bytes. A
// value is checked against its row whatever its source, defaults included. A bound without a
// reason keeps typing errors out and is far from any value that makes sense. Reasons: vendors
// stop at a temperature of 2, local servers do not; a long prompt is silent for minutes; a
// command's timeout is the Bash tool's clamp; weights may come from a slow disk; the first byte
// of a frame's length is 0; a client has a queue of 4 MiB, a writable directory an open file.
func (l *loader) schema() []*field {
	const models, urls = "BELAY_MODEL CODEWHALE_MODEL DEEPSEEK_MODEL OPENAI_MODEL", "BELAY_BASE_URL CODEWHALE_BASE_URL DEEPSEEK_BASE_URL OPENAI_BASE_URL"
	const variable, printable, some = "[A-Za-z_][A-Za-z0-9_]*", `[^[:cntrl:]"]{1,200}`, `(.|\n)+` // no name is longer, a pasted file is
	// Where belay was started says nothing to a daemon and its clients.
	reads, deepseek, openai := in(envCommands, l.command), l.environ["DEEPSEEK_API_KEY"] != "", l.environ["OPENAI_API_KEY"] != ""
	vendor := cmp.Or(keep("DEEPSEEK", reads && deepseek), keep("OPENAI", reads && openai))
	return []*field{
		{key: "infer.socket", form: "socket", dst: &l.server}, {key: "infer.wait_for_server", dst: &l.waitForServer, def: false},
		{key: "infer.base_url", flag: "base-url", env: urls, form: "url", dst: &l.server, def: keep("https://api."+strings.ToLower(vendor)+".com", vendor != ""), origin: "env " + vendor + "_API_KEY"},
		{key: "infer.model", flag: "model", env: models, form: printable, dst: &l.model},
		{key: "infer.api_key_env", form: variable, dst: &l.keyFrom}, {key: "infer.api_key_file", form: "path", dst: &l.keyFrom},
		{key: "infer.api_key_header", form: "[A-Za-z0-9_-]+", dst: &l.keyHeader},
		{key: "infer.max_tokens", dst: &l.maxTokens, lo: 1, hi: 1<<31 - 1}, {key: "infer.seed", dst: &l.seed, lo: -1 << 63, hi: 1<<63 - 1},
		{key: "infer.temperature", dst: &l.temperature, hi: 100}, {key: "infer.top_p", dst: &l.topP, hi: 1}, {key: "infer.reasoning_effort", form: printable, dst: &l.reasoningEffort},
		{key: "infer.allow_insecure_http", env: "BELAY_ALLOW_INSECURE_HTTP", dst: &l.allowHTTP, def: false},
		{key: "slots.main", dst: &l.slotMain, hi: 127, def: 0}, {key: "slots.background", dst: &l.slotBackground, hi: 127, def: 1},
		{key: "expect.template_sha256", form: "[0-9a-fA-F]{64}", dst: &l.expectTemplate},
		{key: "expect.n_ctx", dst: &l.expectCtx, lo: 512, hi: 16_777_216}, {key: "expect.slots", dst: &l.expectSlots, lo: 1, hi: 128},
		{key: "limits.poll_ms", dst: &l.poll, lo: 10, hi: 60_000, def: 1000}, {key: "limits.liveness_ms", dst: &l.liveness, lo: 100, hi: 3_600_000, def: 300_000},
		{key: "limits.retry_backoff_ms", dst: &l.backoff, hi: 600_000, most: 10, def: []any{500, 2000, 8000, 20_000}},
		{key: "limits.max_turns", flag: "max-turns", on: "exec", dst: &l.maxTurns, lo: 1, hi: 1<<31 - 1, def: 200},
		{key: "limits.command_timeout_ms", dst: &l.commandTimeout, lo: 1000, hi: 600_000, def: 120_000},
		{key: "limits.max_total_tokens", dst: &l.maxTotalTokens, hi: 1<<63 - 1, def: 0},
		{key: "limits.drain_ms", dst: &l.drain, hi: 3_600_000, def: 30_000}, {key: "limits.load_timeout_ms", dst: &l.loadTimeout, lo: 1000, hi: 86_400_000, def: 600_000},
		{key: "limits.max_frame_bytes", dst: &l.maxFrame, lo: 64 << 10, hi: 15 << 20, def: 8 << 20},
		{key: "limits.max_clients", dst: &l.maxClients, lo: 1, hi: 1024, def: 64}, {key: "limits.max_queue", dst: &l.maxQueue, hi: 1024, def: 16},
		{key: "exec.sandbox", flag: "sandbox", on: "exec", env: "BELAY_SANDBOX", dst: &l.sandbox, def: "workspace-write",
			form: "read-only|workspace-write|external-sandbox|danger-full-access"},
		{key: "exec.network", flag: "network", on: "exec", env: "BELAY_NETWORK", dst: &l.network, def: false},
		{key: "exec.writable", flag: "writable", on: "exec", form: "path", dst: &l.writable, most: 100, def: []any{}},
		{key: "exec.env_keep", form: variable, dst: &l.envKeep, most: 100, def: []any{}},
		{key: "paths.home", flag: "home", env: "BELAY_HOME", form: "path", dst: &l.home, def: l.path(cmp.Or(l.environ["BELAY_HOME"], "~/.belay"))},
		{key: "paths.workspace", flag: "workspace C", form: "path", dst: &l.workspace, def: keep(l.cwd, reads)},
		{flag: "config", env: "BELAY_CONFIG_PATH", form: "path", dst: &l.conf}, {flag: "auto", on: "exec", dst: &l.auto},
		{flag: "no-project-config", dst: &l.noProjectConfig}, {flag: "verbose", dst: &l.verbose}, {flag: "version", dst: &l.version},
		{flag: "timeout", on: "exec", form: "duration", dst: &l.period}, {flag: "replay", on: "exec", form: some, dst: &l.replay},
		{flag: "append-system-prompt", on: "exec", form: some, dst: &l.appendPrompt}, {flag: "record", on: "exec", form: some, dst: &l.record},
		{flag: "json", on: "exec demo turn status sessions cancel shutdown services probe", dst: &l.jsonOut},
		{flag: "output-format", on: "exec demo", form: "text|json|stream-json", dst: &l.format}, {flag: "now", on: "shutdown", dst: &l.now},
		{flag: "session", on: "turn", form: some, dst: &l.session}, {flag: "resume", on: "turn", dst: &l.resume},
	}
}

// commandLine reads flags up to the command and behind it, and checks what stands after them: from
// the first word of a prompt on everything is prompt. Its words are joined by one blank; whoever
// needs the exact text quotes it. The word - alone is the one case in which stdin is read.
func (l *loader) commandLine() {
	rest := l.flags(l.argv)
	if len(rest) > 0 && in(allCommands, rest[0]) {
		l.command = rest[0] // now, since the flags behind it are those that it knows
		l.args = l.flags(rest[1:])
	}
	l.command = cmp.Or(keep("version", l.version), l.command)
	words := strings.Join(l.args, " ")
	switch c, n := l.command, len(l.args); {
	case l.problems != nil:
	case c == "":
		l.demand(false, "found command %q, allowed %s; see %s help", append(rest, "")[0], allCommands, l.program)
	case c == "help" && (n == 0 || in(allCommands, words)):
		l.problems = &helpRequest{words}
	case in("exec turn", c):
		l.prompt, l.promptFromStdin = words, words == "-"
		l.demand(strings.TrimSpace(words) != "", "%s: found no prompt, allowed words, or - to read it from stdin", c)
	default:
		fits := n == 0 && c != "cancel" || n == 1 && c == "cancel" || n == 2 && c == "services" && l.args[0] == "stop"
		allowed := map[string]string{"cancel": "the ID of a session", "services": "nothing or stop TASK", "help": "nothing or one of " + allCommands}
		l.demand(fits, "%s: found %q, allowed %s", c, words, cmp.Or(allowed[c], "nothing"))
	}
	l.demand(l.record == "" || l.replay == "", "--record: found --replay as well, allowed one of them")
	l.demand(!l.jsonOut || l.format == "" || l.format == "json", "--json: found --output-format %s as well, allowed one of them", l.format)
}

// flags takes the flags at the head of args and gives the rest. One that only other commands know
// is refused with their names; what follows it may be its value, so no more is read into that.
// Package flag takes -x and --x alike and ends at -- or at the first word that is no flag. Its
// errors about values repeat them, so it hears of none: give reports by itself.
func (l *loader) flags(args []string) (rest []string) {
	fs := flag.NewFlagSet(l.program, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Func("set", "", func(s string) error {
		key, word, ok := strings.Cut(s, "=")
		if l.demand(ok, "--set: found no =, allowed KEY=VALUE, VALUE as in TOML or a bare word"); ok { // what has no = may be a key
			l.put(key, typed("", word), "flag", "--set "+key)
		}
		return nil
	})
	for _, f := range l.schema() {
		items, add := []any{}, fs.Func // a list takes one item a flag
		foreign := f.on != "" && !in(f.on, l.command)
		if _, isSwitch := f.dst.(*bool); isSwitch || foreign {
			add = fs.BoolFunc
		}
		for name := range strings.FieldsSeq(f.flag) {
			add(name, "", func(s string) error {
				if l.demand(!foreign, "--%s: found %s, allowed after %s", name, cmp.Or(keep("after "+l.command, l.command != ""), "before the command"), f.on); foreign {
					return nil
				}
				// A relative path is meant from the current directory; a shell leaves the ~ of --home=~/x alone.
				relative := f.form == "path" && s != "" && !strings.HasPrefix(s, "~/") && !filepath.IsAbs(s)
				s = cmp.Or(keep(filepath.Join(l.cwd, s), relative), s)
				v := typed(f.form, s)
				if items = append(items, v); f.most > 0 {
					v = items
				}
				l.give(f, v, "flag", "--"+name)
				return nil
			})
		}
	}
	err := fs.Parse(args)
	l.demand(!errors.Is(err, flag.ErrHelp), "%w", &helpRequest{l.command})
	fault, name, _ := strings.Cut(fmt.Sprint(err), ": -")
	l.demand(err == nil, "--%s: %s; see %s help", name, fault, l.program)
	return fs.Args()
}

// typed reads a flag or variable: as a TOML value, or else as a bare word, so that qwen-2.5 needs no
// quotes, which a shell would take away anyway. A broken text or list is a word that no setting
// takes. What has a form is meant as a text and never looked into.
func typed(form, s string) any {
	if form == "" {
		values, err := parseTOML([]byte("v = "+s), func(string, any, int) {})
		if err == nil && len(values) == 1 { // more where s has lines of its own
			return values["v"]
		}
	}
	return s
}

// readFile applies the configuration file. Only one that --config names has to be there. One that
// is there and cannot be read is an error, since it may ask for a stricter sandbox; one in a
// directory that we may not search counts as absent.
func (l *loader) readFile() {
	home := cmp.Or(l.home, l.path(cmp.Or(l.environ["BELAY_HOME"], "~/.belay")))
	file := cmp.Or(l.conf, keep(l.path(l.environ["BELAY_CONFIG_PATH"]), in(envCommands, l.command)), keep(home+"/config.toml", home != ""))
	// A home below a file (ENOTDIR) or one that another user owns (EACCES, common where a container
	// runs with a foreign uid) holds no configuration that could be meant for us.
	if _, err := os.Stat(file); l.conf != "" || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) && !errors.Is(err, syscall.ENOTDIR) {
		data, err := os.ReadFile(file)
		l.demand(err == nil, "%s: %v", cmp.Or(l.inForce[&l.conf].where, "reading the configuration"), err)
		// The statements above a syntax error are checked as well, so that one run tells everything.
		_, err = parseTOML(data, func(name string, v any, line int) {
			l.put(name, v, fmt.Sprintf("file:%d", line), fmt.Sprintf("%s:%d: %s", file, line, name))
		})
		l.demand(err == nil, "%s:%v", file, err)
	}
}

// environment applies variables, for the commands that are not deaf to them, and defaults where no
// other source has spoken.
func (l *loader) environment() {
	for _, f := range l.schema() {
		_, given := l.inForce[f.dst]
		names := slices.DeleteFunc(strings.Fields(keep(f.env, in(envCommands, l.command))), func(name string) bool { return l.environ[name] == "" })
		switch {
		case len(names) > 0:
			l.give(f, typed(f.form, l.environ[names[0]]), "env "+names[0], names[0])
		case !given && f.def != nil && f.def != "":
			l.give(f, f.def, cmp.Or(f.origin, "default"), f.key)
		}
	}
}

// put puts a value in force by its key. The header of a known table is fine. An error about a name
// in a known table shows the keys of that table, one about a key without its table that key.
func (l *loader) put(key string, v any, origin, where string) {
	keys := ""
	for _, f := range l.schema() {
		if keys += " " + f.key; f.key == key && key != "" {
			l.give(f, v, origin, where)
			return
		}
	}
	find := func(form string) string { return strings.Join(regexp.MustCompile(form).FindAllString(keys, -1), "") }
	table, name, _ := strings.Cut(regexp.QuoteMeta(strings.ToValidUTF8(key, "\uFFFD")), `\.`)
	near := find(" " + table + `\.\S+`)
	l.demand(v == nil && near != "", "%s: found an unknown name, allowed%s", where, cmp.Or(near, find(` \S+\.`+cmp.Or(name, table, "-")+`\b`), " the keys of infer slots expect limits exec paths, which "+l.program+" config lists"))
}

// give puts v in force at the dst of f. where names the source as its author wrote it. A text of
// the infer table may be a key that was pasted in the wrong place, so its length has to do.
func (l *loader) give(f *field, v any, origin, where string) {
	allowed := l.store(f, reflect.ValueOf(f.dst).Elem(), v)
	text, _ := json.Marshal(v) // as TOML would write it; no error, v came from text
	found, before := string(text), l.inForce[f.dst]
	l.keyNames = append(l.keyNames, strings.Fields(keep(fmt.Sprint(v), f.key == "infer.api_key_env"))...)
	// Some servers want the key in the query of the URL.
	l.inForce[f.dst] = setting{f.key, cmp.Or(keep(regexp.MustCompile(`\?.*"`).ReplaceAllString(found, `?[redacted]"`), f.key == "infer.base_url"), found), origin, where}
	hidden := keep(fmt.Sprintf("%d bytes of text", len(text)-len(`""`)), strings.HasPrefix(f.key, "infer.") && strings.Contains(found, `"`))
	l.demand(allowed == "", "%s: found %s, allowed %s", where, cmp.Or(hidden, found), allowed)
	source, _, _ := strings.Cut(origin, ":")
	l.demand(before.key == f.key || !strings.HasPrefix(before.origin, source), "%s: found %s as well, allowed one of them", where, before.key)
}

// store gives dst the value v, or says what is allowed, in words that end an error. The types are
// those of TOML and are not converted: "5" is no number and 1 is no truth; but a setting with a
// fraction takes integers too. No setting can be an empty text, which is what unset looks like.
func (l *loader) store(f *field, dst reflect.Value, v any) (allowed string) {
	value, ok := reflect.ValueOf(v), false
	switch dst.Kind() {
	case reflect.Slice: // an empty list is a value, not unset
		items, isList := v.([]any)
		allowed = keep(fmt.Sprintf("a list of at most %d", f.most), !isList || int64(len(items)) > f.most)
		dst.Set(reflect.MakeSlice(dst.Type(), len(items), len(items)))
		for i, item := range items {
			allowed = cmp.Or(allowed, l.store(f, dst.Index(i), item))
		}
		return allowed
	case reflect.Pointer: // nil is unset
		dst.Set(reflect.New(dst.Type().Elem()))
		return l.store(f, dst.Elem(), v)
	case reflect.Bool:
		ok, allowed = value.Kind() == reflect.Bool, "true or false"
		dst.SetBool(ok && value.Bool())
	case reflect.String:
		s, _ := v.(string)
		switch f.form {
		case "path":
			s, allowed = l.path(s), "an absolute path in UTF-8, or ~/ with HOME set"
		case "socket":
			s, allowed = endpoint("unix:"+l.path(s)), "an absolute path of at most 107 bytes"
		case "url":
			s, allowed = keep(s, endpoint(s) != ""), "http:// or https:// with a host, a port from 1 to 65535 if any and no user name, or unix:/PATH of at most 112 bytes"
		case "duration":
			d, err := time.ParseDuration(s)
			s, allowed = keep(s, err == nil && d >= 0), "a duration such as 10m, not negative"
		default:
			s, allowed = keep(s, regexp.MustCompile("^("+f.form+")$").MatchString(s)), "text that matches "+f.form
		}
		dst.SetString(s)
		ok = s != ""
	default:
		allowed = cmp.Or(keep("a number", dst.CanFloat()), keep("an integer without point or exponent", value.CanFloat()), "an integer") + fmt.Sprintf(" from %d to %d", f.lo, f.hi)
		if value.CanInt() || value.CanFloat() && dst.CanFloat() {
			x := value.Convert(reflect.TypeFor[float64]()).Float()
			ok = x >= float64(f.lo) && x <= float64(f.hi)
			dst.Set(value.Convert(dst.Type()))
		}
		if dst.Type() == reflect.TypeFor[time.Duration]() {
			dst.SetInt(dst.Int() * int64(time.Millisecond))
		}
	}
	return keep(allowed, !ok)
}

// finish checks what depends on several settings and on the command, and fills what follows from
// them. Only what a command uses can stop it: status does not care for a workspace, version for
// nothing at all. The slots of llama-server are counted from 0; with two requests on one slot
// they evict each other's cache.
func (l *loader) finish() {
	c, slots := l.command, cmp.Or(l.expectSlots, 128)
	place := endpoint(keep(l.server, in("exec serve probe config", c)))
	path, isUnix := strings.CutPrefix(place, "unix:")
	l.socket, l.url = keep(path, isUnix), cmp.Or(keep("http://localhost/v1/chat/completions", isUnix), place) // HTTP demands a name
	// A recording needs neither server nor key: the URL is there for messages.
	if in("exec serve probe config", c) && l.replay == "" {
		l.findServer(place)
	}
	l.model = cmp.Or(l.model, keep("replay", l.replay != "" || c == "demo")) // a recording answers whatever is asked
	l.demand(l.home != "" || in("exec demo config probe", c), "%s needs a home: set HOME or BELAY_HOME to an absolute path, or give --home", c)
	l.demand(l.model != "" || !in("exec serve", c), "found no model, allowed infer.model, --model or, for exec, BELAY_MODEL")
	l.demand(c != "serve" || l.expectTemplate != "" && l.expectCtx > 0 && l.expectSlots > 0, "expect: found not all of template_sha256, n_ctx and slots, which %s probe --config FILE prints", l.program)
	l.demand(max(l.slotMain, l.slotBackground) < slots && (l.slotMain != l.slotBackground || slots == 1),
		"slots: found main %d and background %d, allowed two below %d that differ (both 0 where expect.slots is 1)", l.slotMain, l.slotBackground, slots)
	// A workspace that is missing would fail each command of a run, one by one and on the model's
	// account.
	info, err := os.Stat(l.workspace)
	l.demand(err == nil && info.IsDir() || c == "serve" && l.workspace == "" || !in("exec serve", c), "%s: found %q, allowed a directory that exists", cmp.Or(l.inForce[&l.workspace].where, "paths.workspace"), l.workspace)
	// A command that can write the home writes the next run's configuration, and with it its
	// sandbox. Links are followed where the sandbox is made, see planSandbox.
	holdsHome := func(dir string) bool { return strings.HasPrefix(l.home+"/", strings.TrimRight(dir, "/")+"/") }
	l.demand(!slices.ContainsFunc(l.writable, holdsHome), "exec.writable: found %q, allowed nothing that holds / or %s", l.writable, l.home)
	l.keyNames = append(l.keyNames, strings.Fields("BELAY_API_KEY CODEWHALE_API_KEY DEEPSEEK_API_KEY OPENAI_API_KEY NOTIFY_SOCKET")...)
	for _, f := range l.schema() {
		l.keyNames = append(l.keyNames, strings.Fields(f.env)...)
		s := l.inForce[f.dst]
		if s.key != f.key {
			s = setting{key: f.key, value: "unset", origin: "default"}
		}
		if f.key != "" {
			l.values = append(l.values, s)
		}
	}
	l.values = append(l.values, setting{key: "infer.api_key", value: l.key.String(), origin: cmp.Or(l.inForce[&l.keyFrom].origin, "default")})
	// demo plays our own script, and persist asks for the literal flag.
	l.auto, l.sandbox = l.auto || c == "demo", cmp.Or(keep("danger-full-access", c == "demo"), l.sandbox)
	l.expectTemplate, l.sandboxFlag = strings.ToLower(l.expectTemplate), c == "demo" || l.inForce[&l.sandbox].where == "--sandbox"
	l.timeout, _ = time.ParseDuration(cmp.Or(l.period, "0"))
	// A local model that rambles holds the one slot.
	l.format, l.maxTokens = cmp.Or(l.format, keep("json", l.jsonOut), "text"), cmp.Or(l.maxTokens, map[string]int{"serve": 8192}[c])
}

// findServer checks the place that is asked, and decides with which key. A binding given as a flag
// comes first, then the environment, then any other binding. BELAY_API_KEY and CODEWHALE_API_KEY go
// anywhere, as bindings do; the key of a vendor goes only to the vendor or, where the environment
// gives settings, to the BASE_URL that stands beside it. The names of three other programs are there
// so that an image or a CI job that was set up for one of them runs belay unchanged. A key file must
// give no right to group or others. Whoever names a place wants its key sent, so one that is not
// there is an error, where a variable that nobody named may be missing. The name of the variable
// is not repeated: it may be the key itself.
func (l *loader) findServer(place string) {
	l.demand(place != "" || l.command == "config", "found no server, allowed infer.socket, infer.base_url or, for exec:\n"+
		"  export BELAY_BASE_URL=http://127.0.0.1:8080\n  export BELAY_MODEL=NAME\n  export BELAY_API_KEY=KEY, if the server wants one")
	// Key, prompts and code would cross the network as they are. The parsed address counts, since
	// 127.evil.example begins like one, and so do names below localhost.
	u, _ := url.Parse(l.url) // no error: endpoint has parsed it
	host := u.Hostname()
	l.demand(u.Scheme != "http" || l.allowHTTP || host == "localhost" || net.ParseIP(host).IsLoopback(),
		"%s: found plain http to %s, allowed https, loopback or infer.allow_insecure_http (BELAY_ALLOW_INSECURE_HTTP)", l.inForce[&l.server].where, host)
	// From the lowest to the highest, as all sources. The whole texts are compared, scheme and path
	// included: the same host may serve others below another path, and plain http is another place
	// than https.
	for _, p := range [][2]string{{"OPENAI", "api.openai.com"}, {"DEEPSEEK", "api.deepseek.com"}, {"CODEWHALE", ""}, {"BELAY", ""}} {
		name, vendor, beside := p[0]+"_API_KEY", p[1], keep(l.environ[p[0]+"_BASE_URL"], in(envCommands, l.command))
		switch {
		case l.environ[name] == "" || l.inForce[&l.keyFrom].origin == "flag":
		case vendor == "" || place == endpoint("https://"+vendor) || place == endpoint(beside):
			l.put("infer.api_key_env", name, "env "+name, name)
		default:
			l.keyNote = name + " not sent to " + cmp.Or(l.socket, host) + ": it belongs to " + vendor + " or " + p[0] + "_BASE_URL; set BELAY_API_KEY to send it"
		}
	}
	where, key := l.inForce[&l.keyFrom].where, l.environ[l.keyFrom]
	if filepath.IsAbs(l.keyFrom) {
		// Between the two calls the file may change; whoever can do that is us or root.
		data, err := os.ReadFile(l.keyFrom)
		info, statErr := os.Stat(l.keyFrom)
		l.demand(cmp.Or(err, statErr) == nil, "%s: %v", where, cmp.Or(err, statErr))
		l.demand(statErr != nil || info.Mode().Perm()&0o077 == 0, "%s: found rights of group or others, allowed mode 0600", where)
		key = strings.TrimSpace(strings.SplitN(string(data), "\n", 2)[0])
	}
	// A control character would end the header line that carries the key.
	l.demand(l.keyFrom == "" || regexp.MustCompile("^[^[:cntrl:]]+$").MatchString(key), "%s: found no key there, allowed one line: the variable or file is unset, blank or has control characters", where)
	l.key, l.keyNote = secret{&key}, keep(l.keyNote, key == "")
}

// endpoint gives the URL that a base URL stands for, "" = none. Whether users write the version
// into it differs from vendor to vendor, and some paste the whole address of the call, so: no
// path means /v1, a path is taken as given, less chat/completions at its end; then that is
// appended, before a query, which Azure needs for its version. It is normalised so that equal
// places have equal texts. unix:/PATH is a place as well. A user name is refused since it comes
// with a secret, an IPv6 zone since net/url gives it back unescaped, and a port that
// there is not since it would look like a server that is down.
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
	path := strings.TrimRight(strings.TrimSuffix(cmp.Or(strings.TrimRight(u.EscapedPath(), "/"), "/v1"), "/chat/completions"), "/")
	port, err := strconv.ParseUint(cmp.Or(u.Port(), "80"), 10, 16)
	host := strings.TrimSuffix(strings.ToLower(u.Host), cmp.Or(keep(":443", u.Scheme == "https"), ":80"))
	return keep(u.Scheme+"://"+host+path+"/chat/completions"+keep("?"+u.RawQuery, u.RawQuery != ""), err == nil && port > 0)
}

// path makes a path absolute and clean, "" = it is relative, there is no HOME for its ~/, or it
// is no UTF-8. A relative HOME would put the journal and the services of a run wherever it was
// started. Other bytes than UTF-8 become U+FFFD in JSON: a keeper would be told of another
// directory, and the model and receipts, too.
func (l *loader) path(s string) string {
	rest, inHome := strings.CutPrefix(s, "~/")
	s = cmp.Or(keep(filepath.Join(l.environ["HOME"], rest), inHome), s)
	return keep(filepath.Clean(s), filepath.IsAbs(s) && strings.ToValidUTF8(s, "") == s)
}

// keep gives s, or "" if it is not good: with cmp.Or it makes a choice of one line.
func keep(s string, good bool) string { return map[bool]string{true: s}[good] }

// demand notes a problem unless good holds.
func (l *loader) demand(good bool, format string, args ...any) {
	if !good {
		l.problems = errors.Join(l.problems, fmt.Errorf(format, args...))
	}
}

// in finds a name in a blank-separated set; "" is in none.
func in(set, name string) bool { return slices.Contains(strings.Fields(set), name) }

// parseTOML reads the part of TOML 1.0 that this schema needs into a flat map from dotted names to
// values: string, int64, float64, bool, []any, or nil for a table, so that an empty one shows. each
// is told every statement that is right, with its line, up to the first that is not: its line
// begins the error. Without lists in lists this part is a regular language, so its grammar stands
// here as one expression; what is none of its sentences is refused, and nothing is read wrongly.
// Two levels are all that the schema has. Deeper ones, though right, are refused: the rules for
// tables that are opened in pieces are the part of TOML that readers get wrong.
func parseTOML(data []byte, each func(name string, v any, line int)) (map[string]any, error) {
	const (
		// No text and no comment holds these: control characters but the tab, and bytes that are
		// not UTF-8, which are U+FFFD here. A CR is only good before an LF, and is dropped there.
		never  = `\x00-\x08\n-\x1f\x7f-\x9f\x{fffd}`
		gap    = `(?:[ \t\n]|#[^` + never + `]*\n)*`
		key    = `(?:[A-Za-z0-9_-]+|"[A-Za-z0-9_-]+"|'[A-Za-z0-9_-]+')` // no key of ours needs its quotes
		text   = `'[^'` + never + `]*'|"(?:[^"\\` + never + `]|\\["\\btnfruU])*"`
		number = `0[xob][[:xdigit:]][[:xdigit:]_]*|[+-]?(?:0|[1-9][0-9_]*)(?:\.[0-9][0-9_]*)?(?:[eE][+-]?[0-9][0-9_]*)?`
		item   = `(?:true|false|` + number + `|` + text + `)`
		list   = `\[` + gap + `(?:` + item + gap + `,` + gap + `)*(?:` + item + gap + `)?\]`
		assign = `(` + key + `(?:[ \t]*\.[ \t]*` + key + `)?)[ \t]*=[ \t]*(` + item + `|` + list + `)`
		syntax = `^(?:\[[ \t]*(` + key + `)[ \t]*\]|` + assign + `)[ \t]*(?:#[^` + never + `]*)?\n` + gap
	)
	statement, items := regexp.MustCompile(syntax), regexp.MustCompile(`#[^\n]*|`+item)
	src, plain := strings.ReplaceAll(string(data), "\r\n", "\n")+"\n", strings.NewReplacer(`"`, "", `'`, "", " ", "", "\t", "")
	lead := regexp.MustCompile("^" + gap).FindString(src)
	line, section, values := 1+strings.Count(lead, "\n"), "", map[string]any{}
	for src = src[len(lead):]; src != ""; {
		m := append(statement.FindStringSubmatch(src), "", "", "", "") // of nothing where no statement follows
		header, name := plain.Replace(m[1]), section+plain.Replace(m[2])
		v, err := tomlValue(m[3], items)
		if header != "" {
			name, section, v, err = header, header+".", nil, nil
		}
		table, _, inTable := strings.Cut(name, ".")
		_, again := values[name]
		switch {
		case err != nil || strings.Count(name, ".") > 1:
			return nil, fmt.Errorf("%d: found neither [TABLE] nor KEY = VALUE; supported are tables of one level, quoted texts, 64-bit numbers, true, false and lists of these", line)
		case again || inTable && values[table] != nil:
			// A table is made once: by its header, or by dotted keys above all headers.
			return nil, fmt.Errorf("%d: found %s a second time", line, name)
		}
		values[table] = nil
		values[name] = v
		each(name, v, line)
		src, line = src[len(m[0]):], line+strings.Count(m[0], "\n")
	}
	return values, nil
}

// tomlValue reads a word or a list that the grammar has let pass. items finds comments and items.
// strconv checks the underscores: they stand between digits in both languages.
func tomlValue(word string, items *regexp.Regexp) (v any, err error) {
	switch {
	case strings.HasPrefix(word, "["):
		list := []any{} // not nil, since an empty list is a value
		for _, item := range items.FindAllString(word, -1) {
			if item[0] != '#' {
				v, bad := tomlValue(item, items)
				list, err = append(list, v), cmp.Or(err, bad)
			}
		}
		return list, err
	case word == "true" || word == "false":
		return word == "true", nil
	case strings.HasPrefix(word, "'"):
		return strings.Trim(word, "'"), nil
	case strings.HasPrefix(word, `"`): // Go's texts are TOML's with more escapes, which the grammar refuses; digits are checked here
		return strconv.Unquote(word)
	case strings.ContainsAny(word, ".eE") && !strings.HasPrefix(word, "0x"):
		return strconv.ParseFloat(word, 64)
	}
	return strconv.ParseInt(word, 0, 64)
}

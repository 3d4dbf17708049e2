//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// agent.go is the conversation: events and how they are written, the tools
// that a model is offered and the checks of its calls, the turn loop, and exec,
// which runs one task and decides what becomes of its services. It starts
// processes through procs.go only.

const (
	sameSignal  = time.Second // a further signal within this time counts as the first, in main and in serve
	atomicWrite = 4096        // PIPE_BUF: a write of at most this many bytes is whole or not at all, pipe(7)

	// For the last lines of a run that did not complete; of a release up to its receipts.
	lastLines, releaseBound = time.Second, 5 * time.Second
	// Between two looks at stdout's reader; text format: a sign of life while a tool runs.
	superviseTick, progressTick = 500 * time.Millisecond, 60 * time.Second
	// Bytes of AGENTS.md; characters of a progress line.
	agentsMax, lineWidth = 32 << 10, 78
	// Persistent services of a run; replies in a row that were cut at the output limit.
	maxPending, maxLengths = 8, 3
	// In ms: of a command, and of the action wait.
	minTimeout, maxTimeout, waitTimeout = 1000, 600_000, 30_000
)

// ending is how a run that did not complete ended: its exit code, and the
// status and category of its metadata.
type ending struct {
	code                      int
	status, category, message string
}

func (e *ending) Error() string { return e.message }

func failed(category, format string, args ...any) *ending {
	return &ending{1, "failed", category, fmt.Sprintf(format, args...)}
}

// endingOf is the one place that maps the outcome of a run to an exit code.
func endingOf(err error) *ending {
	var e *ending
	api := &apiError{category: "internal"}
	switch {
	case err == nil:
		return &ending{status: "completed"}
	case errors.As(err, &e):
		return &ending{e.code, e.status, e.category, err.Error()}
	case errors.As(err, &api) && api.retryable:
		return &ending{75, "failed", api.category, err.Error()}
	case errors.Is(err, syscall.EPIPE): // of stdout: those of other writes are handed to nobody
		return &ending{141, "interrupted", "interrupted", fmt.Sprintf("the reader of stdout went away: %v", err)}
	}
	return failed(api.category, "%v", err)
}

// flushed gives the exit code of a command that has printed its lines.
func flushed(stdout *bufio.Writer, code int) (int, error) {
	err := stdout.Flush()
	return max(code, endingOf(err).code), err
}

// endSignals gives the signals that end a command. What is ignored at the start,
// as by nohup, stays ignored.
func endSignals() []os.Signal {
	return slices.DeleteFunc([]os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM}, signal.Ignored)
}

// untilSignal gives a context that ends with the first of these signals, and by
// its cause as one that it interrupted. Never disarmed: between the receipts and
// the exit a signal would kill belay, as if the run had failed.
func untilSignal() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	endedBy := func(sig syscall.Signal) {
		cancel(&ending{128 + int(sig), "interrupted", "interrupted", "ended by " + signalName(sig)})
	}
	for _, sig := range endSignals() { // one by one: of none, package signal means all
		came, _ := signal.NotifyContext(ctx, sig)
		context.AfterFunc(came, func() { endedBy(sig.(syscall.Signal)) })
	}
	return ctx
}

// encodeEvent gives one line of docs/protocol.md: type first, then pairs of
// name and value, then the schema.
func encodeEvent(kind string, pairs ...any) []byte {
	return append(jsonObject(slices.Concat([]any{"type", kind}, pairs, []any{"schema", "belay.exec-stream", "schema_version", 1})...), '\n')
}

// jsonObject keeps the order of its pairs and leaves out a value that encodes to
// null: what is not known is absent, never zero. Of a name that ends in ? it leaves
// out an empty text and false, too.
func jsonObject(pairs ...any) []byte {
	b := []byte{'{'}
	for pair := range slices.Chunk(pairs, 2) {
		name, optional := strings.CutSuffix(pair[0].(string), "?")
		if v := string(jsonOf(pair[1])); v != "null" && !(optional && in(`"" false`, v)) {
			b = fmt.Appendf(b, "%s:%s,", jsonOf(name), v)
		}
	}
	return append(bytes.TrimSuffix(b, []byte{','}), '}')
}

// jsonOf is JSON without the escapes for web pages. All that belay encodes can be.
func jsonOf(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(v)
	return bytes.TrimSpace(b.Bytes())
}

// printer writes events in one of the three formats.
type printer struct {
	// set once
	format         string
	stdout, stderr *os.File
	fail           context.CancelCauseFunc
	writing        chan struct{} // of one place: holds something while a write is under way

	running atomic.Pointer[string] // the tool call under way

	// owned by the goroutine of the run: results so far; lines that came after its end
	tools []json.RawMessage
	left  []byte
}

// write returns when stdout has taken a line, or with ctx, so that a reader that
// stands still never stops the run. One goroutine writes at a time; what it has
// then may still get out, if the reader comes back. What comes when ctx has ended
// goes out before the last lines.
func (p *printer) write(ctx context.Context, line []byte) (err error) {
	written, turn := make(chan error, 2), p.writing // the first of two counts
	defer context.AfterFunc(ctx, func() { written <- context.Cause(ctx) })()
	p.left = append(p.left, line...)
	if ctx.Err() != nil {
		turn = nil // never: with both ready it would be chance
	}
	select {
	case turn <- struct{}{}:
		lines := p.left
		p.left = nil
		// owner: write; ends when stdout has taken the lines; joined by written, but for a reader that stands still
		go func() { _, err := p.stdout.Write(lines); <-turn; written <- err }()
	case <-ctx.Done():
	}
	if err = <-written; err != nil {
		p.fail(err)
	}
	return err
}

// say prints for people, and so that neither a terminal nor a CI runner obeys
// foreign text: control characters are replaced, further lines begin with a bar
// (GitHub takes ::command:: behind blanks), and of two # the second is replaced
// (##[command] and ##vso[command] count anywhere in a line). A stderr that
// takes nothing holds up the run for lastLines; only a receipt's error stops it.
// poll(2) is not asked: a terminal that stands still says that it takes a line,
// and takes a part of it.
func (p *printer) say(format string, args ...any) error {
	text := regexp.MustCompile(`[^\P{Cc}\n\t]`).ReplaceAllString(strings.ToValidUTF8(fmt.Sprintf(format, args...), "\uFFFD"), "\uFFFD")
	text = strings.NewReplacer("##", "#\uFFFD", "\n", "\n  | ").Replace(text) + "\n"
	written := make(chan error, 2) // the first of two counts
	defer time.AfterFunc(lastLines, func() { written <- errors.New("stderr takes nothing") }).Stop()
	// owner: say; ends when stderr has taken the text; joined by written, but for a reader that stands still
	go func() { _, err := p.stderr.WriteString(text); written <- err }()
	return <-written
}

// show says something of a run's course, which only the text format has on stderr.
func (p *printer) show(format string, args ...any) {
	if p.format == "text" {
		p.say("  "+format, args...)
	}
}

// print takes the events of a run but the last ones. The text format shows some
// fields of some kinds, on indented lines.
func (p *printer) print(ctx context.Context, kind string, pairs ...any) {
	fields := sync.OnceValue(func() object { return parse(jsonObject(pairs...)) }) // once, and only where it is asked: most events are text
	get := func(key string) string { return word(fields().get(key)) }
	switch {
	case p.format == "stream-json":
		p.write(ctx, encodeEvent(kind, pairs...)) // an error has ended the run
	case kind == "tool_use":
		p.running.Store(new(oneLine(get("name") + " " + get("input"))))
	case kind == "tool_result":
		p.tools = append(p.tools, jsonObject(pairs...))
		said, code := get("output"), get("exit_code")
		if code != "" { // it stands behind the output, and a line is cut before that
			said = "exit code " + code + ": " + regexp.MustCompile(`(?s)^(.*)\nexit code `+code).ReplaceAllString(said, "$1")
		}
		p.show("%s in %s ms: %s%s", get("status"), get("duration_ms"), *p.running.Swap(nil), keep("\n"+oneLine(said), get("status") == "error"))
	case kind == "notice", kind == "retry" && p.format == "text": // json has no place for a notice
		p.say("  %s: %s%s", kind, get("message")+get("error"), keep("; again in "+get("delay_ms")+" ms", kind == "retry"))
	}
}

// oneLine cuts on characters: fmt counts a precision in runes.
func oneLine(s string) string {
	return fmt.Sprintf("%.*s", lineWidth, strings.ReplaceAll(s, "\n", " "))
}

// The tools, in full JSON Schema. It is what the model is told and what its
// calls are checked by.
const toolSchemas = `[
{"type":"function","function":{"name":"Bash","description":"Run a shell command, or wait for or cancel one that runs in the background. When a foreground command ends, whatever it left running is ended too. A background command ends with the run, unless it is a persistent service of a run that completes.","parameters":{"type":"object","properties":{
"action":{"type":"string","enum":["run","wait","cancel"],"description":"default run"},
"command":{"type":"string","description":"run: the command, for sh -c"},
"timeout_ms":{"type":"integer","description":"1000 to 600000; run: default 120000; wait: default 30000"},
"background":{"type":"boolean","description":"run: return a task_id at once"},
"persist":{"type":"boolean","description":"run: with background, a service that outlives a completed run; it must stay in the foreground of its shell, and you must probe that it is ready before you answer"},
"stdin":{"type":"string","description":"run: text for the command's stdin; else it is empty"},
"cwd":{"type":"string","description":"run: directory, default the workspace"},
"task_id":{"type":"string","description":"wait, cancel: the task"},
"all":{"type":"boolean","description":"cancel: all tasks"}}}}},
{"type":"function","function":{"name":"Edit","description":"Replace exact text in a file.","parameters":{"type":"object","properties":{
"path":{"type":"string"},"old":{"type":"string","description":"must occur exactly once, unless all"},"new":{"type":"string"},"all":{"type":"boolean"}},"required":["path","old","new"]}}},
{"type":"function","function":{"name":"Read","description":"Read a text file as numbered lines, at most 2000 lines and 50 KiB at once.","parameters":{"type":"object","properties":{
"path":{"type":"string"},"offset":{"type":"integer","description":"first line, from 1"},"limit":{"type":"integer","description":"number of lines"}},"required":["path"]}}},
{"type":"function","function":{"name":"Write","description":"Write a whole file, with its parent directories.","parameters":{"type":"object","properties":{
"path":{"type":"string"},"content":{"type":"string"}},"required":["path","content"]}}}]`

// toolOf gives the parameters of a tool, nil if there is none, and the names of
// all tools.
func toolOf(name string) (parameters object, names []string) {
	for _, m := range parse([]byte(toolSchemas)) {
		function := parse(parse(m.val).get("function"))
		if names = append(names, str(function.get("name"))); names[len(names)-1] == name {
			parameters = parse(function.get("parameters"))
		}
	}
	return parameters, names
}

// arguments of all tools, those of the file tools as procs.go takes them.
type arguments struct {
	fileRequest
	Action, Command, Cwd string
	TaskID               string `json:"task_id"`
	Stdin                *string
	Timeout              *int `json:"timeout_ms"`
	Background, Persist  bool
}

// refusedCall is an error of a call that was not run. It says what is valid.
type refusedCall struct{ error }

// check reads the arguments of a call: null counts as absent, and names that
// the tool does not have are given back. What is wrong is refused with its
// schema. Some models write 5.0, which decoding to any makes a 5.
func (a *arguments) check(c call) (unknown []string, err error) {
	parameters, names := toolOf(c.name)
	var given map[string]any
	switch err = json.Unmarshal(c.args, &given); {
	case parameters == nil:
		return nil, refusedCall{fmt.Errorf("there is no tool %q; the tools are %s", c.name, strings.Join(names, ", "))}
	case err != nil || given == nil: // a number that no float64 holds is an error, and would count as absent
		return nil, refusedCall{errors.New("the arguments are no JSON object, or hold a number out of range, so nothing was run; send them again as one object")}
	}
	forms := map[string]string{"string": `^"`, "boolean": `^(true|false)$`, "integer": `^-?[0-9]{1,18}$`}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		value, property := jsonOf(given[name]), parse(parameters.get("properties")).get(name)
		form := regexp.MustCompile(forms[str(parse(property).get("type"))])
		if property == nil {
			unknown = append(unknown, name)
			delete(given, name)
		} else if given[name] != nil && !form.Match(value) {
			return nil, refusedCall{fmt.Errorf("%s must be %s, not %.50s", name, property, value)}
		}
	}
	needs := parameters.get("required")
	for _, need := range parse(needs) {
		if given[str(need.val)] == nil {
			return nil, refusedCall{fmt.Errorf("%s is missing; %s needs %s", str(need.val), c.name, needs)}
		}
	}
	return unknown, json.Unmarshal(jsonOf(given), a)
}

// toolResult is what a call came to. category "" is success; else
// invalid_input, execution_failed, exit_status, timeout or cancelled.
type toolResult struct {
	text, category, path string // path: of the whole output
	exit                 *int
	truncated            bool
}

// agent is one conversation with a model.
type agent struct {
	// set once
	cfg        *config
	client     *client
	jobs       *jobs // nil: no tools are offered
	extra      map[string]any
	emit       emitter
	journal    func(record) error // nothing goes on before it has returned
	noServices string             // why persist is refused here, "" if it is not

	// owned by the goroutine of run
	history   []json.RawMessage // what is sent, byte for byte
	asked     []int             // for each model call the length that the history had
	short     int               // results before this place in the history are left out already
	learned   learned
	toolCalls int
	total     [4]*int64 // input, output, cached, reasoning tokens, as reported
}

// newAgent makes the conversation of a configuration, for exec and serve, who
// set the rest: tools, if it has any, emit, and where its steps are kept.
func newAgent(cfg *config, transport http.RoundTripper, tape io.Writer, trace func(string)) *agent {
	return &agent{
		client: newClient(clientOptions{url: cfg.url, socket: cfg.socket, header: cfg.keyHeader, key: cfg.key.reveal(), keyNote: cfg.keyNote,
			model: cfg.model, maxTokens: cfg.maxTokens, temperature: cfg.temperature, topP: cfg.topP, seed: cfg.seed, reasoningEffort: cfg.reasoningEffort,
			liveness: cfg.liveness, backoff: cfg.backoff, version: version(), transport: transport, record: tape, trace: trace}),
		cfg: cfg, learned: learned{dropped: map[string]bool{}, ids: map[string]bool{}}, journal: func(record) error { return nil },
	}
}

// noNetwork is true where the sandbox keeps commands from it.
func (a *agent) noNetwork() bool {
	return in("read-only workspace-write", a.cfg.sandbox) && !a.cfg.network
}

// add takes a message into the history and the journal.
func (a *agent) add(rec record) error {
	a.history = append(a.history, rec.Message)
	return a.journal(rec)
}

// run is the turn loop: ask, run the calls of a reply that ended properly,
// append their results, until a reply has none. It gives the answer.
func (a *agent) run(ctx context.Context) (answer string, err error) {
	for lengths := 0; ; {
		switch most := a.cfg.maxTotalTokens; {
		case len(a.asked) >= a.cfg.maxTurns:
			return "", failed("budget_exhausted", "%d model calls (--max-turns) are spent and the model wants more", len(a.asked))
		case most > 0 && value(a.total[0])+value(a.total[1]) >= most:
			return "", failed("budget_exhausted", "the %d tokens of limits.max_total_tokens are spent and the model wants more", most)
		}
		a.asked = append(a.asked, len(a.history))
		r, err := a.ask(ctx)
		if err != nil {
			return "", err
		}
		lengths++
		switch {
		case in("stop tool_calls", r.finish):
			lengths = 0
		case r.finish != "length":
			category := cmp.Or(keep(r.finish, r.finish == "content_filter"), "malformed")
			return "", failed(category, "the provider ended the answer with %q, so it may be incomplete", r.finish)
		case lengths == maxLengths:
			return "", failed("length", "%d replies in a row were cut at the output limit; raise infer.max_tokens", lengths)
		}
		answer = keep(answer+r.text, len(r.calls) == 0) // what is said before calls is no answer
		if r.text != "" || len(r.calls) > 0 {
			rec := record{Type: recAssistant, Message: assistantMessage(r, r.calls)}
			for _, c := range r.calls {
				rec.Calls = append(rec.Calls, c.id)
			}
			err = a.add(rec)
		}
		for i := 0; i < len(r.calls) && err == nil; i++ {
			err = a.call(ctx, r.calls[i])
		}
		if err == nil && lengths > 0 {
			err = a.add(record{Type: recNote, Message: userMessage("Your last reply was cut at the output limit. Continue where it ended.")})
		}
		if err != nil || lengths == 0 && len(r.calls) == 0 {
			return keep(answer, err == nil), err
		}
	}
}

// ask makes one model call. A history that is too long for the server is
// shortened twice at most: by half, then by all that may go.
func (a *agent) ask(ctx context.Context) (*reply, error) {
	request := &request{messages: a.history, extra: a.extra, learned: &a.learned} // shorten works in the same array
	if a.jobs != nil {
		request.tools = json.RawMessage(toolSchemas)
		_, request.offered = toolOf("")
	}
	for share := 2; ; share = 1 {
		began := time.Now()
		request.reported = nil
		r, err := a.client.complete(ctx, request, a.emit)
		a.account(request.reported, time.Since(began))
		api, told := errors.AsType[*apiError](err)
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case !told || api.category != "context_length" || !a.shorten(share):
			return r, err
		case api.heard: // LM Studio says it in the middle of an answer, whose text is void then
			a.emit("retry", "attempt", 1, "delay_ms", 0, "error_category", api.category, "error", api.message, "discard_content", true)
		}
	}
}

func value(n *int64) int64 { return *cmp.Or(n, new(int64)) }

// account adds up what the attempts of a call reported: each of them costs.
func (a *agent) account(reported []*usage, took time.Duration) {
	var sum [4]*int64
	for _, u := range reported {
		for i, n := range []*int64{u.input, u.output, u.cached, u.reasoning} {
			if n != nil {
				a.total[i], sum[i] = new(value(a.total[i])+*n), new(value(sum[i])+*n)
			}
		}
	}
	if sum != [4]*int64{} {
		a.emit("turn_usage", "turn", len(a.asked), "input_tokens", sum[0], "output_tokens", sum[1], "cached_tokens", sum[2], "reasoning_tokens", sum[3], "duration_ms", took.Milliseconds())
	}
}

// resultOf gives the id of the call that a message answers, "" if it is none.
func resultOf(message json.RawMessage) string { return str(parse(message).get("tool_call_id")) }

// shorten replaces tool results by a note of their size, but those of the newest
// two turns: the oldest, one of share of them. False: nothing to shorten.
func (a *agent) shorten(share int) bool {
	var old []int
	for i := a.short; i < a.asked[max(len(a.asked)-3, 0)]; i++ {
		if resultOf(a.history[i]) != "" {
			old = append(old, i)
		}
	}
	names := ""
	for _, i := range old[:(len(old)+share-1)/share] {
		id := resultOf(a.history[i])
		names += " " + id
		a.history[i] = toolMessage(id, fmt.Sprintf("[this result of %d bytes was left out to make room]", len(a.history[i])))
		a.short = i + 1
	}
	if names != "" {
		a.emit("notice", "message", "the context is too long for the server; results left out:"+names)
	}
	return names != ""
}

// call runs one call of a complete reply and appends its result.
func (a *agent) call(ctx context.Context, c call) error {
	began := time.Now()
	a.toolCalls++
	a.emit("tool_use", "id", c.id, "name", c.name, "input", json.RawMessage(cmp.Or(string(c.args), string(jsonOf(c.raw)))), "started_at", began.UTC())
	if err := a.journal(record{Type: recToolStart, Call: c.id, Name: c.name}); err != nil {
		return err
	}
	r, now := a.dispatch(ctx, c), time.Now()
	a.emit("tool_result", "id", c.id, "name", c.name, "output", r.text, "status", cmp.Or(keep("success", r.category == ""), "error"),
		"exit_code", r.exit, "error_category?", r.category, "truncated?", r.truncated, "output_path?", r.path,
		"started_at", began.UTC(), "completed_at", now.UTC(), "duration_ms", now.Sub(began).Milliseconds())
	return cmp.Or(a.add(record{Type: recToolResult, Call: c.id, Message: toolMessage(c.id, r.text)}), context.Cause(ctx))
}

// dispatch checks a call and runs it.
func (a *agent) dispatch(ctx context.Context, c call) (r toolResult) {
	var args arguments
	unknown, err := args.check(c)
	args.Tool, args.Path = c.name, cmp.Or(args.Path, args.Cwd) // no tool takes both; none is the workspace
	if !filepath.IsAbs(args.Path) {
		args.Path = filepath.Join(a.cfg.workspace, args.Path)
	}
	switch {
	case err != nil:
	case a.jobs == nil:
		err = refusedCall{errors.New("no tools were offered")}
	case c.name == "Bash":
		r, err = a.bash(ctx, &args)
	case c.name == "Edit" && (args.Old == "" || args.Old == args.New):
		err = refusedCall{errors.New("old must not be empty, and new must differ from it")}
	default:
		r.text, err = a.jobs.file(ctx, &args.fileRequest)
	}
	if _, refused := errors.AsType[refusedCall](err); err != nil {
		r = toolResult{text: err.Error(), category: cmp.Or(keep("invalid_input", refused), "execution_failed")}
	}
	r.text += keep("\n(unknown arguments ignored: "+strings.Join(unknown, ", ")+")", len(unknown) > 0)
	return r
}

// bash is the tool of that name.
func (a *agent) bash(ctx context.Context, args *arguments) (r toolResult, err error) {
	action := cmp.Or(args.Action, "run")
	asked := *cmp.Or(args.Timeout, map[string]*int{"wait": new(waitTimeout)}[action], new(int(a.cfg.commandTimeout.Milliseconds())))
	ms := min(max(asked, minTimeout), maxTimeout)
	timeout := time.Duration(ms) * time.Millisecond
	tasks := a.jobs.list(func(j *job) bool { return j.id == args.TaskID || args.All && !j.over.Load() })
	switch {
	case !in("run wait cancel", action):
		err = refusedCall{fmt.Errorf("action must be one of run, wait, cancel, not %q", action)}
	case action == "run":
		r, err = a.start(ctx, args, timeout)
	case len(tasks) == 0 && (action == "wait" || !args.All):
		err = refusedCall{fmt.Errorf("there is no task %q", args.TaskID)}
	case action == "wait":
		tasks[0].wait(ctx, timeout)
		r = a.report(tasks[0], "")
	default:
		for _, j := range tasks {
			j.cancelled.Store(true)
		}
		r.text = fmt.Sprintf("%d tasks ended%s", len(tasks), leftOver(end(orderEnd, tasks...)))
	}
	r.text += keep(fmt.Sprintf("\n(timeout_ms %d was taken as %d: %d to %d are possible)", asked, ms, minTimeout, maxTimeout), ms != asked)
	return r, err
}

// start runs a command to its end, or starts one that goes on: a task of this
// run or, if every rule is kept, a pending persistent service.
func (a *agent) start(ctx context.Context, args *arguments, timeout time.Duration) (r toolResult, err error) {
	broken := cmp.Or(
		keep("run needs a command", strings.TrimSpace(args.Command) == ""),
		keep("persist needs background:true and no stdin", args.Persist && (!args.Background || args.Stdin != nil)),
		keep("persist is refused: "+a.noServices, args.Persist && a.noServices != ""),
		keep(fmt.Sprintf("there are %d pending services already, no more are possible", maxPending), args.Persist && len(a.jobs.list((*job).pending)) >= maxPending))
	if broken != "" {
		return r, refusedCall{errors.New(broken)}
	}
	var log *os.File // never nil for a service: without the null device nothing can be started
	if args.Persist {
		if log, err = a.jobs.serviceLog(); err != nil && !slices.ContainsFunc(a.jobs.all, func(j *job) bool { return j.log == os.DevNull }) { // once is enough
			a.emit("notice", "message", fmt.Sprintf("the service's output goes to %s and no record is kept: %v", os.DevNull, err))
		}
	}
	j, err := a.jobs.start(args.Command, args.Path, args.Stdin, log)
	if err != nil {
		return r, err
	}
	if args.Background {
		r.text = fmt.Sprintf("started in the background as %s (pid %d); it ends with this run%s", j.id, j.pid,
			keep(" unless that completes, which releases it; its log is "+j.log+"; probe that it is ready before you answer", args.Persist))
		return r, nil
	}
	late := ""
	if !j.wait(ctx, timeout) {
		late = fmt.Sprintf("timed out after %d ms; for long work use background:true and wait", timeout.Milliseconds())
		j.cancelled.Store(ctx.Err() != nil)
		end(orderEnd, j)
	}
	a.jobs.forget(j)
	return a.report(j, late), nil
}

// report gives the new output of a job and what became of it. late says that
// belay ended it at its limit of time.
func (a *agent) report(j *job, late string) toolResult {
	over := j.over.Load() // only then the job's fields are ours to read
	text, omitted, lost := j.out.take(!over)
	r, state := toolResult{text: strings.TrimSuffix(cmp.Or(text, "(no output)"), "\n"), truncated: omitted > 0}, ""
	if f := j.out.file; r.truncated && f != nil {
		r.path = f.Name()
		r.text += fmt.Sprintf("\n(the output, up to %d MiB, is in %s%s)", spillMax>>20, r.path, keep("; it could not be written to the end, so the rest is lost", lost))
	}
	switch {
	case j.cancelled.Load():
		state, r.category = "cancelled", "cancelled"
	case late != "":
		state, r.category = late, "timeout"
	case !over:
		state = fmt.Sprintf("still running after %s", time.Since(j.began).Round(time.Millisecond))
	case j.last.Kind != "gone":
		state, r.category = j.last.Text, "execution_failed"
	case j.last.Status.Signaled():
		state, r.category = "killed by "+signalName(j.last.Status.Signal()), "exit_status"
	default:
		r.exit = new(j.last.Status.ExitStatus())
		state, r.category = fmt.Sprintf("exit code %d", *r.exit), keep("exit_status", *r.exit != 0)
	}
	r.text += "\n" + state
	if over {
		r.text += keep(fmt.Sprintf("\n(%d processes that the command had left running were ended; use background:true for work that goes on)", j.last.Strays), j.last.Strays > 0) + leftOver(j.last.Left)
	}
	r.text += keep("\nnetwork is off in this sandbox, loopback included (belay --network)", a.noNetwork() && r.category == "exit_status")
	return r
}

func leftOver(left string) string {
	return keep("\ncould not be ended: "+strings.TrimSpace(left), left != "")
}

// version is the tag or commit that the build knows of.
func version() string {
	info, _ := debug.ReadBuildInfo() // nil from a builder that knows no modules
	return cmp.Or(cmp.Or(info, &debug.BuildInfo{}).Main.Version, "(devel)")
}

// source opens what a run reads and records: the prompt, and a recording in
// place of the network; data is the demo's.
func source(cfg *config, stdin io.Reader, data []byte) (transport http.RoundTripper, record io.Writer, err error) {
	if cfg.promptFromStdin {
		b, readErr := io.ReadAll(stdin)
		if cfg.prompt, err = keep(string(b), readErr == nil), readErr; err == nil && len(bytes.TrimSpace(b)) == 0 {
			cfg.prompt, err = "", errors.New("it is empty or blank")
		}
	}
	if err == nil && cfg.replay != "" {
		data, err = os.ReadFile(cfg.replay)
	}
	if err == nil && (cfg.replay != "" || cfg.command == "demo") {
		transport, err = newReplayer(data)
	}
	if err == nil && cfg.record != "" {
		record, err = os.OpenFile(cfg.record, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", cmp.Or(keep("the prompt on stdin", cfg.prompt == ""), keep("--replay", cfg.replay != ""), "--record"), err)
	}
	return transport, record, err
}

// execution is one run of exec.
type execution struct {
	// set once
	*agent
	*printer
	own   *jobs // without --auto there are never any
	id    string
	began time.Time
}

// runExec runs one task and gives the exit code. Whatever happens, everything
// passes the same end: kill, reap, then write.
func runExec(signals context.Context, cfg *config, h *host, transport http.RoundTripper, record io.Writer, stdout, stderr *os.File) int {
	// Of the writes too: a reader that stands still does not stop the clock.
	late := &ending{124, "failed", "timeout", fmt.Sprintf("--timeout %s ran out", cfg.timeout)}
	ctx, stop := context.WithTimeoutCause(signals, cmp.Or(cfg.timeout, farFuture), late)
	defer stop()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	p := &printer{format: cfg.format, stdout: stdout, stderr: stderr, fail: fail, writing: make(chan struct{}, 1)}
	var trace func(string)
	if cfg.verbose {
		trace = func(s string) { p.say("%s: %s", cfg.program, s) }
	}
	x := &execution{agent: newAgent(cfg, transport, record, trace), printer: p, own: &jobs{host: h}, id: randomHex() + randomHex(), began: time.Now()}
	x.emit = func(kind string, pairs ...any) { p.print(ctx, kind, pairs...) }
	if cfg.auto {
		t, err := newJobs(h, toolOptions(cfg, x.id))
		if err != nil {
			p.say("%s: %v", cfg.program, err)
			return 1
		}
		defer removeDir(t.scratch)
		x.own, x.jobs = t, t
	}
	var watch sync.WaitGroup
	// owner: runExec; ends when ctx does; joined by watch
	watch.Go(func() { x.supervise(ctx) })
	code := x.finish(signals, x.converse(ctx))
	fail(nil)
	watch.Wait()
	return code
}

// supervise notices a reader that left although nothing is written; it reaps as
// PID 1 of a container, where belay is every orphan's parent, and shows that a
// long tool call is alive.
func (x *execution) supervise(ctx context.Context) {
	var call *string
	for tick, since := time.Tick(min(superviseTick, x.cfg.poll)), x.began; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
		if readerLeft(int(x.stdout.Fd())) {
			x.fail(syscall.EPIPE)
		}
		reap(x.own.host)
		if running := x.running.Load(); running != call {
			call, since = running, time.Now()
		} else if call != nil && time.Since(since) >= progressTick {
			since = time.Now()
			x.show("still running %s", *call)
		}
	}
}

// converse is the run from its first event to its receipts. A panic in it is an
// error like another: the teardown comes after it.
func (x *execution) converse(ctx context.Context) (err error) {
	defer caught(&err)
	x.noServices = cmp.Or(keep("it needs --sandbox danger-full-access on the command line", !x.cfg.sandboxFlag || x.cfg.sandbox != "danger-full-access"),
		keep("belay is PID 1 here, so its exit would end the service", x.own.host.pid == 1))
	for _, notice := range x.begin(x.id) {
		x.emit("notice", "message", notice)
	}
	x.history = append(x.history, userMessage(x.cfg.prompt))
	answer, err := x.run(ctx)
	if err == nil {
		err = x.release(ctx, answer)
	}
	return err
}

// begin says who starts, and begins the history with the system prompt, which is
// constant for a run, so that the server's prefix cache holds. It gives notices
// for the user of exec about what is not in force.
func (a *agent) begin(session string) (notices []string) {
	cfg, t := a.cfg, a.jobs
	a.emit("start", "session_id", session, "model", cfg.model, "workspace", cfg.workspace, "sandbox", cfg.sandbox, "network", !a.noNetwork(), "version", version())
	text := fmt.Sprintf("You are belay, a coding agent that works without a person at hand. Do the task, check it, and answer with what you did.\n"+
		"Workspace: %s\nPlatform: linux/%s\nDate: %s\n", cfg.workspace, runtime.GOARCH, time.Now().Format(time.DateOnly))
	notices = []string{cfg.keyNote, keep("no tools are offered: --auto before the prompt lets the model run commands", t == nil)}
	if t != nil {
		notices = append(notices, keep("no scratch directory can be written and locked ($TMPDIR, /tmp, /dev/shm): long outputs are not kept", t.scratch == nil))
		if t.confine != nil {
			text += fmt.Sprintf("Sandbox: %s; what can be written: %s. Network: %v.\n", cfg.sandbox, strings.Join(t.confine.Write, " "), cfg.network)
			notices = append(notices, t.confine.lacks())
		}
		text += "Long work: background:true and wait. A server that shall outlive this run: background:true with persist:true; it is released only when you have answered, so probe that it is ready before you do.\n"
	}
	if !cfg.noProjectConfig {
		agents, notice := agentsFile(cfg.workspace)
		text += keep("\nAGENTS.md of the workspace:\n"+agents+"\n", agents != "")
		notices = append(notices, notice)
	}
	a.history = []json.RawMessage{systemMessage(text + cfg.appendPrompt)}
	return slices.DeleteFunc(notices, func(s string) bool { return s == "" })
}

// agentsFile reads AGENTS.md. The workspace is not trusted: a link must not
// lead out of it, and a FIFO must not hold the run.
func agentsFile(workspace string) (text, notice string) {
	var f *os.File
	root, err := os.OpenRoot(workspace)
	if err == nil {
		defer root.Close()
		f, err = root.OpenFile("AGENTS.md", os.O_RDONLY|syscall.O_NONBLOCK, 0)
	}
	defer f.Close() // of nil, as Stat, it is an error
	var b []byte
	if fi, statErr := f.Stat(); statErr == nil && fi.Mode().IsRegular() {
		b, err = io.ReadAll(io.LimitReader(f, agentsMax+1))
	}
	switch {
	case len(b) > agentsMax:
		b, notice = b[:agentsMax], fmt.Sprintf("AGENTS.md is longer than %d bytes: cut there", agentsMax)
	case (len(b) == 0 || err != nil) && !errors.Is(err, os.ErrNotExist): // what is missing of a part may be what forbids
		b, notice = nil, "AGENTS.md cannot be read, is empty or is no regular file of the workspace"
	}
	return strings.ToValidUTF8(string(b), "\uFFFD"), notice
}

// finish gives the exit code of a run that was released. Of any other it ends
// all that is left and writes the last lines.
func (x *execution) finish(signals context.Context, err error) int {
	if err == nil {
		return 0
	}
	err = cmp.Or(context.Cause(signals), err) // a signal that came ended the run, whatever failed by it
	e := endingOf(fmt.Errorf("%w%s", err, leftOver(x.own.endAll(orderEnd, func(*job) bool { return true }))))
	var stopped [][]any
	for _, j := range x.own.list((*job).pending) {
		stopped = append(stopped, []any{"service_stopped", "task_id", j.id, "pid", j.pid, "reason", e.category})
	}
	last, cancel := context.WithTimeout(context.Background(), lastLines)
	defer cancel()
	x.write(last, x.closing(e, "", stopped)) // the exit code tells where it cannot be written
	return e.code
}

// release is the end of a run whose answer is complete: end the other jobs,
// see that each service lives, record and print the receipts, and only then let
// the services go. Any error aborts it, and nothing is released.
func (x *execution) release(ctx context.Context, answer string) (err error) {
	if left := leftOver(x.own.endAll(orderEnd, func(j *job) bool { return !j.pending() })); left != "" {
		return errors.New("the answer is complete, but processes" + left)
	}
	removeDir(x.own.scratch) // it may take long, and a second signal would then end a run that has let go with another code than 0
	services, list, released := x.own.list((*job).pending), []receipt(nil), [][]any(nil)
	slices.SortFunc(services, func(a, b *job) int { return strings.Compare(a.id, b.id) })
	if len(services) > 0 {
		defer time.AfterFunc(releaseBound, func() { x.fail(errors.New("stdout did not take the receipts in time")) }).Stop()
	}
	for _, j := range services {
		r, err := x.own.confirm(j)
		if err != nil {
			return failed("service_exited", "%v", err)
		}
		list = append(list, r)
		released = append(released, []any{"service_released", "task_id", r.TaskID, "pid", r.PID, "process_group_id", r.PGID, "ownership", "external", "log", r.Log})
	}
	if err := recordRelease(x.cfg.home, list); err != nil {
		x.emit("notice", "message", fmt.Sprintf("the release is not recorded in %s: %v", x.cfg.home, err))
	}
	// In pieces that stdout takes at once: what is not out when the run is ended never gets out, so that no reader finds
	// a completed result of a run whose services were ended. In stream-json it is one write(2), whole or not at all,
	// and from the moment that it is sure to happen signals are held; else signals count until the last byte.
	lines := x.closing(endingOf(nil), answer, released)
	held := x.format == "stream-json" && list != nil && len(lines) <= atomicWrite
	lost := func() error { // is asked behind each wait for a reader: a service may end meanwhile, or its keeper
		if slices.ContainsFunc(list, receipt.ended) || slices.ContainsFunc(services, func(j *job) bool { return j.waited.Load() }) {
			return failed("service_exited", "a service ended before it was let go")
		}
		return nil
	}
	// A terminal may take a part of a piece: one that is under way when the run is ended has lastLines more.
	last, giveUp := context.WithCancelCause(context.Background())
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastLines, func() { giveUp(context.Cause(ctx)) }) })()
	for piece := range slices.Chunk(lines, atomicWrite) {
		for ctx.Err() == nil && !takesOneWrite(int(x.stdout.Fd()), superviseTick) {
			// poll(2) has no channel, hence a look at ctx now and then
		}
		x.own.host.hold(held) // first, then the look at ctx: a signal between the two is seen
		if err = cmp.Or(context.Cause(ctx), lost()); err == nil {
			err = x.write(last, piece)
		}
		if err != nil {
			break
		}
	}
	for i := 0; x.format == "text" && err == nil && i < len(released); i++ { // only there a signal counts up to the last of them
		err = cmp.Or(context.Cause(ctx), lost())
		if err == nil && x.say("  service_released %s", jsonObject(released[i][1:]...)) != nil {
			err = errors.New("stderr did not take the receipts") // whatever its error: EPIPE is stdout's
		}
	}
	x.own.host.hold(err == nil && list != nil)
	if err == nil && !held { // once more, now that belay ends nothing any more
		err = lost()
	}
	if err == nil {
		end(orderLetGo, services...)
	} else {
		x.own.host.hold(false)
		for i := range list {
			list[i].Withdrawn = true
		}
		recordRelease(x.cfg.home, list) // after an error the pid is not running, which services shows
	}
	return err
}

// closing gives the last lines of a run in its format. The answer of the text
// format stands alone on stdout; an error is said on stderr.
func (x *execution) closing(e *ending, answer string, services [][]any) (b []byte) {
	meta := []any{"status", e.status, "exit_code", e.code, "stop_reason", cmp.Or(e.category, "end"), "error_category?", e.category, "error?", e.message,
		"session_id", x.id, "model", x.cfg.model, "workspace", x.cfg.workspace, "sandbox", x.cfg.sandbox, "turns", len(x.asked), "tool_calls", x.toolCalls,
		"input_tokens", x.total[0], "output_tokens", x.total[1], "cached_tokens", x.total[2], "reasoning_tokens", x.total[3], "duration_ms", time.Since(x.began).Milliseconds()}
	list, lines := []json.RawMessage(nil), ""
	for _, s := range services {
		list = append(list, jsonObject(s[1:]...))
		b = append(b, encodeEvent(s[0].(string), s[1:]...)...)
		lines += fmt.Sprintf("\n%s %s", s[0], jsonObject(s[1:]...))
	}
	switch {
	case x.format == "json":
		return append(jsonObject(append(meta, "output", answer, "tools", x.tools, "services", list)...), '\n')
	case x.format == "text" && e.code == 0:
		return []byte(strings.TrimSuffix(answer, "\n") + "\n")
	case x.format == "text":
		x.say("%s: %s%s", x.cfg.program, e.message, lines) // in one call: each waits for a stderr that stands still
		return nil
	case e.code != 0:
		b = append(b, encodeEvent("error", "error", e.message, "error_category", e.category)...)
	}
	b = append(b, encodeEvent("metadata", "meta", json.RawMessage(jsonObject(meta...)))...)
	return append(b, encodeEvent("done")...)
}

// examples follow the usage text: one line for each command, with no other
// command's name in it.
const examples = "\nExamples:\n" + `  belay exec --auto --timeout 20m "make the tests pass"   # exit 75: run again
  belay serve --config /etc/belay/config.toml             # see examples/systemd
  belay turn --session fix --resume "now the second one"  # new without --resume
  belay status --json
  belay sessions
  belay cancel fix
  belay shutdown --now
  belay services stop shell_0a1b2c3d
  belay probe --config llama.toml >> belay.toml           # needs infer.socket
  belay config --set limits.max_turns=20
  belay demo --output-format stream-json
  belay version
  belay help | less
`

// caught makes an error of a panic. It is to be deferred.
func caught(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("bug in belay: panic: %v\n%s", p, debug.Stack())
	}
}

// toolbox is what serve needs of processes: belay as their ancestor, and tools
// for one turn at a time, since only the turn with the main slot has any.
type toolbox struct {
	host *host
	lack error // why no tools are offered
}

func newToolbox(cfg *config) (*toolbox, error) {
	h, err := newHost()
	b := &toolbox{h, errors.New("paths.workspace is not set")}
	if cfg.workspace != "" {
		_, b.lack = planSandbox(toolOptions(cfg, ""), landlockABI())
	}
	return b, err
}

// toolOptions is what procs.go needs of a configuration.
func toolOptions(c *config, run string) jobOptions {
	return jobOptions{runID: run, home: c.home, workspace: c.workspace, sandbox: c.sandbox, network: c.network, writable: c.writable,
		dropNames: c.keyNames, keepNames: c.envKeep}
}

// equip gives a conversation its tools, if any are offered.
func (b *toolbox) equip(a *agent, run string) (err error) {
	if b.lack == nil {
		a.jobs, err = newJobs(b.host, toolOptions(a.cfg, run))
	}
	return err
}

// end ends what the tools of a conversation left, those of all of them where t is
// nil, and says and gives what cannot be ended. who begins the line.
func (b *toolbox) end(t *jobs, who string, say func(string, ...any)) (left string) {
	if b.lack != nil { // nothing was started: what is below us as PID 1 is not ours
		return ""
	}
	t = cmp.Or(t, &jobs{host: b.host})
	defer removeDir(t.scratch)
	if left = leftOver(t.endAll(orderEnd, func(*job) bool { return true })); left != "" {
		say("%s%s", who, left)
	}
	return left
}

// reap takes in, as PID 1 of a container, what has died and is nobody's.
func reap(h *host) {
	if h.pid == 1 {
		h.orphans()
	}
}

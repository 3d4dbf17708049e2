//go:build linux

// Belay is a headless coding agent that never leaks a process. `belay exec`
// runs one task: it streams an OpenAI-compatible chat model, runs the tool
// calls, and owns every process that it starts. `belay serve` is one daemon
// for each home, in front of a local llama-server.
//
// Reading order: main, config, lock, frame, journal, sse, procs, agent, serve.
// A file refers only to files before it in that order.
//
// Invariants, in order of importance:
//  1. Nothing outlives belay unless it was released with a receipt.
//  2. Exit code 0 means that the provider said the answer is complete and that
//     every receipt on stdout is true.
//  3. A turn that a client was told about is on disk.
//  4. One daemon serves a home, whatever crashes when.
//
// Exit codes: 0 complete · 1 failed · 2 usage or configuration (or a crash of
// the Go runtime, then a line of stderr begins "panic:", "fatal error:" or "SIG")
// · 75 temporary · 124 --timeout · 129, 130, 143 SIGHUP, SIGINT, SIGTERM · 141 the reader of
// stdout left.
package main

import (
	"bufio"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The wait after a second signal; bytes, soft: set here and not by environment, which commands would inherit.
const killWait, memoryLimit = time.Second, 32 << 20

const usageText = `belay: a headless coding agent that never leaks a process

  belay [global flags] exec [flags] PROMPT...     one task, then exit
  belay serve --config FILE                       the daemon of a llama-server
  belay turn [--session ID] [--resume] PROMPT...  send a turn to the daemon
  belay status | sessions | cancel ID | shutdown [--now]  talk to the daemon
  belay probe --config FILE                       [expect] of a llama-server
  belay services [--json] | services stop TASK    what earlier runs released
  belay config                                    all settings, their origins
  belay demo [--output-format F]                  try it: no key, no network
  belay version | help [COMMAND]

Global flags, before or after the command:
  --workspace DIR, -C DIR    directory of the tools (default: the current one)
  --config FILE              default: $BELAY_CONFIG_PATH, HOME/config.toml
  --home DIR                 belay's directory (default: $BELAY_HOME, ~/.belay)
  --model M, --base-url URL  which model, where
  --set KEY=VALUE            any key of the configuration, repeatable
  --no-project-config        do not read AGENTS.md of the workspace
  --verbose                  each request's status and timing on stderr

Flags of exec:
  --auto                     offer tools and run them without asking
  --sandbox MODE             read-only, workspace-write (default),
                             external-sandbox, danger-full-access
  --network                  let sandboxed commands use the network
  --writable DIR             one more directory that they may write, repeatable
  --output-format F          text (default), json, stream-json; --json is json
  --max-turns N              model calls at most (default 200)
  --timeout DURATION         of the whole run, such as 10m (default: none)
  --append-system-prompt T   more instructions
  --record FILE              append the provider's responses to FILE
  --replay FILE              answer from such a file, without network

Most commands take --json. Only PROMPT - reads stdin; flags stand before PROMPT.
`

//go:embed demo.jsonl
var demoRecording []byte

func main() {
	if os.Args[0] == keeperName {
		os.Exit(keeperMain())
	}
	os.Exit(run(os.Args, os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}

// run is the program: it gives the exit code. An error is said here and nowhere else.
func run(args, env []string, stdin, stdout, stderr *os.File) int {
	debug.SetMemoryLimit(memoryLimit)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // nobody reads it: EPIPE is then an error like another
	code := 2
	cwd, _ := os.Getwd() // "" where it was deleted: what needs none works there, too
	cfg, err := loadConfig(args, env, cwd)
	if err == nil {
		code, err = command(cfg, stdin, stdout, stderr)
	}
	if help, asked := errors.AsType[*helpRequest](err); asked {
		_, err = io.WriteString(stdout, helpOn(help.topic))
		code = endingOf(err).code
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", filepath.Base(args[0]), err)
	}
	return code
}

// helpOn gives what usage and examples say about a command, all for "".
func helpOn(topic string) string {
	if topic == "" {
		return usageText + examples
	}
	return strings.Join(regexp.MustCompile(`(?m)^  belay (.* )?`+topic+`( .*)?\n|^Flags of `+topic+`:\n(  .*\n)*`).FindAllString(usageText+examples, -1), "")
}

// command does what the command line asks for.
func command(cfg *config, stdin, stdout, stderr *os.File) (code int, err error) {
	// Before signals are armed: whoever waits here for a prompt on stdin ends by a signal as any program does.
	transport, record, err := source(cfg, stdin, demoRecording)
	if err != nil {
		return 2, err
	}
	out := bufio.NewWriter(stdout)
	switch cfg.command {
	case "version":
		info, _ := debug.ReadBuildInfo()
		_, commit, known := strings.Cut(fmt.Sprint(info), "vcs.revision=") // as go version -m prints it
		fmt.Fprintf(out, "%s %s%.20s %s %s/%s\n", cfg.program, version(), keep(" commit "+commit, known), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	case "config":
		for _, s := range cfg.values {
			fmt.Fprintf(out, "%-28s %-40s %s\n", s.key, s.value, s.origin)
		}
	case "services":
		return services(cfg, out)
	case "exec":
		return guarded(cfg, transport, record, stdout, stderr)
	case "demo":
		return demo(*cfg, transport, record, stdout, stderr)
	case "serve":
		return runServe(cfg, stderr)
	case "probe":
		return runProbe(cfg, stdout, stderr)
	case "turn", "status", "sessions", "cancel", "shutdown":
		return runClient(cfg, stdout, stderr)
	}
	return flushed(out, 0)
}

// demo runs the recording in a workspace of its own, which stays for the
// service that the recorded model starts.
func demo(cfg config, transport http.RoundTripper, record io.Writer, stdout, stderr *os.File) (code int, err error) {
	if cfg.workspace, err = os.MkdirTemp("", "belay-demo-"); err != nil {
		return 1, fmt.Errorf("cannot make a workspace for the demo: %w", err)
	}
	cfg.prompt = "Start the service and check that it is ready."
	code, err = guarded(&cfg, transport, record, stdout, stderr)
	list, _ := receipts(cmp.Or(cfg.home, os.DevNull)) // where there is none, services cannot help either
	if i := slices.IndexFunc(list, func(r receipt) bool { return r.Workspace == cfg.workspace }); i >= 0 {
		(&printer{stderr: stderr}).say("%[1]s: see what was released with: %[1]s services; end it with: %[1]s services stop %[2]s", cfg.program, list[i].TaskID)
	}
	return code, err
}

// guarded runs exec with signals armed before anything is started.
func guarded(cfg *config, transport http.RoundTripper, record io.Writer, stdout, stderr *os.File) (code int, err error) {
	ctx := untilSignal()
	h, err := newHost()
	if err != nil {
		return 1, err
	}
	done, second := make(chan int, 1), make(chan os.Signal, 1)
	// owner: guarded; ends when the run has passed its teardown; joined by done, but for a second signal
	go func() { done <- runExec(ctx, cfg, h, transport, record, stdout, stderr) }()
	// After the first signal, and so only if one is caught: a second set beside the first, which stays.
	context.AfterFunc(ctx, func() { time.AfterFunc(sameSignal, func() { signal.Notify(second, endSignals()...) }) })
	for {
		select {
		case code := <-done:
			return code, nil
		case sig := <-second:
			// owner: guarded; ends when no keeper is being started, which somebody may hold up; joined by the exit
			go h.killAll()
			time.AfterFunc(killWait, func() { done <- 128 + int(sig.(syscall.Signal)) }) // a third one postpones nothing
		}
	}
}

// services lists what earlier runs released, or stops one of them: 0 when it
// is gone, 1 when its pid belongs to somebody else or it cannot be ended.
func services(cfg *config, stdout *bufio.Writer) (code int, err error) {
	list, err := receipts(cfg.home)
	if err != nil {
		return 1, err
	}
	for _, r := range list {
		state := r.state()
		switch {
		case len(cfg.args) == 0 && cfg.jsonOut:
			fmt.Fprintf(stdout, "%s\n", jsonOf(struct {
				receipt
				State string `json:"state"`
			}{r, state}))
		case len(cfg.args) == 0:
			fmt.Fprintf(stdout, "%s  %-10s  pid %d  %s  %s\n", r.TaskID, state, r.PID, r.At, oneLine(r.Command))
		case r.TaskID != cfg.args[1]:
		case state == "gone":
			fmt.Fprintf(stdout, "%s: gone already\n", r.TaskID)
			return flushed(stdout, 0)
		case state != "running":
			return 1, fmt.Errorf("%s is not touched, its state is %q", r.TaskID, state)
		default:
			if left := r.stop(); left != "" {
				return 1, errors.New(r.TaskID + leftOver(left))
			}
			fmt.Fprintf(stdout, "%s: ended\n", r.TaskID)
			return flushed(stdout, 0)
		}
	}
	if len(cfg.args) > 0 {
		return 1, fmt.Errorf("no released service %q; %s services lists them", cfg.args[1], cfg.program)
	}
	return flushed(stdout, 0)
}

// receipts reads the list of a home, without the withdrawn ones. A torn record
// is skipped, and not the next one, which then begins in its line: inside of a
// record these characters cannot stand, since JSON escapes the quotes.
func receipts(home string) (all []receipt, err error) {
	b, err := readRegular(filepath.Join(home, "services", "released.jsonl"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, rest := range strings.Split(string(b), `{"task_id"`) {
		var r receipt
		if json.Unmarshal([]byte(`{"task_id"`+rest), &r) == nil {
			all = append(slices.DeleteFunc(all, func(o receipt) bool { return o.TaskID == r.TaskID }), r)
		}
	}
	return slices.DeleteFunc(all, func(r receipt) bool { return r.Withdrawn }), nil
}

// state says what became of a service: of these the first that is true. A boot
// that /proc does not name (subset=pid) says nothing about another one.
func (r receipt) state() string {
	p, ok := readProc(r.PID)
	boot, ns := place()
	return cmp.Or(keep("gone", r.BootID != boot && r.BootID != "" && boot != ""), keep("unknown", r.PIDNS != ns || r.BootID != boot || p.state == '?'), keep("pid reused", ok && p.start != r.StartTime),
		keep("gone", !ok || p.dead()), "running")
}

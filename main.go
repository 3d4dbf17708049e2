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
// the Go runtime, then stderr begins "panic:" or "fatal error:") · 75 temporary
// · 124 --timeout · 129, 130, 143 SIGHUP, SIGINT, SIGTERM · 141 the reader of
// stdout left.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	sameSignal  = time.Second // a further signal within this time counts as the first
	killWait    = time.Second // after a second signal
	memoryLimit = 32 << 20    // bytes, soft: set here and not by environment, which commands would inherit
)

const usageText = `belay: a headless coding agent that never leaks a process

  belay [global flags] exec [flags] PROMPT...       one task, then exit
  belay serve --config FILE                         the daemon of a home, in front of a llama-server
  belay turn [--session ID] [--resume] PROMPT...    send a turn to the daemon, print what comes back
  belay status | sessions | cancel ID | shutdown [--now]    talk to the daemon; each knows --json
  belay probe --config FILE                         print the [expect] block of a live llama-server
  belay services [--json] | services stop TASK      services released by earlier runs
  belay config                                      the effective configuration and its origins
  belay demo [--output-format F]                    the main job on a built-in model: no key, no network
  belay version | help [COMMAND]

Global flags, before or after the command:
  --workspace DIR, -C DIR    directory of the tools (default: the current one)
  --config FILE              configuration (default: $BELAY_CONFIG_PATH, HOME/config.toml)
  --home DIR                 belay's own directory (default: $BELAY_HOME, ~/.belay)
  --model M, --base-url URL  which model, where
  --set KEY=VALUE            any key of the configuration, repeatable
  --no-project-config        do not read AGENTS.md of the workspace
  --verbose                  each request's status and timing on stderr

Flags of exec:
  --auto                     offer tools and run them without asking
  --sandbox MODE             read-only, workspace-write (default), external-sandbox, danger-full-access
  --network                  let sandboxed commands use the network
  --writable DIR             one more directory that they may write, repeatable
  --output-format F          text (default), json, stream-json; --json is json
  --max-turns N              model calls at most (default 200)
  --timeout DURATION         of the whole run, such as 10m (default: none)
  --append-system-prompt T   more instructions
  --record FILE              append the provider's responses to FILE
  --replay FILE              answer from such a file, without network

PROMPT - is read from stdin. A flag after the first word of PROMPT is prompt text.
`

//go:embed demo.jsonl
var demoRecording []byte

func main() {
	if os.Args[0] == keeperName {
		os.Exit(keeperMain())
	}
	os.Exit(run(os.Args, os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}

// run is the program: it gives the exit code.
func run(args, env []string, stdin, stdout, stderr *os.File) int {
	debug.SetMemoryLimit(memoryLimit)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // nobody reads it: EPIPE is then an error like another
	program := filepath.Base(args[0])
	cwd, err := os.Getwd()
	var cfg *config
	if err == nil {
		cfg, err = loadConfig(args, env, cwd)
	}
	var help *helpRequest
	switch {
	case errors.As(err, &help):
		io.WriteString(stdout, helpOn(help.topic, usageText))
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "%s: %v\n", program, err)
		return 2
	}
	switch cfg.command {
	case "version":
		fmt.Fprintf(stdout, "%s %s %s %s/%s\n", program, version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	case "config":
		for _, s := range cfg.values {
			fmt.Fprintf(stdout, "%-28s %-40s %s\n", s.key, s.value, s.origin)
		}
	case "services":
		return services(cfg, stdout, stderr)
	case "exec":
		return guarded(cfg, stdin, stdout, stderr)
	case "demo":
		return demo(*cfg, stdin, stdout, stderr)
	case "serve":
		return runServe(cfg, stderr)
	case "probe":
		return runProbe(cfg, stdout, stderr)
	case "turn", "status", "sessions", "cancel", "shutdown":
		if _, _, err = source(cfg, stdin, nil); err != nil {
			fmt.Fprintf(stderr, "%s: %v\n", program, err)
			return 2
		}
		return runClient(cfg, stdout, stderr)
	}
	return 0
}

// demo runs the recording in a workspace of its own, which stays for the
// service that the recorded model starts.
func demo(cfg config, stdin, stdout, stderr *os.File) int {
	dir, err := os.MkdirTemp("", "belay-demo-")
	if err != nil {
		fmt.Fprintf(stderr, "%s: cannot make a workspace for the demo: %v\n", cfg.program, err)
		return 1
	}
	cfg.workspace, cfg.prompt = dir, "Start the service and check that it is ready."
	code := guarded(&cfg, stdin, stdout, stderr)
	if code == 0 {
		fmt.Fprintf(stderr, "%[1]s: see what was released with: %[1]s services; end it with: %[1]s services stop TASK\n", cfg.program)
	}
	return code
}

// guarded runs exec with signals armed before anything is started.
func guarded(cfg *config, stdin, stdout, stderr *os.File) int {
	// Before signals are armed: whoever waits here for a prompt on stdin ends by a signal as any program does.
	transport, record, err := source(cfg, stdin, demoRecording)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", cfg.program, err)
		return 2
	}
	var interrupts []interrupt
	ctx := context.Background()
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM} {
		if signal.Ignored(sig) {
			continue // nohup: what was ignored at the start stays ignored
		}
		// Never disarmed: between the receipts and the exit a signal would kill belay, as if the run had failed.
		next, _ := signal.NotifyContext(ctx, sig)
		ctx, interrupts = next, append(interrupts, interrupt{next, sig})
	}
	h, err := newHost()
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", cfg.program, err)
		return 1
	}
	code, done := 0, make(chan int, 1)
	// owner: guarded; ends when the run has passed its teardown; joined by done, but for a second signal
	go func() { done <- runExec(ctx, cfg, h, interrupts, transport, record, stdout, stderr) }()
	first, second := ctx.Done(), make(chan os.Signal, 1)
	var arm, leave <-chan time.Time
	for {
		select {
		case code := <-done:
			return code
		case <-first:
			first, arm = nil, time.After(sameSignal)
		case <-arm: // a second set beside the first, which stays
			for _, i := range interrupts {
				signal.Notify(second, i.sig)
			}
		case sig := <-second:
			h.killAll()
			code, leave = 128+int(sig.(syscall.Signal)), time.After(killWait)
		case <-leave:
			return code
		}
	}
}

// services lists what earlier runs released, or stops one of them: 0 when it
// is gone, 1 when its pid belongs to somebody else or it cannot be ended.
func services(cfg *config, stdout, stderr io.Writer) int {
	list, err := receipts(cfg.home)
	found := ""
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
		case state == "running":
			found = "ended"
			if left := leftOver(r.stop()); left != "" {
				err = errors.New(r.TaskID + left)
			}
		case state == "gone":
			found = "gone already"
		default:
			err = fmt.Errorf("%s is not touched, its state is %q", r.TaskID, state)
		}
	}
	if len(cfg.args) > 0 && found == "" && err == nil {
		err = fmt.Errorf("no released service %q; belay services lists them", cfg.args[1])
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", cfg.program, err)
		return 1
	}
	if found != "" {
		fmt.Fprintf(stdout, "%s: %s\n", cfg.args[1], found)
	}
	return 0
}

// receipts reads the list of a home, without the withdrawn ones. A torn line
// is skipped.
func receipts(home string) (all []receipt, err error) {
	b, err := os.ReadFile(filepath.Join(home, "services", "released.jsonl"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		var r receipt
		if json.Unmarshal([]byte(line), &r) != nil {
			continue
		}
		all = slices.DeleteFunc(all, func(o receipt) bool { return o.TaskID == r.TaskID })
		if !r.Withdrawn {
			all = append(all, r)
		}
	}
	return all, nil
}

// state says what became of a service: running, gone, pid reused or unknown.
func (r receipt) state() string {
	p, ok := readProc(r.PID)
	switch {
	case r.BootID != bootID():
		return "gone"
	case r.PIDNS != pidNS():
		return "unknown"
	case ok && p.start != r.StartTime:
		return "pid reused"
	case !ok || p.dead():
		return "gone"
	}
	return "running"
}

//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// serve.go is the daemon of a home and the commands that talk to it: the check
// of the model's server, connections, turns, the end, the client. It owns the
// order of start and end, who gets the main slot when, and what a client that
// reads slowly loses. It never decodes what the model says, never sends a
// history to a server that has not passed the check, and nothing in a turn ever
// waits for a client.
//
// A turn belongs to its session. Its goroutine is the only one that touches the
// journal; everything that others may ask about is guarded by daemon.mu, and no
// wait happens under that.

const (
	contentMax   = 1 << 20                // bytes of a user's message; more is a file for the workspace
	backlogMax   = 4 << 20                // bytes of unread frames of a connection, and of a turn's kept events
	finalWait    = 10 * time.Second       // for a client to take a final frame
	flushWait    = time.Second            // for the last frames of a daemon that ends
	hangUpTick   = 100 * time.Millisecond // how often a half-closed connection is looked at: poll(2) has no channel
	clientFrame  = 15 << 20               // bytes of a frame that a command takes: the most that a daemon may be configured to send
	propsMax     = 16 << 20               // bytes of /props; templates have some 100 KB
	saidMax      = 200                    // bytes of a server's words in a line for people
	daemonMemory = 256 << 20              // bytes, soft: 64 backlogs of 4 MiB; exec's limit would only make the collector run
	probeRepeats = 12                     // of probeText: about 1,200 tokens, enough that reading them twice is noticed
	leastReuse   = 0.5                    // of turn 1's tokens that turn 2 must find cached; below 0.9 there is a warning
	goodReuse    = 0.9                    // templates may rewrite the tail of the last reply, hence not 1

	probeText = "The quick brown fox reads func main() { fmt.Println(\"ok\", 0x1f, 3.14159) } at 23:59:08. " +
		"Größe, naïve, Ελληνικά, русский, 日本語のテキスト, 中文文本, 한국어, 🦊🚀. if err != nil { return nil, err } // 1234567890\n"
	probeTool = `[{"type":"function","function":{"name":"loop_selftest","description":"Report that you can call tools.","parameters":{"type":"object","properties":{"word":{"type":"string","enum":["ready"]}},"required":["word"]}}}]`
)

// How a turn may be ended from outside.
var (
	errCancelled   = errors.New("the user cancelled the turn")
	errInterrupted = errors.New("the daemon was stopped")
)

// found says what is wrong with the model's server, with its section of the runbook.
func found(anchor, format string, args ...any) *wireError {
	e := newWireError(codeNotReady, fmt.Sprintf(format, args...))
	e.Anchor = anchor
	return e
}

// serverProps is what we read of GET /props. n_ctx is per slot.
type serverProps struct {
	Role     string
	Slots    int    `json:"total_slots"`
	Template string `json:"chat_template"`
	EOS      string `json:"eos_token"`
	Settings struct {
		Ctx int `json:"n_ctx"`
	} `json:"default_generation_settings"`
}

// upstream is the model's server, set once. As a transport it asks for /props
// before each request, on the connection that the request then takes: a server
// that was replaced is noticed before it is sent anything. It cannot change
// between the two, since loading a model takes seconds.
type upstream struct {
	cfg     *config
	root    string // URL without /v1/chat/completions
	base    http.RoundTripper
	say     func(format string, args ...any) // one line of the check
	changed func(*wireError)                 // nil for probe, which expects nothing
}

func newUpstream(cfg *config, say func(string, ...any), changed func(*wireError)) *upstream {
	root, _, _ := strings.Cut(cfg.url, "?")
	root = strings.TrimSuffix(strings.TrimSuffix(root, "/chat/completions"), "/v1")
	return &upstream{cfg, root, newClient(clientOptions{socket: cfg.socket}).transport, say, changed}
}

func (u *upstream) RoundTrip(req *http.Request) (*http.Response, error) {
	if _, bad := u.props(req.Context()); bad != nil {
		if u.changed != nil && bad.Anchor != "server-unreachable" && bad.Anchor != "server-loading" {
			u.changed(bad)
		}
		return nil, bad
	}
	return u.base.RoundTrip(req)
}

// ask makes one small request. A machine under load takes a while even for these.
func (u *upstream) ask(ctx context.Context, by http.RoundTripper, method, path string, body []byte) (status int, raw []byte, bad *wireError) {
	ctx, stop := context.WithTimeout(ctx, max(u.cfg.liveness, connectTimeout))
	defer stop()
	req, err := http.NewRequestWithContext(ctx, method, u.root+path, bytes.NewReader(body))
	var resp *http.Response
	if err == nil {
		if req.Header.Set("Content-Type", "application/json"); u.cfg.key != "" {
			req.Header.Set(cmp.Or(u.cfg.keyHeader, "Authorization"), keep("Bearer ", u.cfg.keyHeader == "")+u.cfg.key.reveal())
		}
		resp, err = by.RoundTrip(req)
	}
	if err == nil {
		defer resp.Body.Close()
		status = resp.StatusCode
		raw, err = io.ReadAll(io.LimitReader(resp.Body, propsMax))
	}
	if err != nil && !errors.As(err, &bad) {
		bad = found("server-unreachable", "%s %s at %s: %s; llama-server leaves its socket file behind when it stops and cannot bind it again: remove the file, then start it", method, path, cmp.Or(u.cfg.socket, u.root), errnoText(err))
	}
	return status, raw, bad
}

// props reads GET /props and compares it with the configuration. The template is
// hashed as it came: what is a line end off is another version of llama.cpp.
func (u *upstream) props(ctx context.Context) (p serverProps, bad *wireError) {
	status, raw, bad := u.ask(ctx, u.base, http.MethodGet, "/props", nil)
	if bad != nil {
		return p, bad
	}
	err, cfg := json.Unmarshal(raw, &p), u.cfg
	switch sum := templateSum(p.Template); {
	case status == 401 || status == 403:
		return p, found("server-auth", "GET /props: status %d, expected 200: set infer.api_key_env or infer.api_key_file; it said %.*q", status, saidMax, raw)
	case status == 503:
		return p, found("server-loading", "GET /props: status 503, expected 200: the server is loading its model")
	case p.Role == "router":
		return p, found("server-router", "GET /props: role router, expected none: start llama-server with one model")
	case err != nil || status != 200 || p.Settings.Ctx == 0 || p.Slots == 0 || p.Template == "":
		return p, found("server-not-llama", "GET /props: status %d, expected 200 with n_ctx, total_slots and chat_template; it said %.*q", status, saidMax, raw)
	case u.changed == nil:
	case sum != cfg.expectTemplate:
		path, hint := filepath.Join(cfg.home, "run", "observed-template.jinja"), ""
		if templateSum(p.Template+"\n") == cfg.expectTemplate || templateSum(strings.TrimSuffix(p.Template, "\n")) == cfg.expectTemplate {
			hint = ", which differs only in the last newline: another version of llama.cpp"
		}
		_ = os.WriteFile(path, []byte(p.Template), fileMode) // a convenience
		return p, found("template-mismatch", "GET /props: the chat template's sha256 is %s, the configuration expects %s%s; the server's template is in %s", sum, cfg.expectTemplate, hint, path)
	case p.Settings.Ctx != cfg.expectCtx:
		return p, found("n-ctx-mismatch", "GET /props: n_ctx is %d, the configuration expects %d; this is per slot, and -c of llama-server is shared by its slots", p.Settings.Ctx, cfg.expectCtx)
	case p.Slots != cfg.expectSlots:
		return p, found("slots-mismatch", "GET /props: total_slots is %d, the configuration expects %d; start llama-server with -np", p.Slots, cfg.expectSlots)
	}
	return p, nil
}

func templateSum(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }

// await reads /props, and waits while the server loads its model or, if the
// configuration says so, is not there yet.
func (u *upstream) await(ctx context.Context) (p serverProps, bad *wireError) {
	for began, said := time.Now(), ""; ; {
		p, bad = u.props(ctx)
		waits := bad != nil && (bad.Anchor == "server-loading" || u.cfg.waitForServer && bad.Anchor == "server-unreachable")
		if !waits || time.Since(began) >= u.cfg.loadTimeout || ctx.Err() != nil {
			return p, bad
		}
		if said != bad.Message {
			said = bad.Message
			u.say("waiting: %s", said)
		}
		select {
		case <-ctx.Done():
		case <-time.After(u.cfg.poll):
		}
	}
}

// tokenize gives the number of tokens of a text.
func (u *upstream) tokenize(ctx context.Context, text string, special bool) (int, *wireError) {
	var r struct{ Tokens []uint32 }
	status, raw, bad := u.ask(ctx, u, http.MethodPost, "/tokenize", jsonOf(map[string]any{"content": text, "add_special": false, "parse_special": special}))
	if bad == nil && (json.Unmarshal(raw, &r) != nil || status != 200 || len(r.Tokens) == 0 || len(r.Tokens) > len(text)) {
		bad = found("tokenizer", "POST /tokenize: status %d with %d tokens, expected 200 with 1 to %d; it said %.*q", status, len(r.Tokens), len(text), saidMax, raw)
	}
	return len(r.Tokens), bad
}

// complete sends one completion once: neither a re-send nor a repair, since the
// check is of this server as it is.
func (u *upstream) complete(ctx context.Context, what string, slot, limit int, tools string, messages ...json.RawMessage) (*reply, *wireError) {
	cfg := u.cfg
	c := newClient(clientOptions{url: cfg.url, socket: cfg.socket, header: cfg.keyHeader, key: cfg.key.reveal(), model: cfg.model, liveness: cfg.liveness, version: version(), transport: u})
	r := &request{messages: messages, tools: json.RawMessage(tools), offered: []string{"loop_selftest"}, learned: &learned{map[string]bool{}, map[string]bool{}},
		extra: map[string]any{"id_slot": slot, "cache_prompt": true, "temperature": 0, "seed": 1, "max_tokens": limit}}
	body, err := c.body(r)
	if err != nil {
		return nil, found("server-error", "%s: %v", what, err)
	}
	answer, failed := c.attempt(ctx, r, body, sink{})
	if failed == nil {
		return answer, nil
	}
	anchor := map[string]string{"auth": "server-auth", "network": "server-unreachable", "stall": "server-unreachable"}[failed.category]
	if tools != "" && failed.category == "bad_request" && failed.status >= 500 { // how the server was started is at fault, not the request
		anchor = "tool-call-jinja"
	}
	return nil, found(cmp.Or(anchor, "server-error"), "%s: %.*s; expected an answer", what, saidMax, failed.message)
}

// check is the whole test of a server, in an order in which what is cheap and
// telling comes first.
func (u *upstream) check(ctx context.Context) *wireError {
	p, bad := u.await(ctx)
	if bad != nil {
		return bad
	}
	probe := strings.Repeat(probeText, probeRepeats)
	size, bad := u.tokenize(ctx, probe, false)
	if bad != nil {
		return bad
	}
	if n, bad := u.tokenize(ctx, p.EOS, true); bad != nil || n != 1 {
		u.say("warning: POST /tokenize: the end-of-sequence text %.*q has %d tokens, expected 1", saidMax, p.EOS, n)
	}
	u.say("template %.12s, n_ctx %d, slots %d; the probe has %d tokens", templateSum(p.Template), p.Settings.Ctx, p.Slots, size)
	if bad = u.checkCall(ctx); bad != nil {
		return bad
	}
	messages := []json.RawMessage{systemMessage(probe), userMessage("Answer with the word one.")}
	first, bad := u.complete(ctx, "POST /v1/chat/completions, turn 1", u.cfg.slotMain, 64, "", messages...)
	if bad != nil {
		return bad
	}
	read := value(cmp.Or(first.usage, &usage{}).input)
	if read < int64(size) || first.text+first.reasoning == "" {
		return found("prompt-truncated", "POST /v1/chat/completions, turn 1: %d bytes of text after %d prompt tokens, expected some text and at least the %d tokens of the probe: the server drops what it was sent", len(first.text+first.reasoning), read, size)
	}
	messages = append(messages, assistantMessage(first, nil), userMessage("Answer with the word two."))
	second, bad := u.complete(ctx, "POST /v1/chat/completions, turn 2", u.cfg.slotMain, 64, "", messages...)
	if bad != nil {
		return bad
	}
	cached := cmp.Or(second.usage, &usage{}).cached
	line := fmt.Sprintf("POST /v1/chat/completions, turn 2: %d of turn 1's %d prompt tokens were cached, expected at least %.0f %%", value(cached), read, 100*goodReuse)
	switch share := float64(value(cached)) / float64(read); {
	case cached == nil:
		u.say("warning: turn 2 says nothing about cached tokens; whether each step reads the whole history again is unknown")
	case share < leastReuse:
		return found("no-prefix-cache", "%s: each step would read the whole history again", line)
	default:
		u.say("%s%s", keep("warning: ", share < goodReuse), line)
	}
	return nil
}

// checkCall wants one structured tool call: an agent's whole work goes through it.
func (u *upstream) checkCall(ctx context.Context) *wireError {
	const what = "POST /v1/chat/completions, tool call"
	r, bad := u.complete(ctx, what, u.cfg.slotBackground, 1024, probeTool, systemMessage("You are being tested. Use the tool."), userMessage("Call loop_selftest with the word ready."))
	var args struct{ Word string }
	switch {
	case bad != nil:
		return bad
	case r.finish == "length":
		return found("tool-call-cut", "%s: the reply was cut at 1024 tokens, expected a call; it said %.*q", what, saidMax, r.text)
	case len(r.calls) == 0 && strings.Contains(r.text, "loop_selftest"):
		return found("tool-call-unparsed", "%s: the call came as text, expected it in tool_calls; it said %.*q", what, saidMax, r.text)
	case len(r.calls) == 0:
		return found("no-tool-call", "%s: plain text, expected a call; it said %.*q", what, saidMax, r.text)
	case r.calls[0].args == nil:
		return found("tool-call-arguments", "%s: expected a JSON object as arguments; it said %.*q", what, saidMax, r.calls[0].raw)
	}
	_ = json.Unmarshal(r.calls[0].args, &args) // of another type: not the word
	asked := r.calls[0].name == "loop_selftest" && args.Word == "ready"
	u.say("%s%s: called %.*q with %.*q", keep("warning: not what was asked: ", !asked), what, saidMax, r.calls[0].name, saidMax, r.calls[0].args)
	return nil
}

// daemon serves one home.
type daemon struct {
	// set once
	cfg          *config
	host         *host
	lock         *instanceLock // and owned by loop, as is its listener
	store        *os.Root
	model        *upstream
	say          func(format string, args ...any)
	tools        bool           // there is a workspace, and its sandbox can be enforced
	stops        chan string    // shutdown requests: drain, now
	again        chan struct{}  // the server must be checked again
	turns, conns sync.WaitGroup // conns: all goroutines of connections and listeners

	mu      sync.Mutex
	phase   string           // guarded by mu, as is all below: serving, draining, or what is waited for
	refusal *wireError       // why no turn is taken, nil: they are
	running map[string]*turn // by session, with those that wait
	queue   []*turn          // the first one has the main slot
	peers   map[*peer]bool
}

// turn is one turn of a session, from its acceptance to its result.
type turn struct {
	// set once
	session string
	number  int64
	cancel  context.CancelCauseFunc
	ready   chan struct{} // closed when the main slot is this turn's

	// guarded by daemon.mu
	place, keptSize int // place in queue, as it was told
	seq             int64
	kept            []json.RawMessage // the newest events, up to seq
	watchers        []*watcher
}

// watcher is a request that gets a turn's events and its final frame. owns: the
// turn ends when this client leaves.
type watcher struct {
	peer    *peer
	id      int64
	owns    bool
	dropped int64 // guarded by daemon.mu: events since the last one that fitted
}

// peer is one connection. Frames wait in queue; only write sends them.
type peer struct {
	// set once
	d    *daemon
	sock *net.UnixConn
	cond *sync.Cond // on daemon.mu: queue, size or over has changed

	// guarded by daemon.mu
	queue       net.Buffers
	size        int  // bytes in queue and under way
	final, over bool // queue holds a final frame; nothing more is taken, what is queued still goes out
	open        map[int64]bool
}

// runServe is the daemon from its lock to its end. It gives the exit code.
func runServe(cfg *config, stderr io.Writer) int {
	say := func(format string, args ...any) { fmt.Fprintf(stderr, cfg.program+": "+format+"\n", args...) }
	signals := make(chan os.Signal, 1)
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM} {
		if !signal.Ignored(sig) { // nohup
			signal.Notify(signals, sig)
		}
	}
	debug.SetMemoryLimit(daemonMemory)
	d := &daemon{cfg: cfg, say: say, stops: make(chan string, 1), again: make(chan struct{}, 1), running: map[string]*turn{}, peers: map[*peer]bool{}}
	d.model = newUpstream(cfg, func(format string, args ...any) { say("selftest: "+format, args...) }, d.distrust)
	lock, err := takeLock(cfg.home, cfg.program)
	if err == nil {
		d.lock = lock
		defer lock.release() // deferred first, so it goes last
		d.host, err = newHost()
	}
	if err == nil {
		d.store, err = openStore(cfg.home)
	}
	if err != nil {
		say("%v", err)
		return 1
	}
	defer d.store.Close()
	list, err := listSessions(d.store)
	for _, s := range list { // whatever a crash left open is closed now
		j, openErr := openSession(d.store, s.Session, true, "", "")
		if openErr != nil {
			say("%v; see docs/runbook.md#session-damaged", openErr)
			continue
		}
		j.close()
	}
	if err != nil {
		say("the list of sessions is not complete: %v", err)
	}
	if cfg.workspace != "" {
		if _, err = planSandbox(d.jobOptions(""), landlockABI()); err != nil {
			say("no tools are offered: %v", err)
		}
		d.tools = err == nil
	}
	d.setPhase("checking the server", newWireError(codeNotReady, "the server is being checked"))
	return d.loop(signals)
}

// loop owns the lock, the socket and the stages of the end: 1 drain, 2 now.
func (d *daemon) loop(signals <-chan os.Signal) int {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	tick := time.NewTicker(d.cfg.poll)
	defer tick.Stop()
	checked, busy := make(chan *wireError, 1), false
	var drained <-chan time.Time
	idle := make(chan struct{})
	stage, last := 0, time.Time{}
	for d.askAgain(); ; {
		order := 0
		select {
		case <-d.again:
			if !busy {
				busy = true
				// owner: loop; ends when the check does, with ctx at the latest; joined by checked or the end of the process
				go func() { checked <- d.model.check(ctx) }()
			}
		case bad := <-checked:
			if busy = false; !d.judge(bad, stage) {
				return 1
			}
		case <-tick.C:
			d.supervise()
		case <-drained:
			order = 2
		case mode := <-d.stops:
			order = map[string]int{"now": 1}[mode] + 1
		case sig := <-signals:
			if stage == 0 || time.Since(last) > sameSignal {
				if last, order = time.Now(), stage+1; order > 2 {
					d.host.killAll()
					return 128 + int(sig.(syscall.Signal))
				}
			}
		case <-idle:
			d.farewell()
			return 0
		}
		switch {
		case order <= stage:
			continue
		case d.lock.listener == nil:
			return 0 // nothing was served yet
		case stage == 0:
			drained = time.After(d.cfg.drain)
			d.setPhase("draining", newWireError(codeDraining, "the daemon is about to stop"))
			d.interrupt(1) // those that wait for the slot
			// owner: loop; ends when the last turn does; joined by idle
			go func() { d.turns.Wait(); close(idle) }()
		}
		if stage = order; stage > 1 {
			d.interrupt(0)
		}
	}
}

// setPhase says what the daemon does: to clients, and in the lock's note to
// whoever is refused. The note may not hold the word that heads the check's lines.
func (d *daemon) setPhase(phase string, refusal *wireError) {
	d.mu.Lock()
	d.phase, d.refusal = phase, refusal
	d.mu.Unlock()
	d.lock.note(phase)
}

// askAgain has the server checked once more. Turns ask, not a clock: three
// completions each minute would be a load on a server that nobody needs.
func (d *daemon) askAgain() {
	select {
	case d.again <- struct{}{}:
	default: // it will be anyway
	}
}

// judge takes the outcome of a check. The first one decides whether the daemon
// serves at all; false: it does not.
func (d *daemon) judge(bad *wireError, stage int) bool {
	first := d.lock.listener == nil
	if bad != nil {
		d.model.say("%s", bad.Message)
		d.say("selftest failed: %[1]s; see docs/runbook.md#%[1]s", bad.Anchor)
		d.distrust(bad)
		return !first
	}
	if stage > 0 {
		return true
	}
	if first {
		if err := d.listen(); err != nil {
			d.say("%v", err)
			return false
		}
	}
	d.setPhase("serving", nil)
	if path := os.Getenv("NOTIFY_SOCKET"); first && path != "" {
		c, err := net.Dial("unixgram", path) // sd_notify(3)
		if err == nil {
			_, err = c.Write([]byte("READY=1\n"))
			c.Close()
		}
		if err != nil {
			d.say("tell the service manager at %s: %v", path, err)
		}
	}
	return true
}

// distrust refuses turns from now on: the server is not the one that passed. A
// running turn ends, since its history must not reach this server.
func (d *daemon) distrust(bad *wireError) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusal == nil { // else a check is under way, or the end
		d.askAgain()
		for _, t := range d.running {
			t.cancel(bad)
		}
	}
	if d.refusal == nil || d.refusal.Code == codeNotReady {
		d.phase, d.refusal = "not ready: "+bad.Anchor, bad
	}
}

func (d *daemon) listen() error {
	ln, err := d.lock.listen()
	if err == nil {
		d.conns.Add(1)
		// owner: daemon; ends when the listener is closed; joined by conns
		go d.accept(ln)
	}
	return err
}

// supervise runs at each tick: a socket file that somebody deleted comes back,
// and as PID 1 of a container belay reaps.
func (d *daemon) supervise() {
	if d.host.pid == 1 {
		d.host.orphans()
	}
	if _, err := os.Lstat(socketPath(d.cfg.home)); d.lock.listener != nil && errors.Is(err, fs.ErrNotExist) {
		d.lock.unlisten()
		d.say("%s was deleted and is made again, error: %v", socketPath(d.cfg.home), d.listen())
	}
}

// interrupt ends the turns from place on in the queue.
func (d *daemon) interrupt(place int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.queue[min(place, len(d.queue)):] {
		t.cancel(errInterrupted)
	}
}

// farewell takes the socket away and lets every client have its last frames.
func (d *daemon) farewell() {
	d.lock.unlisten()
	d.mu.Lock()
	d.phase = "ended" // for a connection that was accepted just now
	for p := range d.peers {
		p.endLocked(&wireReply{Type: "bye", Reason: "shutdown"})
		_ = p.sock.SetWriteDeadline(time.Now().Add(flushWait))
	}
	d.mu.Unlock()
	d.conns.Wait()
}

// accept takes connections, from our own user and root, up to the limit.
func (d *daemon) accept(ln *net.UnixListener) {
	defer d.conns.Done()
	for {
		sock, err := ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil { // no descriptors: they come back
			time.Sleep(hangUpTick)
			continue
		}
		p := &peer{d: d, sock: sock, cond: sync.NewCond(&d.mu), open: map[int64]bool{}}
		d.mu.Lock()
		switch {
		case !peerAllowed(sock):
			p.endLocked(newWireError(codePermissionDenied, "this daemon serves its own user alone"))
		case len(d.peers) >= d.cfg.maxClients:
			p.endLocked(newWireError(codeOverloaded, fmt.Sprintf("%d clients are connected, no more are possible (limits.max_clients)", len(d.peers))))
		case d.phase == "ended":
			p.endLocked(newWireError(codeDraining, "the daemon has stopped"))
		default:
			d.peers[p] = true
			d.conns.Add(1)
			// owner: peer; ends when the connection does, which write closes at its end; joined by conns
			go p.read()
		}
		d.mu.Unlock()
		d.conns.Add(1)
		// owner: peer; ends when over and the queue is empty, or a write failed; joined by conns
		go p.write()
	}
}

// endLocked says a last thing, if any, and takes nothing more.
func (p *peer) endLocked(msg any) {
	if msg != nil {
		_ = p.pushLocked(0, true, msg)
	}
	p.over = true
	p.cond.Broadcast()
}

// pushLocked queues a frame. A final one that is too large becomes the error
// that says so, and a client must take it in time.
func (p *peer) pushLocked(id int64, final bool, msg any) error {
	frame, err := encodeFrame(p.d.cfg.maxFrame, id, final, msg)
	if final {
		if err != nil {
			frame, err = encodeFrame(p.d.cfg.maxFrame, id, final, err)
		}
		delete(p.open, id)
		p.final = true
		_ = p.sock.SetWriteDeadline(time.Now().Add(finalWait))
	}
	if err == nil && !p.over {
		p.queue, p.size = append(p.queue, frame), p.size+len(frame)
		p.cond.Broadcast()
	}
	return err
}

// write sends what is queued, all of it at once. At its end the client is gone.
func (p *peer) write() {
	d := p.d
	defer d.conns.Done()
	defer p.sock.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		for len(p.queue) == 0 && !p.over {
			p.cond.Wait()
		}
		if len(p.queue) == 0 {
			break
		}
		// All that waits in one writev(2): with a frame each, 64 clients of a fast model cost 64
		// system calls a token. What is under way counts as backlog until it is taken.
		batch, size := p.queue, p.size
		p.queue, p.final = nil, false
		d.mu.Unlock()
		_, err := batch.WriteTo(p.sock)
		d.mu.Lock()
		if p.size -= size; err != nil {
			p.over, p.queue = true, nil
		} else if !p.final {
			_ = p.sock.SetWriteDeadline(time.Time{})
		}
		p.cond.Broadcast()
	}
	delete(d.peers, p)
	for _, t := range d.running {
		t.watchers = slices.DeleteFunc(t.watchers, func(w *watcher) bool {
			if w.peer == p && w.owns {
				t.cancel(errCancelled)
			}
			return w.peer == p
		})
	}
}

// read takes requests, none while the client does not take its answers.
func (p *peer) read() {
	d := p.d
	defer d.conns.Done()
	for over := false; !over; {
		e, err := readFrame(p.sock, d.cfg.maxFrame, func() { _ = p.sock.SetReadDeadline(time.Now().Add(frameWhole)) })
		_ = p.sock.SetReadDeadline(time.Time{})
		var answer any
		var bad *wireError
		switch {
		case err == nil:
			answer = d.handle(p, e)
		case errors.As(err, &bad):
			answer = bad
		case err == io.EOF:
			p.linger()
		}
		d.mu.Lock()
		if answer != nil {
			// A reused id: the open request is still to get its one final frame. Turns and
			// attaches that were refused are not in open.
			if err == nil && p.open[e.ID] {
				e.ID = 0
			}
			_ = p.pushLocked(e.ID, true, answer)
		}
		if err != nil {
			p.endLocked(nil)
		}
		// Answers are never dropped, so a client that sends and never reads is held here.
		for p.size >= backlogMax && !p.over {
			p.cond.Wait()
		}
		over = p.over
		d.mu.Unlock()
	}
}

// linger stays with a client that ended its own direction only, until it has
// what it waits for.
func (p *peer) linger() {
	for {
		p.d.mu.Lock()
		done := len(p.open) == 0 || p.over
		p.d.mu.Unlock()
		raw, err := p.sock.SyscallConn()
		if err == nil && !done {
			err = raw.Control(func(fd uintptr) { done = readerLeft(int(fd)) })
		}
		if done || err != nil {
			return
		}
		time.Sleep(hangUpTick)
	}
}

// handle answers a request, nil if its answer comes later.
func (d *daemon) handle(p *peer, e envelope) any {
	var r wireRequest
	err := json.Unmarshal(e.Msg, &r)
	d.mu.Lock()
	// Looked up and entered in one step: a turn that ended in between would never answer.
	open, t := p.open[e.ID], d.running[r.Session]
	if r.Type == "attach" && t != nil && !open && err == nil {
		p.open[e.ID] = true
		t.attachLocked(&watcher{peer: p, id: e.ID}, max(r.From, 1))
	}
	d.mu.Unlock()
	switch {
	case err != nil || e.ID == 0 || !e.Final || r.Type == "" || r.From < 0 || !in("drain now", cmp.Or(r.Mode, "now")) || !in("continue cancel", cmp.Or(r.OnDisconnect, "cancel")) || r.Type == "turn" && r.Content == "":
		return newWireError(codeBadRequest, "a request needs an id from 1, final true, a type, and the fields of that type as docs/protocol.md has them")
	case open:
		return newWireError(codeDuplicateID, fmt.Sprintf("the id %d belongs to an open request", e.ID))
	case in("turn attach cancel", r.Type) && !validSessionID(r.Session):
		return newWireError(codeBadSessionID, errBadSessionID.Error())
	case r.Type == "turn":
		if bad := d.startTurn(p, e.ID, r); bad != nil {
			return bad
		}
		return nil
	case r.Type == "attach" && t != nil:
		return nil
	}
	switch r.Type {
	case "ping":
		return &wireReply{Type: "pong", Data: r.Data}
	case "status":
		return &wireReply{Type: "status", Status: d.status()}
	case "sessions":
		list, err := listSessions(d.store)
		if err != nil {
			return storeError(err)
		}
		return &wireReply{Type: "sessions", Sessions: jsonOf(list)}
	case "attach":
		return d.lastTurn(r.Session)
	case "cancel":
		if t != nil {
			t.cancel(errCancelled)
		}
		return &wireReply{Type: "ok"}
	case "shutdown":
		select {
		case d.stops <- r.Mode:
		default: // another one is about to be looked at
		}
		return &wireReply{Type: "ok"}
	}
	return newWireError(codeUnknownMessage, "this daemon knows ping, status, turn, attach, cancel, sessions and shutdown")
}

// status is what docs/protocol.md lists. A turn that is accepted but not yet in
// the journal is in neither number.
func (d *daemon) status() json.RawMessage {
	d.mu.Lock()
	defer d.mu.Unlock()
	names := []string{}
	for _, t := range d.queue[:min(1, len(d.queue))] {
		names = append(names, t.session)
	}
	return jsonObject("version", version(), "pid", os.Getpid(), "phase", d.phase, "tools", d.tools, "running", names, "queued", max(0, len(d.queue)-1), "clients", len(d.peers))
}

// startTurn accepts a turn, once it is in the journal, and lets it wait for the
// main slot. Before that the entry in running holds the session.
func (d *daemon) startTurn(p *peer, id int64, r wireRequest) *wireError {
	ctx, cancel := context.WithCancelCause(context.Background())
	t := &turn{session: r.Session, cancel: cancel, ready: make(chan struct{}), place: -1}
	d.mu.Lock()
	bad := d.refusal
	switch {
	case bad != nil && bad.Code == codeNotReady:
		d.askAgain()
	case bad != nil:
	case len(r.Content) > contentMax:
		bad = newWireError(codeContentTooLarge, fmt.Sprintf("the content has %d bytes, at most %d are possible", len(r.Content), contentMax))
	case d.running[t.session] != nil:
		bad = newWireError(codeSessionBusy, "a turn of the session runs: attach to it or cancel it")
	case len(d.running) > d.cfg.maxQueue:
		bad = newWireError(codeOverloaded, fmt.Sprintf("%d turns run or wait, no more are possible (limits.max_queue)", len(d.running)))
	default:
		d.running[t.session] = t
		d.turns.Add(1)
	}
	d.mu.Unlock()
	if bad != nil {
		return bad
	}
	j, err := openSession(d.store, t.session, r.Resume, d.cfg.model, d.cfg.workspace)
	if err == nil {
		if err = j.add(record{Type: recTurnStart, Message: userMessage(r.Content)}); err != nil {
			j.close()
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		for _, w := range t.watchers { // who attached meanwhile
			_ = w.peer.pushLocked(w.id, true, storeError(err))
		}
		delete(d.running, t.session)
		d.turns.Done()
		return storeError(err)
	}
	t.number, p.open[id] = j.turn, true
	t.watchers = append(t.watchers, &watcher{peer: p, id: id, owns: r.OnDisconnect == "cancel"})
	d.queue = append(d.queue, t)
	d.moveLocked()
	if d.refusal != nil { // the end began meanwhile, or the server changed
		cancel(cmp.Or(map[errorCode]error{codeDraining: errInterrupted}[d.refusal.Code], error(d.refusal)))
	}
	// owner: daemon; ends when the turn is over and told; joined by turns
	go d.runTurn(ctx, t, j)
	return nil
}

// moveLocked gives the main slot to the first turn and tells the others their place.
func (d *daemon) moveLocked() {
	for i, t := range d.queue {
		if t.place == i {
			continue
		}
		if t.place = i; i == 0 {
			close(t.ready)
		} else {
			t.emitLocked(jsonObject("type", "queued", "position", i))
		}
	}
}

// storeError words what the session store says.
func storeError(err error) *wireError {
	for _, c := range []struct {
		is   bool
		code errorCode
	}{{errors.Is(err, errNoSession), codeNoSuchSession}, {errors.Is(err, errExists), codeSessionExists}, {errors.Is(err, errHeld), codeSessionBusy}, {errors.Is(err, errDamaged), codeSessionDamaged}, {storageFull(err), codeStorageFull}} {
		if c.is {
			return newWireError(c.code, err.Error())
		}
	}
	return newWireError(codeStorageError, err.Error())
}

// lastTurn answers attach where nothing runs: how the last turn ended.
func (d *daemon) lastTurn(session string) any {
	j, err := openSession(d.store, session, true, "", "")
	if err == nil && j.turn == 0 {
		j.close()
		err = fmt.Errorf("session %s has no turn: %w", session, errNoSession)
	}
	if err != nil {
		return storeError(err)
	}
	defer j.close()
	if !in("end max_turns cancelled interrupted", j.stop) {
		return newWireError(errorCode(j.stop), "the last turn of the session failed")
	}
	var m struct{ Content string }
	_ = json.Unmarshal(j.messages[len(j.messages)-1], &m) // null: there was no text
	return &wireReply{Type: "result", Session: session, Turn: j.turn, Stop: j.stop, Text: m.Content}
}

// emitLocked gives an event to everybody who watches, and keeps it.
func (t *turn) emitLocked(body json.RawMessage) {
	t.seq++
	t.kept, t.keptSize = append(t.kept, body), t.keptSize+len(body)
	for ; t.keptSize > backlogMax; t.kept = t.kept[1:] {
		t.keptSize -= len(t.kept[0])
	}
	for _, w := range t.watchers {
		w.sendLocked(t, t.seq, body)
	}
}

// sendLocked queues an event, behind word of those that were dropped before it,
// or counts it as dropped. Without a body only the word goes out.
func (w *watcher) sendLocked(t *turn, seq int64, body json.RawMessage) {
	if body != nil && w.peer.size >= backlogMax {
		w.dropped++
		return
	}
	reply := wireReply{Type: "event", Session: t.session, Turn: t.number, Seq: seq - 1}
	if w.dropped > 0 {
		reply.Event = jsonObject("type", "lagged", "dropped", w.dropped)
		_ = w.peer.pushLocked(w.id, false, &reply)
		w.dropped = 0
	}
	if reply.Seq, reply.Event = seq, body; body != nil && w.peer.pushLocked(w.id, false, &reply) != nil {
		w.dropped++ // too large for a frame
	}
}

// attachLocked sends what is kept from seq from on, and all that follows.
func (t *turn) attachLocked(w *watcher, from int64) {
	first := t.seq - int64(len(t.kept)) + 1
	w.dropped = max(0, first-from)
	for i, body := range t.kept {
		if seq := first + int64(i); seq >= from {
			w.sendLocked(t, seq, body)
		}
	}
	t.watchers = append(t.watchers, w)
}

// runTurn is the life of an accepted turn. Its end is in the journal before
// anybody is told; where it cannot be, they are told that.
func (d *daemon) runTurn(ctx context.Context, t *turn, j *journal) {
	defer d.turns.Done()
	a := newAgent(d.cfg, nil, d.model, nil, nil)
	answer, err := d.converse(ctx, t, j, a)
	final, stop, why := d.outcome(t, a, answer, err)
	if err := j.endTurn(stop, why); err != nil {
		final = storeError(err)
	}
	// The session is free on disk before it is free here: the next turn opens it at once.
	j.close()
	t.cancel(nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range t.watchers {
		w.sendLocked(t, t.seq+1, nil)
		_ = w.peer.pushLocked(w.id, true, final)
	}
	delete(d.running, t.session)
	d.queue = slices.DeleteFunc(d.queue, func(o *turn) bool { return o == t })
	d.moveLocked()
}

// outcome gives the final message of a turn, its stop for the journal, and the
// reason as the model is told it.
func (d *daemon) outcome(t *turn, a *agent, answer string, err error) (final any, stop, why string) {
	var api *apiError
	var bad *wireError
	switch e := endingOf(err); {
	case err == nil:
		stop = "end"
	case errors.Is(err, errCancelled):
		stop, why = "cancelled", errCancelled.Error()
	case errors.Is(err, errInterrupted):
		stop, why = "interrupted", errInterrupted.Error()
	case e.category == "budget_exhausted":
		stop, why = "max_turns", "the budget of model calls or tokens was spent"
	case errors.As(err, &bad):
	case e.category == "internal":
		d.say("session %s: %v", t.session, err)
		bad = newWireError(codeInternal, "a fault of the daemon ended the turn; its stderr says more")
	case e.category == "context_length":
		bad = newWireError(codeContextFull, e.message)
	case errors.As(err, &api) && api.retryable:
		bad = newWireError(codeServerUnavailable, e.message)
	default:
		bad = newWireError(codeServerError, e.message)
	}
	if bad != nil {
		return bad, string(bad.Code), "the turn failed (" + string(bad.Code) + ")"
	}
	reply := &wireReply{Type: "result", Session: t.session, Turn: t.number, Stop: stop, Text: answer}
	if a.total != [4]*int64{} {
		reply.Usage = jsonObject("input_tokens", a.total[0], "output_tokens", a.total[1], "cached_tokens", a.total[2], "reasoning_tokens", a.total[3])
	}
	return reply, stop, why
}

// converse waits for the slot and runs the turn's conversation. A panic in it
// is an error like another.
func (d *daemon) converse(ctx context.Context, t *turn, j *journal, a *agent) (answer string, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("bug in belay: panic: %v\n%s", p, debug.Stack())
		}
	}()
	select {
	case <-t.ready:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	emit := func(body []byte) {
		d.mu.Lock()
		defer d.mu.Unlock()
		t.emitLocked(bytes.TrimSpace(body))
	}
	if d.tools {
		if a.jobs, err = newJobs(d.host, d.jobOptions(fmt.Sprintf("%s.%d", t.session, t.number))); err != nil {
			return "", err
		}
		defer a.jobs.close()
		// Background commands end with the turn: nobody is there to look after them between turns.
		defer func() {
			if left := a.jobs.endAll(orderEnd, func(*job) bool { return true }); len(left) > 0 {
				d.say("session %s%s", t.session, leftOver(left))
			}
		}()
		a.noNetwork = a.jobs.confine != nil && !d.cfg.network
	}
	a.emit = func(kind string, pairs ...any) { emit(encodeEvent(kind, pairs...)) }
	a.journal = func(kind string, message json.RawMessage) error { return d.record(j, kind, message) }
	a.noServices = "only exec can release a service"
	a.extra = map[string]any{"id_slot": d.cfg.slotMain, "cache_prompt": true, "return_progress": true}
	emit(jsonObject("type", "started", "slot", d.cfg.slotMain))
	a.emit("start", "session_id", t.session, "model", d.cfg.model, "workspace", d.cfg.workspace, "sandbox", d.cfg.sandbox, "network", !a.noNetwork, "version", version())
	system, _ := systemPrompt(d.cfg, a.jobs) // its notices speak of flags of exec
	a.history = []message{{raw: systemMessage(system)}}
	for _, raw := range j.messages {
		m := stepOf(raw)
		a.history = append(a.history, message{raw: raw, callID: m.Call, turn: -2}) // -2: older than any that shorten keeps
		a.learned.ids[m.Call] = true                                               // servers number their calls anew in each turn
	}
	return a.run(ctx)
}

// chatStep is what the journal needs of a message of the chat, or of a call
// that is about to start.
type chatStep struct {
	ID, Name string
	Call     string                `json:"tool_call_id"`
	Calls    []struct{ ID string } `json:"tool_calls"`
}

func stepOf(raw json.RawMessage) (m chatStep) {
	_ = json.Unmarshal(raw, &m) // it was encoded by us
	return m
}

// record puts a step into the journal. A daemon that drains ends the turn where
// a step ends: before a call starts, and behind all but an answer.
func (d *daemon) record(j *journal, kind string, raw json.RawMessage) error {
	d.mu.Lock()
	draining := d.phase == "draining"
	d.mu.Unlock()
	m := stepOf(raw)
	rec := record{Type: kind, Message: raw, Call: cmp.Or(m.Call, m.ID), Name: m.Name}
	for _, c := range m.Calls {
		rec.Calls = append(rec.Calls, c.ID)
	}
	switch {
	case kind == recToolStart && draining:
		return errInterrupted
	case kind == recToolStart:
		rec.Message = nil
	case kind == "user":
		rec.Type = recNote
	}
	if err := j.add(rec); err != nil {
		return storeError(err)
	}
	if draining && (kind != recAssistant || len(rec.Calls) > 0) {
		return errInterrupted
	}
	return nil
}

// jobOptions are those of exec, from the file's settings. One set of jobs exists
// at a time, since only the turn with the main slot has one.
func (d *daemon) jobOptions(run string) jobOptions {
	c := d.cfg
	return jobOptions{runID: run, home: c.home, workspace: c.workspace, sandbox: c.sandbox, network: c.network, writable: c.writable, dropNames: c.keyNames, keepNames: c.envKeep}
}

// runClient is a command that talks to the daemon: one request, and what comes
// back for it. With --json each message is a line; else people read it.
func runClient(cfg *config, stdout io.Writer, stderr *os.File) int {
	p, path, interrupted := &printer{stderr: stderr}, socketPath(cfg.home), 0
	sock, err := net.Dial("unix", path)
	if err != nil {
		p.say("%s: no daemon answers at %s: %s; start one with: %s --home %s serve --config FILE", cfg.program, path, errnoText(err), cfg.program, cfg.home)
		return 1
	}
	defer sock.Close()
	signals, frames := make(chan os.Signal, 1), make(chan envelope)
	r := &wireRequest{Type: cfg.command, Session: cfg.session, Content: cfg.prompt, Resume: cfg.resume, Mode: keep("now", cfg.now)}
	if cfg.command == "cancel" {
		r.Session = cfg.args[0]
	} else if cfg.command == "turn" {
		signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
		if r.Session == "" {
			r.Session = "s-" + randomHex()
			p.say("%s: session %s", cfg.program, r.Session)
		}
	}
	// owner: runClient; ends when the connection does; joined by frames, or by the exit while it hands over a frame
	go func() {
		defer close(frames)
		for {
			e, err := readFrame(sock, clientFrame, func() {})
			if err != nil {
				return
			}
			frames <- e
		}
	}()
	send := func(id int64, r *wireRequest) {
		frame, err := encodeFrame(clientFrame, id, true, r)
		if err == nil {
			_, err = sock.Write(frame)
		}
		if err != nil {
			p.say("%s: send the request: %v", cfg.program, err)
		}
	}
	for send(1, r); ; {
		select {
		case sig := <-signals:
			if interrupted > 0 {
				return interrupted
			}
			interrupted = 128 + int(sig.(syscall.Signal))
			p.say("%s: cancelling; once more to leave the turn alone", cfg.program)
			send(2, &wireRequest{Type: "cancel", Session: r.Session})
		case e, more := <-frames:
			if !more {
				p.say("%s: the daemon closed the connection", cfg.program)
				return 1
			}
			// A shutdown is over with the daemon's bye, id 0. The answer to our cancel, id 2, is of no interest.
			if e.ID < 2 {
				code := show(p, cfg, stdout, e.Msg, interrupted)
				if e.Final && (cfg.command != "shutdown" || e.ID == 0 || code != 0) {
					return code
				}
			}
		}
	}
}

// show prints one message, the answer on stdout and the rest beside it, and
// gives the exit code that it would end a command with.
func show(p *printer, cfg *config, stdout io.Writer, msg json.RawMessage, interrupted int) (code int) {
	var m struct {
		wireReply
		Code            errorCode
		Message, Anchor string
	}
	_ = json.Unmarshal(msg, &m) // another type than expected prints as nothing
	switch {
	case m.Code == codeServerUnavailable:
		code = 75
	case m.Stop == "cancelled" && interrupted > 0:
		code = interrupted
	case m.Type == "error", m.Type == "result" && m.Stop != "end":
		code = 1
	}
	switch {
	case cfg.jsonOut:
		fmt.Fprintf(stdout, "%s\n", msg)
	case m.Type == "error":
		p.say("%s: %s (%s)%s", cfg.program, m.Message, m.Code, keep("; see docs/runbook.md#"+m.Anchor, m.Anchor != ""))
	case code != 0:
		p.say("%s: the turn ended: %s", cfg.program, m.Stop)
	case m.Type == "result":
		fmt.Fprintln(stdout, strings.TrimSuffix(m.Text, "\n"))
	case m.Type == "event" && !in("content reasoning turn_usage progress start started", str(parse(m.Event).get("type"))):
		p.say("%s", oneLine("  "+string(m.Event)))
	case m.Type == "status":
		for _, f := range parse(m.Status) {
			fmt.Fprintf(stdout, "%-8s %s\n", f.key, word(f.val))
		}
	case m.Type == "sessions":
		for _, s := range parse(m.Sessions) {
			o := parse(s.val)
			fmt.Fprintf(stdout, "%-40s %10s bytes  %s\n", word(o.get("session")), word(o.get("bytes")), word(o.get("modified")))
		}
	case m.Type != "event": // ok, bye
		fmt.Fprintln(stdout, m.Type)
	}
	return code
}

// runProbe prints what the configuration of a daemon for this server expects.
func runProbe(cfg *config, stdout, stderr io.Writer) int {
	p, bad := newUpstream(cfg, func(format string, args ...any) { fmt.Fprintf(stderr, cfg.program+": "+format+"\n", args...) }, nil).await(context.Background())
	if bad != nil {
		fmt.Fprintf(stderr, "%s: %s; see docs/runbook.md#%s\n", cfg.program, bad.Message, bad.Anchor)
		return 1
	}
	form := "[expect]\ntemplate_sha256 = %q\nn_ctx = %d\nslots = %d\n"
	if cfg.jsonOut {
		form = `{"template_sha256":%q,"n_ctx":%d,"slots":%d}` + "\n"
	}
	fmt.Fprintf(stdout, form, templateSum(p.Template), p.Settings.Ctx, p.Slots)
	return 0
}

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
// wait happens under that. Each request of a client that wants to see a turn has
// a goroutine that follows the turn's events: what it misses is its own affair.

const (
	contentMax, keptMax = 1 << 20, 4 << 20 // bytes of a user's message, more is a file for the workspace; of a turn's kept events
	openMax             = 64               // requests of a connection that follow turns: each may hold one that is over
	clientFrame         = 15 << 20         // bytes of a frame that a command takes: the most that a daemon may be configured to send
	propsMax, saidMax   = 16 << 20, 200    // bytes of /props, where templates have some 100 KB; of a server's words in a line for people
	daemonMemory        = 256 << 20        // bytes, soft: 64 clients, each 4 MiB behind; exec's limit would only make the collector run
	// For a client to take a final frame; for the last frames of a daemon that ends; when there are no descriptors: they come back.
	finalWait, flushWait, acceptPause = 10 * time.Second, time.Second, 100 * time.Millisecond

	// The check: probeText is repeated to about 1,200 tokens, enough that reading them twice is noticed. Tokens of its
	// tool call, with what a model thinks before it, and of its other answers, one word each. Percent of turn 1's
	// tokens that turn 2 must find cached, and below which there is a warning: templates may rewrite the last reply.
	probeRepeats, callLimit, answerLimit, leastReuse, goodReuse = 12, 1024, 64, 50, 90

	failedCheck = "selftest failed: %[1]s; see docs/runbook.md#%[1]s" // the last line of a check
	probeText   = "The quick brown fox reads func main() { fmt.Println(\"ok\", 0x1f, 3.14159) } at 23:59:08. " +
		"Größe, naïve, Ελληνικά, русский, 日本語のテキスト, 中文文本, 한국어, 🦊🚀. if err != nil { return nil, err } // 1234567890\n"
	probeTool = `[{"type":"function","function":{"name":"loop_selftest","description":"Report that you can call tools.",` +
		`"parameters":{"type":"object","properties":{"word":{"type":"string","enum":["ready"]}},"required":["word"]}}}]`
)

// How a turn may be ended from outside.
var (
	errCancelled error = &ending{category: "cancelled", message: "the user cancelled the turn"}
	errDraining        = newWireError(codeDraining, "the daemon is about to stop")
)

// rule is what an answer of the server must not be: broken, in the words for
// people, and the section of the runbook.
type rule struct {
	anchor string
	broken bool
	words  string
}

// breach gives the first broken rule. said, if any, is quoted from the answer,
// which may repeat the key.
func (u *upstream) breach(what, said string, rules ...rule) *wireError {
	for _, r := range rules {
		if r.broken {
			return pointing(codeNotReady, r.anchor, fmt.Sprintf("%s: %s%s", what, r.words, keep(fmt.Sprintf("; it said %.*q", saidMax, u.clean(said)), said != "")))
		}
	}
	return nil
}

// pointing makes an error reply with its section of the runbook.
func pointing(code errorCode, anchor, message string) *wireError {
	e := newWireError(code, message)
	e.Anchor = anchor
	return e
}

// serverProps is what we read of GET /props. ctx is per slot.
type serverProps struct {
	Role     string `json:"role"`
	Template string `json:"chat_template"`
	EOS      string `json:"eos_token"`
	Slots    int    `json:"total_slots"`
	Settings struct {
		Ctx int `json:"n_ctx"`
	} `json:"default_generation_settings"`
}

// upstream is the model's server, set once. As a transport it asks for /props
// before each request, on the connection that the request then takes: a server
// that was replaced is noticed before it is sent anything. It cannot change
// between the two, since loading a model takes seconds.
type upstream struct {
	*client
	cfg     *config
	say     func(format string, args ...any) // one line of the check
	changed func(*wireError)                 // nil for probe, which expects nothing
}

// newUpstream takes the client of exec as it is.
func newUpstream(cfg *config, say func(string, ...any), changed func(*wireError)) *upstream {
	return &upstream{newAgent(cfg, nil, nil, nil).client, cfg, say, changed}
}

func (u *upstream) RoundTrip(req *http.Request) (*http.Response, error) {
	if _, bad := u.props(req.Context()); bad != nil {
		u.changed(bad)
		return nil, bad
	}
	return u.transport.RoundTrip(req)
}

// ask makes one small request, a POST if it has a body. A machine under load
// takes a while even for these.
func (u *upstream) ask(ctx context.Context, path string, body []byte) (status int, said []byte, bad *wireError) {
	ctx, stop := context.WithTimeout(ctx, max(u.liveness, connectTimeout))
	defer stop()
	root, _, _ := strings.Cut(u.url, "?")
	root = strings.TrimSuffix(strings.TrimSuffix(root, "/chat/completions"), "/v1")
	method := cmp.Or(keep("POST", body != nil), "GET")
	req, _ := http.NewRequestWithContext(ctx, method, root+path, bytes.NewReader(body)) // of a URL that config.go made
	if u.key != "" {
		req.Header.Set(cmp.Or(u.header, "Authorization"), keep("Bearer ", u.header == "")+u.key)
	}
	resp, err := u.transport.RoundTrip(req)
	if err == nil {
		defer resp.Body.Close()
		status = resp.StatusCode
		said, err = io.ReadAll(io.LimitReader(resp.Body, propsMax))
	}
	if err != nil {
		bad = u.breach(method+" "+path+" at "+cmp.Or(u.socket, root), "", rule{"server-unreachable", true, fmt.Sprintf("%.*s", maxMessage, u.clean(errnoText(err)))})
	}
	return status, said, bad
}

// props reads GET /props and compares it with the configuration. The template is
// hashed as it came: what is a line end off is another version of llama.cpp.
func (u *upstream) props(ctx context.Context) (p serverProps, bad *wireError) {
	status, said, bad := u.ask(ctx, "/props", nil)
	if bad != nil {
		return p, bad
	}
	_ = json.Unmarshal(said, &p) // what is missing or of another type is told below
	bad = u.breach(fmt.Sprintf("GET /props: status %d, expected 200", status), string(said),
		rule{"server-auth", status == 401 || status == 403, "set infer.api_key_env or infer.api_key_file"},
		rule{"server-loading", status == 503, "the server is loading its model"},
		rule{"server-router", p.Role == "router", "role router, expected none: start llama-server with one model"},
		rule{"server-not-llama", status != 200 || p.Settings.Ctx == 0 || p.Slots == 0 || p.Template == "", "llama-server gives n_ctx, total_slots and chat_template there"})
	if bad != nil || u.changed == nil {
		return p, bad
	}
	cfg, sum, path := u.cfg, templateSum(p.Template), filepath.Join(u.cfg.home, "run", "observed-template.jinja")
	if sum != cfg.expectTemplate {
		_ = os.WriteFile(path, []byte(p.Template), fileMode) // a convenience
	}
	near := slices.Contains([]string{templateSum(p.Template + "\n"), templateSum(strings.TrimSuffix(p.Template, "\n"))}, cfg.expectTemplate)
	const form = "is %v, the configuration expects %v"
	return p, u.breach("GET /props", "",
		rule{"template-mismatch", sum != cfg.expectTemplate, fmt.Sprintf("the chat template's sha256 "+form+"%s; the server's template is in %s",
			sum, cfg.expectTemplate, keep(", which differs only in the last newline", near), path)},
		rule{"n-ctx-mismatch", p.Settings.Ctx != cfg.expectCtx, fmt.Sprintf("n_ctx, which is per slot, "+form, p.Settings.Ctx, cfg.expectCtx)},
		rule{"slots-mismatch", p.Slots != cfg.expectSlots, fmt.Sprintf("total_slots "+form, p.Slots, cfg.expectSlots)})
}

func templateSum(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }

// await reads /props, and waits while the server loads its model or, if the
// configuration says so, is not there yet.
func (u *upstream) await(ctx context.Context) (p serverProps, bad *wireError) {
	for began, said := time.Now(), ""; ; time.Sleep(min(superviseTick, u.cfg.poll)) { // no longer, or a signal is heard late
		p, bad = u.props(ctx)
		waits := bad != nil && (bad.Anchor == "server-loading" || u.cfg.waitForServer && bad.Anchor == "server-unreachable")
		if !waits || ctx.Err() != nil || time.Since(began) >= u.cfg.loadTimeout {
			return p, bad
		}
		if said != bad.Message {
			said = bad.Message
			u.say("waiting: %s", said)
		}
	}
}

// tokens gives the number of tokens of a text, 0 for an answer that has none.
func (u *upstream) tokens(ctx context.Context, text string, special bool) (n int, said string, bad *wireError) {
	var r struct{ Tokens []uint32 }
	_, raw, bad := u.ask(ctx, "/tokenize", jsonOf(map[string]any{"content": text, "add_special": false, "parse_special": special}))
	if json.Unmarshal(raw, &r) != nil {
		return 0, string(raw), bad
	}
	return len(r.Tokens), string(raw), bad
}

// once sends one completion once: neither a re-send nor a repair, since the
// check is of this server as it is. The reply and its usage are never nil.
func (u *upstream) once(ctx context.Context, what string, slot, limit int, tools string, messages ...json.RawMessage) (*reply, *wireError) {
	r := &request{messages: messages, tools: json.RawMessage(tools), offered: []string{"loop_selftest"},
		learned: &learned{map[string]bool{}, map[string]bool{}},
		extra:   map[string]any{"id_slot": slot, "cache_prompt": true, "temperature": 0, "seed": 1, "max_tokens": limit}}
	body, _ := u.body(r) // of our own making: it can be encoded
	answer, failed := u.attempt(ctx, r, body, func(string, ...any) {})
	answer, e := cmp.Or(answer, &reply{}), cmp.Or(failed, &apiError{})
	answer.usage = cmp.Or(answer.usage, &usage{})
	return answer, u.breach(what, e.message,
		rule{"server-auth", e.category == "auth", "the key is refused"},
		rule{"server-unreachable", in("network stall", e.category), "no answer"},
		// How the server was started is at fault, not the request.
		rule{"tool-call-jinja", tools != "" && e.category == "bad_request" && e.status >= 500, "expected a tool call"},
		rule{"server-error", failed != nil, "expected an answer"})
}

// check is the whole test of a server, in an order in which what is cheap and
// telling comes first. What is wrong is said and ends it.
func (u *upstream) check(ctx context.Context) (bad *wireError) {
	defer func() {
		if bad != nil {
			u.say("%s", bad.Message)
		}
	}()
	p, bad := u.await(ctx)
	if bad != nil {
		return bad
	}
	probe := strings.Repeat(probeText, probeRepeats)
	// Its size in tokens is the measure for turn 1: a server that cuts prompts reads fewer.
	size, said, bad := u.tokens(ctx, probe, false)
	bad = cmp.Or(bad, u.breach("POST /tokenize", said, rule{"tokenizer", size == 0 || size > len(probe), fmt.Sprintf("%d tokens, expected 1 to %d", size, len(probe))}))
	if bad != nil {
		return bad
	}
	eos, _, bad := u.tokens(ctx, p.EOS, true)
	if bad != nil {
		return bad
	}
	u.say(keep("warning: ", eos != 1)+"POST /tokenize: the end-of-sequence text %.*q has %d tokens, expected 1", saidMax, u.clean(p.EOS), eos)
	u.say("template %.12s, n_ctx %d, slots %d; the probe has %d tokens", templateSum(p.Template), p.Settings.Ctx, p.Slots, size)

	// An agent's whole work goes through structured calls.
	const post = "POST /v1/chat/completions, "
	r, bad := u.once(ctx, post+"tool call", u.cfg.slotBackground, callLimit, probeTool,
		systemMessage("You are being tested. Use the tool."), userMessage("Call loop_selftest with the word ready."))
	c, none := append(r.calls, call{})[0], len(r.calls) == 0 // the first one, or one without a name
	bad = cmp.Or(bad, u.breach(post+"tool call", cmp.Or(c.raw, r.text),
		rule{"tool-call-cut", r.finish == "length", fmt.Sprintf("the reply was cut at %d tokens, expected a call", callLimit)},
		rule{"tool-call-unparsed", none && strings.Contains(r.text, "loop_selftest"), "the call came as text, expected it in tool_calls"},
		rule{"no-tool-call", none, "plain text, expected a call"},
		rule{"tool-call-arguments", c.args == nil, "expected a JSON object as arguments"}))
	if bad != nil {
		return bad
	}
	asked := c.name == "loop_selftest" && str(parse(c.args).get("word")) == "ready"
	u.say(keep("warning: ", !asked)+post+"tool call: called %.*q with %.*q", saidMax, u.clean(c.name), saidMax, u.clean(string(c.args)))

	// A prompt that the server cuts in silence would cost the agent its instructions.
	messages := []json.RawMessage{systemMessage(probe), userMessage("Answer with the word one.")}
	first, bad := u.once(ctx, post+"turn 1", u.cfg.slotMain, answerLimit, "", messages...)
	read, text := value(first.usage.input), first.text+first.reasoning
	bad = cmp.Or(bad, u.breach(post+"turn 1", "", rule{"prompt-truncated", read < int64(size) || text == "", fmt.Sprintf(
		"%d bytes of text after %d prompt tokens, expected some text and at least the probe's %d tokens", len(text), read, size)}))
	if bad != nil {
		return bad
	}

	// What every later step does: the same history and a little more. A server that reads all of
	// it again makes a turn of n steps cost n².
	messages = append(messages, assistantMessage(first, nil), userMessage("Answer with the word two."))
	second, bad := u.once(ctx, post+"turn 2", u.cfg.slotMain, answerLimit, "", messages...)
	cached := second.usage.cached
	share := 100 * value(cached) / max(read, 1)
	line := fmt.Sprintf("%d of turn 1's %d prompt tokens were cached, expected at least %d %%", value(cached), read, goodReuse)
	bad = cmp.Or(bad, u.breach(post+"turn 2", "", rule{"no-prefix-cache", cached != nil && share < leastReuse, line + ": each step would read the whole history again"}))
	if bad == nil {
		u.say(keep("warning: ", share < goodReuse)+post+"turn 2: %s%s", line, keep(", but the server does not count them", cached == nil))
	}
	return bad
}

// daemon serves one home.
type daemon struct {
	// set once
	cfg            *config
	tools          *toolbox
	lock           *instanceLock // and owned by loop, but for its note
	store          *os.Root
	model          *upstream
	say            func(format string, args ...any)
	idle           chan string    // what cannot be ended, when the daemon ends and the last turn is over
	turning, conns sync.WaitGroup // turns; goroutines of connections and listeners

	mu       sync.Mutex
	refusal  *wireError // guarded by mu, as is all below: why no turn is taken, nil: they are
	checking bool
	turns    []*turn        // the first one has the main slot
	moved    sync.Cond      // on mu: a turn has an event, is over or is to end, or a client has left
	peers    map[*peer]bool // nil: the daemon ends
}

// turn is one turn of a session, from its acceptance to its result.
type turn struct {
	// set once, number before the first event
	session string
	number  int64
	owner   *peer // the turn ends when this client leaves; nil: it does not
	cancel  context.CancelCauseFunc

	// guarded by daemon.mu
	seq      int64             // of the last event, from 1
	kept     []json.RawMessage // the newest events, up to seq
	keptSize int
	final    any // set when it is over
}

// peer is one connection. A frame is written under its lock, by whoever has
// one: a client that does not read holds up what is for itself alone.
type peer struct {
	*net.UnixConn
	d       *daemon
	writing sync.Mutex // taken before daemon.mu

	// guarded by daemon.mu
	open map[int64]*turn // requests without their final frame, by id, with what they follow
	owed int             // final frames that wait for the client
	gone bool
}

// runServe is the daemon from its lock to its end. An error of it is its last line.
func runServe(cfg *config, stderr *os.File) (code int, err error) {
	say := sayTo(stderr, cfg.program+": ")
	signals, starting := make(chan os.Signal, 1), untilSignal()
	for _, sig := range endSignals() { // one by one, as there
		signal.Notify(signals, sig)
	}
	debug.SetMemoryLimit(daemonMemory)
	// Nothing before the lock may touch the home, and nothing but the lock's words may be said:
	// whoever is refused must have changed nothing.
	lock, err := takeLock(cfg.home, cfg.program)
	if err != nil {
		return 1, err
	}
	defer lock.release() // deferred first, so it goes last
	tools, toolsErr := newToolbox(cfg)
	store, err := openStore(cfg.home)
	if err = cmp.Or(toolsErr, err); err != nil {
		return 1, fmt.Errorf("prepare the daemon of %s: %w; see docs/runbook.md#environment", cfg.home, err)
	}
	defer store.Close()
	if cfg.workspace != "" && tools.lack != nil {
		say("no tools are offered: %v", tools.lack)
	}
	list, err := listSessions(store)
	if err != nil {
		say("the list of sessions is not complete: %v; see docs/runbook.md#session-damaged", err)
	}
	for i := 0; i < len(list) && starting.Err() == nil; i++ { // whatever a crash left open is closed now
		if j, err := openSession(store, list[i].Session, true, cfg.model, cfg.workspace); err == nil {
			j.close()
		} else {
			say("%v; see docs/runbook.md#session-damaged", err)
		}
	}
	d := &daemon{cfg: cfg, say: say, lock: lock, tools: tools, store: store, idle: make(chan string, 1), peers: map[*peer]bool{}}
	d.moved.L = &d.mu
	d.model = newUpstream(cfg, sayTo(stderr, cfg.program+": selftest: "), d.changed)
	lock.note("checking the server") // not by the word that heads the check's lines
	if bad := d.model.check(starting); starting.Err() != nil {
		return 0, nil
	} else if bad != nil {
		return 1, fmt.Errorf(failedCheck, bad.Anchor)
	}
	lock.note("serving")
	if err = d.listen(); err != nil {
		return 1, err
	}
	if c, err := net.Dial("unixgram", os.Getenv("NOTIFY_SOCKET")); err == nil { // sd_notify(3); an error where it is unset
		_ = c.SetWriteDeadline(time.Now().Add(flushWait)) // its reader may not read
		_, _ = c.Write([]byte("READY=1\n"))               // who waits for it says that it did not come
		c.Close()
	}
	return d.loop(signals), nil
}

// sayTo prints lines for the operator. A stderr that takes none, such as that of a
// log whose disk is full, holds up nobody.
func sayTo(stderr *os.File, start string) func(string, ...any) {
	p := &printer{stderr: stderr}
	return func(format string, args ...any) { p.say("%s%s", start, fmt.Sprintf(format, args...)) }
}

// loop owns the lock and the socket, and hears signals, to the end of the last turn.
func (d *daemon) loop(signals <-chan os.Signal) (code int) {
	tick, count, last, foreign, path := time.Tick(d.cfg.poll), 0, time.Time{}, false, socketPath(d.cfg.home)
	for {
		select {
		case <-tick:
			reap(d.tools.host)
			now, err := os.Lstat(path)
			switch {
			case code != 0: // it has said so
			case d.lock.lost(): // the home may have another daemon by now, or be another one
				d.say("the lock %s was deleted or replaced, so this daemon ends; see docs/runbook.md#already-running", lockPath(d.cfg.home))
				code = 1
				d.stop(false)
			case err == nil && !foreign && !os.SameFile(now, d.lock.bound):
				foreign = true // said once
				d.say("%s is no longer this daemon's, so nobody reaches it; remove that file, and it is made again; see docs/runbook.md#socket-path", path)
			case errors.Is(err, os.ErrNotExist):
				d.lock.unlisten()
				d.say("%s was deleted and is made again; see docs/runbook.md#socket-path", path)
				if err = d.listen(); err != nil {
					d.say("%v", err)
				}
			}
		case sig := <-signals:
			if time.Since(last) < sameSignal {
				continue
			}
			// The third one waits for nothing, not even to give an order: keepers end their trees when
			// belay is gone. The next start ends the turn in the journal.
			if last, count = time.Now(), count+1; count > 2 {
				return 128 + int(sig.(syscall.Signal))
			}
			d.stop(count > 1) // the first is a drain, whatever was asked before: systemd sends it after ExecStop
		case left := <-d.idle:
			if d.farewell(); left != "" {
				code = 1
			}
			return code
		}
	}
}

// stop ends the daemon: with the turns that are under way at the end of their step,
// at the latest after limits.drain_ms, or now.
func (d *daemon) stop(now bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	first, ended := d.refusal != errDraining, d.turns
	if !now && len(ended) > 0 {
		ended = ended[1:] // the one that has the slot finishes its step
	}
	// The refusal comes before the wait, so that no turn is added to what is waited for.
	d.refuseLocked(errDraining, ended)
	if first {
		time.AfterFunc(d.cfg.drain, func() { d.stop(true) })
		// owner: daemon; ends when the last turn does; joined by idle
		go func() { d.lock.note("draining"); d.turning.Wait(); d.idle <- d.tools.end(nil, "all turns", d.say) }()
	}
}

// refuseLocked takes no turns from now on and ends some.
func (d *daemon) refuseLocked(why *wireError, turns []*turn) {
	d.refusal = why
	for _, t := range turns {
		t.cancel(why)
	}
}

// changed is told of a server that is not the one that passed, and which the
// history of no turn may reach.
func (d *daemon) changed(bad *wireError) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusal == nil && !in("server-unreachable server-loading server-not-llama", bad.Anchor) { // else a check is under way, or the end; or no llama-server has answered yet
		d.refuseLocked(bad, d.turns)
		d.recheckLocked()
	}
}

// recheckLocked has the server checked, unless it is being checked or the daemon
// ends. Turns ask for it, not a clock: three completions each minute would be a
// load on a server that nobody needs.
func (d *daemon) recheckLocked() {
	if d.checking || d.refusal == errDraining {
		return
	}
	d.checking = true
	// owner: daemon; ends when the check does, each step of which is bounded; joined by the end of the process
	go func() {
		bad := d.model.check(context.Background())
		if bad != nil {
			d.say(failedCheck, bad.Anchor)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.checking = false; d.refusal != errDraining {
			d.refusal = bad
		}
	}()
}

func (d *daemon) listen() error {
	ln, err := d.lock.listen()
	if err == nil {
		// owner: daemon; ends when the listener is closed; joined by conns
		d.conns.Go(func() { d.accept(ln) })
	}
	return err
}

// accept takes connections until the listener is closed.
func (d *daemon) accept(ln *net.UnixListener) {
	for {
		sock, err := ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			time.Sleep(acceptPause)
			continue
		}
		// owner: peer; ends when the connection does; joined by conns
		d.conns.Go((&peer{UnixConn: sock, d: d, open: map[int64]*turn{}}).serve)
	}
}

// farewell takes the socket away and lets every client have its last frames.
func (d *daemon) farewell() {
	d.lock.unlisten()
	d.mu.Lock()
	for p := range d.peers {
		time.AfterFunc(flushWait, func() { p.Close() })
		// owner: daemon; ends when bye is written or the connection is closed; joined by conns
		d.conns.Go(func() {
			defer p.Close()
			d.mu.Lock()
			for len(p.open) > 0 && !p.gone {
				d.moved.Wait()
			}
			d.mu.Unlock()
			p.answer(0, &wireReply{Type: "bye", Reason: "shutdown"})
		})
	}
	d.peers = nil // for a connection that was accepted just now
	d.mu.Unlock()
	d.conns.Wait()
}

// admit takes a connection of our own user or root, up to the limit, or says why not.
func (d *daemon) admit(p *peer) *wireError {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case !peerAllowed(p.UnixConn):
		return newWireError(codePermissionDenied, "this daemon serves its own user alone")
	case d.peers == nil:
		return newWireError(codeDraining, "the daemon has stopped")
	case len(d.peers) >= d.cfg.maxClients:
		return newWireError(codeOverloaded, fmt.Sprintf("%d clients are connected, no more are possible (limits.max_clients)", len(d.peers)))
	}
	d.peers[p] = true
	return nil
}

// serve is the life of a connection: it takes a request when the answer to the
// one before it was taken. The turns of a client that has left go on, for whoever
// attaches, but for those it wanted ended.
func (p *peer) serve() {
	d := p.d
	defer p.Close()
	if why := d.admit(p); why != nil {
		p.answer(0, why)
		return
	}
	for {
		e, err := readFrame(p, d.cfg.maxFrame, func() { _ = p.SetReadDeadline(time.Now().Add(frameWhole)) })
		_ = p.SetReadDeadline(time.Time{})
		if bad, broken := errors.AsType[*wireError](err); broken {
			p.answer(e.ID, bad)
		}
		if err != nil { // broken frames, or the client has left
			break
		}
		id, answer := d.handle(p, e)
		if read, later := answer.(func() any); later {
			answer = read()
		}
		if answer != nil {
			p.answer(id, answer)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p.gone = true
	delete(d.peers, p)
	for _, t := range d.turns {
		if t.owner == p {
			t.cancel(errCancelled)
		}
	}
	d.moved.Broadcast()
}

// oweLocked counts n more final frames that wait for the client, or one that it has
// taken. It has finalWait for the first of them, and anew for each that is left.
func (p *peer) oweLocked(n int) {
	if p.owed += n; p.owed == 0 {
		_ = p.SetWriteDeadline(time.Time{})
	} else if n < 0 || p.owed == n {
		_ = p.SetWriteDeadline(time.Now().Add(finalWait)) // also of an event that is being written
	}
}

// answer sends the final frame of what follows no turn.
func (p *peer) answer(id int64, msg any) {
	p.d.mu.Lock()
	p.oweLocked(1)
	p.d.mu.Unlock()
	_ = p.send(id, true, msg)
}

// send writes a frame and closes the connection if it cannot. A final frame, which
// is owed, that is too large becomes the error that says so; another one is not sent.
func (p *peer) send(id int64, final bool, msg any) error {
	frame, err := encodeFrame(p.d.cfg.maxFrame, id, final, msg)
	if err != nil && final {
		frame, err = encodeFrame(p.d.cfg.maxFrame, id, final, err)
	}
	if err != nil {
		return err
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	if final { // who has it may use the id again
		p.d.mu.Lock()
		delete(p.open, id)
		p.d.mu.Unlock()
	}
	if _, err = p.Write(frame); err != nil {
		p.Close()
	} else if !final {
		return nil
	}
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.gone = p.gone || err != nil; final {
		p.oweLocked(-1)
	}
	p.d.moved.Broadcast() // bye waits for final frames, and followers end with the connection
	return err
}

// follow sends the events of a turn from number next on, as fast as the client
// takes them, and its final message. In place of those that are no longer kept,
// and of one that no frame can hold, it says how many they were.
func (p *peer) follow(t *turn, id, next int64) {
	lagged := func(n int64) json.RawMessage { return jsonObject("type", "lagged", "dropped", n) }
	for {
		p.d.mu.Lock()
		for !p.gone && t.final == nil && t.seq < next {
			p.d.moved.Wait()
		}
		if p.gone { // before all else: nothing may be set yet
			p.d.mu.Unlock()
			return
		}
		final, reply := t.final, wireReply{Type: "event", Session: t.session, Turn: t.number, Seq: next}
		switch first := t.seq + 1 - int64(len(t.kept)); {
		case next < first:
			reply.Seq, reply.Event = first-1, lagged(first-next)
		case next <= t.seq:
			reply.Event = t.kept[next-first]
		}
		p.d.mu.Unlock()
		switch {
		case reply.Event == nil:
			_ = p.send(id, true, final)
			return
		case p.send(id, false, &reply) != nil:
			reply.Event = lagged(1)
			_ = p.send(id, false, &reply) // an error is that the client has left, too
		}
		next = reply.Seq + 1
	}
}

// handle gives the answer to a request, or what makes it without the lock, and the
// id that it goes out under: nil if it comes later.
func (d *daemon) handle(p *peer, e envelope) (id int64, answer any) {
	var r wireRequest
	err := json.Unmarshal(e.Msg, &r)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.peers == nil { // nothing is taken any more, or bye would never come: it comes last
		return e.ID, nil
	}
	if p.open[e.ID] != nil { // the open request is still to get its one final frame
		return 0, newWireError(codeDuplicateID, fmt.Sprintf("the id %d belongs to an open request", e.ID))
	}
	t := &turn{session: r.Session, cancel: func(error) {}} // nobody's, unless one of the session runs or begins
	p.open[e.ID] = t
	i := slices.IndexFunc(d.turns, func(o *turn) bool { return o.session == r.Session })
	if i >= 0 {
		t = d.turns[i]
	}
	switch {
	case !in("ping status turn attach cancel sessions shutdown", cmp.Or(r.Type, "ping")): // whatever its fields are
		answer = newWireError(codeUnknownMessage, "this daemon knows ping, status, turn, attach, cancel, sessions and shutdown")
	case err != nil || e.ID == 0 || !e.Final || r.Type == "" || r.Type == "attach" && r.From < 0 || r.Type == "turn" && r.Content == "",
		r.Type == "shutdown" && !in("drain now", cmp.Or(r.Mode, "now")), r.Type == "turn" && !in("continue cancel", cmp.Or(r.OnDisconnect, "cancel")):
		answer = newWireError(codeBadRequest, "a request needs an id from 1, final true, a type, and the fields of that type as docs/protocol.md has them")
	case in("turn attach cancel", r.Type) && !validSessionID(r.Session):
		answer = newWireError(codeBadSessionID, errBadSessionID.Error())
	case in("turn attach", r.Type) && len(p.open) > openMax:
		answer = newWireError(codeOverloaded, fmt.Sprintf("%d requests of this connection are open, no more are possible", openMax))
	case r.Type == "attach" && i < 0:
		answer = func() any { return d.lastTurn(r.Session) }
	case r.Type == "ping":
		answer = &wireReply{Type: "pong", Data: r.Data}
	case r.Type == "status":
		answer = &wireReply{Type: "status", Status: d.statusLocked()}
	case r.Type == "sessions":
		answer = d.sessions
	case r.Type == "turn" && d.refusal != nil:
		d.recheckLocked()
		answer = d.refusal
	case r.Type == "turn" && len(r.Content) > contentMax:
		answer = newWireError(codeContentTooLarge, fmt.Sprintf("the content has %d bytes, at most %d are possible", len(r.Content), contentMax))
	case r.Type == "turn" && i >= 0:
		answer = storeError(errHeld)
	case r.Type == "turn" && len(d.turns) > d.cfg.maxQueue:
		answer = newWireError(codeOverloaded, fmt.Sprintf("%d turns run or wait, no more are possible (limits.max_queue)", len(d.turns)))
	case r.Type == "turn":
		d.startLocked(t, p, r)
		r.From = 1 // which is a field of attach
		fallthrough
	case r.Type == "attach":
		p.open[e.ID] = t
		// owner: peer; ends when the turn or the connection does; joined by conns
		d.conns.Go(func() { p.follow(t, e.ID, max(r.From, 1)) })
	case r.Type == "cancel":
		t.cancel(errCancelled)
		answer = &wireReply{Type: "ok"}
	case r.Type == "shutdown":
		answer = func() any {
			d.stop(r.Mode == "now")
			return &wireReply{Type: "ok"}
		}
	}
	return e.ID, answer
}

// statusLocked is what docs/protocol.md lists.
func (d *daemon) statusLocked() json.RawMessage {
	names := []string{}
	for _, t := range d.turns[:min(1, len(d.turns))] {
		names = append(names, t.session)
	}
	phase := cmp.Or(keep("serving", d.refusal == nil), keep("draining", d.refusal == errDraining), "not ready: "+cmp.Or(d.refusal, &wireError{}).Anchor)
	return jsonObject("version", version(), "pid", os.Getpid(), "phase", phase, "tools", d.tools.lack == nil,
		"running", names, "queued", max(0, len(d.turns)-1), "clients", len(d.peers))
}

// startLocked accepts a turn, which from then on holds its session.
func (d *daemon) startLocked(t *turn, p *peer, r wireRequest) {
	ctx, cancel := context.WithCancelCause(context.Background())
	if t.cancel = cancel; r.OnDisconnect == "cancel" {
		t.owner = p
	}
	d.turns = append(d.turns, t)
	// owner: daemon; ends when the turn is over and told; joined by turning
	d.turning.Go(func() { d.runTurn(ctx, t, r) })
}

func (d *daemon) sessions() any {
	list, err := listSessions(d.store)
	if err != nil {
		return storeError(err)
	}
	return &wireReply{Type: "sessions", Sessions: jsonOf(list)}
}

// lastTurn answers attach where nothing runs: how the last turn ended. It takes no
// lock of the session, since others may ask at the same time, and changes nothing.
func (d *daemon) lastTurn(session string) any {
	j, err := &journal{id: session}, error(nil)
	if j.file, err = d.store.OpenFile(filepath.Join(session, journalName), os.O_RDONLY|syscall.O_NONBLOCK, 0); err == nil {
		err = j.read()
		j.close()
	}
	switch {
	case err != nil:
		return storeError(fmt.Errorf("session %s: %w", session, err))
	case j.running: // since just now, or by another process
		return storeError(errHeld)
	case !in("end max_turns cancelled interrupted", j.stop):
		return newWireError(errorCode(cmp.Or(j.stop, string(codeNoSuchSession))), "the last turn of the session failed, or it has none")
	}
	last := append(j.messages, nil)[max(0, len(j.messages)-1)] // or none
	return &wireReply{Type: "result", Session: session, Turn: j.turn, Stop: j.stop, Text: str(parse(last).get("content"))}
}

// storeError words what the session store says.
func storeError(err error) *wireError {
	switch {
	case errors.Is(err, errNoSession):
		return newWireError(codeNoSuchSession, "there is no such session: a turn without resume makes it")
	case errors.Is(err, errExists):
		return newWireError(codeSessionExists, "the session exists: resume it, or take another id")
	case errors.Is(err, errHeld):
		return newWireError(codeSessionBusy, "a turn of the session runs: attach to it or cancel it")
	case errors.Is(err, errDamaged):
		return pointing(codeSessionDamaged, "session-damaged", err.Error())
	case storageFull(err):
		return pointing(codeStorageFull, "storage", err.Error())
	}
	return pointing(codeStorageError, "storage", err.Error())
}

// emitLocked keeps an event for those who follow the turn.
func (d *daemon) emitLocked(t *turn, event []byte) {
	event = bytes.TrimSpace(event)
	t.seq, t.kept, t.keptSize = t.seq+1, append(t.kept, event), t.keptSize+len(event)
	for ; t.keptSize > keptMax; t.kept = t.kept[1:] {
		t.keptSize -= len(t.kept[0])
		t.kept[0] = nil // or it would live as long as its array
	}
	d.moved.Broadcast()
}

// runTurn is the life of an accepted turn. Its end is in the journal before
// anybody is told; where it cannot be, they are told that.
func (d *daemon) runTurn(ctx context.Context, t *turn, r wireRequest) {
	var final any
	// Not where the turn was accepted: opening waits for the disk, and that is under daemon.mu.
	j, err := openSession(d.store, t.session, r.Resume, d.cfg.model, d.cfg.workspace)
	if err == nil {
		if err = j.add(record{Type: recTurnStart, Message: userMessage(r.Content)}); err == nil {
			t.number = j.turn
			a := newAgent(d.cfg, d.model, nil, nil)
			answer, failed := d.converse(ctx, t, j, a)
			final, err = d.outcome(t, j, a, answer, failed)
		}
		// The session is free on disk before it is free here: the next turn opens it at once.
		j.close()
	}
	if err != nil && (final == nil || !errors.Is(err, os.ErrClosed)) { // closed: by the error of an earlier record, which final says
		final = storeError(err)
	}
	t.cancel(nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	for p := range d.peers {
		for _, o := range p.open {
			if o == t {
				p.oweLocked(1)
			}
		}
	}
	t.final = final
	d.turns = slices.DeleteFunc(d.turns, func(o *turn) bool { return o == t })
	d.moved.Broadcast()
}

// outcome ends a turn in the journal and gives its final message.
func (d *daemon) outcome(t *turn, j *journal, a *agent, answer string, err error) (final any, _ error) {
	e := endingOf(err) // exec's words and categories: the daemon has no others
	bad, _ := errors.AsType[*wireError](err)
	stop := map[string]string{"": "end", "cancelled": "cancelled", "budget_exhausted": "max_turns"}[e.category]
	switch {
	case bad == errDraining:
		bad, stop = nil, "interrupted"
	case bad != nil || stop != "":
	case e.code == 75:
		bad = pointing(codeServerUnavailable, "server-unreachable", e.message)
	case e.category == "context_length":
		bad = newWireError(codeContextFull, e.message)
	case e.category == "internal":
		d.say("session %s: %v", t.session, err)
		bad = newWireError(codeInternal, "a fault of the daemon ended the turn; its stderr says more")
	default:
		bad = pointing(codeServerError, "server-error", e.message)
	}
	if bad != nil {
		return bad, j.endTurn(string(bad.Code), "the turn failed ("+string(bad.Code)+")")
	}
	counts := jsonObject("input_tokens", a.total[0], "output_tokens", a.total[1], "cached_tokens", a.total[2], "reasoning_tokens", a.total[3])
	return &wireReply{Type: "result", Session: t.session, Turn: t.number, Stop: stop, Text: answer,
		Usage: json.RawMessage(keep(string(counts), len(counts) > len("{}")))}, j.endTurn(stop, e.message)
}

// slot waits until the turn has the main slot, and tells of its place before.
func (d *daemon) slot(ctx context.Context, t *turn) error {
	// Under the lock, or it could come between the look at ctx and the wait.
	defer context.AfterFunc(ctx, func() { d.mu.Lock(); d.moved.Broadcast(); d.mu.Unlock() })()
	d.mu.Lock()
	defer d.mu.Unlock()
	for told := 0; d.turns[0] != t && ctx.Err() == nil; d.moved.Wait() {
		if place := slices.Index(d.turns, t); place != told {
			told = place
			d.emitLocked(t, jsonObject("type", "queued", "position", place))
		}
	}
	if ctx.Err() == nil {
		d.emitLocked(t, jsonObject("type", "started", "slot", d.cfg.slotMain))
	}
	return context.Cause(ctx)
}

// converse waits for the slot and runs the turn's conversation. A panic in it
// is an error like another.
func (d *daemon) converse(ctx context.Context, t *turn, j *journal, a *agent) (answer string, err error) {
	defer caught(&err)
	if err = d.slot(ctx, t); err != nil {
		return "", err
	}
	// Background commands end with the turn: nobody is there to look after them between turns.
	run := fmt.Sprintf("%s.%d", t.session, t.number)
	if err = d.tools.equip(a, run); err != nil {
		return "", err
	}
	defer func() {
		if left := d.tools.end(a.jobs, "turn "+run, d.say); err == nil && left != "" {
			err = newWireError(codeInternal, "the answer is complete, but processes "+strings.TrimSpace(left))
		}
	}()
	a.emit = func(kind string, pairs ...any) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.emitLocked(t, encodeEvent(kind, pairs...))
	}
	a.journal = func(rec record) error { return d.record(j, rec) }
	a.noServices = "only exec can release a service"
	a.extra = map[string]any{"id_slot": d.cfg.slotMain, "cache_prompt": true, "return_progress": true}
	a.begin(t.session) // its notices speak of flags of exec
	a.history = append(a.history, j.messages...)
	for _, m := range j.messages {
		a.learned.ids[resultOf(m)] = true // servers number their calls anew in each turn
	}
	return a.run(ctx)
}

// record puts a step into the journal. A daemon that drains ends the turn behind
// each step but an answer, and but the start of a call, which then still runs.
func (d *daemon) record(j *journal, rec record) error {
	if err := j.add(rec); err != nil {
		return storeError(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusal == errDraining && rec.Type != recToolStart && (rec.Type != recAssistant || rec.Calls != nil) {
		return errDraining
	}
	return nil
}

// runClient is a command that talks to the daemon: one request, and what comes
// back for it. With --json each message is a line; else people read it.
func runClient(cfg *config, stdout io.Writer, stderr *os.File) (code int, err error) {
	p, out, path := &printer{stderr: stderr}, bufio.NewWriter(stdout), socketPath(cfg.home)
	sock, err := net.Dial("unix", path)
	if err != nil {
		long := keep(fmt.Sprintf(": the path has %d bytes, the limit is %d", len(path), socketPathMax), len(path) > socketPathMax)
		return 1, fmt.Errorf("no daemon answers at %s: %s%s; start one with: %s --home %s serve --config FILE; see docs/runbook.md#no-daemon", path, errnoText(err), long, cfg.program, cfg.home)
	}
	defer sock.Close()
	send := func(id int64, r *wireRequest) error { // what cannot be written ends in a closed connection, too
		frame, err := encodeFrame(clientFrame, id, true, r)
		_, _ = sock.Write(frame)
		return err
	}
	r := &wireRequest{Type: cfg.command, Session: cmp.Or(cfg.session, keep(strings.Join(cfg.args, ""), cfg.command == "cancel")),
		Content: cfg.prompt, Resume: cfg.resume, Mode: keep("now", cfg.now)}
	ctx := context.Background()
	if cfg.command == "turn" {
		ctx = untilSignal()
		if r.Session == "" {
			r.Session = fmt.Sprintf("s-%x", time.Now().UnixNano())
			p.say("%s: session %s", cfg.program, r.Session)
		}
	}
	first := sync.OnceValue(func() error { return send(1, r) })
	context.AfterFunc(ctx, func() {
		signal.Reset(endSignals()...) // a second one ends us as it ends any program
		p.say("%s: cancelling; once more to leave the turn alone", cfg.program)
		// Not before the turn, which the daemon would then run; it fits into a frame.
		_, _ = first(), send(2, &wireRequest{Type: "cancel", Session: r.Session})
	})
	if err = first(); err != nil { // only now: a daemon that stands still may not take it
		return 1, err
	}
	for {
		e, err := readFrame(sock, clientFrame, func() {})
		interrupted := endingOf(context.Cause(ctx)).code
		// A bye in place of an answer: the request came when the daemon took none any more.
		if err != nil || cfg.command != "shutdown" && str(parse(e.Msg).get("type")) == "bye" {
			p.say("%s: the daemon closed the connection; see docs/runbook.md#no-daemon", cfg.program) // as all of a turn: its stderr may take nothing
			return max(1, interrupted), nil
		}
		if e.ID == 2 { // of no interest
			continue
		}
		code, err = flushed(out, showMessage(p, cfg, out, e.Msg, interrupted))
		if err != nil || e.Final && (cfg.command != "shutdown" || e.ID == 0 || code != 0) { // a shutdown is over with the daemon's bye
			return code, err
		}
	}
}

// showMessage prints one message, the answer on stdout and the rest beside it, and
// gives the exit code that it would end a command with.
func showMessage(p *printer, cfg *config, stdout io.Writer, msg json.RawMessage, interrupted int) (code int) {
	m := parse(msg)
	get := func(key string) string { return word(m.get(key)) }
	kind, event := get("type"), m.get("event")
	switch {
	case get("code") == string(codeServerUnavailable):
		code = 75
	case get("stop") == "cancelled" && interrupted > 0:
		code = interrupted
	case kind == "error" || kind == "result" && get("stop") != "end":
		code = 1
	}
	switch {
	case cfg.jsonOut:
		fmt.Fprintf(stdout, "%s\n", msg)
	case kind == "error":
		p.say("%s: %s (%s)%s", cfg.program, get("message"), get("code"), keep("; see docs/runbook.md#"+get("anchor"), get("anchor") != ""))
	case code != 0:
		p.say("%s: the turn ended: %s", cfg.program, get("stop"))
	case kind == "result":
		fmt.Fprintln(stdout, strings.TrimSuffix(get("text"), "\n"))
	case kind == "event" && !in("content reasoning turn_usage progress start started", str(parse(event).get("type"))):
		p.say("%s", oneLine("  "+string(event)))
	case in("status sessions", kind):
		for _, f := range parse(m.get(kind)) {
			plain := strings.NewReplacer("{", "", "}", "", `"`, "", ",", "  ").Replace(string(f.val))
			fmt.Fprintln(stdout, strings.TrimPrefix(string(f.key)+": "+plain, ": "))
		}
	case kind != "event": // ok, bye
		fmt.Fprintln(stdout, kind)
	}
	return code
}

// runProbe prints what the configuration of a daemon for this server expects.
func runProbe(cfg *config, stdout io.Writer, stderr *os.File) (code int, err error) {
	p, bad := newUpstream(cfg, sayTo(stderr, cfg.program+": "), nil).await(context.Background())
	if bad != nil {
		return 1, fmt.Errorf("%s; see docs/runbook.md#%s", bad.Message, bad.Anchor)
	}
	object := keep(`{"template_sha256":%q,"n_ctx":%d,"slots":%d}`+"\n", cfg.jsonOut)
	form := cmp.Or(object, "[expect]\ntemplate_sha256 = %q\nn_ctx = %d\nslots = %d\n")
	out := bufio.NewWriter(stdout)
	fmt.Fprintf(out, form, templateSum(p.Template), p.Settings.Ctx, p.Slots)
	return flushed(out, 0)
}

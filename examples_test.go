//go:build linux

package main

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// examples_test.go tries each file of examples/ as far as a machine without
// its system can: fields of YAML against lists written by hand, decisions about
// exit codes by playing them, shell by running it, units by systemd-analyze,
// and an image's root by chroot.

// yamlField is a value with its path; lists have their index in it.
type yamlField struct{ path, value string }

// yamlFields reads the YAML that the examples are written in: block mappings
// and lists, one-line values, block texts. TestExamplesYAML holds it against a
// real parser where there is one.
func yamlFields(text string) (fields []yamlField) {
	type level struct {
		indent, next int
		key          string
	}
	var stack []level
	doc, block := 0, -1
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		indent := len(line) - len(strings.TrimLeft(line, " "))
		if rest := line[indent:]; rest == "" || block >= 0 && indent > block || rest[0] == '#' {
			continue
		}
		block = -1
		if line == "---" {
			doc, stack = doc+1, nil
			continue
		}
		rest := regexp.MustCompile(` #.*$`).ReplaceAllString(line[indent:], "")
		path := func() string {
			keys := []string{strconv.Itoa(doc)}
			for _, l := range stack {
				keys = append(keys, l.key)
			}
			return strings.Join(keys, ".")
		}
		for strings.HasPrefix(rest, "- ") {
			n := 0
			for len(stack) > 0 && stack[len(stack)-1].indent >= indent {
				if top := stack[len(stack)-1]; top.indent == indent {
					n = top.next
				}
				stack = stack[:len(stack)-1]
			}
			stack = append(stack, level{indent, n + 1, strconv.Itoa(n)})
			indent, rest = indent+2, rest[2:]
		}
		m := regexp.MustCompile(`^([\w.-]+):(?: +(.*))?$`).FindStringSubmatch(rest)
		if m == nil {
			fields = append(fields, yamlField{path(), rest})
			if rest == "|" {
				block = indent - 2
			}
			continue
		}
		for len(stack) > 0 && stack[len(stack)-1].indent >= indent {
			stack = stack[:len(stack)-1]
		}
		stack = append(stack, level{indent, 0, m[1]})
		fields = append(fields, yamlField{path(), strings.Trim(strings.TrimSpace(m[2]), `"`)})
		if m[2] == "|" {
			block = indent
		}
	}
	return fields
}

// anyIndex makes one path of those that differ in indexes.
func anyIndex(path string) string { return regexp.MustCompile(`\.\d+`).ReplaceAllString(path, "[]") }

// knownFields gives the fields that the system of an example defines, as far
// as examples use them. They are written down from the systems' references:
// batch/v1 Job and v1 ConfigMap, GitHub's workflow syntax, GitLab's CI/CD YAML.
func knownFields() map[string]string {
	const job = `apiVersion kind metadata metadata.name spec spec.backoffLimit spec.activeDeadlineSeconds spec.completionMode spec.completions spec.parallelism
spec.backoffLimitPerIndex spec.maxFailedIndexes spec.podFailurePolicy spec.podFailurePolicy.rules spec.podFailurePolicy.rules[].action
spec.podFailurePolicy.rules[].onPodConditions spec.podFailurePolicy.rules[].onPodConditions[].type spec.podFailurePolicy.rules[].onPodConditions[].status
spec.podFailurePolicy.rules[].onExitCodes spec.podFailurePolicy.rules[].onExitCodes.containerName spec.podFailurePolicy.rules[].onExitCodes.operator
spec.podFailurePolicy.rules[].onExitCodes.values spec.template spec.template.spec spec.template.spec.restartPolicy spec.template.spec.terminationGracePeriodSeconds
spec.template.spec.containers C.name C.image C.command C.args C.args[] C.workingDir C.env C.env[].name C.env[].value C.env[].valueFrom C.env[].valueFrom.secretKeyRef
C.env[].valueFrom.secretKeyRef.name C.env[].valueFrom.secretKeyRef.key C.securityContext C.securityContext.allowPrivilegeEscalation C.securityContext.readOnlyRootFilesystem
C.securityContext.runAsNonRoot C.securityContext.runAsUser C.securityContext.capabilities C.securityContext.capabilities.drop C.volumeMounts C.volumeMounts[].name
C.volumeMounts[].mountPath C.volumeMounts[].readOnly spec.template.spec.volumes spec.template.spec.volumes[].name spec.template.spec.volumes[].emptyDir
spec.template.spec.volumes[].configMap spec.template.spec.volumes[].configMap.name data data.tasks.txt`
	return map[string]string{
		"kubernetes/job.yaml":         strings.ReplaceAll(job, "C.", "spec.template.spec.containers[]."),
		"kubernetes/indexed-job.yaml": strings.ReplaceAll(job, "C.", "spec.template.spec.containers[]."),
		"ci/github.yml": `name on on.workflow_dispatch on.workflow_dispatch.inputs on.workflow_dispatch.inputs.task
on.workflow_dispatch.inputs.task.description on.workflow_dispatch.inputs.task.required on.workflow_dispatch.inputs.task.type permissions permissions.contents
jobs jobs.belay jobs.belay.runs-on jobs.belay.timeout-minutes jobs.belay.steps jobs.belay.steps[].uses jobs.belay.steps[].name jobs.belay.steps[].env
jobs.belay.steps[].env.BELAY_BASE_URL jobs.belay.steps[].env.BELAY_MODEL jobs.belay.steps[].env.BELAY_API_KEY jobs.belay.steps[].env.TASK jobs.belay.steps[].run
jobs.belay.steps[].if jobs.belay.steps[].with jobs.belay.steps[].with.name jobs.belay.steps[].with.path`,
		"ci/gitlab.yml": `belay belay.stage belay.image belay.image.name belay.image.entrypoint belay.image.entrypoint[] belay.timeout belay.rules belay.rules[].if belay.variables belay.variables.BELAY_BASE_URL belay.variables.BELAY_MODEL
belay.variables.BELAY_SANDBOX belay.script belay.script[] belay.retry belay.retry.max belay.retry.exit_codes belay.artifacts belay.artifacts.when belay.artifacts.paths`,
	}
}

// flatten gives the paths of a decoded document, without indexes.
func flatten(v any, path string, into map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		for k, inner := range v {
			if k == "true" { // YAML 1.1 takes the key "on" for a boolean
				k = "on"
			}
			into[path+"."+k] = true
			flatten(inner, path+"."+k, into)
		}
	case []any:
		for _, inner := range v {
			flatten(inner, path+"[]", into)
		}
	}
}

func TestExamplesYAML(t *testing.T) {
	all, _ := filepath.Glob("examples/*/*.y*ml")
	known := knownFields()
	if len(all) != len(known) {
		t.Errorf("%d files, %d lists of fields", len(all), len(known))
	}
	python := exec.Command("python3", "-c", "import yaml").Run() == nil
	if !python {
		t.Log("no python3 with yaml here: only the fields are checked, by the reader of this test")
	}
	for _, path := range all {
		allowed := strings.Fields(known[strings.TrimPrefix(path, "examples/")])
		mine := map[string]bool{}
		for _, f := range yamlFields(document(t, path)) {
			_, field, _ := strings.Cut(f.path, ".")
			if field = anyIndex(field); !slices.Contains(allowed, field) {
				t.Errorf("%s: %s is no field that is known", path, field)
			}
			if doc, _, _ := strings.Cut(f.path, "."); !strings.HasSuffix(field, "[]") {
				mine[doc+"."+field] = true
			}
		}
		if !python {
			continue
		}
		out, err := exec.Command("python3", "-c", "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))", path).CombinedOutput()
		var docs []any
		if err == nil {
			err = json.Unmarshal(out, &docs)
		}
		if err != nil {
			t.Errorf("%s: %v %s", path, err, out)
		}
		theirs := map[string]bool{}
		for i, doc := range docs {
			flatten(doc, strconv.Itoa(i), theirs)
		}
		if !maps.Equal(mine, theirs) {
			t.Errorf("%s: fields %v, of a YAML parser %v", path, slices.Sorted(maps.Keys(mine)), slices.Sorted(maps.Keys(theirs)))
		}
	}
}

// Each exit code of belay goes through the rules as Kubernetes does it: the
// first one that matches decides.
func TestPodFailurePolicies(t *testing.T) {
	for path, fails := range map[string]string{"kubernetes/job.yaml": "FailJob", "kubernetes/indexed-job.yaml": "FailIndex"} {
		text := document(t, "examples/"+path)
		field := map[string]string{}
		for _, f := range yamlFields(text) {
			_, name, _ := strings.Cut(f.path, "spec.")
			field[name] = f.value
		}
		if field["template.spec.restartPolicy"] != "Never" {
			t.Errorf("%s: podFailurePolicy needs restartPolicy Never", path)
		}
		rule := func(code int) string {
			for i := 0; ; i++ {
				at := fmt.Sprintf("podFailurePolicy.rules.%d.", i)
				action, more := field[at+"action"]
				if !more {
					return "Count"
				}
				if field[at+"onExitCodes.operator"] == "" {
					continue // a condition of the pod, not an exit code
				}
				if field[at+"onExitCodes.containerName"] != field["template.spec.containers.0.name"] {
					t.Fatalf("%s: rule %d is of another container", path, i)
				}
				var values []int
				if err := json.Unmarshal([]byte(field[at+"onExitCodes.values"]), &values); err != nil || !slices.IsSorted(values) || field[at+"onExitCodes.operator"] == "In" && slices.Contains(values, 0) {
					t.Fatalf("%s: rule %d: %v %v", path, i, values, err)
				}
				if slices.Contains(values, code) == (field[at+"onExitCodes.operator"] == "In") {
					return action
				}
			}
		}
		for code, want := range map[int]string{75: "Count", 143: "Ignore", 1: fails, 2: fails, 124: fails, 129: fails, 130: fails, 137: fails, 141: fails} {
			if got := rule(code); got != want {
				t.Errorf("%s: exit code %d: %s, want %s", path, code, got, want)
			}
		}
		if field["podFailurePolicy.rules.0.onPodConditions.0.type"] != "DisruptionTarget" || field["podFailurePolicy.rules.0.onPodConditions.0.status"] != "True" || field["podFailurePolicy.rules.0.action"] != "Ignore" {
			t.Errorf("%s: a disruption is not ignored first", path)
		}
		_, list, _ := strings.Cut(text, "tasks.txt: |\n")
		list, _, indexed := strings.Cut(list, "---\n")
		if n := strconv.Itoa(strings.Count(list, "\n")); indexed != (fails == "FailIndex") || indexed && field["completions"] != n {
			t.Errorf("%s: %s completions, %s lines", path, field["completions"], n)
		}
	}
}

// fakes makes a directory of small programs and gives its PATH.
func fakes(t *testing.T, programs map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range programs {
		needNil(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755))
	}
	return "PATH=" + dir + ":" + os.Getenv("PATH")
}

// scripts gives the shell texts in the examples, by where they stand.
func scripts(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{"slurm/array.sh": document(t, "examples/slurm/array.sh")}
	for path, after := range map[string]string{"ci/github.yml": "        run: |\n", "kubernetes/indexed-job.yaml": "            - |\n"} {
		_, text, _ := strings.Cut(document(t, "examples/"+path), after)
		indent := text[:len(text)-len(strings.TrimLeft(text, " "))]
		script := ""
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, indent) {
				break
			}
			script += strings.TrimPrefix(line, indent)
		}
		all[path] = script
	}
	return all
}

func TestExampleScriptsAreShell(t *testing.T) {
	shellcheck, err := exec.LookPath("shellcheck")
	if err != nil {
		t.Log("no shellcheck here: only the shell's own check")
	}
	for path, text := range scripts(t) {
		shell := map[bool]string{true: "bash", false: "sh"}[path != "kubernetes/indexed-job.yaml"]
		check := func(name string, args ...string) {
			c := exec.Command(name, args...)
			c.Stdin = strings.NewReader(text)
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%s: %s: %v %s", path, name, err, out)
			}
		}
		if check(shell, "-n"); shellcheck != "" {
			check(shellcheck, "-s", shell, "-")
		}
	}
}

// The scripts are run with a belay that ends with each code in turn.
func TestExampleScriptsFollowTheExitCode(t *testing.T) {
	t.Parallel()
	for path, text := range scripts(t) {
		for code, want := range map[string]string{"0": "belay 0", "1": "belay 1", "143": "belay 143", "75": map[string]string{
			"slurm/array.sh": "belay requeue 7_2 75", "ci/github.yml": "belay sleep belay sleep belay 75", "kubernetes/indexed-job.yaml": "belay 75"}[path]} {
			dir := t.TempDir()
			needNil(t, os.WriteFile(filepath.Join(dir, "tasks.txt"), []byte("first\n- the \"second\" $(line)\n"), 0o644))
			log := filepath.Join(dir, "log")
			env := []string{fakes(t, map[string]string{
				"belay": `for last; do :; done; echo belay >> ` + log + `; echo "$last" > ` + dir + `/prompt; echo answer; exit ` + code,
				"srun":  `exec "$@"`, "scontrol": `echo "$@" >> ` + log, "sleep": `echo sleep >> ` + log}),
				"SLURM_ARRAY_TASK_ID=2", "SLURM_ARRAY_JOB_ID=7", "JOB_COMPLETION_INDEX=1", "GITHUB_STEP_SUMMARY=" + dir + "/summary", "TASK=- the \"second\" $(line)"}
			args := []string{"bash", "-c", strings.ReplaceAll(text, "/list/", "")}
			switch path {
			case "ci/github.yml": // as a runner starts it
				args = []string{"bash", "-e", "-o", "pipefail", "-c", text}
			case "kubernetes/indexed-job.yaml":
				args[0], args[1] = "sh", "-euc"
			}
			c := exec.Command(args[0], args[1:]...)
			c.Dir, c.Env = dir, env
			out, err := c.CombinedOutput()
			if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
				t.Fatal(err)
			}
			b, _ := os.ReadFile(log)
			got := strings.Join(strings.Fields(string(b)), " ") + fmt.Sprint(" ", c.ProcessState.ExitCode())
			if prompt, _ := os.ReadFile(filepath.Join(dir, "prompt")); got != want || string(prompt) != "- the \"second\" $(line)\n" {
				t.Errorf("%s with %s: %q, want %q; the prompt was %q; output %s", path, code, got, want, prompt, out)
			}
			if summary, _ := os.ReadFile(filepath.Join(dir, "summary")); path == "ci/github.yml" && (string(summary) != "answer\n" || len(out) > 0) {
				t.Errorf("%s with %s: the log has %q, the summary %q", path, code, out, summary)
			}
		}
	}
}

func TestExampleUnits(t *testing.T) {
	t.Parallel()
	units, _ := filepath.Glob("examples/systemd/*.service")
	known := strings.Fields("Unit Service Install Description Documentation After Wants Type User ExecStart ExecStartPre TimeoutStartSec KillMode TimeoutStopSec Restart RestartSec RestartPreventExitStatus StateDirectory StateDirectoryMode RuntimeDirectory RuntimeDirectoryMode NoNewPrivileges ProtectSystem PrivateTmp WantedBy")
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for _, path := range units {
		text := document(t, path)
		for _, m := range regexp.MustCompile(`(?m)^\[?([A-Za-z]+)(?:\]$|=)`).FindAllStringSubmatch(text, -1) {
			if !slices.Contains(known, m[1]) {
				t.Errorf("%s: %s is no word that is known", path, m[1])
			}
		}
		// systemd-analyze wants the programs to be there.
		text = strings.NewReplacer("/usr/local/bin/belay", belayBinary(t), "/usr/local/bin/llama-server", "/bin/true").Replace(text)
		args = append(args, filepath.Join(dir, filepath.Base(path)))
		needNil(t, os.WriteFile(args[len(args)-1], []byte(text), 0o644))
	}
	if len(units) != 2 {
		t.Errorf("%v", units)
	}
	path, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze here: only the words of the units were checked")
	}
	out, err := exec.Command(path, args...).CombinedOutput()
	// Other units of this machine, and a machine where systemd does not run, are not the examples' fault.
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, dir) || strings.Contains(line, "belay.service") || strings.Contains(line, "llama-server.service") {
			t.Errorf("%s", line)
		}
	}
	t.Logf("systemd-analyze: %v", err)
}

// The unit's numbers fit the defaults that they have to be longer than, and its
// configuration is one that serve takes.
func TestExampleConfiguration(t *testing.T) {
	file, err := filepath.Abs("examples/systemd/config.toml")
	needNil(t, err)
	c := mustLoad(t, nil, "serve", "--config", file)
	unit := document(t, "examples/systemd/belay.service")
	for name, least := range map[string]float64{"TimeoutStartSec": c.loadTimeout.Seconds(), "TimeoutStopSec": c.drain.Seconds() + endBound.Seconds() + grace.Seconds()} {
		m := regexp.MustCompile(`(?m)^` + name + `=(\d+)$`).FindStringSubmatch(unit)
		if m == nil {
			t.Fatalf("no %s", name)
		}
		if n, _ := strconv.ParseFloat(m[1], 64); n <= least {
			t.Errorf("%s=%s, want more than %v", name, m[1], least)
		}
	}
	server := document(t, "examples/systemd/llama-server.service")
	for _, want := range []string{"--host " + c.socket + " ", fmt.Sprintf("-np %d ", c.expectSlots), fmt.Sprintf("-c %d\n", c.expectCtx*c.expectSlots)} {
		if !strings.Contains(server, want) {
			t.Errorf("the server's unit lacks %q of the configuration", want)
		}
	}
	if c.home != "/var/lib/belay" || !strings.Contains(unit, "StateDirectory=belay\n") {
		t.Errorf("home %s is not the unit's state directory", c.home)
	}
}

func TestDockerfiles(t *testing.T) {
	for name, base := range map[string]string{"scratch": "scratch", "shell": "busybox:"} {
		text := document(t, "examples/docker/Dockerfile."+name)
		build, final, found := strings.Cut(text, "\nFROM "+base)
		if !found {
			t.Fatalf("%s: no last stage from %s", name, base)
		}
		for _, want := range []string{"CGO_ENABLED=0", "AS build", "-trimpath"} {
			if !strings.Contains(build, want) {
				t.Errorf("%s: the build lacks %s", name, want)
			}
		}
		for _, want := range []string{"/etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/", "BELAY_SANDBOX=external-sandbox", "\nUSER 65534:65534\n", "\nENTRYPOINT [\""} {
			if !strings.Contains(final, want) {
				t.Errorf("%s: the image lacks %s", name, want)
			}
		}
		if strings.Contains(final, "\nRUN ") {
			t.Errorf("%s: RUN in the last stage, where there may be no shell", name)
		}
		for line := range strings.Lines(text) {
			if !regexp.MustCompile(`^(FROM|WORKDIR|COPY|RUN|ENV|USER|ENTRYPOINT|CMD|#|\n)`).MatchString(line) {
				t.Errorf("%s: %s", name, line)
			}
		}
	}
}

// containerRoot makes a root directory with belay and a shell: a static busybox
// (of the machine, or BELAY_BUSYBOX), else sh and its libraries, else nothing
// but belay for shell false.
func containerRoot(t *testing.T, shell bool) string {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"bin", "proc", "dev", "tmp", "work"} {
		needNil(t, os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	needNil(t, os.Chmod(root, 0o755)) // another user is to reach it
	install := func(from, to string) {
		b, err := os.ReadFile(from)
		needNil(t, err)
		needNil(t, os.MkdirAll(filepath.Dir(filepath.Join(root, to)), 0o755))
		needNil(t, os.WriteFile(filepath.Join(root, to), b, 0o755))
	}
	install(belayBinary(t), "belay")
	if !shell {
		return root
	}
	libraries := func(path string) []string {
		out, _ := exec.Command("ldd", path).CombinedOutput()
		return regexp.MustCompile(`/\S+`).FindAllString(strings.ReplaceAll(string(out), path+":", ""), -1)
	}
	for _, busybox := range []string{os.Getenv("BELAY_BUSYBOX"), "/bin/busybox", "/usr/bin/busybox"} {
		if _, err := os.Stat(busybox); err == nil && len(libraries(busybox)) == 0 {
			install(busybox, "bin/busybox")
			needNil(t, os.Symlink("busybox", filepath.Join(root, "bin/sh")))
			t.Logf("the shell is %s", busybox)
			return root
		}
	}
	needed := libraries("/bin/sh")
	if len(needed) == 0 {
		t.Skip("no static busybox here, and ldd does not tell what sh needs")
	}
	install("/bin/sh", "bin/sh")
	for _, path := range needed {
		install(path, path)
	}
	t.Log("no static busybox here: the shell is /bin/sh with its libraries")
	return root
}

// The main job passes in a root directory that has nothing but belay, a shell
// and what container runtimes mount.
func TestDemoInAContainersRoot(t *testing.T) {
	t.Parallel()
	for _, uid := range []int{0, nobodyID} {
		for _, pid1 := range []bool{false, true} {
			t.Run(fmt.Sprintf("uid %d, PID 1 %v", uid, pid1), func(t *testing.T) {
				t.Parallel()
				r := inRoot(t, containerRoot(t, true), uid, pid1, nil, "--workspace", "/tmp", "demo", "--output-format", "stream-json")
				r.finish(0)
				checkEvents(t, r)
				if pid1 {
					if n := len(r.events("service_released")); n != 0 || !strings.Contains(r.out.String(), "PID 1") {
						t.Errorf("%d services released\n%s", n, r.out.String())
					}
					return
				}
				pid := int(r.one("service_released")["pid"].(float64))
				stopService(t, pid)
				if !alive(pid) {
					t.Error("the service is not alive")
				}
			})
		}
	}
}

// An image from scratch: a question, the file tools, and https, whose error
// names the variable for the certificates.
func TestScratchImage(t *testing.T) {
	t.Parallel()
	root := containerRoot(t, false)
	p := serve(t, calls("Write", map[string]any{"path": "/tmp/note", "content": "x"}), bash("true"), say("done"))
	task := []string{"exec", "--auto", "--sandbox", "external-sandbox", "--output-format", "stream-json", "--model", "m", "--set", "limits.retry_backoff_ms=[]"}
	r := inRoot(t, root, nobodyID, true, nil, append(task, "--base-url", p.URL, "do it")...).finish(0)
	results := r.events("tool_result")
	if len(results) != 2 || results[0]["status"] != "success" || results[1]["status"] != "error" || !strings.Contains(results[1]["output"].(string), "/bin/sh") {
		t.Errorf("%v", results)
	}
	secure := httptest.NewTLSServer(p.Config.Handler)
	t.Cleanup(secure.Close)
	r = inRoot(t, root, nobodyID, true, nil, append(task, "--base-url", secure.URL, "do it")...).finish(1)
	if e := r.one("error"); !strings.Contains(e["error"].(string), "SSL_CERT_FILE") {
		t.Errorf("%v", e)
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})
	needNil(t, os.WriteFile(filepath.Join(root, "ca.pem"), ca, 0o644))
	inRoot(t, root, nobodyID, true, []string{"SSL_CERT_FILE=/ca.pem"}, append(task, "--base-url", secure.URL, "do it")...).finish(0)
}

// inRoot prepares belay in a root directory of containerRoot, with what
// container runtimes mount, read-only but for /tmp.
func inRoot(t *testing.T, root string, uid int, pid1 bool, env []string, args ...string) *belayRun {
	t.Helper()
	setup := strings.ReplaceAll(`mount --bind ROOT ROOT && mount -o remount,bind,ro ROOT && mount -t proc proc ROOT/proc &&
mount -t tmpfs -o mode=1777 tmpfs ROOT/tmp && mount -t tmpfs -o mode=755 tmpfs ROOT/dev &&
for d in "null 3" "zero 5" "full 7" "random 8" "urandom 9"; do mknod -m 666 ROOT/dev/${d% *} c 1 ${d#* } || exit; done`, "ROOT", root)
	more := []string{}
	if pid1 {
		more = []string{"--pid", "--fork"}
	}
	r := prepare(t, append(env, "HOME=/tmp", "TMPDIR=/tmp"), args...).inNamespace(fmt.Sprintf(`%s && shift && exec chroot --userspec=%d:%d %s /belay "$@"`, setup, uid, uid, root), more...)
	if out, err := exec.Command("unshare", append(append([]string{"--mount"}, more...), "sh", "-c", setup)...).CombinedOutput(); err != nil {
		t.Skipf("mounting is refused here: %v %s", err, out)
	}
	return r
}

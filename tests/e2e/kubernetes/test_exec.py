"""`stoker job exec`, `forward` and `shell` on a real cluster, with real terminals; states of real pods."""

from __future__ import annotations

import os
import pty
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.kube.client import KubeClient
from stoker.kube.ephemeral_pod import list_events
from stoker.kube.objects import MAIN_CONTAINER, PART_LABEL, RUN_LABEL, Manifest, build_claim
from stoker.kube.pending import explain_pending
from stoker.kube.pods import get_exit_status, is_running
from tests.support.kubernetes import NO_KUBERNETES, PATH
from tests.support.signals import restore_signals
from tests.support.waiting import eventually

IMAGE = "docker.io/library/busybox:local"
RUN_ID = "digits-20300101-000000-abcd"
WAIT_S = 60.0
JOB = """\
name: digits
topology: single
image: docker.io/library/busybox:local
program: {command: [sleep, "600"]}
profile: {every: 0}
grace: 1
env: {COLOUR: deep red}
secret_env: {TOKEN: {secret: keys, key: token}}
"""


@pytest.fixture(autouse=True)
def kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put kubectl on the PATH, or skip."""
    monkeypatch.setenv("PATH", PATH)
    if shutil.which("kubectl") is None:
        pytest.skip(f"{NO_KUBERNETES}: no kubectl")


def build_pod(name: str, *words: str, **spec: Any) -> Manifest:
    """Build a pod of the run; `words` is its command."""
    labels = {RUN_LABEL: RUN_ID, "stoker.dev/role": "worker", "batch.kubernetes.io/job-completion-index": "0"}
    main: Manifest = {"name": MAIN_CONTAINER, "image": IMAGE, "imagePullPolicy": "Never", **spec.pop("main", {})}
    main["command"] = list(words) or ["sh", "-c", "trap exit TERM; while :; do sleep 1; done"]
    if spec.get("volumes"):
        main["volumeMounts"] = [{"name": "v", "mountPath": "/volume"}]
    body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": body}


@pytest.fixture
def run_id(cluster: KubeClient, stoker_home: Path) -> str:
    """A run folder of a run with one worker."""
    folder = stoker_home / "runs" / RUN_ID
    folder.mkdir(parents=True)
    (folder / "handle").write_text(f"{cluster.url}/{RUN_ID}\n")
    (folder / "job.yaml").write_text(JOB)
    return RUN_ID


@pytest.fixture
def running(cluster: KubeClient, run_id: str) -> str:
    return create_running(cluster, build_pod("digits-0"))


def create_running(cluster: KubeClient, manifest: Manifest) -> str:
    """Create a pod and wait until it runs."""
    name = str(cluster.create(manifest)["metadata"]["name"])
    assert eventually(lambda: is_running(cluster.get("Pod", name) or manifest)), explain(cluster, name)
    return name


def explain(cluster: KubeClient, name: str) -> str:
    manifest = cluster.get("Pod", name)
    assert manifest is not None
    return explain_pending(manifest, list_events(cluster, manifest))


def run_stoker(*words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    argv = [sys.executable, "-m", "stoker", *words]
    completed: subprocess.CompletedProcess[bytes] = subprocess.run(
        argv, capture_output=True, timeout=120, check=False, **options
    )
    return completed


# --- exec


@pytest.mark.parametrize("with_kubectl", [True, False])
def test_exec_passes_on_streams_and_exit_code(running: str, with_kubectl: bool) -> None:
    env = os.environ if with_kubectl else {**os.environ, "PATH": "/nowhere"}
    words = ["sh", "-c", 'printf "%s|" "$@"; echo err >&2; exit 7', "x", "a b", "$HOME", "--slot", ""]
    completed = run_stoker("job", "exec", "digits", "--slot", "worker/0", "--", *words, env=env)
    assert completed.returncode == 7
    assert completed.stdout == b"a b|$HOME|--slot||"
    assert completed.stderr.startswith(b"err\n")


def test_exec_passes_on_stdin(running: str) -> None:
    data = bytes(range(256)) * 4000
    completed = run_stoker("job", "exec", "digits", "--", "cat", input=data)
    assert (completed.returncode, completed.stdout) == (0, data)


def test_exec_of_stdin_without_kubectl_names_the_remedy(running: str) -> None:
    completed = run_stoker("job", "exec", "digits", "--", "cat", input=b"x", env={**os.environ, "PATH": "/nowhere"})
    assert completed.returncode == 3
    assert b"'kubectl'" in completed.stderr
    assert b"</dev/null" in completed.stderr


def test_exec_of_a_missing_program(running: str) -> None:
    for env in (os.environ, {**os.environ, "PATH": "/nowhere"}):
        completed = run_stoker("job", "exec", "digits", "--", "no-such-program", env=env)
        assert completed.returncode not in (0, None)
        assert b"no-such-program" in completed.stderr
        assert b"Traceback" not in completed.stderr
    assert b"'no-such-program' not found" in completed.stderr


def test_exec_in_a_pod_that_is_not_running(cluster: KubeClient, run_id: str) -> None:
    completed = run_stoker("job", "exec", "digits", "--", "ls")
    assert completed.returncode == 2
    assert f"worker/0 of {run_id} has no pod".encode() in completed.stderr

    cluster.create(build_pod("digits-0", "sh", "-c", "exit 3"))
    assert eventually(lambda: get_exit_status(cluster.get("Pod", "digits-0") or {}) is not None)
    completed = run_stoker("job", "exec", "digits", "--", "ls")
    assert completed.returncode == 5
    assert re.search(rb"pod digits-0 .*exit code 3", completed.stderr), completed.stderr
    assert b"worker/0" in completed.stderr

    cluster.create(build_pod("digits-1", main={"resources": {"limits": {"nvidia.com/gpu": "99"}}}))
    assert eventually(lambda: explain(cluster, "digits-1") != "")
    completed = run_stoker("job", "exec", "digits", "--", "ls")
    assert b"2 of 2 have insufficient nvidia.com/gpu (99 requested)" in completed.stderr

    assert b"has no slot 'ps/0'" in run_stoker("job", "exec", "digits", "--slot", "ps/0", "--", "ls").stderr


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            restore_signals()
            os.execv(sys.executable, [sys.executable, *argv])
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, pattern: str, seconds: float = WAIT_S) -> None:
        """Read until the output matches a pattern."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self._end], [], [], 0.2)[0]:
                self.text += self._read()

    def wait(self, seconds: float = WAIT_S) -> int:
        """Wait for the command; return its exit code."""
        deadline = time.monotonic() + seconds
        while True:
            if select.select([self._end], [], [], 0.2)[0]:
                self.text += self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, f"still running: {self.text!r}"

    def close(self) -> None:
        os.close(self._end)

    def _read(self) -> str:
        try:
            return os.read(self._end, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return ""


def test_exec_in_a_terminal_allocates_a_tty(running: str) -> None:
    terminal = Terminal("-m", "stoker", "job", "exec", "digits", "--", "sh")
    terminal.expect(r"# ")
    terminal.type("tty; echo a$((1+1))b\n")
    terminal.expect(r"/dev/pts/\d+\r\na2b")
    terminal.type("sh -c 'echo wait-$((1+1)); exec sleep 600'\n")  # it writes once it is in the foreground
    terminal.expect(r"wait-2")
    terminal.type("\x03")  # interrupts the command in the pod only
    terminal.type("echo still-$((40+2))\n")
    terminal.expect(r"still-42")
    terminal.type("exit 5\n")
    assert terminal.wait() == 5, terminal.text


# --- forward


@pytest.fixture
def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SERVE = ("sh", "-c", 'mkdir /www && echo "$HOSTNAME" > /www/index.html && exec httpd -f -p 8000 -h /www')


def fetch(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
            return str(answer.read().decode().strip())
    except OSError:
        return ""


class PortForwards:
    """Running `stoker job forward` commands and their output."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "stoker", "job", "forward", *words]
        with open(self._out, "wb") as out:
            popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self.started.append(popen)
        return popen

    def read(self) -> str:
        return self._out.read_text()


@pytest.fixture
def forwards(tmp_path: Path) -> Iterator[PortForwards]:
    forwards = PortForwards(tmp_path / "output")
    yield forwards
    for popen in forwards.started:
        popen.terminate()
        popen.wait(30)


def build_worker_job(words: tuple[str, ...]) -> Manifest:
    """Build an Indexed Job of one pod with retries."""
    spec = build_pod("x", *words)["spec"]
    template = {"metadata": {"labels": {RUN_LABEL: RUN_ID, "stoker.dev/role": "worker"}}, "spec": spec}
    body = {"template": template, "completions": 1, "parallelism": 1, "completionMode": "Indexed", "backoffLimit": 3}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}, "spec": body}


def test_forward_follows_the_slot_to_its_next_pod(
    cluster: KubeClient, run_id: str, free: int, forwards: PortForwards
) -> None:
    cluster.create(build_worker_job(SERVE))
    assert eventually(lambda: any(map(is_running, cluster.list_objects("Pod", {RUN_LABEL: run_id}))))
    process = forwards.start("digits", f"8000:{free}")
    assert eventually(lambda: fetch(free) == "digits-0"), forwards.read()
    (first,) = (pod["metadata"]["name"] for pod in cluster.list_objects("Pod", {RUN_LABEL: run_id}))
    assert f"http://127.0.0.1:{free}\n" in forwards.read()

    cluster.delete("Pod", first)
    assert eventually(lambda: forwards.read().count("http://") == 2), forwards.read()
    assert eventually(lambda: fetch(free) == "digits-0"), forwards.read()
    assert f"Pod {first} stopped; waiting for the next pod of worker/0" in forwards.read()

    cluster.delete("Job", "digits")
    assert process.wait(WAIT_S) == 0
    assert f"worker/0 of {run_id} has finished" in forwards.read()


def test_forward_waits_until_the_program_listens(
    cluster: KubeClient, run_id: str, free: int, forwards: PortForwards
) -> None:
    name = create_running(cluster, build_pod("digits-0"))
    process = forwards.start("digits", f"8000:{free}")
    assert eventually(lambda: "http://" in forwards.read()), forwards.read()
    assert fetch(free) == ""
    assert eventually(lambda: "Nothing is listening on that port in worker/0 yet" in forwards.read()), forwards.read()
    cluster.exec_in_pod(name, ["sh", "-c", "mkdir /www; echo late > /www/index.html; httpd -p 8000 -h /www"])
    assert eventually(lambda: fetch(free) == "late"), forwards.read()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert fetch(free) == ""


def test_forward_to_a_port_in_use_and_without_a_pod(cluster: KubeClient, running: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        completed = run_stoker("job", "forward", "digits", f"8000:{port}")
    assert completed.returncode == 2
    assert f"local port {port} is in use".encode() in completed.stderr
    cluster.delete("Pod", running)
    assert eventually(lambda: cluster.get("Pod", running) is None)
    completed = run_stoker("job", "forward", "digits", "8000:0")
    assert completed.returncode == 2
    assert b"has no pod" in completed.stderr


# --- shell


@pytest.fixture
def job_file(cluster: KubeClient, tmp_path: Path, stoker_home: Path) -> Path:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"token": "s3cr3t"}}
    cluster.create(body)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def list_shells(cluster: KubeClient) -> list[Manifest]:
    return cluster.list_objects("Pod", {PART_LABEL: "shell"})


def test_shell_has_the_environment_of_the_job(cluster: KubeClient, job_file: Path) -> None:
    words = ["sh", "-c", "echo $COLOUR $TOKEN; ls /stoker; exit 9"]
    completed = run_stoker("job", "shell", str(job_file), "--on", cluster.url, "--", *words)
    assert completed.returncode == 9, completed.stderr
    assert completed.stdout.startswith(b"deep red s3cr3t\n")
    assert b"worker.sh" in completed.stdout
    assert not list_shells(cluster)
    assert eventually(lambda: not cluster.list_objects("ConfigMap", {PART_LABEL: "shell"}))


def test_shell_in_a_terminal(cluster: KubeClient, job_file: Path) -> None:
    terminal = Terminal("-m", "stoker", "job", "shell", str(job_file), "--on", cluster.url)
    terminal.expect(r"# ")
    terminal.type("echo $COLOUR-$((1+1)); tty\n")
    terminal.expect(r"deep red-2\r\n/dev/pts")
    (shell,) = list_shells(cluster)
    assert shell["spec"]["activeDeadlineSeconds"] == 8 * 3600
    terminal.type("exit 4\n")
    assert terminal.wait() == 4, terminal.text
    assert eventually(lambda: not list_shells(cluster))


@pytest.mark.parametrize("signal_name", ["SIGHUP", "SIGTERM"])
def test_shell_pod_is_deleted_after_a_signal(cluster: KubeClient, job_file: Path, signal_name: str) -> None:
    terminal = Terminal("-m", "stoker", "job", "shell", str(job_file), "--on", cluster.url)
    terminal.expect(r"# ")
    if signal_name == "SIGHUP":
        terminal.close()
        os.waitpid(terminal.pid, 0)
    else:
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.wait() == 130
    assert eventually(lambda: not list_shells(cluster))


def test_shell_that_cannot_start_reports_the_reason(cluster: KubeClient, job_file: Path) -> None:
    argv = ["job", "shell", str(job_file), "--on", cluster.url, "--wait", "5s"]
    completed = run_stoker(*argv, "--set", "image=nowhere.invalid/none:1", "--", "true")
    assert completed.returncode == 5
    assert b"image nowhere.invalid/none:1: the node cannot reach the registry" in completed.stderr
    cluster.delete("Secret", "keys")
    completed = run_stoker(*argv, "--", "true")
    assert b"Secret keys not found" in completed.stderr
    assert eventually(lambda: not list_shells(cluster))


def test_shell_requests_gpus_only_with_the_option(cluster: KubeClient, job_file: Path) -> None:
    argv = ["job", "shell", str(job_file), "--on", cluster.url, "--set", "resources.gpu=99", "--wait", "3s"]
    assert run_stoker(*argv, "--", "true").returncode == 0
    completed = run_stoker(*argv, "--gpu", "--", "true")
    assert completed.returncode == 5
    assert b"insufficient nvidia.com/gpu (99 requested)" in completed.stderr


def test_shell_does_not_take_a_claim_from_a_pod(cluster: KubeClient, job_file: Path, tmp_path: Path) -> None:
    name = f"inside-{secrets.token_hex(3)}"
    folder = tmp_path / "volume"
    folder.mkdir()
    (folder / "hello").write_text("from the volume")
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(folder)},
        "claimRef": {"name": "data", "namespace": cluster.namespace},
    }
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    try:
        argv = ["job", "shell", str(job_file), "--on", cluster.url, "--set", "volumes=[{claim: data, path: /data}]"]
        completed = run_stoker(*argv, "--", "cat", "/data/hello")
        assert b"claim data not found; create it with: stoker volume create data" in completed.stderr
        cluster.create(build_claim("data", 1 << 20, "rwo", {}, storage_class="", volume=name))
        completed = run_stoker(*argv, "--", "cat", "/data/hello")
        assert (completed.returncode, completed.stdout) == (0, b"from the volume"), completed.stderr
        mount = {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}
        create_running(cluster, build_pod("holder", volumes=[mount]))
        completed = run_stoker(*argv, "--", "cat", "/data/hello")
        assert completed.returncode == 2
        assert re.search(rb"claim data .*only one node.*pod holder", completed.stderr), completed.stderr
        assert b"kubectl delete pod holder" in completed.stderr
        assert not list_shells(cluster)
    finally:
        cluster.delete("PersistentVolume", name)


# --- States of real pods


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"main": {"image": "nowhere.invalid/none:1", "imagePullPolicy": "Always"}},
            "cannot pull image nowhere.invalid/none:1: the node",
        ),
        ({"main": {"image": "nowhere/none:1"}}, "is not on the node, and kubernetes.image_pull_policy is Never"),
        ({"main": {"image": "No Such:Name:"}}, "is not a valid image name"),
        ({"nodeSelector": {"moon": "full"}}, "2 of 2 do not match gpu_type or node_selector"),
        ({"main": {"envFrom": [{"configMapRef": {"name": "none"}}]}}, "ConfigMap none not found"),
        (
            {"volumes": [{"name": "v", "secret": {"secretName": "none"}}]},
            "cannot mount volume v: Secret none not found",
        ),
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "none"}}]}, "claim none not found"),
        ({"schedulingGates": [{"name": "example.com/budget"}]}, "scheduling gate example.com/budget"),
        (
            {"volumes": [{"name": "v", "hostPath": {"path": "/etc/hostname", "type": "Directory"}}]},
            "cannot mount volume v: /etc/hostname is not a directory",
        ),
    ],
)
def test_explain_pending_of_a_real_pod(cluster: KubeClient, spec: Manifest, sentence: str) -> None:
    cluster.create(build_pod("pending", **spec))
    assert eventually(lambda: sentence in explain(cluster, "pending")), explain(cluster, "pending")


def test_explain_pending_of_an_unbound_claim(cluster: KubeClient) -> None:
    cluster.create(build_claim("lonely", 1 << 20, "rwo", {}, storage_class=""))
    mount = {"name": "v", "persistentVolumeClaim": {"claimName": "lonely"}}
    cluster.create(build_pod("pending", volumes=[mount]))
    assert eventually(lambda: "claim lonely is not bound" in explain(cluster, "pending")), explain(cluster, "pending")


def test_explain_pending_of_an_exceeded_quota(cluster: KubeClient) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}}}
    cluster.create(quota)
    assert eventually(lambda: "hard" in (cluster.get("ResourceQuota", "team") or {}).get("status", {}))
    job = cluster.create(build_worker_job(()))
    assert eventually(lambda: explain_pending(job, list_events(cluster, job)) != "")
    reason = explain_pending(job, list_events(cluster, job))
    for fragment in ("quota team", "requested pods=1", "used pods=0", "limit pods=0"):
        assert fragment in reason


@pytest.mark.parametrize(
    ("words", "spec", "status"),
    [
        (("true",), {}, (0, "")),
        (("sh", "-c", "exit 3"), {}, (3, "")),
        (("no-such-program",), {}, (128, "executable file not found")),
        (("sleep", "600"), {"activeDeadlineSeconds": 2}, (137, "DeadlineExceeded")),
        (
            ("sh", "-c", "x=a; while :; do x=$x$x; done"),
            {"main": {"resources": {"limits": {"memory": "32Mi"}}}},
            (137, "OOMKilled"),
        ),
    ],
)
def test_exit_status_of_a_real_pod(
    cluster: KubeClient, words: tuple[str, ...], spec: Manifest, status: tuple[int, str]
) -> None:
    cluster.create(build_pod("finished", *words, **spec))
    assert eventually(lambda: get_exit_status(cluster.get("Pod", "finished") or {}) is not None)
    code, reason = get_exit_status(cluster.get("Pod", "finished") or {}) or (None, "")
    assert code == status[0], reason
    assert status[1] in reason if status[1] else reason == ""

"""`stoker job exec`, `forward` and `shell` on a real cluster, at real terminals; and what real pods say."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import until
from stoker.kube.client import KubeClient
from stoker.kube.ephemeral_pod import list_events
from stoker.kube.objects import MAIN_CONTAINER, PART_LABEL, RUN_LABEL, Manifest, build_claim
from stoker.kube.pods import explain_pending, get_exit_status, is_running
from tests.support.kubernetes import NO_KUBERNETES, PATH

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
    """The program, of the cluster's own programs or of this machine."""
    monkeypatch.setenv("PATH", PATH)
    if shutil.which("kubectl") is None:
        pytest.skip(f"{NO_KUBERNETES}: no kubectl")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def pod(name: str, *words: str, **spec: Any) -> Manifest:
    """A pod as a job has it; `words` are what it runs."""
    labels = {RUN_LABEL: RUN_ID, "stoker.dev/role": "worker", "batch.kubernetes.io/job-completion-index": "0"}
    main: Manifest = {"name": MAIN_CONTAINER, "image": IMAGE, "imagePullPolicy": "Never", **spec.pop("main", {})}
    main["command"] = list(words) or ["sh", "-c", "trap exit TERM; while :; do sleep 1; done"]
    if spec.get("volumes"):
        main["volumeMounts"] = [{"name": "v", "mountPath": "/volume"}]
    body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": body}


@pytest.fixture
def ran(cluster: KubeClient, home: Path) -> str:
    """A run of one worker, whose folder is here and whose pod is in the cluster."""
    folder = home / "runs" / RUN_ID
    folder.mkdir(parents=True)
    (folder / "handle").write_text(f"{cluster.url}/{RUN_ID}\n")
    (folder / "job.yaml").write_text(JOB)
    return RUN_ID


@pytest.fixture
def running(cluster: KubeClient, ran: str) -> str:
    return made(cluster, pod("digits-0"))


def made(cluster: KubeClient, one: Manifest) -> str:
    """Make a pod and wait until it runs."""
    name = str(cluster.create(one)["metadata"]["name"])
    assert eventually(lambda: is_running(cluster.get("Pod", name) or one)), why(cluster, name)
    return name


def eventually(condition: Callable[[], bool]) -> bool:
    return until(condition, WAIT_S, pause_s=0.25)


def why(cluster: KubeClient, name: str) -> str:
    found = cluster.get("Pod", name)
    assert found is not None
    return explain_pending(found, list_events(cluster, found))


def stoker(*words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    if "input" not in more:
        more["stdin"] = subprocess.DEVNULL
    argv = [sys.executable, "-m", "stoker", *words]
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        argv, capture_output=True, timeout=120, check=False, **more
    )
    return done


# --- exec


@pytest.mark.parametrize("with_kubectl", [True, False])
def test_exec_passes_on_streams_and_code(running: str, with_kubectl: bool) -> None:
    env = os.environ if with_kubectl else {**os.environ, "PATH": "/nowhere"}
    words = ["sh", "-c", 'printf "%s|" "$@"; echo err >&2; exit 7', "x", "a b", "$HOME", "--slot", ""]
    done = stoker("job", "exec", "digits", "--slot", "worker/0", "--", *words, env=env)
    assert done.returncode == 7
    assert done.stdout == b"a b|$HOME|--slot||"
    assert done.stderr.startswith(b"err\n")


def test_exec_passes_on_standard_input_byte_by_byte(running: str) -> None:
    data = bytes(range(256)) * 4000
    done = stoker("job", "exec", "digits", "--", "cat", input=data)
    assert (done.returncode, done.stdout) == (0, data)


def test_exec_without_kubectl_says_what_to_install(running: str) -> None:
    done = stoker("job", "exec", "digits", "--", "cat", input=b"x", env={**os.environ, "PATH": "/nowhere"})
    assert done.returncode == 3
    assert b"standard input of a command in a pod needs the program 'kubectl'" in done.stderr
    assert b"</dev/null" in done.stderr


def test_exec_of_what_is_not_in_the_image_fails(running: str) -> None:
    for env in (os.environ, {**os.environ, "PATH": "/nowhere"}):
        done = stoker("job", "exec", "digits", "--", "no-such-program", env=env)
        assert done.returncode not in (0, None)
        assert b"no-such-program" in done.stderr
        assert b"Traceback" not in done.stderr
    assert done.stderr.endswith(b"there is no program 'no-such-program' in the container\n")


def test_exec_says_why_it_cannot(cluster: KubeClient, ran: str) -> None:
    done = stoker("job", "exec", "digits", "--", "ls")
    assert done.returncode == 2
    assert f"worker/0 of {ran} has no pod".encode() in done.stderr

    cluster.create(pod("digits-0", "sh", "-c", "exit 3"))
    assert eventually(lambda: get_exit_status(cluster.get("Pod", "digits-0") or {}) is not None)
    done = stoker("job", "exec", "digits", "--", "ls")
    assert done.returncode == 5
    assert b"does not run in pod digits-0: it has ended with exit code 3" in done.stderr

    cluster.create(pod("digits-1", main={"resources": {"limits": {"nvidia.com/gpu": "99"}}}))
    assert eventually(lambda: why(cluster, "digits-1") != "")
    done = stoker("job", "exec", "digits", "--", "ls")
    assert b"2 of 2 have too little nvidia.com/gpu free (99 asked for)" in done.stderr

    assert b"there is no slot 'ps/0'" in stoker("job", "exec", "digits", "--slot", "ps/0", "--", "ls").stderr


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, *argv])
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, pattern: str, seconds: float = WAIT_S) -> None:
        """Read until the screen shows something."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self._end], [], [], 0.2)[0]:
                self.text += self._read()

    def end(self, seconds: float = WAIT_S) -> int:
        """Wait for its end; give its exit code."""
        deadline = time.monotonic() + seconds
        while True:
            if select.select([self._end], [], [], 0.2)[0]:
                self.text += self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, f"still runs: {self.text!r}"

    def hang_up(self) -> None:
        os.close(self._end)

    def _read(self) -> str:
        try:
            return os.read(self._end, 65536).decode(errors="replace")
        except OSError:  # nobody is at the other end any more
            return ""


def test_exec_at_a_terminal_is_a_terminal_there(running: str) -> None:
    screen = Terminal("-m", "stoker", "job", "exec", "digits", "--", "sh")
    screen.expect(r"# ")
    screen.type("tty; echo a$((1+1))b\n")
    screen.expect(r"/dev/pts/\d+\r\na2b")
    screen.type("sleep 600\n")
    time.sleep(1)
    screen.type("\x03")  # Ctrl-C ends what runs there, and nothing here
    screen.type("echo still-$((40+2))\n")
    screen.expect(r"still-42")
    screen.type("exit 5\n")
    assert screen.end() == 5, screen.text


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


class Tunnels:
    """Forwarding that goes on, and what it said."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "stoker", "job", "forward", *words]
        with open(self._out, "wb") as out:
            popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self.started.append(popen)
        return popen

    def said(self) -> str:
        return self._out.read_text()


@pytest.fixture
def tunnels(tmp_path: Path) -> Iterator[Tunnels]:
    made = Tunnels(tmp_path / "said")
    yield made
    for one in made.started:
        one.terminate()
        one.wait(30)


def worker_job(words: tuple[str, ...]) -> Manifest:
    """A Job of one indexed pod that is made again when it fails."""
    spec = pod("x", *words)["spec"]
    template = {"metadata": {"labels": {RUN_LABEL: RUN_ID, "stoker.dev/role": "worker"}}, "spec": spec}
    more = {"completions": 1, "parallelism": 1, "completionMode": "Indexed", "backoffLimit": 3}
    body = {"template": template, **more}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}, "spec": body}


def test_forward_follows_the_slot_to_its_next_pod_and_ends_with_it(
    cluster: KubeClient, ran: str, free: int, tunnels: Tunnels
) -> None:
    cluster.create(worker_job(SERVE))
    assert eventually(lambda: any(map(is_running, cluster.list_objects("Pod", {RUN_LABEL: ran}))))
    process = tunnels.start("digits", f"8000:{free}")
    assert eventually(lambda: fetch(free) == "digits-0"), tunnels.said()
    (first,) = (one["metadata"]["name"] for one in cluster.list_objects("Pod", {RUN_LABEL: ran}))
    assert f"http://127.0.0.1:{free}\n" in tunnels.said()

    cluster.delete("Pod", first)
    assert eventually(lambda: tunnels.said().count("http://") == 2), tunnels.said()
    assert eventually(lambda: fetch(free) == "digits-0"), tunnels.said()
    assert f"Pod {first} no longer answers; waiting for the next of worker/0" in tunnels.said()

    cluster.delete("Job", "digits")
    assert process.wait(WAIT_S) == 0
    assert f"worker/0 of {ran} has ended" in tunnels.said()


def test_forward_goes_on_when_nothing_listens_yet(cluster: KubeClient, ran: str, free: int, tunnels: Tunnels) -> None:
    name = made(cluster, pod("digits-0"))
    process = tunnels.start("digits", f"8000:{free}")
    assert eventually(lambda: "http://" in tunnels.said()), tunnels.said()
    assert fetch(free) == ""
    assert eventually(lambda: "Nothing listens at that port in worker/0 (yet)" in tunnels.said()), tunnels.said()
    cluster.exec_in_pod(name, ["sh", "-c", "mkdir /www; echo late > /www/index.html; httpd -p 8000 -h /www"])
    assert eventually(lambda: fetch(free) == "late"), tunnels.said()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert fetch(free) == ""


def test_forward_says_what_is_in_the_way(cluster: KubeClient, running: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = stoker("job", "forward", "digits", f"8000:{port}")
    assert done.returncode == 2
    assert f"port {port} is taken here".encode() in done.stderr
    cluster.delete("Pod", running)
    assert eventually(lambda: cluster.get("Pod", running) is None)
    done = stoker("job", "forward", "digits", "8000:0")
    assert done.returncode == 2
    assert b"has no pod" in done.stderr


# --- shell


@pytest.fixture
def job_file(cluster: KubeClient, tmp_path: Path, home: Path) -> Path:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"token": "s3cr3t"}}
    cluster.create(body)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def shells(cluster: KubeClient) -> list[Manifest]:
    return cluster.list_objects("Pod", {PART_LABEL: "shell"})


def test_shell_has_the_job_s_variables_and_is_deleted(cluster: KubeClient, job_file: Path) -> None:
    words = ["sh", "-c", "echo $COLOUR $TOKEN; ls /stoker; exit 9"]
    done = stoker("job", "shell", str(job_file), "--on", cluster.url, "--", *words)
    assert done.returncode == 9, done.stderr
    assert done.stdout.startswith(b"deep red s3cr3t\n")
    assert b"worker.sh" in done.stdout
    assert not shells(cluster)
    assert eventually(lambda: not cluster.list_objects("ConfigMap", {PART_LABEL: "shell"}))


def test_shell_at_a_terminal(cluster: KubeClient, job_file: Path) -> None:
    screen = Terminal("-m", "stoker", "job", "shell", str(job_file), "--on", cluster.url)
    screen.expect(r"# ")
    screen.type("echo $COLOUR-$((1+1)); tty\n")
    screen.expect(r"deep red-2\r\n/dev/pts")
    (found,) = shells(cluster)
    assert found["spec"]["activeDeadlineSeconds"] == 8 * 3600
    screen.type("exit 4\n")
    assert screen.end() == 4, screen.text
    assert eventually(lambda: not shells(cluster))


@pytest.mark.parametrize("way", ["hang up", "terminate"])
def test_shell_leaves_nothing_when_it_is_cut_off(cluster: KubeClient, job_file: Path, way: str) -> None:
    screen = Terminal("-m", "stoker", "job", "shell", str(job_file), "--on", cluster.url)
    screen.expect(r"# ")
    if way == "hang up":
        screen.hang_up()
        os.waitpid(screen.pid, 0)
    else:
        os.kill(screen.pid, signal.SIGTERM)
        assert screen.end() == 130
    assert eventually(lambda: not shells(cluster))


def test_shell_that_cannot_start_says_why_and_is_deleted(cluster: KubeClient, job_file: Path) -> None:
    argv = ["job", "shell", str(job_file), "--on", cluster.url, "--wait", "5s"]
    done = stoker(*argv, "--set", "image=nowhere.invalid/none:1", "--", "true")
    assert done.returncode == 5
    assert b"image nowhere.invalid/none:1 cannot be pulled: the registry cannot be reached" in done.stderr
    cluster.delete("Secret", "keys")
    done = stoker(*argv, "--", "true")
    assert b"the container cannot be made: there is no Secret keys" in done.stderr
    assert eventually(lambda: not shells(cluster))


def test_shell_with_gpus_asks_for_them(cluster: KubeClient, job_file: Path) -> None:
    argv = ["job", "shell", str(job_file), "--on", cluster.url, "--set", "resources.gpu=99", "--wait", "3s"]
    assert stoker(*argv, "--", "true").returncode == 0
    done = stoker(*argv, "--gpu", "--", "true")
    assert done.returncode == 5
    assert b"have too little nvidia.com/gpu free (99 asked for)" in done.stderr


def test_shell_is_refused_while_a_job_has_its_claim(cluster: KubeClient, job_file: Path, tmp_path: Path) -> None:
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
        done = stoker(*argv, "--", "cat", "/data/hello")
        assert b"there is no claim data; make it with: stoker volume create data" in done.stderr
        cluster.create(build_claim("data", 1 << 20, "rwo", {}, storage_class="", volume=name))
        done = stoker(*argv, "--", "cat", "/data/hello")
        assert (done.returncode, done.stdout) == (0, b"from the volume"), done.stderr
        mount = {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}
        made(cluster, pod("holder", volumes=[mount]))
        done = stoker(*argv, "--", "cat", "/data/hello")
        assert done.returncode == 2
        assert b"claim data is mounted by pod holder, and one node alone can have it" in done.stderr
        assert not shells(cluster)
    finally:
        cluster.delete("PersistentVolume", name)


# --- What real pods say


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"main": {"image": "nowhere.invalid/none:1", "imagePullPolicy": "Always"}}, "cannot be pulled: the registry"),
        ({"main": {"image": "nowhere/none:1"}}, "is not on the node, and kubernetes.image_pull_policy is Never"),
        ({"main": {"image": "No Such:Name:"}}, "is no name of an image"),
        ({"nodeSelector": {"moon": "full"}}, "2 of 2 are not of the kind asked for"),
        ({"main": {"envFrom": [{"configMapRef": {"name": "none"}}]}}, "cannot be made: there is no ConfigMap none"),
        ({"volumes": [{"name": "v", "secret": {"secretName": "none"}}]}, "cannot be mounted: there is no Secret none"),
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "none"}}]}, "there is no claim none"),
        ({"schedulingGates": [{"name": "example.com/budget"}]}, "it is held back by example.com/budget"),
        (
            {"volumes": [{"name": "v", "hostPath": {"path": "/etc/hostname", "type": "Directory"}}]},
            "volume v cannot be mounted: /etc/hostname is not a directory",
        ),
    ],
)
def test_a_pod_says_why_it_waits(cluster: KubeClient, spec: Manifest, sentence: str) -> None:
    cluster.create(pod("waits", **spec))
    assert eventually(lambda: sentence in why(cluster, "waits")), why(cluster, "waits")


def test_a_claim_without_a_volume_is_told(cluster: KubeClient) -> None:
    cluster.create(build_claim("lonely", 1 << 20, "rwo", {}, storage_class=""))
    mount = {"name": "v", "persistentVolumeClaim": {"claimName": "lonely"}}
    cluster.create(pod("waits", volumes=[mount]))
    assert eventually(lambda: "for its claim (lonely)" in why(cluster, "waits")), why(cluster, "waits")


def test_a_job_without_room_in_its_quota_says_so(cluster: KubeClient) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}}}
    cluster.create(quota)
    assert eventually(lambda: "hard" in (cluster.get("ResourceQuota", "team") or {}).get("status", {}))
    job = cluster.create(worker_job(()))
    assert eventually(lambda: explain_pending(job, list_events(cluster, job)) != "")
    told = explain_pending(job, list_events(cluster, job))
    assert told == "quota team leaves no room: pods=1 asked for, pods=0 used of pods=0"


@pytest.mark.parametrize(
    ("words", "spec", "end"),
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
def test_a_pod_says_how_it_ended(
    cluster: KubeClient, words: tuple[str, ...], spec: Manifest, end: tuple[int, str]
) -> None:
    cluster.create(pod("ends", *words, **spec))
    assert eventually(lambda: get_exit_status(cluster.get("Pod", "ends") or {}) is not None)
    code, reason = get_exit_status(cluster.get("Pod", "ends") or {}) or (None, "")
    assert code == end[0], reason
    assert end[1] in reason if end[1] else reason == ""

"""`stoker doctor --on`: injected faults on real hosts, all reported in one run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stoker.core.processes import find_processes_by_env
from stoker.doctor import rules, run
from stoker.errors import UnavailableError
from stoker.launchers.local import LocalLauncher
from tests.support.hosts import Network, network
from tests.support.ray import CPUS, ray_cluster
from tests.support.servers import free_port
from tests.support.trees import stoker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
HOSTS = ("node1", "node2", "node3", "node4")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net"), HOSTS) as net:
        yield net


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workspace / "tmp").mkdir()
    # Other tests may run the doctor on this machine, too: these names are ours.
    monkeypatch.setattr(tempfile, "tempdir", str(workspace / "tmp"))
    monkeypatch.setattr(run, "REMOTE_DIR_PREFIX", f"/tmp/stoker-doctor-{os.getpid()}-")
    return workspace


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve_dataset(net: Network, folder: Path) -> Iterator[str]:
    """Serve a dataset at its own address, so that a single host can be cut off from it."""
    folder.mkdir()
    (folder / "train-000000.tar").write_bytes(os.urandom(8 << 20))
    (folder / "manifest.json").write_text(json.dumps({"shards": [{"name": "train-000000.tar"}]}))
    address = f"{net['node1'].address.rpartition('.')[0]}.250"
    ip("addr", "add", f"{address}/32", "dev", net.bridge)
    server = ThreadingHTTPServer((address, 0), partial(QuietHandler, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        ip("addr", "del", f"{address}/32", "dev", net.bridge)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


@contextmanager
def cut_off(net: Network, host: str, address: str) -> Iterator[None]:
    """Drop the packets of a host to an address."""
    ip("-n", net[host].namespace, "route", "add", "blackhole", f"{address}/32")
    try:
        yield
    finally:
        ip("-n", net[host].namespace, "route", "del", "blackhole", f"{address}/32")


@contextmanager
def occupy_port(net: Network, host: str, port: int) -> Iterator[None]:
    serve = f"import socket, time; s = socket.create_server(('', {port})); print(flush=True); time.sleep(999)"
    argv = ["ip", "netns", "exec", net[host].namespace, sys.executable, "-c", serve]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def write_job(net: Network, here: Path, *hosts: str, python: str = sys.executable, **keys: Any) -> Path:
    """Write a job file without the key `workers`."""
    keyless = f"Host keyless\n  HostName {net['node1'].address}\n  IdentityFile {net.folder}/stranger\n"
    keyless += f"  IdentitiesOnly yes\n  UserKnownHostsFile {net.folder}/known\n  User root\n"
    (here / "config").write_text(net.config.read_text() + keyless)
    ssh = {"hosts": list(hosts), "config": str(here / "config"), "workdir": str(here / "there"), "python": python}
    path = here / "job.yaml"
    path.write_text(json.dumps({"name": "pets", "program": {"module": "this"}, "ssh": ssh, **keys}))
    return path


def job_file(net: Network, here: Path, *hosts: str, **keys: Any) -> Path:
    return write_job(net, here, *hosts, workers=len(hosts), **keys)


def run_doctor(
    capsys: pytest.CaptureFixture[str], *args: object
) -> tuple[int, dict[tuple[str, str], dict[str, Any]], str]:
    """Return the exit code, the checks by name and host, and standard error."""
    code = stoker("doctor", *args, "--json")
    captured = capsys.readouterr()
    return code, {(check["what"], check["host"]): check for check in json.loads(captured.out)}, captured.err


def assert_nothing_is_left(here: Path) -> None:
    assert not (here / "stoker").exists()
    assert not (here / "there").exists()
    assert list(Path(f"{here}/tmp").iterdir()) == []
    assert not list(Path("/tmp").glob(f"stoker-doctor-{os.getpid()}-*"))


def test_two_hosts_without_issues(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_dataset(net, here / "site") as url:
        job = job_file(net, here, "node1", "node2", data={"train": url}, checkpoint={"dir": "/var/tmp/never-made"})
        code, checks, _ = run_doctor(capsys, job, "--on", "ssh")
    assert (code, [check for check in checks.values() if check["fine"] is False]) == (0, [])
    for host in ("node1", "node2"):
        assert checks["network", host]["fine"] is True
        assert checks["network", host]["found"] == "reaches all other hosts"
        assert checks["data.train", host]["found"].startswith("8 MiB read at ")
        assert checks["disk: workdir", host]["fine"] is not False
    assert ("disk: checkpoints", "node1") in checks
    assert ("disk: checkpoints", "node2") not in checks
    reduced = checks["all-reduce", ""]
    assert reduced["fine"] is not False
    assert reduced["found"].startswith("2 ranks, gloo: 1 MiB in ")
    assert not Path("/var/tmp/never-made").exists()
    assert_nothing_is_left(here)


def test_every_host_named_on_the_command_line_is_checked(
    net: Network, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(net, here, "node1")
    code, checks, _ = run_doctor(capsys, job, "--on", "ssh", "--hosts", "node1,node2")
    assert (code, [check for check in checks.values() if check["fine"] is False]) == (0, [])
    assert {host for what, host in checks if what == "host"} == {"node1", "node2"}
    assert checks["all-reduce", ""]["found"].startswith("2 ranks, gloo: ")


@pytest.mark.parametrize("keys", [{"workers": 1}, {"topology": "single"}])
def test_hosts_that_the_job_does_not_use_are_checked_alone(
    keys: dict[str, Any], net: Network, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(net, here, "node1", "node2", "keyless", **keys)
    code, checks, _ = run_doctor(capsys, job, "--on", "ssh")
    assert {check["host"] for check in checks.values() if check["fine"] is False} == {"keyless"}
    assert code == UnavailableError.exit_code
    assert {host for what, host in checks if what == "host"} == {"node1", "node2", "keyless"}
    assert {host for what, host in checks if what == "disk: workdir"} == {"node1", "node2"}
    assert all(name in checks["ssh.hosts", ""]["found"] for name in ("node2", "keyless"))


def test_every_fault_is_reported_in_one_run(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = here / "python"  # without any package on one of the hosts
    bare = f'*" {net["node3"].address} "*) exec {sys.executable} -S -E "$@";;'
    python.write_text(f'#!/bin/sh\ncase "$SSH_CONNECTION" in {bare} esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    net["node4"].down()
    try:
        with serve_dataset(net, here / "site") as url, occupy_port(net, "node1", 29555):
            job = job_file(
                net,
                here,
                *HOSTS,
                "keyless",
                "no-such-host",
                python=str(python),
                port=29555,
                data={"train": url, "val": f"{url}/none.tar"},
            )
            with cut_off(net, "node2", url.split("/")[2].split(":")[0]):
                code, checks, stderr = run_doctor(capsys, job, "--on", "ssh")
    finally:
        net["node4"].up()
    assert code == 5
    failed = {key: (check["found"], check["fix"]) for key, check in checks.items() if check["fine"] is False}
    assert failed["host", "node4"][0].startswith("connection refused")
    assert f"ssh -F {here}/config node4" in failed["host", "node4"][1]
    assert failed["host", "keyless"][0] == "public key rejected"
    assert f"ssh-copy-id -F {here}/config keyless" in failed["host", "keyless"][1]
    assert failed["host", "no-such-host"][0] == "could not resolve host name"
    assert failed["host", "no-such-host"][1]
    assert failed["torch", "node3"][0].startswith("torch is not installed for ")
    assert failed["port", "node1"][0] == "cannot listen on port 29555: address already in use"
    assert failed["data.train", "node2"][0].startswith(f"cannot read {url}: ")
    assert "firewall" in failed["data.train", "node2"][1]
    for host in ("node1", "node3"):
        assert failed["data.val", host][0] == f"cannot read {url}/none.tar: HTTP 404 File not found"
        assert checks["data.train", host]["fine"] is True
    unreadable = {("data.val", host) for host in ("node1", "node2", "node3")}
    hosts = {("host", host) for host in ("node4", "keyless", "no-such-host")}
    assert set(failed) == hosts | unreadable | {("torch", "node3"), ("port", "node1"), ("data.train", "node2")}
    assert checks["all-reduce", ""]["found"].startswith("2 ranks, gloo")
    assert "checks failed: host (node4, keyless, no-such-host), torch (node3), port (node1), " in stderr
    assert_nothing_is_left(here)


@pytest.mark.slow
def test_hosts_that_cannot_reach_each_other(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_file(net, here, "node1", "node2", "node3")
    with cut_off(net, "node2", net["node3"].address):
        code, checks, _ = run_doctor(capsys, job, "--on", "ssh")
        assert stoker("job", "plan", job, "--on", "ssh") == 2
    assert "node2: cannot reach node3 on port " in capsys.readouterr().err
    assert code == 2
    failed = {key: check for key, check in checks.items() if check["fine"] is False}
    assert set(failed) == {("network", "node2"), ("network", "node3")}
    for host, other in (("node2", "node3"), ("node3", "node2")):
        assert failed["network", host]["found"].startswith(f"cannot reach {other} on port ")
        assert f"open all ports of {other} for {host}" in failed["network", host]["fix"]
    assert checks["all-reduce", ""]["fine"] is None
    assert checks["all-reduce", ""]["found"] == "skipped: some hosts cannot reach each other"
    assert {host for what, host in checks if what == "gpus"} == {"node1", "node2", "node3"}
    assert_nothing_is_left(here)


@pytest.mark.slow
def test_hanging_probe_is_stopped(
    net: Network, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PROBE_TIMEOUT_S", 30.0)
    (here / "hang").mkdir()
    hang = f"import os, time\nif ' {net['node2'].address} ' in os.environ['SSH_CONNECTION']: time.sleep(999)\n"
    (here / "hang" / "sitecustomize.py").write_text(hang)
    path = f"{here / 'hang'}:{os.environ.get('PYTHONPATH', '')}"
    job = job_file(net, here, "node1", "node2", env={"PYTHONPATH": path})
    code, checks, _ = run_doctor(capsys, job, "--on", "ssh")
    assert code == 4
    assert checks["probe", "node2"]["found"].startswith("worker/1 did not report: ")
    assert "30 s" in checks["probe", "node2"]["found"]
    assert find_processes_by_env({"STOKER_JOB": "doctor"}) == []
    assert_nothing_is_left(here)


def test_on_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "shards").mkdir()
    (here / "shards" / "a.tar").write_bytes(bytes(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        args = ["--on", "local", "--set", f"port={port}", "--set", "resources.gpu=1", "--set", "data.val=none"]
        args += ["--set", "topology=single", "--set", "processes_per_worker=auto"]
        code, checks, stderr = run_doctor(capsys, *args, "--set", f"data.train={here / 'shards'}")
    assert code == 2
    failed = {what: (check["found"], check["fix"]) for (what, _), check in checks.items() if check["fine"] is False}
    expected = {
        "resources.gpu": ("job needs 1 GPU", "--set resources.gpu=0"),
        "data.val": (f"{Path.cwd() / 'none'}", rules.LOCAL_DATA_FIX),
        "port": (f"{port} is in use", "--set port=…"),
        "gpus": ("the job needs 1 GPU, but this host has 0", "nvidia-smi, or: --set resources.gpu=0"),
    }
    assert failed.keys() == expected.keys()
    for what, (found, fix) in expected.items():
        assert found in failed[what][0]
        assert fix in failed[what][1]
    assert checks["data.train", ""]["found"].startswith("1 MiB read at ")
    assert ("all-reduce", "") not in checks
    skipped = [check for check in checks.values() if check["fine"] is None and not check["fix"]]
    count = f"4 of {len(checks) - len(skipped)} checks failed"
    assert (f"{count}, {len(skipped)} skipped: " if skipped else f"{count}: ") in stderr
    assert_nothing_is_left(here)


def test_probe_that_cannot_be_stopped_does_not_lose_the_other_checks(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, stop = [], LocalLauncher.stop

    def stop_and_raise(self: LocalLauncher, handle: str) -> None:
        modes.append(next((here / "tmp").iterdir()).stat().st_mode & 0o777)
        stop(self, handle)
        raise UnavailableError("does not answer", where="node2")

    monkeypatch.setattr(LocalLauncher, "stop", stop_and_raise)
    args = ["--set", "topology=single", "--set", "processes_per_worker=auto"]
    code, checks, _ = run_doctor(capsys, "--on", "local", *args)
    assert (code, modes) == (UnavailableError.exit_code, [0o700])
    assert checks["probe", ""]["found"] == "could not be stopped: node2: does not answer"
    assert checks["python", ""]["fine"] is True
    assert_nothing_is_left(here)


@pytest.mark.slow
def test_all_reduce_on_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks, _ = run_doctor(capsys, "--on", "local")
    assert code == 0
    assert checks["all-reduce", ""]["found"].startswith("2 ranks, gloo")
    assert_nothing_is_left(here)


@pytest.mark.slow
def test_all_reduce_of_workers_that_differ(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--set", "processes_per_worker=1", "--set", "workers=[{processes_per_worker: 2}, {}]")
    code, checks, _ = run_doctor(capsys, "--on", "local", *args)
    assert code == 0
    assert checks["all-reduce", ""]["found"].startswith("3 ranks, gloo")
    assert_nothing_is_left(here)


def test_unreachable_ray_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="no package 'ray'")
    port = free_port()
    code, checks, stderr = run_doctor(capsys, "--on", f"ray://127.0.0.1:{port}")
    assert code == 5
    assert re.search(
        rf"127\.0\.0\.1:{port}: .*(no Ray cluster|no response|does not|cannot|not reach)",
        checks["cluster", ""]["found"],
    )
    assert "ray start --head" in checks["cluster", ""]["fix"]
    assert "1 of 1 checks failed: cluster" in stderr


@pytest.mark.slow
def test_on_ray(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster(here) as cluster:
        code, checks, _ = run_doctor(capsys, "--on", f"ray://{cluster.target}", "--set", "data.train=/none")
        assert code == 2
        nodes = [node.address for node in cluster.nodes]
        assert {key for key, check in checks.items() if check["fine"] is False} == {
            ("data.train", node) for node in nodes
        }
        assert checks["nodes", ""]["found"] == "2 alive"
        for node in nodes:
            assert checks["python", node]["fine"] is True
            assert checks["disk: workdir", node]["fine"] is not False
            assert checks["clock", node]["fine"] is True
        assert checks["all-reduce", ""]["found"].startswith("2 ranks, gloo")
        code, checks, _ = run_doctor(capsys, "--on", f"ray://{cluster.target}", "--set", "workers=9")
        assert code == 0
        assert checks["capacity", ""]["fine"] is None
        assert re.match(r"job needs 9 CPUs; free: \d+ CPUs", checks["capacity", ""]["found"])
        assert checks["probe", ""]["fine"] is None
        assert checks["probe", ""]["found"] == "skipped: the cluster has too few free resources"
        monkeypatch.setattr(run, "PROBE_TIMEOUT_S", 30.0)
        wide = ["--set", "workers=1", "--set", f"resources.cpu={CPUS + 1}"]
        code, checks, _ = run_doctor(capsys, "--on", f"ray://{cluster.target}", *wide)
        assert code == 0
        assert checks["capacity", ""]["fine"] is None
        assert checks["capacity", ""]["found"].startswith("the probe was not scheduled: ")
    assert_nothing_is_left(here)

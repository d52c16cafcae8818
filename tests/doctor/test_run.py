"""`stoker doctor --on`: real hosts, real faults, each told apart, all in one run."""

from __future__ import annotations

import json
import os
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
    with network(tmp_path_factory.mktemp("net"), HOSTS) as found:
        yield found


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workspace / "tmp").mkdir()
    # Others may use the doctor on this machine too: ours are known by their names.
    monkeypatch.setattr(tempfile, "tempdir", str(workspace / "tmp"))
    monkeypatch.setattr(run, "FOLDER", f"/tmp/stoker-doctor-{os.getpid()}-")
    return workspace


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(net: Network, folder: Path) -> Iterator[str]:
    """A web server on an address of its own, so that a host can be kept from it alone."""
    folder.mkdir()
    (folder / "train-000000.tar").write_bytes(os.urandom(8 << 20))
    (folder / "manifest.json").write_text(json.dumps({"shards": [{"name": "train-000000.tar"}]}))
    address = f"{net['node1'].address.rpartition('.')[0]}.250"
    ip("addr", "add", f"{address}/32", "dev", net.bridge)
    server = ThreadingHTTPServer((address, 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        ip("addr", "del", f"{address}/32", "dev", net.bridge)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def cut_off(net: Network, host: str, address: str) -> Iterator[None]:
    """Let a host's packets to an address vanish."""
    ip("-n", net[host].space, "route", "add", "blackhole", f"{address}/32")
    try:
        yield
    finally:
        ip("-n", net[host].space, "route", "del", "blackhole", f"{address}/32")


@contextmanager
def taken(net: Network, host: str, port: int) -> Iterator[None]:
    serve = f"import socket, time; s = socket.create_server(('', {port})); print(flush=True); time.sleep(99)"
    argv = ["ip", "netns", "exec", net[host].space, sys.executable, "-c", serve]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as taker:
        assert taker.stdout is not None
        taker.stdout.readline()
        try:
            yield
        finally:
            taker.kill()


def job_file(net: Network, here: Path, *hosts: str, python: str = sys.executable, **keys: Any) -> Path:
    keyless = f"Host keyless\n  HostName {net['node1'].address}\n  IdentityFile {net.folder}/stranger\n"
    keyless += f"  IdentitiesOnly yes\n  UserKnownHostsFile {net.folder}/known\n  User root\n"
    (here / "config").write_text(net.config.read_text() + keyless)
    ssh = {"hosts": list(hosts), "config": str(here / "config"), "workdir": str(here / "there"), "python": python}
    path = here / "job.yaml"
    path.write_text(
        json.dumps({"name": "pets", "program": {"module": "this"}, "workers": len(hosts), "ssh": ssh, **keys})
    )
    return path


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[tuple[str, str], dict[str, Any]], str]:
    """The exit code, the checks by what and host, and what was said beside them."""
    code = stoker("doctor", *words, "--json")
    said = capsys.readouterr()
    return code, {(one["what"], one["host"]): one for one in json.loads(said.out)}, said.err


def nothing_is_left(here: Path) -> None:
    assert not (here / "stoker").exists()
    assert not (here / "there").exists()
    assert list(Path(f"{here}/tmp").iterdir()) == []
    assert not list(Path("/tmp").glob(f"stoker-doctor-{os.getpid()}-*"))


def test_all_is_well_on_two_hosts(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(net, here / "site") as url:
        job = job_file(net, here, "node1", "node2", data={"train": url}, checkpoint={"dir": "/var/tmp/never-made"})
        code, checks, _ = asked(capsys, job, "--on", "ssh")
    assert (code, [one for one in checks.values() if one["fine"] is False]) == (0, [])
    for host in ("node1", "node2"):
        assert checks["network", host]["found"] == "reaches every other"
        assert checks["data.train", host]["found"].startswith("8 MiB read at ")
        assert checks["disk: workdir", host]["fine"] is not False
    assert ("disk: checkpoints", "node1") in checks
    assert ("disk: checkpoints", "node2") not in checks
    reduced = checks["all-reduce", ""]
    assert reduced["fine"] is not False
    assert reduced["found"].startswith("2 ranks by gloo: 1 MiB in ")
    assert not Path("/var/tmp/never-made").exists()
    nothing_is_left(here)


def test_every_fault_is_told_apart_in_one_run(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = here / "python"  # without any package on one of the hosts
    bare = f'*" {net["node3"].address} "*) exec {sys.executable} -S -E "$@";;'
    python.write_text(f'#!/bin/sh\ncase "$SSH_CONNECTION" in {bare} esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    net["node4"].down()
    try:
        with served(net, here / "site") as url, taken(net, "node1", 29555):
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
                code, checks, said = asked(capsys, job, "--on", "ssh")
    finally:
        net["node4"].up()
    assert code == 5
    wrong = {key: (one["found"], one["fix"]) for key, one in checks.items() if one["fine"] is False}
    assert wrong["host", "node4"][0] == "refuses the connection: no ssh server listens there"
    assert wrong["host", "node4"][1] == f"try it by hand: ssh -F {here}/config node4"
    try_it = f"is it in authorized_keys there? Try: ssh-copy-id -F {here}/config keyless"
    assert wrong["host", "keyless"] == ("refuses your key", try_it)
    assert wrong["host", "no-such-host"][0].startswith("is unknown")
    assert wrong["torch", "node3"][0].startswith("has no torch in ")
    assert wrong["port", "node1"][0] == "has port 29555 taken: address already in use"
    assert wrong["data.train", "node2"][0].startswith(f"{url} cannot be read: ")
    assert "can this host reach the server?" in wrong["data.train", "node2"][1]
    for host in ("node1", "node3"):
        assert wrong["data.val", host][0] == f"{url}/none.tar cannot be read: HTTP 404 File not found"
        assert checks["data.train", host]["fine"] is True
    unmet = {("data.val", host) for host in ("node1", "node2", "node3")}
    hosts = {("host", host) for host in ("node4", "keyless", "no-such-host")}
    assert set(wrong) == hosts | unmet | {("torch", "node3"), ("port", "node1"), ("data.train", "node2")}
    assert checks["all-reduce", ""]["found"].startswith("2 ranks by gloo")
    assert "checks failed: host (node4, keyless, no-such-host), torch (node3), port (node1), " in said
    nothing_is_left(here)


@pytest.mark.slow
def test_hosts_that_cannot_reach_each_other(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_file(net, here, "node1", "node2", "node3")
    with cut_off(net, "node2", net["node3"].address):
        code, checks, _ = asked(capsys, job, "--on", "ssh")
        assert stoker("job", "plan", job, "--on", "ssh") == 2
    assert "node2 cannot reach node3 at port " in capsys.readouterr().err
    assert code == 2
    wrong = {key: one for key, one in checks.items() if one["fine"] is False}
    assert set(wrong) == {("network", "node2"), ("network", "node3")}
    for host, other in (("node2", "node3"), ("node3", "node2")):
        assert wrong["network", host]["found"].startswith(f"cannot reach {other} at port ")
        assert f"Let {host} through to every port of {other}" in wrong["network", host]["fix"]
    assert checks["all-reduce", ""]["found"] == "not tried: some hosts cannot reach each other"
    assert {host for what, host in checks if what == "gpus"} == {"node1", "node2", "node3"}
    nothing_is_left(here)


@pytest.mark.slow
def test_a_probe_that_hangs_is_ended(
    net: Network, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "BOUND_S", 15.0)
    (here / "hang").mkdir()
    hang = f"import os, time\nif ' {net['node2'].address} ' in os.environ['SSH_CONNECTION']: time.sleep(999)\n"
    (here / "hang" / "sitecustomize.py").write_text(hang)
    path = f"{here / 'hang'}:{os.environ.get('PYTHONPATH', '')}"
    job = job_file(net, here, "node1", "node2", env={"PYTHONPATH": path})
    code, checks, _ = asked(capsys, job, "--on", "ssh")
    assert code == 4
    assert checks["probe", "node2"]["found"] == "worker/1 did not come: it was ended after 15 s without a result"
    assert find_processes_by_env({"STOKER_JOB": "doctor"}) == []
    nothing_is_left(here)


def test_on_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "shards").mkdir()
    (here / "shards" / "a.tar").write_bytes(bytes(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        words = ["--on", "local", "--set", f"port={port}", "--set", "resources.gpu=1", "--set", "data.val=none"]
        words += ["--set", "topology=single", "--set", "processes_per_worker=auto"]
        code, checks, said = asked(capsys, *words, "--set", f"data.train={here / 'shards'}")
    assert code == 2
    wrong = {what: (one["found"], one["fix"]) for (what, _), one in checks.items() if one["fine"] is False}
    assert wrong == {
        "resources.gpu": ("1 are wanted and 0 are here", "--set resources.gpu=0 does without"),
        "data.val": (f"there is nothing at {Path.cwd() / 'none'}", rules.LOCAL_DATA_FIX),
        "port": (f"{port} is taken", "--set port=… names another"),
        "gpus": ("has 0 GPUs, and 1 are wanted", "is the driver there (nvidia-smi)? Or --set resources.gpu=0"),
    }
    assert checks["data.train", ""]["found"].startswith("1 MiB read at ")
    assert ("all-reduce", "") not in checks
    assert "4 of " in said
    nothing_is_left(here)


def test_a_probe_that_cannot_be_ended_does_not_lose_the_rest(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, stop = [], LocalLauncher.stop

    def stop_badly(self: LocalLauncher, handle: str) -> None:
        modes.append(next((here / "tmp").iterdir()).stat().st_mode & 0o777)
        stop(self, handle)
        raise UnavailableError("does not answer", where="node2")

    monkeypatch.setattr(LocalLauncher, "stop", stop_badly)
    words = ["--set", "topology=single", "--set", "processes_per_worker=auto"]
    code, checks, _ = asked(capsys, "--on", "local", *words)
    assert (code, modes) == (UnavailableError.exit_code, [0o700])
    assert checks["probe", ""]["found"] == "could not be ended: node2: does not answer"
    assert checks["python", ""]["fine"] is True
    nothing_is_left(here)


@pytest.mark.slow
def test_ranks_on_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks, _ = asked(capsys, "--on", "local")
    assert code == 0
    assert checks["all-reduce", ""]["found"].startswith("2 ranks by gloo")
    nothing_is_left(here)


def test_a_cluster_that_does_not_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="no package 'ray'")
    code, checks, said = asked(capsys, "--on", f"ray://127.0.0.1:{free_port()}")
    assert code == 5
    assert checks["cluster", ""]["found"].endswith(": no Ray cluster answers")
    assert "ray start --head" in checks["cluster", ""]["fix"]
    assert "1 of 1 checks failed: cluster" in said


@pytest.mark.slow
def test_on_ray(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster(here) as cluster:
        code, checks, _ = asked(capsys, "--on", f"ray://{cluster.place}", "--set", "data.train=/none")
        assert code == 2
        nodes = [node.address for node in cluster.nodes]
        assert {key for key, one in checks.items() if one["fine"] is False} == {("data.train", one) for one in nodes}
        assert checks["nodes", ""]["found"] == "2 alive"
        for node in nodes:
            assert checks["python", node]["fine"] is True
            assert checks["disk: workdir", node]["fine"] is not False
            assert checks["clock", node]["fine"] is True
        assert checks["all-reduce", ""]["found"].startswith("2 ranks by gloo")
        code, checks, _ = asked(capsys, "--on", f"ray://{cluster.place}", "--set", "workers=9")
        assert code == 0
        assert checks["room", ""]["found"].endswith(" are free, and 9 CPUs are wanted")
        assert checks["probe", ""]["found"] == "not sent: there is no room for it"
        monkeypatch.setattr(run, "BOUND_S", 15.0)
        wide = ["--set", "workers=1", "--set", f"resources.cpu={CPUS + 1}"]
        code, checks, _ = asked(capsys, "--on", f"ray://{cluster.place}", *wide)
        assert code == 0
        assert checks["room", ""]["found"].startswith("the probe had no place: ")
    nothing_is_left(here)

"""Jobs on Ray: a real cluster of two nodes, of which one is killed; nothing left behind."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from stoker.core.processes import find_processes_by_env
from stoker.errors import AccessDeniedError, InputError, SpecError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import Run, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Command, Slot
from stoker.launchers.diagnosis import LOST_EXIT_CODE
from stoker.launchers.ray import client
from stoker.launchers.ray import launcher as ray_launcher
from stoker.launchers.ray.client import DriverLog, RayClient
from stoker.launchers.ray.cluster import parse_free, parse_total, resolve_address
from stoker.launchers.ray.launcher import RayLauncher
from stoker.launchers.ray.plan import RayPlan
from stoker.trainers.checkpoints import decode_checkpoint
from tests.launchers.contract import DEAF, LauncherSuite, is_ready, job_of, launched
from tests.launchers.test_local import HEARTBEAT
from tests.support.ray import CPUS, RayTestCluster, processes_matching, ray_cluster
from tests.support.trees import stoker
from tests.support.waiting import eventually, is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], os.path.basename(__file__)
print("sum", total.item(), "of", dist.get_world_size(), *names)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayTestCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as found:
        yield found


def there(run: Run, slot: str = "worker/0") -> list[int]:
    """What runs of a slot, on any node."""
    return find_processes_by_env({"STOKER_RUN": run.id, "STOKER_SLOT": slot})


class TestRay(LauncherSuite):
    ON = "ray"

    @pytest.fixture
    def launcher(self, cluster: RayTestCluster) -> Any:
        self.cluster = cluster
        return RayLauncher(cluster.place)

    @pytest.mark.slow  # each takes seconds to reach the cluster
    def test_a_failure_names_slot_cause_and_log(self, launcher: Any) -> None:
        super().test_a_failure_names_slot_cause_and_log(launcher)

    @pytest.mark.slow
    def test_the_environment_of_the_contract(self, launcher: Any) -> None:
        super().test_the_environment_of_the_contract(launcher)

    @pytest.mark.slow
    def test_a_killed_gang_is_tried_again(self, launcher: Any, tmp_path: Path) -> None:
        super().test_a_killed_gang_is_tried_again(launcher, tmp_path)

    @pytest.mark.slow
    def test_bad_input_is_not_tried_again(self, launcher: Any) -> None:
        super().test_bad_input_is_not_tried_again(launcher)

    @pytest.mark.slow
    def test_logs_are_followed_to_the_end(self, launcher: Any) -> None:
        super().test_logs_are_followed_to_the_end(launcher)

    def test_two_nodes_reduce_together(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.run_to_end(launcher, job_of(**keys, ray={"strategy": "strict_spread"}), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        places = json.loads((run.folder / "places.json").read_text())
        assert sorted(places.values()) == sorted(node.address for node in self.cluster.nodes)
        interfaces = {node.address: node.host.interface for node in self.cluster.nodes}
        for name, address in places.items():
            wanted = f"sum 3.0 of 2 {places['worker/0']} {interfaces[address]} reduce.py"
            assert wanted in self.text(launcher, run, Slot.parse(name))
            assert there(run, name) == []

    def test_no_room_is_told_until_it_is_stopped(self, launcher: Any) -> None:
        run = self.start(launcher, job_of("true", resources={"cpu": CPUS + 1}))
        wait_until(lambda: "no node is large enough for one worker" in launcher.status(run.handle).message, 60)
        status = launcher.status(run.handle)
        assert status.message.startswith("waiting for Ray to place 1 × (3 CPU): ")
        assert f"3 CPU wanted, {2 * CPUS} CPU free of {2 * CPUS} CPU" in status.message
        assert [status.state, *(one.state for one in status.slots)] == [JobState.PENDING] * 2
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED

    @pytest.mark.slow
    def test_a_hang_is_ended_with_the_stacks_of_every_rank(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "hang.py").write_text(HEARTBEAT)
        run, status = self.run_to_end(launcher, job_of(program={"script": "hang.py"}, hang_after=2))
        assert "hung at step 2 in train-00001.tar: no heartbeat for 2s" in status.message
        assert "in stuck" in (run.folder / "stacks.0.txt").read_text()

    @pytest.mark.slow
    def test_a_program_that_is_not_there(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, job_of(program={"command": ["./no-such-program"]}, retries=2))
        assert status.message.startswith("worker/0 refused to start: cannot start './no-such-program': No such file")

    @pytest.mark.slow
    def test_files_and_secrets_get_there(self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("keep.txt", "skip.bin", "deep/a.txt", ".git/config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "run.sh").write_text("#!/bin/sh\necho ${#TOKEN}; printf '\\377\\r\\n'; find . -type f | sort\n")
        (tmp_path / "run.sh").chmod(0o755)
        (tmp_path / ".stokerignore").write_text("*.bin\n")
        monkeypatch.setenv("TOKEN", "hush-hush-hush")
        job = job_of(program={"command": ["./run.sh"]}, secret_env={"TOKEN": {"secret": "s", "key": "k"}})
        run, status = self.run_to_end(launcher, job)
        assert status.state is JobState.SUCCEEDED, status.message
        sent = ["./.stoker/driver.py", "./.stoker/slot_daemon.py", "./.stoker/profiler.py", "./.stokerignore"]
        wanted = [*sent, "./deep/a.txt", "./keep.txt", "./run.sh"]
        said = run.log_path(Slot("worker", 0), 0).read_bytes()
        assert said.startswith(b"14\n\377\r\n")
        assert [line for line in said.decode(errors="replace").splitlines() if line.startswith("./")] == wanted
        nodes = self.cluster.nodes[0].host.folder
        places = [path for folder in (run.folder, nodes) for path in folder.rglob("*") if path.is_file()]
        assert not any(b"hush-hush-hush" in path.read_bytes() for path in places)
        (job_there,) = [name for name in self.cluster.jobs() if run.id in name]
        wait_until(lambda: not any(self.cluster.has_key(f"{job_there}{kind}") for kind in ("", "-request")), 10)

    @pytest.mark.slow
    def test_all_takes_what_is_free(self, launcher: Any) -> None:
        def count(**resources: Any) -> Any:
            return launcher.resolve_paths(job_of("true", workers="all", resources=resources)).workers

        def is_free() -> bool:
            """What earlier jobs had is free again a moment after their end."""
            try:
                return (count(cpu=2), count(gpu=1), count(gpu=2)) == (len(self.cluster.nodes), 2, 1)
            except InputError:
                return False

        wait_until(is_free, 30)
        with pytest.raises(
            InputError, match=r"workers: all: no node there has 1 CPU, 3 GPU free for a worker; give a number"
        ):
            count(gpu=3)
        with pytest.raises(InputError, match="give a number to wait for it"):
            count(cpu=1, memory="100Ti")

    @pytest.mark.slow
    def test_a_worker_sees_its_own_gpus(self, launcher: Any) -> None:
        resources = {"gpu": 1, "gpu_type": "TEST", "memory": "100Mi"}
        run, status = self.run_to_end(launcher, job_of("echo gpus $CUDA_VISIBLE_DEVICES", resources=resources))
        assert status.state is JobState.SUCCEEDED, status.message
        assert self.text(launcher, run)[0] in ("gpus 0", "gpus 1")
        assert json.loads((run.folder / "places.json").read_text()) == {"worker/0": self.cluster.nodes[1].address}

    def test_what_is_wrong_here_is_told_at_once(self, launcher: Any) -> None:
        keys = {"program": {"script": "no.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}}
        with pytest.raises(SpecError) as caught:
            launcher.render(job_of(**keys, checkpoint={"dir": "here"}, data={"train": "none"}))
        found = [fault.path for fault in caught.value.faults]
        assert found == ["workers", "data.train", "program.script", "checkpoint.dir"]
        with pytest.raises(SpecError, match="'mpi'.*ray"):
            launcher.render(job_of("true", topology="mpi"))


# --- Without a cluster to be found


def write_job(workspace: Path, command: str, **keys: Any) -> Path:
    job = {
        "name": "small",
        "topology": "single",
        "profile": {"every": 0},
        "retries": 0,
        "grace": "2s",
        "program": {"command": ["bash", "-c", command]},
        **keys,
    }
    path = workspace / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def test_a_cluster_is_started_for_the_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    find_session = "tr '\\0' '\\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/--session_dir=//p' > ../session"
    job = write_job(workspace, f"echo $PWD; echo $RAY_RAYLET_PID > ../raylet; {find_session}; exit 7")
    assert stoker("job", "run", job, "--on", "ray") == 4
    out, err = capsys.readouterr()
    assert out == f"{workspace}/work\n"
    assert "one is started on this machine for the run, and ended with it" in err
    run = find_run(None)
    assert run.handle == f"ray://{run.folder}"
    assert f"worker/0 ended with exit code 7; its log: {run.log_path(Slot('worker', 0), 0)}" in err
    assert not is_alive(int((workspace / "raylet").read_text()))
    session = Path((workspace / "session").read_text().strip())
    assert session.parent.name.startswith("stoker-ray-")
    assert not session.parent.exists()


def test_what_a_killed_cluster_of_a_run_s_own_left_is_removed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else; where that is short enough, it lies where Ray is told to write."""
    run = Run(workspace)
    client.remove_ray_folder(run)
    for where, parent in (("", "/tmp"), ("/dev/shm", "/dev/shm"), (f"/tmp{'/' * 90}", "/tmp"), ("/none", "/tmp")):
        monkeypatch.setenv("RAY_TMPDIR", where)
        folder = Path(client._make_folder(run))
        assert str(folder.parent) == parent
        assert len(str(folder)) + client.RAYS_OWN <= client.LONGEST
        (folder / "session_x").mkdir()
        client.remove_ray_folder(run)
        client.remove_ray_folder(run)
        assert not folder.exists()
        assert folder.parent.exists()


@pytest.mark.slow
def test_two_workers_of_a_cluster_of_the_run_s_own(workspace: Path) -> None:
    (workspace / "work" / "reduce.py").write_text(ALL_REDUCE)
    keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
    assert stoker("job", "run", write_job(workspace, "", **keys), "--on", "ray") == 0
    for index in range(2):
        assert "sum 3.0 of 2" in find_run(None).log_path(Slot("worker", index), 0).read_text()


# --- Places


def test_where_the_cluster_is() -> None:
    assert resolve_address("head", {}) == "http://head:8265"
    assert resolve_address("head:80", {"RAY_ADDRESS": "auto"}) == "http://head:80"
    assert resolve_address(None, {"RAY_ADDRESS": "https://a.example/ray/"}) == "https://a.example/ray"
    assert resolve_address(None, {"RAY_ADDRESS": "ray://head:10001"}) == "http://head:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "ray://head"}) == "http://head:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "10.0.0.1:6379"}) == "http://10.0.0.1:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "auto"}) == "http://127.0.0.1:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "local"}) is None
    with pytest.raises(InputError, match="is no address of a Ray cluster"):
        resolve_address("head:http", {})


@contextmanager
def answering(code: int, body: dict[str, str]) -> Iterator[str]:
    """Something that answers where a dashboard is looked for."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_cluster_that_is_not_there_is_one_sentence(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(workspace, "true")
    with answering(200, {}) as place:
        pass
    assert stoker("job", "run", job, "--on", f"ray://{place}") == 5
    err = capsys.readouterr().err
    assert err.startswith(f"stoker: http://{place}: no Ray cluster answers; its dashboard is wanted, at port 8265")
    assert err.count("\n") == 1
    with answering(404, {}) as place:
        assert stoker("job", "run", job, "--on", f"ray://{place}") == 5
        assert "what answers is no Ray dashboard" in capsys.readouterr().err
    with answering(401, {}) as place:
        assert stoker("job", "run", job, "--on", f"ray://{place}") == 5
        assert "the Ray cluster wants a token, and yours is missing or wrong" in capsys.readouterr().err
    assert stoker("job", "run", job, "--on", "local://here") == 2
    assert "`--on local` takes no address" in capsys.readouterr().err
    assert not Path(os.environ["STOKER_HOME"]).exists()


def test_another_version_there_is_told(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    with answering(200, {"ray_version": "2.9.3"}) as place:
        assert stoker("job", "plan", write_job(workspace, "true"), "--on", f"ray://{place}") == 0
    out, err = capsys.readouterr()
    assert " here and 2.9.3 there: " in err
    assert "pip install 'ray[default]==2.9.3'" in err
    assert "cd @ray:workdir@ && " in out


def test_a_plan_holds_words_for_what_ray_decides(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    (workspace / "work" / "train.py").touch()
    resources = {"cpu": 4, "gpu": 2, "memory": "8Gi", "gpu_type": "A100"}
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "workers": 100, "resources": resources}
    with answering(200, {"ray_version": "2.60.0"}) as place:
        assert stoker("job", "plan", write_job(workspace, "", **keys), "--on", f"ray://{place}", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bundle"] == {"CPU": 4.0, "GPU": 2, "memory": 8 * 2**30, "accelerator_type:A100": 0.001}
    words = " ".join(plan["slots"]["worker/99"]["argv"])
    assert "--node-rank 99 --nproc-per-node 2 --master-addr @ray:worker/0@ --master-port @ray:port@" in words
    assert words.endswith("@ray:workdir@/train.py")


def test_without_the_package_it_is_one_sentence(workspace: Path) -> None:
    program = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'ray' else find(name, *more)\n"
        "from stoker.cli.main import run\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", program, "job", "run", str(write_job(workspace, "true")), "--on", "ray://127.0.0.1:1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    wanted = "stoker: the launcher 'ray' needs the Python package 'ray[default]'; run: pip install 'stoker[ray]'\n"
    assert (done.returncode, done.stderr) == (3, wanted)


# --- What goes wrong meanwhile, with a launching machine that cannot see what runs on the nodes


def kill_all(*pids: int) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def parts(what: str, run: Run, cluster: RayTestCluster) -> list[int]:
    """The processes of one part of a run, and of no other."""
    match what:
        case "the supervisor":
            return processes_matching("stoker.launchers.supervisor", run.id)
        case "the carrier":
            return processes_matching("stoker.launchers.ray.client", run.id)
        case "the driver":
            return cluster.processes(".stoker/driver.py", f"gcs://stoker-{run.id}")
        case "the actor":
            return cluster.processes("ray::Seat")
        case _:
            return cluster.processes("stoker-slot-", "slot_daemon.py")


SAID = {
    "the carrier": "worker/0 was killed by SIGKILL; its log: ",
    "the driver": "worker/0 was lost: the driver on the Ray cluster ended early",
    "the actor": "worker/0 was lost: its Ray actor on ",
    "the keeper": "worker/0 was lost: the process that kept it there was killed; its log: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the supervisor", "the launching machine", *SAID])
def test_nothing_is_left_on_a_node(what: str, cluster: RayTestCluster, workspace: Path) -> None:
    with launched(write_job(workspace, DEAF, ray={"lost_after": "5s"}), f"ray://{cluster.place}") as (run, process):
        wait_until(lambda: is_ready(run) and len(there(run)) >= 3, 60)
        if what == "the launching machine":
            process.kill()
        else:
            kill_all(*parts(what, run, cluster))
        wait_until(lambda: not there(run), 30)
        if what in SAID:
            assert process.wait(60) == 4, (workspace / "said").read_text()
            assert SAID[what] in run.read_status().message
    wait_until(lambda: not parts("the keeper", run, cluster), 10)


@pytest.mark.slow
@pytest.mark.parametrize("lost_after", [20, 5])
def test_a_cable_that_is_pulled_for_eight_seconds(lost_after: int, cluster: RayTestCluster, workspace: Path) -> None:
    """Put back in time, not a line is missing; else it is told, and nothing goes on there."""
    script = f"echo ready; i=0; while ! test -e {workspace}/go; do echo $i; i=$((i+1)); sleep 0.1; done; echo over"
    # Where its driver is: to another node, the head's cable would be cut too.
    job = write_job(workspace, script, ray={"lost_after": lost_after}, resources={"gpu_type": "HEAD"})
    with launched(job, f"ray://{cluster.place}") as (run, process):
        wait_until(lambda: is_ready(run), 60)
        cluster.nodes[0].host.disconnect()
        try:
            time.sleep(8)
            assert lost_after > 5 or eventually(lambda: not there(run), 15)
        finally:
            cluster.nodes[0].host.reconnect()
        (workspace / "go").touch()
        assert process.wait(60) == (0 if lost_after > 5 else 4), (workspace / "said").read_text()
    if lost_after == 5:
        assert "worker/0 was lost: the Ray cluster at " in run.read_status().message
        return
    lines = run.log_path(Slot("worker", 0), 0).read_text().splitlines()
    assert lines[:-1] == ["ready", *map(str, range(len(lines) - 3)), "over"]


def _is_rank(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    is_ours = any(word.endswith(("train.py", "stoker.trainers.torch_image")) for word in words)
    return is_ours and "torch.distributed.run" not in words and not any("profiler" in word for word in words)


@pytest.mark.slow  # two trainings, one of which loses a rank and a node
def test_the_weights_are_those_of_this_machine(cluster: RayTestCluster, workspace: Path) -> None:
    source = "synthetic:samples=300,classes=5,size=40x32,val=20"
    assert stoker("data", "convert", source, workspace / "shards", "--shard-samples", "50") == 0
    words = "--model small --size 32 --global-batch-size 24 --epochs 3 --deterministic --seed 3 --threads 1"
    keys = {
        "program": {"module": "stoker.trainers.torch_image", "args": [*words.split(), "--checkpoint-every-steps", "2"]},
        "topology": "torchrun",
        "workers": 2,
        "data": {"train": str(workspace / "shards/train"), "val": str(workspace / "shards/val")},
        "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        "retries": 3,
        "ray": {"strategy": "spread"},
    }
    job = write_job(workspace, "", **keys)
    for on in ("local", f"ray://{cluster.place}"):
        folder = workspace / on.partition(":")[0]
        assert stoker("job", "run", job, "--on", on, "--set", f"checkpoint.dir={folder}", "--detach") == 0
        run = find_run(None)
        if on != "local":
            wait_until(lambda folder=folder: any(folder.glob("step-*")), 90)
            kill_all(*[pid for pid in there(run, "worker/1") if _is_rank(pid)])
            wait_until(lambda run=run: is_training(run, 1), 90)
            cluster.nodes[1].down()
            wait_until(lambda run=run: len(run.read_status().attempts) == 2, 90)
            cluster.nodes[1].up()
        wait_until(lambda run=run: run.read_status().state.is_final, 150)
        assert run.read_status().state is JobState.SUCCEEDED, run.read_status().message
    first, second, _ = run.read_status().attempts
    assert "worker/1 (rank 1) was killed by SIGKILL" in first.cause
    assert f"was lost: its Ray node {cluster.nodes[1].address} is gone" in second.cause
    calm, storm = (weights(workspace / on) for on in ("local", "ray"))
    assert calm.keys() == storm.keys()
    assert [name for name in calm if not calm[name].equal(storm[name])] == []


def is_training(run: Run, attempt: int) -> bool:
    log = run.log_path(Slot("worker", 1), attempt)
    return log.exists() and '"heartbeat"' in log.read_text()


def weights(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("step-*.pt"))
    found: dict[str, Any] = decode_checkpoint(newest.read_bytes(), where=str(newest))["model"]
    return found


def test_a_log_that_breaks_off_is_read_on_without_loss_or_repetition() -> None:
    text = "".join(f"line {number}\n" for number in range(50))

    class Breaking:
        """A cluster whose connections break, each a little later than the one before, and anywhere in a line."""

        reads = 0

        def state(self, name: str) -> tuple[bool, str]:
            return self.reads >= 4, "all said\nthe last word"

        async def tail(self, name: str) -> AsyncIterator[str]:
            self.reads += 1
            for at in range(0, len(text) if self.reads > 4 else 90 * self.reads, 7):
                yield text[at : at + 7]
            if self.reads <= 4:
                raise RuntimeError("cut")

    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    log = DriverLog(Breaking(), "job", 5)  # type: ignore[arg-type]
    asyncio.run(log.follow(found))
    lines = [found.get() for _ in range(found.qsize())]
    assert lines == [*text.splitlines(), None]
    assert log.why == "the driver on the Ray cluster ended early: the last word"


def test_a_connection_that_says_nothing_more_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_S", 0.01)

    class Silent:
        reads = 0

        def state(self, name: str) -> tuple[bool, str]:
            return self.reads > 0, ""

        async def tail(self, name: str) -> AsyncIterator[str]:
            self.reads += 1
            yield "one\n"
            if self.reads == 1:
                await asyncio.sleep(60)
            yield "two\n"

    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    asyncio.run(DriverLog(Silent(), "job", 0.1).follow(found))  # type: ignore[arg-type]
    assert [found.get() for _ in range(found.qsize())] == ["one", "two", None]


def test_the_log_of_a_driver_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_S", 0.01)

    class Gone:
        def state(self, name: str) -> tuple[bool, str]:
            return True, "its node died"

        async def tail(self, name: str) -> AsyncIterator[str]:
            raise RuntimeError("no such node")
            yield ""

    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    log = DriverLog(Gone(), "job", 5)  # type: ignore[arg-type]
    asyncio.run(log.follow(found))
    assert (found.get_nowait(), log.why) == (None, "the driver on the Ray cluster ended early: its node died")


# --- The line to a driver, by a cluster that only notes what is done to it


class Noted:
    """A cluster whose uploads take long, and what was done there in turn."""

    done: ClassVar[list[str]] = []
    log: ClassVar[list[str]] = []
    fails = False
    submit_s = 0.0

    def __init__(self, address: str) -> None:
        self.address = address
        self.done.clear()

    def submit(self, *words: object) -> None:
        time.sleep(self.submit_s)
        self.done.append("submit")
        if self.fails:
            raise UnavailableError("did not take the job", where=self.address)

    def put(self, key: str, value: dict[str, Any]) -> None:
        kind = "request" if key.endswith("-request") else "bye" if "bye" in value else "beat"
        self.done.append(kind)

    def state(self, name: str) -> tuple[bool, str]:
        return False, ""

    async def tail(self, name: str) -> AsyncIterator[str]:
        for line in self.log:
            yield line
        await asyncio.sleep(60)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    monkeypatch.setattr(client, "Cluster", Noted)
    monkeypatch.setattr(Noted, "log", [])
    return Noted


def carrier_of(workspace: Path) -> RayClient:
    """What would carry one worker on a cluster far away; `RayPlan` as a plan would have it."""
    for name in ("run", "run/logs"):
        (workspace / name).mkdir()
    command = Command(("true",), {})
    plan = RayPlan(
        slots={"worker/0": command},
        hosts={"worker/0": "http://far"},
        address="http://far",
        bundle={"CPU": 1.0},
        strategy="PACK",
        source=str(workspace),
        grace_s=1,
        lost_after_s=0.5,
    )
    return RayClient(Run(workspace / "run"), plan, 0)


@pytest.fixture
def signals() -> Iterator[None]:
    """A carrier takes them for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def said_of_worker(workspace: Path) -> str:
    return Run(workspace / "run").log_path(Slot("worker", 0), 0).read_text()


@pytest.mark.usefixtures("signals")
def test_an_upload_may_take_longer_than_silence(
    workspace: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noted, "submit_s", 1.0)
    frames = [{"alive": True}, {"slot": "worker/0", "code": 0}, {"end": True}]
    noted.log += [f"{client.FRAME_PREFIX}{json.dumps({'n': n, **frame})}\n" for n, frame in enumerate(frames, 1)]
    assert carrier_of(workspace).run() == 0
    # Nothing is in the store before the driver has told that it is there, and nothing after it was parted from.
    assert (noted.done[0], noted.done[-1]) == ("submit", "bye")
    count = len(noted.done)
    time.sleep(0.3)
    assert len(noted.done) == count
    assert (workspace / "run" / "submissions").read_text() == ""


@pytest.mark.usefixtures("signals")
def test_a_job_that_is_not_taken_leaves_no_secret(
    workspace: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noted, "fails", True)
    assert carrier_of(workspace).run() == 255
    assert noted.done == ["submit"]
    assert "stoker: http://far: did not take the job\n" in said_of_worker(workspace)


@pytest.mark.usefixtures("signals")
def test_a_driver_gets_its_request_once_it_is_there(
    workspace: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LAST_S", 0.2)
    noted.log.append(f'{client.FRAME_PREFIX}{{"n": 1, "alive": true}}\n')
    carried = threading.Thread(target=(one := carrier_of(workspace)).run)
    carried.start()
    wait_until(lambda: noted.done.count("beat") >= 2, 10)
    assert noted.done[:3] == ["submit", "request", "beat"]
    assert noted.done.count("request") == 1
    one._ends = 2
    carried.join(20)
    assert "its Ray driver did not tell the end in time" in said_of_worker(workspace)


@pytest.mark.usefixtures("signals")
def test_the_end_before_the_upload_is_the_end(workspace: Path, noted: type[Noted]) -> None:
    one = carrier_of(workspace)
    os.kill(os.getpid(), signal.SIGTERM)
    assert one.run() == -signal.SIGTERM
    assert noted.done == []


@pytest.mark.usefixtures("signals")
def test_what_goes_wrong_with_the_carrier_is_its_own_fault(
    workspace: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(noted, "submit", None)
    assert carrier_of(workspace).run() == 255
    assert "stoker: what carries its output failed: TypeError: " in said_of_worker(workspace)
    assert "Traceback" in capsys.readouterr().err


def test_a_token_that_is_no_longer_good_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray.exceptions")

    def refuse(*words: object, **keys: object) -> None:
        raise exceptions.AuthenticationError("no")

    with answering(200, {"ray_version": "2.60.0"}) as place:
        cluster = RayTestCluster(f"http://{place}")
        monkeypatch.setattr(cluster._client, "_do_request", refuse)
        for ask in (lambda: cluster.put("key", {}), cluster.nodes, lambda: cluster.state("job")):
            with pytest.raises(AccessDeniedError, match="wants a token, and yours is missing or wrong"):
                ask()


# --- A keeper, on this machine


@contextmanager
def kept(folder: Path, **request: Any) -> Iterator[subprocess.Popen[str]]:
    """A keeper that was asked for something, as an actor asks it."""
    folder.mkdir()
    source = Path(client.__file__).with_name("slot_daemon.py")
    (folder / "slot_daemon.py").write_bytes(source.read_bytes())
    argv = [sys.executable, str(folder / "slot_daemon.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"marks": marks_of(folder), "env": {}, "cwd": str(folder), **request}) + "\n")
        process.stdin.flush()
        yield process
        process.stdin.close()
        assert process.wait(10) == 0
    assert not folder.exists()


def marks_of(folder: Path) -> dict[str, str]:
    return {"STOKER_RUN": str(folder), "STOKER_SLOT": "worker/0"}


def answer_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@contextmanager
def left(folder: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """What an earlier keeper left."""
    with subprocess.Popen(["bash", "-c", script], env={**os.environ, **marks_of(folder)}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_is_left_of_another_attempt_has_its_grace(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with left(tmp_path / "a", f"sleep 1.5; touch {saved}"):
        started = ["bash", "-c", f"test -e {saved} && exit 7"]
        with kept(tmp_path / "a", argv=started, grace_s=20) as process:
            assert answer_of(process) == {"code": 7}


def test_what_a_killed_keeper_left_is_ended(tmp_path: Path) -> None:
    with (
        left(tmp_path / "a", "trap '' TERM; while :; do sleep 0.1; done") as deaf,
        kept(tmp_path / "a", grace_s=1) as process,
    ):
        assert answer_of(process) == {"lost": ""}
        assert deaf.wait(5) == -signal.SIGKILL


def test_a_folder_that_is_not_there_is_told_from_a_program(tmp_path: Path) -> None:
    with kept(tmp_path / "a", argv=["/bin/true"], grace_s=1, cwd="/no/folder") as process:
        assert answer_of(process) == {"fault": "cannot work in the folder /no/folder: No such file or directory"}
    with kept(tmp_path / "b", argv=["/no/program"], grace_s=1) as process:
        assert answer_of(process) == {"fault": "cannot start '/no/program': No such file or directory"}


# --- The driver, without a cluster


def test_a_slot_that_could_not_be_started_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    from stoker.launchers.ray import driver

    def refuse(ref: object) -> None:
        raise exceptions.RayError("no space left")

    monkeypatch.setattr(driver.ray, "get", refuse)
    monkeypatch.setattr(driver, "NODE_S", 0)
    command = {"argv": ["true"], "env": {}, "cwd": None}
    request = {"slots": {"worker/0": command}, "bundle": {}, "strategy": "PACK", "marks": {}, "grace_s": 1}
    one = driver.Driver(request, SimpleNamespace(ends=0), driver.FrameWriter(), may_grow=True)  # type: ignore[arg-type]
    place = dict.fromkeys(("address", "python", "workdir", "home", "interface", "port"), "there")
    one._places["worker/0"] = place
    one._seats["worker/0"] = SimpleNamespace(start=SimpleNamespace(remote=lambda _: None))
    one._start()
    one._carry()  # and it is not waited for
    told = [json.loads(line.removeprefix(driver.FRAME)) for line in capfd.readouterr().out.splitlines()]
    assert told[-1]["code"] == 255
    assert told[-1]["fault"] == "its Ray actor on there failed: no space left"
    with pytest.raises(RuntimeError, match="was not started"):
        driver.SlotActor("").read(0)


def test_why_there_is_no_room() -> None:
    pytest.importorskip("ray")
    from stoker.launchers.ray.driver import placement_obstacle

    two = [{"CPU": 2.0}, {"CPU": 2.0}]
    assert placement_obstacle({"CPU": 3}, 1, "PACK", two, {}) == ("no node is large enough for one worker", True)
    assert placement_obstacle({"CPU": 2}, 3, "PACK", two, {}) == ("the cluster is too small as it is", True)
    assert placement_obstacle({"CPU": 2}, 2, "PACK", two, {"CPU": 2}) == ("others use them", False)
    why, too_small = placement_obstacle({"CPU": 2}, 1, "PACK", two, {"CPU": 2})
    assert (why, too_small) == ("what is free lies on nodes where it does not fit, with pack", False)
    assert "strict_spread wants 3 nodes, and 2 are" in placement_obstacle({"CPU": 1}, 3, "STRICT_SPREAD", two, {"CPU": 4})[0]
    assert "strict_pack wants one node" in placement_obstacle({"CPU": 1}, 3, "STRICT_PACK", two, {"CPU": 4})[0]


def test_words_that_stand_in_several_files_agree() -> None:
    def constants(name: str) -> dict[str, Any]:
        found = {}
        for node in ast.parse(Path(client.__file__).with_name(name).read_text()).body:
            if isinstance(node, ast.Assign):
                names = [one.id for one in ast.walk(node.targets[0]) if isinstance(one, ast.Name)]
                values = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
                found |= dict(zip(names, values, strict=False))
        return found

    driver, keeper = constants("driver.py"), constants("slot_daemon.py")
    assert driver["FRAME"] == client.FRAME_PREFIX
    for word in ("PYTHON", "WORKDIR", "PORT", "INTERFACE"):
        assert driver[word] == getattr(ray_launcher, word)
    assert f'f"{driver["HOME"]}/' in Path(client.__file__).read_text()
    assert f'"{keeper["OUTPUT"]}"' in Path(client.__file__).with_name("driver.py").read_text()
    assert driver["LOST"] == LOST_EXIT_CODE


# --- What is free, and what is sent


def test_room_is_counted_node_by_node() -> None:
    text = "1.0/4.0 CPU (0.5 used of 2.0 reserved in placement groups)\n0.0/2.0 GPU\n1.00GiB/8.00GiB memory"
    assert parse_free(text) == {"CPU": 1.5, "GPU": 2.0, "memory": 7 * 2**30}
    assert parse_total(text) == {"CPU": 4.0, "GPU": 2.0, "memory": 8 * 2**30}
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0, "GPU": 8.0}]
    assert ray_launcher.count_fitting(nodes, {"CPU": 2}, "pack") == 2
    assert ray_launcher.count_fitting(nodes, {"CPU": 1, "GPU": 1}, "pack") == 3
    assert ray_launcher.count_fitting(nodes, {"CPU": 1}, "strict_spread") == 3
    assert ray_launcher.count_fitting(nodes, {"CPU": 1}, "strict_pack") == 3


def test_a_cluster_that_does_not_tell_what_is_free(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    with answering(200, {"ray_version": "2.60.0"}) as place:
        (workspace / "work" / "train.py").touch()
        job = write_job(workspace, "", workers="all", topology="torchrun", program={"script": "train.py"})
        assert stoker("job", "plan", job, "--on", f"ray://{place}") == 2
    assert "workers: all: the cluster does not tell what is free; give a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workers", "resources", "room"),
    [
        (3, {"cpu": 2}, None),
        (4, {"cpu": 2}, "2 nodes with CPU 7 in all have room for 3 of 4 workers"),
        (1, {"cpu": 5}, "2 nodes with CPU 7 in all have room for 0 of 1 worker"),
        (2, {"cpu": 1, "gpu": 1}, "2 nodes with CPU 7, GPU 1 in all have room for 1 of 2 workers"),
    ],
)
def test_a_cluster_that_is_too_small_as_it_is(
    workers: int, resources: dict[str, int], room: str | None, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told, and no fault: others may use what is there now, and the cluster may grow."""
    pytest.importorskip("ray")
    usage = {"a": "4.0/4.0 CPU\n0.0/1.0 GPU\n", "b": "0.0/3.0 CPU\n"}
    (workspace / "work" / "train.py").touch()
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "processes_per_worker": 1}
    job = write_job(workspace, "", workers=workers, resources=resources, **keys)
    with answering(200, {"ray_version": "2.60.0", "data": {"nodeLogicalResources": usage}}) as place:
        assert stoker("job", "plan", job, "--on", f"ray://{place}") == 0
    said = capsys.readouterr().err
    if room is None:
        assert "too small" not in said
    else:
        assert f"the cluster is too small as it is: {room}; the job would wait until it grows" in said


@pytest.mark.parametrize("place", [None, "far:8265"])
def test_a_folder_to_run_in_that_is_not_there(place: str | None, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    job = job_of(program={"command": ["true"], "cwd": "none"})
    with pytest.raises(SpecError, match=f"program.cwd: there is no folder {workspace}/work/none"):
        RayLauncher(place).render(job)


def test_what_this_machine_has_not(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    secret = {"/no/secret": {"secret": "s"}}
    job = job_of("true", resources={"gpu": 1, "memory": "1000Ti"}, secret_files=secret)
    with pytest.raises(SpecError) as caught:
        RayLauncher().render(job)
    assert [fault.path for fault in caught.value.faults] == [
        "resources.gpu",
        "resources.memory",
        "secret_files./no/secret",
    ]


def packed(workspace: Path) -> list[str]:
    plan = RayPlan(slots={}, address="http://far", bundle={}, strategy="PACK", source=str(workspace / "work"))
    ray_launcher.pack_working_dir(plan, workspace / "working.zip")
    with zipfile.ZipFile(workspace / "working.zip") as archive:
        return [name for name in archive.namelist() if not name.startswith(".stoker/")]


def test_links_are_followed_and_too_much_is_not_packed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, far = workspace / "work", workspace / "far" / "deep"
    far.mkdir(parents=True)
    (far / "a.txt").write_text("a")
    (work / "link").symlink_to(far.parent)
    (work / "file").symlink_to(far / "a.txt")
    (work / "nowhere").symlink_to(workspace / "none")
    assert packed(workspace) == ["file", "link/deep/a.txt"]
    (work / "big").write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(ray_launcher, "LARGEST", 1 << 19)
    with pytest.raises(InputError, match=r"more than the 512 KiB that Ray takes"):
        packed(workspace)
    assert not (workspace / "working.zip").exists()
    (far / "up").symlink_to(work)
    (work / "big").unlink()
    with pytest.raises(InputError, match="leads back to a folder that it is in"):
        packed(workspace)


# --- The commands


@pytest.mark.slow
def test_the_commands_work_from_another_shell(
    cluster: RayTestCluster, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    assert stoker("job", "run", write_job(workspace, script), "--on", f"ray://{cluster.place}", "--detach") == 0
    run = find_run("small")
    wait_until(lambda: is_ready(run) and run.read_status().state is JobState.RUNNING, 60)
    capsys.readouterr()
    assert stoker("job", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert stoker("job", "stop") == 0
    capsys.readouterr()
    assert stoker("job", "logs") == 0
    assert capsys.readouterr().out == "ready\nsaved\n"
    assert there(run) == []
    assert stoker("job", "run", "--resume", run.id, "--detach") == 0
    wait_until(lambda: is_ready(run, 1), 60)
    wait_until(lambda: LAUNCHERS.get("ray")().status(run.handle).state is JobState.RUNNING, 5)
    assert stoker("job", "stop") == 0

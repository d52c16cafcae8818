"""The local launcher with real processes and signals: nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.api import Job
from stoker.core.processes import find_processes_by_env
from stoker.errors import SpecError
from stoker.jobs.retry_policy import NO_PROGRESS_AT_ALL, not_retried
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.supervisor import supervisor_pid
from tests.launchers.contract import LauncherSuite, is_ready, job_of
from tests.support.disks import NOT_ALLOWED
from tests.support.signals import restore_signals
from tests.support.trees import stoker
from tests.support.waiting import wait_until

HANGING = """
import time
from stoker.telemetry import recorder
record = recorder()
for step in range(3):
    record.heartbeat(step, shard="train-00001.tar", sample=step)
    time.sleep(0.05)
def stuck():
    while True:
        time.sleep(0.1)
stuck()
"""
SLEEPING_RANK = """\
import time, torch, torch.distributed as dist
from stoker.telemetry import recorder
record = recorder()
dist.init_process_group("gloo")
def oversleep(step):
    # rank 0 sends its heartbeat earlier, so that it is the first to be late
    if dist.get_rank() == 1 and step == 2:
        time.sleep(1000)
for step in range(3):
    time.sleep(0.2 * dist.get_rank())
    record.heartbeat(step)
    oversleep(step)
    dist.all_reduce(torch.zeros(1))
"""
FAILING_RANK = """
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank())
if dist.get_rank() == 1:
    raise LookupError("no such thing")
dist.barrier()
"""
SCALAR = """
import time
from stoker.telemetry import recorder
recorder().scalar("loss", 1.0, 1)
"""
UNEVEN = """
import os, time
from stoker.telemetry import recorder
record = recorder()
for step in range(70 if os.environ["RANK"] == "0" else 1):
    record.heartbeat(step)
    time.sleep(0.1)
"""
SLOW_SECOND_ATTEMPT = """
import os, time
from stoker.telemetry import recorder
record = recorder()
if os.environ["STOKER_ATTEMPT"] == "0":
    record.heartbeat(5)
    print("beating")
    time.sleep(60)
time.sleep(3)
"""
ELASTIC = """
import os, pathlib, time, torch, torch.distributed as dist
folder = pathlib.Path("{folder}")
dist.init_process_group("gloo")
(folder / f"joined-{{dist.get_world_size()}}-{{os.getpid()}}").touch()
is_done = torch.zeros(1)
while not is_done.item():
    is_done.fill_((folder / "done").exists())
    dist.all_reduce(is_done)
    time.sleep(0.05)
"""


def processes_of(run: RunFolder) -> list[int]:
    """The live processes of a run."""
    return find_processes_by_env({"STOKER_RUN": run.id})


class TestLocal(LauncherSuite):
    ON = "local"

    def test_stop_leaves_no_process(self, launcher: Any) -> None:
        # In their own sessions, ignoring SIGTERM, or orphaned: what a kill of the process group would miss.
        stubborn = "trap '' TERM; setsid bash -c 'trap \"\" TERM; sleep 1000 & sleep 1000' & (sleep 1000 &)"
        run = self.start(launcher, job_of(f"{stubborn}; echo ready; wait", grace=1))
        wait_until(lambda: "ready" in self.text(launcher, run) and len(processes_of(run)) >= 4)
        launcher.stop(run.handle)
        assert processes_of(run) == []
        assert supervisor_pid(run) is None

    def test_leftovers_of_a_failed_slot_are_stopped(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, job_of("setsid sleep 1000 & sleep 0.2; exit 1"))
        assert status.state is JobState.FAILED
        assert processes_of(run) == []

    def test_killed_supervisor_leaves_a_lost_run_that_can_be_restarted(self, launcher: Any, tmp_path: Path) -> None:
        script = f"trap 'exit 0' TERM; echo x >> {tmp_path}/tries; while :; do sleep 0.05; done"
        run = self.start(launcher, job_of(script))
        wait_until(lambda: (tmp_path / "tries").exists())
        pid = supervisor_pid(run)
        assert pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: launcher.status(run.handle).state is JobState.LOST)
        assert f"stoker job run --resume {run.id}" in launcher.status(run.handle).message
        wait_until(lambda: not processes_of(run))  # slots do not keep running without a supervisor
        launcher.restart(run)
        wait_until(lambda: (tmp_path / "tries").read_text() == "x\nx\n")
        assert launcher.status(run.handle).state is JobState.RUNNING
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert [attempt.cause for attempt in launcher.status(run.handle).attempts] == [
            "lost with its supervisor",
            "stopped",
        ]

    def test_hang_is_stopped_with_the_stacks_of_every_rank(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "hang.py").write_text(HANGING)
        keys = {"program": {"script": "hang.py"}, "hang_after": 4, "topology": "torchrun", "processes_per_worker": 2}
        run, status = self.run_to_end(launcher, job_of(**keys))
        assert status.state is JobState.FAILED
        assert re.search(r"\bhung at step 2 in train-00001\.tar: .*\b4s\b", status.message)
        assert (run.folder / "stacks.0.txt").read_text().count("in stuck") == 2
        assert str(run.log_path(Slot("worker", 0), 0)) in status.message

    def test_hang_names_the_rank_that_the_others_wait_for(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "sleep.py").write_text(SLEEPING_RANK)
        keys = {"program": {"script": "sleep.py"}, "hang_after": 3, "topology": "torchrun", "processes_per_worker": 2}
        run, status = self.run_to_end(launcher, job_of(**keys))
        assert status.message.startswith("worker/0 (rank 1) hung at step 2: ")
        assert all(text in status.message for text in ("sleep.py:8 in oversleep", "rank 0 ", "all_reduce"))
        assert status.message.endswith(f"log: {run.log_path(Slot('worker', 0), 0)}")

    def test_out_of_memory_kill_is_diagnosed(self, launcher: Any) -> None:
        with memory_limit(64 << 20) as enter:
            script = f"echo $$ > {enter}; exec {sys.executable} -c 'x = bytearray(1 << 30)'"
            _, status = self.run_to_end(launcher, job_of(script))
        assert status.message.startswith("worker/0 was killed by SIGKILL ")
        assert "out of memory" in status.message

    def test_failure_of_one_of_two_torchrun_workers(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "ddp.py").write_text(FAILING_RANK)
        keys = {"program": {"script": "ddp.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.run_to_end(launcher, job_of(**keys))
        assert status.state is JobState.FAILED
        log = run.log_path(Slot("worker", 1), 0)
        assert status.message == f"worker/1 (rank 1) failed: LookupError: no such thing; log: {log}"
        assert "rank 0" in self.text(launcher, run, Slot("worker", 0))
        assert "rank 1" in self.text(launcher, run, Slot("worker", 1))

    @pytest.mark.slow  # a new rendezvous takes half a minute
    def test_elastic_job_restarts_a_lost_worker(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "elastic.py").write_text(ELASTIC.format(folder=tmp_path))
        keys = {"program": {"script": "elastic.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}}
        run = self.start(launcher, job_of(**keys, retries=3))
        wait_until(lambda: len(list(tmp_path.glob("joined-2-*"))) == 2)
        (lost,) = (slot.pid for slot in launcher.status(run.handle).slots if slot.slot == "worker/1")
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: len(list(tmp_path.glob("joined-2-*"))) >= 4)  # all ranks joined again
        (tmp_path / "done").touch()
        wait_until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1)
        assert processes_of(run) == []

    def test_program_started_by_a_shell_has_its_grace_period(self, launcher: Any, tmp_path: Path) -> None:
        script = f"trap 'sleep 1; touch {tmp_path}/saved; exit' TERM; echo ready; while :; do sleep 0.05; done"
        (tmp_path / "child.sh").write_text(script)
        run = self.start(launcher, job_of(f"bash {tmp_path}/child.sh; echo after", grace=10))
        wait_until(lambda: "ready" in self.text(launcher, run))
        launcher.stop(run.handle)
        assert (tmp_path / "saved").exists()
        assert processes_of(run) == []

    def test_process_without_its_environment_is_stopped_too(self, launcher: Any, tmp_path: Path) -> None:
        script = f"env -i setsid bash -c 'echo $$ > {tmp_path}/pid; exec sleep 1000' & sleep 0.5; exit 1"
        self.run_to_end(launcher, job_of(script))
        assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()

    @pytest.mark.parametrize("code", [170, 255])
    def test_large_exit_codes_are_reported(self, launcher: Any, code: int) -> None:
        _, status = self.run_to_end(launcher, job_of(f"exit {code}"))
        assert status.state is JobState.FAILED
        assert "worker/0 " in status.message

    def test_bad_telemetry_does_not_stop_a_training(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        line = '@stoker {"v":1,"t":1,"slot":"","rank":0,"attempt":0,"seq":0,"k":"heartbeat","step":null,"pid":"x"}'
        (tmp_path / "bad_events.py").write_text(f"{SCALAR}\nprint({line!r}, flush=True)\ntime.sleep(0.3)\n")
        job = job_of(program={"script": "bad_events.py"}, tensorboard=str(tmp_path / "file/boards"))
        _, status = self.run_to_end(launcher, job)
        assert (status.state, status.message) == (JobState.SUCCEEDED, "")

    def test_finished_rank_is_not_a_hang(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "uneven.py").write_text(UNEVEN)
        keys = {"program": {"script": "uneven.py"}, "topology": "torchrun", "processes_per_worker": 2, "hang_after": 5}
        _, status = self.run_to_end(launcher, job_of(**keys))
        assert status.state is JobState.SUCCEEDED, status.message

    def test_program_without_heartbeats_is_retried_from_its_checkpoint(self, launcher: Any) -> None:
        count = "f=$STOKER_CHECKPOINT_DIR/n; mkdir -p ${f%/n}; n=$(cat $f 2>/dev/null || echo 0); echo $((n + 1)) > $f"
        _, status = self.run_to_end(launcher, job_of(f"{count}; test $n = 1", retries=3))
        assert status.state is JobState.SUCCEEDED
        assert [attempt.code for attempt in status.attempts] == [1, 0]

    def test_failure_without_progress_is_not_retried_and_says_why(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "beat.py").write_text("from stoker.telemetry import recorder\nrecorder().heartbeat(0)\nexit(1)\n")
        _, status = self.run_to_end(launcher, job_of(program={"script": "beat.py"}, retries=3))
        assert (status.state, len(status.attempts)) == (JobState.FAILED, 1)
        assert not_retried(NO_PROGRESS_AT_ALL) in status.message

    def test_port_in_use_is_replaced_before_an_attempt(self, launcher: Any) -> None:
        plan = launcher.render(job_of(program={"module": "this"}, topology="torchrun"))
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier test may have used it
            sock.bind(("127.0.0.1", plan.port))
            sock.listen()
            moved = plan.with_free_ports()
        old, new = (" ".join(rendered.slots["worker/0"].argv) for rendered in (plan, moved))
        assert moved.port != plan.port
        assert new == old.replace(f"--master-port {plan.port}", f"--master-port {moved.port}")

    def test_reserved_variables_are_not_inherited(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("STOKER_DATA_VAL", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.setenv(name, "1")
        run, _ = self.run_to_end(launcher, job_of("env"))
        names = {line.partition("=")[0] for line in self.text(launcher, run)}
        assert names.isdisjoint({"STOKER_DATA_VAL", "RANK", "WORLD_SIZE", "MASTER_ADDR"})

    def test_modules_beside_the_program_do_not_shadow_ours(self, launcher: Any, tmp_path: Path) -> None:
        for name in ("resource", "selectors", "msgspec"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
        (tmp_path / "own.py").write_text("print('train')")
        run, status = self.run_to_end(launcher, job_of(program={"script": "own.py"}, profile={"every": 1}))
        assert status.state is JobState.SUCCEEDED, status.message
        assert self.text(launcher, run) == ["train"]

    def test_stopped_run_resumes_as_a_new_attempt(self, launcher: Any, tmp_path: Path) -> None:
        """Otherwise it would append to the old log, and old heartbeats would count as its own."""
        (tmp_path / "own.py").write_text(SLOW_SECOND_ATTEMPT)
        run = self.start(launcher, job_of(program={"script": "own.py"}, hang_after=2))
        wait_until(lambda: "beating" in self.text(launcher, run))
        launcher.stop(run.handle)
        launcher.restart(run)
        wait_until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [(attempt.number, attempt.cause) for attempt in status.attempts] == [(0, "stopped"), (1, "")]
        assert sorted(path.name for path in run.logs.glob("*.log")) == ["worker-0.0.log", "worker-0.1.log"]

    def test_workers_do_not_share_gpus(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
        keys = {"program": {"module": "this"}, "topology": "torchrun", "resources": {"gpu": 2}}
        plan = launcher.render(job_of(**keys, workers=2))
        visible = [command.env["CUDA_VISIBLE_DEVICES"] for command in plan.slots.values()]
        assert visible == ["2,3", "5,7"]
        assert "CUDA_VISIBLE_DEVICES" not in launcher.render(job_of(**keys)).slots["worker/0"].env

    def test_run_whose_folder_is_removed_is_stopped(self, launcher: Any) -> None:
        run = self.start(launcher, job_of("echo ready; while :; do sleep 0.05; done"))
        wait_until(lambda: is_ready(run))
        self.started.clear()
        run.folder.rename(run.folder.parent.parent / "removed")
        wait_until(lambda: not find_processes_by_env({"STOKER_RUN": run.id}))
        assert not run.folder.exists()

    @pytest.mark.parametrize("topology", ["torchrun", "mpi"])
    def test_port_in_use_is_refused_before_the_start(
        self, launcher: Any, topology: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stoker.launchers.local._check_mpirun", lambda _: None)
        keys = {"program": {"module": "this"}, "topology": topology, "workers": 2}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(SpecError) as caught:
                launcher.render(job_of(**keys, port=port))
            assert [fault.path for fault in caught.value.faults] == ["port"]
            assert str(port) in str(caught.value)
            assert launcher.render(job_of("true", port=port)).slots  # has no rendezvous
        assert launcher.render(job_of(**keys, port=port)).port == port

    def test_folder_of_several_shard_sets_is_refused_with_their_names(self, launcher: Any) -> None:
        for split in ("train", "val"):
            Path("shards", split).mkdir(parents=True)
            Path("shards", split, "manifest.json").touch()
        with pytest.raises(SpecError) as caught:
            launcher.render(job_of("true", data={"train": "shards"}))
        assert [fault.path for fault in caught.value.faults] == ["data.train"]
        assert "2 shard sets: shards/train, shards/val" in str(caught.value)

    def test_cluster_cache_is_ignored_with_a_note(self, launcher: Any) -> None:
        job = job_of("true", data={"via": "cluster"})
        for plan in (launcher.render(job), Job(job).plan()):
            assert "data.via" in plan.notes[0]
        assert "STOKER_DATA_VIA" not in launcher.render(job).slots["worker/0"].env

    def test_everything_that_this_machine_lacks_is_reported_at_once(
        self, launcher: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        keys = {
            "program": {"script": "no.py"},
            "resources": {"gpu": 2},
            "data": {"train": "no/such/shards"},
            "secret_env": {"TOKEN": {"secret": "s", "key": "k"}},
            "volumes": [{"claim": "c", "path": "/data"}],
        }
        with pytest.raises(SpecError) as caught:
            launcher.render(job_of(**keys, topology="torchrun"))
        assert [fault.path for fault in caught.value.faults] == [
            "volumes[0].claim",
            "program.script",
            "data.train",
            "resources.gpu",
            "secret_env.TOKEN",
        ]
        assert not Path(os.environ["STOKER_HOME"]).exists()


class memory_limit:  # noqa: N801
    """A memory cgroup with a limit in bytes; yields the file to which process ids are written."""

    def __init__(self, size: int) -> None:
        v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        self._folder = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory", f"stoker-test-{os.getpid()}")
        self._limit, self._size = ("memory.max" if v2 else "memory.limit_in_bytes"), size

    def __enter__(self) -> Path:
        try:
            self._folder.mkdir()
            (self._folder / self._limit).write_text(str(self._size))
        except OSError as error:
            pytest.skip(f"{NOT_ALLOWED}: {error}")
        return self._folder / "cgroup.procs"

    def __exit__(self, *_: object) -> None:
        wait_until(lambda: not (self._folder / "cgroup.procs").read_text())
        self._folder.rmdir()


# --- The commands


def write_job(path: Path, command: str, **keys: object) -> Path:
    job = {
        "name": "small",
        "topology": "single",
        "profile": {"every": 0},
        "retries": 0,
        "grace": "5s",
        "program": {"command": ["bash", "-c", command]},
        **keys,
    }
    path.write_text(json.dumps(job))
    return path


def start_cli(*args: object, **options: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "stoker", *map(str, args)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, preexec_fn=restore_signals, **pipes, **options)


def test_run_follows_logs_and_returns_the_exit_code(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "run", write_job(workspace / "good.yaml", "echo hello")) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert str(find_run("small").logs) in err
    assert "succeeded" in err
    assert stoker("job", "run", write_job(workspace / "bad.yaml", "exit 9")) == 4
    err = capsys.readouterr().err
    assert re.search(r"^stoker: worker/0 .*\b9; log: ", err, re.MULTILINE)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "expected", "lines"),
    [
        ("name: x\nprogram: {script: nope.py}\n", r"job.yaml:2: program\.script: no such .*/nope\.py", 1),
        ("name: x\nprogramm: {script: a.py}\n", r"job.yaml:2: programm: .*did you mean 'program'\?", 3),
        ("name: x\nprogram: {script: a.py, module: b}\n", r"job.yaml:2: program: .*script, module and command", 3),
        ("", "a mapping", 3),
    ],
)
def test_bad_job_file_exits_2_with_one_line_per_fault_and_no_run(
    text: str, expected: str, lines: int, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(text)
    assert stoker("job", "run", "job.yaml") == 2
    err = capsys.readouterr().err
    assert re.search(expected, err)
    assert err.count("\n") == lines
    assert not (workspace / "stoker").exists()


def test_detached_run_has_status_logs_and_stop(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(workspace / "job.yaml", "echo hello; while :; do sleep 0.1; done")
    started = start_cli("job", "run", job, "--detach", "--json")
    out, _ = started.communicate(timeout=60)
    run = find_run(json.loads(out)["run"])
    wait_until(lambda: "hello" in (run.logs / "worker-0.0.log").read_text())
    assert stoker("job", "status", "small", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["slots"][0]["state"]) == ("running", "running")
    assert stoker("job", "list") == 0
    assert "running" in capsys.readouterr().out
    assert stoker("job", "logs", run.id) == 0
    assert capsys.readouterr().out == "hello\n"
    assert stoker("job", "run", "--resume", run.id) == 2
    assert re.search(rf"{run.id} is still running; .*stoker job logs -f {run.id}$", capsys.readouterr().err.strip())
    assert stoker("job", "stop") == 0
    capsys.readouterr()
    assert stoker("job", "stop") == 0
    assert re.search(rf"{run.id} is not running \(state: stopped\)$", capsys.readouterr().err.strip())
    assert processes_of(run) == []


def test_ctrl_c_stops_the_job(workspace: Path) -> None:
    script = f"trap 'touch {workspace}/saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    process = start_cli("job", "run", write_job(workspace / "job.yaml", script), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert (workspace / "saved").exists()
    assert processes_of(find_run(None)) == []


def test_repeated_ctrl_c_leaves_no_process(workspace: Path) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    process = start_cli("job", "run", write_job(workspace / "job.yaml", script, grace="20s"), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for pause in (0.5, 0.3, 0.1, 0):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    process.communicate(timeout=60)
    run = find_run(None)
    assert processes_of(run) == []
    assert run.read_status().state is JobState.STOPPED


def test_ctrl_c_during_the_start_leaves_no_process(workspace: Path) -> None:
    process = start_cli("job", "run", write_job(workspace / "job.yaml", "sleep 60"), start_new_session=True)
    wait_until(lambda: any((workspace / "stoker/runs").glob("*/lock")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    (folder,) = (workspace / "stoker/runs").iterdir()
    assert processes_of(RunFolder(folder)) == []
    assert supervisor_pid(RunFolder(folder)) is None


def test_exit_codes_with_inherited_ignored_sigchld(workspace: Path) -> None:
    job = write_job(workspace / "job.yaml", "exit 7")
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    argv = [sys.executable, "-c", code, sys.executable, "-m", "stoker", "job", "run", str(job)]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 4


def test_closed_terminal_does_not_stop_the_job(workspace: Path) -> None:
    script = f"echo ready; while ! test -e {workspace}/go; do sleep 0.05; done; echo done"
    job = write_job(workspace / "job.yaml", script)
    process = start_cli("job", "run", job, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGHUP)  # as a terminal does when it closes
    process.communicate(timeout=60)
    (workspace / "go").touch()
    run = find_run("small")
    wait_until(lambda: run.read_status().state is JobState.SUCCEEDED)


def test_command_forks_a_supervisor_that_keeps_nothing_of_it_open(workspace: Path) -> None:
    job = write_job(workspace / "job.yaml", "while :; do sleep 0.05; done")
    read_fd, write_fd = os.pipe()
    done = start_cli("job", "run", job, "--detach", pass_fds=[write_fd], start_new_session=True)
    os.close(write_fd)
    done.communicate(timeout=60)
    assert done.returncode == 0
    assert os.read(read_fd, 1) == b""  # the end of the file: no process has the other end open
    os.close(read_fd)
    run = find_run("small")
    pid = supervisor_pid(run)
    assert pid
    assert b"supervise" not in Path(f"/proc/{pid}/cmdline").read_bytes()  # not an interpreter of its own
    assert os.getsid(pid) not in (os.getsid(0), done.pid)
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
    assert Path(f"/proc/{pid}/fd/2").readlink() == run.folder / "supervisor.log"
    assert stoker("job", "stop", run.id) == 0
    assert processes_of(run) == []


def test_failed_run_resumes(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(workspace / "job.yaml", f"echo attempt $STOKER_ATTEMPT; test -e {workspace}/fixed")
    assert stoker("job", "run", job) == 4
    assert capsys.readouterr().out == "attempt 0\n"
    (workspace / "fixed").touch()
    assert stoker("job", "run", "--resume", "small") == 0
    assert capsys.readouterr().out == "attempt 1\n"
    assert stoker("job", "run", "--resume", "small") == 2
    assert re.search(rf"{find_run('small').id} already succeeded; .*stoker job run", capsys.readouterr().err)
    assert stoker("job", "run", "--resume", "small", "--set", "retries=1", "--tensorboard") == 2
    assert "--set and --tensorboard cannot be combined with --resume" in capsys.readouterr().err


def test_relative_paths_stay_valid_when_resumed_in_another_directory(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, other = workspace / "work", workspace / "other"
    (work / "run.sh").write_text("pwd; test -e fixed")
    job = write_job(workspace / "job.yaml", "true", program={"command": ["bash", "run.sh"]}, checkpoint={"dir": "ck"})
    assert stoker("job", "run", job) == 4
    (work / "fixed").touch()
    other.mkdir()
    monkeypatch.chdir(other)
    assert stoker("job", "run", "--resume", "small") == 0
    assert capsys.readouterr().out == f"{work}\n{work}\n"
    assert find_run("small").checkpoint_dir == str(work / "ck")


def test_plan_prints_runnable_commands(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(workspace / "job.yaml", "touch started; echo 'a b'")
    assert stoker("job", "plan", job) == 0
    script = capsys.readouterr().out
    assert not (workspace / "stoker").exists()
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "a b\n"
    assert Path("started").exists()


def test_report_redacts_secrets(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hush-hush-hush")
    job = write_job(
        workspace / "job.yaml",
        "echo token $MY_API_TOKEN, password $DB_PASSWORD, url http://me:pw@host/x; exit 3",
        env={"DB_PASSWORD": "correct horse", "GIT_PAT": "hunter2", "API_TOKEN": 'ab\\cd"efgh'},
    )
    assert stoker("job", "run", job) == 4
    assert stoker("job", "report", "-o", workspace / "r.tar.gz") == 0
    with tarfile.open(workspace / "r.tar.gz") as archive:
        files = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert {"job.yaml", "plan.json", "state.json", "environment.json", "summary.txt", "events.jsonl"} <= set(texts)
    assert "token …, password …, url http://host/x" in texts["logs/worker-0.0.log"]
    assert re.search(r"worker/0 .*\b3\b", texts["summary.txt"])
    everything = "".join(texts.values())
    assert not any(secret in everything for secret in ("hush-hush", "correct horse", "me:pw", "hunter2", "efgh"))
    assert stat.S_IMODE((workspace / "r.tar.gz").stat().st_mode) == 0o600


def test_report_redacts_values_of_secret_flags(workspace: Path) -> None:
    program = {"command": ["true"], "args": ["--password", "swordfish", "--api-key=sesame", "--lr", "0.1"]}
    assert stoker("job", "run", write_job(workspace / "job.yaml", "", program=program)) == 0
    assert stoker("job", "report", "-o", workspace / "r.tar.gz") == 0
    with tarfile.open(workspace / "r.tar.gz") as archive:
        files = [archive.extractfile(member) for member in archive]
        everything = b"".join(file.read() for file in files if file is not None).decode()
    assert "swordfish" not in everything
    assert "sesame" not in everything
    assert "--lr" in everything


def test_unknown_runs_and_slots(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "status") == 2
    assert re.search(rf"no runs .*{workspace}/stoker/runs; .*stoker job run$", capsys.readouterr().err.strip())
    assert stoker("job", "status", "nonsense") == 2
    assert "no run matches 'nonsense'" in capsys.readouterr().err
    assert stoker("job", "run", write_job(workspace / "job.yaml", "true")) == 0
    assert stoker("job", "logs", "nonsense") == 2
    assert re.search("no run matches 'nonsense'; .*stoker job list", capsys.readouterr().err)
    assert stoker("job", "logs", "--slot", "ps/0") == 2
    assert re.search(r"'ps/0'; .*worker/0$", capsys.readouterr().err.strip())


def test_init_writes_a_valid_job_file(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("init", "--name", "mine") == 0
    assert "name: mine" in Path("job.yaml").read_text()
    assert stoker("init") == 2
    assert re.search(r"job\.yaml: .*exists; .*--force", capsys.readouterr().err)
    assert stoker("init", "other.yaml", "--name", "Not A Name") == 2
    assert not Path("other.yaml").exists()

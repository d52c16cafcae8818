"""Jobs on this machine: real processes, real signals, nothing left behind."""

from __future__ import annotations

import json
import os
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

from stoker.core.processes import marked
from stoker.errors import SpecError
from stoker.jobs.run_folder import Run, find
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.supervisor import watcher
from tests.launchers.contract import LauncherSuite, job_of, until
from tests.support.disks import NOT_ALLOWED
from tests.support.trees import stoker

HEARTBEAT = """
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
for step in range(50 if os.environ["RANK"] == "0" else 1):
    record.heartbeat(step)
    time.sleep(0.1)
"""
SLOW_AGAIN = """
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
(folder / f"met-{{dist.get_world_size()}}-{{os.getpid()}}").touch()
going = torch.zeros(1)
while not going.item():
    going.fill_((folder / "go").exists())
    dist.all_reduce(going)
    time.sleep(0.05)
"""


def left(run: Run) -> list[int]:
    """What still runs of a run."""
    return marked({"STOKER_RUN": run.id})


class TestLocal(LauncherSuite):
    ON = "local"

    def test_nothing_outlives_a_stop(self, launcher: Any) -> None:
        # In sessions of their own, deaf to TERM, and without a parent: all that a process group would miss.
        deaf = "trap '' TERM; setsid bash -c 'trap \"\" TERM; sleep 1000 & sleep 1000' & (sleep 1000 &)"
        run = self.start(launcher, job_of(f"{deaf}; echo ready; wait", grace=1))
        until(lambda: "ready" in self.text(launcher, run) and len(left(run)) >= 4)
        launcher.stop(run.handle)
        assert left(run) == []
        assert watcher(run) is None

    def test_what_a_failed_slot_left_is_ended(self, launcher: Any) -> None:
        run, status = self.end(launcher, job_of("setsid sleep 1000 & sleep 0.2; exit 1"))
        assert status.state is JobState.FAILED
        assert left(run) == []

    def test_a_supervisor_that_is_killed(self, launcher: Any, tmp_path: Path) -> None:
        script = f"trap 'exit 0' TERM; echo x >> {tmp_path}/tries; while :; do sleep 0.05; done"
        run = self.start(launcher, job_of(script))
        until(lambda: (tmp_path / "tries").exists())
        pid = watcher(run)
        assert pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: launcher.status(run.handle).state is JobState.LOST)
        assert f"stoker job run --resume {run.id}" in launcher.status(run.handle).message
        until(lambda: not left(run))  # they do not go on without a watcher
        launcher.restart(run)
        until(lambda: (tmp_path / "tries").read_text() == "x\nx\n")
        assert launcher.status(run.handle).state is JobState.RUNNING
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert [one.cause for one in launcher.status(run.handle).attempts] == ["lost with its supervisor", "stopped"]

    def test_a_hang_is_ended_with_the_stacks_of_every_rank(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "hang.py").write_text(HEARTBEAT)
        keys = {"program": {"script": "hang.py"}, "hang_after": 4, "topology": "torchrun", "processes_per_worker": 2}
        run, status = self.end(launcher, job_of(**keys))
        assert status.state is JobState.FAILED
        assert "hung at step 2 in train-00001.tar: no heartbeat for 4s" in status.message
        assert (run.folder / "stacks.0.txt").read_text().count("in stuck") == 2
        assert str(run.log(Slot("worker", 0), 0)) in status.message

    def test_an_out_of_memory_kill_is_called_so(self, launcher: Any) -> None:
        with memory_limit(64 << 20) as enter:
            script = f"echo $$ > {enter}; exec {sys.executable} -c 'x = bytearray(1 << 30)'"
            _, status = self.end(launcher, job_of(script))
        assert status.message.startswith(
            "worker/0 was killed by SIGKILL while the kernel was ending processes because there was no memory left"
        )

    def test_two_workers_of_torchrun_and_one_that_fails(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "ddp.py").write_text(FAILING_RANK)
        keys = {"program": {"script": "ddp.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.end(launcher, job_of(**keys))
        assert status.state is JobState.FAILED
        assert status.message.startswith("worker/1 (rank 1) failed: LookupError: no such thing; its log: ")
        assert "rank 0" in self.text(launcher, run, Slot("worker", 0))
        assert "rank 1" in self.text(launcher, run, Slot("worker", 1))

    @pytest.mark.slow  # the meeting of a new world takes half a minute
    def test_an_elastic_world_replaces_a_lost_worker(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "elastic.py").write_text(ELASTIC.format(folder=tmp_path))
        keys = {"program": {"script": "elastic.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}}
        run = self.start(launcher, job_of(**keys, retries=3))
        until(lambda: len(list(tmp_path.glob("met-2-*"))) == 2)
        (lost,) = (one.pid for one in launcher.status(run.handle).slots if one.slot == "worker/1")
        os.kill(lost, signal.SIGKILL)
        until(lambda: len(list(tmp_path.glob("met-2-*"))) >= 4, 60)  # all ranks met again
        (tmp_path / "go").touch()
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        status = launcher.status(run.handle)
        assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1)
        assert left(run) == []

    def test_a_program_under_a_shell_has_its_grace(self, launcher: Any, tmp_path: Path) -> None:
        kid = f"trap 'sleep 1; touch {tmp_path}/saved; exit' TERM; echo ready; while :; do sleep 0.05; done"
        (tmp_path / "kid.sh").write_text(kid)
        run = self.start(launcher, job_of(f"bash {tmp_path}/kid.sh; echo after", grace=10))
        until(lambda: "ready" in self.text(launcher, run))
        launcher.stop(run.handle)
        assert (tmp_path / "saved").exists()
        assert left(run) == []

    def test_what_hides_its_environment_is_ended_too(self, launcher: Any, tmp_path: Path) -> None:
        script = f"env -i setsid bash -c 'echo $$ > {tmp_path}/pid; exec sleep 1000' & sleep 0.5; exit 1"
        self.end(launcher, job_of(script))
        assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()

    @pytest.mark.parametrize("code", [170, 255])
    def test_any_exit_code_is_told(self, launcher: Any, code: int) -> None:
        _, status = self.end(launcher, job_of(f"exit {code}"))
        assert status.state is JobState.FAILED
        assert "worker/0 " in status.message

    def test_odd_telemetry_is_no_reason_to_end_a_training(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        odd = '@stoker {"v":1,"t":1,"slot":"","rank":0,"attempt":0,"seq":0,"k":"heartbeat","step":null,"pid":"x"}'
        (tmp_path / "odd.py").write_text(f"{SCALAR}\nprint({odd!r}, flush=True)\ntime.sleep(0.3)\n")
        job = job_of(program={"script": "odd.py"}, tensorboard=str(tmp_path / "file/boards"))
        _, status = self.end(launcher, job)
        assert (status.state, status.message) == (JobState.SUCCEEDED, "")

    def test_a_rank_that_is_done_does_not_hang(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "uneven.py").write_text(UNEVEN)
        keys = {"program": {"script": "uneven.py"}, "topology": "torchrun", "processes_per_worker": 2, "hang_after": 2}
        _, status = self.end(launcher, job_of(**keys))
        assert status.state is JobState.SUCCEEDED, status.message

    def test_a_port_that_was_taken_meanwhile(self, launcher: Any) -> None:
        plan = launcher.render(job_of(program={"module": "m"}, topology="torchrun"))
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier test may have been there
            sock.bind(("127.0.0.1", plan.port))
            sock.listen()
            moved = plan.on_free_port()
        old, new = (" ".join(one.slots["worker/0"].argv) for one in (plan, moved))
        assert moved.port != plan.port
        assert new == old.replace(f"--master-port {plan.port}", f"--master-port {moved.port}")

    def test_nothing_of_the_outside_leaks_in(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("STOKER_DATA_VAL", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.setenv(name, "1")
        run, _ = self.end(launcher, job_of("env"))
        names = {line.partition("=")[0] for line in self.text(launcher, run)}
        assert names.isdisjoint({"STOKER_DATA_VAL", "RANK", "WORLD_SIZE", "MASTER_ADDR"})

    def test_modules_beside_the_program_do_not_stand_in_our_way(self, launcher: Any, tmp_path: Path) -> None:
        for name in ("resource", "selectors", "msgspec"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
        (tmp_path / "own.py").write_text("print('train')")
        run, status = self.end(launcher, job_of(program={"script": "own.py"}, profile={"every": 1}))
        assert status.state is JobState.SUCCEEDED, status.message
        assert self.text(launcher, run) == ["train"]

    def test_a_stopped_run_goes_on_as_a_new_attempt(self, launcher: Any, tmp_path: Path) -> None:
        """Else it would write on in the old log, whose heartbeats would be taken for its own."""
        (tmp_path / "own.py").write_text(SLOW_AGAIN)
        run = self.start(launcher, job_of(program={"script": "own.py"}, hang_after=2))
        until(lambda: "beating" in self.text(launcher, run))
        launcher.stop(run.handle)
        launcher.restart(run)
        until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [(one.number, one.cause) for one in status.attempts] == [(0, "stopped"), (1, "")]
        assert sorted(path.name for path in run.logs.iterdir()) == ["worker-0.0.log", "worker-0.1.log"]

    def test_each_of_several_workers_has_gpus_of_its_own(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
        keys = {"program": {"module": "m"}, "topology": "torchrun", "resources": {"gpu": 2}}
        plan = launcher.render(job_of(**keys, workers=2))
        seen = [command.env["CUDA_VISIBLE_DEVICES"] for command in plan.slots.values()]
        assert seen == ["2,3", "5,7"]
        assert "CUDA_VISIBLE_DEVICES" not in launcher.render(job_of(**keys)).slots["worker/0"].env

    def test_the_cluster_s_cache_is_left_aside(self, launcher: Any) -> None:
        plan = launcher.render(job_of("true", data={"via": "cluster"}))
        assert "STOKER_DATA_VIA" not in plan.slots["worker/0"].env
        assert "without its cache" in plan.notes[0]

    def test_what_this_machine_lacks_is_told_at_once(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A memory cgroup of so many bytes; gives the file that takes processes in."""

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
        until(lambda: not (self._folder / "cgroup.procs").read_text())
        self._folder.rmdir()


# --- The commands


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def cli(*words: object, **more: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "stoker", *map(str, words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_run_follows_and_gives_the_exit_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "run", write_job(here / "good.yaml", "echo hello")) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert f"logs in {find('small').logs}" in err
    assert "succeeded in" in err
    assert stoker("job", "run", write_job(here / "bad.yaml", "exit 9")) == 4
    err = capsys.readouterr().err
    assert "stoker: worker/0 ended with exit code 9; its log: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nprogram: {script: nope.py}\n", "program.script: there is no file"),
        ("name: x\nprogramm: {script: a.py}\n", "unknown key (did you mean 'program'?)"),
        ("name: x\nprogram: {script: a.py, module: b}\n", "program"),
        ("", "a mapping"),
    ],
)
def test_a_bad_job_file_is_one_sentence_and_no_run(
    text: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "job.yaml").write_text(text)
    assert stoker("job", "run", "job.yaml") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (here / "stoker").exists()


def test_a_detached_run_can_be_watched_and_stopped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(here / "job.yaml", "echo hello; while :; do sleep 0.1; done")
    started = cli("job", "run", job, "--detach", "--json")
    out, _ = started.communicate(timeout=30)
    run = find(json.loads(out)["run"])
    until(lambda: "hello" in (run.logs / "worker-0.0.log").read_text())
    assert stoker("job", "status", "small", "--json") == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["state"], described["slots"][0]["state"]) == ("running", "running")
    assert stoker("job", "list") == 0
    assert "running" in capsys.readouterr().out
    assert stoker("job", "logs", run.id) == 0
    assert capsys.readouterr().out == "hello\n"
    assert stoker("job", "run", "--resume", run.id) == 2
    assert "runs already" in capsys.readouterr().err
    assert stoker("job", "stop") == 0
    assert stoker("job", "stop") == 0
    assert "is over already: stopped" in capsys.readouterr().err
    assert left(run) == []


def test_ctrl_c_ends_the_job(here: Path) -> None:
    script = f"trap 'touch {here}/saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    process = cli("job", "run", write_job(here / "job.yaml", script), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert (here / "saved").exists()
    assert left(find(None)) == []


def test_an_impatient_ctrl_c_leaves_nothing(here: Path) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    process = cli("job", "run", write_job(here / "job.yaml", script, grace="20s"), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for pause in (0.5, 0.3, 0.1, 0):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    process.communicate(timeout=15)
    run = find(None)
    assert left(run) == []
    assert run.read_status().state is JobState.STOPPED


def test_ctrl_c_while_it_starts_leaves_nothing(here: Path) -> None:
    process = cli("job", "run", write_job(here / "job.yaml", "sleep 60"), start_new_session=True)
    until(lambda: any((here / "stoker/runs").glob("*/lock")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    (folder,) = (here / "stoker/runs").iterdir()
    assert left(Run(folder)) == []
    assert watcher(Run(folder)) is None


def test_exit_codes_survive_a_parent_that_ignores_its_children(here: Path) -> None:
    job = write_job(here / "job.yaml", "exit 7")
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    argv = [sys.executable, "-c", code, sys.executable, "-m", "stoker", "job", "run", str(job)]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 4


def test_a_closed_terminal_does_not_end_the_job(here: Path) -> None:
    script = f"echo ready; while ! test -e {here}/go; do sleep 0.05; done; echo done"
    process = cli("job", "run", write_job(here / "job.yaml", script), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGHUP)  # what a terminal does
    process.communicate(timeout=30)
    (here / "go").touch()
    run = find("small")
    until(lambda: run.read_status().state is JobState.SUCCEEDED)


def test_a_failed_run_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(here / "job.yaml", f"echo attempt $STOKER_ATTEMPT; test -e {here}/mended")
    assert stoker("job", "run", job) == 4
    assert capsys.readouterr().out == "attempt 0\n"
    (here / "mended").touch()
    assert stoker("job", "run", "--resume", "small") == 0
    assert capsys.readouterr().out == "attempt 1\n"
    assert stoker("job", "run", "--resume", "small") == 2
    assert "is over, and succeeded" in capsys.readouterr().err


def test_relative_paths_mean_the_same_when_it_goes_on_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.sh").write_text("pwd; test -e mended")
    job = write_job(here / "job.yaml", "true", program={"command": ["bash", "run.sh"]}, checkpoint={"dir": "ck"})
    assert stoker("job", "run", job) == 4
    (here / "mended").touch()
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert stoker("job", "run", "--resume", "small") == 0
    assert capsys.readouterr().out == f"{here}\n{here}\n"
    assert find("small").checkpoints == str(here / "ck")


def test_plan_shows_what_run_would_start(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(here / "job.yaml", "touch started; echo 'a b'")
    assert stoker("job", "plan", job) == 0
    script = capsys.readouterr().out
    assert not (here / "stoker").exists()
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "a b\n"
    assert (here / "started").exists()


def test_a_report_holds_all_but_secrets(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hush-hush-hush")
    job = write_job(
        here / "job.yaml",
        "echo token $MY_API_TOKEN, password $DB_PASSWORD, url http://me:pw@host/x; exit 3",
        env={"DB_PASSWORD": "correct horse", "GIT_PAT": "hunter2", "API_TOKEN": 'ab\\cd"efgh'},
    )
    assert stoker("job", "run", job) == 4
    assert stoker("job", "report", "-o", here / "r.tar.gz") == 0
    with tarfile.open(here / "r.tar.gz") as archive:
        files = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert {"job.yaml", "plan.json", "state.json", "environment.json", "summary.txt", "events.jsonl"} <= set(texts)
    assert "token …, password …, url http://host/x" in texts["logs/worker-0.0.log"]
    assert "ended with exit code 3" in texts["summary.txt"]
    everything = "".join(texts.values())
    assert not any(secret in everything for secret in ("hush-hush", "correct horse", "me:pw", "hunter2", "efgh"))
    assert stat.S_IMODE((here / "r.tar.gz").stat().st_mode) == 0o600


def test_a_report_hides_what_stands_behind_secret_flags(here: Path) -> None:
    program = {"command": ["true"], "args": ["--password", "swordfish", "--api-key=sesame", "--lr", "0.1"]}
    assert stoker("job", "run", write_job(here / "job.yaml", "", program=program)) == 0
    assert stoker("job", "report", "-o", here / "r.tar.gz") == 0
    with tarfile.open(here / "r.tar.gz") as archive:
        files = [archive.extractfile(member) for member in archive]
        everything = b"".join(file.read() for file in files if file is not None).decode()
    assert "swordfish" not in everything
    assert "sesame" not in everything
    assert "--lr" in everything


def test_unknown_runs_and_slots(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "status") == 2
    assert "there are no runs" in capsys.readouterr().err
    assert stoker("job", "run", write_job(here / "job.yaml", "true")) == 0
    assert stoker("job", "logs", "nonsense") == 2
    assert "there is no run 'nonsense'" in capsys.readouterr().err
    assert stoker("job", "logs", "--slot", "ps/0") == 2
    assert "known: worker/0" in capsys.readouterr().err


def test_init_writes_a_job_that_loads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("init", "--name", "mine") == 0
    assert "name: mine" in (here / "job.yaml").read_text()
    assert stoker("init") == 2
    assert "is there already" in capsys.readouterr().err
    assert stoker("init", "other.yaml", "--name", "Not A Name") == 2
    assert not (here / "other.yaml").exists()

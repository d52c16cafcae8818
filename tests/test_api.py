"""The Python API of jobs: load, plan, run, follow, wait, stop and resume, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.api import HOSTS_NEED_TARGET
from stoker.errors import ConflictError, InputError, InterruptError, JobFailedError, NotFoundError, SpecError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.launchers.supervise.supervisor import supervisor_pid
from tests.support.waiting import wait_until

UNTIL_STOPPED = "echo ready; trap 'echo saved; exit 143' TERM; while :; do sleep 0.05; done"


def job_of(command: str, **keys: Any) -> stoker.Job:
    """Return a small job that runs a shell command."""
    defaults = {"name": "small", "topology": "single", "profile": {"every": 0}, "retries": 0, "grace": "5s"}
    return stoker.Job.from_dict({**defaults, "program": {"command": ["bash", "-c", command]}, **keys})


@pytest.fixture(autouse=True)
def _stop_runs(workspace: Path) -> Iterator[None]:
    yield
    for run in stoker.runs():
        run.stop()


def is_ready(run: stoker.Run) -> bool:
    return any(line.text == "ready" for line in run.logs())


def interrupt_once_ready(run: stoker.Run, function: str) -> threading.Thread:
    """Send SIGINT to this process, as a notebook does, when the run is ready and the main thread is in a function."""

    def is_in_function() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[main])
        return function in {frame.f_code.co_name for frame, _ in stack}

    def interrupt() -> None:
        wait_until(lambda: is_ready(run) and is_in_function())
        os.kill(os.getpid(), signal.SIGINT)

    main = threading.main_thread().ident or 0

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


# --- Jobs


def test_public_names() -> None:
    assert set(stoker.__all__) == {"Batch", "Job", "Loader", "Run", "runs"}
    for name in stoker.__all__:
        assert getattr(stoker, name).__module__.startswith("stoker.")


def test_overrides_replace_keys(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nprogram: {script: train.py, args: [--lr, 1e-4]}\nworkers: 4\n")
    job = stoker.Job.load(path, {"resources.gpu": 2})
    assert (job.name, job.spec.workers, job.spec.resources.gpu) == ("a", 4, 2)
    changed = job.replace({"workers": None, "checkpoint.dir": tmp_path, "program.args[1]": 1e-05, "env.NAME": "é 😀"})
    assert changed.spec.workers == "auto"
    assert changed.spec.checkpoint.dir == str(tmp_path)
    assert changed.spec.program.args == ("--lr", "1e-05")
    assert changed.spec.env == {"NAME": "é 😀"}
    assert changed.spec.resources.gpu == 2
    assert job.spec.workers == 4
    assert job.replace(["workers=3", "name=b"]).spec.workers == 3
    assert job.replace("workers=3").spec.workers == 3
    assert (
        stoker.Job.from_dict({"name": "b", "program": {"script": Path("train.py")}}).spec.program.script == "train.py"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("resources.gpu", np.int64(3), 3),
        ("resources.gpu", np.array(3), 3),
        ("ssh.copy", np.bool_(False), False),
        ("env", {"RATE": np.float32(0.5), "EXACT": Decimal("0.25")}, {"RATE": "0.5", "EXACT": "0.25"}),
        ("program.command", [Path("a"), np.int8(2)], ("a", "2")),
    ],
)
def test_overrides_accept_numbers_of_other_libraries(key: str, value: object, expected: object) -> None:
    found: Any = job_of("true").replace({key: value}).spec
    for name in key.split("."):
        found = getattr(found, name)
    assert found == expected


@pytest.mark.parametrize("value", [object(), {1}, b"a", 1j, np.zeros(2), [object()]])
def test_overrides_refuse_other_objects(value: object) -> None:
    with pytest.raises(TypeError):
        job_of("true").replace({"name": value})
    with pytest.raises(TypeError):
        job_of("true", env={"A": value})


def test_load_checks_the_job_on_its_hosts(workspace: Path) -> None:
    path = workspace / "job.yaml"
    path.write_text(job_of("true").to_yaml())
    with pytest.raises(SpecError) as caught:
        stoker.Job.load(path, on="ssh")
    assert [fault.path for fault in caught.value.faults] == ["ssh.hosts"]
    assert stoker.Job.load(path, on="ssh", hosts=["node1", "node2:2"]).spec.ssh.hosts == ("node1", "node2:2")
    assert stoker.Job.load(path, on="ssh", hosts="node1,node2").spec.ssh.hosts == ("node1", "node2")
    assert stoker.Job.load(path, on="ray", hosts=["node1", "node2:2"]).spec.ray.hosts == ("node1", "node2:2")
    for on in (None, "local"):
        with pytest.raises(InputError, match=HOSTS_NEED_TARGET):
            stoker.Job.load(path, on=on, hosts=["node1"])


def test_faults_of_overrides_do_not_name_options_of_the_command_line() -> None:
    for key, expected in (("colour", "(from overrides)"), ("name[", "overrides 'name[=1'")):
        with pytest.raises(SpecError) as caught:
            job_of("true").replace({key: 1})
        assert expected in str(caught.value)
        assert "--" not in str(caught.value)


def test_missing_job_file_is_one_exception() -> None:
    with pytest.raises(NotFoundError) as caught:
        stoker.Job.load("no-such.yaml")
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_every_fault_is_raised_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        job_of("true").replace({"workers": 0, "no_such_key": 1})
    assert {fault.path for fault in caught.value.faults} == {"workers", "no_such_key"}


def test_plan_starts_nothing(workspace: Path) -> None:
    plan = job_of("echo hello", image="ignored").plan()
    assert "echo hello" in str(plan)
    assert any("image" in note for note in plan.notes)
    assert stoker.runs() == []


@pytest.mark.parametrize(
    ("on", "hosts"), [("local", ["a"]), ("ssh", []), ("ssh", " , "), ("no-such-target", None), ("local://a", None)]
)
def test_invalid_targets(on: str, hosts: Any) -> None:
    with pytest.raises(InputError):
        job_of("true").plan(on, hosts=hosts)


# --- Runs


def test_successful_run() -> None:
    event = 'echo "@stoker {}"'
    fields = {"v": 1, "slot": "", "rank": 0, "attempt": 0, "pid": 7, "k": "scalar"}
    scalars = [("loss", 2.5, 1), ("lr", 0.1, 1), ("loss", 1.5, 2)]
    lines = [
        {**fields, "t": 10.0 + number, "seq": number, "name": name, "value": value, "step": step}
        for number, (name, value, step) in enumerate(scalars)
    ]
    command = "; ".join([*(event.format(json.dumps(line).replace('"', r"\"")) for line in lines), "echo done"])
    run = job_of(command).run()
    assert run.wait(60).state is JobState.SUCCEEDED
    assert [(str(line.slot), line.attempt, line.text) for line in run.logs()] == [("worker/0", 0, "done")]
    assert [str(line) for line in run.logs("worker/0", follow=True)] == ["[worker/0] done"]
    common = {"slot": "worker/0", "rank": 0, "attempt": 0}
    assert run.metrics() == [
        {"time": 10.0, **common, "step": 1, "loss": 2.5, "lr": 0.1},
        {"time": 12.0, **common, "step": 2, "loss": 1.5},
    ]
    assert (run.progress().step, run.progress().loss) == (2, 1.5)
    assert run.verdict().bound_by == "unknown"
    assert run.job.spec.program.command == job_of(command).spec.program.command
    with pytest.raises(ConflictError):
        run.resume()
    with pytest.raises(InputError):
        run.logs("worker/1")
    with pytest.raises(InputError, match="tail"):
        run.logs(tail=-1)


def test_runs_are_found_by_name() -> None:
    with pytest.raises(NotFoundError):
        stoker.Run.find("small")
    first, second = job_of("true").run(), job_of("true", name="other").run()
    assert stoker.Run.find("small") == stoker.Run.find(first.id) == first
    assert {run.id for run in stoker.runs()} == {first.id, second.id}
    assert stoker.Run.find() == stoker.runs()[0]


def test_failed_run_raises_its_diagnosis() -> None:
    run = job_of("echo oops; exit 3").run()
    with pytest.raises(JobFailedError) as caught:
        run.wait(60)
    assert caught.value.what == run.status().message
    assert "worker/0" in caught.value.what


def test_timeout_leaves_the_run_alone() -> None:
    run = job_of(UNTIL_STOPPED).run()
    with pytest.raises(TimeoutError):
        run.wait(0.2)
    wait_until(lambda: run.status().state is JobState.RUNNING)


def test_stop_and_resume() -> None:
    run = job_of(UNTIL_STOPPED).run()
    with pytest.raises(ConflictError):
        run.resume()
    wait_until(lambda: is_ready(run))
    run.stop()
    with pytest.raises(InterruptError):
        run.wait(60)
    assert [line.text for line in run.logs()] == ["ready", "saved"]
    run.resume()
    wait_until(lambda: [line.text for line in run.logs() if line.attempt == 1] == ["ready"])
    run.stop()
    run.stop()
    assert run.status().state is JobState.STOPPED


# An interrupt may come between the opening of a file and the statement that closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("method", "function"), [("wait", "wait_until"), ("logs", "read_run_logs")])
def test_interrupt_does_not_stop_the_run_and_says_so(method: str, function: str) -> None:
    run = job_of(UNTIL_STOPPED).run()
    thread = interrupt_once_ready(run, function)
    with pytest.raises(KeyboardInterrupt) as caught:
        run.wait() if method == "wait" else list(run.logs(follow=True))
    thread.join()
    assert any(run.id in note for note in caught.value.__notes__)
    assert run.status().state is JobState.RUNNING


def test_interrupt_while_starting_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = job_of(UNTIL_STOPPED).plan()
    start = type(plan.launcher).start

    def start_interrupted(*args: Any, **keys: Any) -> str:
        start(*args, **keys)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(plan.launcher), "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        plan.run()
    (run,) = stoker.runs()
    assert any(run.id in note for note in caught.value.__notes__)
    assert run.status().state is JobState.STOPPED


def test_interrupted_stop_kills_and_leaves_interrupts_enabled() -> None:
    handler = signal.getsignal(signal.SIGINT)
    run = job_of("trap 'echo ready' TERM; echo started; while :; do sleep 0.05; done", grace="1h").run()
    wait_until(lambda: any(line.text == "started" for line in run.logs()))
    thread = interrupt_once_ready(run, "stop")
    run.stop()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    assert run.status().state is JobState.STOPPED


def test_stop_in_a_process_whose_interrupt_handler_is_not_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    run = job_of(UNTIL_STOPPED).run()
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    run.stop()
    assert run.status().state is JobState.STOPPED


def test_run_survives_the_process_and_the_process_group_that_started_it(workspace: Path) -> None:
    """As when a notebook kernel is restarted: the whole group is killed."""
    (workspace / "job.yaml").write_text(job_of(UNTIL_STOPPED).to_yaml())
    code = "import sys, time, stoker; stoker.Job.load(sys.argv[1]).run(); print(flush=True); time.sleep(99)"
    argv = [sys.executable, "-c", code, str(workspace / "job.yaml")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as kernel:
        assert kernel.stdout is not None
        kernel.stdout.readline()
        os.killpg(kernel.pid, signal.SIGKILL)
    run = stoker.Run.find("small")
    assert supervisor_pid(RunFolder(run.folder)) is not None
    wait_until(lambda: is_ready(run))
    assert run.status().state is JobState.RUNNING

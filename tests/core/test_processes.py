from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.core.processes import Process, find_processes_by_env, run, start
from stoker.errors import MissingProgramError, NotFoundError, StokerError, UnavailableError
from tests.support.waiting import eventually, is_alive, wait_until


class Shell:
    """Starts shell scripts that write pids to files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Process] = []

    def start(self, script: str) -> Process:
        process = start(["sh", "-c", script], cwd=self.folder)
        self.started.append(process)
        return process

    def pid(self, name: str) -> int:
        file = self.folder / name
        assert eventually(lambda: file.exists() and file.read_text().endswith("\n"))
        return int(file.read_text())


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        process.stop(0)


def test_stop_terminates_grandchildren(shell: Shell) -> None:
    process = shell.start("sleep 600 & echo $! > child; wait")
    child = shell.pid("child")
    assert is_alive(child)
    assert process.stop() == -signal.SIGTERM
    assert not is_alive(child)
    assert not is_alive(process.pid)
    assert not Path(f"/proc/{process.pid}").exists()  # reaped, not a zombie


def test_stop_terminates_children_of_an_exited_leader(shell: Shell) -> None:
    process = shell.start("sleep 600 & echo $! > child; exit 3")
    assert process.wait(20) == 3
    child = shell.pid("child")
    assert is_alive(child)
    assert process.stop() == 3
    assert not is_alive(child)


def test_stop_kills_processes_that_ignore_sigterm(shell: Shell) -> None:
    process = shell.start("trap '' TERM; sleep 600 & echo $! > child; wait")
    child = shell.pid("child")  # inherits the ignored signal
    began = time.monotonic()
    assert process.stop(grace_s=0.3) == -signal.SIGKILL
    assert time.monotonic() - began >= 0.3
    assert not is_alive(child)


def test_program_can_finish_within_the_grace_period(shell: Shell) -> None:
    process = shell.start("trap 'echo saved > saved; exit 7' TERM; echo 1 > ready; while :; do sleep 0.01; done")
    shell.pid("ready")
    began = time.monotonic()
    assert process.stop(grace_s=60) == 7
    assert time.monotonic() - began < 30
    assert (shell.folder / "saved").exists()


def test_stop_is_idempotent_and_does_not_affect_other_processes(shell: Shell) -> None:
    other = shell.start("sleep 600")
    process = shell.start("exit 0")
    assert process.wait(20) == 0
    assert process.stop() == process.stop() == process.poll() == process.wait(0) == 0
    assert other.poll() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_context_manager_stops_the_process_on_errors(shell: Shell, kind: type[BaseException]) -> None:
    process = shell.start("sleep 600")
    with pytest.raises(kind), process:
        raise kind
    assert not is_alive(process.pid)


def test_second_interrupt_ends_the_grace_period(shell: Shell) -> None:
    process = shell.start("trap 'echo 1 > terminated' TERM; echo 1 > ready; while :; do sleep 0.01; done")
    shell.pid("ready")

    def interrupt() -> None:
        shell.pid("terminated")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        process.stop(grace_s=120)
    thread.join()
    assert not is_alive(process.pid)


def test_wait_in_another_thread_returns_when_the_process_is_stopped(shell: Shell) -> None:
    process = shell.start("sleep 600")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(process.wait(60)))
    thread.start()
    process.stop()
    thread.join(60)
    assert codes == [-signal.SIGTERM]


def test_wait_timeout_does_not_stop_the_process(shell: Shell) -> None:
    process = shell.start("sleep 600")
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    assert process.poll() is None


def test_start_passes_env_cwd_and_stdout(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        out.open("wb") as file,
        start(["/bin/sh", "-c", "echo $A; pwd"], env={"A": "b"}, cwd=tmp_path, stdout=file) as process,
    ):
        assert process.wait(20) == 0
    assert out.read_text() == f"b\n{tmp_path}\n"


def test_run_returns_stdout_stderr_and_exit_code() -> None:
    completed = run(["sh", "-c", "cat; echo oops >&2; exit 4"], input="héllo", check=False)
    assert completed == ("héllo", "oops\n", 4)


def test_run_handles_more_output_than_a_pipe_buffer() -> None:
    big = "x" * 1_000_000
    assert run(["cat"], input=big).stdout == big


def test_run_error_has_the_exit_code_or_signal_and_the_output() -> None:
    with pytest.raises(StokerError, match=r"exit code 4: oops$"):
        run(["sh", "-c", "echo oops >&2; exit 4"])
    with pytest.raises(StokerError, match=r"killed by SIGKILL$"):
        run(["sh", "-c", "kill -KILL $$"])


def test_run_stops_the_group_on_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"STOKER_TEST_RUN_TIMEOUT": str(tmp_path)}
    monkeypatch.setenv(*next(iter(env.items())))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, ["sh", "-c", "sleep 600 & wait"], timeout_s=5)
        wait_until(lambda: len(find_processes_by_env(env)) == 2 or future.done())
        assert not future.done(), "the timeout was over before both processes ran"
        with pytest.raises(UnavailableError, match=r"within 5s$"):
            future.result()
    assert find_processes_by_env(env) == []


def test_run_neither_waits_for_a_background_child_nor_leaves_it_running() -> None:
    completed = run(["sh", "-c", "sleep 600 & echo $!"], timeout_s=60)
    assert not is_alive(int(completed.stdout))


def test_missing_program_has_a_hint() -> None:
    for call in (run, start):
        with pytest.raises(MissingProgramError, match=r"no-such-program.*PATH"):
            call(["no-such-program", "--version"])


def test_missing_cwd_is_not_reported_as_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        start([sys.executable, "-V"], cwd=tmp_path / "nowhere")


EXIT_WITH = """
import errno, os, sys, threading
from stoker.core.processes import exit_with_process

def forbidden(pid):
    raise OSError(errno.EPERM, "not permitted")

if sys.argv[2] == "forbidden":
    os.pidfd_open = forbidden
if sys.argv[2] == "missing":
    del os.pidfd_open
exit_with_process(int(sys.argv[1]))
print("watching", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("pidfd", ["allowed", "forbidden", "missing"])
def test_process_exits_with_another_one(shell: Shell, pidfd: str) -> None:
    """Also where `pidfd_open` is forbidden or missing, and although nobody has reaped the other process yet."""
    other = shell.start("exec sleep 600")
    with subprocess.Popen([sys.executable, "-c", EXIT_WITH, str(other.pid), pidfd], stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == b"watching\n"
        assert watching.poll() is None
        os.kill(other.pid, signal.SIGKILL)
        assert watching.wait(60) == 128 + signal.SIGTERM


def test_process_exits_at_once_if_the_other_one_is_gone(shell: Shell) -> None:
    other = shell.start("exit 0")
    other.stop()
    program = [sys.executable, "-c", EXIT_WITH, str(other.pid), "allowed"]
    assert subprocess.run(program, stdout=subprocess.DEVNULL, check=False).returncode == 128 + signal.SIGTERM

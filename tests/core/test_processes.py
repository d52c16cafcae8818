from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.core.processes import Process, run, start
from stoker.errors import MissingProgramError, NotFoundError, StokerError, UnavailableError
from tests.support.waiting import alive, eventually


class Shell:
    """Starts shells whose scripts write pids to files."""

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
        process.end(0)


def test_ends_grandchildren(shell: Shell) -> None:
    process = shell.start("sleep 600 & echo $! > child; wait")
    child = shell.pid("child")
    assert alive(child)
    assert process.end() == -signal.SIGTERM
    assert not alive(child)
    assert not alive(process.pid)
    assert not Path(f"/proc/{process.pid}").exists()  # reaped, not only dead


def test_ends_what_a_dead_leader_left(shell: Shell) -> None:
    process = shell.start("sleep 600 & echo $! > child; exit 3")
    assert process.wait(20) == 3
    child = shell.pid("child")
    assert alive(child)
    assert process.end() == 3
    assert not alive(child)


def test_kills_what_ignores_term(shell: Shell) -> None:
    process = shell.start("trap '' TERM; sleep 600 & echo $! > child; wait")
    child = shell.pid("child")  # inherits the ignored signal
    began = time.monotonic()
    assert process.end(grace_s=0.3) == -signal.SIGKILL
    assert time.monotonic() - began >= 0.3
    assert not alive(child)


def test_grace_lets_a_program_finish(shell: Shell) -> None:
    process = shell.start("trap 'echo saved > saved; exit 7' TERM; echo 1 > ready; while :; do sleep 0.01; done")
    shell.pid("ready")
    began = time.monotonic()
    assert process.end(grace_s=60) == 7
    assert time.monotonic() - began < 30
    assert (shell.folder / "saved").exists()


def test_end_is_idempotent_and_spares_others(shell: Shell) -> None:
    other = shell.start("sleep 600")
    process = shell.start("exit 0")
    assert process.wait(20) == 0
    assert process.end() == process.end() == process.poll() == process.wait(0) == 0
    assert other.poll() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_context_ends_it_on_errors(shell: Shell, kind: type[BaseException]) -> None:
    process = shell.start("sleep 600")
    with pytest.raises(kind), process:
        raise kind
    assert not alive(process.pid)


def test_a_second_interrupt_cuts_the_grace_short(shell: Shell) -> None:
    process = shell.start("trap 'echo 1 > told' TERM; echo 1 > ready; while :; do sleep 0.01; done")
    shell.pid("ready")

    def interrupt() -> None:
        shell.pid("told")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        process.end(grace_s=120)
    thread.join()
    assert not alive(process.pid)


def test_wait_in_another_thread_survives_the_end(shell: Shell) -> None:
    process = shell.start("sleep 600")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(process.wait(60)))
    thread.start()
    process.end()
    thread.join(60)
    assert codes == [-signal.SIGTERM]


def test_wait_times_out_and_the_process_lives(shell: Shell) -> None:
    process = shell.start("sleep 600")
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    assert process.poll() is None


def test_start_passes_environment_folder_and_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        out.open("wb") as file,
        start(["/bin/sh", "-c", "echo $A; pwd"], env={"A": "b"}, cwd=tmp_path, stdout=file) as it,
    ):
        assert it.wait(20) == 0
    assert out.read_text() == f"b\n{tmp_path}\n"


def test_run_returns_both_streams() -> None:
    done = run(["sh", "-c", "cat; echo oops >&2; exit 4"], input="héllo", check=False)
    assert done == ("héllo", "oops\n", 4)


def test_run_carries_more_than_a_pipe_holds() -> None:
    big = "x" * 1_000_000
    assert run(["cat"], input=big).stdout == big


def test_run_reports_failures_with_what_the_program_said() -> None:
    with pytest.raises(StokerError, match=r"failed with exit code 4: oops$"):
        run(["sh", "-c", "echo oops >&2; exit 4"])
    with pytest.raises(StokerError, match=r"was ended by SIGKILL$"):
        run(["sh", "-c", "kill -KILL $$"])


def test_run_ends_the_group_on_timeout(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with pytest.raises(UnavailableError, match="no end within 1s"):
        run(["sh", "-c", f"sleep 600 & echo $! > {child}; wait"], timeout_s=1)
    assert not alive(int(child.read_text()))


def test_run_does_not_wait_for_a_background_child_nor_leave_it() -> None:
    done = run(["sh", "-c", "sleep 600 & echo $!"], timeout_s=60)
    assert not alive(int(done.stdout))


def test_missing_program_has_a_hint() -> None:
    for call in (run, start):
        with pytest.raises(MissingProgramError, match=r"no-such-program.*PATH"):
            call(["no-such-program", "--version"])


def test_missing_folder_is_not_blamed_on_the_program(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        start([sys.executable, "-V"], cwd=tmp_path / "nowhere")

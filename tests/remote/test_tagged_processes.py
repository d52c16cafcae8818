"""Processes tagged by environment variables: found, signalled and stopped, and nothing else."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stoker.remote import tagged_processes
from stoker.remote.tagged_processes import format_survivors, list_tagged, signal_tagged, terminate_tagged

RUN = f"a-{os.getpid()}"
"""Other processes may run the same tests."""
TAGS = {"STOKER_RUN": RUN, "STOKER_SLOT": "worker/0"}


@contextmanager
def start(script: str, tags: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a shell with these variables, wait until it is ready, and kill it in the end."""
    process = subprocess.Popen(
        ["bash", "-c", script], env={**os.environ, **tags}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_only_processes_with_all_tags_are_stopped() -> None:
    sleep = "echo ready; exec sleep 600"
    with start(sleep, TAGS) as tagged, start(sleep, {"STOKER_RUN": RUN}) as other:
        assert list_tagged(TAGS) == [tagged.pid]
        signal_tagged(other.pid, TAGS, signal.SIGKILL)
        threading.Thread(target=tagged.wait).start()  # a zombie has no environment, but reap it all the same
        assert terminate_tagged(TAGS, 60.0) == []
        assert tagged.wait() == -signal.SIGTERM
        assert other.poll() is None
        other.kill()


def test_sigkill_follows_the_grace_period() -> None:
    with start("trap '' TERM; echo ready; while :; do sleep 0.05; done", TAGS) as stubborn:
        assert terminate_tagged(TAGS, 0.2) == []
        assert stubborn.wait() == -signal.SIGKILL


def test_processes_that_survive_sigkill_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagged_processes, "list_tagged", lambda *_: [4194305, 4194306])
    survivors = terminate_tagged(TAGS, 0.0, kill_timeout_s=0.1)
    assert survivors == [4194305, 4194306]
    assert "4194305, 4194306" in format_survivors(survivors)


def test_no_signal_to_another_process_with_the_same_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process exits after its environment was read; from then on, its pid may be that of any other."""
    kill, signalled = os.kill, list[int]()
    with start("echo ready; exec sleep 600", TAGS) as process:

        def exit_after_check(*_: object) -> bool:
            kill(process.pid, signal.SIGKILL)
            process.wait()
            return True

        monkeypatch.setattr(tagged_processes, "_has_tags", exit_after_check)
        monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
        signal_tagged(process.pid, TAGS, signal.SIGTERM)
    assert signalled == []


def test_process_without_environment_for_a_moment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while it executes another program."""
    with start("echo ready; while :; do sleep 0.2; done", TAGS) as process:
        reads = iter([io.BytesIO(), io.BytesIO()])
        monkeypatch.setattr(
            tagged_processes,
            "open",
            lambda path, mode: next(reads, None) or open(path, mode),  # noqa: SIM115
            raising=False,
        )
        assert list_tagged(TAGS, [process.pid]) == [process.pid]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, None])
def test_signals_without_pidfds(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel or a sandbox does not have them, nor Python 3.8."""

    def fail(_: int) -> int:
        raise OSError(number, os.strerror(number or 0))

    if number is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", fail)
    with start("echo ready; while :; do sleep 0.2; done", TAGS) as process:
        signal_tagged(process.pid, TAGS, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM

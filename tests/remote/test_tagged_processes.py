"""Processes tagged by environment variables: found, signalled and stopped, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from stoker.remote import tagged_processes
from stoker.remote.tagged_processes import format_survivors, list_tagged, signal_tagged, terminate_tagged

TAGS = {"STOKER_RUN": "a", "STOKER_SLOT": "worker/0"}


def start(script: str, tags: dict[str, str]) -> subprocess.Popen[str]:
    """Start a shell with these variables and wait until it is ready."""
    process = subprocess.Popen(
        ["bash", "-c", script], env={**os.environ, **tags}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_only_processes_with_all_tags_are_stopped() -> None:
    sleep = "echo ready; exec sleep 600"
    with start(sleep, TAGS) as tagged, start(sleep, {"STOKER_RUN": "a"}) as other:
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

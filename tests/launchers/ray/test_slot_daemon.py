"""The slot daemon of a Ray node, run on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.launchers.ray import slots
from stoker.remote.tagged_processes import list_tagged


@contextmanager
def slot_daemon(folder: Path, **request: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a slot daemon with a request, as an actor does."""
    folder.mkdir()
    for name, text in slots.read_daemon_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
    # Isolated, without site: nothing but what an actor writes can be imported.
    argv = [sys.executable, "-IS", "-c", run, str(folder), str(folder / "slot_daemon.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"tags": make_tags(folder), "env": {}, "cwd": str(folder), **request}) + "\n")
        process.stdin.flush()
        yield process
        process.stdin.close()
        assert process.wait(60) == 0
    assert not folder.exists()


def make_tags(folder: Path) -> dict[str, str]:
    return {"STOKER_RUN": str(folder), "STOKER_SLOT": "worker/0"}


def read_result(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@contextmanager
def leftover(folder: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that an earlier slot daemon left behind."""
    with subprocess.Popen(["bash", "-c", script], env={**os.environ, **make_tags(folder)}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_leftover_of_another_attempt_has_its_grace_period(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with leftover(tmp_path / "a", f"sleep 1.5; touch {saved}"):
        started = ["bash", "-c", f"test -e {saved} && exit 7"]
        with slot_daemon(tmp_path / "a", argv=started, grace_s=60) as process:
            assert read_result(process) == {"code": 7}


def test_leftover_of_a_killed_daemon_is_killed(tmp_path: Path) -> None:
    with (
        leftover(tmp_path / "a", "trap '' TERM; while :; do sleep 0.1; done") as process_left,
        slot_daemon(tmp_path / "a", grace_s=1) as process,
    ):
        assert read_result(process) == {"lost": ""}
        assert process_left.wait(60) == -signal.SIGKILL


def test_leftovers_of_a_slot_are_stopped(tmp_path: Path) -> None:
    script = f"setsid bash -c 'trap \"\" TERM; touch {tmp_path}/deaf; while :; do sleep 0.1; done' &"
    script += f" while ! test -e {tmp_path}/deaf; do sleep 0.05; done; exit 7"
    with slot_daemon(tmp_path / "a", argv=["bash", "-c", script], grace_s=1) as process:
        assert read_result(process) == {"code": 7}
        assert list_tagged(make_tags(tmp_path / "a")) == []


def test_missing_directory_is_distinguished_from_a_missing_program(tmp_path: Path) -> None:
    with slot_daemon(tmp_path / "a", argv=["/bin/true"], grace_s=1, cwd="/no/folder") as process:
        error = read_result(process)["error"]
        assert "directory /no/folder: No such file" in error
    with slot_daemon(tmp_path / "b", argv=["/no/program"], grace_s=1) as process:
        assert read_result(process) == {"error": "cannot start '/no/program': No such file or directory"}

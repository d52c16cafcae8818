"""The slot daemon of a Ray node, which an actor runs; here without a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.launchers.ray import slots
from stoker.remote.tagged_processes import list_tagged
from tests.support.ray import processes_matching
from tests.support.waiting import eventually, wait_until

pytest.importorskip("ray", reason="no package 'ray'")


@contextmanager
def slot_actor(folder: Path, **request: Any) -> Iterator[Any]:
    """Run a slot as an actor does; afterwards, nothing is left of its daemon."""
    from stoker.launchers.ray import driver

    folder.mkdir()
    actor = driver.SlotActor(slots.read_daemon_files())
    defaults = {"name": "worker/0", "tags": make_tags(folder), "env": {}, "cwd": str(folder), "lost_after_s": 60}
    actor.start({**defaults, **request})
    yield actor
    actor.close()
    assert eventually(lambda: not Path(actor._folder).exists())


def make_tags(folder: Path) -> dict[str, str]:
    return {"STOKER_RUN": str(folder), "STOKER_SLOT": "worker/0"}


def read_result(actor: Any) -> dict[str, Any]:
    """Return the result of a slot that writes no output."""
    response: dict[str, Any] = {"data": b""}
    while response == {"data": b""}:
        response = actor.read(0)
    assert response.pop("data") == b""
    return response


def exited(code: int) -> dict[str, Any]:
    return {"code": code, "oom": False, "survivors": []}


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
    with leftover(tmp_path / "a", f"trap 'sleep 1.5; touch {saved}; exit' TERM; while :; do sleep 0.1; done"):
        started = ["bash", "-c", f"test -e {saved} && exit 7"]
        with slot_actor(tmp_path / "a", argv=started, grace_s=60) as actor:
            assert read_result(actor) == exited(7)


def test_leftover_of_a_killed_daemon_is_killed(tmp_path: Path) -> None:
    with (
        leftover(tmp_path / "a", "trap '' TERM; while :; do sleep 0.1; done") as process_left,
        slot_actor(tmp_path / "a", argv=["true"], grace_s=1) as actor,
    ):
        assert read_result(actor) == exited(0)
        assert process_left.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("victims", [("python",), ("stoker-guard",), ("python", "stoker-guard")])
def test_slot_of_a_killed_daemon_is_stopped_before_it_is_lost(victims: tuple[str, ...], tmp_path: Path) -> None:
    deaf = ["bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    with slot_actor(tmp_path / "a", argv=deaf, grace_s=1) as actor:
        wait_until(lambda: bool(list_tagged(make_tags(tmp_path / "a"))))
        for pid in processes_matching(actor._folder, "SlotDaemon"):
            if Path(f"/proc/{pid}/comm").read_text().startswith(victims):
                os.kill(pid, signal.SIGKILL)
        assert "lost" in read_result(actor)
        assert eventually(lambda: not list_tagged(make_tags(tmp_path / "a")))


def test_slot_is_stopped_when_its_driver_does_not_read(tmp_path: Path) -> None:
    """A node that is cut off from the others stops its slot by itself, with the grace period."""
    script = f"trap 'sleep 0.5; touch {tmp_path}/saved; exit' TERM; while :; do sleep 0.1; done"
    with slot_actor(tmp_path / "a", argv=["bash", "-c", script], grace_s=60, lost_after_s=2) as actor:
        wait_until(lambda: bool(list_tagged(make_tags(tmp_path / "a"))))
        actor.read(0)  # renews the lease
        wait_until(lambda: not list_tagged(make_tags(tmp_path / "a")))
        assert "lost" in read_result(actor)
    assert (tmp_path / "saved").exists()


def test_leftovers_of_a_slot_are_stopped(tmp_path: Path) -> None:
    script = f"setsid bash -c 'trap \"\" TERM; touch {tmp_path}/deaf; while :; do sleep 0.1; done' &"
    script += f" while ! test -e {tmp_path}/deaf; do sleep 0.05; done; exit 7"
    with slot_actor(tmp_path / "a", argv=["bash", "-c", script], grace_s=1) as actor:
        assert read_result(actor) == exited(7)
        assert list_tagged(make_tags(tmp_path / "a")) == []


def test_missing_directory_is_distinguished_from_a_missing_program(tmp_path: Path) -> None:
    with slot_actor(tmp_path / "a", argv=["/bin/true"], grace_s=1, cwd="/no/folder") as actor:
        error = read_result(actor)["error"]
        assert "directory /no/folder: No such file" in error
    with slot_actor(tmp_path / "b", argv=["/no/program"], grace_s=1) as actor:
        assert read_result(actor) == {"error": "cannot start '/no/program': No such file or directory"}

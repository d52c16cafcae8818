"""The Ray driver without a cluster."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.launchers.ray import connection, slots
from stoker.launchers.ray import launcher as ray_launcher
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE

Response = Callable[[], Any]
"""What a call of an actor returns or raises."""
GRACE_S, LOST_AFTER_S = 0.2, 7.0


@dataclass(eq=False)
class Call:
    """A call of an actor; without a response, it never ends."""

    response: Response | None


class FakeRay:
    """Actors whose calls return given responses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("ray")
        from stoker.launchers.ray import driver

        self.dead_nodes: list[str] = []
        self.killed: list[Any] = []
        monkeypatch.setattr(driver, "NODE_FAILURE_S", 0.5)
        monkeypatch.setattr(driver, "EXIT_TIMEOUT_S", 0.2)
        monkeypatch.setattr(driver, "list_nodes", lambda: [{"NodeID": n, "Alive": False} for n in self.dead_nodes])
        monkeypatch.setattr(driver.ray, "wait", lambda refs, timeout: (self._wait(refs, timeout), []))
        monkeypatch.setattr(driver.ray, "get", lambda ref: ref.response())
        monkeypatch.setattr(driver.ray, "kill", self.killed.append)

    def _wait(self, refs: list[Any], timeout_s: float) -> list[Any]:
        done = [ref for ref in refs if ref.response]
        time.sleep(0 if done else timeout_s)
        return done

    def make_actor(self, *responses: Response) -> Any:
        """Return an actor that responds to `start` and then to each `read`."""
        rest, calls = list(responses), list[tuple[Any, ...]]()

        def respond(*args: Any) -> Call:
            calls.append(args)
            return Call(rest.pop(0) if rest else None)

        call = SimpleNamespace(remote=respond)
        sent: list[Any] = []
        """Requests to the slot daemon."""
        ignored = SimpleNamespace(remote=lambda *_: None)
        send = SimpleNamespace(remote=sent.append)
        return SimpleNamespace(start=call, read=call, send=send, close=ignored, sent=sent, rest=rest, calls=calls)

    def run(self, actors: dict[str, Any], stop_requests: int = 0, restarts: dict[str, int] | None = None) -> None:
        """Run slots, one on each actor, to their end."""
        from stoker.launchers.ray import driver

        command = {"argv": ["true"], "env": {}, "cwd": None}
        slots, limits = dict.fromkeys(actors, command), {"grace_s": GRACE_S, "lost_after_s": LOST_AFTER_S}
        request = {"slots": slots, "bundles": [{}] * len(slots), "strategy": "PACK", "tags": {}, **limits}
        control: Any = SimpleNamespace(stop_requests=stop_requests, take_stack_request=dict, restarts=restarts or {})
        attempt = driver.Driver(request, control, driver.JsonFrameWriter())
        for index, name in enumerate(actors):
            keys = ("address", "python", "workdir", "home", "interface", "port", "node")
            attempt._nodes[name] = dict.fromkeys(keys, f"node{index}")
        attempt._actors.update(actors)
        attempt._forward_output({attempt._start(name): name for name in actors})


def fail(name: str, text: str = "") -> Response:
    """Return a response that raises an exception of Ray."""

    def respond() -> None:
        raise getattr(pytest.importorskip("ray.exceptions"), name)(*([text] if text else []))

    return respond


def started() -> None:
    """Respond to a start."""


def exited(code: int = 0) -> dict[str, Any]:
    return {"data": b"", "code": code, "oom": False, "survivors": []}


def read_ends(capfd: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the last frame of each slot, in their order."""
    return {frame["slot"]: frame for frame in read_frames(capfd) if "code" in frame}


def read_frames(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return all frames that the driver has written."""
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(connection.FRAME_PREFIX)]
    return [json.loads(line.removeprefix(connection.FRAME_PREFIX)) for line in lines]


def test_slot_that_cannot_be_started_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = FakeRay(monkeypatch)
    actor = ray.make_actor(fail("RayError", "no space left"))
    ray.run({"worker/0": actor})
    (end,) = read_ends(capfd).values()
    assert end["code"] == LOST_EXIT_CODE
    assert re.search("node0 .*: no space left$", end["error"])
    assert ray.killed == [actor]  # nothing reads its output any more
    from stoker.launchers.ray import driver

    with pytest.raises(RuntimeError, match="was not started"):
        driver.SlotActor({}).read(0)


def test_slot_whose_node_does_not_respond_may_be_running(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = FakeRay(monkeypatch)
    ray.run({"worker/0": ray.make_actor(started), "worker/1": ray.make_actor(started, exited)}, stop_requests=1)
    ends = read_ends(capfd)
    assert (ends["worker/0"]["code"], ends["worker/0"]["lease_s"]) == (LOST_EXIT_CODE, LOST_AFTER_S)
    assert "node0" in ends["worker/0"]["error"]
    assert ends["worker/1"]["code"] == 0


def test_stop_during_the_start_of_a_slot_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch)
    actor = ray.make_actor(lambda: actor.sent.append("started"), exited)
    ray.run({"worker/0": actor}, stop_requests=1)
    stop = {"op": "stop", "level": 1}
    assert actor.sent == [stop, "started", stop]


def test_slot_is_started_again_as_often_as_the_client_wants(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only after it has exited, and with the output of the new start from its beginning."""
    ray, restarts = FakeRay(monkeypatch), {"worker/1": 1}
    output = [lambda: {"data": b"first"}, lambda: exited(7), started, lambda: {"data": b"again"}]
    actor = ray.make_actor(started, *output, exited)

    def end() -> dict[str, Any]:
        return exited() if not actor.rest else {"data": b""}

    ray.run({"worker/0": ray.make_actor(started, *[end] * 20), "worker/1": actor}, restarts=restarts)
    frames = [frame for frame in read_frames(capfd) if frame["slot"] == "worker/1"]
    assert [frame.get("data") or frame["code"] for frame in frames] == ["first", 7, "again", 0]
    assert [args[0] for args in actor.calls if isinstance(args[0], int)] == [0, 5, 0, 5]


def test_slot_is_not_started_again_once_all_are_stopped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = FakeRay(monkeypatch)
    actors = {"worker/0": ray.make_actor(started, exited), "worker/1": ray.make_actor(started, lambda: exited(7))}
    ray.run(actors, stop_requests=1, restarts={"worker/1": 1})
    assert read_ends(capfd)["worker/1"]["code"] == 7


def test_lost_slots_do_not_delay_others(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A lost node is distinguished from a killed actor; Ray may need a moment to know."""
    ray = FakeRay(monkeypatch)
    ray.dead_nodes = ["node1"]
    killed, lost = (ray.make_actor(started, fail("RayActorError")) for _ in range(2))
    other = ray.make_actor(started, lambda: {"data": b"output"}, lambda: {"data": b""}, exited)
    ray.run({"worker/0": killed, "worker/1": lost, "worker/2": other})
    ends = read_ends(capfd)
    assert list(ends) == ["worker/1", "worker/2", "worker/0"]
    assert [ends[f"worker/{index}"].get("lease_s") for index in range(3)] == [0, LOST_AFTER_S, None]
    assert "actor on node0 was killed" in ends["worker/0"]["error"]
    assert "node node1 was lost" in ends["worker/1"]["error"]


def test_constants_repeated_in_standalone_files_agree() -> None:
    def constants(name: str) -> dict[str, Any]:
        values_by_name = {}
        for node in ast.parse(Path(slots.__file__).with_name(name).read_text()).body:
            if isinstance(node, ast.Assign):
                names = [part.id for part in ast.walk(node.targets[0]) if isinstance(part, ast.Name)]
                values = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                values_by_name |= dict(zip(names, values, strict=False))
        return values_by_name

    driver = constants("driver.py")
    assert driver["FRAME_PREFIX"] == connection.FRAME_PREFIX
    for name in ("PYTHON", "WORKDIR", "PORT", "INTERFACE"):
        assert driver[name] == getattr(ray_launcher, name)
    assert f'f"{driver["HOME"]}/' in Path(slots.__file__).read_text()
    assert driver["LOST_EXIT_CODE"] == LOST_EXIT_CODE

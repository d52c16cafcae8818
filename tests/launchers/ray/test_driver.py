"""The Ray driver without a cluster."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.launchers.ray import connection, slots
from stoker.launchers.ray import launcher as ray_launcher
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE


def test_slot_that_cannot_be_started_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    from stoker.launchers.ray import driver

    def fail(ref: object) -> None:
        raise exceptions.RayError("no space left")

    monkeypatch.setattr(driver.ray, "get", fail)
    monkeypatch.setattr(driver, "NODE_FAILURE_S", 0)
    command = {"argv": ["true"], "env": {}, "cwd": None}
    request = {"slots": {"worker/0": command}, "bundles": [{}], "strategy": "PACK", "tags": {}, "grace_s": 1}
    control: Any = SimpleNamespace(stop_requests=0)
    attempt = driver.Driver(request, control, driver.JsonFrameWriter(), can_scale=True)
    node = dict.fromkeys(("address", "python", "workdir", "home", "interface", "port"), "node1")
    attempt._nodes["worker/0"] = node
    attempt._actors["worker/0"] = SimpleNamespace(start=SimpleNamespace(remote=lambda _: None))
    attempt._start_slots()
    attempt._forward_output()  # returns at once
    frames = [json.loads(line.removeprefix(driver.FRAME_PREFIX)) for line in capfd.readouterr().out.splitlines()]
    assert frames[-1]["code"] == LOST_EXIT_CODE
    assert re.search("node1 .*: no space left$", frames[-1]["error"])
    with pytest.raises(RuntimeError, match="was not started"):
        driver.SlotActor({}).read(0)


def test_placement_obstacles() -> None:
    pytest.importorskip("ray")
    from stoker.launchers.ray.driver import placement_obstacle

    nodes = [{"CPU": 2.0}, {"CPU": 2.0}]
    for bundle, count, strategy, free, expected, is_too_small in (
        ({"CPU": 3}, 1, "PACK", {}, "no node is large enough", True),
        ({"CPU": 2}, 3, "PACK", {}, "cluster is too small", True),
        ({"CPU": 2}, 2, "PACK", {"CPU": 2}, "in use", False),
        ({"CPU": 2}, 1, "PACK", {"CPU": 2}, "where pack does not fit", False),
        ({"CPU": 1}, 3, "STRICT_SPREAD", {"CPU": 4}, "strict_spread needs 3 nodes, 2 are", True),
        ({"CPU": 1}, 3, "STRICT_PACK", {"CPU": 4}, "strict_pack needs one node", True),
    ):
        obstacle = placement_obstacle([bundle] * count, strategy, nodes, free)  # type: ignore[arg-type]
        assert expected in obstacle[0]
        assert obstacle[1] is is_too_small


def test_placement_obstacles_of_unequal_bundles() -> None:
    pytest.importorskip("ray")
    from stoker.launchers.ray.driver import placement_obstacle

    nodes = [{"CPU": 4.0}, {"CPU": 1.0}]
    for sizes, strategy, expected, is_too_small in (
        ((4, 1), "STRICT_SPREAD", "where strict_spread does not fit", False),
        ((4, 4), "PACK", "cluster is too small", True),
        ((3, 1, 2), "PACK", "cluster is too small", True),
        ((5, 1), "PACK", "no node is large enough", True),
        ((1, 1, 1), "STRICT_SPREAD", "strict_spread needs 3 nodes", True),
        ((2, 2), "STRICT_SPREAD", "strict_spread needs 2 nodes, 1 are", True),
        ((4, 1), "STRICT_PACK", "strict_pack needs one node", True),
        ((3, 1), "STRICT_PACK", "where strict_pack does not fit", False),
    ):
        bundles = [{"CPU": float(size)} for size in sizes]
        obstacle = placement_obstacle(bundles, strategy, nodes, {"CPU": 5.0})
        assert expected in obstacle[0], (sizes, strategy, obstacle)
        assert obstacle[1] is is_too_small, (sizes, strategy)


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

"""What would be started on many hosts, once all is known of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.topologies.torchrun import Torchrun
from stoker.jobs.topology import Command, Slot, slots_of
from stoker.launchers.plan import moved
from stoker.launchers.ssh.client import Client
from stoker.launchers.ssh.launcher import Look, Route, plan_of
from stoker.launchers.ssh.plan import PORTS, SshPlan, command_at
from tests.launchers.contract import job_of


def look(host: str, **more: Any) -> Look:
    found = {
        "workdir": f"/home/{host}",
        "python": f"/opt/{host}/python",
        "modules": {"torch": "2.13.0", "stoker": None},
        "identity": [],
        "cores": 8,
        "rsync": True,
        "skew": 0.0,
    }
    return Look(host, {**found, **more})


def planned(count: int, **keys: Any) -> SshPlan:
    hosts = [f"node{number}" for number in range(count)]
    job = job_of(program={"script": "a.py"}, topology="torchrun", workers=count, ssh={"hosts": hosts}, **keys)
    routes = {host: Route(f"10.0.0.{number + 1}", f"eth{number}") for number, host in enumerate(hosts)}
    spread = dict(zip(slots_of(job), hosts, strict=True))
    return plan_of(job, Client(), spread, {host: look(host) for host in hosts}, routes, 29500)


def test_each_slot_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However unlike the hosts are: else a hundred would take ten thousand."""
    monkeypatch.chdir(tmp_path)
    asked: list[Slot] = []
    command = Torchrun.command

    def counting(self: Torchrun, job: Any, slot: Slot, book: Any) -> Command:
        asked.append(slot)
        return command(self, job, slot, book)

    monkeypatch.setattr(Torchrun, "command", counting)
    plan = planned(100)
    assert len(asked) == len(plan.slots) == 100
    last = plan.slots["worker/99"]
    assert last.argv[0] == "/opt/node99/python"
    assert last.env["GLOO_SOCKET_IFNAME"] == "eth99"
    assert last.argv[last.argv.index("--master-addr") + 1] == "10.0.0.1"


@pytest.mark.parametrize(
    ("argv", "after"),
    [
        (("t", "--master-port", "29500", "a.py", "29500"), ("t", "--master-port", "29503", "a.py", "29500")),
        (("t", "--rdzv-endpoint", "10.0.0.1:29500"), ("t", "--rdzv-endpoint", "10.0.0.1:29503")),
    ],
)
def test_a_command_that_meets_at_another_port(argv: tuple[str, ...], after: tuple[str, ...]) -> None:
    command = Command(argv, {"MASTER_PORT": "29500", "OTHER": "29500"})
    assert moved(command, 29500, 29503) == Command(after, {"MASTER_PORT": "29503", "OTHER": "29500"})


def test_every_attempt_but_the_first_meets_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(2)
    found = [command_at(plan, Slot("worker", index), "run", attempt) for attempt in (0, 1, 2) for index in (0, 1)]
    ports = [int(one.argv[one.argv.index("--master-port") + 1]) for one in found]
    assert ports[:2] == [29500, 29500]
    assert ports[2] == ports[3] != ports[4] == ports[5]
    assert set(ports[2:]) <= set(PORTS)
    named = planned(2, port=4000)
    assert command_at(named, Slot("worker", 1), "run", 3) == named.slots["worker/1"]


def test_tasks_move_together_and_apart_from_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roles = {"ps": {"count": 1, "port": 7000}}
    job = job_of(program={"script": "a.py"}, topology="tf-ps", workers=2, roles=roles, ssh={"hosts": ["a", "b"]})
    hosts = {Slot("chief", 0): "a", Slot("worker", 0): "a", Slot("worker", 1): "b", Slot("ps", 0): "a"}
    routes = {"a": Route("10.0.0.1", "eth0"), "b": Route("10.0.0.2", "eth0")}
    ports = {Slot("chief", 0): 29500, Slot("worker", 0): 29501, Slot("ps", 0): 7000, Slot("worker", 1): 29500}
    plan = plan_of(job, Client(), hosts, {host: look(host) for host in "ab"}, routes, 29500, ports)
    assert plan.ports == {"chief/0": 29500, "worker/0": 29501, "worker/1": 29500}

    def cluster(slot: Slot, attempt: int) -> Any:
        return json.loads(command_at(plan, slot, "run", attempt).env["TF_CONFIG"])["cluster"]

    first = {"chief": ["10.0.0.1:29500"], "worker": ["10.0.0.1:29501", "10.0.0.2:29500"], "ps": ["10.0.0.1:7000"]}
    assert all(cluster(slot, 0) == first for slot in hosts)
    (again,) = {json.dumps(cluster(slot, 1)) for slot in hosts}  # all of them agree
    moved_to = json.loads(again)
    assert moved_to["ps"] == first["ps"]  # as the job names it
    start = int(moved_to["chief"][0].rpartition(":")[2])
    assert moved_to["worker"] == [f"10.0.0.1:{start + 1}", f"10.0.0.2:{start}"]
    assert command_at(plan, Slot("worker", 0), "run", 0).env.get("CUDA_VISIBLE_DEVICES") is None
    assert command_at(plan, Slot("ps", 0), "run", 0).env["CUDA_VISIBLE_DEVICES"] == ""

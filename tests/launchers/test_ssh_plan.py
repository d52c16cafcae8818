"""What would be started on many hosts, once all is known of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launchers.contract import job_of
from stoker.jobs.topologies.torchrun import Torchrun
from stoker.jobs.topology import Command, Slot, slots_of
from stoker.launchers.plan import moved
from stoker.launchers.ssh.hosts import Client
from stoker.launchers.ssh.launcher import Look, Route, plan_of
from stoker.launchers.ssh.plan import SshPlan


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

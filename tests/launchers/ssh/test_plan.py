"""The plan of the ssh launcher for probed hosts: commands, addresses and ports of every slot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.topologies.torchrun import Torchrun
from stoker.jobs.topology import Command, Slot, list_slots
from stoker.launchers.plan import with_rendezvous_port
from stoker.launchers.ssh.client import SshClient
from stoker.launchers.ssh.launcher import SshLauncher, build_plan, describe_unused_hosts
from stoker.launchers.ssh.plan import RETRY_PORTS, SshPlan, command_for_attempt
from stoker.launchers.ssh.preflight import HostFacts, Route
from tests.launchers.contract import job_of


def host_facts(host: str, **more: Any) -> HostFacts:
    facts = {
        "workdir": f"/home/{host}",
        "python": f"/opt/{host}/python",
        "modules": {"torch": "2.13.0", "stoker": None},
        "identity": [],
        "cores": 8,
        "rsync": True,
        "clock_skew_s": 0.0,
    }
    return HostFacts(host, {**facts, **more})


def plan_for(count: int, **keys: Any) -> SshPlan:
    return plan_on([f"node{number}" for number in range(count)], workers=count, **keys)


def plan_on(hosts: list[str], **keys: Any) -> SshPlan:
    """Plan a job whose workers run on these hosts."""
    job = job_of(program={"script": "a.py"}, topology="torchrun", ssh={"hosts": hosts}, **keys)
    routes = {host: Route(f"10.0.0.{number + 1}", f"eth{number}") for number, host in enumerate(hosts)}
    slot_hosts = dict(zip(list_slots(job), hosts, strict=True))
    return build_plan(job, SshClient(), slot_hosts, {host: host_facts(host) for host in hosts}, routes, 29500)


@pytest.mark.parametrize(
    ("keys", "workers", "unused"),
    [
        ({}, 2, False),
        ({"topology": "mpi"}, 2, False),
        ({"topology": "tf-ps"}, 2, False),
        ({"topology": "tf-mirrored"}, 2, False),
        ({"topology": "single"}, 1, True),
        ({"topology": "single", "workers": "all"}, 1, True),
        ({"workers": 1}, 1, True),
        ({"workers": "all"}, 2, False),
        ({"workers": {"min": 1, "max": 2}}, 2, False),
        ({"ssh": {"hosts": ["a", "b:2"]}}, 3, False),
        ({"ssh": {"hosts": ["a:2"]}}, 2, False),
        ({"ssh": {"hosts": ["a:2"]}, "workers": 1}, 1, False),
        ({"ssh": {"hosts": ["@hosts"]}}, 4, False),
        ({"ssh": {"hosts": ["@hosts"]}, "workers": 3}, 3, True),
    ],
)
def test_all_listed_hosts_are_used_unless_workers_says_otherwise(
    keys: dict[str, Any], workers: int, unused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a\nb slots=2\nc\n")
    defaults = {"program": {"script": "a.py"}, "topology": "torchrun", "ssh": {"hosts": ["a", "b"]}}
    job = SshLauncher().resolve_paths(job_of(**{**defaults, **keys}))
    assert job.max_workers == workers
    assert bool(describe_unused_hosts(job)) == unused


def test_each_slot_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However different the hosts are; otherwise a hundred slots would take ten thousand renderings."""
    monkeypatch.chdir(tmp_path)
    rendered: list[Slot] = []
    command = Torchrun.command

    def counting(self: Torchrun, job: Any, slot: Slot, book: Any) -> Command:
        rendered.append(slot)
        return command(self, job, slot, book)

    monkeypatch.setattr(Torchrun, "command", counting)
    plan = plan_for(100)
    assert len(rendered) == len(plan.slots) == 100
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
def test_rendezvous_port_is_replaced(argv: tuple[str, ...], after: tuple[str, ...]) -> None:
    command = Command(argv, {"MASTER_PORT": "29500", "OTHER": "29500"})
    assert with_rendezvous_port(command, 29500, 29503) == Command(after, {"MASTER_PORT": "29503", "OTHER": "29500"})


def test_every_attempt_has_another_rendezvous_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_for(2)
    commands = [
        command_for_attempt(plan, Slot("worker", index), "run", attempt) for attempt in (0, 1, 2) for index in (0, 1)
    ]
    ports = [int(command.argv[command.argv.index("--master-port") + 1]) for command in commands]
    assert ports[:2] == [29500, 29500]
    assert ports[2] == ports[3] != ports[4] == ports[5]
    assert set(ports[2:]) <= set(RETRY_PORTS)
    with_port = plan_for(2, port=4000)
    assert command_for_attempt(with_port, Slot("worker", 1), "run", 3) == with_port.slots["worker/1"]


def test_tensorflow_ports_of_a_retry_are_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roles = {"ps": {"count": 1, "port": 7000}}
    job = job_of(program={"script": "a.py"}, topology="tf-ps", workers=2, roles=roles, ssh={"hosts": ["a", "b"]})
    hosts = {Slot("chief", 0): "a", Slot("worker", 0): "a", Slot("worker", 1): "b", Slot("ps", 0): "a"}
    routes = {"a": Route("10.0.0.1", "eth0"), "b": Route("10.0.0.2", "eth0")}
    ports = {Slot("chief", 0): 29500, Slot("worker", 0): 29501, Slot("ps", 0): 7000, Slot("worker", 1): 29500}
    plan = build_plan(job, SshClient(), hosts, {host: host_facts(host) for host in "ab"}, routes, 29500, ports)
    assert plan.ports == {"chief/0": 29500, "worker/0": 29501, "worker/1": 29500}

    def cluster(slot: Slot, attempt: int) -> Any:
        return json.loads(command_for_attempt(plan, slot, "run", attempt).env["TF_CONFIG"])["cluster"]

    first = {"chief": ["10.0.0.1:29500"], "worker": ["10.0.0.1:29501", "10.0.0.2:29500"], "ps": ["10.0.0.1:7000"]}
    assert all(cluster(slot, 0) == first for slot in hosts)
    (again,) = {json.dumps(cluster(slot, 1)) for slot in hosts}  # all slots agree
    retry_cluster = json.loads(again)
    assert retry_cluster["ps"] == first["ps"]  # set in the job file
    start = int(retry_cluster["chief"][0].rpartition(":")[2])
    assert retry_cluster["worker"] == [f"10.0.0.1:{start + 1}", f"10.0.0.2:{start}"]
    assert command_for_attempt(plan, Slot("worker", 0), "run", 0).env.get("CUDA_VISIBLE_DEVICES") is None
    assert command_for_attempt(plan, Slot("ps", 0), "run", 0).env["CUDA_VISIBLE_DEVICES"] == ""

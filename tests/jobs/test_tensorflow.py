"""Topologies tf-ps and tf-mirrored: roles, TF_CONFIG and commands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.errors import SpecError
from stoker.jobs.spec import JobSpec
from stoker.jobs.topologies.tensorflow import replace_ports
from stoker.jobs.topology import AddressBook, Command, Slot, lead_slots, list_slots, observer_slots, render_commands


def make_job(**keys: Any) -> JobSpec:
    base = {"name": "j", "topology": "tf-ps", "program": {"script": "train.py"}, "profile": {"every": 0}}
    return decode({**base, **keys}, JobSpec)


def render(job: JobSpec, **book: Any) -> dict[Slot, Command]:
    hosts = {slot: f"j-{slot.filename}" for slot in list_slots(job)}
    commands = render_commands(job, AddressBook(**{"hosts": hosts, "port": 5000, "python": "py", **book}))
    return {slot: command for slot, command in commands.items() if isinstance(command, Command)}


def config(command: Command) -> Any:
    return json.loads(command.env["TF_CONFIG"])


def test_every_task_gets_the_cluster_and_its_own_index() -> None:
    commands = render(make_job(workers=2, roles={"ps": {"count": 2, "port": 6000}, "evaluator": {"count": 1}}))
    cluster = {
        "chief": ["j-chief-0:5000"],
        "worker": ["j-worker-0:5000", "j-worker-1:5000"],
        "ps": ["j-ps-0:6000", "j-ps-1:6000"],
    }
    assert [str(slot) for slot in commands] == ["chief/0", "worker/0", "worker/1", "ps/0", "ps/1", "evaluator/0"]
    for slot, command in commands.items():
        assert config(command) == {"cluster": cluster, "task": {"type": slot.role, "index": slot.index}}
        assert json.loads(command.env["CLUSTER_CONFIG"]) == {"ps": cluster["ps"], "worker": cluster["worker"]}
        assert command.env["POD_NAME"] == f"{slot.role}-{slot.index}"
        assert command.argv == ("py", "train.py")


def test_tf_mirrored_has_workers_only() -> None:
    commands = render(make_job(topology="tf-mirrored", workers=3))
    workers = [f"j-worker-{index}:5000" for index in range(3)]
    assert [config(command) for command in commands.values()] == [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(3)
    ]
    assert json.loads(commands[Slot("worker", 1)].env["CLUSTER_CONFIG"]) == {"ps": [], "worker": workers}


@pytest.mark.parametrize(
    ("keys", "lead"),
    [
        ({"workers": 2}, ["chief/0"]),
        ({"workers": 2, "roles": {"chief": {"count": 0}}}, ["worker/0", "worker/1"]),
        ({"workers": 2, "topology": "tf-mirrored"}, ["worker/0", "worker/1"]),
    ],
)
def test_lead_slots(keys: dict[str, Any], lead: list[str]) -> None:
    assert sorted(map(str, lead_slots(make_job(**keys)))) == lead


def test_observers_are_not_part_of_the_cluster() -> None:
    roles = {"evaluator": {"count": 1}, "tensorboard": {"count": 1, "port": 7000, "logdir": "gs://bucket/logs"}}
    job = make_job(topology="tf-mirrored", roles=roles)
    assert sorted(map(str, observer_slots(job))) == ["evaluator/0", "tensorboard/0"]
    commands = render(job)
    assert list(config(commands[Slot("worker", 0)])["cluster"]) == ["worker"]
    args = ("-m", "tensorboard.main", "--logdir", "gs://bucket/logs", "--bind_all", "--port", "7000")
    assert commands[Slot("tensorboard", 0)].argv == ("py", *args)
    assert config(commands[Slot("evaluator", 0)])["task"] == {"type": "evaluator", "index": 0}


def test_tensorboard_shows_checkpoints_and_listens_on_loopback_for_local_jobs() -> None:
    job = make_job(topology="tf-mirrored", checkpoint={"dir": "/ckpt"}, roles={"tensorboard": {"count": 1}})
    commands = render(job, hosts=dict.fromkeys(list_slots(job), "127.0.0.1"), ports={Slot("tensorboard", 0): 7001})
    assert commands[Slot("tensorboard", 0)].argv[3:] == (
        *("--logdir", "/ckpt", "--host", "127.0.0.1", "--port", "7001"),
    )


def test_tensorboard_needs_a_logdir() -> None:
    with pytest.raises(SpecError, match=r"roles\.tensorboard\.logdir: .*checkpoint\.dir"):
        make_job(roles={"tensorboard": {"count": 1}})


def test_role_with_its_own_program() -> None:
    roles = {"evaluator": {"count": 1, "program": {"command": ["/eval.sh"], "args": ["--once"], "cwd": "/models"}}}
    commands = render(make_job(roles=roles, program={"module": "train", "cwd": "/code"}))
    assert (commands[Slot("evaluator", 0)].argv, commands[Slot("evaluator", 0)].cwd) == (
        ("/eval.sh", "--once"),
        "/models",
    )
    assert (commands[Slot("ps", 0)].argv, commands[Slot("ps", 0)].cwd) == (("py", "-m", "train"), "/code")


def test_replace_ports_in_the_whole_cluster() -> None:
    job = make_job(workers=2, checkpoint={"dir": "/c"}, roles={"ps": {"port": 6000}, "tensorboard": {"count": 1}})
    ports = {Slot("worker", 0): 1, Slot("worker", 1): 2, Slot("chief", 0): 3, Slot("tensorboard", 0): 4}
    for slot, command in render(job).items():
        replaced = replace_ports(command, slot, ports)
        if slot.role == "tensorboard":
            assert replaced.argv == (*command.argv[:-1], "4")
            continue
        assert config(replaced) == {
            "cluster": {"chief": ["j-chief-0:3"], "worker": ["j-worker-0:1", "j-worker-1:2"], "ps": ["j-ps-0:6000"]},
            "task": config(command)["task"],
        }
        assert json.loads(replaced.env["CLUSTER_CONFIG"])["worker"] == ["j-worker-0:1", "j-worker-1:2"]
        assert replaced.argv == command.argv

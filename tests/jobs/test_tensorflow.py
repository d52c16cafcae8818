"""The two TensorFlow topologies, as values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.errors import SpecError
from stoker.jobs.spec import Job
from stoker.jobs.topologies.tensorflow import at_ports
from stoker.jobs.topology import AddressBook, Command, Slot, commands, lead_slots, onlookers, slots_of


def job(**keys: Any) -> Job:
    base = {"name": "j", "topology": "tf-ps", "program": {"script": "train.py"}, "profile": {"every": 0}}
    return decode({**base, **keys}, Job)


def rendered(one: Job, **book: Any) -> dict[Slot, Command]:
    hosts = {slot: f"j-{slot.filename}" for slot in slots_of(one)}
    found = commands(one, AddressBook(**{"hosts": hosts, "port": 5000, "python": "py", **book}))
    return {slot: command for slot, command in found.items() if isinstance(command, Command)}


def config(command: Command) -> Any:
    return json.loads(command.env["TF_CONFIG"])


def test_every_task_finds_the_cluster_and_itself() -> None:
    found = rendered(job(workers=2, roles={"ps": {"count": 2, "port": 6000}, "evaluator": {"count": 1}}))
    cluster = {
        "chief": ["j-chief-0:5000"],
        "worker": ["j-worker-0:5000", "j-worker-1:5000"],
        "ps": ["j-ps-0:6000", "j-ps-1:6000"],
    }
    assert [str(slot) for slot in found] == ["chief/0", "worker/0", "worker/1", "ps/0", "ps/1", "evaluator/0"]
    for slot, command in found.items():
        assert config(command) == {"cluster": cluster, "task": {"type": slot.role, "index": slot.index}}
        assert json.loads(command.env["CLUSTER_CONFIG"]) == {"ps": cluster["ps"], "worker": cluster["worker"]}
        assert command.env["POD_NAME"] == f"{slot.role}-{slot.index}"
        assert command.argv == ("py", "train.py")


def test_workers_alone() -> None:
    found = rendered(job(topology="tf-mirrored", workers=3))
    workers = [f"j-worker-{index}:5000" for index in range(3)]
    assert [config(command) for command in found.values()] == [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(3)
    ]
    assert json.loads(found[Slot("worker", 1)].env["CLUSTER_CONFIG"]) == {"ps": [], "worker": workers}


@pytest.mark.parametrize(
    ("keys", "leads"),
    [
        ({"workers": 2}, ["chief/0"]),
        ({"workers": 2, "roles": {"chief": {"count": 0}}}, ["worker/0", "worker/1"]),
        ({"workers": 2, "topology": "tf-mirrored"}, ["worker/0", "worker/1"]),
    ],
)
def test_whose_end_is_the_jobs(keys: dict[str, Any], leads: list[str]) -> None:
    assert sorted(map(str, lead_slots(job(**keys)))) == leads


def test_what_looks_on_may_fail_and_is_in_no_cluster() -> None:
    roles = {"evaluator": {"count": 1}, "tensorboard": {"count": 1, "port": 7000, "logdir": "gs://bucket/logs"}}
    one = job(topology="tf-mirrored", roles=roles)
    assert sorted(map(str, onlookers(one))) == ["evaluator/0", "tensorboard/0"]
    found = rendered(one)
    assert list(config(found[Slot("worker", 0)])["cluster"]) == ["worker"]
    words = ("-m", "tensorboard.main", "--logdir", "gs://bucket/logs", "--bind_all", "--port", "7000")
    assert found[Slot("tensorboard", 0)].argv == ("py", *words)
    assert config(found[Slot("evaluator", 0)])["task"] == {"type": "evaluator", "index": 0}


def test_tensorboard_shows_the_checkpoints_and_here_only_to_this_machine() -> None:
    one = job(topology="tf-mirrored", checkpoint={"dir": "/ckpt"}, roles={"tensorboard": {"count": 1}})
    found = rendered(one, hosts=dict.fromkeys(slots_of(one), "127.0.0.1"), ports={Slot("tensorboard", 0): 7001})
    assert found[Slot("tensorboard", 0)].argv[3:] == (*("--logdir", "/ckpt", "--host", "127.0.0.1", "--port", "7001"),)


def test_tensorboard_has_something_to_show() -> None:
    with pytest.raises(SpecError, match="says what to show"):
        job(roles={"tensorboard": {"count": 1}})


def test_a_role_with_a_program_of_its_own() -> None:
    roles = {"evaluator": {"count": 1, "program": {"command": ["/eval.sh"], "args": ["--once"], "cwd": "/models"}}}
    found = rendered(job(roles=roles, program={"module": "train", "cwd": "/code"}))
    assert (found[Slot("evaluator", 0)].argv, found[Slot("evaluator", 0)].cwd) == (("/eval.sh", "--once"), "/models")
    assert (found[Slot("ps", 0)].argv, found[Slot("ps", 0)].cwd) == (("py", "-m", "train"), "/code")


def test_other_ports_for_all_at_once() -> None:
    one = job(workers=2, checkpoint={"dir": "/c"}, roles={"ps": {"port": 6000}, "tensorboard": {"count": 1}})
    moves = {Slot("worker", 0): 1, Slot("worker", 1): 2, Slot("chief", 0): 3, Slot("tensorboard", 0): 4}
    for slot, command in rendered(one).items():
        moved = at_ports(command, slot, moves)
        if slot.role == "tensorboard":
            assert moved.argv == (*command.argv[:-1], "4")
            continue
        assert config(moved) == {
            "cluster": {"chief": ["j-chief-0:3"], "worker": ["j-worker-0:1", "j-worker-1:2"], "ps": ["j-ps-0:6000"]},
            "task": config(command)["task"],
        }
        assert json.loads(moved.env["CLUSTER_CONFIG"])["worker"] == ["j-worker-0:1", "j-worker-1:2"]
        assert moved.argv == command.argv

"""Commands of slots, as values."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.jobs.spec import Job
from stoker.jobs.topology import AddressBook, Command, Slot, commands, lead_slots, slots_of

RUN = ["py", "-m", "torch.distributed.run"]


def job(**keys: Any) -> Job:
    base = {"name": "j", "program": {"script": "train.py", "args": ["--lr", "0.1"]}, "profile": {"every": 0}}
    return decode({**base, **keys}, Job)


def rendered(one: Job, cores: int = 8) -> dict[Slot, Command]:
    hosts = {slot: f"host-{slot.index}" for slot in slots_of(one)}
    book = AddressBook(hosts=hosts, port=29500, python="py", cores=cores, env={"GLOO_SOCKET_IFNAME": "eth0"})
    found = {slot: command for slot, command in commands(one, book).items() if isinstance(command, Command)}
    assert found.keys() == hosts.keys()
    return found


def test_a_fixed_world_meets_at_worker_0_and_torchrun_restarts_nothing() -> None:
    found = rendered(job(workers=2, processes_per_worker=4, retries=5))
    assert [command.argv for command in found.values()] == [
        (
            *RUN,
            *("--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", "4"),
            *("--master-addr", "host-0", "--master-port", "29500", "--max-restarts", "0"),
            *("train.py", "--lr", "0.1"),
        )
        for index in (0, 1)
    ]


def test_an_elastic_world_is_restarted_by_torchrun_and_worker_0_holds_the_meeting() -> None:
    found = rendered(job(workers={"min": 2, "max": 3}, retries=5, program={"module": "a.b"}))
    assert len(found) == 3
    for slot, command in found.items():
        assert command.argv == (
            *RUN,
            *("--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host-0:29500"),
            *("--rdzv-id", "j", "--rdzv-conf", f"is_host={int(slot.index == 0)}", "--max-restarts", "5"),
            *("--local-addr", f"host-{slot.index}", "-m", "a.b"),
        )
        assert command.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("keys", "threads"),
    [
        ({}, 8),
        ({"processes_per_worker": 3}, 2),
        ({"processes_per_worker": 16}, 1),
        ({"resources": {"cpu": 4}, "processes_per_worker": 2}, 2),
        ({"resources": {"cpu": 0.5}}, 1),
        ({"env": {"OMP_NUM_THREADS": "5"}}, 5),
    ],
)
def test_threads_are_always_explicit(keys: dict[str, Any], threads: int) -> None:
    (command,) = rendered(job(**keys)).values()
    assert command.env["OMP_NUM_THREADS"] == str(threads)


def test_auto_is_a_rank_for_each_gpu() -> None:
    (command,) = rendered(job(resources={"gpu": 4})).values()
    assert command.argv[command.argv.index("--nproc-per-node") + 1] == "4"


def test_the_profiler_goes_around_the_whole_command() -> None:
    plain, profiled = (rendered(job(profile={"every": every}))[Slot("worker", 0)].argv for every in (0, "1m"))
    assert profiled == ("py", "-m", "stoker.telemetry.profiler", "--every", "60", "--", *plain)


def test_the_users_variables_win() -> None:
    (command,) = rendered(job(env={"GLOO_SOCKET_IFNAME": "mine"})).values()
    assert command.env["GLOO_SOCKET_IFNAME"] == "mine"


def test_a_command_for_a_shell_is_quoted() -> None:
    command = Command(("printf", "%s|", "a b", "$HOME", "it's"), {"X": "1 '2'"}, "/tmp")
    line = f"{command.to_sh()} && pwd"
    assert (
        subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == "a b|$HOME|it's|/tmp\n"
    )


def test_all_lead_where_no_role_does() -> None:
    assert lead_slots(job(workers=2)) == {Slot("worker", 0), Slot("worker", 1)}

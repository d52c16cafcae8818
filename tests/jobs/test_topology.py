"""Commands of slots, as values."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.jobs.spec import Job
from stoker.jobs.topology import AddressBook, Command, Slot, Standby, commands, lead_slots, slots_of
from stoker.telemetry.mpi_rank import take_secrets

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


# --- mpi


def mpirun(one: Job, *addresses: str, **keys: Any) -> tuple[Command, list[Standby]]:
    workers = addresses or ("10.0.0.1", "10.0.0.2")
    hosts = {Slot("launcher", 0): workers[0]} | {Slot("worker", index): host for index, host in enumerate(workers)}
    book = AddressBook(hosts=hosts, port=29500, python="py", cores=8, env={"GLOO_SOCKET_IFNAME": "eth0"}, **keys)
    command, *others = commands(one, book).values()
    assert isinstance(command, Command)
    assert all(isinstance(other, Standby) for other in others)
    return command, others  # type: ignore[return-value]


def after(words: tuple[str, ...], *flag: str) -> str:
    at = next(i for i in range(len(words)) if words[i : i + len(flag)] == flag)
    return words[at + len(flag)]


def test_mpirun_starts_the_ranks_in_workers_that_stand_by() -> None:
    one = job(topology="mpi", workers=2, processes_per_worker=4, env={"TOKEN": "hush", "LANG": "C"})
    command, others = mpirun(one)
    assert [str(slot) for slot in slots_of(one)] == ["launcher/0", "worker/0", "worker/1"]
    assert lead_slots(one) == {Slot("launcher", 0)}
    argv = command.argv
    assert argv[:5] == ("mpirun", "-np", "8", "--host", "10.0.0.1:4,10.0.0.2:4")
    assert (after(argv, "--bind-to"), after(argv, "--map-by"), "--tag-output" in argv) == ("none", "slot", True)
    assert (after(argv, "--mca", "pml"), after(argv, "--mca", "btl")) == ("ob1", "^openib")
    assert after(argv, "--mca", "btl_tcp_if_include") == "10.0.0.1/32,10.0.0.2/32"
    named = {argv[at + 1] for at, word in enumerate(argv) if word == "-x"}
    assert {"STOKER_RUN", "STOKER_ATTEMPT", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TOKEN"} <= named
    assert not named & {"STOKER_SLOT", "STOKER_INDEX", "GLOO_SOCKET_IFNAME"}
    assert not any("hush" in word for word in argv)
    assert (command.env["MASTER_ADDR"], command.env["MASTER_PORT"], command.env["TOKEN"]) == (
        "10.0.0.1",
        "29500",
        "hush",
    )
    assert (
        argv[-11:]
        == (
            *("py", "-m", "stoker.telemetry.mpi_rank", "--ranks", "4", "--first", "0", "--"),
            *("py", "train.py", "--lr", "0.1"),
        )[-11:]
    )
    assert [other.env["STOKER_SLOT"] for other in others] == ["worker/0", "worker/1"]


def test_the_profiler_is_around_ranks_and_not_around_mpirun() -> None:
    command, _ = mpirun(job(topology="mpi", workers=2, profile={"every": 30}))
    assert command.argv[0] == "mpirun"
    words = ("py", "-m", "stoker.telemetry.profiler", "--every", "30", "--")
    assert command.argv[-len(words) - 6 :] == ("--first", "6", "--", *words, "py", "train.py", "--lr", "0.1")[-12:]
    assert after(command.argv, "--first") == "6"


def test_flags_of_the_job_come_last_and_ours_give_way() -> None:
    args = ["--mca", "btl", "self,tcp", "-mca", "btl_tcp_if_exclude", "lo", "--bind-to", "core"]
    command, _ = mpirun(job(topology="mpi", workers=2, mpi={"args": args}))
    assert "^openib" not in command.argv
    assert "btl_tcp_if_include" not in command.argv
    assert "oob_tcp_if_include" in command.argv
    assert command.argv.count("--bind-to") == 1
    at = command.argv.index("self,tcp") - 2
    by_parameter = job(topology="mpi", workers=2, mpi={"args": ["--mca", "hwloc_base_binding_policy", "core"]})
    assert "--bind-to" not in mpirun(by_parameter)[0].argv
    assert list(command.argv[at : at + len(args)]) == args


def test_hosts_without_addresses_leave_out_what_leads_nowhere() -> None:
    command, _ = mpirun(job(topology="mpi", workers=2), "a.example", "b.example")
    assert after(command.argv, "--mca", "btl_tcp_if_exclude") == "lo,docker0"


def test_where_one_slot_asks_for_others_mpirun_asks_for_its_daemons() -> None:
    command, _ = mpirun(job(topology="mpi", workers=2), has_ask=True, mpi_rank=("py", "rank.py"))
    assert command.argv[:8] == ("py", "rank.py", "--around", "mpirun", "-np", "2", "--host", "worker-0:1,worker-1:1")
    assert after(command.argv, "--mca", "orte_launch_agent") == "exec py rank.py --around orted"
    assert "OMP_NUM_THREADS" not in command.argv  # each host has its own number of cores


def test_where_mpirun_reaches_workers_by_ssh_itself() -> None:
    one = job(topology="mpi", workers=2, secret_env={"TOKEN": {"secret": "s", "key": "k"}})
    there = {"ssh": ("-p", "2222"), "handed": ("PATH",), "output": "/shm/out", "secrets": "/shm/secrets"}
    command, _ = mpirun(one, **there)
    argv = command.argv
    assert argv[argv.index("plm_rsh_args") + 1] == "-p 2222"
    passed = [argv[index + 1] for index, word in enumerate(argv) if word == "-x"]
    assert {"PATH", "STOKER_OUTPUT", "STOKER_SECRETS", "STOKER_RUN"} <= set(passed)
    assert "TOKEN" not in passed  # mpirun's own messages are not encrypted
    assert (command.env["STOKER_OUTPUT"], command.env["STOKER_SECRETS"]) == ("/shm/out", "/shm/secrets")
    assert "STOKER_SECRETS" not in mpirun(job(topology="mpi", workers=2), **there)[0].env


def test_a_rank_takes_its_secrets_from_files(tmp_path: Path) -> None:
    (tmp_path / "TOKEN").write_text("hush\n'$(x)")
    environ = {"STOKER_SECRETS": str(tmp_path), "OTHER": "1"}
    take_secrets(environ)
    assert environ == {"STOKER_SECRETS": str(tmp_path), "OTHER": "1", "TOKEN": "hush\n'$(x)"}
    take_secrets(nothing := {"OTHER": "1"})
    assert nothing == {"OTHER": "1"}

"""Commands and environment of slots: torchrun and mpi."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import AddressBook, Command, Slot, Standby, lead_slots, list_slots, render_commands
from stoker.remote.mpi_rank import load_secrets

RUN = ["py", "-m", "torch.distributed.run"]


def make_job(**keys: Any) -> JobSpec:
    base = {"name": "j", "program": {"script": "train.py", "args": ["--lr", "0.1"]}, "profile": {"every": 0}}
    return decode({**base, **keys}, JobSpec)


def render(job: JobSpec, cores: int = 8) -> dict[Slot, Command]:
    hosts = {slot: f"host-{slot.index}" for slot in list_slots(job)}
    cores_per_rank = cores // job.world_size
    book = AddressBook(
        hosts=hosts, port=29500, python="py", cores_per_rank=cores_per_rank, env={"GLOO_SOCKET_IFNAME": "eth0"}
    )
    commands = {slot: command for slot, command in render_commands(job, book).items() if isinstance(command, Command)}
    assert commands.keys() == hosts.keys()
    return commands


def test_fixed_world_has_its_rendezvous_at_worker_0_and_no_torchrun_restarts() -> None:
    commands = render(make_job(workers=2, processes_per_worker=4, retries=5))
    assert [command.argv for command in commands.values()] == [
        (
            *RUN,
            *("--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", "4"),
            *("--master-addr", "host-0", "--master-port", "29500", "--max-restarts", "0"),
            *("train.py", "--lr", "0.1"),
        )
        for index in (0, 1)
    ]


def test_elastic_world_is_restarted_by_torchrun_with_its_store_at_worker_0() -> None:
    commands = render(make_job(workers={"min": 2, "max": 3}, retries=5, program={"module": "a.b"}))
    assert len(commands) == 3
    for slot, command in commands.items():
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
def test_omp_num_threads_is_always_set(keys: dict[str, Any], threads: int) -> None:
    (command,) = render(make_job(**keys)).values()
    assert command.env["OMP_NUM_THREADS"] == str(threads)


def test_auto_is_one_rank_per_gpu() -> None:
    (command,) = render(make_job(resources={"gpu": 4})).values()
    assert command.argv[command.argv.index("--nproc-per-node") + 1] == "4"


def test_profiler_wraps_the_whole_command() -> None:
    plain, profiled = (render(make_job(profile={"every": every}))[Slot("worker", 0)].argv for every in (0, "1m"))
    assert profiled == ("py", "-m", "stoker.remote.profiler", "--every", "60", "--", *plain)


def test_env_of_the_job_takes_precedence() -> None:
    (command,) = render(make_job(env={"GLOO_SOCKET_IFNAME": "mine"})).values()
    assert command.env["GLOO_SOCKET_IFNAME"] == "mine"


def test_to_shell_quotes_everything() -> None:
    command = Command(("printf", "%s|", "a b", "$HOME", "it's"), {"X": "1 '2'"}, "/tmp")
    line = f"{command.to_shell()} && pwd"
    assert (
        subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == "a b|$HOME|it's|/tmp\n"
    )


def test_all_slots_lead_without_a_lead_role() -> None:
    assert lead_slots(make_job(workers=2)) == {Slot("worker", 0), Slot("worker", 1)}


# --- mpi


def render_mpirun(job: JobSpec, *addresses: str, **keys: Any) -> tuple[Command, list[Standby]]:
    workers = addresses or ("10.0.0.1", "10.0.0.2")
    hosts = {Slot("launcher", 0): workers[0]} | {Slot("worker", index): host for index, host in enumerate(workers)}
    book = AddressBook(hosts=hosts, port=29500, python="py", env={"GLOO_SOCKET_IFNAME": "eth0"}, **keys)
    command, *workers_standby = render_commands(job, book).values()
    assert isinstance(command, Command)
    assert all(isinstance(standby, Standby) for standby in workers_standby)
    return command, workers_standby  # type: ignore[return-value]


def value_of(argv: tuple[str, ...], *flag: str) -> str:
    index = next(index for index in range(len(argv)) if argv[index : index + len(flag)] == flag)
    return argv[index + len(flag)]


def test_mpirun_starts_the_ranks_in_standby_workers() -> None:
    job = make_job(topology="mpi", workers=2, processes_per_worker=4, env={"TOKEN": "hush", "LANG": "C"})
    command, standbys = render_mpirun(job)
    assert [str(slot) for slot in list_slots(job)] == ["launcher/0", "worker/0", "worker/1"]
    assert lead_slots(job) == {Slot("launcher", 0)}
    argv = command.argv
    assert argv[:5] == ("mpirun", "-np", "8", "--host", "10.0.0.1:4,10.0.0.2:4")
    assert (value_of(argv, "--bind-to"), value_of(argv, "--map-by"), "--tag-output" in argv) == ("none", "slot", True)
    assert (value_of(argv, "--mca", "pml"), value_of(argv, "--mca", "btl")) == ("ob1", "^openib")
    assert value_of(argv, "--mca", "btl_tcp_if_include") == "10.0.0.1/32,10.0.0.2/32"
    forwarded = {argv[index + 1] for index, argument in enumerate(argv) if argument == "-x"}
    assert {"STOKER_RUN", "STOKER_ATTEMPT", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TOKEN"} <= forwarded
    assert not forwarded & {"STOKER_SLOT", "STOKER_INDEX", "GLOO_SOCKET_IFNAME"}
    assert not any("hush" in argument for argument in argv)
    assert (command.env["MASTER_ADDR"], command.env["MASTER_PORT"], command.env["TOKEN"]) == (
        "10.0.0.1",
        "29500",
        "hush",
    )
    assert (
        argv[-11:]
        == (
            *("py", "-m", "stoker.remote.mpi_rank", "--ranks", "4", "--first", "0", "--"),
            *("py", "train.py", "--lr", "0.1"),
        )[-11:]
    )
    assert [standby.env["STOKER_SLOT"] for standby in standbys] == ["worker/0", "worker/1"]


def test_profiler_wraps_ranks_and_not_mpirun() -> None:
    command, _ = render_mpirun(make_job(topology="mpi", workers=2, profile={"every": 30}))
    assert command.argv[0] == "mpirun"
    profiler = ("py", "-m", "stoker.remote.profiler", "--every", "30", "--")
    assert (
        command.argv[-len(profiler) - 6 :] == ("--first", "6", "--", *profiler, "py", "train.py", "--lr", "0.1")[-12:]
    )
    assert value_of(command.argv, "--first") == "6"


def test_mpi_args_override_default_flags() -> None:
    args = ["--mca", "btl", "self,tcp", "-mca", "btl_tcp_if_exclude", "lo", "--bind-to", "core"]
    command, _ = render_mpirun(make_job(topology="mpi", workers=2, mpi={"args": args}))
    assert "^openib" not in command.argv
    assert "btl_tcp_if_include" not in command.argv
    assert "oob_tcp_if_include" in command.argv
    assert command.argv.count("--bind-to") == 1
    start = command.argv.index("self,tcp") - 2
    by_parameter = make_job(topology="mpi", workers=2, mpi={"args": ["--mca", "hwloc_base_binding_policy", "core"]})
    assert "--bind-to" not in render_mpirun(by_parameter)[0].argv
    assert list(command.argv[start : start + len(args)]) == args


def test_local_interfaces_are_excluded_for_hosts_without_ip_addresses() -> None:
    command, _ = render_mpirun(make_job(topology="mpi", workers=2), "a.example", "b.example")
    assert value_of(command.argv, "--mca", "btl_tcp_if_exclude") == "lo,docker0"


def test_mpirun_starts_its_daemons_through_the_rsh_agent() -> None:
    command, _ = render_mpirun(make_job(topology="mpi", workers=2), has_rsh_agent=True, mpi_rank=("py", "rank.py"))
    assert command.argv[:8] == ("py", "rank.py", "--around", "mpirun", "-np", "2", "--host", "worker-0:1,worker-1:1")
    assert value_of(command.argv, "--mca", "orte_launch_agent") == "exec py rank.py --around orted"
    assert "OMP_NUM_THREADS" not in command.argv  # each host has its own number of cores


def test_mpirun_connects_to_workers_by_ssh() -> None:
    job = make_job(topology="mpi", workers=2, secret_env={"TOKEN": {"secret": "s", "key": "k"}})
    book = {
        "ssh_options": ("-p", "2222"),
        "forward_env": ("PATH",),
        "output_file": "/shm/out",
        "secrets_dir": "/shm/secrets",
    }
    command, _ = render_mpirun(job, **book)
    argv = command.argv
    assert argv[argv.index("plm_rsh_args") + 1] == "-p 2222"
    forwarded = [argv[index + 1] for index, argument in enumerate(argv) if argument == "-x"]
    assert {"PATH", "STOKER_OUTPUT", "STOKER_SECRETS", "STOKER_RUN"} <= set(forwarded)
    assert "TOKEN" not in forwarded  # mpirun does not encrypt its messages
    assert (command.env["STOKER_OUTPUT"], command.env["STOKER_SECRETS"]) == ("/shm/out", "/shm/secrets")
    assert "STOKER_SECRETS" not in render_mpirun(make_job(topology="mpi", workers=2), **book)[0].env


def test_rank_loads_secrets_from_files(tmp_path: Path) -> None:
    (tmp_path / "TOKEN").write_text("hush\n'$(x)")
    environ = {"STOKER_SECRETS": str(tmp_path), "OTHER": "1"}
    load_secrets(environ)
    assert environ == {"STOKER_SECRETS": str(tmp_path), "OTHER": "1", "TOKEN": "hush\n'$(x)"}
    load_secrets(without_secrets := {"OTHER": "1"})
    assert without_secrets == {"OTHER": "1"}

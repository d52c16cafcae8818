"""Topology `mpi`: Open MPI's `mpirun` in a launcher slot starts the ranks in standby workers.

The flags are the usual ones for training on many machines: TCP between them, no binding, ranks in the order of the
workers. A flag in `mpi.args` overrides the same flag here.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from stoker.jobs.mpirun import parse_mpirun_flags
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import (
    AddressBook,
    Command,
    Role,
    Slot,
    Standby,
    profiler_argv,
    program_argv,
    slot_env,
    threads_per_rank,
)
from stoker.jobs.topology_traits import RoleTraits, TopologyTraits

LAUNCHER = Slot("launcher", 0)
_ATTEMPT_ENV = ("STOKER_RUN", "STOKER_ATTEMPT", "STOKER_CHECKPOINT_DIR")
"""Variables that a launcher adds when it starts an attempt."""
_ATTEMPT_ENV_KUBERNETES = ("STOKER_RUN", "STOKER_ATTEMPT")
"""The same on Kubernetes, where there is no run folder."""
_SLOT_ENV = ("STOKER_SLOT", "STOKER_ROLE", "STOKER_INDEX")
"""Variables that differ between ranks and are set for each of them."""
THREADS_ENV = "OMP_NUM_THREADS"
_HOST_ENV = (THREADS_ENV,)
"""Variables that differ between hosts: a standby worker has its own values."""
_LOCAL_INTERFACES = "lo,docker0"
"""Network interfaces that do not reach other hosts."""


class Mpi:
    """One `mpirun`, which starts the program in every rank."""

    traits: ClassVar[TopologyTraits] = TopologyTraits(
        runs_ranks=True,
        has_standby_workers=True,
        extra_roles={LAUNCHER.role: RoleTraits(has_gpus=False, program="mpirun")},
        needs_open_mpi=True,
    )

    def roles(self, job: JobSpec) -> tuple[Role, ...]:
        """List the launcher, which is the lead role, and the workers."""
        return Role("launcher", 1, is_lead=True, is_profiled=False), Role("worker", job.max_workers)

    def command(self, job: JobSpec, slot: Slot, book: AddressBook) -> Command | Standby:
        """Return the mpirun command for the launcher; workers are on standby."""
        if slot.role != LAUNCHER.role:
            return Standby()
        workers = {worker: book.hosts[worker] for worker in (Slot("worker", index) for index in range(job.max_workers))}
        env = {
            "MASTER_ADDR": workers[Slot("worker", 0)],
            "MASTER_PORT": str(book.port),
            # mpirun refuses to run as root, even in containers, unless both are set.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **({"STOKER_OUTPUT": book.output_file} if book.output_file else {}),
            **({"STOKER_SECRETS": book.secrets_dir} if book.secrets_dir and job.secret_env else {}),
        }
        # Without variables that differ between hosts, and without secrets: the slot daemons of the workers set them.
        attempt_env = _ATTEMPT_ENV_KUBERNETES if book.forward_env else _ATTEMPT_ENV
        forwarded = [*slot_env(job, slot, book), *env, *job.env, *attempt_env, *book.forward_env]
        excluded = (*_SLOT_ENV, *(_HOST_ENV if book.has_rsh_agent else ()))
        # Names only: mpirun takes the values from its environment, so that none is on a command line.
        names = [name for name in dict.fromkeys(forwarded) if not name.startswith("OMPI_") and name not in excluded]
        nodes = [worker.filename for worker in workers] if book.has_rsh_agent else list(workers.values())
        argv = [*_wrapper(book), "mpirun", "-np", str(job.world_size), "--host", _host_list(nodes, job.ranks)]
        argv += _default_flags(job, book, list(workers.values())) + (_agent_flags(book) if book.has_rsh_agent else [])
        argv += [argument for name in names for argument in ("-x", name)]
        return Command((*argv, *job.mpi.args, *_rank_argv(job, book)), env)


def _mpi_rank_argv(book: AddressBook) -> tuple[str, ...]:
    return book.mpi_rank or (book.python, "-m", "stoker.remote.mpi_rank")


def _wrapper(book: AddressBook) -> tuple[str, ...]:
    """Return the command that wraps mpirun or orted and stops its children, where a remote shell agent is used."""
    return (*_mpi_rank_argv(book), "--around") if book.has_rsh_agent else ()


def _agent_flags(book: AddressBook) -> list[str]:
    """Return the flags that make mpirun start its daemons through the agent, in the session of the slot daemon."""
    return [
        *("--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "orte_leave_session_attached", "1"),
        # exec replaces the remote shell, so that a SIGTERM reaches the wrapper.
        *("--mca", "orte_launch_agent", " ".join(["exec", *_wrapper(book), "orted"])),
    ]


def _rank_argv(job: JobSpec, book: AddressBook) -> tuple[str, ...]:
    """Return the command that mpirun starts for each rank; only the first rank of a worker runs the profiler."""
    profiler = profiler_argv(job, book)
    workers = range(job.max_workers)
    options = ["--ranks", _per_worker(job.ranks)]
    if any(gpus := [job.resources_of(worker).gpus for worker in workers]):
        options += ["--gpus", _per_worker(gpus)]
    # Where the workers have environments of their own, they have the right number there.
    threads = [threads_per_rank(job, worker, book) for worker in workers]
    if len(set(threads)) > 1 and not book.has_rsh_agent and THREADS_ENV not in job.env:
        options += ["--threads", _per_worker(threads)]
    options += ["--first", str(len(profiler)), "--"]
    return (*_mpi_rank_argv(book), *options, *profiler, *program_argv(job.program, book.python))


def _per_worker(numbers: Sequence[int]) -> str:
    """Write a number for each worker: `2`, or `2,1` if they differ."""
    return ",".join(map(str, numbers)) if len(set(numbers)) > 1 else str(numbers[0])


def _host_list(workers: Sequence[str], ranks: Sequence[int]) -> str:
    slots = Counter[str]()
    for host, count in zip(workers, ranks, strict=True):
        slots[host] += count
    return ",".join(f"{host}:{count}" for host, count in slots.items())


def _default_flags(job: JobSpec, book: AddressBook, workers: Sequence[str]) -> list[str]:
    """Return the default flags that the job does not set itself: mpirun accepts each only once."""
    defaults = [
        ("--tag-output",),
        # A job may run more ranks than a host has cores.
        ("--oversubscribe",),
        ("--bind-to", job.mpi.binding),
        ("--map-by", "slot"),
        ("--mca", "pml", "ob1"),
        ("--mca", "btl", "^openib"),
        *_network_flags(workers),
        *([("--mca", "plm_rsh_args", " ".join(book.ssh_options))] if book.ssh_options else []),
        # A signal for one process would be forwarded to all ranks, and kill those that do not handle it.
        ("--mca", "ess_base_forward_signals", "none"),
    ]
    job_keys = {flag.key for flag in parse_mpirun_flags(job.mpi.args)}
    return [
        argument
        for arguments in defaults
        for flag in parse_mpirun_flags(arguments)
        if flag.key not in job_keys
        for argument in arguments
    ]


def _network_flags(workers: Sequence[str]) -> list[tuple[str, ...]]:
    """Select the network interfaces: those of the workers' addresses, or all that may reach other hosts."""
    try:
        subnets = ",".join(f"{ipaddress.IPv4Address(host)}/32" for host in dict.fromkeys(workers))
    except ValueError:
        return [("--mca", f"{part}_tcp_if_exclude", _LOCAL_INTERFACES) for part in ("btl", "oob")]
    return [("--mca", f"{part}_tcp_if_include", subnets) for part in ("btl", "oob")]

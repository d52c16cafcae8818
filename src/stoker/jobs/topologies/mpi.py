"""Open MPI's `mpirun` in a launcher of its own, which starts the ranks in workers that stand by.

The flags are those that image training on many machines is usually given: plain TCP between them, no binding, ranks in
the order of the workers. Whatever `mpi.args` gives takes the place of the same flag here.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence

from stoker.jobs.mpirun import given
from stoker.jobs.spec import Job
from stoker.jobs.topology import (
    AddressBook,
    Command,
    Role,
    Slot,
    Standby,
    contract,
    profiler_words,
    program_words,
)

LAUNCHER = Slot("launcher", 0)
_OF_A_RUN = ("STOKER_RUN", "STOKER_ATTEMPT", "STOKER_CHECKPOINT_DIR")
"""What every launcher adds when it starts an attempt."""
_OF_A_POD = ("STOKER_RUN", "STOKER_ATTEMPT")
"""The same where there is no folder of the run."""
_OF_A_SLOT = ("STOKER_SLOT", "STOKER_ROLE", "STOKER_INDEX")
"""What differs between ranks: each finds its own."""
_OF_A_HOST = ("OMP_NUM_THREADS",)
"""What differs between hosts: where a worker stands by there, it has its own."""
_NOT_BETWEEN_HOSTS = "lo,docker0"


class Mpi:
    """`mpirun` once, and the program in every rank."""

    def roles(self, job: Job) -> tuple[Role, ...]:
        """List the launcher, whose end is the job's, and the workers."""
        return Role("launcher", 1, lead=True, profiled=False), Role("worker", job.max_workers)

    def command(self, job: Job, slot: Slot, book: AddressBook) -> Command | Standby:
        """Run mpirun in the launcher; the workers wait for it."""
        if slot.role != LAUNCHER.role:
            return Standby()
        workers = {worker: book.hosts[worker] for worker in (Slot("worker", one) for one in range(job.max_workers))}
        env = {
            "MASTER_ADDR": workers[Slot("worker", 0)],
            "MASTER_PORT": str(book.port),
            # It refuses root, in containers too, unless it is told twice.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **({"STOKER_OUTPUT": book.output} if book.output else {}),
            **({"STOKER_SECRETS": book.secrets} if book.secrets and job.secret_env else {}),
        }
        # Not what differs from host to host, nor secrets, which must not travel so: who keeps a worker gives them.
        known = [*contract(job, slot, book), *env, *job.env, *(_OF_A_POD if book.handed else _OF_A_RUN), *book.handed]
        own = (*_OF_A_SLOT, *(_OF_A_HOST if book.has_ask else ()))
        # Names alone: the values are in the environment of mpirun, and on no command line.
        names = [name for name in dict.fromkeys(known) if not name.startswith("OMPI_") and name not in own]
        nodes = [one.filename for one in workers] if book.has_ask else list(workers.values())
        argv = [*_around(book), "mpirun", "-np", str(len(nodes) * job.ranks_per_worker), "--host", _hosts(nodes, job)]
        argv += _flags(job, book, list(workers.values())) + (_by_asking(book) if book.has_ask else [])
        argv += [word for name in names for word in ("-x", name)]
        return Command((*argv, *job.mpi.args, *_rank(job, book)), env)


def _words(book: AddressBook) -> tuple[str, ...]:
    return book.mpi_rank or (book.python, "-m", "stoker.telemetry.mpi_rank")


def _around(book: AddressBook) -> tuple[str, ...]:
    """Give what stands before mpirun, where nobody else sees to its end."""
    return (*_words(book), "--around") if book.has_ask else ()


def _by_asking(book: AddressBook) -> list[str]:
    """Give the flags by which mpirun starts its daemons through us, and they stay where they can be seen to."""
    return [
        *("--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "orte_leave_session_attached", "1"),
        # In the place of the shell there: what is told to end must be what passes it on.
        *("--mca", "orte_launch_agent", " ".join(["exec", *_around(book), "orted"])),
    ]


def _rank(job: Job, book: AddressBook) -> tuple[str, ...]:
    """Give what mpirun starts for each rank; the profiler is for the first rank of a worker alone."""
    words = _words(book)
    profiler = profiler_words(job, book)
    gpus = ("--gpus", str(job.resources.gpu)) if job.resources.gpu else ()
    options = ("--ranks", str(job.ranks_per_worker), *gpus, "--first", str(len(profiler)), "--")
    return (*words, *options, *profiler, *program_words(job.program, book.python))


def _hosts(workers: Sequence[str], job: Job) -> str:
    return ",".join(f"{host}:{count * job.ranks_per_worker}" for host, count in Counter(workers).items())


def _flags(job: Job, book: AddressBook, workers: Sequence[str]) -> list[str]:
    """Give the flags that the job does not give itself: mpirun takes each but once."""
    defaults = [
        ("--tag-output",),
        # More ranks than cores is the job's own affair.
        ("--oversubscribe",),
        ("--bind-to", job.mpi.binding),
        ("--map-by", "slot"),
        ("--mca", "pml", "ob1"),
        ("--mca", "btl", "^openib"),
        *_network(workers),
        *([("--mca", "plm_rsh_args", " ".join(book.ssh))] if book.ssh else []),
        # A signal for one process would reach all ranks, and end those that do not expect it.
        ("--mca", "ess_base_forward_signals", "none"),
    ]
    taken = {one.key for one in given(job.mpi.args)}
    return [word for words in defaults for one in given(words) if one.key not in taken for word in words]


def _network(workers: Sequence[str]) -> list[tuple[str, ...]]:
    """Choose the network: that of the addresses, or all but those that do not lead to another host."""
    try:
        found = ",".join(f"{ipaddress.IPv4Address(host)}/32" for host in dict.fromkeys(workers))
    except ValueError:
        return [("--mca", f"{part}_tcp_if_exclude", _NOT_BETWEEN_HOSTS) for part in ("btl", "oob")]
    return [("--mca", f"{part}_tcp_if_include", found) for part in ("btl", "oob")]

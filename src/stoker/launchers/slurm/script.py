"""The batch script of a run: `#SBATCH` lines, the command of every slot, and the loop that retries the gang. Pure.

`sbatch SCRIPT RUN_FOLDER` starts one job step with one task per slot. All tasks run the same function; the task number
selects the slot, and the nodes of the allocation are its addresses. The script depends only on bash and on Slurm, and
leaves records in the run folder (see `records`), so that a run needs no process on the login node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from stoker.jobs.retry_policy import BACKOFF_S
from stoker.jobs.spec import JobSpec, ResourcesSpec
from stoker.jobs.topology import AddressBook, Command, Role, Slot, get_topology, list_slots, render_command
from stoker.launchers.plan import listening_slots, requested_ports
from stoker.launchers.shell_words import ANY_INDEX, quote_word
from stoker.launchers.slurm.batch import BATCH, RUN_SLOT

PROFILER, MPI_RANK = "profiler.py", "mpi_rank.py"
"""Copies of the profiler and of the wrapper of MPI ranks in the run folder."""
SIGNAL_MARGIN_S = 45
"""Besides the grace period: to signal the programs on a busy cluster, and to requeue the job before the time limit."""
_ANY_PORT = 3 * 10**18
"""Placeholder for the port of slot 0, which is followed by those of the other slots."""
_RUN, _ATTEMPT = "@slurm:run@", "@slurm:attempt@"
_PER_SLOT = ("STOKER_SLOT", "STOKER_ROLE", "STOKER_INDEX")


def build_script(job: JobSpec, python: str) -> str:
    """Build the batch script of a job."""
    roles = started_roles(job)
    tasks = list_tasks(job)
    expressions = _expressions(tasks)
    commands = [_render(job, role, _address_book(job, tasks, python)) for role in roles]
    shared = {
        name: value
        for name, value in commands[0].env.items()
        if name not in _PER_SLOT
        and all(command.env.get(name) == value for command in commands)
        and quote_word(value, expressions) == quote_word(value, {})
    }
    lines = ["#!/bin/bash", *sbatch_lines(job, len(tasks)), ""]
    lines += [f"export {name}={quote_word(value, {})}" for name, value in shared.items()]
    lines += [job.slurm.setup.rstrip()] if job.slurm.setup else []
    lines += ["", *_settings(job, roles), "", "run_slot() {", *_select_slot(roles, commands, shared, expressions)]
    return "\n".join([*lines, RUN_SLOT, BATCH])


def started_roles(job: JobSpec) -> list[Role]:
    """List the roles whose slots the script starts; mpirun starts the ranks of standby workers."""
    return [role for role in get_topology(job).roles(job) if not (job.traits.has_standby_workers and not role.is_lead)]


def list_tasks(job: JobSpec) -> list[Slot]:
    """List the slots that need a place: all, except for an mpirun, which runs in the batch script."""
    roles = started_roles(job) if job.traits.has_standby_workers else []
    return [slot for slot in list_slots(job) if all(slot.role != role.name for role in roles)]


def sbatch_lines(job: JobSpec, tasks: int) -> Iterator[str]:
    """Yield the options of sbatch as comments that it reads."""
    nodes = min(job.slurm.nodes or tasks, tasks)
    tasks_per_node = math.ceil(tasks / nodes)
    resources = [job.resources_of(0), *(role.resources for role in job.roles.values())]
    cpu = max(item.cpu or 0 for item in resources)
    memory = max(item.memory or 0 for item in resources)
    settings = job.slurm
    options: dict[str, object] = {
        "job-name": job.name,
        "nodes": nodes,
        "ntasks": tasks,
        "ntasks-per-node": tasks_per_node,
        "cpus-per-task": math.ceil(cpu) or None,
        "mem": f"{math.ceil(memory * tasks_per_node / 2**20)}M" if memory else None,
        # The daemon that mpirun starts on a node needs the GPUs of all workers there.
        **_gpu_option(
            job.resources_of(0), "gres" if job.traits.has_standby_workers else settings.gpu_request, tasks_per_node
        ),
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": format_time_limit(settings.time) if settings.time else None,
        "constraint": settings.constraint,
        "exclude": ",".join(settings.exclude) or None,
        "signal": f"B:USR1@{math.ceil(job.grace) + SIGNAL_MARGIN_S}",
        "open-mode": "append",
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
    yield "#SBATCH --requeue"
    yield from (f"#SBATCH {option}" for option in settings.options)


def format_time_limit(seconds: float) -> str:
    """Format a duration as Slurm writes it: `1-02:30:00`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{rest:02}"


def _gpu_option(resources: ResourcesSpec, style: str, tasks_per_node: int) -> dict[str, str]:
    """Return the option that requests GPUs; with `gpus-per-task`, each task sees only its own."""
    if not resources.gpus:
        return {}
    kind = f"{resources.gpu_type}:" if resources.gpu_type else ""
    if style == "gres":
        return {"gres": f"gpu:{kind}{resources.gpus * tasks_per_node}"}
    return {"gpus-per-task": f"{kind}{resources.gpus}"}


def _address_book(job: JobSpec, tasks: Sequence[Slot], python: str) -> AddressBook:
    """Return addresses with a placeholder for every node and port, which are known once Slurm has allocated them."""
    hosts = {slot: f"@slurm:host:{number}@" for number, slot in enumerate(tasks)}
    listening = listening_slots(job)
    requested = requested_ports(job, listening)
    numbers = {slot: number for number, slot in enumerate(tasks)}
    return AddressBook(
        hosts={**hosts, **{Slot(slot.role, ANY_INDEX): "@slurm:own@" for slot in tasks}},
        port=job.port or _ANY_PORT,
        ports={slot: requested.get(slot, _ANY_PORT + numbers[slot]) for slot in listening},
        python=python,
        profiler=(python, "-I", "-S", f"{_RUN}/{PROFILER}"),
        mpi_rank=(python, "-I", "-S", f"{_RUN}/{MPI_RANK}"),
        output_file=f"{_RUN}/logs/{{slot}}.{_ATTEMPT}.log",
    )


def _expressions(tasks: Sequence[Slot]) -> dict[str, str]:
    """Return the shell expression that each placeholder stands for."""
    expressions = {
        _RUN: '"$run"',
        _ATTEMPT: '"$STOKER_ATTEMPT"',
        str(ANY_INDEX): '"$STOKER_INDEX"',
        "@slurm:own@": '"$SLURMD_NODENAME"',
    }
    for number in range(len(tasks)):
        expressions[f"@slurm:host:{number}@"] = f'"${{hosts[{number}]}}"'
        expressions[str(_ANY_PORT + number)] = f'"$((port + {number}))"' if number else '"$port"'
    return expressions


def _render(job: JobSpec, role: Role, book: AddressBook) -> Command:
    command = render_command(job, Slot(role.name, ANY_INDEX), book)
    if not isinstance(command, Command):
        raise TypeError(f"role {role.name} has no command of its own")
    return command


def _settings(job: JobSpec, roles: Sequence[Role]) -> Iterator[str]:
    """Yield the variables that the constant part of the script reads."""
    slots = list_slots(job)
    lead = [role.name for role in roles if role.is_lead]
    observers = " ".join(role.name for role in roles if role.is_observer)
    lead_count = sum(role.count for role in roles if role.is_lead)
    backoff = " ".join(f"{pause:g}" for pause in BACKOFF_S)
    yield f"retries={job.retries} backoff=({backoff})"
    yield f"slots={len(slots)} lead={lead[0] if lead else ''} lead_slots={lead_count}"
    yield f"fixed_port={job.port or ''} observers='{observers}' is_mpi={'1' if job.traits.has_standby_workers else ''}"


def _select_slot(
    roles: Sequence[Role], commands: Sequence[Command], shared: Mapping[str, str], expressions: Mapping[str, str]
) -> Iterator[str]:
    """Yield the part of `run_slot` that sets the variables and the command of a slot from the number of its task."""
    yield '  local run=$1 port=$2 hosts=("${@:3}") command directory is_observer is_stopping= log pid code'
    ends = [sum(role.count for role in roles[:number]) for number in range(len(roles) + 1)]
    for (first, end), role, command in zip(pairwise(ends), roles, commands, strict=True):
        yield f"  {'elif' if first else 'if'} ((SLURM_PROCID < {end})); then"
        yield f"    export STOKER_ROLE={role.name} STOKER_INDEX=$((SLURM_PROCID - {first}))"
        own = {name: value for name, value in command.env.items() if name not in shared and name not in _PER_SLOT[1:]}
        yield from (f"    export {name}={quote_word(value, expressions)}" for name, value in own.items())
        yield f"    directory={quote_word(command.cwd or '.', {})} is_observer={'1' if role.is_observer else ''}"
        yield f"    command=({' '.join(quote_word(argument, expressions) for argument in command.argv)})"
    yield "  fi"

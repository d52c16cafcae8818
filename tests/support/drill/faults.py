"""Faults of a drill: which processes of a run they kill, and what the run owes its user after each of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.core.processes import find_processes_by_env
from stoker.jobs.run_folder import RunFolder


@dataclass(frozen=True)
class Fault:
    """A kind of fault; `inject` returns whether there was something to hit."""

    name: str
    inject: Callable[[RunFolder], bool]
    weight: int = 1
    ends_attempt: bool = True
    """Whether the attempt may fail because of it; otherwise the attempt must go on."""
    ends_supervisor: bool = False
    """Whether the run has no supervisor after it, until it is resumed."""
    cuts_logs: bool = False
    """Whether output may be lost that was on its way to the log."""
    needs_training: bool = False
    """Whether it is injected only while the ranks train: programs cannot be expected to survive it before."""


def kill(pids: Iterable[int]) -> bool:
    """Kill processes; return whether any of them was alive."""
    hits = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hits += 1
    return hits > 0


def killer(find: Callable[[RunFolder], Iterable[int]]) -> Callable[[RunFolder], bool]:
    """Return a function that kills all processes that another one finds."""
    return lambda run: kill(list(find(run)))


# --- Processes of a run, as seen from the first process namespace


def tagged_commands(run: RunFolder) -> Iterator[tuple[int, list[str]]]:
    """The processes of the slots of a run, on any machine, with their command lines."""
    for pid in find_processes_by_env({"STOKER_RUN": run.id}):
        with suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def find_ranks(run: RunFolder) -> list[int]:
    """The processes that run the program itself, without those that have started it."""
    return [
        pid
        for pid, argv in tagged_commands(run)
        if "python" in Path(argv[0]).name and any(word.endswith("program.py") for word in argv[1:4])
    ]


def find_torchrun(run: RunFolder) -> list[int]:
    """The agents of torchrun."""
    return [pid for pid, argv in tagged_commands(run) if "torch.distributed.run" in argv and "python" in argv[0]]


def find_programs(run: RunFolder, name: str) -> list[int]:
    """The processes of the slots that execute a program, such as mpirun."""
    return [pid for pid, argv in tagged_commands(run) if Path(argv[0]).name == name]


def find_modules(run: RunFolder, name: str) -> list[int]:
    """The Python processes of the slots that execute a module or file."""
    return [pid for pid, argv in tagged_commands(run) if any(name in word for word in argv[1:4])]


def command_name(pid: int) -> str:
    """Return the name of a process; empty if it has just exited."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""

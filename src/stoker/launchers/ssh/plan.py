"""What the ssh launcher starts, as a value."""

from __future__ import annotations

import msgspec

from stoker.core.spec import load
from stoker.jobs.runs import Run
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh.hosts import Client

FAR = "far"
"""The folder of what is known of slots elsewhere, in that of the run."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of one host."""

    workdir: str
    python: str
    copies: bool
    """Whether the working folder is copied there; not where it is that very folder."""
    rsync: bool = False
    profiler: bool = False
    """Whether the profiler is sent along, for want of stoker there."""
    mpi: bool = False
    """Whether what stands between mpirun and a rank is sent along."""


class SshPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, on which host, and what is copied there before."""

    places: dict[str, Place]
    standby: tuple[str, ...] = ()
    """Slots without a command: on their hosts another slot has commands started, by the program `$STOKER_ASK`."""
    standby_env: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """What commands in them find, by slot."""
    client: Client
    source: str
    exclude: tuple[str, ...] = ()
    setup: str | None = None
    modules: tuple[str, ...] = ()
    """What Python must have there once `setup` is done."""
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0
    keeps_port: bool = False
    """Whether the job names the port; else every attempt meets at another one, where nothing of the last can be."""


class Record(msgspec.Struct, kw_only=True):
    """How far a slot's output has come here, and by which key its keeper knows us.

    `log` bytes of the log here hold the first `offset` bytes of the one there, and lines of our own; what was written
    since is the slot's alone. So nothing is lost or doubled, whenever the process that stands for it is killed.
    """

    key: str
    log: int = 0
    offset: int = 0
    code: int | None = None
    """How it ended, once that is known."""


def far_codes(run: Run, attempt: int) -> list[int | None]:
    """Tell how the slots of an attempt ended, as far as their hosts said."""
    folder = run.folder / FAR
    paths = [*folder.glob(f"*.{attempt}.json"), *folder.glob(f"*.{attempt}.*.json")]
    return [load(path.read_bytes(), Record, path).code for path in paths]


def read_ssh_plan(run: Run) -> SshPlan:
    """Read what a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), SshPlan, path)

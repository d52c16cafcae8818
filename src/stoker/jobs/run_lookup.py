"""Find the run that a command means: by ID, prefix, handle or job name, on this machine or in a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from stoker.core.text import join_all
from stoker.errors import InputError, MissingError, NotFoundError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS, Launcher
from stoker.jobs.run_folder import RunFolder, list_runs, match_runs
from stoker.jobs.status import JobState, JobStatus

MAX_LISTED = 10
"""Runs that an error message lists."""


def open_launcher(target: str) -> Launcher[Any]:
    """Return the launcher that `--on` names, for example `local` or `ray://host:8265`."""
    kind, separator, address = target.partition("://")
    if kind not in LAUNCHERS and (scheme := kind.partition(":")[0]) in LAUNCHERS:
        example = "context/namespace" if scheme == "k8s" else "host:port"
        raise InputError(f"--on {target} is not a valid target", hint=f"use {scheme}://{example}")
    if kind not in LAUNCHERS:
        close = get_close_matches(kind, LAUNCHERS.names(), n=1)
        hint = f"--on must be {join_all(LAUNCHERS.names(), 'or')}"
        raise InputError(f"unknown target {kind!r}", hint=f"did you mean {close[0]!r}? {hint}" if close else hint)
    launcher: Any = LAUNCHERS.get(kind)
    if separator and not address:
        raise InputError(f"--on {target} has no address", hint=f"add it, or use --on {kind}")
    if address and not launcher.traits.has_targets:
        raise InputError(f"--on {kind} does not take an address", hint=f"remove {address!r}")
    return launcher(address) if address else launcher()  # type: ignore[no-any-return]


def open_cluster_launcher(target: str) -> Any:
    """Return the launcher of a cluster that lists its own runs; raise InputError for other targets."""
    launcher = open_launcher(target)
    if not launcher.traits.lists_runs:
        raise InputError(
            f"--on {target} does not support listing runs", hint="omit --on to list the runs started from this machine"
        )
    return launcher


def launcher_of(run: RunFolder) -> Launcher[Any]:
    """Return the launcher that started a run."""
    return open_launcher(run.handle.partition("://")[0])


def get_status(run: RunFolder) -> JobStatus:
    """Return the current status of a run."""
    return launcher_of(run).status(run.handle)


def resolve_run(name: str | None, target: str | None = None) -> RunFolder:
    """Return the run that a command reads: the running one of that job name, else the newest.

    Raise InputError if several of that name are running. Without a name, return the newest run.
    """
    matches = _match(name, target)
    if name is None or len(matches) == 1:
        return matches[0]
    return _choose(matches, {run.id: get_known_state(run) for run in matches}, name)


def resolve_run_to_stop(name: str | None, target: str | None = None) -> RunFolder:
    """Return the run that `stop` acts on: the only running one, else a lost one, else the newest."""
    matches = _match(name, target, full_job_name=True)
    if len(matches) == 1:
        return matches[0]
    states = {run.id: get_known_state(run) for run in matches}
    lost = [run for run in matches if states[run.id] is JobState.LOST]
    if lost and all(state.is_final for state in states.values()):
        return lost[0]  # its processes may still be running
    return _choose(matches, states, name)


def resolve_exact_run(name: str) -> RunFolder:
    """Return the run with this ID, prefix or handle, or the only run of a job; raise InputError for several."""
    matches = _match(name, None, full_job_name=True)
    if len(matches) > 1:
        hint = "use the ID of one of them, or pass --all for all that have finished"
        raise _ambiguous(f"{name!r} has {len(matches)} runs", [run.id for run in matches], hint)
    return matches[0]


def list_runs_of(job_name: str) -> list[RunFolder]:
    """Return all runs of a job, newest first; raise NotFoundError if there are none."""
    runs = [run for run in list_runs() if run.name == job_name]
    if not runs:
        raise NotFoundError(f"there are no runs of a job {job_name!r}", hint="list runs with: stoker job list")
    return runs


def choose_run(states: Mapping[str, JobState], name: str | None) -> str:
    """Return the ID of the only running run, or of the first if none is running; raise InputError for several."""
    running = [run_id for run_id, state in states.items() if not state.is_final]
    if len(running) > 1:
        subject = "runs" if name is None else f"runs of {name!r}"
        raise _ambiguous(f"{len(running)} {subject} are running", running)
    return running[0] if running else next(iter(states))


def get_known_state(run: RunFolder) -> JobState:
    """Return the state of a run; the last known one if the target of an unfinished run cannot be asked."""
    state = run.read_status().state
    if state.is_final:
        return state
    try:
        return get_status(run).state
    except (UnavailableError, MissingError):
        return state


def _choose(matches: Sequence[RunFolder], states: Mapping[str, JobState], name: str | None) -> RunFolder:
    chosen = choose_run(states, name)
    return next(run for run in matches if run.id == chosen)


def _ambiguous(what: str, run_ids: Sequence[str], hint: str = "use the ID of one of them") -> InputError:
    more = ", …" if len(run_ids) > MAX_LISTED else ""
    return InputError(f"{what}: {', '.join(run_ids[:MAX_LISTED])}{more}", hint=hint)


def _match(name: str | None, target: str | None, *, full_job_name: bool = False) -> list[RunFolder]:
    """Return the runs that a name may mean, newest first; a run of a cluster gets a run folder here."""
    if target is None and name is not None and "://" in name:
        if known := [run for run in list_runs() if run.handle == name]:
            return known
        if name.startswith("k8s://"):
            target, _, name = name.rpartition("/")
    if target is None:
        return match_runs(name, full_job_name=full_job_name)
    if name is None:
        raise InputError("RUN is required with --on", hint=f"list runs with: stoker job list --on {target}")
    return [open_cluster_launcher(target).adopt(name)]

"""List the runs of a namespace from their Jobs and MPIJobs, wherever they were started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from stoker.errors import AccessDeniedError, MissingError
from stoker.jobs.status import JobState
from stoker.jobs.topology import OBSERVER_ROLES
from stoker.kube.client import KubeClient
from stoker.kube.conditions import get_condition, true_conditions
from stoker.kube.objects import INDEX_LABEL, JOB_LABEL, MANAGED_BY, RUN_LABEL, Manifest
from stoker.launchers.kubernetes.status import get_role, parse_time, sort_owner_first

RUN_SELECTOR = ",".join([RUN_LABEL, *(f"{key}={value}" for key, value in MANAGED_BY.items())])
"""Label selector of the objects of all runs."""


def list_cluster_runs(client: KubeClient) -> list[dict[str, object]]:
    """List the runs of a namespace, newest first."""
    runs = _group_by_run([obj for obj in client.list_objects("Job", RUN_SELECTOR) if not _is_owned_by_mpijob(obj)])
    with suppress(MissingError, AccessDeniedError):  # without the MPI operator there are no MPIJobs
        runs |= _group_by_run(client.list_objects("MPIJob", RUN_SELECTOR))
    rows = [_build_row(run, jobs) for run, jobs in runs.items()]
    return sorted(rows, key=lambda row: str(row["started"]), reverse=True)


def _is_owned_by_mpijob(obj: Manifest) -> bool:
    """Whether a Job is the launcher of an MPIJob, which is listed itself."""
    return any(owner["kind"] == "MPIJob" for owner in obj["metadata"].get("ownerReferences") or ())


def _group_by_run(jobs: Sequence[Manifest]) -> dict[str, list[Manifest]]:
    runs: dict[str, list[Manifest]] = {}
    for obj in jobs:
        runs.setdefault(obj["metadata"]["labels"][RUN_LABEL], []).append(obj)
    return runs


def _build_row(run: str, jobs: Sequence[Manifest]) -> dict[str, object]:
    lead, *_ = ordered = sort_owner_first(jobs)
    active = sum(int(obj.get("status", {}).get("active") or 0) for obj in jobs)
    return {
        "run": run,
        "job": lead["metadata"]["labels"][JOB_LABEL],
        "state": str(_derive_state(ordered, active)),
        "started": lead["metadata"]["creationTimestamp"],
        "took_s": _get_duration(lead),
        "pods": active,
    }


def _derive_state(jobs: Sequence[Manifest], active: int) -> JobState:
    """Derive the state of a run from its Jobs: all Jobs of the lead role must be complete, observers do not count."""
    lead, *_ = gang_jobs = [obj for obj in jobs if get_role(obj) not in OBSERVER_ROLES]
    peers = [obj for obj in gang_jobs if INDEX_LABEL in obj["metadata"]["labels"] and get_role(obj) == get_role(lead)]
    if all(true_conditions(obj) & {"Complete", "Succeeded"} for obj in peers or [lead]):
        return JobState.SUCCEEDED
    if any("Failed" in true_conditions(obj) for obj in gang_jobs):
        return JobState.FAILED
    return JobState.RUNNING if active else JobState.PENDING


def _get_duration(lead: Manifest) -> float | None:
    status = lead.get("status", {})
    started = parse_time(status.get("startTime"))
    failed = get_condition(lead, "Failed").get("lastTransitionTime")
    ended = parse_time(status.get("completionTime")) or parse_time(failed) or time.time()
    return round(ended - started, 1) if started else None

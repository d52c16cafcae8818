"""Which run of a cluster a job name means, from the Jobs and ConfigMaps of its namespace."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import InputError, NotFoundError
from stoker.kube.objects import JOB_LABEL, ROLE_LABEL, RUN_LABEL
from stoker.launchers.kubernetes.launcher import choose_cluster_run

OLD, NEW = "digits-20260101-000000-aaaa", "digits-20260202-000000-aaaa"
JOBS = {OLD: "digits", NEW: "digits", "other-20260101-000000-aaaa": "other"}


class JobsClient:
    """A namespace with one Job for each run; the given runs are running."""

    def __init__(self, *running: str) -> None:
        self._running = running

    def list_objects(self, kind: str, selector: object) -> list[Any]:
        return [self._build_job(run) for run in JOBS] if kind == "Job" else []

    def _build_job(self, run: str) -> Any:
        is_running = run in self._running
        labels = {RUN_LABEL: run, JOB_LABEL: JOBS[run], ROLE_LABEL: "worker"}
        conditions = [] if is_running else [{"type": "Complete", "status": "True"}]
        return {
            "kind": "Job",
            "metadata": {"name": run, "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {},
            "status": {"active": int(is_running), "conditions": conditions},
        }


def choose(name: str, *running: str) -> str:
    return choose_cluster_run(JobsClient(*running), JOBS, name)  # type: ignore[arg-type]


def test_running_run_comes_before_the_newest() -> None:
    assert choose("digits", OLD) == OLD
    assert choose("digits") == NEW
    assert choose(OLD, NEW) == OLD
    assert choose("other", OLD, NEW).startswith("other-")


def test_several_running_runs_and_unknown_names_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        choose("digits", OLD, NEW)
    assert OLD in str(caught.value)
    assert NEW in str(caught.value)
    with pytest.raises(NotFoundError):
        choose("pets", OLD)

"""Status of a job, derived from its objects without a cluster: states, attempts, and slots."""

from __future__ import annotations

from typing import Any

from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.objects import INDEX_LABEL, JOB_LABEL, ROLE_LABEL
from stoker.launchers.kubernetes.run_objects import (
    FAILURE_COUNT_ANNOTATION,
    IGNORED_FAILURE_COUNT_ANNOTATION,
    PREVIOUS_ATTEMPTS_ANNOTATION,
)
from stoker.launchers.kubernetes.status import derive_slot_statuses, derive_status, to_slot_pods
from tests.launchers.contract import job_of


def build_pod(
    role: str = "worker", index: int = 0, phase: str = "Running", code: int | None = None, **counts: int
) -> Any:
    """Build a pod; `counts` are its attempts: `failed`, `disrupted`, `before`."""
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    annotations = {
        "failed": FAILURE_COUNT_ANNOTATION,
        "disrupted": IGNORED_FAILURE_COUNT_ANNOTATION,
        "before": PREVIOUS_ATTEMPTS_ANNOTATION,
    }
    attempt = sum(counts.values())
    return {
        "metadata": {
            "name": f"{role}-{index}-{attempt}",
            "uid": f"{role}-{index}-{attempt}",
            "creationTimestamp": f"2026-11-16T10:00:0{attempt}Z",
            "labels": {ROLE_LABEL: role, INDEX_LABEL: str(index)},
            "annotations": {annotations[name]: str(count) for name, count in counts.items()},
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "main", "state": state}] if phase != "Pending" else [],
        },
    }


def build_job(*conditions: str, role: str = "worker", index: int | None = None, **spec: Any) -> Any:
    """Build a Kubernetes Job whose conditions are True."""
    labels = {JOB_LABEL: "small", ROLE_LABEL: role} | ({} if index is None else {INDEX_LABEL: str(index)})
    status = {"conditions": [{"type": kind, "status": "True", "reason": ""} for kind in conditions]}
    return {"metadata": {"name": "small", "uid": "j", "labels": labels}, "spec": spec, "status": status}


def derive_state(job: Any, jobs: list[Any], *pods: Any) -> JobState:
    return derive_status(job, jobs, to_slot_pods(pods)).state


TORCHRUN = job_of(topology="torchrun", workers=2, program={"module": "a"})


# --- States


def test_states() -> None:
    pending = build_pod(index=1, phase="Pending")
    assert derive_state(TORCHRUN, [build_job()], build_pod(phase="Pending")) is JobState.PENDING
    assert derive_state(TORCHRUN, [build_job()], build_pod(), pending) is JobState.RUNNING
    succeeded = build_pod(phase="Succeeded", code=0)
    assert derive_state(TORCHRUN, [build_job("Complete")], succeeded) is JobState.SUCCEEDED
    assert derive_state(TORCHRUN, [build_job("Failed")], build_pod(phase="Failed", code=7)) is JobState.FAILED
    assert derive_state(TORCHRUN, []) is JobState.STOPPED


def test_job_succeeds_only_once_all_pods_have_finished() -> None:
    assert derive_state(TORCHRUN, [build_job("SuccessCriteriaMet")], build_pod()) is JobState.RUNNING


def test_parameter_servers_do_not_keep_a_job_running() -> None:
    job = job_of(topology="tf-ps", workers=1, program={"module": "a"})
    jobs = [build_job("Complete", role="chief", index=0), build_job(index=0), build_job(role="ps", index=0)]
    assert derive_state(job, jobs, build_pod("ps"), build_pod()) is JobState.SUCCEEDED


def test_every_worker_of_a_mirrored_job_is_a_lead() -> None:
    job = job_of(topology="tf-mirrored", workers=2, program={"module": "a"})
    jobs = [build_job("Complete", index=0), build_job(index=1)]
    assert derive_state(job, jobs, build_pod(index=1)) is JobState.RUNNING
    jobs = [build_job("Complete", index=0), build_job("Complete", index=1)]
    assert derive_state(job, jobs, build_pod()) is JobState.SUCCEEDED


def test_failed_observer_does_not_fail_the_job() -> None:
    job = job_of(topology="tf-mirrored", program={"module": "a"}, roles={"evaluator": {"count": 1}})
    jobs = [build_job(index=0), build_job("Failed", role="evaluator", index=0)]
    assert derive_state(job, jobs, build_pod()) is JobState.RUNNING


def test_queued_job_is_pending() -> None:
    suspended = build_job(suspend=True)
    suspended["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    derived = derive_status(TORCHRUN, [suspended], [])
    assert derived.state is JobState.PENDING
    assert derived.reason == "not yet admitted by Kueue (queue gpus)"


# --- Attempts


def test_attempts_are_the_sum_of_the_annotations() -> None:
    pods = to_slot_pods(
        [
            build_pod(phase="Failed", code=137),
            build_pod(phase="Failed", code=1, failed=1),
            build_pod(failed=1, disrupted=1),
        ]
    )
    assert [(pod.attempt, pod.exit_code) for pod in pods] == [(0, -9), (1, 1), (2, None)]
    assert [pod.attempt for pod in to_slot_pods([build_pod(before=3), build_pod(before=3, failed=1)])] == [3, 4]


def test_known_attempts_are_kept() -> None:
    known = {"gone": (Slot("worker", 0), 0), "worker-0-0": (Slot("worker", 0), 1)}
    new = build_pod()
    new["metadata"] |= {"uid": "new", "name": "zz"}
    assert [pod.attempt for pod in to_slot_pods([build_pod(), new], known)] == [1, 2]


def test_pods_without_annotations_are_numbered_by_creation() -> None:
    first, second = build_pod(), build_pod()
    second["metadata"] |= {"uid": "b", "name": "zz"}
    assert [pod.attempt for pod in to_slot_pods([second, first])] == [0, 1]


# --- Slots


def test_slot_terminated_after_the_lead_succeeded_is_stopped() -> None:
    pods = to_slot_pods([build_pod(phase="Succeeded", code=0), build_pod(index=1, phase="Failed", code=143)])
    states = [slot.state for slot in derive_slot_statuses(TORCHRUN, pods, JobState.SUCCEEDED)]
    assert states == [JobState.SUCCEEDED, JobState.STOPPED]

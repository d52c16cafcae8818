"""Derive the status of a job from its Jobs (or MPIJob), pods and events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from stoker.jobs.retry_policy import INVALID_INPUT, NO_RETRIES, attempts_exhausted, not_retried
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState, SlotStatus, signal_from_exit_code
from stoker.jobs.topology import OBSERVER_ROLES, Slot, lead_slots, list_slots
from stoker.kube.conditions import FINISHED_PHASES, get_condition, get_phase, is_terminating, true_conditions
from stoker.kube.objects import INDEX_LABEL, ROLE_LABEL, Manifest
from stoker.kube.pending import explain_pending
from stoker.kube.pods import get_exit_status, get_slot
from stoker.launchers.kubernetes.run_objects import get_attempt

_FAILURE_REASONS = {
    "DeadlineExceeded": "exceeded kubernetes.deadline",
    "PodFailurePolicy": not_retried(INVALID_INPUT),
    "FailedIndexes": "",
    "MaxFailedIndexesExceeded": "",
    "BackoffLimitExceeded": "",
}
"""Reasons of a failed Job; empty where the diagnosis of its pods says more."""
DELETED_MESSAGE = "the job was deleted from the cluster"
LOST_MESSAGE = "the job is no longer in the cluster: its TTL expired, or it was deleted"


@dataclass(frozen=True, slots=True)
class SlotPod:
    """A pod with the slot and attempt it runs."""

    pod: Manifest
    slot: Slot
    attempt: int

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return str(self.pod["metadata"]["uid"])

    @property
    def name(self) -> str:
        """The pod's name."""
        return str(self.pod["metadata"]["name"])

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded or Failed."""
        return get_phase(self.pod)

    @property
    def is_finished(self) -> bool:
        """Whether all containers have terminated."""
        return self.phase in FINISHED_PHASES

    @property
    def has_log(self) -> bool:
        """Whether its container has started, so that its log can be read."""
        statuses = self.pod.get("status", {}).get("containerStatuses") or ()
        states = [status.get("state", {}) for status in statuses]
        return any("running" in state or "terminated" in state for state in states)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.phase == "Succeeded":
            return 0
        status = get_exit_status(self.pod)
        if status is None:
            return 1 if self.phase == "Failed" else None
        code, _ = status
        number = signal_from_exit_code(code) if code > 128 else None
        return -number if number else code or 1

    @property
    def reason(self) -> str:
        """Why it exited, such as `OOMKilled`; "" if unknown."""
        status = get_exit_status(self.pod)
        return status[1] if status else ""

    @property
    def was_disrupted(self) -> bool:
        """Whether the cluster terminated it: drain, eviction, preemption or node failure."""
        return "DisruptionTarget" in true_conditions(self.pod)

    @property
    def created(self) -> float:
        """When it was created."""
        return parse_time(self.pod["metadata"].get("creationTimestamp"))


class DerivedStatus(NamedTuple):
    """The state of a job, as derived from its objects."""

    state: JobState
    reason: str = ""
    """Why it is pending or has failed, if the cluster knows."""


def to_slot_pods(pods: Iterable[Manifest], known: Mapping[str, tuple[Slot, int]] | None = None) -> list[SlotPod]:
    """Return pods with their slot and attempt; `known` are earlier assignments by uid.

    A pod without attempt annotations gets the attempt after the last one of its slot.
    """
    assigned, slot_pods = known or {}, list[SlotPod]()
    last: dict[Slot, int] = {}
    for slot, attempt in assigned.values():
        last[slot] = max(attempt, last.get(slot, -1))
    for pod in sorted(pods, key=_creation_key):
        uid, slot = str(pod["metadata"]["uid"]), Slot.parse(get_slot(pod))
        attempt = assigned[uid][1] if uid in assigned else max(get_attempt(pod), last.get(slot, -1) + 1)
        last[slot] = max(attempt, last.get(slot, -1))
        slot_pods.append(SlotPod(pod, slot, attempt))
    return slot_pods


def _creation_key(pod: Manifest) -> tuple[float, str]:
    return parse_time(pod["metadata"].get("creationTimestamp")), pod["metadata"]["name"]


def latest_by_slot(pods: Iterable[SlotPod]) -> dict[Slot, SlotPod]:
    """Return the pod of the last attempt of each slot."""
    return {pod.slot: pod for pod in sorted(pods, key=lambda pod: pod.attempt)}


def derive_status(
    job: JobSpec, jobs: Sequence[Manifest], pods: Sequence[SlotPod], events: Sequence[Manifest] = ()
) -> DerivedStatus:
    """Derive the state of a job from its Jobs (or its MPIJob, owner first), pods and events."""
    if not jobs:
        return DerivedStatus(JobState.STOPPED, DELETED_MESSAGE)
    if all(_has_any(obj, "Complete", "Succeeded") for obj in _get_deciding_jobs(job, jobs)):
        return DerivedStatus(JobState.SUCCEEDED)
    failed = [obj for obj in jobs if _has_any(obj, "Failed") and get_role(obj) not in OBSERVER_ROLES]
    if failed:
        return DerivedStatus(JobState.FAILED, _get_failure_reason(failed[0]))
    if is_terminating(jobs[0]):
        return DerivedStatus(JobState.STOPPED, DELETED_MESSAGE)
    latest = latest_by_slot(pods)
    pending = [pod for _, pod in sorted(latest.items()) if pod.phase == "Pending"]
    is_incomplete = len(latest) < len(list_slots(job))
    reason = _explain_pending_pods(pending, events) or (_explain_missing_pods(jobs, events) if is_incomplete else "")
    if job.traits.has_standby_workers and not pods and not reason and not true_conditions(jobs[0]):
        reason = "the MPIJob has no status: check that the MPI operator is running"
    is_running = any(pod.phase == "Running" for pod in latest.values())
    return DerivedStatus(JobState.RUNNING if is_running else JobState.PENDING, reason)


def derive_slot_statuses(job: JobSpec, pods: Sequence[SlotPod], state: JobState) -> tuple[SlotStatus, ...]:
    """Derive the status of each slot; a slot that had not finished when the job did counts as stopped."""
    latest = latest_by_slot(pods)
    return tuple(_derive_slot_status(slot, latest.get(slot), state) for slot in list_slots(job))


def _derive_slot_status(slot: Slot, pod: SlotPod | None, state: JobState) -> SlotStatus:
    code = None if pod is None else pod.exit_code
    if code is not None:
        slot_state = JobState.SUCCEEDED if code == 0 else JobState.FAILED
        if slot_state is JobState.FAILED and state in (JobState.SUCCEEDED, JobState.STOPPED):
            slot_state = JobState.STOPPED  # terminated because the lead had finished, or by the user
    elif state.is_final:
        slot_state = JobState.STOPPED
    else:
        slot_state = JobState.RUNNING if pod is not None and pod.phase == "Running" else JobState.PENDING
    return SlotStatus(slot=str(slot), state=slot_state, code=code)


def _get_deciding_jobs(job: JobSpec, jobs: Sequence[Manifest]) -> list[Manifest]:
    """Return the Jobs whose success is the job's: the owner, or with a Job per task those of the lead slots."""
    if not job.traits.has_address_per_slot:
        return [jobs[0]]
    slots = lead_slots(job)
    return [obj for obj in jobs if _get_job_slot(obj) in slots] or [jobs[0]]


def _get_job_slot(obj: Manifest) -> Slot | None:
    labels = obj["metadata"]["labels"]
    return Slot(labels[ROLE_LABEL], int(labels[INDEX_LABEL])) if INDEX_LABEL in labels else None


def get_role(obj: Manifest) -> str:
    """Return the role of a Job; "" for an MPIJob."""
    return str(obj["metadata"]["labels"].get(ROLE_LABEL, ""))


def sort_owner_first(jobs: Sequence[Manifest]) -> list[Manifest]:
    """Sort Jobs so that the owner of the others comes first."""
    return sorted(jobs, key=lambda obj: bool(obj["metadata"].get("ownerReferences")))


def _has_any(obj: Manifest, *types: str) -> bool:
    return not true_conditions(obj).isdisjoint(types)


def _get_failure_reason(obj: Manifest) -> str:
    condition = get_condition(obj, "Failed")
    reason = condition.get("reason", "")
    return str(_FAILURE_REASONS.get(reason, condition.get("message") or reason))


def _explain_pending_pods(pods: Sequence[SlotPod], events: Sequence[Manifest]) -> str:
    """Return why pods are pending: the first reason, and how many pods share it."""
    by_reason: dict[str, list[SlotPod]] = {}
    for pod in pods:
        own_events = [event for event in events if event.get("involvedObject", {}).get("uid") == pod.uid]
        if reason := explain_pending(pod.pod, own_events):
            by_reason.setdefault(reason, []).append(pod)
    if not by_reason:
        return ""
    reason, affected = next(iter(by_reason.items()))
    others = f" and {len(affected) - 1} more" if len(affected) > 1 else ""
    return f"{affected[0].slot}{others}: {reason}"


def _explain_missing_pods(jobs: Sequence[Manifest], events: Sequence[Manifest]) -> str:
    """Return why a Job has too few pods: it is suspended, or its pods are rejected."""
    reasons = (explain_pending({"kind": "Job", **obj}, events) for obj in jobs)
    return next((reason for reason in reasons if reason), "")


def describe_retries(retries: int, attempts: int, reason: str) -> str:
    """Return why a failed job is not retried; `reason` is the cluster's."""
    return reason or not_retried(attempts_exhausted(attempts) if retries else NO_RETRIES)


def parse_time(text: str | None) -> float:
    """Parse a timestamp of the API server; 0 if there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0

"""How a job in a cluster is doing: a pure function of its objects, as the API server told them last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from stoker.jobs.spec import Job
from stoker.jobs.status import JobState, SlotStatus, signal_from_exit_code
from stoker.jobs.topology import OBSERVER_ROLES, Slot, lead_slots, list_slots
from stoker.kube.conditions import get_condition, is_terminating, true_conditions
from stoker.kube.objects import INDEX_LABEL, ROLE_LABEL, Manifest
from stoker.kube.pending import explain_pending
from stoker.kube.pods import get_exit_status, get_slot
from stoker.launchers.kubernetes.manifests import get_attempt

_REASONS = {
    "DeadlineExceeded": "it took longer than kubernetes.deadline allows",
    "PodFailurePolicy": "the same input would fail again",
    "FailedIndexes": "",
    "MaxFailedIndexesExceeded": "",
    "BackoffLimitExceeded": "",
}
"""Why a Job has failed, where its pods do not say it better."""


@dataclass(frozen=True, slots=True)
class SlotPod:
    """One pod of a slot."""

    pod: Manifest
    slot: Slot
    attempt: int

    @property
    def uid(self) -> str:
        """What no other pod has."""
        return str(self.pod["metadata"]["uid"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.pod["metadata"]["name"])

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded or Failed."""
        return str(self.pod.get("status", {}).get("phase", "Pending"))

    @property
    def is_finished(self) -> bool:
        """Whether it will not run any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def has_log(self) -> bool:
        """Whether its container has begun, and so can be listened to."""
        states = [one.get("state", {}) for one in self.pod.get("status", {}).get("containerStatuses") or ()]
        return any("running" in state or "terminated" in state for state in states)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.phase == "Succeeded":
            return 0
        found = get_exit_status(self.pod)
        if found is None:
            return 1 if self.phase == "Failed" else None
        return -signal_from_exit_code(found[0]) if found[0] > 128 and signal_from_exit_code(found[0]) else found[0] or 1

    @property
    def reason(self) -> str:
        """What the cluster says of its end, such as `OOMKilled`."""
        found = get_exit_status(self.pod)
        return found[1] if found else ""

    @property
    def was_disrupted(self) -> bool:
        """Whether the cluster ended it through no fault of its own: its node was drained, lost or needed."""
        return "DisruptionTarget" in true_conditions(self.pod)

    @property
    def created(self) -> float:
        """When it was made."""
        return parse_time(self.pod["metadata"].get("creationTimestamp"))


class DerivedStatus(NamedTuple):
    """How a job is doing."""

    state: JobState
    reason: str = ""
    """Why it waits, or has failed, where the cluster knows."""


def to_slot_pods(pods: Iterable[Manifest], known: Mapping[str, tuple[Slot, int]] | None = None) -> list[SlotPod]:
    """Give pods by slot and attempt, as they were known before; where pods do not count, attempts follow each other."""
    before, found = known or {}, list[SlotPod]()
    last: dict[Slot, int] = {}
    for slot, number in before.values():
        last[slot] = max(number, last.get(slot, -1))
    for pod in sorted(
        pods, key=lambda one: (parse_time(one["metadata"].get("creationTimestamp")), one["metadata"]["name"])
    ):
        uid, slot = str(pod["metadata"]["uid"]), Slot.parse(get_slot(pod))
        number = before[uid][1] if uid in before else max(get_attempt(pod), last.get(slot, -1) + 1)
        last[slot] = max(number, last.get(slot, -1))
        found.append(SlotPod(pod, slot, number))
    return found


def latest_by_slot(found: Iterable[SlotPod]) -> dict[Slot, SlotPod]:
    """Give the last pod of each slot."""
    return {one.slot: one for one in sorted(found, key=lambda one: one.attempt)}


def derive_status(
    job: Job, leads: Sequence[Manifest], found: Sequence[SlotPod], events: Sequence[Manifest] = ()
) -> DerivedStatus:
    """Tell how a job is doing, by its Jobs (or its MPIJob) and its pods."""
    if not leads:
        return DerivedStatus(JobState.STOPPED, "someone has deleted it")
    if all(_is(one, "Complete", "Succeeded") for one in _deciding(job, leads)):
        return DerivedStatus(JobState.SUCCEEDED)
    failed = [one for one in leads if _is(one, "Failed") and get_role(one) not in OBSERVER_ROLES]
    if failed:
        return DerivedStatus(JobState.FAILED, _why_failed(failed[0]))
    if is_terminating(leads[0]):
        return DerivedStatus(JobState.STOPPED, "someone has deleted it")
    last = latest_by_slot(found)
    waits = [one for _, one in sorted(last.items()) if one.phase == "Pending"]
    is_short = len(last) < len(list_slots(job))
    why = _why_waiting(waits, events) or (_why_no_pods(leads, events) if is_short else "")
    if job.topology == "mpi" and not found and not why and not true_conditions(leads[0]):
        why = "nobody has taken up the MPIJob: does the MPI operator run there?"
    is_running = any(one.phase == "Running" for one in last.values())
    return DerivedStatus(JobState.RUNNING if is_running else JobState.PENDING, why)


def derive_slot_statuses(job: Job, found: Sequence[SlotPod], state: JobState) -> tuple[SlotStatus, ...]:
    """Tell how each slot is; who did not end by itself when the job did was stopped."""
    last = latest_by_slot(found)
    return tuple(_slot_state(slot, last.get(slot), state) for slot in list_slots(job))


def _slot_state(slot: Slot, one: SlotPod | None, state: JobState) -> SlotStatus:
    code = None if one is None else one.exit_code
    if code is not None:
        own = JobState.SUCCEEDED if code == 0 else JobState.FAILED
        if own is JobState.FAILED and state in (JobState.SUCCEEDED, JobState.STOPPED):
            own = JobState.STOPPED  # ended because the lead was done, or someone wished it
    elif state.is_final:
        own = JobState.STOPPED
    else:
        own = JobState.RUNNING if one is not None and one.phase == "Running" else JobState.PENDING
    return SlotStatus(slot=str(slot), state=own, code=code)


def _deciding(job: Job, leads: Sequence[Manifest]) -> list[Manifest]:
    """Give the Jobs whose success is the job's: the lead's, or each lead slot's where every task has its own."""
    if not job.topology.startswith("tf-"):
        return [leads[0]]
    wanted = lead_slots(job)
    return [one for one in leads if _slot_of_job(one) in wanted] or [leads[0]]


def _slot_of_job(one: Manifest) -> Slot | None:
    labels = one["metadata"]["labels"]
    return Slot(labels[ROLE_LABEL], int(labels[INDEX_LABEL])) if INDEX_LABEL in labels else None


def get_role(one: Manifest) -> str:
    """Give the role of a Job; an MPIJob has none."""
    return str(one["metadata"]["labels"].get(ROLE_LABEL, ""))


def sort_owner_first(leads: Sequence[Manifest]) -> list[Manifest]:
    """Put the one that owns the others first."""
    return sorted(leads, key=lambda one: bool(one["metadata"].get("ownerReferences")))


def _is(one: Manifest, *types: str) -> bool:
    return not true_conditions(one).isdisjoint(types)


def _why_failed(one: Manifest) -> str:
    found = get_condition(one, "Failed")
    reason = found.get("reason", "")
    return str(_REASONS.get(reason, found.get("message") or reason))


def _why_waiting(pods: Sequence[SlotPod], events: Sequence[Manifest]) -> str:
    """Tell why pods are not running, once for all that have the same reason."""
    found: dict[str, list[SlotPod]] = {}
    for one in pods:
        own = [event for event in events if event.get("involvedObject", {}).get("uid") == one.uid]
        if why := explain_pending(one.pod, own):
            found.setdefault(why, []).append(one)
    if not found:
        return ""
    why, those = next(iter(found.items()))
    others = f" and {len(those) - 1} more" if len(those) > 1 else ""
    return f"{those[0].slot}{others}: {why}"


def _why_no_pods(leads: Sequence[Manifest], events: Sequence[Manifest]) -> str:
    """Tell why a Job has no pods, or too few: it is held back, or may not make them."""
    found = (explain_pending({"kind": "Job", **lead}, events) for lead in leads)
    return next((why for why in found if why), "")


def describe_retries(retries: int, attempts: int, why: str) -> str:
    """Say why a job that failed is not tried again; `why` is what the cluster says."""
    return why or (f"tried {attempts} times" if retries else "the job allows no retries")


def parse_time(text: str | None) -> float:
    """Read a time as the API server writes it."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0

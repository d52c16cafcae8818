"""Diagnose the pods of each attempt of a run, and record finished attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import Attempt
from stoker.launchers.kubernetes.status import SlotPod
from stoker.launchers.supervise.diagnosis import Diagnosis, diagnose_slot
from stoker.launchers.supervise.slot_handle import Exited


class AttemptHistory:
    """The attempts of a run and why each failed; `is_log_complete` takes the uid of a pod."""

    def __init__(self, run: RunFolder, attempts: Sequence[Attempt], is_log_complete: Callable[[str], bool]) -> None:
        self._run, self._is_log_complete = run, is_log_complete
        self._attempts = {attempt.number: attempt for attempt in attempts}
        self._diagnoses: dict[str, Diagnosis] = {}
        """By uid, of pods whose log is complete."""

    def diagnose(self, pods: Sequence[SlotPod], attempt: int | None = None) -> list[Diagnosis]:
        """Diagnose the failed pods of an attempt, or of all; the most telling diagnosis comes first."""
        failed = [pod for pod in pods if pod.exit_code and not pod.was_disrupted and attempt in (None, pod.attempt)]
        return sorted((self._diagnose_pod(pod) for pod in failed), key=lambda diagnosis: diagnosis.sort_key)

    def _diagnose_pod(self, pod: SlotPod) -> Diagnosis:
        if pod.uid in self._diagnoses:
            return self._diagnoses[pod.uid]
        log = self._run.log_path(pod.slot, pod.attempt)
        exited = Exited(pod.exit_code or 1, out_of_memory=pod.reason == "OOMKilled")
        diagnosis = diagnose_slot(pod.slot, exited, log)
        if self._is_log_complete(pod.uid):
            self._diagnoses[pod.uid] = diagnosis
        return diagnosis

    def explain(self, pods: Sequence[SlotPod], attempt: int) -> str:
        """Return why an attempt failed or was disrupted; "" if it did not."""
        if diagnoses := self.diagnose(pods, attempt):
            return diagnoses[0].message
        disrupted = [pod for pod in pods if pod.attempt == attempt and pod.was_disrupted]
        return _describe_disruption(disrupted[0]) if disrupted else ""

    def update(self, pods: Sequence[SlotPod], *, is_finished: bool) -> tuple[Attempt, ...]:
        """Record all attempts but the current one, or all if the job has finished; return them in order."""
        numbers = sorted({pod.attempt for pod in pods})
        for number in numbers if is_finished else numbers[:-1]:
            self._attempts[number] = self._build_attempt(number, [pod for pod in pods if pod.attempt == number])
        return tuple(self._attempts[number] for number in sorted(self._attempts))

    def _build_attempt(self, number: int, pods: Sequence[SlotPod]) -> Attempt:
        diagnoses = self.diagnose(pods, number)
        recorded = self._attempts.get(number)
        return Attempt(
            number=number,
            began=min(pod.created for pod in pods),
            ended=recorded.ended if recorded else time.time(),
            code=diagnoses[0].code if diagnoses else 0,
            cause=self.explain(pods, number),
            lost=not diagnoses and any(pod.was_disrupted for pod in pods),
        )


def _describe_disruption(pod: SlotPod) -> str:
    reason = pod.reason or "node drain, eviction, preemption or node failure"
    return f"{pod.slot} was terminated by the cluster: {reason}"

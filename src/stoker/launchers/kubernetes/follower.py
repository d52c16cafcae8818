"""Follow a run in its cluster: copy its logs into the run folder and write its status, until it has finished.

The cluster itself restarts pods, so a job does not depend on this process, which can stop and start at any time. Logs
would be lost with their pods: they are copied, each line exactly once, across disconnects and restarts of the follower.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.core.spec import load, to_json
from stoker.errors import AccessDeniedError, MissingError, StokerError
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import STOPPED_MESSAGE, JobState, JobStatus
from stoker.jobs.topology import Slot, list_slots
from stoker.kube.client import STREAM_TIMEOUT_S, KubeClient
from stoker.kube.conditions import true_conditions
from stoker.kube.config import parse_handle
from stoker.kube.objects import RUN_LABEL, Manifest
from stoker.launchers.kubernetes.attempts import AttemptHistory
from stoker.launchers.kubernetes.log_stream import LogPosition, LogStream
from stoker.launchers.kubernetes.run_objects import get_lead_kind
from stoker.launchers.kubernetes.status import (
    LOST_MESSAGE,
    DerivedStatus,
    SlotPod,
    derive_slot_statuses,
    derive_status,
    describe_retries,
    latest_by_slot,
    parse_time,
    sort_owner_first,
    to_slot_pods,
)
from stoker.launchers.kubernetes.watch import ObjectWatch, WatchUpdate
from stoker.launchers.supervise.diagnosis import insert_note
from stoker.launchers.supervise.supervisor import supervisor_lock

POSITIONS_FILE = "streams.json"
POLL_S = 0.5
LOST_TIMEOUT_S = 600.0
"""Give up following after the API server was unreachable for this long; `stoker job status` resumes it."""
EVENTS_INTERVAL_S = 5.0
"""Between two reads of the events of pending pods."""
PENDING_NOTICE_S, NEXT_NOTICE_S = 4.0, 30.0
"""After how long a pending job is reported in the log, and a changed reason again."""
OUTAGE_NOTICE_S = 3.0
"""Report only longer outages of the API server."""
LOG_STREAM_TIMEOUT_S = STREAM_TIMEOUT_S + 30.0
"""How long to wait for the rest of finished pods' logs; a dropped stream is noticed after STREAM_TIMEOUT_S."""
READ_ONLY_TIMEOUT_S = 10.0
"""How long to wait for the remaining pods of a finished job that others have to stop."""
RECONNECTED_NOTICE = "reconnected to the API server"
INCOMPLETE_NOTICE = "log incomplete: the rest could not be fetched"


@dataclass
class LogFollower:
    """Follower of one run in its cluster."""

    run: RunFolder
    client: KubeClient
    kind: str
    """Kind of the objects that hold the job's status: Job or MPIJob."""
    is_read_only: bool = False
    """Whether the run was started by others: their follower stops its remaining Jobs, this one changes nothing."""
    _objects: dict[str, list[Manifest]] = field(default_factory=dict)
    _streams: dict[str, LogStream] = field(default_factory=dict)
    """By uid of the pod, as are positions and pods."""
    _positions: dict[str, LogPosition] = field(default_factory=dict)
    _pods: dict[str, Manifest] = field(default_factory=dict)
    """All pods ever seen, also deleted ones."""
    _events: list[Manifest] = field(default_factory=list)
    _events_read: float = float("-inf")
    _is_present: bool = False
    """Whether the job was seen since the API server was last unreachable."""
    _unreachable_since: dict[str, float] = field(default_factory=dict)
    """By kind."""
    _outage: str = ""
    """The reported outage of the API server."""
    _saved_positions: bytes = b""
    _notice_due: float = float("inf")
    """When to report why the job is pending."""
    _last_notice: str = ""

    def follow(self) -> None:
        """Follow the run until it has finished."""
        self.job, self._initial = self.run.job, self.run.read_status()
        self._status = msgspec.structs.replace(self._initial, began=self._initial.began or time.time())
        self._history = AttemptHistory(self.run, self._initial.attempts, self._is_log_complete)
        self._load_positions()
        updates: queue.Queue[WatchUpdate] = queue.Queue()
        watches = [ObjectWatch(self.client, kind, {RUN_LABEL: self.run.id}, updates) for kind in ("Pod", self.kind)]
        for watch in watches:
            watch.start()
        try:
            self._process_updates(updates)
        finally:
            for watch in watches:
                watch.stop()
            for stream in self._streams.values():
                stream.stop()

    def _process_updates(self, updates: queue.Queue[WatchUpdate]) -> None:
        while not self._status.state.is_final:
            self._receive(updates)
            if self._unreachable_since and time.monotonic() - min(self._unreachable_since.values()) > LOST_TIMEOUT_S:
                self._give_up()
            elif {"Pod", self.kind} <= self._objects.keys():
                self._process_objects()
            self._save_positions()

    # --- Updates from the cluster

    def _receive(self, updates: queue.Queue[WatchUpdate]) -> None:
        """Take all queued updates; wait up to POLL_S for the first."""
        with suppress(queue.Empty):
            kind, update = updates.get(timeout=POLL_S)
            while True:
                if isinstance(update, StokerError):
                    self._on_error(kind, update)
                else:
                    self._objects[kind] = update
                    self._on_reachable(kind)
                kind, update = updates.get_nowait()

    def _on_error(self, kind: str, error: StokerError) -> None:
        since = self._unreachable_since.setdefault(kind, time.monotonic())
        if isinstance(error, (AccessDeniedError, MissingError)) and kind not in self._objects:
            self._finish_as(JobState.LOST, str(error))
        elif time.monotonic() - since > OUTAGE_NOTICE_S and not self._outage:
            self._outage = f"{error.what}; the job continues in the cluster, reconnecting"
            self._write_notice(self._outage)
            self._write_status(message=self._outage)

    def _on_reachable(self, kind: str) -> None:
        if self._unreachable_since.pop(kind, None) is not None and kind == self.kind:
            self._is_present = False  # a job that was deleted during the outage may have finished in any way
        if self._outage and not self._unreachable_since:
            self._write_notice(RECONNECTED_NOTICE)
            self._outage = ""
            self._write_status(message="")

    def _give_up(self) -> None:
        hint = f"to follow it again: stoker job status {self.run.id}"
        self._finish_as(JobState.LOST, f"{self._outage or 'cannot reach the API server'}; {hint}")

    def _process_objects(self) -> None:
        """Start log streams for new pods, derive the status and write it."""
        current = {pod["metadata"]["uid"]: pod for pod in self._objects["Pod"]}
        self._pods |= current
        pods = self._list_slot_pods()
        for pod in pods:
            if pod.has_log and pod.uid in current and pod.uid not in self._streams:
                self._start_stream(pod, pods)
            if pod.uid in self._streams:
                self._streams[pod.uid].is_pod_finished = pod.is_finished or pod.uid not in current
        jobs = sort_owner_first(self._objects[self.kind])
        self._is_present = self._is_present or bool(jobs)
        if jobs and not self._initial.began:
            created = parse_time(jobs[0]["metadata"]["creationTimestamp"])
            self._status = msgspec.structs.replace(self._status, began=created)
        if not self._is_present and not self._is_stopping:
            self._finish_as(JobState.LOST, LOST_MESSAGE)
            return
        derived = derive_status(self.job, jobs, pods, self._read_events(pods))
        if derived.state.is_final:
            self._finish(derived, pods)
        else:
            self._report_progress(derived, pods)

    @property
    def _is_stopping(self) -> bool:
        return (self.run.folder / STOP_REQUEST_FILE).exists()

    def _list_slot_pods(self) -> list[SlotPod]:
        """Return all pods ever seen, with the attempts under which their logs are stored."""
        known = {uid: (Slot.parse(position.slot), position.attempt) for uid, position in self._positions.items()}
        return to_slot_pods(self._pods.values(), known)

    def _read_events(self, pods: Sequence[SlotPod]) -> list[Manifest]:
        """Return recent warning events if a pod is pending or missing: they explain why."""
        latest = latest_by_slot(pods)
        is_incomplete = len(latest) < len(list_slots(self.job))
        if self._unreachable_since or not (is_incomplete or any(pod.phase == "Pending" for pod in latest.values())):
            return []
        if time.monotonic() - self._events_read > EVENTS_INTERVAL_S:
            with suppress(StokerError):  # events only add detail
                self._events = self.client.list_objects("Event", fields="type=Warning")
            self._events_read = time.monotonic()
        return self._events

    def _report_progress(self, derived: DerivedStatus, pods: Sequence[SlotPod]) -> None:
        self._report_pending(derived)
        self._write_status(
            state=derived.state,
            attempt=self._get_last_attempt(pods),
            slots=derive_slot_statuses(self.job, pods, derived.state),
            attempts=self._history.update(pods, is_finished=False),
            message=self._outage or derived.reason,
        )

    def _report_pending(self, derived: DerivedStatus) -> None:
        """Write to the log why the job is pending, once it has been for a while."""
        if derived.state is not JobState.PENDING or not derived.reason:
            self._notice_due = float("inf")
        elif self._notice_due == float("inf"):
            self._notice_due = time.monotonic() + PENDING_NOTICE_S
        elif time.monotonic() > self._notice_due and derived.reason != self._last_notice:
            self._notice_due, self._last_notice = time.monotonic() + NEXT_NOTICE_S, derived.reason
            self._write_notice(f"pending: {derived.reason}")

    def _get_last_attempt(self, pods: Sequence[SlotPod]) -> int:
        return max((pod.attempt for pod in pods), default=self._initial.next_attempt)

    # --- Logs

    def _start_stream(self, pod: SlotPod, pods: Sequence[SlotPod]) -> None:
        path = self.run.log_path(pod.slot, pod.attempt)
        if pod.uid not in self._positions:
            path.touch()  # it may already contain a notice
            if pod.attempt and pod.slot == min(list_slots(self.job)):
                self._write_retry_reason(pod, pods, path)
            self._positions[pod.uid] = LogPosition(slot=str(pod.slot), attempt=pod.attempt, size=path.stat().st_size)
            self._save_positions()
        self._streams[pod.uid] = LogStream(self.client, pod.name, path, self._positions[pod.uid])
        self._streams[pod.uid].start()

    def _is_log_complete(self, uid: str) -> bool:
        return uid not in self._streams or self._streams[uid].position.done

    def _write_retry_reason(self, pod: SlotPod, pods: Sequence[SlotPod], path: Path) -> None:
        """Start the log of a new attempt with the reason for it."""
        self._wait_for_logs([other for other in pods if other.attempt < pod.attempt and other.is_finished])
        reason = self._history.explain(pods, pod.attempt - 1) or "the cluster restarted the pod"
        with open(path, "a") as file:
            file.write(f"--- attempt {pod.attempt}: retrying because {reason}\n")

    def _wait_for_logs(self, pods: Sequence[SlotPod]) -> None:
        """Wait until the logs of finished pods are complete; write a notice if one does not complete."""
        streams = [(pod, self._streams[pod.uid]) for pod in pods if pod.uid in self._streams]
        for _, stream in streams:
            stream.is_pod_finished = True
        deadline = time.monotonic() + LOG_STREAM_TIMEOUT_S
        for pod, stream in streams:
            stream.join(max(0.0, deadline - time.monotonic()))
            if not stream.position.done:
                with open(self.run.log_path(pod.slot, pod.attempt), "ab") as file:
                    file.write(f"--- {INCOMPLETE_NOTICE}\n".encode())
        self._save_positions()

    def _load_positions(self) -> None:
        path = self.run.folder / POSITIONS_FILE
        if path.exists():
            self._positions = load(path.read_bytes(), dict[str, LogPosition], path)
        for position in self._positions.values():
            log = self.run.log_path(Slot.parse(position.slot), position.attempt)
            if log.exists():  # lines after the saved position will be copied again
                os.truncate(log, min(position.size, log.stat().st_size))

    def _save_positions(self) -> None:
        self._positions |= {uid: stream.position for uid, stream in self._streams.items()}
        data = to_json(self._positions)
        if data != self._saved_positions:
            self._saved_positions = data
            self.run.write(POSITIONS_FILE, data)

    # --- The end

    def _finish(self, derived: DerivedStatus, pods: Sequence[SlotPod]) -> None:
        """Stop the remaining Jobs, wait for all logs, and write the final status."""
        state = JobState.STOPPED if self._is_stopping else derived.state
        if state is not JobState.STOPPED and not self.is_read_only:
            self._stop_other_jobs()
        pods = self._wait_for_pods(pods)
        self._wait_for_logs([pod for pod in pods if pod.is_finished or not self.is_read_only])
        attempts = self._history.update(pods, is_finished=True)
        message = STOPPED_MESSAGE if self._is_stopping else derived.reason
        if state is JobState.FAILED:
            last = max((pod.attempt for pod in pods), default=0)
            diagnoses = self._history.diagnose(pods, last) or self._history.diagnose(pods)
            if diagnoses:
                retries = describe_retries(self.job.retries, len(attempts), derived.reason)
                message = insert_note(diagnoses[0].message, retries)
        self._write_status(
            slots=derive_slot_statuses(self.job, pods, state),
            attempt=self._get_last_attempt(pods),
            attempts=attempts,
        )
        self._finish_as(state, message)

    def _stop_other_jobs(self) -> None:
        """Delete the Jobs that have not finished, such as parameter servers; let the owner expire."""
        if self.kind != "Job":
            return
        for number, obj in enumerate(sort_owner_first(self._objects[self.kind])):
            name, is_finished = obj["metadata"]["name"], true_conditions(obj) & {"Complete", "Failed"}
            with suppress(StokerError):
                if not number and "ttlSecondsAfterFinished" not in obj["spec"]:
                    ttl = {"ttlSecondsAfterFinished": int(self.job.kubernetes.ttl)}
                    self.client.patch("Job", name, {"spec": ttl})
                if not is_finished:
                    self.client.delete("Job", name)

    def _wait_for_pods(self, pods: Sequence[SlotPod]) -> Sequence[SlotPod]:
        """Wait until no pod runs; return the pods in their final state, or those that others have not stopped yet."""
        timeout_s = READ_ONLY_TIMEOUT_S if self.is_read_only else float(self.job.grace) + LOG_STREAM_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                pod_objects = self.client.list_objects("Pod", {RUN_LABEL: self.run.id})
            except StokerError:
                break
            current = {pod["metadata"]["uid"]: pod for pod in pod_objects}
            self._pods |= current
            pods = self._list_slot_pods()
            for pod in pods:
                if pod.has_log and pod.uid not in self._streams and pod.uid in current:
                    self._start_stream(pod, pods)
            if not any(pod.uid in current and not pod.is_finished for pod in pods):
                break
            time.sleep(POLL_S)
        return pods

    def _finish_as(self, state: JobState, message: str) -> None:
        self._write_status(state=state, message=message, ended=time.time())

    # --- Status and notices

    def _write_notice(self, text: str) -> None:
        """Append a notice to the log of the first slot."""
        with open(self.run.log_path(min(list_slots(self.job)), self._status.attempt), "ab") as file:
            file.write(f"--- {text}\n".encode())

    def _write_status(self, **changes: object) -> None:
        status: JobStatus = msgspec.structs.replace(self._status, **changes)
        if status != self._status or not (self.run.folder / "state.json").exists():
            self._status = status
            with suppress(OSError):
                self.run.write_status(status)


def main() -> None:
    """Follow the run whose folder is the first argument."""
    run = RunFolder(Path(sys.argv[1]))
    if os.fork():  # detach from the starting process
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with supervisor_lock(run):
        if run.read_status().state.is_final:
            return  # another follower finished while this one waited for the lock
        target, _ = parse_handle(run.handle)
        with KubeClient.for_target(target) as client:
            LogFollower(run, client, get_lead_kind(run.job)).follow()


if __name__ == "__main__":
    main()

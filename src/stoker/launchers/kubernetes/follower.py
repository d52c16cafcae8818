"""Follows a run in its cluster: brings its logs here, and tells how it is doing, until it is over.

The cluster needs nobody to watch over a job: it makes pods again by itself, and this process may come and go. What
must not be lost are logs, which go with the pods: they are kept here, each line once, however often it was cut off.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.core.spec import load, to_json
from stoker.errors import AccessDeniedError, MissingError, NotFoundError, StokerError
from stoker.jobs.run_folder import Run
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, JobStatus
from stoker.jobs.topology import Slot, list_slots
from stoker.kube.client import STREAM_TIMEOUT_S, KubeClient
from stoker.kube.conditions import true_conditions
from stoker.kube.config import parse_handle
from stoker.kube.objects import MAIN_CONTAINER, RUN_LABEL, Manifest
from stoker.launchers.diagnosis import Diagnosis, diagnose_slot
from stoker.launchers.kubernetes.manifests import get_lead_kind
from stoker.launchers.kubernetes.status import (
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
from stoker.launchers.supervisor import supervisor_lock

_TIME = re.compile(r"\d{4}-\d\d-\d\dT")
POSITIONS_FILE = "streams.json"
STOP_FILE = "stopping"
"""In the run folder: someone asked for its end."""
POLL_S = 0.5
RETRY_S = (0.5, 1.0, 2.0, 5.0)
LOST_S = 600.0
"""An API server that is away for so long is given up; whoever asks for the run takes it up again."""
EVENTS_S = 5.0
"""Between two looks at what the cluster tells of pods that wait."""
WAITING_S, AGAIN_S = 4.0, 30.0
"""After which waiting is told, and after which another reason for it."""
AWAY_S = 3.0
"""A pause of the API server that need not be told."""
LAST_WORDS_S = STREAM_TIMEOUT_S + 30.0
"""Time for the logs of pods that have ended: a stream that was forgotten on the way is noticed by its silence."""


WatchUpdate = tuple[str, list[Manifest] | StokerError]
"""Of a kind: its objects as they are now, or why that cannot be told."""


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far the log of a pod is here: its length, and the last line's time, which several may share."""

    slot: str
    attempt: int
    size: int = 0
    time: str = ""
    count: int = 0
    done: bool = False


class LogStream(threading.Thread):
    """Brings the log of one pod here."""

    def __init__(self, cluster: KubeClient, pod: str, path: Path, mark: LogPosition) -> None:
        super().__init__(daemon=True, name=pod)
        self._cluster, self._pod, self._path = cluster, pod, path
        self.mark = mark
        """Replaced as a whole, so that whoever keeps it keeps no half of it."""
        self.is_over = False
        """Whether the pod has ended, so that what it wrote by now is all."""

    def run(self) -> None:
        """Follow it, again and again where the stream is cut, until all of it is here."""
        tries = 0
        while not self.mark.done:
            was_over, before = self.is_over, self.mark
            try:
                self._take(was_over)
                if was_over:
                    self._move(done=True)
            except NotFoundError:
                self._move(done=True)
            except (StokerError, OSError, ValueError):  # the next try may do better
                pass
            tries = 0 if self.mark != before else tries + 1
            if not self.mark.done:
                time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])

    def _take(self, is_last: bool) -> None:
        """Take what comes behind the last line that is here; half a line only when no more can come."""
        last, skip = self.mark.time, self.mark.count
        with open(self._path, "ab") as file:
            for line in self._cluster.stream_log(self._pod, MAIN_CONTAINER, follow=True, since=last):
                moment, _, text = line.partition(b" ")
                at = moment.decode(errors="replace")
                if not _TIME.match(at) or at < last or not (line.endswith(b"\n") or is_last):
                    continue  # what has no time is the node's own word, such as that it has no log any more
                if at == last and skip:
                    skip -= 1
                    continue
                file.write(text if text.endswith(b"\n") else text + b"\n")
                file.flush()
                count = self.mark.count + 1 if at == self.mark.time else 1
                self._move(time=at, count=count, size=file.tell())

    def _move(self, **changes: object) -> None:
        self.mark = msgspec.structs.replace(self.mark, **changes)


class ObjectWatch(threading.Thread):
    """Tells of every change of the objects of one kind."""

    def __init__(self, cluster: KubeClient, kind: str, labels: dict[str, str], told: queue.Queue[WatchUpdate]) -> None:
        super().__init__(daemon=True, name=kind)
        self._cluster, self._kind, self._labels, self._told = cluster, kind, labels, told

    def run(self) -> None:
        """List them, and watch; begin again whenever that ends."""
        tries = 0
        while True:
            try:
                found, version = self._cluster.list_with_version(self._kind, self._labels)
                known = {one["metadata"]["uid"]: one for one in found}
                self._told.put((self._kind, found))
                for what, one in self._cluster.watch(self._kind, self._labels, version):
                    tries = 0
                    if what == "DELETED":
                        known.pop(one["metadata"]["uid"], None)
                    elif what in ("ADDED", "MODIFIED"):
                        known[one["metadata"]["uid"]] = one
                    self._told.put((self._kind, list(known.values())))
            except StokerError as error:
                self._told.put((self._kind, error))
                time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1


@dataclass
class LogFollower:
    """One run in its cluster."""

    run: Run
    cluster: KubeClient
    kind: str
    """Of the objects that say how the job is doing: Job or MPIJob."""
    _objects: dict[str, list[Manifest]] = field(default_factory=dict)
    _streams: dict[str, LogStream] = field(default_factory=dict)
    _marks: dict[str, LogPosition] = field(default_factory=dict)
    _pods: dict[str, Manifest] = field(default_factory=dict)
    _known: dict[str, Diagnosis] = field(default_factory=dict)
    """Why pods failed whose logs are all here."""
    _last_events: tuple[float, list[Manifest]] = (float("-inf"), [])
    _was_there: bool = False
    """Whether the job was seen, and the API server has answered ever since."""
    _away: dict[str, float] = field(default_factory=dict)
    """Since when nothing is known of a kind."""
    _told: str = ""
    _kept: bytes = b""
    _waits: float = float("inf")
    """When a reason to wait is worth telling."""
    _said: str = ""

    def follow(self) -> None:
        """Follow it to its end."""
        self.job, self._before = self.run.job, self.run.read_status()
        self._status = msgspec.structs.replace(self._before, began=self._before.began or time.time())
        self._read_marks()
        told: queue.Queue[WatchUpdate] = queue.Queue()
        for kind in ("Pod", self.kind):
            ObjectWatch(self.cluster, kind, {RUN_LABEL: self.run.id}, told).start()
        while not self._status.state.is_final:
            self._take(told)
            if self._away and time.monotonic() - min(self._away.values()) > LOST_S:
                self._lose()
            elif {"Pod", self.kind} <= self._objects.keys():
                self._look()
            self._keep_marks()

    def _take(self, told: queue.Queue[WatchUpdate]) -> None:
        """Take all news, or wait for some."""
        with suppress(queue.Empty):
            kind, found = told.get(timeout=POLL_S)
            while True:
                if isinstance(found, StokerError):
                    self._is_away(kind, found)
                else:
                    self._objects[kind] = found
                    self._is_back(kind)
                kind, found = told.get_nowait()

    def _is_away(self, kind: str, error: StokerError) -> None:
        since = self._away.setdefault(kind, time.monotonic())
        if isinstance(error, (AccessDeniedError, MissingError)) and kind not in self._objects:
            self._end(JobState.LOST, str(error))
        elif time.monotonic() - since > AWAY_S and not self._told:
            self._told = f"{error.what}; the job goes on there, and is taken up again once it answers"
            self._say(self._told)
            self._tell(message=self._told)

    def _is_back(self, kind: str) -> None:
        if self._away.pop(kind, None) is not None and kind == self.kind:
            self._was_there = False  # what is gone by now may have ended in any way
        if self._told and not self._away:
            self._say("the API server answers again")
            self._told = ""
            self._tell(message="")

    def _lose(self) -> None:
        hint = f"see again with: stoker job status {self.run.id}"
        self._end(JobState.LOST, f"{self._told or 'the API server does not answer'}; {hint}")

    def _look(self) -> None:
        """See how it is doing, listen to who speaks, and end when it is over."""
        there = {pod["metadata"]["uid"]: pod for pod in self._objects["Pod"]}
        self._pods |= there
        found = self._seen()
        for one in found:
            if one.has_log and one.uid in there and one.uid not in self._streams:
                self._listen(one, found)
            if one.uid in self._streams:
                self._streams[one.uid].is_over = one.is_finished or one.uid not in there
        leads = sort_owner_first(self._objects[self.kind])
        self._was_there = self._was_there or bool(leads)
        if leads and not self._before.began:
            self._status = msgspec.structs.replace(
                self._status, began=parse_time(leads[0]["metadata"]["creationTimestamp"])
            )
        if not self._was_there and not self._is_stopping:
            self._end(JobState.LOST, "it is gone from the cluster: its ttl has passed, or someone has deleted it")
            return
        verdict = derive_status(self.job, leads, found, self._events(found))
        if verdict.state.is_final:
            self._finish(verdict, found)
        else:
            self._tell_of(verdict, found)

    @property
    def _is_stopping(self) -> bool:
        return (self.run.folder / STOP_FILE).exists()

    def _seen(self) -> list[SlotPod]:
        """Give all pods that there were, each with the attempt by which its log is kept."""
        known = {uid: (Slot.parse(mark.slot), mark.attempt) for uid, mark in self._marks.items()}
        return to_slot_pods(self._pods.values(), known)

    def _say_why(self, verdict: DerivedStatus) -> None:
        """Say why it waits, where whoever follows sees it, once it has waited for a while."""
        if verdict.state is not JobState.PENDING or not verdict.reason:
            self._waits = float("inf")
        elif self._waits == float("inf"):
            self._waits = time.monotonic() + WAITING_S
        elif time.monotonic() > self._waits and verdict.reason != self._said:
            self._waits, self._said = time.monotonic() + AGAIN_S, verdict.reason
            self._say(f"waiting: {verdict.reason}")

    def _tell_of(self, verdict: DerivedStatus, found: Sequence[SlotPod]) -> None:
        self._say_why(verdict)
        self._tell(
            state=verdict.state,
            attempt=max((one.attempt for one in found), default=self._before.next_attempt),
            slots=derive_slot_statuses(self.job, found, verdict.state),
            attempts=self._attempts(found, over=False),
            message=self._told or verdict.reason,
        )

    def _listen(self, one: SlotPod, found: Sequence[SlotPod]) -> None:
        path = self.run.log_path(one.slot, one.attempt)
        if one.uid not in self._marks:
            path.touch()  # there may be a word of ours in it
            if one.attempt and one.slot == min(list_slots(self.job)):
                self._explain(one, found, path)
            self._marks[one.uid] = LogPosition(slot=str(one.slot), attempt=one.attempt, size=path.stat().st_size)
            self._keep_marks()
        self._streams[one.uid] = stream = LogStream(self.cluster, one.name, path, self._marks[one.uid])
        stream.start()

    def _explain(self, one: SlotPod, found: Sequence[SlotPod], path: Path) -> None:
        """Begin the log of a new attempt with the reason for it."""
        self._hear_out([other for other in found if other.attempt < one.attempt and other.is_finished])
        failed = self._causes(found, one.attempt - 1)
        moved = [other for other in found if other.attempt == one.attempt - 1 and other.was_disrupted]
        why = failed[0].message if failed else _moved(moved[0]) if moved else "it was started again"
        with open(path, "a") as file:
            file.write(f"--- attempt {one.attempt}, because {why}\n")

    def _finish(self, verdict: DerivedStatus, found: Sequence[SlotPod]) -> None:
        """End what would go on without the lead, hear all out, and tell how it ended."""
        state = JobState.STOPPED if self._is_stopping else verdict.state
        if state is not JobState.STOPPED:
            self._end_others()
        found = self._last(found)
        self._hear_out(found)
        attempts = self._attempts(found, over=True)
        message = STOPPED_MESSAGE if self._is_stopping else verdict.reason
        if state is JobState.FAILED:
            failed = self._causes(found, max((one.attempt for one in found), default=0)) or self._causes(found, None)
            if failed:
                said = describe_retries(self.job.retries, len(attempts), verdict.reason)
                message = f"{failed[0].message}; {said}"
        self._tell(
            slots=derive_slot_statuses(self.job, found, state),
            attempt=max((one.attempt for one in found), default=self._before.next_attempt),
            attempts=attempts,
        )
        self._end(state, message)

    def _end_others(self) -> None:
        """End the Jobs that would go on without the lead, since servers never end by themselves; let others expire."""
        for number, one in enumerate(sort_owner_first(self._objects[self.kind])):
            name, is_over = one["metadata"]["name"], true_conditions(one) & {"Complete", "Failed"}
            with suppress(StokerError):
                if self.kind == "Job" and not number and "ttlSecondsAfterFinished" not in one["spec"]:
                    self.cluster.patch("Job", name, {"spec": {"ttlSecondsAfterFinished": int(self.job.kubernetes.ttl)}})
                if self.kind == "Job" and not is_over:
                    self.cluster.delete("Job", name)

    def _last(self, found: Sequence[SlotPod]) -> Sequence[SlotPod]:
        """See the pods as they are at the end, once none of them runs any more."""
        deadline = time.monotonic() + float(self.job.grace) + LAST_WORDS_S
        while time.monotonic() < deadline:
            try:
                now = {
                    pod["metadata"]["uid"]: pod for pod in self.cluster.list_objects("Pod", {RUN_LABEL: self.run.id})
                }
            except StokerError:
                break
            self._pods |= now
            found = self._seen()
            for one in found:
                if one.has_log and one.uid not in self._streams and one.uid in now:
                    self._listen(one, found)
            if not any(one.uid in now and not one.is_finished for one in found):
                break
            time.sleep(POLL_S)
        return found

    def _hear_out(self, found: Sequence[SlotPod]) -> None:
        """Wait for the last words of pods that have ended; say so where they do not come."""
        streams = [(one, self._streams[one.uid]) for one in found if one.uid in self._streams]
        for _, stream in streams:
            stream.is_over = True
        deadline = time.monotonic() + LAST_WORDS_S
        for one, stream in streams:
            stream.join(max(0.0, deadline - time.monotonic()))
            if not stream.mark.done:
                with open(self.run.log_path(one.slot, one.attempt), "ab") as file:
                    file.write(b"--- what follows could not be fetched\n")
        self._keep_marks()

    def _causes(self, found: Sequence[SlotPod], attempt: int | None) -> list[Diagnosis]:
        """Give why pods of an attempt failed, the one that says most first."""
        failed = [one for one in found if one.exit_code and not one.was_disrupted and attempt in (None, one.attempt)]
        return sorted((self._cause(one) for one in failed), key=lambda one: one.sort_key)

    def _cause(self, one: SlotPod) -> Diagnosis:
        if one.uid in self._known:
            return self._known[one.uid]
        log = self.run.log_path(one.slot, one.attempt)
        found = diagnose_slot(one.slot, one.exit_code or 1, log, out_of_memory=one.reason == "OOMKilled")
        if one.uid not in self._streams or self._streams[one.uid].mark.done:
            self._known[one.uid] = found
        return found

    def _attempts(self, found: Sequence[SlotPod], *, over: bool) -> tuple[Attempt, ...]:
        """Tell of every attempt that is over."""
        known = {attempt.number: attempt for attempt in self._before.attempts}
        numbers = sorted({one.attempt for one in found})
        for number in numbers if over else numbers[:-1]:
            those = [one for one in found if one.attempt == number]
            failed = self._causes(those, number)
            moved = [one for one in those if one.was_disrupted]
            why = failed[0].message if failed else _moved(moved[0]) if moved else ""
            known[number] = self._attempt(
                number, those, failed[0].code if failed else 0, why, bool(moved and not failed)
            )
        return tuple(known[number] for number in sorted(known))

    def _attempt(self, number: int, those: Sequence[SlotPod], code: int, why: str, lost: bool) -> Attempt:
        before = next((one for one in self._status.attempts if one.number == number), None)
        return Attempt(
            number=number,
            began=min(one.created for one in those),
            ended=before.ended if before else time.time(),
            code=code,
            cause=why,
            lost=lost,
        )

    def _events(self, found: Sequence[SlotPod]) -> list[Manifest]:
        """Ask for events only where something waits: they say why."""
        last = latest_by_slot(found)
        is_waiting = len(last) < len(list_slots(self.job)) or any(one.phase == "Pending" for one in last.values())
        if self._away or not is_waiting:
            return []
        asked, events = self._last_events
        if time.monotonic() - asked > EVENTS_S:
            with suppress(StokerError):  # who may not read them does without
                events = self.cluster.list_objects("Event", fields="type=Warning")
            self._last_events = time.monotonic(), events
        return events

    # --- What is kept here

    def _read_marks(self) -> None:
        path = self.run.folder / POSITIONS_FILE
        if path.exists():
            self._marks = load(path.read_bytes(), dict[str, LogPosition], path)
        for mark in self._marks.values():
            file = self.run.log_path(Slot.parse(mark.slot), mark.attempt)
            if file.exists():  # what came after the mark was written comes again
                os.truncate(file, min(mark.size, file.stat().st_size))

    def _keep_marks(self) -> None:
        self._marks |= {uid: stream.mark for uid, stream in self._streams.items()}
        data = to_json(self._marks)
        if data != self._kept:
            self._kept = data
            self.run.write(POSITIONS_FILE, data)

    def _say(self, text: str) -> None:
        """Say something where whoever follows will see it."""
        with open(self.run.log_path(min(list_slots(self.job)), self._status.attempt), "ab") as file:
            file.write(f"--- {text}\n".encode())

    def _end(self, state: JobState, message: str) -> None:
        self._tell(state=state, message=message, ended=time.time())

    def _tell(self, **changes: object) -> None:
        status: JobStatus = msgspec.structs.replace(self._status, **changes)
        if status != self._status or not (self.run.folder / "state.json").exists():
            self._status = status
            with suppress(OSError):
                self.run.write_status(status)


def _moved(one: SlotPod) -> str:
    reason = one.reason or "its node was drained, lost or needed for others"
    return f"{one.slot} was ended by the cluster: {reason}"


def main() -> None:
    """Follow the run whose folder is given."""
    run = Run(Path(sys.argv[1]))
    if os.fork():  # whoever started us need not wait for us, nor be there when we end
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with supervisor_lock(run):
        if run.read_status().state.is_final:
            return  # another one has seen to it, while we were waiting
        place, _ = parse_handle(run.handle)
        with KubeClient.for_target(place) as cluster:
            LogFollower(run, cluster, get_lead_kind(run.job)).follow()


if __name__ == "__main__":
    main()

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
from typing import Any

import msgspec

from stoker.core.spec import load, to_json
from stoker.errors import AccessError, MissingError, NotFoundError, StokerError
from stoker.jobs.runs import Run
from stoker.jobs.status import Attempt, JobState, JobStatus
from stoker.jobs.topology import slots_of
from stoker.kube.client import Cluster
from stoker.kube.config import parts_of
from stoker.kube.objects import CONTAINER, RUN, Manifest
from stoker.launchers.causes import Cause, cause
from stoker.launchers.kubernetes.judge import Seen, Verdict, gave_up, judge, newest, seen, slot_states
from stoker.launchers.kubernetes.manifests import leading
from stoker.launchers.supervisor import watching

_TIME = re.compile(r"\d{4}-\d\d-\d\dT")
STREAMS = "streams.json"
STOPPING = "stopping"
"""In the run folder: someone asked for its end."""
POLL_S = 0.5
RETRY_S = (0.5, 1.0, 2.0, 5.0)
LOST_S = 600.0
"""An API server that is away for so long is given up; whoever asks for the run takes it up again."""
EVENTS_S = 2.0
"""Between two looks at what the cluster tells of pods that wait."""
LAST_WORDS_S = 10.0
"""Time for the logs of pods that have ended."""


class Mark(msgspec.Struct, kw_only=True):
    """How far the log of a pod is here: its length, and the last line's time, which several may share."""

    file: str
    size: int = 0
    time: str = ""
    count: int = 0
    done: bool = False


class Stream(threading.Thread):
    """Brings the log of one pod here."""

    def __init__(self, cluster: Cluster, pod: str, path: Path, mark: Mark) -> None:
        super().__init__(daemon=True, name=pod)
        self._cluster, self._pod, self._path, self.mark = cluster, pod, path, mark
        self.is_over = False
        """Whether the pod has ended, so that what it wrote by now is all."""

    def run(self) -> None:
        """Follow it, again and again where the stream is cut, until all of it is here."""
        tries = 0
        while not self.mark.done:
            was_over = self.is_over
            try:
                before = self.mark.size
                self._take()
                tries = 0 if self.mark.size > before else tries + 1
                if was_over:
                    self.mark.done = True
            except NotFoundError:
                self.mark.done = True
            except StokerError:
                tries += 1
            if not self.mark.done:
                time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])

    def _take(self) -> None:
        """Take what comes from the last line on that is here."""
        seen_before, mark = (self.mark.time, self.mark.count), self.mark
        skip = mark.count
        with open(self._path, "ab") as file:
            for line in self._cluster.log(self._pod, CONTAINER, follow=True, since=mark.time):
                moment, _, text = line.decode(errors="surrogateescape").partition(" ")
                if not _TIME.match(moment) or moment < seen_before[0]:
                    continue  # what has no time is the node's own word, such as that it has no log any more
                if moment == seen_before[0] and skip:
                    skip -= 1
                    continue
                file.write(text.encode(errors="surrogateescape") + b"\n")
                file.flush()
                self.mark.count = mark.count + 1 if moment == self.mark.time else 1
                self.mark.time, self.mark.size = moment, file.tell()


class Watch(threading.Thread):
    """Tells of every change of the objects of one kind."""

    def __init__(self, cluster: Cluster, kind: str, labels: dict[str, str], told: queue.Queue[tuple[str, Any]]) -> None:
        super().__init__(daemon=True, name=kind)
        self._cluster, self._kind, self._labels, self._told = cluster, kind, labels, told

    def run(self) -> None:
        """List them, and watch; begin again whenever that ends."""
        tries = 0
        while True:
            try:
                found, version = self._cluster.listed(self._kind, self._labels)
                self._told.put((self._kind, found))
                tries = 0
                known = {one["metadata"]["uid"]: one for one in found}
                for what, one in self._cluster.watch(self._kind, self._labels, version):
                    if what == "DELETED":
                        known.pop(one["metadata"]["uid"], None)
                    elif what in ("ADDED", "MODIFIED"):
                        known[one["metadata"]["uid"]] = one
                    self._told.put((self._kind, list(known.values())))
            except StokerError as error:
                self._told.put(("error", error))
                time.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1


@dataclass
class Follower:
    """One run in its cluster."""

    run: Run
    cluster: Cluster
    kind: str
    """Of the objects that say how the job is doing: Job or MPIJob."""
    _objects: dict[str, list[Manifest]] = field(default_factory=dict)
    _streams: dict[str, Stream] = field(default_factory=dict)
    _marks: dict[str, Mark] = field(default_factory=dict)
    _pods: dict[str, Manifest] = field(default_factory=dict)
    _known: dict[str, Cause] = field(default_factory=dict)
    """Why pods failed whose logs are all here."""
    _last_events: tuple[float, list[Manifest]] = (float("-inf"), [])
    _was_there: bool = False
    _away_since: float = 0.0
    _told: str = ""

    def follow(self) -> None:
        """Follow it to its end."""
        self.job, self._before = self.run.job, self.run.read_status()
        self._status = msgspec.structs.replace(self._before, began=self._before.began or time.time())
        self._read_marks()
        told: queue.Queue[tuple[str, Any]] = queue.Queue()
        for kind in ("Pod", self.kind):
            Watch(self.cluster, kind, {RUN: self.run.id}, told).start()
        while not self._status.state.is_final:
            self._take(told)
            if self._away_since and time.monotonic() - self._away_since > LOST_S:
                self._lose()
                return
            if {"Pod", self.kind} <= self._objects.keys():
                self._look()
            self._keep_marks()

    def _take(self, told: queue.Queue[tuple[str, Any]]) -> None:
        """Take all news, or wait for some."""
        with suppress(queue.Empty):
            kind, found = told.get(timeout=POLL_S)
            while True:
                if kind == "error":
                    self._is_away(found)
                else:
                    self._objects[kind] = found
                    self._is_back()
                kind, found = told.get_nowait()

    def _is_away(self, error: StokerError) -> None:
        if isinstance(error, (AccessError, MissingError)) and not self._objects:
            self._end(JobState.LOST, str(error))
        elif not self._away_since:
            self._away_since = time.monotonic()
        if self._away_since and time.monotonic() - self._away_since > 3 and not self._told:
            self._told = f"{error.what}; the job goes on there, and is taken up again once it answers"
            self._say(self._told)
            self._tell(message=self._told)

    def _is_back(self) -> None:
        self._away_since = 0.0
        if self._told:
            self._say("the API server answers again")
            self._told = ""
            self._tell(message="")

    def _lose(self) -> None:
        hint = f"see again with: stoker job status {self.run.id}"
        self._end(JobState.LOST, f"{self._told or 'the API server does not answer'}; {hint}")

    def _look(self) -> None:
        """See how it is doing, listen to who speaks, and end when it is over."""
        self._pods |= {pod["metadata"]["uid"]: pod for pod in self._objects["Pod"]}
        found = seen(self._pods.values())
        there = {one["metadata"]["uid"] for one in self._objects["Pod"]}
        for one in found:
            if one.has_log and one.uid not in self._streams:
                self._listen(one, found)
            if one.uid in self._streams:
                self._streams[one.uid].is_over = one.is_over or one.uid not in there
        leads = sorted(self._objects[self.kind], key=lambda one: one["metadata"]["creationTimestamp"])
        self._was_there = self._was_there or bool(leads)
        verdict = judge(self.job, _lead_first(leads), found, self._events(found))
        if not self._was_there and not (self.run.folder / STOPPING).exists():
            self._end(JobState.LOST, "it is gone from the cluster: its ttl has passed, or someone has deleted it")
        elif verdict.state.is_final:
            self._finish(verdict, found)
        else:
            self._tell_of(verdict, found)

    def _tell_of(self, verdict: Verdict, found: Sequence[Seen]) -> None:
        self._tell(
            state=verdict.state,
            attempt=max((one.attempt for one in found), default=self._before.next_attempt),
            slots=slot_states(self.job, found, verdict.state),
            attempts=self._attempts(found, over=False),
            message=self._told or verdict.why,
        )

    def _listen(self, one: Seen, found: Sequence[Seen]) -> None:
        path = self.run.log(one.slot, one.attempt)
        mark = self._marks.setdefault(one.uid, Mark(file=path.name))
        if not mark.size and one.attempt and one.slot == min(slots_of(self.job)):
            self._explain(one, found, path)
            mark.size = path.stat().st_size
        self._streams[one.uid] = stream = Stream(self.cluster, one.name, path, mark)
        stream.start()

    def _explain(self, one: Seen, found: Sequence[Seen], path: Path) -> None:
        """Begin the log of a new attempt with the reason for it."""
        self._hear_out([other for other in found if other.attempt < one.attempt])
        failed = self._causes(found, one.attempt - 1)
        moved = [other for other in found if other.attempt == one.attempt - 1 and other.was_moved]
        why = failed[0].sentence if failed else _moved(moved[0]) if moved else "it was started again"
        path.write_text(f"--- attempt {one.attempt}, because {why}\n")

    def _finish(self, verdict: Verdict, found: Sequence[Seen]) -> None:
        """End what would go on without the lead, hear all out, and tell how it ended."""
        state = JobState.STOPPED if (self.run.folder / STOPPING).exists() else verdict.state
        if state is not JobState.STOPPED:
            self._end_others()
        found = self._last(found)
        self._hear_out(found)
        attempts = self._attempts(found, over=True)
        message = "stopped" if (self.run.folder / STOPPING).exists() else verdict.why
        if state is JobState.FAILED:
            failed = self._causes(found, max((one.attempt for one in found), default=0)) or self._causes(found, None)
            if failed:
                said = gave_up(failed[0].code, self.job.retries, len(attempts), verdict.why)
                message = f"{failed[0].sentence}; {said}"
        self._tell(
            slots=slot_states(self.job, found, state),
            attempt=max((one.attempt for one in found), default=self._before.next_attempt),
            attempts=attempts,
        )
        self._end(state, message)

    def _end_others(self) -> None:
        """End the Jobs that would go on without the lead: servers never end by themselves."""
        for one in self._objects[self.kind]:
            conditions = {each["type"] for each in one.get("status", {}).get("conditions") or ()}
            if self.kind == "Job" and not conditions & {"Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"}:
                with suppress(StokerError):
                    self.cluster.patch("Job", one["metadata"]["name"], {"spec": {"suspend": True}})

    def _last(self, found: Sequence[Seen]) -> Sequence[Seen]:
        """See the pods as they are at the end, once none of them runs any more."""
        deadline = time.monotonic() + float(self.job.grace) + LAST_WORDS_S
        while time.monotonic() < deadline:
            try:
                now = {pod["metadata"]["uid"]: pod for pod in self.cluster.every("Pod", {RUN: self.run.id})}
            except StokerError:
                break
            self._pods |= now
            found = seen(self._pods.values())
            for one in found:
                if one.has_log and one.uid not in self._streams and one.uid in now:
                    self._listen(one, found)
            if not any(one.uid in now and not one.is_over for one in found):
                break
            time.sleep(POLL_S)
        return found

    def _hear_out(self, found: Sequence[Seen]) -> None:
        """Wait for the last words of pods that have ended."""
        deadline = time.monotonic() + LAST_WORDS_S
        for one in found:
            stream = self._streams.get(one.uid)
            if stream is not None:
                stream.is_over = True
                stream.join(max(0.0, deadline - time.monotonic()))
        self._keep_marks()

    def _causes(self, found: Sequence[Seen], attempt: int | None) -> list[Cause]:
        """Give why pods of an attempt failed, the one that says most first."""
        failed = [one for one in found if one.code and not one.was_moved and attempt in (None, one.attempt)]
        return sorted((self._cause(one) for one in failed), key=lambda one: one.weight)

    def _cause(self, one: Seen) -> Cause:
        if one.uid in self._known:
            return self._known[one.uid]
        log = self.run.log(one.slot, one.attempt)
        found = cause(one.slot, one.code or 1, log, out_of_memory=one.reason == "OOMKilled")
        if one.uid not in self._streams or self._streams[one.uid].mark.done:
            self._known[one.uid] = found
        return found

    def _attempts(self, found: Sequence[Seen], *, over: bool) -> tuple[Attempt, ...]:
        """Tell of every attempt that is over."""
        known = {attempt.number: attempt for attempt in self._before.attempts}
        numbers = sorted({one.attempt for one in found})
        for number in numbers if over else numbers[:-1]:
            those = [one for one in found if one.attempt == number]
            failed = self._causes(those, number)
            moved = [one for one in those if one.was_moved]
            why = failed[0].sentence if failed else _moved(moved[0]) if moved else ""
            known[number] = self._attempt(
                number, those, failed[0].code if failed else 0, why, bool(moved and not failed)
            )
        return tuple(known[number] for number in sorted(known))

    def _attempt(self, number: int, those: Sequence[Seen], code: int, why: str, lost: bool) -> Attempt:
        before = next((one for one in self._status.attempts if one.number == number), None)
        return Attempt(
            number=number,
            began=min(one.began for one in those),
            ended=before.ended if before else time.time(),
            code=code,
            cause=why,
            lost=lost,
        )

    def _events(self, found: Sequence[Seen]) -> list[Manifest]:
        """Ask for events only where something waits: they say why."""
        is_waiting = not found or any(one.phase == "Pending" for one in newest(found).values())
        if self._away_since or not is_waiting:
            return []
        asked, events = self._last_events
        if time.monotonic() - asked > EVENTS_S:
            with suppress(StokerError):  # who may not read them does without
                events = self.cluster.every("Event")
            self._last_events = time.monotonic(), events
        return events

    # --- What is kept here

    def _read_marks(self) -> None:
        path = self.run.folder / STREAMS
        if path.exists():
            self._marks = load(path.read_bytes(), dict[str, Mark], path)
        for mark in self._marks.values():
            file = self.run.logs / mark.file
            if file.exists():  # what came after the mark was written comes again
                os.truncate(file, min(mark.size, file.stat().st_size))

    def _keep_marks(self) -> None:
        data = to_json(self._marks)
        if data != getattr(self, "_kept", b""):
            self._kept = data
            self.run.write(STREAMS, data)

    def _say(self, text: str) -> None:
        """Say something where whoever follows will see it."""
        stream = next(iter(self._streams.values()), None)
        slot = min(slots_of(self.job))
        path = self.run.log(slot, self._status.attempt) if stream is None else self.run.logs / stream.mark.file
        with open(path, "ab") as file:
            file.write(f"--- {text}\n".encode())

    def _end(self, state: JobState, message: str) -> None:
        self._tell(state=state, message=message, ended=time.time())

    def _tell(self, **changes: object) -> None:
        status: JobStatus = msgspec.structs.replace(self._status, **changes)
        if status != self._status or not (self.run.folder / "state.json").exists():
            self._status = status
            with suppress(OSError):
                self.run.write_status(status)


def _moved(one: Seen) -> str:
    reason = one.reason or "its node was drained, lost or needed for others"
    return f"{one.slot} was ended by the cluster: {reason}"


def _lead_first(leads: Sequence[Manifest]) -> list[Manifest]:
    """Put the one that owns the others first."""
    return sorted(leads, key=lambda one: bool(one["metadata"].get("ownerReferences")))


def main() -> None:
    """Follow the run whose folder is given."""
    run = Run(Path(sys.argv[1]))
    if os.fork():  # whoever started us need not wait for us, nor be there when we end
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with watching(run):
        if run.read_status().state.is_final and "--again" not in sys.argv:
            return  # another one has seen to it, while we were waiting
        place, _ = parts_of(run.handle)
        with Cluster.at(place) as cluster:
            Follower(run, cluster, leading(run.job)).follow()


if __name__ == "__main__":
    main()

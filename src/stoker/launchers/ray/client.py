"""The process here that carries a run on Ray: writes the logs of all slots, and tells how they end.

The supervisor starts it as `driver/0`. The driver there, and with it every slot, ends when this process does: it writes
a beat into the cluster's store, and a driver that does not see it change for `lost_after` ends the gang. A cluster of
the run's own is a child process, and hears the end of its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any, NoReturn, Protocol

from stoker.core.processes import Process, start, until
from stoker.errors import StokerError
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import RESERVED
from stoker.jobs.topology import Slot
from stoker.launchers.diagnosis import LOST, LOST_MARK, TAIL_BYTES
from stoker.launchers.monitor import EXIT, WAITING
from stoker.launchers.ray.cluster import Cluster
from stoker.launchers.ray.plan import RayPlan, read_ray_plan
from stoker.telemetry.events import Recorder
from stoker.telemetry.reader import read_log

FRAME = "@stoker-ray "
"""As the driver writes it, which is a program of its own."""
POLL_S = 0.1
BEATS = 6
"""In the time after which a driver that hears none is alone."""
AGAIN_S = 0.5
LAST_S = 5.0
TRIES = 5
"""For the log of a driver that is over; its node may be gone, and the log with it."""
ARCHIVE = "working.zip"
DRIVER = ".stoker/driver.py"
SUBMISSIONS = "submissions"
FOLDER = "ray-folder"
"""Names the folder of a Ray of the run's own, while there is one."""
LONGEST, RAYS_OWN = 107, 64
"""What the path of a socket may have in characters, and what of it Ray adds to the folder."""
# By the Python that Ray itself runs on, which is not always the first on the PATH: our parent has Ray's library open.
_ENTRYPOINT = (
    "at=$(sed -n 's|.* \\(/.*\\)/lib/python[^/]*/[a-z]*-packages/ray/_raylet.so|\\1|p' /proc/$PPID/maps | head -n 1); "
    'python="$at/bin/python3"; [ -x "$python" ] || python=python3; exec "$python" {driver} {key} {silence:g}'
)


class Line(Protocol):
    """The line to the driver."""

    def begin(self, request: dict[str, Any]) -> None:
        """Start the driver, with what it is to do."""
        ...

    def send(self, state: dict[str, Any]) -> None:
        """Say what is wished for now; in place of what was said before."""
        ...

    def lines(self) -> Iterator[str | None]:
        """Give the lines of the driver's log, None while there are none; ends with the driver."""
        ...

    def close(self, *, is_over: bool) -> None:
        """Part, from a driver that has told its end or from one that has not; wait for one that is ours."""
        ...

    @property
    def why(self) -> str:
        """Say why the driver ended without saying so."""
        ...


class OwnCluster:
    """A driver that is our child, and has a Ray of its own."""

    why = "the driver of its Ray ended early"

    def __init__(self, plan: RayPlan, run: Run, attempt: int) -> None:
        self._run, log = run, run.logs / f"ray.{attempt}.log"
        theirs, self._to = os.pipe()
        self._back, forth = os.pipe()
        outer = {name: value for name, value in os.environ.items() if not RESERVED.fullmatch(name)}
        env = {**outer, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        env.pop("RAY_ADDRESS", None)
        argv = [sys.executable, "-P", str(Path(__file__).with_name("driver.py"))]
        with open(log, "ab") as errors:
            self._driver: Process = start(
                argv, env=env, cwd=plan.source, stdin=theirs, stdout=forth, stderr=errors, dies_with_us=True
            )
        os.close(theirs)
        os.close(forth)

    def begin(self, request: dict[str, Any]) -> None:
        """Tell it; it has been started."""
        forget_folder(self._run)
        self.send({**request, "folder": _make_folder(self._run)})

    def send(self, state: dict[str, Any]) -> None:
        """Write it on its standard input."""
        rest = memoryview(json.dumps(state).encode() + b"\n")
        with suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._to, rest) :]

    def lines(self) -> Iterator[str | None]:
        """Read its standard output."""
        found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            with open(self._back, encoding="utf-8", errors="replace") as text:
                for line in text:
                    found.put(line)
            found.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from _drained(found)

    def close(self, *, is_over: bool) -> None:  # noqa: ARG002 (it is ours)
        """Let Ray end, and end it."""
        os.close(self._to)
        until(lambda: self._driver.poll() is not None, 2 * LAST_S)
        self._driver.end(0)
        forget_folder(self._run)


def _make_folder(run: Run) -> str:
    """Make a folder for what a Ray of the run's own writes; sockets lie deep in it, and their paths must be short."""
    given = os.environ.get("RAY_TMPDIR", "")
    is_short = len(given) <= LONGEST - RAYS_OWN - len("/stoker-ray-12345678")
    is_usable = is_short and Path(given).is_absolute() and Path(given).is_dir()
    folder = mkdtemp(prefix="stoker-ray-", dir=given if is_usable else "/tmp")
    run.write(FOLDER, folder.encode())
    return folder


def forget_folder(run: Run) -> None:
    """Remove what a Ray of the run's own wrote, also one that was killed with all that watched over it."""
    record = run.folder / FOLDER
    if record.exists():
        shutil.rmtree(record.read_text(), ignore_errors=True)
        record.unlink()


class FarCluster:
    """A driver that was handed to a cluster as a job."""

    def __init__(self, plan: RayPlan, run: Run, attempt: int) -> None:
        assert plan.address is not None
        end_submissions(run, plan.address, plan.grace_s)
        self._plan, self._run, self._limit_s = plan, run, plan.lost_after_s
        self._cluster = Cluster(plan.address)
        self._name = f"stoker-{run.id}-{attempt}-{secrets.token_hex(2)}"
        self._request: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self._beat, self._sent, self._lock = 0, threading.Event(), threading.Lock()
        self._is_met = self._is_over = False
        self._heard = 0.0
        self._log = DriverLog(self._cluster, self._name, self._limit_s)

    def begin(self, request: dict[str, Any]) -> None:
        """Hand it over, which takes as long as the upload does; the request waits until the driver is there."""
        self._request = request
        _note_submission(self._run, self._name)
        entrypoint = _ENTRYPOINT.format(driver=DRIVER, key=f"gcs://{self._name}", silence=self._limit_s)
        # As long as a last checkpoint may take, should someone stop the job by Ray's own means.
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(self._plan.grace_s + 2 * LAST_S))}
        self._cluster.submit(self._name, entrypoint, self._run.folder / ARCHIVE, variables)
        self._heard = time.monotonic()
        threading.Thread(target=self._beat_on, daemon=True).start()

    def send(self, state: dict[str, Any]) -> None:
        """Have the next beat say it, at once."""
        self._state = state
        self._sent.set()

    def lines(self) -> Iterator[str | None]:
        """Follow its log; ends when the cluster does not answer for too long."""
        found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=lambda: asyncio.run(self._log.follow(found)), daemon=True).start()
        for line in _drained(found):
            if line is not None and not self._is_met and FRAME in line:
                self._is_met = True
                self._sent.set()
            yield line
            if time.monotonic() - self._heard > self._limit_s:
                self._log.why = f"the Ray cluster at {self._cluster.address} has not answered for {self._limit_s:g} s"
                return

    @property
    def why(self) -> str:
        """Say why there is no more of its log."""
        return self._log.why

    def close(self, *, is_over: bool) -> None:
        """Leave the rest to Ray; a driver that told its end is told that nothing more will be written for it."""
        with self._lock:  # not while a beat is on its way
            self._is_over = True
        if is_over:
            _forget_submission(self._run, self._name)
            with suppress(Exception):  # then it waits for a moment, and looks after itself
                self._cluster.put(self._name, {**self._state, "bye": True})

    def _beat_on(self) -> None:
        while not self._is_over:
            with suppress(Exception), self._lock:  # whatever is wrong with the network, it is tried again
                self._beat_once()
            self._sent.wait(self._limit_s / BEATS)
            self._sent.clear()

    def _beat_once(self) -> None:
        """Let the driver know of us. Until it is there to take things out of the store, nothing is put there."""
        if self._is_over:
            return
        if not self._is_met:
            self._cluster.state(self._name)
        else:
            if self._request is not None:
                self._cluster.put(f"{self._name}-request", self._request)
                self._request = None
            self._beat += 1
            self._cluster.put(self._name, {**self._state, "beat": self._beat})
        self._heard = time.monotonic()


class DriverLog:
    """The log of a driver, over connections that may break; each line once."""

    def __init__(self, cluster: Cluster, name: str, limit_s: float) -> None:
        self._cluster, self._name, self._limit_s = cluster, name, limit_s
        self._given = 0
        self.why = ""

    async def follow(self, found: queue.SimpleQueue[str | None]) -> None:
        """Read it to its end, then None; a connection that breaks is made again, and the log read once more."""
        tries = 0
        while True:
            over, why, is_read = False, "", False
            with suppress(Exception):  # whatever is wrong with the network, it is tried again
                over, why = await asyncio.to_thread(self._cluster.state, self._name)
                await self._read(found)
                is_read = True
            tries += over
            if over and (is_read or tries >= TRIES):  # and was before the log was read to its end
                self.why = f"the driver on the Ray cluster ended early: {_last_line(why)}"
                found.put(None)
                return
            await asyncio.sleep(AGAIN_S)

    async def _read(self, found: queue.SimpleQueue[str | None]) -> None:
        """Read it to the end of the connection; a driver is never silent for long, so such a connection is gone."""
        rest, again = "", self._given
        async with aclosing(self._cluster.tail(self._name)) as log:
            while True:
                try:
                    text = await asyncio.wait_for(anext(log), self._limit_s)
                except StopAsyncIteration:
                    return
                *whole, rest = (rest + text).split("\n")
                new = whole[again:]
                again -= len(whole) - len(new)
                self._given += len(new)
                for line in new:
                    found.put(line)


def _drained(found: queue.SimpleQueue[str | None]) -> Iterator[str | None]:
    while True:
        try:
            line = found.get(timeout=POLL_S)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def end_submissions(run: Run, address: str, grace_s: float) -> None:
    """End the drivers that have not told their end and may still run: nobody is there to hear them."""
    names = _submissions(run)
    cluster = Cluster(address) if names else None
    for name in names:
        with suppress(Exception):
            assert cluster is not None
            if not cluster.state(name)[0]:
                cluster.stop(name)
                until(lambda name=name: cluster.state(name)[0], grace_s + LAST_S)  # type: ignore[misc]
            if cluster.state(name)[0]:
                _forget_submission(run, name)


def _submissions(run: Run) -> list[str]:
    path = run.folder / SUBMISSIONS
    return path.read_text().split() if path.exists() else []


def _note_submission(run: Run, name: str) -> None:
    run.write(SUBMISSIONS, "".join(f"{one}\n" for one in [*_submissions(run), name]).encode())


def _forget_submission(run: Run, name: str) -> None:
    run.write(SUBMISSIONS, "".join(f"{one}\n" for one in _submissions(run) if one != name).encode())


class Carrier:
    """Takes the driver's frames apart, into the logs of the slots."""

    def __init__(self, run: Run, plan: RayPlan, attempt: int) -> None:
        self._run, self._plan, self._attempt = run, plan, attempt
        self._slots = [Slot.parse(name) for name in plan.slots]
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._logs = {str(slot): os.open(run.log(slot, attempt), flags, 0o600) for slot in self._slots}
        self._events = Recorder(slot="driver/0", attempt=attempt)
        self._ends_line = dict.fromkeys(self._logs, True)
        self._codes: dict[str, int] = {}
        self._seen = 0
        self._is_over = False
        self._state: dict[str, Any] = {"ends": 0, "stacks": 0}
        self._ends = self._stacks = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGUSR1, self._on_stacks)

    def carry(self) -> int:
        """Run the attempt to its end; 0 when every slot ended well, else the first code that was not."""
        try:
            line = self._line()
            try:
                if self._ends:  # there is nothing to be ended yet
                    return self._ended()
                line.begin(self._request())
                return self._carried(line)
            finally:
                line.close(is_over=self._is_over)
        except StokerError as error:
            return self._give_up(str(error))
        except Exception as error:
            traceback.print_exc()  # into the driver's log
            return self._give_up(f"what carries its output failed: {type(error).__name__}: {error}")

    def _line(self) -> Line:
        if self._plan.address is None:
            return OwnCluster(self._plan, self._run, self._attempt)
        return FarCluster(self._plan, self._run, self._attempt)

    def _carried(self, line: Line) -> int:
        deadline = float("inf")
        for text in line.lines():
            if text is not None and self._take(text):
                self._is_over = True
                return self._ended()
            if self._wish() != self._state:
                self._state = self._wish()
                line.send(self._state)
                if self._state["ends"]:
                    deadline = time.monotonic() + LAST_S * 2 + (self._plan.grace_s if self._state["ends"] == 1 else 0)
            if time.monotonic() > deadline:
                return self._give_up("its Ray driver did not tell the end in time")
        return self._give_up(line.why)

    def _take(self, line: str) -> bool:
        """Take one line of the driver's; whether it is the last."""
        at = line.find(FRAME)
        if at < 0:
            self._note(line)
            return False
        try:
            frame = json.loads(line[at + len(FRAME) :])
        except ValueError:  # cut off with the one who wrote it
            return False
        if frame["n"] <= self._seen:
            return False  # of a log that is read once more
        self._seen = frame["n"]
        if "slot" in frame:
            self._take_from_slot(frame)
        elif "waiting" in frame:
            self._events.mark(WAITING, frame["waiting"])
            if frame["waiting"]:
                print(frame["waiting"], flush=True)  # noqa: T201 (into the driver's log)
        elif "places" in frame:
            self._events.mark(WAITING)
            self._run.write("places.json", json.dumps(frame["places"]).encode())
        elif "failed" in frame:
            self._give_up(f"the driver on Ray failed: {frame['failed']}")
            return True
        return "end" in frame

    def _take_from_slot(self, frame: dict[str, Any]) -> None:
        name = frame["slot"]
        if frame.get("data"):
            self._write(name, frame["data"].encode("utf-8", "surrogateescape"))
        if "code" in frame:
            self._end(name, frame["code"], frame.get("fault", ""))

    def _end(self, name: str, code: int, words: str = "") -> None:
        """Tell how a slot ended, in its own log."""
        if words:
            start = "" if self._ends_line[name] else "\n"
            self._write(name, f"{start}stoker: {words}\n".encode())
        self._codes[name] = code
        events = Recorder(slot=name, attempt=self._attempt, fd=self._logs[name])
        if words and code == LOST:  # a program can end so too, but nobody has words for it
            events.mark(LOST_MARK, words)
        events.mark(EXIT, code=code)

    def _ended(self) -> int:
        """Give the first code that is not 0; slots that were never started were ended before."""
        for name in self._logs:
            if name not in self._codes:
                self._end(name, -signal.SIGTERM)
        return next((code for code in self._codes.values() if code), 0)

    def _give_up(self, why: str) -> int:
        """Tell of all slots whose end was not told that they are lost."""
        for name in self._logs:
            if name not in self._codes:
                self._end(name, LOST, why)
        return LOST

    def _write(self, name: str, data: bytes) -> None:
        self._ends_line[name] = data.endswith(b"\n")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._logs[name], rest) :]

    def _note(self, line: str) -> None:
        """Keep what Ray itself says in the driver's log."""
        if line.strip():
            with open(self._run.logs / f"ray.{self._attempt}.log", "a") as file:
                file.write(line.rstrip("\n") + "\n")

    def _request(self) -> dict[str, Any]:
        """Give what the driver is to start; secrets go this way too, and are in no command line and no file."""
        found = {name: os.environ[name] for name in self._plan.secrets if name in os.environ}
        folder = str(self._run.folder) if self._plan.address is None else f"@ray:home@/stoker/{self._run.id}"
        given = {"STOKER_ATTEMPT": str(self._attempt), "STOKER_CHECKPOINT_DIR": f"{folder}/checkpoints", **found}
        return {
            "slots": {
                name: {"argv": command.argv, "env": {**given, **command.env}, "cwd": command.cwd}
                for name, command in self._plan.slots.items()
            },
            "bundle": self._plan.bundle,
            "strategy": self._plan.strategy,
            "marks": {"STOKER_RUN": self._run.id},
            "grace_s": self._plan.grace_s,
            "silence_s": self._plan.lost_after_s,
        }

    def _wish(self) -> dict[str, Any]:
        wish: dict[str, Any] = {**self._state, "ends": self._ends}
        if self._stacks != self._state["stacks"]:
            wish |= {"stacks": self._stacks, "pids": {str(slot): self._ranks(slot) for slot in self._slots}}
        return wish

    def _ranks(self, slot: Slot) -> list[int]:
        """List the processes of a slot that were heard of."""
        beats = read_log(self._run.log(slot, self._attempt), last=TAIL_BYTES).events
        found = {event.rank: int(event.fields.get("pid", 0)) for event in beats if event.kind == "heartbeat"}
        return list(found.values())

    def _on_end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._ends += 1

    def _on_stacks(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stacks += 1


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it gave no reason"])[-1]


def main() -> NoReturn:
    """Carry the run whose folder is given."""
    run = Run(Path(sys.argv[1]))
    code = Carrier(run, read_ray_plan(run), int(os.environ.get("STOKER_ATTEMPT", "0"))).carry()
    os._exit(abs(code) + 128 if code < 0 else code)  # threads may still wait for the network


if __name__ == "__main__":
    main()

"""mpirun as the process of the launcher's slot: gives each rank's lines to the log of its worker, and tells its end.

mpirun ends ranks within two seconds when it is told to. So it is the ranks that are told here, and they have their
grace; mpirun ends when they have. When this process ends, by whatever means, so does mpirun, and with it the ranks.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stoker.core.processes import Process, children, end_marked, start
from stoker.jobs.run_folder import Run
from stoker.jobs.status import signal_of
from stoker.jobs.topology import Slot
from stoker.launchers.monitor import EXIT
from stoker.launchers.mpi_errors import noticed, signal_code
from stoker.telemetry.events import PREFIX, Recorder, parse
from stoker.telemetry.mpi_output import Tagged, TaggedLine
from stoker.telemetry.mpi_rank import EXIT as RANK_EXIT
from stoker.telemetry.mpi_rank import marked

POLL_S = 0.1
LEFT_S = 2.0
"""For ranks whose mpirun is gone, and with it the others."""
DRAIN_S = 1.0
WORDS = 400
PIPE = 1 << 20


class Scribe:
    """Writes the lines of ranks into the logs of their workers, and what mpirun says itself into the launcher's."""

    def __init__(self, run: Run, attempt: int, workers: int, ranks: int) -> None:
        self._ranks, self._attempt = ranks, attempt
        self._slots = [Slot("worker", index) for index in range(workers)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._logs = [os.open(run.log(slot, attempt), flags, 0o644) for slot in self._slots]
        self._streams: defaultdict[int, Tagged] = defaultdict(Tagged)
        self._ended: dict[int, int] = {}
        self._words: list[str] = []

    def hear(self, stream: int, data: bytes) -> None:
        """Take what mpirun wrote to one of its streams."""
        self._write(self._streams[stream].feed(data))

    def finish(self, code: int, *, told: bool) -> int:
        """Tell how each worker ended; give the exit code of the launcher."""
        for tagged in self._streams.values():
            self._write(tagged.finish())
        if (found := noticed(self._words)) and found[0] not in self._ended:
            rank, rank_code = found
            self._recorder(rank // self._ranks, rank).mark(RANK_EXIT, code=rank_code)
            self._ended[rank] = rank_code
        for index in range(len(self._slots)):
            self._recorder(index).mark(EXIT, code=self._code(index, code))
        if told:
            return 128 + signal.SIGTERM
        failed = [rank for rank, rank_code in self._ended.items() if rank_code]
        if failed:
            slot = self._slots[failed[0] // self._ranks]
            self._say(f"mpirun has ended all, for another rank is gone: rank {failed[0]}, {slot}")
        return code

    def _code(self, worker: int, code: int) -> int:
        """Give a worker's exit code: that of the first of its ranks that failed by itself, or was ended."""
        ranks = range(worker * self._ranks, (worker + 1) * self._ranks)
        failed = [found for rank, found in self._ended.items() if rank in ranks and found]
        if failed:
            return next((found for found in failed if signal_of(found) != signal.SIGTERM), failed[0])
        if not code or all(rank in self._ended for rank in ranks):
            return 0
        return -signal.SIGTERM if self._ended or signal_of(code) else code

    def _write(self, lines: list[TaggedLine]) -> None:
        """Write lines to where they belong, as few times as can be."""
        texts: defaultdict[int, list[bytes]] = defaultdict(list)
        for rank, _, text in lines:
            if rank is None:
                self._words = [*self._words[-WORDS:], text.decode(errors="replace")]
                texts[1].append(text)
                continue
            log = self._logs[min(rank // self._ranks, len(self._logs) - 1)]
            if PREFIX.encode() in text and RANK_EXIT.encode() in text:
                self._note(text)
            texts[log].append(marked(text, rank, self._ranks))
        for log, found in texts.items():
            _put(log, b"".join(text + b"\n" for text in found))

    def _note(self, text: bytes) -> None:
        event = parse(text.decode(errors="replace"))
        if event and event.fields.get("name") == RANK_EXIT:
            self._ended[event.rank] = signal_code(int(event.fields.get("code", 0)))

    def _say(self, words: str) -> None:
        _put(1, f"stoker: {words}\n".encode())

    def _recorder(self, worker: int, rank: int = 0) -> Recorder:
        return Recorder(slot=str(self._slots[worker]), rank=rank, attempt=self._attempt, fd=self._logs[worker])


class Carrier:
    """Runs mpirun to its end, or brings that about."""

    def __init__(self, run: Run, argv: list[str], scribe: Scribe, workers: int, grace_s: float) -> None:
        self._run, self._argv, self._scribe, self._grace_s = run, argv, scribe, grace_s
        self._workers = workers
        self._ends = 0
        self._since = float("inf")
        self._told: set[int] = set()

    def listen(self) -> None:
        """Take signals for wishes: the first asks all ranks to end, the second ends them."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)

    def carry(self) -> int:
        """Give the exit code of the launcher."""
        pipes = [os.pipe(), os.pipe()]
        mpirun = start(self._argv, stdout=pipes[0][1], stderr=pipes[1][1], dies_with_us=True)
        for _, theirs in pipes:
            os.close(theirs)
        self._watch(mpirun, [ours for ours, _ in pipes])
        code = mpirun.end(0)
        for index in range(self._workers):  # whom mpirun could not end
            end_marked({"STOKER_RUN": self._run.id, "STOKER_SLOT": f"worker/{index}"}, 0 if self._ends > 1 else LEFT_S)
        return self._scribe.finish(signal_code(code), told=bool(self._ends))

    def _watch(self, mpirun: Process, streams: list[int]) -> None:
        """Carry what is said until mpirun has ended, and has said all."""
        ended = float("inf")
        while streams and time.monotonic() < ended + DRAIN_S:
            if ended == float("inf"):
                self._end_when_told(mpirun)
                if mpirun.poll() is not None:
                    ended = time.monotonic()
            for stream in select.select(streams, [], [], POLL_S)[0]:
                data = os.read(stream, PIPE)
                if data:
                    self._scribe.hear(stream, data)
                else:
                    streams.remove(stream)

    def _end_when_told(self, mpirun: Process) -> None:
        if not self._ends:
            return
        if time.monotonic() > self._since + self._grace_s:
            self._ends = max(2, self._ends)
        at_once = self._ends > 1
        for pid in children(mpirun.pid):
            if at_once or pid not in self._told:
                with suppress(ProcessLookupError):  # each leads a group of its own, soon after it was started
                    os.killpg(pid, signal.SIGKILL if at_once else signal.SIGTERM)
                    self._told.add(pid)
        if at_once:
            os.killpg(mpirun.pid, signal.SIGKILL)

    def _on_end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._ends += 1
        self._since = min(self._since, time.monotonic())


def _put(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main() -> NoReturn:
    """Carry the mpirun whose words follow the run's folder."""
    run, argv = Run(Path(sys.argv[1])), sys.argv[3:]
    job = run.job
    attempt = int(os.environ.get("STOKER_ATTEMPT", "0"))
    scribe = Scribe(run, attempt, job.max_workers, job.ranks_per_worker)
    carrier = Carrier(run, argv, scribe, job.max_workers, float(job.grace))
    carrier.listen()
    code = carrier.carry()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

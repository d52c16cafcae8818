"""Launcher slot of an MPI job: run mpirun, copy each rank's output to its worker's log, report exit codes.

mpirun kills its ranks two seconds after a SIGTERM. Therefore the ranks are signalled directly and get their full grace
period; mpirun exits after them. When this process exits for any reason, mpirun and its ranks are terminated too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stoker.core.processes import Process, child_pids, start, terminate_by_env
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import signal_from_exit_code
from stoker.jobs.topology import Slot
from stoker.launchers.mpi.mpirun_errors import PEER_EXITED, find_killed_rank, negate_signal
from stoker.launchers.mpi.mpirun_output import TaggedLine, TagParser
from stoker.remote.frames import write_all
from stoker.remote.mpi_rank import RANK_EXIT_MARK, prefix_rank
from stoker.telemetry.events import PREFIX, Recorder, parse

POLL_S = 0.1
LEFTOVER_GRACE_S = 2.0
"""For ranks that outlive mpirun: their peers are gone."""
DRAIN_S = 1.0
MAX_LINES = 400
READ_BYTES = 1 << 20
STDOUT = 1
SLOT_EXIT_MARK = "slot_exit"
"""Mark at the end of a worker's log with the exit code of the worker."""


class RankLogWriter:
    """Writer for mpirun's output: lines of ranks to the logs of their workers, its own lines to the launcher's log."""

    def __init__(self, run: RunFolder, attempt: int, ranks: Sequence[int]) -> None:
        """Open the logs; `ranks` is the number of ranks of each worker."""
        self._ranks, self._attempt = ranks, attempt
        self._worker_of = [worker for worker, count in enumerate(ranks) for _ in range(count)]
        self._slots = [Slot("worker", index) for index in range(len(ranks))]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._logs = [os.open(run.log_path(slot, attempt), flags, 0o644) for slot in self._slots]
        self._parsers: defaultdict[int, TagParser] = defaultdict(TagParser)
        self._rank_codes: dict[int, int] = {}
        self._mpirun_lines: list[str] = []

    def feed(self, stream: int, data: bytes) -> None:
        """Process data that mpirun wrote to one of its streams."""
        self._write(self._parsers[stream].feed(data))

    def finish(self, code: int, *, is_stopped: bool) -> int:
        """Write the exit code of each worker to its log and return the exit code of the launcher."""
        for parser in self._parsers.values():
            self._write(parser.finish())
        if (killed := find_killed_rank(self._mpirun_lines)) and killed[0] not in self._rank_codes:
            rank, rank_code = killed
            self._recorder(self._worker_of[rank], rank).mark(RANK_EXIT_MARK, code=rank_code)
            self._rank_codes[rank] = rank_code
        for index in range(len(self._slots)):
            self._recorder(index).mark(SLOT_EXIT_MARK, code=self._worker_code(index, code))
        if is_stopped:
            return 128 + signal.SIGTERM
        failed = [rank for rank, rank_code in self._rank_codes.items() if rank_code]
        if failed:
            slot = self._slots[self._worker_of[failed[0]]]
            write_all(STDOUT, f"stoker: {PEER_EXITED} rank {failed[0]} ({slot}) exited\n".encode())
        return code

    def _worker_code(self, worker: int, code: int) -> int:
        """Return a worker's exit code: that of its first rank that failed by itself, else of one that was stopped."""
        ranks = [rank for rank, other in enumerate(self._worker_of) if other == worker]
        failed = [rank_code for rank, rank_code in self._rank_codes.items() if rank in ranks and rank_code]
        if failed:
            return next(
                (rank_code for rank_code in failed if signal_from_exit_code(rank_code) != signal.SIGTERM), failed[0]
            )
        if not code or all(rank in self._rank_codes for rank in ranks):
            return 0
        return -signal.SIGTERM if self._rank_codes or signal_from_exit_code(code) else code

    def _write(self, lines: list[TaggedLine]) -> None:
        """Write lines to their logs, with one write per log."""
        texts: defaultdict[int, list[bytes]] = defaultdict(list)
        for rank, _, text in lines:
            if rank is None:
                self._mpirun_lines = [*self._mpirun_lines[-MAX_LINES:], text.decode(errors="replace")]
                texts[STDOUT].append(text)
                continue
            worker = self._worker_of[min(rank, len(self._worker_of) - 1)]
            log = self._logs[worker]
            if PREFIX.encode() in text and RANK_EXIT_MARK.encode() in text:
                self._record_rank_exit(text)
            texts[log].append(prefix_rank(text, rank, self._ranks[worker]))
        for log, texts_of_log in texts.items():
            write_all(log, b"".join(text + b"\n" for text in texts_of_log))

    def _record_rank_exit(self, text: bytes) -> None:
        event = parse(text.decode(errors="replace"))
        if event and event.fields.get("name") == RANK_EXIT_MARK:
            self._rank_codes[event.rank] = negate_signal(int(event.fields.get("code", 0)))

    def _recorder(self, worker: int, rank: int = 0) -> Recorder:
        return Recorder(slot=str(self._slots[worker]), rank=rank, attempt=self._attempt, fd=self._logs[worker])


class MpiSlot:
    """The mpirun process of an attempt, run until it exits or is stopped."""

    def __init__(self, run: RunFolder, argv: list[str], writer: RankLogWriter, workers: int, grace_s: float) -> None:
        self._run, self._argv, self._writer, self._grace_s = run, argv, writer, grace_s
        self._workers = workers
        self._stop_requests = 0
        self._stop_requested_at = float("inf")
        self._signalled: set[int] = set()

    def install_signal_handlers(self) -> None:
        """Treat the first SIGTERM or SIGINT as a request to terminate all ranks, the second as one to kill them."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop_signal)

    def run(self) -> int:
        """Run mpirun to its exit and return the exit code of the launcher."""
        pipes = [os.pipe(), os.pipe()]
        mpirun = start(self._argv, stdout=pipes[0][1], stderr=pipes[1][1], terminate_with_parent=True)
        for _, write_end in pipes:
            os.close(write_end)
        self._copy_output(mpirun, [read_end for read_end, _ in pipes])
        code = mpirun.stop(0)
        grace_s = 0 if self._stop_requests > 1 else LEFTOVER_GRACE_S
        for index in range(self._workers):  # ranks that mpirun could not stop
            terminate_by_env({"STOKER_RUN": self._run.id, "STOKER_SLOT": f"worker/{index}"}, grace_s)
        return self._writer.finish(negate_signal(code), is_stopped=bool(self._stop_requests))

    def _copy_output(self, mpirun: Process, streams: list[int]) -> None:
        """Copy mpirun's output until it has exited and its streams are drained."""
        exited_at = float("inf")
        while streams and time.monotonic() < exited_at + DRAIN_S:
            if exited_at == float("inf"):
                self._stop_if_requested(mpirun)
                if mpirun.poll() is not None:
                    exited_at = time.monotonic()
            for stream in select.select(streams, [], [], POLL_S)[0]:
                data = os.read(stream, READ_BYTES)
                if data:
                    self._writer.feed(stream, data)
                else:
                    streams.remove(stream)

    def _stop_if_requested(self, mpirun: Process) -> None:
        if not self._stop_requests:
            return
        if time.monotonic() > self._stop_requested_at + self._grace_s:
            self._stop_requests = max(2, self._stop_requests)
        is_kill = self._stop_requests > 1
        for pid in child_pids(mpirun.pid):
            if is_kill or pid not in self._signalled:
                with suppress(ProcessLookupError):  # a child becomes a group leader shortly after its start
                    os.killpg(pid, signal.SIGKILL if is_kill else signal.SIGTERM)
                    self._signalled.add(pid)
        if is_kill:
            os.killpg(mpirun.pid, signal.SIGKILL)

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stop_requests += 1
        self._stop_requested_at = min(self._stop_requested_at, time.monotonic())


def main() -> NoReturn:
    """Run `mpi_slot RUN_FOLDER -- mpirun …`."""
    run, argv = RunFolder(Path(sys.argv[1])), sys.argv[3:]
    job = run.job
    attempt = int(os.environ.get("STOKER_ATTEMPT", "0"))
    writer = RankLogWriter(run, attempt, job.ranks)
    slot = MpiSlot(run, argv, writer, job.max_workers, float(job.grace))
    slot.install_signal_handlers()
    code = slot.run()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

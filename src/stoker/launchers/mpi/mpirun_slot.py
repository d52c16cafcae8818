"""Launcher slot of an MPI job: run mpirun, whose ranks write to the logs of their workers, and report exit codes.

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

from stoker.core.processes import Process, become_subreaper, child_pids, start, terminate_by_env, wait_until
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import signal_from_exit_code
from stoker.jobs.topology import Slot
from stoker.launchers.mpi.mpirun_errors import PEER_EXITED, find_killed_rank, negate_signal
from stoker.remote.frames import write_all
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.events import Event, Recorder
from stoker.telemetry.reader import LogTail, find_marks

POLL_S = 0.1
LEFTOVER_GRACE_S = 2.0
"""For ranks that outlive mpirun: their peers are gone."""
DRAIN_S = 1.0
MAX_TAIL_BYTES = 32 << 10
"""What is kept of the messages of mpirun."""
READ_BYTES = 1 << 20
STDOUT = 1
SLOT_EXIT_MARK = "slot_exit"
"""Mark at the end of a worker's log with the exit code of the worker."""


class RankExits:
    """Exit codes of the ranks, from the marks in the logs of their workers."""

    def __init__(self, run: RunFolder, attempt: int, ranks: Sequence[int]) -> None:
        """Read the logs of an attempt; `ranks` is the number of ranks of each worker."""
        self._attempt = attempt
        self._worker_of = [worker for worker, count in enumerate(ranks) for _ in range(count)]
        self._slots = [Slot("worker", index) for index in range(len(ranks))]
        self._logs = [run.log_path(slot, attempt) for slot in self._slots]
        self._tails = [LogTail(log) for log in self._logs]
        self._rank_codes: dict[int, int] = {}

    def update(self) -> None:
        """Read what the logs have gained."""
        events = [event for tail in self._tails for event in tail.iter_parts() if isinstance(event, Event)]
        for mark in sorted(find_marks(events, RANK_EXIT_MARK), key=lambda mark: mark.t):
            self._rank_codes[mark.rank] = negate_signal(int(mark.fields.get("code", 0)))

    def finish(self, code: int, mpirun_lines: Sequence[str]) -> None:
        """Write the exit code of each worker to its log, given the exit code and the messages of mpirun."""
        self.update()
        if (killed := find_killed_rank(mpirun_lines)) and killed[0] not in self._rank_codes:
            rank, rank_code = killed
            self._mark(self._worker_of[rank], RANK_EXIT_MARK, rank_code, rank)
            self._rank_codes[rank] = rank_code
        for index in range(len(self._slots)):
            self._mark(index, SLOT_EXIT_MARK, self._worker_code(index, code))

    def explain(self) -> str:
        """Return which rank failed first, as a line; empty if none did."""
        failed = [rank for rank, code in self._rank_codes.items() if code]
        if not failed:
            return ""
        return f"stoker: {PEER_EXITED} rank {failed[0]} ({self._slots[self._worker_of[failed[0]]]}) exited\n"

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

    def _mark(self, worker: int, name: str, code: int, rank: int = 0) -> None:
        with open(self._logs[worker], "ab") as log:
            recorder = Recorder(slot=str(self._slots[worker]), rank=rank, attempt=self._attempt, fd=log.fileno())
            recorder.mark(name, code=code)


class MpiSlot:
    """The mpirun process of an attempt, run until it exits or is stopped."""

    def __init__(self, run: RunFolder, argv: list[str], exits: RankExits, workers: int, grace_s: float) -> None:
        self._run, self._argv, self._exits, self._grace_s = run, argv, exits, grace_s
        self._workers = workers
        self._tails: defaultdict[int, bytes] = defaultdict(bytes)
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
        wait_until(reap_children, DRAIN_S)  # they write the last output of ranks that mpirun has killed
        lines = [line for tail in self._tails.values() for line in tail.decode(errors="replace").splitlines()]
        self._exits.finish(negate_signal(code), lines)
        if self._stop_requests:
            return 128 + signal.SIGTERM
        write_all(STDOUT, self._exits.explain().encode())
        return negate_signal(code)

    def _copy_output(self, mpirun: Process, streams: list[int]) -> None:
        """Copy mpirun's output until it has exited and its streams are drained."""
        exited_at = float("inf")
        while streams and time.monotonic() < exited_at + DRAIN_S:
            if exited_at == float("inf"):
                self._stop_if_requested(mpirun)
                if mpirun.poll() is not None:
                    exited_at = time.monotonic()
            self._exits.update()
            for stream in select.select(streams, [], [], POLL_S)[0]:
                data = os.read(stream, READ_BYTES)
                if not data:
                    streams.remove(stream)
                    continue
                write_all(STDOUT, data)
                self._tails[stream] = (self._tails[stream] + data)[-MAX_TAIL_BYTES:]

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


def reap_children() -> bool:
    """Reap the children that have exited; return whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def main() -> NoReturn:
    """Run `mpi_slot RUN_FOLDER -- mpirun …`."""
    run, argv = RunFolder(Path(sys.argv[1])), sys.argv[3:]
    job = run.job
    attempt = int(os.environ.get("STOKER_ATTEMPT", "0"))
    become_subreaper()
    slot = MpiSlot(run, argv, RankExits(run, attempt, job.ranks), job.max_workers, float(job.grace))
    slot.install_signal_handlers()
    code = slot.run()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

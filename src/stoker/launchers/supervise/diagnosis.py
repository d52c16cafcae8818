"""Diagnosis of a failed slot in one sentence: from exit codes, torchrun's failure table and the end of the log."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import InputError, MissingError
from stoker.jobs.status import signal_from_exit_code
from stoker.jobs.topology import Slot
from stoker.launchers.mpi.mpirun_errors import PEER_EXITED, classify_exit_code, explain_exit
from stoker.launchers.supervise.error_lines import find_last_error, has_output_after
from stoker.launchers.supervise.slot_handle import Exited
from stoker.launchers.supervise.torchrun_output import drop_torchrun_output
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.events import PEER_LOST, Event
from stoker.telemetry.reader import find_marks, read_log

TAIL_LINES, TAIL_BYTES = 400, 4 << 20
LOST_EXIT_CODE = 255
"""Exit code of a slot whose host is lost, as `ssh` uses it; a program may exit with it too."""
# One failure in torchrun's table; the root cause comes last.
_FAILURE = re.compile(r"rank\s*:\s*(?P<rank>\d+) \(local_rank.*?exitcode\s*:\s*(?P<code>-?\d+) ", re.DOTALL)
_CLASS = re.compile(r"^\w+Error: ")
# What a rank reports when a peer is gone.
_PEER_ERROR = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote (process|worker|rank)|Timed out|communicator was aborted|"
    rf"{PEER_LOST}|{PEER_EXITED}|DistStoreError"
)

LOG_SEPARATOR = "; log: "
SYS_EXIT_CODE = 1
"""Exit code of Python after `sys.exit("message")`."""
MAX_QUOTED = 200


def insert_note(message: str, note: str) -> str:
    """Add a note to the message of a failed attempt, in front of the log path, which stays last for copying."""
    before, separator, log = message.rpartition(LOG_SEPARATOR)
    return f"{before}; {note}{separator}{log}" if separator else f"{message}; {note}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a slot failed; `code` is the exit code of the program, not of the process that started it."""

    slot: Slot
    rank: int | None
    code: int
    error: str | None
    log: Path
    out_of_memory: bool = False
    lost: bool = False
    """Whether the slot was lost with its host, through no fault of its own."""
    has_run: bool = False
    """Whether the program made progress, or printed more after the error."""
    last_output: str = ""
    """The last line that the program printed: without an error, it may say why it exited."""

    @property
    def message(self) -> str:
        """One sentence with the slot, the cause and the log file."""
        subject = str(self.slot) if self.rank is None else f"{self.slot} (rank {self.rank})"
        return f"{subject} {self._summary().removesuffix('.')}{LOG_SEPARATOR}{self.log}"

    @property
    def is_secondary(self) -> bool:
        """Whether it failed, or was stopped, only because a peer was gone."""
        is_terminated = self._signal == signal.SIGTERM
        return not self.lost and (is_terminated or bool(self.error and _PEER_ERROR.search(self.error)))

    @property
    def is_conclusive(self) -> bool:
        """Whether it names a cause of its own; otherwise another slot may yet report one."""
        return not self.is_secondary and (self.lost or bool(self._signal) or self.error is not None)

    @property
    def _signal(self) -> int:
        return signal_from_exit_code(self.code)

    @property
    def sort_key(self) -> tuple[bool, bool, bool, Slot]:
        """Order for choosing the root cause: primary failures first, then kills, then those with an error message."""
        return self.is_secondary, not self._signal, self.error is None, self.slot

    def _summary(self) -> str:
        if self._signal == signal.SIGKILL and self.out_of_memory:
            return "was killed by SIGKILL while the kernel was killing processes of its machine that were out of memory"
        if self._signal:
            return f"was killed by {_signal_name(self._signal)}"
        if self.lost:
            return f"was lost: {self.error}"
        if self.error and self.code in (InputError.exit_code, MissingError.exit_code) and not self.has_run:
            return f"could not start: {_CLASS.sub('', self.error)}"
        if self.error and self.code == 1:
            return f"failed: {self.error}"
        if self.error is None and self.last_output and self.code == SYS_EXIT_CODE:
            return f"exited with code {self.code}; last output: {self.last_output}"
        return f"exited with code {self.code}" + (f": {self.error}" if self.error else "")


def diagnose_slot(slot: Slot, exited: Exited, log: Path) -> Diagnosis:
    """Return why a slot failed; of several failed ranks, the one that failed first by itself."""
    code, out_of_memory = exited.code, exited.out_of_memory
    if exited.is_lost or exited.reason:
        return Diagnosis(slot, None, code, exited.reason, log, out_of_memory, lost=exited.is_lost)
    content = read_log(log, last=TAIL_BYTES)
    lines = content.lines[-TAIL_LINES:]
    errors = find_marks(content.events, "error")
    ranks = [(int(match["rank"]), int(match["code"])) for match in _FAILURE.finditer("\n".join(lines))]
    ranks += _failed_ranks(content.events)
    output = drop_torchrun_output(lines)
    last_output = next((text.strip()[:MAX_QUOTED] for text in reversed(output) if text.strip()), "")
    has_stepped = any(event.kind == "heartbeat" and event.fields.get("step", 0) > 0 for event in content.events)
    diagnoses = [
        Diagnosis(
            slot,
            rank,
            rank_code,
            _reported_error(errors, rank) or find_last_error(lines, rank),
            log,
            out_of_memory,
            has_run=has_stepped,
            last_output=last_output,
        )
        for rank, rank_code in reversed(ranks)
    ]
    if not diagnoses:
        error = _reported_error(errors, None) or find_last_error(lines, None)
        if error is None and slot.role == "launcher":
            error = explain_exit(lines)
            code = classify_exit_code(error, code)
        has_run = has_stepped or (not errors and error is not None and has_output_after(output, error))
        diagnoses = [Diagnosis(slot, None, code, error, log, out_of_memory, has_run=has_run, last_output=last_output)]
    return next((diagnosis for diagnosis in diagnoses if not diagnosis.is_secondary), diagnoses[0])


def _failed_ranks(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Return rank and exit code of ranks that reported a failure, the first to fail last, as in torchrun's table."""
    exits = find_marks(events, RANK_EXIT_MARK)
    return [(event.rank, code) for event in reversed(exits) if (code := int(event.fields.get("code", 0)))]


def _reported_error(errors: Sequence[Event], rank: int | None) -> str | None:
    """Return the error that the program itself reported as a mark."""
    return next((str(event.fields.get("detail")) for event in errors if rank in (None, event.rank)), None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"

"""Why an attempt failed, in one sentence: from exit codes, what torchrun tells, and the last words of a log."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import InputError, MissingError
from stoker.jobs.status import signal_of
from stoker.jobs.topology import Slot
from stoker.launchers.mpi_errors import code_of, why
from stoker.telemetry.events import Event
from stoker.telemetry.mpi_rank import EXIT as RANK_EXIT
from stoker.telemetry.reader import read_log

TAIL_LINES, TAIL_BYTES = 400, 4 << 20
LOST = 255
"""The exit code of a slot whose host is gone, as `ssh` ends too; a program may end so by itself, hence the mark."""
LOST_MARK = "slot_lost"
"""By which whoever stands for a slot elsewhere tells, in its log, that it is lost, and why."""
NO_MEMORY = "had no memory left, and the kernel there was ending processes"
"""What is said in the log of a slot elsewhere."""
# One failure in torchrun's table; the root cause comes last.
_FAILURE = re.compile(r"rank\s*:\s*(?P<rank>\d+) \(local_rank.*?exitcode\s*:\s*(?P<code>-?\d+) ", re.DOTALL)
_RANK = re.compile(r"\[(?:rank|default)(?P<rank>\d+)\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
# What torchrun raises because of a rank, which says nothing of why.
_AGENT = ("ChildFailedError", "SignalException")
_CLASS = re.compile(r"^\w+Error: ")
# Of programs that end without a traceback.
_LINES = (
    re.compile(r"(?:stoker|error|\S+: error): (?P<words>.+)"),
    re.compile(r"\S*python[\d.]*: (?P<words>(?:No module named|can't open file|Error while finding) .+)"),
    re.compile(r"(?P<words>(?:\w+\.)*\w*(?:Error|Exception)(?::.*)?)$"),
    re.compile(r"\S*sh: (?:.*: )?(?P<words>\S+: (?:command )?not found|\S+: Permission denied)$"),
)
# What a rank says when another one is gone.
_PARTNER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote (process|worker|rank)|Timed out|communicator was aborted|"
    r"another rank is gone|DistStoreError"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """What failed first, and why; `code` is the program's own, not that of what started it."""

    slot: Slot
    rank: int | None
    code: int
    words: str | None
    log: Path
    out_of_memory: bool = False
    lost: bool = False
    """Whether it was lost with its host, through no fault of its own."""

    @property
    def sentence(self) -> str:
        """Name slot, cause and log file."""
        who = str(self.slot) if self.rank is None else f"{self.slot} (rank {self.rank})"
        return f"{who} {self._what()}; its log: {self.log}"

    @property
    def is_of_a_partner(self) -> bool:
        """Whether it only tells that another one was gone, or was told to end because of that."""
        return not self.lost and (self._signal == signal.SIGTERM or bool(self.words and _PARTNER.search(self.words)))

    @property
    def says_why(self) -> bool:
        """Whether it tells a reason of its own; else another slot may yet."""
        return not self.is_of_a_partner and (self.lost or bool(self._signal) or self.words is not None)

    @property
    def _signal(self) -> int:
        return signal_of(self.code)

    @property
    def weight(self) -> tuple[bool, bool, bool, Slot]:
        """Sort causes: what failed by itself first, killed before failed, and who says why before who does not."""
        return self.is_of_a_partner, not self._signal, self.words is None, self.slot

    def _what(self) -> str:
        if self._signal == signal.SIGKILL and self.out_of_memory:
            return "was killed by SIGKILL while the kernel was ending processes because there was no memory left"
        if self._signal:
            return f"was killed by {_name(self._signal)}"
        if self.lost:
            return f"was lost: {self.words}"
        if self.words and self.code in (InputError.exit_code, MissingError.exit_code):
            return f"refused to start: {_CLASS.sub('', self.words)}"
        if self.words and self.code == 1:
            return f"failed: {self.words}"
        return f"ended with exit code {self.code}" + (f": {self.words}" if self.words else "")


def cause(slot: Slot, code: int, log: Path, *, out_of_memory: bool = False) -> Cause:
    """Find why a slot failed: of its ranks the one that failed by itself."""
    found = read_log(log, last=TAIL_BYTES)
    lines = found.lines[-TAIL_LINES:]
    if lost := _marks(found.events, LOST_MARK):
        return Cause(slot, None, code, str(lost[-1].fields.get("detail")), log, lost=True)
    told = _marks(found.events, "error")
    out_of_memory = out_of_memory or any(line.startswith("---") and NO_MEMORY in line for line in lines)
    ranks = [(int(one["rank"]), int(one["code"])) for one in _FAILURE.finditer("\n".join(lines))]
    ranks += _carried(found.events)
    causes = [
        Cause(slot, rank, rank_code, _own_words(told, rank) or _last_words(lines, rank), log, out_of_memory)
        for rank, rank_code in reversed(ranks)
    ]
    if not causes:
        words = _own_words(told, None) or _last_words(lines, None)
        if words is None and slot.role == "launcher":
            words = why(lines)
            code = code_of(words, code)
        causes = [Cause(slot, None, code, words, log, out_of_memory)]
    return next((one for one in causes if not one.is_of_a_partner), causes[0])


def _carried(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Find the ranks of a carried slot that failed, the first of them last, as in torchrun's table."""
    ended = _marks(events, RANK_EXIT)
    return [(event.rank, code) for event in reversed(ended) if (code := int(event.fields.get("code", 0)))]


def _marks(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event.kind == "mark" and event.fields.get("name") == name]


def _own_words(told: Sequence[Event], rank: int | None) -> str | None:
    """Find what the program itself said of its error."""
    return next((str(event.fields.get("detail")) for event in told if rank in (None, event.rank)), None)


def _last_words(lines: Sequence[str], rank: int | None) -> str | None:
    """Find what a rank said of its error last; torch marks lines with the rank once it knows it."""
    marks = [_RANK.match(line) for line in lines]
    own = [
        line[mark.end() :] if mark else line
        for line, mark in zip(lines, marks, strict=True)
        if rank is None or not any(marks) or (mark is not None and int(mark["rank"]) == rank)
    ]
    raised = [words for words in _raised(own) if not any(sign in words for sign in _AGENT)]
    if raised:
        return raised[-1]
    found = (match["words"] for line in reversed(own) for one in _LINES if (match := one.match(line.strip())))
    return next((words for words in found if not any(sign in words for sign in _AGENT)), None)


def _raised(lines: Sequence[str]) -> Iterator[str]:
    """Give the line behind each traceback: the error itself."""
    inside = False
    for line in lines:
        if _TRACEBACK in line:
            inside = True
        elif inside and line.strip() and not line.startswith((" ", "\t")):
            inside = False
            yield line.strip()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those without a name
        return f"signal {number}"

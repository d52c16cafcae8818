"""Why an attempt failed, in one sentence: from exit codes, what torchrun tells, and the last words of a log."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import InputError, MissingError
from stoker.jobs.status import LOST as LOST
from stoker.jobs.status import signal_of
from stoker.jobs.topology import Slot
from stoker.telemetry.events import Event
from stoker.telemetry.reader import read_log

TAIL_LINES, TAIL_BYTES = 400, 4 << 20
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

    @property
    def sentence(self) -> str:
        """Name slot, cause and log file."""
        who = str(self.slot) if self.rank is None else f"{self.slot} (rank {self.rank})"
        return f"{who} {self._what()}; its log: {self.log}"

    @property
    def is_of_a_partner(self) -> bool:
        """Whether it only tells that another one was gone, or was told to end because of that."""
        return self._signal == signal.SIGTERM or bool(self.words and _PARTNER.search(self.words))

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
        if self.words and self.code == LOST:
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
    told = [event for event in found.events if event.kind == "mark" and event.fields.get("name") == "error"]
    ranks = [(int(one["rank"]), int(one["code"])) for one in _FAILURE.finditer("\n".join(lines))]
    causes = [
        Cause(slot, rank, rank_code, _own_words(told, rank) or _last_words(lines, rank), log, out_of_memory)
        for rank, rank_code in reversed(ranks)
    ] or [Cause(slot, None, code, _own_words(told, None) or _last_words(lines, None), log, out_of_memory)]
    return next((one for one in causes if not one.is_of_a_partner), causes[0])


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

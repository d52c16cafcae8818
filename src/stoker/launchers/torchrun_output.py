"""Fold what torchrun itself writes into a log, such as its failure report, which hides the program's error. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from stoker.core.units import pluralize
from stoker.jobs.launcher import SlotLogLine

_LOGGED = re.compile(
    r"[IWE]\d{4} [\d:.]+ \d+ \S*torch/distributed/(?:elastic/|run\.py|launch)"
    r"|(?:\[[^\]]*\] |(?:INFO|WARNING|ERROR):)torch\.distributed\.(?:elastic|run)\b"
)
_TRACEBACK = "Traceback (most recent call last):"
_ENTRY = re.compile(r'\s+File "(?:<frozen runpy>|.*/torchrun|.*torch/distributed/(?:run|launch)\.py)"')
_EXCEPTION = re.compile(r"torch\.distributed\.elastic\.\S+\.(?P<name>ChildFailedError|SignalException):")
_RULE = re.compile(r"={20,}\s*")


def fold_torchrun_output(lines: Iterable[SlotLogLine]) -> Iterator[SlotLogLine]:
    """Yield the lines of a run with those of torchrun replaced by their number; they stay in the log files."""
    folds: dict[tuple[object, int], _Fold] = {}
    for line in lines:
        if line.is_partial:
            yield line
        else:
            yield from folds.setdefault((line.slot, line.attempt), _Fold()).add(line)
    for fold in folds.values():
        yield from fold.finish()


class _Fold:
    """The lines of one log that are folded, or held back until it is clear whose they are."""

    def __init__(self) -> None:
        self._held: list[SlotLogLine] = []
        """The beginning of a traceback that may be torchrun's."""
        self._folded: list[SlotLogLine] = []
        self._rules_left = 0
        """The number of horizontal rules until the end of the failure report."""

    def add(self, line: SlotLogLine) -> list[SlotLogLine]:
        """Return the lines that can be shown now."""
        if self._rules_left:
            self._rules_left -= bool(_RULE.fullmatch(line.text))
            self._folded.append(line)
            return []
        if self._held:
            return self._continue_traceback(line)
        if line.text.endswith(_TRACEBACK):
            self._held = [line]
            return []
        if _LOGGED.match(line.text):
            self._folded.append(line)
            return []
        return [*self._summary(), line]

    def finish(self) -> list[SlotLogLine]:
        """Return what is left at the end of the log."""
        return [*self._summary(), *self._take_held()]

    def _continue_traceback(self, line: SlotLogLine) -> list[SlotLogLine]:
        is_inside = line.text.startswith((" ", "\t"))
        if is_inside and (len(self._held) > 1 or _ENTRY.match(line.text)):
            self._held.append(line)
            return []
        if exception := _EXCEPTION.match(line.text):
            self._folded += [*self._take_held(), line]
            self._rules_left = 2 * (exception["name"] == "ChildFailedError")
            return []
        held = self._take_held()
        return [*self._summary(), *held, *self.add(line)]

    def _take_held(self) -> list[SlotLogLine]:
        held, self._held = self._held, []
        return held

    def _summary(self) -> list[SlotLogLine]:
        """Return the line that stands for the folded ones."""
        if not self._folded:
            return []
        folded, self._folded = self._folded, []
        return [folded[-1]._replace(text=describe_folded(len(folded)))]


def describe_folded(count: int) -> str:
    """Return the line that is shown instead of folded lines."""
    return f"… {pluralize(count, 'line')} by torchrun; see the log file"

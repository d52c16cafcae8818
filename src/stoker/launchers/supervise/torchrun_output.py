"""Fold what torchrun itself writes into a log, such as its failure report, which hides the program's error. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from stoker.core.units import pluralize
from stoker.jobs.launcher import SlotLogLine
from stoker.jobs.run_folder import log_name
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.error_lines import TORCHRUN_ERRORS, TRACEBACK

_LOGGED = re.compile(
    r"[IWE]\d{4} [\d:.]+ \d+ \S*torch/distributed/(?:elastic/|run\.py|launch)"
    r"|(?:\[[^\]]*\] |(?:INFO|WARNING|ERROR):)torch\.distributed\.(?:elastic|run)\b"
)
_ENTRY = re.compile(r'\s+File "(?:<frozen runpy>|.*/torchrun|.*torch/distributed/(?:run|launch)\.py)"')
_EXCEPTION = re.compile(rf"torch\.distributed\.elastic\.\S+\.(?P<name>{'|'.join(TORCHRUN_ERRORS)}):")
_RULE = re.compile(r"={20,}\s*")
_REPORT_LINE = re.compile(
    r"={20,}|-{20,}|.* FAILED|Failures:|Root Cause .*|\[\d+\]:|  (?:time|host|rank|exitcode|error_file|traceback) *:.*"
    r"|\s*<NO_OTHER_FAILURES>|"
)
_ERROR_FILE_TRACEBACK = re.compile(r"  traceback *: (?!To enable traceback)")
_MAX_REPORT_LINES = 200
_FOLDED = re.compile(r"… [\d,]+ lines? by torchrun; see .*")


def fold_torchrun_output(lines: Iterable[SlotLogLine]) -> Iterator[SlotLogLine]:
    """Yield the lines of a run with those of torchrun replaced by their number; they stay in the log files."""
    folds: dict[tuple[object, int], _Fold] = {}
    newest = 0
    for line in lines:
        if line.attempt > newest:  # the previous attempt has exited
            newest = line.attempt
            for fold in folds.values():
                yield from fold.finish()
        if line.is_partial:
            yield line
        else:
            yield from folds.setdefault((line.slot, line.attempt), _Fold()).add(line)
    for fold in folds.values():
        yield from fold.finish()


def drop_torchrun_output(lines: Sequence[str]) -> list[str]:
    """Return the lines of a log that torchrun itself did not write."""
    fold = _Fold()
    shown = [shown for text in lines for shown in fold.add(SlotLogLine(Slot("", 0), 0, text))]
    return [line.text for line in [*shown, *fold.finish()] if not _FOLDED.fullmatch(line.text)]


class _Fold:
    """The lines of one log that are folded, or held back until it is clear whose they are."""

    def __init__(self) -> None:
        self._held: list[SlotLogLine] = []
        """The beginning of a traceback that may be torchrun's."""
        self._folded: list[SlotLogLine] = []
        self._rules_left = 0
        """The number of horizontal rules until the end of the failure report."""
        self._report_lines = 0
        self._has_traceback = False
        """Whether the failure report quotes a traceback, whose lines have no known form."""

    def add(self, line: SlotLogLine) -> list[SlotLogLine]:
        """Return the lines that can be shown now."""
        if self._is_in_report(line.text):
            self._folded.append(line)
            return []
        if self._held:
            return self._continue_traceback(line)
        if line.text.endswith(TRACEBACK):
            self._held = [line]
            return []
        if _LOGGED.match(line.text):
            self._folded.append(line)
            return []
        return [*self._summary(), line]

    def _is_in_report(self, text: str) -> bool:
        """Whether a line belongs to the failure report, which is cut short if torchrun is killed meanwhile."""
        if not self._rules_left:
            return False
        self._report_lines += 1
        self._has_traceback = self._has_traceback or bool(_ERROR_FILE_TRACEBACK.match(text))
        is_known = self._has_traceback or _REPORT_LINE.fullmatch(text.rstrip())
        if not is_known or self._report_lines > _MAX_REPORT_LINES:
            self._rules_left = 0
            return False
        self._rules_left -= bool(_RULE.fullmatch(text))
        return True

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
            self._report_lines, self._has_traceback = 0, False
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
        log = log_name(folded[-1].slot, folded[-1].attempt)
        return [folded[-1]._replace(text=describe_folded(len(folded), log))]


def describe_folded(count: int, log: str) -> str:
    """Return the line that is shown instead of folded lines."""
    return f"… {pluralize(count, 'line')} by torchrun; see {log}"

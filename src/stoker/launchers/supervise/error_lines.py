"""Find the error that a program printed last: a traceback, or an error line of argparse, click or Python. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from stoker.telemetry.progress_bars import strip_colours

TRACEBACK = "Traceback (most recent call last):"
TORCHRUN_ERRORS = ("ChildFailedError", "SignalException")
"""Raised by torchrun itself after a rank failed; these do not name the cause."""
_RANK_PREFIX = re.compile(r"\[(?:rank|default)(?P<rank>\d+)\]: ?")
_USAGE = "usage: "
# A number after `error:` is a metric.
_MESSAGE = r"(?P<error>(?![-+]?(?:\.?\d|nan\b|inf\b)).+)"
_AFTER_ERROR = re.compile(r"(?i:usage: |try |for more information|for help)|╰")
"""What argument parsers print after an error, and the end of a box."""
_SUBCOMMAND_ERROR = re.compile(rf"(?P<program>[\w./\\-]+(?: [\w./\\-]+)+): error: {_MESSAGE}")
"""An error of argparse in a subcommand, `train.py fit: error: …`, or text such as `Epoch 3 train: error: …`."""
# Error lines of programs that exit without a traceback.
_ERROR_LINES = (
    # argparse (`train.py: error: …`), click (`Error: …`), python-fire (`ERROR: …`), Stoker
    re.compile(rf"(?:stoker|(?i:error)|[\w./\\-]+: error): {_MESSAGE}"),
    re.compile(r"(?:ERROR|CRITICAL):[\w.]+:(?P<error>.+)"),  # the logging module
    re.compile(r"FATAL Flags parsing error: (?P<error>.+)"),  # absl
    re.compile(r"\S*python[\d.]*: (?P<error>(?:No module named|can't open file|Error while finding) .+)"),
    re.compile(r"(?P<error>[Uu]nknown option:? -.+)"),  # the interpreter's own options
    re.compile(r"\S+: (?P<error>(?:unrecognized|unknown|invalid|ambiguous) option .+)"),  # getopt
    re.compile(r"(?P<error>(?:\w+\.)*(?:\w+Error|\w*Exception)(?::.*)?)$"),
    re.compile(r"\S*sh: (?:.*: )?(?P<error>\S+: (?:command )?not found|\S+: Permission denied)$"),
)


def find_last_error(lines: Sequence[str], rank: int | None) -> str | None:
    """Return the last error of a rank, or of the whole log.

    torch prefixes the lines of a traceback with the rank, but nothing else that the rank prints: without an error in
    its own lines, those without a prefix are searched.
    """
    plain = [strip_colours(line) for line in lines]
    prefixes = [_RANK_PREFIX.match(line) for line in plain]
    if rank is None or not any(prefixes):
        return _find_error(
            [line[prefix.end() :] if prefix else line for line, prefix in zip(plain, prefixes, strict=True)]
        )
    own = [p.string[p.end() :] for p in prefixes if p and int(p["rank"]) == rank]
    shared = [line for line, prefix in zip(plain, prefixes, strict=True) if not prefix]
    return _find_error(own) or _find_error(shared)


def has_output_after(lines: Sequence[str], error: str) -> bool:
    """Return whether a program printed more after an error, other than how it is used: the error did not end it."""
    unboxed = [strip_colours(line).strip() for line in _unbox(lines)]
    last = max((index for index, line in enumerate(unboxed) if error in line), default=len(unboxed))
    return any(line and not _AFTER_ERROR.match(line) for line in unboxed[last + 1 :])


def _find_error(lines: Sequence[str]) -> str | None:
    """Return the exception of the last traceback; without a traceback, the last error line."""
    raised = [error for error in _exception_lines(lines) if not _is_from_torchrun(error)]
    if raised:
        return raised[-1]
    unboxed = [line.strip() for line in _unbox(lines)]
    usages = tuple(line[len(_USAGE) :] for line in unboxed if line.lower().startswith(_USAGE))
    errors = (error for line in reversed(unboxed) if (error := _parse_error_line(line, usages)))
    return next((error for error in errors if not _is_from_torchrun(error)), None)


def _parse_error_line(line: str, usages: Sequence[str]) -> str | None:
    """Return the error in a line; that of a subcommand only if the program printed its usage, too."""
    matches = (pattern.match(line) for pattern in _ERROR_LINES)
    if match := next(filter(None, matches), None):
        return match["error"]
    match = _SUBCOMMAND_ERROR.match(line)
    return match["error"] if match and any(usage.startswith(match["program"]) for usage in usages) else None


def _is_from_torchrun(error: str) -> bool:
    return any(name in error for name in TORCHRUN_ERRORS)


def _exception_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the line after each traceback, which holds the exception."""
    inside = False
    for line in lines:
        if TRACEBACK in line:
            inside = True
        elif inside and line.strip() and not line.startswith((" ", "\t")):
            inside = False
            yield line.strip()


def _unbox(lines: Sequence[str]) -> list[str]:
    """Return the lines with the box that typer and rich-click draw around an error as one line: `Error: …`."""
    unboxed: list[str] = []
    text: list[str] | None = None
    for line in [*lines, ""]:  # a box may be cut off
        stripped = line.strip()
        if stripped.startswith("╭─ Error "):
            text = []
        elif text is not None and stripped.startswith("│"):
            text.append(stripped.strip("│ "))
        else:
            if text:
                unboxed.append(f"Error: {' '.join(text)}")
            text = None
            unboxed.append(line)
    return unboxed

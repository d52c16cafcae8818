"""mpirun error messages: parse mpirun's output for the reason of its exit. Pure functions."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator, Sequence

from stoker.errors import InputError

PEER_EXITED = "mpirun stopped all ranks because"
"""Text by which a failure is recognized as the consequence of another rank's."""
STOPPED_BY_MPIRUN = f"{PEER_EXITED} another rank exited"
_RULE = re.compile(r"-{60,}$")
_ERROR = re.compile(r"(?:\[[^\]]*\] )?mpirun: Error: (?P<error>.+)")
_KILLED_RANK = re.compile(r"noticed that process rank (?P<rank>\d+) .*? on signal (?P<signal>\d+)", re.DOTALL)
# Blocks about the exit of a rank, whose own log has more detail.
_RANK_BLOCKS = ("Primary job", "mpirun noticed", "mpirun detected", "Child job", "MPI_ABORT was invoked")
_DETAIL = re.compile(r"\s*(?P<name>Executable|Node|Host|MCA param|Option): +(?P<value>\S.*)")
# A retry would not help.
_INPUT_ERROR = re.compile(
    r"not enough slots|unknown option|unable to find the specified executable|listed multiple times|not recognized|"
    r"unrecognized|conflicting|invalid"
)


def find_killed_rank(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return the rank that mpirun reports as killed by a signal, and its exit code."""
    match = _KILLED_RANK.search("\n".join(lines))
    return (int(match["rank"]), -int(match["signal"])) if match else None


def find_mpirun_error(lines: Sequence[str]) -> str | None:
    """Return why mpirun itself failed; None when it exited because of a rank."""
    for line in lines:
        if match := _ERROR.match(line):
            return match["error"]
    blocks = [block for block in _blocks(lines) if not block[0].startswith(_RANK_BLOCKS)]
    return _summarize(blocks[0]) if blocks else None


def explain_exit(lines: Sequence[str]) -> str | None:
    """Return why mpirun exited, with `PEER_EXITED` in it when a rank was the cause; None if it printed nothing."""
    error = find_mpirun_error(lines)
    if error is None and any(block[0].startswith(_RANK_BLOCKS) for block in _blocks(lines)):
        return STOPPED_BY_MPIRUN
    return error and f"mpirun: {error}"


def classify_exit_code(error: str | None, code: int) -> int:
    """Return the exit code for bad input where a retry cannot help, else the code itself."""
    return InputError.exit_code if error and code > 0 and _INPUT_ERROR.search(error) else code


def negate_signal(code: int) -> int:
    """Return an exit code of 128 + signal as the negative signal."""
    return 128 - code if 128 < code < 128 + signal.NSIG else code


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines between each pair of horizontal rules."""
    inside: list[str] | None = None
    for line in lines:
        if not _RULE.match(line):
            if inside is not None:
                inside.append(line.rstrip())
        elif inside:
            yield inside
            inside = None
        else:
            inside = []


def _summarize(block: Sequence[str]) -> str:
    """Return the first sentence of a block with the details listed below it."""
    paragraph = itertools.takewhile(str.strip, itertools.dropwhile(lambda line: not line.strip(), block))
    first = re.split(r"[.:](?:\s|$)", " ".join(" ".join(paragraph).split()))[0]
    details = [f"{match['name'].lower()} {match['value']}" for line in block if (match := _DETAIL.match(line))]
    return first + (f" ({', '.join(details)})" if details else "")

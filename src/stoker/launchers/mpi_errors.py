"""What mpirun says of its end, in a sentence of ours. Pure."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator, Sequence

from stoker.errors import InputError

_RULE = re.compile(r"-{60,}$")
_ERROR = re.compile(r"(?:\[[^\]]*\] )?mpirun: Error: (?P<words>.+)")
_NOTICED = re.compile(r"noticed that process rank (?P<rank>\d+) .*? on signal (?P<signal>\d+)", re.DOTALL)
# Blocks about the end of a rank, which that rank's own log tells better.
_OF_RANKS = ("Primary job", "mpirun noticed", "mpirun detected", "Child job", "MPI_ABORT was invoked")
_DETAIL = re.compile(r"\s*(?P<name>Executable|Node|Host|MCA param|Option): +(?P<value>\S.*)")
# Nothing of these would be better the next time.
_INPUT = re.compile(
    r"not enough slots|unknown option|unable to find the specified executable|listed multiple times|not recognized|"
    r"unrecognized|conflicting|invalid"
)


def noticed(lines: Sequence[str]) -> tuple[int, int] | None:
    """Find a rank that a signal ended, and its exit code."""
    found = _NOTICED.search("\n".join(lines))
    return (int(found["rank"]), -int(found["signal"])) if found else None


def complaint(lines: Sequence[str]) -> str | None:
    """Find why mpirun itself gave up; None when it was for a rank."""
    for line in lines:
        if found := _ERROR.match(line):
            return found["words"]
    blocks = [block for block in _blocks(lines) if not block[0].startswith(_OF_RANKS)]
    return _sentence(blocks[0]) if blocks else None


def why(lines: Sequence[str]) -> str | None:
    """Say why mpirun ended, in words by which a failure that came from a rank is known; None where it says nothing."""
    words = complaint(lines)
    if words is None and any(block[0].startswith(_OF_RANKS) for block in _blocks(lines)):
        return "mpirun has ended all, for another rank is gone"
    return words and f"mpirun: {words}"


def code_of(words: str | None, code: int) -> int:
    """Give the exit code: what cannot go better the next time is bad input."""
    return InputError.exit_code if words and code > 0 and _INPUT.search(words) else code


def signal_code(code: int) -> int:
    """Write the end by a signal as the negative signal."""
    return 128 - code if 128 < code < 128 + signal.NSIG else code


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Give what stands between rules."""
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


def _sentence(block: Sequence[str]) -> str:
    """Give the first sentence of a block, and what it names."""
    paragraph = itertools.takewhile(str.strip, itertools.dropwhile(lambda line: not line.strip(), block))
    first = re.split(r"[.:](?:\s|$)", " ".join(" ".join(paragraph).split()))[0]
    named = [f"{found['name'].lower()} {found['value']}" for line in block if (found := _DETAIL.match(line))]
    return first + (f" ({', '.join(named)})" if named else "")

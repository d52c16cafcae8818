"""Brace patterns: `a-{000..127}.tar` to names, and names back to patterns with their gaps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stoker.errors import InputError

MAX_NAMES = 10_000_000
MAX_GAP = 100_000

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
# The number that counts shards: the one before `-of-N`, else the last one in the name.
_NUMBERED = re.compile(r"^(?P<head>.*?)(?P<number>[0-9]{1,18})(?P<tail>-of-[0-9]+[^/]*|[^0-9]*)$", re.DOTALL)


class NumberRange(NamedTuple):
    """Names that differ only in one number, as a pattern; the names that a gap leaves out are `missing`."""

    pattern: str
    names: tuple[str, ...]
    missing: tuple[str, ...]


def has_braces(text: str) -> bool:
    """Whether there is a brace group to expand."""
    return _GROUP.search(text) is not None


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield every name that a pattern stands for: `{000..127}` and `{a,b}`, any number of them."""
    found = _GROUP.search(pattern)
    if found is None:
        if "{" in pattern or "}" in pattern:
            raise InputError(f"unbalanced braces in {pattern!r}", hint="write ranges as {000000..000127}")
        yield pattern
        return
    before, after = pattern[: found.start()], pattern[found.end() :]
    for middle in _expand_group(found[1], pattern):
        for rest in expand_braces(after):
            yield f"{before}{middle}{rest}"


def collapse_names(names: Iterable[str]) -> list[NumberRange]:
    """Group names into numbered runs; a name without a number that counts is a run of its own."""
    runs: dict[tuple[str, int, str], list[int]] = {}
    rest = []
    for name in names:
        found = _NUMBERED.match(name)
        if found is None:
            rest.append(name)
        else:
            key = (found["head"], len(found["number"]), found["tail"])
            runs.setdefault(key, []).append(int(found["number"]))
    return [run for key, numbers in sorted(runs.items()) for run in _number_ranges(*key, set(numbers))] + [
        NumberRange(name, (name,), ()) for name in sorted(rest)
    ]


def _expand_group(inside: str, pattern: str) -> Iterator[str]:
    span = _RANGE.fullmatch(inside)
    if span is None:
        if "," not in inside:
            raise InputError(
                f"{{{inside}}} in {pattern!r} is no range and no list",
                hint="write {000000..000127} or {train,val}",
            )
        yield from inside.split(",")
        return
    first, last = int(span[1]), int(span[2])
    if last < first or last - first >= MAX_NAMES:
        raise InputError(f"the range {{{inside}}} in {pattern!r} is empty or too long")
    width = len(span[1]) if span[1].startswith("0") or len(span[1]) == len(span[2]) else 0
    for number in range(first, last + 1):
        yield f"{number:0{width}d}"


def _number_ranges(head: str, width: int, tail: str, present: set[int]) -> list[NumberRange]:
    """Make one run of the names, or a run of each when the gaps say that the number does not count shards."""
    first, last = min(present), max(present)
    most = 1000 + 100 * len(present)
    if (total := re.match(r"-of-([0-9]{1,18})", tail)) is not None:
        # The name tells how many there should be, so the ends can be missing too, and many more.
        first, last = min(first, 0), max(last, int(total[1]) - 1)
        most = max(most, MAX_GAP)

    def name(number: int) -> str:
        return f"{head}{number:0>{width}}{tail}"

    names = tuple(map(name, sorted(present)))
    if last - first + 1 - len(present) > most:
        return [NumberRange(one, (one,), ()) for one in names]
    pattern = name(first) if first == last else f"{head}{{{first:0{width}d}..{last:0{width}d}}}{tail}"
    missing = tuple(name(number) for number in range(first, last + 1) if number not in present)
    return [NumberRange(pattern, names, missing)]

"""Brace patterns: expand `a-{000..127}.tar` to names, and collapse names to patterns with their gaps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stoker.errors import InputError

MAX_NAMES = 1_000_000
MAX_GAP = 100_000

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
# The shard number: the number before `-of-N`, else the last one in the name.
_NUMBERED = re.compile(r"^(?P<head>.*?)(?P<number>[0-9]{1,18})(?P<tail>-of-[0-9]+[^/]*|[^0-9]*)$", re.DOTALL)


class NumberRange(NamedTuple):
    """Names that differ in one number only, as a pattern; `missing` lists the names in its gaps."""

    pattern: str
    names: tuple[str, ...]
    missing: tuple[str, ...]


def has_braces(text: str) -> bool:
    """Return whether a text has a brace group to expand."""
    return _GROUP.search(text) is not None


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield every name of a pattern with any number of groups `{000..127}` and `{a,b}`."""
    *parts, tail = _GROUP.split(pattern)  # text, group, text, group, …, text
    texts, groups = parts[::2], []
    if any(brace in text for text in (*texts, tail) for brace in "{}"):
        raise InputError(f"unbalanced braces in {pattern!r}", hint="specify ranges as {000000..000127}")
    count = 1
    for inside in parts[1::2]:
        groups.append(_expand_group(inside, pattern))
        count *= len(groups[-1])
        if count > MAX_NAMES:
            raise InputError(f"{pattern!r} expands to more than {MAX_NAMES:,} names")
    for choice in itertools.product(*groups):
        yield "".join(itertools.chain.from_iterable(zip(texts, choice, strict=True))) + tail


def collapse_names(names: Iterable[str]) -> list[NumberRange]:
    """Group names into number ranges; a name without a shard number is a range of its own."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    unnumbered = []
    for name in names:
        match = _NUMBERED.match(name)
        if match is None:
            unnumbered.append(name)
        else:
            key = (match["head"], len(match["number"]), match["tail"])
            groups.setdefault(key, []).append(int(match["number"]))
    ranges = [part for key, numbers in sorted(groups.items()) for part in _number_ranges(*key, set(numbers))]
    return ranges + [NumberRange(name, (name,), ()) for name in sorted(unnumbered)]


def _expand_group(inside: str, pattern: str) -> list[str]:
    span = _RANGE.fullmatch(inside)
    if span is None:
        if "," not in inside:
            raise InputError(
                f"{{{inside}}} in {pattern!r} is neither a range nor a list",
                hint="use {000000..000127} or {train,val}",
            )
        return inside.split(",")
    first, last = int(span[1]), int(span[2])
    if last < first or last - first >= MAX_NAMES:
        raise InputError(f"the range {{{inside}}} in {pattern!r} is empty or longer than {MAX_NAMES:,} names")
    width = len(span[1]) if span[1].startswith("0") or len(span[1]) == len(span[2]) else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def _number_ranges(head: str, width: int, tail: str, present: set[int]) -> list[NumberRange]:
    """Return one range, or one per name if the gaps are too large for a shard number."""
    first, last = min(present), max(present)
    most = 1000 + 100 * len(present)
    if (total := re.match(r"-of-([0-9]{1,18})", tail)) is not None:
        # The name contains the total, so shards can be missing at both ends too.
        first, last = min(first, 0), max(last, int(total[1]) - 1)
        most = max(most, MAX_GAP)

    def name(number: int) -> str:
        return f"{head}{number:0>{width}}{tail}"

    names = tuple(map(name, sorted(present)))
    if last - first + 1 - len(present) > most:
        return [NumberRange(text, (text,), ()) for text in names]
    pattern = name(first) if first == last else f"{head}{{{first:0{width}d}..{last:0{width}d}}}{tail}"
    missing = tuple(name(number) for number in range(first, last + 1) if number not in present)
    return [NumberRange(pattern, names, missing)]

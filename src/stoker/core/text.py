"""Text of messages: names from outside, escaped if necessary, and lists of them shortened."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 3


def printable(name: object) -> str:
    """Return a name as it may be printed: escaped if it contains control characters."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def join_all(names: Sequence[str], word: str = "and") -> str:
    """Join names as in a sentence: `a`, `a and b`, `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def join_some(names: Sequence[str]) -> str:
    """Join the first names and count the others; "none" if there are none."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return (", ".join(map(printable, names[:MAX_NAMES])) or "none") + more

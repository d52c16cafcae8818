"""Shorten messages of Kubernetes components, to quote them in one sentence."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 200


def shorten(text: str) -> str:
    """Return a text on one line, truncated to MAX_MESSAGE_CHARS."""
    line = " ".join(text.split()).rstrip(" .")
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 1]}…"


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, shortened."""
    return shorten(re.split(r"\.(?:\s|$)", text, maxsplit=1)[0])


def root_cause(text: str) -> str:
    """Return the last part of a chain of wrapped errors (`a: b: c`), or the last two if the last one is short."""
    parts = [part for part in re.split(r"\s*: (?!\s)", " ".join(text.split()).rstrip(" .")) if part != "unknown"]
    kept = parts[-1:] if len(parts) < 2 or len(parts[-1]) > 40 else parts[-2:]
    return shorten(": ".join(kept))

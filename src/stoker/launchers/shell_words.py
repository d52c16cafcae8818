"""Quote words for a shell script in which placeholders stand for values that are known only when it runs. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

ANY_INDEX = 2_305_843_009_213_693_951
"""Placeholder for a slot index; larger than any number in a job."""


def quote_word(text: str, expressions: Mapping[str, str]) -> str:
    """Quote a word, with each placeholder in it replaced by its shell expression, such as `"$INDEX"`."""
    present = [re.escape(placeholder) for placeholder in expressions if placeholder in text]
    if not present:
        return shlex.quote(text)
    parts = re.split(f"({'|'.join(present)})", text)
    return "".join(expressions.get(part) or shlex.quote(part) for part in parts if part)

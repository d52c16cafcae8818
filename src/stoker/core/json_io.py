"""Parse JSON within limits of size and depth, and read files within a limit of size.

Use it for every document that stoker did not just write itself, so that a malformed or hostile one is an error with a
position: `json_io.parse(data, where)`. `yaml_io` applies the same limits to YAML.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from stoker.core.units import format_bytes
from stoker.errors import Fault, SpecError

MAX_DEPTH = 100
"""Levels of nesting in a document. Code that walks a document may recurse."""
MAX_BYTES = 64 << 20
"""Size of a JSON document, unless the caller sets another limit."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[{])|[\]}]', re.DOTALL)
"""A string or a bracket. The quantifiers are possessive: the others keep a state for each repetition."""


def parse(text: str | bytes, where: object, *, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON document; raise SpecError if it is invalid, too large or too deep. `where` names it in errors."""
    check_size(text, max_bytes, where)
    text = decode_text(text, where)
    try:
        return parse_text(text, where)
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg}, at line {error.lineno}, column {error.colno}"
        raise SpecError([Fault("", what)], where=where) from error
    except ValueError as error:  # a number with thousands of digits
        raise SpecError([Fault("", f"not valid JSON: {error}")], where=where) from error


def parse_text(text: str, where: object, **hooks: Any) -> Any:
    """Parse JSON with the hooks of `json.loads`; raise ValueError if it is invalid, SpecError if it is too deep."""
    try:
        data = json.loads(text, **hooks)
        is_too_deep = _exceeds_depth(data)
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise too_deep(where, _find_excess_depth(text))
    if _SURROGATE.search(text) and _has_lone_surrogate(data):
        raise SpecError([Fault("", "contains half of a surrogate pair, which is not valid Unicode")], where=where)
    return data


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a file; raise SpecError if it is larger than the limit. Also for devices and pipes, which have no size."""
    with path.open("rb") as file:
        return read_stream(file, path, max_bytes)


def read_stream(stream: BinaryIO, where: object, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a stream to its end; raise SpecError if it is larger than the limit."""
    data = stream.read(max_bytes + 1)
    check_size(data, max_bytes, where)
    return data


def check_size(text: str | bytes, max_bytes: int, where: object) -> None:
    """Raise SpecError if a document is larger than the limit."""
    if len(text) > max_bytes:
        raise SpecError([Fault("", f"larger than the limit of {format_bytes(max_bytes)}")], where=where)


def decode_text(text: str | bytes, where: object) -> str:
    """Decode UTF-8, with or without a byte order mark; raise SpecError at a byte that is not UTF-8."""
    try:
        return text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise SpecError([Fault("", f"not UTF-8 text, at byte {error.start}")], where=where) from error


def too_deep(where: object, position: tuple[int, int] | None) -> SpecError:
    """Return the error for a document that is nested too deeply, with line and column of the excessive level."""
    if position is None:
        return SpecError([Fault("", "nested too deeply to be parsed here")], where=where)
    what = f"nested too deeply: more than {MAX_DEPTH} levels, at line {position[0]}, column {position[1]}"
    return SpecError([Fault("", what)], where=where)


def _exceeds_depth(data: Any) -> bool:
    """Return whether a document has more than MAX_DEPTH levels; visit it level by level, without recursion."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)
            if isinstance(value, dict | list)
        ]
        if not level:
            return False
    return True


def _has_lone_surrogate(data: Any) -> bool:
    """Return whether a key or value cannot be encoded as UTF-8; JSON can escape half of a surrogate pair."""
    rest = [data]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            return True
    return False


def _find_excess_depth(text: str) -> tuple[int, int] | None:
    """Return the line and column of the first bracket that exceeds MAX_DEPTH.

    There is none if the caller's own stack left too little of Python's recursion limit.
    """
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0][0] != '"':
            depth += 1 if token[1] else -1
        if depth > MAX_DEPTH:
            start = token.start()
            return text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
    return None

"""`--set resources.gpu=4`: keys of a document given on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from stoker.core import spec
from stoker.errors import Fault, InputError, SpecError

_STEP = re.compile(r"""\.?(?P<name>[\w/-]+)|\[(?P<index>\d+)\]|\[(?P<quote>["'])(?P<key>.*?)(?P=quote)\]""")


def override(data: dict[Any, Any], assignments: Iterable[str]) -> tuple[dict[Any, Any], list[str], list[Fault]]:
    """Set keys in a copy of a document; return it, the paths that were set, and what could not be."""
    data, paths, faults = _unshared(data), [], []
    for assignment in assignments:
        try:
            paths.append(_assign(data, assignment))
        except InputError as error:
            faults.append(Fault("", f"--set {error}"))
    return data, paths, faults


def _unshared(data: Any) -> Any:
    """Copy the parts that YAML's aliases share, so that a change is made in one place."""
    match data:
        case dict():
            return {key: _unshared(value) for key, value in data.items()}
        case list():
            return [_unshared(value) for value in data]
        case _:
            return data


def _assign(data: dict[Any, Any], assignment: str) -> str:
    """Set one key in place, and return its path; an empty value takes the key out."""
    steps, text = _read(assignment)
    path = _path(steps)
    try:
        value, repeats = spec.parse(text, None)
    except SpecError as error:
        raise InputError(f"{path}: {error} (the value is read as YAML: put quotes in it)") from error
    if repeats:
        raise InputError(f"{path}: {repeats[0]}")
    holder: Any = data
    for depth, (step, after) in enumerate(pairwise(steps)):
        inner = _look(holder, step, steps[:depth])
        if inner is None:
            inner = [] if isinstance(after, int) else {}
            _put(holder, step, inner)
        holder = inner
    _look(holder, steps[-1], steps[:-1])
    _put(holder, steps[-1], value)
    return path


def _read(assignment: str) -> tuple[list[str | int], str]:
    """Take `ssh.hosts[0]=node1` apart into its steps and the text of its value."""
    steps: list[str | int] = []
    at = 0
    while match := _STEP.match(assignment, at):
        steps.append(int(match["index"]) if match["index"] else match["name"] or match["key"])
        at = match.end()
    if "=" not in assignment:
        raise InputError(f"{assignment!r} gives no value: write it as resources.gpu=4")
    if assignment[at : at + 1] != "=" or not steps or isinstance(steps[0], int) or assignment.startswith("."):
        raise InputError(f"{assignment!r} names no key: write it as resources.gpu=4 or ssh.hosts[0]=node1")
    return steps, assignment[at + 1 :]


def _look(holder: Any, step: str | int, path: Sequence[str | int]) -> Any:
    """Return what a part of the document holds at a step, or None; refuse a step that it cannot take."""
    here = _path(path)
    match holder, step:
        case dict(), str():
            return holder.get(step)
        case list(), int():
            if step > len(holder):
                raise InputError(f"{here}[{step}]: {here} has {len(holder)} items, counted from 0")
            return holder[step] if step < len(holder) else None
        case dict(), int():
            raise InputError(f"{here}[{step}]: {here or 'the file'} is a mapping, so name a key of it")
        case list(), str():
            raise InputError(f"{here}.{step}: {here} is a list, so say which item, as in {here}[0]")
        case _:
            text = holder.text if isinstance(holder, spec.Written) else repr(holder)
            raise InputError(f"{_path([*path, step])}: {here} is {text}, and has nothing in it; set {here} itself")


def _put(holder: Any, step: Any, value: object) -> None:
    if value is None:
        if isinstance(holder, dict):
            holder.pop(step, None)
        else:
            del holder[step : step + 1]
    elif isinstance(holder, list) and step == len(holder):
        holder.append(value)
    else:
        holder[step] = value


def _path(steps: Sequence[str | int]) -> str:
    text = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" if re.fullmatch(r"[\w-]+", step) else f'["{step}"]'
        for step in steps
    )
    return text.removeprefix(".")

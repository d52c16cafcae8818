"""Apply `--set resources.gpu=4`: override keys of a document from the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

from stoker.core import yaml_io
from stoker.core.units import pluralize
from stoker.errors import Fault, InputError, SpecError

_STEP = re.compile(r"""\.?(?P<name>[\w/-]+)|\[(?P<index>\d+)\]|\[(?P<quote>["'])(?P<key>.*?)(?P=quote)\]""")


class OptionAssignment(str):
    """`KEY=VALUE` from an option of its own, such as `--hosts`, which errors name instead of `--set KEY`."""

    option: str

    def __new__(cls, text: str, option: str) -> Self:
        """Return the assignment with the option that it comes from."""
        assignment = super().__new__(cls, text)
        assignment.option = option
        return assignment


class SetKey(NamedTuple):
    """A key that was set, and the option that set it, as errors name it."""

    path: str
    origin: str


def apply_overrides(
    data: dict[Any, Any], assignments: Iterable[str]
) -> tuple[dict[Any, Any], list[SetKey], list[Fault]]:
    """Set keys in a copy of a document; return the copy, the keys that were set, and the faults."""
    data, keys, faults = _copy(data), [], []
    for assignment in assignments:
        try:
            path = _assign(data, assignment)
        except InputError as error:
            option = assignment.option if isinstance(assignment, OptionAssignment) else "--set"
            faults.append(Fault("", f"{option} {error}"))
        else:
            origin = assignment.option if isinstance(assignment, OptionAssignment) else f"--set {path}"
            keys.append(SetKey(path, origin))
    return data, keys, faults


def _copy(data: Any) -> Any:
    """Copy recursively, without sharing the parts that YAML aliases share: a change affects one place."""
    match data:
        case dict():
            return {key: _copy(value) for key, value in data.items()}
        case list():
            return [_copy(value) for value in data]
        case _:
            return data


def _assign(data: dict[Any, Any], assignment: str) -> str:
    """Set one key in place and return its path; an empty value removes the key."""
    steps, text = _parse_assignment(assignment)
    path = _path(steps)
    try:
        value, duplicates = yaml_io.parse_verbatim(text, None)
    except SpecError as error:
        raise InputError(f"{path}: {error} (values are parsed as YAML; quote this value)") from error
    if duplicates:
        raise InputError(f"{path}: {duplicates[0]}")
    container: Any = data
    for depth, (step, next_step) in enumerate(pairwise(steps)):
        inner = _get(container, step, steps[:depth])
        if inner is None:
            inner = [] if isinstance(next_step, int) else {}
            _put(container, step, inner)
        container = inner
    _get(container, steps[-1], steps[:-1])
    _put(container, steps[-1], value)
    return path


def _parse_assignment(assignment: str) -> tuple[list[str | int], str]:
    """Split `ssh.hosts[0]=node1` into the steps of its path and the text of its value."""
    steps: list[str | int] = []
    end = 0
    while match := _STEP.match(assignment, end):
        steps.append(int(match["index"]) if match["index"] else match["name"] or match["key"])
        end = match.end()
    if "=" not in assignment:
        raise InputError(f"{assignment!r} has no value; use KEY=VALUE, for example resources.gpu=4")
    if assignment[end : end + 1] != "=" or not steps or isinstance(steps[0], int) or assignment.startswith("."):
        raise InputError(f"{assignment!r} has no valid key; use, for example, resources.gpu=4 or ssh.hosts[0]=node1")
    return steps, assignment[end + 1 :]


def _get(container: Any, step: str | int, steps: Sequence[str | int]) -> Any:
    """Return the value at a step, or None; raise InputError for a step that does not fit the container."""
    path = _path(steps)
    match container, step:
        case dict(), str():
            return container.get(step)
        case list(), int():
            if step > len(container):
                raise InputError(f"{path}[{step}]: index out of range: {path} has {pluralize(len(container), 'item')}")
            return container[step] if step < len(container) else None
        case dict(), int():
            raise InputError(f"{path}[{step}]: {path or 'the file'} is a mapping, not a list; use a key")
        case list(), str():
            raise InputError(f"{path}.{step}: {path} is a list; use an index, for example {path}[0]")
        case _:
            text = container.text if isinstance(container, yaml_io.VerbatimScalar) else repr(container)
            raise InputError(f"{_path([*steps, step])}: {path} is {text}, which has no keys; set {path} itself")


def _put(container: Any, step: Any, value: object) -> None:
    if value is None:
        if isinstance(container, dict):
            container.pop(step, None)
        else:
            del container[step : step + 1]
    elif isinstance(container, list) and step == len(container):
        container.append(value)
    else:
        container[step] = value


def _path(steps: Sequence[str | int]) -> str:
    text = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" if re.fullmatch(r"[\w-]+", step) else f'["{step}"]'
        for step in steps
    )
    return text.removeprefix(".")

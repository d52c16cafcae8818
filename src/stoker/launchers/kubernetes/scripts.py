"""What the container of a role runs: one `sh` script for all its slots, so that an image needs nothing of ours.

A topology gives each slot's command as a value. The slots of a role differ in their index alone, so the command is
asked for once with a stand-in for the index, which the script finds in its environment; the first slot is asked for by
itself, for it may hold the meeting.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.jobs.spec import Job
from stoker.jobs.topology import AddressBook, Command, Slot, render_command, profiler_argv

SCRIPTS_DIR = "/stoker"
"""Where the ConfigMap is mounted."""
CODE_DIR = "/stoker-code"
"""Where the user's files are that travel with the job."""
ANY_INDEX = 2_305_843_009_213_693_951
"""Stands for an index; no number of a job comes near it."""
_BEFORE = [
    "#!/bin/sh",
    "set -eu",
    "export STOKER_INDEX=$((${JOB_COMPLETION_INDEX:-0} + ${STOKER_FIRST:-0}))",
    "export STOKER_ATTEMPT=$((${STOKER_BEFORE:-0} + ${STOKER_FAILED:-0} + ${STOKER_MOVED:-0}))",
]


@dataclass(frozen=True, slots=True)
class Script:
    """A role's script, and the variables that are the same for all its slots."""

    text: str
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Long texts that all roles have in common, by their file names."""


def build_script(
    job: Job, role: str, book: AddressBook, *, has_code: bool = False, before: Sequence[str] = ()
) -> Script:
    """Write the script of a role; the book has an address for the slot that stands for all of it, too.

    `before` are lines of ours that come before the program.
    """
    first, other = (_command(job, Slot(role, index), book) for index in (0, ANY_INDEX))
    shared = _shared(other)
    is_long = {name for name in other.env if f"{name.lower()}.json" in shared}
    env = {name: value for name, value in other.env.items() if first.env.get(name) == value and name not in is_long}
    own = {name: value for name, value in other.env.items() if name not in env and name != "STOKER_INDEX"}
    lines = [*_BEFORE, f"export STOKER_RUN=${{STOKER_RUN:-{job.name}}}"]
    lines += [f"{_variable(file)}=$(cat {SCRIPTS_DIR}/{file})" for file in shared]
    lines += [f"export {name}={_quoted(value, shared)}" for name, value in own.items()]
    if has_code:
        lines += [f'export PYTHONPATH={CODE_DIR}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += before
    if other.cwd:
        lines += [f"cd {shlex.quote(other.cwd)}"]
    profiler = profiler_argv(job, book)
    if profiler and other.argv[: len(profiler)] == profiler:  # in an image without Python, the program alone
        words = shlex.join(profiler)
        lines += [f"if command -v {profiler[0]} >/dev/null 2>&1; then set -- {words}; else set --; fi"]
        first, other = (Command(one.argv[len(profiler) :], one.env, one.cwd) for one in (first, other))
    if tuple(word.replace(str(ANY_INDEX), "0") for word in other.argv) != first.argv:
        lines += [f'if [ "$STOKER_INDEX" = 0 ]; then exec "$@" {shlex.join(first.argv)}; fi']
    lines += ['exec "$@" ' + " ".join(_quoted(word, {}) for word in other.argv)]
    return Script("\n".join([*lines, ""]), env, shared)


def _command(job: Job, slot: Slot, book: AddressBook) -> Command:
    command = render_command(job, slot, book)
    if not isinstance(command, Command):
        raise TypeError(f"{slot} runs nothing of its own")
    return command


def _shared(command: Command) -> dict[str, str]:
    """Find what names every task of a TensorFlow cluster: long, and the same for all."""
    if "TF_CONFIG" not in command.env:
        return {}
    cluster = json.dumps(json.loads(command.env["TF_CONFIG"])["cluster"])
    return {"cluster.json": cluster, "cluster_config.json": command.env["CLUSTER_CONFIG"]}


def _variable(file: str) -> str:
    return file.removesuffix(".json")


class _Variable(str):
    """A piece of a word that the shell fills in."""


def _quoted(text: str, shared: Mapping[str, str]) -> str:
    """Quote a word for `sh`, with the index and what is in files taken from variables."""
    parts = [text]
    for value, name in [
        *((value, _variable(file)) for file, value in shared.items()),
        (str(ANY_INDEX), "STOKER_INDEX"),
    ]:
        parts = [piece for part in parts for piece in _cut(part, value, name)]
    return "".join(part if isinstance(part, _Variable) else shlex.quote(part) for part in parts) or "''"


def _cut(part: str, value: str, name: str) -> list[str]:
    """Cut a text at a value, and put the variable that holds it in its place."""
    if isinstance(part, _Variable) or value not in part:
        return [part]
    pieces: list[str] = []
    for piece in part.split(value):
        pieces += [_Variable(f'"${name}"'), piece]
    return [piece for piece in pieces[1:] if piece]

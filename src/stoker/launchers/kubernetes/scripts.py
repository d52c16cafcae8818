"""Shell scripts that containers run: one `sh` script per role, so that an image needs nothing of stoker.

A topology renders the command of a slot as a value. The slots of a role differ only in their index, so the command is
rendered once with a placeholder index, which the script replaces by an environment variable. Slot 0 is rendered
separately, since it may host the rendezvous.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import AddressBook, Command, Slot, profiler_argv, render_command
from stoker.launchers.shell_words import ANY_INDEX, quote_word

SCRIPTS_DIR = "/stoker"
"""Mount path of the ConfigMap's scripts."""
CODE_DIR = "/stoker-code"
"""Mount path of the user's copied files."""
_HEADER = [
    "#!/bin/sh",
    "set -eu",
    "export STOKER_INDEX=$((${JOB_COMPLETION_INDEX:-0} + ${STOKER_FIRST:-0}))",
    "export STOKER_ATTEMPT=$((${STOKER_BEFORE:-0} + ${STOKER_FAILED:-0} + ${STOKER_MOVED:-0}))",
]


@dataclass(frozen=True, slots=True)
class Script:
    """The script of a role, and the environment variables that all its slots share."""

    text: str
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Long texts that all roles share, by file name."""


def build_script(
    job: JobSpec, role: str, book: AddressBook, *, has_code: bool = False, setup: Sequence[str] = ()
) -> Script:
    """Build the script of a role; `setup` are lines to run before the program.

    The address book must contain the placeholder slot of the role.
    """
    first, other = (_render_command(job, Slot(role, index), book) for index in (0, ANY_INDEX))
    shared = _extract_shared_files(other)
    in_files = {name for name in other.env if f"{name.lower()}.json" in shared}
    env = {name: value for name, value in other.env.items() if first.env.get(name) == value and name not in in_files}
    per_slot = {name: value for name, value in other.env.items() if name not in env and name != "STOKER_INDEX"}
    lines = [*_HEADER, f"export STOKER_RUN=${{STOKER_RUN:-{job.name}}}"]
    lines += [f"{_variable_name(file)}=$(cat {SCRIPTS_DIR}/{file})" for file in shared]
    lines += [f"export {name}={_quote(value, shared)}" for name, value in per_slot.items()]
    if has_code:
        lines += [f'export PYTHONPATH={CODE_DIR}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += setup
    if other.cwd:
        lines += [f"cd {shlex.quote(other.cwd)}"]
    profiler = profiler_argv(job, book)
    if profiler and other.argv[: len(profiler)] == profiler:  # an image without Python runs the program unprofiled
        argv = shlex.join(profiler)
        lines += [f"if command -v {profiler[0]} >/dev/null 2>&1; then set -- {argv}; else set --; fi"]
        first, other = (Command(command.argv[len(profiler) :], command.env, command.cwd) for command in (first, other))
    if tuple(argument.replace(str(ANY_INDEX), "0") for argument in other.argv) != first.argv:
        lines += [f'if [ "$STOKER_INDEX" = 0 ]; then exec "$@" {shlex.join(first.argv)}; fi']
    lines += ['exec "$@" ' + " ".join(_quote(argument, {}) for argument in other.argv)]
    return Script("\n".join([*lines, ""]), env, shared)


def _render_command(job: JobSpec, slot: Slot, book: AddressBook) -> Command:
    command = render_command(job, slot, book)
    if not isinstance(command, Command):
        raise TypeError(f"{slot} has no command of its own")
    return command


def _extract_shared_files(command: Command) -> dict[str, str]:
    """Return the addresses of all tasks of a TensorFlow cluster, which are long and the same for every task."""
    if "TF_CONFIG" not in command.env:
        return {}
    cluster = json.dumps(json.loads(command.env["TF_CONFIG"])["cluster"])
    return {"cluster.json": cluster, "cluster_config.json": command.env["CLUSTER_CONFIG"]}


def _variable_name(file: str) -> str:
    return file.removesuffix(".json")


def _quote(text: str, shared: Mapping[str, str]) -> str:
    """Quote a word for `sh`, with references to shell variables for the index and for shared files."""
    variables = {value: f'"${_variable_name(file)}"' for file, value in shared.items()}
    return quote_word(text, {**variables, str(ANY_INDEX): '"$STOKER_INDEX"'})

"""Parameters of commands: their names in the help, and the errors for values of the wrong type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from stoker.errors import InputError

EXPECTED = {"valid integer": "an integer", "valid number": "a number", "valid float": "a number"}
"""What a value must be, by the words in the error that typer raises."""


def build_command(app: typer.Typer) -> Any:
    """Return the command of an app, with plain argument names in its help and plain errors for numbers."""
    command = typer.main.get_command(app)
    _adapt(command)
    return command


def _adapt(command: Any) -> None:
    for inner in getattr(command, "commands", {}).values():
        _adapt(inner)
    for param in command.params:
        param.process_value = _report_type_errors(param.process_value, param)
        if param.param_type_name == "argument":
            param.display_type_rich = _no_type  # otherwise typer prints the Python type: `URL <str>`
            param.get_usage_pieces = _usage_of(param)


def _no_type(ctx: object) -> str:  # noqa: ARG001
    return ""


def _usage_of(param: Any) -> Callable[[object], list[str]]:
    """Return the usage of an argument: `NAME`, `[NAME]` if it is optional, `NAME...` if it takes several values."""
    name = param.metavar or param.name.upper()
    usage = (name if param.required else f"[{name}]") + ("..." if param.nargs != 1 else "")
    return lambda _: [usage]


def _report_type_errors(process: Callable[[Any, Any], Any], param: Any) -> Callable[[Any, Any], Any]:
    """Wrap the conversion of a value: one of the wrong type is an InputError that names the option and the value."""

    def process_value(ctx: Any, value: Any) -> Any:
        try:
            return process(ctx, value)
        except typer.BadParameter as error:
            expected = next((text for words, text in EXPECTED.items() if words in error.message), None)
            if expected is None:
                raise
            raise InputError(f"{param.opts[0]} must be {expected}, got {value!r}") from error

    return process_value

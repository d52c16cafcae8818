"""Parameters of commands: their names in the help, and the errors for values of the wrong type."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from stoker.errors import InputError

EXPECTED = {"valid integer": "an integer", "valid number": "a number", "valid float": "a number"}
"""What a value must be, by the words in the error that typer raises."""
_BOUND = re.compile(r"(?P<side>greater|less) than or equal to (?P<limit>\S+)")
"""The limit of a number in the error that typer raises."""
PLAIN_TYPES: dict[Any, Callable[[Any], Any]] = {
    Path: Path,
    list[str]: list,
    list[Path]: lambda values: [Path(value) for value in values],
}
"""Types that have no invalid text."""


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
        LazyConversion.install(param)
        if param.param_type_name == "argument":
            param.display_type_rich = _no_type  # otherwise typer prints the Python type: `URL <str>`
            param.get_usage_pieces = _usage_of(param)
    command.get_help_option = _adapt_help_option(command.get_help_option)


def _adapt_help_option(get_help_option: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_option(ctx: Any) -> Any:
        option = get_help_option(ctx)
        LazyConversion.install(option)
        return option

    return get_option


class LazyConversion:
    """Conversion of a parameter that imports pydantic, which takes 0.1 s, only for a value that must be parsed."""

    def __init__(self, param: Any) -> None:
        self._annotation, self._is_list = param.type_descriptor.annotation, param.multiple or param.nargs == -1
        self._get_converter = type(param).get_runtime_param

    @classmethod
    def install(cls, param: Any) -> None:
        """Replace the conversion of a parameter, if typer has one that can be replaced."""
        if hasattr(param, "get_runtime_param"):
            conversion = cls(param)
            param.get_runtime_param = lambda: conversion

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value in the type of the parameter."""
        if value is None:
            return () if self._is_list else None
        if type(value) is self._annotation:
            return value
        if self._annotation in PLAIN_TYPES:
            return PLAIN_TYPES[self._annotation](value)
        return self._get_converter(param).coerce(value, param=param, ctx=ctx)


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
            if bound := _BOUND.search(error.message):
                expected = f"{'>=' if bound['side'] == 'greater' else '<='} {bound['limit']}"
            if expected is None:
                raise
            raise InputError(f"{param.opts[0]} must be {expected}, got {value!r}") from error

    return process_value

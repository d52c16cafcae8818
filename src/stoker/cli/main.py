"""The `stoker` command: imports the commands that it needs, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import gc
import io
import signal
import sys
from collections.abc import Collection
from importlib import import_module

import typer

from stoker import __version__
from stoker.cli.parameters import build_command
from stoker.cli.renamed import check_renamed_options
from stoker.core import command_process
from stoker.errors import InterruptError, StokerError, UnavailableError, redact_urls

COMMANDS = ("data", "job", "model", "volume", "dash", "demo", "init", "doctor", "profile")
"""Modules of this package: a group of commands is `app` there, a command the function with the name of the module."""


def make_app(names: Collection[str] = COMMANDS) -> typer.Typer:
    """Return the app with these commands only, because importing the modules of all of them takes longer."""
    app = typer.Typer(
        name="stoker",
        help="Train image models at the speed of your accelerators: convert and serve datasets, run and monitor jobs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for name in names:
        module = import_module(f"stoker.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name, context_settings=getattr(module, "SETTINGS", None))(getattr(module, name))
    return app


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Define the global options."""


def main() -> None:
    """Run the command line of this process and exit with its exit code."""
    command_process.is_command = True
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, exit codes of children would be lost
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # unwinds, so that temporary files are removed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name that the terminal cannot show must not fail
    code = run(sys.argv[1:])
    gc.freeze()  # otherwise the interpreter searches all objects for cycles before it exits
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        check_renamed_options(argv)
        names = argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS
        build_command(make_app(names))(args=argv, prog_name="stoker")
    except SystemExit as done:  # typer has already printed usage errors
        if done.code == InterruptError.exit_code:
            typer.echo("stoker: interrupted", err=True)
        return done.code if isinstance(done.code, int) else 0
    except StokerError as error:
        typer.echo(f"stoker: {error}", err=True)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"stoker: {redact_urls(where)}{error.strerror or error}", err=True)
        return UnavailableError.exit_code
    return 0

"""`stoker`: the nouns, and the one place that turns errors into a sentence and an exit code."""

from __future__ import annotations

import sys

import click
import typer

from stoker import __version__
from stoker.cli import data, demo, planned
from stoker.errors import StokerError, StoppedError

app = typer.Typer(
    name="stoker",
    help="Keeps accelerators fed: datasets into shards, shards into batches, one job file for every place.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")
app.command("demo")(demo.demo)
planned.add_to(app)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(  # noqa: ARG001 - its callback does it all
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Keep accelerators fed."""


def main() -> None:
    """Run a command and exit by the class of what went wrong."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(args=argv, standalone_mode=False, prog_name="stoker")
        if code == StoppedError.exit_code:  # typer makes this of a KeyboardInterrupt
            raise StoppedError("interrupted")
        return code if isinstance(code, int) else 0
    except click.exceptions.ClickException as error:
        error.show()
        return error.exit_code
    except StokerError as error:
        typer.echo(f"stoker: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has left; point it nowhere so that the interpreter's last flush is quiet.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"stoker: {where}{error.strerror or error}", err=True)
        return 5

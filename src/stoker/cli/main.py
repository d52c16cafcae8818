"""`stoker`: the nouns, and the one place that turns errors into a sentence and an exit code."""

from __future__ import annotations

import errno
import io
import signal
import sys
import tempfile

import typer

from stoker import __version__
from stoker.cli import data, demo, doctor, job, planned, profile, volume
from stoker.errors import StokerError, StoppedError, UnavailableError, without_secrets

app = typer.Typer(
    name="stoker",
    help="Keeps accelerators fed: datasets into shards, shards into batches, one job file for every place.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")
app.add_typer(job.app, name="job")
app.add_typer(volume.app, name="volume")
app.command("demo")(demo.demo)
app.command("init")(job.init)
app.command("doctor")(doctor.doctor)
app.command("profile", context_settings=profile.SETTINGS)(profile.profile)
planned.add_to(app)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Keep accelerators fed."""


def main() -> None:
    """Run a command and exit by the class of what went wrong."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, exit codes are lost
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that temporary files are removed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a name is no reason to fail
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        app(args=argv, prog_name="stoker")
    except SystemExit as done:  # typer has shown usage errors itself
        if done.code == StoppedError.exit_code:
            typer.echo("stoker: interrupted", err=True)
        return done.code if isinstance(done.code, int) else 0
    except StokerError as error:
        typer.echo(f"stoker: {error}", err=True)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if error.errno == errno.ENOSPC and not where:  # a list or an archive that did not fit
            where = f"{tempfile.gettempdir()}: "
        typer.echo(f"stoker: {without_secrets(where)}{error.strerror or error}", err=True)
        return UnavailableError.exit_code
    return 0

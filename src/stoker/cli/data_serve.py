"""`stoker data serve` and `loadtest`: serve shards over HTTP, and measure a server under load."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from stoker.cli.options import Json, parse_value
from stoker.cli.output import print_json, print_message, print_table
from stoker.core.units import pluralize

if TYPE_CHECKING:
    from stoker.serve.engines import Engine
    from stoker.serve.loadtest import LoadTestResult

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 listens on all interfaces.")]


EngineName = Annotated[str, typer.Option("--engine", metavar="NAME", help="Server engine: auto, embedded or nginx.")]


TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the bearer token that clients must send.", show_default=False),
]


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker data`."""
    app.command()(serve)
    app.command()(loadtest)


def serve(
    folder_name: Annotated[str, typer.Argument(metavar="DIR", help="Directory to serve.")],
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 uses a free port.")] = 8080,
    host: Host = "127.0.0.1",
    engine: EngineName = "auto",
    token_file: TokenFile = None,
    writable: Annotated[bool, typer.Option("--writable/--read-only", help="Accept PUT and DELETE.")] = False,
) -> None:
    """Serve a directory of shards over HTTP.

    Runs until you press Ctrl-C or it receives SIGTERM; SIGHUP reloads the token.
    """
    from stoker.errors import InputError, NotFoundError
    from stoker.serve.engines import create_server
    from stoker.serve.loopback import is_loopback
    from stoker.serve.settings import ServeSettings

    folder = parse_folder(folder_name, "DIR")
    if not folder.is_dir():
        raise NotFoundError("not a directory" if folder.exists() else "no such directory", where=folder_name)
    if writable and token_file is None and not is_loopback(host):
        raise InputError("a writable server on a public address requires a token", where=host, hint="pass --token-file")
    settings = ServeSettings(
        root=folder.resolve(),
        host=host,
        port=parse_port(port),
        token=load_token(token_file),
        token_file=token_file,
        writable=writable,
    )
    run_engine(create_server(settings, engine), f"serving {folder}", host, token_file)


def loadtest(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of a directory on a data server or cache.")],
    clients: Annotated[int, typer.Option(metavar="N", help="Number of concurrent clients.")] = 64,
    seconds: Annotated[float, typer.Option(metavar="S", help="Duration of the test.")] = 10.0,
    size: Annotated[
        str | None,
        typer.Option("--range", metavar="BYTES", help="Read random ranges of this size instead of whole files."),
    ] = None,
    remote: Annotated[bool, typer.Option("--remote", help="Allow testing a server on another machine.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the throughput and latency of a data server."""
    from stoker.core.units import parse_bytes
    from stoker.errors import InputError
    from stoker.serve.loadtest import run_load_test
    from stoker.serve.loopback import is_loopback
    from stoker.storage import redacted

    if not url.startswith(("http://", "https://")):
        raise InputError("only http:// and https:// URLs can be load-tested", where=url)
    host = urlsplit(url).hostname or ""
    if not remote and not is_loopback(host):
        raise InputError(
            f"{host} is not this machine", where=redacted(url), hint="pass --remote to load-test it anyway"
        )
    if not 1 <= clients <= 4096:
        raise InputError(f"--clients must be between 1 and 4096, got {clients}")
    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds must be > 0 and <= 3600, got {seconds:g}")
    range_bytes = None if size is None else parse_value("--range", parse_bytes, size)
    if range_bytes == 0:
        raise InputError("--range must be >= 1 byte, got 0")
    result = run_load_test(url, clients=clients, seconds=seconds, range_bytes=range_bytes)
    _print_result(result, as_json)


def run_engine(engine: Engine, what: str, host: str, token_file: Path | None) -> None:
    """Run an engine until a signal, and print its URL."""
    from stoker.serve.loopback import is_loopback

    if not is_loopback(host) and token_file is None:
        print_message(f"warning: {host} is reachable from other machines without a token; consider --token-file")
    engine.start()
    try:
        with suppress(KeyboardInterrupt):  # a signal that arrives before `wait` handles signals
            urls = " or ".join(_reachable_urls(engine.url, host))
            print_message(f"{what} at {urls} with the {engine.name} engine; to stop, press Ctrl-C")
            engine.wait()
    finally:
        engine.stop()


def _reachable_urls(url: str, host: str) -> list[str]:
    """Return the URLs that clients can use: with a host that stands for all interfaces, one per address."""
    from stoker.remote.host_probe import list_addresses

    names: list[str] = []
    if host == "0.0.0.0":
        names = [address for _, address in list_addresses()]
    elif host == "::":
        names = [socket.gethostname()]
    return [f"http://{name}:{urlsplit(url).port}" for name in names] or [url]


def parse_folder(text: str, what: str) -> Path:
    """Return the path; raise InputError for an empty one, which would mean the working directory."""
    from stoker.errors import InputError

    if not text:
        raise InputError(f"{what} is empty", hint="use `.` for the working directory")
    return Path(text)


def parse_port(port: int) -> int:
    """Return the port; raise InputError if it is out of range."""
    from stoker.errors import InputError

    if not 0 <= port <= 65535:
        raise InputError(f"--port must be between 0 and 65535, got {port}")
    return port


def load_token(path: Path | None) -> str | None:
    """Return the token in a file, or None without a file."""
    from stoker.serve.auth import read_token

    return None if path is None else read_token(path)


def _print_result(result: LoadTestResult, as_json: bool) -> None:
    from stoker.core.units import format_bytes

    if as_json:
        print_json(asdict(result))
        return
    print_table(
        ("clients", "seconds", "GB/s", "bytes", "requests", "requests/s", "p50 ms", "p99 ms", "errors"),
        [
            (
                result.clients,
                f"{result.seconds:.1f}",
                f"{result.bytes_per_s / 1e9:.2f}",
                format_bytes(result.bytes),
                result.requests,
                f"{result.requests_per_s:.1f}",
                _format_ms(result.p50_s),
                _format_ms(result.p99_s),
                result.errors,
            )
        ],
    )
    for reason, count in result.reasons.items():
        print_message(f"{pluralize(count, 'error')}: {reason}")


def _format_ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"

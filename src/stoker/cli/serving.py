"""`stoker data serve`, `cache`, `warm` and `loadtest`: shards over the network."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from stoker.cli.output import byte_bar, print_json, print_table, remark
from stoker.core.units import counted

if TYPE_CHECKING:
    from stoker.serve.engines import Engine
    from stoker.serve.loadtest import Measured

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every network.")]
EngineName = Annotated[str, typer.Option("--engine", metavar="NAME", help="auto, embedded or nginx.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Ask every client for the token in this file.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def serve(
    place: Annotated[str, typer.Argument(metavar="DIR", help="The folder to serve.")],
    port: Annotated[int, typer.Option(metavar="N", help="0 takes one that is free.")] = 8080,
    host: Host = "127.0.0.1",
    engine: EngineName = "auto",
    token_file: TokenFile = None,
    writable: Annotated[bool, typer.Option("--writable/--read-only", help="Take PUT and DELETE too.")] = False,
) -> None:
    """Serve a folder of shards over http until it is ended; SIGHUP reads the token again."""
    from stoker.errors import InputError, NotFoundError
    from stoker.nginx import is_loopback
    from stoker.serve.engines import serving
    from stoker.serve.settings import ServeSettings

    folder = _folder(place, "DIR")
    if not folder.is_dir():
        raise NotFoundError("is a file" if folder.exists() else "no such folder", where=place)
    if writable and token_file is None and not is_loopback(host):
        raise InputError("a writable server that others can reach needs a token", where=host, hint="see --token-file")
    settings = ServeSettings(
        root=folder.resolve(),
        host=host,
        port=_port(port),
        token=_token(token_file),
        token_file=token_file,
        writable=writable,
    )
    _run(serving(settings, engine), f"serving {folder}", host, token_file)


def cache(
    origin: Annotated[
        list[str], typer.Option(metavar="[NAME=]URL", help="What is cached; may be given several times.")
    ],
    place: Annotated[str, typer.Option("--dir", metavar="DIR", help="Where it is kept.")],
    size: Annotated[str, typer.Option(metavar="BYTES", help="How much is kept at most, like 200GiB.")],
    port: Annotated[int, typer.Option(metavar="N", help="0 takes one that is free.")] = 3128,
    host: Host = "127.0.0.1",
    engine: EngineName = "auto",
    token_file: TokenFile = None,
    fresh: Annotated[
        float, typer.Option(metavar="S", help="Serve for so long before the origin is asked whether it changed.")
    ] = 60.0,
) -> None:
    """Cache shards of web servers and buckets: what many machines read is fetched once."""
    from stoker.core.units import parse_bytes
    from stoker.errors import InputError
    from stoker.serve.engines import caching
    from stoker.serve.origins import read_origins
    from stoker.serve.settings import CacheSettings
    from stoker.serve.slices import check_budget

    if not 0 <= fresh <= 86400 * 365:
        raise InputError(f"--fresh is {fresh:g}, and must be 0 or more seconds")
    folder = _folder(place, "--dir")
    origins = read_origins(origin)
    budget = parse_bytes(size)
    check_budget(folder, budget)
    settings = CacheSettings(
        origins=tuple(origins),
        dir=folder.resolve(),
        size=budget,
        host=host,
        port=_port(port),
        token=_token(token_file),
        token_file=token_file,
        fresh_s=fresh,
    )
    _run(caching(settings, engine), f"caching {counted(len(origins), 'origin')}", host, token_file)


def warm(
    url: Annotated[str, typer.Argument(metavar="URL", help="A shard set at its origin.")],
    via: Annotated[str, typer.Option(metavar="URL", help="The cache to fill.")],
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The job's file: its sampling and seed.", show_default=False)
    ] = None,
    shards: Annotated[str | None, typer.Option(metavar="A..B", help="Only these, of those needed first.")] = None,
    sampling: Annotated[str | None, typer.Option(metavar="MODE", help="exact (default), join or resampled.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As the run will have it; 0 unless told.")] = None,
    epoch: Annotated[int, typer.Option(metavar="N", help="The epoch that will come first.")] = 0,
    jobs: Annotated[int, typer.Option(metavar="N", help="Shards at a time.")] = 4,
    as_json: Json = False,
) -> None:
    """Fill a cache with the shards that a run needs first, in the order in which it needs them."""
    from stoker.core.units import format_bytes
    from stoker.errors import InputError
    from stoker.load.loader import find_one, plan_of
    from stoker.serve.warm import Order, fitting, order_of_job, parse_slice, plan_order
    from stoker.serve.warm import warm as fill
    from stoker.shards.scan import described
    from stoker.storage import shown
    from stoker.storage.via import budget, through

    if not 1 <= jobs <= 256:
        raise InputError(f"--jobs is {jobs}, and must be from 1 to 256")
    if epoch < 0:
        raise InputError(f"--epoch is {epoch}, and must be 0 or more")
    job = Order("exact", 0) if plan is None else order_of_job(plan)
    one = described(find_one(through(url, via)), jobs=jobs)
    drawn = plan_of(one, sampling=sampling or job.sampling, seed=job.seed if seed is None else seed)
    ordered = plan_order(drawn, one.shards, epoch)
    chosen = ordered[parse_slice(shards, len(ordered))] if shards is not None else ordered
    wanted = fitting(chosen, budget(via))
    with byte_bar("warming", sum(entry.size for entry in wanted)) as advance:
        took = fill(one, wanted, jobs=jobs, progress=advance)
    if as_json:
        print_json({"shards": [entry.name for entry in wanted], "bytes": took, "left": len(chosen) - len(wanted)})
    else:
        if left := len(chosen) - len(wanted):
            remark(f"the cache is too small for the {counted(left, 'shard')} needed last: left out")
        remark(f"{counted(len(wanted), 'shard')}, {format_bytes(took)}, through {shown(via)}")


def loadtest(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of a data server or cache.")],
    clients: Annotated[int, typer.Option(metavar="N", help="Clients at once.")] = 64,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long.")] = 10.0,
    size: Annotated[
        str | None, typer.Option("--range", metavar="BYTES", help="Read random parts of this size, not whole files.")
    ] = None,
    remote: Annotated[bool, typer.Option("--remote", help="Also load a server on another machine.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a data server under load: bytes and requests per second, latency, errors."""
    from stoker.core.units import parse_bytes
    from stoker.errors import InputError
    from stoker.nginx import is_loopback
    from stoker.serve.loadtest import measure
    from stoker.storage import shown

    if not url.startswith(("http://", "https://")):
        raise InputError("only http(s) servers can be load-tested", where=url)
    host = urlsplit(url).hostname or ""
    if not remote and not is_loopback(host):
        raise InputError(f"{host} is another machine", where=shown(url), hint="add --remote if it may be loaded so")
    if not 1 <= clients <= 4096:
        raise InputError(f"--clients is {clients}, and must be from 1 to 4096")
    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds is {seconds:g}, and must be from above 0 to 3600")
    part = None if size is None else parse_bytes(size)
    if part == 0:
        raise InputError("--range is 0, and must be at least 1 byte")
    found = measure(url, clients=clients, seconds=seconds, range_bytes=part)
    _show_measured(found, as_json)


def _run(engine: Engine, what: str, host: str, token_file: Path | None) -> None:
    """Run an engine until a signal, and say where it answers."""
    from stoker.nginx import is_loopback

    if not is_loopback(host) and token_file is None:
        remark(f"warning: {host} can be reached by other machines, and no token is asked for; see --token-file")
    engine.start()
    try:
        with suppress(KeyboardInterrupt):  # a signal that came before `wait` listens for them
            remark(f"{what} at {engine.url} with the {engine.name} engine; Ctrl-C ends it")
            engine.wait()
    finally:
        engine.stop()


def _folder(text: str, what: str) -> Path:
    """Refuse no name at all: it would mean the folder that one happens to be in."""
    from stoker.errors import InputError

    if not text:
        raise InputError(f"{what} is empty", hint="name a folder; `.` is the one you are in")
    return Path(text)


def _port(port: int) -> int:
    from stoker.errors import InputError

    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}, and must be from 0 to 65535")
    return port


def _token(path: Path | None) -> str | None:
    from stoker.serve.site import read_token

    return None if path is None else read_token(path)


def _show_measured(found: Measured, as_json: bool) -> None:
    from stoker.core.units import format_bytes

    if as_json:
        print_json(asdict(found))
        return
    print_table(
        ("clients", "seconds", "GB/s", "bytes", "requests", "requests/s", "p50 ms", "p99 ms", "errors"),
        [
            (
                found.clients,
                f"{found.seconds:.1f}",
                f"{found.bytes_per_s / 1e9:.2f}",
                format_bytes(found.bytes),
                found.requests,
                f"{found.requests_per_s:.1f}",
                _milliseconds(found.p50_s),
                _milliseconds(found.p99_s),
                found.errors,
            )
        ],
    )
    for reason, times in found.reasons.items():
        remark(f"{counted(times, 'error')}: {reason}")


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"

"""`stoker data serve`, `cache`, `warm` and `loadtest`: shards over the network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol
from urllib.parse import urlsplit

import typer

from stoker.cli.output import byte_bar, print_json, print_table, remark
from stoker.core.units import counted

if TYPE_CHECKING:
    from stoker.serve.engines import Engine
    from stoker.serve.loadtest import Measured
    from stoker.shards.shard_set import ShardSet
    from stoker.storage import Entry

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every network.")]
EngineName = Annotated[str, typer.Option("--engine", metavar="NAME", help="auto, embedded or nginx.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Ask every client for the token in this file.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="PLACE", help="In a cluster: k8s[://context/namespace].", show_default=False),
]
Image = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="For --on: the pods' image, if not the usual one.", show_default=False),
]
Patch = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="For --on: merge these into the objects; may be given several times."),
]


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
    from stoker.serve.engines import serving
    from stoker.serve.nginx.config import is_loopback
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
    ctx: typer.Context,
    origin: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]URL", help="What is cached; may be given several times.")
    ] = None,
    place: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Where it is kept.", show_default=False)
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="How much is kept at most, like 200GiB.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="0 takes one that is free.")] = 3128,
    host: Host = "127.0.0.1",
    engine: EngineName = "auto",
    token_file: TokenFile = None,
    fresh: Annotated[
        float, typer.Option(metavar="S", help="Serve for so long before the origin is asked whether it changed.")
    ] = 60.0,
    on: On = None,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="For --on: keep it on this claim.", show_default=False)
    ] = None,
    storage_class: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="For --on: on new claims of this class.", show_default=False),
    ] = None,
    replicas: Annotated[int, typer.Option(metavar="N", help="For --on: pods, each with a store of its own.")] = 1,
    image: Image = None,
    patch: Patch = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="For --on: wait so long for it.")] = "3m",
    plan: Annotated[bool, typer.Option("--plan", help="For --on: print the objects, and do nothing.")] = False,
    status: Annotated[bool, typer.Option("--status", help="For --on: tell how it is.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="For --on: remove it.")] = False,
    as_json: Json = False,
) -> None:
    """Cache shards of web servers and buckets: what many machines read is fetched once."""
    from stoker.cli import data_cache

    data_cache.check_options(ctx, on, local=LOCAL_CACHE, remote=REMOTE_CACHE)
    if on is not None:
        asked = data_cache.Asked(origin or [], size, claim, storage_class, replicas, image, fresh, patch or [])
        data_cache.cache(on, asked, timeout=timeout, plan=plan, status=status, stop=stop, as_json=as_json)
        return
    _cache_here(origin or [], place, size, port, host, engine, token_file, fresh)


LOCAL_CACHE = {"place": "--dir", "port": "--port", "host": "--host", "engine": "--engine", "token_file": "--token-file"}
REMOTE_CACHE = {
    "claim": "--claim",
    "storage_class": "--class",
    "replicas": "--replicas",
    "image": "--image",
    "patch": "--patch",
    "timeout": "--timeout",
    "plan": "--plan",
    "status": "--status",
    "stop": "--stop",
    "as_json": "--json",
}


def _cache_here(
    origin: list[str],
    place: str | None,
    size: str | None,
    port: int,
    host: str,
    engine: str,
    token_file: Path | None,
    fresh: float,
) -> None:
    from stoker.core.units import parse_bytes
    from stoker.errors import InputError
    from stoker.serve.cache.origins import read_origins
    from stoker.serve.cache.slices import check_budget
    from stoker.serve.engines import caching
    from stoker.serve.settings import CacheSettings

    if not 0 <= fresh <= 86400 * 365:
        raise InputError(f"--fresh is {fresh:g}, and must be 0 or more seconds")
    if place is None or size is None:
        lacks = [name for name, value in (("--dir", place), ("--size", size)) if value is None]
        raise InputError(f"no {' and no '.join(lacks)} is given", hint="for example --dir /cache --size 200GiB")
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
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="A shard set at its origin.")],
    via: Annotated[str | None, typer.Option(metavar="URL", help="The cache to fill.", show_default=False)] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The job's file: its sampling and seed.", show_default=False)
    ] = None,
    shards: Annotated[str | None, typer.Option(metavar="A..B", help="Only these, of those needed first.")] = None,
    sampling: Annotated[str | None, typer.Option(metavar="MODE", help="exact (default), join or resampled.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As the run will have it; 0 unless told.")] = None,
    epoch: Annotated[int, typer.Option(metavar="N", help="The epoch that will come first.")] = 0,
    jobs: Annotated[int, typer.Option(metavar="N", help="Shards at a time.")] = 4,
    on: On = None,
    copy: Annotated[
        str | None,
        typer.Option(metavar="URL", help="For --on: the same set, as it can be read from here.", show_default=False),
    ] = None,
    image: Image = None,
    patch: Patch = None,
    as_json: Json = False,
) -> None:
    """Fill a cache with the shards that a run needs first, in the order in which it needs them."""
    from stoker.cli import data_cache
    from stoker.core.units import format_bytes
    from stoker.errors import InputError
    from stoker.load.loader import find_one, plan_of
    from stoker.serve.cache.warm import Order, fitting, order_of_job, parse_slice, plan_order
    from stoker.shards.scan import described
    from stoker.storage import shown

    if not 1 <= jobs <= 256:
        raise InputError(f"--jobs is {jobs}, and must be from 1 to 256")
    if epoch < 0:
        raise InputError(f"--epoch is {epoch}, and must be 0 or more")
    data_cache.check_options(ctx, on, local={"via": "--via"}, remote=REMOTE_WARM)
    if via is None and on is None:
        raise InputError("no --via is given", hint="name the cache: --via http://cache:3128, or --on k8s")
    job = Order("exact", 0) if plan is None else order_of_job(plan)
    way: _Way = data_cache.Filler(on, url, copy, image, patch or []) if on is not None else _Via(url, via or "")
    with closing(way):
        one = described(find_one(way.readable), jobs=jobs)
        drawn = plan_of(one, sampling=sampling or job.sampling, seed=job.seed if seed is None else seed)
        ordered = plan_order(drawn, one.shards, epoch)
        chosen = ordered[parse_slice(shards, len(ordered))] if shards is not None else ordered
        wanted = fitting(chosen, way.budget)
        with byte_bar("warming", sum(entry.size for entry in wanted)) as advance:
            took = way.fill(one, wanted, jobs, advance)
    if as_json:
        print_json({"shards": [entry.name for entry in wanted], "bytes": took, "left": len(chosen) - len(wanted)})
    else:
        if left := len(chosen) - len(wanted):
            remark(f"the cache is too small for the {counted(left, 'shard')} needed last: left out")
        remark(f"{counted(len(wanted), 'shard')}, {format_bytes(took)}, through {shown(way.url)}")


REMOTE_WARM = {"copy": "--copy", "image": "--image", "patch": "--patch"}


class _Way(Protocol):
    """How a cache is filled."""

    url: str
    readable: str
    budget: int

    def fill(self, one: ShardSet, wanted: list[Entry], jobs: int, progress: Callable[[int], None]) -> int:
        """Read shards through it."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class _Via:
    """A cache that can be reached from here."""

    def __init__(self, url: str, via: str) -> None:
        from stoker.storage.cache_url import budget, through

        self.url, self.readable, self.budget = via, through(url, via), budget(via)

    def fill(self, one: ShardSet, wanted: list[Entry], jobs: int, progress: Callable[[int], None]) -> int:
        """Read shards through it, here."""
        from stoker.serve.cache.warm import warm as fill

        return fill(one, wanted, jobs=jobs, progress=progress)

    def close(self) -> None:
        """Nothing is held."""


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
    from stoker.serve.loadtest import measure
    from stoker.serve.nginx.config import is_loopback
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
    from stoker.serve.nginx.config import is_loopback

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

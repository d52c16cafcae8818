"""`stoker data cache` and `warm`: a caching proxy on this machine or in a Kubernetes namespace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from stoker.cli import cluster_cache
from stoker.cli.data_serve import EngineName, Host, TokenFile, load_token, parse_folder, parse_port, run_engine
from stoker.cli.options import Json, parse_value
from stoker.cli.output import print_json, print_message, show_byte_progress
from stoker.core.units import pluralize

if TYPE_CHECKING:
    from stoker.shards.shard_set import ShardSet
    from stoker.storage import Entry

LOCAL_CACHE = {
    "cache_dir": "--dir",
    "port": "--port",
    "host": "--host",
    "engine": "--engine",
    "token_file": "--token-file",
}
CLUSTER_CACHE = {
    "claim": "--claim",
    "storage_class": "--storage-class",
    "replicas": "--replicas",
    "image": "--image",
    "patch": "--patch",
    "timeout": "--timeout",
    "dry_run": "--dry-run",
    "status": "--status",
    "stop": "--stop",
    "as_json": "--json",
}
CACHE_EXAMPLE = "for example: --origin https://data.example.com --dir /cache --size 200GiB"
CLUSTER_WARM = {"read_from": "--read-from", "image": "--image", "patch": "--patch"}

DeployOn = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Deploy or manage the cache in a Kubernetes namespace: k8s[://context/namespace].",
        show_default=False,
    ),
]
WarmOn = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Warm the cache in a Kubernetes namespace: k8s[://context/namespace].",
        show_default=False,
    ),
]
Image = Annotated[
    str | None, typer.Option(metavar="NAME", help="With --on: container image for the pods.", show_default=False)
]
Patch = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="With --on: YAML to merge into the objects. Repeatable."),
]


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker data`."""
    app.command()(cache)
    app.command()(warm)


def cache(
    ctx: typer.Context,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Origin to cache: a web server or bucket. Repeatable."),
    ] = None,
    cache_dir: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Directory to store the cache in.", show_default=False)
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Maximum size of the cache, for example 200GiB.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 uses a free port.")] = 3128,
    host: Host = "127.0.0.1",
    engine: EngineName = "auto",
    token_file: TokenFile = None,
    revalidate_after: Annotated[
        float, typer.Option(metavar="S", help="Revalidate a cached object with its origin after S seconds.")
    ] = 60.0,
    on: DeployOn = None,
    claim: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --on: store the cache in this existing PersistentVolumeClaim.",
            show_default=False,
        ),
    ] = None,
    storage_class: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --on: create PersistentVolumeClaims with this StorageClass.", show_default=False
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(metavar="N", help="With --on: number of pods, each with its own cache.")] = 1,
    image: Image = None,
    patch: Patch = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="With --on: how long to wait for the cache to become ready.")
    ] = "3m",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --on: print the objects without creating them.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="With --on: show the status of the namespace's cache.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="With --on: delete the namespace's cache.")] = False,
    as_json: Json = False,
) -> None:
    """Run a caching proxy in front of web servers and buckets.

    Data read by many machines is fetched from its origin only once.
    """
    cluster_cache.check_options(ctx, on, local=LOCAL_CACHE, cluster=CLUSTER_CACHE)
    if on is not None:
        options = cluster_cache.CacheOptions(
            origin or [], size, claim, storage_class, replicas, image, revalidate_after, patch or []
        )
        cluster_cache.cache(on, options, timeout=timeout, dry_run=dry_run, status=status, stop=stop, as_json=as_json)
        return
    _cache_here(origin or [], cache_dir, size, port, host, engine, token_file, revalidate_after)


def _cache_here(
    origin: list[str],
    cache_dir: str | None,
    size: str | None,
    port: int,
    host: str,
    engine: str,
    token_file: Path | None,
    revalidate_after: float,
) -> None:
    """Run the cache on this machine until a signal."""
    from stoker.core.text import join_all
    from stoker.core.units import parse_bytes
    from stoker.errors import InputError
    from stoker.serve.cache.origins import parse_origins
    from stoker.serve.cache.slices import check_budget
    from stoker.serve.engines import create_cache
    from stoker.serve.settings import CacheSettings

    cluster_cache.check_revalidation(revalidate_after)
    if not origin or cache_dir is None or size is None:
        missing = [name for name, value in (("--origin", origin), ("--dir", cache_dir), ("--size", size)) if not value]
        raise InputError(f"{join_all(missing)} {'is' if len(missing) == 1 else 'are'} required", hint=CACHE_EXAMPLE)
    folder = parse_folder(cache_dir, "--dir")
    origins = parse_origins(origin)
    budget = parse_value("--size", parse_bytes, size)
    check_budget(folder, budget)
    settings = CacheSettings(
        origins=tuple(origins),
        dir=folder.resolve(),
        size=budget,
        host=host,
        port=parse_port(port),
        token=load_token(token_file),
        token_file=token_file,
        revalidate_after_s=revalidate_after,
    )
    run_engine(create_cache(settings, engine), f"caching {pluralize(len(origins), 'origin')}", host, token_file)


def warm(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the shard set on its origin.")],
    via: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the cache to warm.", show_default=False)
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Job file to take the sampling mode and seed from.", show_default=False),
    ] = None,
    shards: Annotated[
        str | None, typer.Option(metavar="A..B", help="Warm only this range of shards, in order.")
    ] = None,
    sampling: Annotated[
        str | None, typer.Option(metavar="MODE", help="Sampling mode: exact (default), join or resampled.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed used by the run. Defaults to 0.")] = None,
    epoch: Annotated[int, typer.Option(metavar="N", help="Epoch that the run starts with.")] = 0,
    jobs: Annotated[int, typer.Option(metavar="N", help="Number of shards to fetch at a time.")] = 4,
    on: WarmOn = None,
    read_from: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --on: URL from which this machine can read the same shard set.",
            show_default=False,
        ),
    ] = None,
    image: Image = None,
    patch: Patch = None,
    as_json: Json = False,
) -> None:
    """Fill a cache with shards in the order in which a run reads them."""
    from stoker.errors import InputError
    from stoker.load.planning import find_shard_set, plan_sampling
    from stoker.serve.cache.warm import WarmPlan, order_shards, parse_shard_range, read_job_plan, select_fitting
    from stoker.shards.scan import ensure_manifest

    if not 1 <= jobs <= 256:
        raise InputError(f"--jobs must be between 1 and 256, got {jobs}")
    if epoch < 0:
        raise InputError(f"--epoch must be >= 0, got {epoch}")
    cluster_cache.check_options(ctx, on, local={"via": "--via"}, cluster=CLUSTER_WARM)
    if via is None and on is None:
        raise InputError("no cache specified", hint="pass --via http://cache:3128 or --on k8s")
    order = WarmPlan("exact", 0) if job is None else read_job_plan(job)
    warmer: _Warmer = (
        cluster_cache.ClusterWarmer(on, url, read_from, image, patch or [])
        if on is not None
        else _LocalWarmer(url, via or "")
    )
    with closing(warmer):
        shard_set = ensure_manifest(find_shard_set(warmer.readable), jobs=jobs)
        plan = plan_sampling(shard_set, sampling=sampling or order.sampling, seed=order.seed if seed is None else seed)
        ordered = order_shards(plan, shard_set.shards, epoch)
        chosen = ordered[parse_shard_range(shards, len(ordered))] if shards is not None else ordered
        entries = select_fitting(chosen, warmer.budget)
        with show_byte_progress("warming", sum(entry.size for entry in entries)) as advance:
            fetched = warmer.fill(shard_set, entries, jobs, advance)
    _print_warmed(entries, fetched, len(chosen) - len(entries), warmer.url, as_json=as_json)


def _print_warmed(entries: list[Entry], fetched: int, skipped: int, cache_url: str, *, as_json: bool) -> None:
    """Print which shards are in the cache now, and how many did not fit."""
    from stoker.core.units import format_bytes
    from stoker.storage import redacted

    if as_json:
        print_json({"shards": [entry.name for entry in entries], "bytes": fetched, "left": skipped})
        return
    if skipped:
        print_message(f"the cache is too small: skipped the last {pluralize(skipped, 'shard')}")
    print_message(f"{pluralize(len(entries), 'shard')}, {format_bytes(fetched)}, through {redacted(cache_url)}")


class _Warmer(Protocol):
    """Warmer of a cache; `readable` is the URL at which the set can be read from here."""

    url: str
    readable: str
    budget: int

    def fill(self, shard_set: ShardSet, entries: list[Entry], jobs: int, progress: Callable[[int], None]) -> int:
        """Read shards through the cache and return the number of bytes."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class _LocalWarmer:
    """Warmer of a cache that this machine can reach."""

    def __init__(self, url: str, via: str) -> None:
        from stoker.errors import InputError
        from stoker.storage.cache_url import find_cache_url, read_cache_budget

        if not via.startswith(("http://", "https://")):
            raise InputError(f"--via must be an http:// or https:// URL, got {via!r}")
        self.url, self.readable, self.budget = via, find_cache_url(url, via), read_cache_budget(via)

    def fill(self, shard_set: ShardSet, entries: list[Entry], jobs: int, progress: Callable[[int], None]) -> int:
        """Read shards through the cache and return the number of bytes."""
        from stoker.serve.cache.warm import warm_cache as fill

        return fill(shard_set, entries, jobs=jobs, progress=progress)

    def close(self) -> None:
        """Do nothing: no connection is kept."""

"""`stoker data cache --on k8s` and `stoker data warm --on k8s`: the caching proxy of a Kubernetes namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import typer

from stoker.cli.kube_target import connect, parse_target
from stoker.cli.options import is_given, parse_value
from stoker.cli.output import print_json, print_message, print_table
from stoker.core.units import format_bytes, parse_bytes, parse_duration, pluralize
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient
    from stoker.kube.config import KubeTarget
    from stoker.serve.cluster.deployment import CacheStatus
    from stoker.serve.cluster.manifests import ClusterCache
    from stoker.shards.shard_set import ShardSet
    from stoker.storage import Entry

MAX_REVALIDATION_S = 365 * 86400


class CacheOptions(NamedTuple):
    """Options of a cache in a cluster, as given on the command line."""

    origins: list[str]
    size: str | None
    claim: str | None
    storage_class: str | None
    replicas: int
    image: str | None
    revalidate_after: float
    patches: list[Path]


def check_options(ctx: typer.Context, on: str | None, *, local: Mapping[str, str], cluster: Mapping[str, str]) -> None:
    """Raise InputError for options that do not apply with, or without, `--on`."""
    inapplicable = cluster if on is None else local
    flags = [flag for name, flag in inapplicable.items() if is_given(ctx, name)]
    if flags:
        condition = "requires --on k8s" if on is None else "not valid with --on k8s"
        raise InputError(f"{', '.join(flags)}: {condition}")


def check_revalidation(seconds: float) -> None:
    """Raise InputError if `--revalidate-after` is out of range."""
    if not 0 <= seconds <= MAX_REVALIDATION_S:
        raise InputError(f"--revalidate-after must be between 0 and {MAX_REVALIDATION_S} seconds, got {seconds:g}")


def cache(
    on: str, options: CacheOptions, *, timeout: str, dry_run: bool, status: bool, stop: bool, as_json: bool
) -> None:
    """Deploy, show or delete the cache of a namespace."""
    actions = [flag for flag, is_set in (("--dry-run", dry_run), ("--status", status), ("--stop", stop)) if is_set]
    if len(actions) > 1:
        raise InputError(f"{' and '.join(actions)} are mutually exclusive", hint="pass only one of them")
    wait_s = parse_value("--timeout", parse_duration, timeout)
    if dry_run:
        _print_objects(on, options, as_json)
        return
    with connect(on) as cluster:
        if stop:
            _delete_cache(cluster, as_json)
            return
        if not status:
            _deploy(cluster, parse_target(on), options, wait_s)
        _print_state(cluster, as_json)


def _deploy(cluster: KubeClient, target: KubeTarget, options: CacheOptions, wait_s: float) -> None:
    from stoker.serve.cluster.deployment import deploy_cache, wait_cache_ready
    from stoker.serve.cluster.manifests import build_cache_objects

    cache_spec = _build_spec(options, target, cluster)
    deploy_cache(cluster, build_cache_objects(cache_spec, read_patches(options.patches)))
    print_message(f"{cache_spec.kind} stoker-cache in {cluster.url}, {format_bytes(cache_spec.size)} per pod")
    wait_cache_ready(
        cluster, cache_spec.kind, timeout_s=wait_s, on_progress=lambda text: print_message(f"pending: {text}")
    )


def _print_objects(on: str, options: CacheOptions, as_json: bool) -> None:
    """Print the objects; contacts the cluster only to read the size of a claim."""
    from stoker.core.yaml_io import to_yaml_stream
    from stoker.serve.cluster.manifests import build_cache_objects

    if options.claim is not None and options.size is None:
        with connect(on) as cluster:
            cache_spec = _build_spec(options, parse_target(on), cluster)
    else:
        cache_spec = _build_spec(options, parse_target(on), None)
    objects = build_cache_objects(cache_spec, read_patches(options.patches))
    if as_json:
        print_json(objects)
    else:
        typer.echo(to_yaml_stream(objects), nl=False)


def _build_spec(options: CacheOptions, target: KubeTarget, cluster: KubeClient | None) -> ClusterCache:
    """Return the cache to deploy; the size defaults to that of the claim."""
    from stoker.serve.cache.origins import parse_origins
    from stoker.serve.cluster.deployment import claim_bytes_per_pod
    from stoker.serve.cluster.manifests import NGINX_IMAGE, ClusterCache

    check_revalidation(options.revalidate_after)
    origins = tuple(parse_origins(options.origins))
    size = None if options.size is None else parse_value("--size", parse_bytes, options.size)
    if options.claim is not None and cluster is not None and options.replicas >= 1:
        available = claim_bytes_per_pod(cluster, options.claim, options.replicas)
        if size is not None and size > available:
            each = " per pod" if options.replicas > 1 else ""
            capacity = f"{format_bytes(available)}{each}"
            raise InputError(f"--size is {format_bytes(size)}, but claim {options.claim} provides only {capacity}")
        size = available if size is None else size
    if size is None:
        raise InputError(
            "--size is required", hint="set the maximum size of the cache per pod, for example --size 200Gi"
        )
    return ClusterCache(
        origins=origins,
        size=size,
        image=NGINX_IMAGE if options.image is None else options.image,
        replicas=options.replicas,
        claim=options.claim,
        storage_class=options.storage_class,
        revalidate_after_s=options.revalidate_after,
        namespace=target.namespace,
    )


def read_patches(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read YAML documents, each with the `kind` of the object that it patches."""
    from stoker.kube.manifest_files import load_documents

    patches: list[dict[str, Any]] = []
    for path in files:
        for document in load_documents(path):
            if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
                raise InputError(
                    "patch has no `kind`",
                    where=path,
                    hint="add the kind of the object to patch, for example kind: Deployment",
                )
            patches.append(document)
    return patches


def _delete_cache(cluster: KubeClient, as_json: bool) -> None:
    from stoker.serve.cluster.deployment import remove_cache

    removed = remove_cache(cluster)
    if as_json:
        print_json({"removed": removed})
    else:
        names = f": {', '.join(removed)}" if removed else ""
        print_message(f"removed {pluralize(len(removed), 'object')} from {cluster.url}{names}")


def _print_state(cluster: KubeClient, as_json: bool) -> None:
    from dataclasses import asdict

    from stoker.serve.cluster.deployment import read_status

    state = read_status(cluster)
    if as_json:
        print_json(asdict(state))
    else:
        _print_pods(state)


def _print_pods(state: CacheStatus) -> None:
    print_table(
        ("pod", "node", "state", "restarts", "requests", "bytes", "hits", "misses", "from origin", "errors"),
        [
            (
                pod.name,
                pod.node,
                "ready" if pod.ready else "not ready",
                pod.restarts,
                pod.log.get("requests"),
                _format_bytes(pod.log.get("bytes")),
                pod.log.get("hits"),
                pod.log.get("misses"),
                _format_bytes(pod.log.get("origin_bytes")),
                pod.log.get("errors"),
            )
            for pod in state.pods
        ],
    )
    for pod in state.pods:
        if pod.why:
            print_message(f"{pod.name}: {pod.why}")
    print_message(
        f"{state.ready} of {state.replicas} ready at {state.url}; use it in a job file with data.via: cluster"
    )
    for origin in state.origins:
        print_message(f"  /{origin['name']}{'/' if origin['name'] else ''} → {origin['url']}")


def _format_bytes(number: int | None) -> str | None:
    return None if number is None else format_bytes(number)


class ClusterWarmer:
    """Warmer of the cache of a namespace, by a Job in that namespace."""

    def __init__(self, on: str, url: str, read_from: str | None, image: str | None, patches: Sequence[Path]) -> None:
        from stoker.serve.cluster.deployment import find_warm_target
        from stoker.serve.cluster.manifests import WARM_IMAGE
        from stoker.storage.cache_url import build_cache_url

        self._patches, self._image = read_patches(patches), WARM_IMAGE if image is None else image
        self._kube_target, self._cluster = parse_target(on), connect(on)
        try:
            self._target = find_warm_target(self._cluster)
            self.url, self.budget = self._cluster.url, self._target.budget
            build_cache_url(url, self.url, self._target.origins)  # before anything is read
        except BaseException:
            self.close()
            raise
        self.readable, self._origin = read_from or url, None if read_from is None else url

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()

    def fill(self, shard_set: ShardSet, entries: list[Entry], jobs: int, progress: Callable[[int], None]) -> int:
        """Read shards through the cache with a Job and return the number of bytes."""
        from stoker.serve.cluster.deployment import run_warm_job
        from stoker.serve.cluster.manifests import MAX_PARALLEL_READS, WarmJob

        if jobs > MAX_PARALLEL_READS:
            raise InputError(f"--jobs must be between 1 and {MAX_PARALLEL_READS} with --on k8s, got {jobs}")
        objects = list(_list_objects(shard_set, entries))
        root = self._root(shard_set)
        warm_job = WarmJob(
            paths=tuple(f"{root}/{quote(name)}" for name, _ in objects),
            caches=self._target.caches,
            parallel=min(jobs, max(1, len(objects))),
            image=self._image,
            namespace=self._kube_target.namespace,
        )
        run_warm_job(
            self._cluster,
            warm_job,
            patches=self._patches,
            on_read=lambda at: progress(objects[at][1]),
            on_progress=lambda text: print_message(f"pending: {text}"),
        )
        return sum(size for _, size in objects)

    def _root(self, shard_set: ShardSet) -> str:
        """Return the path of the set below the cache's URL."""
        from stoker.storage.cache_url import build_cache_url

        url = shard_set.url if self._origin is None else f"{self._origin.rstrip('/')}/{shard_set.folder}".rstrip("/")
        path = build_cache_url(url, "", self._target.origins)
        return f"/{quote(path, safe='/%')}" if path else ""


def _list_objects(shard_set: ShardSet, entries: Sequence[Entry]) -> Iterator[tuple[str, int]]:
    """Yield what a run reads, with sizes: the manifest, and each shard after its index; only shards have a size."""
    from stoker.shards.index import index_name
    from stoker.shards.manifest import MANIFEST

    is_ours = shard_set.manifest is not None and shard_set.indexes is None
    if is_ours:
        yield MANIFEST, 0
    for entry in entries:
        if is_ours:
            yield index_name(entry.name), 0
        yield entry.name, entry.size

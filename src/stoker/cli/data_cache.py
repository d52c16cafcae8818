"""`stoker data cache --on k8s` and `stoker data warm --on k8s`: the cache of a namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import typer

from stoker.cli.kube_target import cluster_at, place_of
from stoker.cli.output import print_json, print_table, remark
from stoker.core.units import counted, format_bytes, parse_bytes, parse_duration
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.kube.client import Cluster
    from stoker.kube.config import Place
    from stoker.serve.cluster.deployment import CacheState
    from stoker.serve.cluster.manifests import ClusterCache
    from stoker.shards.shard_set import ShardSet
    from stoker.storage import Entry


class Asked(NamedTuple):
    """What the command line says of a cache."""

    origins: list[str]
    size: str | None
    claim: str | None
    storage_class: str | None
    replicas: int
    image: str | None
    fresh: float
    patches: list[Path]


def check_options(ctx: typer.Context, on: str | None, *, local: Mapping[str, str], remote: Mapping[str, str]) -> None:
    """Refuse options that mean nothing at the place that is named."""
    odd = remote if on is None else local
    given = [flag for name, flag in odd.items() if _is_given(ctx, name)]
    if given:
        are = "is" if len(given) == 1 else "are"
        where = "--on k8s" if on is None else "a cache on this machine, without --on"
        raise InputError(f"{', '.join(given)} {are} for {where}")


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def cache(on: str, asked: Asked, *, timeout: str, plan: bool, status: bool, stop: bool, as_json: bool) -> None:
    """Make, show or remove the cache of a namespace."""
    acts = [flag for flag, given in (("--plan", plan), ("--status", status), ("--stop", stop)) if given]
    if len(acts) > 1:
        raise InputError(f"{' and '.join(acts)} are two things", hint="give one of them")
    wait_s = parse_duration(timeout)
    if plan:
        _plan(on, asked, as_json)
        return
    with cluster_at(on) as cluster:
        if stop:
            _stop(cluster, as_json)
            return
        if not status:
            _deploy(cluster, place_of(on), asked, wait_s)
        _show(cluster, as_json)


def _deploy(cluster: Cluster, place: Place, asked: Asked, wait_s: float) -> None:
    from stoker.serve.cluster.deployment import await_ready, deploy
    from stoker.serve.cluster.manifests import cache_objects

    wanted = _wanted(asked, place, cluster)
    deploy(cluster, cache_objects(wanted, read_patches(asked.patches)))
    remark(f"{wanted.kind} stoker-cache in {cluster.url}, {format_bytes(wanted.size)} for each pod")
    await_ready(cluster, wanted.kind, timeout_s=wait_s, tell=lambda text: remark(f"waiting: {text}"))


def _plan(on: str, asked: Asked, as_json: bool) -> None:
    """Print the objects; the cluster is asked only where a claim's size must be known."""
    from stoker.launchers.kubernetes.plan import as_yaml
    from stoker.serve.cluster.manifests import cache_objects

    if asked.claim is not None and asked.size is None:
        with cluster_at(on) as cluster:
            wanted = _wanted(asked, place_of(on), cluster)
    else:
        wanted = _wanted(asked, place_of(on), None)
    objects = cache_objects(wanted, read_patches(asked.patches))
    if as_json:
        print_json(objects)
    else:
        typer.echo(as_yaml(objects), nl=False)


def _wanted(asked: Asked, place: Place, cluster: Cluster | None) -> ClusterCache:
    """Put together what is asked for; a claim that is there tells its size."""
    from stoker.serve.cache.origins import read_origins
    from stoker.serve.cluster.deployment import claimed_size
    from stoker.serve.cluster.manifests import IMAGE, ClusterCache

    if not 0 <= asked.fresh <= 86400 * 365:
        raise InputError(f"--fresh is {asked.fresh:g}, and must be 0 or more seconds")
    origins = tuple(read_origins(asked.origins))
    size = None if asked.size is None else _size(asked.size)
    if asked.claim is not None and cluster is not None and asked.replicas >= 1:
        has = claimed_size(cluster, asked.claim, asked.replicas)
        if size is not None and size > has:
            each = " for each pod" if asked.replicas > 1 else ""
            raise InputError(f"--size is {format_bytes(size)}, and claim {asked.claim} has {format_bytes(has)}{each}")
        size = has if size is None else size
    if size is None:
        raise InputError("no --size is given", hint="how much each pod keeps at most, for example --size 200Gi")
    return ClusterCache(
        origins=origins,
        size=size,
        image=IMAGE if asked.image is None else asked.image,
        replicas=asked.replicas,
        claim=asked.claim,
        storage_class=asked.storage_class,
        fresh_s=asked.fresh,
        namespace=place.namespace,
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(f"--size: {error.what}") from error


def read_patches(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read YAML documents, each with the kind of the object that it changes."""
    from stoker.kube.manifest_files import documents

    found: list[dict[str, Any]] = []
    for path in files:
        for one in documents(path):
            if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
                raise InputError("a patch names the kind of the object that it changes", where=path, hint="kind: …")
            found.append(one)
    return found


def _stop(cluster: Cluster, as_json: bool) -> None:
    from stoker.serve.cluster.deployment import remove

    gone = remove(cluster)
    if as_json:
        print_json({"removed": gone})
    else:
        remark(f"removed {counted(len(gone), 'object')} from {cluster.url}{': ' if gone else ''}{', '.join(gone)}")


def _show(cluster: Cluster, as_json: bool) -> None:
    from dataclasses import asdict

    from stoker.serve.cluster.deployment import look

    state = look(cluster)
    if as_json:
        print_json(asdict(state))
    else:
        _print(state)


def _print(state: CacheState) -> None:
    print_table(
        ("pod", "node", "state", "restarts", "requests", "bytes", "hits", "misses", "from origin", "errors"),
        [
            (
                pod.name,
                pod.node,
                "ready" if pod.ready else "not ready",
                pod.restarts,
                pod.log.get("requests"),
                _bytes(pod.log.get("bytes")),
                pod.log.get("hits"),
                pod.log.get("misses"),
                _bytes(pod.log.get("origin_bytes")),
                pod.log.get("errors"),
            )
            for pod in state.pods
        ],
    )
    for pod in state.pods:
        if pod.why:
            remark(f"{pod.name}: {pod.why}")
    remark(f"{state.ready} of {state.replicas} answer at {state.url}; in a job: data.via: cluster")
    for one in state.origins:
        remark(f"  /{one['name']}{'/' if one['name'] else ''} is {one['url']}")


def _bytes(number: int | None) -> str | None:
    return None if number is None else format_bytes(number)


class Filler:
    """The cache of a namespace, filled by a Job there."""

    def __init__(self, on: str, url: str, copy: str | None, image: str | None, patches: Sequence[Path]) -> None:
        from stoker.serve.cluster.deployment import target
        from stoker.serve.cluster.manifests import WARM_IMAGE
        from stoker.storage.cache_url import through_known

        self._patches, self._image = read_patches(patches), WARM_IMAGE if image is None else image
        self._place, self._cluster = place_of(on), cluster_at(on)
        try:
            self._target = target(self._cluster)
            self.url, self.budget = self._cluster.url, self._target.budget
            through_known(url, self.url, self._target.origins)  # before anything is read
        except BaseException:
            self.close()
            raise
        self.readable, self._origin = copy or url, None if copy is None else url

    def close(self) -> None:
        """Give back the connections."""
        self._cluster.close()

    def fill(self, one: ShardSet, wanted: list[Entry], jobs: int, progress: Callable[[int], None]) -> int:
        """Read shards through it, by a Job."""
        from stoker.serve.cluster.deployment import fill
        from stoker.serve.cluster.manifests import MOST_LANES, Filling

        if jobs > MOST_LANES:
            raise InputError(f"--jobs is {jobs}, and must be from 1 to {MOST_LANES} in a cluster")
        entries = list(_with_indexes(one, wanted))
        root = self._root(one)
        filling = Filling(
            paths=tuple(f"{root}/{quote(name)}" for name, _ in entries),
            caches=self._target.caches,
            lanes=min(jobs, max(1, len(entries))),
            image=self._image,
            namespace=self._place.namespace,
        )
        fill(
            self._cluster,
            filling,
            patches=self._patches,
            done=lambda at: progress(entries[at][1]),
            tell=lambda text: remark(f"waiting: {text}"),
        )
        return sum(size for _, size in entries)

    def _root(self, one: ShardSet) -> str:
        """Give the path of the set at the cache."""
        from stoker.storage.cache_url import through_known

        place = one.url if self._origin is None else f"{self._origin.rstrip('/')}/{one.folder}".rstrip("/")
        path = through_known(place, "", self._target.origins)
        return f"/{quote(path, safe='/%')}" if path else ""


def _with_indexes(one: ShardSet, wanted: Sequence[Entry]) -> Iterator[tuple[str, int]]:
    """Name what a run reads: the manifest, and each shard after its index; only shards are counted."""
    from stoker.shards.index import index_name
    from stoker.shards.manifest import MANIFEST

    is_ours = one.manifest is not None and one.indexes is None
    if is_ours:
        yield MANIFEST, 0
    for entry in wanted:
        if is_ours:
            yield index_name(entry.name), 0
        yield entry.name, entry.size

"""Carrying out a plan: every shard appears whole, the manifests come last, and a killed run goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from stoker.core import permute, spec
from stoker.core.units import format_bytes
from stoker.errors import ConflictError, FullError, NotFoundError, SourceError
from stoker.shards import index
from stoker.shards.catalog import Catalog
from stoker.shards.formats import FORMATS, Format
from stoker.shards.images import BadImageError, probe, shrink
from stoker.shards.manifest import MANIFEST, VERSION, Manifest, Origin, Shard, Shrunk, read_manifest
from stoker.shards.plan import Options, Plan, SplitPlan
from stoker.shards.sample import Buffer, Content, Item, Sample, key_of
from stoker.shards.sources import Source
from stoker.storage import Store, local_path
from stoker.storage.local import explained

WORK = "_work/"
PLAN = WORK + "plan.json"
QUARANTINE = "quarantine.jsonl"

# So many bytes are hashed and written at once: enough to leave the interpreter's lock alone for long, few enough to
# stay in a core's cache.
WRITE_BYTES = 1 << 20


class Bad(msgspec.Struct, frozen=True, kw_only=True):
    """An image that was left out, and why."""

    key: str
    name: str
    bytes: int
    reason: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a finished shard; a run that was killed goes by these."""

    shard: Shard
    bad: tuple[Bad, ...] = ()
    shrunk: int = 0


class Progress(NamedTuple):
    """What one step added: samples handled, and bytes written or found written."""

    samples: int
    bytes: int


class Task(NamedTuple):
    """One shard to write."""

    split: SplitPlan
    number: int
    name: str

    @property
    def path(self) -> str:
        """Where the shard will lie in the destination."""
        return f"{self.split.split}/{self.name}"

    @property
    def receipt(self) -> str:
        """Where its receipt lies until the set is complete."""
        return f"{WORK}receipts/{self.path}.json"


def list_shards(plan: Plan, kind: Format) -> list[Task]:
    """List every shard of a plan."""
    prefix = plan.options.prefix
    if prefix is None:
        prefix = plan.name if kind.name == "tar" else ""  # TFRecords are called train-00000-of-01024 by custom
    return [
        Task(split, number, kind.shard_name(prefix, split.split, number, split.shards))
        for split in plan.splits
        for number in range(split.shards)
    ]


def pack(
    plan: Plan,
    source: Source,
    catalogs: Mapping[str, Catalog],
    store: Store,
    *,
    scratch: Path,
    jobs: int,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[Manifest]:
    """Write the shards of a plan, then their manifests; return those."""
    check_destination(store)
    _finished(plan, store)  # another dataset is refused before anything is touched
    with _claimed(store):
        if (finished := _finished(plan, store)) is not None:
            _clear_work(store)
            return finished
        desk = Desk(store, scratch)
        _begin(plan, desk)
        kind = FORMATS.get(plan.options.format)
        tasks = list_shards(plan, kind)
        receipts = _receipts(tasks, store)
        for receipt in receipts.values():
            progress(Progress(receipt.shard.samples + len(receipt.bad), receipt.shard.bytes))
        left = [task for task in tasks if task.path not in receipts]
        _check_space(plan, store, left)
        packer = Packer(plan, kind, source, catalogs, desk, progress)
        receipts |= packer.run(left, jobs)
        manifests = _commit(plan, tasks, receipts, desk)
        _clear_work(store)
        return manifests


class Desk:
    """Where files are made before they are put in their place: all that a kill can leave behind lies here."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self.store = store
        folder = local_path(store.url)
        self._folder = (scratch if folder is None else folder / WORK) / "parts"
        with _explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def part(self, name: str) -> Path:
        """Give the path to write a file at that will be put as `name`."""
        return self._folder / f"{name.replace('/', '-')}.part"

    def put(self, name: str, content: bytes | Path) -> None:
        """Put a file in its place, whole."""
        if isinstance(content, bytes):
            part = self.part(name)
            with _explained(part):
                part.write_bytes(content)
            content = part
        self.store.put(name, content)


class Packer:
    """Writes shards, one a thread: reading, hashing and writing all leave the interpreter's lock alone."""

    def __init__(
        self,
        plan: Plan,
        kind: Format,
        source: Source,
        catalogs: Mapping[str, Catalog],
        desk: Desk,
        progress: Callable[[Progress], None],
    ) -> None:
        self._options = plan.options
        self._format = kind
        self._source = source
        self._catalogs = catalogs
        self._seed = plan.options.seed
        self._desk = desk
        self._progress = progress
        self._stop = threading.Event()

    def run(self, tasks: list[Task], jobs: int) -> dict[str, Receipt]:
        """Write all shards; on the first error let the others end, and raise it."""
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="pack") as pool:
            futures = {pool.submit(self._write, task): task for task in tasks}
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    if (error := future.exception()) is not None:
                        raise error
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
        return {task.path: future.result() for future, task in futures.items()}

    def _write(self, task: Task) -> Receipt:
        part = self._desk.part(task.path)
        try:
            with _explained(part):
                receipt, rows = self._fill(task, part)
            self._desk.put(f"{task.split.split}/{index.index_name(task.name)}", rows)
            self._desk.put(task.path, part)
            self._desk.put(task.receipt, spec.to_json(receipt))
        finally:
            part.unlink(missing_ok=True)
        return receipt

    def _fill(self, task: Task, part: Path) -> tuple[Receipt, bytes]:
        """Write one shard's samples to a file; return its receipt and its index."""
        rows = index.IndexBuilder()
        bad: list[Bad] = []
        shrunk = 0
        with ShardFile(part) as out, _Tally(self._progress) as tally:
            for item, content in self._contents(task):
                image = content.image
                try:
                    info = probe(image)
                    if self._options.max_side is not None and max(info.width, info.height) > self._options.max_side:
                        image = shrink(image, self._options.max_side, self._options.quality)
                        info = probe(image)
                        shrunk += 1
                except BadImageError as error:
                    bad.append(Bad(key=key_of(item.name), name=item.name, bytes=len(image), reason=str(error)))
                    tally.add(0)
                    continue
                sample = Sample(key_of(item.name), image, info.kind, item.label, content.extras)
                encoded = self._format.encode(sample)
                rows.add(out.position + encoded.image_at, len(image), item.label)
                out.write(encoded.chunks, encoded.length)
                tally.add(encoded.length)
            out.write([self._format.trailer], len(self._format.trailer))
        encoded_rows = rows.to_bytes()
        shard = Shard(
            name=task.name,
            samples=len(rows),
            bytes=out.position,
            sha256=out.digest,
            index_sha256=hashlib.sha256(encoded_rows).hexdigest(),
        )
        return Receipt(shard=shard, bad=tuple(bad), shrunk=shrunk), encoded_rows

    def _contents(self, task: Task) -> Iterator[tuple[Item, Content]]:
        """Read a shard's samples in shuffled order."""
        split = task.split.split
        positions = np.arange(*task.split.span(task.number), dtype=np.uint64)
        numbers = permute.permute(positions, task.split.found, permute.key("pack", self._seed, split))
        for item in self._catalogs[split].take(map(int, numbers)):
            if self._stop.is_set():
                raise CancelledError
            yield item, self._source.read(split, item)


class ShardFile:
    """A file that is written in large pieces and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self._chunks: list[Buffer] = []
        self._pending = 0
        self.position = 0

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            os.close(self._fd)

    @property
    def digest(self) -> str:
        """The sha256 of what was written."""
        return self._hash.hexdigest()

    def write(self, chunks: list[Buffer], length: int) -> None:
        """Add the chunks; they are kept as they are until the next flush."""
        self._chunks += chunks
        self._pending += length
        self.position += length
        if self._pending >= WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._chunks)
        self._hash.update(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._chunks = []
        self._pending = 0


class _Tally:
    """Reports progress now and then, for a bar costs more to move than a small sample to write."""

    def __init__(self, progress: Callable[[Progress], None]) -> None:
        self._progress = progress
        self._samples = self._bytes = 0

    def __enter__(self) -> _Tally:
        return self

    def __exit__(self, *_: object) -> None:
        self._report()

    def add(self, length: int) -> None:
        self._samples += 1
        self._bytes += length
        if self._samples >= 200 or self._bytes >= 8 << 20:
            self._report()

    def _report(self) -> None:
        self._progress(Progress(self._samples, self._bytes))
        self._samples = self._bytes = 0


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an operating system's error while writing into one of ours; a full disk is no loss."""
    try:
        with explained(path):
            yield
    except FullError as error:
        error.hint = "free some space and run the same command again: finished shards are kept"
        raise


@contextlib.contextmanager
def _claimed(store: Store) -> Iterator[None]:
    """Keep a second run out of a local destination while this one is at work."""
    folder = local_path(store.url)
    if folder is None:
        yield
        return
    lock = folder / WORK / "lock"
    with _explained(folder):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError("another conversion is writing here", where=store.url, hint="wait for it") from error
        yield


def check_destination(store: Store) -> None:
    """Refuse a destination that holds anything but a conversion of ours."""
    strangers = []
    for entry in store.list():
        if entry.name.endswith(MANIFEST) or entry.name == PLAN:
            return
        if not entry.name.startswith(WORK):
            strangers.append(entry.name)
    if strangers:
        raise ConflictError(
            f"the destination is not empty: it holds {strangers[0]}",
            where=store.url,
            hint="choose an empty or new destination",
        )


def _finished(plan: Plan, store: Store) -> list[Manifest] | None:
    """Return the manifests when this very plan was carried out before; refuse another's."""
    manifests = []
    folders = [entry.name.removesuffix(MANIFEST) for entry in store.list() if entry.name.endswith(MANIFEST)]
    for folder in folders:
        manifest = read_manifest(store, folder)
        if manifest.plan != plan.digest:
            raise ConflictError(
                f"the destination already holds another dataset: {manifest.name}, "
                f"{manifest.samples:,} samples of {manifest.split} in {manifest.format} shards",
                where=store.url,
                hint="choose an empty or new destination, or remove that one",
            )
        manifests.append(manifest)
    return manifests if len(manifests) == len(plan.splits) else None


def _begin(plan: Plan, desk: Desk) -> None:
    """Write down which plan is being carried out; refuse to go on with another's remains."""
    try:
        begun = msgspec.json.decode(desk.store.get(PLAN))
    except NotFoundError:
        desk.put(PLAN, spec.to_json({"plan": plan.digest}))
        return
    if begun != {"plan": plan.digest}:
        raise ConflictError(
            "the destination holds an unfinished conversion of other data or with other options",
            where=desk.store.url,
            hint="finish that one with its own command, or remove the destination and run again",
        )


def _receipts(tasks: list[Task], store: Store) -> dict[str, Receipt]:
    """Read what a killed run had finished; a shard counts if it lies there in its full size."""
    sizes = {entry.name: entry.size for entry in store.list()}
    receipts = {}
    for task in tasks:
        if task.receipt in sizes and task.path in sizes:
            receipt = spec.load(store.get(task.receipt), Receipt, task.receipt)
            if sizes[task.path] == receipt.shard.bytes:
                receipts[task.path] = receipt
    return receipts


def _check_space(plan: Plan, store: Store, left: list[Task]) -> None:
    """Refuse to start what cannot fit."""
    folder = local_path(store.url)
    if folder is None or plan.options.max_side is not None:
        return
    total = sum(task.split.bytes // task.split.shards for task in left)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise FullError(
            f"the shards need about {format_bytes(total)} and only {format_bytes(free)} are free",
            where=folder,
            hint="free some space or choose another destination",
        )


def _commit(plan: Plan, tasks: list[Task], receipts: Mapping[str, Receipt], desk: Desk) -> list[Manifest]:
    """Write the lists of bad images, then the manifests."""
    manifests = []
    for split in plan.splits:
        mine = [receipts[task.path] for task in tasks if task.split is split]
        bad = sorted((one for receipt in mine for one in receipt.bad), key=lambda one: one.name)
        manifest = _manifest(plan, split, mine, len(bad))
        if manifest.samples == 0:
            raise SourceError(f"none of the {len(bad):,} images can be used: {bad[0].reason}", where=bad[0].name)
        if bad:
            desk.put(f"{split.split}/{QUARANTINE}", b"".join(msgspec.json.encode(one) + b"\n" for one in bad))
        manifests.append(manifest)
    for manifest in manifests:
        desk.put(f"{manifest.split}/{MANIFEST}", spec.to_json(manifest))
    return manifests


def _manifest(plan: Plan, split: SplitPlan, receipts: list[Receipt], bad: int) -> Manifest:
    options: Options = plan.options
    shrunk = None
    if options.max_side is not None:
        images = sum(receipt.shrunk for receipt in receipts)
        shrunk = Shrunk(max_side=options.max_side, quality=options.quality, images=images)
    return Manifest(
        version=VERSION,
        name=plan.name,
        split=split.split,
        format=options.format,
        samples=sum(receipt.shard.samples for receipt in receipts),
        bytes=sum(receipt.shard.bytes for receipt in receipts),
        quarantined=bad,
        classes=plan.classes,
        seed=options.seed,
        lanes=split.lanes,
        window=split.window,
        source=Origin(kind=plan.source, samples=split.found, digest=split.digest),
        shrunk=shrunk,
        plan=plan.digest,
        shards=tuple(receipt.shard for receipt in receipts),
    )


def _clear_work(store: Store) -> None:
    """Remove what only a resumed run would need."""
    for entry in list(store.list(WORK)):
        store.delete(entry.name)
    if (folder := local_path(store.url)) is not None:
        shutil.rmtree(folder / WORK, ignore_errors=True)

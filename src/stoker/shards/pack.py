"""Write the shards of a conversion plan: shards appear atomically, manifests come last, a killed run can be resumed."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.core import permutations, spec
from stoker.core.text import printable
from stoker.errors import SourceError
from stoker.shards import index
from stoker.shards.catalog import Catalog
from stoker.shards.destination import Destination, QuarantinedImage, Receipt, ShardTask, with_resume_hint
from stoker.shards.formats import FORMATS, Format
from stoker.shards.images import MAX_BYTES, BadImageError, inspect_image, shrink, too_large_reason
from stoker.shards.manifest import VERSION, Manifest, Shard, ShrinkInfo, SourceInfo
from stoker.shards.options import ConversionOptions
from stoker.shards.plan import ConversionPlan, SplitPlan
from stoker.shards.sample import Buffer, Content, Item, Sample, sample_key
from stoker.shards.sources import Source
from stoker.shards.sources.files import UNREADABLE

# Bytes that are hashed and written at once: enough to release the GIL for long, few enough for the CPU cache.
WRITE_BYTES = 1 << 20

# Images of a split whose files may be unreadable; if there are more, the storage or its permissions are at fault.
MAX_UNREADABLE = 16
MAX_UNREADABLE_FRACTION = 0.01


class ConversionProgress(NamedTuple):
    """Progress since the last report: samples processed, and bytes written or found already written."""

    samples: int
    bytes: int


def list_tasks(plan: ConversionPlan, shard_format: Format) -> list[ShardTask]:
    """List every shard of a plan as a task."""
    prefix = plan.options.prefix
    if prefix is None:
        # TFRecord shards are usually called train-00000-of-01024.
        prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.name).strip("-.") if shard_format.name == "tar" else ""
    return [
        ShardTask(split, number, shard_format.shard_name(prefix, split.split, number, split.shards))
        for split in plan.splits
        for number in range(split.shards)
    ]


class ConversionResult(NamedTuple):
    """The manifests of a conversion, and how many shards this run wrote."""

    manifests: list[Manifest]
    written: int


def pack_shards(
    plan: ConversionPlan,
    source: Source,
    catalogs: Mapping[str, Catalog],
    destination: Destination,
    *,
    jobs: int,
    progress: Callable[[ConversionProgress], None] = lambda _: None,
) -> ConversionResult:
    """Write the shards of a plan, then the manifests."""
    destination.check(plan)
    kind = FORMATS.get(plan.options.format)
    tasks = list_tasks(plan, kind)
    with destination.locked():
        if (manifests := destination.read_finished(plan)) is not None:
            destination.remove_work_files()
            return ConversionResult(manifests, 0)
        receipts = destination.read_receipts(tasks)
        remaining = [task for task in tasks if task.path not in receipts]
        if plan.options.max_side is None:  # the size of re-encoded images is not known in advance
            destination.check_space(sum(task.split.bytes // task.split.shards for task in remaining))
        destination.start(plan, "/".join(catalogs[split.split].stamp for split in plan.splits))
        for receipt in receipts.values():
            progress(ConversionProgress(receipt.shard.samples + len(receipt.bad), receipt.shard.bytes))
        try:
            packer = Packer(plan, kind, source, catalogs, destination, progress)
            for task in tasks:
                if task.path in receipts:
                    packer.unreadable.add(task.split, receipts[task.path].bad)
            receipts |= packer.run(remaining, jobs)
        except BaseException:
            if not destination.read_receipts(tasks):
                destination.discard_unfinished()  # nothing to resume, so allow any other conversion here
            raise
        try:
            manifests = build_manifests(plan, tasks, receipts)
        except SourceError:
            destination.discard_unfinished()
            raise
        destination.commit(manifests, collect_quarantined(plan, tasks, receipts))
        return ConversionResult(manifests, len(remaining))


class Packer:
    """Writer of shards, one per thread: reading, hashing and writing all release the GIL."""

    def __init__(
        self,
        plan: ConversionPlan,
        shard_format: Format,
        source: Source,
        catalogs: Mapping[str, Catalog],
        destination: Destination,
        progress: Callable[[ConversionProgress], None],
    ) -> None:
        self._options = plan.options
        self._format = shard_format
        self._source = source
        self._catalogs = catalogs
        self._seed = plan.options.seed
        self._destination = destination
        self._progress = progress
        self._stop = threading.Event()
        self.unreadable = _UnreadableLimit()

    def run(self, tasks: list[ShardTask], jobs: int) -> dict[str, Receipt]:
        """Write all shards; on the first error cancel the others and raise it."""
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="pack") as pool:
            futures = {pool.submit(self._write_shard, task): task for task in tasks}
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    if (error := future.exception()) is not None:
                        raise error
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
        return {task.path: future.result() for future, task in futures.items()}

    def _write_shard(self, task: ShardTask) -> Receipt:
        part = self._destination.part_path(task.path)
        try:
            with with_resume_hint(part):
                receipt, rows = self._write_samples(task, part)
            # The shard comes last: every shard in the destination has a receipt, by which it can be discarded.
            self._destination.put(task.receipt_path, spec.to_json(receipt))
            self._destination.put(f"{task.split.split}/{index.index_name(task.name)}", rows)
            self._destination.put(task.path, part)
        finally:
            part.unlink(missing_ok=True)
        return receipt

    def _write_samples(self, task: ShardTask, part: Path) -> tuple[Receipt, bytes]:
        """Write the samples of one shard to a file; return its receipt and its index."""
        rows = index.IndexBuilder()
        bad: list[QuarantinedImage] = []
        shrunk = 0
        with ShardWriter(part) as out, _ProgressReporter(self._progress) as reporter:
            for item in self._list_items(task):
                try:
                    content = self._read(task.split.split, item)
                    image = content.image
                    info = inspect_image(image)
                    if self._options.max_side is not None and max(info.width, info.height) > self._options.max_side:
                        image = shrink(image, self._options.max_side, self._options.quality)
                        info = inspect_image(image)
                        shrunk += 1
                except BadImageError as error:
                    bad.append(
                        QuarantinedImage(key=sample_key(item.name), name=item.name, bytes=item.size, reason=str(error))
                    )
                    self.unreadable.add(task.split, bad[-1:])
                    reporter.add(0)
                    continue
                sample = Sample(sample_key(item.name), image, info.extension, item.label, content.extras)
                encoded = self._format.encode(sample)
                rows.add(out.position + encoded.image_offset, len(image), item.label)
                out.write(encoded.chunks, encoded.length)
                reporter.add(encoded.length)
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

    def _list_items(self, task: ShardTask) -> Iterator[Item]:
        """Yield the items of a shard in shuffled order; raise CancelledError once another shard has failed."""
        split = task.split.split
        positions = np.arange(*task.split.span(task.number), dtype=np.uint64)
        numbers = permutations.permute(positions, task.split.found, permutations.seed_key("pack", self._seed, split))
        for item in self._catalogs[split].read_rows(map(int, numbers)):
            if self._stop.is_set():
                raise CancelledError
            yield item

    def _read(self, split: str, item: Item) -> Content:
        """Read one sample; raise BadImageError for one that is unreadable or too large."""
        if item.size > MAX_BYTES:
            raise BadImageError(too_large_reason(item.size))
        return self._source.read(self._options.source_split(split), item)


class _UnreadableLimit:
    """Count of the unreadable images of each split, over all threads and earlier runs of a conversion."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, split: SplitPlan, bad: Sequence[QuarantinedImage]) -> None:
        """Count those of the quarantined images that are unreadable; raise SourceError above the limit."""
        unreadable = [image for image in bad if image.reason.startswith(UNREADABLE)]
        with self._lock:
            self._counts[split.split] += len(unreadable)
            count = self._counts[split.split]
        if unreadable and count > max(MAX_UNREADABLE, MAX_UNREADABLE_FRACTION * split.samples):
            example = unreadable[-1]
            raise SourceError(
                f"at least {count:,} of {split.samples:,} images of split {split.split!r} cannot be read, for example "
                f"{printable(example.name)} ({example.reason})",
                hint="check the storage, the links and the permissions, then convert again with --restart",
            )


class ShardWriter:
    """Writer of a file that hashes and writes large blocks, collected in one reused buffer."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self._buffer = memoryview(bytearray(WRITE_BYTES))
        self._filled = 0
        self.position = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                os.fsync(self._fd)  # after a power failure, a receipt must not exist without its shard
        finally:
            os.close(self._fd)

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes written."""
        return self._hash.hexdigest()

    def write(self, chunks: list[Buffer], length: int) -> None:
        """Write the chunks, `length` bytes in total."""
        for chunk in chunks:
            end = self._filled + len(chunk)
            if end > WRITE_BYTES:
                self._flush()
                end = len(chunk)
            if end > WRITE_BYTES:
                self._write_through(memoryview(chunk))
            else:
                self._buffer[self._filled : end] = chunk
                self._filled = end
        self.position += length

    def _flush(self) -> None:
        self._write_through(self._buffer[: self._filled])
        self._filled = 0

    def _write_through(self, data: memoryview) -> None:
        self._hash.update(data)
        while data:
            data = data[os.write(self._fd, data) :]


class _ProgressReporter:
    """Reporter of progress in batches: updating a progress bar costs more than writing a small sample."""

    def __init__(self, progress: Callable[[ConversionProgress], None]) -> None:
        self._progress = progress
        self._samples = self._bytes = 0

    def __enter__(self) -> _ProgressReporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._report()

    def add(self, length: int) -> None:
        self._samples += 1
        self._bytes += length
        if self._samples >= 200 or self._bytes >= 8 << 20:
            self._report()

    def _report(self) -> None:
        self._progress(ConversionProgress(self._samples, self._bytes))
        self._samples = self._bytes = 0


def build_manifests(plan: ConversionPlan, tasks: list[ShardTask], receipts: Mapping[str, Receipt]) -> list[Manifest]:
    """Build the manifests from the receipts; raise SourceError for a split without any usable image."""
    manifests = []
    for split in plan.splits:
        split_receipts = [receipts[task.path] for task in tasks if task.split is split]
        manifest = _build_manifest(plan, split, split_receipts)
        if manifest.samples == 0:
            bad = next(image for receipt in split_receipts for image in receipt.bad)
            count = manifest.quarantined
            raise SourceError(
                f"split {split.split!r} has no usable images ({count:,} rejected)",
                hint=f"for example, {bad.name}: {bad.reason}",
            )
        manifests.append(manifest)
    return manifests


def collect_quarantined(
    plan: ConversionPlan, tasks: list[ShardTask], receipts: Mapping[str, Receipt]
) -> dict[str, list[QuarantinedImage]]:
    """List the quarantined images of each split, sorted by name."""
    return {
        split.split: sorted(
            (image for task in tasks if task.split is split for image in receipts[task.path].bad),
            key=lambda image: image.name,
        )
        for split in plan.splits
    }


def _build_manifest(plan: ConversionPlan, split: SplitPlan, receipts: list[Receipt]) -> Manifest:
    options: ConversionOptions = plan.options
    shrunk = None
    if options.max_side is not None:
        images = sum(receipt.shrunk for receipt in receipts)
        shrunk = ShrinkInfo(max_side=options.max_side, quality=options.quality, images=images)
    return Manifest(
        version=VERSION,
        name=plan.name,
        split=split.split,
        format=options.format,
        samples=sum(receipt.shard.samples for receipt in receipts),
        bytes=sum(receipt.shard.bytes for receipt in receipts),
        quarantined=sum(len(receipt.bad) for receipt in receipts),
        classes=plan.classes,
        seed=options.seed,
        lanes=split.lanes,
        window=split.window,
        source=SourceInfo(kind=plan.source, samples=split.found, digest=split.digest),
        shrunk=shrunk,
        plan=plan.digest,
        options=options,
        shards=tuple(receipt.shard for receipt in receipts),
    )

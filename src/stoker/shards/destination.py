"""The destination of a conversion: its lock, plan and receipts while it runs, and its manifests at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from stoker.core import spec
from stoker.core.units import format_bytes
from stoker.errors import ConflictError, InputError, NotFoundError, SpecError, StokerError, StorageFullError
from stoker.shards import index
from stoker.shards.manifest import MANIFEST, PLAN, QUARANTINE, WORK, Manifest, Shard, read_manifest
from stoker.shards.plan import ConversionPlan, SplitPlan
from stoker.storage import Store, local_path
from stoker.storage.local import translate_os_errors

RESUME_HINT = "free some space and run the same command again: finished shards are kept"


class QuarantinedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that was not converted, and the reason."""

    key: str
    name: str
    bytes: int
    reason: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a finished shard, from which a killed conversion is resumed."""

    shard: Shard
    bad: tuple[QuarantinedImage, ...] = ()
    shrunk: int = 0


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of the plan that is being written, the stamp of its source files at the start, and the plan itself."""

    plan: str
    stamp: str
    details: ConversionPlan | None = None


class ShardTask(NamedTuple):
    """One shard to write."""

    split: SplitPlan
    number: int
    name: str

    @property
    def path(self) -> str:
        """The path of the shard in the destination."""
        return f"{self.split.split}/{self.name}"

    @property
    def receipt_path(self) -> str:
        """The path of its receipt, which exists until the conversion is complete."""
        return f"{WORK}receipts/{self.path}.json"


class Destination:
    """A folder or bucket that is written to. Files are written to `_work` or scratch first, then moved into place."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self._store = store
        self._folder = local_path(store.url)
        self._parts = (scratch if self._folder is None else self._folder / WORK) / "parts"

    def check(self, plan: ConversionPlan) -> None:
        """Raise ConflictError for a destination that contains anything but this conversion, finished or not."""
        check_destination(self._store)
        self.read_finished(plan)
        self._check_unfinished(plan, None)

    def has_plan(self, digest: str) -> bool:
        """Return whether the plan with this digest was carried out here, completely or in part."""
        names = [name for name in self._list_sizes() if _is_manifest(name)]
        record = self._read_record()
        return any(read_manifest(self._store, name.removesuffix(MANIFEST)).plan == digest for name in names) or (
            record is not None and record.plan == digest
        )

    def read_finished(self, plan: ConversionPlan) -> list[Manifest] | None:
        """Return the manifests if this plan is finished and complete; raise ConflictError for another plan's."""
        sizes = self._list_sizes()
        manifests = [read_manifest(self._store, name.removesuffix(MANIFEST)) for name in sizes if _is_manifest(name)]
        for manifest in manifests:
            if manifest.plan != plan.digest:
                raise _conflict_error(manifest, plan, self._store.url)
        complete = all(_is_complete(manifest, sizes) for manifest in manifests)
        return manifests if complete and len(manifests) == len(plan.splits) else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of a local destination, so that no second conversion writes to it."""
        if self._folder is None:
            yield
            return
        before = set(_list_folders(self._folder))
        with _acquire_lock(self._folder / WORK / "lock", self._store.url):
            try:
                yield
            except BaseException:
                if not (self._folder / PLAN).exists():  # nothing to resume
                    shutil.rmtree(self._folder / WORK, ignore_errors=True)
                    _remove_empty_folders(set(_list_folders(self._folder)) - before)
                raise

    def start(self, plan: ConversionPlan, stamp: str) -> None:
        """Record the plan that is being written; delete the manifests of an incomplete shard set."""
        self._check_unfinished(plan, stamp)
        self._parts.mkdir(parents=True, exist_ok=True)
        self.put(PLAN, spec.to_json(PlanRecord(plan=plan.digest, stamp=stamp, details=plan)))
        for name in [name for name in self._list_sizes() if _is_manifest(name)]:
            self._store.delete(name)

    def read_receipts(self, tasks: list[ShardTask]) -> dict[str, Receipt]:
        """Read the receipts of finished shards; a shard counts if it and its index exist with the right size."""
        sizes = self._list_sizes()
        receipts = {}
        for task in tasks:
            if task.receipt_path not in sizes or f"{task.split.split}/{index.index_name(task.name)}" not in sizes:
                continue
            # A power failure can leave an empty receipt.
            with contextlib.suppress(SpecError):
                receipt = spec.load(self._store.get(task.receipt_path), Receipt, task.receipt_path)
                if sizes.get(task.path) == receipt.shard.bytes:
                    receipts[task.path] = receipt
        return receipts

    def check_space(self, needed: int) -> None:
        """Raise StorageFullError if the destination has less free space than `needed` bytes."""
        if self._folder is None:
            return
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise StorageFullError(
                f"the shards need about {format_bytes(needed)}, but only {format_bytes(free)} are free",
                where=self._folder,
                hint="free some space or choose another destination",
            )

    def part_path(self, name: str) -> Path:
        """Return the temporary path of a file that will be stored as `name`."""
        return self._parts / f"{name.replace('/', '-')}.part"

    def put(self, name: str, content: bytes | Path) -> None:
        """Store a file atomically, and flush it to disk before anything can refer to it."""
        if isinstance(content, bytes):
            part = self.part_path(name)
            with with_resume_hint(part), part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            content = part
        self._store.put(name, content)

    def commit(self, manifests: list[Manifest], bad: Mapping[str, list[QuarantinedImage]]) -> None:
        """Write the quarantine lists, then the manifests; then remove the files that only a resume would need."""
        for split, images in bad.items():
            if images:
                lines = b"".join(msgspec.json.encode(image) + b"\n" for image in images)
                self.put(f"{split}/{QUARANTINE}", lines)
        self._fsync_folders(manifests)
        for manifest in manifests:
            self.put(f"{manifest.split}/{MANIFEST}", spec.to_json(manifest))
        self._fsync_folders(manifests)
        self.remove_work_files()

    def remove_work_files(self) -> None:
        """Remove `_work`, with the plan last: as long as it exists, the conversion counts as unfinished."""
        names = [entry.name for entry in self._store.list(WORK)]
        for name in sorted(names, key=lambda name: name == PLAN):
            self._store.delete(name)
        if self._folder is not None:
            shutil.rmtree(self._folder / WORK, ignore_errors=True)

    def discard_unfinished(self) -> None:
        """Remove an unfinished conversion: its shards, their indexes, and `_work`."""
        sizes = self._list_sizes()
        if PLAN not in sizes:
            return
        receipts = [
            name.removeprefix(f"{WORK}receipts/").removesuffix(".json") for name in sizes if "/receipts/" in name
        ]
        for path in receipts:
            split, _, name = path.rpartition("/")
            self._store.delete(path)
            self._store.delete(f"{split}/{index.index_name(name)}")
        self.remove_work_files()

    def _read_record(self) -> PlanRecord | None:
        try:
            return spec.load(self._store.get(PLAN), PlanRecord, PLAN)
        except NotFoundError:
            return None
        except SpecError:  # a power failure can leave it empty
            return PlanRecord(plan="", stamp="")

    def _check_unfinished(self, plan: ConversionPlan, stamp: str | None) -> None:
        record = self._read_record()
        if record is None:
            return
        if record.plan != plan.digest:
            raise ConflictError(
                f"the destination contains an unfinished conversion {_explain_record(record, plan)}",
                where=self._store.url,
                hint="pass --restart to discard it, finish it with its own command, or choose another destination",
            )
        if stamp is not None and record.stamp != stamp:
            raise ConflictError(
                "source files have changed since this conversion started",
                where=self._store.url,
                hint="pass --restart to start again",
            )

    def _list_sizes(self) -> dict[str, int]:
        return {entry.name: entry.size for entry in self._store.list()}

    def _fsync_folders(self, manifests: list[Manifest]) -> None:
        """Flush directory entries to disk, so that even after a power failure a manifest means a complete shard set."""
        if self._folder is None:
            return
        for manifest in manifests:
            for folder in (self._folder / manifest.split, self._folder / manifest.split / "index"):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)


def check_destination(store: Store) -> None:
    """Raise an error for a file, or for a folder that contains anything but a conversion by stoker."""
    folder = local_path(store.url)
    if folder is not None and not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise InputError("the destination is not a directory", where=store.url, hint="choose an empty or new directory")
    other_files = []
    for entry in store.list():
        if _is_manifest(entry.name) or entry.name == PLAN:
            return
        if not entry.name.startswith(WORK):
            other_files.append(entry.name)
    if other_files:
        raise ConflictError(
            f"the destination is not empty: it contains {other_files[0]}",
            where=store.url,
            hint="choose an empty or new destination",
        )


@contextlib.contextmanager
def with_resume_hint(path: Path) -> Iterator[None]:
    """Translate OSErrors; when the disk is full, add the hint that the conversion can be resumed."""
    try:
        with translate_os_errors(path):
            yield
    except StorageFullError as error:
        error.hint = RESUME_HINT
        raise


def _is_manifest(name: str) -> bool:
    return name == MANIFEST or name.endswith(f"/{MANIFEST}")


def _is_complete(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    return all(
        sizes.get(f"{manifest.split}/{shard.name}") == shard.bytes
        and f"{manifest.split}/{index.index_name(shard.name)}" in sizes
        for shard in manifest.shards
    )


def _conflict_error(manifest: Manifest, plan: ConversionPlan, where: str) -> ConflictError:
    """Return the error for a finished shard set of another plan, with the difference if it is recorded."""
    found = f"{manifest.name} ({manifest.samples:,} {manifest.split} samples in {manifest.format} shards)"
    digests = {manifest.split: manifest.source.digest}
    difference = manifest.options and plan.explain_difference(manifest.name, manifest.options, digests)
    if difference:
        what = f"the destination already contains the dataset {found}, converted {difference}"
        return ConflictError(what, where=where, hint="choose another destination, or delete this one to convert again")
    return ConflictError(
        f"the destination already contains another dataset: {found}",
        where=where,
        hint="choose an empty or new destination, or delete that dataset",
    )


def _explain_record(record: PlanRecord, plan: ConversionPlan) -> str:
    other = "of another dataset or with different options"
    if record.details is None:
        return other
    digests = {split.split: split.digest for split in record.details.splits}
    return plan.explain_difference(record.details.name, record.details.options, digests) or other


def _remove_empty_folders(folders: Iterable[Path]) -> None:
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _list_folders(root: Path) -> Iterator[Path]:
    """Yield the folders below a folder, itself and its parents, as far as they exist."""
    yield from (folder for folder in (root, *root.parents) if folder.is_dir())
    yield from (Path(folder, name) for folder, names, _ in os.walk(root) for name in names)


def _acquire_lock(path: Path, where: str) -> IO[str]:
    """Open a file and lock it until it is closed; continue without a lock on file systems that have none."""
    while True:
        try:
            with with_resume_hint(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("w")
        except StokerError as error:  # the lock is a detail: name the destination instead
            error.what, error.where = f"cannot write to the destination: {error.what}", where
            error.hint = error.hint or "choose another destination"
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConflictError(
                "another conversion is writing to this destination", where=where, hint="wait until it has finished"
            ) from error
        except OSError:
            return file
        # The previous run may have removed the file between open and flock.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()

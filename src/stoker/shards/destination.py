"""What lies at a destination while a conversion is at work: a claim, a plan, receipts, and at last the manifests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from stoker.core import spec
from stoker.core.units import format_bytes
from stoker.errors import ConflictError, FullError, InputError, NotFoundError, SpecError
from stoker.shards import index
from stoker.shards.manifest import MANIFEST, PLAN, QUARANTINE, WORK, Manifest, Shard, read_manifest
from stoker.shards.plan import ConversionPlan, SplitPlan
from stoker.storage import Store, local_path
from stoker.storage.local import translate_os_errors


class QuarantinedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that was left out, and why."""

    key: str
    name: str
    bytes: int
    reason: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a finished shard; a run that was killed goes by these."""

    shard: Shard
    bad: tuple[QuarantinedImage, ...] = ()
    shrunk: int = 0


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which plan is being carried out, and what its files looked like when it began."""

    plan: str
    stamp: str


class ShardTask(NamedTuple):
    """One shard to write."""

    split: SplitPlan
    number: int
    name: str

    @property
    def path(self) -> str:
        """Where the shard will lie in the destination."""
        return f"{self.split.split}/{self.name}"

    @property
    def receipt_path(self) -> str:
        """Where its receipt lies until the set is complete."""
        return f"{WORK}receipts/{self.path}.json"


class Destination:
    """A folder or bucket that is being filled. Files are made in `_work` or scratch, then put in their place."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self._store = store
        self._folder = local_path(store.url)
        self._parts = (scratch if self._folder is None else self._folder / WORK) / "parts"

    def check(self, plan: ConversionPlan) -> None:
        """Refuse a destination that holds anything else than this very conversion, finished or not."""
        check_destination(self._store)
        self.read_finished(plan)
        self._check_unfinished(plan.digest, None)

    def read_finished(self, plan: ConversionPlan) -> list[Manifest] | None:
        """Return the manifests when this plan was carried out and all of it is still there; refuse another's."""
        sizes = self._list_sizes()
        manifests = [read_manifest(self._store, name.removesuffix(MANIFEST)) for name in sizes if _is_manifest(name)]
        for manifest in manifests:
            if manifest.plan != plan.digest:
                raise ConflictError(
                    f"the destination already holds another dataset: {manifest.name}, "
                    f"{manifest.samples:,} samples of {manifest.split} in {manifest.format} shards",
                    where=self._store.url,
                    hint="choose an empty or new destination, or remove that one",
                )
        whole = all(_is_complete(manifest, sizes) for manifest in manifests)
        return manifests if whole and len(manifests) == len(plan.splits) else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of a local destination while this one is at work."""
        if self._folder is None:
            yield
            return
        with _acquire_lock(self._folder / WORK / "lock", self._store.url):
            yield

    def start(self, plan: ConversionPlan, stamp: str) -> None:
        """Write down which plan is being carried out; withdraw manifests whose shards are no longer all there."""
        self._check_unfinished(plan.digest, stamp)
        self._parts.mkdir(parents=True, exist_ok=True)
        self.put(PLAN, spec.to_json(PlanRecord(plan=plan.digest, stamp=stamp)))
        for name in [name for name in self._list_sizes() if _is_manifest(name)]:
            self._store.delete(name)

    def read_receipts(self, tasks: list[ShardTask]) -> dict[str, Receipt]:
        """Read what a killed run had finished; a shard counts if it and its index lie there in full."""
        sizes = self._list_sizes()
        found = {}
        for task in tasks:
            if task.receipt_path not in sizes or f"{task.split.split}/{index.index_name(task.name)}" not in sizes:
                continue
            # A receipt that a power cut left empty is none.
            with contextlib.suppress(SpecError):
                receipt = spec.load(self._store.get(task.receipt_path), Receipt, task.receipt_path)
                if sizes.get(task.path) == receipt.shard.bytes:
                    found[task.path] = receipt
        return found

    def check_space(self, needed: int) -> None:
        """Refuse to start what cannot fit."""
        if self._folder is None:
            return
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise FullError(
                f"the shards need about {format_bytes(needed)} and only {format_bytes(free)} are free",
                where=self._folder,
                hint="free some space or choose another destination",
            )

    def part_path(self, name: str) -> Path:
        """Give the path to write a file at that will be put as `name`."""
        return self._parts / f"{name.replace('/', '-')}.part"

    def put(self, name: str, content: bytes | Path) -> None:
        """Put a file in its place, whole, and on the disk before anything else can tell of it."""
        if isinstance(content, bytes):
            part = self.part_path(name)
            with resume_hint(part), part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            content = part
        self._store.put(name, content)

    def commit(self, manifests: list[Manifest], bad: Mapping[str, list[QuarantinedImage]]) -> None:
        """Write the lists of bad images, then the manifests; then remove what only a resumed run would need."""
        for split, images in bad.items():
            if images:
                lines = b"".join(msgspec.json.encode(one) + b"\n" for one in images)
                self.put(f"{split}/{QUARANTINE}", lines)
        self._fsync_folders(manifests)
        for manifest in manifests:
            self.put(f"{manifest.split}/{MANIFEST}", spec.to_json(manifest))
        self._fsync_folders(manifests)
        self.remove_work_files()

    def remove_work_files(self) -> None:
        """Remove `_work`, the plan last of all: as long as it lies there, the set counts as unfinished."""
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

    def _check_unfinished(self, plan: str, stamp: str | None) -> None:
        try:
            begun = spec.load(self._store.get(PLAN), PlanRecord, PLAN)
        except NotFoundError:
            return
        except SpecError:  # a power cut left it empty
            begun = PlanRecord(plan="", stamp="")
        hint = "give --restart to throw it away, or finish that one with its own command"
        if begun.plan != plan:
            raise ConflictError(
                "the destination holds an unfinished conversion of other data or with other options",
                where=self._store.url,
                hint=hint,
            )
        if stamp is not None and begun.stamp != stamp:
            raise ConflictError(
                "files of the source have changed since this conversion began",
                where=self._store.url,
                hint="give --restart to begin anew",
            )

    def _list_sizes(self) -> dict[str, int]:
        return {entry.name: entry.size for entry in self._store.list()}

    def _fsync_folders(self, manifests: list[Manifest]) -> None:
        """Have the files' names on the disk too, so that through a power cut a manifest means a complete set."""
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
    """Refuse a destination that cannot be one: a file, or a folder that holds anything but a conversion of ours."""
    folder = local_path(store.url)
    if folder is not None and not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise InputError("is not a folder", where=store.url, hint="choose an empty or new folder")
    strangers = []
    for entry in store.list():
        if _is_manifest(entry.name) or entry.name == PLAN:
            return
        if not entry.name.startswith(WORK):
            strangers.append(entry.name)
    if strangers:
        raise ConflictError(
            f"the destination is not empty: it holds {strangers[0]}",
            where=store.url,
            hint="choose an empty or new destination",
        )


@contextlib.contextmanager
def resume_hint(path: Path) -> Iterator[None]:
    """Turn an operating system's error while writing into one of ours; a full disk is no loss."""
    try:
        with translate_os_errors(path):
            yield
    except FullError as error:
        error.hint = "free some space and run the same command again: finished shards are kept"
        raise


def _is_manifest(name: str) -> bool:
    return name == MANIFEST or name.endswith(f"/{MANIFEST}")


def _is_complete(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    return all(
        sizes.get(f"{manifest.split}/{shard.name}") == shard.bytes
        and f"{manifest.split}/{index.index_name(shard.name)}" in sizes
        for shard in manifest.shards
    )


def _acquire_lock(path: Path, where: str) -> IO[str]:
    """Open a file and lock it until it is closed; where the file system knows no locks, go on without."""
    while True:
        with resume_hint(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConflictError("another conversion is writing here", where=where, hint="wait for it") from error
        except OSError:
            return file
        # The run before may have removed the file between our opening and locking it.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()

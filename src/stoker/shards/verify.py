"""Whether a shard set is what its manifest says: every fault is found and told, not only the first."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np

from stoker.errors import NotFoundError, SourceError, StokerError
from stoker.shards import index
from stoker.shards.catalog import find_duplicates
from stoker.shards.formats import FORMATS, LocatedSample, guess_format
from stoker.shards.images import BadImageError, check_decodes, inspect_image
from stoker.shards.manifest import MANIFEST, QUARANTINE, Manifest, Shard
from stoker.shards.shard_set import MappedFile, ShardSet

CHUNK = 8 << 20


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: in which shard, and where in it when that is known."""

    shard: str
    what: str
    offset: int | None = None
    key: str | None = None


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at in a set, and all that is wrong with it."""

    url: str
    split: str
    shards: int
    samples: int
    bytes: int
    findings: tuple[Finding, ...]


class _ShardResult(NamedTuple):
    """What one shard gave."""

    samples: int
    keys: array[int]
    findings: list[Finding]


def verify(
    shard_set: ShardSet, *, deep: bool = False, jobs: int = 2, progress: Callable[[int], None] = lambda _: None
) -> VerifyReport:
    """Check every shard of a set; `progress` is told the bytes of each shard as it is done."""
    recorded = {} if shard_set.manifest is None else {shard.name: shard for shard in shard_set.manifest.shards}

    def check(number: int) -> _ShardResult:
        entry = shard_set.shards[number]
        checked = _check_shard(shard_set, entry.name, recorded.get(entry.name), deep)
        progress(entry.size)
        return checked

    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="verify") as pool:
        results = list(pool.map(check, range(len(shard_set.shards))))
    findings = [finding for result in results for finding in result.findings]
    findings += _find_duplicate_keys(shard_set, [result.keys for result in results])
    findings += _find_unlisted_shards(shard_set)
    samples = sum(result.samples for result in results)
    if samples == 0:
        findings.append(Finding(shard=shard_set.url, what="no samples"))
    if shard_set.manifest is not None:
        findings += _check_sums(shard_set.manifest)
        findings += _check_quarantine(shard_set, shard_set.manifest)
    return VerifyReport(
        url=shard_set.url,
        split=shard_set.split,
        shards=len(shard_set.shards),
        samples=samples,
        bytes=sum(entry.size for entry in shard_set.shards),
        findings=tuple(findings),
    )


def _check_shard(shard_set: ShardSet, name: str, shard: Shard | None, deep: bool) -> _ShardResult:
    """Check one shard's bytes, members, images, labels and index."""
    keys = array("q")
    findings: list[Finding] = []
    rows = index.IndexBuilder()
    faults: list[SourceError] = []
    try:
        with shard_set.map_shard(name) as reader:
            if shard is not None:
                findings += _check_bytes(reader, shard)
            for found in FORMATS.get(shard_set.format).iter_samples(reader.view, name, check=True, errors=faults):
                keys.append(hash(found.sample.key))
                if abs(found.sample.label) <= index.MAX_LABEL:
                    rows.add(found.image_offset, len(found.sample.image), found.sample.label)
                findings += _check_sample(shard_set, name, found, deep)
                reader.release_before(found.end)
    except NotFoundError as error:
        return _ShardResult(0, keys, [Finding(shard=name, what=error.what)])
    except SourceError as error:  # the rest of the shard cannot be walked
        faults.append(error)
    findings += [Finding(shard=name, what=fault.what) for fault in faults]
    if shard is not None:
        if len(keys) != shard.samples:
            findings.append(Finding(shard=name, what=f"{len(keys):,} samples, and the manifest says {shard.samples:,}"))
        findings += _check_index(shard_set, shard, rows)
    return _ShardResult(len(keys), keys, findings)


def _check_bytes(reader: MappedFile, shard: Shard) -> Iterator[Finding]:
    data = reader.view
    if len(data) != shard.bytes:
        yield Finding(shard=shard.name, what=f"{len(data):,} bytes, and the manifest says {shard.bytes:,}")
        return
    digest = hashlib.sha256()
    for start in range(0, len(data), CHUNK):
        digest.update(data[start : start + CHUNK])
        reader.release_before(start)
    if digest.hexdigest() != shard.sha256:
        yield Finding(shard=shard.name, what=f"its sha256 is {digest.hexdigest()}, not {shard.sha256}")


def _check_sample(shard_set: ShardSet, name: str, found: LocatedSample, deep: bool) -> Iterator[Finding]:
    sample = found.sample
    try:
        inspect_image(sample.image)
        if deep:
            check_decodes(sample.image)
    except BadImageError as error:
        yield Finding(shard=name, offset=found.image_offset, key=sample.key, what=str(error))
    classes = 0 if shard_set.manifest is None else len(shard_set.manifest.classes)
    last = classes - 1 if classes else index.MAX_LABEL
    if not 0 <= sample.label <= last:
        yield Finding(
            shard=name, offset=found.start, key=sample.key, what=f"its label is {sample.label}, not 0 to {last}"
        )


def _check_index(shard_set: ShardSet, shard: Shard, rows: index.IndexBuilder) -> Iterator[Finding]:
    """Compare the index beside a shard with what the shard holds."""
    name = index.index_name(shard.name)
    try:
        data = shard_set.store.get(shard_set.folder + name)
    except StokerError as error:
        yield Finding(shard=shard.name, what=f"its index {name} cannot be read: {error.what}")
        return
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        yield Finding(shard=shard.name, what=f"the sha256 of its index {name} is not the manifest's")
    elif data != rows.to_bytes():
        yield Finding(shard=shard.name, what=f"its index {name} does not tell where its samples lie")


def _check_sums(manifest: Manifest) -> Iterator[Finding]:
    if manifest.samples != sum(shard.samples for shard in manifest.shards):
        yield Finding(shard=MANIFEST, what="its count of samples is not the sum of its shards'")
    if manifest.bytes != sum(shard.bytes for shard in manifest.shards):
        yield Finding(shard=MANIFEST, what="its count of bytes is not the sum of its shards'")


def _check_quarantine(shard_set: ShardSet, manifest: Manifest) -> Iterator[Finding]:
    """Compare the list of images that were left out with their count."""
    if manifest.quarantined == 0:
        return
    try:
        lines = len(shard_set.store.get(shard_set.folder + QUARANTINE).splitlines())
    except StokerError as error:
        yield Finding(shard=QUARANTINE, what=f"cannot be read: {error.what}")
        return
    if lines != manifest.quarantined:
        what = f"{lines:,} images, and the manifest says {manifest.quarantined:,}"
        yield Finding(shard=QUARANTINE, what=what)


def _find_duplicate_keys(shard_set: ShardSet, keys: Sequence[array[int]]) -> Iterator[Finding]:
    """Find keys that stand twice: by 64-bit hash first, then by name in the shards concerned."""
    hashes = [np.empty(0, dtype=np.int64), *(np.frombuffer(part, dtype=np.int64) for part in keys)]
    suspects = set(find_duplicates(np.concatenate(hashes)))
    if not suspects:
        return
    seen: dict[str, str] = {}
    for part, entry in zip(keys, shard_set.shards, strict=True):
        if suspects.isdisjoint(part):
            continue
        try:
            with shard_set.map_shard(entry.name) as reader:
                for found in FORMATS.get(shard_set.format).iter_samples(reader.view, entry.name):
                    key = found.sample.key
                    if hash(key) in suspects:
                        if key in seen:
                            what = f"the key stands in {seen[key]} already"
                            yield Finding(shard=entry.name, offset=found.start, key=key, what=what)
                        seen.setdefault(key, entry.name)
        except StokerError:
            continue  # told before


def _find_unlisted_shards(shard_set: ShardSet) -> Iterator[Finding]:
    """Find shards that lie in the folder and are not in the manifest."""
    if shard_set.manifest is None:
        return
    known = {shard.name for shard in shard_set.manifest.shards}
    try:
        names = [entry.name.removeprefix(shard_set.folder) for entry in shard_set.store.list(shard_set.folder)]
    except StokerError:  # an http server that lists nothing
        return
    for name in names:
        if "/" not in name and guess_format(name) is not None and name not in known:
            yield Finding(shard=name, what="lies here, but the manifest does not know it")

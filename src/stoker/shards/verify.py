"""Verify a shard set against its manifest, and report every fault instead of only the first."""

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
from stoker.shards.images import BadImageError, inspect_image
from stoker.shards.manifest import MANIFEST, QUARANTINE, Manifest, Shard
from stoker.shards.sample import Buffer
from stoker.shards.shard_set import MappedFile, ShardSet

CHUNK = 8 << 20

ImageCheck = Callable[[Buffer], None]
"""Function that raises BadImageError for an image that training could not decode."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: its shard, and the offset and key if they are known."""

    shard: str
    what: str
    offset: int | None = None
    key: str | None = None


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked in a shard set, and every fault found."""

    url: str
    split: str
    shards: int
    samples: int
    bytes: int
    findings: tuple[Finding, ...]


class _ShardResult(NamedTuple):
    """The result of checking one shard."""

    samples: int
    keys: array[int]
    findings: list[Finding]


def verify(
    shard_set: ShardSet,
    *,
    check_image: ImageCheck | None = None,
    jobs: int = 2,
    progress: Callable[[int], None] = lambda _: None,
) -> VerifyReport:
    """Check every shard of a shard set; `progress` is called with the bytes of each finished shard.

    `check_image` is called with every image, from several threads, in addition to the check of its header.
    """
    recorded = {} if shard_set.manifest is None else {shard.name: shard for shard in shard_set.manifest.shards}

    def check(number: int) -> _ShardResult:
        entry = shard_set.shards[number]
        result = _check_shard(shard_set, entry.name, recorded.get(entry.name), check_image)
        progress(entry.size)
        return result

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


def _check_shard(shard_set: ShardSet, name: str, shard: Shard | None, check_image: ImageCheck | None) -> _ShardResult:
    """Check the bytes, members, images, labels and index of one shard."""
    keys = array("q")
    findings: list[Finding] = []
    rows = index.IndexBuilder()
    errors: list[SourceError] = []
    try:
        with shard_set.map_shard(name) as file:
            if shard is not None:
                findings += _check_bytes(file, shard)
            for located in FORMATS.get(shard_set.format).iter_samples(file.view, name, check=True, errors=errors):
                keys.append(hash(located.sample.key))
                if abs(located.sample.label) <= index.MAX_LABEL:
                    rows.add(located.image_offset, len(located.sample.image), located.sample.label)
                findings += _check_sample(shard_set, name, located, check_image)
                file.release_before(located.end)
    except NotFoundError as error:
        return _ShardResult(0, keys, [Finding(shard=name, what=error.what)])
    except SourceError as error:  # the rest of the shard cannot be read
        errors.append(error)
    findings += [Finding(shard=name, what=fault.what) for fault in errors]
    if shard is not None:
        if len(keys) != shard.samples:
            findings.append(
                Finding(shard=name, what=f"{len(keys):,} samples, but the manifest lists {shard.samples:,}")
            )
        findings += _check_index(shard_set, shard, rows)
    return _ShardResult(len(keys), keys, findings)


def _check_bytes(file: MappedFile, shard: Shard) -> Iterator[Finding]:
    data = file.view
    if len(data) != shard.bytes:
        yield Finding(shard=shard.name, what=f"{len(data):,} bytes, but the manifest lists {shard.bytes:,}")
        return
    digest = hashlib.sha256()
    for start in range(0, len(data), CHUNK):
        digest.update(data[start : start + CHUNK])
        file.release_before(start)
    if digest.hexdigest() != shard.sha256:
        yield Finding(shard=shard.name, what=f"SHA-256 is {digest.hexdigest()}, but the manifest lists {shard.sha256}")


def _check_sample(
    shard_set: ShardSet, name: str, located: LocatedSample, check_image: ImageCheck | None
) -> Iterator[Finding]:
    sample = located.sample
    try:
        inspect_image(sample.image)
        if check_image is not None:
            check_image(sample.image)
    except BadImageError as error:
        yield Finding(shard=name, offset=located.image_offset, key=sample.key, what=str(error))
    classes = 0 if shard_set.manifest is None else len(shard_set.manifest.classes)
    last = classes - 1 if classes else index.MAX_LABEL
    if not 0 <= sample.label <= last:
        yield Finding(
            shard=name, offset=located.start, key=sample.key, what=f"label {sample.label} must be between 0 and {last}"
        )


def _check_index(shard_set: ShardSet, shard: Shard, rows: index.IndexBuilder) -> Iterator[Finding]:
    """Compare the index of a shard with its samples."""
    name = index.index_name(shard.name)
    try:
        data = shard_set.store.get(shard_set.folder + name, max_bytes=index.max_index_bytes(shard.samples))
    except StokerError as error:
        yield Finding(shard=shard.name, what=f"cannot read the index {name}: {error.what}")
        return
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        yield Finding(shard=shard.name, what=f"the SHA-256 of the index {name} does not match the manifest")
    elif data != rows.to_bytes():
        yield Finding(shard=shard.name, what=f"the index {name} does not match the samples in the shard")


def _check_sums(manifest: Manifest) -> Iterator[Finding]:
    if manifest.samples != sum(shard.samples for shard in manifest.shards):
        yield Finding(shard=MANIFEST, what="the number of samples is not the sum over all shards")
    if manifest.bytes != sum(shard.bytes for shard in manifest.shards):
        yield Finding(shard=MANIFEST, what="the number of bytes is not the sum over all shards")


def _check_quarantine(shard_set: ShardSet, manifest: Manifest) -> Iterator[Finding]:
    """Compare the list of quarantined images with the count in the manifest."""
    if manifest.quarantined == 0:
        return
    try:
        lines = len(shard_set.store.get(shard_set.folder + QUARANTINE).splitlines())
    except StokerError as error:
        yield Finding(shard=QUARANTINE, what=f"cannot read the quarantine list: {error.what}")
        return
    if lines != manifest.quarantined:
        what = f"{lines:,} images, but the manifest lists {manifest.quarantined:,}"
        yield Finding(shard=QUARANTINE, what=what)


def _find_duplicate_keys(shard_set: ShardSet, keys: Sequence[array[int]]) -> Iterator[Finding]:
    """Find duplicate keys: by 64-bit hash first, then by text in the shards concerned."""
    hashes = [np.empty(0, dtype=np.int64), *(np.frombuffer(part, dtype=np.int64) for part in keys)]
    suspects = set(find_duplicates(np.concatenate(hashes)))
    if not suspects:
        return
    seen: dict[str, str] = {}
    for part, entry in zip(keys, shard_set.shards, strict=True):
        if suspects.isdisjoint(part):
            continue
        try:
            with shard_set.map_shard(entry.name) as file:
                for located in FORMATS.get(shard_set.format).iter_samples(file.view, entry.name):
                    key = located.sample.key
                    if hash(key) in suspects:
                        if key in seen:
                            what = f"the key also occurs in {seen[key]}"
                            yield Finding(shard=entry.name, offset=located.start, key=key, what=what)
                        seen.setdefault(key, entry.name)
        except StokerError:
            continue  # already reported


def _find_unlisted_shards(shard_set: ShardSet) -> Iterator[Finding]:
    """Find shards in the folder that are not in the manifest."""
    if shard_set.manifest is None:
        return
    known = {shard.name for shard in shard_set.manifest.shards}
    try:
        names = [entry.name.removeprefix(shard_set.folder) for entry in shard_set.store.list(shard_set.folder)]
    except StokerError:  # an http server that lists nothing
        return
    for name in names:
        if "/" not in name and guess_format(name) is not None and name not in known:
            yield Finding(shard=name, what="is not listed in the manifest")

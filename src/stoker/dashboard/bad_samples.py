"""Bad samples of a run for the dashboard: where they are, why they were skipped, and their thumbnails.

Everything about a sample comes from a log, so it is checked: a thumbnail is read only from a shard of the datasets that
the job file names, on this machine, or from the job's disk cache. Nothing is fetched.
"""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.dashboard.runs import DashboardRun
from stoker.errors import NotFoundError, StokerError, VerificationError
from stoker.jobs.spec import DataSpec
from stoker.shards.images import MAX_BYTES, BadImageError, too_large_reason
from stoker.shards.shard_set import find_shard_sets
from stoker.storage import check_name, local_path, redacted
from stoker.storage.cache import DiskCache
from stoker.storage.local import translate_os_errors
from stoker.telemetry.events import Event, split_line
from stoker.telemetry.run_index import Mark

MARK = "bad_sample"
MAX_LISTED = 100
MAX_READ = 1000
"""Marks that are read, several of which may be about one sample."""
SIDE = 128
"""Pixels of the longer side of a thumbnail."""
_MAX_LINE_BYTES = 8192
_MAX_INTEGER = 2**53
_SHA256 = re.compile(r"[0-9a-f]{64}")
_decoding = threading.Lock()
"""One thumbnail at a time: a damaged image may need a lot of memory."""


class BadSampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that the loader skipped; `number` identifies it within the run."""

    number: int
    t: float
    slot: str
    rank: int
    epoch: int
    position: int
    shard: str
    offset: int
    length: int
    reason: str
    log: str
    log_offset: int


class SampleImage(msgspec.Struct, frozen=True):
    """A thumbnail as a data URL, or the reason why there is none; with both, it shows only a part of the image."""

    image: str
    reason: str


def list_bad_samples(run: DashboardRun) -> list[BadSampleRow]:
    """Return the bad samples that have a mark, each once, the newest first."""
    with run.lock:
        marks = _bad_marks(run)
    rows: dict[tuple[str, int], BadSampleRow] = {}
    for number, mark in reversed(list(enumerate(marks))[-MAX_READ:]):
        if len(rows) == MAX_LISTED:
            break
        fields = _read_fields(run, mark)
        row = BadSampleRow(
            number=number, t=mark.t, slot=mark.slot, rank=mark.rank, epoch=_integer(mark, "epoch"),
            position=_integer(mark, "position"), shard=str(fields.get("shard", "")),
            offset=_integer(mark, "offset"), length=_integer(mark, "length"),
            reason=str(fields.get("reason", mark.detail)), log=mark.log, log_offset=mark.offset,
        )  # fmt: skip
        rows.setdefault((row.shard, row.offset), row)
    return list(rows.values())


def read_thumbnail(run: DashboardRun, number: int) -> SampleImage:
    """Return the thumbnail of a bad sample; raise NotFoundError if there is no sample of this number."""
    with run.lock:
        marks = _bad_marks(run)
    if not 0 <= number < len(marks):
        raise NotFoundError("no such sample")
    mark = marks[number]
    try:
        with _decoding:
            data = _read_image(run, _read_fields(run, mark), _integer(mark, "offset"), _integer(mark, "length"))
            from stoker.load.thumbnails import make_thumbnail  # imports OpenCV

            jpeg, fault = make_thumbnail(data, SIDE)
    except (StokerError, BadImageError, OSError) as error:
        return SampleImage("", str(error))
    return SampleImage(f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}", fault)


def _bad_marks(run: DashboardRun) -> list[Mark]:
    return [mark for mark in run.index().marks()[0] if mark.name == MARK]


def _read_fields(run: DashboardRun, mark: Mark) -> dict[str, Any]:
    """Return all fields of a mark from its log, of which the index has only the numbers."""
    try:
        with open(run.folder.logs / mark.log, "rb") as file:
            file.seek(mark.offset)
            line = file.readline(_MAX_LINE_BYTES).decode(errors="replace")
    except OSError:
        return {}
    events = [part for part in split_line(line) if isinstance(part, Event) and part.fields.get("name") == MARK]
    return dict(events[0].fields) if events else {}


def _read_image(run: DashboardRun, fields: Mapping[str, Any], offset: int, length: int) -> bytes:
    """Read an image from a shard on this machine or in the job's cache; raise StokerError if it is in neither."""
    if run.is_followed:  # its job file was written by others, for other machines
        raise NotFoundError("the run was started elsewhere: its shards are not read from here")
    if length > MAX_BYTES:
        raise BadImageError(too_large_reason(length))
    url, sha256 = str(fields.get("shard", "")), str(fields.get("sha256", ""))
    data: DataSpec = run.folder.job.data
    if (path := _find_local_shard(data, url, sha256)) is not None:
        return _read_bytes(path, offset, length)
    remote = [_prefix(name) for name in (data.train, data.val, data.via) if name and local_path(name) is None]
    if data.cache.dir and url.startswith(tuple(remote)) and _SHA256.fullmatch(sha256):
        cached = DiskCache(Path(data.cache.dir).expanduser()).find_digest(sha256)
        if cached is not None:
            with cached:
                return _read_bytes(cached.path, offset, length)
    raise NotFoundError("the shard is neither on this machine nor in its cache")


def _prefix(name: str) -> str:
    """Return what the URLs of the shards of a remote dataset begin with."""
    plain = redacted(name)
    return plain.partition("{")[0] if "{" in plain else f"{plain.rstrip('/')}/"


def _find_local_shard(data: DataSpec, url: str, sha256: str) -> Path | None:
    """Return the path of a shard if it is one of the local shards that the job file names."""
    for name in (data.train, data.val):
        folder = local_path(name) if name else None
        if folder is None or not folder.is_absolute():
            continue
        for shard_set in find_shard_sets(str(name)):
            shard = next((one.name for one in shard_set.shards if shard_set.url_of(one.name) == url), None)
            root = local_path(shard_set.store.url)
            if shard is not None and root is not None:
                known = shard_set.manifest_shards.get(shard)
                if known is not None and known.sha256 and sha256 and known.sha256 != sha256:
                    raise VerificationError("the shard was replaced after the run")
                return root / check_name(shard_set.folder + shard)
    return None


def _read_bytes(path: Path, offset: int, length: int) -> bytes:
    with translate_os_errors(path), open(path, "rb") as file:
        file.seek(offset)
        found = file.read(length)
    if not found or len(found) < length:
        raise VerificationError("the shard has no such sample; it was replaced")
    return found


def _integer(mark: Mark, name: str) -> int:
    """Return a number of a mark, 0 if it is missing or no plausible integer."""
    value = mark.numbers.get(name, 0.0)
    return int(value) if 0 <= value < _MAX_INTEGER else 0

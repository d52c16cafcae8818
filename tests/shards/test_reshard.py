"""Shard sets as a source: damaged, incomplete and hostile shards are rejected, never converted."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.formats import FORMATS
from stoker.shards.sample import Item, Sample
from stoker.shards.shard_set import MappedFile, find_shard_sets
from stoker.shards.sources.shards import ShardsSource
from stoker.shards.verify import verify
from tests.shards.format_contract import make_shard
from tests.shards.test_tfrecord import IMAGE, LABEL, example, make_record
from tests.support.trees import image_bytes

SAMPLES = [Sample(f"cat/{number}", image_bytes(number), "jpg", number) for number in range(4)]
NAMES = {
    "tar": ("x-train-000000.tar", "x-train-000001.tar"),
    "tfrecord": ("train-00000-of-00002", "train-00001-of-00002"),
}


def scan_items(folder: Path) -> list[Item]:
    return list(ShardsSource(str(folder), scratch=folder).scan("train"))


def write_shards(folder: Path, shard_format: str, *, manifest: bool = True) -> list[Path]:
    """Write two shards of two samples each; return their paths."""
    paths = [folder / name for name in NAMES[shard_format]]
    rows = []
    for number, path in enumerate(paths):
        data = make_shard(FORMATS.get(shard_format), SAMPLES[2 * number : 2 * number + 2])
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        rows.append({"name": path.name, "samples": 2, "bytes": len(data), "sha256": digest, "index_sha256": ""})
    if manifest:
        text = {
            "version": 1,
            "name": "x",
            "split": "train",
            "format": shard_format,
            "samples": 4,
            "bytes": sum(path.stat().st_size for path in paths),
            "quarantined": 0,
            "classes": [],
            "seed": 0,
            "lanes": 1,
            "window": 2,
            "source": {"kind": "folder", "samples": 4, "digest": ""},
            "shrunk": None,
            "plan": "",
            "shards": rows,
        }
        (folder / "manifest.json").write_text(json.dumps(text))
    return paths


def sample_ends(shard_format: str, path: Path) -> list[int]:
    return [located.end for located in FORMATS.get(shard_format).iter_samples(path.read_bytes(), path.name)]


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("shard_format", ["tar", "tfrecord"])
def test_valid_shards_give_every_sample(tmp_path: Path, shard_format: str, manifest: bool) -> None:
    write_shards(tmp_path, shard_format, manifest=manifest)
    source = ShardsSource(str(tmp_path), scratch=tmp_path)
    items = list(source.scan("train"))
    assert [(item.name, item.label) for item in items] == [(f"{sample.key}.jpg", sample.label) for sample in SAMPLES]
    assert [bytes(source.read("train", item).image) for item in items] == [sample.image for sample in SAMPLES]


def test_tar_truncated_between_samples_is_rejected(tmp_path: Path) -> None:
    path, _ = write_shards(tmp_path, "tar", manifest=False)
    end, _ = sample_ends("tar", path)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(SourceError, match=f"x-train-000000.tar: truncated at byte {end}"):
        scan_items(tmp_path)


@pytest.mark.parametrize("shard_format", ["tar", "tfrecord"])
def test_shard_of_another_size_than_in_the_manifest_is_rejected(tmp_path: Path, shard_format: str) -> None:
    _, path = write_shards(tmp_path, shard_format)
    size, end = path.stat().st_size, sample_ends(shard_format, path)[0]
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(SourceError, match=rf"{path.name}: .*\b{end:,} bytes\b.*manifest lists {size:,}"):
        scan_items(tmp_path)


def test_shard_with_another_count_than_in_the_manifest_is_rejected(tmp_path: Path) -> None:
    write_shards(tmp_path, "tar")
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"samples": 2', '"samples": 3'))
    with pytest.raises(SourceError, match=r"x-train-000000.tar: .*\b2 samples\b.*manifest lists 3"):
        scan_items(tmp_path)


def test_flipped_bit_is_detected_by_the_sha256_of_the_manifest(tmp_path: Path) -> None:
    _, path = write_shards(tmp_path, "tar")
    flip_bit(path, 700)  # inside an image
    pattern = r"x-train-000001.tar: .*\b\w{64}\b.*\b\w{64}\b.*; .*stoker data verify$"
    with pytest.raises(SourceError, match=pattern):
        scan_items(tmp_path)


def test_flipped_bit_is_detected_by_a_checksum(tmp_path: Path) -> None:
    path, _ = write_shards(tmp_path, "tfrecord", manifest=False)
    source = ShardsSource(str(tmp_path), scratch=tmp_path)
    first, *_ = source.scan("train")
    flip_bit(path, path.read_bytes().index(b"\xff\xd8\xff") + 40)
    with pytest.raises(SourceError, match=r"record 0 at byte 0: .*checksum"):
        list(source.scan("train"))
    with pytest.raises(SourceError, match="checksum"):
        source.read("train", first)


def test_scan_releases_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, "tar")
    released: list[int] = []
    monkeypatch.setattr(MappedFile, "release_before", lambda _, position: released.append(position))
    scan_items(tmp_path)
    assert released == [end for name in NAMES["tar"] for end in sample_ends("tar", tmp_path / name)]


def test_records_without_file_name_have_unique_keys(tmp_path: Path) -> None:
    for name in NAMES["tfrecord"]:
        (tmp_path / name).write_bytes(make_record(example(**LABEL, **IMAGE)) * 2)
    names = [item.name for item in scan_items(tmp_path)]
    assert names == [f"{shard}/{number:08d}.jpg" for shard in NAMES["tfrecord"] for number in range(2)]
    for name in names:
        FORMATS.get("tar").check_key(name.removesuffix(".jpg"))
    (shard_set,) = find_shard_sets(str(tmp_path))
    # The message of a duplicate key names the other shard.
    messages = [finding.what for finding in verify(shard_set).findings]
    assert not [what for what in messages if any(name in what for name in NAMES["tfrecord"])]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("../../etc/x", "'..' part"),
        ("/abs", "empty"),
        ("a//b", "empty"),
        ("x/./a", "'.' or"),
        ("a/../b", "'..' part"),
        ("caf\udce9", "UTF-8"),
    ],
)
@pytest.mark.parametrize("shard_format", ["tar", "tfrecord"])
def test_keys_outside_of_the_folder_or_not_utf8_are_rejected(
    tmp_path: Path, shard_format: str, name: str, part: str
) -> None:
    if shard_format == "tar":
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for extension, data in (("jpg", image_bytes(1)), ("cls", b"1")):
                info = tarfile.TarInfo(f"{name}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        data = out.getvalue()
    else:
        data = make_shard(FORMATS.get(shard_format), [Sample(name, image_bytes(1), "jpg", 1)])
    path = tmp_path / NAMES[shard_format][0]
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"{path.name}: sample .* at byte 0 .*{part}"):
        scan_items(tmp_path)

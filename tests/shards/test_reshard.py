"""Shards as a source: what is damaged, incomplete or hostile is refused, never passed on as whole."""

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
from tests.shards.format_contract import shard_of
from tests.shards.test_tfrecord import IMAGE, LABEL, example, framed
from tests.support.trees import image_bytes

SAMPLES = [Sample(f"cat/{number}", image_bytes(number), "jpg", number) for number in range(4)]
NAMES = {
    "tar": ("x-train-000000.tar", "x-train-000001.tar"),
    "tfrecord": ("train-00000-of-00002", "train-00001-of-00002"),
}


def scan(folder: Path) -> list[Item]:
    return list(ShardsSource(str(folder), scratch=folder).scan("train"))


def write(folder: Path, kind: str, *, manifest: bool = True) -> list[Path]:
    """Write two shards of two samples each; return their paths."""
    paths = [folder / name for name in NAMES[kind]]
    rows = []
    for number, path in enumerate(paths):
        data = shard_of(FORMATS.get(kind), SAMPLES[2 * number : 2 * number + 2])
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        rows.append({"name": path.name, "samples": 2, "bytes": len(data), "sha256": digest, "index_sha256": ""})
    if manifest:
        text = {
            "version": 1,
            "name": "x",
            "split": "train",
            "format": kind,
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


def ends(kind: str, path: Path) -> list[int]:
    return [found.end for found in FORMATS.get(kind).iter_samples(path.read_bytes(), path.name)]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_good_shards_give_every_sample(tmp_path: Path, kind: str, manifest: bool) -> None:
    write(tmp_path, kind, manifest=manifest)
    source = ShardsSource(str(tmp_path), scratch=tmp_path)
    items = list(source.scan("train"))
    assert [(item.name, item.label) for item in items] == [(f"{one.key}.jpg", one.label) for one in SAMPLES]
    assert [bytes(source.read("train", item).image) for item in items] == [one.image for one in SAMPLES]


def test_a_tar_cut_between_samples_is_refused(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "tar", manifest=False)
    end, _ = ends("tar", path)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(SourceError, match=f"x-train-000000.tar: truncated at byte {end}"):
        scan(tmp_path)


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_a_shard_of_another_size_than_the_manifest_says_is_refused(tmp_path: Path, kind: str) -> None:
    _, path = write(tmp_path, kind)
    size, end = path.stat().st_size, ends(kind, path)[0]
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(SourceError, match=rf"{path.name}: {end:,} bytes, and the manifest says {size:,}"):
        scan(tmp_path)


def test_another_count_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "tar")
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"samples": 2', '"samples": 3'))
    with pytest.raises(SourceError, match=r"x-train-000000.tar: 2 samples, and the manifest says 3"):
        scan(tmp_path)


def test_a_flipped_bit_is_found_by_the_sha256_of_the_manifest(tmp_path: Path) -> None:
    _, path = write(tmp_path, "tar")
    flip(path, 700)  # inside an image
    wanted = r"x-train-000001.tar: its sha256 is \w{64}, not \w{64}; the source is damaged; see: stoker data verify"
    with pytest.raises(SourceError, match=wanted):
        scan(tmp_path)


def test_a_flipped_bit_is_found_by_a_checksum(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "tfrecord", manifest=False)
    source = ShardsSource(str(tmp_path), scratch=tmp_path)
    first, *_ = source.scan("train")
    flip(path, path.read_bytes().index(b"\xff\xd8\xff") + 40)
    with pytest.raises(SourceError, match="record 0 at byte 0: its data do not match"):
        list(source.scan("train"))
    with pytest.raises(SourceError, match="its data do not match"):
        source.read("train", first)


def test_a_scan_gives_back_the_memory_it_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "tar")
    told: list[int] = []
    monkeypatch.setattr(MappedFile, "passed", lambda _, position: told.append(position))
    scan(tmp_path)
    assert told == [end for name in NAMES["tar"] for end in ends("tar", tmp_path / name)]


def test_records_without_a_name_have_a_key_of_their_own(tmp_path: Path) -> None:
    for name in NAMES["tfrecord"]:
        (tmp_path / name).write_bytes(framed(example(**LABEL, **IMAGE)) * 2)
    names = [item.name for item in scan(tmp_path)]
    assert names == [f"{shard}/{number:08d}.jpg" for shard in NAMES["tfrecord"] for number in range(2)]
    for name in names:
        FORMATS.get("tar").check_key(name.removesuffix(".jpg"))
    (one,) = find_shard_sets(str(tmp_path))
    assert not [finding for finding in verify(one).findings if "already" in finding.what]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("../../etc/x", "'..' part"),
        ("/abs", "empty"),
        ("a//b", "empty"),
        ("x/./a", "'.' or"),
        ("a/../b", "'..' part"),
        ("caf\udce9", "not UTF-8"),
    ],
)
@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_keys_that_lead_elsewhere_or_are_no_text_are_refused(tmp_path: Path, kind: str, name: str, what: str) -> None:
    if kind == "tar":
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for extension, data in (("jpg", image_bytes(1)), ("cls", b"1")):
                info = tarfile.TarInfo(f"{name}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        data = out.getvalue()
    else:
        data = shard_of(FORMATS.get(kind), [Sample(name, image_bytes(1), "jpg", 1)])
    path = tmp_path / NAMES[kind][0]
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"{path.name}: sample .* at byte 0 has a key .*{what}"):
        scan(tmp_path)

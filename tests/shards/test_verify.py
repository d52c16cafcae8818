"""`stoker data verify`: every kind of fault is found, named and placed."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample
from tests.support.trees import image_bytes, make_dataset, stoker


def findings(capsys: pytest.CaptureFixture[str], url: object, *options: str) -> list[dict[str, object]]:
    capsys.readouterr()
    code = stoker("data", "verify", url, "--json", *options)
    out = capsys.readouterr()
    found = [finding for report in json.loads(out.out) for finding in report["findings"]]
    assert code == (2 if found else 0), out.err
    return found


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out", "--shard-samples", 10) == 0
    return tmp_path / "out/train"


def first(shards: Path) -> Path:
    return sorted(shards.glob("*.tar"))[0]


def write(path: Path, *samples: Sample) -> None:
    tar = FORMATS.get("tar")
    path.write_bytes(b"".join(bytes(c) for s in samples for c in tar.encode(s).chunks) + tar.trailer)


def test_a_good_set_has_none(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(capsys, shards.parent) == []
    assert findings(capsys, shards.parent, "--deep") == []
    assert findings(capsys, str(shards / "pets-train-{000000..000002}.tar")) == []


def flip_a_bit(shards: Path) -> None:
    data = bytearray(first(shards).read_bytes())
    data[700] ^= 1  # inside an image
    first(shards).write_bytes(data)


def cut_it(shards: Path) -> None:
    first(shards).write_bytes(first(shards).read_bytes()[:5000])


def remove_it(shards: Path) -> None:
    first(shards).unlink()


def add_one(shards: Path) -> None:
    (shards / "pets-train-000009.tar").write_bytes(first(shards).read_bytes())


def remove_the_index(shards: Path) -> None:
    (shards / "index" / f"{first(shards).name}.npy").unlink()


def change_the_index(shards: Path) -> None:
    path = shards / "index" / f"{first(shards).name}.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")


def change_the_count(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["shards"][0]["samples"] += 1
    (shards / "manifest.json").write_text(json.dumps(manifest))


def change_the_bytes(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"bytes": manifest["bytes"] + 1}))


def empty_the_manifest(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"shards": [], "samples": 0, "bytes": 0}))


def claim_bad_images(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"quarantined": 2}))


def list_too_few_bad_images(shards: Path) -> None:
    claim_bad_images(shards)
    (shards / "quarantine.jsonl").write_text('{"key": "a"}\n')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip_a_bit, ["sha256"]),
        (cut_it, ["5,000 bytes", "truncated"]),
        (remove_it, ["no such file"]),
        (add_one, ["the manifest does not know it"]),
        (remove_the_index, ["its index"]),
        (change_the_index, ["sha256 of its index"]),
        (change_the_count, ["10 samples, and the manifest says 11", "not the sum"]),
        (change_the_bytes, ["its count of bytes is not the sum"]),
        (empty_the_manifest, ["no samples", "the manifest does not know it"]),
        (claim_bad_images, ["cannot be read: no such file"]),
        (list_too_few_bad_images, ["1 images, and the manifest says 2"]),
    ],
)
def test_damage_is_found(
    shards: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], words: list[str]
) -> None:
    spoil(shards)
    found = " | ".join(str(finding["what"]) for finding in findings(capsys, shards))
    assert all(word in found for word in words), found


def test_every_fault_is_told_and_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A set made elsewhere, without a manifest: four faults in three shards, all reported at once."""
    good = image_bytes(1)
    write(tmp_path / "x-train-0.tar", Sample("a", good, "jpg", 0), Sample("b", good[:-30], "jpg", 0))
    write(tmp_path / "x-train-1.tar", Sample("c", good, "jpg", -5), Sample("a", good, "jpg", 1))
    (tmp_path / "x-train-2.tar").write_bytes(b"\x01" * 3000)
    found = findings(capsys, tmp_path)
    by_key = {(finding["shard"], finding["key"]): finding for finding in found}
    assert "no end-of-image" in str(by_key["x-train-0.tar", "b"]["what"])
    assert "label is -5" in str(by_key["x-train-1.tar", "c"]["what"])
    assert "stands in x-train-0.tar already" in str(by_key["x-train-1.tar", "a"]["what"])
    assert ("x-train-2.tar", None) in by_key
    assert len(found) == 4
    shard = (tmp_path / "x-train-0.tar").read_bytes()
    at = by_key["x-train-0.tar", "b"]["offset"]
    assert isinstance(at, int)
    assert shard[at : at + 3] == b"\xff\xd8\xff"


def test_a_set_without_samples_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "x-train-0.tar")
    assert [finding["what"] for finding in findings(capsys, tmp_path)] == ["no samples"]


def test_only_a_deep_look_finds_damaged_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = bytearray(image_bytes(1, "PNG", (64, 64)))
    middle = image.index(b"IDAT") + 20
    image[middle : middle + 8] = random.Random(1).randbytes(8)
    write(tmp_path / "x-train-0.tar", Sample("a", bytes(image), "png", 0))
    assert findings(capsys, tmp_path) == []
    (found,) = findings(capsys, tmp_path, "--deep")
    assert "does not decode" in str(found["what"])


def test_labels_must_be_classes(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["classes"] = ["ant", "bee"]
    (shards / "manifest.json").write_text(json.dumps(manifest))
    found = findings(capsys, shards)
    assert len(found) == 10
    assert all("label is 2, not 0 to 1" in str(finding["what"]) for finding in found)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        ('{"version": 2}', "version 2"),
        ('{"version": 1, "shards": "none", "extra": 1}', "missing (expected"),
    ],
)
def test_a_broken_manifest_is_one_sentence(
    shards: Path, capsys: pytest.CaptureFixture[str], text: str, word: str
) -> None:
    (shards / "manifest.json").write_text(text)
    assert stoker("data", "verify", shards) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "manifest.json" in err


def test_the_table_for_people(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(shards)
    capsys.readouterr()
    assert stoker("data", "verify", shards) == 2
    captured = capsys.readouterr()
    assert "pets-train-000000.tar" in captured.out
    assert captured.err.strip().endswith("1 fault found")


def test_a_walk_goes_on_behind_a_bad_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "x-train-0.tar", "w") as tar:
        for name, data in [
            ("a.jpg", image_bytes(1)),
            ("b.cls", b"1"),
            ("c.jpg", image_bytes(2)[:-30]),
            ("c.cls", b"0"),
            ("d.jpg", image_bytes(3)),
            ("d.cls", b"x"),
        ]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    found = " | ".join(str(finding["what"]) for finding in findings(capsys, tmp_path))
    assert all(word in found for word in ("'a'", "no label", "'b'", "no image", "end-of-image", "label b'x'"))


def test_a_missing_shard_is_one_fault(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_it(shards)
    (found,) = findings(capsys, shards)
    assert found["shard"] == "pets-train-000000.tar"


def test_a_damaged_record_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = FORMATS.get("tfrecord")
    parts = [b"".join(map(bytes, records.encode(Sample(f"k{i}", image_bytes(i), "jpg", 0)).chunks)) for i in range(4)]
    for i in (1, 3):
        parts[i] = parts[i][:60] + bytes([parts[i][60] ^ 1]) + parts[i][61:]
    (tmp_path / "x-train-0.tfrecord").write_bytes(b"".join(parts))
    found = findings(capsys, tmp_path)
    assert ["record 1" in str(found[0]["what"]), "record 3" in str(found[1]["what"])] == [True, True]
    assert len(found) == 2

"""`stoker data verify`: every kind of fault is reported with its shard and location."""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from stoker import Loader
from stoker.shards import index
from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample
from stoker.shards.shard_set import find_shard_sets
from stoker.shards.verify import verify
from stoker.storage.local import LocalStore
from tests.load.jpegs import encode_441
from tests.support.trees import image_bytes, make_dataset, stoker

SHARD, MANIFEST, QUARANTINE = "pets-train-000000.tar", "manifest.json", "quarantine.jsonl"
URL = "<the shard set itself>"


def verify_findings(capsys: pytest.CaptureFixture[str], url: object, *options: str) -> list[dict[str, object]]:
    capsys.readouterr()
    code = stoker("data", "verify", url, "--json", *options)
    out = capsys.readouterr()
    findings = [finding for report in json.loads(out.out) for finding in report["findings"]]
    assert code == (2 if findings else 0), out.err
    return findings


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out", "--shard-samples", 10) == 0
    return tmp_path / "out/train"


def first_shard(shards: Path) -> Path:
    return sorted(shards.glob("*.tar"))[0]


def write_shard(path: Path, *samples: Sample) -> None:
    tar = FORMATS.get("tar")
    path.write_bytes(b"".join(bytes(c) for s in samples for c in tar.encode(s).chunks) + tar.trailer)


def test_valid_shard_set_has_no_findings(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_findings(capsys, shards.parent) == []
    assert verify_findings(capsys, shards.parent, "--deep") == []
    assert verify_findings(capsys, str(shards / "pets-train-{000000..000002}.tar")) == []


def test_appended_byte_does_not_hide_the_last_sample(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = first_shard(shards)
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + b"x")
    found = [str(finding["what"]) for finding in verify_findings(capsys, shards)]
    assert len(found) == 2, found
    assert f"{size + 1:,} bytes" in found[0]
    assert f"data follows at byte {size}" in found[1]


def flip_bit(shards: Path) -> None:
    data = bytearray(first_shard(shards).read_bytes())
    data[700] ^= 1  # inside an image
    first_shard(shards).write_bytes(data)


def truncate_shard(shards: Path) -> None:
    first_shard(shards).write_bytes(first_shard(shards).read_bytes()[:5000])


def remove_shard(shards: Path) -> None:
    first_shard(shards).unlink()


def add_shard(shards: Path) -> None:
    (shards / "pets-train-000009.tar").write_bytes(first_shard(shards).read_bytes())


def remove_index(shards: Path) -> None:
    (shards / "index" / f"{first_shard(shards).name}.npy").unlink()


def change_index(shards: Path) -> None:
    path = shards / "index" / f"{first_shard(shards).name}.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")


def change_count(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["shards"][0]["samples"] += 1
    (shards / "manifest.json").write_text(json.dumps(manifest))


def change_bytes(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"bytes": manifest["bytes"] + 1}))


def empty_manifest(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"shards": [], "samples": 0, "bytes": 0}))


def claim_quarantined(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(manifest | {"quarantined": 2}))


def list_too_few_quarantined(shards: Path) -> None:
    claim_quarantined(shards)
    (shards / "quarantine.jsonl").write_text('{"key": "a"}\n')


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flip_bit, [(SHARD, "SHA-256")]),
        (truncate_shard, [(SHARD, "5,000 bytes"), (SHARD, "truncated at byte 5000")]),
        (remove_shard, [(SHARD, "no such file")]),
        (add_shard, [("pets-train-000009.tar", "not listed in the manifest")]),
        (remove_index, [(SHARD, f"index/{SHARD}.npy: no such file")]),
        (change_index, [(SHARD, f"SHA-256 of the index index/{SHARD}.npy")]),
        (change_count, [(SHARD, "10 samples"), (SHARD, "the manifest lists 11"), (MANIFEST, "samples is not the sum")]),
        (change_bytes, [(MANIFEST, "bytes is not the sum")]),
        (empty_manifest, [(URL, "no samples"), (SHARD, "not listed in the manifest")]),
        (claim_quarantined, [(QUARANTINE, "no such file")]),
        (list_too_few_quarantined, [(QUARANTINE, "1 images"), (QUARANTINE, "the manifest lists 2")]),
    ],
)
def test_damage_is_reported_with_its_file(
    shards: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], expected: list[tuple[str, str]]
) -> None:
    damage(shards)
    findings = [(str(finding["shard"]), str(finding["what"])) for finding in verify_findings(capsys, shards)]
    for name, part in expected:
        shard = str(shards) if name == URL else name
        assert any(shard == where and part in what for where, what in findings), findings


def test_every_fault_is_reported_with_its_location(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign shard set, without a manifest: four faults in three shards, all reported at once."""
    good = image_bytes(1)
    write_shard(tmp_path / "x-train-0.tar", Sample("a", good, "jpg", 0), Sample("b", good[:-30], "jpg", 0))
    write_shard(tmp_path / "x-train-1.tar", Sample("c", good, "jpg", -5), Sample("a", good, "jpg", 1))
    (tmp_path / "x-train-2.tar").write_bytes(b"\x01" * 3000)
    findings = verify_findings(capsys, tmp_path)
    by_key = {(finding["shard"], finding["key"]): finding for finding in findings}
    assert "truncated" in str(by_key["x-train-0.tar", "b"]["what"])
    assert "label -5" in str(by_key["x-train-1.tar", "c"]["what"])
    assert "x-train-0.tar" in str(by_key["x-train-1.tar", "a"]["what"])
    assert ("x-train-2.tar", None) in by_key
    assert len(findings) == 4
    shard = (tmp_path / "x-train-0.tar").read_bytes()
    offset = by_key["x-train-0.tar", "b"]["offset"]
    assert isinstance(offset, int)
    assert shard[offset : offset + 3] == b"\xff\xd8\xff"


def test_shard_set_without_samples_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "x-train-0.tar")
    assert [finding["what"] for finding in verify_findings(capsys, tmp_path)] == ["no samples"]


def test_only_deep_finds_damaged_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = bytearray(image_bytes(1, "PNG", (64, 64)))
    middle = image.index(b"IDAT") + 20
    image[middle : middle + 8] = random.Random(1).randbytes(8)
    write_shard(tmp_path / "x-train-0.tar", Sample("a", bytes(image), "png", 0))
    assert verify_findings(capsys, tmp_path) == []
    (finding,) = verify_findings(capsys, tmp_path, "--deep")
    assert (finding["shard"], finding["key"]) == ("x-train-0.tar", "a")
    assert "decode" in str(finding["what"])


def test_labels_beyond_the_classes_are_faults(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["classes"] = ["ant", "bee"]
    (shards / "manifest.json").write_text(json.dumps(manifest))
    findings = verify_findings(capsys, shards)
    assert len(findings) == 10
    assert all(re.search(r"label 2\b.*\b0 and 1\b", str(finding["what"])) for finding in findings)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "invalid manifest: "),
        ("[]", "invalid manifest: "),
        ('{"version": 2}', "version 2"),
        ('{"version": 1, "shards": "none", "extra": 1}', "missing (must be"),
    ],
)
def test_invalid_manifest_is_one_sentence(
    shards: Path, capsys: pytest.CaptureFixture[str], text: str, word: str
) -> None:
    (shards / "manifest.json").write_text(text)
    assert stoker("data", "verify", shards) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "manifest.json" in err


@pytest.mark.parametrize("key", ["samples", "k" * 1_000_000])
def test_only_the_duplicate_key_of_a_manifest_is_named(
    shards: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    pairs = [*(f'"key-{number}": 1' for number in range(1000)), *[f'"{key}": 1'] * 2]
    (shards / "manifest.json").write_text("{" + ", ".join(pairs) + "}")
    assert stoker("data", "verify", shards) == 2
    err = capsys.readouterr().err
    assert key[:20] in err
    assert "key-7" not in err
    assert len(err) < 1000


def test_table_output(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(shards)
    capsys.readouterr()
    assert stoker("data", "verify", shards) == 2
    captured = capsys.readouterr()
    assert "pets-train-000000.tar" in captured.out
    assert captured.err.strip().endswith("1 problem found")


def test_verification_continues_after_an_invalid_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    messages = [str(finding["what"]) for finding in verify_findings(capsys, tmp_path)]
    for parts in (("'a'", ".cls"), ("'b'", "no image"), ("truncated",), ("'d'", "label b'x'")):
        assert any(all(part in message for part in parts) for message in messages), messages


def test_missing_shard_is_one_fault(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_shard(shards)
    (finding,) = verify_findings(capsys, shards)
    assert finding["shard"] == "pets-train-000000.tar"
    assert "no such file" in str(finding["what"])


def test_every_damaged_record_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = FORMATS.get("tfrecord")
    parts = [b"".join(map(bytes, records.encode(Sample(f"k{i}", image_bytes(i), "jpg", 0)).chunks)) for i in range(4)]
    for i in (1, 3):
        parts[i] = parts[i][:60] + bytes([parts[i][60] ^ 1]) + parts[i][61:]
    (tmp_path / "x-train-0.tfrecord").write_bytes(b"".join(parts))
    first, second = (str(finding["what"]) for finding in verify_findings(capsys, tmp_path))
    assert "record 1 " in first
    assert "record 3 " in second


def test_deep_verification_decodes_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pillow can load floating-point pixels, but the loader does not know which value is white."""
    out = io.BytesIO()
    Image.new("RGB", (24, 18)).save(out, "TIFF", compression="tiff_deflate")
    floats = io.BytesIO()
    Image.new("F", (24, 18)).save(floats, "TIFF")
    write_shard(
        tmp_path / "x-train-0.tar",
        Sample("fine", out.getvalue(), "tif", 0),
        Sample("floats", floats.getvalue(), "tif", 0),
        Sample("tall", encode_441(Image.new("RGB", (8, 32), "red")), "jpg", 0),
    )
    findings = verify_findings(capsys, tmp_path, "--deep")
    assert [finding["key"] for finding in findings] == ["floats"]
    with Loader(tmp_path / "x-train-0.tar", global_batch=3, size=8, max_bad=1) as loader:
        assert [batch.count for batch in loader] == [2]


def test_the_manifest_sets_the_limit_of_an_index(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard_set,) = find_shard_sets(str(shards))
    name = first_shard(shards).name
    limit = (shards / index.index_name(name)).stat().st_size - 1
    monkeypatch.setitem(LocalStore.get.__kwdefaults__, "max_bytes", limit)
    monkeypatch.setattr(index, "MAX_GET_BYTES", limit, raising=False)
    assert len(shard_set.read_index(name)) == 10
    assert verify(shard_set).findings == ()

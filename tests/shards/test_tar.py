from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, tar_file_iterator

from stoker.errors import SourceError
from stoker.shards.formats import guess_format
from stoker.shards.formats.tar import FORMAT, split_path
from stoker.shards.sample import Sample
from stoker.shards.tar_headers import BLOCK_BYTES
from tests.shards.format_contract import MAGIC, SAMPLES, FormatContract, make_shard, read_samples, relaxed
from tests.support.tars import make_tar

JPEG = MAGIC["jpg"] + b"a picture"


class TestContract(FormatContract):
    format = FORMAT


def with_checksum(header: bytes | bytearray) -> bytes:
    header = bytearray(header)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    return bytes(header)


def list_members(sample: Sample) -> dict[str, bytes]:
    named = {sample.extension: sample.image, "cls": b"%d" % sample.label, **sample.extras}
    return {f"{sample.key}.{extension}": bytes(data) for extension, data in named.items()}


def test_shard_names() -> None:
    assert FORMAT.shard_name("imagenet", "train", 7, 100) == "imagenet-train-000007.tar"
    assert FORMAT.shard_name("", "val", 123456, 1) == "val-123456.tar"
    assert guess_format("s3://bucket/imagenet-train-000007.tar") == "tar"
    assert guess_format("train.tar.gz") is None
    assert guess_format("tar") is None


def test_plain_members_equal_those_of_tarfile() -> None:
    sample = Sample("a/b", JPEG, "jpg", 12, {"txt": b"hello", "json": b"{}"})
    expected = make_tar(("a/b.jpg", JPEG), ("a/b.json", b"{}"), ("a/b.txt", b"hello"), ("a/b.cls", b"12"))
    written = make_shard(FORMAT, [sample])
    assert expected.startswith(written)
    assert not any(expected[len(written) :])


def test_tarfile_reads_our_shards() -> None:
    with tarfile.open(fileobj=io.BytesIO(make_shard(FORMAT, SAMPLES))) as tar:
        members = tar.getmembers()
        contents = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert contents == {name: data for sample in SAMPLES for name, data in list_members(sample).items()}
    assert {(member.mode, member.uid, member.gid, member.mtime, member.uname, member.gname) for member in members} == {
        (0o644, 0, 0, 0, "", "")
    }


def test_gnu_tar_reads_our_shards(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    path.write_bytes(make_shard(FORMAT, SAMPLES))
    listing = subprocess.run(
        ["tar", "--quoting-style=literal", "-tf", path],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
    )
    assert listing.stderr == b""
    assert sorted(listing.stdout.decode().splitlines()) == sorted(
        name for sample in SAMPLES for name in list_members(sample)
    )


# webdataset does not close its files.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    path.write_bytes(make_shard(FORMAT, SAMPLES))
    rows = list(webdataset.WebDataset(str(path), shardshuffle=False))
    assert len(rows) == len(SAMPLES)
    for sample, row in zip(SAMPLES, rows, strict=True):
        assert row["__key__"] == sample.key
        assert row[sample.extension] == sample.image
        assert int(row["cls"]) == sample.label
        assert {name: row[name] for name in sample.extras} == sample.extras
    decoded = webdataset.WebDataset(str(path), shardshuffle=False).decode().to_tuple("cls")
    assert [label for (label,) in decoded] == [sample.label for sample in SAMPLES]


@pytest.mark.parametrize("form", ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"])
def test_reads_tars_of_webdataset(tmp_path: Path, form: str) -> None:
    # webdataset's default, ustar, splits long names into two fields, and cannot store long UTF-8 names.
    samples = [
        Sample("a/one", JPEG, "jpg", 3),
        Sample("b" * 80 + "/" + "c" * 80, JPEG * 99, "png", 4, {"json": b'{"a": 1}'}),
        Sample("ünïcode/日本", JPEG, "jpg", 5),
    ]
    path = tmp_path / "webdataset.tar"
    with webdataset.TarWriter(str(path), format=form) as writer:
        for sample in samples:
            row = {"__key__": sample.key, sample.extension: sample.image, "cls": sample.label}
            writer.write(row | dict(sample.extras))
    assert read_samples(FORMAT, path.read_bytes(), check=True) == samples


def test_reads_shards_of_webdataset_shard_writer(tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "set-%06d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(5):
            writer.write({"__key__": f"{number:03d}", "jpg": JPEG, "cls": number})
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) == 3
    labels = [sample.label for shard in shards for sample in read_samples(FORMAT, shard.read_bytes(), check=True)]
    assert labels == [0, 1, 2, 3, 4]


@relaxed
@given(st.text("ab._/A", min_size=1, max_size=12).filter(lambda path: not path.endswith("/")))
def test_split_path_equals_webdataset(path: str) -> None:
    skipped = not list(tar_file_iterator(io.BytesIO(make_tar((path, b"")))))
    key, extension = base_plus_ext(path)
    assert split_path(path) == (None if skipped or key is None else (key, extension.lower()))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a.b/c.seg.PNG", ("a.b/c", "seg.png")),
        ("./a.jpg", ("./a", "jpg")),
        ("a/.jpg", ("a/", "jpg")),
        (".jpg", None),
        ("a", None),
        ("__meta__/a.jpg", None),
        ("__index.json__", None),
        ("__a.jpg", ("__a", "jpg")),
    ],
)
def test_split_path(path: str, names: tuple[str, str] | None) -> None:
    assert split_path(path) == names


def test_split_path_is_fast_for_hostile_paths() -> None:
    assert split_path("/" * 1_000_000) is None


def test_members_that_are_not_samples_are_skipped() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "by hand"}) as tar:

        def add(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(data)
            tar.addfile(info, io.BytesIO(data))

        add("train", kind=tarfile.DIRTYPE)
        add("__meta__/x.json", b"{}")
        add("README", b"hello")
        add("train/a.JPEG", JPEG)
        add("train/link.jpg", kind=tarfile.SYMTYPE)
        add("train/a.cls", b" 4\n")
        add("train/strange.jpg", b"???", kind=b"Z")
        add("train/b.jpg", JPEG)
        add("train/b.png", JPEG)
        add("train/b.CLS", b"5")
    data = out.getvalue()
    first, second = FORMAT.iter_samples(data, "shard", check=True)
    assert first.sample == Sample("train/a", JPEG, "jpg", 4)
    assert second.sample == Sample("train/b", JPEG, "jpg", 5, {"png": JPEG})
    assert data[first.start :].startswith(b"train/a.JPEG\x00")
    for located in (first, second):
        assert FORMAT.parse_sample(data[located.start : located.end], "span") == located.sample


def test_sizes_in_base_256_and_v7_headers() -> None:
    (located,) = FORMAT.iter_samples(data := make_shard(FORMAT, [Sample("a", JPEG, "jpg", 1)]), "shard")
    header = bytearray(data[:BLOCK_BYTES])
    header[124:136] = b"\x80" + len(JPEG).to_bytes(11, "big")
    assert read_samples(FORMAT, with_checksum(header) + data[BLOCK_BYTES:], check=True) == [located.sample]
    header[257:] = bytes(BLOCK_BYTES - 257)
    assert read_samples(FORMAT, with_checksum(header) + data[BLOCK_BYTES:]) == [located.sample]


def test_size_of_a_pax_header_is_used() -> None:
    image = make_tar(("a.jpg", JPEG), pax_headers={"size": "4"})[: 4 * BLOCK_BYTES]
    assert read_samples(FORMAT, image + make_tar(("a.cls", b"1")), check=True) == [Sample("a", JPEG[:4], "jpg", 1)]


def test_size_over_8_gib_is_in_the_pax_header() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 9 << 30

    encoded = FORMAT.encode(Sample("a", Huge(), "jpg", 1))
    with tarfile.open(fileobj=io.BytesIO(encoded.chunks[0])) as tar:
        info = tar.next()
    assert info is not None
    assert (info.name, info.size) == ("a.jpg", 9 << 30)


def damage(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray(make_shard(FORMAT, [Sample("a", JPEG, "jpg", 1)]))
    change(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (make_tar(("a/b.cls", b"1")), ["sample 'a/b' at byte 0 ", "no image"]),
        (make_tar(("a.jpg", JPEG), ("a.cls", b"1"), ("b.jpg", JPEG)), ["sample 'b' at byte 2048 ", ".cls"]),
        (make_tar(("a.jpg", JPEG), ("a.json", b'{"label": 1}')), ["sample 'a' at byte 0 ", ".cls"]),
        (make_tar(("a.jpg", JPEG), ("a.cls", b"cat")), ["sample 'a' at byte 0 ", "label b'cat'"]),
        (make_tar(("a.jpg", JPEG), ("a.cls", b"")), ["sample 'a' at byte 0 ", "label b''"]),
        (make_tar(("a.jpg", JPEG), ("a.cls", b"%d" % 2**63)), ["sample 'a' at byte 0 ", f"label b'{2**63}'"]),
        (make_tar(("a.jpg", JPEG), ("a.cls", b"%d" % (-(2**63) - 1))), ["sample 'a' at byte 0 ", f"b'{-(2**63) - 1}'"]),
        (make_tar(("a.jpg", JPEG), ("a.cls", b"1" * 9999)), ["sample 'a' at byte 0 ", f"label b'{'1' * 21}'"]),
        (
            make_tar(("a.jpg", JPEG), ("a.JPG", JPEG), ("a.cls", b"1")),
            ["member 'a.JPG' at byte 1024 ", "twice"],
        ),
        (
            make_tar(("a.jpg", JPEG * 99))[:1000],
            ["truncated at byte 1000", "'a.jpg'", "1287 bytes at offset 512"],
        ),
        (make_tar(("a.jpg", JPEG))[:300], ["truncated at byte 300", "header at byte 0 ", "512 bytes"]),
        (make_tar(("é.jpg", JPEG))[:1024], ["extended header at byte 0 ", "followed by a member"]),
        (make_tar(("a.jpg", b""), type=tarfile.GNUTYPE_SPARSE), ["member 'a.jpg' at byte 0 ", "sparse"]),
        (make_tar(("a.jpg", JPEG), pax_headers={"GNU.sparse.major": "1"}), ["member at byte 0 ", "sparse"]),
        (b"\x1f\x8b" + bytes(range(256)) * 8, ["header at byte 0:", "checksum"]),
        (
            damage(lambda data: data.__setitem__(slice(124, 128), b"nope")),
            ["header at byte 0:", "size"],
        ),
        (
            damage(lambda data: data.__setitem__(slice(124, 128), b"-001")),
            ["header at byte 0:", "size"],
        ),
        (damage(lambda data: data.__setitem__(slice(124, 136), b"\xff" * 12)), ["header at byte 0:", "size"]),
        (
            damage(lambda data: data.__setitem__(slice(124, 136), b"\x80" + b"\xff" * 11)),
            ["truncated at byte", "3094"],
        ),
    ],
)
def test_errors_name_shard_member_and_offset(data: bytes, parts: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        list(FORMAT.iter_samples(data, "train-000000.tar"))
    assert caught.value.where == "train-000000.tar"
    assert all(part in caught.value.what for part in parts), caught.value.what


@pytest.mark.parametrize(
    "record", [b"path=x\n", b"0 path=x\n", b"-9 path=x\n", b"99 path=x\n", b"9 path=xy", b"7 size=-1\n"]
)
def test_damaged_pax_header_is_an_error(record: bytes) -> None:
    data = bytearray(make_shard(FORMAT, [Sample("é", JPEG, "jpg", 1)]))
    data[BLOCK_BYTES : BLOCK_BYTES + len(record)] = record
    with pytest.raises(SourceError, match="PAX header at byte 0 "):
        read_samples(FORMAT, bytes(data))


def test_global_pax_header_with_a_path_is_an_error() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "a.jpg"}):
        pass
    with pytest.raises(SourceError, match="global PAX header at byte 0 "):
        read_samples(FORMAT, out.getvalue())


def test_huge_extended_header_is_not_read() -> None:
    data = make_tar(("a.jpg", bytes(2 << 20)), type=tarfile.GNUTYPE_LONGNAME)
    with pytest.raises(SourceError, match=r"extended header at byte 0 .* 2097152 bytes"):
        read_samples(FORMAT, data)


@pytest.mark.parametrize("check", [False, True])
def test_archive_without_end_block_is_truncated_even_between_samples(check: bool) -> None:
    data = make_shard(FORMAT, SAMPLES)
    for end in [0, *(located.end for located in FORMAT.iter_samples(data, "shard"))]:
        with pytest.raises(SourceError, match=rf"^shard: truncated at byte {end}: .*end-of-archive"):
            read_samples(FORMAT, data[:end], check=check)
    assert tuple(read_samples(FORMAT, data[:-512], check=check)) == SAMPLES


def test_check_rejects_data_after_the_end_block() -> None:
    data = make_shard(FORMAT, SAMPLES)
    assert tuple(read_samples(FORMAT, data + bytes(8192), check=True)) == SAMPLES
    assert tuple(read_samples(FORMAT, data + data)) == SAMPLES
    with pytest.raises(SourceError, match=rf"byte {len(data) - 1024}\b.*byte {len(data)}\b"):
        read_samples(FORMAT, data + data, check=True)


def test_check_detects_a_damaged_header() -> None:
    data = make_shard(FORMAT, SAMPLES[:1])
    for offset in (*range(147), *range(156, BLOCK_BYTES)):
        damaged = bytearray(data)
        damaged[offset] ^= 0x40
        with pytest.raises(SourceError, match=r"at byte 0: .*checksum"):
            read_samples(FORMAT, bytes(damaged), check=True)
        with pytest.raises(SourceError, match=r"at byte 0: .*checksum"):
            FORMAT.parse_sample(bytes(damaged[: -len(FORMAT.trailer)]), "span", check=True)


@pytest.mark.parametrize("key", ["a.b", "a/.b", "__x__/a", "nul\0"])
def test_keys_that_webdataset_would_change_are_rejected(key: str) -> None:
    with pytest.raises(SourceError, match=re.escape(repr(key))):
        FORMAT.check_key(key)
    with pytest.raises(SourceError, match=re.escape(repr(key))):
        FORMAT.encode(Sample(key, JPEG, "jpg", 1))


@pytest.mark.parametrize("extension", ["jpg", "cls", "TXT", "a/b", "nul\0"])
def test_extras_that_webdataset_would_change_are_rejected(extension: str) -> None:
    with pytest.raises(SourceError, match=rf"member {re.escape(repr(extension))} .*'a'"):
        FORMAT.encode(Sample("a", JPEG, "jpg", 1, {extension: b""}))

from __future__ import annotations

import io
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
from stoker.shards.formats.tar import BLOCK, FORMAT, split_path
from stoker.shards.sample import Sample
from tests.shards.format_contract import MAGIC, SAMPLES, FormatContract, lax, read, shard_of

JPEG = MAGIC["jpg"] + b"a picture"


class TestContract(FormatContract):
    format = FORMAT


def tar_of(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT, **fields: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def with_checksum(header: bytes | bytearray) -> bytes:
    header = bytearray(header)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    return bytes(header)


def members_of(sample: Sample) -> dict[str, bytes]:
    named = {sample.extension: sample.image, "cls": b"%d" % sample.label, **sample.extras}
    return {f"{sample.key}.{extension}": bytes(data) for extension, data in named.items()}


def test_names() -> None:
    assert FORMAT.shard_name("imagenet", "train", 7, 100) == "imagenet-train-000007.tar"
    assert FORMAT.shard_name("", "val", 123456, 1) == "val-123456.tar"
    assert guess_format("s3://bucket/imagenet-train-000007.tar") == "tar"
    assert guess_format("train.tar.gz") is None
    assert guess_format("tar") is None


def test_plain_members_are_byte_for_byte_what_tarfile_writes() -> None:
    sample = Sample("a/b", JPEG, "jpg", 12, {"txt": b"hello", "json": b"{}"})
    expected = tar_of(("a/b.jpg", JPEG), ("a/b.json", b"{}"), ("a/b.txt", b"hello"), ("a/b.cls", b"12"))
    written = shard_of(FORMAT, [sample])
    assert expected.startswith(written)
    assert not any(expected[len(written) :])


def test_tarfile_reads_ours() -> None:
    with tarfile.open(fileobj=io.BytesIO(shard_of(FORMAT, SAMPLES))) as tar:
        members = tar.getmembers()
        read_back = {one.name: tar.extractfile(one).read() for one in members}  # type: ignore[union-attr]
    assert read_back == {name: data for sample in SAMPLES for name, data in members_of(sample).items()}
    assert {(one.mode, one.uid, one.gid, one.mtime, one.uname, one.gname) for one in members} == {
        (0o644, 0, 0, 0, "", "")
    }


def test_gnu_tar_reads_ours(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    path.write_bytes(shard_of(FORMAT, SAMPLES))
    listing = subprocess.run(
        ["tar", "--quoting-style=literal", "-tf", path],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
    )
    assert listing.stderr == b""
    assert sorted(listing.stdout.decode().splitlines()) == sorted(
        name for sample in SAMPLES for name in members_of(sample)
    )


# webdataset leaves it to the garbage collector to close its files.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_webdataset_reads_ours(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    path.write_bytes(shard_of(FORMAT, SAMPLES))
    found = list(webdataset.WebDataset(str(path), shardshuffle=False))
    assert len(found) == len(SAMPLES)
    for sample, theirs in zip(SAMPLES, found, strict=True):
        assert theirs["__key__"] == sample.key
        assert theirs[sample.extension] == sample.image
        assert int(theirs["cls"]) == sample.label
        assert {name: theirs[name] for name in sample.extras} == sample.extras
    decoded = webdataset.WebDataset(str(path), shardshuffle=False).decode().to_tuple("cls")
    assert [label for (label,) in decoded] == [sample.label for sample in SAMPLES]


@pytest.mark.parametrize("form", ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"])
def test_reads_what_webdataset_wrote(tmp_path: Path, form: str) -> None:
    # webdataset's default, ustar, splits long names over two fields and holds no long UTF-8.
    samples = [
        Sample("a/one", JPEG, "jpg", 3),
        Sample("b" * 80 + "/" + "c" * 80, JPEG * 99, "png", 4, {"json": b'{"a": 1}'}),
        Sample("ünïcode/日本", JPEG, "jpg", 5),
    ]
    path = tmp_path / "theirs.tar"
    with webdataset.TarWriter(str(path), format=form) as writer:
        for one in samples:
            writer.write({"__key__": one.key, one.extension: one.image, "cls": one.label, **one.extras})
    assert read(FORMAT, path.read_bytes(), check=True) == samples


def test_reads_what_webdataset_shard_writer_wrote(tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "set-%06d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(5):
            writer.write({"__key__": f"{number:03d}", "jpg": JPEG, "cls": number})
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) == 3
    labels = [one.label for shard in shards for one in read(FORMAT, shard.read_bytes(), check=True)]
    assert labels == [0, 1, 2, 3, 4]


@lax
@given(st.text("ab._/A", min_size=1, max_size=12).filter(lambda path: not path.endswith("/")))
def test_paths_split_as_webdataset_splits_them(path: str) -> None:
    skipped = not list(tar_file_iterator(io.BytesIO(tar_of((path, b"")))))
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


def test_a_hostile_path_does_not_take_long() -> None:
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
    for one in (first, second):
        assert FORMAT.parse_sample(data[one.start : one.end], "span") == one.sample


def test_sizes_in_base_256_and_v7_headers() -> None:
    (one,) = FORMAT.iter_samples(data := shard_of(FORMAT, [Sample("a", JPEG, "jpg", 1)]), "shard")
    header = bytearray(data[:BLOCK])
    header[124:136] = b"\x80" + len(JPEG).to_bytes(11, "big")
    assert read(FORMAT, with_checksum(header) + data[BLOCK:], check=True) == [one.sample]
    header[257:] = bytes(BLOCK - 257)
    assert read(FORMAT, with_checksum(header) + data[BLOCK:]) == [one.sample]


def test_the_size_in_a_pax_header_counts() -> None:
    image = tar_of(("a.jpg", JPEG), pax_headers={"size": "4"})[: 4 * BLOCK]
    assert read(FORMAT, image + tar_of(("a.cls", b"1")), check=True) == [Sample("a", JPEG[:4], "jpg", 1)]


def test_a_file_over_8_gib_says_so_in_its_pax_header() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 9 << 30

    encoded = FORMAT.encode(Sample("a", Huge(), "jpg", 1))
    with tarfile.open(fileobj=io.BytesIO(encoded.chunks[0])) as tar:
        info = tar.next()
    assert info is not None
    assert (info.name, info.size) == ("a.jpg", 9 << 30)


def damaged(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray(shard_of(FORMAT, [Sample("a", JPEG, "jpg", 1)]))
    change(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar_of(("a/b.cls", b"1")), r"sample 'a/b' at byte 0 has no image"),
        (tar_of(("a.jpg", JPEG), ("a.cls", b"1"), ("b.jpg", JPEG)), r"sample 'b' at byte 2048 has no label"),
        (tar_of(("a.jpg", JPEG), ("a.json", b'{"label": 1}')), r"sample 'a' at byte 0 has no label"),
        (tar_of(("a.jpg", JPEG), ("a.cls", b"cat")), r"has the label b'cat', not an integer"),
        (tar_of(("a.jpg", JPEG), ("a.cls", b"")), r"has the label b'', not an integer"),
        (tar_of(("a.jpg", JPEG), ("a.cls", b"1" * 9999)), r"has the label b'1{21}', not an integer"),
        (
            tar_of(("a.jpg", JPEG), ("a.JPG", JPEG), ("a.cls", b"1")),
            r"member 'a.JPG' at byte 1024 is there twice",
        ),
        (
            tar_of(("a.jpg", JPEG * 99))[:1000],
            r"truncated at byte 1000: member 'a.jpg' wants 1287 bytes at byte 512",
        ),
        (tar_of(("a.jpg", JPEG))[:300], r"truncated at byte 300: a header at byte 0 wants 512 bytes"),
        (tar_of(("é.jpg", JPEG))[:1024], r"the header at byte 0 describes a member that does not follow"),
        (tar_of(("a.jpg", b""), type=tarfile.GNUTYPE_SPARSE), r"member 'a.jpg' at byte 0 is sparse"),
        (tar_of(("a.jpg", JPEG), pax_headers={"GNU.sparse.major": "1"}), r"the member at byte 0 is sparse"),
        (b"\x1f\x8b" + bytes(range(256)) * 8, r"not a tar header at byte 0: its checksum is"),
        (
            damaged(lambda data: data.__setitem__(slice(124, 128), b"nope")),
            r"not a tar header at byte 0: its size is",
        ),
        (
            damaged(lambda data: data.__setitem__(slice(124, 128), b"-001")),
            r"not a tar header at byte 0: its size is",
        ),
        (damaged(lambda data: data.__setitem__(slice(124, 136), b"\xff" * 12)), r"its size is"),
        (
            damaged(lambda data: data.__setitem__(slice(124, 136), b"\x80" + b"\xff" * 11)),
            r"truncated .* wants 3094",
        ),
    ],
)
def test_faults_say_what_and_where(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=rf"^train-000000\.tar: .*{message}"):
        list(FORMAT.iter_samples(data, "train-000000.tar"))


@pytest.mark.parametrize(
    "record", [b"path=x\n", b"0 path=x\n", b"-9 path=x\n", b"99 path=x\n", b"9 path=xy", b"7 size=-1\n"]
)
def test_a_damaged_pax_header_is_a_fault(record: bytes) -> None:
    data = bytearray(shard_of(FORMAT, [Sample("é", JPEG, "jpg", 1)]))
    data[BLOCK : BLOCK + len(record)] = record
    with pytest.raises(SourceError, match="the PAX header at byte 0 is damaged"):
        read(FORMAT, bytes(data))


def test_a_global_pax_header_may_not_name_every_member() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "a.jpg"}):
        pass
    with pytest.raises(SourceError, match="gives all members one path or size"):
        read(FORMAT, out.getvalue())


def test_a_huge_extended_header_is_not_read() -> None:
    data = tar_of(("a.jpg", bytes(2 << 20)), type=tarfile.GNUTYPE_LONGNAME)
    with pytest.raises(SourceError, match="the extended header at byte 0 claims 2097152 bytes"):
        read(FORMAT, data)


@pytest.mark.parametrize("check", [False, True])
def test_an_archive_without_its_end_is_truncated_even_between_samples(check: bool) -> None:
    data = shard_of(FORMAT, SAMPLES)
    for end in [0, *(found.end for found in FORMAT.iter_samples(data, "shard"))]:
        with pytest.raises(SourceError, match=f"^shard: truncated at byte {end}: the end of the archive is missing"):
            read(FORMAT, data[:end], check=check)
    assert tuple(read(FORMAT, data[:-512], check=check)) == SAMPLES


def test_nothing_may_follow_the_end_when_checked() -> None:
    data = shard_of(FORMAT, SAMPLES)
    assert tuple(read(FORMAT, data + bytes(8192), check=True)) == SAMPLES
    assert tuple(read(FORMAT, data + data)) == SAMPLES
    with pytest.raises(SourceError, match=f"ends at byte {len(data) - 1024}, but byte {len(data)} starts more"):
        read(FORMAT, data + data, check=True)


def test_a_check_notices_a_damaged_header() -> None:
    data = shard_of(FORMAT, SAMPLES[:1])
    for at in (*range(147), *range(156, BLOCK)):
        hurt = bytearray(data)
        hurt[at] ^= 0x40
        with pytest.raises(SourceError, match="at byte 0: its checksum"):
            read(FORMAT, bytes(hurt), check=True)
        with pytest.raises(SourceError, match="at byte 0: its checksum"):
            FORMAT.parse_sample(bytes(hurt[: -len(FORMAT.trailer)]), "span", check=True)


@pytest.mark.parametrize("key", ["a.b", "a/.b", "__x__/a", "nul\0"])
def test_refuses_keys_that_webdataset_would_not_give_back(key: str) -> None:
    with pytest.raises(SourceError, match="cannot hold"):
        FORMAT.check_key(key)
    with pytest.raises(SourceError, match="cannot hold"):
        FORMAT.encode(Sample(key, JPEG, "jpg", 1))


@pytest.mark.parametrize("extension", ["jpg", "cls", "TXT", "a/b", "nul\0"])
def test_refuses_extras_that_would_not_come_back(extension: str) -> None:
    with pytest.raises(SourceError, match="cannot hold a member"):
        FORMAT.encode(Sample("a", JPEG, "jpg", 1, {extension: b""}))

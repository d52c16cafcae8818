"""The tar header walker, through both of its readers: tars in memory and tars in files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.sources.files import DOWNLOAD_AGAIN, OpenFile
from stoker.shards.sources.tarfiles import iter_files
from stoker.shards.tar_headers import BLOCK_BYTES, MemoryReader
from stoker.shards.tar_headers import iter_members as iter_headers

FORMATS = [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]


def make_header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT)


def make_extended(content: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    padding = bytes(-len(content) % BLOCK_BYTES)
    return make_header("extended", len(content), kind) + content + padding


def read_file(path: Path, data: bytes) -> list[tuple[str, int, int]]:
    """List the members through a file, at an offset inside of it."""
    surroundings = b"x" * 1000
    path.write_bytes(surroundings + data + surroundings)
    with OpenFile(path) as file:
        start, end = len(surroundings), len(surroundings) + len(data)
        return [(name, offset - start, size) for name, offset, size in iter_files(file, start, end)]


def read_memory(data: bytes, *, verify: bool = True) -> list[tuple[str, int, int]]:
    members = iter_headers(MemoryReader(memoryview(data)), "memory", verify=verify, reject_special=True)
    return [(path, offset, size) for _, path, offset, size, _ in members]


@pytest.mark.parametrize("tar_format", FORMATS)
def test_members_equal_those_of_tarfile(tmp_path: Path, tar_format: int) -> None:
    names = ["a.jpg", "deep/" * 15 + "b.jpg", "c" * 90 + ".jpg"]
    if tar_format != tarfile.USTAR_FORMAT:
        names += ["long/" * 60 + "d.jpg", "é" * 80 + ".jpg"]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        folder = tarfile.TarInfo("deep")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for size, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 512 * size, size + 0.5
            tar.addfile(info, io.BytesIO(bytes(512 * size)))
    data = out.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    assert [name for name, _, _ in expected] == names
    assert read_file(tmp_path / "a.tar", data) == expected
    assert read_memory(data) == read_memory(data, verify=False) == expected


def test_ustar_prefix_needs_the_posix_magic(tmp_path: Path) -> None:
    header = bytearray(make_header("deep/" * 25 + "a.jpg"))
    assert header[257:263] == b"ustar\0"
    assert header[345]
    posix = bytes(header) + bytes(1024)
    name = header[:100].rstrip(b"\0").decode()
    header[257:265] = b"ustar  \0"  # GNU tars store other fields in place of the prefix
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    gnu = bytes(header) + bytes(1024)
    for read in (read_memory, lambda data: read_file(tmp_path / "a.tar", data)):
        assert read(posix) == [("deep/" * 25 + "a.jpg", 512, 0)]
        assert read(gnu) == [(name, 512, 0)]


def test_extended_headers_of_solaris_are_read_like_pax(tmp_path: Path) -> None:
    data = make_extended(b"10 path=b\n", tarfile.SOLARIS_XHDTYPE) + make_header("a.jpg") + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["b"]
    assert read_file(tmp_path / "a.tar", data) == read_memory(data) == [("b", 1536, 0)]


def test_size_in_a_pax_record(tmp_path: Path) -> None:
    record = b"12 size=700\n"
    data = make_extended(record) + make_header("a.jpg") + bytes(1024) + bytes(1024)
    assert read_file(tmp_path / "a.tar", data) == read_memory(data) == [("a.jpg", 1536, 700)]
    damaged = data.replace(record, b"zz size=700\n")
    with pytest.raises(SourceError, match="PAX header at byte 1000 "):
        read_file(tmp_path / "a.tar", damaged)
    with pytest.raises(SourceError, match="PAX header at byte 0 "):
        read_memory(damaged)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"Z"])
def test_special_members_are_rejected(tmp_path: Path, kind: bytes) -> None:
    data = make_header("a.jpg", kind=kind) + bytes(1024)
    with pytest.raises(SourceError, match=r"'a\.jpg' at byte 1000 "):
        read_file(tmp_path / "a.tar", data)
    with pytest.raises(SourceError, match=r"'a\.jpg' at byte 0 "):
        read_memory(data)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (make_header("a.jpg", kind=tarfile.GNUTYPE_SPARSE), "sparse"),
        (make_extended(b"22 GNU.sparse.major=1\n") + make_header("a.jpg"), "sparse"),
        (make_extended(b"10 path=b\n", tarfile.XGLTYPE) + make_header("a.jpg"), "global PAX header"),
        (make_extended(b"10 size=7\n", tarfile.XGLTYPE) + make_header("a.jpg"), "global PAX header"),
        (make_extended(b"10 path=b\n"), "extended header"),
        (make_header("long", 2 << 20, tarfile.GNUTYPE_LONGNAME) + bytes(2 << 20), "2097152 bytes"),
        (make_header("a.jpg")[:147] + b"7" + make_header("a.jpg")[148:], "checksum"),
    ],
)
def test_hostile_headers_are_rejected_by_both_readers(tmp_path: Path, data: bytes, part: str) -> None:
    for read in (read_memory, lambda data: read_file(tmp_path / "a.tar", data)):
        with pytest.raises(SourceError, match=part):
            read(data + bytes(1024))


def test_truncated_file_gets_the_hint_to_download_it_again(tmp_path: Path) -> None:
    data = make_header("a.jpg", 600) + bytes(1024) + bytes(1024)
    for end in (0, 300, 512, 1000, 1536):
        with pytest.raises(SourceError, match=f"truncated at byte {1000 + end}:") as caught:
            read_file(tmp_path / "a.tar", data[:end])
        assert caught.value.hint == DOWNLOAD_AGAIN
        with pytest.raises(SourceError, match=f"truncated at byte {end}:"):
            read_memory(data[:end])


def test_checksum_of_signed_bytes_is_accepted(tmp_path: Path) -> None:
    header = bytearray(make_header("é.jpg"))
    unsigned = int(header[148:154], 8)
    signed = unsigned - 256 * sum(byte > 127 for byte in header)
    assert signed != unsigned
    header[148:156] = b"%06o\0 " % signed
    data = bytes(header) + bytes(1024)
    assert read_file(tmp_path / "a.tar", data) == read_memory(data) == [("é.jpg", 512, 0)]

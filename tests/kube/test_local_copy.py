"""Copies of volumes: an untrusted archive writes nothing outside, and a copy replaces only with --force."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from stoker.errors import ConflictError
from stoker.kube.local_copy import extract_tar, move_into_place


def build_tar(*members: tuple[str, bytes | str | int]) -> io.BytesIO:
    """Build an archive of files (bytes), symbolic links (text), and hard links or devices (a type as number)."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                file.addfile(member)
            else:
                member.type, member.linkname = str(content).encode(), "/etc/passwd"
                file.addfile(member)
    archive.seek(0)
    return archive


def test_extract_tar(tmp_path: Path) -> None:
    result = extract_tar(build_tar(("./a/b", b"12"), ("./c", b"345"), ("./a/link", "../c")), tmp_path)
    assert (result.files, result.size, result.skipped) == (2, 5, ())
    assert (tmp_path / "a/link").read_bytes() == b"345"


def test_extract_tar_writes_nothing_outside(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    hardlink, device, fifo = 1, 3, 6
    result = extract_tar(
        build_tar(
            ("../evil", b"x"),
            ("out", ".."),
            ("out/evil", b"x"),
            ("abs", "/etc"),
            ("up", "a/../../x"),
            ("hard", hardlink),
            ("null", device),
            ("pipe", fifo),
            ("good", b"y"),
        ),
        folder,
    )
    assert sorted(result.skipped) == ["../evil", "abs", "hard", "null", "out", "pipe", "up"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["evil", "good", "in", "out"]
    assert (folder / "out/evil").read_bytes() == b"x"
    assert not (folder / "out").is_symlink()


def test_link_is_not_followed_to_create_another(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    result = extract_tar(build_tar(("a", "deep"), ("a/b", ".."), ("deep/c", "../..")), folder)
    assert result.skipped == ("deep/c",)
    assert sorted(tmp_path.iterdir()) == [folder]


def test_truncated_tar_is_an_error(tmp_path: Path) -> None:
    archive = build_tar(("a", b"x" * 5000)).getvalue()
    with pytest.raises(tarfile.TarError):
        extract_tar(io.BytesIO(archive[:3000]), tmp_path)


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("was_folder", [True, False])
def test_existing_target_is_replaced_only_with_force(tmp_path: Path, is_folder: bool, was_folder: bool) -> None:
    copy, target = tmp_path / "copy", tmp_path / "target"
    for path, folder in ((copy, is_folder), (target, was_folder)):
        if folder:
            path.mkdir()
            (path / path.name).touch()
        else:
            path.write_text(path.name)
    with pytest.raises(ConflictError, match="--force") as caught:
        move_into_place(copy, target, force=False)
    assert caught.value.where == str(target)
    move_into_place(copy, target, force=True)
    assert os.listdir(tmp_path) == ["target"]
    assert os.listdir(target) == ["copy"] if is_folder else target.read_text() == "copy"

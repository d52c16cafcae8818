"""Local side of `stoker volume inspect get`: extract an untrusted tar stream and move the copy into place."""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stoker.errors import ConflictError


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What was copied, and where to."""

    path: Path
    files: int
    size: int
    skipped: tuple[str, ...] = ()
    """Members that would be placed, or link, outside of the folder, or that are not regular files."""


def resolve_local_target(to: Path, name: str, *, force: bool = False) -> Path:
    """Return where a copy goes, as `cp` does: into an existing folder, under its own name; raise if it exists."""
    target = to / name if to.is_dir() else to
    _check_absent(target, force=force)
    return target


def _check_absent(target: Path, *, force: bool) -> None:
    if os.path.lexists(target) and not force:
        raise ConflictError("already exists", where=target, hint="choose another destination, or use --force")


def extract_tar(stream: BinaryIO, to: Path) -> CopyResult:
    """Extract an untrusted archive: skip members that would leave the folder, and special files."""
    files, size, links, skipped = 0, 0, [], []
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.issym():
                links.append(member)  # created last, so that no file is ever written through one
                continue
            try:
                archive.extract(member, to, filter="data")
            except (tarfile.FilterError, tarfile.ExtractError, KeyError):  # KeyError: hard link to a skipped member
                skipped.append(member.name)
                continue
            if member.isfile():
                files, size = files + 1, size + member.size
    skipped += [link.name for link in links if not _create_link(link, to)]
    return CopyResult(to, files, size, tuple(skipped))


def _create_link(member: tarfile.TarInfo, to: Path) -> bool:
    """Create a symbolic link that stays within the folder; return whether it was created."""
    name = posixpath.normpath(member.name)
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
    if any(posixpath.isabs(path) or path == ".." or path.startswith("../") for path in (name, target)):
        return False
    link = to / name
    if not link.parent.resolve().is_relative_to(to.resolve()):
        return False
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(member.linkname)
    except OSError:
        return False
    return True


def move_into_place(copy: Path, target: Path, *, force: bool) -> None:
    """Rename a finished copy to its target; remove what was there only once the copy has replaced it."""
    _check_absent(target, force=force)  # it may have appeared while copying
    old = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.old")
    if os.path.lexists(target) and (target.is_dir() or copy.is_dir()):
        target.rename(old)
    try:
        copy.replace(target)
    except BaseException:
        if os.path.lexists(old):
            old.rename(target)
        raise
    remove_path(old)


def remove_path(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Tar archives with any members and header fields."""

from __future__ import annotations

import io
import tarfile


def make_tar(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT, **fields: object) -> bytes:
    """Return an archive of these files; `fields` are set in every header."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()

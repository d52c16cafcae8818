"""A folder as a site: files by ranges, folders as JSON, and PUT and DELETE where that was asked for."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from stoker.errors import AccessError, FullError, StokerError
from stoker.serve.http import OpenFile, RefusedError, Reply, Request
from stoker.serve.ranges import Version, asked
from stoker.storage.local import LocalStore, is_temporary

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO)


class FileSite:
    """Serves what lies below a folder, links followed only as long as they stay inside."""

    def __init__(self, root: Path, *, writable: bool = False) -> None:
        self._root = root.resolve(strict=True)
        self._writable = writable

    def __call__(self, request: Request) -> Reply:
        """Answer one request."""
        match request.method:
            case "GET" | "HEAD":
                return self._get(request)
            case "PUT" if self._writable:
                return self._put(request)
            case "DELETE" if self._writable:
                return self._delete(request)
            case "PUT" | "DELETE":
                return Reply.text(405, "this server is read-only", Allow="GET, HEAD")
        return Reply.text(405, Allow="GET, HEAD, PUT, DELETE" if self._writable else "GET, HEAD")

    def _get(self, request: Request) -> Reply:
        body = OpenFile(self._open(request.path))
        try:
            status = os.fstat(body.file)
            if stat.S_ISDIR(status.st_mode):
                return self._folder(request.path, body)
            if not stat.S_ISREG(status.st_mode) or request.path.endswith("/"):
                raise RefusedError(404, "no such file")
        except BaseException:
            body.close()
            raise
        version = Version(status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}"', status.st_mtime)
        part = asked(request.method, request.headers, version)
        headers = version.headers() | part.headers(version.size) | {"Content-Type": "application/octet-stream"}
        return Reply(part.status, headers, body.part(part.start, part.length), part.length)

    def _open(self, path: str) -> int:
        """Open what a path means; where that truly lies is asked of the open file, so that no link can change it."""
        try:
            file = os.open(self._root / path[1:], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _ABSENT:
                raise RefusedError(404, "no such file") from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise RefusedError(403, "this file cannot be read") from None
            raise RefusedError(500, "this file cannot be opened") from None
        true = Path(f"/proc/self/fd/{file}").readlink()
        if true != self._root and self._root not in true.parents:
            os.close(file)
            raise RefusedError(404, "no such file")
        return file

    def _folder(self, path: str, folder: OpenFile) -> Reply:
        """List a folder as nginx does under `autoindex_format json`; links that leave are not there."""
        if not path.endswith("/"):
            folder.close()
            return Reply.text(301, Location=quote(path) + "/")
        rows = []
        for name in sorted(os.listdir(folder.file)):
            with suppress(OSError):  # gone meanwhile, or a link to nowhere
                about = os.stat(name, dir_fd=folder.file, follow_symlinks=False)
                if stat.S_ISLNK(about.st_mode):
                    about = self._inside(self._root / path[1:] / name).stat()
                row: dict[str, object] = {"name": name, "type": "directory"}
                if stat.S_ISREG(about.st_mode):
                    row |= {"type": "file", "size": about.st_size}
                if not is_temporary(name) and (stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode)):
                    rows.append(row)
        folder.close()
        data = json.dumps(rows).encode()
        return Reply(200, {"Content-Type": "application/json"}, (data,), len(data))

    def _inside(self, path: Path) -> Path:
        """Follow links, no further than the root."""
        true = path.resolve()
        if true != self._root and self._root not in true.parents:
            raise FileNotFoundError
        return true

    def _put(self, request: Request) -> Reply:
        """Write a file that appears whole or not at all."""
        target = self._target(request)
        if "content-length" not in request.headers:
            raise RefusedError(411, "PUT wants a Content-Length")
        if "content-range" in request.headers:
            raise RefusedError(400, "PUT wants a whole file")
        known = target.exists()
        if known and request.headers.get("if-none-match") == "*":
            raise RefusedError(412, "there is such a file already")
        with _told():
            LocalStore(str(target.parent)).write(target.name, request.body)
        return Reply(204 if known else 201)

    def _delete(self, request: Request) -> Reply:
        target = self._target(request)
        if not target.exists():
            raise RefusedError(404, "no such file")
        with _told():
            LocalStore(str(target.parent)).delete(target.name)
        return Reply(204)

    def _target(self, request: Request) -> Path:
        """Give the path to change; links on the way are followed no further than the root."""
        target = self._root / request.path[1:]
        if request.path.endswith("/") or target.is_dir():
            raise RefusedError(409, "is a folder")
        try:
            return self._inside(target.parent) / target.name
        except FileNotFoundError:
            raise RefusedError(404, "no such file") from None


@contextmanager
def _told() -> Iterator[None]:
    """Answer what the file system refuses."""
    try:
        yield
    except FullError:
        raise RefusedError(507, "no space left") from None
    except AccessError:
        raise RefusedError(403, "permission denied") from None
    except StokerError as error:
        raise RefusedError(409, error.what) from None

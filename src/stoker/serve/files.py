"""Handler that serves a folder: files with ranges, folder listings as JSON, and optionally PUT and DELETE."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from stoker.errors import AccessDeniedError, StokerError, StorageFullError
from stoker.serve.http import FileBody, HttpStatusError, Request, Response
from stoker.serve.ranges import ObjectVersion, evaluate_request
from stoker.storage.local import LocalStore, is_temporary

_NOT_FOUND_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO)


class FileHandler:
    """Request handler that serves the files below a folder; symlinks are followed only within it."""

    def __init__(self, root: Path, *, writable: bool = False) -> None:
        self._root = root.resolve(strict=True)
        self._writable = writable

    def __call__(self, request: Request) -> Response:
        """Handle one request."""
        match request.method:
            case "GET" | "HEAD":
                return self._get(request)
            case "PUT" if self._writable:
                return self._put(request)
            case "DELETE" if self._writable:
                return self._delete(request)
            case "PUT" | "DELETE":
                return Response.text(405, "this server is read-only", Allow="GET, HEAD")
        return Response.text(405, Allow="GET, HEAD, PUT, DELETE" if self._writable else "GET, HEAD")

    def _get(self, request: Request) -> Response:
        body = FileBody(self._open(request.path))
        try:
            status = os.fstat(body.file)
            if stat.S_ISDIR(status.st_mode):
                return self._list_folder(request.path, body)
            if not stat.S_ISREG(status.st_mode) or request.path.endswith("/"):
                raise HttpStatusError(404, "no such file")
        except BaseException:
            body.close()
            raise
        version = ObjectVersion(status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}"', status.st_mtime)
        selected = evaluate_request(request.method, request.headers, version)
        headers = version.headers() | selected.headers(version.size) | {"Content-Type": "application/octet-stream"}
        return Response(selected.status, headers, body.select(selected.start, selected.length), selected.length)

    def _open(self, path: str) -> int:
        """Open a path; check the location of the open file itself, so that a symlink cannot change meanwhile."""
        try:
            file = os.open(self._root / path[1:], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NOT_FOUND_ERRNOS:
                raise HttpStatusError(404, "no such file") from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise HttpStatusError(403, "permission denied") from None
            raise HttpStatusError(500, "cannot open the file") from None
        real_path = Path(f"/proc/self/fd/{file}").readlink()
        if real_path != self._root and self._root not in real_path.parents:
            os.close(file)
            raise HttpStatusError(404, "no such file")
        return file

    def _list_folder(self, path: str, folder: FileBody) -> Response:
        """List a folder like nginx with `autoindex_format json`; omit symlinks that leave the root."""
        if not path.endswith("/"):
            folder.close()
            return Response.text(301, Location=quote(path) + "/")
        rows = []
        for name in sorted(os.listdir(folder.file)):
            with suppress(OSError, UnicodeEncodeError):  # deleted meanwhile, a dangling symlink, or not UTF-8
                name.encode()
                status = os.stat(name, dir_fd=folder.file, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    status = _resolve_inside(self._root, self._root / path[1:] / name).stat()
                row: dict[str, object] = {"name": name, "type": "directory"}
                if stat.S_ISREG(status.st_mode):
                    row |= {"type": "file", "size": status.st_size}
                if not is_temporary(name) and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
                    rows.append(row)
        folder.close()
        data = json.dumps(rows).encode()
        return Response(200, {"Content-Type": "application/json"}, (data,), len(data))

    def _put(self, request: Request) -> Response:
        """Write a file atomically."""
        target = resolve_write_target(self._root, request.path)
        if "content-length" not in request.headers:
            raise HttpStatusError(411, "PUT needs a Content-Length")
        if "content-range" in request.headers:
            raise HttpStatusError(400, "PUT does not support Content-Range")
        exists = target.exists()
        if exists and request.headers.get("if-none-match") == "*":
            raise HttpStatusError(412, "file already exists")
        with _translate_write_errors():
            LocalStore(str(target.parent)).write(target.name, request.body)
        return Response(204 if exists else 201)

    def _delete(self, request: Request) -> Response:
        target = resolve_write_target(self._root, request.path)
        if not target.exists():
            raise HttpStatusError(404, "no such file")
        with _translate_write_errors():
            LocalStore(str(target.parent)).delete(target.name)
        return Response(204)


def resolve_write_target(root: Path, path: str) -> Path:
    """Return the file that a path names, with its folder resolved; raise HttpStatusError if it cannot be written."""
    target = root / path[1:]
    try:
        if path.endswith("/") or stat.S_ISDIR(_stat_mode(target)):
            raise HttpStatusError(409, "is a directory")
        folder = _resolve_inside(root, target.parent)
        if not stat.S_ISDIR(next(mode for parent in (folder, *folder.parents) if (mode := _stat_mode(parent)))):
            raise HttpStatusError(409, "a parent of this path is not a directory")
    except FileNotFoundError:
        raise HttpStatusError(404, "no such file") from None
    except PermissionError:
        raise HttpStatusError(403, "permission denied") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise HttpStatusError(400, "path is too long for the file system") from None
    return folder / target.name


def _stat_mode(path: Path) -> int:
    """Return the mode of a file, 0 if it does not exist. `Path.is_dir` hides other errors since Python 3.14."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise


def _resolve_inside(root: Path, path: Path) -> Path:
    """Resolve symlinks; raise FileNotFoundError if the path leaves the root or never ends."""
    try:
        resolved = path.resolve()
        resolved.stat()
    except RuntimeError:  # a symlink to itself, before Python 3.13
        raise FileNotFoundError from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError from None
    if resolved != root and root not in resolved.parents:
        raise FileNotFoundError
    return resolved


@contextmanager
def _translate_write_errors() -> Iterator[None]:
    """Convert errors of the file system into HTTP error responses."""
    try:
        yield
    except StorageFullError:
        raise HttpStatusError(507, "no space left") from None
    except AccessDeniedError:
        raise HttpStatusError(403, "permission denied") from None
    except StokerError as error:
        raise HttpStatusError(409, error.what) from None

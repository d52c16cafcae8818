"""S3, and what speaks its protocol, through obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store as Bucket

from stoker.errors import (
    AccessError,
    ChangedError,
    DataFaultError,
    InputError,
    MissingExtraError,
    NotFoundError,
    StokerError,
    UnavailableError,
)
from stoker.storage import Children, Entry, Tag, checked, folder_of, join
from stoker.storage.local import explained

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import ClientConfig, RetryConfig

_RETRY: RetryConfig = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=15),
    "backoff": {
        "init_backoff": timedelta(seconds=0.2),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    },
}
_CLIENT: ClientConfig = {
    "allow_http": True,  # an endpoint given as http:// is meant
    "connect_timeout": timedelta(seconds=3),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(hours=1),  # of a whole body, which may be large; a stalled one ends by read_timeout
}
_PART = 8 << 20
_owner: int | None = None
"""The process that obstore's threads run in, once it has used them."""
_TRUE = frozenset({"1", "true", "on", "yes", "y"})  # what obstore takes for true
_PUBLIC = "a public bucket needs AWS_SKIP_SIGNATURE=true"


class S3Store:
    """The objects below s3://bucket/prefix. Large files go up in parts, so that memory stays bounded."""

    def __init__(self, url: str) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket:
            raise InputError("names no bucket", where=url, hint="write s3://bucket/folder")
        self.url = url
        self._tried, provider = _credentials(url)
        try:
            self._bucket = Bucket(
                bucket,
                prefix=prefix.strip("/") or None,
                client_options=_CLIENT,
                retry_config=_RETRY,
                credential_provider=provider,
            )
        except BaseError as error:
            raise InputError(_report(error), where=url, hint="check the variables AWS_*") from error

    def get(self, name: str) -> bytes:
        """Read a whole object."""
        with self._explained(name):
            return obstore.get(self._bucket, checked(name)).bytes().to_bytes()

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, refuse those of another version."""
        if not length:
            return b""
        with self._explained(name):
            try:
                data = self._window(checked(name), start, length, etag)
            except BaseError as error:
                if _status(error) != 416:
                    raise
                data = b""
        if len(data) != length:
            what = f"wanted {length} bytes from {start}, got {len(data)}"
            raise DataFaultError(what, where=join(self.url, name))
        return data

    def size(self, name: str) -> int:
        """Tell an object's size in bytes."""
        with self._explained(name):
            return obstore.head(self._bucket, checked(name))["size"]

    def tag(self, name: str) -> Tag:
        """Tell which version of an object is there, by its ETag."""
        with self._explained(name):
            meta = obstore.head(self._bucket, checked(name))
        return Tag(meta["size"], meta["e_tag"] or "")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects whose name starts with `prefix`, in order of name."""
        # obstore's own prefix ends at a slash, ours anywhere.
        folder = folder_of(prefix)
        with self._explained(folder):
            for batch in obstore.list(self._bucket, folder or None):
                for meta in batch:
                    if meta["path"].startswith(prefix):
                        yield Entry(meta["path"], meta["size"])

    def children(self, folder: str) -> Children:
        """List one folder, whose name is empty or ends with a slash."""
        with self._explained(folder):
            found = obstore.list_with_delimiter(self._bucket, folder or None)
        files = [(meta["path"].removeprefix(folder), meta["size"]) for meta in found["objects"]]
        return [path.removeprefix(folder).strip("/") for path in found["common_prefixes"]], list(files)

    def put(self, name: str, source: bytes | Path) -> None:
        """Upload an object, which appears when its last part has arrived; then remove a source file."""
        if isinstance(source, Path):
            with explained(source):
                source.stat()
        with self._explained(name):
            obstore.put(self._bucket, checked(name), source, chunk_size=_PART, max_concurrency=4)
        if isinstance(source, Path):
            with explained(source):
                source.unlink()

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        with self._explained(name):
            obstore.delete(self._bucket, checked(name))

    def _window(self, name: str, start: int, length: int, etag: str) -> bytes:
        if not etag:
            return obstore.get_range(self._bucket, name, start=start, length=length).to_bytes()
        answer = obstore.get(self._bucket, name, options={"range": (start, start + length), "if_match": etag})
        if (answer.meta["e_tag"] or etag) != etag:
            raise ChangedError(where=join(self.url, name))  # from a server that takes no conditions
        return answer.bytes().to_bytes()

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        _refuse_fork(self.url)
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._explain(error, join(self.url, name) if name else self.url) from error

    def _explain(self, error: Exception, where: str) -> StokerError:
        report = _report(error)
        status = _status(error)
        if isinstance(error, PreconditionError):
            return ChangedError(where=where)
        if "<Code>NoSuchBucket</Code>" in report:
            return NotFoundError("no such bucket", where=where)
        if isinstance(error, FileNotFoundError) or status == 404:
            return NotFoundError("no such object", where=where)
        if status in (401, 403):
            return AccessError("permission denied", where=where, hint=self._tried)
        if "/latest/api/token" in report or "/latest/meta-data/" in report:
            return AccessError("no credentials", where=where, hint=self._tried)
        if status:
            message = re.search(r"<Message>(.*?)</Message>", report, re.DOTALL)
            reason = f": {message[1].strip()}" if message else ""
            return UnavailableError(f"the server answered {status}{reason}", where=where)
        if "HTTP error" in report:
            retries = re.search(r"after (\d+) retries", report)
            hint = f"tried {int(retries[1]) + 1 if retries else 1} times"
            return UnavailableError("the server does not answer", where=where, hint=hint)
        return UnavailableError(report, where=where)


def _report(error: Exception) -> str:
    """Give the part of obstore's message that is for people."""
    return str(error).partition("\n\nDebug source:")[0].removeprefix("Generic S3 error: ")


def _status(error: Exception) -> int | None:
    found = re.search(r"status code: (\d{3})", _report(error))
    return int(found[1]) if found else None


def _refuse_fork(url: str) -> None:
    """Refuse to wait for threads that did not come along when this process was forked."""
    global _owner
    _owner = _owner or os.getpid()
    if _owner != os.getpid():
        raise UnavailableError(
            "this process was forked from one that had used s3:// already, and cannot",
            where=url,
            hint="start it by forkserver or spawn (DataLoader: multiprocessing_context), or use s3:// only in workers",
        )


def _credentials(where: str) -> tuple[str, Boto3CredentialProvider | None]:
    """Say which credentials are tried; profiles, which obstore does not read, come through boto3."""
    profile = os.environ.get("AWS_PROFILE")
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return "tried AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", None
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE:
        return "sent no credentials, for AWS_SKIP_SIGNATURE is set", None
    if not profile and not Path("~/.aws").expanduser().is_dir():
        return f"tried the roles of this machine, for AWS_ACCESS_KEY_ID is not set; {_PUBLIC}", None
    try:
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        raise MissingExtraError("boto3", "s3", purpose="reading AWS profiles") from error
    tried = f"tried AWS_PROFILE={profile}" if profile else "tried the default profile of ~/.aws"
    try:
        return tried, Boto3CredentialProvider()
    except BotoCoreError as error:
        raise InputError(str(error), where=where, hint=tried) from error
    except ValueError as error:
        raise AccessError("no credentials", where=where, hint=f"{tried}; {_PUBLIC}") from error

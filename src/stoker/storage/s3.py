"""S3 and S3-compatible object storage, through obstore."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store as Bucket

from stoker.core.units import pluralize
from stoker.errors import (
    AccessDeniedError,
    InputError,
    MissingExtraError,
    NotFoundError,
    ObjectChangedError,
    StokerError,
    UnavailableError,
    VerificationError,
)
from stoker.storage import (
    MAX_GET_BYTES,
    Entry,
    FolderListing,
    ListingLimits,
    ObjectMeta,
    check_name,
    join_url,
    prefix_folder,
    too_large_error,
)
from stoker.storage.local import translate_os_errors

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ListResult
    from obstore import ObjectMeta as Meta
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")

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
    "allow_http": True,  # for endpoints that are set as http://
    "connect_timeout": timedelta(seconds=3),
    "read_timeout": timedelta(seconds=30),
}
_BODY_TIMEOUT = timedelta(hours=1)  # of a whole body, which may be large; read_timeout catches a stalled one
METADATA_TIMEOUT_S = 60.0
"""How long the metadata of an object, or the next objects of a listing, may take."""
FOLDER_TIMEOUT_S = 180.0
"""How long the list of one folder may take: obstore requests its pages, of 1,000 objects, in a single call."""
_READ_BYTES = 8 << 20
_LISTED_AT_ONCE = 1000
_MAX_MESSAGE_LENGTH = 300
_UPLOAD_PART_BYTES = 8 << 20
_runtime_pid: int | None = None
"""The process in which obstore's runtime threads were started, once it was used."""
_TRUE_VALUES = frozenset({"1", "true", "on", "yes", "y"})  # as obstore parses them
# Text in obstore's report of a request without a response, and what to call it.
_FAILURES = (
    ("Connection refused", "connection refused"),
    ("dns error", "could not resolve host name"),
    ("TimedOut", "request timed out"),
)
_PUBLIC_BUCKET_HINT = "for a public bucket, set AWS_SKIP_SIGNATURE=true"


class S3Store:
    """The objects below s3://bucket/prefix. Large files use multipart uploads, so that memory stays bounded."""

    def __init__(self, url: str) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket:
            raise InputError("URL has no bucket", where=url, hint="use s3://bucket/folder")
        self.url = url
        self._tried, provider = _find_credentials(url)

        def open_bucket(timeout: timedelta) -> Bucket:
            return Bucket(
                bucket,
                prefix=prefix.strip("/") or None,
                client_options={**_CLIENT, "timeout": timeout},
                retry_config=_RETRY,
                credential_provider=provider,
            )

        try:
            self._bucket = open_bucket(_BODY_TIMEOUT)
            self._metadata = open_bucket(timedelta(seconds=METADATA_TIMEOUT_S))
        except BaseError as error:
            raise InputError(_message(error), where=url, hint="check the AWS_* environment variables") from error

    def get(self, name: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Read a whole object; raise UnavailableError if it is larger than `max_bytes`."""
        with self._translate_errors(name):
            response = obstore.get(self._bucket, check_name(name))
            if response.meta["size"] > max_bytes:
                raise too_large_error(join_url(self.url, name), max_bytes)
            return self._read_body(name, response, max_bytes)

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, raise ObjectChangedError if the version differs."""
        if not length:
            return b""
        with self._translate_errors(name):
            try:
                data = self._get_range(check_name(name), start, length, etag)
            except BaseError as error:
                if _status_code(error) != 416:
                    raise
                data = b""
        if len(data) != length:
            what = f"expected {length} bytes at offset {start}, got {len(data)}"
            raise VerificationError(what, where=join_url(self.url, name))
        return data

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""
        with self._translate_errors(name):
            return obstore.head(self._metadata, check_name(name))["size"]

    def head(self, name: str) -> ObjectMeta:
        """Return an object's metadata by a HEAD request."""
        with self._translate_errors(name):
            meta = obstore.head(self._metadata, check_name(name))
        return ObjectMeta(meta["size"], meta["e_tag"] or "")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects whose name starts with `prefix`, sorted by name."""
        # obstore matches whole path segments only; our prefix may end within one.
        folder = prefix_folder(prefix)
        with self._translate_errors(folder):
            entries = _run(_list_objects(self._metadata, folder, ListingLimits(self.url)))
        return (entry for entry in entries if entry.name.startswith(prefix))

    def list_folder(self, folder: str) -> FolderListing:
        """List one folder (empty, or ending with a slash)."""
        with self._translate_errors(folder):
            listing = _run(_list_folder(self._metadata, folder))
        ListingLimits(self.url).add(objects=len(listing["objects"]) + len(listing["common_prefixes"]))
        files = [(meta["path"].removeprefix(folder), meta["size"]) for meta in listing["objects"]]
        return [path.removeprefix(folder).strip("/") for path in listing["common_prefixes"]], list(files)

    def put(self, name: str, source: bytes | Path) -> None:
        """Upload an object, which appears once its last part has arrived; then delete a source file."""
        if isinstance(source, Path):
            with translate_os_errors(source):
                source.stat()
        with self._translate_errors(name):
            obstore.put(self._bucket, check_name(name), source, chunk_size=_UPLOAD_PART_BYTES, max_concurrency=4)
        if isinstance(source, Path):
            with translate_os_errors(source):
                source.unlink()

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is not an error."""
        with self._translate_errors(name):
            obstore.delete(self._bucket, check_name(name))

    def _get_range(self, name: str, start: int, length: int, etag: str) -> bytes:
        options: GetOptions = {"range": (start, start + length)}
        response = obstore.get(self._bucket, name, options={**options, "if_match": etag} if etag else options)
        if etag and (response.meta["e_tag"] or etag) != etag:
            raise ObjectChangedError(where=join_url(self.url, name))  # the server ignored If-Match
        return self._read_body(name, response, length)

    def _read_body(self, name: str, response: GetResult, max_bytes: int) -> bytes:
        chunks, length = [], 0
        for chunk in response.stream(min_chunk_size=min(max_bytes + 1, _READ_BYTES)):
            chunks.append(chunk)
            length += len(chunk)
            if length > max_bytes:
                what = f"response is longer than {max_bytes:,} bytes, the maximum for this request"
                raise UnavailableError(what, where=join_url(self.url, name))
        return b"".join(chunks)

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        _check_not_forked(self.url)
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._to_error(error, join_url(self.url, name) if name else self.url) from error
        except (TimeoutError, ValueError) as error:  # obstore raises ValueError for a date in the year 20026
            what = str(error) if isinstance(error, TimeoutError) else "server sent an invalid response"
            raise UnavailableError(what, where=join_url(self.url, name) if name else self.url) from error

    def _to_error(self, error: Exception, where: str) -> StokerError:
        report = _message(error)
        status = _status_code(error)
        if isinstance(error, PreconditionError):
            return ObjectChangedError(where=where)
        if "<Code>NoSuchBucket</Code>" in report:
            return NotFoundError("no such bucket", where=where)
        if isinstance(error, FileNotFoundError) or status == 404:
            return NotFoundError("no such object", where=where)
        if status in (401, 403):
            return AccessDeniedError("permission denied", where=where, hint=self._tried)
        if "/latest/api/token" in report or "/latest/meta-data/" in report:
            return AccessDeniedError("no credentials", where=where, hint=self._tried)
        if status:
            message = re.search(r"<Message>(.*?)</Message>", report, re.DOTALL)
            reason = f": {_one_line(message[1])}" if message else ""
            return UnavailableError(f"server responded with HTTP {status}{reason}", where=where)
        if "HTTP error" in report:
            retries = re.search(r"after (\d+) retries", report)
            attempts = pluralize(int(retries[1]) + 1 if retries else 1, "attempt")
            cause = next((cause for text, cause in _FAILURES if text in str(error)), "no response from the server")
            return UnavailableError(f"{cause} ({attempts})", where=where)
        return UnavailableError(_one_line(report), where=where)


async def _list_objects(bucket: Bucket, folder: str, limits: ListingLimits) -> list[Entry]:
    """List all objects of a folder, as long as the server sends some in time."""
    entries: list[Entry] = []
    stream = obstore.list(bucket, folder or None, chunk_size=_LISTED_AT_ONCE)
    while True:
        try:
            batch = await _limit_time(anext(stream), METADATA_TIMEOUT_S, "server sent no more objects")
        except StopAsyncIteration:
            return entries
        limits.add(objects=len(batch))
        entries += [Entry(meta["path"], meta["size"]) for meta in batch]


async def _list_folder(bucket: Bucket, folder: str) -> ListResult[Sequence[Meta]]:
    pages = obstore.list_with_delimiter_async(bucket, folder or None)
    return await _limit_time(pages, FOLDER_TIMEOUT_S, "listing of the directory was not complete")


async def _limit_time(operation: Awaitable[T], seconds: float, failure: str) -> T:
    """Await an operation that may send any number of requests; raise TimeoutError with what it failed to do."""
    try:
        return await asyncio.wait_for(operation, seconds)
    except TimeoutError as error:
        raise TimeoutError(f"{failure} within {seconds:g} s") from error


def _run(operation: Coroutine[None, None, T]) -> T:
    """Run a coroutine in another thread, because the caller may have an event loop."""
    with ThreadPoolExecutor(1, "stoker-s3") as pool:
        return pool.submit(asyncio.run, operation).result()


def _message(error: Exception) -> str:
    """Return obstore's error message without its debug output."""
    return str(error).partition("\n\nDebug source:")[0].removeprefix("Generic S3 error: ")


def _one_line(text: str) -> str:
    """Return text that a server sent as it may be printed: short, in one line, without control characters."""
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]}…"


def _status_code(error: Exception) -> int | None:
    code = re.search(r"status code: (\d{3})", _message(error))
    return int(code[1]) if code else None


def _check_not_forked(url: str) -> None:
    """Raise in a forked process, where obstore's runtime threads do not exist and calls would block forever."""
    global _runtime_pid
    _runtime_pid = _runtime_pid or os.getpid()
    if _runtime_pid != os.getpid():
        raise UnavailableError(
            "s3:// cannot be used in a process forked after its parent used s3://",
            where=url,
            hint="use forkserver or spawn (DataLoader: multiprocessing_context), or use s3:// only in workers",
        )


def _find_credentials(where: str) -> tuple[str, Boto3CredentialProvider | None]:
    """Return which credentials are used, and a boto3 provider for profiles, which obstore does not read."""
    profile = os.environ.get("AWS_PROFILE")
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return "tried AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", None
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE_VALUES:
        return "sent no credentials because AWS_SKIP_SIGNATURE is set", None
    if not profile and not Path("~/.aws").expanduser().is_dir():
        return f"tried the instance role because AWS_ACCESS_KEY_ID is not set; {_PUBLIC_BUCKET_HINT}", None
    try:
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        raise MissingExtraError("boto3", "s3", purpose="reading AWS profiles") from error
    tried = f"tried AWS_PROFILE={profile}" if profile else "tried the default profile in ~/.aws"
    try:
        return tried, Boto3CredentialProvider()
    except BotoCoreError as error:
        raise InputError(str(error), where=where, hint=tried) from error
    except ValueError as error:
        raise AccessDeniedError("no credentials", where=where, hint=f"{tried}; {_PUBLIC_BUCKET_HINT}") from error

"""Google Cloud Storage through its JSON API, which emulators implement too."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, BinaryIO, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

import msgspec

from stoker.errors import AccessDeniedError, InputError, MissingExtraError, ObjectChangedError, UnavailableError
from stoker.storage import (
    MAX_GET_BYTES,
    MAX_PAGE_BYTES,
    Entry,
    FolderListing,
    ListingLimits,
    ObjectMeta,
    check_name,
    join_url,
    prefix_folder,
)
from stoker.storage.http_client import RETRIES, ByteRange, HttpClient, HttpResponse, exact_body, to_error
from stoker.storage.local import translate_os_errors

API_URL = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_UPLOAD_CHUNK_BYTES = 8 << 20  # the API requires a multiple of 256 KiB

T = TypeVar("T")


def open_gcs(url: str) -> GcsStore:
    """Open gs://bucket/prefix with the default credentials, or without any at STORAGE_EMULATOR_HOST."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return GcsStore(url, API_URL, load_credentials(url))
    host = emulator if "://" in emulator else f"http://{emulator}"
    return GcsStore(url, host, GoogleCredentials("sent no credentials because STORAGE_EMULATOR_HOST is set"))


class GcsStore:
    """The objects below gs://bucket/prefix. Uploads are chunked, so that memory stays bounded."""

    def __init__(self, url: str, api_url: str, credentials: GoogleCredentials) -> None:
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        if not bucket:
            raise InputError("URL has no bucket", where=url, hint="use gs://bucket/folder")
        self.url = url
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._api_url = api_url.rstrip("/")
        self._objects = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        self._credentials = credentials
        self._client = HttpClient(api_url)

    def get(self, name: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Read a whole object; raise UnavailableError if it is larger than `max_bytes`."""
        return self._request("GET", self._object_url(name, alt="media"), name, max_bytes=max_bytes).body

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, raise ObjectChangedError if the version differs."""
        if not length:
            return b""
        byte_range = ByteRange(start, length)
        address = self._object_url(name, alt="media", **({"ifGenerationMatch": etag} if etag else {}))
        response = self._request("GET", address, name, also=(206, 412, 416), byte_range=byte_range)
        if response.status == 412:
            raise ObjectChangedError(where=join_url(self.url, name))
        return exact_body(byte_range, response, join_url(self.url, name))

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""
        return self.head(name).size

    def head(self, name: str) -> ObjectMeta:
        """Return an object's metadata; its generation serves as the ETag."""
        response = self._request("GET", self._object_url(name, fields="size,generation"), name)
        meta = self._decode(response, _ObjectFields, name)
        return ObjectMeta(meta.size, meta.generation)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects whose name starts with `prefix`, sorted by name."""
        prefix_folder(prefix)  # rejects the names that every store rejects, though names are flat here
        for page in self._list_pages(prefix=self._prefix + prefix, fields="items(name,size),nextPageToken"):
            for item in page.items:
                name = item.name.removeprefix(self._prefix)
                if name and not name.endswith("/"):  # the console's placeholder for an empty folder
                    yield Entry(name, item.size)

    def list_folder(self, folder: str) -> FolderListing:
        """List one folder (empty, or ending with a slash)."""
        where = self._prefix + folder
        folders: list[str] = []
        files: list[tuple[str, int | None]] = []
        for page in self._list_pages(prefix=where, delimiter="/", fields="items(name,size),prefixes,nextPageToken"):
            folders += [name.removeprefix(where).strip("/") for name in page.prefixes]
            files += [(item.name.removeprefix(where), item.size) for item in page.items if item.name != where]
        return folders, files

    def _list_pages(self, **query: str) -> Iterator[_ListingPage]:
        """Yield the pages of a listing."""
        limits = ListingLimits(self.url)
        while True:
            address = f"{self._api_url}{self._objects}?{urlencode(query)}"
            response = self._request("GET", address, missing="no such bucket", max_bytes=MAX_PAGE_BYTES)
            page = self._decode(response, _ListingPage)
            limits.add(requests=1, objects=len(page.items) + len(page.prefixes))
            yield page
            if not page.next_page_token:
                return
            if page.next_page_token == query.get("pageToken"):
                raise UnavailableError("server sent the same page of the listing twice", where=self.url)
            query["pageToken"] = page.next_page_token

    def _decode(self, response: HttpResponse, kind: type[T], name: str = "") -> T:
        """Decode a JSON response."""
        try:
            return msgspec.json.decode(response.body, type=kind, strict=False)  # sizes are strings
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            where = join_url(self.url, name) if name else self.url
            raise UnavailableError("server sent an invalid JSON response", where=where) from error

    def put(self, name: str, source: bytes | Path) -> None:
        """Upload an object, which appears once its last chunk has arrived; then delete a source file."""
        if isinstance(source, bytes):
            self._upload(name, BytesIO(source), len(source))
            return
        with translate_os_errors(source), source.open("rb") as file:
            self._upload(name, file, source.stat().st_size)
        with translate_os_errors(source):
            source.unlink()

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is not an error."""
        self._request("DELETE", self._object_url(name), name, also=(204, 404))

    def _upload(self, name: str, file: BinaryIO, size: int) -> None:
        query = urlencode({"uploadType": "resumable", "name": self._prefix + check_name(name)})
        address = f"{self._api_url}/upload{self._objects}?{query}"
        created = self._request("POST", address, name, missing="no such bucket")
        session = self._check_same_server(urljoin(address, created.headers.get("Location", "")), name)
        start = stalls = 0
        while True:
            file.seek(start)
            chunk = file.read(_UPLOAD_CHUNK_BYTES)
            sent = f"{start}-{start + len(chunk) - 1}" if chunk else "*"
            headers = {"Content-Range": f"bytes {sent}/{size}"}
            response = self._request("PUT", session, name, also=(201, 308), headers=headers, body=chunk)
            if response.status != 308:
                return
            stored = re.fullmatch(r"bytes=0-([0-9]+)", response.headers.get("Range", ""))
            end = int(stored[1]) + 1 if stored else 0
            if start < end <= start + len(chunk):
                start, stalls = end, 0
                continue
            if stalls == RETRIES:
                what = f"upload stalled at byte {start} ({RETRIES + 1} attempts)"
                raise UnavailableError(what, where=join_url(self.url, name))
            time.sleep(0.2 * 2**stalls)
            stalls += 1

    def _check_same_server(self, address: str, name: str) -> str:
        """Return an upload session's URL; raise if it names another server, which would get the credentials."""
        own, other = urlsplit(self._api_url), urlsplit(address)
        if (other.scheme, other.netloc.lower()) != (own.scheme, own.netloc.lower()):
            raise UnavailableError(
                f"server redirected the upload to {other.scheme}://{other.hostname}, which must not get credentials",
                where=join_url(self.url, name),
            )
        return address

    def _object_url(self, name: str, **query: str) -> str:
        path = f"{self._api_url}{self._objects}/{quote(self._prefix + check_name(name), safe='')}"
        return f"{path}?{urlencode(query)}" if query else path

    def _request(
        self,
        method: str,
        address: str,
        name: str = "",
        *,
        also: tuple[int, ...] = (),
        missing: str = "no such object",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        byte_range: ByteRange | None = None,
        max_bytes: int = MAX_GET_BYTES,
    ) -> HttpResponse:
        where = join_url(self.url, name) if name else self.url
        sent = self._credentials.headers(method, address, where) | dict(headers or {})
        response = self._client.request(
            method, address, where=where, headers=sent, body=body, byte_range=byte_range, max_bytes=max_bytes
        )
        if response.status == 200 or response.status in also:
            return response
        raise to_error(response, where, missing=missing, tried=self._credentials.description)


class _ObjectFields(msgspec.Struct):
    size: Annotated[int, msgspec.Meta(ge=0)]
    name: str = ""
    generation: str = ""


class _ListingPage(msgspec.Struct, rename="camel"):
    items: list[_ObjectFields] = []
    prefixes: list[str] = []
    next_page_token: str = ""


class GoogleCredentials:
    """Google credentials, renewed when they expire, or none; `description` says which were tried."""

    def __init__(self, tried: str, credentials: Any = None) -> None:
        self.description = tried
        self._credentials = credentials
        self._lock = Lock()
        if credentials:
            self._errors = import_module("google.auth.exceptions")
            self._transport = import_module("google.auth.transport.urllib3").Request(HttpClient(API_URL).pool)

    def headers(self, method: str, address: str, where: str) -> dict[str, str]:
        """Return the headers that authenticate a request."""
        headers: dict[str, str] = {}
        if not self._credentials:
            return headers
        try:
            with self._lock:
                self._credentials.before_request(self._transport, method, address, headers)
        except self._errors.TransportError as error:
            raise UnavailableError("cannot reach Google's auth server", where=where, hint=self.description) from error
        except self._errors.GoogleAuthError as error:
            raise AccessDeniedError("Google rejected the credentials", where=where, hint=self.description) from error
        return headers


def load_credentials(url: str) -> GoogleCredentials:
    """Load Google's default credentials; without any, only public buckets can be read."""
    try:
        auth = import_module("google.auth")
        import_module("google.auth.transport.urllib3")
    except ImportError as error:
        raise MissingExtraError("google-auth", "gcs", purpose="reading and writing gs:// URLs") from error
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    tried = f"tried GOOGLE_APPLICATION_CREDENTIALS={file}" if file else "tried the default credentials"
    try:
        credentials, _ = auth.default(scopes=[_SCOPE])
    except auth.exceptions.DefaultCredentialsError as error:
        if file:
            raise InputError("invalid Google credentials", where=url, hint=tried) from error
        hint = "set GOOGLE_APPLICATION_CREDENTIALS or run: gcloud auth application-default login"
        return GoogleCredentials(f"found no Google credentials; {hint}")
    return GoogleCredentials(tried, credentials)

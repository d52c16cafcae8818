"""Google Cloud Storage by its JSON API, the one that emulators speak too: tests run what users run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urljoin, urlsplit

from stoker.errors import AccessError, ChangedError, InputError, MissingExtraError, UnavailableError
from stoker.storage import Children, Entry, Tag, checked, folder_of, join
from stoker.storage.http_client import RETRIES, Answer, Client, Window, exactly, refusal
from stoker.storage.local import explained

HOST = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_CHUNK = 8 << 20  # of an upload; the API wants a multiple of 256 KiB


def open_gcs(url: str) -> GcsStore:
    """Open gs://bucket/prefix with Google's default credentials, or at STORAGE_EMULATOR_HOST without any."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return GcsStore(url, HOST, log_in(url))
    host = emulator if "://" in emulator else f"http://{emulator}"
    return GcsStore(url, host, Login("sent no credentials, for STORAGE_EMULATOR_HOST is set"))


class GcsStore:
    """The objects below gs://bucket/prefix. Uploads go in chunks, so that memory stays bounded."""

    def __init__(self, url: str, host: str, login: Login) -> None:
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        if not bucket:
            raise InputError("names no bucket", where=url, hint="write gs://bucket/folder")
        self.url = url
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._host = host.rstrip("/")
        self._objects = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        self._login = login
        self._client = Client(host)

    def get(self, name: str) -> bytes:
        """Read a whole object."""
        return self._ask("GET", self._address(name, alt="media"), name).body

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, refuse those of another version."""
        if not length:
            return b""
        window = Window(start, length)
        address = self._address(name, alt="media", **({"ifGenerationMatch": etag} if etag else {}))
        answer = self._ask("GET", address, name, also=(206, 412, 416), window=window)
        if answer.status == 412:
            raise ChangedError(where=join(self.url, name))
        return exactly(window, answer, join(self.url, name))

    def size(self, name: str) -> int:
        """Tell an object's size in bytes."""
        return self.tag(name).size

    def tag(self, name: str) -> Tag:
        """Tell which version of an object is there, by its generation."""
        answer = json.loads(self._ask("GET", self._address(name, fields="size,generation"), name).body)
        return Tag(int(answer["size"]), str(answer.get("generation", "")))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the objects whose name starts with `prefix`, in order of name."""
        folder_of(prefix)  # refuses what every store refuses, though names here are flat
        for page in self._pages(prefix=self._prefix + prefix, fields="items(name,size),nextPageToken"):
            for item in page.get("items", ()):
                name = item["name"].removeprefix(self._prefix)
                if name and not name.endswith("/"):  # what the console puts down for an empty folder
                    yield Entry(name, int(item["size"]))

    def children(self, folder: str) -> Children:
        """List one folder, whose name is empty or ends with a slash."""
        where = self._prefix + folder
        folders: list[str] = []
        files: list[tuple[str, int | None]] = []
        for page in self._pages(prefix=where, delimiter="/", fields="items(name,size),prefixes,nextPageToken"):
            folders += [name.removeprefix(where).strip("/") for name in page.get("prefixes", ())]
            names = [(item["name"].removeprefix(where), int(item["size"])) for item in page.get("items", ())]
            files += [(name, size) for name, size in names if name]
        return folders, files

    def _pages(self, **query: str) -> Iterator[dict[str, Any]]:
        """Ask for a listing, page by page."""
        while True:
            address = f"{self._host}{self._objects}?{urlencode(query)}"
            page = json.loads(self._ask("GET", address, missing="no such bucket").body)
            yield page
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def put(self, name: str, source: bytes | Path) -> None:
        """Upload an object, which appears when its last chunk has arrived; then remove a source file."""
        if isinstance(source, bytes):
            self._upload(name, BytesIO(source), len(source))
            return
        with explained(source), source.open("rb") as file:
            self._upload(name, file, source.stat().st_size)
        with explained(source):
            source.unlink()

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._ask("DELETE", self._address(name), name, also=(204, 404))

    def _upload(self, name: str, file: BinaryIO, size: int) -> None:
        query = urlencode({"uploadType": "resumable", "name": self._prefix + checked(name)})
        address = f"{self._host}/upload{self._objects}?{query}"
        begun = self._ask("POST", address, name, missing="no such bucket")
        session = self._own(urljoin(address, begun.headers.get("Location", "")), name)
        start = stalls = 0
        while True:
            file.seek(start)
            chunk = file.read(_CHUNK)
            span = f"{start}-{start + len(chunk) - 1}" if chunk else "*"
            headers = {"Content-Range": f"bytes {span}/{size}"}
            answer = self._ask("PUT", session, name, also=(201, 308), headers=headers, body=chunk)
            if answer.status != 308:
                return
            kept = re.fullmatch(r"bytes=0-([0-9]+)", answer.headers.get("Range", ""))
            reached = int(kept[1]) + 1 if kept else 0
            if start < reached <= start + len(chunk):
                start, stalls = reached, 0
                continue
            if stalls == RETRIES:
                what, tried = f"the upload stands still at byte {start}", f"tried {RETRIES + 1} times"
                raise UnavailableError(what, where=join(self.url, name), hint=tried)
            time.sleep(0.2 * 2**stalls)
            stalls += 1

    def _own(self, address: str, name: str) -> str:
        """Refuse to go on at another server: it would be told the credentials."""
        here, there = urlsplit(self._host), urlsplit(address)
        if (there.scheme, there.netloc.lower()) != (here.scheme, here.netloc.lower()):
            raise UnavailableError(
                f"the server leads the upload to {there.scheme}://{there.hostname}, which gets no credentials",
                where=join(self.url, name),
            )
        return address

    def _address(self, name: str, **query: str) -> str:
        path = f"{self._host}{self._objects}/{quote(self._prefix + checked(name), safe='')}"
        return f"{path}?{urlencode(query)}" if query else path

    def _ask(
        self,
        method: str,
        address: str,
        name: str = "",
        *,
        also: tuple[int, ...] = (),
        missing: str = "no such object",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        window: Window | None = None,
    ) -> Answer:
        where = join(self.url, name) if name else self.url
        sent = self._login.headers(method, address, where) | dict(headers or {})
        answer = self._client.ask(method, address, where=where, headers=sent, body=body, window=window)
        if answer.status == 200 or answer.status in also:
            return answer
        raise refusal(answer, where, missing=missing, tried=self._login.tried)


class Login:
    """Google credentials, renewed as they expire, or none; says which were tried."""

    def __init__(self, tried: str, credentials: Any = None) -> None:
        self.tried = tried
        self._credentials = credentials
        self._lock = Lock()
        if credentials:
            self._errors = import_module("google.auth.exceptions")
            self._transport = import_module("google.auth.transport.urllib3").Request(Client(HOST).pool)

    def headers(self, method: str, address: str, where: str) -> dict[str, str]:
        """Give the headers that prove who asks."""
        headers: dict[str, str] = {}
        if not self._credentials:
            return headers
        try:
            with self._lock:
                self._credentials.before_request(self._transport, method, address, headers)
        except self._errors.TransportError as error:
            raise UnavailableError("Google's login does not answer", where=where, hint=self.tried) from error
        except self._errors.GoogleAuthError as error:
            raise AccessError("permission denied at Google's login", where=where, hint=self.tried) from error
        return headers


def log_in(url: str) -> Login:
    """Find Google's default credentials; without any, only public buckets can be read."""
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
            raise InputError("the Google credentials cannot be used", where=url, hint=tried) from error
        hint = "set GOOGLE_APPLICATION_CREDENTIALS or run: gcloud auth application-default login"
        return Login(f"found no Google credentials; {hint}")
    return Login(tried, credentials)

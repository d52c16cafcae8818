"""A web server whose one object can stall, break off and change, and processes that read it through a disk cache."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.storage import Store
from stoker.storage.cache import DiskCache
from stoker.storage.local import LocalStore
from tests.support.servers import RecordedRequest, Reply

CHUNK = 1 << 10
DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()
DAMAGED = DATA[:-1] + b"\x00"
TIMEOUT_S = 60.0
PRELUDE = """
import hashlib, json, os, random, sys, threading, time
from pathlib import Path
from stoker.storage import cache as disk_cache, open_store
from stoker.storage.cache import DiskCache
disk_cache.CHUNK_BYTES = 1 << 10
def report(text):
    print(text, flush=True)
"""


class ScriptedObject:
    """Script of a web server with one file, `a`: it can stall or break off at a byte, and the file can change."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.etag = data, '"1"'
        self.range_starts: list[int] = []
        """The first byte of each range request."""
        self.breaks_at = self.stalls_at = len(data)
        self.gate = threading.Event()
        self.pause_s = 0.0
        self.before_reply: Callable[[int], None] = lambda _: None

    def __call__(self, request: RecordedRequest, number: int) -> Reply:
        headers = {"ETag": self.etag} if self.etag else {"ETag": "", "Last-Modified": ""}
        if request.method == "HEAD":
            return Reply(200, self.data, headers)
        requested = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", request.headers["range"])
        assert requested
        start, stop = int(requested[1]), int(requested[2]) + 1
        self.before_reply(start)
        self.range_starts.append(start)
        if start >= self.stalls_at:
            self.gate.wait(TIMEOUT_S)
        time.sleep(self.pause_s)
        data = self.data
        headers = {"ETag": self.etag} if self.etag else {"ETag": "", "Last-Modified": ""}
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if start >= self.breaks_at:
            return Reply(206, data[start : stop - 100], headers, length=stop - start)
        return Reply(206, data[start:stop], headers)


class CountingStore(LocalStore):
    """A folder that counts whole reads, and returns or raises the given results first."""

    def __init__(self, folder: Path, *results: bytes | Exception) -> None:
        super().__init__(str(folder))
        self.results = list(results)
        self.whole = 0

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        if start == 0:
            self.whole += 1
            self.result = self.results.pop(0) if self.results else self.get(name)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result[start : start + length]


def read_cached(cache: DiskCache, store: Store, name: str = "train/a.tar", **options: object) -> bytes:
    """Read an object through a cache that must have space for it."""
    cached = cache.open(store, name, **options)  # type: ignore[arg-type]
    assert cached is not None
    with cached:
        return cached.path.read_bytes()


def list_cached_files(cache: DiskCache) -> list[str]:
    """List the copies and parts in a cache."""
    folder = cache.folder / "objects"
    return sorted(path.name for path in folder.iterdir() if path.name != "lock") if folder.exists() else []


def start_process(program: str, *args: object) -> subprocess.Popen[str]:
    """Start a Python program with the prelude in another process."""
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + program, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def kill_at_exit(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the processes that are still running at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


OPEN_PROGRAM = """
url, folder, sha256 = sys.argv[1:]
store = open_store(url)
cache = DiskCache(Path(folder))
report("ready")
sys.stdin.readline()
with cache.open(store, "a", sha256=sha256) as cached:
    report(hashlib.sha256(cached.path.read_bytes()).hexdigest())
"""

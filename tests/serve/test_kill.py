"""Kill drill of a cache and its readers with SIGKILL: every byte is right, nothing is corrupt, budgets hold.

Run as a program, this file is one of the readers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import pytest

from stoker.errors import StokerError
from stoker.serve.cache.slices import SLICE_BYTES, ObjectInfo
from stoker.storage import open_store, read_chunks
from stoker.storage.cache import DiskCache
from tests.support.http_origin import build_manifest, run_origin
from tests.support.http_requests import send_request
from tests.support.paths import ROOT
from tests.support.servers import free_port
from tests.support.threads import run_parallel
from tests.support.waiting import eventually

SHARED_BUDGET_BYTES, NODE_BUDGET_BYTES = 4 * SLICE_BYTES, 40 << 20
TIMEOUT_S = 120.0
SAMPLE_INTERVAL_S = 0.1


class ExpectedShard(NamedTuple):
    """A shard that a reader expects; some have no digest."""

    name: str
    size: int
    sha256: str


class Delivery(NamedTuple):
    """The bytes that a reader reports to have received."""

    name: str
    start: int
    length: int
    sha256: str


# --- Reader process


def run_reader(url: str, node: Path, shards: list[ExpectedShard], seed: int, out: IO[str]) -> None:
    """Read every shard in random order, through the node's cache or directly, and report what was delivered."""
    store, cache, rng = open_store(url), DiskCache(node, NODE_BUDGET_BYTES), random.Random(seed)
    for shard in rng.sample(shards, len(shards)):
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                start, data = 0, b""
                kind = rng.choice(("node", "node", "whole", "part"))
                cached = cache.open(store, shard.name, size=shard.size, sha256=shard.sha256) if kind == "node" else None
                if cached is not None:
                    with cached:
                        data = cached.path.read_bytes()
                elif kind == "part":
                    start = rng.randrange(shard.size)
                    data = store.range(shard.name, start, rng.randint(1, shard.size - start))
                else:
                    data = b"".join(read_chunks(store, shard.name, shard.size))
                break
            except StokerError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        delivery = Delivery(shard.name, start, len(data), hashlib.sha256(data).hexdigest())
        out.write(json.dumps(delivery) + "\n")
        out.flush()


# --- The drill


@dataclass
class DrillResult:
    """The result and problems of a drill."""

    seed: int
    cache_kills: int = 0
    reader_kills: int = 0
    bytes: int = 0
    deliveries: int = 0
    size_samples: int = 0
    max_shared_bytes: int = 0
    max_node_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class KillDrill:
    """A cache in front of an origin and its readers, which are killed and monitored."""

    folder: Path
    origin_url: str
    files: dict[str, bytes]
    rng: random.Random
    result: DrillResult
    port: int = field(default_factory=free_port)
    cache: subprocess.Popen[bytes] | None = None
    readers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while processes are started, killed or stopped."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def node(self) -> Path:
        return self.folder / "node"

    def start_cache(self) -> None:
        words = [
            "data",
            "cache",
            "--origin",
            self.origin_url,
            "--dir",
            self.shared,
            "--size",
            SHARED_BUDGET_BYTES,
            "--revalidate-after",
            1,
        ]
        words += ["--port", self.port, "--engine", "embedded"]
        with (self.folder / "cache.log").open("ab") as log:
            self.cache = subprocess.Popen([sys.executable, "-m", "stoker", *map(str, words)], stderr=log)

    def kill_cache(self) -> None:
        assert self.cache is not None
        self.cache.kill()
        self.cache.wait()

    def start_reader(self, number: int) -> None:
        self.started += 1
        out = self.folder / f"reader-{self.started}.out"
        command = [sys.executable, __file__, self.url, self.node, self.folder / "expected.json", self.started, out]
        with (self.folder / "readers.log").open("ab") as log:
            self.readers[number] = subprocess.Popen([str(word) for word in command], stderr=log, env=_environ())

    def repeat(self, kills: int) -> None:
        """Run three readers to completion, and kill one of them or the cache this many times meanwhile."""
        with self.lock:
            for number in range(3):
                self.start_reader(number)
        victims = self.rng.sample(["cache", "reader", "cache"] * -(-kills // 3), k=kills)
        interval = 3 * len(self.files) / (kills + 1)
        next_kill = self.rng.uniform(0, interval)
        while self.readers:
            time.sleep(self.rng.uniform(0.001, 0.03))
            with self.lock:
                for number, reader in list(self.readers.items()):
                    if reader.poll() is not None:
                        assert reader.returncode == 0, (self.folder / "readers.log").read_text()[-2000:]
                        del self.readers[number]
                if not victims or not self.readers or self.count_deliveries() < next_kill:
                    continue
                self.kill(victims.pop())
                # Sometimes kill again right after a restart.
                next_kill = self.count_deliveries() + (
                    0 if self.rng.random() < 0.2 else self.rng.uniform(0, 1.5 * interval)
                )

    def count_deliveries(self) -> int:
        """Count the deliveries of this repetition, including those to killed readers."""
        return sum(out.read_bytes().count(b"\n") for out in self.folder.glob("reader-*.out"))

    def kill(self, victim: str) -> None:
        """Kill the cache or a reader, and restart it at once."""
        if victim == "cache":
            self.kill_cache()
            self.start_cache()
            self.result.cache_kills += 1
            return
        number = self.rng.choice(list(self.readers))
        self.readers[number].kill()
        if self.readers[number].wait() == -signal.SIGKILL:  # otherwise it had just finished
            self.result.reader_kills += 1
            self.start_reader(number)

    def check_deliveries(self) -> None:
        """Compare all deliveries with the original data, including those to killed readers."""
        for out in sorted(self.folder.glob("reader-*.out")):
            for line in out.read_text().splitlines(keepends=True):
                if not line.endswith("\n"):  # killed while writing
                    continue
                delivery = Delivery(*json.loads(line))
                expected = self.files[f"/{delivery.name}"][delivery.start : delivery.start + delivery.length]
                self.result.deliveries += 1
                self.result.bytes += delivery.length
                if delivery.sha256 != hashlib.sha256(expected).hexdigest():
                    self.result.problems.append(f"delivered: {delivery}")
            out.unlink()

    def check_folders(self) -> None:
        """Compare both caches with the original data: every slice, and every copy of the node."""
        for path in (self.shared / "objects").glob("??/*/about.json"):
            info = msgspec.json.decode(path.read_bytes(), type=ObjectInfo)
            expected = self.files[info.name.removeprefix(self.origin_url)]
            parts = {int(part.name): part.read_bytes() for part in path.parent.glob("[0-9]*")}
            if info.verified and b"".join(parts[number] for number in sorted(parts)) != expected:
                self.result.problems.append(f"verified but wrong: {info.name}")
            for number, part in parts.items():
                if part != expected[number * SLICE_BYTES : (number + 1) * SLICE_BYTES]:
                    self.result.problems.append(f"slice {number} is wrong: {info.name}")
        digests = {hashlib.sha256(data).hexdigest() for data in self.files.values()}
        for copy in (self.node / "objects").iterdir():
            digest = hashlib.sha256(copy.read_bytes()).hexdigest()
            wrong = digest != copy.name if len(copy.name) == 64 else len(copy.name) == 40 and digest not in digests
            if wrong:
                self.result.problems.append(f"copy is wrong: {copy.name}")

    def check_hits(self) -> int:
        """Request everything from a cache whose origin is down; every hit and stale object must be right."""
        hits = []

        def read_paths(paths: list[str]) -> None:
            for path in paths:
                response = send_request(self.url, path)
                if response.status != 200:
                    continue
                hits.append(path)
                if response.headers["x-cache"] not in ("HIT", "STALE") or response.body != self.files[path]:
                    self.result.problems.append(f"served: {path} as {response.headers['x-cache']}")

        every = list(self.files)
        run_parallel([lambda paths=every[first::40]: read_paths(paths) for first in range(40)])  # type: ignore[misc]
        return len(hits)

    def wait_for_cache(self) -> None:
        """Wait until the cache is healthy."""
        if not eventually(self._is_healthy):
            raise TimeoutError((self.folder / "cache.log").read_text()[-2000:])

    def _is_healthy(self) -> bool:
        try:
            return send_request(self.url, "/-/healthy").status == 200
        except OSError:
            return False

    @contextmanager
    def monitor_budgets(self) -> Iterator[None]:
        """Check both budgets continuously."""
        stopped = threading.Event()

        def monitor() -> None:
            while not stopped.wait(SAMPLE_INTERVAL_S):
                with self.lock:
                    self._sample_sizes()

        thread = threading.Thread(target=monitor)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _sample_sizes(self) -> None:
        """Measure both folders while all processes are stopped, so that the sizes are consistent."""
        alive = [
            process
            for process in (self.cache, *self.readers.values())
            if process is not None and process.poll() is None
        ]
        for process in alive:
            process.send_signal(signal.SIGSTOP)
        try:
            if not all(_is_stopped(process.pid) for process in alive):
                return
            shared, node, result = folder_bytes(self.shared), folder_bytes(self.node), self.result
        finally:
            for process in alive:
                process.send_signal(signal.SIGCONT)
        result.size_samples += 1
        result.max_shared_bytes, result.max_node_bytes = (
            max(result.max_shared_bytes, shared),
            max(result.max_node_bytes, node),
        )
        if shared > SHARED_BUDGET_BYTES or node > NODE_BUDGET_BYTES:
            result.problems.append(f"budget: {shared:,} and {node:,} bytes")

    def kill_all(self) -> None:
        for process in (self.cache, *self.readers.values()):
            if process is not None:
                process.kill()
                process.wait()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all objects in a cache, in any state, without their metadata."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stem != "about")


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process stop soon; an exited process counts as stopped."""
    for _ in range(100):
        states = set()
        for task in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(OSError):
                states.add(task.read_text().rpartition(")")[2].split()[0])
        if states <= {"T", "Z", "X"}:
            return True
        time.sleep(0.002)
    return False


def _environ() -> dict[str, str]:
    root = str(ROOT)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def run_drill(folder: Path, *, count: int, large: int, repetitions: int, kills: int, seed: int) -> DrillResult:
    """Kill at random moments while `count` shards are read; half of them are listed in a manifest."""
    rng = random.Random(seed)
    sizes = [int(8_000 * 375 ** rng.random()) for _ in range(count - large)]
    sizes += [rng.randint(9_000_000, 20_000_000) for _ in range(large)]
    shards = {f"{number:06d}.tar": rng.randbytes(size) for number, size in enumerate(sizes)}
    listed = dict(list(shards.items())[::2])
    files = {f"/{'known' if name in listed else 'plain'}/{name}": data for name, data in shards.items()}
    expected = [
        ExpectedShard(path[1:], len(data), hashlib.sha256(data).hexdigest() if path.startswith("/known") else "")
        for path, data in files.items()
    ]
    (folder / "expected.json").write_text(json.dumps(expected))
    with run_origin(files | {"/known/manifest.json": build_manifest(listed)}) as origin:
        drill = KillDrill(folder, origin.url, files, rng, DrillResult(seed))
        try:
            drill.start_cache()
            drill.wait_for_cache()
            with drill.monitor_budgets():
                for _ in range(repetitions):
                    drill.repeat(kills)
                    drill.check_deliveries()
                    with drill.lock:
                        drill.kill_cache()
                        drill.check_folders()
                        drill.start_cache()
                        drill.result.cache_kills += 1
            drill.kill_cache()
            origin.status = 503  # the origin is down from here on
            drill.start_cache()
            drill.wait_for_cache()
            assert drill.check_hits() > 0
        finally:
            drill.kill_all()
    assert "Traceback" not in (folder / "cache.log").read_text()
    assert "Traceback" not in (folder / "readers.log").read_text()
    return drill.result


def check_result(result: DrillResult, *, deliveries: int) -> None:
    assert result.problems == [], result
    assert result.cache_kills > 3
    assert result.reader_kills > 0
    assert result.deliveries >= deliveries
    assert result.size_samples > 10
    assert result.max_shared_bytes > SHARED_BUDGET_BYTES // 2  # the budget was actually needed
    assert result.max_node_bytes > NODE_BUDGET_BYTES // 2


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    result = run_drill(tmp_path, count=30, large=3, repetitions=3, kills=3, seed=1)
    check_result(result, deliveries=3 * 3 * 30)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_at_random_moments_many_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started_at = time.monotonic()
    result = run_drill(tmp_path, count=200, large=5, repetitions=20, kills=6, seed=random.randrange(1 << 32))
    check_result(result, deliveries=20 * 3 * 200 + 500)  # deliveries to killed readers are checked too
    with capsys.disabled():
        sys.stdout.write(f"\n{result}, {time.monotonic() - started_at:.0f} s\n")


if __name__ == "__main__":
    _, url_, node_, expected_, seed_, out_ = sys.argv
    with open(out_, "x") as file_:
        run_reader(
            url_,
            Path(node_),
            [ExpectedShard(*shard) for shard in json.loads(Path(expected_).read_text())],
            int(seed_),
            file_,
        )

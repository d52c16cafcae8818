"""kill -9 of a cache and of its readers at random moments: every byte is right, nothing is poisoned, budgets hold.

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
from stoker.serve.cache.slices import SLICE, About
from stoker.storage import open_store, read_chunks
from stoker.storage.cache import Cache
from tests.serve.contract import ask, at_once, manifest, origin
from tests.support.paths import ROOT
from tests.support.servers import free_port

SHARED_BUDGET, NODE_BUDGET = 4 * SLICE, 40 << 20
PATIENCE_S = 120.0
STEP_S = 0.1


class Wanted(NamedTuple):
    """A shard as a reader knows it; of some no digest is known."""

    name: str
    size: int
    sha256: str


class Told(NamedTuple):
    """What a reader says that it got."""

    name: str
    start: int
    length: int
    sha256: str


# --- The reader, a process of its own


def read(url: str, node: Path, shards: list[Wanted], seed: int, out: IO[str]) -> None:
    """Read every shard in an order of its own, through the node's cache or past it, and tell what came."""
    store, cache, chance = open_store(url), Cache(node, NODE_BUDGET), random.Random(seed)
    for shard in chance.sample(shards, len(shards)):
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                start, data = 0, b""
                kind = chance.choice(("node", "node", "whole", "part"))
                held = cache.open(store, shard.name, size=shard.size, sha256=shard.sha256) if kind == "node" else None
                if held is not None:
                    with held:
                        data = held.path.read_bytes()
                elif kind == "part":
                    start = chance.randrange(shard.size)
                    data = store.range(shard.name, start, chance.randint(1, shard.size - start))
                else:
                    data = b"".join(read_chunks(store, shard.name, shard.size))
                break
            except StokerError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        told = Told(shard.name, start, len(data), hashlib.sha256(data).hexdigest())
        out.write(json.dumps(told) + "\n")
        out.flush()


# --- The drill


@dataclass
class Figures:
    """What a drill did."""

    seed: int
    cache_kills: int = 0
    reader_kills: int = 0
    bytes: int = 0
    deliveries: int = 0
    samples: int = 0
    most_shared: int = 0
    most_node: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Drill:
    """A cache in front of an origin, its readers, and who kills and watches them."""

    folder: Path
    far: str
    files: dict[str, bytes]
    chance: random.Random
    figures: Figures
    port: int = field(default_factory=free_port)
    cache: subprocess.Popen[bytes] | None = None
    readers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by who starts, ends or stops processes."""

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
        words = ["data", "cache", "--origin", self.far, "--dir", self.shared, "--size", SHARED_BUDGET, "--fresh", 1]
        words += ["--port", self.port, "--engine", "embedded"]
        with (self.folder / "cache.log").open("ab") as log:
            self.cache = subprocess.Popen([sys.executable, "-m", "stoker", *map(str, words)], stderr=log)

    def end_cache(self) -> None:
        assert self.cache is not None
        self.cache.kill()
        self.cache.wait()

    def start_reader(self, number: int) -> None:
        self.started += 1
        out = self.folder / f"reader-{self.started}.out"
        command = [sys.executable, __file__, self.url, self.node, self.folder / "wanted.json", self.started, out]
        with (self.folder / "readers.log").open("ab") as log:
            self.readers[number] = subprocess.Popen([str(word) for word in command], stderr=log, env=_environ())

    def repeat(self, kills: int) -> None:
        """Let three readers read everything, and kill one or the cache so many times while they read."""
        with self.lock:
            for number in range(3):
                self.start_reader(number)
        victims = self.chance.sample(["cache", "reader", "cache"] * -(-kills // 3), k=kills)
        every = 3 * len(self.files) / (kills + 1)
        due = self.chance.uniform(0, every)
        while self.readers:
            time.sleep(self.chance.uniform(0.001, 0.03))
            with self.lock:
                for number, reader in list(self.readers.items()):
                    if reader.poll() is not None:
                        assert reader.returncode == 0, (self.folder / "readers.log").read_text()[-2000:]
                        del self.readers[number]
                if not victims or not self.readers or self.delivered() < due:
                    continue
                self.kill(victims.pop())
                # Now and then what has just been started is killed again.
                due = self.delivered() + (0 if self.chance.random() < 0.2 else self.chance.uniform(0, 1.5 * every))

    def delivered(self) -> int:
        """Count what was delivered in this repetition, to readers who were killed too."""
        return sum(out.read_bytes().count(b"\n") for out in self.folder.glob("reader-*.out"))

    def kill(self, victim: str) -> None:
        """Kill the cache or a reader, and start it again at once."""
        if victim == "cache":
            self.end_cache()
            self.start_cache()
            self.figures.cache_kills += 1
            return
        number = self.chance.choice(list(self.readers))
        self.readers[number].kill()
        if self.readers[number].wait() == -signal.SIGKILL:  # else it had just finished
            self.figures.reader_kills += 1
            self.start_reader(number)

    def check_deliveries(self) -> None:
        """Compare all that readers say they got with the truth, those who were killed included."""
        for out in sorted(self.folder.glob("reader-*.out")):
            for line in out.read_text().splitlines(keepends=True):
                if not line.endswith("\n"):  # killed while it wrote
                    continue
                told = Told(*json.loads(line))
                truth = self.files[f"/{told.name}"][told.start : told.start + told.length]
                self.figures.deliveries += 1
                self.figures.bytes += told.length
                if told.sha256 != hashlib.sha256(truth).hexdigest():
                    self.figures.problems.append(f"delivered: {told}")
            out.unlink()

    def check_folders(self) -> None:
        """Compare what lies in both caches with the truth: every slice of an object, every copy of the node."""
        for path in (self.shared / "objects").glob("??/*/about.json"):
            about = msgspec.json.decode(path.read_bytes(), type=About)
            truth = self.files[about.name.removeprefix(self.far)]
            parts = {int(part.name): part.read_bytes() for part in path.parent.glob("[0-9]*")}
            if about.whole and b"".join(parts[number] for number in sorted(parts)) != truth:
                self.figures.problems.append(f"whole and wrong: {about.name}")
            for number, part in parts.items():
                if part != truth[number * SLICE : (number + 1) * SLICE]:
                    self.figures.problems.append(f"slice {number} is wrong: {about.name}")
        truths = {hashlib.sha256(data).hexdigest() for data in self.files.values()}
        for copy in (self.node / "objects").iterdir():
            digest = hashlib.sha256(copy.read_bytes()).hexdigest()
            wrong = digest != copy.name if len(copy.name) == 64 else len(copy.name) == 40 and digest not in truths
            if wrong:
                self.figures.problems.append(f"copy is wrong: {copy.name}")

    def check_hits(self) -> int:
        """Ask a cache whose origin is gone for everything; what it calls a hit or stale must be right."""
        hits = []

        def look(some: list[str]) -> None:
            for path in some:
                answer = ask(self.url, path)
                if answer.status != 200:
                    continue
                hits.append(path)
                if answer.headers["x-cache"] not in ("HIT", "STALE") or answer.body != self.files[path]:
                    self.figures.problems.append(f"served: {path} as {answer.headers['x-cache']}")

        paths = list(self.files)
        at_once([lambda some=paths[first::40]: look(some) for first in range(40)])  # type: ignore[misc]
        return len(hits)

    def await_cache(self) -> None:
        """Wait until the cache answers."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with suppress(OSError):
                if ask(self.url, "/-/healthy").status == 200:
                    return
            time.sleep(0.02)
        raise TimeoutError((self.folder / "cache.log").read_text()[-2000:])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at both budgets all the while."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(STEP_S):
                with self.lock:
                    self._sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _sample(self) -> None:
        """Count what lies in the folders while all processes stand still, so that it is of one moment."""
        alive = [one for one in (self.cache, *self.readers.values()) if one is not None and one.poll() is None]
        for one in alive:
            one.send_signal(signal.SIGSTOP)
        try:
            if not all(_stands(one.pid) for one in alive):
                return
            shared, node, figures = held(self.shared), held(self.node), self.figures
        finally:
            for one in alive:
                one.send_signal(signal.SIGCONT)
        figures.samples += 1
        figures.most_shared, figures.most_node = max(figures.most_shared, shared), max(figures.most_node, node)
        if shared > SHARED_BUDGET or node > NODE_BUDGET:
            figures.problems.append(f"budget: {shared:,} and {node:,} bytes")

    def end(self) -> None:
        for one in (self.cache, *self.readers.values()):
            if one is not None:
                one.kill()
                one.wait()


def held(folder: Path) -> int:
    """Add up the bytes of objects that lie in a cache, in whatever state; what is noted about them is not counted."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stem != "about")


def _stands(pid: int) -> bool:
    """Wait a moment for all threads of a process to stand; a process that is gone stands."""
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
    here = str(ROOT)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}


def drill(folder: Path, *, count: int, large: int, repetitions: int, kills: int, seed: int) -> Figures:
    """Kill at random moments of so many reads of `count` shards; half of them have a manifest, half have not."""
    chance = random.Random(seed)
    sizes = [int(8_000 * 375 ** chance.random()) for _ in range(count - large)]
    sizes += [chance.randint(9_000_000, 20_000_000) for _ in range(large)]
    made = {f"{number:06d}.tar": chance.randbytes(size) for number, size in enumerate(sizes)}
    known = dict(list(made.items())[::2])
    files = {f"/{'known' if name in known else 'plain'}/{name}": data for name, data in made.items()}
    wanted = [
        Wanted(path[1:], len(data), hashlib.sha256(data).hexdigest() if path.startswith("/known") else "")
        for path, data in files.items()
    ]
    (folder / "wanted.json").write_text(json.dumps(wanted))
    with origin(files | {"/known/manifest.json": manifest(known)}) as far:
        one = Drill(folder, far.url, files, chance, Figures(seed))
        try:
            one.start_cache()
            one.await_cache()
            with one.watched():
                for _ in range(repetitions):
                    one.repeat(kills)
                    one.check_deliveries()
                    with one.lock:
                        one.end_cache()
                        one.check_folders()
                        one.start_cache()
                        one.figures.cache_kills += 1
            one.end_cache()
            far.status = 503  # from here on the origin is gone
            one.start_cache()
            one.await_cache()
            assert one.check_hits() > 0
        finally:
            one.end()
    assert "Traceback" not in (folder / "cache.log").read_text()
    assert "Traceback" not in (folder / "readers.log").read_text()
    return one.figures


def check(figures: Figures, *, deliveries: int) -> None:
    assert figures.problems == [], figures
    assert figures.cache_kills > 3
    assert figures.reader_kills > 0
    assert figures.deliveries >= deliveries
    assert figures.samples > 10
    assert figures.most_shared > SHARED_BUDGET // 2  # so that it was a budget at all
    assert figures.most_node > NODE_BUDGET // 2


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    figures = drill(tmp_path, count=30, large=3, repetitions=3, kills=3, seed=1)
    check(figures, deliveries=3 * 3 * 30)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_at_random_moments_many_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    figures = drill(tmp_path, count=200, large=5, repetitions=20, kills=6, seed=random.randrange(1 << 32))
    check(figures, deliveries=20 * 3 * 200 + 500)  # those to readers who were killed amid are checked too
    with capsys.disabled():
        sys.stdout.write(f"\n{figures}, {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    _, url_, node_, wanted_, seed_, out_ = sys.argv
    with open(out_, "x") as file_:
        read(url_, Path(node_), [Wanted(*one) for one in json.loads(Path(wanted_).read_text())], int(seed_), file_)

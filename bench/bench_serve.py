"""Shards over loopback to four curls at once: our server and cache beside nginx; then many clients at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from measure import STOKER, Contestant, Lab, Limit, Ran, Result, Versus, command, take_turns

NGINX = "nginx, static files"
EMBEDDED = "stoker data serve, embedded"
HITS = "stoker data cache, embedded, hits"
NGINX_HITS = "stoker data cache, nginx, hits"
HTTP_SERVER = "python -m http.server"

CURLS = 4
MOST_BYTES = 500_000_000
MANY, MANY_S = 256, 20
SOME = 64


def run(lab: Lab) -> Result:
    if shutil.which("curl") is None:
        raise RuntimeError("curl is not installed")
    shards = lab.work / "shards"
    shutil.rmtree(shards, ignore_errors=True)
    samples = min(lab.samples, lab.samples * MOST_BYTES // lab.bytes)
    command(STOKER, "data", "convert", "--shard-size", "64MiB", "--limit", str(samples), lab.images, shards)
    names = sorted(path.name for path in (shards / "train").glob("*.tar"))
    amount = CURLS * sum((shards / "train" / name).stat().st_size for name in names) / 1e6

    def reading(url: str) -> Ran:
        """Let every curl read every shard; all begin together, each with another one."""
        orders = [names[shift * len(names) // CURLS :] + names[: shift * len(names) // CURLS] for shift in range(CURLS)]
        began = time.perf_counter()
        curls = [
            subprocess.Popen(
                ["curl", "-sSf", *[word for name in order for word in ("-o", "/dev/null", f"{url}/{name}")]]
            )
            for order in orders
        ]
        codes = [curl.wait() for curl in curls]
        if any(codes):
            raise RuntimeError(f"curl failed with {codes} on {url}")
        return Ran(time.perf_counter() - began)

    with ExitStack() as stack:
        plain = stack.enter_context(serving(STOKER, "data", "serve", shards, "--port", "0", "--engine", "nginx"))
        ours = stack.enter_context(serving(STOKER, "data", "serve", shards, "--port", "0", "--engine", "embedded"))
        caches = [
            stack.enter_context(
                serving(
                    *(STOKER, "data", "cache", "--origin", plain.url, "--dir", lab.work / f"cache-{engine}"),
                    *("--size", "2GiB", "--port", "0", "--engine", engine, "--fresh", "3600"),
                )
            )
            for engine in ("embedded", "nginx")
        ]
        simple = stack.enter_context(http_server(shards))
        contestants = [
            Contestant(name=NGINX, act=lambda: reading(f"{plain.url}/train")),
            Contestant(name=EMBEDDED, act=lambda: reading(f"{ours.url}/train"), ours=True),
            Contestant(name=HITS, act=lambda: reading(f"{caches[0].url}/train"), ours=True),
            Contestant(name=NGINX_HITS, act=lambda: reading(f"{caches[1].url}/train"), info=True),
            Contestant(name=HTTP_SERVER, act=lambda: reading(f"{simple}/train"), info=True),
        ]
        speeds, _ = take_turns(contestants, lab.rounds, amount)
        some = loadtest(f"{ours.url}/train", SOME, 5)
        peak = ours.peak_bytes()
        held = {
            name: loadtest(f"{url}/train", MANY, MANY_S) for name, url in ((EMBEDDED, ours.url), (HITS, caches[0].url))
        }
    for folder in (shards, lab.work / "cache-embedded", lab.work / "cache-nginx"):
        shutil.rmtree(folder)
    return Result(
        name="serve",
        title=f"Shards over loopback to {CURLS} curls at once",
        unit="MB/s",
        contestants=contestants,
        speeds=speeds,
        versus=[
            Versus(ours=EMBEDDED, peer=NGINX, target=0.7),
            Versus(ours=HITS, peer=NGINX, target=0.6),
            Versus(ours=NGINX_HITS, peer=NGINX),
            Versus(ours=EMBEDDED, peer=HTTP_SERVER),
        ],
        limits=[
            Limit(
                what=f"Peak memory of `{EMBEDDED}` with {SOME} clients ({some['bytes_per_s'] / 1e6:,.0f} MB/s)",
                value=peak / 1e6,
                bound=150,
                unit="MB",
            ),
            *(
                Limit(
                    what=f"Errors of `{name}` with {MANY} clients for {MANY_S} s "
                    f"({one['requests']:,} files, {one['bytes_per_s'] / 1e6:,.0f} MB/s, p99 {one['p99_s'] or 0:.2f} s)",
                    value=one["errors"],
                    bound=0,
                    unit="errors",
                )
                for name, one in held.items()
            ),
        ],
        notes=[
            f"{len(names)} shards, {amount / CURLS:,.0f} MB, read whole by each of {CURLS} curls, in its own "
            "order, to /dev/null; the start of the curls counts. Servers run all the time, one at work. nginx as "
            "`stoker data serve --engine nginx` sets it up; caches are warm after the round that does not count.",
            "The load is `stoker data loadtest`, in Python on the same cores.",
        ],
    )


class Served:
    """A server in a process of its own, and where it answers."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process, self.url = process, url

    def peak_bytes(self) -> int:
        """Tell the most that it held."""
        (line,) = (
            line
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        return int(line.split()[1]) * 1024


@contextmanager
def serving(*argv: str | Path) -> Iterator[Served]:
    with subprocess.Popen([*map(str, argv)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if " at http" not in line:
            process.kill()
            raise RuntimeError(f"{' '.join(map(str, argv))} said: {line}{process.stderr.read()}")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        try:
            yield Served(process, line.split(" at ")[1].split()[0])
        finally:
            process.terminate()
            process.wait()


@contextmanager
def http_server(folder: Path) -> Iterator[str]:
    words = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().split(" port ")[1].split()[0]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def loadtest(url: str, clients: int, seconds: int) -> dict[str, float]:
    words = [STOKER, "data", "loadtest", url, "--clients", str(clients), "--seconds", str(seconds), "--json"]
    found: dict[str, float] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found

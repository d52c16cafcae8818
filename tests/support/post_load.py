"""Many concurrent clients that POST the same body again and again, over kept-alive connections, in one event loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


@dataclass
class PostLoadResult:
    """What all clients have seen: the time of each response, and how often which error."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    def percentile_ms(self, percent: int) -> float:
        return statistics.quantiles(self.latencies_s, n=100)[percent - 1] * 1e3


def run_post_load(url: str, body: bytes, *, clients: int, seconds: float) -> PostLoadResult:
    """Send requests for some seconds; a response other than 200, and a lost connection, is an error."""
    return asyncio.run(_run(url, body, clients, seconds))


async def _run(url: str, body: bytes, clients: int, seconds: float) -> PostLoadResult:
    result = PostLoadResult()
    parts = urlsplit(url)
    request = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    started = time.perf_counter()
    address = parts.hostname or "", parts.port or 80
    await asyncio.gather(*(_send(address, request, started + seconds, result) for _ in range(clients)))
    result.seconds = time.perf_counter() - started
    return result


async def _send(address: tuple[str, int], request: bytes, deadline: float, result: PostLoadResult) -> None:
    """Send requests one after the other until the deadline; connect again after an error."""
    while time.perf_counter() < deadline:
        try:
            reader, writer = await asyncio.open_connection(*address)
            try:
                while time.perf_counter() < deadline:
                    sent = time.perf_counter()
                    writer.write(request)
                    async with asyncio.timeout(TIMEOUT_S):
                        status = await _read_response(reader)
                    result.latencies_s.append(time.perf_counter() - sent)
                    if status != 200:
                        result.errors[f"status {status}"] += 1
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            result.errors[type(error).__name__] += 1


async def _read_response(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.partition("content-length:")[2].split()[0])
    await reader.readexactly(length)
    return int(head.split(" ", 2)[1])

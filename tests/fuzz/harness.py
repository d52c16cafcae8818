"""Limits that hostile input must not exceed, and random edits of valid input."""

from __future__ import annotations

import gc
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_CPU_S = 10.0
MAX_MEMORY_BYTES = 300 << 20


@contextmanager
def limited_resources(cpu_s: float = MAX_CPU_S, memory_bytes: int = MAX_MEMORY_BYTES) -> Iterator[None]:
    """Fail if the code in the context uses more CPU time, or more memory on top of what is used before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the memory in use
    memory_before, cpu_before = _read_status("VmRSS"), time.process_time()
    yield
    used_cpu_s, used_bytes = time.process_time() - cpu_before, _read_status("VmHWM") - memory_before
    assert used_cpu_s <= cpu_s, f"took {used_cpu_s:.1f} s of CPU time"
    assert used_bytes <= memory_bytes, f"took {used_bytes >> 20} MiB of memory"


def fixed_seeds(count: int) -> Iterator[random.Random]:
    """Yield the same random generators in every run."""
    yield from map(random.Random, range(count))


def fresh_seeds(seconds: float) -> Iterator[random.Random]:
    """Yield new random generators for a while. A test reports the input that failed, not its seed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield random.Random(secrets.randbits(64))


def mutate(data: bytes, rng: random.Random, *, tokens: tuple[bytes, ...] = ()) -> bytes:
    """Return data with a few random edits: bytes replaced, removed, repeated or inserted."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(mutated) + 1), rng.choice((1, 1, 2, 4, 16))
        match rng.randrange(5):
            case 0:
                mutated[at : at + length] = rng.randbytes(length)
            case 1:
                del mutated[at : at + length]
            case 2:
                mutated[at:at] = mutated[at : at + length] * rng.choice((1, 2, 50))
            case 3 if tokens:
                mutated[at : at + rng.choice((0, length))] = rng.choice(tokens)
            case _:
                mutated[at:at] = rng.choice((b"\0", b"\r\n", b"\n", b" ", b":", b"-1", b"\xff", b"%00", b"9" * 20))
    return bytes(mutated)


def _read_status(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10

"""Limits of CPU time and memory around servers and clients in this process, and random generators for their input."""

from __future__ import annotations

import gc
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fuzz.limits import MAX_CPU_S, MAX_MEMORY, peak_memory, reset_peak_memory


@contextmanager
def limited_resources(cpu_s: float = MAX_CPU_S, memory: int = MAX_MEMORY) -> Iterator[None]:
    """Fail if the code in the context uses more CPU time, or more memory on top of what is used before it."""
    gc.collect()
    reset_peak_memory()
    memory_before, cpu_before = peak_memory(), time.process_time()
    yield
    used_cpu_s, used_memory = time.process_time() - cpu_before, peak_memory() - memory_before
    assert used_cpu_s <= cpu_s, f"took {used_cpu_s:.1f} s of CPU time"
    assert used_memory <= memory, f"took {used_memory >> 20} MiB of memory"


def fixed_seeds(count: int) -> Iterator[random.Random]:
    """Yield the same random generators in every run."""
    yield from map(random.Random, range(count))


def fresh_seeds(seconds: float) -> Iterator[random.Random]:
    """Yield new random generators for a while. A test reports the input that failed, not its seed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield random.Random(secrets.randbits(64))

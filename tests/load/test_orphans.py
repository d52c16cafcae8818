"""DataLoader workers exit with the process that consumes their batches, even if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.core.processes import child_pids
from tests.support.loaders import encode, write_shards
from tests.support.waiting import is_alive, wait_until

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from stoker.load.torch import Dataset

WORKERS = 2
PROGRAM = f"""
import sys, threading
from torch.utils.data import DataLoader
from stoker.load.torch import Dataset

def stall(*_):
    print("started", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    url, start, work = sys.argv[1:]
    dataset = Dataset(url, global_batch=10, transform=stall if work == "stalled" else None, threads=1)
    loader = DataLoader(dataset, batch_size=None, num_workers={WORKERS}, multiprocessing_context=start)
    batches = iter(loader)
    next(batches)
    stall()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images whose batches do not fit into the pipe of a queue."""
    pixels = np.random.default_rng(0).integers(0, 256, (130, 130, 3), dtype=np.uint8)
    return write_shards(tmp_path_factory.mktemp("orphans") / "set", [encode(Image.fromarray(pixels), "PNG")] * 300, 100)


def descendants(pid: int) -> Iterator[int]:
    for child in child_pids(pid):
        yield child
        yield from descendants(child)


@pytest.mark.parametrize(
    ("start", "work"),
    [("fork", "full queue"), ("fork", "stalled"), ("spawn", "full queue"), ("forkserver", "full queue")],
)
def test_workers_exit_when_their_consumer_is_killed(url: str, tmp_path: Path, start: str, work: str) -> None:
    """PyTorch alone leaves such workers behind: they wait for their queue, or in the dataset."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), url, start, work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as consumer:
        assert consumer.stdout is not None
        try:
            assert consumer.stdout.readline() == b"started\n"
            workers = list(descendants(consumer.pid))
            assert len(workers) >= WORKERS
            consumer.kill()
            wait_until(lambda: not any(map(is_alive, workers)))
        finally:
            os.killpg(consumer.pid, signal.SIGKILL)  # the consumer itself is not reaped yet, so the group exists


def test_workers_outlive_the_thread_that_started_them(url: str) -> None:
    dataset = Dataset(url, global_batch=50, transform=None, threads=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=WORKERS)
    with ThreadPoolExecutor(1) as pool:
        batches = pool.submit(iter, loader).result()
    assert sum(batch.count for batch in batches) == 300

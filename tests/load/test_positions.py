"""Samples by position: the same as those of an iteration, from several threads at once, in any order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stoker import Loader
from stoker.errors import VerificationError
from tests.support.loaders import encode, gradient, loader_threads, write_shards


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_positions_give_the_samples_of_the_iteration(pets: Path, kind: str) -> None:
    """Augmentation included: it depends on the epoch and the position only."""
    settings = {"global_batch": 7, "size": 16, "threads": 2, "seed": 3, "rank": (0, 1)}
    with Loader(f"{pets}/{kind}/train", **settings) as loader:  # type: ignore[arg-type]
        epochs = [list(loader) for _ in range(2)]
        with ThreadPoolExecutor(4) as pool:
            jobs = [(number, batch) for number, batches in enumerate(epochs) for batch in batches][::-1]
            found = list(pool.map(lambda job: loader.load_positions(job[0], job[1].positions), jobs))
        for (_, expected), batch in zip(jobs, found, strict=True):
            assert np.array_equal(batch.images, expected.images)
            assert np.array_equal(batch.labels, expected.labels)
            assert batch.count == expected.count
        assert loader.cursor.epoch == 2  # not moved by positions
        assert not loader.load_positions(0, np.empty(0, dtype=np.int64)).count
    assert loader_threads() == []


def test_a_bad_sample_counts_once_per_epoch(tmp_path: Path) -> None:
    images = [encode(gradient(20, 20)) for _ in range(10)]
    images[4] = b"broken"
    url = write_shards(tmp_path / "set", images)
    positions = np.arange(10)
    with Loader(str(url), global_batch=10, size=16, max_bad=0.1, rank=(0, 1)) as loader:
        for _ in range(3):
            assert loader.load_positions(0, positions).count == 9
    with (
        Loader(str(url), global_batch=10, size=16, max_bad=0.0, rank=(0, 1)) as loader,
        pytest.raises(VerificationError),
    ):
        loader.load_positions(0, positions)

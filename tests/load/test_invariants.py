"""Invariants for every world size: bad samples, randomness, and errors for invalid options."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, SpecError
from stoker.load.loader import JOIN_RESUMES_AT_EPOCH_START, Loader
from stoker.load.shared_cursor import ConsumerState, SharedCursor
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from tests.support.trees import make_tree, stoker


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety samples in nine shards, one sample damaged after its header."""
    root = tmp_path_factory.mktemp("promises")
    make_tree(root / "pets", dict.fromkeys(("ant", "bee", "cat"), 30))
    assert stoker("data", "convert", root / "pets", root / "out", "--shard-samples", 10) == 0
    shard = sorted((root / "out/train").glob("*.tar"))[4]
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff")
    data[at : at + 40] = bytes(40)
    shard.write_bytes(data)
    return root / "out/train"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_bad_samples_are_counted_the_same_for_every_world_size(shards: Path, world: int, workers: int) -> None:
    skipped = 0
    for rank in range(world):
        with Loader(shards, global_batch=8, size=16, max_bad=0.012, rank=(rank, world)) as loader:
            for worker in range(workers):
                list(loader.worker_batches(worker, workers))
            skipped += len(loader.bad)
    assert skipped == 1


def test_bad_samples_are_logged_even_after_a_break(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Loader(shards, global_batch=89, size=16, max_bad=1.0, seed=3) as loader, caplog.at_level(logging.WARNING):
        for _ in loader:
            break
    assert len(loader.bad) == 1
    assert "1 bad sample " in caplog.text


def test_ranks_of_join_have_different_random_numbers() -> None:
    plan = SamplingPlan(data="x", sizes=np.full(8, 10, dtype=np.int64), mode="join", window=1)
    numbers, orders = [], []
    for rank in range(4):
        epoch = plan.epoch(0, Rank(rank, 4))
        for step in epoch.steps(0, 40):
            location = epoch.locate(step.positions)
            numbers += epoch.random_ids(step.positions, location).tolist()
            if step.start == 0:
                orders.append(tuple(location.samples.tolist()))
    assert sorted(numbers) == list(range(80))
    assert len(set(orders)) == 4


def test_a_join_state_dict_in_mid_epoch_logs_a_warning(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Loader(shards, global_batch=8, transform=None, sampling="join", rank=(0, 2)) as loader:
        batches = iter(loader)
        next(batches)
        with caplog.at_level(logging.WARNING):
            assert loader.state_dict()["consumed"] == 0
    (record,) = caplog.records
    assert record.getMessage() == f"{shards}: {JOIN_RESUMES_AT_EPOCH_START}"


def test_a_transform_that_returns_none_is_an_error(shards: Path) -> None:
    def return_none(pixels: Any, rng: Any) -> Any:
        return None

    with (
        Loader(shards, global_batch=8, transform=return_none, max_bad=1.0) as loader,
        pytest.raises(InputError, match=r"^sample [0-9]+ of epoch 0: .*None"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"global_batch": "64", "size": 2.5, "seed": None}, {"global_batch", "size", "seed"}),
        ({"global_batch": True, "prefetch": "2", "threads": "auto"}, {"global_batch", "prefetch", "threads"}),
        ({"global_batch": 8, "rank": ("0", "1"), "epoch_samples": "5"}, {"rank", "epoch_samples"}),
        ({"global_batch": 8, "rank": (0,)}, {"rank"}),
        ({"global_batch": 8, "rank": 3}, {"rank"}),
        ({"global_batch": 8, "transform": 5, "max_bad": "x"}, {"transform", "max_bad"}),
        ({"global_batch": 8, "size": 10**6}, {"size"}),
        ({"global_batch": 8, "epoch_samples": 0}, {"epoch_samples"}),
    ],
)
def test_options_of_the_wrong_type_are_named(shards: Path, settings: dict[str, Any], names: set[str]) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, **settings)
    assert {fault.path for fault in caught.value.faults} == names


def test_numpy_integers_are_accepted(shards: Path) -> None:
    one = Loader(shards, global_batch=np.int64(8), seed=np.int64(1), transform=None)  # type: ignore[arg-type]
    two = Loader(shards, global_batch=8, seed=1, transform=None)
    assert one.plan.digest == two.plan.digest
    one.load_state_dict({"epoch": np.int64(1), "consumed": np.int32(8), "plan": two.plan.digest})
    assert one.cursor == Cursor(1, 8, two.plan.digest)


def test_shared_cursor_updates_are_atomic() -> None:
    cursor = SharedCursor(ConsumerState(Cursor(0, 0, "")))

    def work() -> None:
        for _ in range(500):
            with cursor.update() as state:
                state.next_start = state.next_start._replace(consumed=state.next_start.consumed + 1)
            cursor.get()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cursor.get().next_start.consumed == 2000

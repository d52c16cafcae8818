"""What holds in every world: bad samples are judged alike, randomness is nobody's twin, mistakes are told."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, SpecError
from stoker.load.loader import Loader
from stoker.load.shared_cursor import Turn, Turns
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import Plan
from stoker.sampling.rank import Seat
from tests.support.trees import make_tree, stoker


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety samples in nine shards, one of them damaged after its header."""
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
def test_a_bad_sample_is_judged_alike_in_every_world(shards: Path, world: int, workers: int) -> None:
    left_out = 0
    for rank in range(world):
        with Loader(shards, global_batch=8, size=16, max_bad=0.012, seat=(rank, world)) as loader:
            for worker in range(workers):
                list(loader.share(worker, workers))
            left_out += len(loader.bad)
    assert left_out == 1


def test_what_was_left_out_is_told_even_after_a_break(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Loader(shards, global_batch=89, size=16, max_bad=1.0, seed=3) as loader, caplog.at_level(logging.WARNING):
        for _ in loader:
            break
    assert len(loader.bad) == 1
    assert "left out 1 bad sample" in caplog.text


def test_ranks_of_join_draw_their_own_randomness() -> None:
    plan = Plan(data="x", sizes=np.full(8, 10, dtype=np.int64), mode="join", window=1)
    numbers, orders = [], []
    for rank in range(4):
        epoch = plan.epoch(0, Seat(rank, 4))
        for step in epoch.steps(0, 40):
            place = epoch.at(step.positions)
            numbers += epoch.numbers(step.positions, place).tolist()
            if step.start == 0:
                orders.append(tuple(place.samples.tolist()))
    assert sorted(numbers) == list(range(80))
    assert len(set(orders)) == 4


def test_a_join_checkpoint_in_mid_epoch_warns(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Loader(shards, global_batch=8, transform=None, sampling="join", seat=(0, 2)) as loader:
        batches = iter(loader)
        next(batches)
        with caplog.at_level(logging.WARNING):
            assert loader.state_dict()["consumed"] == 0
    assert "comes again" in caplog.text


def test_a_transform_that_gives_nothing_is_told(shards: Path) -> None:
    def nothing(pixels: Any, rng: Any) -> Any:
        return None

    with (
        Loader(shards, global_batch=8, transform=nothing, max_bad=1.0) as loader,
        pytest.raises(InputError, match=r"position [0-9]+ of epoch 0: the transform returned None"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"global_batch": "64", "size": 2.5, "seed": None}, {"global_batch", "size", "seed"}),
        ({"global_batch": True, "prefetch": "2", "threads": "auto"}, {"global_batch", "prefetch", "threads"}),
        ({"global_batch": 8, "seat": ("0", "1"), "epoch_samples": "5"}, {"seat", "epoch_samples"}),
        ({"global_batch": 8, "seat": (0,)}, {"seat"}),
        ({"global_batch": 8, "seat": 3}, {"seat"}),
        ({"global_batch": 8, "transform": 5, "max_bad": "x"}, {"transform", "max_bad"}),
        ({"global_batch": 8, "size": 10**6}, {"size"}),
        ({"global_batch": 8, "epoch_samples": 0}, {"epoch_samples"}),
    ],
)
def test_settings_of_another_kind_are_told_by_name(shards: Path, settings: dict[str, Any], names: set[str]) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, **settings)
    assert {fault.path for fault in caught.value.faults} == names


def test_numbers_of_numpy_are_numbers(shards: Path) -> None:
    one = Loader(shards, global_batch=np.int64(8), seed=np.int64(1), transform=None)  # type: ignore[arg-type]
    two = Loader(shards, global_batch=8, seed=1, transform=None)
    assert one.plan.digest == two.plan.digest
    one.load_state_dict({"epoch": np.int64(1), "consumed": np.int32(8), "plan": two.plan.digest})
    assert one.cursor == Cursor(1, 8, two.plan.digest)


def test_turns_are_taken_one_at_a_time() -> None:
    turns = Turns(Turn(Cursor(0, 0, "")))

    def work() -> None:
        for _ in range(500):
            with turns.turn() as turn:
                turn.next = turn.next._replace(consumed=turn.next.consumed + 1)
            turns.look()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert turns.look().next.consumed == 2000

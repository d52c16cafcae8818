import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.permutations import permute, seed_key


def order(n: int, *name: int | str) -> list[int]:
    return permute(np.arange(n, dtype=np.uint64), n, seed_key(*name)).tolist()


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**32))
def test_result_is_a_permutation(n: int, seed: int) -> None:
    assert sorted(order(n, seed)) == list(range(n))


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=20), seed=st.integers(0, 2**32))
def test_batched_shuffles_equal_single_shuffles(lengths: list[int], seed: int) -> None:
    positions = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
    n = np.repeat(np.array(lengths, dtype=np.uint64), lengths)
    keys = np.repeat(np.array([seed_key(seed, i) for i in range(len(lengths))], dtype=np.uint64), lengths)
    assert permute(positions, n, keys).tolist() == [
        x for i, length in enumerate(lengths) for x in order(length, seed, i)
    ]


def test_the_order_is_pinned() -> None:
    # The order for a seed must not change between releases.
    assert order(10, "pack", 0, "train") == [7, 0, 9, 8, 3, 6, 4, 2, 5, 1]


def test_every_part_of_the_key_changes_the_order() -> None:
    assert len({tuple(order(50, seed, salt)) for seed in range(20) for salt in "ab"}) == 40


@pytest.mark.parametrize("make", [lambda seed: seed_key(seed, "x"), lambda seed: seed], ids=["hashed", "consecutive"])
@pytest.mark.slow
def test_all_orders_of_four_elements_are_equally_likely(make) -> None:
    positions = np.arange(4, dtype=np.uint64)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        shuffled = tuple(permute(positions, 4, make(seed)).tolist())
        counts[shuffled] = counts.get(shuffled, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60  # 23 degrees of freedom: 49.7 is 0.1 %


def test_neighbors_are_separated() -> None:
    n = 20_000
    steps = np.abs(np.diff(np.array(order(n, 3))))
    assert 0.32 < steps.mean() / n < 0.35  # the expected distance of two random positions is n / 3


def test_a_range_of_a_huge_shuffle_is_computed_without_storing_it() -> None:
    elements = permute(np.arange(5 * 10**11, 5 * 10**11 + 1000, dtype=np.uint64), 10**12, seed_key(0))
    assert len(set(elements.tolist())) == 1000
    assert int(elements.max()) < 10**12

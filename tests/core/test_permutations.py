import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.permutations import key, permute


def order(n: int, *name: int | str) -> list[int]:
    return permute(np.arange(n, dtype=np.uint64), n, key(*name)).tolist()


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**32))
def test_every_element_stands_once(n: int, seed: int) -> None:
    assert sorted(order(n, seed)) == list(range(n))


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=20), seed=st.integers(0, 2**32))
def test_many_shuffles_at_once_are_the_same_as_one_by_one(lengths: list[int], seed: int) -> None:
    positions = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
    n = np.repeat(np.array(lengths, dtype=np.uint64), lengths)
    keys = np.repeat(np.array([key(seed, i) for i in range(len(lengths))], dtype=np.uint64), lengths)
    assert permute(positions, n, keys).tolist() == [
        x for i, length in enumerate(lengths) for x in order(length, seed, i)
    ]


def test_the_order_is_pinned() -> None:
    # Bytes that were promised for a seed must not change with a release.
    assert order(10, "pack", 0, "train") == [7, 0, 9, 8, 3, 6, 4, 2, 5, 1]


def test_every_part_of_a_name_gives_another_order() -> None:
    assert len({tuple(order(50, seed, salt)) for seed in range(20) for salt in "ab"}) == 40


@pytest.mark.parametrize("make", [lambda seed: key(seed, "x"), lambda seed: seed], ids=["named", "counted"])
@pytest.mark.slow
def test_every_order_of_four_is_about_as_likely(make) -> None:
    positions = np.arange(4, dtype=np.uint64)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        found = tuple(permute(positions, 4, make(seed)).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60  # 23 degrees of freedom: 49.7 is 0.1 %


def test_neighbours_are_torn_apart() -> None:
    n = 20_000
    steps = np.abs(np.diff(np.array(order(n, 3))))
    assert 0.32 < steps.mean() / n < 0.35  # two random places are n / 3 apart on average


def test_a_long_one_takes_no_memory() -> None:
    taken = permute(np.arange(5 * 10**11, 5 * 10**11 + 1000, dtype=np.uint64), 10**12, key(0))
    assert len(set(taken.tolist())) == 1000
    assert int(taken.max()) < 10**12

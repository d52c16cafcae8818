import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.shards.shuffle import Permutation


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**32))
def test_every_element_stands_once(n: int, seed: int) -> None:
    assert sorted(Permutation(n, seed, "train").span(0, n).tolist()) == list(range(n))


@given(n=st.integers(2, 300), cut=st.data())
def test_a_part_is_that_part_of_the_whole(n: int, cut: st.DataObject) -> None:
    order = Permutation(n, 7, "train")
    start = cut.draw(st.integers(0, n - 1))
    assert order.span(start, n).tolist() == order.span(0, n).tolist()[start:]


def test_the_order_is_pinned() -> None:
    # Bytes that were promised for a seed must not change with a release.
    assert Permutation(10, 0, "train").span(0, 10).tolist() == [1, 2, 7, 5, 4, 0, 3, 6, 8, 9]


def test_seed_and_salt_each_give_another_order() -> None:
    orders = {tuple(Permutation(50, seed, salt).span(0, 50).tolist()) for seed in range(20) for salt in "ab"}
    assert len(orders) == 40


def test_every_order_of_four_is_about_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = tuple(Permutation(4, seed, "x").span(0, 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 60  # 23 degrees of freedom: 49.7 is the 0.1 % point


def test_neighbours_are_torn_apart() -> None:
    n = 20_000
    order = Permutation(n, 3, "train").span(0, n).astype(np.int64)
    steps = np.abs(np.diff(order))
    # Two random places are n / 3 apart on average.
    assert 0.32 < steps.mean() / n < 0.35


def test_a_long_one_takes_no_memory() -> None:
    order = Permutation(10**12, 0, "train")
    taken = order.span(5 * 10**11, 5 * 10**11 + 1000)
    assert len(set(taken.tolist())) == 1000
    assert int(taken.max()) < 10**12

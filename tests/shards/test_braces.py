import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.shards.braces import collapse_names, expand_braces


def test_ranges_keep_their_width() -> None:
    assert list(expand_braces("a-{008..011}.tar")) == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert list(expand_braces("a-{8..11}")) == ["a-8", "a-9", "a-10", "a-11"]


def test_lists_and_several_groups() -> None:
    assert list(expand_braces("{train,val}-{0..1}.tar")) == ["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"]


@pytest.mark.parametrize(
    "pattern",
    [
        "a-{0..3",
        "a-0..3}",
        "a-{x}",
        "a-{5..2}",
        "a-{0..99999999999}",
        "{}",
        "{0..٣}",
        "{0.." + "9" * 5000 + "}",
        "{0..1999}-{0..1999}",
    ],
)
def test_invalid_patterns_are_rejected(pattern: str) -> None:
    with pytest.raises(InputError):
        list(expand_braces(pattern))


def test_number_ranges_and_gaps() -> None:
    ranges = collapse_names(
        ["imagenet-train-000002.tar", "imagenet-train-000000.tar", "imagenet-val-000000.tar", "x.tar"]
    )
    assert [number_range.pattern for number_range in ranges] == [
        "imagenet-train-{000000..000002}.tar",
        "imagenet-val-000000.tar",
        "x.tar",
    ]
    assert [number_range.missing for number_range in ranges] == [("imagenet-train-000001.tar",), (), ()]


def test_missing_ends_of_tfrecord_names() -> None:
    (number_range,) = collapse_names(["train-00001-of-00004", "train-00002-of-00004"])
    assert number_range.pattern == "train-{00000..00003}-of-00004"
    assert number_range.missing == ("train-00000-of-00004", "train-00003-of-00004")


@pytest.mark.parametrize(
    "names",
    [
        ["a-0.tar", "a-٣.tar"],
        ["a-20240101.tar", "a-99991231.tar"],
        ["a-00000-of-999999999", "a-00001-of-999999999"],
        ["a-" + "7" * 5000 + ".tar", "a-" + "8" * 5000 + ".tar"],
    ],
)
def test_large_gaps_are_not_missing_shards(names: list[str]) -> None:
    ranges = collapse_names(names)
    assert sorted(name for number_range in ranges for name in number_range.names) == sorted(names)
    assert [number_range.missing for number_range in ranges] == [(), ()]
    assert [number_range.pattern for number_range in ranges] == sorted(names)


def test_name_with_total_may_have_many_missing_shards() -> None:
    (number_range,) = collapse_names(["train-00007-of-09000"])
    assert number_range.pattern == "train-{00000..08999}-of-09000"
    assert len(number_range.missing) == 8999


@given(
    head=st.sampled_from(["a-", "b2-train-", "x/y-", ""]),
    tail=st.sampled_from([".tar", "", ".tfrecord"]),
    numbers=st.sets(st.integers(0, 300), min_size=1),
)
def test_names_and_missing_names_add_up_to_the_pattern(head: str, tail: str, numbers: set[int]) -> None:
    names = [f"{head}{number:04d}{tail}" for number in numbers]
    (number_range,) = collapse_names(names)
    assert sorted(number_range.names + number_range.missing) == list(expand_braces(number_range.pattern))
    assert set(number_range.names) == set(names)

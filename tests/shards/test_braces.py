import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.shards.braces import collapse, expand


def test_ranges_keep_their_width() -> None:
    assert list(expand("a-{008..011}.tar")) == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert list(expand("a-{8..11}")) == ["a-8", "a-9", "a-10", "a-11"]


def test_lists_and_several_groups() -> None:
    assert list(expand("{train,val}-{0..1}.tar")) == ["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"]


@pytest.mark.parametrize("pattern", ["a-{0..3", "a-0..3}", "a-{x}", "a-{5..2}", "a-{0..99999999999}", "{}"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InputError):
        list(expand(pattern))


def test_runs_and_gaps() -> None:
    runs = collapse(["imagenet-train-000002.tar", "imagenet-train-000000.tar", "imagenet-val-000000.tar", "x.tar"])
    assert [run.pattern for run in runs] == [
        "imagenet-train-{000000..000002}.tar",
        "imagenet-val-000000.tar",
        "x.tar",
    ]
    assert [run.missing for run in runs] == [("imagenet-train-000001.tar",), (), ()]


def test_tfrecord_names_tell_of_missing_ends() -> None:
    (run,) = collapse(["train-00001-of-00004", "train-00002-of-00004"])
    assert run.pattern == "train-{00000..00003}-of-00004"
    assert run.missing == ("train-00000-of-00004", "train-00003-of-00004")


@given(
    head=st.sampled_from(["a-", "b2-train-", "x/y-", ""]),
    tail=st.sampled_from([".tar", "", ".tfrecord"]),
    numbers=st.sets(st.integers(0, 300), min_size=1),
)
def test_names_and_missing_names_make_the_pattern(head: str, tail: str, numbers: set[int]) -> None:
    names = [f"{head}{number:04d}{tail}" for number in numbers]
    (run,) = collapse(names)
    assert sorted(run.names + run.missing) == list(expand(run.pattern))
    assert set(run.names) == set(names)

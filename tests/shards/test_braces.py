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
    ["a-{0..3", "a-0..3}", "a-{x}", "a-{5..2}", "a-{0..99999999999}", "{}", "{0..٣}", "{0.." + "9" * 5000 + "}"],
)
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InputError):
        list(expand_braces(pattern))


def test_runs_and_gaps() -> None:
    runs = collapse_names(
        ["imagenet-train-000002.tar", "imagenet-train-000000.tar", "imagenet-val-000000.tar", "x.tar"]
    )
    assert [run.pattern for run in runs] == [
        "imagenet-train-{000000..000002}.tar",
        "imagenet-val-000000.tar",
        "x.tar",
    ]
    assert [run.missing for run in runs] == [("imagenet-train-000001.tar",), (), ()]


def test_tfrecord_names_tell_of_missing_ends() -> None:
    (run,) = collapse_names(["train-00001-of-00004", "train-00002-of-00004"])
    assert run.pattern == "train-{00000..00003}-of-00004"
    assert run.missing == ("train-00000-of-00004", "train-00003-of-00004")


@pytest.mark.parametrize(
    "names",
    [
        ["a-0.tar", "a-٣.tar"],
        ["a-20240101.tar", "a-99991231.tar"],
        ["a-00000-of-999999999", "a-00001-of-999999999"],
        ["a-" + "7" * 5000 + ".tar", "a-" + "8" * 5000 + ".tar"],
    ],
)
def test_a_number_that_does_not_count_shards_makes_no_gaps(names: list[str]) -> None:
    runs = collapse_names(names)
    assert sorted(name for run in runs for name in run.names) == sorted(names)
    assert [run.missing for run in runs] == [(), ()]
    assert [run.pattern for run in runs] == sorted(names)


def test_a_name_that_tells_the_total_may_be_nearly_alone() -> None:
    (run,) = collapse_names(["train-00007-of-09000"])
    assert run.pattern == "train-{00000..08999}-of-09000"
    assert len(run.missing) == 8999


@given(
    head=st.sampled_from(["a-", "b2-train-", "x/y-", ""]),
    tail=st.sampled_from([".tar", "", ".tfrecord"]),
    numbers=st.sets(st.integers(0, 300), min_size=1),
)
def test_names_and_missing_names_make_the_pattern(head: str, tail: str, numbers: set[int]) -> None:
    names = [f"{head}{number:04d}{tail}" for number in numbers]
    (run,) = collapse_names(names)
    assert sorted(run.names + run.missing) == list(expand_braces(run.pattern))
    assert set(run.names) == set(names)

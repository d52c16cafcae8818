from __future__ import annotations

import pytest

from stoker.errors import InputError
from stoker.sampling.rank import Rank


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, Rank(0, 1, 1)),
        ({"HOME": "/root", "LOCAL_RANK": "3"}, Rank(0, 1, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, Rank(5, 8, 4)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Rank(0, 2, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Rank(3, 4, 2),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(1, 2, 1)),
        ({"PMI_RANK": "6", "PMI_SIZE": "7", "MPI_LOCALNRANKS": "3"}, Rank(6, 7, 3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Rank(0, 1, 1)),
        # Where one launcher started another, torchrun comes before Open MPI, and Open MPI before PMI.
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(1, 2, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "9", "WORLD_SIZE": "16"}, Rank(9, 16, 1)),
    ],
)
def test_rank_is_read_from_the_launcher_variables(environ: dict[str, str], rank: Rank) -> None:
    assert Rank.from_environ(environ) == rank


@pytest.mark.parametrize(
    ("environ", "missing", "launcher"),
    [
        ({"RANK": "1"}, "WORLD_SIZE", "torchrun"),
        ({"WORLD_SIZE": "4"}, "RANK", "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE", "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "Open MPI"),
        ({"PMI_SIZE": "2"}, "PMI_RANK", "PMI"),
    ],
)
def test_rank_without_world_size_names_the_missing_variable(
    environ: dict[str, str], missing: str, launcher: str
) -> None:
    with pytest.raises(InputError, match=f"^{missing} is not set; ") as caught:
        Rank.from_environ(environ)
    assert launcher in str(caught.value.hint)


@pytest.mark.parametrize("value", ["", "one", "-1", "1.0", " 1", "0x1", "1_0", "²"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_invalid_number_is_reported_with_its_variable(name: str, value: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", name: value}
    with pytest.raises(InputError) as caught:
        Rank.from_environ(environ)
    assert f"{name}={value} " in str(caught.value)


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("7", "2"), ("0", "0")])
def test_rank_outside_of_the_world_is_rejected(rank: str, world: str) -> None:
    with pytest.raises(InputError, match=f"PMI_RANK={rank}\\b.*PMI_SIZE={world}\\b"):
        Rank.from_environ({"PMI_RANK": rank, "PMI_SIZE": world})


def test_local_world_size_is_at_least_one() -> None:
    # The number of decoder threads is divided by it.
    assert Rank.from_environ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}).local_world_size == 1

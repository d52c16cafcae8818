"""Kubernetes quantities are parsed and formatted as Kubernetes defines them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.utils.quantity import parse_quantity as parse_with_lightkube

from stoker.kube.quantity import format_quantity, parse_quantity, quantity_to_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8", 8),
        (3, 3),
        ("1500m", "1.5"),
        ("16Gi", 16 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("500M", 500 * 10**6),
        ("2k", 2000),
        ("1e3", 1000),
        ("1E", 10**18),
        ("12E6", 12 * 10**6),
        ("100n", "1E-7"),
        ("0", 0),
    ],
)
def test_parse_quantity(text: str, amount: str | int) -> None:
    assert parse_quantity(text) == Decimal(amount)


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?(e[0-9])?", fullmatch=True))
def test_numbers_agree_with_lightkube(number: str) -> None:
    units = [""] if "e" in number else ["", *"kMGTPE", *(f"{unit}i" for unit in "KMGTPE")]
    assert [parse_quantity(number + unit) for unit in units] == [parse_with_lightkube(number + unit) for unit in units]


@pytest.mark.parametrize("text", ["", "Gi", "1 GB", "ten", "1mi3"])
def test_malformed_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("10Gi", 10 * GIB), ("5G", 5 * 10**9), ("1e3", 1000), ("1.5Ki", 1536), ("1Ei", 2**60), ("100m", 1), ("7", 7)],
)
def test_quantity_to_bytes_rounds_up(text: str, size: int) -> None:
    assert quantity_to_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "10GB", "ten", None, "1 Gi"])
def test_quantity_to_bytes_of_malformed_text_is_none(text: object) -> None:
    assert quantity_to_bytes(text) is None


@pytest.mark.parametrize("size", [1, 1000, 1024, 1536, 10 * GIB, 1200 * GIB, 2**50, 3 * 10**9])
def test_format_quantity_round_trips(size: int) -> None:
    assert quantity_to_bytes(format_quantity(size)) == size


def test_format_quantity_uses_the_largest_exact_unit() -> None:
    sizes = [10 * GIB, 1200 * GIB, 2048 * GIB]
    assert [format_quantity(size) for size in sizes] == ["10Gi", "1200Gi", "2Ti"]

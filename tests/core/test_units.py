from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.units import Bytes, Seconds, format_bytes, format_duration, parse_bytes, parse_duration
from stoker.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (512, 512),
        (1e9, 10**9),
        ("512", 512),
        ("1e9", 10**9),
        ("1.5e3", 1500),
        ("100B", 100),
        ("1k", 1000),
        ("1K", 1000),
        ("2kB", 2000),
        ("3M", 3 * 10**6),
        ("3Mb", 3 * 10**6),
        ("4GB", 4 * 10**9),
        ("5T", 5 * 10**12),
        ("6PB", 6 * 10**15),
        ("1Ki", 1024),
        ("200Gi", 200 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1.5 GiB", 3 * 2**29),
        (" 2Ti ", 2**41),
        ("1Pib", 2**50),
        ("0.1KiB", 102),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_parse_bytes(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "bad",
    ["", "many", "100m", "1g", "1mi", "1i", "1iB", "-1", "-1Gi", "1.5", "1 2", "Gi", "1GiBs", "1e999", "1e99",
     "9223372036854775808", -1, 1.5, math.nan, math.inf, True, None, [1]],
)  # fmt: skip
def test_parse_bytes_rejects(bad: str | float) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(bad)
    assert Bytes.expected in str(caught.value)
    assert str(caught.value).endswith(repr(bad))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB"),  # not 1024 KiB
        (3 * 2**29, "1.5 GiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 2**62))
def test_formatted_sizes_can_be_parsed(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (2, 2.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("1e3", 1000.0),
        ("30s", 30.0),
        ("10m", 600.0),
        ("24h", 86400.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("500ms", 0.5),
        ("1m500ms", 60.5),
        ("2d", 172800.0),
        ("1.5h", 5400.0),
    ],
)
def test_parse_duration(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "bad",
    ["", " ", "soon", "h", "30m1h", "1h30", "1h1h", "-5s", "5 S", "1w", -1, math.nan, math.inf, True, None],
)
def test_parse_duration_rejects(bad: str | float) -> None:
    with pytest.raises(InputError) as caught:
        parse_duration(bad)
    assert Seconds.expected in str(caught.value)
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0002, "0.2ms"),
        (0.5, "500ms"),
        (0.99951, "1s"),
        (12.34, "12.3s"),
        (59.96, "1m"),
        (61, "1m1s"),
        (3599.6, "1h"),
        (5400, "1h30m"),
        (7199, "2h"),
        (86399, "1d"),
        (90000, "1d1h"),
        (10 * 86400, "10d"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0.001, 1e8))
def test_formatted_durations_can_be_parsed(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.06)


def test_units_are_numbers() -> None:
    assert Bytes("1Ki") == 1024
    assert Bytes("1Ki") + 1 == 1025
    assert Seconds("1m") / 2 == 30.0
    assert pickle.loads(pickle.dumps(Bytes(5))) == 5
    with pytest.raises(InputError):
        Bytes(-1)

"""Names in messages: control characters are escaped, and long lists are shortened."""

from __future__ import annotations

import pytest

from stoker.core.text import join_some, printable


def test_control_characters_are_escaped() -> None:
    assert printable("café 1") == "café 1"
    assert printable("a\x1b[2Jb\n") == r"'a\x1b[2Jb\n'"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "none"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
        (["a", "b\r"], r"a, 'b\r'"),
    ],
)
def test_first_names_are_joined_and_the_others_counted(names: list[str], text: str) -> None:
    assert join_some(names) == text

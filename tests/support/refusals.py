"""Commands that must fail: the exit code, and one sentence on stderr or a list of errors."""

from __future__ import annotations

import re

import pytest

from tests.support.trees import stoker


def expect_refusal(capsys: pytest.CaptureFixture[str], code: int, pattern: str, *words: object) -> None:
    """Expect an exit code and a message that matches `pattern`: one sentence, or `N errors` and one line for each."""
    capsys.readouterr()
    assert stoker("data", *words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stoker: "), err
    errors = re.search(r" (\d+) errors\n", err)
    assert err.count("\n") == (1 + int(errors[1]) if errors else 1), err
    assert "Traceback" not in err
    assert re.search(pattern, err), err

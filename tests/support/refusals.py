"""Commands that must fail: the exit code and the one sentence on stderr."""

from __future__ import annotations

import re

import pytest

from tests.support.trees import stoker


def expect_refusal(capsys: pytest.CaptureFixture[str], code: int, pattern: str, *words: object) -> None:
    """Expect an exit code and one sentence that matches the regular expression `pattern`."""
    capsys.readouterr()
    assert stoker("data", *words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stoker: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert re.search(pattern, err), err

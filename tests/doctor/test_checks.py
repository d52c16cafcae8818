"""`stoker doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.doctor import checks
from tests.support.trees import stoker


def found() -> dict[str, checks.Check]:
    return {check.what: check for check in checks.check_machine()}


def test_the_table_and_json_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("doctor", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert stoker("doctor") == 0
    table = capsys.readouterr().out
    assert {check["what"] for check in told} >= {"cores", "decoder", "torch", "nginx", "shared memory"}
    for check in told:
        assert check["found"] in table


def test_the_decoder_that_is_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.native, "problem", lambda: "is not installed")
    without = found()["decoder"]
    assert without.fine is None
    assert without.found == "python: the native one is not installed"
    assert "pip install ./native" in without.fix
    monkeypatch.setattr(checks.native, "problem", lambda: "")
    for simd, word in ((1, "native"), (0, "python")):
        monkeypatch.setattr(checks.native, "_loaded", lambda simd=simd: SimpleNamespace(SIMD=simd))
        assert found()["decoder"].found.startswith(word)


def test_what_is_missing_comes_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks, "SHARED_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    lacking = found()
    for what in ("nginx", "torch", "tensorflow", "shared memory"):
        assert lacking[what].fine is None
        assert lacking[what].fix


def test_something_that_fails_gives_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "check_machine", lambda: [checks.Check("cores", False, "none", "buy some")])
    assert stoker("doctor") == 3
    captured = capsys.readouterr()
    assert "✗" in captured.out
    assert "buy some" in captured.out
    assert "not as it should be: cores" in captured.err

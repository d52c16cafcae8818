"""`stoker doctor` without options: the checks of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.doctor import checks
from tests.support.trees import stoker


def checks_by_name() -> dict[str, checks.Check]:
    return {check.what: check for check in checks.check_machine()}


def test_table_and_json_have_the_same_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("doctor", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert stoker("doctor") == 0
    table = capsys.readouterr().out
    assert {check["what"] for check in rows} >= {"cores", "decoder", "torch", "nginx", "shared memory"}
    for check in rows:
        assert check["found"] in table


def test_decoder_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.native, "why_unavailable", lambda: checks.native.NOT_INSTALLED)
    missing = checks_by_name()["decoder"]
    assert missing.fine is None
    assert missing.found.startswith("python")
    assert missing.found.endswith(f"native decoder {checks.native.NOT_INSTALLED}")
    assert checks.native.INSTALL_HINT in missing.fix
    monkeypatch.setattr(checks.native, "why_unavailable", lambda: "")
    for simd, word in ((1, "native"), (0, "python")):
        monkeypatch.setattr(checks.native, "import_native", lambda simd=simd: SimpleNamespace(SIMD=simd))
        assert checks_by_name()["decoder"].found.startswith(word)


def test_missing_dependency_has_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks, "SHM_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    found = checks_by_name()
    for what in ("nginx", "torch", "tensorflow", "shared memory"):
        assert found[what].fine is None
        assert found[what].fix


def test_failed_check_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "check_machine", lambda: [checks.Check("cores", False, "none", "buy some")])
    assert stoker("doctor") == 3
    captured = capsys.readouterr()
    assert "✗" in captured.out
    assert "buy some" in captured.out
    assert "checks failed: cores" in captured.err

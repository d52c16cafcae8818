from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stoker.core.registry import OptionalTarget, Registry
from stoker.errors import InputError, MissingExtraError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the import path with an installed third-party package."""
    (tmp_path / "drill_plugin.py").write_text("class Thing:\n    pass\n")
    info = tmp_path / "drill_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drill-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stoker.drill]\nthing = drill_plugin:Thing\npath = drill_plugin:Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "drill_plugin", raising=False)
    return tmp_path


def test_get_imports_only_the_requested_target() -> None:
    registry: Registry[type] = Registry("drill", {"gone": "no.such.module:X", "path": "pathlib:Path"})
    assert registry.names() == ("gone", "path")
    assert registry.get("path") is Path


def test_entry_points_are_found_and_built_in_targets_take_precedence(site: Path) -> None:
    registry: Registry[type] = Registry("drill", {"path": "pathlib:Path"})
    assert registry.names() == ("path", "thing")
    assert "drill_plugin" not in sys.modules
    assert registry.get("path") is Path
    assert "drill_plugin" not in sys.modules
    assert registry.get("thing").__name__ == "Thing"


def test_entry_point_of_another_group_is_not_found(site: Path) -> None:
    with pytest.raises(InputError):
        Registry("other", {}).get("thing")


def test_unknown_name_lists_known_names_and_the_closest() -> None:
    registry: Registry[type] = Registry("source", {"imagenet": "a:b", "folder": "a:b"})
    with pytest.raises(InputError) as caught:
        registry.get("imagenett")
    assert "'imagenett'" in caught.value.what
    assert str(caught.value.hint) == "did you mean 'imagenet'? known: folder, imagenet"
    with pytest.raises(InputError) as caught:
        registry.get("zzz")
    assert "'zzz'" in caught.value.what
    assert str(caught.value.hint).endswith("folder, imagenet")
    assert "'folder'" not in str(caught.value.hint)
    assert "'imagenet'" not in str(caught.value.hint)


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.deeper"])
def test_missing_package_names_the_extra(site: Path, package: str) -> None:
    (site / "drill_heavy.py").write_text("import no_such_package\n")
    registry: Registry[type] = Registry("launcher", {"k8s": OptionalTarget("drill_heavy:X", "k8s", package)})
    with pytest.raises(MissingExtraError) as caught:
        registry.get("k8s")
    assert (caught.value.package, caught.value.extra) == (package, "k8s")
    assert "the launcher 'k8s'" in str(caught.value)


@pytest.mark.parametrize("line", ["import another_missing", "import json.no_such", "from json import no_such"])
def test_other_import_errors_are_raised_unchanged(site: Path, line: str) -> None:
    (site / "drill_broken.py").write_text(line + "\n")
    registry: Registry[type] = Registry("launcher", {"k8s": OptionalTarget("drill_broken:X", "k8s", "json")})
    with pytest.raises(ImportError):
        registry.get("k8s")

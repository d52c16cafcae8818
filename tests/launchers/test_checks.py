"""Checks that launchers share: modules that Python would not find, and data that a cache cannot fetch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from stoker.errors import SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.launchers.checks import check_via
from stoker.launchers.module_search import explain_missing_module
from tests.launchers.contract import job_of

CACHE = "http://cache:3128"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with modules and packages that must not be imported."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "train",
        "package/__init__",
        "package/task",
        "runnable/__init__",
        "runnable/__main__",
        "spread/__init__",
    ):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise SystemExit({name!r})")
    (tmp_path / "spread/__init__.py").write_text("__path__.append('/elsewhere')")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/task.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "package.task",
        "runnable",
        "plain.task",
        "spread.task",
        "this",
        "json.tool",
        "stoker.trainers.torch_image",
    ],
)
def test_modules_that_python_finds(project: Path, name: str) -> None:
    assert explain_missing_module(name, [str(project)]) is None


@pytest.mark.parametrize(
    "name", ["trian", "package.tusk", "package", "train.task", "plain.other", "stoker.trainers.torch_imgae"]
)
def test_modules_that_python_does_not_find(project: Path, name: str) -> None:
    assert repr(name) in str(explain_missing_module(name, [str(project)]))
    assert "package" not in sys.modules


def test_package_in_a_zip_file_is_found(project: Path) -> None:
    with ZipFile(project / "code.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/task.py", "")
    for name in ("zipped.task", "zipped"):
        assert explain_missing_module(name, [str(project / "code.zip")]) is None


def render(**keys: Any) -> None:
    LAUNCHERS.get("local")().render(job_of(**keys))


def test_folder_with_the_name_of_an_installed_package_does_not_hide_it(project: Path) -> None:
    (project / "stoker").mkdir()
    assert explain_missing_module("stoker.trainers.torch_image", [str(project)]) is None
    (project / "stoker/__init__.py").touch()
    assert explain_missing_module("stoker.trainers.torch_image", [str(project)]) is not None


def test_plan_refuses_a_module_that_does_not_exist(project: Path) -> None:
    render(program={"module": "train"})
    render(program={"module": "task", "cwd": "package"})
    render(program={"module": "task"}, env={"PYTHONPATH": "elsewhere:package"})
    for keys in ({"program": {"module": "task"}}, {"program": {"module": "train", "cwd": "package"}}):
        with pytest.raises(SpecError) as caught:
            render(**keys)
        assert [fault.path for fault in caught.value.faults] == ["program.module"]
    with pytest.raises(SpecError) as caught:
        render(program={"script": "no.py"})
    assert [fault.path for fault in caught.value.faults] == ["program.script"]


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ({"train": "/shards/train", "via": CACHE}, ["data.train"]),
        ({"train": "http://data/train", "val": "shards/val", "via": CACHE}, ["data.val"]),
        ({"train": "file:///shards/train", "val": "FILE:///a/b", "via": CACHE}, ["data.train", "data.val"]),
        ({"train": f"{CACHE}/data/train", "via": f"{CACHE}/"}, ["data.train"]),
        ({"train": "s3://bucket/train", "val": "gs://bucket/val-{0..9}.tar", "via": CACHE}, []),
        ({"train": "/shards/train"}, []),
    ],
)
def test_data_that_a_cache_cannot_fetch(data: dict[str, str], keys: list[str]) -> None:
    assert [fault.path for fault in check_via(job_of("true", data=data))] == keys


def test_cache_of_the_cluster_is_checked_where_it_is_used() -> None:
    job = job_of("true", data={"train": "/shards/train", "via": "cluster"}, image="x")
    assert list(check_via(job)) == []
    with pytest.raises(SpecError) as caught:
        LAUNCHERS.get("k8s")().render(job)
    assert "data.train" in [fault.path for fault in caught.value.faults]


def test_every_launcher_refuses_data_that_a_cache_cannot_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tar").touch()
    job = job_of("true", data={"train": str(tmp_path), "via": CACHE}, image="x", ssh={"hosts": ["nowhere.invalid"]})
    for name in ("local", "ssh", "ray", "k8s"):
        launcher = LAUNCHERS.get(name)()
        with pytest.raises(SpecError) as caught:
            launcher.render(launcher.resolve_paths(job))
        assert [fault.path for fault in caught.value.faults if "cache" in fault.what] == ["data.train"], name

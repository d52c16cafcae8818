"""Plans of the Ray launcher, and what they reject, without a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stoker.errors import InputError, SpecError
from stoker.launchers.ray import launcher as ray_launcher
from stoker.launchers.ray.cluster import local_version
from stoker.launchers.ray.launcher import RayLauncher
from stoker.launchers.ray.plan import RayPlan
from tests.launchers.contract import job_of
from tests.support.ray import (
    fake_dashboard,
    write_job,
)
from tests.support.trees import stoker


def test_unreachable_cluster_exits_5_with_one_sentence(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(workspace, "true")
    with fake_dashboard(200, {}) as target:
        pass
    assert stoker("job", "run", job, "--on", f"ray://{target}") == 5
    err = capsys.readouterr().err
    assert err.startswith(f"stoker: http://{target}: ")
    assert "8265" in err
    assert err.count("\n") == 1
    with fake_dashboard(404, {}) as target:
        assert stoker("job", "run", job, "--on", f"ray://{target}") == 5
        assert "not a Ray dashboard" in capsys.readouterr().err
    with fake_dashboard(401, {}) as target:
        assert stoker("job", "run", job, "--on", f"ray://{target}") == 5
        assert re.search(rf"http://{target}: .*token.*; .*RAY_AUTH_TOKEN", capsys.readouterr().err)
    assert stoker("job", "run", job, "--on", "local://somewhere") == 2
    assert re.search("--on local .*address", capsys.readouterr().err)
    assert not Path(os.environ["STOKER_HOME"]).exists()


def test_other_version_on_the_cluster_is_noted(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    with fake_dashboard(200, {"ray_version": "2.9.3"}) as target:
        assert stoker("job", "plan", write_job(workspace, "true"), "--on", f"ray://{target}") == 0
    out, err = capsys.readouterr()
    assert f"Ray is {local_version()} on this machine and 2.9.3 on the cluster" in err
    assert "pip install 'ray[default]==2.9.3'" in err
    assert "cd @ray:workdir@ && " in out


def test_plan_has_placeholders_for_what_ray_decides(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    (workspace / "work" / "train.py").touch()
    resources = {"cpu": 4, "gpu": 2, "memory": "8Gi", "gpu_type": "A100"}
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "workers": 100, "resources": resources}
    with fake_dashboard(200, {"ray_version": "2.60.0"}) as target:
        assert stoker("job", "plan", write_job(workspace, "", **keys), "--on", f"ray://{target}", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bundle"] == {"CPU": 4.0, "GPU": 2, "memory": 8 * 2**30, "accelerator_type:A100": 0.001}
    command = " ".join(plan["slots"]["worker/99"]["argv"])
    assert "--node-rank 99 --nproc-per-node 2 --master-addr @ray:worker/0@ --master-port @ray:port@" in command
    assert command.endswith("@ray:workdir@/train.py")


def test_tasks_of_tensorflow_have_addresses_and_bundles_of_their_own(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slots may share a node, so each gets a port there, unless the job file sets one."""
    pytest.importorskip("ray")
    roles = {"ps": {"count": 2, "port": 31000}, "chief": {"resources": {"cpu": 2}}}
    keys = {"topology": "tf-ps", "workers": 2, "resources": {"cpu": 4, "gpu": 1}, "roles": roles}
    with fake_dashboard(200, {"ray_version": "2.60.0"}) as target:
        assert stoker("job", "plan", write_job(workspace, "true", **keys), "--on", f"ray://{target}", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert json.loads(plan["slots"]["worker/1"]["env"]["TF_CONFIG"]) == {
        "cluster": {
            "chief": ["@ray:chief/0@:@ray:chief/0:port@"],
            "worker": [f"@ray:worker/{index}@:@ray:worker/{index}:port@" for index in (0, 1)],
            "ps": ["@ray:ps/0@:31000", "@ray:ps/1@:31001"],
        },
        "task": {"type": "worker", "index": 1},
    }
    assert plan["bundle"] == {"CPU": 4.0, "GPU": 1}
    assert plan["bundles"] == {"chief/0": {"CPU": 2.0}, "ps/0": {"CPU": 1.0}, "ps/1": {"CPU": 1.0}}


def test_missing_ray_package_exits_3_with_the_extra_to_install(workspace: Path) -> None:
    program = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'ray' else find(name, *more)\n"
        "from stoker.cli.main import run\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", program, "job", "run", str(write_job(workspace, "true")), "--on", "ray://127.0.0.1:1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert re.search(r"'ray'.*; .*pip install 'path/to/stoker\[ray\]'", done.stderr)
    assert done.stderr.count("\n") == 1


def test_all_workers_need_a_cluster_that_reports_free_resources(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    with fake_dashboard(200, {"ray_version": "2.60.0"}) as target:
        (workspace / "work" / "train.py").touch()
        job = write_job(workspace, "", workers="all", topology="torchrun", program={"script": "train.py"})
        assert stoker("job", "plan", job, "--on", f"ray://{target}") == 2
    assert re.search("workers: all: .*free resources; set a number of workers", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("workers", "resources", "capacity"),
    [
        (3, {"cpu": 2}, None),
        (4, {"cpu": 2}, "2 nodes with 7 CPU in total can run 3 of 4 workers"),
        (1, {"cpu": 5}, "2 nodes with 7 CPU in total can run 0 of 1 worker"),
        (2, {"cpu": 1, "gpu": 1}, "2 nodes with 7 CPU, 1 GPU in total can run 1 of 2 workers"),
    ],
)
def test_small_cluster_is_noted(
    workers: int, resources: dict[str, int], capacity: str | None, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note and no fault: resources may become free, and the cluster may scale up."""
    pytest.importorskip("ray")
    usage = {"a": "4.0/4.0 CPU\n0.0/1.0 GPU\n", "b": "0.0/3.0 CPU\n"}
    (workspace / "work" / "train.py").touch()
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "processes_per_worker": 1}
    job = write_job(workspace, "", workers=workers, resources=resources, **keys)
    with fake_dashboard(200, {"ray_version": "2.60.0", "data": {"nodeLogicalResources": usage}}) as target:
        assert stoker("job", "plan", job, "--on", f"ray://{target}") == 0
    err = capsys.readouterr().err
    if capacity is None:
        assert "too small" not in err
    else:
        assert f"too small now: {capacity}; the job will wait" in err


@pytest.mark.parametrize("target", [None, "far:8265"])
def test_missing_working_directory_of_the_program(
    target: str | None, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    job = job_of(program={"command": ["true"], "cwd": "none"})
    with pytest.raises(SpecError, match=f"program.cwd: .*{workspace}/work/none"):
        RayLauncher(target).render(job)


def test_own_ray_needs_the_resources_of_this_machine(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    secret = {"/no/secret": {"secret": "s"}}
    job = job_of("true", resources={"gpu": 1, "memory": "1000Ti"}, secret_files=secret)
    with pytest.raises(SpecError) as caught:
        RayLauncher().render(job)
    assert [fault.path for fault in caught.value.faults] == [
        "resources.gpu",
        "resources.memory",
        "secret_files./no/secret",
    ]


def pack(workspace: Path) -> list[str]:
    plan = RayPlan(slots={}, address="http://far", bundle={}, strategy="PACK", source=str(workspace / "work"))
    ray_launcher.pack_working_dir(plan, workspace / "working.zip")
    with zipfile.ZipFile(workspace / "working.zip") as archive:
        return [name for name in archive.namelist() if not name.startswith(".stoker/")]


def test_archive_follows_links_and_has_a_size_limit(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, far = workspace / "work", workspace / "far" / "deep"
    far.mkdir(parents=True)
    (far / "a.txt").write_text("a")
    (work / "link").symlink_to(far.parent)
    (work / "file").symlink_to(far / "a.txt")
    (work / "nowhere").symlink_to(workspace / "none")
    assert pack(workspace) == ["file", "link/deep/a.txt"]
    (work / "big").write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(ray_launcher, "MAX_UPLOAD_BYTES", 1 << 19)
    with pytest.raises(InputError, match=r"512 KiB.*\.stokerignore"):
        pack(workspace)
    assert not (workspace / "working.zip").exists()
    (far / "up").symlink_to(work)
    (work / "big").unlink()
    with pytest.raises(InputError, match=r"/up: .*symbolic link.*parent.*\.stokerignore"):
        pack(workspace)

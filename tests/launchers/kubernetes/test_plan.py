"""Plans of the Kubernetes launcher: run labels, copied code files, faults, contexts and handles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import InputError, SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.kube.config import parse_handle
from stoker.kube.objects import RUN_LABEL
from stoker.launchers.kubernetes.plan import KubernetesPlan, resolve_code_files
from stoker.launchers.kubernetes.run_objects import (
    PREVIOUS_ATTEMPTS_ANNOTATION,
    find_lead,
    get_pod_templates,
    label_run,
)
from tests.launchers.contract import job_of


def render(target: str | None = None, **keys: Any) -> KubernetesPlan:
    job = job_of(**{"program": {"module": "a"}, "image": "x", "topology": "torchrun", "workers": 2, **keys})
    plan: KubernetesPlan = LAUNCHERS.get("k8s")(target).render(job)
    return plan


def test_label_run_labels_all_but_persistent_objects() -> None:
    plan = render(checkpoint={"dir": "/c", "claim": "c", "create": True, "size": "1Gi"})
    objects = label_run(plan.objects, "small-1", previous_attempts=2)
    labeled = {obj["kind"]: RUN_LABEL in obj["metadata"]["labels"] for obj in objects}
    assert labeled == {"PersistentVolumeClaim": False, "ConfigMap": True, "Service": True, "Job": True}
    pods = [template["metadata"] for obj in objects for template in get_pod_templates(obj)]
    values = [(pod["labels"][RUN_LABEL], pod["annotations"][PREVIOUS_ATTEMPTS_ANNOTATION]) for pod in pods]
    assert values == [("small-1", "2")] * 2
    assert find_lead(objects)["metadata"]["name"] == "small-chief"


def test_plan_is_valid_yaml_for_kubectl() -> None:
    plan = render()
    assert list(yaml.safe_load_all(plan.to_text())) == plan.objects


def test_owner_of_other_lead_jobs_has_no_ttl() -> None:
    def has_ttl(**keys: Any) -> list[bool]:
        return ["ttlSecondsAfterFinished" in obj["spec"] for obj in render(**keys).objects if obj["kind"] == "Job"]

    assert has_ttl(topology="tf-mirrored", workers=3) == [False, True, True]
    assert has_ttl(topology="tf-ps", workers=1) == [True, True, True]
    assert has_ttl(topology="torchrun", workers=3) == [True]


def test_all_faults_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"program": {"script": "no.py"}, "data": {"train": "shards/train"}, "kubernetes": {"copy": ["nothing"]}}
    with pytest.raises(SpecError) as caught:
        LAUNCHERS.get("k8s")().render(job_of(**keys))
    paths = [fault.path for fault in caught.value.faults]
    assert paths == ["image", "data.train", "kubernetes.copy[0]", "program.script"]


def test_copied_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "lib/a.py", "lib/deep/b.py", "lib/__pycache__/c.py", "lib/d.pyc", "other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    plan = render(topology="single", workers=1, program={"script": "./train.py"}, kubernetes={"copy": ["lib"]})
    spec = find_lead(plan.objects)["spec"]["template"]["spec"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "code"]
    assert [item["path"] for item in volume["configMap"]["items"]] == ["lib/a.py", "lib/deep/b.py", "train.py"]
    (config_map,) = [obj for obj in plan.objects if obj["kind"] == "ConfigMap"]
    assert "python3 /stoker-code/train.py" in config_map["data"]["worker.sh"]


def test_folders_outside_of_the_working_directory_keep_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    for name in ("lib/a/__init__.py", "lib/b/__init__.py", "other/lib/a/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    job = job_of(image="x", program={"module": "a"}, kubernetes={"copy": ["../lib"]})
    assert sorted(resolve_code_files(job)[1]) == ["lib/a/__init__.py", "lib/b/__init__.py"]
    job = job_of(image="x", program={"module": "a"}, kubernetes={"copy": ["../lib", "../other/lib"]})
    (fault,) = resolve_code_files(job)[2]
    assert fault.path == "kubernetes.copy[1]"
    assert re.search(r"both.*lib/a/__init__\.py", fault.what)


def test_patch_that_matches_no_object() -> None:
    patch = {"kind": "Job", "metadata": {"name": "nope"}, "spec": {}}
    with pytest.raises(SpecError) as caught:
        render(kubernetes={"patch": [patch]})
    (fault,) = caught.value.faults
    assert fault.path == "kubernetes.patch[0]"
    assert "matches no object" in fault.what
    assert "(known: ConfigMap small, " in fault.what


def test_files_too_large_for_a_config_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_bytes(b"#" * (1 << 20))
    with pytest.raises(InputError, match=r"ConfigMap.*1 MiB.*train\.py.*; "):
        render(topology="single", workers=1, program={"script": "train.py"})


def test_handle_with_slashes_in_the_context() -> None:
    assert parse_handle("k8s://arn:aws:eks:eu:1:cluster/prod/ml/small-1") == (
        ("arn:aws:eks:eu:1:cluster/prod", "ml"),
        "small-1",
    )


def test_target_with_slashes_in_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "arn:aws:eks:eu-west-1:1:cluster/prod"
    config = {"contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}}], "clusters": [], "users": []}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    plans = [render(target) for target in (name, f"{name}/ml")]
    assert [(plan.context, plan.namespace) for plan in plans] == [(name, None), (name, "ml")]

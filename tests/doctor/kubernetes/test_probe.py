"""The image probe: its pod, its result, and clusters that cannot be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.collect import probe_images, render_objects
from stoker.doctor.kubernetes.findings import find_requirements
from stoker.doctor.kubernetes.probe import ImageProbe, build_probe_pod, check_image_probe, is_finished
from stoker.errors import StokerError, StorageFullError, UnavailableError
from stoker.kube.pending import explain_pending
from tests.doctor.kubernetes.clusters import (
    EXISTING_CLAIM,
    GPU,
    make_job,
)
from tests.support.servers import free_port
from tests.support.trees import stoker


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod_with([{"name": "main", "image": "acme/trainer:v1", "state": state}])


def terminated(code: int, message: str = "", reason: str = "Completed") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message, "reason": reason}}
    return pod_with([{"name": "main", "state": state}], phase="Succeeded" if code == 0 else "Failed")


def pod_with(states: list[dict[str, Any]], phase: str = "Pending", on: str | None = "n1") -> dict[str, Any]:
    spec = {"restartPolicy": "Never", "containers": [], **({"nodeName": on} if on else {})}
    return {"metadata": {"name": "p"}, "spec": spec, "status": {"phase": phase, "containerStatuses": states}}


STARTED = "acme/trainer:v1 can be pulled and started on n1"


@pytest.mark.parametrize(
    ("pod", "image", "says", "dns"),
    [
        (terminated(0, "dns=ok\n"), True, STARTED, True),
        (terminated(0, "dns=failed\n"), True, STARTED, False),
        (terminated(0, "dns=none\n"), True, STARTED, None),
        (pod_with([{"name": "main", "state": {"running": {}}}], "Running"), True, STARTED, False),
        (waiting("ErrImagePull", "failed to resolve: acme/x: not found"), False, "does not exist", None),
        (waiting("ImagePullBackOff", "failed to pull: 401 Unauthorized"), False, "requires a login", None),
        (waiting("ErrImagePull", "failed: dial tcp: lookup r: no such host"), False, "cannot reach the registry", None),
        (waiting("InvalidImageName", "couldn't parse"), False, "'acme/trainer:v1' is not a valid image name", None),
        (waiting("ErrImageNeverPull"), False, "is not on the node", None),
        (waiting("CreateContainerConfigError", 'secret "aws" not found'), False, "Secret aws not found", None),
        (terminated(128, 'exec: "sh": executable file not found in $PATH', "StartError"), False, "has no sh", None),
        (terminated(128, "exec /bin/sh: no such file or directory", "StartError"), False, "has no sh", None),
        (terminated(255, "exec format error", "Error"), False, "fails with exit code 255: exec format error", None),
        (waiting("ContainerCreating"), None, "was not pulled within 2m on n1", None),
        (pod_with([], on=None), None, "skipped: acme/trainer:v1: the probe was not scheduled", None),
        (pod_with([], "Failed"), None, "skipped: acme/trainer:v1: the probe failed", None),
    ],
)
def test_image_probe(pod: dict[str, Any], image: bool | None, says: str, dns: bool | None) -> None:
    rows = {check.what: check for check in check_image_probe(ImageProbe("acme/trainer:v1", pod, waited_s=120))}
    assert rows["image"].fine is image, rows
    assert says in rows["image"].found
    assert rows.get("DNS", Check("DNS", None, "")).fine is dns
    assert all(check.fix for check in rows.values() if check.fine is False)


def test_failed_pull_is_explained_like_a_pending_pod() -> None:
    for reason, message in (
        ("ErrImagePull", "failed to resolve: acme/x: not found"),
        ("ImagePullBackOff", "failed to pull: 401 Unauthorized"),
        ("ErrImagePull", "failed: dial tcp: lookup r: no such host"),
        ("InvalidImageName", "couldn't parse"),
    ):
        pod = waiting(reason, message)
        image, _ = check_image_probe(ImageProbe("acme/trainer:v1", pod))
        assert image.found == explain_pending(pod, ())


def test_probe_is_finished_when_its_result_is_known() -> None:
    assert is_finished(terminated(0))
    assert is_finished(waiting("ErrImagePull"))
    assert not is_finished(waiting("ContainerCreating"))
    assert not is_finished(pod_with([{"name": "main", "state": {"running": {}}}], "Running"))


def test_probe_pod_is_like_the_pods_of_the_job_but_small_and_without_claims() -> None:
    job = make_job(
        resources={"gpu": 8, "gpu_type": "h100"},
        checkpoint=EXISTING_CLAIM,
        env={"A": "1"},
        secret_env={"TOKEN": {"secret": "aws", "key": "token"}},
        secret_files={"/google": {"secret": "google"}},
        kubernetes={"image_pull_secrets": ["registry"], "user": 1000, "priority_class": "high"},
    )
    (group,) = find_requirements(render_objects(job)[0]).groups
    pod = build_probe_pod(group.spec, "acme/trainer:v1", "p", "team", 120, secrets=False)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["affinity"] == group.spec["affinity"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["priorityClassName"] == "high"
    assert spec["securityContext"] == group.spec["securityContext"]
    assert GPU not in container["resources"]["limits"]
    assert {"name": "A", "value": "1"} in container["env"]
    assert not [variable for variable in container["env"] if "valueFrom" in variable]
    kinds = {kind for volume in spec["volumes"] for kind in volume}
    assert not kinds & {"persistentVolumeClaim", "secret", "configMap"}
    more = build_probe_pod(group.spec, "acme/trainer:v1", "p", "team", 120, secrets=True)["spec"]["containers"][0][
        "env"
    ]
    assert [variable["name"] for variable in more if "valueFrom" in variable] == ["TOKEN"]


@pytest.mark.parametrize(
    ("error", "is_deleted"), [(UnavailableError("no answer came"), True), (StorageFullError("no room"), False)]
)
def test_pod_that_may_have_been_created_is_deleted(error: StokerError, is_deleted: bool) -> None:
    cluster = MagicMock(namespace="team")
    cluster.create.side_effect = error
    spec = {"containers": [{"image": "acme/trainer:v1"}]}
    (probe,), leftover = probe_images(cluster, {"acme/trainer:v1": spec}, with_secrets=False)
    assert probe.rejection is error
    assert not leftover
    assert cluster.delete.called is is_deleted


def kubeconfig(path: Path, server: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_unreachable_api_server_is_one_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    config = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{port}")
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert stoker("doctor", "--on", "k8s") == 5
    out, err = capsys.readouterr()
    first, *rest = [line for line in out.splitlines() if not line.startswith(" ")]
    assert first.startswith("✗ cluster")
    assert f"https://127.0.0.1:{port}: " in first
    assert "Connection refused" in first
    assert all(line.startswith("– ") for line in rest)
    assert "Traceback" not in err


def test_unknown_context_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", "https://127.0.0.1:1")))
    assert stoker("doctor", "--on", "k8s://other/team") == 2

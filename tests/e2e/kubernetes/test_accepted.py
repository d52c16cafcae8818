"""Every rendering is taken by a real API server, which refuses what it does not know, and pods find their nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.core.spec import decode
from stoker.errors import InputError, MissingError
from stoker.jobs.run_folder import create
from stoker.jobs.spec import Job
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL, strategic_merge
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from stoker.launchers.kubernetes.manifests import label_run
from tests.e2e.kubernetes.pods import BUSYBOX
from tests.launchers.contract import until
from tests.support.kubernetes import SHARED, has_mpi_operator

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "single": {"topology": "single"},
    "torchrun": {"workers": 3},
    "torchrun, rwo": {"workers": 3, "checkpoint": {"dir": "/c", "claim": "c", "create": True, "size": "1Gi"}},
    "torchrun, rwx": {
        "workers": 3,
        "checkpoint": {"dir": "/c", "claim": "c", "create": True, "size": "1Gi", "access": "rwx"},
    },
    "torchrun, elastic": {"workers": {"min": 1, "max": 3}},
    "tf-mirrored": {"topology": "tf-mirrored", "workers": 2},
    "tf-ps": {
        "topology": "tf-ps",
        "workers": 2,
        "roles": {
            "ps": {"count": 2, "resources": {"cpu": 1}},
            "evaluator": {"count": 1, "image": "other:v1", "node_selector": {"eval": "true"}},
            "tensorboard": {"count": 1, "expose": "node_port", "ingress": "board.example.com", "logdir": "gs://b"},
        },
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "resources": {"cpu": 2.5, "memory": "4Gi", "gpu": 2, "gpu_type": "nvidia-tesla-v100"},
        "volumes": [{"claim": "data", "path": "/data", "read_only": True}],
        "secret_env": {"TOKEN": {"secret": "s", "key": "k"}},
        "secret_files": {"/var/secrets/google": {"secret": "credential"}},
        "labels": {"team": "vision"},
        "env": {"A": 'it\'s $(HOME) "quoted"\nand more'},
        "data": {"train": "s3://bucket/train", "via": "cluster", "cache": {"dir": "/cache", "size": "2Gi"}},
        "port": 2222,
        "retries": 0,
        "kubernetes": {
            "queue": "gpus",
            "queue_priority": "high",
            "priority_class": "system-cluster-critical",
            "node_selector": {"disk": "fast"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "service_account": "trainer",
            "image_pull_secrets": ["registry"],
            "image_pull_policy": "Always",
            "ttl": "1h",
            "deadline": "24h",
            "shm": "1Gi",
            "user": 1000,
            "group": 1000,
            "patch": [{"kind": "Job", "spec": {"template": {"spec": {"hostNetwork": True}}}}],
        },
    },
}


def job(cluster: KubeClient, *parts: dict[str, Any]) -> Job:
    keys: dict[str, Any] = {"name": "small", "image": BUSYBOX, "program": {"module": "train"}}
    for part in (*parts, {"kubernetes": {"namespace": cluster.namespace}}):
        keys = strategic_merge(keys, part)
    return decode(keys, Job)


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_the_server_takes_every_object(cluster: KubeClient, topology: str, option: str) -> None:
    plan = KubernetesLauncher().render(job(cluster, TOPOLOGIES[topology], OPTIONS[option]))
    for one in label_run(plan.objects, "small-1", 2):
        cluster.apply(one, dry_run=True)
        cluster.create(one, dry_run=True)


def test_the_server_refuses_what_it_does_not_know(cluster: KubeClient) -> None:
    patch = {"kubernetes": {"patch": [{"kind": "Job", "spec": {"template": {"spec": {"tolerationz": []}}}}]}}
    plan = KubernetesLauncher().render(job(cluster, patch))
    (one,) = [one for one in plan.objects if one["kind"] == "Job"]
    with pytest.raises(InputError, match="tolerationz"):
        cluster.apply(one, dry_run=True)
    with pytest.raises(InputError, match="tolerationz"):
        cluster.create(one, dry_run=True)


def test_mpijobs_need_their_operator(cluster: KubeClient, home: None) -> None:
    given = job(cluster, {"topology": "mpi", "workers": 2})
    plan = KubernetesLauncher().render(given)
    crds = sorted((SHARED / "crds").glob("**/*mpijob*.yaml"))
    if not crds:
        pytest.skip("the CRDs of ../shared are not here")
    if not has_mpi_operator(cluster):
        with pytest.raises(MissingError, match="does not know MPIJob"):
            KubernetesLauncher().start(plan, create(given, plan))
    documents = [one for path in crds for one in yaml.safe_load_all(path.read_text()) if one]
    for one in documents:
        if one["kind"] == "CustomResourceDefinition" and one["metadata"]["name"] == "mpijobs.kubeflow.org":
            cluster.apply(one)
    until(lambda: has_mpi_operator(cluster), 30)
    for option in OPTIONS.values():
        mpi = {"topology": "mpi", "workers": 2, "kubernetes": {"patch": []}}
        objects = KubernetesLauncher().render(job(cluster, option, mpi)).objects
        for one in label_run(objects, "small-1"):
            cluster.apply(one, dry_run=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))


def test_workers_are_placed_where_there_are_gpus(cluster: KubeClient, home: None) -> None:
    given = job(cluster, {"workers": 2, "resources": {"gpu": 8}, "program": {"module": "none"}, "retries": 0})
    launcher = KubernetesLauncher()
    run = create(given, plan := launcher.render(given))
    launcher.start(plan, run)
    try:
        until(lambda: len(nodes(cluster, run.id)) == 2, 60)  # eight on each of two nodes: one worker each
    finally:
        launcher.stop(run.handle)
    assert not cluster.list_objects("Pod", {RUN_LABEL: run.id})


def nodes(cluster: KubeClient, run: str) -> set[str]:
    return {
        pod["spec"]["nodeName"] for pod in cluster.list_objects("Pod", {RUN_LABEL: run}) if pod["spec"].get("nodeName")
    }

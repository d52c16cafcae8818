"""A real API server accepts every rendered object and rejects unknown fields; pods are scheduled to GPU nodes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from stoker.core.spec import decode
from stoker.errors import InputError, MissingError
from stoker.jobs.run_folder import create_run
from stoker.jobs.spec import JobSpec
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL, strategic_merge
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from stoker.launchers.kubernetes.run_objects import label_run
from tests.e2e.kubernetes.pods import BUSYBOX
from tests.support.kubernetes import has_mpi_operator
from tests.support.paths import SHARED
from tests.support.waiting import wait_until

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


def build_job(cluster: KubeClient, *parts: dict[str, Any]) -> JobSpec:
    keys: dict[str, Any] = {"name": "small", "image": BUSYBOX, "program": {"module": "train"}}
    for part in (*parts, {"kubernetes": {"namespace": cluster.namespace}}):
        keys = strategic_merge(keys, part)
    return decode(keys, JobSpec)


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_server_accepts_every_object(cluster: KubeClient, topology: str, option: str) -> None:
    plan = KubernetesLauncher().render(build_job(cluster, TOPOLOGIES[topology], OPTIONS[option]))
    for obj in label_run(plan.objects, "small-1", 2):
        cluster.apply(obj, dry_run=True)
        cluster.create(obj, dry_run=True)


def test_server_rejects_unknown_fields(cluster: KubeClient) -> None:
    patch = {"kubernetes": {"patch": [{"kind": "Job", "spec": {"template": {"spec": {"tolerationz": []}}}}]}}
    plan = KubernetesLauncher().render(build_job(cluster, patch))
    (obj,) = [obj for obj in plan.objects if obj["kind"] == "Job"]
    with pytest.raises(InputError, match="tolerationz"):
        cluster.apply(obj, dry_run=True)
    with pytest.raises(InputError, match="tolerationz"):
        cluster.create(obj, dry_run=True)


@pytest.mark.usefixtures("stoker_home")
def test_mpijob_needs_the_operator(cluster: KubeClient) -> None:
    job = build_job(cluster, {"topology": "mpi", "workers": 2})
    plan = KubernetesLauncher().render(job)
    crds = sorted((SHARED / "crds").glob("**/*mpijob*.yaml"))
    if not crds:
        pytest.skip("no CRDs in ../shared")
    if not has_mpi_operator(cluster):
        with pytest.raises(MissingError, match="MPIJob"):
            KubernetesLauncher().start(plan, create_run(job, plan))
    documents = [document for path in crds for document in yaml.safe_load_all(path.read_text()) if document]
    for crd in documents:
        if crd["kind"] == "CustomResourceDefinition" and crd["metadata"]["name"] == "mpijobs.kubeflow.org":
            cluster.apply(crd)
    wait_until(lambda: has_mpi_operator(cluster), 30)
    for option in OPTIONS.values():
        mpi = {"topology": "mpi", "workers": 2, "kubernetes": {"patch": []}}
        objects = KubernetesLauncher().render(build_job(cluster, option, mpi)).objects
        for obj in label_run(objects, "small-1"):
            cluster.apply(obj, dry_run=True)


@pytest.mark.usefixtures("stoker_home")
def test_workers_are_scheduled_to_gpu_nodes(cluster: KubeClient) -> None:
    job = build_job(cluster, {"workers": 2, "resources": {"gpu": 8}, "program": {"module": "none"}, "retries": 0})
    launcher = KubernetesLauncher()
    run = create_run(job, plan := launcher.render(job))
    launcher.start(plan, run)
    try:
        wait_until(lambda: len(get_nodes(cluster, run.id)) == 2, 60)  # two nodes with eight GPUs each
    finally:
        launcher.stop(run.handle)
    assert not cluster.list_objects("Pod", {RUN_LABEL: run.id})


def get_nodes(cluster: KubeClient, run: str) -> set[str]:
    return {
        pod["spec"]["nodeName"] for pod in cluster.list_objects("Pod", {RUN_LABEL: run}) if pod["spec"].get("nodeName")
    }

"""Deployed cache without a cluster: status, warming, and rejected changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.errors import InputError, JobFailedError, NotFoundError, StorageFullError
from stoker.kube import rollout
from stoker.kube.objects import CACHE_PORT, Manifest, cache_url
from stoker.serve.cluster import deployment
from stoker.serve.cluster.manifests import (
    build_cache_objects,
    build_warm_objects,
)
from tests.support.cache_objects import REPLICATED, SINGLE, WARM_JOB, find_kind, make_claim
from tests.support.fake_cluster import fake_cluster


@pytest.mark.parametrize(("storage", "bytes_per_pod"), [("3Gi", 1 << 30), ("3e9", 10**9), ("3000000000000m", 10**9)])
def test_claim_size_is_parsed_as_a_quantity(storage: str, bytes_per_pod: int) -> None:
    claim = {**make_claim("ReadWriteMany"), "kind": "PersistentVolumeClaim"}
    claim |= {"status": {"capacity": {"storage": storage}}}
    claim["spec"]["resources"] = {"requests": {"storage": "1Gi"}}
    assert deployment.claim_bytes_per_pod(fake_cluster([claim]), claim["metadata"]["name"], 3) == bytes_per_pod


# --- Status


def make_workload(*, desired: int = 2, observed: int = 5, **status: int) -> Manifest:
    return {
        "metadata": {"generation": 5},
        "spec": {"replicas": desired},
        "status": {"observedGeneration": observed, **status},
    }


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (make_workload(), 0),
        (make_workload(observed=4, replicas=2, readyReplicas=2, updatedReplicas=2), 0),
        (make_workload(replicas=2, readyReplicas=2, updatedReplicas=0), 0),
        (make_workload(replicas=3, readyReplicas=2, updatedReplicas=1), 0),
        (make_workload(replicas=3, readyReplicas=3, updatedReplicas=1), 1),
        (make_workload(replicas=2, readyReplicas=2, updatedReplicas=2), 2),
    ],
)
def test_only_ready_pods_of_the_current_version_count(workload: Manifest, expected: int) -> None:
    assert rollout.count_ready_pods(workload) == (expected, 2)


def running_pod(name: str, address: str, *, ready: bool = True) -> Manifest:
    state = {"name": "main", "ready": ready, "restartCount": 1, "state": {"running": {}}}
    status = {"phase": "Running", "podIP": address, "containerStatuses": [state]}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {"nodeName": "node1"}, "status": status}


LOG = b"""\
2026-11-16T00:00:00Z 2026/11/16 00:00:00 [warn] 1#1: something
2026-11-16T00:00:01Z 200 100 80 MISS 120
2026-11-16T00:00:01Z 206 100 0 MISS 60, 60
2026-11-16T00:00:02Z 200 100 80 HIT -
2026-11-16T00:00:03Z 502 5 80 - -
"""


def test_status_counts_the_access_log() -> None:
    pods = [running_pod("stoker-cache-a", "10.0.0.1"), running_pod("stoker-cache-b", "10.0.0.2", ready=False)]
    status = deployment.read_status(
        fake_cluster([*build_cache_objects(REPLICATED), *pods], {"stoker-cache-a": LOG, "stoker-cache-b": b""})
    )
    assert status.url == cache_url("team")
    assert status.budget == 200 << 30
    assert [origin["name"] for origin in status.origins] == ["a", "b", "c"]
    assert [pod.ready for pod in status.pods] == [True, False]
    expected = {"requests": 3, "bytes": 205, "errors": 1, "hits": 1, "misses": 2, "origin_bytes": 240}
    assert status.pods[0].log == expected


def test_pods_of_a_previous_version_are_ignored() -> None:
    objects = build_cache_objects(SINGLE)
    previous, current = running_pod("old", "", ready=False), running_pod("new", "", ready=False)
    crashing = {"waiting": {"reason": "CrashLoopBackOff"}}
    previous["status"]["containerStatuses"][0] |= {"restartCount": 9, "state": crashing}
    current["metadata"]["annotations"] = find_kind(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    cluster = fake_cluster([*objects, previous, current], {"old": b"", "new": b""})
    assert not rollout.has_failed_permanently(cluster, objects[2])
    current["status"]["containerStatuses"][0] |= {"restartCount": 9, "state": crashing}
    assert rollout.has_failed_permanently(cluster, objects[2])


def test_replicas_are_warmed_by_address_and_a_single_pod_by_service() -> None:
    first, second = running_pod("a", "10.0.0.1"), running_pod("b", "fd00::2")
    target = deployment.find_warm_target(fake_cluster([*build_cache_objects(REPLICATED), first, second]))
    assert target.caches == (f"http://10.0.0.1:{CACHE_PORT}", f"http://[fd00::2]:{CACHE_PORT}")
    assert target.origins["http://origin.far.svc/x"] == "a"
    assert deployment.find_warm_target(fake_cluster([*build_cache_objects(REPLICATED), first])).caches == (
        cache_url("team"),
    )
    with pytest.raises(NotFoundError, match="stoker data cache --on k8s"):
        deployment.find_warm_target(fake_cluster([]))


def finished_job(kind: str) -> Manifest:
    conditions = [{"type": kind, "status": "True", "message": "too often"}]
    return {"kind": "Job", "metadata": {"name": WARM_JOB.name}, "status": {"conditions": conditions}}


def test_warm_job_is_followed_until_it_finishes() -> None:
    log = b"t read 2\nt something else\nt read 1\nt read 2\n"
    read: list[int] = []
    pod = running_pod("warm", "")
    pod["status"]["phase"] = "Succeeded"
    deployment._follow_job(fake_cluster([finished_job("Complete"), pod], {"warm": log}), WARM_JOB, read.append, print)
    assert read == [1, 0]
    failed = fake_cluster([finished_job("Failed"), pod], {"warm": b"t read 1\nt failed 2 wget: error: 404\n"})
    with pytest.raises(JobFailedError, match=r"\b1 of 2\b.*/train/b\.tar: wget: error: 404.*; .*origin"):
        deployment._follow_job(failed, WARM_JOB, read.append, print)
    with pytest.raises(JobFailedError, match=r"\b1 of 2\b.*; too often"):
        deployment._follow_job(
            fake_cluster([finished_job("Failed"), pod], {"warm": b"t read 1\n"}), WARM_JOB, read.append, print
        )


def test_failed_read_is_ignored_if_a_later_pod_succeeds() -> None:
    first, second = running_pod("first", ""), running_pod("second", "")
    logs = {"first": b"t failed 2 wget: timed out\n", "second": b"t read 1\nt read 2\n"}
    read: list[int] = []
    deployment._follow_job(fake_cluster([finished_job("Complete"), first, second], logs), WARM_JOB, read.append, print)
    assert read == [0, 1]


def test_deleted_pod_does_not_stop_following() -> None:
    read: list[int] = []
    pods = [running_pod("gone", ""), running_pod("next", "")]
    logs = {"next": b"t read 1\nt read 2\n"}
    deployment._follow_job(fake_cluster([finished_job("Complete"), *pods], logs), WARM_JOB, read.append, print)
    assert read == [0, 1]


@pytest.mark.parametrize("kind", ["Job", "ConfigMap"])
def test_rejected_warm_job_leaves_no_objects(kind: str) -> None:
    cluster = fake_cluster([])
    cluster.rejections[kind] = StorageFullError("quota q is exhausted")
    with pytest.raises(StorageFullError):
        deployment.run_warm_job(cluster, WARM_JOB)
    assert not cluster.objects


def test_config_map_is_owned_by_the_job() -> None:
    cluster = fake_cluster([])
    deployment._create_job(cluster, *build_warm_objects(WARM_JOB))
    (reference,) = cluster.objects["ConfigMap", WARM_JOB.name]["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["uid"]) == ("Job", "uid of Job")


def test_rejected_cache_leaves_the_running_one_unchanged() -> None:
    running = build_cache_objects(SINGLE)
    desired = build_cache_objects(replace(SINGLE, storage_class="disks", size=64 << 20))
    cluster = fake_cluster(running)
    cluster.rejections["StatefulSet"] = InputError("rejected: spec: Forbidden: updates ... are forbidden")
    with pytest.raises(InputError, match="--stop"):
        deployment.deploy_cache(cluster, desired)
    assert list(cluster.objects.values()) == running
    cluster.rejections.clear()
    deployment.deploy_cache(cluster, desired)
    assert {kind for kind, _ in cluster.objects} == {"ConfigMap", "Service", "StatefulSet"}

"""Caches of a Kubernetes namespace for tests, and their objects."""

from __future__ import annotations

from dataclasses import replace

from stoker.kube.objects import Manifest, cache_url
from stoker.serve.cluster.manifests import (
    ClusterCache,
    WarmJob,
)

SINGLE = ClusterCache(origins=(("", "http://origin:8000"),), size=1 << 30)
REPLICATED = ClusterCache(
    origins=(("a", "http://origin.far.svc/x"), ("b", "https://data.example.com/y"), ("c", "http://[fd00::1]:8080")),
    size=200 << 30,
    replicas=3,
    namespace="team",
)
CACHES = [
    SINGLE,
    REPLICATED,
    replace(REPLICATED, claim="shared"),
    replace(REPLICATED, storage_class="fast"),
    replace(SINGLE, claim="one"),
]
WARM_JOB = WarmJob(paths=("/train/a.tar", "/train/b.tar"), caches=(cache_url("team"),))


def find_kind(objects: list[Manifest], kind: str) -> Manifest:
    """Return the only object of a kind."""
    (manifest,) = [manifest for manifest in objects if manifest["kind"] == kind]
    return manifest


def find_pod_spec(objects: list[Manifest]) -> Manifest:
    """Return the pod spec of the only workload."""
    (workload,) = [manifest for manifest in objects if "template" in manifest.get("spec", {})]
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def make_claim(*modes: str) -> Manifest:
    """Return a claim named `kept` with these access modes."""
    return {"metadata": {"name": "kept"}, "spec": {"accessModes": list(modes)}}

"""A Kubernetes client without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stoker.errors import NotFoundError, StokerError
from stoker.kube.objects import Manifest


class FakeCluster:
    """A KubeClient with objects in a dictionary, and logs."""

    context, namespace, url = "here", "team", "k8s://here/team"

    def __init__(self, objects: dict[tuple[str, str], Manifest], logs: dict[str, bytes] | None = None) -> None:
        self.objects, self.logs = objects, logs or {}
        self.rejections: dict[str, StokerError] = {}

    def __str__(self) -> str:
        return self.url

    def get(self, kind: str, name: str) -> Manifest | None:
        return self.objects.get((kind, name))

    def list_objects(self, kind: str, labels: Any = "", fields: str = "") -> list[Manifest]:
        return [manifest for (other_kind, _), manifest in self.objects.items() if other_kind == kind]

    def stream_log(self, pod: str, container: str = "", *, follow: bool, since: str = "") -> Iterator[bytes]:
        if pod not in self.logs:
            raise NotFoundError(f"pod {pod} not found")
        yield from self.logs[pod].splitlines()

    def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        if manifest["kind"] in self.rejections:
            raise self.rejections[manifest["kind"]]
        if dry_run:
            return manifest
        created = {**manifest, "metadata": {**manifest["metadata"], "uid": f"uid of {manifest['kind']}"}}
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = created
        return created

    def delete(self, kind: str, name: str) -> bool:
        return self.objects.pop((kind, name), None) is not None


def fake_cluster(objects: list[Manifest], logs: dict[str, bytes] | None = None) -> Any:
    return FakeCluster({(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in objects}, logs)

"""The caching proxy of a namespace on a real cluster: deployed, read through, warmed, killed, changed and deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import UnavailableError
from stoker.kube.client import ExecResult, KubeClient
from stoker.kube.objects import CACHE_SERVICE, MANAGED_BY, Manifest, cache_url
from stoker.serve.cluster.manifests import CACHE_LABELS, KINDS, SERVER_LABELS
from tests.e2e.kubernetes.pods import build_job_keys
from tests.support.trees import make_dataset, stoker
from tests.support.waiting import eventually

BUSYBOX, HOST = "docker.io/library/busybox:local", "docker.io/library/hostpy:local"
ORIGIN = "http://origin:8000"
SIZE = "256Mi"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A shard set that pods can read."""
    make_dataset(tmp_path / "pets", train=20)
    assert stoker("data", "convert", tmp_path / "pets", tmp_path / "shards", "--shard-size", "40KiB", "--force") == 0
    (tmp_path / "shards" / "large").write_bytes(bytes(range(256)) * (40 << 10))  # two slices
    return tmp_path / "shards"


@pytest.fixture
def origin(cluster: KubeClient, shards: Path) -> Iterator[Manifest]:
    """A web server in the cluster, and a client pod."""
    server = build_pod("origin", ["httpd", "-f", "-vv", "-p", "8000", "-h", "/data"], {"app": "origin"})
    server["spec"]["volumes"] = [{"name": "data", "hostPath": {"path": str(shards)}}]
    server["spec"]["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data", "readOnly": True}]
    cluster.create(server)
    ports = [{"port": 8000}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "origin"}}
    cluster.create({**service, "spec": {"selector": {"app": "origin"}, "ports": ports}})
    cluster.create(build_pod("client", ["sleep", "3600"], {}))
    assert eventually(lambda: all(get_phase(cluster, name) == "Running" for name in ("origin", "client")), 60)
    yield server
    stoker("data", "cache", "--on", on(cluster), "--stop")


def build_pod(name: str, command: list[str], labels: dict[str, str]) -> Manifest:
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "IfNotPresent", "command": command}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def get_phase(cluster: KubeClient, name: str) -> str:
    pod = cluster.get("Pod", name)
    return "" if pod is None else str(pod["status"]["phase"])


def on(cluster: KubeClient) -> str:
    return f"k8s://{cluster.context}/{cluster.namespace}"


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    """A patch that mounts the host's programs into an image without any."""
    return write_host_patch(tmp_path, "Deployment")


def write_host_patch(folder: Path, kind: str) -> Path:
    names = {"usr": "/usr", "ld": "/etc/ld.so.cache"}
    spec = {
        "containers": [
            {
                "name": "main",
                "imagePullPolicy": "IfNotPresent",
                "volumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for name, path in names.items()],
            }
        ],
        "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in names.items()],
    }
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump({"kind": kind, "spec": {"template": {"spec": spec}}}))
    return path


def exec_in_client(cluster: KubeClient, *argv: str) -> ExecResult:
    """Run a command in the client pod; retry, since about one in twenty connections fails before anything runs."""
    for _ in range(3):
        with suppress(UnavailableError):
            return cluster.exec_in_pod("client", argv)
    return cluster.exec_in_pod("client", argv)


def fetch(cluster: KubeClient, path: str) -> tuple[str, str]:
    """Fetch a path from the cache; return the status line and the X-Cache header."""
    url = f"{cache_url(cluster.namespace)}{path}"
    result = exec_in_client(cluster, "wget", "-S", "-O", "/dev/null", url)
    lines = [line.strip() for line in result.stderr.decode().splitlines()]
    status = next((line for line in lines if line.startswith("HTTP/")), str(lines))
    return status, next((line.removeprefix("X-Cache: ") for line in lines if line.startswith("X-Cache: ")), "")


def deploy(cluster: KubeClient, patch: Path, *more: object) -> int:
    words = ["--origin", f"pets={ORIGIN}", "--size", SIZE, "--image", HOST, "--patch", patch, "--timeout", "60s"]
    return stoker("data", "cache", "--on", on(cluster), *words, *more)


def get_status(capfd: pytest.CaptureFixture[str], cluster: KubeClient) -> Any:
    capfd.readouterr()
    assert stoker("data", "cache", "--on", on(cluster), "--status", "--json") == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.usefixtures("origin")
def test_life_cycle_of_a_cache(
    cluster: KubeClient, patch: Path, tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert deploy(cluster, patch) == 0, capfd.readouterr().err
    output = capfd.readouterr()
    assert "1 of 1 " in output.err
    assert "ready" in output.out

    # Each slice comes from the origin once.
    assert fetch(cluster, "/pets/large") == ("HTTP/1.1 200 OK", "MISS")
    assert fetch(cluster, "/pets/large") == ("HTTP/1.1 200 OK", "HIT")
    assert "404" in fetch(cluster, "/pets/nothing")[0]
    assert "404" in fetch(cluster, "/elsewhere/large")[0]
    first = get_status(capfd, cluster)
    (pod,) = first["pods"]
    assert pod["ready"]
    assert pod["log"]["hits"] >= 1
    assert pod["log"]["bytes"] >= 2 * (10 << 20)
    assert (10 << 20) <= pod["log"]["origin_bytes"] < 2 * (10 << 20)
    assert first["budget"] == 256 << 20

    # Clients read the list of origins from the cache.
    origins = exec_in_client(cluster, "wget", "-q", "-O", "-", f"{cache_url(cluster.namespace)}/-/origins")
    assert json.loads(origins.stdout) == [{"name": "pets", "url": ORIGIN}]

    # A Job warms the cache, though this machine cannot reach the origin.
    words = [
        "data",
        "warm",
        f"{ORIGIN}/train",
        "--read-from",
        shards / "train",
        "--on",
        on(cluster),
        "--image",
        BUSYBOX,
    ]
    assert stoker(*words, "--json") == 0, capfd.readouterr().err
    warmed = json.loads(capfd.readouterr().out)
    names = [path.name for path in sorted((shards / "train").glob("*.tar"))]
    assert len(names) > 3
    assert sorted(warmed["shards"]) == names
    assert warmed["bytes"] == sum((shards / "train" / name).stat().st_size for name in names)
    for name in [*names, "manifest.json", f"index/{names[0]}.npy"]:
        assert fetch(cluster, f"/pets/train/{name}") == ("HTTP/1.1 200 OK", "HIT"), name
    assert stoker(*words) == 0  # the previous Job has finished
    assert len(cluster.list_objects("Job", CACHE_LABELS)) == 1

    # An object missing at the origin is reported by name.
    (shards / "val" / "manifest.json").rename(tmp_path / "manifest.json")
    words = ["data", "warm", f"{ORIGIN}/val", "--read-from", tmp_path / "copy", "--on", on(cluster), "--image", BUSYBOX]
    (tmp_path / "copy").mkdir()
    (tmp_path / "manifest.json").rename(tmp_path / "copy" / "manifest.json")
    capfd.readouterr()
    assert stoker(*words) == 4
    assert re.search(r"/pets/val/manifest\.json.*404", capfd.readouterr().err)

    # A killed pod is replaced.
    cluster.delete("Pod", pod["name"], grace_s=0)
    assert eventually(lambda: is_replaced(cluster, pod["name"]), 60)
    # The old pod may respond for a moment.
    assert eventually(lambda: fetch(cluster, "/pets/large") == ("HTTP/1.1 200 OK", "MISS"), 60)

    # Deploying again changes nothing; another configuration replaces the pod.
    (name,) = [each["metadata"]["name"] for each in cluster.list_objects("Pod", SERVER_LABELS)]
    assert deploy(cluster, patch) == 0
    assert [each["metadata"]["name"] for each in cluster.list_objects("Pod", SERVER_LABELS)] == [name]
    assert deploy(cluster, patch, "--revalidate-after", "5") == 0
    running = {each["metadata"]["name"] for each in cluster.list_objects("Pod", SERVER_LABELS) if is_ready(each)}
    assert name not in running
    assert len(running) == 1

    capfd.readouterr()
    assert stoker("data", "cache", "--on", on(cluster), "--stop") == 0
    assert "removed 7 objects" in capfd.readouterr().err
    left = [obj for kind in (*KINDS, "Pod") for obj in cluster.list_objects(kind, MANAGED_BY)]
    assert left == []
    assert stoker("data", "cache", "--on", on(cluster), "--status") == 2
    assert f"{cluster.namespace}: no cache in this namespace" in capfd.readouterr().err


def is_ready(pod: Manifest) -> bool:
    is_terminating = "deletionTimestamp" in pod["metadata"]
    return not is_terminating and any(each["ready"] for each in pod["status"].get("containerStatuses") or ())


def is_replaced(cluster: KubeClient, former: str) -> bool:
    ready = [
        pod for pod in cluster.list_objects("Pod", SERVER_LABELS) if pod["metadata"]["name"] != former and is_ready(pod)
    ]
    return len(ready) == 1


@pytest.fixture
def volume(cluster: KubeClient, tmp_path: Path) -> Iterator[str]:
    """A claim on a folder of this machine."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    tmp_path.chmod(0o755)
    name = f"cache-{cluster.namespace}"
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    made = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}}
    cluster.create({**made, "spec": {**spec, "hostPath": {"path": str(tmp_path / "volume")}}})
    binding = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "kept"}}
    cluster.create({**claim, "spec": {**binding, "resources": {"requests": {"storage": "1Gi"}}}})
    yield "kept"
    cluster.delete("PersistentVolume", name)


@pytest.mark.usefixtures("origin")
def test_claim_keeps_cached_objects(
    cluster: KubeClient, volume: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    patch = write_host_patch(tmp_path, "StatefulSet")
    words = ["--origin", ORIGIN, "--claim", volume, "--image", HOST, "--patch", patch, "--timeout", "60s"]
    assert stoker("data", "cache", "--on", on(cluster), *words) == 0, capfd.readouterr().err
    assert get_status(capfd, cluster)["budget"] == 1 << 30
    assert fetch(cluster, "/large") == ("HTTP/1.1 200 OK", "MISS")
    uid = cluster.get("Pod", f"{CACHE_SERVICE}-0")
    assert uid is not None
    cluster.delete("Pod", f"{CACHE_SERVICE}-0")
    assert eventually(lambda: is_recreated(cluster, uid["metadata"]["uid"]), 60)
    assert fetch(cluster, "/large") == ("HTTP/1.1 200 OK", "HIT")

    refused = ["--origin", ORIGIN, "--claim", volume, "--image", HOST, "--replicas", "2"]
    assert stoker("data", "cache", "--on", on(cluster), *refused) == 2
    assert re.search(r"\bkept\b.*\b2 pods\b.*ReadWriteOnce\b", capfd.readouterr().err)
    assert stoker("data", "cache", "--on", on(cluster), "--stop") == 0
    assert "removed 3 objects" in capfd.readouterr().err
    assert cluster.get("PersistentVolumeClaim", volume) is not None


def is_recreated(cluster: KubeClient, uid: str) -> bool:
    found = cluster.get("Pod", f"{CACHE_SERVICE}-0")
    return found is not None and found["metadata"]["uid"] != uid and is_ready(found)


def test_error_says_why_the_cache_is_not_ready(
    cluster: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--origin", "http://nowhere", "--timeout", "12s"]

    def get_error(*more: object) -> str:
        capfd.readouterr()
        assert stoker("data", "cache", "--on", on(cluster), *words, *more) != 0
        said = capfd.readouterr().err
        return said.splitlines()[-1]

    assert "cannot pull image docker.io/library/none:local" in get_error(
        "--size", SIZE, "--image", "docker.io/library/none:local"
    )
    never = tmp_path / "never.yaml"
    never.write_text(
        "kind: Deployment\nspec: {template: {spec: {containers: [{name: main, imagePullPolicy: IfNotPresent}]}}}\n"
    )
    assert "stoker: this image has no nginx" in get_error(
        "--size", SIZE, "--image", BUSYBOX, "--patch", never, "--timeout", "60s"
    )
    assert "insufficient ephemeral-storage" in get_error("--size", "900Ti", "--image", BUSYBOX)
    assert "is not bound: check its storage class" in get_error(
        "--size", SIZE, "--image", BUSYBOX, "--storage-class", "no-such-class"
    )
    assert "claim lost not found" in get_error("--size", SIZE, "--claim", "lost")
    assert "--stop" in get_error("--size", "1Gi", "--image", BUSYBOX, "--storage-class", "another")
    assert stoker("data", "cache", "--on", on(cluster), "--stop") == 0
    assert eventually(lambda: not cluster.list_objects("PersistentVolumeClaim", CACHE_LABELS), 30)


READS = """
import os
import stoker
from stoker.storage.cache_url import find_cache_url
train = find_cache_url(os.environ["STOKER_DATA_TRAIN"], os.environ["STOKER_DATA_VIA"])
loader = stoker.Loader(train, global_batch=5, size=32, rank=(0, 1))
print("samples", sum(len(batch.labels) for batch in loader), os.environ["STOKER_DATA_VIA"])
"""


@pytest.mark.usefixtures("origin")
@pytest.mark.usefixtures("stoker_home")
def test_job_reads_through_the_cache(
    cluster: KubeClient,
    patch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deploy(cluster, patch) == 0, capfd.readouterr().err
    (tmp_path / "reads.py").write_text(READS)
    job = {
        "name": "reads",
        "topology": "single",
        "program": {"script": "reads.py"},
        "data": {"train": f"{ORIGIN}/train", "via": "cluster"},
        "profile": {"every": 0},
        "retries": 0,
        **build_job_keys(cluster.namespace),
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", "job.yaml", "--on", on(cluster)) == 0, capfd.readouterr().err
    assert f"samples 60 {cache_url(cluster.namespace)}" in capfd.readouterr().out
    (pod,) = get_status(capfd, cluster)["pods"]
    assert pod["log"]["origin_bytes"] > 0

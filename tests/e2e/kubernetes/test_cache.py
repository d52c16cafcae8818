"""The cache of a namespace, on a real cluster: deployed, read through, filled, killed, changed and removed."""

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
from tests.e2e.kubernetes.pods import keys
from tests.support.trees import make_dataset, stoker
from tests.support.waiting import eventually

BUSYBOX, HOST = "docker.io/library/busybox:local", "docker.io/library/hostpy:local"
ORIGIN = "http://origin:8000"
SIZE = "256Mi"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A shard set that pods can read."""
    make_dataset(tmp_path / "pets", train=20)
    assert stoker("data", "convert", tmp_path / "pets", tmp_path / "shards", "--shard-size", "40KiB") == 0
    (tmp_path / "shards" / "large").write_bytes(bytes(range(256)) * (40 << 10))  # two slices
    return tmp_path / "shards"


@pytest.fixture
def origin(cluster: KubeClient, shards: Path) -> Iterator[Manifest]:
    """A web server in the cluster, and a pod to ask from."""
    server = pod("origin", ["httpd", "-f", "-vv", "-p", "8000", "-h", "/data"], {"app": "origin"})
    server["spec"]["volumes"] = [{"name": "data", "hostPath": {"path": str(shards)}}]
    server["spec"]["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data", "readOnly": True}]
    cluster.create(server)
    ports = [{"port": 8000}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "origin"}}
    cluster.create({**service, "spec": {"selector": {"app": "origin"}, "ports": ports}})
    cluster.create(pod("asker", ["sleep", "3600"], {}))
    assert eventually(lambda: all(phase(cluster, name) == "Running" for name in ("origin", "asker")), 60)
    yield server
    stoker("data", "cache", "--on", on(cluster), "--stop")


def pod(name: str, command: list[str], labels: dict[str, str]) -> Manifest:
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "IfNotPresent", "command": command}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def phase(cluster: KubeClient, name: str) -> str:
    found = cluster.get("Pod", name)
    return "" if found is None else str(found["status"]["phase"])


def on(cluster: KubeClient) -> str:
    return f"k8s://{cluster.context}/{cluster.namespace}"


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    """Programs of the host in an image without any: what `--patch` is for."""
    return host_programs(tmp_path, "Deployment")


def host_programs(folder: Path, kind: str) -> Path:
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


def run(cluster: KubeClient, *argv: str) -> ExecResult:
    """Run a command in the pod that asks; one in some twenty connections fails before anything runs."""
    for _ in range(3):
        with suppress(UnavailableError):
            return cluster.exec_in_pod("asker", argv)
    return cluster.exec_in_pod("asker", argv)


def asked(cluster: KubeClient, path: str) -> tuple[str, str]:
    """Ask the cache from a pod; give its status line and what X-Cache says."""
    url = f"{cache_url(cluster.namespace)}{path}"
    done = run(cluster, "wget", "-S", "-O", "/dev/null", url)
    said = [line.strip() for line in done.stderr.decode().splitlines()]
    status = next((line for line in said if line.startswith("HTTP/")), str(said))
    return status, next((line.removeprefix("X-Cache: ") for line in said if line.startswith("X-Cache: ")), "")


def deployed(cluster: KubeClient, patch: Path, *more: object) -> int:
    words = ["--origin", f"pets={ORIGIN}", "--size", SIZE, "--image", HOST, "--patch", patch, "--timeout", "60s"]
    return stoker("data", "cache", "--on", on(cluster), *words, *more)


def told(capfd: pytest.CaptureFixture[str], cluster: KubeClient) -> Any:
    capfd.readouterr()
    assert stoker("data", "cache", "--on", on(cluster), "--status", "--json") == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.usefixtures("origin")
def test_a_cache_from_deployment_to_removal(
    cluster: KubeClient, patch: Path, tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert deployed(cluster, patch) == 0, capfd.readouterr().err
    said = capfd.readouterr()
    assert "1 of 1 answer" in said.err
    assert "ready" in said.out

    # Each slice comes from the origin once.
    assert asked(cluster, "/pets/large") == ("HTTP/1.1 200 OK", "MISS")
    assert asked(cluster, "/pets/large") == ("HTTP/1.1 200 OK", "HIT")
    assert "404" in asked(cluster, "/pets/nothing")[0]
    assert "404" in asked(cluster, "/elsewhere/large")[0]
    first = told(capfd, cluster)
    (one,) = first["pods"]
    assert one["ready"]
    assert one["log"]["hits"] >= 1
    assert one["log"]["bytes"] >= 2 * (10 << 20)
    assert (10 << 20) <= one["log"]["origin_bytes"] < 2 * (10 << 20)
    assert first["budget"] == 256 << 20

    # A client finds its way by what the cache tells of itself.
    origins = run(cluster, "wget", "-q", "-O", "-", f"{cache_url(cluster.namespace)}/-/origins")
    assert json.loads(origins.stdout) == [{"name": "pets", "url": ORIGIN}]

    # Filled by a Job, though this machine cannot reach the origin.
    words = ["data", "warm", f"{ORIGIN}/train", "--read-from", shards / "train", "--on", on(cluster), "--image", BUSYBOX]
    assert stoker(*words, "--json") == 0, capfd.readouterr().err
    warmed = json.loads(capfd.readouterr().out)
    names = [path.name for path in sorted((shards / "train").glob("*.tar"))]
    assert len(names) > 3
    assert sorted(warmed["shards"]) == names
    assert warmed["bytes"] == sum((shards / "train" / name).stat().st_size for name in names)
    for name in [*names, "manifest.json", f"index/{names[0]}.npy"]:
        assert asked(cluster, f"/pets/train/{name}") == ("HTTP/1.1 200 OK", "HIT"), name
    assert stoker(*words) == 0  # the former Job is over
    assert len(cluster.list_objects("Job", CACHE_LABELS)) == 1

    # What is missing at the origin is told, by name.
    (shards / "val" / "manifest.json").rename(tmp_path / "manifest.json")
    words = ["data", "warm", f"{ORIGIN}/val", "--read-from", tmp_path / "copy", "--on", on(cluster), "--image", BUSYBOX]
    (tmp_path / "copy").mkdir()
    (tmp_path / "manifest.json").rename(tmp_path / "copy" / "manifest.json")
    capfd.readouterr()
    assert stoker(*words) == 4
    assert "/pets/val/manifest.json: wget: server returned error: HTTP/1.1 404 Not Found" in capfd.readouterr().err

    # A killed pod comes back, and answers.
    cluster.delete("Pod", one["name"], grace_s=0)
    assert eventually(lambda: back(cluster, one["name"]), 60)
    assert asked(cluster, "/pets/large") == ("HTTP/1.1 200 OK", "MISS")

    # The same again changes nothing; another configuration makes another pod.
    (name,) = [each["metadata"]["name"] for each in cluster.list_objects("Pod", SERVER_LABELS)]
    assert deployed(cluster, patch) == 0
    assert [each["metadata"]["name"] for each in cluster.list_objects("Pod", SERVER_LABELS)] == [name]
    assert deployed(cluster, patch, "--revalidate-after", "5") == 0
    running = {each["metadata"]["name"] for each in cluster.list_objects("Pod", SERVER_LABELS) if is_ready(each)}
    assert name not in running
    assert len(running) == 1

    capfd.readouterr()
    assert stoker("data", "cache", "--on", on(cluster), "--stop") == 0
    assert "removed 7 objects" in capfd.readouterr().err
    left = [one for kind in (*KINDS, "Pod") for one in cluster.list_objects(kind, MANAGED_BY)]
    assert left == []
    assert stoker("data", "cache", "--on", on(cluster), "--status") == 2
    assert "there is no cache in this namespace" in capfd.readouterr().err


def is_ready(one: Manifest) -> bool:
    is_ending = "deletionTimestamp" in one["metadata"]
    return not is_ending and any(each["ready"] for each in one["status"].get("containerStatuses") or ())


def back(cluster: KubeClient, former: str) -> bool:
    ready = [one for one in cluster.list_objects("Pod", SERVER_LABELS) if one["metadata"]["name"] != former and is_ready(one)]
    return len(ready) == 1


@pytest.fixture
def volume(cluster: KubeClient, tmp_path: Path) -> Iterator[str]:
    """A claim of the test's own, on a folder of this machine."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    tmp_path.chmod(0o755)
    name = f"cache-{cluster.namespace}"
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    made = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}}
    cluster.create({**made, "spec": {**spec, "hostPath": {"path": str(tmp_path / "volume")}}})
    wanted = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "kept"}}
    cluster.create({**claim, "spec": {**wanted, "resources": {"requests": {"storage": "1Gi"}}}})
    yield "kept"
    cluster.delete("PersistentVolume", name)


@pytest.mark.usefixtures("origin")
def test_a_claim_keeps_what_was_read(
    cluster: KubeClient, volume: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    patch = host_programs(tmp_path, "StatefulSet")
    words = ["--origin", ORIGIN, "--claim", volume, "--image", HOST, "--patch", patch, "--timeout", "60s"]
    assert stoker("data", "cache", "--on", on(cluster), *words) == 0, capfd.readouterr().err
    assert told(capfd, cluster)["budget"] == 1 << 30
    assert asked(cluster, "/large") == ("HTTP/1.1 200 OK", "MISS")
    uid = cluster.get("Pod", f"{CACHE_SERVICE}-0")
    assert uid is not None
    cluster.delete("Pod", f"{CACHE_SERVICE}-0")
    assert eventually(lambda: is_another(cluster, uid["metadata"]["uid"]), 60)
    assert asked(cluster, "/large") == ("HTTP/1.1 200 OK", "HIT")

    refused = ["--origin", ORIGIN, "--claim", volume, "--image", HOST, "--replicas", "2"]
    assert stoker("data", "cache", "--on", on(cluster), *refused) == 2
    assert re.search(r"\bkept\b.*ReadWriteOnce\b.*\b2 pods", capfd.readouterr().err)
    assert stoker("data", "cache", "--on", on(cluster), "--stop") == 0
    assert "removed 3 objects" in capfd.readouterr().err
    assert cluster.get("PersistentVolumeClaim", volume) is not None


def is_another(cluster: KubeClient, uid: str) -> bool:
    found = cluster.get("Pod", f"{CACHE_SERVICE}-0")
    return found is not None and found["metadata"]["uid"] != uid and is_ready(found)


def test_says_why_it_is_not_ready(cluster: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--origin", "http://nowhere", "--timeout", "12s"]

    def refusal(*more: object) -> str:
        capfd.readouterr()
        assert stoker("data", "cache", "--on", on(cluster), *words, *more) != 0
        said = capfd.readouterr().err
        return said.splitlines()[-1]

    assert "image docker.io/library/none:local cannot be pulled" in refusal(
        "--size", SIZE, "--image", "docker.io/library/none:local"
    )
    never = tmp_path / "never.yaml"
    never.write_text(
        "kind: Deployment\nspec: {template: {spec: {containers: [{name: main, imagePullPolicy: IfNotPresent}]}}}\n"
    )
    assert "stoker: this image has no nginx" in refusal(
        "--size", SIZE, "--image", BUSYBOX, "--patch", never, "--timeout", "60s"
    )
    assert "too little ephemeral-storage free" in refusal("--size", "900Ti", "--image", BUSYBOX)
    assert "no volume was found or made yet for its claim" in refusal(
        "--size", SIZE, "--image", BUSYBOX, "--storage-class", "no-such-class"
    )
    assert "claim lost" in refusal("--size", SIZE, "--claim", "lost")
    assert "--stop" in refusal("--size", "1Gi", "--image", BUSYBOX, "--storage-class", "another")
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
def test_a_job_reads_through_it(
    cluster: KubeClient,
    patch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deployed(cluster, patch) == 0, capfd.readouterr().err
    (tmp_path / "reads.py").write_text(READS)
    job = {
        "name": "reads",
        "topology": "single",
        "program": {"script": "reads.py"},
        "data": {"train": f"{ORIGIN}/train", "via": "cluster"},
        "profile": {"every": 0},
        "retries": 0,
        **keys(cluster.namespace),
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", "job.yaml", "--on", on(cluster)) == 0, capfd.readouterr().err
    assert f"samples 60 {cache_url(cluster.namespace)}" in capfd.readouterr().out
    (one,) = told(capfd, cluster)["pods"]
    assert one["log"]["origin_bytes"] > 0

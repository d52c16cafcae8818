"""A model server on a real cluster: deployed from a claim, asked through its Service, reloaded, scaled and deleted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import UnavailableError
from stoker.kube.client import KubeClient
from stoker.model_server.cluster.manifests import ClusterModel, build_model_objects, model_labels
from stoker.testing import make_shards
from tests.e2e.kubernetes.pods import IMAGE, SOURCE, build_host_mounts, claim_of_folder
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = ["checkpoints", "--name", "pets", "--claim", "models"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a short training."""
    root = tmp_path_factory.mktemp("trained")
    shards = make_shards(root / "shards", samples=40, val=10, classes=3)
    flags = ["--train", shards / "train", "--size", 8, "--model", "trivial", "--epochs", 2, "--threads", 1]
    flags += ["--global-batch-size", 20, "--checkpoint-dir", root / "checkpoints"]
    subprocess.run(
        [sys.executable, "-m", "stoker.trainers.torch_image", *map(str, flags)],
        check=True,
        capture_output=True,
        timeout=240,
    )
    return root / "checkpoints"


@pytest.fixture
def volume(cluster: KubeClient, tmp_path: Path) -> Iterator[Path]:
    """A claim `models` that pods of any user can read; return its folder on this machine."""
    with claim_of_folder(cluster, "models", tmp_path / "models") as folder:
        folder.chmod(0o755)
        (folder / "checkpoints").mkdir()
        yield folder


@pytest.fixture
def options(cluster: KubeClient, tmp_path: Path) -> list[object]:
    """Options for pods that use this machine's programs."""
    pod = build_host_mounts()
    variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    pod["containers"][0] |= {
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"requests": {"cpu": "100m"}},
    }
    patch = tmp_path / "patch.yaml"
    patch.write_text(yaml.safe_dump({"kind": "Deployment", "spec": {"template": {"spec": pod}}}))
    target = f"k8s://{cluster.context}/{cluster.namespace}"
    return ["--on", target, "--image", IMAGE, "--memory", "1Gi", "--patch", patch]


ASK = """
import sys, urllib.request
body = sys.argv[2].encode() or None
sys.stdout.write(urllib.request.urlopen(sys.argv[1], body, timeout=30).read().decode())
"""


def ask(cluster: KubeClient, path: str, body: object = None) -> Any:
    """Send a request to the Service, from a pod of the server."""
    (pod, *_) = cluster.list_objects("Pod", model_labels("pets"))
    url = f"http://model-pets.{cluster.namespace}:8501{path}"
    words = [f"{sys.prefix}/bin/python", "-c", ASK, url, "" if body is None else json.dumps(body)]
    for _ in range(4):  # about one in twenty connections for commands fails
        with suppress(UnavailableError):
            result = cluster.exec_in_pod(pod["metadata"]["name"], words)
            assert result.exit_code == 0, result
            return json.loads(result.stdout)
    raise AssertionError("no connection to the pod")


def test_a_model_is_served_from_a_claim(
    cluster: KubeClient, trained: Path, volume: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = sorted(trained.glob("step-*.pt"))
    shutil.copy(first, volume / "checkpoints")
    assert stoker("model", "serve", *MODEL, *options, "--timeout", "5m") == 0
    assert f"http://model-pets.{cluster.namespace}:8501/v1/models/pets" in capsys.readouterr().err
    status = ask(cluster, "/v1/models/pets")["model_version_status"]
    assert [each["version"] for each in status] == ["2"]
    scores = ask(cluster, "/v1/models/pets:predict", {"instances": [[[[1, 2, 3]] * 8] * 8]})["predictions"]
    assert len(scores[0]) == 3

    shutil.copy(last, volume / "checkpoints" / ".new")
    (volume / "checkpoints" / ".new").rename(volume / "checkpoints" / last.name)
    wait_until(lambda: ask(cluster, "/v1/models/pets")["model_version_status"][0]["version"] == "4")

    assert stoker("model", "serve", *MODEL, *options, "--replicas", "2", "--timeout", "5m") == 0
    pods = cluster.list_objects("Pod", model_labels("pets"))
    assert len([pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]) == 2
    target = options[1]
    assert stoker("model", "stop", "pets", "--on", target) == 0
    assert cluster.get("Deployment", "model-pets") is None
    assert cluster.get("Service", "model-pets") is None
    assert stoker("model", "stop", "pets", "--on", target) == 2


def test_a_claim_without_the_model_is_explained(
    cluster: KubeClient, volume: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    (volume / "checkpoints").rmdir()
    assert stoker("model", "serve", *MODEL, *options, "--timeout", "4m") == 5
    assert "/models/checkpoints" in capsys.readouterr().err
    assert stoker("model", "stop", "pets", "--on", options[1]) == 0


@pytest.mark.parametrize("engine", ["stoker", "tensorflow-serving"])
def test_the_api_server_accepts_the_objects(cluster: KubeClient, engine: str) -> None:
    model = ClusterModel(
        name="pets", path="pets", claim="models", engine=engine, image="trainer:v1", gpus=1, replicas=2
    )
    for manifest in build_model_objects(model):
        applied = cluster.apply(manifest, dry_run=True)
        assert applied["metadata"]["name"] == "model-pets"

"""Deploying and removing a model server, without a cluster; and the commands for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stoker.errors import ConflictError, InputError, NotFoundError
from stoker.model_server.cluster.deployment import deploy_model, remove_model
from stoker.model_server.cluster.manifests import build_model_objects
from tests.model_server.cluster.test_manifests import OURS
from tests.support.cache_objects import make_claim
from tests.support.fake_cluster import fake_cluster
from tests.support.trees import stoker

CLAIM = {**make_claim("ReadWriteOnce"), "kind": "PersistentVolumeClaim"}
MODEL = replace(OURS, claim=CLAIM["metadata"]["name"])


def test_deploy_and_remove() -> None:
    cluster = fake_cluster([CLAIM])
    objects = build_model_objects(MODEL)
    for _ in range(2):
        deploy_model(cluster, MODEL, objects)
        assert ("Deployment", "model-pets") in cluster.objects
        assert ("Service", "model-pets") in cluster.objects
    assert sorted(remove_model(cluster, "pets")) == ["Deployment model-pets", "Service model-pets"]
    assert list(cluster.objects) == [("PersistentVolumeClaim", MODEL.claim)]
    with pytest.raises(NotFoundError):
        remove_model(cluster, "pets")


def test_a_rejected_object_changes_nothing() -> None:
    cluster = fake_cluster([CLAIM])
    cluster.rejections["Deployment"] = InputError("invalid")
    with pytest.raises(InputError, match="invalid"):
        deploy_model(cluster, MODEL, build_model_objects(MODEL))
    assert list(cluster.objects) == [("PersistentVolumeClaim", MODEL.claim)]


def test_a_missing_claim_and_foreign_objects_are_refused() -> None:
    objects = build_model_objects(MODEL)
    with pytest.raises(NotFoundError, match=MODEL.claim):
        deploy_model(fake_cluster([]), MODEL, objects)
    foreign = {"kind": "Service", "metadata": {"name": "model-pets", "labels": {"app": "x"}}}
    cluster = fake_cluster([CLAIM, foreign])
    with pytest.raises(ConflictError, match="--name"):
        deploy_model(cluster, MODEL, objects)
    assert cluster.objects["Service", "model-pets"] == foreign


def test_plan_prints_what_serve_creates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model", "plan", "models/pets/3", "--claim", "data", "--image", "trainer:v1", "--on", "k8s://c/team"]
    assert stoker(*words) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    expected = build_model_objects(replace(OURS, path="models/pets/3", namespace="team"))
    assert printed == expected
    (tmp_path / "patch.yaml").write_text("kind: Service\nspec: {type: NodePort}\n")
    assert stoker(*words, "--patch", tmp_path / "patch.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["spec"]["type"] == "NodePort"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["plan", "pets"], "--claim"),
        (["plan", "pets", "--claim", "data"], "--image"),
        (["plan", ".", "--claim", "data", "--image", "x"], "--name"),
        (["plan", "pets", "--claim", "data", "--on", "local"], "k8s"),
        (["serve", "pets", "--claim", "data"], "--claim"),
        (["serve", "pets", "--on", "k8s", "--port", "1"], "--port"),
        (["serve", "pets", "--on", "k8s", "--claim", "data", "--timeout", "x"], "--timeout"),
    ],
)
def test_wrong_options_are_one_sentence(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("model", *words) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1

"""Objects of a model server: valid, restricted, with probes; and what is rejected."""

from __future__ import annotations

from dataclasses import replace

import kubernetes_validate
import pytest

from stoker.errors import InputError, SpecError
from stoker.kube.objects import MANAGED_BY, PART_LABEL, Manifest
from stoker.kube.rollout import pod_version
from stoker.model_server.cluster.manifests import (
    MODELS_DIR,
    TENSORFLOW_SERVING_IMAGE,
    TOKEN_DIR,
    ClusterModel,
    build_model_objects,
)
from tests.support.cache_objects import find_kind, find_pod_spec

OURS = ClusterModel(name="pets", path="models/pets", claim="data", image="trainer:v1")
SECURED = replace(OURS, token_secret="model-token", replicas=3, gpus=1, namespace="team")
THEIRS = ClusterModel(name="pets", path="models/pets", claim="data", engine="tensorflow-serving")


def container_of(objects: list[Manifest]) -> Manifest:
    (container,) = find_pod_spec(objects)["containers"]
    return container


@pytest.mark.parametrize("model", [OURS, SECURED, THEIRS])
def test_objects_are_valid_and_restricted(model: ClusterModel) -> None:
    objects = build_model_objects(model)
    assert [manifest["kind"] for manifest in objects] == ["Service", "Deployment"]
    for manifest in objects:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        assert manifest["metadata"]["name"] == "model-pets"
        assert manifest["metadata"]["labels"].items() >= {PART_LABEL: "model", **MANAGED_BY}.items()
        assert manifest["metadata"].get("namespace") == model.namespace
    pod, container = find_pod_spec(objects), container_of(objects)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == MODELS_DIR]
    assert mount["readOnly"] is True
    assert {"name": mount["name"], "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    selector = find_kind(objects, "Service")["spec"]["selector"]
    deployment = find_kind(objects, "Deployment")["spec"]
    assert selector == deployment["selector"]["matchLabels"]
    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()


def test_our_server() -> None:
    container = container_of(build_model_objects(OURS))
    expected = ["stoker", "model", "serve", "/models/models/pets", "--name", "pets", "--host", "0.0.0.0"]
    assert container["command"] == [*expected, "--port", "8501", "--no-auth"]
    assert container["image"] == "trainer:v1"
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert container["livenessProbe"]["tcpSocket"] == {"port": "http"}
    assert OURS.url == "http://model-pets:8501"
    assert container_of(build_model_objects(replace(OURS, path=".")))["command"][3] == MODELS_DIR


def test_a_token_comes_from_a_secret() -> None:
    objects = build_model_objects(SECURED)
    pod, container = find_pod_spec(objects), container_of(objects)
    assert container["command"][-2:] == ["--token-file", f"{TOKEN_DIR}/token"]
    assert "--no-auth" not in container["command"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "token"]
    assert volume["secret"] == {"secretName": "model-token", "items": [{"key": "token", "path": "token"}]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert find_kind(objects, "Deployment")["spec"]["replicas"] == 3
    assert pod["topologySpreadConstraints"]
    assert SECURED.url == "http://model-pets.team:8501"


def test_tensorflow_serving() -> None:
    objects = build_model_objects(THEIRS)
    container = container_of(objects)
    assert container["image"] == TENSORFLOW_SERVING_IMAGE
    assert container["command"][0] == "tensorflow_model_server"
    assert {"--port=8500", "--rest_api_port=8501", "--model_name=pets"} <= set(container["command"])
    assert "--model_base_path=/models/models/pets" in container["command"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v1/models/pets"
    ports = {port["name"]: port["port"] for port in find_kind(objects, "Service")["spec"]["ports"]}
    assert ports == {"grpc": 8500, "http": 8501}
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports


def test_a_change_starts_new_pods_and_patches_are_merged() -> None:
    def version(model: ClusterModel, *patches: Manifest) -> str:
        return pod_version(find_kind(build_model_objects(model, patches), "Deployment")["spec"]["template"])

    patch = {"kind": "Deployment", "spec": {"template": {"spec": {"nodeSelector": {"pool": "gpu"}}}}}
    assert version(OURS) == version(replace(OURS, replicas=1))
    assert len({version(OURS), version(replace(OURS, image="trainer:v2")), version(OURS, patch)}) == 3
    assert find_pod_spec(build_model_objects(OURS, [patch]))["nodeSelector"] == {"pool": "gpu"}
    with pytest.raises(InputError, match="StatefulSet"):
        build_model_objects(OURS, [{"kind": "StatefulSet"}])


def test_every_fault_is_reported() -> None:
    broken = ClusterModel(
        name="Pets", path="../other", claim="c", engine="triton", image="a b", replicas=0, gpus=-1, memory="x"
    )
    with pytest.raises(SpecError) as caught:
        build_model_objects(broken)
    paths = [fault.path for fault in caught.value.faults]
    assert paths == ["--name", "MODEL", "--engine", "--image", "--replicas", "--gpus", "--memory"]
    for change in ({"image": None}, {"engine": "tensorflow-serving", "token_secret": "x"}, {"path": "/models"}):
        with pytest.raises(SpecError):
            build_model_objects(replace(OURS, **change))  # type: ignore[arg-type]

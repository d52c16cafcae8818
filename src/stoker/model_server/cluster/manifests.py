"""Kubernetes objects of a model server, built by pure functions: a Deployment and a Service.

| engine | image | ports |
|---|---|---|
| `stoker` | one with stoker and the framework of the model | 8501 (REST, `/classify`, page) |
| `tensorflow-serving` | the official one of TensorFlow Serving; SavedModels only | 8500 (gRPC), 8501 (REST) |

Both read the model from a claim, which they mount read-only, and load newer versions as they appear there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.errors import Fault, InputError, SpecError
from stoker.kube.objects import (
    GPU_RESOURCE,
    LABEL_DOMAIN,
    MAIN_CONTAINER,
    MANAGED_BY,
    PART_LABEL,
    Manifest,
    apply_patches,
    build_object,
    restricted_pod,
    restricted_security_context,
)
from stoker.kube.quantity import parse_quantity
from stoker.kube.rollout import annotate_config
from stoker.model_server.settings import DEFAULT_PORT, HEALTH_PATH

STOKER, TENSORFLOW_SERVING = "stoker", "tensorflow-serving"
ENGINES = (STOKER, TENSORFLOW_SERVING)
TENSORFLOW_SERVING_IMAGE = "docker.io/tensorflow/serving:2.19.1"
GRPC_PORT = 8500
MODEL_LABEL = f"{LABEL_DOMAIN}/model"
MODEL_PART = {PART_LABEL: "model"}
"""The label of the objects of all model servers."""
MODELS_DIR, TOKEN_DIR, TOKEN_KEY = "/models", "/var/run/stoker/token", "token"
NOBODY_UID = 65534
MAX_REPLICAS = 64
GRACE_S = 45
"""Longer than the pause before the stop and the time that the server leaves to running requests."""
START_TIMEOUT_S = 600
"""How long a model may take to load."""


@dataclass(frozen=True, kw_only=True)
class ClusterModel:
    """The desired model server; `path` is that of the model in the claim."""

    name: str
    path: str
    claim: str
    engine: str = STOKER
    image: str | None = None
    replicas: int = 1
    memory: str = "2Gi"
    gpus: int = 0
    token_secret: str | None = None
    """Secret whose key `token` has the token; None: no token is required."""
    namespace: str | None = None

    @property
    def object_name(self) -> str:
        """The name of the Deployment and of the Service."""
        return object_name(self.name)

    @property
    def url(self) -> str:
        """The URL of the REST API inside the cluster."""
        host = f"{self.object_name}.{self.namespace}" if self.namespace else self.object_name
        return f"http://{host}:{DEFAULT_PORT}"


def object_name(name: str) -> str:
    """Return the name of the objects of a model server."""
    return f"model-{name}"


def model_labels(name: str) -> dict[str, str]:
    """Return the labels of the objects and pods of a model server."""
    return {**MODEL_PART, MODEL_LABEL: name}


def build_model_objects(model: ClusterModel, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """Build the Service and the Deployment; raise SpecError with every fault of the settings."""
    if faults := list(_model_faults(model)):
        raise SpecError(faults)
    labels = model_labels(model.name)
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in _ports(model).items()
    ]
    service = build_object(
        "v1",
        "Service",
        model.object_name,
        labels,
        namespace=model.namespace,
        spec={"selector": labels, "ports": ports},
    )
    spec = {
        "replicas": model.replicas,
        "selector": {"matchLabels": labels},
        # A new pod is ready before an old one is stopped, so that no request is lost.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": {**labels, **MANAGED_BY}}, "spec": _build_pod(model)},
    }
    deployment = build_object("apps/v1", "Deployment", model.object_name, labels, namespace=model.namespace, spec=spec)
    service, deployment = apply_patches([service, deployment], patches)
    return [service, annotate_config(deployment)]


def _model_faults(model: ClusterModel) -> Iterator[Fault]:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", model.name):
        yield Fault("--name", f"must be at most 40 lowercase letters, digits and '-', got {model.name!r}")
    if model.path.startswith("/") or ".." in model.path.split("/"):
        yield Fault("MODEL", f"must be a path inside the claim, such as models/pets, got {model.path!r}")
    if model.engine not in ENGINES:
        yield Fault("--engine", f"must be {' or '.join(ENGINES)}, got {model.engine!r}")
    if model.engine == STOKER and model.image is None:
        yield Fault("--image", "is required: an image with stoker[web] and PyTorch or TensorFlow")
    if model.image is not None and (not model.image or not model.image.isprintable() or " " in model.image):
        yield Fault("--image", f"invalid image name {model.image!r}")
    if model.engine == TENSORFLOW_SERVING and model.token_secret is not None:
        yield Fault("--token-secret", "TensorFlow Serving does not support tokens: use --engine stoker")
    if not 1 <= model.replicas <= MAX_REPLICAS:
        yield Fault("--replicas", f"must be between 1 and {MAX_REPLICAS}, got {model.replicas}")
    if not 0 <= model.gpus <= 16:
        yield Fault("--gpus", f"must be between 0 and 16, got {model.gpus}")
    try:
        if parse_quantity(model.memory) <= 0:
            yield Fault("--memory", f"must be positive, got {model.memory}")
    except (InputError, ValueError):
        yield Fault("--memory", f"must be a quantity such as 2Gi, got {model.memory!r}")


def _ports(model: ClusterModel) -> dict[str, int]:
    rest = {"http": DEFAULT_PORT}
    return {"grpc": GRPC_PORT, **rest} if model.engine == TENSORFLOW_SERVING else rest


def _build_pod(model: ClusterModel) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "model", "persistentVolumeClaim": {"claimName": model.claim}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if model.token_secret is not None:
        items = [{"key": TOKEN_KEY, "path": TOKEN_KEY}]
        volumes.append({"name": "token", "secret": {"secretName": model.token_secret, "items": items}})
    pod = restricted_pod(NOBODY_UID)
    pod |= {"terminationGracePeriodSeconds": GRACE_S, "containers": [_build_container(model)], "volumes": volumes}
    if model.replicas > 1:
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": model_labels(model.name)}}]
    return pod


def _build_container(model: ClusterModel) -> Manifest:
    limits = {"memory": model.memory, **({GPU_RESOURCE: str(model.gpus)} if model.gpus else {})}
    mounts: list[Manifest] = [
        {"name": "model", "mountPath": MODELS_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if model.token_secret is not None:
        mounts.append({"name": "token", "mountPath": TOKEN_DIR, "readOnly": True})
    period_s = 5
    return {
        "name": MAIN_CONTAINER,
        "image": TENSORFLOW_SERVING_IMAGE if model.image is None else model.image,
        "command": _command(model),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _ports(model).items()],
        "resources": {"requests": {"cpu": "1", **limits}, "limits": limits},
        "startupProbe": {
            **_ready_probe(model),
            "periodSeconds": period_s,
            "failureThreshold": START_TIMEOUT_S // period_s,
        },
        "readinessProbe": {**_ready_probe(model), "periodSeconds": period_s},
        "livenessProbe": {**_live_probe(model), "periodSeconds": 10, "failureThreshold": 6},
        # Until the Service no longer routes to this pod.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "securityContext": {**restricted_security_context(), "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _ready_probe(model: ClusterModel) -> Manifest:
    path = HEALTH_PATH if model.engine == STOKER else f"/v1/models/{model.name}"
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}


def _live_probe(model: ClusterModel) -> Manifest:
    """Return a probe that a server passes while it loads or has lost its model: a restart would not help."""
    return {"tcpSocket": {"port": next(iter(_ports(model)))}, "timeoutSeconds": 5}


def _command(model: ClusterModel) -> list[str]:
    path = posixpath.normpath(posixpath.join(MODELS_DIR, model.path))
    if model.engine == TENSORFLOW_SERVING:
        return [
            "tensorflow_model_server",
            f"--port={GRPC_PORT}",
            f"--rest_api_port={DEFAULT_PORT}",
            f"--model_name={model.name}",
            f"--model_base_path={path}",
            "--enable_batching",
        ]
    auth = ["--no-auth"] if model.token_secret is None else ["--token-file", f"{TOKEN_DIR}/{TOKEN_KEY}"]
    address = ["--host", "0.0.0.0", "--port", str(DEFAULT_PORT)]
    return ["stoker", "model", "serve", path, "--name", model.name, *address, *auth]

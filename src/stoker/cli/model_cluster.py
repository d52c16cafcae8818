"""`stoker model serve --on k8s`, `plan` and `stop`: a model server in a Kubernetes namespace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stoker.cli.cluster_cache import read_patches
from stoker.cli.kube_target import connect, parse_target
from stoker.cli.options import Json, parse_value
from stoker.cli.output import print_json, print_message

if TYPE_CHECKING:
    from stoker.model_server.cluster.manifests import ClusterModel

PathInClaim = Annotated[str, typer.Argument(metavar="MODEL", help="Path of the model in the claim.")]
OnCluster = Annotated[
    str, typer.Option("--on", metavar="TARGET", help="Kubernetes cluster: k8s[://context/namespace].")
]
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model name in URLs; default: from MODEL.", show_default=False)
]
Claim = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With --on k8s: claim that contains the model.", show_default=False),
]
EngineName = Annotated[
    str,
    typer.Option(metavar="NAME", help="With --on k8s: server to deploy, stoker or tensorflow-serving."),
]
Image = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE",
        help="With --on k8s: image of the server; required for the engine stoker.",
        show_default=False,
    ),
]
Replicas = Annotated[int, typer.Option(metavar="N", help="With --on k8s: number of pods.")]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="With --on k8s: memory of a pod.")]
Gpus = Annotated[int, typer.Option(metavar="N", help="With --on k8s: GPUs of a pod.")]
TokenSecret = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --on k8s: Secret whose key `token` has the token that clients must send.",
        show_default=False,
    ),
]
Patch = Annotated[
    list[Path] | None,
    typer.Option(
        "--patch",
        metavar="FILE",
        help="With --on k8s: merge this YAML file into the object of the same kind. Repeatable.",
        show_default=False,
    ),
]
Timeout = Annotated[
    str, typer.Option(metavar="TIME", help="With --on k8s: how long to wait until the server is ready.")
]
CLUSTER_OPTIONS = {
    "claim": "--claim",
    "engine": "--engine",
    "image": "--image",
    "replicas": "--replicas",
    "memory": "--memory",
    "gpus": "--gpus",
    "token_secret": "--token-secret",
    "patch": "--patch",
    "timeout": "--timeout",
}
"""The options of `stoker model serve` that require --on, by parameter."""


class ClusterOptions(NamedTuple):
    """Options of a model server in a cluster, as given on the command line."""

    model: str
    name: str | None
    claim: str | None
    engine: str
    image: str | None
    replicas: int
    memory: str
    gpus: int
    token_secret: str | None
    patches: Sequence[Path]


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker model`."""
    app.command()(plan)
    app.command()(stop)


def plan(
    model: PathInClaim,
    claim: Claim = None,
    on: OnCluster = "k8s",
    name: ModelName = None,
    engine: EngineName = "stoker",
    image: Image = None,
    replicas: Replicas = 1,
    memory: Memory = "2Gi",
    gpus: Gpus = 0,
    token_secret: TokenSecret = None,
    patch: Patch = None,
    as_json: Json = False,
) -> None:
    """Print the Kubernetes objects that `serve --on k8s` creates."""
    from stoker.core.yaml_io import to_yaml_stream
    from stoker.model_server.cluster.manifests import build_model_objects

    pod = (engine, image, replicas, memory, gpus, token_secret, patch or [])
    options = ClusterOptions(model, name, claim, *pod)
    objects = build_model_objects(build_spec(options, on), read_patches(options.patches))
    if as_json:
        print_json(objects)
    else:
        typer.echo(to_yaml_stream(objects), nl=False)


def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    on: OnCluster = "k8s",
) -> None:
    """Delete a model server from a Kubernetes cluster; the model is kept."""
    from stoker.model_server.cluster.deployment import remove_model

    with connect(on) as cluster:
        removed = remove_model(cluster, name)
        print_message(f"removed {', '.join(removed)} from {cluster.url}")


def build_spec(options: ClusterOptions, on: str) -> ClusterModel:
    """Return the model server to deploy."""
    from stoker.errors import InputError
    from stoker.model_server.cluster.manifests import ClusterModel

    if options.claim is None:
        raise InputError("--claim is required", hint="name the PersistentVolumeClaim that contains the model")
    parts = [part for part in options.model.split("/") if part not in ("", ".") and not part.isdecimal()]
    return ClusterModel(
        name=(parts[-1] if parts else "") if options.name is None else options.name,
        path=options.model,
        claim=options.claim,
        engine=options.engine,
        image=options.image,
        replicas=options.replicas,
        memory=options.memory,
        gpus=options.gpus,
        token_secret=options.token_secret,
        namespace=parse_target(on).namespace,
    )


def deploy(options: ClusterOptions, on: str, timeout: str) -> None:
    """Deploy a model server and wait until it is ready."""
    from stoker.core.units import parse_duration
    from stoker.model_server.cluster.deployment import deploy_model, wait_model_ready
    from stoker.model_server.cluster.manifests import build_model_objects

    wait_s = parse_value("--timeout", parse_duration, timeout)
    spec = build_spec(options, on)
    objects = build_model_objects(spec, read_patches(options.patches))
    with connect(on) as cluster:
        deploy_model(cluster, spec, objects)
        print_message(f"Deployment and Service {spec.object_name} in {cluster.url}")
        if spec.token_secret is None:
            print_message("no token is required: every pod that can reach the Service can send requests")
        wait_model_ready(
            cluster, spec.name, timeout_s=wait_s, on_progress=lambda text: print_message(f"pending: {text}")
        )
        url = replace(spec, namespace=cluster.namespace).url
        print_message(f"serving {spec.name} at {url}/v1/models/{spec.name}")

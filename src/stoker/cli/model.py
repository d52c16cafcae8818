"""`stoker model`: serve a trained model over HTTP."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli import model_cluster
from stoker.cli.cluster_cache import check_options
from stoker.cli.data_serve import Host, TokenFile, load_token, parse_port
from stoker.cli.model_cluster import (
    CLUSTER_OPTIONS,
    Claim,
    ClusterOptions,
    EngineName,
    Gpus,
    Image,
    Memory,
    ModelName,
    Patch,
    Replicas,
    Timeout,
    TokenSecret,
)
from stoker.cli.options import parse_value
from stoker.cli.output import print_message

if TYPE_CHECKING:
    from stoker.model_server.sources import ModelSource

app = typer.Typer(help="Serve trained models.", no_args_is_help=True)
model_cluster.add_to(app)

MAX_BATCH_SIZE = 4096
MAX_VERSIONS = 16

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="SavedModel directory (with or without version subdirectories), PyTorch checkpoint, directory of "
        "checkpoints, or run ID or job name. With --on k8s: path of the model in the claim.",
    ),
]


LOCAL_OPTIONS = {
    "port": "--port",
    "host": "--host",
    "token_file": "--token-file",
    "no_auth": "--no-auth",
    "checkpoint": "--checkpoint",
    "versions": "--versions",
    "max_batch_size": "--max-batch-size",
    "max_body": "--max-body",
    "device": "--device",
    "access_log": "--access-log",
}
"""The options of `stoker model serve` that are not valid with --on, by parameter."""


@app.command()
def serve(
    ctx: typer.Context,
    model: Model,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="TARGET",
            help="Deploy the server on Kubernetes: k8s[://context/namespace].",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 uses a free port.")] = 8501,
    host: Host = "127.0.0.1",
    token_file: TokenFile = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Allow other machines to send requests without a token.")
    ] = False,
    name: ModelName = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="WHICH", help="Checkpoint of a run or directory to serve: best or newest.")
    ] = "best",
    versions: Annotated[int, typer.Option(metavar="N", help="Number of newest SavedModel versions to serve.")] = 1,
    max_batch_size: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of rows that run together; 1 disables batching.")
    ] = 32,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a request body.")] = "32Mi",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device of a PyTorch model: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    claim: Claim = None,
    engine: EngineName = "stoker",
    image: Image = None,
    replicas: Replicas = 1,
    memory: Memory = "2Gi",
    gpus: Gpus = 0,
    token_secret: TokenSecret = None,
    patch: Patch = None,
    timeout: Timeout = "10m",
) -> None:
    """Serve a model over HTTP.

    Provides TensorFlow Serving's REST API, and a page and an endpoint to classify images. Newer versions are loaded
    as they appear. Runs until you press Ctrl-C or it receives SIGTERM; with --on k8s, a Deployment runs it.
    """
    check_options(ctx, on, local=LOCAL_OPTIONS, cluster=CLUSTER_OPTIONS)
    if on is not None:
        pod = (engine, image, replicas, memory, gpus, token_secret, patch or [])
        model_cluster.deploy(ClusterOptions(model, name, claim, *pod), on, timeout)
        return
    from stoker.errors import InputError
    from stoker.serve.loopback import is_loopback

    _check_range("--versions", versions, MAX_VERSIONS)
    _check_range("--max-batch-size", max_batch_size, MAX_BATCH_SIZE)
    body_bytes = _parse_max_body(max_body)
    if not is_loopback(host) and token_file is None and not no_auth:
        raise InputError(
            "other machines could send requests without a token",
            where=f"--host {host}",
            hint="pass --token-file, or --no-auth if the network is trusted",
        )
    token = load_token(token_file)
    source, default_name = find_model(model, checkpoint, device)
    from stoker.model_server.server import ModelServer
    from stoker.model_server.settings import ModelServerSettings

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    settings = ModelServerSettings(
        name=parse_model_name(name) if name is not None else default_name,
        host=host,
        port=parse_port(port),
        token=token,
        token_file=token_file,
        check_host=is_loopback(host),
        max_body_bytes=body_bytes,
        access_log=access_log,
        poll_s=source.poll_s,
    )
    server = ModelServer(settings, source, keep=versions, max_batch=max_batch_size)
    version = server.first.number
    print_message(f"serving {settings.name} version {version} of {model} at {server.url}; to stop, press Ctrl-C")
    server.run()


def find_model(model: str, checkpoint: str, device: str) -> tuple[ModelSource, str]:
    """Return the source of a model and its default name; a word that is no path is the name of a run."""
    from stoker.errors import InputError, NotFoundError
    from stoker.jobs.run_lookup import resolve_run
    from stoker.model_server.sources import open_source

    if checkpoint not in ("best", "newest"):
        raise InputError(f"--checkpoint must be best or newest, got {checkpoint!r}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if not model:
        raise InputError("MODEL is empty")
    path = Path(model).expanduser()
    if "://" in model or path.exists():
        return open_source(model, checkpoint=checkpoint, device=device), default_model_name(model)
    try:
        run = resolve_run(model)
    except NotFoundError as error:
        if "/" in model or path.suffix == ".pt":
            raise NotFoundError("no such file or directory", where=model) from error
        raise
    return open_source(run.checkpoint_dir, checkpoint=checkpoint, device=device), run.name


def default_model_name(model: str) -> str:
    """Return the last part of a path that is not a version number, as a valid model name."""
    parts = [part for part in Path(model).expanduser().absolute().parts if not part.isdecimal()]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", parts[-1].removesuffix(".pt")).strip("-")
    return name or "model"


def parse_model_name(name: str) -> str:
    """Return the name; raise InputError if it cannot be a part of a URL."""
    from stoker.errors import InputError

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise InputError(f"--name must consist of letters, digits, '-', '_' and '.', got {name!r}")
    return name


def _parse_max_body(text: str) -> int:
    from stoker.core.units import MIN_SIZE_BYTES, format_bytes, parse_bytes
    from stoker.errors import InputError

    size, maximum = parse_value("--max-body", parse_bytes, text), 1 << 30
    if not MIN_SIZE_BYTES <= size <= maximum:
        limits = f"between {format_bytes(MIN_SIZE_BYTES)} and {format_bytes(maximum)}"
        hint = "add a unit, for example 32Mi" if size < MIN_SIZE_BYTES else None
        raise InputError(f"--max-body must be {limits}, got {format_bytes(size)}", hint=hint)
    return size


def _check_range(option: str, value: int, maximum: int) -> None:
    from stoker.errors import InputError

    if not 1 <= value <= maximum:
        raise InputError(f"{option} must be between 1 and {maximum:,}, got {value:,}")

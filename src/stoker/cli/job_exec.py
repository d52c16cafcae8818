"""`stoker job exec` and `shell`: run a command in a pod of a job, or a shell in a pod like it."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.job_pods import KUBERNETES, RequiredRun, SlotName, connect_to_run, get_running_pod, resolve_slot
from stoker.cli.kube_target import parse_target
from stoker.cli.options import JobFile, RunTarget, Sets, parse_value
from stoker.cli.output import print_message

if TYPE_CHECKING:
    from stoker.jobs.spec import JobSpec
    from stoker.kube.objects import Manifest

JOB_NAME_LENGTH = 45
"""Characters of the job's name in the name of a shell's pod."""
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker job`."""
    app.command("exec")(exec_in)
    app.command()(shell)


def exec_in(
    name: RequiredRun,
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Command and arguments, after --.")],
    slot: SlotName = None,
    on: RunTarget = None,
) -> None:
    """Run a command in a pod of a running job.

    If run from a terminal, allocates a terminal for the command; otherwise passes standard input through. Exits with
    the command's exit code.
    """
    from stoker.jobs.run_lookup import resolve_run
    from stoker.kube import kubectl
    from stoker.kube.objects import MAIN_CONTAINER

    run = resolve_run(name, on)
    with connect_to_run(
        run,
        slot,
        "exec",
        local="run the command in a shell",
        ssh=lambda host: f"ssh {host} -- {shlex.quote(shlex.join(command))}",
    ) as cluster:
        pod = get_running_pod(cluster, run, resolve_slot(run, slot))["metadata"]["name"]
        if kubectl.is_installed():
            raise typer.Exit(kubectl.exec_interactive(cluster, pod, MAIN_CONTAINER, command))
        if kubectl.has_stdin():
            purpose = "a terminal in a pod" if kubectl.is_terminal() else "standard input of a command in a pod"
            kubectl.require_kubectl(purpose, hint="or append </dev/null if the command reads no input")
        result = cluster.exec_in_pod(pod, command, container=MAIN_CONTAINER)
        for data, is_stderr in ((result.stdout, False), (result.stderr, True)):
            typer.echo(data, nl=False, err=is_stderr)
        raise typer.Exit(result.exit_code)


def shell(
    file: JobFile,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="Command to run instead of a shell, after --.")
    ] = None,
    on: Annotated[str, typer.Option("--on", metavar="TARGET", help="Cluster: k8s[://context/namespace].")] = KUBERNETES,
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Role whose pod specification to use. Defaults to worker, or to the first role if there is no worker.",
        ),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Request the job's GPUs.")] = False,
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long to wait for the pod to start.")
    ] = "5m",
    limit: Annotated[
        str, typer.Option("--limit", metavar="DURATION", help="How long the pod can run before it is terminated.")
    ] = "8h",
    sets: Sets = None,
) -> None:
    """Open a shell in a new pod with the job's environment.

    The pod has the job's image, environment variables, volumes and secrets, but does not run its program. It is deleted
    when the shell exits. Exits with the shell's exit code.
    """
    from stoker.core.units import parse_duration
    from stoker.kube import kubectl
    from stoker.kube.claims import check_mountable
    from stoker.kube.client import KubeClient
    from stoker.kube.ephemeral_pod import delete_finished, ephemeral_pod
    from stoker.kube.objects import MAIN_CONTAINER, PART_LABEL

    wait_s, limit_s = parse_value("--wait", parse_duration, wait), parse_value("--limit", parse_duration, limit)
    target = parse_target(on)
    job, spec, config_maps = _render_pod_spec(file, on, role, sets, gpu=gpu)
    kubectl.require_kubectl("a shell in a pod")
    pod, copies = shell_objects(job.name, spec, config_maps, round(limit_s), secrets.token_hex(3))
    with closing(KubeClient.for_target(target, namespace=job.kubernetes.namespace)) as cluster:
        check_mountable(cluster, [spec])
        delete_finished(cluster.list_objects("Pod", {PART_LABEL: "shell"}), cluster)
        print_message(f"Starting pod {pod['metadata']['name']} in {cluster}")
        with ephemeral_pod(cluster, pod, copies, wait_s=wait_s, report=print_message) as name:
            code = kubectl.exec_interactive(cluster, name, MAIN_CONTAINER, command or SHELL)
        print_message(f"Deleted pod {name}")
    raise typer.Exit(code)


def shell_objects(
    job: str, spec: Manifest, config_maps: Sequence[Manifest], limit_s: int, suffix: str
) -> tuple[Manifest, list[Manifest]]:
    """Return the pod of a shell, and copies of the job's ConfigMaps for it; `suffix` makes their names unique.

    The pod has none of the job's labels, so that the job's Services and commands never select it.
    """
    from stoker.kube.objects import PART_LABEL, build_object

    labels = {PART_LABEL: "shell"}
    name = f"{job[:JOB_NAME_LENGTH].rstrip('-')}-shell-{suffix}"
    names = {str(each["metadata"]["name"]): f"{name}-{index}" for index, each in enumerate(config_maps)}
    dropped = ("activeDeadlineSeconds", "hostname", "subdomain", "volumes")
    pod_spec = {key: value for key, value in spec.items() if key not in dropped} | {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": limit_s,
        "volumes": [_rename_config_map(volume, names) for volume in spec.get("volumes") or ()],
    }
    copies = [
        build_object("v1", "ConfigMap", names[str(each["metadata"]["name"])], labels)
        | {key: each[key] for key in ("data", "binaryData") if key in each}
        for each in config_maps
    ]
    return build_object("v1", "Pod", name, labels, spec=pod_spec), copies


def _rename_config_map(volume: Manifest, names: dict[str, str]) -> Manifest:
    """Return the volume with its ConfigMap replaced by the copy."""
    source = volume.get("configMap")
    if not source or source.get("name") not in names:
        return volume
    return {**volume, "configMap": {**source, "name": names[source["name"]]}}


def _render_pod_spec(
    file: Path, on: str, role: str | None, sets: list[str] | None, *, gpu: bool
) -> tuple[JobSpec, Manifest, list[Manifest]]:
    """Return the job, the pod spec of a role without its program, and the ConfigMaps that it mounts."""
    from stoker.errors import InputError
    from stoker.jobs.run_lookup import open_launcher
    from stoker.jobs.spec import load_job
    from stoker.jobs.topology import get_topology
    from stoker.launchers.kubernetes.run_objects import build_shell_pod_spec

    launcher = open_launcher(on)
    job = launcher.resolve_paths(load_job(file, sets or []))
    objects = launcher.render(job).objects
    roles = [each.name for each in get_topology(job).roles(job)]
    chosen = role or ("worker" if "worker" in roles else roles[0])
    if chosen not in roles:
        raise InputError(f"job {job.name} has no role {chosen!r}", where=file, hint=f"roles: {', '.join(roles)}")
    config_maps = [each for each in objects if each["kind"] == "ConfigMap"]
    return job, build_shell_pod_spec(objects, role=chosen, gpu=gpu), config_maps

"""`stoker volume`: create, list, inspect and delete volumes of a Kubernetes namespace."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.kube_target import connect
from stoker.cli.options import Json, parse_value
from stoker.cli.output import print_json, print_message, print_table, show_byte_progress

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient
    from stoker.kube.inspector import Inspection
    from stoker.kube.volumes import VolumePlan

app = typer.Typer(help="Create, list, inspect and delete volumes in a cluster.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the volume (its PersistentVolumeClaim).")]
On = Annotated[
    str,
    typer.Option(
        "--on", metavar="TARGET", help="Cluster: k8s[://context[/namespace]]. Defaults to the current context."
    ),
]


class Action(StrEnum):
    """Action of `stoker volume inspect`."""

    ls = "ls"
    cat = "cat"
    get = "get"
    shell = "shell"


@app.command()
def create(
    name: Name,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Size, for example 10Gi. With --pv, defaults to the size of the PersistentVolume."
        ),
    ] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="StorageClass. Defaults to the cluster's default class.")
    ] = None,
    access: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Access mode: rwo (default), rwx, rwop or rox."),
    ] = None,
    on: On = "k8s",
    pv: Annotated[
        Path | None,
        typer.Option(
            "--pv", metavar="FILE", help="YAML file that defines the PersistentVolumes to create and bind to."
        ),
    ] = None,
    host_path: Annotated[
        str | None, typer.Option("--host-path", metavar="DIR", help="Use a directory on the nodes (for testing only).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the objects without creating them.")] = False,
    as_json: Json = False,
) -> None:
    """Create a volume (a PersistentVolumeClaim).

    With --pv or --host-path, also creates its PersistentVolume. Running the command again changes nothing, except that
    a larger --size expands the volume if its storage class allows it.
    """
    from stoker.core.units import parse_bytes
    from stoker.kube import claims, volumes

    request = volumes.VolumeRequest(
        name=name,
        size=None if size is None else parse_value("--size", parse_bytes, size),
        access=None if access is None else access.lower(),
        storage_class=storage_class,
        host_path=host_path,
        volumes=volumes.read_persistent_volumes(pv) if pv is not None else [],
    )
    volumes.validate_request(request)  # before the cluster is contacted
    with connect(on) as cluster:
        request = replace(request, namespace=cluster.namespace)
        existing = volumes.find_existing_objects(cluster, request)
        plan = volumes.plan_volume(request, existing)
        for text in plan.remarks:
            print_message(f"{text[0].upper()}{text[1:]}.")
        if dry_run:
            _print_objects(plan.objects, as_json)
            return
        is_changed = volumes.apply_plan(cluster, plan)
        claim, sentence = claims.wait_until_bound(cluster, name, existing.classes, claims.BIND_TIMEOUT_S)
        result = _describe_result(plan, is_new=existing.claim is None, is_changed=is_changed)
        if as_json:
            print_json({**claims.get_claim_info(claim, []).to_dict(), "result": result, "message": sentence})
        else:
            typer.echo(f"{result}: {sentence}.")


def _describe_result(plan: VolumePlan, *, is_new: bool, is_changed: bool) -> str:
    if is_new:
        return "created"
    if plan.expand:
        return "expanded"
    return "changed" if is_changed else "unchanged"


def _print_objects(objects: list[dict[str, Any]], as_json: bool) -> None:
    from stoker.core.yaml_io import to_yaml_stream

    if as_json:
        print_json(objects)
    elif not objects:
        print_message("The volume already exists as requested.")
    else:
        typer.echo(to_yaml_stream(objects), nl=False)


@app.command("list")
def list_volumes(on: On = "k8s", as_json: Json = False) -> None:
    """List the volumes of a namespace and the pods that mount them."""
    from stoker.core.units import format_bytes
    from stoker.kube.claims import list_claims

    with connect(on) as cluster:
        volumes = list_claims(cluster)
    if as_json:
        print_json([volume.to_dict() for volume in volumes])
        return
    rows = [
        [
            volume.name,
            None if volume.size is None else format_bytes(volume.size),
            volume.access,
            volume.storage_class or "–",
            volume.phase,
            ", ".join(f"{pod.pod} ({pod.job})" if pod.job else pod.pod for pod in volume.mounted_by) or "–",
        ]
        for volume in volumes
    ]
    print_table(["volume", "size", "access", "class", "phase", "mounted by"], rows)


@app.command()
def inspect(
    name: Name,
    action: Annotated[
        Action,
        typer.Argument(
            metavar="ACTION", help="What to do: list (ls), print (cat) or copy (get) files, or open a shell (shell)."
        ),
    ] = Action.ls,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Path in the volume. With ls, defaults to the root.")
    ] = None,
    to: Annotated[
        Path | None, typer.Argument(metavar="DEST", help="With get: destination. Defaults to the working directory.")
    ] = None,
    on: On = "k8s",
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Image that contains sh, ls, cat, stat, sleep and tar. Defaults to busybox."
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="With shell: mount the volume read-write.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With get: overwrite existing files.")] = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for the pod to start.")] = "2m",
) -> None:
    """List, print or copy files in a volume, or open a shell.

    Starts a pod that mounts the volume read-only, and deletes it afterwards. Refuses to open a ReadWriteOnce
    volume that another pod is using.
    """
    from stoker.core.units import parse_duration
    from stoker.kube.inspector import IMAGE, open_inspector, resolve_destination

    _check_arguments(action, path, to, write=write, force=force)
    if action is Action.get:
        resolve_destination(to or Path(), path or "/", name, force=force)
    wait_s = parse_value("--timeout", parse_duration, timeout)
    code = 0
    with (
        connect(on) as cluster,
        open_inspector(
            cluster, name, action.value, image=image or IMAGE, write=write, wait_s=wait_s, report=print_message
        ) as inspection,
    ):
        if action is Action.ls:
            sys.stdout.buffer.write(inspection.ls(path or "/"))
            sys.stdout.buffer.flush()
        elif action is Action.cat:
            inspection.cat(path or "/", sys.stdout.buffer)
            sys.stdout.buffer.flush()
        elif action is Action.get:
            _get_files(inspection, path or "/", to or Path(), force)
        else:
            code = _open_shell(cluster, inspection)
    if code:
        raise typer.Exit(code)


def _check_arguments(action: Action, path: str | None, to: Path | None, *, write: bool, force: bool) -> None:
    """Raise SpecError with every invalid combination of arguments, before a pod is created."""
    from stoker.errors import Fault, SpecError

    faults = []
    if action in (Action.cat, Action.get) and path is None:
        faults.append(Fault("PATH", f"required by {action.value}"))
    if action is Action.shell and path is not None:
        faults.append(Fault("PATH", "cannot be combined with shell"))
    if to is not None and action is not Action.get:
        faults.append(Fault("DEST", "only valid with get"))
    if write and action is not Action.shell:
        faults.append(Fault("--write", "only valid with shell"))
    if force and action is not Action.get:
        faults.append(Fault("--force", "only valid with get"))
    if action is Action.shell and not sys.stdin.isatty():
        faults.append(Fault("shell", "requires a terminal"))
    if faults:
        raise SpecError(faults)


def _get_files(inspection: Inspection, path: str, to: Path, force: bool) -> None:
    from stoker.core.units import format_bytes, pluralize

    kind, size = inspection.stat(path)
    bar = show_byte_progress("get", size) if kind.startswith("regular") else nullcontext(None)
    with bar as advance:
        copied = inspection.get(path, to, force=force, on_bytes=advance)
    if copied.skipped:
        names = ", ".join(copied.skipped[:3]) + (" …" if len(copied.skipped) > 3 else "")
        print_message(f"Skipped special files and links that point outside: {names} ({len(copied.skipped):,})")
    print_message(f"Copied {pluralize(copied.files, 'file')}, {format_bytes(copied.size)}, to {copied.path}")


def _open_shell(cluster: KubeClient, inspection: Inspection) -> int:
    from stoker.kube.kubectl import exec_interactive
    from stoker.kube.objects import MAIN_CONTAINER

    print_message("The volume is mounted at the working directory. Exit with Ctrl-D.")
    return exec_interactive(cluster, inspection.pod, MAIN_CONTAINER, ["sh"])


@app.command()
def delete(
    name: Name,
    on: On = "k8s",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")] = False,
) -> None:
    """Delete a volume and the PersistentVolumes created for it.

    Shows what will happen to its data, and asks for confirmation.
    """
    from stoker.errors import InputError, InterruptError
    from stoker.kube.volumes import delete_volume, find_deletion

    with connect(on) as cluster:
        deletion = find_deletion(cluster, name)
        print_message(f"Volume {name} in {cluster.url}. {deletion.data_note}")
        if not yes:
            if not sys.stdin.isatty():
                raise InputError(f"deleting volume {name} requires confirmation", hint="pass --yes")
            if not typer.confirm("Delete the volume?", err=True):
                raise InterruptError("nothing deleted")
        delete_volume(cluster, deletion)
    print_message(f"Deleted volume {name}.")

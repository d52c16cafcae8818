"""`stoker volume`: claims in a cluster, and a look into them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.kube_target import cluster_at
from stoker.cli.output import byte_bar, print_json, print_table, remark

if TYPE_CHECKING:
    from stoker.kube.client import Cluster
    from stoker.kube.inspector import Inspection

app = typer.Typer(help="Volumes in a cluster.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The volume's name: that of its claim.")]
On = Annotated[
    str, typer.Option("--on", metavar="PLACE", help="The cluster: k8s[://context[/namespace]]; by default kubectl's.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]


class Action(StrEnum):
    """What to do in a volume."""

    ls = "ls"
    cat = "cat"
    get = "get"
    shell = "shell"


@app.command()
def create(
    name: Name,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="How large, like 10Gi; with --pv its own.")] = None,
    storage_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="A StorageClass of the cluster; its default.")
    ] = None,
    access: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="rwo: one node writes; rwx: many; rwop: one pod; rox: many read. [rwo]"),
    ] = None,
    on: On = "k8s",
    pv: Annotated[
        Path | None, typer.Option("--pv", metavar="FILE", help="PersistentVolumes to make and to bind the volume to.")
    ] = None,
    host_path: Annotated[
        str | None, typer.Option("--host-path", metavar="DIR", help="A folder of the nodes, for tests.")
    ] = None,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be made as YAML, and make nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a volume: a claim of a storage class, or one bound to a PersistentVolume that you bring.

    The same again changes nothing; a larger --size lets the volume grow, where its class allows that.
    """
    from stoker.core.units import parse_bytes
    from stoker.kube import claims, volumes

    given = volumes.read_volumes(pv) if pv is not None else []
    with cluster_at(on) as cluster:
        wish = volumes.Wish(
            name=name,
            namespace=cluster.namespace,
            size=None if size is None else parse_bytes(size),
            access=None if access is None else access.lower(),
            storage_class=storage_class,
            host_path=host_path,
            volumes=given,
        )
        found = volumes.look(cluster, wish)
        decided = volumes.plan(wish, found)
        for text in decided.remarks:
            remark(f"{text[0].upper()}{text[1:]}.")
        if only_plan:
            _print_plan(decided.objects, as_json)
            return
        changed = volumes.carry_out(cluster, decided)
        made, sentence = claims.settled(cluster, name, found.classes, claims.SETTLE_S)
        done = "created" if found.claim is None else "grown" if decided.grow else "changed" if changed else "unchanged"
        if as_json:
            print_json({**claims.described(made, []).to_dict(), "done": done, "told": sentence})
        else:
            typer.echo(f"{done}: {sentence}.")


def _print_plan(objects: list[dict[str, Any]], as_json: bool) -> None:
    from stoker.launchers.kubernetes.plan import as_yaml

    if as_json:
        print_json(objects)
    elif not objects:
        remark("It is there already, as it should be.")
    else:
        typer.echo(as_yaml(objects), nl=False)


@app.command("list")
def list_volumes(on: On = "k8s", as_json: Json = False) -> None:
    """List the volumes of a namespace, and who mounts them."""
    from stoker.core.units import format_bytes
    from stoker.kube.claims import listed

    with cluster_at(on) as cluster:
        found = listed(cluster)
    if as_json:
        print_json([one.to_dict() for one in found])
        return
    rows = [
        [
            one.name,
            None if one.size is None else format_bytes(one.size),
            one.access,
            one.storage_class or "–",
            one.phase,
            ", ".join(f"{holder.pod} ({holder.job})" if holder.job else holder.pod for holder in one.mounted_by) or "–",
        ]
        for one in found
    ]
    print_table(["volume", "size", "access", "class", "phase", "mounted by"], rows)


@app.command()
def inspect(
    name: Name,
    action: Annotated[Action, typer.Argument(help="What to do in it.")] = Action.ls,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A file or folder in the volume; for ls the whole of it.")
    ] = None,
    to: Annotated[Path | None, typer.Argument(metavar="DEST", help="For get: where to; here.")] = None,
    on: On = "k8s",
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="An image with sh, ls, cat, stat, sleep and tar. [busybox]")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="For shell: with the volume to be written to.")] = False,
    force: Annotated[bool, typer.Option("--force", help="For get: in place of what is there.")] = False,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait until a pod that mounts it runs.")
    ] = "2m",
) -> None:
    """Look into a volume: list (ls), print (cat), copy here (get), or open a shell.

    A pod that mounts it runs for the while, read-only, and is deleted afterwards. A volume that only one node can mount
    is refused while another pod has it.
    """
    from stoker.core.units import parse_duration
    from stoker.kube.inspector import IMAGE, destination, inspecting

    _check_words(action, path, to, write=write, force=force)
    if action is Action.get:
        destination(to or Path(), path or "/", name, force=force)
    wait_s = parse_duration(timeout)
    code = 0
    with (
        cluster_at(on) as cluster,
        inspecting(cluster, name, action.value, image=image or IMAGE, write=write, wait_s=wait_s, tell=remark) as found,
    ):
        if action is Action.ls:
            sys.stdout.buffer.write(found.ls(path or "/"))
            sys.stdout.buffer.flush()
        elif action is Action.cat:
            found.cat(path or "/", sys.stdout.buffer)
            sys.stdout.buffer.flush()
        elif action is Action.get:
            _get(found, path or "/", to or Path(), force)
        else:
            code = _shell(cluster, found)
    if code:
        raise typer.Exit(code)


def _check_words(action: Action, path: str | None, to: Path | None, *, write: bool, force: bool) -> None:
    """Refuse words that do not go together, all at once, before a pod is made."""
    from stoker.errors import Fault, SpecError

    faults = []
    if action in (Action.cat, Action.get) and path is None:
        faults.append(Fault("PATH", f"is missing; {action.value} needs a path in the volume"))
    if action is Action.shell and path is not None:
        faults.append(Fault("PATH", "a shell takes none"))
    if to is not None and action is not Action.get:
        faults.append(Fault("DEST", "goes with get only"))
    if write and action is not Action.shell:
        faults.append(Fault("--write", "goes with shell only"))
    if force and action is not Action.get:
        faults.append(Fault("--force", "goes with get only"))
    if action is Action.shell and not sys.stdin.isatty():
        faults.append(Fault("shell", "needs a terminal"))
    if faults:
        raise SpecError(faults)


def _get(found: Inspection, path: str, to: Path, force: bool) -> None:
    from stoker.core.units import counted, format_bytes

    kind, size = found.stat(path)
    bar = byte_bar("get", size) if kind.startswith("regular") else nullcontext(None)
    with bar as tell:
        copied = found.get(path, to, force=force, tell=tell)
    if copied.left_out:
        names = ", ".join(copied.left_out[:3]) + (" …" if len(copied.left_out) > 3 else "")
        remark(f"Left out, as no files or leading elsewhere: {names} ({len(copied.left_out):,}).")
    remark(f"Copied {counted(copied.files, 'file')}, {format_bytes(copied.size)}, to {copied.path}")


def _shell(cluster: Cluster, found: Inspection) -> int:
    from stoker.kube.kubectl import exec_into
    from stoker.kube.objects import CONTAINER

    remark("The volume is this folder. Ctrl-D ends the shell.")
    return exec_into(cluster, found.pod, CONTAINER, ["sh"])


@app.command()
def delete(
    name: Name,
    on: On = "k8s",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a volume, after telling what becomes of its data; also the PersistentVolumes that `create` made for it."""
    from stoker.errors import InputError, StoppedError
    from stoker.kube.volumes import look_to_delete, remove

    with cluster_at(on) as cluster:
        decided = look_to_delete(cluster, name)
        remark(f"Volume {name} in {cluster.url}. {decided.fate}")
        if not yes:
            if not sys.stdin.isatty():
                raise InputError(f"nobody can be asked whether to delete volume {name}", hint="say it with --yes")
            if not typer.confirm("Delete it?", err=True):
                raise StoppedError("nothing was deleted")
        remove(cluster, decided)
    remark(f"Deleted volume {name}.")

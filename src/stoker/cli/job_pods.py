"""Find the cluster, slot and pod that `stoker job exec` and `forward` use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stoker.jobs.run_folder import RunFolder
    from stoker.kube.client import KubeClient
    from stoker.kube.objects import Manifest

KUBERNETES = "k8s"

RequiredRun = Annotated[str, typer.Argument(metavar="RUN", help="Run ID (or a unique prefix), handle, or job name.")]
SlotName = Annotated[
    str | None,
    typer.Option(
        "--slot",
        metavar="SLOT",
        help="Slot, for example worker/0. Defaults to chief/0 or launcher/0 if the job has one, otherwise to worker/0.",
    ),
]


@contextmanager
def connect_to_run(
    run: RunFolder, slot: str | None, command: str, *, local: str, ssh: Callable[[str], str]
) -> Iterator[KubeClient]:
    """Yield a client of the cluster of a run; for other runs, raise InputError with what to do instead."""
    from stoker.errors import InputError
    from stoker.kube.client import KubeClient
    from stoker.kube.config import parse_handle

    kind = run.handle.partition("://")[0]
    if kind == KUBERNETES:
        target, _ = parse_handle(run.handle)
        with KubeClient.for_target(target) as cluster:
            yield cluster
        return
    host = _find_host(run, resolve_slot(run, slot)) if kind == "ssh" else None
    if host is not None:
        hint = f"runs on SSH hosts, so use: {ssh(host)}"
    elif kind == "local":
        hint = f"is local, so {local} on this machine"
    else:
        hint = f"runs on {kind}, so log in to its machines instead"
    raise InputError(f"`job {command}` works only for Kubernetes runs", hint=f"run {run.id} {hint}")


def _find_host(run: RunFolder, slot: str) -> str | None:
    """Return the host of a slot of an SSH run."""
    from stoker.core import json_io

    path = run.folder / "plan.json"
    hosts = json_io.parse(json_io.read_file(path), path).get("hosts") or {}
    host = hosts.get(slot)
    return str(host) if host else None


def resolve_slot(run: RunFolder, slot: str | None) -> str:
    """Return the given slot, or the first lead slot; raise InputError if the run has no such slot."""
    from stoker.errors import InputError
    from stoker.jobs.topology import lead_slots, list_slots

    known = [str(each) for each in list_slots(run.job)]
    if slot is None:
        return str(min(lead_slots(run.job)))
    if slot not in known:
        names = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
        raise InputError(f"run {run.id} has no slot {slot!r}", hint=f"available slots: {names}")
    return slot


def find_slot_pod(cluster: KubeClient, run: RunFolder, slot: str) -> Manifest | None:
    """Return the newest pod of a slot, in whatever state."""
    from stoker.kube.objects import ROLE_LABEL, RUN_LABEL
    from stoker.kube.pods import find_pod

    return find_pod(cluster.list_objects("Pod", {RUN_LABEL: run.id, ROLE_LABEL: slot.partition("/")[0]}), slot)


def get_running_pod(cluster: KubeClient, run: RunFolder, slot: str) -> Manifest:
    """Return the running pod of a slot; raise with the reason if there is none."""
    from stoker.errors import NotFoundError, UnavailableError
    from stoker.kube.ephemeral_pod import list_events
    from stoker.kube.pending import explain_not_running

    pod = find_slot_pod(cluster, run, slot)
    if pod is None:
        hint = f"check the run with: stoker job status {run.id}"
        raise NotFoundError(f"{slot} of {run.id} has no pod", where=cluster, hint=hint)
    if reason := explain_not_running(pod, list_events(cluster, pod)):
        what = f"pod {pod['metadata']['name']} of {slot} of {run.id} is not running: {reason}"
        raise UnavailableError(what, where=cluster)
    return pod

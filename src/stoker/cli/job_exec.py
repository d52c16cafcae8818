"""`stoker job exec`, `forward` and `shell`: into the pods of a job on Kubernetes, or into one like them."""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.output import remark

if TYPE_CHECKING:
    from stoker.jobs.run_folder import Run
    from stoker.jobs.spec import Job
    from stoker.kube.client import Cluster
    from stoker.kube.kubectl import Port
    from stoker.kube.objects import Manifest

KIND = "k8s"
LOOK_S, PAUSE_S = 2.0, 1.0
PATIENCE_S = 60.0
"""How long a tunnel waits for a cluster that does not answer."""
FAILURES = 5
"""How often in a row a tunnel may fail to open before it is given up."""
NAME_LENGTH = 45
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of it, or a job's name.")]
There = Annotated[
    str | None, typer.Option("--on", metavar="PLACE", help="Look for it in k8s[://context/namespace], not here.")
]
SlotName = Annotated[
    str | None, typer.Option("--slot", metavar="SLOT", help="Which pod, like worker/0; the one that leads.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands to those of jobs."""
    app.command("exec")(exec_in)
    app.command()(forward)
    app.command()(shell)


# --- exec


def exec_in(
    name: RunName,
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="After --: the command, with its arguments.")],
    slot: SlotName = None,
    on: There = None,
) -> None:
    """Run a command in a pod of a running job; its exit code is ours.

    At a terminal it gets one too; otherwise our standard input is its own.
    """
    from stoker.cli.job import find_run
    from stoker.kube import kubectl
    from stoker.kube.objects import CONTAINER

    run = find_run(name, on)
    with _cluster_of(run, slot, lambda host: f"ssh {host} -- {shlex.quote(shlex.join(command))}") as cluster:
        pod = _pod_now(cluster, run, _slot(run, slot))["metadata"]["name"]
        if kubectl.is_here():
            raise typer.Exit(kubectl.exec_into(cluster, pod, CONTAINER, command))
        if kubectl.has_stdin():
            what = "a terminal in a pod" if kubectl.is_terminal() else "standard input of a command in a pod"
            kubectl.need(what, hint="a command that reads nothing does without: end the line with </dev/null")
        done = cluster.run_in(pod, command, container=CONTAINER)
        for data, err in ((done.out, False), (done.err, True)):
            typer.echo(data, nl=False, err=err)
        raise typer.Exit(done.code)


# --- forward


def forward(
    name: RunName,
    ports: Annotated[
        list[str], typer.Argument(metavar="PORT[:LOCAL]", help="Ports of the pod; LOCAL is its number here.")
    ],
    slot: SlotName = None,
    on: There = None,
) -> None:
    """Lead ports of a pod of a running job to this machine, until Ctrl-C.

    Only this machine can use them (127.0.0.1). When the pod is replaced, they lead to the new one.
    """
    from stoker.cli.job import find_run
    from stoker.kube import kubectl

    run, wanted = find_run(name, on), _parsed(ports)
    flags = " ".join(f"-L {one.here or one.there}:localhost:{one.there}" for one in wanted)
    with _cluster_of(run, slot, lambda host: f"ssh -N {flags} {host}") as cluster:
        kubectl.need("a tunnel to a pod")
        _Forwarding(cluster, run, _slot(run, slot), _free(wanted)).run()


class _Forwarding:
    """Tunnels to whichever pod a slot has."""

    def __init__(self, cluster: Cluster, run: Run, slot: str, ports: Sequence[Port]) -> None:
        self._cluster, self._run, self._slot, self._ports = cluster, run, slot, ports
        self._failures = 0

    def run(self) -> None:
        """Go on until Ctrl-C, or until the slot will have no pod again."""
        pod: Manifest | None = _pod_now(self._cluster, self._run, self._slot)
        try:
            while pod is not None:
                self._lead_to(pod)
                pod = self._successor(pod)
        except KeyboardInterrupt:
            return  # the way in which it is meant to end
        remark(f"{self._slot} of {self._run.id} has ended")

    def _lead_to(self, pod: Manifest) -> None:
        """Keep tunnels to a pod open until they break or it is over."""
        from stoker.errors import UnavailableError
        from stoker.kube.kubectl import Tunnel

        name, opened, fault = str(pod["metadata"]["name"]), 0, ""
        with Tunnel(self._cluster, name, {one.here: one.there for one in self._ports}) as tunnel:
            while (line := tunnel.next(LOOK_S)) is not None:
                if line.startswith("Forwarding from "):
                    opened += 1
                    if opened == len(self._ports):
                        self._tell(name)
                elif "connection refused" in line or line.lower().startswith(("error", "unable")):
                    fault = line
                    if "connection refused" in line:
                        remark(f"Nothing listens at that port in {self._slot} (yet)")
                elif not line and not self._lives(name):
                    return
        self._failures = 0 if opened == len(self._ports) else self._failures + 1
        if self._failures and (self._failures >= FAILURES or "listen" in fault):
            what = f"no tunnel to pod {name}: {fault.removeprefix('error: ') or 'kubectl ended'}"
            raise UnavailableError(what, where=self._cluster)

    def _tell(self, pod: str) -> None:
        for one in self._ports:
            typer.echo(f"http://127.0.0.1:{one.here}")
            remark(f"  is port {one.there} of {self._slot} (pod {pod}); Ctrl-C ends it")

    def _lives(self, pod: str) -> bool:
        """Whether a pod runs, as far as can be told now."""
        from stoker.errors import UnavailableError
        from stoker.kube.conditions import is_ending
        from stoker.kube.pods import is_running

        try:
            found = self._cluster.get("Pod", pod)
        except UnavailableError:
            return True
        return found is not None and is_running(found) and not is_ending(found)

    def _successor(self, last: Manifest) -> Manifest | None:
        """Wait for the pod that a slot has next, which may be the same; None: there will be none."""
        from stoker.errors import AccessError, UnavailableError
        from stoker.kube.conditions import is_ending
        from stoker.kube.pods import is_running

        told, deadline = False, time.monotonic() + PATIENCE_S
        while True:
            time.sleep(PAUSE_S)
            try:
                found = _pod(self._cluster, self._run, self._slot)
                if found is not None and is_running(found) and not is_ending(found):
                    return found
                if _is_over(self._cluster, found or last):
                    return None
                deadline = time.monotonic() + PATIENCE_S
            except UnavailableError as error:
                if isinstance(error, AccessError) or time.monotonic() > deadline:
                    raise
            if not told:
                remark(f"Pod {last['metadata']['name']} no longer answers; waiting for the next of {self._slot}")
                told = True


def _is_over(cluster: Cluster, pod: Manifest) -> bool:
    """Whether whoever makes a pod again has ended."""
    from stoker.kube.client import KINDS

    owners = [one for one in pod["metadata"].get("ownerReferences") or () if one["kind"] in KINDS]
    for one in owners:
        found = cluster.get(one["kind"], one["name"])
        conditions = ((found or {}).get("status") or {}).get("conditions") or ()
        finished = ("Complete", "SuccessCriteriaMet", "Failed", "FailureTarget", "Succeeded")
        if found is not None and not any(c["type"] in finished and c["status"] == "True" for c in conditions):
            return False
    return True


def _parsed(ports: Sequence[str]) -> list[Port]:
    """Read ports, and tell every one that is none."""
    from stoker.errors import InputError
    from stoker.kube.kubectl import Port

    found, faults = [], []
    for text in ports:
        try:
            found.append(Port.parse(text))
        except InputError as error:
            faults.append(error)
    if faults:
        raise InputError("; ".join(one.what for one in faults), hint=faults[0].hint)
    return found


def _free(ports: Sequence[Port]) -> list[Port]:
    """Make sure that ports are free here; take any for 0."""
    from stoker.errors import ConflictError
    from stoker.kube.kubectl import HOST, Port

    found, faults = [], []
    for one in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, one.here))
            except PermissionError:
                faults.append(f"port {one.here} is only for root here")
            except OSError:
                faults.append(f"port {one.here} is taken here")
            else:
                found.append(Port(one.there, probe.getsockname()[1]))
    numbers = [one.here for one in found]
    faults += [f"port {number} is given twice" for number in dict.fromkeys(numbers) if numbers.count(number) > 1]
    if faults:
        hint = f"give another number, or {ports[0].there}:0 for any that is free"
        raise ConflictError("; ".join(faults), hint=hint)
    return found


# --- shell


def shell(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job file; `-` is standard input.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="After --: what to run there instead of a shell.")
    ] = None,
    on: Annotated[str, typer.Option("--on", metavar="PLACE", help="Where: k8s[://context/namespace].")] = KIND,
    role: Annotated[
        str | None, typer.Option("--role", metavar="ROLE", help="Like a pod of this role; worker, or the first.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="With the GPUs that the job asks for.")] = False,
    wait: Annotated[str, typer.Option("--wait", metavar="DURATION", help="How long the pod may take to run.")] = "5m",
    limit: Annotated[
        str, typer.Option("--limit", metavar="DURATION", help="The pod ends after that, whatever happens here.")
    ] = "8h",
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, like image=…")
    ] = None,
) -> None:
    """Open a shell in a pod of its own that has the job's image, variables, volumes and secrets, but not its program.

    The pod is deleted when the shell ends. The exit code is the shell's.
    """
    from stoker.core.units import parse_duration
    from stoker.kube import kubectl
    from stoker.kube.claims import check_mountable
    from stoker.kube.client import Cluster
    from stoker.kube.config import Place
    from stoker.kube.ephemeral_pod import sweep, visiting
    from stoker.kube.objects import CONTAINER, PART

    wait_s, limit_s = parse_duration(wait), parse_duration(limit)
    kind, _, place = on.partition("://")
    _need_kubernetes(kind)
    job, spec, texts = _like(file, on, role, sets, gpu=gpu)
    kubectl.need("a shell in a pod")
    pod, others = shell_objects(job.name, spec, texts, round(limit_s), secrets.token_hex(3))
    with closing(Cluster.at(Place.parse(place), namespace=job.kubernetes.namespace)) as cluster:
        check_mountable(cluster, [spec])
        sweep(cluster.every("Pod", {PART: "shell"}), cluster)
        remark(f"Starting pod {pod['metadata']['name']} in {cluster}")
        with visiting(cluster, pod, others, wait_s=wait_s, tell=remark) as name:
            code = kubectl.exec_into(cluster, name, CONTAINER, command or SHELL)
        remark(f"Pod {name} is deleted")
    raise typer.Exit(code)


def shell_objects(
    job: str, spec: Manifest, texts: Sequence[Manifest], limit_s: int, mark: str
) -> tuple[Manifest, list[Manifest]]:
    """Give the pod of a shell, and the job's ConfigMaps under names of its own; `mark` tells it from others.

    It has none of the job's labels: the job's Services and commands must not take it for one of its pods.
    """
    from stoker.kube.objects import PART, manifest

    name = f"{job[:NAME_LENGTH].rstrip('-')}-shell-{mark}"
    names = {str(one["metadata"]["name"]): f"{name}-{index}" for index, one in enumerate(texts)}
    volumes = [_renamed(one, names) for one in spec.get("volumes") or ()]
    dropped = ("activeDeadlineSeconds", "hostname", "subdomain", "volumes")
    kept = {key: value for key, value in spec.items() if key not in dropped}
    kept |= {"restartPolicy": "Never", "activeDeadlineSeconds": limit_s, "volumes": volumes}
    copies = [
        manifest("v1", "ConfigMap", names[str(one["metadata"]["name"])], {PART: "shell"})
        | {key: one[key] for key in ("data", "binaryData") if key in one}
        for one in texts
    ]
    return manifest("v1", "Pod", name, {PART: "shell"}, spec=kept), copies


def _renamed(volume: Manifest, names: dict[str, str]) -> Manifest:
    """Have a volume read the copy of a ConfigMap."""
    given = volume.get("configMap")
    if not given or given.get("name") not in names:
        return volume
    return {**volume, "configMap": {**given, "name": names[given["name"]]}}


def _like(
    file: Path, on: str, role: str | None, sets: list[str] | None, *, gpu: bool
) -> tuple[Job, Manifest, list[Manifest]]:
    """Give the job, what a pod of its role is but for the program, and the ConfigMaps that it reads."""
    from stoker.cli.job import launcher_at
    from stoker.errors import InputError
    from stoker.jobs.spec import load_job
    from stoker.jobs.topology import topology_of
    from stoker.launchers.kubernetes.manifests import shell_pod

    launcher = launcher_at(on)
    job = launcher.anchored(load_job(file, sets or []))
    objects = launcher.render(job).objects
    roles = [one.name for one in topology_of(job).roles(job)]
    chosen = role or ("worker" if "worker" in roles else roles[0])
    if chosen not in roles:
        raise InputError(f"there is no role {chosen!r} in {job.name}", where=file, hint=f"known: {', '.join(roles)}")
    return job, shell_pod(objects, role=chosen, gpu=gpu), [one for one in objects if one["kind"] == "ConfigMap"]


# --- The run and its pods


@contextmanager
def _cluster_of(run: Run, slot: str | None, instead: Callable[[str], str]) -> Iterator[Cluster]:
    """Open the cluster in which a run is; for one over ssh, `instead` says what to do on a slot's host."""
    from stoker.errors import InputError
    from stoker.kube.client import Cluster
    from stoker.kube.config import parts_of

    kind = run.handle.partition("://")[0]
    if kind == KIND:
        place, _ = parts_of(run.handle)
        with Cluster.at(place) as cluster:
            yield cluster
        return
    host = _host(run, _slot(run, slot)) if kind == "ssh" else None
    hint = "it runs on this machine: no way into it is needed" if kind == "local" else "log in where it runs"
    raise InputError(
        f"runs on {kind}, and not in pods", where=run.id, hint=f"use: {instead(host)}" if host is not None else hint
    )


def _host(run: Run, slot: str) -> str | None:
    """Tell on which host a slot of a run over ssh is."""
    import json

    hosts = json.loads((run.folder / "plan.json").read_bytes()).get("hosts") or {}
    found = hosts.get(slot)
    return str(found) if found else None


def _slot(run: Run, slot: str | None) -> str:
    """Give the slot that is meant: the one given, or the first that leads."""
    from stoker.errors import InputError
    from stoker.jobs.topology import lead_slots, slots_of

    known = [str(one) for one in slots_of(run.job)]
    if slot is None:
        return str(min(lead_slots(run.job)))
    if slot not in known:
        shown = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
        raise InputError(f"there is no slot {slot!r} in {run.id}", hint=f"known: {shown}")
    return slot


def _pod(cluster: Cluster, run: Run, slot: str) -> Manifest | None:
    from stoker.kube.objects import ROLE, RUN
    from stoker.kube.pods import pod_of

    return pod_of(cluster.every("Pod", {RUN: run.id, ROLE: slot.partition("/")[0]}), slot)


def _pod_now(cluster: Cluster, run: Run, slot: str) -> Manifest:
    """Give the pod in which a slot runs now."""
    from stoker.errors import NotFoundError, UnavailableError
    from stoker.kube.ephemeral_pod import events_of
    from stoker.kube.pods import why_not_running

    found = _pod(cluster, run, slot)
    if found is None:
        hint = f"stoker job status {run.id} tells how the run is doing"
        raise NotFoundError(f"{slot} of {run.id} has no pod", where=cluster, hint=hint)
    if why := why_not_running(found, events_of(cluster, found)):
        what = f"{slot} of {run.id} does not run in pod {found['metadata']['name']}: {why}"
        raise UnavailableError(what, where=cluster)
    return found


def _need_kubernetes(kind: str) -> None:
    from stoker.errors import InputError

    if kind != KIND:
        raise InputError(f"`--on {kind}` has no pods", hint=f"a shell is for --on {KIND}[://context/namespace]")

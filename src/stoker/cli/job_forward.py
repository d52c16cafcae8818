"""`stoker job forward`: forward local ports to a pod of a running job."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.job_pods import RequiredRun, SlotName, connect_to_run, find_slot_pod, get_running_pod, resolve_slot
from stoker.cli.options import RunTarget
from stoker.cli.output import print_message

if TYPE_CHECKING:
    from stoker.jobs.run_folder import RunFolder
    from stoker.kube.client import KubeClient
    from stoker.kube.kubectl import PortMapping
    from stoker.kube.objects import Manifest

CHECK_EVERY_S = 2.0
POLL_S = 1.0
UNREACHABLE_S = 60.0
"""How long to wait for a cluster that does not answer."""
MAX_FAILURES = 5
"""Consecutive failures to open the tunnel before giving up."""


def add_to(app: typer.Typer) -> None:
    """Add this command to `stoker job`."""
    app.command()(forward)


def forward(
    name: RequiredRun,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="PORT[:LOCAL]", help="Port in the pod, and the local port if it is different."),
    ],
    slot: SlotName = None,
    on: RunTarget = None,
) -> None:
    """Forward ports from a running job's pod to this machine.

    Listens on 127.0.0.1 until Ctrl-C. When the pod is replaced, the ports are forwarded to the new one.
    """
    from stoker.jobs.run_lookup import resolve_run
    from stoker.kube import kubectl

    run, mappings = resolve_run(name, on), _parse_ports(ports)
    flags = " ".join(f"-L {port.local_port or port.pod_port}:localhost:{port.pod_port}" for port in mappings)
    with connect_to_run(
        run, slot, "forward", local="connect to its ports directly", ssh=lambda host: f"ssh -N {flags} {host}"
    ) as cluster:
        kubectl.require_kubectl("a tunnel to a pod")
        _Forwarder(cluster, run, resolve_slot(run, slot), reserve_ports(mappings)).run()


class _Forwarder:
    """Port forwarding to the current pod of a slot."""

    def __init__(self, cluster: KubeClient, run: RunFolder, slot: str, ports: Sequence[PortMapping]) -> None:
        self._cluster, self._run, self._slot, self._ports = cluster, run, slot, ports
        self._failures = 0

    def run(self) -> None:
        """Forward until Ctrl-C, or until the slot gets no further pod."""
        pod: Manifest | None = get_running_pod(self._cluster, self._run, self._slot)
        try:
            while pod is not None:
                self._forward_to(pod)
                pod = self._wait_for_next_pod(pod)
        except KeyboardInterrupt:
            return
        print_message(f"{self._slot} of {self._run.id} has finished")

    def _forward_to(self, pod: Manifest) -> None:
        """Keep the tunnel to a pod open until it breaks or the pod stops running."""
        from stoker.errors import UnavailableError
        from stoker.kube.kubectl import PortForward

        name, opened, failure = str(pod["metadata"]["name"]), 0, ""
        with PortForward(self._cluster, name, {port.local_port: port.pod_port for port in self._ports}) as tunnel:
            while (line := tunnel.next_line(CHECK_EVERY_S)) is not None:
                if line.startswith("Forwarding from "):
                    opened += 1
                    if opened == len(self._ports):
                        self._print_addresses(name)
                elif "connection refused" in line or line.lower().startswith(("error", "unable")):
                    failure = line
                    if "connection refused" in line:
                        print_message(f"Nothing is listening on that port in {self._slot} yet")
                elif not line and not self._is_running(name):
                    return
        self._failures = 0 if opened == len(self._ports) else self._failures + 1
        if self._failures and (self._failures >= MAX_FAILURES or "listen" in failure):
            reason = failure.removeprefix("error: ") or "kubectl exited"
            raise UnavailableError(f"cannot forward ports to pod {name}: {reason}", where=self._cluster)

    def _print_addresses(self, pod: str) -> None:
        for port in self._ports:
            typer.echo(f"http://127.0.0.1:{port.local_port}")
            print_message(f"  forwards to port {port.pod_port} of {self._slot} (pod {pod}); to stop, press Ctrl-C")

    def _is_running(self, pod: str) -> bool:
        """Return whether a pod is running; True while the API server does not answer."""
        from stoker.errors import UnavailableError

        try:
            return _is_usable(self._cluster.get("Pod", pod))
        except UnavailableError:
            return True

    def _wait_for_next_pod(self, last: Manifest) -> Manifest | None:
        """Wait for the next running pod of the slot, possibly the same one; return None if there will be none."""
        from stoker.errors import AccessDeniedError, UnavailableError

        was_reported, deadline = False, time.monotonic() + UNREACHABLE_S
        while True:
            time.sleep(POLL_S)
            try:
                pod = find_slot_pod(self._cluster, self._run, self._slot)
                if _is_usable(pod):
                    return pod
                if _are_owners_finished(self._cluster, pod or last):
                    return None
                deadline = time.monotonic() + UNREACHABLE_S
            except UnavailableError as error:
                if isinstance(error, AccessDeniedError) or time.monotonic() > deadline:
                    raise
            if not was_reported:
                print_message(f"Pod {last['metadata']['name']} stopped; waiting for the next pod of {self._slot}")
                was_reported = True


def _is_usable(pod: Manifest | None) -> bool:
    from stoker.kube.conditions import is_terminating
    from stoker.kube.pods import is_running

    return pod is not None and is_running(pod) and not is_terminating(pod)


def _are_owners_finished(cluster: KubeClient, pod: Manifest) -> bool:
    """Return whether every owner that could recreate the pod has finished."""
    from stoker.kube.client import API_RESOURCES

    finished = ("Complete", "SuccessCriteriaMet", "Failed", "FailureTarget", "Succeeded")
    for owner in pod["metadata"].get("ownerReferences") or ():
        if owner["kind"] not in API_RESOURCES:
            continue
        owner_object = cluster.get(owner["kind"], owner["name"])
        conditions = ((owner_object or {}).get("status") or {}).get("conditions") or ()
        if owner_object is not None and not any(c["type"] in finished and c["status"] == "True" for c in conditions):
            return False
    return True


def _parse_ports(texts: Sequence[str]) -> list[PortMapping]:
    """Parse port arguments; raise InputError with every invalid one."""
    from stoker.errors import InputError
    from stoker.kube.kubectl import PortMapping

    ports, errors = [], []
    for text in texts:
        try:
            ports.append(PortMapping.parse(text))
        except InputError as error:
            errors.append(error)
    if errors:
        raise InputError("; ".join(error.what for error in errors), hint=errors[0].hint)
    return ports


def reserve_ports(ports: Sequence[PortMapping]) -> list[PortMapping]:
    """Return the mappings with a free local port for 0; raise ConflictError for local ports that are in use."""
    from stoker.errors import ConflictError
    from stoker.kube.kubectl import BIND_ADDRESS, PortMapping

    free, faults = [], []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((BIND_ADDRESS, port.local_port))
            except PermissionError:
                faults.append(f"local port {port.local_port} requires root")
            except OSError:
                faults.append(f"local port {port.local_port} is in use")
            else:
                free.append(PortMapping(port.pod_port, probe.getsockname()[1]))
    numbers = [port.local_port for port in free]
    repeated = [number for number in dict.fromkeys(numbers) if numbers.count(number) > 1]
    faults += [f"local port {number} is specified twice" for number in repeated]
    if faults:
        hint = f"choose another, or use {ports[0].pod_port}:0 for any free port"
        raise ConflictError("; ".join(faults), hint=hint)
    return free

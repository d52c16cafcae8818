"""Ray cluster on bare hosts: start its nodes over ssh for one attempt, forward its dashboard, and remove it afterwards.

The process that uses the cluster owns it. When that process is gone, the nodes stop as soon as their lease expires,
except for a cluster that the user wants to keep.
"""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress

from stoker.core.processes import start, wait_until
from stoker.core.spec import to_json
from stoker.core.text import join_all
from stoker.errors import StokerError, UnavailableError
from stoker.jobs.run_folder import KEPT_FILE, RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.plan import PORT_RANGE, find_free_ports
from stoker.launchers.ray.cluster import RayCluster
from stoker.launchers.ray.hosts import (
    AGENT_PORT,
    CLIENT_PORT,
    DASHBOARD_PORT,
    GCS_PORT,
    HEAD,
    NODE_GRACE_S,
    fill_in,
    node_run,
)
from stoker.launchers.ray.plan import RayPlan
from stoker.launchers.ssh.client import Session, SshClient
from stoker.launchers.ssh.launcher import clean_up_hosts
from stoker.launchers.ssh.plan import SshPlan, read_ssh_plan, set_detached
from stoker.launchers.ssh.preflight import run_parallel
from stoker.launchers.ssh.prepare import is_prepared, prepare_hosts
from stoker.launchers.ssh.slots import SshBackend, SshSlot
from stoker.launchers.supervise.slot_handle import Exited, Running, Unreachable

START_TIMEOUT_S = 120.0
POLL_S = 0.2
EXIT_REPORT_S = 5.0
"""How long a host may take to report that its Ray node has exited, after the grace period."""
PORT_TRIES = 50
_STARTED_FILE = "started"
"""File in the folder of the nodes that exists while nodes may be running."""


class HostCluster:
    """The Ray cluster of one attempt, on the hosts of the plan."""

    def __init__(self, plan: RayPlan, run: RunFolder, attempt: int) -> None:
        assert plan.nodes is not None
        self._plan, self._run, self._attempt = plan, run, attempt
        self._nodes, self._ssh = node_run(run), plan.nodes
        self._slots: dict[Slot, SshSlot] = {}
        self._forward: SshPortForward | None = None
        self.address = ""
        """URL of the dashboard, through the port forward."""

    def start(self, should_stop: Callable[[], bool]) -> None:
        """Start all nodes and wait until they have joined; raise UnavailableError if one does not.

        Return early if `should_stop`.
        """
        ports = _choose_ports(self._ssh)
        digest = zlib.crc32(f"{self._run.id}.{self._attempt}".encode())
        plan = fill_in(self._ssh, f"/tmp/stoker-ray-{digest:08x}", ports)
        self._nodes.write("plan.json", to_json(plan))
        set_detached(self._nodes, is_detached=self._plan.keep)
        (self._run.folder / KEPT_FILE).unlink(missing_ok=True)
        self._nodes.write(_STARTED_FILE, b"")
        self._slots = SshBackend(self._nodes).start_slots(self._attempt)
        head = plan.hosts[str(HEAD)]
        with open(self._nodes.logs / f"forward.{self._attempt}.log", "ab") as log:
            self._forward = SshPortForward(plan.client, head, ports[head][DASHBOARD_PORT], log.fileno())
        self.address = f"http://127.0.0.1:{self._forward.port}"
        self._wait_for_nodes(should_stop)

    def _wait_for_nodes(self, should_stop: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        alive = set[str]()
        while not should_stop() and alive < set(self._plan.node_addresses.values()):
            for slot in self._slots:
                if reason := self._exit_reason(slot):
                    raise UnavailableError(reason)
            if time.monotonic() > deadline:
                missing = [host for host, address in self._plan.node_addresses.items() if address not in alive]
                what = f"Ray on {join_all(missing, 'and')} has not joined the cluster after {START_TIMEOUT_S:g} s"
                raise UnavailableError(what, hint=f"see the logs in {self._nodes.logs}")
            with suppress(StokerError, ValueError):  # the dashboard starts last
                alive = {address for address, state in RayCluster(self.address).nodes().items() if state == "alive"}
            time.sleep(POLL_S)

    def _exit_reason(self, slot: Slot) -> str:
        """Return why a node is not running any more; empty while it may be."""
        state = self._slots[slot].poll()
        if isinstance(state, Running) or (isinstance(state, Unreachable) and not state.is_lost):
            return ""
        log = self._nodes.log_path(slot, self._attempt)
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = state.reason or (lines[-1] if lines else "no output")
        return f"Ray on {self._ssh.hosts[str(slot)]} exited: {reason} (log: {log})"

    def failure(self) -> str:
        """Return why the cluster cannot be used any more: its head has exited; empty while it runs."""
        return self._exit_reason(HEAD) if self._slots else ""

    def close(self) -> None:
        """Stop all nodes, or leave them running for the user."""
        if self._forward is not None:
            self._forward.close()
        if self._plan.keep and self.address and not any(map(self._exit_reason, self._slots)):
            self._run.write(KEPT_FILE, describe_kept(self._nodes).encode())
        else:
            self._stop_nodes()
        for connection in {slot.connection for slot in self._slots.values()}:
            connection.close()

    def _stop_nodes(self) -> None:
        def have_exited() -> bool:
            states = [slot.poll() for slot in self._slots.values()]
            return all(isinstance(state, Exited) and not state.is_lost for state in states)

        for slot in self._slots.values():
            slot.terminate()
        if wait_until(have_exited, NODE_GRACE_S + EXIT_REPORT_S):
            (self._nodes.folder / _STARTED_FILE).unlink(missing_ok=True)


def describe_kept(nodes: RunFolder) -> str:
    """Return how to use and stop a cluster that is left running."""
    plan = read_ssh_plan(nodes)
    head, argv = plan.hosts[str(HEAD)], plan.slots[str(HEAD)].argv
    (port,) = (argument.partition("=")[2] for argument in argv if argument.startswith("--dashboard-port="))
    forward = f"{plan.client.command_line(head)} -N -L 8265:127.0.0.1:{port}"
    run = nodes.folder.parent.name
    return (
        f"Ray is still running on {join_all(list(plan.hosts.values()), 'and')}. To use it, run `{forward}`, then "
        f"`stoker job run FILE --on ray://127.0.0.1:8265`. To stop it: stoker job stop {run}"
    )


def prepare_nodes(run: RunFolder, plan: SshPlan) -> None:
    """Create the folder of the nodes, and run `ssh.setup` on the hosts; a failure becomes the status of the run."""
    nodes = node_run(run)
    nodes.logs.mkdir(parents=True, exist_ok=True)
    if not plan.setup or is_prepared(nodes):
        return
    nodes.write("plan.json", to_json(plan))
    try:
        prepare_hosts(nodes)
    except BaseException:
        run.write_status(nodes.read_status())
        raise


def stop_nodes(run: RunFolder) -> None:
    """Stop the Ray nodes of a run that may still be running; raise UnavailableError if a host cannot be reached."""
    nodes = node_run(run)
    if not (nodes.folder / _STARTED_FILE).exists():
        return
    if failures := clean_up_hosts(nodes):
        what = f"{'; '.join(failures)}; Ray may still be running there"
        raise UnavailableError(what, where=run.id, hint=f"try again: stoker job stop {run.id}")
    (nodes.folder / _STARTED_FILE).unlink()
    (run.folder / KEPT_FILE).unlink(missing_ok=True)


def _choose_ports(plan: SshPlan) -> dict[str, dict[str, int]]:
    """Return ports that are free on each host now, by placeholder."""
    head = plan.hosts[str(HEAD)]

    def choose(host: str) -> dict[str, int]:
        names = (AGENT_PORT, GCS_PORT, DASHBOARD_PORT, CLIENT_PORT) if host == head else (AGENT_PORT,)
        with Session(plan.client, host, plan.host_configs[host].python) as session:
            return {name: _find_port(session) for name in names}

    hosts = list(plan.host_configs)
    return dict(zip(hosts, run_parallel(choose, hosts), strict=True))


def _find_port(session: Session) -> int:
    # The probe keeps listening on a port that it has found, so that no port is found twice.
    for port in random.sample(PORT_RANGE, PORT_TRIES):
        if "error" not in session.request({"op": "listen", "port": port, "token": ""}):
            return port
    raise UnavailableError(f"no free port from {PORT_RANGE.start} to {PORT_RANGE.stop - 1}", where=session.host)


class SshPortForward:
    """Port forward to a host's loopback interface; starts `ssh` again when it exits, always with the same port."""

    def __init__(self, client: SshClient, host: str, remote_port: int, log_fd: int) -> None:
        (self.port,) = find_free_ports(1)
        """The port on the loopback interface of this machine."""
        self._argv = client.forward_argv(host, self.port, remote_port)
        self._log_fd = os.dup(log_fd)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            # The thread lives as long as this process; ssh exits with it.
            with start(self._argv, stdout=self._log_fd, stderr=self._log_fd, terminate_with_parent=True) as ssh:
                while ssh.poll() is None and not self._is_closed.wait(POLL_S):
                    pass
            self._is_closed.wait(POLL_S)

    def close(self) -> None:
        """Close the port."""
        self._is_closed.set()
        self._thread.join()
        os.close(self._log_fd)

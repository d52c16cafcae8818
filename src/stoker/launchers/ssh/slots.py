"""Slots on ssh hosts: the backend of the supervisor, with one connection per host."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import msgspec

from stoker.core.processes import wait_until
from stoker.errors import InputError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Command, Slot
from stoker.launchers.ssh.client import SshClient, module_source
from stoker.launchers.ssh.exec_router import ExecRouter, StandbyTarget
from stoker.launchers.ssh.host_connection import HostConnection, HostTarget, SlotChannel, connect_peers
from stoker.launchers.ssh.plan import SshPlan, command_for_attempt, is_detached, read_ssh_plan
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE, TAIL_BYTES
from stoker.launchers.supervise.slot_handle import Exited, SlotHandle, SlotState, StackRequest, Unreachable
from stoker.telemetry.reader import read_log

READY_TIMEOUT_S = 60.0
"""How long hosts may take to become ready, in addition to the lease and grace period of an earlier attempt."""
SETUP_LEASE_S = 20.0
"""How long a setup keeps running after the command that started it was killed."""
SETUP_REPORT_S = 5.0
"""How long a host may take to report the exit of a setup, after its grace period."""
_SLEEP_FOREVER = Command(("sleep", "2147483647"))


class SshSlot:
    """A slot on an ssh host."""

    reads_local_sources = False

    def __init__(self, connection: HostConnection, channel: SlotChannel) -> None:
        self.connection, self.channel = connection, channel

    def poll(self) -> SlotState:
        """Return the state of the slot, as far as its host can be reached."""
        return self.connection.poll(self.channel)

    def has_process(self, pid: int) -> bool:  # noqa: ARG002
        """Whether the slot has not exited: of its processes nothing is known here."""
        return not isinstance(self.poll(), Exited)

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Signal the ranks that have sent a heartbeat, one after the other."""
        channel = self.channel
        heartbeats = [event for event in read_log(channel.log, last=TAIL_BYTES).events if event.kind == "heartbeat"]
        for pid in {event.rank: int(event.fields.get("pid", 0)) for event in heartbeats}.values():
            fields = {"slot": channel.slot_id, "name": channel.name, "pid": pid, "number": int(signal.SIGUSR1)}
            self.connection.send({"op": "signal", **fields})
            yield StackRequest(pid)

    def terminate(self, *, force: bool = False) -> None:
        """Ask the slot daemon to stop the slot, now or as soon as the host can be reached."""
        self.connection.stop(self.channel, 2 if force else 1)


class SshBackend:
    """Backend for slots on ssh hosts."""

    report_delay_s = 12.0

    def __init__(self, run: RunFolder, on_change: Callable[[], None] = lambda: None) -> None:
        """Call `on_change`, in any thread, when the state of a slot may have changed."""
        self._run, self._plan, self._notify = run, read_ssh_plan(run), on_change
        self.is_detached = is_detached(run)
        self._connections: dict[str, HostConnection] = {}
        self._slots: dict[Slot, SshSlot] = {}
        self._router = ExecRouter({}, set())
        self._attempt = 0
        self._lock = threading.RLock()
        """Held while slots are added or released; connections release slots in their threads."""

    def prepare(self, grace_s: float, *, reattach: bool = False) -> None:
        """Do nothing: an earlier supervisor left nothing here, and the slot daemons stop slots that we do not know."""

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:
        """Start all slots once every host is ready; those that run commands in standby slots follow these."""
        return dict(self.start_slots(attempt, reattach=reattach))

    def start_slots(self, attempt: int, *, reattach: bool = False) -> dict[Slot, SshSlot]:
        """Do the same and return the slots with their connections."""
        if not reattach:
            check_secrets(self._plan)
        self._attempt = attempt
        names = [*self._plan.slots, *self._plan.standby]
        hosts = dict.fromkeys(self._plan.hosts[name] for name in names)
        self._connections = {host: self._connections.get(host) or self._connect(host) for host in hosts}
        connect_peers(list(self._connections.values()))
        with self._lock:
            self._slots = {Slot.parse(name): self._make_slot(name, is_held=not reattach) for name in names}
            self._router = self._make_router()
            for handle in self._slots.values():
                handle.channel.has_started = reattach
                handle.connection.add(handle.channel)
            self.release_slots()
        return dict(self._slots)

    def _connect(self, host: str) -> HostConnection:
        target = make_target(self._plan, self._run, host, self._plan.client, is_detached=self.is_detached)
        return HostConnection(
            target,
            on_change=self._handle_change,
            on_exec=lambda *message: self._router.handle(*message),
            on_attached=lambda connection: self._router.resend(connection),
        )

    def _make_slot(self, name: str, *, is_held: bool = False) -> SshSlot:
        plan, slot = self._plan, Slot.parse(name)
        connection = self._connections[plan.hosts[name]]
        is_standby = name in plan.standby
        command = _SLEEP_FOREVER if is_standby else command_for_attempt(plan, slot, self._run.id, self._attempt)
        request = start_request(connection.target, plan, name, self._attempt, command)
        log = self._run.log_path(slot, self._attempt)
        log.touch()
        channel = SlotChannel(name, f"{slot.filename}.{self._attempt}", request, log, is_held=is_held)
        if is_standby:
            request["is_standby"] = True
        elif plan.standby:
            request["rsh_agent"] = module_source("stoker.remote.rsh_agent")
        return _HeldSlot(connection, channel, self) if is_held else SshSlot(connection, channel)

    def can_restart(self, slot: Slot) -> bool:  # noqa: ARG002
        """Whether a slot can be started again: always."""
        return True

    def restart_slot(self, slot: Slot) -> SlotHandle:
        """Start a slot again; its log continues."""
        handle = self._slots[slot] = self._make_slot(str(slot))
        handle.connection.add(handle.channel)
        return handle

    def close(self, grace_s: float) -> None:  # noqa: ARG002
        """Close the connections to hosts without slots; others stay, so that their slots can report their exit."""
        idle = {host: connection for host, connection in self._connections.items() if connection.is_idle}
        for connection in idle.values():
            connection.begin_close()
        for host, connection in idle.items():
            del self._connections[host]
            connection.close()

    # --- Slots that wait for others

    def list_unready(self) -> list[str]:
        """List the hosts that cannot be reached or still stop processes of an earlier attempt."""
        return [host for host, connection in list(self._connections.items()) if not connection.is_clear]

    def list_unstarted(self) -> list[str]:
        """List the standby slots that have not started."""
        return [name for name in self._plan.standby if not self._slots[Slot.parse(name)].channel.has_started]

    def _handle_change(self) -> None:
        self.release_slots()
        self._notify()

    def release_slots(self) -> None:
        """Start the slots that are held back, once every host is ready: no two attempts may run at the same time.

        Slots that run commands in standby slots wait for these, too.
        """
        with self._lock:
            if self.list_unready():
                return
            standby = [self._slots[Slot.parse(name)] for name in self._plan.standby]
            for handle in standby if self.list_unstarted() else self._slots.values():
                handle.connection.release(handle.channel)

    def _make_router(self) -> ExecRouter:
        plan, standby = self._plan, dict[str, StandbyTarget]()
        for name in plan.standby:
            handle = self._slots[Slot.parse(name)]
            base = slot_env(handle.connection.target, plan, self._attempt)
            env = {**base, **plan.standby_env.get(name, {})}
            standby[name] = StandbyTarget(handle.connection, handle.channel.slot_id, env)
        return ExecRouter(standby, {plan.hosts[name] for name in plan.slots} if standby else set())


class _HeldSlot(SshSlot):
    """A slot whose start waits for other slots and hosts."""

    def __init__(self, connection: HostConnection, channel: SlotChannel, backend: SshBackend) -> None:
        super().__init__(connection, channel)
        self._backend = backend
        target = connection.target
        self._timeout_s = READY_TIMEOUT_S + target.client.lost_after_s + target.grace_s

    def poll(self) -> SlotState:
        """Return the state; a slot that is not started in time is lost."""
        channel = self.channel
        if channel.is_held:
            self._backend.release_slots()  # the lease of a host that cannot be reached may have expired
        state = super().poll()
        if channel.is_held and channel.exit is None and time.monotonic() > channel.created_at + self._timeout_s:
            names = ", ".join(self._backend.list_unready() or self._backend.list_unstarted())
            reason = f"other hosts are not ready after {self._timeout_s:g} s: {names}"
            state = channel.exit = Exited(LOST_EXIT_CODE, reason, is_lost=True)
        return state


# --- Requests


def make_target(plan: SshPlan, run: RunFolder, host: str, client: SshClient, *, is_detached: bool) -> HostTarget:
    """Return a host as the target of a connection."""
    return HostTarget(host, run.id, plan.host_configs[host], client, plan.grace_s, is_detached)


def check_secrets(plan: SshPlan) -> None:
    """Raise InputError if a secret of the job is not set in our environment."""
    if missing := [name for name in plan.secrets if name not in os.environ]:
        raise InputError(f"secrets are not set on this machine: {', '.join(missing)}")


def slot_env(target: HostTarget, plan: SshPlan, attempt: int) -> dict[str, str]:
    """Return variables of all slots; secrets are sent over the connection, never in a command line or file."""
    secret_env = {name: os.environ[name] for name in plan.secrets if name in os.environ}
    return {"STOKER_ATTEMPT": str(attempt), "STOKER_CHECKPOINT_DIR": f"{target.folder}/checkpoints", **secret_env}


def start_request(target: HostTarget, plan: SshPlan, name: str, attempt: int, command: Command) -> dict[str, Any]:
    """Return the request that starts a slot; its key tells one start from another."""
    return {
        "name": name,
        "key": secrets.token_hex(8),
        "argv": list(command.argv),
        "env": {**slot_env(target, plan, attempt), **command.env},
        "cwd": command.cwd or target.config.workdir,
        "grace_s": plan.grace_s,
        "is_standby": False,
    }


# --- Setup


def run_setup(plan: SshPlan, run: RunFolder, host: str, client: SshClient, log: Path, stop: Event) -> Exited:
    """Run `ssh.setup` on a host and return its exit record; stop it when `stop` is set."""
    client = msgspec.structs.replace(client, lost_after_s=min(client.lost_after_s, SETUP_LEASE_S))
    connection = HostConnection(make_target(plan, run, host, client, is_detached=False))
    command = Command(("sh", "-c", plan.setup or ""), {}, plan.host_configs[host].workdir)
    request = start_request(connection.target, plan, f"setup@{host}", 0, command)
    log.write_bytes(b"")
    slot = SshSlot(connection, SlotChannel(f"setup@{host}", f"setup-{secrets.token_hex(3)}.0", request, log))
    connection.add(slot.channel)
    try:
        wait_until(lambda: _exit_of(slot) is not None or stop.is_set(), None)
        slot.terminate()
        wait_until(lambda: _exit_of(slot) is not None, plan.grace_s + SETUP_REPORT_S)
    finally:
        connection.close()
    return _exit_of(slot) or Exited(LOST_EXIT_CODE, f"{host}: its exit was not reported in time", is_lost=True)


def _exit_of(slot: SshSlot) -> Exited | None:
    state = slot.poll()
    if isinstance(state, Unreachable) and state.is_lost:
        return Exited(LOST_EXIT_CODE, state.reason, is_lost=True)
    return state if isinstance(state, Exited) else None

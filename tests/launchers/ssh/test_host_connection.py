"""Connections to hosts without ssh: silence, leases, reconnects, closing, and the commands that slots run elsewhere."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import UnavailableError
from stoker.jobs.run_folder import create_run
from stoker.jobs.topology import Command
from stoker.launchers.ssh import client as ssh_client
from stoker.launchers.ssh import host_connection
from stoker.launchers.ssh.client import Session, SshClient
from stoker.launchers.ssh.exec_router import ExecRouter, StandbyTarget
from stoker.launchers.ssh.host_connection import GONE_MARGIN_S, HostConnection, HostTarget, SlotChannel, connect_peers
from stoker.launchers.ssh.plan import RETRY_PORTS, HostConfig, SshPlan
from stoker.launchers.ssh.slots import READY_TIMEOUT_S, SshBackend
from stoker.launchers.supervise.slot_handle import Exited, Running, Unreachable
from stoker.remote.frames import ATTACHED, EXEC, EXEC_EXIT, EXIT, GONE, OUTPUT, READY, STARTED
from tests.launchers.contract import job_of

pytestmark = pytest.mark.timeout(60)


def connection_of(lost_after: float = 30.0, host: str = "node1", *, is_detached: bool = False) -> HostConnection:
    """A connection to a host, not connected."""
    config = HostConfig(workdir="/there", python="python3", copies=False)
    client = SshClient(lost_after_s=lost_after)
    return HostConnection(HostTarget(host, "run", config, client, grace_s=3.0, is_detached=is_detached))


def channel_of(folder: Path, **keys: Any) -> SlotChannel:
    return SlotChannel("worker/0", "worker-0.0", {"argv": ["true"], "cwd": "/"}, folder / "log", **keys)


def test_silent_host_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connection, "RESPONSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(host_connection, "agent_code", lambda: b"")
    (_, stdin_fd), (stdout_fd, _) = os.pipe(), os.pipe()
    ssh: Any = SimpleNamespace(stdin_fd=stdin_fd, stdout_fd=stdout_fd)
    with pytest.raises(host_connection._Disconnected, match="no response"):
        connection_of()._exchange(ssh)


@pytest.mark.parametrize("lost_after", [5, 30, 600])
def test_silent_connection_is_replaced_before_the_host_is_lost(lost_after: int) -> None:
    assert connection_of(lost_after).silence_limit_s <= lost_after - 1


def test_reconnect_never_uses_a_shared_connection() -> None:
    connection = connection_of()
    assert "ControlPath=none" not in connection.ssh_argv()
    connection._has_attached = True
    assert "ControlPath=none" in connection.ssh_argv()


def test_reconnects_back_off() -> None:
    connection, pauses = connection_of(10.0), list[float]()
    connection._wakeup = SimpleNamespace(wait=pauses.append, clear=lambda: None)  # type: ignore[assignment]
    connection._back_off()
    connection._back_off()
    assert pauses == [0.5, 1.0]
    connection.last_heard -= 100  # only in a detached run: others are lost by then
    for _ in range(8):
        connection._back_off()
    assert pauses[2:] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_unreachable_slot_is_gone_when_its_lease_has_expired(tmp_path: Path) -> None:
    """It counts from the last sign of life that carried the time of the host, not from the last output."""
    connection, channel = connection_of(10.0), channel_of(tmp_path, has_started=True)
    connection._is_attached = True
    assert connection.poll(channel) == Running()
    connection._handle_disconnect("broken")
    now = time.monotonic()
    connection.last_heard, connection._last_renewal = now - 5, now - 8
    state = connection.poll(channel)
    assert isinstance(state, Unreachable)
    assert (state.since, state.gone_by, state.is_lost) == (now - 5, now - 8 + 10.0 + 3.0 + GONE_MARGIN_S, False)
    assert "broken" in state.reason
    connection.last_heard = now - 11
    state = connection.poll(channel)
    assert isinstance(state, Unreachable)
    assert state.is_lost
    assert "10 s" in state.reason


def test_detached_slot_is_lost_only_if_another_host_responds(tmp_path: Path) -> None:
    """If none does, it may be this machine that is disconnected."""
    first, second = (connection_of(5.0, host, is_detached=True) for host in ("node1", "node2"))
    connect_peers([first, second])
    channel = channel_of(tmp_path, has_started=True)
    first.last_heard = second.last_heard = time.monotonic() - 60
    state = first.poll(channel)
    assert isinstance(state, Unreachable)
    assert (state.gone_by, state.is_lost) == (None, False)
    second.last_heard = time.monotonic()
    state = first.poll(channel)
    assert isinstance(state, Unreachable)
    assert state.is_lost


def test_slot_whose_host_was_never_reached_has_exited(tmp_path: Path) -> None:
    """It cannot be running: its start was never requested."""
    connection, channel = connection_of(5.0), channel_of(tmp_path)
    connection._handle_disconnect("connection refused")
    assert connection.poll(channel) == Running()
    channel.created_at = connection.last_heard = time.monotonic() - 6
    assert connection.poll(channel) == Exited(255, "node1: connection refused", is_lost=True)


def without_thread(connection: HostConnection) -> HostConnection:
    """The connection, which does not connect by itself."""
    connection._thread = threading.Thread(target=lambda: None)
    connection._thread.start()
    return connection


def test_restarted_slot_replaces_the_lost_one(tmp_path: Path) -> None:
    """The host reports the end of the earlier start when it comes back."""
    connection = without_thread(connection_of(5.0))
    lost, restarted = channel_of(tmp_path, has_started=True), channel_of(tmp_path)
    connection.add(lost)
    connection.add(restarted)
    request = connection._attach_request()
    assert (request["slots"], request["starting"]) == ({}, [])
    connection._is_stale = False  # connected again
    connection._handle_frame(STARTED, "worker-0.0", b"")
    connection._handle_frame(OUTPUT, "worker-0.0", b"once\n")
    assert restarted.has_started
    assert restarted.log.read_bytes() == b"once\n"
    connection._handle_frame(GONE, "worker-0.0", b"lease expired")
    assert (lost.exit, bool(restarted.exit)) == (None, True)


def test_connection_that_may_report_the_end_of_an_earlier_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was being established with the lost slot in its request when the slot was started again."""
    monkeypatch.setattr(host_connection, "agent_code", lambda: b"")
    connection, restarted = without_thread(connection_of()), channel_of(tmp_path)
    connection.add(channel_of(tmp_path, has_started=True))
    (requests_fd, stdin_fd), (stdout_fd, _) = os.pipe(), os.pipe()

    def restart() -> None:
        os.read(requests_fd, 1 << 16)
        connection.add(restarted)

    restarting = threading.Thread(target=restart)
    restarting.start()
    ssh: Any = SimpleNamespace(stdin_fd=stdin_fd, stdout_fd=stdout_fd)
    with pytest.raises(host_connection._Disconnected):
        connection._exchange(ssh)
    restarting.join()
    connection._handle_frame(GONE, "worker-0.0", b"lease expired")
    assert restarted.exit is None


def test_request_to_a_closed_connection_writes_to_no_file() -> None:
    """Others may have its file descriptors by then."""
    connection = connection_of()
    connection._is_attached = True
    connection.close()
    fds = os.pipe()
    os.set_blocking(fds[0], False)
    connection.send({"op": "exec_pending", "ids": []})
    with pytest.raises(BlockingIOError):
        os.read(fds[0], 1)
    assert not connection._outgoing.endswith(b"[]}\n")
    for fd in fds:
        os.close(fd)


def test_idle_connections_close_at_the_same_time(workspace: Path) -> None:
    """The daemon of each host may take a while to exit."""
    backend, closing = SshBackend(create_run(job_of("true"), plan_of("node1", "node2"))), threading.Barrier(2)
    for host in ("node1", "node2"):
        connection = backend._connections[host] = connection_of(host=host)

        def run(connection: HostConnection = connection) -> None:
            connection._wakeup.wait(30)
            closing.wait(5)

        connection._thread = threading.Thread(target=run)
        connection._thread.start()
    backend.close(0)
    assert not closing.broken
    assert backend._connections == {}


def test_host_that_reads_nothing_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the code of the agent does not fit into a pipe."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ssh_client, "agent_code", lambda _: bytes(1 << 20))
    with Session(SshClient(), "node1", "python3") as session, pytest.raises(UnavailableError, match="no response"):
        session.request({"op": "probe"}, timeout_s=0.5)


def plan_of(*hosts: str) -> SshPlan:
    """A plan with one worker on each host."""
    return SshPlan(
        slots={f"worker/{index}": Command(("true",), {"MASTER_PORT": "29500"}) for index in range(len(hosts))},
        hosts={f"worker/{index}": host for index, host in enumerate(hosts)},
        host_configs=dict.fromkeys(hosts, HostConfig(workdir="/there", python="python3", copies=False)),
        client=SshClient(),
        source=".",
        port=29500,
    )


@pytest.fixture
def backend(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> SshBackend:
    """The backend of two workers on two hosts, whose connections do not connect by themselves."""
    monkeypatch.setattr(HostConnection, "_run", lambda _: None)
    backend = SshBackend(create_run(job_of("true"), plan_of("node1", "node2")))
    backend.start_slots(1)
    return backend


def started(backend: SshBackend) -> list[str]:
    """The slots whose start was requested."""
    requests = [line for host in backend._connections.values() for line in host._outgoing.splitlines()]
    return [request["name"] for request in map(json.loads, requests) if request["op"] == "start"]


def test_no_slot_starts_before_all_hosts_have_stopped_the_earlier_attempt(backend: SshBackend) -> None:
    first, second = backend._connections.values()
    for connection in (first, second):
        connection._handle_frame(ATTACHED, "", b"1.0")
    first._handle_frame(READY, "", b"")
    assert started(backend) == []
    second._handle_disconnect("broken")  # what it reports afterwards is new
    second._handle_frame(ATTACHED, "", b"1.0")
    assert started(backend) == []
    second._handle_frame(READY, "", b"")
    assert started(backend) == ["worker/0", "worker/1"]
    second._handle_frame(READY, "", b"")
    assert started(backend) == ["worker/0", "worker/1"]


def test_exit_of_a_slot_notifies_the_supervisor(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostConnection, "_run", lambda _: None)
    states = list[Any]()
    backend = SshBackend(create_run(job_of("true"), plan_of("node1")), lambda: states.append(slot.poll()))
    (slot,) = backend.start_slots(0).values()
    slot.connection._handle_frame(ATTACHED, "", b"1.0")
    slot.connection._handle_frame(READY, "", b"")
    record = json.dumps({"code": 0, "oom": False, "survivors": []})
    slot.connection._handle_frame(EXIT, slot.channel.slot_id, record.encode())
    assert states[-1] == Exited(0)


def test_slots_do_not_wait_for_a_host_whose_lease_has_expired(backend: SshBackend) -> None:
    """An elastic job starts without it: nothing of an earlier attempt can be running there."""
    first, second = backend._connections.values()
    first._handle_frame(ATTACHED, "", b"1.0")
    first._handle_frame(READY, "", b"")
    second._handle_disconnect("connection refused")
    slots, lost = backend._slots.values(), Exited(255, "node2: connection refused", is_lost=True)
    second._channels[0].created_at = second.last_heard = time.monotonic() - 31
    assert [slot.poll() for slot in slots] == [Running(), lost]
    assert started(backend) == []
    second._last_renewal = time.monotonic() - 30 - second.target.grace_s - GONE_MARGIN_S
    assert [slot.poll() for slot in slots] == [Running(), lost]
    assert started(backend) == ["worker/0"]


def test_slot_is_lost_if_a_host_does_not_become_ready(backend: SshBackend) -> None:
    for connection in backend._connections.values():
        connection._handle_frame(ATTACHED, "", b"1.0")
    slot, _ = backend._slots.values()
    slot.channel.created_at -= READY_TIMEOUT_S + 30 + connection.target.grace_s + 1
    state = slot.poll()
    assert isinstance(state, Exited)
    assert state.is_lost
    assert "node2" in state.reason
    assert slot.poll() == state


def test_each_attempt_has_its_own_rendezvous_port(workspace: Path) -> None:
    backend = SshBackend(create_run(job_of("true"), plan_of("node1")))
    backend._connections = {"node1": connection_of()}
    ports = []
    for backend._attempt in range(4):
        ports.append(int(backend._make_slot("worker/0").channel.request["env"]["MASTER_PORT"]))
    assert ports[0] == 29500
    assert all(port in RETRY_PORTS for port in ports[1:])
    assert len(set(ports)) == 4


# --- Commands of slots


class FakeConnection:
    """A connection that remembers what was sent."""

    def __init__(self, host: str) -> None:
        self.target = SimpleNamespace(host=host, grace_s=3.0)
        self.sent: list[dict[str, Any]] = []

    def send(self, request: dict[str, Any]) -> None:
        self.sent.append(request)

    def take(self) -> list[tuple[str, Any]]:
        """What was sent since the last call: the kind of each request, and its id or ids."""
        taken = [(request["op"], request.get("id", request.get("ids"))) for request in self.sent]
        self.sent.clear()
        return taken


def routed() -> tuple[Any, Any, ExecRouter]:
    """The connections to the host of a caller and to that of worker/1, and the router between them."""
    caller, standby = FakeConnection("a"), FakeConnection("b")
    target = StandbyTarget(standby, "worker-1.0", {})  # type: ignore[arg-type]
    return caller, standby, ExecRouter({"worker/1": target}, {"a"})


def call(exec_id: str, slot: str = "worker/1") -> dict[str, Any]:
    return {"id": exec_id, "slot": slot, "command": "true", "cwd": "/"}


def test_commands_cancelled_while_disconnected() -> None:
    caller, standby, router = routed()
    for name in ("x", "y"):
        router.handle(caller, EXEC, call(name))
    assert standby.take() == [("exec", "x"), ("exec", "y")]
    router.handle(caller, EXEC, {"pending": ["y"]})  # after a reconnect
    assert standby.take() == [("exec_cancel", "x"), ("exec_pending", ["y", "y"])]


def test_commands_that_are_over_are_not_pending() -> None:
    """Otherwise a host that reconnects would keep them running."""
    caller, standby, router = routed()
    router.handle(caller, EXEC, {"pending": ["x", "y", "z"]})
    for name in ("x", "y", "z"):
        router.handle(caller, EXEC, call(name))
    router.handle(caller, EXEC, {"id": "x", "is_cancelled": True})
    router.handle(standby, EXEC_EXIT, {"id": "y", "code": 0})
    standby.take()
    router.resend(standby)
    assert standby.take() == [("exec_pending", ["z", "z"]), ("exec", "z")]


def test_commands_survive_new_connections_and_supervisors() -> None:
    """What a host missed is sent again; the daemon ignores what it knows."""
    caller, standby, router = routed()
    router.handle(caller, EXEC, {"pending": []})
    router.handle(caller, EXEC, call("x"))
    standby.take()
    router.resend(standby)
    assert standby.take() == [("exec_pending", ["x"]), ("exec", "x")]
    router.handle(standby, EXEC_EXIT, {"id": "x", "code": 3})
    assert caller.take() == [("exec_exit", "x")]
    router.handle(caller, EXEC, call("x"))  # the caller's host has missed the exit code
    assert (caller.take(), standby.take()) == ([("exec_exit", "x")], [])
    caller, standby, router = routed()  # of another supervisor
    router.handle(standby, EXEC_EXIT, {"id": "x", "code": 3})
    router.handle(caller, EXEC, call("x"))
    assert (caller.take(), standby.take()) == ([("exec_exit", "x")], [])


def test_command_for_no_standby_slot_is_bad_input() -> None:
    caller, standby, router = routed()
    router.handle(caller, EXEC, call("x", "node2"))
    assert caller.sent == [{"op": "exec_exit", "id": "x", "code": 2}]
    assert standby.sent == []

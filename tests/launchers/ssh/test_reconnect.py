"""Reconnecting in rare cases: silent hosts, full disks here, commands of slots, and detached runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from stoker.core.spec import to_json
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import create_run, find_run
from stoker.jobs.status import JobState, JobStatus, SlotStatus
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh import host_connection
from stoker.launchers.ssh.client import SshClient
from stoker.launchers.ssh.exec_router import ExecRouter, StandbyTarget
from stoker.launchers.ssh.host_connection import GONE_MARGIN_S, HostConnection, HostTarget, SlotChannel, connect_peers
from stoker.launchers.ssh.plan import RETRY_PORTS, HostConfig, SshPlan
from stoker.launchers.ssh.slots import SshBackend
from stoker.launchers.supervise.slot_handle import Exited, Running, Unreachable
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.remote.frames import EXEC, EXEC_EXIT
from tests.launchers.contract import DEAF, is_ready, job_of
from tests.support.disks import small_disk
from tests.support.hosts import Network
from tests.support.ssh_runs import (
    COUNT_UNTIL,
    count_lines,
    machine,
    remote_processes,
    ssh_section,
    write_ssh_job,
)
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


# --- Connections, without ssh


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


def test_each_attempt_has_its_own_rendezvous_port(workspace: Path) -> None:
    plan = SshPlan(
        slots={"worker/0": Command(("true",), {"MASTER_PORT": "29500"})},
        hosts={"worker/0": "node1"},
        host_configs={"node1": HostConfig(workdir="/there", python="python3", copies=False)},
        client=SshClient(),
        source=".",
        port=29500,
    )
    backend = SshBackend(create_run(job_of("true"), plan))
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


# --- The disk of this machine


def test_output_waits_on_the_host_while_the_disk_here_is_full(
    net: Network, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = 20000
    with small_disk(workspace / "small", 1 << 20) as home:
        monkeypatch.setenv("STOKER_HOME", str(home))
        script = f"while ! test -e {workspace}/go; do sleep 0.05; done; seq {lines}; touch {workspace}/written"
        job = write_ssh_job(net, workspace, f"echo ready; {script}", lost_after=30)
        assert stoker("job", "run", job, "--on", "ssh", "--detach") == 0
        run = find_run(None)
        wait_until(lambda: is_ready(run))
        with open(home / "filler", "wb", buffering=0) as filler, suppress(OSError):
            while True:  # until no space is left
                filler.write(bytes(4096))
        (workspace / "go").touch()
        wait_until((workspace / "written").exists)
        time.sleep(2)  # several connections break over this
        (home / "filler").unlink()
        wait_until(lambda: run.read_status().state.is_final)
        assert run.read_status().state is JobState.SUCCEEDED
        output = run.log_path(Slot("worker", 0), 0).read_text().splitlines()
    assert output == ["ready", *map(str, range(1, lines + 1))]


# --- Detached runs


def test_unprepared_run_is_not_reattached(net: Network, workspace: Path) -> None:
    job = write_ssh_job(net, workspace, "echo ran")
    content = json.loads(job.read_text())
    content["ssh"]["setup"] = "echo begun > begun; exec sleep 4321"
    job.write_text(json.dumps(content))
    with machine() as launching:
        launching.start("job", "run", job, "--on", "ssh", "--detach")
        wait_until((workspace / "there" / "begun").exists, 60)
    run = find_run(None)
    wait_until(lambda: supervisor_pid(run) is None)
    os.utime(run.folder, (0, 0))  # no longer young
    assert LAUNCHERS.get("ssh")().status(run.handle).state is JobState.LOST
    assert stoker("job", "stop") == 0
    assert remote_processes(run) == []
    assert not list(run.logs.iterdir())


def test_run_of_the_first_version_can_be_stopped(net: Network, workspace: Path) -> None:
    """Its slots have a daemon each, and no supervisor of ours could take over: they are found by their tags."""
    launcher = LAUNCHERS.get("ssh")()
    job = job_of(DEAF, ssh=ssh_section(net, workspace / "there", "node2"), grace=1)
    run = create_run(job, launcher.render(job))
    run.write("handle", f"ssh://{run.folder}\n".encode())
    run.write("prepared", b"")
    run.write("processes.json", to_json(LocalPlan(slots={}, hosts={"worker/0": "node2"}, detached=True)))
    slots = (SlotStatus(slot="worker/0", state=JobState.RUNNING),)
    run.write_status(JobStatus(state=JobState.RUNNING, slots=slots, began=1.0))
    os.utime(run.folder, (0, 0))  # no longer young
    daemon = f"import time; time.sleep(999); 'stoker-agent-{run.id}'"
    tagged = f"STOKER_RUN={run.id} STOKER_HOST=node2 STOKER_SLOT=worker/0"
    script = f"mkdir -p {workspace}/there/.stoker/{run.id}/worker-0.0; cd /; "
    script += f'setsid {sys.executable} -c "{daemon}" stoker-agent-{run.id} < /dev/null > /dev/null 2>&1 & '
    script += f"{tagged} setsid bash -c {shlex.quote(DEAF)} > /dev/null 2>&1 < /dev/null & sleep 1"
    subprocess.run(["ssh", "-F", str(net.config), "node2", script], check=True)
    wait_until(lambda: len(remote_processes(run)) >= 4)
    assert launcher.status(run.handle).state is JobState.LOST
    assert stoker("job", "stop", run.id) == 0
    assert remote_processes(run) == []
    assert not (workspace / "there" / ".stoker").exists()
    assert run.read_status().state is JobState.STOPPED


def test_logs_reattach_a_detached_run(net: Network, workspace: Path) -> None:
    go = workspace / "go"
    with machine() as first:
        job = write_ssh_job(net, workspace, COUNT_UNTIL.format(go=go))
        assert first.run("job", "run", job, "--on", "ssh", "-d").returncode == 0
        run = find_run(None)
        wait_until(lambda: is_ready(run), 60)
    wait_until(lambda: supervisor_pid(run) is None)
    go.touch()
    with machine() as second:
        lines = second.run("job", "logs", "-f").stdout.splitlines()
    assert lines == count_lines(lines)
    assert run.read_status().state is JobState.SUCCEEDED


def test_stop_cleans_up_a_lost_slot_of_a_failed_detached_run(
    net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lost slot keeps running after the run has failed, although the other host responds all the time."""
    launcher = LAUNCHERS.get("ssh")()
    section = ssh_section(net, workspace / "there", lost_after=5)
    job = job_of(program={"module": "this"}, topology="torchrun", workers=2, ssh=section, grace=2)
    rendered = launcher.render(job)
    scripts = ("trap 'exit 143' TERM; echo ready; while :; do echo busy; sleep 0.2; done", DEAF)
    commands = zip(rendered.slots.items(), scripts, strict=True)
    slots = {name: replace(command, argv=("bash", "-c", script)) for (name, command), script in commands}
    rendered = msgspec.structs.replace(rendered, slots=slots)
    run = create_run(job, rendered)
    launcher.start(rendered, run, detach=True)
    wait_until(
        lambda: all("ready" in log.read_text() for log in run.logs.glob("*.log")) and len(remote_processes(run)) >= 7,
        60,
    )
    net["node2"].disconnect()
    try:
        wait_until(lambda: run.read_status().state.is_final, 60)
    finally:
        net["node2"].reconnect()
    message = run.read_status().message
    assert all(word in message for word in ("node2", "5 s", f"stoker job stop {run.id}")), message
    assert remote_processes(run)
    assert stoker("job", "delete", run.id) == 2
    capsys.readouterr()
    assert stoker("job", "stop") == 0
    err = capsys.readouterr().err
    assert run.id in err
    assert "failed" in err
    wait_until(lambda: not remote_processes(run))
    assert stoker("job", "delete", run.id) == 0

"""Reattaching and reconnecting in rare cases: supervisors, remote slots, exec requests, slot daemons, detached runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import pytest

from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import RunFolder, create_run, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Command
from stoker.launchers.ssh import remote_slot
from stoker.launchers.ssh.client import FrameParser, SshClient
from stoker.launchers.ssh.plan import RETRY_PORTS, HostConfig, SshPlan, records_folder
from stoker.launchers.ssh.remote_exec import ExecForwarder, RequestFolder
from stoker.launchers.ssh.slot_log import REATTACH_ENV
from stoker.launchers.ssh.slot_task import SlotTask
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.remote import slot_daemon
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


# --- The local process of a remote slot


def remote_slot_of(workspace: Path, lost_after: float = 30.0, attempt: int = 0, **keys: Any) -> remote_slot.RemoteSlot:
    """The only remote slot of a new run, not connected."""
    port = 29500
    plan = SshPlan(
        slots={"worker/0": Command(("true",), {"MASTER_PORT": str(port)})},
        hosts={"worker/0": "node1"},
        host_configs={"node1": HostConfig(workdir=str(workspace / "there"), python="python3", copies=False)},
        client=SshClient(lost_after_s=lost_after),
        source=".",
        port=port,
        **keys,
    )
    run = create_run(job_of("true"), plan)
    os.environ["STOKER_ATTEMPT"] = str(attempt)
    try:
        return remote_slot.RemoteSlot(SlotTask(run, "worker/0", plan))
    finally:
        del os.environ["STOKER_ATTEMPT"]


def test_silent_host_times_out(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_slot, "RESPONSE_TIMEOUT_S", 0.3)
    slot = remote_slot_of(workspace)
    (_, stdin_fd), (stdout_fd, _) = os.pipe(), os.pipe()
    monkeypatch.setattr(remote_slot, "agent_code", lambda: b"")
    with pytest.raises(remote_slot._Disconnected, match="no response"):
        slot._stream(stdin_fd, stdout_fd)


@pytest.mark.parametrize("lost_after", [5, 30, 600])
def test_silent_connection_is_replaced_before_the_host_is_lost(lost_after: int, workspace: Path) -> None:
    assert remote_slot_of(workspace, lost_after)._silence_limit_s <= lost_after - 1


def test_reconnect_never_uses_a_shared_connection(workspace: Path) -> None:
    slot = remote_slot_of(workspace)
    assert "ControlPath=none" not in slot._ssh_argv()
    slot._has_started = True
    assert "ControlPath=none" in slot._ssh_argv()


def test_each_attempt_has_its_own_rendezvous_port(workspace: Path) -> None:
    slots = [remote_slot_of(workspace, attempt=number) for number in range(4)]
    first, *others = (int(slot._task.command.env["MASTER_PORT"]) for slot in slots)
    assert first == 29500
    assert all(port in RETRY_PORTS for port in others)
    assert len({*others}) == 3


def test_reconnects_back_off(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote_slot, "wait_until", lambda _, pause_s: pauses.append(pause_s))
    slot = remote_slot_of(workspace, 10.0)
    slot._back_off()
    slot._back_off()
    assert pauses == [0.5, 1.0]
    slot._contact.last_response -= 100  # only in a detached run: others are lost by then
    for _ in range(8):
        slot._back_off()
    assert pauses[2:] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_contact_with_a_host_is_shared_by_a_file(workspace: Path) -> None:
    slot = remote_slot_of(workspace)
    slot._contact._is_shared = True
    slot._contact.update()
    assert (records_folder(slot._task.run) / "heard@node1").exists()


def test_notices_start_a_line_and_records_survive_kills(workspace: Path) -> None:
    """Also if an earlier process wrote half a line; the record is saved before the notice is written."""
    code = (
        "import sys; from pathlib import Path; from stoker.launchers.ssh.slot_log import SlotLog\n"
        "log = SlotLog(Path(sys.argv[1]), 'node1'); log.add_notice('notice'); log.write_output(b' a line\\n')"
    )
    record, log = workspace / "record.json", workspace / "log"
    record.write_text(json.dumps({"key": "k", "log": 100, "offset": 7}))
    log.write_text("half")
    env = {**os.environ, REATTACH_ENV: "1"}
    for _ in range(2):
        with open(log, "ab") as output:
            subprocess.run([sys.executable, "-c", code, str(record)], stdout=output, env=env, check=True)
    assert log.read_text() == "half a line\n--- node1: notice\n--- node1: notice\n a line\n"
    assert json.loads(record.read_text())["offset"] == 7 + len(" a line\n")


# --- Exec requests


def test_requests_cancelled_while_disconnected(workspace: Path) -> None:
    requests = RequestFolder(RunFolder(workspace), 0)
    forwarder = ExecForwarder(requests, ["worker/1"])
    for name in ("a", "b"):
        forwarder.handle({"id": name, "slot": "worker/1", "command": "true"})
    ExecForwarder(requests, ["worker/1"]).handle({"pending": ["b"]})  # another process, which never saw `a`
    assert {name: requests.is_cancelled("worker/1", name) for name in ("a", "b")} == {"a": True, "b": False}


def test_half_written_request_is_not_pending(workspace: Path) -> None:
    requests = RequestFolder(RunFolder(workspace), 0)
    ExecForwarder(requests, ["worker/1"]).handle({"id": "a", "slot": "worker/1", "command": "true"})
    (requests.slot_folder("worker/1") / ".b.json").touch()
    assert requests.list_pending("worker/1") == ["a"]


def test_request_cancelled_before_it_is_read(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "slot/exec").mkdir(parents=True)
    (workspace / "slot/exec/a.json").write_text("{}")
    sent: list[Any] = []
    frames: Any = SimpleNamespace(send_json=lambda _, data: sent.append(data))
    request = {"folder": str(workspace / "slot"), "offset": 0, "rsh_agent": "x"}
    session = slot_daemon.AttachSession(request, frames)
    monkeypatch.setattr(slot_daemon, "read_text", lambda _: "")
    session._send_exec_requests()
    assert sent == [{"pending": ["a"]}]


# --- The slot daemon, without ssh


class Attached:
    """The client's end of an attach session on this machine."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout, self._frames = stdin, stdout, FrameParser()
        self.output = b""
        self._payloads: dict[bytes, bytes] = {}

    def send(self, **request: Any) -> None:
        self._stdin.write(json.dumps(request).encode() + b"\n")
        self._stdin.flush()

    def wait_for(self, wanted: bytes) -> bytes:
        """Wait for a frame of a kind; return its payload."""
        while wanted not in self._payloads:
            data = os.read(self._stdout.fileno(), 1 << 16)
            assert data, "the attach session has exited"
            for kind, payload in self._frames.feed(data):
                self._payloads[kind] = payload
                self.output += payload if kind == slot_daemon.OUTPUT else b""
        return self._payloads[wanted]


@contextmanager
def attached(folder: Path, script: str, *, lease_check_s: float = slot_daemon.LEASE_CHECK_S) -> Iterator[Attached]:
    """Run a script as a slot of this machine."""
    code = (
        "from stoker.remote import host_probe, slot_daemon\n"
        f"slot_daemon.LEASE_CHECK_S = {lease_check_s}; host_probe.main()"
    )
    argv = [sys.executable, "-c", code, f"stoker-agent-{folder}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        client = Attached(process.stdin, process.stdout)
        client.send(
            op="attach",
            folder=str(folder / "run/worker-0.0"),
            key="k",
            can_start=True,
            clear_previous=True,
            offset=0,
            argv=["bash", "-c", script],
            env={},
            cwd="/",
            tags={"STOKER_RUN": str(folder), "STOKER_SLOT": "worker/0"},
            rsh_agent="",
            grace_s=5,
            lost_after_s=30,
        )
        try:
            yield client
        finally:
            process.kill()


def test_slot_stops_on_a_full_disk(tmp_path: Path) -> None:
    """The stop request and the exit record both get through."""
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        script = f"trap 'exit 7' TERM; dd if=/dev/zero of={folder}/all bs=4096 2>/dev/null; echo full >&2\n"
        with attached(folder, script + f"touch {tmp_path}/ready; while :; do sleep 0.05; done") as client:
            wait_until(lambda: (tmp_path / "ready").exists())
            client.send(op="stop", level=1)
            assert json.loads(client.wait_for(slot_daemon.EXIT))["code"] == 7
            client.send(op="acknowledge")
        wait_until(lambda: not (folder / "run").exists())


def test_terminated_daemon_gives_the_slot_its_grace_period(tmp_path: Path) -> None:
    """As when its host is shut down."""
    script = f"trap 'sleep 1; touch {tmp_path}/saved; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    with attached(tmp_path, script) as client:
        client.wait_for(slot_daemon.OUTPUT)
        os.kill(int((tmp_path / "run/worker-0.0/pid").read_text()), signal.SIGTERM)
        assert json.loads(client.wait_for(slot_daemon.EXIT))["code"] == 7
        assert (tmp_path / "saved").exists()
        client.send(op="acknowledge")


def test_exit_wakes_up_the_daemon(tmp_path: Path) -> None:
    """It does not wait for the next check of the lease."""
    script = f"echo a; while ! test -e {tmp_path}/go; do sleep 0.01; done; echo b; exit 3"
    with attached(tmp_path, script, lease_check_s=1000) as client:
        client.wait_for(slot_daemon.OUTPUT)
        (tmp_path / "go").touch()
        assert json.loads(client.wait_for(slot_daemon.EXIT)) == {"code": 3, "oom": False, "survivors": []}
        assert client.output == b"a\nb\n"
        client.send(op="acknowledge")
        wait_until(lambda: not (tmp_path / "run").exists())


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

"""Guarantees of ssh runs: exact logs, slots that do not delay each other, full disks, unreachable hosts, no overlap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UnavailableError
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.supervisor import supervisor_pid
from tests.launchers.contract import DEAF, is_ready, launched
from tests.launchers.test_local import start_cli
from tests.support.attempts import OVERLAP, with_attempt_lock
from tests.support.hosts import Network
from tests.support.outputs import write_program
from tests.support.ssh_runs import (
    Machine,
    attach_sessions,
    find_by_command,
    guards,
    kill_all,
    machine,
    remote_processes,
    slot_daemons,
    slot_processes,
    supervisors,
    write_ssh_job,
)
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.timeout(180)


def start_workers(
    launching: Machine, net: Network, workspace: Path, scripts: list[str], *hosts: str, **keys: Any
) -> RunFolder:
    """Start a job whose workers run one shell script each, attached, on a machine with its own process table.

    In the process table of the tests, the supervisor would find and stop the processes of the hosts by itself.
    """
    for index, script in enumerate(scripts):
        (workspace / f"{index}.sh").write_text(script)
    topology = {"topology": "tf-mirrored", "workers": len(scripts)} if len(scripts) > 1 else {}
    job = write_ssh_job(net, workspace, f"exec bash {workspace}/$STOKER_INDEX.sh", *hosts, **topology, **keys)
    launching.start("job", "run", job, "--on", "ssh")
    wait_until(lambda: any(workspace.glob("stoker/runs/*/handle")))
    return find_run(None)


def read_log(run: RunFolder, worker: int = 0, attempt: int = 0) -> str:
    log = run.log_path(Slot("worker", worker), attempt)
    return log.read_text() if log.exists() else ""


# --- Logs


@pytest.mark.slow  # three reconnects
def test_log_has_the_bytes_that_the_slot_wrote(net: Network, workspace: Path) -> None:
    """Binary output with unfinished lines, over connections that break in the middle of it."""
    (workspace / "work" / "write.py").write_text(write_program(workspace / "copy"))
    job = write_ssh_job(net, workspace, f"exec {sys.executable} write.py", lost_after=30)
    with launched(job, "ssh") as (run, process):
        log = run.log_path(Slot("worker", 0), 0)
        for _ in range(3):
            size = log.stat().st_size if log.exists() else 0
            wait_until(lambda size=size: log.exists() and log.stat().st_size > size + 100_000)
            sessions = attach_sessions(run)
            net["node2"].kill_sessions()
            wait_until(lambda sessions=sessions: set(attach_sessions(run)) - set(sessions))
        (workspace / "go").touch()
        assert process.wait(60) == 0, (workspace / "output").read_text()
    assert log.read_bytes() == (workspace / "copy").read_bytes()


FLOOD_BYTES = 256 << 20


def test_flood_of_one_slot_does_not_delay_another(net: Network, workspace: Path) -> None:
    """Output and stop of a slot on the same host overtake the output that another slot has written before."""
    flood = f"head -c {FLOOD_BYTES} /dev/zero; touch {workspace}/flooded; while :; do sleep 0.1; done"
    quiet = f"trap 'touch {workspace}/saved; exit 143' TERM; echo ready\n"
    quiet += f"while ! test -e {workspace}/flooded; do sleep 0.05; done; echo after; while :; do sleep 0.05; done"
    with machine() as launching:
        run = start_workers(launching, net, workspace, [flood, quiet], "node2:2", grace="60s", lost_after=60)
        log = run.log_path(Slot("worker", 0), 0)
        wait_until(lambda: "after" in read_log(run, 1))
        assert log.stat().st_size < FLOOD_BYTES
        for pid in supervisors(run):
            os.kill(pid, signal.SIGTERM)
        wait_until((workspace / "saved").exists)
        assert log.stat().st_size < FLOOD_BYTES
        wait_until(lambda: run.read_status().state.is_final)
    assert run.read_status().state is JobState.STOPPED
    assert log.stat().st_size == FLOOD_BYTES
    log.unlink()


# --- The disk


@contextmanager
def small_disk_of(net: Network, host: str, folder: Path, size: int) -> Iterator[None]:
    """Mount a small file system on a host only: each host of the tests has its own mounts."""
    ssh = ["ssh", "-F", str(net.config), host]
    subprocess.run([*ssh, f"mkdir -p {folder} && mount -t tmpfs -o size={size} none {folder}"], check=True)
    try:
        yield
    finally:
        subprocess.run([*ssh, f"umount -l {folder}"], check=True)


@pytest.mark.parametrize("end", ["exit", "stop"])
def test_full_disk_of_a_host_yields_the_exit_code(end: str, net: Network, workspace: Path) -> None:
    there = workspace / "there"
    script = f"trap 'exit 7' TERM; echo ready; dd if=/dev/zero of={there}/all bs=4096 2>/dev/null\n"
    script += f"touch {workspace}/full; " + ("exit 7" if end == "exit" else "while :; do sleep 0.05; done")
    with small_disk_of(net, "node2", there, 1 << 20), machine() as launching:
        run = start_workers(launching, net, workspace, [script])
        wait_until((workspace / "full").exists)
        if end == "stop":
            assert launching.run("job", "stop").returncode == 0
        wait_until(lambda: run.read_status().state.is_final)
        status = run.read_status()
        assert status.state is (JobState.STOPPED if end == "stop" else JobState.FAILED), status.message
        assert [slot.code for slot in status.slots] == [7]
        assert remote_processes(run) == []


# --- Processes


def test_one_connection_and_one_daemon_serve_all_slots_of_a_host(net: Network, workspace: Path) -> None:
    scripts = ["trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done"] * 4
    with machine() as launching:
        run = start_workers(launching, net, workspace, scripts, "node1", "node2:3")
        wait_until(lambda: all("ready" in read_log(run, worker) for worker in range(4)))
        assert len(supervisors(run)) == 1
        assert len(find_by_command(f"stoker-agent-{run.id}", "ssh")) == 2
        assert [len(find(run)) for find in (attach_sessions, slot_daemons, guards)] == [2, 2, 2]
        assert launching.run("job", "stop").returncode == 0
    assert remote_processes(run) == []


def test_leftovers_of_a_slot_are_stopped(net: Network, workspace: Path) -> None:
    script = (
        f"(sleep 1000 &); {DEAF.partition('echo ready')[0]} while ! test -e {workspace}/go; do sleep 0.05; done; exit 7"
    )
    with machine() as launching:
        run = start_workers(launching, net, workspace, [script])
        wait_until(lambda: len(slot_processes(run)) >= 4)
        (workspace / "go").touch()
        wait_until(lambda: run.read_status().state.is_final)
    assert [slot.code for slot in run.read_status().slots] == [7]
    assert remote_processes(run) == []


def test_kill_of_everything_at_once_leaves_no_process(net: Network, workspace: Path) -> None:
    check_nothing_is_left_after_kill(net, workspace)


@pytest.mark.slow  # waits for processes that do not exit
@pytest.mark.xfail(strict=True, reason="nothing watches a slot daemon and its guard if both are killed at once")
def test_kill_of_everything_and_the_guard_leaves_no_process(net: Network, workspace: Path) -> None:
    check_nothing_is_left_after_kill(net, workspace, include_guard=True)


def check_nothing_is_left_after_kill(net: Network, workspace: Path, *, include_guard: bool = False) -> None:
    """Start a slot that ignores SIGTERM, kill everything that could stop it, and check that it stops nevertheless."""
    with machine() as launching:
        run = start_workers(launching, net, workspace, [DEAF])
        wait_until(lambda: is_ready(run) and len(slot_processes(run)) >= 3)
        try:
            kill_everything(run, net, *(guards(run) if include_guard else ()))
            assert eventually(lambda: not remote_processes(run), 20)
        finally:
            assert launching.run("job", "stop").returncode == 0
            assert remote_processes(run) == []


def kill_everything(run: RunFolder, net: Network, *more: int) -> None:
    """Kill the supervisor, ssh, sshd's sessions, attach sessions, slot daemons, and more processes."""
    daemons, attached, local = slot_daemons(run), attach_sessions(run), supervisors(run)
    ssh = find_by_command(f"stoker-agent-{run.id}", "ssh")
    assert daemons
    assert local
    for pid in {*local, *ssh, *net["node2"].sessions(), *attached, *daemons, *more}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has exited with another one
            continue


# --- Attempts


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slot daemon killed", "cable cut", "supervisor killed"])
def test_attempt_starts_after_all_processes_of_the_last_are_gone(fault: str, net: Network, workspace: Path) -> None:
    script = f"if test $STOKER_ATTEMPT = 1; then echo over; exit 0; fi; trap '' TERM; {DEAF}"
    with machine() as launching:
        run = start_workers(launching, net, workspace, [with_attempt_lock(workspace, script)], retries=1, grace="10s")
        wait_until(lambda: is_ready(run) and len(slot_processes(run)) >= 3)
        if fault == "slot daemon killed":
            kill_all(*slot_daemons(run))
        elif fault == "supervisor killed":
            kill_all(*supervisors(run))
            wait_until(lambda: supervisor_pid(run) is None)
            done = launching.run("job", "run", "--resume", run.id)
            assert done.returncode == 0, done.stderr
        else:
            net["node2"].disconnect()
            try:
                wait_until(lambda: bool(run.read_status().attempts))
            finally:
                net["node2"].reconnect()
        wait_until(lambda: run.read_status().state.is_final)
    assert run.read_status().state is JobState.SUCCEEDED, run.read_status().message
    assert "over" in read_log(run, 0, 1)
    assert OVERLAP not in read_log(run, 0, 1)
    assert remote_processes(run) == []


@pytest.mark.slow
def test_attempt_does_not_start_while_an_unreachable_host_runs_the_last(net: Network, workspace: Path) -> None:
    """The other host responds, and starts the next attempt."""
    first = with_attempt_lock(workspace, "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done")
    second = with_attempt_lock(workspace, f"trap '' TERM; {DEAF}")
    with machine() as launching:
        run = start_workers(launching, net, workspace, [first, second], "node1", "node2", grace="15s", retries=1)
        wait_until(lambda: all("ready" in read_log(run, worker) for worker in (0, 1)))
        net["node2"].disconnect()
        try:
            wait_until(lambda: "ready" in read_log(run, 0, 1) or run.read_status().state.is_final, 90)
        finally:
            net["node2"].reconnect()
            launching.run("job", "stop")
    assert "ready" in read_log(run, 0, 1)
    assert OVERLAP not in read_log(run, 0, 1)


@pytest.mark.slow
def test_no_host_starts_a_resumed_run_while_another_stops_the_last_attempt(net: Network, workspace: Path) -> None:
    """The first host has nothing left to stop; the second takes the whole grace period."""
    hosts, first = ("node1", "node2"), with_attempt_lock(workspace, "echo ready; sleep 600")
    second = f"if test $STOKER_ATTEMPT = 1; then exit 3; fi; trap '' TERM; {DEAF}"
    with machine() as launching:
        run = start_workers(
            launching, net, workspace, [first, with_attempt_lock(workspace, second)], *hosts, grace="6s"
        )
        wait_until(lambda: all("ready" in read_log(run, worker) for worker in (0, 1)))
        kill_all(*supervisors(run), *slot_processes(run, "node1"))
        wait_until(lambda: supervisor_pid(run) is None and not slot_processes(run, "node1"))
        launching.run("job", "run", "--resume", run.id)
    assert "ready" in read_log(run, 0, 1)
    assert OVERLAP not in read_log(run, 0, 1)


# --- Stop, and the terminal


@pytest.mark.slow  # waits for a host that cannot be reached
def test_stop_while_a_host_is_unreachable(net: Network, workspace: Path) -> None:
    """The other host is stopped with its grace period; the unreachable one stops by itself, and `stop` names it."""
    saves = f"trap 'touch {workspace}/saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    with machine() as launching:
        run = start_workers(launching, net, workspace, [saves, DEAF], "node1", "node2", lost_after=20)
        wait_until(lambda: all("ready" in read_log(run, worker) for worker in (0, 1)))
        net["node2"].disconnect()
        try:
            done = launching.run("job", "stop")
            assert done.returncode == UnavailableError.exit_code, done.stderr
            assert "node2" in done.stderr
            assert f"stoker job stop {run.id}" in done.stderr
            assert (workspace / "saved").exists()
            assert slot_processes(run, "node1") == []
            assert supervisor_pid(run) is None
            wait_until(lambda: not remote_processes(run))  # without a connection, by its lease
        finally:
            net["node2"].reconnect()
        assert launching.run("job", "stop").returncode == 0
    assert run.read_status().state is JobState.STOPPED


def test_closed_terminal_does_not_stop_the_job(net: Network, workspace: Path) -> None:
    script = f"echo ready; while ! test -e {workspace}/go; do sleep 0.05; done; echo done"
    job = write_ssh_job(net, workspace, script)
    process = start_cli("job", "run", job, "--on", "ssh", start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGHUP)  # as a terminal does when it closes
    process.communicate(timeout=60)
    (workspace / "go").touch()
    run = find_run("small")
    wait_until(lambda: run.read_status().state is JobState.SUCCEEDED)
    assert remote_processes(run) == []

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

import msgspec
import pytest

from stoker.core.spec import to_json
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import create_run, find_run
from stoker.jobs.status import JobState, JobStatus, SlotStatus
from stoker.jobs.topology import Slot
from stoker.launchers.plan import LocalPlan
from stoker.launchers.supervise.supervisor import supervisor_pid
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

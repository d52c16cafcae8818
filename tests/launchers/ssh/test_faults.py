"""Faults during ssh runs: killed processes, cut cables, lost hosts; slots survive or are cleaned up."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.core.processes import find_processes_by_env
from stoker.errors import UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import RunFolder, create_run, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ssh.host_connection import DISCONNECTED_REMARK, RECONNECTED_REMARK
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.remote.slot_daemon import DAEMON_GONE
from stoker.trainers.checkpoints import decode_checkpoint
from tests.launchers.contract import DEAF, is_ready, job_of, launched
from tests.launchers.test_local import ELASTIC, HANGING
from tests.support.hosts import Network
from tests.support.ssh_runs import (
    COUNT_UNTIL,
    attach_sessions,
    count_lines,
    find_by_command,
    guards,
    kill_all,
    machine,
    remote_processes,
    slot_daemons,
    slot_processes,
    ssh_section,
    supervisors,
    write_ssh_job,
)
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


def inject(fault: str, run: RunFolder, net: Network) -> None:
    match fault:
        case "supervisor killed":
            kill_all(*supervisors(run))
        case "guard killed":
            kill_all(*guards(run))
        case "ssh killed":
            kill_all(*find_by_command(f"stoker-agent-{run.id}", "ssh"))
        case "attach session killed":
            kill_all(*attach_sessions(run))
        case "slot daemon killed":
            kill_all(*slot_daemons(run))
        case "sshd session killed":
            net["node2"].kill_sessions()
        case "cable cut":
            net["node2"].disconnect()


# Words in the message of the run; a killed supervisor writes none.
FATAL_FAULTS = {
    "supervisor killed": (),
    "guard killed": ("worker/0 was lost: ", "node2", DAEMON_GONE),
    "slot daemon killed": ("worker/0 was lost: ", "node2", DAEMON_GONE),
    "cable cut": ("worker/0 was lost: ", "node2", "5 s"),
}
FAST_FAULTS = ("supervisor killed", "cable cut")
SLOW_FAULTS = [pytest.param(fault, marks=pytest.mark.slow) for fault in FATAL_FAULTS if fault not in FAST_FAULTS]


@pytest.mark.parametrize("fault", [*FAST_FAULTS, *SLOW_FAULTS])
def test_fatal_fault_leaves_nothing_on_the_host(fault: str, net: Network, workspace: Path) -> None:
    """The slot stops by itself, and the supervisor reports the fault."""
    with launched(write_ssh_job(net, workspace, DEAF), "ssh") as (run, process):
        wait_until(lambda: is_ready(run) and len(remote_processes(run)) >= 4, 60)
        try:
            inject(fault, run, net)
            wait_until(lambda: not remote_processes(run), 60)
        finally:
            net["node2"].reconnect()
        if FATAL_FAULTS[fault]:
            assert process.wait(60) == 4, (workspace / "output").read_text()
            message = run.read_status().message
            assert all(word in message for word in FATAL_FAULTS[fault]), message
    assert find_processes_by_env({"STOKER_RUN": run.id}) == []
    assert not list((workspace / "there").rglob("worker-0.*"))


# Text in the notice that names the cause.
CONNECTION_FAULTS = {"ssh killed": "SIGKILL", "attach session killed": "killed", "sshd session killed": "closed"}
FAST_CONNECTION_FAULT = "sshd session killed"


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault == FAST_CONNECTION_FAULT else pytest.param(fault, marks=pytest.mark.slow)
        for fault in CONNECTION_FAULTS
    ],
)
def test_broken_connection_is_reconnected(fault: str, net: Network, workspace: Path) -> None:
    """The slot keeps running, and none of its output is lost or duplicated."""
    go, reconnected = workspace / "go", RECONNECTED_REMARK.format(host="node2")
    with launched(write_ssh_job(net, workspace, COUNT_UNTIL.format(go=go), lost_after=30), "ssh") as (run, process):
        log, remarks = run.log_path(Slot("worker", 0), 0), run.folder / "supervisor.log"
        wait_until(lambda: is_ready(run), 60)
        for times in (1, 2):
            inject(fault, run, net)
            wait_until(lambda times=times: remarks.read_text().count(f"{reconnected}\n") == times)
        go.touch()
        assert process.wait(60) == 0, (workspace / "output").read_text()
    notices = [line.partition(" ")[2] for line in remarks.read_text().splitlines()]
    assert notices[1::2] == [reconnected] * 2
    start, end = DISCONNECTED_REMARK.format(host="node2", reason="|").split("|")
    for notice in notices[::2]:
        assert notice.startswith(start)
        assert notice.endswith(end)
        assert CONNECTION_FAULTS[fault] in notice
    output = log.read_text().splitlines()
    assert output == count_lines(output)
    assert len(run.read_status().attempts) == 1
    assert remote_processes(run) == []
    assert not list((workspace / "there").rglob("worker-0.*"))


@pytest.mark.parametrize("is_over", [pytest.param(False, marks=pytest.mark.slow), True])
def test_detached_run_survives_the_launching_machine(is_over: bool, net: Network, workspace: Path) -> None:
    """Another machine with the same run folder reattaches: each line once, and the exit code."""
    go = workspace / "go"
    job = write_ssh_job(net, workspace, COUNT_UNTIL.format(go=go) + "; exit 7", lost_after=5)
    with machine() as first:
        done = first.run("job", "run", job, "--on", "ssh", "--detach")
        assert done.returncode == 0, done.stderr
        run = find_run(None)
        wait_until(lambda: is_ready(run), 60)
    wait_until(lambda: supervisor_pid(run) is None)
    if is_over:
        go.touch()
        wait_until(lambda: not slot_daemons(run))
    else:
        time.sleep(8)  # longer than `lost_after`, after which an attached slot would be stopped
    with machine() as second:
        done = second.run("job", "status", "--json")
        assert json.loads(done.stdout)["state"] in ("running", "failed"), done.stderr
        go.touch()
        done = second.run("job", "logs", "-f")
    lines = done.stdout.splitlines()
    assert lines == count_lines(lines)
    status = run.read_status()
    assert (status.state, [attempt.code for attempt in status.attempts]) == (JobState.FAILED, [7])
    assert remote_processes(run) == []
    assert not list((workspace / "there").rglob("worker-0.*"))


@pytest.mark.slow  # waits for a host that cannot be reached
def test_detached_run_is_stopped_from_another_machine(net: Network, workspace: Path) -> None:
    with machine() as first:
        job = write_ssh_job(net, workspace, DEAF, lost_after=5)
        assert first.run("job", "run", job, "--on", "ssh", "--detach").returncode == 0
        run = find_run(None)
        wait_until(lambda: is_ready(run), 60)
    wait_until(lambda: supervisor_pid(run) is None)
    with machine() as second:
        net["node2"].disconnect()
        try:
            done = second.run("job", "stop")
        finally:
            net["node2"].reconnect()
        assert done.returncode == UnavailableError.exit_code, done.stderr
        assert f"stoker job stop {run.id}" in done.stderr
        assert remote_processes(run)
        done = second.run("job", "stop")
        assert done.returncode == 0, done.stderr
    assert run.read_status().state is JobState.STOPPED
    assert remote_processes(run) == []


EXEC_SCRIPT = """
"$STOKER_ASK" worker/1 'echo hello from $STOKER_HOST; exit' 5; echo code $?
"$STOKER_ASK" worker/1 kill -9 '$$'; echo code $?
"$STOKER_ASK" node2 true; echo code $?
for signal in TERM KILL; do
    "$STOKER_ASK" worker/1 "echo begun $signal; {deaf}" & requester=$!
    while ! test -e {workspace}/$signal; do sleep 0.1; done
    kill -$signal $requester
    while test -e {workspace}/$signal; do sleep 0.1; done
done
echo over
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_slot_runs_commands_on_another_host(net: Network, workspace: Path) -> None:
    """A command is killed with its requester, and all commands with the job."""
    launcher = LAUNCHERS.get("ssh")()
    section = ssh_section(net, workspace / "there", lost_after=5)
    job = job_of(program={"command": ["true"]}, topology="mpi", workers=2, ssh=section)
    rendered = launcher.render(job)
    script = EXEC_SCRIPT.format(workspace=workspace, deaf=DEAF.replace('"', '\\"'))
    command = replace(rendered.slots["launcher/0"], argv=("bash", "-c", script))
    rendered = msgspec.structs.replace(rendered, slots={"launcher/0": command})
    run = create_run(job, rendered)
    launcher.start(rendered, run)
    log, worker_log = run.log_path(Slot("launcher", 0), 0), run.log_path(Slot("worker", 1), 0)
    for name in ("TERM", "KILL"):
        wait_until(
            lambda name=name: (
                worker_log.exists()
                and f"begun {name}" in worker_log.read_text()
                and len(slot_processes(run, "node2")) >= 4
            )
        )
        (workspace / name).touch()
        wait_until(lambda: len(slot_processes(run, "node2")) == 1)  # the standby slot itself
        (workspace / name).unlink()
    wait_until(lambda: launcher.status(run.handle).state.is_final)
    status = launcher.status(run.handle)
    assert (status.state, [slot.code for slot in status.slots]) == (JobState.SUCCEEDED, [0, 0, 0]), status.message
    assert [line for line in log.read_text().splitlines() if "Terminated" not in line and "Killed" not in line] == [
        "code 5",
        "code 137",
        "code 2",
        "over",
    ]
    assert worker_log.read_text().splitlines()[0] == "hello from node2"
    assert remote_processes(run) == []
    assert not list((workspace / "there").rglob("worker-*"))


@pytest.mark.slow
def test_attached_run_stops_with_the_launching_machine(net: Network, workspace: Path) -> None:
    with launched(write_ssh_job(net, workspace, DEAF), "ssh") as (run, process):
        wait_until(lambda: is_ready(run) and len(remote_processes(run)) >= 3, 60)
        process.kill()
        wait_until(lambda: not remote_processes(run), 60)


def test_oom_kill_is_reported(net: Network, workspace: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/stoker-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no memory cgroups of version 1")
    try:
        (group / "memory.limit_in_bytes").write_text(str(32 << 20))
        grow = f"exec {sys.executable} -c 'bytearray(1 << 30).find(1)'"
        script = f"echo ready; while ! test -e {workspace}/go; do sleep 0.1; done; {grow}"
        with launched(write_ssh_job(net, workspace, script), "ssh") as (run, process):
            wait_until(lambda: is_ready(run), 60)
            for pid in slot_processes(run, "node2"):
                with suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(str(pid))
            (workspace / "go").touch()
            assert process.wait(60) == 4
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    message = run.read_status().message
    assert all(word in message for word in ("worker/0", "SIGKILL", "memory")), message


@pytest.mark.slow
def test_hang_is_stopped_with_the_stacks_of_every_rank(net: Network, workspace: Path) -> None:
    (workspace / "work" / "hang.py").write_text(HANGING)
    with launched(write_ssh_job(net, workspace, "", program={"script": "hang.py"}, hang_after=2), "ssh") as (
        run,
        process,
    ):
        assert process.wait(90) == 4
    message = run.read_status().message
    assert all(word in message for word in ("hung", "step 2", "train-00001.tar", "2s")), message
    assert "in stuck" in (run.folder / "stacks.0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "lost_after"), [(5, 20), (10, 30)])
def test_cable_replugged_in_time(seconds: int, lost_after: int, net: Network, workspace: Path) -> None:
    script = f"{COUNT_UNTIL.format(go=workspace / 'go')}; echo"
    with launched(write_ssh_job(net, workspace, script, lost_after=lost_after), "ssh") as (run, process):
        wait_until(lambda: is_ready(run), 60)
        net["node2"].disconnect()
        try:
            time.sleep(seconds)
        finally:
            net["node2"].reconnect()
        (workspace / "go").touch()
        assert process.wait(60) == 0, (workspace / "output").read_text()
    output = run.log_path(Slot("worker", 0), 0).read_text().splitlines()
    assert output == count_lines(output)
    assert len(run.read_status().attempts) == 1


def test_rebooted_host_is_used_again(net: Network, workspace: Path) -> None:
    script = f"echo ready $STOKER_ATTEMPT; test $STOKER_ATTEMPT = 1 && exit 0; {DEAF}"
    with launched(write_ssh_job(net, workspace, script, retries=2), "ssh") as (run, process):
        wait_until(lambda: is_ready(run), 60)
        net["node2"].down()
        net["node2"].up()
        assert process.wait(90) == 0, (workspace / "output").read_text()
    attempts = run.read_status().attempts
    assert [attempt.code for attempt in attempts] == [255, 0]
    assert all(word in attempts[0].cause for word in ("worker/0", "node2", DAEMON_GONE))
    output = (workspace / "output").read_text()
    assert "attempt 1" in output
    assert DAEMON_GONE in output
    wait_until(lambda: not remote_processes(run))


@pytest.mark.slow  # three process groups on two hosts
def test_killed_rank_and_cut_cable_of_two_hosts(net: Network, workspace: Path) -> None:
    (workspace / "work" / "train.py").write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('ready', os.getpid(), flush=True)\n"
        "one = torch.ones(1)\n"
        "for step in range(30 if os.environ['STOKER_ATTEMPT'] == '2' else 10000):\n"
        "    dist.all_reduce(one)\n"
        "    time.sleep(0.1)\n"
        "print('over', flush=True)\n"
    )
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "workers": 2, "retries": 3}
    with launched(write_ssh_job(net, workspace, "", "node1", "node2", **keys), "ssh") as (run, process):
        logs = [run.log_path(Slot("worker", 1), attempt) for attempt in range(3)]
        wait_until(lambda: logs[0].exists() and "ready" in logs[0].read_text(), 90)
        kill_all(*find_ranks(run, "node2"))
        wait_until(lambda: logs[1].exists() and "ready" in logs[1].read_text(), 90)
        net["node2"].disconnect()
        try:
            wait_until(lambda: len(run.read_status().attempts) == 2, 60)
        finally:
            net["node2"].reconnect()
        assert process.wait(90) == 0, (workspace / "output").read_text()
    first, second, _ = run.read_status().attempts
    assert all(word in first.cause for word in ("worker/1", "rank 1", "SIGKILL")), first.cause
    assert all(word in second.cause for word in ("worker/1", "lost", "node2", "5 s")), second.cause
    wait_until(lambda: not remote_processes(run))


@pytest.mark.slow  # the rendezvous of a new process group takes half a minute
def test_elastic_job_replaces_a_lost_worker(net: Network, workspace: Path) -> None:
    (workspace / "work" / "train.py").write_text(ELASTIC.format(folder=workspace).replace("os.getpid()", "time.time()"))
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}, "retries": 3}
    with launched(write_ssh_job(net, workspace, "", "node1", "node2", **keys), "ssh") as (run, process):
        wait_until(lambda: len(list(workspace.glob("joined-2-*"))) == 2, 90)
        net["node2"].down()
        net["node2"].up()
        wait_until(lambda: len(list(workspace.glob("joined-2-*"))) >= 4, 120)  # all ranks joined again
        (workspace / "done").touch()
        assert process.wait(60) == 0, (workspace / "output").read_text()
    assert len(run.read_status().attempts) == 1
    wait_until(lambda: not remote_processes(run))


def find_ranks(run: RunFolder, host: str) -> list[int]:
    """The training processes of a run on a host, without torchrun and the profiler around them."""
    pids = []
    for pid in slot_processes(run, host):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        is_training = any(word.endswith(("train.py", "stoker.trainers.torch_image")) for word in words)
        if is_training and not {"torch.distributed.run", "stoker.remote.profiler"} & set(words):
            pids.append(pid)
    return pids


@pytest.mark.slow  # two trainings
def test_weights_equal_those_of_a_local_run(net: Network, workspace: Path, training_shards: Path) -> None:
    """The same job file, on this machine and on two hosts, one of which loses a rank: bit-identical weights."""
    words = "--model small --size 32 --global-batch-size 24 --epochs 3 --deterministic --seed 3 --threads 1"
    keys = {
        "program": {"module": "stoker.trainers.torch_image", "args": [*words.split(), "--checkpoint-every-steps", "2"]},
        "topology": "torchrun",
        "workers": 2,
        "data": {"train": str(training_shards / "train"), "val": str(training_shards / "val")},
        "env": {"OMP_NUM_THREADS": "1"},
        "retries": 3,
    }
    job = write_ssh_job(net, workspace, "", "node1", "node2", **keys)
    for launcher in ("local", "ssh"):
        folder = workspace / launcher
        argv = ["job", "run", job, "--on", launcher, "--set", f"checkpoint.dir={folder}", "--detach"]
        assert stoker(*argv) == 0
        run = find_run(None)
        if launcher == "ssh":
            wait_until(lambda folder=folder: any(folder.glob("step-*")), 90)
            kill_all(*find_ranks(run, "node2"))
        wait_until(lambda run=run: run.read_status().state.is_final, 120)
        assert run.read_status().state is JobState.SUCCEEDED, run.read_status().message
    assert len(run.read_status().attempts) == 2
    expected, actual = (read_weights(workspace / launcher) for launcher in ("local", "ssh"))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []


def read_weights(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("step-*.pt"))
    weights: dict[str, Any] = decode_checkpoint(newest.read_bytes(), where=str(newest))["model"]
    return weights

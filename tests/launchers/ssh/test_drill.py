"""Fault drill: a training on two ssh hosts with an injected fault has bit-identical weights and an exact ledger."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.trainers.ledger import effective_samples
from tests.launchers.ssh.test_faults import find_ranks
from tests.support.hosts import Network
from tests.support.ssh_runs import (
    Machine,
    kill_all,
    machine,
    remote_processes,
    slot_daemons,
    slot_processes,
    ssh_section,
    supervisors,
)
from tests.support.training_drill import (
    EPOCHS,
    SAMPLES,
    final_state,
    has_reached_step,
    train_reference,
    write_training_job,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reference(tmp_path_factory.mktemp("reference"))


def inject(fault: str, run: RunFolder, net: Network, launching: Machine) -> None:
    host = net["node2"]
    match fault:
        case "rank killed":
            kill_all(*find_ranks(run, "node2"))
        case "slot daemon killed":
            kill_all(slot_daemons(run)[-1])
        case "sshd sessions killed":
            host.kill_sessions()
        case "host rebooted":
            host.down()
            host.up()
        case "cable cut for 10 s":
            host.disconnect()
            time.sleep(10)
            host.reconnect()
        case "cable cut for good":
            host.disconnect()
            wait_until(lambda: bool(run.read_status().attempts), 60)
            wait_until(lambda: not slot_processes(run, "node2"), 60)
            host.reconnect()  # for the next attempt
        case "supervisor killed":
            kill_all(*supervisors(run))
            wait_until(lambda: supervisor_pid(run) is None)
            wait_until(lambda: not remote_processes(run), 60)
            done = launching.run("job", "run", "--resume", run.id, "--detach")
            assert done.returncode == 0, done.stderr
        case "supervisor of a detached run killed":
            kill_all(*supervisors(run))
            wait_until(lambda: supervisor_pid(run) is None)
            assert json.loads(launching.run("job", "status", "--json").stdout)["state"] == "running"


ATTEMPTS = {
    "rank killed": 2,
    "slot daemon killed": 2,
    "sshd sessions killed": 1,
    "host rebooted": 2,
    "cable cut for 10 s": 1,
    "cable cut for good": 2,
    "supervisor killed": 2,
    "supervisor of a detached run killed": 1,
}
"""How many attempts the run takes with each fault."""


@pytest.mark.parametrize("fault", list(ATTEMPTS))
def test_weights_and_ledger_are_exact_after_a_fault(
    fault: str, reference: Path, net: Network, workspace: Path, stoker_home: Path
) -> None:
    lost_after = 30 if fault == "cable cut for 10 s" else 5
    section = ssh_section(net, workspace / "there", lost_after=lost_after)
    job = write_training_job(workspace, reference / "shards", section)
    with machine() as launching:
        if "detached" in fault:
            assert launching.run("job", "run", job, "--on", "ssh", "--detach").returncode == 0
        else:  # in the background, and still attached
            launching.start("job", "run", job, "--on", "ssh")
        wait_until(lambda: any(stoker_home.glob("runs/*/handle")))
        run = find_run(None)
        wait_until(lambda: has_reached_step(run, 8), 90)
        inject(fault, run, net, launching)
        wait_until(lambda: run.read_status().state.is_final, 150)
        status = run.read_status()
        assert status.state is JobState.SUCCEEDED, status.message
        wait_until(lambda: not remote_processes(run))
    assert len(status.attempts) == ATTEMPTS[fault], status.attempts
    expected, actual = final_state(reference), final_state(workspace)
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []
    ledger = effective_samples(workspace / "ledger")
    for samples in ledger.values():
        assert len(samples) == len(set(samples)) == SAMPLES
    assert sorted(ledger) == list(range(EPOCHS))
    assert not list((workspace / "there").rglob("worker-*"))

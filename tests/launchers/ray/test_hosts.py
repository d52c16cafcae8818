"""Ray on bare hosts: a cluster is started over ssh for a run, and nothing of it is left afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.core.spec import load, to_json
from stoker.errors import InputError
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ray import hosts
from stoker.launchers.ray.launcher import RayLauncher
from stoker.launchers.ray.plan import RayPlan
from stoker.launchers.ssh.preflight import Route
from tests.launchers.contract import DEAF, is_ready, job_of
from tests.support.hosts import Network, network
from tests.support.ray import host_processes, slot_processes, write_job
from tests.support.ssh_runs import kill_all, ssh_section, supervisors
from tests.support.trees import stoker
from tests.support.waiting import eventually, wait_until

pytest.importorskip("ray", reason="no package 'ray'")
pytestmark = pytest.mark.timeout(300)
VERSION = hosts.local_version()


# --- The plan


def facts_of(**changes: Any) -> dict[str, Any]:
    modules = {"ray": VERSION, "aiohttp": "3.9", "torch": None, "stoker": None, **changes.pop("modules", {})}
    facts = {"workdir": "/srv", "python": "/usr/bin/python3", "version": "3.11.2", "rsync": True, "cores": 4}
    return {**facts, "modules": modules, **changes}


def plan_of(job: JobSpec) -> hosts.NodePlan:
    routes = {"a": Route("10.0.0.1", "eth0"), "b": Route("10.0.0.2", "eth0")}
    return hosts.build_nodes(job, dict.fromkeys(routes, facts_of()), routes)


def test_head_is_on_the_first_host_and_the_others_join_it() -> None:
    plan = plan_of(job_of("true", ray={"hosts": ["a", "b"], "lost_after": 20}, grace=7))
    assert plan.ssh.hosts == {"node/0": "a", "node/1": "b"}
    assert plan.addresses == {"a": "10.0.0.1", "b": "10.0.0.2"}
    head, worker = (" ".join(command.argv) for command in plan.ssh.slots.values())
    assert "--head --port=@ray:gcs-port@" in head
    assert "--dashboard-host=127.0.0.1" in head
    assert "--address=10.0.0.1:@ray:gcs-port@" in worker
    assert "--head" not in worker
    # The slots of the job, which stop after `lost_after` and `grace`, must not be cut off.
    assert plan.ssh.client.lost_after_s > 20 + 7


def test_placeholders_are_replaced_by_the_ports_of_each_host() -> None:
    head_ports = {hosts.GCS_PORT: 1, hosts.DASHBOARD_PORT: 2, hosts.CLIENT_PORT: 3, hosts.AGENT_PORT: 4}
    plan = hosts.fill_in(
        plan_of(job_of("true", ray={"hosts": ["a", "b"]})).ssh,
        "/tmp/own",
        {
            "a": head_ports,
            "b": {hosts.AGENT_PORT: 5},
        },
    )
    head, worker = (command.argv for command in plan.slots.values())
    assert {"--port=1", "--dashboard-port=2", "--ray-client-server-port=3", "--dashboard-agent-listen-port=4"} < set(
        head
    )
    assert {"--address=10.0.0.1:1", "--dashboard-agent-listen-port=5", "--temp-dir=/tmp/own"} < set(worker)
    assert "@ray:" not in "".join([*head, *worker])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"modules": {"ray": "2.1.0"}}, ["2.1.0"]),
        ({"version": "3.9.1"}, ["3.9.1"]),
        ({"modules": {"aiohttp": None}}, []),  # only the head needs it
        ({"modules": {"ray": None}}, []),  # reported as a missing module
    ],
)
def test_hosts_need_the_versions_of_the_head(changes: dict[str, Any], found: list[str]) -> None:
    issues = list(hosts.check_ray("b", facts_of(**changes), "a", facts_of()))
    assert [word for issue in issues for word in re.findall(r"is ([\d.]+),", issue.what)] == found


def test_head_needs_the_job_api_and_the_version_of_this_machine() -> None:
    (issue,) = hosts.check_ray("a", facts_of(modules={"aiohttp": None}), "a", facts_of(modules={"aiohttp": None}))
    assert f"ray[default]=={VERSION}" in issue.fix
    other = facts_of(modules={"ray": "2.1.0"})
    (issue,) = hosts.check_ray("a", other, "a", other)
    assert "2.1.0" in issue.what
    assert VERSION in issue.what


# --- On two hosts


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


def write_host_job(net: Network, workspace: Path, command: str, **keys: Any) -> Path:
    """Write a job for both hosts, with a Ray that is lost after 5 s."""
    ssh = {**ssh_section(net, workspace / "there"), "hosts": [], **keys.pop("ssh", {})}
    ray = {"lost_after": 5, **keys.pop("ray", {})}
    return write_job(workspace, command, **{"ssh": ssh, "ray": ray, **keys})


ON_HOSTS = ("--on", "ray", "--hosts", "node1,node2")


def ray_processes(net: Network) -> list[int]:
    """The processes of Ray on the hosts of a network."""
    words = ("ray.scripts.scripts", "raylet", "gcs_server", "ray::")
    return [pid for word in words for pid in host_processes(net.hosts, word)]


@contextmanager
def launched(job: Path, *options: str) -> Iterator[tuple[RunFolder, subprocess.Popen[str]]]:
    """Run `stoker job run` in a process namespace of its own; killing it kills everything that it started here."""
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*namespace, sys.executable, "-m", "stoker", "job", "run", str(job), *ON_HOSTS, *options]
    with open(job.parent / "output", "wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            runs = Path(os.environ["STOKER_HOME"], "runs")
            wait_until(lambda: any(runs.glob("*/handle")) or process.poll() is not None)
            assert process.poll() is None, (job.parent / "output").read_text()
            yield find_run(None), process  # type: ignore[misc]
        finally:
            process.kill()


def test_plan_shows_what_is_started_where(net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        stoker(
            "job",
            "plan",
            write_host_job(net, workspace, "", topology="torchrun", program={"module": "this"}),
            *ON_HOSTS,
        )
        == 0
    )
    out, err = capsys.readouterr()
    sections = re.findall(r"^# (\S+) on (\S+)$", out, re.MULTILINE)
    assert sections == [("node/0", "node1"), ("node/1", "node2"), ("worker/0", "node1"), ("worker/1", "node2")]
    assert f"--node-ip-address={net['node2'].address}" in out
    assert "head on node1, workers on node2" in err
    assert eventually(lambda: not ray_processes(net))


def test_all_issues_of_all_hosts_are_reported_at_once(
    net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = workspace / "plain"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", plain], check=True)
    job = write_host_job(net, workspace, "true", ssh={"python": str(plain / "bin" / "python")})
    assert stoker("job", "plan", job, "--on", "ray", "--hosts", "node1,node2,no-such-host") == 5
    err = capsys.readouterr().err
    assert re.search(r"node1, node2: ray is not installed for \S+", err)
    assert "no-such-host: " in err
    assert err.count("\n") == 1


def test_host_without_ray_is_rejected_with_exit_code_2(
    net: Network, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "local_version", lambda: "2.1.0")
    job = job_of("true", ssh={**ssh_section(net, workspace / "there"), "hosts": []}, ray={"hosts": ["node1", "node2"]})
    with pytest.raises(InputError, match=rf"node1, node2: ray is {VERSION}, but 2.1.0 on this machine"):
        RayLauncher().render(job)


@pytest.mark.slow
def test_training_runs_on_both_hosts_and_leaves_nothing(net: Network, workspace: Path) -> None:
    """Each worker is on its own host, in the order of the list; a resumed run starts a cluster again."""
    (workspace / "work" / "train.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size(), 'on', os.environ['GLOO_SOCKET_IFNAME'])\n"
        f"assert os.path.exists('{workspace}/go')\n"
    )
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "env": {"OMP_NUM_THREADS": "1"}}
    job = write_host_job(net, workspace, "", **keys)
    os.chdir(workspace / "work")
    assert stoker("job", "run", job, *ON_HOSTS) == 4
    assert eventually(lambda: not ray_processes(net))
    run = find_run(None)
    for index, host in enumerate(net.hosts):
        log = run.log_path(Slot("worker", index), 0).read_text()
        assert f"rank {index} of 2 on {host.interface}" in log
    (workspace / "go").touch()
    assert stoker("job", "run", "--resume", run.id) == 0, run.read_status()
    assert "rank 1 of 2" in run.log_path(Slot("worker", 1), run.read_status().attempt).read_text()
    assert eventually(lambda: not ray_processes(net))


@pytest.mark.slow
def test_kept_cluster_runs_until_the_run_is_stopped(
    net: Network, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stoker("job", "run", write_host_job(net, workspace, "echo done"), *ON_HOSTS, "--keep") == 0
    run = find_run(None)
    assert f"stoker job stop {run.id}" in capsys.readouterr().err
    assert len(host_processes(net.hosts, "raylet/raylet")) == 2
    assert stoker("job", "delete", run.id) == 2
    assert stoker("job", "stop", run.id) == 0
    assert eventually(lambda: not ray_processes(net))
    assert not run.kept
    assert run.read_status().state is JobState.SUCCEEDED


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["supervisor", "launching machine"])
def test_cluster_is_gone_after_a_kill(victim: str, net: Network, workspace: Path) -> None:
    """Also a slot that ignores SIGTERM: its daemon outlives the Ray node that started it."""
    with launched(write_host_job(net, workspace, DEAF, grace="2s")) as (run, process):
        wait_until(lambda: is_ready(run) and len(slot_processes(run)) >= 3, 120)
        if victim == "supervisor":
            kill_all(*supervisors(run))
        else:
            process.kill()
        wait_until(lambda: not slot_processes(run) and not ray_processes(net), 60)
    assert eventually(lambda: not host_processes(net.hosts, "SlotDaemon"))


@pytest.mark.slow
def test_killed_node_ends_the_attempt_and_a_retry_starts_a_new_cluster(net: Network, workspace: Path) -> None:
    command = f"echo ready; test -e {workspace}/retried && exit 0; touch {workspace}/retried; sleep 600"
    with launched(write_host_job(net, workspace, command, retries=1)) as (run, process):
        wait_until(lambda: is_ready(run), 120)
        (head,) = host_processes(net.hosts, "gcs/gcs_server")
        os.kill(head, signal.SIGKILL)
        assert process.wait(200) == 0, (workspace / "output").read_text()
    first, _ = run.read_status().attempts
    assert "Ray on node1 exited" in first.cause
    assert eventually(lambda: not ray_processes(net))


def test_plan_round_trips() -> None:
    job = job_of("true", ray={"hosts": ["a", "b"]})
    nodes = plan_of(job)
    plan = RayPlan(slots={}, address=None, bundle={}, strategy="PACK", source="/", nodes=nodes.ssh)
    assert load(to_json(plan), RayPlan, Path("plan.json")) == plan

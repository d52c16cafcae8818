"""Probe jobs of jobs whose workers differ: the same ranks and GPUs, or those of some workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.doctor.run import _make_probe_job, _plan_ssh_probes, _ProbeHosts
from stoker.jobs.spec import JobSpec
from stoker.launchers.ssh.gpus import share_gpus
from tests.doctor.test_rules import make_facts

GROUPS = [{"count": 2, "resources": {"gpu": 2}}, {"resources": {"gpu": 1}, "processes_per_worker": 3}]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_job(**keys: Any) -> JobSpec:
    return decode({"name": "j", "program": {"script": "a.py"}, "workers": GROUPS, **keys}, JobSpec)


def test_probe_has_the_ranks_and_gpus_of_the_job() -> None:
    job = make_job()
    probe = _make_probe_job(job, topology=job.topology, port=None)
    assert (probe.job.ranks, probe.gpus, probe.settings["gpus"]) == ((2, 2, 3), (2, 2, 1), True)
    assert [probe.job.resources_of(worker).gpus for worker in range(3)] == [2, 2, 1]


def test_probe_of_some_workers() -> None:
    placement = _ProbeHosts(("b", "c"), "/tmp/x", "python3", has_first_host=False)
    probe = _make_probe_job(make_job(), topology="torchrun", workers=[1, 2], port=None, hosts=placement)
    assert (probe.job.ranks, probe.gpus, probe.hosts) == ((2, 3), (2, 1), ("b", "c"))


def test_probe_without_the_gpus_that_are_missing() -> None:
    probe = _make_probe_job(make_job(), topology="torchrun", port=None, gpus=False)
    assert [probe.job.resources_of(worker).gpu for worker in range(3)] == [0, 0, 0]
    assert (probe.gpus, probe.settings["gpus"]) == ((2, 2, 1), False)  # what the checks compare with


def test_probe_of_a_single_worker_is_one_process() -> None:
    probe = _make_probe_job(make_job(), topology="single", workers=[2], port=None)
    assert (probe.job.topology, probe.job.ranks, probe.gpus) == ("single", (1,), (1,))


def test_ssh_probe_has_as_many_ranks_as_each_host_has_gpus() -> None:
    facts = {"a": make_facts("a", gpus=4), "b": make_facts("b", gpus=1)}
    job = share_gpus(make_job(workers=2, ssh={"hosts": ["a", "b"]}), ["a", "b"], {"a": 4, "b": 1})
    (probe,) = _plan_ssh_probes(job, facts, ["a", "b"], None).probe_jobs
    assert (probe.job.ranks, probe.gpus, probe.hosts) == ((4, 1), (4, 1), ("a", "b"))

"""Workers that differ on Kubernetes: a Job for each group of equal workers, which all meet at the first worker."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.kube.objects import GPU_RESOURCE
from stoker.launchers.kubernetes.addresses import slot_hostname
from tests.launchers.kubernetes.test_manifests import OPTIONS, TOPOLOGIES, Container, job_of, render


@pytest.mark.parametrize(
    ("option", "pods"),
    [
        ("plain", ["group-0-0", "group-0-1", "group-1-0"]),
        ("created claim", ["chief-0", "group-0-0", "group-1-0"]),
    ],
)
def test_groups_of_workers_have_consecutive_node_ranks(option: str, pods: list[str], tmp_path: Path) -> None:
    job = job_of(**{**TOPOLOGIES["torchrun-groups"], **OPTIONS[option], "profile": {"every": 0}})
    objects = render(job)
    (service,) = [obj for obj in objects if obj["kind"] == "Service"]
    assert [slot_hostname(job, "worker", index) for index in range(3)] == [f"pets-{pod}.pets" for pod in pods]
    jobs = {obj["metadata"]["name"]: obj["spec"] for obj in objects if obj["kind"] == "Job"}
    sizes = {name: spec["completions"] for name, spec in jobs.items()}
    assert sizes == Counter(f"pets-{pod[:-2]}" for pod in pods)
    assert [name for name, spec in jobs.items() if "successPolicy" in spec] == [f"pets-{pods[0][:-2]}"]
    for node_rank, (pod, gpus, threads) in enumerate(zip(pods, (2, 2, 1), ("2", "2", "1"), strict=True)):
        name, _, index = f"pets-{pod}".rpartition("-")
        template = jobs[name]["template"]["spec"]
        assert template["subdomain"] == service["metadata"]["name"]
        assert template["containers"][0]["resources"]["limits"][GPU_RESOURCE] == str(gpus)
        argv, _, env = Container(job, "worker", tmp_path, of=name).run_and_report(int(index))
        options = dict(itertools.pairwise(argv))
        assert (options["--nnodes"], options["--node-rank"], options["--nproc-per-node"]) == (
            "3",
            str(node_rank),
            str(gpus),
        )
        assert options["--master-addr"] == f"pets-{pods[0]}.pets"
        assert (env["STOKER_SLOT"], env["OMP_NUM_THREADS"]) == (f"worker/{node_rank}", threads)


def test_mpijob_cannot_have_workers_that_differ() -> None:
    with pytest.raises(SpecError) as caught:
        render(job_of(**{**TOPOLOGIES["torchrun-groups"], "topology": "mpi"}))
    assert [fault.path for fault in caught.value.faults] == ["workers"]

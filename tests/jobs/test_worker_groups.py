"""Workers that differ: groups in the job file, and what topologies make of them."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.errors import SpecError
from stoker.jobs.launcher import LAUNCHERS, LauncherTraits, check_traits
from stoker.jobs.spec import JobSpec, ResourcesSpec, job_schema, parse_job, to_yaml
from stoker.jobs.topology import AddressBook, Command, list_slots, render_commands
from stoker.remote.mpi_rank import find_worker, set_rank_env
from tests.jobs.job_files import MINIMAL

GROUPS = [{"count": 2, "resources": {"gpu": 2}}, {"resources": {"gpu": 1, "cpu": 4}}]


def make_job(workers: Any, **keys: Any) -> JobSpec:
    return decode({"name": "j", "program": {"script": "a.py"}, "workers": workers, **keys}, JobSpec)


def test_workers_have_the_resources_and_ranks_of_their_group() -> None:
    job = make_job(GROUPS)
    assert (job.max_workers, job.min_workers, job.is_elastic) == (3, 3, False)
    assert (job.ranks, job.world_size, job.has_equal_workers) == ((2, 2, 1), 5, False)
    assert [job.ranks_of(worker) for worker in range(3)] == [2, 2, 1]
    assert [job.resources_of(worker).gpus for worker in range(3)] == [2, 2, 1]
    with pytest.raises(IndexError):
        job.ranks_of(3)


def test_groups_default_to_the_keys_of_the_job() -> None:
    groups = [{"count": 1}, {"processes_per_worker": 3}, {"resources": {"gpu": 1}, "processes_per_worker": "auto"}]
    job = make_job(groups, processes_per_worker=2, resources={"gpu": 4, "cpu": 8})
    assert job.ranks == (2, 3, 1)
    assert [job.resources_of(worker).cpu for worker in range(3)] == [8, 8, None]
    assert make_job([{"count": 2}, {"count": 1}]).has_equal_workers
    assert not make_job([{"count": 2}, {"processes_per_worker": 2}]).has_equal_workers


def test_equal_workers_like_one_of_them() -> None:
    job = make_job(GROUPS)
    like_last = job.with_workers_like(2)
    assert (like_last.ranks, like_last.resources) == ((1, 1, 1), ResourcesSpec(gpu=1, cpu=4))
    equal = make_job(3)
    assert equal.with_workers_like(1) is equal


def test_groups_round_trip_through_yaml() -> None:
    job = make_job(GROUPS)
    assert parse_job(to_yaml(job), "job.yaml") == job
    text = MINIMAL + "workers:\n- count: 2\n  resources:\n- {count: 1, resources: {gpu: 1}}"
    assert parse_job(text, "job.yaml").max_workers == 3
    changed = parse_job(text, "job.yaml", ["workers[1].count=4"])
    assert changed.ranks == (1,) * 6


def test_schema_has_groups() -> None:
    schema = job_schema()
    choices = schema["$defs"]["JobSpec"]["properties"]["workers"]["anyOf"]
    (groups,) = [choice for choice in choices if choice.get("type") == "array"]
    assert (groups["items"], groups["minItems"]) == ({"$ref": "#/$defs/WorkerGroupSpec"}, 1)
    assert set(schema["$defs"]["WorkerGroupSpec"]["properties"]) == {"count", "resources", "processes_per_worker"}


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ({"workers": []}, ["workers"]),
        ({"workers": [{"count": 0}, {"gpus": 1}]}, ["workers[0].count", "workers[1].gpus"]),
        ({"workers": [{"resources": {"gpu": -1}}]}, ["workers[0].resources.gpu"]),
        ({"workers": GROUPS, "topology": "tf-mirrored"}, ["workers"]),
        ({"workers": GROUPS, "topology": "tf-ps"}, ["workers"]),
        ({"workers": [{}, {}], "topology": "single"}, ["workers"]),
        ({"workers": [{"processes_per_worker": 2}], "topology": "single"}, ["workers[0].processes_per_worker"]),
    ],
)
def test_faults_of_groups(keys: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        make_job(**keys)
    assert [fault.path for fault in caught.value.faults] == paths


@pytest.mark.parametrize("topology", ["tf-mirrored", "tf-ps"])
def test_equal_groups_are_allowed_for_every_topology(topology: str) -> None:
    job = make_job([{"count": 2, "resources": {"gpu": 2}}], topology=topology)
    assert (job.ranks, job.resources_of(1).gpus) == ((1, 1), 2)


def test_launchers_refuse_workers_that_differ_unless_they_support_them() -> None:
    traits = LauncherTraits(name="there")
    assert [fault.path for fault in check_traits(make_job(GROUPS), traits)] == ["workers"]
    assert list(check_traits(make_job([{"count": 2}, {}]), traits)) == []
    assert not LAUNCHERS.get("slurm").traits.supports_unequal_workers  # as docs/jobs.md says
    for name in ("k8s", "local", "ray", "ssh"):
        assert list(check_traits(make_job(GROUPS), LAUNCHERS.get(name).traits)) == []


# --- Commands


def render(job: JobSpec, **keys: Any) -> list[Command]:
    hosts = {slot: f"host-{slot.index}" for slot in list_slots(job)}
    book = AddressBook(hosts=hosts, port=1, python="py", cores_per_rank=2, **keys)
    return [command for command in render_commands(job, book).values() if isinstance(command, Command)]


def option(command: Command, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_torchrun_starts_the_ranks_of_each_worker() -> None:
    commands = render(make_job(GROUPS))
    assert [option(command, "--nproc-per-node") for command in commands] == ["2", "2", "1"]
    assert {option(command, "--nnodes") for command in commands} == {"3"}
    assert [option(command, "--node-rank") for command in commands] == ["0", "1", "2"]
    assert [command.env["OMP_NUM_THREADS"] for command in commands] == ["2", "2", "4"]


def test_mpirun_places_the_ranks_of_each_worker() -> None:
    (mpirun,) = render(make_job(GROUPS, topology="mpi"))
    assert (option(mpirun, "-np"), option(mpirun, "--host")) == ("5", "host-0:2,host-1:2,host-2:1")
    assert [option(mpirun, name) for name in ("--ranks", "--gpus", "--threads")] == ["2,2,1", "2,2,1", "2,2,4"]


def test_mpirun_sums_up_the_ranks_of_workers_on_one_host() -> None:
    job = make_job([{"processes_per_worker": 2}, {}], topology="mpi")
    hosts = dict.fromkeys(list_slots(job), "here")
    mpirun = next(iter(render_commands(job, AddressBook(hosts=hosts, port=1)).values()))
    assert isinstance(mpirun, Command)
    assert (option(mpirun, "--host"), option(mpirun, "--ranks")) == ("here:3", "2,1")
    assert "--threads" not in mpirun.argv  # equal for all: mpirun passes it on


def test_find_worker_of_a_rank() -> None:
    assert [find_worker([2], rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [find_worker([3, 1, 2], rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("rank", "local_rank", "visible", "expected"),
    [
        (0, 0, "4,5,6,7", ("worker/0", "0", "2", "4,5")),
        (2, 2, "4,5,6,7", ("worker/1", "0", "1", "6")),
        (3, 3, "4,5,6,7", ("worker/2", "0", "1", "7")),
        (2, 0, "4,5", ("worker/1", "0", "1", "4")),
        (3, 1, "4,5", ("worker/2", "0", "1", "5")),
        (2, 0, None, ("worker/1", "0", "1", None)),
    ],
)
def test_rank_sees_the_gpus_of_its_worker(
    rank: int, local_rank: int, visible: str | None, expected: tuple[str | None, ...]
) -> None:
    """A node may have several workers, of which the first is any worker of the job."""
    environ = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert set_rank_env(environ, {"--ranks": [2, 1, 1], "--gpus": [2, 1, 1]}) == rank
    names = ("STOKER_SLOT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert tuple(environ.get(name) for name in names) == expected


def test_one_gpu_is_not_hidden_where_no_variable_selects_it() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "0"}
    set_rank_env(environ, {"--ranks": [1], "--gpus": [1]})
    assert "CUDA_VISIBLE_DEVICES" not in environ

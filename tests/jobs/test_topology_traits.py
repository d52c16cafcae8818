"""A topology is one module: everything else reads its traits and the data of its roles."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker.core.spec import decode
from stoker.errors import SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import create_run
from stoker.jobs.spec import JobSpec, job_schema
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot, get_topology
from stoker.jobs.topology_traits import TOPOLOGIES, list_traits
from stoker.launchers.local import LocalLauncher
from tests.support.waiting import wait_until

SOURCES = Path(stoker.__file__).parent

RELAY = """
from stoker.jobs.topology import Command, Role, Slot, program_argv
from stoker.jobs.topology_traits import RoleTraits, TopologyTraits


class Relay:
    '''Workers and one judge, which hears of them by their addresses.'''

    traits = TopologyTraits(
        has_address_per_slot=True, extra_roles={"judge": RoleTraits(has_gpus=False)}, reserved_env=("RELAY",)
    )

    def roles(self, job):
        return Role("worker", job.max_workers, listens=True), Role("judge", 1, is_lead=True)

    def command(self, job, slot, book):
        workers = [Slot("worker", index) for index in range(job.max_workers)]
        relay = ",".join(f"{book.hosts[worker]}:{book.ports[worker]}" for worker in workers)
        return Command(tuple(program_argv(job.program, book.python)), {"RELAY": relay})
"""


@pytest.fixture
def _relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution with a topology of its own, as a user would: supervisors must find it as well."""
    metadata = tmp_path / "relay-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: relay\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stoker.topology]\nrelay = relay_topology:Relay\n")
    (tmp_path / "relay_topology.py").write_text(RELAY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("relay_topology", None)


def relay_job(**keys: object) -> JobSpec:
    command = 'echo "$STOKER_SLOT hears $RELAY"; [ "$STOKER_ROLE" = judge ] || while :; do sleep 0.1; done'
    job = {"name": "race", "program": {"command": ["bash", "-c", command]}, "topology": "relay", "workers": 2}
    return decode({**job, "profile": {"every": 0}, "grace": 2, **keys}, JobSpec)


@pytest.mark.usefixtures("_relay")
def test_new_topology_runs_without_changes_elsewhere(
    tmp_path: Path, stoker_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher, job = LocalLauncher(), relay_job()
    plan = launcher.render(job)
    assert list(plan.slots) == ["worker/0", "worker/1", "judge/0"]
    assert list(plan.ports) == ["worker/0", "worker/1"]
    addresses = ",".join(f"127.0.0.1:{port}" for port in plan.ports.values())
    assert all(command.env["RELAY"] == addresses for command in plan.slots.values())
    run = create_run(job, plan)
    handle = launcher.start(plan, run)
    try:
        wait_until(lambda: launcher.status(handle).state.is_final)
    finally:
        launcher.stop(handle)
    assert launcher.status(handle).state is JobState.SUCCEEDED, launcher.status(handle)
    lines = [line.text for line in launcher.logs(handle, Slot("judge", 0), follow=False)]
    assert lines == [f"judge/0 hears {addresses}"]


@pytest.mark.usefixtures("_relay")
def test_job_files_of_a_new_topology_are_checked() -> None:
    with pytest.raises(SpecError) as caught:
        relay_job(
            processes_per_worker=2,
            workers={"min": 1, "max": 2},
            env={"RELAY": "x"},
            roles={"judge": {"count": 2, "resources": {"gpu": 1}}, "ps": {}},
        )
    assert sorted(fault.path for fault in caught.value.faults) == [
        "env.RELAY",
        "processes_per_worker",
        "roles.judge.count",
        "roles.judge.resources.gpu",
        "roles.ps",
        "workers",
    ]
    assert "relay" in job_schema()["$defs"]["JobSpec"]["properties"]["topology"]["enum"]


@pytest.mark.usefixtures("_relay")
def test_launchers_accept_topologies_by_their_traits() -> None:
    supported = {
        name: [topology for topology, traits in list_traits().items() if LAUNCHERS.get(name).traits.supports(traits)]
        for name in LAUNCHERS.names()
    }
    everywhere = ["mpi", "relay", "single", "tf-mirrored", "tf-ps", "torchrun"]
    assert supported["local"] == supported["ssh"] == supported["k8s"] == everywhere
    assert supported["ray"] == [name for name in everywhere if name != "mpi"]


def test_only_workers_of_parameter_servers_restart_alone() -> None:
    alone = []
    for name in TOPOLOGIES.names():
        job = decode({"name": "j", "program": {"module": "m"}, "topology": name}, JobSpec)
        alone += [(name, role.name) for role in get_topology(job).roles(job) if role.restart == "slot"]
    assert alone == [("tf-ps", "worker")]


def test_unknown_topology_is_one_fault() -> None:
    with pytest.raises(SpecError) as caught:
        decode({"name": "j", "program": {"module": "m"}, "topology": "torchrum", "roles": {"ps": {}}}, JobSpec)
    ((path, what, *_),) = caught.value.faults
    assert path == "topology"
    assert "did you mean 'torchrun'" in what


def topology_comparisons(source: str) -> list[int]:
    """Return the lines of a module that compare a topology with a name, or ask a launcher for its attributes."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=others) if any(map(_is_topology, (left, *others))):
                found = any(_has_name(each) for each in (left, *others))
            case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "endswith" | "removeprefix")):
                found = _is_topology(value)
            case ast.Match(subject=subject):
                found = _is_topology(subject)
            case ast.Subscript(value=ast.Dict() as table, slice=key):
                found = _is_topology(key) and _has_name(table)
            case ast.Call(func=ast.Name(id="hasattr"), args=[subject, *_]):
                found = "launcher" in ast.unparse(subject).lower()
            case _:
                continue
        if found:
            lines.append(node.lineno)
    return lines


def _is_topology(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "topology") or (
        isinstance(node, ast.Name) and node.id == "topology"
    )


def _has_name(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Constant) and each.value in TOPOLOGIES.names() for each in ast.walk(node))


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('job.topology == "mpi"', True),
        ('"mpi" != job.topology', True),
        ('job.topology in ("torchrun", "mpi")', True),
        ('job.topology.startswith("tf-")', True),
        ('{"mpi": 1, "single": 2}[job.topology]', True),
        ("match job.topology:\n    case 'mpi': pass", True),
        ('hasattr(open_launcher(on), "runs")', True),
        ("topology == job.topology", False),
        ("job.traits.has_rendezvous", False),
        ('make(topology="single")', False),
    ],
)
def test_comparisons_are_found(line: str, is_found: bool) -> None:
    assert bool(topology_comparisons(line)) == is_found


@pytest.mark.parametrize("package", ["launchers", "doctor", "cli", "jobs", "api.py", "kube", "telemetry"])
def test_no_topology_is_compared_by_name(package: str) -> None:
    root = SOURCES / package
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    assert files
    found = [f"{path.relative_to(SOURCES)}:{line}" for path in files for line in topology_comparisons(path.read_text())]
    assert found == []

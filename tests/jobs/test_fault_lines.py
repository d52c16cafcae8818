"""Faults of a job file: all of them at once, one per line, each with its file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import Fault, SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.spec import JobSpec, parse_job
from tests.jobs.job_files import MINIMAL, parse_faults


def lines_of(text: str, *overrides: str) -> dict[str, int | None]:
    return {fault.path: fault.line for fault in parse_faults(text, *overrides)}


def test_two_faults_in_one_section_are_reported_at_once() -> None:
    assert lines_of(MINIMAL + "resources:\n  gpu: 1.5\n  memory: 32\n") == {"resources.gpu": 4, "resources.memory": 5}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("retries: x", 3),
        ("\n# comment\nretries: x", 5),
        ("ssh:\n  hosts:\n    - a\n    - 3\n", 6),
        ("env: {\n  A: x,\n  1B: y}", 5),
        ("workers: {min: 1}", 3),
        ("workers:\n\n  min: 1\n", 3),
        ('labels:\n  a: b\n  "x.y/z": a b\n', 5),
        ("volumes:\n  - claim: c\n    path: data\n", 5),
        ("roles:\n  ps: &ps\n    count: -1\ntopology: tf-ps\n", 5),
        ("topology: tf-ps\nroles:\n  ps: {<<: {count: -1}}\n", 5),
        ("topology: tf-ps\nresources: &r\n  gpu: x\nroles:\n  ps:\n    resources: {<<: [*r], gpu: 0}\n", 5),
    ],
)
def test_line_of_a_fault(text: str, line: int) -> None:
    assert list(lines_of(MINIMAL + text).values()) == [line]


def test_line_of_a_missing_key_is_that_of_its_section() -> None:
    assert lines_of("# a job\nname: a\n") == {"program": 2}


def test_lines_of_json_with_tabs() -> None:
    text = '{\n\t"name": "a",\n\t"program": {"script": "a.py"},\n\t"retries": "x"\n}\n'
    assert lines_of(text) == {"retries": 4}


def test_overrides_have_no_line() -> None:
    assert lines_of(MINIMAL + "retries: 1\nport: 0\n", "retries=x") == {"port": 4, "retries": None}


def test_message_has_one_line_for_each_fault() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(MINIMAL + "retries: x\nport: 0\n", "job.yaml", ["resources.gpu=x"])
    header, *lines = str(caught.value).split("\n")
    assert header == "job.yaml: 3 errors"
    assert [line.split(": ")[0] for line in lines] == ["  job.yaml:3", "  job.yaml:4", "  job.yaml"]
    assert lines[2].endswith("(from --set resources.gpu)")
    with pytest.raises(SpecError, match=r"^job\.yaml:3: retries: [^\n]*$"):
        parse_job(MINIMAL + "retries: x", "job.yaml")


def test_faults_without_a_file_are_one_line_each() -> None:
    error = SpecError([Fault("a", "x"), Fault("b", "y")], hint="do z")
    assert str(error).split("\n") == ["2 errors", "  a: x", "  b: y", "do z"]
    assert str(SpecError([Fault("a", "x")], where="f", hint="do z")) == "f: a: x; do z"


# --- Together with the checks of a launcher


def test_misspelled_topology_does_not_hide_missing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "name: a\nprogram: {script: none.py}\ntopology: torchrn\ndata:\n  train: none\n  sampling: exakt\n"
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml", check=LAUNCHERS.get("local")().check)
    assert {fault.path: fault.line for fault in caught.value.faults} == {
        "program.script": 2,
        "topology": 3,
        "data.train": 5,
        "data.sampling": 6,
    }
    assert "torchrun" in caught.value.faults[1].what.partition("did you mean")[2]


def test_a_key_that_is_already_reported_is_not_checked_again() -> None:
    def check(_: JobSpec) -> Iterator[Fault]:
        yield Fault("retries", "second")

    with pytest.raises(SpecError) as caught:
        parse_job(MINIMAL + "retries: x", "job.yaml", check=check)
    assert [fault.path for fault in caught.value.faults] == ["retries"]


SNIPPETS = (
    "topology: ddp",
    "topology: single\nworkers: {min: 4, max: 2}",
    "topology: tf-ps\nroles: {ps: {count: 0}, launcher: {count: 3}, nobody: {count: x}, tensorboard: {count: 1}}",
    "workers: all",
    "workers: x",
    "port: x",
    "image: a b",
    "resources: {gpu: x, cpu: 0, memory: 1, gpu_type: y}",
    "data: {train: 'no/such', val: 3, via: x}",
    "checkpoint: {dir: 'http://x', claim: A}",
    "volumes: [{claim: a}, {path: b}, 3]",
    "env: {PATH: [], RANK: 1}",
    "secret_env: {A: {}, B: 3}",
    "secret_files: {/none: 3, a: {secret: b}}",
    "tensorboard: 3",
    "kubernetes: {ttl: x, copy: [none, 3], namespace: A}",
    "ssh: {hosts: [a, 3], config: none, copy: x}",
    "ssh: {hosts: [], workdir: ~/x}",
    "mpi: {args: [x]}",
)
PROGRAMS = ("3", "{}", "{command: []}", "{command: [none]}", "{script: none.py, cwd: none}", "{script: 3, args: x}")


@pytest.mark.parametrize("name", ["local", "ssh", "ray", "k8s"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(snippets=st.lists(st.sampled_from(SNIPPETS), unique_by=lambda text: text[:4]), program=st.sampled_from(PROGRAMS))
def test_checks_of_launchers_accept_invalid_jobs(name: str, snippets: list[str], program: str) -> None:
    text = "\n".join(["name: A", f"program: {program}", *snippets])
    with pytest.raises(SpecError):
        parse_job(text, "job.yaml", check=LAUNCHERS.get(name)().check)

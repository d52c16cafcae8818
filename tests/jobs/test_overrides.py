"""`--set KEY=VALUE`: overrides of job file keys, and the faults of invalid ones."""

from __future__ import annotations

import pytest

from stoker.jobs.spec import CacheSpec, DataSpec, ElasticSpec, ResourcesSpec, parse_job
from tests.jobs.job_files import MINIMAL, check_faults, parse_faults


def test_overrides_set_append_and_remove_keys() -> None:
    job = parse_job(
        MINIMAL
        + "resources: {gpu: 1, cpu: 2}\nssh: {hosts: [a, b]}\ndata: {via: 'http://c:1', train: x}\nenv: {B: 1}\n",
        "job.yaml",
        [
            "resources.gpu=4",
            "resources.cpu=",
            "ssh.hosts[0]=x",
            "ssh.hosts[2]=z",
            "workers={min: 2, max: 8}",
            "data.via=",
            "data.cache.dir=/c",
            "program.args=[--lr, 1e-4]",
            "env.A=x=y",
            'labels["example.com/team"]=vision',
            "labels['a.b']=c",
            "kubernetes.tolerations[0].key=gpu",
            "env.B=",
        ],
    )
    assert job.resources == ResourcesSpec(gpu=4)
    assert job.ssh.hosts == ("x", "b", "z")
    assert job.workers == ElasticSpec(min=2, max=8)
    assert job.data == DataSpec(train="x", cache=CacheSpec(dir="/c"))
    assert job.program.args == ("--lr", "1e-4")
    assert job.env == {"A": "x=y"}
    assert job.labels == {"example.com/team": "vision", "a.b": "c"}
    assert job.kubernetes.tolerations == ({"key": "gpu"},)


def test_last_override_wins_and_list_items_can_be_removed() -> None:
    job = parse_job(MINIMAL + "ssh: {hosts: [a, b]}", "job.yaml", ["retries=1", "retries=2", "ssh.hosts[0]="])
    assert (job.retries, job.ssh.hosts) == (2, ("b",))


def test_override_changes_one_of_two_aliases() -> None:
    text = MINIMAL + "topology: tf-ps\nresources: &r {cpu: 2}\nroles: {ps: {resources: *r}}"
    job = parse_job(text, "job.yaml", ["resources.gpu=1"])
    assert (job.resources.gpu, job.roles["ps"].resources.gpu) == (1, None)


EXAMPLES = ("resources.gpu=4", "ssh.hosts[0]=node1")


@pytest.mark.parametrize(
    ("assignment", "fault"),
    [
        ("resources.gpu", ("", "--set 'resources.gpu'", "resources.gpu=4")),
        ("=4", ("", "--set '=4'", *EXAMPLES)),
        (".gpu=4", ("", "--set '.gpu=4'", *EXAMPLES)),
        ("[0]=4", ("", "--set '[0]=4'", *EXAMPLES)),
        ("a b=4", ("", "--set 'a b=4'", *EXAMPLES)),
        ("workers.min=2", ("", "--set workers.min: workers is 4", "set workers itself")),
        ("name.x=2", ("", "--set name.x: name is 'a'", "set name itself")),
        ("name[0]=2", ("", "--set name[0]: name is 'a'", "set name itself")),
        ("ssh.hosts[5]=x", ("", "--set ssh.hosts[5]:", "ssh.hosts has 2 items")),
        ("ssh.hosts.a=x", ("", "--set ssh.hosts.a: ssh.hosts is a list", "ssh.hosts[0]")),
        ("ssh[0]=x", ("", "--set ssh[0]: ssh is a mapping", "key")),
        ("image=@x", ("", "--set image: not valid YAML:", "line 1, column 1", "quote this")),
        ("env={A: 1, A: 2}", ("", "--set env: A: duplicate key", "lines 1 and 1")),
        ("resources.gpu=lots", ("resources.gpu", ">= 0", "'lots'", "(from --set resources.gpu)")),
        ("resources.gpus=1", ("resources.gpus", "unknown key (did you mean 'gpu'?)", "(from --set resources.gpus)")),
        ("resources={gpus: 1}", ("resources.gpus", "unknown key (did you mean 'gpu'?)", "(from --set resources)")),
        ("env[0]=1", ("env", "must be a mapping, got a list of length 1", "(from --set env[0])")),
        ("program.module=x", ("program", "script and module", "(from --set program.module)")),
        ("resource.gpu=1", ("resource", "unknown key (did you mean 'resources'?)", "(from --set resource.gpu)")),
        ("name=", ("name", "missing", "(from --set name)")),
    ],
)
def test_invalid_overrides(assignment: str, fault: tuple[str, ...]) -> None:
    check_faults(parse_faults(MINIMAL + "workers: 4\nssh: {hosts: [a, b]}", assignment), [fault])


def test_faults_of_the_file_and_of_overrides_are_reported_together() -> None:
    check_faults(
        parse_faults("name: A\nprogram: {script: a.py}", "retries=x", "nope"),
        [
            ("name", "'A'"),
            ("", "--set 'nope'", "resources.gpu=4"),
            ("retries", ">= 0", "'x'", "(from --set retries)"),
        ],
    )


@pytest.mark.parametrize("text", ["[1]", "5", "job"])
def test_document_that_is_not_a_mapping_cannot_be_overridden(text: str) -> None:
    check_faults(parse_faults(text, "retries=1"), [("", "must be a mapping, got")])

"""Invalid values and invalid combinations in a job file: which key is reported, and which values are named."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.jobs.spec import parse_job, to_yaml
from tests.jobs.job_files import MINIMAL, check_faults, minimal, parse_faults

CLAIM = {"dir": "/c", "claim": "c"}


def test_all_faults_are_reported_at_once() -> None:
    text = """
name: My_Job
program: {script: train.py, args: --epochs 90}
workers: 0
processes_per_worker: many
topology: ddp
port: 99999
resources: {cpu: 500m, memory: 8, gpus: 1}
data: {cache: {size: 2Gi}, via: cache:3128, sampling: often}
checkpoint: {access: RWO, keep: 0, dir: http://x/y}
env: {1A: x}
labels: {team: a b}
ssh: {hosts: [-oProxyCommand=x], user: a b}
colour: red
name: again
"""
    sections = (
        "name, program, topology, workers, processes_per_worker, port, roles, image, resources, data, checkpoint, "
        "volumes, profile, env, secret_env, secret_files, labels, retries, grace, hang_after, tensorboard, kubernetes, "
        "mpi, ssh, ray"
    )
    check_faults(
        parse_faults(text),
        [
            ("program.args", "[--epochs, 90]", "'--epochs 90'"),
            ("workers", "{min: 2, max: 8}", "got 0"),
            ("processes_per_worker", "'auto'", ">= 1", "'many'"),
            ("topology", "'mpi', 'single', 'tf-mirrored', 'tf-ps', 'torchrun'", "'ddp'"),
            ("port", "between 1 and 65535", "99999"),
            ("resources.cpu", "8 or 0.5", "'500m'"),
            ("resources.gpus", "unknown key (did you mean 'gpu'?)"),
            ("resources.memory", "8Gi"),
            ("data.cache.dir", "missing", "size"),
            ("data.via", "http://cache:3128", "'cluster'", "'cache:3128'"),
            ("data.sampling", "'exact', 'join', 'resampled'", "'often'"),
            ("checkpoint.access", "'rwo', 'rwx'", "'RWO'"),
            ("checkpoint.keep", ">= 1", "got 0"),
            ("checkpoint.dir", "'http://x/y'", "s3://"),
            ("env.1A", "invalid key", "'1A'"),
            ("labels.team", "63", "'a b'"),
            ("ssh.hosts[0]", "'-oProxyCommand=x'"),
            ("ssh.user", "'a b'"),
            ("colour", "unknown key", sections),
            ("name", "duplicate key", "lines 2 and 15"),
        ],
    )


def test_combinations_of_valid_sections_are_reported_beside_invalid_sections() -> None:
    text = "name: A\nprogram: {}\nworkers: 2\ntopology: {}\nenv: {{RANK: 1}}\ncheckpoint: {{claim: c}}\nretries: x\n"
    check_faults(
        parse_faults(text.format("{script: a.py}", "single")),
        [
            ("name", "'A'"),
            ("workers", "single", "2", "torchrun"),
            ("env.RANK", "reserved"),
            ("checkpoint.dir", "missing", "/checkpoint"),
            ("retries", ">= 0", "'x'"),
        ],
    )
    assert "env.RANK" in [fault.path for fault in parse_faults(text.format("{script: a.py}", "ddp"))]
    assert "env.RANK" in [fault.path for fault in parse_faults(text.format("[]", "torchrun"))]
    check_faults(
        parse_faults("program: {command: [x]}\nenv: {RANK: 1}")[1:],
        [("program.command", "script", "module", "topology: single"), ("env.RANK", "reserved")],
    )


def test_unsupported_url_schemes_of_data() -> None:
    data = {"train": "ftp://foo/x", "val": "gcs://bucket/val-{0..9}.tar"}
    check_faults(
        parse_faults(minimal(data=data)),
        [("data.train", "'ftp://foo/x'", "s3://", "https://"), ("data.val", "'gcs://", "gs://")],
    )
    for url in ("HTTP://a/x", "file:///a", "shards/a", "shards/{0..9}.tar", "s3://b/x", "gs://b/x"):
        assert parse_job(minimal(data={"train": url}), "job.yaml").data.train == url


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a.b", "a b", "a\n", "ä", "a" * 41])
def test_invalid_job_names(name: str) -> None:
    check_faults(parse_faults(minimal(name=name)), [("name", "40", repr(name))])
    assert parse_job(minimal(name="a" * 40), "job.yaml").name == "a" * 40


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ({}, ("program", "exactly one of script, module and command")),
        ({"script": "a.py", "module": "b"}, ("program", "exactly one of", "script and module")),
        ({"script": "a.py --lr 1"}, ("program.script", "'a.py --lr 1'", "args")),
        ({"script": "run.sh"}, ("program.script", "'run.sh'", "command: [bash, run.sh]")),
        ({"script": "~/a.py"}, ("program.script", "'~/a.py'", "full path")),
        ({"script": "a.py", "cwd": "$HOME"}, ("program.cwd", "'$HOME'", "full path")),
        ({"module": "train.py"}, ("program.module", "'train.py'", "script")),
        ({"module": "a/b"}, ("program.module", "package.train", "'a/b'")),
        ({"script": "a.py", "args": ["--lr 0.1"]}, ("program.args[0]", "'--lr 0.1'", "[--lr, 0.1]", "--lr=0.1")),
        ({"script": "a.py", "args": ["a\0b"]}, ("program.args[0]", "'a\\x00b'")),
        ({"script": "a.py", "arg": []}, ("program.arg", "unknown key (did you mean 'args'?)")),
        ("train.py", ("program", "a mapping", "'train.py'")),
    ],
)
def test_invalid_programs(program: object, fault: tuple[str, ...]) -> None:
    check_faults(parse_faults(minimal(program=program)), [fault])


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"program": {"command": ["nvidia-smi"]}}, ("program.command", "script", "module", "topology: single")),
        ({"topology": "single", "program": {"command": []}}, ("program.command", "empty")),
        ({"topology": "single", "program": {"command": ["ls -l"]}}, ("program.command", "'ls -l'", "[ls, -l]")),
        ({"topology": "single", "program": {"command": "ls -l"}}, ("program.command", "[bash, run.sh]", "'ls -l'")),
        ({"topology": "single", "workers": 2}, ("workers", "single", "2", "torchrun")),
        ({"topology": "single", "processes_per_worker": 2}, ("processes_per_worker", "single", "remove")),
        ({"topology": "tf-mirrored", "processes_per_worker": 2}, ("processes_per_worker", "tf-mirrored", "remove")),
        ({"topology": "mpi", "workers": {"min": 1, "max": 2}}, ("workers", "torchrun", "mpi")),
        ({"workers": {"min": 3, "max": 2}}, ("workers", "min (3)", "max (2)")),
        ({"workers": {"min": 3}}, ("workers.max", "missing", ">= 1")),
        ({"roles": {"ps": {"count": 2}}}, ("roles.ps", "torchrun", "none")),
        ({"topology": "tf-mirrored", "roles": {"ps": {}}}, ("roles.ps", "tf-mirrored", "evaluator, tensorboard")),
        (
            {"topology": "tf-ps", "roles": {"serving": {"count": 0}}},
            ("roles.serving", "tf-ps", "ps, chief, evaluator, tensorboard"),
        ),
        (
            {"topology": "tf-ps", "roles": {"worker": {"count": 4}}},
            ("roles.worker", "workers, image, resources, port"),
        ),
        ({"topology": "tf-ps", "roles": {"evaluator": {"count": 2}}}, ("roles.evaluator.count", "0 or 1", "got 2")),
        ({"topology": "tf-ps", "roles": {"ps": {"count": 0}}}, ("roles.ps.count", ">= 1")),
        ({"topology": "tf-ps", "roles": {"ps": {"resources": {"gpu": 1}}}}, ("roles.ps.resources.gpu", "remove")),
        ({"resources": {"memory": 32}}, ("resources.memory", "32 B", "32Gi")),
        ({"resources": {"cpu": 0}}, ("resources.cpu", "8 or 0.5", "got 0")),
        ({"data": {"train": "s3:/bucket/train"}}, ("data.train", "'s3:/bucket/train'", "s3://")),
        ({"data": {"val": "~/val"}}, ("data.val", "'~/val'", "full path")),
        ({"data": {"cache": {"dir": "s3://x"}}}, ("data.cache.dir", "'s3://x'", "local directory")),
        ({"data": {"cache": {"dir": "/c", "size": 200}}}, ("data.cache.size", "200 B", "200Gi")),
        ({"checkpoint": {"dir": "http://x/y"}}, ("checkpoint.dir", "'http://x/y'", "s3://… or gs://…")),
        ({"checkpoint": {"create": True}}, ("checkpoint.create", "checkpoint.claim")),
        ({"checkpoint": {"size": "1Gi"}}, ("checkpoint.size", "checkpoint.claim")),
        (
            {"checkpoint": {"storage_class": "efs-sc", "claim": "c", "dir": "/c"}},
            ("checkpoint.storage_class", "create: true"),
        ),
        ({"kubernetes": {"queue_priority": "high"}}, ("kubernetes.queue_priority", "queue", "priority_class")),
        ({"kubernetes": {"shm": 8}}, ("kubernetes.shm", "8 B", "8Gi")),
        ({"mpi": {"sshd": []}}, ("mpi.sshd", "[/usr/sbin/sshd, -De]", "empty list")),
        ({"topology": "tf-ps", "roles": {"ps": {"expose": "node_port"}}}, ("roles.ps.expose", "tensorboard", "remove")),
        (
            {"topology": "tf-ps", "roles": {"tensorboard": {"logdir": "/logs", "program": {"module": "board"}}}},
            ("roles.tensorboard.logdir", "program", "remove one"),
        ),
        (
            {"topology": "mpi", "roles": {"launcher": {"program": {"module": "train"}}}},
            ("roles.launcher.program", "mpirun", "remove"),
        ),
        (
            {"topology": "tf-ps", "roles": {"evaluator": {"program": {"args": ["--eval"]}}}},
            ("roles.evaluator.program", "exactly one of script, module and command"),
        ),
        ({"checkpoint": {"claim": "c"}}, ("checkpoint.dir", "missing", "/checkpoint")),
        ({"checkpoint": {"claim": "c", "dir": "s3://b/c"}}, ("checkpoint.claim", "s3://", "claim, dir")),
        ({"checkpoint": {"claim": "c", "dir": "here"}}, ("checkpoint.dir", "'here'", "absolute")),
        ({"checkpoint": {**CLAIM, "create": True}}, ("checkpoint.size", "missing", "10Gi")),
        ({"checkpoint": {**CLAIM, "size": "1Gi"}}, ("checkpoint.size", "create: true")),
        (
            {"checkpoint": CLAIM, "workers": {"min": 1, "max": 2}},
            ("checkpoint.access", "rwo", "rank 0", "rwx", "bucket", "fixed number of workers"),
        ),
        (
            {"checkpoint": CLAIM, "workers": 2, "topology": "mpi"},
            ("checkpoint.access", "rwo", "MPIJob", "rwx", "bucket", "one worker"),
        ),
        (
            {"volumes": [{"claim": "a", "path": "/data"}, {"claim": "b", "path": "/data/"}]},
            ("volumes[1].path", "'/data/'", "volumes[0].path"),
        ),
        (
            {"volumes": [{"claim": "a", "path": "/c"}], "checkpoint": CLAIM},
            ("volumes[0].path", "'/c'", "checkpoint.dir"),
        ),
        (
            {"volumes": [{"claim": "a", "path": "/s"}], "secret_files": {"/s": {"secret": "s"}}},
            ('secret_files["/s"]', "'/s'", "volumes[0].path"),
        ),
        ({"volumes": [{"claim": "a", "path": "data"}]}, ("volumes[0].path", "absolute path", "'data'")),
        ({"profile": {"every": 0.01}}, ("profile.every", "1s", "0", "10ms")),
        ({"ssh": {"lost_after": "2s"}}, ("ssh.lost_after", "5s", "2s")),
        ({"ray": {"lost_after": "2s"}}, ("ray.lost_after", "5s", "2s")),
        ({"ssh": {"hosts": ["a:2", "node1:2222"]}}, ("ssh.hosts[1]", "'node1:2222'", "1000", "SSH config")),
        ({"env": {"A": "1"}, "secret_env": {"A": {"secret": "s", "key": "k"}}}, ("secret_env.A", "env")),
        ({"topology": "tf-ps", "env": {"TF_CONFIG": "{}"}}, ("env.TF_CONFIG", "reserved")),
        ({"tensorboard": "~/events"}, ("tensorboard", "'~/events'", "full path")),
        ({"grace": "-5s"}, ("grace", "a duration such as 30s, 1h30m or 500ms", "'-5s'")),
        ({"image": "a b"}, ("image", "ghcr.io/acme/trainer:v1", "'a b'")),
    ],
)
def test_invalid_combinations(keys: dict[str, Any], fault: tuple[str, ...]) -> None:
    check_faults(parse_faults(minimal(**keys)), [fault])


@pytest.mark.parametrize(
    "name",
    [
        "STOKER_JOB",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PET_NNODES",
        "OMPI_MCA_plm_rsh_agent",
    ],
)
def test_reserved_env_variables(name: str) -> None:
    check_faults(parse_faults(minimal(env={name: "x"})), [(f"env.{name}", "reserved")])
    secret_env = {name: {"secret": "s", "key": "k"}}
    check_faults(parse_faults(minimal(secret_env=secret_env)), [(f"secret_env.{name}", "reserved")])


@pytest.mark.parametrize(
    "keys",
    [
        {"env": {"OMP_NUM_THREADS": 1, "TF_CONFIG": "mine", "RANKING": "x", "POD_NAME": "p"}},
        {"checkpoint": CLAIM, "workers": 4},
        {"checkpoint": {**CLAIM, "access": "rwx"}, "workers": {"min": 1, "max": 4}},
        {"checkpoint": CLAIM, "workers": 1, "topology": "mpi"},
        {"checkpoint": {"dir": "s3://bucket/x"}, "workers": {"min": 1, "max": 4}},
        {"data": {"sampling": "join", "via": "cluster"}, "workers": {"min": 1, "max": 4}},
        {"topology": "single", "processes_per_worker": 1, "program": {"command": ["bash", "-c", "a && b"]}},
        {"roles": {"ps": {"count": 0}, "evaluator": {"count": 0}}},
        {"program": {"script": "my train.py", "args": ["--text", "two words", "a=b c", "-", "--x=y z"]}},
        {"data": {"train": "shards/pets-{000000..000009}.tar"}, "hang_after": 0, "profile": {"every": 0}},
        {"tensorboard": "events", "grace": "1m30s", "labels": {"example.com/team": "v1.2", "empty": ""}},
    ],
)
def test_valid_combinations(keys: dict[str, Any]) -> None:
    job = parse_job(minimal(**keys), "job.yaml")
    assert parse_job(to_yaml(job), "again") == job


def test_number_of_workers_and_ranks() -> None:
    elastic = parse_job(minimal(workers={"min": 2, "max": 8}, resources={"gpu": 4}), "job.yaml")
    assert (elastic.is_elastic, elastic.min_workers, elastic.max_workers) == (True, 2, 8)
    assert elastic.ranks_of(0) == 4
    fixed = parse_job(minimal(workers=3, processes_per_worker=2, resources={"gpu": 4}), "job.yaml")
    assert (fixed.is_elastic, fixed.min_workers, fixed.max_workers, fixed.ranks) == (False, 3, 3, (2, 2, 2))
    assert parse_job(minimal(topology="single", resources={"gpu": 4}), "job.yaml").ranks == (1,)
    assert parse_job(MINIMAL, "job.yaml").ranks == (1,)

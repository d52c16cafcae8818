from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.core.spec import examine
from stoker.core.units import Bytes, Seconds
from stoker.errors import InputError, NotFoundError, SpecError
from stoker.jobs.reference import EXAMPLE, page
from stoker.jobs.spec import (
    Cache,
    Checkpoint,
    Data,
    Elastic,
    Job,
    Kubernetes,
    Profile,
    Program,
    Resources,
    RoleSpec,
    SecretFiles,
    SecretKey,
    Ssh,
    Volume,
    load_job,
    parse_job,
    schema,
    to_yaml,
)
from tests.support.paths import DOCS

PAGE = DOCS / "job-file.md"
SMALL = "name: a\nprogram: {script: train.py}\n"

NO_NAME = "name: expected a name of at most 40 small letters, digits and dashes, with no dash at an end, got "

# Every key of the design's example.
WHOLE = """
name: resnet50-imagenet
program:
  module: stoker.trainers.torch_image
  args: [--model, resnet50, --epochs, 90, --global-batch-size, 1024]
topology: tf-ps
workers: 4
processes_per_worker: auto
port: 29500
roles:
  ps: {count: 2, image: acme/ps, resources: {cpu: 4, memory: 8Gi}}
  evaluator: {count: 0}
  tensorboard: {count: 0, port: 6006}
image: ghcr.io/acme/trainer:v1
resources: {cpu: 8, memory: 32Gi, gpu: 1, gpu_type: nvidia-tesla-v100}
data:
  train: http://data:8080/imagenet/train
  val:   http://data:8080/imagenet/val
  cache: {dir: /cache, size: 200Gi}
  via: http://cache:3128
  sampling: exact
checkpoint: {dir: /checkpoint, claim: resnet50-ckpt, create: true, size: 10Gi, access: rwo, keep: 3}
volumes: [{claim: dataset, path: /data, read_only: true}]
profile: {every: 30}
env: {NCCL_DEBUG: WARN}
secret_env: {AWS_SECRET_ACCESS_KEY: {secret: aws, key: secret}}
secret_files: {/var/secrets/google: {secret: credential}}
labels: {team: vision}
retries: 3
kubernetes: {namespace: training, create_namespace: false, queue: gpu, node_selector: {}, tolerations: [],
             service_account: "", image_pull_secrets: [], image_pull_policy: IfNotPresent, ttl: 10m, deadline: 24h,
             patch: []}
ssh: {hosts: [node1, node2], user: train, workdir: /srv/train}
"""


def faults(text: str, *sets: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml", sets)
    return [str(fault) for fault in caught.value.faults]


def small(**more: object) -> str:
    return json.dumps({"name": "a", "program": {"script": "train.py"}, **more})


# --- Reading


def test_every_key_of_the_design() -> None:
    job = parse_job(WHOLE, "job.yaml")
    assert job.program.args == ("--model", "resnet50", "--epochs", "90", "--global-batch-size", "1024")
    assert job.roles["ps"].resources == Resources(cpu=4, memory=Bytes("8Gi"))
    assert job.data.cache == Cache(dir="/cache", size=Bytes("200Gi"))
    assert job.checkpoint.size == 10 * 2**30
    assert job.kubernetes.deadline == 86400
    assert job.secret_files == {"/var/secrets/google": SecretFiles(secret="credential")}
    assert parse_job(to_yaml(job), "again") == job


def test_defaults() -> None:
    job = parse_job(SMALL, "job.yaml")
    assert (job.topology, job.workers, job.processes_per_worker, job.port) == ("torchrun", 1, "auto", None)
    assert (job.retries, job.grace, job.hang_after, job.profile.every) == (3, 30, 600, 30)
    assert (job.tensorboard, job.data, job.checkpoint) == (False, Data(), Checkpoint())
    assert to_yaml(job) == "name: a\nprogram: {script: train.py}\n"


def test_a_key_without_a_value_is_left_out() -> None:
    text = "env:\n  # A: 1\nresources:\n  gpu:\n  cpu: 2\nroles:\ndata: {cache: {dir: }}\nworkers:\n"
    assert parse_job(SMALL + text, "job.yaml") == parse_job(SMALL + "resources: {cpu: 2}", "job.yaml")
    assert faults("name:\nprogram: {script: a.py}\nfoo:\nenv: {A: }")[1:] == [
        "env.A: expected text, got nothing",
        "name: missing (expected a name of at most 40 small letters, digits and dashes, with no dash at an end)",
    ]


@pytest.mark.parametrize(
    "word", ["1e-4", "0.10", "1.10", "0755", "0x1F", "1_000", "12:30", "2024-01-01", "yes", "true", "-1", ".5", "+1"]
)
def test_words_reach_the_program_as_they_are_written(word: str) -> None:
    text = f"name: a\nprogram: {{script: t.py, args: [--x, {word}]}}\nenv:\n  A: {word}\n"
    job = parse_job(text, "job.yaml")
    assert (job.program.args, job.env) == (("--x", word), {"A": word})
    assert parse_job(to_yaml(job), "again") == job
    assert parse_job(SMALL, "job.yaml", [f"env.A={word}"]).env == {"A": word}


def test_words_in_json_and_through_aliases() -> None:
    assert parse_job(small(env={"A": 1.5, "B": True, "C": 7, "D": "x"}), "job.json").env == {
        "A": "1.5",
        "B": "true",
        "C": "7",
        "D": "x",
    }
    aliased = f"{SMALL}port: &n 0o7\nenv: {{<<: {{A: 1e5}}, B: *n}}\n".replace("0o7", "7000")
    job = parse_job(aliased, "job.yaml")
    assert (job.port, job.env) == (7000, {"A": "1e5", "B": "7000"})


def test_other_types_do_not_become_text() -> None:
    assert faults("name: 12\nprogram: {script: 3, args: [[a], {b: 1}, ~]}\nimage: yes") == [
        NO_NAME + "12 (quote it)",
        "program.script: expected text that is not empty, got 3 (quote it)",
        "program.args[0]: expected text, got a list of 1",
        "program.args[1]: expected text, got a mapping",
        "program.args[2]: expected text, got nothing",
        "image: expected an image such as ghcr.io/acme/trainer:v1, got true "
        "(quote it: a bare on or yes or true means true)",
    ]


def test_dates_in_plain_parts_stay_text() -> None:
    job = parse_job(SMALL + "kubernetes: {tolerations: [{key: a, value: 2024-01-01, seconds: 5, x: null}]}", "job.yaml")
    assert job.kubernetes.tolerations == ({"key": "a", "value": "2024-01-01", "seconds": 5, "x": None},)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.yaml"
    with pytest.raises(NotFoundError, match=r"job\.yaml: cannot be read: no such file or directory$"):
        load_job(file)
    with pytest.raises(InputError, match=r"cannot be read: is a directory$"):
        load_job(tmp_path)
    file.write_text(SMALL)
    assert load_job(file, ["retries=0"]).retries == 0
    file.write_text("name: a\nprogram: [\n")
    with pytest.raises(SpecError, match=r"job\.yaml: not valid YAML: .* at line 3"):
        load_job(str(file))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(SMALL.encode())))
    assert load_job("-").name == "a"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"name: a")))
    with pytest.raises(SpecError, match=r"^standard input: program: missing"):
        load_job("-")


# --- Faults


def test_all_faults_at_once() -> None:
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
    assert faults(text) == [
        "name: given twice (lines 2 and 15)",
        "program.args: expected a list of words such as [--epochs, 90], got '--epochs 90'",
        "workers: expected a number of at least 1, {min: 2, max: 8}, or all, got 0",
        "processes_per_worker: expected 'auto' or an integer (at least 1), got 'many'",
        "topology: expected one of 'mpi', 'single', 'tf-mirrored', 'tf-ps', 'torchrun', got 'ddp'",
        "port: expected an integer (at least 1, at most 65535), got 99999",
        "resources.cpu: expected a number of cores such as 8 or 0.5, got '500m'",
        "resources.gpus: unknown key (did you mean 'gpu'?)",
        "data.cache.dir: missing: size says how large the cache may be, and nothing says where it is",
        "data.via: expected a URL such as http://cache:3128, or 'cluster', got 'cache:3128'",
        "data.sampling: expected one of 'exact', 'join', 'resampled', got 'often'",
        "checkpoint.access: expected one of 'rwo', 'rwx', got 'RWO'",
        "checkpoint.keep: expected an integer (at least 1), got 0",
        "env.1A: as a key: expected a name of letters, digits and underscores, got '1A'",
        "labels.team: expected at most 63 letters, digits, '-', '_' and '.', got 'a b'",
        "ssh.hosts[0]: expected a host name without spaces, got '-oProxyCommand=x'",
        "ssh.user: expected a user name without spaces, got 'a b'",
        "colour: unknown key (known: name, program, topology, workers, processes_per_worker, port, roles, image, "
        "resources, data, checkpoint, volumes, profile, env, secret_env, secret_files, labels, retries, grace, "
        "hang_after, tensorboard, kubernetes, mpi, ssh, ray)",
    ]


RWX = "checkpoint.access: rwo lets one machine mount the claim, and "
CLAIM = {"dir": "/c", "claim": "c"}


def test_combinations_are_told_beside_other_faults() -> None:
    text = "name: A\nprogram: {}\nworkers: 2\ntopology: {}\nenv: {{RANK: 1}}\ncheckpoint: {{claim: c}}\nretries: x\n"
    reserved = "env.RANK: is reserved: it is set for every process, from this file"
    assert faults(text.format("{script: a.py}", "single")) == [
        NO_NAME + "'A'",
        "checkpoint.dir: missing: say where the claim is mounted, for example /checkpoint",
        "retries: expected an integer (at least 0), got 'x'",
        "workers: topology single is one process, not 2: use torchrun",
        reserved,
    ]
    assert reserved not in faults(text.format("{script: a.py}", "ddp"))
    assert reserved in faults(text.format("[]", "torchrun"))
    assert faults("program: {command: [x]}\nenv: {RANK: 1}")[1:] == [
        "program.command: torchrun starts Python itself, and wants script or module; for a command, "
        "set topology: single",
        reserved,
    ]


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a.b", "a b", "a\n", "ä", "a" * 41])
def test_names(name: str) -> None:
    assert faults(small(name=name)) == [NO_NAME + repr(name)]
    assert parse_job(small(name="a" * 40), "job.yaml").name == "a" * 40


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ({}, "program: says nothing to run: give one of script, module and command"),
        (
            {"script": "a.py", "module": "b"},
            "program: gives script and module: exactly one of script, module and command can be",
        ),
        ({"script": "a.py --lr 1"}, "program.script: 'a.py --lr 1' holds more than a file: the rest belongs in args"),
        ({"script": "run.sh"}, "program.script: 'run.sh' is no Python file: write command: [bash, run.sh]"),
        (
            {"script": "~/a.py"},
            "program.script: '~/a.py' starts with ~, which only a shell expands: write the path out",
        ),
        (
            {"script": "a.py", "cwd": "$HOME"},
            "program.cwd: '$HOME' starts with $, which only a shell expands: write the path out",
        ),
        ({"module": "train.py"}, "program.module: 'train.py' is a file: give it as script, or leave out the .py"),
        ({"module": "a/b"}, "program.module: expected a module such as package.train, got 'a/b'"),
        (
            {"script": "a.py", "args": ["--lr 0.1"]},
            "program.args[0]: '--lr 0.1' is two words: write [--lr, 0.1] or --lr=0.1",
        ),
        ({"script": "a.py", "args": ["a\0b"]}, "program.args[0]: expected text, got 'a\\x00b'"),
        ({"script": "a.py", "arg": []}, "program.arg: unknown key (did you mean 'args'?)"),
        ("train.py", "program: expected a mapping, got 'train.py'"),
    ],
)
def test_programs(program: object, sentence: str) -> None:
    assert faults(small(program=program)) == [sentence]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"program": {"command": ["nvidia-smi"]}},
            "program.command: torchrun starts Python itself, and wants script or module; for a command, "
            "set topology: single",
        ),
        ({"topology": "single", "program": {"command": []}}, "program.command: is an empty list"),
        (
            {"topology": "single", "program": {"command": ["ls -l"]}},
            "program.command: is one word with spaces in it: write each word of its own, [ls, -l]",
        ),
        (
            {"topology": "single", "program": {"command": "ls -l"}},
            "program.command: expected a list of words such as [bash, run.sh], got 'ls -l'",
        ),
        ({"topology": "single", "workers": 2}, "workers: topology single is one process, not 2: use torchrun"),
        (
            {"topology": "single", "processes_per_worker": 2},
            "processes_per_worker: topology single is one process: leave it out",
        ),
        (
            {"topology": "tf-mirrored", "processes_per_worker": 2},
            "processes_per_worker: topology tf-mirrored runs one process on a worker, with all its GPUs: leave it out",
        ),
        (
            {"topology": "mpi", "workers": {"min": 1, "max": 2}},
            "workers: only torchrun can grow and shrink; mpi needs one number",
        ),
        ({"workers": {"min": 3, "max": 2}}, "workers: min is 3, more than max, which is 2"),
        ({"workers": {"min": 3}}, "workers.max: missing (expected an integer (at least 1))"),
        (
            {"roles": {"ps": {"count": 2}}},
            "roles.ps: topology torchrun has no such role (it has: none beside its workers)",
        ),
        (
            {"topology": "tf-mirrored", "roles": {"ps": {}}},
            "roles.ps: topology tf-mirrored has no such role (it has: evaluator, tensorboard)",
        ),
        (
            {"topology": "tf-ps", "roles": {"serving": {"count": 0}}},
            "roles.serving: topology tf-ps has no such role (it has: ps, chief, evaluator, tensorboard)",
        ),
        (
            {"topology": "tf-ps", "roles": {"worker": {"count": 4}}},
            "roles.worker: workers are described at the top: workers, image, resources, port",
        ),
        (
            {"topology": "tf-ps", "roles": {"evaluator": {"count": 2}}},
            "roles.evaluator.count: there is at most one evaluator, not 2",
        ),
        (
            {"topology": "tf-ps", "roles": {"ps": {"count": 0}}},
            "roles.ps.count: tf-ps needs at least one parameter server",
        ),
        (
            {"topology": "tf-ps", "roles": {"ps": {"resources": {"gpu": 1}}}},
            "roles.ps.resources.gpu: a parameter server gets no accelerator: leave it out",
        ),
        (
            {"resources": {"memory": 32}},
            "resources.memory: is 32 B, too little to be meant: write its unit, for example 32Gi",
        ),
        ({"resources": {"cpu": 0}}, "resources.cpu: expected a number of cores such as 8 or 0.5, got 0"),
        (
            {"data": {"train": "s3:/bucket/train"}},
            "data.train: 's3:/bucket/train' is neither a URL nor a path: a URL starts with s3://",
        ),
        (
            {"data": {"val": "~/val"}},
            "data.val: '~/val' starts with ~, which only a shell expands: write the path out",
        ),
        (
            {"data": {"cache": {"dir": "s3://x"}}},
            "data.cache.dir: 's3://x' is a URL, and the cache is a folder on each machine",
        ),
        (
            {"data": {"cache": {"dir": "/c", "size": 200}}},
            "data.cache.size: is 200 B, too little to be meant: write its unit, for example 200Gi",
        ),
        (
            {"checkpoint": {"dir": "http://x/y"}},
            "checkpoint.dir: 'http://x/y' cannot be written: give a folder, s3://… or gs://…",
        ),
        ({"checkpoint": {"create": True}}, "checkpoint.create: is about a claim, and none is named: give claim"),
        ({"checkpoint": {"size": "1Gi"}}, "checkpoint.size: is about a claim, and none is named: give claim"),
        (
            {"checkpoint": {"storage_class": "efs-sc", "claim": "c", "dir": "/c"}},
            "checkpoint.storage_class: is of a claim that is made, and create is not set: "
            "set create: true, or leave it out",
        ),
        (
            {"kubernetes": {"queue_priority": "high"}},
            "kubernetes.queue_priority: orders a job in its queue, and none is named: give queue, or priority_class",
        ),
        ({"kubernetes": {"shm": 8}}, "kubernetes.shm: is 8 B, too little to be meant: write its unit, for example 8Gi"),
        ({"mpi": {"sshd": []}}, "mpi.sshd: expected a list of words such as [/usr/sbin/sshd, -De], got an empty list"),
        (
            {"topology": "tf-ps", "roles": {"ps": {"expose": "node_port"}}},
            "roles.ps.expose: is for the role tensorboard alone: leave it out",
        ),
        (
            {"topology": "tf-ps", "roles": {"tensorboard": {"logdir": "/logs", "program": {"module": "board"}}}},
            "roles.tensorboard.logdir: is for stoker's own TensorBoard, and program is given: leave one out",
        ),
        (
            {"topology": "mpi", "roles": {"launcher": {"program": {"module": "train"}}}},
            "roles.launcher.program: the launcher runs mpirun, which starts the workers' program: leave it out",
        ),
        (
            {"topology": "tf-ps", "roles": {"evaluator": {"program": {"args": ["--eval"]}}}},
            "roles.evaluator.program: says nothing to run: give one of script, module and command",
        ),
        (
            {"checkpoint": {"claim": "c"}},
            "checkpoint.dir: missing: say where the claim is mounted, for example /checkpoint",
        ),
        (
            {"checkpoint": {"claim": "c", "dir": "s3://b/c"}},
            "checkpoint.claim: a bucket needs no claim: leave out claim, or the s3:// of dir",
        ),
        (
            {"checkpoint": {"claim": "c", "dir": "here"}},
            "checkpoint.dir: 'here' must be an absolute path, since a claim is mounted there",
        ),
        (
            {"checkpoint": {**CLAIM, "create": True}},
            "checkpoint.size: missing: say how large to make the claim, for example 10Gi",
        ),
        (
            {"checkpoint": {**CLAIM, "size": "1Gi"}},
            "checkpoint.size: is of a claim that is made, and create is not set: set create: true, or leave it out",
        ),
        (
            {"checkpoint": CLAIM, "workers": {"min": 1, "max": 2}},
            RWX + "rank 0 may be on any worker: use rwx, a bucket, or a fixed number of workers",
        ),
        (
            {"checkpoint": CLAIM, "workers": 2, "topology": "mpi"},
            RWX + "all workers of an MPIJob are alike: use rwx, a bucket, or one worker",
        ),
        (
            {"volumes": [{"claim": "a", "path": "/data"}, {"claim": "b", "path": "/data/"}]},
            "volumes[1].path: '/data/' is taken: volumes[0].path is mounted there",
        ),
        (
            {"volumes": [{"claim": "a", "path": "/c"}], "checkpoint": CLAIM},
            "volumes[0].path: '/c' is taken: checkpoint.dir is mounted there",
        ),
        (
            {"volumes": [{"claim": "a", "path": "/s"}], "secret_files": {"/s": {"secret": "s"}}},
            "secret_files[\"/s\"]: '/s' is taken: volumes[0].path is mounted there",
        ),
        (
            {"volumes": [{"claim": "a", "path": "data"}]},
            "volumes[0].path: expected an absolute path such as /data, got 'data'",
        ),
        ({"profile": {"every": 0.01}}, "profile.every: is 10ms: at most one look a second, and 0 for none"),
        (
            {"env": {"A": "1"}, "secret_env": {"A": {"secret": "s", "key": "k"}}},
            "secret_env.A: is in env too: give it once",
        ),
        (
            {"topology": "tf-ps", "env": {"TF_CONFIG": "{}"}},
            "env.TF_CONFIG: is reserved: it is set for every process, from this file",
        ),
        (
            {"tensorboard": "~/events"},
            "tensorboard: '~/events' starts with ~, which only a shell expands: write the path out",
        ),
        ({"grace": "-5s"}, "grace: expected a duration such as 30s, 1h30m or 500ms, or a number of seconds, got '-5s'"),
        ({"image": "a b"}, "image: expected an image such as ghcr.io/acme/trainer:v1, got 'a b'"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], sentence: str) -> None:
    assert faults(small(**more)) == [sentence]


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
def test_reserved_variables(name: str) -> None:
    sentence = "is reserved: it is set for every process, from this file"
    assert faults(small(env={name: "x"})) == [f"env.{name}: {sentence}"]
    assert faults(small(secret_env={name: {"secret": "s", "key": "k"}})) == [f"secret_env.{name}: {sentence}"]


@pytest.mark.parametrize(
    "more",
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
def test_what_can_be(more: dict[str, Any]) -> None:
    job = parse_job(small(**more), "job.yaml")
    assert parse_job(to_yaml(job), "again") == job


def test_numbers_of_workers_and_ranks() -> None:
    elastic = parse_job(small(workers={"min": 2, "max": 8}, resources={"gpu": 4}), "job.yaml")
    assert (elastic.is_elastic, elastic.min_workers, elastic.max_workers) == (True, 2, 8)
    assert elastic.ranks_per_worker == 4
    fixed = parse_job(small(workers=3, processes_per_worker=2, resources={"gpu": 4}), "job.yaml")
    assert (fixed.is_elastic, fixed.min_workers, fixed.max_workers, fixed.ranks_per_worker) == (False, 3, 3, 2)
    assert parse_job(small(topology="single", resources={"gpu": 4}), "job.yaml").ranks_per_worker == 1
    assert parse_job(SMALL, "job.yaml").ranks_per_worker == 1


# --- --set


def test_set() -> None:
    job = parse_job(
        SMALL + "resources: {gpu: 1, cpu: 2}\nssh: {hosts: [a, b]}\ndata: {via: 'http://c:1', train: x}\nenv: {B: 1}\n",
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
    assert job.resources == Resources(gpu=4)
    assert job.ssh.hosts == ("x", "b", "z")
    assert job.workers == Elastic(min=2, max=8)
    assert job.data == Data(train="x", cache=Cache(dir="/c"))
    assert job.program.args == ("--lr", "1e-4")
    assert job.env == {"A": "x=y"}
    assert job.labels == {"example.com/team": "vision", "a.b": "c"}
    assert job.kubernetes.tolerations == ({"key": "gpu"},)


def test_set_later_wins_and_lists_shrink() -> None:
    job = parse_job(SMALL + "ssh: {hosts: [a, b]}", "job.yaml", ["retries=1", "retries=2", "ssh.hosts[0]="])
    assert (job.retries, job.ssh.hosts) == (2, ("b",))


def test_set_changes_one_of_two_aliases() -> None:
    text = SMALL + "topology: tf-ps\nresources: &r {cpu: 2}\nroles: {ps: {resources: *r}}"
    job = parse_job(text, "job.yaml", ["resources.gpu=1"])
    assert (job.resources.gpu, job.roles["ps"].resources.gpu) == (1, 0)


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("resources.gpu", "--set 'resources.gpu' gives no value: write it as resources.gpu=4"),
        ("=4", "--set '=4' names no key: write it as resources.gpu=4 or ssh.hosts[0]=node1"),
        (".gpu=4", "--set '.gpu=4' names no key: write it as resources.gpu=4 or ssh.hosts[0]=node1"),
        ("[0]=4", "--set '[0]=4' names no key: write it as resources.gpu=4 or ssh.hosts[0]=node1"),
        ("a b=4", "--set 'a b=4' names no key: write it as resources.gpu=4 or ssh.hosts[0]=node1"),
        ("workers.min=2", "--set workers.min: workers is 4, and has nothing in it; set workers itself"),
        ("name.x=2", "--set name.x: name is 'a', and has nothing in it; set name itself"),
        ("name[0]=2", "--set name[0]: name is 'a', and has nothing in it; set name itself"),
        ("ssh.hosts[5]=x", "--set ssh.hosts[5]: ssh.hosts has 2 items, counted from 0"),
        ("ssh.hosts.a=x", "--set ssh.hosts.a: ssh.hosts is a list, so say which item, as in ssh.hosts[0]"),
        ("ssh[0]=x", "--set ssh[0]: ssh is a mapping, so name a key of it"),
        (
            "image=@x",
            "--set image: not valid YAML: found character that cannot start any token, at line 1, column 1 "
            "(the value is read as YAML: put quotes in it)",
        ),
        ("env={A: 1, A: 2}", "--set env: A: given twice (lines 1 and 1)"),
        (
            "resources.gpu=lots",
            "resources.gpu: expected an integer (at least 0), got 'lots' (from --set resources.gpu)",
        ),
        ("resources.gpus=1", "resources.gpus: unknown key (did you mean 'gpu'?) (from --set resources.gpus)"),
        ("resources={gpus: 1}", "resources.gpus: unknown key (did you mean 'gpu'?) (from --set resources)"),
        ("env[0]=1", "env: expected a mapping, got a list of 1 (from --set env[0])"),
        (
            "program.module=x",
            "program: gives script and module: exactly one of script, module and command can be "
            "(from --set program.module)",
        ),
        ("resource.gpu=1", "resource: unknown key (did you mean 'resources'?) (from --set resource.gpu)"),
        (
            "name=",
            "name: missing (expected a name of at most 40 small letters, digits and dashes, with no dash at an end)"
            " (from --set name)",
        ),
    ],
)
def test_what_cannot_be_set(assignment: str, sentence: str) -> None:
    assert faults(SMALL + "workers: 4\nssh: {hosts: [a, b]}", assignment) == [sentence]


def test_faults_of_the_file_and_of_set_come_together() -> None:
    assert faults("name: A\nprogram: {script: a.py}", "retries=x", "nope") == [
        "--set 'nope' gives no value: write it as resources.gpu=4",
        NO_NAME + "'A'",
        "retries: expected an integer (at least 0), got 'x' (from --set retries)",
    ]


@pytest.mark.parametrize("text", ["[1]", "5", "job"])
def test_what_is_no_mapping_cannot_be_overridden(text: str) -> None:
    (sentence,) = faults(text, "retries=1")
    assert sentence.startswith("expected a mapping, got")


# --- Writing

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
some = texts.filter(bool)
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
variables = st.from_regex(r"[A-Z_][A-Z0-9_]{0,6}", fullmatch=True)
paths = st.from_regex(r"/[a-z0-9]{1,4}", fullmatch=True)
values = st.from_regex(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?)?", fullmatch=True)
sizes = st.integers(2**20, 2**50).map(Bytes) | st.integers(1, 4000).map(lambda n: Bytes(f"{n}Gi"))
seconds = st.floats(1, 1e6).map(Seconds) | st.integers(0, 10**6).map(Seconds)
counts = st.integers(1, 9)
ports = st.integers(1, 65535)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
plain_mappings = st.lists(st.dictionaries(texts, plain, max_size=2), max_size=2).map(tuple)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=3).map(tuple)


def mapping(keys: st.SearchStrategy[Any], inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(keys, inner, max_size=2)


resources = st.builds(
    Resources, cpu=maybe(st.floats(0.1, 99)), memory=maybe(sizes), gpu=st.integers(0, 8), gpu_type=maybe(some)
)
SECTIONS: dict[str, st.SearchStrategy[Any]] = {
    "program": st.builds(Program, script=some, args=tuples(texts), cwd=maybe(some))
    | st.builds(Program, module=st.just("a.b"), args=tuples(texts)),
    "topology": st.sampled_from(["torchrun", "tf-ps"]),
    "workers": counts | st.builds(Elastic, min=st.integers(1, 3), max=st.integers(3, 9)),
    "processes_per_worker": st.just("auto") | counts,
    "port": maybe(ports),
    "roles": mapping(
        st.sampled_from(["ps", "evaluator"]),
        st.builds(
            RoleSpec,
            count=maybe(st.integers(0, 1)),
            image=maybe(names),
            resources=resources,
            port=maybe(ports),
            program=maybe(st.builds(Program, module=st.just("a.b"), args=tuples(texts))),
            node_selector=mapping(names, values),
        ),
    ),
    "image": maybe(names),
    "resources": resources,
    "data": st.builds(
        Data,
        train=maybe(some),
        val=maybe(some),
        cache=st.builds(Cache, dir=some, size=maybe(sizes)),
        via=st.sampled_from([None, "cluster", "http://c:3128"]),
        sampling=st.sampled_from(["exact", "join", "resampled"]),
    ),
    "checkpoint": st.builds(
        Checkpoint,
        dir=paths,
        claim=names,
        create=st.just(True),
        size=sizes,
        storage_class=maybe(names),
        access=st.just("rwx"),
        keep=counts,
    )
    | st.builds(Checkpoint, dir=maybe(some), keep=counts),
    "volumes": tuples(st.builds(Volume, claim=names, path=paths, read_only=st.booleans())),
    "profile": st.builds(Profile, every=seconds),
    "env": mapping(variables, texts),
    "secret_env": mapping(variables, st.builds(SecretKey, secret=names, key=some)),
    "secret_files": mapping(paths, st.builds(SecretFiles, secret=names)),
    "labels": mapping(names, values),
    "retries": st.integers(0, 9),
    "grace": seconds,
    "hang_after": seconds,
    "tensorboard": st.booleans() | some,
    "kubernetes": st.builds(
        Kubernetes,
        namespace=maybe(names),
        queue=names,
        queue_priority=maybe(names),
        priority_class=maybe(names),
        shm=maybe(sizes),
        user=maybe(st.integers(0, 9999)),
        node_selector=mapping(names, values),
        tolerations=plain_mappings,
        service_account=maybe(texts),
        image_pull_secrets=tuples(names),
        ttl=seconds,
        deadline=maybe(seconds),
        patch=plain_mappings,
    ),
    "ssh": st.builds(Ssh, hosts=tuples(names), user=maybe(names), workdir=maybe(some)),
}


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job with a few sections; all at once would take long and seldom be possible."""
    sections = draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=3, unique=True))
    given = {"program": Program(module="a"), **{name: draw(SECTIONS[name]) for name in sections}}
    return Job(name=draw(names), **given)


@settings(max_examples=150, deadline=None)
@given(job=jobs())
def test_writing_and_reading_is_the_identity(job: Job) -> None:
    text = to_yaml(job)
    try:
        again = parse_job(text, "job.yaml")
    except SpecError as error:
        assume(any("expected" in fault.what for fault in error.faults))  # others are combinations that cannot be
        raise
    assert again == job
    assert to_yaml(again) == text


# --- The schema and the page


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def as_json(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


@pytest.mark.parametrize("text", [WHOLE, EXAMPLE, SMALL, SMALL + "workers: {min: 1, max: 2}\nenv: {A: 1, B: yes}\n"])
def test_the_schema_takes_good_files(validator: Any, text: str) -> None:
    parse_job(text, "job.yaml")
    validator.validate(as_json(text))


@pytest.mark.parametrize(
    "text",
    [
        "name: a",
        "name: A_b\nprogram: {script: a.py}",
        "name: a\nprogram: {script: a.py, module: b}",
        "name: a\nprogram: {}",
        SMALL + "workers: 0",
        SMALL + "workers: {min: 1}",
        SMALL + "topology: ddp",
        SMALL + "resources: {gpus: 1}",
        SMALL + "env: {1A: b}",
        SMALL + "env: {A: [b]}",
        SMALL + "data: {sampling: often}",
        SMALL + "port: 0",
        SMALL + "colour: red",
        SMALL + "volumes: [{claim: a, path: b}]",
    ],
)
def test_the_schema_refuses_bad_files(validator: Any, text: str) -> None:
    faults(text)
    assert not validator.is_valid(as_json(text))


def test_every_field_is_described() -> None:
    described = schema()
    assert described["$schema"].endswith("2020-12/schema")
    for struct in described["$defs"].values():
        for name, field in struct["properties"].items():
            assert field.get("description"), f"{struct['title']}.{name}"


def test_the_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run: python -m stoker.jobs.reference > docs/job-file.md"


def test_the_example_works() -> None:
    value, found = examine({"name": "x"}, Job)
    assert (value, [fault.path for fault in found]) == (None, ["program"])
    assert parse_job(EXAMPLE, "example").name == "pets"
    assert EXAMPLE in page()

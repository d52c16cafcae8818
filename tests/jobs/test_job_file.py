"""Read and write job files; their JSON Schema and their reference page."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.core.spec import decode_partial
from stoker.core.units import Bytes, Seconds
from stoker.errors import InputError, NotFoundError, SpecError
from stoker.jobs.reference import EXAMPLE, render_page
from stoker.jobs.spec import (
    CacheSpec,
    CheckpointSpec,
    DataSpec,
    ElasticSpec,
    JobSpec,
    KubernetesSpec,
    ProfileSpec,
    ProgramSpec,
    ResourcesSpec,
    RoleSpec,
    SecretFilesSpec,
    SecretKeySpec,
    SshSpec,
    VolumeSpec,
    job_schema,
    load_job,
    parse_job,
    to_yaml,
)
from tests.jobs.job_files import MINIMAL, check_faults, minimal, parse_faults
from tests.support.paths import DOCS

PAGE = DOCS / "job-file.md"

# Every key of the design's example.
FULL = """
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


# --- Reading


def test_every_key_of_the_design_is_parsed() -> None:
    job = parse_job(FULL, "job.yaml")
    assert job.program.args == ("--model", "resnet50", "--epochs", "90", "--global-batch-size", "1024")
    assert job.roles["ps"].resources == ResourcesSpec(cpu=4, memory=Bytes("8Gi"))
    assert job.data.cache == CacheSpec(dir="/cache", size=Bytes("200Gi"))
    assert job.checkpoint.size == 10 * 2**30
    assert job.kubernetes.deadline == 86400
    assert job.secret_files == {"/var/secrets/google": SecretFilesSpec(secret="credential")}
    assert parse_job(to_yaml(job), "again") == job


def test_defaults() -> None:
    job = parse_job(MINIMAL, "job.yaml")
    assert (job.topology, job.workers, job.processes_per_worker, job.port) == ("torchrun", "auto", "auto", None)
    assert (job.retries, job.grace, job.hang_after, job.profile.every) == (3, 30, 600, 30)
    assert (job.tensorboard, job.data, job.checkpoint) == (False, DataSpec(), CheckpointSpec())
    assert to_yaml(job) == "name: a\nprogram: {script: train.py}\n"


def test_key_without_a_value_is_ignored() -> None:
    text = "env:\n  # A: 1\nresources:\n  gpu:\n  cpu: 2\nroles:\ndata: {cache: {dir: }}\nworkers:\n"
    assert parse_job(MINIMAL + text, "job.yaml") == parse_job(MINIMAL + "resources: {cpu: 2}", "job.yaml")
    check_faults(
        parse_faults("name:\nprogram: {script: a.py}\nfoo:\nenv: {A: }"),
        [("name", "missing"), ("foo", "unknown key"), ("env.A", "a string", "null")],
    )


@pytest.mark.parametrize(
    "word", ["1e-4", "0.10", "1.10", "0755", "0x1F", "1_000", "12:30", "2024-01-01", "yes", "true", "-1", ".5", "+1"]
)
def test_arguments_and_env_are_passed_verbatim(word: str) -> None:
    text = f"name: a\nprogram: {{script: t.py, args: [--x, {word}]}}\nenv:\n  A: {word}\n"
    job = parse_job(text, "job.yaml")
    assert (job.program.args, job.env) == (("--x", word), {"A": word})
    assert parse_job(to_yaml(job), "again") == job
    assert parse_job(MINIMAL, "job.yaml", [f"env.A={word}"]).env == {"A": word}


def test_verbatim_strings_in_json_and_through_aliases() -> None:
    assert parse_job(minimal(env={"A": 1.5, "B": True, "C": 7, "D": "x"}), "job.json").env == {
        "A": "1.5",
        "B": "true",
        "C": "7",
        "D": "x",
    }
    aliased = f"{MINIMAL}port: &n 0o7\nenv: {{<<: {{A: 1e5}}, B: *n}}\n".replace("0o7", "7000")
    job = parse_job(aliased, "job.yaml")
    assert (job.port, job.env) == (7000, {"A": "1e5", "B": "7000"})


def test_other_types_do_not_become_strings() -> None:
    check_faults(
        parse_faults("name: 12\nprogram: {script: 3, args: [[a], {b: 1}, ~]}\nimage: yes"),
        [
            ("name", "got 12 (quote it)"),
            ("program.script", "a non-empty string", "got 3 (quote it)"),
            ("program.args[0]", "a string", "a list of length 1"),
            ("program.args[1]", "a string", "a mapping"),
            ("program.args[2]", "a string", "null"),
            ("image", "ghcr.io/acme/trainer:v1", "got true", "quote it", "on, yes, true"),
        ],
    )


def test_dates_in_untyped_parts_stay_strings() -> None:
    job = parse_job(
        MINIMAL + "kubernetes: {tolerations: [{key: a, value: 2024-01-01, seconds: 5, x: null}]}", "job.yaml"
    )
    assert job.kubernetes.tolerations == ({"key": "a", "value": "2024-01-01", "seconds": 5, "x": None},)


def test_load_job_reads_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.yaml"
    with pytest.raises(NotFoundError, match=r"no such file or directory$") as caught:
        load_job(file)
    assert caught.value.where == str(file)
    with pytest.raises(InputError, match=r"is a directory$"):
        load_job(tmp_path)
    file.write_text(MINIMAL)
    assert load_job(file, ["retries=0"]).retries == 0
    file.write_text("name: a\nprogram: [\n")
    with pytest.raises(SpecError, match=r"job\.yaml: .*\bline 3\b"):
        load_job(str(file))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(MINIMAL.encode())))
    assert load_job("-").name == "a"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"name: a")))
    with pytest.raises(SpecError, match=r"^standard input:1: program: "):
        load_job("-")


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
    ResourcesSpec, cpu=maybe(st.floats(0.1, 99)), memory=maybe(sizes), gpu=st.integers(0, 8), gpu_type=maybe(some)
)
SECTIONS: dict[str, st.SearchStrategy[Any]] = {
    "program": st.builds(ProgramSpec, script=some, args=tuples(texts), cwd=maybe(some))
    | st.builds(ProgramSpec, module=st.just("a.b"), args=tuples(texts)),
    "topology": st.sampled_from(["torchrun", "tf-ps"]),
    "workers": counts | st.builds(ElasticSpec, min=st.integers(1, 3), max=st.integers(3, 9)),
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
            program=maybe(st.builds(ProgramSpec, module=st.just("a.b"), args=tuples(texts))),
            node_selector=mapping(names, values),
        ),
    ),
    "image": maybe(names),
    "resources": resources,
    "data": st.builds(
        DataSpec,
        train=maybe(some),
        val=maybe(some),
        cache=st.builds(CacheSpec, dir=some, size=maybe(sizes)),
        via=st.sampled_from([None, "cluster", "http://c:3128"]),
        sampling=st.sampled_from(["exact", "join", "resampled"]),
    ),
    "checkpoint": st.builds(
        CheckpointSpec,
        dir=paths,
        claim=names,
        create=st.just(True),
        size=sizes,
        storage_class=maybe(names),
        access=st.just("rwx"),
        keep=counts,
    )
    | st.builds(CheckpointSpec, dir=maybe(some), keep=counts),
    "volumes": tuples(st.builds(VolumeSpec, claim=names, path=paths, read_only=st.booleans())),
    "profile": st.builds(ProfileSpec, every=seconds),
    "env": mapping(variables, texts),
    "secret_env": mapping(variables, st.builds(SecretKeySpec, secret=names, key=some)),
    "secret_files": mapping(paths, st.builds(SecretFilesSpec, secret=names)),
    "labels": mapping(names, values),
    "retries": st.integers(0, 9),
    "grace": seconds,
    "hang_after": seconds,
    "tensorboard": st.booleans() | some,
    "kubernetes": st.builds(
        KubernetesSpec,
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
    "ssh": st.builds(SshSpec, hosts=tuples(names), user=maybe(names), workdir=maybe(some)),
}


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """Draw a job with a few sections; all of them at once would be slow and rarely valid."""
    sections = draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=3, unique=True))
    keys = {"program": ProgramSpec(module="a"), **{name: draw(SECTIONS[name]) for name in sections}}
    return JobSpec(name=draw(names), **keys)


@settings(max_examples=150, deadline=None)
@given(job=jobs())
def test_yaml_round_trip(job: JobSpec) -> None:
    text = to_yaml(job)
    try:
        again = parse_job(text, "job.yaml")
    except SpecError as error:
        assume(any("expected" in fault.what for fault in error.faults))  # the others are invalid combinations
        raise
    assert again == job
    assert to_yaml(again) == text


# --- JSON Schema and reference page


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(job_schema())
    return jsonschema.Draft202012Validator(job_schema())


def parse_yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


@pytest.mark.parametrize("text", [FULL, EXAMPLE, MINIMAL, MINIMAL + "workers: {min: 1, max: 2}\nenv: {A: 1, B: yes}\n"])
def test_schema_accepts_valid_files(validator: Any, text: str) -> None:
    parse_job(text, "job.yaml")
    validator.validate(parse_yaml(text))


@pytest.mark.parametrize(
    "text",
    [
        "name: a",
        "name: A_b\nprogram: {script: a.py}",
        "name: a\nprogram: {script: a.py, module: b}",
        "name: a\nprogram: {}",
        MINIMAL + "workers: 0",
        MINIMAL + "workers: {min: 1}",
        MINIMAL + "topology: ddp",
        MINIMAL + "resources: {gpus: 1}",
        MINIMAL + "env: {1A: b}",
        MINIMAL + "env: {A: [b]}",
        MINIMAL + "data: {sampling: often}",
        MINIMAL + "port: 0",
        MINIMAL + "colour: red",
        MINIMAL + "volumes: [{claim: a, path: b}]",
    ],
)
def test_schema_rejects_invalid_files(validator: Any, text: str) -> None:
    parse_faults(text)
    assert not validator.is_valid(parse_yaml(text))


def test_every_field_has_a_description() -> None:
    document = job_schema()
    assert document["$schema"].endswith("2020-12/schema")
    for struct in document["$defs"].values():
        for name, field in struct["properties"].items():
            assert field.get("description"), f"{struct['title']}.{name}"


def test_reference_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PAGE.write_text(render_page())
    assert PAGE.read_text() == render_page(), "run: python -m stoker.jobs.reference > docs/job-file.md"


def test_example_of_the_reference_page_is_valid() -> None:
    _, faults = decode_partial({"name": "x"}, JobSpec)
    assert [fault.path for fault in faults] == ["program"]
    assert parse_job(EXAMPLE, "example").name == "pets"
    assert EXAMPLE in render_page()

"""Rendered manifests of every topology and option, without a cluster: valid, consistent, golden, injection-safe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.spec import decode
from stoker.core.yaml_io import to_yaml_stream
from stoker.errors import SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import AddressBook, Command, Slot, list_slots, render_command
from stoker.kube.objects import GPU_RESOURCE, INDEX_LABEL, JOB_LABEL, ROLE_LABEL, Manifest
from stoker.launchers.kubernetes.addresses import get_role_port, slot_hostname
from stoker.launchers.kubernetes.manifests import build_manifests
from stoker.launchers.kubernetes.mpijob import DNS_TIMEOUT_S
from stoker.launchers.kubernetes.run_objects import get_pod_templates
from stoker.launchers.kubernetes.scripts import CODE_DIR, SCRIPTS_DIR
from tests.support import paths
from tests.support.crds import load_schema, validate

GOLDEN = paths.GOLDEN / "kubernetes"
VERSION = "1.37"
BASE: dict[str, Any] = {"name": "pets", "image": "ghcr.io/acme/trainer:v1"}
MODULE = {"program": {"module": "acme.train", "args": ["--epochs", "90"]}}
ROLES = {"ps": {"count": 2}, "evaluator": {"count": 1}, "tensorboard": {"count": 1, "logdir": "gs://b/logs"}}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "single": {"topology": "single"},
    "torchrun": {"topology": "torchrun", "workers": 3},
    "torchrun-groups": {
        "topology": "torchrun",
        "workers": [{"count": 2, "resources": {"gpu": 2, "cpu": 4}}, {"count": 1, "resources": {"gpu": 1}}],
    },
    "torchrun-elastic": {"topology": "torchrun", "workers": {"min": 2, "max": 4}},
    "mpi": {"topology": "mpi", "workers": 2},
    "tf-ps": {"topology": "tf-ps", "workers": 2, "roles": ROLES},
    "tf-ps-no-chief": {"topology": "tf-ps", "workers": 2, "roles": {"chief": {"count": 0}}},
    "tf-mirrored": {"topology": "tf-mirrored", "workers": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpus": {"resources": {"cpu": 7.5, "memory": "32Gi", "gpu": 2, "gpu_type": "nvidia-tesla-v100"}},
    "created claim": {
        "checkpoint": {"dir": "/ckpt", "claim": "pets-ckpt", "create": True, "size": "10Gi", "storage_class": "efs-sc"}
    },
    "shared claim": {"checkpoint": {"dir": "/ckpt", "claim": "pets-ckpt", "access": "rwx"}},
    "bucket": {"checkpoint": {"dir": "s3://bucket/pets"}},
    "volumes": {"volumes": [{"claim": "dataset", "path": "/data", "read_only": True}]},
    "secrets": {
        "secret_env": {"AWS_SECRET_ACCESS_KEY": {"secret": "aws", "key": "secret"}},
        "secret_files": {"/var/secrets/google": {"secret": "credential"}},
    },
    "data": {"data": {"train": "http://data/train", "cache": {"dir": "/cache", "size": "100Gi"}, "via": "cluster"}},
    "special characters": {
        "env": {"GREETING": "a 'b' \"c\" $(HOME) `id`", "EMPTY": ""},
        "labels": {"team": "vision", "a.b/c": ""},
    },
    "no retries, no profile": {"retries": 0, "profile": {"every": 0}, "grace": "1m30s"},
    "namespace": {"kubernetes": {"namespace": "training", "create_namespace": True}},
    "queue": {"kubernetes": {"queue": "gpu", "queue_priority": "high", "priority_class": "urgent"}},
    "nodes": {
        "kubernetes": {
            "node_selector": {"pool": "gpu"},
            "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
            "service_account": "trainer",
            "image_pull_secrets": ["registry"],
            "image_pull_policy": "Always",
        }
    },
    "limits": {"kubernetes": {"shm": "8Gi", "user": 1000, "group": 1000, "ttl": "1h", "deadline": "1d"}},
    "patch": {
        "kubernetes": {
            "patch": [
                {"kind": "Job", "spec": {"template": {"metadata": {"annotations": {"a": "b"}}}}},
                {"kind": "ConfigMap", "metadata": {"annotations": {"c": "d"}}},
            ]
        }
    },
    "port": {"port": 5000},
}


def job_of(**keys: Any) -> JobSpec:
    return decode({**BASE, **MODULE, **keys}, JobSpec)


def is_possible(topology: str, option: str) -> bool:
    """Whether a topology can use a claim that one node only can mount: not if all workers or an observer need it."""
    return not (topology in ("mpi", "torchrun-elastic", "tf-ps") and option == "created claim")


def combine_options() -> dict[str, Any]:
    """Combine all options that are compatible."""
    keys: dict[str, Any] = {}
    kubernetes: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if name != "bucket" and name != "created claim":
            kubernetes |= option.get("kubernetes", {})
            keys |= option
    return {**keys, "kubernetes": kubernetes}


def adapt_patch(topology: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Patch the MPIJob instead of the Job, since a patch that matches nothing is a fault."""
    if topology != "mpi" or "patch" not in keys.get("kubernetes", {}):
        return keys
    patch = [{"kind": "MPIJob", "metadata": {"annotations": {"a": "b"}}}]
    return {**keys, "kubernetes": {**keys["kubernetes"], "patch": patch}}


CASES = [
    pytest.param({**TOPOLOGIES[topology], **adapt_patch(topology, keys)}, id=f"{topology}-{option}")
    for topology in TOPOLOGIES
    for option, keys in (*OPTIONS.items(), ("everything", combine_options()))
    if is_possible(topology, option)
]


def render(job: JobSpec) -> list[Manifest]:
    objects: list[Manifest] = LAUNCHERS.get("k8s")().render(job).objects
    return objects


# --- Schemas


@pytest.mark.parametrize("keys", CASES)
def test_objects_match_the_kubernetes_schemas(keys: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for obj in render(job_of(**keys)):
        if obj["metadata"]["labels"].get(INDEX_LABEL, "0") != "0":  # like the first of its role
            continue
        if obj["kind"] != "MPIJob":
            validate(obj, VERSION, strict=True)
            continue
        for template in get_pod_templates(obj):
            metadata = {"name": "any", **template["metadata"]}
            validate({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}, VERSION, strict=True)


@pytest.mark.parametrize("keys", [case for case in CASES if str(case.id).startswith("mpi")])
def test_mpijob_matches_its_crd(keys: dict[str, Any]) -> None:
    schema = load_schema("mpi-operator/kubeflow.org_mpijobs.yaml", "v2beta1")
    (mpijob,) = [obj for obj in render(job_of(**keys)) if obj["kind"] == "MPIJob"]
    assert list(validate(mpijob, schema)) == []


def test_schema_validation_finds_misspelled_fields() -> None:
    schema = load_schema("mpi-operator/kubeflow.org_mpijobs.yaml", "v2beta1")
    (mpijob,) = [obj for obj in render(job_of(**TOPOLOGIES["mpi"])) if obj["kind"] == "MPIJob"]
    mpijob["spec"]["slotPerWorker"] = mpijob["spec"].pop("slotsPerWorker")
    mpijob["spec"]["mpiImplementation"] = "OpenMpi"
    pod = mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["containers"][0]["readinessProbes"] = pod["containers"][0].pop("readinessProbe")
    mpijob["spec"]["runPolicy"]["backoffLimit"] = "3"
    assert [fault.partition(": ")[::2] for fault in validate(mpijob, schema)] == [
        (".spec.mpiImplementation", "'OpenMpi' is not one of ['OpenMPI', 'Intel', 'MPICH']"),
        (".spec.runPolicy.backoffLimit", "'3' is not of type integer"),
        (".spec.mpiReplicaSpecs.Worker.template.spec.containers[0].readinessProbes", "unknown"),
        (".spec.slotPerWorker", "unknown"),
    ]


# --- References between objects


@pytest.mark.parametrize("keys", CASES)
def test_referenced_objects_exist(keys: dict[str, Any]) -> None:
    job = job_of(**keys)
    objects = render(job)
    by_kind: dict[str, dict[str, Manifest]] = {}
    for obj in objects:
        assert obj["metadata"]["name"] not in by_kind.setdefault(obj["kind"], {})
        by_kind[obj["kind"]][obj["metadata"]["name"]] = obj
    (config,) = by_kind["ConfigMap"].values()
    for obj in objects:
        assert obj["kind"] == "Namespace" or obj["metadata"].get("namespace") == job.kubernetes.namespace
        for template in get_pod_templates(obj):
            _check_pod(job, template["spec"], config)
            labels = template["metadata"]["labels"]
            assert labels.items() >= {JOB_LABEL: job.name, **job.labels}.items()
        if obj["kind"] == "Service":
            selector = obj["spec"]["selector"].items()
            pods = [template["metadata"] for each in objects for template in get_pod_templates(each)]
            assert any(selector <= pod["labels"].items() for pod in pods)


def _check_pod(job: JobSpec, pod: Manifest, config: Manifest) -> None:
    (main,) = pod["containers"]
    assert main["name"] == "main"
    names = [volume["name"] for volume in pod["volumes"]]
    mounts = [mount["mountPath"] for mount in main["volumeMounts"]]
    variables = [variable["name"] for variable in main["env"]]
    for unique in (names, mounts, variables):
        assert len(set(unique)) == len(unique)
    assert sorted(mount["name"] for mount in main["volumeMounts"]) == sorted(names)
    for volume in pod["volumes"]:
        for item in volume.get("configMap", {}).get("items", []):
            assert volume["configMap"]["name"] == config["metadata"]["name"]
            assert item["key"] in {**config["data"], **config.get("binaryData", {})}
    shell, script = main["command"]
    assert shell == "/bin/sh"
    assert script.removeprefix(f"{SCRIPTS_DIR}/") in config["data"]


def test_only_workers_request_gpus() -> None:
    for topology in ("mpi", "tf-ps", "tf-mirrored"):
        for obj in render(job_of(**{**TOPOLOGIES[topology], **OPTIONS["gpus"]})):
            for template in get_pod_templates(obj):
                pod, (main,) = template["spec"], template["spec"]["containers"]
                is_worker = template["metadata"]["labels"][ROLE_LABEL] == "worker"
                amounts = main.get("resources", {})
                assert [GPU_RESOURCE in amounts.get(kind, {}) for kind in ("requests", "limits")] == [is_worker] * 2
                assert ("affinity" in pod) == is_worker
                assert any(toleration["key"] == GPU_RESOURCE for toleration in pod.get("tolerations", [])) == is_worker
                if is_worker:
                    assert amounts["requests"] == amounts["limits"]
                    assert amounts["limits"] == {"cpu": "7500m", "memory": str(32 << 30), GPU_RESOURCE: "2"}


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("single", {"worker"}),
        ("torchrun", {"worker of pets-chief"}),
        ("torchrun-groups", {"worker of pets-chief"}),
        ("tf-mirrored", {"worker of pets-worker-0"}),
        ("tf-ps", {"chief of pets-chief-0"}),
        ("tf-ps-no-chief", {"worker of pets-worker-0"}),
    ],
)
def test_single_node_claim_is_mounted_by_the_checkpoint_writer_only(topology: str, expected: set[str]) -> None:
    roles = {name: role for name, role in TOPOLOGIES[topology].get("roles", {}).items() if name in ("ps", "chief")}
    mounted_by = {
        template["metadata"]["labels"][ROLE_LABEL] + f" of {obj['metadata']['name']}" * (topology != "single")
        for obj in render(job_of(**{**TOPOLOGIES[topology], **OPTIONS["created claim"], "roles": roles}))
        for template in get_pod_templates(obj)
        if any("persistentVolumeClaim" in volume for volume in template["spec"]["volumes"])
    }
    assert mounted_by == expected


def test_shared_claim_is_mounted_by_all_pods() -> None:
    for keys in TOPOLOGIES.values():
        for obj in render(job_of(**{**keys, **OPTIONS["shared claim"]})):
            for template in get_pod_templates(obj):
                assert any("persistentVolumeClaim" in volume for volume in template["spec"]["volumes"])


@pytest.mark.parametrize("topology", ["tf-ps", "tf-ps-no-chief", "tf-mirrored"])
def test_every_address_of_a_tf_cluster_is_a_service(topology: str) -> None:
    job = job_of(**{**TOPOLOGIES[topology], "port": 5000})
    objects = render(job)
    (config,) = [obj for obj in objects if obj["kind"] == "ConfigMap"]
    services = {obj["metadata"]["name"]: obj["spec"] for obj in objects if obj["kind"] == "Service"}
    cluster = json.loads(config["data"]["cluster.json"])
    for role, addresses in cluster.items():
        for index, address in enumerate(addresses):
            name, _, port = address.partition(":")
            assert [str(entry["port"]) for entry in services[name]["ports"]] == [port]
            assert services[name]["selector"] == {JOB_LABEL: "pets", ROLE_LABEL: role, INDEX_LABEL: str(index)}


def test_tensorboard_is_exposed_as_configured() -> None:
    board = {"count": 1, "logdir": "/logs", "port": 7000, "ingress": "board.example.com"}

    def get_service_and_ingress(expose: str) -> tuple[Manifest, Manifest]:
        job = job_of(topology="tf-mirrored", roles={"tensorboard": {**board, "expose": expose}})
        objects = {(obj["kind"], obj["metadata"]["name"]): obj.get("spec", {}) for obj in render(job)}
        return objects[("Service", "pets-tensorboard-0")], objects[("Ingress", "pets-tensorboard-0")]

    types = {
        expose: get_service_and_ingress(expose)[0].get("type") for expose in ("cluster", "node_port", "load_balancer")
    }
    assert types == {"cluster": None, "node_port": "NodePort", "load_balancer": "LoadBalancer"}
    (rule,) = get_service_and_ingress("cluster")[1]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["backend"]["service"]["port"]["number"]) == ("board.example.com", 7000)


def test_containers_have_least_privilege() -> None:
    for keys in TOPOLOGIES.values():
        for obj in render(job_of(**keys)):
            for template in get_pod_templates(obj):
                pod, (main,) = template["spec"], template["spec"]["containers"]
                assert pod["automountServiceAccountToken"] is False
                assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                assert main["securityContext"]["allowPrivilegeEscalation"] is False
                assert main["securityContext"]["capabilities"]["drop"] == ["ALL"]
                is_sshd = obj["kind"] == "MPIJob" and template["metadata"]["labels"][ROLE_LABEL] == "worker"
                assert ("add" in main["securityContext"]["capabilities"]) == is_sshd


def test_secrets_are_only_referenced() -> None:
    job = job_of(**{**TOPOLOGIES["mpi"], **OPTIONS["secrets"]})
    text = to_yaml_stream(render(job))
    assert "kind: Secret" not in text
    for obj in render(job):
        for template in get_pod_templates(obj):
            env = template["spec"]["containers"][0]["env"]
            (variable,) = [variable for variable in env if variable["name"].startswith("AWS")]
            assert variable["valueFrom"] == {"secretKeyRef": {"name": "aws", "key": "secret"}}


# --- MPIJob


def test_mpijob_waits_for_sshd_with_a_timeout() -> None:
    keys = {"resources": {"gpu": 4}, "retries": 2, "mpi": {"sshd_port": 2222, "ssh_dir": "/home/mpi/.ssh"}}
    keys |= {"kubernetes": {"ttl": "1h", "deadline": "1d", "user": 1000, "queue": "gpu"}}
    objects = render(job_of(**{**TOPOLOGIES["mpi"], **keys}))
    (mpijob,) = [obj for obj in objects if obj["kind"] == "MPIJob"]
    spec = mpijob["spec"]
    assert (spec["slotsPerWorker"], spec["sshAuthMountPath"]) == (4, "/home/mpi/.ssh")
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": 3600,
        "activeDeadlineSeconds": 86400,
    }
    assert mpijob["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    assert (launcher["replicas"], worker["replicas"]) == (1, 2)
    (main,) = worker["template"]["spec"]["containers"]
    assert main["readinessProbe"]["tcpSocket"] == main["startupProbe"]["tcpSocket"] == {"port": 2222}
    assert main["startupProbe"]["periodSeconds"] * main["startupProbe"]["failureThreshold"] == 300
    assert "add" not in main["securityContext"]["capabilities"]  # sshd does not run as root
    (config,) = [obj for obj in objects if obj["kind"] == "ConfigMap"]
    assert config["data"]["worker.sh"].endswith("exec /usr/sbin/sshd -De -o StrictModes=no -o LogLevel=FATAL -p 2222\n")
    words = config["data"]["launcher.sh"].splitlines()[-1].split()
    assert words[words.index("--host") + 1] == "pets-worker-0.pets:4,pets-worker-1.pets:4"
    assert words[words.index("-np") + 1] == "8"
    assert "-p 2222'" in config["data"]["launcher.sh"]


def test_mpi_launcher_gives_up_on_names_that_do_not_resolve(tmp_path: Path) -> None:
    job = job_of(**TOPOLOGIES["mpi"])
    container = Container(job, "launcher", tmp_path)
    container.add_program("getent", "exit 2")
    container.add_program(
        "date", f"n=$(cat {tmp_path}/now 2>/dev/null || echo 0); echo $n; echo $((n + 60)) >{tmp_path}/now"
    )
    container.add_program("sleep", "exit 0")
    completed = container.run()
    assert completed.returncode == 1
    (line,) = completed.stderr.splitlines()
    assert line.startswith("stoker: ")
    assert "pets-worker-0.pets" in line
    assert f"{DNS_TIMEOUT_S} s" in line


# --- Golden files


def _to_golden(objects: list[Manifest]) -> str:
    """Format objects without the Python files that stoker ships."""
    copied = json.loads(json.dumps(objects))
    for obj in copied:
        if obj["kind"] == "ConfigMap":
            obj["data"] = {name: text if not name.endswith(".py") else "…" for name, text in obj["data"].items()}
    return to_yaml_stream(copied)


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_golden(topology: str, request: pytest.FixtureRequest) -> None:
    keys = {**TOPOLOGIES[topology], **OPTIONS["gpus"], **OPTIONS["volumes"], **OPTIONS["special characters"]}
    claim = "shared claim" if not is_possible(topology, "created claim") else "created claim"
    text = _to_golden(render(job_of(**keys, **OPTIONS[claim])))
    path = GOLDEN / f"{topology}.yaml"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), "run: pytest tests/launchers/kubernetes --update-golden"


# --- Names and sizes


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_names_of_40_characters_fit_with_every_suffix(topology: str) -> None:
    keys = dict(TOPOLOGIES[topology])
    if "workers" in keys and keys["workers"] != {"min": 2, "max": 4}:
        keys["workers"] = 1000
    job = job_of(name="a" * 40, **keys)
    names = [obj["metadata"]["name"] for obj in render(job)]
    names += [slot_hostname(job, slot.role, slot.index).partition(".")[0] for slot in list_slots(job)]
    assert max(map(len, names)) + len("-0-abcde") <= 63
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in names)


def test_name_that_is_too_long() -> None:
    job = msgspec.structs.replace(job_of(**TOPOLOGIES["tf-ps"]), name="a" * 55)
    with pytest.raises(SpecError, match=r"name: .*a+-tensorboard-0 .*\b69\b.*\b63\b"):
        render(job)


@pytest.mark.parametrize("topology", ["torchrun", "mpi", "tf-ps", "tf-mirrored"])
def test_config_map_of_a_thousand_workers_fits(topology: str) -> None:
    job = job_of(name="a" * 40, **{**TOPOLOGIES[topology], "workers": 1000})
    objects = render(job)
    (config,) = [obj for obj in objects if obj["kind"] == "ConfigMap"]
    assert len(json.dumps(config).encode()) < 1 << 20
    if topology in ("torchrun", "mpi"):
        assert len(objects) <= 3
    (largest,) = sorted(len(json.dumps(obj)) for obj in objects if obj["kind"] in ("Job", "MPIJob"))[-1:]
    assert largest < 1 << 17


# --- Patches


def test_patches_are_merged() -> None:
    patches = [
        {"kind": "Job", "metadata": {"name": "pets-ps-0", "labels": {"team": None, "tier": "ps"}}},
        {"kind": "Job", "spec": {"ttlSecondsAfterFinished": None, "template": {"spec": {"hostNetwork": True}}}},
        {"kind": "Service", "spec": {"selector": None}},
    ]
    keys = {**TOPOLOGIES["tf-ps"], "labels": {"team": "vision"}}
    before, after = (
        {(obj["kind"], obj["metadata"]["name"]): obj for obj in render(job_of(**keys, kubernetes=settings))}
        for settings in ({}, {"patch": patches})
    )
    assert before.keys() == after.keys()
    assert after["Job", "pets-ps-0"]["metadata"]["labels"].get("tier") == "ps"
    assert "team" not in after["Job", "pets-ps-0"]["metadata"]["labels"]
    assert after["Job", "pets-ps-1"]["metadata"] == before["Job", "pets-ps-1"]["metadata"]
    for (kind, _), obj in after.items():
        if kind == "Job":
            assert "ttlSecondsAfterFinished" not in obj["spec"]
            assert obj["spec"]["template"]["spec"]["hostNetwork"] is True
            assert obj["spec"]["template"]["spec"]["containers"]  # not replaced
        if kind == "Service":
            assert "selector" not in obj["spec"]
    config = ("ConfigMap", "pets")
    assert after[config]["metadata"] == before[config]["metadata"]


# --- Shell injection


class Container:
    """Runs a role's command as the kubelet would, with its variables and files, and fake programs that report them."""

    def __init__(
        self, job: JobSpec, role: str, folder: Path, code: dict[str, bytes] | None = None, *, of: str | None = None
    ) -> None:
        """Prepare the container of a role, of the object named `of` if there are several."""
        objects = build_manifests(job, code)
        self._template = next(
            template
            for obj in objects
            for template in get_pod_templates(obj)
            if template["metadata"]["labels"][ROLE_LABEL] == role and of in (None, obj["metadata"]["name"])
        )
        (config,) = [obj for obj in objects if obj["kind"] == "ConfigMap"]
        self._folder, self._bin = folder, folder / "bin"
        self._bin.mkdir(exist_ok=True)
        for name, text in config["data"].items():
            (folder / name).write_text(text.replace(f"{SCRIPTS_DIR}/", f"{folder}/"))
        for name in ("python3", "mpirun", "train"):
            self.add_program(name, f'exec {sys.executable} -I -S {folder}/report.py "$@"')
        self.add_program("getent", "exit 0")
        report = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))\n"
        (folder / "report.py").write_text(report)

    def add_program(self, name: str, text: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, index: int = 0) -> subprocess.CompletedProcess[str]:
        (main,) = self._template["spec"]["containers"]
        env: dict[str, str] = {}
        for variable in main["env"]:
            if "value" in variable:
                env[variable["name"]] = _expand(variable["value"], env)
        env |= {"PATH": f"{self._bin}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)}
        argv = [word.replace(f"{SCRIPTS_DIR}/", f"{self._folder}/") for word in main["command"]]
        return subprocess.run(argv, env=env, cwd=self._folder, capture_output=True, text=True, check=False)

    def run_and_report(self, index: int = 0) -> tuple[list[str], str, dict[str, str]]:
        completed = self.run(index)
        assert (completed.returncode, completed.stderr) == (0, "")
        argv, cwd, env = json.loads(completed.stdout)
        return argv, cwd, env


def _expand(value: str, env: dict[str, str]) -> str:
    """Expand `$(NAME)` and `$$`, as the kubelet does."""

    def replace(match: re.Match[str]) -> str:
        text = match[0]
        return "$" if text == "$$" else env.get(match[1], text)

    return re.sub(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)", replace, value)


# Text that a shell, the kubelet, YAML or JSON could interpret, and any other text.
special_texts = st.sampled_from(
    [
        "'",
        '"',
        "\\",
        "$(id)",
        "$$",
        "$HOME",
        "`id`",
        "\n",
        "a\nb\n",
        "; id",
        "&& id",
        "|",
        "*",
        "~",
        "#",
        "{}",
        "-n",
        "",
    ]
)
texts = st.lists(
    special_texts | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=4
)
words = texts.map("".join)


@settings(max_examples=40, deadline=None)
@given(
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    args=st.lists(words.filter(lambda word: not re.fullmatch(r"(--?[A-Za-z][\w-]*) +(\S+)", word)), max_size=4),
    env=st.dictionaries(st.sampled_from(["A", "B", "LC_X"]), words, max_size=3),
    train=words.filter(lambda word: word and not word.startswith(("~", "$"))).map(lambda word: f"http://{word}"),
    script=words.map(lambda word: f"/x{word}.py").filter(lambda word: " " not in word and "\n" not in word),
    every=st.sampled_from([0, 30]),
    index=st.integers(0, 1),
)
def test_no_field_is_interpreted_by_the_shell(
    tmp_path_factory: pytest.TempPathFactory,
    topology: str,
    args: list[str],
    env: dict[str, str],
    train: str,
    script: str,
    every: int,
    index: int,
) -> None:
    folder = tmp_path_factory.mktemp("box")
    cwd_path = folder / "it's a $(folder)\n`id`"
    cwd_path.mkdir()
    keys = {"program": {"script": script, "args": args, "cwd": str(cwd_path)}, "env": env, "data": {"train": train}}
    job = job_of(**{**TOPOLOGIES[topology], **keys, "profile": {"every": every}})
    role = "launcher" if topology == "mpi" else "worker"
    index = 0 if topology in ("mpi", "single") else index
    slot = Slot(role, index)
    argv, cwd, environ = Container(job, role, folder).run_and_report(index)
    command = render_command(msgspec.structs.replace(job, profile=type(job.profile)(every=0)), slot, _build_book(job))
    assert isinstance(command, Command)
    if topology == "mpi":
        assert argv[-len(args) - 1 :] == [script, *args]
    else:
        assert argv[-len(command.argv) + 1 :] == list(command.argv[1:])
    assert cwd == str(cwd_path)
    for name, value in {**command.env, **job.env}.items():
        if name not in ("PYTHONPATH", "STOKER_OUTPUT"):
            assert environ[name] == value, name
    if topology.startswith("tf-"):
        assert json.loads(environ["TF_CONFIG"])["task"] == {"type": "worker", "index": index}
        assert environ["POD_NAME"] == f"worker-{index}"


def _build_book(job: JobSpec) -> AddressBook:
    hosts = {slot: slot_hostname(job, slot.role, slot.index) for slot in list_slots(job)}
    return AddressBook(hosts=hosts, port=get_role_port(job, "worker"))


@settings(max_examples=15, deadline=None)
@given(command=st.lists(words.filter(bool), min_size=1, max_size=3))
def test_program_command_is_not_interpreted_by_the_shell(
    tmp_path_factory: pytest.TempPathFactory, command: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("box")
    job = job_of(topology="single", program={"command": ["train", *command]}, profile={"every": 0})
    assert Container(job, "worker", folder).run_and_report()[0] == command


def test_copied_code_is_on_the_python_path(tmp_path: Path) -> None:
    job = job_of(topology="single", profile={"every": 0}, env={"PYTHONPATH": "/mine"})
    _, _, env = Container(job, "worker", tmp_path, {"lib/it's.py": b"\xff\0"}).run_and_report()
    assert env["PYTHONPATH"] == f"{CODE_DIR}:/mine"

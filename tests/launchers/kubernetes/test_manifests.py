"""Every rendering of a job for Kubernetes, without a cluster: valid, complete, pinned, and free of shell text."""

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
from stoker.errors import SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.spec import Job
from stoker.jobs.topology import AddressBook, Command, Slot, command_of, slots_of
from stoker.kube.objects import GPU_RESOURCE, INDEX_LABEL, JOB_LABEL, ROLE_LABEL, Manifest
from stoker.launchers.kubernetes.manifests import build_manifests, get_pod_templates, get_role_port, slot_hostname
from stoker.launchers.kubernetes.plan import to_yaml_documents
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
    "torchrun-elastic": {"topology": "torchrun", "workers": {"min": 2, "max": 4}},
    "mpi": {"topology": "mpi", "workers": 2},
    "tf-ps": {"topology": "tf-ps", "workers": 2, "roles": ROLES},
    "tf-ps-no-chief": {"topology": "tf-ps", "workers": 2, "roles": {"chief": {"count": 0}}},
    "tf-mirrored": {"topology": "tf-mirrored", "workers": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpus": {"resources": {"cpu": 7.5, "memory": "32Gi", "gpu": 2, "gpu_type": "nvidia-tesla-v100"}},
    "made claim": {
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
    "words": {"env": {"GREETING": "a 'b' \"c\" $(HOME) `id`", "EMPTY": ""}, "labels": {"team": "vision", "a.b/c": ""}},
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


def job_of(**keys: Any) -> Job:
    return decode({**BASE, **MODULE, **keys}, Job)


def is_possible(topology: str, option: str) -> bool:
    """Whether there is no reason to refuse a claim for one node: workers are alike, or someone looks on elsewhere."""
    return not (topology in ("mpi", "torchrun-elastic", "tf-ps") and option == "made claim")


def everything(topology: str) -> dict[str, Any]:
    """All options that go together."""
    keys: dict[str, Any] = {}
    kubernetes: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if name != "bucket" and name != "made claim":
            kubernetes |= option.get("kubernetes", {})
            keys |= option
    return {**keys, "kubernetes": kubernetes}


def suited(topology: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Patch what there is: a patch that fits nothing is refused."""
    if topology != "mpi" or "patch" not in keys.get("kubernetes", {}):
        return keys
    patch = [{"kind": "MPIJob", "metadata": {"annotations": {"a": "b"}}}]
    return {**keys, "kubernetes": {**keys["kubernetes"], "patch": patch}}


CASES = [
    pytest.param({**TOPOLOGIES[topology], **suited(topology, keys)}, id=f"{topology}-{option}")
    for topology in TOPOLOGIES
    for option, keys in (*OPTIONS.items(), ("everything", everything(topology)))
    if is_possible(topology, option)
]


def rendered(job: Job, code: dict[str, bytes] | None = None) -> list[Manifest]:
    return LAUNCHERS.get("k8s")().render(job).objects if code is None else build_manifests(job, code)


# --- They are what the API takes


@pytest.mark.parametrize("keys", CASES)
def test_every_object_is_valid_and_has_no_unknown_field(keys: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for one in rendered(job_of(**keys)):
        if one["metadata"]["labels"].get(INDEX_LABEL, "0") != "0":  # as the first of its role
            continue
        if one["kind"] != "MPIJob":
            validate(one, VERSION, strict=True)
            continue
        for template in get_pod_templates(one):
            metadata = {"name": "any", **template["metadata"]}
            validate({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}, VERSION, strict=True)


@pytest.mark.parametrize("keys", [case for case in CASES if str(case.id).startswith("mpi")])
def test_every_mpijob_is_as_its_crd_has_it(keys: dict[str, Any]) -> None:
    schema = load_schema("mpi-operator/kubeflow.org_mpijobs.yaml", "v2beta1")
    (one,) = [one for one in rendered(job_of(**keys)) if one["kind"] == "MPIJob"]
    assert list(validate(one, schema)) == []


def test_the_strict_check_catches_what_is_misspelt() -> None:
    schema = load_schema("mpi-operator/kubeflow.org_mpijobs.yaml", "v2beta1")
    (one,) = [one for one in rendered(job_of(**TOPOLOGIES["mpi"])) if one["kind"] == "MPIJob"]
    one["spec"]["slotPerWorker"] = one["spec"].pop("slotsPerWorker")
    one["spec"]["mpiImplementation"] = "OpenMpi"
    pod = one["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["containers"][0]["readinessProbes"] = pod["containers"][0].pop("readinessProbe")
    one["spec"]["runPolicy"]["backoffLimit"] = "3"
    assert [fault.partition(": ")[::2] for fault in validate(one, schema)] == [
        (".spec.mpiImplementation", "'OpenMpi' is none of ['OpenMPI', 'Intel', 'MPICH']"),
        (".spec.runPolicy.backoffLimit", "'3' is no integer"),
        (".spec.mpiReplicaSpecs.Worker.template.spec.containers[0].readinessProbes", "unknown"),
        (".spec.slotPerWorker", "unknown"),
    ]


# --- They fit together


@pytest.mark.parametrize("keys", CASES)
def test_what_objects_name_is_there(keys: dict[str, Any]) -> None:
    job = job_of(**keys)
    objects = rendered(job)
    by_kind: dict[str, dict[str, Manifest]] = {}
    for one in objects:
        assert one["metadata"]["name"] not in by_kind.setdefault(one["kind"], {})
        by_kind[one["kind"]][one["metadata"]["name"]] = one
    (config,) = by_kind["ConfigMap"].values()
    for one in objects:
        assert one["kind"] in ("Namespace",) or one["metadata"].get("namespace") == job.kubernetes.namespace
        for template in get_pod_templates(one):
            _check_pod(job, template["spec"], config)
            labels = template["metadata"]["labels"]
            assert labels.items() >= {JOB_LABEL: job.name, **job.labels}.items()
        if one["kind"] == "Service":
            wanted = one["spec"]["selector"].items()
            assert any(
                wanted <= pod["metadata"]["labels"].items() for made in objects for pod in get_pod_templates(made)
            )


def _check_pod(job: Job, pod: Manifest, config: Manifest) -> None:
    (main,) = pod["containers"]
    assert main["name"] == "main"
    names = [volume["name"] for volume in pod["volumes"]]
    mounts = [mount["mountPath"] for mount in main["volumeMounts"]]
    variables = [one["name"] for one in main["env"]]
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


def test_accelerators_and_their_nodes_are_for_workers_alone() -> None:
    for topology in ("mpi", "tf-ps", "tf-mirrored"):
        for one in rendered(job_of(**{**TOPOLOGIES[topology], **OPTIONS["gpus"]})):
            for template in get_pod_templates(one):
                pod, (main,) = template["spec"], template["spec"]["containers"]
                is_worker = template["metadata"]["labels"][ROLE_LABEL] == "worker"
                amounts = main.get("resources", {})
                assert [GPU_RESOURCE in amounts.get(kind, {}) for kind in ("requests", "limits")] == [is_worker] * 2
                assert ("affinity" in pod) == is_worker
                assert any(one["key"] == GPU_RESOURCE for one in pod.get("tolerations", [])) == is_worker
                if is_worker:
                    assert amounts["requests"] == amounts["limits"]
                    assert amounts["limits"] == {"cpu": "7500m", "memory": str(32 << 30), GPU_RESOURCE: "2"}


@pytest.mark.parametrize(
    ("topology", "mounting"),
    [
        ("single", {"worker"}),
        ("torchrun", {"worker of pets-chief"}),
        ("tf-mirrored", {"worker of pets-worker-0"}),
        ("tf-ps", {"chief of pets-chief-0"}),
        ("tf-ps-no-chief", {"worker of pets-worker-0"}),
    ],
)
def test_a_claim_for_one_node_is_for_who_writes_checkpoints(topology: str, mounting: set[str]) -> None:
    roles = {name: one for name, one in TOPOLOGIES[topology].get("roles", {}).items() if name in ("ps", "chief")}
    found = {
        template["metadata"]["labels"][ROLE_LABEL] + f" of {one['metadata']['name']}" * (topology != "single")
        for one in rendered(job_of(**{**TOPOLOGIES[topology], **OPTIONS["made claim"], "roles": roles}))
        for template in get_pod_templates(one)
        if any("persistentVolumeClaim" in volume for volume in template["spec"]["volumes"])
    }
    assert found == mounting


def test_a_claim_for_all_is_mounted_by_all() -> None:
    for keys in TOPOLOGIES.values():
        for one in rendered(job_of(**{**keys, **OPTIONS["shared claim"]})):
            for template in get_pod_templates(one):
                assert any("persistentVolumeClaim" in volume for volume in template["spec"]["volumes"])


@pytest.mark.parametrize("topology", ["tf-ps", "tf-ps-no-chief", "tf-mirrored"])
def test_every_address_of_a_cluster_is_a_service_with_that_port_and_pod(topology: str) -> None:
    job = job_of(**{**TOPOLOGIES[topology], "port": 5000})
    objects = rendered(job)
    (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    cluster = json.loads(config["data"]["cluster.json"])
    for role, addresses in cluster.items():
        for index, address in enumerate(addresses):
            name, _, port = address.partition(":")
            assert [str(one["port"]) for one in services[name]["ports"]] == [port]
            assert services[name]["selector"] == {JOB_LABEL: "pets", ROLE_LABEL: role, INDEX_LABEL: str(index)}


def test_people_reach_tensorboard_as_the_job_says() -> None:
    board = {"count": 1, "logdir": "/logs", "port": 7000, "ingress": "board.example.com"}

    def service(expose: str) -> tuple[Manifest, Manifest]:
        job = job_of(topology="tf-mirrored", roles={"tensorboard": {**board, "expose": expose}})
        objects = {(one["kind"], one["metadata"]["name"]): one.get("spec", {}) for one in rendered(job)}
        return objects[("Service", "pets-tensorboard-0")], objects[("Ingress", "pets-tensorboard-0")]

    kinds = {expose: service(expose)[0].get("type") for expose in ("cluster", "node_port", "load_balancer")}
    assert kinds == {"cluster": None, "node_port": "NodePort", "load_balancer": "LoadBalancer"}
    (rule,) = service("cluster")[1]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["backend"]["service"]["port"]["number"]) == ("board.example.com", 7000)


def test_nobody_runs_with_more_rights_than_it_needs() -> None:
    for keys in TOPOLOGIES.values():
        for one in rendered(job_of(**keys)):
            for template in get_pod_templates(one):
                pod, (main,) = template["spec"], template["spec"]["containers"]
                assert pod["automountServiceAccountToken"] is False
                assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                assert main["securityContext"]["allowPrivilegeEscalation"] is False
                assert main["securityContext"]["capabilities"]["drop"] == ["ALL"]
                is_sshd = one["kind"] == "MPIJob" and template["metadata"]["labels"][ROLE_LABEL] == "worker"
                assert ("add" in main["securityContext"]["capabilities"]) == is_sshd


def test_secrets_are_only_named() -> None:
    job = job_of(**{**TOPOLOGIES["mpi"], **OPTIONS["secrets"]})
    text = to_yaml_documents(rendered(job))
    assert "kind: Secret" not in text
    for one in rendered(job):
        for template in get_pod_templates(one):
            (found,) = [one for one in template["spec"]["containers"][0]["env"] if one["name"].startswith("AWS")]
            assert found["valueFrom"] == {"secretKeyRef": {"name": "aws", "key": "secret"}}


# --- An MPIJob


def test_an_mpijob_waits_for_sshd_and_not_for_ever() -> None:
    keys = {"resources": {"gpu": 4}, "retries": 2, "mpi": {"sshd_port": 2222, "ssh_dir": "/home/mpi/.ssh"}}
    keys |= {"kubernetes": {"ttl": "1h", "deadline": "1d", "user": 1000, "queue": "gpu"}}
    objects = rendered(job_of(**{**TOPOLOGIES["mpi"], **keys}))
    (one,) = [one for one in objects if one["kind"] == "MPIJob"]
    spec = one["spec"]
    assert (spec["slotsPerWorker"], spec["sshAuthMountPath"]) == (4, "/home/mpi/.ssh")
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": 3600,
        "activeDeadlineSeconds": 86400,
    }
    assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    assert (launcher["replicas"], worker["replicas"]) == (1, 2)
    (main,) = worker["template"]["spec"]["containers"]
    assert main["readinessProbe"]["tcpSocket"] == main["startupProbe"]["tcpSocket"] == {"port": 2222}
    assert main["startupProbe"]["periodSeconds"] * main["startupProbe"]["failureThreshold"] == 300
    assert "add" not in main["securityContext"]["capabilities"]  # not as root
    (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert config["data"]["worker.sh"].endswith("exec /usr/sbin/sshd -De -o StrictModes=no -o LogLevel=FATAL -p 2222\n")
    words = config["data"]["launcher.sh"].splitlines()[-1].split()
    assert words[words.index("--host") + 1] == "pets-worker-0.pets:4,pets-worker-1.pets:4"
    assert words[words.index("-np") + 1] == "8"
    assert "-p 2222'" in config["data"]["launcher.sh"]


def test_a_launcher_gives_up_on_names_that_never_come(tmp_path: Path) -> None:
    job = job_of(**TOPOLOGIES["mpi"])
    container = Container(job, "launcher", tmp_path)
    container.program("getent", "exit 2")
    container.program(
        "date", f"n=$(cat {tmp_path}/now 2>/dev/null || echo 0); echo $n; echo $((n + 60)) >{tmp_path}/now"
    )
    container.program("sleep", "exit 0")
    done = container.run()
    assert done.returncode == 1
    assert done.stderr == "stoker: pets-worker-0.pets has no address, 120 s after all workers were ready\n"


# --- They are pinned


def _pinned(objects: list[Manifest]) -> str:
    """Write objects without the texts that are files of ours anyway."""
    shown = json.loads(json.dumps(objects))
    for one in shown:
        if one["kind"] == "ConfigMap":
            one["data"] = {name: text if not name.endswith(".py") else "…" for name, text in one["data"].items()}
    return to_yaml_documents(shown)


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_golden(topology: str, request: pytest.FixtureRequest) -> None:
    keys = {**TOPOLOGIES[topology], **OPTIONS["gpus"], **OPTIONS["volumes"], **OPTIONS["words"]}
    claim = "shared claim" if not is_possible(topology, "made claim") else "made claim"
    text = _pinned(rendered(job_of(**keys, **OPTIONS[claim])))
    path = GOLDEN / f"{topology}.yaml"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), "run: pytest tests/kubernetes --update-golden"


# --- Names and sizes


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_the_longest_name_fits_with_every_suffix(topology: str) -> None:
    keys = dict(TOPOLOGIES[topology])
    if "workers" in keys and keys["workers"] != {"min": 2, "max": 4}:
        keys["workers"] = 1000
    job = job_of(name="a" * 40, **keys)
    names = [one["metadata"]["name"] for one in rendered(job)]
    names += [slot_hostname(job, slot.role, slot.index).partition(".")[0] for slot in slots_of(job)]
    assert max(map(len, names)) + len("-0-abcde") <= 63
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in names)


def test_a_name_that_does_not_fit_is_refused() -> None:
    job = msgspec.structs.replace(job_of(**TOPOLOGIES["tf-ps"]), name="a" * 55)
    with pytest.raises(SpecError, match=r"name: is too long: a+-tensorboard-0 would have 69 letters, and 63 can be"):
        rendered(job)


@pytest.mark.parametrize("topology", ["torchrun", "mpi", "tf-ps", "tf-mirrored"])
def test_a_thousand_workers_fit_into_a_config_map(topology: str) -> None:
    job = job_of(name="a" * 40, **{**TOPOLOGIES[topology], "workers": 1000})
    objects = rendered(job)
    (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert len(json.dumps(config).encode()) < 1 << 20
    if topology in ("torchrun", "mpi"):
        assert len(objects) <= 3
    (largest,) = sorted(len(json.dumps(one)) for one in objects if one["kind"] in ("Job", "MPIJob"))[-1:]
    assert largest < 1 << 17


# --- Patches


def test_patches_are_merged_as_rfc_7386_has_it() -> None:
    patches = [
        {"kind": "Job", "metadata": {"name": "pets-ps-0", "labels": {"team": None, "tier": "ps"}}},
        {"kind": "Job", "spec": {"ttlSecondsAfterFinished": None, "template": {"spec": {"hostNetwork": True}}}},
        {"kind": "Service", "spec": {"selector": None}},
    ]
    keys = {**TOPOLOGIES["tf-ps"], "labels": {"team": "vision"}}
    before, after = (
        {(one["kind"], one["metadata"]["name"]): one for one in rendered(job_of(**keys, kubernetes=settings))}
        for settings in ({}, {"patch": patches})
    )
    assert before.keys() == after.keys()
    assert after["Job", "pets-ps-0"]["metadata"]["labels"].get("tier") == "ps"
    assert "team" not in after["Job", "pets-ps-0"]["metadata"]["labels"]
    assert after["Job", "pets-ps-1"]["metadata"] == before["Job", "pets-ps-1"]["metadata"]
    for (kind, _), one in after.items():
        if kind == "Job":
            assert "ttlSecondsAfterFinished" not in one["spec"]
            assert one["spec"]["template"]["spec"]["hostNetwork"] is True
            assert one["spec"]["template"]["spec"]["containers"]  # the rest is as it was
        if kind == "Service":
            assert "selector" not in one["spec"]
    config = ("ConfigMap", "pets")
    assert after[config]["metadata"] == before[config]["metadata"]


# --- Nothing of a job is shell text


class Container:
    """What a kubelet does with a role's container: its variables, its files, its command; with programs of our own."""

    def __init__(self, job: Job, role: str, folder: Path, code: dict[str, bytes] | None = None) -> None:
        objects = build_manifests(job, code)
        self._template = next(
            template
            for one in objects
            for template in get_pod_templates(one)
            if template["metadata"]["labels"][ROLE_LABEL] == role
        )
        (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
        self._folder, self._bin = folder, folder / "bin"
        self._bin.mkdir(exist_ok=True)
        for name, text in config["data"].items():
            (folder / name).write_text(text.replace(f"{SCRIPTS_DIR}/", f"{folder}/"))
        for name in ("python3", "mpirun", "train"):
            self.program(name, f'exec {sys.executable} -I -S {folder}/tell.py "$@"')
        self.program("getent", "exit 0")
        tell = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))\n"
        (folder / "tell.py").write_text(tell)

    def program(self, name: str, text: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, index: int = 0) -> subprocess.CompletedProcess[str]:
        (main,) = self._template["spec"]["containers"]
        env: dict[str, str] = {}
        for one in main["env"]:
            if "value" in one:
                env[one["name"]] = _expanded(one["value"], env)
        env |= {"PATH": f"{self._bin}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)}
        argv = [word.replace(f"{SCRIPTS_DIR}/", f"{self._folder}/") for word in main["command"]]
        return subprocess.run(argv, env=env, cwd=self._folder, capture_output=True, text=True, check=False)

    def told(self, index: int = 0) -> tuple[list[str], str, dict[str, str]]:
        done = self.run(index)
        assert (done.returncode, done.stderr) == (0, "")
        argv, cwd, env = json.loads(done.stdout)
        return argv, cwd, env


def _expanded(value: str, env: dict[str, str]) -> str:
    """Expand `$(NAME)` and `$$`, as a kubelet does."""

    def one(match: re.Match[str]) -> str:
        text = match[0]
        return "$" if text == "$$" else env.get(match[1], text)

    return re.sub(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)", one, value)


# What a shell, a kubelet, YAML or JSON could take for something else, and any other text.
nasty = st.sampled_from(
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
    nasty | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=4
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
def test_no_field_is_shell_text(
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
    odd = folder / "it's a $(folder)\n`id`"
    odd.mkdir()
    keys = {"program": {"script": script, "args": args, "cwd": str(odd)}, "env": env, "data": {"train": train}}
    job = job_of(**{**TOPOLOGIES[topology], **keys, "profile": {"every": every}})
    role = "launcher" if topology == "mpi" else "worker"
    index = 0 if topology in ("mpi", "single") else index
    slot = Slot(role, index)
    seen, cwd, found = Container(job, role, folder).told(index)
    wanted = command_of(msgspec.structs.replace(job, profile=type(job.profile)(every=0)), slot, _book(job))
    assert isinstance(wanted, Command)
    if topology == "mpi":
        assert seen[-len(args) - 1 :] == [script, *args]
    else:
        assert seen[-len(wanted.argv) + 1 :] == list(wanted.argv[1:])
    assert cwd == str(odd)
    for name, value in {**wanted.env, **job.env}.items():
        if name not in ("PYTHONPATH", "STOKER_OUTPUT"):
            assert found[name] == value, name
    if topology.startswith("tf-"):
        assert json.loads(found["TF_CONFIG"])["task"] == {"type": "worker", "index": index}
        assert found["POD_NAME"] == f"worker-{index}"


def _book(job: Job) -> AddressBook:
    hosts = {slot: slot_hostname(job, slot.role, slot.index) for slot in slots_of(job)}
    return AddressBook(hosts=hosts, port=get_role_port(job, "worker"))


@settings(max_examples=15, deadline=None)
@given(command=st.lists(words.filter(bool), min_size=1, max_size=3))
def test_a_command_of_ones_own_is_no_shell_text(tmp_path_factory: pytest.TempPathFactory, command: list[str]) -> None:
    folder = tmp_path_factory.mktemp("box")
    job = job_of(topology="single", program={"command": ["train", *command]}, profile={"every": 0})
    assert Container(job, "worker", folder).told()[0] == command


def test_code_that_travels_is_on_pythons_path(tmp_path: Path) -> None:
    job = job_of(topology="single", profile={"every": 0}, env={"PYTHONPATH": "/mine"})
    _, _, env = Container(job, "worker", tmp_path, {"lib/it's.py": b"\xff\0"}).told()
    assert env["PYTHONPATH"] == f"{CODE_DIR}:/mine"

"""A job as Kubernetes objects: plain dictionaries, made by pure functions, one place for each kind of decision.

| topology | objects |
|---|---|
| single | one Job |
| torchrun | one Indexed Job, one headless Service; where one node alone can mount the claim, worker 0 has its own Job |
| mpi | one MPIJob, for its operator |
| tf-ps, tf-mirrored | a Job and a Service for each task |

All share a ConfigMap of scripts, and labels by which they are found and removed together. The first Job is the lead:
the others are its own, so that they are gone with it.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from stoker.core.units import format_bytes, format_duration
from stoker.errors import Fault, InputError, MissingError, SpecError
from stoker.jobs.spec import DEFAULT_PORT, Job, ResourcesSpec, RoleSpec, to_yaml
from stoker.jobs.topologies.tensorflow import TENSORBOARD_PORT
from stoker.jobs.topology import AddressBook, Role, Slot, get_topology
from stoker.kube.objects import (
    FIRST_INDEX_ANNOTATION,
    GPU_RESOURCE,
    GPU_TYPE_LABELS,
    INDEX_LABEL,
    JOB_LABEL,
    MAIN_CONTAINER,
    QUEUE_LABEL,
    ROLE_LABEL,
    RUN_LABEL,
    Manifest,
    build_claim,
    build_object,
    patch_matches,
    restricted_security_context,
    strategic_merge,
)
from stoker.launchers.kubernetes.mpijob import (
    OUTPUT_FIFO,
    PASSED_ENV,
    SECRETS_DIR,
    build_mpijob,
    build_ssh_options,
    build_worker_script,
    wait_for_workers_script,
)
from stoker.launchers.kubernetes.scripts import ANY_INDEX, CODE_DIR, SCRIPTS_DIR, Script, build_script

MAX_NAME_LENGTH = 63
MIN_TTL_S = 30
CONFIG_MAP_MAX_BYTES = (1 << 20) - (1 << 14)
"""What the API server takes as one ConfigMap, without what else is in it."""
PROFILER, MPI_RANK, JOB_FILE = "profiler.py", "mpi_rank.py", "job.yaml"
PERSISTENT_KINDS = ("Namespace", "PersistentVolumeClaim")
"""Kinds of objects that are there before a run, and after it."""
PREVIOUS_ATTEMPTS_ANNOTATION = "stoker.dev/before"
"""Annotation of pods: how many attempts earlier lives of the run had."""
FAILED, MOVED = (f"batch.kubernetes.io/job-index-{kind}-count" for kind in ("failure", "ignored-failure"))
"""Annotations in which the Job controller counts the attempts of an index."""
NON_RETRYABLE_EXIT_CODES = [InputError.exit_code, MissingError.exit_code, 126, 127]
"""A program that ended so would end so again: bad input, something missing, no such program, or none that can run."""


def build_manifests(job: Job, code: Mapping[str, bytes] | None = None) -> list[Manifest]:
    """Render every object of a job; `code` are files that travel with it, by their paths."""
    roles = get_topology(job).roles(job)
    book = _book(job, roles)
    is_mpi = job.topology == "mpi"
    scripted = [role for role in roles if not (is_mpi and role.name == "worker")]
    before = (
        wait_for_workers_script(job.max_workers, slot_hostname(job, "worker", ANY_INDEX).replace(str(ANY_INDEX), "{}"))
        if is_mpi
        else []
    )
    scripts = {role: build_script(job, role.name, book, has_code=bool(code), before=before) for role in scripted}
    objects = _Objects(job, roles, scripts, code or {}).all()
    if idle := [fault for index, patch in enumerate(job.kubernetes.patch) for fault in _idle(index, patch, objects)]:
        raise SpecError(idle, where=f"job {job.name!r} on k8s")
    return [_patched(one, job) for one in objects]


def build_shell_pod_spec(objects: Sequence[Manifest], *, role: str = "worker", gpu: bool = False) -> Manifest:
    """Give what a pod of a rendered job's role is, but that it waits instead of running the program."""
    spec = next(
        pod["spec"]
        for one in objects
        for pod in get_pod_templates(one)
        if pod["metadata"]["labels"][ROLE_LABEL] == role
    )
    main, *others = spec["containers"]
    dropped = ("args", "lifecycle", "livenessProbe", "ports", "readinessProbe", "startupProbe")
    kept = {key: value for key, value in main.items() if key not in dropped}
    kept["command"] = ["/bin/sh", "-c", "trap exit TERM; while :; do sleep 1; done"]
    if not gpu:
        kept["resources"] = {
            kind: {name: amount for name, amount in amounts.items() if name != GPU_RESOURCE}
            for kind, amounts in main.get("resources", {}).items()
        }
    return {**spec, "containers": [kept, *others]}


def get_pod_templates(one: Manifest) -> list[Manifest]:
    """Give the pod templates in an object."""
    spec = one.get("spec", {})
    if one["kind"] == "MPIJob":
        return [replica["template"] for replica in spec["mpiReplicaSpecs"].values()]
    return [spec["template"]] if one["kind"] in ("Job", "Deployment", "StatefulSet") else []


def label_run(objects: Sequence[Manifest], run: str, before: int = 0) -> list[Manifest]:
    """Give the objects of a run of the job: its id is a label of all, and earlier attempts are counted."""
    mark = {"metadata": {"labels": {RUN_LABEL: run}}}
    pod = {"metadata": {"labels": {RUN_LABEL: run}, "annotations": {PREVIOUS_ATTEMPTS_ANNOTATION: str(before)}}}
    found = []
    for one in objects:
        if one["kind"] not in PERSISTENT_KINDS:
            one = strategic_merge(one, mark)
        if one["kind"] == "Job":
            one = strategic_merge(one, {"spec": {"template": pod}})
        elif one["kind"] == "MPIJob":
            roles = {name: {"template": pod} for name in one["spec"]["mpiReplicaSpecs"]}
            one = strategic_merge(one, {"spec": {"mpiReplicaSpecs": roles}})
        found.append(one)
    return found


def get_lead_kind(job: Job) -> str:
    """Tell the kind of the objects that say how a job is doing, the first of which owns all others."""
    return "MPIJob" if job.topology == "mpi" else "Job"


def find_lead(objects: Sequence[Manifest]) -> Manifest:
    """Give the object that owns the others."""
    return next(one for one in objects if one["kind"] in ("Job", "MPIJob"))


def get_attempt(pod: Manifest) -> int:
    """Tell which attempt of its slot a pod is, as its own environment tells it."""
    notes = pod["metadata"].get("annotations") or {}
    return sum(int(notes.get(name) or 0) for name in (PREVIOUS_ATTEMPTS_ANNOTATION, FAILED, MOVED))


def slot_hostname(job: Job, role: str, index: int) -> str:
    """Give the name by which a slot is found in its namespace."""
    if job.topology.startswith("tf-"):
        return f"{job.name}-{role}-{index}"
    if job.topology == "mpi":
        return f"{job.name}-worker-{index}.{job.name}" if role == "worker" else f"{job.name}-launcher"
    if not has_separate_chief(job):
        return f"{job.name}-{index}.{job.name}"
    return f"{job.name}-chief-0.{job.name}" if index == 0 else f"{job.name}-rest-{index - 1}.{job.name}"


def has_separate_chief(job: Job) -> bool:
    """Whether worker 0 needs a Job of its own, since only its node can mount the claim."""
    checkpoint = job.checkpoint
    return (
        job.topology == "torchrun"
        and checkpoint.claim is not None
        and checkpoint.access == "rwo"
        and not job.is_elastic
        and job.max_workers > 1
    )


def _is_gang(job: Job) -> bool:
    """Whether all pods must run together, or none can."""
    return job.topology == "torchrun" and job.max_workers > 1 and not job.is_elastic


def check_job(job: Job) -> Iterator[Fault]:
    """Refuse what no cluster could run."""
    if job.image is None:
        yield Fault("image", "missing: pods need one, for example image: ghcr.io/acme/trainer:v1")
    slots = [Slot(role.name, max(role.count - 1, 0)) for role in get_topology(job).roles(job)]
    longest = max((slot_hostname(job, slot.role, slot.index).partition(".")[0] for slot in slots), key=len)
    if len(longest) > MAX_NAME_LENGTH:
        yield Fault("name", f"is too long: {longest} would have {len(longest)} letters, and {MAX_NAME_LENGTH} can be")
    if job.resources.gpu_type is not None and not job.resources.gpu:
        yield Fault("resources.gpu", f"missing: gpu_type names {job.resources.gpu_type}, and nothing says how many")
    if job.workers == "all":
        yield Fault("workers", "a cluster may grow, so that `all` says no number: give one")
    looking = [role.name for role in get_topology(job).roles(job) if role.is_observer]
    if looking and job.checkpoint.claim is not None and job.checkpoint.access == "rwo":
        why = f"rwo lets one machine mount the claim, and {' and '.join(looking)} would read it beside the chief"
        yield Fault("checkpoint.access", f"{why}: use rwx or a bucket")
    folder = job.checkpoint.dir
    if folder is not None and "://" not in folder and not folder.startswith("/"):
        yield Fault("checkpoint.dir", f"{folder!r} must be an absolute path in the container, or a bucket")
    for key, path in (("data.train", job.data.train), ("data.val", job.data.val)):
        if path is not None and "://" not in path and not path.startswith("/"):
            yield Fault(key, f"{path!r} is a path of this machine: give a URL, or a path on a volume")
    for role, name in (("", "program.cwd"), *((role, f"roles.{role}.program.cwd") for role in job.roles)):
        cwd = job.program_of(role).cwd
        if cwd is not None and not cwd.startswith("/") and (not role or job.roles[role].program is not None):
            yield Fault(name, f"{cwd!r} must be an absolute path in the container: files that travel are in {CODE_DIR}")
    if job.kubernetes.ttl < MIN_TTL_S:
        what = f"is {format_duration(job.kubernetes.ttl)}: at least {MIN_TTL_S}s, for logs come from pods that ended"
        yield Fault("kubernetes.ttl", what)
    if job.data.cache.dir is not None and not job.data.cache.dir.startswith("/"):
        yield Fault("data.cache.dir", f"{job.data.cache.dir!r} must be an absolute path in the container")


def _book(job: Job, roles: Sequence[Role]) -> AddressBook:
    """Tell the topology the names that slots will have, and one for the index that stands for all."""
    slots = [Slot(role.name, index) for role in roles for index in (*range(role.count), ANY_INDEX)]
    return AddressBook(
        hosts={slot: slot_hostname(job, slot.role, slot.index) for slot in slots},
        port=job.port or DEFAULT_PORT,
        profiler=("python3", "-I", "-S", f"{SCRIPTS_DIR}/{PROFILER}"),
        mpi_rank=("python3", "-I", "-S", f"{SCRIPTS_DIR}/{MPI_RANK}"),
        ssh_options=build_ssh_options(job),
        forward_env=PASSED_ENV,
        output_file=OUTPUT_FIFO,
        secrets_dir=SECRETS_DIR,
    )


def get_role_port(job: Job, role: str) -> int:
    """Tell where the slots of a role listen."""
    given = job.roles.get(role, RoleSpec()).port
    return given or (TENSORBOARD_PORT if role == "tensorboard" else job.port or DEFAULT_PORT)


# --- Objects


@dataclass(frozen=True, slots=True)
class _Objects:
    """The objects of one job."""

    job: Job
    roles: Sequence[Role]
    scripts: Mapping[Role, Script]
    code: Mapping[str, bytes]

    def all(self) -> list[Manifest]:
        """Give them in an order in which they can be made."""
        job, first = self.job, self.roles[0]
        shared = [*_namespace(job), *_claim(job), self._config_map()]
        match job.topology:
            case "single":
                return [*shared, self._job(job.name, first, mounts_claim=True)]
            case "torchrun":
                return [*shared, *self._torchrun(first)]
            case "mpi":
                pods = {role.name: self._pod(role, mounts_claim=True) for role in self.roles}
                labels = {role.name: _labels(job, {ROLE_LABEL: role.name}) for role in self.roles}
                return [*shared, *build_mpijob(job, pods, labels, _queue_labels(job))]
        tasks = [(role, index) for role in self.roles for index in range(role.count)]
        return [*shared, *(one for role, index in tasks for one in self._task(role, index))]

    def _torchrun(self, role: Role) -> list[Manifest]:
        name = self.job.name
        service = _service(self.job, name, {}, [])
        if not has_separate_chief(self.job):
            return [service, self._job(name, role, count=role.count, mounts_claim=True, subdomain=name)]
        chief = self._job(f"{name}-chief", role, mounts_claim=True, subdomain=name)
        return [service, chief, self._job(f"{name}-rest", role, count=role.count - 1, first=1, subdomain=name)]

    def _task(self, role: Role, index: int) -> list[Manifest]:
        """Give the Job and the Service of one TensorFlow task."""
        name = f"{self.job.name}-{role.name}-{index}"
        labels = {ROLE_LABEL: role.name, INDEX_LABEL: str(index)}
        return [
            _service(self.job, name, labels, [get_role_port(self.job, role.name)]),
            *_ingress(self.job, role.name, name),
            self._job(name, role, index=index, mounts_claim=Slot(role.name, index) == self._chief, labels=labels),
        ]

    @property
    def _chief(self) -> Slot:
        """The slot that writes checkpoints."""
        return Slot("chief" if any(role.name == "chief" for role in self.roles) else "worker", 0)

    def _job(
        self,
        name: str,
        role: Role,
        *,
        count: int = 1,
        first: int = 0,
        index: int | None = None,
        mounts_claim: bool = False,
        labels: Mapping[str, str] | None = None,
        subdomain: str = "",
    ) -> Manifest:
        """Give a Job of `count` pods, of which the first has the index `first`; or the one of an index."""
        job, own = self.job, labels or {ROLE_LABEL: role.name}
        pod = self._pod(role, first=index or first, mounts_claim=mounts_claim)
        metadata: Manifest = {"labels": _labels(job, own)}
        if first:
            metadata["annotations"] = {FIRST_INDEX_ANNOTATION: str(first)}
        if subdomain:
            pod["subdomain"] = subdomain
        spec: Manifest = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            # One who has failed too often ends all; who is gone with its node has not failed. In a gang, the first new
            # try of one may meet the others before they have noticed, and fails with them: so it has two for each.
            "backoffLimitPerIndex": job.retries * (2 if _is_gang(job) else 1),
            "maxFailedIndexes": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": MAIN_CONTAINER,
                            "operator": "In",
                            "values": NON_RETRYABLE_EXIT_CODES,
                        },
                    },
                ]
            },
            "template": {"metadata": metadata, "spec": pod},
        }
        if not self._ends_before_others(role, index):
            spec["ttlSecondsAfterFinished"] = int(job.kubernetes.ttl)
        if job.kubernetes.deadline is not None:
            spec["activeDeadlineSeconds"] = int(job.kubernetes.deadline)
        if job.topology == "torchrun" and not first:  # where rank 0 is elsewhere, these are done when all are
            rule = {"succeededCount": 1} if job.is_elastic else {"succeededIndexes": "0"}
            spec["successPolicy"] = {"rules": [rule]}
        return _object("batch/v1", "Job", name, job, {**(labels or {}), **_queue_labels(job)}, spec=spec)

    def _ends_before_others(self, role: Role, index: int | None) -> bool:
        """Whether a Job owns others that lead as it does: it must not expire before them. The follower sees to it."""
        return index == 0 and role is self.roles[0] and role.is_lead and role.count > 1

    def _pod(self, role: Role, *, first: int = 0, mounts_claim: bool) -> Manifest:
        job, settings = self.job, self.job.kubernetes
        given = job.roles.get(role.name, RoleSpec())
        resources = job.resources if role.name == "worker" else given.resources
        volumes, mounts = self._volumes(mounts_claim=mounts_claim)
        same = self.scripts[role].env if role in self.scripts else {}
        container: Manifest = {
            "name": MAIN_CONTAINER,
            "image": given.image or job.image,
            "imagePullPolicy": settings.image_pull_policy,
            "command": ["/bin/sh", f"{SCRIPTS_DIR}/{role.name}.sh"],
            "env": [*_env(same, first), *_secret_env(job)],
            "resources": _resources(resources),
            "volumeMounts": mounts,
            "securityContext": restricted_security_context(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        tolerations = [dict(one) for one in settings.tolerations]
        if resources.gpu:
            tolerations += [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
        pod: Manifest = {
            "restartPolicy": "Never",
            # The program is not the first process of the pod: a signal that it does not catch ends it.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": math.ceil(float(job.grace)),
            "automountServiceAccountToken": bool(settings.service_account),
            "serviceAccountName": settings.service_account,
            "priorityClassName": settings.priority_class,
            "securityContext": _security(job),
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
            "nodeSelector": {**settings.node_selector, **given.node_selector},
            "affinity": _on_gpus(resources.gpu_type) if resources.gpu and resources.gpu_type else None,
            "tolerations": tolerations,
            "containers": [{key: value for key, value in container.items() if value not in ({}, [])}],
            "volumes": volumes,
        }
        return {key: value for key, value in pod.items() if value not in (None, [], {})}

    def _volumes(self, *, mounts_claim: bool) -> tuple[list[Manifest], list[Manifest]]:
        """Give a pod's volumes, and where its container finds them."""
        job, checkpoint = self.job, self.job.checkpoint
        volumes: list[Manifest] = []
        mounts: list[Manifest] = []

        def add(name: str, path: str, source: Manifest, *, read_only: bool = False) -> None:
            volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})

        scripts = [{"key": name, "path": name} for name in self._texts()]
        add("stoker", SCRIPTS_DIR, {"configMap": {"name": job.name, "items": scripts}}, read_only=True)
        shm = {"medium": "Memory"} | ({"sizeLimit": str(int(job.kubernetes.shm))} if job.kubernetes.shm else {})
        add("shm", "/dev/shm", {"emptyDir": shm})
        if self.code:
            items = [{"key": _key(index), "path": path} for index, path in enumerate(self.code)]
            add("code", CODE_DIR, {"configMap": {"name": job.name, "items": items}}, read_only=True)
        if checkpoint.claim is not None and (mounts_claim or checkpoint.access == "rwx"):
            add("checkpoint", str(checkpoint.dir), {"persistentVolumeClaim": {"claimName": checkpoint.claim}})
        for index, volume in enumerate(job.volumes):
            source = {"persistentVolumeClaim": {"claimName": volume.claim}}
            add(f"volume-{index}", volume.path, source, read_only=volume.read_only)
        for index, (path, one) in enumerate(job.secret_files.items()):
            add(f"secret-{index}", path, {"secret": {"secretName": one.secret}}, read_only=True)
        if job.data.cache.dir is not None:
            limit = {"sizeLimit": str(int(job.data.cache.size))} if job.data.cache.size else {}
            add("cache", job.data.cache.dir, {"emptyDir": limit})
        return volumes, mounts

    def _texts(self) -> dict[str, str]:
        """Give the texts that every pod finds in `/stoker`."""
        texts = {f"{role.name}.sh": one.text for role, one in self.scripts.items()}
        for one in self.scripts.values():
            texts |= one.files
        if self.job.profile.every > 0:
            texts[PROFILER] = files("stoker.telemetry").joinpath(PROFILER).read_text()
        if self.job.topology == "mpi":
            texts[MPI_RANK] = files("stoker.telemetry").joinpath(MPI_RANK).read_text()
            texts["worker.sh"] = build_worker_script(self.job)
        return texts

    def _config_map(self) -> Manifest:
        job, texts = self.job, {**self._texts(), JOB_FILE: to_yaml(self.job)}
        binary = {_key(index): b64encode(data).decode() for index, data in enumerate(self.code.values())}
        size = sum(len(one.encode()) for one in (*texts.values(), *binary.values()))
        if size > CONFIG_MAP_MAX_BYTES:
            largest = max(self.code, key=lambda path: len(self.code[path]), default="the cluster's addresses")
            raise InputError(
                f"what travels with the job takes {format_bytes(size)} as a ConfigMap has it, and it holds 1 MiB "
                f"(most is {largest})",
                where=f"job {job.name!r} on k8s",
                hint="leave files out, or put the code into the image or onto a volume",
            )
        return _object("v1", "ConfigMap", job.name, job, {}, data=texts, **({"binaryData": binary} if binary else {}))


def _key(index: int) -> str:
    """Name a file of the user's code in the ConfigMap, whose keys can hold no slash."""
    return f"code-{index}"


def _security(job: Job) -> Manifest:
    """Say as whom programs run, where the job does; the image does otherwise."""
    user, group = job.kubernetes.user, job.kubernetes.group
    given = {
        "runAsUser": user,
        "runAsNonRoot": True if user else None,
        "runAsGroup": group,
        "fsGroup": group,
        # Without it, every file of a large claim is visited before each start.
        "fsGroupChangePolicy": None if group is None else "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {key: value for key, value in given.items() if value is not None}


def _on_gpus(kind: str) -> Manifest:
    """Ask for nodes with this kind of GPU, under whichever label their cloud gives it."""
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [kind]}]} for key in GPU_TYPE_LABELS]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _resources(wanted: ResourcesSpec) -> Manifest:
    """Ask for what may be used and no less: pods whose requests are their limits are evicted last."""
    given = {
        "cpu": None if wanted.cpu is None else f"{math.ceil(wanted.cpu * 1000)}m",
        "memory": None if wanted.memory is None else str(int(wanted.memory)),
        GPU_RESOURCE: str(wanted.gpu) if wanted.gpu else None,
    }
    amounts = {name: amount for name, amount in given.items() if amount is not None}
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _env(same: Mapping[str, str], first: int) -> list[Manifest]:
    """Give what all slots of a role have in common, and what a pod knows of itself."""
    fields = {
        "STOKER_RUN": f"metadata.labels['{RUN_LABEL}']",
        "STOKER_BEFORE": f"metadata.annotations['{PREVIOUS_ATTEMPTS_ANNOTATION}']",
        "STOKER_FAILED": f"metadata.annotations['{FAILED}']",
        "STOKER_MOVED": f"metadata.annotations['{MOVED}']",
    }
    found: list[Manifest] = [{"name": name, "value": _literal(value)} for name, value in same.items()]
    found += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    return [*found, *([{"name": "STOKER_FIRST", "value": str(first)}] if first else [])]


def _literal(value: str) -> str:
    """Keep the kubelet from taking `$(NAME)` in a value for another variable."""
    return value.replace("$", "$$")


def _secret_env(job: Job) -> list[Manifest]:
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for name, one in job.secret_env.items()
    ]


def _namespace(job: Job) -> list[Manifest]:
    if not job.kubernetes.create_namespace or not job.kubernetes.namespace:
        return []
    return [build_object("v1", "Namespace", job.kubernetes.namespace, {})]


def _claim(job: Job) -> list[Manifest]:
    one = job.checkpoint
    if one.claim is None or not one.create:
        return []
    namespace = job.kubernetes.namespace
    found = build_claim(
        one.claim, int(one.size or 0), one.access, {}, storage_class=one.storage_class, namespace=namespace
    )
    return [found]


def _service(job: Job, name: str, labels: Mapping[str, str], ports: Sequence[int]) -> Manifest:
    """Give a name to pods, without an address of its own; they find each other before they are ready."""
    role = labels.get(ROLE_LABEL, "")
    expose = job.roles[role].expose if role in job.roles else "cluster"
    kinds = {"node_port": "NodePort", "load_balancer": "LoadBalancer"}
    spec: Manifest = {"selector": {JOB_LABEL: job.name, **labels}, "publishNotReadyAddresses": True}
    spec |= {"type": kinds[expose]} if expose in kinds else {"clusterIP": "None"}
    if ports:
        spec["ports"] = [{"name": f"port-{port}", "port": port, "protocol": "TCP"} for port in ports]
    return _object("v1", "Service", name, job, labels, spec=spec)


def _ingress(job: Job, role: str, service: str) -> list[Manifest]:
    """Lead a host name to a role's Service, where the job wants that."""
    name = job.roles[role].ingress if role in job.roles else None
    if name is None:
        return []
    backend = {"service": {"name": service, "port": {"number": get_role_port(job, role)}}}
    rule = {"host": name, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    return [_object("networking.k8s.io/v1", "Ingress", service, job, {ROLE_LABEL: role}, spec={"rules": [rule]})]


def _labels(job: Job, more: Mapping[str, str]) -> dict[str, str]:
    return {**job.labels, "app.kubernetes.io/managed-by": "stoker", JOB_LABEL: job.name, **more}


def _queue_labels(job: Job) -> dict[str, str]:
    """Give what Kueue reads; it holds back what has these labels."""
    given = {
        QUEUE_LABEL: job.kubernetes.queue,
        "kueue.x-k8s.io/priority-class": job.kubernetes.queue_priority,
    }
    return {name: value for name, value in given.items() if value}


def _object(version: str, kind: str, name: str, job: Job, labels: Mapping[str, str], **body: Any) -> Manifest:
    return build_object(version, kind, name, _labels(job, labels), namespace=job.kubernetes.namespace, **body)


def _patched(one: Manifest, job: Job) -> Manifest:
    for patch in job.kubernetes.patch:
        if patch_matches(patch, one):
            one = strategic_merge(one, patch)
    return one


def _idle(index: int, patch: Mapping[str, Any], objects: Sequence[Manifest]) -> Iterator[Fault]:
    """Refuse a patch that changes nothing: its author meant something."""
    if not any(patch_matches(patch, one) for one in objects):
        names = [f"{one['kind']} {one['metadata']['name']}" for one in objects]
        known = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield Fault(f"kubernetes.patch[{index}]", f"fits no object, by its kind and metadata.name (there are: {known})")

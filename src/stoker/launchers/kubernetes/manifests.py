"""A job as Kubernetes objects: plain dictionaries, made by pure functions, one place for each kind of decision.

| topology | objects |
|---|---|
| single | one Job |
| torchrun | one Indexed Job, one headless Service; where one node alone can mount the claim, worker 0 has its own Job |
| mpi | one MPIJob, for its operator |
| tf-ps, tf-mirrored | a Job and a Service for each task |

All share a ConfigMap of scripts, and labels by which they are found and removed together.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from stoker.core.units import format_bytes
from stoker.errors import Fault, InputError
from stoker.jobs.spec import PORT, Job, Resources, RoleSpec
from stoker.jobs.topologies.tensorflow import TENSORBOARD_PORT
from stoker.jobs.topology import AddressBook, Role, Slot, topology_of
from stoker.launchers.kubernetes.scripts import ANY, FOLDER, Script, script

NAME_MAX = 63
CONFIG_MAX = (1 << 20) - (1 << 14)
"""What the API server takes as one ConfigMap, without what else is in it."""
PROFILER = "profiler.py"
CODE = "/stoker-code"


def manifests(job: Job, code: Mapping[str, bytes] | None = None) -> list[Manifest]:
    """Render every object of a job; `code` are files that travel with it, by their paths."""
    roles = topology_of(job).roles(job)
    book = AddressBook(
        hosts={
            Slot(role.name, index): host(job, role.name, index) for role in roles for index in (*range(role.count), ANY)
        },
        port=job.port or PORT,
        profiler=("python3", "-I", "-S", f"{FOLDER}/{PROFILER}"),
    )
    objects = _Objects(job, {role: script(job, role.name, book) for role in roles}, code or {})
    return [_patched(one, job) for one in objects.all()]


def host(job: Job, role: str, index: int) -> str:
    """Give the name by which a slot is found in its namespace."""
    if job.topology.startswith("tf-"):
        return f"{job.name}-{role}-{index}"
    if not has_own_chief(job):
        return f"{job.name}-{index}.{job.name}"
    return f"{job.name}-chief-0.{job.name}" if index == 0 else f"{job.name}-rest-{index - 1}.{job.name}"


def has_own_chief(job: Job) -> bool:
    """Whether worker 0 needs a Job of its own, since only its node can mount the claim."""
    checkpoint = job.checkpoint
    return (
        job.topology == "torchrun"
        and checkpoint.claim is not None
        and checkpoint.access == "rwo"
        and not job.is_elastic
        and job.max_workers > 1
    )


def name_faults(job: Job) -> Iterator[Fault]:
    """Refuse a name that is too long once the longest suffix is on it."""
    longest = max((f"{job.name}-{role.name}-{max(role.count - 1, 0)}" for role in topology_of(job).roles(job)), key=len)
    if len(longest) > NAME_MAX:
        yield Fault("name", f"is too long: {longest} would have {len(longest)} letters, and {NAME_MAX} can be")


# --- Objects


@dataclass(frozen=True, slots=True)
class _Objects:
    """The objects of one job."""

    job: Job
    scripts: Mapping[Role, Script]
    code: Mapping[str, bytes]

    def all(self) -> list[Manifest]:
        """Give them in an order in which they can be made."""
        job, (first, *_) = self.job, self.scripts
        shared = [self._config_map(), *_claim(job)]
        if job.topology == "single":
            return [*shared, self._job(job.name, first, mounts_claim=True)]
        if job.topology == "torchrun":
            return [*shared, *self._torchrun(first)]
        tasks = [(role, index) for role in self.scripts for index in range(role.count)]
        return [*shared, *(one for role, index in tasks for one in self._task(role, index))]

    def _torchrun(self, role: Role) -> list[Manifest]:
        name = self.job.name
        service = _service(self.job, name, {}, [])
        if not has_own_chief(self.job):
            return [service, self._job(name, role, indexed=role.count, mounts_claim=True)]
        chief = self._job(f"{name}-chief", role, indexed=1, mounts_claim=True)
        return [service, chief, self._job(f"{name}-rest", role, indexed=role.count - 1, first=1)]

    def _task(self, role: Role, index: int) -> list[Manifest]:
        """Give the Job and the Service of one TensorFlow task."""
        name = f"{self.job.name}-{role.name}-{index}"
        labels = {f"{GROUP}/role": role.name, f"{GROUP}/index": str(index)}
        mounts = Slot(role.name, index) == self._chief or role.name in ("evaluator", "tensorboard")
        return [
            _service(self.job, name, labels, [port_of(self.job, role.name)]),
            self._job(name, role, first=index, mounts_claim=mounts, labels=labels),
        ]

    @property
    def _chief(self) -> Slot:
        """The slot that writes checkpoints."""
        return Slot("chief" if any(role.name == "chief" for role in self.scripts) else "worker", 0)

    def _job(
        self,
        name: str,
        role: Role,
        *,
        indexed: int = 0,
        first: int = 0,
        mounts_claim: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Give a Job: `indexed` pods, of which the first has the index `first`; or one."""
        job, own = self.job, labels or {f"{GROUP}/role": role.name}
        pod = self._pod(role, first=first, mounts_claim=mounts_claim)
        spec: Manifest = {
            # A rank that ends takes the others with it: each of them is a failed pod.
            "backoffLimit": job.retries * max(indexed, 1),
            "ttlSecondsAfterFinished": int(job.kubernetes.ttl),
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]},
            "template": {"metadata": {"labels": _labels(job, own)}, "spec": pod},
        }
        if job.kubernetes.deadline is not None:
            spec["activeDeadlineSeconds"] = int(job.kubernetes.deadline)
        if indexed:
            pod["subdomain"] = job.name
            spec |= {"completions": indexed, "parallelism": indexed, "completionMode": "Indexed"}
            if not first:  # where rank 0 is elsewhere, these are done when all are
                rule = {"succeededCount": 1} if job.is_elastic else {"succeededIndexes": "0"}
                spec["successPolicy"] = {"rules": [rule]}
        return _object("batch/v1", "Job", name, job, labels or {}, spec=spec)

    def _pod(self, role: Role, *, first: int, mounts_claim: bool) -> Manifest:
        job, settings = self.job, self.job.kubernetes
        given = job.roles.get(role.name, RoleSpec())
        resources = job.resources if role.name == "worker" else given.resources
        volumes, mounts = self._volumes(mounts_claim=mounts_claim)
        container: Manifest = {
            "name": CONTAINER,
            "image": given.image or job.image,
            "imagePullPolicy": settings.image_pull_policy,
            "command": ["/bin/sh", f"{FOLDER}/{role.name}.sh"],
            "env": [*_env(self.scripts[role].env, first), *_secret_env(job)],
            "resources": _resources(resources),
            "volumeMounts": mounts,
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        tolerations = [dict(one) for one in settings.tolerations]
        if resources.gpu:
            tolerations += [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
        pod: Manifest = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(float(job.grace)),
            "automountServiceAccountToken": bool(settings.service_account),
            "serviceAccountName": settings.service_account,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
            "nodeSelector": dict(settings.node_selector),
            "affinity": _on_gpus(resources.gpu_type) if resources.gpu and resources.gpu_type else None,
            "tolerations": tolerations,
            "containers": [container],
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
        add("stoker", FOLDER, {"configMap": {"name": job.name, "items": scripts}}, read_only=True)
        add("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
        if self.code:
            items = [{"key": _key(index), "path": path} for index, path in enumerate(self.code)]
            add("code", CODE, {"configMap": {"name": job.name, "items": items}}, read_only=True)
        if checkpoint.claim is not None and (mounts_claim or checkpoint.access == "rwx"):
            add("checkpoint", str(checkpoint.dir), {"persistentVolumeClaim": {"claimName": checkpoint.claim}})
        for index, volume in enumerate(job.volumes):
            claim = {"persistentVolumeClaim": {"claimName": volume.claim}}
            add(f"volume-{index}", volume.path, claim, read_only=volume.read_only)
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
        return texts

    def _config_map(self) -> Manifest:
        job, texts = self.job, self._texts()
        binary = {_key(index): b64encode(data).decode() for index, data in enumerate(self.code.values())}
        size = sum(map(len, (*texts.values(), *binary.values())))
        if size > CONFIG_MAX:
            largest = max(self.code, key=lambda path: len(self.code[path]), default="the cluster's addresses")
            raise InputError(
                f"what travels with the job has {format_bytes(size)}, and a ConfigMap holds 1 MiB (most is {largest})",
                where=f"job {job.name!r} on k8s",
                hint="leave files out, or put the code into the image or onto a volume",
            )
        return _object("v1", "ConfigMap", job.name, job, {}, data=texts, **({"binaryData": binary} if binary else {}))


def port_of(job: Job, role: str) -> int:
    """Tell where the slots of a role listen."""
    given = job.roles.get(role, RoleSpec()).port
    return given or (TENSORBOARD_PORT if role == "tensorboard" else job.port or PORT)


def _key(index: int) -> str:
    """Name a file of the user's code in the ConfigMap, whose keys can hold no slash."""
    return f"code-{index}"


def _on_gpus(kind: str) -> Manifest:
    """Ask for nodes with this kind of GPU, under whichever label their cloud gives it."""
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [kind]}]} for key in GPU_LABELS]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _resources(wanted: Resources) -> Manifest:
    """Ask for what may be used and no less: pods whose requests are their limits are evicted last."""
    given = {
        "cpu": None if wanted.cpu is None else f"{math.ceil(wanted.cpu * 1000)}m",
        "memory": None if wanted.memory is None else str(int(wanted.memory)),
        GPU: str(wanted.gpu) if wanted.gpu else None,
    }
    amounts = {name: amount for name, amount in given.items() if amount is not None}
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _env(same: Mapping[str, str], first: int) -> list[Manifest]:
    found = [{"name": name, "value": value} for name, value in same.items()]
    return [*found, *([{"name": "STOKER_FIRST", "value": str(first)}] if first else [])]


def _secret_env(job: Job) -> list[Manifest]:
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for name, one in job.secret_env.items()
    ]


def _claim(job: Job) -> list[Manifest]:
    checkpoint = job.checkpoint
    if checkpoint.claim is None or not checkpoint.create:
        return []
    access = "ReadWriteOnce" if checkpoint.access == "rwo" else "ReadWriteMany"
    spec = {"accessModes": [access], "resources": {"requests": {"storage": str(int(checkpoint.size or 0))}}}
    return [_object("v1", "PersistentVolumeClaim", checkpoint.claim, job, {}, spec=spec)]


def _service(job: Job, name: str, labels: Mapping[str, str], ports: Sequence[int]) -> Manifest:
    """Give a name to pods, without an address of its own; they find each other before they are ready."""
    spec: Manifest = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {f"{GROUP}/job": job.name, **labels},
    }
    if ports:
        spec["ports"] = [{"name": f"port-{port}", "port": port} for port in ports]
    return _object("v1", "Service", name, job, labels, spec=spec)


def _labels(job: Job, more: Mapping[str, str]) -> dict[str, str]:
    return {**job.labels, "app.kubernetes.io/managed-by": "stoker", f"{GROUP}/job": job.name, **more}


def _object(version: str, kind: str, name: str, job: Job, labels: Mapping[str, str], **body: Any) -> Manifest:
    own = dict(labels)
    if kind == "Job" and job.kubernetes.queue:
        own["kueue.x-k8s.io/queue-name"] = job.kubernetes.queue
    metadata: Manifest = {"name": name, "labels": _labels(job, own)}
    if job.kubernetes.namespace:
        metadata["namespace"] = job.kubernetes.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


# --- Patches


def _patched(one: Manifest, job: Job) -> Manifest:
    for patch in job.kubernetes.patch:
        name = (patch.get("metadata") or {}).get("name")
        if patch.get("kind") == one["kind"] and name in (None, one["metadata"]["name"]):
            one = merged(one, patch)
    return one


def merged(value: Any, patch: Any) -> Any:
    """Merge as RFC 7386 has it: null removes, lists are replaced."""
    if not isinstance(patch, Mapping):
        return patch
    base = value if isinstance(value, Mapping) else {}
    kept = {key: inner for key, inner in base.items() if key not in patch}
    return {**kept, **{key: merged(base.get(key), inner) for key, inner in patch.items() if inner is not None}}

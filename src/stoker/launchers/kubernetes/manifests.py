"""Render a job as Kubernetes objects: plain dicts, built by pure functions.

| trait of the topology | objects |
|---|---|
| has_rendezvous | one headless Service, one Indexed Job for each group of equal workers |
| has_standby_workers | one MPIJob, for the MPI operator |
| has_address_per_slot | a Job and a Service for each task |
| none of these | one Job |

Where workers meet at the first one, and only one node can mount the claim, that worker has a Job of its own.

All share a ConfigMap of scripts, and labels by which they are found and deleted together. The first Job is the lead: it
owns the other objects, so that they are garbage collected with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import Fault, InputError, MissingError, SpecError
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import Role, Slot, get_topology
from stoker.kube.objects import (
    FIRST_INDEX_ANNOTATION,
    INDEX_LABEL,
    JOB_LABEL,
    MAIN_CONTAINER,
    ROLE_LABEL,
    Manifest,
    build_claim,
    build_object,
    patch_matches,
    strategic_merge,
)
from stoker.launchers.kubernetes.addresses import (
    WorkerJob,
    build_address_book,
    get_role_port,
    has_separate_chief,
    list_worker_jobs,
    slot_hostname,
)
from stoker.launchers.kubernetes.config_map import JobFiles, build_config_map, collect_files
from stoker.launchers.kubernetes.labels import build_job_object, build_labels, build_queue_labels
from stoker.launchers.kubernetes.mpijob import build_mpijob, wait_for_workers_script
from stoker.launchers.kubernetes.pod_spec import build_pod_spec
from stoker.launchers.kubernetes.scripts import Script, build_script
from stoker.launchers.shell_words import ANY_INDEX

NON_RETRYABLE_EXIT_CODES = [InputError.exit_code, MissingError.exit_code, 126, 127]
"""Exit codes that a retry would only repeat: bad input, missing package, program not executable, program not found."""


def build_manifests(job: JobSpec, code: Mapping[str, bytes] | None = None) -> list[Manifest]:
    """Render every object of a job, in creation order; `code` are the files to copy into the pods, by path."""
    roles = get_topology(job).roles(job)
    scripts = _build_scripts(job, roles, has_code=bool(code))
    builder = _ManifestBuilder(job, roles, scripts, collect_files(job, scripts, code or {}))
    objects = builder.build_all()
    faults = [
        fault for index, patch in enumerate(job.kubernetes.patch) for fault in _check_patch(index, patch, objects)
    ]
    if faults:
        raise SpecError(faults)
    return [_apply_patches(obj, job) for obj in objects]


def _build_scripts(job: JobSpec, roles: Sequence[Role], *, has_code: bool) -> dict[str, Script]:
    """Build the script of each role, or of each group of workers; MPI workers run sshd instead."""
    book = build_address_book(job, roles)
    if job.traits.has_rendezvous:
        return {
            part.script: build_script(job.with_workers_like(part.first), roles[0].name, book, has_code=has_code)
            for part in list_worker_jobs(job)
        }
    if not job.traits.has_standby_workers:
        return {role.name: build_script(job, role.name, book, has_code=has_code) for role in roles}
    hostname_pattern = slot_hostname(job, "worker", ANY_INDEX).replace(str(ANY_INDEX), "{}")
    setup = wait_for_workers_script(job.max_workers, hostname_pattern)
    names = [role.name for role in roles if role.name != "worker"]
    return {name: build_script(job, name, book, has_code=has_code, setup=setup) for name in names}


@dataclass(frozen=True, slots=True)
class _ManifestBuilder:
    """Builder of the objects of one job."""

    job: JobSpec
    roles: Sequence[Role]
    scripts: Mapping[str, Script]
    """By file name, without `.sh`."""
    files: JobFiles

    def build_all(self) -> list[Manifest]:
        """Build all objects in creation order."""
        job, first = self.job, self.roles[0]
        shared = [*_build_namespace(job), *_build_checkpoint_claim(job), build_config_map(job, self.files)]
        if job.traits.has_rendezvous:
            return [*shared, *self._build_gang(first)]
        if job.traits.has_standby_workers:
            pods = {role.name: self._build_pod_spec(role, mounts_claim=True) for role in self.roles}
            labels = {role.name: build_labels(job, {ROLE_LABEL: role.name}) for role in self.roles}
            return [*shared, *build_mpijob(job, pods, labels, build_queue_labels(job))]
        if job.traits.has_address_per_slot:
            tasks = [(role, index) for role in self.roles for index in range(role.count)]
            return [*shared, *(obj for role, index in tasks for obj in self._build_task(role, index))]
        return [*shared, self._build_job(job.name, first, count=first.count, mounts_claim=True)]

    def _build_gang(self, role: Role) -> list[Manifest]:
        """Build the Service and the Jobs of workers that meet at the first one."""
        job = self.job
        objects = [_build_service(job, job.name, {}, [])]
        for part in list_worker_jobs(job):
            builder = replace(self, job=job.with_workers_like(part.first))
            mounts_claim = not part.first or not has_separate_chief(job)
            objects.append(builder._build_worker_job(part, role, mounts_claim=mounts_claim))
        return objects

    def _build_worker_job(self, part: WorkerJob, role: Role, *, mounts_claim: bool) -> Manifest:
        return self._build_job(
            part.name,
            role,
            count=part.count,
            first=part.first,
            script=part.script,
            mounts_claim=mounts_claim,
            subdomain=self.job.name,
        )

    def _build_task(self, role: Role, index: int) -> list[Manifest]:
        """Build the Service, Ingress and Job of one slot."""
        name = f"{self.job.name}-{role.name}-{index}"
        labels = {ROLE_LABEL: role.name, INDEX_LABEL: str(index)}
        mounts_claim = Slot(role.name, index) == self._chief
        return [
            _build_service(self.job, name, labels, [get_role_port(self.job, role.name)]),
            *_build_ingress(self.job, role.name, name),
            self._build_job(name, role, index=index, mounts_claim=mounts_claim, labels=labels),
        ]

    @property
    def _chief(self) -> Slot:
        """The slot that writes checkpoints."""
        return Slot("chief" if any(role.name == "chief" for role in self.roles) else "worker", 0)

    def _build_job(
        self,
        name: str,
        role: Role,
        *,
        count: int = 1,
        first: int = 0,
        index: int | None = None,
        script: str = "",
        mounts_claim: bool = False,
        labels: Mapping[str, str] | None = None,
        subdomain: str = "",
    ) -> Manifest:
        """Build an Indexed Job of `count` pods for the slots from `first` on, or for the one slot `index`."""
        job = self.job
        pod = self._build_pod_spec(role, first=index or first, script=script, mounts_claim=mounts_claim)
        metadata: Manifest = {"labels": build_labels(job, labels or {ROLE_LABEL: role.name})}
        if first:
            metadata["annotations"] = {FIRST_INDEX_ANNOTATION: str(first)}
        if subdomain:
            pod["subdomain"] = subdomain
        spec: Manifest = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            **_build_failure_policy(job),
            "template": {"metadata": metadata, "spec": pod},
        }
        if not self._owns_other_leads(role, index):
            spec["ttlSecondsAfterFinished"] = int(job.kubernetes.ttl)
        if job.kubernetes.deadline is not None:
            spec["activeDeadlineSeconds"] = int(job.kubernetes.deadline)
        if job.traits.has_rendezvous and not first:  # without rank 0, a Job is complete when all its pods are
            rule = {"succeededCount": 1} if job.is_elastic else {"succeededIndexes": "0"}
            spec["successPolicy"] = {"rules": [rule]}
        return build_job_object("batch/v1", "Job", name, job, {**(labels or {}), **build_queue_labels(job)}, spec=spec)

    def _owns_other_leads(self, role: Role, index: int | None) -> bool:
        """Whether a Job owns other lead slots' Jobs and must not expire before them; the follower sets its TTL."""
        return index == 0 and role is self.roles[0] and role.is_lead and role.count > 1

    def _build_pod_spec(self, role: Role, *, first: int = 0, script: str = "", mounts_claim: bool) -> Manifest:
        script = script or role.name
        env = self.scripts[script].env if script in self.scripts else {}
        return build_pod_spec(self.job, role, self.files, env, script=script, first=first, mounts_claim=mounts_claim)


def _is_gang(job: JobSpec) -> bool:
    """Whether all pods must run at the same time."""
    return job.traits.has_rendezvous and job.max_workers > 1 and not job.is_elastic


def _build_failure_policy(job: JobSpec) -> Manifest:
    """Build the retry settings of a Job: an index that exceeds its retries fails the Job, a disrupted pod does not.

    In a gang, a pod that is retried may meet the other pods before they have noticed the failure, and fail with them:
    hence two pods for each retry.
    """
    return {
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
    }


# --- Namespace, claim, Service, Ingress


def _build_namespace(job: JobSpec) -> list[Manifest]:
    if not job.kubernetes.create_namespace or not job.kubernetes.namespace:
        return []
    return [build_object("v1", "Namespace", job.kubernetes.namespace, {})]


def _build_checkpoint_claim(job: JobSpec) -> list[Manifest]:
    checkpoint = job.checkpoint
    if checkpoint.claim is None or not checkpoint.create:
        return []
    return [
        build_claim(
            checkpoint.claim,
            int(checkpoint.size or 0),
            checkpoint.access,
            {},
            storage_class=checkpoint.storage_class,
            namespace=job.kubernetes.namespace,
        )
    ]


def _build_service(job: JobSpec, name: str, labels: Mapping[str, str], ports: Sequence[int]) -> Manifest:
    """Build a headless Service, or an exposed one; it resolves pods before they are ready."""
    role = labels.get(ROLE_LABEL, "")
    expose = job.roles[role].expose if role in job.roles else "cluster"
    types = {"node_port": "NodePort", "load_balancer": "LoadBalancer"}
    spec: Manifest = {"selector": {JOB_LABEL: job.name, **labels}, "publishNotReadyAddresses": True}
    spec |= {"type": types[expose]} if expose in types else {"clusterIP": "None"}
    if ports:
        spec["ports"] = [{"name": f"port-{port}", "port": port, "protocol": "TCP"} for port in ports]
    return build_job_object("v1", "Service", name, job, labels, spec=spec)


def _build_ingress(job: JobSpec, role: str, service: str) -> list[Manifest]:
    """Build an Ingress that routes a host name to a role's Service, if the role has one."""
    hostname = job.roles[role].ingress if role in job.roles else None
    if hostname is None:
        return []
    backend = {"service": {"name": service, "port": {"number": get_role_port(job, role)}}}
    rule = {"host": hostname, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    return [
        build_job_object("networking.k8s.io/v1", "Ingress", service, job, {ROLE_LABEL: role}, spec={"rules": [rule]})
    ]


# --- Patches


def _apply_patches(obj: Manifest, job: JobSpec) -> Manifest:
    for patch in job.kubernetes.patch:
        if patch_matches(patch, obj):
            obj = strategic_merge(obj, patch)
    return obj


def _check_patch(index: int, patch: Mapping[str, Any], objects: Sequence[Manifest]) -> Iterator[Fault]:
    """Yield a fault for a patch that matches no object."""
    if not any(patch_matches(patch, obj) for obj in objects):
        names = [f"{obj['kind']} {obj['metadata']['name']}" for obj in objects]
        known = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield Fault(f"kubernetes.patch[{index}]", f"matches no object by kind and metadata.name (known: {known})")

"""Collect facts about a Kubernetes cluster for a job, and probe the images of the job there.

Nothing is left behind: objects are only submitted as a server-side dry run, and the pods of the probe are deleted.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from stoker.core.threads import ThreadPool
from stoker.core.units import pluralize
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.findings import ClusterFacts, JobRequirements, OrError, find_requirements
from stoker.doctor.kubernetes.probe import ImageProbe, build_probe_pod, check_image_probe, is_finished
from stoker.doctor.kubernetes.rules import check_cluster, check_unreachable
from stoker.doctor.rules import checks_from_faults
from stoker.errors import ConflictError, SpecError, StokerError, UnavailableError
from stoker.jobs.spec import JobSpec
from stoker.kube.client import API_RESOURCES, KubeClient
from stoker.kube.config import KubeTarget
from stoker.kube.ephemeral_pod import REJECTION_ERRORS, sighup_as_keyboard_interrupt
from stoker.kube.objects import CACHE_SERVICE, ROLE_LABEL, Manifest, build_object
from stoker.kube.rbac import CREATE_NAMESPACE, Feature, Permission, list_permissions, select_features

PARALLEL_REQUESTS = 8
PROBE_TIMEOUT_S = 120
"""For pulling an image and resolving a name."""
POLL_S = 0.5
UNSCHEDULED_TIMEOUT_S = 15.0
"""How long a probe may stay unscheduled."""
PLACEHOLDER_IMAGE = "none"
"""The image of the default job, which is not probed."""
_UNFINISHED_PODS = "status.phase!=Succeeded,status.phase!=Failed"

T = TypeVar("T")
Notify = Callable[[str], None]


def check_kubernetes_job(job: JobSpec, target: KubeTarget, notify: Notify, *, is_given: bool = True) -> list[Check]:
    """Check a job on a cluster and return all checks; `is_given`: the job is the user's, not the default one."""
    try:
        with KubeClient.for_target(target, job.kubernetes.namespace) as cluster:
            return _check_with_client(cluster, job, notify, is_given=is_given)
    except UnavailableError as error:
        return check_unreachable(error)


def _check_with_client(cluster: KubeClient, job: JobSpec, notify: Notify, *, is_given: bool) -> list[Check]:
    server_info = cluster.server_info()
    notify(f"Checking {cluster}")
    job = _with_namespace(job, cluster.namespace, is_given=is_given)
    objects, checks = render_objects(job)
    requirements = find_requirements(objects)
    facts = replace(collect_facts(cluster, job, requirements, objects if is_given else []), server_info=server_info)
    checks = [*check_cluster(job, requirements, facts), *checks]
    if not is_given:
        return checks
    images = _specs_by_image(requirements)
    if images and facts.namespace_object is None:
        return [*checks, Check("image", None, f"skipped: namespace {cluster.namespace} does not exist yet")]
    if images:
        notify(f"Probing {pluralize(len(images), 'image')} there, for up to two minutes")
        has_unreadable_secrets = any(isinstance(secret, StokerError) for secret in facts.secrets.values())
        probes, leftover_checks = probe_images(cluster, images, with_secrets=has_unreadable_secrets)
        checks += [*dict.fromkeys(check for probe in probes for check in check_image_probe(probe)), *leftover_checks]
    return checks


def _with_namespace(job: JobSpec, namespace: str, *, is_given: bool) -> JobSpec:
    """Return the job with its namespace set, and with a placeholder image if it is the default job."""
    change = msgspec.structs.replace
    job = change(job, kubernetes=change(job.kubernetes, namespace=namespace))
    return job if is_given else change(job, image=job.image or PLACEHOLDER_IMAGE)


def render_objects(job: JobSpec) -> tuple[list[Manifest], list[Check]]:
    """Render the objects of a job as far as possible; return them with a check for each fault."""
    from stoker.launchers.kubernetes.launcher import KubernetesLauncher
    from stoker.launchers.kubernetes.manifests import build_manifests

    try:
        return KubernetesLauncher().render(job).objects, []
    except SpecError as error:
        checks = checks_from_faults(error.faults)
    except StokerError as error:
        checks = [Check("job", False, error.what, error.hint or "", code=error.exit_code)]
    objects = _or_error(partial(build_manifests, job))
    return ([] if isinstance(objects, StokerError) else objects), checks


# --- Facts


def collect_facts(
    cluster: KubeClient, job: JobSpec, requirements: JobRequirements, objects: Sequence[Manifest]
) -> ClusterFacts:
    """Query the API server in parallel; a value that cannot be read is replaced by its error."""
    names = dict.fromkeys([*requirements.mounts, *requirements.new_claims])
    queue = job.kubernetes.queue
    with ThreadPool(PARALLEL_REQUESTS, "doctor") as pool:

        def submit(function: Callable[..., T], *args: Any, **kwargs: Any) -> Callable[[], OrError[T]]:
            return pool.submit(_or_error, partial(function, *args, **kwargs)).result

        get_object, list_all = partial(submit, cluster.get), partial(submit, cluster.list_objects)
        namespace = get_object("Namespace", cluster.namespace)
        kubeflow, kueue = (
            submit(cluster.list_api_versions, API_RESOURCES[kind].group) for kind in ("MPIJob", "LocalQueue")
        )
        nodes, pods = list_all("Node"), list_all("Pod", fields=_UNFINISHED_PODS, all_namespaces=True)
        own_pods, quotas = list_all("Pod", fields=_UNFINISHED_PODS), list_all("ResourceQuota")
        classes, volumes = list_all("StorageClass"), list_all("PersistentVolume")
        claims = {name: get_object("PersistentVolumeClaim", name) for name in names}
        events = {name: list_all("Event", fields=f"involvedObject.name={name}") for name in names}
        secret_keys = {name: submit(_secret_keys, cluster, name) for name in requirements.secrets}
        accounts = {name: get_object("ServiceAccount", name) for name in sorted(requirements.accounts)}
        priorities = {name: get_object("PriorityClass", name) for name in sorted(requirements.priorities)}
        cache, local_queue = get_object("Service", CACHE_SERVICE), get_object("LocalQueue", queue) if queue else None
        requested = [
            (permission, verb) for permission in _required_permissions(job, namespace()) for verb in permission.verbs
        ]
        allowed = {(permission, verb): submit(_is_allowed, cluster, permission, verb) for permission, verb in requested}
        samples = [] if namespace() is None else list(_sample_objects(objects))
        dry_runs = {name: submit(_dry_run, cluster, manifest) for name, manifest in samples}
        outcomes = {name: outcome() for name, outcome in dry_runs.items()}
        return ClusterFacts(
            namespace=cluster.namespace,
            server=cluster.server,
            allowed={key: outcome() for key, outcome in allowed.items()},
            namespace_object=namespace(),
            kubeflow_versions=kubeflow(),
            kueue_versions=kueue(),
            queue=local_queue() if local_queue else None,
            nodes=nodes(),
            pods=pods(),
            own_pods=own_pods(),
            quotas=quotas(),
            classes=classes(),
            volumes=volumes(),
            claims=_results(claims),
            claim_events=_results(events),
            secrets=_results(secret_keys),
            accounts=_results(accounts),
            priorities=_results(priorities),
            cache=cache(),
            rejections={name: outcome for name, outcome in outcomes.items() if isinstance(outcome, StokerError)},
            dry_runs=len(outcomes),
        )


def _or_error(function: Callable[[], T]) -> OrError[T]:
    try:
        return function()
    except StokerError as error:
        return error


def _results(pending: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    return {name: result() for name, result in pending.items()}


def _required_permissions(job: JobSpec, namespace: OrError[Manifest | None]) -> list[Permission]:
    """List the permissions to check."""
    ingress = any(role.ingress for role in job.roles.values())
    features = select_features(mpi=job.traits.has_standby_workers, queue=bool(job.kubernetes.queue), ingress=ingress)
    is_new = namespace is None and job.kubernetes.create_namespace
    return [*list_permissions(features | {Feature.CLUSTER_CHECKS}), *([CREATE_NAMESPACE] if is_new else [])]


def _is_allowed(cluster: KubeClient, permission: Permission, verb: str) -> bool:
    resource, _, subresource = permission.resource.partition("/")
    return cluster.is_allowed(
        verb, resource, group=permission.group, subresource=subresource, cluster_scoped=permission.cluster_scoped
    )


def _secret_keys(cluster: KubeClient, name: str) -> frozenset[str] | None:
    """Return the keys of a Secret; its values are discarded."""
    secret = cluster.get("Secret", name)
    return None if secret is None else frozenset(secret.get("data") or ())


def _sample_objects(objects: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield one object of each kind, role and resources, and one pod of each; the others are identical."""
    from stoker.launchers.kubernetes.run_objects import get_pod_templates

    seen = set()
    for manifest in objects:
        name = manifest["metadata"]["name"]
        containers = [each for template in get_pod_templates(manifest) for each in template["spec"]["containers"]]
        resources = json.dumps([container.get("resources") for container in containers])
        key = (manifest["kind"], (manifest["metadata"].get("labels") or {}).get(ROLE_LABEL), resources)
        if key in seen or manifest["kind"] == "Namespace":
            continue
        seen.add(key)
        yield f"{manifest['kind']} {name}", manifest
        for template in get_pod_templates(manifest):
            labels = template["metadata"]["labels"]
            role = f"{name} ({labels[ROLE_LABEL]})" if ROLE_LABEL in labels else name
            yield f"a pod of {role}", build_object("v1", "Pod", name, labels, spec=template["spec"])


def _dry_run(cluster: KubeClient, manifest: Manifest) -> None:
    """Submit an object as a server-side dry run; objects other than jobs may already exist."""
    try:
        cluster.create(manifest, dry_run=True)
    except ConflictError:
        if manifest["kind"] in ("Job", "MPIJob"):
            raise


# --- Image probes


def _specs_by_image(requirements: JobRequirements) -> dict[str, Manifest]:
    """Return each image with the spec of a pod that uses it."""
    specs: dict[str, Manifest] = {}
    for group in requirements.groups:
        for image in group.images:
            specs.setdefault(image, group.spec)
    return specs


def probe_images(
    cluster: KubeClient, images: Mapping[str, Manifest], *, with_secrets: bool
) -> tuple[list[ImageProbe], list[Check]]:
    """Run a small pod for each image, wait for them, and delete them; also return checks of pods that are left."""
    with sighup_as_keyboard_interrupt():
        return _probe_images(cluster, images, with_secrets=with_secrets)


def _probe_images(
    cluster: KubeClient, images: Mapping[str, Manifest], *, with_secrets: bool
) -> tuple[list[ImageProbe], list[Check]]:
    token = secrets.token_hex(4)
    names = {f"stoker-doctor-{token}-{number}": image for number, image in enumerate(images)}
    probes: dict[str, ImageProbe] = {}
    leftover_checks = []
    try:
        for name, image in names.items():
            pod = build_probe_pod(
                images[image], image, name, cluster.namespace, PROBE_TIMEOUT_S + 60, secrets=with_secrets
            )
            probes[name] = ImageProbe(image)
            try:
                probes[name] = ImageProbe(image, cluster.create(pod))
            except StokerError as error:
                probes[name] = ImageProbe(image, rejection=error)
        _wait_for_probes(cluster, probes)
    finally:
        for name, probe in probes.items():
            if not isinstance(probe.rejection, REJECTION_ERRORS):
                leftover_checks += _delete_pod(cluster, name)
    return list(probes.values()), leftover_checks


def _wait_for_probes(cluster: KubeClient, probes: dict[str, ImageProbe]) -> None:
    """Poll the pods until each has finished or the timeout expires."""
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        unfinished = [name for name, probe in probes.items() if probe.pod is not None and not is_finished(probe.pod)]
        unfinished = [
            name
            for name in unfinished
            if waited_s < UNSCHEDULED_TIMEOUT_S or (probes[name].pod or {})["spec"].get("nodeName")
        ]
        if not unfinished or waited_s > PROBE_TIMEOUT_S:
            break
        time.sleep(POLL_S)
        for name in unfinished:
            with contextlib.suppress(UnavailableError):
                probes[name] = probes[name]._replace(
                    pod=cluster.get("Pod", name) or probes[name].pod, waited_s=waited_s
                )
    for name in unfinished:
        events = _or_error(partial(cluster.list_objects, "Event", fields=f"involvedObject.name={name}"))
        if not isinstance(events, StokerError):
            probes[name] = probes[name]._replace(events=events)


def _delete_pod(cluster: KubeClient, name: str) -> list[Check]:
    try:
        cluster.delete("Pod", name, grace_s=0)
    except StokerError as error:
        fix = f"kubectl delete pod {name} -n {cluster.namespace}"
        return [Check("probe", None, f"pod {name} could not be deleted: {error.what}", fix)]
    return []

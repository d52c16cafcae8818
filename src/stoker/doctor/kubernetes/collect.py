"""Looks at a Kubernetes cluster for a job, and tries the job's images there; all that is judged is judged elsewhere.

Nothing is left behind: objects are shown to the API server with dry-run, and the pods of the probe are deleted.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from stoker.core.threads import Threads
from stoker.core.units import counted
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.findings import Found, Look, Wants, wants
from stoker.doctor.kubernetes.probe import Probe, is_told, of_probe, probe_pod
from stoker.doctor.kubernetes.rules import of_look, of_silence
from stoker.doctor.rules import of_faults
from stoker.errors import ConflictError, SpecError, StokerError, UnavailableError
from stoker.jobs.spec import Job
from stoker.kube.client import KINDS, Cluster
from stoker.kube.config import Place
from stoker.kube.ephemeral_pod import REFUSED, hang_up_as_ctrl_c
from stoker.kube.objects import CACHE, ROLE, Manifest, manifest
from stoker.kube.rbac import NEW_NAMESPACE, Part, Right, parts, rights

AT_ONCE = 8
BOUND_S = 120
"""For pulling an image, and looking up a name."""
POLL_S = 0.5
UNPLACED_S = 15.0
"""A probe that no node takes for so long is given up."""
NO_IMAGE = "none"
"""In the place of an image where the job is not the user's."""
_CURRENT = "status.phase!=Succeeded,status.phase!=Failed"

T = TypeVar("T")
Tell = Callable[[str], None]


def examine_cluster(job: Job, place: Place, tell: Tell, *, is_given: bool = True) -> list[Check]:
    """Look, ask, try and judge; `is_given`: the job is the user's, and not one of the doctor's own."""
    try:
        with Cluster.at(place, job.kubernetes.namespace) as cluster:
            return _examine(cluster, job, tell, is_given=is_given)
    except UnavailableError as error:
        return of_silence(error)


def _examine(cluster: Cluster, job: Job, tell: Tell, *, is_given: bool) -> list[Check]:
    hello = cluster.hello()
    tell(f"Looking at {cluster}")
    job = _in_namespace(job, cluster.namespace, is_given=is_given)
    objects, checks = rendered(job)
    wanted = wants(objects)
    look = replace(look_at(cluster, job, wanted, objects if is_given else []), hello=hello)
    checks = [*of_look(job, wanted, look), *checks]
    if not is_given:
        return checks
    images = _images(wanted)
    if images and look.space is None:
        return [*checks, Check("image", None, f"not tried: there is no namespace {cluster.namespace} yet")]
    if images:
        tell(f"Trying {counted(len(images), 'image')} there, for two minutes at most")
        unseen = any(isinstance(one, StokerError) for one in look.secrets.values())
        probes, left = try_images(cluster, images, with_secrets=unseen)
        checks += [*dict.fromkeys(check for probe in probes for check in of_probe(probe)), *left]
    return checks


def _in_namespace(job: Job, namespace: str, *, is_given: bool) -> Job:
    """Give the job as it is rendered: for the namespace that is meant, and with some image."""
    change = msgspec.structs.replace
    job = change(job, kubernetes=change(job.kubernetes, namespace=namespace))
    return job if is_given else change(job, image=job.image or NO_IMAGE)


def rendered(job: Job) -> tuple[list[Manifest], list[Check]]:
    """Give the objects of a job, and what the launcher would refuse; what can be made is made all the same."""
    from stoker.launchers.kubernetes.launcher import KubernetesLauncher
    from stoker.launchers.kubernetes.manifests import manifests

    try:
        return KubernetesLauncher().render(job).objects, []
    except SpecError as error:
        checks = of_faults(error.faults)
    except StokerError as error:
        checks = [Check("job", False, error.what, error.hint or "", code=error.exit_code)]
    objects = _tried(partial(manifests, job))
    return ([] if isinstance(objects, StokerError) else objects), checks


# --- Looking


def look_at(cluster: Cluster, job: Job, wanted: Wants, objects: Sequence[Manifest]) -> Look:
    """Ask all that can be asked at once; whatever cannot be told is an error in its place."""
    names = dict.fromkeys([*wanted.mounts, *wanted.made])
    queue = job.kubernetes.queue
    with Threads(AT_ONCE, "doctor") as pool:

        def ask(do: Callable[..., T], *given: Any, **more: Any) -> Callable[[], Found[T]]:
            return pool.submit(_tried, partial(do, *given, **more)).result

        get, every = partial(ask, cluster.get), partial(ask, cluster.every)
        space = get("Namespace", cluster.namespace)
        operator, kueue = (ask(cluster.served, KINDS[kind].group) for kind in ("MPIJob", "LocalQueue"))
        nodes, pods = every("Node"), every("Pod", fields=_CURRENT, everywhere=True)
        own_pods, quotas = every("Pod", fields=_CURRENT), every("ResourceQuota")
        classes, volumes = every("StorageClass"), every("PersistentVolume")
        claims = {name: get("PersistentVolumeClaim", name) for name in names}
        events = {name: every("Event", fields=f"involvedObject.name={name}") for name in names}
        keys = {name: ask(_keys, cluster, name) for name in wanted.secrets}
        accounts = {name: get("ServiceAccount", name) for name in sorted(wanted.accounts)}
        priorities = {name: get("PriorityClass", name) for name in sorted(wanted.priorities)}
        cache, queued = get("Service", CACHE), get("LocalQueue", queue) if queue else None
        asked = [(right, verb) for right in _rights(job, space()) for verb in right.verbs]
        allowed = {(right, verb): ask(_may, cluster, right, verb) for right, verb in asked}
        samples = [] if space() is None else list(_samples(objects))
        shown = {name: ask(_show, cluster, one) for name, one in samples}
        answers = {name: answer() for name, answer in shown.items()}
        return Look(
            namespace=cluster.namespace,
            server=cluster.server,
            allowed={key: answer() for key, answer in allowed.items()},
            space=space(),
            operator=operator(),
            kueue=kueue(),
            queue=queued() if queued else None,
            nodes=nodes(),
            pods=pods(),
            own_pods=own_pods(),
            quotas=quotas(),
            classes=classes(),
            volumes=volumes(),
            claims=_values(claims),
            claim_events=_values(events),
            secrets=_values(keys),
            accounts=_values(accounts),
            priorities=_values(priorities),
            cache=cache(),
            refusals={name: answer for name, answer in answers.items() if isinstance(answer, StokerError)},
            tried=len(answers),
        )


def _tried(do: Callable[[], T]) -> Found[T]:
    try:
        return do()
    except StokerError as error:
        return error


def _values(asked: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    return {name: answer() for name, answer in asked.items()}


def _rights(job: Job, space: Found[Manifest | None]) -> list[Right]:
    """List the rights that are asked about."""
    ingress = any(role.ingress for role in job.roles.values())
    mine = parts(mpi=job.topology == "mpi", queue=bool(job.kubernetes.queue), ingress=ingress)
    is_new = space is None and job.kubernetes.create_namespace
    return [*rights(mine | {Part.NODES}), *([NEW_NAMESPACE] if is_new else [])]


def _may(cluster: Cluster, right: Right, verb: str) -> bool:
    resource, _, inner = right.resource.partition("/")
    return cluster.may(verb, resource, group=right.group, subresource=inner, everywhere=right.everywhere)


def _keys(cluster: Cluster, name: str) -> frozenset[str] | None:
    """Give the keys of a secret; its values are thrown away here."""
    found = cluster.get("Secret", name)
    return None if found is None else frozenset(found.get("data") or ())


def _samples(objects: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Give one object of each kind and role, and one pod of each role, for those of one role are alike."""
    from stoker.launchers.kubernetes.manifests import templates

    seen = set()
    for one in objects:
        name = one["metadata"]["name"]
        key = (one["kind"], (one["metadata"].get("labels") or {}).get(ROLE))
        if key in seen or one["kind"] == "Namespace":
            continue
        seen.add(key)
        yield f"{one['kind']} {name}", one
        for template in templates(one):
            labels = template["metadata"]["labels"]
            role = f"{name} ({labels[ROLE]})" if ROLE in labels else name
            yield f"a pod of {role}", manifest("v1", "Pod", name, labels, spec=template["spec"])


def _show(cluster: Cluster, one: Manifest) -> None:
    """Show an object to the API server without making it; claims and the like may be there already."""
    try:
        cluster.create(one, dry_run=True)
    except ConflictError:
        if one["kind"] in ("Job", "MPIJob"):
            raise


# --- Trying


def _images(wanted: Wants) -> dict[str, Manifest]:
    """Give each image with a pod that wants it."""
    found: dict[str, Manifest] = {}
    for group in wanted.groups:
        for image in group.images:
            found.setdefault(image, group.spec)
    return found


def try_images(
    cluster: Cluster, images: Mapping[str, Manifest], *, with_secrets: bool
) -> tuple[list[Probe], list[Check]]:
    """Run a small pod for each image, wait for all within a bound, and delete them; tell also what could not be."""
    with hang_up_as_ctrl_c():
        return _try_images(cluster, images, with_secrets=with_secrets)


def _try_images(
    cluster: Cluster, images: Mapping[str, Manifest], *, with_secrets: bool
) -> tuple[list[Probe], list[Check]]:
    token = secrets.token_hex(4)
    names = {f"stoker-doctor-{token}-{number}": image for number, image in enumerate(images)}
    made: dict[str, Probe] = {}
    left = []
    try:
        for name, image in names.items():
            pod = probe_pod(images[image], image, name, cluster.namespace, BOUND_S + 60, secrets=with_secrets)
            made[name] = Probe(image)
            try:
                made[name] = Probe(image, cluster.create(pod))
            except StokerError as error:
                made[name] = Probe(image, refused=error)
        _wait(cluster, made)
    finally:
        for name, probe in made.items():
            if not isinstance(probe.refused, REFUSED):
                left += _remove(cluster, name)
    return list(made.values()), left


def _wait(cluster: Cluster, made: dict[str, Probe]) -> None:
    """Follow the pods until each has told something, or time is up."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        open_ones = [name for name, probe in made.items() if probe.pod is not None and not is_told(probe.pod)]
        open_ones = [
            name for name in open_ones if waited < UNPLACED_S or (made[name].pod or {})["spec"].get("nodeName")
        ]
        if not open_ones or waited > BOUND_S:
            break
        time.sleep(POLL_S)
        for name in open_ones:
            with contextlib.suppress(UnavailableError):
                made[name] = made[name]._replace(pod=cluster.get("Pod", name) or made[name].pod, waited_s=waited)
    for name in open_ones:
        events = _tried(partial(cluster.every, "Event", fields=f"involvedObject.name={name}"))
        if not isinstance(events, StokerError):
            made[name] = made[name]._replace(events=events)


def _remove(cluster: Cluster, name: str) -> list[Check]:
    try:
        cluster.delete("Pod", name, grace_s=0)
    except StokerError as error:
        fix = f"kubectl delete pod {name} -n {cluster.namespace}"
        return [Check("probe", None, f"{name} could not be removed: {error.what}", fix)]
    return []

"""Jobs in a Kubernetes cluster, whose own controllers watch over them.

`render` is pure but for what it reads of the user's files. `start` makes the lead Job suspended, gives it everything
else for its own, and lets it go; so one delete removes all, and nothing runs by halves. From there on the job needs
nobody here: `follower` brings its logs, and whoever asks later takes the run up again, also on another machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import msgspec

from stoker.core.processes import wait_until
from stoker.core.units import format_bytes, pluralize
from stoker.errors import (
    AccessDeniedError,
    ConflictError,
    InputError,
    MissingError,
    NotFoundError,
    SpecError,
    StokerError,
    UnavailableError,
)
from stoker.jobs.launcher import SlotLogLine, LauncherTraits, check_traits
from stoker.jobs.run_folder import Run, stoker_home
from stoker.jobs.spec import Job
from stoker.jobs.status import STOPPED_MESSAGE, JobState, JobStatus
from stoker.jobs.topology import OBSERVER_ROLES, Slot
from stoker.kube.claims import check_mountable
from stoker.kube.client import KubeClient
from stoker.kube.conditions import get_condition, is_terminating, true_conditions
from stoker.kube.config import KubeTarget, load_config, parse_handle, resolve_target
from stoker.kube.objects import (
    INDEX_LABEL,
    JOB_LABEL,
    MANAGED_BY,
    QUEUE_LABEL,
    RUN_LABEL,
    Manifest,
    cache_url,
    strategic_merge,
    with_owner,
)
from stoker.kube.rbac import build_rbac, select_features
from stoker.launchers.kubernetes.follower import STOP_FILE
from stoker.launchers.kubernetes.manifests import (
    JOB_FILE,
    PERSISTENT_KINDS,
    build_manifests,
    check_job,
    find_lead,
    get_lead_kind,
    get_pod_templates,
    has_separate_chief,
    label_run,
)
from stoker.launchers.kubernetes.plan import KubernetesPlan, read_code_files, read_plan, resolve_code_files
from stoker.launchers.kubernetes.status import get_role, parse_time, sort_owner_first
from stoker.launchers.local import read_run_logs, start_background_process
from stoker.launchers.supervisor import supervisor_pid

FOLLOWER = "stoker.launchers.kubernetes.follower"
RUN_SELECTOR = ",".join([RUN_LABEL, *(f"{key}={value}" for key, value in MANAGED_BY.items())])
"""Selects what belongs to runs."""
POLL_S = 0.5
SETTLE_S = 10.0
GONE_S = 30.0
"""How long the cluster may take to forget a job, beyond its grace."""


class KubernetesLauncher:
    """Runs slots as pods."""

    traits: ClassVar[LauncherTraits] = LauncherTraits(
        name="k8s",
        topologies=frozenset({"mpi", "single", "tf-mirrored", "tf-ps", "torchrun"}),
        supports_elastic=True,
        supports_claims=True,
        has_targets=True,
    )

    def __init__(self, place: str | None = None) -> None:
        self._place = resolve_target(KubeTarget.parse(place))

    def resolve_paths(self, job: Job) -> Job:
        """Name the namespace, where the place does; paths are those of the image already."""
        namespace = self._place.namespace or job.kubernetes.namespace
        return msgspec.structs.replace(job, kubernetes=msgspec.structs.replace(job.kubernetes, namespace=namespace))

    def render(self, job: Job) -> KubernetesPlan:
        """Give every object; reads the files that travel with the job, and asks no cluster."""
        job = self.resolve_paths(job)
        there, files, missing = resolve_code_files(job)
        found = check_traits(job, self.traits)
        if job.topology in self.traits.topologies:
            found += [*check_job(job), *missing]
        if found:
            raise SpecError(found, where=f"job {job.name!r} on k8s")
        code = read_code_files(files)
        return KubernetesPlan(
            objects=build_manifests(_with_cache(there), code),
            context=self._place.context,
            namespace=job.kubernetes.namespace,
            notes=tuple(_notes(job, code)),
        )

    def render_rbac(self, job: Job, who: str) -> KubernetesPlan:
        """Give the Role that somebody needs who runs such jobs, and its binding."""
        used = select_features(
            mpi=job.topology == "mpi",
            queue=job.kubernetes.queue is not None,
            ingress=any(role.ingress for role in job.roles.values()),
        )
        namespace = job.kubernetes.namespace or load_config(self._place.context).namespace
        create = job.kubernetes.create_namespace
        return KubernetesPlan(objects=build_rbac(namespace, who, features=used, create_namespace=create))

    def start(self, rendered: KubernetesPlan, run: Run, *, detach: bool = False) -> str:  # noqa: ARG002
        """Make the objects, and follow them."""
        with KubeClient.for_target(KubeTarget(rendered.context, rendered.namespace)) as cluster:
            handle = f"{cluster.url}/{run.id}"
            create_objects(cluster, label_run(rendered.objects, run.id))
        run.write("handle", f"{handle}\n".encode())
        self._follow(run)
        return handle

    def restart(self, run: Run, *, detach: bool = False) -> None:  # noqa: ARG002
        """Make the objects of a run again that is over; its attempts are counted on."""
        if not wait_until(lambda: supervisor_pid(run) is None, GONE_S):
            raise ConflictError("is being followed already", where=run.id)
        place, _ = parse_handle(run.handle)
        before = run.read_status()
        with KubeClient.for_target(place) as cluster:
            create_objects(cluster, label_run(_objects(run), run.id, before.next_attempt))
        (run.folder / STOP_FILE).unlink(missing_ok=True)
        run.write_status(msgspec.structs.replace(before, state=JobState.PENDING, ended=None, message=""))
        self._follow(run)

    def status(self, handle: str) -> JobStatus:
        """Tell what the follower told last; where none follows, take the run up again."""
        run = self._run(handle)
        now = run.read_status()
        if (now.state.is_final and now.state is not JobState.LOST) or supervisor_pid(run) is not None:
            return now
        if now.state is JobState.LOST:
            place, _ = parse_handle(handle)
            with KubeClient.for_target(place) as cluster:
                cluster.version()  # or say that it does not answer
            run.write_status(msgspec.structs.replace(now, state=JobState.PENDING, ended=None))
        self._follow(run)
        wait_until(lambda: supervisor_pid(run) is None or run.read_status() != now, 5)
        return run.read_status()

    def logs(self, handle: str, slot: Slot | None, *, follow: bool) -> Iterator[SlotLogLine]:
        """Give what the pods wrote, which comes here as it is written."""
        run = self._run(handle)
        was_followed = supervisor_pid(run) is not None
        is_over = self.status(handle).state.is_final  # now someone follows
        if not (follow or was_followed or is_over):
            _settle(run)
        return read_run_logs(run, slot, is_over=lambda: not follow or self.status(handle).state.is_final)

    def stop(self, handle: str) -> None:
        """Delete what the run has in the cluster, and wait until its pods have ended."""
        run = self._run(handle)
        place, _ = parse_handle(handle)
        if not run.read_status().state.is_final:
            (run.folder / STOP_FILE).touch()
        with KubeClient.for_target(place) as cluster:
            left = _removed(cluster, run)
        if supervisor_pid(run) is not None:
            wait_until(lambda: supervisor_pid(run) is None, GONE_S)
        if not run.read_status().state.is_final:
            ended = {"state": JobState.STOPPED, "message": STOPPED_MESSAGE, "ended": time.time()}
            run.write_status(msgspec.structs.replace(run.read_status(), **ended))
        if left:
            what = f"pods have not ended in time: {', '.join(left[:3])}"
            raise UnavailableError(what, where=handle, hint="their node may be gone; they end when it is back")

    # --- Runs of the cluster, wherever they were started

    def runs(self) -> list[dict[str, object]]:
        """List the runs in the namespace, the newest first, from the cluster itself."""
        with KubeClient.for_target(self._place) as cluster:
            found = _by_run([one for one in cluster.list_objects("Job", RUN_SELECTOR) if not _is_of_an_operator(one)])
            with suppress(MissingError, AccessDeniedError):  # where there is no such operator, there are none
                found |= _by_run(cluster.list_objects("MPIJob", RUN_SELECTOR))
        rows = [_row(run, objects) for run, objects in found.items()]
        return sorted(rows, key=lambda row: str(row["started"]), reverse=True)

    def adopt(self, name: str) -> Run:
        """Find a run in the cluster by its id or its job's name, and make a folder for it here if there is none."""
        with KubeClient.for_target(self._place) as cluster:
            maps = [
                one for one in cluster.list_objects("ConfigMap", RUN_SELECTOR) if JOB_FILE in (one.get("data") or {})
            ]
        labels = [one["metadata"]["labels"] for one in maps]
        chosen = [one for one, has in zip(maps, labels, strict=True) if name in (has[RUN_LABEL], has[JOB_LABEL])]
        if not chosen:
            known = ", ".join(sorted(has[RUN_LABEL] for has in labels)) or "none"
            raise NotFoundError(f"there is no run {name!r}", where=cluster, hint=f"there are: {known}")
        run = Run(stoker_home() / "runs" / chosen[0]["metadata"]["labels"][RUN_LABEL])
        if not (run.folder / "handle").exists():
            run.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            run.write(JOB_FILE, chosen[0]["data"][JOB_FILE].encode())
            run.write("handle", f"{cluster.url}/{run.id}\n".encode())
        return run

    def _run(self, handle: str) -> Run:
        return Run(stoker_home() / "runs" / parse_handle(handle)[1])

    def _follow(self, run: Run) -> None:
        start_background_process(run, lambda: supervisor_pid(run) is not None or _is_over(run), module=FOLLOWER)


def _is_of_an_operator(one: Manifest) -> bool:
    """Whether a Job is the launcher of an MPIJob, which speaks for itself."""
    return any(owner["kind"] == "MPIJob" for owner in one["metadata"].get("ownerReferences") or ())


def _is_over(run: Run) -> bool:
    return run.read_status().state.is_final


def _settle(run: Run) -> None:
    """Wait until what was said by now is here: nothing new has come for a moment."""
    deadline = time.monotonic() + SETTLE_S
    sizes: dict[Path, int] = {}
    while time.monotonic() < deadline and not _is_over(run):
        before, sizes = sizes, {path: path.stat().st_size for path in run.logs.iterdir()}
        if sizes and sizes == before:
            return
        time.sleep(2 * POLL_S)


def _with_cache(job: Job) -> Job:
    """Name the cache of the namespace, where the job wants its data through it."""
    if job.data.via != "cluster":
        return job
    via = cache_url(job.kubernetes.namespace)
    return msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, via=via))


def _objects(run: Run) -> list[Manifest]:
    if not (run.folder / "plan.json").exists():
        hint = "start it anew from its file: stoker job run FILE --on k8s"
        raise InputError("was started on another machine, and cannot be made again here", where=run.id, hint=hint)
    return read_plan(run).objects


def _notes(job: Job, code: dict[str, bytes]) -> Iterator[str]:
    """Tell what will travel, and what is odd."""
    if code:
        size = sum(map(len, code.values()))
        yield f"with the job, in a ConfigMap: {pluralize(len(code), 'file')} ({format_bytes(size)})"
    folder = job.checkpoint.dir
    if folder is None and job.program.command is None:  # a command may have nothing to keep
        yield "checkpoint.dir names no place: checkpoints would be lost with their pod, and a new attempt begins anew"
    elif folder and job.checkpoint.claim is None and "://" not in folder and not _is_mounted(job):
        yield f"nothing is mounted at {folder}: checkpoints are lost with their pod; give checkpoint.claim"
    several = job.topology.startswith("tf-") or has_separate_chief(job)
    if job.kubernetes.queue and several:
        yield f"queue {job.kubernetes.queue} admits each Job of this one by itself: some pods may wait while others run"
    if several and job.kubernetes.deadline is None:
        yield "its Jobs end each other only where someone follows; kubernetes.deadline is an end for all cases"
    if job.profile.every > 0 and job.program.command is not None:
        yield "the profiler needs python3 in the image; without it, the program runs unprofiled"


def _is_mounted(job: Job) -> bool:
    folder = Path(job.checkpoint.dir or "/")
    return any(folder.is_relative_to(volume.path) for volume in job.volumes)


def _by_run(objects: Sequence[Manifest]) -> dict[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for one in objects:
        found.setdefault(one["metadata"]["labels"][RUN_LABEL], []).append(one)
    return found


def _row(run: str, objects: Sequence[Manifest]) -> dict[str, object]:
    """Tell of a run what its Jobs tell."""
    lead, *_ = ordered = sort_owner_first(objects)
    job = lead["metadata"]["labels"][JOB_LABEL]
    active = sum(int(one.get("status", {}).get("active") or 0) for one in objects)
    state = _state(ordered, active)
    return {
        "run": run,
        "job": job,
        "state": str(state),
        "started": lead["metadata"]["creationTimestamp"],
        "took_s": _took(lead),
        "pods": active,
    }


def _state(objects: Sequence[Manifest], active: int) -> JobState:
    """Tell how a run is by its Jobs alone: who looks on does not count, and all that lead must be done."""
    lead, *_ = counting = [one for one in objects if get_role(one) not in OBSERVER_ROLES]
    alike = [one for one in counting if INDEX_LABEL in one["metadata"]["labels"] and get_role(one) == get_role(lead)]
    if all(true_conditions(one) & {"Complete", "Succeeded"} for one in alike or [lead]):
        return JobState.SUCCEEDED
    if any("Failed" in true_conditions(one) for one in counting):
        return JobState.FAILED
    return JobState.RUNNING if active else JobState.PENDING


def _took(lead: Manifest) -> float | None:
    status = lead.get("status", {})
    begun = parse_time(status.get("startTime"))
    failed = get_condition(lead, "Failed").get("lastTransitionTime")
    ended = parse_time(status.get("completionTime")) or parse_time(failed) or time.time()
    return round(ended - begun, 1) if begun else None


# --- Making objects, and removing them


def _removed(cluster: KubeClient, run: Run) -> list[str]:
    """Delete what a run has in the cluster; give the pods that would not end, grace and all."""
    kind, labels = get_lead_kind(run.job), {RUN_LABEL: run.id}
    for each in (kind, "Service", "ConfigMap"):  # the lead owns the others, unless a start was cut short
        for one in cluster.list_objects(each, labels):
            cluster.delete(each, one["metadata"]["name"])

    def left() -> list[str]:
        return [pod["metadata"]["name"] for pod in cluster.list_objects("Pod", labels)]

    try:
        wait_until(lambda: not left(), float(run.job.grace) + GONE_S, max_interval_s=POLL_S)
    except KeyboardInterrupt:  # a second Ctrl-C cuts the grace short
        for name in left():
            cluster.delete("Pod", name, grace_s=0)
        wait_until(lambda: not left(), GONE_S, max_interval_s=POLL_S)
    return left()


def create_objects(cluster: KubeClient, objects: Sequence[Manifest]) -> None:
    """Make all objects of a run; where one is refused, none is left but what is to stay."""
    lead = find_lead(objects)
    _clear(cluster, lead)
    staying = [one for one in objects if one["kind"] in PERSISTENT_KINDS]
    new = [one for one in staying if cluster.get(one["kind"], one["metadata"]["name"]) is None]
    specs = [template["spec"] for one in objects for template in get_pod_templates(one)]
    check_mountable(cluster, specs, created=[one["metadata"]["name"] for one in new])
    if QUEUE_LABEL in lead["metadata"]["labels"] and not cluster.list_api_versions("kueue.x-k8s.io"):
        what = f"queue {lead['metadata']['labels'][QUEUE_LABEL]} would never admit it: there is no Kueue in the cluster"
        raise MissingError(what, where=cluster, hint="leave out kubernetes.queue, or have Kueue installed")
    for one in new:
        cluster.create(one)
    made = cluster.create(_suspended(lead))
    try:
        for one in objects:
            if one is not lead and one not in staying:
                _create(cluster, with_owner(one, made))
        if QUEUE_LABEL not in lead["metadata"]["labels"]:  # else Kueue lets it go
            cluster.patch(lead["kind"], lead["metadata"]["name"], _suspension(lead["kind"], False))
    except BaseException:
        with suppress(StokerError):
            cluster.delete(lead["kind"], lead["metadata"]["name"])
        raise


def _create(cluster: KubeClient, one: Manifest) -> None:
    """Make an object that is the run's alone: what has its name already is somebody's, and is not touched."""
    try:
        cluster.create(one)
    except ConflictError as error:
        what = f"there is a {one['kind']} {one['metadata']['name']} already, which is not of this run"
        raise ConflictError(what, where=cluster, hint="delete it, or give the job another name") from error


def _clear(cluster: KubeClient, lead: Manifest) -> None:
    """Make room for the lead: an old job of the name that is over goes, one that runs is in the way."""
    kind, name = lead["kind"], lead["metadata"]["name"]
    try:
        found = cluster.get(kind, name)
    except MissingError as error:
        hint = "topology mpi needs the MPI operator of Kubeflow there, 0.6 or later"
        raise MissingError(
            f"the cluster does not know {kind} ({lead['apiVersion']})", where=cluster, hint=hint
        ) from error
    if found is None:
        return
    labels = found["metadata"].get("labels") or {}
    if not MANAGED_BY.items() <= labels.items():
        raise ConflictError(f"there is a {kind} {name} already, and it is not ours", where=cluster)
    if not true_conditions(found) & {"Complete", "Failed", "Succeeded"} and not is_terminating(found):
        run = labels.get(RUN_LABEL) or name
        hint = f"stop it with: stoker job stop {cluster.url}/{run}; or give this one another name"
        raise ConflictError(f"the job {name} is there already, and is not over", where=cluster, hint=hint)
    cluster.delete(kind, name, foreground=True)

    def left() -> list[Manifest]:
        """Give what the old one owned, too: it goes a moment later."""
        return [
            one
            for each in (kind, "Service", "ConfigMap")
            for one in cluster.list_objects(each, {JOB_LABEL: labels[JOB_LABEL]})
        ]

    if not wait_until(lambda: not left(), GONE_S, max_interval_s=POLL_S):
        raise UnavailableError(f"the old {kind} {name} is not gone after {GONE_S:g} s", where=cluster)


def _suspension(kind: str, is_on: bool) -> Manifest:
    return {"spec": {"runPolicy": {"suspend": is_on}}} if kind == "MPIJob" else {"spec": {"suspend": is_on}}


def _suspended(lead: Manifest) -> Manifest:
    held: Manifest = strategic_merge(lead, _suspension(lead["kind"], True))
    return held

"""Kubernetes launcher: render, start, follow and stop jobs, which the cluster's own controllers run and retry.

`render` only reads the user's files. After `start` a job depends on no process on this machine: the follower copies its
logs, and any later command resumes following, also on another machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from stoker.core.processes import wait_until
from stoker.core.spec import run_checks
from stoker.core.units import format_bytes, pluralize
from stoker.errors import ConflictError, Fault, InputError, NotFoundError, UnavailableError
from stoker.jobs.launcher import LauncherTraits, SlotLogLine, check_traits, raise_faults
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder, sort_key, stoker_home
from stoker.jobs.run_lookup import choose_run
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, JobState, JobStatus
from stoker.jobs.topology import Slot
from stoker.kube.client import KubeClient
from stoker.kube.config import KubeTarget, load_config, parse_handle, resolve_target
from stoker.kube.objects import JOB_LABEL, RUN_LABEL, Manifest, cache_url
from stoker.kube.rbac import build_rbac, select_features
from stoker.launchers.kubernetes.addresses import list_worker_jobs
from stoker.launchers.kubernetes.checks import check_kubernetes_settings
from stoker.launchers.kubernetes.config_map import JOB_FILE
from stoker.launchers.kubernetes.lifecycle import DELETE_TIMEOUT_S, POLL_S, create_objects, delete_objects
from stoker.launchers.kubernetes.manifests import build_manifests
from stoker.launchers.kubernetes.namespace_runs import NamespaceRuns
from stoker.launchers.kubernetes.plan import KubernetesPlan, read_code_files, read_kubernetes_plan, resolve_code_files
from stoker.launchers.kubernetes.run_list import RUN_SELECTOR, list_cluster_runs
from stoker.launchers.kubernetes.run_objects import label_run
from stoker.launchers.run_logs import read_run_logs
from stoker.launchers.supervise.background import start_follower
from stoker.launchers.supervise.supervisor import supervisor_pid

FOLLOWER_MODULE = "stoker.launchers.kubernetes.follower"
FIRST_STATUS_TIMEOUT_S = 5.0
"""How long `status` waits for a new follower's first status."""
LOG_COPY_TIMEOUT_S = 10.0
"""How long `logs` waits for a new follower to copy what was logged so far."""


class KubernetesLauncher:
    """Launcher for Kubernetes: slots are pods."""

    traits: ClassVar[LauncherTraits] = LauncherTraits(
        name="k8s",
        supports_standby_workers=True,
        supports_address_per_slot=True,
        supports_elastic=True,
        supports_unequal_workers=True,
        supports_claims=True,
        has_targets=True,
        lists_runs=True,
        has_rbac=True,
        follows_runs=True,
    )

    def __init__(self, target: str | None = None) -> None:
        self._target = resolve_target(KubeTarget.parse(target))

    def resolve_paths(self, job: JobSpec) -> JobSpec:
        """Return the job with the target's namespace; its paths are paths of the image."""
        namespace = self._target.namespace or job.kubernetes.namespace
        return msgspec.structs.replace(job, kubernetes=msgspec.structs.replace(job.kubernetes, namespace=namespace))

    def check(self, job: JobSpec) -> Iterator[Fault]:
        """Yield what no cluster can run, and code files that do not exist."""
        yield from check_traits(job, self.traits)
        yield from check_kubernetes_settings(job)
        yield from run_checks(job, lambda job: resolve_code_files(job)[2])

    def render(self, job: JobSpec) -> KubernetesPlan:
        """Render every object; read the code files, but do not contact a cluster."""
        job = self.resolve_paths(job)
        raise_faults(self.check(job))
        pod_job, files, _ = resolve_code_files(job)
        code = read_code_files(files)
        return KubernetesPlan(
            objects=build_manifests(_resolve_cache_url(pod_job), code),
            context=self._target.context,
            namespace=job.kubernetes.namespace,
            notes=tuple(_list_notes(job, code)),
        )

    def render_rbac(self, job: JobSpec, who: str) -> KubernetesPlan:
        """Render the Role and RoleBinding that a user needs to run such a job."""
        features = select_features(
            mpi=job.traits.has_standby_workers,
            queue=job.kubernetes.queue is not None,
            ingress=any(role.ingress for role in job.roles.values()),
        )
        namespace = job.kubernetes.namespace or load_config(self._target.context).namespace
        create_namespace = job.kubernetes.create_namespace
        return KubernetesPlan(objects=build_rbac(namespace, who, features=features, create_namespace=create_namespace))

    def start(self, rendered: KubernetesPlan, run: RunFolder, *, detach: bool = False) -> str:  # noqa: ARG002
        """Create the objects and start a follower; return the handle."""
        with KubeClient.for_target(KubeTarget(rendered.context, rendered.namespace)) as client:
            handle = f"{client.url}/{run.id}"
            create_objects(client, label_run(rendered.objects, run.id))
        run.write("handle", f"{handle}\n".encode())
        self._follow(run)
        return handle

    def restart(self, run: RunFolder, *, detach: bool = False) -> None:  # noqa: ARG002
        """Create the objects of a finished run again; attempt numbers continue."""
        if not wait_until(lambda: supervisor_pid(run) is None, DELETE_TIMEOUT_S):
            raise ConflictError("another process still follows the run", where=run.id)
        target, _ = parse_handle(run.handle)
        status = run.read_status()
        with KubeClient.for_target(target) as client:
            create_objects(client, label_run(_read_objects(run), run.id, status.next_attempt))
        (run.folder / STOP_REQUEST_FILE).unlink(missing_ok=True)
        run.write_status(msgspec.structs.replace(status, state=JobState.PENDING, ended=None, message=""))
        self._follow(run)

    def status(self, handle: str) -> JobStatus:
        """Return the follower's last status; start a follower if none is running."""
        run = self._get_run(handle)
        status = run.read_status()
        if (status.state.is_final and status.state is not JobState.LOST) or supervisor_pid(run) is not None:
            return status
        if status.state is JobState.LOST:
            target, _ = parse_handle(handle)
            with KubeClient.for_target(target) as client:
                client.version()  # raises UnavailableError if the API server cannot be reached
            run.write_status(msgspec.structs.replace(status, state=JobState.PENDING, ended=None))
        self._follow(run)
        wait_until(lambda: supervisor_pid(run) is None or run.read_status() != status, FIRST_STATUS_TIMEOUT_S)
        return run.read_status()

    def logs(self, handle: str, slot: Slot | None, *, follow: bool, tail: int | None = None) -> Iterator[SlotLogLine]:
        """Yield the log lines that the follower has copied."""
        run = self._get_run(handle)
        was_followed = supervisor_pid(run) is not None
        is_finished = self.status(handle).state.is_final  # starts a follower if none is running
        if not (follow or was_followed or is_finished):
            _wait_for_copied_logs(run)
        is_over = lambda: not follow or self.status(handle).state.is_final  # noqa: E731
        return read_run_logs(run, slot, is_over=is_over, tail=tail)

    def stop(self, handle: str) -> None:
        """Delete the objects of the run and wait until its pods have terminated."""
        run = self._get_run(handle)
        target, _ = parse_handle(handle)
        if not run.read_status().state.is_final:
            (run.folder / STOP_REQUEST_FILE).touch()
        with KubeClient.for_target(target) as client:
            remaining = delete_objects(client, run)
        if supervisor_pid(run) is not None:
            wait_until(lambda: supervisor_pid(run) is None, DELETE_TIMEOUT_S)
        status = run.read_status()
        if not status.state.is_final or (status.state is JobState.LOST and not remaining):
            changes = {"state": JobState.STOPPED, "message": STOPPED_MESSAGE, "ended": time.time()}
            run.write_status(msgspec.structs.replace(status, **changes))
        if remaining:
            what = f"pods are still terminating: {', '.join(remaining[:3])}"
            hint = "their node may be unreachable; they are deleted when it returns"
            raise UnavailableError(what, where=handle, hint=hint)

    # --- Runs in the cluster, wherever they were started

    def runs(self) -> list[dict[str, object]]:
        """List the runs in the namespace, newest first."""
        with KubeClient.for_target(self._target) as client:
            return list_cluster_runs(client)

    def open_runs(self) -> NamespaceRuns:
        """Return the runs in the namespace, to be followed without changing them."""
        return NamespaceRuns(lambda: KubeClient.for_target(self._target))

    def adopt(self, name: str) -> RunFolder:
        """Find a run in the cluster by run id or job name, and create its run folder here if there is none."""
        with KubeClient.for_target(self._target) as client:
            config_maps = [
                obj for obj in client.list_objects("ConfigMap", RUN_SELECTOR) if JOB_FILE in (obj.get("data") or {})
            ]
            jobs = {obj["metadata"]["labels"][RUN_LABEL]: obj["metadata"]["labels"][JOB_LABEL] for obj in config_maps}
            run = RunFolder(stoker_home() / "runs" / choose_cluster_run(client, jobs, name))
        if not (run.folder / "handle").exists():
            job_file = next(obj for obj in config_maps if obj["metadata"]["labels"][RUN_LABEL] == run.id)
            run.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            run.write(JOB_FILE, job_file["data"][JOB_FILE].encode())
            run.write("handle", f"{client.url}/{run.id}\n".encode())
        return run

    def _get_run(self, handle: str) -> RunFolder:
        return RunFolder(stoker_home() / "runs" / parse_handle(handle)[1])

    def _follow(self, run: RunFolder) -> None:
        start_follower(run, lambda: supervisor_pid(run) is not None or _is_finished(run), FOLLOWER_MODULE)


def choose_cluster_run(client: KubeClient, jobs: Mapping[str, str], name: str) -> str:
    """Return the ID of the run that a run ID or job name means; `jobs` has the job name of each run."""
    matches = [name] if name in jobs else [run_id for run_id, job in jobs.items() if job == name]
    if not matches:
        known = ", ".join(sorted(jobs)) or "none"
        raise NotFoundError(f"run {name!r} not found", where=client, hint=f"known: {known}")
    if len(matches) == 1:
        return matches[0]
    states = {str(row["run"]): JobState(str(row["state"])) for row in list_cluster_runs(client)}
    newest_first = sorted(matches, key=sort_key, reverse=True)
    return choose_run({run_id: states.get(run_id, JobState.LOST) for run_id in newest_first}, name)


def _is_finished(run: RunFolder) -> bool:
    return run.read_status().state.is_final


def _wait_for_copied_logs(run: RunFolder) -> None:
    """Wait until the follower has copied the existing logs: their sizes no longer change."""
    deadline = time.monotonic() + LOG_COPY_TIMEOUT_S
    sizes: dict[Path, int] = {}
    while time.monotonic() < deadline and not _is_finished(run):
        previous, sizes = sizes, {path: path.stat().st_size for path in run.logs.iterdir()}
        if sizes and sizes == previous:
            return
        time.sleep(2 * POLL_S)


def _resolve_cache_url(job: JobSpec) -> JobSpec:
    """Replace `data.via: cluster` by the URL of the namespace's caching proxy."""
    if job.data.via != "cluster":
        return job
    via = cache_url(job.kubernetes.namespace)
    return msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, via=via))


def _read_objects(run: RunFolder) -> list[Manifest]:
    if not (run.folder / "plan.json").exists():
        hint = "start it again from its job file: stoker job run FILE --on k8s"
        raise InputError("was started on another machine and cannot be restarted here", where=run.id, hint=hint)
    return read_kubernetes_plan(run).objects


def _list_notes(job: JobSpec, code: dict[str, bytes]) -> Iterator[str]:
    """Yield which files are copied, and warnings."""
    if code:
        size = sum(map(len, code.values()))
        yield f"copied with the job in a ConfigMap: {pluralize(len(code), 'file')} ({format_bytes(size)})"
    folder = job.checkpoint.dir
    if folder is None and job.program.command is None:  # a command may have no checkpoints
        yield "checkpoint.dir is not set: checkpoints are lost with their pod, and a retry starts from scratch"
    elif folder and job.checkpoint.claim is None and "://" not in folder and not _is_on_volume(job):
        yield f"no volume is mounted at {folder}: checkpoints are lost with their pod; set checkpoint.claim"
    has_several_jobs = job.traits.has_address_per_slot or (job.traits.has_rendezvous and len(list_worker_jobs(job)) > 1)
    if job.kubernetes.queue and has_several_jobs:
        queue = job.kubernetes.queue
        yield f"queue {queue} admits each Kubernetes Job separately: some pods may wait while others run"
    if has_several_jobs and job.kubernetes.deadline is None:
        yield "its Jobs stop each other only while a follower runs; set kubernetes.deadline as an upper limit"
    if job.profile.every > 0 and job.program.command is not None:
        yield "the profiler needs python3 in the image; without it, the program runs unprofiled"


def _is_on_volume(job: JobSpec) -> bool:
    folder = Path(job.checkpoint.dir or "/")
    return any(folder.is_relative_to(volume.path) for volume in job.volumes)

"""The runs of a Kubernetes namespace, wherever they were started: list them, and follow one without changing it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stoker.errors import NotFoundError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL
from stoker.launchers.followed_runs import ClusterRun
from stoker.launchers.kubernetes.config_map import JOB_FILE
from stoker.launchers.kubernetes.follower import LogFollower
from stoker.launchers.kubernetes.run_list import list_cluster_runs
from stoker.launchers.kubernetes.run_objects import get_lead_kind


class NamespaceRuns:
    """The runs of one namespace; each follower has a client of its own."""

    def __init__(self, open_client: Callable[[], KubeClient]) -> None:
        self._open_client = open_client
        with open_client() as client:
            self.url = client.url

    def list_runs(self) -> list[ClusterRun]:
        """List the runs of the namespace."""
        with self._open_client() as client:
            rows = list_cluster_runs(client)
        return [ClusterRun(str(row["run"]), str(row["job"]), not JobState(str(row["state"])).is_final) for row in rows]

    def follow(self, run: RunFolder) -> None:
        """Copy logs and status of a run into its folder until the run has finished."""
        with self._open_client() as client:
            if not (run.folder / JOB_FILE).exists():
                maps = client.list_objects("ConfigMap", {RUN_LABEL: run.id})
                text = next((data[JOB_FILE] for obj in maps if JOB_FILE in (data := obj.get("data") or {})), None)
                if text is None:
                    raise NotFoundError(f"the job file of run {run.id} is not in the cluster", where=client)
                run.write(JOB_FILE, text.encode())
            if (status := run.read_status()).state.is_final:  # it was restarted, or was lost for a while
                run.write_status(msgspec.structs.replace(status, state=JobState.PENDING, ended=None, message=""))
            LogFollower(run, client, get_lead_kind(run.job), is_read_only=True).follow()

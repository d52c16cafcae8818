"""What the MPI operator does with an MPIJob, as far as a test needs it: its pods, their keys, their names, its end."""

from __future__ import annotations

import base64
import subprocess
import threading
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from stoker.errors import StokerError
from stoker.kube.client import KubeClient
from stoker.kube.objects import Manifest, strategic_merge

POLL_S = 0.3


class Operator(threading.Thread):
    """Sees to the MPIJobs of one namespace."""

    def __init__(self, cluster: KubeClient, folder: Path) -> None:
        super().__init__(daemon=True)
        self._cluster, self._folder, self._over = cluster, folder, threading.Event()

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            with suppress(StokerError):  # it may just be deleted; the next look tells
                for job in self._cluster.list_objects("MPIJob"):
                    if not job["spec"]["runPolicy"].get("suspend") and "deletionTimestamp" not in job["metadata"]:
                        self._see_to(job)

    def end(self) -> None:
        self._over.set()
        self.join()

    def _see_to(self, job: Manifest) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        launcher = self._cluster.get("Job", f"{name}-launcher")
        if launcher is not None:
            self._finish(job, launcher)
            return
        keys = {"metadata": {"name": f"{name}-ssh"}, "type": "kubernetes.io/ssh-auth", "data": self._keys()}
        selector = {"mpi-job-name": name}
        service = {"clusterIP": "None", "selector": selector}
        workers = spec["mpiReplicaSpecs"]["Worker"]
        self._make(job, {"apiVersion": "v1", "kind": "Secret", **keys})
        self._make(job, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service})
        for index in range(workers["replicas"]):
            pod = self._pod(job, workers, f"{name}-worker-{index}")
            labels = {"training.kubeflow.org/replica-index": str(index)}
            pod = strategic_merge(pod, {"metadata": {"name": f"{name}-worker-{index}", "labels": labels}})
            self._make(job, {"apiVersion": "v1", "kind": "Pod", **pod})
        ready = [one for one in self._cluster.list_objects("Pod", selector) if _is(one, "Ready")]
        assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
        if len(ready) == workers["replicas"]:
            policy = spec["runPolicy"]
            body = {"backoffLimit": policy["backoffLimit"], "template": self._launcher(job)}
            metadata = {"name": f"{name}-launcher"}
            self._make(job, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body})

    def _launcher(self, job: Manifest) -> Manifest:
        name = f"{job['metadata']['name']}-launcher"
        pod = self._pod(job, job["spec"]["mpiReplicaSpecs"]["Launcher"], name)
        variables = {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": str(job["spec"]["slotsPerWorker"]),
        }
        pod["spec"]["containers"][0]["env"] += [{"name": key, "value": value} for key, value in variables.items()]
        return pod

    def _pod(self, job: Manifest, replica: Manifest, name: str) -> Manifest:
        """Give a pod with a host name and keys, as the operator's code does."""
        owner = job["metadata"]["name"]
        pod = strategic_merge(deepcopy(replica["template"]), {"metadata": {"labels": {"mpi-job-name": owner}}})
        items = [("ssh-privatekey", "id_rsa"), ("ssh-publickey", "id_rsa.pub"), ("ssh-publickey", "authorized_keys")]
        secret = {
            "secretName": f"{owner}-ssh",
            "defaultMode": 0o600,
            "items": [{"key": key, "path": path} for key, path in items],
        }
        spec = pod["spec"]
        spec |= {"hostname": name, "subdomain": owner, "restartPolicy": replica["restartPolicy"]}
        spec["volumes"] = [*spec["volumes"], {"name": "ssh-auth", "secret": secret}]
        mount = {"name": "ssh-auth", "mountPath": job["spec"]["sshAuthMountPath"]}
        main, *_ = spec["containers"]
        main["volumeMounts"] = [*main["volumeMounts"], mount]
        return pod

    def _keys(self) -> dict[str, str]:
        path = self._folder / "key"
        if not path.exists():
            argv = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(path)]
            subprocess.run(argv, check=True)
        files = {"ssh-privatekey": path, "ssh-publickey": path.with_suffix(".pub")}
        return {name: base64.b64encode(one.read_bytes()).decode() for name, one in files.items()}

    def _make(self, job: Manifest, one: Manifest) -> None:
        if self._cluster.get(one["kind"], one["metadata"]["name"]) is None:
            names = {key: job[key] for key in ("apiVersion", "kind")}
            owner = {**names, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
            self._cluster.create(strategic_merge(one, {"metadata": {"ownerReferences": [owner]}}))

    def _finish(self, job: Manifest, launcher: Manifest) -> None:
        """Tell how the launcher ended; what still runs is removed then."""
        kinds = {"Complete": "Succeeded", "Failed": "Failed"}
        found = next((kinds[kind] for kind in kinds if _is(launcher, kind)), None)
        if found is None or job.get("status", {}).get("conditions"):
            return
        condition: dict[str, Any] = {"type": found, "status": "True", "reason": "Test", "message": ""}
        moment = launcher["status"]["conditions"][0]["lastTransitionTime"]
        condition |= {"lastTransitionTime": moment, "lastUpdateTime": moment}
        name = job["metadata"]["name"]
        path = f"{self._cluster._path('MPIJob', name)}/status"
        body = {"status": {"conditions": [condition]}}
        self._cluster._json("PATCH", path, {}, body, "application/merge-patch+json")
        for pod in self._cluster.list_objects("Pod", {"mpi-job-name": name}):
            if pod["status"].get("phase") == "Running":
                self._cluster.delete("Pod", pod["metadata"]["name"])


def _is(one: Manifest, kind: str) -> bool:
    conditions = one.get("status", {}).get("conditions") or []
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)

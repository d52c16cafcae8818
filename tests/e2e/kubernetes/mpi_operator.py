"""A minimal MPI operator for tests: creates the pods, ssh keys and Service of an MPIJob, and sets its conditions."""

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
from stoker.kube.conditions import has_condition
from stoker.kube.objects import Manifest, strategic_merge

POLL_S = 0.3


class MpiOperator(threading.Thread):
    """Reconciles the MPIJobs of one namespace."""

    def __init__(self, cluster: KubeClient, folder: Path) -> None:
        super().__init__(daemon=True)
        self._cluster, self._folder, self._stopped = cluster, folder, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(POLL_S):
            with suppress(StokerError):  # it may have been deleted; the next pass will show
                for job in self._cluster.list_objects("MPIJob"):
                    if not job["spec"]["runPolicy"].get("suspend") and "deletionTimestamp" not in job["metadata"]:
                        self._reconcile(job)

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _reconcile(self, job: Manifest) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        launcher = self._cluster.get("Job", f"{name}-launcher")
        if launcher is not None:
            self._finish(job, launcher)
            return
        keys = {"metadata": {"name": f"{name}-ssh"}, "type": "kubernetes.io/ssh-auth", "data": self._generate_keys()}
        selector = {"mpi-job-name": name}
        service = {"clusterIP": "None", "selector": selector}
        workers = spec["mpiReplicaSpecs"]["Worker"]
        self._create(job, {"apiVersion": "v1", "kind": "Secret", **keys})
        self._create(job, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service})
        for index in range(workers["replicas"]):
            pod = self._build_pod(job, workers, f"{name}-worker-{index}")
            labels = {"training.kubeflow.org/replica-index": str(index)}
            pod = strategic_merge(pod, {"metadata": {"name": f"{name}-worker-{index}", "labels": labels}})
            self._create(job, {"apiVersion": "v1", "kind": "Pod", **pod})
        ready = [pod for pod in self._cluster.list_objects("Pod", selector) if has_condition(pod, "Ready")]
        assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
        if len(ready) == workers["replicas"]:
            policy = spec["runPolicy"]
            body = {"backoffLimit": policy["backoffLimit"], "template": self._build_launcher(job)}
            metadata = {"name": f"{name}-launcher"}
            self._create(job, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body})

    def _build_launcher(self, job: Manifest) -> Manifest:
        name = f"{job['metadata']['name']}-launcher"
        pod = self._build_pod(job, job["spec"]["mpiReplicaSpecs"]["Launcher"], name)
        variables = {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": str(job["spec"]["slotsPerWorker"]),
        }
        pod["spec"]["containers"][0]["env"] += [{"name": key, "value": value} for key, value in variables.items()]
        return pod

    def _build_pod(self, job: Manifest, replica: Manifest, name: str) -> Manifest:
        """Build a pod with a host name and ssh keys, as the real operator does."""
        owner = job["metadata"]["name"]
        labels = {"metadata": {"labels": {"mpi-job-name": owner}}}
        pod: Manifest = strategic_merge(deepcopy(replica["template"]), labels)
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

    def _generate_keys(self) -> dict[str, str]:
        path = self._folder / "key"
        if not path.exists():
            argv = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(path)]
            subprocess.run(argv, check=True)
        files = {"ssh-privatekey": path, "ssh-publickey": path.with_suffix(".pub")}
        return {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items()}

    def _create(self, job: Manifest, obj: Manifest) -> None:
        if self._cluster.get(obj["kind"], obj["metadata"]["name"]) is None:
            names = {key: job[key] for key in ("apiVersion", "kind")}
            owner = {**names, "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
            self._cluster.create(strategic_merge(obj, {"metadata": {"ownerReferences": [owner]}}))

    def _finish(self, job: Manifest, launcher: Manifest) -> None:
        """Set the condition of the MPIJob once its launcher has finished, and delete running pods."""
        kinds = {"Complete": "Succeeded", "Failed": "Failed"}
        state = next((kinds[kind] for kind in kinds if has_condition(launcher, kind)), None)
        if state is None or job.get("status", {}).get("conditions"):
            return
        condition: dict[str, Any] = {"type": state, "status": "True", "reason": "Test", "message": ""}
        time = launcher["status"]["conditions"][0]["lastTransitionTime"]
        condition |= {"lastTransitionTime": time, "lastUpdateTime": time}
        name = job["metadata"]["name"]
        path = f"{self._cluster._path('MPIJob', name)}/status"
        body = {"status": {"conditions": [condition]}}
        self._cluster._json("PATCH", path, {}, body, "application/merge-patch+json")
        for pod in self._cluster.list_objects("Pod", {"mpi-job-name": name}):
            if pod["status"].get("phase") == "Running":
                self._cluster.delete("Pod", pod["metadata"]["name"])

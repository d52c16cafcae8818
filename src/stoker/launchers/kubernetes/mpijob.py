"""A job of mpirun as one MPIJob, for the operator of kubeflow.org/v2beta1. Pure.

The operator makes the pods, their keys and the Service by whose names they are found, `<job>-worker-3.<job>`. Workers
run sshd, and what ranks there print goes to the log of their own pod, not through mpirun. The launcher is made once all
workers are ready, which a probe of sshd tells; what can wait has an end.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from stoker.jobs.spec import Job
from stoker.kube.objects import JOB_LABEL, Manifest, build_object

OUTPUT_FIFO = "/dev/shm/stoker-output"
"""Where ranks of a worker print; what is there goes to the log of the pod."""
SECRETS_DIR = "/dev/shm/stoker-secrets"
"""Where they find secrets, which sshd does not pass on, and mpirun must not."""
PASSED_ENV = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""What the image says, and sshd does not pass on."""
"""By which the operator numbers the workers' pods."""
SSHD_S, NAMES_S = 300, 120
"""For sshd to come up in a pod that has started, and for workers that are ready to be found by their names."""
LOOK_S = 2
# What sshd as root needs to become the user of a session, and to keep strangers in an empty folder until then.
SSHD_CAPABILITIES = ["AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT"]


def build_mpijob(
    job: Job,
    pods: Mapping[str, Manifest],
    labels: Mapping[str, Mapping[str, str]],
    queue: Mapping[str, str],
) -> list[Manifest]:
    """Give the MPIJob of a job: `pods` and `labels` are those of its two roles, `queue` the labels for Kueue."""
    policy: Manifest = {
        "cleanPodPolicy": "Running",
        "backoffLimit": job.retries,
        "ttlSecondsAfterFinished": int(job.kubernetes.ttl),
    }
    if job.kubernetes.deadline is not None:
        policy["activeDeadlineSeconds"] = int(job.kubernetes.deadline)
    spec: Manifest = {
        "slotsPerWorker": job.ranks_per_worker,
        "sshAuthMountPath": job.mpi.ssh_dir,
        "mpiImplementation": "OpenMPI",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": _replicas(1, pods["launcher"], labels["launcher"]),
            "Worker": _replicas(job.max_workers, _worker(job, pods["worker"]), labels["worker"]),
        },
    }
    own = {**job.labels, JOB_LABEL: job.name, **queue}
    return [
        build_object("kubeflow.org/v2beta1", "MPIJob", job.name, own, namespace=job.kubernetes.namespace, spec=spec)
    ]


def _replicas(count: int, pod: Manifest, labels: Mapping[str, str]) -> Manifest:
    """Give so many pods; whether they are started again is said here, and not in the pod."""
    spec = {key: value for key, value in pod.items() if key != "restartPolicy"}
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"metadata": {"labels": dict(labels)}, "spec": spec},
    }


def _worker(job: Job, pod: Manifest) -> Manifest:
    """Have sshd in a pod: ready when it answers, given up when it does not come."""
    main, *others = pod["containers"]
    port = job.mpi.sshd_port
    more: dict[str, Any] = {
        "ports": [{"name": "ssh", "containerPort": port, "protocol": "TCP"}],
        "startupProbe": {"tcpSocket": {"port": port}, "periodSeconds": LOOK_S, "failureThreshold": SSHD_S // LOOK_S},
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 10},
    }
    if not job.kubernetes.user:
        rights = main.get("securityContext", {})
        capabilities = {"drop": ["ALL"], "add": SSHD_CAPABILITIES}
        more["securityContext"] = {**rights, "capabilities": capabilities}
    return {**pod, "containers": [{**main, **more}, *others]}


def build_ssh_options(job: Job) -> tuple[str, ...]:
    """Say how mpirun's `ssh` reaches a worker: pods are new each time, so that nobody can know their keys before."""
    words = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
    return (*words, "-o", "BatchMode=yes", "-o", "ConnectionAttempts=10", "-p", str(job.mpi.sshd_port))


def build_worker_script(job: Job) -> str:
    """Write what a worker runs: sshd, and beside it what carries the output of its ranks to the pod's log."""
    words = [*job.mpi.sshd, *(["-p", str(job.mpi.sshd_port)] if job.mpi.sshd_port != 22 else [])]
    lines = [
        "#!/bin/sh",
        "set -eu",
        f"rm -f {OUTPUT_FIFO}",
        f"mkfifo {OUTPUT_FIFO}",
        # Open for writing too, so that it never comes to an end.
        f"cat <>{OUTPUT_FIFO} &",
        *([f"(umask 077 && mkdir -p {SECRETS_DIR})"] if job.secret_env else []),
        *(f'printf %s "${name}" >{SECRETS_DIR}/{name}' for name in job.secret_env),
        # What sshd wants, where the image has not got it.
        'if [ "$(id -u)" = 0 ]; then',
        "  mkdir -p /run/sshd",
        "  if command -v ssh-keygen >/dev/null 2>&1; then ssh-keygen -A >/dev/null; fi",
        "fi",
        f"exec {shlex.join(words)}",
    ]
    return "\n".join([*lines, ""])


def wait_for_workers_script(workers: int, pattern: str) -> list[str]:
    """Write what the launcher does first: wait, but not for ever, until every worker's name is known.

    `pattern` is the name of a worker, with `{}` for its index.
    """
    start, end = (shlex.quote(part) for part in pattern.split("{}"))
    return [
        # mpirun complains of a variable that it is to pass on and that is not there.
        *(f'export {name}="${{{name}:-}}"' for name in PASSED_ENV),
        "i=0",
        f"until=$(($(date +%s) + {NAMES_S}))",
        f"while command -v getent >/dev/null 2>&1 && [ $i -lt {workers} ]; do",
        f"  name={start}$i{end}",
        '  if getent hosts "$name" >/dev/null; then',
        "    i=$((i + 1))",
        "  elif [ $(date +%s) -ge $until ]; then",
        f'    echo "stoker: $name has no address, {NAMES_S} s after all workers were ready" >&2',
        "    exit 1",
        "  else",
        "    sleep 1",
        "  fi",
        "done",
    ]

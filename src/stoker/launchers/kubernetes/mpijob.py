"""An MPI job as one MPIJob of the Kubeflow MPI operator (kubeflow.org/v2beta1). Pure.

The operator creates the pods, their ssh keys, and the Service that resolves `<job>-worker-3.<job>`. Workers run sshd;
their ranks print to the log of their own pod, not through mpirun. The operator creates the launcher once all workers
are ready, which a TCP probe of sshd reports; everything that waits has a timeout.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from stoker.jobs.spec import JobSpec
from stoker.kube.objects import JOB_LABEL, Manifest, build_object

OUTPUT_FIFO = "/dev/shm/stoker-output"
"""FIFO that the ranks of a worker print to; its content goes to the log of the pod."""
SECRETS_DIR = "/dev/shm/stoker-secrets"
"""Directory from which ranks read secrets: sshd does not pass them on, and mpirun must not."""
PASSED_ENV = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables of the image that sshd does not pass on."""
SSHD_TIMEOUT_S, DNS_TIMEOUT_S = 300, 120
"""How long sshd may take to start, and the names of ready workers to resolve."""
PROBE_PERIOD_S = 2
# sshd as root needs these to switch to the session's user, and to confine unauthenticated connections.
SSHD_CAPABILITIES = ["AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT"]


def build_mpijob(
    job: JobSpec,
    pods: Mapping[str, Manifest],
    labels: Mapping[str, Mapping[str, str]],
    queue_labels: Mapping[str, str],
) -> list[Manifest]:
    """Build the MPIJob of a job; `pods` and `labels` are by role (launcher, worker)."""
    policy: Manifest = {
        "cleanPodPolicy": "Running",
        "backoffLimit": job.retries,
        "ttlSecondsAfterFinished": int(job.kubernetes.ttl),
    }
    if job.kubernetes.deadline is not None:
        policy["activeDeadlineSeconds"] = int(job.kubernetes.deadline)
    spec: Manifest = {
        "slotsPerWorker": job.ranks_of(0),
        "sshAuthMountPath": job.mpi.ssh_dir,
        "mpiImplementation": "OpenMPI",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": _build_replicas(1, pods["launcher"], labels["launcher"]),
            "Worker": _build_replicas(job.max_workers, _add_sshd(job, pods["worker"]), labels["worker"]),
        },
    }
    own_labels = {**job.labels, JOB_LABEL: job.name, **queue_labels}
    namespace = job.kubernetes.namespace
    return [build_object("kubeflow.org/v2beta1", "MPIJob", job.name, own_labels, namespace=namespace, spec=spec)]


def _build_replicas(count: int, pod: Manifest, labels: Mapping[str, str]) -> Manifest:
    """Build a replica spec, which holds the restart policy instead of the pod."""
    spec = {key: value for key, value in pod.items() if key != "restartPolicy"}
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"metadata": {"labels": dict(labels)}, "spec": spec},
    }


def _add_sshd(job: JobSpec, pod: Manifest) -> Manifest:
    """Add the port, the probes and the capabilities of sshd to a worker's pod."""
    main, *sidecars = pod["containers"]
    port = job.mpi.sshd_port
    fields: dict[str, Any] = {
        "ports": [{"name": "ssh", "containerPort": port, "protocol": "TCP"}],
        "startupProbe": {
            "tcpSocket": {"port": port},
            "periodSeconds": PROBE_PERIOD_S,
            "failureThreshold": SSHD_TIMEOUT_S // PROBE_PERIOD_S,
        },
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 10},
    }
    if not job.kubernetes.user:
        capabilities = {"drop": ["ALL"], "add": SSHD_CAPABILITIES}
        fields["securityContext"] = {**main.get("securityContext", {}), "capabilities": capabilities}
    return {**pod, "containers": [{**main, **fields}, *sidecars]}


def build_ssh_options(job: JobSpec) -> tuple[str, ...]:
    """Build the ssh options of mpirun; host keys are not checked, since every pod generates new ones."""
    options = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
    return (*options, "-o", "BatchMode=yes", "-o", "ConnectionAttempts=10", "-p", str(job.mpi.sshd_port))


def build_worker_script(job: JobSpec) -> str:
    """Build the script of a worker: sshd, and a process that copies the output of ranks to the pod's log."""
    sshd = [*job.mpi.sshd, *(["-p", str(job.mpi.sshd_port)] if job.mpi.sshd_port != 22 else [])]
    lines = [
        "#!/bin/sh",
        "set -eu",
        f"rm -f {OUTPUT_FIFO}",
        f"mkfifo {OUTPUT_FIFO}",
        # Opened for writing too, so that cat never reads an end of file.
        f"cat <>{OUTPUT_FIFO} &",
        *([f"(umask 077 && mkdir -p {SECRETS_DIR})"] if job.secret_env else []),
        *(f'printf %s "${name}" >{SECRETS_DIR}/{name}' for name in job.secret_env),
        # sshd needs a privilege separation directory and host keys, which the image may lack.
        'if [ "$(id -u)" = 0 ]; then',
        "  mkdir -p /run/sshd",
        "  if command -v ssh-keygen >/dev/null 2>&1; then ssh-keygen -A >/dev/null; fi",
        "fi",
        f"exec {shlex.join(sshd)}",
    ]
    return "\n".join([*lines, ""])


def wait_for_workers_script(workers: int, hostname_pattern: str) -> list[str]:
    """Build the launcher's setup lines: wait until the name of every worker resolves, with a timeout.

    `hostname_pattern` is the name of a worker with `{}` for its index.
    """
    start, end = (shlex.quote(part) for part in hostname_pattern.split("{}"))
    return [
        # mpirun warns about a variable that it is told to pass on and that is not set.
        *(f'export {name}="${{{name}:-}}"' for name in PASSED_ENV),
        "i=0",
        f"until=$(($(date +%s) + {DNS_TIMEOUT_S}))",
        f"while command -v getent >/dev/null 2>&1 && [ $i -lt {workers} ]; do",
        f"  name={start}$i{end}",
        '  if getent hosts "$name" >/dev/null; then',
        "    i=$((i + 1))",
        "  elif [ $(date +%s) -ge $until ]; then",
        f'    echo "stoker: cannot resolve $name {DNS_TIMEOUT_S} s after all workers were ready" >&2',
        "    exit 1",
        "  else",
        "    sleep 1",
        "  fi",
        "done",
    ]

"""The sections of a job file for launchers and MPI; the description of each key becomes its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from stoker.core.units import Bytes, Seconds
from stoker.errors import Fault
from stoker.jobs.spec import checks
from stoker.jobs.spec.types import (
    HostName,
    LabelKey,
    LabelValue,
    MountPath,
    Namespace,
    NonEmpty,
    NonNegativeInt,
    ObjectName,
    Port,
    PositiveInt,
    QueueName,
    SbatchOption,
    SlurmName,
    UserName,
    Verbatim,
    describe,
    expect,
)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the job file with a fixed set of keys."""


class KubernetesSpec(Section, frozen=True, kw_only=True):
    """Settings for `--on k8s`."""

    namespace: Annotated[Namespace | None, describe("Namespace; default: the namespace of the kubeconfig context.")] = (
        None
    )
    create_namespace: Annotated[bool, describe("Create the namespace if it does not exist.")] = False
    queue: Annotated[QueueName | None, describe("Kueue LocalQueue to which the job is submitted.")] = None
    queue_priority: Annotated[
        QueueName | None, describe("Kueue WorkloadPriorityClass, which determines the job's priority in the queue.")
    ] = None
    priority_class: Annotated[
        ObjectName | None, describe("PriorityClass of the pods, which determines scheduling order and preemption.")
    ] = None
    copy: Annotated[
        tuple[NonEmpty, ...],
        describe("Files and directories to copy into the pods through a ConfigMap, in addition to `program.script`."),
    ] = ()
    node_selector: Annotated[dict[LabelKey, LabelValue], describe("Required node labels.")] = {}
    tolerations: Annotated[tuple[dict[str, Any], ...], describe("Tolerations for node taints, as in a pod spec.")] = ()
    service_account: Annotated[str | None, describe("ServiceAccount of the pods.")] = None
    image_pull_secrets: Annotated[tuple[ObjectName, ...], describe("Secrets for private image registries.")] = ()
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], describe("Image pull policy of the containers.")
    ] = "IfNotPresent"
    shm: Annotated[Bytes | None, describe("Size limit of `/dev/shm`; default: the pod's memory limit.")] = None
    user: Annotated[NonNegativeInt | None, describe("User ID of the containers; default: the image's user.")] = None
    group: Annotated[
        NonNegativeInt | None, describe("Group ID of the containers, also used as the `fsGroup` of mounted volumes.")
    ] = None
    ttl: Annotated[Seconds, describe("How long a finished job is kept in the cluster before it is deleted.")] = Seconds(
        "10m"
    )
    deadline: Annotated[Seconds | None, describe("Maximum duration of the job; default: unlimited.")] = None
    patch: Annotated[
        tuple[dict[str, Any], ...],
        describe("Merge patches for rendered objects. Each patch selects an object by `kind` and `metadata.name`."),
    ] = ()

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_kubernetes(self)


class SshSpec(Section, frozen=True, kw_only=True):
    """Settings for `--on ssh`."""

    hosts: Annotated[
        tuple[HostName, ...],
        describe(
            "Host names that `ssh` accepts. `node1:2` runs two workers on `node1`. `@FILE` reads hosts from a file, "
            "one per line."
        ),
    ] = ()
    user: Annotated[UserName | None, describe("Remote user; default: determined by `ssh`.")] = None
    workdir: Annotated[
        NonEmpty | None,
        describe(
            "Remote directory to which the working directory is copied and in which the program runs. A relative path "
            "is resolved against the remote home directory; default: `stoker/<name>`."
        ),
    ] = None
    copy: Annotated[bool, describe("Copy the working directory to the hosts before the job starts.")] = True
    exclude: Annotated[
        tuple[NonEmpty, ...],
        describe("Files not to copy: patterns as in `.gitignore`, applied after those in `.stokerignore`."),
    ] = ()
    setup: Annotated[
        NonEmpty | None,
        describe("Shell commands to run in `workdir` on every host after the upload and before the job starts."),
    ] = None
    python: Annotated[
        NonEmpty,
        describe(
            "Python interpreter on the hosts: a command on the PATH, or a path, which can be relative to `workdir` "
            "(`.venv/bin/python`)."
        ),
    ] = "python3"
    config: Annotated[NonEmpty | None, describe("SSH configuration file to use instead of `~/.ssh/config`.")] = None
    lost_after: Annotated[
        Seconds,
        describe("How long a host can be unresponsive before it is considered lost and its slots stop on their own."),
    ] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_ssh(self)


class MpiSpec(Section, frozen=True, kw_only=True):
    """Settings for `topology: mpi`."""

    binding: Annotated[
        Literal["none", "hwthread", "core", "l3cache", "numa", "socket"],
        describe("Hardware resource to which each rank is bound, as in mpirun's `--bind-to`."),
    ] = "none"
    args: Annotated[
        Annotated[tuple[Verbatim, ...], expect("a list of arguments such as [--mca, btl, self,tcp]")],
        describe(
            "Additional mpirun arguments, as a list. They override the flags and MCA parameters that Stoker sets."
        ),
    ] = ()
    sshd: Annotated[
        Annotated[
            tuple[Verbatim, ...],
            msgspec.Meta(min_length=1),
            expect("a list of arguments such as [/usr/sbin/sshd, -De]"),
        ],
        describe("Command that starts sshd in the foreground on the Kubernetes workers, to which mpirun connects."),
    ] = ("/usr/sbin/sshd", "-De", "-o", "StrictModes=no", "-o", "LogLevel=FATAL")
    sshd_port: Annotated[Port, describe("Port on which sshd listens.")] = 22
    ssh_dir: Annotated[
        MountPath, describe("Mount path of the SSH keys on Kubernetes: the `.ssh` directory of the image's user.")
    ] = "/root/.ssh"

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_mpi(self)


class RaySpec(Section, frozen=True, kw_only=True):
    """Settings for `--on ray`."""

    hosts: Annotated[
        tuple[HostName, ...],
        describe(
            "Hosts on which a Ray cluster is started over SSH for the run, as in `ssh.hosts`; the head is on the first "
            "one. The keys `ssh.user`, `ssh.config`, `ssh.python`, `ssh.workdir` and `ssh.setup` apply. Also set by "
            "`--hosts`; ignored if `--on` has the address of a cluster."
        ),
    ] = ()
    keep: Annotated[
        bool, describe("Leave the Ray cluster on `hosts` running after the run, until `stoker job stop`.")
    ] = False
    strategy: Annotated[
        Literal["pack", "spread", "strict_pack", "strict_spread"],
        describe(
            "Placement of workers on nodes. `pack`: on as few nodes as possible. `spread`: on as many nodes as "
            "possible. `strict_pack`: all on one node; the job waits if this is not possible. `strict_spread`: each on "
            "a different node; the job waits if this is not possible. Ignored with `hosts`."
        ),
    ] = "pack"
    exclude: Annotated[
        tuple[NonEmpty, ...],
        describe("Files not to copy: patterns as in `.gitignore`, applied after those in `.stokerignore`."),
    ] = ()
    lost_after: Annotated[
        Seconds,
        describe(
            "How long the cluster can be unresponsive before it is considered lost and its slots stop on their own."
        ),
    ] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_ray(self)


class SlurmSpec(Section, frozen=True, kw_only=True):
    """Settings for `--on slurm`."""

    partition: Annotated[SlurmName | None, describe("Partition; default: the cluster's default partition.")] = None
    account: Annotated[SlurmName | None, describe("Account that is charged; default: your default account.")] = None
    qos: Annotated[SlurmName | None, describe("Quality of service; default: that of the account or partition.")] = None
    time: Annotated[
        Seconds | None,
        describe(
            "Time limit of one Slurm job; default: that of the partition. Before it is reached, the programs get "
            "SIGTERM and the `grace` period, and the job is requeued and resumes."
        ),
    ] = None
    nodes: Annotated[
        PositiveInt | None, describe("Number of nodes that the slots are spread over; default: one node per slot.")
    ] = None
    constraint: Annotated[NonEmpty | None, describe("Required node features, such as `a100&ib`.")] = None
    exclude: Annotated[tuple[SlurmName, ...], describe("Nodes not to use, such as `node[03-05]`.")] = ()
    gpu_request: Annotated[
        Literal["gpus-per-task", "gres"],
        describe("How GPUs are requested. `gres`: for clusters that do not support `--gpus-per-task`."),
    ] = "gpus-per-task"
    setup: Annotated[
        NonEmpty | None,
        describe(
            "Shell commands that the batch script runs on the first node before the program starts, such as "
            "`module load cuda/12.4`. All slots get the environment that they set."
        ),
    ] = None
    python: Annotated[
        NonEmpty | None,
        describe("Python interpreter on the nodes; default: the one that runs Stoker, if the file system is shared."),
    ] = None
    options: Annotated[
        tuple[SbatchOption, ...],
        describe("Additional sbatch options, such as `--reservation=exam`. Options that Stoker sets are rejected."),
    ] = ()

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_slurm(self)

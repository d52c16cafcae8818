"""The sections of a job file as frozen structs; the description of each key becomes its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from stoker.core.units import Bytes, Seconds
from stoker.errors import Fault
from stoker.jobs.spec import checks
from stoker.jobs.spec.types import (
    CacheUrl,
    EnvName,
    HostName,
    ImageRef,
    IngressHost,
    LabelKey,
    LabelValue,
    ModuleName,
    MountPath,
    Name,
    Namespace,
    NonEmpty,
    NonNegativeInt,
    ObjectName,
    Port,
    PositiveInt,
    QueueName,
    TopologyName,
    UserName,
    Verbatim,
    describe,
    expect,
)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the job file with a fixed set of keys."""


class ProgramSpec(Section, frozen=True, kw_only=True):
    """The program that every worker runs: exactly one of `script`, `module`, `command`."""

    script: Annotated[
        NonEmpty | None,
        describe("A Python file. A relative path is resolved against the current directory, even if `cwd` is set."),
    ] = None
    module: Annotated[ModuleName | None, describe("A Python module, run as `python -m MODULE`.")] = None
    command: Annotated[
        Annotated[tuple[Verbatim, ...], expect("a list of arguments such as [bash, run.sh]")] | None,
        describe(
            "Any other program, as a list of arguments. It is not run by a shell; use `[bash, -c, 'a && b']` for that."
        ),
    ] = None
    args: Annotated[
        Annotated[tuple[Verbatim, ...], expect("a list of arguments such as [--epochs, 90]")],
        describe("Arguments of the program, as a list. Numbers are passed exactly as written."),
    ] = ()
    cwd: Annotated[NonEmpty | None, describe("Working directory of the program; default: the current directory.")] = (
        None
    )

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_program(self)


class ElasticSpec(Section, frozen=True, kw_only=True):
    """A number of workers that may change while the job runs."""

    min: Annotated[PositiveInt, describe("The job waits while there are fewer workers.")]
    max: Annotated[PositiveInt, describe("No more workers than this join the job.")]

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_elastic(self)


class ResourcesSpec(Section, frozen=True, kw_only=True):
    """The resources of one slot."""

    cpu: Annotated[
        Annotated[float, msgspec.Meta(gt=0), expect("a number of cores such as 8 or 0.5")] | None,
        describe("CPU cores."),
    ] = None
    memory: Annotated[Bytes | None, describe("Memory.")] = None
    gpu: Annotated[NonNegativeInt, describe("Number of GPUs.")] = 0
    gpu_type: Annotated[NonEmpty | None, describe("GPU model, as the cloud provider names it.")] = None

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_size("memory", self.memory)


class RoleSpec(Section, frozen=True, kw_only=True):
    """Settings of one role that differ from those of the workers."""

    count: Annotated[NonNegativeInt | None, describe("Number of slots; default: set by the topology.")] = None
    image: Annotated[ImageRef | None, describe("Container image; default: the image of the workers.")] = None
    resources: Annotated[ResourcesSpec, describe("Resources of one slot of the role.")] = ResourcesSpec()
    port: Annotated[Port | None, describe("Port; default: the port of the workers.")] = None
    program: Annotated[
        ProgramSpec | None,
        describe("Program; default: the program of the workers, and TensorBoard for the role `tensorboard`."),
    ] = None
    node_selector: Annotated[
        dict[LabelKey, LabelValue], describe("Required node labels, in addition to `kubernetes.node_selector`.")
    ] = {}
    logdir: Annotated[
        NonEmpty | None,
        describe("Log directory for `tensorboard`: a directory or a bucket; default: `checkpoint.dir`."),
    ] = None
    expose: Annotated[
        Literal["cluster", "node_port", "load_balancer"],
        describe(
            "Kubernetes Service of `tensorboard`. `cluster`: reachable in the cluster, and by `stoker job forward`. "
            "`node_port`: a port on every node. `load_balancer`: an external address."
        ),
    ] = "cluster"
    ingress: Annotated[IngressHost | None, describe("Host name of an Ingress that routes to `tensorboard`.")] = None

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_path("logdir", self.logdir)


class CacheSpec(Section, frozen=True, kw_only=True):
    """A cache of shards on the local disk of each machine."""

    dir: Annotated[NonEmpty | None, describe("Cache directory on each machine; default: no cache.")] = None
    size: Annotated[Bytes | None, describe("Maximum size of the cache.")] = None

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_cache(self)


class DataSpec(Section, frozen=True, kw_only=True):
    """The datasets of the program, passed to it in environment variables (`STOKER_DATA_TRAIN`, …)."""

    train: Annotated[
        NonEmpty | None,
        describe("Training set: a directory or URL with a manifest, or a brace pattern of tar files."),
    ] = None
    val: Annotated[NonEmpty | None, describe("Validation set, in the same forms.")] = None
    cache: Annotated[CacheSpec, describe("Cache of shards on the local disk of each machine.")] = CacheSpec()
    via: Annotated[
        CacheUrl | None,
        describe("Shared caching proxy: its URL, or `cluster` for the one in the job's namespace."),
    ] = None
    sampling: Annotated[
        Literal["exact", "join", "resampled"],
        describe(
            "`exact`: every sample once per epoch. `join`: whole shards per rank, uneven ranks. "
            "`resampled`: shards drawn with replacement."
        ),
    ] = "exact"

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_data(self)


class CheckpointSpec(Section, frozen=True, kw_only=True):
    """Where checkpoints are stored. Only rank 0 reads and writes them."""

    dir: Annotated[
        NonEmpty | None,
        describe("A directory or a bucket (`s3://…`, `gs://…`); default: `checkpoints/` in the run folder."),
    ] = None
    claim: Annotated[ObjectName | None, describe("PersistentVolumeClaim to mount at `dir`.")] = None
    create: Annotated[bool, describe("Create the claim if it does not exist.")] = False
    size: Annotated[Bytes | None, describe("Size of the claim to create.")] = None
    storage_class: Annotated[
        ObjectName | None, describe("StorageClass of the claim to create; default: the cluster's default.")
    ] = None
    access: Annotated[
        Literal["rwo", "rwx"],
        describe("Access mode of the claim. `rwo`: mounted on one node. `rwx`: mounted on many nodes."),
    ] = "rwo"
    keep: Annotated[PositiveInt, describe("Number of recent checkpoints to keep, in addition to the best.")] = 3

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_checkpoint(self)


class VolumeSpec(Section, frozen=True, kw_only=True):
    """A PersistentVolumeClaim that every slot mounts."""

    claim: Annotated[ObjectName, describe("Name of the claim.")]
    path: Annotated[MountPath, describe("Mount path.")]
    read_only: Annotated[bool, describe("Mount it read-only.")] = False


class ProfileSpec(Section, frozen=True, kw_only=True):
    """Sampling of machine utilization: GPU, CPU, memory, network, disk."""

    every: Annotated[Seconds, describe("Sampling interval; 0 disables profiling.")] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_profile(self)


class SecretKeySpec(Section, frozen=True, kw_only=True):
    """One value of a Kubernetes Secret."""

    secret: Annotated[ObjectName, describe("Name of the Secret.")]
    key: Annotated[NonEmpty, describe("Key in the Secret.")]


class SecretFilesSpec(Section, frozen=True, kw_only=True):
    """A Kubernetes Secret mounted as a directory, one file per key."""

    secret: Annotated[ObjectName, describe("Name of the Secret.")]


class KubernetesSpec(Section, frozen=True, kw_only=True):
    """Settings for `--on k8s`."""

    namespace: Annotated[Namespace | None, describe("Namespace; default: that of the kubeconfig context.")] = None
    create_namespace: Annotated[bool, describe("Create the namespace if it does not exist.")] = False
    queue: Annotated[QueueName | None, describe("Kueue LocalQueue that admits the job.")] = None
    queue_priority: Annotated[
        QueueName | None, describe("Kueue WorkloadPriorityClass: the priority of the job in its queue.")
    ] = None
    priority_class: Annotated[
        ObjectName | None, describe("PriorityClass of the pods, for scheduling and preemption.")
    ] = None
    copy: Annotated[
        tuple[NonEmpty, ...],
        describe("Files and directories to copy into the pods through a ConfigMap; `program.script` always is."),
    ] = ()
    node_selector: Annotated[dict[LabelKey, LabelValue], describe("Required node labels.")] = {}
    tolerations: Annotated[tuple[dict[str, Any], ...], describe("Tolerations of node taints, as in a pod spec.")] = ()
    service_account: Annotated[str | None, describe("ServiceAccount of the pods.")] = None
    image_pull_secrets: Annotated[tuple[ObjectName, ...], describe("Secrets for private image registries.")] = ()
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], describe("When the kubelet pulls images.")
    ] = "IfNotPresent"
    shm: Annotated[Bytes | None, describe("Size limit of `/dev/shm`; default: the memory limit of the pod.")] = None
    user: Annotated[NonNegativeInt | None, describe("User ID of the containers; default: that of the image.")] = None
    group: Annotated[
        NonNegativeInt | None, describe("Group ID of the containers, and `fsGroup` of mounted claims.")
    ] = None
    ttl: Annotated[Seconds, describe("How long a finished job is kept in the cluster.")] = Seconds("10m")
    deadline: Annotated[Seconds | None, describe("Maximum run time of the job; default: unlimited.")] = None
    patch: Annotated[
        tuple[dict[str, Any], ...],
        describe("Merge patches for rendered objects; each selects its object by `kind` and `metadata.name`."),
    ] = ()

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_kubernetes(self)


class SshSpec(Section, frozen=True, kw_only=True):
    """Settings for `--on ssh`."""

    hosts: Annotated[
        tuple[HostName, ...],
        describe(
            "The hosts, by the names that `ssh` accepts. `node1:2` runs two workers on a host; `@FILE` reads hosts "
            "from a file, one per line."
        ),
    ] = ()
    user: Annotated[UserName | None, describe("Remote user; default: the choice of `ssh`.")] = None
    workdir: Annotated[
        NonEmpty | None,
        describe(
            "Remote directory that the working directory is copied to and the program runs in. A relative path starts "
            "at the remote home directory; default: `stoker/<name>`."
        ),
    ] = None
    copy: Annotated[bool, describe("Copy the working directory to the hosts before the job starts.")] = True
    exclude: Annotated[
        tuple[NonEmpty, ...],
        describe("Files not to copy: patterns as in `.gitignore`, applied after those in `.stokerignore`."),
    ] = ()
    setup: Annotated[
        NonEmpty | None,
        describe("Shell commands to run in `workdir` on every host, after copying and before the job starts."),
    ] = None
    python: Annotated[
        NonEmpty,
        describe(
            "Python on the hosts: a name on the PATH, or a path, which may be relative to `workdir` "
            "(`.venv/bin/python`)."
        ),
    ] = "python3"
    config: Annotated[NonEmpty | None, describe("ssh configuration file to use instead of `~/.ssh/config`.")] = None
    lost_after: Annotated[
        Seconds,
        describe("A host that has not responded for this long is lost; its slots stop by themselves."),
    ] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_ssh(self)


class MpiSpec(Section, frozen=True, kw_only=True):
    """Settings for `topology: mpi`."""

    binding: Annotated[
        Literal["none", "hwthread", "core", "l3cache", "numa", "socket"],
        describe("What each rank is bound to, as in mpirun's `--bind-to`."),
    ] = "none"
    args: Annotated[
        Annotated[tuple[Verbatim, ...], expect("a list of arguments such as [--mca, btl, self,tcp]")],
        describe("Additional mpirun arguments, as a list. A flag or MCA parameter here overrides the one stoker sets."),
    ] = ()
    sshd: Annotated[
        Annotated[
            tuple[Verbatim, ...],
            msgspec.Meta(min_length=1),
            expect("a list of arguments such as [/usr/sbin/sshd, -De]"),
        ],
        describe("Command of the workers on Kubernetes: an sshd in the foreground, for mpirun to connect to."),
    ] = ("/usr/sbin/sshd", "-De", "-o", "StrictModes=no", "-o", "LogLevel=FATAL")
    sshd_port: Annotated[Port, describe("Port of that sshd.")] = 22
    ssh_dir: Annotated[MountPath, describe("Mount path of the ssh keys on Kubernetes: `.ssh` of the image's user.")] = (
        "/root/.ssh"
    )

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_mpi(self)


class RaySpec(Section, frozen=True, kw_only=True):
    """Settings for `--on ray`."""

    strategy: Annotated[
        Literal["pack", "spread", "strict_pack", "strict_spread"],
        describe(
            "Placement of workers on nodes. `pack`: as few nodes as possible. `spread`: as many as possible. "
            "`strict_pack`: one node, or wait. `strict_spread`: one node per worker, or wait."
        ),
    ] = "pack"
    exclude: Annotated[
        tuple[NonEmpty, ...],
        describe("Files not to copy: patterns as in `.gitignore`, applied after those in `.stokerignore`."),
    ] = ()
    lost_after: Annotated[
        Seconds,
        describe("A cluster that has not responded for this long is lost; its slots stop by themselves."),
    ] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_ray(self)


class Job(Section, frozen=True, kw_only=True):
    """A training job."""

    name: Annotated[Name, describe("Name of the job; runs, logs and Kubernetes objects are named after it.")]
    program: Annotated[ProgramSpec, describe("The program that every worker runs.")]
    topology: Annotated[
        TopologyName,
        describe(
            "How the processes find each other. `single`: one process. `torchrun`: PyTorch. `mpi`: mpirun. "
            "`tf-ps`, `tf-mirrored`: TensorFlow with and without parameter servers."
        ),
    ] = "torchrun"
    workers: Annotated[
        Annotated[
            PositiveInt | ElasticSpec | Literal["all"],
            expect("an integer of at least 1, {min: 2, max: 8}, or all"),
        ],
        describe(
            "Number of machines or pods. `{min: 2, max: 8}`: elastic, torchrun adds and removes workers. `all`: as "
            "many as fit when the job starts."
        ),
    ] = 1
    processes_per_worker: Annotated[
        Literal["auto"] | PositiveInt, describe("Number of ranks per worker; `auto`: one per GPU, at least 1.")
    ] = "auto"
    port: Annotated[
        Port | None,
        describe("Rendezvous port of the slots; default: a free port, between machines the first free one from 29500."),
    ] = None
    roles: Annotated[dict[str, RoleSpec], describe("Settings of slots that are not workers, by role.")] = {}
    image: Annotated[ImageRef | None, describe("Container image, for launchers that run containers.")] = None
    resources: Annotated[ResourcesSpec, describe("Resources of one worker.")] = ResourcesSpec()
    data: Annotated[DataSpec, describe("Datasets.")] = DataSpec()
    checkpoint: Annotated[CheckpointSpec, describe("Where checkpoints are stored.")] = CheckpointSpec()
    volumes: Annotated[tuple[VolumeSpec, ...], describe("Additional PersistentVolumeClaims to mount.")] = ()
    profile: Annotated[ProfileSpec, describe("Sampling of machine utilization.")] = ProfileSpec()
    env: Annotated[dict[EnvName, Verbatim], describe("Environment variables.")] = {}
    secret_env: Annotated[
        dict[EnvName, SecretKeySpec], describe("Environment variables with values from Kubernetes Secrets.")
    ] = {}
    secret_files: Annotated[
        dict[MountPath, SecretFilesSpec], describe("Kubernetes Secrets to mount as files, by mount path.")
    ] = {}
    labels: Annotated[dict[LabelKey, LabelValue], describe("Labels of the run and of its Kubernetes objects.")] = {}
    retries: Annotated[NonNegativeInt, describe("How many times a failed job is restarted.")] = 3
    grace: Annotated[Seconds, describe("Grace period between SIGTERM and SIGKILL, for a last checkpoint.")] = Seconds(
        30
    )
    hang_after: Annotated[
        Seconds,
        describe("A rank that has sent no heartbeat for this long hangs, and the attempt is stopped; 0: never."),
    ] = Seconds("10m")
    tensorboard: Annotated[
        bool | NonEmpty,
        describe("Write TensorBoard event files: `true` to the run folder, or the path of a directory."),
    ] = False
    kubernetes: Annotated[KubernetesSpec, describe("Settings for `--on k8s`.")] = KubernetesSpec()
    mpi: Annotated[MpiSpec, describe("Settings for `topology: mpi`.")] = MpiSpec()
    ssh: Annotated[SshSpec, describe("Settings for `--on ssh`.")] = SshSpec()
    ray: Annotated[RaySpec, describe("Settings for `--on ray`.")] = RaySpec()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return isinstance(self.workers, ElasticSpec)

    @property
    def max_workers(self) -> int:
        """The maximum number of workers; 1 for `all`, until the launcher has counted them."""
        return (
            self.workers.max if isinstance(self.workers, ElasticSpec) else 1 if self.workers == "all" else self.workers
        )

    @property
    def min_workers(self) -> int:
        """The minimum number of workers."""
        return self.workers.min if isinstance(self.workers, ElasticSpec) else self.max_workers

    @property
    def ranks_per_worker(self) -> int:
        """The number of ranks per worker; 1 for topologies where one process uses all GPUs of its machine."""
        if self.processes_per_worker != "auto":
            return self.processes_per_worker
        return max(self.resources.gpu, 1) if self.topology in ("torchrun", "mpi") else 1

    def program_of(self, role: str) -> ProgramSpec:
        """Return the program of a role: its own, or that of the workers."""
        return (self.roles[role].program if role in self.roles else None) or self.program

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_job(self)

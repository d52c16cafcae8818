"""The sections of a job file as frozen structs; the description of each key becomes its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from stoker.core.units import Bytes, Seconds, check_min_size
from stoker.errors import Fault
from stoker.jobs.spec import checks
from stoker.jobs.spec.launcher_sections import KubernetesSpec, MpiSpec, RaySpec, Section, SlurmSpec, SshSpec
from stoker.jobs.spec.types import (
    CacheUrl,
    EnvName,
    ImageRef,
    IngressHost,
    LabelKey,
    LabelValue,
    ModuleName,
    MountPath,
    Name,
    NonEmpty,
    NonNegativeInt,
    ObjectName,
    Port,
    PositiveInt,
    TopologyName,
    Verbatim,
    describe,
    expect,
)
from stoker.jobs.topology_traits import TopologyTraits, find_topology


class ProgramSpec(Section, frozen=True, kw_only=True):
    """The program that every worker runs. Set exactly one of `script`, `module` and `command`."""

    script: Annotated[
        NonEmpty | None,
        describe(
            "Path of a Python file. A relative path is resolved against the current directory, even if `cwd` is set."
        ),
    ] = None
    module: Annotated[ModuleName | None, describe("Python module to run with `python -m MODULE`.")] = None
    command: Annotated[
        Annotated[tuple[Verbatim, ...], expect("a list of arguments such as [bash, run.sh]")] | None,
        describe("Any other program, as a list of arguments. To run it in a shell, use `[bash, -c, 'a && b']`."),
    ] = None
    args: Annotated[
        Annotated[tuple[Verbatim, ...], expect("a list of arguments such as [--epochs, 90]")],
        describe("Program arguments, as a list. Numbers are passed exactly as written."),
    ] = ()
    cwd: Annotated[NonEmpty | None, describe("Working directory of the program; default: the current directory.")] = (
        None
    )

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_program(self)


class ElasticSpec(Section, frozen=True, kw_only=True):
    """Limits for an elastic job, in which the number of workers can change while the job runs."""

    min: Annotated[PositiveInt, describe("Minimum number of workers. The job waits while fewer workers are running.")]
    max: Annotated[PositiveInt, describe("Maximum number of workers.")]

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_elastic(self)


class ResourcesSpec(Section, frozen=True, kw_only=True):
    """Resources for one slot (a process that Stoker starts)."""

    cpu: Annotated[
        Annotated[float, msgspec.Meta(gt=0), expect("a number of cores such as 8 or 0.5")] | None,
        describe("Number of CPU cores."),
    ] = None
    memory: Annotated[Bytes | None, describe("Memory.")] = None
    gpu: Annotated[
        NonNegativeInt | None,
        describe(
            "Number of GPUs. Default: with `--on ssh` and `torchrun` or `mpi`, the worker's share of the GPUs of its "
            "host; otherwise 0."
        ),
    ] = None
    gpu_type: Annotated[NonEmpty | None, describe("GPU model, using the cloud provider's name for it.")] = None
    price_per_hour: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1e9), expect("an amount of money such as 2.5")] | None,
        describe("Price of one slot per hour, in any currency. The dashboard shows from it what a run has cost."),
    ] = None

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return check_min_size("memory", self.memory)

    @property
    def gpus(self) -> int:
        """The number of GPUs; 0 if it is not set."""
        return self.gpu or 0


class WorkerGroupSpec(Section, frozen=True, kw_only=True):
    """A group of workers with the same resources, for jobs that use more than one kind of worker."""

    count: Annotated[PositiveInt, describe("Number of workers.")] = 1
    resources: Annotated[
        ResourcesSpec | None, describe("Resources for one of these workers; default: the top-level `resources`.")
    ] = None
    processes_per_worker: Annotated[
        Literal["auto"] | PositiveInt | None,
        describe("Number of ranks per worker; default: the top-level `processes_per_worker`."),
    ] = None


class RoleSpec(Section, frozen=True, kw_only=True):
    """Settings for one role. They override the settings of the workers."""

    count: Annotated[NonNegativeInt | None, describe("Number of slots; default: depends on the topology.")] = None
    image: Annotated[ImageRef | None, describe("Container image; default: the workers' image.")] = None
    resources: Annotated[ResourcesSpec, describe("Resources for one slot of this role.")] = ResourcesSpec()
    port: Annotated[Port | None, describe("Port; default: the workers' port.")] = None
    program: Annotated[
        ProgramSpec | None,
        describe("Program; default: the workers' program, or TensorBoard for the `tensorboard` role."),
    ] = None
    node_selector: Annotated[
        dict[LabelKey, LabelValue], describe("Required node labels, in addition to `kubernetes.node_selector`.")
    ] = {}
    logdir: Annotated[
        NonEmpty | None,
        describe("Directory or bucket from which TensorBoard reads its event files; default: `checkpoint.dir`."),
    ] = None
    expose: Annotated[
        Literal["cluster", "node_port", "load_balancer"],
        describe(
            "Type of the Kubernetes Service for `tensorboard`. `cluster`: reachable within the cluster and through "
            "`stoker job forward`. `node_port`: exposed on a port of every node. `load_balancer`: exposed at an "
            "external address."
        ),
    ] = "cluster"
    ingress: Annotated[IngressHost | None, describe("Host name of an Ingress that routes to `tensorboard`.")] = None

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_path("logdir", self.logdir)


class CacheSpec(Section, frozen=True, kw_only=True):
    """Cache for shards on each machine's local disk."""

    dir: Annotated[NonEmpty | None, describe("Cache directory on each machine; default: shards are not cached.")] = None
    size: Annotated[Bytes | None, describe("Maximum size of the cache.")] = None

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_cache(self)


class DataSpec(Section, frozen=True, kw_only=True):
    """Datasets, which are passed to the program in environment variables (`STOKER_DATA_TRAIN`, …)."""

    train: Annotated[
        NonEmpty | None,
        describe(
            "Training set: a directory or URL that contains a manifest, or a brace pattern that matches tar files."
        ),
    ] = None
    val: Annotated[NonEmpty | None, describe("Validation set, specified in the same way.")] = None
    cache: Annotated[CacheSpec, describe("Cache for shards on each machine's local disk.")] = CacheSpec()
    via: Annotated[
        CacheUrl | None,
        describe("Shared caching proxy to read through: its URL, or `cluster` for the cache in the job's namespace."),
    ] = None
    sampling: Annotated[
        Literal["exact", "join", "resampled"],
        describe(
            "Sampling mode. `exact`: every sample once per epoch. `join`: every sample once per epoch, but each rank "
            "reads whole shards, so ranks can run different numbers of steps. `resampled`: shards drawn with "
            "replacement."
        ),
    ] = "exact"

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_data(self)


class CheckpointSpec(Section, frozen=True, kw_only=True):
    """Where checkpoints are stored. Only rank 0 reads and writes them."""

    dir: Annotated[
        NonEmpty | None,
        describe(
            "Directory or bucket (`s3://…`, `gs://…`) for checkpoints; default: `checkpoints/` in the run folder."
        ),
    ] = None
    claim: Annotated[ObjectName | None, describe("Name of a PersistentVolumeClaim (PVC) to mount at `dir`.")] = None
    create: Annotated[bool, describe("Create the PVC if it does not exist.")] = False
    size: Annotated[Bytes | None, describe("Size of the PVC to create.")] = None
    storage_class: Annotated[
        ObjectName | None, describe("StorageClass of the PVC to create; default: the cluster's default StorageClass.")
    ] = None
    access: Annotated[
        Literal["rwo", "rwx"],
        describe("Access mode of the PVC. `rwo`: one node can mount it. `rwx`: many nodes can mount it."),
    ] = "rwo"
    keep: Annotated[PositiveInt, describe("Number of latest checkpoints to keep, in addition to the best one.")] = 3

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_checkpoint(self)


class VolumeSpec(Section, frozen=True, kw_only=True):
    """A PersistentVolumeClaim that every slot mounts."""

    claim: Annotated[ObjectName, describe("Name of the PersistentVolumeClaim.")]
    path: Annotated[MountPath, describe("Mount path.")]
    read_only: Annotated[bool, describe("Mount the PersistentVolumeClaim read-only.")] = False


class ProfileSpec(Section, frozen=True, kw_only=True):
    """Settings of the profiler, which samples GPU, CPU, memory, network and disk usage."""

    every: Annotated[Seconds, describe("Sampling interval; 0 disables profiling.")] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_profile(self)


class SecretKeySpec(Section, frozen=True, kw_only=True):
    """Reference to a key in a Kubernetes Secret."""

    secret: Annotated[ObjectName, describe("Name of the Secret.")]
    key: Annotated[NonEmpty, describe("Key in the Secret.")]


class SecretFilesSpec(Section, frozen=True, kw_only=True):
    """A Kubernetes Secret mounted as a directory, one file per key."""

    secret: Annotated[ObjectName, describe("Name of the Secret.")]


class JobSpec(Section, frozen=True, kw_only=True):
    """A training job."""

    name: Annotated[Name, describe("Name of the job, used in the names of runs, logs and Kubernetes objects.")]
    program: Annotated[
        Annotated[ProgramSpec, expect("a mapping with script, module or command")],
        describe("The program that every worker runs."),
    ]
    topology: Annotated[
        TopologyName,
        describe(
            "How processes are started and connected. `single`: one process. `torchrun`: PyTorch. `mpi`: mpirun. "
            "`tf-ps`, `tf-mirrored`: TensorFlow with and without parameter servers."
        ),
    ] = "torchrun"
    workers: Annotated[
        Annotated[
            PositiveInt
            | ElasticSpec
            | Annotated[tuple[WorkerGroupSpec, ...], msgspec.Meta(min_length=1)]
            | Literal["auto", "all"],
            expect("an integer >= 1, a range such as {min: 2, max: 8}, a list of groups of workers, 'auto' or 'all'"),
        ],
        describe(
            "Number of machines or pods. `auto`: with `--on ssh` or `ray.hosts`, as many workers as the hosts have "
            "slots for; otherwise 1. `{min: 2, max: 8}`: an elastic job, in which torchrun adds and removes workers. "
            "`all`: as many workers as fit when the job starts. `[{count: 2, resources: {gpu: 8}}, {count: 1, "
            "resources: {gpu: 1}}]`: workers that differ."
        ),
    ] = "auto"
    processes_per_worker: Annotated[
        Literal["auto"] | PositiveInt, describe("Number of ranks per worker. `auto`: one per GPU, at least 1.")
    ] = "auto"
    port: Annotated[
        Port | None,
        describe(
            "Rendezvous port. The default on one machine is any free port, and on several machines the first free port "
            "starting at 29500."
        ),
    ] = None
    roles: Annotated[dict[str, RoleSpec], describe("Settings for roles other than workers, by role name.")] = {}
    image: Annotated[ImageRef | None, describe("Container image, for launchers that run containers.")] = None
    resources: Annotated[ResourcesSpec, describe("Resources for one worker.")] = ResourcesSpec()
    data: Annotated[DataSpec, describe("Datasets that the program reads.")] = DataSpec()
    checkpoint: Annotated[CheckpointSpec, describe("Where checkpoints are stored.")] = CheckpointSpec()
    volumes: Annotated[tuple[VolumeSpec, ...], describe("Additional PersistentVolumeClaims to mount.")] = ()
    profile: Annotated[ProfileSpec, describe("Settings of the profiler, which samples resource usage.")] = ProfileSpec()
    env: Annotated[dict[EnvName, Verbatim], describe("Environment variables.")] = {}
    secret_env: Annotated[
        dict[EnvName, SecretKeySpec],
        describe(
            "Environment variables whose values come from Kubernetes Secrets or, on other launchers, from your "
            "environment."
        ),
    ] = {}
    secret_files: Annotated[
        dict[MountPath, SecretFilesSpec], describe("Kubernetes Secrets to mount as files, by mount path.")
    ] = {}
    labels: Annotated[dict[LabelKey, LabelValue], describe("Labels for the run and its Kubernetes objects.")] = {}
    retries: Annotated[NonNegativeInt, describe("Maximum number of times a failed job is restarted.")] = 3
    grace: Annotated[
        Seconds,
        describe("Grace period between SIGTERM and SIGKILL, in which the program can write a final checkpoint."),
    ] = Seconds(30)
    hang_after: Annotated[
        Seconds,
        describe(
            "How long a rank can go without sending a heartbeat before it is considered hung and the attempt is "
            "stopped. 0 disables the check."
        ),
    ] = Seconds("10m")
    tensorboard: Annotated[
        bool | NonEmpty,
        describe("Write TensorBoard event files to the run folder (`true`) or to the specified directory."),
    ] = False
    kubernetes: Annotated[KubernetesSpec, describe("Settings for `--on k8s`.")] = KubernetesSpec()
    mpi: Annotated[MpiSpec, describe("Settings for `topology: mpi`.")] = MpiSpec()
    ssh: Annotated[SshSpec, describe("Settings for `--on ssh`.")] = SshSpec()
    ray: Annotated[RaySpec, describe("Settings for `--on ray`.")] = RaySpec()
    slurm: Annotated[SlurmSpec, describe("Settings for `--on slurm`.")] = SlurmSpec()

    @property
    def traits(self) -> TopologyTraits:
        """The traits of the topology."""
        return find_topology(self.topology).traits

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return isinstance(self.workers, ElasticSpec)

    @property
    def max_workers(self) -> int:
        """The maximum number of workers; 1 for `auto` and `all`, until the launcher has counted them."""
        if isinstance(self.workers, ElasticSpec):
            return self.workers.max
        if isinstance(self.workers, tuple):
            return sum(group.count for group in self.workers)
        return 1 if isinstance(self.workers, str) else self.workers

    @property
    def min_workers(self) -> int:
        """The minimum number of workers."""
        return self.workers.min if isinstance(self.workers, ElasticSpec) else self.max_workers

    @property
    def worker_groups(self) -> tuple[WorkerGroupSpec, ...]:
        """The workers as groups of equal ones, in order; a single group unless `workers` is a list."""
        if isinstance(self.workers, tuple):
            return self.workers
        return (WorkerGroupSpec(count=self.max_workers),)

    @property
    def has_equal_workers(self) -> bool:
        """Whether all workers have the same resources and number of ranks."""
        first, *others = self._worker_kinds()
        return all(kind == first for kind in others)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of ranks of each worker."""
        kinds = zip(self.worker_groups, self._worker_kinds(), strict=True)
        return tuple(count for group, (_, count) in kinds for _ in range(group.count))

    @property
    def world_size(self) -> int:
        """The number of ranks of all workers."""
        return sum(self.ranks)

    def ranks_of(self, worker: int) -> int:
        """Return the number of ranks of a worker; 1 for topologies where one process uses all GPUs of its machine."""
        return self._kind_of(worker)[1]

    def resources_of(self, worker: int) -> ResourcesSpec:
        """Return the resources of a worker."""
        return self._kind_of(worker)[0]

    def with_workers_like(self, worker: int) -> JobSpec:
        """Return the job with the same number of workers, all of which are like this one."""
        if not isinstance(self.workers, tuple):
            return self
        resources, ranks = self._kind_of(worker)
        processes = ranks if self.traits.runs_ranks else "auto"
        change = msgspec.structs.replace
        return change(self, workers=self.max_workers, resources=resources, processes_per_worker=processes)

    def _kind_of(self, worker: int) -> tuple[ResourcesSpec, int]:
        """Return the resources and the number of ranks of a worker."""
        for group, kind in zip(self.worker_groups, self._worker_kinds(), strict=True):
            if worker < group.count or len(self.worker_groups) == 1:
                return kind
            worker -= group.count
        raise IndexError(f"the job has {self.max_workers} workers")

    def _worker_kinds(self) -> list[tuple[ResourcesSpec, int]]:
        """Return the resources and the number of ranks of the workers of each group."""
        kinds = []
        for group in self.worker_groups:
            resources = self.resources if group.resources is None else group.resources
            ranks = group.processes_per_worker or self.processes_per_worker
            auto = max(resources.gpus, 1) if self.traits.runs_ranks else 1
            kinds.append((resources, auto if ranks == "auto" else ranks))
        return kinds

    def program_of(self, role: str) -> ProgramSpec:
        """Return the program of a role: its own, or that of the workers."""
        return (self.roles[role].program if role in self.roles else None) or self.program

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations."""
        return checks.check_job(self)

"""The job file: what to train, with what, and where; one frozen struct per section.

A field's type carries its description, and `stoker job schema` and `docs/job-file.md` are both made from it. Values
that can be wrong by themselves are refused by their type, impossible combinations by `faults`; all are told at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stoker.core import spec
from stoker.core.units import Bytes, Seconds

Topology = Literal["single", "torchrun", "mpi", "tf-ps", "tf-mirrored"]

ROLES: dict[str, tuple[str, ...]] = {
    "single": (),
    "torchrun": (),
    "mpi": ("launcher",),
    "tf-ps": ("ps", "chief", "evaluator", "tensorboard"),
    "tf-mirrored": ("evaluator", "tensorboard"),
}
"""The roles of a topology beside its workers."""

PORT = 29500
"""Where slots listen for each other, when a job names no port and they do not share a machine."""


def _says(description: str) -> Meta:
    return Meta(description=description)


def _text(pattern: str, wanted: str) -> Meta:
    """Text that must match a pattern, and the words for it in a fault."""
    return Meta(pattern=rf"^(?:{pattern})$(?!\n)", extra={"wanted": wanted})


_LABEL = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
Name = Annotated[
    str,
    _text(_LABEL, "a name of at most 40 small letters, digits and dashes, with no dash at an end"),
    Meta(max_length=40),
]
ObjectName = Annotated[
    str,
    _text(rf"{_LABEL}(?:\.{_LABEL})*", "a Kubernetes name: small letters, digits, dashes and dots"),
    Meta(max_length=253),
]
Namespace = Annotated[str, _text(_LABEL, "a namespace: small letters, digits and dashes"), Meta(max_length=63)]
Variable = Annotated[str, _text("[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores")]
LabelKey = Annotated[
    str,
    _text(
        rf"(?:{_LABEL}(?:\.{_LABEL})*/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
        "a label such as team or example.com/team, of at most 63 letters, digits, '-', '_' and '.'",
    ),
]
MountPath = Annotated[str, _text(r"/[^\x00:]+", "an absolute path such as /data")]
Host = Annotated[str, _text(r"[^-\s][^\s]*", "a host name without spaces")]
User = Annotated[str, _text(r"[^-\s@][^\s@]*", "a user name without spaces")]
Some = Annotated[str, Meta(min_length=1, extra={"wanted": "text that is not empty"})]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Word = Annotated[str, Meta(extra={"as_written": True}, extra_json_schema={"type": ["string", "number", "boolean"]})]
"""Text for a program: 1e-4, 0755 and yes are passed on as they are written."""
LabelValue = Annotated[
    Word,
    _text("(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", "at most 63 letters, digits, '-', '_' and '.'"),
]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Program(_Section, frozen=True, kw_only=True):
    """What every worker runs: exactly one of `script`, `module` and `command`."""

    script: Annotated[
        Some | None,
        _says("A Python file. A relative path starts at the folder where the command is given, or at `cwd`."),
    ] = None
    module: Annotated[
        Annotated[str, _text(r"\w+(?:\.\w+)*", "a module such as package.train")] | None,
        _says("A Python module, as after `python -m`."),
    ] = None
    command: Annotated[
        tuple[Word, ...] | None,
        _says("Any other program, as a list of words. No shell reads it; write `[bash, -c, 'a && b']` for one."),
    ] = None
    args: Annotated[
        tuple[Word, ...],
        _says("What follows on the command line, as a list. Numbers are passed on as they are written."),
    ] = ()
    cwd: Annotated[
        Some | None,
        _says("The folder in which the program runs: by default the one where the command is given."),
    ] = None


class Elastic(_Section, frozen=True, kw_only=True):
    """A number of workers that may change while the job runs."""

    min: Annotated[Count, _says("With fewer workers the job waits.")]
    max: Annotated[Count, _says("More workers are not taken in.")]


class Resources(_Section, frozen=True, kw_only=True):
    """What one slot may use."""

    cpu: Annotated[
        Annotated[float, Meta(gt=0, extra={"wanted": "a number of cores such as 8 or 0.5"})] | None, _says("Cores.")
    ] = None
    memory: Annotated[Bytes | None, _says("Memory.")] = None
    gpu: Annotated[Annotated[int, Meta(ge=0)], _says("Accelerators.")] = 0
    gpu_type: Annotated[Some | None, _says("Which accelerator, by the name its cloud gives it.")] = None


class RoleSpec(_Section, frozen=True, kw_only=True):
    """What differs for the slots of one role."""

    count: Annotated[
        Annotated[int, Meta(ge=0)] | None, _says("How many slots; the topology's own number if absent.")
    ] = None
    image: Annotated[Some | None, _says("Another image than the workers'.")] = None
    resources: Annotated[Resources, _says("What one slot of the role may use.")] = Resources()
    port: Annotated[Port | None, _says("Another port than the workers'.")] = None


class Cache(_Section, frozen=True, kw_only=True):
    """Shards kept on a disk of each machine."""

    dir: Annotated[Some | None, _says("A folder on each machine. Without one, nothing is kept.")] = None
    size: Annotated[Bytes | None, _says("How much of the disk may be filled.")] = None


class Data(_Section, frozen=True, kw_only=True):
    """What the program reads. It finds these settings in its environment (`STOKER_DATA_TRAIN`, …)."""

    train: Annotated[
        Some | None,
        _says("The training set: a folder or URL with a manifest, or a brace pattern of tars."),
    ] = None
    val: Annotated[Some | None, _says("The validation set, likewise.")] = None
    cache: Annotated[Cache, _says("Shards kept on a disk of each machine.")] = Cache()
    via: Annotated[
        Annotated[str, _text("cluster|https?://.+", "a URL such as http://cache:3128, or 'cluster'")] | None,
        _says("A shared caching proxy: its URL, or `cluster` for the one in the job's namespace."),
    ] = None
    sampling: Annotated[
        Literal["exact", "join", "resampled"],
        _says(
            "`exact`: every sample once an epoch. `join`: whole shards, uneven ranks. "
            "`resampled`: shards drawn with replacement."
        ),
    ] = "exact"


class Checkpoint(_Section, frozen=True, kw_only=True):
    """Where the program keeps its state. Only rank 0 reads and writes it."""

    dir: Annotated[
        Some | None,
        _says("A folder, or a bucket (`s3://…`, `gs://…`); the run folder's `checkpoints/` if absent."),
    ] = None
    claim: Annotated[ObjectName | None, _says("The Kubernetes volume claim that is mounted at `dir`.")] = None
    create: Annotated[bool, _says("Make the claim if it is not there.")] = False
    size: Annotated[Bytes | None, _says("How large to make it.")] = None
    access: Annotated[
        Literal["rwo", "rwx"], _says("`rwo`: one machine can mount the claim. `rwx`: all of them can.")
    ] = "rwo"
    keep: Annotated[Count, _says("How many of the newest checkpoints to keep, beside the best.")] = 3


class Volume(_Section, frozen=True, kw_only=True):
    """A Kubernetes volume claim that every slot mounts."""

    claim: Annotated[ObjectName, _says("The claim.")]
    path: Annotated[MountPath, _says("Where it is mounted.")]
    read_only: Annotated[bool, _says("Refuse writing.")] = False


class Profile(_Section, frozen=True, kw_only=True):
    """What the machine does meanwhile: accelerator, cores, memory, network, disk."""

    every: Annotated[Seconds, _says("Time between two looks; 0 turns it off.")] = Seconds(30)


class SecretKey(_Section, frozen=True, kw_only=True):
    """One value of a Kubernetes secret."""

    secret: Annotated[ObjectName, _says("The secret.")]
    key: Annotated[Some, _says("Which of its values.")]


class SecretFiles(_Section, frozen=True, kw_only=True):
    """A Kubernetes secret as a folder, a file for each of its values."""

    secret: Annotated[ObjectName, _says("The secret.")]


class Kubernetes(_Section, frozen=True, kw_only=True):
    """For `--on k8s`."""

    namespace: Annotated[Namespace | None, _says("The context's own if absent.")] = None
    create_namespace: Annotated[bool, _says("Make the namespace if it is not there.")] = False
    queue: Annotated[Some | None, _says("The Kueue queue that admits the job.")] = None
    node_selector: Annotated[dict[LabelKey, LabelValue], _says("Labels that a node must have.")] = {}
    tolerations: Annotated[
        tuple[dict[str, Any], ...], _says("Taints that a node may have, as in a pod's specification.")
    ] = ()
    service_account: Annotated[str | None, _says("The account of the pods.")] = None
    image_pull_secrets: Annotated[tuple[ObjectName, ...], _says("Secrets for the images' registries.")] = ()
    image_pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], _says("When images are fetched.")] = (
        "IfNotPresent"
    )
    ttl: Annotated[Seconds, _says("How long a finished job stays in the cluster.")] = Seconds("10m")
    deadline: Annotated[Seconds | None, _says("How long the job may take; for ever if absent.")] = None
    patch: Annotated[
        tuple[dict[str, Any], ...],
        _says("Merge patches for the objects that are rendered; each names its object by `kind` and `metadata.name`."),
    ] = ()


class Ssh(_Section, frozen=True, kw_only=True):
    """For `--on ssh`."""

    hosts: Annotated[tuple[Host, ...], _says("The machines, by the names that `ssh` knows.")] = ()
    user: Annotated[User | None, _says("The account there; what `ssh` itself would take if absent.")] = None
    workdir: Annotated[Some | None, _says("The folder there that the working folder is copied to.")] = None


class Job(_Section, frozen=True, kw_only=True):
    """A job."""

    name: Annotated[Name, _says("What runs, logs and objects are called.")]
    program: Annotated[Program, _says("What every worker runs.")]
    topology: Annotated[
        Topology,
        _says(
            "How processes find each other. `single`: one process. `torchrun`: PyTorch. `mpi`: mpirun. "
            "`tf-ps`, `tf-mirrored`: TensorFlow with parameter servers, and without."
        ),
    ] = "torchrun"
    workers: Annotated[
        Count | Elastic, _says("How many machines or pods; `{min: 2, max: 8}` lets torchrun grow and shrink.")
    ] = 1
    processes_per_worker: Annotated[
        Literal["auto"] | Count, _says("Ranks on each worker; `auto`: one for each of its GPUs, or 1.")
    ] = "auto"
    port: Annotated[
        Port | None,
        _says("Where slots listen for each other. If absent, 29500, or any free port when all is on one machine."),
    ] = None
    roles: Annotated[dict[str, RoleSpec], _says("What differs for slots that are not workers, by role.")] = {}
    image: Annotated[Some | None, _says("The container image, where slots run in containers.")] = None
    resources: Annotated[Resources, _says("What one worker may use.")] = Resources()
    data: Annotated[Data, _says("What the program reads.")] = Data()
    checkpoint: Annotated[Checkpoint, _says("Where the program keeps its state.")] = Checkpoint()
    volumes: Annotated[tuple[Volume, ...], _says("Further Kubernetes volume claims.")] = ()
    profile: Annotated[Profile, _says("What the machine does meanwhile.")] = Profile()
    env: Annotated[dict[Variable, Word], _says("Environment variables.")] = {}
    secret_env: Annotated[
        dict[Variable, SecretKey], _says("Environment variables whose values are in Kubernetes secrets.")
    ] = {}
    secret_files: Annotated[
        dict[MountPath, SecretFiles], _says("Kubernetes secrets as files, by the folder they appear in.")
    ] = {}
    labels: Annotated[dict[LabelKey, LabelValue], _says("Your own labels, for lists and for Kubernetes.")] = {}
    retries: Annotated[Annotated[int, Meta(ge=0)], _says("How often the job is started again after a failure.")] = 3
    grace: Annotated[Seconds, _says("Time that a program has between SIGTERM and SIGKILL, for a last checkpoint.")] = (
        Seconds(30)
    )
    hang_after: Annotated[
        Seconds, _says("No heartbeat of a rank for so long is a hang, and ends the attempt; 0: never.")
    ] = Seconds("10m")
    tensorboard: Annotated[
        bool | Some, _says("Write TensorBoard event files: `true` for the run folder, or a folder of your own.")
    ] = False
    kubernetes: Annotated[Kubernetes, _says("For `--on k8s`.")] = Kubernetes()
    ssh: Annotated[Ssh, _says("For `--on ssh`.")] = Ssh()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return isinstance(self.workers, Elastic)

    @property
    def max_workers(self) -> int:
        """How many workers there are at most."""
        return self.workers.max if isinstance(self.workers, Elastic) else self.workers

    @property
    def min_workers(self) -> int:
        """How many workers there are at least."""
        return self.workers.min if isinstance(self.workers, Elastic) else self.workers

    @property
    def ranks_per_worker(self) -> int:
        """How many ranks run on each worker."""
        return self.processes_per_worker if self.processes_per_worker != "auto" else max(self.resources.gpu, 1)


def load_job(path: Path | str, sets: Sequence[str] = ()) -> Job:
    """Read a job file; `sets` (`resources.gpu=4`) override its keys."""
    return spec.load(Path(path).read_bytes(), Job, path)

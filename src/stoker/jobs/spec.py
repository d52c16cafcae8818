"""The job file: what to train, with what, and where; one frozen struct per section.

A field's type carries its description, and `stoker job schema` and `docs/job-file.md` are both made from it. Values
that can be wrong by themselves are refused by their type, impossible combinations by `faults`; all are told at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from stoker.core import spec
from stoker.core.units import Bytes, Seconds, format_bytes, format_duration
from stoker.errors import Fault, InputError, NotFoundError, SpecError
from stoker.jobs.mpirun import given
from stoker.jobs.overrides import override

Topology = Literal["single", "torchrun", "mpi", "tf-ps", "tf-mirrored"]

ROLES: dict[str, tuple[str, ...]] = {
    "single": (),
    "torchrun": (),
    "mpi": ("launcher",),
    "tf-ps": ("ps", "chief", "evaluator", "tensorboard"),
    "tf-mirrored": ("evaluator", "tensorboard"),
}
"""The roles of a topology beside its workers."""

SINGLETONS = ("launcher", "chief", "evaluator", "tensorboard")
"""Roles of which there is at most one."""

RESERVED = re.compile(
    "STOKER_.*|PET_.*|TORCHELASTIC_.*|OMPI_.*|PMIX?_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""Environment variables that stoker, torchrun or mpirun set."""
RESERVED_BY_TENSORFLOW = re.compile("TF_CONFIG|CLUSTER_CONFIG|POD_NAME")

MOST_WORKERS = 1000
"""On one host; what is more was meant for a port."""
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
_OBJECT = _text(rf"{_LABEL}(?:\.{_LABEL})*", "a Kubernetes name: small letters, digits, dashes and dots")
ObjectName = Annotated[str, _OBJECT, Meta(max_length=253)]
QueueName = Annotated[str, _OBJECT, Meta(max_length=63)]
"""Of an object, and a label's value too."""
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
Image = Annotated[str, _text(r"\S+", "an image such as ghcr.io/acme/trainer:v1")]
Host = Annotated[str, _text(r"[^-\s][^\s]*", "a host name without spaces")]
User = Annotated[str, _text(r"[^-\s@][^\s@]*", "a user name without spaces")]
Some = Annotated[str, _text(r"[^\x00]+", "text that is not empty")]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
_AS_WRITTEN = Meta(extra={"as_written": True})
Word = Annotated[str, _AS_WRITTEN, _text(r"[^\x00]*", "text")]
"""Text for a program: 1e-4, 0755 and yes are passed on as they are written."""
LabelValue = Annotated[
    str,
    _AS_WRITTEN,
    _text("(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", "at most 63 letters, digits, '-', '_' and '.'"),
]


def _tiny(key: str, size: int | None) -> Iterator[Fault]:
    """Refuse a size of a few bytes: its unit was forgotten."""
    if size is not None and size < 2**20:
        example = f"{size}Gi" if 0 < size < 1024 else "8Gi"
        yield Fault(key, f"is {format_bytes(size)}, too little to be meant: write its unit, for example {example}")


def _astray(key: str, place: str | None) -> Iterator[Fault]:
    """Refuse `s3:/bucket`, which would be taken for a folder, and `~`, which only a shell expands."""
    if place is None:
        return
    if match := re.match(r"(s3|gs|gcs|https?|file)(:/?(?!/)|//)", place):
        yield Fault(key, f"{place!r} is neither a URL nor a path: a URL starts with {match[1]}://")
    if place.startswith(("~", "$")):
        yield Fault(key, f"{place!r} starts with {place[0]}, which only a shell expands: write the path out")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Program(_Section, frozen=True, kw_only=True):
    """What every worker runs: exactly one of `script`, `module` and `command`."""

    script: Annotated[
        Some | None,
        _says("A Python file. A relative path starts at the folder where the command is given, whatever `cwd` is."),
    ] = None
    module: Annotated[
        Annotated[str, _text(r"\w+(?:\.\w+)*", "a module such as package.train")] | None,
        _says("A Python module, as after `python -m`."),
    ] = None
    command: Annotated[
        Annotated[tuple[Word, ...], Meta(extra={"wanted": "a list of words such as [bash, run.sh]"})] | None,
        _says("Any other program, as a list of words. No shell reads it; write `[bash, -c, 'a && b']` for one."),
    ] = None
    args: Annotated[
        Annotated[tuple[Word, ...], Meta(extra={"wanted": "a list of words such as [--epochs, 90]"})],
        _says("What follows on the command line, as a list. Numbers are passed on as they are written."),
    ] = ()
    cwd: Annotated[
        Some | None,
        _says("The folder in which the program runs: by default the one where the command is given."),
    ] = None

    def faults(self) -> Iterator[Fault]:
        """Refuse anything but one thing to run, and words that hold several."""
        given = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if not given:
            yield Fault("", "says nothing to run: give one of script, module and command")
        elif len(given) > 1:
            yield Fault("", f"gives {' and '.join(given)}: exactly one of script, module and command can be")
        if self.script is not None:
            yield from self._script_faults(self.script)
        yield from _astray("cwd", self.cwd)
        if self.module is not None and self.module.endswith(".py"):
            yield Fault("module", f"{self.module!r} is a file: give it as script, or leave out the .py")
        if self.command == ():
            yield Fault("command", "is an empty list")
        elif self.command is not None and len(self.command) == 1 and " " in self.command[0]:
            words = ", ".join(self.command[0].split())
            yield Fault("command", f"is one word with spaces in it: write each word of its own, [{words}]")
        for index, word in enumerate(self.args):
            if match := re.fullmatch(r"(--?[A-Za-z][\w-]*) +(\S+)", word):
                option, value = match.groups()
                yield Fault(f"args[{index}]", f"{word!r} is two words: write [{option}, {value}] or {option}={value}")

    @staticmethod
    def _script_faults(script: str) -> Iterator[Fault]:
        yield from _astray("script", script)
        file, *words = script.split() or [""]
        if words and Path(file).suffix == ".py":
            yield Fault("script", f"{script!r} holds more than a file: the rest belongs in args")
        elif Path(script).suffix in (".sh", ".bash"):
            yield Fault("script", f"{script!r} is no Python file: write command: [bash, {script}]")


class Elastic(_Section, frozen=True, kw_only=True):
    """A number of workers that may change while the job runs."""

    min: Annotated[Count, _says("With fewer workers the job waits.")]
    max: Annotated[Count, _says("More workers are not taken in.")]

    def faults(self) -> Iterator[Fault]:
        """Refuse limits that cross."""
        if self.min > self.max:
            yield Fault("", f"min is {self.min}, more than max, which is {self.max}")


class Resources(_Section, frozen=True, kw_only=True):
    """What one slot may use."""

    cpu: Annotated[
        Annotated[float, Meta(gt=0, extra={"wanted": "a number of cores such as 8 or 0.5"})] | None, _says("Cores.")
    ] = None
    memory: Annotated[Bytes | None, _says("Memory.")] = None
    gpu: Annotated[Annotated[int, Meta(ge=0)], _says("Accelerators.")] = 0
    gpu_type: Annotated[Some | None, _says("Which accelerator, by the name its cloud gives it.")] = None

    def faults(self) -> Iterator[Fault]:
        """Refuse a size that lacks its unit."""
        yield from _tiny("memory", self.memory)


class RoleSpec(_Section, frozen=True, kw_only=True):
    """What differs for the slots of one role."""

    count: Annotated[
        Annotated[int, Meta(ge=0)] | None, _says("How many slots; the topology's own number if absent.")
    ] = None
    image: Annotated[Image | None, _says("Another image than the workers'.")] = None
    resources: Annotated[Resources, _says("What one slot of the role may use.")] = Resources()
    port: Annotated[Port | None, _says("Another port than the workers'.")] = None
    program: Annotated[
        Program | None, _says("Another program than the workers'; `tensorboard` runs TensorBoard by itself.")
    ] = None
    node_selector: Annotated[
        dict[LabelKey, LabelValue], _says("Labels that a node must have, beside `kubernetes.node_selector`.")
    ] = {}
    logdir: Annotated[
        Some | None, _says("What `tensorboard` shows: a folder or a bucket; `checkpoint.dir` if absent.")
    ] = None
    expose: Annotated[
        Literal["cluster", "node_port", "load_balancer"],
        _says(
            "Who reaches `tensorboard` on Kubernetes. `cluster`: what runs there, and you by `stoker job forward`. "
            "`node_port`: a port of every node. `load_balancer`: an address of its own."
        ),
    ] = "cluster"
    ingress: Annotated[
        Annotated[
            str,
            _text(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*", "a host name such as board.example.com"),
            Meta(max_length=253),
        ]
        | None,
        _says("The host name under which an Ingress leads to `tensorboard`."),
    ] = None

    def faults(self) -> Iterator[Fault]:
        """Refuse paths with a slip in them."""
        yield from _astray("logdir", self.logdir)


def _role_key_faults(name: str, role: RoleSpec) -> Iterator[Fault]:
    """Refuse keys that mean nothing for a role."""
    if name == "launcher" and role.program is not None:
        yield Fault(
            "roles.launcher.program", "the launcher runs mpirun, which starts the workers' program: leave it out"
        )
    if name == "tensorboard":
        if role.program is not None and role.logdir is not None:
            yield Fault(
                "roles.tensorboard.logdir", "is for stoker's own TensorBoard, and program is given: leave one out"
            )
        return
    for key, default in (("logdir", None), ("expose", "cluster"), ("ingress", None)):
        if getattr(role, key) != default:
            yield Fault(f"roles.{name}.{key}", "is for the role tensorboard alone: leave it out")


class Cache(_Section, frozen=True, kw_only=True):
    """Shards kept on a disk of each machine."""

    dir: Annotated[Some | None, _says("A folder on each machine. Without one, nothing is kept.")] = None
    size: Annotated[Bytes | None, _says("How much of the disk may be filled.")] = None

    def faults(self) -> Iterator[Fault]:
        """Refuse a cache that lies nowhere, or elsewhere."""
        yield from _astray("dir", self.dir)
        yield from _tiny("size", self.size)
        if self.size is not None and self.dir is None:
            yield Fault("dir", "missing: size says how large the cache may be, and nothing says where it is")
        if self.dir is not None and "://" in self.dir:
            yield Fault("dir", f"{self.dir!r} is a URL, and the cache is a folder on each machine")


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

    def faults(self) -> Iterator[Fault]:
        """Refuse URLs with a slip in them."""
        for key in ("train", "val"):
            yield from _astray(key, getattr(self, key))


class Checkpoint(_Section, frozen=True, kw_only=True):
    """Where the program keeps its state. Only rank 0 reads and writes it."""

    dir: Annotated[
        Some | None,
        _says("A folder, or a bucket (`s3://…`, `gs://…`); the run folder's `checkpoints/` if absent."),
    ] = None
    claim: Annotated[ObjectName | None, _says("The Kubernetes volume claim that is mounted at `dir`.")] = None
    create: Annotated[bool, _says("Make the claim if it is not there.")] = False
    size: Annotated[Bytes | None, _says("How large to make it.")] = None
    storage_class: Annotated[
        ObjectName | None, _says("The storage class to make it from; the cluster's default if absent.")
    ] = None
    access: Annotated[
        Literal["rwo", "rwx"], _says("`rwo`: one machine can mount the claim. `rwx`: all of them can.")
    ] = "rwo"
    keep: Annotated[Count, _says("How many of the newest checkpoints to keep, beside the best.")] = 3

    def faults(self) -> Iterator[Fault]:
        """Refuse a folder that cannot be written, and half a claim."""
        yield from _astray("dir", self.dir)
        yield from _tiny("size", self.size)
        is_url = self.dir is not None and "://" in self.dir
        if is_url and not str(self.dir).startswith(("s3://", "gs://")):
            yield Fault("dir", f"{self.dir!r} cannot be written: give a folder, s3://… or gs://…")
        if self.claim is None:
            for key in ("create", "size", "storage_class"):
                if getattr(self, key):
                    yield Fault(key, "is about a claim, and none is named: give claim")
            return
        if self.dir is None:
            yield Fault("dir", "missing: say where the claim is mounted, for example /checkpoint")
        elif is_url:
            yield Fault(
                "claim", f"a bucket needs no claim: leave out claim, or the {self.dir.split('://')[0]}:// of dir"
            )
        elif not self.dir.startswith("/"):
            yield Fault("dir", f"{self.dir!r} must be an absolute path, since a claim is mounted there")
        if self.create and self.size is None:
            yield Fault("size", "missing: say how large to make the claim, for example 10Gi")
        for key in ("size", "storage_class"):
            if getattr(self, key) is not None and not self.create:
                what = "is of a claim that is made, and create is not set: set create: true, or leave it out"
                yield Fault(key, what)


class Volume(_Section, frozen=True, kw_only=True):
    """A Kubernetes volume claim that every slot mounts."""

    claim: Annotated[ObjectName, _says("The claim.")]
    path: Annotated[MountPath, _says("Where it is mounted.")]
    read_only: Annotated[bool, _says("Refuse writing.")] = False


class Profile(_Section, frozen=True, kw_only=True):
    """What the machine does meanwhile: accelerator, cores, memory, network, disk."""

    every: Annotated[Seconds, _says("Time between two looks; 0 turns it off.")] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Refuse to look all the time."""
        if 0 < self.every < 1:
            yield Fault("every", f"is {format_duration(self.every)}: at most one look a second, and 0 for none")


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
    queue: Annotated[QueueName | None, _says("The Kueue queue that admits the job.")] = None
    queue_priority: Annotated[
        QueueName | None, _says("The Kueue WorkloadPriorityClass that orders the job in its queue.")
    ] = None
    priority_class: Annotated[
        ObjectName | None, _says("The PriorityClass by which the scheduler places and evicts the pods.")
    ] = None
    copy: Annotated[
        tuple[Some, ...],
        _says("Files and folders that travel with the job in a ConfigMap; `program.script` does so by itself."),
    ] = ()
    node_selector: Annotated[dict[LabelKey, LabelValue], _says("Labels that a node must have.")] = {}
    tolerations: Annotated[
        tuple[dict[str, Any], ...], _says("Taints that a node may have, as in a pod's specification.")
    ] = ()
    service_account: Annotated[str | None, _says("The account of the pods.")] = None
    image_pull_secrets: Annotated[tuple[ObjectName, ...], _says("Secrets for the images' registries.")] = ()
    image_pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], _says("When images are fetched.")] = (
        "IfNotPresent"
    )
    shm: Annotated[Bytes | None, _says("How large `/dev/shm` may grow; up to the pod's memory if absent.")] = None
    user: Annotated[
        Annotated[int, Meta(ge=0)] | None, _says("The user id that programs run as; the image's own if absent.")
    ] = None
    group: Annotated[
        Annotated[int, Meta(ge=0)] | None, _says("The group id that programs run as, and that claims are given to.")
    ] = None
    ttl: Annotated[Seconds, _says("How long a finished job stays in the cluster.")] = Seconds("10m")
    deadline: Annotated[Seconds | None, _says("How long the job may take; for ever if absent.")] = None
    patch: Annotated[
        tuple[dict[str, Any], ...],
        _says("Merge patches for the objects that are rendered; each names its object by `kind` and `metadata.name`."),
    ] = ()

    def faults(self) -> Iterator[Fault]:
        """Refuse a size that lacks its unit, and a priority in no queue."""
        yield from _tiny("shm", self.shm)
        if self.queue_priority is not None and self.queue is None:
            yield Fault("queue_priority", "orders a job in its queue, and none is named: give queue, or priority_class")


class Ssh(_Section, frozen=True, kw_only=True):
    """For `--on ssh`."""

    hosts: Annotated[
        tuple[Host, ...],
        _says(
            "The machines, by the names that `ssh` knows. `node1:2` takes two workers; `@FILE` stands for the hosts "
            "in a file, one on a line."
        ),
    ] = ()
    user: Annotated[User | None, _says("The account there; what `ssh` itself would take if absent.")] = None
    workdir: Annotated[
        Some | None,
        _says(
            "The folder there that the working folder is copied to, and in which the program runs. A relative path "
            "starts at the home there; `stoker/<name>` if absent."
        ),
    ] = None
    copy: Annotated[bool, _says("Copy the working folder there before the job starts.")] = True
    exclude: Annotated[
        tuple[Some, ...], _says("What is not copied: patterns as in `.gitignore`, after those of `.stokerignore`.")
    ] = ()
    setup: Annotated[
        Some | None, _says("What a shell does in `workdir` on every host, after copying and before the job starts.")
    ] = None
    python: Annotated[
        Some,
        _says("The Python there: a name on its PATH, or a path, which may start at `workdir`: `.venv/bin/python`."),
    ] = "python3"
    config: Annotated[Some | None, _says("A configuration file for `ssh`, instead of your own `~/.ssh/config`.")] = None
    lost_after: Annotated[
        Seconds, _says("A host that has not answered for so long is lost, and its slots there end themselves.")
    ] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Refuse paths that only a shell expands, and a host that is lost at once."""
        for key in ("workdir", "python", "config"):
            yield from _astray(key, getattr(self, key))
        for index, host in enumerate(self.hosts):
            name, colon, count = host.rpartition(":")
            if not colon or ":" in name or host.startswith("@"):  # an IPv6 address has several
                continue
            if not count.isdigit() or not 1 <= int(count) <= MOST_WORKERS:
                what = f"behind the colon stands how many workers it takes, 1 to {MOST_WORKERS}"
                yield Fault(f"hosts[{index}]", f"{host!r}: {what}; a port of ssh goes into your ssh configuration")
        if self.lost_after < 5:
            yield Fault("lost_after", f"is {format_duration(self.lost_after)}: at least 5s, for networks do pause")


class Mpi(_Section, frozen=True, kw_only=True):
    """For `topology: mpi`."""

    binding: Annotated[
        Literal["none", "hwthread", "core", "l3cache", "numa", "socket"],
        _says("What each rank is bound to, as in mpirun's `--bind-to`."),
    ] = "none"
    args: Annotated[
        Annotated[tuple[Word, ...], Meta(extra={"wanted": "a list of words such as [--mca, btl, self,tcp]"})],
        _says("More arguments for mpirun, as a list. A flag or MCA parameter here takes the place of stoker's own."),
    ] = ()
    sshd: Annotated[
        Annotated[
            tuple[Word, ...],
            Meta(min_length=1, extra={"wanted": "a list of words such as [/usr/sbin/sshd, -De]"}),
        ],
        _says("What workers run on Kubernetes, so that mpirun reaches them; it stays in the foreground."),
    ] = ("/usr/sbin/sshd", "-De", "-o", "StrictModes=no", "-o", "LogLevel=FATAL")
    sshd_port: Annotated[Port, _says("Where it listens.")] = 22
    ssh_dir: Annotated[
        MountPath, _says("Where it and `ssh` find their keys on Kubernetes: `.ssh` of the image's user.")
    ] = "/root/.ssh"

    def faults(self) -> Iterator[Fault]:
        """Refuse flags that say in another way what the job file says already."""
        if self.args and not self.args[0].startswith("-"):
            yield Fault("args[0]", f"{self.args[0]!r} is no flag: mpirun would take it for the program")
        for index, word in enumerate(self.args):
            if word in ("-mca", "--mca") and len(self.args) < index + 3:
                yield Fault(f"args[{index}]", f"{word} needs a name and a value, such as [--mca, btl, 'self,tcp']")
        for one in given(self.args):
            if why := one.why_not:
                yield Fault(f"args[{one.at}]", f"{one.words} {why}")


class Ray(_Section, frozen=True, kw_only=True):
    """For `--on ray`."""

    strategy: Annotated[
        Literal["pack", "spread", "strict_pack", "strict_spread"],
        _says(
            "How workers share nodes. `pack`: as few nodes as can be. `spread`: as many. `strict_pack`: one node, "
            "or wait. `strict_spread`: a node for each, or wait."
        ),
    ] = "pack"
    exclude: Annotated[
        tuple[Some, ...], _says("What is not copied: patterns as in `.gitignore`, after those of `.stokerignore`.")
    ] = ()
    lost_after: Annotated[
        Seconds, _says("A cluster that has not answered for so long is lost, and the slots there end themselves.")
    ] = Seconds(30)

    def faults(self) -> Iterator[Fault]:
        """Refuse a cluster that is lost at once."""
        if self.lost_after < 5:
            yield Fault("lost_after", f"is {format_duration(self.lost_after)}: at least 5s, for networks do pause")


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
        Annotated[
            Count | Elastic | Literal["all"],
            Meta(extra={"wanted": "a number of at least 1, {min: 2, max: 8}, or all"}),
        ],
        _says(
            "How many machines or pods; `{min: 2, max: 8}` lets torchrun grow and shrink; `all`: as many as there is "
            "room for when the job is started."
        ),
    ] = 1
    processes_per_worker: Annotated[
        Literal["auto"] | Count, _says("Ranks on each worker; `auto`: one for each of its GPUs, or 1.")
    ] = "auto"
    port: Annotated[
        Port | None,
        _says("Where slots listen for each other. If absent, a free port, from 29500 on between machines."),
    ] = None
    roles: Annotated[dict[str, RoleSpec], _says("What differs for slots that are not workers, by role.")] = {}
    image: Annotated[Image | None, _says("The container image, where slots run in containers.")] = None
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
        Seconds, _says("A rank that stops sending heartbeats for so long hangs, and the attempt is ended; 0: never.")
    ] = Seconds("10m")
    tensorboard: Annotated[
        bool | Some, _says("Write TensorBoard event files: `true` for the run folder, or a folder of your own.")
    ] = False
    kubernetes: Annotated[Kubernetes, _says("For `--on k8s`.")] = Kubernetes()
    mpi: Annotated[Mpi, _says("For `topology: mpi`.")] = Mpi()
    ssh: Annotated[Ssh, _says("For `--on ssh`.")] = Ssh()
    ray: Annotated[Ray, _says("For `--on ray`.")] = Ray()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return isinstance(self.workers, Elastic)

    @property
    def max_workers(self) -> int:
        """How many workers there are at most; of `all`, which a launcher counts first, at least one."""
        return self.workers.max if isinstance(self.workers, Elastic) else 1 if self.workers == "all" else self.workers

    @property
    def min_workers(self) -> int:
        """How many workers there are at least."""
        return self.workers.min if isinstance(self.workers, Elastic) else self.max_workers

    def program_of(self, role: str) -> Program:
        """Give the program of a role: its own, or the workers'."""
        return (self.roles[role].program if role in self.roles else None) or self.program

    @property
    def ranks_per_worker(self) -> int:
        """How many ranks run on each worker; where a process has all GPUs of its machine, one."""
        if self.processes_per_worker != "auto":
            return self.processes_per_worker
        return max(self.resources.gpu, 1) if self.topology in ("torchrun", "mpi") else 1

    def faults(self) -> Iterator[Fault]:
        """Refuse what no launcher could carry out."""
        if isinstance(self.tensorboard, str):
            yield from _astray("tensorboard", self.tensorboard)
        yield from self._topology_faults()
        yield from self._role_faults()
        yield from self._claim_faults()
        yield from self._mount_faults()
        yield from self._env_faults()

    def _topology_faults(self) -> Iterator[Fault]:
        if self.topology == "single" and self.max_workers > 1:
            yield Fault("workers", f"topology single is one process, not {self.max_workers}: use torchrun")
        elif self.is_elastic and self.topology != "torchrun":
            yield Fault("workers", f"only torchrun can grow and shrink; {self.topology} needs one number")
        if self.topology not in ("torchrun", "mpi") and self.processes_per_worker not in ("auto", 1):
            why = "is one process" if self.topology == "single" else "runs one process on a worker, with all its GPUs"
            yield Fault("processes_per_worker", f"topology {self.topology} {why}: leave it out")
        if self.topology == "torchrun" and self.program.command is not None:
            yield Fault(
                "program.command",
                "torchrun starts Python itself, and wants script or module; for a command, set topology: single",
            )

    def _role_faults(self) -> Iterator[Fault]:
        for name, role in self.roles.items():
            if name in ("worker", "workers"):
                yield Fault(f"roles.{name}", "workers are described at the top: workers, image, resources, port")
            elif name not in set(chain(*ROLES.values())) or (name not in ROLES[self.topology] and role.count != 0):
                known = ", ".join(ROLES[self.topology]) or "none beside its workers"
                yield Fault(f"roles.{name}", f"topology {self.topology} has no such role (it has: {known})")
            elif name in SINGLETONS and (role.count or 0) > 1:
                yield Fault(f"roles.{name}.count", f"there is at most one {name}, not {role.count}")
            elif name == "ps" and self.topology == "tf-ps":
                if role.count == 0:
                    yield Fault("roles.ps.count", "tf-ps needs at least one parameter server")
                if role.resources.gpu:
                    yield Fault("roles.ps.resources.gpu", "a parameter server gets no accelerator: leave it out")
            elif name == "launcher" and role.resources.gpu:
                yield Fault("roles.launcher.resources.gpu", "the launcher gets no accelerator: leave it out")
            yield from _role_key_faults(name, role)
            if name == "tensorboard" and role.count and not (role.program or role.logdir or self.checkpoint.dir):
                yield Fault("roles.tensorboard.logdir", "missing: neither it nor checkpoint.dir says what to show")

    def _claim_faults(self) -> Iterator[Fault]:
        many = self.max_workers > 1 and (self.is_elastic or self.topology == "mpi")
        if self.checkpoint.claim is not None and self.checkpoint.access == "rwo" and many:
            why = "rank 0 may be on any worker" if self.is_elastic else "all workers of an MPIJob are alike"
            yield Fault(
                "checkpoint.access",
                f"rwo lets one machine mount the claim, and {why}: use rwx, a bucket, or "
                + ("a fixed number of workers" if self.is_elastic else "one worker"),
            )

    def _mount_faults(self) -> Iterator[Fault]:
        mounts = [(f"volumes[{index}].path", volume.path) for index, volume in enumerate(self.volumes)]
        mounts += [(f'secret_files["{path}"]', path) for path in self.secret_files]
        taken: dict[str, str] = {}
        if self.checkpoint.claim is not None and self.checkpoint.dir is not None:
            taken[self.checkpoint.dir.rstrip("/")] = "checkpoint.dir"
        for key, path in mounts:
            other = taken.setdefault(path.rstrip("/"), key)
            if other != key:
                yield Fault(key, f"{path!r} is taken: {other} is mounted there")

    def _env_faults(self) -> Iterator[Fault]:
        for section in ("env", "secret_env"):
            for name in getattr(self, section):
                if RESERVED.fullmatch(name) or (
                    self.topology.startswith("tf-") and RESERVED_BY_TENSORFLOW.fullmatch(name)
                ):
                    yield Fault(f"{section}.{name}", "is reserved: it is set for every process, from this file")
        for name in self.secret_env:
            if name in self.env:
                yield Fault(f"secret_env.{name}", "is in env too: give it once")


# --- Reading


def load_job(path: Path | str, sets: Sequence[str] = ()) -> Job:
    """Read a job file (`-` is standard input); `sets`, such as `resources.gpu=4`, override its keys."""
    if str(path) == "-":
        return parse_job(sys.stdin.buffer.read(), "standard input", sets)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else InputError
        raise kind(f"cannot be read: {(error.strerror or '').lower()}", where=path) from error
    return parse_job(text, path, sets)


def parse_job(text: str | bytes, where: object, sets: Sequence[str] = ()) -> Job:
    """Read the text of a job file; `where` names it in the error."""
    data, faults = spec.parse(text, where)
    data = {} if data is None else data
    keys: list[str] = []
    if isinstance(data, dict):
        data, keys, unset = override(data, sets)
        faults += unset
    data = _given(spec.settle(data, Job), Job)
    job, more = spec.examine(data, Job)
    if job is None and isinstance(data, Mapping):
        more += _combinations(data, more)
    faults += [_with_origin(fault, keys) for fault in more]
    if job is None or faults:
        raise SpecError(faults, where=where)
    return job


def _combinations(data: Mapping[str, Any], found: Sequence[Fault]) -> list[Fault]:
    """Find impossible combinations among the sections that have no fault yet, so that they are not told a day later."""
    bad = {re.split(r"[.\[]", fault.path)[0] for fault in found}
    if "topology" in bad:
        return []  # most combinations are about it
    sections = {key: value for key, value in data.items() if key not in bad}
    job, more = spec.examine({"name": "a", "program": {"module": "a"}, **sections}, Job)
    return [] if job is None else more


def _given(data: Any, into: Any) -> Any:
    """Leave out known keys that have no value: `env:` with all of its lines commented out says nothing."""
    struct = next((part for part in (into, *get_args(into)) if _is_section(part)), None)
    if struct is not None and isinstance(data, Mapping):
        types = spec.field_types(struct)
        return {
            key: _given(value, _bare(types.get(key)))
            for key, value in data.items()
            if value is not None or key not in types
        }
    if get_origin(into) is dict and isinstance(data, Mapping):
        return {key: _given(value, _bare(get_args(into)[1])) for key, value in data.items()}
    if get_origin(into) is tuple and isinstance(data, list):
        return [_given(value, _bare(get_args(into)[0])) for value in data]
    return data


def _is_section(into: Any) -> bool:
    return isinstance(into, type) and issubclass(into, _Section)


def _bare(into: Any) -> Any:
    return get_args(into)[0] if get_origin(into) is Annotated else into


def _with_origin(fault: Fault, keys: Sequence[str]) -> Fault:
    """Say that a fault comes from the command line and not from the file: it is what was set, in it or around it."""
    for key in reversed(keys):
        within, around = fault.path.removeprefix(key), key.removeprefix(fault.path)
        is_near = fault.path == key or (within != fault.path and within[0] in ".[")
        if is_near or (fault.path and around != key and around[0] in ".["):
            return Fault(fault.path, f"{fault.what} (from --set {key})")
    return fault


# --- Writing


def to_yaml(job: Job) -> str:
    """Write a job as a file that reads back as an equal job; defaults are left out."""
    return spec.to_yaml(plain(job))


def plain(value: object) -> object:
    """Make plain data, without the fields that are as they would be anyway."""
    match value:
        case msgspec.Struct():
            fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
            return {field.encode_name: plain(inner) for field, inner in fields if inner != _default(field)}
        case Mapping():
            return {key: plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case Bytes():
            return _exact(value, {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20})
        case Seconds():
            return _exact(value, {"d": 86400, "h": 3600, "m": 60, "s": 1})
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default_factory() if callable(field.default_factory) else field.default


def _exact(value: float, units: Mapping[str, int]) -> str | float:
    """Write a quantity in the largest unit that divides it, or as a plain number."""
    for unit, size in units.items():
        if value and value % size == 0:
            return f"{int(value) // size}{unit}"
    return int(value) if value == int(value) else float(value)


def schema() -> dict[str, Any]:
    """Describe the job file in JSON Schema, for editors."""
    described = spec.schema(Job)
    ways = ("script", "module", "command")
    described["$defs"]["Program"]["oneOf"] = [
        {"required": [way], "properties": {way: {"not": {"type": "null"}}}} for way in ways
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Stoker job file", **described}

"""The reference page of the job file, made from its structs: `python -m stoker.jobs.reference > docs/job-file.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from stoker.core import spec
from stoker.core.units import Bytes, Seconds
from stoker.jobs.spec import ROLES, Job, plain

EXAMPLE = """\
name: pets
program:
  module: stoker.trainers.torch_image
  args: [--model, resnet18, --epochs, 10, --global-batch-size, 64]
topology: torchrun
workers: 1
processes_per_worker: 2
data:
  train: shards/train
  val: shards/val
checkpoint: {dir: checkpoints/pets, keep: 3}
env: {OMP_NUM_THREADS: 1}
labels: {team: vision}
retries: 3
grace: 30s
hang_after: 10m
tensorboard: true
"""

_HEAD = f"""\
# The job file

<!-- Made by `python -m stoker.jobs.reference`; a test compares. -->

A job file says what to train, with what, and where. `stoker init` writes one to start from, `stoker job plan` shows
what it would start, `stoker job run` starts it.

```yaml
{EXAMPLE}```

- A file that is not right is refused with every fault at once, each by the path of its key (`resources.gpu`).
- A key without a value counts as left out.
- Sizes are written as `200Gi`, `1.5GB` or a number of bytes; durations as `30s`, `1h30m` or a number of seconds.
- `program.args`, `program.command`, `env`, `labels` and `node_selector` take text as it is written,
  quoted or not: `1e-4`, `0755`, `1.10` and `yes` reach the program as these very characters.
- Relative paths (`program.script`, `program.cwd`, `data.train`, `checkpoint.dir`, …) start at the folder where the
  command is given, not at the job file's own.
- `stoker job schema > job.schema.json` gives an editor what it needs to complete and check.

## Change a key for one run

    stoker job run job.yaml --set resources.gpu=4 --set workers='{{min: 2, max: 8}}' --set ssh.hosts[0]=node7

The value is read as YAML. A list can be changed item by item, and the index after its last item adds one. Nothing after
the `=` takes the key out, so that its default holds. A key with dots or slashes in it goes into brackets and quotes:
`--set 'labels["example.com/team"]=vision'`. `-` as the job file reads standard input.
"""

_RULES = """\
## What cannot be

- `program`: exactly one of `script`, `module` and `command`. `torchrun` starts Python itself, so it takes no `command`.
- `topology: single` is one process: one worker, one process on it. A TensorFlow worker is one process with all GPUs.
- `workers: {min, max}` needs `topology: torchrun`, and `min` at most `max`.
- `roles` are those of the topology: {roles}. There is at most one of each but `ps`. A role of another topology may
  stand in the file with `count: 0`. Parameter servers and the launcher get no accelerators. `logdir`, `expose` and
  `ingress` are for `tensorboard` alone, and `launcher` has no `program` of its own.
- `checkpoint.claim` needs an absolute `dir`, and no bucket. `create` needs `claim` and `size`; `size` and
  `storage_class` need `create`. `kubernetes.queue_priority` needs `queue`.
- `checkpoint.access: rwo` with a claim cannot be elastic, nor `mpi` with more than one worker: whichever machine rank 0
  is on must mount the claim, and only one can.
- `data.cache.size` needs `dir`. `checkpoint.dir` is a folder, `s3://…` or `gs://…`.
- `ssh.lost_after` is at least 5 s: networks do pause.
- Sizes below 1 MiB are refused: their unit was forgotten. `profile.every` is 0 or at least a second.
- Paths do not start with `~` or `$`, which only a shell expands.
- No two of `volumes`, `secret_files` and the checkpoint's claim can be mounted at one path.
- `env` and `secret_env` share no name, and hold none that is set for every process: `STOKER_*`, `PET_*`,
  `TORCHELASTIC_*`, `OMPI_*`, `PMI_*`, `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, …, `MASTER_ADDR`, `MASTER_PORT`; with
  TensorFlow also `TF_CONFIG`, `CLUSTER_CONFIG` and `POD_NAME`. `OMP_NUM_THREADS` is yours to set.
"""


def page() -> str:
    """Write the page."""
    roles = "; ".join(f"`{topology}` has {_listed(names)}" for topology, names in ROLES.items() if names)
    sections = [f"## {_title(path)}\n\n{_section(struct, path)}" for struct, path in _homes().items()]
    return "\n".join([_HEAD, *sections, _RULES.replace("{roles}", roles)])


def _homes() -> dict[type[msgspec.Struct], str]:
    """Give every struct the place where it is described: the shortest path at which it is found."""
    homes: dict[type[msgspec.Struct], str] = {}
    for path, struct in _structs(Job, ""):
        homes[struct] = min(homes.get(struct, path), path, key=len)
    return homes


def _structs(struct: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield a struct and those inside it, each with the path of its key."""
    yield path, struct
    for field in msgspec.structs.fields(struct):
        inner, suffix = _struct_in(field.type)
        if inner is not None:
            yield from _structs(inner, f"{path}.{field.encode_name}{suffix}".removeprefix("."))


def _struct_in(into: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """Find the struct that a field holds, alone, in a list or by name."""
    bare = _bare(into)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return bare, ""
    suffix = {dict: ".NAME", tuple: "[]"}.get(get_origin(bare), "")
    found = (_struct_in(option)[0] for option in get_args(bare))
    return next((struct for struct in found if struct is not None), None), suffix


def _section(struct: type[msgspec.Struct], path: str) -> str:
    rows = [
        f"| `{field.encode_name}` | {_kind(field.type)} | {_default(field)} | {_meaning(field.type)} |"
        for field in msgspec.structs.fields(struct)
    ]
    intro = f"{cleandoc(struct.__doc__ or '')}\n\n" if path else ""
    return "\n".join([f"{intro}| key | takes | default | meaning |", "|---|---|---|---|", *rows, ""])


def _title(path: str) -> str:
    return f"`{path}`" if path else "Keys"


def _kind(into: Any) -> str:
    """Say what a type takes, as a cell of a table."""
    bare = _bare(into)
    origin, arguments = get_origin(bare), get_args(bare)
    struct = _struct_in(into)[0]
    if struct is not None and origin not in (Union, UnionType):
        words = {dict: "mappings by name", tuple: "a list of mappings"}.get(origin, "a mapping")
        return f"[{words}](#{re.sub(r'[^a-z0-9_]', '', _homes()[struct].lower())})"
    match origin:
        case _ if bare in (Bytes, Seconds):
            return "a size" if bare is Bytes else "a duration"
        case _ if origin in (Union, UnionType):
            return " or ".join(_kind(option) for option in arguments if option is not type(None))
        case _ if origin is Literal:
            return _listed(arguments, "or")
        case _ if origin is dict:
            return "text by name"
        case _ if origin is tuple:
            return "a list of mappings" if get_origin(_bare(arguments[0])) is dict else "a list of texts"
        case _:
            return spec.wanted(into).replace("text that is not empty", "text").replace("an integer", "a number")


def _meaning(into: Any) -> str:
    return next(str(note.description) for note in reversed(into.__metadata__) if note.description is not None)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default_factory() if callable(field.default_factory) else field.default
    if default in (None, (), {}) or isinstance(default, msgspec.Struct):
        return ""
    return f"`{_inline(plain(default))}`"


def _inline(value: object) -> str:
    """Write a value as YAML does, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(_inline(one) for one in value)}]"
    return spec.to_yaml([value]).strip()[1:-1]


def _bare(into: Any) -> Any:
    return get_args(into)[0] if get_origin(into) is Annotated else into


def _listed(names: tuple[str, ...], last: str = "and") -> str:
    words = [f"`{name}`" for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


if __name__ == "__main__":
    sys.stdout.write(page())

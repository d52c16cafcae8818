"""`stoker init`: write a job file, set up for a shard set if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stoker.cli.options import parse_threads
from stoker.cli.output import print_message

if TYPE_CHECKING:
    from stoker.shards.shard_set import ShardSet

DEFAULT_NAME = "my-training"
DEFAULT_TRAIN = "shards/train"
DEFAULT_FILE = Path("job.yaml")
SUFFIXES = (".yaml", ".yml")


def init(
    shards: Annotated[
        str | None,
        typer.Argument(metavar="SHARDS", help="Shard sets to train on. Defaults to shards/, if it exists."),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Job file to write, .yaml or .yml; `-` writes to standard output. Defaults to job.yaml.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job. Defaults to the name of the dataset.")
    ] = None,
    train: Annotated[
        str | None, typer.Option(metavar="URL", help="Training set, if the job reads it from a URL other than SHARDS.")
    ] = None,
    val: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Validation set. Defaults to `val` or `test` next to the training set."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented job file as a starting point.

    Model, image size and batch size are chosen for the shard set. You can omit SHARDS: a single argument that
    ends in .yaml or .yml is treated as FILE.
    """
    from stoker.errors import ConflictError, InputError, NotFoundError
    from stoker.jobs.spec import parse_job
    from stoker.jobs.template import DEFAULT_ARGS, render_template
    from stoker.storage import local_path
    from stoker.storage.local import write_file

    if path is None and shards is not None and (shards == "-" or shards.endswith(SUFFIXES)):
        path, shards = Path(shards), None
    path, to_stdout = path or DEFAULT_FILE, str(path) == "-"
    if to_stdout:
        path = DEFAULT_FILE
    elif path.suffix not in SUFFIXES:
        raise InputError(
            "the name of a job file must end in .yaml or .yml", where=path, hint=f"for example {DEFAULT_FILE}"
        )
    elif not path.parent.is_dir():
        raise NotFoundError("no such directory", where=path.parent, hint="create it, or choose another path")
    local = local_path(train or DEFAULT_TRAIN)
    readable = shards or (train or DEFAULT_TRAIN if local is not None and local.exists() else None)
    data = None if readable is None else _find_data(readable)
    if data is None:
        train = train or DEFAULT_TRAIN
        val = val or (_sibling(train, "val") if local is not None else None)
        text = render_template(name or DEFAULT_NAME, train, val, file=str(path))
    else:
        if data.val is not None:
            val = val or (data.val.url if train is None else _sibling(train, data.val.split))
        about, flags = _describe(data.train)
        text = render_template(
            name or _job_name(data.train),
            train or data.train.url,
            val,
            file=str(path),
            args=(*flags, *DEFAULT_ARGS[-2:]),
            about=about,
        )
    parse_job(text, path)  # an invalid name is refused before anything is written
    if to_stdout:
        typer.echo(text, nl=False)
        return
    if path.exists() and not force:
        raise ConflictError("file already exists", where=path, hint="choose another name or pass --force")
    write_file(path.resolve(), text.encode())  # resolved: a link to a job file stays a link
    print_message(f"Wrote {path}. Edit it, then run: stoker job run {path}")
    if data is not None and val is None:
        print_message(
            "note: there is no validation split; to create one from train: stoker data convert --val-fraction"
        )
    elif data is not None and data.val is not None and data.val.split == "test":
        print_message("note: there is no val split, so the job validates on test")


class _Data(NamedTuple):
    """The shard sets of a job; `val` may be the test split."""

    train: ShardSet
    val: ShardSet | None


def _find_data(url: str) -> _Data:
    """Find the training set at a URL, and the validation set below the same folder or beside it."""
    from stoker.errors import InputError, StokerError
    from stoker.shards.scan import ensure_manifest
    from stoker.shards.shard_set import find_shard_sets, group_by_split

    sets = group_by_split(find_shard_sets(url))
    train = next(iter(sets.values())) if len(sets) == 1 else sets.get("train")
    if train is None:
        raise InputError("no training split found", where=url, hint=f"found {', '.join(sets)}; pass one of them")
    if len(sets) == 1:
        for split in ("val", "test"):
            try:
                sets |= {split: find_shard_sets(_sibling(url, split))[0]}
            except StokerError:
                continue
    val = sets.get("val", sets.get("test"))
    return _Data(ensure_manifest(train, jobs=parse_threads("auto")), None if val is train else val)


def _sibling(url: str, name: str) -> str:
    """Return the URL of another split beside that of a split."""
    head, slash, _ = url.rstrip("/").rpartition("/")
    return head + slash + name


def _describe(shard_set: ShardSet) -> tuple[str, list[str]]:
    """Return a sentence about a shard set, and flags of the trainer that fit it."""
    from stoker.shards.image_sizes import measure_image_size
    from stoker.trainers.suggest import suggest_flags

    manifest = shard_set.manifest
    assert manifest is not None
    size = measure_image_size(shard_set)
    pixels = "" if size is None else f", images of about {size[0]} × {size[1]} pixels"
    classes = f" of {len(manifest.classes):,} classes" if manifest.classes else ""
    return f"{manifest.samples:,} training samples{classes}{pixels}", suggest_flags(manifest.samples, size)


def _job_name(shard_set: ShardSet) -> str:
    """Return the name of the dataset as the name of a job: lower-case letters, digits and '-'."""
    import re

    name = "" if shard_set.manifest is None else shard_set.manifest.name
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or DEFAULT_NAME

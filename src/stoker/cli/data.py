"""`stoker data`: datasets into shards, and shards under the eye."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli import data_serve
from stoker.cli.output import byte_bar, counter, print_json, print_table, remark
from stoker.core.units import counted

if TYPE_CHECKING:
    from stoker.load.bench import Measured
    from stoker.load.peek import Peeked
    from stoker.sampling.forecast import Forecast
    from stoker.shards.convert import Conversion
    from stoker.shards.shard_set import ShardSet
    from stoker.shards.verify import Report

app = typer.Typer(help="Datasets into shards, and shards to their readers.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Url = Annotated[str, typer.Argument(metavar="URL", help="A shard set, or a brace pattern of shards.")]
Transform = Annotated[
    str, typer.Option(metavar="NAME", help="imagenet-train, imagenet-val, small-train, digits-train or whole.")
]
Size = Annotated[int, typer.Option(metavar="PX", help="Width and height of what the model sees.")]
Antialias = Annotated[bool, typer.Option(help="Shrink smoothly, or as fast as can be.")]
Jobs = Annotated[str, typer.Option(metavar="N", help="Threads at work; `auto` is one per core.")]


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A dataset: a folder, a file or a URL.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A new folder, or s3://… or gs://….")],
    kind: Annotated[
        str,
        typer.Option("--source", metavar="KIND", help="auto, folder, imagenet, cifar10, mnist, shards or synthetic."),
    ] = "auto",
    shard_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="tar or tfrecord.")] = "tar",
    prefix: Annotated[
        str | None, typer.Option(metavar="NAME", help="How shards' names start; tar: the dataset's name.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="About how large a shard should be; 256MiB by default.")
    ] = None,
    shard_samples: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many samples a shard, instead of a size.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the shuffle; the same seed gives the same bytes.")] = 0,
    jobs: Jobs = "auto",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Only so many samples of each split, drawn at random.")
    ] = None,
    max_side: Annotated[
        int | None, typer.Option(metavar="PX", help="Re-encode larger images as JPEG with this longer side.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option(metavar="Q", help="The JPEG quality of re-encoded images; 90 by default.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For what must be unpacked first; the system's by default."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away an unfinished conversion that lies at DEST.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Turn a dataset into shards.

    Image bytes are copied as they are, shuffled by the seed. A run that was killed goes on when the same command is
    given again. Bad images are left out and listed in quarantine.jsonl.
    """
    from stoker.core.scratch import scratch_folder
    from stoker.core.units import parse_bytes
    from stoker.errors import InputError
    from stoker.shards.convert import check_apart, prepared
    from stoker.shards.destination import check_destination
    from stoker.shards.plan import Options
    from stoker.storage import open_writable

    if shard_size is not None and shard_samples is not None:
        raise InputError("--shard-size and --shard-samples are two ways to say one thing", hint="give one of them")
    if quality is not None and max_side is None:
        raise InputError("--quality is for images that --max-side re-encodes", hint="give both or neither")
    if scratch is not None and not scratch.is_dir():
        raise InputError("--scratch names no folder", where=scratch, hint="make it first")
    options = Options(
        format=shard_format,
        prefix=prefix,
        shard_bytes=parse_bytes(shard_size or "256MiB"),
        shard_samples=shard_samples,
        seed=seed,
        limit=limit,
        max_side=max_side,
        quality=quality or 90,
    )
    threads = _threads(jobs)
    check_apart(source, dest)
    check_destination(open_writable(dest))
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(scratch))
        with counter("scanning") as found:
            ready = prepared(source, options, scratch=folder, kind=kind, progress=found)
            conversion = stack.enter_context(ready)
        for note in conversion.source.notes:
            remark(note)
        if dry_run:
            if not restart:
                conversion.check(dest)
            _show_plan(conversion, as_json)
        else:
            _carry_out(conversion, dest, threads, restart, as_json)


@app.command()
def summary(
    url: Annotated[str, typer.Argument(metavar="URL|-", help="A shard set, a brace pattern, or - for a listing.")],
    as_json: Json = False,
) -> None:
    """Sum up shards: patterns, counts, bytes, classes, and gaps in the numbering."""
    from stoker.core.units import format_bytes
    from stoker.shards.shard_set import find_sets
    from stoker.shards.summary import summarise, summarise_listing

    rows = (
        summarise_listing(sys.stdin)
        if url == "-"
        else [row for one in find_sets(url, gaps=True) for row in summarise(one)]
    )
    if as_json:
        print_json(rows)
        return
    print_table(
        ("shards", "pattern", "samples", "bytes", "classes", "missing"),
        [
            (
                row.shards,
                row.pattern,
                row.samples,
                None if row.bytes is None else format_bytes(row.bytes),
                row.classes,
                len(row.missing),
            )
            for row in rows
        ],
    )
    for row in rows:
        if row.missing:
            more = f" and {len(row.missing) - 5:,} more" if len(row.missing) > 5 else ""
            remark(f"missing in {row.pattern}: {', '.join(row.missing[:5])}{more}")
        if row.quarantined:
            bad = counted(row.quarantined, "bad image")
            remark(f"{bad} of {row.split!r} left out: see its quarantine.jsonl")


@app.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="A shard set, or a folder of them.")],
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image, not only its header.")] = False,
    jobs: Jobs = "auto",
    as_json: Json = False,
) -> None:
    """Check digests, counts, members, image headers, keys and labels, and report every fault."""
    from stoker.errors import DataFaultError
    from stoker.shards.shard_set import find_sets
    from stoker.shards.verify import verify as verify_set

    sets = find_sets(url)
    threads = _threads(jobs)
    with byte_bar("verifying", sum(entry.size for one in sets for entry in one.shards)) as advance:
        reports = [verify_set(one, deep=deep, jobs=threads, progress=advance) for one in sets]
    _show_reports(reports, as_json)
    if faults := sum(len(report.findings) for report in reports):
        raise DataFaultError(f"{counted(faults, 'fault')} found", where=url)


@app.command()
def plan(
    url: Url,
    world: Annotated[int, typer.Option(metavar="N", help="Ranks: processes that train.")] = 1,
    nodes: Annotated[int, typer.Option(metavar="N", help="Machines that the ranks are spread over.")] = 1,
    workers: Annotated[int, typer.Option(metavar="N", help="DataLoader workers of each rank; 0 for none.")] = 0,
    batch: Annotated[int, typer.Option(metavar="N", help="The global batch: samples of all ranks a step.")] = 256,
    sampling: Annotated[str, typer.Option(metavar="MODE", help="exact, join or resampled.")] = "exact",
    epoch_samples: Annotated[
        int | None, typer.Option(metavar="N", help="How long an epoch of `resampled` is; the dataset by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    resume: Annotated[str, typer.Option(metavar="EPOCH:CONSUMED", help="Where a run would go on.")] = "0:0",
    as_json: Json = False,
) -> None:
    """Show what each rank would read, how the epoch ends, and what a node holds; refuse what would hang or starve."""
    import numpy as np

    from stoker.load.loader import find_one, plan_of
    from stoker.sampling.cursor import Cursor
    from stoker.sampling.forecast import forecast
    from stoker.shards.shuffle_check import mixing

    one = _described(find_one(url))
    how = plan_of(one, sampling=sampling, seed=seed, epoch_samples=epoch_samples)
    told = forecast(
        how,
        shard_bytes=np.array([entry.size for entry in one.shards], dtype=np.int64),
        world=world,
        nodes=nodes,
        workers=workers,
        global_batch=batch,
        cursor=Cursor.parse(resume, how.digest),
    )
    mixed = mixing(one)
    if as_json:
        print_json({**asdict(told), "mixing": {**mixed._asdict(), "poor": mixed.poor}})
    else:
        _show_forecast(told)
    for text in told.remarks:
        remark(f"note: {text}")
    if mixed.poor:
        remark(
            f"warning: shards look sorted by class: about {mixed.seen:.0f} classes in each, where a mixed one would "
            f"have {mixed.expected:.0f}; convert them anew, which shuffles: stoker data convert {url} NEW"
        )


@app.command()
def peek(
    url: Url,
    number: Annotated[int, typer.Option("--n", metavar="N", help="How many samples.")] = 16,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a contact sheet of what the model will see.")
    ] = None,
    transform: Transform = "imagenet-train",
    size: Size = 224,
    antialias: Antialias = True,
    seed: Annotated[int, typer.Option(help="Of the augmentation.")] = 0,
    as_json: Json = False,
) -> None:
    """Show keys, labels and sizes, and a contact sheet of what the model will see, augmentation included."""
    from stoker.core.units import format_bytes
    from stoker.errors import InputError
    from stoker.load.loader import find_one
    from stoker.load.peek import peek as peek_at
    from stoker.shards.contact_sheet import contact_sheet
    from stoker.storage.local import LocalStore

    _check_transform(transform, size)
    if number < 1:
        raise InputError(f"--n is {number}, and must be 1 or more")
    if png is not None and (png.suffix.lower() != ".png" or png.is_dir()):
        raise InputError("--png must name a file that ends in .png", where=png)
    found = list(peek_at(find_one(url), number, transform=transform, size=size, antialias=antialias, seed=seed))
    if as_json:
        print_json([{name: value for name, value in one._asdict().items() if name != "pixels"} for one in found])
    else:
        print_table(
            ("key", "label", "class", "kind", "width", "height", "bytes", "fault"),
            [
                (one.key, one.label, one.name, one.kind, one.width, one.height, format_bytes(one.bytes), one.fault)
                for one in found
            ],
        )
    if png is not None:
        tiles = [(one.pixels, _caption(one)) for one in found if one.pixels is not None]
        if not tiles:
            raise InputError("no image could be decoded", where=url, hint="see: stoker data verify --deep")
        LocalStore(str(png.parent)).put(png.name, contact_sheet(tiles))
        bad = len(found) - len(tiles)
        remark(f"{png}: {counted(len(tiles), 'image')} as {transform} shows them" + (f", {bad} bad" if bad else ""))


@app.command()
def bench(
    url: Url,
    batch: Annotated[int, typer.Option(metavar="N", help="Images of a batch.")] = 64,
    transform: Transform = "imagenet-train",
    size: Size = 224,
    antialias: Antialias = True,
    decoder: Annotated[
        str,
        typer.Option(metavar="NAME", help="native, python, or auto: native where installed, on processors with AVX2."),
    ] = "auto",
    threads: Annotated[str, typer.Option(metavar="N", help="Decoding threads; `auto` is one per core.")] = "auto",
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where remote shards are kept; a temporary folder by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to measure.")] = 12.0,
    as_json: Json = False,
) -> None:
    """Measure the loader: images per second, by stage, and beside the limit of the decoder itself."""
    from stoker.errors import InputError
    from stoker.load.bench import measure
    from stoker.load.loader import find_one
    from stoker.load.native import DECODERS

    _check_transform(transform, size)
    if decoder not in DECODERS:
        raise InputError(f"--decoder is {decoder!r}, and must be one of {', '.join(DECODERS)}")
    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds is {seconds:g}, and must be from above 0 to 3600")
    one = _described(find_one(url))
    with counter("images") as advance:
        found = measure(
            one,
            global_batch=batch,
            transform=transform,
            size=size,
            antialias=antialias,
            decoder=decoder,
            threads=_threads(threads, "--threads"),
            cache=cache,
            seconds=seconds,
            progress=advance,
        )
    _show_measured(found, as_json)


for command in (data_serve.serve, data_serve.cache, data_serve.warm, data_serve.loadtest):
    app.command()(command)


def _threads(jobs: str, option: str = "--jobs") -> int:
    """Read a number of threads."""
    from stoker.errors import InputError

    if jobs == "auto":
        return len(os.sched_getaffinity(0))
    if not jobs.isdecimal() or not 1 <= int(jobs) <= 1024:
        raise InputError(f"{option} is {jobs!r}, and must be `auto` or a number from 1 to 1024")
    return int(jobs)


def _check_transform(transform: str, size: int) -> None:
    """Refuse a transform that there is none of."""
    from stoker.errors import InputError
    from stoker.load.transforms import MAX_SIZE, TRANSFORMS

    if transform not in TRANSFORMS:
        raise InputError(f"--transform is {transform!r}, and must be one of {', '.join(TRANSFORMS)}")
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"--size is {size}, and must be from 1 to {MAX_SIZE}")


def _described(one: ShardSet) -> ShardSet:
    """Scan a set that was made elsewhere, with a bar."""
    from stoker.shards.scan import described

    if one.manifest is not None:
        return one
    with byte_bar("scanning", sum(entry.size for entry in one.shards)) as advance:
        return described(one, jobs=_threads("auto"), progress=advance)


def _caption(one: Peeked) -> str:
    """Say below a picture what it is; a key often starts with the name of its class."""
    name = one.name or str(one.label)
    return one.key if one.key.startswith(f"{name}/") else f"{name} · {one.key}"


def _show_forecast(told: Forecast) -> None:
    """Print what a world would read, rank by rank."""
    from stoker.core.units import format_bytes

    print_table(
        ("rank", "node", "batches", "last batch", "samples", "bytes", "shards", "bytes of shards"),
        [
            (r.rank, r.node, r.batches, r.tail, r.samples, format_bytes(r.bytes), r.shards, format_bytes(r.shard_bytes))
            for r in told.ranks
        ],
    )
    typer.echo()
    print_table(
        ("sampling", told.sampling),
        [
            ("means", told.meaning),
            ("epoch", f"{told.epoch}, {told.consumed:,} samples consumed, {told.samples:,} left"),
            ("steps", f"{told.batches:,}, the last with {told.tail:,} samples"),
            ("read again", f"{told.duplicates:,} samples"),
            ("not read", f"{told.unread:,} samples"),
            ("a node holds", f"{counted(told.held_shards, 'shard')}, about {format_bytes(told.held_bytes)}, at once"),
            ("plan", told.plan),
        ],
    )


def _show_measured(found: Measured, as_json: bool) -> None:
    """Print how fast the loader is, and what holds it back."""
    from stoker.core.units import format_bytes

    if as_json:
        print_json({**asdict(found), "verdict": found.verdict})
        return
    print_table(
        ("images/s", "bytes/s", "decoder", "alone", "share", "threads", "cores at work", *found.stages),
        [
            (
                round(found.images_per_s),
                f"{format_bytes(int(found.bytes_per_s))}/s",
                found.decoder,
                round(found.limit_images_per_s),
                f"{found.share_of_limit:.0%}",
                found.threads,
                f"{found.cpu:.1f}",
                *(f"{share:.0%}" for share in found.stages.values()),
            )
        ],
    )
    remark(found.verdict)
    if found.decoder == "native" and found.natively < 0.99:
        remark(
            f"{1 - found.natively:.0%} of the images are decoded by simplejpeg, OpenCV or Pillow: the native decoder "
            "leaves them what is not a plain, upright JPEG"
        )
    if found.bad:
        remark(f"{counted(found.bad, 'bad sample')} left out: see stoker data verify --deep")


def _show_plan(conversion: Conversion, as_json: bool) -> None:
    """Print what would be written."""
    from stoker.core.units import format_bytes
    from stoker.shards.formats import FORMATS
    from stoker.shards.pack import list_shards

    plan = conversion.plan
    names = [(task.split.split, task.path) for task in list_shards(plan, FORMATS.get(plan.options.format))]
    if as_json:
        print_json({"digest": plan.digest, "plan": plan, "shards": [path for _, path in names]})
        return
    print_table(
        ("split", "samples", "classes", "shards", "bytes (about)", "lanes", "first shard"),
        [
            (
                split.split,
                split.samples,
                len(plan.classes),
                split.shards,
                format_bytes(split.bytes),
                split.lanes,
                next(path for name, path in names if name == split.split),
            )
            for split in plan.splits
        ],
    )


def _carry_out(conversion: Conversion, dest: str, threads: int, restart: bool, as_json: bool) -> None:
    """Convert, then print what was written and how fast."""
    from stoker.core.units import format_bytes
    from stoker.errors import StoppedError

    started = time.monotonic()
    try:
        with byte_bar("converting", conversion.plan.bytes) as advance:
            manifests, written = conversion.run(
                dest, jobs=threads, restart=restart, progress=lambda step: advance(step.bytes)
            )
    except KeyboardInterrupt as error:
        hint = "run the same command again to go on: finished shards are kept"
        raise StoppedError("interrupted", where=dest, hint=hint) from error
    seconds = time.monotonic() - started
    if as_json:
        fields = ("split", "format", "samples", "bytes", "quarantined", "classes", "lanes", "window")
        rows = [{name: getattr(manifest, name) for name in fields} for manifest in manifests]
        print_json([row | {"shards": len(m.shards)} for row, m in zip(rows, manifests, strict=True)])
        return
    print_table(
        ("split", "samples", "classes", "shards", "bytes", "bad", "where"),
        [
            (
                manifest.split,
                manifest.samples,
                len(manifest.classes),
                len(manifest.shards),
                format_bytes(manifest.bytes),
                manifest.quarantined,
                f"{dest.rstrip('/')}/{manifest.split}",
            )
            for manifest in manifests
        ],
    )
    for manifest in manifests:
        if manifest.quarantined:
            where = f"{dest.rstrip('/')}/{manifest.split}/quarantine.jsonl"
            remark(f"left out {counted(manifest.quarantined, 'bad image')}: see {where}")
    if not written:
        remark("already complete: nothing was written")
        return
    total = sum(manifest.bytes for manifest in manifests)
    remark(f"done in {seconds:.1f} s, {format_bytes(int(total / max(seconds, 1e-9)))}/s")


def _show_reports(reports: list[Report], as_json: bool) -> None:
    """Print what was looked at, and every fault."""
    from stoker.core.units import format_bytes

    if as_json:
        print_json(reports)
        return
    print_table(
        ("split", "shards", "samples", "bytes", "faults", "where"),
        [(r.split, r.shards, r.samples, format_bytes(r.bytes), len(r.findings), r.url) for r in reports],
    )
    findings = [finding for report in reports for finding in report.findings]
    if findings:
        print_table(
            ("shard", "at byte", "key", "fault"),
            [(f.shard, f.offset, f.key, f.what) for f in findings],
        )

"""`stoker data`: convert, summarize and verify shard sets; registers the other data commands."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli import data_cache, data_load, data_serve
from stoker.cli.options import Jobs, Json, parse_threads, parse_value
from stoker.cli.output import print_json, print_message, print_table, show_byte_progress, show_counter
from stoker.core.units import pluralize

if TYPE_CHECKING:
    from stoker.shards.convert import Conversion
    from stoker.shards.plan import ConversionPlan
    from stoker.shards.verify import VerifyReport

INTERRUPTED_HINT = "run the same command again to resume; finished shards are kept"

app = typer.Typer(help="Convert, inspect, serve, cache and benchmark shard sets.", no_args_is_help=True)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Dataset: a directory, a file or a URL.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="New local directory, or an s3:// or gs:// URL.")],
    kind: Annotated[
        str,
        typer.Option(
            "--source",
            metavar="KIND",
            help="Dataset format: auto, folder, folder-tar, imagenet, cifar10, mnist, shards or synthetic.",
        ),
    ] = "auto",
    shard_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="Shard format: tar or tfrecord.")
    ] = "tar",
    prefix: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Prefix of shard names. For tar shards, defaults to the dataset name."),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Approximate shard size. Defaults to 256MiB, or to a smaller size that yields at least 32 shards.",
        ),
    ] = None,
    shard_samples: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of samples per shard, instead of a size.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Shuffle seed. The same seed produces the same bytes.")] = 0,
    jobs: Jobs = "auto",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Convert at most N samples from each split, drawn at random.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(metavar="F", help="Move this fraction of each class from train to a val split.")
    ] = None,
    max_side: Annotated[
        int | None,
        typer.Option(metavar="PX", help="Downscale images whose longer side exceeds PX, and re-encode them as JPEG."),
    ] = None,
    quality: Annotated[
        int | None, typer.Option(metavar="Q", help="JPEG quality of re-encoded images. Defaults to 90.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for temporary files. Defaults to the system's temporary directory."
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an unfinished conversion at DEST.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept a --shard-size of less than 1 MiB.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without writing anything.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a dataset to shards.

    Images are copied byte for byte, in an order shuffled with --seed. To resume an interrupted conversion, run
    the same command again. Bad images are skipped and listed in quarantine.jsonl.
    """
    from msgspec import UNSET

    from stoker.core.scratch import scratch_directory
    from stoker.errors import InputError
    from stoker.shards.convert import check_outside_source, prepare_conversion
    from stoker.shards.destination import check_destination
    from stoker.shards.options import MIN_SHARDS, ConversionOptions
    from stoker.storage import open_writable

    if shard_size is not None and shard_samples is not None:
        raise InputError("--shard-size and --shard-samples are mutually exclusive", hint="pass only one of them")
    if quality is not None and max_side is None:
        raise InputError("--quality requires --max-side", hint="pass both or neither")
    if scratch is not None and not scratch.is_dir():
        raise InputError("no such directory", where=f"--scratch {scratch}", hint="create the directory first")
    options = ConversionOptions(
        format=shard_format,
        prefix=prefix,
        shard_bytes=_parse_shard_size(shard_size or "256MiB", force),
        shard_samples=shard_samples,
        min_shards=MIN_SHARDS if shard_size is None and shard_samples is None else UNSET,
        seed=seed,
        limit=limit,
        max_side=max_side,
        quality=quality or 90,
        val_fraction=UNSET if val_fraction is None else val_fraction,
    )
    threads = parse_threads(jobs)
    check_outside_source(source, dest)
    check_destination(open_writable(dest))
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_directory(scratch))
        with show_counter("scanning") as advance:
            ready = prepare_conversion(source, options, scratch=folder, kind=kind, progress=advance)
            conversion = stack.enter_context(ready)
        for note in conversion.source.notes:
            print_message(note)
        if dry_run:
            _print_plan(conversion.plan if restart else conversion.check(dest), as_json)
        else:
            _run_conversion(conversion, dest, threads, restart, as_json)


@app.command()
def summary(
    url: Annotated[
        str,
        typer.Argument(metavar="URL|-", help="Shard set, brace pattern, or - to read a listing from standard input."),
    ],
    as_json: Json = False,
) -> None:
    """Show shard patterns, counts, sizes, classes and missing shards."""
    from stoker.core.units import format_bytes
    from stoker.shards.shard_set import find_shard_sets
    from stoker.shards.summary import summarize_listing, summarize_shard_set

    rows = (
        summarize_listing(sys.stdin)
        if url == "-"
        else [row for shard_set in find_shard_sets(url, allow_missing=True) for row in summarize_shard_set(shard_set)]
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
            print_message(f"missing in {row.pattern}: {', '.join(row.missing[:5])}{more}")
        if row.quarantined:
            bad = pluralize(row.quarantined, "bad image")
            print_message(f"{bad} of split {row.split!r} skipped: see its quarantine.jsonl")


@app.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="Shard set, or directory of shard sets.")],
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image, not only its header.")] = False,
    jobs: Jobs = "auto",
    as_json: Json = False,
) -> None:
    """Verify digests, counts, members, headers, keys and labels."""
    from stoker.errors import VerificationError
    from stoker.load.decode import DecodeCheck
    from stoker.shards.shard_set import find_shard_sets
    from stoker.shards.verify import verify as verify_set

    sets = find_shard_sets(url)
    threads, check_image = parse_threads(jobs), DecodeCheck() if deep else None
    with show_byte_progress("verifying", sum(entry.size for each in sets for entry in each.shards)) as advance:
        reports = [verify_set(each, check_image=check_image, jobs=threads, progress=advance) for each in sets]
    _print_reports(reports, as_json)
    if faults := sum(len(report.findings) for report in reports):
        raise VerificationError(f"{pluralize(faults, 'problem')} found", where=url)


for module in (data_load, data_serve, data_cache):
    module.add_to(app)


def _parse_shard_size(text: str, force: bool) -> int:
    """Parse --shard-size; raise InputError for less than 1 MiB without --force: the unit was probably forgotten."""
    from stoker.core.units import MIN_SIZE_BYTES, format_bytes, parse_bytes
    from stoker.errors import InputError

    size = parse_value("--shard-size", parse_bytes, text)
    if size < MIN_SIZE_BYTES and not force:
        add_unit = "add a unit, for example" if text.strip().isdecimal() else "use, for example,"
        raise InputError(
            f"--shard-size must be >= 1 MiB, got {format_bytes(size)}",
            hint=f"{add_unit} --shard-size 64MiB, or pass --force",
        )
    return size


def _print_plan(plan: ConversionPlan, as_json: bool) -> None:
    """Print the shards that would be written."""
    from stoker.core.units import format_bytes
    from stoker.shards.formats import FORMATS
    from stoker.shards.pack import list_tasks

    names = [(task.split.split, task.path) for task in list_tasks(plan, FORMATS.get(plan.options.format))]
    if as_json:
        print_json({"digest": plan.digest, "plan": plan, "shards": [path for _, path in names]})
        return
    print_table(
        ("split", "samples", "classes", "shards", "approx. bytes", "lanes", "first shard"),
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
    for split in plan.splits:
        _warn_of_few_shards(split.split, split.shards, split.samples)


def _warn_of_few_shards(split: str, shards: int, samples: int) -> None:
    """Warn if the training split has too few shards for each of several ranks to read its own."""
    from stoker.shards.options import MIN_SHARD_SAMPLES, MIN_SHARDS

    if split == "train" and shards < MIN_SHARDS:
        fitting = samples // MIN_SHARDS
        more = f"; for more shards, pass --shard-samples {fitting}" if fitting >= MIN_SHARD_SAMPLES else ""
        print_message(
            f"warning: split 'train' has {pluralize(shards, 'shard')}: with fewer than {MIN_SHARDS}, ranks on "
            f"different nodes read the same shards{more}"
        )


def _run_conversion(conversion: Conversion, dest: str, threads: int, restart: bool, as_json: bool) -> None:
    """Run a conversion, then print what was written and how fast."""
    from stoker.core.units import format_bytes
    from stoker.errors import InterruptError

    started_at = time.monotonic()
    try:
        with show_byte_progress("converting", conversion.plan.bytes) as advance:
            manifests, written = conversion.run(
                dest, jobs=threads, restart=restart, progress=lambda step: advance(step.bytes)
            )
    except KeyboardInterrupt as error:
        raise InterruptError("interrupted", where=dest, hint=INTERRUPTED_HINT) from error
    seconds = time.monotonic() - started_at
    if as_json:
        fields = ("split", "format", "samples", "bytes", "quarantined", "classes", "lanes", "window")
        rows = [{name: getattr(manifest, name) for name in fields} for manifest in manifests]
        print_json([row | {"shards": len(m.shards)} for row, m in zip(rows, manifests, strict=True)])
        return
    print_table(
        ("split", "samples", "classes", "shards", "bytes", "bad", "path"),
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
            print_message(f"skipped {pluralize(manifest.quarantined, 'bad image')}: see {where}")
        _warn_of_few_shards(manifest.split, len(manifest.shards), manifest.samples)
    if not written:
        print_message("already complete; nothing was written")
        return
    total = sum(manifest.bytes for manifest in manifests)
    print_message(f"done in {seconds:.1f} s, {format_bytes(int(total / max(seconds, 1e-9)))}/s")


def _print_reports(reports: list[VerifyReport], as_json: bool) -> None:
    """Print what was verified, and every fault."""
    from stoker.core.units import format_bytes

    if as_json:
        print_json(reports)
        return
    print_table(
        ("split", "shards", "samples", "bytes", "problems", "path"),
        [(r.split, r.shards, r.samples, format_bytes(r.bytes), len(r.findings), r.url) for r in reports],
    )
    findings = [finding for report in reports for finding in report.findings]
    if findings:
        print_table(
            ("shard", "offset", "key", "problem"),
            [(f.shard, f.offset, f.key, f.what) for f in findings],
        )

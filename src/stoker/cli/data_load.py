"""`stoker data plan`, `peek` and `bench`: what ranks read, what models see, how fast the loader is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import Json, Url, is_given, name_options, parse_threads
from stoker.cli.output import print_json, print_message, print_table, show_byte_progress, show_counter
from stoker.core.units import pluralize

if TYPE_CHECKING:
    from stoker.load.bench import LoaderBenchmark
    from stoker.load.peek import PeekedSample
    from stoker.sampling.forecast import Forecast
    from stoker.shards.shard_set import ShardSet
    from stoker.shards.shuffle_check import ShuffleQuality

Transform = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Transform: imagenet-train, imagenet-val, small-train, digits-train or whole. Defaults to that of the "
        "trainer for this size.",
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        metavar="PX",
        help="Width and height of the model input, in pixels. Defaults to what `stoker init` suggests for the images.",
    ),
]
Antialias = Annotated[bool, typer.Option(help="Antialias when downscaling images; slightly slower.")]

PLAN_OPTIONS = {
    "world": "--world-size",
    "nodes": "--nodes",
    "workers": "--workers",
    "global_batch": "--global-batch-size",
    "sampling": "--sampling",
    "epoch_samples": "--epoch-samples",
    "seed": "--seed",
}
"""Options of `stoker data plan`, by the settings of the sampling plan that they set."""


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker data`."""
    for command in (plan, peek, bench):
        app.command()(command)


def plan(
    ctx: typer.Context,
    url: Url,
    world_size: Annotated[int, typer.Option(metavar="N", help="Number of ranks.")] = 1,
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of nodes that the ranks run on.")] = 1,
    workers: Annotated[int, typer.Option(metavar="N", help="DataLoader workers per rank; 0 for none.")] = 0,
    global_batch_size: Annotated[int, typer.Option(metavar="N", help="Samples per step across all ranks.")] = 256,
    sampling: Annotated[str, typer.Option(metavar="MODE", help="Sampling mode: exact, join or resampled.")] = "exact",
    epoch_samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples per epoch with `resampled`. Defaults to the size of the dataset."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for the sample order.")] = 0,
    resume: Annotated[str, typer.Option(metavar="EPOCH:CONSUMED", help="Cursor to resume from.")] = "0:0",
    as_json: Json = False,
) -> None:
    """Show what each rank reads in an epoch, and how the epoch ends.

    Also shows how much shard data each node has open at a time. Rejects settings that would cause a rank to hang or
    receive no data.
    """
    import numpy as np

    from stoker.load.planning import find_shard_set, plan_sampling
    from stoker.sampling.cursor import Cursor
    from stoker.sampling.forecast import forecast
    from stoker.shards.shuffle_check import measure_shuffle

    shard_set = _with_manifest(find_shard_set(url))
    defaults = [] if is_given(ctx, "global_batch_size") else ["global_batch"]
    with name_options(PLAN_OPTIONS, defaults):
        sampling_plan = plan_sampling(shard_set, sampling=sampling, seed=seed, epoch_samples=epoch_samples)
        report = forecast(
            sampling_plan,
            shard_bytes=np.array([entry.size for entry in shard_set.shards], dtype=np.int64),
            world=world_size,
            nodes=nodes,
            workers=workers,
            global_batch=global_batch_size,
            cursor=Cursor.parse(resume, sampling_plan.digest),
        )
    shuffle = measure_shuffle(shard_set)
    if as_json:
        print_json({**asdict(report), "mixing": _describe_shuffle(shuffle)})
    else:
        _print_forecast(report)
    for text in report.remarks:
        print_message(f"note: {text}")
    if shuffle.is_poor:
        print_message(
            f"warning: shards seem sorted by class: about {shuffle.classes_per_shard:.0f} classes per shard, "
            f"{shuffle.expected_classes:.0f} expected; shuffle the set with: stoker data convert {url} NEW"
        )


def peek(
    url: Url,
    count: Annotated[int, typer.Option("--count", metavar="N", help="Number of samples.")] = 16,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a contact sheet of the model's inputs to this PNG file.")
    ] = None,
    transform: Transform = None,
    size: Size = None,
    antialias: Antialias = True,
    seed: Annotated[int, typer.Option(metavar="N", help="Augmentation seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Show samples and, with --png, a contact sheet of model inputs."""
    from stoker.core.units import format_bytes
    from stoker.errors import InputError, NotFoundError
    from stoker.load.peek import peek as peek_at
    from stoker.load.planning import find_shard_set
    from stoker.shards.contact_sheet import contact_sheet
    from stoker.storage.local import LocalStore

    _check_transform(transform, size)
    if count < 1:
        raise InputError(f"--count must be >= 1, got {count}")
    if png is not None and (png.suffix.lower() != ".png" or png.is_dir()):
        raise InputError("--png must be a file name that ends in .png", where=png)
    if png is not None and not png.parent.is_dir():
        raise NotFoundError("no such directory", where=png.parent, hint="create it, or pass another --png")
    shard_set = find_shard_set(url)
    transform, size = _choose_input(shard_set, transform, size)
    samples = list(peek_at(shard_set, count, transform=transform, size=size, antialias=antialias, seed=seed))
    if as_json:
        print_json([{name: value for name, value in each._asdict().items() if name != "pixels"} for each in samples])
    else:
        print_table(
            ("key", "label", "class", "kind", "width", "height", "bytes", "problem"),
            [(s.key, s.label, s.name, s.kind, s.width, s.height, format_bytes(s.bytes), s.fault) for s in samples],
        )
    if png is not None:
        tiles = [(each.pixels, _caption(each)) for each in samples if each.pixels is not None]
        if not tiles:
            raise InputError(
                "no image could be decoded", where=url, hint="check the shard set with: stoker data verify --deep"
            )
        LocalStore(str(png.parent)).put(png.name, contact_sheet(tiles))
        bad = len(samples) - len(tiles)
        skipped = f", {bad} bad" if bad else ""
        print_message(
            f"Wrote a contact sheet of {pluralize(len(tiles), 'image')} ({transform}, {size} px) to {png}{skipped}"
        )


def bench(
    url: Url,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images per batch.")] = 64,
    transform: Transform = None,
    size: Size = None,
    antialias: Antialias = True,
    decoder: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Decoder: native, python, or auto (native if it is installed and the CPU supports AVX2).",
        ),
    ] = "auto",
    threads: Annotated[str, typer.Option(metavar="N", help="Decoding threads; `auto` uses one per core.")] = "auto",
    cache: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Cache directory for remote shards. Defaults to a temporary directory."),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Duration of the measurement.")] = 12.0,
    as_json: Json = False,
) -> None:
    """Measure the loader stage by stage.

    Compares its throughput with that of the decoder alone.
    """
    from stoker.errors import InputError
    from stoker.load.bench import run_benchmark
    from stoker.load.native import DECODERS
    from stoker.load.planning import find_shard_set

    _check_transform(transform, size)
    if decoder not in DECODERS:
        raise InputError(f"--decoder must be one of {', '.join(DECODERS)}, got {decoder!r}")
    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds must be > 0 and <= 3600, got {seconds:g}")
    shard_set = _with_manifest(find_shard_set(url))
    transform, size = _choose_input(shard_set, transform, size)
    with show_counter("images") as advance, name_options({"global_batch": "--batch-size"}):
        result = run_benchmark(
            shard_set,
            global_batch=batch_size,
            transform=transform,
            size=size,
            antialias=antialias,
            decoder=decoder,
            threads=parse_threads(threads, "--threads"),
            cache=cache,
            seconds=seconds,
            progress=advance,
        )
    _print_benchmark(result, as_json)


def _choose_input(shard_set: ShardSet, transform: str | None, size: int | None) -> tuple[str, int]:
    """Return the transform and the input size; by default those with which the trainer would train on these images."""
    from stoker.shards.image_sizes import measure_image_size
    from stoker.trainers.flags import default_transform
    from stoker.trainers.suggest import IMAGENET_SIZE, suggest_size

    if size is None:
        measured = None if shard_set.manifest is None else measure_image_size(shard_set)
        size = IMAGENET_SIZE if measured is None else suggest_size(*measured)
    return transform or default_transform(size), size


def _check_transform(transform: str | None, size: int | None) -> None:
    """Raise InputError for an unknown transform or an impossible size."""
    from stoker.errors import InputError
    from stoker.load.transforms import MAX_SIZE, TRANSFORMS

    if transform is not None and transform not in TRANSFORMS:
        raise InputError(f"--transform must be one of {', '.join(TRANSFORMS)}, got {transform!r}")
    if size is not None and not 1 <= size <= MAX_SIZE:
        raise InputError(f"--size must be between 1 and {MAX_SIZE}, got {size}")


def _with_manifest(shard_set: ShardSet) -> ShardSet:
    """Return the set with a manifest; scan it, with a progress bar, if it has none."""
    from stoker.shards.scan import ensure_manifest

    if shard_set.manifest is not None:
        return shard_set
    with show_byte_progress("scanning", sum(entry.size for entry in shard_set.shards)) as advance:
        return ensure_manifest(shard_set, jobs=parse_threads("auto"), progress=advance)


def _caption(sample: PeekedSample) -> str:
    """Return the caption of a tile; a key often starts with the name of its class."""
    name = sample.name or str(sample.label)
    return sample.key if sample.key.startswith(f"{name}/") else f"{name} · {sample.key}"


def _describe_shuffle(shuffle: ShuffleQuality) -> dict[str, object]:
    """Return the measured shuffle for `--json`."""
    return {"seen": shuffle.classes_per_shard, "expected": shuffle.expected_classes, "poor": shuffle.is_poor}


def _print_forecast(report: Forecast) -> None:
    """Print what each rank reads, and the epoch as a whole."""
    from stoker.core.units import format_bytes

    print_table(
        ("rank", "node", "batches", "last batch", "samples", "bytes", "shards", "shard bytes"),
        [
            (r.rank, r.node, r.batches, r.tail, r.samples, format_bytes(r.bytes), r.shards, format_bytes(r.shard_bytes))
            for r in report.ranks
        ],
    )
    typer.echo()
    print_table(
        ("sampling", report.sampling),
        [
            ("meaning", report.meaning),
            ("epoch", f"{report.epoch}, {report.consumed:,} samples consumed, {report.samples:,} left"),
            ("steps", f"{report.batches:,} ({pluralize(report.tail, 'sample')} in the last step)"),
            ("repeated", f"{report.duplicates:,} samples"),
            ("skipped", f"{report.unread:,} samples"),
            (
                "open shards per node",
                f"{pluralize(report.held_shards, 'shard')} at a time (about {format_bytes(report.held_bytes)})",
            ),
            ("plan", report.plan),
        ],
    )


def _print_benchmark(result: LoaderBenchmark, as_json: bool) -> None:
    """Print the throughput of the loader and what limits it."""
    from stoker.core.units import format_bytes

    if as_json:
        print_json({**asdict(result), "share_of_limit": result.share_of_limit, "verdict": result.summary})
        return
    print_table(
        ("images/s", "bytes/s", "decoder", "decoder alone", "share", "threads", "busy cores", *result.stages),
        [
            (
                f"{result.images_per_s:,.1f}",
                f"{format_bytes(int(result.bytes_per_s))}/s",
                result.decoder,
                f"{result.limit_images_per_s:,.1f}",
                f"{result.share_of_limit:.0%}",
                result.threads,
                f"{result.cpu:.1f}",
                *(f"{share:.0%}" for share in result.stages.values()),
            )
        ],
    )
    print_message(result.summary)
    if result.decoder == "native" and result.native_share < 0.99:
        print_message(
            f"{1 - result.native_share:.0%} of the images were decoded by simplejpeg, OpenCV or Pillow: the native "
            "decoder handles only baseline JPEGs without EXIF rotation"
        )
    if result.bad:
        print_message(
            f"{pluralize(result.bad, 'bad sample')} skipped; to check the shard set, run: stoker data verify --deep URL"
        )

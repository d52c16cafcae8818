"""Benchmark `stoker data convert` against ShardWriter of webdataset and plain tar."""

from __future__ import annotations

import shutil
import sys

import peer_shardwriter
import time_convert
from measure import (
    STOKER,
    BenchContext,
    BenchResult,
    Comparison,
    Implementation,
    Limit,
    Timing,
    run_rounds,
    time_command,
    time_script,
)

COMMAND = "stoker data convert"
TFRECORD = "stoker data convert --format tfrecord"
CALL = "stoker, library call"
SCRIPT = "webdataset ShardWriter script"
WRITER = "webdataset ShardWriter, library call"
SHA256SUM = "tar -cf && sha256sum"
OPENSSL = "tar -cf && openssl sha256"


def run(context: BenchContext) -> BenchResult:
    out = context.work / "converted"

    def clean() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def convert(shard_format: str) -> Timing:
        size = str(peer_shardwriter.SHARD_BYTES)
        return time_command(
            STOKER, "data", "convert", "--format", shard_format, "--shard-size", size, context.images, out
        )

    def tar(digest: str) -> Timing:
        out.mkdir()
        script = f'tar -cf "$1" -C "$0" . && {digest} "$1"'
        return time_command("sh", "-c", script, context.images, out / "all.tar")

    implementations = [
        Implementation(name=COMMAND, run=lambda: convert("tar"), cleanup=clean, ours=True),
        Implementation(
            name=SCRIPT,
            run=lambda: time_command(sys.executable, peer_shardwriter.__file__, context.images, out),
            cleanup=clean,
        ),
        Implementation(name=SHA256SUM, run=lambda: tar("sha256sum"), cleanup=clean),
        Implementation(
            name=CALL, run=lambda: time_script(time_convert.__file__, context.images, out), cleanup=clean, ours=True
        ),
        Implementation(
            name=WRITER,
            run=lambda: time_script(peer_shardwriter.__file__, context.images, out),
            cleanup=clean,
        ),
        Implementation(name=TFRECORD, run=lambda: convert("tfrecord"), cleanup=clean, ours=True, informational=True),
    ]
    comparisons = [
        Comparison(ours=CALL, peer=WRITER, target=2.0, note="library calls: scan, shuffle, shards"),
        Comparison(ours=COMMAND, peer=SHA256SUM, target=0.8, note="whole processes"),
        Comparison(ours=COMMAND, peer=SCRIPT, target=2.0, note="whole processes, including startup"),
    ]
    if shutil.which("openssl"):
        implementations.insert(
            3, Implementation(name=OPENSSL, run=lambda: tar("openssl dgst -sha256"), cleanup=clean, informational=True)
        )
        comparisons.insert(2, Comparison(ours=COMMAND, peer=OPENSSL, note="faster sha256 than coreutils"))
    speeds, peaks = run_rounds(implementations, context.rounds, context.bytes / 1e6)
    return BenchResult(
        name="convert",
        title="Convert class folders to tar shards",
        unit="MB/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=comparisons,
        limits=[
            Limit(what=f"Peak memory of `{COMMAND}`", value=peaks[COMMAND] / 1e6, bound=400, unit="MB"),
        ],
        notes=[
            "MB of image bytes per second of wall time. Library calls run in a new process each and exclude its "
            "startup and imports, which matter here but not for a large dataset; whole processes include them.",
            f"stoker: {peer_shardwriter.SHARD_BYTES >> 20} MiB shards, sha256 of every shard, header check of every "
            "image, one thread per core, indexes and manifest. ShardWriter: shards of the same size, one thread, no "
            "digests, because it does not support them.",
            "ShardWriter runs with torch hidden, in its favor: webdataset imports torch if it is installed, which "
            "takes seconds and is not needed for writing.",
            "tar writes one archive in directory order, unshuffled; the digest is computed afterwards.",
        ],
    )

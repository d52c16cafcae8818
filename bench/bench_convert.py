"""Class folders into shards: `stoker data convert` beside webdataset's ShardWriter and plain tar."""

from __future__ import annotations

import shutil
import sys

import call_stoker
import peer_shardwriter
from measure import STOKER, Contestant, Lab, Limit, Ran, Result, Versus, call, command, take_turns

COMMAND = "stoker data convert"
TFRECORD = "stoker data convert --format tfrecord"
CALL = "stoker, the call alone"
SCRIPT = "webdataset ShardWriter script"
WRITER = "webdataset ShardWriter, the call alone"
SHA256SUM = "tar -cf && sha256sum"
OPENSSL = "tar -cf && openssl sha256"


def run(lab: Lab) -> Result:
    out = lab.work / "converted"

    def clean() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def convert(shard_format: str) -> Ran:
        size = str(peer_shardwriter.SHARD_BYTES)
        return command(STOKER, "data", "convert", "--format", shard_format, "--shard-size", size, lab.images, out)

    def tar(digest: str) -> Ran:
        out.mkdir()
        script = f'tar -cf "$1" -C "$0" . && {digest} "$1"'
        return command("sh", "-c", script, lab.images, out / "all.tar")

    contestants = [
        Contestant(name=COMMAND, act=lambda: convert("tar"), clean=clean, ours=True),
        Contestant(
            name=SCRIPT,
            act=lambda: command(sys.executable, peer_shardwriter.__file__, lab.images, out),
            clean=clean,
        ),
        Contestant(name=SHA256SUM, act=lambda: tar("sha256sum"), clean=clean),
        Contestant(name=CALL, act=lambda: call(call_stoker.__file__, lab.images, out), clean=clean, ours=True),
        Contestant(
            name=WRITER,
            act=lambda: call(peer_shardwriter.__file__, lab.images, out),
            clean=clean,
        ),
        Contestant(name=TFRECORD, act=lambda: convert("tfrecord"), clean=clean, ours=True, info=True),
    ]
    versus = [
        Versus(ours=CALL, peer=WRITER, target=2.0, note="library calls: scan, shuffle, shards"),
        Versus(ours=COMMAND, peer=SHA256SUM, target=0.8, note="whole processes"),
        Versus(ours=COMMAND, peer=SCRIPT, target=2.0, note="whole processes, start-up and all"),
    ]
    if shutil.which("openssl"):
        contestants.insert(3, Contestant(name=OPENSSL, act=lambda: tar("openssl dgst -sha256"), clean=clean, info=True))
        versus.insert(2, Versus(ours=COMMAND, peer=OPENSSL, note="a faster sha256 than coreutils'"))
    speeds, peaks = take_turns(contestants, lab.rounds, lab.bytes / 1e6)
    return Result(
        name="convert",
        title="Class folders into tar shards",
        unit="MB/s",
        contestants=contestants,
        speeds=speeds,
        versus=versus,
        limits=[
            Limit(what=f"Peak memory of `{COMMAND}`", value=peaks[COMMAND] / 1e6, bound=400, unit="MB"),
        ],
        notes=[
            "MB of image bytes by wall time. Library calls run in a fresh process each "
            "and leave out its start and imports, which weigh here and not on a dataset of some size; whole processes "
            "have them in.",
            f"stoker: {peer_shardwriter.SHARD_BYTES >> 20} MiB shards, sha256 of every shard, every image's header "
            "checked, one thread per core, indexes and manifest. ShardWriter: shards of the same size, one thread, no "
            "digests, for it offers none.",
            "ShardWriter runs with torch hidden, in its favour: where torch is installed webdataset "
            "imports it, which takes seconds and serves no writing.",
            "tar writes one archive in the order of the folders, unshuffled; its digest is taken afterwards.",
        ],
    )

"""The conversion as a library call in a process of its own; prints its seconds, imports left out."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import peer_shardwriter
from stoker.shards.convert import prepared
from stoker.shards.plan import Options


def convert(images: Path, dest: Path) -> None:
    options = Options(shard_bytes=peer_shardwriter.SHARD_BYTES)
    with (
        tempfile.TemporaryDirectory() as scratch,
        prepared(str(images), options, scratch=Path(scratch)) as conversion,
    ):
        conversion.run(str(dest), jobs=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    start = time.perf_counter()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    print(time.perf_counter() - start)

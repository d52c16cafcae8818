"""Time the conversion as a library call; prints its seconds without imports."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import peer_shardwriter
from stoker.shards.convert import prepare_conversion
from stoker.shards.options import ConversionOptions


def convert(images: Path, dest: Path) -> None:
    options = ConversionOptions(shard_bytes=peer_shardwriter.SHARD_BYTES)
    with (
        tempfile.TemporaryDirectory() as scratch,
        prepare_conversion(str(images), options, scratch=Path(scratch)) as conversion,
    ):
        conversion.run(str(dest), jobs=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    start = time.perf_counter()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    print(time.perf_counter() - start)

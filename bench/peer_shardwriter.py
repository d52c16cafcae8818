"""Time the conversion script that a user of webdataset would write; prints its seconds without imports."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

SHARD_BYTES = 64 << 20


def write(images: Path, dest: Path) -> None:
    import webdataset

    files = []
    for label, name in enumerate(sorted(entry.name for entry in os.scandir(images))):
        folder = images / name
        files += [(f"{folder}/{file}", f"{name}/{file}", label) for file in sorted(os.listdir(folder))]
    random.Random(0).shuffle(files)
    dest.mkdir(parents=True)
    with webdataset.ShardWriter(f"{dest}/train-%06d.tar", maxsize=SHARD_BYTES, verbose=0) as shards:
        for path, name, label in files:
            with open(path, "rb") as file:
                data = file.read()
            shards.write({"__key__": os.path.splitext(name)[0], "jpg": data, "cls": label})


if __name__ == "__main__":
    # webdataset imports torch if it is installed, which takes seconds and is not needed for writing.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import webdataset  # noqa: F401 (imported before the timed part)

    start = time.perf_counter()
    write(Path(sys.argv[1]), Path(sys.argv[2]))
    print(time.perf_counter() - start)

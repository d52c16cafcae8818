"""The whole road on this machine: a list of commands, shown and run one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One command of the demo, and why it is there."""

    why: str
    argv: tuple[str, ...]

    @property
    def line(self) -> str:
        """Write the command as a user would type it."""
        import shlex

        return shlex.join(("stoker", *self.argv))


def road(folder: Path) -> list[Step]:
    """List the steps of the demo, all of them below one folder."""
    tars, records = str(folder / "tar"), str(folder / "tfrecord")
    dataset = "synthetic:samples=4000,classes=10,size=320x240,val=500"
    return [
        Step("What would be written", ("data", "convert", dataset, tars, "--shard-size", "2MiB", "--dry-run")),
        Step("A dataset into tar shards", ("data", "convert", dataset, tars, "--shard-size", "2MiB")),
        Step("Every digest, member, key, label and pixel", ("data", "verify", tars, "--deep")),
        Step("What there is", ("data", "summary", tars)),
        Step(
            "The same samples as TFRecords",
            ("data", "convert", tars, records, "--format", "tfrecord", "--shard-size", "16MiB"),
        ),
        Step("Which hold as well", ("data", "verify", records)),
        Step("What there is now", ("data", "summary", records)),
        Step("What each of four ranks would read", ("data", "plan", f"{tars}/train", "--world", "4", "--batch", "128")),
        Step(
            "What the model will see",
            ("data", "peek", f"{tars}/train", "--n", "9", "--png", str(folder / "sheet.png")),
        ),
        Step("How fast it loads, beside its decoder", ("data", "bench", f"{tars}/train", "--seconds", "6")),
    ]

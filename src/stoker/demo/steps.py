"""What the demo does, as a value: the commands, the job file, and what to try next."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

EPOCHS = 8
BATCH = 64
CHECKPOINT_STEPS = 8
NAME = "demo"

_JOB = """\
name: {name}
topology: torchrun
processes_per_worker: 2                  # two ranks on this machine
program:
  module: stoker.trainers.torch_image
  args: [--model, small, --size, 32, --transform, {transform}, --epochs, {epochs}, --global-batch-size, {batch},
         --lr, 0.1, --schedule, cosine, --warmup-epochs, 1, --checkpoint-every-steps, {steps}, --log-every, 3s,
         --ledger, ledger]
data:
  train: {origin}/train
  val: {origin}/val
  via: {cache}                # read through the cache
checkpoint: {{dir: checkpoints}}
profile: {{every: 5}}
retries: 3                               # a killed rank costs one
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the demo, and why it is there."""

    why: str
    argv: tuple[str, ...]

    @property
    def line(self) -> str:
        """Write the command as a user would type it."""
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True)
class Road:
    """All of the demo, below one folder, which is where its commands are given."""

    dataset: str
    transform: str
    serve_port: int
    cache_port: int

    @property
    def origin(self) -> str:
        """Where the data server answers."""
        return f"http://127.0.0.1:{self.serve_port}"

    @property
    def cache(self) -> str:
        """Where the cache answers."""
        return f"http://127.0.0.1:{self.cache_port}"

    @property
    def job(self) -> str:
        """The job file."""
        return _JOB.format(
            name=NAME,
            transform=self.transform,
            epochs=EPOCHS,
            batch=BATCH,
            steps=CHECKPOINT_STEPS,
            origin=self.origin,
            cache=self.cache,
        )

    def before(self) -> list[Step]:
        """From a dataset to shards."""
        return [
            _stoker("The images become shards", "data", "convert", self.dataset, "shards", "--shard-samples", "40"),
            _stoker("Every digest, member, key, label and pixel", "data", "verify", "shards", "--deep"),
        ]

    def services(self) -> list[Step]:
        """What runs beside the training."""
        cached = ("--origin", self.origin, "--dir", "cache", "--size", "1GiB", "--port", str(self.cache_port))
        return [
            _stoker("A server for the shards", "data", "serve", "shards", "--port", str(self.serve_port)),
            _stoker("A cache in front of it", "data", "cache", *cached),
        ]

    def planning(self) -> list[Step]:
        """What will happen, before it does."""
        world = ("--world", "2", "--batch", str(BATCH))
        return [
            _stoker("What each of two ranks will read", "data", "plan", f"{self.origin}/train", *world),
            _stoker("What the job will start", "job", "plan", "job.yaml"),
        ]

    def training(self) -> list[Step]:
        """The training; it is followed to its end by the second command."""
        return [
            _stoker("It starts", "job", "run", "job.yaml", "--detach"),
            _stoker("and is followed", "job", "logs", "--follow", NAME),
        ]

    def after(self) -> list[Step]:
        """How it went."""
        ledger = ("python", "-m", "stoker.trainers.ledger", "ledger", "--data", f"{self.origin}/train")
        return [
            Step("Which samples the ranks trained on, the killed one's too", ledger),
            _stoker("How it went, and where the time was spent", "job", "status", NAME),
        ]

    def next(self, folder: Path) -> list[str]:
        """What to try from here."""
        programs = Path(sys.executable).parent
        return [
            *([f"export PATH={shlex.quote(str(programs))}:$PATH"] if shutil.which("stoker") is None else []),
            f"cd {shlex.quote(str(folder))}",
            f"stoker job eval {NAME} --set data.val=shards/val --set data.via=     # its best checkpoint, once more",
            f"stoker job report {NAME}     # all that is known of the run, in one archive",
            "stoker data convert YOUR-IMAGES own",
            "stoker init --train own/train --val own/val",
        ]


def _stoker(why: str, *words: str) -> Step:
    return Step(why, ("stoker", *words))

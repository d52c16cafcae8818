"""The demo as a value: its commands, its job file, and what to try next."""

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
retries: 3                               # a killed rank uses one
"""


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One command of the demo, with a title."""

    title: str
    argv: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command as a user would type it."""
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True)
class Demo:
    """All steps of the demo; its commands run in one directory."""

    dataset: str
    transform: str
    serve_port: int
    cache_port: int

    @property
    def origin(self) -> str:
        """URL of the data server."""
        return f"http://127.0.0.1:{self.serve_port}"

    @property
    def cache(self) -> str:
        """URL of the cache."""
        return f"http://127.0.0.1:{self.cache_port}"

    @property
    def job_file(self) -> str:
        """Text of the job file."""
        return _JOB.format(
            name=NAME,
            transform=self.transform,
            epochs=EPOCHS,
            batch=BATCH,
            steps=CHECKPOINT_STEPS,
            origin=self.origin,
            cache=self.cache,
        )

    def conversion_steps(self) -> list[DemoStep]:
        """Return the steps from a dataset to verified shards."""
        return [
            _stoker("Convert the images to shards", "data", "convert", self.dataset, "shards", "--shard-samples", "40"),
            _stoker("Verify every digest, member, key, label and pixel", "data", "verify", "shards", "--deep"),
        ]

    def services(self) -> list[DemoStep]:
        """Return the servers that run beside the training."""
        options = ("--origin", self.origin, "--dir", "cache", "--size", "1GiB", "--port", str(self.cache_port))
        return [
            _stoker("Serve the shards", "data", "serve", "shards", "--port", str(self.serve_port)),
            _stoker("Cache them", "data", "cache", *options),
        ]

    def planning_steps(self) -> list[DemoStep]:
        """Return the steps that show what will happen."""
        options = ("--world-size", "2", "--global-batch-size", str(BATCH))
        return [
            _stoker("Show what each of two ranks will read", "data", "plan", f"{self.origin}/train", *options),
            _stoker("Show what the job will start", "job", "plan", "job.yaml"),
        ]

    def training_steps(self) -> tuple[DemoStep, DemoStep]:
        """Return the command that starts the training, and the one that follows it to its end."""
        return (
            _stoker("Start the job", "job", "run", "job.yaml", "--detach"),
            _stoker("Follow its logs", "job", "logs", "--follow", NAME),
        )

    def report_steps(self) -> list[DemoStep]:
        """Return the steps that show the outcome."""
        ledger = ("python", "-m", "stoker.trainers.ledger", "ledger", "--data", f"{self.origin}/train")
        return [
            DemoStep("Check that every sample was trained on exactly once per epoch", ledger),
            _stoker("Show the outcome, and where the time went", "job", "status", NAME),
            _stoker("Write the run as a self-contained page", "dash", NAME, "--html", "run.html"),
        ]

    def next_commands(self, folder: Path) -> list[str]:
        """Return commands for the user to try next."""
        programs = Path(sys.executable).parent
        return [
            *([f"export PATH={shlex.quote(str(programs))}:$PATH"] if shutil.which("stoker") is None else []),
            f"cd {shlex.quote(str(folder))}",
            f"stoker dash {NAME} --open     # the run in the dashboard; also in run.html",
            f"stoker job eval {NAME} --set data.val=shards/val --set data.via=     # evaluate the best checkpoint",
            f"stoker job report {NAME}     # logs, plan and status of the run in one archive",
            "stoker data convert YOUR-IMAGES own",
            "stoker init own",
        ]


def _stoker(title: str, *arguments: str) -> DemoStep:
    return DemoStep(title, ("stoker", *arguments))

"""A small deterministic training for fault drills: its job file, an undisturbed reference, and its final state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.telemetry.reader import read_run
from stoker.testing import make_shards, run_job
from stoker.trainers.checkpoints import decode_checkpoint

SAMPLES, EPOCHS = 300, 4


def train_reference(folder: Path) -> Path:
    """Write shards to a folder and run an undisturbed training on this machine."""
    make_shards(folder / "shards", samples=SAMPLES, val=20, classes=5, size=(40, 32))
    run = run_job(write_training_job(folder, folder / "shards", {}), home=folder / "stoker")
    assert run.succeeded, run.message
    return folder


def write_training_job(folder: Path, shards: Path, ssh: dict[str, Any], **keys: Any) -> Path:
    """Write the job file of the training, with its ledger and checkpoints in a folder."""
    options = f"--model small --size 32 --global-batch-size 12 --epochs {EPOCHS} --deterministic --seed 3 --threads 1"
    options += f" --checkpoint-every-steps 2 --log-every 1s --ledger {folder / 'ledger'}"
    job = {
        "name": "drill",
        "workers": 2,
        "program": {"module": "stoker.trainers.torch_image", "args": options.split()},
        "data": {"train": str(shards / "train"), "val": str(shards / "val")},
        "checkpoint": {"dir": str(folder / "checkpoints")},
        "env": {"OMP_NUM_THREADS": "1"},
        "profile": {"every": 0},
        "retries": 4,
        "grace": 5,
        "ssh": ssh,
        **keys,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def final_state(folder: Path) -> dict[str, Any]:
    """The weights and momentum buffers in the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    checkpoint = decode_checkpoint(newest.read_bytes(), where=str(newest))
    momentum = {f"momentum {key}": state["momentum_buffer"] for key, state in checkpoint["optimizer"]["state"].items()}
    return {**checkpoint["model"], **momentum}


def has_reached_step(run: RunFolder, step: int) -> bool:
    return any(event.fields.get("step", 0) >= step for event in read_run(run.logs).events)

"""The progress of a training: what its checkpoints hold besides weights, whatever the framework."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod

from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan
from stoker.trainers.checkpoint_store import Checkpoint, CheckpointMeta
from stoker.trainers.flags import LR_PER_256

EXCLUDED_ARGS = (
    *("train", "val", "via", "cache_dir", "cache_size", "checkpoint_dir", "init_from", "ledger", "notes", "export"),
    *("tensorboard", "has_val_transform"),
)
"""Flags that a checkpoint does not hold: they do not describe the training, and a URL may contain a password."""


class ResumableState(ABC):
    """How far a training is, and the settings that it keeps when it resumes."""

    def __init__(
        self,
        args: argparse.Namespace,
        plan: SamplingPlan,
        *,
        global_batch: int,
        num_classes: int,
        classes: tuple[str, ...] = (),
        peak_lr: float | None = None,
    ) -> None:
        self.args, self.plan = args, plan
        self.classes = classes
        """The names of the classes, as far as the training set has them."""
        self.global_batch, self.num_classes = global_batch, num_classes
        self.peak_lr: float = LR_PER_256 * global_batch / 256 if peak_lr is None else peak_lr
        self.cursor = plan.start_cursor()
        self.step = 0
        self.best_top1 = -1.0
        self.validation_due = False
        """Whether the last epoch has not been validated yet."""
        self.metrics: dict[str, float] = {}
        """Results of the last validation."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """The number of trainable weights."""

    @abstractmethod
    def state_dict(self) -> Checkpoint:
        """Return the content of a checkpoint."""

    def meta(self) -> CheckpointMeta:
        """Return the part of a checkpoint that is neither weights nor optimizer state."""
        return {
            "cursor": self.cursor.state(),
            "step": self.step,
            "global_batch": self.global_batch,
            "lr": self.peak_lr,
            "best": self.best_top1,
            "owed": self.validation_due,
            "last": self.metrics,
            "model": self.args.model,
            "num_classes": self.num_classes,
            "classes": list(self.classes),
            "plan": self.plan.digest,
            "args": {name: value for name, value in vars(self.args).items() if name not in EXCLUDED_ARGS},
        }

    def load_meta(self, meta: CheckpointMeta) -> None:
        """Continue from the progress that a checkpoint holds."""
        self.cursor = self.plan.check_cursor(Cursor.from_state(meta["cursor"]))
        self.step = meta.get("step", 0)
        self.best_top1 = meta.get("best", -1.0)
        self.validation_due = meta.get("owed", False) and bool(self.args.val)
        self.metrics = meta.get("last", {})

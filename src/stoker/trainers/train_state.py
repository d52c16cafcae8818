"""The state of a training: everything that a checkpoint holds."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan
from stoker.trainers.checkpoints import Checkpoint, load_weights
from stoker.trainers.flags import LR_PER_256

EXCLUDED_ARGS = ("train", "val", "via", "cache_dir", "cache_size", "checkpoint_dir", "init_from", "ledger", "notes")
"""Flags that a checkpoint does not hold: they do not describe the training, and a URL may contain a password."""


class TrainState:
    """Weights, optimizer and progress of a training, on this rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        plan: SamplingPlan,
        *,
        device: torch.device,
        global_batch: int,
        num_classes: int,
        peak_lr: float | None = None,
    ) -> None:
        self.args, self.plan = args, plan
        self.global_batch, self.num_classes = global_batch, num_classes
        self.peak_lr: float = LR_PER_256 * global_batch / 256 if peak_lr is None else peak_lr
        self.model = model
        self.ema = copy_for_averaging(model) if args.ema else None
        self.optimizer = torch.optim.SGD(
            model.parameters(),
            lr=self.peak_lr,
            momentum=args.momentum,
            weight_decay=args.weight_decay,
            nesterov=args.nesterov,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
        self.cursor = plan.start_cursor()
        self.step = 0
        self.best_top1 = -1.0
        self.validation_due = False
        """Whether the last epoch has not been validated yet."""
        self.metrics: dict[str, float] = {}
        """Results of the last validation."""

    @property
    def models(self) -> list[nn.Module]:
        """The models to validate: the model and, if there is one, its moving average."""
        return [self.model] if self.ema is None else [self.model, self.ema]

    def state_dict(self) -> Checkpoint:
        """Return the content of a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "meta": {
                "cursor": self.cursor.state(),
                "step": self.step,
                "global_batch": self.global_batch,
                "lr": self.peak_lr,
                "best": self.best_top1,
                "owed": self.validation_due,
                "last": self.metrics,
                "model": self.args.model,
                "num_classes": self.num_classes,
                "plan": self.plan.digest,
                "args": {name: value for name, value in vars(self.args).items() if name not in EXCLUDED_ARGS},
            },
        }

    def load_state_dict(self, checkpoint: Checkpoint, *, where: str) -> None:
        """Load a checkpoint; flags of the command line override its hyperparameters."""
        args, meta = self.args, checkpoint["meta"]
        load_weights(self.model, checkpoint["model"], where=where)
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint["ema"] or self.model.state_dict())
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        for group in self.optimizer.param_groups:
            group.update(momentum=args.momentum, weight_decay=args.weight_decay, nesterov=args.nesterov)
        if checkpoint["scaler"]:  # empty unless the precision was fp16
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.cursor = self.plan.check_cursor(Cursor.from_state(meta["cursor"]))
        self.step = meta.get("step", 0)
        self.best_top1 = meta.get("best", -1.0)
        self.validation_due = meta.get("owed", False) and bool(args.val)
        self.metrics = meta.get("last", {})


def copy_for_averaging(model: nn.Module) -> nn.Module:
    """Return a copy of a model to hold the exponential moving average (EMA) of its weights."""
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float) -> None:
    """Update the moving average with the weights of the model."""
    weights = model.state_dict()
    for name, average in ema.state_dict().items():
        if average.is_floating_point():
            average.lerp_(weights[name], 1.0 - decay)
        else:
            average.copy_(weights[name])

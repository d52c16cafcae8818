"""The state of a PyTorch training: everything that a checkpoint holds."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

from stoker.sampling.plan import SamplingPlan
from stoker.trainers.checkpoint_store import Checkpoint
from stoker.trainers.checkpoints import load_weights
from stoker.trainers.progress import ResumableState


class TrainState(ResumableState):
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
        classes: tuple[str, ...] = (),
        peak_lr: float | None = None,
    ) -> None:
        super().__init__(
            args, plan, global_batch=global_batch, num_classes=num_classes, classes=classes, peak_lr=peak_lr
        )
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

    @property
    def models(self) -> list[nn.Module]:
        """The models to validate: the model and, if there is one, its moving average."""
        return [self.model] if self.ema is None else [self.model, self.ema]

    @property
    def parameter_count(self) -> int:
        """The number of trainable weights."""
        return sum(weight.numel() for weight in self.model.parameters())

    def state_dict(self) -> Checkpoint:
        """Return the content of a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "meta": self.meta(),
        }

    def load_state_dict(self, checkpoint: Checkpoint, *, where: str) -> None:
        """Load a checkpoint; flags of the command line override its hyperparameters."""
        args = self.args
        load_weights(self.model, checkpoint["model"], where=where)
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint["ema"] or self.model.state_dict())
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        for group in self.optimizer.param_groups:
            group.update(momentum=args.momentum, weight_decay=args.weight_decay, nesterov=args.nesterov)
        if checkpoint["scaler"]:  # empty unless the precision was fp16
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.load_meta(checkpoint["meta"])


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

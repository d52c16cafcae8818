"""Sampling `join`: ranks have different numbers of batches and finish an epoch one after the other.

torch.distributed's Join lets a rank that has run out of batches take part in the collectives of the others. There is no
common position in the epoch, so a training resumes at the start of an epoch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from stoker.load.torch import TorchBatch
from stoker.trainers.train_state import TrainState
from stoker.trainers.world import World


class JoinProgress:
    """How far this rank is in its own part of an epoch."""

    def __init__(self) -> None:
        self.position, self.steps = 0, 0

    def step_range(self, batch: TorchBatch) -> tuple[int, int]:
        """Return the positions that a batch covers in this rank's part of the epoch: first, and last plus one."""
        return self.position, int(batch.positions[-1]) + 1 if batch.count else self.position

    def samples_seen(self, global_batch: int) -> tuple[int, int]:
        """Return the samples seen by all ranks before and after the next step, for the learning rate.

        Ranks are at different positions but must use the same learning rate, so it depends on the number of steps.
        """
        return self.steps * global_batch, (self.steps + 1) * global_batch

    def advance(self, position: int) -> None:
        """Move to the end position of a step."""
        self.position, self.steps = position, self.steps + 1


def uneven_inputs(parallel: Any, world: World) -> AbstractContextManager[Any]:
    """Return the context in which ranks may run out of batches at different steps."""
    return Join([parallel]) if world.size > 1 else nullcontext()


def sync_ranks(world: World, state: TrainState) -> None:
    """At the end of an epoch, copy the state of the rank with the most steps to all; Join copies the model only."""
    steps = world.all_gather(state.step)
    source = steps.index(max(steps))
    if world.size > 1:
        model, ema = state.model, state.ema
        average = [*ema.parameters(), *ema.buffers()] if ema is not None else []
        per_parameter = state.optimizer.state.values()
        momentum = [value for values in per_parameter for value in values.values() if torch.is_tensor(value)]
        for tensor in [*model.parameters(), *model.buffers(), *momentum, *average]:
            dist.broadcast(tensor.data, src=source)
    state.step = max(steps)

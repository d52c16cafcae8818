"""The ranks that train together, and how they are told to stop."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stoker.errors import InputError, MissingError, StokerError
from stoker.sampling.rank import Seat

T = TypeVar("T")
PATIENCE_S = 3.0
_PR_SET_PDEATHSIG = 1


def end_with_starter() -> None:
    """Let the system tell this rank to stop if torchrun is killed; else it would train on, and hold the checkpoints.

    A rank that torchrun did not start is left alone: it may well outlive the shell that started it.
    """
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    starter = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != starter:  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)


class World:
    """The ranks that train together: who this one is, its device, and what they tell each other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seat = Seat.from_environ(os.environ)
        self.rank, self.size, _ = self.seat
        self.device = _device(args)
        self._cpu: Any = None
        if args.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        elif self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        if self.size > 1:
            backend = args.backend
            if backend == "auto":
                backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            if "nccl" in backend and not dist.is_nccl_available():
                raise MissingError("this torch has no NCCL", where=f"--backend {args.backend}", hint="give gloo")
            dist.init_process_group(backend, rank=self.rank, world_size=self.size)
            self._cpu = dist.new_group(backend="gloo")  # so that no count waits for a device, or for a gradient

    def sum_later(self, number: int) -> Callable[[], int]:
        """Begin to add up a number over the ranks; the call gives the sum."""
        if self._cpu is None:
            return lambda: number
        total = torch.tensor([number], dtype=torch.int64)
        work = dist.all_reduce(total, group=self._cpu, async_op=True)

        def finish() -> int:
            work.wait()
            return int(total.item())

        return finish

    def sum(self, numbers: torch.Tensor) -> None:
        """Add up numbers over the ranks, in place."""
        if self._cpu is not None:
            dist.all_reduce(numbers, group=self._cpu)

    def together(self, make: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on some, the first of them says why, and all end."""
        error: StokerError | None = None
        try:
            made = make()
        except StokerError as caught:
            error = caught
        codes = self._gathered(error.exit_code if error is not None else 0)
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed:
            return made
        if error is not None and failed[0] == self.rank:
            raise error
        raise SystemExit(codes[failed[0]])

    def first(self, make: Callable[[], T]) -> T | None:
        """Do something on rank 0 alone; if it fails, all end."""
        return self.together(lambda: make() if self.rank == 0 else None)

    def told(self, value: T) -> T:
        """Give rank 0's value to all."""
        if self._cpu is None:
            return value
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._cpu)
        return box[0]  # type: ignore[return-value]

    def spread_buffers(self, model: nn.Module, source: int = 0) -> None:
        """Give the statistics that one rank's model has kept to all."""
        if self._cpu is not None:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=source)

    def align(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None) -> int:
        """After uneven ranks: the rank that made the most steps tells all that `Join` does not; return its steps."""
        steps = self._gathered(step)
        source = steps.index(max(steps))
        if self._cpu is not None:
            averaged = [*ema.parameters(), *ema.buffers()] if ema is not None else []
            kept = [value for one in optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
            for tensor in [*model.parameters(), *model.buffers(), *kept, *averaged]:
                dist.broadcast(tensor.data, src=source)
        return max(steps)

    def close(self) -> None:
        """Leave the group."""
        if self._cpu is not None:
            dist.destroy_process_group()

    def _gathered(self, number: int) -> list[int]:
        if self._cpu is None:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]), group=self._cpu)
        return [int(one) for one in numbers]


class StoppedAtOnce(Exception):  # noqa: N818 - what happened, and no error
    """This rank was told to stop, and need not wait for the others."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Stop:
    """Whether this rank was told to stop: by SIGTERM or Ctrl-C.

    The same wish often comes twice, from the terminal and from torchrun, so that only a later Ctrl-C ends at once.
    """

    def __init__(self) -> None:
        self.asked, self._at_once, self._since = 0, False, 0.0

    def listen(self, *, at_once: bool) -> None:
        """Take the signals from now on; before, they end the process as they always do."""
        self._at_once = at_once
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _: object) -> None:
        first, self.asked = not self.asked, self.asked or number
        if first:
            self._since = time.monotonic()
        impatient = number == signal.SIGINT and time.monotonic() - self._since > PATIENCE_S
        if (first and self._at_once) or impatient:
            raise StoppedAtOnce(number)


def _device(args: argparse.Namespace) -> torch.device:
    name, _, number = args.device.partition(":")
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingError("there is no CUDA here", where=f"--device {args.device}", hint="give --device cpu, or auto")
    if args.device == "cpu" or not torch.cuda.is_available():
        if args.precision == "fp16":
            raise InputError("fp16 needs a GPU", where="--precision fp16", hint="give bf16 or fp32")
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
    there = torch.cuda.device_count()
    if number and int(number) >= there:
        raise MissingError(f"there are only {there} GPUs here, from 0 on", where=f"--device {args.device}")
    index = int(number) if number else local % there
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

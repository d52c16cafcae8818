"""The ranks of a PyTorch training: device, process group and collectives."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from stoker.errors import InputError, MissingError
from stoker.sampling.rank import Rank
from stoker.trainers.rank_group import RankGroup

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Request SIGTERM for this rank when torchrun dies; otherwise it would keep training and lock the checkpoints.

    Only for ranks started by torchrun: others may outlive the shell that started them.
    """
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


class World(RankGroup):
    """The ranks that train together: the number and device of this one, and collectives over all."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.sampling_rank = Rank.from_environ(os.environ)
        self.device = _device(args)
        self.device_type = self.device.type
        self._cpu_group: Any = None
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
                raise MissingError(
                    "this build of torch has no NCCL", where=f"--backend {args.backend}", hint="use gloo"
                )
            dist.init_process_group(backend, rank=self.rank, world_size=self.size)
            self._cpu_group = dist.new_group(
                backend="gloo"
            )  # so that counts do not wait for the device or for gradients

    def all_reduce_async(self, number: int) -> Callable[[], int]:
        """Start to add up a number over all ranks; calling the result waits for the sum."""
        if self._cpu_group is None:
            return lambda: number
        total = torch.tensor([number], dtype=torch.int64)
        work = dist.all_reduce(total, group=self._cpu_group, async_op=True)

        def finish() -> int:
            work.wait()
            return int(total.item())

        return finish

    def all_reduce(self, numbers: torch.Tensor) -> None:
        """Add up numbers over all ranks, in place."""
        if self._cpu_group is not None:
            dist.all_reduce(numbers, group=self._cpu_group)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all ranks."""
        if self._cpu_group is None:
            return value
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._cpu_group)
        return box[0]  # type: ignore[return-value]

    def broadcast_buffers(self, model: nn.Module, source: int = 0) -> None:
        """Copy the buffers of a model, such as BatchNorm statistics, from one rank to all."""
        if self._cpu_group is not None:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=source)

    def close(self) -> None:
        """Leave the process group."""
        if self._cpu_group is not None:
            dist.destroy_process_group()

    def all_gather(self, number: int) -> list[int]:
        """Return the number of each rank."""
        if self._cpu_group is None:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]), group=self._cpu_group)
        return [int(gathered) for gathered in numbers]


def _device(args: argparse.Namespace) -> torch.device:
    name, _, number = args.device.partition(":")
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingError("CUDA is not available", where=f"--device {args.device}", hint="use --device cpu or auto")
    if args.device == "cpu" or not torch.cuda.is_available():
        if args.precision == "fp16":
            raise InputError("fp16 needs a GPU", where="--precision fp16", hint="use bf16 or fp32")
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
    count = torch.cuda.device_count()
    if number and int(number) >= count:
        raise MissingError(f"this machine has {count} GPUs, numbered from 0", where=f"--device {args.device}")
    index = int(number) if number else local_rank % count
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

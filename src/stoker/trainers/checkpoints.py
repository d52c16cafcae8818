"""Checkpoints of PyTorch: the output of `torch.save`, and weights of other files."""

from __future__ import annotations

import io
from typing import IO, Any, NamedTuple

import torch

from stoker.errors import InputError
from stoker.storage import local_path, open_store, redacted, split_url
from stoker.trainers.checkpoint_files import TORCH_SUFFIX
from stoker.trainers.checkpoint_store import (
    Checkpoint,
    CheckpointFormat,
    CheckpointStore,
    find_mismatches,
    has_digest,
    read_checkpoint,
)


def open_checkpoints(url: str, **options: Any) -> CheckpointStore:
    """Open the checkpoints of a PyTorch training; takes the options of `CheckpointStore`."""
    return CheckpointStore(url, TORCH_FORMAT, **options)


def decode_checkpoint(data: bytes, *, where: str) -> Checkpoint:
    """Decode a checkpoint; raise VerificationError if it is damaged. No code in it is executed."""
    return read_checkpoint(data, TORCH_FORMAT, where=where)


class Weights(NamedTuple):
    """The weights of a model, and their moving average if the checkpoint has one."""

    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None = None


def read_weights(url: str) -> Weights:
    """Read weights from a checkpoint of stoker, or from a state_dict saved by torch.save, plain or in a dict."""
    folder, name = split_url(url)
    path = local_path(folder)
    data = open_store(folder if path is None else str(path.expanduser())).get(name)
    if has_digest(data):
        state = decode_checkpoint(data, where=redacted(url))
        return Weights(state["model"], state.get("ema"))
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"cannot be loaded with weights_only=True: {_first_line(error)}", where=redacted(url)
        ) from error
    for key in ("model", "state_dict"):
        loaded = loaded[key] if isinstance(loaded, dict) and isinstance(loaded.get(key), dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise InputError("contains no state_dict of a model", where=redacted(url))
    return Weights({name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in loaded.items()})


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], *, where: str) -> None:
    """Load weights into a model; raise InputError naming the parameters that do not match."""
    if mismatches := find_mismatches(model.state_dict(), weights):
        raise InputError(mismatches, where=where)
    model.load_state_dict(weights)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _write(state: Checkpoint, file: IO[bytes]) -> None:
    torch.save(state, file)


def _read(data: bytes) -> Checkpoint:
    state: Checkpoint = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def _copy_to_cpu(value: Any) -> Any:
    """Copy a state to new CPU memory, so that training can continue."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_to_cpu, value))
    return value


TORCH_FORMAT = CheckpointFormat(TORCH_SUFFIX, _write, _read, _copy_to_cpu)

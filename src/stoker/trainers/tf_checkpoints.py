"""Checkpoints of TensorFlow trainings: numpy archives, readable with `numpy.load` and without TensorFlow."""

from __future__ import annotations

import io
import json
from typing import IO, Any

import numpy as np

from stoker.errors import InputError
from stoker.storage import local_path, open_store, redacted, split_url
from stoker.trainers.checkpoint_files import TF_SUFFIX
from stoker.trainers.checkpoint_store import Checkpoint, CheckpointFormat, has_digest, read_checkpoint

Arrays = dict[str, np.ndarray[Any, Any]]
_META = "meta"


def _write(state: Checkpoint, file: IO[bytes]) -> None:
    """Write groups of arrays as `group/name`, and everything else as JSON."""
    arrays = {
        f"{group}/{name}": array
        for group, members in state.items()
        if group != _META and isinstance(members, dict)
        for name, array in members.items()
    }
    groups = [group for group, members in state.items() if group != _META and isinstance(members, dict)]
    meta = {"stoker": state.get("stoker"), "groups": groups, _META: state[_META]}
    np.savez(file, allow_pickle=False, **{_META: np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)}, **arrays)


def _read(data: bytes) -> Checkpoint:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        meta = json.loads(archive[_META].tobytes())
        state: Checkpoint = {"stoker": meta["stoker"], _META: meta[_META], **{group: {} for group in meta["groups"]}}
        for key in archive.files:
            group, slash, name = key.partition("/")
            if slash:
                state[group][name] = archive[key]
    return state


TF_FORMAT = CheckpointFormat(TF_SUFFIX, _write, _read, dict)  # the state is a copy already


def read_weights(url: str) -> tuple[Arrays, Arrays | None]:
    """Read the weights and statistics of a checkpoint, and their moving average if it has one."""
    folder, name = split_url(url)
    path = local_path(folder)
    data = open_store(folder if path is None else str(path.expanduser())).get(name)
    if not has_digest(data) or not name.endswith(TF_SUFFIX):
        raise InputError("is no checkpoint of a TensorFlow training", where=redacted(url))
    state = read_checkpoint(data, TF_FORMAT, where=redacted(url))
    return {**state["weights"], **state["statistics"]}, state.get("ema")

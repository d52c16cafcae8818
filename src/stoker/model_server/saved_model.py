"""Serve a TensorFlow SavedModel; the only home of TensorFlow in the model server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import InputError, MissingExtraError
from stoker.model_server.signatures import Signature, Tensors, TensorSpec
from stoker.trainers.model_description import ModelDescription

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it on import: only errors
try:
    import tensorflow as tf
except ImportError as error:
    raise MissingExtraError("tensorflow", "tf", purpose="serving a SavedModel") from error


class SavedModel:
    """The signatures of a SavedModel as functions of numpy arrays."""

    def __init__(self, path: Path, version: int, description: ModelDescription | None) -> None:
        self.version, self.description = version, description
        try:
            self._module = tf.saved_model.load(str(path))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise InputError(f"cannot load the SavedModel: {_first_line(error)}", where=path) from error
        self._functions: dict[str, Any] = dict(self._module.signatures)
        self.signatures: Mapping[str, Signature] = {
            name: _read_signature(function) for name, function in self._functions.items()
        }
        if not self.signatures:
            raise InputError("SavedModel has no signatures", where=path, hint="export it with tf.saved_model.save")
        if description is not None and description.signature not in self.signatures:
            raise InputError(f"SavedModel has no signature {description.signature!r}", where=path)

    def run(self, signature: str, inputs: Tensors) -> Tensors:
        """Run a signature; raise InputError if an operation rejects the values."""
        try:
            outputs = self._functions[signature](**{name: tf.constant(array) for name, array in inputs.items()})
        except (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.NotFoundError) as error:
            raise InputError(f"model rejected the input: {_first_line(error)}") from error
        return {name: np.asarray(tensor.numpy()) for name, tensor in outputs.items()}


def _read_signature(function: Any) -> Signature:
    return Signature(
        {name: _read_spec(spec) for name, spec in function.structured_input_signature[1].items()},
        {name: _read_spec(spec) for name, spec in function.structured_outputs.items()},
    )


def _read_spec(spec: Any) -> TensorSpec:
    shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
    return TensorSpec(spec.dtype.name, shape)


def _first_line(error: Exception) -> str:
    text = getattr(error, "message", "") or str(error)
    return text.strip().partition("\n")[0] or type(error).__name__

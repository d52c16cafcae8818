"""Signatures of models: the names, types and shapes of their tensors, and how the REST API describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

DTYPE_NAMES = {
    "bool": "DT_BOOL",
    "float16": "DT_HALF",
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "int8": "DT_INT8",
    "int16": "DT_INT16",
    "int32": "DT_INT32",
    "int64": "DT_INT64",
    "string": "DT_STRING",
    "uint8": "DT_UINT8",
    "uint16": "DT_UINT16",
    "uint32": "DT_UINT32",
    "uint64": "DT_UINT64",
}
"""The supported types, by TensorFlow's names; their names in the metadata."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor; None is a dimension of any size, a shape of None one of any rank."""

    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def is_batched(self) -> bool:
        """Whether the first dimension may have any size."""
        return bool(self.shape) and self.shape is not None and self.shape[0] is None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape fits."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            size in (None, actual) for size, actual in zip(self.shape, shape, strict=True)
        )

    def metadata(self) -> dict[str, Any]:
        """Return the description in the format of TensorFlow Serving."""
        dims = [{"size": str(-1 if size is None else size), "name": ""} for size in self.shape or ()]
        shape = {"dim": dims, "unknown_rank": self.shape is None}
        return {"dtype": DTYPE_NAMES.get(self.dtype, "DT_INVALID"), "tensor_shape": shape, "name": ""}


@dataclass(frozen=True, slots=True)
class Signature:
    """One function of a model."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def is_batched(self) -> bool:
        """Whether the inputs of several requests can be concatenated, and the outputs split again."""
        specs = [*self.inputs.values(), *self.outputs.values()]
        return bool(self.inputs) and all(spec.is_batched for spec in specs)

    def metadata(self) -> dict[str, Any]:
        """Return the description in the format of TensorFlow Serving."""
        return {
            "inputs": {name: spec.metadata() for name, spec in self.inputs.items()},
            "outputs": {name: spec.metadata() for name, spec in self.outputs.items()},
            "method_name": "tensorflow/serving/predict",
            "defaults": {},
        }

    def example(self) -> Tensors | None:
        """Return one row of zeros to warm the model up; None if the shape of an input is not known."""
        tensors = {}
        for name, spec in self.inputs.items():
            if spec.shape is None or spec.dtype not in DTYPE_NAMES or spec.dtype == "string":
                return None
            if None in spec.shape[1:]:
                return None
            tensors[name] = np.zeros([1 if size is None else size for size in spec.shape], dtype=spec.dtype)
        return tensors


def format_shape(shape: tuple[int | None, ...] | None) -> str:
    """Return a shape as text: N×28×28, where N is any number."""
    if shape is None:
        return "any shape"
    return "×".join("N" if size is None else str(size) for size in shape) or "scalar"

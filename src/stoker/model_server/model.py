"""The protocol of a model that can be served."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from stoker.errors import InputError
from stoker.model_server.signatures import Signature, Tensors
from stoker.trainers.model_description import ModelDescription


class ServedModel(Protocol):
    """A loaded model; `version` is its number, `description` is None if it is not known how to classify images."""

    version: int
    signatures: Mapping[str, Signature]
    description: ModelDescription | None

    def run(self, signature: str, inputs: Tensors) -> Tensors:
        """Run one function of the model; raise InputError if the model rejects the values."""
        ...


def warm_up(model: ServedModel) -> None:
    """Run each function once, so that the first request does not wait for tracing and allocation."""
    for name, signature in model.signatures.items():
        if (example := signature.example()) is not None:
            with suppress(InputError):  # zeros may not be valid values
                model.run(name, example)

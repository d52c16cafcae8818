"""Serve a PyTorch checkpoint of `stoker.trainers.torch_image`."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.model_server.signatures import Signature, Tensors, TensorSpec
from stoker.storage import join_url, open_store, redacted
from stoker.trainers.checkpoints import decode_checkpoint
from stoker.trainers.model_description import DEFAULT_SIGNATURE, ModelDescription
from stoker.trainers.torch_inference import TorchClassifier

MAX_CHECKPOINT_BYTES = 64 << 30


class CheckpointModel:
    """A checkpoint as a model with one signature: pixels of shape N×size×size×3 to logits. Its version is its step."""

    def __init__(self, folder: str, name: str, *, device: str = "auto") -> None:
        where = redacted(join_url(folder, name))
        data = open_store(folder).get(name, max_bytes=MAX_CHECKPOINT_BYTES)
        self._classifier = TorchClassifier(decode_checkpoint(data, where=where), where=where, device=device)
        self.version = self._classifier.step
        self.description: ModelDescription | None = self._classifier.description
        size, classes = self._classifier.description.image.size, len(self._classifier.description.classes)
        self.signatures: Mapping[str, Signature] = {
            DEFAULT_SIGNATURE: Signature(
                {"images": TensorSpec("uint8", (None, size, size, 3))},
                {"logits": TensorSpec("float32", (None, classes))},
            )
        }

    def run(self, signature: str, inputs: Tensors) -> Tensors:  # noqa: ARG002 (there is one signature)
        """Return the logits of images."""
        return {"logits": self._classifier.predict(inputs["images"])}

"""Run the model of a PyTorch checkpoint: from pixels to logits, as the validation of the training does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stoker.errors import InputError
from stoker.load.torch import normalize
from stoker.trainers.checkpoint_store import Checkpoint
from stoker.trainers.checkpoints import load_weights
from stoker.trainers.model_description import describe_checkpoint
from stoker.trainers.models import build_model


class TorchClassifier:
    """The model of a checkpoint, with the moving average of its weights if there is one."""

    def __init__(self, checkpoint: Checkpoint, *, where: str, device: str = "auto") -> None:
        meta = checkpoint["meta"]
        self.description = describe_checkpoint(meta, where=where)
        self.step: int = meta.get("step", 0)
        args = meta["args"]
        self._device = _choose_device(device)
        size = self.description.image.size
        model = build_model(meta["model"], num_classes=meta["num_classes"], size=size, stem=args.get("stem", "auto"))
        load_weights(model, checkpoint.get("ema") or checkpoint["model"], where=where)
        self._model: nn.Module = model.to(self._device).eval()

    def predict(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the logits of images of shape N×H×W×3."""
        with torch.inference_mode():
            images = torch.from_numpy(np.ascontiguousarray(pixels)).to(self._device).permute(0, 3, 1, 2)
            logits: npt.NDArray[np.float32] = self._model(normalize(images).contiguous()).float().cpu().numpy()
        return logits


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {name}: this machine has no CUDA device", hint="use --device cpu")
    return torch.device(name)

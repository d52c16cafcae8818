"""Suggest flags of the image trainer for a dataset (`stoker init`)."""

from __future__ import annotations

from stoker.trainers.flags import SMALL_SIZE

IMAGENET_SIZE = 224
LARGE_DATASET = 100_000
"""From this number of samples on, the larger model of two is suggested."""
SMALL_DATASET = 10_000
MIN_STEPS = 16
"""Steps per epoch that the batch size leaves: with fewer, a small dataset is hardly trained at all."""
MIN_BATCH, MAX_BATCH, MAX_LARGE_IMAGE_BATCH = 8, 256, 128


def suggest_flags(samples: int, size: tuple[int, int] | None) -> list[str]:
    """Return a model, an input size and a batch size for a dataset with images of about this width and height."""
    side = suggest_size(*size) if size is not None else IMAGENET_SIZE
    batch = suggest_batch(samples, side)
    return ["--model", suggest_model(samples, side), "--size", f"{side}", "--global-batch-size", f"{batch}"]


def suggest_size(width: int, height: int) -> int:
    """Return the side of the model's input: that of small images, and at most 224 for larger ones."""
    if max(width, height) <= SMALL_SIZE:
        return -(-max(width, height) // 8) * 8  # small images are not cropped
    return min(max(min(width, height) // 32 * 32, SMALL_SIZE), IMAGENET_SIZE)


def suggest_model(samples: int, size: int) -> str:
    """Return a built-in model that a dataset of this size can train."""
    if size <= SMALL_SIZE:
        return "small" if samples < SMALL_DATASET else "resnet18"
    return "resnet18" if samples < LARGE_DATASET else "resnet50"


def suggest_batch(samples: int, size: int) -> int:
    """Return a global batch size, a power of two, for enough steps per epoch and the memory of one GPU."""
    largest = MAX_BATCH if size <= SMALL_SIZE else MAX_LARGE_IMAGE_BATCH
    return min(max(MIN_BATCH, 1 << max(samples // MIN_STEPS, 1).bit_length() - 1), largest)

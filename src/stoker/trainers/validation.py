"""Results of a validation: what they are, how they are recorded and printed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stoker.core.units import pluralize
from stoker.telemetry import Recorder


class ValidationResult(NamedTuple):
    """Loss and accuracy over exactly the validation set."""

    loss: float
    top1: float
    top5: float
    samples: int

    def __str__(self) -> str:
        accuracy = f"top-1 {self.top1:.2%}, top-5 {self.top5:.2%}"
        return f"validation loss {self.loss:.4f}, {accuracy} ({pluralize(self.samples, 'sample')})"


def build_results(rows: Iterable[Sequence[float]]) -> list[ValidationResult]:
    """Return a result for each model from the sums of all ranks: loss, top-1, top-5 and samples."""
    return [ValidationResult(loss / n, top1 / n, top5 / n, int(n)) for loss, top1, top5, n in rows if n]


def is_validation_epoch(args: argparse.Namespace, epochs: int) -> bool:
    """Return whether to validate after this number of epochs."""
    every = args.validate_every
    return bool(every) and (epochs % every == 0 or epochs >= args.epochs)


def record_results(record: Recorder | None, results: Sequence[ValidationResult], step: int) -> dict[str, float]:
    """Return the metrics of a validation, and write them as events if there is a recorder."""
    metrics = {"val_loss": results[0].loss, "val_top1": results[0].top1, "val_top5": results[0].top5}
    if len(results) > 1:
        metrics["ema_top1"] = results[1].top1
    if record is not None:
        for name, value in metrics.items():
            record.scalar(name, value, step)
    return metrics


def format_results(results: Sequence[ValidationResult]) -> str:
    """Return the results as a line of text."""
    return "; averaged weights: ".join(map(str, results))

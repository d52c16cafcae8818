"""Validate the checkpoints of a TensorFlow training as they appear: `python -m stoker.trainers.tf_evaluator`.

For `roles.evaluator` of a job: it needs no flags, because a checkpoint names its model. It ends after the checkpoint at
the end of the training. A stop signal means that the training has ended: the newest checkpoint is validated first.
"""

from __future__ import annotations

import sys

from stoker.trainers import tf_flags

if __name__ == "__main__":  # before importing TensorFlow: to report bad flags fast, and to set what it reads on import
    ARGS = tf_flags.parse_or_exit(sys.argv[1:], tf_flags.TF_EVALUATOR)

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from stoker.errors import NotFoundError, VerificationError
from stoker.load.loader import Loader
from stoker.sampling.rank import Rank
from stoker.telemetry import Recorder
from stoker.trainers.checkpoint_store import Checkpoint, CheckpointMeta, CheckpointStore
from stoker.trainers.flags import default_val_transform
from stoker.trainers.meter import HeartbeatSender
from stoker.trainers.rank_group import SingleRank
from stoker.trainers.startup import open_store, run_trainer, start_trainer
from stoker.trainers.stop_signal import StopSignal
from stoker.trainers.tf_checkpoints import TF_FORMAT
from stoker.trainers.tf_cluster import configure_tensorflow, is_peer_lost
from stoker.trainers.tf_network import TfNetwork
from stoker.trainers.training_data import cached_url, loader_options
from stoker.trainers.validation import ValidationResult, build_results, format_results, record_results
from stoker.trainers.watchdog import exit_now

POLL_S = 1.0
BATCH = 64
MODEL_FLAGS = ("model", "size", "stem", "zero_gamma", "precision")
"""Flags of the training that determine its model and its input."""


def main(args: argparse.Namespace) -> int:
    """Validate until the training has ended; report errors in one sentence."""

    def run(record: Recorder, resources: contextlib.ExitStack) -> int:
        configure_tensorflow(args)
        return evaluate(args, record, resources)

    return run_trainer(args, run, is_peer_lost)


def evaluate(args: argparse.Namespace, record: Recorder, resources: contextlib.ExitStack) -> int:
    """Validate each checkpoint once; return the exit code."""
    world, stop = SingleRank(), StopSignal()
    stop.install(immediate=False)
    print_line = start_trainer(args, world, record, resources)
    store = open_store(args, world, record, resources, TF_FORMAT)
    assert store is not None
    beat = HeartbeatSender(record)
    scorer: Scorer | None = None
    for name, checkpoint in follow_checkpoints(store, stop, partial(beat, 0)):
        meta: CheckpointMeta = checkpoint["meta"]
        if scorer is None:
            scorer = Scorer(args, meta)
            resources.callback(scorer.loader.close)
        started = time.monotonic()
        results = scorer.score(checkpoint, partial(beat, meta["step"]))
        record_results(record, results, meta["step"])
        record.mark("evaluated", name, step=meta["step"], seconds=round(time.monotonic() - started, 3))
        print_line(f"{name}: {format_results(results)}")
        if is_final(meta):
            break
    record.mark("end", "the training has ended")
    return 0


def follow_checkpoints(
    store: CheckpointStore, stop: StopSignal, heartbeat: Callable[[], None]
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the newest checkpoint whenever there is a new one; after a stop signal, a last time."""
    seen = ""
    while True:
        is_last = bool(stop.received)
        heartbeat()
        name = store.newest_name()
        if name is not None and name > seen:
            seen = name
            with contextlib.suppress(NotFoundError, VerificationError):  # deleted meanwhile, or damaged
                yield store.load(name)
                continue
        if is_last:
            return
        if not stop.received:
            time.sleep(POLL_S)


def is_final(meta: CheckpointMeta) -> bool:
    """Return whether a checkpoint is the last one of its training."""
    args = meta["args"]
    return bool(
        meta["cursor"]["epoch"] >= args["epochs"] or (args["num_batches"] and meta["step"] >= args["num_batches"])
    )


class Scorer:
    """The model of a training, and the validation set."""

    def __init__(self, args: argparse.Namespace, meta: CheckpointMeta) -> None:
        trained = {name: meta["args"][name] for name in MODEL_FLAGS}
        own = argparse.Namespace(**{**vars(args), **trained})
        self.network = TfNetwork(own, meta["num_classes"])
        self._function = self.network.validation_function()
        transform = args.val_transform if args.has_val_transform else default_val_transform(own.size)
        self.loader = Loader(cached_url(args, args.val), **loader_options(own, Rank(), 1, transform))

    def score(self, checkpoint: Checkpoint, heartbeat: Callable[[], None]) -> list[ValidationResult]:
        """Validate the weights of a checkpoint and, if it has one, their moving average."""
        weights = {**checkpoint["weights"], **checkpoint["statistics"]}
        evaluated = [self.network.split_weights(arrays) for arrays in (weights, checkpoint.get("ema")) if arrays]
        sums, samples = np.zeros((len(evaluated), 4)), self.loader.plan.samples
        for start in range(0, samples, BATCH):
            heartbeat()
            batch = self.loader.load_positions(0, np.arange(start, min(start + BATCH, samples)))
            if batch.count:
                for row, model in zip(sums, evaluated, strict=True):
                    row += np.asarray(self._function(*model, batch.images, batch.labels))
        return build_results(sums.tolist())


if __name__ == "__main__":
    exit_now(main(ARGS))

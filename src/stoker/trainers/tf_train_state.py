"""The state of a TensorFlow training: variables that a strategy places, and their updates."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from stoker.sampling.plan import SamplingPlan
from stoker.storage.local import translate_os_errors
from stoker.trainers.checkpoint_store import Checkpoint, CheckpointMeta
from stoker.trainers.model_description import ModelDescription, describe_checkpoint, write_description
from stoker.trainers.progress import ResumableState
from stoker.trainers.tf_checkpoints import Arrays
from stoker.trainers.tf_network import Gradients, TfNetwork, normalize


class TfTrainState(ResumableState):
    """Weights, momentum, statistics of BatchNorm, moving average and progress of a training."""

    def __init__(
        self,
        args: argparse.Namespace,
        network: TfNetwork,
        plan: SamplingPlan,
        *,
        strategy: Any,
        global_batch: int,
        num_classes: int,
        classes: tuple[str, ...] = (),
        peak_lr: float | None = None,
        bound: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the variables; those of other tasks are read within `bound`."""
        super().__init__(
            args, plan, global_batch=global_batch, num_classes=num_classes, classes=classes, peak_lr=peak_lr
        )
        self.network, self._strategy, self._bound = network, strategy, bound
        self.weights = self._make_variables(network.weights)
        self.statistics = self._make_variables(network.statistics)
        zeros = {name: np.zeros_like(array) for name, array in network.weights.items()}
        self.momentum = self._make_variables(zeros, beside=self.weights)
        averaged = {**network.weights, **network.statistics}
        beside = [*self.weights, *self.statistics]
        self.ema = self._make_variables(averaged, beside=beside) if args.ema else None

    def _make_variables(self, arrays: Arrays, *, beside: Sequence[Any] = ()) -> list[Any]:
        """Create variables; each on the device of another one, where an operation uses both."""
        # Tensors of this task: while TensorFlow copies arrays of numpy to another one, it blocks all threads of Python.
        tensors = [tf.constant(array) for array in arrays.values()]
        with self._strategy.scope():
            if not beside:
                return [tf.Variable(tensor, trainable=False) for tensor in tensors]
            variables = []
            for tensor, other in zip(tensors, beside, strict=True):
                with self._strategy.extended.colocate_vars_with(other):
                    variables.append(tf.Variable(tensor, trainable=False))
            return variables

    @property
    def parameter_count(self) -> int:
        """The number of trainable weights."""
        return sum(array.size for array in self.network.weights.values())

    @property
    def evaluated(self) -> list[tuple[list[Any], list[Any]]]:
        """Weights and statistics to validate: those of the model and, if there is one, of its moving average."""
        models = [(self.weights, self.statistics)]
        if self.ema is not None:
            count = len(self.weights)
            models.append((self.ema[:count], self.ema[count:]))
        return models

    def apply(self, sums: Gradients, lr: Any, ema_decay: Any) -> None:
        """Make one optimizer step with the sums of all batches, on all copies of the variables."""
        self._apply(sums, lr, 1.0, self._strategy.extended.update)
        if self.ema is not None:
            for average, current in zip(self.ema, [*self.weights, *self.statistics], strict=True):
                self._strategy.extended.update(average, _average, args=(current, ema_decay))

    def apply_share(self, sums: Gradients, lr: Any) -> None:
        """Make the part of an optimizer step that belongs to the batch of one worker, without waiting for others."""
        share = sums.count / self.global_batch
        own = sums._replace(count=tf.constant(float(self.global_batch)))
        self._apply(own, lr, share, lambda variable, function, args: function(variable, *args))

    def _apply(self, sums: Gradients, lr: Any, share: Any, update: Callable[..., Any]) -> None:
        """Update weights and statistics: SGD with momentum as in PyTorch. Every update runs where its variable is."""
        args, count = self.args, tf.maximum(sums.count, 1.0)
        gradients = [gradient / count for gradient in sums.weights]
        if args.clip_grad:
            gradients, _ = tf.clip_by_global_norm(gradients, args.clip_grad)
        for weight, momentum, gradient in zip(self.weights, self.momentum, gradients, strict=True):
            update(weight, self._update_weight, args=(momentum, gradient, lr, share))
        for statistic, change in zip(self.statistics, sums.statistics, strict=True):
            update(statistic, lambda variable, delta: variable.assign_add(delta), args=(change / count,))

    def _update_weight(self, weight: Any, momentum: Any, gradient: Any, lr: Any, share: Any) -> Any:
        args = self.args
        if args.weight_decay:
            gradient = gradient + args.weight_decay * share * weight
        return tf.raw_ops.ResourceApplyMomentum(
            var=weight.handle,
            accum=momentum.handle,
            lr=lr,
            grad=gradient,
            momentum=tf.constant(args.momentum, tf.float32),
            use_locking=True,
            use_nesterov=args.nesterov,
        )

    def ema_decay(self) -> float:
        """Return the decay of the moving average in the next step; it is lower in the first steps."""
        step = self.step + 1
        return float(min(self.args.ema, (1 + step) / (10 + step)))

    def state_dict(self) -> Checkpoint:
        """Return the content of a checkpoint, as arrays of numpy."""
        names, statistics = list(self.network.weights), list(self.network.statistics)
        with self._bound():
            return {
                "weights": _to_numpy(names, self.weights),
                "momentum": _to_numpy(names, self.momentum),
                "statistics": _to_numpy(statistics, self.statistics),
                "ema": _to_numpy([*names, *statistics], self.ema) if self.ema is not None else None,
                "meta": self.meta(),
            }

    def load_state_dict(self, checkpoint: Checkpoint, *, where: str) -> None:
        """Load a checkpoint; flags of the command line override its hyperparameters."""
        weights = {**checkpoint["weights"], **checkpoint["statistics"]}
        self.load_weights(weights, where=where)
        _assign(self.momentum, list(checkpoint["momentum"].values()))
        if self.ema is not None:
            _assign(self.ema, list((checkpoint.get("ema") or weights).values()))
        self.load_meta(checkpoint["meta"])

    def load_weights(self, weights: Arrays, *, where: str) -> None:
        """Load weights and statistics; raise InputError naming those that do not match the model."""
        self.network.check_weights(weights, where=where)
        own, statistics = self.network.split_weights(weights)
        _assign([*self.weights, *self.statistics], [*own, *statistics])

    def export(self, directory: str) -> str:
        """Write the model as a SavedModel below `directory`, in a folder named like the step; return its path.

        TensorFlow Serving takes that number as the version of the model.
        """
        weights, statistics = self.evaluated[-1]
        with self._bound():
            arrays = [variable.numpy() for variable in [*weights, *statistics]]
        path = Path(directory).expanduser() / str(self.step)
        export_saved_model(self.network, arrays, path, describe_model(self.meta(), where=path))
        return str(path)


def describe_model(meta: CheckpointMeta, *, where: object) -> ModelDescription:
    """Return what a server must know about an exported model."""
    return msgspec.structs.replace(describe_checkpoint(meta, where=where), scores="probabilities")


def export_saved_model(network: TfNetwork, arrays: Sequence[Any], path: Path, description: ModelDescription) -> None:
    """Write a model with these weights and statistics; its signature maps uint8 images to probabilities."""
    model = network.model
    by_name = dict(zip([*network.weights, *network.statistics], arrays, strict=True))
    for variable in [*model.trainable_variables, *model.non_trainable_variables]:
        if variable.path in by_name:
            variable.assign(by_name[variable.path])

    def classify(images: Any) -> dict[str, Any]:
        logits = tf.cast(model(normalize(images), training=False), tf.float32)
        return {"probabilities": tf.nn.softmax(logits)}

    images = tf.TensorSpec([None, network.size, network.size, 3], tf.uint8, name="images")
    serve = tf.function(classify, input_signature=[images])
    module = tf.Module()
    module.model, module.serve = model, serve
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        tf.saved_model.save(module, str(scratch), signatures={description.signature: serve})
        write_description(description, scratch)
        shutil.rmtree(path, ignore_errors=True)
        scratch.rename(path)


def _average(average: Any, current: Any, decay: Any) -> Any:
    return average.assign_add((1.0 - decay) * (current - average))


def _to_numpy(names: Sequence[str], variables: Sequence[Any]) -> Arrays:
    return {name: np.array(variable.numpy()) for name, variable in zip(names, variables, strict=True)}


def _assign(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)

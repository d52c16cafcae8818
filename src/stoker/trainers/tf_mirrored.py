"""Train an image classifier with MultiWorkerMirroredStrategy: `python -m stoker.trainers.tf_mirrored --train SHARDS`.

Every worker runs this program, with TF_CONFIG (`topology: tf-mirrored`) or under mpirun (`topology: mpi`). The file
reads from top to bottom: `train` is the whole training, and the functions it calls follow: `run_epoch`, `train_step`,
`finish_epoch`, `validate`. What makes it exact:

- Each worker passes its own share of the global batch to `strategy.run`, which adds up gradients and sample counts of
  all workers in one collective. The sum is divided by the true number of samples, so uneven, empty and damaged shares
  do not change the result. The same collective carries stop requests, so that all workers stop after the same step.
- Gradients are pure functions of the weights (`tf_network.py`), and randomness depends on (seed, step, rank). So a
  checkpoint holds weights, momentum and a cursor, and can be resumed with another number of workers.
- Only the first worker reads and writes checkpoints; the others receive them by broadcast.
"""

from __future__ import annotations

import sys

from stoker.trainers import tf_flags

if __name__ == "__main__":  # before importing TensorFlow: to report bad flags fast, and to set what it reads on import
    ARGS = tf_flags.parse_or_exit(sys.argv[1:], tf_flags.TF_MIRRORED)

import argparse
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from stoker.load.loader import Batch
from stoker.storage import join_url, redacted
from stoker.telemetry import Recorder
from stoker.trainers.meter import HeartbeatSender
from stoker.trainers.startup import (
    check_same_training,
    choose_global_batch,
    load_checkpoint,
    open_store,
    run_trainer,
    start_trainer,
)
from stoker.trainers.stop_signal import StopSignal
from stoker.trainers.tf_checkpoints import TF_FORMAT, read_weights
from stoker.trainers.tf_cluster import MirroredWorld, configure_tensorflow, is_peer_lost, make_watchdog, read_task
from stoker.trainers.tf_network import Gradients, TfNetwork, step_seed
from stoker.trainers.tf_train_state import TfTrainState
from stoker.trainers.trainer_process import TrainerProcess
from stoker.trainers.training_data import DataAdapter, TrainingData, ValidationSet, count_classes, open_loader
from stoker.trainers.validation import (
    ValidationResult,
    build_results,
    format_results,
    is_validation_epoch,
    record_results,
)
from stoker.trainers.watchdog import exit_now

Trainer = TrainerProcess[MirroredWorld]
WATCHDOG_MARGIN_S = 30.0
"""After --peer-timeout TensorFlow itself reports a lost worker; if it does not, this much later we do."""


def main(args: argparse.Namespace) -> int:
    """Train or evaluate; report errors in one sentence. Programming errors keep their traceback."""

    def run(record: Recorder, resources: contextlib.ExitStack) -> int:
        configure_tensorflow(args)
        watchdog = make_watchdog(record)
        resources.callback(watchdog.close)
        task = read_task(args)
        world = MirroredWorld(args, task, watchdog)
        record.rank = world.rank
        return (evaluate if args.eval_only else train)(args, world, record, resources)

    return run_trainer(args, run, is_peer_lost, end=exit_now)


def train(args: argparse.Namespace, world: MirroredWorld, record: Recorder, resources: contextlib.ExitStack) -> int:
    """Train to the last epoch, to --num-batches or until stopped; return the exit code."""
    print_line = start_trainer(args, world, record, resources)
    if args.synthetic and args.checkpoint_dir:
        print_line(f"--synthetic: not reading or writing checkpoints in {redacted(args.checkpoint_dir)}")
        args = argparse.Namespace(**{**vars(args), "checkpoint_dir": None})

    # Only rank 0 reads and writes checkpoints; the others receive what it has read.
    store = open_store(args, world, record, resources, TF_FORMAT)
    name, checkpoint = load_checkpoint(args, world, store)
    meta = checkpoint["meta"] if checkpoint else {}
    global_batch = choose_global_batch(args, world.size, meta, print_line)
    adapter = DataAdapter(open_loader)
    data = world.run_on_all(lambda: TrainingData.open(args, world.sampling_rank, global_batch, adapter))
    resources.callback(data.close)
    val = None
    if args.val:
        val = world.run_on_all(lambda: ValidationSet.open(args, world.sampling_rank, global_batch, adapter))
    loader = val.loader if val else None
    num_classes = world.broadcast(world.run_on_rank0(lambda: count_classes(args, meta, data, loader)))
    assert num_classes is not None

    # The same weights on all workers: from the checkpoint, from a file, or from the seed.
    network = world.run_on_all(lambda: TfNetwork(args, num_classes))
    state = TfTrainState(
        args,
        network,
        data.plan,
        strategy=world.strategy,
        global_batch=global_batch,
        num_classes=num_classes,
        classes=data.classes,
        peak_lr=args.lr if args.lr is not None else meta.get("lr"),
    )
    if checkpoint:
        where = join_url(redacted(args.checkpoint_dir), name)
        world.run_on_all(lambda: check_same_training(args, meta, data, num_classes, where))
        world.run_on_all(lambda: state.load_state_dict(checkpoint, where=where))
        checkpoint.clear()  # as large as the model
    elif args.init_from:
        weights, _ = world.broadcast(world.run_on_rank0(lambda: read_weights(args.init_from))) or ({}, None)
        world.run_on_all(lambda: state.load_weights(weights, where=args.init_from))
    run = Trainer(args, world, record, print_line, data, val, store, build_functions(state, world))
    run.prepare(state)
    run.announce(state, resumed_from=name)
    if state.cursor.epoch >= args.epochs and not state.validation_due:
        return run.report_finished(state)
    run.open_ledger(state, resources)

    run.stop.install(immediate=False)
    while not run.is_done(state):
        if state.validation_due or run_epoch(run, state):
            finish_epoch(run, state)
    return finish(run, state)


def evaluate(args: argparse.Namespace, world: MirroredWorld, record: Recorder, resources: contextlib.ExitStack) -> int:
    """Validate a checkpoint, or with --init-from the weights of a file, and report the result."""
    print_line = start_trainer(args, world, record, resources)
    store = open_store(args, world, record, resources, TF_FORMAT)
    name, checkpoint = "", None
    if not args.init_from:
        name, checkpoint = load_checkpoint(args, world, store)
    meta = checkpoint["meta"] if checkpoint else {}
    global_batch = choose_global_batch(args, world.size, meta, print_line)
    adapter = DataAdapter(open_loader)
    val = world.run_on_all(lambda: ValidationSet.open(args, world.sampling_rank, global_batch, adapter))
    num_classes = world.broadcast(world.run_on_rank0(lambda: count_classes(args, meta, None, val.loader)))
    assert num_classes is not None
    network = world.run_on_all(lambda: TfNetwork(args, num_classes))
    if checkpoint:
        where = join_url(redacted(args.checkpoint_dir), name)
        world.run_on_all(lambda: check_same_training(args, meta, None, num_classes, where))
        weights, average = {**checkpoint["weights"], **checkpoint["statistics"]}, checkpoint.get("ema")
    else:
        where = redacted(args.init_from)
        weights, average = world.broadcast(world.run_on_rank0(lambda: read_weights(args.init_from))) or ({}, None)
    world.run_on_all(lambda: network.check_weights(weights, where=where))
    evaluated = [network.split_weights(arrays) for arrays in (weights, average) if arrays]
    step = meta.get("step", 0)
    beat = partial(HeartbeatSender(record), step)
    results = validate(world, val, evaluated, network.validation_function(), StopSignal(), beat)
    assert results is not None
    print_line(f"{name or redacted(args.init_from)}: {format_results(results)}")
    record_results(record if world.rank == 0 else None, results, step)
    return 0


class MirroredFunctions(NamedTuple):
    """The computations of a training, as functions of TensorFlow."""

    train: Callable[..., tuple[Any, Any, Any]]
    evaluate: Callable[..., Any]


def build_functions(state: TfTrainState, world: MirroredWorld) -> MirroredFunctions:
    """Build the training step; all workers must trace the same functions in the same order."""
    network, strategy = state.network, world.strategy
    timeout = world.communication_options(float(state.args.peer_timeout))

    def compute(images: Any, labels: Any, count: Any, seed: Any, stop: Any) -> Any:
        weights, statistics = ([tf.convert_to_tensor(v) for v in group] for group in (state.weights, state.statistics))
        own = network.gradients(weights, statistics, images, labels, count, seed)
        context = tf.distribute.get_replica_context()
        return own.loss, context.all_reduce("sum", [*own.flatten(), tf.identity(stop)], options=timeout)

    scalar, integer = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64)
    labels = tf.TensorSpec([None], tf.int64)
    per_replica = [network.images_spec, labels, integer, integer]

    def train_function(*inputs: Any) -> tuple[Any, Any, Any]:
        *parts, stop, lr, decay = inputs
        values = [parts[first :: len(per_replica)] for first in range(len(per_replica))]
        shares = [_per_replica(strategy, column) for column in values]
        losses, sums = strategy.run(compute, args=(*shares, stop))
        local = strategy.experimental_local_results
        *totals, stops = [local(value)[0] for value in sums]
        weights = len(state.weights)
        total = Gradients(totals[:weights], totals[weights:-2], totals[-2], totals[-1])
        state.apply(total, lr, decay)
        return tf.add_n(local(losses)), total.count, stops

    signature = [*per_replica * world.local_replicas, scalar, scalar, scalar]
    return MirroredFunctions(tf.function(train_function, input_signature=signature), network.validation_function())


def run_epoch(run: Trainer, state: TfTrainState) -> bool:
    """Train on the rest of an epoch; return whether it is complete and the training does not stop."""
    data, meter, samples = run.data, run.meter, state.plan.samples
    epoch = state.plan.epoch(state.cursor.epoch, run.world.sampling_rank)
    data.load_state_dict(state.cursor.state())
    batches = iter(data)
    lr = after = 0.0
    while state.cursor.epoch == epoch.number and not (run.stopping or run.reached_limit(state)):
        started, waited = time.perf_counter(), data.times.wait
        batch = next(batches)
        wait = data.times.wait - waited
        start = state.cursor.consumed
        end = batch.cursor.consumed if batch.cursor.epoch == epoch.number else samples
        run.record_samples(epoch, start, end, batch.positions)
        before, after = epoch.number * samples + start, epoch.number * samples + end
        lr = state.peak_lr * run.schedule.factor((before + after) / 2)

        loss, total = train_step(run, state, batch, lr)
        state.cursor = batch.cursor
        finished = time.perf_counter()
        meter.add_times(loader_wait=wait, compute=finished - started - wait, step=finished - started)
        meter.add_samples(batch.count, total, loss)
        run.send_heartbeat(state, epoch, batch)
        if meter.is_due():
            meter.report(epoch.number, state.step, run.total_steps, lr, after / samples, data.times)
        if state.cursor.epoch == epoch.number and not run.stopping:
            run.save_if_due(state)
    if meter.steps:
        meter.report(epoch.number, state.step, run.total_steps, lr, after / samples, data.times)
    ended = state.cursor.epoch > epoch.number
    if ended:
        state.validation_due = bool(run.args.val) and is_validation_epoch(run.args, state.cursor.epoch)
    return ended and not run.stopping and not run.reached_limit(state)


def train_step(run: Trainer, state: TfTrainState, batch: Batch, lr: float) -> tuple[float, int]:
    """Make one optimizer step; set `run.stopping` if a worker has received a stop signal.

    Return the loss of this worker's samples, and the number of samples of all workers.
    """
    args, world = run.args, run.world
    timeout_s = args.peer_timeout + WATCHDOG_MARGIN_S
    # The first step builds the graph, for which workers may need very different times.
    limit_s = timeout_s if run.has_stepped else args.start_timeout + timeout_s
    world.watchdog.expect(limit_s, f"another worker did not respond for {limit_s:g} s in step {state.step + 1:,}")
    inputs: list[Any] = []
    for replica in range(world.local_replicas):
        seed = step_seed(args.seed, state.step, world.rank * world.local_replicas + replica)
        inputs += [*split_batch(batch, args.size, replica, world.local_replicas), seed]
    stop = np.float32(bool(run.stop.received))
    loss, count, stops = run.parallel.train(*inputs, stop, np.float32(lr), np.float32(state.ema_decay()))
    own_loss, samples = float(loss), int(count)
    world.watchdog.relax()
    run.stopping, run.has_stepped = bool(stops), True
    state.step += 1
    return own_loss, samples


def finish_epoch(run: Trainer, state: TfTrainState) -> None:
    """Validate if it is due, and write a checkpoint."""
    is_best = False
    if state.validation_due:
        run.save(state)  # before the validation, which may take longer than the grace period of a stop
        evaluated, beat = state.evaluated, partial(run.heartbeat, state.step)
        results = validate(run.world, run.val, evaluated, run.parallel.evaluate, run.stop, beat)
        if results is None:
            run.stopping = True
            return
        is_best = run.record_validation(state, results)
    run.save(state, best=is_best)


def validate(
    world: MirroredWorld,
    val: ValidationSet,
    evaluated: list[tuple[list[Any], list[Any]]],
    function: Callable[..., Any],
    stop: StopSignal,
    heartbeat: Callable[[], None],
) -> list[ValidationResult] | None:
    """Validate each model on this worker's share of the set, and add up the workers; None if one was stopped."""
    sums = np.zeros((len(evaluated), 4))
    values = [tuple([tf.convert_to_tensor(v) for v in group] for group in model) for model in evaluated]
    for batch in val:
        if stop.received:
            break
        heartbeat()
        if batch.count:
            for row, (weights, statistics) in zip(sums, values, strict=True):
                row += np.asarray(function(weights, statistics, batch.images, batch.labels))
    totals = world.all_reduce(np.append(sums.ravel(), float(bool(stop.received))))
    if totals[-1]:
        return None
    return build_results(totals[:-1].reshape(-1, 4).tolist())


def finish(run: Trainer, state: TfTrainState) -> int:
    """Write the last checkpoint and the SavedModel, report the end, and return the exit code."""
    if run.args.export and not run.stopping:
        directory = run.world.run_on_rank0(lambda: state.export(run.args.export))
        run.print_line(f"exported {directory}")
    return run.finish(state)


def split_batch(batch: Batch, size: int, replica: int, replicas: int) -> tuple[Any, Any, np.int64]:
    """Return the images, labels and count of one replica; an empty share has one black image, which does not count."""
    images, labels = batch.images[replica::replicas], batch.labels[replica::replicas]
    count = len(labels)
    if not count:
        images, labels = np.zeros((1, size, size, 3), dtype=np.uint8), np.zeros(1, dtype=np.int64)
    return images, labels, np.int64(count)


def _per_replica(strategy: Any, values: list[Any]) -> Any:
    """Return one value for each replica of this worker."""
    if len(values) == 1:
        return values[0]
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )


if __name__ == "__main__":
    exit_now(main(ARGS))

"""Train an image classifier with parameter servers: `python -m stoker.trainers.tf_ps --train SHARDS` in every task.

The chief coordinates; workers and parameter servers serve until they are stopped. The file reads from top to bottom:
`train` is the whole training, and the functions it calls follow. Closures carry positions in the epoch: the worker that
executes one reads the samples itself (`tf_reader.py`).

- `--updates exact`: a closure is a pure function that returns gradients. The chief adds up the shares of a global batch
  in a fixed order and applies the sum once. A closure that is repeated because its worker was lost changes nothing, so
  the weights are bit-identical to those of an undisturbed training, whichever worker computed which share.
- `--updates async`: workers apply their gradients themselves and never wait for each other. If a worker is lost after
  it has applied its gradient, its share is computed and applied again: every sample counts at least once.
"""

from __future__ import annotations

import sys

from stoker.trainers import tf_flags

if __name__ == "__main__":  # before importing TensorFlow: to report bad flags fast, and to set what it reads on import
    ARGS = tf_flags.parse_or_exit(sys.argv[1:], tf_flags.TF_PS)

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from stoker.core.units import pluralize
from stoker.errors import InputError
from stoker.sampling.order import Int64Array
from stoker.sampling.plan import Epoch, SamplingPlan, Step
from stoker.sampling.rank import Rank
from stoker.storage import join_url, redacted
from stoker.telemetry import Recorder
from stoker.tf_environment import TaskEnvironment, read_tf_environment
from stoker.trainers.checkpoint_store import Checkpoint
from stoker.trainers.rank_group import SingleRank
from stoker.trainers.startup import (
    check_same_training,
    choose_global_batch,
    load_checkpoint,
    open_store,
    run_trainer,
    start_trainer,
)
from stoker.trainers.tf_checkpoints import TF_FORMAT, read_weights
from stoker.trainers.tf_closures import IN_PROCESS_WORKERS, Workers, serve
from stoker.trainers.tf_cluster import MirroredWorld, configure_tensorflow, is_peer_lost, make_watchdog
from stoker.trainers.tf_mirrored import evaluate
from stoker.trainers.tf_network import Gradients, TfNetwork, step_seed
from stoker.trainers.tf_reader import TRAIN, VAL, PositionReader, read_positions
from stoker.trainers.tf_train_state import TfTrainState
from stoker.trainers.trainer_process import TrainerProcess
from stoker.trainers.training_data import DataAdapter, TrainingData, ValidationSet, count_classes, open_loader
from stoker.trainers.validation import ValidationResult, build_results, is_validation_epoch
from stoker.trainers.watchdog import Watchdog, exit_now, keep_alive

Trainer = TrainerProcess[SingleRank]
ASYNC_STEPS = 8
"""Global batches that are scheduled before the chief waits for all workers with `--updates async`."""
NONE: Int64Array = np.empty(0, dtype=np.int64)


def main(args: argparse.Namespace) -> int:
    """Run this task; report errors in one sentence. Programming errors keep their traceback."""

    def run(record: Recorder, resources: contextlib.ExitStack) -> int:
        task = None if args.use_in_process_cluster or args.eval_only else read_task()
        configure_tensorflow(args, min_inter_op_threads=2 * IN_PROCESS_WORKERS if task is None else 1)
        if task is not None and task.role in ("worker", "ps"):
            return serve(args, task, record)
        watchdog = make_watchdog(record)
        resources.callback(watchdog.close)
        if args.eval_only:  # needs no other tasks
            return evaluate(args, MirroredWorld(args, None, watchdog), record, resources)
        return train(args, task, watchdog, record, resources)

    return run_trainer(args, run, is_peer_lost, end=exit_now)


def read_task() -> TaskEnvironment:
    """Return the task of this process; raise InputError if it is not part of a cluster with a chief."""
    task = read_tf_environment()
    if task is None:
        raise InputError(
            "TF_CONFIG is not set",
            where="tf_ps",
            hint="run it as a job with `topology: tf-ps`, or alone with --use-in-process-cluster",
        )
    missing = [role for role in ("chief", "worker", "ps") if not task.cluster.get(role)]
    if missing or task.role not in ("chief", "worker", "ps"):
        what = f"the cluster has no {missing[0]}" if missing else f"cannot run as {task.role}"
        raise InputError(what, where="TF_CONFIG", hint="tf_ps needs one chief, and at least one worker and ps")
    return task


def train(
    args: argparse.Namespace,
    task: TaskEnvironment | None,
    watchdog: Watchdog,
    record: Recorder,
    resources: contextlib.ExitStack,
) -> int:
    """Coordinate the training to its last epoch, to --num-batches or until stopped; return the exit code."""
    world = SingleRank()
    print_line = start_trainer(args, world, record, resources)
    store = None if args.synthetic else open_store(args, world, record, resources, TF_FORMAT)
    name, checkpoint = load_checkpoint(args, world, store) if store is not None else ("", None)
    meta = checkpoint["meta"] if checkpoint else {}
    count = len(task.cluster["worker"]) if task is not None else IN_PROCESS_WORKERS
    global_batch = choose_global_batch(args, count, meta, print_line)
    # The chief needs the plan of the sets; their samples are read by the workers.
    adapter = DataAdapter(open_loader)
    data = TrainingData.open(args, world.sampling_rank, global_batch, adapter)
    resources.callback(data.close)
    val = ValidationSet.open(args, world.sampling_rank, global_batch, adapter) if args.val else None
    num_classes = count_classes(args, meta, data, val.loader if val else None)

    reader = PositionReader(args, num_classes).register()  # for workers in this process
    resources.callback(reader.close)
    start_s = float(args.start_timeout + args.peer_timeout)
    with watchdog.bound(start_s, f"a task did not respond within {start_s:g} s, while the weights were created"):
        workers = Workers(args, task, watchdog)
        state = create_state(args, workers, watchdog, data, global_batch, num_classes, name, checkpoint)
    functions = build_functions(state, workers, watchdog)
    keep_alive(workers, state, functions)
    run = Trainer(args, world, record, print_line, data, val, store, functions)
    run.workers = f"{pluralize(workers.count, 'worker')} with {args.updates} updates"
    run.prepare(state)
    run.announce(state, resumed_from=name)
    if state.cursor.epoch >= args.epochs and not state.validation_due:
        return run.report_finished(state)
    run.open_ledger(state, resources)

    run.stop.install(immediate=False)
    run_epoch = run_exact_epoch if args.updates == "exact" else run_async_epoch
    while not run.is_done(state):
        if state.validation_due or run_epoch(run, state):
            finish_epoch(run, state)
    if args.export and not run.stopping:
        print_line(f"exported {state.export(args.export)}")
    return run.finish(state)


def create_state(
    args: argparse.Namespace,
    workers: Workers,
    watchdog: Watchdog,
    data: TrainingData,
    global_batch: int,
    num_classes: int,
    name: str,
    checkpoint: Checkpoint | None,
) -> TfTrainState:
    """Create the variables on the parameter servers: from the checkpoint, from a file, or from the seed."""
    meta = checkpoint["meta"] if checkpoint else {}
    state = TfTrainState(
        args,
        TfNetwork(args, num_classes),
        data.plan,
        strategy=workers.strategy,
        global_batch=global_batch,
        num_classes=num_classes,
        classes=data.classes,
        peak_lr=args.lr if args.lr is not None else meta.get("lr"),
        bound=lambda: bound_server(args, watchdog),
    )
    if checkpoint:
        where = join_url(redacted(args.checkpoint_dir), name)
        check_same_training(args, meta, data, num_classes, where)
        state.load_state_dict(checkpoint, where=where)
    elif args.init_from:
        state.load_weights(read_weights(args.init_from)[0], where=args.init_from)
    return state


def bound_server(args: argparse.Namespace, watchdog: Watchdog) -> contextlib.AbstractContextManager[None]:
    """Bound what needs parameter servers only."""
    return watchdog.bound(args.peer_timeout, f"a parameter server did not respond for {args.peer_timeout:g} s")


class ParameterServerFunctions(NamedTuple):
    """The computations of a training: the first three run on workers, `apply` where the variables are."""

    workers: Workers
    watchdog: Watchdog
    gradients: Any
    update: Any
    evaluate: list[Any]
    apply: Any


def build_functions(state: TfTrainState, workers: Workers, watchdog: Watchdog) -> ParameterServerFunctions:
    """Build the functions of TensorFlow that a training uses."""
    network, size = state.network, state.network.size
    scalar, integer = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64)
    positions = tf.TensorSpec([None], tf.int64)

    def compute(epoch: Any, positions: Any, upcoming: Any, seed: Any) -> Gradients:
        images, labels, count = read_positions(TRAIN, epoch, positions, upcoming, size)
        weights, statistics = ([tf.convert_to_tensor(v) for v in group] for group in (state.weights, state.statistics))
        return network.gradients(weights, statistics, images, labels, count, seed)

    def gradients(epoch: Any, positions: Any, upcoming: Any, seed: Any) -> list[Any]:
        return compute(epoch, positions, upcoming, seed).flatten()

    def update(epoch: Any, positions: Any, upcoming: Any, seed: Any, lr: Any) -> tuple[Any, Any]:
        own = compute(epoch, positions, upcoming, seed)
        state.apply_share(own, lr)
        return own.loss, own.count

    def make_evaluate(weights: list[Any], statistics: list[Any]) -> Any:
        def evaluate(positions: Any, upcoming: Any) -> Any:
            images, labels, count = read_positions(VAL, tf.constant(0, tf.int64), positions, upcoming, size)
            sums = network.evaluate(
                [tf.convert_to_tensor(v) for v in weights],
                [tf.convert_to_tensor(v) for v in statistics],
                images,
                labels,
            )
            return tf.where(count > 0, sums, tf.zeros_like(sums))

        return tf.function(evaluate, input_signature=[positions, positions])

    def apply(sums: list[Any], lr: Any, decay: Any) -> None:
        number = len(state.weights)
        state.apply(Gradients(sums[:number], sums[number:-2], sums[-2], sums[-1]), lr, decay)

    shapes = [tf.TensorSpec(v.shape, tf.float32) for v in [*state.weights, *state.statistics]]
    batch = [integer, positions, positions, integer]
    return ParameterServerFunctions(
        workers,
        watchdog,
        tf.function(gradients, input_signature=batch),
        tf.function(update, input_signature=[*batch, scalar]),
        [make_evaluate(*model) for model in state.evaluated],
        tf.function(apply, input_signature=[[*shapes, scalar, scalar], scalar, scalar]),
    )


def run_exact_epoch(run: Trainer, state: TfTrainState) -> bool:
    """Train on the rest of an epoch, one global batch after the other; return whether it is complete."""
    functions, args = run.parallel, run.args
    epoch = state.plan.epoch(state.cursor.epoch, Rank())
    for shares, upcoming in with_upcoming(split_steps(epoch, state, functions.workers.count)):
        if run.stopping or run.reached_limit(state):
            break
        started = time.perf_counter()
        lr, after = begin_step(run, state, epoch, shares)
        arguments = [
            (np.int64(epoch.number), share.positions, hint, step_seed(args.seed, state.step, index))
            for index, (share, hint) in enumerate(zip(shares, upcoming, strict=True))
            if len(share.positions)
        ]
        results = functions.workers.run(functions.gradients, arguments, lambda: run.heartbeat(state.step))
        computed = time.perf_counter()
        # In the order of the shares, whichever worker was first.
        sums = [np.sum(parts, axis=0, dtype=np.float32) for parts in zip(*results, strict=True)]
        with bound_server(args, functions.watchdog):
            functions.apply(sums, np.float32(lr), np.float32(state.ema_decay()))
        finished = time.perf_counter()
        run.meter.add_times(loader_wait=0.0, compute=computed - started, apply=finished - computed)
        run.meter.add_times(step=finished - started)
        run.meter.add_samples(int(sums[-1]), int(sums[-1]), float(sums[-2]))
        end_steps(run, state, epoch, [shares[0].end], lr, after)
    return end_epoch(run, state, epoch)


def run_async_epoch(run: Trainer, state: TfTrainState) -> bool:
    """Train on the rest of an epoch with several global batches in flight; return whether it is complete."""
    functions, args = run.parallel, run.args
    epoch = state.plan.epoch(state.cursor.epoch, Rank())
    steps = with_upcoming(split_steps(epoch, state, functions.workers.count))
    while not (run.stopping or run.reached_limit(state)):
        room = args.num_batches - state.step if args.num_batches else ASYNC_STEPS
        if not (round_steps := list(islice(steps, min(ASYNC_STEPS, room)))):
            break
        started, arguments, lr, after = time.perf_counter(), [], 0.0, 0
        for number, (shares, upcoming) in enumerate(round_steps):
            lr, after = begin_step(run, state, epoch, shares)
            arguments += [
                (
                    np.int64(epoch.number),
                    share.positions,
                    hint,
                    step_seed(args.seed, state.step + number, index),
                    np.float32(lr),
                )
                for index, (share, hint) in enumerate(zip(shares, upcoming, strict=True))
                if len(share.positions)
            ]
        results = functions.workers.run(functions.update, arguments, lambda: run.heartbeat(state.step))
        length = time.perf_counter() - started
        losses, counts = (sum(float(value) for value in values) for values in zip(*results, strict=True))
        run.meter.add_times(loader_wait=0.0, compute=length, step=length)
        run.meter.add_samples(int(counts), int(counts), losses)
        end_steps(run, state, epoch, [shares[0].end for shares, _ in round_steps], lr, after)
    return end_epoch(run, state, epoch)


def split_steps(epoch: Epoch, state: TfTrainState, workers: int) -> Iterator[tuple[Step, ...]]:
    """Yield the share of each worker in every step from the cursor to the end of the epoch."""
    shares = (epoch.for_rank(Rank(number, workers)) for number in range(workers))
    return zip(*(share.steps(state.cursor.consumed, state.global_batch) for share in shares), strict=True)


def with_upcoming(steps: Iterator[tuple[Step, ...]]) -> Iterator[tuple[tuple[Step, ...], list[Int64Array]]]:
    """Yield each step with the positions of the next one, which workers may read ahead."""
    current = next(steps, None)
    while current is not None:
        following = next(steps, None)
        yield current, [share.positions for share in following] if following else [NONE] * len(current)
        current = following


def begin_step(run: Trainer, state: TfTrainState, epoch: Epoch, shares: tuple[Step, ...]) -> tuple[float, int]:
    """Write the ledger; return the learning rate, and the samples seen after the step."""
    samples, start = state.plan.samples, shares[0].start
    end = shares[0].end.consumed if shares[0].end.epoch == epoch.number else samples
    run.record_samples(epoch, start, end, np.concatenate([share.positions for share in shares]))
    before, after = epoch.number * samples + start, epoch.number * samples + end
    return state.peak_lr * run.schedule.factor((before + after) / 2), after


def end_steps(run: Trainer, state: TfTrainState, epoch: Epoch, ends: list[Any], lr: float, after: int) -> None:
    """Advance over steps that all workers have finished; report and write a checkpoint if they are due."""
    state.step, state.cursor = state.step + len(ends), ends[-1]
    run.stopping = bool(run.stop.received)
    run.heartbeat(state.step)
    is_complete = state.cursor.epoch > epoch.number
    if run.meter.is_due() or is_complete or run.stopping or run.reached_limit(state):
        epochs = after / state.plan.samples
        run.meter.report(epoch.number, state.step, run.total_steps, lr, epochs, run.data.times)
    if not is_complete and not run.stopping:
        run.save_if_due(state)


def end_epoch(run: Trainer, state: TfTrainState, epoch: Epoch) -> bool:
    """Return whether the epoch is complete and the training does not stop."""
    is_complete = state.cursor.epoch > epoch.number
    if is_complete:
        state.validation_due = bool(run.args.val) and is_validation_epoch(run.args, state.cursor.epoch)
    return is_complete and not run.stopping and not run.reached_limit(state)


def finish_epoch(run: Trainer, state: TfTrainState) -> None:
    """Validate if it is due, and write a checkpoint."""
    is_best = False
    if state.validation_due:
        run.save(state)  # before the validation, which may take longer than the grace period of a stop
        plan: SamplingPlan = run.val.loader.plan
        results = validate(run.parallel, plan, state.global_batch, lambda: run.heartbeat(state.step))
        if run.stop.received:
            run.stopping = True
            return
        is_best = run.record_validation(state, results)
    run.save(state, best=is_best)


def validate(
    functions: ParameterServerFunctions, plan: SamplingPlan, global_batch: int, on_poll: Callable[[], None]
) -> list[ValidationResult]:
    """Validate each model on the workers, in batches of the size of a share."""
    size = max(1, min(global_batch // functions.workers.count, plan.samples))
    batches = [np.arange(start, min(start + size, plan.samples)) for start in range(0, plan.samples, size)]
    following = [*batches[1:], NONE]
    arguments = list(zip(batches, following, strict=True))
    results = [functions.workers.run(function, arguments, on_poll) for function in functions.evaluate]
    return build_results([np.sum(rows, axis=0).tolist() for rows in results])


if __name__ == "__main__":
    exit_now(main(ARGS))

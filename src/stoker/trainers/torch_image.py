"""Train an image classifier: `python -m stoker.trainers.torch_image --train SHARDS`, directly or with torchrun.

The file reads from top to bottom: `main` turns errors into messages and exit codes, `train` is the whole training, and
the functions it calls follow: `run_epoch`, `train_step`, `finish_epoch`, `validate`. What makes it exact:

- The loss of a step is each rank's sum, times the number of ranks, divided by the true number of samples on all ranks.
  DDP averages gradients over the ranks, so the result is that of one process with the whole batch, even if the shares
  of the ranks are uneven, empty or contain bad samples.
- That takes an all-reduce of one number per step, which overlaps with the forward pass. The number also carries stop
  requests, so that all ranks stop after the same step.
- Randomness depends on (seed, step, rank), the order on the sampling plan, the learning rate on the samples seen. So a
  checkpoint holds weights, momentum and a cursor, and can be resumed with another world size.
"""

from __future__ import annotations

import sys

from stoker.trainers import flags

if __name__ == "__main__":  # before importing torch: to report bad flags fast, and to set what torch reads on import
    ARGS = flags.parse_or_exit(sys.argv[1:])

import argparse
import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from stoker.core.permutations import seed_key
from stoker.load.loader import Loader
from stoker.load.torch import Dataset, TorchBatch, normalize
from stoker.sampling.rank import Rank
from stoker.storage import join_url, redacted
from stoker.telemetry import Recorder
from stoker.trainers import checkpoints, models
from stoker.trainers.checkpoint_store import CheckpointMeta
from stoker.trainers.checkpoints import TORCH_FORMAT
from stoker.trainers.join import JoinProgress, sync_ranks, uneven_inputs
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
from stoker.trainers.train_state import TrainState, copy_for_averaging, update_ema
from stoker.trainers.trainer_process import TrainerProcess
from stoker.trainers.training_data import DataAdapter, TrainingData, ValidationSet, count_classes
from stoker.trainers.validation import (
    ValidationResult,
    build_results,
    format_results,
    is_validation_epoch,
    record_results,
)
from stoker.trainers.world import World, exit_with_parent

Trainer = TrainerProcess[World]
STOP = 1 << 40
"""Added to the sample count of a step by each rank that has received a stop signal; larger than any batch."""
PEER_LOST_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "onnection refused"),  # gloo
    *("ncclRemoteError", "remote process exited", "NCCL communicator was aborted"),
)
"""Parts of the messages that torch raises when another rank has died."""


def main(args: argparse.Namespace) -> int:
    """Train or evaluate; report errors in one sentence. Programming errors keep their traceback."""

    def run(record: Recorder, resources: contextlib.ExitStack) -> int:
        return (evaluate if args.eval_only else train)(args, World(args), record, resources)

    return run_trainer(args, run, is_peer_lost)


def is_peer_lost(error: Exception) -> bool:
    """Return whether an error means that another rank has died."""
    is_distributed = Rank.from_environ(os.environ).world_size > 1
    return is_distributed and any(part in str(error) for part in PEER_LOST_ERRORS)


def train(args: argparse.Namespace, world: World, record: Recorder, resources: contextlib.ExitStack) -> int:
    """Train to the last epoch, to --num-batches or until stopped; return the exit code."""
    print_line = start_trainer(args, world, record, resources)
    if args.synthetic and args.checkpoint_dir:
        print_line(f"--synthetic: not reading or writing checkpoints in {redacted(args.checkpoint_dir)}")
        args = argparse.Namespace(**{**vars(args), "checkpoint_dir": None})

    # Only rank 0 reads and writes checkpoints; the others receive what it has read.
    store = open_store(args, world, record, resources, TORCH_FORMAT)
    name, checkpoint = load_checkpoint(args, world, store)
    meta: CheckpointMeta = checkpoint["meta"] if checkpoint else {}
    global_batch = choose_global_batch(args, world.size, meta, print_line)
    adapter = _data_adapter(world.device)
    data = world.run_on_all(lambda: TrainingData.open(args, world.sampling_rank, global_batch, adapter))
    resources.callback(data.close)
    val = None
    if args.val:
        val = world.run_on_all(lambda: ValidationSet.open(args, world.sampling_rank, global_batch, adapter))
    loader = val.loader if val else None
    num_classes = world.broadcast(world.run_on_rank0(lambda: count_classes(args, meta, data, loader)))
    assert num_classes is not None

    # The same weights on all ranks: from the checkpoint, from a file, or from the seed.
    model = _build_model(args, world, num_classes)
    if args.init_from and not checkpoint:
        _init_weights(args, world, model)
    model.to(world.device)
    state = TrainState(
        args,
        model,
        data.plan,
        device=world.device,
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
    compiled = _compile(args, model) if args.compile else model
    parallel: Any = _wrap_ddp(args, compiled, world.device) if world.size > 1 else compiled
    run = TrainerProcess(args, world, record, print_line, data, val, store, parallel)
    run.prepare(state)
    run.announce(state, resumed_from=name)
    if state.cursor.epoch >= args.epochs and not state.validation_due:
        return run.report_finished(state)
    run.open_ledger(state, resources)

    run.stop.install(immediate=run.is_join)
    model.train()
    while not run.is_done(state):
        if state.validation_due or run_epoch(run, state):
            finish_epoch(run, state)
    return run.finish(state)


def evaluate(args: argparse.Namespace, world: World, record: Recorder, resources: contextlib.ExitStack) -> int:
    """Validate a checkpoint, or with --init-from the weights of a file, and report the result."""
    print_line = start_trainer(args, world, record, resources)
    store = open_store(args, world, record, resources, TORCH_FORMAT)
    name, checkpoint = "", None
    if not args.init_from:
        name, checkpoint = load_checkpoint(args, world, store)
    meta: CheckpointMeta = checkpoint["meta"] if checkpoint else {}
    global_batch = choose_global_batch(args, world.size, meta, print_line)
    adapter = _data_adapter(world.device)
    val = world.run_on_all(lambda: ValidationSet.open(args, world.sampling_rank, global_batch, adapter))
    num_classes = world.broadcast(world.run_on_rank0(lambda: count_classes(args, meta, None, val.loader)))
    assert num_classes is not None

    model = _build_model(args, world, num_classes)
    if checkpoint:
        where = join_url(redacted(args.checkpoint_dir), name)
        world.run_on_all(lambda: check_same_training(args, meta, None, num_classes, where))
        world.run_on_all(lambda: checkpoints.load_weights(model, checkpoint["model"], where=where))
        average = checkpoint["ema"]
    else:
        average = _init_weights(args, world, model)
    model.to(world.device)
    evaluated = [model]
    if average:
        evaluated.append(copy_for_averaging(model))
        evaluated[1].load_state_dict(average)
    step = meta.get("step", 0)
    results = validate(args, world, val, evaluated, StopSignal(), partial(HeartbeatSender(record), step))
    assert results is not None
    print_line(f"{name or redacted(args.init_from)}: {format_results(results)}")
    record_results(record if world.rank == 0 else None, results, step)
    return 0


def run_epoch(run: Trainer, state: TrainState) -> bool:
    """Train on the rest of an epoch; return whether it is complete and the training does not stop."""
    data, meter, samples = run.data, run.meter, state.plan.samples
    epoch = state.plan.epoch(state.cursor.epoch, run.world.sampling_rank)
    progress = JoinProgress() if run.is_join else None
    data.load_state_dict(state.cursor.state())
    batches, ended = iter(data), False
    with uneven_inputs(run.parallel, run.world) if run.is_join else contextlib.nullcontext():
        while not (run.stopping or run.reached_limit(state)):
            started, waited = time.perf_counter(), data.times.wait
            batch = next(batches, None)
            if batch is None:
                ended = True
                break
            wait = data.times.wait - waited  # the rest of next() is the copy to the device
            torch.manual_seed(seed_key("step", run.args.seed, state.step, run.world.rank))
            if progress is None:
                start = state.cursor.consumed
                end = batch.cursor.consumed if batch.cursor.epoch == epoch.number else samples
                seen = start, end
            else:
                start, end = progress.step_range(batch)
                seen = progress.samples_seen(state.global_batch)
            before, after = (epoch.number * samples + min(samples, count) for count in seen)
            run.record_samples(epoch, start, end, batch.positions)
            lr = state.peak_lr * run.schedule.factor((before + after) / 2)

            result = train_step(run, state, batch, lr)
            if progress is None:
                state.cursor = batch.cursor
            else:
                progress.advance(end)
            finished = time.perf_counter()
            collective = result.agreed_at - result.forward_at
            h2d, compute = result.copied_at - started - wait, finished - result.copied_at - collective
            meter.add_times(loader_wait=wait, h2d=h2d, collective_wait=collective, step=finished - started)
            meter.add_times(compute=compute)
            meter.add_samples(batch.count, result.samples * (run.world.size if run.is_join else 1), result.loss_sum)
            run.send_heartbeat(state, epoch, batch)
            if meter.is_due():
                meter.report(epoch.number, state.step, run.total_steps, lr, after / samples, data.times)
            if not run.is_join and state.cursor.epoch == epoch.number and not run.stopping:
                run.save_if_due(state)
    if meter.steps:
        meter.report(epoch.number, state.step, run.total_steps, lr, after / samples, data.times)
    if ended and run.is_join:
        sync_ranks(run.world, state)
        state.cursor = state.plan.start_cursor(epoch.number + 1)
    ended = ended or state.cursor.epoch > epoch.number
    if ended:
        state.validation_due = bool(run.args.val) and is_validation_epoch(run.args, state.cursor.epoch)
    return ended and not run.stopping and not run.reached_limit(state)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One training step: the sum of this rank's losses, the samples of all ranks, and when its parts were done."""

    loss_sum: torch.Tensor
    samples: int
    copied_at: float
    forward_at: float
    agreed_at: float


def train_step(run: Trainer, state: TrainState, batch: TorchBatch, lr: float) -> StepResult:
    """Make one optimizer step; set `run.stopping` if a rank has received a stop signal."""
    args, world, device, model = run.args, run.world, run.world.device, state.model
    total = None if run.is_join else world.all_reduce_async(batch.count + STOP * bool(run.stop.received))
    images, labels = _to_inputs(args, batch, device)
    copied_at = time.perf_counter()

    # An empty share runs through the model too, with a weight of zero, so that the collectives of the ranks match.
    # Neither it nor a last share of one sample may change the statistics of BatchNorm.
    skip_stats = batch.count == 0 or (batch.count == 1 and state.global_batch >= 2 * world.size)
    frozen = freeze_batchnorm(model) if skip_stats else []
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    with _autocast(args, device):
        out = run.parallel(images)
    if batch.count:
        loss = cross_entropy(out.float(), labels, reduction="sum", label_smoothing=args.label_smoothing)
    else:
        loss = out.float().sum() * 0.0
    forward_at = time.perf_counter()
    count = total() if total is not None else batch.count
    agreed_at = time.perf_counter()
    run.stopping, samples = count >= STOP, count % STOP
    weight = (1.0 if run.is_join else world.size) / max(1, samples)
    state.optimizer.zero_grad(set_to_none=True)
    state.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
    if args.clip_grad:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    for norm in frozen:
        norm.train()
    state.step += 1
    if state.ema is not None:
        update_ema(state.ema, model, min(args.ema, (1 + state.step) / (10 + state.step)))
    return StepResult(loss.detach(), samples, copied_at, forward_at, agreed_at)


def finish_epoch(run: Trainer, state: TrainState) -> None:
    """Validate if it is due, and write a checkpoint; at the end of an epoch all ranks hold the same weights."""
    is_best = False
    if state.validation_due:
        run.save(state)  # before the validation, which may take longer than the grace period of a stop
        results = validate(run.args, run.world, run.val, state.models, run.stop, partial(run.heartbeat, state.step))
        if results is None:
            run.stopping = True
            return
        is_best = run.record_validation(state, results)
    run.save(state, best=is_best)


def validate(
    args: argparse.Namespace,
    world: World,
    val: Iterable[TorchBatch],
    evaluated: list[nn.Module],
    stop: StopSignal,
    heartbeat: Callable[[], None],
) -> list[ValidationResult] | None:
    """Validate each model on this rank's share of the set, and add up the ranks; None if a rank was stopped."""
    device = world.device
    sums = torch.zeros(len(evaluated), 4, dtype=torch.float64, device=device)
    modes = [model.training for model in evaluated]
    for model in evaluated:
        model.eval()
        world.broadcast_buffers(model)
    with torch.inference_mode():
        for batch in val:
            if stop.received:
                break
            heartbeat()
            if not batch.count:
                continue
            images, labels = _to_inputs(args, batch, device)
            for model, row in zip(evaluated, sums, strict=True):
                with _autocast(args, device):
                    out = model(images).float()
                correct = out.topk(min(5, out.shape[1]), dim=1).indices == labels[:, None]
                loss = cross_entropy(out, labels, reduction="sum")
                count = torch.tensor(batch.count, device=device)
                row += torch.stack([loss, correct[:, 0].sum(), correct.any(dim=1).sum(), count])
    for model, mode in zip(evaluated, modes, strict=True):
        model.train(mode)
    totals = torch.cat([sums.cpu().flatten(), torch.tensor([float(bool(stop.received))], dtype=torch.float64)])
    world.all_reduce(totals)
    if totals[-1]:
        return None
    rows = totals[:-1].view(len(evaluated), 4).tolist()
    return build_results(rows)


def _data_adapter(device: torch.device) -> DataAdapter:
    """Return how tensors of batches are made."""

    def open_dataset(url: Any, **options: Any) -> tuple[Dataset, Loader]:
        dataset = Dataset(url, device=device, **options)
        return dataset, dataset.loader

    def to_device(images: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(images).permute(0, 3, 1, 2).to(device), torch.from_numpy(labels).to(device)

    return DataAdapter(open_dataset, to_device, TorchBatch)


def _build_model(args: argparse.Namespace, world: World, num_classes: int) -> nn.Module:
    def build() -> nn.Module:
        model = models.build_model(
            args.model, num_classes=num_classes, size=args.size, stem=args.stem, zero_gamma=args.zero_gamma
        )
        if args.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    torch.manual_seed(seed_key("model", args.seed))
    return world.run_on_all(build)


def _init_weights(args: argparse.Namespace, world: World, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Load the weights of --init-from; return their moving average, if the file has one."""
    weights = world.broadcast(world.run_on_rank0(lambda: checkpoints.read_weights(args.init_from)))
    assert weights is not None
    world.run_on_all(lambda: checkpoints.load_weights(model, weights.model, where=args.init_from))
    return weights.ema


def _compile(args: argparse.Namespace, model: nn.Module) -> Any:
    """Compile the model; with --deterministic once per input shape, so that the order of the shapes has no effect."""
    if not args.deterministic:
        return torch.compile(model)
    limits = torch._dynamo.config
    limits.cache_size_limit = limits.accumulated_cache_size_limit = 1 << 16  # above it, new shapes run uncompiled
    return torch.compile(model, dynamic=False)


def _wrap_ddp(args: argparse.Namespace, model: Any, device: torch.device) -> DistributedDataParallel:
    """Average gradients over the ranks."""
    # The BatchNorm statistics that count are those of rank 0; the others receive them before a validation. A share of
    # one sample is normalized with them, so --deterministic needs them on all ranks at every step.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=args.deterministic,  # otherwise buckets are rebuilt, and sums differ in the last bits
        **{buffers: args.deterministic},
    )


def _to_inputs(args: argparse.Namespace, batch: TorchBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a batch to the device and normalize it; return a single black image for an empty batch."""
    images, labels = batch.images, batch.labels
    if not batch.count:
        images = torch.zeros(1, 3, args.size, args.size, dtype=torch.uint8)
        labels = torch.zeros(1, dtype=torch.int64)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    images = normalize(images.to(device, non_blocking=True)).contiguous(memory_format=memory_format)
    return images, labels.to(device, non_blocking=True)


def _autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=args.precision != "fp32")


def freeze_batchnorm(model: nn.Module) -> list[nn.Module]:
    """Switch each BatchNorm to eval mode and return them; not SyncBatchNorm, whose ranks wait for each other."""
    kinds, synced = nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm
    norms = [module for module in model.modules() if isinstance(module, kinds) and not isinstance(module, synced)]
    return [norm.eval() for norm in norms if norm.training]


if __name__ == "__main__":
    exit_with_parent()
    sys.exit(main(ARGS))

"""A training process: its flags, ranks, data and outputs, and what it reports at the start and at the end."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from stoker.core.units import pluralize
from stoker.sampling.order import Int64Array
from stoker.sampling.plan import Epoch
from stoker.telemetry import Recorder
from stoker.trainers.checkpoint_store import CheckpointStore
from stoker.trainers.data_report import DataReporter
from stoker.trainers.ledger import Ledger, next_session
from stoker.trainers.meter import HeartbeatSender, Meter
from stoker.trainers.progress import ResumableState
from stoker.trainers.rank_group import RankGroup
from stoker.trainers.schedule import LearningRateSchedule
from stoker.trainers.stop_signal import StopSignal
from stoker.trainers.training_data import TrainingData
from stoker.trainers.validation import ValidationResult, format_results, record_results

RERUN_TO_RESUME = "run the same command to resume"


def how_to_resume(environ: Mapping[str, str]) -> str:
    """Return how a training that was stopped is resumed: a run of `stoker job` has a command of its own."""
    run = environ.get("STOKER_RUN")
    return f"resume with: stoker job run --resume {run}" if run else RERUN_TO_RESUME


def stopped_after(step: int) -> str:
    """Return the message of a training that stopped because of a signal."""
    return f"stopped after step {step:,}"


WorldT = TypeVar("WorldT", bound=RankGroup)


class TrainerProcess(Generic[WorldT]):
    """What one process needs to train: flags, ranks, data, and where results go. Nothing of it is in a checkpoint."""

    def __init__(
        self,
        args: argparse.Namespace,
        world: WorldT,
        record: Recorder,
        print_line: Callable[[str], None],
        data: TrainingData,
        val: Any,
        store: CheckpointStore | None,
        parallel: Any,
    ) -> None:
        self.args, self.world, self.record, self.print_line = args, world, record, print_line
        self.data, self.val, self.store, self.parallel = data, val, store, parallel
        samples = data.plan.samples
        self.schedule = LearningRateSchedule(
            kind=args.schedule,
            total=args.epochs * samples,
            warmup=round(args.warmup_epochs * samples),
            milestones=tuple(round(epoch * samples) for epoch in args.milestones),
            gamma=args.gamma,
        )
        self.is_join = args.sampling == "join"
        self.heartbeat, self.meter = HeartbeatSender(record), Meter(args, record, print_line, world.rank)
        self._data_reporter = DataReporter(record)
        self.ledger: Ledger | None = None
        self.stop = StopSignal()
        self.stopping = False
        """Whether the ranks have agreed to stop."""
        self.has_stepped = False
        """Whether this process has made a step, so that its functions are compiled."""
        self.total_steps = 0
        self.workers = ""
        """What trains, if it is not the ranks of `world`."""
        self._saved_at, self._saved_step = time.monotonic(), 0

    def prepare(self, state: ResumableState) -> None:
        """Compute the total number of steps; --checkpoint-every-steps counts from this state on."""
        args, rank, plan, cursor = self.args, self.world.sampling_rank, state.plan, state.cursor
        per_epoch = plan.epoch(0, rank).count_steps(0, state.global_batch)
        remaining = plan.epoch(cursor.epoch, rank).count_steps(cursor.consumed, state.global_batch)
        self.total_steps = max(state.step, state.step + remaining + (args.epochs - cursor.epoch - 1) * per_epoch)
        if args.num_batches:
            self.total_steps = min(self.total_steps, args.num_batches)
        self._saved_step = state.step

    def announce(self, state: ResumableState, *, resumed_from: str) -> None:
        """Report the start or the resume."""
        args, world, plan, cursor = self.args, self.world, state.plan, state.cursor
        parameters, ranks = state.parameter_count, self.workers or pluralize(world.size, "rank")
        what = (
            f"{args.model} ({parameters:,} parameters) on {ranks} ({world.device_type}), "
            f"{pluralize(plan.samples, 'sample')} × {pluralize(args.epochs, 'epoch')}"
        )
        if world.rank == 0:
            numbers = {"epochs": args.epochs, "total_steps": self.total_steps, "world": world.size}
            numbers |= {"global_batch": state.global_batch, "parameters": parameters, "samples": plan.samples}
            self.record.mark("start", what, model=args.model, **numbers)
        self.print_line(
            f"{what}, global batch {state.global_batch:,}, learning rate {state.peak_lr:g} ({args.schedule})"
        )
        if resumed_from:
            detail = f"resuming at epoch {cursor.epoch}, {cursor.consumed:,} of {plan.samples:,} samples, "
            detail += f"step {state.step:,}"
            if world.rank == 0:
                fields = {"epoch": cursor.epoch, "consumed": cursor.consumed, "step": state.step}
                self.record.mark("resume", detail, **fields, **{"from": resumed_from})
            self.print_line(f"{resumed_from}: {detail}" + ("; ignoring --init-from" if args.init_from else ""))

    def open_ledger(self, state: ResumableState, resources: contextlib.ExitStack) -> None:
        """Open the ledger, if there is to be one."""
        if self.args.ledger:
            world, folder = self.world, self.args.ledger
            session = world.broadcast(world.run_on_rank0(lambda: next_session(folder))) or 0
            attempt, cursor = self.record.attempt, state.cursor
            self.ledger = Ledger(folder, rank=world.rank, attempt=attempt, session=session, cursor=cursor)
            resources.callback(self.ledger.close)

    def record_samples(self, epoch: Epoch, start: int, end: int, positions: Int64Array) -> None:
        """Write the samples of a step to the ledger, if there is one."""
        if self.ledger is not None:
            location = epoch.locate(positions)
            pairs = zip(location.shards.tolist(), location.samples.tolist(), strict=True)
            self.ledger.step(epoch.number, start, end, list(pairs))

    def send_heartbeat(self, state: ResumableState, epoch: Epoch, batch: Any) -> None:
        """Send a heartbeat with the last sample of the batch, if one is due; report what the loader skipped."""
        is_due, is_last = self.heartbeat.is_due(), batch.cursor.epoch != epoch.number
        if self.data.loader is not None and (is_due or is_last):
            self._data_reporter.report(self.data.loader, epoch.number, state.step)
        if is_due:
            location = epoch.locate(batch.positions[-1:])
            shard = self.data.shard_name(int(location.shards[0])) if batch.count else ""
            self.heartbeat(state.step, shard, int(location.samples[0]) if batch.count else -1)

    def record_validation(self, state: ResumableState, results: list[ValidationResult]) -> bool:
        """Record and print the results of a validation; return whether they are the best so far."""
        state.validation_due = False
        state.metrics = record_results(self.record if self.world.rank == 0 else None, results, state.step)
        top1 = results[-1].top1  # of the moving average, if there is one
        is_best, state.best_top1 = top1 > state.best_top1, max(state.best_top1, top1)
        self.print_line(f"epoch {state.cursor.epoch - 1} {format_results(results)}")
        return is_best

    def is_done(self, state: ResumableState) -> bool:
        """Whether to stop before the next epoch."""
        finished = state.cursor.epoch >= self.args.epochs and not state.validation_due
        return finished or self.stopping or self.reached_limit(state)

    def reached_limit(self, state: ResumableState) -> bool:
        """Whether the step limit of --num-batches is reached."""
        return bool(self.args.num_batches) and state.step >= self.args.num_batches

    def save(self, state: ResumableState, *, best: bool = False) -> None:
        """Write a checkpoint in the background, on rank 0."""
        if self.store is not None:
            self.store.save(state.state_dict(), state.step, best=best)
            self._saved_at, self._saved_step = time.monotonic(), state.step

    def save_if_due(self, state: ResumableState) -> None:
        """Write a checkpoint if one is due by --checkpoint-every or --checkpoint-every-steps."""
        every_s, every_steps = self.args.checkpoint_every, self.args.checkpoint_every_steps
        steps_due = every_steps and state.step - self._saved_step >= every_steps
        time_due = every_s and time.monotonic() - self._saved_at >= every_s
        if self.store is not None and (steps_due or (time_due and not self.store.is_writing)):
            self.save(state)

    def report_finished(self, state: ResumableState) -> int:
        """Report that the checkpoint was at the last epoch already; return the exit code."""
        top1 = state.metrics.get("val_top1")
        if self.world.rank == 0:
            self.record.mark("end", "already finished", val_top1=top1)
        result = f", validation top-1 {top1:.2%}" if top1 is not None else ""
        self.print_line(
            f"training is already finished: {pluralize(state.cursor.epoch, 'epoch')}{result}; "
            "increase --epochs to continue"
        )
        return 0

    def finish(self, state: ResumableState) -> int:
        """Write the last checkpoint, report the end, and return the exit code."""

        def write_last() -> None:
            if self.store is not None:
                if (self.stopping or self.args.num_batches) and not self.is_join:
                    self.save(state)
                self.store.close()

        # All ranks wait for it: torchrun kills those that still run half a minute after the first one has exited.
        self.world.run_on_rank0(write_last)
        if self.stopping:
            if self.world.rank == 0 or self.stop.received:
                self.record.mark("stop", stopped_after(state.step))
            hint = f"; {how_to_resume(os.environ)}" if self.args.checkpoint_dir and not self.is_join else ""
            self.print_line(stopped_after(state.step) + hint)
            return 128 + (self.stop.received or signal.SIGTERM)
        if self.world.rank == 0:
            self.record.mark("end", f"trained {state.step:,} steps", val_top1=state.metrics.get("val_top1"))
        self.print_line(f"done: {state.step:,} steps, {self.meter.images_per_s:,.0f} images/s")
        return 0

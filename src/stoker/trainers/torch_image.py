"""Train an image classifier: `python -m stoker.trainers.torch_image --train SHARDS`, plainly or under torchrun.

The file reads from top to bottom: `main` turns errors into sentences, `train` is the whole training, and below it come
the parts that it uses. What makes it exact:

- The loss of a step is each rank's sum, times the number of ranks, over the true number of samples of all ranks. DDP
  averages gradients over the ranks, so that the result is that of one process with the whole batch, also where shares
  are uneven, empty, or have bad samples.
- One number is all-reduced for that at each step, in the shadow of the forward pass. It also carries the wish to stop,
  so that all ranks stop after the same step.
- Randomness comes from (seed, step, rank), the order from the plan, the learning rate from the samples seen. So a
  checkpoint holds weights, momentum and a cursor, and goes on anywhere.
"""

from __future__ import annotations

import sys

from stoker.trainers import flags

if (
    __name__ == "__main__"
):  # before torch is imported: a bad flag is answered at once, and some settings must come first
    ARGS = flags.read_or_exit(sys.argv[1:])

import argparse
import contextlib
import copy
import inspect
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from stoker.core.permutations import key
from stoker.errors import InputError, StokerError
from stoker.load.loader import Times
from stoker.load.torch import Dataset, TorchBatch, normalise
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import Plan
from stoker.sampling.rank import Seat
from stoker.storage import join, shown
from stoker.storage.cache_url import through
from stoker.telemetry import Recorder, recorder
from stoker.trainers import checkpoints, models
from stoker.trainers.checkpoints import Checkpoints, State
from stoker.trainers.ledger import Ledger, next_session
from stoker.trainers.meter import Heartbeat, Meter
from stoker.trainers.schedule import Schedule
from stoker.trainers.world import Stop, StoppedAtOnce, World, end_with_starter

STOP = 1 << 40
"""Added to a step's count by each rank that wants to stop; no batch is as large."""
PLACES = ("train", "val", "via", "cache_dir", "cache_size", "checkpoint_dir", "init_from", "ledger", "notes")
"""Flags that a checkpoint does not keep: they say nothing of the training, and a URL may hold a password."""
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "onnection refused"),  # of gloo
    *("ncclRemoteError", "remote process exited", "NCCL communicator was aborted"),
)
"""What torch says when another rank is gone."""
IMAGENET_SAMPLES = 1_281_167


def main(args: argparse.Namespace) -> int:
    """Train, and tell in one sentence what went wrong; errors in the program keep their traceback."""
    record = recorder()
    level = logging.INFO if record.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        with contextlib.ExitStack() as ending:
            return train(args, World(args), record, ending)
    except StokerError as error:
        record.mark("error", f"{type(error).__name__}: {error}")
        _complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except StoppedAtOnce as stopped:
        kept = "; it goes on at the beginning of the epoch" if args.checkpoint_dir and not args.synthetic else ""
        record.mark("stop", f"stopped at once{kept}")
        return 128 + stopped.number
    except BrokenPipeError:  # whoever read the output has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if Seat.from_environ(os.environ).world > 1 and any(words in str(error) for words in LOST):
            record.mark("lost", f"another rank is gone: {str(error).strip().partition(chr(10))[0]}")
            _complain(f"rank {record.rank}: another rank is gone, so this one ends too")
            return 1
        at = traceback.extract_tb(error.__traceback__)[-1]
        record.mark("error", f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})")
        raise


def train(args: argparse.Namespace, world: World, record: Recorder, ending: contextlib.ExitStack) -> int:
    """Train to the end, or until told to stop; return the exit code. `ending` closes what is open, whatever happens."""
    ending.callback(world.close)
    device, rank = world.device, world.rank
    say = _say if rank == 0 else lambda _: None
    joining = args.sampling == "join"
    record.heartbeat(0)
    for note in args.notes:
        say(note)
    if args.synthetic and args.checkpoint_dir and not args.eval_only:
        say(f"--synthetic: {shown(args.checkpoint_dir)} is left alone, no checkpoint is read or written")
        args = argparse.Namespace(**{**vars(args), "checkpoint_dir": None})

    # What there is to go on from. Only rank 0 reads and writes checkpoints.
    store = world.first(lambda: _checkpoints(args, record)) if args.checkpoint_dir else None
    if store is not None:
        ending.callback(store.close)
    resumed: tuple[str, State] | None = None
    if args.checkpoint_dir and not (args.eval_only and args.init_from):
        resumed = world.told(world.first(lambda: _newest(args, store)))
    meta: State = resumed[1]["meta"] if resumed else {}

    # The global batch is decided once, by the first start; a resume in another world keeps it.
    batch_size = args.batch_size or 32
    global_batch = args.global_batch_size or meta.get("global_batch") or batch_size * world.size
    if meta and args.global_batch_size and args.global_batch_size != meta["global_batch"]:
        say(f"the global batch was {meta['global_batch']:,} and is {global_batch:,} from here on")
    elif meta and args.batch_size and args.batch_size * world.size != global_batch:
        say(f"--batch-size is not used: the global batch stays {global_batch:,}; --global-batch-size changes it")
    data = None if args.eval_only else world.together(lambda: Data.open(args, world, global_batch))
    val = world.together(lambda: _val_set(args, world, global_batch)) if args.val else None
    num_classes = world.told(world.first(lambda: _num_classes(args, meta, data, val)))
    assert num_classes is not None

    # The model: the same weights on all ranks, from the seed, from a file, or from the checkpoint.
    torch.manual_seed(key("model", args.seed))
    model = world.together(lambda: _model(args, num_classes))
    averaged = resumed[1]["ema"] if resumed else None
    if args.init_from and not resumed:
        weights = world.told(world.first(lambda: checkpoints.read_weights(args.init_from)))
        assert weights is not None
        world.together(lambda: checkpoints.load_weights(model, weights.model, where=args.init_from))
        averaged = weights.averaged if args.eval_only else None
    if resumed:
        where = join(shown(args.checkpoint_dir), resumed[0])
        world.together(lambda: _check_same(args, meta, data, num_classes, where))
        world.together(lambda: checkpoints.load_weights(model, resumed[1]["model"], where=where))
    model.to(device)
    wanted = averaged if args.eval_only else args.ema
    ema = copy.deepcopy(model).requires_grad_(False).eval() if wanted else None
    if ema is not None and averaged:
        ema.load_state_dict(averaged)
    beat = Heartbeat(record)
    stop = Stop()
    evaluated = [model] if ema is None else [model, ema]
    if args.eval_only:
        result = validate(args, world, val, evaluated, stop, partial(beat, meta.get("step", 0)))
        assert result is not None
        say(f"{resumed[0] if resumed else shown(args.init_from)}: {'; averaged weights: '.join(map(str, result))}")
        _tell_validation(record if rank == 0 else None, result, meta.get("step", 0))
        return 0
    assert data is not None
    ending.callback(data.close)
    plan, samples = data.plan, data.plan.samples
    peak = args.lr if args.lr is not None else meta.get("lr", flags.LR_PER_256 * global_batch / 256)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=args.nesterov
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    if resumed:
        optimizer.load_state_dict(resumed[1]["optimizer"])
        for group in optimizer.param_groups:  # flags win
            group.update(momentum=args.momentum, weight_decay=args.weight_decay, nesterov=args.nesterov)
        if resumed[1]["scaler"]:  # empty where it was not fp16
            scaler.load_state_dict(resumed[1]["scaler"])
        resumed[1].clear()  # as large as the model, and no longer needed
    running = _compiled(args, model) if args.compile else model
    parallel: Any = _parallel(args, running, device) if world.size > 1 else running
    schedule = Schedule(
        kind=args.schedule,
        total=args.epochs * samples,
        warmup=round(args.warmup_epochs * samples),
        milestones=tuple(round(epoch * samples) for epoch in args.milestones),
        gamma=args.gamma,
    )

    # Where it stands.
    cursor = plan.check_cursor(Cursor.from_state(meta["cursor"])) if meta else plan.start()
    step: int = meta.get("step", 0)
    best: float = meta.get("best", -1.0)
    owed: bool = meta.get("owed", False) and bool(args.val)  # the validation of the epoch that ended last
    last: dict[str, float] = meta.get("last", {})
    per_epoch = plan.epoch(0, world.seat).count(0, global_batch)
    left = plan.epoch(cursor.epoch, world.seat).count(cursor.consumed, global_batch)
    total_steps = max(step, step + left + (args.epochs - cursor.epoch - 1) * per_epoch)
    if args.num_batches:
        total_steps = min(total_steps, args.num_batches)
    parameters = sum(weight.numel() for weight in model.parameters())
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    what = f"{args.model} ({parameters:,} parameters) on {ranks} ({device.type}), {samples:,} samples × {args.epochs}"
    if rank == 0:
        numbers = {"world": world.size, "global_batch": global_batch, "parameters": parameters, "samples": samples}
        record.mark("start", what, model=args.model, epochs=args.epochs, total_steps=total_steps, **numbers)
    say(f"{what} epochs, global batch {global_batch:,}, learning rate {peak:g} ({args.schedule})")
    if resumed:
        detail = f"goes on at epoch {cursor.epoch}, {cursor.consumed:,} of {samples:,} samples, step {step:,}"
        if rank == 0:
            record.mark(
                "resume", detail, epoch=cursor.epoch, consumed=cursor.consumed, step=step, **{"from": resumed[0]}
            )
        say(f"{resumed[0]}: {detail}" + ("; --init-from is not used" if args.init_from else ""))
    if cursor.epoch >= args.epochs and not owed:
        if rank == 0:
            record.mark("end", "was finished before", val_top1=last.get("val_top1"))
        known = f", validation top-1 {last['val_top1']:.2%}" if "val_top1" in last else ""
        say(f"this training is finished: {cursor.epoch} epochs{known}; give more --epochs to go on")
        return 0
    ledger = None
    if args.ledger:
        session = world.told(world.first(lambda: next_session(args.ledger))) or 0
        ledger = Ledger(args.ledger, rank=rank, attempt=record.attempt, session=session, cursor=cursor)
        ending.callback(ledger.close)
    meter = Meter(args, record, say, world.size, rank)

    def state() -> State:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "ema": ema.state_dict() if ema is not None else None,
            "meta": {
                "cursor": cursor.state(),
                "step": step,
                "global_batch": global_batch,
                "lr": peak,
                "best": best,
                "owed": owed,
                "last": last,
                "model": args.model,
                "num_classes": num_classes,
                "plan": plan.digest,
                "args": {name: value for name, value in vars(args).items() if name not in PLACES},
            },
        }

    saved_at, saved_step = time.monotonic(), step
    stopping, enough = False, bool(args.num_batches) and step >= args.num_batches
    stop.listen(at_once=joining)
    model.train()
    while (cursor.epoch < args.epochs or owed) and not stopping and not enough:
        # One epoch, or what is left of it.
        epoch, taken, made = cursor.epoch, 0, 0
        ended = owed
        view = plan.epoch(epoch, world.seat)
        if not owed:
            data.load_state_dict(cursor.state())
        batches = iter(()) if owed else iter(data)
        with Join([parallel]) if joining and world.size > 1 else contextlib.nullcontext():
            while True:
                started, before = time.perf_counter(), data.times.wait
                batch = next(batches, None)
                if batch is None:
                    ended = True
                    break
                wait = data.times.wait - before  # the rest of next() is the copy to the device, and waiting for it
                torch.manual_seed(key("step", args.seed, step, rank))
                start = taken if joining else cursor.consumed
                end = batch.cursor.consumed if batch.cursor.epoch == epoch else samples
                if joining:
                    end = int(batch.positions[-1]) + 1 if batch.count else start
                # Ranks that join are at different places; for the learning rate, which is one, they count their steps.
                begins, ends = (made * global_batch, (made + 1) * global_batch) if joining else (start, end)
                begins, ends = (epoch * samples + min(samples, at) for at in (begins, ends))
                if ledger is not None:
                    place = view.at(batch.positions)
                    ledger.step(
                        epoch, start, end, list(zip(place.shards.tolist(), place.samples.tolist(), strict=True))
                    )
                count = None if joining else world.sum_later(batch.count + STOP * bool(stop.asked))
                images, labels = _inputs(args, batch, device)
                moved = time.perf_counter()

                # An empty share goes through the model all the same, so that collectives match, and weighs nothing.
                # Neither it nor a last share of one sample may touch the statistics of BatchNorm.
                alone = batch.count == 0 or (batch.count == 1 and global_batch >= 2 * world.size)
                resting = _rest_norms(model) if alone else []
                rate = peak * schedule.factor((begins + ends) / 2)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                with _autocast(args, device):
                    out = parallel(images)
                if batch.count:
                    loss = cross_entropy(out.float(), labels, reduction="sum", label_smoothing=args.label_smoothing)
                else:
                    loss = out.float().sum() * 0.0
                forward = time.perf_counter()
                number = count() if count is not None else batch.count
                agreed = time.perf_counter()
                stopping, number = number >= STOP, number % STOP
                weight = (1.0 if joining else world.size) / max(1, number)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
                if args.clip_grad:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                scaler.step(optimizer)
                scaler.update()
                for norm in resting:
                    norm.train()
                step, made, taken = step + 1, made + 1, end
                cursor = batch.cursor if not joining else cursor
                if ema is not None:
                    _average(ema, model, min(args.ema, (1 + step) / (10 + step)))
                done = time.perf_counter()

                h2d, collective = moved - started - wait, agreed - forward
                meter.add(loader_wait=wait, h2d=h2d, collective_wait=collective, step=done - started)
                meter.add(compute=done - moved - collective)
                meter.count(batch.count, number * (world.size if joining else 1), loss.detach())
                if beat.due():
                    place = view.at(batch.positions[-1:])
                    shard = data.shard(int(place.shards[0])) if batch.count else ""
                    beat(step, shard, int(place.samples[0]) if batch.count else -1)
                if meter.due():
                    meter.tell(epoch, step, total_steps, rate, ends / samples, data.times)
                if store is not None and not joining and cursor.epoch == epoch and not stopping:
                    steps_due = args.checkpoint_every_steps and step - saved_step >= args.checkpoint_every_steps
                    time_due = args.checkpoint_every and time.monotonic() - saved_at >= args.checkpoint_every
                    if steps_due or (time_due and not store.busy):
                        store.save(state(), step)
                        saved_at, saved_step = time.monotonic(), step
                if stopping or (args.num_batches and step >= args.num_batches):
                    ended = not joining and cursor.epoch > epoch
                    break
        if meter.steps:
            meter.tell(epoch, step, total_steps, rate, ends / samples, data.times)

        # The end of an epoch: all ranks hold the same weights again, validate, and rank 0 writes.
        if ended and not owed:
            if joining:
                step, cursor = world.align(step, model, optimizer, ema), plan.start(epoch + 1)
            owed = bool(args.val) and _wants_validation(args, cursor.epoch)
        enough = bool(args.num_batches) and step >= args.num_batches
        if ended and not stopping and not enough:
            if store is not None and owed:  # before the validation, which may take longer than a stop allows
                store.save(state(), step)
            improved = False
            if owed:
                result = validate(args, world, val, evaluated, stop, partial(beat, step))
                stopping = result is None
                if result is not None:
                    owed, last = False, _tell_validation(record if rank == 0 else None, result, step)
                    score = result[-1].top1  # of the averaged weights where there are some
                    improved, best = score > best, max(best, score)
                    say(f"epoch {cursor.epoch - 1} {'; averaged weights: '.join(map(str, result))}")
            if store is not None and not stopping:
                store.save(state(), step, best=improved)
                saved_at, saved_step = time.monotonic(), step

    def finish() -> None:
        if store is not None:
            if (stopping or args.num_batches) and not joining:
                store.save(state(), step)
            store.close()

    world.first(finish)  # all wait for it: torchrun kills what still runs half a minute after the first has ended
    if stopping:
        if rank == 0 or stop.asked:
            record.mark("stop", f"stopped after step {step:,}")
        kept = "; the same command goes on from there" if args.checkpoint_dir and not joining else ""
        say(f"stopped after step {step:,}{kept}")
        return 128 + (stop.asked or signal.SIGTERM)
    if rank == 0:
        record.mark("end", f"trained {step:,} steps", val_top1=last.get("val_top1"))
    say(f"done: {step:,} steps, {meter.overall:,.0f} images/s")
    return 0


class Result(NamedTuple):
    """What a validation found, over exactly the validation set."""

    loss: float
    top1: float
    top5: float
    samples: int

    def __str__(self) -> str:
        return f"validation loss {self.loss:.4f} top-1 {self.top1:.2%} top-5 {self.top5:.2%} of {self.samples:,}"


def validate(
    args: argparse.Namespace,
    world: World,
    val: Dataset | None,
    evaluated: list[nn.Module],
    stop: Stop,
    beat: Callable[[], None],
) -> list[Result] | None:
    """Count what each model gets right; each rank takes its share, and the sums meet once. None if told to stop."""
    device = world.device
    sums = torch.zeros(len(evaluated), 4, dtype=torch.float64, device=device)
    training = [model.training for model in evaluated]
    for model in evaluated:
        model.eval()
        world.spread_buffers(model)
    if val is not None:  # with fewer samples than ranks, some have none
        val.load_state_dict(val.loader.plan.start().state())
        with torch.inference_mode():
            for batch in val:
                if stop.asked:
                    break
                beat()
                if not batch.count:
                    continue
                images, labels = _inputs(args, batch, device)
                for model, row in zip(evaluated, sums, strict=True):
                    with _autocast(args, device):
                        out = model(images).float()
                    ranked = out.topk(min(5, out.shape[1]), dim=1).indices == labels[:, None]
                    row += torch.stack(
                        [
                            cross_entropy(out, labels, reduction="sum"),
                            ranked[:, 0].sum(),
                            ranked.any(dim=1).sum(),
                            torch.tensor(batch.count, device=device),
                        ]
                    )
    for model, mode in zip(evaluated, training, strict=True):
        model.train(mode)
    told = torch.cat([sums.cpu().flatten(), torch.tensor([float(bool(stop.asked))], dtype=torch.float64)])
    world.sum(told)
    if told[-1]:
        return None
    rows = told[:-1].view(len(evaluated), 4).tolist()
    return [Result(loss / n, top1 / n, top5 / n, int(n)) for loss, top1, top5, n in rows if n]


class Data:
    """The training set, or with `--synthetic` batches of the same shapes and counts that cost nothing."""

    def __init__(self, plan: Plan, classes: tuple[str, ...], dataset: Dataset | None, made: Synthetic | None) -> None:
        self.plan, self.classes, self._dataset, self._made = plan, classes, dataset, made

    @classmethod
    def open(cls, args: argparse.Namespace, world: World, global_batch: int) -> Data:
        """Open what the flags name."""
        if not args.train:
            samples = args.epoch_samples or IMAGENET_SAMPLES
            plan = Plan(data="synthetic", sizes=np.array([samples], dtype=np.int64), seed=args.seed)
            return cls(plan, (), None, Synthetic(args, world, plan, global_batch))
        dataset = Dataset(
            _through(args, args.train),
            **_settings(args, world, global_batch, args.transform),
            sampling=args.sampling,
            epoch_samples=args.epoch_samples,
            seed=args.seed,
        )
        manifest, plan = dataset.loader.set.manifest, dataset.loader.plan
        classes = manifest.classes if manifest is not None else ()
        if args.synthetic and not (classes or args.num_classes):
            raise _no_classes(args.train)
        made = Synthetic(args, world, plan, global_batch, len(classes)) if args.synthetic else None
        return cls(plan, classes, dataset, made)

    @property
    def times(self) -> Times:
        """Where the loader's threads have spent their time so far."""
        return self._dataset.loader.times if self._dataset is not None else Times()

    def shard(self, number: int) -> str:
        """Tell the name of a shard."""
        return self._dataset.loader.set.shards[number].name if self._dataset is not None else ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor."""
        (self._made or self._dataset).load_state_dict(state)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[TorchBatch]:
        return iter(self._made or self._dataset)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the loader's threads."""
        if self._dataset is not None:
            self._dataset.close()


class Synthetic:
    """Batches made once and never decoded; of the plan they have the counts and the cursors."""

    def __init__(self, args: argparse.Namespace, world: World, plan: Plan, global_batch: int, classes: int = 0) -> None:
        draw = torch.Generator().manual_seed(key("synthetic", args.seed, world.rank))
        most = -(-global_batch // world.size)
        shape = (most, args.size, args.size, 3)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).permute(0, 3, 1, 2)
        self._labels = torch.randint(0, args.num_classes or classes, (most,), generator=draw)
        self._plan, self._seat, self._batch, self._cursor = plan, world.seat, global_batch, plan.start()
        self._images, self._labels = self._images.to(world.device), self._labels.to(world.device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor."""
        self._cursor = self._plan.check_cursor(Cursor.from_state(state))

    def __iter__(self) -> Iterator[TorchBatch]:
        epoch = self._plan.epoch(self._cursor.epoch, self._seat)
        for _, positions, end in epoch.steps(self._cursor.consumed, self._batch):
            count = len(positions)
            yield TorchBatch(self._images[:count], self._labels[:count], count, end, positions)


def _inputs(args: argparse.Namespace, batch: TorchBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a batch on the device as numbers around 0; of an empty one a single black image, which will weigh nothing."""
    images, labels = batch.images, batch.labels
    if not batch.count:
        images = torch.zeros(1, 3, args.size, args.size, dtype=torch.uint8)
        labels = torch.zeros(1, dtype=torch.int64)
    form = torch.channels_last if args.channels_last else torch.contiguous_format
    images = normalise(images.to(device, non_blocking=True)).contiguous(memory_format=form)
    return images, labels.to(device, non_blocking=True)


def _autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    kind = torch.float16 if args.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=kind, enabled=args.precision != "fp32")


def _rest_norms(model: nn.Module) -> list[nn.Module]:
    """Let each BatchNorm that keeps statistics rest, and return those; the ranks of a SyncBatchNorm need each other."""
    kinds, synced = nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm
    own = [part for part in model.modules() if isinstance(part, kinds) and not isinstance(part, synced)]
    return [norm.eval() for norm in own if norm.training]


@torch.no_grad()
def _average(ema: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights a little towards the weights."""
    ours, theirs = ema.state_dict(), model.state_dict()
    for name, tensor in ours.items():
        if tensor.is_floating_point():
            tensor.lerp_(theirs[name], 1.0 - decay)
        else:
            tensor.copy_(theirs[name])


def _through(args: argparse.Namespace, url: str) -> str:
    return through(url, args.via) if args.via else url


def _settings(args: argparse.Namespace, world: World, global_batch: int, transform: str) -> dict[str, Any]:
    return {
        "global_batch": global_batch,
        "transform": transform,
        "size": args.size,
        "decoder": args.decoder,
        "seat": world.seat,
        "cache": args.cache_dir,
        "cache_size": args.cache_size,
        "threads": args.threads,
        "max_bad": args.max_bad,
        "device": world.device,
    }


def _val_set(args: argparse.Namespace, world: World, global_batch: int) -> Dataset | None:
    """Open the validation set; its batch is that of training, as far as its size and the number of ranks allow."""
    url = _through(args, args.val)
    settings = _settings(args, world, 1, args.val_transform)
    alone = Dataset(url, **{**settings, "seat": (0, 1)})
    samples, found = alone.loader.plan.samples, alone.loader.set
    alone.close()
    ranks = min(world.size, samples)
    if world.rank >= ranks:
        return None
    seat = Seat(world.rank, ranks, world.seat.local_world)
    return Dataset(found, **{**settings, "seat": seat, "global_batch": min(max(global_batch, ranks), samples)})


def _num_classes(args: argparse.Namespace, meta: State, data: Data | None, val: Dataset | None) -> int:
    """Take the number of classes from the flag, the training set, or, to validate only, from what is validated."""
    manifest = val.loader.set.manifest if val is not None else None
    theirs = manifest.classes if manifest is not None else ()
    if data is not None and data.classes and theirs and data.classes != theirs:
        raise InputError(
            f"its classes ({_some(theirs)}) are not those of the training set ({_some(data.classes)})",
            where=args.val,
            hint="convert both in one go",
        )
    found = len(data.classes if data is not None else theirs)
    number = args.num_classes or (meta.get("num_classes", found) if args.eval_only else found)
    where = args.train or args.val
    if not number:
        raise _no_classes(where)
    if number < found:
        raise InputError(
            f"its {found} classes are more than the model's {number}",
            where=where,
            hint=f"give --num-classes {found} or more, or leave it away" if args.num_classes else None,
        )
    return int(number)


def _no_classes(where: str) -> InputError:
    return InputError(
        "this set was made elsewhere and does not tell its classes", where=where, hint="give --num-classes"
    )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f", … {len(names)} in all" if len(names) > 3 else "")


def _model(args: argparse.Namespace, num_classes: int) -> nn.Module:
    model = models.build(
        args.model, num_classes=num_classes, size=args.size, stem=args.stem, zero_gamma=args.zero_gamma
    )
    return model.to(memory_format=torch.channels_last) if args.channels_last else model  # type: ignore[call-overload]


def _compiled(args: argparse.Namespace, model: nn.Module) -> Any:
    """Compile the model; to the bit, with kernels for each shape alone, whichever comes first after a resume."""
    if not args.deterministic:
        return torch.compile(model)
    limits = torch._dynamo.config
    limits.cache_size_limit = limits.accumulated_cache_size_limit = 1 << 16  # past them, shapes run uncompiled
    return torch.compile(model, dynamic=False)


def _parallel(args: argparse.Namespace, model: Any, device: torch.device) -> DistributedDataParallel:
    """Let the ranks share their gradients."""
    # The statistics of BatchNorm are rank 0's; the others get them before a validation. A share of one sample is
    # normalised by them, so that for the same bits after a resume the others must have them at every step.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=args.deterministic,  # else buckets are built anew, and sums differ in their last bits
        **{buffers: args.deterministic},
    )


def _checkpoints(args: argparse.Namespace, record: Recorder) -> Checkpoints:
    return Checkpoints(
        args.checkpoint_dir,
        keep=args.keep,
        write=not args.eval_only,
        written=lambda where, step, s: record.mark("checkpoint", where, step=step, seconds=round(s, 3)),
        damaged=lambda name, why: record.mark("fallback", f"{name}: {why}"),
    )


def _newest(args: argparse.Namespace, store: Checkpoints | None) -> tuple[str, State] | None:
    """Read the checkpoint to go on from; for an evaluation there must be one."""
    assert store is not None
    found = store.best() if args.eval_only == "best" else store.newest()
    if found is None and args.eval_only:
        raise InputError("there is no checkpoint to evaluate", where=store.url)
    return found


def _check_same(args: argparse.Namespace, meta: State, data: Data | None, num_classes: int, where: str) -> None:
    """Refuse the checkpoint of another training, and say what differs."""
    odd = []
    if meta["model"] != args.model:
        odd.append(f"its model is {meta['model']}, and this is {args.model}")
    if meta["num_classes"] != num_classes:
        odd.append(f"it has {meta['num_classes']} classes, and this {num_classes}")
    if not args.eval_only and data is not None and meta["plan"] != data.plan.digest:
        was, now = meta["args"], vars(args)
        names = [name for name in ("seed", "sampling", "epoch_samples") if was[name] != now[name]]
        changes = ", ".join(f"{name} was {was[name]} and is {now[name]}" for name in names)
        odd.append(f"its samples came in another order ({changes or 'the dataset is another'})")
    if odd:
        raise InputError(
            f"this checkpoint is of another training: {'; '.join(odd)}",
            where=where,
            hint="give another --checkpoint-dir, or take over only its weights: --init-from",
        )


def _wants_validation(args: argparse.Namespace, epochs: int) -> bool:
    every = args.validate_every
    return bool(every) and (epochs % every == 0 or epochs >= args.epochs)


def _tell_validation(record: Recorder | None, result: list[Result], step: int) -> dict[str, float]:
    told = {"val_loss": result[0].loss, "val_top1": result[0].top1, "val_top5": result[0].top5}
    if len(result) > 1:
        told["ema_top1"] = result[1].top1
    if record is not None:
        for name, value in told.items():
            record.scalar(name, value, step)
    return told


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _complain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    end_with_starter()
    sys.exit(main(ARGS))

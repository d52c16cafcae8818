"""What every trainer does around its training: errors, first messages, checkpoints to resume from, settings to keep."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from stoker.errors import InputError, StokerError
from stoker.launchers.supervise.tensorboard import ScalarWriter
from stoker.telemetry import Recorder, recorder
from stoker.telemetry.events import PEER_LOST
from stoker.trainers.checkpoint_store import Checkpoint, CheckpointFormat, CheckpointMeta, CheckpointStore
from stoker.trainers.rank_group import RankGroup
from stoker.trainers.rendezvous import MissingPeersError
from stoker.trainers.stop_signal import StoppedImmediately
from stoker.trainers.training_data import TrainingData


def run_trainer(
    args: argparse.Namespace,
    run: Callable[[Recorder, contextlib.ExitStack], int],
    is_peer_lost: Callable[[Exception], bool],
    end: Callable[[int], object] = lambda _: None,
) -> int:
    """Run a trainer; report errors in one sentence. Programming errors keep their traceback.

    `end` is called with the exit code after a rank was lost, before anything is deleted.
    """
    record = recorder()
    if getattr(args, "tensorboard", None):
        record.on_scalar = ScalarWriter(Path(args.tensorboard).expanduser()).write_one
    level = logging.INFO if record.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        with contextlib.ExitStack() as resources:
            return run(record, resources)
    except MissingPeersError as error:
        record.mark("lost", f"{PEER_LOST}: {error}")
        print_error(f"error: {error}")
        end(error.exit_code)
        return error.exit_code
    except StokerError as error:
        record.mark("error", f"{type(error).__name__}: {error}")
        print_error(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except StoppedImmediately as stopped:
        hint = "; resumes at the start of the epoch" if args.checkpoint_dir and not args.synthetic else ""
        record.mark("stop", f"stopped immediately{hint}")
        return 128 + stopped.signal_number
    except BrokenPipeError:  # the reader of our output has exited, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if is_peer_lost(error):
            record.mark("lost", f"{PEER_LOST}: {str(error).strip().partition(chr(10))[0]}")
            print_error(f"rank {record.rank}: {PEER_LOST}, exiting")
            end(1)
            return 1
        frame = traceback.extract_tb(error.__traceback__)[-1]
        record.mark("error", f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})")
        raise


def start_trainer(
    args: argparse.Namespace, world: RankGroup, record: Recorder, resources: contextlib.ExitStack
) -> Callable[[str], None]:
    """Send the first heartbeat, print the notes on the flags, and return what prints lines on rank 0 only."""
    resources.callback(world.close)
    print_on_rank0 = print_line if world.rank == 0 else lambda _: None
    record.heartbeat(0)
    for note in args.notes:
        print_on_rank0(note)
    return print_on_rank0


def open_store(
    args: argparse.Namespace,
    world: RankGroup,
    record: Recorder,
    resources: contextlib.ExitStack,
    checkpoint_format: CheckpointFormat,
) -> CheckpointStore | None:
    """Open --checkpoint-dir on rank 0; None on the others, or if there is none."""
    if not args.checkpoint_dir:
        return None
    store = world.run_on_rank0(
        lambda: CheckpointStore(
            args.checkpoint_dir,
            checkpoint_format,
            keep=args.keep,
            write=not args.eval_only,
            on_written=lambda where, step, s: record.mark("checkpoint", where, step=step, seconds=round(s, 3)),
            on_damaged=lambda name, reason: record.mark("fallback", f"{name}: {reason}"),
        )
    )
    if store is not None:
        resources.callback(store.close)
    return store


def load_checkpoint(
    args: argparse.Namespace, world: RankGroup, store: CheckpointStore | None
) -> tuple[str, Checkpoint | None]:
    """Read the checkpoint to resume from or to evaluate, and its name; --eval-only needs one."""

    def read() -> tuple[str, Checkpoint] | None:
        assert store is not None
        if args.eval_only not in (None, "best", "newest"):
            return store.load(args.eval_only)
        loaded = store.load_best() if args.eval_only == "best" else store.load_newest()
        if loaded is None and args.eval_only:
            raise InputError("no checkpoint to evaluate", where=store.url)
        return loaded

    if not args.checkpoint_dir:
        return "", None
    return world.broadcast(world.run_on_rank0(read)) or ("", None)


def choose_global_batch(
    args: argparse.Namespace, ranks: int, meta: CheckpointMeta, print_message: Callable[[str], None]
) -> int:
    """Return the global batch size: that of the first start, unless --global-batch-size changes it."""
    per_rank = args.batch_size or 32
    global_batch: int = args.global_batch_size or meta.get("global_batch") or per_rank * ranks
    if meta and args.global_batch_size and args.global_batch_size != meta["global_batch"]:
        print_message(f"global batch size changes from {meta['global_batch']:,} to {global_batch:,}")
    elif meta and args.batch_size and args.batch_size * ranks != global_batch:
        print_message(
            f"ignoring --batch-size: the global batch size stays {global_batch:,}; change it with --global-batch-size"
        )
    return global_batch


def check_same_training(
    args: argparse.Namespace, meta: CheckpointMeta, data: TrainingData | None, num_classes: int, where: str
) -> None:
    """Raise InputError if a checkpoint belongs to another training, and name the differences."""
    differences = []
    if meta["model"] != args.model:
        differences.append(f"model {meta['model']}, now {args.model}")
    if meta["num_classes"] != num_classes:
        differences.append(f"{meta['num_classes']} classes, now {num_classes}")
    if data is not None and meta["plan"] != data.plan.digest:
        saved, current = meta["args"], vars(args)
        names = [name for name in ("seed", "sampling", "epoch_samples") if saved[name] != current[name]]
        changes = ", ".join(f"{name} {saved[name]}, now {current[name]}" for name in names)
        differences.append(f"different sample order ({changes or 'the dataset has changed'})")
    if differences:
        raise InputError(
            f"checkpoint belongs to another training run: {'; '.join(differences)}",
            where=where,
            hint="set another --checkpoint-dir, or load only its weights with --init-from",
        )


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_error(line: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

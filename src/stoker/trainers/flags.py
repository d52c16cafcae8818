"""The flags of the image trainer, without torch, so that a bad one is answered at once."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from stoker.core.units import parse_bytes, parse_duration
from stoker.errors import Fault, InputError, MissingExtraError, SpecError, StokerError
from stoker.load.native import DECODERS
from stoker.load.transforms import TRANSFORMS
from stoker.sampling.plan import SAMPLING_MODES
from stoker.trainers.schedule import SCHEDULES

LR_PER_256 = 0.1
SMALL_SIZE = 64
"""Images of so many pixels or fewer are small: another default of transforms, and of the first layers."""
MODELS = ("resnet18", "resnet34", "resnet50", "resnet8", "small", "trivial")
"""The models that need nothing but torch; stoker.trainers.models has them."""
PRECISIONS = ("fp32", "bf16", "fp16")
_HIDDEN = argparse.SUPPRESS


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Make the parser; what a job sets in the environment is the default."""
    parse = argparse.ArgumentParser(
        prog="python -m stoker.trainers.torch_image",
        usage="%(prog)s --train URL [--val URL] [--model NAME] [--epochs N] [--checkpoint-dir DIR] …",
        description="Train an image classifier on a shard set, alone or under torchrun. It resumes by itself from "
        "--checkpoint-dir, in the middle of an epoch, with any number of ranks.",
        allow_abbrev=False,
    )
    _data(parse.add_argument_group("data"), environ)
    _model(parse.add_argument_group("model"))
    _training(parse.add_argument_group("training"))
    _checkpoints(parse.add_argument_group("checkpoints"), environ)
    _machine(parse.add_argument_group("machine"))
    _logging(parse.add_argument_group("watching"))
    _webdataset(parse)
    return parse


def _data(group: argparse._ArgumentGroup, environ: Mapping[str, str]) -> None:
    get = environ.get
    group.add_argument("--train", metavar="URL", default=get("STOKER_DATA_TRAIN"), help="shard set to train on")
    group.add_argument("--val", metavar="URL", default=get("STOKER_DATA_VAL"), help="shard set to validate on")
    group.add_argument("--via", metavar="URL", default=get("STOKER_DATA_VIA"), help="read through this shared cache")
    group.add_argument(
        "--sampling",
        choices=tuple(SAMPLING_MODES),
        default=get("STOKER_SAMPLING") or "exact",
        help="how an epoch is dealt to the ranks",
    )
    group.add_argument("--epoch-samples", metavar="N", type=int, help="samples of an epoch of `resampled`")
    group.add_argument("--cache-dir", metavar="DIR", default=get("STOKER_CACHE_DIR"), help="keep remote shards here")
    group.add_argument(
        "--cache-size",
        metavar="SIZE",
        type=_argparse_type(parse_bytes),
        default=get("STOKER_CACHE_SIZE") or None,
        help="at most so much",
    )
    group.add_argument(
        "--decoder", choices=DECODERS, default="auto", help="native or python; auto is native where it can be had"
    )
    group.add_argument("--size", metavar="PX", type=int, default=224, help="pixels of a side, as the model sees them")
    names = tuple(TRANSFORMS)
    group.add_argument(
        "--transform",
        metavar="NAME",
        choices=names,
        help=f"for training: {', '.join(names)}; digits-train never mirrors",
    )
    group.add_argument("--val-transform", metavar="NAME", choices=names, help="for validation")
    group.add_argument("--max-bad", metavar="SHARE", type=float, default=0.001, help="share of samples that may be bad")
    group.add_argument("--synthetic", action="store_true", help="no data is read: the speed that is left without I/O")


def _model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="NAME",
        default="resnet18",
        help=f"{', '.join(MODELS)}, timm:NAME, torchvision:NAME, or a function of yours: package.module:function",
    )
    group.add_argument("--num-classes", metavar="N", type=int, help="by default those of the training set")
    group.add_argument(
        "--stem", choices=("auto", "imagenet", "small"), default="auto", help="first layers of a ResNet; small: 3×3"
    )
    group.add_argument("--zero-gamma", action="store_true", help="let every residual block begin as nothing")
    group.add_argument("--init-from", metavar="FILE", help="begin with the weights of this file or URL")


def _training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--epochs", metavar="N", type=int, default=90, help="how often every sample is seen")
    add("--batch-size", metavar="N", type=int, help="samples of a rank and step; 32, unless the global batch is given")
    add("--global-batch-size", metavar="N", type=int, help="samples of a step over all ranks; kept when it resumes")
    add("--lr", type=float, help=f"learning rate; {LR_PER_256} × global batch / 256 by default")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--nesterov", action="store_true", help="Nesterov's momentum")
    add("--weight-decay", type=float, default=1e-4, help="on all weights")
    add("--schedule", choices=SCHEDULES, default="multistep", help="how the learning rate falls, counted in samples")
    add("--warmup-epochs", metavar="N", type=float, default=0.0, help="let the learning rate rise from 0 first")
    add("--milestones", metavar="N,N", type=_epochs, default=(30.0, 60.0, 90.0, 120.0), help="epochs of `multistep`")
    add("--gamma", type=float, default=0.1, help="what each milestone multiplies the learning rate by")
    add("--label-smoothing", metavar="SHARE", type=float, default=0.0, help="of the loss of training")
    add("--ema", metavar="DECAY", type=float, default=0.0, help="average the weights, such as 0.999; 0 is off")
    add("--clip-grad", metavar="NORM", type=float, default=0.0, help="largest norm of the gradient; 0 is off")
    add("--seed", type=int, default=0, help="of the order, the augmentation and the first weights")
    add("--num-batches", metavar="N", type=int, help="stop after so many steps in all: to measure")
    add(
        "--eval-only",
        nargs="?",
        choices=("newest", "best"),
        const="newest",
        help="only validate: --init-from, or a checkpoint",
    )
    add("--validate-every", metavar="N", type=int, default=1, help="epochs; the last one is always validated; 0: never")


def _checkpoints(group: argparse._ArgumentGroup, environ: Mapping[str, str]) -> None:
    add, get = group.add_argument, environ.get
    add(
        "--checkpoint-dir",
        metavar="DIR",
        default=get("STOKER_CHECKPOINT_DIR"),
        help="write to and resume from this folder or URL",
    )
    add("--keep", metavar="N", type=int, default=get("STOKER_CHECKPOINT_KEEP") or "3", help="newest ones, and the best")
    add(
        "--checkpoint-every",
        metavar="TIME",
        type=_argparse_type(parse_duration),
        default="10m",
        help="write one so often; 0: not",
    )
    add("--checkpoint-every-steps", metavar="N", type=int, default=0, help="write one so often; 0: not")


def _machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    devices = "one of auto, cpu, cuda, cuda:N"
    add("--device", metavar="NAME", type=_device, default="auto", help=f"{devices}; auto: cuda where there is one")
    add("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="of the gradients: nccl on cuda, else gloo")
    add("--precision", choices=PRECISIONS, default="fp32", help="of the forward and backward pass")
    add("--channels-last", action="store_true", help="memory in the order that convolutions like on GPUs")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--threads", "--workers", metavar="N", type=int, help="decoding threads of a rank; its part of the cores")
    add("--deterministic", action="store_true", help="the same bits every time, killed and resumed or not")


def _logging(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--log-every",
        metavar="TIME",
        type=_argparse_type(parse_duration),
        default="10",
        help="a line and measurements so often",
    )
    add("--ledger", metavar="DIR", help="write down which samples each rank saw at each step")


def _webdataset(parse: argparse.ArgumentParser) -> None:
    """Take the flags of webdataset-imagenet with their meaning."""
    same = {"--batchsize": "batch_size", "--nepochs": "epochs", "--ntrain": "epoch_samples_if_resampled"}
    for flag, name in same.items():
        parse.add_argument(flag, dest=name, type=int, default=_HIDDEN, help=_HIDDEN)
    parse.add_argument("--mname", default=_HIDDEN, help=_HIDDEN)
    parse.add_argument(
        "--loginterval", dest="log_every", type=_argparse_type(parse_duration), default=_HIDDEN, help=_HIDDEN
    )
    parse.add_argument(
        "--splitshards", dest="sampling", action="store_const", const="exact", default=_HIDDEN, help=_HIDDEN
    )
    parse.add_argument("--amplevel", dest="amplevel", default=_HIDDEN, help=_HIDDEN)
    for flag in ("--bucket", "--shards", "--valshards"):
        parse.add_argument(flag, default=_HIDDEN, help=_HIDDEN)
    # Always so here (one log), not needed (apex), known from the manifest (nval), or from the starter (wsize).
    for flag in ("--onelog", "--showopen", "--apexddp"):
        parse.add_argument(flag, dest="ignored", action="store_true", default=_HIDDEN, help=_HIDDEN)
    for flag in ("--nval", "--distributed", "--wsize"):
        parse.add_argument(flag, dest="ignored", default=_HIDDEN, help=_HIDDEN)


def parse_flags(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Read the flags, check what can be checked without the data, and say every reason at once."""
    args = build_parser(environ).parse_args(argv)
    _apply_webdataset(args)
    args.transform = args.transform or ("small-train" if args.size <= SMALL_SIZE else "imagenet-train")
    args.val_transform = args.val_transform or ("whole" if args.size <= SMALL_SIZE else "imagenet-val")
    faults = list(_faults(args))
    if faults:
        raise SpecError([Fault("--" + name.replace("_", "-"), what) for name, what in faults])
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "torch", purpose="stoker.trainers.torch_image")
    return args


def parse_or_exit(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags of a program, and set what must be set before torch is imported; end it if they are bad."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # before anything that could hang
    try:
        args = parse_flags(argv)
    except StokerError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    if args.precision == "bf16":  # oneDNN takes AMX instructions where a virtual machine lists but forbids them
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if args.deterministic:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums depend on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return args


def _apply_webdataset(args: argparse.Namespace) -> None:
    """Turn what only the flags of elsewhere say into ours."""
    args.notes = []
    bucket = vars(args).pop("bucket", "")
    if bucket and not {"shards", "valshards"} & vars(args).keys():
        raise SpecError(
            [Fault("--bucket", "is the beginning of --shards and --valshards: give one of them, or --train")]
        )
    for theirs, ours in (("shards", "train"), ("valshards", "val")):
        if pattern := vars(args).pop(theirs, ""):
            setattr(args, ours, bucket.replace("{}", pattern) if "{}" in bucket else bucket + pattern)
    samples = vars(args).pop("epoch_samples_if_resampled", None)
    if args.sampling == "resampled" and args.epoch_samples is None:
        args.epoch_samples = samples
    elif samples is not None and args.sampling != "resampled":
        args.notes.append("--ntrain is not used: an epoch is every sample once; --sampling resampled takes it")
    if name := vars(args).pop("mname", ""):  # there, all are torchvision's
        args.model = name if ":" in name or name in MODELS else f"torchvision:{name}"
    if vars(args).pop("amplevel", "O0") not in ("", "O0"):
        args.precision = "fp16"
    vars(args).pop("ignored", None)


def _faults(args: argparse.Namespace) -> Any:
    for name in ("epochs", "batch_size", "global_batch_size", "num_classes", "num_batches", "threads", "size", "keep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            yield name, f"{getattr(args, name)} is less than 1"
    for name in ("lr", "momentum", "weight_decay", "warmup_epochs", "clip_grad", "seed", "validate_every", "gamma"):
        if getattr(args, name) is not None and not getattr(args, name) >= 0:
            yield name, f"{getattr(args, name)} is negative"
    if args.checkpoint_every_steps < 0:
        yield "checkpoint_every_steps", f"{args.checkpoint_every_steps} is negative"
    for milestone in args.milestones:
        if not milestone >= 0:
            yield "milestones", f"{milestone:g} is negative"
    if args.sampling == "join" and args.num_batches and not args.eval_only:
        yield "num_batches", "does not go with --sampling join, whose ranks make different numbers of steps"
    for name in ("label_smoothing", "ema"):
        if not 0 <= getattr(args, name) < 1:
            yield name, f"{getattr(args, name)} is not from 0 to below 1"
    if args.nesterov and not args.momentum:
        yield "nesterov", "needs --momentum above 0"
    if args.synthetic and not args.train and not args.num_classes:
        yield "num_classes", "is needed where no data is named"
    if args.eval_only and not args.val:
        yield "val", "give the shard set to validate on"
    if args.eval_only and not (args.init_from or args.checkpoint_dir):
        yield "eval_only", "give --init-from, or --checkpoint-dir"
    if not args.train and not args.synthetic and not args.eval_only:
        yield "train", "give the shard set to train on, or STOKER_DATA_TRAIN, or --synthetic"


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda, or one such as cuda:0")
    return text


def _epochs(text: str) -> tuple[float, ...]:
    return tuple(sorted(float(part) for part in text.split(",") if part.strip()))


_epochs.__name__ = "epochs, such as 30,60,90"


def _argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse say what a reader of ours refuses."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(error.what) from error

    return read


def flags_table() -> str:
    """Give the flags by task, as docs/train.md has them."""
    lines = []
    for group in build_parser({})._action_groups:
        actions = [action for action in group._group_actions if action.help not in (_HIDDEN, None)]
        if group.title in (None, "positional arguments", "options"):
            continue
        lines += [f"**{str(group.title).capitalize()}**", "", "| flag | default | |", "|---|---|---|"]
        for action in actions:
            takes = f" {action.metavar}" if action.metavar else " " + " \\| ".join(map(str, action.choices or ()))
            flag = "`, `".join(action.option_strings)
            words = "" if action.nargs == 0 else takes.rstrip()
            lines.append(f"| `{flag}{words}` | {_format_default(action.default)} | {action.help} |")
        lines.append("")
    return "\n".join(lines)


def _format_default(default: object) -> str:
    if default is None or default is False:
        return ""
    if isinstance(default, tuple):
        return ",".join(f"{one:g}" for one in default)
    return f"{default:g}" if isinstance(default, float) else str(default)

"""Command-line flags of the trainers; imports neither torch nor TensorFlow, so that bad flags are reported fast."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from stoker.core.units import parse_bytes, parse_duration
from stoker.errors import Fault, InputError, MissingExtraError, SpecError, StokerError
from stoker.load.native import DECODERS
from stoker.load.transforms import TRANSFORMS
from stoker.sampling.plan import SAMPLING_MODES
from stoker.telemetry.stack_signal import install_stack_signal
from stoker.trainers.checkpoint_files import is_step_name, step_name
from stoker.trainers.schedule import SCHEDULES

LR_PER_256 = 0.1
SMALL_SIZE = 64
"""Up to this image size, the defaults of the transforms and of the first layers are those for small images."""
MODELS = ("resnet18", "resnet34", "resnet50", "resnet8", "small", "trivial")
"""Built-in models; stoker.trainers.models defines them."""
PRECISIONS = ("fp32", "bf16", "fp16")
_HIDDEN = argparse.SUPPRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgram:
    """How the flags of one trainer differ from those of the others."""

    module: str
    description: str
    framework: str
    """The Python package that it needs."""
    extra: str
    """The extra of stoker that installs it."""
    model_sources: str = ""
    """Where models besides the built-in ones come from."""
    sampling_modes: tuple[str, ...] = tuple(SAMPLING_MODES)
    precisions: tuple[str, ...] = PRECISIONS
    devices: str = "auto, cpu, cuda or cuda:N"
    device_pattern: str = r"auto|cpu|cuda(:\d+)?"
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda _: None
    find_faults: Callable[[argparse.Namespace], Iterable[tuple[str, str]]] = lambda _: ()
    """Return what is wrong with its own flags: the name of each, and what."""


def build_parser(environ: Mapping[str, str], program: TrainerProgram) -> argparse.ArgumentParser:
    """Build the parser; environment variables of a job are the defaults."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program.module}",
        usage="%(prog)s --train URL [--val URL] [--model NAME] [--epochs N] [--checkpoint-dir DIR] …",
        description=f"{program.description} Resumes automatically from --checkpoint-dir, in the middle of an epoch, "
        "with any world size.",
        allow_abbrev=False,
    )
    _data(parser.add_argument_group("data"), environ, program)
    _model(parser.add_argument_group("model"), program)
    _training(parser.add_argument_group("training"))
    _checkpoints(parser.add_argument_group("checkpoints"), environ)
    _machine(parser.add_argument_group("machine"), program)
    program.add_flags(parser)
    _logging(parser.add_argument_group("logging"))
    return parser


def _data(group: argparse._ArgumentGroup, environ: Mapping[str, str], program: TrainerProgram) -> None:
    get = environ.get
    group.add_argument("--train", metavar="URL", default=get("STOKER_DATA_TRAIN"), help="shard set to train on")
    group.add_argument("--val", metavar="URL", default=get("STOKER_DATA_VAL"), help="shard set to validate on")
    group.add_argument(
        "--via", metavar="URL", default=get("STOKER_DATA_VIA"), help="URL of a shared cache to read through"
    )
    group.add_argument(
        "--sampling",
        choices=program.sampling_modes,
        default=get("STOKER_SAMPLING") or "exact",
        help="how the samples of an epoch are assigned to ranks",
    )
    group.add_argument("--epoch-samples", metavar="N", type=int, help="samples per epoch with --sampling resampled")
    group.add_argument(
        "--cache-dir", metavar="DIR", default=get("STOKER_CACHE_DIR"), help="cache remote shards in this directory"
    )
    group.add_argument(
        "--cache-size",
        metavar="SIZE",
        type=argparse_type(parse_bytes),
        default=get("STOKER_CACHE_SIZE") or None,
        help="size limit of --cache-dir",
    )
    group.add_argument("--decoder", choices=DECODERS, default="auto", help="JPEG decoder; auto: native if available")
    group.add_argument("--size", metavar="PX", type=int, default=224, help="side length of the model input, in pixels")
    names = tuple(TRANSFORMS)
    group.add_argument(
        "--transform",
        metavar="NAME",
        choices=names,
        help=f"training transform: {', '.join(names)}; digits-train does not flip",
    )
    group.add_argument("--val-transform", metavar="NAME", choices=names, help="validation transform")
    group.add_argument(
        "--max-bad",
        metavar="FRACTION",
        type=float,
        default=0.001,
        help="maximum fraction of samples that may fail to decode",
    )
    group.add_argument(
        "--synthetic", action="store_true", help="train on generated batches to measure throughput without data loading"
    )


def _model(group: argparse._ArgumentGroup, program: TrainerProgram) -> None:
    group.add_argument(
        "--model",
        metavar="NAME",
        default="resnet18",
        help=f"{', '.join(MODELS)}, {program.model_sources}or a function: package.module:function",
    )
    group.add_argument(
        "--num-classes", metavar="N", type=int, help="number of classes; default: taken from the training set"
    )
    group.add_argument(
        "--stem",
        choices=("auto", "imagenet", "small"),
        default="auto",
        help="first layers of a ResNet; small: one 3×3 convolution",
    )
    group.add_argument(
        "--zero-gamma",
        action="store_true",
        help="initialize the weight of the last BatchNorm in each residual block to 0",
    )
    group.add_argument("--init-from", metavar="FILE", help="load initial weights from this file or URL")


def _training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--epochs", metavar="N", type=int, default=90, help="number of epochs")
    add("--batch-size", metavar="N", type=int, help="batch size per rank; default: 32")
    add("--global-batch-size", metavar="N", type=int, help="total batch size of all ranks; kept on resume")
    add("--lr", type=float, help=f"peak learning rate; default: {LR_PER_256} × global batch size / 256")
    add("--momentum", type=float, default=0.9, help="SGD momentum")
    add("--nesterov", action="store_true", help="use Nesterov momentum")
    add("--weight-decay", type=float, default=1e-4, help="weight decay, applied to all weights")
    add("--schedule", choices=SCHEDULES, default="multistep", help="learning rate schedule")
    add(
        "--warmup-epochs",
        metavar="N",
        type=float,
        default=0.0,
        help="number of linear warmup epochs, starting from a learning rate of 0",
    )
    add(
        "--milestones",
        metavar="N,N",
        type=_epochs,
        default=(30.0, 60.0, 90.0, 120.0),
        help="epochs at which multistep reduces the learning rate",
    )
    add(
        "--gamma",
        type=float,
        default=0.1,
        help="factor by which multistep multiplies the learning rate at each milestone",
    )
    add("--label-smoothing", metavar="FRACTION", type=float, default=0.0, help="label smoothing for the training loss")
    add(
        "--ema",
        metavar="DECAY",
        type=float,
        default=0.0,
        help="decay rate of the exponential moving average of the weights, such as 0.999; 0: off",
    )
    add("--clip-grad", metavar="NORM", type=float, default=0.0, help="maximum gradient norm; 0: off")
    add("--seed", type=int, default=0, help="seed for the sample order, the augmentation and the initial weights")
    add("--num-batches", metavar="N", type=int, help="stop after this many steps in total")
    add(
        "--eval-only",
        nargs="?",
        metavar="WHICH",
        type=_checkpoint,
        const="newest",
        help="only validate a checkpoint (newest, best, or a name such as step-0000000100.pt), or the weights from "
        "--init-from",
    )
    add(
        "--validate-every",
        metavar="N",
        type=int,
        default=1,
        help="validate every N epochs and after the last epoch; 0: never",
    )


def _checkpoints(group: argparse._ArgumentGroup, environ: Mapping[str, str]) -> None:
    add, get = group.add_argument, environ.get
    add(
        "--checkpoint-dir",
        metavar="DIR",
        default=get("STOKER_CHECKPOINT_DIR"),
        help="directory or URL to write checkpoints to and resume from",
    )
    add(
        "--keep",
        metavar="N",
        type=int,
        default=get("STOKER_CHECKPOINT_KEEP") or "3",
        help="number of latest checkpoints to keep, in addition to the best",
    )
    add(
        "--checkpoint-every",
        metavar="TIME",
        type=argparse_type(parse_duration),
        default="10m",
        help="interval between checkpoints; 0: off",
    )
    add(
        "--checkpoint-every-steps", metavar="N", type=int, default=0, help="number of steps between checkpoints; 0: off"
    )


def _machine(group: argparse._ArgumentGroup, program: TrainerProgram) -> None:
    add = group.add_argument
    add(
        "--device",
        metavar="NAME",
        type=_device(program),
        default="auto",
        help=f"{program.devices}; auto: a GPU if available",
    )
    add("--precision", choices=program.precisions, default="fp32", help="precision of the forward and backward passes")
    add(
        "--threads",
        "--workers",
        metavar="N",
        type=int,
        help="decoding threads per rank; default: cores divided by local ranks",
    )
    add(
        "--deterministic",
        action="store_true",
        help="produce bit-identical results, even after the run is killed and resumed",
    )


def _torch(parser: argparse.ArgumentParser) -> None:
    """Add the flags of PyTorch only."""
    add = parser.add_argument_group("PyTorch").add_argument
    add(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="torch.distributed backend; auto: nccl on cuda, otherwise gloo",
    )
    add("--channels-last", action="store_true", help="use the channels_last memory format, which is faster on GPUs")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    _webdataset(parser)


TORCH_IMAGE = TrainerProgram(
    module="stoker.trainers.torch_image",
    description="Train an image classifier on a shard set, alone or with torchrun.",
    framework="torch",
    extra="torch",
    model_sources="timm:NAME, torchvision:NAME, ",
    add_flags=_torch,
)


def _logging(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--log-every",
        metavar="TIME",
        type=argparse_type(parse_duration),
        default="10",
        help="interval between progress lines",
    )
    add("--ledger", metavar="DIR", help="record which samples each rank saw at each step in this directory")


def _webdataset(parser: argparse.ArgumentParser) -> None:
    """Accept the flags of webdataset-imagenet, with their meaning there."""
    same = {"--batchsize": "batch_size", "--nepochs": "epochs", "--ntrain": "epoch_samples_if_resampled"}
    for flag, name in same.items():
        parser.add_argument(flag, dest=name, type=int, default=_HIDDEN, help=_HIDDEN)
    parser.add_argument("--mname", default=_HIDDEN, help=_HIDDEN)
    parser.add_argument(
        "--loginterval", dest="log_every", type=argparse_type(parse_duration), default=_HIDDEN, help=_HIDDEN
    )
    parser.add_argument(
        "--splitshards", dest="sampling", action="store_const", const="exact", default=_HIDDEN, help=_HIDDEN
    )
    parser.add_argument("--amplevel", dest="amplevel", default=_HIDDEN, help=_HIDDEN)
    for flag in ("--bucket", "--shards", "--valshards"):
        parser.add_argument(flag, default=_HIDDEN, help=_HIDDEN)
    # Always on (onelog), not needed (apexddp), known from the manifest (nval) or from torchrun (wsize).
    for flag in ("--onelog", "--showopen", "--apexddp"):
        parser.add_argument(flag, dest="ignored", action="store_true", default=_HIDDEN, help=_HIDDEN)
    for flag in ("--nval", "--distributed", "--wsize"):
        parser.add_argument(flag, dest="ignored", default=_HIDDEN, help=_HIDDEN)


def default_transform(size: int) -> str:
    """Return the transform of training images for an input of this size."""
    return "small-train" if size <= SMALL_SIZE else "imagenet-train"


def parse_flags(
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    program: TrainerProgram = TORCH_IMAGE,
) -> argparse.Namespace:
    """Parse the flags and check what can be checked without the data; report every fault at once."""
    args = build_parser(environ, program).parse_args(argv)
    _apply_webdataset(args)
    args.transform = args.transform or default_transform(args.size)
    args.has_val_transform = args.val_transform is not None
    args.val_transform = args.val_transform or default_val_transform(args.size)
    faults = [*_faults(args), *program.find_faults(args)]
    if faults:
        raise SpecError([Fault("--" + name.replace("_", "-"), what) for name, what in faults])
    if find_spec(program.framework) is None:
        raise MissingExtraError(program.framework, program.extra, purpose=program.module)
    return args


def default_val_transform(size: int) -> str:
    """Return the validation transform for images of this size."""
    return "whole" if size <= SMALL_SIZE else "imagenet-val"


def parse_or_exit(argv: Sequence[str], program: TrainerProgram = TORCH_IMAGE) -> argparse.Namespace:
    """Parse the flags and set the environment that the framework reads on import; exit if the flags are invalid."""
    install_stack_signal()  # before anything that may hang
    try:
        args = parse_flags(argv, os.environ, program)
    except StokerError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    if args.precision == "bf16":  # oneDNN uses AMX, which some virtual machines list but forbid
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if args.deterministic:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the order of floating-point sums depends on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    return args


def _apply_webdataset(args: argparse.Namespace) -> None:
    """Convert the flags of webdataset-imagenet to ours."""
    args.notes = []
    bucket = vars(args).pop("bucket", "")
    if bucket and not {"shards", "valshards"} & vars(args).keys():
        raise SpecError(
            [Fault("--bucket", "is the prefix of --shards and --valshards: set one of them, or use --train")]
        )
    for theirs, ours in (("shards", "train"), ("valshards", "val")):
        if pattern := vars(args).pop(theirs, ""):
            setattr(args, ours, bucket.replace("{}", pattern) if "{}" in bucket else bucket + pattern)
    samples = vars(args).pop("epoch_samples_if_resampled", None)
    if args.sampling == "resampled" and args.epoch_samples is None:
        args.epoch_samples = samples
    elif samples is not None and args.sampling != "resampled":
        args.notes.append("ignoring --ntrain: an epoch contains every sample once; it applies to --sampling resampled")
    if name := vars(args).pop("mname", ""):  # there, all models are from torchvision
        args.model = name if ":" in name or name in MODELS else f"torchvision:{name}"
    if vars(args).pop("amplevel", "O0") not in ("", "O0"):
        args.precision = "fp16"
    vars(args).pop("ignored", None)


def _faults(args: argparse.Namespace) -> Any:
    for name in ("epochs", "batch_size", "global_batch_size", "num_classes", "num_batches", "threads", "size", "keep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            yield name, f"must be at least 1, got {getattr(args, name)}"
    for name in ("lr", "momentum", "weight_decay", "warmup_epochs", "clip_grad", "seed", "validate_every", "gamma"):
        if getattr(args, name) is not None and not getattr(args, name) >= 0:
            yield name, f"must not be negative, got {getattr(args, name)}"
    if args.checkpoint_every_steps < 0:
        yield "checkpoint_every_steps", f"must not be negative, got {args.checkpoint_every_steps}"
    for milestone in args.milestones:
        if not milestone >= 0:
            yield "milestones", f"must not be negative, got {milestone:g}"
    if args.sampling == "join" and args.num_batches and not args.eval_only:
        yield "num_batches", "cannot be combined with --sampling join, where ranks run different numbers of steps"
    for name in ("label_smoothing", "ema"):
        if not 0 <= getattr(args, name) < 1:
            yield name, f"must be at least 0 and less than 1, got {getattr(args, name)}"
    if args.nesterov and not args.momentum:
        yield "nesterov", "requires --momentum greater than 0"
    if args.synthetic and not args.train and not args.num_classes:
        yield "num_classes", "required with --synthetic if --train is not set"
    if args.eval_only and not args.val:
        yield "val", "required with --eval-only: the shard set to validate on"
    if args.eval_only and not (args.init_from or args.checkpoint_dir):
        yield "eval_only", "requires --init-from or --checkpoint-dir"
    if not args.train and not args.synthetic and not args.eval_only:
        yield "train", "required: set --train or STOKER_DATA_TRAIN to a shard set, or use --synthetic"


def _checkpoint(text: str) -> str:
    if text not in ("newest", "best") and not is_step_name(text):
        raise argparse.ArgumentTypeError(f"must be newest, best or a name like {step_name(100)}, got {text!r}")
    return text


def _device(program: TrainerProgram) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(program.device_pattern, text):
            raise argparse.ArgumentTypeError(f"must be {program.devices}, got {text!r}")
        return text

    return read


def _epochs(text: str) -> tuple[float, ...]:
    return tuple(sorted(float(part) for part in text.split(",") if part.strip()))


_epochs.__name__ = "epochs, such as 30,60,90"


def argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser so that argparse reports its InputError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(error.what) from error

    return read


def flags_table(program: TrainerProgram = TORCH_IMAGE) -> str:
    """Return the tables of flags in docs/train.md."""
    lines = []
    for group in build_parser({}, program)._action_groups:
        actions = [action for action in group._group_actions if action.help not in (_HIDDEN, None)]
        if group.title in (None, "positional arguments", "options"):
            continue
        lines += [
            f"**{str(group.title)[0].upper()}{str(group.title)[1:]}**",
            "",
            "| flag | default | |",
            "|---|---|---|",
        ]
        for action in actions:
            value = f" {action.metavar}" if action.metavar else " " + " \\| ".join(map(str, action.choices or ()))
            flag = "`, `".join(action.option_strings)
            value = "" if action.nargs == 0 else value.rstrip()
            lines.append(f"| `{flag}{value}` | {_format_default(action.default)} | {action.help} |")
        lines.append("")
    return "\n".join(lines)


def _format_default(default: object) -> str:
    if default is None or default is False:
        return ""
    if isinstance(default, tuple):
        return ",".join(f"{number:g}" for number in default)
    return f"{default:g}" if isinstance(default, float) else str(default)

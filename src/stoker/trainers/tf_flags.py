"""Flags of the TensorFlow trainers; imports no TensorFlow, so that bad flags are reported fast."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from stoker.core.units import parse_duration
from stoker.trainers import flags
from stoker.trainers.flags import TrainerProgram, argparse_type

UPDATES = ("exact", "async")


def _tensorflow(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the TensorFlow trainers have in common."""
    add = parser.add_argument_group("TensorFlow").add_argument
    add("--export", metavar="DIR", help="write the trained model to this directory as a SavedModel")
    add(
        "--tensorboard",
        metavar="DIR",
        help="write the scalars to this directory as event files of TensorBoard, as `roles.tensorboard` reads them",
    )
    add(
        "--peer-timeout",
        metavar="TIME",
        type=argparse_type(parse_duration),
        default="2m",
        help="exit if another task does not respond for this long during training",
    )
    add(
        "--start-timeout",
        metavar="TIME",
        type=argparse_type(parse_duration),
        default="10m",
        help="exit if not all tasks have started after this long",
    )


def _evaluator(parser: argparse.ArgumentParser) -> None:
    _tensorflow(parser)
    parser.set_defaults(eval_only="newest")


def _parameter_servers(parser: argparse.ArgumentParser) -> None:
    _tensorflow(parser)
    add = parser.add_argument_group("parameter servers").add_argument
    add(
        "--updates",
        choices=UPDATES,
        default="exact",
        help="exact: each sample's gradient is applied once; async: workers update the weights independently, and "
        "the gradient of a lost worker may be applied twice (at least once)",
    )
    add(
        "--use-in-process-cluster",
        action="store_true",
        help="run two workers and a parameter server in this process, to try a training on one machine",
    )


def _find_parameter_server_faults(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if args.updates == "async" and args.ema:
        yield "ema", "cannot be combined with --updates async, where no step has a defined end"


_COMMON = {
    "framework": "tensorflow",
    "extra": "tf",
    "sampling_modes": ("exact", "resampled"),
    "precisions": ("fp32", "bf16"),
    "devices": "auto or cpu",
    "device_pattern": "auto|cpu",
}
TF_MIRRORED = TrainerProgram(
    module="stoker.trainers.tf_mirrored",
    description="Train an image classifier with MultiWorkerMirroredStrategy, alone, with TF_CONFIG or with mpirun.",
    add_flags=_tensorflow,
    **_COMMON,  # type: ignore[arg-type]
)
TF_PS = TrainerProgram(
    module="stoker.trainers.tf_ps",
    description="Train an image classifier with parameter servers; every task of the cluster runs this program.",
    add_flags=_parameter_servers,
    find_faults=_find_parameter_server_faults,
    **_COMMON,  # type: ignore[arg-type]
)
TF_EVALUATOR = TrainerProgram(
    module="stoker.trainers.tf_evaluator",
    description="Validate the checkpoints of a TensorFlow training as they appear.",
    add_flags=_evaluator,
    **_COMMON,  # type: ignore[arg-type]
)


def parse_or_exit(argv: Sequence[str], program: TrainerProgram) -> argparse.Namespace:
    """Parse the flags and set the environment that TensorFlow reads on import; exit if the flags are invalid."""
    args = flags.parse_or_exit(argv, program)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no informational messages
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return args

"""Template of the job file that `stoker init` writes."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.core.yaml_io import to_yaml

_TEMPLATE = """\
# A stoker job. Show what would run:  stoker job plan {file}
#               Run it:               stoker job run {file}
# Override a key for one run:         stoker job run {file} --set resources.gpu=4
# Every key is documented in docs/job-file.md.
{about}
name: {name}

program:                      # your own program: script: train.py, or module: package.train
  module: stoker.trainers.torch_image
  args: [{args}]

topology: torchrun            # single: one process
workers: auto                 # machines: all of ssh.hosts, otherwise 1; {{min: 2, max: 8}}: elastic
processes_per_worker: auto    # ranks per worker: one per GPU, at least 1

# resources:                  # of one worker
#   gpu: 8                    # default: with --on ssh all GPUs of the hosts, otherwise none
#   cpu: 8
#   memory: 32Gi

data:                         # passed to the program as STOKER_DATA_TRAIN, STOKER_DATA_VAL, …
  train: {train}
  val: {val}
  # cache: {{dir: /tmp/stoker-cache, size: 20Gi}}   # local copies of remote shards
  # via: http://cache:3128    # a shared caching proxy, see `stoker data cache`
  # sampling: exact           # or join, resampled

# checkpoint:
#   dir: checkpoints          # or s3://bucket/path; default: the run folder
#   keep: 3                   # recent checkpoints, in addition to the best

# env:
#   OMP_NUM_THREADS: 1

# labels: {{team: vision}}
# retries: 3                  # restarts after a failure, from the last checkpoint
# grace: 30s                  # time between SIGTERM and SIGKILL, to write a last checkpoint
# hang_after: 10m             # restart after this time without a heartbeat; 0 disables this
# profile: {{every: 30s}}       # samples GPU, CPU, network and disk utilization
# tensorboard: true           # event files in the run folder

# For more than one machine:
# image: ghcr.io/acme/trainer:v1
# ssh:
#   hosts: [node1, node2]     # run with --on ssh
#   workdir: /srv/train
# kubernetes:
#   namespace: training
"""


DEFAULT_ARGS = ("--model", "resnet18", "--global-batch-size", "64", "--epochs", "10")


def render_template(
    name: str,
    train: str,
    val: str | None = None,
    *,
    file: str = "job.yaml",
    args: Sequence[str] = DEFAULT_ARGS,
    about: str = "",
) -> str:
    """Return a job file with the common keys and comments; optional keys are commented out.

    `args` are the flags of the trainer, and `about` describes the dataset that they were chosen for.
    """
    text = _TEMPLATE.format(
        name=_scalar(name),
        train=_scalar(train),
        val="VAL" if val is None else _scalar(val),
        file=file,
        args=", ".join(args),
        about=f"# The flags were chosen for the dataset: {about}.\n" if about else "",
    )
    return text if val is not None else text.replace("  val: VAL\n", "  # val: shards/val\n")


def _scalar(text: str) -> str:
    """Write a string as a YAML scalar, quoted if necessary."""
    return to_yaml([text]).strip()[1:-1]

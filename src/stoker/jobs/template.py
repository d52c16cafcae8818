"""The job file that `stoker init` writes."""

from __future__ import annotations

from stoker.core.spec import to_yaml

_TEMPLATE = """\
# A job for stoker. See what would run:  stoker job plan {file}
#                   Run it:              stoker job run {file}
# Any key can be changed for one run:    stoker job run {file} --set resources.gpu=4
# Every key is described in docs/job-file.md.

name: {name}

program:                      # for your own: script: train.py, or module: package.train
  module: stoker.trainers.torch_image
  args: [--model, resnet18, --epochs, 10, --global-batch-size, 64]

topology: torchrun            # single: one process
workers: 1                    # machines; {{min: 2, max: 8}} may grow and shrink
processes_per_worker: auto    # ranks on each: its GPUs, or 1

resources:                    # of one worker
  gpu: 0
  # cpu: 8
  # memory: 32Gi

data:                         # the program finds these in STOKER_DATA_TRAIN, STOKER_DATA_VAL, …
  train: {train}
  val: {val}
  # cache: {{dir: /tmp/stoker-cache, size: 20Gi}}   # keeps remote shards on this machine
  # via: http://cache:3128    # a shared cache, as `stoker data cache` starts one
  # sampling: exact           # or join, resampled

# checkpoint:
#   dir: checkpoints          # or s3://bucket/folder; by default in the run's own folder
#   keep: 3                   # newest, beside the best

# env:
#   OMP_NUM_THREADS: 1

# labels: {{team: vision}}
# retries: 3                  # starts again after a failure, from the last checkpoint
# grace: 30s                  # for a last checkpoint, when the job is stopped
# hang_after: 10m             # without a heartbeat; 0: never
# profile: {{every: 30s}}       # looks at GPU, cores, network and disk
# tensorboard: true           # event files in the run's folder

# For more than one machine:
# image: ghcr.io/acme/trainer:v1
# ssh:
#   hosts: [node1, node2]     # run with --on ssh
#   workdir: /srv/train
# kubernetes:
#   namespace: training
"""


def template(name: str, train: str, val: str | None = None, *, file: str = "job.yaml") -> str:
    """Write a job file to start from: what is used most with a comment each, the rest commented out."""
    text = _TEMPLATE.format(
        name=_scalar(name), train=_scalar(train), val="VAL" if val is None else _scalar(val), file=file
    )
    return text if val is not None else text.replace("  val: VAL\n", "  # val: shards/val\n")


def _scalar(text: str) -> str:
    """Quote a text for YAML where it needs to be."""
    return to_yaml([text]).strip()[1:-1]

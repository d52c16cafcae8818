"""The training and validation sets of the image trainer, and the number of classes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from stoker.core.permutations import seed_key
from stoker.core.text import join_some
from stoker.errors import InputError
from stoker.load.loader import StageTimes
from stoker.load.torch import Dataset, TorchBatch
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from stoker.storage.cache_url import find_cache_url
from stoker.trainers.checkpoints import CheckpointMeta
from stoker.trainers.world import World

IMAGENET_SAMPLES = 1_281_167


class TrainingData:
    """The training set, or with `--synthetic` batches of the same shapes and counts without any I/O."""

    def __init__(
        self,
        plan: SamplingPlan,
        classes: tuple[str, ...],
        dataset: Dataset | None,
        synthetic: SyntheticBatches | None,
    ) -> None:
        self.plan, self.classes, self._dataset, self._synthetic = plan, classes, dataset, synthetic

    @classmethod
    def open(cls, args: argparse.Namespace, world: World, global_batch: int) -> TrainingData:
        """Open the training set that the flags name."""
        if not args.train:
            samples = args.epoch_samples or IMAGENET_SAMPLES
            plan = SamplingPlan(data="synthetic", sizes=np.array([samples], dtype=np.int64), seed=args.seed)
            return cls(plan, (), None, SyntheticBatches(args, world, plan, global_batch))
        dataset = Dataset(
            _cached_url(args, args.train),
            **_dataset_options(args, world, global_batch, args.transform),
            sampling=args.sampling,
            epoch_samples=args.epoch_samples,
            seed=args.seed,
        )
        manifest, plan = dataset.loader.shard_set.manifest, dataset.loader.plan
        classes = manifest.classes if manifest is not None else ()
        if args.synthetic and not (classes or args.num_classes):
            raise _unknown_classes(args.train)
        synthetic = SyntheticBatches(args, world, plan, global_batch, len(classes)) if args.synthetic else None
        return cls(plan, classes, dataset, synthetic)

    @property
    def times(self) -> StageTimes:
        """Times of the loader's threads so far."""
        return self._dataset.loader.times if self._dataset is not None else StageTimes()

    def shard_name(self, number: int) -> str:
        """Return the name of a shard."""
        return self._dataset.loader.shard_set.shards[number].name if self._dataset is not None else ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor."""
        (self._synthetic or self._dataset).load_state_dict(state)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[TorchBatch]:
        return iter(self._synthetic or self._dataset)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop the loader's threads."""
        if self._dataset is not None:
            self._dataset.close()


class SyntheticBatches:
    """Random batches, generated once, with the counts and cursors of a sampling plan."""

    def __init__(
        self, args: argparse.Namespace, world: World, plan: SamplingPlan, global_batch: int, classes: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed_key("synthetic", args.seed, world.rank))
        count = -(-global_batch // world.size)
        shape = (count, args.size, args.size, 3)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
        self._labels = torch.randint(0, args.num_classes or classes, (count,), generator=generator)
        self._plan, self._rank, self._global_batch = plan, world.sampling_rank, global_batch
        self._cursor = plan.start_cursor()
        self._images, self._labels = self._images.to(world.device), self._labels.to(world.device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor."""
        self._cursor = self._plan.check_cursor(Cursor.from_state(state))

    def __iter__(self) -> Iterator[TorchBatch]:
        epoch = self._plan.epoch(self._cursor.epoch, self._rank)
        for _, positions, end in epoch.steps(self._cursor.consumed, self._global_batch):
            count = len(positions)
            yield TorchBatch(self._images[:count], self._labels[:count], count, end, positions)


def open_validation_set(args: argparse.Namespace, world: World, global_batch: int) -> Dataset | None:
    """Open the validation set; None on a rank for which it has too few samples.

    Its batch is that of the training, as far as its size and the number of ranks allow.
    """
    options = _dataset_options(args, world, 1, args.val_transform)
    probe = Dataset(_cached_url(args, args.val), **{**options, "rank": (0, 1)})
    samples, shard_set = probe.loader.plan.samples, probe.loader.shard_set
    probe.close()
    ranks = min(world.size, samples)
    if world.rank >= ranks:
        return None
    rank = Rank(world.rank, ranks, world.sampling_rank.local_world_size)
    return Dataset(shard_set, **{**options, "rank": rank, "global_batch": min(max(global_batch, ranks), samples)})


def count_classes(
    args: argparse.Namespace, meta: CheckpointMeta, data: TrainingData | None, val: Dataset | None
) -> int:
    """Return the number of classes: from --num-classes, else from the training set, or from the checkpoint to evaluate.

    Raise InputError if it is unknown, if the dataset has more, or if the classes of both sets differ.
    """
    manifest = val.loader.shard_set.manifest if val is not None else None
    val_classes = manifest.classes if manifest is not None else ()
    if data is not None and data.classes and val_classes and data.classes != val_classes:
        raise InputError(
            f"classes ({join_some(val_classes)}) differ from those of the training set ({join_some(data.classes)})",
            where=args.val,
            hint="convert both splits with one command",
        )
    in_data = len(data.classes if data is not None else val_classes)
    number = args.num_classes or (meta.get("num_classes", in_data) if args.eval_only else in_data)
    where = args.train or args.val
    if not number:
        raise _unknown_classes(where)
    if number < in_data:
        raise InputError(
            f"the dataset has {in_data} classes, but the model has {number}",
            where=where,
            hint=f"set --num-classes to {in_data} or more, or remove it" if args.num_classes else None,
        )
    return int(number)


def _unknown_classes(where: str) -> InputError:
    return InputError(
        "number of classes is unknown: the manifest lists no classes", where=where, hint="set --num-classes"
    )


def _cached_url(args: argparse.Namespace, url: str) -> str:
    return find_cache_url(url, args.via) if args.via else url


def _dataset_options(args: argparse.Namespace, world: World, global_batch: int, transform: str) -> dict[str, Any]:
    return {
        "global_batch": global_batch,
        "transform": transform,
        "size": args.size,
        "decoder": args.decoder,
        "rank": world.sampling_rank,
        "cache": args.cache_dir,
        "cache_size": args.cache_size,
        "threads": args.threads,
        "max_bad": args.max_bad,
        "device": world.device,
    }

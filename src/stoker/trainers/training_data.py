"""The training and validation sets of the trainers, whatever the framework, and the number of classes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stoker.core.permutations import seed_key
from stoker.core.text import join_some
from stoker.errors import InputError
from stoker.load.loader import Batch, Loader, StageTimes
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from stoker.storage.cache_url import find_cache_url
from stoker.trainers.checkpoint_store import CheckpointMeta

IMAGENET_SAMPLES = 1_281_167


class Batches(Protocol):
    """Batches of the rest of an epoch, from a cursor on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor."""

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class DataAdapter:
    """How a framework gets its batches: as they are, unless a trainer says otherwise."""

    open: Callable[..., tuple[Batches, Loader]]
    """Open a shard set with the options of `Loader`; return its batches and the loader that reads them."""
    to_device: Callable[[Any, Any], tuple[Any, Any]] = lambda images, labels: (images, labels)
    """Convert images (N×H×W×3, uint8) and labels of numpy."""
    make_batch: Callable[..., Any] = Batch


def open_loader(url: Any, **options: Any) -> tuple[Batches, Loader]:
    """Open a shard set whose batches are those of the loader."""
    loader = Loader(url, **options)
    return loader, loader


class TrainingData:
    """The training set, or with `--synthetic` batches of the same shapes and counts without any I/O."""

    def __init__(self, plan: SamplingPlan, classes: tuple[str, ...], batches: Batches, loader: Loader | None) -> None:
        self.plan, self.classes, self._batches, self._loader = plan, classes, batches, loader

    @classmethod
    def open(cls, args: argparse.Namespace, rank: Rank, global_batch: int, adapter: DataAdapter) -> TrainingData:
        """Open the training set that the flags name."""
        if not args.train:
            samples = args.epoch_samples or IMAGENET_SAMPLES
            plan = SamplingPlan(data="synthetic", sizes=np.array([samples], dtype=np.int64), seed=args.seed)
            return cls(plan, (), SyntheticBatches(args, rank, plan, global_batch, adapter), None)
        batches, loader = adapter.open(
            cached_url(args, args.train),
            **loader_options(args, rank, global_batch, args.transform),
            sampling=args.sampling,
            epoch_samples=args.epoch_samples,
            seed=args.seed,
        )
        manifest, plan = loader.shard_set.manifest, loader.plan
        classes = manifest.classes if manifest is not None else ()
        if args.synthetic:
            if not (classes or args.num_classes):
                raise _unknown_classes(args.train)
            batches = SyntheticBatches(args, rank, plan, global_batch, adapter, len(classes))
        return cls(plan, classes, batches, loader)

    @property
    def times(self) -> StageTimes:
        """Times of the loader's threads so far."""
        return self._loader.times if self._loader is not None else StageTimes()

    @property
    def loader(self) -> Loader | None:
        """The loader that reads the training set; None for synthetic batches."""
        return self._loader

    def shard_name(self, number: int) -> str:
        """Return the name of a shard."""
        return self._loader.shard_set.shards[number].name if self._loader is not None else ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor."""
        self._batches.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def close(self) -> None:
        """Stop the loader's threads."""
        if self._loader is not None:
            self._loader.close()


class SyntheticBatches:
    """Random batches, generated once, with the counts and cursors of a sampling plan."""

    def __init__(
        self,
        args: argparse.Namespace,
        rank: Rank,
        plan: SamplingPlan,
        global_batch: int,
        adapter: DataAdapter,
        classes: int = 0,
    ) -> None:
        generator = np.random.default_rng(seed_key("synthetic", args.seed, rank.number))
        count = -(-global_batch // rank.world_size)
        images = generator.integers(0, 256, (count, args.size, args.size, 3), dtype=np.uint8)
        labels = generator.integers(0, args.num_classes or classes, count)
        self._images, self._labels = adapter.to_device(images, labels)
        self._make_batch = adapter.make_batch
        self._plan, self._rank, self._global_batch = plan, rank, global_batch
        self._cursor = plan.start_cursor()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor."""
        self._cursor = self._plan.check_cursor(Cursor.from_state(state))

    def __iter__(self) -> Iterator[Any]:
        epoch = self._plan.epoch(self._cursor.epoch, self._rank)
        for _, positions, end in epoch.steps(self._cursor.consumed, self._global_batch):
            count = len(positions)
            yield self._make_batch(self._images[:count], self._labels[:count], count, end, positions)


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """The validation set; `batches` is None on a rank for which it has too few samples."""

    batches: Batches | None
    loader: Loader

    @classmethod
    def open(cls, args: argparse.Namespace, rank: Rank, global_batch: int, adapter: DataAdapter) -> ValidationSet:
        """Open the set; its batch is that of the training, as far as its size and the number of ranks allow."""
        options = loader_options(args, rank, 1, args.val_transform)
        probe = Loader(cached_url(args, args.val), **{**options, "rank": (0, 1)})
        samples, shard_set = probe.plan.samples, probe.shard_set
        probe.close()
        ranks = min(rank.world_size, samples)
        if rank.number >= ranks:
            return cls(None, probe)
        own = Rank(rank.number, ranks, rank.local_world_size)
        global_batch = min(max(global_batch, ranks), samples)
        return cls(*adapter.open(shard_set, **{**options, "rank": own, "global_batch": global_batch}))

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the whole set on this rank."""
        if self.batches is not None:
            self.batches.load_state_dict(self.loader.plan.start_cursor().state())
            yield from self.batches


def count_classes(args: argparse.Namespace, meta: CheckpointMeta, data: TrainingData | None, val: Loader | None) -> int:
    """Return the number of classes: from --num-classes, else from the training set, or from the checkpoint to evaluate.

    Raise InputError if it is unknown, if the dataset has more, or if the classes of both sets differ.
    """
    manifest = val.shard_set.manifest if val is not None else None
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


def cached_url(args: argparse.Namespace, url: str) -> str:
    """Return the URL of a set, through the shared cache of --via if there is one."""
    return find_cache_url(url, args.via) if args.via else url


def loader_options(args: argparse.Namespace, rank: Rank, global_batch: int, transform: str) -> dict[str, Any]:
    """Return the options of `Loader` that the flags set."""
    return {
        "global_batch": global_batch,
        "transform": transform,
        "size": args.size,
        "decoder": args.decoder,
        "rank": rank,
        "cache": args.cache_dir,
        "cache_size": args.cache_size,
        "threads": args.threads,
        "max_bad": args.max_bad,
    }

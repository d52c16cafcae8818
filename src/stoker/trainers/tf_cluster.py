"""The tasks of a TensorFlow training: how this process joins them, collectives, and what a lost task looks like."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import pickle
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from stoker.sampling.rank import Rank
from stoker.telemetry import Recorder
from stoker.telemetry.events import PEER_LOST
from stoker.tf_environment import TaskEnvironment, read_tf_environment
from stoker.trainers.rank_group import RankGroup
from stoker.trainers.rendezvous import meet, read_mpi_environment
from stoker.trainers.startup import print_error
from stoker.trainers.watchdog import Watchdog

T = TypeVar("T")
CHUNK_WORDS = 4 << 20
"""64-bit words that one collective transfers at once."""
PEER_LOST_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
_PEER_LOST_TEXT = ("Collective ops is aborted", "coordination service", "CoordinationService")


def is_peer_lost(error: Exception) -> bool:
    """Return whether an error means that another task has died or does not respond."""
    if isinstance(error, PEER_LOST_ERRORS):
        return True
    return isinstance(error, tf.errors.OpError) and any(text in str(error) for text in _PEER_LOST_TEXT)


def read_task(args: argparse.Namespace) -> TaskEnvironment | None:
    """Return the task of this process in its cluster; None if it trains alone."""
    return read_tf_environment() or read_mpi_environment(os.environ, args.start_timeout)


def configure_tensorflow(args: argparse.Namespace, *, min_inter_op_threads: int = 1) -> None:
    """Set threads, determinism and log level; must run before TensorFlow executes anything."""
    tf.get_logger().setLevel(logging.CRITICAL)  # it reports errors that we report in one sentence, or retry
    tf.get_logger().propagate = False
    logging.getLogger("absl").setLevel(logging.WARNING)
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    if args.deterministic:
        tf.config.experimental.enable_op_determinism()
        threads = threads or 1
        tf.config.threading.set_inter_op_parallelism_threads(min_inter_op_threads)
    elif min_inter_op_threads > 1:
        tf.config.threading.set_inter_op_parallelism_threads(max(min_inter_op_threads, threads))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def make_watchdog(record: Recorder) -> Watchdog:
    """Return a watchdog that reports a lost task."""

    def report(sentence: str) -> None:
        record.mark("lost", f"{PEER_LOST}: {sentence}")
        print_error(f"error: {sentence}")

    return Watchdog(report)


class MirroredWorld(RankGroup):
    """The workers of a MultiWorkerMirroredStrategy, one rank each; a process without a cluster is the only rank."""

    def __init__(self, args: argparse.Namespace, task: TaskEnvironment | None, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self._start_timeout_s = float(args.start_timeout)
        trainers = task.trainers if task is not None else ()
        number = trainers.index((task.role, task.index)) if task is not None and len(trainers) > 1 else 0
        self.sampling_rank = Rank(number, max(1, len(trainers)), _count_local(task))
        if task is not None and len(trainers) > 1:
            os.environ["TF_CONFIG"] = task.to_tf_config()
            role, index = trainers[0]
            port = int(task.address.rpartition(":")[2])
            meet(self.sampling_rank, task.cluster[role][index], port, self._start_timeout_s)
        else:
            os.environ.pop("TF_CONFIG", None)
        # TensorFlow waits for all workers without a limit, and blocks all threads of Python meanwhile.
        faulthandler.dump_traceback_later(self._start_timeout_s, exit=True)
        implementation = tf.distribute.experimental.CommunicationImplementation
        self._options = {"implementation": implementation.AUTO if _has_gpus() else implementation.RING}
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self.communication_options(self._start_timeout_s)
        )
        self.device_type = "gpu" if _has_gpus() else "cpu"
        self._sum = tf.function(self._sum_replicas, reduce_retracing=True)
        self.all_gather(0)  # all workers are here
        faulthandler.cancel_dump_traceback_later()

    @property
    def local_replicas(self) -> int:
        """The number of devices of this worker."""
        return int(self.strategy.num_replicas_in_sync) // self.size

    def communication_options(self, timeout_s: float) -> Any:
        """Return options for collectives that fail after this time."""
        return tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s, **self._options)

    def all_reduce(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the sums of numbers over all ranks."""
        if self.size == 1:
            return numbers
        # Every replica of a worker contributes, so only the first of them has numbers.
        return np.asarray(self._sum(numbers))

    def all_gather(self, number: int) -> list[int]:
        """Return the number of each rank."""
        numbers = np.zeros(self.size, dtype=np.int64)
        numbers[self.rank] = number
        gathered: list[int] = self.all_reduce(numbers).tolist()
        return gathered

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all ranks."""
        if self.size == 1:
            return value
        data = pickle.dumps(value) if self.rank == 0 else b""
        length = int(self.all_reduce(np.array([len(data)], dtype=np.int64))[0])
        words = np.zeros(-(-length // 8), dtype=np.int64)
        words.view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        # Sums of integers with zeros: bit-identical, unlike floats, where -0.0 + 0.0 is 0.0.
        for start in range(0, len(words), CHUNK_WORDS):
            part = slice(start, start + CHUNK_WORDS)
            words[part] = self.all_reduce(words[part])
        received: T = pickle.loads(words.tobytes()[:length])
        return received

    def close(self) -> None:
        """Stop the watchdog; TensorFlow has no call to leave a cluster."""
        self.watchdog.close()

    def _sum_replicas(self, numbers: Any) -> Any:
        def add(numbers: Any) -> Any:
            context = tf.distribute.get_replica_context()
            is_first = context.replica_id_in_sync_group % self.local_replicas == 0
            return context.all_reduce("sum", tf.where(is_first, numbers, tf.zeros_like(numbers)))

        return self.strategy.experimental_local_results(self.strategy.run(add, args=(numbers,)))[0]


def _has_gpus() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _count_local(task: TaskEnvironment | None) -> int:
    """Return how many workers share this machine, as far as their addresses tell."""
    if task is None or not task.address:
        return 1
    host = task.address.rpartition(":")[0]
    addresses = [address for role, index in task.trainers for address in [task.cluster[role][index]]]
    return max(1, sum(address.rpartition(":")[0] == host for address in addresses))

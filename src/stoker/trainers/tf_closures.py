"""Closures on the workers of parameter servers: scheduled, waited for with a deadline, repeated if a worker is lost."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from stoker.telemetry import Recorder
from stoker.tf_environment import TaskEnvironment
from stoker.trainers.data_report import DataReporter
from stoker.trainers.rendezvous import MissingPeersError, free_port, is_responding, wait_for_servers
from stoker.trainers.startup import print_error
from stoker.trainers.tf_reader import PositionReader, find_reader_error
from stoker.trainers.watchdog import EXIT_CODE, Watchdog, exit_now

POLL_S = 0.0005
MAX_POLL_S = 0.01
START_POLL_S, CHIEF_POLL_S = 0.5, 5.0
IN_PROCESS_WORKERS, IN_PROCESS_SERVERS = 2, 1


class Workers:
    """The workers of a cluster, which execute closures in any order."""

    def __init__(self, args: argparse.Namespace, task: TaskEnvironment | None, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._timeout_s = float(args.peer_timeout)
        self._first_timeout_s = self._timeout_s + float(args.start_timeout)
        self._servers: list[Any] = []
        if task is None:
            resolver, self.count = self._start_in_process()
        else:
            servers = {f"{role} {i}": a for role in ("ps", "worker") for i, a in enumerate(task.cluster.get(role, ()))}
            wait_for_servers(servers, float(args.start_timeout))
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                _cluster_spec(task), task_type=task.role, task_id=task.index, rpc_layer="grpc"
            )
            self.count = len(task.cluster["worker"])
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._has_run = False

    def run(self, function: Any, arguments: Sequence[tuple[Any, ...]], on_poll: Callable[[], None]) -> list[Any]:
        """Execute a pure function once for each tuple of arguments; return the results in that order.

        A result that is lost with its worker is computed again. Raise MissingPeersError after --peer-timeout.
        """
        # As tensors of the chief: while TensorFlow copies arrays of numpy to a worker, it blocks all threads of Python,
        # the watchdog included.
        tensors = [tuple(tf.constant(value) for value in values) for values in arguments]
        results: dict[int, Any] = {}
        while missing := [index for index in range(len(arguments)) if index not in results]:
            with self._watchdog.bound(self._limit_s, self._sentence):
                remote = {index: self._coordinator.schedule(function, args=tensors[index]) for index in missing}
            self._wait(on_poll)
            with self._watchdog.bound(self._limit_s, self._sentence):
                for index, value in remote.items():
                    try:
                        results[index] = self._coordinator.fetch(value)
                    except tf.errors.UnavailableError:
                        continue  # the worker died between its answer and this call
                    except tf.errors.OpError as error:
                        raise find_reader_error(error) or error from error
        return [results[index] for index in range(len(arguments))]

    @property
    def _limit_s(self) -> float:
        """How long workers may take; the first time longer, because they build the graph."""
        return self._timeout_s if self._has_run else self._first_timeout_s

    @property
    def _sentence(self) -> str:
        return f"no worker has finished its work for {self._limit_s:g} s"

    def _wait(self, on_poll: Callable[[], None]) -> None:
        deadline, pause_s = time.monotonic() + self._limit_s, POLL_S
        try:
            while not self._coordinator.done():
                on_poll()
                if time.monotonic() > deadline:
                    raise MissingPeersError(self._sentence)
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.1, MAX_POLL_S)
        except tf.errors.OpError as error:
            raise find_reader_error(error) or error from error
        self._has_run = True

    def _start_in_process(self) -> tuple[Any, int]:
        """Start workers and parameter servers in this process."""
        counts = {"worker": IN_PROCESS_WORKERS, "ps": IN_PROCESS_SERVERS}
        cluster = {role: [f"127.0.0.1:{free_port()}" for _ in range(count)] for role, count in counts.items()}
        spec = tf.train.ClusterSpec(cluster)
        config = tf.compat.v1.ConfigProto()
        config.inter_op_parallelism_threads = 2 * IN_PROCESS_WORKERS
        for role, count in counts.items():
            for index in range(count):
                server = tf.distribute.Server(spec, job_name=role, task_index=index, protocol="grpc", config=config)
                self._servers.append(server)
        return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc"), IN_PROCESS_WORKERS


def serve(args: argparse.Namespace, task: TaskEnvironment, record: Recorder) -> int:
    """Run a worker or parameter server until it is stopped, or until the chief is gone for --peer-timeout."""
    reader = PositionReader(args, args.num_classes or 0).register()
    server = tf.distribute.Server(
        _cluster_spec(task), job_name=task.role, task_index=task.index, protocol="grpc", start=True
    )
    record.mark("serving", f"{task.role} {task.index} at {task.address}")
    (chief,) = task.cluster["chief"]
    timeout_s, seen_at, was_seen = float(args.start_timeout), time.monotonic(), False
    forever, pause_s, reporter = threading.Event(), START_POLL_S, DataReporter(record)
    while not forever.wait(pause_s):
        if (loader := reader.training_loader) is not None:
            reporter.report(loader, reader.epoch, step=0)
        if is_responding(chief, pause_s):
            timeout_s, seen_at, was_seen = float(args.peer_timeout), time.monotonic(), True
            pause_s = min(CHIEF_POLL_S, timeout_s / 4)
        elif time.monotonic() - seen_at > timeout_s:
            what = "has not responded" if was_seen else "did not start"
            sentence = f"the chief at {chief} {what} within {timeout_s:g} s"
            record.mark("lost", sentence)
            print_error(f"error: {sentence}")
            exit_now(EXIT_CODE)
    del reader, server
    return 0


def _cluster_spec(task: TaskEnvironment) -> Any:
    return tf.train.ClusterSpec({role: list(addresses) for role, addresses in task.cluster.items() if addresses})

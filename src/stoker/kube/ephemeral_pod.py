"""A pod that is there for a visit: made, waited for until it runs, and deleted in every case."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from stoker.core.processes import until
from stoker.core.units import format_duration
from stoker.errors import (
    AccessError,
    FullError,
    InputError,
    NotFoundError,
    StokerError,
    UnavailableError,
)
from stoker.kube.objects import Manifest, with_owner
from stoker.kube.pods import explain_pending, get_exit_status, is_running

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

POLL_S = 0.5
GRACE_S = 1
"""Of a pod that has nothing to save. Not 0: then it would be forgotten while it still runs, and has its volumes."""
DELETE_TIMEOUT_S = 30.0
REJECTION_ERRORS = (AccessError, FullError, InputError)
"""What says that an object was not made; after any other error it may have been."""
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ephemeral_pod(
    cluster: KubeClient,
    pod: Manifest,
    others: Sequence[Manifest] = (),
    *,
    wait_s: float,
    report: Callable[[str], object],
) -> Iterator[str]:
    """Make a pod, and objects that go with it when it is deleted; give its name once it runs."""
    name, was_refused = str(pod["metadata"]["name"]), False
    with sighup_as_keyboard_interrupt():
        try:
            try:
                made = cluster.create(pod)
            except REJECTION_ERRORS:
                was_refused = True
                raise
            for one in others:
                cluster.create(with_owner(one, made))
            wait_until_running(cluster, name, wait_s, report)
            yield name
        finally:
            if not was_refused:
                _delete(cluster, name, report)


def delete_finished(pods: Iterable[Manifest], cluster: KubeClient) -> None:
    """Delete pods of visits that have ended by their limit, since who made them could not; they hold claims."""
    for one in pods:
        if get_exit_status(one) is not None:
            with suppress(AccessError):
                cluster.delete("Pod", one["metadata"]["name"])


def wait_until_running(cluster: KubeClient, name: str, wait_s: float, tell: Callable[[str], object]) -> None:
    """Wait until a pod's container runs; say why it does not yet, whenever that changes."""
    deadline, said = time.monotonic() + wait_s, ""
    while True:
        pod = cluster.get("Pod", name)
        if pod is None:
            raise NotFoundError(f"pod {name} is gone", where=cluster)
        if is_running(pod):
            return
        if (end := get_exit_status(pod)) is not None:
            code, reason = end
            what = f"pod {name} ended at once with exit code {code}{f' ({reason})' if reason else ''}"
            raise UnavailableError(what, where=cluster)
        why = explain_pending(pod, list_events(cluster, pod))
        if why and why != said:
            tell(f"Pod {name} does not run yet: {why}")
            said = why
        if time.monotonic() > deadline:
            reason = why or "it is only being started"
            what = f"pod {name} does not run after {format_duration(round(wait_s))}: {reason}"
            raise UnavailableError(what, where=cluster)
        time.sleep(POLL_S)


def list_events(cluster: KubeClient, one: Manifest | None = None) -> list[Manifest]:
    """Give the events of an object, or of the namespace; none where they may not be read, as they are only said."""
    try:
        return cluster.list_objects("Event", fields=f"involvedObject.uid={one['metadata']['uid']}" if one else "")
    except AccessError:
        return []


def wait_deleted(cluster: KubeClient, kind: str, name: str, seconds: float) -> bool:
    """Wait until an object that was deleted is gone; tell whether it is."""
    return until(lambda: cluster.get(kind, name) is None, seconds, pause_s=POLL_S)


def _delete(cluster: KubeClient, name: str, tell: Callable[[str], object]) -> None:
    """Delete the pod and wait until it has given back its volumes; a second Ctrl-C ends only the waiting."""
    try:
        with _signals(dict.fromkeys(_ENDINGS, signal.SIG_IGN)):
            cluster.delete("Pod", name, grace_s=GRACE_S)
        wait_deleted(cluster, "Pod", name, DELETE_TIMEOUT_S)
    except StokerError as error:
        hint = f"kubectl --context {cluster.context} -n {cluster.namespace} delete pod {name}"
        tell(f"Pod {name} could not be deleted ({error.what}); delete it with: {hint}")


@contextmanager
def sighup_as_keyboard_interrupt() -> Iterator[None]:
    """Let a closed terminal end us as Ctrl-C does, with what must be done before."""
    with _signals({signal.SIGHUP: signal.default_int_handler}):
        yield


@contextmanager
def _signals(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Set handlers for a while; only the main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # a handler that was not set from Python
                signal.signal(number, handler)

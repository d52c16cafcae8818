"""Ephemeral pods: create a pod, wait until it runs, and always delete it afterwards."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from stoker.core.processes import wait_until
from stoker.core.units import format_duration
from stoker.errors import (
    AccessDeniedError,
    InputError,
    NotFoundError,
    StokerError,
    StorageFullError,
    UnavailableError,
)
from stoker.kube.objects import Manifest, with_owner
from stoker.kube.pending import explain_pending
from stoker.kube.pods import describe_exit, get_exit_status, is_running

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

POLL_S = 0.5
GRACE_S = 1
"""Grace period of a pod without state. Not 0: that would remove the object while the pod still holds its volumes."""
DELETE_TIMEOUT_S = 30.0
REJECTION_ERRORS = (AccessDeniedError, StorageFullError, InputError)
"""Errors that prove that an object was not created; after any other error it may exist."""
_TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ephemeral_pod(
    client: KubeClient,
    pod: Manifest,
    dependents: Sequence[Manifest] = (),
    *,
    wait_s: float,
    report: Callable[[str], object],
) -> Iterator[str]:
    """Create a pod and objects owned by it, and yield its name once it runs; delete it on exit."""
    name, was_rejected = str(pod["metadata"]["name"]), False
    with sighup_as_keyboard_interrupt():
        try:
            try:
                created = client.create(pod)
            except REJECTION_ERRORS:
                was_rejected = True
                raise
            for dependent in dependents:
                client.create(with_owner(dependent, created))
            wait_until_running(client, name, wait_s, report)
            yield name
        finally:
            if not was_rejected:
                _delete(client, name, report)


def delete_finished(pods: Iterable[Manifest], client: KubeClient) -> None:
    """Delete ephemeral pods that hit their deadline because their creator was killed; they still hold claims."""
    for pod in pods:
        if get_exit_status(pod) is not None:
            with suppress(AccessDeniedError):
                client.delete("Pod", pod["metadata"]["name"])


def wait_until_running(client: KubeClient, name: str, wait_s: float, report: Callable[[str], object]) -> None:
    """Wait until a pod's main container runs; report why it does not yet, whenever the reason changes."""
    deadline, reported = time.monotonic() + wait_s, ""
    while True:
        pod = client.get("Pod", name)
        if pod is None:
            raise NotFoundError(f"pod {name} was deleted", where=client)
        if is_running(pod):
            return
        if (status := get_exit_status(pod)) is not None:
            raise UnavailableError(f"pod {name} exited early with {describe_exit(*status)}", where=client)
        reason = explain_pending(pod, list_events(client, pod))
        if reason and reason != reported:
            report(f"Pod {name} is not running yet: {reason}")
            reported = reason
        if time.monotonic() > deadline:
            what = f"pod {name} is not running after {format_duration(round(wait_s))}: {reason or 'it is starting'}"
            raise UnavailableError(what, where=client)
        time.sleep(POLL_S)


def list_events(client: KubeClient, obj: Manifest | None = None) -> list[Manifest]:
    """List the events of an object or of the namespace; empty without permission, since they only add detail."""
    try:
        return client.list_objects("Event", fields=f"involvedObject.uid={obj['metadata']['uid']}" if obj else "")
    except AccessDeniedError:
        return []


def wait_deleted(client: KubeClient, kind: str, name: str, seconds: float) -> bool:
    """Wait until a deleted object is gone; return whether it is."""
    return wait_until(lambda: client.get(kind, name) is None, seconds, max_interval_s=POLL_S)


def _delete(client: KubeClient, name: str, report: Callable[[str], object]) -> None:
    """Delete the pod and wait until it has released its volumes; a second Ctrl-C interrupts only the waiting."""
    try:
        with _signal_handlers(dict.fromkeys(_TERMINATION_SIGNALS, signal.SIG_IGN)):
            client.delete("Pod", name, grace_s=GRACE_S)
        wait_deleted(client, "Pod", name, DELETE_TIMEOUT_S)
    except StokerError as error:
        command = f"kubectl --context {client.context} -n {client.namespace} delete pod {name}"
        report(f"Cannot delete pod {name} ({error.what}); delete it with: {command}")


@contextmanager
def sighup_as_keyboard_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGHUP, so that cleanup also runs when the terminal is closed; not under nohup."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with _signal_handlers({} if is_nohup else {signal.SIGHUP: signal.default_int_handler}):
        yield


@contextmanager
def _signal_handlers(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Install signal handlers temporarily; does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            with suppress(TypeError):  # a handler that was not installed from Python
                signal.signal(number, handler)

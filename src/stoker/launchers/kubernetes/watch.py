"""Watch the objects of one kind and put every change into a queue."""

from __future__ import annotations

import queue
import threading

from stoker.errors import StokerError
from stoker.kube.client import KubeClient
from stoker.kube.objects import Manifest
from stoker.launchers.kubernetes.log_stream import RETRY_DELAYS_S

WatchUpdate = tuple[str, list[Manifest] | StokerError]
"""A kind, and its current objects or the error of the watch."""


class ObjectWatch(threading.Thread):
    """Thread that lists and watches the objects of a kind."""

    def __init__(
        self, client: KubeClient, kind: str, labels: dict[str, str], updates: queue.Queue[WatchUpdate]
    ) -> None:
        super().__init__(daemon=True, name=kind)
        self._client, self._kind, self._labels, self._updates = client, kind, labels, updates
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Do not list and watch again; a watch in progress ends with its connection."""
        self._stopped.set()

    def run(self) -> None:
        """List and watch, again whenever the watch ends."""
        failures = 0
        while not self._stopped.is_set():
            try:
                current, version = self._client.list_with_version(self._kind, self._labels)
                objects = {obj["metadata"]["uid"]: obj for obj in current}
                self._updates.put((self._kind, current))
                for change, obj in self._client.watch(self._kind, self._labels, version):
                    failures = 0
                    if change == "DELETED":
                        objects.pop(obj["metadata"]["uid"], None)
                    elif change in ("ADDED", "MODIFIED"):
                        objects[obj["metadata"]["uid"]] = obj
                    self._updates.put((self._kind, list(objects.values())))
            except StokerError as error:
                self._updates.put((self._kind, error))
                self._stopped.wait(RETRY_DELAYS_S[min(failures, len(RETRY_DELAYS_S) - 1)])
                failures += 1
            except Exception:
                if not self._stopped.is_set():  # otherwise its client was closed
                    raise

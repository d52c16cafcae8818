"""TensorBoard event files: written from the scalars of a run, without the tensorboard or tensorflow package."""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from stoker.shards.formats.tfrecord import record, varint
from stoker.telemetry.events import Event

log = logging.getLogger(__name__)


class ScalarWriter:
    """Writer of one event file, which is created with the first scalar."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._failed = False

    def write(self, events: Iterable[Event]) -> None:
        """Append the scalars among the given events."""
        scalars = [event for event in events if event.kind == "scalar" and _is_finite_scalar(event)]
        if not scalars:
            return
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._path = self._folder / name
            self._append([record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))])
        self._append([record(_event(event)) for event in scalars])

    def write_one(self, name: str, value: float, step: int) -> None:
        """Append a scalar; a write error is logged once and must not stop the program."""
        if not self._failed:
            try:
                self.write([Event(time.time(), "", 0, 0, 0, "scalar", {"name": name, "value": value, "step": step})])
            except OSError as error:
                self._failed = True
                log.warning("cannot write TensorBoard event files: %s", error)

    def _append(self, records: list[bytes]) -> None:
        assert self._path is not None
        with open(self._path, "ab") as file:
            file.write(b"".join(records))


def _is_finite_scalar(event: Event) -> bool:
    value, step = event.fields.get("value"), event.fields.get("step")
    return isinstance(value, int | float) and isinstance(step, int | float) and math.isfinite(step)


# --- The fields of tensorflow.Event that scalars need


def _event(event: Event) -> bytes:
    fields = event.fields
    value = _bytes(1, str(fields.get("name", "")).encode()) + _float(2, fields["value"])
    return _double(1, event.t) + varint(2 << 3) + varint(max(0, int(fields["step"]))) + _bytes(5, _bytes(1, value))


def _bytes(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def _double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return varint(number << 3 | 5) + packed

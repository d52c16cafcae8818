"""Frames from a host to this machine, which multiplex the slots of one connection; requests to it are lines of JSON."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

MAGIC = b"\0stoker agent\n"
"""Precedes the first frame; a login shell may print anything before it."""
RESPONSE, ALIVE, ATTACHED, READY = b"r", b"k", b"a", b"y"
STARTED, OUTPUT, EXIT, GONE = b"s", b"o", b"x", b"g"
EXEC, EXEC_EXIT = b"q", b"e"
FAILED = b"f"
ALIVE_INTERVAL_S = 2.0
"""How often a host that has nothing else to say sends a frame."""
_HEADER = struct.Struct(">cBI")


def pack_frame(kind: bytes, data: bytes = b"", slot: str = "") -> bytes:
    """Return a frame: its kind, the lengths of slot and payload, the slot that it is about, the payload."""
    name = slot.encode()
    return _HEADER.pack(kind, len(name), len(data)) + name + data


def pack_json(kind: bytes, value: Any, slot: str = "") -> bytes:
    """Return a frame with a JSON payload."""
    return pack_frame(kind, json.dumps(value).encode(), slot)


class FrameWriter:
    """Thread-safe writer of frames to a blocking file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def write(self, data: bytes) -> None:
        """Write the bytes of frames."""
        with self._lock:
            write_all(self._fd, data)


class FrameParser:
    """Parser of frames, which follow whatever the login shell of a host printed first."""

    def __init__(self) -> None:
        self._data = b""
        self.has_started = False
        """Whether the first frame may follow: the agent has started."""
        self.preamble = b""
        """What the login shell printed."""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, str, bytes]]:
        """Yield the kind, slot and payload of each frame that is complete now."""
        self._data += data
        if not self.has_started:
            self.preamble, magic, rest = self._data.partition(MAGIC)
            if not magic:
                return
            self._data, self.has_started = rest, True
        while len(self._data) >= _HEADER.size:
            kind, name_size, size = _HEADER.unpack_from(self._data)
            begin = _HEADER.size + name_size
            end = begin + size
            if len(self._data) < end:
                return
            name, payload = self._data[_HEADER.size : begin].decode(), self._data[begin:end]
            self._data = self._data[end:]  # before the frame is handled: the caller may stop here
            yield kind, name, payload


class Connection:
    """One end of a connection that never blocks: lines of JSON come in, frames go out.

    Frames wait in a queue in the order of `send`. Output is not queued: its sender asks `is_idle` first, so that no
    frame ever waits behind more than one chunk of output.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._incoming, self._outgoing = b"", bytearray()
        self.is_open = True

    @property
    def is_idle(self) -> bool:
        """Whether everything is sent."""
        return self.is_open and not self._outgoing

    def send(self, frame: bytes) -> None:
        """Queue a frame and send what can be sent at once."""
        if self.is_open:
            self._outgoing += frame
            self.flush()

    def flush(self) -> None:
        """Send as much as possible without blocking."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self.write_fd, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self) -> list[Any]:
        """Return the requests that have arrived; at the end of the stream `is_open` becomes False."""
        try:
            data = os.read(self.read_fd, 1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines if line.strip()]
        except ValueError:  # this is no client of ours
            self.is_open = False
            return []


def write_all(fd: int, data: bytes) -> None:
    """Write all of the data to a blocking file descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]

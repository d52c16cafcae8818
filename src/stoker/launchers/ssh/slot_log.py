"""The local log of a remote slot, and the record of how much of the slot's output is in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from stoker.core.spec import load, to_json
from stoker.launchers.ssh.client import write_all
from stoker.launchers.ssh.plan import SlotRecord

REATTACH_ENV = "STOKER_CONTINUES"
"""Set when the supervisor reattaches to a slot that an earlier process has started."""


class SlotLog:
    """The log on standard output: the slot's output, with notices of our own between its lines."""

    def __init__(self, record_path: Path | None, host: str, *, is_shared: bool = False) -> None:
        """Open the record, or start a new one; a log that several processes write to is not measured in bytes."""
        self._path, self._host, self._is_shared = record_path, host, is_shared
        self._pending: list[str] = []
        size = os.fstat(1).st_size
        self._is_at_line_start = not size or _last_byte() == b"\n"
        self.is_reattached = record_path is not None and record_path.exists() and REATTACH_ENV in os.environ
        """Whether this process continues with the slot of an earlier one."""
        if record_path is not None and self.is_reattached:
            self.record = load(record_path.read_bytes(), SlotRecord, record_path)
            self.offset = self.record.offset + (0 if is_shared else max(0, size - self.record.log_size))
        else:
            self.record, self.offset = SlotRecord(key=secrets.token_hex(8)), 0
        self.record.log_size, self.record.offset = size, self.offset
        self._save()

    def write_output(self, data: bytes) -> None:
        """Write output of the slot; pending notices follow its first complete line."""
        if self._pending and (end := data.find(b"\n") + 1):
            self._write(data[:end])
            self._write_notices()
            data = data[end:]
        self._write(data)

    def add_notice(self, text: str, *, is_cause: bool = False) -> None:
        """Write a notice once the current line is complete; immediately if it is the cause of a failure."""
        # The diagnosis takes the text after `stoker:` for the cause.
        self._pending.append(f"{'stoker:' if is_cause else '---'} {self._host}: {text}\n")
        if self._is_at_line_start or is_cause:
            self._write_notices()

    def finish(self, code: int) -> None:
        """Record the exit code."""
        if self._pending:
            self._write_notices()
        self.record.code = code
        self._save()

    def _write(self, data: bytes) -> None:
        if data:
            write_all(1, data)
            self.offset += len(data)
            self._is_at_line_start = data.endswith(b"\n")
            if self._is_shared:
                self.record.offset = self.offset
                self._save()

    def _write_notices(self) -> None:
        start = "" if self._is_at_line_start else "\n"
        text = (start + "".join(self._pending)).encode()
        self._pending.clear()
        self._is_at_line_start = True
        # Save first: if we are killed in between, the log is shorter than recorded, and no output is lost.
        self.record.log_size, self.record.offset = os.fstat(1).st_size + len(text), self.offset
        self._save()
        write_all(1, text)

    def _save(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(to_json(self.record))
            temporary.replace(self._path)


def _last_byte() -> bytes:
    """Return the last byte of the log; standard output itself is open for writing only."""
    with open("/proc/self/fd/1", "rb") as log:
        log.seek(-1, os.SEEK_END)
        return log.read(1)

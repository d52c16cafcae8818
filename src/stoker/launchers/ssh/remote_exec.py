"""Commands that one slot wants on the host of another: passed on as files in the run folder, from process to process.

asks/<attempt>/<slot>.ready       the slot stands by
asks/<attempt>/<slot>/<id>.json   a command for it
asks/<attempt>/<slot>/<id>.back   who asked wants it no more
asks/<attempt>/<slot>/<id>.exit   how it ended
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.core.processes import Process, held_back, start, until
from stoker.core.spec import load, to_json
from stoker.errors import InputError
from stoker.jobs.run_folder import Run
from stoker.jobs.topology import Slot

LAST_S = 5.0
"""For the end of what was ended at once to be told."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A command for a shell on the host of a slot."""

    command: str
    cwd: str | None = None


class Asks:
    """The asks of one attempt."""

    def __init__(self, run: Run, attempt: int) -> None:
        self._folder = run.folder / "asks" / str(attempt)

    def tell_ready(self, name: str) -> None:
        """Tell that a slot stands by."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{Slot.parse(name).filename}.ready").touch()

    def unready(self, names: Iterable[str]) -> list[str]:
        """Tell who does not stand by yet."""
        return [name for name in names if not (self._folder / f"{Slot.parse(name).filename}.ready").exists()]

    def of(self, name: str) -> Path:
        """Give the folder of what is asked of a slot."""
        return self._folder / Slot.parse(name).filename

    def read(self, name: str, ask: str) -> Wish:
        """Read what is asked."""
        path = self.of(name) / f"{ask}.json"
        return load(path.read_bytes(), Wish, path)

    def is_wanted(self, name: str, ask: str) -> bool:
        """Whether it was not taken back."""
        return not (self.of(name) / f"{ask}.back").exists()

    def unanswered(self, name: str) -> list[str]:
        """List what is asked of a slot and not answered yet."""
        found = (
            path for path in self.of(name).glob("*.json") if not path.name.startswith(".")
        )  # which is being written
        return [path.stem for path in found if not path.with_suffix(".exit").exists()]

    def write(self, name: str, file: str, data: bytes) -> None:
        """Write a file at once."""
        folder = self.of(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".{file}").write_bytes(data)
        (folder / f".{file}").replace(folder / file)


class Desk:
    """Where the stand-in of the slot that asks leaves asks, and finds answers."""

    def __init__(self, asks: Asks, standby: Collection[str]) -> None:
        self._asks, self._standby = asks, standby
        self._open: dict[str, str] = {}
        self._refused: list[str] = []

    def take(self, told: dict[str, Any]) -> None:
        """Pass an ask on, or take it back; of `all` that there are, those that are not among them."""
        if "all" in told:
            for name in self._standby:
                for ask in set(self._asks.unanswered(name)) - set(told["all"]):
                    self._take_back(name, ask)
            return
        ask = str(told["id"])
        if told.get("back"):
            if ask in self._open:
                self._take_back(self._open[ask], ask)
            return
        name = str(told["slot"])
        if name not in self._standby:
            self._refused.append(ask)
            return
        self._open[ask] = name
        if not (self._asks.of(name) / f"{ask}.json").exists():
            self._asks.write(name, f"{ask}.json", to_json(Wish(command=told["command"], cwd=told.get("cwd"))))

    def _take_back(self, name: str, ask: str) -> None:
        self._open.pop(ask, None)
        (self._asks.of(name) / f"{ask}.back").touch()

    def answers(self) -> Iterator[tuple[str, int]]:
        """Give the exit codes that have come in; that of bad input where no such slot stands by."""
        while self._refused:
            yield self._refused.pop(), InputError.exit_code
        for ask, name in list(self._open.items()):
            path = self._asks.of(name) / f"{ask}.exit"
            if path.exists():
                del self._open[ask]
                yield ask, int(path.read_text())


class Clerk:
    """Starts what is asked of a slot that stands by, a process here for each."""

    def __init__(self, run: Run, asks: Asks, name: str, has_begun: Callable[[str], bool]) -> None:
        """Serve a slot; what has begun already is taken up, even at the end: it may have words left."""
        self._run, self._asks, self._name, self._has_begun = run, asks, name, has_begun
        self._lines: dict[str, Process] = {}
        self._told: dict[str, float] = {}
        self._is_ending = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs of what was asked."""
        return not self._lines

    def tell_end(self) -> None:
        """Have all that runs end with grace, and start nothing more."""
        self._is_ending = True
        self.look()
        for line in self._lines.values():
            line.terminate()

    def look(self) -> None:
        """Start what is new, end what was taken back, and answer what is over."""
        for ask in self._asks.unanswered(self._name):
            is_new = not self._is_ending and self._asks.is_wanted(self._name, ask)
            if ask not in self._lines and (is_new or self._has_begun(ask)):
                argv = [
                    sys.executable,
                    "-m",
                    "stoker.launchers.ssh.remote_slot",
                    str(self._run.folder),
                    self._name,
                    ask,
                ]
                with held_back(signal.SIGTERM):  # until it listens
                    self._lines[ask] = start(argv, dies_with_us=True)
        for ask, line in list(self._lines.items()):
            code = line.poll()
            if code is not None:
                del self._lines[ask]
                line.end(0)
                self._asks.write(self._name, f"{ask}.exit", str(code).encode())
            elif not self._asks.is_wanted(self._name, ask) and time.monotonic() > self._told.get(ask, 0.0):
                self._told[ask] = time.monotonic() + LAST_S  # the second time, it ends at once
                line.terminate()

    def end(self, grace_s: float) -> None:
        """End all of them."""
        if not self._is_ending:
            self.tell_end()
        until(lambda: all(line.poll() is not None for line in self._lines.values()), grace_s)
        for line in self._lines.values():  # which tells it a second time, and so at once
            line.end(LAST_S)

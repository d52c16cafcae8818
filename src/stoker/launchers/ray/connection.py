"""Connection to the Ray driver: a child process with its own Ray, or a job submitted to a cluster.

A submitted driver reads a heartbeat from the cluster's key-value store and stops all slots when it does not change for
`lost_after`. A driver that is a child process notices the end of its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from stoker.core import json_io
from stoker.core.processes import Process, start, wait_until
from stoker.errors import SpecError, UnavailableError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import RESERVED_ENV
from stoker.launchers.ray.cluster import RayCluster
from stoker.launchers.ray.plan import RayPlan
from stoker.remote.frames import write_all

FRAME_PREFIX = "@stoker-ray "
"""Prefix of every line that the driver sends; the driver, a separate program, defines it too."""
POLL_S = 0.1
CLIENT_HEARTBEATS_PER_TIMEOUT = 6
RETRY_S = 0.5
EXIT_TIMEOUT_S = 5.0
LOG_READ_TRIES = 5
"""Attempts to read the log of a finished driver; its node, and the log with it, may be gone."""
ARCHIVE = "working.zip"
DRIVER = ".stoker/driver.py"
SUBMISSIONS = "submissions"
FOLDER_FILE = "ray-folder"
"""File that names the temporary directory of a run's own Ray while there is one."""
MAX_SOCKET_PATH, RAY_SOCKET_SUFFIX = 107, 64
"""The maximum length of a Unix socket path, and how much of it Ray appends to its temporary directory."""
# With the Python of Ray itself, which is not always the first on the PATH: our parent has Ray's library mapped.
_ENTRYPOINT = (
    "at=$(sed -n 's|.* \\(/.*\\)/lib/python[^/]*/[a-z]*-packages/ray/_raylet.so|\\1|p' /proc/$PPID/maps | head -n 1); "
    'python="$at/bin/python3"; [ -x "$python" ] || python=python3; exec "$python" {driver} {key} {timeout_s:g}'
)

LineQueue = queue.SimpleQueue[str | None]
"""Lines of a driver's output; None marks its end."""


class LocalDriver:
    """Connection to a driver that is a child process and runs its own Ray on this machine."""

    exit_reason = "the driver of the run's own Ray exited early"

    def __init__(self, plan: RayPlan, run: RunFolder, attempt: int) -> None:
        self._run, log = run, run.logs / f"ray.{attempt}.log"
        stdin, self._to_driver = os.pipe()
        self._from_driver, stdout = os.pipe()
        inherited = {name: value for name, value in os.environ.items() if not RESERVED_ENV.fullmatch(name)}
        env = {**inherited, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        env.pop("RAY_ADDRESS", None)
        argv = [sys.executable, "-P", str(Path(__file__).with_name("driver.py"))]
        with open(log, "ab") as stderr:
            self._driver: Process = start(
                argv, env=env, cwd=plan.source, stdin=stdin, stdout=stdout, stderr=stderr, terminate_with_parent=True
            )
        os.close(stdin)
        os.close(stdout)

    def begin(self, request: dict[str, Any]) -> None:
        """Send the request of an attempt to the driver, which is already running."""
        remove_ray_folder(self._run)
        self.send({**request, "folder": make_ray_folder(self._run)})

    def send(self, state: dict[str, Any]) -> None:
        """Write the desired state, which replaces the previous one, to the driver's standard input."""
        with suppress(BrokenPipeError):
            write_all(self._to_driver, json.dumps(state).encode() + b"\n")

    def lines(self) -> Iterator[str | None]:
        """Yield the lines of the driver's standard output, None while there are none, until the driver exits."""
        lines = LineQueue()

        def read() -> None:
            with open(self._from_driver, encoding="utf-8", errors="replace") as text:
                for line in text:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from drain_lines(lines)

    def close(self, *, is_over: bool) -> None:  # noqa: ARG002 (a child process is always waited for)
        """Wait for Ray to shut down, kill it after a while, and remove its temporary directory."""
        os.close(self._to_driver)
        wait_until(lambda: self._driver.poll() is not None, 2 * EXIT_TIMEOUT_S)
        self._driver.stop(0)
        remove_ray_folder(self._run)


def make_ray_folder(run: RunFolder) -> str:
    """Create the temporary directory of a run's own Ray; its path must be short because Ray puts sockets in it."""
    requested = os.environ.get("RAY_TMPDIR", "")
    is_short = len(requested) <= MAX_SOCKET_PATH - RAY_SOCKET_SUFFIX - len("/stoker-ray-12345678")
    is_usable = is_short and Path(requested).is_absolute() and Path(requested).is_dir()
    folder = mkdtemp(prefix="stoker-ray-", dir=requested if is_usable else "/tmp")
    run.write(FOLDER_FILE, folder.encode())
    return folder


def remove_ray_folder(run: RunFolder) -> None:
    """Remove the temporary directory of a run's own Ray, also of one that was killed together with its client."""
    record = run.folder / FOLDER_FILE
    if record.exists():
        shutil.rmtree(record.read_text(), ignore_errors=True)
        record.unlink()


class SubmittedDriver:
    """Connection to a driver that was submitted to a cluster as a Ray job."""

    def __init__(self, plan: RayPlan, run: RunFolder, attempt: int) -> None:
        assert plan.address is not None
        stop_submissions(run, plan.address, plan.grace_s)
        self._plan, self._run, self._timeout_s = plan, run, plan.lost_after_s
        self._cluster = RayCluster(plan.address)
        self._name = f"stoker-{run.id}-{attempt}-{secrets.token_hex(2)}"
        self._request: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self._heartbeats, self._has_news, self._lock = 0, threading.Event(), threading.Lock()
        self._is_driver_up = self._is_closed = False
        self._last_response = 0.0
        self._log = DriverLog(self._cluster, self._name, self._timeout_s)

    def begin(self, request: dict[str, Any]) -> None:
        """Submit the driver, which includes the upload; the request is sent once the driver is running."""
        self._request = request
        _add_submission(self._run, self._name)
        entrypoint = _ENTRYPOINT.format(driver=DRIVER, key=f"gcs://{self._name}", timeout_s=self._timeout_s)
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_stop_wait_s(self._plan.grace_s))}
        self._cluster.submit(self._name, entrypoint, self._run.folder / ARCHIVE, variables)
        self._last_response = time.monotonic()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, state: dict[str, Any]) -> None:
        """Send the desired state with the next heartbeat, without delay."""
        self._state = state
        self._has_news.set()

    def lines(self) -> Iterator[str | None]:
        """Yield the lines of the driver's log, None while there are none; end if the cluster is silent for too long."""
        lines = LineQueue()
        threading.Thread(target=lambda: asyncio.run(self._log.follow(lines)), daemon=True).start()
        for line in drain_lines(lines):
            if line is not None and not self._is_driver_up and FRAME_PREFIX in line:
                self._is_driver_up = True
                self._has_news.set()
            yield line
            if time.monotonic() - self._last_response > self._timeout_s:
                cluster = f"the Ray cluster at {self._cluster.address}"
                self._log.exit_reason = f"{cluster} has not responded for {self._timeout_s:g} s"
                return

    @property
    def exit_reason(self) -> str:
        """Why the driver's log ended."""
        return self._log.exit_reason

    def close(self, *, is_over: bool) -> None:
        """Stop the heartbeats; acknowledge the end of a driver that has reported it, so that it deletes its key."""
        with self._lock:  # not while a heartbeat is being sent
            self._is_closed = True
        if is_over:
            _remove_submission(self._run, self._name)
            with suppress(Exception):  # the driver then waits for a moment and cleans up by itself
                self._cluster.put(self._name, {**self._state, "acknowledged": True})

    def _send_heartbeats(self) -> None:
        while not self._is_closed:
            with suppress(Exception), self._lock:  # any network error: the next heartbeat is another try
                self._send_heartbeat()
            self._has_news.wait(self._timeout_s / CLIENT_HEARTBEATS_PER_TIMEOUT)
            self._has_news.clear()

    def _send_heartbeat(self) -> None:
        """Send state and heartbeat, once the driver is up: only the driver deletes the keys from the store."""
        if self._is_closed:
            return
        if not self._is_driver_up:
            self._cluster.state(self._name)
        else:
            if self._request is not None:
                self._cluster.put(f"{self._name}-request", self._request)
                self._request = None
            self._heartbeats += 1
            self._cluster.put(self._name, {**self._state, "heartbeat": self._heartbeats})
        self._last_response = time.monotonic()


DriverConnection = LocalDriver | SubmittedDriver


class DriverLog:
    """The log of a submitted driver, read over connections that may break; yields each line once."""

    def __init__(self, cluster: RayCluster, name: str, timeout_s: float) -> None:
        self._cluster, self._name, self._timeout_s = cluster, name, timeout_s
        self._lines_read = 0
        self.exit_reason = ""

    async def follow(self, lines: LineQueue) -> None:
        """Add all lines to the queue, then None; reconnect and read the log again when a connection breaks."""
        tries = 0
        while True:
            is_over, message, is_complete = False, "", False
            with suppress(Exception):  # any network error: try again
                is_over, message = await asyncio.to_thread(self._cluster.state, self._name)
                await self._read(lines)
                is_complete = True
            tries += is_over
            if is_over and (is_complete or tries >= LOG_READ_TRIES):  # over before the log was read to its end
                self.exit_reason = f"the driver on the Ray cluster exited early: {_find_reason(message)}"
                lines.put(None)
                return
            await asyncio.sleep(RETRY_S)

    async def _read(self, lines: LineQueue) -> None:
        """Read until the connection ends; the driver sends heartbeats, so a silent connection is broken."""
        rest, skip = "", self._lines_read
        async with aclosing(self._cluster.tail(self._name)) as log:
            while True:
                try:
                    text = await asyncio.wait_for(anext(log), self._timeout_s)
                except StopAsyncIteration:
                    return
                *complete, rest = (rest + text).split("\n")
                new = complete[skip:]
                skip -= len(complete) - len(new)
                self._lines_read += len(new)
                for line in new:
                    lines.put(line)


def parse_frame(line: str) -> dict[str, Any] | None:
    """Return the frame in a line of the driver's output; None for other output, and for an incomplete frame."""
    start = line.find(FRAME_PREFIX)
    if start < 0:
        return None
    try:
        frame = json_io.parse(line[start + len(FRAME_PREFIX) :], None)
    except SpecError:  # the driver died while writing it
        return None
    return frame if isinstance(frame, dict) and isinstance(frame.get("n"), int) else None


def drain_lines(lines: LineQueue) -> Iterator[str | None]:
    """Yield the lines of a queue to its end; None while there are none."""
    while True:
        try:
            line = lines.get(timeout=POLL_S)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def stop_submissions(run: RunFolder, address: str, grace_s: float) -> None:
    """Stop submitted drivers that have not reported their end; raise UnavailableError if one may still be running."""
    names = _list_submissions(run)
    if not names:
        return
    cluster = RayCluster(address)
    running = []
    for name in names:
        if _stop_submission(cluster, name, _stop_wait_s(grace_s) + EXIT_TIMEOUT_S):
            _remove_submission(run, name)
        else:
            running.append(name)
    if running:
        raise UnavailableError(f"Ray job {', '.join(running)} could not be stopped", where=address)


def _stop_submission(cluster: RayCluster, name: str, timeout_s: float) -> bool:
    """Stop a driver and return whether it is known to be over."""
    with suppress(Exception):  # any error of the network or the cluster: it may be running
        if cluster.state(name)[0]:
            return True
        cluster.stop(name)
        return wait_until(lambda: cluster.state(name)[0], timeout_s)
    return False


def _stop_wait_s(grace_s: float) -> int:
    """Return how long Ray waits for a driver that it stops: time for a last checkpoint of its slots."""
    return int(grace_s + 2 * EXIT_TIMEOUT_S)


def _list_submissions(run: RunFolder) -> list[str]:
    path = run.folder / SUBMISSIONS
    return path.read_text().split() if path.exists() else []


def _add_submission(run: RunFolder, name: str) -> None:
    run.write(SUBMISSIONS, "".join(f"{submission}\n" for submission in [*_list_submissions(run), name]).encode())


def _remove_submission(run: RunFolder, name: str) -> None:
    others = [submission for submission in _list_submissions(run) if submission != name]
    run.write(SUBMISSIONS, "".join(f"{submission}\n" for submission in others).encode())


def _find_reason(message: str) -> str:
    """Return the last line of the driver's log, with which Ray's message ends; Ray's own words if it is a frame."""
    lines = message.strip().splitlines() or ["no reason given"]
    return lines[0].partition(", last available logs")[0] if FRAME_PREFIX in lines[-1] else lines[-1]

"""Hosts by the user's own OpenSSH: which there are, how `ssh` is called, and what it means when it fails."""

from __future__ import annotations

import json
import os
import random
import re
import select
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from stoker.core.processes import Process, start
from stoker.errors import Fault, SpecError, UnavailableError
from stoker.launchers.ssh import slot_daemon

_TOKEN = "stoker-agent"
_SLOTS = re.compile(r"(?P<host>\S+?)(?::(?P<short>\d+)|\s+slots\s*=\s*(?P<long>\d+))?(?:\s+max.slots\s*=\s*\d+)?")
# Makes modules of what comes, and begins with the last.
_BOOT = """
import json, sys, types
given = sys.stdin.buffer
for name, code in json.loads(given.read(int(given.readline()))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(code, name, "exec"), module.__dict__)
module.main()
"""
_MODULES = ("slot_daemon", "host_probe")
NO_PYTHON, OLD_PYTHON = 127, 125
# Alone, without site: quicker, and no module of the user's stands in the way.
_ANY_PYTHON = (
    'n=127; c=$2; for p in "$1" python3 python; do command -v "$p" >/dev/null 2>&1 || continue; n=125; '
    '"$p" -IS -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null || continue; '
    'shift 2; exec "$p" -uIS -c "$c" "$@"; done; exit $n'
)
ANSWER_S = 90.0
CONNECT_S = 10
ATTEMPTS = 3

DOORS = 8
"""So many connections are begun at once: sshd, or the jump host before it, turns away those beyond ten."""
DOOR_S = 3.0
"""How long one waits for that: hosts that do not answer must not hold up the others."""
KNOCKS = 5
"""How often a host is tried that turns us away."""

# What ssh says, what it means to who reads it, and what mends it; the first that is found.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    ("Could not resolve hostname", "is unknown: neither DNS nor your ssh configuration has this name", ""),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "has another host key than the last time",
        "it was installed anew, or someone is in between; if you know why, forget the old key: {forget}",
    ),
    (
        "Host key verification failed",
        "has a host key that you have not accepted yet",
        "connect once by hand: {ssh}",
    ),
    ("Permission denied", "refuses your key", "is it in authorized_keys there? Try: {copy}"),
    (
        "Too many authentication failures",
        "refuses your keys",
        "name the right one as IdentityFile in your ssh configuration",
    ),
    ("Connection refused", "refuses the connection: no ssh server listens there", ""),
    ("No route to host", "does not answer: there is no route to it", ""),
    ("Network is unreachable", "does not answer: its network cannot be reached from here", ""),
    ("timed out", "does not answer", ""),
    ("not responding", "does not answer any more", ""),
    ("closed by", "broke the connection off", ""),
    ("Connection reset", "broke the connection off", ""),
    ("Broken pipe", "broke the connection off", ""),
)
_UNKNOWN = re.compile(r"Could not resolve hostname (?P<name>[^:\s]+)")
_FORGET = re.compile(r"ssh-keygen -f \S+ -R \S+")
_GET_PYTHON = "install Python 3.8 or later there, or name one with ssh.python"
# What ssh says when a server has too much to do at the moment.
_TURNED_AWAY = ("kex_exchange_identification", "closed by", "Connection reset")


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """How the `ssh` program is called: with the user's own settings, but never asking anything."""

    config: str | None = None
    user: str | None = None
    lost_after_s: float = 30.0
    control: str | None = None
    """The path by which calls share one connection to each host, as in `ControlPath`."""

    def by_hand(self, host: str, program: str = "ssh") -> str:
        """Write the command by which who reads it reaches a host as we do."""
        config = () if self.config is None else ("-F", self.config)
        if self.user is not None:  # which takes the place of one before the host, as `-l` does
            host = f"{self.user}@{host.rpartition('@')[2]}"
        return shlex.join([program, *config, host])

    def argv(self, *more: str, attempts: int = ATTEMPTS) -> list[str]:
        """Give the words before the host."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": CONNECT_S,
            "ConnectionAttempts": attempts,
            # Only where nobody of ours listens: a slot has its own, shorter limit.
            "ServerAliveInterval": max(1, int(self.lost_after_s / 2)),
            "ServerAliveCountMax": 3,
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "LogLevel": "INFO",
        }
        if self.control is not None:
            options |= {"ControlMaster": "auto", "ControlPath": self.control, "ControlPersist": 60}
        words = ["ssh", "-T", *(() if self.config is None else ("-F", self.config))]
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [*words, *(() if self.user is None else ("-l", self.user)), *more]


def expanded(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Put the hosts of a file in the place of its `@name`; all that is wrong in such files is told at once."""
    faults: list[Fault] = []
    found = tuple(one for host in hosts for one in (_read(host[1:], faults) if host.startswith("@") else (host,)))
    if faults:
        raise SpecError(faults, hint="a line is a host: node1, or node1 slots=2")
    return found


def _read(name: str, faults: list[Fault]) -> Iterator[str]:
    """Give the hosts of a file; what is wrong there is added to `faults`."""
    try:
        lines = Path(name).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else "it is no text"
        faults.append(Fault(name, f"the file of hosts cannot be read: {why}"))
        return
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].strip():
            match = _SLOTS.fullmatch(words)
            if match is None or words.startswith("-"):
                faults.append(Fault(f"{name}:{number}", f"{words!r} is no host"))
                continue
            count = match["short"] or match["long"]
            yield match["host"] if count is None else f"{match['host']}:{count}"


def places(hosts: tuple[str, ...]) -> list[str]:
    """Give a host for each slot that there is room for: `a,b:2` is a, b, b."""
    found = []
    for host in hosts:
        name, colon, count = host.partition(":")
        found += [name] * int(count) if colon and count.isdigit() else [host]
    return found


def meaning(client: Client, host: str, said: str, code: int | None) -> str:
    """Say in plain words why `ssh` did not get through."""
    return ": ".join(part for part in meaning_and_fix(client, host, said, code) if part)


def meaning_and_fix(client: Client, host: str, said: str, code: int | None) -> tuple[str, str]:
    """Say in plain words why `ssh` did not get through, and what mends it, where that is known."""
    if (unknown := _UNKNOWN.search(said)) and unknown["name"] != host:  # by its HostName, or a jump host
        return f"leads to {unknown['name']}, which is unknown: neither DNS nor your ssh configuration has this name", ""
    for sign, words, fix in _MEANINGS:
        if sign in said:
            forget = _FORGET.search(said)
            return words, fix.format(
                ssh=client.by_hand(host),
                copy=client.by_hand(host, "ssh-copy-id"),
                forget=forget[0] if forget else f"ssh-keygen -R {host}",
            )
    if code == NO_PYTHON:
        return "has no Python", _GET_PYTHON
    if code == OLD_PYTHON:
        return "has no Python that is new enough", _GET_PYTHON
    last = ([line for line in said.strip().splitlines() if line.strip()] or [f"ssh ended with exit code {code}"])[-1]
    return f"could not be used: {last}", ""


def turned_away(said: str) -> bool:
    """Whether `ssh`, which did not get through, may do so a moment later."""
    return any(sign in said for sign in _TURNED_AWAY)


def pause_s(knock: int) -> float:
    """Say how long to wait before the next try, so that those who were turned away together do not come together."""
    return random.uniform(0.1, 0.5) * 2.0**knock


def by_any_python(python: str, code: str, *words: str) -> str:
    """Give the command for a shell there that runs code with whichever Python there is, best with the named one."""
    # In one line: some shells take no line break between quotes.
    return shlex.join(["sh", "-c", _ANY_PYTHON, "sh", python, f"exec({json.dumps(code)})", *words])


def agent_argv(ssh: list[str], host: str, python: str, token: str) -> list[str]:
    """Give the command that starts the agent there."""
    return [*ssh, "--", host, by_any_python(python, _BOOT, f"{_TOKEN}-{token}")]


def agent_code() -> bytes:
    """Give what the agent's Python reads first."""
    sources = [(f"stoker.launchers.ssh.{name}", source(name)) for name in _MODULES]
    code = json.dumps(sources).encode()
    return f"{len(code)}\n".encode() + code


def source(module: str) -> str:
    """Give the text of a module that is sent along."""
    return files("stoker.launchers.ssh").joinpath(f"{module}.py").read_text()


class Frames:
    """Takes the agent's frames out of what comes, whatever a login printed before."""

    def __init__(self) -> None:
        self._data = b""
        self.is_met = False
        self.before = b""

    def with_login(self, said: str) -> str:
        """Add to what `ssh` said what a login printed that led to no agent."""
        return said if self.is_met else f"{said}\n{self.before.decode(errors='replace')}"

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Give the frames that are whole by now."""
        self._data += data
        if not self.is_met:
            self.before, magic, rest = self._data.partition(slot_daemon.MAGIC)
            if not magic:
                return
            self._data, self.is_met = rest, True
        while len(self._data) >= 5:
            end = 5 + int.from_bytes(self._data[1:5], "big")
            if len(self._data) < end:
                return
            kind, payload, self._data = self._data[:1], self._data[5:end], self._data[end:]
            yield kind, payload


class Session:
    """A talk with the agent on one host: questions, answers. It begins with the first question."""

    _doors = threading.BoundedSemaphore(DOORS)

    def __init__(
        self, client: Client, host: str, python: str, token: str = "look", *, attempts: int = ATTEMPTS
    ) -> None:
        self.host = host
        self._client = client
        self._argv = agent_argv(client.argv(attempts=attempts), host, python, token)
        self._line: _Line | None = None
        self._is_closed = False

    def ask(self, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Ask one question; UnavailableError says why there is no answer."""
        deadline = time.monotonic() + timeout_s
        if self._line is None:
            self._begin(deadline)
        assert self._line is not None
        write_all(self._line.to, json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._await(self._line, slot_daemon.ANSWER, deadline))
        return answer

    def _begin(self, deadline: float) -> None:
        """Connect, and try again where a server has too much to do."""
        for knock in range(KNOCKS):
            has_door = self._doors.acquire(timeout=DOOR_S)
            try:
                self._connect(deadline)
                return
            except _TurnedAwayError:
                if knock == KNOCKS - 1:
                    raise
            finally:
                if has_door:
                    self._doors.release()
            time.sleep(pause_s(knock))

    def _connect(self, deadline: float) -> None:
        if self._is_closed:
            raise UnavailableError("was not asked", where=self.host)
        self._line = line = _Line(self._argv)
        try:
            write_all(line.to, agent_code())
            self._await(line, None, deadline)
        except _TurnedAwayError:
            self._line = None
            line.close()
            raise

    def _await(self, line: _Line, wanted: bytes | None, deadline: float) -> bytes:
        """Read up to a frame of a kind; of None, until the agent is there."""
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([line.back], [], [], min(left, 1.0))[0]:
                continue
            data = os.read(line.back, 1 << 16)
            if not data:
                raise self._failed(line)
            for kind, payload in line.frames.feed(data):
                if kind == wanted:
                    return payload
            if wanted is None and line.frames.is_met:
                return b""
        raise UnavailableError("does not answer", where=self.host)

    def _failed(self, line: _Line) -> UnavailableError:
        code, said = exit_code(line.ssh, 5), text_of(line.stderr)
        what, fix = meaning_and_fix(self._client, self.host, line.frames.with_login(said), code)
        kind = _TurnedAwayError if turned_away(said) and not line.frames.is_met else UnavailableError
        return kind(what, where=self.host, hint=fix or None)

    def close(self) -> None:
        """End the talk."""
        self._is_closed = True
        if self._line is not None:
            self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _TurnedAwayError(UnavailableError):
    """A server had too much to do at the moment."""


class _Line:
    """One `ssh`, and what goes to it and comes back."""

    def __init__(self, argv: list[str]) -> None:
        self.stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed with the line)
        self.frames = Frames()
        ours, self.to = os.pipe()
        self.back, forth = os.pipe()
        try:
            # It ends when we close its input, however we end; its thread may well end before.
            self.ssh = start(argv, stdin=ours, stdout=forth, stderr=self.stderr, dies_with_us=False)
        finally:
            os.close(ours)
            os.close(forth)

    def close(self) -> None:
        os.close(self.to)
        os.close(self.back)
        self.ssh.end(2)
        self.stderr.close()


# --- What each talk with `ssh` needs


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, unless nobody reads: then there is an end to read, which tells more."""
    rest = memoryview(data)
    with suppress(BrokenPipeError):
        while rest:
            rest = rest[os.write(fd, rest) :]


def exit_code(ssh: Process, within_s: float) -> int:
    """Give the exit code of `ssh`, which has closed its output and may yet say why."""
    try:
        return ssh.wait(within_s)
    except TimeoutError:
        return ssh.end(0)


def text_of(file: IO[bytes]) -> str:
    """Give all that was written into a file."""
    file.seek(0)
    return file.read().decode(errors="replace")

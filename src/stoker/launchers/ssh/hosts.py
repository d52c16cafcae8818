"""Hosts by the user's own OpenSSH: which there are, how `ssh` is called, and what it means when it fails."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from stoker.core.processes import start
from stoker.errors import InputError, UnavailableError
from stoker.launchers.ssh import keeper

_TOKEN = "stoker-agent"
_SLOTS = re.compile(r"(?P<host>\S+?)(?::(?P<short>\d+)|\s+slots\s*=\s*(?P<long>\d+))?(?:\s+max.slots\s*=\s*\d+)?")
# Makes modules of what comes, and begins with the last.
_BOOT = (
    "import sys,json,types;i=sys.stdin.buffer\n"
    "for n,c in json.loads(i.read(int(i.readline()))):\n"
    " m=sys.modules[n]=types.ModuleType(n);exec(compile(c,n,'exec'),m.__dict__)\n"
    "m.main()"
)
_MODULES = ("keeper", "agent")
# Alone, without site: quicker, and no module of the user's stands in the way.
_ANY_PYTHON = (
    'for p in python3 python "$1"; do command -v "$p" >/dev/null 2>&1 && exec "$p" -uIS -c "$2" "$3"; done; exit 127'
)
NO_PYTHON = 127
ANSWER_S = 90.0
CONNECT_S = 10
ATTEMPTS = 3

# What ssh says, what it means to who reads it, and what mends it; the first that is found.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    ("Could not resolve hostname", "is unknown: neither DNS nor your ssh configuration has this name", ""),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "has another host key than the last time",
        "it was installed anew, or someone is in between; if you know why, forget the old key: ssh-keygen -R {host}",
    ),
    (
        "Host key verification failed",
        "has a host key that you have not accepted yet",
        "connect once by hand: ssh {host}",
    ),
    ("Permission denied", "refuses your key", "is it in authorized_keys there? Try: ssh-copy-id {host}"),
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


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """How the `ssh` program is called: with the user's own settings, but never asking anything."""

    config: str | None = None
    user: str | None = None
    lost_after_s: float = 30.0

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
        words = ["ssh", "-T", *(() if self.config is None else ("-F", self.config))]
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [*words, *(() if self.user is None else ("-l", self.user)), *more]


def expanded(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Put the hosts of a file in the place of its `@name`."""
    return tuple(one for host in hosts for one in (_read(host[1:]) if host.startswith("@") else (host,)))


def _read(name: str) -> Iterator[str]:
    try:
        lines = Path(name).read_text().splitlines()
    except OSError as error:
        raise InputError(f"the file of hosts cannot be read: {(error.strerror or '').lower()}", where=name) from error
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].strip():
            match = _SLOTS.fullmatch(words)
            if match is None or words.startswith("-"):
                raise InputError(
                    f"{words!r} is no host", where=f"{name}:{number}", hint="write node1, or node1 slots=2"
                )
            count = match["short"] or match["long"]
            yield match["host"] if count is None else f"{match['host']}:{count}"


def places(hosts: tuple[str, ...]) -> list[str]:
    """Give a host for each slot that there is room for: `a,b:2` is a, b, b."""
    found = []
    for host in hosts:
        name, colon, count = host.partition(":")
        found += [name] * int(count) if colon and count.isdigit() else [host]
    return found


def meaning(host: str, said: str, code: int | None) -> str:
    """Say in plain words why `ssh` did not get through."""
    return ": ".join(part for part in meaning_and_fix(host, said, code) if part)


def meaning_and_fix(host: str, said: str, code: int | None) -> tuple[str, str]:
    """Say in plain words why `ssh` did not get through, and what mends it, where that is known."""
    for sign, words, fix in _MEANINGS:
        if sign in said:
            return words, fix.format(host=host)
    if code == NO_PYTHON:
        return "has no Python", "install python3 there, or name one with ssh.python"
    last = ([line for line in said.strip().splitlines() if line.strip()] or [f"ssh ended with exit code {code}"])[-1]
    return f"could not be used: {last}", ""


def agent_argv(client: list[str], host: str, python: str, token: str) -> list[str]:
    """Give the command that starts the agent there, with whichever Python there is."""
    remote = ["sh", "-c", _ANY_PYTHON, "sh", python, _BOOT, f"{_TOKEN}-{token}"]
    return [*client, "--", host, shlex.join(remote)]


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

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Give the frames that are whole by now."""
        self._data += data
        if not self.is_met:
            self.before, magic, rest = self._data.partition(keeper.MAGIC)
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
    """A talk with the agent on one host: questions, answers."""

    def __init__(self, client: list[str], host: str, python: str, token: str = "look") -> None:
        self.host = host
        self._stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed with the talk)
        ours, theirs = os.pipe()
        back, forth = os.pipe()
        argv = agent_argv(client, host, python, token)
        try:
            self._ssh = start(argv, stdin=ours, stdout=forth, stderr=self._stderr, dies_with_us=False)
        finally:
            os.close(ours)
            os.close(forth)
        self._in, self._out = theirs, back
        self._frames = Frames()
        self._has_greeted = False

    def ask(self, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Ask one question; UnavailableError says why there is no answer."""
        deadline = time.monotonic() + timeout_s
        hello = b"" if self._has_greeted else agent_code()
        self._has_greeted = True
        with suppress(BrokenPipeError):  # what it says on the way out tells more
            _write_all(self._in, hello + json.dumps(request).encode() + b"\n")
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._out], [], [], min(left, 1.0))[0]:
                continue
            data = os.read(self._out, 1 << 16)
            if not data:
                raise self._failed(self._code())
            for kind, payload in self._frames.feed(data):
                if kind == keeper.ANSWER:
                    answer: dict[str, Any] = json.loads(payload)
                    return answer
        raise UnavailableError("does not answer", where=self.host)

    def _code(self) -> int:
        """Give the exit code of `ssh`, which has closed its output and may yet say why."""
        try:
            return self._ssh.wait(5)
        except TimeoutError:
            return self._ssh.end(0)

    def _failed(self, code: int) -> UnavailableError:
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace")
        what, fix = meaning_and_fix(self.host, said, code)
        return UnavailableError(what, where=self.host, hint=fix or None)

    def close(self) -> None:
        """End the talk."""
        os.close(self._in)
        os.close(self._out)
        self._ssh.end(2)
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]

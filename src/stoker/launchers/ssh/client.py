"""The OpenSSH client: host lists, the `ssh` command line, requests to the remote agent, explanations of failures."""

from __future__ import annotations

import json
import os
import random
import re
import select
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from stoker.core import json_io
from stoker.core.processes import Process, start
from stoker.errors import Fault, SpecError, UnavailableError
from stoker.remote.frames import RESPONSE, FrameParser

_TOKEN = "stoker-agent"
_HOST_LINE = re.compile(r"(?P<host>\S+?)(?::(?P<short>\d+)|\s+slots\s*=\s*(?P<long>\d+))?(?:\s+max.slots\s*=\s*\d+)?")
# Reads the sources of modules from standard input, creates the modules, and calls `main` of the last one.
_BOOTSTRAP = """
import json, sys, types
given = sys.stdin.buffer
for name, code in json.loads(given.read(int(given.readline()))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(code, name, "exec"), module.__dict__)
module.main()
"""
REMOTE_MODULES = tuple(
    f"stoker.remote.{name}"
    for name in ("tagged_processes", "guard", "frames", "slot_process", "slot_daemon", "attach_session", "host_probe")
)
PROBE_MODULES = ("stoker.remote.frames", "stoker.remote.host_probe")
"""All that a host needs to be probed: it compiles them for each session."""
NO_PYTHON_CODE, OLD_PYTHON_CODE = 127, 125
# -I and -S: starts faster, and no module of the user shadows one of the standard library.
_RUN_PYTHON = (
    'n=127; c=$2; for p in "$1" python3 python; do command -v "$p" >/dev/null 2>&1 || continue; n=125; '
    '"$p" -IS -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null || continue; '
    'shift 2; exec "$p" -uIS -c "$c" "$@"; done; exit $n'
)
RESPONSE_TIMEOUT_S = 90.0
MAX_HOST_FILE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10
CONNECTION_ATTEMPTS = 3
"""The default of ssh's option `ConnectionAttempts`."""

FORWARD_ALIVE_S = 2
"""Interval of keep-alives of a port forward; after three without a response, it is replaced."""
MAX_CONNECTING = 8
"""How many connections are opened at a time: sshd, or the jump host in front of it, drops those beyond ten."""
CONNECT_QUEUE_S = 3.0
"""How long a connection waits for its turn: hosts that do not answer must not hold up the others."""
CONNECT_TRIES = 5
"""How often a connection is tried that the server drops because it is overloaded."""

# Text in ssh's stderr, what it means for the user, and how to fix it; the first match counts.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    ("Could not resolve hostname", "could not resolve host name", "check DNS and your SSH config"),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key has changed",
        "the host was reinstalled, or the connection is being intercepted; if you expected this, remove the old key "
        "with: {forget}",
    ),
    (
        "Host key verification failed",
        "host key is unknown",
        "to accept it, connect once with: {ssh}",
    ),
    ("Permission denied", "public key rejected", "run: {copy}"),
    (
        "Too many authentication failures",
        "too many authentication failures",
        "set the right key as IdentityFile in your SSH config",
    ),
    (
        "Connection refused",
        "connection refused",
        "check that sshd is running there and that the port in your SSH config is correct; then try: {ssh}",
    ),
    ("No route to host", "no route to host", ""),
    ("Network is unreachable", "network is unreachable", ""),
    ("timed out", "connection timed out", ""),
    ("not responding", "connection timed out", ""),
    ("closed by", "connection closed by the remote host", ""),
    ("Connection reset", "connection closed by the remote host", ""),
    ("Broken pipe", "connection closed by the remote host", ""),
)
_UNRESOLVED = re.compile(r"Could not resolve hostname (?P<name>[^:\s]+)")
_ADDRESS = re.compile(r"connect to (?:host|address) (?P<host>\S+) port (?P<port>\d+)")
_KEYGEN_COMMAND = re.compile(r"ssh-keygen -f \S+ -R \S+")
_PYTHON_FIX = "install Python 3.8 or later there, or set ssh.python"
# In ssh's stderr when a server is overloaded for a moment.
_RETRYABLE = ("kex_exchange_identification", "closed by", "Connection reset")


class SshClient(msgspec.Struct, frozen=True, kw_only=True):
    """How the `ssh` program is called: with the user's own config, in BatchMode."""

    config: str | None = None
    user: str | None = None
    lost_after_s: float = 30.0
    control: str | None = None
    """The `ControlPath` by which calls share the connection of the first of them to each host, while it is open."""

    def command_line(self, host: str, program: str = "ssh") -> str:
        """Return the command by which the user reaches a host as we do."""
        config = () if self.config is None else ("-F", self.config)
        if self.user is not None:  # overrides a user in front of the host, as `-l` does
            host = f"{self.user}@{host.rpartition('@')[2]}"
        return shlex.join([program, *config, host])

    def argv(self, *more: str, attempts: int = CONNECTION_ATTEMPTS) -> list[str]:
        """Return the arguments up to, but without, the host."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ConnectionAttempts": attempts,
            # For uploads and requests only: a slot has its own, shorter timeout.
            "ServerAliveInterval": max(1, int(self.lost_after_s / 2)),
            "ServerAliveCountMax": 3,
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "LogLevel": "INFO",
        }
        if self.control is not None:
            options |= {"ControlMaster": "auto", "ControlPath": self.control, "ControlPersist": "no"}
        argv = ["ssh", "-T", *(() if self.config is None else ("-F", self.config))]
        argv += [argument for name, value in options.items() for argument in ("-o", f"{name}={value}")]
        return [*argv, *(() if self.user is None else ("-l", self.user)), *more]

    def forward_argv(self, host: str, local_port: int, remote_port: int) -> list[str]:
        """Return the command that forwards a port of this machine to one of a host, loopback interfaces only."""
        program, *options = self.argv("-N", "-L", f"127.0.0.1:{local_port}:127.0.0.1:{remote_port}", attempts=1)
        # Before the others: ssh uses the first value of an option. A shared connection would outlive this command.
        first = ("ClearAllForwardings=no", f"ServerAliveInterval={FORWARD_ALIVE_S}", "ControlPath=none")
        return [program, *(argument for option in first for argument in ("-o", option)), *options, "--", host]


def expand_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Replace each `@file` by the hosts in that file; raise all faults of such files at once."""
    faults: list[Fault] = []
    expanded = tuple(
        name for host in hosts for name in (_read_host_file(host[1:], faults) if host.startswith("@") else (host,))
    )
    if faults:
        raise SpecError(faults, hint="list one host per line: node1, or node1 slots=2")
    return expanded


def _read_host_file(name: str, faults: list[Fault]) -> Iterator[str]:
    """Yield the hosts in a file; add what is wrong there to `faults`."""
    try:
        lines = json_io.read_file(Path(name), MAX_HOST_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "").lower() if isinstance(error, OSError) else "not a text file"
        faults.append(Fault(name, f"cannot read the host file: {reason}"))
        return
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            match = _HOST_LINE.fullmatch(text)
            if match is None or text.startswith("-"):
                faults.append(Fault(f"{name}:{number}", f"{text!r} is not a host"))
                continue
            count = match["short"] or match["long"]
            yield match["host"] if count is None else f"{match['host']}:{count}"


def expand_slots(hosts: tuple[str, ...]) -> list[str]:
    """Return one host name for each slot that the hosts have room for: `a,b:2` is a, b, b."""
    names = []
    for host in hosts:
        name, colon, count = host.partition(":")
        names += [name] * int(count) if colon and count.isdigit() else [host]
    return names


def format_failure(client: SshClient, host: str, stderr: str, code: int | None) -> str:
    """Return in one sentence why `ssh` failed and, if known, how to fix it."""
    what, fix = explain_failure(client, host, stderr, code)
    return f"{what} ({fix})" if fix else what


def explain_failure(client: SshClient, host: str, stderr: str, code: int | None) -> tuple[str, str]:
    """Return why `ssh` failed, and how to fix it or an empty string."""
    # The name may be that of a jump host, or the HostName of the host.
    if (unresolved := _UNRESOLVED.search(stderr)) and unresolved["name"] != host:
        name = unresolved["name"]
        return f"could not resolve host name {name} (a jump host, or its HostName)", "check DNS and your SSH config"
    for text, what, fix in _FAILURES:
        if text in stderr:
            forget = _KEYGEN_COMMAND.search(stderr)
            address = _ADDRESS.search(stderr) if text == "Connection refused" else None
            where = f" on {address['host']} port {address['port']}" if address else ""
            return what + where, fix.format(
                ssh=client.command_line(host),
                copy=client.command_line(host, "ssh-copy-id"),
                forget=forget[0] if forget else f"ssh-keygen -R {host}",
            )
    if code == NO_PYTHON_CODE:
        return "Python not found", _PYTHON_FIX
    if code == OLD_PYTHON_CODE:
        return "Python 3.8 or later not found", _PYTHON_FIX
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return f"ssh failed: {lines[-1]}" if lines else f"ssh exited with code {code}", ""


def is_retryable(stderr: str) -> bool:
    """Whether a connection that failed may succeed a moment later."""
    return any(text in stderr for text in _RETRYABLE)


def backoff_s(tries: int) -> float:
    """Return a random exponential backoff, so that clients dropped together do not come back together."""
    return random.uniform(0.1, 0.5) * 2.0**tries


def python_command(python: str, code: str, *args: str) -> str:
    """Return a shell command that runs code by the given Python, or by any other on the host that is new enough."""
    # One line: some shells reject a line break between quotes.
    return shlex.join(["sh", "-c", _RUN_PYTHON, "sh", python, f"exec({json.dumps(code)})", *args])


def agent_argv(ssh: list[str], host: str, python: str, token: str) -> list[str]:
    """Return the command that starts the remote agent on a host; its processes are found by the token and the host."""
    return [*ssh, "--", host, python_command(python, _BOOTSTRAP, f"{_TOKEN}-{token}@{host}")]


def agent_code(modules: Sequence[str] = REMOTE_MODULES) -> bytes:
    """Return the code of the remote agent, which its Python reads first."""
    sources = [(name, module_source(name)) for name in modules]
    code = json.dumps(sources).encode()
    return f"{len(code)}\n".encode() + code


def module_source(module: str) -> str:
    """Return the source of a module that is sent to hosts."""
    package, _, name = module.rpartition(".")
    return files(package).joinpath(f"{name}.py").read_text()


class Session:
    """Requests to the remote agent of one host; connects with the first request."""

    _connecting = threading.BoundedSemaphore(MAX_CONNECTING)

    def __init__(
        self,
        client: SshClient,
        host: str,
        python: str,
        token: str = "probe",
        *,
        attempts: int = CONNECTION_ATTEMPTS,
        modules: Sequence[str] = PROBE_MODULES,
    ) -> None:
        self.host = host
        self._client, self._modules = client, modules
        self._argv = agent_argv(client.argv(attempts=attempts), host, python, token)
        self._connection: SshProcess | None = None
        self._is_closed = False

    def request(self, request: Mapping[str, Any], timeout_s: float = RESPONSE_TIMEOUT_S) -> dict[str, Any]:
        """Send a request and return its response; raise UnavailableError if there is none."""
        deadline = time.monotonic() + timeout_s
        if self._connection is None:
            self._connect_with_retries(deadline)
        assert self._connection is not None
        self._connection.write(json.dumps(request).encode() + b"\n", deadline)
        response: dict[str, Any] = json.loads(self._wait_for(self._connection, RESPONSE, deadline))
        return response

    def _connect_with_retries(self, deadline: float) -> None:
        """Connect, and try again if the server is overloaded."""
        for tries in range(CONNECT_TRIES):
            is_acquired = self._connecting.acquire(timeout=CONNECT_QUEUE_S)
            try:
                self._connect(deadline)
                return
            except _RetryableError:
                if tries == CONNECT_TRIES - 1:
                    raise
            finally:
                if is_acquired:
                    self._connecting.release()
            time.sleep(backoff_s(tries))

    def _connect(self, deadline: float) -> None:
        if self._is_closed:
            raise UnavailableError("the connection was closed", where=self.host)
        self._connection = connection = SshProcess(self._argv)
        try:
            connection.write(agent_code(self._modules), deadline)
            self._wait_for(connection, None, deadline)
        except _RetryableError:
            self._connection = None
            connection.close()
            raise

    def _wait_for(self, connection: SshProcess, expected_kind: bytes | None, deadline: float) -> bytes:
        """Wait for a frame of a kind and return its payload; with None, wait until the agent has started."""
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([connection.stdout_fd], [], [], min(left_s, 1.0))[0]:
                continue
            data = os.read(connection.stdout_fd, 1 << 16)
            if not data:
                raise self._to_error(connection)
            for kind, _, payload in connection.frames.feed(data):
                if kind == expected_kind:
                    return payload
            if expected_kind is None and connection.frames.has_started:
                return b""
        raise UnavailableError("no response", where=self.host)

    def _to_error(self, connection: SshProcess) -> UnavailableError:
        code, stderr = wait_exit_code(connection.process, 5), read_text(connection.stderr)
        is_dropped = is_retryable(stderr) and not connection.frames.has_started
        if not connection.frames.has_started:  # the login shell may have printed the reason
            stderr += "\n" + connection.frames.preamble.decode(errors="replace")
        what, fix = explain_failure(self._client, self.host, stderr, code)
        return (_RetryableError if is_dropped else UnavailableError)(what, where=self.host, hint=fix or None)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RetryableError(UnavailableError):
    """The server dropped the connection because it is overloaded."""


class SshProcess:
    """One `ssh` process and the pipes to it."""

    def __init__(self, argv: list[str], *, terminate_with_parent: bool = False) -> None:
        """Start `ssh`, which exits when its standard input is closed; see `start` for `terminate_with_parent`."""
        self.stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed with the connection)
        self.frames = FrameParser()
        child_stdin, self.stdin_fd = os.pipe()
        self.stdout_fd, child_stdout = os.pipe()
        try:
            self.process = start(
                argv,
                stdin=child_stdin,
                stdout=child_stdout,
                stderr=self.stderr,
                terminate_with_parent=terminate_with_parent,
            )
        finally:
            os.close(child_stdin)
            os.close(child_stdout)
        os.set_blocking(self.stdin_fd, False)

    def write(self, data: bytes, deadline: float) -> None:
        """Write the data until a deadline, as `ssh` takes it; a failure is noticed by the lack of a response."""
        rest = memoryview(data)
        with suppress(BrokenPipeError):  # the EOF on the other pipe comes with a reason
            while rest and select.select([], [self.stdin_fd], [], max(0.0, deadline - time.monotonic()))[1]:
                rest = rest[os.write(self.stdin_fd, rest) :]

    def close(self, grace_s: float = 2.0) -> None:
        """Close the pipes, and stop the process."""
        os.close(self.stdin_fd)
        os.close(self.stdout_fd)
        self.process.stop(grace_s)
        self.stderr.close()


# --- Pipes to and from `ssh`


def wait_exit_code(ssh: Process, timeout_s: float) -> int:
    """Return the exit code of `ssh`, which has closed its output and may still write to stderr."""
    try:
        return ssh.wait(timeout_s)
    except TimeoutError:
        return ssh.stop(0)


def read_text(file: IO[bytes]) -> str:
    """Return the whole content of an open file as text."""
    file.seek(0)
    return file.read().decode(errors="replace")

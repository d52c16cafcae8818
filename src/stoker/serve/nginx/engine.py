"""nginx as the engine: its configuration from our settings, its life bound to ours, and its log counted.

Everything of its own lies in one folder. nginx serves; this process only watches, counts, and answers below `/-/`.
"""

from __future__ import annotations

import errno
import fcntl
import http.client
import json
import logging
import os
import pwd
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import IO
from urllib.parse import urlsplit

from stoker.core.processes import Process, run
from stoker.core.scratch import scratch_folder
from stoker.errors import ConflictError, InputError, MissingProgramError, NotFoundError, StokerError, UnavailableError
from stoker.serve.nginx.config import CacheSettings, ServeSettings, Settings, cache_config, cache_folder, serve_config
from stoker.serve.stats import as_metrics
from stoker.storage import shown

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long transfers may go on after the signal to end."""
START_S = 20.0
LOG_LIMIT = 16 << 20
# A program of its own, since code between fork and exec is not safe beside threads. 1 is PR_SET_PDEATHSIG; when the
# parent is gone already, its death will not be told any more.
_LAUNCH = """
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
os.execv(sys.argv[2], sys.argv[2:])
"""
_TEMPORARY = re.compile(r"\.\d{10}$")
_LINE = re.compile(rb"(\d{3}) (\d+) (\d+) (\S+) ([-\d, :]+)")
_HITS = frozenset({b"HIT", b"STALE", b"UPDATING", b"REVALIDATED"})
_MISSES = frozenset({b"MISS", b"EXPIRED", b"BYPASS"})


class NginxEngine:
    """One nginx: `start`, then `wait` for a signal or its death; `stop` ends it and what it left.

    Start it from a thread that lives as long as it should: nginx ends with the thread that started it.
    """

    name = "nginx"

    def __init__(
        self, settings: Settings, prefix: Path | None = None, *, reread: Callable[[], Settings] | None = None
    ) -> None:
        self._given = settings
        self._prefix = prefix
        self._reread = reread
        self._resources = ExitStack()
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Where it answers; one that listens everywhere is named by this machine's own address."""
        return f"http://{_url_host(_reachable(self._settings.host))}:{self._settings.port}"

    def start(self) -> None:
        """Start nginx and wait until it answers; whatever fails leaves nothing behind."""
        self._program = find_nginx()
        _check_modules(self._program, self._given)
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_folder())
            self._home = _prepared(self._prefix or folder / "prefix")
            stack.enter_context(_held(self._home / "lock", self._home))
            if isinstance(self._given, CacheSettings):
                _prepared(self._given.dir)
                stack.enter_context(_held(self._given.dir / "lock", self._given.dir))
                _remove_unfinished(cache_folder(self._given))
            listener = stack.enter_context(_listening(self._given.host, self._given.port))
            self._address = listener.getsockname()[:2]
            self._admin = folder / "admin"
            self._settings = self._settled(self._given)
            self._counts = Counts(self._settings, self._home, reopen=lambda: self._signal(signal.SIGUSR1))
            stack.callback(self._counts.close)
            stack.enter_context(_admin_server(self._admin, self._counts, self._may_write))
            self._write(self._settings)
            self._process = _spawn(self._program, self._home, listener)
            stack.callback(self._end)
            listener.close()
            self._await_answer()
            self._resources = stack.pop_all()

    def wait(self) -> None:
        """Run until SIGTERM or SIGINT, and reload on SIGHUP; nginx's own death is an error. Ends with `stop`."""
        came: queue.SimpleQueue[int] = queue.SimpleQueue()
        former = {
            number: signal.signal(number, lambda number, _: came.put(number))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            while True:
                try:
                    number = came.get(timeout=0.25)
                except queue.Empty:
                    self._check_alive()
                    continue
                if number != signal.SIGHUP:
                    return
                self._reload_or_complain()
        finally:
            try:
                self.stop()
            finally:
                for number, handler in former.items():
                    signal.signal(number, handler)

    def reload(self) -> None:
        """Take up changed settings without dropping a connection; those that nginx refuses change nothing."""
        given = self._given if self._reread is None else self._reread()
        _check_modules(self._program, given)
        settings = self._settled(given)
        self._write(settings)
        self._settings = settings
        self._signal(signal.SIGHUP)

    def stop(self) -> None:
        """End nginx, first gently, and remove what it left; a second call does nothing."""
        self._resources.close()

    def _reload_or_complain(self) -> None:
        try:
            self.reload()
        except StokerError as error:
            log.warning("%s; the former settings stay", error)

    def _settled(self, given: Settings) -> Settings:
        """Fill in what only this machine knows."""
        host, port = self._address
        user = pwd.getpwuid(0).pw_name if os.geteuid() == 0 else None
        settings: Settings = replace(given, host=host, port=port, admin_socket=self._admin, user=user)
        if isinstance(settings, CacheSettings):
            authorities = ssl.get_default_verify_paths().cafile
            if settings.ca_file is None and authorities is not None:
                settings = replace(settings, ca_file=Path(authorities))
            return replace(settings, dir=settings.dir.resolve())
        if not settings.root.is_dir():
            raise NotFoundError("is not a folder", where=settings.root)
        return replace(settings, root=settings.root.resolve())

    def _write(self, settings: Settings) -> None:
        """Write the configuration, which takes the former one's place only when nginx accepts it."""
        home = self._home
        text = serve_config(settings, home) if isinstance(settings, ServeSettings) else cache_config(settings, home)
        new = self._home / "nginx.conf.new"
        new.write_bytes(text.encode(errors="surrogateescape"))
        new.chmod(0o600)
        done = run([*_command(self._program, self._home, new), "-t"], timeout_s=60, check=False)
        if done.code != 0:
            raise InputError(f"nginx refuses these settings: {_complaint(done.stderr)}")
        new.rename(self._home / "nginx.conf")

    def _may_write(self, path: str) -> bool:
        """Tell whether a path names a file, to be, whose folder truly lies below the root."""
        if not isinstance(self._settings, ServeSettings) or path.endswith("/") or path.startswith("/-/"):
            return False
        root = self._settings.root
        folder = (root / path.lstrip("/")).parent.resolve()
        return folder == root or root in folder.parents

    def _await_answer(self) -> None:
        host, port = self._address
        deadline = time.monotonic() + START_S
        while True:
            self._check_alive()
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(_reachable(host), port, timeout=5)
                try:
                    connection.request("GET", "/-/healthy")
                    if connection.getresponse().status == 200:
                        return
                finally:
                    connection.close()
            if time.monotonic() > deadline:
                raise UnavailableError("nginx does not answer", where=self.url)
            time.sleep(0.02)

    def _check_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise StokerError(f"nginx ended by itself: {_complaint(_tail(self._home / 'error.log'))}")

    def _signal(self, number: signal.Signals) -> None:
        # Until `end` has reaped it, its number cannot be anyone else's.
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            self._signal(signal.SIGQUIT)
            with suppress(TimeoutError):
                self._process.wait(GRACE_S)
        finally:
            self._process.end()
            self._process = None


class Counts:
    """What nginx has done, read from its log, which is emptied when it grows.

    A file loses nothing; a datagram socket holds as few as ten lines (net.unix.max_dgram_qlen) and drops the rest.
    """

    def __init__(self, settings: Settings, home: Path, *, reopen: Callable[[], None]) -> None:
        self._cache = settings if isinstance(settings, CacheSettings) else None
        self._logs = home / "access.log", home / "error.log"
        self._reopen = reopen
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._held = -10.0, 0
        self._tails: list[_Tail] = []
        self._new_logs()

    def told(self) -> dict[str, object]:
        """Give the statistics, by the names that all engines use."""
        self.update()
        totals, cache = self._totals, self._cache
        return {
            "engine": NginxEngine.name,
            "uptime_s": round(time.monotonic() - self._began, 3),
            "requests": totals["requests"],
            "bytes": totals["bytes"],
            "errors": totals["errors"],
            "hits": totals["hits"],
            "misses": totals["misses"],
            "origin_bytes": None if cache is None else totals["origin_bytes"],
            "evictions": None,
            "held_bytes": None if cache is None else self._held_bytes(cache),
            "budget": None if cache is None else cache.size,
        }

    def metrics(self) -> str:
        """Give the same as text for Prometheus."""
        return as_metrics(self.told(), gauges={"uptime_s", "held_bytes", "budget"})

    def origins(self) -> list[dict[str, str]]:
        """Tell names and URLs, without logins."""
        return [{"name": name, "url": shown(url)} for name, url in (self._cache.origins if self._cache else ())]

    def update(self) -> None:
        """Count what has been logged since the last time."""
        with self._lock:
            for tail in self._tails:
                for line in tail.lines():
                    count(line, self._totals)
            if any(_size(path) > LOG_LIMIT for path in self._logs):
                self._new_logs()
                self._reopen()

    def close(self) -> None:
        """Let the logs go."""
        for tail in self._tails:
            tail.close()

    def _new_logs(self) -> None:
        """Begin new logs; workers may still write to the former one, so it is read until the next change."""
        for path in self._logs:
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
        for tail in self._tails[:-1]:
            tail.close()
        self._tails = [*self._tails[-1:], _Tail(self._logs[0])]

    def _held_bytes(self, cache: CacheSettings) -> int:
        """Add up the cache's files; at most once a second, since there may be many."""
        when, held = self._held
        if time.monotonic() - when > 1:
            held = sum(_size(path) for path in _files(cache_folder(cache)))
            self._held = time.monotonic(), held
        return held


def count(line: bytes, totals: Counter[str]) -> None:
    """Add what a line of nginx's log tells; anything else adds nothing."""
    found = _LINE.fullmatch(line)
    if found is None:  # torn, by a full disk
        return
    status, sent, length, cached, received = found.groups()
    if length != b"0":  # else a slice of a request that has its own line
        totals["requests"] += 1
        totals["bytes"] += int(sent)
        totals["errors"] += status >= b"500"
    totals["hits"] += cached in _HITS
    totals["misses"] += cached in _MISSES
    totals["origin_bytes"] += sum(map(int, re.findall(rb"\d+", received)))


class _Tail:
    """A log that is read as it grows, by whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def lines(self) -> list[bytes]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return lines

    def close(self) -> None:
        self._file.close()


def find_nginx() -> str:
    """Find the program; Debian keeps it where only root's PATH leads."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise MissingProgramError(
            "nginx is not installed", hint="run: apt-get install nginx-light, or use --engine embedded"
        )
    return program


def _check_modules(program: str, settings: Settings) -> None:
    wanted = []
    if isinstance(settings, CacheSettings):
        wanted += ["slice"]
        wanted += ["ssl"] * any(urlsplit(url).scheme == "https" for _, url in settings.origins)
    elif settings.writable:
        wanted += ["dav", "auth_request"]
    if settings.token is not None:
        wanted += ["secure_link"]
    has = run([program, "-V"], timeout_s=20).stderr
    lacks = [name for name in wanted if f"--with-http_{name}_module" not in has]
    if lacks:
        raise InputError(
            f"this nginx was built without its module {' and '.join(lacks)}",
            where=program,
            hint="install nginx-full, or use --engine embedded",
        )


def _prepared(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make this folder: {(error.strerror or '').lower()}", where=folder) from error
    return folder.resolve()


@contextmanager
def _held(lock: Path, folder: Path) -> Iterator[None]:
    """Keep a folder to ourselves: two that do not know of each other would break each other's files."""
    try:
        file: IO[str] = lock.open("w")
    except OSError as error:
        raise InputError(f"cannot write here: {(error.strerror or '').lower()}", where=folder) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(
                "another cache or server uses this folder", where=folder, hint="give it another --dir"
            ) from error
        yield


def _remove_unfinished(folder: Path) -> None:
    """Remove what a killed nginx was just writing; nginx itself neither counts nor removes it."""
    for path in _files(folder):
        if _TEMPORARY.search(path.name):
            path.unlink(missing_ok=True)


def _listening(host: str, port: int) -> socket.socket:
    """Listen for nginx, which inherits the socket: a taken port is known at once, and any free one can be asked for."""
    where = f"{_url_host(host)}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise InputError("is not an address of this machine", where=where) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as nginx has it
        sock.bind(address)
        sock.listen(1024)
        sock.setblocking(False)  # nginx takes this for granted; else a worker that another forestalls waits in accept
    except (OSError, OverflowError) as error:
        sock.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        what = "is taken" if taken else f"cannot be used: {error}"
        raise UnavailableError(f"the address {what}", where=where, hint="choose another --port or --host") from error
    return sock


def _command(program: str, home: Path, config: Path) -> list[str]:
    return [program, "-p", str(home), "-c", str(config), "-e", str(home / "error.log")]


def _spawn(program: str, home: Path, listener: socket.socket) -> Process:
    """Start nginx in a session of its own; it is told to end when we die, however that is."""
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *_command(program, home, home / "nginx.conf")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        # The way in which nginx hands its sockets to a new version of itself.
        env={**os.environ, "NGINX": f"{listener.fileno()};"},
        start_new_session=True,
    )
    return Process(popen)


class _Admin(ThreadingUnixStreamServer):
    """Answers what nginx hands on from below `/-/`, and counts in between."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, counts: Counts, may_write: Callable[[str], bool]) -> None:
        self.counts = counts
        self.may_write = may_write
        super().__init__(str(path), _AdminHandler)

    def service_actions(self) -> None:
        self.counts.update()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Say so in the log; the standard library would print a traceback."""
        log.debug("a question about the server broke off", exc_info=True)


class _AdminHandler(BaseHTTPRequestHandler):
    server: _Admin
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/-/guard":
            target = self.headers.get("X-Stoker-Path", "").encode("latin-1").decode(errors="surrogateescape")
            self._answer(200 if self.server.may_write(target) else 403, "")
        elif path == "/-/stats":
            self._answer(200, json.dumps(self.server.counts.told()), "application/json")
        elif path == "/-/origins":
            self._answer(200, json.dumps(self.server.counts.origins()), "application/json")
        elif path == "/-/metrics":
            self._answer(200, self.server.counts.metrics(), "text/plain; version=0.0.4")
        else:
            self._answer(404, "no such page\n")

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        with suppress(OSError):  # nginx, or its client, may have gone
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "nginx"


@contextmanager
def _admin_server(path: Path, counts: Counts, may_write: Callable[[str], bool]) -> Iterator[None]:
    try:
        server = _Admin(path, counts, may_write)
    except OSError as error:
        raise InputError(
            f"cannot make a socket here: {error.strerror or error}", where=path, hint="set TMPDIR to a short path"
        ) from error
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="nginx-admin", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def _complaint(text: str) -> str:
    """Find the sentence that says why, in what nginx printed or logged."""
    lines = text.strip().splitlines() or ["it said nothing"]
    line = next((line for line in reversed(lines) if re.search(r"\[(?:emerg|alert|crit)\]", line)), lines[-1])
    line = re.sub(r"^.*?\[\w+\] (?:\d+#\d+: )?(?:\*\d+ )?", "", line)
    return re.sub(r" in \S+/nginx\.conf(\.new)?:\d+$", "", line)


def _tail(path: Path, most: int = 4096) -> str:
    try:
        return path.read_bytes()[-most:].decode(errors="replace")
    except OSError:
        return ""


def _files(folder: Path) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        for name in names:
            yield Path(where, name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host

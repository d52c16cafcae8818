"""nginx engine: start, reload and stop an nginx process that serves or caches.

nginx keeps its files in one folder. This process only supervises it, counts its log and answers `/-/` requests.
"""

from __future__ import annotations

import fcntl
import http.client
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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from stoker.core.processes import Process, run
from stoker.core.scratch import scratch_directory
from stoker.errors import ConflictError, InputError, MissingProgramError, NotFoundError, StokerError, UnavailableError
from stoker.serve.embedded import listen_error
from stoker.serve.files import resolve_write_target
from stoker.serve.http import HttpStatusError
from stoker.serve.nginx.admin import run_admin_server
from stoker.serve.nginx.config import (
    NginxCacheConfig,
    NginxConfig,
    NginxServeConfig,
    cache_path,
    render_cache_config,
    render_serve_config,
)
from stoker.serve.nginx.stats import NginxStats, walk_files

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""How long running transfers may take after the signal to stop."""
START_TIMEOUT_S = 20.0
# A separate program, because code between fork and exec is not safe in a process with threads. 1 is PR_SET_PDEATHSIG;
# it sends no signal if the parent has already exited.
_LAUNCHER = """
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has exited")
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
os.execv(sys.argv[2], sys.argv[2:])
"""
_TEMPORARY_SUFFIX = re.compile(r"\.\d{10}$")


class NginxEngine:
    """One nginx process: `start` it, `wait` for a signal or its exit, `stop` and clean up.

    Start it from a thread that lives as long as nginx should run: nginx is stopped when that thread exits.
    """

    name = "nginx"

    def __init__(
        self,
        config: NginxConfig,
        prefix: Path | None = None,
        *,
        load_config: Callable[[], NginxConfig] | None = None,
    ) -> None:
        self._requested = config
        self._prefix = prefix
        self._load_config = load_config
        self._resources = ExitStack()
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The URL of the server; a wildcard address is replaced by the loopback address."""
        return f"http://{_url_host(_connectable(self._config.host))}:{self._config.port}"

    def start(self) -> None:
        """Start nginx and wait until it is healthy; clean up on any failure."""
        self._program = find_nginx()
        _check_modules(self._program, self._requested)
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_directory())
            self._home = _create_folder(self._prefix or folder / "prefix")
            stack.enter_context(_exclusive_lock(self._home / "lock", self._home))
            if isinstance(self._requested, NginxCacheConfig):
                _create_folder(self._requested.dir)
                stack.enter_context(_exclusive_lock(self._requested.dir / "lock", self._requested.dir))
                _remove_temporary_files(cache_path(self._requested))
            listener = stack.enter_context(_listen(self._requested.host, self._requested.port))
            self._address = listener.getsockname()[:2]
            self._admin = folder / "admin"
            self._config = self._resolve_config(self._requested)
            self._stats = NginxStats(self._config, self._home, reopen=lambda: self._signal(signal.SIGUSR1))
            stack.callback(self._stats.close)
            stack.enter_context(run_admin_server(self._admin, self._stats, self._check_write))
            self._write_config(self._config)
            self._process = _spawn(self._program, self._home, listener)
            stack.callback(self._terminate)
            listener.close()
            self._wait_until_healthy()
            self._resources = stack.pop_all()

    def wait(self) -> None:
        """Run until SIGTERM or SIGINT, reload on SIGHUP, then `stop`; raise if nginx exits by itself."""
        signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        previous = {
            number: signal.signal(number, lambda number, _: signals.put(number))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            while True:
                try:
                    number = signals.get(timeout=0.25)
                except queue.Empty:
                    self._check_alive()
                    continue
                if number != signal.SIGHUP:
                    return
                self._try_reload()
        finally:
            try:
                self.stop()
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def reload(self) -> None:
        """Apply changed settings without dropping connections; raise and keep the old ones if nginx rejects them."""
        requested = self._requested if self._load_config is None else self._load_config()
        _check_modules(self._program, requested)
        config = self._resolve_config(requested)
        self._write_config(config)
        self._config = config
        self._signal(signal.SIGHUP)

    def stop(self) -> None:
        """Stop nginx, gracefully first, and clean up; a second call does nothing."""
        self._resources.close()

    def _try_reload(self) -> None:
        try:
            self.reload()
        except StokerError as error:
            log.warning("reload failed, keeping the current settings: %s", error)

    def _resolve_config(self, requested: NginxConfig) -> NginxConfig:
        """Complete the requested settings with the address, user and certificates of this machine."""
        host, port = self._address
        user = pwd.getpwuid(0).pw_name if os.geteuid() == 0 else None
        config: NginxConfig = replace(requested, host=host, port=port, admin_socket=self._admin, user=user)
        if isinstance(config, NginxCacheConfig):
            ca_file = ssl.get_default_verify_paths().cafile
            if config.ca_file is None and ca_file is not None:
                config = replace(config, ca_file=Path(ca_file))
            return replace(config, dir=config.dir.resolve())
        if not config.root.is_dir():
            raise NotFoundError("not a directory", where=config.root)
        return replace(config, root=config.root.resolve())

    def _write_config(self, config: NginxConfig) -> None:
        """Write the configuration; replace the current one only if nginx accepts it."""
        home = self._home
        text = (
            render_serve_config(config, home)
            if isinstance(config, NginxServeConfig)
            else render_cache_config(config, home)
        )
        candidate = self._home / "nginx.conf.new"
        candidate.write_bytes(text.encode(errors="surrogateescape"))
        candidate.chmod(0o600)
        test = run([*_command(self._program, self._home, candidate), "-t"], timeout_s=60, check=False)
        if test.exit_code != 0:
            raise InputError(f"nginx rejected the configuration: {_error_message(test.stderr)}")
        candidate.rename(self._home / "nginx.conf")

    def _check_write(self, path: str) -> None:
        """Raise HttpStatusError if a path may not be written or deleted."""
        if not isinstance(self._config, NginxServeConfig) or path.endswith("/") or path.startswith("/-/"):
            raise HttpStatusError(403, "not the path of a file")
        resolve_write_target(self._config.root, path)

    def _wait_until_healthy(self) -> None:
        host, port = self._address
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self._check_alive()
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(_connectable(host), port, timeout=5)
                try:
                    connection.request("GET", "/-/healthy")
                    if connection.getresponse().status == 200:
                        return
                finally:
                    connection.close()
            if time.monotonic() > deadline:
                raise UnavailableError("no response from nginx", where=self.url)
            time.sleep(0.02)

    def _check_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise StokerError(f"nginx exited unexpectedly: {_error_message(_read_tail(self._home / 'error.log'))}")

    def _signal(self, number: signal.Signals) -> None:
        # Its pid cannot be reused until `_terminate` has reaped it.
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _terminate(self) -> None:
        if self._process is None:
            return
        try:
            self._signal(signal.SIGQUIT)
            with suppress(TimeoutError):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.stop()
            self._process = None


def find_nginx() -> str:
    """Return the path of nginx; Debian installs it in a folder that only root's PATH has."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise MissingProgramError(
            "nginx is not installed", hint="run: apt-get install nginx-light, or use --engine embedded"
        )
    return program


def _check_modules(program: str, config: NginxConfig) -> None:
    required = []
    if isinstance(config, NginxCacheConfig):
        required += ["slice"]
        required += ["ssl"] * any(urlsplit(url).scheme == "https" for _, url in config.origins)
    elif config.writable:
        required += ["dav", "auth_request"]
    if config.token is not None:
        required += ["secure_link"]
    build_options = run([program, "-V"], timeout_s=20).stderr
    missing = [name for name in required if f"--with-http_{name}_module" not in build_options]
    if missing:
        raise InputError(
            f"nginx was built without the module {' and '.join(missing)}",
            where=program,
            hint="install nginx-full, or use --engine embedded",
        )


def _create_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the directory: {(error.strerror or '').lower()}", where=folder) from error
    return folder.resolve()


@contextmanager
def _exclusive_lock(lock: Path, folder: Path) -> Iterator[None]:
    """Lock a folder: two engines would corrupt each other's files."""
    try:
        file: IO[str] = lock.open("w")
    except OSError as error:
        raise InputError(f"cannot write to the directory: {(error.strerror or '').lower()}", where=folder) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(
                "directory is in use by another cache or server", where=folder, hint="pass another --dir"
            ) from error
        yield


def _remove_temporary_files(folder: Path) -> None:
    """Delete the temporary files of a killed nginx, which nginx itself neither counts nor deletes."""
    for path in walk_files(folder):
        if _TEMPORARY_SUFFIX.search(path.name):
            path.unlink(missing_ok=True)


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket that nginx inherits: reports a port in use at once, and allows port 0."""
    where = f"{_url_host(host)}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise InputError("invalid listen address", where=where) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as nginx does
        sock.bind(address)
        sock.listen(1024)
        sock.setblocking(False)  # nginx assumes it; otherwise a worker could block in accept
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OverflowError):
            raise InputError("invalid listen address", where=where) from error
        raise listen_error(host, port, error) from error
    return sock


def _command(program: str, home: Path, config: Path) -> list[str]:
    return [program, "-p", str(home), "-c", str(config), "-e", str(home / "error.log")]


def _spawn(program: str, home: Path, listener: socket.socket) -> Process:
    """Start nginx in a new session; the kernel sends it SIGTERM when this process dies."""
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *_command(program, home, home / "nginx.conf")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        # The variable by which nginx passes sockets to a new binary on an upgrade.
        env={**os.environ, "NGINX": f"{listener.fileno()};"},
        start_new_session=True,
    )
    return Process(popen)


def _error_message(text: str) -> str:
    """Return the line of nginx's output or log that states the error."""
    lines = text.strip().splitlines() or ["no error message"]
    line = next((line for line in reversed(lines) if re.search(r"\[(?:emerg|alert|crit)\]", line)), lines[-1])
    line = re.sub(r"^.*?\[\w+\] (?:\d+#\d+: )?(?:\*\d+ )?", "", line)
    return re.sub(r" in \S+/nginx\.conf(\.new)?:\d+$", "", line)


def _read_tail(path: Path, max_bytes: int = 4096) -> str:
    try:
        return path.read_bytes()[-max_bytes:].decode(errors="replace")
    except OSError:
        return ""


def _connectable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host

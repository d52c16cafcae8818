"""kubectl, where a terminal or a tunnel is needed; all else is asked of the API server itself.

Every word is data: an argv, never a line for a shell.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from stoker.core import processes
from stoker.errors import InputError, MissingProgramError
from stoker.kube.config import kubeconfig_paths

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

PROGRAM = "kubectl"
BIND_ADDRESS = "127.0.0.1"
"""Where tunnels begin: others on the network have no part in them."""
GRACE_S = 5.0


def is_installed() -> bool:
    """Whether there is a kubectl on the PATH."""
    return shutil.which(PROGRAM) is not None


def require_kubectl(purpose: str, hint: str = "") -> str:
    """Give the path of the program, or say what to install."""
    if found := shutil.which(PROGRAM):
        return found
    install = "install it (kubernetes.io/docs/tasks/tools), or add its folder to the PATH"
    raise MissingProgramError(
        f"{purpose} needs the program {PROGRAM!r}, which is not here", hint=f"{install}{f'; {hint}' if hint else ''}"
    )


def base_argv(program: str, context: str | None, namespace: str) -> list[str]:
    """Begin a command line that means our cluster and namespace; None: the pod that we are in has no context."""
    return [program, *([] if context is None else [f"--context={context}"]), f"--namespace={namespace}"]


def exec_argv(pod: str, container: str, argv: Sequence[str], *, stdin: bool, tty: bool) -> list[str]:
    """Write the rest of it for a command in a container."""
    flags = [*(["--stdin"] if stdin else []), *(["--tty"] if tty else [])]
    return ["exec", pod, f"--container={container}", *flags, "--", *argv]


def port_forward_argv(pod: str, ports: Mapping[int, int]) -> list[str]:
    """Write the rest of it for tunnels: ports here, and where they lead in the pod."""
    return [
        "port-forward",
        f"--address={BIND_ADDRESS}",
        f"pod/{pod}",
        *(f"{here}:{there}" for here, there in ports.items()),
    ]


def kubectl_env() -> dict[str, str]:
    """Give the environment in which kubectl reads the same files as we do, a ~ in their names included."""
    given = os.environ.get("KUBECONFIG")
    return {**os.environ, **({"KUBECONFIG": os.pathsep.join(map(str, kubeconfig_paths()))} if given else {})}


def _begin(cluster: KubeClient, purpose: str) -> list[str]:
    is_configured = any(path.is_file() for path in kubeconfig_paths())
    return base_argv(require_kubectl(purpose), cluster.context if is_configured else None, cluster.namespace)


# --- A command, with or without a terminal


def exec_interactive(
    cluster: KubeClient, pod: str, container: str, argv: Sequence[str], *, tty: bool | None = None
) -> int:
    """Run a command in a container with our own standard streams; give its exit code.

    `tty` None: a terminal there when there is one here, on both ends: else its line ends would spoil what is written.
    """
    has_tty = is_terminal() if tty is None else tty
    line = [*_begin(cluster, "a terminal in a pod" if has_tty else "standard input of a command in a pod")]
    line += exec_argv(pod, container, argv, stdin=has_stdin(), tty=has_tty)
    sys.stdout.flush()
    sys.stderr.flush()
    with _terminal_kept():
        # In our group, not in one of its own: the terminal's signals are for both.
        popen = subprocess.Popen(line, env=kubectl_env())
        try:
            code = popen.wait()
        finally:
            _end(popen)
    return code if code >= 0 else 128 - code


def is_terminal() -> bool:
    """Whether a person sits at both ends of our standard streams."""
    return all(_is_tty(number) for number in (0, 1))


def has_stdin() -> bool:
    """Whether there may be something to read: not when it is closed or /dev/null."""
    try:
        found = os.fstat(0)
    except OSError:
        return False
    return found.st_rdev != Path(os.devnull).stat().st_rdev


def _is_tty(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Leave the terminal as it was, even when kubectl could not."""
    try:
        saved = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error, OSError):  # it may have hung up
            termios.tcsetattr(0, termios.TCSADRAIN, saved)


def _end(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        popen.terminate()
        try:
            popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


# --- Tunnels


class PortMapping(NamedTuple):
    """A port of a pod, and the one here that leads to it; 0: any that is free."""

    pod_port: int
    local_port: int

    @classmethod
    def parse(cls, text: str) -> PortMapping:
        """Read `6006`, or `6006:8080` for one that is 8080 here."""
        there, colon, here = text.partition(":")
        numbers = [int(word) if word.isascii() and word.isdigit() else -1 for word in (there, here if colon else there)]
        if not 0 < numbers[0] < 65536 or not 0 <= numbers[1] < 65536:
            raise InputError(f"{text!r} is no port", hint="write PORT, or PORT:LOCAL where it has another number here")
        return cls(*numbers)


class PortForward:
    """A `kubectl port-forward` that runs; a context manager that ends it."""

    def __init__(self, cluster: KubeClient, pod: str, ports: Mapping[int, int]) -> None:
        line = [*_begin(cluster, "a tunnel to a pod"), *port_forward_argv(pod, ports)]
        self._heard: queue.Queue[str | None] = queue.Queue()
        read, write = os.pipe()
        try:
            self._process = processes.start(line, env=kubectl_env(), stdout=write, stderr=write, dies_with_us=True)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._reader = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._reader.start()

    def next_line(self, timeout_s: float) -> str | None:
        """Give its next line; "": there was none in that time; None: it has ended."""
        try:
            return self._heard.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.end(GRACE_S)
        self._reader.join(GRACE_S)

    def _read(self, number: int) -> None:
        with open(number, errors="replace") as pipe:
            for line in pipe:
                if text := line.strip():
                    self._heard.put(text)
        self._heard.put(None)

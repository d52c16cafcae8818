"""kubectl, used where a terminal (`exec --tty`) or a port forward is needed; `KubeClient` does everything else.

Commands are argument lists, never shell lines.
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
"""Local address of port forwards: other hosts cannot connect."""
GRACE_S = 5.0


def is_installed() -> bool:
    """Whether kubectl is on the PATH."""
    return shutil.which(PROGRAM) is not None


def require_kubectl(purpose: str, hint: str = "") -> str:
    """Return the path of kubectl; raise MissingProgramError if it is not installed."""
    if path := shutil.which(PROGRAM):
        return path
    install = "install it (kubernetes.io/docs/tasks/tools), or add its directory to PATH"
    raise MissingProgramError(
        f"{purpose} needs the program {PROGRAM!r}, which is not on the PATH",
        hint=f"{install}{f'; {hint}' if hint else ''}",
    )


def base_argv(program: str, context: str | None, namespace: str) -> list[str]:
    """Build the start of a command line; context None: use the service account of the pod we run in."""
    return [program, *([] if context is None else [f"--context={context}"]), f"--namespace={namespace}"]


def exec_argv(pod: str, container: str, argv: Sequence[str], *, stdin: bool, tty: bool) -> list[str]:
    """Build the arguments of `kubectl exec`."""
    flags = [*(["--stdin"] if stdin else []), *(["--tty"] if tty else [])]
    return ["exec", pod, f"--container={container}", *flags, "--", *argv]


def port_forward_argv(pod: str, ports: Mapping[int, int]) -> list[str]:
    """Build the arguments of `kubectl port-forward`; `ports` maps local ports to ports of the pod."""
    forwards = (f"{local_port}:{pod_port}" for local_port, pod_port in ports.items())
    return ["port-forward", f"--address={BIND_ADDRESS}", f"pod/{pod}", *forwards]


def kubectl_env() -> dict[str, str]:
    """Return our environment with ~ in $KUBECONFIG expanded, so that kubectl reads the same files as we do."""
    is_set = os.environ.get("KUBECONFIG")
    return {**os.environ, **({"KUBECONFIG": os.pathsep.join(map(str, kubeconfig_paths()))} if is_set else {})}


def _client_argv(client: KubeClient, purpose: str) -> list[str]:
    has_kubeconfig = any(path.is_file() for path in kubeconfig_paths())
    return base_argv(require_kubectl(purpose), client.context if has_kubeconfig else None, client.namespace)


# --- Exec


def exec_interactive(
    client: KubeClient, pod: str, container: str, argv: Sequence[str], *, tty: bool | None = None
) -> int:
    """Run a command in a container attached to our standard streams; return its exit code.

    `tty` None: allocate a TTY only if our stdin and stdout are terminals, since its CRLF line ends would corrupt
    redirected output.
    """
    use_tty = is_terminal() if tty is None else tty
    line = [*_client_argv(client, "a terminal in a pod" if use_tty else "standard input of a command in a pod")]
    line += exec_argv(pod, container, argv, stdin=has_stdin(), tty=use_tty)
    sys.stdout.flush()
    sys.stderr.flush()
    with _restore_terminal():
        # In our process group, so that signals of the terminal reach both.
        popen = subprocess.Popen(line, env=kubectl_env())
        try:
            code = popen.wait()
        finally:
            _terminate(popen)
    return code if code >= 0 else 128 - code


def is_terminal() -> bool:
    """Whether our stdin and stdout are terminals."""
    return all(_is_tty(number) for number in (0, 1))


def has_stdin() -> bool:
    """Whether stdin is open and not /dev/null."""
    try:
        stat = os.fstat(0)
    except OSError:
        return False
    return stat.st_rdev != Path(os.devnull).stat().st_rdev


def _is_tty(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


@contextmanager
def _restore_terminal() -> Iterator[None]:
    """Restore the terminal settings on exit, even if kubectl was killed."""
    try:
        saved = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error, OSError):  # the terminal may be closed
            termios.tcsetattr(0, termios.TCSADRAIN, saved)


def _terminate(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        popen.terminate()
        try:
            popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


# --- Port forwarding


class PortMapping(NamedTuple):
    """A port of a pod and the local port forwarded to it; local port 0: any free port."""

    pod_port: int
    local_port: int

    @classmethod
    def parse(cls, text: str) -> PortMapping:
        """Parse `POD_PORT` or `POD_PORT:LOCAL_PORT`."""
        pod_port, colon, local_port = text.partition(":")
        fields = (pod_port, local_port if colon else pod_port)
        numbers = [int(field) if field.isascii() and field.isdigit() else -1 for field in fields]
        if not 0 < numbers[0] < 65536 or not 0 <= numbers[1] < 65536:
            raise InputError(
                f"invalid port {text!r}", hint="use PORT (1-65535), or PORT:LOCAL for a different local port"
            )
        return cls(*numbers)


class PortForward:
    """A running `kubectl port-forward`; a context manager that terminates it."""

    def __init__(self, client: KubeClient, pod: str, ports: Mapping[int, int]) -> None:
        line = [*_client_argv(client, "a port forward to a pod"), *port_forward_argv(pod, ports)]
        self._lines: queue.Queue[str | None] = queue.Queue()
        read, write = os.pipe()
        try:
            self._process = processes.start(
                line, env=kubectl_env(), stdout=write, stderr=write, terminate_with_parent=True
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._reader = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._reader.start()

    def next_line(self, timeout_s: float) -> str | None:
        """Return kubectl's next line of output; "" after a timeout, None when kubectl has exited."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop(GRACE_S)
        self._reader.join(GRACE_S)

    def _read(self, number: int) -> None:
        with open(number, errors="replace") as pipe:
            for line in pipe:
                if text := line.strip():
                    self._lines.put(text)
        self._lines.put(None)

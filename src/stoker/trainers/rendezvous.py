"""Meet the other tasks of a training before TensorFlow starts, which would wait for them without a limit.

Rank 0 listens at a known address until every other rank has connected; then all learn the address of each. Standard
library only.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from stoker.errors import InputError, StokerError
from stoker.sampling.rank import Rank
from stoker.tf_environment import TaskEnvironment

RETRY_S = 0.1
MAX_CALL_S = 5.0
"""How long one attempt to connect may take; a host that is starting may drop packets."""

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client of HTTP/2 sends first, with empty SETTINGS; the server responds with its own."""


class MissingPeersError(StokerError):
    """Other tasks of the training did not start in time."""


def read_mpi_environment(environ: Mapping[str, str], timeout_s: float) -> TaskEnvironment | None:
    """Return the cluster of the ranks that mpirun has started; None if this process is not one of several ranks.

    MASTER_ADDR and MASTER_PORT name the place where rank 0 collects the addresses.
    """
    rank = Rank.from_environ(environ)
    if "OMPI_COMM_WORLD_SIZE" not in environ or rank.world_size == 1:
        return None
    try:
        master = f"{environ['MASTER_ADDR']}:{int(environ['MASTER_PORT'])}"
    except (KeyError, ValueError):
        raise InputError(
            "MASTER_ADDR and MASTER_PORT must name a host and a free port of rank 0",
            where="mpirun",
            hint="run it as a job with `topology: mpi`, which sets them, or pass them with -x",
        ) from None
    addresses = meet(rank, master, free_port(), timeout_s)
    return TaskEnvironment({"worker": tuple(addresses)}, "worker", rank.number)


def meet(rank: Rank, master: str, port: int, timeout_s: float) -> list[str]:
    """Wait until all ranks are here; return the address of each, which is the given port on its host.

    Raise MissingPeersError if some do not come in time.
    """
    host, _, master_port = master.rpartition(":")
    deadline = time.monotonic() + timeout_s
    if rank.number == 0:
        return _collect(rank, host, int(master_port), port, deadline, timeout_s)
    while (addresses := _call(rank, (host, int(master_port)), port, deadline)) is None:
        if time.monotonic() >= deadline:
            raise MissingPeersError(f"the first worker did not start within {timeout_s:g} s", where=master)
        time.sleep(RETRY_S)
    return addresses


def wait_for_servers(addresses: Mapping[str, str], timeout_s: float) -> None:
    """Wait until a gRPC server responds at each address, by task; raise MissingPeersError after the timeout."""
    missing, deadline = dict(addresses), time.monotonic() + timeout_s
    while missing:
        missing = {task: address for task, address in missing.items() if not is_responding(address)}
        if missing and time.monotonic() >= deadline:
            raise MissingPeersError(f"{_join(missing)} did not start within {timeout_s:g} s")
        if missing:
            time.sleep(RETRY_S)


def _collect(rank: Rank, host: str, listen_port: int, port: int, deadline: float, timeout_s: float) -> list[str]:
    addresses = {0: f"{host}:{port}"}
    with ExitStack() as resources:
        server = resources.enter_context(socket.create_server(("", listen_port), backlog=rank.world_size))
        callers: dict[int, socket.socket] = {}
        while len(addresses) < rank.world_size:
            server.settimeout(max(RETRY_S, deadline - time.monotonic()))
            try:
                caller, peer = server.accept()
                resources.callback(caller.close)
                caller.settimeout(MAX_CALL_S)
                number, attempt, caller_port = json.loads(caller.makefile().readline())
            except TimeoutError:
                if time.monotonic() >= deadline:
                    missing = [f"worker {number}" for number in range(rank.world_size) if number not in addresses]
                    raise MissingPeersError(f"{_join(missing)} did not start within {timeout_s:g} s") from None
                continue
            except (OSError, ValueError):
                continue  # it calls again
            if attempt == _attempt():  # not a worker of the attempt before, which is being stopped
                addresses[number], callers[number] = f"{peer[0]}:{caller_port}", caller
        in_order = [addresses[number] for number in range(rank.world_size)]
        for caller in callers.values():
            caller.sendall(json.dumps(in_order).encode() + b"\n")
    return in_order


def _call(rank: Rank, master: tuple[str, int], port: int, deadline: float) -> list[str] | None:
    """Announce this rank to rank 0; return the addresses of all, or None to try again."""
    try:
        with socket.create_connection(master, timeout=MAX_CALL_S) as connection:
            connection.sendall(json.dumps([rank.number, _attempt(), port]).encode() + b"\n")
            connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
            addresses: list[str] = json.loads(connection.makefile().readline())
            return addresses
    except (OSError, ValueError):
        return None


def _attempt() -> str:
    return os.environ.get("STOKER_ATTEMPT", "")


def is_responding(address: str, timeout_s: float = MAX_CALL_S) -> bool:
    """Return whether a gRPC server at an address responds.

    It must begin an HTTP/2 connection: the kernel accepts connections for a process that is stopped, too.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            connection.sendall(_HTTP2_PREFACE)
            return bool(connection.recv(1))
    except OSError:
        return False


def _join(names: Iterable[str]) -> str:
    return " and ".join(names)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port

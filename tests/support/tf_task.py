# ruff: noqa: T201
"""A task of a TensorFlow cluster that knows only its environment: every task serves its name at its own address.

A lead task (the chief, or else every worker) connects to all others, waits until all lead tasks have connected to it,
prints that and exits. All other tasks serve forever, as parameter servers do. Needs only the standard library, so that
any image can run it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time

TIMEOUT_S = 60.0


def serve(server: socket.socket, name: str, callers: set[str]) -> None:
    """Send our name to every caller and record the caller's."""
    while True:
        caller, _ = server.accept()
        with caller:
            callers.add(caller.makefile().readline().strip())
            caller.sendall(f"{name}\n".encode())


def call(address: str, name: str) -> str:
    """Send our name to an address and return the name of the task there, which may not have started yet."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(f"{name}\n".encode())
                return connection.makefile().readline().strip()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    """Run one task."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    name = os.environ["POD_NAME"]
    assert task == {"type": name.rpartition("-")[0], "index": int(name.rpartition("-")[2])}, task
    assert json.loads(os.environ["CLUSTER_CONFIG"]) == {role: cluster.get(role, []) for role in ("ps", "worker")}
    if task["type"] == "evaluator":
        print("observing", flush=True)
        time.sleep(3600)
    addresses = {f"{role}-{index}": address for role in cluster for index, address in enumerate(cluster[role])}
    others = {other: address for other, address in addresses.items() if other != name}
    leaders = {
        task_name for task_name in addresses if task_name.startswith("chief" if "chief" in cluster else "worker")
    }
    callers: set[str] = set()
    server = socket.create_server(("", int(addresses[name].rpartition(":")[2])))
    threading.Thread(target=serve, args=(server, name, callers), daemon=True).start()
    print("serving", name, "with gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if name not in leaders:
        time.sleep(3600)
    for other, address in others.items():
        assert call(address, name) == other
        print("reached", other, "at", address, flush=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not leaders - {name} <= callers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leaders - {name} <= callers, leaders - callers
    print("done", flush=True)


if __name__ == "__main__":
    main()

# ruff: noqa: T201
"""A task of a TensorFlow cluster that knows only its environment: every task serves its name at its own address.

Who leads (the chief, or else every worker) reaches all others, waits until all who lead have reached it, says so and
ends. All others serve for ever, as parameter servers do. Standard library alone, so that any image can run it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time

WITHIN_S = 60.0


def serve(server: socket.socket, name: str, callers: set[str]) -> None:
    """Tell everyone who calls our name, and note theirs."""
    while True:
        caller, _ = server.accept()
        with caller:
            callers.add(caller.makefile().readline().strip())
            caller.sendall(f"{name}\n".encode())


def call(address: str, name: str) -> str:
    """Tell our name at an address, and give theirs; they may not be up yet."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as there:
                there.sendall(f"{name}\n".encode())
                return there.makefile().readline().strip()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    """Be one task."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    name = os.environ["POD_NAME"]
    assert task == {"type": name.rpartition("-")[0], "index": int(name.rpartition("-")[2])}, task
    assert json.loads(os.environ["CLUSTER_CONFIG"]) == {role: cluster.get(role, []) for role in ("ps", "worker")}
    if task["type"] == "evaluator":
        print("looking on", flush=True)
        time.sleep(3600)
    every = {f"{role}-{index}": one for role, all_ in cluster.items() for index, one in enumerate(all_)}
    others = {other: address for other, address in every.items() if other != name}
    leaders = {one for one in every if one.startswith("chief" if "chief" in cluster else "worker")}
    callers: set[str] = set()
    server = socket.create_server(("", int(every[name].rpartition(":")[2])))
    threading.Thread(target=serve, args=(server, name, callers), daemon=True).start()
    print("serving", name, "with gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if name not in leaders:
        time.sleep(3600)
    for other, address in others.items():
        assert call(address, name) == other
        print("reached", other, "at", address, flush=True)
    deadline = time.monotonic() + WITHIN_S
    while not leaders - {name} <= callers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leaders - {name} <= callers, leaders - callers
    print("done", flush=True)


if __name__ == "__main__":
    main()

"""Ray driver: runs on the cluster, places the gang, starts a slot in every bundle, forwards output and exit codes.

One file that needs only the standard library and Ray. It writes frames: numbered lines of JSON on standard output, so
that a client that reads the log twice processes each frame once; Ray's own log monitor drops repeated lines and is not
used. The desired state is sent to it repeatedly, through the cluster's key-value store or on standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FRAME_PREFIX = "@stoker-ray "
PYTHON, WORKDIR, HOME = "@ray:python@", "@ray:workdir@", "@ray:home@"
PORT, INTERFACE = "@ray:port@", "@ray:interface@"
"""Placeholders for what is known only after placement; a slot has the address `@ray:worker/0@` and the
port `@ray:worker/0:port@`."""
LOST_EXIT_CODE, REJECTED_EXIT_CODE = 255, 3
READ_BYTES = 8192
POLL_S, LONG_POLL_S, STATE_POLL_S = 0.2, 1.0, 0.5
CAPACITY_CHECK_S = 5.0
EXIT_TIMEOUT_S = 5.0
"""Time to report the end, after the grace period."""
DRIVER_HEARTBEATS_PER_TIMEOUT = 3
NODE_FAILURE_S = 8.0
"""How long Ray may need to notice that the node of a dead actor is gone too."""
PORT_RANGE = range(20000, 32000)
OBJECT_STORE_BYTES = 256 * 2**20
_SIOCGIFADDR = 0x8915
SLOT_ID = "slot"
"""The name of the slot in its own slot daemon."""
# Set by Ray for its own workers; user programs should not inherit them.
_RAY_VARIABLES = ("PYTHONBREAKPOINT", "RAY_JOB_STOP_WAIT_TIME_S", "RAY_worker_niceness")
# Ray would kill a child of the actor together with the actor; a daemon sees the actor's end and stops the slot. Its
# directory comes first, with the modules that it imports, whatever is installed on the node.
_DAEMONIZE = """
import json, os, shutil, sys
if os.fork(): os._exit(0)
os.setsid()
sys.path.insert(0, sys.argv[1])
from stoker.remote.frames import Connection
from stoker.remote.slot_daemon import SlotDaemon
shutil.rmtree(os.path.join(sys.argv[1], "stoker"))
SlotDaemon(json.loads(sys.argv[2]), client=Connection(0, 1)).run()
"""


class JsonFrameWriter:
    """Writer of frames to standard output."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def write(self, **frame: Any) -> None:
        """Write one frame without interleaving."""
        with self._lock, contextlib.suppress(OSError):
            self._count += 1
            line = memoryview(f"{FRAME_PREFIX}{json.dumps({'n': self._count, **frame})}\n".encode())
            while line:
                line = line[os.write(1, line) :]

    def start_heartbeat(self, interval_s: float) -> None:
        """Write a heartbeat frame regularly, so that the client can tell a silent driver from a broken connection."""

        def write_heartbeats() -> None:
            while True:
                self.write(alive=True)
                time.sleep(interval_s)

        threading.Thread(target=write_heartbeats, daemon=True).start()


# --- Desired state


class ControlState:
    """The state that the client wants: stop requests and stack dumps; and whether the client is still there."""

    def __init__(self, client_timeout_s: float) -> None:
        self._client_timeout_s, self._updated_at = client_timeout_s, time.monotonic()
        self._state: dict[str, Any] = {}
        self._stack_requests, self._is_client_gone = 0, False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.mark_client_gone())

    def update(self, state: dict[str, Any]) -> None:
        """Set the desired state; any change also proves that the client is alive."""
        if state != self._state:
            self._state, self._updated_at = state, time.monotonic()

    def mark_client_gone(self) -> None:
        """Record that no more requests will come."""
        self._is_client_gone = True

    @property
    def is_done(self) -> bool:
        """Whether the client has acknowledged the end, or is gone."""
        return self._is_client_gone or bool(self._state.get("acknowledged"))

    @property
    def stop_requests(self) -> int:
        """The number of stop requests; at least 1 when the client is gone."""
        requests = int(self._state.get("stop_level", 0))
        if self._is_client_gone or time.monotonic() - self._updated_at > self._client_timeout_s:
            return max(requests, 1)
        return requests

    def take_stack_request(self) -> dict[str, list[int]]:
        """Return the process ids of each slot that should dump their stacks, once per request."""
        count = int(self._state.get("stacks", 0))
        if count <= self._stack_requests:
            return {}
        self._stack_requests = count
        pids: dict[str, list[int]] = self._state["pids"]
        return pids

    @property
    def restarts(self) -> dict[str, int]:
        """How many times each slot is to be started again."""
        counts: dict[str, int] = self._state.get("restarts", {})
        return counts


def receive_from_store(key: str, client_timeout_s: float) -> tuple[dict[str, Any] | None, ControlState]:
    """Receive the request through the key-value store and follow the desired state there.

    The client stores the request after our first frame; None when a stop request comes before it.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    control = ControlState(client_timeout_s)

    def follow() -> None:
        while True:
            with contextlib.suppress(Exception):  # the store may be unavailable for a while
                control.update(json.loads(_internal_kv_get(f"{key}.zip") or "{}"))
            time.sleep(STATE_POLL_S)

    threading.Thread(target=follow, daemon=True).start()
    request = None
    while not request and not control.stop_requests:
        with contextlib.suppress(Exception):  # likewise
            request = _internal_kv_get(f"{key}-request.zip")
        time.sleep(0 if request else POLL_S)
    delete_from_store(f"{key}-request")
    return json.loads(request) if request else None, control


def delete_from_store(key: str) -> None:
    """Delete a key from the key-value store."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):
        _internal_kv_del(f"{key}.zip")


def receive_from_stdin() -> tuple[dict[str, Any], ControlState]:
    """Read the request and then desired states from standard input; its end means that the client is gone."""
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    control = ControlState(float("inf"))

    def follow() -> None:
        for line in sys.stdin:
            control.update(json.loads(line))
        control.mark_client_gone()

    threading.Thread(target=follow, daemon=True).start()
    return request, control


# --- Inside a bundle


class SlotActor:
    """Actor in one bundle of the placement group: inspects its node and runs the slot through a slot daemon."""

    def __init__(self, daemon_files: dict[str, str]) -> None:
        self._daemon_files = daemon_files
        self._folder, self._request = "", dict[str, Any]()
        self._pipes: tuple[IO[bytes], ...] = ()
        """Standard input and output of the slot daemon."""
        self._result: dict[str, Any] | None = None
        self._read_at, self._has_expired = time.monotonic(), False

    def inspect_node(self) -> dict[str, Any]:
        """Return what only this node knows: its address, network interface, a free port, and paths."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        names = [name for name, interface_address in _interfaces() if interface_address == address]
        return {
            "address": address,
            "interface": names[0] if names else "",
            "port": _find_free_port(),
            "node": ray.get_runtime_context().get_node_id(),
            "python": sys.executable,
            "workdir": str(Path.cwd()),
            "home": str(Path.home()),
        }

    def start(self, request: dict[str, Any], closed: None = None) -> None:  # noqa: ARG002
        """Start the slot; or again, with the result of `close`, because calls of an actor may overtake each other."""
        self._folder, self._request = tempfile.mkdtemp(prefix="stoker-slot-"), request
        self._result, self._has_expired = None, False
        self._start_daemon()
        self.send({**request, "op": "start", "key": "", "log_size": 0, "is_standby": False})
        self._read_at = time.monotonic()
        for target in (self._wait_for_result, self._watch_lease):
            threading.Thread(target=target, daemon=True).start()

    def _start_daemon(self) -> None:
        for name, text in self._daemon_files.items():
            path = Path(self._folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        attach = {key: self._request[key] for key in ("tags", "grace_s")}
        # The lease of the daemon ends with the pipe.
        attach |= {"op": "attach", "folder": self._folder, "lost_after_s": 0.0, "slots": {}, "starting": []}
        # Without the variables by which a cluster that was started for the run finds its own processes: the daemon
        # must outlive them to stop its slot.
        names = [name for name in os.environ if not name.startswith("STOKER_") and name not in _RAY_VARIABLES]
        daemon = subprocess.Popen(
            [sys.executable, "-IS", "-c", _DAEMONIZE, self._folder, json.dumps(attach)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # not the log of the actor: who has that open is stopped with Ray
            start_new_session=True,
            env={name: os.environ[name] for name in names},
        )
        daemon.wait()  # only for the process that forks; the daemon itself is no child of ours
        self._pipes = tuple(pipe for pipe in (daemon.stdin, daemon.stdout) if pipe is not None)

    def send(self, request: dict[str, Any]) -> None:
        """Send a request about the slot to its daemon; one that is gone has reported its result."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # closed by the daemon or by us, or not yet open
            self._pipes[0].write(json.dumps({**request, "slot": SLOT_ID}).encode() + b"\n")
            self._pipes[0].flush()

    def read(self, offset: int) -> dict[str, Any]:
        """Return the slot's output from an offset, or its result after all output; wait a moment for either."""
        if not self._pipes:
            raise RuntimeError("the slot was not started")
        self._read_at = time.monotonic()
        deadline = self._read_at + LONG_POLL_S
        while True:
            result = self._result  # before the last read, so that it misses no output
            data = b""
            with contextlib.suppress(OSError), open(os.path.join(self._folder, SLOT_ID, "log"), "rb") as file:
                file.seek(offset)
                data = file.read(READ_BYTES)
            if data or result is not None or time.monotonic() > deadline:
                return {"data": data, **({} if data else result or {})}
            time.sleep(0.05)

    def close(self) -> None:
        """Acknowledge the result, so that the slot daemon exits, and remove the output, also of a killed daemon."""
        self.send({"op": "acknowledge"})
        self._close_pipes()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()

    def _watch_lease(self) -> None:
        """Stop the slot when the driver has not read its output for too long: this node is cut off."""
        lease_s = self._request["lost_after_s"]
        while self._result is None and (lease_s is None or time.monotonic() - self._read_at < lease_s):
            time.sleep(POLL_S)
        if self._result is None:
            self._has_expired = True
            self.send({"op": "stop", "level": 1})

    def _wait_for_result(self) -> None:
        result = self._read_result()
        if result is None:  # another daemon stops the slot's leftover processes before the loss is reported
            with contextlib.suppress(OSError):
                self._close_pipes()
                self._start_daemon()
                self.send({"op": "close"})
                self._read_result()
        if self._has_expired:
            result = {"lost": f"its Ray node had no connection for {self._request['lost_after_s']:g} s"}
        self._result = result or {"lost": "its slot daemon on the Ray node was killed"}

    def _read_result(self) -> dict[str, Any] | None:
        """Return the result that the daemon reports; None if it exits first. The output is read from its file."""
        read, header = self._pipes[1].read, struct.Struct(">cBI")  # as packed by remote/frames.py
        while len(fields := read(header.size)) == header.size:
            kind, name_size, size = header.unpack(fields)
            payload = read(name_size + size)[name_size:]
            if kind == b"g":
                return {"lost": payload.decode(errors="replace")}
            if kind == b"x":
                return self._to_result(json.loads(payload))
        return None

    def _to_result(self, record: dict[str, Any]) -> dict[str, Any]:
        if "start_error" not in record:
            return record
        what = f"cannot start {self._request['argv'][0]!r}"
        if record["filename"] == self._request["cwd"]:
            what = f"cannot change to the working directory {record['filename']}"
        return {"error": f"{what}: {record['start_error']}"}


def _interfaces() -> list[tuple[str, str]]:
    """List the network interfaces with their IPv4 addresses."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                interfaces.append((name, socket.inet_ntoa(packed[20:24])))
    return interfaces


def _find_free_port() -> int:
    """Return a port that nothing listens on, below the ephemeral ports of the kernel."""
    for port in random.sample(PORT_RANGE, len(PORT_RANGE)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port
    return 0


# --- The gang


class Driver:
    """Driver of one attempt: all slots are placed, started and stopped together; one may be started again."""

    def __init__(self, request: dict[str, Any], control: ControlState, out: JsonFrameWriter) -> None:
        self._request, self._control, self._out = request, control, out
        self._slots: dict[str, dict[str, Any]] = request["slots"]
        self._actors, self._nodes = dict[str, Any](), dict[str, dict[str, Any]]()
        self._offsets, self._codes = dict.fromkeys(self._slots, 0), dict[str, int]()
        self._failed_actors: dict[str, tuple[float, str]] = {}
        """How actors of slots failed, and until when their nodes may turn out to be gone."""
        self._restarts, self._closing = dict.fromkeys(self._slots, 0), dict[str, Any]()
        """How often each slot was started again; the calls of `close`, by slots that have exited."""
        self._stop_requests, self._deadline = 0, float("inf")

    def run(self) -> int:
        """Run the gang to its end; return 0 if every slot succeeded."""
        group = placement_group(self._request["bundles"], strategy=self._request["strategy"])
        try:
            if self._wait_for_placement(group) and self._create_actors(group):
                self._out.write(addresses={name: node["address"] for name, node in self._nodes.items()})
                self._forward_output({self._start(name): name for name in self._slots})
        finally:  # Ray would remove it too, but only some time after our exit
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        return 0 if set(self._codes.values()) == {0} and len(self._codes) == len(self._slots) else 1

    def _wait_for_placement(self, group: Any) -> bool:
        """Wait until all bundles are placed, and report the capacity meanwhile; False on a stop request."""
        reported, checked_at = None, 0.0
        while not group.wait(1):
            if self._control.stop_requests:
                return False
            if time.monotonic() - checked_at >= CAPACITY_CHECK_S:
                checked_at, capacity = time.monotonic(), read_capacity()
                if capacity != reported:
                    self._out.write(capacity=capacity)
                reported = capacity
        if reported:
            self._out.write(capacity=None)
        return True

    def _create_actors(self, group: Any) -> bool:
        """Create the actors and inspect their nodes; False when one does not start, or on a stop request."""
        actor: Any = ray.remote(SlotActor)
        pending = {}
        for index, name in enumerate(self._slots):
            strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            bound = actor.options(**_actor_options(self._request["bundles"][index]), scheduling_strategy=strategy)
            self._actors[name] = bound.remote(self._request["daemon_files"])
            pending[self._actors[name].inspect_node.remote()] = name
        while pending:
            for ref in ray.wait(list(pending), timeout=POLL_S)[0]:
                name = pending.pop(ref)
                try:
                    self._nodes[name] = ray.get(ref)
                except RayError as error:
                    self._report_error(name, LOST_EXIT_CODE, f"its Ray actor did not start: {_last_line(error)}")
            if self._control.stop_requests or self._codes:
                return False
        return True

    def _start(self, name: str, *closed: Any) -> Any:
        """Start a slot, or start it again after the call that closes it; return the pending call."""
        return self._actors[name].start.remote(self._slot_request(name), *closed)

    def _restart_slots(self) -> dict[Any, str]:
        """Start the slots again that have exited and for which the client wants it; return them by pending calls."""
        calls = {}
        for name, count in self._control.restarts.items():
            if count > self._restarts[name] and name in self._closing and not self._stop_requests:
                self._restarts[name], self._offsets[name] = count, 0
                del self._codes[name]
                calls[self._start(name, self._closing.pop(name))] = name
        return calls

    def _slot_request(self, name: str) -> dict[str, Any]:
        """Return the request to start a slot, without placeholders."""
        first = self._nodes[next(iter(self._slots))]
        values = {PORT: str(first["port"])} | {f"@ray:{slot}@": node["address"] for slot, node in self._nodes.items()}
        values |= {f"@ray:{slot}:port@": str(node["port"]) for slot, node in self._nodes.items()}
        command, node = self._slots[name], self._nodes[name]
        values |= {PYTHON: node["python"], WORKDIR: node["workdir"], HOME: node["home"], INTERFACE: node["interface"]}
        env = {key: _fill_in(value, values) for key, value in command["env"].items()}
        return {
            "argv": [_fill_in(argument, values) for argument in command["argv"]],
            # Without a known interface, the variable must not be set at all.
            "env": {key: value for key, value in env.items() if value or command["env"][key] != INTERFACE},
            "cwd": _fill_in(command["cwd"] or node["workdir"], values),
            "name": name,
            "tags": {**self._request["tags"], "STOKER_SLOT": name},
            **{key: self._request[key] for key in ("grace_s", "lost_after_s")},
        }

    def _forward_output(self, calls: dict[Any, str]) -> None:
        """Forward the output of the slots until all have exited or are lost."""
        while len(self._codes) < len(self._slots) and time.monotonic() < self._deadline + EXIT_TIMEOUT_S:
            self._apply_control()
            calls |= self._restart_slots()
            for ref in ray.wait(list(calls), timeout=POLL_S)[0]:
                name = calls.pop(ref)
                if self._process_response(name, ref):
                    calls[self._actors[name].read.remote(self._offsets[name])] = name
            self._report_failed_actors()
            time.sleep(0 if calls else POLL_S)  # without calls, Ray does not wait
        for name in self._slots:
            if name not in self._codes:
                reason = f"its Ray node {self._nodes[name]['address']} does not respond"
                self._report_error(name, LOST_EXIT_CODE, reason, lease_s=self._request["lost_after_s"])

    def _process_response(self, name: str, ref: Any) -> bool:
        """Forward one response of a slot and return whether there is more to read."""
        try:
            response = ray.get(ref)
        except ActorUnavailableError:
            time.sleep(POLL_S)
            return True  # read again from the same offset when it is back
        except RayError as error:
            what = "was killed" if isinstance(error, RayActorError) else f"failed: {_last_line(error)}"
            self._failed_actors[name] = (time.monotonic() + NODE_FAILURE_S, what)
            ray.kill(self._actors[name])  # ends its slot, too
            return False
        if response is None:  # the slot has started; requests to stop may have come too early
            if self._stop_requests:
                self._send(name, {"op": "stop", "level": self._stop_requests})
            return True
        if data := response["data"]:
            self._offsets[name] += len(data)
            self._out.write(slot=name, data=data.decode("latin-1"))
        if "code" in response:
            self._codes[name] = response["code"]
            self._out.write(slot=name, code=response["code"], oom=response["oom"], survivors=response["survivors"])
        elif "error" in response:
            self._report_error(name, REJECTED_EXIT_CODE, response["error"])
        elif "lost" in response:
            self._report_error(name, LOST_EXIT_CODE, response["lost"])
        else:
            return True
        self._closing[name] = self._actors[name].close.remote()
        return False

    def _apply_control(self) -> None:
        """Apply new requests: dump stacks; stop with the grace period first, then kill."""
        for name, pids in self._control.take_stack_request().items():
            for pid in pids:
                self._send(name, {"op": "signal", "name": name, "pid": pid, "number": int(signal.SIGUSR1)})
        requests = self._control.stop_requests
        if time.monotonic() > self._deadline:
            requests = 2
        while self._stop_requests < min(requests, 2):
            self._stop_requests += 1
            self._deadline = time.monotonic() + (self._request["grace_s"] if self._stop_requests == 1 else 0)
            for name in self._slots:
                self._send(name, {"op": "stop", "level": self._stop_requests})

    def _send(self, name: str, request: dict[str, Any]) -> None:
        if name not in self._codes:
            self._actors[name].send.remote(request)

    def _report_error(self, name: str, code: int, reason: str, **fields: Any) -> None:
        """Report why a slot has no exit code of its own; with `lease_s`, it may be running until that has expired."""
        self._codes[name] = code
        self._out.write(slot=name, error=reason, code=code, **fields)

    def _report_failed_actors(self) -> None:
        """Report slots whose actors have failed, once it is known whether their nodes are gone or only the actors."""
        nodes = list_nodes() if self._failed_actors else []
        dead = [node["NodeID"] for node in nodes if not node["Alive"]]
        for name, (deadline, what) in list(self._failed_actors.items()):
            node, lease_s = self._nodes[name], 0.0
            reason = f"its Ray actor on {node['address']} {what}"
            if node["node"] in dead:
                reason, lease_s = f"its Ray node {node['address']} was lost", self._request["lost_after_s"]
            elif time.monotonic() < deadline:
                continue
            del self._failed_actors[name]
            self._report_error(name, LOST_EXIT_CODE, reason, lease_s=lease_s)


def _fill_in(text: str, values: dict[str, str]) -> str:
    """Replace the placeholders in a text."""
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """Return the options of the actor that occupies a bundle."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options = {option: bundle[name] for name, option in names.items() if name in bundle}
    resources = {name: amount for name, amount in bundle.items() if name not in names}
    options = {"num_cpus": 0, **options, "max_restarts": 0, "max_concurrency": 8}
    # Ray workers run at a lower priority by default, which slots would inherit.
    return {**options, "resources": resources, "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}}}


def list_nodes() -> list[dict[str, Any]]:
    """List all nodes of the cluster, including dead ones."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def read_capacity() -> dict[str, Any]:
    """Return the resources of each node, and those of all nodes that are free."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return {"nodes": [node["Resources"] for node in list_nodes() if node["Alive"]], "free": free}


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def main() -> int:
    """Run one attempt: `driver.py KEY TIMEOUT` on a cluster, `driver.py` with a Ray instance that it starts itself."""
    out, key = JsonFrameWriter(), sys.argv[1] if len(sys.argv) > 1 else ""
    request: dict[str, Any] | None
    if key:
        client_timeout_s = float(sys.argv[2])
        ray.init(log_to_driver=False)
        out.start_heartbeat(client_timeout_s / DRIVER_HEARTBEATS_PER_TIMEOUT)
        request, control = receive_from_store(key, client_timeout_s)
    else:
        request, control = receive_from_stdin()
        cpus = max(os.cpu_count() or 1, math.ceil(sum(bundle.get("CPU", 0) for bundle in request["bundles"])))
        ray.init(
            address="local",
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=request["folder"],
        )
    code = 1
    try:
        if request is not None:
            code = Driver(request, control, out).run()
        out.write(finished=True)
    except Exception as error:
        out.write(failed=_last_line(error))
        raise
    finally:
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while key and not control.is_done and time.monotonic() < deadline:  # until the client writes our key no more
            time.sleep(POLL_S)
        if key:
            delete_from_store(key)
    ray.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())

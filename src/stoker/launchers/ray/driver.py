"""Ray driver: runs on the cluster, places the gang, starts a slot in every bundle, forwards output and exit codes.

One file that needs only the standard library and Ray. It writes frames: numbered lines of JSON on standard output, so
that a client that reads the log twice processes each frame once; Ray's own log monitor drops repeated lines and is not
used. The desired state is sent to it repeatedly, through the cluster's key-value store or on standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
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
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FRAME_PREFIX = "@stoker-ray "
PYTHON, WORKDIR, HOME = "@ray:python@", "@ray:workdir@", "@ray:home@"
PORT, INTERFACE = "@ray:port@", "@ray:interface@"
"""Placeholders for what is known only after placement; the address of a slot is `@ray:worker/0@`."""
LOST_EXIT_CODE, REJECTED_EXIT_CODE = 255, 3
READ_BYTES = 8192
LONG_POLL_S = 1.0
POLL_S = 0.2
STATE_POLL_S = 0.5
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
        self._stack_requests = 0
        self._is_client_gone = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

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

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self._is_client_gone = True


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
        self._folder = ""
        self._request: dict[str, Any] = {}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._result: dict[str, Any] | None = None

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

    def start(self, request: dict[str, Any]) -> None:
        """Start the slot."""
        self._folder, self._request = tempfile.mkdtemp(prefix="stoker-slot-"), request
        self._start_daemon()
        self.send({**request, "op": "start", "key": "", "log_size": 0, "is_standby": False})
        threading.Thread(target=self._wait_for_result, daemon=True).start()

    def _start_daemon(self) -> None:
        for name, text in self._daemon_files.items():
            path = Path(self._folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        attach = {
            "op": "attach",
            "folder": self._folder,
            "tags": self._request["tags"],
            "grace_s": self._request["grace_s"],
            "lost_after_s": 0.0,  # the lease ends with the pipe
            "slots": {},
            "starting": [],
        }
        # Without the variables by which a cluster that was started for the run finds its own processes: the daemon
        # must outlive them to stop its slot.
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("STOKER_") and name not in _RAY_VARIABLES
        }
        self._daemon = subprocess.Popen(
            [sys.executable, "-IS", "-c", _DAEMONIZE, self._folder, json.dumps(attach)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # not the log of the actor: who has that open is stopped with Ray
            start_new_session=True,
            env=env,
        )
        self._daemon.wait()  # only for the process that forks; the daemon itself is no child of ours

    def send(self, request: dict[str, Any]) -> None:
        """Send a request about the slot to its daemon; one that is gone has reported its result."""
        assert self._daemon is not None
        assert self._daemon.stdin is not None
        with contextlib.suppress(OSError):
            self._daemon.stdin.write(json.dumps({**request, "slot": SLOT_ID}).encode() + b"\n")
            self._daemon.stdin.flush()

    def read(self, offset: int) -> dict[str, Any]:
        """Return the slot's output from an offset, or its result after all output; wait a moment for either."""
        if self._daemon is None:
            raise RuntimeError("the slot was not started")
        deadline = time.monotonic() + LONG_POLL_S
        while True:
            result = self._result  # before the last read, so that it misses no output
            data = self._read_output(offset)
            if data or result is not None or time.monotonic() > deadline:
                return {"data": data, **({} if data else result or {})}
            time.sleep(0.05)

    def close(self) -> None:
        """Acknowledge the result, so that the slot daemon exits, and remove the output, also of a killed daemon."""
        self.send({"op": "acknowledge"})
        self._close_pipes()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_pipes(self) -> None:
        assert self._daemon is not None
        for pipe in (self._daemon.stdin, self._daemon.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _read_output(self, offset: int) -> bytes:
        try:
            with open(os.path.join(self._folder, SLOT_ID, "log"), "rb") as file:
                file.seek(offset)
                return file.read(READ_BYTES)
        except OSError:
            return b""

    def _wait_for_result(self) -> None:
        result = self._read_result()
        if result is None:  # another daemon stops the slot's leftover processes before the loss is reported
            with contextlib.suppress(OSError):
                self._close_pipes()
                self._start_daemon()
                self.send({"op": "close"})
                self._read_result()
        self._result = result or {"lost": "its slot daemon on the Ray node was killed"}

    def _read_result(self) -> dict[str, Any] | None:
        """Return the result that the daemon reports; None if it exits first. The output is read from its file."""
        assert self._daemon is not None
        assert self._daemon.stdout is not None
        read, header = self._daemon.stdout.read, struct.Struct(">cBI")  # as packed by remote/frames.py
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
    """Driver of one attempt: all slots are placed, started and stopped together."""

    def __init__(
        self, request: dict[str, Any], control: ControlState, out: JsonFrameWriter, *, can_scale: bool
    ) -> None:
        """Prepare an attempt; with `can_scale`, wait for resources that the cluster does not have yet."""
        self._request, self._control, self._out, self._can_scale = request, control, out, can_scale
        self._slots: dict[str, dict[str, Any]] = request["slots"]
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._offsets = dict.fromkeys(self._slots, 0)
        self._codes: dict[str, int] = {}
        self._stop_requests, self._deadline = 0, float("inf")

    def run(self) -> int:
        """Run the gang to its end; return 0 if every slot succeeded."""
        group = placement_group(self._request["bundles"], strategy=self._request["strategy"])
        try:
            if self._wait_for_placement(group) and self._create_actors(group):
                self._start_slots()
                self._forward_output()
        finally:  # Ray would remove it too, but only some time after our exit
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        return 0 if set(self._codes.values()) == {0} and len(self._codes) == len(self._slots) else 1

    def _wait_for_placement(self, group: Any) -> bool:
        """Wait until all bundles are placed and report why they are not; False on a stop request."""
        reported, checked_at = "", 0.0
        while not group.wait(1):
            if self._control.stop_requests:
                return False
            if time.monotonic() - checked_at >= CAPACITY_CHECK_S:
                checked_at = time.monotonic()
                reason, is_too_small = explain_no_capacity(self._request)
                if is_too_small and not self._can_scale:
                    self._report_rejected(f"Ray cannot place {reason}")
                    return False
                if reason != reported:
                    reported = reason
                    self._out.write(pending=f"Ray has not placed {reason}")
        if reported:
            self._out.write(pending="")
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
            done, _ = ray.wait(list(pending), timeout=POLL_S)
            for ref in done:
                name = pending.pop(ref)
                try:
                    self._nodes[name] = ray.get(ref)
                except RayError as error:
                    self._report_lost(name, f"its Ray actor did not start: {_last_line(error)}")
            if self._control.stop_requests or self._codes:
                return False
        return True

    def _start_slots(self) -> None:
        """Fill in the placeholders of the commands and start them."""
        first = self._nodes[next(iter(self._slots))]
        shared = {f"@ray:{name}@": node["address"] for name, node in self._nodes.items()}
        shared[PORT] = str(first["port"])
        starts = {name: self._actors[name].start.remote(self._slot_request(name, shared)) for name in self._slots}
        self._out.write(addresses={name: node["address"] for name, node in self._nodes.items()})
        for name, started in starts.items():
            try:
                ray.get(started)
            except RayError as error:
                self._report_lost(name, self._explain_loss(name, error))

    def _slot_request(self, name: str, shared: dict[str, str]) -> dict[str, Any]:
        command, node = self._slots[name], self._nodes[name]
        own = {PYTHON: node["python"], WORKDIR: node["workdir"], HOME: node["home"], INTERFACE: node["interface"]}
        values = {**shared, **own}
        env = {key: _fill_in(value, values) for key, value in command["env"].items()}
        return {
            "argv": [_fill_in(argument, values) for argument in command["argv"]],
            # Without a known interface, the variable must not be set at all.
            "env": {key: value for key, value in env.items() if value or command["env"][key] != INTERFACE},
            "cwd": _fill_in(command["cwd"] or node["workdir"], values),
            "name": name,
            "tags": {**self._request["tags"], "STOKER_SLOT": name},
            "grace_s": self._request["grace_s"],
        }

    def _forward_output(self) -> None:
        """Forward the output of the slots until all have exited or are lost."""
        reads = {self._read(name): name for name in self._slots if name not in self._codes}
        while reads and time.monotonic() < self._deadline + EXIT_TIMEOUT_S:
            self._apply_control()
            done, _ = ray.wait(list(reads), timeout=POLL_S)
            for ref in done:
                name = reads.pop(ref)
                if self._process_response(name, ref):
                    reads[self._read(name)] = name

    def _read(self, name: str) -> Any:
        return self._actors[name].read.remote(self._offsets[name])

    def _process_response(self, name: str, ref: Any) -> bool:
        """Forward one response of a slot and return whether there is more to read."""
        try:
            response = ray.get(ref)
        except ActorUnavailableError:
            time.sleep(POLL_S)
            return True  # read again from the same offset when it is back
        except RayError as error:
            self._report_lost(name, self._explain_loss(name, error))
            return False
        data = response["data"]
        if data:
            self._offsets[name] += len(data)
            self._out.write(slot=name, data=data.decode("latin-1"))
        if "code" in response:
            self._codes[name] = response["code"]
            self._out.write(slot=name, code=response["code"], oom=response["oom"], survivors=response["survivors"])
        elif "error" in response:
            self._report_error(name, REJECTED_EXIT_CODE, response["error"])
        elif "lost" in response:
            self._report_lost(name, response["lost"])
        else:
            return True
        self._actors[name].close.remote()
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

    def _report_rejected(self, reason: str) -> None:
        """Report that the job cannot run here, so that it is not retried."""
        for name in self._slots:
            self._report_error(name, REJECTED_EXIT_CODE, reason)

    def _report_lost(self, name: str, reason: str) -> None:
        self._report_error(name, LOST_EXIT_CODE, reason)

    def _report_error(self, name: str, code: int, reason: str) -> None:
        self._codes[name] = code
        self._out.write(slot=name, error=reason, code=code)

    def _explain_loss(self, name: str, error: RayError) -> str:
        """Return whether the node of a slot is gone or only its actor."""
        node = self._nodes[name]
        deadline = time.monotonic() + NODE_FAILURE_S
        while time.monotonic() < deadline:
            if any(other["NodeID"] == node["node"] and not other["Alive"] for other in list_nodes()):
                return f"its Ray node {node['address']} was lost"
            time.sleep(POLL_S)
        if isinstance(error, RayActorError):
            return f"its Ray actor on {node['address']} was killed"
        return f"its Ray actor on {node['address']} failed: {_last_line(error)}"


def _fill_in(text: str, values: dict[str, str]) -> str:
    """Replace the placeholders in a text."""
    if "@ray:" in text:
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


def explain_no_capacity(request: dict[str, Any]) -> tuple[str, bool]:
    """Return why a gang is not placed, with needed and free amounts, and whether the cluster is too small for it."""
    alive = [node["Resources"] for node in list_nodes() if node["Alive"]]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    amounts = "; ".join(
        f"needs {_format_amount(name, amount)}, "
        f"{_format_amount(name, free.get(name, 0))} of {_format_amount(name, sum_bundles(alive).get(name, 0))} free"
        for name, amount in sum_bundles(request["bundles"]).items()
    )
    reason, is_too_small = placement_obstacle(request["bundles"], request["strategy"], alive, free)
    return f"{request['gang']}: {reason} ({amounts})", is_too_small


def sum_bundles(bundles: list[dict[str, float]]) -> dict[str, float]:
    """Return the resources of several bundles together."""
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in sorted(frozenset().union(*bundles))}


def placement_obstacle(
    bundles: list[dict[str, float]], strategy: str, alive: list[dict[str, float]], free: dict[str, float]
) -> tuple[str, bool]:
    """Return what prevents the placement of the bundles, and whether the whole cluster is surely too small."""

    def count_fitting(bundle: dict[str, float]) -> list[int]:
        return [min(int(node.get(name, 0) / amount + 1e-6) for name, amount in bundle.items()) for node in alive]

    fitting, needed = [(bundles.count(bundle), count_fitting(bundle)) for bundle in bundles], sum_bundles(bundles)
    large_enough = min(sum(fits > 0 for fits in nodes) for _, nodes in fitting)
    if not large_enough:
        return "no node is large enough for one worker", True
    is_spread = len(alive) >= len(bundles) and all(sum(fits > 0 for fits in nodes) >= count for count, nodes in fitting)
    if strategy == "STRICT_SPREAD" and not is_spread:
        return f"strict_spread needs {len(bundles)} nodes, {large_enough} are large enough", True
    if strategy == "STRICT_PACK" and not max(count_fitting(needed)):
        return "strict_pack needs one node for all workers, none is large enough", True
    is_short = any(sum_bundles(alive).get(name, 0) + 1e-6 < amount for name, amount in needed.items())
    if is_short or any(sum(nodes) < count for count, nodes in fitting):
        return "the cluster is too small", True
    if all(free.get(name, 0) >= amount for name, amount in needed.items()):
        return f"the free resources are on nodes where {strategy.lower()} does not fit", False
    return "resources are in use by other jobs", False


def _format_amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB memory" if name == "memory" else f"{value:g} {name}"


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
        cpus = max(os.cpu_count() or 1, int(sum_bundles(request["bundles"]).get("CPU", 0) + 0.999))
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
            code = Driver(request, control, out, can_scale=request["can_scale"]).run()
        out.write(finished=True)
    except Exception as error:
        out.write(failed=_last_line(error))
        raise
    finally:
        if key:
            clean_up_store(key, control)
    ray.shutdown()
    return code


def clean_up_store(key: str, control: ControlState) -> None:
    """Delete our key once the client writes it no more."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while not control.is_done and time.monotonic() < deadline:
        time.sleep(POLL_S)
    delete_from_store(key)


if __name__ == "__main__":
    sys.exit(main())

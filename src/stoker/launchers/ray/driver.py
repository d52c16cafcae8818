"""Runs on the Ray cluster: places the gang, starts a slot in every bundle, and tells what they say and how they end.

One file on the standard library and Ray alone. What it tells are frames, numbered lines of JSON on standard output, so
that whoever reads the log twice takes each one once; Ray's own log monitor drops repeats, and is not used. What it is
to do comes as a state that is written over: through the cluster's key-value store, or as lines on standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
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

FRAME = "@stoker-ray "
PYTHON, WORKDIR, HOME = "@ray:python@", "@ray:workdir@", "@ray:home@"
PORT, INTERFACE = "@ray:port@", "@ray:interface@"
"""What is known only once a slot has its place; the address of a slot is `@ray:worker/0@`."""
LOST, REFUSED = 255, 3
CHUNK = 8192
LONG_POLL_S = 1.0
POLL_S = 0.2
STATE_S = 0.5
REASON_S = 5.0
LAST_S = 5.0
"""After the time for a last checkpoint: for the end to be told."""
BEATS = 3
"""In the time after which whoever hears none reads the log anew."""
NODE_S = 8.0
"""What Ray has to find out that not only an actor is gone, but its node."""
PORTS = range(20000, 32000)
LOCAL_STORE = 256 * 2**20
_SIOCGIFADDR = 0x8915
# A child of the actor would be killed with it, by Ray; this one must see its end, and end the slot with grace.
_APART = (
    "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.execv(sys.executable, [sys.executable, sys.argv[1]])\n"
)


class Out:
    """Writes frames."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def tell(self, **frame: Any) -> None:
        """Tell one thing, by one write, so that nothing else gets into it."""
        with self._lock, contextlib.suppress(OSError):
            self._count += 1
            line = memoryview(f"{FRAME}{json.dumps({'n': self._count, **frame})}\n".encode())
            while line:
                line = line[os.write(1, line) :]

    def beat(self, every_s: float) -> None:
        """Tell from now on that we are there: else silence could as well be a connection that is gone."""

        def go_on() -> None:
            while True:
                self.tell(alive=True)
                time.sleep(every_s)

        threading.Thread(target=go_on, daemon=True).start()


# --- What is to be done


class Wishes:
    """What is wished for: how often the end was asked for, and whose stacks; and whether anyone still asks."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s, self._heard = silence_s, time.monotonic()
        self._state: dict[str, Any] = {}
        self._signalled = 0
        self._is_alone = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def hear(self, state: dict[str, Any]) -> None:
        """Take what is wished for now."""
        if state != self._state:
            self._state, self._heard = state, time.monotonic()

    def leave_alone(self) -> None:
        """Know that nobody asks any more."""
        self._is_alone = True

    @property
    def is_done(self) -> bool:
        """Whether the last word was taken, or there is nobody to take it."""
        return self._is_alone or bool(self._state.get("bye"))

    @property
    def ends(self) -> int:
        """How often the end was asked for; that of one whom nobody asks for any more is 1."""
        asked = int(self._state.get("ends", 0))
        if self._is_alone or time.monotonic() - self._heard > self._silence_s:
            return max(asked, 1)
        return asked

    def stacks(self) -> dict[str, list[int]]:
        """Give the processes of each slot that are to write their stacks, once for each wish."""
        count = int(self._state.get("stacks", 0))
        if count <= self._signalled:
            return {}
        self._signalled = count
        found: dict[str, list[int]] = self._state["pids"]
        return found

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self._is_alone = True


def ask_store(key: str, silence_s: float) -> tuple[dict[str, Any] | None, Wishes]:
    """Take the request from the key-value store, where it is not left, and follow the state there.

    The request is put there once we have told that we are here; None when the end comes before it.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    wishes = Wishes(silence_s)

    def follow() -> None:
        while True:
            with contextlib.suppress(Exception):  # the store may be away for a while
                wishes.hear(json.loads(_internal_kv_get(f"{key}.zip") or "{}"))
            time.sleep(STATE_S)

    threading.Thread(target=follow, daemon=True).start()
    found = None
    while not found and not wishes.ends:
        with contextlib.suppress(Exception):  # likewise
            found = _internal_kv_get(f"{key}-request.zip")
        time.sleep(0 if found else POLL_S)
    forget_store(f"{key}-request")
    return json.loads(found) if found else None, wishes


def forget_store(key: str) -> None:
    """Leave nothing in the key-value store."""
    from ray.experimental.internal_kv import _internal_kv_del

    with contextlib.suppress(Exception):
        _internal_kv_del(f"{key}.zip")


def ask_stdin() -> tuple[dict[str, Any], Wishes]:
    """Take the request and then states from standard input, whose end is that of whoever asks."""
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    wishes = Wishes(float("inf"))

    def follow() -> None:
        for line in sys.stdin:
            wishes.hear(json.loads(line))
        wishes.leave_alone()

    threading.Thread(target=follow, daemon=True).start()
    return request, wishes


# --- In a bundle


class Seat:
    """The actor in one bundle of the placement group: looks around there, and has a keeper for the slot."""

    def __init__(self, keeper: str) -> None:
        self._source = keeper
        self._folder = ""
        self._keeper: subprocess.Popen[str] | None = None
        self._sweep: dict[str, Any] = {}
        self._end: dict[str, Any] | None = None

    def look(self) -> dict[str, Any]:
        """Tell what only this node knows."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        names = [name for name, one in _interfaces() if one == address]
        return {
            "address": address,
            "interface": names[0] if names else "",
            "port": _free_port(),
            "node": ray.get_runtime_context().get_node_id(),
            "python": sys.executable,
            "workdir": str(Path.cwd()),
            "home": str(Path.home()),
        }

    def start(self, request: dict[str, Any]) -> None:
        """Start the slot."""
        self._folder = tempfile.mkdtemp(prefix="stoker-slot-")
        Path(self._folder, "slot_daemon.py").write_text(self._source)
        self._sweep = {"marks": request["marks"], "grace_s": request["grace_s"]}
        self._keep(request)
        threading.Thread(target=self._hear, daemon=True).start()

    def _keep(self, request: dict[str, Any]) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", _APART, os.path.join(self._folder, "slot_daemon.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._keeper.wait()  # only what set it apart; the keeper itself is nobody's child
        self.ask(request)

    def ask(self, request: dict[str, Any]) -> None:
        """Have the keeper do something; one that is gone has told its end."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.write(json.dumps(request) + "\n")
            self._keeper.stdin.flush()

    def read(self, offset: int) -> dict[str, Any]:
        """Give what the slot printed from here on, and its end once there is no more; waits a moment for either."""
        if self._keeper is None:
            raise RuntimeError("the slot was not started")
        deadline = time.monotonic() + LONG_POLL_S
        while True:
            end = self._end  # looked at before the last read
            data = self._output(offset)
            if data or end is not None or time.monotonic() > deadline:
                return {"data": data, **({} if data else end or {})}
            time.sleep(0.05)

    def close(self) -> None:
        """Let the keeper go, with all that it wrote."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()

    def _output(self, offset: int) -> bytes:
        try:
            with open(os.path.join(self._folder, "output"), "rb") as file:
                file.seek(offset)
                return file.read(CHUNK)
        except OSError:
            return b""

    def _hear(self) -> None:
        line = self._told()
        if not line:  # then another sees to it that nothing of the slot is left, before that is told
            with contextlib.suppress(OSError):
                self._keep(self._sweep)
                self._told()
        self._end = json.loads(line) if line else {"lost": "the process that kept it there was killed"}

    def _told(self) -> str:
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        return self._keeper.stdout.readline()


def _interfaces() -> list[tuple[str, str]]:
    """List the network interfaces with their IPv4 addresses."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found.append((name, socket.inet_ntoa(packed[20:24])))
    return found


def _free_port() -> int:
    """Find a port that nothing listens on, below those that the kernel gives to clients."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port
    return 0


# --- The gang


class Driver:
    """One attempt: all slots, placed together, started together, ended together."""

    def __init__(self, request: dict[str, Any], wishes: Wishes, out: Out, *, may_grow: bool) -> None:
        self._request, self._wishes, self._out, self._may_grow = request, wishes, out, may_grow
        self._slots: dict[str, dict[str, Any]] = request["slots"]
        self._seats: dict[str, Any] = {}
        self._places: dict[str, dict[str, Any]] = {}
        self._offsets = dict.fromkeys(self._slots, 0)
        self._codes: dict[str, int] = {}
        self._ends, self._deadline = 0, float("inf")

    def run(self) -> int:
        """Run the gang to its end; 0 when every slot ended well."""
        group = placement_group([self._request["bundle"]] * len(self._slots), strategy=self._request["strategy"])
        try:
            if self._placed(group) and self._seated(group):
                self._start()
                self._carry()
        finally:  # our own end, with which Ray would do it, may take a moment
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        return 0 if set(self._codes.values()) == {0} and len(self._codes) == len(self._slots) else 1

    def _placed(self, group: Any) -> bool:
        """Wait until all bundles have their place, and tell why that takes; False when the end was asked for."""
        told, since = "", 0.0
        while not group.wait(1):
            if self._wishes.ends:
                return False
            if time.monotonic() - since >= REASON_S:
                since, (why, too_small) = time.monotonic(), no_room(self._request, len(self._slots))
                if too_small and not self._may_grow:
                    self._refuse(f"Ray cannot place {why}")
                    return False
                if why != told:
                    told = why
                    self._out.tell(waiting=f"waiting for Ray to place {why}; it waits until there is room")
        if told:
            self._out.tell(waiting="")
        return True

    def _seated(self, group: Any) -> bool:
        """Make the actors, and learn where they are; False when one cannot be, or the end was asked for."""
        keeper = Path(__file__).with_name("slot_daemon.py").read_text()
        bundle = dict(self._request["bundle"])
        options = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            **({"memory": bundle.pop("memory")} if "memory" in bundle else {}),
            "resources": bundle,
            "max_restarts": 0,
            "max_concurrency": 8,
            # A worker of Ray's yields to all other processes of its node, and so would what it starts.
            "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
        }
        actor: Any = ray.remote(Seat)
        looks = {}
        for index, name in enumerate(self._slots):
            place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            self._seats[name] = actor.options(**options, scheduling_strategy=place).remote(keeper)
            looks[self._seats[name].look.remote()] = name
        while looks:
            done, _ = ray.wait(list(looks), timeout=POLL_S)
            for ref in done:
                name = looks.pop(ref)
                try:
                    self._places[name] = ray.get(ref)
                except RayError as error:
                    self._lose(name, f"its Ray actor did not start: {_last_line(error)}")
            if self._wishes.ends or self._codes:
                return False
        return True

    def _start(self) -> None:
        """Put what is known now into the commands, and start them."""
        first = self._places[next(iter(self._slots))]
        known = {f"@ray:{name}@": place["address"] for name, place in self._places.items()}
        known[PORT] = str(first["port"])
        starts = {}
        for name, command in self._slots.items():
            place = self._places[name]
            own = {PYTHON: place["python"], WORKDIR: place["workdir"], HOME: place["home"]}
            own[INTERFACE] = place["interface"]
            fill = _Fill({**known, **own})
            request = {
                "argv": [fill(word) for word in command["argv"]],
                "env": {key: fill(value) for key, value in command["env"].items() if fill(value) or value != INTERFACE},
                "cwd": fill(command["cwd"] or place["workdir"]),
                "marks": {**self._request["marks"], "STOKER_SLOT": name},
                "grace_s": self._request["grace_s"],
            }
            starts[name] = self._seats[name].start.remote(request)
        self._out.tell(places={name: place["address"] for name, place in self._places.items()})
        for name, started in starts.items():
            try:
                ray.get(started)
            except RayError as error:
                self._lose(name, self._why_lost(name, error))

    def _carry(self) -> None:
        """Carry what the slots print until all have ended, or were given up."""
        reads = {self._read(name): name for name in self._slots if name not in self._codes}
        while reads and time.monotonic() < self._deadline + LAST_S:
            self._obey()
            done, _ = ray.wait(list(reads), timeout=POLL_S)
            for ref in done:
                name = reads.pop(ref)
                if self._take(name, ref):
                    reads[self._read(name)] = name

    def _read(self, name: str) -> Any:
        return self._seats[name].read.remote(self._offsets[name])

    def _take(self, name: str, ref: Any) -> bool:
        """Take one answer of a slot; whether there is more to come."""
        try:
            answer = ray.get(ref)
        except ActorUnavailableError:
            time.sleep(POLL_S)
            return True  # the same is read once more, when it is back
        except RayError as error:
            self._lose(name, self._why_lost(name, error))
            return False
        data = answer["data"]
        if data:
            self._offsets[name] += len(data)
            self._out.tell(slot=name, data=data.decode("utf-8", "surrogateescape"))
        if "code" in answer:
            self._codes[name] = answer["code"]
            self._out.tell(slot=name, code=answer["code"])
            self._seats[name].close.remote()
            return False
        if "fault" in answer:
            self._codes[name] = REFUSED
            self._out.tell(slot=name, fault=answer["fault"], code=REFUSED)
            return False
        if "lost" in answer:
            self._lose(name, answer["lost"])
            return False
        return True

    def _obey(self) -> None:
        """Do what was wished for: the end once with grace, then at once; the stacks of processes."""
        for name, pids in self._wishes.stacks().items():
            for pid in pids:
                self._ask(name, {"do": "signal", "pid": pid, "number": int(signal.SIGUSR1)})
        wanted = self._wishes.ends
        if time.monotonic() > self._deadline:
            wanted = 2
        while self._ends < min(wanted, 2):
            self._ends += 1
            self._deadline = time.monotonic() + (self._request["grace_s"] if self._ends == 1 else 0)
            for name in self._slots:
                self._ask(name, {"do": "end"})

    def _ask(self, name: str, request: dict[str, Any]) -> None:
        if name not in self._codes:
            self._seats[name].ask.remote(request)

    def _refuse(self, why: str) -> None:
        """Tell that no attempt can do any better."""
        for name in self._slots:
            self._codes[name] = REFUSED
            self._out.tell(slot=name, fault=why, code=REFUSED)

    def _lose(self, name: str, why: str) -> None:
        self._codes[name] = LOST
        self._out.tell(slot=name, fault=why, code=LOST)

    def _why_lost(self, name: str, error: RayError) -> str:
        """Tell a node that is gone from an actor that is."""
        place = self._places[name]
        deadline = time.monotonic() + NODE_S
        while time.monotonic() < deadline:
            if any(node["NodeID"] == place["node"] and not node["Alive"] for node in nodes()):
                return f"its Ray node {place['address']} is gone"
            time.sleep(POLL_S)
        if isinstance(error, RayActorError):
            return f"its Ray actor on {place['address']} was killed"
        return f"its Ray actor on {place['address']} failed: {_last_line(error)}"


class _Fill:
    """Puts what is known in the place of what stood for it."""

    def __init__(self, known: dict[str, str]) -> None:
        self._known = known

    def __call__(self, text: str) -> str:
        if "@ray:" in text:
            for mark, value in self._known.items():
                text = text.replace(mark, value)
        return text


def nodes() -> list[dict[str, Any]]:
    """List the nodes, those that are gone too."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def no_room(request: dict[str, Any], count: int) -> tuple[str, bool]:
    """Say why a gang has no place yet: what it wants, and what there is; and whether all nodes are too small for it."""
    bundle: dict[str, float] = request["bundle"]
    alive = [node["Resources"] for node in nodes() if node["Alive"]]
    total = {name: sum(node.get(name, 0) for node in alive) for name in bundle}
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    told = "; ".join(
        f"{_amount(name, count * each)} wanted, {_amount(name, free.get(name, 0))} free of {_amount(name, total[name])}"
        for name, each in bundle.items()
    )
    reason, too_small = _reason(bundle, count, request["strategy"], alive, free)
    wanted = f"{count} × ({_amounts(bundle)})"
    return f"{wanted}: {reason} ({told})", too_small


def _reason(
    bundle: dict[str, float], count: int, strategy: str, alive: list[dict[str, float]], free: dict[str, float]
) -> tuple[str, bool]:
    rooms = [min(int(node.get(name, 0) / each + 1e-6) for name, each in bundle.items()) for node in alive]
    if not any(rooms):
        return "no node is large enough for one worker", True
    if strategy == "STRICT_SPREAD" and sum(room > 0 for room in rooms) < count:
        return f"strict_spread wants {count} nodes, and {sum(room > 0 for room in rooms)} are large enough", True
    if strategy == "STRICT_PACK" and max(rooms) < count:
        return "strict_pack wants one node for all workers, and none is large enough", True
    if sum(rooms) < count:
        return "the cluster is too small as it is", True
    if all(free.get(name, 0) >= count * each for name, each in bundle.items()):
        return f"what is free lies on nodes where it does not fit, with {strategy.lower()}", False
    return "others use them", False


def _amounts(bundle: dict[str, float]) -> str:
    return ", ".join(_amount(name, each) for name, each in bundle.items())


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB of memory" if name == "memory" else f"{value:g} {name}"


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def main() -> int:
    """Run one attempt: `driver.py KEY SILENCE` in a cluster, `driver.py` alone with one of its own."""
    out, key = Out(), sys.argv[1] if len(sys.argv) > 1 else ""
    request: dict[str, Any] | None
    if key:
        silence_s = float(sys.argv[2])
        ray.init(log_to_driver=False)
        out.beat(silence_s / BEATS)
        request, wishes = ask_store(key, silence_s)
    else:
        request, wishes = ask_stdin()
        cpus = max(os.cpu_count() or 1, int(request["bundle"].get("CPU", 0) * len(request["slots"]) + 0.999))
        ray.init(
            address="local",
            num_cpus=cpus,
            object_store_memory=LOCAL_STORE,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=request["folder"],
        )
    code = 1
    try:
        if request is not None:
            code = Driver(request, wishes, out, may_grow=bool(key)).run()
        out.tell(end=True)
    except Exception as error:
        out.tell(failed=_last_line(error))
        raise
    finally:
        if key:
            forget_when_done(key, wishes)
    ray.shutdown()
    return code


def forget_when_done(key: str, wishes: Wishes) -> None:
    """Leave nothing in the store, once nobody writes there any more."""
    deadline = time.monotonic() + LAST_S
    while not wishes.is_done and time.monotonic() < deadline:
        time.sleep(POLL_S)
    forget_store(key)


if __name__ == "__main__":
    sys.exit(main())

"""Profiler: run a program and sample GPU, CPU, memory, network and disk utilization as events.

One file, standard library only, Python 3.8 or later, no import of stoker: it is copied into any image that has
python3. `stoker profile` calls it; by itself:

    python3 profiler.py --every 30 -- python train.py

The program keeps our standard input, output and error, our process group, and the exit code; signals sent to us alone
are forwarded. When we are killed by SIGKILL, the kernel sends SIGTERM to the program (PR_SET_PDEATHSIG). Samples are
`profile` events on standard output, with rates per second since the previous sample; the last event is a `mark` named
`exit`. Fields that a machine does not provide are omitted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would delay the program
    from typing import Any

try:
    import ctypes
except ImportError:  # a Python built without it: no GPU metrics, no PR_SET_PDEATHSIG
    ctypes = None  # type: ignore[assignment]

PREFIX = "@stoker "
VERSION = 1
MAX_LINE_BYTES = 4096
FIRST_SAMPLE_S = 2.0
"""When the first sample is taken, so that users soon see that it works."""
MIN_INTERVAL_S = 0.2
"""A last sample over a shorter interval is omitted, unless it is the only one."""
SCAN_CPU_SHARE = 0.0005
"""The share of a core that full scans of /proc may use."""
GROUP_SIGNAL_S = 0.01
"""How long a signal to a process group may take from one member to the next."""
ACKNOWLEDGE_S = 1.0
LAST_SAMPLE_S = 5.0
"""How long the last sample may take after the program has exited; a broken GPU driver may block for ever."""
PR_SET_PDEATHSIG = 1
MPI_RANK_ENV = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""The variables in which mpirun passes its rank to a process."""
FORWARDED = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT", "TSTP", "WINCH")
USAGE = "usage: profiler.py [--every SECONDS] -- COMMAND [ARGUMENT]...\n"


def main(argv: list[str]) -> int:
    """Parse our command line, run the program, and return its exit code."""
    try:
        every, command = _parse_arguments(argv)
    except ValueError as error:
        sys.stderr.write(f"stoker profile: {error}\n{USAGE}")
        return 2
    return run(command, every)


def run(command: list[str], every: float, events: EventWriter | None = None) -> int:
    """Run a program, take samples meanwhile, and return its exit code: 128 + n if signal n killed it."""
    events = events or EventWriter()
    signals = {getattr(signal, "SIG" + name) for name in FORWARDED}
    # Ignored signals stay ignored, as with nohup.
    signals = {number for number in signals if signal.getsignal(number) != signal.SIG_IGN}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    started = time.monotonic()
    oom_kills_before, detector = oom_kills(), GroupSignalDetector()
    try:
        child = _start(command, old_mask)
    except OSError as error:
        detector.close()
        reason = (error.strerror or str(error)).lower()
        hint = "install it, or add its directory to PATH"
        if isinstance(error, PermissionError):
            hint = "make it executable (chmod +x), or run it with its interpreter"
        sys.stderr.write(f"stoker profile: cannot start the program {command[0]!r}: {reason}; {hint}\n")
        return 3
    own_peak = _own_peak_memory()
    early = signal.sigpending()  # these may have come before the program was started
    sampler = Sampler(child.pid, every, events)
    sampler.start()
    _forward_signals(child.pid, signals, early, detector)
    sampler.finish()
    detector.close()
    _, status, usage = os.wait4(child.pid, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = child.returncode = 128 + number if number else os.WEXITSTATUS(status)
    oom = code != 0 and oom_kills() > oom_kills_before
    events.write(
        "mark",
        name="exit",
        detail=_describe_exit(code, number, oom),
        code=code,
        signal=_signal_name(number),
        oom=oom,
        seconds=round(time.monotonic() - started, 3),
        **_peak_memory(sampler.max_rss, usage.ru_maxrss * 1024, own_peak),
    )
    return code


def _peak_memory(sampled: int, reported: int, own: int) -> dict[str, int]:
    """Return the peak memory, if known; the kernel also reports that of the copy of us that became the program."""
    peak = max(sampled, reported if reported > own else 0)
    return {"max_rss": peak} if peak else {}


def _own_peak_memory() -> int:
    """Return the peak memory of this program alone; `getrusage` includes that of the process which executed it."""
    with contextlib.suppress(OSError):
        for line in _read_text("/proc/self/status").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _parse_arguments(argv: list[str]) -> tuple[float, list[str]]:
    every, rest = 30.0, list(argv)
    while rest and rest[0] != "--" and rest[0].startswith("-"):
        name, _, value = rest.pop(0).partition("=")
        if name != "--every":
            raise ValueError(f"unknown option: {name}")
        if not value and not rest:
            raise ValueError("--every needs a number of seconds")
        value = value or rest.pop(0)
        try:
            every = float(value)
        except ValueError:
            every = -1.0
        if not 0 <= every <= 1e9:
            raise ValueError(f"--every must be 0 or more seconds, got {value!r}")
    command = rest[1:] if rest[:1] == ["--"] else rest
    if not command:
        raise ValueError("no command given")
    return every, command


def _start(command: list[str], mask: set[Any]) -> subprocess.Popen[bytes]:
    parent, libc = os.getpid(), _libc()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _set_parent_death_signal(parent, signal.SIGTERM, libc)

    # preexec_fn is safe before there are threads; inherited files stay open.
    return subprocess.Popen(command, preexec_fn=prepare, close_fds=False)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (AttributeError, OSError):
        return None


def _set_parent_death_signal(parent: int, number: int, libc: Any) -> None:
    """Request a signal from the kernel for when the parent dies; the parent may have died before this call."""
    if libc is not None and hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def _forward_signals(child: int, signals: set[Any], early: set[Any], detector: GroupSignalDetector) -> None:
    """Wait until the program exits, and forward every signal that it has not received itself."""
    while not _has_exited(child):
        number = signal.sigwaitinfo(signals | {signal.SIGCHLD}).si_signo
        if number == signal.SIGCHLD:
            if os.getpid() == 1:
                _reap_orphans(child, detector)
            continue
        if not detector.has_seen(number) or number in early:
            _send(child, number)
        early.discard(number)
        if number == signal.SIGTSTP:
            _suspend()


def _suspend() -> None:
    """Suspend ourselves as the program does, so that a shell sees it; without a shell, the kernel suspends neither."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has changed its user, or has exited
        os.kill(pid, number)


def _has_exited(pid: int) -> bool:
    """Whether a child has exited; leave it unreaped, so that its pid is not reused."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap_orphans(child: int, detector: GroupSignalDetector) -> None:
    """Reap orphans, which we inherit as the first process of a container; elsewhere init reaps them."""
    while True:
        try:
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if exited is None or exited.si_pid == child:
            return
        os.waitpid(exited.si_pid, 0)
        if exited.si_pid == detector.pid:
            detector.pid = 0  # its pid may be reused now


def _describe_exit(code: int, number: int, oom: bool) -> str:
    text = f"killed by {_signal_name(number)}" if number else f"exited with code {code}"
    return text + ", after the OOM killer killed a process" if oom else text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"signal {number}"


class GroupSignalDetector:
    """A process in our group that blocks all signals, so that those it receives stay pending and visible in /proc.

    A signal that is pending there was sent to the whole group, by Ctrl-C or by a launcher, so the program has received
    it already and must not get it twice: a second SIGTERM makes torchrun skip its orderly shutdown, for example.
    """

    def __init__(self) -> None:
        parent, libc = os.getpid(), _libc()
        requests, self._request_fd = os.pipe()
        self._reply_fd, replies = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                _set_parent_death_signal(parent, signal.SIGKILL, libc)
                _close_all_but(requests, replies)
                _serve_clear_requests(requests, replies)
            finally:
                os._exit(0)
        os.close(requests)
        os.close(replies)

    def has_seen(self, number: int) -> bool:
        """Whether the signal was sent to the whole group; clear it if so."""
        time.sleep(GROUP_SIGNAL_S)
        try:
            lines = _read_text(f"/proc/{self.pid}/status").splitlines()
            pending = int(next(line for line in lines if line.startswith("ShdPnd:")).split()[1], 16)
        except (OSError, ValueError, LookupError, StopIteration):
            return False
        if not pending >> (number - 1) & 1:
            return False
        with contextlib.suppress(OSError):  # someone has killed it
            os.write(self._request_fd, bytes([number]))
            select.select([self._reply_fd], [], [], ACKNOWLEDGE_S)
            os.set_blocking(self._reply_fd, False)
            os.read(self._reply_fd, 64)
        return True

    def close(self) -> None:
        """Kill the process and wait for it."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._request_fd)
        os.close(self._reply_fd)


def _serve_clear_requests(requests: int, replies: int) -> None:
    """Clear the pending signals that are requested, one byte each."""
    while True:
        number = os.read(requests, 1)
        if not number:
            return
        signal.sigtimedwait({number[0]}, 0)
        os.write(replies, b".")


def _close_all_but(*kept: int) -> None:
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = [0, 1, 2]
    for number in numbers:
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


class EventWriter:
    """Writer of events in the format of `stoker.telemetry.events`; a test compares the two."""

    def __init__(self) -> None:
        env = os.environ
        self._head = {
            "slot": env.get("STOKER_SLOT", "")[:128],
            "rank": _first_number(env, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
            "attempt": _first_number(env, "STOKER_ATTEMPT"),
            "pid": os.getpid(),
        }
        self._seq = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Write one event, without the GPUs that do not fit into its line."""
        event = {"v": VERSION, "t": round(time.time(), 6), **self._head, "seq": self._seq, "k": kind, **fields}
        self._seq += 1
        line = _encode_line(event)
        while len(line) > MAX_LINE_BYTES and event.get("gpu"):
            event["gpu"], event["cut"] = event["gpu"][:-1], True
            line = _encode_line(event)
        try:
            while line:
                line = line[os.write(1, line) :]
        except OSError:
            pass  # the reader is gone


def _encode_line(event: dict[str, Any]) -> bytes:
    import json  # after the program was started, which it would delay

    return (PREFIX + json.dumps(event) + "\n").encode()


def _first_number(env: Any, *names: str) -> int:
    for name in names:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            continue
    return 0


def _list_other_ranks(env: Any) -> range:
    """Return the other ranks of this worker under mpirun: only the first has a profiler, which samples all of them."""
    if not any(name in env for name in MPI_RANK_ENV):
        return range(0)
    rank = _first_number(env, "RANK")
    return range(rank + 1, rank + _first_number(env, "LOCAL_WORLD_SIZE"))


class Sampler(threading.Thread):
    """Thread that takes samples, so that a driver that blocks does not delay signals."""

    def __init__(self, root: int, every: float, events: EventWriter) -> None:
        super().__init__(daemon=True)
        self.max_rss = 0
        self._root, self._every, self._events = root, every, events
        self._done = threading.Event()

    def run(self) -> None:
        """Take the first sample soon, then one at every multiple of the interval, and a last one at the end."""
        if not self._every:
            return
        _encode_line({})  # imports json now, not when the program has exited
        gauges = (Cpu(), ProcessTree(self._root), Network(), Disks(), Memory(), Gpus(), CacheDisk())
        for gauge in gauges:
            _read(gauge, 0.0)
        started = last = time.monotonic()
        next_sample = started + min(FIRST_SAMPLE_S, self._every)
        done = False
        while not done:
            done = self._done.wait(max(0.0, next_sample - time.monotonic()))
            now = time.monotonic()
            if done and now - last < MIN_INTERVAL_S and last != started:
                return
            fields: dict[str, Any] = {"interval_s": round(now - last, 3)}
            for gauge in gauges:
                fields.update(_read(gauge, max(now - last, 1e-3)))
            self.max_rss = max(self.max_rss, int(fields.get("tree_rss", 0)))
            self._events.write("profile", **fields)
            last = now
            next_sample = started + self._every * (int((time.monotonic() - started) / self._every) + 1)

    def finish(self) -> None:
        """Take the last sample and stop."""
        self._done.set()
        self.join(LAST_SAMPLE_S)


def _read(gauge: Any, interval_s: float) -> dict[str, Any]:
    """Read a gauge, or only start its counters if the interval is 0; omit what cannot be read."""
    try:
        fields: dict[str, Any] = gauge.read(interval_s)
    except (OSError, ValueError, LookupError, AttributeError):
        return {}
    return fields if interval_s else {}


class Counters:
    """Monotonic counters, read as increases since the last reading."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def increase(self, now: dict[str, float]) -> dict[str, float]:
        """Return the increase of each known counter; one that was reset counts as 0."""
        increases = {name: max(0.0, value - self._last[name]) for name, value in now.items() if name in self._last}
        self._last = now
        return increases


class Cpu:
    """CPU utilization of the machine, and the cores that this process may use."""

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> None:
        self._proc, self._counters, self._throttle = proc, Counters(), Counters()
        self._cpu_cgroups = _cgroup(proc, cgroups, "cpu")
        self._cores = _usable_cores(self._cpu_cgroups)
        self._machine = _machine(proc)

    def read(self, interval_s: float) -> dict[str, Any]:
        """Return busy and iowait time, load, and throttling by the cgroup's quota."""
        lines = _read_text(self._proc + "/stat").split("\n")
        jiffies = lines[0].split()[1:9]
        user, nice, system, idle, iowait, irq, softirq, steal = (float(value) for value in jiffies)
        busy = user + nice + system + irq + softirq + steal
        increase = self._counters.increase({"busy": busy, "iowait": iowait, "all": busy + idle + iowait})
        cpus = sum(line.startswith("cpu") for line in lines) - 1
        fields: dict[str, Any] = {"cores": self._cores, "cpus": cpus, **self._machine}
        if increase.get("all"):
            fields["cpu_pct"] = round(100 * increase["busy"] / increase["all"], 1)
            fields["iowait_pct"] = round(100 * increase["iowait"] / increase["all"], 1)
        fields["load1"] = float(_read_text(self._proc + "/loadavg").split()[0])
        throttled = self._throttle.increase(self._throttled_s())
        if "s" in throttled and interval_s:
            fields["throttled_pct"] = round(min(100.0, 100 * throttled["s"] / interval_s), 1)
        return fields

    def _throttled_s(self) -> dict[str, float]:
        for folder in self._cpu_cgroups[:1]:
            stat = _read_table(folder + "/cpu.stat")
            if "throttled_usec" in stat:
                return {"s": stat["throttled_usec"] / 1e6}
            if "throttled_time" in stat:
                return {"s": stat["throttled_time"] / 1e9}
        return {}


class ProcessTree:
    """CPU time and memory of the program and its descendants, and of the other ranks of a worker under mpirun.

    Only new processes are opened to find their parents; all others are scanned again when that costs next to nothing.
    A descendant still counts when its parent has exited.
    """

    def __init__(self, root: int, proc: str = "/proc") -> None:
        self._root, self._proc, self._counters = root, proc, Counters()
        self._other_ranks = _list_other_ranks(os.environ)
        rank_process = self._stat(os.getppid()) if self._other_ranks else None
        self._mpirun = rank_process[0] if rank_process else 0
        self._ours: dict[int, int] = {}
        """The descendants and their start times: pids are reused."""
        self._others: dict[int, int] = {}
        """All other processes and their parents."""
        self._next_scan = 0.0
        self._tick, self._page = os.sysconf("SC_CLK_TCK"), resource.getpagesize()

    def read(self, interval_s: float) -> dict[str, Any]:
        """Return the sums; shared memory counts in each process."""
        self._scan()
        ticks = rss = count = 0
        for pid, start_time in self._ours.items():
            stat = self._stat(pid)
            if stat is not None and stat[3] == start_time:
                ticks, rss, count = ticks + stat[1], rss + stat[2], count + 1
        increase = self._counters.increase({"ticks": float(ticks)})
        fields: dict[str, Any] = {"tree_processes": count}
        if rss:  # zombies have none
            fields["tree_rss"] = rss * self._page
        if "ticks" in increase and interval_s:
            fields["tree_cpu_pct"] = round(100 * increase["ticks"] / self._tick / interval_s, 1)
        return fields

    def _scan(self) -> None:
        started = time.monotonic()
        alive = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        if started >= self._next_scan:
            self._others = {}
        start_times = {}
        for pid in alive.difference(self._ours, self._others):
            stat = self._stat(pid)
            if stat is not None:
                self._others[pid], start_times[pid] = stat[0], stat[3]
        ours = {**self._ours, **self._find_descendants(start_times)}
        self._ours = {pid: start_time for pid, start_time in ours.items() if pid in alive}
        self._others = {pid: ppid for pid, ppid in self._others.items() if pid in alive and pid not in self._ours}
        if started >= self._next_scan:
            self._next_scan = started + (time.monotonic() - started) / SCAN_CPU_SHARE

    def _find_descendants(self, start_times: dict[int, int]) -> dict[int, int]:
        """Return the new processes that descend from the program."""
        children: dict[int, list[int]] = {}
        for pid in start_times:
            children.setdefault(self._others[pid], []).append(pid)
        descendants, queue = {}, [pid for pid in start_times if pid == self._root or self._is_other_rank(pid)]
        queue += [pid for parent in self._ours for pid in children.get(parent, ())]
        while queue:
            pid = queue.pop()
            if pid not in descendants:
                descendants[pid] = start_times[pid]
                queue.extend(children.get(pid, ()))
        return descendants

    def _is_other_rank(self, pid: int) -> bool:
        if not self._mpirun or self._others[pid] != self._mpirun:
            return False
        try:
            variables = _read_text(f"{self._proc}/{pid}/environ").split("\0")
        except OSError:
            return False
        return any(f"{name}={rank}" in variables for name in MPI_RANK_ENV for rank in self._other_ranks)

    def _stat(self, pid: int) -> tuple[int, int, int, int] | None:
        """Return the parent, CPU ticks (with those of reaped children), resident pages, and start time of a process."""
        try:
            fields = _read_text(f"{self._proc}/{pid}/stat").rpartition(")")[2].split()
            return int(fields[1]), sum(int(value) for value in fields[11:15]), int(fields[21]), int(fields[19])
        except (OSError, ValueError, LookupError):
            return None


class Network:
    """Traffic of all interfaces except the loopback, and TCP retransmissions."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc, self._counters = proc, Counters()

    def read(self, interval_s: float) -> dict[str, Any]:
        """Return the rates."""
        rx = tx = 0.0
        for line in _read_text(self._proc + "/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                fields = rest.split()
                rx, tx = rx + float(fields[0]), tx + float(fields[8])
        now = {"net_rx_per_s": rx, "net_tx_per_s": tx}
        tcp = [line.split() for line in _read_text(self._proc + "/net/snmp").splitlines() if line.startswith("Tcp:")]
        if len(tcp) == 2:
            values = dict(zip(*tcp))  # noqa: B905 (3.8 has no strict=)
            now["tcp_sent_per_s"] = float(values["OutSegs"])
            now["tcp_retransmits_per_s"] = float(values["RetransSegs"])
        return _rates(self._counters, now, interval_s)


class Disks:
    """I/O of whole disks, so that partitions are not counted twice."""

    def __init__(self, proc: str = "/proc", sys_block: str = "/sys/block") -> None:
        self._proc, self._counters = proc, Counters()
        try:
            names = os.listdir(sys_block)
        except OSError:
            names = []
        self._names = {name for name in names if not name.startswith(("loop", "ram", "zram", "dm-", "md", "sr", "fd"))}

    def read(self, interval_s: float) -> dict[str, Any]:
        """Return the rates."""
        if not self._names:
            return {}
        read = written = 0.0
        for line in _read_text(self._proc + "/diskstats").splitlines():
            fields = line.split()
            if fields[2] in self._names:
                read, written = read + 512 * float(fields[5]), written + 512 * float(fields[9])
        return _rates(self._counters, {"disk_read_per_s": read, "disk_write_per_s": written}, interval_s)


class Memory:
    """Memory of the machine, and of our cgroup without the reclaimable page cache."""

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> None:
        self._proc, self._cgroups = proc, cgroups
        self._oom_kills_before = oom_kills(proc, cgroups)

    def read(self, interval_s: float) -> dict[str, Any]:  # noqa: ARG002 (as every gauge)
        """Return both, and the OOM kills since the start."""
        table = _read_table(self._proc + "/meminfo")
        total = int(table["MemTotal:"] * 1024)
        fields: dict[str, Any] = {"mem_total": total, "mem_available": int(table["MemAvailable:"] * 1024)}
        limits = []
        for folder in _cgroup(self._proc, self._cgroups, "memory"):
            limit = _read_number(folder + "/memory.max", folder + "/memory.limit_in_bytes")
            if limit is not None and limit < total:
                limits.append((limit, folder))
        if limits:
            limit, folder = min(limits)
            used = _read_number(folder + "/memory.current", folder + "/memory.usage_in_bytes")
            if used is not None:
                fields["cgroup_mem_limit"] = limit
                fields["cgroup_mem_used"] = max(0, used - _file_cache(folder))
        fields["oom_kills"] = max(0, oom_kills(self._proc, self._cgroups) - self._oom_kills_before)
        return fields


class Gpus:
    """NVIDIA GPUs by NVML: those in CUDA_VISIBLE_DEVICES if it lists indices, none without a driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[tuple[int, Any]] = []
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            count = ctypes.c_uint()
            if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return
            for index in range(count.value):
                device = ctypes.c_void_p()
                if _is_visible(index) and not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                    self._devices.append((index, device))
            self._nvml = nvml
        except (AttributeError, OSError):  # no ctypes, no driver, or one too old
            return

    def read(self, interval_s: float) -> dict[str, Any]:  # noqa: ARG002 (as every gauge)
        """Return the metrics of every GPU."""
        if self._nvml is None or not self._devices:
            return {}
        return {"gpu": [self._read_one(index, device) for index, device in self._devices]}

    def _read_one(self, index: int, device: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"i": index}
        utilization, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        if self._call("nvmlDeviceGetUtilizationRates", device, utilization):
            fields["util_pct"] = utilization[0]
        if self._call("nvmlDeviceGetMemoryInfo", device, memory):
            fields["mem_total"], fields["mem_used"] = memory[0], memory[2]
        value = ctypes.c_uint()
        if self._call("nvmlDeviceGetPowerUsage", device, ctypes.byref(value)):
            fields["power_w"] = round(value.value / 1000)
        if self._call("nvmlDeviceGetTemperature", device, 0, ctypes.byref(value)):
            fields["temp_c"] = value.value
        if self._call("nvmlDeviceGetClockInfo", device, 1, ctypes.byref(value)):
            fields["sm_mhz"] = value.value
        return fields

    def _call(self, name: str, *arguments: Any) -> bool:
        """Call an NVML function; return whether the GPU supports it."""
        try:
            return bool(getattr(self._nvml, name)(*arguments) == 0)
        except AttributeError:
            return False


class CacheDisk:
    """Free space on the disk of the cache; the loader itself reports its hits and misses."""

    def __init__(self) -> None:
        self._folder = os.environ.get("STOKER_CACHE_DIR", "")

    def read(self, interval_s: float) -> dict[str, Any]:  # noqa: ARG002 (as every gauge)
        """Return the free bytes."""
        if not self._folder:
            return {}
        stat = os.statvfs(self._folder)
        return {"cache_disk_free": stat.f_bavail * stat.f_frsize}


def oom_kills(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the number of OOM kills: in our cgroup if it counts them, otherwise on the machine."""
    for folder in _cgroup(proc, cgroups, "memory")[:1]:
        for name in ("/memory.events", "/memory.oom_control"):
            table = _read_table(folder + name)
            if "oom_kill" in table:
                return int(table["oom_kill"])
    return machine_oom_kills(proc)


def machine_oom_kills(proc: str = "/proc") -> int:
    """Return the number of OOM kills on the whole machine."""
    return int(_read_table(proc + "/vmstat").get("oom_kill", 0))


def _cgroup(proc: str, cgroups: str, controller: str) -> list[str]:
    """List the directories of our cgroup and its ancestors for one controller, of version 1 or 2."""
    try:
        lines = [line.split(":", 2) for line in _read_text(proc + "/self/cgroup").splitlines()]
    except OSError:
        return []
    for _, names, path in lines:
        if controller in names.split(","):
            return _list_ancestors(cgroups + "/" + controller, path)
    return [folder for _, names, path in lines if not names for folder in _list_ancestors(cgroups, path)]


def _list_ancestors(root: str, path: str) -> list[str]:
    """List the directories from a path up to its root that exist; in a container the path may be that of the host."""
    parts = [part for part in path.split("/") if part] if ".." not in path else []
    folders = ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]
    return [folder for folder in folders if os.access(folder, os.R_OK)]


def _machine(proc: str) -> dict[str, str]:
    """Return an id that all containers of a machine share, to add up their samples.

    Empty for one of several ranks that a user runs under mpirun: without a slot, their samples cannot be added up.
    """
    if _first_number(os.environ, "OMPI_COMM_WORLD_LOCAL_SIZE") > 1 and "STOKER_SLOT" not in os.environ:
        return {}
    try:
        return {"machine": _read_text(proc + "/sys/kernel/random/boot_id").strip()[:8]}
    except OSError:
        return {}


def _usable_cores(cgroups: list[str]) -> float:
    """Return the number of usable cores: CPU affinity, limited by the quota of our cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cgroups:
        try:
            quota, period = _read_text(folder + "/cpu.max").split()[:2]
        except (OSError, ValueError):
            quota = str(_read_number(folder + "/cpu.cfs_quota_us"))
            period = str(_read_number(folder + "/cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, int(quota) / int(period))
    return round(cores, 2)


def _file_cache(folder: str) -> int:
    table = _read_table(folder + "/memory.stat")
    names = ("total_active_file", "total_inactive_file")
    if names[0] not in table:
        names = ("active_file", "inactive_file")
    return int(sum(table.get(name, 0) for name in names))


def _rates(counters: Counters, now: dict[str, float], interval_s: float) -> dict[str, Any]:
    increase = counters.increase(now)
    return {name: round(value / interval_s, 1) for name, value in increase.items()} if interval_s else {}


def _is_visible(index: int) -> bool:
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    indices = [int(name) for name in names if name.strip().isdigit()]
    return index in indices if len(indices) == len(names) else True


def _read_table(path: str) -> dict[str, float]:
    """Read lines of a name and a number; return an empty table if there is no such file."""
    table = {}
    try:
        for line in _read_text(path).splitlines():
            fields = line.split()
            if len(fields) >= 2:
                table[fields[0]] = float(fields[1])
    except (OSError, ValueError):
        pass
    return table


def _read_number(*paths: str) -> int | None:
    """Read a number from the first of these files that has one; `max` is not a number."""
    for path in paths:
        try:
            return int(_read_text(path))
        except (OSError, ValueError):
            continue
    return None


def _read_text(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.read().decode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs a program and tells, every so often, what the machine does: GPU, CPU, memory, network, disk.

One file on the standard library alone, for Python 3.8 and later, importing nothing of ours: it rides as it is into
any image that has python3. `stoker profile` calls it; by itself:

    python3 profiler.py --every 30 -- python train.py

The program keeps our standard input, output and error, our process group, and the exit code; signals that reach only
us are passed on. When we are killed with SIGKILL, the kernel sends the program SIGTERM (PR_SET_PDEATHSIG). Samples are
`profile` events on standard output, with rates per second since the one before; a `mark` called `exit` is the last.
Fields that a machine cannot tell are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

try:
    import ctypes
except ImportError:  # a Python that was built without it: no GPU, no word from the kernel when we die
    ctypes = None  # type: ignore[assignment]

PREFIX = "@stoker "
VERSION = 1
LONGEST = 4096
FIRST_S = 2.0
"""When the first sample comes, so that one need not wait to see that it works."""
SHORTEST_S = 0.2
"""A last sample over less time than this would say nothing."""
WALK_SHARE = 0.0005
"""The share of a core that may go into looking for processes anew."""
GROUP_S = 0.01
"""How long a signal to a group may take from one member to the next."""
ANSWER_S = 1.0
JOIN_S = 5.0
"""How long the last sample may take when the program has ended; a broken GPU driver may never answer."""
PR_SET_PDEATHSIG = 1
FORWARDED = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT", "TSTP", "WINCH")
USAGE = "usage: profiler.py [--every SECONDS] -- COMMAND [ARGUMENT]...\n"


def main(argv: list[str]) -> int:
    """Run a command line of ours and return the exit code of the program in it."""
    try:
        every, command = _arguments(argv)
    except ValueError as error:
        sys.stderr.write(f"stoker profile: {error}\n{USAGE}")
        return 2
    return run(command, every)


def run(command: list[str], every: float) -> int:
    """Run a program to its end, sampling meanwhile, and return its exit code: 128 + n when signal n ended it."""
    signals = {getattr(signal, "SIG" + name) for name in FORWARDED}
    signals = {number for number in signals if signal.getsignal(number) != signal.SIG_IGN}  # nohup stays nohup
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    events, began = Events(), time.monotonic()
    killed_before, watchman = oom_kills(), Watchman()
    try:
        child = _start(command, before)
    except OSError as error:
        watchman.end()
        reason = (error.strerror or str(error)).lower()
        hint = "install it, or add its folder to the PATH"
        sys.stderr.write(f"stoker profile: cannot start the program {command[0]!r}: {reason}; {hint}\n")
        return 3
    early = signal.sigpending()  # these may have come before the program was there
    sampler = Sampler(child.pid, every, events)
    sampler.start()
    _pass_signals_on(child.pid, signals, early, watchman)
    sampler.finish()
    watchman.end()
    _, status, usage = os.wait4(child.pid, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = child.returncode = 128 + number if number else os.WEXITSTATUS(status)
    oom = code != 0 and oom_kills() > killed_before
    events.write(
        "mark",
        name="exit",
        detail=_cause(code, number, oom),
        code=code,
        signal=_signal_name(number),
        oom=oom,
        seconds=round(time.monotonic() - began, 3),
        max_rss=max(sampler.max_rss, usage.ru_maxrss * 1024),
    )
    return code


def _arguments(argv: list[str]) -> tuple[float, list[str]]:
    every, rest = 30.0, list(argv)
    while rest and rest[0] != "--" and rest[0].startswith("-"):
        name, _, value = rest.pop(0).partition("=")
        if name != "--every":
            raise ValueError(f"there is no option {name}")
        if not value and not rest:
            raise ValueError("--every needs a number of seconds")
        value = value or rest.pop(0)
        try:
            every = float(value)
        except ValueError:
            every = -1.0
        if not 0 <= every <= 1e9:
            raise ValueError(f"--every is {value!r}, and must be 0 or more seconds")
    command = rest[1:] if rest[:1] == ["--"] else rest
    if not command:
        raise ValueError("no command was given")
    return every, command


def _start(command: list[str], mask: set[Any]) -> subprocess.Popen[bytes]:
    parent, libc = os.getpid(), _libc()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _die_with(parent, signal.SIGTERM, libc)

    # Before there are threads, and with the files that we were given open.
    return subprocess.Popen(command, preexec_fn=prepare, close_fds=False)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (AttributeError, OSError):
        return None


def _die_with(parent: int, number: int, libc: Any) -> None:
    """Ask the kernel for a signal when the parent dies; it may have died before we could ask."""
    if libc is not None and hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def _pass_signals_on(child: int, signals: set[Any], early: set[Any], watchman: Watchman) -> None:
    """Wait for the end of the program, and pass on every signal that it has not had itself."""
    while not _has_ended(child):
        number = signal.sigwaitinfo(signals | {signal.SIGCHLD}).si_signo
        if number == signal.SIGCHLD:
            if os.getpid() == 1:
                _reap_strays(child, watchman)
            continue
        if not watchman.saw(number) or number in early:
            _send(child, number)
        early.discard(number)
        if number == signal.SIGTSTP:
            _stop_too()


def _stop_too() -> None:
    """Stop as the program does, so that a shell sees it; where no shell could undo it, the kernel stops neither."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it became another user's, or is gone
        os.kill(pid, number)


def _has_ended(pid: int) -> bool:
    """Tell whether a child has ended, and leave it unreaped: until then nobody else gets its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap_strays(child: int, watchman: Watchman) -> None:
    """As the first process of a container we inherit orphans; whoever else started them reaps them otherwise."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, 0)
        if ended.si_pid == watchman.pid:
            watchman.pid = 0  # someone else may get its number now


def _cause(code: int, number: int, oom: bool) -> str:
    text = f"ended by {_signal_name(number)}" if number else f"ended with exit code {code}"
    return text + ", after the kernel killed a process for want of memory" if oom else text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"signal {number}"


class Watchman:
    """A process in our group that never takes a signal, so that the kernel keeps those that it gets for us to see.

    What it gets too was sent to the whole group, by Ctrl-C or by a launcher that ends us, and so the program has had
    it already: torchrun, for one, cuts its own orderly end short when it is told to stop twice.
    """

    def __init__(self) -> None:
        parent, libc = os.getpid(), _libc()
        asked, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                _die_with(parent, signal.SIGKILL, libc)
                _close_all_but(asked, answers)
                _forget_when_asked(asked, answers)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answers)

    def saw(self, number: int) -> bool:
        """Tell whether the signal was for the whole group."""
        time.sleep(GROUP_S)
        try:
            lines = _text(f"/proc/{self.pid}/status").splitlines()
            pending = int(next(line for line in lines if line.startswith("ShdPnd:")).split()[1], 16)
        except (OSError, ValueError, LookupError, StopIteration):
            return False
        if not pending >> (number - 1) & 1:
            return False
        with contextlib.suppress(OSError):  # someone has ended it
            os.write(self._ask, bytes([number]))
            select.select([self._answer], [], [], ANSWER_S)
            os.set_blocking(self._answer, False)
            os.read(self._answer, 64)
        return True

    def end(self) -> None:
        """End it, and wait until it is gone."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._ask)
        os.close(self._answer)


def _forget_when_asked(asked: int, answers: int) -> None:
    while True:
        number = os.read(asked, 1)
        if not number:
            return
        signal.sigtimedwait({number[0]}, 0)
        os.write(answers, b".")


def _close_all_but(*kept: int) -> None:
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = [0, 1, 2]
    for number in numbers:
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


class Events:
    """Writes events as `stoker.telemetry.events` does; a test holds the two together."""

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
        """Write one event; GPUs that do not fit into its line are left out."""
        event = {"v": VERSION, "t": round(time.time(), 6), **self._head, "seq": self._seq, "k": kind, **fields}
        self._seq += 1
        line = _line(event)
        while len(line) > LONGEST and event.get("gpu"):
            event["gpu"], event["cut"] = event["gpu"][:-1], True
            line = _line(event)
        try:
            while line:
                line = line[os.write(1, line) :]
        except OSError:
            pass  # nobody reads any more


def _line(event: dict[str, Any]) -> bytes:
    return (PREFIX + json.dumps(event) + "\n").encode()


def _first_number(env: Any, *names: str) -> int:
    for name in names:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            continue
    return 0


class Sampler(threading.Thread):
    """Takes samples in a thread, so that a driver that does not answer holds up no signal."""

    def __init__(self, root: int, every: float, events: Events) -> None:
        super().__init__(daemon=True)
        self.max_rss = 0
        self._root, self._every, self._events = root, every, events
        self._done = threading.Event()

    def run(self) -> None:
        """Sample soon, then at every multiple of the interval, and once more at the end."""
        if not self._every:
            return
        gauges = (Machine(), Tree(self._root), Network(), Disks(), Memory(), Gpus(), CacheDisk())
        for gauge in gauges:
            _read(gauge, 0.0)
        began = last = time.monotonic()
        at = began + min(FIRST_S, self._every)
        done = False
        while not done:
            done = self._done.wait(max(0.0, at - time.monotonic()))
            now = time.monotonic()
            if done and now - last < SHORTEST_S and last != began:
                return
            fields: dict[str, Any] = {"interval_s": round(now - last, 3)}
            for gauge in gauges:
                fields.update(_read(gauge, max(now - last, 1e-3)))
            self.max_rss = max(self.max_rss, int(fields.get("tree_rss", 0)))
            self._events.write("profile", **fields)
            last = now
            at = began + self._every * (int((time.monotonic() - began) / self._every) + 1)

    def finish(self) -> None:
        """Take the last sample and stop."""
        self._done.set()
        self.join(JOIN_S)


def _read(gauge: Any, interval_s: float) -> dict[str, Any]:
    """Read a gauge; interval 0 only begins its counters. What cannot be read is left out."""
    try:
        fields: dict[str, Any] = gauge.read(interval_s)
    except (OSError, ValueError, LookupError, AttributeError):
        return {}
    return fields if interval_s else {}


class Counters:
    """Growing numbers, turned into rates since they were last read."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def since(self, now: dict[str, float]) -> dict[str, float]:
        """Give the growth of each number that was there before; one that was set back counts as 0."""
        grown = {name: max(0.0, value - self._last[name]) for name, value in now.items() if name in self._last}
        self._last = now
        return grown


class Machine:
    """The processors of the machine, and how many of them are ours."""

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> None:
        self._proc, self._counters, self._throttle = proc, Counters(), Counters()
        self._cpu = _cgroup(proc, cgroups, "cpu")
        self._cores = _cores(self._cpu)

    def read(self, interval_s: float) -> dict[str, Any]:
        """Read busy and iowait time, load, and how long a cgroup's quota held us back."""
        words = _text(self._proc + "/stat").split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, iowait, irq, softirq, steal = (float(word) for word in words)
        busy = user + nice + system + irq + softirq + steal
        grown = self._counters.since({"busy": busy, "iowait": iowait, "all": busy + idle + iowait})
        fields: dict[str, Any] = {"cores": self._cores}
        if grown.get("all"):
            fields["cpu_pct"] = round(100 * grown["busy"] / grown["all"], 1)
            fields["iowait_pct"] = round(100 * grown["iowait"] / grown["all"], 1)
        fields["load1"] = float(_text(self._proc + "/loadavg").split()[0])
        throttled = self._throttle.since(self._throttled_s())
        if "s" in throttled and interval_s:
            fields["throttled_pct"] = round(min(100.0, 100 * throttled["s"] / interval_s), 1)
        return fields

    def _throttled_s(self) -> dict[str, float]:
        for folder in self._cpu[:1]:
            stat = _table(folder + "/cpu.stat")
            if "throttled_usec" in stat:
                return {"s": stat["throttled_usec"] / 1e6}
            if "throttled_time" in stat:
                return {"s": stat["throttled_time"] / 1e9}
        return {}


class Tree:
    """The program and all that it started: their processor time and memory.

    Only processes that were not there before are opened to learn their parents, and all others again once that costs
    next to nothing. What was ours stays ours when its parent goes.
    """

    def __init__(self, root: int, proc: str = "/proc") -> None:
        self._root, self._proc, self._counters = root, proc, Counters()
        self._ours: dict[int, int] = {}
        """Each of ours, and when it was born: numbers are given again."""
        self._others: dict[int, int] = {}
        """Everyone else, and their parents."""
        self._again = 0.0
        self._tick, self._page = os.sysconf("SC_CLK_TCK"), resource.getpagesize()

    def read(self, interval_s: float) -> dict[str, Any]:
        """Read the sums; memory that processes share is counted in each of them."""
        self._look_around()
        ticks = rss = count = 0
        for pid, born in self._ours.items():
            found = self._stat(pid)
            if found is not None and found[3] == born:
                ticks, rss, count = ticks + found[1], rss + found[2], count + 1
        grown = self._counters.since({"ticks": float(ticks)})
        fields: dict[str, Any] = {"tree_processes": count}
        if rss:  # the dead have none
            fields["tree_rss"] = rss * self._page
        if "ticks" in grown and interval_s:
            fields["tree_cpu_pct"] = round(100 * grown["ticks"] / self._tick / interval_s, 1)
        return fields

    def _look_around(self) -> None:
        began = time.monotonic()
        alive = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        if began >= self._again:
            self._others = {}
        births = {}
        for pid in alive.difference(self._ours, self._others):
            found = self._stat(pid)
            if found is not None:
                self._others[pid], births[pid] = found[0], found[3]
        found_now = self._descendants(births)
        self._ours = {pid: born for pid, born in {**self._ours, **found_now}.items() if pid in alive}
        self._others = {pid: at for pid, at in self._others.items() if pid in alive and pid not in self._ours}
        if began >= self._again:
            self._again = began + (time.monotonic() - began) / WALK_SHARE

    def _descendants(self, births: dict[int, int]) -> dict[int, int]:
        """Find those just seen whose parents are ours, and their children among them."""
        children: dict[int, list[int]] = {}
        for pid in births:
            children.setdefault(self._others[pid], []).append(pid)
        found, left = {}, [self._root] if self._root in births else []
        left += [pid for parent in self._ours for pid in children.get(parent, ())]
        while left:
            pid = left.pop()
            if pid not in found:
                found[pid] = births[pid]
                left.extend(children.get(pid, ()))
        return found

    def _stat(self, pid: int) -> tuple[int, int, int, int] | None:
        """Read one's parent, ticks (those of children that were waited for included), pages, and time of birth."""
        try:
            words = _text(f"{self._proc}/{pid}/stat").rpartition(")")[2].split()
            return int(words[1]), sum(int(word) for word in words[11:15]), int(words[21]), int(words[19])
        except (OSError, ValueError, LookupError):
            return None


class Network:
    """Bytes of all interfaces but the loopback, and TCP's retransmissions."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc, self._counters = proc, Counters()

    def read(self, interval_s: float) -> dict[str, Any]:
        """Read them as rates."""
        rx = tx = 0.0
        for line in _text(self._proc + "/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                words = rest.split()
                rx, tx = rx + float(words[0]), tx + float(words[8])
        now = {"net_rx_per_s": rx, "net_tx_per_s": tx}
        tcp = [line.split() for line in _text(self._proc + "/net/snmp").splitlines() if line.startswith("Tcp:")]
        if len(tcp) == 2:
            values = dict(zip(*tcp))  # noqa: B905 (3.8 has no strict=)
            now["tcp_sent_per_s"] = float(values["OutSegs"])
            now["tcp_retransmits_per_s"] = float(values["RetransSegs"])
        return _rates(self._counters, now, interval_s)


class Disks:
    """Bytes of all whole disks, so that none is counted twice."""

    def __init__(self, proc: str = "/proc", sys_block: str = "/sys/block") -> None:
        self._proc, self._counters = proc, Counters()
        try:
            names = os.listdir(sys_block)
        except OSError:
            names = []
        self._names = {name for name in names if not name.startswith(("loop", "ram", "zram", "dm-", "md", "sr", "fd"))}

    def read(self, interval_s: float) -> dict[str, Any]:
        """Read them as rates."""
        if not self._names:
            return {}
        read = written = 0.0
        for line in _text(self._proc + "/diskstats").splitlines():
            words = line.split()
            if words[2] in self._names:
                read, written = read + 512 * float(words[5]), written + 512 * float(words[9])
        return _rates(self._counters, {"disk_read_per_s": read, "disk_write_per_s": written}, interval_s)


class Memory:
    """The memory of the machine, and of our cgroup without the file cache that it can drop."""

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> None:
        self._proc, self._cgroups = proc, cgroups
        self._kills = oom_kills(proc, cgroups)

    def read(self, interval_s: float) -> dict[str, Any]:  # noqa: ARG002 (as every gauge)
        """Read both, and how many processes the kernel has killed for want of memory since the start."""
        table = _table(self._proc + "/meminfo")
        total = int(table["MemTotal:"] * 1024)
        fields: dict[str, Any] = {"mem_total": total, "mem_available": int(table["MemAvailable:"] * 1024)}
        limits = []
        for folder in _cgroup(self._proc, self._cgroups, "memory"):
            limit = _number(folder + "/memory.max", folder + "/memory.limit_in_bytes")
            if limit is not None and limit < total:
                limits.append((limit, folder))
        if limits:
            limit, folder = min(limits)
            used = _number(folder + "/memory.current", folder + "/memory.usage_in_bytes")
            if used is not None:
                fields["cgroup_mem_limit"] = limit
                fields["cgroup_mem_used"] = max(0, used - _file_cache(folder))
        fields["oom_kills"] = max(0, oom_kills(self._proc, self._cgroups) - self._kills)
        return fields


class Gpus:
    """NVIDIA's GPUs by NVML, those of CUDA_VISIBLE_DEVICES where it gives numbers; none where there is no driver."""

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
        """Read every GPU."""
        if self._nvml is None or not self._devices:
            return {}
        return {"gpu": [self._read_one(index, device) for index, device in self._devices]}

    def _read_one(self, index: int, device: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"i": index}
        pair, three = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        if self._ask("nvmlDeviceGetUtilizationRates", device, pair):
            fields["util_pct"] = pair[0]
        if self._ask("nvmlDeviceGetMemoryInfo", device, three):
            fields["mem_total"], fields["mem_used"] = three[0], three[2]
        one = ctypes.c_uint()
        if self._ask("nvmlDeviceGetPowerUsage", device, ctypes.byref(one)):
            fields["power_w"] = round(one.value / 1000)
        if self._ask("nvmlDeviceGetTemperature", device, 0, ctypes.byref(one)):
            fields["temp_c"] = one.value
        if self._ask("nvmlDeviceGetClockInfo", device, 1, ctypes.byref(one)):
            fields["sm_mhz"] = one.value
        return fields

    def _ask(self, name: str, *arguments: Any) -> bool:
        """Call NVML; a card that cannot answer this says so by a code."""
        try:
            return bool(getattr(self._nvml, name)(*arguments) == 0)
        except AttributeError:
            return False


class CacheDisk:
    """Room on the disk of the cache. Its hits and misses are known to the loader alone, which tells them itself."""

    def __init__(self) -> None:
        self._folder = os.environ.get("STOKER_CACHE_DIR", "")

    def read(self, interval_s: float) -> dict[str, Any]:  # noqa: ARG002 (as every gauge)
        """Read the bytes that are free there."""
        if not self._folder:
            return {}
        found = os.statvfs(self._folder)
        return {"cache_disk_free": found.f_bavail * found.f_frsize}


def oom_kills(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Count the processes killed for want of memory: in our cgroup where it tells, else on the machine."""
    for folder in _cgroup(proc, cgroups, "memory")[:1]:
        for name in ("/memory.events", "/memory.oom_control"):
            table = _table(folder + name)
            if "oom_kill" in table:
                return int(table["oom_kill"])
    return machine_oom_kills(proc)


def machine_oom_kills(proc: str = "/proc") -> int:
    """Count the processes killed for want of memory on the whole machine."""
    return int(_table(proc + "/vmstat").get("oom_kill", 0))


def _cgroup(proc: str, cgroups: str, controller: str) -> list[str]:
    """List the folders of our cgroup and those above it, for one controller; version 1 or 2, whichever has it."""
    try:
        lines = [line.split(":", 2) for line in _text(proc + "/self/cgroup").splitlines()]
    except OSError:
        return []
    for _, names, path in lines:
        if controller in names.split(","):
            return _upwards(cgroups + "/" + controller, path)
    return [folder for _, names, path in lines if not names for folder in _upwards(cgroups, path)]


def _upwards(root: str, path: str) -> list[str]:
    """List the folders from a path up to its root; in a container the path may be that of the host, and not there."""
    parts = [part for part in path.split("/") if part] if ".." not in path else []
    folders = ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]
    return [folder for folder in folders if os.access(folder, os.R_OK)]


def _cores(cpu: list[str]) -> float:
    """Tell how many cores we may use: those of our mask, within the quota of our cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cpu:
        try:
            quota, period = _text(folder + "/cpu.max").split()[:2]
        except (OSError, ValueError):
            quota = str(_number(folder + "/cpu.cfs_quota_us"))
            period = str(_number(folder + "/cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, int(quota) / int(period))
    return round(cores, 2)


def _file_cache(folder: str) -> int:
    table = _table(folder + "/memory.stat")
    names = ("total_active_file", "total_inactive_file")
    if names[0] not in table:
        names = ("active_file", "inactive_file")
    return int(sum(table.get(name, 0) for name in names))


def _rates(counters: Counters, now: dict[str, float], interval_s: float) -> dict[str, Any]:
    grown = counters.since(now)
    return {name: round(value / interval_s, 1) for name, value in grown.items()} if interval_s else {}


def _is_visible(index: int) -> bool:
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(name) for name in named if name.strip().isdigit()]
    return index in numbers if len(numbers) == len(named) else True


def _table(path: str) -> dict[str, float]:
    """Read lines of a name and a number; empty where there is no such file."""
    found = {}
    try:
        for line in _text(path).splitlines():
            words = line.split()
            if len(words) >= 2:
                found[words[0]] = float(words[1])
    except (OSError, ValueError):
        pass
    return found


def _number(*paths: str) -> int | None:
    """Read a number from the first of these files that is there; `max` is none."""
    for path in paths:
        try:
            return int(_text(path))
        except (OSError, ValueError):
            continue
    return None


def _text(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.read().decode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

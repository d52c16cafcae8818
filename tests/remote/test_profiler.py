"""The profiler around real programs: streams, exit codes, signals and samples."""

from __future__ import annotations

import ast
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.remote import profiler
from stoker.telemetry.events import MAX_LINE_BYTES, PREFIX, Event, parse
from stoker.telemetry.reader import find_gaps
from tests.support.disks import NOT_ALLOWED
from tests.support.signals import restore_signals
from tests.support.waiting import eventually, is_alive

SOURCE = Path(profiler.__file__)
FAKE_NVML = """
#include <string.h>
#include <stdlib.h>
typedef unsigned int u; typedef unsigned long long ull;
static char devices[64];
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(u *n) { *n = atoi(getenv("FAKE_GPUS")); return 0; }
int nvmlDeviceGetHandleByIndex_v2(u i, void **d) { devices[i] = i; *d = devices + i; return 0; }
int nvmlDeviceGetUtilizationRates(void *d, u *r) { r[0] = 90 + *(char *)d % 10; r[1] = 40; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, ull *m) { m[0] = 80ull << 30; m[1] = 1; m[2] = 79ull << 30; return 0; }
int nvmlDeviceGetPowerUsage(void *d, u *p) { *p = 412345; return 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, u *t) { *t = sensor == 0 ? 71 : 0; return 0; }
int nvmlDeviceGetClockInfo(void *d, int type, u *c) { *c = type == 1 ? 1980 : 0; return *(char *)d == 1 ? 3 : 0; }
"""
CATCHER = """
import os, signal, sys, time
def note(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())
    if number == signal.SIGUSR2:
        sys.exit(9)
for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT", "WINCH"):
    signal.signal(getattr(signal, "SIG" + name), note)
os.write(1, f"ready {os.getpid()}\\n".encode())
while True:
    time.sleep(1)
"""


def command(*words: str, every: float = 0) -> list[str]:
    return [sys.executable, "-I", "-S", str(SOURCE), "--every", str(every), "--", *words]


def profile(*words: str, every: float = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words, every=every), capture_output=True, text=True, check=False, timeout=60, **more)


def parse_events(text: str) -> list[Event]:
    return [event for line in text.splitlines() if (event := parse(line))]


def exit_mark(text: str) -> dict[str, Any]:
    (mark,) = (event for event in parse_events(text) if event.kind == "mark")
    assert mark.fields["name"] == "exit"
    return dict(mark.fields)


class Running:
    """A profiler with a program that prints the signals it receives."""

    def __init__(self, *words: str, every: float = 0, before: Sequence[str] = (), **more: Any) -> None:
        argv = [*before, *command(*words, every=every)]
        more = more or {"start_new_session": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(argv, preexec_fn=restore_signals, **pipes, **more)
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.output: list[str] = []
        os.set_blocking(self.out.fileno(), False)
        assert eventually(lambda: self.process.poll() is not None or any("ready" in line for line in self.lines()))
        if self.process.poll() is not None:
            self.fail()
        self.child = next(int(line.split()[1]) for line in self.output if line.startswith("ready"))

    def fail(self) -> None:
        assert self.process.stderr is not None
        stderr = self.process.stderr.read().decode()
        self.process.stderr.close()
        self.out.close()
        if "unshare" in stderr:
            pytest.skip(f"a pid namespace is {NOT_ALLOWED}")
        pytest.fail(stderr)

    def lines(self) -> list[str]:
        self.output += (self.out.read() or b"").decode().splitlines()
        return self.output

    def received(self) -> list[str]:
        return [line.split()[1] for line in self.lines() if line.startswith("got")]

    def close(self) -> None:
        for pid in (-self.process.pid, self.child):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.out.close()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def catcher() -> Iterator[Running]:
    running = Running(sys.executable, "-c", CATCHER)
    yield running
    running.close()


def test_program_keeps_its_streams_and_exit_code() -> None:
    done = profile("sh", "-c", "cat; echo err >&2; exit 7", input="through\n")
    assert done.returncode == 7
    assert done.stdout.startswith("through\n@stoker ")
    assert done.stderr == "err\n"
    mark = exit_mark(done.stdout)
    assert (mark["code"], mark["signal"], mark["oom"]) == (7, "", False)
    assert mark["detail"].endswith(" 7")
    assert 0 < mark["seconds"] < 30


@pytest.mark.parametrize("of_parent", [0, 400 << 20], ids=["small parent", "large parent"])
def test_peak_memory_is_that_of_the_program(of_parent: int) -> None:
    """The kernel keeps the peak of a process across exec, so a large parent must not hide that of the program."""
    start = "import subprocess, sys; data = b'x' * int(sys.argv[1]); sys.exit(subprocess.call(sys.argv[2:]))"
    program = command(sys.executable, "-c", "data = b'x' * (200 << 20)")
    words = [sys.executable, "-c", start, str(of_parent), *program]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert 200 << 20 < exit_mark(done.stdout)["max_rss"] < 300 << 20


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
def test_exit_code_of_a_signal_is_128_plus_its_number(name: str, code: int) -> None:
    done = profile("sh", "-c", f"ulimit -c 0; kill -{name} $$")
    assert done.returncode == code
    mark = exit_mark(done.stdout)
    assert (mark["signal"], mark["code"]) == (f"SIG{name}", code)
    assert f"SIG{name}" in mark["detail"]


@pytest.mark.parametrize("words", [["no-such-program"], ["/etc/passwd"], ["/"], [""]])
def test_program_that_cannot_start_exits_3_with_one_sentence(words: Sequence[str]) -> None:
    done = profile(*words)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert repr(words[0]) in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("words", [[], ["--"], ["--every"], ["--every", "x", "--", "true"], ["--every", "-1", "true"],
                                   ["--every=nan", "true"], ["--wrong", "true"]])  # fmt: skip
def test_bad_arguments_exit_2(words: list[str]) -> None:
    done = subprocess.run([sys.executable, str(SOURCE), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_of_the_program_are_not_parsed() -> None:
    argv = [sys.executable, str(SOURCE), "--every=0", "echo", "--every", "5", "--", "-x"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("--every 5 -- -x\n")


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "USR1", "ALRM", "TERM", "CONT", "WINCH"])
def test_signal_to_the_profiler_reaches_the_program_once(name: str, catcher: Running) -> None:
    catcher.process.send_signal(getattr(signal, f"SIG{name}"))
    assert eventually(lambda: catcher.received() == [f"SIG{name}"]), catcher.received()
    catcher.process.send_signal(signal.SIGUSR2)
    assert catcher.process.wait(60) == 9
    assert catcher.received() == [f"SIG{name}", "SIGUSR2"]


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_signal_to_the_group_reaches_the_program_once(name: str, catcher: Running) -> None:
    number = getattr(signal, f"SIG{name}")
    for count in range(1, 9):  # alternately to the group and to the profiler alone
        if count % 2:
            os.killpg(catcher.process.pid, number)
        else:
            catcher.process.send_signal(number)
        assert eventually(lambda count=count: len(catcher.received()) == count)  # type: ignore[misc]
        time.sleep(0.05)  # for a second one, which must not come
    catcher.process.send_signal(signal.SIGUSR2)
    assert catcher.process.wait(60) == 9
    assert catcher.received() == [f"SIG{name}"] * 8 + ["SIGUSR2"]


def test_signal_before_the_program_starts_is_not_lost() -> None:
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import os, signal, profiler\n"
    code += "start = profiler._start\n"
    code += "profiler._start = lambda *words: (os.killpg(0, signal.SIGTERM), start(*words))[1]\n"
    code += "sys.exit(profiler.main(['--every', '0', 'sleep', '600']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60, process_group=0)
    assert done.returncode == 143


def test_signals_are_forwarded_without_the_detector(catcher: Running) -> None:
    (detector,) = set(_children(catcher.process.pid)) - {catcher.child}
    os.kill(detector, signal.SIGKILL)
    catcher.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: catcher.received() == ["SIGTERM"])
    catcher.process.send_signal(signal.SIGUSR2)
    assert catcher.process.wait(60) == 9


def test_sigtstp_suspends_both_and_sigcont_resumes_both() -> None:
    running = Running(sys.executable, "-c", CATCHER, process_group=0)

    def states() -> list[str]:
        pids = (running.process.pid, running.child)
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]

    try:
        running.process.send_signal(signal.SIGTSTP)
        assert eventually(lambda: states() == ["T", "T"])
        running.process.send_signal(signal.SIGCONT)
        assert eventually(lambda: "T" not in states())
        os.killpg(running.process.pid, signal.SIGTSTP)
        assert eventually(lambda: states() == ["T", "T"])
        os.killpg(running.process.pid, signal.SIGCONT)
        assert eventually(lambda: "T" not in states())
        running.process.send_signal(signal.SIGUSR2)
        assert running.process.wait(60) == 9
    finally:
        running.close()


def test_sigtstp_without_a_shell_suspends_neither(catcher: Running) -> None:
    catcher.process.send_signal(signal.SIGTSTP)  # its session has no shell
    catcher.process.send_signal(signal.SIGUSR2)
    assert catcher.process.wait(60) == 9


def test_ctrl_c_in_a_terminal_arrives_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        restore_signals()
        words = command(sys.executable, "-c", CATCHER)
        os.execv(words[0], words)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    while b"got" not in seen:
        seen += os.read(terminal, 1000)
    time.sleep(0.3)  # for a second one, which must not come
    os.kill(pid, signal.SIGUSR2)
    while b"exit" not in seen:
        seen += os.read(terminal, 1000)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    os.close(terminal)
    assert seen.count(b"got SIGINT") == 1


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    program = f"touch {ready}; while ! test -e {go}; do sleep 0.05; done"
    script = f"trap '' HUP; exec {shlex.join(command('sh', '-c', program))}"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL)
    assert eventually(ready.exists)
    process.send_signal(signal.SIGHUP)
    go.touch()
    assert process.wait(60) == 0


def test_killed_profiler_leaves_no_program() -> None:
    running = Running("sh", "-c", "echo ready $$; exec sleep 600", every=1)
    try:
        pids = [running.child, *_children(running.process.pid)]
        assert len(pids) == 3  # the program twice, and the detector
        running.process.kill()
        assert eventually(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        running.close()


def test_killed_group_leaves_nothing() -> None:
    running = Running("sh", "-c", "trap '' TERM; sleep 600 & echo ready $$; wait")
    try:
        pids = [running.child, *_children(running.process.pid), *_children(running.child)]
        os.killpg(running.process.pid, signal.SIGKILL)
        assert eventually(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        running.close()


def test_background_grandchild_is_not_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    done = profile("sh", "-c", f"sleep 600 >/dev/null 2>&1 & echo $! > {pid_file}; exit 4")
    pid = int(pid_file.read_text())
    try:
        assert done.returncode == 4
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_program_inherits_nothing_from_the_profiler() -> None:
    code = (
        "import os, signal; print(sorted(os.listdir('/proc/self/fd')), signal.pthread_sigmask(signal.SIG_BLOCK, []),"
        "signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    )
    read_fd, write_fd = os.pipe()
    profiled = profile(sys.executable, "-c", code, pass_fds=[write_fd]).stdout.splitlines()[0]
    argv = [sys.executable, "-c", code]
    plain = subprocess.run(argv, capture_output=True, text=True, check=True, pass_fds=[write_fd]).stdout
    os.close(read_fd)
    os.close(write_fd)
    assert profiled == plain.strip()  # with the files that were passed on


def test_samples_measure_the_program() -> None:
    code = (
        "import os, time; data = b'x' * (200 << 20); pid = os.fork()\n"
        "end = time.monotonic() + 1.7\nwhile time.monotonic() < end: pass\n"
        "if pid: os.waitpid(pid, 0); print(sum(os.times()[:4]))"
    )
    env = {**os.environ, "STOKER_SLOT": "worker/1", "STOKER_ATTEMPT": "2", "RANK": "x", "STOKER_CACHE_DIR": "/tmp"}
    done = profile(sys.executable, "-c", code, every=0.5, env=env)
    events = parse_events(done.stdout)
    (cpu_seconds,) = (line for line in done.stdout.splitlines() if PREFIX not in line)
    assert find_gaps(events) == []
    assert {(event.slot, event.attempt, event.rank) for event in events} == {("worker/1", 2, 0)}
    *samples, mark = events
    assert len(samples) >= 3
    assert {event.kind for event in samples} == {"profile"}
    sample = max((event.fields for event in samples), key=lambda fields: fields.get("tree_rss", 0))
    assert 0.2 <= sample["interval_s"] < 5
    assert sample["tree_processes"] == 2
    assert sample["tree_rss"] > 300 << 20
    measured = sum(event.fields["tree_cpu_pct"] * event.fields["interval_s"] / 100 for event in samples)
    assert measured == pytest.approx(float(cpu_seconds), abs=0.3)
    assert 0 < sample["cpu_pct"] <= 100
    assert 0 <= sample["iowait_pct"] <= 100
    assert 0 < sample["cores"] <= (os.cpu_count() or 1) == sample["cpus"]
    assert Path("/proc/sys/kernel/random/boot_id").read_text().startswith(sample["machine"])
    assert 0 < sample["mem_available"] < sample["mem_total"]
    for name in ("load1", "net_rx_per_s", "net_tx_per_s", "tcp_retransmits_per_s", "oom_kills", "cache_disk_free"):
        assert sample[name] >= 0
    assert "gpu" not in sample
    assert mark.fields["max_rss"] >= sample["tree_rss"]


def test_first_sample_comes_soon_and_a_last_one_at_the_end() -> None:
    done = profile("sleep", "2.8", every=30)
    first, last, _ = parse_events(done.stdout)
    assert first.fields["interval_s"] == pytest.approx(2, abs=0.5)
    assert 0.2 <= last.fields["interval_s"] < 10
    assert [event.kind for event in parse_events(profile("true", every=30).stdout)] == ["profile", "mark"]
    assert [event.kind for event in parse_events(profile("true").stdout)] == ["mark"]


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(FAKE_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=folder, check=True)
    return folder


def gpus(folder: Path, count: int, **env: str) -> list[dict[str, Any]]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_GPUS": str(count), **env}
    done = profile("true", every=30, env=env)
    assert all(len(line) < MAX_LINE_BYTES for line in done.stdout.splitlines())
    fields = parse_events(done.stdout)[0].fields
    assert "tree_processes" in fields
    return list(fields.get("gpu", []))


def test_gpus_are_read_by_nvml(nvml: Path) -> None:
    first, second = gpus(nvml, 2)
    expected = {"i": 0, "util_pct": 90, "mem_total": 80 << 30, "mem_used": 79 << 30, "power_w": 412, "temp_c": 71}
    assert first == {**expected, "sm_mhz": 1980}
    assert second == {**expected, "i": 1, "util_pct": 91}  # this GPU does not report its clock
    assert len(gpus(nvml, 16)) == 16
    assert 16 < len(gpus(nvml, 60)) < 60
    assert gpus(nvml, 0) == []
    assert [gpu["i"] for gpu in gpus(nvml, 8, CUDA_VISIBLE_DEVICES="2,5")] == [2, 5]
    assert len(gpus(nvml, 8, CUDA_VISIBLE_DEVICES="GPU-1234")) == 8


def test_broken_nvml_means_no_gpus(tmp_path: Path) -> None:
    for text in ("int nvmlInit_v2(void) { return 9; }", "int x;"):
        (tmp_path / "nvml.c").write_text(text)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=tmp_path, check=True)
        assert gpus(tmp_path, 1) == []


def test_hanging_driver_does_not_delay_signals(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text("#include <unistd.h>\nint nvmlInit_v2(void) { sleep(600); return 9; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=tmp_path, check=True)
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import profiler; profiler.LAST_SAMPLE_S = 0.2\n"
    code += "sys.exit(profiler.main(sys.argv[1:]))"
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        "--every",
        "1",
        "--",
        "sh",
        "-c",
        "kill -TERM $PPID; exec sleep 600",
    ]
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 143
    assert exit_mark(done.stdout)["signal"] == "SIGTERM"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_cgroup_v2(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\n",
        "proc/self/cgroup": "0::/pod/box\n",
        "proc/vmstat": "oom_kill 90\n",
        "cg/pod/box/memory.max": "max\n", "cg/pod/box/memory.events": "oom 3\noom_kill 4\n",
        "cg/pod/memory.max": "5000000\n", "cg/pod/memory.current": "4000000\n",
        "cg/pod/memory.stat": "anon 5\nactive_file 100\ninactive_file 900\n",
        "cg/pod/box/cpu.max": "max 100000\n", "cg/pod/cpu.max": "50000 100000\n",
    })  # fmt: skip
    proc, cgroups = str(tmp_path / "proc"), str(tmp_path / "cg")
    memory = profiler.Memory(proc, cgroups)
    (tmp_path / "cg/pod/box/memory.events").write_text("oom 3\noom_kill 6\n")
    assert memory.read(1.0) == {
        "mem_total": 1_024_000_000,
        "mem_available": 512_000_000,
        "cgroup_mem_limit": 5_000_000,
        "cgroup_mem_used": 3_999_000,
        "oom_kills": 2,
    }
    assert profiler._usable_cores(profiler._cgroup(proc, cgroups, "cpu")) == 0.5
    (tmp_path / "proc/self/cgroup").write_text("0::/../elsewhere\n")
    assert profiler._cgroup(proc, cgroups, "cpu") == [cgroups]


def test_limits_of_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\n",
        "proc/self/cgroup": "4:memory:/on/the/host\n3:cpu,cpuacct:/\n0::/\n",
        "proc/vmstat": "oom_kill 90\n",
        "cg/memory/memory.limit_in_bytes": "9000000\n", "cg/memory/memory.usage_in_bytes": "8000000\n",
        "cg/memory/memory.stat": "active_file 1\ntotal_active_file 1000\ntotal_inactive_file 2000\n",
        "cg/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "cg/cpu/cpu.cfs_quota_us": "150000\n", "cg/cpu/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    proc, cgroups = str(tmp_path / "proc"), str(tmp_path / "cg")
    fields = profiler.Memory(proc, cgroups).read(1.0)
    assert (fields["cgroup_mem_limit"], fields["cgroup_mem_used"]) == (9_000_000, 7_997_000)
    assert fields["oom_kills"] == 0
    assert profiler._usable_cores(profiler._cgroup(proc, cgroups, "cpu")) == min(1.5, len(os.sched_getaffinity(0)))
    (tmp_path / "cg/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert "cgroup_mem_limit" not in profiler.Memory(proc, cgroups).read(1.0)


def test_unreadable_proc_gives_no_fields(tmp_path: Path) -> None:
    empty = str(tmp_path)
    gauges = [profiler.Cpu(empty, empty), profiler.Memory(empty, empty), profiler.Network(empty),
              profiler.Disks(empty, empty), profiler.ProcessTree(1, empty + "/no")]  # fmt: skip
    assert [profiler._read(gauge, 1.0) for gauge in gauges] == [{}] * 5


def test_rates_of_disks_and_interfaces(tmp_path: Path) -> None:
    write(tmp_path, {"block/sda/x": "", "block/loop0/x": "", "block/dm-0/x": "", "diskstats": "", "net/dev": "a\nb\n"})
    disks, network = profiler.Disks(str(tmp_path), str(tmp_path / "block")), profiler.Network(str(tmp_path))
    head = " face |bytes\n |x\n"
    for count in (0, 10):
        rows = [f"8 0 {name} 1 0 {count} 0 1 0 {2 * count} 0 0 0 0" for name in ("sda", "sda1", "loop0", "dm-0")]
        (tmp_path / "diskstats").write_text("\n".join(rows) + "\n")
        nets = "".join(f"{name}:{count * 7} 0 0 0 0 0 0 0 {count} 0\n" for name in (" lo", "eth0", "eth1"))
        (tmp_path / "net/dev").write_text(head + nets)
        (tmp_path / "net/snmp").write_text(f"Tcp: OutSegs RetransSegs\nTcp: {count * 5} {count}\n")
        fields = {**disks.read(2.0), **network.read(2.0)}
    assert fields == {
        "disk_read_per_s": 2560.0, "disk_write_per_s": 5120.0, "net_rx_per_s": 70.0, "net_tx_per_s": 10.0,
        "tcp_sent_per_s": 25.0, "tcp_retransmits_per_s": 5.0,
    }  # fmt: skip


def test_process_tree_finds_children_and_keeps_orphans(tmp_path: Path) -> None:
    def stat(pid: int, parent: int, ticks: int, pages: int, start_time: int = 5) -> None:
        text = f"{pid} (a) b) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 {start_time} 9 {pages} 1"
        write(tmp_path, {f"{pid}/stat": text})

    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1), (21, 20)):
        stat(pid, parent, 100, 1000)
    tree = profiler.ProcessTree(10, str(tmp_path))
    assert tree.read(0.0)["tree_processes"] == 3
    stat(12, 1, 150, 1000)  # its parent has exited
    stat(13, 12, 50, 1000)
    (tmp_path / "11/stat").unlink()
    (tmp_path / "11").rmdir()
    fields = tree.read(1.0)
    assert fields["tree_processes"] == 3
    assert fields["tree_rss"] == 3000 * os.sysconf("SC_PAGE_SIZE")
    tree._next_scan = 0
    assert tree.read(1.0)["tree_processes"] == 3
    stat(12, 1, 0, 1000, start_time=6)  # an unrelated process with a reused pid
    stat(21, 13, 0, 1000)  # and the other way round, seen in the next full scan
    tree._next_scan = 0
    assert tree.read(1.0)["tree_processes"] == 3


def test_oom_kill_is_reported() -> None:
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if names == "memory"), None)
    base = Path("/sys/fs/cgroup/memory") if own is not None else Path("/sys/fs/cgroup")
    group = base / f"stoker-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if own is not None else "memory.max")
        limit.write_text(str(64 << 20))
    except OSError:
        if group.exists():
            group.rmdir()
        pytest.skip(f"making a cgroup is {NOT_ALLOWED}")
    try:
        script = f'echo $$ > {group}/cgroup.procs; exec {" ".join(command("sh", "-c"))} "$0"'
        hungry = f"{sys.executable} -c 'x = bytearray(500 << 20)'; exit $?"
        done = subprocess.run(["sh", "-c", script, hungry], capture_output=True, text=True, check=False, timeout=60)
        mark = exit_mark(done.stdout)
        assert (mark["code"], mark["oom"]) == (137, True), done
        assert "OOM" in mark["detail"]
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()


NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def test_pid_1_reaps_orphans() -> None:
    script = "(sh -c 'exit 0' &); (sleep 0.1 &); echo ready 0; sleep 0.7; echo zombies $(ps -e -o stat= | grep -c Z)"
    running = Running("sh", "-c", script, before=NAMESPACE)
    running.process.wait(60)
    assert "zombies 0" in running.lines()
    running.child = running.process.pid
    running.close()


def test_pid_1_forwards_signals() -> None:
    running = Running(sys.executable, "-c", CATCHER, before=NAMESPACE)
    (profiler_pid,) = _children(running.process.pid)
    running.child = running.process.pid  # the pid that it printed is that of the namespace
    try:
        os.kill(profiler_pid, signal.SIGTERM)
        assert eventually(lambda: running.received() == ["SIGTERM"])
        os.kill(_children(profiler_pid)[0], signal.SIGKILL)  # the detector, which is reaped like any other process
        assert eventually(lambda: len(_children(profiler_pid)) == 1)
        os.kill(profiler_pid, signal.SIGUSR2)
        assert running.process.wait(60) == 9
    finally:
        running.close()


def test_file_runs_alone_on_python_3_8() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert "stoker" not in imported
    newer = {"removeprefix", "removesuffix", "waitstatus_to_exitcode", "pidfd_open", "pairwise", "batched"}
    assert not newer & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_lines_have_the_format_of_the_recorder() -> None:
    assert (profiler.PREFIX, profiler.MAX_LINE_BYTES) == (PREFIX, MAX_LINE_BYTES)
    from stoker.telemetry.events import recorder

    code = "from stoker.telemetry import recorder; recorder().mark('exit', 'x')"
    recorded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    profiled = profile("true").stdout
    keys = [list(json.loads(line.removeprefix(PREFIX))) for line in (recorded, profiled)]
    assert keys[0] == keys[1][: len(keys[0])]
    assert recorder({}).rank == 0


def test_closed_stdout_does_not_stop_the_program() -> None:
    script = f"{' '.join(command('sh', '-c', every=0.1))} 'sleep 0.5; exit 6' | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", script], check=False, timeout=60).returncode == 6


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

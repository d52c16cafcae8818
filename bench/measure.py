"""Shared benchmark code: interleaved rounds, medians of ratios, tables and plots."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

RUN_TIMED = Path(__file__).with_name("run_timed.py")
STOKER = Path(sys.executable).with_name("stoker")
# Saturated colors for implementations with a target, pale ones for informational implementations.
OURS, PEERS = ("#c2410c", "#f0b490"), ("#64748b", "#b6c0cd")


@dataclass(frozen=True, kw_only=True)
class BenchContext:
    """Input of a benchmark: images in class folders, a fast directory to write to, and the number of rounds."""

    images: Path
    samples: int
    bytes: int
    work: Path
    rounds: int


class Timing(NamedTuple):
    """Duration of one timed run; the peak memory is measured for commands and scripts only."""

    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation of the benchmarked task; `cleanup` removes its output, outside of the timed part."""

    name: str
    run: Callable[[], Timing]
    cleanup: Callable[[], None] = lambda: None
    ours: bool = False
    informational: bool = False
    """Whether it is shown without a target."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A reported comparison: our implementation, the peer, and the target ratio, if any."""

    ours: str
    peer: str
    target: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A measured value and its upper bound."""

    what: str
    value: float
    bound: float
    unit: str


@dataclass(kw_only=True)
class BenchResult:
    """Result of one benchmark."""

    name: str
    title: str
    unit: str
    implementations: Sequence[Implementation]
    speeds: dict[str, list[float]]
    comparisons: Sequence[Comparison]
    limits: Sequence[Limit] = ()
    notes: Sequence[str] = ()

    def speed(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.speeds[name])

    def ratios(self, comparison: Comparison) -> list[float]:
        """Return our speed divided by the peer's, for each round."""
        ours, peer = self.speeds[comparison.ours], self.speeds[comparison.peer]
        return [a / b for a, b in zip(ours, peer, strict=True)]


def time_call(work: Callable[[], object]) -> Timing:
    """Time a call in this process, after a garbage collection."""
    gc.collect()
    start = time.perf_counter()
    work()
    return Timing(time.perf_counter() - start)


def time_command(*argv: str | Path) -> Timing:
    """Time a whole command, including startup, imports and exit."""
    words = [sys.executable, "-I", "-S", str(RUN_TIMED), *map(str, argv)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, argv))} failed with {done.returncode}: {done.stderr.strip()}")
    seconds, peak = done.stdout.split()
    return Timing(float(seconds), int(peak))


def time_script(script: str | Path, *args: str | Path) -> Timing:
    """Run a script in a new process and return the seconds that it prints, without its startup and imports.

    The script may print its peak memory in bytes after the seconds.
    """
    words = [sys.executable, str(script), *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed with {done.returncode}: {done.stderr.strip()}")
    seconds, *peak = done.stdout.split()
    return Timing(float(seconds), *map(int, peak))


def run_rounds(
    implementations: Sequence[Implementation], rounds: int, amount: float
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run every implementation once per round, after a warm-up round; return speeds and peak memory by name.

    Each round starts with another implementation, so that none always follows the same one.
    """
    speeds: dict[str, list[float]] = {implementation.name: [] for implementation in implementations}
    peaks: dict[str, int] = dict.fromkeys(speeds, 0)
    for number in range(rounds + 1):
        shift = number % len(implementations)
        for implementation in (*implementations[shift:], *implementations[:shift]):
            implementation.cleanup()
            timing = implementation.run()
            implementation.cleanup()
            peaks[implementation.name] = max(peaks[implementation.name], timing.peak_bytes)
            if number > 0:
                speeds[implementation.name].append(amount / timing.seconds)
        print(f"  {'warm-up' if number == 0 else f'round {number} of {rounds}'}", file=sys.stderr, flush=True)
    return speeds, peaks


class BackgroundLoad:
    """CPU usage of other processes during a measurement, which indicates how reliable the figures are."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Return the fraction of all CPU time used by neither this process nor its children."""
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, others / (time.monotonic() - self._start) / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    ticks = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def report(result: BenchResult) -> str:
    """Format the result of one benchmark as Markdown."""
    lines = [
        f"## {result.title}",
        "",
        f"| implementation | {result.unit} | lowest – highest |",
        "|---|---:|---:|",
    ]
    for implementation in result.implementations:
        speeds = result.speeds[implementation.name]
        name = implementation.name
        if implementation.ours and not implementation.informational:
            name = f"**{name}**"
        median = result.speed(implementation.name)
        lines.append(f"| {name} | {median:,.0f} | {min(speeds):,.0f} – {max(speeds):,.0f} |")
    lines += ["", "| ratio, median of the rounds | | lowest – highest | target |", "|---|---:|---:|---|"]
    for comparison in result.comparisons:
        ratios = result.ratios(comparison)
        ratio = statistics.median(ratios)
        what = f"{comparison.ours} / {comparison.peer}" + (f" ({comparison.note})" if comparison.note else "")
        outcome = "informational"
        if comparison.target is not None:
            outcome = f"target ≥ {comparison.target:g} ×: {'met' if ratio >= comparison.target else 'missed'}"
        lines.append(f"| {what} | {ratio:.2f} × | {min(ratios):.2f} – {max(ratios):.2f} | {outcome} |")
    for limit in result.limits:
        outcome = f"limit {limit.bound:,.0f} {limit.unit}: {'met' if limit.value <= limit.bound else 'missed'}"
        lines += ["", f"{limit.what}: {limit.value:,.0f} {limit.unit}. {outcome}."]
    if result.notes:
        lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines) + "\n"


def plot(result: BenchResult, path: Path) -> None:
    """Plot a result as horizontal bars with the range over the rounds; stoker in color, peers in gray."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
    from matplotlib.ticker import StrMethodFormatter

    names = [implementation.name for implementation in reversed(result.implementations)]
    values = [result.speed(name) for name in names]
    spread = [
        [value - min(result.speeds[name]) for name, value in zip(names, values, strict=True)],
        [max(result.speeds[name]) - value for name, value in zip(names, values, strict=True)],
    ]
    colors = [
        (OURS if implementation.ours else PEERS)[implementation.informational]
        for implementation in reversed(result.implementations)
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(names) + 1.3), layout="constrained")
    axes.barh(names, values, color=colors, height=0.62)
    axes.errorbar(values, names, xerr=spread, fmt="none", ecolor="#1e293b", elinewidth=1, capsize=3)
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.annotate(
            f"{value:,.0f}",
            (max(result.speeds[name]), row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    legend_colors = dict.fromkeys(reversed(colors))
    labels = {
        OURS[0]: "stoker",
        PEERS[0]: "peers",
        OURS[1]: "stoker, informational",
        PEERS[1]: "peers, informational",
    }
    handles = [Patch(color=color, label=labels[color]) for color in legend_colors]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    axes.set_title(result.title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(f"{result.unit}, median of {len(result.speeds[names[0]])} rounds (more is better)")
    axes.set_xlim(0, 1.12 * max(max(speeds) for speeds in result.speeds.values()))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e2e8f0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def machine() -> list[tuple[str, str]]:
    """Return the properties of the machine that affect the figures: cores, memory, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = [
        ("cores", f"{len(os.sched_getaffinity(0))} × {_processor()}"),
        ("memory", f"{memory:.0f} GiB"),
        ("system", f"{platform.system()} {platform.release()}"),
        ("Python", platform.python_version()),
    ]
    for package in ("stoker", "webdataset", "numpy"):
        facts.append((package, metadata.version(package)))
    for program in (["tar", "--version"], ["sha256sum", "--version"], ["openssl", "version"]):
        if output := _read_output(*program):
            facts.append((program[0], output.splitlines()[0]))
    if commit := _read_output("git", "-C", str(RUN_TIMED.parent), "rev-parse", "--short", "HEAD"):
        changed = _read_output(
            "git", "-C", str(RUN_TIMED.parent.parent), "status", "--porcelain", "--", "src", "native"
        )
        facts.append(("commit", commit + (", with uncommitted changes" if changed else "")))
    return facts


def _read_output(*argv: str) -> str:
    """Return the output of a program, or an empty string if it is missing or fails."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""What every subject shares: rounds taken in turn, medians of ratios, tables and plots."""

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

TIMED = Path(__file__).with_name("timed.py")
STOKER = Path(sys.executable).with_name("stoker")
# Ours and the peers', each strong, and pale for what is shown for information.
OURS, PEERS = ("#c2410c", "#f0b490"), ("#64748b", "#b6c0cd")


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What a subject is given: images in class folders, a fast place to write, and how many rounds to take."""

    images: Path
    samples: int
    bytes: int
    work: Path
    rounds: int


class Ran(NamedTuple):
    """What one timed act took; the memory is known of commands only."""

    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to do the work; `clean` undoes it, outside of the timed part."""

    name: str
    act: Callable[[], Ran]
    clean: Callable[[], None] = lambda: None
    ours: bool = False
    info: bool = False
    """Whether it is shown for information and carries no target."""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """A comparison to report: which of ours against which peer, and the ratio aimed at, if any."""

    ours: str
    peer: str
    target: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A figure that should stay below a bound."""

    what: str
    value: float
    bound: float
    unit: str


@dataclass(kw_only=True)
class Result:
    """One subject, measured."""

    name: str
    title: str
    unit: str
    contestants: Sequence[Contestant]
    speeds: dict[str, list[float]]
    versus: Sequence[Versus]
    limits: Sequence[Limit] = ()
    notes: Sequence[str] = ()

    def speed(self, name: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.speeds[name])

    def ratios(self, versus: Versus) -> list[float]:
        """Ours over the peer's, round by round."""
        return [a / b for a, b in zip(self.speeds[versus.ours], self.speeds[versus.peer], strict=True)]


def in_process(work: Callable[[], object]) -> Ran:
    """Time a call in this process; garbage of the one before is collected first."""
    gc.collect()
    start = time.perf_counter()
    work()
    return Ran(time.perf_counter() - start)


def command(*argv: str | Path) -> Ran:
    """Time a whole command: its start, its imports and its end."""
    words = [sys.executable, "-I", "-S", str(TIMED), *map(str, argv)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, argv))} failed with {done.returncode}: {done.stderr.strip()}")
    seconds, peak = done.stdout.split()
    return Ran(float(seconds), int(peak))


def call(script: str | Path, *args: str | Path) -> Ran:
    """Take the seconds that a script prints of its work alone, and its peak bytes if it prints those after them.

    In a fresh process, so that no import weighs on it.
    """
    words = [sys.executable, str(script), *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed with {done.returncode}: {done.stderr.strip()}")
    seconds, *peak = done.stdout.split()
    return Ran(float(seconds), *map(int, peak))


def take_turns(
    contestants: Sequence[Contestant], rounds: int, amount: float
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Let every contestant act once a round, after one round that does not count; return speeds and peaks.

    Each round starts with another contestant, so that none always follows the same one.
    """
    speeds: dict[str, list[float]] = {one.name: [] for one in contestants}
    peaks: dict[str, int] = {one.name: 0 for one in contestants}
    for number in range(rounds + 1):
        shift = number % len(contestants)
        for one in (*contestants[shift:], *contestants[:shift]):
            one.clean()
            ran = one.act()
            one.clean()
            peaks[one.name] = max(peaks[one.name], ran.peak_bytes)
            if number > 0:
                speeds[one.name].append(amount / ran.seconds)
        print(f"  {'warm-up' if number == 0 else f'round {number} of {rounds}'}", file=sys.stderr, flush=True)
    return speeds, peaks


class Neighbours:
    """How much of the machine others took while something was measured: figures of a busy machine are worth little."""

    def __init__(self) -> None:
        self._start, self._busy, self._mine = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """The part of all cores' time that was spent on neither this process nor its children."""
        others = _busy_seconds() - self._busy - (_own_seconds() - self._mine)
        return max(0.0, others / (time.monotonic() - self._start) / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    ticks = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def report(result: Result) -> str:
    """One subject as Markdown."""
    lines = [
        f"## {result.title}",
        "",
        f"| contestant | {result.unit} | lowest – highest |",
        "|---|---:|---:|",
    ]
    for one in result.contestants:
        taken = result.speeds[one.name]
        name = f"**{one.name}**" if one.ours and not one.info else one.name
        lines.append(f"| {name} | {result.speed(one.name):,.0f} | {min(taken):,.0f} – {max(taken):,.0f} |")
    lines += ["", "| ratio, median of the rounds | | lowest – highest | target |", "|---|---:|---:|---|"]
    for versus in result.versus:
        ratios = result.ratios(versus)
        middle = statistics.median(ratios)
        what = f"{versus.ours} / {versus.peer}" + (f" ({versus.note})" if versus.note else "")
        verdict = "for information"
        if versus.target is not None:
            verdict = f"target ≥ {versus.target:g} ×: {'met' if middle >= versus.target else 'missed'}"
        lines.append(f"| {what} | {middle:.2f} × | {min(ratios):.2f} – {max(ratios):.2f} | {verdict} |")
    for limit in result.limits:
        verdict = f"limit {limit.bound:,.0f} {limit.unit}: {'met' if limit.value <= limit.bound else 'missed'}"
        lines += ["", f"{limit.what}: {limit.value:,.0f} {limit.unit}. {verdict}."]
    if result.notes:
        lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines) + "\n"


def plot(result: Result, path: Path) -> None:
    """One subject as horizontal bars: ours in colour, each peer in grey, the range over the rounds as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
    from matplotlib.ticker import StrMethodFormatter

    names = [one.name for one in reversed(result.contestants)]
    values = [result.speed(name) for name in names]
    spread = [
        [value - min(result.speeds[name]) for name, value in zip(names, values, strict=True)],
        [max(result.speeds[name]) - value for name, value in zip(names, values, strict=True)],
    ]
    colours = [(OURS if one.ours else PEERS)[one.info] for one in reversed(result.contestants)]
    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(names) + 1.3), layout="constrained")
    axes.barh(names, values, color=colours, height=0.62)
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
    kinds = dict.fromkeys(reversed(colours))
    names_of = {
        OURS[0]: "stoker",
        PEERS[0]: "peers",
        OURS[1]: "stoker, for information",
        PEERS[1]: "peers, for information",
    }
    handles = [Patch(color=colour, label=names_of[colour]) for colour in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    axes.set_title(result.title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(f"{result.unit}, median of {len(result.speeds[names[0]])} rounds (more is better)")
    axes.set_xlim(0, 1.12 * max(max(taken) for taken in result.speeds.values()))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e2e8f0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def machine() -> list[tuple[str, str]]:
    """What the figures depend on: cores, memory, versions."""
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
        if said := _said(*program):
            facts.append((program[0], said.splitlines()[0]))
    if commit := _said("git", "-C", str(TIMED.parent), "rev-parse", "--short", "HEAD"):
        changed = _said("git", "-C", str(TIMED.parent.parent), "status", "--porcelain", "--", "src", "native")
        facts.append(("commit", commit + (", with changes" if changed else "")))
    return facts


def _said(*argv: str) -> str:
    """What a program prints, nothing when it is absent or fails."""
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

"""Run a fuzz target on many inputs in a child process, and find the input that breaks a limit.

Bad input may raise a StokerError and nothing else, and may cost little CPU time and memory. The child writes each input
to a file before it runs it, so that the input survives a crash of the interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StokerError
from tests.fuzz.mutation import mutate

MAX_CPU_S = 10
MAX_MEMORY = 300 << 20
ADDRESS_SPACE = 6 << 30
"""Ends the child before an allocation bug can disturb the machine."""


@dataclass(frozen=True, slots=True)
class Target:
    """Code under test, and inputs to start from."""

    run: Callable[[bytes], object]
    valid: Sequence[bytes]
    """Inputs that are accepted; fresh inputs are mutations of these and of the hostile ones."""
    hostile: Sequence[bytes]
    """Inputs that broke something once, or could."""
    tokens: Sequence[bytes] = ()
    """Words of the format, which mutations insert."""


def check_corpus(module: str, tmp_path: Path) -> None:
    """Run every known input of a target; fail with the first that breaks a limit."""
    _run_child(module, tmp_path, seed=0, seconds=0.0)


def check_fresh_inputs(module: str, tmp_path: Path, *, seed: int, seconds: float) -> None:
    """Run mutated inputs of a target for a while; fail with the first that breaks a limit."""
    _run_child(module, tmp_path, seed=seed, seconds=seconds)


def _run_child(module: str, tmp_path: Path, *, seed: int, seconds: float) -> None:
    current = tmp_path / "input"
    command = [sys.executable, "-m", "tests.fuzz.limits", module, str(current), str(seed), str(seconds)]
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    work = tmp_path / "work"  # for the files of the target
    work.mkdir()
    child = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
    if child.returncode == 0:
        outcome = json.loads(child.stdout.splitlines()[-1])
        assert outcome["inputs"] > 0
        return
    kept = current.read_bytes() if current.exists() else b""
    shown = kept if len(kept) < 400 else kept[:400] + b"..."
    raise AssertionError(
        f"{module}, seed {seed}, exit code {child.returncode}, input of {len(kept)} bytes {shown!r} in {current}:\n"
        f"{child.stdout[-2000:]}\n{child.stderr[-4000:]}"
    )


def _main(module: str, current: Path, seed: int, seconds: float) -> None:
    target: Target = importlib.import_module(module).TARGET
    for data in target.valid:
        target.run(data)  # a valid input that is rejected tests nothing; this also loads what the target imports
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.RLIM_INFINITY))
    inputs = _fresh_inputs(target, seed, seconds) if seconds else iter(target.hostile)
    count = 0
    for data in inputs:
        current.write_bytes(data)
        _run_limited(target.run, data)
        count += 1
    sys.stdout.write(json.dumps({"inputs": count}) + "\n")


def _fresh_inputs(target: Target, seed: int, seconds: float) -> Iterator[bytes]:
    source = random.Random(seed)
    pool = [*target.valid, *(data for data in target.hostile if len(data) < 1 << 16)]
    stop_at = time.monotonic() + seconds
    while time.monotonic() < stop_at:
        yield mutate(source.choice(pool), source, target.tokens)


def _run_limited(run: Callable[[bytes], object], data: bytes) -> None:
    """Run one input; exit with the reason if it breaks a limit. Too much CPU time ends the process with SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + MAX_CPU_S + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    reset_peak_memory()
    before = peak_memory()
    try:
        run(data)
    except StokerError:
        pass
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    grown = peak_memory() - before
    if grown > MAX_MEMORY:
        sys.exit(f"memory grew by {grown >> 20} MiB, limit {MAX_MEMORY >> 20} MiB")


def reset_peak_memory() -> None:
    """Reset the peak of the resident memory to what is used now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak of the resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))

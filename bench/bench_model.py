"""Benchmark the model server: requests per second and latency, with and without batching of concurrent requests."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench_serve import start_server
from measure import (
    STOKER,
    BenchContext,
    BenchResult,
    Comparison,
    Implementation,
    Limit,
    Timing,
    run_rounds,
    time_command,
)

if TYPE_CHECKING:
    from tests.support.post_load import PostLoadResult

BATCHED = "stoker model serve"
UNBATCHED = "stoker model serve, --max-batch-size 1"
CLIENTS, SECONDS = 64, 4.0
STRESS_CLIENTS, STRESS_SECONDS = 200, 30.0
SIZE = 64


def run(context: BenchContext) -> BenchResult:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.post_load import run_post_load

    checkpoints = train(context.work)
    image = next(path for path in sorted(context.images.rglob("*")) if path.is_file()).read_bytes()
    loads: dict[str, list[PostLoadResult]] = {BATCHED: [], UNBATCHED: []}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                start_server(STOKER, "model", "serve", checkpoints, "--port", "0", "--device", "cpu", *flags)
            )
            for name, flags in ((BATCHED, ()), (UNBATCHED, ("--max-batch-size", "1")))
        }

        def send(name: str, clients: int = CLIENTS, seconds: float = SECONDS) -> PostLoadResult:
            result = run_post_load(f"{servers[name].url}/classify", image, clients=clients, seconds=seconds)
            if not result.latencies_s:
                raise RuntimeError(f"{name}: {result.errors}")
            return result

        def measure(name: str) -> Timing:
            """Return the time of 1,000 requests."""
            loads[name].append(send(name))
            return Timing(1000 / loads[name][-1].requests_per_s)

        implementations = [
            Implementation(name=BATCHED, run=lambda: measure(BATCHED), ours=True),
            Implementation(name=UNBATCHED, run=lambda: measure(UNBATCHED), informational=True),
        ]
        speeds, _ = run_rounds(implementations, context.rounds, 1000)
        stress = send(BATCHED, STRESS_CLIENTS, STRESS_SECONDS)
    what = (
        f"Errors of `{BATCHED}` with {STRESS_CLIENTS} clients for {STRESS_SECONDS:g} s ({len(stress.latencies_s):,} "
        f"requests, p50 {stress.percentile_ms(50):,.0f} ms, p99 {stress.percentile_ms(99):,.0f} ms)"
    )
    return BenchResult(
        name="model",
        title=f"Classify images over HTTP with {CLIENTS} concurrent clients",
        unit="requests/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[Comparison(ours=BATCHED, peer=UNBATCHED, target=1.3)],
        limits=[Limit(what=what, value=stress.errors.total(), bound=0, unit="errors")],
        notes=[
            f"`POST /classify` with one JPEG of {len(image) / 1e3:,.0f} kB, a ResNet-18 with images of {SIZE} × {SIZE} "
            "pixels on the CPU; the clients run in one Python process on the same cores.",
            *(f"`{name}`: {format_latency(results[1:])}." for name, results in loads.items()),
        ],
    )


def train(work: Path) -> Path:
    """Train a ResNet-18 for one step and return the directory of its checkpoint."""
    shards, checkpoints = work / "model-shards", work / "model-checkpoints"
    source = "synthetic:samples=64,classes=10,size=64x64,val=8,seed=1"
    time_command(STOKER, "data", "convert", source, shards)
    flags = ["--train", shards / "train", "--model", "resnet18", "--size", str(SIZE), "--stem", "imagenet"]
    flags += ["--epochs", "1", "--batch-size", "32", "--num-batches", "1", "--checkpoint-dir", checkpoints]
    time_command(sys.executable, "-m", "stoker.trainers.torch_image", *flags)
    return checkpoints


def format_latency(results: list[PostLoadResult]) -> str:
    """Return the medians over the rounds, without the warm-up."""
    middle = len(results) // 2
    p50, p99 = (sorted(result.percentile_ms(percent) for result in results)[middle] for percent in (50, 99))
    return f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms"

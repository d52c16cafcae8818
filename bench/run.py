"""Benchmark stoker against its peers: `python bench/run.py [--only convert,read] [--rounds 5] [--out bench]`."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import dataset
from measure import BackgroundLoad, BenchContext, machine, plot, report

HERE = Path(__file__).resolve().parent
BENCHMARKS = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main() -> None:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    directory, description = dataset.choose_directory(options.samples)
    sections = []
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=directory) as folder:
        print(f"creating {options.samples:,} image files in {folder}", file=sys.stderr)
        images = dataset.create(Path(folder) / "images", options.samples)
        context = BenchContext(
            images=images.folder,
            samples=options.samples,
            bytes=images.bytes,
            work=Path(folder),
            rounds=options.rounds,
        )
        for name in options.only:
            print(f"measuring {name}", file=sys.stderr)
            background = BackgroundLoad()
            result = importlib.import_module(f"bench_{name}").run(context)
            share = f"CPU usage of other processes during the measurement: {background.share():.0%}."
            plot(result, options.out / f"{result.name}.png")
            print(f"\n{report(result)}\n{share}", flush=True)
            sections.append(f"{report(result)}\n{share}\n\n![{result.title}]({result.name}.png)\n")
    text = "\n".join([preface(images.origin, description, options.rounds), *sections])
    (options.out / "results.md").write_text(text, encoding="utf-8")
    print(f"wrote {options.out / 'results.md'} and the plots", file=sys.stderr)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark stoker against its peers.")
    parser.add_argument("--only", type=parse_names, default=BENCHMARKS, metavar="A,B", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=parse_positive, default=5, metavar="N")
    parser.add_argument(
        "--samples", type=parse_positive, default=12000, metavar="N", help="number of image files to create"
    )
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="directory for results.md and the plots")
    return parser.parse_args()


def parse_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise argparse.ArgumentTypeError(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    return names


def parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def preface(origin: str, directory: str, rounds: int) -> str:
    facts = [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("command", f"`{shlex.join(['python', *sys.argv])}`"),
        *machine(),
        ("data", origin),
        ("written to", directory),
    ]
    return "\n".join(
        [
            "# Benchmark results",
            "",
            f"Every implementation runs once per round, in {rounds} rounds after a warm-up round. Speeds are medians "
            "over the rounds.",
            "Ratios are computed within each round, and their median is reported. The page cache is warm. Outputs are "
            "removed between",
            "runs, outside of the timed part.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts),
            "",
        ]
    )


if __name__ == "__main__":
    main()

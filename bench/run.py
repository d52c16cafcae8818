"""Measures stoker beside its peers: `python bench/run.py [--only convert,read] [--rounds 5] [--out bench]`."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import dataset
from measure import Lab, Neighbours, machine, plot, report

HERE = Path(__file__).resolve().parent
SUBJECTS = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main() -> None:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    place, where = dataset.choose_place(options.samples)
    sections = []
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=place) as folder:
        print(f"making {options.samples:,} image files in {folder}", file=sys.stderr)
        images = dataset.make(Path(folder) / "images", options.samples)
        lab = Lab(
            images=images.folder,
            samples=options.samples,
            bytes=images.bytes,
            work=Path(folder),
            rounds=options.rounds,
        )
        for subject in options.only:
            print(f"measuring {subject}", file=sys.stderr)
            neighbours = Neighbours()
            result = importlib.import_module(f"bench_{subject}").run(lab)
            share = f"Meanwhile other processes took {neighbours.share():.0%} of the machine's cores."
            plot(result, options.out / f"{result.name}.png")
            print(f"\n{report(result)}\n{share}", flush=True)
            sections.append(f"{report(result)}\n{share}\n\n![{result.title}]({result.name}.png)\n")
    text = "\n".join([preface(images.origin, where, options.rounds), *sections])
    (options.out / "results.md").write_text(text, encoding="utf-8")
    print(f"saved in {options.out}", file=sys.stderr)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure stoker beside its peers.")
    parser.add_argument("--only", type=subjects, default=SUBJECTS, metavar="A,B", help=", ".join(SUBJECTS))
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--samples", type=positive, default=12000, metavar="N", help="image files to make")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="for results.md and the plots")
    return parser.parse_args()


def subjects(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SUBJECTS]:
        raise argparse.ArgumentTypeError(f"no subject {unknown[0]!r}: there are {', '.join(SUBJECTS)}")
    return names


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def preface(origin: str, where: str, rounds: int) -> str:
    facts = [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("command", f"`{shlex.join(['python', *sys.argv])}`"),
        *machine(),
        ("data", origin),
        ("written to", where),
    ]
    return "\n".join(
        [
            "# Measured beside the peers",
            "",
            f"Every contestant acts once a round, one after the other, in {rounds} rounds after one that does not "
            "count. Speeds are",
            "medians over the rounds; ratios are taken within each round, and the median of those is reported. "
            "Page cache warm;",
            "outputs are removed between the acts, outside of the timed part.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts),
            "",
        ]
    )


if __name__ == "__main__":
    main()

"""Write the logs of a large run, as its slots would: `python bench/event_logs.py RUNS --slots 1000 --hours 24`."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState, JobStatus, SlotStatus
from stoker.telemetry.events import PREFIX

BEGIN = 1_794_000_000.0
JOB = """name: large
program: {script: train.py}
topology: torchrun
workers: %d
"""


def write_run(
    runs: Path, slots: int, hours: float, *, every_s: float = 30.0, dead: int = 617, name: str = "large"
) -> RunFolder:
    """Write a run whose slots have one GPU each; slot `dead` stops reporting in the middle, and one is slow."""
    run = RunFolder(runs / f"{name}-20261106-210000-0000")
    run.logs.mkdir(parents=True)
    samples = int(hours * 3600 / every_s)
    for slot in range(slots):
        with open(run.logs / f"worker-{slot}.0.log", "w", buffering=1 << 20) as log:
            log.writelines(_lines(slot, samples // 2 if slot == dead else samples, every_s, is_slow=slot == dead + 1))
    (run.folder / "job.yaml").write_text(JOB % slots)
    (run.folder / "handle").write_text(f"local://{run.folder}\n")
    (run.folder / "version").write_text("2\n")
    states = tuple(SlotStatus(slot=f"worker/{slot}", state=JobState.SUCCEEDED, code=0) for slot in range(slots))
    end = BEGIN + hours * 3600
    run.write_status(JobStatus(state=JobState.SUCCEEDED, slots=states, began=BEGIN, ended=end))
    return run


def _lines(slot: int, samples: int, every_s: float, *, is_slow: bool) -> list[str]:
    chance = random.Random(slot)
    busy = 35.0 if is_slow else chance.uniform(85, 98)
    head = {"v": 1, "t": 0.0, "slot": f"worker/{slot}", "rank": 0, "attempt": 0, "pid": 100 + slot, "seq": 0}
    fields = {
        "k": "profile", "interval_s": every_s, "cpu_pct": 0.0, "iowait_pct": 1.2, "load1": 14.2, "cpus": 64,
        "machine": f"{slot:032x}", "cores": 64, "throttled_pct": 0.0, "tree_cpu_pct": 3120.5, "tree_rss": 41231686041,
        "tree_processes": 17, "mem_total": 540431955968, "mem_available": 402653184000, "oom_kills": 0,
        "net_rx_per_s": 0.0, "net_tx_per_s": 391832.4, "tcp_sent_per_s": 52310.4, "tcp_retransmits_per_s": 1.3,
        "disk_read_per_s": 183721.2, "disk_write_per_s": 9123.5, "cache_disk_free": 812345678912,
        "gpu": [{"i": 0, "util_pct": 0, "mem_used": 70123456512, "mem_total": 85899345920, "power_w": 0.0,
                 "temp_c": 61, "sm_mhz": 1980}],
    }  # fmt: skip
    template = PREFIX + json.dumps({**head, **fields}) + "\n"
    template = template.replace("%", "%%").replace('"t": 0.0', '"t": %.6f').replace('"seq": 0', '"seq": %d')
    template = template.replace('"cpu_pct": 0.0', '"cpu_pct": %.1f', 1).replace(
        '"net_rx_per_s": 0.0', '"net_rx_per_s": %.1f'
    )
    template = template.replace('"util_pct": 0', '"util_pct": %d').replace('"power_w": 0.0', '"power_w": %.1f')
    lines = []
    for number in range(samples):
        noise = chance.random()
        t = BEGIN + number * every_s + noise
        lines.append(
            template % (t, number, 48 + 8 * noise, 1.9e8 + 1e7 * noise, busy + 2 * noise, 6.2 * busy + 30 * noise)
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    options = parser.parse_args()
    print(write_run(options.runs, options.slots, options.hours).folder)


if __name__ == "__main__":
    main()

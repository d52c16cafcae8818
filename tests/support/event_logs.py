"""Logs of runs with events, written without running anything."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from stoker.telemetry.events import PREFIX


class EventLogs:
    """Writer of the logs of a small run, with plausible events, text, tags and torn lines, from a seed."""

    def __init__(self, logs: Path, seed: int = 0, slots: int = 3, t: float = 1000.0) -> None:
        self.logs, self.slots, self.random = logs, slots, random.Random(seed)
        self.t, self.step, self.attempt = t, 0, 0
        self.seq = itertools.count()
        logs.mkdir(parents=True, exist_ok=True)

    def write(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.t += 1 + self.random.random()
            self.step += 1
            if self.random.random() < 0.05:
                self.attempt, self.step = self.attempt + 1, max(0, self.step - 5)
            for slot in range(self.slots):
                self._write_slot(slot)

    def _write_slot(self, slot: int) -> None:
        number = self.random.random
        lines: list[dict[str, Any] | str] = [
            {"k": "heartbeat", "step": self.step, "shard": f"train-{slot}.tar", "sample": self.step * 3},
            {"k": "profile", "cpu_pct": 100 * number(), "mem_total": 1 << 34, "mem_available": int(2e10 * number()),
             "machine": f"m{slot}", "oom_kills": int(2 * number()), "cpus": 8, "tree_cpu_pct": 400 * number(),
             "gpu": [{"i": i, "util_pct": int(100 * number()), "mem_used": 10, "mem_total": 80} for i in range(2)]},
        ]  # fmt: skip
        for name in ("step", "compute", "loader_wait", "loader.decode"):
            lines.append(
                {"k": "span", "name": name, "start": self.t, "length": number(), "step": self.step, "count": 2}
            )
        if slot == 0:
            value = "NaN" if number() < 0.1 else 5 * number()
            lines.append({"k": "scalar", "name": "loss", "step": self.step, "value": value})
            if number() < 0.2:
                name = self.random.choice(["start", "checkpoint", "resume", "end"])
                lines.append({"k": "mark", "name": name, "detail": "é\ud800", "step": self.step, "total_steps": 500,
                              "global_batch": 64})  # fmt: skip
        lines.append(self.random.choice(["plain text", "[1,0]<stdout>: tagged", "\r 50%", f"{PREFIX}{{torn"]))
        with open(self.logs / f"worker-{slot}.{self.attempt}.log", "a") as file:
            for line in lines:
                file.write(f"{line if isinstance(line, str) else self._event(slot, line)}\n")

    def _event(self, slot: int, fields: dict[str, Any]) -> str:
        named = self.random.random() < 0.9
        head = {"v": 1, "t": round(self.t, 6), "slot": f"worker/{slot}" if named else "", "rank": slot}
        head |= {"attempt": self.attempt if named else 0, "pid": 7 + self.attempt, "seq": next(self.seq)}
        tag = "" if self.random.random() < 0.9 else "[1,2]<stdout>: "
        return f"{tag}{PREFIX}{json.dumps({**head, **fields})}"

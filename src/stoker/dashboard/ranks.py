"""Ranks and slots of a run for the dashboard: where each stands, and its machine."""

from __future__ import annotations

import math

import msgspec

from stoker.dashboard.runs import DashboardRun
from stoker.telemetry.segments import ProcessSteps

MAX_ROWS = 20_000
SILENT_S = 120.0


class RankRow(msgspec.Struct, frozen=True):
    """A rank of the newest attempt: its last heartbeat, and its own time per step without waiting for other ranks."""

    slot: str
    rank: int
    attempt: int
    pid: int
    t: float
    step: int | None
    shard: str
    sample: int
    own_step_s: float | None
    loader_wait: float | None
    """The share of its step time that it waits for input, from 0 to 1."""
    straggler: str
    """Why the others wait for it; empty if they do not."""


class SlotRow(msgspec.Struct, frozen=True):
    """A slot: its state, machine, and means of its profiles."""

    slot: str
    state: str
    code: int | None
    machine: str
    last_profile: float | None
    is_silent: bool
    """Whether it has stopped reporting profiles while other slots still do."""
    cpu_pct: float | None
    gpu_util_pct: float | None
    gpu_memory: float | None
    mem_available: float | None
    cache_disk_free: float | None


def list_ranks(run: DashboardRun) -> list[RankRow]:
    """Return the ranks of the newest attempt, by slot and rank."""
    with run.lock:
        analysis = run.index().analysis
        times = analysis.spans.by_rank()
        slow = {(one.slot, one.rank): f"{one.ratio:.2f}× the median: {one.part}" for one in analysis.stragglers()}
        newest: dict[tuple[str, int], ProcessSteps] = {}
        last = max((process.attempt for process in analysis.steps.processes), default=0)
        for process in analysis.steps.processes:
            if process.attempt == last:
                newest[process.slot, process.rank] = process
        rows = []
        for key, process in sorted(newest.items()):
            spent, at, point = times.get(key), process.position, process.last_point
            step = at.step if at else point[1] if point else None
            wait = spent.seconds.get("loader_wait", 0.0) / spent.total_s if spent and spent.total_s else None
            rows.append(
                RankRow(
                    slot=key[0],
                    rank=key[1],
                    attempt=process.attempt,
                    pid=process.pid,
                    t=at.t if at else _finite_time(process.last_report, process.began[0]),
                    step=None if step is None else int(step),
                    shard=at.shard if at else "",
                    sample=at.sample if at else -1,
                    own_step_s=spent.own_step_s if spent else None,
                    loader_wait=wait,
                    straggler=slow.get(key, ""),
                )
            )
        return rows[:MAX_ROWS]


def list_slots(run: DashboardRun, limit: int = MAX_ROWS) -> list[SlotRow]:
    """Return the slots of a run, with what is known of their machines: silent ones first, then the least busy."""
    with run.lock:
        machines, status = run.index().analysis.machines, run.status()
        states = {slot.slot: slot for slot in status.slots}
        newest = machines.last_t.max(initial=0.0)
        rows = []
        for slot in list(dict.fromkeys([*states, *machines.slots]))[:MAX_ROWS]:
            state, has_profile = states.get(slot), slot in machines.slots
            utilization = machines.gpu_utilization(slot) if has_profile else []
            last_profile = float(machines.last_t[machines.slots[slot]]) if has_profile else None
            rows.append(
                SlotRow(
                    slot=slot,
                    state=str(state.state) if state else "",
                    code=state.code if state else None,
                    machine=machines.machines.get(slot, ""),
                    last_profile=last_profile,
                    is_silent=last_profile is not None and bool(newest - last_profile > SILENT_S),
                    cpu_pct=machines.mean(slot, "cpu_pct") if has_profile else None,
                    gpu_util_pct=sum(utilization) / len(utilization) if utilization else None,
                    gpu_memory=machines.gpu_memory(slot) if utilization else None,
                    mem_available=machines.last(slot, "mem_available") if has_profile else None,
                    cache_disk_free=machines.last(slot, "cache_disk_free") if has_profile else None,
                )
            )
        return sorted(rows, key=_badness)[:limit]


def _badness(row: SlotRow) -> tuple[bool, float]:
    busy = row.cpu_pct if row.gpu_util_pct is None else row.gpu_util_pct
    return not row.is_silent, busy or 0.0


def _finite_time(t: float, default: float) -> float:
    return t if math.isfinite(t) else default

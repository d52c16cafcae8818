"""Remarks: what is unusual on the machines of a run, and in its loss. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from stoker.core.units import format_bytes
from stoker.telemetry.event_values import percent
from stoker.telemetry.machine_totals import MachineTotals
from stoker.telemetry.scalar_history import ScalarPoint

OTHERS_PCT = 25
"""From this share of a busy machine, processes outside the job are reported instead of the job."""

IDLE_CORE_PCT = 5
"""Below this usage, in percent of one core, a job that reports no steps does not need the CPUs."""

NETWORK_LOSS = "the network loses packets"


def find_remarks(totals: MachineTotals, losses: Sequence[ScalarPoint], *, has_steps: bool) -> list[str]:
    """Return what is unusual on the machines, and in the loss; `has_steps`: whether the run reports steps."""
    profiles = [_Profiles(slot, totals) for slot in sorted(totals.slots)]
    uses_network = len({slot.machine for slot in profiles if slot.machine}) > 1
    machines = [
        text
        for slot in profiles
        for text in (
            *_gpu_remarks(slot),
            *_memory_remarks(slot),
            *_network_remarks(slot, uses_network=uses_network),
            *_cpu_remarks(slot),
        )
    ]
    return [*machines, *_busy_remarks(profiles, has_steps=has_steps), *_loss_remarks(losses)]


class _Profiles:
    """The profiles of one slot."""

    def __init__(self, slot: str, totals: MachineTotals) -> None:
        self.where = f"on {slot}" if slot else "on this machine"
        self.machine = totals.machines.get(slot, "")
        """The machine that the slot runs on; empty if unknown."""
        self._slot, self._totals = slot, totals

    def mean(self, name: str) -> float | None:
        return self._totals.mean(self._slot, name)

    def last(self, name: str) -> float | None:
        return self._totals.last(self._slot, name)

    def peak(self, name: str) -> float:
        return self._totals.peak(self._slot, name)

    @property
    def cpu_pct(self) -> float:
        return self.mean("cpu_pct") or 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the CPUs are busy for another reason than a CPU quota, which is reported by itself."""
        throttled = self.mean("throttled_pct")
        return self.cpu_pct >= 95 and (throttled is None or throttled < 5)

    @property
    def gpu_utilization(self) -> list[float]:
        return self._totals.gpu_utilization(self._slot)

    @property
    def gpu_memory(self) -> float:
        return self._totals.gpu_memory(self._slot)


def _job_cpu_by_machine(slots: Sequence[_Profiles]) -> dict[str, float]:
    """Return the CPU usage of the job on each known machine, 100 for one core."""
    usage: dict[str, float] = {}
    for slot in slots:
        if slot.machine and (tree := slot.mean("tree_cpu_pct")) is not None:
            usage[slot.machine] = usage.get(slot.machine, 0.0) + tree
    return usage


def _gpu_remarks(profiles: _Profiles) -> list[str]:
    means, fullest = profiles.gpu_utilization, profiles.gpu_memory
    idle = [value for value in means if value < 50]
    remarks = []
    if idle:
        subject = "GPU" if len(means) == 1 else f"{len(idle)} of {len(means)} GPUs"
        remarks.append(f"{subject} {profiles.where}: utilization below 50% ({fmean(idle):.0f}%)")
    if fullest >= 0.95:
        remarks.append(f"GPU memory {profiles.where} is at {percent(min(1.0, fullest))}")
    return remarks


def _memory_remarks(profiles: _Profiles) -> list[str]:
    where = profiles.where
    limit, used = profiles.last("cgroup_mem_limit"), profiles.last("cgroup_mem_used")
    total, free = profiles.last("mem_total"), profiles.last("mem_available")
    remarks = []
    if limit and used is not None and used >= 0.9 * limit:
        remarks.append(f"memory {where} is at {percent(used / limit)} of its limit of {format_bytes(limit)}")
    elif total and free is not None and free < 0.05 * total:
        available = format_bytes(max(0.0, free))
        remarks.append(f"memory {where} is nearly full: {available} of {format_bytes(total)} available")
    if kills := profiles.peak("oom_kills"):
        remarks.append(f"the OOM killer killed {int(kills):,} process{'es' if kills > 1 else ''} {where}")
    return remarks


def _network_remarks(profiles: _Profiles, *, uses_network: bool) -> list[str]:
    """Return the share of lost packets; those of a job on one machine may be of other processes only."""
    sent, retransmitted = profiles.mean("tcp_sent_per_s"), profiles.mean("tcp_retransmits_per_s")
    if not sent or not retransmitted or retransmitted < 1 or retransmitted < 0.01 * sent:
        return []
    share = percent(min(1.0, retransmitted / sent))
    reason = f": {NETWORK_LOSS}" if uses_network else ", counting all processes on the machine"
    return [f"{share} of TCP segments are retransmitted {profiles.where}{reason}"]


def _cpu_remarks(profiles: _Profiles) -> list[str]:
    where, remarks = profiles.where, []
    iowait, throttled = profiles.mean("iowait_pct"), profiles.mean("throttled_pct")
    if iowait is not None and iowait >= 20:
        remarks.append(f"CPUs {where} wait for I/O {iowait:.0f}% of the time")
    cores, tree = profiles.last("cores"), profiles.mean("tree_cpu_pct")
    if throttled is not None and throttled >= 5:
        remarks.append(f"the CPU quota throttles the program {where} {throttled:.0f}% of the time")
    elif not profiles.is_busy and cores and tree is not None and tree >= 95 * cores:
        remarks.append(f"the program uses all of its {cores:g} cores {where}")
    return remarks


def _busy_remarks(slots: Sequence[_Profiles], *, has_steps: bool) -> list[str]:
    """Return who uses the CPUs of each busy machine, once for all slots on it."""
    job_cpu = _job_cpu_by_machine(slots)
    reported: set[str] = set()
    remarks = []
    for slot in slots:
        if not slot.is_busy or slot.machine in reported:
            continue
        reported |= {slot.machine} - {""}
        job_cpu_pct = job_cpu.get(slot.machine)
        if has_steps or job_cpu_pct is None or job_cpu_pct >= IDLE_CORE_PCT:
            remarks.append(_busy_remark(slot, job_cpu_pct))
    return remarks


def _busy_remark(profiles: _Profiles, job_cpu_pct: float | None) -> str:
    """Return who uses the CPUs of a busy machine: the job, or other processes."""
    busy, cpus = profiles.cpu_pct, profiles.last("cpus")
    if job_cpu_pct is not None and cpus:
        own = min(busy, job_cpu_pct / cpus)
        if busy - own >= OTHERS_PCT:
            return f"other processes are using {busy - own:.0f}% of the CPU time {profiles.where}, this job {own:.0f}%"
    return f"all CPUs {profiles.where} are busy ({busy:.0f}%)"


def _loss_remarks(losses: Sequence[ScalarPoint]) -> list[str]:
    if not losses or math.isfinite(losses[-1].value):
        return []
    first = losses[-1]
    for loss in reversed(losses):
        if math.isfinite(loss.value):
            break
        first = loss
    since = f" since step {first.step:,.0f}" if first.step is not None else ""
    return [f"the loss is NaN or infinite{since}"]

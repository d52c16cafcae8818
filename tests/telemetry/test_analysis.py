"""Analysis of events: verdicts, stragglers, progress, ETA, restarts and remarks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.telemetry.analysis import (
    CAUSES,
    CAUSES_ON_CPU,
    Restarts,
    eta,
    progress,
    remarks,
    restarts,
    stragglers,
    verdict,
)
from stoker.telemetry.events import KINDS, Event
from stoker.telemetry.remarks import NETWORK_LOSS

numbers = itertools.count()


def event(
    kind: str, t: float = 0.0, rank: int = 0, attempt: int = 0, pid: int = 0, slot: str = "", **fields: Any
) -> Event:
    slot = slot or f"worker/{rank // 2}"
    return Event(t=t, slot=slot, rank=rank, attempt=attempt, seq=next(numbers), kind=kind, fields=fields, pid=pid)


def spans(rank: int = 0, t: float = 10.0, count: int = 100, step: float | None = None, **parts: float) -> list[Event]:
    """The spans of one rank; `loader_decode` is `loader.decode`."""
    whole = sum(value for name, value in parts.items() if not name.startswith("loader_") or name == "loader_wait")
    named = {name if name == "loader_wait" else name.replace("loader_", "loader."): v for name, v in parts.items()}
    named["step"] = whole if step is None else step
    return [event("span", t, rank, name=name, start=0.0, length=v, step=9, count=count) for name, v in named.items()]


def test_input_bound_names_the_stage() -> None:
    found = verdict(
        spans(loader_wait=6.2, h2d=0.3, compute=3.5, loader_fetch=1.0, loader_read=1.0, loader_decode=7.1,
              loader_transform=0.9)
    )  # fmt: skip
    assert all(word in found.sentence for word in ("input-bound: 62%", "decode", "71%", "cores"))
    assert found.bound_by == "input"
    assert found.shares["loader_wait"] == pytest.approx(0.62)
    assert (found.stage, found.stage_share) == ("decode", pytest.approx(0.71))
    assert (found.steps, found.step_s) == (100, pytest.approx(0.1))


def test_input_bound_on_an_idle_machine_suggests_threads() -> None:
    idle = [event("profile", 10.0, cpu_pct=30.0), event("profile", 11.0, cpu_pct=50.0)]
    found = verdict([*spans(loader_wait=6.0, compute=4.0, loader_decode=5.0), *idle])
    assert all(word in found.sentence for word in ("input-bound: 60%", "decode", "100%", "40%", "threads"))


def test_input_bound_without_stages() -> None:
    found = verdict(spans(loader_wait=6.0, compute=4.0))
    assert found.sentence.startswith("input-bound: 60%")
    assert (found.stage, found.stage_share) == ("", 0.0)


def test_compute_bound() -> None:
    found = verdict(spans(loader_wait=0.2, h2d=0.1, compute=9.4, collective_wait=0.3))
    assert found.sentence == "compute-bound: 94% of step time is spent on compute and 2% waiting for input"
    assert verdict(spans(loader_wait=0.02, compute=9.98)).sentence.endswith("under 1% waiting for input")
    nothing_else = verdict(spans(loader_wait=0.0, compute=9.0)).sentence
    assert re.findall(r"\d+%", nothing_else) == ["100%", "0%"]
    with_ranks = verdict(spans(0, compute=8.5, collective_wait=1.5)).sentence
    assert with_ranks.startswith("compute-bound: ")
    assert re.findall(r"\d+%", with_ranks) == ["85%", "0%", "15%"]


def test_straggler_is_named_with_its_cause() -> None:
    ranks = [spans(rank, loader_wait=0.1, compute=5.0, collective_wait=4.0) for rank in range(3)]
    slow = spans(3, loader_wait=2.2, compute=5.0, collective_wait=0.1)
    found = verdict([*itertools.chain(*ranks), *slow])
    assert all(word in found.sentence for word in ("35%", "rank 3 (worker/1)", "1.4×", CAUSES["loader_wait"]))
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.slot, straggler.part) == (3, "worker/1", "loader_wait")
    assert straggler.ratio == pytest.approx(7.2 / 5.1)
    assert stragglers([*itertools.chain(*ranks), *slow]) == found.stragglers


def test_straggler_of_two_ranks_is_the_slower_one() -> None:
    found = verdict([*spans(0, compute=2.0, collective_wait=2.0), *spans(1, compute=4.0)])
    assert [(one.rank, one.ratio, one.part) for one in found.stragglers] == [(1, 2.0, "compute")]
    unexplained = verdict([*spans(0, compute=2.0, collective_wait=2.0), *spans(1, compute=2.0, step=4.0)])
    assert unexplained.stragglers[0].part == "rest"
    assert all(word in unexplained.sentence for word in ("rank 1 (worker/0)", "2.0×"))
    assert not any(cause in unexplained.sentence for cause in CAUSES.values())


def test_waiting_without_a_straggler() -> None:
    even = [*spans(0, compute=5.0, collective_wait=5.0), *spans(1, compute=5.1, collective_wait=4.9)]
    found = verdict(even)
    assert found.bound_by == "ranks"
    assert "network" in found.sentence
    assert found.stragglers == ()
    alone = verdict(spans(0, compute=5.0, collective_wait=5.0))
    assert alone.bound_by == "ranks"
    assert "50%" in alone.sentence
    assert "network" not in alone.sentence


def test_without_a_gpu_there_are_no_copies_to_a_device() -> None:
    cpu_machine, gpu_machine = event("profile", 10.0, cpu_pct=90.0), event("profile", 10.0, gpu=[{"i": 0}])
    bound = spans(h2d=4.0, compute=6.0)
    assert "device" not in verdict([*bound, cpu_machine]).sentence
    assert "device" in verdict([*bound, cpu_machine, gpu_machine]).sentence
    waiting = [span for rank in (1, 2) for span in spans(rank, compute=4.0, collective_wait=6.0)]
    slow = [*spans(0, h2d=6.0, compute=4.0), *waiting]
    assert verdict([*slow, cpu_machine]).sentence.endswith(CAUSES_ON_CPU["h2d"])
    assert verdict(slow).sentence.endswith(CAUSES["h2d"])


def test_copy_bound_and_overhead_bound() -> None:
    assert verdict(spans(h2d=4.0, compute=6.0)).bound_by == "copy"
    assert verdict(spans(h2d=4.0, compute=6.0)).sentence.startswith("copy-bound: 40%")
    found = verdict(spans(compute=2.0, step=10.0))
    assert found.bound_by == "rest"
    assert "80%" in found.sentence
    assert verdict(spans(compute=7.0, step=10.0)).bound_by == "compute"


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        ([], 0),
        ([event("heartbeat", step=5)], 0),
        (spans(count=1, compute=1.0), 1),
        (spans(count=4, compute=1.0), 4),
        (spans(count=100, compute=0.0), 0),
        (spans(count=0, compute=1.0), 0),
    ],
)
def test_too_few_steps_for_a_verdict(events: list[Event], steps: int) -> None:
    found = verdict(events)
    assert (found.steps, found.bound_by, found.stragglers) == (steps, "unknown", ())
    assert (str(steps) if steps else "no step") in found.sentence


def test_verdict_over_the_last_seconds() -> None:
    events = [*spans(t=100.0, loader_wait=9.0, compute=1.0), *spans(t=1000.0, loader_wait=1.0, compute=9.0)]
    assert verdict(events).bound_by == "input"
    assert verdict(events, last_s=600).bound_by == "compute"


def test_startup_is_left_out_of_a_longer_run() -> None:
    first = spans(t=2.0, loader_wait=30.0, compute=1.0)
    later = [one for t in (10.0, 20.0, 30.0) for one in spans(t=t, loader_wait=0.1, compute=9.0)]
    assert verdict([*first, *later]).bound_by == "compute"
    assert verdict([*later, *first]).bound_by == "compute"
    assert verdict(first).bound_by == "input"


def test_missing_step_spans_are_summed_up_from_their_parts() -> None:
    events = [one for one in spans(loader_wait=3.0, compute=7.0) if one.fields["name"] != "step"]
    assert verdict(events).shares["loader_wait"] == pytest.approx(0.3)
    assert verdict(events).steps == 100


def start(t: float, attempt: int = 0, pid: int = 0, rank: int = 0, **more: Any) -> Event:
    return event("mark", t, rank, attempt, pid, name="start", total_steps=1000, epochs=5, **more)


def heartbeats(begin: float, steps: Sequence[int], attempt: int = 0, pid: int = 0, rank: int = 0) -> list[Event]:
    return [event("heartbeat", begin + i, rank, attempt, pid, step=step) for i, step in enumerate(steps)]


def scalar(name: str, value: float, t: float, attempt: int = 0, step: int = 1) -> Event:
    return event("scalar", t, 0, attempt, name=name, value=value, step=step)


def test_progress() -> None:
    events = [
        start(0),
        *heartbeats(1, [0, 5, 9]),
        scalar("loss", 2.0, 2),
        scalar("loss", 1.5, 3),
        scalar("epoch", 0.4, 3),
    ]
    events += [scalar("samples_per_s", 900.0, 3), scalar("val_top1", 0.5, 3)]
    found = progress(reversed(events))
    assert (found.step, found.total_steps, found.epoch, found.epochs) == (9, 1000, 0.4, 5)
    assert (found.loss, found.samples_per_s, found.val_top1, found.ended) == (1.5, 900.0, 0.5, False)
    over = progress([*events, event("mark", 9, name="end", val_top1=0.97)])
    assert over.ended
    assert progress([event("mark", 9, name="end", val_top1=0.97)]).val_top1 == 0.97
    assert math.isnan(progress([scalar("loss", math.nan, 1)]).loss or 0.0)
    nothing = progress([])
    assert (nothing.step, nothing.total_steps, nothing.loss) == (None, None, None)


def test_progress_is_that_of_the_newest_attempt() -> None:
    events = [start(0), *heartbeats(0, range(100)), start(50, 1), event("mark", 51, 0, 1, name="resume", step=40)]
    found = progress([*events, event("mark", 200, name="end")])
    assert (found.attempt, found.step, found.ended) == (1, 40, False)
    assert progress([*events, *heartbeats(52, [41], attempt=1)]).step == 41


def test_progress_of_an_attempt_that_has_not_made_a_step() -> None:
    """A trainer sends a heartbeat of step 0 before it loads its checkpoint."""
    losses = [scalar("loss", 2.0, 30, step=30), scalar("loss", 1.5, 60, step=60)]
    before = [start(0), *heartbeats(0, range(100)), *losses]
    loading = [*before, *heartbeats(200, [0], attempt=1)]
    assert (progress(loading).attempt, progress(loading).step, progress(loading).loss) == (1, None, None)
    resumed = [*loading, start(201, 1), event("mark", 202, 0, 1, name="resume", step=40)]
    assert (progress(resumed).step, progress(resumed).loss) == (40, 2.0)
    stepping = [*resumed, *heartbeats(203, [41], attempt=1), scalar("loss", 1.9, 204, 1, step=41)]
    assert (progress(stepping).step, progress(stepping).loss) == (41, 1.9)
    assert progress(heartbeats(0, [0])).step == 0


def test_eta() -> None:
    events = [start(0), *heartbeats(10, range(0, 100, 10))]
    assert eta(events) == pytest.approx((1000 - 90) / 10)
    assert eta(events[1:]) is None  # the total is unknown
    assert eta(events[:2]) is None
    assert eta([]) is None
    assert eta([start(0)]) is None
    assert eta([*events, *heartbeats(20, [1000])]) == 0.0
    assert eta([*events, event("mark", 30, name="end")]) == 0.0


def test_eta_uses_the_pace_of_the_last_minutes() -> None:
    slow = heartbeats(0, range(600))
    fast = [event("heartbeat", 1000 + i, step=600 + i // 2) for i in range(400)]
    assert eta([start(0), *slow, *fast]) == pytest.approx(400, rel=0.05)
    hung = [event("heartbeat", 2000 + i, step=799) for i in range(0, 1000, 10)]
    assert eta([start(0), *slow, *fast, *hung]) is None
    rare = [event("heartbeat", t, step=step) for t, step in ((0, 0), (400, 1), (800, 2))]
    assert eta([start(0), *rare]) == pytest.approx(998 * 400)


def test_eta_counts_only_this_attempt() -> None:
    events = [start(0), *heartbeats(0, range(200)), start(1000, 1), *heartbeats(1000, range(100, 120), attempt=1)]
    assert eta(events) == pytest.approx(1000 - 119)


def test_eta_after_a_resume_does_not_count_from_step_0() -> None:
    """A rank may send a heartbeat before it has loaded its checkpoint, with or without a `resume` mark."""
    first = [start(0), *heartbeats(0, range(900))]
    again = [start(1000, 1), event("heartbeat", 1000, attempt=1, step=0)]
    mark = event("mark", 1004, 0, 1, name="resume", step=900)
    steps = [event("heartbeat", 1005 + step - 900, attempt=1, step=step) for step in range(900, 910)]
    for events in ([*first, *again, mark, *steps], [*first, *again, *steps], [*again, *steps]):
        assert eta(events) == pytest.approx(1000 - 909)
    assert eta([*first, *again, *steps[:1]]) is None


def test_cost_of_restarts() -> None:
    first = [start(0, pid=5), *heartbeats(0, range(101), pid=5)]
    assert restarts(first).count == 0
    again = [start(130, 1, 6), event("mark", 131, 0, 1, 6, name="resume", step=60)]
    again += heartbeats(135, [60, 60, 61, 62], attempt=1, pid=6)
    found = restarts([*again, *first])
    assert (found.count, found.idle_s, found.repeated_steps) == (1, 37.0, 2)
    more = restarts([*first, *again, *heartbeats(139, range(63, 150), attempt=1, pid=6)])
    assert more.repeated_steps == 40
    assert all(word in more.sentence for word in ("1 restart", "37s", "40 steps"))


def test_time_in_which_a_run_was_stopped_is_no_cost_of_a_restart() -> None:
    events = [*heartbeats(0, range(101), pid=5), *heartbeats(500, range(100, 201), attempt=1, pid=6)]
    assert restarts(events).idle_s == 401.0
    assert restarts(events, stopped={0}) == Restarts(0, 0.0, 0)
    events += heartbeats(610, range(190, 300), attempt=2, pid=7)
    assert restarts(events, stopped={0}) == Restarts(1, 11.0, 10)


def test_restarts_within_an_attempt_are_found_by_pids() -> None:
    def segment(begin: float, pid: int, steps: Sequence[int]) -> list[Event]:
        return [one for rank in (0, 1) for one in
                [start(begin, 0, pid + rank, rank), *heartbeats(begin + 1, steps, 0, pid + rank, rank)]]  # fmt: skip

    events = [*segment(0, 10, range(50)), *segment(100, 20, range(30, 80)), *segment(300, 30, range(70, 90))]
    late = event("heartbeat", 101.5, 1, 0, 11, step=49)  # a clock that differs
    found = restarts([*events, late])
    assert (found.count, found.repeated_steps) == (2, 19 + 9)
    assert found.idle_s == pytest.approx((102 - 50) + (302 - 150))


def test_container_restarts_with_the_same_pid() -> None:
    events = [start(0, pid=1), *heartbeats(1, range(10), pid=1), start(60, pid=1), *heartbeats(61, range(10), pid=1)]
    found = restarts(events)
    assert (found.count, found.repeated_steps) == (1, 9)


def test_overlapping_attempts_have_no_idle_time() -> None:
    events = [*heartbeats(0, range(100), pid=1), *heartbeats(50, range(60, 200), attempt=1, pid=2)]
    found = restarts(events)
    assert (found.count, found.idle_s, found.repeated_steps) == (1, 0.0, 39)


def test_remarks_on_machines() -> None:
    gpus = [{"i": 0, "util_pct": 20, "mem_used": 79, "mem_total": 80}, {"i": 1, "util_pct": 90}]
    fields = {
        "gpu": gpus, "cgroup_mem_limit": 16 << 30, "cgroup_mem_used": 15 << 30, "tcp_sent_per_s": 1000.0,
        "tcp_retransmits_per_s": 30.0, "iowait_pct": 35.0, "cpu_pct": 99.0, "oom_kills": 2, "cores": 8,
    }  # fmt: skip
    found = remarks([event("profile", t, slot="worker/0", **fields) for t in (1.0, 2.0)])
    expected = [
        ("1 of 2 GPUs", "20%"),
        ("GPU memory", "99%"),
        ("memory", "94%", "16 GiB"),
        ("OOM", "2 processes"),
        ("3%", "TCP"),
        ("I/O", "35%"),
        ("all CPUs", "99%"),
    ]
    assert len(found) == len(expected)
    for remark, words in zip(found, expected, strict=True):
        assert "worker/0" in remark
        assert all(word in remark for word in words), remark


def test_remarks_on_quotas_and_memory() -> None:
    for fields, words in (
        ({"cores": 4, "tree_cpu_pct": 395.0, "cpu_pct": 10.0}, ("program", "4 cores")),
        ({"throttled_pct": 40.0, "cpu_pct": 99.0}, ("quota", "40%")),
        ({"mem_total": 100 << 30, "mem_available": 1 << 30}, ("memory", "1 GiB of 100 GiB")),
        ({"gpu": [{"i": 0, "util_pct": 10}]}, ("GPU", "10%")),
    ):
        (remark,) = remarks([event("profile", slot="w/1", **fields)])
        assert all(word in remark for word in (*words, "w/1")), remark


@pytest.mark.parametrize(
    ("tree_cpu_pct", "words"),
    [([6.0], ("other processes", "96%", "3%")), ([60.0, 60.0], ("39%", "60%")), ([190.0], ("all CPUs", "99%")),
     ([95.0, 95.0], ("all CPUs", "99%"))],
)  # fmt: skip
def test_busy_machine_is_blamed_on_the_job_only_if_the_job_is_busy(
    tree_cpu_pct: list[float], words: tuple[str, ...]
) -> None:
    busy = {"cpu_pct": 99.0, "cores": 2, "cpus": 2, "machine": "a"}
    events = [
        event("profile", slot=f"worker/{index}", tree_cpu_pct=value, **busy) for index, value in enumerate(tree_cpu_pct)
    ]
    (remark,) = remarks(events)
    assert all(word in remark for word in (*words, "worker/0")), remark


def test_busy_machines_are_reported_once_each() -> None:
    busy = {"cpu_pct": 99.0, "cores": 2, "cpus": 2, "tree_cpu_pct": 10.0}
    events = [event("profile", slot=f"ps/{i}", machine=machine, **busy) for i, machine in enumerate("aabb")]
    first, second = remarks(events)
    assert "on ps/0" in first
    assert "on ps/2" in second


def test_busy_machine_is_no_remark_on_a_job_that_needs_no_cpu() -> None:
    busy = {"cpu_pct": 100.0, "cores": 2, "cpus": 2, "machine": "a"}
    events = [event("profile", slot=f"worker/{index}", tree_cpu_pct=0.4, **busy) for index in range(2)]
    assert remarks(events) == []
    assert "other processes" in remarks([*events, *spans(compute=1.0)])[0]  # a training that gets no CPU time


def test_network_of_a_job_on_one_machine_is_not_blamed() -> None:
    """The counters are those of the machine: the packets may be of other processes."""
    fields = {"tcp_sent_per_s": 1000.0, "tcp_retransmits_per_s": 30.0}
    for machines, is_blamed in (("a", False), ("aa", False), ("ab", True)):
        events = [event("profile", rank=2 * i, machine=machine, **fields) for i, machine in enumerate(machines)]
        found = remarks(events)
        assert len(found) == len(machines)
        assert all("3%" in remark and (NETWORK_LOSS in remark) == is_blamed for remark in found)


def test_healthy_machine_has_no_remarks() -> None:
    fields = {"gpu": [{"i": 0, "util_pct": 97, "mem_used": 40, "mem_total": 80}], "cpu_pct": 60.0, "iowait_pct": 1.0,
              "mem_total": 100, "mem_available": 50, "tcp_sent_per_s": 1000.0, "tcp_retransmits_per_s": 0.1,
              "oom_kills": 0, "cores": 8, "tree_cpu_pct": 300.0, "throttled_pct": 0.0}  # fmt: skip
    assert remarks([event("profile", **fields)]) == []
    assert remarks([]) == []


def test_nonfinite_loss_is_reported() -> None:
    def loss(step: int, value: float) -> Event:
        return event("scalar", float(step), name="loss", value=value, step=step)

    (remark,) = remarks([loss(1, 2.0), loss(2, math.nan), loss(3, math.inf)])
    assert "loss" in remark
    assert remark.endswith("step 2")
    assert remarks([loss(1, math.nan), loss(2, 1.0)]) == []


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
gpu_rows = st.lists(
    st.dictionaries(st.sampled_from(["i", "util_pct", "mem_used", "mem_total"]), values) | values, max_size=3
)
names = st.sampled_from(
    ["step", "loader_wait", "h2d", "compute", "collective_wait", "loader.decode", "loader.read", "start", "resume",
     "end", "loss", "epoch", "val_top1", "samples_per_s"]
)  # fmt: skip
some_fields = st.fixed_dictionaries({}, optional={
    "name": names | values, "length": values | st.floats(0, 100), "count": values | st.integers(1, 50),
    "step": values | st.integers(0, 1000), "value": values, "total_steps": values | st.integers(0, 1000),
    "gpu": gpu_rows, "epochs": values, "cpu_pct": values, "cores": values, "cpus": values, "machine": values,
    "tree_cpu_pct": values, "mem_total": values,
    "mem_available": values, "cgroup_mem_limit": values, "cgroup_mem_used": values, "iowait_pct": values,
    "tcp_sent_per_s": values, "tcp_retransmits_per_s": values, "oom_kills": values, "throttled_pct": values,
})  # fmt: skip
any_events = st.lists(
    st.builds(
        Event,
        t=st.floats(0, 1e4) | st.floats(allow_nan=False, allow_infinity=False),
        slot=st.sampled_from(["", "worker/0", "worker/1"]),
        rank=st.integers(-1, 3),
        attempt=st.integers(-1, 2),
        seq=st.integers(),
        kind=st.sampled_from(KINDS) | st.text(max_size=3),
        fields=some_fields,
        pid=st.integers(0, 2),
    ),
    max_size=25,
)


@settings(max_examples=100)
@given(any_events, st.none() | st.floats())
def test_any_events_are_accepted(events: list[Event], last_s: float | None) -> None:
    found = verdict(events, last_s=last_s)
    assert found.sentence
    assert found.bound_by in ("compute", "input", "copy", "ranks", "rest", "unknown")
    if found.shares:
        assert sum(found.shares.values()) == pytest.approx(1, abs=1e-6)
        assert all(0 <= share <= 1 + 1e-9 for share in found.shares.values())
    assert all(one.ratio >= 1 for one in stragglers(events, last_s=last_s))
    assert all(isinstance(text, str) for text in remarks(events, last_s=last_s))
    progress(events)
    remaining_s = eta(events)
    assert remaining_s is None or remaining_s >= 0
    cost = restarts(events)
    assert cost.idle_s >= 0
    assert cost.repeated_steps >= 0
    assert cost.sentence

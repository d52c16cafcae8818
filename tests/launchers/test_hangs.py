"""Hangs: the rank that the others wait for, from stacks as faulthandler prints them."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.jobs.topology import Slot
from stoker.launchers.hangs import SilentRank, StackDump, describe_hang, find_collective, main_stacks

TORCH = "/venv/lib/python3.11/site-packages/torch"
ALL_REDUCE = f"""\
Thread 0x00007f13a0000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007fb043480b80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 11 in train
  File "/home/me/train.py", line 12 in <module>
""".splitlines()
BACKWARD = f"""\
Current thread 0x00007fb043480b80 (most recent call first):
  File "{TORCH}/autograd/graph.py", line 865 in _engine_run_backward
  File "{TORCH}/_tensor.py", line 648 in backward
  File "/home/me/train.py", line 10 in train
""".splitlines()
SLEEP = """\
Current thread 0x00007f13a2bd9b80 (most recent call first):
  File "/home/me/data.py", line 20 in load
  File "/home/me/train.py", line 9 in train
""".splitlines()
FIRST, SECOND = Slot("worker", 0), Slot("worker", 1)


def rank(number: int, slot: Slot = FIRST, step: int = 7, shard: str = "") -> SilentRank:
    return SilentRank(slot, number, step, shard)


def describe(silent: Sequence[SilentRank], *stacks: Sequence[str]) -> tuple[str, Slot]:
    """Describe the hang of ranks with these stacks."""
    dumps = [StackDump((one,), lines) for one, lines in zip(silent, stacks, strict=False)]
    return describe_hang(silent, dumps, 60, lambda *_: "")


@pytest.mark.parametrize("waiting", [ALL_REDUCE, BACKWARD])
def test_rank_outside_the_collective_is_named(waiting: Sequence[str]) -> None:
    message, slot = describe([rank(0), rank(1), rank(2, SECOND), rank(3, SECOND)], waiting, waiting, waiting, SLEEP)
    assert message.startswith("worker/1 (rank 3) hung at step 7: ")
    assert "1m" in message
    assert "data.py:20 in load" in message
    assert "ranks 0-2 " in message
    assert slot == SECOND


def test_every_silent_rank_is_named_if_none_stands_out() -> None:
    ranks = [rank(0), rank(1), rank(2, SECOND), rank(4, SECOND)]
    for stacks in ([SLEEP] * 4, [ALL_REDUCE] * 4, []):
        message, slot = describe(ranks, *stacks)
        assert message.startswith("worker/0 (ranks 0-1), worker/1 (ranks 2, 4) hung at step 7: ")
        assert ("all_reduce" in message) == (stacks == [ALL_REDUCE] * 4)
        assert slot == FIRST


def test_waiting_for_a_rank_that_is_not_known() -> None:
    """Only rank 0 sends heartbeats and has a handler for SIGUSR1."""
    message, _ = describe([rank(0)], ALL_REDUCE)
    assert message.startswith("worker/0 (rank 0) hung at step 7: ")
    assert "waiting for another rank in all_reduce" in message


def test_rank_without_a_heartbeat_can_be_the_one() -> None:
    dumps = [StackDump((rank(0),), ALL_REDUCE), StackDump((SilentRank(FIRST, 1),), SLEEP)]
    message, _ = describe_hang([rank(0)], dumps, 60, lambda *_: "")
    assert message.startswith("worker/0 (rank 1) hung before its first heartbeat: ")


def test_ranks_of_a_remote_slot_share_a_dump() -> None:
    silent = [rank(0), rank(1), rank(2, SECOND), rank(3, SECOND)]
    dumps = [StackDump(tuple(silent[:2]), [*ALL_REDUCE, *ALL_REDUCE]), StackDump(tuple(silent[2:]), ALL_REDUCE + SLEEP)]
    message, _ = describe_hang(silent, dumps, 60, lambda *_: "")
    assert message.startswith("worker/1 (ranks 2-3) hung at step 7: ")


def test_position_is_named_as_far_as_ranks_agree() -> None:
    assert " hung at step 7 in a.tar: " in describe([rank(0, shard="a.tar"), rank(1, shard="a.tar")])[0]
    assert " hung at step 7: " in describe([rank(0, shard="a.tar"), rank(1, shard="b.tar")])[0]
    assert " hung at steps 6 to 7: " in describe([rank(0, step=6), rank(1)])[0]


def test_main_thread_without_a_current_thread_is_the_last() -> None:
    lines = [line.replace("Current thread", "Thread") for line in ALL_REDUCE]
    (stack,) = main_stacks(lines)
    assert stack[0].function == "all_reduce"
    assert main_stacks(["text", '  File "x", line 1 in y', "Current thread 0x1 (most recent call first):"]) == []


@pytest.mark.parametrize(
    ("code", "operation"),
    [
        ("comm.Allreduce(a, b)", "Allreduce"),
        ("MPI.COMM_WORLD.Barrier()", "Barrier"),
        ("work.wait()", "wait"),
        ("time.sleep(1000)", ""),
        ("batch = next(batches)", ""),
    ],
)
def test_call_into_c_is_found_in_the_source(code: str, operation: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import x\n{code}\n")
    lines = ["Current thread 0x1 (most recent call first):", f'  File "{file}", line 2 in <module>']
    assert find_collective(main_stacks(lines)[0], linecache.getline) == operation

"""Hangs: the rank that the others wait for, from stacks as faulthandler prints them."""

from __future__ import annotations

import linecache
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.jobs.topology import Slot
from stoker.launchers.supervise.hangs import Frame, RankPosition, StackDump, describe_hang, find_collective, main_stacks
from tests.support.waiting import wait_until

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


def rank(number: int, slot: Slot = FIRST, step: int = 7, shard: str = "") -> RankPosition:
    return RankPosition(slot, number, step, shard)


def describe(silent: Sequence[RankPosition], *stacks: Sequence[str]) -> tuple[str, Slot]:
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
    dumps = [StackDump((rank(0),), ALL_REDUCE), StackDump((RankPosition(FIRST, 1),), SLEEP)]
    message, _ = describe_hang([rank(0)], dumps, 60, lambda *_: "")
    assert message.startswith("worker/0 (rank 1) hung before its first heartbeat: ")


def test_rank_that_sends_heartbeats_is_waited_for_but_has_not_hung() -> None:
    """Rank 1 waits in a barrier while rank 0 validates."""
    dumps = [StackDump((rank(0, step=8),), SLEEP), StackDump((rank(1, SECOND),), ALL_REDUCE)]
    message, slot = describe_hang([rank(1, SECOND)], dumps, 60, lambda *_: "")
    assert message.startswith("worker/1 (rank 1) hung at step 7: ")
    assert "all_reduce for rank 0" in message
    assert "data.py:20 in load" in message
    assert slot == SECOND


def test_place_of_a_rank_that_sends_heartbeats_is_not_that_of_the_hang() -> None:
    message, _ = describe_hang([rank(1)], [StackDump((rank(0),), SLEEP)], 60, lambda *_: "")
    assert message.startswith("worker/0 (rank 1) hung at step 7: ")
    assert "data.py" not in message


def test_ranks_of_a_remote_slot_share_a_dump() -> None:
    silent = [rank(0), rank(1), rank(2, SECOND), rank(3, SECOND)]
    dumps = [StackDump(tuple(silent[:2]), [*ALL_REDUCE, *ALL_REDUCE]), StackDump(tuple(silent[2:]), ALL_REDUCE + SLEEP)]
    message, _ = describe_hang(silent, dumps, 60, lambda *_: "")
    assert message.startswith("worker/1 (ranks 2-3) hung at step 7: ")


def test_rank_in_a_download_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    """The stack ends in the standard library, in a line that calls `recv_into`."""
    program = "import faulthandler, signal, sys, urllib.request; faulthandler.register(signal.SIGUSR1)\n"
    program += "urllib.request.urlopen(sys.argv[1])"
    dump = tmp_path / "stderr"

    def innermost_frame() -> Frame:
        process.send_signal(signal.SIGUSR1)
        stacks = main_stacks(dump.read_text().splitlines())
        return stacks[-1][0] if stacks else Frame("", 0, "")

    with socket.create_server(("127.0.0.1", 0)) as server, dump.open("w") as stderr:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with subprocess.Popen([sys.executable, "-c", program, url], stderr=stderr) as process:
            connection, _ = server.accept()  # its handler of SIGUSR1 is in place
            with connection:
                wait_until(lambda: innermost_frame().function == "readinto")
                process.kill()
    stack = main_stacks(dump.read_text().splitlines())[-1]
    assert "recv_into(" in linecache.getline(stack[0].file, stack[0].line)
    assert find_collective(stack, linecache.getline) == ""


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
        ("total = self.comm.allreduce(loss, op=MPI.SUM)", "allreduce"),
        ("node_comm.Bcast(weights, root=0)", "Bcast"),
        ("work.wait()", "wait"),
        ("MPI.Request.Waitall(requests)", "Waitall"),
        ("data = sock.recv(1 << 20)", ""),
        ("total = functools.reduce(operator.add, losses)", ""),
        ("picked = logits.gather(1, labels)", ""),
        ("target.scatter_(1, labels, 1.0)", ""),
        ("await asyncio.gather(*downloads)", ""),
        ("process.wait()", ""),
        ("time.sleep(1000)", ""),
        ("batch = next(batches)", ""),
    ],
)
def test_call_into_c_is_found_in_the_source(code: str, operation: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import x\n{code}\n")
    lines = ["Current thread 0x1 (most recent call first):", f'  File "{file}", line 2 in <module>']
    assert find_collective(main_stacks(lines)[0], linecache.getline) == operation

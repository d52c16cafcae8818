"""Describe a hang from the stacks of all ranks: which are silent, and which one the others wait for. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.core.text import join_some
from stoker.core.units import format_duration
from stoker.jobs.topology import Slot

_THREAD = re.compile(r"(?P<current>Current thread 0x|Stack \(most recent call first\))|Thread 0x")
_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
# Libraries that wait for other ranks in their own Python code.
_COLLECTIVE_FILE = re.compile(
    r"(?:^|/)(?:torch/distributed/(?!elastic/)|torch/nn/parallel/distributed\.py|horovod/|deepspeed/comm/)"
)
# Files whose calls into C wait for something else than ranks: a socket, a lock, a child process.
_STANDARD_LIBRARY_FILE = re.compile(r"^<frozen |/lib(?:64)?/python3\.\d+t?/(?!(?:site|dist)-packages/)")
# A call into C that waits for other ranks: the innermost Python frame is that of the caller. These are calls of a
# communicator of mpi4py, and of what a non-blocking operation returns, by the names that its documentation uses.
_COLLECTIVE_CALL = re.compile(
    r"\b(?:\w+_)?(?:inter|intra)?comm(?:_\w+)?\.(?P<operation>"
    r"(?:all)?(?:reduce|gather|scatter|toall)\w*|barrier|bcast|(?:ex)?scan|s?send|(?:m|send)?recv\w*|m?probe|split|dup)\("
    r"|\b(?:work|handle|req|request)s?\.(?P<wait>wait(?:all|any|some)?)\(",
    re.IGNORECASE,
)
_BACKWARD = "_engine_run_backward"
"""Where autograd runs, and with DDP the all-reduce of gradients."""
_WRAPPER = "wrapper"

RankKey = tuple[Slot, int]
SourceReader = Callable[[str, int], str]
"""Returns a line of a source file; empty if it cannot be read."""


class Frame(NamedTuple):
    """A frame of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is in the training: its last step, -1 before its first heartbeat, and the shard it was reading."""

    slot: Slot
    rank: int
    step: int = -1
    shard: str = ""

    @property
    def key(self) -> RankKey:
        """The slot and the rank."""
        return self.slot, self.rank


@dataclass(frozen=True, slots=True)
class StackDump:
    """What processes printed on SIGUSR1: one rank, or all ranks of a remote slot, which share a log."""

    ranks: tuple[RankPosition, ...]
    lines: Sequence[str]


class Hang(NamedTuple):
    """A hang in one sentence, and the slot whose log shows it."""

    message: str
    slot: Slot


def describe_hang(
    silent: Sequence[RankPosition], dumps: Iterable[StackDump], hang_after_s: float, read_source: SourceReader
) -> Hang:
    """Return which ranks hang: those outside a collective if others wait in one, otherwise all silent ranks."""
    waiting: dict[RankKey, str] = {}
    elsewhere: list[tuple[RankPosition, Frame]] = []
    for dump in dumps:
        stacks = main_stacks(dump.lines)
        operations = [find_collective(stack, read_source) for stack in stacks]
        for rank in dump.ranks if stacks else ():
            # The stacks of several ranks in one log cannot be told apart: each of them may be the one outside.
            if all(operations):
                waiting[rank.key] = operations[0]
            else:
                elsewhere.append((rank, stacks[operations.index("")][0]))
    silent_keys = {rank.key for rank in silent}
    stuck = [(rank, frame) for rank, frame in elsewhere if rank.key in silent_keys or rank.step < 0]
    hung = [rank for rank, _ in stuck] if stuck and waiting else list(silent)
    details = _format_details(waiting, stuck, elsewhere)
    reason = f"no heartbeat for {format_duration(hang_after_s)}{details}"
    return Hang(f"{_format_subjects(hung)} hung {_format_position(hung)}: {reason}", hung[0].slot)


def _format_details(
    waiting: Mapping[RankKey, str],
    stuck: Sequence[tuple[RankPosition, Frame]],
    elsewhere: Sequence[tuple[RankPosition, Frame]],
) -> str:
    """Return where the hung ranks are: `stuck` are the silent ones of those that are not in a collective."""
    if not waiting:
        return f"; at {stuck[0][1]}" if len(stuck) == 1 else ""
    operations = " and ".join(dict.fromkeys(waiting.values()))
    if stuck:
        verb = "is waiting" if len(waiting) == 1 else "are waiting"
        return f"; at {stuck[0][1]}, while {_format_ranks([rank for _, rank in waiting])} {verb} in {operations}"
    if elsewhere:
        awaited = _format_ranks([rank.rank for rank, _ in elsewhere])
        verb = "is" if len(elsewhere) == 1 else "are"
        where = f"which {verb} still sending heartbeats and {verb} at {elsewhere[0][1]}"
        return f"; waiting in {operations} for {awaited}, {where}"
    return f"; waiting for another rank in {operations}"


def main_stacks(lines: Iterable[str]) -> list[list[Frame]]:
    """Return the stacks of main threads in the output of faulthandler, innermost frame first."""
    stacks: list[tuple[bool, list[Frame]]] = []
    for line in lines:
        if thread := _THREAD.match(line):
            stacks.append((thread["current"] is not None, []))
        elif stacks and (frame := _FRAME.fullmatch(line)):
            stacks[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    known = [(is_current, frames) for is_current, frames in stacks if frames]
    # The kernel delivers a signal to the main thread, unless it blocks the signal; it is listed last.
    return [frames for is_current, frames in known if is_current] or [frames for _, frames in known[-1:]]


def find_collective(stack: Sequence[Frame], read_source: SourceReader) -> str:
    """Return the operation in which a stack waits for other ranks; empty if it does not."""
    if stack[0].function == _BACKWARD:
        return "backward"
    names = []
    for frame in stack:
        if not _COLLECTIVE_FILE.search(frame.file):
            break
        names.append(frame.function)
    if names:
        return next((name for name in reversed(names) if name != _WRAPPER), names[-1])
    if _STANDARD_LIBRARY_FILE.search(stack[0].file):
        return ""
    call = _COLLECTIVE_CALL.search(read_source(stack[0].file, stack[0].line))
    return call["operation"] or call["wait"] if call else ""


def _format_subjects(ranks: Sequence[RankPosition]) -> str:
    """Return the ranks by slot: `worker/0 (ranks 0-3), worker/1 (rank 4)`."""
    by_slot: dict[Slot, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.key):
        by_slot.setdefault(rank.slot, []).append(rank.rank)
    return join_some([f"{slot} ({_format_ranks(numbers)})" for slot, numbers in by_slot.items()])


def _format_ranks(numbers: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank {texts[0]}" if texts and spans[0][0] == spans[-1][1] else f"ranks {join_some(texts)}"


def _format_position(ranks: Sequence[RankPosition]) -> str:
    """Return where the ranks are in the training, as far as they agree."""
    steps = sorted({rank.step for rank in ranks})
    if steps[-1] < 0:
        return "before its first heartbeat"
    text = f"at step {steps[0]}" if len(steps) == 1 else f"at steps {max(0, steps[0])} to {steps[-1]}"
    shards = {rank.shard for rank in ranks}
    return f"{text} in {shards.pop()}" if len(shards) == 1 and "" not in shards else text

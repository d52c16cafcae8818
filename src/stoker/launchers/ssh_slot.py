"""One slot on a host, as a process here: carries its output, its signals and its exit code, and tells when it is lost.

The supervisor starts it in the place of the program. It talks to the agent through `ssh`; when it ends, by whatever
means, the agent's standard input ends, and with it all that runs there.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, Any, NoReturn

from stoker.core.processes import Process, start
from stoker.errors import MissingError
from stoker.jobs.runs import Run
from stoker.jobs.topology import Command, Slot
from stoker.launchers import ssh_agent
from stoker.launchers.causes import LOST, TAIL_BYTES
from stoker.launchers.ssh_hosts import Frames, agent_argv, agent_code, meaning
from stoker.launchers.ssh_plan import SshPlan, read_ssh_plan
from stoker.telemetry.reader import read_log

POLL_S = 0.1
LAST_S = 5.0
"""After the time for a last checkpoint: for the end to be told."""


class Line:
    """The line to the agent of one slot."""

    def __init__(self, run: Run, name: str, plan: SshPlan) -> None:
        """Take the slot of a name; `setup@host` is what prepares a host."""
        self._run, self._name, self._plan = run, name, plan
        kind, _, host = name.partition("@")
        self.host = host or plan.hosts[name]
        self._place = plan.places[self.host]
        setup = Command(("sh", "-c", plan.setup or ""), {}, self._place.workdir)
        self._command = setup if host else plan.slots[kind]
        self._attempt = os.environ.get("STOKER_ATTEMPT", "0")
        self._ended_line = True
        self._ends = self._ends_told = 0
        self._wants_stacks = False

    def listen(self) -> None:
        """Take signals for wishes, which the agent carries out."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGUSR1, self._on_stacks)

    def carry(self) -> int:
        """Run the slot there to its end; give its exit code, negative for the signal that ended it."""
        argv = agent_argv(self._plan.client.argv(), self.host, self._place.python, self._run.id)
        ours, theirs = os.pipe()
        back, forth = os.pipe()
        with TemporaryFile() as said:
            ssh = start(argv, stdin=ours, stdout=forth, stderr=said, dies_with_us=True)
            os.close(ours)
            os.close(forth)
            try:
                return self._talk(theirs, back)
            except _Lost as lost:
                self._say(lost.why or _why(self.host, _code(ssh), _text(said)))
                return LOST
            finally:
                os.close(theirs)
                ssh.end(0)

    def _talk(self, to: int, back: int) -> int:
        frames, heard, spoken = Frames(), time.monotonic(), time.monotonic()
        _write(to, agent_code() + json.dumps(self._request()).encode() + b"\n")
        deadline = float("inf")
        while True:
            now = time.monotonic()
            if self._ends > self._ends_told:
                self._ends_told += 1
                _write(to, b'{"do": "end"}\n')
                deadline = now + (LAST_S if self._ends_told > 1 else self._plan.grace_s)
            if now > deadline:
                if self._ends > 1:
                    raise _Lost("did not tell the end of the slot in time")
                self._ends += 1  # nobody is left to say so
            if self._wants_stacks:
                self._wants_stacks = False
                self._ask_for_stacks(to)
            if now - spoken >= ssh_agent.BEAT_S:
                spoken = now
                _write(to, b"\n")
            limit = self._plan.client.lost_after_s
            if frames.is_met and now - heard > limit:
                raise _Lost(f"has not answered for {limit:g} s")
            if not select.select([back], [], [], POLL_S)[0]:
                continue
            data = os.read(back, 1 << 16)
            if not data:
                raise _Lost(None)
            heard = time.monotonic()
            for kind, payload in frames.feed(data):
                if kind == ssh_agent.OUTPUT:
                    _write(1, payload)
                    self._ended_line = payload.endswith(b"\n")
                elif kind == ssh_agent.EXIT:
                    return int(json.loads(payload)["code"])
                elif kind == ssh_agent.REFUSAL:
                    self._say(f"cannot start {self._command.argv[0]!r}: {payload.decode(errors='replace')}")
                    return MissingError.exit_code

    def _request(self) -> dict[str, Any]:
        """Give what the agent is to start; secrets go this way too, and are in no command line and no file."""
        command = self._command
        secrets = {name: os.environ[name] for name in self._plan.secrets if name in os.environ}
        checkpoints = f"{self._place.workdir}/.stoker/{self._run.id}/checkpoints"
        given = {"STOKER_ATTEMPT": self._attempt, "STOKER_CHECKPOINT_DIR": checkpoints}
        return {
            "do": "keep",
            "argv": command.argv,
            "env": {**given, **secrets, **command.env},
            "cwd": command.cwd,
            # By these its processes are known there, and nothing here is.
            "marks": {"STOKER_RUN": self._run.id, "STOKER_SLOT": self._name, "STOKER_HOST": self.host},
            "grace_s": self._plan.grace_s,
            "silence_s": self._plan.client.lost_after_s,
        }

    def _ask_for_stacks(self, to: int) -> None:
        """Have every rank that was heard of write where its threads are."""
        log = self._run.log(Slot.parse(self._name), int(self._attempt))
        beats = [event for event in read_log(log, last=TAIL_BYTES).events if event.kind == "heartbeat"]
        for pid in {event.rank: int(event.fields.get("pid", 0)) for event in beats}.values():
            _write(to, json.dumps({"do": "signal", "pid": pid, "number": signal.SIGUSR1}).encode() + b"\n")

    def _say(self, words: str) -> None:
        start = "" if self._ended_line else "\n"
        _write(1, f"{start}stoker: {self.host} {words}\n".encode())

    def _on_end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._ends += 1

    def _on_stacks(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._wants_stacks = True


class _Lost(Exception):  # noqa: N818
    """There is no agent to talk to; without a reason, `ssh` has one."""

    def __init__(self, why: str | None) -> None:
        super().__init__(why)
        self.why = why


def _code(ssh: Process) -> int:
    """Give the exit code of `ssh`, which has closed its output and may yet say why."""
    try:
        return ssh.wait(2)
    except TimeoutError:
        return ssh.end(0)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _why(host: str, code: int, said: str) -> str:
    """Say why `ssh` ended before the slot did."""
    if code < 0:
        return f"is cut off: the ssh program here was ended by {signal.Signals(-code).name}"
    if code == LOST and not said.strip():
        return "has lost the agent there: it was killed"
    return meaning(host, said, code)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BrokenPipeError:
        pass  # its end is about to be read


def _end_as(code: int) -> NoReturn:
    """End as the slot did."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code)


def main() -> NoReturn:
    """Carry the slot that is named, of the run whose folder is given."""
    run = Run(Path(sys.argv[1]))
    line = Line(run, sys.argv[2], read_ssh_plan(run))
    line.listen()
    _end_as(line.carry())


if __name__ == "__main__":
    main()

"""One slot on a host, as a process here: carries its output, its signals and its exit code, and tells when it is lost.

The supervisor starts it in the place of the program. It talks through `ssh` to a relay there, which talks to the keeper
of the slot; when the connection breaks it makes another one, and goes on with the byte at which it was. What it knows
stands in a record in the run folder, so that another process can go on where this one was.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any, NoReturn

from stoker.core.processes import start, until
from stoker.core.spec import load, to_json
from stoker.errors import InputError, MissingError
from stoker.jobs.run_folder import Run
from stoker.jobs.topology import Command, Slot
from stoker.launchers.diagnosis import LOST, LOST_MARK, NO_MEMORY, TAIL_BYTES
from stoker.launchers.plan import read_plan
from stoker.launchers.ssh import slot_daemon
from stoker.launchers.ssh.client import (
    ANSWER_S,
    Client,
    Frames,
    agent_argv,
    agent_code,
    exit_code,
    meaning,
    source,
    text_of,
    write_all,
)
from stoker.launchers.ssh.plan import FAR, Record, SshPlan, command_at, read_ssh_plan
from stoker.launchers.ssh.remote_exec import Asks, Clerk, Desk
from stoker.telemetry.events import Recorder
from stoker.telemetry.reader import read_log

POLL_S = 0.1
AGAIN_S, SELDOM_S = 0.5, 30.0
"""Between the first tries to connect again, and between later ones."""
NEW_S = 10.0
"""What a new connection has to say its first word."""
READY_S = 60.0
"""Within which hosts that stand by must be ready."""
LAST_S = 5.0
"""After the time for a last checkpoint: for the end to be told."""
BYE_S = SAID_S = 2.0
CONTINUES = "STOKER_CONTINUES"
_WAIT = Command(("sleep", "2147483647"))


class Log:
    """The slot's log here, into which we say a word of our own now and then, between lines."""

    def __init__(self, path: Path | None, host: str, *, is_shared: bool = False) -> None:
        """Go on with the record at a path; several that write into one log keep no count of its bytes."""
        self._path, self._host, self._is_shared = path, host, is_shared
        self._pending: list[str] = []
        size = os.fstat(1).st_size
        self._ended_line = not size or _last_byte() == b"\n"
        self.continues = path is not None and path.exists() and CONTINUES in os.environ
        if path is not None and self.continues:
            self.record = load(path.read_bytes(), Record, path)
            self.offset = self.record.offset + (0 if is_shared else max(0, size - self.record.log))
        else:
            self.record, self.offset = Record(key=secrets.token_hex(8)), 0
        self.record.log, self.record.offset = size, self.offset
        self._keep()

    def take(self, data: bytes) -> None:
        """Write what the slot printed; after its line, what we have to say."""
        if self._pending and (end := data.find(b"\n") + 1):
            self._write(data[:end])
            self._say_pending()
            data = data[end:]
        self._write(data)

    def say(self, words: str, *, now: bool = False) -> None:
        """Say something of our own, once a line is over; `now` is when nothing more will come."""
        # Behind `stoker:` stands what is taken for the cause of an end.
        self._pending.append(f"{'stoker:' if now else '---'} {self._host} {words}\n")
        if self._ended_line or now:
            self._say_pending()

    def end(self, code: int) -> None:
        """Keep how it ended."""
        if self._pending:
            self._say_pending()
        self.record.code = code
        self._keep()

    def _write(self, data: bytes) -> None:
        if data:
            write_all(1, data)
            self.offset += len(data)
            self._ended_line = data.endswith(b"\n")
            if self._is_shared:
                self.record.offset = self.offset
                self._keep()

    def _say_pending(self) -> None:
        start = "" if self._ended_line else "\n"
        text = (start + "".join(self._pending)).encode()
        self._pending.clear()
        self._ended_line = True
        # Kept first: were we killed in between, the log would be shorter than that, and nothing of the slot's is in it.
        self.record.log, self.record.offset = os.fstat(1).st_size + len(text), self.offset
        self._keep()
        write_all(1, text)

    def _keep(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(to_json(self.record))
            temporary.replace(self._path)


class Line:
    """The line to the keeper of one slot, over as many connections as it takes."""

    def __init__(self, run: Run, name: str, plan: SshPlan, ask: str | None = None) -> None:
        """Take the slot of a name; `setup@host` is what prepares a host; an ask is what another slot wants there."""
        self._run, self._name, self._plan = run, name, plan
        kind, _, host = name.partition("@")
        self.host = host or plan.hosts[name]
        self._place = plan.places[self.host]
        self._attempt = int(os.environ.get("STOKER_ATTEMPT", "0"))
        self._asks = Asks(run, self._attempt)
        self._ask = ask
        self._is_setup, self._stands_by = bool(host), name in plan.standby and ask is None
        self._command = self._its_command(kind)
        self._is_detached = not self._is_setup and read_plan(run).detached
        title = f"setup-{secrets.token_hex(3)}" if self._is_setup else Slot.parse(name).filename
        self._title = f"{title}.{self._attempt}" + (f".{ask}" if ask else "")
        self._marks = {"STOKER_RUN": run.id, "STOKER_SLOT": name, "STOKER_HOST": self.host}
        self._marks |= {"STOKER_ASKED": ask} if ask else {}
        self._log = Log(self._far(f"{self._title}.json"), self.host, is_shared=ask is not None)
        self._is_held, self._is_cut = self._log.continues, False
        self._heard, self._noted = time.monotonic(), float("-inf")
        self._pause_s = AGAIN_S
        self._parent = os.getppid()
        self._ends = self._ends_told = 0
        self._has_passed_end = False
        self._deadline = float("inf")
        self._wants_stacks = False
        can_ask = plan.standby and not (self._stands_by or ask or self._is_setup)
        self._desk = Desk(self._asks, plan.standby) if can_ask else None
        self._clerk = Clerk(run, self._asks, name, self._has_begun) if self._stands_by else None

    def _its_command(self, kind: str) -> Command:
        if self._is_setup:
            return Command(("sh", "-c", self._plan.setup or ""), {}, self._place.workdir)
        if self._ask is not None:
            wish = self._asks.read(self._name, self._ask)
            return Command(("sh", "-c", wish.command), self._plan.standby_env.get(self._name, {}), wish.cwd)
        if self._stands_by:
            return _WAIT
        return command_at(self._plan, Slot.parse(kind), self._run.id, self._attempt)

    def _far(self, name: str) -> Path | None:
        return None if self._is_setup else self._run.folder / FAR / name

    def _has_begun(self, ask: str) -> bool:
        path = self._far(f"{self._title}.{ask}.json")
        return path is not None and path.exists()

    def listen(self) -> None:
        """Take signals for wishes, which are carried out there."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGUSR1, self._on_stacks)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def carry(self) -> int:
        """Run the slot there to its end; give its exit code, negative for the signal that ended it."""
        if (code := self._log.record.code) is not None:
            return code
        try:
            self._await_others()
            code = self._carry()
        except _Lost as lost:
            self._log.say(str(lost), now=True)
            Recorder(slot=self._name, attempt=int(self._attempt)).mark(LOST_MARK, f"{self.host} {lost}")
            code = LOST
        except _Refused as refused:
            self._log.say(str(refused), now=True)
            code = refused.code
        if self._clerk is not None:
            self._clerk.end(self._plan.grace_s)
            code = 0 if self._ends and code != LOST else code
        self._log.end(code)
        return code

    def _await_others(self) -> None:
        """Wait until every host that stands by is ready for what we will ask of it."""
        if self._desk is None or self._is_held:
            return
        deadline = time.monotonic() + READY_S
        while late := self._asks.unready(self._plan.standby):
            if self._ends:
                raise _Refused("was not asked to start anything", -signal.SIGTERM)
            if time.monotonic() > deadline:
                names = ", ".join(f"{self._plan.hosts[name]} ({name})" for name in late)
                raise _Lost(f"waits for hosts that are not ready after {READY_S:g} s: {names}")
            time.sleep(POLL_S)

    def _carry(self) -> int:
        while True:
            try:
                return self._connected()
            except _Cut as cut:
                why = str(cut)
            if not self._is_held:
                raise _Lost(why)
            if not self._is_cut:
                self._log.say(f"is cut off: {why}; trying to get back")
                self._is_cut = True
            self._check_time(why)
            self._pause()

    def _pause(self) -> None:
        """Wait before the next try: ever longer, but not so that a host is lost over it, nor while someone waits."""
        limit = self._plan.client.lost_after_s
        is_waited_for = bool(self._ends) or time.monotonic() - self._heard <= limit
        until(lambda: self._ends > self._ends_told, min(self._pause_s, limit / 10) if is_waited_for else self._pause_s)
        self._pause_s = min(2 * self._pause_s, SELDOM_S)

    def _check_time(self, why: str) -> None:
        """Give up when the host is lost, or was told to end and does not say that it did."""
        now, limit = time.monotonic(), self._plan.client.lost_after_s
        if now > self._deadline and self._ends > 1:
            raise _Lost(f"did not tell the end of the slot in time: {why}{self._what_is_left}")
        if now - self._heard > limit and not (self._is_detached and not self._hears_others(limit)):
            raise _Lost(f"has not answered for {limit:g} s{self._what_is_left}")

    @property
    def _what_is_left(self) -> str:
        """Say what ends a slot that goes on without us; another one ends by itself."""
        return f", and what runs there goes on until: stoker job stop {self._run.id}" if self._is_detached else ""

    def _hears_others(self, within_s: float) -> bool:
        """Whether other hosts answer. If none does it may be us who are cut off, and the job goes on without us."""
        others = (self._far(f"heard@{host}") for host in self._plan.places if host != self.host)
        return any(path and path.exists() and time.time() - path.stat().st_mtime < within_s for path in others)

    def _connected(self) -> int:
        """Talk over one connection, to the end of the slot or of the connection."""
        argv = agent_argv(self._client_argv(), self.host, self._place.python, self._run.id)
        ours, theirs = os.pipe()
        back, forth = os.pipe()
        with TemporaryFile() as said:
            ssh = start(argv, stdin=ours, stdout=forth, stderr=said, dies_with_us=True)
            os.close(ours)
            os.close(forth)
            try:
                return self._talk(theirs, back)
            except _Cut as cut:
                why = str(cut) or _why(self._plan.client, self.host, exit_code(ssh, SAID_S), text_of(said))
                raise _Cut(why) from cut
            finally:
                os.close(theirs)
                os.close(back)
                ssh.end(0)

    def _client_argv(self) -> list[str]:
        """Give the command of `ssh`: to get back, never over a shared connection that may be the broken one."""
        client = self._plan.client
        return client.argv("-o", "ControlPath=none", attempts=1) if self._is_held else client.argv()

    def _talk(self, to: int, back: int) -> int:
        frames, begun, spoken = Frames(), time.monotonic(), time.monotonic()
        write_all(to, agent_code() + json.dumps(self._request()).encode() + b"\n")
        self._ends_told = 0
        while True:
            now = time.monotonic()
            self._pass_wishes(to)
            if now - spoken >= slot_daemon.BEAT_S:
                spoken = now
                write_all(to, b"\n")
            if self._is_held:
                self._check_time("it does not answer")
                limit = self._silence_s if self._heard > begun else max(NEW_S, self._silence_s)
                if now - max(begun, self._heard) > limit:
                    raise _Cut("it does not answer")
            elif now - begun > ANSWER_S:
                raise _Cut("does not answer")
            if not select.select([back], [], [], POLL_S)[0]:
                continue
            data = os.read(back, 1 << 16)
            if not data:
                raise _Cut("")
            for kind, payload in frames.feed(data):
                self._hear_of_host()
                if kind == slot_daemon.HELD:
                    if self._is_cut:
                        self._log.say("is back")
                    self._is_held, self._is_cut, self._pause_s = True, False, AGAIN_S
                    if self._clerk is not None:
                        self._asks.tell_ready(self._name)
                elif kind == slot_daemon.OUTPUT:
                    self._log.take(payload)
                elif kind == slot_daemon.EXIT:
                    code = self._ended(json.loads(payload), to)
                    _await_end(back)
                    return code
                elif kind == slot_daemon.GONE:
                    raise _Lost(payload.decode(errors="replace"))
                elif kind == slot_daemon.ASK and self._desk is not None:
                    self._desk.take(json.loads(payload))

    @property
    def _silence_s(self) -> float:
        """After which a connection is given up for another one."""
        limit = self._plan.client.lost_after_s
        return min(max(3 * slot_daemon.BEAT_S, limit / 3), 0.8 * limit)

    def _hear_of_host(self) -> None:
        now = time.monotonic()
        path = self._far(f"heard@{self.host}")
        if path is not None and self._is_detached and now - self._noted > 1.0:
            path.touch()
            self._noted = now
        self._heard = now

    def _pass_wishes(self, to: int) -> None:
        """Tell what is wished here: that it end, where its threads are, how what it asked for has ended."""
        now = time.monotonic()
        if now > self._deadline and self._ends == 1:
            self._ends = 2  # nobody is left to say so
        if self._ends > self._ends_told:
            self._ends_told = self._ends
            self._deadline = now + (LAST_S if self._ends > 1 else self._plan.grace_s)
            self._has_passed_end = False
            if self._clerk is not None and self._ends == 1:
                self._clerk.tell_end()
        # Who stands by ends last: with it ends all that was asked of it.
        is_free = self._clerk is None or self._clerk.is_idle or self._ends > 1
        if self._ends_told and not self._has_passed_end and is_free:
            self._has_passed_end = True
            write_all(to, json.dumps({"do": "end", "times": self._ends}).encode() + b"\n")
        if self._wants_stacks:
            self._wants_stacks = False
            self._ask_for_stacks(to)
        if self._clerk is not None:
            self._clerk.look()
        for one, code in self._desk.answers() if self._desk is not None else ():
            write_all(to, json.dumps({"do": "answer", "id": one, "code": code}).encode() + b"\n")

    def _ended(self, how: dict[str, Any], to: int) -> int:
        """Give the exit code, once it is kept here; then nothing needs to be kept there."""
        if "refusal" in how:
            code, words = MissingError.exit_code, f"cannot start {self._command.argv[0]!r}: {how['refusal']}"
            self._log.say(words, now=True)
        else:
            code = int(how["code"])
        if code and how.get("oom"):
            self._log.say(NO_MEMORY)
        if left := how.get("left"):
            self._log.say(f"cannot end what is left there: process {', '.join(map(str, left))}")
        if self._clerk is None:
            self._log.end(code)
        write_all(to, b'{"do": "bye"}\n')
        return code

    def _request(self) -> dict[str, Any]:
        """Give what is to be kept; secrets go this way too, and are in no command line and no file."""
        command = self._command
        secret = {name: os.environ[name] for name in self._plan.secrets if name in os.environ}
        if not self._is_held and (unset := [name for name in self._plan.secrets if name not in os.environ]):
            raise _Refused(f"needs secrets that are not set here: {', '.join(unset)}", InputError.exit_code)
        run = f"{self._place.workdir}/.stoker/{self._run.id}"
        given = {"STOKER_ATTEMPT": str(self._attempt), "STOKER_CHECKPOINT_DIR": f"{run}/checkpoints"}
        return {
            "do": "keep",
            "folder": f"{run}/{self._title}",
            "key": self._log.record.key,
            "starts": not self._is_held,
            "clears": self._ask is None,
            "offset": self._log.offset,
            "argv": command.argv,
            "env": {**given, **secret, **command.env},
            "cwd": command.cwd or self._place.workdir,
            # By these its processes are known there, and nothing here is.
            "marks": self._marks,
            "grace_s": self._plan.grace_s,
            "lost_after_s": None if self._is_detached else self._plan.client.lost_after_s,
            "ask": source("rsh_agent") if self._desk is not None else "",
        }

    def _ask_for_stacks(self, to: int) -> None:
        """Have every rank that was heard of write where its threads are."""
        log = self._run.log(Slot.parse(self._name), self._attempt)
        beats = [event for event in read_log(log, last=TAIL_BYTES).events if event.kind == "heartbeat"]
        for pid in {event.rank: int(event.fields.get("pid", 0)) for event in beats}.values():
            write_all(to, json.dumps({"do": "signal", "pid": pid, "number": signal.SIGUSR1}).encode() + b"\n")

    def _on_end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._is_detached and not self._is_meant():
            os._exit(0)
        self._ends += 1

    def _is_meant(self) -> bool:
        """Whether the slot is to end, and not only this process: its parent is gone, or this machine shuts down."""
        if self._ask is not None and not self._asks.is_wanted(self._name, self._ask):
            return True
        return os.getppid() == self._parent and self._run.is_ending(self._attempt)

    def _on_stacks(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._wants_stacks = True


class _Cut(Exception):  # noqa: N818
    """The connection broke; without a reason, `ssh` has one."""


class _Lost(Exception):  # noqa: N818
    """The slot is lost, and why."""


class _Refused(Exception):  # noqa: N818
    """The slot is not started."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


def _last_byte() -> bytes:
    """Give the last byte of the log that we write; it was opened for writing alone."""
    with open("/proc/self/fd/1", "rb") as log:
        log.seek(-1, os.SEEK_END)
        return log.read(1)


def _await_end(back: int) -> None:
    """Let the relay clear up before its connection ends."""
    deadline = time.monotonic() + BYE_S
    while select.select([back], [], [], max(0.0, deadline - time.monotonic()))[0] and os.read(back, 1 << 16):
        pass


def _why(client: Client, host: str, code: int, said: str) -> str:
    """Say why `ssh` ended before the slot did."""
    if code < 0:
        return f"the ssh program here was ended by {signal.Signals(-code).name}"
    if code == LOST and not said.strip():
        return "the agent there was killed"
    return meaning(client, host, said, code)


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
    line = Line(run, sys.argv[2], read_ssh_plan(run), *sys.argv[3:])
    line.listen()
    _end_as(line.carry())


if __name__ == "__main__":
    main()

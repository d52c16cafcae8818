"""The local process of one remote slot: forwards its output, signals and exit code, and reports when its host is lost.

The supervisor starts it in place of the program. It connects by `ssh` to an attach session on the host, which
controls the slot daemon; when the connection breaks, it reconnects and resumes at the byte it had reached. Its state is
a record in the run folder, so that another process can resume where this one stopped.
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
from typing import Any, NoReturn

from stoker.core.processes import start, wait_until
from stoker.errors import InputError, MissingError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.ssh.client import (
    RESPONSE_TIMEOUT_S,
    FrameParser,
    SshClient,
    agent_argv,
    agent_code,
    format_failure,
    module_source,
    read_text,
    wait_exit_code,
    write_all,
)
from stoker.launchers.ssh.plan import read_ssh_plan
from stoker.launchers.ssh.remote_exec import ExecForwarder, ExecRunner
from stoker.launchers.ssh.slot_log import SlotLog
from stoker.launchers.ssh.slot_task import HostContact, SlotTask
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE, TAIL_BYTES
from stoker.launchers.supervise.proxy_slots import LOST_MARK, OOM_NOTICE
from stoker.remote import slot_daemon
from stoker.telemetry.events import Recorder
from stoker.telemetry.reader import read_log

POLL_S = 0.1
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""The pauses before the first and before later tries to reconnect."""
FIRST_FRAME_S = 10.0
"""How long a new connection may take to its first frame."""
READY_TIMEOUT_S = 60.0
"""How long standby slots may take to become ready."""
EXIT_REPORT_S = 5.0
"""How long the host may take to report the exit, after the grace period."""
CLOSE_TIMEOUT_S = STDERR_TIMEOUT_S = 2.0
DISCONNECTED_NOTICE = "{reason}; reconnecting"
RECONNECTED_NOTICE = "reconnected"


class _StopState:
    """Stop requests from the supervisor, and how far they have been passed on."""

    def __init__(self) -> None:
        self.level = 0
        """How often the slot was asked to stop: once means SIGTERM, twice SIGKILL."""
        self.handled_level = 0
        """How much of it was handled over the current connection."""
        self.is_sent = False
        self.deadline = float("inf")


class RemoteSlot:
    """Local side of a slot: runs its task on the host to the end, over as many connections as it takes."""

    def __init__(self, task: SlotTask) -> None:
        self._task, self._plan, self.host = task, task.plan, task.host
        self._log = SlotLog(task.record_path, task.host, is_shared=task.exec_id is not None)
        self._has_started, self._is_disconnected = self._log.is_reattached, False
        self._contact = HostContact(task)
        self._backoff_s = MIN_BACKOFF_S
        self._parent = os.getppid()
        self._stop = _StopState()
        self._needs_stacks = False
        self._forwarder = ExecForwarder(task.requests, task.plan.standby) if task.can_exec else None
        self._runner = (
            ExecRunner(task.run, task.requests, task.name, task.has_started_exec) if task.is_standby else None
        )

    def install_signal_handlers(self) -> None:
        """Handle signals as requests for the remote slot: SIGTERM and SIGINT stop it, SIGUSR1 dumps its stacks."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_dump_stacks)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def run(self) -> int:
        """Run the slot to its end and return its exit code, negative for the signal that killed it."""
        if (code := self._log.record.code) is not None:
            return code
        try:
            self._wait_for_standby()
            code = self._run_with_reconnects()
        except _Lost as lost:
            self._log.add_notice(str(lost), is_cause=True)
            recorder = Recorder(slot=self._task.name, attempt=self._task.attempt)
            recorder.mark(LOST_MARK, f"{self.host}: {lost}")
            code = LOST_EXIT_CODE
        except _NotStarted as error:
            self._log.add_notice(str(error), is_cause=True)
            code = error.code
        if self._runner is not None:
            self._runner.close(self._plan.grace_s)
            code = 0 if self._stop.level and code != LOST_EXIT_CODE else code
        self._log.finish(code)
        return code

    def _wait_for_standby(self) -> None:
        """Wait until every standby slot is ready for commands."""
        if self._forwarder is None or self._has_started:
            return
        deadline = time.monotonic() + READY_TIMEOUT_S
        while unready := self._task.requests.list_unready(self._plan.standby):
            if self._stop.level:
                raise _NotStarted("stopped before the slot started", -signal.SIGTERM)
            if time.monotonic() > deadline:
                names = ", ".join(f"{self._plan.hosts[name]} ({name})" for name in unready)
                raise _Lost(f"other hosts are not ready after {READY_TIMEOUT_S:g} s: {names}")
            time.sleep(POLL_S)

    # --- Connections

    def _run_with_reconnects(self) -> int:
        while True:
            try:
                return self._run_connection()
            except _Disconnected as error:
                reason = str(error)
            if not self._has_started:
                raise _Lost(reason)
            if not self._is_disconnected:
                self._log.add_notice(DISCONNECTED_NOTICE.format(reason=reason))
                self._is_disconnected = True
            self._check_deadlines(reason)
            self._back_off()

    def _back_off(self) -> None:
        """Wait before reconnecting: ever longer, but briefly while the host may still be declared lost or must stop."""
        limit_s = self._plan.client.lost_after_s
        is_urgent = bool(self._stop.level) or self._contact.silence_s <= limit_s
        pause_s = min(self._backoff_s, limit_s / 10) if is_urgent else self._backoff_s
        wait_until(lambda: self._stop.level > self._stop.handled_level, pause_s)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _check_deadlines(self, reason: str) -> None:
        """Raise `_Lost` if the host is silent for too long, or does not report the exit of a killed slot."""
        limit_s = self._plan.client.lost_after_s
        if time.monotonic() > self._stop.deadline and self._stop.level > 1:
            raise _Lost(f"exit of the slot was not reported in time: {reason}{self._detached_note}")
        if self._contact.silence_s > limit_s:
            is_our_fault = self._task.is_detached and not self._contact.has_others(limit_s)
            if not is_our_fault:  # a detached run continues without this machine
                raise _Lost(f"no response for {limit_s:g} s{self._detached_note}")

    @property
    def _detached_note(self) -> str:
        """How to stop a slot of a detached run, which continues without us; others stop by themselves."""
        return (
            f"; the slot keeps running, stop it with: stoker job stop {self._task.run.id}"
            if self._task.is_detached
            else ""
        )

    def _run_connection(self) -> int:
        """Stream over one connection until the slot exits or the connection breaks."""
        argv = agent_argv(self._ssh_argv(), self.host, self._task.config.python, self._task.run.id)
        child_stdin, stdin_fd = os.pipe()
        stdout_fd, child_stdout = os.pipe()
        with TemporaryFile() as stderr:
            ssh = start(argv, stdin=child_stdin, stdout=child_stdout, stderr=stderr, terminate_with_parent=True)
            os.close(child_stdin)
            os.close(child_stdout)
            try:
                return self._stream(stdin_fd, stdout_fd)
            except _Disconnected as error:
                if str(error):
                    raise
                code = wait_exit_code(ssh, STDERR_TIMEOUT_S)
                reason = _explain_exit(self._plan.client, self.host, code, read_text(stderr))
                raise _Disconnected(reason) from error
            finally:
                os.close(stdin_fd)
                os.close(stdout_fd)
                ssh.stop(0)

    def _ssh_argv(self) -> list[str]:
        """Return the `ssh` command; to reconnect, never over a shared connection, which may be the broken one."""
        client = self._plan.client
        return client.argv("-o", "ControlPath=none", attempts=1) if self._has_started else client.argv()

    def _stream(self, stdin_fd: int, stdout_fd: int) -> int:
        """Exchange requests and frames until the slot exits; return its exit code."""
        frames, connected, last_sent = FrameParser(), time.monotonic(), time.monotonic()
        request = self._attach_request()
        write_all(stdin_fd, agent_code())
        self._send(stdin_fd, request)
        self._stop.handled_level = 0
        while True:
            self._send_requests(stdin_fd)
            if time.monotonic() - last_sent >= slot_daemon.ALIVE_INTERVAL_S:
                last_sent = time.monotonic()
                write_all(stdin_fd, b"\n")
            self._check_connection(connected)
            if not select.select([stdout_fd], [], [], POLL_S)[0]:
                continue
            data = os.read(stdout_fd, 1 << 16)
            if not data:
                raise _Disconnected
            for kind, payload in frames.feed(data):
                self._contact.update()
                if kind == slot_daemon.EXIT:
                    code = self._handle_exit(json.loads(payload), stdin_fd)
                    _wait_for_eof(stdout_fd)
                    return code
                self._handle_frame(kind, payload)

    def _check_connection(self, connected: float) -> None:
        """Raise `_Disconnected` if the host is silent for longer than a working connection would be."""
        now = time.monotonic()
        if not self._has_started:
            if now - connected > RESPONSE_TIMEOUT_S:
                raise _Disconnected("no response")
            return
        self._check_deadlines("no response")
        has_frames = self._contact.last_response > connected
        limit_s = self._silence_limit_s if has_frames else max(FIRST_FRAME_S, self._silence_limit_s)
        if now - max(connected, self._contact.last_response) > limit_s:
            raise _Disconnected("no response")

    @property
    def _silence_limit_s(self) -> float:
        """After how much silence a connection is replaced: always before the host is declared lost."""
        limit_s = self._plan.client.lost_after_s
        return min(max(3 * slot_daemon.ALIVE_INTERVAL_S, limit_s / 3), 0.8 * limit_s)

    # --- From the host

    def _handle_frame(self, kind: bytes, payload: bytes) -> None:
        if kind == slot_daemon.ATTACHED:
            if self._is_disconnected:
                self._log.add_notice(RECONNECTED_NOTICE)
            self._has_started, self._is_disconnected, self._backoff_s = True, False, MIN_BACKOFF_S
            if self._runner is not None:
                self._task.requests.mark_ready(self._task.name)
        elif kind == slot_daemon.OUTPUT:
            self._log.write_output(payload)
        elif kind == slot_daemon.GONE:
            raise _Lost(payload.decode(errors="replace"))
        elif kind == slot_daemon.EXEC and self._forwarder is not None:
            self._forwarder.handle(json.loads(payload))

    def _handle_exit(self, record: dict[str, Any], stdin_fd: int) -> int:
        """Save the exit code here, acknowledge it, so that the host can forget it, and return it."""
        if "start_error" in record:
            code = MissingError.exit_code
            program = self._task.command.argv[0]
            self._log.add_notice(f"cannot start {program!r}: {record['start_error']}", is_cause=True)
        else:
            code = int(record["code"])
        if code and record.get("oom"):
            self._log.add_notice(OOM_NOTICE)
        if survivors := record.get("survivors"):
            self._log.add_notice(f"cannot kill process {', '.join(map(str, survivors))} of the slot")
        if self._runner is None:
            self._log.finish(code)
        self._send(stdin_fd, {"op": "acknowledge"})
        return code

    # --- To the host

    def _send(self, stdin_fd: int, request: dict[str, Any]) -> None:
        write_all(stdin_fd, json.dumps(request).encode() + b"\n")

    def _attach_request(self) -> dict[str, Any]:
        if not self._has_started and (missing := self._task.missing_secrets()):
            raise _NotStarted(f"secrets are not set on this machine: {', '.join(missing)}", InputError.exit_code)
        return self._task.attach_request(
            key=self._log.record.key,
            offset=self._log.offset,
            can_start=not self._has_started,
            rsh_agent=module_source("stoker.remote.rsh_agent") if self._forwarder is not None else "",
        )

    def _send_requests(self, stdin_fd: int) -> None:
        """Pass on stop requests, requests for stacks, and exit codes of exec requests."""
        self._send_stop(stdin_fd)
        if self._needs_stacks:
            self._needs_stacks = False
            self._send_stack_signals(stdin_fd)
        if self._runner is not None:
            self._runner.poll()
        for exec_id, code in self._forwarder.collect_exit_codes() if self._forwarder is not None else ():
            self._send(stdin_fd, {"op": "exec_exit", "id": exec_id, "code": code})

    def _send_stop(self, stdin_fd: int) -> None:
        stop, now = self._stop, time.monotonic()
        if now > stop.deadline and stop.level == 1:
            stop.level = 2  # the supervisor may be gone and cannot ask a second time
        if stop.level > stop.handled_level:
            stop.handled_level = stop.level
            stop.deadline = now + (EXIT_REPORT_S if stop.level > 1 else self._plan.grace_s)
            stop.is_sent = False
            if self._runner is not None and stop.level == 1:
                self._runner.stop()
        # A standby slot stops after its commands: they would be killed with it.
        is_idle = self._runner is None or self._runner.is_idle or stop.level > 1
        if stop.handled_level and not stop.is_sent and is_idle:
            stop.is_sent = True
            self._send(stdin_fd, {"op": "stop", "level": stop.level})

    def _send_stack_signals(self, stdin_fd: int) -> None:
        """Signal every rank with a heartbeat to dump the stacks of its threads."""
        log = self._task.run.log_path(Slot.parse(self._task.name), self._task.attempt)
        heartbeats = [event for event in read_log(log, last=TAIL_BYTES).events if event.kind == "heartbeat"]
        for pid in {event.rank: int(event.fields.get("pid", 0)) for event in heartbeats}.values():
            self._send(stdin_fd, {"op": "signal", "pid": pid, "number": signal.SIGUSR1})

    def _on_stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._task.is_detached and not self._must_stop_slot():
            os._exit(0)
        self._stop.level += 1

    def _must_stop_slot(self) -> bool:
        """Whether the slot must stop, or only this process: the supervisor is gone, or this machine shuts down."""
        if self._task.is_cancelled:
            return True
        return os.getppid() == self._parent and self._task.run.is_stopping(self._task.attempt)

    def _on_dump_stacks(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._needs_stacks = True


class _Disconnected(Exception):  # noqa: N818
    """The connection broke; without a message, ssh's stderr has the reason."""


class _Lost(Exception):  # noqa: N818
    """The slot is lost, and why."""


class _NotStarted(Exception):  # noqa: N818
    """The slot was not started, and why."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def _wait_for_eof(stdout_fd: int) -> None:
    """Wait until the attach session has cleaned up and closed the connection."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while select.select([stdout_fd], [], [], max(0.0, deadline - time.monotonic()))[0] and os.read(stdout_fd, 1 << 16):
        pass


def _explain_exit(client: SshClient, host: str, code: int, stderr: str) -> str:
    """Return why `ssh` exited before the slot did."""
    if code < 0:
        return f"the local ssh process was killed by {signal.Signals(-code).name}"
    if code == LOST_EXIT_CODE and not stderr.strip():
        return "the remote agent was killed"
    return format_failure(client, host, stderr, code)


def _exit_as(code: int) -> NoReturn:
    """Exit with the exit code of the slot, or by the signal that killed it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code)


def main() -> NoReturn:
    """Run the named slot of the run whose folder is given."""
    run = RunFolder(Path(sys.argv[1]))
    slot = RemoteSlot(SlotTask(run, sys.argv[2], read_ssh_plan(run), *sys.argv[3:]))
    slot.install_signal_handlers()
    _exit_as(slot.run())


if __name__ == "__main__":
    main()

"""The slot daemon without ssh: kills, floods, full disks, many slots, leases, commands that slots run in others."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from stoker.remote import attach_session, slot_process, tagged_processes
from stoker.remote.frames import ALIVE, ATTACHED, EXEC_EXIT, EXIT, GONE, READY, STARTED, FrameParser, pack_frame
from stoker.remote.slot_daemon import DAEMON_GONE, LEASE_EXPIRED, SlotDaemon, address_of
from stoker.remote.slot_process import SlotProcess
from stoker.remote.tagged_processes import list_tagged
from tests.support.disks import small_disk
from tests.support.slot_daemons import DaemonClient, daemon_client
from tests.support.ssh_runs import find_by_command
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.timeout(120)
LOOP = "while :; do sleep 0.1; done"
STUBBORN = {
    "worker/0": f"trap '' TERM HUP INT; echo ready; {LOOP}",
    "worker/1": f"setsid bash -c 'trap \"\" TERM HUP; {LOOP}' & echo ready; {LOOP}",
    "worker/2": f"(setsid bash -c 'trap \"\" TERM HUP; {LOOP}' &> /dev/null &); echo ready; exec sleep 99",
}
"""Slots that ignore SIGTERM, with processes in sessions of their own and processes whose parent has exited."""
COUNT_UNTIL = "i=0; while ! test -e {go}; do echo $i; i=$((i+1)); sleep 0.02; done"


def start_all(client: DaemonClient, slots: dict[str, str]) -> None:
    """Attach, start slots, and wait until all are ready."""
    client.attach()
    for name, script in slots.items():
        client.start(name, script)
    wait_until(lambda: all(b"ready" in client.output[slot_id(name)] for name in slots))


def slot_id(name: str) -> str:
    return f"{name.replace('/', '-')}.0"


def now() -> float:
    """The time of the daemon's clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def exit_code(client: DaemonClient, name: str) -> Any:
    return json.loads(client.wait_for(EXIT, slot_id(name)))["code"]


# --- Kills


@pytest.mark.parametrize(
    "victims",
    [
        ("daemon",),
        ("guard",),
        ("daemon", "guard"),
        ("daemon", "session"),
        ("guard", "session"),
    ],
    ids=" and ".join,
)
def test_no_process_of_any_slot_is_left_after_sigkill(victims: tuple[str, ...], tmp_path: Path) -> None:
    """Nobody connects again: what is left of us must do it alone."""
    with daemon_client(tmp_path, grace_s=0.5) as client:
        start_all(client, STUBBORN)
        assert len(client.slot_pids()) >= 2 * len(STUBBORN)
        daemon, guard = client.daemon_and_guard()
        pids = {"daemon": daemon, "guard": guard, "session": client.session.pid}
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: not client.slot_pids())
        if "session" in victims:  # otherwise it has started a daemon, which waits for a client
            wait_until(client.is_everything_gone)


@pytest.mark.parametrize("victims", ["session", "all"])
def test_next_client_finds_or_ends_what_a_kill_left(victims: str, tmp_path: Path) -> None:
    with daemon_client(tmp_path, grace_s=0.5) as client:
        start_all(client, STUBBORN)
        for pid in (client.session.pid, *(client.daemons() if victims == "all" else ())):
            os.kill(pid, signal.SIGKILL)
        client.session.wait()
        before = client.slot_pids()
        with daemon_client(tmp_path, grace_s=0.5) as second:
            second.attach(worker_0=len("ready\n"), worker_1=0)
            if victims == "session":  # all slots have kept running
                second.wait_for(STARTED, "worker-0.0")
                wait_until(lambda: second.output["worker-1.0"] == b"ready\n")
                assert not second.output["worker-0.0"]
                assert {pid for pid in before if is_alive(pid)}
            else:
                assert second.wait_for(GONE, "worker-0.0").decode() == DAEMON_GONE
                assert not second.slot_pids()


def test_terminated_daemon_stops_its_slots_and_reports_them(tmp_path: Path) -> None:
    with daemon_client(tmp_path) as client:
        start_all(client, {"worker/0": f"trap 'echo saved; exit 7' TERM; echo ready; {LOOP}"})
        os.kill(client.daemon_and_guard()[0], signal.SIGTERM)
        assert exit_code(client, "worker/0") == 7
        assert client.output["worker-0.0"] == b"ready\nsaved\n"


def test_error_of_the_daemon_is_reported_by_the_next_one(tmp_path: Path) -> None:
    with daemon_client(tmp_path, grace_s=0.5) as client:
        start_all(client, STUBBORN)
        client.send(op="stop", slot="worker-0.0")  # without a level, which is a bug
        client.session.wait(60)
        with daemon_client(tmp_path, grace_s=0.5) as second:
            second.attach(worker_0=0)
            assert "KeyError" in second.wait_for(GONE, "worker-0.0").decode()
            assert not second.slot_pids()


COUNT_SIGNALS = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"terminated\\n"))
os.write(1, b"ready\\n")
while True: time.sleep(60)
"""


def test_slots_get_sigterm_once_when_the_daemon_is_killed(tmp_path: Path) -> None:
    """From the kernel; the guard only waits for the end of the grace period."""
    with daemon_client(tmp_path, grace_s=1.0, lost_after_s=None) as client:
        client.attach()
        client.start("worker/0", "", argv=[sys.executable, "-c", COUNT_SIGNALS])
        log = client.folder / "worker-0.0" / "log"
        wait_until(lambda: client.output["worker-0.0"] == b"ready\n")
        client.session.kill()
        os.kill(client.daemon_and_guard()[0], signal.SIGKILL)
        wait_until(client.is_everything_gone)
        assert log.read_text() == "ready\nterminated\n"


def test_process_that_cannot_be_killed_blocks_the_next_start_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the daemon that has started it, too."""
    monkeypatch.setattr(slot_process, "Termination", partial(tagged_processes.Termination, kill_timeout_s=0.1))
    monkeypatch.setattr(tagged_processes, "signal_tagged", lambda *_: None)
    frames, tags = list[bytes](), {"STOKER_RUN": str(tmp_path), "STOKER_HOST": "here"}
    daemon = SlotDaemon({"folder": tmp_path, "tags": tags, "grace_s": 0.1, "lost_after_s": None})
    monkeypatch.setattr(daemon, "_send", frames.append)
    start = {"slot": "worker-0.0", "name": "worker/0", "env": {}, "cwd": "/", "log_size": 0, "is_standby": False}
    start |= {"grace_s": 0.1, "argv": ["bash", "-c", "setsid sleep 600 & exit 3"]}
    try:
        wait_until(lambda: daemon._poll_slots() or daemon._leftovers is None)
        daemon._start({**start, "key": "a"})
        wait_until(lambda: daemon._poll_slots() or not daemon._slots["worker-0.0"].is_running)
        (survivor,) = list_tagged(tags)
        daemon._start({**start, "key": "b"})
        assert [frame[:1] for frame in frames] == [STARTED, GONE]
        assert str(survivor).encode() in frames[-1]
        os.kill(survivor, signal.SIGKILL)
        wait_until(lambda: not list_tagged(tags))
        daemon._start({**start, "key": "c", "argv": ["true"]})
        assert frames[-1][:1] == STARTED
        wait_until(lambda: daemon._poll_slots() or not daemon._slots["worker-0.0"].is_running)
    finally:
        for pid in list_tagged(tags):
            os.kill(pid, signal.SIGKILL)
        daemon._guard.dismiss()


def test_cleanups_for_two_names_of_one_machine_spare_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kills the daemons of its own name, and those of earlier versions, which have no name."""
    tokens = {name: f"stoker-agent-{tmp_path.name}{name}" for name in ("@node1", "@node2", "")}
    with ExitStack() as stack:
        agents = {}
        for name, token in tokens.items():
            argv = [sys.executable, "-c", "import time; time.sleep(600)", token]
            agents[name] = stack.enter_context(subprocess.Popen(argv))
            stack.callback(agents[name].kill)
        monkeypatch.setattr(sys, "argv", ["-c", tokens["@node1"]])
        wait_until(lambda: len(find_by_command(tokens[""], "python")) == len(agents))
        tags = {"STOKER_RUN": str(tmp_path), "STOKER_HOST": "node1"}
        request = {"tags": tags, "grace_s": 0.0, "slots": [], "folder": str(tmp_path / "run")}
        assert attach_session.clean_up_run(request) == {"survivors": []}
        assert [agents[name].wait(30) for name in ("@node1", "")] == [-signal.SIGKILL] * 2
        assert agents["@node2"].poll() is None


# --- The lease


def test_slots_stop_when_the_lease_expires(tmp_path: Path) -> None:
    """Although the connection is open: only the client itself can renew it."""
    with daemon_client(tmp_path, lost_after_s=3, grace_s=0.5) as client:
        start_all(client, STUBBORN)
        client.renews = False
        assert client.wait_for(GONE, "worker-0.0").decode() == LEASE_EXPIRED
        wait_until(client.is_everything_gone)
        assert client.session.wait(60) == 0
        with daemon_client(tmp_path, lost_after_s=3, grace_s=0.5) as second:
            second.attach(worker_0=0)
            assert second.wait_for(GONE, "worker-0.0").decode() == LEASE_EXPIRED
            second.start("worker/0", "exit 5", key="next")  # the next attempt
            assert exit_code(second, "worker/0") == 5


def test_client_that_comes_back_too_late_waits_until_all_slots_are_stopped(tmp_path: Path) -> None:
    with daemon_client(tmp_path, lost_after_s=2, grace_s=4) as client:
        start_all(client, STUBBORN)
        client.close()
        before = client.slot_pids()
        heard = max(json.loads(data) for kind, _, data in client.frames if kind in (ALIVE, ATTACHED))
        wait_until(lambda: now() > heard + 3)
        with daemon_client(tmp_path, lost_after_s=2, grace_s=4) as second:
            second.attach(worker_0=0)
            second.start("worker/0", "exit 5", slot="worker-0.1")
            assert json.loads(second.wait_for(EXIT, "worker-0.1"))["code"] == 5
            assert second.wait_for(GONE, "worker-0.0").decode() == LEASE_EXPIRED
            assert not [pid for pid in before if is_alive(pid)]


def test_old_renewals_do_not_count(tmp_path: Path) -> None:
    """A request that was on its way for a long time carries an old time."""
    with daemon_client(tmp_path, lost_after_s=3, grace_s=0.5) as client:
        start_all(client, {"worker/0": f"echo ready; {LOOP}"})
        client.renews = False
        heard = json.loads(client.wait_for(ATTACHED))
        deadline = time.monotonic() + 60
        while client.slot_pids():
            client.send(op="renew", heard=heard)
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_slot_is_not_started_without_a_lease(tmp_path: Path) -> None:
    """A request to start it may arrive long after it was sent."""
    with daemon_client(tmp_path, lost_after_s=3) as client:
        start_all(client, {"worker/0": f"trap '' TERM; echo ready; {LOOP}"})
        client.renews = False
        heard = json.loads(client.wait_for(ATTACHED))
        wait_until(lambda: now() > heard + 3.5)
        client.start("worker/1", "true")
        assert client.wait_for(GONE, "worker-1.0").decode() == LEASE_EXPIRED


@pytest.mark.parametrize("is_session_killed", [True, False])
def test_everything_is_removed_when_no_client_comes_back(is_session_killed: bool, tmp_path: Path) -> None:
    with daemon_client(tmp_path, lost_after_s=3, grace_s=0.5) as client:
        start_all(client, STUBBORN)
        if is_session_killed:
            client.session.kill()
        else:
            client.renews = False
            client.wait_for(GONE, "worker-0.0")
            client.session.kill()
        wait_until(client.is_everything_gone)
    assert not client.folder.exists()


def test_detached_slot_leaves_output_and_exit_record_for_later(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"echo ready; while ! test -e {go}; do sleep 0.02; done; echo over; exit 9"
    with daemon_client(tmp_path, lost_after_s=None) as client:
        start_all(client, {"worker/0": script})
        client.session.kill()
        go.touch()
        wait_until(client.is_everything_gone)
        with daemon_client(tmp_path, lost_after_s=None) as second:
            second.attach(worker_0=len("ready\n"))
            assert exit_code(second, "worker/0") == 9
            assert second.output["worker-0.0"] == b"over\n"
            second.send(op="acknowledge", slot="worker-0.0")
            second.send(op="close")
            assert second.session.wait(60) == 0
            assert second.is_everything_gone()
            assert not second.folder.exists()


def test_new_daemon_does_not_wait_without_end_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever holds its lock and does not respond."""
    tags = {"STOKER_RUN": str(tmp_path), "STOKER_HOST": "here"}
    for name in ("START_TIMEOUT_S", "KILL_TIMEOUT_S"):
        monkeypatch.setattr(attach_session, name, 0.1)
    monkeypatch.setattr(attach_session, "set_process_name", lambda _: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        lock.bind(f"\0{address_of(tags)}-lock")
        attach_session._run_daemon({"tags": tags, "folder": str(tmp_path), "grace_s": 0.0})
    assert not list(tmp_path.iterdir())


# --- Output


def test_no_byte_is_lost_or_repeated_over_connections(tmp_path: Path) -> None:
    go, output = tmp_path / "go", bytearray()
    with daemon_client(tmp_path) as client:
        client.attach()
        client.start("worker/0", COUNT_UNTIL.format(go=go))
        for _ in range(3):
            wait_until(lambda client=client: len(client.output["worker-0.0"]) > 20)
            client.close()
            output += client.output["worker-0.0"]
            client = DaemonClient(tmp_path)
            client.attach(worker_0=len(output))
        go.touch()
        assert exit_code(client, "worker/0") == 0
        output += client.output["worker-0.0"]
        client.close()
    lines = output.decode().splitlines()
    assert lines == [str(number) for number in range(len(lines))]


def test_slots_that_a_client_does_not_know_are_stopped_first(tmp_path: Path) -> None:
    """They are of an attempt whose supervisor was killed."""
    with daemon_client(tmp_path, grace_s=0.5) as client:
        start_all(client, STUBBORN)
        before = client.slot_pids()
        with daemon_client(tmp_path, grace_s=0.5) as second:
            second.attach()
            second.start("worker/0", "echo another; exit 4", slot="worker-0.1")
            assert json.loads(second.wait_for(EXIT, "worker-0.1"))["code"] == 4
            assert not [pid for pid in before if is_alive(pid)]
            assert [path.name for path in client.folder.glob("worker-*")] == ["worker-0.1"]


def test_host_is_ready_when_nothing_is_left_of_an_earlier_attempt(tmp_path: Path) -> None:
    with daemon_client(tmp_path, grace_s=1.0) as client:
        client.attach()
        client.wait_for(READY)
        start_all(client, STUBBORN)
        before = client.slot_pids()
        with daemon_client(tmp_path, grace_s=1.0) as second:
            second.attach()
            second.wait_for(READY)
            assert not [pid for pid in before if is_alive(pid)]


def test_start_that_was_requested_before_is_not_repeated(tmp_path: Path) -> None:
    with daemon_client(tmp_path) as client:
        start_all(client, {"worker/0": f"echo ready; {LOOP}"})
        (leader,) = list_tagged(client.tags, client.slot_pids()[:1])
        with daemon_client(tmp_path) as second:
            second.attach(starting=["worker-0.0"])
            second.start("worker/0", "echo another")
            wait_until(lambda: second.output["worker-0.0"] == b"ready\n")
            assert is_alive(leader)


def test_log_of_a_restarted_slot_continues_at_the_size_of_the_local_log(tmp_path: Path) -> None:
    with daemon_client(tmp_path) as client:
        client.attach()
        client.start("worker/0", "echo first; exit 1")
        assert exit_code(client, "worker/0") == 1
        client.send(op="acknowledge", slot="worker-0.0")
        client.start("worker/0", "echo second; exit 2", key="2", log_size=len("first\n"))
        wait_until(lambda: len([kind for kind, _, _ in client.frames if kind == EXIT]) == 2)
        assert client.output["worker-0.0"] == b"first\nsecond\n"


def test_flood_of_one_slot_delays_neither_heartbeats_nor_the_stop_of_another(tmp_path: Path) -> None:
    flood = "echo ready; for i in $(seq 400); do head -c 1000000 /dev/zero; sleep 0.005; done; sleep 600"
    beat = "trap 'exit 7' TERM; echo ready; while :; do date +%s.%N; sleep 0.1; done"
    with small_disk(tmp_path / "disk", 1 << 29) as folder, daemon_client(folder) as client:
        start_all(client, {"worker/0": flood, "worker/1": beat})
        seen, delays = 1, []
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            lines = client.output["worker-1.0"].decode().splitlines(keepends=True)
            delays += [time.time() - float(line) for line in lines[seen:] if line.endswith("\n")]
            seen = max(seen, len(lines))
            time.sleep(0.01)
        assert len(client.output["worker-0.0"]) > 10_000_000
        assert len(delays) > 10
        assert max(delays) < 2.0, delays
        client.send(op="stop", slot="worker-1.0", level=1)
        requested = time.monotonic()
        assert exit_code(client, "worker/1") == 7
        assert time.monotonic() - requested < 3.0
        assert not [name for kind, name, _ in client.frames if (kind, name) == (EXIT, "worker-0.0")]


def test_slots_stop_on_a_full_disk(tmp_path: Path) -> None:
    """Stop requests and exit records get through, also to a client that comes later."""
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        fill = f"trap 'exit 7' TERM; dd if=/dev/zero of={folder}/all bs=4096 2>/dev/null; echo full >&2\n"
        ready = f"touch {tmp_path}/ready; {LOOP}"
        with daemon_client(folder, lost_after_s=None) as client:
            client.attach()
            client.start("worker/1", f"trap 'exit 8' TERM; {LOOP}")
            client.wait_for(STARTED, "worker-1.0")
            client.start("worker/0", fill + ready)
            wait_until(lambda: (tmp_path / "ready").exists())
            client.send(op="stop", slot="worker-0.0", level=1)
            assert exit_code(client, "worker/0") == 7
            client.send(op="stop", slot="worker-1.0", level=1)
            assert exit_code(client, "worker/1") == 8
            client.session.kill()
            wait_until(client.is_everything_gone)
            with daemon_client(folder, lost_after_s=None) as second:
                second.attach(worker_0=0, worker_1=0)
                assert [exit_code(second, f"worker/{index}") for index in (0, 1)] == [7, 8]
                for index in (0, 1):
                    second.send(op="acknowledge", slot=f"worker-{index}.0")
                second.send(op="close")
                second.session.wait(60)
        assert not client.folder.exists()


def test_fifty_slots(tmp_path: Path) -> None:
    with daemon_client(tmp_path) as client:
        client.attach()
        for index in range(50):
            client.start(f"worker/{index}", f"for i in 1 2 3; do echo {index} $i; sleep 0.1; done; exit {index}")
        assert [exit_code(client, f"worker/{index}") for index in range(50)] == list(range(50))
        for index in range(50):
            assert client.output[f"worker-{index}.0"].decode() == "".join(f"{index} {i}\n" for i in (1, 2, 3))
        assert len(client.daemons()) == 2


def test_exit_wakes_up_the_daemon(tmp_path: Path) -> None:
    """It does not wait for its next look at the logs."""
    go = tmp_path / "go"
    with daemon_client(tmp_path) as client:
        start_all(client, {"worker/0": f"echo ready; while ! test -e {go}; do sleep 0.01; done; exit 3"})
        go.touch()
        assert json.loads(client.wait_for(EXIT, "worker-0.0")) == {"code": 3, "oom": False, "survivors": []}


def test_process_that_a_slot_starts_last_is_not_overlooked(tmp_path: Path) -> None:
    """Another slot is ending at the same time, for which the processes were listed a moment before."""
    tags = {"STOKER_RUN": str(tmp_path), "STOKER_HOST": "here"}
    request = {"argv": ["bash", "-c", "setsid sleep 600 & exit 3"], "cwd": "/", "grace_s": 1.0}
    process = SlotProcess(request, {}, tags, tmp_path / "log")
    wait_until(lambda: process.poll(None if process.is_ending else []) is not None)
    assert list_tagged(tags) == []


def test_command_that_cannot_be_started(tmp_path: Path) -> None:
    with daemon_client(tmp_path) as client:
        client.attach()
        client.start("worker/0", "", argv=["./no-such-program"])
        assert json.loads(client.wait_for(EXIT, "worker-0.0"))["start_error"] == "No such file or directory"
        client.start("worker/1", "true", cwd="/no/folder")
        assert json.loads(client.wait_for(EXIT, "worker-1.0"))["filename"] == "/no/folder"


# --- Commands that slots run in others

AGENT = files("stoker.remote").joinpath("rsh_agent.py").read_text()


def start_caller(client: DaemonClient, script: str) -> None:
    """Start a standby slot, and a slot that runs commands in it."""
    client.attach()
    client.start("worker/1", "", argv=["sleep", "99"], is_standby=True)
    client.start("launcher/0", script, rsh_agent=AGENT)


def forward(client: DaemonClient, number: int) -> str:
    """Forward an exec request as the client does; return its id."""
    wait_until(lambda: len([request for request in client.exec_requests() if "command" in request]) > number)
    request = [request for request in client.exec_requests() if "command" in request][number]
    assert request["slot"] == "worker/1"
    argv = ["sh", "-c", request["command"]]
    fields = {"slot": "worker-1.0", "name": "worker/1", "id": request["id"], "argv": argv, "cwd": request["cwd"]}
    client.send(op="exec", **fields, env={"MINE": "a"}, grace_s=1.0)
    return str(request["id"])


def test_slot_runs_commands_in_another(tmp_path: Path) -> None:
    script = "\"$STOKER_ASK\" worker/1 'echo $STOKER_SLOT $MINE; exit' 5; echo code $?"
    with daemon_client(tmp_path) as client:
        start_caller(client, script)
        exec_id = forward(client, 0)
        assert json.loads(client.wait_for(EXEC_EXIT, "worker-1.0")) == {"id": exec_id, "code": 5}
        client.send(op="exec_exit", id=exec_id, code=5)
        assert exit_code(client, "launcher/0") == 0
        assert client.output["launcher-0.0"] == b"code 5\n"
        wait_until(lambda: client.output["worker-1.0"] == b"worker/1 a\n")
        client.send(op="stop", slot="worker-1.0", level=1)
        assert exit_code(client, "worker/1") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_command_ends_with_its_caller(number: signal.Signals, tmp_path: Path) -> None:
    script = f'"$STOKER_ASK" worker/1 "trap \'\' TERM; echo begun; {LOOP}" & echo $!; wait; echo over; {LOOP}'
    with daemon_client(tmp_path) as client:
        start_caller(client, script)
        exec_id = forward(client, 0)
        wait_until(lambda: client.output["worker-1.0"] == b"begun\n")
        os.kill(int(client.output["launcher-0.0"]), number)
        wait_until(lambda: {"id": exec_id, "is_cancelled": True} in client.exec_requests())
        client.send(op="exec_cancel", slot="worker-1.0", id=exec_id)
        client.wait_for(EXEC_EXIT, "worker-1.0")
        assert len(list_tagged({**client.tags, "STOKER_SLOT": "worker/1"})) == 1  # the standby slot itself


def test_commands_cancelled_while_no_client_was_connected(tmp_path: Path) -> None:
    script = f'"$STOKER_ASK" worker/1 "echo begun; {LOOP}" & echo $!; wait; {LOOP}'
    with daemon_client(tmp_path) as client:
        start_caller(client, script)
        forward(client, 0)
        wait_until(lambda: client.output["worker-1.0"] == b"begun\n")
        client.close()
        os.kill(int(client.output["launcher-0.0"]), signal.SIGKILL)
        with daemon_client(tmp_path) as second:
            second.attach(worker_1=0, launcher_0=0)
            wait_until(lambda: {"pending": []} in second.exec_requests())
            second.send(op="exec_pending", ids=[])
            second.wait_for(EXEC_EXIT, "worker-1.0")


def test_standby_slot_stops_after_its_commands(tmp_path: Path) -> None:
    script = f'"$STOKER_ASK" worker/1 "trap \'sleep 0.3; echo saved; exit 3\' TERM; echo begun; {LOOP}"; echo code $?'
    with daemon_client(tmp_path) as client:
        start_caller(client, script)
        exec_id = forward(client, 0)
        wait_until(lambda: client.output["worker-1.0"] == b"begun\n")
        client.send(op="stop", slot="worker-1.0", level=1)
        assert json.loads(client.wait_for(EXEC_EXIT, "worker-1.0")) == {"id": exec_id, "code": 3}
        assert exit_code(client, "worker/1") == 0
        assert client.output["worker-1.0"] == b"begun\nsaved\n"


# --- The code

STANDARD_MODULES = {"__future__"} | sys.stdlib_module_names


def test_frames_survive_any_fragmentation() -> None:
    data = b"motd\n\0stoker agent\n" + pack_frame(EXIT, b"{}", "worker-0.0") + pack_frame(ALIVE)
    parser = FrameParser()
    found = [frame for index in range(len(data)) for frame in parser.feed(data[index : index + 1])]
    assert found == [(EXIT, "worker-0.0", b"{}"), (ALIVE, "", b"")]
    assert parser.preamble == b"motd\n"


@pytest.mark.parametrize("name", sorted(path.name for path in Path(str(files("stoker.remote"))).glob("*.py")))
def test_modules_need_only_the_standard_library(name: str) -> None:
    tree = ast.parse(files("stoker.remote").joinpath(name).read_text(), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names if not name.startswith("stoker.remote.")} <= STANDARD_MODULES

"""What is left when things break on ssh hosts twice, at once, or without a word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import pytest

from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import Run, create, find
from stoker.jobs.status import Attempt, JobState, JobStatus, SlotStatus
from stoker.jobs.topology import Command, Slot
from stoker.launchers.monitor import Hearing
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh import remote_slot, slot_daemon
from stoker.launchers.ssh.client import Client, Frames
from stoker.launchers.ssh.plan import Place, SshPlan
from stoker.launchers.ssh.remote_exec import Asks, Desk
from stoker.launchers.supervisor import STOPPING, Supervisor, watcher
from stoker.telemetry.events import Recorder
from tests.launchers.contract import DEAF, is_ready, job_of, until
from tests.launchers.ssh.test_launcher import (
    COUNT,
    keys_of,
    machine,
    there,
    write_job,
)
from tests.support.disks import disk
from tests.support.hosts import Network, network
from tests.support.trees import stoker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


# --- Who watches


@pytest.mark.parametrize("how", ["failed", STOPPING])
def test_a_run_that_is_over_is_not_taken_up(how: str, here: Path) -> None:
    job = job_of("echo ran", retries=3)
    run = create(job, LAUNCHERS.get("local")().render(job))
    state = JobState.FAILED if how == "failed" else JobState.RUNNING
    status = JobStatus(state=state, slots=(SlotStatus(slot="worker/0", state=state),), began=1.0)
    run.write_status(status)
    if how == STOPPING:
        run.write(STOPPING, b"")
    argv = [sys.executable, "-P", "-m", "stoker.launchers.supervisor", str(run.folder), "--continue"]
    subprocess.run(argv, check=True)
    until(lambda: (run.folder / "lock").exists() and watcher(run) is None)
    assert run.read_status() == status
    assert not list(run.logs.iterdir())


def test_taking_a_run_up_counts_only_this_life(here: Path) -> None:
    job = job_of("true", retries=2)
    run = create(job, LAUNCHERS.get("local")().render(job))
    before = [Attempt(number=number, began=10.0 * number, ended=10.0 * number + 5) for number in range(3)]
    status = JobStatus(state=JobState.RUNNING, attempt=3, attempts=tuple(before), began=20.0)
    run.write_status(status)
    taken = Supervisor(run, SimpleNamespace(stop=False), continues=True)  # type: ignore[arg-type]
    assert [one.number for one in taken._attempts] == [2]
    assert [one.number for one in taken._earlier] == [0, 1]
    assert (taken._first, taken._began()) == (2, 25.0)


def test_scalars_are_shown_once(here: Path) -> None:
    job = job_of("true", tensorboard=True)
    run = create(job, LAUNCHERS.get("local")().render(job))
    plan = LocalPlan(slots={"worker/0": Command(("true",))})
    with open(run.log(Slot("worker", 0), 0), "ab") as log:
        recorder = Recorder(slot="worker/0", fd=log.fileno())
        recorder.scalar("loss", 1.0, step=1)
        hearing = Hearing(run, 0, plan, job)
        hearing.catch_up()
        assert not list(run.folder.glob("tensorboard/*"))
        recorder.scalar("loss", 0.5, step=2)
        hearing.listen()
    (events,) = run.folder.glob("tensorboard/*")
    assert events.read_bytes().count(b"loss") == 1


class FakeGang:
    """Two workers, of which the second is lost again and again."""

    def __init__(self) -> None:
        self.pids: dict[Slot, int] = {}
        self.replaced: list[float] = []

    def codes(self) -> dict[Slot, int | None]:
        return {Slot("worker", 0): None, Slot("worker", 1): -signal.SIGKILL}

    def replace(self, slot: Slot) -> None:
        assert slot == Slot("worker", 1)
        self.replaced.append(time.monotonic())


def test_an_elastic_world_pauses_before_it_replaces(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.jobs.retry_policy.PAUSES_S", (0.1, 0.3))
    workers = {"min": 1, "max": 2}
    job = job_of(program={"module": "this"}, topology="torchrun", workers=workers, retries=2)
    run = create(job, LAUNCHERS.get("local")().render(job))
    watching = Supervisor(run, SimpleNamespace(stop=False))  # type: ignore[arg-type]
    gang, began = FakeGang(), time.monotonic()
    hearing = Hearing(run, 0, watching._plan, job)
    while time.monotonic() - began < 0.8:  # and is left out then, while enough live
        assert watching._outcome(gang, hearing, 0) is None  # type: ignore[arg-type]
        time.sleep(0.01)
    first, second = (at - began for at in gang.replaced)
    assert first >= 0.1
    assert second - first >= 0.3


# --- One that stands for a slot


def line_of(here: Path, lost_after: float = 30.0, attempt: int = 0, **keys: Any) -> remote_slot.Line:
    """What stands for the only slot of a run, not connected."""
    where = {"worker/0": "node1"}
    port = 29500
    command = Command(("true",), {"MASTER_PORT": str(port)})
    place = Place(workdir=str(here / "there"), python="python3", copies=False)
    client = Client(lost_after_s=lost_after)
    plan = SshPlan(
        slots={"worker/0": command}, hosts=where, places={"node1": place}, client=client, source=".", port=port, **keys
    )
    run = create(job_of("true"), plan)
    os.environ["STOKER_ATTEMPT"] = str(attempt)
    try:
        return remote_slot.Line(run, "worker/0", plan)
    finally:
        del os.environ["STOKER_ATTEMPT"]


def test_a_host_that_connects_and_says_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_slot, "ANSWER_S", 0.3)
    line = line_of(here)
    (_, to), (back, _) = os.pipe(), os.pipe()
    monkeypatch.setattr(remote_slot, "agent_code", lambda: b"")
    with pytest.raises(remote_slot._Cut, match="does not answer"):
        line._talk(to, back)


@pytest.mark.parametrize("lost_after", [5, 30, 600])
def test_a_silent_connection_is_given_up_before_the_host_is(lost_after: int, here: Path) -> None:
    assert line_of(here, lost_after)._silence_s <= lost_after - 1


def test_a_way_back_is_never_a_shared_connection(here: Path) -> None:
    line = line_of(here)
    assert "ControlPath=none" not in line._client_argv()
    line._is_held = True
    assert "ControlPath=none" in line._client_argv()


def test_each_attempt_meets_where_no_job_begins(here: Path) -> None:
    first, *others = (line_of(here, attempt=number)._command.env["MASTER_PORT"] for number in range(4))
    assert first == "29500"
    assert all(20000 <= int(port) < 29500 for port in others)
    assert len({*others}) == 3


def test_tries_to_get_back_become_fewer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote_slot, "until", lambda _, pause: pauses.append(pause))
    line = line_of(here, 10.0)
    line._pause()
    line._pause()
    assert pauses == [0.5, 1.0]
    line._heard -= 100  # of a detached run alone, for nobody waits so long else
    for _ in range(8):
        line._pause()
    assert pauses[2:] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_a_chatty_host_is_heard_of(here: Path) -> None:
    line = line_of(here)
    line._is_detached = True
    line._hear_of_host()
    assert (line._run.folder / "far" / "heard@node1").exists()


def test_what_we_say_begins_a_line(here: Path) -> None:
    """Also when another process wrote half a line before; what was counted then is kept at once."""
    code = (
        "import sys; from pathlib import Path; from stoker.launchers.ssh.remote_slot import Log\n"
        "log = Log(Path(sys.argv[1]), 'node1'); log.say('is back'); log.take(b' a line\\n')"
    )
    record, log = here / "far.json", here / "log"
    record.write_text(json.dumps({"key": "k", "log": 100, "offset": 7}))
    log.write_text("half")
    env = {**os.environ, remote_slot.CONTINUES: "1"}
    for _ in range(2):
        with open(log, "ab") as output:
            subprocess.run([sys.executable, "-c", code, str(record)], stdout=output, env=env, check=True)
    assert log.read_text() == "half a line\n--- node1 is back\n--- node1 is back\n a line\n"
    assert json.loads(record.read_text())["offset"] == 7 + len(" a line\n")


# --- Errands


def test_what_was_taken_back_meanwhile_is_no_longer_wanted(here: Path) -> None:
    asks = Asks(Run(here), 0)
    desk = Desk(asks, ["worker/1"])
    for name in ("a", "b"):
        desk.take({"id": name, "slot": "worker/1", "command": "true"})
    Desk(asks, ["worker/1"]).take({"all": ["b"]})  # another process, which never heard of it
    assert {ask: asks.is_wanted("worker/1", ask) for ask in ("a", "b")} == {"a": False, "b": True}


def test_an_ask_that_is_being_written_is_none_yet(here: Path) -> None:
    asks = Asks(Run(here), 0)
    Desk(asks, ["worker/1"]).take({"id": "a", "slot": "worker/1", "command": "true"})
    (asks.of("worker/1") / ".b.json").touch()
    assert asks.unanswered("worker/1") == ["a"]


def test_an_ask_that_is_gone_before_it_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "slot/asks").mkdir(parents=True)
    (here / "slot/asks/a.json").write_text("{}")
    told: list[Any] = []
    frames = SimpleNamespace(send_json=lambda _, data: told.append(data))
    relay = slot_daemon.Relay({"folder": str(here / "slot"), "offset": 0, "ask": "x"}, frames)  # type: ignore[arg-type]
    monkeypatch.setattr(slot_daemon, "read", lambda _: "")
    relay._pass_asks()
    assert told == [{"all": ["a"]}]


# --- A keeper, without ssh in between


class Talk:
    """A talk with a relay that was started here."""

    def __init__(self, to: IO[bytes], back: IO[bytes]) -> None:
        self._to, self._back, self._frames = to, back, Frames()
        self.output = b""
        self._kinds: dict[bytes, bytes] = {}

    def ask(self, **request: Any) -> None:
        self._to.write(json.dumps(request).encode() + b"\n")
        self._to.flush()

    def hear(self, wanted: bytes) -> bytes:
        while wanted not in self._kinds:
            data = os.read(self._back.fileno(), 1 << 16)
            assert data, "the relay is gone"
            for kind, payload in self._frames.feed(data):
                self._kinds[kind] = payload
                self.output += payload if kind == slot_daemon.OUTPUT else b""
        return self._kinds[wanted]


@contextmanager
def kept(folder: Path, script: str) -> Iterator[Talk]:
    code = "from stoker.launchers.ssh.host_probe import main; main()"
    argv = [sys.executable, "-c", code, f"stoker-agent-{folder}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        talk = Talk(process.stdin, process.stdout)
        marks = {"STOKER_RUN": str(folder), "STOKER_SLOT": "worker/0"}
        request = {"do": "keep", "folder": str(folder / "run/worker-0.0"), "key": "k", "starts": True, "clears": True}
        request |= {"offset": 0, "argv": ["bash", "-c", script], "env": {}, "cwd": "/", "marks": marks, "ask": ""}
        talk.ask(**request, grace_s=5, lost_after_s=5)
        try:
            yield talk
        finally:
            process.kill()


def test_a_full_disk_keeps_no_slot_from_its_end(tmp_path: Path) -> None:
    """That it is to end gets through, and how it ended."""
    with disk(tmp_path / "disk", 1 << 20) as folder:
        script = f"trap 'exit 7' TERM; dd if=/dev/zero of={folder}/all bs=4096 2>/dev/null; echo full >&2\n"
        with kept(folder, script + f"touch {tmp_path}/ready; while :; do sleep 0.05; done") as talk:
            until(lambda: (tmp_path / "ready").exists())
            time.sleep(0.2)
            talk.ask(do="end", times=1)
            assert json.loads(talk.hear(slot_daemon.EXIT))["code"] == 7
            talk.ask(do="bye")
        until(lambda: not (folder / "run").exists())


def test_the_end_is_told_at_once(tmp_path: Path) -> None:
    """Though nobody looks often while nothing happens."""
    with kept(tmp_path, f"echo a; while ! test -e {tmp_path}/go; do sleep 0.01; done; echo b; exit 3") as talk:
        talk.hear(slot_daemon.OUTPUT)
        time.sleep(1)
        (tmp_path / "go").touch()
        began = time.monotonic()
        assert json.loads(talk.hear(slot_daemon.EXIT)) == {"code": 3, "oom": False, "left": []}
        assert time.monotonic() - began < slot_daemon.LEFTOVER_S + 1
        assert talk.output == b"a\nb\n"
        talk.ask(do="bye")


def test_processes_that_cannot_be_ended_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_daemon, "DEATH_S", 0.1)
    monkeypatch.setattr(slot_daemon, "marked", lambda _: [4194305])
    assert slot_daemon.end_marked({"STOKER_RUN": "none"}, 0.0) == [4194305]


# --- Detached runs


def test_a_run_that_was_never_prepared_is_not_taken_up(net: Network, here: Path) -> None:
    job = write_job(net, here, "echo ran")
    content = json.loads(job.read_text())
    content["ssh"]["setup"] = "echo begun > begun; exec sleep 4321"
    job.write_text(json.dumps(content))
    with machine() as give:
        give.start("job", "run", job, "--on", "ssh", "--detach")
        until((here / "there" / "begun").exists, 30)
    run = find(None)
    until(lambda: watcher(run) is None)
    os.utime(run.folder, (0, 0))  # it is long ago
    assert LAUNCHERS.get("ssh")().status(run.handle).state is JobState.LOST
    assert stoker("job", "stop") == 0
    assert there(run) == []
    assert not list(run.logs.iterdir())


def test_logs_alone_take_a_detached_run_up(net: Network, here: Path) -> None:
    go = here / "go"
    with machine() as give:
        assert give("job", "run", write_job(net, here, COUNT.format(go=go)), "--on", "ssh", "-d").returncode == 0
        run = find(None)
        until(lambda: is_ready(run), 30)
    until(lambda: watcher(run) is None)
    go.touch()
    with machine() as give:
        lines = give("job", "logs", "-f").stdout.splitlines()
    assert lines == ["ready", *map(str, range(len(lines) - 2)), "over"]
    assert run.read_status().state is JobState.SUCCEEDED


def test_a_lost_slot_of_a_detached_run_is_ended_by_stop(
    net: Network,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on by itself, also after the run has failed; another host that is never silent is no reason to wait."""
    launcher = LAUNCHERS.get("ssh")()
    ssh = keys_of(net, here / "there", lost_after=5)
    job = job_of(program={"module": "this"}, topology="torchrun", workers=2, ssh=ssh, grace=2)
    rendered = launcher.render(job)
    scripts = ("trap 'exit 143' TERM; echo ready; while :; do echo busy; sleep 0.2; done", DEAF)
    commands = zip(rendered.slots.items(), scripts, strict=True)
    slots = {name: replace(command, argv=("bash", "-c", script)) for (name, command), script in commands}
    rendered = msgspec.structs.replace(rendered, slots=slots)
    run = create(job, rendered)
    launcher.start(rendered, run, detach=True)
    until(lambda: all("ready" in log.read_text() for log in run.logs.iterdir()) and len(there(run)) >= 7, 60)
    net["node2"].cut()
    try:
        until(lambda: run.read_status().state.is_final, 40)
    finally:
        net["node2"].mend()
    message = run.read_status().message
    assert f"node2 has not answered for 5 s, and what runs there goes on until: stoker job stop {run.id}" in message
    assert there(run)
    capsys.readouterr()
    assert stoker("job", "stop") == 0
    assert f"{run.id} is over already: failed" in capsys.readouterr().err
    until(lambda: not there(run))

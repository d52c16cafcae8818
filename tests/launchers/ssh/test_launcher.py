"""Jobs on ssh hosts: real sshd on hosts of their own, real cables that are pulled, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.core.processes import marked
from stoker.core.spec import decode
from stoker.errors import InputError, SpecError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import Run, create, find
from stoker.jobs.spec import Job, Ssh
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.supervisor import watcher
from stoker.trainers.checkpoints import unpack
from tests.launchers.contract import DEAF, LauncherSuite, is_ready, job_of, launched, until
from tests.launchers.test_local import ELASTIC, HEARTBEAT
from tests.support.hosts import Network, network
from tests.support.trees import stoker

pytestmark = pytest.mark.timeout(180)
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), "at", os.environ["MASTER_ADDR"], os.environ["STOKER_HOST"])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


def keys_of(net: Network, workdir: Path, *hosts: str, **more: Any) -> dict[str, Any]:
    """The ssh section of a job on these hosts."""
    return {
        "hosts": list(hosts or ("node1", "node2")),
        "config": str(net.config),
        "workdir": str(workdir),
        "python": sys.executable,
        **more,
    }


def there(run: Run) -> list[int]:
    """What runs of a run on any host, the agents too."""
    slots = [pid for host in ("node1", "node2") for pid in marked({"STOKER_RUN": run.id, "STOKER_HOST": host})]
    return [*slots, *_processes(f"stoker-agent-{run.id}", "python")]


def _processes(word: str, name: str) -> list[int]:
    """Processes with this word on their command line, whose program has this name."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                argv = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if name in Path(argv[0]).name and any(word in one for one in argv):
                found.append(int(folder.name))
    return found


class TestSsh(LauncherSuite):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _net(self, net: Network, tmp_path: Path) -> None:
        self.net, self.workdir = net, tmp_path / "there"

    def start(self, launcher: Any, job: Job) -> Run:
        if not job.ssh.hosts:
            job = msgspec.structs.replace(job, ssh=decode(keys_of(self.net, self.workdir), Ssh))
        return super().start(launcher, job)

    def test_two_hosts_reduce_together(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.end(launcher, job_of(**keys), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        first = self.net["node1"].address
        for index, host in enumerate(("node1", "node2")):
            assert f"sum 3.0 of 2 at {first} {host}" in self.text(launcher, run, Slot("worker", index))
        plan = json.loads((run.folder / "plan.json").read_text())
        for index, host in enumerate(("node1", "node2")):
            assert plan["slots"][f"worker/{index}"]["env"]["GLOO_SOCKET_IFNAME"] == self.net[host].interface
        assert there(run) == []

    def test_a_program_that_is_not_there(self, launcher: Any) -> None:
        keys = {"program": {"command": ["./no-such-program"]}, "retries": 2}
        _, status = self.end(launcher, job_of(**keys))
        wanted = "worker/0 refused to start: node1 cannot start './no-such-program': No such file or directory"
        assert status.message.startswith(wanted)

    def test_secrets_are_in_no_command_line_and_no_file(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKEN", "hush-hush-hush")
        script = f"echo ready ${{#TOKEN}}; while ! test -e {tmp_path}/go; do sleep 0.05; done"
        run = self.start(launcher, job_of(script, secret_env={"TOKEN": {"secret": "s", "key": "k"}}))
        until(lambda: "ready 14" in self.text(launcher, run))
        assert not _processes("hush-hush-hush", "")
        (tmp_path / "go").touch()
        until(lambda: launcher.status(run.handle).state is JobState.SUCCEEDED)
        files = [path for path in (*run.folder.rglob("*"), *self.workdir.rglob("*")) if path.is_file()]
        assert not any(b"hush-hush-hush" in path.read_bytes() for path in files)

    def test_files_get_there_and_foreign_ones_stay(self, launcher: Any, tmp_path: Path) -> None:
        for name in ("keep.txt", "skip.bin", "deep/in/a.txt", "deep/skip.bin", "data/big.tar", ".git/config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "run.sh").write_text("#!/bin/sh\ncat made")
        (tmp_path / "run.sh").chmod(0o755)
        (tmp_path / "link").symlink_to("keep.txt")
        (tmp_path / ".stokerignore").write_text("# large\n*.bin\n/data/\nthere*/\n!deep/skip.bin\n")
        wanted = {".stokerignore", "deep/in/a.txt", "deep/skip.bin", "keep.txt", "link", "run.sh"}
        for how in ("rsync", "archive"):
            place = tmp_path / f"there, {how}"
            place.mkdir()
            (place / "foreign").write_text("of someone else")
            keys = keys_of(self.net, place, "node1", setup="echo setup; cp keep.txt made", exclude=["there*"])
            job = job_of(program={"command": ["./run.sh"]}, ssh=keys)
            rendered = launcher.render(job)
            if how == "archive":
                places = {name: msgspec.structs.replace(one, rsync=False) for name, one in rendered.places.items()}
                rendered = msgspec.structs.replace(rendered, places=places)
            assert f"{len(wanted)} files" in rendered.notes[0]
            run = self.carry_out(launcher, job, rendered)
            until(lambda run=run: launcher.status(run.handle).state.is_final)
            found = {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}
            assert found == wanted | {"foreign", "made"}
            assert self.text(launcher, run) == ["keep.txt"]
            assert (run.folder / "setup.node1.log").read_text() == "setup\n"
            assert (place / "link").is_symlink()

    def carry_out(self, launcher: Any, job: Job, rendered: Any) -> Run:
        run = create(job, rendered)
        launcher.start(rendered, run)
        self.started.append((launcher, run))
        return run

    def test_a_setup_that_fails_is_told_and_kept(self, launcher: Any) -> None:
        job = job_of("true", ssh=keys_of(self.net, self.workdir, "node1", setup="echo 'no such package' >&2; exit 9"))
        rendered = launcher.render(job)
        with pytest.raises(InputError, match=r"node1: ssh.setup failed with exit code 9: no such package; its log: "):
            self.carry_out(launcher, job, rendered)
        run = find("small")
        assert launcher.status(run.handle).state is JobState.FAILED

    def test_the_profiler_goes_along_where_stoker_is_not(self, launcher: Any, tmp_path: Path) -> None:
        keys = keys_of(self.net, self.workdir, "node1", python=str(bare_python(tmp_path)))
        run, status = self.end(launcher, job_of("sleep 1.5", profile={"every": 1}, ssh=keys))
        assert status.state is JobState.SUCCEEDED, status.message
        assert '"k": "profile"' in run.log(Slot("worker", 0), 0).read_text()

    def test_what_is_wrong_here_is_told_without_asking_a_host(self, launcher: Any) -> None:
        keys = {"program": {"script": "no.py"}, "topology": "torchrun", "workers": 3}
        with pytest.raises(SpecError) as caught:
            launcher.render(job_of(**keys, ssh={"hosts": ["a", "b"]}))
        assert [fault.path for fault in caught.value.faults] == ["ssh.hosts", "program.script"]
        assert "workers are 3, and there is room for 2" in str(caught.value)

    def test_all_that_is_wrong_on_hosts_is_told_at_once(self, launcher: Any, tmp_path: Path) -> None:
        config = strange_hosts(self.net, tmp_path)
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 8}
        hosts = ["node1", "no-such-host", "refusing", "keyless", "changed", "new", "bare", "absent"]
        ssh = keys_of(self.net, tmp_path / "plain" / "x", *hosts, config=str(config), python="python3")
        (tmp_path / "plain").write_text("no folder")
        with pytest.raises(UnavailableError) as caught:
            launcher.render(job_of(**keys, ssh=ssh))
        said = str(caught.value)
        for sentence in (
            "job 'small' on ssh: 1 of 8 hosts are up; ",
            f"node1 cannot use the folder {tmp_path}/plain/x: {tmp_path}/plain is not a folder",
            "no-such-host is unknown: neither DNS nor your ssh configuration has this name; ",
            "refusing refuses the connection: no ssh server listens there; ",
            "keyless refuses your key: ",
            "changed has another host key than the last time: ",
            f"new has a host key that you have not accepted yet: connect once by hand: ssh -F {config} new; ",
            "bare has no Python: ",
            "absent does not answer",
        ):
            assert sentence in said
        assert not Path(os.environ["STOKER_HOME"]).exists()

    def test_three_hosts_are_named_and_two_are_up(self, launcher: Any, tmp_path: Path) -> None:
        config = tmp_path / "config"
        address = f"{self.net['node1'].address.rpartition('.')[0]}.201"
        config.write_text(f"Include {self.net.config}\nHost node3\n  HostName {address}\n")
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 3}
        ssh = keys_of(self.net, self.workdir, "node1", "node2", "node3", config=str(config))
        with pytest.raises(UnavailableError, match="2 of 3 hosts are up; node3 does not answer"):
            launcher.render(job_of(**keys, ssh=ssh))

    def test_no_torch_there(self, launcher: Any, tmp_path: Path) -> None:
        python = bare_python(tmp_path)
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 2}
        with pytest.raises(InputError) as caught:
            launcher.render(job_of(**keys, ssh=keys_of(self.net, self.workdir, python=str(python))))
        said = str(caught.value)
        assert said.startswith("job 'small' on ssh: each of node1, node2 has no torch in ")
        with pytest.raises(InputError, match="each of node1, node2 has no Python 'python9' that works: No such file"):
            launcher.render(job_of(**keys, ssh=keys_of(self.net, self.workdir, python="python9")))

    def test_a_port_that_is_taken(self, launcher: Any) -> None:
        """One that the job names is missed; else the next one is taken."""
        keys = {"program": {"module": "this"}, "topology": "torchrun", "workers": 2}
        serve = "import socket, time; s = socket.create_server(('', 29500)); print(flush=True); time.sleep(99)"
        argv = ["ip", "netns", "exec", self.net["node1"].space, sys.executable, "-c", serve]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as taker:
            assert taker.stdout is not None
            taker.stdout.readline()
            try:
                with pytest.raises(InputError, match="node1 has port 29500 taken: address already in use"):
                    launcher.render(job_of(**keys, port=29500, ssh=keys_of(self.net, self.workdir)))
                plan = launcher.render(job_of(**keys, ssh=keys_of(self.net, self.workdir)))
                assert plan.port == 29501
                assert all("29501" in command.argv for command in plan.slots.values())
            finally:
                taker.kill()


def bare_python(folder: Path) -> Path:
    """A Python without any package."""
    path = folder / "bare-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    path.chmod(0o755)
    return path


def strange_hosts(net: Network, folder: Path) -> Path:
    """A configuration with hosts that cannot be used, each for another reason."""
    address, keys = net["node1"].address, net.folder
    other = " ".join((keys / "other.pub").read_text().split()[:2])
    (folder / "changed").write_text(f"{address} {other}\n")
    (folder / "none").write_text("")
    (folder / "bin").mkdir()
    (folder / "bin" / "sh").symlink_to("/bin/sh")
    command = f'command="env PATH={folder}/bin sh -c \\"$SSH_ORIGINAL_COMMAND\\""'
    authorized = (keys / "user.pub").read_text()
    if not (keys / "limited").exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "limited")]
        subprocess.run(argv, check=True)
    (keys / "authorized").write_text(f"{authorized}{command} {(keys / 'limited.pub').read_text()}")
    known = keys / "known"
    rows = {
        "node1": (address, keys / "user", known, 22),
        "refusing": (address, keys / "user", known, 2222),
        "keyless": (address, keys / "stranger", known, 22),
        "changed": (address, keys / "user", folder / "changed", 22),
        "new": (address, keys / "user", folder / "none", 22),
        "bare": (address, keys / "limited", known, 22),
        "absent": (f"{address.rpartition('.')[0]}.200", keys / "user", known, 22),
    }
    text = [
        f"Host {name}\n  HostName {where}\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known}\n  Port {port}\n"
        for name, (where, key, known, port) in rows.items()
    ]
    (folder / "strange").write_text("".join(text))
    return folder / "strange"


# --- What goes wrong meanwhile, with a launching machine that cannot see what runs on the hosts


def write_job(net: Network, here: Path, command: str, *hosts: str, lost_after: int = 5, **keys: Any) -> Path:
    job = {
        "name": "small",
        "topology": "single",
        "profile": {"every": 0},
        "retries": 0,
        "grace": "2s",
        "program": {"command": ["bash", "-c", command]},
        "ssh": keys_of(net, here / "there", *(hosts or ("node2",)), lost_after=lost_after),
        **keys,
    }
    path = here / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def _of_run(run: Run, module: str) -> list[int]:
    """The processes here that run a module for a run."""
    return sorted(set(_processes(module, "python")) & set(_processes(str(run.folder), "python")))


def kill_all(*pids: int) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def break_it(what: str, run: Run, net: Network) -> None:
    match what:
        case "the supervisor":
            kill_all(*_of_run(run, "stoker.launchers.supervisor"))
        case "the process that stands for it here":
            kill_all(*_of_run(run, "stoker.launchers.ssh.remote_slot"))
        case "the ssh program":
            kill_all(*_processes(f"stoker-agent-{run.id}", "ssh"))
        case "the relay":
            kill_all(*agents(run, keepers=False))
        case "the keeper":
            kill_all(*agents(run, keepers=True))
        case "the sshd of the connection":
            net["node2"].kill_sessions()
        case "the cable":
            net["node2"].cut()


def agents(run: Run, *, keepers: bool) -> list[int]:
    """The keepers or the relays of a run: a keeper is a daemon, and hears nothing."""
    found = []
    for pid in _processes(f"stoker-agent-{run.id}", "python"):
        with suppress(FileNotFoundError):  # it has just ended
            if (Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")) == keepers:
                found.append(pid)
    return found


GONE = "its keeper was killed, or the host was started anew; its log: "
BREAKS = {
    "the supervisor": "",
    "the process that stands for it here": "worker/0 was killed by SIGKILL; its log: ",
    "the keeper": f"worker/0 was lost: node2 has lost what ran there: {GONE}",
    "the cable": "worker/0 was lost: node2 has not answered for 5 s; its log: ",
}


QUICK = ("the supervisor", "the cable")
SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in BREAKS if what not in QUICK]


@pytest.mark.parametrize("what", [*QUICK, *SLOW])
def test_nothing_is_left_on_a_host(what: str, net: Network, here: Path) -> None:
    """Whatever breaks, what ran there ends by itself; and whoever watches says what it was."""
    with launched(write_job(net, here, DEAF), "ssh") as (run, process):
        until(lambda: is_ready(run) and len(there(run)) >= 4, 60)
        try:
            break_it(what, run, net)
            until(lambda: not there(run), 25)
        finally:
            net["node2"].mend()
        if BREAKS[what]:
            assert process.wait(30) == 4, (here / "said").read_text()
            assert BREAKS[what] in run.read_status().message
    assert marked({"STOKER_RUN": run.id}) == []
    assert not list((here / "there").rglob("worker-0.*"))


COUNT = "echo ready; i=0; while ! test -e {go}; do echo $i; i=$((i+1)); sleep 0.05; done; printf over"
QUICK_CUT = "the sshd of the connection"
CUTS = {
    "the ssh program": "the ssh program here was ended by SIGKILL",
    "the relay": "the agent there was killed",
    "the sshd of the connection": "broke the connection off",
}


@pytest.mark.parametrize(
    "what", [one if one == QUICK_CUT else pytest.param(one, marks=pytest.mark.slow) for one in CUTS]
)
def test_a_connection_that_breaks_is_made_again(what: str, net: Network, here: Path) -> None:
    """The slot goes on meanwhile, and nothing of what it printed is missing or comes twice."""
    go = here / "go"
    with launched(write_job(net, here, COUNT.format(go=go), lost_after=30), "ssh") as (run, process):
        log = run.log(Slot("worker", 0), 0)
        until(lambda: is_ready(run), 60)
        for times in (1, 2):
            break_it(what, run, net)
            until(lambda times=times: log.read_text().count("is back\n") == times, 20)
        go.touch()
        assert process.wait(30) == 0, (here / "said").read_text()
    lines = log.read_text().splitlines()
    ours = [line for line in lines if line.startswith("--- ")]
    assert ours == [f"--- node2 is cut off: {CUTS[what]}; trying to get back", "--- node2 is back"] * 2
    rest = [line for line in lines if not line.startswith("--- ")]
    assert rest == ["ready", *map(str, range(len(rest) - 2)), "over"]
    assert len(run.read_status().attempts) == 1
    assert there(run) == []
    assert not list((here / "there").rglob("worker-0.*"))


class Machine:
    """A machine of its own, as far as processes go, to give commands on."""

    def __init__(self, inner: int) -> None:
        enter = ["nsenter", "--target", str(inner), "--pid", "--mount", f"--wd={Path.cwd()}"]
        self._argv = [*enter, sys.executable, "-m", "stoker"]

    def __call__(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Give a command, and wait for its end."""
        return subprocess.run([*self._argv, *map(str, words)], capture_output=True, text=True, check=False)

    def start(self, *words: object) -> None:
        """Give a command, and leave it running."""
        argv = ["sh", "-c", '"$@" > started 2>&1 &', "sh", *self._argv, *map(str, words)]
        subprocess.run(argv, check=True)


@contextmanager
def machine() -> Iterator[Machine]:
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "1000"]
    with subprocess.Popen(argv) as process:
        try:
            until(lambda: bool(_children(process.pid)))
            (inner,) = _children(process.pid)
            yield Machine(inner)
        finally:
            process.kill()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("is_over", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_detached_job_goes_on_without_this_machine(is_over: bool, net: Network, here: Path) -> None:
    """Another machine with the same run folder takes it up: each line once, and the exit code is found."""
    go = here / "go"
    job = write_job(net, here, COUNT.format(go=go) + "; exit 7", lost_after=5)
    with machine() as give:
        done = give("job", "run", job, "--on", "ssh", "--detach")
        assert done.returncode == 0, done.stderr
        run = find(None)
        until(lambda: is_ready(run), 30)
    until(lambda: watcher(run) is None)
    time.sleep(0 if is_over else 8)  # longer than an attached one would live
    if is_over:
        go.touch()
        until(lambda: not agents(run, keepers=True), 20)
    with machine() as give:
        done = give("job", "status", "--json")
        assert json.loads(done.stdout)["state"] in ("running", "failed"), done.stderr
        go.touch()
        done = give("job", "logs", "-f")
    lines = done.stdout.splitlines()
    assert lines == ["ready", *map(str, range(len(lines) - 2)), "over"]
    status = run.read_status()
    assert (status.state, [one.code for one in status.attempts]) == (JobState.FAILED, [7])
    assert there(run) == []
    assert not list((here / "there").rglob("worker-0.*"))


@pytest.mark.slow  # waits for a host that cannot be reached
def test_a_detached_job_is_stopped_from_another_machine(net: Network, here: Path) -> None:
    with machine() as give:
        assert give("job", "run", write_job(net, here, DEAF, lost_after=5), "--on", "ssh", "--detach").returncode == 0
        run = find(None)
        until(lambda: is_ready(run), 30)
    until(lambda: watcher(run) is None)
    with machine() as give:
        net["node2"].cut()
        try:
            done = give("job", "stop")
        finally:
            net["node2"].mend()
        assert done.returncode == 5, done.stderr
        assert "what runs there may go on: stoker job stop" in done.stderr
        assert there(run)
        done = give("job", "stop")
        assert done.returncode == 0, done.stderr
    assert run.read_status().state is JobState.STOPPED
    assert there(run) == []


ASKS = """
"$STOKER_ASK" worker/1 'echo hello from $STOKER_HOST; exit' 5; echo code $?
"$STOKER_ASK" worker/1 kill -9 '$$'; echo code $?
"$STOKER_ASK" node2 true; echo code $?
for end in TERM KILL; do
    "$STOKER_ASK" worker/1 "echo begun $end; {deaf}" & asker=$!
    while ! test -e {here}/$end; do sleep 0.1; done
    kill -$end $asker
    while test -e {here}/$end; do sleep 0.1; done
done
echo over
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_a_slot_has_commands_started_on_another_host(net: Network, here: Path) -> None:
    """The other one stands by; what is asked for ends when who asked is gone, and all of it with the job."""
    launcher = LAUNCHERS.get("ssh")()
    ssh = keys_of(net, here / "there", lost_after=5)
    job = job_of(program={"command": ["true"]}, topology="mpi", workers=2, ssh=ssh)
    rendered = launcher.render(job)
    script = ASKS.format(here=here, deaf=DEAF.replace('"', '\\"'))
    command = replace(rendered.slots["launcher/0"], argv=("bash", "-c", script))
    rendered = msgspec.structs.replace(rendered, slots={"launcher/0": command})
    run = create(job, rendered)
    launcher.start(rendered, run)
    log, far = run.log(Slot("launcher", 0), 0), run.log(Slot("worker", 1), 0)
    asked = {"STOKER_RUN": run.id, "STOKER_HOST": "node2"}
    for end in ("TERM", "KILL"):
        until(lambda end=end: far.exists() and f"begun {end}" in far.read_text() and len(marked(asked)) >= 4)
        (here / end).touch()
        until(lambda: len(marked(asked)) == 1)  # who waits
        (here / end).unlink()
    until(lambda: launcher.status(run.handle).state.is_final)
    status = launcher.status(run.handle)
    assert (status.state, [one.code for one in status.slots]) == (JobState.SUCCEEDED, [0, 0, 0]), status.message
    assert [line for line in log.read_text().splitlines() if "Terminated" not in line and "Killed" not in line] == [
        "code 5",
        "code 137",
        "code 2",
        "over",
    ]
    assert far.read_text().splitlines()[0] == "hello from node2"
    assert there(run) == []
    assert not list((here / "there").rglob("worker-*"))


@pytest.mark.slow
def test_nothing_is_left_when_the_launching_machine_is_gone(net: Network, here: Path) -> None:
    with launched(write_job(net, here, DEAF), "ssh") as (run, process):
        until(lambda: is_ready(run) and len(there(run)) >= 3, 60)
        process.kill()
        until(lambda: not there(run), 25)


def test_a_kill_for_want_of_memory_is_told_as_such(net: Network, here: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/stoker-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups for memory of the first version here")
    try:
        (group / "memory.limit_in_bytes").write_text(str(32 << 20))
        grow = f"exec {sys.executable} -c 'bytearray(1 << 30).find(1)'"
        script = f"echo ready; while ! test -e {here}/go; do sleep 0.1; done; {grow}"
        with launched(write_job(net, here, script), "ssh") as (run, process):
            until(lambda: is_ready(run), 60)
            for pid in marked({"STOKER_RUN": run.id, "STOKER_HOST": "node2"}):
                with suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(str(pid))
            (here / "go").touch()
            assert process.wait(30) == 4
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert "worker/0 was killed by SIGKILL while the kernel was ending processes" in run.read_status().message


@pytest.mark.slow
def test_a_hang_is_ended_with_the_stacks_of_every_rank(net: Network, here: Path) -> None:
    (here / "work" / "hang.py").write_text(HEARTBEAT)
    with launched(write_job(net, here, "", program={"script": "hang.py"}, hang_after=2), "ssh") as (run, process):
        assert process.wait(60) == 4
    assert "hung at step 2 in train-00001.tar: no heartbeat for 2s" in run.read_status().message
    assert "in stuck" in (run.folder / "stacks.0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "lost_after"), [(5, 20), (10, 30)])
def test_a_cable_that_is_put_back_in_time(seconds: int, lost_after: int, net: Network, here: Path) -> None:
    script = f"echo ready; i=0; while ! test -e {here}/go; do echo $i; i=$((i+1)); sleep 0.1; done; echo over"
    with launched(write_job(net, here, script, lost_after=lost_after), "ssh") as (run, process):
        until(lambda: is_ready(run), 60)
        net["node2"].cut()
        try:
            time.sleep(seconds)
        finally:
            net["node2"].mend()
        (here / "go").touch()
        assert process.wait(30) == 0, (here / "said").read_text()
    said = run.log(Slot("worker", 0), 0).read_text().splitlines()
    lines = [line for line in said if not line.startswith("--- node2")]  # cut off, and back
    assert lines == ["ready", *map(str, range(len(lines) - 2)), "over"]
    assert len(run.read_status().attempts) == 1


def test_a_lost_host_that_comes_back(net: Network, here: Path) -> None:
    script = f"echo ready $STOKER_ATTEMPT; test $STOKER_ATTEMPT = 1 && exit 0; {DEAF}"
    with launched(write_job(net, here, script, retries=2), "ssh") as (run, process):
        until(lambda: is_ready(run), 60)
        net["node2"].down()
        net["node2"].up()
        assert process.wait(60) == 0, (here / "said").read_text()
    assert [attempt.code for attempt in run.read_status().attempts] == [255, 0]
    assert "--- attempt 1, because worker/0 was lost: node2 has lost what ran there" in (here / "said").read_text()
    until(lambda: not there(run), 20)


@pytest.mark.slow  # three worlds of two hosts
def test_a_killed_rank_and_a_pulled_cable_of_two_hosts(net: Network, here: Path) -> None:
    (here / "work" / "train.py").write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('ready', os.getpid(), flush=True)\n"
        "one = torch.ones(1)\n"
        "for step in range(30 if os.environ['STOKER_ATTEMPT'] == '2' else 10000):\n"
        "    dist.all_reduce(one)\n"
        "    time.sleep(0.1)\n"
        "print('over', flush=True)\n"
    )
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "workers": 2, "retries": 3}
    with launched(write_job(net, here, "", "node1", "node2", **keys), "ssh") as (run, process):
        logs = [run.log(Slot("worker", 1), attempt) for attempt in range(3)]
        until(lambda: logs[0].exists() and "ready" in logs[0].read_text(), 60)
        ranks = [pid for pid in marked({"STOKER_RUN": run.id, "STOKER_HOST": "node2"}) if _is_rank(pid)]
        kill_all(*ranks)
        until(lambda: logs[1].exists() and "ready" in logs[1].read_text(), 60)
        net["node2"].cut()
        try:
            until(lambda: len(run.read_status().attempts) == 2, 60)
        finally:
            net["node2"].mend()
        assert process.wait(90) == 0, (here / "said").read_text()
    first, second, _ = run.read_status().attempts
    assert "worker/1 (rank 1) was killed by SIGKILL" in first.cause
    assert "worker/1 was lost: node2 has not answered for 5 s" in second.cause
    until(lambda: not there(run), 20)


@pytest.mark.slow  # the meeting of a new world takes half a minute
def test_an_elastic_world_replaces_a_lost_worker(net: Network, here: Path) -> None:
    (here / "work" / "train.py").write_text(ELASTIC.format(folder=here).replace("os.getpid()", "time.time()"))
    keys = {"program": {"script": "train.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}, "retries": 3}
    with launched(write_job(net, here, "", "node1", "node2", **keys), "ssh") as (run, process):
        until(lambda: len(list(here.glob("met-2-*"))) == 2, 60)
        net["node2"].down()
        net["node2"].up()
        until(lambda: len(list(here.glob("met-2-*"))) >= 4, 90)  # all ranks met again
        (here / "go").touch()
        assert process.wait(60) == 0, (here / "said").read_text()
    assert len(run.read_status().attempts) == 1
    until(lambda: not there(run), 20)


def _is_rank(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    is_ours = any(word.endswith(("train.py", "stoker.trainers.torch_image")) for word in words)
    return is_ours and not {"torch.distributed.run", "stoker.telemetry.profiler"} & set(words)


@pytest.mark.slow  # two trainings
def test_the_weights_are_those_of_this_machine(net: Network, here: Path) -> None:
    """The same job file, here and on two hosts, of which one loses a rank: the same bits."""
    source = "synthetic:samples=300,classes=5,size=40x32,val=20"
    assert stoker("data", "convert", source, here / "shards", "--shard-samples", "50") == 0
    words = "--model small --size 32 --global-batch-size 24 --epochs 3 --deterministic --seed 3 --threads 1"
    keys = {
        "program": {"module": "stoker.trainers.torch_image", "args": [*words.split(), "--checkpoint-every-steps", "2"]},
        "topology": "torchrun",
        "workers": 2,
        "data": {"train": str(here / "shards/train"), "val": str(here / "shards/val")},
        "env": {"OMP_NUM_THREADS": "1"},
        "retries": 3,
    }
    job = write_job(net, here, "", "node1", "node2", **keys)
    for on in ("local", "ssh"):
        folder = here / on
        argv = ["job", "run", job, "--on", on, "--set", f"checkpoint.dir={folder}", "--detach"]
        assert stoker(*argv) == 0
        run = find(None)
        if on == "ssh":
            until(lambda folder=folder: any(folder.glob("step-*")), 60)
            ranks = [pid for pid in marked({"STOKER_RUN": run.id, "STOKER_HOST": "node2"}) if _is_rank(pid)]
            kill_all(*ranks)
        until(lambda run=run: run.read_status().state.is_final, 120)
        assert run.read_status().state is JobState.SUCCEEDED, run.read_status().message
    assert len(run.read_status().attempts) == 2
    calm, storm = (weights(here / on) for on in ("local", "ssh"))
    assert calm.keys() == storm.keys()
    assert [name for name in calm if not calm[name].equal(storm[name])] == []


def weights(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("step-*.pt"))
    found: dict[str, Any] = unpack(newest.read_bytes(), where=str(newest))["model"]
    return found


# --- The commands


def test_the_commands_work_from_another_shell(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    job = write_job(net, here, script)
    assert stoker("job", "plan", job, "--on", "ssh", "--hosts", "node1:2") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"# worker/0 on node1\ncd {here}/there && ")
    assert f"0 files (0 B) of {here}/work to be copied to node1:{here}/there" in err
    assert not (here / "there").exists()
    assert stoker("job", "run", job, "--on", "ssh", "--hosts", "node1", "--detach") == 0
    run = find("small")
    assert run.handle == f"ssh://{run.folder}"
    until(lambda: is_ready(run))
    capsys.readouterr()
    assert stoker("job", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert stoker("job", "stop") == 0
    capsys.readouterr()
    assert stoker("job", "logs") == 0
    assert capsys.readouterr().out == "ready\nsaved\n"
    assert there(run) == []
    assert stoker("job", "run", "--resume", run.id, "--detach") == 0
    until(lambda: run.log(Slot("worker", 0), 1).exists() or run.read_status().state is JobState.RUNNING)
    assert LAUNCHERS.get("ssh")().status(run.handle).state is JobState.RUNNING
    assert stoker("job", "stop") == 0


def test_a_host_that_is_not_known_is_one_sentence(net: Network, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(net, here, "true")
    assert stoker("job", "run", job, "--on", "ssh", "--hosts", "no-such-host") == 5
    err = capsys.readouterr().err
    assert "0 of 1 hosts are up; no-such-host is unknown" in err
    assert err.count("\n") == 1

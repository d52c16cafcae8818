"""Reaching, probing and preparing ssh hosts: overloaded servers, shells, Python versions, shared directories."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import find_processes_by_env
from stoker.core.spec import to_json
from stoker.errors import InputError, UnavailableError
from stoker.jobs.run_folder import create_run, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import list_slots
from stoker.launchers.ssh import preflight, prepare
from stoker.launchers.ssh.client import (
    NO_PYTHON_CODE,
    OLD_PYTHON_CODE,
    Session,
    SshClient,
    agent_argv,
    python_command,
)
from stoker.launchers.ssh.upload import UNPACK_CODE, write_archive
from stoker.launchers.upload import list_files, total_size
from stoker.remote.host_probe import HostProbe
from tests.launchers.contract import LauncherTests, job_of
from tests.launchers.ssh.test_launcher import without_rsync
from tests.support.hosts import Host, Network
from tests.support.signals import restore_signals
from tests.support.ssh_runs import ssh_section
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


# --- Ports


class BusyHost:
    """Session of a host on which every port is in use."""

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"error": f"port {request['port']} in use"}


@pytest.mark.parametrize(
    ("keys", "numbers"), [({}, ("29500", "29522")), ({"roles": {"ps": {"port": 4000}}}, ("4000",))]
)
def test_busy_ports_are_reported_as_a_range_unless_the_job_sets_one(
    keys: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    job = job_of("true", topology="tf-ps", workers=1, **{"roles": {"ps": {}}, **keys})
    hosts = dict.fromkeys(list_slots(job), "node1")
    sessions: Any = {"node1": BusyHost()}
    ports, issues = preflight.find_ports(job, sessions, hosts, preflight.Routes(0, {}, {}))
    assert ports == {}
    (issue,) = (issue for issue in issues["node1"] if "ps/0" in issue.what)
    assert re.findall(r"\b\d{2,}\b", issue.what) == list(numbers)


# --- Shells and Pythons on hosts

NEW_PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
# As Python 2 does with -I, or Python 3.7 with our version check.
OLD_PYTHON = '#!/bin/sh\necho "Unknown option: -I" >&2; exit 2\n'


@pytest.mark.parametrize(
    ("programs", "code", "output"),
    [
        ({"mine": NEW_PYTHON, "python3": OLD_PYTHON}, 0, "mine a b\n"),
        ({"mine": OLD_PYTHON, "python3": OLD_PYTHON, "python": NEW_PYTHON}, 0, "python a b\n"),
        ({"python3": NEW_PYTHON}, 0, "python3 a b\n"),
        ({"mine": OLD_PYTHON, "python": OLD_PYTHON}, OLD_PYTHON_CODE, ""),
        ({}, NO_PYTHON_CODE, ""),
    ],
)
def test_first_python_that_is_new_enough(programs: dict[str, str], code: int, output: str, tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    for name, text in programs.items():
        (tmp_path / name).write_text(text.replace("exec ", f"export ME={name}; exec "))
        (tmp_path / name).chmod(0o755)
    command = python_command("mine", "import os, sys\nprint(os.environ['ME'], *sys.argv[1:])", "a", "b")
    process = subprocess.run(
        ["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (code, output)


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh"])
def test_python_command_runs_in_any_login_shell(shell: str) -> None:
    code = "import sys\nif sys.argv:\n    print('\\'\"$x', *sys.argv[1:])"
    command = python_command(sys.executable, code, "a b", "c")
    assert "\n" not in command
    assert "\n" not in agent_argv([], "host", "python3", "run")[-1]
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert subprocess.run([shell, "-c", command], capture_output=True, check=True).stdout == b"'\"$x a b c\n"


def test_program_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "reads").write_text("#!/bin/sh\ncat\n")
    (tmp_path / "reads").chmod(0o755)
    for name in ("/bin/true", "./reads"):
        facts = HostProbe().handle({"op": "python", "workdir": str(tmp_path), "python": name, "modules": []})
        assert facts["python"] is None
        assert "Python code" in facts["python_error"]


@pytest.mark.parametrize("folder", ["/proc/x", "/sys/x/y", "/dev/null/x"])
def test_directory_that_root_cannot_write(folder: str) -> None:
    facts = probe_workdir(folder)
    assert facts["workdir_error"].startswith(folder.rsplit("/x")[0])
    (issue,) = preflight.check_host(job_of("true"), preflight.HostFacts("a", facts), 0)
    assert issue.about == "folder"
    assert folder in issue.what
    assert "ssh.workdir" in issue.fix
    assert issue.sentence == f"{issue.what} ({issue.fix})"


def test_probe_leaves_a_directory_unchanged(tmp_path: Path) -> None:
    os.utime(tmp_path, (0, 0))
    before = tmp_path.stat().st_mtime_ns
    assert probe_workdir(str(tmp_path / "a" / "b"))["workdir_error"] == ""
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mtime_ns == before


def probe_workdir(folder: str) -> dict[str, Any]:
    request = {"op": "facts", "workdir": folder, "python": sys.executable, "modules": [], "paths": []}
    return HostProbe().handle({**request, "programs": ["bash"]})


def test_login_that_only_prints_a_message(net: Network, tmp_path: Path) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(argv, check=True)
    authorized = net.folder / "authorized"
    command = 'command="echo This account is currently not available.; exit 1"'
    authorized.write_text(f"{authorized.read_text()}{command} {(tmp_path / 'key.pub').read_text()}")
    config = f"IdentityFile {tmp_path}/key\nIdentitiesOnly yes\nUserKnownHostsFile {net.folder}/known\n"
    (tmp_path / "config").write_text(config)
    client = SshClient(config=str(tmp_path / "config"), user="root")
    with (
        Session(client, net["node1"].address, "python3") as session,
        pytest.raises(UnavailableError, match=r"This account is currently not available\."),
    ):
        session.request({"op": "facts"})


# --- Many hosts


def test_connections_dropped_by_an_overloaded_server_are_retried(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshd accepts ten unauthenticated connections; some of 24 at once are dropped, and tried again."""
    monkeypatch.setattr(Session, "_connecting", threading.BoundedSemaphore(preflight.MAX_PARALLEL))
    client = SshClient(config=str(net.config))
    sessions = [Session(client, "node1", sys.executable) for _ in range(24)]
    try:
        request = {"op": "listen", "port": 0, "token": "t"}
        responses = preflight.run_parallel(lambda session: session.request(request), sessions)
        assert all(response["port"] for response in responses)
    finally:
        preflight.run_parallel(Session.close, sessions)


def test_ctrl_c_starts_no_further_calls() -> None:
    started: list[int] = []
    is_released = threading.Event()

    def call(item: int) -> None:
        started.append(item)
        is_released.wait(60)

    def interrupt() -> None:
        wait_until(lambda: len(started) == preflight.MAX_PARALLEL)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with it ignored
    interrupter.start()
    threads = threading.active_count()
    try:
        with pytest.raises(KeyboardInterrupt):
            preflight.run_parallel(call, range(100))
    finally:
        is_released.set()
        interrupter.join()
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: threading.active_count() < threads)  # the calls that had started are over
    assert len(started) == preflight.MAX_PARALLEL


# --- The working directory


def unpack(archive: Path, to: Path) -> None:
    with open(archive, "rb") as data:
        subprocess.run(["sh", "-c", python_command(sys.executable, UNPACK_CODE, str(to))], stdin=data, check=True)


def test_archive_round_trip(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "there"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a.txt").write_text("a")
    (source / "b.txt").hardlink_to(source / "deep" / "a.txt")
    (source / "b.txt").chmod(0o775)
    (source / "data").symlink_to("/mnt/data")
    names = list_files(source, [])
    (source / "gone").touch()
    write_archive(tmp_path / "1.tar", source, [*names, "gone", "never/was"], ((".stoker/ours.py", b"ours"),))
    (target / "x").mkdir(parents=True)
    (target / "b.txt").symlink_to("x/else")
    (target / "x" / "else").write_text("not ours")
    for _ in range(2):
        unpack(tmp_path / "1.tar", target)
        assert (target / "data").readlink() == Path("/mnt/data")
        assert (target / "deep" / "a.txt").read_text() == (target / "b.txt").read_text() == "a"
        assert (target / "b.txt").stat().st_mode & 0o777 == 0o775
        assert (target / ".stoker" / "ours.py").read_text() == "ours"
        assert (target / "x" / "else").read_text() == "not ours"


def test_archive_leaves_out_files_that_vanish_or_shrink(tmp_path: Path) -> None:
    shrinking = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # shorter than its size in stat
    if not shrinking.exists():
        pytest.skip(f"no {shrinking}")
    (tmp_path / "a").write_text("a")
    names = [str(path.relative_to("/")) for path in (tmp_path / "a", shrinking, tmp_path / "gone")]
    write_archive(tmp_path / "tar", Path("/"), [*names, names[0]], (("last", b"x"),))
    with tarfile.open(tmp_path / "tar") as tar:
        assert tar.getnames() == [names[0], names[0], "last"]
        assert tar.extractfile("last").read() == b"x"  # type: ignore[union-attr]
    assert total_size(tmp_path, ["a", "gone", "a/b"]) == 1


class TestPrepare(LauncherTests):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _net(self, net: Network, tmp_path: Path) -> None:
        self.net, self.workdir = net, tmp_path / "there"

    def prepare(self, launcher: Any, **more: Any) -> Path:
        """Prepare two hosts for a run; return its folder."""
        section = ssh_section(self.net, self.workdir, **more)
        job = job_of(program={"module": "this"}, ssh=section, workers=2, topology="torchrun")
        rendered = launcher.render(job)
        run = create_run(job, rendered)
        prepare.prepare_hosts(run)
        return run.folder

    def test_shared_directory_is_prepared_once(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        folder = self.prepare(launcher, setup="cat a.txt >> count; ls .stoker")
        assert (self.workdir / "count").read_text() == "a"
        logs = sorted(folder.glob("setup.*.log"))
        assert [log.name for log in logs] == ["setup.node1.log"]
        assert "marker-" not in logs[0].read_text()
        assert not (tmp_path / ".stoker").exists()

    def test_same_path_on_two_disks_is_prepared_twice(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        self.workdir.mkdir()
        run_on(self.net["node2"], "mount", "-t", "tmpfs", "none", str(self.workdir))
        try:
            folder = self.prepare(launcher, setup="cat a.txt >> count; wc -c < count", exclude=["there"])
            for host in ("node1", "node2"):
                assert (folder / f"setup.{host}.log").read_text() == "1\n"
        finally:
            run_on(self.net["node2"], "umount", str(self.workdir))
        assert (self.workdir / "count").read_text() == "a"

    def test_local_directory_is_not_uploaded_onto_itself(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepare, "list_files", lambda *_, **__: pytest.fail("must not upload"))
        self.workdir = tmp_path
        self.prepare(launcher)
        assert not list(tmp_path.glob(".stoker/marker-*"))

    def test_local_failure_becomes_the_status(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        job = job_of("true", ssh=ssh_section(self.net, self.workdir, "node1"))
        rendered = launcher.render(job)
        run = create_run(job, without_rsync(rendered))
        (tmp_path / "a.txt").touch()
        monkeypatch.setattr("stoker.launchers.ssh.upload.write_archive", fail)
        with pytest.raises(InputError, match=r"No space left") as caught:
            launcher.start(rendered, run)
        assert caught.value.where == run.id
        assert run.read_status().state is JobState.FAILED

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_setup_stops_with_the_launching_command(self, number: int, tmp_path: Path) -> None:
        # By far before the lease expires.
        section = ssh_section(self.net, self.workdir, "node1", setup="touch begun; sleep 4321", lost_after=100)
        (tmp_path / "job.yaml").write_bytes(to_json(job_of("true", ssh=section)))
        argv = [sys.executable, "-m", "stoker", "job", "run", "job.yaml", "--on", "ssh", "--detach"]
        with subprocess.Popen(
            argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=restore_signals
        ) as process:
            wait_until((self.workdir / "begun").exists)
            env = {"STOKER_RUN": find_run("small").id, "STOKER_HOST": "node1"}
            assert find_processes_by_env(env)
            process.send_signal(number)
        assert number != signal.SIGINT or find_run("small").read_status().state is JobState.STOPPED
        wait_until(lambda: not find_processes_by_env(env))


def run_on(host: Host, *argv: str) -> None:
    """Run a command in the mount namespace of a host."""
    assert host.process is not None
    subprocess.run(["nsenter", "-t", str(host.process.pid), "-m", "--", *argv], check=True)

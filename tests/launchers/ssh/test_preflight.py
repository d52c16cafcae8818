"""How hosts are reached and prepared: crowded servers, odd shells and Pythons, folders that live or are shared."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.core.processes import marked
from stoker.core.spec import to_json
from stoker.errors import InputError, UnavailableError
from stoker.jobs.run_folder import create, find
from stoker.jobs.status import JobState
from stoker.launchers.ssh import launcher as preparing
from stoker.launchers.ssh import preflight
from stoker.launchers.ssh.client import Client, Session, agent_argv, by_any_python
from stoker.launchers.ssh.host_probe import Surveyor
from stoker.launchers.ssh.upload import _UNPACK, pack
from stoker.launchers.upload import listed, size_of
from tests.launchers.contract import Launching, job_of, until
from tests.launchers.ssh.test_launcher import keys_of
from tests.support.hosts import Host, Network, network

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


# --- Shells and Pythons there

GOOD = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
# As Python 2 does with -I, or an old Python 3 with our question.
OLD = '#!/bin/sh\necho "Unknown option: -I" >&2; exit 2\n'


@pytest.mark.parametrize(
    ("there", "code", "said"),
    [
        ({"mine": GOOD, "python3": OLD}, 0, "mine a b\n"),
        ({"mine": OLD, "python3": OLD, "python": GOOD}, 0, "python a b\n"),
        ({"python3": GOOD}, 0, "python3 a b\n"),
        ({"mine": OLD, "python": OLD}, 125, ""),
        ({}, 127, ""),
    ],
)
def test_the_first_python_that_is_new_enough(there: dict[str, str], code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    for name, text in there.items():
        (tmp_path / name).write_text(text.replace("exec ", f"export ME={name}; exec "))
        (tmp_path / name).chmod(0o755)
    command = by_any_python("mine", "import os, sys\nprint(os.environ['ME'], *sys.argv[1:])", "a", "b")
    done = subprocess.run(
        ["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, said)


@pytest.mark.parametrize("shell", ["sh", "bash", "tcsh"])
def test_any_login_shell_takes_the_command(shell: str) -> None:
    command = by_any_python(sys.executable, "import sys\nif sys.argv:\n    print('\\'\"$x', *sys.argv[1:])", "a b", "c")
    assert "\n" not in command
    assert "\n" not in agent_argv([], "host", "python3", "run")[-1]
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    assert subprocess.run([shell, "-c", command], capture_output=True, check=True).stdout == b"'\"$x a b c\n"


def test_a_python_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "reads").write_text("#!/bin/sh\ncat\n")
    (tmp_path / "reads").chmod(0o755)
    for name in ("/bin/true", "./reads"):
        answer = Surveyor().answer({"do": "python", "workdir": str(tmp_path), "python": name, "modules": []})
        assert answer == {"python": None, "python_fault": "it does not run what it is given"}


@pytest.mark.parametrize("folder", ["/proc/x", "/sys/x/y", "/dev/null/x"])
def test_a_folder_that_even_root_cannot_write(folder: str) -> None:
    found = _look_at(folder)
    assert found["workdir_fault"].startswith(folder.rsplit("/x")[0])
    (trouble,) = preflight.troubles(job_of("true"), preflight.Look("a", found), 1)
    assert trouble.sentence.startswith(f"cannot use the folder {folder}: ")
    assert trouble.sentence.endswith("(ssh.workdir names another)")


def test_a_look_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mtime_ns
    time.sleep(0.01)
    assert _look_at(str(tmp_path / "a" / "b"))["workdir_fault"] == ""
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mtime_ns == before


def _look_at(folder: str) -> dict[str, Any]:
    request = {"do": "look", "workdir": folder, "python": sys.executable, "modules": [], "paths": []}
    return Surveyor().answer({**request, "programs": ["bash"]})


def test_a_login_that_only_talks(net: Network, tmp_path: Path) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(argv, check=True)
    authorized = net.folder / "authorized"
    command = 'command="echo This account is currently not available.; exit 1"'
    authorized.write_text(f"{authorized.read_text()}{command} {(tmp_path / 'key.pub').read_text()}")
    config = f"IdentityFile {tmp_path}/key\nIdentitiesOnly yes\nUserKnownHostsFile {net.folder}/known\n"
    (tmp_path / "config").write_text(config)
    client = Client(config=str(tmp_path / "config"), user="root")
    with (
        Session(client, net["node1"].address, "python3") as session,
        pytest.raises(UnavailableError, match=r"could not be used: This account is currently not available\."),
    ):
        session.ask({"do": "look"})


# --- Many hosts


def test_many_names_behind_one_server(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes ten at a time. Of those that come all at once some are turned away, and come again."""
    monkeypatch.setattr(Session, "_doors", threading.BoundedSemaphore(preflight.AT_ONCE))
    client = Client(config=str(net.config))
    sessions = [Session(client, "node1", sys.executable) for _ in range(24)]
    try:
        asked = {"do": "listen", "port": 0, "token": "t"}
        assert all(answer["port"] for answer in preflight.at_once(lambda one: one.ask(asked), sessions))
    finally:
        preflight.at_once(Session.close, sessions)


def test_ctrl_c_ends_what_is_done_for_all() -> None:
    begun, go = [], threading.Event()

    def do(item: int) -> None:
        begun.append(item)
        go.wait(20)

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            preflight.at_once(do, range(100))
    finally:
        go.set()
    time.sleep(0.1)
    assert len(begun) == preflight.AT_ONCE


# --- The working folder


def unpack(archive: Path, to: Path) -> None:
    with open(archive, "rb") as data:
        subprocess.run(["sh", "-c", by_any_python(sys.executable, _UNPACK, str(to))], stdin=data, check=True)


def test_an_archive_holds_what_is_there(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a.txt").write_text("a")
    (source / "b.txt").hardlink_to(source / "deep" / "a.txt")
    (source / "b.txt").chmod(0o775)
    (source / "data").symlink_to("/mnt/data")
    names = listed(source, [])
    (source / "gone").touch()
    pack(tmp_path / "1.tar", source, [*names, "gone", "never/was"], ((".stoker/ours.py", b"ours"),))
    (there / "x").mkdir(parents=True)
    (there / "b.txt").symlink_to("x/else")
    (there / "x" / "else").write_text("not ours")
    for _ in range(2):
        unpack(tmp_path / "1.tar", there)
        assert (there / "data").readlink() == Path("/mnt/data")
        assert (there / "deep" / "a.txt").read_text() == (there / "b.txt").read_text() == "a"
        assert (there / "b.txt").stat().st_mode & 0o777 == 0o775
        assert (there / ".stoker" / "ours.py").read_text() == "ours"
        assert (there / "x" / "else").read_text() == "not ours"


def test_files_that_go_or_get_shorter_are_left_out(tmp_path: Path) -> None:
    odd = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # says that it is longer than it is
    if not odd.exists():
        pytest.skip(f"no {odd}")
    (tmp_path / "a").write_text("a")
    names = [str(path.relative_to("/")) for path in (tmp_path / "a", odd, tmp_path / "gone")]
    pack(tmp_path / "tar", Path("/"), [*names, names[0]], (("last", b"x"),))
    with tarfile.open(tmp_path / "tar") as tar:
        assert tar.getnames() == [names[0], names[0], "last"]
        assert tar.extractfile("last").read() == b"x"  # type: ignore[union-attr]
    assert size_of(tmp_path, ["a", "gone", "a/b"]) == 1


class TestPreparing(Launching):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _net(self, net: Network, tmp_path: Path) -> None:
        self.net, self.workdir = net, tmp_path / "there"

    def prepared(self, launcher: Any, **more: Any) -> Path:
        """The folder of a run on two hosts, once they are prepared."""
        job = job_of(
            program={"module": "this"}, ssh=keys_of(self.net, self.workdir, **more), workers=2, topology="torchrun"
        )
        rendered = launcher.render(job)
        run = create(job, rendered)
        preparing._prepare_all(run)
        return run.folder

    def test_a_shared_folder_is_prepared_once(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        folder = self.prepared(launcher, setup="cat a.txt >> count; ls .stoker")
        assert (self.workdir / "count").read_text() == "a"
        logs = sorted(folder.glob("setup.*.log"))
        assert [log.name for log in logs] == ["setup.node1.log"]
        assert "sign-" not in logs[0].read_text()
        assert not (tmp_path / ".stoker").exists()

    def test_folders_of_one_name_on_two_disks(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        self.workdir.mkdir()
        own_disk(self.net["node2"], self.workdir)
        try:
            folder = self.prepared(launcher, setup="cat a.txt >> count; wc -c < count", exclude=["there"])
            for host in ("node1", "node2"):
                assert (folder / f"setup.{host}.log").read_text() == "1\n"
        finally:
            inside(self.net["node2"], "umount", str(self.workdir))
        assert (self.workdir / "count").read_text() == "a"

    def test_the_folder_here_is_not_copied_onto_itself(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preparing, "listed", lambda *_, **__: pytest.fail("nothing is to be copied"))
        self.workdir = tmp_path
        self.prepared(launcher)
        assert not list(tmp_path.glob(".stoker/sign-*"))

    def test_a_failure_of_this_machine_is_kept(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        job = job_of("true", ssh=keys_of(self.net, self.workdir, "node1"))
        rendered = launcher.render(job)
        places = {name: msgspec.structs.replace(one, rsync=False) for name, one in rendered.places.items()}
        run = create(job, msgspec.structs.replace(rendered, places=places))
        (tmp_path / "a.txt").touch()
        monkeypatch.setattr("stoker.launchers.ssh.upload.pack", full)
        with pytest.raises(InputError, match=r"the hosts were not prepared: .*No space left"):
            launcher.start(rendered, run)
        assert run.read_status().state is JobState.FAILED

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_a_setup_ends_with_who_wants_it(self, number: int, tmp_path: Path) -> None:
        job = job_of(
            "true", ssh=keys_of(self.net, self.workdir, "node1", setup="touch begun; sleep 4321", lost_after=20)
        )
        (tmp_path / "job.yaml").write_bytes(to_json(job))
        argv = [sys.executable, "-m", "stoker", "job", "run", "job.yaml", "--on", "ssh", "--detach"]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            until((self.workdir / "begun").exists)
            marks = {"STOKER_RUN": find("small").id, "STOKER_HOST": "node1"}
            assert marked(marks)
            process.send_signal(number)
        assert number != signal.SIGINT or find("small").read_status().state is JobState.STOPPED
        until(lambda: not marked(marks), 10)


def own_disk(host: Host, folder: Path) -> None:
    """Give a host a disk of its own at a folder."""
    inside(host, "mount", "-t", "tmpfs", "none", str(folder))


def inside(host: Host, *argv: str) -> None:
    """Run a command with the disks of a host."""
    assert host.process is not None
    subprocess.run(["nsenter", "-t", str(host.process.pid), "-m", "--", *argv], check=True)

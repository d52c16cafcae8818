"""Which files of a working folder go to hosts, and which hosts there are: without any host."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.launchers.ssh.client import Client, Frames, expanded, meaning, places
from stoker.launchers.ssh.host_probe import MAGIC
from stoker.launchers.upload import Ignored, listed


@pytest.mark.parametrize(
    ("pattern", "left_out", "kept"),
    [
        ("*.bin", ["a.bin", "deep/a.bin"], ["a.bins", "bin"]),
        ("data", ["data", "deep/data"], ["database"]),
        ("/data", ["data"], ["deep/data"]),
        ("a/b", ["a/b"], ["x/a/b"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/xb"]),
        ("**/logs", ["logs", "a/b/logs"], ["log"]),
        ("a/**", ["a/x", "a/x/y"], ["a"]),
        ("run-?.[ab]x", ["run-1.ax", "run-2.bx"], ["run-12.ax", "run-1.cx"]),
        ("[!a]*", ["b"], ["a"]),
        ("# no", [], ["# no"]),
        (r"\#yes", ["#yes"], []),
        ("a+b.(x)", ["a+b.(x)"], ["aab.x"]),
    ],
)
def test_a_pattern(pattern: str, left_out: list[str], kept: list[str]) -> None:
    ignored = Ignored([pattern])
    assert [path for path in (*left_out, *kept) if ignored(path, is_folder=False)] == left_out


def test_the_last_pattern_that_fits_decides() -> None:
    ignored = Ignored(["*.bin", "", "!keep.bin", "build/"])
    assert ignored("a.bin", is_folder=False)
    assert not ignored("deep/keep.bin", is_folder=False)
    assert ignored("build", is_folder=True)
    assert not ignored("build", is_folder=False)


def test_what_is_listed(tmp_path: Path) -> None:
    for name in (
        "a.py",
        ".git/HEAD",
        "pkg/__pycache__/a.pyc",
        "pkg/b.py",
        "runs/log",
        ".venv/bin/python",
        "out/x",
        "y/out",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".stokerignore").write_text("/out\n")
    assert listed(tmp_path, ["y/"], away=tmp_path / "runs") == [".stokerignore", "a.py", "pkg/b.py"]
    assert ".venv/bin/python" in listed(tmp_path, ["!.venv/"])


def test_hosts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("# ours\nnode1 slots=2\n\nnode2:1  # new\n")
    assert expanded(("first", "@hosts.txt")) == ("first", "node1:2", "node2:1")
    (tmp_path / "wrong.txt").write_text("node1 what=2\nnode2\n\n-oProxyCommand=x\n")
    (tmp_path / "odd.txt").write_bytes(b"\xff\n")
    with pytest.raises(SpecError) as caught:
        expanded(("@wrong.txt", "@hosts.txt", "@none.txt", "@odd.txt"))
    assert [str(fault) for fault in caught.value.faults] == [
        "wrong.txt:1: 'node1 what=2' is no host",
        "wrong.txt:4: '-oProxyCommand=x' is no host",
        "none.txt: the file of hosts cannot be read: no such file or directory",
        "odd.txt: the file of hosts cannot be read: it is no text",
    ]


def test_a_place_for_each_slot() -> None:
    assert places(("a", "b:2", "me@c", "fe80::1")) == ["a", "b", "b", "me@c", "fe80::1"]


def test_frames_come_whole_whatever_a_login_prints() -> None:
    sent = b"Welcome!\n" + MAGIC + b"o" + (5).to_bytes(4, "big") + b"hello" + b"k" + (0).to_bytes(4, "big")
    frames = Frames()
    got = [frame for at in range(len(sent)) for frame in frames.feed(sent[at : at + 1])]
    assert got == [(b"o", b"hello"), (b"k", b"")]
    assert frames.before == b"Welcome!\n"


def test_ssh_is_never_asked_to_ask() -> None:
    argv = Client(config="c", user="me").argv()
    assert argv[:4] == ["ssh", "-T", "-F", "c"]
    assert "BatchMode=yes" in argv
    assert not any("StrictHostKeyChecking" in word for word in argv)
    assert argv[-2:] == ["-l", "me"]


def test_what_ssh_says_that_nobody_foresaw() -> None:
    assert meaning(Client(), "a", "first\nodd thing\n", 255) == "could not be used: odd thing"
    assert meaning(Client(), "a", "", 7) == "could not be used: ssh ended with exit code 7"


@pytest.mark.parametrize(
    ("client", "login"),
    [
        (Client(), "you@a"),
        (Client(user="me"), "me@a"),
        (Client(config="/etc/my config", user="me"), "-F '/etc/my config' me@a"),
    ],
)
def test_a_command_to_try_is_whole(client: Client, login: str) -> None:
    denied, new = "Permission denied (publickey).", "Host key verification failed."
    assert meaning(client, "you@a", denied, 255).endswith(f"Try: ssh-copy-id {login}")
    assert meaning(client, "you@a", new, 255).endswith(f"connect once by hand: ssh {login}")

"""The ssh client without any host: host lists, frames, arguments and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.launchers.ssh.client import FrameParser, SshClient, expand_hosts, expand_slots, format_failure
from stoker.launchers.ssh.host_probe import MAGIC


def test_hosts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("# ours\nnode1 slots=2\n\nnode2:1  # new\n")
    assert expand_hosts(("first", "@hosts.txt")) == ("first", "node1:2", "node2:1")
    (tmp_path / "wrong.txt").write_text("node1 what=2\nnode2\n\n-oProxyCommand=x\n")
    (tmp_path / "odd.txt").write_bytes(b"\xff\n")
    with pytest.raises(SpecError) as caught:
        expand_hosts(("@wrong.txt", "@hosts.txt", "@none.txt", "@odd.txt"))
    assert [str(fault) for fault in caught.value.faults] == [
        "wrong.txt:1: 'node1 what=2' is no host",
        "wrong.txt:4: '-oProxyCommand=x' is no host",
        "none.txt: the file of hosts cannot be read: no such file or directory",
        "odd.txt: the file of hosts cannot be read: it is no text",
    ]


def test_a_place_for_each_slot() -> None:
    assert expand_slots(("a", "b:2", "me@c", "fe80::1")) == ["a", "b", "b", "me@c", "fe80::1"]


def test_frames_come_whole_whatever_a_login_prints() -> None:
    sent = b"Welcome!\n" + MAGIC + b"o" + (5).to_bytes(4, "big") + b"hello" + b"k" + (0).to_bytes(4, "big")
    frames = FrameParser()
    got = [frame for at in range(len(sent)) for frame in frames.feed(sent[at : at + 1])]
    assert got == [(b"o", b"hello"), (b"k", b"")]
    assert frames.before == b"Welcome!\n"


def test_ssh_is_never_asked_to_ask() -> None:
    argv = SshClient(config="c", user="me").argv()
    assert argv[:4] == ["ssh", "-T", "-F", "c"]
    assert "BatchMode=yes" in argv
    assert not any("StrictHostKeyChecking" in word for word in argv)
    assert argv[-2:] == ["-l", "me"]


def test_what_ssh_says_that_nobody_foresaw() -> None:
    assert format_failure(SshClient(), "a", "first\nodd thing\n", 255) == "could not be used: odd thing"
    assert format_failure(SshClient(), "a", "", 7) == "could not be used: ssh ended with exit code 7"


@pytest.mark.parametrize(
    ("client", "login"),
    [
        (SshClient(), "you@a"),
        (SshClient(user="me"), "me@a"),
        (SshClient(config="/etc/my config", user="me"), "-F '/etc/my config' me@a"),
    ],
)
def test_a_command_to_try_is_whole(client: SshClient, login: str) -> None:
    denied, new = "Permission denied (publickey).", "Host key verification failed."
    assert format_failure(client, "you@a", denied, 255).endswith(f"Try: ssh-copy-id {login}")
    assert format_failure(client, "you@a", new, 255).endswith(f"connect once by hand: ssh {login}")

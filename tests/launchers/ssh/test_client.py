"""The ssh client without any host: host lists, frames, arguments and error messages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.launchers.ssh.client import SshClient, agent_argv, expand_hosts, expand_slots, format_failure
from stoker.remote.frames import ALIVE, MAGIC, OUTPUT, FrameParser, pack_frame


def test_hosts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("# ours\nnode1 slots=2\n\nnode2:1  # new\n")
    assert expand_hosts(("first", "@hosts.txt")) == ("first", "node1:2", "node2:1")
    (tmp_path / "wrong.txt").write_text("node1 what=2\nnode2\n\n-oProxyCommand=x\n")
    (tmp_path / "odd.txt").write_bytes(b"\xff\n")
    with pytest.raises(SpecError) as caught:
        expand_hosts(("@wrong.txt", "@hosts.txt", "@none.txt", "@odd.txt"))
    paths = [fault.path for fault in caught.value.faults]
    assert paths == ["wrong.txt:1", "wrong.txt:4", "none.txt", "odd.txt"]
    messages = [str(fault) for fault in caught.value.faults]
    assert "'node1 what=2'" in messages[0]
    assert "'-oProxyCommand=x'" in messages[1]
    assert "no such file or directory" in messages[2]
    assert "text" in messages[3]


def test_one_host_name_per_slot() -> None:
    assert expand_slots(("a", "b:2", "me@c", "fe80::1")) == ["a", "b", "b", "me@c", "fe80::1"]


def test_frames_are_parsed_after_the_output_of_a_login_shell() -> None:
    sent = b"Welcome!\n" + MAGIC + pack_frame(OUTPUT, b"hello", "worker-0.0") + pack_frame(ALIVE)
    parser = FrameParser()
    frames = [frame for at in range(len(sent)) for frame in parser.feed(sent[at : at + 1])]
    assert frames == [(OUTPUT, "worker-0.0", b"hello"), (ALIVE, "", b"")]
    assert parser.preamble == b"Welcome!\n"


def test_ssh_runs_in_batch_mode() -> None:
    argv = SshClient(config="c", user="me").argv()
    assert argv[:4] == ["ssh", "-T", "-F", "c"]
    assert "BatchMode=yes" in argv
    assert not any("StrictHostKeyChecking" in word for word in argv)
    assert argv[-2:] == ["-l", "me"]


def test_processes_of_a_run_on_a_host_are_known_by_both() -> None:
    words = shlex.split(agent_argv(["ssh"], "me@node1", "python3", "run")[-1])
    assert words[-1] == "stoker-agent-run@me@node1"


def test_unknown_failure_shows_the_last_line_or_the_exit_code() -> None:
    assert format_failure(SshClient(), "a", "first\nodd thing\n", 255).endswith(": odd thing")
    assert re.search(r"\bssh\b.*\b7$", format_failure(SshClient(), "a", "", 7))


@pytest.mark.parametrize(
    ("client", "login"),
    [
        (SshClient(), "you@a"),
        (SshClient(user="me"), "me@a"),
        (SshClient(config="/etc/my config", user="me"), "-F '/etc/my config' me@a"),
    ],
)
def test_failure_ends_with_a_complete_command(client: SshClient, login: str) -> None:
    denied, new = "Permission denied (publickey).", "Host key verification failed."
    assert format_failure(client, "you@a", denied, 255).endswith(f": ssh-copy-id {login})")
    assert format_failure(client, "you@a", new, 255).endswith(f": ssh {login})")

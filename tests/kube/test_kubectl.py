"""kubectl's command lines, and how its streams, codes and signals are passed on; with a program in its place."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import InputError, MissingProgramError
from stoker.kube import kubectl
from stoker.kube.kubectl import PortForward, PortMapping, base_argv, exec_argv, port_forward_argv
from tests.support.waiting import eventually, is_alive

FAKE = """#!{python} -S
import json, os, sys, time
with open({log!r}, "a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "config": os.environ.get("KUBECONFIG")}}) + "\\n")
{body}
"""
PLACE = ["--context=arn:aws:eks:us:1:cluster/one", "--namespace=team"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = tmp_path / "config"
    config.write_text("contexts: []\n")
    monkeypatch.setenv("KUBECONFIG", str(config))
    return SimpleNamespace(context="arn:aws:eks:us:1:cluster/one", namespace="team")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], list[dict[str, Any]]]]:
    """Put a program called kubectl on the PATH; give what it was called with."""
    log = tmp_path / "calls"

    def install(body: str) -> Callable[[], list[dict[str, Any]]]:
        program = tmp_path / "bin" / "kubectl"
        program.parent.mkdir()
        program.write_text(FAKE.format(python=sys.executable, log=str(log), body=body))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return install


def test_every_word_is_one_argument() -> None:
    line = exec_argv("digits-0", "main", ["sh", "-c", "echo $HOME; ls -l", "--tty"], stdin=True, tty=False)
    assert line == ["exec", "digits-0", "--container=main", "--stdin", "--", "sh", "-c", "echo $HOME; ls -l", "--tty"]
    assert "--tty" in exec_argv("p", "main", ["sh"], stdin=True, tty=True)
    assert base_argv("kubectl", "-x y", "team") == ["kubectl", "--context=-x y", "--namespace=team"]
    assert base_argv("kubectl", None, "team") == ["kubectl", "--namespace=team"]


def test_tunnels_begin_on_this_machine_only() -> None:
    assert port_forward_argv("p", {8080: 6006, 22: 22}) == [
        "port-forward",
        "--address=127.0.0.1",
        "pod/p",
        "8080:6006",
        "22:22",
    ]


@pytest.mark.parametrize(
    ("text", "port"),
    [("6006", PortMapping(6006, 6006)), ("6006:8080", PortMapping(6006, 8080)), ("1:0", PortMapping(1, 0))],
)
def test_reads_ports(text: str, port: PortMapping) -> None:
    assert PortMapping.parse(text) == port


@pytest.mark.parametrize("text", ["", "0", "65536", "http", "80:", ":80", "80:70000", "-1", "80:80:80", "²", " 80"])
def test_refuses_what_is_no_port(text: str) -> None:
    with pytest.raises(InputError, match="is no port"):
        PortMapping.parse(text)


def test_says_what_to_install(cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not kubectl.is_installed()
    with pytest.raises(MissingProgramError, match=r"a tunnel to a pod needs the program 'kubectl'.*install it"):
        PortForward(cluster, "p", {1: 1})


RUN = """
import sys
from types import SimpleNamespace
from stoker.kube.kubectl import exec_into
cluster = SimpleNamespace(context="arn:aws:eks:us:1:cluster/one", namespace="team")
sys.exit(exec_into(cluster, "digits-0", "main", ["train", "--flag", "a b"]))
"""


def run(**more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", RUN], capture_output=True, timeout=60, check=False, **more)


def test_streams_and_code_are_passed_on(cluster: Any, fake: Any) -> None:
    calls = fake("sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('odd'); sys.exit(7)")
    done = run(input=b"data\n")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"DATA\n", b"odd")
    line = [*PLACE, "exec", "digits-0", "--container=main", "--stdin", "--", "train", "--flag", "a b"]
    assert calls() == [{"argv": line, "config": os.environ["KUBECONFIG"]}]


def test_reads_nothing_where_there_is_nothing_to_read(cluster: Any, fake: Any) -> None:
    calls = fake("")
    assert run(stdin=subprocess.DEVNULL).returncode == 0
    assert "--stdin" not in calls()[0]["argv"]


def test_a_signal_is_told_as_shells_do(cluster: Any, fake: Any) -> None:
    fake("os.kill(os.getpid(), 9)")
    assert run(input=b"").returncode == 128 + signal.SIGKILL


def test_a_home_folder_in_the_configuration_s_name_is_found_by_both(
    cluster: Any, fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "~/config:/nowhere")
    calls = fake("")
    assert run(stdin=subprocess.DEVNULL).returncode == 0
    assert calls()[0]["config"] == f"{tmp_path}/config:/nowhere"


def test_in_a_pod_without_configuration_there_is_no_context_to_name(
    cluster: Any, fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    calls = fake("")
    assert run(stdin=subprocess.DEVNULL).returncode == 0
    assert calls()[0]["argv"][0] == "--namespace=team"


def test_a_terminal_is_passed_on_and_left_as_it_was(cluster: Any, fake: Any) -> None:
    calls = fake("import tty; tty.setraw(0); print(os.isatty(0), os.isatty(1), flush=True); os.kill(os.getpid(), 9)")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    done = subprocess.run([sys.executable, "-c", RUN], stdin=theirs, stdout=theirs, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert termios.tcgetattr(theirs) == before
    assert b"True True" in os.read(ours, 1000)
    assert calls()[0]["argv"][4:7] == ["--container=main", "--stdin", "--tty"]
    os.close(ours)
    os.close(theirs)


def test_output_into_a_file_gets_no_terminal(cluster: Any, fake: Any, tmp_path: Path) -> None:
    calls = fake("print('x')")
    ours, theirs = pty.openpty()
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", RUN], stdin=theirs, stdout=out, timeout=60, check=True)
    assert "--tty" not in calls()[0]["argv"]
    assert (tmp_path / "out").read_bytes() == b"x\n"
    os.close(ours)
    os.close(theirs)


def test_kubectl_does_not_outlive_us(cluster: Any, fake: Any, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    fake(f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    code = f"import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n{RUN}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as popen:
        assert eventually(lambda: mark.exists() and mark.read_text() != "")
        popen.terminate()
        popen.wait(30)
    assert not is_alive(int(mark.read_text()))


def test_a_tunnel_tells_line_by_line_and_ends(cluster: Any, fake: Any) -> None:
    calls = fake(
        "print('Forwarding from 127.0.0.1:8080 -> 6006', flush=True)\n"
        "print('error: lost connection to pod', file=sys.stderr)"
    )
    with PortForward(cluster, "p", {8080: 6006}) as tunnel:
        lines = [tunnel.next_line(30) for _ in range(3)]
    assert lines == ["Forwarding from 127.0.0.1:8080 -> 6006", "error: lost connection to pod", None]
    assert calls()[0]["argv"] == [*PLACE, "port-forward", "--address=127.0.0.1", "pod/p", "8080:6006"]


def test_a_tunnel_that_is_left_is_ended(cluster: Any, fake: Any) -> None:
    fake("print(os.getpid(), flush=True); time.sleep(600)")
    with PortForward(cluster, "p", {8080: 6006}) as tunnel:
        pid = int(tunnel.next_line(30) or 0)
        assert tunnel.next_line(0.01) == ""
    assert not is_alive(pid)

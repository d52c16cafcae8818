"""kubectl: command lines, and how streams, exit codes and signals are passed on, tested with a fake program."""

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
TARGET_ARGS = ["--context=arn:aws:eks:us:1:cluster/one", "--namespace=team"]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = tmp_path / "config"
    config.write_text("contexts: []\n")
    monkeypatch.setenv("KUBECONFIG", str(config))
    return SimpleNamespace(context="arn:aws:eks:us:1:cluster/one", namespace="team")


@pytest.fixture
def install_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Callable[[], list[dict[str, Any]]]]:
    """Put a fake kubectl on the PATH; return a function that lists its calls."""
    log = tmp_path / "calls"

    def install(body: str) -> Callable[[], list[dict[str, Any]]]:
        program = tmp_path / "bin" / "kubectl"
        program.parent.mkdir()
        program.write_text(FAKE.format(python=sys.executable, log=str(log), body=body))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return install


def test_every_word_is_an_argument_of_its_own() -> None:
    line = exec_argv("digits-0", "main", ["sh", "-c", "echo $HOME; ls -l", "--tty"], stdin=True, tty=False)
    assert line == ["exec", "digits-0", "--container=main", "--stdin", "--", "sh", "-c", "echo $HOME; ls -l", "--tty"]
    assert "--tty" in exec_argv("p", "main", ["sh"], stdin=True, tty=True)
    assert base_argv("kubectl", "-x y", "team") == ["kubectl", "--context=-x y", "--namespace=team"]
    assert base_argv("kubectl", None, "team") == ["kubectl", "--namespace=team"]


def test_port_forward_binds_to_localhost_only() -> None:
    assert port_forward_argv("p", {8080: 6006, 22: 22}) == [
        "port-forward",
        "--address=127.0.0.1",
        "pod/p",
        "8080:6006",
        "22:22",
    ]


@pytest.mark.parametrize(
    ("text", "mapping"),
    [("6006", PortMapping(6006, 6006)), ("6006:8080", PortMapping(6006, 8080)), ("1:0", PortMapping(1, 0))],
)
def test_parse_port_mapping(text: str, mapping: PortMapping) -> None:
    assert PortMapping.parse(text) == mapping


@pytest.mark.parametrize("text", ["", "0", "65536", "http", "80:", ":80", "80:70000", "-1", "80:80:80", "²", " 80"])
def test_invalid_port_mapping(text: str) -> None:
    with pytest.raises(InputError) as caught:
        PortMapping.parse(text)
    assert repr(text) in caught.value.what
    assert "PORT:LOCAL" in str(caught.value.hint)


def test_missing_kubectl_names_program_and_remedy(client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not kubectl.is_installed()
    with pytest.raises(
        MissingProgramError, match=r"port.* needs the program 'kubectl'.*install.*kubernetes\.io/docs/tasks/tools"
    ):
        PortForward(client, "p", {1: 1})


SCRIPT = """
import sys
from types import SimpleNamespace
from stoker.kube.kubectl import exec_interactive
client = SimpleNamespace(context="arn:aws:eks:us:1:cluster/one", namespace="team")
sys.exit(exec_interactive(client, "digits-0", "main", ["train", "--flag", "a b"]))
"""


def run_script(**options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60, check=False, **options)


def test_streams_and_exit_code_are_passed_on(client: Any, install_kubectl: Any) -> None:
    calls = install_kubectl("sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('odd'); sys.exit(7)")
    completed = run_script(input=b"data\n")
    assert (completed.returncode, completed.stdout, completed.stderr) == (7, b"DATA\n", b"odd")
    line = [*TARGET_ARGS, "exec", "digits-0", "--container=main", "--stdin", "--", "train", "--flag", "a b"]
    assert calls() == [{"argv": line, "config": os.environ["KUBECONFIG"]}]


def test_no_stdin_flag_if_stdin_is_dev_null(client: Any, install_kubectl: Any) -> None:
    calls = install_kubectl("")
    assert run_script(stdin=subprocess.DEVNULL).returncode == 0
    assert "--stdin" not in calls()[0]["argv"]


def test_signal_becomes_exit_code_128_plus_n(client: Any, install_kubectl: Any) -> None:
    install_kubectl("os.kill(os.getpid(), 9)")
    assert run_script(input=b"").returncode == 128 + signal.SIGKILL


def test_tilde_in_kubeconfig_is_expanded_for_kubectl(
    client: Any, install_kubectl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "~/config:/nowhere")
    calls = install_kubectl("")
    assert run_script(stdin=subprocess.DEVNULL).returncode == 0
    assert calls()[0]["config"] == f"{tmp_path}/config:/nowhere"


def test_no_context_flag_without_a_kubeconfig(
    client: Any, install_kubectl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    calls = install_kubectl("")
    assert run_script(stdin=subprocess.DEVNULL).returncode == 0
    assert calls()[0]["argv"][0] == "--namespace=team"


def test_terminal_is_passed_on_and_restored(client: Any, install_kubectl: Any) -> None:
    calls = install_kubectl(
        "import tty; tty.setraw(0); print(os.isatty(0), os.isatty(1), flush=True); os.kill(os.getpid(), 9)"
    )
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    completed = subprocess.run([sys.executable, "-c", SCRIPT], stdin=slave, stdout=slave, timeout=60, check=False)
    assert completed.returncode == 128 + signal.SIGKILL
    assert termios.tcgetattr(slave) == before
    assert b"True True" in os.read(master, 1000)
    assert calls()[0]["argv"][4:7] == ["--container=main", "--stdin", "--tty"]
    os.close(master)
    os.close(slave)


def test_no_tty_flag_if_stdout_is_a_file(client: Any, install_kubectl: Any, tmp_path: Path) -> None:
    calls = install_kubectl("print('x')")
    master, slave = pty.openpty()
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", SCRIPT], stdin=slave, stdout=out, timeout=60, check=True)
    assert "--tty" not in calls()[0]["argv"]
    assert (tmp_path / "out").read_bytes() == b"x\n"
    os.close(master)
    os.close(slave)


def test_kubectl_does_not_outlive_its_parent(client: Any, install_kubectl: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    install_kubectl(f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    code = f"import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n{SCRIPT}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as popen:
        assert eventually(lambda: pid_file.exists() and pid_file.read_text() != "")
        popen.terminate()
        popen.wait(30)
    assert not is_alive(int(pid_file.read_text()))


def test_port_forward_yields_lines_until_kubectl_exits(client: Any, install_kubectl: Any) -> None:
    calls = install_kubectl(
        "print('Forwarding from 127.0.0.1:8080 -> 6006', flush=True)\n"
        "print('error: lost connection to pod', file=sys.stderr)"
    )
    with PortForward(client, "p", {8080: 6006}) as forward:
        lines = [forward.next_line(30) for _ in range(3)]
    assert lines == ["Forwarding from 127.0.0.1:8080 -> 6006", "error: lost connection to pod", None]
    assert calls()[0]["argv"] == [*TARGET_ARGS, "port-forward", "--address=127.0.0.1", "pod/p", "8080:6006"]


def test_port_forward_is_terminated_on_exit(client: Any, install_kubectl: Any) -> None:
    install_kubectl("print(os.getpid(), flush=True); time.sleep(600)")
    with PortForward(client, "p", {8080: 6006}) as forward:
        pid = int(forward.next_line(30) or 0)
        assert forward.next_line(0.01) == ""
    assert not is_alive(pid)

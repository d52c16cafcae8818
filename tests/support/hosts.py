"""Hosts for tests: network namespaces on one bridge, each with its own process ids and sshd."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.core.processes import Process, start
from tests.support.disks import NOT_ALLOWED
from tests.support.waiting import eventually

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass
class Host:
    """One host: its network namespace, its address and its sshd."""

    name: str
    namespace: str
    address: str
    interface: str
    bridge_port: str
    """The interface on the bridge that is connected to the host."""
    folder: Path
    argv: list[str]
    process: Process | None = field(default=None)

    def up(self) -> None:
        """Start sshd and wait until it accepts connections."""
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.process = start(self.argv, stdout=log, stderr=log)
        assert eventually(self._accepts_connections), (self.folder / f"{self.name}.log").read_text()

    def _accepts_connections(self) -> bool:
        probe = f"exec 3<>/dev/tcp/{self.address}/22"
        return subprocess.run(["bash", "-c", probe], capture_output=True, check=False).returncode == 0

    def down(self) -> None:
        """Kill sshd and every process on the host."""
        if self.process is not None:
            self.process.stop(0)

    def disconnect(self) -> None:
        """Cut the network of the host."""
        _ip("link", "set", self.bridge_port, "down")

    def reconnect(self) -> None:
        """Restore the network of the host."""
        _ip("link", "set", self.bridge_port, "up")

    def sessions(self) -> list[int]:
        """The sshd processes that serve a connection, as process ids of this machine."""
        assert self.process is not None
        return [pid for pid in _descendants(self.process.pid) if _command_name(pid) == "sshd"][1:]

    def kill_sessions(self) -> None:
        """Kill the sshd processes of connections, but not what they have started."""
        for pid in self.sessions():
            os.kill(pid, signal.SIGKILL)


@dataclass
class Network:
    """A network of hosts and the ssh configuration for it."""

    folder: Path
    hosts: list[Host]
    bridge: str

    @property
    def config(self) -> Path:
        """The configuration file for `ssh -F`."""
        return self.folder / "config"

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)


_NETWORK_NUMBERS = itertools.count()


@contextmanager
def network(folder: Path, names: tuple[str, ...] = ("node1", "node2")) -> Iterator[Network]:
    """Start hosts on a network of their own that this machine is part of."""
    if os.geteuid() != 0:
        pytest.skip(f"network namespaces are {NOT_ALLOWED}: not root")
    for program in ("ip", "ssh", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"no program {program!r}")
    if SSHD is None:
        pytest.skip("no program 'sshd'")
    number = next(_NETWORK_NUMBERS)  # new names: the kernel removes a link a moment after its namespace
    tag = f"{os.getpid() % 0xFFF:03x}{number % 16:x}"
    bridge = f"stbr{tag}"
    net = f"10.{77 + os.getpid() % 100}.{(os.getpid() // 100 + number) % 250}"
    if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, check=False).returncode:
        pytest.skip(f"making a bridge is {NOT_ALLOWED}")
    hosts: list[Host] = []
    try:
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        _make_keys(folder)
        for number, name in enumerate(names, 2):
            hosts.append(_make_host(folder, name, f"st{tag}{number}", f"{net}.{number}", bridge))
        _write_ssh_config(folder, hosts)
        for host in hosts:
            host.up()
        yield Network(folder, hosts, bridge)
    finally:
        for host in hosts:
            host.down()
            _ip("netns", "del", host.namespace)
        _ip("link", "del", bridge)


def _make_keys(folder: Path) -> None:
    for name in ("user", "stranger", "host", "other"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(argv, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")


def _make_host(folder: Path, name: str, namespace: str, address: str, bridge: str) -> Host:
    bridge_port, interface = f"{namespace}o", f"{namespace}i"
    _ip("netns", "add", namespace)
    _ip("link", "add", bridge_port, "type", "veth", "peer", "name", interface, "netns", namespace)
    _ip("link", "set", bridge_port, "master", bridge, "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
    _ip("-n", namespace, "link", "set", interface, "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    config = folder / f"{name}.sshd"
    config.write_text(
        f"Port 22\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        # Skips the account's own .bashrc, which may be slow: bash reads it only at the first shell level.
        "PrintMotd no\nSetEnv SHLVL=2\n"
    )
    assert SSHD is not None
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = ["ip", "netns", "exec", namespace, *unshare, SSHD, "-D", "-e", "-f", str(config)]
    return Host(name, namespace, address, interface, bridge_port, folder, argv)


def _write_ssh_config(folder: Path, hosts: list[Host]) -> None:
    public = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"{host.address} {public}\n" for host in hosts))
    base = f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  User root\n"
    base += "  KexAlgorithms curve25519-sha256\n"  # the fastest one
    (folder / "config").write_text("".join(f"Host {host.name}\n  HostName {host.address}\n{base}" for host in hosts))


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def _descendants(root: int) -> list[int]:
    """Return the process ids below a process, parents before their children."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    pids, queue = [], [root]
    while queue:
        pids.append(current := queue.pop(0))
        queue += [pid for pid, parent in parents.items() if parent == current]
    return pids[1:]


def _command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""

"""Hosts for tests: network namespaces on one bridge, each with process numbers and an sshd of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.core.processes import Process, start
from tests.support.disks import NOT_ALLOWED

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass
class Host:
    """One host: its namespace, its address, its sshd."""

    name: str
    space: str
    address: str
    interface: str
    outside: str
    folder: Path
    argv: list[str]
    process: Process | None = field(default=None)

    def up(self) -> None:
        """Start sshd, and wait until it answers."""
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.process = start(self.argv, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        probe = f"exec 3<>/dev/tcp/{self.address}/22"
        while subprocess.run(["bash", "-c", probe], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, (self.folder / f"{self.name}.log").read_text()
            time.sleep(0.02)

    def down(self) -> None:
        """End sshd and all that runs on the host."""
        if self.process is not None:
            self.process.stop(0)

    def disconnect(self) -> None:
        """Pull the cable."""
        _ip("link", "set", self.outside, "down")

    def reconnect(self) -> None:
        """Put the cable back."""
        _ip("link", "set", self.outside, "up")

    def sessions(self) -> list[int]:
        """The processes of sshd that serve a connection, as this machine numbers them."""
        assert self.process is not None
        return [pid for pid in _descendants(self.process.pid) if _name(pid) == "sshd"][1:]

    def kill_sessions(self) -> None:
        """Kill what serves connections, and not what it serves."""
        for pid in self.sessions():
            os.kill(pid, signal.SIGKILL)


@dataclass
class Network:
    """Hosts, and the configuration by which ssh finds them."""

    folder: Path
    hosts: list[Host]
    bridge: str

    @property
    def config(self) -> Path:
        """For `ssh -F`."""
        return self.folder / "config"

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)


_NUMBERS = itertools.count()


@contextmanager
def network(folder: Path, names: tuple[str, ...] = ("node1", "node2")) -> Iterator[Network]:
    """Hosts on a network of their own, which this machine is on too."""
    if os.geteuid() != 0:
        pytest.skip(f"network namespaces are {NOT_ALLOWED}: not root")
    for program in ("ip", "ssh", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"no program {program!r}")
    if SSHD is None:
        pytest.skip("no program 'sshd'")
    number = next(_NUMBERS)  # the kernel forgets a link a moment after its namespace
    tag = f"{os.getpid() % 0xFFF:03x}{number % 16:x}"
    bridge = f"stbr{tag}"
    net = f"10.{77 + os.getpid() % 100}.{(os.getpid() // 100 + number) % 250}"
    if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, check=False).returncode:
        pytest.skip(f"making a bridge is {NOT_ALLOWED}")
    hosts: list[Host] = []
    try:
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        _keys(folder)
        for number, name in enumerate(names, 2):
            hosts.append(_host(folder, name, f"st{tag}{number}", f"{net}.{number}", bridge))
        _configure(folder, hosts)
        for host in hosts:
            host.up()
        yield Network(folder, hosts, bridge)
    finally:
        for host in hosts:
            host.down()
            _ip("netns", "del", host.space)
        _ip("link", "del", bridge)


def _keys(folder: Path) -> None:
    for name in ("user", "stranger", "host", "other"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(argv, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")


def _host(folder: Path, name: str, space: str, address: str, bridge: str) -> Host:
    outside, inside = f"{space}o", f"{space}i"
    _ip("netns", "add", space)
    _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
    _ip("link", "set", outside, "master", bridge, "up")
    _ip("-n", space, "addr", "add", f"{address}/24", "dev", inside)
    _ip("-n", space, "link", "set", inside, "up")
    _ip("-n", space, "link", "set", "lo", "up")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    config = folder / f"{name}.sshd"
    config.write_text(
        f"Port 22\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        # What the own account does at a login is slow, and not for tests: bash reads .bashrc at the first level alone.
        "PrintMotd no\nSetEnv SHLVL=2\n"
    )
    assert SSHD is not None
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = ["ip", "netns", "exec", space, *own, SSHD, "-D", "-e", "-f", str(config)]
    return Host(name, space, address, inside, outside, folder, argv)


def _configure(folder: Path, hosts: list[Host]) -> None:
    public = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"{host.address} {public}\n" for host in hosts))
    base = f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  User root\n"
    base += "  KexAlgorithms curve25519-sha256\n"  # the quickest
    (folder / "config").write_text("".join(f"Host {host.name}\n  HostName {host.address}\n{base}" for host in hosts))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _descendants(root: int) -> list[int]:
    """Children first come before their own."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    found, rest = [], [root]
    while rest:
        one = rest.pop(0)
        found.append(one)
        rest += [pid for pid, parent in parents.items() if parent == one]
    return found[1:]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""

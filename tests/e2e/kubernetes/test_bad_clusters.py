"""Clusters that say no, or nothing: one sentence each."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import AccessError, UnavailableError
from stoker.jobs.run_folder import create
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from tests.e2e.kubernetes.pods import keys
from tests.launchers.contract import job_of, until


class Tunnel:
    """Carries connections to the API server, until it is cut."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        assert self._listener is not None
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection(self._to)
                self._sockets += [ours, theirs]
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def tunnel(kubeconfig: Path, tmp_path: Path) -> Iterator[tuple[Tunnel, Path]]:
    """A way to the cluster that can be cut, and the configuration that takes it."""
    config = yaml.safe_load(kubeconfig.read_text())
    found = re.fullmatch(r"https://([^:/]+):(\d+)", config["clusters"][0]["cluster"]["server"])
    assert found
    way = Tunnel(found[1], int(found[2]))
    config["clusters"][0]["cluster"] = {"server": f"https://127.0.0.1:{way.port}", "insecure-skip-tls-verify": True}
    path = tmp_path / "through-the-tunnel"
    path.write_text(yaml.safe_dump(config))
    yield way, path
    way.cut()


def test_an_api_server_that_goes_away_and_comes_back(
    cluster: KubeClient, tunnel: tuple[Tunnel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, config = tunnel
    monkeypatch.setenv("KUBECONFIG", str(config))
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    launcher = KubernetesLauncher()
    job = job_of("for i in $(seq 30); do echo line $i; sleep 0.5; done", **keys(cluster.namespace))
    run = create(job, plan := launcher.render(job))
    launcher.start(plan, run)

    def text() -> list[str]:
        return [line.text for line in launcher.logs(run.handle, None, follow=False)]

    until(lambda: "line 3" in text(), 60)
    way.cut()
    until(lambda: "does not answer" in launcher.status(run.handle).message, 30)
    assert launcher.status(run.handle).state is JobState.RUNNING
    way.mend()
    until(lambda: launcher.status(run.handle).state.is_final, 60)
    assert launcher.status(run.handle).state is JobState.SUCCEEDED
    said = text()
    assert [line for line in said if line.startswith("line")] == [f"line {number}" for number in range(1, 31)]
    assert [line.split(":")[0] for line in said if line.startswith("---")][-1] == "--- the API server answers again"


def test_an_api_server_that_is_not_there(
    cluster: KubeClient, tunnel: tuple[Tunnel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    way, config = tunnel
    way.cut()
    monkeypatch.setenv("KUBECONFIG", str(config))
    with pytest.raises(UnavailableError, match=r"does not answer: .*refused"):
        KubernetesLauncher().runs()
    way.mend()


def test_no_permission(cluster: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(account(cluster, tmp_path)))
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    job = job_of("true", **keys(cluster.namespace))
    launcher = KubernetesLauncher()
    with pytest.raises(AccessError, match=r"may not get jobs\.batch in namespace \S+; `stoker job plan .*--rbac WHO`"):
        launcher.start(plan := launcher.render(job), create(job, plan))


def account(cluster: KubeClient, folder: Path, name: str = "nobody") -> Path:
    """Make an account that may do nothing, and a configuration for it."""
    meta = {"name": name, "namespace": cluster.namespace}
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    secret: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {**meta, "annotations": {"kubernetes.io/service-account.name": name}},
    }
    cluster.create(secret)
    until(lambda: "token" in ((cluster.get("Secret", name) or {}).get("data") or {}), 20)
    import base64

    data = (cluster.get("Secret", name) or {})["data"]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [
            {"name": "it", "cluster": {"server": cluster.server, "certificate-authority-data": data["ca.crt"]}}
        ],
        "users": [{"name": "it", "user": {"token": base64.b64decode(data["token"]).decode()}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": cluster.namespace}}],
    }
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_role_of_the_plan_is_enough(cluster: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    job = job_of("echo done by somebody", **keys(cluster.namespace))
    launcher = KubernetesLauncher()
    config = account(cluster, tmp_path, "runner")
    for one in launcher.render_rbac(job, "serviceaccount:runner").objects:
        cluster.apply(one)
    monkeypatch.setenv("KUBECONFIG", str(config))
    run = create(job, plan := launcher.render(job))
    launcher.start(plan, run)
    assert [line.text for line in launcher.logs(run.handle, None, follow=True)] == ["done by somebody"]
    assert launcher.status(run.handle).state is JobState.SUCCEEDED
    assert [row["run"] for row in launcher.runs()] == [run.id]
    launcher.stop(run.handle)
    assert not cluster.list_objects("Pod")

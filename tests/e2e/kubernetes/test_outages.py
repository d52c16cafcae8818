"""API server outages and missing permissions: jobs continue, and errors name the cause and the remedy."""

from __future__ import annotations

import base64
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import AccessDeniedError, UnavailableError
from stoker.jobs.run_folder import create_run
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.kube.errors import NOT_ALLOWED
from stoker.launchers.kubernetes.follower import RECONNECTED_NOTICE
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from tests.e2e.kubernetes.pods import build_job_keys
from tests.launchers.contract import job_of
from tests.support.waiting import wait_until


class TcpProxy:
    """Forwards connections to the API server until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self.port = 0
        self.open()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        assert self._listener is not None
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._to)
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxied(kubeconfig: Path, tmp_path: Path) -> Iterator[tuple[TcpProxy, Path]]:
    """A proxy to the API server, and a kubeconfig that uses it."""
    config = yaml.safe_load(kubeconfig.read_text())
    match = re.fullmatch(r"https://([^:/]+):(\d+)", config["clusters"][0]["cluster"]["server"])
    assert match
    proxy = TcpProxy(match[1], int(match[2]))
    config["clusters"][0]["cluster"] = {"server": f"https://127.0.0.1:{proxy.port}", "insecure-skip-tls-verify": True}
    path = tmp_path / "proxied.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    yield proxy, path
    proxy.close()


@pytest.mark.usefixtures("stoker_home")
def test_run_is_followed_across_an_outage(
    cluster: KubeClient, proxied: tuple[TcpProxy, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, config = proxied
    monkeypatch.setenv("KUBECONFIG", str(config))
    launcher = KubernetesLauncher()
    job = job_of("for i in $(seq 30); do echo line $i; sleep 0.5; done", **build_job_keys(cluster.namespace))
    run = create_run(job, plan := launcher.render(job))
    launcher.start(plan, run)

    def get_lines() -> list[str]:
        return [line.text for line in launcher.logs(run.handle, None, follow=False)]

    wait_until(lambda: "line 3" in get_lines(), 60)
    proxy.close()
    wait_until(lambda: "API server" in launcher.status(run.handle).message, 60)
    assert launcher.status(run.handle).state is JobState.RUNNING
    proxy.open()
    wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
    assert launcher.status(run.handle).state is JobState.SUCCEEDED
    lines = get_lines()
    assert [line for line in lines if line.startswith("line")] == [f"line {number}" for number in range(1, 31)]
    assert [line for line in lines if line.startswith("---")][-1] == f"--- {RECONNECTED_NOTICE}"


def test_unreachable_api_server(
    cluster: KubeClient, proxied: tuple[TcpProxy, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, config = proxied
    proxy.close()
    monkeypatch.setenv("KUBECONFIG", str(config))
    with pytest.raises(UnavailableError, match=rf":{proxy.port}: .*refused"):
        KubernetesLauncher().runs()
    proxy.open()


@pytest.mark.usefixtures("stoker_home")
def test_missing_permission_names_verb_resource_and_remedy(
    cluster: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(create_account(cluster, tmp_path)))
    job = job_of("true", **build_job_keys(cluster.namespace))
    launcher = KubernetesLauncher()
    with pytest.raises(
        AccessDeniedError, match=rf"{NOT_ALLOWED} get jobs\.batch in namespace \S+; `stoker job plan .*--rbac WHO`"
    ):
        launcher.start(plan := launcher.render(job), create_run(job, plan))


def create_account(cluster: KubeClient, folder: Path, name: str = "nobody") -> Path:
    """Create a service account without permissions; return its kubeconfig."""
    meta = {"name": name, "namespace": cluster.namespace}
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    secret: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {**meta, "annotations": {"kubernetes.io/service-account.name": name}},
    }
    cluster.create(secret)
    wait_until(lambda: "token" in ((cluster.get("Secret", name) or {}).get("data") or {}))
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


@pytest.mark.usefixtures("stoker_home")
def test_rendered_role_is_sufficient(cluster: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("echo done by somebody", **build_job_keys(cluster.namespace))
    launcher = KubernetesLauncher()
    config = create_account(cluster, tmp_path, "runner")
    for obj in launcher.render_rbac(job, "serviceaccount:runner").objects:
        cluster.apply(obj)
    monkeypatch.setenv("KUBECONFIG", str(config))
    run = create_run(job, plan := launcher.render(job))
    launcher.start(plan, run)
    assert [line.text for line in launcher.logs(run.handle, None, follow=True)] == ["done by somebody"]
    assert launcher.status(run.handle).state is JobState.SUCCEEDED
    assert [row["run"] for row in launcher.runs()] == [run.id]
    launcher.stop(run.handle)
    assert not cluster.list_objects("Pod")

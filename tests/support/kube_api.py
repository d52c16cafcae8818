"""An API server of Kubernetes for tests, with the objects of runs and the logs of their pods; it records requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stoker.jobs.spec import JobSpec
from stoker.kube.objects import ROLE_LABEL
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from stoker.launchers.kubernetes.run_objects import label_run
from tests.support.pod_objects import RUNNING, Manifest, build_pod

CREATED = "2026-01-01T00:00:00Z"
PLURALS = {"jobs": "Job", "pods": "Pod", "configmaps": "ConfigMap", "events": "Event"}


class KubeApi(ThreadingHTTPServer):
    """The server: objects that tests change, logs by pod, and the method and path of every request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.objects: list[Manifest] = []
        self.logs: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.stopping = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    def add_run(self, job: JobSpec, run_id: str) -> Manifest:
        """Add the objects of a run with one running pod for each Job; return its first Job."""
        created = {"creationTimestamp": CREATED, "resourceVersion": "1"}
        for obj in label_run(KubernetesLauncher("ctx/team").render(job).objects, run_id):
            obj["metadata"] |= {**created, "uid": f"{run_id} {obj['kind']} {obj['metadata']['name']}"}
            self.objects.append(obj)
            if obj["kind"] == "Job":
                obj["status"] = {"active": 1, "startTime": CREATED}
                name = f"{run_id}-{obj['metadata']['labels'].get(ROLE_LABEL, 'worker')}"
                pod = build_pod({"phase": "Running", "containerStatuses": RUNNING})
                labels = obj["spec"]["template"]["metadata"]["labels"]
                pod["metadata"] |= {**created, "name": name, "uid": f"uid {name}", "labels": labels}
                self.objects.append(pod)
                self.logs[name] = []
        return next(obj for obj in reversed(self.objects) if obj["kind"] == "Job")

    def write_log(self, pod: str, *lines: str) -> None:
        """Append lines to the log of a pod."""
        for line in lines:
            self.logs[pod].append(f"2026-01-01T00:00:{len(self.logs[pod]):02d}.000000000Z {line}\n")

    def finish(self, run_id: str, *, code: int = 0, except_role: str = "") -> None:
        """Record that the Jobs and pods of a run have finished, but not those of one role."""
        kind = "Failed" if code else "Complete"
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        for obj in self.objects:
            if run_id not in obj["metadata"]["uid"] or obj["metadata"]["labels"].get(ROLE_LABEL) == except_role:
                continue
            if obj["kind"] == "Job":
                obj["status"] = {"conditions": [{"type": kind, "status": "True"}], "startTime": CREATED}
            elif obj["kind"] == "Pod":
                phase = "Failed" if code else "Succeeded"
                obj["status"] = {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]}


class _Handler(BaseHTTPRequestHandler):
    server: KubeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append(("GET", self.path))
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        *_, parent, last = url.path.strip("/").split("/")
        if last == "log":
            self._send("".join(self.server.logs[parent]), delay_s=0.2)
        elif last not in PLURALS:
            self._send(json.dumps({"kind": "Status", "code": 404, "reason": "NotFound", "message": last}), 404)
        elif "watch" in query:
            self._send("", delay_s=0.2)
        else:
            chosen = [obj for obj in self.server.objects if obj["kind"] == PLURALS[last]]
            items = [obj for obj in chosen if _matches(obj, query.get("labelSelector", ""))]
            self._send(json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}))

    def _refuse(self) -> None:
        self.server.requests.append((self.command, self.path))
        self._send("{}", 403)

    do_POST = do_PUT = do_PATCH = do_DELETE = _refuse  # noqa: N815

    def _send(self, text: str, code: int = 200, delay_s: float = 0.0) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        self.server.stopping.wait(delay_s)

    def log_message(self, *_: Any) -> None:
        pass


def _matches(obj: Manifest, selector: str) -> bool:
    labels = obj["metadata"].get("labels", {})
    terms = [term.partition("=") for term in selector.split(",") if term]
    return all(key in labels and value in ("", labels[key]) for key, _, value in terms)


@contextmanager
def running_kube_api(folder: Path) -> Iterator[tuple[KubeApi, Path]]:
    """Start the server; yield it with a kubeconfig whose context `ctx` has the namespace `team`."""
    with KubeApi() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "ctx", "users": [{"name": "me", "user": {}}],
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "ctx", "context": {"cluster": "fake", "user": "me", "namespace": "team"}}],
        }  # fmt: skip
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        yield server, path
        server.stopping.set()
        server.shutdown()
        thread.join()

"""Client of the Kubernetes API server: get, list, watch, apply, create, patch, delete, logs and exec on plain dicts.

Objects are sent as rendered, so that the API server rejects unknown fields (strict field validation); `kube.errors`
translates its errors. lightkube provides authentication and TLS.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from stoker.core import json_io
from stoker.errors import MissingError, NotFoundError, SpecError, UnavailableError
from stoker.kube import exec as pod_exec
from stoker.kube.config import KubeTarget, get_proxy_url, load_config, resolve_target
from stoker.kube.errors import to_error
from stoker.kube.objects import Manifest

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

FIELD_MANAGER = "stoker"
TIMEOUT_S = 15.0
STREAM_TIMEOUT_S = 120.0
"""Close a log stream that was silent for this long: an idle connection may have been dropped on the way."""
MAX_REQUESTS, RETRY_DELAY_S, RETRY_STATUS_CODES = 4, 0.5, (429, 502, 503, 504)
"""How often, after which delay and for which status codes a request is sent again."""
PAGE_SIZE = 500


class ApiResource(NamedTuple):
    """API path of a kind: its group, version and plural."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def base(self) -> str:
        """The API path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


API_RESOURCES = {
    "ConfigMap": ApiResource("", "v1", "configmaps"),
    "Event": ApiResource("", "v1", "events"),
    "Namespace": ApiResource("", "v1", "namespaces", namespaced=False),
    "Node": ApiResource("", "v1", "nodes", namespaced=False),
    "PersistentVolume": ApiResource("", "v1", "persistentvolumes", namespaced=False),
    "PersistentVolumeClaim": ApiResource("", "v1", "persistentvolumeclaims"),
    "Pod": ApiResource("", "v1", "pods"),
    "ResourceQuota": ApiResource("", "v1", "resourcequotas"),
    "Secret": ApiResource("", "v1", "secrets"),
    "Service": ApiResource("", "v1", "services"),
    "ServiceAccount": ApiResource("", "v1", "serviceaccounts"),
    "Deployment": ApiResource("apps", "v1", "deployments"),
    "StatefulSet": ApiResource("apps", "v1", "statefulsets"),
    "Job": ApiResource("batch", "v1", "jobs"),
    "MPIJob": ApiResource("kubeflow.org", "v2beta1", "mpijobs"),
    "Ingress": ApiResource("networking.k8s.io", "v1", "ingresses"),
    "CustomResourceDefinition": ApiResource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False
    ),
    "LocalQueue": ApiResource("kueue.x-k8s.io", "v1beta2", "localqueues"),
    "PriorityClass": ApiResource("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False),
    "ClusterRole": ApiResource("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False),
    "ClusterRoleBinding": ApiResource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", namespaced=False),
    "Role": ApiResource("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ApiResource("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "SelfSubjectAccessReview": ApiResource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False),
    "StorageClass": ApiResource("storage.k8s.io", "v1", "storageclasses", namespaced=False),
}


class ServerInfo(NamedTuple):
    """Version, latency and clock of the API server."""

    version: str
    latency_s: float
    clock_ahead_s: float | None
    """How far its clock is ahead of ours, to about a second; None if the response had no Date header."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Exit code and output of a command in a container."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class KubeClient:
    """Client of one cluster, with a default namespace."""

    def __init__(self, config: SingleConfig, namespace: str) -> None:
        import httpx2
        from lightkube.config.client_adapter import user_auth, verify_cluster

        self.context, self.server = config.context_name, config.cluster.server
        self.namespace = namespace
        # Every followed pod log keeps a connection open, so the number of connections is not limited.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        with self._translate_errors():
            self._http = httpx2.Client(
                base_url=self.server,
                verify=verify_cluster(config.cluster, config.user, config.abs_file),  # type: ignore[arg-type]
                auth=user_auth(config.user),
                proxy=get_proxy_url(config),
                timeout=TIMEOUT_S,
                limits=limits,
            )

    @classmethod
    def for_target(cls, target: KubeTarget, namespace: str | None = None) -> KubeClient:
        """Create a client; the namespace is the target's, else `namespace`, else the context's default."""
        target = resolve_target(target)
        config = load_config(target.context)
        return cls(config, target.namespace or namespace or config.namespace)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Context and namespace, as `--on` takes them."""
        return f"k8s://{self.context}/{self.namespace}"

    def __str__(self) -> str:
        return self.url

    # --- Objects

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object; None if it does not exist."""
        try:
            return self._json("GET", self._path(kind, name))
        except NotFoundError:
            return None

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | str = "", fields: str = "", *, all_namespaces: bool = False
    ) -> list[Manifest]:
        """List the objects of a kind by label and field selector."""
        return self.list_with_version(kind, labels, fields, all_namespaces=all_namespaces)[0]

    def list_with_version(
        self, kind: str, labels: Mapping[str, str] | str = "", fields: str = "", *, all_namespaces: bool = False
    ) -> tuple[list[Manifest], str]:
        """List objects; also return the resource version from which they can be watched."""
        resource = API_RESOURCES[kind]
        path = f"{resource.base}/{resource.plural}" if all_namespaces else self._path(kind)
        params = {"labelSelector": label_selector(labels), "fieldSelector": fields, "limit": str(PAGE_SIZE)}
        objects: list[Manifest] = []
        while True:
            page = self._json("GET", path, {key: value for key, value in params.items() if value})
            objects += page.get("items") or []
            params["continue"] = page["metadata"].get("continue") or ""
            if not params["continue"]:
                return objects, page["metadata"]["resourceVersion"]

    def watch(
        self, kind: str, labels: Mapping[str, str] | str, version: str, seconds: int = 60
    ) -> Iterator[tuple[str, Manifest]]:
        """Yield changes (`ADDED`, `MODIFIED`, `DELETED`) since a resource version, for at most `seconds`."""
        params = {"watch": "true", "labelSelector": label_selector(labels), "resourceVersion": version}
        params["timeoutSeconds"] = str(seconds)
        for line in self._stream_lines(self._path(kind), params, seconds + TIMEOUT_S):
            if not line.endswith(b"\n"):  # the connection was cut within a line
                return
            with self._translate_errors():
                event = json_io.parse(line, None)
            if event["type"] == "ERROR":
                raise to_error(event["object"], self._where)
            yield event["type"], event["object"]

    def apply(self, obj: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create or update an object with server-side apply."""
        params = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = self._path(obj["kind"], obj["metadata"]["name"], obj["metadata"].get("namespace"))
        return self._json("PATCH", path, params | _dry_run_params(dry_run), obj, "application/apply-patch+yaml")

    def create(self, obj: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; raise ConflictError if it exists."""
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", **_dry_run_params(dry_run)}
        path = self._path(obj["kind"], None, obj.get("metadata", {}).get("namespace"))
        return self._json("POST", path, params, obj)

    def patch(self, kind: str, name: str, patch: Manifest) -> Manifest:
        """Apply a JSON merge patch to an object."""
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._json("PATCH", self._path(kind, name), params, patch, "application/merge-patch+json")

    def delete(self, kind: str, name: str, *, foreground: bool = False, grace_s: int | None = None) -> bool:
        """Delete an object and its dependents; return whether it existed."""
        options: Manifest = {"propagationPolicy": "Foreground" if foreground else "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            self._json("DELETE", self._path(kind, name), {}, options)
        except NotFoundError:
            return False
        return True

    def delete_all(self, kind: str, labels: Mapping[str, str] | str) -> None:
        """Delete all objects of a kind by label selector, and their dependents."""
        options = {"propagationPolicy": "Background"}
        self._json("DELETE", self._path(kind), {"labelSelector": label_selector(labels)}, options)

    def is_allowed(
        self, verb: str, resource: str, *, group: str = "", subresource: str = "", cluster_scoped: bool = False
    ) -> bool:
        """Whether RBAC allows a verb on a resource, in the namespace or cluster-wide, like `kubectl auth can-i`."""
        attributes = {"verb": verb, "group": group, "resource": resource}
        attributes |= {} if cluster_scoped else {"namespace": self.namespace}
        spec = {"resourceAttributes": attributes | ({"subresource": subresource} if subresource else {})}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        return bool(self.create(review)["status"]["allowed"])

    def version(self) -> str:
        """Return the version of the API server."""
        return str(self._json("GET", "/version")["gitVersion"])

    def server_info(self) -> ServerInfo:
        """Measure the latency and the clock offset of the API server; return them with its version."""
        self.version()  # opens the connection, which is not part of the latency
        with self._translate_errors():
            before = time.time()
            response = self._http.request("GET", "/version")
            latency = time.time() - before
            self._raise_for_status(response)
            version = str(json_io.parse(response.content, None)["gitVersion"])
        date = response.headers.get("date")
        # The Date header is truncated to seconds (hence 0.5) and was taken half a round trip ago.
        ahead = None if date is None else parsedate_to_datetime(date).timestamp() + 0.5 - before - latency / 2
        return ServerInfo(version, latency, ahead)

    def list_api_versions(self, group: str) -> dict[str, frozenset[str]]:
        """Return the served versions of an API group and the plurals in each; empty if there is no such group."""
        versions = {}
        with suppress(MissingError, NotFoundError):
            for version in self._json("GET", f"/apis/{group}")["versions"]:
                resources = self._json("GET", f"/apis/{version['groupVersion']}")["resources"]
                versions[str(version["version"])] = frozenset(str(resource["name"]) for resource in resources)
        return versions

    # --- Pods

    def stream_log(self, pod: str, container: str = "", *, follow: bool, since: str = "") -> Iterator[bytes]:
        """Yield the lines of a container's log with their line ends, each prefixed with its timestamp.

        `since` is such a timestamp. A followed stream ends after STREAM_TIMEOUT_S of silence: call again to continue.
        """
        params = {"timestamps": "true", "follow": str(follow).lower(), "container": container, "sinceTime": since}
        params = {key: value for key, value in params.items() if value}
        yield from self._stream_lines(
            f"{self._path('Pod', pod)}/log", params, STREAM_TIMEOUT_S if follow else TIMEOUT_S
        )

    def exec_in_pod(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        container: str | None = None,
        stdin: bytes | None = None,
        output: pod_exec.Writer | None = None,
    ) -> ExecResult:
        """Run a command in a container and wait for it; write stdout to `output` if given, else return it."""
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        stdout, stderr = BytesIO(), BytesIO()
        sinks = {pod_exec.STDOUT: output or stdout, pod_exec.STDERR: stderr}
        params, path = pod_exec.build_exec_params(argv, container, stdin=stdin is not None), self._path("Pod", pod)
        try:
            with self._translate_errors():
                status = pod_exec.run_command(
                    self._http, f"{path}/exec", params, sinks, stdin=stdin, may_block=output is not None
                )
        except pod_exec.OutputError as error:
            raise error.cause from None
        except WebSocketUpgradeError as error:
            raise pod_exec.to_upgrade_error(error.response.status_code, pod, self._where) from error
        except HTTPXWSException as error:
            what = f"connection lost while running a command in pod {pod}"
            raise UnavailableError(what, where=self._where) from error
        return ExecResult(pod_exec.get_exit_code(status, self._where), stdout.getvalue(), stderr.getvalue())

    # --- Requests

    @property
    def _where(self) -> str:
        return self.url

    def _path(self, kind: str, name: str | None = None, namespace: str | None = None) -> str:
        resource = API_RESOURCES[kind]
        scope = f"/namespaces/{namespace or self.namespace}" if resource.namespaced else ""
        return f"{resource.base}{scope}/{resource.plural}{f'/{name}' if name is not None else ''}"

    def _json(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if content else None
        with self._translate_errors():
            for number in range(MAX_REQUESTS):
                response = self._http.request(method, path, params=params, content=content, headers=headers)
                if response.status_code not in RETRY_STATUS_CODES or number == MAX_REQUESTS - 1:
                    break
                after = response.headers.get("Retry-After", "")
                time.sleep(min(float(after), TIMEOUT_S) if after.isdigit() else RETRY_DELAY_S * 2**number)
            self._raise_for_status(response)
            result: Manifest = json_io.parse(response.content, None)
        return result

    def _stream_lines(self, path: str, params: Mapping[str, str], timeout_s: float | None) -> Iterator[bytes]:
        """Yield the lines of a response as they arrive, with their line ends; the last one may lack it."""
        import httpx2

        timeout, rest = httpx2.Timeout(TIMEOUT_S, read=timeout_s), b""
        with self._translate_errors(), self._http.stream("GET", path, params=params, timeout=timeout) as response:
            if response.is_error:
                response.read()
            self._raise_for_status(response)
            for chunk in response.iter_raw():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line + b"\n" for line in lines)
        if rest:
            yield rest

    def _raise_for_status(self, response: Any) -> None:
        if response.is_error:
            try:
                status = json_io.parse(response.content, None)
            except SpecError:
                status = {"code": response.status_code, "message": response.text[:200].strip()}
            raise to_error({"code": response.status_code, **status}, self._where)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate exceptions of httpx2 and lightkube into stoker errors."""
        import httpx2
        from lightkube.core.exceptions import ApiError, ConfigError

        try:
            yield
        except ApiError as error:
            raise to_error(error.status.to_dict(), self._where) from error
        except ConfigError as error:
            raise UnavailableError(f"authentication failed: {error}", where=self._where) from error
        except (ValueError, SpecError) as error:
            what = f"{self.server} is not a Kubernetes API server: {error}"
            raise UnavailableError(what, where=self._where) from error
        except (httpx2.TransportError, httpx2.InvalidURL, OSError) as error:
            why = str(error) or type(error).__name__
            what = f"cannot reach the API server at {self.server}: {why}"
            hint = "to check that the cluster is reachable, run: kubectl version"
            raise UnavailableError(what, where=self._where, hint=hint) from error


def label_selector(labels: Mapping[str, str] | str) -> str:
    """Format labels as a label selector."""
    return labels if isinstance(labels, str) else ",".join(f"{key}={value}" for key, value in labels.items())


def _dry_run_params(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}

"""The API server as a few verbs on plain dictionaries.

What we send is what we rendered, so that the server refuses a field that it does not know; its refusals become our
errors in `answers`. Authentication and TLS are lightkube's.
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

from stoker.errors import MissingError, NotFoundError, UnavailableError
from stoker.kube import exec as pod_exec
from stoker.kube.config import KubeTarget, get_proxy_url, load_config, resolve_target
from stoker.kube.errors import to_error
from stoker.kube.objects import Manifest

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

FIELD_MANAGER = "stoker"
TIMEOUT_S = 15.0
STREAM_TIMEOUT_S = 120.0
MAX_REQUESTS, RETRY_DELAY_S, RETRY_STATUS_CODES = 4, 0.5, (429, 502, 503, 504)
"""How often what a busy server refused is asked again."""
PAGE_SIZE = 500


class ApiResource(NamedTuple):
    """Where the objects of a kind are found."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def base(self) -> str:
        """The path that all its objects have in common."""
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
    """What the API server says when it is first spoken to."""

    version: str
    latency_s: float
    clock_ahead_s: float | None
    """How far its clock is ahead of ours; it tells whole seconds. None: it did not tell."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command in a container ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class KubeClient:
    """One cluster, and the namespace in it that is meant."""

    def __init__(self, config: SingleConfig, namespace: str) -> None:
        import httpx2
        from lightkube.config.client_adapter import user_auth, verify_cluster

        self.context, self.server = config.context_name, config.cluster.server
        self.namespace = namespace
        # One stream for each pod's log: no limit but the machine's.
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
        """Open the cluster of a context; the place's namespace comes first, then the one given, then the context's."""
        target = resolve_target(target)
        config = load_config(target.context)
        return cls(config, target.namespace or namespace or config.namespace)

    def close(self) -> None:
        """Give back the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The place, as `--on` takes it."""
        return f"k8s://{self.context}/{self.namespace}"

    def __str__(self) -> str:
        return self.url

    # --- Objects

    def get(self, kind: str, name: str) -> Manifest | None:
        """Give an object; None: there is none."""
        try:
            return self._json("GET", self._path(kind, name))
        except NotFoundError:
            return None

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | str = "", fields: str = "", *, all_namespaces: bool = False
    ) -> list[Manifest]:
        """Give all objects of a kind that have these labels, in the namespace or in all of them."""
        return self.list_with_version(kind, labels, fields, all_namespaces=all_namespaces)[0]

    def list_with_version(
        self, kind: str, labels: Mapping[str, str] | str = "", fields: str = "", *, all_namespaces: bool = False
    ) -> tuple[list[Manifest], str]:
        """Give them with the version from which on they can be watched."""
        path = f"{API_RESOURCES[kind].base}/{API_RESOURCES[kind].plural}" if all_namespaces else self._path(kind)
        params = {"labelSelector": label_selector(labels), "fieldSelector": fields, "limit": str(PAGE_SIZE)}
        found: list[Manifest] = []
        while True:
            answer = self._json("GET", path, {key: value for key, value in params.items() if value})
            found += answer.get("items") or []
            params["continue"] = answer["metadata"].get("continue") or ""
            if not params["continue"]:
                return found, answer["metadata"]["resourceVersion"]

    def watch(
        self, kind: str, labels: Mapping[str, str] | str, version: str, seconds: int = 60
    ) -> Iterator[tuple[str, Manifest]]:
        """Give what changes (`ADDED`, `MODIFIED`, `DELETED`) from a version on, for some time at most."""
        params = {"watch": "true", "labelSelector": label_selector(labels), "resourceVersion": version}
        for line in self._stream_lines(
            self._path(kind), {**params, "timeoutSeconds": str(seconds)}, seconds + TIMEOUT_S
        ):
            if not line.endswith(b"\n"):  # cut in the middle
                return
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise to_error(event["object"], self._where)
            yield event["type"], event["object"]

    def apply(self, one: Manifest, *, dry_run: bool = False) -> Manifest:
        """Make or change an object so that it is as given: server-side apply, by which unknown fields are refused."""
        params = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = self._path(one["kind"], one["metadata"]["name"], one["metadata"].get("namespace"))
        return self._json("PATCH", path, params | _dry_run_params(dry_run), one, "application/apply-patch+yaml")

    def create(self, one: Manifest, *, dry_run: bool = False) -> Manifest:
        """Make an object that is not there yet."""
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", **_dry_run_params(dry_run)}
        path = self._path(one["kind"], None, one.get("metadata", {}).get("namespace"))
        return self._json("POST", path, params, one)

    def patch(self, kind: str, name: str, patch: Manifest) -> Manifest:
        """Merge a patch into an object."""
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._json("PATCH", self._path(kind, name), params, patch, "application/merge-patch+json")

    def delete(self, kind: str, name: str, *, foreground: bool = False, grace_s: int | None = None) -> bool:
        """Delete an object and what it owns; tell whether there was one."""
        options: Manifest = {"propagationPolicy": "Foreground" if foreground else "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            self._json("DELETE", self._path(kind, name), {}, options)
        except NotFoundError:
            return False
        return True

    def delete_all(self, kind: str, labels: Mapping[str, str] | str) -> None:
        """Delete all objects of a kind that have these labels, and what they own."""
        options = {"propagationPolicy": "Background"}
        self._json("DELETE", self._path(kind), {"labelSelector": label_selector(labels)}, options)

    def is_allowed(
        self, verb: str, resource: str, *, group: str = "", subresource: str = "", cluster_scoped: bool = False
    ) -> bool:
        """Ask whether we may do that in the namespace, or with what is in no namespace or in any."""
        wanted = {"verb": verb, "group": group, "resource": resource}
        wanted |= {} if cluster_scoped else {"namespace": self.namespace}
        spec = {"resourceAttributes": wanted | ({"subresource": subresource} if subresource else {})}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        return bool(self.create(review)["status"]["allowed"])

    def version(self) -> str:
        """Tell the server's version."""
        return str(self._json("GET", "/version")["gitVersion"])

    def server_info(self) -> ServerInfo:
        """Tell the server's version, how long it takes to answer, and what its clock says."""
        self.version()  # so that the connection is there
        with self._translate_errors():
            before = time.time()
            response = self._http.request("GET", "/version")
            took = time.time() - before
            self._raise_for_status(response)
            version = str(response.json()["gitVersion"])
        date = response.headers.get("date")
        # It is cut to whole seconds, and was taken on the way.
        ahead = None if date is None else parsedate_to_datetime(date).timestamp() + 0.5 - before - took / 2
        return ServerInfo(version, took, ahead)

    def list_api_versions(self, group: str) -> dict[str, frozenset[str]]:
        """Tell which versions of an API group there are, and the plurals of each one's kinds; none: no such group."""
        found = {}
        with suppress(MissingError, NotFoundError):
            for one in self._json("GET", f"/apis/{group}")["versions"]:
                answer = self._json("GET", f"/apis/{one['groupVersion']}")
                found[str(one["version"])] = frozenset(str(kind["name"]) for kind in answer["resources"])
        return found

    # --- Pods

    def stream_log(self, pod: str, container: str = "", *, follow: bool, since: str = "") -> Iterator[bytes]:
        """Give the lines of a container's log as they are, with their ends, each with its time in front.

        `since` is such a time. A stream on which nothing comes may have been forgotten on the way: it is ended, and who
        wants more asks again.
        """
        params = {"timestamps": "true", "follow": str(follow).lower(), "container": container, "sinceTime": since}
        given = {key: value for key, value in params.items() if value}
        yield from self._stream_lines(f"{self._path('Pod', pod)}/log", given, STREAM_TIMEOUT_S if follow else TIMEOUT_S)

    def exec_in_pod(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        container: str | None = None,
        stdin: bytes | None = None,
        output: pod_exec.Writer | None = None,
    ) -> ExecResult:
        """Run a command in a container, to its end; `into` gets what it prints as it comes, and `out` stays empty."""
        from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

        out, err = BytesIO(), BytesIO()
        sinks = {pod_exec.STDOUT: output or out, pod_exec.STDERR: err}
        asked, path = (
            pod_exec.build_exec_params(argv, container, stdin=stdin is not None),
            f"{self._path('Pod', pod)}/exec",
        )
        try:
            with self._translate_errors():
                status = pod_exec.run_command(
                    self._http, path, asked, sinks, stdin=stdin, is_patient=output is not None
                )
        except pod_exec.OutputError as error:
            raise error.cause from None
        except WebSocketUpgradeError as error:
            raise pod_exec.to_upgrade_error(error.response.status_code, pod, self._where) from error
        except HTTPXWSException as error:
            what = f"the connection to a command in pod {pod} was lost"
            raise UnavailableError(what, where=self._where) from error
        return ExecResult(pod_exec.get_exit_code(status, self._where), out.getvalue(), err.getvalue())

    # --- Requests

    @property
    def _where(self) -> str:
        return self.url

    def _path(self, kind: str, name: str | None = None, namespace: str | None = None) -> str:
        one = API_RESOURCES[kind]
        inner = f"/namespaces/{namespace or self.namespace}" if one.namespaced else ""
        return f"{one.base}{inner}/{one.plural}{f'/{name}' if name is not None else ''}"

    def _json(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content: str = "application/json",
    ) -> Manifest:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content} if data else None
        with self._translate_errors():
            for number in range(MAX_REQUESTS):
                response = self._http.request(method, path, params=params, content=data, headers=headers)
                if response.status_code not in RETRY_STATUS_CODES or number == MAX_REQUESTS - 1:
                    break
                after = response.headers.get("Retry-After", "")
                time.sleep(min(float(after), TIMEOUT_S) if after.isdigit() else RETRY_DELAY_S * 2**number)
            self._raise_for_status(response)
            answer: Manifest = response.json()
        return answer

    def _stream_lines(self, path: str, params: Mapping[str, str], timeout_s: float | None) -> Iterator[bytes]:
        """Give the lines of an answer as they come, with their ends, and what stands behind the last one."""
        import httpx2

        timeout, rest = httpx2.Timeout(TIMEOUT_S, read=timeout_s), b""
        with self._translate_errors(), self._http.stream("GET", path, params=params, timeout=timeout) as response:
            if response.is_error:
                response.read()
            self._raise_for_status(response)
            for part in response.iter_raw():
                *lines, rest = (rest + part).split(b"\n")
                yield from (line + b"\n" for line in lines)
        if rest:
            yield rest

    def _raise_for_status(self, response: Any) -> None:
        if response.is_error:
            try:
                status = response.json()
            except ValueError:
                status = {"code": response.status_code, "message": response.text[:200].strip()}
            raise to_error({"code": response.status_code, **status}, self._where)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Put what went wrong on the way into our words."""
        import httpx2
        from lightkube.core.exceptions import ApiError, ConfigError

        try:
            yield
        except ApiError as error:
            raise to_error(error.status.to_dict(), self._where) from error
        except ConfigError as error:
            raise UnavailableError(f"you could not be logged in: {error}", where=self._where) from error
        except ValueError as error:
            what = f"what answers at {self.server} is no API server: {error}"
            raise UnavailableError(what, where=self._where) from error
        except (httpx2.TransportError, httpx2.InvalidURL, OSError) as error:
            why = str(error) or type(error).__name__
            what = f"the API server at {self.server} does not answer: {why}"
            hint = "is the cluster up, and can it be reached from here? `kubectl version` asks the same"
            raise UnavailableError(what, where=self._where, hint=hint) from error


def label_selector(labels: Mapping[str, str] | str) -> str:
    """Write labels as a selector."""
    return labels if isinstance(labels, str) else ",".join(f"{key}={value}" for key, value in labels.items())


def _dry_run_params(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}

"""Kubeconfig: find the context, namespace and credentials in the same files that kubectl reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stoker.core import json_io, yaml_io
from stoker.errors import InputError, MissingExtraError, NotFoundError, SpecError

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LISTS = ("clusters", "contexts", "users")
_FILE_KEYS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
"""Keys whose relative paths are relative to the kubeconfig file."""


class KubeTarget(NamedTuple):
    """Context and namespace of `--on k8s://context/namespace`; None selects the default."""

    context: str | None = None
    namespace: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> KubeTarget:
        """Parse `context/namespace`; a context name may contain slashes, a namespace cannot."""
        context, slash, namespace = (text or "").rpartition("/")
        return cls(context or None, namespace or None) if slash else cls(namespace or None, None)


def parse_handle(handle: str) -> tuple[KubeTarget, str]:
    """Split a handle `k8s://context/namespace/run` into its target and run id."""
    target, _, run = handle.partition("://")[2].rpartition("/")
    return KubeTarget.parse(target), run


def require_lightkube() -> None:
    """Raise MissingExtraError if lightkube is not installed."""
    try:
        import lightkube  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("lightkube", "k8s", purpose="Kubernetes") from error


def kubeconfig_paths(environ: Mapping[str, str] | None = None) -> list[Path]:
    """List the paths in $KUBECONFIG, or the default path, whether they exist or not."""
    env = os.environ if environ is None else environ
    return [Path(name).expanduser() for name in (env.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep) if name]


def resolve_target(target: KubeTarget, environ: Mapping[str, str] | None = None) -> KubeTarget:
    """Resolve a target against the existing contexts: the name of an EKS context itself contains a slash."""
    full_name = f"{target.context}/{target.namespace}"
    paths = [path for path in kubeconfig_paths(environ) if path.is_file()]
    if target.context is None or target.namespace is None or not paths:
        return target
    known = context_names(_merge_files(paths))
    return KubeTarget(full_name) if full_name in known and target.context not in known else target


def context_names(config: Mapping[str, Any]) -> list[str]:
    """List the contexts of a kubeconfig, sorted."""
    return sorted(str(context["name"]) for context in config["contexts"])


def get_proxy_url(config: SingleConfig, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the `proxy-url` of the cluster, which lightkube does not read; None if it has none."""
    for path in kubeconfig_paths(environ):
        if path.is_file():
            for cluster in _merge_files([path])["clusters"]:
                if cluster.get("name") == config.context.cluster:
                    return (cluster.get("cluster") or {}).get("proxy-url") or None
    return None


def load_config(context: str | None, environ: Mapping[str, str] | None = None) -> SingleConfig:
    """Load a context from $KUBECONFIG or ~/.kube/config, or the service account of the pod we run in."""
    require_lightkube()
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError

    paths = kubeconfig_paths(environ)
    existing = [path for path in paths if path.is_file()]
    where = os.pathsep.join(map(str, paths))
    if not existing and (SERVICE_ACCOUNT / "token").exists():
        return KubeConfig.from_service_account().get()  # type: ignore[return-value]
    if not existing:
        raise NotFoundError(
            "no kubeconfig found",
            where=where,
            hint="set KUBECONFIG, or create a kubeconfig, for example with "
            "`gcloud container clusters get-credentials` or `aws eks update-kubeconfig`",
        )
    merged = _merge_files(existing)
    known = context_names(merged)
    if context is not None and context not in known:
        raise NotFoundError(
            f"context {context!r} not found in the kubeconfig", where=where, hint=f"known: {', '.join(known) or 'none'}"
        )
    try:
        config = KubeConfig.from_dict(merged, fname=existing[0]).get(context)
    except KeyError as error:
        raise InputError(f"invalid kubeconfig: entry or key {error} not found", where=where) from error
    except (ConfigError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise InputError(f"invalid kubeconfig: {error}", where=where) from error
    assert config is not None
    return config._replace(user=config.user or _anonymous_user())


def _anonymous_user() -> Any:
    from lightkube.config.models import User

    return User()


def _read(path: Path) -> dict[str, Any]:
    """Read one kubeconfig file; raise InputError if it is malformed."""
    try:
        data = yaml_io.parse(json_io.read_file(path), path)[0] or {}
    except OSError as error:
        raise InputError(f"cannot read kubeconfig: {(error.strerror or '').lower()}", where=path) from error
    except SpecError as error:
        raise InputError(f"invalid kubeconfig: {error.what}", where=path) from error
    lists = [data.get(key) or [] for key in _LISTS] if isinstance(data, dict) else [None]
    if not all(isinstance(entries, list) and all(map(_has_name, entries)) for entries in lists):
        what = "invalid kubeconfig: clusters, contexts and users must be lists of mappings with a name"
        raise InputError(what, where=path)
    return dict(data)


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _merge_files(paths: list[Path]) -> dict[str, Any]:
    """Merge kubeconfig files as kubectl does: the first of several entries with the same name wins."""
    merged: dict[str, Any] = {"clusters": {}, "contexts": {}, "users": {}}
    for path in paths:
        data = _read(path)
        for key in _LISTS:
            for entry in data.get(key) or ():
                merged[key].setdefault(entry["name"], _resolve_files(entry, path.parent))
        if "current-context" not in merged and data.get("current-context"):
            merged["current-context"] = data["current-context"]
    return {key: list(value.values()) if isinstance(value, dict) else value for key, value in merged.items()}


def _resolve_files(entry: Any, folder: Path) -> Any:
    """Resolve the relative paths of certificates, keys and tokens against the kubeconfig's folder."""
    if isinstance(entry, dict):
        return {
            key: str(folder / value) if key in _FILE_KEYS and isinstance(value, str) else _resolve_files(value, folder)
            for key, value in entry.items()
        }
    return entry

"""Which cluster: a context and a namespace, from the same files that kubectl reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import yaml

from stoker.errors import InputError, MissingExtraError, NotFoundError

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LISTS = ("clusters", "contexts", "users")
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
"""Keys whose relative paths start at the file that they stand in."""


class KubeTarget(NamedTuple):
    """What `--on k8s://context/namespace` names; None is the user's own."""

    context: str | None = None
    namespace: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> KubeTarget:
        """Read `context/namespace`; a context may have slashes in it, a namespace has none."""
        context, slash, namespace = (text or "").rpartition("/")
        return cls(context or None, namespace or None) if slash else cls(namespace or None, None)


def parse_handle(handle: str) -> tuple[KubeTarget, str]:
    """Take a handle apart: `k8s://context/namespace/run`."""
    place, _, run = handle.partition("://")[2].rpartition("/")
    return KubeTarget.parse(place), run


def require_lightkube() -> None:
    """Refuse to go on without the client's package."""
    try:
        import lightkube  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("lightkube", "k8s", purpose="Kubernetes") from error


def kubeconfig_paths(environ: Mapping[str, str] | None = None) -> list[Path]:
    """List the files that hold contexts, whether they are there or not."""
    env = os.environ if environ is None else environ
    return [Path(name).expanduser() for name in (env.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep) if name]


def resolve_target(place: KubeTarget, environ: Mapping[str, str] | None = None) -> KubeTarget:
    """Read a place again, with the contexts that there are: an EKS context has a slash of its own in its name."""
    whole = f"{place.context}/{place.namespace}"
    there = [path for path in kubeconfig_paths(environ) if path.is_file()]
    if place.context is None or place.namespace is None or not there:
        return place
    known = context_names(_merged(there))
    return KubeTarget(whole) if whole in known and place.context not in known else place


def context_names(merged: Mapping[str, Any]) -> list[str]:
    """List the contexts of a configuration."""
    return sorted(str(one["name"]) for one in merged["contexts"])


def get_proxy_url(config: SingleConfig, environ: Mapping[str, str] | None = None) -> str | None:
    """Give the proxy that a cluster is reached through, where its configuration names one."""
    for path in kubeconfig_paths(environ):
        if path.is_file():
            for one in _merged([path])["clusters"]:
                if one.get("name") == config.context.cluster:
                    return (one.get("cluster") or {}).get("proxy-url") or None
    return None


def load_config(context: str | None, environ: Mapping[str, str] | None = None) -> SingleConfig:
    """Give the settings of a context: of the files in $KUBECONFIG, ~/.kube/config, or of the pod we are in."""
    require_lightkube()
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError

    given = kubeconfig_paths(environ)
    there = [path for path in given if path.is_file()]
    names = os.pathsep.join(map(str, given))
    if not there and (SERVICE_ACCOUNT / "token").exists():
        return KubeConfig.from_service_account().get()  # type: ignore[return-value]
    if not there:
        raise NotFoundError(
            "there is no Kubernetes configuration",
            where=names,
            hint="set KUBECONFIG, or fetch it: gcloud container clusters get-credentials, aws eks update-kubeconfig",
        )
    merged = _merged(there)
    known = context_names(merged)
    if context is not None and context not in known:
        raise NotFoundError(
            f"there is no context {context!r}", where=names, hint=f"known: {', '.join(known) or 'none'}"
        )
    try:
        found = KubeConfig.from_dict(merged, fname=there[0]).get(context)
    except KeyError as error:
        what = f"the Kubernetes configuration names {error}, or has an entry without it"
        raise InputError(f"{what}, and nothing of that name is there", where=names) from error
    except (ConfigError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise InputError(f"the Kubernetes configuration cannot be used: {error}", where=names) from error
    assert found is not None
    return found._replace(user=found.user or _nobody())


def _nobody() -> Any:
    from lightkube.config.models import User

    return User()


def _read(path: Path) -> dict[str, Any]:
    """Read one file, and refuse what is no configuration in a sentence."""
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise InputError(f"cannot be read: {(error.strerror or '').lower()}", where=path) from error
    except UnicodeDecodeError as error:
        raise InputError("is no Kubernetes configuration: it is no text", where=path) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise InputError(f"is no YAML: {getattr(error, 'problem', None) or 'a fault'}{line}", where=path) from error
    entries = [data.get(key) or [] for key in _LISTS] if isinstance(data, dict) else [None]
    if not all(isinstance(some, list) and all(isinstance(one, dict) for one in some) for some in entries):
        what = "is no Kubernetes configuration: clusters, contexts and users are lists of mappings there"
        raise InputError(what, where=path)
    return dict(data)


def _merged(files: list[Path]) -> dict[str, Any]:
    """Merge files as kubectl does: of two entries with one name, the first counts."""
    merged: dict[str, Any] = {"clusters": {}, "contexts": {}, "users": {}}
    for path in files:
        data = _read(path)
        for key in _LISTS:
            for one in data.get(key) or ():
                merged[key].setdefault(one.get("name"), _anchored(one, path.parent))
        if "current-context" not in merged and data.get("current-context"):
            merged["current-context"] = data["current-context"]
    return {key: list(value.values()) if isinstance(value, dict) else value for key, value in merged.items()}


def _anchored(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict):
        return {
            key: str(folder / value) if key in _FILES and isinstance(value, str) else _anchored(value, folder)
            for key, value in entry.items()
        }
    return entry

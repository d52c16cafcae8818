"""The image probe: a small pod that pulls an image of the job and resolves a name, and the checks of its result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stoker.core.units import format_duration
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.findings import INVALID, failed_check
from stoker.errors import StokerError
from stoker.kube.conditions import FINISHED_PHASES, get_phase
from stoker.kube.objects import MAIN_CONTAINER, PART_LABEL, Manifest, build_object
from stoker.kube.pending import explain_pending
from stoker.kube.pods import get_exit_status, main_container_status

LABELS = {PART_LABEL: "doctor"}
# The nslookup of busybox ignores the search domains.
SCRIPT = """\
short=kubernetes.default long=kubernetes.default.svc found=none
while read -r key words; do
  for word in $words; do case "$key $word" in "search svc."*) long="$short.$word" ;; esac; done
done </etc/resolv.conf
resolve() {
  [ "$found" != ok ] && command -v "$1" >/dev/null 2>&1 || return 0
  if "$@" >/dev/null 2>&1; then found=ok; else found=failed; fi
}
resolve getent hosts "$short"
resolve python3 -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], 443)' "$short"
resolve nslookup "$long"
echo "dns=$found" >/dev/termination-log 2>/dev/null || true
"""
RESOURCES = {"cpu": "10m", "memory": "64Mi"}
_KEPT_FIELDS = (
    "affinity",
    "automountServiceAccountToken",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
)
"""Fields that decide where a pod is scheduled, how its image is pulled, and whether it is admitted."""

_KEPT_VOLUMES = ("emptyDir", "hostPath", "image", "nfs")
"""Volumes that are mounted immediately or never; not those that are created with the job or used by others."""


class ImageProbe(NamedTuple):
    """The pod of an image probe, and its result."""

    image: str
    pod: Manifest | None = None
    """The pod as last read."""
    rejection: StokerError | None = None
    events: Sequence[Manifest] = ()
    waited_s: float = 0.0


def build_probe_pod(spec: Manifest, image: str, name: str, namespace: str, bound_s: int, secrets: bool) -> Manifest:
    """Build a pod like those of the job: same scheduling, pull secrets and variables, but small and without claims.

    With `secrets` it also uses the Secrets of the job's variables, if there is no other way to check that they exist.
    """
    (original, *_) = [item for item in spec["containers"] if item.get("image") == image]
    volumes = [item for item in spec.get("volumes") or () if any(kind in item for kind in _KEPT_VOLUMES)]
    names = {item["name"] for item in volumes}
    container = {
        "name": MAIN_CONTAINER,
        "image": image,
        "command": [_shell(original), "-c", SCRIPT],
        "env": [item for item in original.get("env") or () if "value" in item or (secrets and _is_secret(item))],
        "resources": {"requests": RESOURCES, "limits": RESOURCES},
        "volumeMounts": [item for item in original.get("volumeMounts") or () if item["name"] in names],
    }
    container |= {key: original[key] for key in ("imagePullPolicy", "securityContext") if original.get(key)}
    pod_spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": bound_s,
        "terminationGracePeriodSeconds": 0,
        "enableServiceLinks": False,
        **{key: spec[key] for key in _KEPT_FIELDS if key in spec},
        "containers": [container],
        "volumes": volumes,
    }
    return build_object("v1", "Pod", name, LABELS, namespace=namespace, spec=pod_spec)


def _shell(container: Manifest) -> str:
    """Return the shell that the job uses."""
    first = next(iter(container.get("command") or ()), "")
    return str(first) if str(first).rpartition("/")[2] == "sh" else "sh"


def _is_secret(variable: Manifest) -> bool:
    return "secretKeyRef" in (variable.get("valueFrom") or {})


def is_finished(pod: Manifest) -> bool:
    """Return whether the pod of a probe has finished, or has failed permanently."""
    return get_phase(pod) in FINISHED_PHASES or _waiting_reason(pod) in _PERMANENT_REASONS


def _waiting_reason(pod: Manifest) -> str:
    """Return the reason why its container is waiting."""
    waiting = (main_container_status(pod).get("state") or {}).get("waiting") or {}
    return str(waiting.get("reason") or "")


def check_image_probe(probe: ImageProbe) -> Iterator[Check]:
    """Check whether an image can be pulled and started, and whether it can resolve names."""
    image = probe.image
    if probe.rejection is not None:
        yield Check("image", None, f"skipped: {image}: the probe was rejected: {probe.rejection.what}")
        return
    pod = probe.pod or {}
    node, state = (pod.get("spec") or {}).get("nodeName"), main_container_status(pod).get("state") or {}
    if terminated := state.get("terminated"):
        yield from _check_terminated(image, node, terminated)
    elif get_phase(pod) == "Failed":
        _, reason = get_exit_status(pod) or (0, "")
        yield Check("image", None, f"skipped: {image}: the probe failed: {reason}")
    elif "running" in state:
        yield Check("image", True, f"{image} can be pulled and started on {node}")
        detail = f"kubernetes.default was not resolved within {format_duration(probe.waited_s)}"
        yield Check("DNS", False, detail, _DNS_FIX, code=INVALID)
    else:
        yield _check_waiting(probe, node, _waiting_reason(pod))
        yield Check("DNS", None, "skipped: the probe did not run")


_DNS_FIX = "check the cluster DNS (kubectl get pods -n kube-system -l k8s-app=kube-dns) and NetworkPolicies"


def _check_terminated(image: str, node: str | None, terminated: Manifest) -> Iterator[Check]:
    text = str(terminated.get("message") or "").strip()
    if terminated.get("reason") in _START_REASONS or terminated.get("exitCode") in (126, 127, 128):
        yield _check_start_failure(image, text)
        yield Check("DNS", None, "skipped: the probe did not run")
        return
    if terminated.get("exitCode") != 0:
        code = terminated.get("exitCode")
        detail = f"{image} was pulled, but a shell in it fails with exit code {code}: {text or 'no output'}"
        yield failed_check("image", detail, "check the CPU architecture of the image: docker run IMAGE sh -c true")
        return
    yield Check("image", True, f"{image} can be pulled and started on {node}")
    if "dns=failed" in text:
        yield failed_check("DNS", f"kubernetes.default cannot be resolved from a pod on {node}", _DNS_FIX)
    elif "dns=ok" in text:
        yield Check("DNS", True, f"kubernetes.default can be resolved from a pod on {node}")
    else:
        yield Check("DNS", None, "skipped: the image has no program that resolves names")


_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_START_REASONS = ("StartError", "ContainerCannotRun", "CreateContainerError", "RunContainerError")
_PERMANENT_REASONS = (
    *_PULL_REASONS,
    *_START_REASONS,
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
)
_FIX_BY_REASON = {
    "InvalidImageName": "write it as registry/name:tag, in lowercase",
    "ErrImageNeverPull": "load it on all nodes, or set kubernetes.image_pull_policy: IfNotPresent",
    **dict.fromkeys(
        _PULL_REASONS, "check image in the job file, that it was pushed, and that nodes can reach the registry"
    ),
}


def _check_start_failure(image: str, text: str) -> Check:
    if re.search(r'exec: \\?"?(/bin/)?sh\\?"?:|stat sh|"sh": executable file not found|/bin/sh: no such file', text):
        return failed_check(
            "image",
            f"{image} was pulled, but has no sh",
            "jobs are started by a shell script: use an image with a shell",
        )
    return failed_check("image", f"{image} was pulled, but does not start: {text}", "try: docker run IMAGE sh -c true")


def _check_waiting(probe: ImageProbe, node: str | None, reason: str) -> Check:
    """Check a container that is not running, and why."""
    image, why = probe.image, explain_pending(probe.pod or {}, probe.events)
    if node is None:
        return Check("image", None, f"skipped: {image}: {why or 'the probe was not scheduled, for an unknown reason'}")
    if reason in _START_REASONS:
        return _check_start_failure(image, why)
    if not why:
        detail = f"{image} was not pulled within {format_duration(probe.waited_s)} on {node}"
        return Check("image", None, detail, "large images take longer: try again later, or see kubectl get events")
    return failed_check("image", why, _FIX_BY_REASON.get(reason, "create the object in the namespace of the job"))

"""A pod that only pulls a job's image and looks up a name: the pod as a value, and what its end means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stoker.core.units import format_duration
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.findings import BAD, missing
from stoker.errors import StokerError
from stoker.kube.conditions import OVER, phase_of
from stoker.kube.objects import CONTAINER, PART, Manifest, manifest
from stoker.kube.pods import ended, main_status, why_pending

LABELS = {PART: "doctor"}
# The nslookup of busybox does not go through the domains to search.
SCRIPT = """\
short=kubernetes.default long=kubernetes.default.svc found=none
while read -r key words; do
  for word in $words; do case "$key $word" in "search svc."*) long="$short.$word" ;; esac; done
done </etc/resolv.conf
look() {
  [ "$found" != ok ] && command -v "$1" >/dev/null 2>&1 || return 0
  if "$@" >/dev/null 2>&1; then found=ok; else found=failed; fi
}
look getent hosts "$short"
look python3 -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], 443)' "$short"
look nslookup "$long"
echo "dns=$found" >/dev/termination-log 2>/dev/null || true
"""
SMALL = {"cpu": "10m", "memory": "64Mi"}
_KEPT = (
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
"""What decides where a pod goes, how its image is pulled, and whether it is let in."""

_HARMLESS = ("emptyDir", "hostPath", "image", "nfs")
"""Volumes that a pod gets at once or never; not those that are made with the job, or that others hold."""


class Probe(NamedTuple):
    """How a pod fared that only pulls an image and looks up a name."""

    image: str
    pod: Manifest | None = None
    """As it was last seen."""
    refused: StokerError | None = None
    events: Sequence[Manifest] = ()
    waited_s: float = 0.0


def probe_pod(spec: Manifest, image: str, name: str, namespace: str, bound_s: int, secrets: bool) -> Manifest:
    """Make a pod as those of a job: on such a node, with its logins and variables, but small and without its claims.

    With `secrets` it wants those of the job's variables too, where whether they are there can be found out in no other
    way.
    """
    (like, *_) = [one for one in spec["containers"] if one.get("image") == image]
    volumes = [one for one in spec.get("volumes") or () if any(kind in one for kind in _HARMLESS)]
    names = {one["name"] for one in volumes}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": [_shell(like), "-c", SCRIPT],
        "env": [one for one in like.get("env") or () if "value" in one or (secrets and _is_secret(one))],
        "resources": {"requests": SMALL, "limits": SMALL},
        "volumeMounts": [one for one in like.get("volumeMounts") or () if one["name"] in names],
    }
    container |= {key: like[key] for key in ("imagePullPolicy", "securityContext") if like.get(key)}
    body = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": bound_s,
        "terminationGracePeriodSeconds": 0,
        "enableServiceLinks": False,
        **{key: spec[key] for key in _KEPT if key in spec},
        "containers": [container],
        "volumes": volumes,
    }
    return manifest("v1", "Pod", name, LABELS, namespace=namespace, spec=body)


def _shell(container: Manifest) -> str:
    """Name the shell as the job does."""
    first = next(iter(container.get("command") or ()), "")
    return str(first) if str(first).rpartition("/")[2] == "sh" else "sh"


def _is_secret(variable: Manifest) -> bool:
    return "secretKeyRef" in (variable.get("valueFrom") or {})


def is_told(pod: Manifest) -> bool:
    """Whether a probe's pod has ended, or says why it never will."""
    return phase_of(pod) in OVER or _reason(pod) in _HOPELESS


def _reason(pod: Manifest) -> str:
    """Tell in a word what its container waits for."""
    waiting = (main_status(pod).get("state") or {}).get("waiting") or {}
    return str(waiting.get("reason") or "")


def of_probe(probe: Probe) -> Iterator[Check]:
    """Judge whether an image can be pulled and started, and whether names are found from it."""
    image = probe.image
    if probe.refused is not None:
        yield Check("image", None, f"{image}: not tried: the probe was refused: {probe.refused.what}")
        return
    pod = probe.pod or {}
    node, state = (pod.get("spec") or {}).get("nodeName"), main_status(pod).get("state") or {}
    if over := state.get("terminated"):
        yield from _of_end(image, node, over)
    elif phase_of(pod) == "Failed":
        _, why = ended(pod) or (0, "")
        yield Check("image", None, f"{image}: not tried: the probe was ended: {why}")
    elif "running" in state:
        yield Check("image", True, f"{image} is pulled and starts on {node}")
        told = f"kubernetes.default was not found within {format_duration(probe.waited_s)}"
        yield Check("DNS", False, told, _DNS_FIX, code=BAD)
    else:
        yield _of_waiting(probe, node, _reason(pod))
        yield Check("DNS", None, "not tried: the probe did not run")


_DNS_FIX = (
    "is the cluster's DNS up? kubectl get pods -n kube-system -l k8s-app=kube-dns; does a NetworkPolicy forbid it?"
)


def _of_end(image: str, node: str | None, over: Manifest) -> Iterator[Check]:
    text = str(over.get("message") or "").strip()
    if over.get("reason") in _NOT_STARTED or over.get("exitCode") in (126, 127, 128):
        yield _not_started(image, text)
        yield Check("DNS", None, "not tried: the probe did not run")
        return
    if over.get("exitCode") != 0:
        told = (
            f"{image} is pulled, and a shell in it fails with code {over.get('exitCode')}: {text or 'it says nothing'}"
        )
        yield missing("image", told, "is it built for this kind of processor? Try it: docker run IMAGE sh -c true")
        return
    yield Check("image", True, f"{image} is pulled and starts on {node}")
    if "dns=failed" in text:
        yield missing("DNS", f"kubernetes.default is not found from a pod on {node}", _DNS_FIX)
    elif "dns=ok" in text:
        yield Check("DNS", True, f"kubernetes.default is found from a pod on {node}")
    else:
        yield Check("DNS", None, "not tried: the image has nothing that looks up names")


_PULL = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_NOT_STARTED = ("StartError", "ContainerCannotRun", "CreateContainerError", "RunContainerError")
_HOPELESS = (*_PULL, *_NOT_STARTED, "ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
_FIXES = {
    "InvalidImageName": "write it as registry/name:tag, in small letters",
    "ErrImageNeverPull": "have it put on all nodes, or let it be pulled: kubernetes.image_pull_policy: IfNotPresent",
    **dict.fromkeys(_PULL, "is the name right, was it pushed, and may nodes reach the registry? In job.yaml: image"),
}


def _not_started(image: str, text: str) -> Check:
    if re.search(r'exec: \\?"?(/bin/)?sh\\?"?:|stat sh|"sh": executable file not found|/bin/sh: no such file', text):
        return missing(
            "image", f"{image} is pulled, but has no sh", "jobs are started by a script: take an image with a shell"
        )
    return missing("image", f"{image} is pulled, but does not start: {text}", "try it: docker run IMAGE sh -c true")


def _of_waiting(probe: Probe, node: str | None, reason: str) -> Check:
    """Say why a container does not run."""
    image, why = probe.image, why_pending(probe.pod or {}, probe.events)
    if node is None:
        return Check("image", None, f"{image}: not tried: {why or 'no node took the probe, and nothing says why'}")
    if reason in _NOT_STARTED:
        return _not_started(image, why)
    if not why:
        told = f"{image} was not pulled within {format_duration(probe.waited_s)} on {node}"
        return Check("image", None, told, "a large image takes its time; ask again later, or see: kubectl get events")
    return missing("image", why, _FIXES.get(reason, "what the job names must be in its namespace"))

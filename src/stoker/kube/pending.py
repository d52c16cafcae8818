"""Explain why a pod is not running: admission, queueing, scheduling, image pull, volume mounts. Pure.

Kubernetes spreads the answer over phases, conditions, container states and events; these functions return one
sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stoker.kube.conditions import (
    FINISHED_PHASES,
    filter_events,
    get_condition,
    get_phase,
    is_terminating,
    newest_first,
)
from stoker.kube.errors import describe_quota_error
from stoker.kube.messages import first_sentence, root_cause, shorten
from stoker.kube.objects import MAIN_CONTAINER, QUEUE_LABEL, Manifest
from stoker.kube.pods import (
    describe_exit,
    describe_node_failure,
    format_node_failure,
    get_container_statuses,
    get_exit_status,
    get_labels,
    get_requested_amount,
    get_state,
    is_running,
    list_claim_names,
)

_KUEUE = "kueue.x-k8s.io"
_AFTER_MOUNT = ("Pulling", "Pulled", "Created", "Started")
"""Event reasons that prove that the volumes are mounted."""


def explain_pending(pod: Manifest, events: Sequence[Manifest] = ()) -> str:
    """Return why a pod is not running; "" if nothing is wrong, or it is only starting, or it has finished.

    A Job (or an empty dict) instead of a pod: return why it has no pods.
    """
    if pod.get("kind") == "Job" or not pod.get("status"):
        return _explain_no_pods(pod, events)
    if get_phase(pod) in FINISHED_PHASES:
        return ""
    own_events = filter_events(pod, "Pod", events)
    explanations: tuple[Callable[[Manifest, Sequence[Manifest]], str], ...] = (
        _explain_node_failure,
        _explain_waiting_container,
        _explain_unscheduled,
        _explain_unmounted,
    )
    return next((sentence for explain in explanations if (sentence := explain(pod, own_events))), "")


def explain_not_running(pod: Manifest, events: Sequence[Manifest] = ()) -> str:
    """Return why no command can be run in a pod now; "" if it is running."""
    if failure := _explain_node_failure(pod, filter_events(pod, "Pod", events)):
        return failure
    if is_running(pod):
        return ""
    if (status := get_exit_status(pod)) is not None:
        return f"it has exited with {describe_exit(*status)}"
    if reason := explain_pending(pod, events):
        return reason
    return "it is terminating" if is_terminating(pod) else "it is starting"


# --- Admission and queueing


def _explain_no_pods(owner: Manifest, events: Sequence[Manifest]) -> str:
    """Return why a Job has no pods: it is suspended or queued, or the API server rejects its pods."""
    if (owner.get("spec") or {}).get("suspend"):
        queue = get_labels(owner).get(QUEUE_LABEL) if owner.get("metadata") else None
        if not queue:
            return "its Job is suspended"
        pending = (
            event
            for event in newest_first(events)
            if (event.get("involvedObject") or {}).get("kind") == "Workload" and _reason(event) == "Pending"
        )
        return _describe_queued(queue, next(map(_message, pending), ""))
    name = (owner.get("metadata") or {}).get("name")
    for event in newest_first(events):
        if name is not None and (event.get("involvedObject") or {}).get("name") != name:
            continue
        if _reason(event) == "SuccessfulCreate":
            return ""
        if _reason(event) == "FailedCreate":
            return describe_admission_error(_message(event))
    return ""


def _describe_queued(queue: str | None, message: str) -> str:
    detail = f": {shorten(message)}" if message else ""
    return f"not yet admitted by Kueue{f' (queue {queue})' if queue else ''}{detail}"


def describe_admission_error(message: str) -> str:
    """Return why the API server rejected a pod: quota, PriorityClass, service account or pod security."""
    if exceeded := describe_quota_error(message):
        return exceeded
    if match := re.search(r"failed quota: (\S+): must specify (.+)", message):
        return f"quota {match[1]} requires {first_sentence(match[2])}: set it in resources"
    if match := re.search(r"no PriorityClass with name (\S+) was found", message):
        return f"PriorityClass {match[1]} not found"
    if match := re.search(r'serviceaccount "([^"]+)" not found|service account \S*?/(\S+?): ', message):
        return f"service account {match[1] or match[2]} not found"
    if match := re.search(r'violates PodSecurity "([^":]+)[^"]*": (.+)', message):
        return f"pod security level {match[1]} of the namespace forbids the pod: {shorten(match[2])}"
    cause = re.sub(r"^Error creating: (pods \S+ is forbidden: )?", "", message)
    return f"the API server rejected the pod: {shorten(cause)}"


# --- Nodes


def _explain_node_failure(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Return that the pod's node failed."""
    if failure := describe_node_failure(pod):
        return failure
    is_unready = get_condition(pod, "Ready").get("status") == "False"
    if get_phase(pod) == "Unknown" or (is_unready and any(_reason(event) == "NodeNotReady" for event in events)):
        return format_node_failure("NodeLost", pod)
    return ""


# --- Containers


def _explain_waiting_container(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Return what a container waits for, unless it is only being created."""
    for noun, key in (("init container", "initContainerStatuses"), ("container", "containerStatuses")):
        for status in get_container_statuses(pod, key):
            container = f"the {noun}" if status.get("name") == MAIN_CONTAINER else f"{noun} {status.get('name')}"
            if sentence := _describe_waiting_state(container, status, events):
                return sentence
            terminated = get_state(status).get("terminated") or {}
            if key == "initContainerStatuses" and terminated.get("exitCode"):
                return f"{container} failed with exit code {terminated['exitCode']}"
    return ""


def _describe_waiting_state(container: str, status: Manifest, events: Sequence[Manifest]) -> str:
    waiting = get_state(status).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return ""
    if "Image" in reason or reason in ("RegistryUnavailable", "SignatureValidationFailed"):
        return describe_image_pull_error(str(status.get("image") or ""), reason, message, events)
    if reason == "CrashLoopBackOff":
        return _describe_crash_loop(container, status)
    if reason == "CreateContainerConfigError":
        return f"{container} cannot be created: {_describe_config_error(message)}"
    return f"{container} cannot be started: {root_cause(message) or reason}"


def _describe_crash_loop(container: str, status: Manifest) -> str:
    terminated = (status.get("lastState") or {}).get("terminated") or {}
    reason = str(terminated.get("reason") or "")
    detail = f" ({reason})" if reason not in ("", "Error", "Completed") else ""
    restarts = int(status.get("restartCount") or 0)
    count = f", {restarts} restarts so far" if restarts > 1 else ""
    return f"{container} keeps crashing: exit code {terminated.get('exitCode', '?')}{detail}{count}"


def _describe_config_error(message: str) -> str:
    """Return which Secret or ConfigMap, or key of one, is missing, or that the image must not run as root."""
    if match := re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+?/)?(\S+)", message):
        return f"key {match[1]} not found in {match[2]} {match[3]}"
    if match := re.search(r'(secret|configmap) "([^"]+)" not found', message, re.IGNORECASE):
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[match[1].lower()]
        return f"{kind} {match[2]} not found"
    if match := re.search(r"references non-existent (secret|config) key: (\S+)", message):
        return f"key {match[2]} not found in its {'Secret' if match[1] == 'secret' else 'ConfigMap'}"
    if "runAsNonRoot" in message:
        return "the image runs as root, but the pod requires a non-root user: set a user in the image"
    return root_cause(message)


_PULL_ERRORS = (
    (r"not found|manifest unknown|does not exist or|name unknown", "it does not exist, or requires a login"),
    (
        r"denied|unauthorized|forbidden|authoriz|authentication|\b40[13]\b",
        "the registry requires a login (kubernetes.image_pull_secrets)",
    ),
    (r"toomanyrequests|\b429\b|rate limit", "rate limit of the registry exceeded"),
    (r"no match(ing manifest)? for (platform|\S+/\S+ in)", "it is not available for the nodes' CPU architecture"),
    (r"no space left", "the node's disk is full"),
    (
        r"no such host|dial tcp|timeout|connection refused|deadline exceeded|TLS|x509|unreachable|EOF",
        "the node cannot reach the registry",
    ),
)


def describe_image_pull_error(image: str, reason: str, message: str, events: Sequence[Manifest]) -> str:
    """Return why the image of a container cannot be pulled."""
    if reason == "InvalidImageName":
        return f"{image!r} is not a valid image name"
    if reason == "ErrImageNeverPull":
        return f"image {image} is not on the node, and kubernetes.image_pull_policy is Never"
    failures = [
        _message(event)
        for event in newest_first(events)
        if _reason(event) == "Failed" and "Failed to pull image" in _message(event)
    ]
    text = message if "failed" in message.lower() or not failures else failures[0]
    # The image's own name could match a pattern.
    text = text.replace(image, "") if image else text
    for pattern, cause in _PULL_ERRORS:
        if re.search(pattern, text, re.IGNORECASE):
            return f"cannot pull image {image}: {cause}"
    return f"cannot pull image {image}: {root_cause(text) if ':' in text else reason}"


# --- Scheduling


def _explain_unscheduled(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Return why the pod is not scheduled to a node."""
    scheduled = get_condition(pod, "PodScheduled")
    if (pod.get("spec") or {}).get("nodeName") or scheduled.get("status") == "True":
        return ""
    gates = [str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ()]
    if gates or scheduled.get("reason") == "SchedulingGated":
        if any(gate.startswith(_KUEUE) for gate in gates):
            return _describe_queued(get_labels(pod).get(QUEUE_LABEL), "")
        return f"held by scheduling gate {', '.join(gates)}" if gates else "held by a scheduling gate"
    failures = (_message(event) for event in newest_first(events) if _reason(event) == "FailedScheduling")
    message = str(scheduled.get("message") or "") or next(failures, "")
    return describe_scheduling_failure(message, pod) if message else ""


def describe_scheduling_failure(message: str, pod: Manifest) -> str:
    """Shorten the scheduler's message: what is insufficient, and on how many nodes."""
    head = re.split(r"\.?\s*,?\s*(?:no new claims to deallocate, )?preemption: ", message, maxsplit=1)[0].strip(" .")
    match = re.match(r"0/(\d+) nodes are available: (.*)", head, re.DOTALL)
    nodes, reasons = (int(match[1]), match[2]) if match else (0, head)
    if sentence := _describe_claim_failure(reasons, pod):
        return sentence
    if match is None:
        is_empty = "no nodes available" in head
        return "the cluster has no nodes" if is_empty else f"no node fits the pod: {shorten(head)}"
    failures = [_describe_node_filter(reason, nodes, pod) for reason in re.split(r", (?=\d+ )", reasons) if reason]
    return f"no node fits the pod: {'; '.join(failures)}"


def _describe_claim_failure(reasons: str, pod: Manifest) -> str:
    """Return what is wrong with a claim, if the scheduler names one; else ""."""
    if match := re.search(r'persistentvolumeclaim "([^"]+)" not found', reasons):
        return f"claim {match[1]} not found; create it with: stoker volume create {match[1]}"
    if match := re.search(r'persistentvolumeclaim "([^"]+)" is being deleted', reasons):
        return f"claim {match[1]} is being deleted"
    claims = ", ".join(list_claim_names(pod)) or "of the pod"
    if "unbound immediate PersistentVolumeClaims" in reasons:
        return f"claim {claims} is not bound: check its storage class"
    if "didn't find available persistent volumes to bind" in reasons:
        return f"no volume for claim {claims} on a node that fits the pod"
    if "ReadWriteOncePod" in reasons:
        return f"claim {claims} is ReadWriteOncePod and used by another pod"
    if "volume node affinity conflict" in reasons and "Insufficient" not in reasons:
        return f"the volume of claim {claims} is on a node or in a zone that does not fit the pod"
    return ""


def _describe_node_filter(reason: str, nodes: int, pod: Manifest) -> str:
    """Return one of the scheduler's reasons, which starts with the number of nodes it applies to."""
    number, _, rest = reason.partition(" ")
    if not number.isdigit():
        return shorten(reason)
    count = f"{number} of {nodes}"
    rest = rest.removeprefix("node(s) ").strip(" .")
    if match := re.match(r"Insufficient (\S+)", rest):
        amount = get_requested_amount(pod, match[1])
        return f"{count} have insufficient {match[1]}{f' ({amount} requested)' if amount else ''}"
    if match := re.match(r"had untolerated taint(?:\(s\))? ?(.*)", rest):
        taint = re.sub(r": ?\}$", "}", match[1]).strip("{}")
        return f"{count} have an untolerated taint{f' ({taint})' if taint else ''}"
    known = {
        "didn't match Pod's node affinity/selector": "do not match gpu_type or node_selector",
        "were unschedulable": "are unschedulable (cordoned)",
        "Too many pods": "have reached their maximum number of pods",
        "were not ready": "are not ready",
    }
    return f"{count} {known.get(rest) or shorten(rest)}"


# --- Volumes


def _explain_unmounted(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Return why a scheduled pod does not start on its node: usually a volume that cannot be mounted."""
    if get_phase(pod) != "Pending":
        return ""
    for event in newest_first(events):
        reason, message = _reason(event), _message(event)
        if reason in _AFTER_MOUNT:
            return ""
        if reason in ("FailedMount", "FailedAttachVolume", "FailedMapVolume"):
            return describe_mount_failure(message, pod)
        if reason == "FailedCreatePodSandBox":
            return f"its node cannot create the pod sandbox: {root_cause(message)}"
    return ""


def describe_mount_failure(message: str, pod: Manifest) -> str:
    """Return why a volume cannot be attached or mounted."""
    match = re.search(r'volume "([^"]+)"', message)
    name = _describe_volume(match[1], pod) if match else "a volume"
    if "Multi-Attach" in message:
        users = re.search(r"used by pod\(s\) (.+)", message)
        used_by = f" for {first_sentence(users[1])}" if users else ""
        return f"{name} is attached to another node{used_by}, and can be attached to only one node"
    if re.search(r'(secret|configmap) "[^"]+" not found|references non-existent', message, re.IGNORECASE):
        return f"cannot mount {name}: {_describe_config_error(message)}"
    if unmounted := re.search(r"unmounted volumes=\[([^\]]*)\]", message):
        name = ", ".join(_describe_volume(volume, pod) for volume in unmounted[1].split()) or name
    return f"cannot mount {name}: {root_cause(message)}"


def _describe_volume(name: str, pod: Manifest) -> str:
    """Return a volume by the name of its claim, which the user knows, else by its own."""
    for volume in (pod.get("spec") or {}).get("volumes") or ():
        if volume.get("name") == name and volume.get("persistentVolumeClaim"):
            return f"claim {volume['persistentVolumeClaim']['claimName']}"
    return f"volume {name}"


# --- Events


def _reason(event: Manifest) -> str:
    return str(event.get("reason") or "")


def _message(event: Manifest) -> str:
    return str(event.get("message") or "")

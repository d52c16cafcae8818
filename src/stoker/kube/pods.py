"""What a pod tells of itself: whose it is, why it does not run yet, and how it ended. Pure.

Kubernetes spreads that over phases, conditions, container states and events; here it becomes one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from stoker.kube.conditions import (
    FINISHED_PHASES,
    filter_events,
    get_condition,
    get_phase,
    is_terminating,
    newest_first,
)
from stoker.kube.errors import describe_quota_error
from stoker.kube.objects import FIRST_INDEX_ANNOTATION, INDEX_LABEL, MAIN_CONTAINER, ROLE_LABEL, Manifest

EXIT_CODE_KILLED = 137
"""The code of what was killed from outside, where the node could tell none."""
EXIT_CODE_NEVER_STARTED = 128
"""The code of what never ran, as the kubelet has it."""
MAX_MESSAGE_CHARS = 200
"""Of others' words in a sentence of ours."""

_COMPLETION = "batch.kubernetes.io/job-completion-index"
_REPLICA = "training.kubeflow.org/replica-index"
_KUEUE = "kueue.x-k8s.io"
_LOST = {
    "NodeLost": "its node {node} no longer answers",
    "DeletionByTaintManager": "its node {node} no longer answers",
    "DeletionByPodGC": "its node {node} is gone",
    "ContainerStatusUnknown": "its node {node} lost it",
}
_PROGRESS = ("Pulling", "Pulled", "Created", "Started")
"""Events that come only after the volumes are there."""


# --- Whose pod it is


def get_slot(pod: Manifest) -> str:
    """Name the slot that a pod is, like `worker/0`."""
    labels, notes = _labels(pod), pod["metadata"].get("annotations") or {}
    if INDEX_LABEL in labels:
        return f"{labels.get(ROLE_LABEL, 'worker')}/{labels[INDEX_LABEL]}"
    index = labels.get(_COMPLETION) or notes.get(_COMPLETION) or labels.get(_REPLICA) or 0
    return f"{labels.get(ROLE_LABEL, 'worker')}/{int(index) + int(notes.get(FIRST_INDEX_ANNOTATION) or 0)}"


def find_pod(pods: Iterable[Manifest], slot: str) -> Manifest | None:
    """Choose the pod that a slot has now: one that runs, else one that will, else the last one that did."""
    return max((pod for pod in pods if get_slot(pod) == slot), key=_liveness, default=None)


def is_running(pod: Manifest) -> bool:
    """Whether its main container runs, so that a command can be run in it."""
    return "running" in _state(main_container_status(pod))


def main_container_status(pod: Manifest) -> Manifest:
    """Give the status of the container that does the work."""
    every = _statuses(pod, "containerStatuses")
    return next((one for one in every if one.get("name") == MAIN_CONTAINER), every[0] if every else {})


def _liveness(pod: Manifest) -> tuple[bool, bool, bool, str]:
    alive = get_phase(pod) not in FINISHED_PHASES
    return (
        alive and not is_terminating(pod),
        is_running(pod),
        alive,
        str(pod["metadata"].get("creationTimestamp") or ""),
    )


# --- How it ended


def get_exit_status(pod: Manifest) -> tuple[int, str] | None:
    """Tell a pod's exit code (as it is, 137 for SIGKILL) and why, in a word or two; None: it has not ended."""
    phase = get_phase(pod)
    if phase == "Succeeded":
        return 0, ""
    last = _last_words(pod)
    if phase != "Failed" and (last is None or (pod.get("spec") or {}).get("restartPolicy") != "Never"):
        return None
    if last is None:
        return (EXIT_CODE_KILLED if main_container_status(pod) else EXIT_CODE_NEVER_STARTED), _outer_reason(
            pod
        ) or "it never started"
    code = int(last.get("exitCode") or 0)
    return code, ("" if code == 0 else _outer_reason(pod) or _inner_reason(pod, last))


def _last_words(pod: Manifest) -> Manifest | None:
    """Give the state of the container whose end is the pod's."""
    broken = [_state(one).get("terminated") for one in _statuses(pod, "initContainerStatuses")]
    found = _state(main_container_status(pod)).get("terminated") or next(
        (one for one in broken if one and one.get("exitCode")), None
    )
    return found if isinstance(found, dict) else None


def _outer_reason(pod: Manifest) -> str:
    """Tell why the pod was ended by something other than its own program."""
    status = pod.get("status") or {}
    reason, message = str(status.get("reason") or ""), _sentence(str(status.get("message") or ""))
    gone = get_condition(pod, "DisruptionTarget")
    for known in (reason, str(gone.get("reason") or "") if gone.get("status") == "True" else ""):
        if known in _LOST:
            return _lost(known, pod)
    if reason == "DeadlineExceeded":
        return reason
    if reason:
        return f"{reason}: {message}" if message else reason
    if gone.get("status") == "True":
        return _sentence(str(gone.get("message") or gone.get("reason") or ""))
    return ""


def _inner_reason(pod: Manifest, last: Manifest) -> str:
    reason = str(last.get("reason") or "")
    if reason in _LOST:
        return _lost(reason, pod)
    if reason in ("StartError", "ContainerCannotRun"):
        return f"{reason}: {_cause(str(last.get('message') or ''))}"
    return "" if reason in ("Error", "Completed") else reason


# --- Why it does not run yet


def explain_pending(pod: Manifest, events: Sequence[Manifest] = ()) -> str:
    """Tell in a sentence why a pod does not run; "": nothing is wrong, or it only just began, or it is over.

    In place of a pod its Job (or an empty dictionary) can be given: why there is no pod at all.
    """
    if pod.get("kind") == "Job" or not pod.get("status"):
        return _why_no_pod(pod, events)
    if get_phase(pod) in FINISHED_PHASES:
        return ""
    mine = filter_events(pod, "Pod", events)
    tellers: tuple[Callable[[Manifest, Sequence[Manifest]], str], ...] = (
        _why_lost,
        _why_waiting,
        _why_unplaced,
        _why_unmounted,
    )
    return next((sentence for tell in tellers if (sentence := tell(pod, mine))), "")


def explain_not_running(pod: Manifest, events: Sequence[Manifest] = ()) -> str:
    """Tell in a sentence why nothing can be run in a pod now; "": it runs."""
    if lost := _why_lost(pod, filter_events(pod, "Pod", events)):
        return lost
    if is_running(pod):
        return ""
    if (end := get_exit_status(pod)) is not None:
        code, reason = end
        return f"it has ended with exit code {code}{f' ({reason})' if reason else ''}"
    if why := explain_pending(pod, events):
        return why
    return "it is being ended" if is_terminating(pod) else "it is only being started"


def _why_no_pod(owner: Manifest, events: Sequence[Manifest]) -> str:
    """Tell why a Job has no pod."""
    if (owner.get("spec") or {}).get("suspend"):
        queue = _labels(owner).get(f"{_KUEUE}/queue-name") if owner.get("metadata") else None
        said = next(
            (_said(one) for one in newest_first(events) if _about(one) == "Workload" and _why(one) == "Pending"), ""
        )
        return _queued(queue, said) if queue else "its Job is suspended"
    name = (owner.get("metadata") or {}).get("name")
    for event in newest_first(events):
        if name is not None and (event.get("involvedObject") or {}).get("name") != name:
            continue
        if _why(event) == "SuccessfulCreate":
            return ""
        if _why(event) == "FailedCreate":
            return _refused(_said(event))
    return ""


def _refused(text: str) -> str:
    """Tell why the API server would not have the pod."""
    if short := describe_quota_error(text):
        return short
    if found := re.search(r"failed quota: (\S+): must specify (.+)", text):
        return f"quota {found[1]} wants {_sentence(found[2])} to be set for every container: set it in resources"
    if found := re.search(r"no PriorityClass with name (\S+) was found", text):
        return f"there is no PriorityClass {found[1]}"
    if found := re.search(r'serviceaccount "([^"]+)" not found|service account \S*?/(\S+?): ', text):
        return f"there is no service account {found[1] or found[2]}"
    if found := re.search(r'violates PodSecurity "([^":]+)[^"]*": (.+)', text):
        return f"the namespace's pod security ({found[1]}) forbids it: {_short(found[2])}"
    cause = re.sub(r"^Error creating: (pods \S+ is forbidden: )?", "", text)
    return f"the cluster refuses its pod: {_short(cause)}"


def _why_lost(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Tell that a pod's node is gone."""
    reason, gone = str(pod["status"].get("reason") or ""), get_condition(pod, "DisruptionTarget")
    for known in (reason, str(gone.get("reason") or "") if gone.get("status") == "True" else ""):
        if known in _LOST:
            return _lost(known, pod)
    is_unready = get_condition(pod, "Ready").get("status") == "False"
    if get_phase(pod) == "Unknown" or (is_unready and any(_why(one) == "NodeNotReady" for one in events)):
        return _lost("NodeLost", pod)
    return ""


def _why_waiting(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Tell what a container waits for, when it is not simply being made."""
    groups = (("the init container", "initContainerStatuses"), ("the container", "containerStatuses"))
    for which, group in groups:
        for one in _statuses(pod, group):
            name = "" if one.get("name") == MAIN_CONTAINER else f" {one.get('name')}"
            if sentence := _waiting(f"{which}{name}", one, events):
                return sentence
            ended = _state(one).get("terminated") or {}
            if group == "initContainerStatuses" and ended.get("exitCode"):
                return f"{which}{name} failed with exit code {ended['exitCode']}"
    return ""


def _waiting(which: str, status: Manifest, events: Sequence[Manifest]) -> str:
    waiting = _state(status).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return ""
    if "Image" in reason or reason in ("RegistryUnavailable", "SignatureValidationFailed"):
        return _unpulled(str(status.get("image") or ""), reason, message, events)
    if reason == "CrashLoopBackOff":
        return _crashing(which, status)
    if reason == "CreateContainerConfigError":
        return f"{which} cannot be made: {_lacking(message)}"
    return f"{which} cannot be started: {_cause(message) or reason}"


def _crashing(which: str, status: Manifest) -> str:
    last = (status.get("lastState") or {}).get("terminated") or {}
    reason = str(last.get("reason") or "")
    why = f" ({reason})" if reason not in ("", "Error", "Completed") else ""
    times = int(status.get("restartCount") or 0)
    often = f", {times} times so far" if times > 1 else ""
    return f"{which} ends again and again: exit code {last.get('exitCode', '?')}{why}{often}"


def _lacking(text: str) -> str:
    """Name the Secret or ConfigMap, or the key in it, that is missing."""
    if found := re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+?/)?(\S+)", text):
        return f"there is no key {found[1]} in {found[2]} {found[3]}"
    if found := re.search(r'(secret|configmap) "([^"]+)" not found', text, re.IGNORECASE):
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[found[1].lower()]
        return f"there is no {kind} {found[2]}"
    if found := re.search(r"references non-existent (secret|config) key: (\S+)", text):
        return f"there is no key {found[2]} in its {'Secret' if found[1] == 'secret' else 'ConfigMap'}"
    if "runAsNonRoot" in text:
        return "its image runs as root, and the pod must not: set a user in the image"
    return _cause(text)


_PULL_WORDS = (
    (r"not found|manifest unknown|does not exist or|name unknown", "there is no such image, or it needs a login"),
    (
        r"denied|unauthorized|forbidden|authoriz|authentication|\b40[13]\b",
        "the registry wants a login (kubernetes.image_pull_secrets)",
    ),
    (r"toomanyrequests|\b429\b|rate limit", "the registry has had too many requests"),
    (r"no match(ing manifest)? for (platform|\S+/\S+ in)", "there is none for the nodes' kind of processor"),
    (r"no space left", "the node's disk is full"),
    (
        r"no such host|dial tcp|timeout|connection refused|deadline exceeded|TLS|x509|unreachable|EOF",
        "the registry cannot be reached from the node",
    ),
)


def _unpulled(image: str, reason: str, message: str, events: Sequence[Manifest]) -> str:
    """Tell why an image is not there."""
    if reason == "InvalidImageName":
        return f"{image!r} is no name of an image"
    if reason == "ErrImageNeverPull":
        return f"image {image} is not on the node, and kubernetes.image_pull_policy is Never"
    told = [
        _said(one) for one in newest_first(events) if _why(one) == "Failed" and "Failed to pull image" in _said(one)
    ]
    text = message if "failed" in message.lower() or not told else told[0]
    # The image's own name may hold any of the words.
    words = text.replace(image, "") if image else text
    for pattern, sentence in _PULL_WORDS:
        if re.search(pattern, words, re.IGNORECASE):
            return f"image {image} cannot be pulled: {sentence}"
    return f"image {image} cannot be pulled: {_cause(words) if ':' in words else reason}"


def _why_unplaced(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Tell why no node was chosen."""
    placed = get_condition(pod, "PodScheduled")
    if (pod.get("spec") or {}).get("nodeName") or placed.get("status") == "True":
        return ""
    gates = [str(one.get("name")) for one in (pod.get("spec") or {}).get("schedulingGates") or ()]
    if gates or placed.get("reason") == "SchedulingGated":
        if any(gate.startswith(_KUEUE) for gate in gates):
            return _queued(_labels(pod).get(f"{_KUEUE}/queue-name"), "")
        return f"it is held back by {', '.join(gates) or 'a scheduling gate'}"
    told = [_said(one) for one in newest_first(events) if _why(one) == "FailedScheduling"]
    text = str(placed.get("message") or "") or next(iter(told), "")
    return describe_scheduling_failure(text, pod) if text else ""


def _queued(queue: str | None, said: str) -> str:
    why = f": {_short(said)}" if said else ""
    return f"it waits to be let in by Kueue{f' (queue {queue})' if queue else ''}{why}"


def describe_scheduling_failure(text: str, pod: Manifest) -> str:
    """Make the scheduler's own words short: what is lacking, and on how many nodes."""
    head = re.split(r"\.?\s*,?\s*(?:no new claims to deallocate, )?preemption: ", text, maxsplit=1)[0].strip(" .")
    counted = re.match(r"0/(\d+) nodes are available: (.*)", head, re.DOTALL)
    nodes, reasons = (int(counted[1]), counted[2]) if counted else (0, head)
    if sentence := _claim_fault(reasons, pod):
        return sentence
    if not counted:
        empty = "no nodes available" in head
        return "the cluster has no node" if empty else f"no node can take it: {_short(head)}"
    faults = [_node_fault(one, nodes, pod) for one in re.split(r", (?=\d+ )", reasons) if one]
    return f"no node can take it: {'; '.join(faults)}"


def _claim_fault(text: str, pod: Manifest) -> str:
    """Tell what is wrong with a claim, where the scheduler names that."""
    if found := re.search(r'persistentvolumeclaim "([^"]+)" not found', text):
        return f"there is no claim {found[1]}; make it with: stoker volume create {found[1]}"
    if found := re.search(r'persistentvolumeclaim "([^"]+)" is being deleted', text):
        return f"claim {found[1]} is being deleted"
    claims = ", ".join(list_claim_names(pod)) or "of the pod"
    if "unbound immediate PersistentVolumeClaims" in text:
        return f"no volume was found or made yet for its claim ({claims}): is its storage class right?"
    if "didn't find available persistent volumes to bind" in text:
        return f"no volume fits its claim ({claims}) on a node that can take it"
    if "ReadWriteOncePod" in text:
        return f"another pod has its claim ({claims}), which only one pod at a time can have"
    if "volume node affinity conflict" in text and "Insufficient" not in text:
        return f"the volume of its claim ({claims}) is on a node or in a zone that cannot take the pod"
    return ""


def _node_fault(text: str, nodes: int, pod: Manifest) -> str:
    """Say one of the scheduler's reasons, which begins with the number of nodes that have it."""
    number, _, rest = text.partition(" ")
    if not number.isdigit():
        return _short(text)
    these = f"{number} of {nodes}"
    rest = rest.removeprefix("node(s) ").strip(" .")
    if found := re.match(r"Insufficient (\S+)", rest):
        asked = get_requested_amount(pod, found[1])
        return f"{these} have too little {found[1]} free{f' ({asked} asked for)' if asked else ''}"
    if found := re.match(r"had untolerated taint(?:\(s\))? ?(.*)", rest):
        taint = re.sub(r": ?\}$", "}", found[1]).strip("{}")
        return f"{these} have a taint that is not tolerated{f' ({taint})' if taint else ''}"
    words = {
        "didn't match Pod's node affinity/selector": "are not of the kind asked for (gpu_type, node_selector)",
        "were unschedulable": "are closed for new pods",
        "Too many pods": "have all the pods they can",
        "were not ready": "are not ready",
    }
    return f"{these} {words.get(rest) or _short(rest)}"


def get_requested_amount(pod: Manifest, resource: str) -> str:
    """Tell how much of a resource the main container asks for."""
    for one in (pod.get("spec") or {}).get("containers") or ():
        resources = one.get("resources") or {}
        found = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        if found:
            return str(found)
    return ""


def list_claim_names(pod: Manifest) -> list[str]:
    """List the claims that a pod mounts."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return [str(one["persistentVolumeClaim"]["claimName"]) for one in volumes if one.get("persistentVolumeClaim")]


def _why_unmounted(pod: Manifest, events: Sequence[Manifest]) -> str:
    """Tell why a pod that has its node does not come up there: mostly a volume."""
    if get_phase(pod) != "Pending":
        return ""
    for event in newest_first(events):
        reason, text = _why(event), _said(event)
        if reason in _PROGRESS:
            return ""
        if reason in ("FailedMount", "FailedAttachVolume", "FailedMapVolume"):
            return _unmounted(text, pod)
        if reason == "FailedCreatePodSandBox":
            return f"its node cannot set it up: {_cause(text)}"
    return ""


def _unmounted(text: str, pod: Manifest) -> str:
    found = re.search(r'volume "([^"]+)"', text)
    name = _volume_name(found[1], pod) if found else "a volume"
    if "Multi-Attach" in text:
        users = re.search(r"used by pod\(s\) (.+)", text)
        return (
            f"{name} is attached to another node{f' for {_sentence(users[1])}' if users else ''}: it can be on one only"
        )
    if re.search(r'(secret|configmap) "[^"]+" not found|references non-existent', text, re.IGNORECASE):
        return f"{name} cannot be mounted: {_lacking(text)}"
    if "unmounted volumes=" in text:
        lacking = re.search(r"unmounted volumes=\[([^\]]*)\]", text)
        names = ", ".join(_volume_name(one, pod) for one in (lacking[1].split() if lacking else ()))
        return f"{names or name} cannot be mounted: {_cause(text)}"
    return f"{name} cannot be mounted: {_cause(text)}"


def _volume_name(name: str, pod: Manifest) -> str:
    """Name a volume by what the user knows of it: its claim."""
    for one in (pod.get("spec") or {}).get("volumes") or ():
        if one.get("name") == name and one.get("persistentVolumeClaim"):
            return f"claim {one['persistentVolumeClaim']['claimName']}"
    return f"volume {name}"


# --- Reading objects


def _labels(one: Manifest) -> Mapping[str, str]:
    return one["metadata"].get("labels") or {}


def _statuses(pod: Manifest, group: str) -> Sequence[Manifest]:
    return (pod.get("status") or {}).get(group) or ()


def _state(status: Manifest) -> Manifest:
    return status.get("state") or {}


def _lost(reason: str, pod: Manifest) -> str:
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    return " ".join(_LOST[reason].format(node=node).split())


def _about(event: Manifest) -> str:
    return str((event.get("involvedObject") or {}).get("kind") or "")


def _why(event: Manifest) -> str:
    return str(event.get("reason") or "")


def _said(event: Manifest) -> str:
    return str(event.get("message") or "")


# --- Others' words


def _short(text: str) -> str:
    """Put a text on one line of bearable length."""
    line = " ".join(text.split()).rstrip(" .")
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 1]}…"


def _sentence(text: str) -> str:
    """Give the first sentence of a text."""
    return _short(re.split(r"\.(?:\s|$)", text, maxsplit=1)[0])


def _cause(text: str) -> str:
    """Give the end of a chain of errors (`a: b: c`): what it was at the bottom."""
    parts = [part for part in re.split(r"\s*: (?!\s)", " ".join(text.split()).rstrip(" .")) if part != "unknown"]
    kept = parts[-1:] if len(parts) < 2 or len(parts[-1]) > 40 else parts[-2:]
    return _short(": ".join(kept))

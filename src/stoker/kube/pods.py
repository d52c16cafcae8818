"""Read pods: their slot, whether they run, the claims they mount, and their exit code with its reason. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stoker.kube.conditions import FINISHED_PHASES, get_condition, get_phase, is_terminating
from stoker.kube.messages import first_sentence, root_cause
from stoker.kube.objects import FIRST_INDEX_ANNOTATION, INDEX_LABEL, MAIN_CONTAINER, ROLE_LABEL, Manifest

EXIT_CODE_KILLED = 137
"""Exit code of a container that was killed while its node could not report one."""
EXIT_CODE_NEVER_STARTED = 128
"""Exit code of a container that never ran, as the kubelet reports it."""

_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_REPLICA_INDEX = "training.kubeflow.org/replica-index"
_NODE_FAILURES = {
    "NodeLost": "node {node} is not responding",
    "DeletionByTaintManager": "node {node} is not responding",
    "DeletionByPodGC": "node {node} no longer exists",
    "ContainerStatusUnknown": "node {node} lost the container",
}


# --- Slot and state


def get_slot(pod: Manifest) -> str:
    """Return the slot of a pod, like `worker/0`."""
    labels, annotations = get_labels(pod), pod["metadata"].get("annotations") or {}
    if INDEX_LABEL in labels:
        return f"{labels.get(ROLE_LABEL, 'worker')}/{labels[INDEX_LABEL]}"
    index = labels.get(_COMPLETION_INDEX) or annotations.get(_COMPLETION_INDEX) or labels.get(_REPLICA_INDEX) or 0
    return f"{labels.get(ROLE_LABEL, 'worker')}/{int(index) + int(annotations.get(FIRST_INDEX_ANNOTATION) or 0)}"


def find_pod(pods: Iterable[Manifest], slot: str) -> Manifest | None:
    """Return the current pod of a slot: a running one, else a pending one, else the newest finished one."""
    return max((pod for pod in pods if get_slot(pod) == slot), key=_liveness, default=None)


def is_running(pod: Manifest) -> bool:
    """Whether the main container runs, so that a command can be run in it."""
    return "running" in get_state(main_container_status(pod))


def main_container_status(pod: Manifest) -> Manifest:
    """Return the status of the main container."""
    statuses = get_container_statuses(pod, "containerStatuses")
    return next(
        (status for status in statuses if status.get("name") == MAIN_CONTAINER), statuses[0] if statuses else {}
    )


def _liveness(pod: Manifest) -> tuple[bool, bool, bool, str]:
    alive = get_phase(pod) not in FINISHED_PHASES
    created = str(pod["metadata"].get("creationTimestamp") or "")
    return (alive and not is_terminating(pod), is_running(pod), alive, created)


def get_labels(obj: Manifest) -> Mapping[str, str]:
    """Return the labels of an object."""
    return obj["metadata"].get("labels") or {}


def get_container_statuses(pod: Manifest, key: str) -> Sequence[Manifest]:
    """Return `containerStatuses` or `initContainerStatuses`."""
    return (pod.get("status") or {}).get(key) or ()


def get_state(status: Manifest) -> Manifest:
    """Return the state of a container status: `waiting`, `running` or `terminated`."""
    return status.get("state") or {}


def get_requested_amount(pod: Manifest, resource: str) -> str:
    """Return how much of a resource the first container that needs it requests; "" if none does."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        resources = container.get("resources") or {}
        amount = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        if amount:
            return str(amount)
    return ""


def list_claim_names(pod: Manifest) -> list[str]:
    """List the PersistentVolumeClaims that a pod mounts."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return [
        str(volume["persistentVolumeClaim"]["claimName"]) for volume in volumes if volume.get("persistentVolumeClaim")
    ]


# --- Exit status


def get_exit_status(pod: Manifest) -> tuple[int, str] | None:
    """Return a finished pod's exit code (137 for SIGKILL) and a short reason; None if it has not finished."""
    phase = get_phase(pod)
    if phase == "Succeeded":
        return 0, ""
    terminated = _get_terminated_state(pod)
    if phase != "Failed" and (terminated is None or (pod.get("spec") or {}).get("restartPolicy") != "Never"):
        return None
    if terminated is None:
        code = EXIT_CODE_KILLED if main_container_status(pod) else EXIT_CODE_NEVER_STARTED
        return code, _get_pod_reason(pod) or "it never started"
    code = int(terminated.get("exitCode") or 0)
    return code, ("" if code == 0 else _get_pod_reason(pod) or _get_container_reason(pod, terminated))


def describe_exit(code: int, reason: str) -> str:
    """Return an exit status as text, such as `exit code 137 (OOMKilled)`."""
    return f"exit code {code}{f' ({reason})' if reason else ''}"


def describe_node_failure(pod: Manifest) -> str:
    """Return how the pod's node failed, by the pod's reason or its DisruptionTarget condition; "" if it did not."""
    disruption = get_condition(pod, "DisruptionTarget")
    reasons = (
        str((pod.get("status") or {}).get("reason") or ""),
        str(disruption.get("reason") or "") if disruption.get("status") == "True" else "",
    )
    return next((format_node_failure(reason, pod) for reason in reasons if reason in _NODE_FAILURES), "")


def format_node_failure(reason: str, pod: Manifest) -> str:
    """Return the sentence for a reason of _NODE_FAILURES, with the pod's node."""
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    return " ".join(_NODE_FAILURES[reason].format(node=node).split())


def _get_terminated_state(pod: Manifest) -> Manifest | None:
    """Return the terminated state of the main container, else of the init container that failed."""
    init_states = [
        get_state(status).get("terminated") for status in get_container_statuses(pod, "initContainerStatuses")
    ]
    failed_init = next((state for state in init_states if state and state.get("exitCode")), None)
    state = get_state(main_container_status(pod)).get("terminated") or failed_init
    return state if isinstance(state, dict) else None


def _get_pod_reason(pod: Manifest) -> str:
    """Return why the cluster terminated the pod (eviction, deadline, node failure); "" if it did not."""
    status = pod.get("status") or {}
    reason, message = str(status.get("reason") or ""), first_sentence(str(status.get("message") or ""))
    if failure := describe_node_failure(pod):
        return failure
    if reason == "DeadlineExceeded":
        return reason
    if reason:
        return f"{reason}: {message}" if message else reason
    disruption = get_condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        return first_sentence(str(disruption.get("message") or disruption.get("reason") or ""))
    return ""


def _get_container_reason(pod: Manifest, terminated: Manifest) -> str:
    reason = str(terminated.get("reason") or "")
    if reason in _NODE_FAILURES:
        return format_node_failure(reason, pod)
    if reason in ("StartError", "ContainerCannotRun"):
        return f"{reason}: {root_cause(str(terminated.get('message') or ''))}"
    return "" if reason in ("Error", "Completed") else reason

"""Pods: exit status and its reason, the slot of a pod, and the current pod of a slot."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.kube.pods import find_pod, get_exit_status, get_slot, is_running
from tests.support.pod_objects import RUNNING, Manifest, build_finished_pod, build_pod, build_waiting_pod

# --- Exit status


@pytest.mark.parametrize(
    ("pod", "status"),
    [
        (build_pod(), None),
        (build_waiting_pod("ContainerCreating"), None),
        (build_finished_pod(0, "Completed", phase="Succeeded"), (0, "")),
        (build_finished_pod(3), (3, "")),
        (build_finished_pod(137, "OOMKilled"), (137, "OOMKilled")),
        (build_finished_pod(143, phase="Running"), (143, "")),
        (build_finished_pod(0, "Completed", phase="Running"), (0, "")),
        (build_pod({"phase": "Failed", "reason": "DeadlineExceeded"}), (128, "DeadlineExceeded")),
        (
            build_finished_pod(128, "StartError", message='failed to start: exec: "trian": not found in $PATH'),
            (128, 'StartError: "trian": not found in $PATH'),
        ),
        (build_finished_pod(137, "ContainerStatusUnknown"), (137, "node node-1 lost the container")),
    ],
)
def test_get_exit_status(pod: Manifest, status: tuple[int, str] | None) -> None:
    assert get_exit_status(pod) == status


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {"reason": "Evicted", "message": "The node was low on resource: memory. Threshold quantity: 1Gi. More."},
            "Evicted: The node was low on resource: memory",
        ),
        ({"reason": "DeadlineExceeded", "message": "Pod was active on the node longer than"}, "DeadlineExceeded"),
        (
            {
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "m"}
                ]
            },
            "node node-1 no longer exists",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "default-scheduler: preempting to accommodate a higher priority pod",
                    }
                ]
            },
            "default-scheduler: preempting to accommodate a higher priority pod",
        ),
    ],
)
def test_exit_status_of_a_disrupted_pod(status: Manifest, reason: str) -> None:
    pod = build_finished_pod(137)
    pod["status"] |= status
    assert get_exit_status(pod) == (137, reason)


def test_container_that_will_be_restarted_has_no_exit_status() -> None:
    pod = build_finished_pod(1, phase="Running")
    pod["spec"]["restartPolicy"] = "Always"
    assert get_exit_status(pod) is None


def test_exit_code_of_a_failed_init_container() -> None:
    waiting = {"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 7, "reason": "Error"}}}
    pod = build_pod({"phase": "Failed", "containerStatuses": [waiting], "initContainerStatuses": [failed]})
    assert get_exit_status(pod) == (7, "")


def test_pod_rejected_by_its_node_never_started() -> None:
    message = "Pod was rejected: Node didn't have enough cpu."
    rejected = build_pod({"phase": "Failed", "reason": "OutOfcpu", "message": message})
    assert get_exit_status(rejected) == (128, f"OutOfcpu: {message.rstrip('.')}")


# --- Slots


@pytest.mark.parametrize(
    ("labels", "annotations", "slot"),
    [
        ({"stoker.dev/role": "ps", "stoker.dev/index": "3"}, {}, "ps/3"),
        ({"stoker.dev/role": "worker", "batch.kubernetes.io/job-completion-index": "2"}, {}, "worker/2"),
        (
            {"stoker.dev/role": "worker"},
            {"batch.kubernetes.io/job-completion-index": "0", "stoker.dev/first": "1"},
            "worker/1",
        ),
        ({"stoker.dev/role": "worker", "training.kubeflow.org/replica-index": "1"}, {}, "worker/1"),
        ({"stoker.dev/role": "launcher"}, {}, "launcher/0"),
    ],
)
def test_get_slot(labels: dict[str, str], annotations: dict[str, str], slot: str) -> None:
    assert get_slot(build_pod(metadata={"labels": labels, "annotations": annotations})) == slot


def test_find_pod_prefers_running_then_pending_then_newest() -> None:
    def build(name: str, second: int, phase: str, **metadata: Any) -> Manifest:
        labels = {"stoker.dev/role": "worker", "stoker.dev/index": "0"}
        created = f"2030-01-01T00:00:0{second}Z"
        status = {"phase": phase, "containerStatuses": RUNNING if phase == "Running" else []}
        return build_pod(status, metadata={"name": name, "creationTimestamp": created, "labels": labels, **metadata})

    old, new = build("old", 1, "Failed"), build("new", 2, "Failed")
    terminating = build("terminating", 5, "Running", deletionTimestamp="2030-01-01T00:00:06Z")
    pending, running = build("pending", 3, "Pending"), build("running", 2, "Running")
    assert find_pod([new, old], "worker/0") == new
    assert find_pod([new, terminating, old], "worker/0") == terminating
    assert find_pod([old, pending, terminating], "worker/0") == pending
    assert find_pod([pending, running, new], "worker/0") == running
    assert find_pod([running], "worker/1") is None
    assert is_running(running)
    assert not is_running(pending)

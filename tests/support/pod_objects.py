"""Pods and events as an API server returns them, for tests without a cluster."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]
IMAGE = "registry.example/train:1"
RUNNING = [{"name": "main", "state": {"running": {}}}]


def build_pod(status: Manifest | None = None, **fields: Any) -> Manifest:
    """Build a pending pod `digits-0`."""
    metadata = {"name": "digits-0", "uid": "u1", **fields.pop("metadata", {})}
    spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": IMAGE}], **fields.pop("spec", {})}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending", **(status or {})}}


def build_unscheduled_pod(message: str, **spec: Any) -> Manifest:
    """Build a pod that the scheduler could not place."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return build_pod({"conditions": [condition]}, spec=spec)


def build_scheduled_pod(**status: Any) -> Manifest:
    """Build a pod on node-0 that mounts the claim digits-ckpt."""
    return build_pod(
        {"conditions": [{"type": "PodScheduled", "status": "True"}], **status},
        spec={
            "nodeName": "node-0",
            "volumes": [{"name": "checkpoint", "persistentVolumeClaim": {"claimName": "digits-ckpt"}}],
        },
    )


def build_waiting_pod(reason: str, message: str = "", **status: Any) -> Manifest:
    """Build a scheduled pod whose main container waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return build_scheduled_pod(containerStatuses=[{"name": "main", "image": IMAGE, "state": state, **status}])


def build_finished_pod(
    code: int, reason: str = "Error", *, phase: str = "Failed", message: str = "", **status: Any
) -> Manifest:
    """Build a pod on node-1 whose main container has terminated."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    pod = build_pod({"phase": phase, "containerStatuses": [{"name": "main", "state": state}], **status})
    pod["spec"]["nodeName"] = "node-1"
    return pod


def build_event(
    reason: str, message: str = "", time: str = "2030-01-01T00:00:00Z", kind: str = "Pod", **involved: str
) -> Manifest:
    """Build an event about the pod digits-0, or about another object named digits."""
    about = {"kind": kind, "name": "digits-0" if kind == "Pod" else "digits", **involved}
    return {"reason": reason, "message": message, "lastTimestamp": time, "involvedObject": about}

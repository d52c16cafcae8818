"""Why a pod is not running, from messages of real clusters: names, numbers and the remedy are in the sentence."""

from __future__ import annotations

import pytest

from stoker.kube.pending import explain_not_running, explain_pending
from stoker.kube.pods import list_claim_names
from tests.support.pod_objects import (
    IMAGE,
    RUNNING,
    Manifest,
    build_event,
    build_finished_pod,
    build_pod,
    build_scheduled_pod,
    build_unscheduled_pod,
    build_waiting_pod,
)


def check_contains(sentence: str, *fragments: str) -> None:
    assert sentence
    missing = [fragment for fragment in fragments if fragment not in sentence]
    assert not missing, sentence


# --- No problem


@pytest.mark.parametrize(
    "pod",
    [
        build_pod(),
        build_waiting_pod("ContainerCreating"),
        build_waiting_pod("PodInitializing"),
        build_scheduled_pod(phase="Running", containerStatuses=RUNNING),
        build_finished_pod(1),
        build_finished_pod(0, "Completed", phase="Succeeded"),
    ],
)
def test_empty_if_nothing_is_wrong(pod: Manifest) -> None:
    assert explain_pending(pod, [build_event("Scheduled"), build_event("Pulling")]) == ""


# --- Scheduling

PREEMPTION = " preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod."


@pytest.mark.parametrize(
    ("message", "fragments"),
    [
        (
            f"0/2 nodes are available: 2 Insufficient nvidia.com/gpu.{PREEMPTION}",
            ["2 of 2", "insufficient nvidia.com/gpu", "(8 requested)"],
        ),
        (
            f"0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate,{PREEMPTION}",
            ["2 of 2", "insufficient nvidia.com/gpu", "(8 requested)"],
        ),
        (
            "0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match Pod's node affinity/selector.",
            ["1 of 3", "insufficient memory;", "2 of 3", "gpu_type", "node_selector"],
        ),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.",
            ["1 of 1", "untolerated taint (node-role.kubernetes.io/control-plane)"],
        ),
        ("0/1 nodes are available: 1 node(s) had untolerated taint(s).", ["1 of 1", "untolerated taint"]),
        ("0/2 nodes are available: 2 node(s) were unschedulable.", ["2 of 2", "cordoned"]),
        ("0/2 nodes are available: 2 Too many pods.", ["2 of 2", "number of pods"]),
        ("0/2 nodes are available: 2 node(s) didn't find the moon.", ["2 of 2 didn't find the moon"]),
        ("no nodes available to schedule pods", ["no nodes"]),
        ('persistentvolumeclaim "data" not found', ["claim data not found", "stoker volume create data"]),
        (f'0/2 nodes are available: persistentvolumeclaim "data" not found.{PREEMPTION}', ["claim data not found"]),
        (
            f"0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.{PREEMPTION}",
            ["claim data", "not bound", "storage class"],
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind.",
            ["no volume for claim data"],
        ),
        (
            "0/2 nodes are available: 2 node has pod using PersistentVolumeClaim with the same name and"
            " ReadWriteOncePod access mode.",
            ["claim data", "ReadWriteOncePod", "another pod"],
        ),
        ("0/2 nodes are available: 2 node(s) had volume node affinity conflict.", ["claim data", "zone"]),
    ],
)
def test_scheduling_failure(message: str, fragments: list[str]) -> None:
    pod = build_unscheduled_pod(
        message,
        containers=[{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}],
        volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "shm", "emptyDir": {}}],
    )
    sentence = explain_pending(pod)
    check_contains(sentence, *fragments)
    assert "preemption" not in sentence
    assert list_claim_names(pod) == ["data"]


def test_scheduling_failure_from_an_event_if_there_is_no_condition_yet() -> None:
    event = build_event("FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu.")
    check_contains(explain_pending(build_pod(), [event]), "1 of 1", "insufficient cpu")


def test_scheduling_gates() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
    queued = build_pod(
        {"conditions": [gated]},
        spec={"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        metadata={"labels": {"kueue.x-k8s.io/queue-name": "team"}},
    )
    check_contains(explain_pending(queued), "not yet admitted by Kueue", "(queue team)")
    other = build_pod({"conditions": [gated]}, spec={"schedulingGates": [{"name": "example.com/budget"}]})
    check_contains(explain_pending(other), "scheduling gate example.com/budget")


# --- Jobs without pods


def build_job(*, suspend: bool = False, **labels: str) -> Manifest:
    return {"kind": "Job", "metadata": {"name": "digits", "labels": labels}, "spec": {"suspend": suspend}, "status": {}}


QUOTA = (
    'Error creating: pods "digits-0-x" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8,'
    " used: requests.nvidia.com/gpu=6, limited: requests.nvidia.com/gpu=10"
)
SECURITY = (
    'Error creating: pods "digits-0-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
)


@pytest.mark.parametrize(
    ("message", "fragments"),
    [
        (
            QUOTA,
            [
                "quota team",
                "requested requests.nvidia.com/gpu=8",
                "used requests.nvidia.com/gpu=6",
                "limit requests.nvidia.com/gpu=10",
            ],
        ),
        (
            'Error creating: pods "x" is forbidden: failed quota: team: must specify limits.cpu for: main; x',
            ["quota team requires limits.cpu for: main; x", "resources"],
        ),
        (
            'Error creating: pods "x" is forbidden: no PriorityClass with name urgent was found',
            ["PriorityClass urgent not found"],
        ),
        (
            'Error creating: pods "x" is forbidden: error looking up service account team/robot: serviceaccount'
            ' "robot" not found',
            ["service account robot not found"],
        ),
        (SECURITY, ["pod security", "restricted", "runAsNonRoot != true"]),
        ('Error creating: pods "x" is forbidden: the moon', ["rejected", ": the moon"]),
    ],
)
def test_admission_error(message: str, fragments: list[str]) -> None:
    rejected = build_event("FailedCreate", message, kind="Job")
    check_contains(explain_pending(build_job(), [rejected]), *fragments)
    check_contains(explain_pending({}, [rejected]), *fragments)


def test_admission_error_is_over_once_a_pod_was_created() -> None:
    created = build_event("SuccessfulCreate", "Created pod: digits-0", time="2030-01-01T00:00:09Z", kind="Job")
    assert explain_pending(build_job(), [created, build_event("FailedCreate", QUOTA, kind="Job")]) == ""


def test_events_of_another_job_are_ignored() -> None:
    assert explain_pending(build_job(), [build_event("FailedCreate", QUOTA, kind="Job", name="other")]) == ""


def test_suspended_job() -> None:
    check_contains(explain_pending(build_job(suspend=True)), "suspended")
    queued = build_job(suspend=True, **{"kueue.x-k8s.io/queue-name": "team"})
    check_contains(explain_pending(queued), "not yet admitted by Kueue", "(queue team)")
    event = build_event("Pending", "insufficient unused quota for cpu", kind="Workload", name="job-digits-1")
    assert explain_pending(queued, [event]).endswith("(queue team): insufficient unused quota for cpu")


# --- Image pull


@pytest.mark.parametrize(
    ("reason", "message", "fragments"),
    [
        (
            "ErrImagePull",
            f'rpc error: code = NotFound desc = failed to pull and unpack image "{IMAGE}": failed to resolve reference'
            f' "{IMAGE}": {IMAGE}: not found',
            [IMAGE, "does not exist"],
        ),
        (
            "ImagePullBackOff",
            f'Back-off pulling image "{IMAGE}": ErrImagePull: failed to pull and unpack image: failed to authorize:'
            " failed to fetch anonymous token: 403 Forbidden",
            [IMAGE, "login", "kubernetes.image_pull_secrets"],
        ),
        (
            "ErrImagePull",
            'failed to resolve: failed to do request: Head "https://r": dial tcp: lookup r: no such host',
            [IMAGE, "cannot reach the registry"],
        ),
        ("ErrImagePull", "failed to pull: no match for platform in manifest: x", [IMAGE, "architecture"]),
        ("ErrImagePull", "failed to pull: odd: it rained", [IMAGE, "odd: it rained"]),
        ("ImagePullBackOff", "Back-off", [IMAGE, "ImagePullBackOff"]),
        ("InvalidImageName", "couldn't parse", [f"'{IMAGE}'", "image name"]),
        ("ErrImageNeverPull", "not present", [IMAGE, "kubernetes.image_pull_policy is Never"]),
    ],
)
def test_image_pull_error(reason: str, message: str, fragments: list[str]) -> None:
    check_contains(explain_pending(build_waiting_pod(reason, message)), *fragments)


def test_cause_of_a_back_off_comes_from_the_earlier_event() -> None:
    failed = build_event("Failed", f'Failed to pull image "{IMAGE}": failed to resolve: unauthorized')
    later = build_event("BackOff", f'Back-off pulling image "{IMAGE}"', time="2030-01-01T00:01:00Z")
    pod = build_waiting_pod("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"')
    check_contains(explain_pending(pod, [failed, later]), IMAGE, "login", "kubernetes.image_pull_secrets")


def test_words_in_the_image_name_are_no_cause() -> None:
    pod = build_waiting_pod("ErrImagePull", "failed to pull denied:1: odd")
    pod["status"]["containerStatuses"][0]["image"] = "denied:1"
    sentence = explain_pending(pod)
    check_contains(sentence, "denied:1", "odd")
    assert "login" not in sentence


# --- Containers


@pytest.mark.parametrize(
    ("reason", "message", "fragments"),
    [
        (
            "CreateContainerConfigError",
            'secret "s3" not found',
            ["cannot be created: Secret s3 not found"],
        ),
        ("CreateContainerConfigError", 'configmap "c" not found', ["ConfigMap c not found"]),
        (
            "CreateContainerConfigError",
            "couldn't find key token in Secret team/s3",
            ["key token not found", "Secret s3"],
        ),
        (
            "CreateContainerConfigError",
            "container has runAsNonRoot and image will run as root (pod: x)",
            ["image runs as root"],
        ),
        (
            "CreateContainerError",
            'failed to create containerd container: mkdir /x: read-only file system: "x" denied',
            ["cannot be started", "read-only file system"],
        ),
        (
            "RunContainerError",
            'failed to create shim task: exec: "trian": executable file not found in $PATH: unknown',
            ["cannot be started", '"trian": executable file not found in $PATH'],
        ),
    ],
)
def test_container_that_cannot_start(reason: str, message: str, fragments: list[str]) -> None:
    check_contains(explain_pending(build_waiting_pod(reason, message)), *fragments)


def test_crash_loop() -> None:
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    pod = build_waiting_pod("CrashLoopBackOff", "back-off 40s", lastState=last, restartCount=3)
    check_contains(explain_pending(pod), "the container keeps crashing", "exit code 137 (OOMKilled)", "3 restarts")


def test_init_container_that_fails() -> None:
    invalid = {"name": "fetch", "image": IMAGE, "state": {"waiting": {"reason": "InvalidImageName"}}}
    check_contains(explain_pending(build_scheduled_pod(initContainerStatuses=[invalid])), f"'{IMAGE}'", "image name")
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 7}}}
    check_contains(
        explain_pending(build_scheduled_pod(initContainerStatuses=[failed])),
        "init container fetch failed",
        "exit code 7",
    )


# --- Volume mounts


@pytest.mark.parametrize(
    ("reason", "message", "fragments"),
    [
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "secret-0" : secret "s3" not found',
            ["cannot mount volume secret-0", "Secret s3 not found"],
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "secret-0" : references non-existent secret key: token',
            ["key token not found in its Secret"],
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "checkpoint" : hostPath type check failed: /data is not a directory',
            ["cannot mount claim digits-ckpt: hostPath type check failed: /data is not a directory"],
        ),
        (
            "FailedAttachVolume",
            'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) digits-1-x',
            ["volume pvc-1 is attached to another node for digits-1-x", "one node"],
        ),
        (
            "FailedMount",
            "Unable to attach or mount volumes: unmounted volumes=[checkpoint], unattached volumes=[],"
            " failed to process volumes=[]: timed out waiting for the condition",
            ["cannot mount claim digits-ckpt: "],
        ),
        (
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox: rpc error: plugin type=bridge failed: no IP addresses available in range",
            ["sandbox", "no IP addresses available in range"],
        ),
    ],
)
def test_mount_failure(reason: str, message: str, fragments: list[str]) -> None:
    events = [build_event("Scheduled"), build_event(reason, message)]
    check_contains(explain_pending(build_waiting_pod("ContainerCreating"), events), *fragments)


def test_mount_failure_is_over_once_the_image_is_pulled() -> None:
    events = [
        build_event("Pulling", time="2030-01-01T00:00:05Z"),
        build_event("FailedMount", 'for volume "a" : x', time="2030-01-01T00:00:04Z"),
    ]
    assert explain_pending(build_waiting_pod("ContainerCreating"), events) == ""


@pytest.mark.parametrize("other", [{"uid": "u0"}, {"name": "digits-1"}, {"kind": "Node", "name": "digits-0"}])
def test_events_of_other_objects_are_ignored(other: dict[str, str]) -> None:
    event = build_event("FailedMount", 'volume "a" : x', **{"kind": "Pod", **other})
    assert explain_pending(build_waiting_pod("ContainerCreating"), [event]) == ""


# --- Nodes


@pytest.mark.parametrize(
    ("status", "events", "is_lost"),
    [
        ({"phase": "Running", "reason": "NodeLost"}, [], True),
        (
            {
                "phase": "Running",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}],
            },
            [],
            True,
        ),
        ({"phase": "Unknown"}, [], True),
        (
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]},
            [build_event("NodeNotReady", "Node is not ready")],
            True,
        ),
        (
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
            [build_event("NodeNotReady", "Node is not ready")],
            False,
        ),
    ],
)
def test_node_failure(status: Manifest, events: list[Manifest], is_lost: bool) -> None:
    pod = build_scheduled_pod(**status, containerStatuses=RUNNING)
    sentence = explain_pending(pod, events)
    assert explain_not_running(pod, events) == sentence
    assert sentence == ("node node-0 is not responding" if is_lost else "")


# --- Exec


@pytest.mark.parametrize(
    ("pod", "fragments"),
    [
        (build_finished_pod(137, "OOMKilled"), ["exited with exit code 137 (OOMKilled)"]),
        (build_finished_pod(0, phase="Succeeded"), ["exited with exit code 0"]),
        (build_waiting_pod("ContainerCreating"), ["starting"]),
        (build_pod(metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"}), ["terminating"]),
        (build_unscheduled_pod("no nodes available to schedule pods"), ["no nodes"]),
    ],
)
def test_explain_not_running(pod: Manifest, fragments: list[str]) -> None:
    check_contains(explain_not_running(pod), *fragments)


def test_explain_not_running_of_a_running_pod_is_empty() -> None:
    assert explain_not_running(build_scheduled_pod(phase="Running", containerStatuses=RUNNING)) == ""

"""Why a pod does not run, how it ended and whose it is, told from what clusters really say."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.kube.pods import (
    explain_not_running,
    explain_pending,
    find_pod,
    get_exit_status,
    get_slot,
    is_running,
    list_claim_names,
)

Manifest = dict[str, Any]
IMAGE = "registry.example/train:1"


def pod(status: Manifest | None = None, **more: Any) -> Manifest:
    metadata = {"name": "digits-0", "uid": "u1", **more.pop("metadata", {})}
    spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": IMAGE}], **more.pop("spec", {})}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending", **(status or {})}}


def unplaced(message: str, **spec: Any) -> Manifest:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod({"conditions": [condition]}, spec=spec)


def placed(**status: Any) -> Manifest:
    return pod(
        {"conditions": [{"type": "PodScheduled", "status": "True"}], **status},
        spec={
            "nodeName": "node-0",
            "volumes": [{"name": "checkpoint", "persistentVolumeClaim": {"claimName": "digits-ckpt"}}],
        },
    )


def waiting(reason: str, message: str = "", **more: Any) -> Manifest:
    state = {"waiting": {"reason": reason, "message": message}}
    return placed(containerStatuses=[{"name": "main", "image": IMAGE, "state": state, **more}])


def finished(code: int, reason: str = "Error", *, phase: str = "Failed", message: str = "", **status: Any) -> Manifest:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    one = pod({"phase": phase, "containerStatuses": [{"name": "main", "state": state}], **status})
    one["spec"]["nodeName"] = "node-1"
    return one


def event(
    reason: str, message: str = "", at: str = "2030-01-01T00:00:00Z", kind: str = "Pod", **about: str
) -> Manifest:
    involved = {"kind": kind, "name": "digits-0" if kind == "Pod" else "digits", **about}
    return {"reason": reason, "message": message, "lastTimestamp": at, "involvedObject": involved}


# --- Nothing wrong


@pytest.mark.parametrize(
    "one",
    [
        pod(),
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        placed(phase="Running", containerStatuses=[{"name": "main", "state": {"running": {}}}]),
        finished(1),
        finished(0, "Completed", phase="Succeeded"),
    ],
)
def test_says_nothing_where_nothing_is_wrong(one: Manifest) -> None:
    assert explain_pending(one, [event("Scheduled"), event("Pulling")]) == ""


# --- No node

PREEMPTION = " preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod."
TYPES = "are not of the kind asked for (gpu_type, node_selector)"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            f"0/2 nodes are available: 2 Insufficient nvidia.com/gpu.{PREEMPTION}",
            "no node can take it: 2 of 2 have too little nvidia.com/gpu free (8 asked for)",
        ),
        (
            f"0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate,{PREEMPTION}",
            "no node can take it: 2 of 2 have too little nvidia.com/gpu free (8 asked for)",
        ),
        (
            "0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match Pod's node affinity/selector.",
            f"no node can take it: 1 of 3 have too little memory free; 2 of 3 {TYPES}",
        ),
        (
            "0/1 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.",
            "no node can take it: 1 of 1 have a taint that is not tolerated (node-role.kubernetes.io/control-plane)",
        ),
        ("0/1 nodes are available: 1 node(s) had untolerated taint(s).", "that is not tolerated"),
        ("0/2 nodes are available: 2 node(s) were unschedulable.", "2 of 2 are closed for new pods"),
        ("0/2 nodes are available: 2 Too many pods.", "2 of 2 have all the pods they can"),
        (
            "0/2 nodes are available: 2 node(s) didn't find the moon.",
            "no node can take it: 2 of 2 didn't find the moon",
        ),
        ("no nodes available to schedule pods", "the cluster has no node"),
        (
            'persistentvolumeclaim "data" not found',
            "there is no claim data; make it with: stoker volume create data",
        ),
        (f'0/2 nodes are available: persistentvolumeclaim "data" not found.{PREEMPTION}', "there is no claim data"),
        (
            f"0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.{PREEMPTION}",
            "no volume was found or made yet for its claim (data): is its storage class right?",
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind.",
            "no volume fits its claim (data)",
        ),
        (
            "0/2 nodes are available: 2 node has pod using PersistentVolumeClaim with the same name and"
            " ReadWriteOncePod access mode.",
            "another pod has its claim (data), which only one pod at a time can have",
        ),
        ("0/2 nodes are available: 2 node(s) had volume node affinity conflict.", "on a node or in a zone that cannot"),
    ],
)
def test_says_what_the_scheduler_lacks(message: str, sentence: str) -> None:
    one = unplaced(
        message,
        containers=[{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}],
        volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "shm", "emptyDir": {}}],
    )
    told = explain_pending(one)
    assert sentence in told
    assert "preemption" not in told
    assert list_claim_names(one) == ["data"]


def test_takes_the_scheduler_s_words_from_an_event_when_there_is_no_condition_yet() -> None:
    told = explain_pending(pod(), [event("FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu.")])
    assert told == "no node can take it: 1 of 1 have too little cpu free"


def test_says_who_holds_a_pod_back() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
    kueue = pod(
        {"conditions": [gated]},
        spec={"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        metadata={"labels": {"kueue.x-k8s.io/queue-name": "team"}},
    )
    assert explain_pending(kueue) == "it waits to be let in by Kueue (queue team)"
    other = pod({"conditions": [gated]}, spec={"schedulingGates": [{"name": "example.com/budget"}]})
    assert explain_pending(other) == "it is held back by example.com/budget"


# --- No pod at all


def job(*, suspend: bool = False, **labels: str) -> Manifest:
    return {"kind": "Job", "metadata": {"name": "digits", "labels": labels}, "spec": {"suspend": suspend}, "status": {}}


QUOTA = (
    'Error creating: pods "digits-0-x" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8,'
    " used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8"
)
SECURITY = (
    'Error creating: pods "digits-0-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            QUOTA,
            "quota team leaves no room: requests.nvidia.com/gpu=8 asked for, requests.nvidia.com/gpu=8 used of"
            " requests.nvidia.com/gpu=8",
        ),
        (
            'Error creating: pods "x" is forbidden: failed quota: team: must specify limits.cpu for: main; x',
            "quota team wants limits.cpu for: main; x to be set",
        ),
        (
            'Error creating: pods "x" is forbidden: no PriorityClass with name urgent was found',
            "there is no PriorityClass urgent",
        ),
        (
            'Error creating: pods "x" is forbidden: error looking up service account team/robot: serviceaccount'
            ' "robot" not found',
            "there is no service account robot",
        ),
        (SECURITY, "the namespace's pod security (restricted) forbids it: runAsNonRoot != true"),
        ('Error creating: pods "x" is forbidden: the moon', "the cluster refuses its pod: the moon"),
    ],
)
def test_says_why_a_job_gets_no_pod(message: str, sentence: str) -> None:
    refused = event("FailedCreate", message, kind="Job")
    assert sentence in explain_pending(job(), [refused])
    assert sentence in explain_pending({}, [refused])


def test_a_pod_that_was_made_after_all_is_no_longer_refused() -> None:
    made = event("SuccessfulCreate", "Created pod: digits-0", at="2030-01-01T00:00:09Z", kind="Job")
    assert explain_pending(job(), [made, event("FailedCreate", QUOTA, kind="Job")]) == ""


def test_events_of_another_job_do_not_count() -> None:
    assert explain_pending(job(), [event("FailedCreate", QUOTA, kind="Job", name="other")]) == ""


def test_a_suspended_job_says_whether_kueue_holds_it() -> None:
    assert explain_pending(job(suspend=True)) == "its Job is suspended"
    queued = job(suspend=True, **{"kueue.x-k8s.io/queue-name": "team"})
    assert explain_pending(queued) == "it waits to be let in by Kueue (queue team)"
    said = event("Pending", "insufficient unused quota for cpu", kind="Workload", name="job-digits-1")
    assert explain_pending(queued, [said]).endswith("(queue team): insufficient unused quota for cpu")


# --- Images


@pytest.mark.parametrize(
    ("reason", "message", "sentence"),
    [
        (
            "ErrImagePull",
            f'rpc error: code = NotFound desc = failed to pull and unpack image "{IMAGE}": failed to resolve reference'
            f' "{IMAGE}": {IMAGE}: not found',
            f"image {IMAGE} cannot be pulled: there is no such image",
        ),
        (
            "ImagePullBackOff",
            f'Back-off pulling image "{IMAGE}": ErrImagePull: failed to pull and unpack image: failed to authorize:'
            " failed to fetch anonymous token: 403 Forbidden",
            "the registry wants a login (kubernetes.image_pull_secrets)",
        ),
        (
            "ErrImagePull",
            'failed to resolve: failed to do request: Head "https://r": dial tcp: lookup r: no such host',
            "the registry cannot be reached from the node",
        ),
        ("ErrImagePull", "failed to pull: no match for platform in manifest: x", "the nodes' kind of processor"),
        ("ErrImagePull", "failed to pull: odd: it rained", "cannot be pulled: odd: it rained"),
        ("ImagePullBackOff", "Back-off", "cannot be pulled: ImagePullBackOff"),
        ("InvalidImageName", "couldn't parse", f"'{IMAGE}' is no name of an image"),
        ("ErrImageNeverPull", "not present", "is not on the node, and kubernetes.image_pull_policy is Never"),
    ],
)
def test_says_why_an_image_is_not_there(reason: str, message: str, sentence: str) -> None:
    assert sentence in explain_pending(waiting(reason, message))


def test_takes_the_cause_of_a_back_off_from_the_event_before_it() -> None:
    failed = event("Failed", f'Failed to pull image "{IMAGE}": failed to resolve: unauthorized')
    later = event("BackOff", f'Back-off pulling image "{IMAGE}"', at="2030-01-01T00:01:00Z")
    told = explain_pending(waiting("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"'), [failed, later])
    assert "wants a login" in told


def test_words_in_an_image_s_own_name_are_no_cause() -> None:
    one = waiting("ErrImagePull", "failed to pull denied:1: odd")
    one["status"]["containerStatuses"][0]["image"] = "denied:1"
    assert "login" not in explain_pending(one)


# --- Containers


@pytest.mark.parametrize(
    ("reason", "message", "sentence"),
    [
        ("CreateContainerConfigError", 'secret "s3" not found', "the container cannot be made: there is no Secret s3"),
        ("CreateContainerConfigError", 'configmap "c" not found', "there is no ConfigMap c"),
        (
            "CreateContainerConfigError",
            "couldn't find key token in Secret team/s3",
            "there is no key token in Secret s3",
        ),
        (
            "CreateContainerConfigError",
            "container has runAsNonRoot and image will run as root (pod: x)",
            "its image runs as root",
        ),
        (
            "CreateContainerError",
            'failed to create containerd container: mkdir /x: read-only file system: "x" denied',
            "the container cannot be started",
        ),
        (
            "RunContainerError",
            'failed to create shim task: exec: "trian": executable file not found in $PATH: unknown',
            'the container cannot be started: "trian": executable file not found in $PATH',
        ),
    ],
)
def test_says_why_a_container_cannot_be_made(reason: str, message: str, sentence: str) -> None:
    assert sentence in explain_pending(waiting(reason, message))


def test_says_how_a_container_ends_again_and_again() -> None:
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    told = explain_pending(waiting("CrashLoopBackOff", "back-off 40s", lastState=last, restartCount=3))
    assert told == "the container ends again and again: exit code 137 (OOMKilled), 3 times so far"


def test_says_which_init_container_stands_in_the_way() -> None:
    broken = {"name": "fetch", "image": IMAGE, "state": {"waiting": {"reason": "InvalidImageName"}}}
    assert explain_pending(placed(initContainerStatuses=[broken])) == f"'{IMAGE}' is no name of an image"
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 7}}}
    assert explain_pending(placed(initContainerStatuses=[failed])) == "the init container fetch failed with exit code 7"


# --- Volumes


@pytest.mark.parametrize(
    ("reason", "message", "sentence"),
    [
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "secret-0" : secret "s3" not found',
            "volume secret-0 cannot be mounted: there is no Secret s3",
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "secret-0" : references non-existent secret key: token',
            "there is no key token in its Secret",
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "checkpoint" : hostPath type check failed: /data is not a directory',
            "claim digits-ckpt cannot be mounted: hostPath type check failed: /data is not a directory",
        ),
        (
            "FailedAttachVolume",
            'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) digits-1-x',
            "volume pvc-1 is attached to another node for digits-1-x: it can be on one only",
        ),
        (
            "FailedMount",
            "Unable to attach or mount volumes: unmounted volumes=[checkpoint], unattached volumes=[],"
            " failed to process volumes=[]: timed out waiting for the condition",
            "claim digits-ckpt cannot be mounted: ",
        ),
        (
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox: rpc error: plugin type=bridge failed: no IP addresses available in range",
            "its node cannot set it up",
        ),
    ],
)
def test_says_why_a_volume_is_not_there(reason: str, message: str, sentence: str) -> None:
    assert sentence in explain_pending(waiting("ContainerCreating"), [event("Scheduled"), event(reason, message)])


def test_a_mount_that_went_well_at_last_is_no_fault() -> None:
    told = [
        event("Pulling", at="2030-01-01T00:00:05Z"),
        event("FailedMount", 'for volume "a" : x', at="2030-01-01T00:00:04Z"),
    ]
    assert explain_pending(waiting("ContainerCreating"), told) == ""


@pytest.mark.parametrize("other", [{"uid": "u0"}, {"name": "digits-1"}, {"kind": "Node", "name": "digits-0"}])
def test_events_of_others_do_not_count(other: dict[str, str]) -> None:
    about = {"kind": "Pod", **other}
    assert explain_pending(waiting("ContainerCreating"), [event("FailedMount", 'volume "a" : x', **about)]) == ""


# --- Nodes


@pytest.mark.parametrize(
    ("status", "events", "sentence"),
    [
        ({"phase": "Running", "reason": "NodeLost"}, [], "its node node-0 no longer answers"),
        (
            {
                "phase": "Running",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}],
            },
            [],
            "its node node-0 no longer answers",
        ),
        ({"phase": "Unknown"}, [], "its node node-0 no longer answers"),
        (
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]},
            [event("NodeNotReady", "Node is not ready")],
            "its node node-0 no longer answers",
        ),
        (
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
            [event("NodeNotReady", "Node is not ready")],
            "",
        ),
    ],
)
def test_says_that_a_node_is_lost(status: Manifest, events: list[Manifest], sentence: str) -> None:
    running = [{"name": "main", "state": {"running": {}}}]
    one = placed(**status, containerStatuses=running)
    assert explain_pending(one, events) == sentence
    assert explain_not_running(one, events) == sentence


# --- How it ended


@pytest.mark.parametrize(
    ("one", "end"),
    [
        (pod(), None),
        (waiting("ContainerCreating"), None),
        (finished(0, "Completed", phase="Succeeded"), (0, "")),
        (finished(3), (3, "")),
        (finished(137, "OOMKilled"), (137, "OOMKilled")),
        (finished(143, phase="Running"), (143, "")),
        (finished(0, "Completed", phase="Running"), (0, "")),
        (pod({"phase": "Failed", "reason": "DeadlineExceeded"}), (128, "DeadlineExceeded")),
        (
            finished(128, "StartError", message='failed to start: exec: "trian": not found in $PATH'),
            (128, 'StartError: "trian": not found in $PATH'),
        ),
        (finished(137, "ContainerStatusUnknown"), (137, "its node node-1 lost it")),
    ],
)
def test_tells_how_a_pod_ended(one: Manifest, end: tuple[int, str] | None) -> None:
    assert get_exit_status(one) == end


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
            "its node node-1 is gone",
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
def test_tells_what_ended_a_pod_from_outside(status: Manifest, reason: str) -> None:
    one = finished(137)
    one["status"] |= status
    assert get_exit_status(one) == (137, reason)


def test_a_container_that_will_be_started_again_has_not_ended() -> None:
    one = finished(1, phase="Running")
    one["spec"]["restartPolicy"] = "Always"
    assert get_exit_status(one) is None


def test_a_failed_init_container_s_code_is_the_pod_s() -> None:
    waits = {"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}
    broken = {"name": "fetch", "state": {"terminated": {"exitCode": 7, "reason": "Error"}}}
    assert get_exit_status(
        pod({"phase": "Failed", "containerStatuses": [waits], "initContainerStatuses": [broken]})
    ) == (7, "")


def test_a_pod_that_its_node_refused_never_started() -> None:
    refused = pod(
        {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough cpu."}
    )
    assert get_exit_status(refused) == (128, "OutOfcpu: Pod was rejected: Node didn't have enough cpu")


# --- Whose it is


@pytest.mark.parametrize(
    ("labels", "notes", "slot"),
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
def test_knows_which_slot_a_pod_is(labels: dict[str, str], notes: dict[str, str], slot: str) -> None:
    assert get_slot(pod(metadata={"labels": labels, "annotations": notes})) == slot


def test_chooses_the_pod_that_lives() -> None:
    running = [{"name": "main", "state": {"running": {}}}]

    def one(name: str, at: int, phase: str, **more: Any) -> Manifest:
        metadata = {"name": name, "creationTimestamp": f"2030-01-01T00:00:0{at}Z", **more}
        status = {"phase": phase, "containerStatuses": running if phase == "Running" else []}
        return pod(status, metadata={**metadata, "labels": {"stoker.dev/role": "worker", "stoker.dev/index": "0"}})

    old, new = one("old", 1, "Failed"), one("new", 2, "Failed")
    ending = one("ending", 5, "Running", deletionTimestamp="2030-01-01T00:00:06Z")
    waits, runs = one("waits", 3, "Pending"), one("runs", 2, "Running")
    assert find_pod([new, old], "worker/0") == new
    assert find_pod([new, ending, old], "worker/0") == ending
    assert find_pod([old, waits, ending], "worker/0") == waits
    assert find_pod([waits, runs, new], "worker/0") == runs
    assert find_pod([runs], "worker/1") is None
    assert is_running(runs)
    assert not is_running(waits)


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (placed(phase="Running", containerStatuses=[{"name": "main", "state": {"running": {}}}]), ""),
        (finished(137, "OOMKilled"), "it has ended with exit code 137 (OOMKilled)"),
        (finished(0, phase="Succeeded"), "it has ended with exit code 0"),
        (waiting("ContainerCreating"), "it is only being started"),
        (pod(metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"}), "it is being ended"),
        (unplaced("no nodes available to schedule pods"), "the cluster has no node"),
    ],
)
def test_says_why_nothing_can_be_run_in_it(one: Manifest, sentence: str) -> None:
    assert explain_not_running(one) == sentence

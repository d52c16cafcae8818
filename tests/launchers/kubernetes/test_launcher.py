"""What is decided about jobs in a cluster without asking one: how they are doing, what travels, whose lines are new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import ConflictError, InputError, MissingError, NotFoundError, SpecError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.config import parse_handle
from stoker.kube.objects import INDEX_LABEL, JOB_LABEL, ROLE_LABEL, RUN_LABEL
from stoker.launchers.kubernetes.follower import LogPosition, LogStream
from stoker.launchers.kubernetes.launcher import create_objects
from stoker.launchers.kubernetes.manifests import (
    FAILED,
    MOVED,
    PREVIOUS_ATTEMPTS_ANNOTATION,
    find_lead,
    get_pod_templates,
    label_run,
)
from stoker.launchers.kubernetes.plan import resolve_code_files
from stoker.launchers.kubernetes.status import derive_slot_statuses, derive_status, to_slot_pods
from tests.launchers.contract import job_of
from tests.support.waiting import eventually


def pod(role: str = "worker", index: int = 0, phase: str = "Running", code: int | None = None, **notes: int) -> Any:
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    names = {"failed": FAILED, "moved": MOVED, "before": PREVIOUS_ATTEMPTS_ANNOTATION}
    return {
        "metadata": {
            "name": f"{role}-{index}-{sum(notes.values())}",
            "uid": f"{role}-{index}-{sum(notes.values())}",
            "creationTimestamp": f"2026-11-16T10:00:0{sum(notes.values())}Z",
            "labels": {ROLE_LABEL: role, INDEX_LABEL: str(index)},
            "annotations": {names[name]: str(count) for name, count in notes.items()},
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "main", "state": state}] if phase != "Pending" else [],
        },
    }


def lead(*conditions: str, role: str = "worker", index: int | None = None, **spec: Any) -> Any:
    labels = {JOB_LABEL: "small", ROLE_LABEL: role} | ({} if index is None else {INDEX_LABEL: str(index)})
    told = [{"type": kind, "status": "True", "reason": ""} for kind in conditions]
    return {"metadata": {"name": "small", "uid": "j", "labels": labels}, "spec": spec, "status": {"conditions": told}}


def torchrun(**more: Any) -> Any:
    return job_of(topology="torchrun", workers=2, program={"module": "a"}, **more)


# --- How it is doing


def test_states() -> None:
    job = torchrun()
    assert derive_status(job, [lead()], to_slot_pods([pod(phase="Pending")])).state is JobState.PENDING
    assert derive_status(job, [lead()], to_slot_pods([pod(), pod(index=1, phase="Pending")])).state is JobState.RUNNING
    assert (
        derive_status(job, [lead("Complete")], to_slot_pods([pod(phase="Succeeded", code=0)])).state
        is JobState.SUCCEEDED
    )
    assert derive_status(job, [lead("Failed")], to_slot_pods([pod(phase="Failed", code=7)])).state is JobState.FAILED
    assert derive_status(job, [], []).state is JobState.STOPPED


def test_success_is_told_only_when_all_pods_have_ended() -> None:
    assert derive_status(torchrun(), [lead("SuccessCriteriaMet")], to_slot_pods([pod()])).state is JobState.RUNNING


def test_servers_do_not_hold_a_job_open() -> None:
    job = job_of(topology="tf-ps", workers=1, program={"module": "a"})
    jobs = [lead("Complete", role="chief", index=0), lead(index=0), lead(role="ps", index=0)]
    assert derive_status(job, jobs, to_slot_pods([pod("ps"), pod()])).state is JobState.SUCCEEDED


def test_every_worker_of_a_mirrored_job_leads() -> None:
    job = job_of(topology="tf-mirrored", workers=2, program={"module": "a"})
    assert (
        derive_status(job, [lead("Complete", index=0), lead(index=1)], to_slot_pods([pod(index=1)])).state
        is JobState.RUNNING
    )
    done = [lead("Complete", index=0), lead("Complete", index=1)]
    assert derive_status(job, done, to_slot_pods([pod()])).state is JobState.SUCCEEDED


def test_who_only_looks_on_may_fail() -> None:
    job = job_of(topology="tf-mirrored", program={"module": "a"}, roles={"evaluator": {"count": 1}})
    jobs = [lead(index=0), lead("Failed", role="evaluator", index=0)]
    assert derive_status(job, jobs, to_slot_pods([pod()])).state is JobState.RUNNING


def test_a_queue_that_has_not_let_it_in() -> None:
    held = lead(suspend=True)
    held["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    assert derive_status(torchrun(), [held], []) == (JobState.PENDING, "it waits to be let in by Kueue (queue gpus)")


def test_attempts_are_those_that_pods_know_themselves() -> None:
    found = to_slot_pods([pod(phase="Failed", code=137), pod(phase="Failed", code=1, failed=1), pod(failed=1, moved=1)])
    assert [(one.attempt, one.exit_code) for one in found] == [(0, -9), (1, 1), (2, None)]
    assert [one.attempt for one in to_slot_pods([pod(before=3), pod(before=3, failed=1)])] == [3, 4]


def test_attempts_stay_as_they_were_known() -> None:
    known = {"gone": (Slot("worker", 0), 0), "worker-0-0": (Slot("worker", 0), 1)}
    new = pod()
    new["metadata"] |= {"uid": "new", "name": "zz"}
    assert [one.attempt for one in to_slot_pods([pod(), new], known)] == [1, 2]


def test_a_lead_among_several_does_not_expire_before_them() -> None:
    def ttl(**keys: Any) -> list[bool]:
        objects = LAUNCHERS.get("k8s")().render(job_of(program={"module": "a"}, image="x", **keys)).objects
        return ["ttlSecondsAfterFinished" in one["spec"] for one in objects if one["kind"] == "Job"]

    assert ttl(topology="tf-mirrored", workers=3) == [False, True, True]
    assert ttl(topology="tf-ps", workers=1) == [True, True, True]
    assert ttl(topology="torchrun", workers=3) == [True]


def test_pods_that_do_not_count_follow_each_other() -> None:
    first, second = pod(), pod()
    second["metadata"] |= {"uid": "b", "name": "zz"}
    assert [one.attempt for one in to_slot_pods([second, first])] == [0, 1]


def test_who_was_ended_because_the_lead_was_done_has_not_failed() -> None:
    found = to_slot_pods([pod(phase="Succeeded", code=0), pod(index=1, phase="Failed", code=143)])
    states = [one.state for one in derive_slot_statuses(torchrun(), found, JobState.SUCCEEDED)]
    assert states == [JobState.SUCCEEDED, JobState.STOPPED]


# --- What is started


def test_a_run_is_a_label_of_everything_but_what_outlives_it() -> None:
    job = torchrun(image="x", checkpoint={"dir": "/c", "claim": "c", "create": True, "size": "1Gi"})
    objects = label_run(LAUNCHERS.get("k8s")().render(job).objects, "small-1", before=2)
    marked = {one["kind"]: RUN_LABEL in one["metadata"]["labels"] for one in objects}
    assert marked == {"PersistentVolumeClaim": False, "ConfigMap": True, "Service": True, "Job": True}
    pods = [template["metadata"] for one in objects for template in get_pod_templates(one)]
    assert [(one["labels"][RUN_LABEL], one["annotations"][PREVIOUS_ATTEMPTS_ANNOTATION]) for one in pods] == [
        ("small-1", "2")
    ] * 2
    assert find_lead(objects)["metadata"]["name"] == "small-chief"


def test_the_plan_is_what_kubectl_takes() -> None:
    plan = LAUNCHERS.get("k8s")().render(torchrun(image="x"))
    assert list(yaml.safe_load_all(plan.to_text())) == plan.objects


def test_every_fault_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of(program={"script": "no.py"}, data={"train": "shards/train"}, kubernetes={"copy": ["nothing"]})
    with pytest.raises(SpecError) as caught:
        LAUNCHERS.get("k8s")().render(job)
    assert [fault.path for fault in caught.value.faults] == [
        "image",
        "data.train",
        "kubernetes.copy[0]",
        "program.script",
    ]


def test_what_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "lib/a.py", "lib/deep/b.py", "lib/__pycache__/c.py", "lib/d.pyc", "other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    job = job_of(image="x", program={"script": "./train.py"}, kubernetes={"copy": ["lib"]})
    plan = LAUNCHERS.get("k8s")().render(job)
    spec = find_lead(plan.objects)["spec"]["template"]["spec"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "code"]
    assert [item["path"] for item in volume["configMap"]["items"]] == ["lib/a.py", "lib/deep/b.py", "train.py"]
    (config,) = [one for one in plan.objects if one["kind"] == "ConfigMap"]
    assert "python3 /stoker-code/train.py" in config["data"]["worker.sh"]


def test_folders_from_elsewhere_keep_their_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("lib/a/__init__.py", "lib/b/__init__.py", "other/lib/a/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    job = job_of(image="x", program={"module": "a"}, kubernetes={"copy": ["../lib"]})
    assert sorted(resolve_code_files(job)[1]) == ["lib/a/__init__.py", "lib/b/__init__.py"]
    twice = job_of(image="x", program={"module": "a"}, kubernetes={"copy": ["../lib", "../other/lib"]})
    assert "would both be lib/a/__init__.py there" in str(resolve_code_files(twice)[2][0])


def test_a_patch_that_fits_nothing_is_refused() -> None:
    patch = {"kind": "Job", "metadata": {"name": "nope"}, "spec": {}}
    with pytest.raises(SpecError, match=r"kubernetes.patch\[0\]: fits no object, .* \(there are: ConfigMap small, "):
        LAUNCHERS.get("k8s")().render(torchrun(image="x", kubernetes={"patch": [patch]}))


def test_what_is_too_large_to_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_bytes(b"#" * (1 << 20))
    job = job_of(image="x", program={"script": "train.py"})
    with pytest.raises(
        InputError, match=r"as a ConfigMap has it, and it holds 1 MiB \(most is train.py\); leave files out, or put"
    ):
        LAUNCHERS.get("k8s")().render(job)


def test_a_handle_is_taken_apart_from_its_end() -> None:
    assert parse_handle("k8s://arn:aws:eks:eu:1:cluster/prod/ml/small-1") == (
        ("arn:aws:eks:eu:1:cluster/prod", "ml"),
        "small-1",
    )


class Counting:
    """A cluster that has nothing yet, takes everything, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def get(self, kind: str, name: str) -> None:
        self.asked.append(("get", kind))

    def create(self, one: Any) -> Any:
        if ("create", "Job") in self.asked:
            assert one["metadata"]["ownerReferences"][0]["uid"] == "u"
        self.asked.append(("create", one["kind"]))
        return {**one, "metadata": {**one["metadata"], "uid": "u"}}

    def apply(self, one: Any) -> Any:
        raise AssertionError("what has the name already would be taken over")

    def patch(self, kind: str, name: str, patch: Any) -> None:
        self.asked.append(("patch", kind))

    def served(self, group: str) -> dict[str, frozenset[str]]:
        return {} if self.lacks == group else {"v1beta2": frozenset()}

    lacks = ""


def asked(**keys: Any) -> list[tuple[str, str]]:
    cluster = Counting()
    plan = LAUNCHERS.get("k8s")().render(job_of(program={"module": "a"}, image="x", topology="torchrun", **keys))
    create_objects(cluster, plan.objects)  # type: ignore[arg-type]
    return cluster.asked


def test_a_thousand_workers_take_no_more_calls_than_two() -> None:
    claim = {"dir": "/c", "claim": "c", "create": True, "size": "1Gi"}
    assert asked(workers=2) == asked(workers=1000)
    assert len(asked(workers=2)) == 5
    assert len(asked(workers=2, checkpoint=claim)) == len(asked(workers=1000, checkpoint=claim)) == 8


def test_nothing_runs_before_all_is_there() -> None:
    calls = asked(workers=2)
    assert calls[0] == ("get", "Job")  # is one of the name there?
    assert calls[1] == ("create", "Job")  # suspended
    assert calls[-1] == ("patch", "Job")  # and let go


def test_what_has_the_name_already_is_not_taken_over() -> None:
    class Taken(Counting):
        def create(self, one: Any) -> Any:
            if one["kind"] == "ConfigMap":
                raise ConflictError("exists")
            return super().create(one)

        def delete(self, kind: str, name: str) -> None:
            self.asked.append(("delete", kind))

    cluster = Taken()
    plan = LAUNCHERS.get("k8s")().render(torchrun(image="x"))
    with pytest.raises(ConflictError, match="there is a ConfigMap small already, which is not of this run"):
        create_objects(cluster, plan.objects)  # type: ignore[arg-type]
    assert cluster.asked[-1] == ("delete", "Job")


def test_a_queue_where_there_is_no_kueue() -> None:
    cluster = Counting()
    cluster.lacks = "kueue.x-k8s.io"
    plan = LAUNCHERS.get("k8s")().render(torchrun(image="x", kubernetes={"queue": "gpus"}))
    with pytest.raises(MissingError, match="queue gpus would never admit it: there is no Kueue in the cluster"):
        create_objects(cluster, plan.objects)  # type: ignore[arg-type]
    assert cluster.asked == [("get", "Job")]


def test_a_queue_lets_it_go_itself() -> None:
    assert ("patch", "Job") not in asked(workers=2, kubernetes={"queue": "gpus"})


def test_a_context_with_a_slash_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "arn:aws:eks:eu-west-1:1:cluster/prod"
    config = {"contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}}], "clusters": [], "users": []}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    render = {place: LAUNCHERS.get("k8s")(place).render(torchrun(image="x")) for place in (name, f"{name}/ml")}
    assert [(plan.context, plan.namespace) for plan in render.values()] == [(name, None), (name, "ml")]


# --- Logs


class Cut:
    """A cluster whose log streams break: each call gives what a server would, from the second asked for on."""

    def __init__(self, lines: list[tuple[str, str]], breaks: list[int]) -> None:
        self.lines, self.breaks = lines, breaks

    def log(self, pod: str, container: str, *, follow: bool, since: str) -> Iterator[bytes]:
        found = [line for line in self.lines if f"2026-11-16T10:00:{line[0]}" >= since[:-5]]
        limit = self.breaks.pop(0) if self.breaks else len(found)
        for moment, text in found[:limit]:
            yield f"2026-11-16T10:00:{moment}Z {text}\n".encode()
        yield b"unable to retrieve container logs for containerd://0123"
        if limit < len(found):
            moment, text = found[limit]
            yield f"2026-11-16T10:00:{moment}Z {text[:3]}".encode()  # cut in the middle, and ended as if all were well
            if limit % 2:
                raise UnavailableError("cut")


def test_each_line_comes_once_however_often_the_stream_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.launchers.kubernetes.follower.RETRY_S", (0.0,))
    moments = ["01.000", "01.001", "01.001", "01.001", "01.002", "02.000", "02.000", "03.000"]
    lines = [(moment, f"line {number}") for number, moment in enumerate(moments)]
    path = tmp_path / "worker-0.0.log"
    cut = Cut(lines, [0, 2, 3, 3, 1, 5])
    stream = LogStream(cut, "pod", path, LogPosition(slot="worker/0", attempt=0))  # type: ignore[arg-type]
    stream.start()
    assert eventually(lambda: not cut.breaks, 10)
    stream.is_over = True
    stream.join(10)
    assert path.read_text().splitlines() == [text for _, text in lines]
    assert stream.mark.size == path.stat().st_size


def test_a_pod_that_is_gone_has_said_all(tmp_path: Path) -> None:
    class Gone:
        def log(self, *args: Any, **options: Any) -> Iterator[bytes]:
            raise NotFoundError("gone")

    stream = LogStream(Gone(), "pod", tmp_path / "a.log", LogPosition(slot="worker/0", attempt=0))  # type: ignore[arg-type]
    stream.run()
    assert stream.mark.done

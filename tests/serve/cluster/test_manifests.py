"""The cache of a namespace, and what fills it, as objects: without a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from stoker.errors import FullError, InputError, JobFailedError, NotFoundError, SpecError, StokerError
from stoker.kube.objects import CACHE, CACHE_PORT, MANAGED_BY, PART, Manifest, via_url
from stoker.serve.cluster import deployment
from stoker.serve.cluster.manifests import (
    CONFIG,
    FILLER,
    MOST_LANES,
    OURS,
    RUN,
    SERVER,
    ClusterCache,
    Filling,
    cache_objects,
    check_claim,
    filling_objects,
)
from tests.serve.contract import has_nginx
from tests.support.servers import free_port
from tests.support.trees import stoker

ONE = ClusterCache(origins=(("", "http://origin:8000"),), size=1 << 30)
MANY = ClusterCache(
    origins=(("a", "http://origin.far.svc/x"), ("b", "https://data.example.com/y"), ("c", "http://[fd00::1]:8080")),
    size=200 << 30,
    replicas=3,
    namespace="team",
)
CACHES = [ONE, MANY, replace(MANY, claim="shared"), replace(MANY, storage_class="fast"), replace(ONE, claim="one")]
FILLING = Filling(paths=("/train/a.tar", "/train/b.tar"), caches=(via_url("team"),))


def of_kind(objects: list[Manifest], kind: str) -> Manifest:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def pod_of(objects: list[Manifest]) -> Manifest:
    (found,) = [one for one in objects if "template" in one.get("spec", {})]
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


# --- Objects


@pytest.mark.parametrize("objects", [*map(cache_objects, CACHES), filling_objects(FILLING)])
def test_kubernetes_knows_every_field(objects: list[Manifest]) -> None:
    for one in objects:
        kubernetes_validate.validate(one, "1.37", strict=True)
        assert one["metadata"]["labels"].items() >= {**OURS, **MANAGED_BY}.items()
        for template in one.get("spec", {}).get("volumeClaimTemplates") or ():
            assert template["metadata"]["labels"][PART] == "cache"  # else its claims would outlive --stop


@pytest.mark.parametrize("objects", [*map(cache_objects, CACHES), filling_objects(FILLING)])
def test_pods_may_do_little(objects: list[Manifest]) -> None:
    pod = pod_of(objects)
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    inside = container["securityContext"]
    assert inside["readOnlyRootFilesystem"] is True
    assert inside["allowPrivilegeEscalation"] is False
    assert inside["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_the_store_is_a_folder_of_the_node_a_claim_or_a_claim_for_each_pod() -> None:
    here, shared, own = cache_objects(ONE), cache_objects(replace(MANY, claim="shared")), cache_objects(CACHES[3])
    (store,) = [one for one in pod_of(here)["volumes"] if one["name"] == "cache"]
    limit = int(store["emptyDir"]["sizeLimit"])
    assert limit > ONE.size  # nginx evicts late, and a pod that passes the limit is ended
    assert pod_of(here)["containers"][0]["resources"]["requests"]["ephemeral-storage"] == str(limit)
    (store,) = [one for one in pod_of(shared)["volumes"] if one["name"] == "cache"]
    assert store["persistentVolumeClaim"] == {"claimName": "shared"}
    assert [one for one in pod_of(own)["volumes"] if one["name"] == "cache"] == []
    (asked,) = of_kind(own, "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert asked["spec"]["storageClassName"] == "fast"
    assert asked["spec"]["resources"]["requests"]["storage"] == str(200 << 30)


def test_the_service_finds_the_cache_and_not_what_fills_it() -> None:
    service = of_kind(cache_objects(ONE), "Service")
    assert service["metadata"]["name"] == CACHE
    assert service["spec"]["selector"] == SERVER
    assert not SERVER.items() <= FILLER.items()
    assert via_url("team") == f"http://{CACHE}.team:{CACHE_PORT}"


def test_only_another_configuration_makes_other_pods() -> None:
    def template(cache: ClusterCache) -> Any:
        return of_kind(cache_objects(cache), "Deployment")["spec"]["template"]

    assert template(ONE) == template(replace(ONE, replicas=1))
    assert template(ONE)["metadata"] != template(replace(ONE, fresh_s=1))["metadata"]
    assert template(ONE)["metadata"] != template(replace(ONE, origins=(("", "http://another"),)))["metadata"]
    assert template(ONE)["metadata"] != template(replace(ONE, image="another"))["metadata"]
    more = cache_objects(ONE, [{"kind": "ConfigMap", "data": {"more": "text"}}])
    assert template(ONE)["metadata"] != of_kind(more, "Deployment")["spec"]["template"]["metadata"]


def test_says_all_that_is_wrong_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        cache_objects(
            replace(ONE, size=5, replicas=0, claim="a", storage_class="b", image="no image", origins=(("", "s3://b"),))
        )
    for word in ("--size", "--replicas", "--claim", "--image", "--origin", "https://BUCKET.s3.amazonaws.com"):
        assert word in str(caught.value)


def claim(*modes: str) -> Manifest:
    return {"metadata": {"name": "kept"}, "spec": {"accessModes": list(modes)}}


def test_several_pods_need_a_claim_that_all_can_write_to() -> None:
    check_claim(claim("ReadWriteOnce"), 1)
    check_claim(claim("ReadWriteOnce", "ReadWriteMany"), 3)
    with pytest.raises(InputError, match="claim kept allows ReadWriteOnce, and cannot be written by 2 pods"):
        check_claim(claim("ReadWriteOnce"), 2)
    with pytest.raises(InputError, match="cannot be written to"):
        check_claim(claim("ReadOnlyMany"), 1)


@pytest.mark.parametrize(("storage", "each"), [("3Gi", 1 << 30), ("3e9", 10**9), ("3000000000000m", 10**9)])
def test_a_claims_size_is_read_as_kubernetes_writes_it(storage: str, each: int) -> None:
    one = {**claim("ReadWriteMany"), "kind": "PersistentVolumeClaim"}
    one |= {"status": {"capacity": {"storage": storage}}}
    one["spec"]["resources"] = {"requests": {"storage": "1Gi"}}
    assert deployment.claimed_size(cluster_of([one]), one["metadata"]["name"], 3) == each


def test_patches_reach_the_objects_they_name() -> None:
    change = {"kind": "Deployment", "spec": {"template": {"spec": {"nodeSelector": {"disk": "fast"}}}}}
    found = cache_objects(ONE, [change, {"kind": "Service", "spec": {"type": "NodePort"}}])
    assert pod_of(found)["nodeSelector"] == {"disk": "fast"}
    assert of_kind(found, "Service")["spec"]["selector"] == SERVER
    with pytest.raises(InputError, match=r"there is no StatefulSet; there are ConfigMap stoker-cache"):
        cache_objects(ONE, [{"kind": "StatefulSet"}])


# --- What the pods run


class Pod:
    """A pod's files in a folder, and its paths in its scripts made to lead there."""

    def __init__(self, folder: Path, data: dict[str, str], resolv: str = "") -> None:
        self.folder = folder
        paths = {CONFIG: folder / "etc", RUN: folder / "run", '"/cache': f'"{folder}/store'}
        (folder / "etc").mkdir(parents=True)
        (folder / "run").mkdir()
        (folder / "resolv.conf").write_text(resolv)
        for name, text in data.items():
            for there, here in {**paths, "/etc/resolv.conf": folder / "resolv.conf"}.items():
                text = text.replace(there, str(here))
            (folder / "etc" / name).write_text(text)

    def run(self, script: str, *words: str, shell: str = "sh") -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "POD_NAME": "stoker-cache-0"}
        command = [*shell.split(), str(self.folder / "etc" / script), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


RESOLV = "search team.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5"
SHELLS = ["sh", *(["busybox sh"] if shutil.which("busybox") else [])]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.skipif(not has_nginx, reason="nginx is not installed")
@pytest.mark.parametrize("cache", CACHES[:2], ids=["one", "many"])
def test_the_real_nginx_takes_what_a_pod_makes_of_it(tmp_path: Path, cache: ClusterCache, shell: str) -> None:
    data = dict(of_kind(cache_objects(cache), "ConfigMap")["data"])
    data["start.sh"] = data["start.sh"].replace("exec nginx", "exec nginx -t")
    pod = Pod(tmp_path, data, RESOLV)
    (tmp_path / "store" / "stoker-cache-0").mkdir(parents=True)
    left, kept = (tmp_path / "store" / "stoker-cache-0" / name for name in ("a.0000000012", "abcdef"))
    left.touch()
    kept.touch()
    done = pod.run("start.sh", shell=shell)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "run" / "resolver.conf").read_text()
    assert "resolver 10.96.0.10 ipv6=off;" in found
    assert 'stoker_near { default "team.svc.cluster.local"; }' in found
    assert 'stoker_domain { default "cluster.local"; }' in found
    assert kept.exists()
    assert not left.exists()  # what a killed nginx was just writing


@pytest.mark.parametrize(
    ("resolv", "expected"),
    [
        ("nameserver fd00::a\nsearch x.svc.c", "resolver [fd00::a];"),
        ("nameserver fe80::1%eth0\nnameserver 10.0.0.1", "resolver 10.0.0.1 ipv6=off;"),
        ("nameserver 10.0.0.1\nnameserver fd00::a\n", "resolver 10.0.0.1 [fd00::a] ipv6=off;"),
    ],
)
def test_finds_the_dns_server(tmp_path: Path, resolv: str, expected: str) -> None:
    data = dict(of_kind(cache_objects(ONE), "ConfigMap")["data"])
    data["start.sh"] = data["start.sh"].replace("exec nginx", "exec true")
    pod = Pod(tmp_path, data, resolv)
    pod.run("start.sh")
    assert (tmp_path / "run" / "resolver.conf").read_text().splitlines()[0] == expected


def test_says_that_there_is_no_dns_server(tmp_path: Path) -> None:
    pod = Pod(tmp_path, of_kind(cache_objects(ONE), "ConfigMap")["data"], "search x\n")
    done = pod.run("start.sh")
    assert done.returncode == 1
    assert done.stderr == "stoker: no nameserver in /etc/resolv.conf\n".replace(
        "/etc/resolv.conf", str(tmp_path / "resolv.conf")
    )


def test_names_of_services_are_completed_and_others_are_not() -> None:
    text = of_kind(cache_objects(MANY), "ConfigMap")["data"]["nginx.conf"]
    assert '"origin.far.svc.$stoker_domain:80"' in text
    assert '"data.example.com:443"' in text
    assert '"[fd00::1]:8080"' in text
    assert '"origin.$stoker_near:8000"' in of_kind(cache_objects(ONE), "ConfigMap")["data"]["nginx.conf"]


# --- What fills it


class Asked(BaseHTTPRequestHandler):
    """Remembers what was asked for; fails the first time for some, and always for others."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        is_bad = "missing" in self.path or ("weak" in self.path and self.seen.count(self.path) == 1)
        self.send_response(404 if is_bad else 200)
        self.send_header("Content-Length", "0" if is_bad else "3")
        self.end_headers()
        self.wfile.write(b"" if is_bad else b"abc")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    import threading
    from http.server import ThreadingHTTPServer

    seen: list[str] = []
    handler = type("Handler", (Asked,), {"seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{one.server_address[1]}", seen
        one.shutdown()
        thread.join()


def filled(tmp_path: Path, filling: Filling, shell: str = "sh") -> subprocess.CompletedProcess[str]:
    pod = Pod(tmp_path, of_kind(filling_objects(filling), "ConfigMap")["data"])
    return pod.run("warm.sh", str(filling.lanes), shell=shell)


NASTY = "/a/$(touch%20x)`id`;'&*"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_reads_everything_once_from_each_cache(
    tmp_path: Path, server: tuple[str, list[str]], lanes: int, shell: str
) -> None:
    url, seen = server
    paths = (*(f"/s/{number}.tar" for number in range(9)), "/weak", NASTY)
    done = filled(tmp_path, Filling(paths=paths, caches=(url, f"{url}/two"), lanes=lanes), shell)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"read {number}" for number in range(1, 12))
    expected = [base + path for base in ("", "/two") for path in paths]
    assert {path.replace("%60", "`") for path in seen} == set(expected)
    assert len(seen) == len(expected) + 2  # the weak ones, twice


def test_tells_which_could_not_be_read(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    url, _ = server
    text = of_kind(filling_objects(Filling(paths=("/a", "/missing", "/b"), caches=(url,), lanes=2)), "ConfigMap")
    data = {name: one.replace("try * try", "0") for name, one in text["data"].items()}
    done = Pod(tmp_path, data).run("warm.sh", "2")
    assert done.returncode == 1
    assert "read 1" in done.stdout
    assert "read 3" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("failed 2 ") and "404" in line]


def test_a_list_that_is_too_long_and_words_that_are_no_urls_are_refused() -> None:
    with pytest.raises(InputError, match=r"the list of 60,000 objects has .* --shards A..B"):
        filling_objects(replace(FILLING, paths=tuple(f"/train/{number:020}.tar" for number in range(60_000))))
    for bad in ("/a b", "/a\nb", "/a\tb"):
        with pytest.raises(InputError, match="no spaces or line breaks"):
            filling_objects(replace(FILLING, paths=(bad,)))
    filling_objects(replace(FILLING, paths=tuple(f"/train/{number:06}.tar" for number in range(40_000))))


def test_the_same_wish_has_the_same_name() -> None:
    assert FILLING.name == replace(FILLING).name
    assert FILLING.name != replace(FILLING, paths=("/other",)).name
    assert len(FILLING.name) < 53  # a Job's pods have a suffix


# --- What there is


def owner(*, wanted: int = 2, seen: int = 5, **status: int) -> Manifest:
    return {
        "metadata": {"generation": 5},
        "spec": {"replicas": wanted},
        "status": {"observedGeneration": seen, **status},
    }


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (owner(), 0),
        (owner(seen=4, replicas=2, readyReplicas=2, updatedReplicas=2), 0),
        (owner(replicas=2, readyReplicas=2, updatedReplicas=0), 0),
        (owner(replicas=3, readyReplicas=2, updatedReplicas=1), 0),
        (owner(replicas=3, readyReplicas=3, updatedReplicas=1), 1),
        (owner(replicas=2, readyReplicas=2, updatedReplicas=2), 2),
    ],
)
def test_only_pods_of_the_newest_version_count(one: Manifest, expected: int) -> None:
    assert deployment.readiness(one) == (expected, 2)


class FakeCluster:
    """Objects in a dictionary, and logs."""

    context, namespace, url = "here", "team", "k8s://here/team"

    def __init__(self, objects: dict[tuple[str, str], Manifest], logs: dict[str, bytes] | None = None) -> None:
        self.objects, self.logs = objects, logs or {}
        self.refused: dict[str, StokerError] = {}

    def __str__(self) -> str:
        return self.url

    def get(self, kind: str, name: str) -> Manifest | None:
        return self.objects.get((kind, name))

    def every(self, kind: str, labels: Any = "", fields: str = "") -> list[Manifest]:
        return [one for (found, _), one in self.objects.items() if found == kind]

    def log(self, pod: str, container: str = "", *, follow: bool, since: str = "") -> Iterator[bytes]:
        if pod not in self.logs:
            raise NotFoundError(f"there is no pods {pod}")
        yield from self.logs[pod].splitlines()

    def apply(self, one: Manifest, *, dry_run: bool = False) -> Manifest:
        if one["kind"] in self.refused:
            raise self.refused[one["kind"]]
        if dry_run:
            return one
        made = {**one, "metadata": {**one["metadata"], "uid": f"uid of {one['kind']}"}}
        self.objects[one["kind"], one["metadata"]["name"]] = made
        return made

    def delete(self, kind: str, name: str) -> bool:
        return self.objects.pop((kind, name), None) is not None


def cluster_of(objects: list[Manifest], logs: dict[str, bytes] | None = None) -> Any:
    return FakeCluster({(one["kind"], one["metadata"]["name"]): one for one in objects}, logs)


def running(name: str, address: str, *, ready: bool = True) -> Manifest:
    state = {"name": "main", "ready": ready, "restartCount": 1, "state": {"running": {}}}
    status = {"phase": "Running", "podIP": address, "containerStatuses": [state]}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {"nodeName": "node1"}, "status": status}


LOG = b"""\
2026-11-16T00:00:00Z 2026/11/16 00:00:00 [warn] 1#1: something
2026-11-16T00:00:01Z 200 100 80 MISS 120
2026-11-16T00:00:01Z 206 100 0 MISS 60, 60
2026-11-16T00:00:02Z 200 100 80 HIT -
2026-11-16T00:00:03Z 502 5 80 - -
"""


def test_looks_and_counts_what_the_log_tells() -> None:
    pods = [running("stoker-cache-a", "10.0.0.1"), running("stoker-cache-b", "10.0.0.2", ready=False)]
    state = deployment.look(cluster_of([*cache_objects(MANY), *pods], {"stoker-cache-a": LOG, "stoker-cache-b": b""}))
    assert state.url == via_url("team")
    assert state.budget == 200 << 30
    assert [one["name"] for one in state.origins] == ["a", "b", "c"]
    assert [pod.ready for pod in state.pods] == [True, False]
    expected = {"requests": 3, "bytes": 205, "errors": 1, "hits": 1, "misses": 2, "origin_bytes": 240}
    assert state.pods[0].log == expected


def test_a_former_version_is_not_blamed() -> None:
    objects = cache_objects(ONE)
    former, newest = running("old", "", ready=False), running("new", "", ready=False)
    broken = {"waiting": {"reason": "CrashLoopBackOff"}}
    former["status"]["containerStatuses"][0] |= {"restartCount": 9, "state": broken}
    newest["metadata"]["annotations"] = of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    cluster = cluster_of([*objects, former, newest], {"old": b"", "new": b""})
    assert not deployment._is_hopeless(cluster, objects[2])
    newest["status"]["containerStatuses"][0] |= {"restartCount": 9, "state": broken}
    assert deployment._is_hopeless(cluster, objects[2])


def test_several_pods_are_filled_one_by_one_and_one_by_its_name() -> None:
    first, second = running("a", "10.0.0.1"), running("b", "fd00::2")
    found = deployment.target(cluster_of([*cache_objects(MANY), first, second]))
    assert found.caches == (f"http://10.0.0.1:{CACHE_PORT}", f"http://[fd00::2]:{CACHE_PORT}")
    assert found.origins["http://origin.far.svc/x"] == "a"
    assert deployment.target(cluster_of([*cache_objects(MANY), first])).caches == (via_url("team"),)
    with pytest.raises(NotFoundError, match="there is no cache in this namespace"):
        deployment.target(cluster_of([]))


def done_job(kind: str) -> Manifest:
    conditions = [{"type": kind, "status": "True", "message": "too often"}]
    return {"kind": "Job", "metadata": {"name": FILLING.name}, "status": {"conditions": conditions}}


def test_follows_the_filling_to_its_end() -> None:
    log = b"t read 2\nt something else\nt read 1\nt read 2\n"
    read: list[int] = []
    pod = running("warm", "")
    pod["status"]["phase"] = "Succeeded"
    deployment._follow(cluster_of([done_job("Complete"), pod], {"warm": log}), FILLING, read.append, print)
    assert read == [1, 0]
    broken = cluster_of([done_job("Failed"), pod], {"warm": b"t read 1\nt failed 2 wget: error: 404\n"})
    with pytest.raises(JobFailedError, match=r"1 of 2 were read; /train/b.tar: wget: error: 404; does the origin"):
        deployment._follow(broken, FILLING, read.append, print)
    with pytest.raises(JobFailedError, match=r"1 of 2 were read; too often"):
        deployment._follow(cluster_of([done_job("Failed"), pod], {"warm": b"t read 1\n"}), FILLING, read.append, print)


def test_what_an_earlier_pod_could_not_read_is_no_fault_when_another_has() -> None:
    first, second = running("first", ""), running("second", "")
    logs = {"first": b"t failed 2 wget: timed out\n", "second": b"t read 1\nt read 2\n"}
    read: list[int] = []
    deployment._follow(cluster_of([done_job("Complete"), first, second], logs), FILLING, read.append, print)
    assert read == [0, 1]


def test_a_pod_that_is_gone_while_its_log_is_read_ends_nothing() -> None:
    read: list[int] = []
    pods = [running("gone", ""), running("next", "")]
    logs = {"next": b"t read 1\nt read 2\n"}
    deployment._follow(cluster_of([done_job("Complete"), *pods], logs), FILLING, read.append, print)
    assert read == [0, 1]


@pytest.mark.parametrize("kind", ["Job", "ConfigMap"])
def test_a_filling_that_is_refused_leaves_nothing(kind: str) -> None:
    cluster = cluster_of([])
    cluster.refused[kind] = FullError("quota q leaves no room")
    with pytest.raises(FullError):
        deployment.fill(cluster, FILLING)
    assert not cluster.objects


def test_the_list_goes_with_its_job() -> None:
    cluster = cluster_of([])
    deployment._begin(cluster, *filling_objects(FILLING))
    (reference,) = cluster.objects["ConfigMap", FILLING.name]["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["uid"]) == ("Job", "uid of Job")


def test_a_cache_that_is_refused_leaves_the_former_as_it_was() -> None:
    former = cache_objects(ONE)
    wanted = cache_objects(replace(ONE, storage_class="disks", size=64 << 20))
    cluster = cluster_of(former)
    cluster.refused["StatefulSet"] = InputError("the cluster refuses it: spec: Forbidden: updates ... are forbidden")
    with pytest.raises(InputError, match="a cache's claims cannot be changed"):
        deployment.deploy(cluster, wanted)
    assert list(cluster.objects.values()) == former
    cluster.refused.clear()
    deployment.deploy(cluster, wanted)
    assert {kind for kind, _ in cluster.objects} == {"ConfigMap", "Service", "StatefulSet"}


# --- The command line

ORIGIN = ["--origin", "http://origin:8000"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*ORIGIN, "--size", "much"], "--size: expected a size"),
        ([*ORIGIN, "--size", "1MiB"], "--size: is 1 MiB, and must be at least 32 MiB"),
        (ORIGIN, "no --size is given"),
        (["--size", "1Gi"], "no --origin is given"),
        ([*ORIGIN, "--size", "1Gi", "--replicas", "0"], "--replicas: is 0"),
        ([*ORIGIN, "--size", "1Gi", "--dir", "x", "--port", "1"], "--dir, --port are for a cache on this machine"),
        (["--plan", "--stop"], "--plan and --stop are two things"),
        ([*ORIGIN, "--size", "1Gi", "--patch", "{tmp}/none"], "there is no such file"),
        ([*ORIGIN, "--size", "1Gi", "--patch", "{tmp}/list"], "names the kind of the object"),
        ([*ORIGIN, "--size", "1Gi", "--timeout", "soon"], "expected a duration"),
    ],
)
def test_refuses(words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list").write_text("- 1\n")
    given = [word.replace("{tmp}", str(tmp_path)) for word in words]
    plan = [] if "--plan" in words else ["--plan"]
    assert stoker("data", "cache", "--on", "k8s", *plan, *given) == 2
    assert expected in capsys.readouterr().err


def test_options_of_a_cluster_want_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "cache", *ORIGIN, "--dir", tmp_path, "--size", "1Gi", "--claim", "x", "--stop") == 2
    assert "--claim, --stop are for --on k8s" in capsys.readouterr().err
    assert stoker("data", "warm", "http://x/train", "--copy", "y") == 2
    assert "--copy is for --on k8s" in capsys.readouterr().err
    assert stoker("data", "warm", "http://x/train") == 2
    assert "no --via is given" in capsys.readouterr().err
    assert stoker("data", "cache", *ORIGIN, "--size", "1Gi", "--on", "slurm") == 2
    assert "`--on slurm` is no cluster" in capsys.readouterr().err


def test_the_plan_needs_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    words = ["data", "cache", "--on", "k8s://here/team", *ORIGIN, "--size", "1Gi"]
    assert stoker(*words, "--plan") == 0
    text = capsys.readouterr().out
    assert list(yaml.safe_load_all(text)) == cache_objects(replace(ONE, namespace="team"))
    assert stoker(*words, "--plan", "--json") == 0
    assert json.loads(capsys.readouterr().out) == cache_objects(replace(ONE, namespace="team"))
    assert stoker(*words) == 2
    assert "there is no Kubernetes configuration" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = {"server": f"http://127.0.0.1:{free_port()}"}
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": server}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert stoker("data", "cache", "--on", "k8s", *ORIGIN, "--size", "1Gi") == 5
    assert "does not answer" in capsys.readouterr().err
    assert stoker("data", "warm", "http://origin:8000/train", "--on", "k8s", "--jobs", MOST_LANES) == 5
    assert "does not answer" in capsys.readouterr().err

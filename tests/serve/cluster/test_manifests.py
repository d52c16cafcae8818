"""Objects of the shared cache and its warm Job, and the scripts that its pods run."""

from __future__ import annotations

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

from stoker.errors import InputError, SpecError
from stoker.kube.objects import CACHE_PORT, CACHE_SERVICE, MANAGED_BY, PART_LABEL, Manifest, cache_url
from stoker.serve.cluster.manifests import (
    CACHE_LABELS,
    CONFIG_DIR,
    RUN_DIR,
    SERVER_LABELS,
    WARM_LABELS,
    ClusterCache,
    WarmJob,
    build_cache_objects,
    build_warm_objects,
    check_claim_writable,
)
from tests.support.cache_objects import CACHES, REPLICATED, SINGLE, WARM_JOB, find_kind, find_pod_spec, make_claim
from tests.support.engines import HAS_NGINX

# --- Objects


@pytest.mark.parametrize("objects", [*map(build_cache_objects, CACHES), build_warm_objects(WARM_JOB)])
def test_objects_are_valid_kubernetes(objects: list[Manifest]) -> None:
    for manifest in objects:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        assert manifest["metadata"]["labels"].items() >= {**CACHE_LABELS, **MANAGED_BY}.items()
        for template in manifest.get("spec", {}).get("volumeClaimTemplates") or ():
            assert template["metadata"]["labels"][PART_LABEL] == "cache"  # otherwise --stop would not delete its claims


@pytest.mark.parametrize("objects", [*map(build_cache_objects, CACHES), build_warm_objects(WARM_JOB)])
def test_pods_are_restricted(objects: list[Manifest]) -> None:
    pod = find_pod_spec(objects)
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_cache_volume_is_an_emptydir_a_claim_or_a_claim_per_pod() -> None:
    local, shared, own = (
        build_cache_objects(SINGLE),
        build_cache_objects(replace(REPLICATED, claim="shared")),
        build_cache_objects(CACHES[3]),
    )
    (volume,) = [volume for volume in find_pod_spec(local)["volumes"] if volume["name"] == "cache"]
    limit = int(volume["emptyDir"]["sizeLimit"])
    assert limit > SINGLE.size  # nginx evicts periodically, and Kubernetes evicts a pod above the limit
    assert find_pod_spec(local)["containers"][0]["resources"]["requests"]["ephemeral-storage"] == str(limit)
    (volume,) = [volume for volume in find_pod_spec(shared)["volumes"] if volume["name"] == "cache"]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    assert [volume for volume in find_pod_spec(own)["volumes"] if volume["name"] == "cache"] == []
    (claim,) = find_kind(own, "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == str(200 << 30)


def test_service_selects_cache_pods_but_not_warm_pods() -> None:
    service = find_kind(build_cache_objects(SINGLE), "Service")
    assert service["metadata"]["name"] == CACHE_SERVICE
    assert service["spec"]["selector"] == SERVER_LABELS
    assert not SERVER_LABELS.items() <= WARM_LABELS.items()
    assert cache_url("team") == f"http://{CACHE_SERVICE}.team:{CACHE_PORT}"


def test_pod_template_changes_only_with_the_configuration() -> None:
    def template(cache: ClusterCache) -> Any:
        return find_kind(build_cache_objects(cache), "Deployment")["spec"]["template"]

    assert template(SINGLE) == template(replace(SINGLE, replicas=1))
    assert template(SINGLE)["metadata"] != template(replace(SINGLE, revalidate_after_s=1))["metadata"]
    assert template(SINGLE)["metadata"] != template(replace(SINGLE, origins=(("", "http://another"),)))["metadata"]
    assert template(SINGLE)["metadata"] != template(replace(SINGLE, image="another"))["metadata"]
    patched = build_cache_objects(SINGLE, [{"kind": "ConfigMap", "data": {"more": "text"}}])
    assert template(SINGLE)["metadata"] != find_kind(patched, "Deployment")["spec"]["template"]["metadata"]


def test_all_invalid_settings_are_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        build_cache_objects(
            replace(
                SINGLE, size=5, replicas=0, claim="a", storage_class="b", image="no image", origins=(("", "s3://b"),)
            )
        )
    for word in ("--size", "--replicas", "--claim", "--image", "--origin", "https://BUCKET.s3.amazonaws.com"):
        assert word in str(caught.value)


def test_claim_must_be_writable_for_all_pods() -> None:
    check_claim_writable(make_claim("ReadWriteOnce"), 1)
    check_claim_writable(make_claim("ReadWriteOnce", "ReadWriteMany"), 3)
    with pytest.raises(InputError, match=r"\bkept\b.*\b2 pods\b.* ReadWriteOnce\b"):
        check_claim_writable(make_claim("ReadWriteOnce"), 2)
    with pytest.raises(InputError, match="ReadOnlyMany"):
        check_claim_writable(make_claim("ReadOnlyMany"), 1)


def test_patches_apply_to_matching_objects() -> None:
    patch = {"kind": "Deployment", "spec": {"template": {"spec": {"nodeSelector": {"disk": "fast"}}}}}
    objects = build_cache_objects(SINGLE, [patch, {"kind": "Service", "spec": {"type": "NodePort"}}])
    assert find_pod_spec(objects)["nodeSelector"] == {"disk": "fast"}
    assert find_kind(objects, "Service")["spec"]["selector"] == SERVER_LABELS
    with pytest.raises(InputError, match=r"--patch: .*StatefulSet; .*ConfigMap stoker-cache"):
        build_cache_objects(SINGLE, [{"kind": "StatefulSet"}])


# --- Scripts of the pods


class Pod:
    """The files of a pod in a folder, with the paths in its scripts rewritten to it."""

    def __init__(self, folder: Path, data: dict[str, str], resolv: str = "") -> None:
        self.folder = folder
        paths = {CONFIG_DIR: folder / "etc", RUN_DIR: folder / "run", '"/cache': f'"{folder}/store'}
        (folder / "etc").mkdir(parents=True)
        (folder / "run").mkdir()
        (folder / "resolv.conf").write_text(resolv)
        for name, text in data.items():
            for pod_path, local_path in {**paths, "/etc/resolv.conf": folder / "resolv.conf"}.items():
                text = text.replace(pod_path, str(local_path))
            (folder / "etc" / name).write_text(text)

    def run(self, script: str, *words: str, shell: str = "sh") -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "POD_NAME": "stoker-cache-0"}
        command = [*shell.split(), str(self.folder / "etc" / script), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


RESOLV = "search team.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5"
SHELLS = ["sh", *(["busybox sh"] if shutil.which("busybox") else [])]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed")
@pytest.mark.parametrize("cache", CACHES[:2], ids=["one", "many"])
def test_nginx_accepts_the_configuration_of_a_pod(tmp_path: Path, cache: ClusterCache, shell: str) -> None:
    data = dict(find_kind(build_cache_objects(cache), "ConfigMap")["data"])
    data["start.sh"] = data["start.sh"].replace("exec nginx", "exec nginx -t")
    pod = Pod(tmp_path, data, RESOLV)
    (tmp_path / "store" / "stoker-cache-0").mkdir(parents=True)
    temporary, complete = (tmp_path / "store" / "stoker-cache-0" / name for name in ("a.0000000012", "abcdef"))
    temporary.touch()
    complete.touch()
    done = pod.run("start.sh", shell=shell)
    assert done.returncode == 0, done.stderr
    resolver = (tmp_path / "run" / "resolver.conf").read_text()
    assert "resolver 10.96.0.10 ipv6=off;" in resolver
    assert 'stoker_near { default "team.svc.cluster.local"; }' in resolver
    assert 'stoker_domain { default "cluster.local"; }' in resolver
    assert complete.exists()
    assert not temporary.exists()  # left by a killed nginx


@pytest.mark.parametrize(
    ("resolv", "expected"),
    [
        ("nameserver fd00::a\nsearch x.svc.c", "resolver [fd00::a];"),
        ("nameserver fe80::1%eth0\nnameserver 10.0.0.1", "resolver 10.0.0.1 ipv6=off;"),
        ("nameserver 10.0.0.1\nnameserver fd00::a\n", "resolver 10.0.0.1 [fd00::a] ipv6=off;"),
    ],
)
def test_start_script_finds_the_nameserver(tmp_path: Path, resolv: str, expected: str) -> None:
    data = dict(find_kind(build_cache_objects(SINGLE), "ConfigMap")["data"])
    data["start.sh"] = data["start.sh"].replace("exec nginx", "exec true")
    pod = Pod(tmp_path, data, resolv)
    pod.run("start.sh")
    assert (tmp_path / "run" / "resolver.conf").read_text().splitlines()[0] == expected


def test_start_script_reports_a_missing_nameserver(tmp_path: Path) -> None:
    pod = Pod(tmp_path, find_kind(build_cache_objects(SINGLE), "ConfigMap")["data"], "search x\n")
    done = pod.run("start.sh")
    assert done.returncode == 1
    assert done.stderr == "stoker: no nameserver in /etc/resolv.conf\n".replace(
        "/etc/resolv.conf", str(tmp_path / "resolv.conf")
    )


def test_service_names_are_completed_to_fqdns() -> None:
    text = find_kind(build_cache_objects(REPLICATED), "ConfigMap")["data"]["nginx.conf"]
    assert '"origin.far.svc.$stoker_domain:80"' in text
    assert '"data.example.com:443"' in text
    assert '"[fd00::1]:8080"' in text
    assert '"origin.$stoker_near:8000"' in find_kind(build_cache_objects(SINGLE), "ConfigMap")["data"]["nginx.conf"]


# --- Warming


class RecordingHandler(BaseHTTPRequestHandler):
    """Records requested paths; fails once for paths with `flaky`, and always for `missing` ones."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        is_bad = "missing" in self.path or ("flaky" in self.path and self.seen.count(self.path) == 1)
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
    handler = type("Handler", (RecordingHandler,), {"seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()
        thread.join()


def run_warm_script(tmp_path: Path, job: WarmJob, shell: str = "sh") -> subprocess.CompletedProcess[str]:
    pod = Pod(tmp_path, find_kind(build_warm_objects(job), "ConfigMap")["data"])
    return pod.run("warm.sh", str(job.parallel), shell=shell)


SHELL_METACHARACTERS = "/a/$(touch%20x)`id`;'&*"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_warm_script_reads_every_path_once_from_each_cache(
    tmp_path: Path, server: tuple[str, list[str]], parallel: int, shell: str
) -> None:
    url, seen = server
    paths = (*(f"/s/{number}.tar" for number in range(9)), "/flaky", SHELL_METACHARACTERS)
    done = run_warm_script(tmp_path, WarmJob(paths=paths, caches=(url, f"{url}/two"), parallel=parallel), shell)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"read {number}" for number in range(1, 12))
    expected = [base + path for base in ("", "/two") for path in paths]
    assert {path.replace("%60", "`") for path in seen} == set(expected)
    assert len(seen) == len(expected) + 2  # the flaky ones, twice


def test_warm_script_reports_failed_paths(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    url, _ = server
    text = find_kind(
        build_warm_objects(WarmJob(paths=("/a", "/missing", "/b"), caches=(url,), parallel=2)), "ConfigMap"
    )
    data = {name: content.replace("try * try", "0") for name, content in text["data"].items()}
    done = Pod(tmp_path, data).run("warm.sh", "2")
    assert done.returncode == 1
    assert "read 1" in done.stdout
    assert "read 3" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("failed 2 ") and "404" in line]


def test_too_many_paths_and_invalid_urls_are_rejected() -> None:
    with pytest.raises(InputError, match=r"\b60,000\b.*--shards"):
        build_warm_objects(replace(WARM_JOB, paths=tuple(f"/train/{number:020}.tar" for number in range(60_000))))
    for bad in ("/a b", "/a\nb", "/a\tb"):
        with pytest.raises(InputError) as caught:
            build_warm_objects(replace(WARM_JOB, paths=(bad,)))
        assert caught.value.where == repr(bad)
    build_warm_objects(replace(WARM_JOB, paths=tuple(f"/train/{number:06}.tar" for number in range(40_000))))


def test_job_name_depends_only_on_its_inputs() -> None:
    assert WARM_JOB.name == replace(WARM_JOB).name
    assert WARM_JOB.name != replace(WARM_JOB, paths=("/other",)).name
    assert len(WARM_JOB.name) < 53  # the names of a Job's pods have a suffix

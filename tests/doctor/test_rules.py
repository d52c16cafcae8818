"""Checks of hosts, routes, Ray clusters and probe reports: every failed check has a fix, and warnings do not fail."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.cli.doctor import format_checks, raise_for_checks
from stoker.core.spec import decode
from stoker.doctor import probe
from stoker.doctor.checks import Check
from stoker.doctor.rules import (
    LOCAL_DATA_FIX,
    REMOTE_DATA_FIX,
    ProbeReport,
    ProbeResult,
    RayFacts,
    bus_bandwidth,
    check_clocks,
    check_hosts,
    check_probe,
    check_ray_cluster,
    check_routes,
    check_versions,
    checks_from_faults,
)
from stoker.errors import Fault, InputError, JobFailedError, UnavailableError
from stoker.jobs.spec import JobSpec
from stoker.launchers.ssh.preflight import FULL_MESH_HOSTS, HostFacts, Issue, Route, Routes, dial_targets
from stoker.storage import open_store, split_url
from tests.support.engines import run_cache
from tests.support.http_origin import build_manifest, run_origin
from tests.support.servers import aws_environ

GIB = 1 << 30


def make_job(**keys: Any) -> JobSpec:
    return decode({"name": "pets", "program": {"module": "this"}, **keys}, JobSpec)


def make_facts(host: str = "a", **changes: Any) -> HostFacts:
    facts = {
        "python": "/usr/bin/python3",
        "version": "3.11.7",
        "modules": {"torch": "2.6.0", "stoker": None},
        "workdir": "/w",
        "workdir_error": "",
        "gpus": 0,
        "existing_paths": [],
        "programs": [],
        "clock_skew_s": 0.0,
    }
    return HostFacts(host, {**facts, **changes})


def checks_of_host(job: JobSpec, **changes: Any) -> dict[str, Check]:
    return {check.what: check for check in check_hosts(job, {"a": make_facts(**changes)}, {"a": job.resources.gpus})}


def make_report(subject: str, host: str = "a", slot: str = "worker/0", **fields: Any) -> ProbeReport:
    return ProbeReport(host, slot, 0, subject, fields)


def checks_of_reports(job: JobSpec, *reports: ProbeReport) -> dict[str, Check]:
    gpus = {report.slot: job.resources.gpus for report in reports}
    result = ProbeResult({"worker/0": "a"}, reports, gpus=gpus)
    return {check.what: check for check in check_probe(job, [result], knows_hosts=True)}


def test_host_without_issues() -> None:
    assert all(check.fine for check in checks_of_host(make_job()).values())


@pytest.mark.parametrize(
    ("changes", "keys", "what", "values", "fix"),
    [
        (
            {"python": None, "python_error": "gone"},
            {},
            "python",
            ("'python3'", ": gone"),
            "ssh.python",
        ),
        ({"version": "3.7.1"}, {}, "python", ("Python 3.7.1", "'python3'", "3.8"), "ssh.python"),
        ({"modules": {"torch": None}}, {}, "torch", ("torch", "/usr/bin/python3"), "ssh.python"),
        (
            {"workdir_error": "/w cannot be written"},
            {},
            "folder",
            ("directory /w: /w cannot be written",),
            "ssh.workdir",
        ),
        ({}, {"resources": {"gpu": 2}}, "gpus", ("needs 2 GPUs", "has 0"), "resources.gpu=0"),
        (
            {},
            {"topology": "single", "program": {"command": ["train"]}},
            "program",
            ("'train'", "PATH"),
            "install it there",
        ),
        ({}, {"topology": "mpi"}, "program", ("mpirun", "PATH"), "openmpi-bin"),
        ({"programs": ["mpirun"]}, {"topology": "mpi"}, "program", ("mpirun", "orted"), "openmpi-bin"),
        ({}, {"data": {"train": "/none"}}, "data.train", ("no such file or directory: /none",), "use a URL"),
        ({"clock_skew_s": 4000.0}, {}, "clock", ("1h7m ahead of this machine", "S3"), "set-ntp"),
    ],
)
def test_host_with_an_issue(
    changes: dict[str, Any], keys: dict[str, Any], what: str, values: tuple[str, ...], fix: str
) -> None:
    check = checks_of_host(make_job(**keys), **changes)[what]
    assert check.fine is False
    assert all(value in check.found for value in values), check.found
    assert fix in check.fix
    assert check.code == InputError.exit_code


def test_unreachable_host_has_no_other_checks() -> None:
    facts = {
        "a": HostFacts("a", {}, Issue("host", "refuses your key", "ssh-copy-id a")),
        "b": HostFacts("b", {}, Issue("host", "does not answer")),
    }
    job = make_job(ssh={"user": "me", "config": "/c"})
    assert check_hosts(job, facts, {"a": 0, "b": 0}) == [
        Check("host", False, "refuses your key", "ssh-copy-id a", "a", 5),
        Check("host", False, "does not answer", "try: ssh -F /c me@b", "b", 5),
    ]


def test_missing_module_is_a_warning_if_setup_may_install_it() -> None:
    job = make_job(ssh={"setup": "make"})
    checks = checks_of_host(job, python=None, python_error="gone", version=None, modules={})
    for what in ("python", "torch"):
        assert checks[what].fine is None
        assert "ssh.setup" in checks[what].found


def test_versions() -> None:
    assert check_versions("torch", {"a": "2.6.0", "b": "2.6.0", "c": None}) == []
    (warning,) = check_versions("torch", {"a": "2.6.0+cpu", "b": "2.6.1+cu126", "c": "2.6.1+cu126"})
    assert (warning.fine, warning.found) == (None, "2.6.0+cpu on a; 2.6.1+cu126 on b, c")
    (failed,) = check_versions("torch", {"a": "2.6.0", "b": "2.5.0"})
    assert (failed.fine, failed.fix) == (False, "install the same torch on all hosts")
    (python,) = check_versions("python", {"a": "3.11.1", "b": "3.12.1"})
    assert python.fine is None


def test_clocks() -> None:
    passed, warning, failed = check_clocks({"a": 0.4, "b": -3.0, "c": 901.0}, "this machine")
    assert [passed.fine, warning.fine, failed.fine] == [True, None, False]
    assert warning.found == "3.0 s behind this machine"
    assert "timedatectl set-ntp true" in warning.fix


def test_ports_and_routes() -> None:
    job, route = make_job(port=29500), Route("10.0.0.1", "eth0")
    good = check_routes(job, Routes(29500, {"a": route, "b": route}, {}), ["a", "b"])
    assert [(check.what, check.fine, check.found) for check in good] == [
        ("port", True, "29500 is free"),
        ("network", True, "reaches all other hosts"),
        ("network", True, "reaches all other hosts"),
    ]
    bad = check_routes(
        job, Routes(1, {}, {"a": [Issue("port", "taken", "x")], "b": [Issue("network", "cut", "y")]}), ["a", "b"]
    )
    assert [(check.what, check.host, check.fine) for check in bad] == [("port", "a", False), ("network", "b", False)]
    many = [f"n{number}" for number in range(FULL_MESH_HOSTS + 1)]
    assert f"more than {FULL_MESH_HOSTS} hosts not every pair" in check_routes(job, Routes(1, {}, {}), many)[-1].found


def test_dial_targets() -> None:
    assert dial_targets(["a", "b", "c"]) == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}
    many = [f"n{number}" for number in range(100)]
    dials = dial_targets(many)
    assert dials["n0"] == ["n1"]
    assert dials["n5"] == ["n0", "n6"]
    assert dials["n99"] == ["n0"]
    assert {target for targets in dials.values() for target in targets} == set(many)


def test_ray_cluster() -> None:
    nodes, free = {"10.0.0.1": "alive", "10.0.0.2": "alive"}, {"CPU": 8.0}
    cluster = RayFacts("http://h:8265", "2.1", "2.1", nodes, free, {"CPU": 8.0})
    assert [check.fine for check in check_ray_cluster(cluster)] == [True] * 4
    nodes = {**nodes, "10.0.0.2": "dead"}
    changed = cluster._replace(cluster_version="2.2", nodes=nodes, needed={"CPU": 4.0, "GPU": 4.0})
    _, version, dead, capacity = check_ray_cluster(changed)
    assert (version.fine, version.found) == (None, "2.1 here, 2.2 there")
    assert (dead.fine, dead.found) == (None, "1 alive; dead: 10.0.0.2")
    assert (capacity.fine, capacity.found) == (None, "job needs 4 GPUs; free: 8 CPUs, 0 GPUs")
    assert all(check.fix for check in (version, dead, capacity))


def test_checks_from_faults() -> None:
    checks = checks_from_faults(
        [Fault("resources.gpu", "needs 1 (--set resources.gpu=0)"), Fault("program.script", "no file")]
    )
    assert [(check.what, check.found, check.fix) for check in checks] == [
        ("resources.gpu", "needs 1", "--set resources.gpu=0"),
        ("program.script", "no file", "change it in the job file, or with --set program.script=…"),
    ]


@pytest.mark.parametrize(
    ("free", "what", "fault", "fine"),
    [
        (9 * GIB, "workdir", "", True),
        (GIB, "workdir", "", None),
        (1 << 20, "checkpoints", "", False),
        (9 * GIB, "checkpoints", "/c cannot be written", False),
        (9 * GIB, "cache", "", None),
    ],
)
def test_disks(free: int, what: str, fault: str, fine: bool | None) -> None:
    job = make_job(data={"cache": {"dir": "/c", "size": "20Gi"}})
    check = checks_of_reports(job, make_report("disk", what=what, place="/c", free=free, fault=fault))[f"disk: {what}"]
    assert check.fine is fine
    assert bool(check.fix) == (fine is not True)


@pytest.mark.parametrize(
    ("host", "by_ssh", "workdir", "data"),
    [
        ("", False, "run the command in another directory", LOCAL_DATA_FIX),
        ("a", True, "ssh.workdir", REMOTE_DATA_FIX),
        ("a", False, "run the job on another disk there", REMOTE_DATA_FIX),
    ],
)
def test_fix_for_a_directory_depends_on_where_it_is(host: str, by_ssh: bool, workdir: str, data: str) -> None:
    reports = [
        make_report("disk", host, what="workdir", place="/w", free=9 * GIB, fault="read-only"),
        make_report("disk", host, what="checkpoints", place="/c", free=1, fault=""),
        make_report("data", host, key="data.train", url="/none", fault="no such file"),
    ]
    checks = check_probe(make_job(), [ProbeResult({"worker/0": host}, reports)], knows_hosts=by_ssh)
    fixes = {check.what: check.fix for check in checks}
    assert fixes["disk: workdir"].startswith("make it writable, or ")
    assert fixes["disk: workdir"].endswith(workdir)
    assert fixes["disk: checkpoints"].startswith("free disk space there, or ")
    assert fixes["disk: checkpoints"].endswith("checkpoint.dir")
    assert fixes["data.train"] == data


@pytest.mark.parametrize(
    ("fields", "fine", "found", "fix"),
    [
        ({"bytes": 8 << 20, "seconds": 0.1}, True, "8 MiB read at 80 MiB/s", ""),
        ({"bytes": 4 << 20, "seconds": 2.0}, None, "4 MiB read at 2 MiB/s", "data.via"),
        ({"bytes": 0, "seconds": 0.1}, False, "http://h/x is empty", "data verify"),
        ({"fault": "HTTP 404 Not Found"}, False, "cannot read http://h/x: HTTP 404 Not Found", "check the URL"),
        ({"fault": "HTTP 403 Forbidden"}, False, "cannot read http://h/x: HTTP 403 Forbidden", "secret_env"),
        ({"fault": "timed out"}, False, "cannot read http://h/x: timed out", "firewall, DNS, proxy"),
        (
            {"fault": "no such object", "error": "NotFoundError"},
            False,
            "cannot read http://h/x: no such",
            "check the URL",
        ),
        ({"fault": "403", "error": "AccessDeniedError"}, False, "cannot read http://h/x: 403", "secret_env"),
        ({"fault": f"the cache c {probe.NOT_SERVED} it"}, False, "cannot read http://h/x: the cache c", "data.via"),
        ({"untested": "no stoker"}, None, "skipped: http://h/x: no stoker", ""),
    ],
)
def test_datasets(fields: dict[str, Any], fine: bool | None, found: str, fix: str) -> None:
    report = make_report("data", key="data.train", url="http://me:word@h/x?token=1", **fields)
    check = checks_of_reports(make_job(), report)["data.train"]
    assert check.fine is fine
    assert check.found.startswith(found)
    assert fix in check.fix
    assert bool(fix) == bool(check.fix)


def test_gpus() -> None:
    job = make_job(resources={"gpu": 2})
    two = {"GPU-1": "H100", "GPU-2": "H100"}
    too_few = checks_of_reports(job, make_report("gpus", names={"GPU-1": "H100"}))["gpus"]
    assert (too_few.fine, too_few.found) == (False, "the job needs 2 GPUs, but this host has 1")
    invisible = checks_of_reports(
        job, make_report("gpus", names=two), make_report("torch", gpus=2), make_report("torch", gpus=0)
    )["gpus"]
    assert (invisible.fine, invisible.found) == (False, "torch sees 0 of 2 GPUs")
    passed = checks_of_reports(job, make_report("gpus", names=two), make_report("torch", version="2", gpus=2))["gpus"]
    assert (passed.fine, passed.found) == (True, "2 × H100; job needs 2")
    more = {"GPU-3": "H100", "GPU-4": "H100"}
    both = [make_report("gpus", names=two), make_report("gpus", slot="worker/1", names=more)]
    assert checks_of_reports(job, *both)["gpus"].found == "4 × H100; job needs 4"
    uneven = [make_report("gpus", names={**two, **more}), make_report("gpus", slot="worker/1", names={"GPU-3": "H100"})]
    assert checks_of_reports(job, *uneven)["gpus"].found == "a worker can use only 1 of 4 GPUs"


def test_worst_slot_of_a_host_is_reported() -> None:
    read = {"key": "data.train", "url": "http://h/x"}
    fast, slow = ({**read, "bytes": 8 << 20, "seconds": seconds} for seconds in (0.1, 4.0))
    fields = (fast, {**read, "fault": "gone"}, slow)
    reports = [make_report("data", slot=f"worker/{index}", **each) for index, each in enumerate(fields)]
    assert checks_of_reports(make_job(), *reports)["data.train"].found == "cannot read http://h/x: gone"
    assert checks_of_reports(make_job(), reports[2], reports[0])["data.train"].found == "8 MiB read at 2 MiB/s"


def test_every_missing_program_of_a_host_is_reported() -> None:
    job = make_job(topology="mpi", program={"command": ["train"]})
    checks = [check for check in check_hosts(job, {"a": make_facts()}, {"a": 0}) if check.what == "program"]
    train, mpirun = [check.found for check in checks]
    assert re.search(r"'train'.*PATH", train)
    assert re.search(r"\bmpirun\b.*PATH", mpirun)


def test_probe_that_was_not_scheduled_and_one_that_could_not_be_stopped() -> None:
    reason = "no node has 64 CPUs free"
    pending = ProbeResult({"worker/0": ""}, (), "stopped after 120 s", reduces=True, pending_reason=reason)
    (capacity,) = check_probe(make_job(), [pending], knows_hosts=False)
    assert (capacity.what, capacity.fine) == ("capacity", None)
    assert capacity.found == f"the probe was not scheduled: {reason}"
    unstoppable = ProbeResult({}, (), stop_error=UnavailableError("does not answer", where="node2"))
    (check,) = check_probe(make_job(), [unstoppable], knows_hosts=True)
    assert (check.what, check.fine, check.code) == ("probe", False, UnavailableError.exit_code)
    assert check.found == "could not be stopped: node2: does not answer"


def all_reduce_checks(*reports: ProbeReport, fault: str = "") -> list[Check]:
    hosts = {"worker/0": "a", "worker/1": "b"}
    return check_probe(make_job(workers=2), [ProbeResult(hosts, reports, fault, reduces=True)], knows_hosts=True)


def test_all_reduce_is_measured_at_the_slowest_rank() -> None:
    both = [
        make_report("reduce", host, f"worker/{rank}", size=16 << 20, world=2, backend="gloo", seconds=seconds)
        for rank, (host, seconds) in enumerate((("a", 0.01), ("b", 0.02)))
    ]
    (check,) = all_reduce_checks(*both)
    assert (check.fine, check.found) == (True, "2 ranks, gloo: 16 MiB in 20 ms; 800 MiB/s")
    assert bus_bandwidth(100, 1.0, 4) == 150
    slow = [report._replace(fields={**report.fields, "seconds": 2.0}) for report in both]
    (check,) = all_reduce_checks(*slow)
    assert (check.fine, bool(check.fix)) == (None, True)


def test_failed_all_reduce_names_the_absent_hosts() -> None:
    present = make_report("machine", "b", "worker/1", python="3")
    absent, failed = all_reduce_checks(make_report("reduce", fault="timed out", world=2, backend="gloo"), present)
    assert (absent.found, absent.code) == ("b did not take part", JobFailedError.exit_code)
    assert (failed.host, failed.found) == ("a", "rendezvous failed: timed out")
    (silent,) = all_reduce_checks(fault="the network is down")[:1]
    assert (silent.host, silent.found) == ("a", "worker/0 did not report: the network is down")


def test_exit_code_of_the_failed_check_with_precedence() -> None:
    down = Check("host", False, "x", "y", "a", 5)
    bad = Check("torch", False, "x", "y", "a", 2)
    failed = Check("probe", False, "x", "y", "a", 4)
    raise_for_checks([Check("host", True, "x"), Check("clock", None, "off", "fix")])
    for checks, kind in (
        ([failed, bad, down], UnavailableError),
        ([failed, bad], InputError),
        ([failed], JobFailedError),
    ):
        with pytest.raises(kind, match=rf"{len(checks)} of {len(checks)} checks failed: "):
            raise_for_checks(checks)


def test_skipped_checks_are_counted_separately() -> None:
    checks = [
        Check("host", False, "x", "y", "a", 5),
        Check("python", True, "3.12"),
        Check("clock", None, "3 s off", "set it"),
        Check("all-reduce", None, "skipped: no host is reachable"),
    ]
    with pytest.raises(UnavailableError, match=r"^1 of 3 checks failed \(1 skipped\): host \(a\)$"):
        raise_for_checks(checks)


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_into_the_terminal(width: int) -> None:
    checks = [Check("host", True, "answers", host=f"node{number}") for number in range(20)]
    checks += [Check("data.train", True, f"{number} MiB/s", host=f"node{number}") for number in range(18)]
    checks.append(Check("data.train", False, "connection refused " * 9, "check the firewall " * 6, "node18"))
    checks.append(Check("clock", None, "3 s off", "set it", "node19"))
    checks.append(Check("all-reduce", None, "not tried"))
    lines = list(format_checks(checks, width))
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["✓", "host", "all", "20", "answers"]
    assert [line[0] for line in lines if line[0] != " "] == ["✓", "✓", "✓", "✓", "✓", "✗", "✓", "!", "–"]
    assert any("14 more" in line for line in lines)


def test_first_of_pattern() -> None:
    assert probe.first_of_pattern("http://h/a-{000..127}.{tar,idx}") == "http://h/a-000.tar"


# --- Reads of the probe, from real servers


def read(url: str, via: str | None = None, workdir: str = "/") -> dict[str, Any]:
    return probe.read_dataset({"via": via, "workdir": workdir}, url)


def test_probe_reads_from_disks_servers_and_caches(tmp_path: Path) -> None:
    for name in ("set/manifest.json", "set/train-000.tar.idx.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "set" / "train-000.tar").write_bytes(bytes(3000))
    for url in ("set", f"{tmp_path}/set", f"{tmp_path}/set/train-{{000..127}}.tar", f"file://{tmp_path}/set"):
        assert read(url, workdir=str(tmp_path))["bytes"] == 3000
    shards = {"train-000.tar": bytes(5000)}
    with (
        run_origin({"/set/train-000.tar": bytes(5000), "/set/manifest.json": build_manifest(shards)}) as far,
        run_cache(tmp_path / "cache", ("pets", far.url)) as near,
    ):
        for via in (None, near):
            for url in (f"{far.url}/set", f"{far.url}/set/", f"{far.url}/set/train-{{000..127}}.tar"):
                assert read(url, via)["bytes"] == 5000
        with pytest.raises(OSError, match=probe.NOT_SERVED):
            read("http://elsewhere/set", near)
    with pytest.raises(OSError, match=f"no shard.*{tmp_path}/cache"):
        read(str(tmp_path / "cache"))


def test_slow_server_is_read_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 20))
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 100)
                    time.sleep(0.05)

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(probe, "READ_TIME_S", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        fields = read(f"http://127.0.0.1:{server.server_port}/a.tar")
        server.shutdown()
        thread.join()
    assert fields["seconds"] < 20  # without the limit it takes 9 minutes
    assert 100 <= fields["bytes"] <= 100 * (2 + fields["seconds"] / 0.05)


def test_all_reduce_runs_before_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("report_machine", "measure_all_reduce", "report_data"):
        monkeypatch.setattr(probe, name, lambda _, name=name: calls.append(name))
    monkeypatch.setattr(probe.os, "_exit", lambda _: None)
    monkeypatch.setenv(probe.SETTINGS_ENV, "{}")
    monkeypatch.setenv("LOCAL_RANK", "0")
    probe.main()
    assert calls == ["report_machine", "measure_all_reduce", "report_data"]


@pytest.mark.parametrize(
    ("visible", "letters"),
    [(None, "abc"), ("", ""), ("-1", ""), ("2,0", "ca"), ("1,7,0", "b"), ("GPU-c, GPU-a", "ca"), ("MIG-x", "?")],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, letters: str) -> None:
    gpus = [[str(index), f"GPU-{letter}", letter] for index, letter in enumerate("abc")]
    monkeypatch.setattr(probe, "_list_gpus", lambda: gpus)
    assert "".join(probe.gpu_models(visible).values()).replace("MIG", "?") == letters


def test_bucket_is_read_if_stoker_is_installed(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_environ(moto_url).items():
        monkeypatch.setenv(name, value)
    open_store("s3://bucket/doctor").put("a.tar", bytes(7000))
    assert read("s3://bucket/doctor/a.tar")["bytes"] == 7000
    older = SimpleNamespace(open_store=open_store, split=split_url)
    monkeypatch.setitem(sys.modules, "stoker.storage", older)
    assert read("s3://bucket/doctor/a.tar")["bytes"] == 7000
    monkeypatch.setitem(sys.modules, "stoker.storage", None)
    with pytest.raises(probe.SkippedError, match=r"s3://.*stoker"):
        read("s3://bucket/doctor/a.tar")

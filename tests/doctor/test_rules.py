"""From facts to checks: every fault has its sentence and its fix, and what is only odd does not fail."""

from __future__ import annotations

import contextlib
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stoker.cli.doctor import _raise, table
from stoker.core.spec import decode
from stoker.doctor import probe
from stoker.doctor.checks import Check
from stoker.doctor.rules import (
    Cluster,
    Outcome,
    Told,
    bus_bandwidth,
    of_clocks,
    of_cluster,
    of_faults,
    of_looks,
    of_probe,
    of_versions,
    of_ways,
)
from stoker.errors import Fault, InputError, JobFailedError, UnavailableError
from stoker.jobs.spec import Job
from stoker.launchers.ssh.preflight import MESH, Look, Route, Trouble, Ways, partners
from stoker.storage import open_store
from tests.serve.contract import manifest, origin
from tests.serve.test_embedded import caching
from tests.support.servers import aws_environ

GIB = 1 << 30


def job_of(**keys: Any) -> Job:
    return decode({"name": "pets", "program": {"module": "this"}, **keys}, Job)


def look(host: str = "a", **changes: Any) -> Look:
    found = {
        "python": "/usr/bin/python3",
        "version": "3.11.7",
        "modules": {"torch": "2.6.0", "stoker": None},
        "workdir": "/w",
        "workdir_fault": "",
        "gpus": 0,
        "there": [],
        "programs": [],
        "skew": 0.0,
    }
    return Look(host, {**found, **changes})


def of_look(job: Job, **changes: Any) -> dict[str, Check]:
    return {one.what: one for one in of_looks(job, {"a": look(**changes)}, {"a": 1})}


def told(subject: str, host: str = "a", slot: str = "worker/0", **found: Any) -> Told:
    return Told(host, slot, 0, subject, found)


def of_told(job: Job, *every: Told) -> dict[str, Check]:
    return {one.what: one for one in of_probe(job, [Outcome({"worker/0": "a"}, every)], knows_hosts=True)}


def test_a_host_as_it_should_be() -> None:
    assert all(one.fine for one in of_look(job_of()).values())


@pytest.mark.parametrize(
    ("changes", "keys", "what", "found", "fix"),
    [
        (
            {"python": None, "python_fault": "gone"},
            {},
            "python",
            "has no Python 'python3' that works: gone",
            "ssh.python",
        ),
        ({"version": "3.7.1"}, {}, "python", "has Python 3.7.1 as 'python3', and 3.8 is needed", "ssh.python"),
        ({"modules": {"torch": None}}, {}, "torch", "has no torch in /usr/bin/python3", "install it there"),
        ({"workdir_fault": "/w cannot be written"}, {}, "folder", "cannot use the folder /w: /w cannot", "ssh.workdir"),
        ({}, {"resources": {"gpu": 2}}, "gpus", "has 0 GPUs, and 2 are wanted", "resources.gpu=0"),
        (
            {},
            {"topology": "single", "program": {"command": ["train"]}},
            "program",
            "has no program 'train' on its PATH",
            "install it there",
        ),
        ({}, {"topology": "mpi"}, "program", "has no mpirun on its PATH", "openmpi-bin"),
        ({"programs": ["mpirun"]}, {"topology": "mpi"}, "program", "has an mpirun without orted", "openmpi-bin"),
        ({}, {"data": {"train": "/none"}}, "data.train", "has nothing at /none", "name a URL"),
        ({"skew": 4000.0}, {}, "clock", "1h7m ahead of here; S3 refuses", "set-ntp"),
    ],
)
def test_what_a_host_lacks(changes: dict[str, Any], keys: dict[str, Any], what: str, found: str, fix: str) -> None:
    check = of_look(job_of(**keys), **changes)[what]
    assert check.fine is False
    assert check.found.startswith(found)
    assert fix in check.fix
    assert check.code == InputError.exit_code


def test_a_host_that_is_down_is_told_alone() -> None:
    looks = {
        "a": Look("a", {}, Trouble("host", "refuses your key", "ssh-copy-id a")),
        "b": Look("b", {}, Trouble("host", "does not answer")),
    }
    job = job_of(ssh={"user": "me", "config": "/c"})
    assert of_looks(job, looks, {"a": 1, "b": 1}) == [
        Check("host", False, "refuses your key", "ssh-copy-id a", "a", 5),
        Check("host", False, "does not answer", "try it by hand: ssh -F /c me@b", "b", 5),
    ]


def test_what_setup_may_make_is_no_fault() -> None:
    job = job_of(ssh={"setup": "make"})
    checks = of_look(job, python=None, python_fault="gone", version=None, modules={})
    assert [(one.fine, one.found) for one in checks.values() if one.what in ("python", "torch")] == [
        (None, "not there; ssh.setup may make it")
    ] * 2


def test_versions() -> None:
    assert of_versions("torch", {"a": "2.6.0", "b": "2.6.0", "c": None}) == []
    (odd,) = of_versions("torch", {"a": "2.6.0+cpu", "b": "2.6.1+cu126", "c": "2.6.1+cu126"})
    assert (odd.fine, odd.found) == (None, "2.6.0+cpu on a; 2.6.1+cu126 on b, c")
    (wrong,) = of_versions("torch", {"a": "2.6.0", "b": "2.5.0"})
    assert (wrong.fine, wrong.fix) == (False, "install the same torch on all hosts")
    (python,) = of_versions("python", {"a": "3.11.1", "b": "3.12.1"})
    assert python.fine is None


def test_clocks() -> None:
    fine, odd, wrong = of_clocks({"a": 0.4, "b": -3.0, "c": 901.0}, "here")
    assert [fine.fine, odd.fine, wrong.fine] == [True, None, False]
    assert odd.found == "3.0 s behind here"
    assert odd.fix == "keep time there: timedatectl set-ntp true"


def test_between_hosts() -> None:
    job, route = job_of(port=29500), Route("10.0.0.1", "eth0")
    good = of_ways(job, Ways(29500, {"a": route, "b": route}, {}), ["a", "b"])
    assert [(one.what, one.fine, one.found) for one in good] == [
        ("port", True, "29500 is free"),
        ("network", True, "reaches every other"),
        ("network", True, "reaches every other"),
    ]
    bad = of_ways(
        job, Ways(1, {}, {"a": [Trouble("port", "taken", "x")], "b": [Trouble("network", "cut", "y")]}), ["a", "b"]
    )
    assert [(one.what, one.host, one.fine) for one in bad] == [("port", "a", False), ("network", "b", False)]
    many = [f"n{number}" for number in range(MESH + 1)]
    assert "not every pair is tried" in of_ways(job, Ways(1, {}, {}), many)[-1].found


def test_whom_a_host_dials() -> None:
    assert partners(["a", "b", "c"]) == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}
    many = [f"n{number}" for number in range(100)]
    dials = partners(many)
    assert dials["n0"] == ["n1"]
    assert dials["n5"] == ["n0", "n6"]
    assert dials["n99"] == ["n0"]
    assert {one for every in dials.values() for one in every} == set(many)


def test_a_ray_cluster() -> None:
    nodes, free = {"10.0.0.1": "alive", "10.0.0.2": "alive"}, {"CPU": 8.0}
    cluster = Cluster("http://h:8265", "2.1", "2.1", nodes, free, {"CPU": 2.0}, 4)
    assert [one.fine for one in of_cluster(cluster)] == [True] * 4
    nodes = {**nodes, "10.0.0.2": "dead"}
    _, version, gone, room = of_cluster(cluster._replace(there="2.2", nodes=nodes, bundle={"CPU": 1.0, "GPU": 1.0}))
    assert (version.fine, version.found) == (None, "2.1 here, 2.2 there")
    assert (gone.fine, gone.found) == (None, "1 alive; gone: 10.0.0.2")
    assert (room.fine, room.found) == (None, "8 CPUs, 0 GPUs are free, and 4 GPUs are wanted")
    assert all(one.fix for one in (version, gone, room))


def test_what_a_launcher_refuses() -> None:
    told = of_faults(
        [Fault("resources.gpu", "1 is wanted (--set resources.gpu=0)"), Fault("program.script", "no file")]
    )
    assert [(one.what, one.found, one.fix) for one in told] == [
        ("resources.gpu", "1 is wanted", "--set resources.gpu=0"),
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
    job = job_of(data={"cache": {"dir": "/c", "size": "20Gi"}})
    check = of_told(job, told("disk", what=what, place="/c", free=free, fault=fault))[f"disk: {what}"]
    assert check.fine is fine
    assert bool(check.fix) == (fine is not True)


@pytest.mark.parametrize(
    ("host", "by_ssh", "workdir", "data"),
    [
        ("", False, "give the command in another folder", "name a folder that is there, or a URL"),
        ("a", True, "name another with ssh.workdir", "copy it there, mount it on every host, or name a URL"),
        ("a", False, "have the job run on another disk there", "copy it there, mount it on every host, or name a URL"),
    ],
)
def test_what_mends_a_folder_is_worded_for_where_it_is(host: str, by_ssh: bool, workdir: str, data: str) -> None:
    every = [
        told("disk", host, what="workdir", place="/w", free=9 * GIB, fault="read-only"),
        told("disk", host, what="checkpoints", place="/c", free=1, fault=""),
        told("data", host, key="data.train", url="/none", fault="no such file"),
    ]
    found = of_probe(job_of(), [Outcome({"worker/0": host}, every)], knows_hosts=by_ssh)
    fixes = {one.what: one.fix for one in found}
    assert fixes["disk: workdir"] == f"make it writable, or {workdir}"
    assert fixes["disk: checkpoints"] == "make room there, or name another with checkpoint.dir"
    assert fixes["data.train"] == data


@pytest.mark.parametrize(
    ("found", "fine", "says", "fix"),
    [
        ({"bytes": 8 << 20, "seconds": 0.1}, True, "8 MiB read at 80 MiB/s", ""),
        ({"bytes": 4 << 20, "seconds": 2.0}, None, "4 MiB read at 2 MiB/s", "data.via"),
        ({"bytes": 0, "seconds": 0.1}, False, "http://h/x is empty", "data verify"),
        ({"fault": "HTTP 404 Not Found"}, False, "http://h/x cannot be read: HTTP 404 Not Found", "is the URL right"),
        ({"fault": "HTTP 403 Forbidden"}, False, "http://h/x cannot be read: HTTP 403 Forbidden", "secret_env"),
        ({"fault": "timed out"}, False, "http://h/x cannot be read: timed out", "can this host reach"),
        ({"fault": "the cache c does not serve it"}, False, "http://h/x cannot be read: the cache c", "data.via"),
        ({"untested": "no stoker"}, None, "http://h/x: not tried: no stoker", ""),
    ],
)
def test_data(found: dict[str, Any], fine: bool | None, says: str, fix: str) -> None:
    check = of_told(job_of(), told("data", key="data.train", url="http://me:word@h/x?token=1", **found))["data.train"]
    assert check.fine is fine
    assert check.found.startswith(says)
    assert fix in check.fix
    assert bool(fix) == bool(check.fix)


def test_gpus() -> None:
    job = job_of(resources={"gpu": 2})
    two = {"GPU-1": "H100", "GPU-2": "H100"}
    few = of_told(job, told("gpus", names={"GPU-1": "H100"}))["gpus"]
    assert (few.fine, few.found) == (False, "has 1 GPUs, and 2 are wanted")
    blind = of_told(job, told("gpus", names=two), told("torch", gpus=2), told("torch", gpus=0))["gpus"]
    assert (blind.fine, blind.found) == (False, "torch sees 0 of 2 GPUs")
    good = of_told(job, told("gpus", names=two), told("torch", version="2", gpus=2))["gpus"]
    assert (good.fine, good.found) == (True, "2 × H100; 2 wanted")
    more = {"GPU-3": "H100", "GPU-4": "H100"}
    both = [told("gpus", names=two), told("gpus", slot="worker/1", names=more)]
    assert of_told(job, *both)["gpus"].found == "4 × H100; 4 wanted"
    uneven = [told("gpus", names={**two, **more}), told("gpus", slot="worker/1", names={"GPU-3": "H100"})]
    assert of_told(job, *uneven)["gpus"].found == "a worker may use only 1 of 4 GPUs"


def test_of_the_slots_of_a_host_the_worst_is_told() -> None:
    read = {"key": "data.train", "url": "http://h/x"}
    fast, slow = ({**read, "bytes": 8 << 20, "seconds": seconds} for seconds in (0.1, 4.0))
    found = [told("data", slot=f"worker/{at}", **one) for at, one in enumerate((fast, {**read, "fault": "gone"}, slow))]
    assert of_told(job_of(), *found)["data.train"].found == "http://h/x cannot be read: gone"
    assert of_told(job_of(), found[2], found[0])["data.train"].found == "8 MiB read at 2 MiB/s"


def test_every_program_that_a_host_lacks_is_told() -> None:
    job = job_of(topology="mpi", program={"command": ["train"]})
    said = [one.found for one in of_looks(job, {"a": look()}, {"a": 1}) if one.what == "program"]
    assert [words[:13] for words in said] == ["has no progra", "has no mpirun"]


def test_a_probe_that_had_no_place_and_one_that_could_not_be_ended() -> None:
    outcome = Outcome({"worker/0": ""}, (), "it was ended after 120 s", reduces=True, waits="no node has 64 CPUs free")
    (room,) = of_probe(job_of(), [outcome], knows_hosts=False)
    assert (room.what, room.fine, room.found) == ("room", None, "the probe had no place: no node has 64 CPUs free")
    left = Outcome({}, (), left=UnavailableError("does not answer", where="node2"))
    (check,) = of_probe(job_of(), [left], knows_hosts=True)
    assert (check.what, check.fine, check.code) == ("probe", False, UnavailableError.exit_code)
    assert check.found.startswith("could not be ended: node2: does not answer")


def reduced(*every: Told, fault: str = "") -> list[Check]:
    hosts = {"worker/0": "a", "worker/1": "b"}
    return of_probe(job_of(workers=2), [Outcome(hosts, every, fault, reduces=True)], knows_hosts=True)


def test_the_all_reduce_is_as_slow_as_its_slowest_rank() -> None:
    both = [
        told("reduce", host, f"worker/{rank}", size=16 << 20, world=2, backend="gloo", seconds=seconds)
        for rank, (host, seconds) in enumerate((("a", 0.01), ("b", 0.02)))
    ]
    (check,) = reduced(*both)
    assert (check.fine, check.found) == (True, "2 ranks by gloo: 16 MiB in 20 ms; 800 MiB/s")
    assert bus_bandwidth(100, 1.0, 4) == 150
    slow = [one._replace(found={**one.found, "seconds": 2.0}) for one in both]
    (check,) = reduced(*slow)
    assert (check.fine, bool(check.fix)) == (None, True)


def test_an_all_reduce_that_fails_names_who_did_not_come() -> None:
    came = told("machine", "b", "worker/1", python="3")
    late, broken = reduced(told("reduce", fault="timed out", world=2, backend="gloo"), came)
    assert (late.found, late.code) == ("b did not come to it", JobFailedError.exit_code)
    assert (broken.host, broken.found) == ("a", "could not begin: timed out")
    (absent,) = reduced(fault="the network is down")[:1]
    assert (absent.host, absent.found) == ("a", "worker/0 did not come: the network is down")


def test_the_exit_code_is_that_of_the_weightiest() -> None:
    down = Check("host", False, "x", "y", "a", 5)
    bad = Check("torch", False, "x", "y", "a", 2)
    failed = Check("probe", False, "x", "y", "a", 4)
    _raise([Check("host", True, "x"), Check("clock", None, "odd", "fix")])
    for checks, kind in (
        ([failed, bad, down], UnavailableError),
        ([failed, bad], InputError),
        ([failed], JobFailedError),
    ):
        with pytest.raises(kind):
            _raise(checks)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_within_its_width(width: int) -> None:
    checks = [Check("host", True, "answers", host=f"node{number}") for number in range(20)]
    checks += [Check("data.train", True, f"{number} MiB/s", host=f"node{number}") for number in range(18)]
    checks.append(Check("data.train", False, "cannot be read " * 9, "can this host reach it? " * 6, "node18"))
    checks.append(Check("clock", None, "3 s off", "set it", "node19"))
    checks.append(Check("all-reduce", None, "not tried"))
    lines = list(table(checks, width))
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["✓", "host", "all", "20", "answers"]
    assert [line[0] for line in lines if line[0] != " "] == ["✓", "✓", "✓", "✓", "✓", "✗", "✓", "!", "–"]
    assert any("14 more" in line for line in lines)


def test_the_first_name_of_a_pattern() -> None:
    assert probe.first_name("http://h/a-{000..127}.{tar,idx}") == "http://h/a-000.tar"


# --- The probe's own reading, from real servers


def read(url: str, via: str | None = None, workdir: str = "/") -> dict[str, Any]:
    return probe.read_set({"via": via, "workdir": workdir}, url)


def test_sets_are_read_from_disks_servers_and_caches(tmp_path: Path) -> None:
    for name in ("set/manifest.json", "set/train-000.tar.idx.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "set" / "train-000.tar").write_bytes(bytes(3000))
    for url in ("set", f"{tmp_path}/set", f"{tmp_path}/set/train-{{000..127}}.tar", f"file://{tmp_path}/set"):
        assert read(url, workdir=str(tmp_path))["bytes"] == 3000
    shards = {"train-000.tar": bytes(5000)}
    with (
        origin({"/set/train-000.tar": bytes(5000), "/set/manifest.json": manifest(shards)}) as far,
        caching(tmp_path / "cache", ("pets", far.url)) as near,
    ):
        for via in (None, near):
            for url in (f"{far.url}/set", f"{far.url}/set/", f"{far.url}/set/train-{{000..127}}.tar"):
                assert read(url, via)["bytes"] == 5000
        with pytest.raises(OSError, match="does not serve it"):
            read("http://elsewhere/set", near)
    with pytest.raises(OSError, match="no shard in"):
        read(str(tmp_path / "cache"))


def test_a_server_that_trickles_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 20))
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(50):
                    self.wfile.write(b"x" * 100)
                    time.sleep(0.05)

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(probe, "READ_S", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Trickle) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        found = read(f"http://127.0.0.1:{server.server_port}/a.tar")
        server.shutdown()
        thread.join()
    assert found["seconds"] < 1.5
    assert 100 <= found["bytes"] < 3000


def test_ranks_meet_before_anyone_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("look_around", "reduce_together", "read_data"):
        monkeypatch.setattr(probe, name, lambda _, name=name: done.append(name))
    monkeypatch.setattr(probe.os, "_exit", lambda _: None)
    monkeypatch.setenv(probe.SETTINGS, "{}")
    monkeypatch.setenv("LOCAL_RANK", "0")
    probe.main()
    assert done == ["look_around", "reduce_together", "read_data"]


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, "abc"), ("", ""), ("-1", ""), ("2,0", "ca"), ("1,7,0", "b"), ("GPU-c, GPU-a", "ca"), ("MIG-x", "?")],
)
def test_gpus_that_a_program_may_use(monkeypatch: pytest.MonkeyPatch, visible: str | None, found: str) -> None:
    there = [[str(index), f"GPU-{letter}", letter] for index, letter in enumerate("abc")]
    monkeypatch.setattr(probe, "_all_gpus", lambda: there)
    assert "".join(probe.gpus(visible).values()).replace("MIG", "?") == found


def test_a_bucket_is_read_where_stoker_is_installed(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_environ(moto_url).items():
        monkeypatch.setenv(name, value)
    open_store("s3://bucket/doctor").put("a.tar", bytes(7000))
    assert read("s3://bucket/doctor/a.tar")["bytes"] == 7000
    monkeypatch.setitem(sys.modules, "stoker.storage", None)
    with pytest.raises(probe.UntestedError, match="only stoker can read s3://"):
        read("s3://bucket/doctor/a.tar")

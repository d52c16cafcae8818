"""From what was found on hosts, between them and by the probe, to checks: pure, each fault with its fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stoker.core.units import format_bytes, format_duration
from stoker.doctor.checks import Check
from stoker.errors import Fault, InputError, JobFailedError, StokerError, UnavailableError, without_secrets
from stoker.jobs.spec import Job
from stoker.launchers.ssh.client import Client
from stoker.launchers.ssh.preflight import MESH, Look, Trouble, Ways, client_of, modules, troubles

SKEW_S = 1.0
SKEW_FATAL_S = 900.0
"""From here on S3 refuses what was signed by this clock."""
DISK_LOW = 5 << 30
DISK_FULL = 100 << 20
REDUCE_SLOW = 50e6
DATA_SLOW = 5e6
DATA_ENOUGH = 1 << 20
"""Bytes; a rate says nothing of less."""
_ELSEWHERE = "copy it there, mount it on every host, or name a URL"
_HERE = "name a folder that is there, or a URL"
_BAD, _DOWN, _FAILED = InputError.exit_code, UnavailableError.exit_code, JobFailedError.exit_code


class Told(NamedTuple):
    """One thing that the probe told, and from where."""

    host: str
    slot: str
    rank: int
    subject: str
    found: Mapping[str, Any]


class Outcome(NamedTuple):
    """How a run of the probe went: which slots there were, on which host each, and why it failed if it did."""

    hosts: Mapping[str, str]
    told: Sequence[Told]
    fault: str = ""
    reduces: bool = False
    waits: str = ""
    """Why it had no place to the end."""
    left: StokerError | None = None
    """Why it could not be ended."""


# --- Hosts by ssh


def of_looks(job: Job, looks: Mapping[str, Look], slots: Mapping[str, int]) -> list[Check]:
    """Judge what was found on each host."""
    up = {host: look.found for host, look in looks.items() if look.trouble is None}
    checks = [_reached(look, client_of(job)) for look in looks.values()]
    for host, found in up.items():
        checks += _host_checks(job, host, found, list(troubles(job, looks[host], slots[host])))
    checks += of_versions("python", {host: found.get("version") for host, found in up.items()})
    torches = {host: (found.get("modules") or {}).get("torch") for host, found in up.items()}
    checks += of_versions("torch", torches) if "torch" in modules(job) else []
    checks += of_clocks({host: found["skew"] for host, found in up.items()}, "here")
    return checks


def _reached(look: Look, client: Client) -> Check:
    if look.trouble is None:
        return Check("host", True, "answers, and takes your key", host=look.host, code=_DOWN)
    fix = look.trouble.fix or f"try it by hand: {client.by_hand(look.host)}"
    return Check("host", False, look.trouble.what, fix, look.host, _DOWN)


def _host_checks(job: Job, host: str, found: Mapping[str, Any], wrong: Sequence[Trouble]) -> Iterator[Check]:
    later = "ssh.setup may make it" if job.ssh.setup else "the job does not need it"
    known = found.get("modules") or {}
    good = {"python": found.get("version"), "torch": known.get("torch")}
    good |= {"stoker": known.get("stoker")} if "stoker" in modules(job) else {}
    abouts = {trouble.about for trouble in wrong}
    for what, version in good.items():
        if what in abouts:
            yield from (_of_trouble(host, trouble) for trouble in wrong if trouble.about == what)
        elif version is None and "python" not in abouts:
            yield Check(what, None, f"not there; {later}", host=host)
        elif version is not None:
            yield Check(what, True, str(version), host=host)
    yield from (_of_trouble(host, trouble) for trouble in wrong if trouble.about not in good)


def _of_trouble(host: str, trouble: Trouble) -> Check:
    fixes = {"program": "install it there, or write its whole path"}
    fix = trouble.fix or fixes.get(trouble.about, _ELSEWHERE)
    return Check(trouble.about, False, trouble.what, fix, host, _BAD)


def of_ways(job: Job, ways: Ways, hosts: Sequence[str]) -> list[Check]:
    """Judge what is between hosts."""
    first = hosts[0]
    wrong = [(host, trouble) for host, every in ways.troubles.items() for trouble in every]
    checks = [_of_trouble(host, trouble) for host, trouble in wrong]
    if not any(trouble.about == "port" for _, trouble in wrong):
        free = f"{ways.port} is free" if job.port or len(hosts) > 1 else "any will do"
        checks.insert(0, Check("port", True, free, host=first))
    if len(hosts) > 1 and not any(trouble.about == "network" for _, trouble in wrong):
        some = "" if len(hosts) <= MESH else f"; of more than {MESH} hosts not every pair is tried"
        whom = "every other" if len(hosts) <= MESH else "the first and the next"
        checks += [Check("network", True, f"reaches {whom}{some}", host=host) for host in hosts]
    return checks


def of_port(port: int, *, is_free: bool) -> Check:
    """Judge a port of this machine."""
    if is_free:
        return Check("port", True, f"{port} is free")
    return Check("port", False, f"{port} is taken", "--set port=… names another", code=_BAD)


# --- What is to be the same everywhere


def of_versions(what: str, versions: Mapping[str, str | None]) -> list[Check]:
    """Compare the versions of Python or torch: another minor one of torch is a fault, all else is odd."""
    there = {host: version for host, version in versions.items() if version}
    if len(set(there.values())) < 2:
        return []
    by_version: dict[str, list[str]] = {}
    for host, version in there.items():
        by_version.setdefault(version, []).append(host)
    told = "; ".join(f"{version} on {_some(hosts)}" for version, hosts in sorted(by_version.items()))
    minors = {tuple(version.split("+")[0].split(".")[:2]) for version in there.values()}
    fatal = what == "torch" and len(minors) > 1
    return [
        Check(f"same {what}", False if fatal else None, told, f"install the same {what} on all hosts", code=_BAD),
    ]


def _some(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 3 else f"{', '.join(hosts[:2])} and {len(hosts) - 2} more"


def of_clocks(skews: Mapping[str, float], origin: str) -> list[Check]:
    """Judge how far clocks are off."""
    checks = []
    for host, skew in skews.items():
        off = abs(skew)
        fine = True if off <= SKEW_S else None if off <= SKEW_FATAL_S else False
        if fine:
            checks.append(Check("clock", True, f"less than {SKEW_S:g} s off", host=host))
            continue
        ahead = "ahead of" if skew > 0 else "behind"
        why = "" if fine is None else "; S3 refuses requests from a clock that is 15 min off"
        amount = f"{off:.1f} s" if off < 60 else format_duration(round(off))
        told = f"{amount} {ahead} {origin}{why}"
        checks.append(Check("clock", fine, told, "keep time there: timedatectl set-ntp true", host, _BAD))
    return checks


# --- Ray


class Cluster(NamedTuple):
    """What a Ray cluster tells of itself, and what the job would have of it."""

    address: str
    here: str
    there: str
    nodes: Mapping[str, str]
    free: Mapping[str, float]
    bundle: Mapping[str, float]
    workers: int


def of_cluster(cluster: Cluster) -> list[Check]:
    """Judge a Ray cluster; that there is no room now is odd, for the job would wait."""
    checks = [Check("cluster", True, f"{cluster.address} answers", code=_DOWN)]
    if cluster.there == cluster.here:
        checks.append(Check("ray", True, cluster.here))
    else:
        told = f"{cluster.here} here, {cluster.there} there"
        checks.append(Check("ray", None, told, f"pip install 'ray[default]=={cluster.there}' here"))
    alive = [node for node, state in cluster.nodes.items() if state == "alive"]
    if gone := sorted(set(cluster.nodes) - set(alive)):
        told = f"{len(alive)} alive; gone: {_some(gone)}"
        checks.append(Check("nodes", None, told, "if they are wanted, start Ray there again: ray start --address=…"))
    elif alive:
        checks.append(Check("nodes", True, f"{len(alive)} alive"))
    if cluster.free:
        checks.append(_room(cluster))
    return checks


def short_of(cluster: Cluster) -> dict[str, float]:
    """Tell of which resources less is free than the job wants."""
    counted = {name: each * cluster.workers for name, each in cluster.bundle.items() if name in ("CPU", "GPU")}
    return {name: many for name, many in counted.items() if cluster.free and many > cluster.free.get(name, 0.0)}


def _room(cluster: Cluster) -> Check:
    shown = [name for name in ("CPU", "GPU") if name in cluster.free or name in cluster.bundle]
    free = ", ".join(f"{cluster.free.get(name, 0.0):g} {name}s" for name in shown)
    if short := short_of(cluster):
        wanted = ", ".join(f"{many:g} {name}s" for name, many in short.items())
        fix = "the job would wait: --set workers=… for fewer, or let others end, or the cluster grow"
        return Check("room", None, f"{free} are free, and {wanted} are wanted", fix)
    return Check("room", True, f"{free} are free")


# --- What the launcher refuses


def of_faults(faults: Iterable[Fault]) -> list[Check]:
    """Tell what a launcher would refuse of the job; what stands in brackets at the end of a fault mends it."""
    checks = []
    for fault in faults:
        what, _, fix = (
            fault.what.removesuffix(")").rpartition(" (") if fault.what.endswith(")") else (fault.what, "", "")
        )
        if fault.path.startswith("data."):
            fix = fix or _HERE  # where it is not there on others, a look at them tells it
        own = f"change it in the job file, or with --set {fault.path}=…" if fault.path else "change the job file"
        checks.append(Check(fault.path or "job", False, what, fix or own, code=_BAD))
    return checks


# --- What the probe told


def of_probe(job: Job, outcomes: Sequence[Outcome], *, knows_hosts: bool) -> list[Check]:
    """Judge what the probe told; `knows_hosts`, where the hosts were looked at before."""
    told = [one for outcome in outcomes for one in outcome.told]
    hosts = list(dict.fromkeys(one.host for one in told))
    slots = {host: len({one.slot for one in told if one.host == host}) for host in hosts}
    checks = [check for outcome in outcomes for check in _absent(outcome)]
    if not knows_hosts:
        checks += _machines(told)
    checks += [check for host in hosts for check in _gpus(job, host, slots[host], told)]
    disks = (_disk(job, one, by_ssh=knows_hosts) for one in told if one.subject == "disk")
    checks += list(dict.fromkeys(disks))
    if "://" in (job.checkpoint.dir or ""):
        checks.append(Check("checkpoints", None, "a bucket: not tried, for that would write to it"))
    checks += _worst(told)
    for outcome in outcomes:
        checks += _reduced(outcome)
    return checks


def _absent(outcome: Outcome) -> Iterator[Check]:
    """Tell which slots never came, and what the launcher says of that."""
    if outcome.left is not None:
        fix = f"what may be left there: {outcome.left.hint or 'it ends by itself once it is alone'}"
        yield Check("probe", False, f"could not be ended: {outcome.left}", fix, "", outcome.left.exit_code)
    if outcome.waits:
        fix = "the job would wait as well: --set workers=… or resources for less, or let others end"
        yield Check("room", None, f"the probe had no place: {outcome.waits}", fix)
        return
    came = {one.slot for one in outcome.told}
    missing = {slot: host for slot, host in outcome.hosts.items() if slot not in came}
    for slot, host in missing.items():
        why = outcome.fault or "it said nothing"
        yield Check("probe", False, f"{slot} did not come: {why}", _PROBE_FIX, host, _FAILED)
    if not missing and outcome.fault and not any("fault" in one.found for one in outcome.told):
        yield Check("probe", False, outcome.fault, _PROBE_FIX, "", _FAILED)


def _machines(told: Sequence[Told]) -> list[Check]:
    """Tell of hosts that nobody looked at before."""
    pythons = {one.host: one.found["python"] for one in told if one.subject == "machine"}
    torches = {one.host: one.found.get("version") for one in told if one.subject == "torch"}
    clocks = {one.host: float(one.found["at"]) for one in told if one.subject == "clock"}
    checks = [Check("python", True, version, host=host) for host, version in pythons.items()]
    for host, version in torches.items():
        fix = "if you train with it: pip install 'stoker[torch]'"
        lacks = Check("torch", None, "not there", fix, host)
        checks.append(Check("torch", True, version, host=host) if version else lacks)
    checks += [*of_versions("python", pythons), *of_versions("torch", torches)]
    if len(clocks) > 1:  # told right after a barrier
        first, *_ = clocks
        checks += of_clocks({host: at - clocks[first] for host, at in clocks.items()}, first)
    return checks


def _gpus(job: Job, host: str, slots: int, told: Sequence[Told]) -> Iterator[Check]:
    mine = [one for one in told if one.host == host]
    owns = [dict(one.found["names"]) for one in mine if one.subject == "gpus"]
    if not owns:
        return
    names = list({uuid: name for own in owns for uuid, name in own.items()}.values())
    fewest = min(map(len, owns))
    seen = [int(one.found["gpus"]) for one in mine if one.subject == "torch" and "gpus" in one.found]
    wanted = job.resources.gpu * slots
    if len(names) < wanted:
        fix = "is the driver there (nvidia-smi)? Or --set resources.gpu=0"
        yield Check("gpus", False, f"has {len(names)} GPUs, and {wanted} are wanted", fix, host, _BAD)
    elif wanted and fewest < job.resources.gpu:
        fix = "what sets CUDA_VISIBLE_DEVICES there: env, or a scheduler?"
        yield Check("gpus", False, f"a worker may use only {fewest} of {len(names)} GPUs", fix, host, _BAD)
    elif wanted and seen and min(seen) < job.resources.gpu:
        fix = "install a torch that is built for CUDA, and for the driver that nvidia-smi shows"
        yield Check("gpus", False, f"torch sees {min(seen)} of {len(names)} GPUs", fix, host, _BAD)
    else:
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none"
        yield Check("gpus", True, f"{kinds}; {wanted or 'none'} wanted", host=host)


def _disk(job: Job, one: Told, *, by_ssh: bool) -> Check:
    place, free, what = str(one.found["place"]), int(one.found["free"]), str(one.found["what"])
    name, other = f"disk: {what}", _another_folder(what, one.host, by_ssh=by_ssh)
    if one.found["fault"]:
        fix = f"make it writable, or {other}"
        return Check(name, False, f"{place} cannot be used: {one.found['fault']}", fix, one.host, _BAD)
    found = f"{format_bytes(free)} free in {place}"
    if free < DISK_FULL:
        return Check(name, False, found, f"make room there, or {other}", one.host, _BAD)
    if what == "cache" and job.data.cache.size and free < job.data.cache.size:
        fix = f"the cache may take {format_bytes(job.data.cache.size)}: make room, or lower data.cache.size"
        return Check(name, None, found, fix, one.host)
    if free < DISK_LOW:
        return Check(name, None, found, f"that is little: make room, or {other}", one.host)
    return Check(name, True, found, host=one.host)


def _another_folder(what: str, host: str, *, by_ssh: bool) -> str:
    """Say how a folder on another disk is taken; no host is this machine."""
    keys = {"checkpoints": "checkpoint.dir", "cache": "data.cache.dir"}
    if key := "ssh.workdir" if by_ssh and what == "workdir" else keys.get(what):
        return f"name another with {key}"
    return "have the job run on another disk there" if host else "give the command in another folder"


def _worst(told: Sequence[Told]) -> list[Check]:
    """Judge each set on each host by the slot that fares worst with it."""
    order = (False, None, True)

    def badness(one: Told) -> tuple[int, float]:
        rate = one.found.get("bytes", 0) / max(one.found.get("seconds", 0.0), 1e-9)
        return order.index(_data(one).fine), rate

    by_host: dict[tuple[str, str], Told] = {}
    for one in sorted((one for one in told if one.subject == "data"), key=badness):
        by_host.setdefault((str(one.found["key"]), one.host), one)
    return [_data(one) for one in sorted(by_host.values(), key=lambda one: (str(one.found["key"]), one.slot))]


def _data(one: Told) -> Check:
    found, key = one.found, str(one.found["key"])
    url = without_secrets(str(found["url"]))
    if "untested" in found:
        return Check(key, None, f"{url}: not tried: {found['untested']}", host=one.host)
    if "fault" in found:
        fault = without_secrets(str(found["fault"]))
        return Check(key, False, f"{url} cannot be read: {fault}", _data_fix(url, fault, one.host), one.host, _BAD)
    size, seconds = int(found["bytes"]), float(found["seconds"])
    rate = size / max(seconds, 1e-9)
    told = f"{format_bytes(size)} read at {format_bytes(rate)}/s"
    if not size:
        return Check(key, False, f"{url} is empty", "was it written to its end? stoker data verify", one.host, _BAD)
    if rate < DATA_SLOW and size >= DATA_ENOUGH:
        fix = "keep shards near: data.cache.dir, or a shared cache with data.via (stoker data cache)"
        return Check(key, None, told, fix, one.host)
    return Check(key, True, told, host=one.host)


def _data_fix(url: str, fault: str, host: str) -> str:
    """Say what mends a set that cannot be read, by how it failed; no host is this machine."""
    if "://" not in url:
        return _ELSEWHERE if host else _HERE
    if "HTTP 404" in fault or "NotFound" in fault or "is not there" in fault:
        return "nothing lies there: is the URL right, and the set written to its end?"
    if any(sign in fault for sign in ("HTTP 401", "HTTP 403", "denied", "credential", "Credential")):
        return "give the job what it needs to log in: env, secret_env, or a login in the URL"
    if "does not serve" in fault:
        return "name the origin when you start the cache (stoker data cache), or leave data.via away"
    return (
        "can this host reach the server? A firewall, a name that it does not know, a proxy variable in its environment?"
    )


def _reduced(outcome: Outcome) -> Iterator[Check]:
    """Judge the all-reduce: as slow as its slowest rank."""
    if not outcome.reduces or not outcome.told:
        return
    results = [one for one in outcome.told if one.subject == "reduce"]
    if wrong := [one for one in results if "fault" in one.found]:
        met = {one.host for one in outcome.told if one.subject == "met"}
        came = {one.slot for one in results}
        late = list(dict.fromkeys(host or slot for slot, host in outcome.hosts.items() if slot not in came))
        if late:
            yield Check("all-reduce", False, f"{_some(late)} did not come to it", _REDUCE_FIX, code=_FAILED)
        for one in wrong:
            when = "broke off" if one.host in met else "could not begin"
            yield Check("all-reduce", False, f"{when}: {one.found['fault']}", _REDUCE_FIX, one.host, _FAILED)
        return
    if not results:
        yield Check("all-reduce", False, outcome.fault or "nobody told a result", _REDUCE_FIX, code=_FAILED)
        return
    world, backend = int(results[0].found["world"]), str(results[0].found["backend"])
    sizes: dict[int, float] = {}
    for one in results:
        size = int(one.found["size"])
        sizes[size] = max(sizes.get(size, 0.0), float(one.found["seconds"]))
    if world == 1:
        yield Check("all-reduce", None, "one rank has nothing to add up with")
        return
    times = ", ".join(f"{format_bytes(size)} in {1000 * took:.3g} ms" for size, took in sorted(sizes.items()))
    best = max(bus_bandwidth(size, took, world) for size, took in sizes.items())
    found = f"{world} ranks by {backend}: {times}; {format_bytes(best)}/s"
    slow = best < REDUCE_SLOW
    yield Check("all-reduce", None if slow else True, found, _SLOW_FIX if slow else "")


_PROBE_FIX = "what the probe met, a job would meet: mend that first"
_REDUCE_FIX = "let hosts through to each other on every port, or set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in env"
_SLOW_FIX = "is it the fast network? GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in env names the interface"


def bus_bandwidth(size: int, seconds: float, world: int) -> float:
    """Give what the slowest link carried, in bytes per second: size / time × 2 (n − 1) / n, as nccl-tests has it."""
    return size / max(seconds, 1e-9) * 2 * (world - 1) / world

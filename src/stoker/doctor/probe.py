"""The probe that `stoker doctor` runs as a job: checks machine, disks, all-reduce and data where a job would run.

A single file for Python 3.8 and later that needs only the standard library, and uses torch if it is installed. Results
are written to standard output as events, one per subject, as soon as they are known.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import fcntl
import importlib
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK_NAME = "doctor"
"""The name of the marks that the probe writes."""
SETTINGS_ENV = "DOCTOR_SETTINGS"
"""The environment variable with the settings. URLs in it may contain credentials: the run folder must be private."""
NOT_SERVED = "does not serve"
"""In the error about a URL that the caching proxy has no origin for."""
READ_TIME_S = 2.0
HTTP_TIMEOUT_S = 10.0
DATASET_TIMEOUT_S = 20.0
"""For one dataset, in case its server or its disk does not respond."""
REDUCE_TIME_S = 0.5
RENDEZVOUS_TIMEOUT_S = 45.0
REDUCE_SIZES_BYTES = (1 << 20, 16 << 20)
_CHUNK_BYTES = 1 << 20
_HTTP_CHUNK_BYTES = 1 << 16
_EVENT_PREFIX = "@stoker "
_SIOCGIFADDR = 0x8915
_BRACES = re.compile(r"\{([^{}]*)\}")
_SHARD_NAME = re.compile(r"\.tar|tfrecord|-of-\d")
_seq = itertools.count()


def report(subject: str, **fields: Any) -> None:
    """Write one event with a single write."""
    event = {
        "v": 1,
        "t": round(time.time(), 6),
        "slot": os.environ.get("STOKER_SLOT", ""),
        "rank": _env_int("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        "attempt": _env_int("STOKER_ATTEMPT"),
        "pid": os.getpid(),
        "seq": next(_seq),
        "k": "mark",
        "name": MARK_NAME,
        "subject": subject,
        "on": _host_address(),
    }
    os.write(1, (_EVENT_PREFIX + json.dumps({**event, **fields}) + "\n").encode())


def _env_int(*names: str, default: int = 0) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def _host_address() -> str:
    """Return the address of the network interface that ranks use; host names may not be unique."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            return socket.inet_ntoa(packed[20:24])
    except OSError:
        return socket.gethostname()


def _describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    reason = getattr(error, "reason", error)
    lines = str(getattr(reason, "strerror", None) or reason).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


# --- This machine


def report_machine(settings: dict[str, Any]) -> None:
    """Report the Python, cores, GPUs and disks of this machine."""
    report("machine", python=sys.version.split()[0], executable=sys.executable, cores=len(os.sched_getaffinity(0)))
    report("gpus", names=gpu_models(os.environ.get("CUDA_VISIBLE_DEVICES")))
    for what, path in settings["folders"].items():
        if what != "checkpoints" or settings["checkpoints_on"] in ("", os.environ.get("STOKER_SLOT", "")):
            report("disk", what=what, **check_disk(_resolve(settings, path)))


def gpu_models(visible: str | None) -> dict[str, str]:
    """Return the names of the GPUs that a program may use, by UUID; `visible` is CUDA_VISIBLE_DEVICES."""
    gpus = _list_gpus()
    if visible is None:
        return {uuid: name for _, uuid, name in gpus}
    visible_names: dict[str, str] = {}
    for entry in map(str.strip, visible.split(",")):
        # Like CUDA: an index or a prefix of a UUID; GPUs after an invalid entry are ignored.
        matches = {uuid: name for index, uuid, name in gpus if entry and entry in (index, uuid[: len(entry)])}
        if entry.startswith("MIG-"):
            matches = {entry: "MIG"}
        if not matches:
            break
        visible_names.update(matches)
    return visible_names


def _list_gpus() -> list[list[str]]:
    """Return index, UUID and name of each GPU; without nvidia-smi, from the device files of the driver."""
    try:
        argv = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
        completed = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        if completed.returncode == 0:
            rows = [[cell.strip() for cell in line.split(",", 2)] for line in completed.stdout.splitlines()]
            return [row for row in rows if len(row) == 3]
    except (OSError, subprocess.SubprocessError):
        pass
    files = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    return [[name[6:], name, "GPU"] for name in files]


def check_disk(path: Path) -> dict[str, Any]:
    """Return the free space for a directory that may not exist yet, and whether it is writable."""
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    fault = ""
    if not existing.is_dir():
        fault = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        fault = f"{existing} is not writable"
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return {"place": str(path), "free": 0, "fault": fault or _describe_error(error)}
    return {"place": str(path), "free": free, "fault": fault}


def _resolve(settings: dict[str, Any], path: str) -> Path:
    """Resolve a path like the job: relative to its working directory, which is relative to the home directory."""
    return Path(os.path.normpath(Path.home() / settings["workdir"] / path))


# --- Data


def report_data(settings: dict[str, Any]) -> None:
    """Read a part of every dataset and report the throughput."""
    for key, url in settings["data"].items():
        try:
            # In a thread that may be abandoned: a read from a hanging disk cannot be interrupted.
            reading = concurrent.futures.ThreadPoolExecutor(1).submit(read_dataset, settings, url)
            report("data", key=key, **reading.result(DATASET_TIMEOUT_S))
        except SkippedError as reason:
            report("data", key=key, url=url, untested=str(reason))
        except concurrent.futures.TimeoutError as error:
            report("data", key=key, url=url, fault=str(error) or f"timed out after {DATASET_TIMEOUT_S:g} s")
        except Exception as error:  # the job would get the same error
            report("data", key=key, url=url, fault=_describe_error(error), error=type(error).__name__)


class SkippedError(Exception):
    """The test is not possible here."""


def read_dataset(settings: dict[str, Any], url: str) -> dict[str, Any]:
    """Find one shard of a dataset, and read it for some seconds."""
    name = first_of_pattern(url)
    if settings["via"]:
        name = cache_url(name, settings["via"])
    if "://" not in name or name.startswith("file://"):
        local = urllib.parse.unquote(name[7:]) if name.startswith("file://") else name
        path = _resolve(settings, local)
        return {"url": url, **measure_throughput(lambda: read_file_chunks(find_shard(path)))}
    if name.startswith(("http://", "https://")):
        shard = find_http_shard(name)
        return {"url": url, **measure_throughput(lambda: read_http_chunks(shard))}
    return {"url": url, **measure_throughput(lambda: read_bucket_chunks(name))}


def first_of_pattern(pattern: str) -> str:
    """Return the first name that a brace pattern expands to."""
    while True:
        match = _BRACES.search(pattern)
        if match is None:
            return pattern
        pattern = pattern[: match.start()] + re.split(r"\.\.|,", match[1])[0] + pattern[match.end() :]


def cache_url(url: str, via: str) -> str:
    """Return the URL at which a caching proxy serves another URL."""
    with _open_url(f"{via.rstrip('/')}/-/origins") as response:
        origins = {origin["url"].rstrip("/"): origin["name"] for origin in json.load(response)}
    for origin in sorted(origins, key=len, reverse=True):
        if url.rstrip("/") == origin or url.startswith(f"{origin}/"):
            return "/".join(part for part in (via.rstrip("/"), origins[origin], url[len(origin) :].strip("/")) if part)
    raise OSError(f"the cache {via} {NOT_SERVED} it (it serves {', '.join(origins) or 'nothing'})")


def find_shard(path: Path) -> Path:
    """Find a shard in a directory."""
    if not path.is_dir():
        return path
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if _SHARD_NAME.search(name) and not name.endswith((".idx", ".json")):
                return Path(folder, name)
    raise FileNotFoundError(2, f"no shard found in {path}")


def find_http_shard(url: str) -> str:
    """Return the URL of a shard: the URL itself, or the first shard in its manifest."""
    base, _, query = url.partition("?")
    if _SHARD_NAME.search(base.rstrip("/").rpartition("/")[2]):
        return url
    folder, suffix = base.rstrip("/"), f"?{query}" if query else ""
    with _open_url(f"{folder}/manifest.json{suffix}") as response:
        shards = json.load(response)["shards"]
    return f"{folder}/{urllib.parse.quote(shards[0]['name'])}{suffix}"


def _open_url(url: str) -> Any:
    """Open a URL; send credentials in it as basic authentication."""
    parts = urllib.parse.urlsplit(url)
    headers = {"User-Agent": "stoker-doctor"}
    if parts.username is not None:
        import base64

        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=HTTP_TIMEOUT_S)


def read_file_chunks(path: Path) -> Iterator[int]:
    """Read a file and yield the size of each chunk."""
    with open(path, "rb", buffering=0) as file:
        while True:
            data = file.read(_CHUNK_BYTES)
            if not data:
                return
            yield len(data)


def read_http_chunks(url: str) -> Iterator[int]:
    """Read from a web server and yield the size of each chunk."""
    with _open_url(url) as response:
        while True:
            data = response.read1(_HTTP_CHUNK_BYTES)  # returns what has arrived, without waiting for a full chunk
            if not data:
                return
            yield len(data)


def read_bucket_chunks(url: str) -> Iterator[int]:
    """Read from a bucket with stoker, which signs requests, and yield the size of each chunk."""
    try:
        storage = importlib.import_module("stoker.storage")
    except ImportError:
        scheme = url.partition("://")[0]
        raise SkippedError(f"{scheme}:// can be read only with stoker, which is not installed there") from None
    folder, name = url, ""
    if _SHARD_NAME.search(url.rpartition("/")[2]):
        split_url = getattr(storage, "split_url", None) or storage.split  # the name in older versions
        folder, name = split_url(url)
    store = storage.open_store(folder)
    if not name:
        name = json.loads(store.get("manifest.json"))["shards"][0]["name"]
    size = store.size(name)
    for start in range(0, size, _CHUNK_BYTES):
        yield len(store.range(name, start, min(_CHUNK_BYTES, size - start)))


def measure_throughput(read_chunks: Callable[[], Iterator[int]]) -> dict[str, Any]:
    """Read for some seconds; return the bytes read and the time."""
    began, size = time.monotonic(), 0
    for chunk in read_chunks():
        size += chunk
        if time.monotonic() - began > READ_TIME_S:
            break
    return {"bytes": size, "seconds": round(time.monotonic() - began, 6)}


# --- All-reduce


def measure_all_reduce(settings: dict[str, Any]) -> None:
    """All-reduce tensors over all ranks, and report how long it takes."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        report("torch", fault=_describe_error(error))
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report("torch", version=torch.__version__, gpus=count)
    world = _env_int("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", default=1)
    if not settings["reduce"] or not any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        return
    rank = _env_int("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    local = _env_int("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", local)):
        os.environ.setdefault(name, str(value))
    backend = "nccl" if count and settings["gpus"] else "gloo"
    device = f"cuda:{local % count}" if backend == "nccl" else "cpu"
    dist = torch.distributed
    try:
        if backend == "nccl":
            torch.cuda.set_device(device)  # otherwise every rank also allocates memory on the first GPU
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        report("met", world=world, backend=backend)
        for size in REDUCE_SIZES_BYTES:
            tensor = torch.ones(size // 4, device=device)
            dist.all_reduce(tensor)
            if int(tensor[0].item()) != world:
                raise ArithmeticError(f"all-reduce of {world} ones returned {tensor[0].item()}")
            report("reduce", size=size, world=world, backend=backend, seconds=_time_all_reduce(torch, dist, tensor))
    except Exception as error:  # the job would get the same error
        report("reduce", fault=_describe_error(error), world=world, backend=backend)
        return
    with contextlib.suppress(Exception):  # the first rank to finish may be gone before the others
        dist.barrier()
        report("clock", at=time.time())
        dist.destroy_process_group()


def _time_all_reduce(torch: Any, dist: Any, tensor: Any) -> float:
    """Return the mean time of an all-reduce, over as many as fit into REDUCE_TIME_S; the same number on all ranks."""

    def run(times: int) -> float:
        dist.barrier()
        began = time.monotonic()
        for _ in range(times):
            tensor.fill_(1.0)
            dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return (time.monotonic() - began) / times

    slowest = torch.tensor([run(1)], device=tensor.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return run(max(1, min(50, int(REDUCE_TIME_S / max(slowest.item(), 1e-4)))))


def main() -> None:
    """Run all tests; only the first process of each slot tests the machine and the data.

    Data is read last, so that ranks do not wait for one whose data does not arrive.
    """
    settings = json.loads(os.environ[SETTINGS_ENV])
    is_first = _env_int("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") == 0
    if is_first:
        report_machine(settings)
    measure_all_reduce(settings)
    if is_first:
        report_data(settings)
    os._exit(0)  # everything is reported; skip the exit handlers of libraries


if __name__ == "__main__":
    main()

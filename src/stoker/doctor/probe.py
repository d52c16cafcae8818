"""What `stoker doctor` sends through a launcher as a job: looks around where the job would run, reduces, reads, tells.

One file on the standard library alone, for Python 3.8 and later, with torch where it is there: it needs nothing of ours
to be installed. What it finds goes to standard output as events, one for each subject, as soon as it is known.
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

NAME = "doctor"
"""The mark by which these events are known."""
SETTINGS = "DOCTOR_SETTINGS"
"""The variable that says what to look at. URLs in it may hold a login, so the run's folder is for its user alone."""
READ_S = 2.0
ANSWER_S = 10.0
SET_S = 20.0
"""For one set, whatever keeps its server or its disk from answering."""
REDUCE_S = 0.5
MEET_S = 45.0
SIZES = (1 << 20, 16 << 20)
_CHUNK = 1 << 20
_PIECE = 1 << 16
_PREFIX = "@stoker "
_SIOCGIFADDR = 0x8915
_GROUP = re.compile(r"\{([^{}]*)\}")
_SHARD = re.compile(r"\.tar|tfrecord|-of-\d")
_seq = itertools.count()


def tell(subject: str, **found: Any) -> None:
    """Write one event, in one piece."""
    event = {
        "v": 1,
        "t": round(time.time(), 6),
        "slot": os.environ.get("STOKER_SLOT", ""),
        "rank": _number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        "attempt": _number("STOKER_ATTEMPT"),
        "pid": os.getpid(),
        "seq": next(_seq),
        "k": "mark",
        "name": NAME,
        "subject": subject,
        "on": _name(),
    }
    os.write(1, (_PREFIX + json.dumps({**event, **found}) + "\n").encode())


def _number(*names: str, default: int = 0) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def _name() -> str:
    """Name this machine: by the address of the interface that ranks use, for host names need not differ."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            return socket.inet_ntoa(packed[20:24])
    except OSError:
        return socket.gethostname()


def _short(error: BaseException) -> str:
    """Give an error as a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    reason = getattr(error, "reason", error)
    words = str(getattr(reason, "strerror", None) or reason).strip().splitlines() or [type(error).__name__]
    return words[0][:300]


# --- This machine


def look_around(settings: dict[str, Any]) -> None:
    """Tell what this machine is and has."""
    tell("machine", python=sys.version.split()[0], executable=sys.executable, cores=len(os.sched_getaffinity(0)))
    tell("gpus", names=gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
    for what, place in settings["folders"].items():
        if what != "checkpoints" or settings["checkpoints_on"] in ("", os.environ.get("STOKER_SLOT", "")):
            tell("disk", what=what, **disk(_inside(settings, place)))


def gpus(visible: str | None) -> dict[str, str]:
    """Name the GPUs that programs here may use, by their UUIDs."""
    there = _all_gpus()
    if visible is None:
        return {uuid: name for _, uuid, name in there}
    found: dict[str, str] = {}
    for word in map(str.strip, visible.split(",")):
        # As CUDA has it: by number or by the beginning of a UUID, and nothing behind what is not there.
        mine = {uuid: name for index, uuid, name in there if word and word in (index, uuid[: len(word)])}
        if word.startswith("MIG-"):
            mine = {word: "MIG"}
        if not mine:
            break
        found.update(mine)
    return found


def _all_gpus() -> list[list[str]]:
    """Give number, UUID and name of each GPU; where nobody tells, the driver's device files have numbers."""
    try:
        asked = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0:
            rows = [[word.strip() for word in line.split(",", 2)] for line in done.stdout.splitlines()]
            return [row for row in rows if len(row) == 3]
    except (OSError, subprocess.SubprocessError):
        pass
    files = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    return [[name[6:], name, "GPU"] for name in files]


def disk(place: Path) -> dict[str, Any]:
    """Tell how much room there is for a folder that may not be there yet, and whether it can be written."""
    there = place
    while not os.path.lexists(there):
        there = there.parent
    fault = ""
    if not there.is_dir():
        fault = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        fault = f"{there} cannot be written"
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return {"place": str(place), "free": 0, "fault": fault or _short(error)}
    return {"place": str(place), "free": free, "fault": fault}


def _inside(settings: dict[str, Any], place: str) -> Path:
    """Give a path as the job sees it: a relative one starts at its working folder, and that at the home."""
    return Path(os.path.normpath(Path.home() / settings["workdir"] / place))


# --- Data


def read_data(settings: dict[str, Any]) -> None:
    """Read a little of every set, and tell how fast that goes."""
    for key, url in settings["data"].items():
        try:
            # In a thread, which may be left where it waits: a disk that hangs cannot be told to stop.
            reading = concurrent.futures.ThreadPoolExecutor(1).submit(read_set, settings, url)
            tell("data", key=key, **reading.result(SET_S))
        except UntestedError as why:
            tell("data", key=key, url=url, untested=str(why))
        except concurrent.futures.TimeoutError as error:
            tell("data", key=key, url=url, fault=str(error) or f"timed out after {SET_S:g} s")
        except Exception as error:  # whatever a server or a disk says, it is what the job would hear
            tell("data", key=key, url=url, fault=_short(error))


class UntestedError(Exception):
    """It cannot be known from here."""


def read_set(settings: dict[str, Any], url: str) -> dict[str, Any]:
    """Find one shard of a set, and read it for some seconds."""
    first = first_name(url)
    if settings["via"]:
        first = through(first, settings["via"])
    if "://" not in first or first.startswith("file://"):
        plain = urllib.parse.unquote(first[7:]) if first.startswith("file://") else first
        path = _inside(settings, plain)
        return {"url": url, **timed(lambda: pieces_of_file(a_shard(path)))}
    if first.startswith(("http://", "https://")):
        shard = a_web_shard(first)
        return {"url": url, **timed(lambda: pieces_of_web(shard))}
    return {"url": url, **timed(lambda: pieces_of_bucket(first))}


def first_name(pattern: str) -> str:
    """Give the first name that a brace pattern stands for."""
    while True:
        found = _GROUP.search(pattern)
        if found is None:
            return pattern
        pattern = pattern[: found.start()] + re.split(r"\.\.|,", found[1])[0] + pattern[found.end() :]


def through(url: str, via: str) -> str:
    """Give the URL at which a cache serves what lies at another."""
    with _opened(f"{via.rstrip('/')}/-/origins") as answer:
        origins = {one["url"].rstrip("/"): one["name"] for one in json.load(answer)}
    for origin in sorted(origins, key=len, reverse=True):
        if url.rstrip("/") == origin or url.startswith(f"{origin}/"):
            return "/".join(part for part in (via.rstrip("/"), origins[origin], url[len(origin) :].strip("/")) if part)
    raise OSError(f"the cache {via} does not serve it (it serves {', '.join(origins) or 'nothing'})")


def a_shard(path: Path) -> Path:
    """Find a shard in a folder."""
    if not path.is_dir():
        return path
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if _SHARD.search(name) and not name.endswith((".idx", ".json")):
                return Path(folder, name)
    raise FileNotFoundError(2, f"there is no shard in {path}")


def a_web_shard(url: str) -> str:
    """Find a shard of a set on a web server: it names one itself, or its manifest does."""
    bare, _, query = url.partition("?")
    if _SHARD.search(bare.rstrip("/").rpartition("/")[2]):
        return url
    folder, more = bare.rstrip("/"), f"?{query}" if query else ""
    with _opened(f"{folder}/manifest.json{more}") as answer:
        shards = json.load(answer)["shards"]
    return f"{folder}/{urllib.parse.quote(shards[0]['name'])}{more}"


def _opened(url: str) -> Any:
    """Ask a web server; a login in the URL is passed on, as browsers do."""
    parts = urllib.parse.urlsplit(url)
    headers = {"User-Agent": "stoker-doctor"}
    if parts.username is not None:
        import base64

        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_S)


def pieces_of_file(path: Path) -> Iterator[int]:
    """Read a file, and give the sizes of the pieces."""
    with open(path, "rb", buffering=0) as file:
        while True:
            data = file.read(_CHUNK)
            if not data:
                return
            yield len(data)


def pieces_of_web(url: str) -> Iterator[int]:
    """Read from a web server."""
    with _opened(url) as answer:
        while True:
            data = answer.read1(_PIECE)  # what is there, and not until so much is
            if not data:
                return
            yield len(data)


def pieces_of_bucket(url: str) -> Iterator[int]:
    """Read from a bucket, with stoker's own storage: nothing else here can sign a request."""
    try:
        storage = importlib.import_module("stoker.storage")
    except ImportError:
        scheme = url.partition("://")[0]
        raise UntestedError(f"only stoker can read {scheme}:// here, and it is not installed there") from None
    folder, name = url, ""
    if _SHARD.search(url.rpartition("/")[2]):
        folder, name = storage.split(url)
    store = storage.open_store(folder)
    if not name:
        name = json.loads(store.get("manifest.json"))["shards"][0]["name"]
    size = store.size(name)
    for start in range(0, size, _CHUNK):
        yield len(store.range(name, start, min(_CHUNK, size - start)))


def timed(pieces: Callable[[], Iterator[int]]) -> dict[str, Any]:
    """Read for some seconds; tell how much that was."""
    began, size = time.monotonic(), 0
    for piece in pieces():
        size += piece
        if time.monotonic() - began > READ_S:
            break
    return {"bytes": size, "seconds": round(time.monotonic() - began, 6)}


# --- Together


def reduce_together(settings: dict[str, Any]) -> None:
    """Have all ranks add up tensors, and tell how long that takes."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        tell("torch", fault=_short(error))
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell("torch", version=torch.__version__, gpus=count)
    world = _number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", default=1)
    if not settings["reduce"] or not any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        return
    rank = _number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    local = _number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", local)):
        os.environ.setdefault(name, str(value))
    backend = "nccl" if count and settings["gpus"] else "gloo"
    device = f"cuda:{local % count}" if backend == "nccl" else "cpu"
    dist = torch.distributed
    try:
        if backend == "nccl":
            torch.cuda.set_device(device)  # else all ranks also hold the first
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=MEET_S))
        tell("met", world=world, backend=backend)
        for size in SIZES:
            tensor = torch.ones(size // 4, device=device)
            dist.all_reduce(tensor)
            if int(tensor[0].item()) != world:
                raise ArithmeticError(f"the sum of {world} ones is {tensor[0].item()}")
            tell("reduce", size=size, world=world, backend=backend, seconds=_seconds_each(torch, dist, tensor))
    except Exception as error:  # whatever torch says, it is what the job would hear
        tell("reduce", fault=_short(error), world=world, backend=backend)
        return
    with contextlib.suppress(Exception):  # who is through first may be gone, when the others hear of it
        dist.barrier()
        tell("clock", at=time.time())
        dist.destroy_process_group()


def _seconds_each(torch: Any, dist: Any, tensor: Any) -> float:
    """Time one all-reduce, as a mean over as many as fit; all ranks do the same number."""

    def run(times: int) -> float:
        dist.barrier()
        began = time.monotonic()
        for _ in range(times):
            tensor.fill_(1.0)
            dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return (time.monotonic() - began) / times

    once = torch.tensor([run(1)], device=tensor.device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    return run(max(1, min(50, int(REDUCE_S / max(once.item(), 1e-4)))))


def main() -> None:
    """Look, reduce and read; only one process of each slot looks and reads.

    It reads last: ranks must not wait for one whose data does not come.
    """
    settings = json.loads(os.environ[SETTINGS])
    is_first = _number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") == 0
    if is_first:
        look_around(settings)
    reduce_together(settings)
    if is_first:
        read_data(settings)
    os._exit(0)  # all is told; what a library does on its way out is no result


if __name__ == "__main__":
    main()

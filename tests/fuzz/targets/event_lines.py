"""Logs of a run: programs print anything between, inside and instead of event lines."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.telemetry import analysis
from stoker.telemetry.events import split_line
from stoker.telemetry.reader import read_run
from tests.fuzz.limits import Target

LOGS = Path("logs").absolute()
LOGS.mkdir()


def run(data: bytes) -> None:
    """Read the log of a run and analyze its events as `job status` does."""
    (LOGS / "worker-0.0.log").write_bytes(data)
    events = read_run(LOGS).events
    analysis.verdict(events)
    analysis.stragglers(events)
    analysis.progress(events)
    analysis.eta(events)
    analysis.restarts(events)
    analysis.remarks(events)


def _event(kind: str, **fields: object) -> bytes:
    event = {"v": 1, "t": 1e9, "slot": "worker/0", "rank": 0, "attempt": 0, "seq": 0, "k": kind, **fields}
    return f"@stoker {json.dumps(event)}\n".encode()


VALID = b"".join(
    [
        b"hello\n",
        _event("mark", name="start", detail="x"),
        *(_event("heartbeat", t=1e9 + i, seq=i, step=i) for i in range(30)),
        *(_event("span", t=1e9 + i, name="step", start=1e9 + i, length=1.0, step=i) for i in range(30)),
        *(_event("scalar", t=1e9 + i, name="loss", value=1.5, step=i) for i in range(30)),
        _event("profile", cpu_pct=50.0, gpu=[]),
        b"bye",
    ]
)
assert len(split_line(VALID.decode())) > 90  # else the events are not in the format that the reader decodes
TARGET = Target(
    run,
    valid=[VALID],
    hostile=[
        b"@stoker ",
        b"@stoker {",
        b"@stoker null\n@stoker []\n@stoker 1\n",
        b"@stoker " + b"[" * 100_000 + b"\n",
        b"@stoker " + b'{"a":' * 100_000 + b"\n",
        b"@stoker {} " * 50_000,
        b"\r" * 1_000_000,
        b"\x1b[32mx" * 8_000 + b"\r\n",
        b"".join(b"\x1b[38;5;%dmx" % (number % 256) for number in range(8_000)) + b"\r\n",
        b"x" * 5_000_000,
        b"\xff\xfe\n" * 1000,
        _event("heartbeat", step=10**400),
        _event("heartbeat", step=float("nan")),
        _event("heartbeat", step="x", t="y"),
        _event("heartbeat", step=None, t=None, rank=[], slot={}, attempt=-1),
        _event("span", name=[], start={}, length="long", step=-1),
        _event("span", name="step", start=float("inf"), length=float("-inf"), step=1) * 3,
        _event("scalar", name="loss", value="NaN", step=1),
        _event("scalar", name="loss", value={"a": []}, step=1),
        _event("mark", name="plan", steps=-1, samples=0, detail=[[]]),
        _event("profile", cpu="a", gpus=[[None]], memory=-1),
        b"".join(_event("heartbeat", rank=i, step=i) for i in range(5_000)),
        b"".join(_event("heartbeat", attempt=i, step=0) for i in range(5_000)),
        VALID[:-300],
    ],
    tokens=[
        b"@stoker ",
        b"@stoker {}",
        b'"step":',
        b'"t":',
        b'"length":',
        b"1e999",
        b"-1",
        b"NaN",
        b"null",
        b"[]",
        b"\n",
        b"\r",
    ],
)

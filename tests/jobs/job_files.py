"""Job file texts, and the faults of invalid ones, for the tests of the job file."""

from __future__ import annotations

import json

import pytest

from stoker.errors import Fault, SpecError
from stoker.jobs.spec import parse_job

MINIMAL = "name: a\nprogram: {script: train.py}\n"


def minimal(**keys: object) -> str:
    """Return a minimal job file with further keys."""
    return json.dumps({"name": "a", "program": {"script": "train.py"}, **keys})


def parse_faults(text: str, *overrides: str) -> list[Fault]:
    """Parse an invalid job file and return its faults."""
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml", overrides)
    assert caught.value.where == "job.yaml"
    return list(caught.value.faults)


def check_faults(faults: list[Fault], expected: list[tuple[str, ...]]) -> None:
    """Check the key path of each fault, and the values that its message mentions."""
    assert [fault.path for fault in faults] == [path for path, *_ in expected]
    for fault, (_, *values) in zip(faults, expected, strict=True):
        for value in values:
            assert value in fault.what, fault

from __future__ import annotations

import re

import pytest

from stoker.jobs.spec import parse_job
from stoker.jobs.template import template

COMMENTED_OUT = re.compile(r"^( *)# ( *(?:[a-z_]+|OMP_NUM_THREADS): *(?=\S|$))", re.MULTILINE)


def test_it_loads() -> None:
    job = parse_job(template("pets", "shards/train", "shards/val"), "job.yaml")
    assert (job.name, job.data.train, job.data.val) == ("pets", "shards/train", "shards/val")
    assert (job.topology, job.workers, job.resources.gpu) == ("torchrun", 1, 0)


def test_it_loads_with_every_line_uncommented() -> None:
    text = template("pets", "http://data:8080/train", "http://data:8080/val")
    everything, count = COMMENTED_OUT.subn(r"\1\2", text)
    assert count >= 18
    assert not re.search(r"^ *# *[a-z]", everything, re.MULTILINE), everything
    job = parse_job(everything, "job.yaml")
    assert (job.checkpoint.keep, job.env, job.ssh.hosts) == (3, {"OMP_NUM_THREADS": "1"}, ("node1", "node2"))
    assert (job.tensorboard, job.kubernetes.namespace, job.resources.cpu) == (True, "training", 8)


@pytest.mark.parametrize(
    "place", ["a: b", "shards/{000..009}.tar", "{a,b}", "yes", "1e5", "# x", "it's", 'ü \\ "q"', "x" * 200]
)
def test_any_text_is_quoted(place: str) -> None:
    job = parse_job(template("pets", place, place), "job.yaml")
    assert (job.data.train, job.data.val) == (place, place)


def test_without_a_validation_set() -> None:
    text = template("pets", "shards/train", file="my.yaml")
    assert parse_job(text, "job.yaml").data.val is None
    assert "stoker job run my.yaml" in text
    assert max(map(len, text.splitlines())) <= 100

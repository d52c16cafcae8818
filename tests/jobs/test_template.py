from __future__ import annotations

import re

import pytest

from stoker.jobs.spec import parse_job
from stoker.jobs.template import render_template

COMMENTED_OUT = re.compile(r"^( *)# ( *(?:[a-z_]+|OMP_NUM_THREADS): *(?=\S|$))", re.MULTILINE)


def test_template_is_a_valid_job_file() -> None:
    job = parse_job(render_template("pets", "shards/train", "shards/val"), "job.yaml")
    assert (job.name, job.data.train, job.data.val) == ("pets", "shards/train", "shards/val")
    assert (job.topology, job.workers, job.resources.gpu) == ("torchrun", "auto", None)


def test_template_is_valid_with_every_line_uncommented() -> None:
    text = render_template("pets", "http://data:8080/train", "http://data:8080/val")
    uncommented, count = COMMENTED_OUT.subn(r"\1\2", text)
    assert count >= 18
    assert not re.search(r"^ *# *[a-z]", uncommented, re.MULTILINE), uncommented
    job = parse_job(uncommented, "job.yaml")
    assert (job.checkpoint.keep, job.env, job.ssh.hosts) == (3, {"OMP_NUM_THREADS": "1"}, ("node1", "node2"))
    assert (job.tensorboard, job.kubernetes.namespace, job.resources.cpu) == (True, "training", 8)


@pytest.mark.parametrize(
    "path", ["a: b", "shards/{000..009}.tar", "{a,b}", "yes", "1e5", "# x", "it's", 'ü \\ "q"', "x" * 200]
)
def test_any_path_is_quoted(path: str) -> None:
    job = parse_job(render_template("pets", path, path), "job.yaml")
    assert (job.data.train, job.data.val) == (path, path)


def test_template_without_a_validation_set() -> None:
    text = render_template("pets", "shards/train", file="my.yaml")
    assert parse_job(text, "job.yaml").data.val is None
    assert "stoker job run my.yaml" in text
    assert max(map(len, text.splitlines())) <= 100

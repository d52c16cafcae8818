"""`stoker init`: the job file for a shard set."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.jobs.spec import JobSpec, parse_job
from stoker.trainers.flags import parse_flags
from tests.support.servers import nginx
from tests.support.trees import make_dataset, make_tree, stoker


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_dataset(tmp_path / "pets", train=400, val=40)
    assert stoker("data", "convert", "pets", "shards") == 0
    return tmp_path


def read_job(path: str = "job.yaml") -> JobSpec:
    return parse_job(Path(path).read_text(), path)


def flags_of(job: JobSpec) -> dict[str, object]:
    """Return the flags as the trainer parses them."""
    args = parse_flags([str(arg) for arg in job.program.args], {"STOKER_DATA_TRAIN": "train"})
    return {name: getattr(args, name) for name in ("model", "size", "global_batch_size")}


@pytest.mark.parametrize("words", [(), ("shards/",), ("shards", "job.yaml"), ("job.yaml",), ("shards/train",)])
def test_job_file_fits_the_shard_set(words: tuple[str, ...]) -> None:
    assert stoker("init", *words) == 0
    job = read_job()
    assert (job.name, job.data.train, job.data.val) == ("pets", "shards/train", "shards/val")
    assert flags_of(job) == {"model": "small", "size": 24, "global_batch_size": 64}
    assert "1,200 training samples of 3 classes" in Path("job.yaml").read_text()
    assert stoker("job", "plan", "job.yaml") == 0


def test_missing_directory_of_the_job_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("init", "shards", "jobs/sub/job.yaml") == 2
    assert "jobs/sub: no such directory" in capsys.readouterr().err


def test_test_split_is_used_where_there_is_no_val_split(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "pets/val").rename(workspace / "pets/test")
    assert stoker("data", "convert", "pets", "other") == 0
    assert stoker("init", "other") == 0
    assert read_job().data.val == "other/test"
    assert "test" in capsys.readouterr().err.splitlines()[-1]


def test_set_without_validation_data(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(workspace / "flat/My Pets", {"ant": 20, "bee": 20})
    assert stoker("data", "convert", "flat/My Pets", "flat-shards") == 0
    assert stoker("init", "flat-shards", "flat.yaml") == 0
    assert "--val-fraction" in capsys.readouterr().err
    job = read_job("flat.yaml")
    assert (job.name, job.data.val) == ("my-pets", None)


def test_urls_of_the_job_may_differ_from_the_shards_that_are_read() -> None:
    assert stoker("init", "shards", "--train", "http://data:8080/pets/train", "--name", "mine") == 0
    job = read_job()
    assert (job.name, job.data.train, job.data.val) == (
        "mine",
        "http://data:8080/pets/train",
        "http://data:8080/pets/val",
    )
    assert flags_of(job)["size"] == 24


def test_remote_set_is_read_by_its_url(workspace: Path) -> None:
    with nginx(workspace / "shards") as url:
        assert stoker("init", f"{url}/train") == 0
        assert (read_job().data.train, read_job().data.val) == (f"{url}/train", f"{url}/val")
        assert flags_of(read_job())["size"] == 24


def test_missing_shards_are_an_error_only_if_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("init", "nowhere") == 2
    assert "nowhere: " in capsys.readouterr().err
    assert not Path("job.yaml").exists()
    assert stoker("init", "--train", "later/train") == 0
    assert (read_job().data.train, read_job().data.val) == ("later/train", "later/val")


def test_dash_writes_to_standard_output(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("shards/train", "-"), ("-",)):
        capsys.readouterr()
        assert stoker("init", *words) == 0
        assert parse_job(capsys.readouterr().out, "-").data.train == "shards/train"
    assert not {"-", "job.yaml"} & {path.name for path in workspace.iterdir()}


def test_other_file_names_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("init", "shards/train", "job.txt") == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert "job.txt" in sentence
    assert ".yaml" in sentence
    assert not (workspace / "job.txt").exists()

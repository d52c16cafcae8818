"""`stoker job eval`: which checkpoint it evaluates, and what it refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.job_eval import choose_checkpoint
from stoker.jobs.run_folder import list_runs
from stoker.jobs.spec import to_yaml
from stoker.testing import make_shards
from stoker.trainers.checkpoint_files import BEST_NAME, find_checkpoint, step_name
from stoker.trainers.flags import parse_flags
from tests.launchers.contract import job_of
from tests.support.runs import Runs
from tests.support.trees import stoker

TRAINED = "digits-20260101-000000-abcd"
FLAGS = ["--model", "trivial", "--size", "16", "--epochs", "1", "--device", "cpu"]


def test_newest_checkpoint_is_evaluated_if_none_was_validated(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shards = make_shards(workspace / "shards", samples=32, val=8, classes=2)
    data = {split: str(shards / split) for split in ("train", "val")}
    program = {"module": "stoker.trainers.torch_image", "args": [*FLAGS, "--validate-every", "0"]}
    job = {"name": "digits", "topology": "single", "program": program, "data": data}
    (workspace / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", workspace / "job.yaml") == 0
    (trained,) = list_runs()
    names = [path.name for path in Path(trained.checkpoint_dir).glob("*.pt")]
    assert names == [newest := step_name(1)]
    assert "32 samples × 1 epoch," in capfd.readouterr().out
    assert stoker("job", "eval", "digits") == 0
    out, err = capfd.readouterr()
    assert f"{newest}: validation loss" in out
    assert str(Path(trained.checkpoint_dir) / newest) in err


@pytest.mark.parametrize("which", ["best", "newest", "other.pt", "ck/step-0000000002.pt"])
def test_missing_checkpoint_is_refused_before_anything_is_started(
    runs: Runs, stoker_home: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, TRAINED)
    (run.folder / "job.yaml").write_text(
        to_yaml(job_of(program={"module": "stoker.trainers.torch_image"}, checkpoint={"dir": str(run.folder / "ck")}))
    )
    assert stoker("job", "eval", "digits", "--checkpoint", which) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert str(run.folder / "ck" if which in ("best", "newest") else Path.cwd() / which) in sentence
    assert list_runs() == [run]


def test_best_checkpoint_comes_before_the_newest(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path / "none"), "best") is None
    for name in (step_name(9), step_name(10), "step-11.pt", ".lock"):
        (tmp_path / name).touch()
    assert [find_checkpoint(str(tmp_path), which) for which in ("best", "newest")] == [step_name(10)] * 2
    (tmp_path / BEST_NAME).touch()
    assert [find_checkpoint(str(tmp_path), which) for which in ("best", "newest")] == [BEST_NAME, step_name(10)]


def test_newest_checkpoint_is_passed_by_name(runs: Runs, stoker_home: Path) -> None:
    """A training that is still running may write another one before the trainer reads it."""
    run = runs.write(stoker_home, TRAINED)
    Path(run.checkpoint_dir).mkdir()
    (Path(run.checkpoint_dir) / step_name(7)).touch()
    where, flags = choose_checkpoint(run, run.checkpoint_dir, "newest")
    args = parse_flags(["--val", "shards", *flags], {"STOKER_CHECKPOINT_DIR": "ck"})
    assert (where, args.eval_only) == (str(Path(run.checkpoint_dir) / step_name(7)), step_name(7))


def test_initial_weights_of_the_training_are_not_evaluated_instead(runs: Runs, stoker_home: Path) -> None:
    run = runs.write(stoker_home, TRAINED)
    Path(run.checkpoint_dir).mkdir()
    (Path(run.checkpoint_dir) / BEST_NAME).touch()
    where, flags = choose_checkpoint(run, run.checkpoint_dir, "best")
    args = parse_flags(["--init-from", "pretrained.pt", "--val", "shards", *flags], {"STOKER_CHECKPOINT_DIR": "ck"})
    assert (where, args.eval_only) == (str(Path(run.checkpoint_dir) / BEST_NAME), "best")
    assert not args.init_from

"""`stoker job eval`: which checkpoint it evaluates, and what it refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.job_eval import ACCEPTED, choose_checkpoint, make_evaluation
from stoker.errors import NotFoundError
from stoker.jobs.run_folder import list_runs
from stoker.jobs.spec import to_yaml
from stoker.jobs.topology import list_slots
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


@pytest.mark.parametrize("args", [[], ["--val-transform", "whole"]])
def test_run_without_a_validation_set_is_refused_before_anything_is_started(
    runs: Runs, stoker_home: Path, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, TRAINED)
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / step_name(1)).touch()
    program = {"module": "stoker.trainers.torch_image", "args": args}
    (run.folder / "job.yaml").write_text(to_yaml(job_of(program=program)))
    assert stoker("job", "eval", "digits", "--checkpoint", "newest") == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert "--set data.val=URL" in sentence
    assert list_runs() == [run]


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


def test_checkpoints_on_a_host_are_named_with_the_host(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, TRAINED)
    (run.folder / "job.yaml").write_text(to_yaml(job_of(program={"module": "stoker.trainers.torch_image"})))
    run.write("handle", f"ssh://{run.folder}\n".encode())
    run.write("plan.json", json.dumps({"hosts": {"worker/0": "node1", "worker/1": "node2"}}).encode())
    mark = {"v": 1, "t": 1.0, "slot": "worker/0", "rank": 0, "attempt": 0, "pid": 1, "seq": 0, "k": "mark"}
    mark |= {"name": "checkpoint", "detail": f"/home/a/.stoker/{TRAINED}/checkpoints/{step_name(7)}", "step": 7}
    (run.logs / "worker-0.0.log").write_text(f"@stoker {json.dumps(mark)}\n")
    location = f"node1:/home/a/.stoker/{TRAINED}/checkpoints"
    assert stoker("job", "eval", "digits") == 2
    assert location in capsys.readouterr().err
    assert stoker("job", "status", "digits") == 0
    assert location in capsys.readouterr().out
    assert stoker("job", "status", "digits", "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == location


def test_checkpoint_of_the_run_is_accepted_by_name(
    runs: Runs, stoker_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = runs.write(stoker_home, TRAINED)
    Path(run.checkpoint_dir).mkdir()
    for name in (step_name(7), step_name(8), BEST_NAME):
        (Path(run.checkpoint_dir) / name).touch()
        assert choose_checkpoint(run, run.checkpoint_dir, name)[0] == str(Path(run.checkpoint_dir) / name)
    _, flags = choose_checkpoint(run, run.checkpoint_dir, step_name(7))
    assert parse_flags(["--val", "s", *flags], {"STOKER_CHECKPOINT_DIR": "ck"}).eval_only == step_name(7)
    with pytest.raises(NotFoundError) as caught:
        choose_checkpoint(run, run.checkpoint_dir, step_name(9))
    assert caught.value.hint == ACCEPTED


def test_best_checkpoint_comes_before_the_newest(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path / "none"), "best") is None
    for name in (step_name(9), step_name(10), "step-11.pt", ".lock"):
        (tmp_path / name).touch()
    assert [find_checkpoint(str(tmp_path), which) for which in ("best", "newest")] == [step_name(10)] * 2
    (tmp_path / BEST_NAME).touch()
    assert [find_checkpoint(str(tmp_path), which) for which in ("best", "newest")] == [BEST_NAME, step_name(10)]


def test_parameter_servers_are_evaluated_in_one_process() -> None:
    roles = {"ps": {"count": 2}, "evaluator": {"count": 1}}
    program = {"module": "stoker.trainers.tf_ps", "args": ["--model", "small"]}
    job = job_of(program=program, topology="tf-ps", workers=4, roles=roles, data={"val": "shards"})
    evaluation = make_evaluation(job, "/ck", ("--eval-only", "newest"))
    assert [str(slot) for slot in list_slots(evaluation)] == ["worker/0"]
    assert evaluation.program.args == ("--model", "small", "--eval-only", "newest")
    assert list(evaluation.faults()) == []
    observer: dict[str, Any] = {"tensorboard": {"count": 1, "logdir": "/logs"}}
    program = {"module": "stoker.trainers.tf_mirrored"}
    mirrored = make_evaluation(job_of(program=program, topology="tf-mirrored", workers=2, roles=observer), "/ck", ())
    assert [str(slot) for slot in list_slots(mirrored)] == ["worker/0", "worker/1"]


@pytest.mark.parametrize("program", [{"module": "acme.train"}, {"script": "train.py"}])
def test_other_programs_are_refused_in_one_sentence(
    runs: Runs, stoker_home: Path, program: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, TRAINED)
    (run.folder / "job.yaml").write_text(to_yaml(job_of(program=program)))
    assert stoker("job", "eval", "digits") == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert "stoker.trainers.tf_ps" in sentence


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

"""The trainer alone, in the process of the test: what it learns, tells, refuses and takes over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainings import Done, same_bits, state, weights

from stoker.errors import SpecError
from stoker.trainers import flags as trainer_flags
from stoker.trainers.ledger import effective
from trees import stoker

Train = Callable[..., Done]
ROOT = Path(__file__).parents[2]


def test_it_learns_and_tells(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--model", "small", "--epochs", 4, "--checkpoint-dir", tmp_path / "ck", "--schedule", "cosine")
    assert done.code == 0, done.text
    start, end = done.marks("start")[0].fields, done.marks("end")[0].fields
    assert (start["world"], start["global_batch"], start["samples"], start["total_steps"]) == (1, 16, 203, 52)
    assert end["val_top1"] > 0.6
    assert done.scalars("val_top1")[-1] == end["val_top1"]
    assert done.scalars("val_top5") == [1.0] * 4
    assert done.scalars("loss")[-1] < done.scalars("loss")[0]
    spans = {event.fields["name"] for event in done.events if event.kind == "span"}
    stages = {f"loader.{name}" for name in ("fetch", "read", "decode", "transform")}
    assert spans == {"loader_wait", "h2d", "compute", "collective_wait", "step", *stages}
    counted = [event.fields for event in done.events if event.fields.get("name") == "compute"]
    assert sum(span["count"] for span in counted) == 52
    assert sum(span["samples"] for span in counted) == 4 * 203
    assert done.events[0].kind == "heartbeat"
    assert "epoch 3 step 52/52 loss " in done.text
    assert len(done.marks("checkpoint")) == 8  # before each validation, and after
    assert sorted(path.name for path in (tmp_path / "ck").glob("*.pt")) == [
        "best.pt",
        "step-0000000026.pt",
        "step-0000000039.pt",
        "step-0000000052.pt",
    ]


def test_evaluation_alone_finds_what_training_found(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--model", "small", "--checkpoint-dir", tmp_path / "ck", "--ema", 0.8]
    trained = train(*own, "--epochs", 2)
    found = [trained.scalars(name)[-1] for name in ("val_loss", "val_top1", "val_top5", "ema_top1")]
    evaluated = train(*own, "--eval-only")
    assert evaluated.code == 0, evaluated.text
    assert [evaluated.scalars(name)[-1] for name in ("val_loss", "val_top1", "val_top5", "ema_top1")] == found
    assert "step-0000000026.pt: validation loss" in evaluated.text
    best = train(*own, "--eval-only", "best")
    assert best.scalars("ema_top1")[-1] == max(trained.scalars("ema_top1"))
    # Without the training set, from a file alone.
    file = tmp_path / "ck/step-0000000026.pt"
    alone = train(*flags[2:], "--model", "small", "--eval-only", "--init-from", file)
    assert alone.scalars("val_loss")[-1] == found[0]


def test_without_checkpoints_evaluation_says_so(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--eval-only", "--checkpoint-dir", tmp_path / "ck")
    assert done.code == 2
    assert f"error: {tmp_path}/ck: there is no checkpoint to evaluate" in done.text


def test_the_averaged_weights_are_what_they_should_be(flags: list[object], train: Train, tmp_path: Path) -> None:
    for steps in (1, 2):
        own = ["--num-batches", steps, "--ema", 0.5, "--checkpoint-dir", tmp_path / str(steps)]
        assert train(*flags, *own).code == 0
    first, second = state(tmp_path / "1"), state(tmp_path / "2")
    # The decay rises with the steps: (1 + 2) / (10 + 2) at the second.
    for name, averaged in second["ema"].items():
        expected = first["ema"][name] * 0.25 + second["model"][name] * 0.75
        assert torch.allclose(averaged, expected, atol=1e-6)


def test_stopping_after_some_batches_and_going_on_is_the_same(
    flags: list[object], train: Train, tmp_path: Path
) -> None:
    for batches in (5, 13, 20):
        own = ["--epochs", 2, "--checkpoint-dir", tmp_path / "parts", "--ledger", tmp_path / "ledger"]
        assert train(*flags, *own, "--num-batches", batches).code == 0
    last = train(*flags, *own)
    assert last.marks("resume")[0].fields["consumed"] == 7 * 16
    whole = train(*flags, "--epochs", 2, "--checkpoint-dir", tmp_path / "whole")
    assert same_bits(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert [len(seen) for seen in effective(tmp_path / "ledger").values()] == [203, 203]
    assert whole.scalars("val_top1")[-1] == last.scalars("val_top1")[-1]
    assert "done: 26 steps" in train(*flags, *own, "--epochs", 3, "--num-batches", 26).text  # there already
    finished = train(*flags, *own)
    assert finished.code == 0
    assert "this training is finished: 2 epochs, validation top-1" in finished.text
    more = train(*flags, *own, "--epochs", 3)
    assert more.code == 0
    assert "epoch 2 step 39/39" in more.text


def test_resampled_epochs_have_the_length_asked_for(flags: list[object], train: Train, tmp_path: Path) -> None:
    sampling = ["--sampling", "resampled", "--epoch-samples", 50, "--ledger", tmp_path]
    done = train(*flags, "--epochs", 2, *sampling)
    assert done.code == 0
    assert [len(seen) for seen in effective(tmp_path).values()] == [50, 50]


@pytest.mark.parametrize("flag", ["--nesterov", "--channels-last", "--label-smoothing=0.1", "--clip-grad=0.5"])
def test_flags_of_the_optimizer_change_the_result(flags: list[object], train: Train, tmp_path: Path, flag: str) -> None:
    own = [*flags, "--model", "small", "--num-batches", 3, "--val", ""]
    assert train(*own, "--checkpoint-dir", tmp_path / "with", flag).code == 0
    assert train(*own, "--checkpoint-dir", tmp_path / "without").code == 0
    same = same_bits(weights(tmp_path / "with"), weights(tmp_path / "without"))
    assert flag == "--channels-last" or not same


def test_synthetic_batches_have_the_same_counts(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--epochs", 1, "--synthetic", "--val", "", "--ledger", tmp_path)
    assert done.code == 0
    assert "done: 13 steps" in done.text
    assert [len(seen) for seen in effective(tmp_path).values()] == [203]
    alone = train("--synthetic", "--num-classes", 3, "--size", 16, "--model", "trivial", "--num-batches", 4)
    assert alone.code == 0
    assert alone.marks("start")[0].fields["samples"] == 1_281_167


def test_the_damaged_newest_one_is_passed_over(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--epochs", 2, "--checkpoint-dir", tmp_path]
    assert train(*own, "--num-batches", 5).code == 0
    assert train(*own, "--num-batches", 9).code == 0
    (tmp_path / "step-0000000009.pt").write_bytes(b"x" * 1000)
    done = train(*own)
    assert done.code == 0, done.text
    assert done.marks("fallback")[0].fields["detail"].startswith("step-0000000009.pt: this checkpoint is damaged")
    assert done.marks("resume")[0].fields["from"] == "step-0000000005.pt"


def test_the_checkpoint_of_another_training_is_refused(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path, "--num-batches", 2]
    assert train(*own).code == 0
    done = train(*own, "--seed", 7, "--model", "small")
    assert done.code == 2
    assert (
        f"{tmp_path}/step-0000000002.pt: this checkpoint is of another training: its model is trivial, and this is "
        "small; its samples came in another order (seed was 0 and is 7); give another --checkpoint-dir, or take over "
        "only its weights: --init-from" in done.text
    )
    assert done.marks("error")[0].fields["detail"].startswith("InputError: ")
    other = train(*own, "--num-classes", 9)
    assert "it has 5 classes, and this 9" in other.text
    # What is recorded is kept: the batch and the learning rate.
    kept = train(*[word for word in flags if word not in ("--lr", 0.05)], "--checkpoint-dir", tmp_path, "--epochs", 1)
    assert kept.code == 0, kept.text
    assert "learning rate 0.05" in kept.text


def test_weights_are_taken_over(flags: list[object], train: Train, tmp_path: Path) -> None:
    assert train(*flags, "--epochs", 1, "--checkpoint-dir", tmp_path / "a").code == 0
    first = tmp_path / "a/step-0000000013.pt"
    done = train(*flags, "--init-from", first, "--lr", 0, "--num-batches", 1, "--checkpoint-dir", tmp_path / "b")
    assert done.code == 0
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    refused = train(*flags, "--init-from", first, "--num-classes", 3)
    assert refused.code == 2
    assert f"{first}: these weights do not fit the model: head.weight is 5×192 and not 3×192" in refused.text


def test_bad_samples_are_left_out_and_the_rest_is_right(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "synthetic:samples=60,classes=3,size=16x16,seed=1"
    assert stoker("data", "convert", source, tmp_path / "shards", "--shard-samples", 10) == 0
    shard = max((tmp_path / "shards/train").glob("*.tar"))
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff")
    data[at : at + 3] = b"bad"
    shard.write_bytes(data)
    own = ["--train", tmp_path / "shards/train", "--size", 16, "--model", "trivial", "--global-batch-size", 8]
    done = train(*own, "--epochs", 1, "--max-bad", 0.1, "--ledger", tmp_path / "ledger")
    assert done.code == 0, done.text
    assert [len(seen) for seen in effective(tmp_path / "ledger").values()] == [59]
    assert "epoch 0 left out 1 bad sample" in caplog.text
    refused = train(*own, "--epochs", 1)
    assert refused.code == 2
    assert "more than max_bad=0.001 allows" in refused.text


def test_classes_that_differ_are_refused(flags: list[object], train: Train, tmp_path: Path) -> None:
    source = "synthetic:samples=20,classes=4,size=16x16"
    assert stoker("data", "convert", source, tmp_path / "other") == 0
    done = train(*flags, "--val", tmp_path / "other/train")
    assert done.code == 2
    assert "its classes (class00, class01, class02, … 4 in all) are not those of the training set" in done.text


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--train", "nowhere"], 2, "nowhere"),
        (["--model", "resnet19"], 2, "there is no model 'resnet19'"),
        (["--device", "cuda"], 3, "there is no CUDA here"),
        (["--precision", "fp16"], 2, "fp16 needs a GPU"),
        (["--global-batch-size", "5000"], 2, "more than an epoch's 203 samples"),
        (["--init-from", "none.pt"], 2, "no such file"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    flags: list[object],
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = train(*flags, *words)
    assert done.code == code, done.text
    said = [line for line in done.text.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert "Traceback" not in done.text


def test_a_bug_keeps_its_traceback(flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("stoker.trainers.models.Trivial.forward", broken)
    with pytest.raises(TypeError, match="a bug"):
        train(*flags)


def test_the_flags_of_webdataset_imagenet_are_understood() -> None:
    words = (
        "--bucket http://h/{} --shards a-{000..003}.tar --valshards b.tar --mname resnet50 --nepochs 7 --batchsize 64"
    )
    args = trainer_flags.read([*words.split(), "--loginterval", "5", "--ntrain", "9", "--onelog", "--splitshards"], {})
    assert (args.train, args.val) == ("http://h/a-{000..003}.tar", "http://h/b.tar")
    assert (args.model, args.epochs, args.batch_size, args.log_every) == ("resnet50", 7, 64, 5)
    assert (args.sampling, args.epoch_samples) == ("exact", None)
    again = trainer_flags.read(
        ["--shards", "x.tar", "--sampling", "resampled", "--ntrain", "9", "--amplevel", "O1"], {}
    )
    assert (again.train, again.epoch_samples, again.precision) == ("x.tar", 9, "fp16")
    assert (args.momentum, args.weight_decay, args.milestones, args.gamma) == (0.9, 1e-4, (30, 60, 90, 120), 0.1)


def test_the_environment_of_a_job_is_the_default_and_flags_win() -> None:
    environ = {
        "STOKER_DATA_TRAIN": "t",
        "STOKER_DATA_VAL": "v",
        "STOKER_DATA_VIA": "http://cache",
        "STOKER_SAMPLING": "join",
        "STOKER_CACHE_DIR": "/c",
        "STOKER_CACHE_SIZE": "2Gi",
        "STOKER_CHECKPOINT_DIR": "s3://b/c",
        "STOKER_CHECKPOINT_KEEP": "5",
    }
    args = trainer_flags.read(["--sampling", "exact"], environ)
    assert (args.train, args.val, args.via, args.sampling) == ("t", "v", "http://cache", "exact")
    assert (args.cache_dir, args.cache_size, args.checkpoint_dir, args.keep) == ("/c", 2 << 30, "s3://b/c", 5)


def test_every_bad_flag_is_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        trainer_flags.read(["--epochs", "0", "--ema", "1", "--nesterov", "--momentum", "0"], {})
    assert str(caught.value) == (
        "--epochs: 0 is less than 1; --ema: 1.0 is not from 0 to below 1; --nesterov: needs --momentum above 0; "
        "--train: give the shard set to train on, or STOKER_DATA_TRAIN, or --synthetic"
    )
    small = trainer_flags.read(["--train", "x", "--size", "32"], {})
    assert (small.transform, small.val_transform) == ("small-train", "whole")
    large = trainer_flags.read(["--train", "x"], {})
    assert (large.transform, large.val_transform) == ("imagenet-train", "imagenet-val")


def test_the_page_has_the_flags() -> None:
    page = (ROOT / "docs/train.md").read_text()
    assert trainer_flags.table() in page, "docs/train.md: paste what stoker.trainers.flags.table() gives"


def test_a_torn_ledger_line_is_passed_over(tmp_path: Path) -> None:
    lines = [
        {"session": 1, "rank": 0, "resume": True, "epoch": 0, "consumed": 0},
        {"session": 1, "rank": 0, "epoch": 0, "start": 0, "end": 2, "samples": [[0, 0], [0, 1]]},
        {"session": 1, "rank": 0, "epoch": 0, "start": 2, "end": 4, "samples": [[0, 2], [0, 3]]},
        {"session": 2, "rank": 0, "resume": True, "epoch": 0, "consumed": 2},
        {"session": 2, "rank": 0, "epoch": 0, "start": 2, "end": 4, "samples": [[0, 2], [0, 3]]},
    ]
    text = [json.dumps(line) for line in lines]
    (tmp_path / "rank-0.jsonl").write_text("\n".join([*text[:3], '{"session": 1, "ra', "", *text[3:]]) + "\n{")
    assert effective(tmp_path) == {0: [(0, 0), (0, 1), (0, 2), (0, 3)]}

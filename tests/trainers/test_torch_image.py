"""The trainer alone, in the process of the test: what it learns, tells, refuses and takes over."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import SpecError
from stoker.load.torch import Dataset, TorchBatch
from stoker.trainers import flags as trainer_flags
from stoker.trainers import models
from stoker.trainers.ledger import effective
from stoker.trainers.torch_image import _rest_norms
from tests.support.paths import ROOT
from tests.support.trees import stoker
from tests.trainers.trainings import Done, same_bits, state, weights

Train = Callable[..., Done]


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
    assert alone.scalars("ema_top1")[-1] == found[3]


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


def test_channels_last_reaches_the_weights(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--model", "small", "--num-batches", 3, "--channels-last", "--checkpoint-dir", tmp_path)
    assert done.code == 0
    kept = weights(tmp_path)["body.4.weight"]
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert not kept.is_contiguous()


@pytest.mark.parametrize("flag", ["--nesterov", "--label-smoothing=0.1", "--clip-grad=0.5"])
def test_flags_of_the_optimizer_change_the_result(flags: list[object], train: Train, tmp_path: Path, flag: str) -> None:
    own = [*flags, "--model", "small", "--num-batches", 3, "--val", ""]
    assert train(*own, "--checkpoint-dir", tmp_path / "with", flag).code == 0
    assert train(*own, "--checkpoint-dir", tmp_path / "without").code == 0
    assert not same_bits(weights(tmp_path / "with"), weights(tmp_path / "without"))


def test_synthetic_batches_have_the_same_counts(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--epochs", 1, "--synthetic", "--val", "", "--ledger", tmp_path)
    assert done.code == 0
    assert "done: 13 steps" in done.text
    assert [len(seen) for seen in effective(tmp_path).values()] == [203]
    alone = train("--synthetic", "--num-classes", 3, "--size", 16, "--model", "trivial", "--num-batches", 4)
    assert alone.code == 0
    assert alone.marks("start")[0].fields["samples"] == 1_281_167


def test_synthetic_leaves_the_checkpoints_alone(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    assert train(*own, "--num-batches", 5).code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").iterdir()}
    done = train(*own, "--num-batches", 7, "--synthetic")
    assert done.code == 0
    assert f"--synthetic: {tmp_path}/ck is left alone, no checkpoint is read or written\n" in done.text
    assert "done: 7 steps" in done.text
    assert not done.marks("resume")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").iterdir()} == before


def test_synthetic_batches_need_the_number_of_classes(shards: Path, train: Train, tmp_path: Path) -> None:
    """A set that was made elsewhere has no manifest."""
    for shard in (shards / "train").glob("*.tar"):
        shutil.copy(shard, tmp_path)
    own = ["--train", tmp_path, "--synthetic", "--size", 16, "--model", "trivial", "--num-batches", 2]
    done = train(*own)
    assert done.code == 2
    assert "does not tell its classes; give --num-classes" in done.text
    assert train(*own, "--num-classes", 5).code == 0


def test_a_validation_is_no_longer_owed_without_a_set(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path]
    assert train(*own, "--num-batches", 13).code == 0
    assert state(tmp_path)["meta"]["owed"]
    done = train(*own, "--epochs", 2, "--val", "")
    assert done.code == 0, done.text
    assert "done: 26 steps" in done.text


def test_from_fp32_to_fp16(flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path, "--val", ""]
    assert train(*own, "--num-batches", 2).code == 0
    monkeypatch.setattr("stoker.trainers.world._device", lambda _: torch.device("cpu"))  # as if it were a GPU
    done = train(*own, "--num-batches", 4, "--precision", "fp16")
    assert done.code == 0, done.text
    assert state(tmp_path)["scaler"]["scale"] > 0


class Frozen(torch.nn.Module):
    """A user's model whose normalisation never learns."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm2d(3), torch.nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(images).mean((2, 3)))  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


def test_frozen_statistics_stay_frozen(
    flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of each epoch's batches has one sample, for which normalisations rest."""
    mine = types.ModuleType("mine")
    mine.frozen = Frozen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    own = ["--model", "mine:frozen", "--global-batch-size", 101, "--epochs", 2, "--val", ""]
    assert train(*flags, *own, "--checkpoint-dir", tmp_path).code == 0
    assert weights(tmp_path)["norm.num_batches_tracked"] == 0


def test_only_normalisations_that_learn_by_themselves_rest() -> None:
    learning, synced, frozen = torch.nn.BatchNorm2d(3), torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm1d(3).eval()
    assert _rest_norms(torch.nn.Sequential(learning, synced, frozen)) == [learning]
    assert (learning.training, synced.training, frozen.training) == (False, True, False)


def test_too_few_classes_are_refused(flags: list[object], train: Train) -> None:
    done = train(*flags, "--num-classes", 3)
    assert done.code == 2
    assert "its 5 classes are more than the model's 3; give --num-classes 5 or more, or leave it away" in done.text


@pytest.mark.parametrize("words", ["ncclRemoteError: A call failed", "recv: Connection reset by peer"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lost_connection_means_a_lost_rank_only_where_there_are_others(
    flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch, ranks: int, words: str
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr("stoker.trainers.torch_image.train", lost)
    monkeypatch.setattr("stoker.trainers.torch_image.World", lambda _: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if ranks == 1:
        with pytest.raises(RuntimeError, match=words):
            train(*flags)
    else:
        done = train(*flags)
        assert done.code == 1
        assert len(done.marks("lost")) == 1


def test_who_reads_only_the_head_sees_no_traceback(flags: list[object]) -> None:
    words = [sys.executable, "-m", "stoker.trainers.torch_image", *map(str, flags), "--epochs", "1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(60) == 141, said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_waiting_for_the_copy_to_the_device_is_not_waiting_for_data(
    flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(batch: TorchBatch) -> TorchBatch:
        time.sleep(0.02)
        return batch

    class Slow(Dataset):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._upload = slowly  # type: ignore[assignment]

    monkeypatch.setattr("stoker.trainers.torch_image.Dataset", Slow)
    done = train(*flags, "--epochs", 1, "--val", "")
    assert done.code == 0, done.text
    spans = [event.fields for event in done.events if event.kind == "span"]
    spent = {name: sum(span["length"] for span in spans if span["name"] == name) for name in ("h2d", "loader_wait")}
    assert spent["h2d"] >= 13 * 0.02
    assert spent["loader_wait"] >= 0
    parts = {"loader_wait", "h2d", "compute", "collective_wait"}
    whole = sum(span["length"] for span in spans if span["name"] == "step")
    assert sum(span["length"] for span in spans if span["name"] in parts) == pytest.approx(whole, abs=1e-3)


def test_the_learning_rate_of_a_short_last_step(flags: list[object], train: Train) -> None:
    """The last of 203 samples in batches of 101 is one step in the middle of which 202.5 are seen."""
    done = train(*flags, "--global-batch-size", 101, "--epochs", 1, "--schedule", "poly", "--log-every", 0.0001)
    assert done.scalars("lr") == pytest.approx([0.05 * (1 - at / 203) ** 2 for at in (50.5, 151.5, 202.5)])
    assert done.scalars("epoch") == pytest.approx([101 / 203, 202 / 203, 1])


def test_a_batch_size_that_is_not_used_is_told(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path, "--val", ""]
    assert train(*own, "--num-batches", 2).code == 0
    at = own.index("--global-batch-size")
    own[at : at + 2] = ["--batch-size", 8]
    done = train(*own, "--num-batches", 3)
    assert "--batch-size is not used: the global batch stays 16; --global-batch-size changes it" in done.text
    own[at + 1] = 16
    assert "--batch-size is not used" not in train(*own, "--num-batches", 4).text


def test_starts_are_counted_and_no_clock_is_asked(
    flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [*flags, "--val", "", "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    clock = time.time_ns()
    for batches in (3, 6, 9):
        clock -= 3600 * 10**9  # set back between the starts
        monkeypatch.setattr(time, "time_ns", lambda now=clock: now)
        assert train(*own, "--num-batches", batches).code == 0
    lines = [json.loads(line) for line in (tmp_path / "ledger/rank-0.jsonl").read_text().splitlines() if line]
    assert [line["session"] for line in lines if line.get("resume")] == [1, 2, 3]
    assert len(effective(tmp_path / "ledger")[0]) == 9 * 16


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
    refused = train(*flags, "--init-from", first, "--num-classes", 7)
    assert refused.code == 2
    assert f"{first}: these weights do not fit the model: head.weight is 5×192 and not 7×192" in refused.text


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
        (["--device", "cuda:0"], 3, "--device cuda:0: there is no CUDA here"),
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


def test_flags_from_elsewhere_that_say_nothing_here() -> None:
    said = trainer_flags.read(["--shards", "x", "--ntrain", "9", "--wsize", "4", "--mname", "vgg11"], {})
    assert said.notes == ["--ntrain is not used: an epoch is every sample once; --sampling resampled takes it"]
    assert said.model == "torchvision:vgg11"
    assert trainer_flags.read(["--shards", "x", "--mname", "resnet50"], {}).notes == []
    with pytest.raises(SpecError, match="--bucket: is the beginning of --shards and --valshards"):
        trainer_flags.read(["--train", "x", "--bucket", "http://h/"], {})
    assert models.NAMES == trainer_flags.MODELS


def test_a_backend_that_is_not_there(flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = train(*flags, "--backend", "nccl", "--device", "cpu")
    assert done.code == 3
    assert "error: --backend nccl: this torch has no NCCL; give gloo" in done.text


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
    words = "--train x --gamma -1 --milestones=-3,5 --checkpoint-every-steps -1 --sampling join --num-batches 4"
    with pytest.raises(SpecError) as caught:
        trainer_flags.read(words.split(), {})
    assert str(caught.value) == (
        "--gamma: -1.0 is negative; --checkpoint-every-steps: -1 is negative; --milestones: -3 is negative; "
        "--num-batches: does not go with --sampling join, whose ranks make different numbers of steps"
    )
    small = trainer_flags.read(["--train", "x", "--size", "32"], {})
    assert (small.transform, small.val_transform) == ("small-train", "whole")
    large = trainer_flags.read(["--train", "x"], {})
    assert (large.transform, large.val_transform) == ("imagenet-train", "imagenet-val")


def test_the_page_has_the_flags() -> None:
    page = (ROOT / "docs/train.md").read_text()
    assert f"{trainer_flags.table()}\nExit codes" in page, (
        "docs/train.md: paste what stoker.trainers.flags.table() gives"
    )


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

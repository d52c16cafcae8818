"""The image trainer with one rank, in the test process: results, events, resuming, errors and flags."""

from __future__ import annotations

import json
import re
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
from stoker.trainers.ledger import effective_samples
from stoker.trainers.torch_image import freeze_batchnorm
from tests.support.paths import ROOT
from tests.support.trainings import TrainingResult, read_checkpoint, same_bits, weights
from tests.support.trees import stoker

Train = Callable[..., TrainingResult]


def test_training_learns_and_records_events(flags: list[object], train: Train, tmp_path: Path) -> None:
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


def test_eval_only_reproduces_the_results_of_the_training(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--model", "small", "--checkpoint-dir", tmp_path / "ck", "--ema", 0.8]
    trained = train(*own, "--epochs", 2)
    results = [trained.scalars(name)[-1] for name in ("val_loss", "val_top1", "val_top5", "ema_top1")]
    evaluated = train(*own, "--eval-only")
    assert evaluated.code == 0, evaluated.text
    assert [evaluated.scalars(name)[-1] for name in ("val_loss", "val_top1", "val_top5", "ema_top1")] == results
    assert "step-0000000026.pt: validation loss" in evaluated.text
    earlier = train(*own, "--eval-only", "step-0000000013.pt")
    assert "step-0000000013.pt: validation loss" in earlier.text
    assert earlier.scalars("val_loss")[-1] == trained.scalars("val_loss")[0]
    best = train(*own, "--eval-only", "best")
    assert best.scalars("ema_top1")[-1] == max(trained.scalars("ema_top1"))
    # Without the training set, from a file.
    file = tmp_path / "ck/step-0000000026.pt"
    alone = train(*flags[2:], "--model", "small", "--eval-only", "--init-from", file)
    assert alone.scalars("val_loss")[-1] == results[0]
    assert alone.scalars("ema_top1")[-1] == results[3]


def test_eval_only_without_checkpoints_is_an_error(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--eval-only", "--checkpoint-dir", tmp_path / "ck")
    assert done.code == 2
    assert f"error: {tmp_path}/ck: no checkpoint" in done.text


def test_ema_is_the_moving_average_of_the_weights(flags: list[object], train: Train, tmp_path: Path) -> None:
    for steps in (1, 2):
        own = ["--num-batches", steps, "--ema", 0.5, "--checkpoint-dir", tmp_path / str(steps)]
        assert train(*flags, *own).code == 0
    first, second = read_checkpoint(tmp_path / "1"), read_checkpoint(tmp_path / "2")
    # The decay increases with the steps: (1 + 2) / (10 + 2) at the second.
    for name, averaged in second["ema"].items():
        expected = first["ema"][name] * 0.25 + second["model"][name] * 0.75
        assert torch.allclose(averaged, expected, atol=1e-6)


def test_stopping_and_resuming_gives_the_same_weights(flags: list[object], train: Train, tmp_path: Path) -> None:
    for batches in (5, 13, 20):
        own = ["--epochs", 2, "--checkpoint-dir", tmp_path / "parts", "--ledger", tmp_path / "ledger"]
        assert train(*flags, *own, "--num-batches", batches).code == 0
    last = train(*flags, *own)
    assert last.marks("resume")[0].fields["consumed"] == 7 * 16
    whole = train(*flags, "--epochs", 2, "--checkpoint-dir", tmp_path / "whole")
    assert same_bits(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert [len(seen) for seen in effective_samples(tmp_path / "ledger").values()] == [203, 203]
    assert whole.scalars("val_top1")[-1] == last.scalars("val_top1")[-1]
    assert "done: 26 steps" in train(*flags, *own, "--epochs", 3, "--num-batches", 26).text  # already reached
    finished = train(*flags, *own)
    assert finished.code == 0
    assert finished.marks("end")[0].fields["val_top1"] == last.scalars("val_top1")[-1]
    assert re.search(r"already finished: 2 epochs, validation top-1 [0-9.]+%; .*--epochs", finished.text)
    more = train(*flags, *own, "--epochs", 3)
    assert more.code == 0
    assert "epoch 2 step 39/39" in more.text


def test_resampled_epochs_have_the_requested_length(flags: list[object], train: Train, tmp_path: Path) -> None:
    sampling = ["--sampling", "resampled", "--epoch-samples", 50, "--ledger", tmp_path]
    done = train(*flags, "--epochs", 2, *sampling)
    assert done.code == 0
    assert [len(seen) for seen in effective_samples(tmp_path).values()] == [50, 50]


def test_channels_last_applies_to_the_weights(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--model", "small", "--num-batches", 3, "--channels-last", "--checkpoint-dir", tmp_path)
    assert done.code == 0
    weight = weights(tmp_path)["body.4.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


@pytest.mark.parametrize("flag", ["--nesterov", "--label-smoothing=0.1", "--clip-grad=0.5"])
def test_optimizer_flags_change_the_weights(flags: list[object], train: Train, tmp_path: Path, flag: str) -> None:
    own = [*flags, "--model", "small", "--num-batches", 3, "--val", ""]
    assert train(*own, "--checkpoint-dir", tmp_path / "with", flag).code == 0
    assert train(*own, "--checkpoint-dir", tmp_path / "without").code == 0
    assert not same_bits(weights(tmp_path / "with"), weights(tmp_path / "without"))


def test_synthetic_batches_have_the_same_counts(flags: list[object], train: Train, tmp_path: Path) -> None:
    done = train(*flags, "--epochs", 1, "--synthetic", "--val", "", "--ledger", tmp_path)
    assert done.code == 0
    assert "done: 13 steps" in done.text
    assert [len(seen) for seen in effective_samples(tmp_path).values()] == [203]
    alone = train("--synthetic", "--num-classes", 3, "--size", 16, "--model", "trivial", "--num-batches", 4)
    assert alone.code == 0
    assert alone.marks("start")[0].fields["samples"] == 1_281_167


def test_synthetic_does_not_touch_checkpoints(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    assert train(*own, "--num-batches", 5).code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").iterdir()}
    done = train(*own, "--num-batches", 7, "--synthetic")
    assert done.code == 0
    assert re.search(rf"--synthetic: not reading or writing .*{tmp_path}/ck", done.text)
    assert "done: 7 steps" in done.text
    assert not done.marks("resume")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").iterdir()} == before


def test_synthetic_requires_the_number_of_classes(shards: Path, train: Train, tmp_path: Path) -> None:
    """A shard set of another tool has no manifest."""
    for shard in (shards / "train").glob("*.tar"):
        shutil.copy(shard, tmp_path)
    own = ["--train", tmp_path, "--synthetic", "--size", 16, "--model", "trivial", "--num-batches", 2]
    done = train(*own)
    assert done.code == 2
    assert re.search(rf"error: {tmp_path}: .*--num-classes", done.text)
    assert train(*own, "--num-classes", 5).code == 0


def test_a_due_validation_is_dropped_without_a_validation_set(
    flags: list[object], train: Train, tmp_path: Path
) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path]
    assert train(*own, "--num-batches", 13).code == 0
    assert read_checkpoint(tmp_path)["meta"]["owed"]
    done = train(*own, "--epochs", 2, "--val", "")
    assert done.code == 0, done.text
    assert "done: 26 steps" in done.text


def test_resuming_an_fp32_training_with_fp16(
    flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path, "--val", ""]
    assert train(*own, "--num-batches", 2).code == 0
    monkeypatch.setattr("stoker.trainers.world._device", lambda _: torch.device("cpu"))  # as if it were a GPU
    done = train(*own, "--num-batches", 4, "--precision", "fp16")
    assert done.code == 0, done.text
    assert read_checkpoint(tmp_path)["scaler"]["scale"] > 0


class Frozen(torch.nn.Module):
    """A user model whose BatchNorm is always in eval mode."""

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
    """The last batch of each epoch has one sample, for which BatchNorm layers are frozen."""
    mine = types.ModuleType("mine")
    mine.frozen = Frozen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    own = ["--model", "mine:frozen", "--global-batch-size", 101, "--epochs", 2, "--val", ""]
    assert train(*flags, *own, "--checkpoint-dir", tmp_path).code == 0
    assert weights(tmp_path)["norm.num_batches_tracked"] == 0


def test_freeze_batchnorm_skips_sync_and_frozen_layers() -> None:
    active, synced, frozen = torch.nn.BatchNorm2d(3), torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm1d(3).eval()
    assert freeze_batchnorm(torch.nn.Sequential(active, synced, frozen)) == [active]
    assert (active.training, synced.training, frozen.training) == (False, True, False)


def test_too_few_classes_are_rejected(flags: list[object], train: Train) -> None:
    done = train(*flags, "--num-classes", 3)
    assert done.code == 2
    assert re.search(r"error: .*\b5 classes.*\b3\b.*--num-classes.*\b5 or more, or remove it", done.text)


@pytest.mark.parametrize("message", ["ncclRemoteError: A call failed", "recv: Connection reset by peer"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_connection_error_means_a_lost_rank_only_with_several_ranks(
    flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch, ranks: int, message: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("stoker.trainers.torch_image.train", fail)
    monkeypatch.setattr("stoker.trainers.torch_image.World", lambda _: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if ranks == 1:
        with pytest.raises(RuntimeError, match=message):
            train(*flags)
    else:
        done = train(*flags)
        assert done.code == 1
        assert len(done.marks("lost")) == 1


def test_a_closed_pipe_causes_no_traceback(flags: list[object]) -> None:
    argv = [sys.executable, "-m", "stoker.trainers.torch_image", *map(str, flags), "--epochs", "1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(60) == 141, errors
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_copy_to_the_device_is_not_counted_as_waiting_for_data(
    flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_slowly(batch: TorchBatch) -> TorchBatch:
        time.sleep(0.02)
        return batch

    class SlowDataset(Dataset):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._copier = copy_slowly  # type: ignore[assignment]

    monkeypatch.setattr("stoker.trainers.torch_image.Dataset", SlowDataset)
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
    """Of 203 samples in batches of 101, the last step has one sample; at its midpoint 202.5 samples are seen."""
    done = train(*flags, "--global-batch-size", 101, "--epochs", 1, "--schedule", "poly", "--log-every", 0.0001)
    assert done.scalars("lr") == pytest.approx([0.05 * (1 - at / 203) ** 2 for at in (50.5, 151.5, 202.5)])
    assert done.scalars("epoch") == pytest.approx([101 / 203, 202 / 203, 1])


def test_an_ignored_batch_size_is_reported(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path, "--val", ""]
    assert train(*own, "--num-batches", 2).code == 0
    at = own.index("--global-batch-size")
    own[at : at + 2] = ["--batch-size", 8]
    done = train(*own, "--num-batches", 3)
    assert re.search(r"ignoring --batch-size: .*\b16\b.*--global-batch-size", done.text)
    own[at + 1] = 16
    assert "--batch-size" not in train(*own, "--num-batches", 4).text


def test_ledger_sessions_do_not_depend_on_the_clock(
    flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [*flags, "--val", "", "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    clock = time.time_ns()
    for batches in (3, 6, 9):
        clock -= 3600 * 10**9  # turned back between the starts
        monkeypatch.setattr(time, "time_ns", lambda now=clock: now)
        assert train(*own, "--num-batches", batches).code == 0
    lines = [json.loads(line) for line in (tmp_path / "ledger/rank-0.jsonl").read_text().splitlines() if line]
    assert [line["session"] for line in lines if line.get("resume")] == [1, 2, 3]
    assert len(effective_samples(tmp_path / "ledger")[0]) == 9 * 16


def test_a_damaged_newest_checkpoint_is_skipped(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--epochs", 2, "--checkpoint-dir", tmp_path]
    assert train(*own, "--num-batches", 5).code == 0
    assert train(*own, "--num-batches", 9).code == 0
    (tmp_path / "step-0000000009.pt").write_bytes(b"x" * 1000)
    done = train(*own)
    assert done.code == 0, done.text
    assert done.marks("fallback")[0].fields["detail"].startswith("step-0000000009.pt: checkpoint is corrupt")
    assert done.marks("resume")[0].fields["from"] == "step-0000000005.pt"


def test_a_checkpoint_of_another_training_is_rejected(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--checkpoint-dir", tmp_path, "--num-batches", 2]
    assert train(*own).code == 0
    done = train(*own, "--seed", 7, "--model", "small")
    assert done.code == 2
    (message,) = [line for line in done.text.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/step-0000000002.pt: " in message
    assert re.search(
        r"another training run: .*\btrivial\b.*\bsmall\b.*\border\b.*\bseed 0\b.*\b7\b.*--checkpoint-dir.*--init-from",
        message,
    )
    assert done.marks("error")[0].fields["detail"].startswith("InputError: ")
    other = train(*own, "--num-classes", 9)
    assert other.code == 2
    assert re.search(r"error: .*another training run: .*\b5 classes.*\b9\b", other.text)
    # The batch size and the learning rate of the checkpoint are kept.
    kept = train(*[flag for flag in flags if flag not in ("--lr", 0.05)], "--checkpoint-dir", tmp_path, "--epochs", 1)
    assert kept.code == 0, kept.text
    assert "learning rate 0.05" in kept.text


def test_init_from_loads_weights(flags: list[object], train: Train, tmp_path: Path) -> None:
    assert train(*flags, "--epochs", 1, "--checkpoint-dir", tmp_path / "a").code == 0
    first = tmp_path / "a/step-0000000013.pt"
    done = train(*flags, "--init-from", first, "--lr", 0, "--num-batches", 1, "--checkpoint-dir", tmp_path / "b")
    assert done.code == 0
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    rejected = train(*flags, "--init-from", first, "--num-classes", 7)
    assert rejected.code == 2
    assert re.search(rf"{first}: .*do not match.*head\.weight .*5×192.*7×192", rejected.text)


def test_bad_samples_are_skipped(train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert [len(seen) for seen in effective_samples(tmp_path / "ledger").values()] == [59]
    assert re.search(r"epoch 0 .*\b1 bad sample\b", caplog.text)
    (mark,) = [event.fields for event in done.events if event.fields.get("name") == "bad_sample"]
    assert (mark["shard"], mark["epoch"]) == (str(shard), 0)
    assert data[mark["offset"] :][: mark["length"]].startswith(b"bad")
    assert [e.fields["value"] for e in done.events if e.fields.get("name") == "bad_samples"] == [1]
    rejected = train(*own, "--epochs", 1)
    assert rejected.code == 2
    assert re.search(r"error: .*\b1 bad sample\b.*more than max_bad=0\.001", rejected.text)


def test_different_classes_of_the_validation_set_are_rejected(
    flags: list[object], train: Train, tmp_path: Path
) -> None:
    source = "synthetic:samples=20,classes=4,size=16x16"
    assert stoker("data", "convert", source, tmp_path / "other") == 0
    done = train(*flags, "--val", tmp_path / "other/train")
    assert done.code == 2
    assert re.search(rf"{tmp_path}/other/train: .*class00, class01, class02 and 1 more.*training set", done.text)


@pytest.mark.parametrize(
    ("args", "code", "pattern"),
    [
        (["--train", "nowhere"], 2, "nowhere"),
        (["--model", "resnet19"], 2, "unknown model 'resnet19'"),
        (["--device", "cuda"], 3, "--device cuda: CUDA is not available"),
        (["--device", "cuda:0"], 3, "--device cuda:0: CUDA is not available"),
        (["--precision", "fp16"], 2, "--precision fp16: fp16 needs a GPU"),
        (["--global-batch-size", "5000"], 2, r"global_batch: must be at most .*\b203\b.*got 5,000"),
        (["--init-from", "none.pt"], 2, "none.pt: no"),
    ],
)
def test_bad_input_exits_with_one_sentence(
    flags: list[object],
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    args: list[str],
    code: int,
    pattern: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = train(*flags, *args)
    assert done.code == code, done.text
    errors = [line for line in done.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(pattern, errors[0])
    assert "Traceback" not in done.text


def test_a_bug_keeps_its_traceback(flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("stoker.trainers.models.TrivialNet.forward", fail)
    with pytest.raises(TypeError, match="a bug"):
        train(*flags)


def test_flags_of_webdataset_imagenet_are_accepted() -> None:
    words = (
        "--bucket http://h/{} --shards a-{000..003}.tar --valshards b.tar --mname resnet50 --nepochs 7 --batchsize 64"
    )
    args = trainer_flags.parse_flags(
        [*words.split(), "--loginterval", "5", "--ntrain", "9", "--onelog", "--splitshards"], {}
    )
    assert (args.train, args.val) == ("http://h/a-{000..003}.tar", "http://h/b.tar")
    assert (args.model, args.epochs, args.batch_size, args.log_every) == ("resnet50", 7, 64, 5)
    assert (args.sampling, args.epoch_samples) == ("exact", None)
    again = trainer_flags.parse_flags(
        ["--shards", "x.tar", "--sampling", "resampled", "--ntrain", "9", "--amplevel", "O1"], {}
    )
    assert (again.train, again.epoch_samples, again.precision) == ("x.tar", 9, "fp16")
    assert (args.momentum, args.weight_decay, args.milestones, args.gamma) == (0.9, 1e-4, (30, 60, 90, 120), 0.1)


def test_ignored_flags_of_webdataset_imagenet() -> None:
    args = trainer_flags.parse_flags(["--shards", "x", "--ntrain", "9", "--wsize", "4", "--mname", "vgg11"], {})
    (note,) = args.notes
    assert re.search(r"ignoring --ntrain: .*--sampling resampled", note)
    assert args.model == "torchvision:vgg11"
    assert trainer_flags.parse_flags(["--shards", "x", "--mname", "resnet50"], {}).notes == []
    with pytest.raises(SpecError, match=r"--bucket: .*--shards.*--valshards"):
        trainer_flags.parse_flags(["--train", "x", "--bucket", "http://h/"], {})
    assert models.NAMES == trainer_flags.MODELS


def test_an_unavailable_backend_is_rejected(flags: list[object], train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = train(*flags, "--backend", "nccl", "--device", "cpu")
    assert done.code == 3
    assert re.search(r"error: --backend nccl: .*no NCCL.*; .*\bgloo\b", done.text)


def test_flags_override_the_environment_of_a_job() -> None:
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
    args = trainer_flags.parse_flags(["--sampling", "exact"], environ)
    assert (args.train, args.val, args.via, args.sampling) == ("t", "v", "http://cache", "exact")
    assert (args.cache_dir, args.cache_size, args.checkpoint_dir, args.keep) == ("/c", 2 << 30, "s3://b/c", 5)


def test_all_invalid_flags_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        trainer_flags.parse_flags(["--epochs", "0", "--ema", "1", "--nesterov", "--momentum", "0"], {})
    faults = {fault.path: fault.what for fault in caught.value.faults}
    assert list(faults) == ["--epochs", "--ema", "--nesterov", "--train"]
    assert re.search(r"\b1\b.*\b0$", faults["--epochs"])
    assert re.search(r"\b0\b.*\bless than 1\b.*\b1\.0$", faults["--ema"])
    assert "--momentum greater than 0" in faults["--nesterov"]
    assert all(name in faults["--train"] for name in ("shard set", "STOKER_DATA_TRAIN", "--synthetic"))
    words = "--train x --gamma -1 --milestones=-3,5 --checkpoint-every-steps -1 --sampling join --num-batches 4"
    with pytest.raises(SpecError) as caught:
        trainer_flags.parse_flags(words.split(), {})
    faults = {fault.path: fault.what for fault in caught.value.faults}
    assert list(faults) == ["--gamma", "--checkpoint-every-steps", "--milestones", "--num-batches"]
    for name, value in (("--gamma", "-1.0"), ("--checkpoint-every-steps", "-1"), ("--milestones", "-3")):
        assert re.fullmatch(rf".*negative.* {value}", faults[name])
    assert "--sampling join" in faults["--num-batches"]
    small = trainer_flags.parse_flags(["--train", "x", "--size", "32"], {})
    assert (small.transform, small.val_transform) == ("small-train", "whole")
    large = trainer_flags.parse_flags(["--train", "x"], {})
    assert (large.transform, large.val_transform) == ("imagenet-train", "imagenet-val")


def test_the_docs_page_has_the_flags() -> None:
    page = (ROOT / "docs/train.md").read_text()
    assert f"{trainer_flags.flags_table()}\nExit codes" in page, (
        "docs/train.md: paste the output of stoker.trainers.flags.flags_table()"
    )


def test_a_truncated_ledger_line_is_ignored(tmp_path: Path) -> None:
    lines = [
        {"session": 1, "rank": 0, "resume": True, "epoch": 0, "consumed": 0},
        {"session": 1, "rank": 0, "epoch": 0, "start": 0, "end": 2, "samples": [[0, 0], [0, 1]]},
        {"session": 1, "rank": 0, "epoch": 0, "start": 2, "end": 4, "samples": [[0, 2], [0, 3]]},
        {"session": 2, "rank": 0, "resume": True, "epoch": 0, "consumed": 2},
        {"session": 2, "rank": 0, "epoch": 0, "start": 2, "end": 4, "samples": [[0, 2], [0, 3]]},
    ]
    text = [json.dumps(line) for line in lines]
    (tmp_path / "rank-0.jsonl").write_text("\n".join([*text[:3], '{"session": 1, "ra', "", *text[3:]]) + "\n{")
    assert effective_samples(tmp_path) == {0: [(0, 0), (0, 1), (0, 2), (0, 3)]}

"""Checkpoints: damaged ones, buckets, full disks, locks; and weights that do not match."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from stoker.errors import ConflictError, InputError, StorageFullError, VerificationError
from stoker.sampling.cursor import Cursor
from stoker.trainers.checkpoint_files import BEST_NAME
from stoker.trainers.checkpoint_store import CheckpointStore
from stoker.trainers.checkpoints import decode_checkpoint, load_weights, open_checkpoints, read_weights
from stoker.trainers.ledger import Ledger
from tests.support.disks import full_disk, small_disk
from tests.support.servers import aws_environ


def make_state(number: float = 1.0, size: int = 10) -> dict[str, Any]:
    return {"model": {"weight": torch.full((size,), number)}, "meta": {"step": int(number), "text": "é", "at": (1, 2)}}


def fill(checkpoints: CheckpointStore, steps: range) -> None:
    for step in steps:
        checkpoints.save(make_state(step), step)
    checkpoints.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_save_and_load(tmp_path: Path) -> None:
    written: list[tuple[str, int, float]] = []
    checkpoints = open_checkpoints(str(tmp_path / "a/b"), on_written=lambda *what: written.append(what))
    assert checkpoints.load_newest() is None
    assert checkpoints.load_best() is None
    original = make_state(3)
    checkpoints.save(original, 3)
    original["model"]["weight"].zero_()  # training continues while it is written
    checkpoints.wait()
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0] == "step-0000000003.pt"
    assert newest[1]["meta"] == {"step": 3, "text": "é", "at": (1, 2)}
    assert newest[1]["model"]["weight"].tolist() == [3.0] * 10
    assert [(where, step) for where, step, _ in written] == [(str(tmp_path / "a/b/step-0000000003.pt"), 3)]
    checkpoints.close()
    checkpoints.close()


def test_a_checkpoint_can_be_loaded_with_torch_load(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(str(tmp_path))
    checkpoints.save(make_state(5), 5)
    checkpoints.close()
    loaded = torch.load(tmp_path / "step-0000000005.pt", weights_only=True)
    assert loaded["model"]["weight"].tolist() == [5.0] * 10


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(str(tmp_path), keep=2)
    checkpoints.save(make_state(1), 1, best=True)
    fill(checkpoints, range(2, 6))
    checkpoints.close()
    assert names(tmp_path) == [BEST_NAME, "step-0000000004.pt", "step-0000000005.pt"]
    best = open_checkpoints(str(tmp_path), write=False).load_best()
    assert best is not None
    assert best[1]["meta"]["step"] == 1


@pytest.mark.parametrize("damage", ["truncated", "flip", "empty", "tail"])
def test_a_damaged_checkpoint_is_detected_and_the_previous_one_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[str] = []
    checkpoints = open_checkpoints(str(tmp_path), on_damaged=lambda name, reason: reported.append(f"{name}: {reason}"))
    fill(checkpoints, range(1, 4))
    path = tmp_path / "step-0000000003.pt"
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"truncated": data[:-100], "flip": flipped, "empty": b"", "tail": data + b"x"}[damage])
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0] == "step-0000000002.pt"
    assert len(reported) == 1
    cause = "sha256" if damage == "flip" else "truncated"
    assert re.fullmatch(rf"step-0000000003\.pt: .*corrupt: .*{cause}.*", reported[0])
    assert re.search(r"step-0000000003\.pt: .*corrupt.*; .*previous one", caplog.text)
    # The new checkpoint is kept, and not the damaged one with a higher step.
    checkpoints.save(make_state(2.5), 2)
    checkpoints.close()
    assert names(tmp_path) == ["step-0000000001.pt", "step-0000000002.pt"]


def test_only_damaged_checkpoints_are_an_error_not_a_new_start(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(str(tmp_path))
    fill(checkpoints, range(1, 3))
    for path in tmp_path.glob("step-*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"\b2 checkpoints are corrupt\b.*--checkpoint-dir"):
        checkpoints.load_newest()
    checkpoints.close()


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit",)

    torch.save({"model": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(InputError, match=r"bomb\.pt: .*weights_only"):
        read_weights(str(tmp_path / "bomb.pt"))


def test_two_trainings_cannot_write_to_one_directory(tmp_path: Path) -> None:
    first = open_checkpoints(str(tmp_path))
    with pytest.raises(ConflictError, match=r"process \d+ on .* is writing .*; wait.*--checkpoint-dir"):
        open_checkpoints(str(tmp_path), lock_timeout_s=0.2)
    open_checkpoints(str(tmp_path), write=False).load_newest()
    (tmp_path / ".step-0000000009.pt.123.0123abcd.tmp").write_bytes(b"left by a kill")
    first.close()
    open_checkpoints(str(tmp_path)).close()
    assert names(tmp_path) == []
    assert not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_keeps_the_old_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        checkpoints = open_checkpoints(str(folder), keep=5)
        fill(checkpoints, range(1, 3))
        before = {name: (folder / name).read_bytes() for name in names(folder)}
        checkpoints.save(make_state(3, size=1 << 19), 3)
        checkpoints.save(make_state(4, size=1 << 19), 4)  # a single failure is a warning
        (record,) = caplog.records
        assert re.search(r"not written: .*no space left.*; .*next one", record.getMessage())
        with pytest.raises(StorageFullError, match="no space left"):
            checkpoints.save(make_state(5), 5)  # the second in a row is an error
        assert {name: (folder / name).read_bytes() for name in names(folder)} == before
        assert sorted(path.name for path in folder.iterdir()) == [".lock", *before]
        checkpoints.save(make_state(5), 5)
        checkpoints.save(make_state(6, size=1 << 19), 6)
        checkpoints.save(make_state(7), 7)  # not in a row
        checkpoints.close()
        assert names(folder) == [*before, "step-0000000005.pt", "step-0000000007.pt"]


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as folder:
        directory = folder / "checkpoints"
        with pytest.raises(StorageFullError) as caught:
            open_checkpoints(str(directory))
        assert caught.value.where == str(directory)
        with pytest.raises(StorageFullError, match=r"rank-0\.jsonl"):
            Ledger(folder, rank=0, attempt=0, session=1, cursor=Cursor(0, 0, ""))
        left = directory / f".step-0000000001.pt.1.{'0' * 8}.tmp"
        (folder / "filler").replace(left)
        open_checkpoints(str(directory)).close()  # what a killed training has left is removed first
        assert not left.exists()


def test_close_raises_the_error_of_the_last_write(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        checkpoints = open_checkpoints(str(folder))
        checkpoints.save(make_state(3, size=1 << 19), 3)
        with pytest.raises(StorageFullError):
            checkpoints.close()
        open_checkpoints(str(folder), lock_timeout_s=0).close()  # the directory was unlocked nevertheless


def test_checkpoints_in_a_bucket(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_environ(moto_url).items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket="checkpoints")
    checkpoints = open_checkpoints("s3://checkpoints/run/1", keep=2)
    checkpoints.save(make_state(1), 1, best=True)
    fill(checkpoints, range(2, 5))
    newest, best = checkpoints.load_newest(), checkpoints.load_best()
    assert newest is not None
    assert best is not None
    assert (newest[0], newest[1]["meta"]["step"], best[1]["meta"]["step"]) == ("step-0000000004.pt", 4, 1)
    checkpoints.close()
    assert read_weights("s3://checkpoints/run/1/best.pt").model["weight"].tolist() == [1.0] * 10
    listed = s3.list_objects_v2(Bucket="checkpoints")["Contents"]
    assert [entry["Key"].rpartition("/")[2] for entry in listed] == [
        BEST_NAME,
        "step-0000000003.pt",
        "step-0000000004.pt",
    ]


def test_weights_of_other_programs(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    for number, saved in enumerate(
        (model.state_dict(), wrapped, {"state_dict": wrapped}, {"model": wrapped, "epoch": 3})
    ):
        torch.save(saved, tmp_path / f"{number}.pt")
        other = torch.nn.Linear(3, 2)
        load_weights(other, read_weights(str(tmp_path / f"{number}.pt")).model, where="x")
        assert torch.equal(other.weight, model.weight)
    with pytest.raises(InputError, match=r"^x: .*do not match.*\bweight .*2×3.*5×3, bias "):
        load_weights(torch.nn.Linear(3, 5), model.state_dict(), where="x")
    with pytest.raises(InputError, match=r"^x: .*\bbias is not in the model$"):
        load_weights(torch.nn.Linear(3, 2, bias=False), model.state_dict(), where="x")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match=r"list\.pt: .*no state_dict"):
        read_weights(str(tmp_path / "list.pt"))
    with pytest.raises(InputError, match=r"none\.pt: .*(not found|no such file)"):
        read_weights(str(tmp_path / "none.pt"))


def test_an_unknown_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stoker.trainers.checkpoint_store.VERSION", 2)
        checkpoints = open_checkpoints(str(tmp_path))
        checkpoints.save(make_state(1), 1)
        checkpoints.close()
    with pytest.raises(InputError, match=r"step-0000000001\.pt: .*version 2\b.*\b1\b"):
        open_checkpoints(str(tmp_path), write=False).load_newest()
    with pytest.raises(VerificationError, match=r"^x: .*truncated"):
        decode_checkpoint(b"short", where="x")

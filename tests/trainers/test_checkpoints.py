"""Checkpoints that are damaged, foreign, in a bucket, on a full disk; and weights that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from stoker.errors import ConflictError, DataFaultError, FullError, InputError
from stoker.trainers.checkpoints import BEST, Checkpoints, load_weights, read_weights, unpack
from tests.support.disks import disk
from tests.support.servers import aws_environ


def state(number: float = 1.0, size: int = 10) -> dict[str, Any]:
    return {"model": {"weight": torch.full((size,), number)}, "meta": {"step": int(number), "text": "é", "at": (1, 2)}}


def fill(checkpoints: Checkpoints, steps: range) -> None:
    for step in steps:
        checkpoints.save(state(step), step)
    checkpoints.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    written: list[tuple[str, int, float]] = []
    checkpoints = Checkpoints(str(tmp_path / "a/b"), written=lambda *what: written.append(what))
    assert checkpoints.newest() is None
    assert checkpoints.best() is None
    original = state(3)
    checkpoints.save(original, 3)
    original["model"]["weight"].zero_()  # training goes on while it is written
    checkpoints.wait()
    found = checkpoints.newest()
    assert found is not None
    assert found[0] == "step-0000000003.pt"
    assert found[1]["meta"] == {"step": 3, "text": "é", "at": (1, 2)}
    assert found[1]["model"]["weight"].tolist() == [3.0] * 10
    assert [(where, step) for where, step, _ in written] == [(str(tmp_path / "a/b/step-0000000003.pt"), 3)]
    checkpoints.close()
    checkpoints.close()


def test_a_user_can_load_it_with_torch_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(state(5), 5)
    checkpoints.close()
    loaded = torch.load(tmp_path / "step-0000000005.pt", weights_only=True)
    assert loaded["model"]["weight"].tolist() == [5.0] * 10


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    checkpoints.save(state(1), 1, best=True)
    fill(checkpoints, range(2, 6))
    checkpoints.close()
    assert names(tmp_path) == [BEST, "step-0000000004.pt", "step-0000000005.pt"]
    best = Checkpoints(str(tmp_path), write=False).best()
    assert best is not None
    assert best[1]["meta"]["step"] == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "tail"])
def test_a_damaged_one_is_known_and_the_one_before_it_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(str(tmp_path), damaged=lambda name, why: told.append(f"{name}: {why}"))
    fill(checkpoints, range(1, 4))
    newest = tmp_path / "step-0000000003.pt"
    data = newest.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    newest.write_bytes({"cut": data[:-100], "flip": flipped, "empty": b"", "tail": data + b"x"}[damage])
    found = checkpoints.newest()
    assert found is not None
    assert found[0] == "step-0000000002.pt"
    assert len(told) == 1
    assert told[0].startswith("step-0000000003.pt: this checkpoint is damaged: ")
    assert "going back to the one before it" in caplog.text
    # A later one is not thrown away in favour of the damaged one, whose step is higher.
    checkpoints.save(state(2.5), 2)
    checkpoints.close()
    assert names(tmp_path) == ["step-0000000001.pt", "step-0000000002.pt"]


def test_all_damaged_is_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    fill(checkpoints, range(1, 3))
    for path in tmp_path.glob("step-*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="all 2 checkpoints here are damaged"):
        checkpoints.newest()
    checkpoints.close()


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit",)

    torch.save({"model": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(InputError, match=r"bomb\.pt: no weights that can be loaded safely"):
        read_weights(str(tmp_path / "bomb.pt"))


def test_two_trainings_never_write_one_folder(tmp_path: Path) -> None:
    first = Checkpoints(str(tmp_path))
    with pytest.raises(ConflictError, match=r"process \d+ on .* writes checkpoints here; wait for its end"):
        Checkpoints(str(tmp_path), patience_s=0.2)
    Checkpoints(str(tmp_path), write=False).newest()
    (tmp_path / ".step-0000000009.pt.123.0123abcd.tmp").write_bytes(b"left by a kill")
    first.close()
    Checkpoints(str(tmp_path)).close()
    assert names(tmp_path) == []
    assert not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path / "disk", 1 << 20) as folder:
        checkpoints = Checkpoints(str(folder), keep=5)
        fill(checkpoints, range(1, 3))
        before = {name: (folder / name).read_bytes() for name in names(folder)}
        checkpoints.save(state(3, size=1 << 19), 3)
        checkpoints.save(state(4, size=1 << 19), 4)  # one failure is a warning
        assert re.search(r"a checkpoint was not written: .*no space left.*; the next one is tried", caplog.text)
        with pytest.raises(FullError, match="no space left"):
            checkpoints.save(state(5), 5)  # the second in a row is an error
        assert {name: (folder / name).read_bytes() for name in names(folder)} == before
        assert sorted(path.name for path in folder.iterdir()) == [".lock", *before]
        checkpoints.save(state(5), 5)
        checkpoints.save(state(6, size=1 << 19), 6)
        checkpoints.save(state(7), 7)  # not in a row
        checkpoints.close()
        assert names(folder) == [*before, "step-0000000005.pt", "step-0000000007.pt"]


def test_the_failure_of_the_last_one_is_told_at_the_end(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 1 << 20) as folder:
        checkpoints = Checkpoints(str(folder))
        checkpoints.save(state(3, size=1 << 19), 3)
        with pytest.raises(FullError):
            checkpoints.close()
        Checkpoints(str(folder), patience_s=0).close()  # it let go of the folder all the same


def test_a_bucket(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_environ(moto_url).items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket="checkpoints")
    checkpoints = Checkpoints("s3://checkpoints/run/1", keep=2)
    checkpoints.save(state(1), 1, best=True)
    fill(checkpoints, range(2, 5))
    found, best = checkpoints.newest(), checkpoints.best()
    assert found is not None
    assert best is not None
    assert (found[0], found[1]["meta"]["step"], best[1]["meta"]["step"]) == ("step-0000000004.pt", 4, 1)
    checkpoints.close()
    assert read_weights("s3://checkpoints/run/1/best.pt").model["weight"].tolist() == [1.0] * 10
    listed = s3.list_objects_v2(Bucket="checkpoints")["Contents"]
    assert [one["Key"].rpartition("/")[2] for one in listed] == [BEST, "step-0000000003.pt", "step-0000000004.pt"]


def test_weights_of_others(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    inside = {f"module.{name}": value for name, value in model.state_dict().items()}
    for number, saved in enumerate((model.state_dict(), inside, {"state_dict": inside}, {"model": inside, "epoch": 3})):
        torch.save(saved, tmp_path / f"{number}.pt")
        other = torch.nn.Linear(3, 2)
        load_weights(other, read_weights(str(tmp_path / f"{number}.pt")).model, where="x")
        assert torch.equal(other.weight, model.weight)
    with pytest.raises(InputError, match=r"x: these weights do not fit the model: weight is 2×3 and not 5×3, bias is"):
        load_weights(torch.nn.Linear(3, 5), model.state_dict(), where="x")
    with pytest.raises(InputError, match="bias is not in the model"):
        load_weights(torch.nn.Linear(3, 2, bias=False), model.state_dict(), where="x")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds no state_dict of a model"):
        read_weights(str(tmp_path / "list.pt"))
    with pytest.raises(InputError, match="no such file"):
        read_weights(str(tmp_path / "none.pt"))


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("stoker.trainers.checkpoints.VERSION", 2)
        checkpoints = Checkpoints(str(tmp_path))
        checkpoints.save(state(1), 1)
        checkpoints.close()
    with pytest.raises(InputError, match=r"step-0000000001\.pt: a checkpoint of version 2, and this reads 1"):
        Checkpoints(str(tmp_path), write=False).newest()
    with pytest.raises(DataFaultError, match="its end is missing"):
        unpack(b"short", where="x")

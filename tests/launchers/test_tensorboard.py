"""Event files that TensorFlow itself reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stoker.jobs.run_folder import find
from stoker.launchers.tensorboard import Board
from stoker.telemetry.events import Event
from tests.support.trees import stoker

SCRIPT = """
from stoker.telemetry import recorder
record = recorder()
for step in range(5):
    record.scalar("loss", 1 / (step + 1), step)
"""


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    tf = pytest.importorskip("tensorflow")
    return [
        (value.tag, event.step, value.simple_value)
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]


@pytest.mark.filterwarnings("ignore")
def test_one_flag_writes_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    job = {"name": "own", "topology": "single", "program": {"script": "own.py"}, "profile": {"every": 0}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", "job.yaml", "--tensorboard") == 0
    found = scalars(find("own").folder / "tensorboard")
    assert [(name, step) for name, step, _ in found] == [("loss", step) for step in range(5)]
    assert [value for *_, value in found] == pytest.approx([1 / (step + 1) for step in range(5)])


@pytest.mark.filterwarnings("ignore")
def test_odd_values_do_no_harm(tmp_path: Path) -> None:
    told = [("a", math.nan, 1), ("b", 1e300, 2), ("c", "text", 3), ("d", 4.0, None), ("ü", -2, 2**40), ("e", 5.0, -7)]
    events = [Event(1.5, "", 0, 0, 0, "scalar", {"name": n, "value": v, "step": s}) for n, v, s in told]
    Board(tmp_path).write(events)
    found = scalars(tmp_path)
    assert [(name, step) for name, step, _ in found] == [("a", 1), ("b", 2), ("ü", 2**40), ("e", 0)]
    assert math.isnan(found[0][2])
    assert found[1][2] == math.inf
    assert found[2][2] == -2


def test_no_scalars_no_file(tmp_path: Path) -> None:
    Board(tmp_path / "none").write([Event(0, "", 0, 0, 0, "mark", {"name": "start"})])
    assert not (tmp_path / "none").exists()

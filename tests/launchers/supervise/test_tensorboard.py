"""TensorBoard event files, read back with TensorFlow."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stoker.jobs.run_folder import find_run
from stoker.launchers.supervise.tensorboard import ScalarWriter
from stoker.telemetry.events import Event
from tests.support.trees import stoker

SCRIPT = """
from stoker.telemetry import recorder
record = recorder()
for step in range(5):
    record.scalar("loss", 1 / (step + 1), step)
"""


def read_scalars(folder: Path) -> list[tuple[str, int, float]]:
    tf = pytest.importorskip("tensorflow")
    return [
        (value.tag, event.step, value.simple_value)
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("stoker_home")
def test_tensorboard_flag_writes_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    job = {"name": "own", "topology": "single", "program": {"script": "own.py"}, "profile": {"every": 0}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", "job.yaml", "--tensorboard") == 0
    scalars = read_scalars(find_run("own").folder / "tensorboard")
    assert [(name, step) for name, step, _ in scalars] == [("loss", step) for step in range(5)]
    assert [value for *_, value in scalars] == pytest.approx([1 / (step + 1) for step in range(5)])


@pytest.mark.filterwarnings("ignore")
def test_unusual_values_are_written_or_skipped(tmp_path: Path) -> None:
    values = [("a", math.nan, 1), ("b", 1e300, 2), ("c", "text", 3), ("d", 4.0, None), ("ü", -2, 2**40), ("e", 5.0, -7)]
    events = [Event(1.5, "", 0, 0, 0, "scalar", {"name": n, "value": v, "step": s}) for n, v, s in values]
    ScalarWriter(tmp_path).write(events)
    scalars = read_scalars(tmp_path)
    assert [(name, step) for name, step, _ in scalars] == [("a", 1), ("b", 2), ("ü", 2**40), ("e", 0)]
    assert math.isnan(scalars[0][2])
    assert scalars[1][2] == math.inf
    assert scalars[2][2] == -2


def test_no_file_without_scalars(tmp_path: Path) -> None:
    ScalarWriter(tmp_path / "none").write([Event(0, "", 0, 0, 0, "mark", {"name": "start"})])
    assert not (tmp_path / "none").exists()

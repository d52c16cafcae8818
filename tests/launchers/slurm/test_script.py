"""The batch script of a job, and the checks of its settings; nothing here needs Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import SpecError
from stoker.launchers.slurm.batch import BATCH, RUN_SLOT
from stoker.launchers.slurm.launcher import SlurmLauncher
from stoker.launchers.slurm.script import build_script, format_time_limit
from tests.launchers.contract import job_of
from tests.support.paths import GOLDEN

JOBS: dict[str, dict[str, Any]] = {
    "torchrun": {
        "program": {"script": "/code/train.py", "args": ["--name", "it's"], "cwd": "/code"},
        "topology": "torchrun",
        "workers": 2,
        "resources": {"cpu": 8, "memory": "32Gi", "gpu": 4, "gpu_type": "a100"},
        "profile": {"every": 30},
        "checkpoint": {"dir": "/checkpoints"},
        "retries": 3,
        "slurm": {
            "partition": "gpu",
            "account": "vision",
            "time": "1d2h",
            "exclude": ["node[3-4]"],
            "setup": "module load cuda/12.4",
            "options": ["--reservation=exam"],
        },
    },
    "mpi": {
        "program": {"script": "/code/train.py", "cwd": "/code"},
        "topology": "mpi",
        "workers": 2,
        "resources": {"gpu": 2},
    },
    "tf-ps": {
        "program": {"script": "/code/train.py", "cwd": "/code"},
        "topology": "tf-ps",
        "workers": 2,
        "roles": {"ps": {"resources": {"memory": "2Gi"}}, "evaluator": {"count": 1}},
        "slurm": {"nodes": 2},
    },
}


@pytest.mark.parametrize("name", JOBS)
def test_script(name: str, request: pytest.FixtureRequest) -> None:
    script = build_script(job_of(**JOBS[name]), "/env/bin/python")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if name != "torchrun":  # the rest does not depend on the job
        script = script.removesuffix(RUN_SLOT + "\n" + BATCH)
    golden = GOLDEN / "slurm" / f"{name}.sh"
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(script)
    assert script == golden.read_text()


@pytest.mark.parametrize(
    ("style", "expected"), [("gpus-per-task", "gpus-per-task=a100:4"), ("gres", "gres=gpu:a100:8")]
)
def test_gpu_request(style: str, expected: str) -> None:
    keys = {**JOBS["torchrun"], "slurm": {"gpu_request": style, "nodes": 1}}
    lines = build_script(job_of(**keys), "python3").splitlines()
    assert f"#SBATCH --{expected}" in lines
    assert f"#SBATCH --mem={2 * 32 * 1024}M" in lines


@pytest.mark.parametrize(
    ("seconds", "expected"), [(60, "0-00:01:00"), (26 * 3600 + 90, "1-02:01:30"), (61.5, "0-00:01:02")]
)
def test_time_limit(seconds: float, expected: str) -> None:
    assert format_time_limit(seconds) == expected


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"topology": "torchrun", "program": {"module": "this"}, "workers": {"min": 1, "max": 2}}, "workers"),
        ({"topology": "tf-mirrored", "workers": "all"}, "workers"),
        ({"topology": "tf-ps", "resources": {"gpu": 1}}, "resources.gpu"),
        ({"tensorboard": True}, "tensorboard"),
        ({"data": {"train": "missing"}}, "data.train"),
        ({"program": {"script": "missing.py"}}, "program.script"),
        ({"slurm": {"time": 30}}, "slurm.time"),
        ({"slurm": {"options": ["--array=1-3"]}}, "slurm.options[0]"),
        ({"slurm": {"options": ["--partition=x"]}}, "slurm.options[0]"),
        ({"slurm": {"options": ["-p x"]}}, "slurm.options[0]"),
        ({"slurm": {"partition": "two words"}}, "slurm.partition"),
    ],
)
def test_rejected_jobs(keys: dict[str, Any], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base: dict[str, Any] = {} if "program" in keys else {"program": {"command": ["true"]}}
    with pytest.raises(SpecError) as caught:
        SlurmLauncher().render(job_of(**base, **keys))
    assert [fault.path for fault in caught.value.faults] == [path]


@pytest.mark.parametrize("home", ["/tmp/stoker", "/home/me/stoker"])
def test_run_folder_on_a_local_disk_is_noted(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", home)
    monkeypatch.chdir("/")
    notes = SlurmLauncher().render(job_of("true")).notes
    assert [home in note for note in notes] == ([True] if home.startswith("/tmp") else [])

"""`stoker model serve` as a command: what it serves, the token, signals, and what it refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stoker.cli.model import default_model_name, find_model
from stoker.errors import NotFoundError
from tests.support.model_servers import model_serve_command
from tests.support.runs import Runs
from tests.support.trees import image_bytes, import_without, stoker
from tests.support.waiting import wait_until

TOKEN, OTHER_TOKEN = "0123456789abcdef", "fedcba9876543210"


def test_a_run_is_served_with_a_token_until_sigterm(trained: Path, stoker_home: Path, tmp_path: Path) -> None:
    Runs().write(stoker_home, "digits-20260101-000000-abcd", checkpoint={"dir": str(trained / "checkpoints")})
    token = tmp_path / "token"
    token.write_text(TOKEN)
    words = ("digits", "--host", "0.0.0.0", "--token-file", token, "--access-log", "--device", "cpu")
    with model_serve_command(*words, log=tmp_path / "log") as (process, client):
        assert client.get("/v1/models/digits").status == 401
        answer = client.get("/v1/models/digits", authorization=f"Bearer {TOKEN}")
        assert answer.json["model_version_status"][0]["state"] == "AVAILABLE"
        classified = client.post("/classify", image_bytes(3), authorization=f"Bearer {TOKEN}")
        assert len(classified.json["classes"]) == 5
        token.write_text(OTHER_TOKEN)
        os.kill(process.pid, signal.SIGHUP)
        wait_until(lambda: client.get("/model", authorization=f"Bearer {OTHER_TOKEN}").status == 200)
        assert client.get("/model", authorization=f"Bearer {TOKEN}").status == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    log = (tmp_path / "log").read_text()
    assert '"POST /classify" 200' in log
    assert "Traceback" not in log
    assert TOKEN not in log


def test_a_running_training_is_found_by_its_job_name(trained: Path, stoker_home: Path) -> None:
    Runs().write(stoker_home, "digits-20260101-000000-abcd", checkpoint={"dir": str(trained / "checkpoints")})
    for which, expected in (("best", "best.pt"), ("newest", "step-0000000006.pt")):
        source, name = find_model("digits", which, "cpu")
        assert name == "digits"
        assert [candidate.name for candidate in source.list_candidates()] == [expected]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["none"], 2, "none"),
        (["no/such/dir"], 2, "no/such/dir"),
        (["missing.pt"], 2, "missing.pt"),
        ([""], 2, "MODEL"),
        (["."], 2, "SavedModel"),
        ([".", "--host", "0.0.0.0"], 2, "--token-file"),
        ([".", "--host", "0.0.0.0", "--token-file", "none"], 2, "none"),
        ([".", "--versions", "0"], 2, "--versions"),
        ([".", "--max-batch-size", "0"], 2, "--max-batch-size"),
        ([".", "--max-body", "x"], 2, "--max-body"),
        ([".", "--max-body", "10"], 2, "--max-body must be between 1 MiB and 1 GiB, got 10 B; add a unit"),
        ([".", "--max-body", "2Gi"], 2, "--max-body must be between 1 MiB and 1 GiB, got 2 GiB"),
        ([".", "--checkpoint", "x"], 2, "--checkpoint"),
        ([".", "--device", "tpu"], 2, "--device"),
        (["model", "--port", "70000"], 2, "--port"),
        (["model", "--name", "a/b"], 2, "--name"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    workspace: Path, words: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model/1").mkdir(parents=True)
    Path("model/1/saved_model.pb").touch()
    assert stoker("model", "serve", *words) == code
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


def test_a_run_without_checkpoints_is_not_found(stoker_home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Runs().write(stoker_home, "digits-20260101-000000-abcd", checkpoint={"dir": str(tmp_path / "empty")})
    with pytest.raises(NotFoundError):
        find_model("digits", "best", "cpu")


def test_default_names() -> None:
    assert default_model_name("models/pets") == "pets"
    assert default_model_name("models/pets/3") == "pets"
    assert default_model_name("runs/my pets!/best.pt") == "best"
    assert default_model_name("s3://bucket/pets") == "pets"
    assert default_model_name("/1") == "model"


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("starlette", "stoker.model_server.http_api"),
        ("uvicorn", "stoker.model_server.server"),
        ("tensorflow", "stoker.model_server.saved_model"),
    ],
)
def test_missing_packages_name_their_extra(package: str, module: str) -> None:
    extra = "tf" if package == "tensorflow" else "web"
    assert f"stoker[{extra}]" in import_without(package, module)

"""`stoker data warm`: which shards it reads through a cache and in which order; refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from stoker.load.planning import find_shard_set, plan_sampling
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from stoker.serve.cache.warm import order_shards, select_fitting
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.storage import Entry
from tests.support import servers
from tests.support.engines import TOKEN, run_embedded
from tests.support.http_origin import OriginServer, run_origin
from tests.support.http_requests import send_request
from tests.support.refusals import expect_refusal
from tests.support.trees import make_tree, stoker


class RemoteSet(NamedTuple):
    """A shard set at an origin, a cache in front of it, and the same set on disk."""

    origin: OriginServer
    cache: str
    url: str
    local: str


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images in twelve shards."""
    folder = tmp_path_factory.mktemp("warm")
    make_tree(folder / "pets", {"ant": 20, "bee": 20, "cat": 20})
    assert stoker("data", "convert", folder / "pets", folder / "shards", "--shard-samples", 5) == 0
    return folder / "shards" / "train"


@pytest.fixture
def far(shards: Path, tmp_path: Path) -> Iterator[RemoteSet]:
    files = {
        f"/set/train/{path.relative_to(shards)}": path.read_bytes() for path in shards.rglob("*") if path.is_file()
    }
    with ExitStack() as stack:
        origin = stack.enter_context(run_origin(files))
        settings = CacheSettings(origins=(("pets", f"{origin.url}/set"),), dir=tmp_path / "cache", size=1 << 26, port=0)
        cache = stack.enter_context(run_embedded(settings))
        yield RemoteSet(origin, cache, f"{origin.url}/set/train", str(shards))


def loader_order(local: str, sampling: str = "exact", seed: int = 0, epoch: int = 0) -> list[str]:
    """Return the shards in the order in which the Loader first reads them."""
    shard_set = find_shard_set(local)
    drawn = plan_sampling(shard_set, sampling=sampling, seed=seed).epoch(epoch, Rank(0, 1))
    return list(
        dict.fromkeys(shard_set.shards[number].name for number in drawn.upcoming_shards(0, windows=100).tolist())
    )


def fetched_shards(far: RemoteSet) -> list[str]:
    """Return the shards requested from the origin, in order."""
    return [path.rpartition("/")[2] for path, _ in far.origin.get_requests if path.endswith(".tar")]


def run_warm(capsys: pytest.CaptureFixture[str], far: RemoteSet, *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "warm", far.url, "--via", far.cache, "--jobs", 1, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        ([], ("exact", 0, 0)),
        (["--seed", 7], ("exact", 7, 0)),
        (["--seed", 7, "--epoch", 3], ("exact", 7, 3)),
        (["--sampling", "join", "--seed", 2], ("join", 2, 0)),
        (["--sampling", "resampled", "--seed", 2], ("resampled", 2, 0)),
    ],
)
def test_warm_follows_the_sampling_plan(
    far: RemoteSet, capsys: pytest.CaptureFixture[str], words: Sequence[object], drawn: tuple[str, int, int]
) -> None:
    expected = loader_order(far.local, *drawn)
    report = run_warm(capsys, far, *words)
    assert report["shards"] == fetched_shards(far) == expected
    assert report["bytes"] == sum((Path(far.local) / name).stat().st_size for name in expected)
    for name in expected:
        assert send_request(far.cache, f"/pets/train/{name}").headers["x-cache"] == "HIT"
    assert fetched_shards(far) == expected


def test_warm_skips_shards_that_would_evict_earlier_ones() -> None:
    shards = [Entry(f"{number}", 10) for number in range(10)]
    assert select_fitting(shards, 50) == shards[:4]
    assert select_fitting(shards, 1000) == shards


def test_first_batches_use_the_first_warmed_shards(far: RemoteSet) -> None:
    shard_set = find_shard_set(far.local)
    plan = plan_sampling(shard_set, seed=3)
    epoch = plan.epoch(0, Rank(0, 1))
    first = epoch.locate(np.arange(8)).shards
    names = loader_order(far.local, seed=3)
    assert {shard_set.shards[number].name for number in first.tolist()} <= set(names[: plan.lanes * plan.window])


def test_resampled_plan_warms_every_drawn_shard() -> None:
    sizes = np.array([1000, 1, 1, 1], dtype=np.int64)
    shards = [Entry(str(number), 1) for number in range(4)]
    for seed in range(50):
        plan = SamplingPlan(data="", sizes=sizes, mode="resampled", seed=seed, lanes=1, window=1)
        needed = set(plan.epoch(0, Rank(0, 1)).locate(np.arange(plan.samples)).shards.tolist())
        assert {int(entry.name) for entry in order_shards(plan, shards)} == needed


def test_warm_a_range_of_shards(far: RemoteSet, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_warm(capsys, far, "--shards", "0..3")["shards"] == fetched_shards(far) == loader_order(far.local)[:4]
    assert run_warm(capsys, far, "--shards", "10..")["shards"] == loader_order(far.local)[10:]
    for text in ("3", "a..b", "3..1", "12..20", "-1..3", ""):
        capsys.readouterr()
        assert stoker("data", "warm", far.url, "--via", far.cache, f"--shards={text}") == 2
        assert re.search(rf"--shards\b.* '?{re.escape(text)}\b", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("program: {module: x}\ndata: {train: http://x/train}", ("exact", 0)),
        ("program: {module: x}\ndata: {sampling: join, cache: {dir: /c, size: 2Gi}}\nworkers: 4", ("join", 0)),
        ("program: {module: x, args: [--epochs, 90, --seed, 7]}\ndata: {sampling: resampled}", ("resampled", 7)),
        ("program: {script: x.py, args: [--seed=11, -v]}", ("exact", 11)),
    ],
)
def test_warm_takes_sampling_and_seed_from_a_job_file(
    far: RemoteSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, drawn: tuple[str, int]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"name: x\n{text}")
    expected = loader_order(far.local, *drawn)
    assert run_warm(capsys, far, "--job", job, "--shards", "0..3")["shards"] == expected[:4]
    assert run_warm(capsys, far, "--job", job)["shards"] == expected
    assert run_warm(capsys, far, "--job", job, "--seed", 5)["shards"] == loader_order(far.local, drawn[0], 5)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: x", "program: missing"),
        ("", "name: missing"),
        ("data: [", "not valid YAML: .*line 2"),
        ("data: http://x/train", "data: .*mapping"),
        ("data: {sampling: often}", "data.sampling: .*'exact', 'join', 'resampled'.*'often'"),
        ("name: x\nprogram: {module: x, args: [--seed, x]}", "program.args: --seed .*'x'"),
        ("name: x\nprogram: {module: x, args: [--seed]}", "program.args: --seed .*''"),
        (None, "job.yaml: .*no such file"),
    ],
)
def test_warm_refuses_bad_job_files(
    far: RemoteSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, part: str
) -> None:
    if text is not None:
        (tmp_path / "job.yaml").write_text(text)
    expect_refusal(capsys, 2, part, "warm", far.url, "--via", far.cache, "--job", tmp_path / "job.yaml")
    assert fetched_shards(far) == []


def test_warm_a_pattern_through_a_cache_with_a_token(
    far: RemoteSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = CacheSettings(
        origins=(("", far.origin.url),), dir=tmp_path / "guarded", size=1 << 26, port=0, token=TOKEN
    )
    with run_embedded(settings) as url:
        via = url.replace("://", f"://stoker:{TOKEN}@")
        assert stoker("data", "warm", f"{far.url}/pets-train-{{000000..000003}}.tar", "--via", via) == 0
        err = capsys.readouterr().err
        assert "4 shards" in err
        assert TOKEN not in err
        assert len(set(fetched_shards(far))) == 4
        expect_refusal(capsys, 5, "", "warm", far.url, "--via", url)


def test_warm_refuses_a_cache_that_does_not_serve_the_set(
    far: RemoteSet, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_embedded(ServeSettings(root=root, port=0)) as url:
        expect_refusal(capsys, 5, "not a stoker cache; .*stoker data cache", "warm", far.url, "--via", url)
    nowhere = f"http://127.0.0.1:{servers.free_port()}"
    expect_refusal(capsys, 5, r"connection refused \(5 attempts\)", "warm", far.url, "--via", nowhere)
    for url in (f"{far.origin.url}/other/train", f"{far.origin.url}/setting", "s3://bucket/set"):
        expect_refusal(capsys, 2, "its origins are", "warm", url, "--via", far.cache)
    expect_refusal(capsys, 2, "no such", "warm", f"{far.origin.url}/set/none/a.tar", "--via", far.cache)
    expect_refusal(capsys, 2, r"--jobs\b.*\b256\b.* 0\b", "warm", far.url, "--via", far.cache, "--jobs", 0)
    expect_refusal(capsys, 2, r"--epoch\b.* -1\b", "warm", far.url, "--via", far.cache, "--epoch", -1)

"""webdataset and stoker's Loader over http: from the data servers and caches of both engines."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stoker import Loader
from stoker.errors import AccessDeniedError
from stoker.serve.engines import create_cache, create_server
from stoker.serve.settings import CacheSettings, ServeSettings
from tests.support.engines import HAS_NGINX, TOKEN, run_engine
from tests.support.http_requests import send_request
from tests.support.trees import make_tree, stoker

COUNT, PATTERN = 60, "pets-train-{000000..000007}.tar"

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="webdataset needs curl for http://")

Sample = tuple[str, bytes, int]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images of three classes in eight shards, below `train`."""
    folder = tmp_path_factory.mktemp("peers")
    make_tree(folder / "pets", {"ant": 20, "bee": 20, "cat": 20})
    assert stoker("data", "convert", folder / "pets", folder / "shards", "--shard-samples", 8) == 0
    return folder / "shards"


@pytest.fixture(scope="module")
def truth(root: Path) -> list[Sample]:
    """Key, image and label of every sample, from the folders of images."""
    tree = root.parent / "pets"
    labels = {name: label for label, name in enumerate(("ant", "bee", "cat"))}
    samples = [
        (str(path.relative_to(tree).with_suffix("")), path.read_bytes(), labels[path.parent.name])
        for path in sorted(tree.rglob("*.jpg"))
    ]
    assert len(samples) == COUNT
    return samples


@pytest.fixture(
    scope="module",
    params=[(service, engine) for service in ("serve", "cache") for engine in ("embedded", "nginx")],
    ids="-".join,
)
def set_url(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the shard set at a data server, or at a cache in front of one."""
    service, engine = request.param
    if engine == "nginx" and not HAS_NGINX:
        pytest.skip("nginx is not installed")
    with ExitStack() as stack:
        if service == "serve":
            url = stack.enter_context(run_engine(create_server(ServeSettings(root=root, port=0), engine)))
        else:
            origin = stack.enter_context(run_engine(create_server(ServeSettings(root=root, port=0), "embedded")))
            settings = CacheSettings(
                origins=(("pets", origin),), dir=tmp_path_factory.mktemp("cache"), size=1 << 28, port=0
            )
            url = f"{stack.enter_context(run_engine(create_cache(settings, engine)))}/pets"
        yield f"{url}/train"


@pytest.fixture(scope="module", params=["embedded", "nginx"])
def protected_url(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    """The URL of a server that requires a token."""
    if request.param == "nginx" and not HAS_NGINX:
        pytest.skip("nginx is not installed")
    with run_engine(create_server(ServeSettings(root=root, port=0, token=TOKEN), request.param)) as url:
        yield url


def with_credentials(url: str) -> str:
    return url.replace("://", f"://stoker:{TOKEN}@")


def count_samples(loader: Loader) -> Counter[tuple[str, int]]:
    """Count how often each image was delivered, with its label."""
    with loader:
        return Counter(
            (hashlib.sha256(image).hexdigest(), int(label))
            for batch in loader
            for image, label in zip(batch.images, batch.labels, strict=True)
        )


def expected_samples(truth: list[Sample]) -> Counter[tuple[str, int]]:
    return Counter((hashlib.sha256(image).hexdigest(), label) for _, image, label in truth)


def train_with_webdataset(pattern: str, workers: int) -> Counter[tuple[str, int]]:
    """Train one epoch with webdataset and DataLoader; count how often each key was delivered, with its label."""
    import torch
    import webdataset
    from torch.utils.data import DataLoader

    dataset: Any = (
        webdataset.WebDataset(pattern, shardshuffle=False).decode("torchrgb").to_tuple("__key__", "jpg", "cls")
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 18 * 24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    delivered: Counter[tuple[str, int]] = Counter()
    for keys, images, labels in DataLoader(dataset, batch_size=7, num_workers=workers):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert torch.isfinite(loss)
        delivered.update(zip(keys, labels.tolist(), strict=True))
    return delivered


@needs_curl
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset does not close its pipes
def test_webdataset_trains(set_url: str, truth: list[Sample]) -> None:
    assert train_with_webdataset(f"{set_url}/{PATTERN}", workers=2) == Counter((key, label) for key, _, label in truth)


@needs_curl
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_reads_samples_in_shard_order(set_url: str, root: Path) -> None:
    import webdataset

    samples = [
        (sample["__key__"], sample["jpg"], int(sample["cls"]))
        for sample in webdataset.WebDataset(f"{set_url}/{PATTERN}", shardshuffle=False)
    ]
    assert samples == [sample for shard in sorted((root / "train").glob("*.tar")) for sample in read_shard(shard)]


def read_shard(path: Path) -> list[Sample]:
    """Read a shard with the standard library."""
    with tarfile.open(path) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    keys = [name.removesuffix(".jpg") for name in members if name.endswith(".jpg")]
    return [(key, members[f"{key}.jpg"], int(members[f"{key}.cls"])) for key in keys]


@needs_curl
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_sends_the_token_as_basic_auth(protected_url: str, truth: list[Sample]) -> None:
    assert send_request(protected_url, "/train/manifest.json").status == 401
    assert train_with_webdataset(f"{with_credentials(protected_url)}/train/{PATTERN}", workers=0) == Counter(
        (key, label) for key, _, label in truth
    )


@pytest.mark.parametrize("node_cache", [False, True], ids=["direct", "node-cache"])
@pytest.mark.parametrize("addressed_by", ["manifest", "pattern"])
def test_loader_reads_every_sample_once(
    set_url: str, truth: list[Sample], tmp_path: Path, addressed_by: str, node_cache: bool
) -> None:
    url = set_url if addressed_by == "manifest" else f"{set_url}/{PATTERN}"
    cache = tmp_path / "node" if node_cache else None
    assert count_samples(Loader(url, global_batch=8, transform=None, cache=cache)) == expected_samples(truth)
    if cache is not None:  # samples read by ranges before their shard was fetched need not be cached
        cached = [path for path in (cache / "objects").iterdir() if len(path.name) == 64]
        assert cached
        assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in cached)


def test_loader_decodes(set_url: str) -> None:
    with Loader(set_url, global_batch=8, transform="imagenet-val", size=16) as loader:
        shapes = [batch.images.shape for batch in loader]
    assert shapes == [(8, 16, 16, 3)] * 7 + [(4, 16, 16, 3)]


@pytest.mark.parametrize("node_cache", [False, True], ids=["direct", "node-cache"])
@pytest.mark.parametrize("addressed_by", ["manifest", "pattern"])
def test_loader_sends_the_token_as_basic_auth(
    protected_url: str, truth: list[Sample], tmp_path: Path, addressed_by: str, node_cache: bool
) -> None:
    url = f"{with_credentials(protected_url)}/train" + ("" if addressed_by == "manifest" else f"/{PATTERN}")
    loader = Loader(url, global_batch=8, transform=None, cache=tmp_path / "node" if node_cache else None)
    assert TOKEN not in loader.shard_set.url
    assert count_samples(loader) == expected_samples(truth)


def test_loader_without_the_token_gets_access_denied(protected_url: str) -> None:
    with pytest.raises(AccessDeniedError) as caught:
        Loader(f"{protected_url}/train", global_batch=8)
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"{protected_url}/train")
    assert "user:password" in str(caught.value)
    wrong = protected_url.replace("://", "://stoker:wrong-token-of-it@")
    with pytest.raises(AccessDeniedError) as caught:
        Loader(f"{wrong}/train", global_batch=8)
    assert "wrong-token-of-it" not in str(caught.value)

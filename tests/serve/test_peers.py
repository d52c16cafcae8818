"""webdataset, unchanged, and our Loader over http: from both engines, and through both caches."""

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
from stoker.errors import AccessError
from stoker.serve.engines import caching, serving
from stoker.serve.settings import CacheSettings, ServeSettings
from tests.serve.contract import TOKEN, ask, has_nginx, running
from tests.support.trees import make_tree, stoker

COUNT, PATTERN = 60, "pets-train-{000000..000007}.tar"

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None, reason="webdataset opens http:// by curl, which is missing"
)

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
    """Key, image and label of every sample, as the folders of images have them."""
    tree = root.parent / "pets"
    labels = {name: label for label, name in enumerate(("ant", "bee", "cat"))}
    found = [
        (str(path.relative_to(tree).with_suffix("")), path.read_bytes(), labels[path.parent.name])
        for path in sorted(tree.rglob("*.jpg"))
    ]
    assert len(found) == COUNT
    return found


@pytest.fixture(
    scope="module",
    params=[(what, engine) for what in ("serve", "cache") for engine in ("embedded", "nginx")],
    ids="-".join,
)
def place(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the set's folder at a server, or at a cache in front of one."""
    what, engine = request.param
    if engine == "nginx" and not has_nginx:
        pytest.skip("nginx is not installed")
    with ExitStack() as stack:
        if what == "serve":
            url = stack.enter_context(running(serving(ServeSettings(root=root, port=0), engine)))
        else:
            origin = stack.enter_context(running(serving(ServeSettings(root=root, port=0), "embedded")))
            settings = CacheSettings(
                origins=(("pets", origin),), dir=tmp_path_factory.mktemp("cache"), size=1 << 28, port=0
            )
            url = f"{stack.enter_context(running(caching(settings, engine)))}/pets"
        yield f"{url}/train"


@pytest.fixture(scope="module", params=["embedded", "nginx"])
def guarded(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    """A server that asks for a token."""
    if request.param == "nginx" and not has_nginx:
        pytest.skip("nginx is not installed")
    with running(serving(ServeSettings(root=root, port=0, token=TOKEN), request.param)) as url:
        yield url


def with_login(url: str) -> str:
    return url.replace("://", f"://stoker:{TOKEN}@")


def seen_by(loader: Loader) -> Counter[tuple[str, int]]:
    """How often each image came, with its label."""
    with loader:
        return Counter(
            (hashlib.sha256(image).hexdigest(), int(label))
            for batch in loader
            for image, label in zip(batch.images, batch.labels, strict=True)
        )


def once_each(truth: list[Sample]) -> Counter[tuple[str, int]]:
    return Counter((hashlib.sha256(image).hexdigest(), label) for _, image, label in truth)


def train(pattern: str, workers: int) -> Counter[tuple[str, int]]:
    """Train one epoch by webdataset and torch's DataLoader; give how often each key came, with its label."""
    import torch
    import webdataset
    from torch.utils.data import DataLoader

    dataset: Any = (
        webdataset.WebDataset(pattern, shardshuffle=False).decode("torchrgb").to_tuple("__key__", "jpg", "cls")
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 18 * 24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: Counter[tuple[str, int]] = Counter()
    for keys, images, labels in DataLoader(dataset, batch_size=7, num_workers=workers):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert torch.isfinite(loss)
        seen.update(zip(keys, labels.tolist(), strict=True))
    return seen


@needs_curl
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its pipes to the garbage collector
def test_webdataset_trains(place: str, truth: list[Sample]) -> None:
    assert train(f"{place}/{PATTERN}", workers=2) == Counter((key, label) for key, _, label in truth)


@needs_curl
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_reads_the_bytes_in_the_order_of_the_shards(place: str, root: Path) -> None:
    import webdataset

    found = [
        (sample["__key__"], sample["jpg"], int(sample["cls"]))
        for sample in webdataset.WebDataset(f"{place}/{PATTERN}", shardshuffle=False)
    ]
    assert found == [sample for shard in sorted((root / "train").glob("*.tar")) for sample in in_shard(shard)]


def in_shard(path: Path) -> list[Sample]:
    """Read a shard by the standard library."""
    with tarfile.open(path) as tar:
        members = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    keys = [name.removesuffix(".jpg") for name in members if name.endswith(".jpg")]
    return [(key, members[f"{key}.jpg"], int(members[f"{key}.cls"])) for key in keys]


@needs_curl
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_gives_the_token_as_a_login(guarded: str, truth: list[Sample]) -> None:
    assert ask(guarded, "/train/manifest.json").status == 401
    assert train(f"{with_login(guarded)}/train/{PATTERN}", workers=0) == Counter(
        (key, label) for key, _, label in truth
    )


@pytest.mark.parametrize("node_cache", [False, True], ids=["direct", "node-cache"])
@pytest.mark.parametrize("named", ["manifest", "pattern"])
def test_our_loader_reads_every_sample_once(
    place: str, truth: list[Sample], tmp_path: Path, named: str, node_cache: bool
) -> None:
    url = place if named == "manifest" else f"{place}/{PATTERN}"
    cache = tmp_path / "node" if node_cache else None
    assert seen_by(Loader(url, global_batch=8, transform=None, cache=cache)) == once_each(truth)
    if cache is not None:  # what was read by ranges, before its shard came, need not be kept
        kept = [path for path in (cache / "objects").iterdir() if len(path.name) == 64]
        assert kept
        assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in kept)


def test_our_loader_decodes(place: str) -> None:
    with Loader(place, global_batch=8, transform="imagenet-val", size=16) as loader:
        shapes = [batch.images.shape for batch in loader]
    assert shapes == [(8, 16, 16, 3)] * 7 + [(4, 16, 16, 3)]


@pytest.mark.parametrize("node_cache", [False, True], ids=["direct", "node-cache"])
@pytest.mark.parametrize("named", ["manifest", "pattern"])
def test_our_loader_gives_the_token_as_a_login(
    guarded: str, truth: list[Sample], tmp_path: Path, named: str, node_cache: bool
) -> None:
    url = f"{with_login(guarded)}/train" + ("" if named == "manifest" else f"/{PATTERN}")
    loader = Loader(url, global_batch=8, transform=None, cache=tmp_path / "node" if node_cache else None)
    assert TOKEN not in loader.set.url
    assert seen_by(loader) == once_each(truth)


def test_without_the_token_the_loader_is_refused_in_a_sentence(guarded: str) -> None:
    with pytest.raises(AccessError) as caught:
        Loader(f"{guarded}/train", global_batch=8)
    assert "the URL holds no login" in str(caught.value)
    wrong = guarded.replace("://", "://stoker:not-the-token-of-it@")
    with pytest.raises(AccessError) as caught:
        Loader(f"{wrong}/train", global_batch=8)
    assert "not-the-token-of-it" not in str(caught.value)

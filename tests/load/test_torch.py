"""The PyTorch dataset: used directly, and with DataLoader and forked, spawned and persistent workers."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from stoker import Loader
from stoker.errors import InputError
from stoker.load import native
from tests.support.paths import DOCS
from tests.support.servers import aws_environ
from tests.support.trees import import_without, make_dataset, stoker
from tests.support.waiting import wait_until

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

import stoker.load.torch as under_test  # noqa: E402
from stoker.load.torch import IMAGENET_MEAN, IMAGENET_STD, Dataset, TorchBatch, normalize  # noqa: E402

# DataLoader warns about three workers on two cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SETTINGS: dict[str, Any] = {"global_batch": 8, "size": 16, "threads": 2, "seed": 3}
STEPS = 12  # of 90 images; the last one is smaller

Seen = list[tuple[str, list[int], tuple[int, int, str]]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("torch")
    data = make_dataset(folder / "pets", train=30)
    assert stoker("data", "convert", data, folder / "shards", "--shard-samples", 20) == 0
    return str(folder / "shards/train")


def digest(pixels: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels)).hexdigest()


def seen(batches: Iterable[TorchBatch]) -> Seen:
    """Return the content of batches as comparable values, without keeping the batches."""
    return [
        (digest(batch.images.permute(0, 2, 3, 1).numpy()), batch.labels.tolist(), tuple(batch.cursor))
        for batch in batches
    ]


@functools.cache
def expected(shards: str, epochs: int = 4) -> list[Seen]:
    """Return the same from the Loader, one list per epoch."""
    with Loader(shards, **SETTINGS) as loader:
        return [
            [(digest(batch.images), batch.labels.tolist(), tuple(batch.cursor)) for batch in loader]
            for _ in range(epochs)
        ]


def workers(dataset: Dataset, number: int, **more: Any) -> DataLoader[TorchBatch]:
    return DataLoader(dataset, batch_size=None, num_workers=number, **more)


def assert_rejected(loader: DataLoader[TorchBatch], part: str) -> None:
    message = ""
    try:
        next(iter(loader))
    except InputError as error:
        message = str(error)
        error.__traceback__ = None  # it would keep the iterator alive, whose workers then outlive their queues
    assert part in message


@pytest.fixture(autouse=True)
def _check_for_leaks() -> Any:
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    memfds = count_memfds()
    yield
    gc.collect()
    # DataLoader does not wait for the threads of its queues.
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert set(multiprocessing.active_children()) <= children
    assert count_memfds() <= memfds


def count_memfds() -> int:
    links = (Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum("stoker-cursor" in str(link.readlink()) for link in links if link.is_symlink())


def test_a_direct_loop_yields_the_batches_of_the_loader(shards: str) -> None:
    dataset = Dataset(shards, **SETTINGS)
    assert [seen(dataset) for _ in range(4)] == expected(shards)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_any_number_of_workers_gives_the_same_batches_in_order(shards: str, number: int) -> None:
    loader = workers(Dataset(shards, **SETTINGS), number)
    assert [seen(loader) for _ in range(2)] == expected(shards)[:2]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_each_loop_is_the_next_epoch(shards: str, start: str, persistent: bool) -> None:
    loader = workers(
        Dataset(shards, **SETTINGS), 2, multiprocessing_context=start, persistent_workers=persistent, timeout=60
    )
    assert [seen(loader) for _ in range(3)] == expected(shards)[:3]


def test_an_epoch_with_fewer_steps_than_workers(shards: str) -> None:
    loader = workers(Dataset(shards, **{**SETTINGS, "global_batch": 80}), 3)
    assert [[batch.count for batch in loader] for _ in range(2)] == [[80, 10]] * 2


def test_setting_the_seed_again_does_not_repeat_an_epoch(shards: str) -> None:
    loader = workers(Dataset(shards, **SETTINGS), 2)
    epochs = []
    for _ in range(3):
        torch.manual_seed(7)
        epochs.append(seen(loader))
    assert epochs == expected(shards)[:3]


def test_concurrent_iterations_are_distinguished(shards: str) -> None:
    loader = workers(Dataset(shards, **SETTINGS), 2)
    first, second = zip(*zip(loader, loader, strict=True), strict=True)
    assert sorted([seen(first), seen(second)], key=lambda epoch: epoch[0][2]) == expected(shards)[:2]


@pytest.mark.parametrize("persistent", [False, True])
def test_stopping_early_starts_the_next_epoch_unless_a_cursor_is_loaded(shards: str, persistent: bool) -> None:
    dataset = Dataset(shards, **SETTINGS)
    loader = workers(dataset, 2, persistent_workers=persistent)
    for taken in (5, STEPS - 1):  # in the second case the workers have loaded all batches by then
        batches = list(islice(loader, taken))
        epoch = batches[0].cursor.epoch
        assert seen(batches) == expected(shards)[epoch][:taken]
        dataset.load_state_dict(batches[-1].cursor.state())
        assert seen(loader) == expected(shards)[epoch][taken:]
    list(islice(loader, STEPS - 1))
    assert seen(loader) == expected(shards)[3]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3), (3, 1)])
def test_a_cursor_resumes_with_another_number_of_workers(shards: str, before: int, after: int) -> None:
    batches = list(islice(workers(Dataset(shards, **SETTINGS), before), 5))
    again = Dataset(shards, **SETTINGS)
    again.load_state_dict(batches[-1].cursor.state())
    loader = workers(again, after)
    assert [seen(loader), seen(loader)] == [expected(shards)[0][5:], expected(shards)[1]]


def test_a_state_dict_of_a_direct_loop_resumes_with_or_without_workers(shards: str) -> None:
    dataset = Dataset(shards, **SETTINGS)
    assert dataset.state_dict()["epoch"] == dataset.state_dict()["consumed"] == 0
    for number, batch in enumerate(dataset, 1):
        assert dataset.state_dict() == batch.cursor.state()
        if number == 4:
            break
    again = Dataset(shards, **SETTINGS)
    again.load_state_dict(dataset.state_dict())
    assert seen(dataset) == seen(workers(again, 2)) == expected(shards)[0][4:]
    assert seen(workers(dataset, 2)) == seen(again) == expected(shards)[1]


def test_state_dict_is_rejected_after_iterating_with_workers(shards: str) -> None:
    dataset = Dataset(shards, **SETTINGS)
    seen(workers(dataset, 1))
    with pytest.raises(InputError, match=r"batch\.cursor\.state\(\)"):
        dataset.state_dict()
    seen(dataset)
    assert dataset.state_dict()["epoch"] == 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_cursor_of_another_plan_is_rejected(shards: str, number: int) -> None:
    dataset = Dataset(shards, **SETTINGS)
    dataset.load_state_dict({"epoch": 0, "consumed": 8, "plan": "other"})
    assert_rejected(workers(dataset, number), "plan other, the current plan is ")


def test_invalid_options_are_named(shards: str) -> None:
    with pytest.raises(TypeError, match="batch_size"):
        Dataset(shards, global_batch=8, batch_size=3)
    assert_rejected(workers(Dataset(shards, global_batch=0), 1), "global_batch: must be >= 1, got 0")


def test_a_pickled_copy_is_independent(shards: str) -> None:
    dataset = Dataset(shards, **SETTINGS)
    batch = next(iter(dataset))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.state_dict() == batch.cursor.state()
    assert seen(copy) == expected(shards)[0][1:]
    assert dataset.state_dict() == batch.cursor.state()


def run_rank(dataset: Dataset, number: int, out: Any) -> None:
    loader = DataLoader(dataset, batch_size=None, num_workers=number)
    out.put([[tuple(batch.cursor) for batch in loader] for _ in range(2)])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_that_share_a_dataset_each_read_every_epoch(shards: str, start: str) -> None:
    context = multiprocessing.get_context(start)
    out = context.SimpleQueue()
    dataset = Dataset(shards, **SETTINGS)
    ranks = [context.Process(target=run_rank, args=(dataset, number, out)) for number in (0, 2)]
    for process in ranks:
        process.start()
    for _ in ranks:
        assert out.get() == [[cursor for *_, cursor in epoch] for epoch in expected(shards)[:2]]
    for process in ranks:
        process.join()


def test_workers_started_in_the_middle_of_a_direct_loop(shards: str) -> None:
    dataset = Dataset(shards, **SETTINGS)
    plain = iter(dataset)
    first = [next(plain), next(plain)]
    assert seen(workers(dataset, 1, multiprocessing_context="forkserver")) == expected(shards)[0][2:]
    assert seen([*first, *plain]) == expected(shards)[0]


@pytest.mark.parametrize("number", [0, 2])
def test_length_is_the_number_of_batches_of_an_epoch(shards: str, number: int) -> None:
    dataset = Dataset(shards, **SETTINGS)
    loader = workers(dataset, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DataLoader warns if there are more batches than its length
        assert len(dataset) == len(loader) == STEPS
        batches = list(islice(loader, 5))
        dataset.load_state_dict(batches[-1].cursor.state())
        lengths = []
        for _ in range(2):
            lengths.append([len(loader) for _ in loader])
        assert lengths == [[STEPS] * (STEPS - 5), [STEPS] * STEPS]


@pytest.mark.parametrize("mode", ["exact", "join", "resampled"])
def test_length_for_every_rank_and_sampling_mode(shards: str, mode: str) -> None:
    for rank in range(2):
        dataset = Dataset(shards, **SETTINGS, rank=(rank, 2), sampling=mode)
        for _ in range(2):
            expected_length = len(dataset)
            assert sum(1 for _ in dataset) == expected_length


def test_batches_are_printed_on_one_line(shards: str) -> None:
    plan = Loader(shards, **SETTINGS).plan.digest
    for settings, text in (
        ({}, "8×3×16×16 torch.uint8"),
        ({"transform": None}, "8 encoded images"),
        ({"transform": mean_of}, "8×4 torch.float32"),
    ):
        batch = next(iter(Dataset(shards, **SETTINGS | settings)))
        assert repr(batch) == f"TorchBatch({text}, epoch 0, consumed 8)"
        assert batch.cursor.plan == plan


def test_normalize_rejects_the_layout_of_pixels() -> None:
    with pytest.raises(InputError, match=r"N×3×H×W, got 2×3×4; .*permute"):
        normalize(torch.zeros((2, 3, 4), dtype=torch.uint8))
    with pytest.raises(InputError, match="got 2×16×16×3"):
        normalize(torch.zeros((2, 16, 16, 3), dtype=torch.uint8))


LENGTH_ON_S3 = """
import sys
from torch.utils.data import DataLoader
from stoker.load.torch import Dataset

dataset = Dataset(sys.argv[1], global_batch=8, size=16, transform=lambda pixels, _: pixels.mean())
loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
print(len(loader), sum(batch.count for batch in loader))
"""


def test_length_does_not_prevent_forked_workers_from_reading_s3(
    shards: str, tmp_path: Path, moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws_environ(moto_url).items():
        monkeypatch.setenv(name, value)
    url = f"s3://bucket/{tmp_path.name}"
    subprocess.run([sys.executable, "-m", "stoker", "data", "convert", Path(shards).parent, url], check=True)
    command = [sys.executable, "-c", LENGTH_ON_S3, f"{url}/train"]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == f"{STEPS} 90\n"


def test_length_on_s3_is_determined_once_per_epoch() -> None:
    with mock.patch.object(under_test, "ProcessPoolExecutor") as pool:
        pool.return_value.__enter__.return_value.submit.return_value.result.return_value = 7
        dataset = Dataset("s3://bucket/train", **SETTINGS)
        assert [len(dataset), len(dataset)] == [7, 7]
        assert pool.call_count == 1
        dataset.load_state_dict({"epoch": 1, "consumed": 0, "plan": ""})
        assert [len(dataset), len(dataset)] == [7, 7]
        assert pool.call_count == 2


def test_truth_value_opens_nothing() -> None:
    assert Dataset("/absent", **SETTINGS)


class FailingNative:
    API, SIMD = native.API, 1

    def read_headers(self, images: list[bytes]) -> list[None]:
        raise RuntimeError("cannot read headers")

    def Decoder(self, *, simd: bool) -> FailingNative:  # noqa: N802
        return self


def test_workers_log_failures_of_the_native_decoder_but_not_the_selection(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "import_native", FailingNative)
    monkeypatch.setattr(native, "why_unavailable", lambda: "")
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(logging.Formatter("%(process)d %(message)s"))
    native.log.addHandler(handler)
    level = native.log.level
    native.log.setLevel(logging.INFO)
    native._log_once.cache_clear()
    try:
        dataset = Dataset(shards, **SETTINGS)
        assert sum(batch.count for batch in workers(dataset, 1, multiprocessing_context="fork")) == 90
    finally:
        native.log.removeHandler(handler)
        handler.close()
        native.log.setLevel(level)
        native._log_once.cache_clear()
    selected, *failed = (line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines())
    assert selected[0] == str(os.getpid())
    assert "stoker-native" in selected[1]
    assert failed
    assert all(process != str(os.getpid()) and what.startswith(native.FAILED) for process, what in failed)


def test_images_are_not_copied(shards: str) -> None:
    dataset = Dataset(shards, **SETTINGS)
    with mock.patch.object(torch, "from_numpy", wraps=torch.from_numpy) as from_numpy:
        batch = next(iter(dataset))
        host = [call.args[0] for call in from_numpy.call_args_list]
    assert batch.images.shape == (8, 3, 16, 16)
    assert batch.images.dtype == torch.uint8
    assert batch.images.stride() == (768, 1, 48, 3)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert [batch.images.data_ptr(), batch.labels.data_ptr()] == [array.ctypes.data for array in host]


def test_memory_is_reused_but_not_while_a_tensor_refers_to_it(shards: str) -> None:
    dataset = Dataset(shards, **{**SETTINGS, "prefetch": 1})
    held = list(dataset)
    assert seen(held) == expected(shards)[0]
    addresses = {batch.images.data_ptr() for batch in held}
    assert len(addresses) == STEPS
    del held
    assert addresses & {batch.images.data_ptr() for batch in dataset}


def test_nchw_is_not_permuted(shards: str) -> None:
    batch = next(iter(Dataset(shards, **SETTINGS, layout="NCHW")))
    assert batch.images.is_contiguous()
    assert digest(batch.images.permute(0, 2, 3, 1).numpy()) == expected(shards)[0][0][0]


def mean_of(pixels: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    return np.append(pixels.mean(axis=(0, 1)), rng.random()).astype(np.float32)


@pytest.mark.parametrize("number", [0, 2])
def test_encoded_images_and_user_transforms(shards: str, number: int) -> None:
    encoded = list(workers(Dataset(shards, global_batch=30, transform=None), number))
    with Loader(shards, global_batch=30, transform=None) as loader:
        assert [batch.images for batch in encoded] == [list(map(bytes, batch.images)) for batch in loader]
    means = torch.cat([batch.images for batch in workers(Dataset(shards, global_batch=30, transform=mean_of), number)])
    with Loader(shards, global_batch=30, transform=mean_of) as loader:
        assert torch.equal(means, torch.from_numpy(np.concatenate([batch.images for batch in loader])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalize_matches_the_formula(dtype: Any) -> None:
    images = torch.randint(0, 256, (5, 8, 9, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    normalized = normalize(images, dtype=dtype)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    formula = (images.double() / 255 - mean) / std
    assert normalized.dtype == dtype
    assert normalized.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(normalized, formula.to(dtype), atol=1e-5, rtol=torch.finfo(dtype).eps)
    assert torch.equal(normalize(images, mean=(0, 0, 0), std=(1, 1, 1)) * 255 > 254.5, images == 255)


def test_pin_memory_pins_the_tensors_only(shards: str) -> None:
    batch = next(iter(Dataset(shards, **SETTINGS)))
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor + 1):
        pinned = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert torch.equal(pinned.images, batch.images + 1)
    assert torch.equal(pinned.labels, batch.labels + 1)
    assert (pinned.count, pinned.cursor) == (batch.count, batch.cursor)
    assert torch.utils.data.default_convert(batch) is batch


def test_unavailable_devices_are_rejected(shards: str) -> None:
    assert seen(Dataset(shards, device="cpu", **SETTINGS)) == expected(shards)[0]
    with pytest.raises(InputError, match=r"'meta'.*cpu or cuda"):
        Dataset(shards, device="meta", **SETTINGS)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"CUDA.*'cuda'.*`device`"):
            Dataset(shards, device="cuda", **SETTINGS)


class Event:
    """Fake CUDA event, done when the test sets it or when it is synchronized."""

    created: ClassVar[list[Event]] = []

    def __init__(self) -> None:
        self.done = False
        self.created.append(self)

    def record(self, stream: object) -> None:
        assert stream == "the stream"

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Fake CUDA: a copy to the device is a clone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the stream")
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    monkeypatch.setattr(under_test, "_allocate_pinned", lambda size: np.empty(size, dtype=np.uint8))
    yield
    Event.created.clear()


def test_host_memory_is_kept_until_its_copy_is_complete(shards: str, cuda: None) -> None:
    dataset = Dataset(shards, device="cuda", **{**SETTINGS, "prefetch": 1})
    copier = dataset._copier
    assert copier is not None
    batches = iter(dataset)
    taken = [next(batches), next(batches)]
    assert [event.done for event in Event.created] == [False, False]
    assert len(copier._in_flight) == 2
    taken.append(next(batches))
    assert [event.done for event in Event.created] == [True, False, False], "waits for the oldest only"
    assert len(copier._in_flight) == 2
    Event.created[1].done = Event.created[2].done = True
    taken.append(next(batches))
    assert len(copier._in_flight) == 1
    assert seen([*taken, *batches]) == expected(shards)[0]
    assert len(copier._in_flight) == 2, "host memory of the last copies outlives the epoch"


def test_a_device_is_rejected_with_workers(shards: str, cuda: None) -> None:
    assert_rejected(workers(Dataset(shards, device="cuda", **SETTINGS), 1), "pass pin_memory=True to the DataLoader")


def test_import_without_torch_names_the_extra() -> None:
    message = import_without("torch", "stoker.load.torch")
    assert message.startswith(
        "stoker.load.torch needs the Python package 'torch'; run: pip install 'path/to/stoker[torch]'"
    )


def augment(pixels: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    return np.roll(pixels[:16, :16], rng.integers(16), axis=0)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_examples_of_the_docs_page_work(shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "pytorch.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").symlink_to(Path(shards).parent)
    seen: list[tuple[int, ...]] = []
    names = {"torch": torch, "model": torch.nn.Linear(1, 1), "augment": augment, "range": lambda _: range(2)}
    names["train"] = lambda images, labels: seen.append((*images.shape, len(labels)))
    for block in blocks:
        replacements = {"global_batch=256": "global_batch=64", '"cuda"': '"cpu"', "num_workers=8": "num_workers=2"}
        for original, replacement in replacements.items():
            block = block.replace(original, replacement)
        exec(block, names)
    assert len(blocks) == 2
    assert seen == [(64, 3, 224, 224, 64), (26, 3, 224, 224, 26)] * 2
    assert torch.load("checkpoint.pt")["data"]["epoch"] == 2
    assert names["checkpoint"]["data"]["epoch"] == 1


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"num_workers": 1}])
def test_dataloader_that_batches_batches_is_an_error(shards: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="batch_size=None"):
        next(iter(DataLoader(Dataset(shards, **SETTINGS), **settings)))


def test_dataset_is_printed_on_one_line_without_being_opened() -> None:
    dataset = Dataset("http://user:secret@host/no-such-set", **SETTINGS)
    text = repr(dataset)
    assert "host/no-such-set" in text
    assert "global_batch=8" in text
    assert "\n" not in text
    assert "secret" not in text

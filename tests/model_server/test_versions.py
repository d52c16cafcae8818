"""Which versions are loaded and unloaded, as files appear, change, break and disappear."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker.errors import InputError, NotFoundError
from stoker.model_server.signatures import Tensors
from stoker.model_server.sources import Candidate, SavedModelSource, open_source
from stoker.model_server.versions import ModelVersions, VersionChange, plan_change
from tests.support.model_servers import ListedModels, NumpyModel

ONE, TWO, TEN = (Candidate(number, str(number), "a") for number in (1, 2, 10))


@pytest.mark.parametrize(
    ("found", "loaded", "keep", "expected"),
    [
        ([ONE], {}, 1, VersionChange([ONE], [])),
        ([ONE], {"1": "a"}, 1, VersionChange([], [])),
        ([TEN, ONE, TWO], {"1": "a"}, 1, VersionChange([TEN], ["1"])),
        ([TEN, ONE, TWO], {"1": "a"}, 2, VersionChange([TWO, TEN], ["1"])),
        ([TEN, ONE], {"1": "a"}, 2, VersionChange([TEN], [])),
        ([ONE], {"1": "b"}, 1, VersionChange([ONE], [])),  # its files have changed
        ([ONE], {"2": "a"}, 1, VersionChange([ONE], ["2"])),  # the newest was deleted: roll back
        ([], {"2": "a"}, 1, VersionChange([], [])),  # serve on
    ],
)
def test_change(found: list[Candidate], loaded: dict[str, str], keep: int, expected: VersionChange) -> None:
    change = plan_change(found, loaded, keep)
    assert sorted(change.load) == sorted(expected.load)
    assert change.unload == expected.unload


def test_refresh_follows_the_source() -> None:
    async def run() -> None:
        source = ListedModels(NumpyModel(3))
        versions = ModelVersions(source)
        versions.load_first()
        assert not await versions.refresh()
        source.models[4] = NumpyModel(4)
        assert await versions.refresh()
        assert [version.number for version in versions.loaded] == [4]
        with pytest.raises(NotFoundError):
            versions.get(3)
        del source.models[4]
        await versions.refresh()
        assert versions.get().number == 3
        source.models.clear()
        await versions.refresh()
        assert versions.get().number == 3
        await versions.close()

    asyncio.run(run())


def test_a_broken_version_is_reported_and_tried_again_when_it_changes() -> None:
    async def run() -> None:
        source = ListedModels(NumpyModel(1))
        versions = ModelVersions(source)
        versions.load_first()
        source.models[2] = InputError("broken")
        for _ in range(3):
            await versions.refresh()
        assert source.loads == [1, 2]
        assert [(failed.candidate.order, failed.reason) for failed in versions.failed] == [(2, "broken")]
        assert versions.get().number == 1
        source.models[2] = NumpyModel(2)
        await versions.refresh()
        assert [version.number for version in versions.loaded] == [2]
        assert versions.failed == []
        await versions.close()

    asyncio.run(run())


def test_start_falls_back_to_an_older_version() -> None:
    source = ListedModels(NumpyModel(1))
    source.models[2] = InputError("broken")
    versions = ModelVersions(source)
    assert versions.load_first().number == 1
    del source.models[1]
    with pytest.raises(InputError, match="broken"):
        ModelVersions(source).load_first()
    source.models.clear()
    with pytest.raises(NotFoundError):
        ModelVersions(source).load_first()


def test_a_model_that_rejects_zeros_is_served() -> None:
    model = NumpyModel(1)
    run = model.run

    def reject_zeros(signature: str, inputs: Tensors) -> Tensors:
        if signature == "serving_default" and not inputs["x"].all():
            raise InputError("zero")
        return run(signature, inputs)

    model.run = reject_zeros  # type: ignore[method-assign]
    assert ModelVersions(ListedModels(model)).load_first().number == 1


def test_a_leased_version_stays_until_its_request_has_finished() -> None:
    async def run() -> None:
        source = ListedModels(NumpyModel(1))
        versions = ModelVersions(source)
        with versions.load_first().lease() as old:
            source.models[2] = NumpyModel(2)
            await versions.refresh()
            await asyncio.sleep(0.05)
            example = old.model.signatures["serving_default"].example()
            assert example is not None
            assert (await old.predict("serving_default", example))["sum"].tolist() == [100]
        await versions.close()

    asyncio.run(run())


def make_saved_model(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(b"x")


def test_version_directories_are_numbers(tmp_path: Path) -> None:
    for name in ("1", "12", "03", "x", "7"):
        make_saved_model(tmp_path / "model" / name)
    (tmp_path / "model" / "20").mkdir()  # not finished
    source = open_source(str(tmp_path / "model"))
    assert isinstance(source, SavedModelSource)
    assert sorted(candidate.order for candidate in source.list_candidates()) == [1, 7, 12]
    (single,) = open_source(str(tmp_path / "model" / "12")).list_candidates()
    assert single.order == 12
    before = source.list_candidates()
    (tmp_path / "model" / "7" / "variables").write_bytes(b"more")
    after = source.list_candidates()
    assert [a.order for a, b in zip(sorted(after), sorted(before), strict=True) if a != b] == [7]


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(b"x")
    with pytest.raises(NotFoundError):
        open_source(str(tmp_path / "none"))
    with pytest.raises(NotFoundError):
        open_source(str(tmp_path))
    with pytest.raises(InputError):
        open_source(str(tmp_path / "weights.h5"))

"""What every shard format must do; a format is done when its subclass of FormatContract is green."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import SourceError
from stoker.shards.formats import FORMATS, Format, guess_format
from stoker.shards.sample import Buffer, Sample

MAGIC = {
    "jpg": b"\xff\xd8\xff\xe0",
    "png": b"\x89PNG\r\n\x1a\n",
    "webp": b"RIFF\x00\x00\x00\x00WEBP",
    "bmp": b"BM\x00\x00\x00\x00\x00\x00\x00\x00",
    "gif": b"GIF89a",
    "tif": b"II*\x00",
    "ppm": b"P6\n",
}

SAMPLES = (
    Sample("a/one", MAGIC["jpg"] + bytes(range(256)) * 3, "jpg", 0),
    Sample(
        "a/two",
        MAGIC["png"] + b"\x00" * 10,
        "png",
        999,
        {"json": b'{"a": 1}', "seg.png": b"mask", "txt": b""},
    ),
    Sample("b/" + "long" * 40, MAGIC["jpg"] + b"x" * 500, "jpg", -1),
    Sample("ünïcode/日本", MAGIC["webp"] + b"y" * 512, "webp", 7),
)

lax = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.differing_executors])

_part = st.text("abcXYZ019 _-+éß日🙂", min_size=1, max_size=40)
_keys = st.lists(_part, min_size=1, max_size=4).map("/".join).filter(lambda key: not key.startswith("_"))
_extensions = st.text("abcdefg019._", min_size=1, max_size=12).filter(lambda extension: extension not in MAGIC)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    kind = draw(st.sampled_from(sorted(MAGIC)))
    return Sample(
        key=draw(_keys),
        image=MAGIC[kind] + draw(st.binary(max_size=1100)),
        extension=kind,
        label=draw(st.integers(-(2**63), 2**63 - 1)),
        extras=draw(st.dictionaries(_extensions, st.binary(max_size=600), max_size=3)),
    )


many_samples = st.lists(samples(), max_size=5, unique_by=lambda sample: sample.key)


def shard_of(fmt: Format, samples: Iterable[Sample]) -> bytes:
    return b"".join(bytes(chunk) for sample in samples for chunk in fmt.encode(sample).chunks) + fmt.trailer


def read(fmt: Format, data: Buffer, *, check: bool = False) -> list[Sample]:
    return [found.sample for found in fmt.iter_samples(data, "shard", check=check)]


class FormatContract:
    format: Format

    def test_is_registered_under_its_name(self) -> None:
        assert FORMATS.get(self.format.name) is self.format

    @pytest.mark.parametrize("prefix", ["", "imagenet"])
    def test_its_shard_names_are_recognised_and_sort_by_number(self, prefix: str) -> None:
        names = [self.format.shard_name(prefix, "train", number, 1200) for number in range(1200)]
        assert names == sorted(set(names))
        assert {guess_format(name) for name in names} == {self.format.name}

    @lax
    @given(many_samples)
    def test_what_was_encoded_is_found_again(self, written: list[Sample]) -> None:
        data = shard_of(self.format, written)
        at = 0
        found = list(self.format.iter_samples(data, "shard", check=True))
        assert [one.sample for one in found] == written
        for sample, one in zip(written, found, strict=True):
            encoded = self.format.encode(sample)
            assert (one.start, one.end) == (at, at + encoded.length)
            assert one.image_offset == at + encoded.image_offset
            assert data[one.image_offset : one.image_offset + len(sample.image)] == sample.image
            for check in (False, True):
                assert self.format.parse_sample(data[one.start : one.end], "span", check=check) == sample
            self.format.check_key(sample.key)
            at = one.end

    def test_encoding_passes_the_image_through_and_reading_gives_views(self) -> None:
        for image in (SAMPLES[1].image, bytearray(SAMPLES[1].image), memoryview(bytearray(SAMPLES[1].image))):
            assert any(chunk is image for chunk in self.format.encode(SAMPLES[1]._replace(image=image)).chunks)
        data = shard_of(self.format, SAMPLES)
        for one in self.format.iter_samples(data, "shard"):
            for buffer in (one.sample.image, *one.sample.extras.values()):
                assert isinstance(buffer, memoryview)
                assert buffer.obj is data

    def test_every_kind_of_buffer_gives_the_same_bytes(self) -> None:
        def using(buffer: type) -> bytes:
            return shard_of(
                self.format,
                [
                    one._replace(
                        image=buffer(one.image),
                        extras={name: buffer(data) for name, data in one.extras.items()},
                    )
                    for one in SAMPLES
                ],
            )

        assert using(bytes) == using(bytearray) == using(memoryview)
        data = using(bytes)
        assert read(self.format, data) == read(self.format, bytearray(data)) == read(self.format, memoryview(data))

    def test_the_order_of_extras_does_not_matter(self) -> None:
        turned = SAMPLES[1]._replace(extras=dict(sorted(SAMPLES[1].extras.items(), reverse=True)))
        assert shard_of(self.format, [turned]) == shard_of(self.format, [SAMPLES[1]])

    def test_reads_a_mapped_file(self, tmp_path: Path) -> None:
        path = tmp_path / "shard"
        path.write_bytes(shard_of(self.format, SAMPLES))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            assert tuple(read(self.format, view, check=True)) == SAMPLES

    def test_an_empty_shard_has_no_samples(self) -> None:
        assert read(self.format, self.format.trailer, check=True) == []

    def test_parse_wants_exactly_one_sample(self) -> None:
        for some in ((), SAMPLES[:2]):
            with pytest.raises(SourceError, match=f"found {len(some)}"):
                self.format.parse_sample(shard_of(self.format, some), "span")

    def test_a_name_that_is_not_utf8_survives(self) -> None:
        sample = SAMPLES[0]._replace(key="caf\udce9/one")
        assert read(self.format, shard_of(self.format, [sample]), check=True) == [sample]

    @pytest.mark.parametrize(
        "change",
        [{"key": ""}, {"key": "\ud800"}, {"kind": "exe"}, {"kind": "jpeg"}, {"kind": ""}],
    )
    def test_refuses_to_encode_what_could_not_be_read_again(self, change: dict[str, str]) -> None:
        with pytest.raises(SourceError, match="cannot hold"):
            self.format.encode(SAMPLES[0]._replace(**change))  # type: ignore[arg-type]

    @pytest.mark.parametrize("key", ["", "\ud800", "a/\udc00"])
    def test_a_key_that_it_cannot_hold_is_told_without_encoding(self, key: str) -> None:
        with pytest.raises(SourceError, match="cannot hold"):
            self.format.check_key(key)

    def test_a_cut_shard_is_a_fault_or_ends_between_samples(self) -> None:
        """A format that ends with a trailer has it even there, and then no sample can be lost."""
        written = SAMPLES[:2]
        data = shard_of(self.format, written)
        ends = {one.end for one in self.format.iter_samples(data, "shard")} | {0}
        for cut in range(len(data)):
            try:
                got: Sequence[Sample] = read(self.format, data[:cut])
            except SourceError as error:
                assert error.where == "shard"  # noqa: PT017
                assert self.format.trailer or cut not in ends
                continue
            assert tuple(got) == written[: len(got)]
            assert cut in ends or cut > max(ends)
            assert not self.format.trailer or len(got) == len(written)

    @lax
    @given(st.data())
    def test_damage_raises_source_errors_only(self, choose: st.DataObject) -> None:
        data = bytearray(shard_of(self.format, SAMPLES))
        for _ in range(choose.draw(st.integers(1, 4))):
            at = choose.draw(st.integers(0, len(data)))
            cut = choose.draw(st.sampled_from([0, 1, 8, 512]))
            data[at : at + cut] = choose.draw(st.binary(max_size=16))
        self.survives(bytes(data))

    @lax
    @given(st.binary(max_size=2000))
    def test_noise_raises_source_errors_only(self, data: bytes) -> None:
        self.survives(data)

    def survives(self, data: bytes) -> None:
        for check in (False, True):
            try:
                for one in self.format.iter_samples(data, "shard", check=check):
                    assert 0 <= one.start < one.image_offset <= one.end <= len(data)
                    assert len(str(one.sample.label)) <= 20
            except SourceError as error:
                assert str(error).startswith("shard: ")  # noqa: PT017
            with contextlib.suppress(SourceError):
                self.format.parse_sample(data, "span", check=check)

"""The contract of shard formats: a format is complete when its subclass of FormatContract passes."""

from __future__ import annotations

import contextlib
import mmap
import re
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

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.differing_executors])

_part = st.text("abcXYZ019 _-+éß日🙂", min_size=1, max_size=40)
_keys = st.lists(_part, min_size=1, max_size=4).map("/".join).filter(lambda key: not key.startswith("_"))
_extensions = st.text("abcdefg019._", min_size=1, max_size=12).filter(lambda extension: extension not in MAGIC)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    extension = draw(st.sampled_from(sorted(MAGIC)))
    return Sample(
        key=draw(_keys),
        image=MAGIC[extension] + draw(st.binary(max_size=1100)),
        extension=extension,
        label=draw(st.integers(-(2**63), 2**63 - 1)),
        extras=draw(st.dictionaries(_extensions, st.binary(max_size=600), max_size=3)),
    )


many_samples = st.lists(samples(), max_size=5, unique_by=lambda sample: sample.key)


def make_shard(fmt: Format, samples: Iterable[Sample]) -> bytes:
    return b"".join(bytes(chunk) for sample in samples for chunk in fmt.encode(sample).chunks) + fmt.trailer


def read_samples(fmt: Format, data: Buffer, *, check: bool = False) -> list[Sample]:
    return [located.sample for located in fmt.iter_samples(data, "shard", check=check)]


class FormatContract:
    format: Format

    def test_is_registered_under_its_name(self) -> None:
        assert FORMATS.get(self.format.name) is self.format

    @pytest.mark.parametrize("prefix", ["", "imagenet"])
    def test_shard_names_imply_the_format_and_sort_by_number(self, prefix: str) -> None:
        names = [self.format.shard_name(prefix, "train", number, 1200) for number in range(1200)]
        assert names == sorted(set(names))
        assert {guess_format(name) for name in names} == {self.format.name}

    @relaxed
    @given(many_samples)
    def test_encoded_samples_are_read_back(self, written: list[Sample]) -> None:
        data = make_shard(self.format, written)
        offset = 0
        read = list(self.format.iter_samples(data, "shard", check=True))
        assert [located.sample for located in read] == written
        for sample, located in zip(written, read, strict=True):
            encoded = self.format.encode(sample)
            assert (located.start, located.end) == (offset, offset + encoded.length)
            assert located.image_offset == offset + encoded.image_offset
            image = data[located.image_offset : located.image_offset + len(sample.image)]
            assert image == sample.image
            for check in (False, True):
                span = data[located.start : located.end]
                assert self.format.parse_sample(span, "span", check=check) == sample
            self.format.check_key(sample.key)
            offset = located.end

    def test_images_are_never_copied(self) -> None:
        for image in (SAMPLES[1].image, bytearray(SAMPLES[1].image), memoryview(bytearray(SAMPLES[1].image))):
            assert any(chunk is image for chunk in self.format.encode(SAMPLES[1]._replace(image=image)).chunks)
        data = make_shard(self.format, SAMPLES)
        for located in self.format.iter_samples(data, "shard"):
            for buffer in (located.sample.image, *located.sample.extras.values()):
                assert isinstance(buffer, memoryview)
                assert buffer.obj is data

    def test_bytes_do_not_depend_on_the_buffer_type(self) -> None:
        def encode_with(buffer: type) -> bytes:
            return make_shard(
                self.format,
                [
                    sample._replace(
                        image=buffer(sample.image),
                        extras={name: buffer(data) for name, data in sample.extras.items()},
                    )
                    for sample in SAMPLES
                ],
            )

        assert encode_with(bytes) == encode_with(bytearray) == encode_with(memoryview)
        data = encode_with(bytes)
        assert (
            read_samples(self.format, data)
            == read_samples(self.format, bytearray(data))
            == read_samples(self.format, memoryview(data))
        )

    def test_bytes_do_not_depend_on_the_order_of_extras(self) -> None:
        reversed_extras = SAMPLES[1]._replace(extras=dict(sorted(SAMPLES[1].extras.items(), reverse=True)))
        assert make_shard(self.format, [reversed_extras]) == make_shard(self.format, [SAMPLES[1]])

    def test_reads_a_memory_map(self, tmp_path: Path) -> None:
        path = tmp_path / "shard"
        path.write_bytes(make_shard(self.format, SAMPLES))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            assert tuple(read_samples(self.format, view, check=True)) == SAMPLES

    def test_empty_shard_has_no_samples(self) -> None:
        assert read_samples(self.format, self.format.trailer, check=True) == []

    def test_parse_sample_requires_exactly_one_sample(self) -> None:
        for samples in ((), SAMPLES[:2]):
            with pytest.raises(SourceError, match=rf"\b{len(samples)}$"):
                self.format.parse_sample(make_shard(self.format, samples), "span")

    def test_key_that_is_not_utf8_is_kept(self) -> None:
        sample = SAMPLES[0]._replace(key="caf\udce9/one")
        assert read_samples(self.format, make_shard(self.format, [sample]), check=True) == [sample]

    @pytest.mark.parametrize(
        "change",
        [{"key": ""}, {"key": "\ud800"}, {"extension": "exe"}, {"extension": "jpeg"}, {"extension": ""}],
    )
    def test_encode_rejects_what_could_not_be_read_back(self, change: dict[str, str]) -> None:
        (value,) = change.values()
        with pytest.raises(SourceError, match=re.escape(repr(value))):
            self.format.encode(SAMPLES[0]._replace(**change))  # type: ignore[arg-type]

    @pytest.mark.parametrize("key", ["", "\ud800", "a/\udc00"])
    def test_check_key_rejects_the_same_keys_as_encode(self, key: str) -> None:
        with pytest.raises(SourceError, match=re.escape(repr(key))):
            self.format.check_key(key)

    def test_truncated_shard_is_an_error_or_ends_between_samples(self) -> None:
        """In a format with a trailer, truncation between samples is an error too."""
        written = SAMPLES[:2]
        data = make_shard(self.format, written)
        ends = {located.end for located in self.format.iter_samples(data, "shard")} | {0}
        for cut in range(len(data)):
            try:
                samples: Sequence[Sample] = read_samples(self.format, data[:cut])
            except SourceError as error:
                assert error.where == "shard"  # noqa: PT017
                assert self.format.trailer or cut not in ends
                continue
            assert tuple(samples) == written[: len(samples)]
            assert cut in ends or cut > max(ends)
            assert not self.format.trailer or len(samples) == len(written)

    @relaxed
    @given(st.data())
    def test_damage_raises_source_errors_only(self, choose: st.DataObject) -> None:
        data = bytearray(make_shard(self.format, SAMPLES))
        for _ in range(choose.draw(st.integers(1, 4))):
            start = choose.draw(st.integers(0, len(data)))
            length = choose.draw(st.sampled_from([0, 1, 8, 512]))
            data[start : start + length] = choose.draw(st.binary(max_size=16))
        self.check_only_source_errors(bytes(data))

    @relaxed
    @given(st.binary(max_size=2000))
    def test_noise_raises_source_errors_only(self, data: bytes) -> None:
        self.check_only_source_errors(data)

    def check_only_source_errors(self, data: bytes) -> None:
        for check in (False, True):
            try:
                for located in self.format.iter_samples(data, "shard", check=check):
                    assert 0 <= located.start < located.image_offset <= located.end <= len(data)
                    assert len(str(located.sample.label)) <= 20
            except SourceError as error:
                assert error.where == "shard"  # noqa: PT017
            with contextlib.suppress(SourceError):
                self.format.parse_sample(data, "span", check=check)

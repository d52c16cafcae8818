"""Memory errors of the native decoder: valgrind, sanitizers and libFuzzer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.load.jpegs import (
    BROKEN_SCANS,
    SUBSAMPLINGS,
    UNSUPPORTED,
    encode_jpeg,
    gray_jpeg,
    long_run,
    make_jpeg,
    needs_native,
    picture,
)
from tests.support.paths import NATIVE

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind not found")


def write_corpus(folder: Path) -> list[Path]:
    """Write inputs of the fuzz target: every kind of image with different crops, intact and damaged."""
    random = np.random.default_rng(7)
    plain = [
        encode_jpeg(picture(w, h), **SUBSAMPLINGS[kind])
        for w, h in ((1, 1), (33, 17), (70, 90))
        for kind in SUBSAMPLINGS
    ]
    files = []
    plain += [make_jpeg(kind, picture(50, 40), quality=20) for kind in ("gray", "4:4:0")]
    plain += [gray_jpeg(factors, at) for factors in (0x22, 0x14) for at in (None, 65)]
    for number, data in enumerate([*plain, *UNSUPPORTED.values(), *BROKEN_SCANS.values(), long_run()]):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), 3) if data else ():
            damaged[at] = random.integers(0, 256)
        for name, image in (("intact", data), ("damaged", bytes(damaged))):
            path = folder / f"{name}-{number}"
            path.write_bytes(random.bytes(6) + bytes([random.integers(0, 2)]) + image)
            files.append(path)
    return files


OPTIMIZED = ("-O3", "-ffp-contract=off")
"""The flags of meson.build."""


def build(folder: Path, compiler: str, *flags: str) -> Path:
    """Build the fuzz target and return the program."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} not found")
    if not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("headers of libjpeg-turbo not found")
    program = folder / "entry"
    sources = [
        NATIVE / "fuzz" / "fuzz_crop.c",
        *(path for path in sorted((NATIVE / "src").glob("*.c")) if path.name != "module.c"),
    ]
    command = [compiler, "-g", *OPTIMIZED, *flags, *map(str, sources), "-o", str(program), "-ljpeg", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@needs_valgrind
def test_valgrind_reports_no_errors(tmp_path: Path) -> None:
    program, files = build(tmp_path, "cc", "-DREPLAY"), write_corpus(tmp_path)
    command = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite", program]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{len(files)} files\n"


MODULE = """
import struct, sys
import stoker_native
decoder = stoker_native.Decoder()
for path in sys.argv[1:]:
    data = open(path, "rb").read()[7:]
    (header,) = stoker_native.read_headers([data])
    width, height, _ = header or (64, 64, False)
    boxes = struct.pack("12d", 1, 0, width - 1, height, width, height, 0, 0, width, height, width, height)
    decoder.fill([data, None], boxes, bytes(2), bytearray(2 * 3 * 30 * 30), 30, True)
boxes, out = bytes(48), bytearray(300)
for bad in (
    (3,), ([3], boxes, b"0", out, 10, True), ([b""], b"", b"0", out, 10, True), ([b""], boxes, b"", out, 10, True),
    ([b""], boxes, b"0", b"", 10, True), ([b""], boxes, b"0", out, 0, True), (b"", boxes, b"0", out, 10, True),
):
    try:
        decoder.fill(*bad)
    except (TypeError, ValueError, BufferError):
        continue
    sys.exit(f"{bad} was accepted")
try:
    stoker_native.read_headers([b"", 3])
except TypeError:
    print("done")
"""


@needs_native
@needs_valgrind
def test_valgrind_reports_no_errors_in_the_module(tmp_path: Path) -> None:
    command = ["valgrind", "-q", sys.executable, "-c", MODULE, *write_corpus(tmp_path)]
    environment = os.environ | {"PYTHONMALLOC": "malloc"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-4000:]
    assert "stoker_native" not in done.stderr  # the interpreter itself has some reports


def test_sanitizers_report_no_errors(tmp_path: Path) -> None:
    flags = ("-DREPLAY", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program, files = build(tmp_path, "cc", *flags), write_corpus(tmp_path)
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_libfuzzer_finds_no_crash(tmp_path: Path) -> None:
    program = build(tmp_path, "clang", "-fsanitize=address,undefined,fuzzer")
    seeds, new_inputs = tmp_path / "seeds", tmp_path / "new"
    seeds.mkdir()
    new_inputs.mkdir()
    write_corpus(seeds)
    options = [
        f"-max_total_time={os.environ.get('STOKER_FUZZ_S', '60')}",
        "-max_len=6000",
        "-timeout=20",
        "-rss_limit_mb=0",  # memory of the parent would count
        "-malloc_limit_mb=256",
        f"-artifact_prefix={tmp_path}/",
        f"-seed={os.getpid()}",
    ]
    done = subprocess.run([program, *options, new_inputs, seeds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

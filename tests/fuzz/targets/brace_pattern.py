"""Brace patterns of shard names, as users and job files write them."""

from __future__ import annotations

from itertools import islice

from stoker.shards.braces import collapse_names, expand_braces
from tests.fuzz.limits import Target


def run(data: bytes) -> None:
    """Expand a pattern to its first names, and collapse them again."""
    collapse_names(islice(expand_braces(data.decode(errors="replace")), 5000))


TARGET = Target(
    run,
    valid=[b"train-{000000..000127}.tar", b"{a,b}/x-{0..9}.tar", b"plain.tar"],
    hostile=[
        b"{",
        b"}" * 100_000,
        b"{" * 100_000,
        b"{}" * 200,
        b"{a,b}" * 200,
        b"{a,}" * 5000,
        b"{0..999999}" * 1000,
        b"{0..999999999999999999}.tar",
        b"{0..9999999}{0..9999999}.tar",
        b"{9..0}.tar",
        b"{" + b"a," * 100_000 + b"}",
        b"{00000000000000000000000..1}",
        b"{-1..5}",
        b"{1..x}",
    ],
    tokens=[b"{", b"}", b"..", b",", b"999999999999999999", b"000"],
)

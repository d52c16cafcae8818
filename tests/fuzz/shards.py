"""Read the bytes of a shard in every way that readers do."""

from __future__ import annotations

from stoker.shards.formats import Format


def read_twice(form: Format, data: bytes) -> None:
    """Read a shard twice: to collect the errors of its samples, then to stop at the first one."""
    for _ in form.iter_samples(data, "shard", errors=[]):
        pass
    for located in form.iter_samples(data, "shard", check=True):
        form.parse_sample(data[located.start : located.end], "shard", check=True)

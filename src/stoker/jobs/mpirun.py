"""The arguments of Open MPI's `mpirun`, and which of them a job file says in words of its own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MCA = ("mca", "gmca", "omca")
# The same thing by another name: of each group mpirun takes but one.
_SAME = {
    "nooversubscribe": "oversubscribe",
    "rmaps_base_oversubscribe": "oversubscribe",
    "rmaps_base_no_oversubscribe": "oversubscribe",
    "rmaps_base_mapping_policy": "map-by",
    "rmaps_base_schedule_policy": "map-by",
    "hwloc_base_binding_policy": "bind-to",
    "bind-to-core": "bind-to",
    "bind-to-socket": "bind-to",
}
_OWN = {
    "follows from workers and processes_per_worker": (
        "n np c N npernode npersocket pernode ppr host H hostfile machinefile default-hostfile app "
        "orte_default_hostfile orte_default_dash_host rmaps_base_pernode rmaps_base_n_pernode rmaps_base_n_persocket "
        "rmaps_base_pattern rmaps_ppr_pernode rmaps_ppr_n_pernode rmaps_ppr_n_persocket rmaps_ppr_pattern"
    ),
    "would change what is printed before each line, by which lines are given to their ranks": (
        "timestamp-output xml xml-file output-filename xterm "
        "orte_tag_output orte_timestamp_output orte_xml_output orte_xml_file orte_xterm"
    ),
    (_ORDER := "would change the order of the ranks, by which they belong to workers"): (
        "rank-by rankfile rf bycore bynode byslot nolocal loadbalance cpu-set "
        "rmaps_base_ranking_policy rmaps_base_bycore rmaps_base_bynode rmaps_base_byslot orte_rankfile "
        "rmaps_rank_file_path rmaps_base_no_schedule_local hwloc_base_cpu_set"
    ),
}
_WHY_NOT = {name: why for why, names in _OWN.items() for name in names.split()}


class Given(NamedTuple):
    """A flag or an MCA parameter: where it stands, as it was written, its bare name, and the word behind it."""

    at: int
    words: str
    name: str
    value: str

    @property
    def key(self) -> str:
        """Name what it sets: however it is spelt, and with networks in and out alike."""
        name = self.name.replace("_if_exclude", "_if").replace("_if_include", "_if")
        return _SAME.get(name, name)

    @property
    def why_not(self) -> str | None:
        """Say why a job may not give it."""
        if why := _WHY_NOT.get(self.name):
            return f"{why}: leave it out"
        if self.key == "map-by" and not self.value.startswith("slot"):
            return f"{_ORDER}: only slot is known to keep it"
        return None


def given(args: Sequence[str]) -> Iterator[Given]:
    """Find the flags and MCA parameters in a list of arguments; flags may have one dash or two."""
    padded = [*args, "", ""]
    words = iter(enumerate(padded))
    for index, word in words:
        name = word.lstrip("-")
        if name in _MCA and name != word:
            (_, name), (_, value) = next(words), next(words)
            yield Given(index, f"{word} {name}", name, value)
        elif name != word:
            yield Given(index, word, name, padded[index + 1])

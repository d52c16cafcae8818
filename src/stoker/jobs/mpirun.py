"""Parse arguments of Open MPI's `mpirun`, and find those that conflict with keys of the job file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MCA_FLAGS = ("mca", "gmca", "omca")
# Synonyms: mpirun accepts only one flag or parameter of each group.
_SYNONYMS = {
    "nooversubscribe": "oversubscribe",
    "rmaps_base_oversubscribe": "oversubscribe",
    "rmaps_base_no_oversubscribe": "oversubscribe",
    "rmaps_base_mapping_policy": "map-by",
    "rmaps_base_schedule_policy": "map-by",
    "hwloc_base_binding_policy": "bind-to",
    "bind-to-core": "bind-to",
    "bind-to-socket": "bind-to",
}
_CHANGES_RANK_ORDER = "would change the rank order, which maps ranks to workers"
_FLAGS_BY_CONFLICT = {
    "is set from workers and processes_per_worker": (
        "n np c N npernode npersocket pernode ppr host H hostfile machinefile default-hostfile app "
        "orte_default_hostfile orte_default_dash_host rmaps_base_pernode rmaps_base_n_pernode rmaps_base_n_persocket "
        "rmaps_base_pattern rmaps_ppr_pernode rmaps_ppr_n_pernode rmaps_ppr_n_persocket rmaps_ppr_pattern"
    ),
    "would change the output prefix that assigns each line to its rank": (
        "timestamp-output xml xml-file output-filename xterm "
        "orte_tag_output orte_timestamp_output orte_xml_output orte_xml_file orte_xterm"
    ),
    _CHANGES_RANK_ORDER: (
        "rank-by rankfile rf bycore bynode byslot nolocal loadbalance cpu-set "
        "rmaps_base_ranking_policy rmaps_base_bycore rmaps_base_bynode rmaps_base_byslot orte_rankfile "
        "rmaps_rank_file_path rmaps_base_no_schedule_local hwloc_base_cpu_set"
    ),
}
_CONFLICTS = {name: conflict for conflict, names in _FLAGS_BY_CONFLICT.items() for name in names.split()}


class MpirunFlag(NamedTuple):
    """A flag or MCA parameter: its position in the arguments, its text, its bare name and the argument after it."""

    position: int
    text: str
    name: str
    value: str

    @property
    def key(self) -> str:
        """The setting that it changes: the same for synonyms, and for `…_if_include` and `…_if_exclude`."""
        name = self.name.replace("_if_exclude", "_if").replace("_if_include", "_if")
        return _SYNONYMS.get(name, name)

    @property
    def conflict(self) -> str | None:
        """Why a job may not set it, or None."""
        if conflict := _CONFLICTS.get(self.name):
            return f"{conflict}; remove it"
        if self.key == "map-by" and not self.value.startswith("slot"):
            return f"{_CHANGES_RANK_ORDER}; only slot is supported"
        return None


def parse_mpirun_flags(args: Sequence[str]) -> Iterator[MpirunFlag]:
    """Yield the flags and MCA parameters in a list of arguments; flags may have one dash or two."""
    padded = [*args, "", ""]
    arguments = iter(enumerate(padded))
    for position, argument in arguments:
        name = argument.lstrip("-")
        if name in _MCA_FLAGS and name != argument:
            (_, name), (_, value) = next(arguments), next(arguments)
            yield MpirunFlag(position, f"{argument} {name}", name, value)
        elif name != argument:
            yield MpirunFlag(position, argument, name, padded[position + 1])

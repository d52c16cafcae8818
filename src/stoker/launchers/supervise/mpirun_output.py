"""Leave out warnings that mpirun itself writes and that need no action. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from stoker.jobs.launcher import SlotLogLine

_HARMLESS = re.compile(r"(?:\[[^\]]*\] )?plm:rsh: Warning: setpgid\(\d+,\d+\) failed in parent\b.*")
"""mpirun sets the process group of its remote shell agent in both processes; in the parent this fails after exec."""


def drop_mpirun_warnings(lines: Iterable[SlotLogLine]) -> Iterator[SlotLogLine]:
    """Yield the lines of a run without harmless warnings of mpirun; they stay in the log files."""
    return (line for line in lines if not _HARMLESS.match(line.text))

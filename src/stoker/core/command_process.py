"""Whether this process runs one `stoker` command and nothing else."""

from __future__ import annotations

is_command = False
"""Set by the command line. Other programs may have state, threads and open files that must not be forked."""

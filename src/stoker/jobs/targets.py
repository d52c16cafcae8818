"""Names of the targets that code outside of the launchers refers to. Imports nothing: `stoker --help` needs it."""

from __future__ import annotations

LOCAL = "local"

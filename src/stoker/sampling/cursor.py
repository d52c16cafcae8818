"""How far an epoch got: all the state that sampling has."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.errors import InputError


class Cursor(NamedTuple):
    """So many positions of an epoch are consumed, under the plan with this digest; any world can go on from here."""

    epoch: int
    consumed: int
    plan: str

    @classmethod
    def parse(cls, text: str, plan: str) -> Cursor:
        """Read `EPOCH:CONSUMED`, as the command line takes it."""
        epoch, colon, consumed = text.partition(":")
        if not (colon and epoch.isdecimal() and consumed.isdecimal()):
            raise InputError(f"{text!r} is no cursor", hint="write EPOCH:CONSUMED, like 3:512000")
        return cls(int(epoch), int(consumed), plan)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cursor:
        """Read what `state` gave, which may have been through any file."""
        try:
            epoch, consumed, plan = (state[name] for name in cls._fields)
        except (KeyError, TypeError) as error:
            raise InputError("this state holds no cursor", hint=f"it must hold {', '.join(cls._fields)}") from error
        try:
            cursor = cls(operator.index(epoch), operator.index(consumed), str(plan))  # numpy's integers too
        except TypeError:
            cursor = cls(-1, -1, "")
        if isinstance(epoch, bool) or isinstance(consumed, bool) or cursor.epoch < 0 or cursor.consumed < 0:
            raise InputError(f"a cursor cannot stand at epoch {epoch!r}, consumed {consumed!r}")
        return cursor

    def state(self) -> dict[str, Any]:
        """Give the cursor as plain values, for a checkpoint."""
        return self._asdict()

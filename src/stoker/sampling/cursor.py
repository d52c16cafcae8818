"""The cursor: how far an epoch got, which is all the state that sampling has."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.errors import InputError


class Cursor(NamedTuple):
    """The number of positions consumed in an epoch, under the plan with this digest; valid for any world size."""

    epoch: int
    consumed: int
    plan: str

    @classmethod
    def parse(cls, text: str, plan: str) -> Cursor:
        """Parse `EPOCH:CONSUMED`, the form used on the command line."""
        epoch, colon, consumed = text.partition(":")
        if not (colon and epoch.isdecimal() and consumed.isdecimal()):
            raise InputError(f"invalid cursor {text!r}", hint="use EPOCH:CONSUMED, for example 3:512000")
        return cls(int(epoch), int(consumed), plan)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cursor:
        """Build a cursor from what `state` returned, which may have been stored in any file format."""
        try:
            epoch, consumed, plan = (state[name] for name in cls._fields)
        except (KeyError, TypeError) as error:
            raise InputError("the state has no cursor", hint=f"it needs the keys {', '.join(cls._fields)}") from error
        try:
            cursor = cls(operator.index(epoch), operator.index(consumed), str(plan))  # accepts NumPy integers
        except TypeError:
            cursor = cls(-1, -1, "")
        if isinstance(epoch, bool) or isinstance(consumed, bool) or cursor.epoch < 0 or cursor.consumed < 0:
            raise InputError(f"invalid cursor: epoch {epoch!r} and consumed {consumed!r} must be integers >= 0")
        return cursor

    def state(self) -> dict[str, Any]:
        """Return the cursor as plain values, for a checkpoint."""
        return self._asdict()

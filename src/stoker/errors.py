"""Every error that stoker raises on purpose.

    StokerError                  exit 1   the root; the command line catches it once
    ├── InputError               exit 2   what was given cannot be used as it is
    │   ├── SpecError                     settings: every fault, each with the path of its key
    │   ├── NotFoundError                 nothing lies at this path or URL
    │   ├── SourceError                   a dataset that is not what it claims to be
    │   ├── ConflictError                 a destination that already holds something else
    │   └── DataFaultError                a shard set that failed verification
    ├── MissingError             exit 3   this machine lacks something
    │   ├── MissingExtraError             a Python package behind an extra
    │   ├── MissingProgramError           a program that is not on the PATH
    │   └── NotYetError                   a command that this version does not have
    ├── JobFailedError           exit 4   a job ended without success
    ├── UnavailableError         exit 5   a store or host that does not answer, or says no
    │   ├── AccessError                   it answered: permission denied
    │   ├── FullError                     it answered: no space left
    │   └── ChangedError                  it answered: there is another version of this object now
    └── StoppedError             exit 130 the user ended it with Ctrl-C

An error carries evidence: *where* it happened (a path, URL or key), *what* is wrong, and a *hint* that says
what to do. `str(error)` is the one sentence that a user reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(r"(https?://[^\s?]*)\?[^\s;,]*")


def without_secrets(text: str) -> str:
    """Take logins and queries out of the URLs in a text; every message passes here, so that none can forget."""
    return _QUERY.sub(r"\1", _LOGIN.sub("", text))


class StokerError(Exception):
    """The root of the tree; carries where, what and a hint."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        sentence = self.what if self.where is None else f"{self.where}: {self.what}"
        return without_secrets(sentence if self.hint is None else f"{sentence}; {self.hint}")


class InputError(StokerError):
    """What was given cannot be used as it is."""

    exit_code = 2


class Fault(NamedTuple):
    """One thing that is wrong in a file of settings, by the path of its key (`resources.gpu`)."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.path else self.what


class SpecError(InputError):
    """Settings that cannot be decoded; holds every fault, not only the first."""

    def __init__(self, faults: Sequence[Fault], *, where: object = None, hint: str | None = None) -> None:
        super().__init__("; ".join(map(str, faults)), where=where, hint=hint)
        self.faults = tuple(faults)


class NotFoundError(InputError):
    """Nothing lies at this path or URL."""


class SourceError(InputError):
    """A dataset that is not what it claims to be."""


class ConflictError(InputError):
    """A destination that already holds something else."""


class DataFaultError(InputError):
    """A shard set that failed verification."""


class MissingError(StokerError):
    """This machine lacks something."""

    exit_code = 3


class MissingExtraError(MissingError):
    """A Python package that lies behind an extra is not installed."""

    def __init__(self, package: str, extra: str, *, purpose: str) -> None:
        super().__init__(f"{purpose} needs the Python package {package!r}", hint=f"run: pip install 'stoker[{extra}]'")
        self.package = package
        self.extra = extra


class MissingProgramError(MissingError):
    """A program is not on the PATH."""


class NotYetError(MissingError):
    """A command of the design that this version does not have."""


class JobFailedError(StokerError):
    """A job ended without success."""

    exit_code = 4


class UnavailableError(StokerError):
    """A store or host that does not answer, or says no."""

    exit_code = 5


class AccessError(UnavailableError):
    """It answered: permission denied."""


class FullError(UnavailableError):
    """It answered: no space left."""


class ChangedError(UnavailableError):
    """It answered: there is another version of this object now."""

    def __init__(
        self, what: str = "was replaced while it was read", *, where: object = None, hint: str | None = None
    ) -> None:
        super().__init__(what, where=where, hint=hint)


class StoppedError(StokerError):
    """The user ended it with Ctrl-C."""

    exit_code = 130

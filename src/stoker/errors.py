"""The exceptions that stoker raises.

    StokerError                     exit 1   root of the tree; caught once, by the command line
    ├── InputError                  exit 2   invalid input: an argument, a file, a dataset
    │   ├── SpecError                        invalid settings; lists every fault with the path of its key
    │   ├── NotFoundError                    path, URL, run or cluster object not found
    │   ├── SourceError                      dataset in another format than expected
    │   ├── ConflictError                    target already exists, is still running, or is in use
    │   └── VerificationError                shard set failed verification, or archive is corrupt
    ├── MissingError                exit 3   missing dependency on this machine or on the cluster
    │   ├── MissingExtraError                Python package of an extra that is not installed
    │   └── MissingProgramError              program not found on the PATH
    ├── JobFailedError              exit 4   job failed
    ├── RunTimeoutError             exit 1   run has not finished in time
    ├── UnavailableError            exit 5   storage, host or service did not respond, or rejected the request
    │   ├── AccessDeniedError                permission denied
    │   ├── StorageFullError                 no space left, or a quota is exceeded
    │   └── ObjectChangedError               object was replaced while it was read
    └── InterruptError              exit 130 interrupted with Ctrl-C

Every error has *what* happened, *where* (a path, URL or key) and a *hint* what to do; `str(error)` joins them to the
sentence that a user reads: `where: what; hint`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(r"(https?://[^\s?]*)\?[^\s;,]*")


def redact_urls(text: str) -> str:
    """Remove credentials and query strings from the URLs in a text; every error message passes through here."""
    return _QUERY.sub(r"\1", _USERINFO.sub("", text))


def install_command(extra: str) -> str:
    """Return the command that installs an extra; stoker is not on PyPI, where its name may be another package."""
    return f"pip install 'path/to/stoker[{extra}]', with the path of your checkout or wheel"


class StokerError(Exception):
    """Root of the tree; has where, what and a hint."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        sentence = self.what if self.where is None else f"{self.where}: {self.what}"
        return redact_urls(sentence if self.hint is None else f"{sentence}; {self.hint}")


class InputError(StokerError):
    """Invalid input: an argument, a file, a dataset."""

    exit_code = 2


class Fault(NamedTuple):
    """One error in a settings file, with the path of its key (`resources.gpu`) and its line, if known."""

    path: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.path else self.what


class SpecError(InputError):
    """Invalid settings; has every fault, not only the first."""

    def __init__(self, faults: Sequence[Fault], *, where: object = None, hint: str | None = None) -> None:
        super().__init__("; ".join(map(str, faults)), where=where, hint=hint)
        self.faults = tuple(faults)

    def __str__(self) -> str:
        """Return `file:line: key: what`; several faults are one line each, below their number."""
        lines = [f"{self._locate(fault)}{fault}" for fault in self.faults]
        if len(lines) > 1:
            where = "" if self.where is None else f"{self.where}: "
            lines = [f"{where}{len(lines)} errors", *(f"  {line}" for line in lines)]
        hint = () if self.hint is None else (self.hint,)
        return redact_urls("\n".join((*lines, *hint)) if len(lines) > 1 else "; ".join((*lines, *hint)))

    def _locate(self, fault: Fault) -> str:
        where = [str(part) for part in (self.where, fault.line) if part is not None]
        return f"{':'.join(where)}: " if self.where is not None else ""


class NotFoundError(InputError):
    """Something that the user named does not exist: a path, URL, run, pod, namespace or context."""


class SourceError(InputError):
    """Dataset in another format than expected."""


class ConflictError(InputError):
    """The target is not free: it already contains something else, is still running, or is in use (a port)."""


class VerificationError(InputError):
    """Shard set failed verification, or an archive is corrupt."""


class MissingError(StokerError):
    """Missing dependency: on this machine, or on the cluster (a custom resource definition)."""

    exit_code = 3


class MissingExtraError(MissingError):
    """Python package of an extra that is not installed."""

    def __init__(self, package: str, extra: str, *, purpose: str) -> None:
        super().__init__(f"{purpose} needs the Python package {package!r}", hint=f"run: {install_command(extra)}")
        self.package = package
        self.extra = extra


class MissingProgramError(MissingError):
    """Program not found on the PATH."""


class JobFailedError(StokerError):
    """Job failed."""

    exit_code = 4


class RunTimeoutError(StokerError, TimeoutError):
    """Run has not finished in time; it continues."""


class UnavailableError(StokerError):
    """Storage, host or service did not respond, or rejected the request."""

    exit_code = 5


class AccessDeniedError(UnavailableError):
    """Permission denied."""


class StorageFullError(UnavailableError):
    """No space left on the storage, or a quota is exceeded (on Kubernetes, of any resource)."""


class ObjectChangedError(UnavailableError):
    """Object was replaced while it was read."""

    def __init__(
        self, what: str = "was replaced while it was read", *, where: object = None, hint: str | None = None
    ) -> None:
        super().__init__(what, where=where, hint=hint)


class InterruptError(StokerError):
    """Interrupted with Ctrl-C."""

    exit_code = 130

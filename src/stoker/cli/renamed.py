"""Options that were renamed: using an old name fails with a sentence that names the new one."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.errors import InputError

RENAMED: dict[tuple[str, ...], dict[str, str]] = {
    ("data", "plan"): {"--world": "--world-size", "--batch": "--global-batch-size"},
    ("data", "peek"): {"--n": "--count"},
    ("data", "bench"): {"--batch": "--batch-size"},
    ("data", "cache"): {"--fresh": "--revalidate-after", "--class": "--storage-class", "--plan": "--dry-run"},
    ("data", "warm"): {"--plan": "--job", "--copy": "--read-from"},
    ("volume", "create"): {"--class": "--storage-class", "--plan": "--dry-run"},
}


def check_renamed_options(argv: Sequence[str]) -> None:
    """Raise InputError for the first option that has a new name."""
    renamed = RENAMED.get(tuple(argv[:2]), {})
    for argument in argv[2:]:
        if argument == "--":
            return
        option, _, _ = argument.partition("=")
        if option in renamed:
            command = " ".join(argv[:2])
            raise InputError(f"`stoker {command}` has no option {option}", hint=f"it was renamed to {renamed[option]}")

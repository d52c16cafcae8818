"""Types of the values in a job file: names, labels, paths, images, ports; each rejects invalid values by itself."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

RESERVED_ENV = re.compile(
    "STOKER_.*|PET_.*|TORCHELASTIC_.*|OMPI_.*|PMIX?_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""Environment variables that stoker, torchrun or mpirun set."""

MAX_WORKERS_PER_HOST = 1000
"""A larger number after `host:` is almost certainly a port."""
DEFAULT_PORT = 29500
"""The rendezvous port between machines, for jobs that set none."""


def describe(description: str) -> Meta:
    """Attach the description of a key, for the documentation and the JSON Schema."""
    return Meta(description=description)


def expect(description: str) -> Meta:
    """Attach the description of valid values, for error messages."""
    return Meta(extra={"expected": description})


def matches(pattern: str, expected: str) -> Meta:
    """Require that a string matches a pattern; `expected` describes it in error messages."""
    return Meta(pattern=rf"^(?:{pattern})$(?!\n)", extra={"expected": expected})


LABEL_PATTERN = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
"""A DNS label (RFC 1123)."""
_DNS_NAME = matches(
    rf"{LABEL_PATTERN}(?:\.{LABEL_PATTERN})*", "a Kubernetes name: lowercase letters, digits, '-' and '.'"
)

Name = Annotated[
    str,
    matches(
        LABEL_PATTERN,
        "a name with at most 40 characters (lowercase letters, digits and '-') that does not start or end with '-'",
    ),
    Meta(max_length=40),
]
ObjectName = Annotated[str, _DNS_NAME, Meta(max_length=253)]
QueueName = Annotated[str, _DNS_NAME, Meta(max_length=63)]
"""The name of an object that is also used as a label value."""
Namespace = Annotated[
    str, matches(LABEL_PATTERN, "a namespace: lowercase letters, digits and '-'"), Meta(max_length=63)
]
IngressHost = Annotated[
    str,
    matches(rf"(?:\*\.)?{LABEL_PATTERN}(?:\.{LABEL_PATTERN})*", "a host name such as board.example.com"),
    Meta(max_length=253),
]
EnvName = Annotated[str, matches("[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and '_'")]
ModuleName = Annotated[str, matches(r"\w+(?:\.\w+)*", "a module such as package.train")]
LabelKey = Annotated[
    str,
    matches(
        rf"(?:{LABEL_PATTERN}(?:\.{LABEL_PATTERN})*/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
        "a label key such as team or example.com/team: at most 63 letters, digits, '-', '_' and '.'",
    ),
]
MountPath = Annotated[str, matches(r"/[^\x00:]+", "an absolute path such as /data")]
ImageRef = Annotated[str, matches(r"\S+", "an image such as ghcr.io/acme/trainer:v1")]
HostName = Annotated[str, matches(r"[^-\s][^\s]*", "a host name without spaces")]
UserName = Annotated[str, matches(r"[^-\s@][^\s@]*", "a user name without spaces")]
SlurmName = Annotated[str, matches(r"[^-\s]\S*", "a name without spaces")]
SbatchOption = Annotated[str, matches(r"--[a-z][^\x00\n]*", "an option such as --reservation=exam")]
CacheUrl = Annotated[str, matches("cluster|https?://.+", "a URL such as http://cache:3128, or 'cluster'")]
TopologyName = Annotated[str, expect("a topology name")]
NonEmpty = Annotated[str, matches(r"[^\x00]+", "a non-empty string")]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]

_VERBATIM = Meta(extra={"verbatim": True})
Verbatim = Annotated[str, _VERBATIM, matches(r"[^\x00]*", "a string")]
"""A string for a program: 1e-4, 0755 and yes are passed exactly as written, without quotes."""
LabelValue = Annotated[
    str,
    _VERBATIM,
    matches("(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", "at most 63 letters, digits, '-', '_' and '.'"),
]

"""Kubeconfig files: written by cloud tools, copied between machines."""

from __future__ import annotations

from pathlib import Path

from stoker.kube.config import load_config
from tests.fuzz.limits import Target

PATH = Path("config").absolute()
VALID = b"""\
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: k, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}]
contexts: [{name: c, context: {cluster: k, user: u, namespace: n}}]
users: [{name: u, user: {token: abc}}]
"""


def run(data: bytes) -> None:
    """Load the current context of a kubeconfig file."""
    PATH.write_bytes(data)
    load_config(None, {"KUBECONFIG": str(PATH)})


TARGET = Target(
    run,
    valid=[VALID],
    hostile=[
        b"",
        b"[" * 100_000,
        b"a: &a [*a]",
        b"clusters: &c [*c, *c]\ncurrent-context: c\n",
        b"current-context: [c]\n",
        b"current-context: c\ncontexts: {c: d}\n",
        VALID.replace(b"[{name: u", b"[null, {name: u"),
        VALID.replace(b"[{name: c", b"[{nam: c"),
        VALID.replace(b"name: c,", b"name: [c],"),
        VALID.replace(b"token: abc", b"token: [1, 2]"),
        VALID.replace(b"token: abc", b"exec: 5"),
        VALID.replace(b"token: abc", b"client-certificate-data: '@@@'"),
        VALID.replace(b"cluster: k", b"cluster: null"),
        VALID.replace(b'"https://127.0.0.1:6443"', b'"http://[::bad"'),
        VALID.replace(b'"https://127.0.0.1:6443"', b"7"),
    ],
    tokens=[b"null", b"[]", b"{}", b"- ", b"&a ", b"*a", b"<<: ", b"5", b"'"],
)

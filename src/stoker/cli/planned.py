"""The commands of the design that this version does not have: named in the help, and honest when called."""

from __future__ import annotations

import typer

from stoker.errors import NotYetError

PLANNED = {
    "": {
        "dash": "Show runs on a dashboard.",
        "bench": "Measure this machine against the peers.",
    },
    "image": {
        "build": "Build a job's image.",
        "push": "Push a job's image.",
    },
    "cluster": {
        "plan": "Show what a cluster would be.",
        "up": "Make or change a cluster.",
        "status": "Tell how a cluster is doing.",
        "down": "Delete a cluster.",
    },
}
NOUNS = {
    "image": "Container images.",
    "cluster": "GKE and EKS clusters.",
}
MARK = "(not yet)"


def add_to(app: typer.Typer) -> None:
    """Add every noun that has no working command yet."""
    for name, text in PLANNED[""].items():
        add_command(app, name, text, f"stoker {name}")
    for noun, text in NOUNS.items():
        group = typer.Typer(help=f"{MARK} {text}", no_args_is_help=True)
        add_commands(group, noun)
        app.add_typer(group, name=noun)


def add_commands(group: typer.Typer, noun: str) -> None:
    """Add the commands of one noun."""
    for name, text in PLANNED[noun].items():
        add_command(group, name, text, f"stoker {noun} {name}")


def add_command(group: typer.Typer, name: str, text: str, line: str) -> None:
    """Add one command that takes any arguments and says that it is not there yet."""

    def refuse() -> None:
        raise NotYetError(f"`{line}` is not in this version", hint="CHANGELOG.md tells what each version has")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    group.command(name, help=f"{MARK} {text}", context_settings=settings)(refuse)

"""Commands that are planned but not implemented: listed in the help, refused when called."""

from __future__ import annotations

import typer

from stoker.errors import NotImplementedYetError

PLANNED = {
    "": {
        "dash": "Show runs on a dashboard.",
        "bench": "Measure this machine against other tools.",
    },
    "image": {
        "build": "Build the image of a job.",
        "push": "Push the image of a job.",
    },
    "cluster": {
        "plan": "Show the steps that would create a cluster.",
        "up": "Create or update a cluster.",
        "status": "Show the state of a cluster.",
        "down": "Delete a cluster.",
    },
}
GROUPS = {
    "image": "Build and push container images.",
    "cluster": "Provision GKE and EKS clusters.",
}
MARK = "(not yet)"


def add_to(app: typer.Typer) -> None:
    """Add every planned command and group."""
    for name, text in PLANNED[""].items():
        _add_command(app, name, text, f"stoker {name}")
    for group_name, text in GROUPS.items():
        group = typer.Typer(help=f"{MARK} {text}", no_args_is_help=True)
        for name, command_text in PLANNED[group_name].items():
            _add_command(group, name, command_text, f"stoker {group_name} {name}")
        app.add_typer(group, name=group_name)


def _add_command(group: typer.Typer, name: str, text: str, line: str) -> None:
    """Add one command that accepts any arguments and raises NotImplementedYetError."""

    def refuse() -> None:
        raise NotImplementedYetError(f"`{line}` is not implemented in this version", hint="see CHANGELOG.md")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    group.command(name, help=f"{MARK} {text}", context_settings=settings)(refuse)

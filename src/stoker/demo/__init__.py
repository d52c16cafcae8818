"""The demo: the whole road on this machine, as commands that a user could type."""

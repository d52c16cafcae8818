"""The demo: the whole workflow on this machine, as commands that a user could type."""

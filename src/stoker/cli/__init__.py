"""The command line: one file per noun; work and heavy imports happen inside the commands."""

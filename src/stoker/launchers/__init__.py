"""Launchers: one module or package for each target that jobs run on, and the supervisor that they share."""

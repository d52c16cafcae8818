"""Checks of what a run will need, each with its fix, before it burns hours."""

"""The topologies, each in a file of its own."""

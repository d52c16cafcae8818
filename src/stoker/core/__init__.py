"""Foundations for all other packages: settings, YAML, units, processes, registry, permutations, threads."""

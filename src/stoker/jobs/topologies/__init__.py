"""Topologies, one module per framework: single, torchrun, mpi, tensorflow."""

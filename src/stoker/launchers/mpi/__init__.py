"""mpirun as a slot: run it, split its output by rank, explain its errors."""

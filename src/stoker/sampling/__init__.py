"""Sampling: which samples each rank reads at each step; pure functions of sizes, seed, epoch and world size."""

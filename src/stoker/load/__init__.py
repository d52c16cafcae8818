"""Shards into batches: read by the plan, decoded by threads, handed over in order."""

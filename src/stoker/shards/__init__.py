"""Shards: convert datasets to shard sets, and find, index, summarize and verify shard sets."""

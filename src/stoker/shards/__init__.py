"""Datasets into shards: sources are scanned, planned, packed; shard sets are summarised and verified."""

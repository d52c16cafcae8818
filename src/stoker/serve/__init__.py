"""Servers of shards and caches in front of them, by an engine of our own or by nginx."""

"""Shards over http: a data server and a caching proxy, each by an engine of ours or by nginx."""

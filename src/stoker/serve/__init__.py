"""Data server and caching proxy for shards over HTTP, each with an embedded or an nginx engine."""

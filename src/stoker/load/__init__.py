"""The data loader: read shards by the sampling plan, decode them in threads, yield batches in order."""

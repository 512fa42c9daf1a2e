"""Looking at prepared data: what is in shards, and what a run will read. The readers of indices read no token."""

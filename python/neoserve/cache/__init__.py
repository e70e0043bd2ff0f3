"""Page accounting of the KV cache: integers only."""

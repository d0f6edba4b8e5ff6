"""The channel of gradients: hooks, buckets and rounds of a backward."""

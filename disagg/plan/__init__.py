"""`disagg plan`: the bytes that a prompt moves between two groups, and the KV cache that fits a GPU."""

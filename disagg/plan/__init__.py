"""`disagg plan`: computes the bytes that a prompt transfers between two groups, and the KV cache that fits a GPU."""

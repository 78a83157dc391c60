"""KV memory: pools, page allocator, prefix cache and request-to-token table."""

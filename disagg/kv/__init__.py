"""KV memory: pools, the page allocator and the request-to-token table."""

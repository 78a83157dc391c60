"""`disagg bench transfer` and `wire`: KV from pool to pool, and the transports alone."""

"""`disagg bench transfer` measures KV transfers from pool to pool, `disagg bench wire` the transports alone."""

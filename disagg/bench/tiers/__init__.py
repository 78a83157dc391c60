"""`disagg bench tiers`: TTFT and throughput with cached KV in the KV pool, in host memory and in a storage."""

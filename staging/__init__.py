"""Who sends what to whom (shards, routes, segments) and the ring it passes through."""

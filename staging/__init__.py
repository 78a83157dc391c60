"""Division, routing and staging of KV: shards, routes, segments, ring positions and ring memory."""

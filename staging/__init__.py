"""How KV is cut, routed and staged: shards, routes, segments, the ring's integers and its memory."""

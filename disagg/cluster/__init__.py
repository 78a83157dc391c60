"""Groups of ranks: placed, started with Ray, supervised, listed for routers, and stopped."""

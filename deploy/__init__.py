"""Ways to run disagg: the local demo script."""

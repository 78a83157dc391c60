"""The cluster's CURVE keys: their creation, file, rotation, and reload in running processes."""

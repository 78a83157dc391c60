"""Benchmarks of parts of the engine: decode steps, KV management, collectives."""

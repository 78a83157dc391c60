"""Benchmarks of parts of the engine: prefill and decode steps, KV management, collectives."""

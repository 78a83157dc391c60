"""Benchmarks. Each benchmark checks the computed results, and measures the hardware's ceiling in the same run."""

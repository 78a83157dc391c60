"""Benchmarks. Each one checks its results, and measures the ceiling of its figures in the same run."""

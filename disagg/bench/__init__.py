"""Benchmarks: each checks the moved bytes, and measures its ceiling in the same run."""

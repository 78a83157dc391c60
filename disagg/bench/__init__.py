"""Benchmarks: each checks the bytes it moved, and measures its ceiling in the same run."""

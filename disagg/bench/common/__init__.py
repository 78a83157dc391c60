"""Shared parts of benchmarks: processes, clocks, ceilings, reports."""

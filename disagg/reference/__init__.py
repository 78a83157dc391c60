"""Computes reference answers with single-process (unsplit) engines, and compares answers with them."""

"""Replacements of a model's small operations: fused kernels, rotary embeddings, row-wise operations."""

"""Kernels of a model's layers: products, norms, rotary embeddings, sums."""

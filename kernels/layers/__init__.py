"""Kernels of a model's layers: matrix products, norms, rotary embeddings, sums."""

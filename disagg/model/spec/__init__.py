"""Layers, heads and KV cache of a model, read from its configuration."""

"""Triton kernels with torch equivalents: KV copies, attention, layers and sampling. One file per kernel."""

"""Attention over a paged KV pool, and the kernel that writes K and V into it."""

"""Kernels of sampling: random numbers, draws without a sort, penalties, masks of grammars."""

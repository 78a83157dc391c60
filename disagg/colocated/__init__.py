"""Prefill and decode in one group, on the same ranks: the baseline that splitting them is measured against."""

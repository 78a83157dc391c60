"""Prefill and decode in one group, on the same ranks: the baseline with which a split system is compared."""

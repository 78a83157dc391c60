"""The colocated node: prefill and decode on the same ranks, as the baseline for comparisons with a split system."""

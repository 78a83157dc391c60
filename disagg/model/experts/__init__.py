"""Mixtures of experts: their weights over the ranks of a group, and their products in one launch."""

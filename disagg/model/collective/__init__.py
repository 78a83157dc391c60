"""Collectives of the ranks of one tensor-parallel group."""

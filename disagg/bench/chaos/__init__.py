"""Faults under load: kills and stops ranks of a running system, and compares every answer with a quiet run."""

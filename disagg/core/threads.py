"""Settings of the Python interpreter in processes whose threads share work."""

from __future__ import annotations

SWITCH_INTERVAL_S = 0.0002
"""Python's switch interval in ranks and servers; the default of 5 ms would delay whole transfers."""

"""Stands in for the check of a model type, in a process of its own. Imports nothing that takes long."""

from __future__ import annotations

import os
import time

from disagg.coverage.verdict import Verdict


def ends_badly(model_type: str) -> Verdict:
    """A type's name says how its process ends."""
    if model_type == "crashes":
        os._exit(3)
    if model_type == "hangs":
        time.sleep(600)
    return Verdict(model_type, "exact")

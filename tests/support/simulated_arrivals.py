"""Steps of `Simulation` that wait for KV that still arrives: others act meanwhile, or the step gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_node.arriving import ArrivingLayers
from disagg.node.plan import StepPlan

GIVES_UP = 0.002
"""Probability that a step gives up, each time that something else has happened."""


class LateArrivals:
    """Steps of one decode rank that wait. The simulation's one thread must not block."""

    def __init__(self, rank: Any, simulation: Any, patch: pytest.MonkeyPatch) -> None:
        self._rank, self._simulation = rank, simulation
        self._find: Callable[[StepPlan], ArrivingLayers | None] = rank._arriving  # noqa: SLF001 - blocks otherwise
        patch.setattr(rank, "_arriving", self.of)

    def of(self, plan: StepPlan) -> ArrivingLayers | None:
        """Returns what the step waits for, as `DecodeRank` does."""
        found = self._find(plan)
        self._rank.runner.is_void = (lambda: False) if found is None else (lambda: found.is_void)
        if plan.arriving_ticket is not None:
            (work,) = plan.work
            self._simulation.router.requests[work.key.request_id].waited = True
            if found is None:  # its request has ended meanwhile
                self._rank.runner.is_void = lambda: True
            else:
                found.block = self.block  # type: ignore[method-assign]
        return found

    def block(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Stands in for `ArrivingLayers.block`."""
        while not ready():
            if self._simulation.choose.random() < GIVES_UP:
                return False
            self._simulation.step()
        return True

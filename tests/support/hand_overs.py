"""A hand-over between two imitated engines, of which a test chooses the order of events."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_network import EngineNetwork
from fake_vllm import (
    LEASE_S,
    FakeEngine,
    FakeRequest,
    asks_decode,
    asks_decode_at_once,
    asks_prefill,
    small_settings,
)

from disagg.vllm.groups import CacheGroup

TOKENS = 90


class HandOver:
    """One hand-over in small steps, of which a test chooses where something happens."""

    def __init__(
        self,
        seed: int,
        *,
        both_at_once: bool,
        patch: pytest.MonkeyPatch | None = None,
        checksum: bool = False,
        groups: tuple[CacheGroup, ...] = (),
        early: float | None = None,
        **sizes: int,
    ) -> None:
        """`early`: probability with which the consumer's workers report their requests early, before each event;
        None: no early reports."""
        self.network, self.choose = EngineNetwork(patch), random.Random(seed)
        settings = small_settings(checksum, early_s=0.0 if early is None else 0.004)
        self._early = early
        options: dict[str, Any] = {"settings": settings, "groups": groups, "blocks": 24 if not groups else 40}
        self.p = FakeEngine(self.network, "p", tp=sizes.get("p", 1), **options)
        self.d = FakeEngine(self.network, "d", tp=sizes.get("d", 1), layout="hnd, packed", **options)
        self.first = self.p.submit(asks_prefill("p1", 3, TOKENS, "both" if both_at_once else ""))
        self.second: FakeRequest | None = self._consumer() if both_at_once else None

    def _consumer(self) -> FakeRequest:
        return self.d.submit(asks_decode_at_once("d1", 3, TOKENS, "p1"))

    @property
    def engines(self) -> list[FakeEngine]:
        return [engine for engine in (self.p, self.d) if engine.alive]

    def step(self) -> None:
        if self._early and self.d.alive and self.choose.random() < self._early:
            self.d.hurry()
        engine = self.choose.choice(self.engines)
        if self.choose.random() < 0.2:
            engine.step()
            engine.check()
        else:
            self.network.step(self.choose)
        if self.second is None and self.first.answer_params is not None:
            self.second = self.d.submit(asks_decode("d1", self.first))

    def end(self) -> None:
        """Time passes until all leases are over."""
        for pause in (0.0, 0.0, LEASE_S + 1, 0.0, LEASE_S + 1, 25.0, 0.0):
            self.network.now_s += pause
            for _ in range(6):
                self.network.settle()
                for engine in self.engines:
                    engine.step()
        for engine in self.engines:
            engine.check_empty()

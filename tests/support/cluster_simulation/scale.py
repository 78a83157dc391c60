"""Sizes of a simulation, and the settings of its groups."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
from local_groups import small_config

from cluster_simulation.network import Weather
from disagg.core.config.read import Config

PEER_TIMEOUT_S, SUSPECT_AFTER_S = 4.0, 1.5


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a simulation holds; each seed draws up to these numbers."""

    prefills: int = 2
    decodes: int = 2
    routers: int = 2
    most_ranks: int = 2
    """Of one group."""
    requests: int = 8
    longest_answer: int = 8
    spread_s: float = 10.0
    """Requests and faults begin within this time."""
    faults: int = 4
    least: float = 0.0
    """Share of these numbers that each seed has at least."""
    states: bool = False
    """Whether the model has a recurrent state."""
    features: bool = False
    """Whether requests have priorities and grammars, and pages are copied to host memory when they are evicted."""

    def draw(self, choose: random.Random, most: int) -> int:
        """Returns a number up to `most`, which is one of the numbers above."""
        return choose.randint(max(1, int(self.least * most)), most)


CLEAR = Weather()
HOST_CACHE_BYTES = [0, 16 * 4096, 200 * 4096]
"""Pages have 4 KiB or less there."""


def weather_of(choose: random.Random) -> Weather:
    """Half of the seeds have a good network; the worst loses and repeats a tenth of all packets."""
    bad = choose.choice([0.0, 0.0, 0.02, 0.1])
    return Weather(
        lost=bad * choose.random(),
        repeated=bad * choose.random(),
        late=choose.choice([0.0, 0.02]),
        delay_s=choose.choice([1e-4, 2e-4, 2e-3]),
    )


def draw_config(choose: random.Random) -> Config:
    """Small in every way; leases expire within the simulation."""
    config = small_config(
        prefill_page=choose.choice([4, 16]),
        decode_page=choose.choice([4, 16]),
        chunk_tokens=choose.choice([16, 64]),
        pool_tokens=choose.choice([128, 256]),
        ring_bytes=choose.choice([4096, 16384]),
        layer_groups=choose.choice([1, 3]),
        max_requests=choose.choice([3, 6]),
        lease_timeout_s=12.0,
        peer_memory=choose.random() < 0.5,
        metrics_interval_s=5.0,
        checksum=choose.random() < 0.5,
    )
    decode = msgspec.structs.replace(
        config.decode,
        preemption=choose.choice(["recompute", "swap"]),
        swap_bytes=choose.choice([0, 1 << 16]),
        async_steps=choose.random() < 0.5,
    )
    prefill = msgspec.structs.replace(
        config.prefill,
        host_cache_bytes=choose.choice(HOST_CACHE_BYTES),
        async_steps=not decode.async_steps,
    )
    decode = msgspec.structs.replace(decode, host_cache_bytes=choose.choice(HOST_CACHE_BYTES))
    return msgspec.structs.replace(config, prefill=prefill, decode=decode)


def with_write_back(config: Config, choose: random.Random) -> Config:
    """Host memory for few or all pages, written when pages are evicted."""
    for role in ("prefill", "decode"):
        cache = {"host_cache_bytes": choose.choice(HOST_CACHE_BYTES[1:]), "host_cache_write": "back"}
        section = msgspec.structs.replace(getattr(config, role), **cache)
        config = msgspec.structs.replace(config, **{role: section})
    return config


def with_local_prefill(config: Config, choose: random.Random) -> Config:
    """In half of the simulations decode groups compute some prompts, or all of them, or those without a prefill
    group."""
    decode = msgspec.structs.replace(config.decode, local_prefill_tokens=choose.choice([0, 0, 2, 80]))
    router = msgspec.structs.replace(
        config.router,
        local_prefill_queue_tokens=choose.choice([0, 20, 1 << 30]),
        local_prefill_cost=choose.choice([0.0, 1.0]),
    )
    return msgspec.structs.replace(config, decode=decode, router=router)


def with_ranks(config: Config, role: str, ranks: int) -> Config:
    """The settings of one group."""
    section = msgspec.structs.replace(getattr(config, role), tp=ranks)
    return msgspec.structs.replace(config, **{role: section})

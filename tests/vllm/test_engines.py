"""Two engines with connectors: each cell of a prompt's KV arrives, for all layouts, block sizes and TP sizes."""

from __future__ import annotations

import pytest
from engine_network import EngineNetwork
from fake_vllm import (
    FakeEngine,
    FakeRequest,
    asks_decode,
    asks_decode_at_once,
    asks_prefill,
    handed_over,
    run,
    small_settings,
)
from layer_pools import VLLM_LAYOUTS

TOKENS = 70


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 4)])
def test_any_tp_sizes(prefill_tp: int, decode_tp: int) -> None:
    network = EngineNetwork()
    p, d = FakeEngine(network, "p", tp=prefill_tp), FakeEngine(network, "d", tp=decode_tp)
    assert handed_over(network, p, d, TOKENS).landed
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(16, 32), (64, 16)])
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [(2, 1), *(pytest.param(*tp, marks=pytest.mark.slow) for tp in [(1, 2), (3, 2), (4, 4)])],
)
def test_any_layouts_and_block_sizes(
    layout: str, prefill_blocks: int, decode_blocks: int, prefill_tp: int, decode_tp: int
) -> None:
    """Each engine has its own memory order; K and V are in one row at both engines, or at none."""
    network = EngineNetwork()
    other = layout if layout in ("one latent head", "nhd, kv first") else "nhd, packed"
    p = FakeEngine(network, "p", tp=prefill_tp, layout=layout, block_size=prefill_blocks)
    d = FakeEngine(network, "d", tp=decode_tp, layout=other, block_size=decode_blocks)
    assert handed_over(network, p, d, TOKENS).landed
    p.check_empty()
    d.check_empty()


def test_replicated_heads_are_sent_once() -> None:
    network = EngineNetwork()
    p, d = (FakeEngine(network, name, tp=2, kv_heads=1) for name in ("p", "d"))
    assert handed_over(network, p, d, TOKENS).landed
    sent = [worker.producing.endpoint.agent.statistics().bytes_sent for worker in p.workers]
    assert sum(sent) == 2 * TOKENS * 3 * 2 * 4 * 2  # two consumers, and no byte twice
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_a_prefix_hit_of_the_consumer_is_not_sent(prefill_tp: int, decode_tp: int) -> None:
    network = EngineNetwork()
    p = FakeEngine(network, "p", tp=prefill_tp, block_size=32)
    d = FakeEngine(network, "d", tp=decode_tp, layout="hnd, packed")
    first = p.submit(asks_prefill("p1", 5, TOKENS))
    run(network, p)
    second = asks_decode("d1", first)
    second.cached = 48  # in the middle of a block of the producer
    d.submit(second)
    run(network, p, d)
    assert second.landed
    sent = [worker.producing.endpoint.agent.statistics().bytes_sent for worker in p.workers]
    assert sum(sent) == (TOKENS - 48) * 3 * 2 * 4 * 4 * 2
    p.check_empty()
    d.check_empty()


def test_checksums() -> None:
    network, settings = EngineNetwork(), small_settings(checksum=True)
    p = FakeEngine(network, "p", tp=2, layout="hnd, packed", settings=settings)
    d = FakeEngine(network, "d", tp=1, settings=settings)
    assert handed_over(network, p, d, TOKENS).landed
    p.check_empty()
    d.check_empty()


def test_a_prompt_larger_than_the_ring() -> None:
    network, settings = EngineNetwork(), small_settings(ring_bytes=4096)
    p, d = FakeEngine(network, "p", settings=settings), FakeEngine(network, "d", tp=2, settings=settings)
    assert handed_over(network, p, d, 300).landed
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize("late_loads", [False, True])
def test_kv_is_sent_while_the_prompt_is_computed(late_loads: bool) -> None:
    """Both engines start at once, with a name for the transfer: first layers arrive before the last is computed."""
    network = EngineNetwork()
    p, d = (FakeEngine(network, name, late_loads=late_loads) for name in ("p", "d"))
    handed_over(network, p, d, TOKENS)  # links the engines
    second = d.submit(asks_decode_at_once("d2", 6, 30, "p2"))
    run(network, d)
    landed: list[int] = []
    compute = p._compute  # noqa: SLF001

    def computing(request: FakeRequest, name: str, start: int, stop: int) -> None:
        network.settle()
        landed.append(d.workers[0].consuming.endpoint.agent.statistics().segments_landed)
        compute(request, name, start, stop)

    p._compute = computing  # type: ignore[method-assign]  # noqa: SLF001
    p.submit(asks_prefill("p2", 6, 30, "both"))
    run(network, p, d)
    assert landed[-1] > landed[0]
    assert second.landed
    p.check_empty()
    d.check_empty()


def test_unlike_engines_do_not_link() -> None:
    """The consumer computes the prompt itself, at once."""
    network = EngineNetwork()
    p, d = FakeEngine(network, "p", kv_heads=4), FakeEngine(network, "d", kv_heads=2)
    assert handed_over(network, p, d, TOKENS).recomputed
    network.now_s += 100
    run(network, p, d)
    p.check_empty()
    d.check_empty()

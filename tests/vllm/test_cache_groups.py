"""Two engines of a model with several KV cache groups: full attention, sliding windows, chunked local attention."""

from __future__ import annotations

import pytest
from engine_network import EngineNetwork
from fake_vllm import (
    FakeEngine,
    asks_decode,
    asks_prefill,
    full_and,
    landed,
    require_handed_over,
    run,
    run_at_once,
    small_settings,
)

from disagg.vllm.groups import CacheGroup

TOKENS = 90
OTHERS = [19, 20, *range(80, 83), *range(85, 97)]


def tokens_sent(engine: FakeEngine) -> float:
    """Tokens that left the engine's workers, in layers of one group."""
    sent = [worker.producing.endpoint.agent.statistics().bytes_sent for worker in engine.workers]
    return sum(sent) / (3 * 4 * 2 * 4 * 2)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_only_the_window_is_moved(prefill_tp: int, decode_tp: int) -> None:
    network = EngineNetwork()
    groups = full_and(20, 50)
    p = FakeEngine(network, "p", tp=prefill_tp, groups=groups, blocks=40)
    d = FakeEngine(network, "d", tp=decode_tp, groups=groups, blocks=40, layout="hnd, packed")
    landed(network, p, d, TOKENS)
    # The token after 89 attends to 19 and 49 tokens before it, which are in blocks of 16 tokens.
    assert tokens_sent(p) == 89 + (89 - 64) + (89 - 32)


@pytest.mark.parametrize(
    "tokens", [1, 2, 21, 83, 84, 97, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_all_lengths(tokens: int) -> None:
    """At each place of the window's first token in its block; the consumer computes a prompt of one token.

    The last of 83 tokens attends to one that vLLM frees when all are computed; a chunk ends before the last of 97.
    """
    network = EngineNetwork()
    p, d = (FakeEngine(network, name, groups=full_and(20, -32), blocks=40) for name in ("p", "d"))
    require_handed_over(network, p, d, tokens)


@pytest.mark.parametrize(("prefill_sizes", "decode_sizes"), [((16, 32), (16, 32)), ((32, 64), (16, 32))])
def test_groups_with_blocks_of_other_sizes(
    prefill_sizes: tuple[int, int], decode_sizes: tuple[int, int]
) -> None:
    """The head size of the second group is half of the first one's, so that blocks have equal sizes in bytes."""
    network = EngineNetwork()
    p, d = (
        FakeEngine(network, name, groups=(CacheGroup(sizes[0]), CacheGroup(sizes[1], window=20)), blocks=40)
        for name, sizes in (("p", prefill_sizes), ("d", decode_sizes))
    )
    landed(network, p, d, TOKENS)


def test_larger_blocks_of_the_consumer() -> None:
    """The producer has freed the first part of the window's first block: the consumer computes such a prompt."""
    network = EngineNetwork()
    p, d = (
        FakeEngine(network, name, groups=(CacheGroup(size), CacheGroup(size, window=20)), blocks=40)
        for name, size in (("p", 16), ("d", 32))
    )
    ends = []
    for number, tokens in enumerate((90, 105)):
        first = p.submit(asks_prefill(f"p{number}", 5, tokens))
        run(network, p)
        second = d.submit(asks_decode(f"d{number}", first))
        run(network, p, d)
        ends.append((second.finished, second.landed, second.recomputed))
    assert ends == [(True, True, False), (True, False, True)]
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize("cached", [16, 80])
def test_a_prefix_hit_of_the_consumer(cached: int) -> None:
    """The hit may end before the window or in it."""
    network = EngineNetwork()
    p, d = (FakeEngine(network, name, groups=full_and(50), blocks=40) for name in ("p", "d"))
    first = p.submit(asks_prefill("p1", 5, TOKENS))
    run(network, p)
    second = asks_decode("d1", first)
    second.cached = cached
    d.submit(second)
    run(network, p, d)
    assert second.landed
    assert tokens_sent(p) == (89 - cached) + (89 - max(cached, 32))
    p.check_empty()
    d.check_empty()


def test_one_group_of_sliding_windows() -> None:
    network = EngineNetwork()
    p, d = (FakeEngine(network, name, groups=(CacheGroup(16, window=30),)) for name in ("p", "d"))
    landed(network, p, d, TOKENS)
    assert tokens_sent(p) == 89 - 48


@pytest.mark.parametrize("checksum", [False, True])
def test_both_engines_at_once(checksum: bool) -> None:
    """KV leaves while the prompt's last chunk is computed; vLLM frees blocks before the window when it is."""
    network, settings = EngineNetwork(), small_settings(checksum)
    p, d = (
        FakeEngine(network, name, groups=full_and(20), blocks=40, settings=settings) for name in ("p", "d")
    )
    landed(network, p, d, TOKENS)  # links the engines
    run_at_once(network, p, d, TOKENS)


def test_a_producer_that_has_freed_the_window_refuses() -> None:
    """A request with a long answer, whose prompt is not shortened: its window has moved on. The consumer computes the
    prompt at once."""
    network = EngineNetwork()
    p, d = (FakeEngine(network, name, groups=full_and(20), blocks=40) for name in ("p", "d"))
    first = asks_prefill("p1", 5, TOKENS)
    first.max_tokens = 60
    first.skip_reading_prefix_cache = True
    p.submit(first)
    run(network, p)
    second = d.submit(asks_decode("d1", first))
    run(network, p, d)
    assert second.recomputed
    assert second.finished
    p.check_empty()
    d.check_empty()

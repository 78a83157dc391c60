"""Two engines of a model with attention and recurrent layers: KV is compared cell by cell, states byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from engine_network import EngineNetwork
from fake_states import StateModel
from fake_vllm import (
    FakeEngine,
    asks_decode,
    asks_prefill,
    full_and_states,
    landed,
    require_handed_over,
    run,
    run_at_once,
    small_settings,
)

TOKENS = 90
MAMBA2, ROWS_FIRST, ONE_GROUP = StateModel(), StateModel(channels_first=False), StateModel(groups=1)
DELTA, UNKNOWN = StateModel("GDN_ATTN"), StateModel("LINEAR")


def engines(
    network: EngineNetwork, *tp: int, size: int = 16, states: StateModel = MAMBA2, **more: Any
) -> tuple[FakeEngine, FakeEngine]:
    groups = full_and_states(size)
    p, d = (
        FakeEngine(network, name, tp=ranks, groups=groups, blocks=40, states=states, **more)
        for name, ranks in zip(("p", "d"), tp, strict=True)
    )
    return p, d


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [16, 512])
@pytest.mark.parametrize("states", [MAMBA2, UNKNOWN])
def test_the_state_of_the_last_token_is_moved(states: StateModel, size: int, asynchronous: bool) -> None:
    """From one block of each group, whether a request has one block or one of each 16 tokens."""
    network = EngineNetwork()
    p, d = engines(network, 1, 1, size=size, states=states, asynchronous=asynchronous)
    landed(network, p, d, TOKENS)
    sent = p.workers[0].producing.endpoint.agent.statistics().bytes_sent
    attention, page_bytes = 3 * 89 * 4 * 2 * 4 * 2, len(states.page(0, 0, 0, 0, 1))
    assert sent == attention + 2 * 3 * page_bytes


@pytest.mark.parametrize(
    ("states", "tp"),
    [
        *((states, tp) for states in (MAMBA2, ROWS_FIRST, DELTA) for tp in [(1, 2), (2, 1), (2, 2)]),
        *((ONE_GROUP, tp) for tp in [(1, 2), (4, 1), (2, 4)]),
    ],
)
def test_ranks_share_states_by_heads(states: StateModel, tp: tuple[int, int]) -> None:
    """All ranks have a copy of a single group."""
    network = EngineNetwork()
    landed(network, *engines(network, *tp, states=states), TOKENS)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (1, 2)])
def test_states_without_known_heads_need_equally_many_ranks(
    prefill_tp: int, decode_tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    network = EngineNetwork()
    p, d = engines(network, prefill_tp, decode_tp, states=UNKNOWN)
    first = p.submit(asks_prefill("p1", 5, TOKENS))
    run(network, p)
    second = d.submit(asks_decode("d1", first))
    run(network, p, d)
    assert (second.landed, second.recomputed) == (prefill_tp == decode_tp, prefill_tp != decode_tp)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "need the same tensor-parallel size" in line
    ]
    assert any("kv_not_received" in line for line in lines) is second.recomputed
    network.now_s += 31  # an engine that is not linked is not told
    run(network, p, d)
    p.check_empty()
    d.check_empty()


def test_later_requests_of_engines_that_do_not_fit_fail_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    network = EngineNetwork()
    p, d = engines(network, 1, 2, states=UNKNOWN)
    for number in (1, 2):
        first = p.submit(asks_prefill(f"p{number}", 5, TOKENS))
        run(network, p)
        second = d.submit(asks_decode(f"d{number}", first))
        run(network, p, d)
        assert second.recomputed, "without a wait for the next greeting"
    failed = [line for line in capsys.readouterr().out.splitlines() if "kv_not_received" in line]
    assert len(failed) == 2 * 2
    assert all("need the same tensor-parallel size" in line for line in failed)
    d.workers[0].consuming.check()


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 2)])
def test_states_that_each_rank_holds_whole(tp: tuple[int, int]) -> None:
    network = EngineNetwork()
    landed(network, *engines(network, *tp, states=StateModel(replicated=True)), TOKENS)


@pytest.mark.parametrize(
    ("own", "other", "ranks", "reason"),
    [
        (StateModel(whole=True), StateModel(whole=True), 2, "need the same tensor-parallel size"),
        (StateModel(whole=True), StateModel(), 1, "model fingerprint"),
        (UNKNOWN, StateModel("LINEAR", channels_first=False), 1, "model fingerprint"),
    ],
    ids=["whole blocks", "CPU and GPU", "other order of the window"],
)
def test_states_in_other_orders_are_refused(
    own: StateModel, other: StateModel, ranks: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    network = EngineNetwork()
    p, _ = engines(network, 1, 1, states=own)
    d = FakeEngine(network, "e", tp=ranks, groups=full_and_states(16), blocks=40, states=other)
    first = p.submit(asks_prefill("p1", 5, TOKENS))
    run(network, p)
    second = d.submit(asks_decode("d1", first))
    run(network, p, d)
    assert second.recomputed
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if "kv_not_received" in line and reason in line], text


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 18, 33, 97])
@pytest.mark.parametrize("size", [16, 512])
def test_all_lengths(size: int, tokens: int) -> None:
    """The state's block is the last one, also where the next token has a new block."""
    network = EngineNetwork()
    p, d = engines(network, 1, 1, size=size)
    require_handed_over(network, p, d, tokens)


@pytest.mark.parametrize("cached", [16, 80])
def test_a_prefix_hit_of_the_consumer(cached: int) -> None:
    """The KV after the hit is moved, and the state."""
    network = EngineNetwork()
    p, d = engines(network, 1, 1)
    first = p.submit(asks_prefill("p1", 5, TOKENS))
    run(network, p)
    second = asks_decode("d1", first)
    second.cached = cached
    d.submit(second)
    run(network, p, d)
    assert second.landed
    p.check_empty()
    d.check_empty()


@pytest.mark.parametrize(("checksum", "settles"), [(False, False), (True, False), (False, True)])
def test_both_engines_at_once(checksum: bool, settles: bool) -> None:
    """KV leaves while the last chunk is computed, the state after it."""
    network = EngineNetwork()
    p, d = engines(network, 2, 1, settings=small_settings(checksum), settles=settles)
    landed(network, p, d, TOKENS)  # links the engines
    run_at_once(network, p, d, TOKENS)


@pytest.mark.parametrize(("answer", "reason"), [(5, "max_tokens 1"), (1, "after 90 tokens, not 89")])
def test_a_producer_without_the_state_refuses(
    answer: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompt was not shortened, so that the state is that after another token."""
    network = EngineNetwork()
    p, d = engines(network, 1, 1)
    first = asks_prefill("p1", 5, TOKENS)
    first.max_tokens = answer
    first.skip_reading_prefix_cache = True
    p.submit(first)
    run(network, p)
    second = d.submit(asks_decode("d1", first))
    run(network, p, d)
    assert second.recomputed
    assert second.finished
    assert reason in capsys.readouterr().out
    p.check_empty()
    d.check_empty()

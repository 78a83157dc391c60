"""Prefill steps that are launched before the host has read the tokens of the step before them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_model import VOCAB, fake_spec
from ordered_simulation import TOKENS, Ordered, P
from simulated_groups import ROUTER

from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.model.chunks import PromptChunks
from disagg.model.host_copy import HostCopy
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node import loaded_layers
from disagg.node.kv_manager import KVManager
from disagg.node.loaded_layers import LoadedLayers
from disagg.node.plan import StepPlan
from prefill_node import leader as leader_module
from prefill_node.leader import PrefillLeader
from prefill_node.sampled_chunks import SampledChunks
from prefill_node.scheduler import PrefillScheduler
from transport.control import messages as m

KEY, OTHER = RequestKey("r"), RequestKey("other")
PROMPT = pack_tokens(range(10))
ANSWER = SamplingParams()


class Prefill:
    """A prefill group of one rank that computes four tokens in a step, without a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps_ahead: int = 1) -> None:
        self.sent: list[m.Message] = []
        self.waits = 0
        """Waits for the end of a step on the device."""
        self.scheduler = PrefillScheduler(
            KVManager(pool_tokens=64, page_size=4, rows=2, eviction="lru"),
            ranks=1,
            chunks=PromptChunks(4),
            max_context_tokens=40,
            max_waiting=1,
            steps_ahead=steps_ahead,
        )
        spec = fake_spec(layers=1, kv_heads=1)
        self.leader = PrefillLeader(
            self.scheduler, spec, lambda _, message: self.sent.append(message), lambda _: None, lambda: 0.0
        )
        rank = SimpleNamespace(control_address="prefill-0")
        group: Any = SimpleNamespace(ranks=(rank,), role="prefill", name="prefill", leader=rank)
        self.leader.join(group)
        decode: Any = SimpleNamespace(name="decode", leader=SimpleNamespace(control_address="decode-0"))
        self.leader.link(decode)
        event = SimpleNamespace(synchronize=self._wait)
        monkeypatch.setattr(leader_module, "record_event", lambda device: event)

    def _wait(self) -> None:
        self.waits += 1

    def submit(
        self,
        key: RequestKey = KEY,
        prompt: Any = PROMPT,
        *,
        early: bool = False,
        sampling: SamplingParams = ANSWER,
    ) -> None:
        """`early`: without a ticket."""
        ticket = None if early else Ticket(key, 7, "decode", Span(0, len(prompt)))
        self.leader.handle("router", m.Prefill(key, prompt, sampling, ticket, 60.0))

    def launch(self, scores: PromptScores | None = None) -> SampledChunks:
        """Plans the next step and launches it."""
        plan = self.leader.next_plan()
        assert isinstance(plan, StepPlan)
        return self.leader.sample(plan, torch.zeros(len(plan.work), VOCAB), scores or PromptScores())


def test_chunks_of_one_prompt_are_in_flight_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Prefill(monkeypatch)
    group.submit()
    steps = [group.launch(), group.launch()]
    assert [[work.span for work in step.plan.work] for step in steps] == [[Span(0, 4)], [Span(4, 8)]]
    assert group.leader.next_plan() is None, "two steps are in flight"
    group.leader.commit(steps[0])
    steps.append(group.launch())
    for step in steps[1:]:
        assert not [message for message in group.sent if isinstance(message, m.FirstTokens)]
        group.leader.commit(step)
    assert [type(message) for message in group.sent] == [m.Prefilled, m.FirstTokens]
    assert group.waits == 3
    group.leader.check()


def test_first_tokens_are_sent_before_the_cache_gets_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Prefill(monkeypatch)
    group.submit(prompt=PROMPT[:4])
    manager, sent = group.scheduler.kv_manager, []
    keep = manager.keep
    monkeypatch.setattr(manager, "keep", lambda *given: (sent.extend(group.sent), keep(*given)))
    group.leader.commit(group.launch())
    assert [type(message) for message in sent] == [m.Prefilled, m.FirstTokens]
    assert manager.cached_tokens(PrefixKey.of(PROMPT)) == 4


def test_pages_are_freed_after_the_last_step_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without first tokens ends on the device too: a freed page may be another request's at once."""
    group = Prefill(monkeypatch)
    group.submit()
    steps = [group.launch(), group.launch()]
    request = group.scheduler.requests[KEY]
    group.leader.handle("router", m.Release(KEY, "aborted"))
    group.leader.handle("prefill-0", m.RankClosed(KEY, 7, 0))
    for step, waits in zip(steps, (1, 2), strict=True):
        assert request.block_table is not None
        group.leader.commit(step)
        assert group.waits == waits
        group.leader.check()
    assert not group.scheduler.requests
    assert [type(message) for message in group.sent] == [m.Released]


def test_the_next_prompt_is_launched_while_the_last_chunk_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Prefill(monkeypatch)
    group.submit()
    group.submit(OTHER, pack_tokens(range(50, 60)))
    for span in (Span(0, 4), Span(4, 8)):
        step = group.launch()
        assert [work.span for work in step.plan.work] == [span]
        group.leader.commit(step)
    last, behind = group.launch(), group.launch()
    assert [(work.key, work.span) for work in last.plan.work] == [(KEY, Span(8, 10)), (OTHER, Span(0, 2))]
    assert [(work.key, work.span) for work in behind.plan.work] == [(OTHER, Span(2, 6))]
    group.leader.commit(last)
    assert [message.key for message in group.sent if isinstance(message, m.FirstTokens)] == [KEY]


def test_without_steps_ahead_one_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Prefill(monkeypatch, steps_ahead=0)
    group.submit()
    step = group.launch()
    assert group.leader.next_plan() is None
    group.leader.commit(step)
    assert [work.span for work in group.launch().plan.work] == [Span(4, 8)]


def test_an_early_prompt_waits_for_a_prefix_that_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the step had ended: the prefix cache gets the prompt at its last chunk's commit."""
    group = Prefill(monkeypatch)
    group.submit()
    for _ in range(2):
        group.leader.commit(group.launch())
    last = group.launch()
    group.submit(OTHER, pack_tokens([*range(8), 20, 21]), early=True)
    assert group.leader.next_plan() is None
    group.leader.commit(last)
    assert [(work.key, work.span) for work in group.launch().plan.work] == [(OTHER, Span(8, 10))]
    group.leader.check()


def test_an_early_prompt_without_that_prefix_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Prefill(monkeypatch)
    group.submit(KEY, pack_tokens(range(4)))
    group.launch()
    group.submit(OTHER, pack_tokens(range(30, 34)), early=True)
    assert [work.key for work in group.launch().plan.work] == [OTHER]


def test_a_request_with_a_ticket_gets_the_memory_of_an_early_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The early prompt in flight is not computed further: its memory could never be taken back."""
    group = Prefill(monkeypatch)
    group.submit(KEY, pack_tokens(range(6)))
    steps = [group.launch()]
    group.submit(OTHER, pack_tokens(range(20, 24)), early=True)
    steps.append(group.launch())
    assert [(work.key, work.span) for work in steps[1].plan.work] == [(KEY, Span(4, 6)), (OTHER, Span(0, 2))]
    waiting = RequestKey("waiting")
    group.submit(waiting, pack_tokens(range(30, 34)))
    assert group.scheduler.requests[waiting].block_table is None, "there are two rows"
    group.leader.commit(steps[0])
    assert group.leader.next_plan() is None
    group.leader.commit(steps[1])
    assert group.scheduler.requests[OTHER].block_table is None, "taken back"
    assert [work.key for work in group.launch().plan.work] == [waiting]
    group.leader.check()


def test_wrong_prompt_logprobs_keep_a_prompt_out_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Prefill(monkeypatch)
    group.submit(sampling=SamplingParams(prompt_logprobs=0))
    scores = PromptScores()
    first = group.launch(scores)
    (work,) = first.plan.work
    values = [[[token, 1.0], [token, math.nan]] for token in work.targets]
    scores.copies.append(([(work.row, 0)] * len(values), HostCopy(torch.tensor(values, dtype=torch.float64))))
    second = group.launch()
    group.leader.commit(first)
    assert [message.code for message in group.sent if isinstance(message, m.Failed)] == ["request"]
    group.leader.commit(second)
    group.leader.handle("prefill-0", m.RankClosed(KEY, 7, 0))
    assert not group.scheduler.requests
    assert group.scheduler.kv_manager.cached_tokens(PrefixKey.of([*PROMPT, 1])) == 0


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_step_of_several_model_calls_waits_for_all_loads(
    order: Ordered, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call computes all layers before the hook's first call."""
    rank, waits = order.ranks[P], []
    monkeypatch.setattr(loaded_layers, "let_stream_wait", lambda _, event: waits.append(event))
    loaded = LoadedLayers(torch.device("cpu"), "states", (0, 1), iter(("first", "last")).__next__)
    monkeypatch.setattr(rank, "order_copies", lambda _: loaded)
    monkeypatch.setattr(rank, "_send_cached", lambda *_: None)
    monkeypatch.setattr(rank.runner, "computes_by_layer", lambda _: by_layer)
    forward = rank.runner.forward

    def launched(*arguments: Any, **named: Any) -> torch.Tensor:
        waits.append("forward")
        found: torch.Tensor = forward(*arguments, **named)
        return found

    monkeypatch.setattr(rank.runner, "forward", launched)
    order.router.submit(TOKENS, SamplingParams(max_tokens=1))
    order.deliver(ROUTER, P)
    order.step()
    assert waits == (["states", "forward", "first", "last"] if by_layer else ["last", "forward"])

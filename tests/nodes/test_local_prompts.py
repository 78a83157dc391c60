"""Chunks of the prompts that a decode group computes itself: their sizes and order, ahead of the step in flight."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from fake_model import fake_spec

from decode_node.costs import CostEstimates
from decode_node.leader import DecodeLeader
from decode_node.request import DecodeRequest, NewRequest
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.config.read import Config, DecodeConfig, ModelConfig, PrefillConfig
from disagg.core.errors import ConfigError
from disagg.core.local_prefill import MIN_PREFILL_TOKENS, prefill_room
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.model.chunks import PromptChunks
from disagg.model.sampled_tokens import token_of
from disagg.node.kv_manager import KVManager
from disagg.node.local_prefill import local_prefill_tokens, tail_tokens
from disagg.node.plan import StepPlan
from transport.control import messages as m

STEP_TOKENS = 116
"""100 tokens of prompts beside up to 16 answers, whose number a recorded step pads."""
ANSWER = SamplingParams(max_tokens=100)


def scheduler_of(
    *, steps_ahead: int = 1, step_tokens: int = STEP_TOKENS, ranks: int = 1, max_batch: int = 64
) -> DecodeScheduler:
    kv_manager = KVManager(pool_tokens=4096, page_size=16, rows=64, eviction="lru")
    options = SchedulerOptions(
        group="decode",
        ranks=ranks,
        max_batch=max_batch,
        max_context_tokens=4096,
        first_ticket=0,
        chunks=PromptChunks(500),
        rates=CostEstimates(1e3, 1e3),
        steps_ahead=steps_ahead,
        local_prefill_tokens=step_tokens,
        tail_tokens=step_tokens,
    )
    return DecodeScheduler(kv_manager, options)


def begin(
    scheduler: DecodeScheduler, name: str, tokens: int, priority: int = 0, prefix: PrefixKey | None = None
) -> DecodeRequest:
    prompt = pack_tokens(range(tokens))
    request = scheduler.reserve(
        NewRequest(
            RequestKey(name),
            prompt,
            ANSWER,
            router="r",
            prefill_group="decode",
            deadline_s=1.0,
            prefix=prefix,
        )
    )
    request.priority = priority
    scheduler.prefill_here(request)
    return request


def step(scheduler: DecodeScheduler) -> dict[str, tuple[int, int]]:
    """Plans, computes and commits a step; returns its spans."""
    plan = planned(scheduler)
    for one in scheduler.stepped(plan):
        if one.samples:
            one.sequence.add(7)
            one.request.first_sent = True
    scheduler.commit(plan)
    return spans(plan)


def planned(scheduler: DecodeScheduler) -> StepPlan:
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.check()
    return plan


def spans(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {work.key.request_id: (work.start, work.start + len(work.tokens)) for work in plan.work}


def test_chunks_and_the_first_token_are_planned_ahead() -> None:
    scheduler = scheduler_of()
    begin(scheduler, "a", 230)
    first, second = planned(scheduler), planned(scheduler)
    assert (spans(first), spans(second)) == ({"a": (0, 100)}, {"a": (100, 200)})
    assert scheduler.next_step() is None, "two steps are in flight"
    scheduler.commit(first)
    last = planned(scheduler)
    assert spans(last) == {"a": (200, 229)}
    scheduler.commit(second)
    samples = planned(scheduler)
    assert (samples.work[0].start, samples.work[0].tokens) == (229, [229])
    assert [one.samples for one in scheduler.stepped(samples)] == [True]
    scheduler.commit(last)
    after = planned(scheduler)
    assert after.work[0].tokens == [token_of(0)], "the token that the step before samples"
    scheduler.commit(samples)
    scheduler.commit(after)


def test_answers_leave_the_rest_of_a_step() -> None:
    scheduler = scheduler_of(steps_ahead=0)
    for number in range(20):
        begin(scheduler, f"running-{number}", 1)
    begin(scheduler, "new", 1000)
    found = step(scheduler)
    assert found["new"] == (0, STEP_TOKENS - 32), "20 answers count as 32"
    assert list(found)[-1] == "new", "answers come first"
    assert step(scheduler)["new"] == (84, 168)
    for number in range(13):
        begin(scheduler, f"more-{number}", 1)
    assert "new" not in step(scheduler), "33 answers are delayed by every other step only"
    assert step(scheduler)["new"] == (168, 168 + STEP_TOKENS - 48)
    for number in range(4):
        begin(scheduler, f"prompt-{number}", 40)
    for _ in range(2):
        assert "new" in step(scheduler), "five prompts wait"


def test_answers_that_do_not_fit_a_step_take_no_room() -> None:
    """The recorded steps are those of up to `max_batch` answers."""
    scheduler = scheduler_of(steps_ahead=0, step_tokens=64, max_batch=16)
    for number in range(40):
        begin(scheduler, f"running-{number}", 1)
    begin(scheduler, "new", 500)
    chunks = [stop - start for _ in range(6) for start, stop in [step(scheduler).get("new", (0, 0))] if stop]
    assert set(chunks) == {prefill_room(64, 16)} == {48}
    assert prefill_room(64, 40) == 80


def test_more_answers_leave_the_rest_of_whole_tiles() -> None:
    assert [prefill_room(128, answers) for answers in (0, 16, 64, 65, 80, 81, 96, 97, 128, 129)] == [
        *(112, 112, 64, 48, 48),
        *(192 - 96, 192 - 96, 192 - 128, 192 - 128, 256 - 192),
    ]
    assert prefill_room(20, 0) == MIN_PREFILL_TOKENS


def test_the_oldest_prompt_is_first_unless_a_lower_number_comes() -> None:
    scheduler = scheduler_of(steps_ahead=0)
    begin(scheduler, "a", 151)
    begin(scheduler, "b", 151)
    assert step(scheduler) == {"a": (0, 100)}
    begin(scheduler, "urgent", 61, priority=-1)
    assert step(scheduler) == {"urgent": (0, 60), "a": (100, 140)}
    # The first token of the urgent request is sampled.
    assert step(scheduler) == {"urgent": (60, 61), "a": (140, 150), "b": (0, 90)}


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_closed_request_frees_its_pages_after_its_steps(steps_ahead: int) -> None:
    scheduler = scheduler_of(steps_ahead=steps_ahead, ranks=2)
    request = begin(scheduler, "a", 400)
    plans = [planned(scheduler) for _ in range(1 + steps_ahead)]
    assert not scheduler.close(request), "no rank has a transfer to close"
    assert RequestKey("a") in scheduler.requests
    for plan in plans:
        scheduler.commit(plan)
    assert not scheduler.requests
    scheduler.check()
    assert scheduler.kv_manager.free_pages == scheduler.kv_manager.pages


@pytest.mark.parametrize("more_steps", [0, 1])
def test_a_prompt_without_a_first_token_is_not_cached(more_steps: int) -> None:
    """Its logits, which would show that its KV is valid, were never seen."""
    scheduler = scheduler_of(steps_ahead=0)
    request = begin(scheduler, "a", 65, prefix=PrefixKey.of(pack_tokens(range(65)), "", 0))
    for _ in range(1 + more_steps):
        step(scheduler)
    scheduler.close(request)
    assert not scheduler.requests
    cache = scheduler.kv_manager.statistics().cache
    assert cache is not None
    assert cache.cached_pages == 4 * more_steps


def test_prompts_leave_seats_to_answers() -> None:
    """A steady load of new prompts, each computed in one step, with more sequences than seats."""
    scheduler = scheduler_of(steps_ahead=0, max_batch=2)
    for name in ("one", "two"):
        begin(scheduler, name, 1)
    found = []
    for number in range(8):
        begin(scheduler, f"new-{number}", 20)
        found.append(set(step(scheduler)))
    answers = [len(names & {"one", "two"}) for names in found]
    assert all(answers[i] + answers[i + 1] >= 1 for i in range(7)), found


@pytest.mark.parametrize(
    ("fields", "spec", "deterministic", "expected"),
    [
        ({}, {}, False, 0),  # automatic, on a CPU
        ({"local_prefill_tokens": 100}, {}, False, 100),
        ({"local_prefill_tokens": 257}, {}, False, "more than the largest step, decode.chunk_tokens = 256"),
        ({"local_prefill_tokens": 100, "kv_dtype": "int8"}, {}, False, "decode.kv_dtype = int8 differs"),
        ({"local_prefill_tokens": 100}, {"has_state": True}, False, "the model has recurrent layers"),
        ({"local_prefill_tokens": 100, "tp": 2}, {}, True, "decode.tp (2) differs from prefill.tp (1)"),
        ({"local_prefill_tokens": 100, "tp": 2}, {}, False, 100),
        ({"kv_dtype": "int8"}, {}, False, 0),
    ],
)
def test_where_decode_groups_compute_prompts(
    fields: dict[str, Any], spec: dict[str, Any], deterministic: bool, expected: int | str
) -> None:
    decode = DecodeConfig(**{"tp": 1, **fields}).sized("cpu")
    model = ModelConfig(deterministic=deterministic)
    config = Config(prefill=PrefillConfig(tp=1), decode=decode, model=model)
    form = SimpleNamespace(**{"has_state": False, "whole_prompts": False, **spec})
    runner: Any = SimpleNamespace(spec=form, device=SimpleNamespace(type="cpu"))
    if isinstance(expected, int):
        assert local_prefill_tokens(config, decode, runner) == expected
        return
    with pytest.raises(ConfigError, match=re.escape(expected)):
        local_prefill_tokens(config, decode, runner)


@pytest.mark.parametrize(
    ("step_tokens", "spec", "expected"),
    [
        (64, {}, 256),
        (0, {}, 0),
        (64, {"rope_switch_tokens": 100}, 0),
        (64, {"cache_refused": "its sparse layers choose by the prompt's length"}, 0),
        (64, {"classes": 2}, 0),
    ],
)
def test_which_groups_compute_tails(step_tokens: int, spec: dict[str, Any], expected: int) -> None:
    decode = DecodeConfig(tp=1, local_prefill_tokens=step_tokens).sized("cpu")
    config = Config(prefill=PrefillConfig(tp=1), decode=decode)
    layout = SimpleNamespace(classes=(None,) * spec.pop("classes", 1))
    facts = {"has_state": False, "whole_prompts": False, "rope_switch_tokens": 0, "cache_refused": ""} | spec
    runner: Any = SimpleNamespace(
        spec=SimpleNamespace(layout=layout, **facts), device=SimpleNamespace(type="cpu")
    )
    assert tail_tokens(config, decode, runner) == expected


class Refusals:
    """A decode leader, and the errors that it sent."""

    def __init__(self, step_tokens: int) -> None:
        self.sent: list[Any] = []
        spec, send = fake_spec(layers=1, kv_heads=1), lambda peer, message: self.sent.append(message)
        scheduler = scheduler_of(step_tokens=step_tokens)
        self.leader = DecodeLeader(scheduler, (), spec, send, lambda message: None, lambda: 0.0, 4)
        rank: Any = SimpleNamespace(control_address="rank-0", swap_blocks=0)
        group: Any = SimpleNamespace(ranks=(rank,), role="decode", name="decode", leader=rank)
        self.leader.join(group)

    def reserve(self, sampling: SamplingParams, group: str = "decode", **more: Any) -> Any:
        message = m.Reserve(
            RequestKey("a"), pack_tokens([1, 2, 3]), sampling, 60.0, group, wait_s=60.0, **more
        )
        self.leader.handle("r", message)
        self.leader.check()
        return self.sent[-1]


def test_a_request_for_one_group_gets_its_ticket_at_once() -> None:
    assert isinstance(Refusals(STEP_TOKENS).reserve(ANSWER), m.Reserved)


@pytest.mark.parametrize(
    ("step_tokens", "sampling", "text"),
    [
        (0, ANSWER, "computes no prompts (decode.local_prefill_tokens)"),
        (STEP_TOKENS, SamplingParams(max_tokens=4, n=2, temperature=1.0), "need a prefill group"),
        (STEP_TOKENS, SamplingParams(max_tokens=4, prompt_logprobs=1), "need a prefill group"),
    ],
)
def test_other_requests_are_refused(step_tokens: int, sampling: SamplingParams, text: str) -> None:
    refused = Refusals(step_tokens).reserve(sampling)
    assert isinstance(refused, m.Failed)
    assert (refused.code, text in refused.message) == ("invalid_request", True), refused


@pytest.mark.parametrize(
    ("step_tokens", "sampling", "more", "text"),
    [
        (0, ANSWER, {}, "computes no prompts (decode.local_prefill_tokens)"),
        (STEP_TOKENS, SamplingParams(max_tokens=4, n=2, temperature=1.0), {}, "need a prefill group"),
        (STEP_TOKENS, ANSWER, {"answered": [4]}, "only a new request is divided"),
        (STEP_TOKENS, ANSWER, {"after": RequestKey("b")}, "only a new request is divided"),
        (STEP_TOKENS, ANSWER, {"tail_tokens": 3}, "has at most 2 tokens in this decode group"),
    ],
)
def test_other_prompts_are_not_divided(
    step_tokens: int, sampling: SamplingParams, more: dict[str, Any], text: str
) -> None:
    group = Refusals(step_tokens)
    group.leader.link(SimpleNamespace(name="prefill", leader=SimpleNamespace(control_address="p")))  # type: ignore[arg-type]
    refused = group.reserve(sampling, "prefill", **{"tail_tokens": 1} | more)
    assert isinstance(refused, m.Failed)
    assert (refused.code, text in refused.message) == ("invalid_request", True), refused

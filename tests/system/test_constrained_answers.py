"""A tiny random model gives answers that are valid for their grammars: split, colocated, preempted, recovered."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import jsonschema
import msgspec
import pytest
from local_groups import (
    Answered,
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)

from disagg.core.config.read import Config
from disagg.core.errors import RequestError
from disagg.core.grammars import choice_grammar, grammar_tokenizer, regex_grammar, schema_grammar
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer
from disagg.model.sampling.constraints import Constraints
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "maximum": 999},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
            "at": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["tags", "at"],
        "additionalProperties": False,
    },
    "choices": {"anyOf": [{"enum": ["red", "green", None]}, {"const": {"a": [1, 2]}}]},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{2,4}$"},
    "referred": {
        "$defs": {"one": {"type": "boolean"}},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}],
        "items": False,
        "minItems": 2,
    },
}
PROMPTS = random_prompts(9, 21, 14, 30, 5, seed=6)
TOKENS = 160
WARM = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5)


def constrained(schema: str, **fields: Any) -> SamplingParams:
    return msgspec.structs.replace(WARM, grammar=schema_grammar(SCHEMAS[schema]), **fields)


def check_valid(answer: Answered, schema: str) -> None:
    """The answer ends with its grammar, and its text is valid."""
    assert answer.finish == "stop"
    assert answer.tokens[-1] == EOS_ID
    jsonschema.validate(json.loads(bytes(answer.tokens[:-1])), SCHEMAS[schema])


def served(groups: LocalGroups, samplings: list[SamplingParams]) -> list[Answered]:
    """All at once, each with its own prompt."""

    async def work(router: Router) -> list[Answered]:
        asked = zip(PROMPTS, samplings, strict=False)
        return await asyncio.gather(*(ask(router, f"r{i}", p, s) for i, (p, s) in enumerate(asked)))

    answers: list[Answered] = groups.serve(work)
    return answers


@pytest.mark.parametrize(
    "config",
    [
        small_config(2, 2),
        small_config(1, 2, async_steps=False),
        colocated_config(2),
        colocated_config(1, async_steps=False),
    ],
    ids=["steps ahead", "steps in turn", "colocated", "colocated, steps in turn"],
)
def test_answers_are_valid_in_every_kind_of_group(checkpoints: Checkpoints, config: Config) -> None:
    """And the same in all of them: a mask depends on grammar and answer only."""
    samplings = [constrained(name) for name in SCHEMAS]
    with local_groups(config, checkpoints.source()) as groups:
        answers = served(groups, samplings)
        alone = groups.answers(PROMPTS[:1], samplings[0])[0]
    for name, answer in zip(SCHEMAS, answers, strict=True):
        check_valid(answer, name)
    assert alone.tokens == answers[0].tokens, "other requests change nothing"


def test_greedy_answers_and_unconstrained_neighbours(checkpoints: Checkpoints) -> None:
    """Neighbours have the tokens of `generate()`, and constrained ones the best allowed tokens."""
    source = checkpoints.source()
    plain, choice = SamplingParams(max_tokens=20), ["first", "second", "third one"]
    with local_groups(small_config(), source) as groups:
        samplings = [
            plain,
            SamplingParams(max_tokens=20, grammar=choice_grammar(choice)),
            plain,
            SamplingParams(max_tokens=7, grammar=regex_grammar("[a-z]+"), logprobs=1),
        ]
        first, chosen, third, cut = served(groups, samplings)
    for prompt, answer in ((PROMPTS[0], first), (PROMPTS[2], third)):
        assert answer.tokens == checkpoints.greedy(source, prompt, 20)
    assert bytes(chosen.tokens[:-1]).decode() in choice
    assert (cut.finish, len(cut.tokens)) == ("length", 7)
    assert re.fullmatch("[a-z]+", bytes(cut.tokens).decode())
    assert [one.token for one in cut.logprobs] == cut.tokens


def test_each_of_several_answers_has_its_own_state(checkpoints: Checkpoints) -> None:
    async def work(router: Router) -> list[list[int]]:
        tokens: list[list[int]] = [[], [], []]
        outputs = router.generate("r", PROMPTS[0], constrained("flat", n=3), timeout_s=30.0)
        async for output in outputs:
            tokens[output.answer] += output.tokens
        return tokens

    with local_groups(small_config(), checkpoints.source()) as groups:
        first = groups.serve(work)
        assert groups.serve(work) == first, "seeds repeat"
    assert len(set(map(tuple, first))) == 3
    for tokens in first:
        check_valid(Answered(tokens, "stop"), "flat")


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_preempted_answers_are_valid(checkpoints: Checkpoints, way: str) -> None:
    """Pages for two answers only, and texts that fill them."""
    config = small_config(decode_page=4, pool_tokens=128)
    decode = msgspec.structs.replace(config.decode, preemption=way, swap_bytes=4 << 20, watermark=0.0)
    prefill = msgspec.structs.replace(config.prefill, pool_tokens=1024)
    config = msgspec.structs.replace(config, prefill=prefill, decode=decode)
    sampling = msgspec.structs.replace(WARM, max_tokens=70, grammar=regex_grammar("([a-z]{9} ){5}"))
    with local_groups(config, checkpoints.source()) as groups:
        answers = served(groups, [sampling] * 5)
        counts = groups.decode[0].statistics()["leader"]
    assert (counts.swapped_total if way == "swap" else counts.recomputed_total) > 0
    with local_groups(small_config(), checkpoints.source()) as groups:
        assert [one.tokens for one in served(groups, [sampling] * 5)] == [one.tokens for one in answers]
    for answer in answers:
        assert re.fullmatch("([a-z]{9} ){5}", bytes(answer.tokens[:-1]).decode())
        assert answer.finish == "stop"


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_recovered_answers_are_valid(checkpoints: Checkpoints, role: str) -> None:
    """A group dies in the middle of an answer; another one continues it with the mask of the tokens so far."""
    options = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)
    config = small_config(groups=(2, 2))
    groups = LocalGroups(config, checkpoints.source(), options=options)
    killed: list[str] = []

    def strike(source: str, destination: str, message: m.Message) -> None:
        middle = isinstance(message, m.Tokens) and message.key.request_id == "r" and message.index == 6
        first = isinstance(message, m.Prefill) and message.key.request_id == "r"
        if not killed and (middle if role == "decode" else first):
            killed.append(source if middle else destination)
            groups.kill(killed[0])

    async def one(router: Router, name: str) -> Answered:
        return await ask(router, name, PROMPTS[0], constrained("nested"))

    try:
        quiet = groups.serve(lambda router: one(router, "quiet"))
        groups.observe(strike)
        answer = groups.serve(lambda router: one(router, "r"))
        groups.settle(dead=killed)
    finally:
        groups.stop()
    assert killed[0].startswith(role)
    assert answer.tokens == quiet.tokens
    check_valid(answer, "nested")
    assert answer.report.recoveries


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_no_step_waits_for_the_compilation_of_a_grammar(checkpoints: Checkpoints, role: str) -> None:
    """Other requests are answered while a group compiles; the constrained one goes on afterwards, or is aborted."""
    config = colocated_config() if role == "colocated" else small_config()
    compiled = threading.Event()
    with local_groups(config, checkpoints.source()) as groups:
        leader = groups.groups[role][0].leader
        leader.constraints.close()
        leader.constraints = Constraints(lambda: compiled.wait(30) and vocabulary())

        async def work(router: Router) -> list[Answered]:
            waiting = asyncio.create_task(ask(router, "constrained", PROMPTS[0], constrained("flat")))
            gone = asyncio.create_task(ask(router, "gone", PROMPTS[3], constrained("choices")))
            others = [
                await ask(router, f"r{i}", p, SamplingParams(max_tokens=5))
                for i, p in enumerate(PROMPTS[1:3])
            ]
            assert not waiting.done()
            gone.cancel()
            await asyncio.wait([gone])
            compiled.set()
            return [await waiting, *others]

        try:
            answer, *others = groups.serve(work)
        finally:
            compiled.set()
    check_valid(answer, "flat")
    for prompt, other in zip(PROMPTS[1:3], others, strict=True):
        assert other.tokens == checkpoints.greedy(checkpoints.source(), prompt, 5)


def vocabulary() -> Any:
    return grammar_tokenizer(byte_tokenizer(), VOCAB_SIZE, (EOS_ID,))


@pytest.mark.parametrize("config", [small_config(), colocated_config()], ids=["split", "colocated"])
def test_a_wrong_grammar_fails_its_request_alone(checkpoints: Checkpoints, config: Config) -> None:
    """The API refuses such grammars; a leader must survive them too."""

    async def work(router: Router) -> list[Any]:
        wrong = msgspec.structs.replace(WARM, grammar=regex_grammar("a"), max_tokens=9)
        wrong = msgspec.structs.replace(wrong, grammar='{"grammars": []}')
        asked = (ask(router, f"r{i}", PROMPTS[i], s) for i, s in enumerate((wrong, constrained("flat"))))
        return await asyncio.gather(*asked, return_exceptions=True)

    with local_groups(config, checkpoints.source()) as groups:
        error, good = groups.serve(work)
    assert isinstance(error, RequestError)
    assert "grammar" in str(error)
    check_valid(good, "flat")

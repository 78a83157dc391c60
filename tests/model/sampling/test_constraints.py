"""Masks of constrained answers: what they allow, where answers end, and that an answer's tokens rebuild them."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from disagg.core.errors import InvalidRequestError, RequestError, UnsupportedModelError
from disagg.core.grammars import (
    any_grammar,
    choice_grammar,
    compile_grammar,
    followed_by,
    grammar_tokenizer,
    lark_grammar,
    regex_grammar,
    schema_grammar,
)
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.constraints import AnswerConstraint, Constraints, masks_after, no_tokenizer
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.sampling.sampled import Chosen

SCHEMA = schema_grammar({"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]})


def vocabulary(vocab: int = VOCAB_SIZE) -> Any:
    return grammar_tokenizer(byte_tokenizer(), vocab, (EOS_ID,))


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    made = Constraints(vocabulary)
    yield made
    made.close()


def allowed(constraint: AnswerConstraint, answer: list[int]) -> set[int]:
    mask = constraint.mask(answer)
    assert not isinstance(mask, RequestError), mask
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def made(constraints: Constraints, grammar: str, answered: bytes = b"") -> AnswerConstraint:
    constraint = constraints.answer(grammar, list(answered))
    assert constraint is not None
    return constraint


@pytest.mark.parametrize(
    ("grammar", "answer", "follows"),
    [
        (choice_grammar(["yes", "no"]), b"", b"yn"),
        (choice_grammar(["yes", "no"]), b"ye", b"s"),
        (regex_grammar("[0-9]{2}(-x)?"), b"1", b"0123456789"),
        (regex_grammar("a/b"), b"a", b"/"),
        (regex_grammar("\u00e9"), b"", b"\xc3"),
        (SCHEMA, b'{"a":1', b"},\t\n\r "),
        (lark_grammar('start: "a" "b"'), b"a", b"b"),
        (any_grammar('root ::= "x" [0-9]'), b"x", b"0123456789"),
    ],
)
def test_the_allowed_tokens(constraints: Constraints, grammar: str, answer: bytes, follows: bytes) -> None:
    assert allowed(made(constraints, grammar), list(answer)) == set(follows)


def test_an_answer_ends_where_its_grammar_may_end(constraints: Constraints) -> None:
    assert allowed(made(constraints, regex_grammar("ab?")), list(b"a")) == {ord("b"), EOS_ID}
    constraint = made(constraints, regex_grammar("ab"))
    assert allowed(constraint, list(b"a")) == {ord("b")}
    assert allowed(constraint, list(b"ab")) == {EOS_ID}
    for grammar, answer in (("ab", b"ab"), ("ab?", b"a")):
        for answered in (b"", answer):
            ended = made(constraints, regex_grammar(grammar), answered)
            assert allowed(ended, [*answer, EOS_ID]) == {EOS_ID}, "a step computes one token too many"


def test_tokens_of_an_answer_rebuild_its_mask(constraints: Constraints) -> None:
    """After recovery the first mask follows a whole answer; steps in between may have been skipped."""
    text, stepwise = b'{"a": 22 }', made(constraints, SCHEMA)
    for length in range(len(text) + 1):
        wanted = allowed(stepwise, list(text[:length]))
        assert allowed(made(constraints, SCHEMA, text[:length]), list(text[:length])) == wanted
        assert allowed(made(constraints, SCHEMA), list(text[:length])) == wanted
    assert allowed(stepwise, list(b"{")) == allowed(made(constraints, SCHEMA), list(b"{")), "another answer"


def test_the_masks_of_several_answers_at_once(constraints: Constraints) -> None:
    """Each is the mask that the answer has alone; answers begin, end and fail beside others."""
    grammars = [SCHEMA, choice_grammar(["yes", "no"]), regex_grammar("[ab]{3}"), SCHEMA, regex_grammar("x*")]
    draw, answers = random.Random(0), [list[int]() for _ in grammars]
    each = [made(constraints, grammar) for grammar in grammars]
    for step in range(24):
        going = [i for i in range(len(each)) if step % 4 or i % 2]  # now all, now some
        tokens = [draw.choice(sorted(allowed(each[i], answers[i]))) for i in going]
        constraints.advance([(each[i], token) for i, token in zip(going, tokens, strict=True)] + [(None, 7)])
        for i, token in zip(going, tokens, strict=True):
            answers[i].append(token)
        for grammar, constraint, answer in zip(grammars, each, answers, strict=True):
            assert allowed(constraint, answer) == allowed(made(constraints, grammar, b""), answer)
    assert [answer[-1] for answer in answers[:3]] == [EOS_ID] * 3


def test_masks_of_answers_that_all_have_ended(constraints: Constraints) -> None:
    ended, failed = made(constraints, regex_grammar("ab?")), made(constraints, choice_grammar(["yes"]))
    assert EOS_ID in allowed(ended, [ord("a")])
    constraints.advance([(ended, EOS_ID)])
    assert allowed(ended, [ord("a"), EOS_ID]) == {EOS_ID}
    failed.mask([])
    constraints.advance([(failed, ord("n"))])
    first = failed.mask([ord("n")])
    constraints.advance([(failed, ord("o"))])
    assert isinstance(first, RequestError)
    assert failed.mask(list(b"no")) is first, "the reason stays"


def test_another_answer_waits_for_the_masks_of_a_batch(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads must not use a matcher at once."""
    one, go = made(constraints, choice_grammar(["yes"])), threading.Event()
    one.mask([])

    def slow(*arguments: Any) -> Any:
        assert go.wait(30)
        return masks_after(*arguments)

    monkeypatch.setattr("disagg.model.sampling.constraints.masks_after", slow)
    constraints.advance([(one, ord("y"))])
    one.prepare([])
    assert not one.ready
    go.set()
    assert allowed(one, []) == {ord("y")}


def test_no_mask_waits_for_other_grammars(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    running, go = made(constraints, regex_grammar("a+")), threading.Event()
    running.mask([])

    def slow(*arguments: Any) -> Any:
        assert go.wait(30)
        return compile_grammar(*arguments)

    monkeypatch.setattr("disagg.model.sampling.constraints.compile_grammar", slow)
    waiting = [made(constraints, regex_grammar(f"b{{{n}}}")) for n in range(1, 9)]
    try:
        constraints.advance([(running, ord("a"))])
        assert allowed(running, [ord("a")]) == {ord("a"), EOS_ID}
        assert allowed(made(constraints, regex_grammar("a+")), []) == {ord("a")}, (
            "an answer of a known grammar"
        )
        assert not any(one.ready for one in waiting)
    finally:
        go.set()
    assert all(allowed(one, []) == {ord("b")} for one in waiting)


def test_a_failure_beside_other_answers(constraints: Constraints) -> None:
    good, bad = (made(constraints, choice_grammar(["yes"])) for _ in range(2))
    for constraint in (good, bad):
        constraint.mask([])
    constraints.advance([(bad, ord("n")), (good, ord("y"))])
    assert isinstance(bad.mask([ord("n")]), RequestError)
    assert allowed(good, [ord("y")]) == {ord("e")}
    constraints.advance([(good, ord("e")), (bad, ord("o"))])
    assert isinstance(bad.mask(list(b"no")), RequestError), "a failure lasts"
    assert allowed(good, list(b"ye")) == {ord("s")}
    assert allowed(good, list(b"y")) == {ord("e")}, "another answer"
    assert allowed(bad, []) == {ord("y")}, "another answer"


def test_a_body_after_free_text(constraints: Constraints) -> None:
    rules = 'start: think @body\nthink[suffix="</think>"]: /(?s:.*)/'
    constraint = made(constraints, followed_by(rules, choice_grammar(["yes"])))
    assert len(allowed(constraint, list(b"hm"))) > 150
    assert allowed(constraint, list(b"hm</think>")) == {ord("y")}


@pytest.mark.parametrize("size", [VOCAB_SIZE, 2000])
def test_a_random_walk_gives_valid_json(size: int) -> None:
    """Also where the model's vocabulary is larger than the tokenizer's."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "maximum": 99}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    constraints = Constraints(lambda: vocabulary(size))
    try:
        for seed in range(20):
            draw, answer = random.Random(seed), list[int]()
            constraint = made(constraints, schema_grammar(schema))
            while answer[-1:] != [EOS_ID]:
                answer.append(draw.choice(sorted(allowed(constraint, answer))))
            value = json.loads(byte_tokenizer().decode(answer[:-1]))
            assert value.keys() == {"name", "n"}
            assert len(value["name"]) <= 5
            assert value["n"] <= 99
    finally:
        constraints.close()


@pytest.mark.parametrize(
    "grammar",
    [
        regex_grammar("(a"),
        schema_grammar({"type": "objec"}),
        schema_grammar({"$ref": "https://example.com/x"}),
        schema_grammar({"$ref": "#"}),
        schema_grammar({"type": "integer", "minimum": 3, "maximum": 2}),
        lark_grammar("start: other"),
        "{",
    ],
)
def test_a_wrong_grammar_is_one_line(constraints: Constraints, grammar: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        compile_grammar(grammar, vocabulary())
    assert str(raised.value).isprintable()
    error = made(constraints, grammar).mask([])
    assert isinstance(error, RequestError)


def test_an_answer_that_violates_its_grammar(constraints: Constraints) -> None:
    error = made(constraints, choice_grammar(["yes"]), b"no").mask(list(b"no"))
    assert isinstance(error, RequestError)


def test_models_that_cannot_be_constrained() -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        grammar_tokenizer(None, VOCAB_SIZE, (EOS_ID,))
    with pytest.raises(UnsupportedModelError, match="eos_token_id"):
        grammar_tokenizer(byte_tokenizer(), VOCAB_SIZE, ())
    constraints = Constraints(no_tokenizer)
    try:
        assert isinstance(made(constraints, SCHEMA).mask([]), RequestError)
    finally:
        constraints.close()
    assert constraints.answer("") is None
    assert constraints.answer(SCHEMA) is None, "closed"


def test_the_vocabulary_is_loaded_once_and_not_on_the_callers_thread() -> None:
    threads: list[str] = []

    def load() -> Any:
        threads.append(threading.current_thread().name)
        return vocabulary()

    constraints = Constraints(load)
    try:
        ready, each = threading.Event(), [made(constraints, g) for g in (SCHEMA, SCHEMA, regex_grammar("a"))]
        each[0].when_ready(ready.set)
        assert ready.wait(30)
        assert each[0].ready
        for one in each:
            one.mask([])
    finally:
        constraints.close()
    assert len(threads) == 1
    assert threads[0].startswith("grammar")


def test_constrained_rows_beside_others(constraints: Constraints) -> None:
    """Only constrained rows change; a failed constraint fails its row alone; log-probabilities are the model's."""
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    before, params = logits.clone(), SamplingParams(logprobs=0)
    rows = [
        SamplingRow(params, [], None, constraint=made(constraints, choice_grammar(["yes"]))),
        SamplingRow(params, [], None),
        SamplingRow(params, [], None, constraint=made(constraints, "{")),
        SamplingRow(
            SamplingParams(temperature=1.0, seed=3, logit_bias=((ord("x"), 100.0),)),
            list(b"n"),
            None,
            constraint=made(constraints, choice_grammar(["no"])),
        ),
    ]
    for found in (next_tokens(logits, rows, (EOS_ID,)), Sampler((EOS_ID,)).step(logits, rows).result()):
        first, second, third, fourth = found
        assert isinstance(first, Chosen)
        assert first.token == ord("y")
        assert first.logprobs is not None
        assert first.logprobs.logprob == pytest.approx(
            float(torch.log_softmax(before[0], -1)[ord("y")]), abs=1e-5
        )
        assert isinstance(second, Chosen)
        assert second.token == int(before[1].argmax())
        assert isinstance(third, RequestError)
        assert isinstance(fourth, Chosen)
        assert fourth.token == ord("o"), "bias does not lift a forbidden token"
    assert torch.equal(logits, before)


def test_the_masks_of_later_steps(constraints: Constraints) -> None:
    """The sampler keeps the batch's parameters, but no mask."""
    constraint, answer, sampler = made(constraints, choice_grammar(["yes"])), list[int](), Sampler((EOS_ID,))
    for _ in range(4):
        row = SamplingRow(PARAMS, answer, None, constraint=constraint)
        [chosen] = sampler.step(torch.zeros(1, VOCAB_SIZE), [row]).result()
        assert isinstance(chosen, Chosen)
        answer.append(chosen.token)
    assert answer == [*b"yes", EOS_ID]


PARAMS = SamplingParams(max_tokens=9)

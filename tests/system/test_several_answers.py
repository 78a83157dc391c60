"""Several answers to one prompt: forks of one sequence, each the same as if it had been asked for alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from architectures import MORE_HYBRIDS, save
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
from slow_parameters import sampled

from disagg.core.config.read import Config
from disagg.core.errors import InvalidRequestError, PromptTooLongError
from disagg.core.sampling import sampling_of
from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import EOS_ID
from disagg.router.answers import Output
from disagg.router.router import Router
from transport.control import messages as m

TOKENS = 20
DRAWN = SamplingParams(max_tokens=TOKENS, temperature=1.3, seed=5, min_tokens=TOKENS)


def all_at_once(
    groups: LocalGroups, asked: Sequence[tuple[list[int], SamplingParams]], **more: Any
) -> list[Answered]:
    async def work(router: Router) -> Any:
        return await asyncio.gather(*(ask(router, f"r{i}", *one, **more) for i, one in enumerate(asked)))

    answers: list[Answered] = groups.serve(work)
    return answers


def alone(sampling: SamplingParams) -> list[SamplingParams]:
    """Each answer as a request of its own."""
    return [msgspec.structs.replace(sampling_of(sampling, number), n=1) for number in range(sampling.n)]


SIZES = [((1, 1), (16, 16)), ((2, 1), (16, 4)), ((1, 2), (4, 16)), ((2, 3), (8, 1))]


@pytest.mark.parametrize(
    ("tp", "pages", "peer_memory"),
    sampled(
        ((*sizes, peer_memory) for sizes in SIZES for peer_memory in (False, True)),
        lambda tp, pages, peer_memory: peer_memory == SIZES.index((tp, pages)) % 2,
    ),
    ids=str,
)
def test_each_is_as_if_alone_and_the_prompt_is_sent_once(
    checkpoints: Checkpoints, tp: tuple[int, int], pages: tuple[int, int], peer_memory: bool
) -> None:
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], peer_memory=peer_memory)
    prompts = random_prompts(37, 16, 50, seed=3)
    several = [
        msgspec.structs.replace(DRAWN, n=4, logprobs=1),
        msgspec.structs.replace(DRAWN, n=2, repetition_penalty=1.2, presence_penalty=0.5, seed=9),
        SamplingParams(max_tokens=TOKENS, n=2),
    ]
    with local_groups(config, checkpoints.source()) as groups:
        source = groups.source
        together = all_at_once(groups, list(zip(prompts, several, strict=True)))
        used_tokens = groups.decode[0].statistics()["leader"].memory.pages.peak_used_pages * pages[1]
        own_tokens = sum(sampling.n for sampling in several) * (TOKENS + 2 * pages[1])
        assert used_tokens <= sum(map(len, prompts)) + own_tokens, "each prompt is there once"
    with local_groups(config, checkpoints.source()) as groups:
        singles = [
            all_at_once(groups, [(prompt, one) for one in alone(sampling)])
            for prompt, sampling in zip(prompts, several, strict=True)
        ]
    for answer, single in zip(together, singles, strict=True):
        assert answer.report.answers == [one.tokens for one in single]
        assert answer.report.nbytes == single[0].report.nbytes, "the prompt is sent once"
    assert len(set(map(tuple, together[0].report.answers))) == 4
    assert together[2].report.answers == [checkpoints.greedy(source, prompts[2], TOKENS)] * 2


def test_they_stop_each_at_its_own_end(checkpoints: Checkpoints) -> None:
    """At an end token, at a stop string (which the group hears of), at the first token; pages go with each."""
    (prompt,) = random_prompts(30, seed=8)
    free = msgspec.structs.replace(DRAWN, n=4, min_tokens=0, ignore_eos=True)
    with local_groups(small_config(), checkpoints.source()) as groups:
        (whole,) = all_at_once(groups, [(prompt, free)])
    answers = whole.report.answers
    first, fifth = answers[0][0], answers[1][4]
    stops = msgspec.structs.replace(free, stop_token_ids=(first, fifth))
    ends = [next((i + 1 for i, t in enumerate(a) if t in (first, fifth)), TOKENS) for a in answers]
    assert min(ends) == 1, "one ends with its first token"
    assert max(ends) == TOKENS or len(set(ends)) > 2, "and others go on"
    text = bytes(token % 256 for token in answers[2][6:8]).decode("latin-1")
    messages: list[m.Message] = []
    outputs: list[Output] = []
    with local_groups(small_config(), checkpoints.source()) as groups:
        (found,) = all_at_once(groups, [(prompt, stops)])
        assert found.report.answers == [a[:end] for a, end in zip(answers, ends, strict=True)]
        groups.observe(lambda source, destination, message: messages.append(message))
        by_text = msgspec.structs.replace(free, stop=(text,))
        spell = lambda tokens: bytes(token % 256 for token in tokens).decode("latin-1")  # noqa: E731
        (found,) = all_at_once(groups, [(prompt, by_text)], decode=spell, on_output=outputs.append)
    ended = {message.answer for message in messages if isinstance(message, m.EndAnswer)}
    stopped = {output.answer for output in outputs if output.finish == "stop"}
    assert 2 in ended
    assert ended == stopped
    for number, answer in enumerate(found.report.answers):
        assert answer == answers[number][: len(answer)]
        assert (len(answer) < TOKENS) == (number in stopped) or text in spell(answer)


def test_conversations_go_on_from_any_answer(checkpoints: Checkpoints) -> None:
    """What each answer computed is in the prefix cache: a prompt that goes on from it brings its end only."""
    (prompt,) = random_prompts(33, seed=4)
    config = small_config(2, 1, prefill_page=8, decode_page=4)
    several = msgspec.structs.replace(DRAWN, n=3)
    with local_groups(config, checkpoints.source()) as groups:
        source = groups.source
        (found,) = all_at_once(groups, [(prompt, several)])
        token_bytes = found.report.nbytes // len(prompt)
        turns = [prompt + answer + [70] for answer in found.report.answers]
        greedy = SamplingParams(max_tokens=4)
        answers = [all_at_once(groups, [(turn, greedy)])[0] for turn in turns]
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.tokens == checkpoints.greedy(source, turn, 4)
        kept = (len(prompt) + TOKENS - 1) // 4 * 4
        assert answer.report.nbytes == (len(turn) - kept) * token_bytes


@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"beams": 4, "n": 2, "temperature": 0.0, "seed": None}], ids=str
)
def test_a_group_says_what_it_cannot_do(checkpoints: Checkpoints, fields: dict[str, Any]) -> None:
    (prompt,) = random_prompts(30, seed=8)
    sampling = msgspec.structs.replace(DRAWN, **fields)
    narrow = msgspec.structs.replace(small_config().decode, max_batch=2)
    config = msgspec.structs.replace(small_config(), decode=narrow)
    with (
        local_groups(config, checkpoints.source()) as groups,
        pytest.raises(
            InvalidRequestError, match=f"{'beams = 4' if 'beams' in fields else 'n = 3'}.*up to 2 "
        ),
    ):
        all_at_once(groups, [(prompt, sampling)])
    with (
        local_groups(small_config(pool_tokens=128), checkpoints.source()) as groups,
        pytest.raises(PromptTooLongError, match=r"do not fit the decode group's 8 pages of 16"),
    ):
        all_at_once(groups, [(prompt, msgspec.structs.replace(sampling, max_tokens=60, min_tokens=0))])


def refuses(config: Config, source: ModelSource) -> None:
    (prompt,) = random_prompts(30, seed=8)
    with local_groups(config, source) as groups:
        router_says: list[int] = []

        async def work(router: Router) -> Any:
            router_says.append(router.max_sequences(len(prompt), TOKENS))
            return await ask(router, "r", prompt, msgspec.structs.replace(DRAWN, n=2))

        with pytest.raises(InvalidRequestError):
            groups.serve(work)
        assert router_says == [1]


def test_prompts_that_cannot_be_cut_anywhere_give_one_answer(tmp_path: Path) -> None:
    refuses(small_config(), ModelSource.from_directory(save(MORE_HYBRIDS["minimax"](), tmp_path)))


def test_colocated_groups_give_one_answer(checkpoints: Checkpoints) -> None:
    refuses(colocated_config(), checkpoints.source())


def test_an_end_token_ends_one_of_them(checkpoints: Checkpoints) -> None:
    """A bias makes the end token likely: answers end here and there, as they would alone."""
    (prompt,) = random_prompts(24, seed=12)
    ending = SamplingParams(
        max_tokens=30, n=6, temperature=1.0, seed=1, logit_bias=tuple((token, 3.0) for token in (EOS_ID,))
    )
    with local_groups(small_config(1, 2), checkpoints.source()) as groups:
        (found,) = all_at_once(groups, [(prompt, ending)])
        single = all_at_once(groups, [(prompt, one) for one in alone(ending)])
    assert found.report.answers == [one.tokens for one in single]
    assert len({len(answer) for answer in found.report.answers}) > 1

"""Answers of the split system beside those of the unsplit engine: equal, different by rounding, or no figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.bench.handoff_groups import Client, Groups
from disagg.bench.handoff_sizes import Sizes
from disagg.core.errors import MismatchError
from disagg.core.types import TokenLogprobs
from disagg.model.rounding import Judged, asked_of, judge_answer, words


class Comparison:
    """Compares answers and counts. While nothing else is asked of the groups."""

    def __init__(self, client: Client, groups: Groups, sizes: Sizes) -> None:
        self._client, self._groups, self._sizes = client, groups, sizes
        self.tokens = 0
        """Compared: of an answer that differs those up to the first difference, for others follow another prefix."""
        self.judged: list[Judged] = []
        """The first difference of each answer that has one; rounding explains each."""

    async def check(
        self, prompt: Sequence[int], tokens: Sequence[int], answer: Sequence[int], count: int
    ) -> None:
        """Raises `MismatchError` unless the first `count` tokens are those of the unsplit engine's `answer`.

        Where tokens need not be equal, both systems are asked again at the first difference, behind the same tokens;
        it raises unless rounding explains how their log-probabilities differ there.
        """
        pairs = zip(tokens[:count], answer[:count], strict=True)
        place = next((place for place, (token, right) in enumerate(pairs) if token != right), None)
        self.tokens += count if place is None else place + 1
        if place is None:
            return
        why = f"token {place + 1} of {count} is {tokens[place]}, not {answer[place]}"
        if not self._sizes.tokens_equal:
            judged = await self._judge(prompt, tokens[: place + 1])
            if judged.within:
                self.judged.append(judged)
                return
            why = f"of {count} tokens {words(judged)}"
        raise MismatchError(f"the split system's answer is not the unsplit engine's: {why}")

    async def _judge(self, prompt: Sequence[int], tokens: Sequence[int]) -> Judged:
        """The last one of `tokens`."""
        told = _of_token(tokens[-1], await self._client.told(prompt, tokens[:-1]))
        judge = self._groups.judge(prompt, tokens, asked_of(told))
        return judge_answer([told], judge)[0]._replace(position=len(tokens) - 1)


def _of_token(token: int, told: TokenLogprobs) -> TokenLogprobs:
    """As if `token` had been chosen; one that is not among the likeliest has no chance."""
    return TokenLogprobs(token, dict(told.top).get(token, -math.inf), told.top)

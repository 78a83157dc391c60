"""Compares the answers of the disaggregated system with those of an unsplit engine (one engine that prefills and
decodes). Answers are equal, different by rounding, or wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.bench.handoff.groups import HandoffClient, HandoffGroups
from disagg.bench.handoff.sizes import Sizes
from disagg.core.errors import MismatchError
from disagg.core.types import TokenLogprobs
from disagg.model.rounding import Judged, compared_tokens, judge_answer, words


class AnswerComparison:
    """Compares answers and counts the compared tokens. No other request may run on the groups during a comparison."""

    def __init__(self, client: HandoffClient, groups: HandoffGroups, sizes: Sizes) -> None:
        self._client, self._groups, self._sizes = client, groups, sizes
        self.tokens = 0
        """Number of compared tokens. The comparison of an answer ends at its first difference: later tokens have
        another prefix."""
        self.judged: list[Judged] = []
        """First differences of the answers that differ; rounding explains each of them."""

    async def check(
        self, prompt: Sequence[int], tokens: Sequence[int], answer: Sequence[int], count: int
    ) -> None:
        """Raises `MismatchError` unless the first `count` tokens equal the unsplit engine's `answer`.

        If rounding may change tokens, both systems compute log-probabilities after the common prefix. An
        error is raised unless rounding explains their difference.
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
        raise MismatchError(f"the split system's answer differs from the unsplit engine's: {why}")

    async def _judge(self, prompt: Sequence[int], tokens: Sequence[int]) -> Judged:
        """Judges whether rounding explains that the last of `tokens` differs from the unsplit engine's token."""
        logprobs = _of_token(tokens[-1], await self._client.logprobs(prompt, tokens[:-1]))
        judge = self._groups.judge(prompt, tokens, compared_tokens(logprobs))
        return judge_answer([logprobs], judge)[0]._replace(position=len(tokens) - 1)


def _of_token(token: int, logprobs: TokenLogprobs) -> TokenLogprobs:
    """Returns `logprobs` with `token` as the chosen token. If `token` is not in the list, its probability is 0."""
    return TokenLogprobs(token, dict(logprobs.top).get(token, -math.inf), logprobs.top)

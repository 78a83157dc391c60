"""Whether requests wait for the third tier of a prefix cache, from measured rates of fetching and of computing."""

from __future__ import annotations

from disagg.core.config.groups import PrefetchName
from disagg.core.errors import InvariantError
from disagg.kv.token_rate import LEAST_TOKENS, TokenRate

LONGEST_S = 60.0
"""Time limit of a find or a fetch under the prefetch policies `best_effort` and `wait`, which set no limit."""
TRIAL_AFTER = 15
"""Number of consecutive requests that do not wait for the storage while fetching takes longer than computing. Each
later request waits for a short time (a trial), until a fetch has been measured again."""
LEAST_TRIAL_S = 0.05
"""Least time limit of a find or a fetch in a trial. A find that exceeds its limit counts as one without a result."""
RECENT_TOKENS = 4096
"""Number of fetched tokens after which an earlier measurement counts half. A small number, so that a storage that has
become faster is seen after a few fetches."""


class FetchPatience:
    """Decides whether the requests of a group wait for their prefetches. Not thread-safe.

    Under the policy `timeout`, a request does not wait for a storage that takes longer than computing; it uses what
    has landed when it gets its pages.
    """

    def __init__(self, policy: PrefetchName) -> None:
        self._policy = policy
        self.prompt_tokens_per_s = 0.0
        """Rate at which the group computes prompts, set by its leader; 0 if it is not measured."""
        self._rate = TokenRate(RECENT_TOKENS)
        self._not_awaited = 0
        """Number of requests that did not wait for their prefetch, since a fetch was measured."""

    def of(self, tokens: int) -> tuple[bool, float]:
        """Returns whether a request waits for a prefetch of `tokens` tokens, and a limit in seconds of each
        operation, which the policy may shorten."""
        fetched, computed = self._rate.tokens_per_s, self.prompt_tokens_per_s
        if self._policy != "timeout" or not 0 < fetched < computed:
            return self._policy != "best_effort", LONGEST_S
        if self._not_awaited < TRIAL_AFTER:
            self._not_awaited += 1
            return False, LONGEST_S
        return True, max(LEAST_TRIAL_S, tokens / computed)

    def fetched(self, tokens: int, seconds: float) -> None:
        """Counts a fetch of `tokens` tokens that has ended after `seconds`."""
        # A fetch that took longer than computing is slow, even if its limit left time for few tokens only.
        if seconds * self.prompt_tokens_per_s > LEAST_TOKENS:
            tokens = max(LEAST_TOKENS, tokens)
        self._rate.add(tokens, seconds)
        if tokens >= LEAST_TOKENS:
            self._not_awaited = 0

    def check(self) -> None:
        """Raises `InvariantError` unless the rate and the count are possible."""
        self._rate.check()
        if not 0 <= self._not_awaited <= TRIAL_AFTER:
            raise InvariantError(f"{self._not_awaited} prefetches without a trial, at most {TRIAL_AFTER}")

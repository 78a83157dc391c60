"""The requests that are about to join the steps of a decode group."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.request import DecodeRequest
from disagg.core.ports import Clock
from disagg.core.types import RequestKey

JOINS_WITHIN_S = 0.025
"""Time after its latest news for which a request counts as about to join: a transfer may stall, and a grammar may
still be compiling."""


class JoiningRequests:
    """Requests whose KV lands soon, or of which only the KV or only the first token is missing. Not thread-safe: the
    leader's lock guards it."""

    def __init__(self, clock: Clock, has_joined: Callable[[DecodeRequest], bool]) -> None:
        """`has_joined`: whether the next step can compute a request."""
        self._clock, self._has_joined = clock, has_joined
        self._until_s: dict[RequestKey, tuple[DecodeRequest, float]] = {}
        """With each request, the time until which a step may wait for it."""

    def add(self, request: DecodeRequest) -> None:
        """Records news of a request: it joins soon."""
        self._until_s[request.key] = request, self._clock() + JOINS_WITHIN_S

    def any_left(self) -> bool:
        """Returns whether a request is about to join. Forgets those that have joined, have ended, or are late."""
        if self._until_s:
            now_s = self._clock()
            for request, until_s in list(self._until_s.values()):
                if request.closing or until_s < now_s or self._has_joined(request):
                    del self._until_s[request.key]
        return bool(self._until_s)

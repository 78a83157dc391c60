"""Sends the KV events of a group's prefix cache to routers, for each tier: the whole content once, then changes.

router -- Watch (prefixes) --> leader    sent repeatedly; `prefixes` is `all` if the router has missed a digest
router <- CacheDigest -- leader          sent with a report of rank 0 if a tier changed, or after a step if a
                                         router lacks `PUBLISH_AT_EVENTS` events of a tier
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from disagg.core.prefixes import Tier
from disagg.kv.event_log import KVEventLog
from transport.control import messages as m

PUBLISH_AT_EVENTS = 32
"""Number of unsent events at which events are published right after a step. A prompt of 2,048 tokens causes this
number of events, one for each block of 64 tokens."""


class KVEventPublisher:
    """Sends each router the KV events that it lacks. Not thread-safe: the leader's lock guards it."""

    def __init__(self, send: Callable[[str, m.Message], None]) -> None:
        self._send = send
        self._sent: dict[str, dict[Tier, int]] = {}
        """Latest version of each tier that was sent to each router."""

    def watch(self, router: str, message: m.Watch) -> None:
        """Adds, resets or removes a router, as its `Watch` message requests."""
        if message.prefixes == "none" or not message.interval_s:
            self._sent.pop(router, None)
        elif message.prefixes == "all" or router not in self._sent:
            self._sent[router] = {}

    def publish(
        self,
        kv_events: Mapping[Tier, KVEventLog],
        watchers: Container[str],
        group: str,
        switch_tokens: int,
        at_least: int,
    ) -> None:
        """Sends the events of each tier to watchers that are new or lack at least `at_least` of the tier's events.

        Drops former watchers.
        """
        for router, sent in list(self._sent.items()):
            if router not in watchers:
                del self._sent[router]
                continue
            for tier, log in kv_events.items():
                since = sent.get(tier)
                if since is None or log.version - since >= at_least:
                    digest = log.digest(since)
                    sent[tier] = digest.version
                    self._send(router, m.CacheDigest(group, digest, switch_tokens, tier))

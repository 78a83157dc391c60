"""Sends the KV events of a group's prefix cache to routers: the whole content once, then changes.

router -- Watch (prefixes) --> leader    with every `Watch`; `all` if the router lacks a digest
router <- CacheDigest -- leader          with a report of rank 0, if anything changed; or after a step of many changes
"""

from __future__ import annotations

from collections.abc import Callable, Container

from disagg.kv.event_log import KVEventLog
from transport.control import messages as m

PUBLISH_AT_EVENTS = 32
"""Events that are published after a step: with blocks of 64 tokens, those of a prompt of 2,048 tokens."""


class KVEventPublisher:
    """Versions of the KV events that each router has. Not thread-safe: the leader's lock guards it."""

    def __init__(self, send: Callable[[str, m.Message], None]) -> None:
        self._send = send
        self._sent: dict[str, int | None] = {}
        """Latest version sent to each router; None before the first digest."""

    def watch(self, router: str, message: m.Watch) -> None:
        """Adds, resets or removes a router, as its `Watch` requests."""
        if message.prefixes == "none" or not message.interval_s:
            self._sent.pop(router, None)
        elif message.prefixes == "all" or router not in self._sent:
            self._sent[router] = None

    def publish(
        self, kv_events: KVEventLog, watchers: Container[str], group: str, switch_tokens: int, at_least: int
    ) -> None:
        """Sends events to new watchers and to those with `at_least` unsent events; drops former watchers."""
        for router, since in list(self._sent.items()):
            if router not in watchers:
                del self._sent[router]
            elif since is None or kv_events.version - since >= at_least:
                digest = kv_events.digest(since)
                self._sent[router] = digest.version
                self._send(router, m.CacheDigest(group, digest, switch_tokens))

"""What each router was told of a group's prefix cache: all of it once, then what came and went.

router -- Watch (prefixes) --> leader    with each of its `Watch`es; `all` when something is missing
router <- CacheDigest -- leader          when rank 0 reports and something changed, or after a step that changed much
"""

from __future__ import annotations

from collections.abc import Callable, Container

from disagg.kv.journal import MarkJournal
from transport import messages as m

MUCH_NEWS = 32
"""Changes that are told at once: with marks of 64 tokens, those of a prompt of 2,048."""


class PrefixNews:
    """Not thread-safe: the leader's lock guards it."""

    def __init__(self, send: Callable[[str, m.Message], None]) -> None:
        self._send = send
        self._told: dict[str, int | None] = {}
        """Up to which version each router was told; None: nothing."""

    def watch(self, router: str, message: m.Watch) -> None:
        """A router wants to be told, or no more."""
        if message.prefixes == "none" or not message.interval_s:
            self._told.pop(router, None)
        elif message.prefixes == "all" or router not in self._told:
            self._told[router] = None

    def tell(
        self, journal: MarkJournal, watchers: Container[str], group: str, switch_tokens: int, news: int
    ) -> None:
        """Tells everybody for whom there are at least `news` changes, and who is new; forgets who is no watcher."""
        for router, since in list(self._told.items()):
            if router not in watchers:
                del self._told[router]
            elif since is None or journal.version - since >= news:
                digest = journal.digest(since)
                self._told[router] = digest.version
                self._send(router, m.CacheDigest(group, digest, switch_tokens))

"""Base class of leaders that reserve a row and pages for each request, and queue requests while these are short.

Queued requests are admitted whenever rows or pages may have become free. There are four such events: a request frees
its memory, a copy to host memory ends, a queued request leaves, and a step ends (before the next step is planned).
The leader's lock is held.

With a third tier of the prefix cache, a new request may wait for a prefetch (`disagg.kv.storage_tier`), which has a
time limit. Requests behind it overtake meanwhile. A prefetch takes at most half of the time that the request may be
queued, so that a slow storage fails no request. The leader owns the prefetch until the request starts or leaves the
queue.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from disagg.core.errors import BusyError, DisaggError, PeerLostError, RequestTimeoutError
from disagg.core.ports import Clock
from disagg.core.prefixes import PrefixKey
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.storage_tier import Prefetch
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.leader import FETCH_SHARE, Leader, Send
from disagg.node.led_scheduler import LedScheduler
from disagg.node.waiting import WaitingQueue, WaitingRequest
from transport.control import messages as m

QUEUE_FULL_RETRY_S = 0.5
"""Time after which a router should retry when the queue is full."""
FREEING = (m.Release, m.RankClosed, m.Swapped)
"""Messages that may free rows or pages."""


class ReservingScheduler(LedScheduler, Protocol):
    """Methods of a scheduler that a `ReservingLeader` uses."""

    def require_fits(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        """Raises `InvalidRequestError` or `PromptTooLongError` if the request does not fit an empty pool."""

    @property
    def caches_prefixes(self) -> bool:
        """Whether the group has a prefix cache."""


class ReservingLeader(Leader):
    """Base class of `DecodeLeader` and `ColocatedLeader`."""

    _scheduler: ReservingScheduler

    def __init__(
        self,
        spec: ModelSpec,
        send: Send,
        to_self: Callable[[m.Message], None],
        clock: Clock,
        max_waiting: int,
    ) -> None:
        super().__init__(spec, send, to_self, clock)
        self.waiting = WaitingQueue(max_waiting)
        """Queued requests, guarded by the leader's lock."""
        self._prefetches: dict[RequestKey, Prefetch] = {}
        """Prefetches of queued requests."""

    def handle(self, peer: str, message: m.Message) -> None:
        """Handles a message to the leader, then admits queued requests if the message may have freed memory."""
        with self._changed:
            super().handle(peer, message)
            if isinstance(message, FREEING):
                self._admit_waiting()

    def _memory_freed(self) -> None:
        self._admit_waiting()

    def on_peer_lost(self, peer: str) -> None:
        """Ends the requests of a lost router, queued ones included; a lost rank breaks the group."""
        with self._changed:
            for one in [one for one in self.waiting if one.router == peer]:
                self.waiting.remove(one.reserve.key)
            super().on_peer_lost(peer)
            self._admit_waiting()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is admitted or queued; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting and not self._requests(), timeout_s)

    def check(self) -> None:
        """Raises `InvariantError` if the scheduler or the queue is inconsistent."""
        with self._changed:
            super().check()
            self.waiting.check()

    @abstractmethod
    def _start(self, one: WaitingRequest) -> None:
        """Reserves memory for a request and starts it. Raises `DisaggError`; `BusyError` if memory is short."""

    def _start_or_wait(self, one: WaitingRequest) -> None:
        """Admits a request if no queued request precedes it and memory is free; otherwise queues or refuses it."""
        message = one.reserve
        try:
            self._scheduler.require_fits(len(message.prompt), message.sampling)
            self._begin_prefetch(message)
            if not self.waiting.is_first(message.priority, self._ready):
                count = len(self.waiting)
                raise BusyError(f"{count} requests wait for memory in the {self._role} group already")
            self._start_fetched(one)
        except BusyError as error:
            self._wait(one, error)
        except DisaggError as error:
            self._refuse(one.router, one.reserve.key, error)

    def _begin_prefetch(self, message: m.Reserve) -> None:
        """Begins a prefetch for a new request, unless the request has a wait limit of 0."""
        if message.wait_s > 0 and (prefix := self._prefix_of(message)) is not None:
            prefetch = self._scheduler.kv_manager.prefetch(prefix.extended(message.answered))
            if prefetch is not None:
                self._prefetches[message.key] = prefetch

    def _start_fetched(self, one: WaitingRequest) -> None:
        """Starts a request, or raises `BusyError` while the request waits for its prefetch."""
        if not self._ready(one):
            raise BusyError("the request's prefix is being read from the storage")
        self._start(one)
        self._end_prefetch(one)

    def _ready(self, one: WaitingRequest) -> bool:
        """Returns whether the request waits for memory only, not for its prefetch."""
        prefetch = self._prefetches.get(one.reserve.key)
        return prefetch is None or not prefetch.holds

    def _end_prefetch(self, one: WaitingRequest) -> None:
        prefetch = self._prefetches.pop(one.reserve.key, None)
        self._scheduler.kv_manager.end_prefetch(prefetch)

    def _end_prefetches(self) -> None:
        """Ends the prefetches of requests that have left the queue."""
        for key in [key for key in self._prefetches if self.waiting.get(key) is None]:
            self._scheduler.kv_manager.end_prefetch(self._prefetches.pop(key))

    def _prefix_of(self, message: m.Reserve) -> PrefixKey | None:
        """Returns the key of a request's prompt; None without a prefix cache."""
        return self._prefix(message.prompt, message.cache_salt) if self._scheduler.caches_prefixes else None

    def _wait(self, one: WaitingRequest, error: BusyError) -> None:
        """Queues a request. Refuses it with `error` if its wait limit is 0, with `BusyError` if the queue is full."""
        if one.reserve.wait_s == 0:
            self._refuse(one.router, one.reserve.key, error)
        elif self.waiting.full:
            full = f"{len(self.waiting)} requests wait for memory in the group already ({self._role}.max_waiting)"
            self._refuse(one.router, one.reserve.key, BusyError(full, QUEUE_FULL_RETRY_S))
        else:
            self.waiting.add(one)

    def _admit_waiting(self) -> None:
        """Admits ready requests in the queue's order until memory is too short for the first one."""
        self._end_prefetches()
        while (one := self.waiting.first(self._ready)) is not None:
            try:
                self._start_fetched(one)
            except BusyError:
                return
            except DisaggError as error:
                self._refuse(one.router, one.reserve.key, error)
            self.waiting.take(one)

    def _arrived(self, router: str, message: m.Reserve) -> WaitingRequest:
        now_s = self._clock()
        wait_s = min(message.wait_s, message.deadline_s)
        return WaitingRequest(
            router,
            message,
            now_s + message.deadline_s,
            now_s + wait_s,
            fetch_until_s=now_s + wait_s * FETCH_SHARE,
        )

    def _waits(self, router: str, message: m.Reserve) -> bool:
        """Returns whether a request with this key is queued already.

        If another router queued it, refuses this request.
        """
        known = self.waiting.get(message.key)
        if known is not None and known.router != router:
            self._refuse(router, message.key, BusyError(f"request {message.key} is in use by another router"))
        return known is not None

    def _release(self, router: str, message: m.Release) -> None:
        """Releases a request: removes the request from the queue, or frees its memory."""
        known = self.waiting.get(message.key)
        if known is not None and known.router == router:
            self.waiting.remove(message.key)
        super()._release(router, message)

    def _break(self, reason: str) -> None:
        self._end_waits(lambda one: PeerLostError(reason))
        super()._break(reason)

    def expire(self) -> None:
        """Ends requests past their deadline and refuses queued requests past their wait limit.

        Then admits requests from the queue. Runs before each step is planned.
        """
        super().expire()
        now_s = self._clock()
        for one in self.waiting:
            if now_s > one.fetch_until_s and not self._ready(one):
                self._end_prefetch(one)
        self._end_waits(lambda one: self._wait_error(one) if now_s > one.wait_until_s else None)
        self._admit_waiting()

    def _end_waits(self, error_of: Callable[[WaitingRequest], DisaggError | None]) -> None:
        """Refuses each queued request for which `error_of` returns an error."""
        for one in list(self.waiting):
            error = error_of(one)
            if error is not None:
                self.waiting.remove(one.reserve.key)
                self._refuse(one.router, one.reserve.key, error)

    def _wait_error(self, one: WaitingRequest) -> DisaggError:
        key = one.reserve.key
        if one.wait_until_s == one.deadline_s:
            return RequestTimeoutError(f"request {key} reached its deadline while it waited for memory")
        return BusyError(
            f"request {key} got no memory in the {self._role} group within {one.reserve.wait_s:g} s "
            f"(router.reserve_wait_s)",
            retry_after_s=0.0,
        )

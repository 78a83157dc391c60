"""What the leaders of all kinds of group share: one lock, the ranks they speak to, deadlines, and ending requests.

A leader is rank 0's scheduler with its mail. Messages come on the control thread (and from rank 0's own transfer
thread), steps on the compute thread; one lock keeps its books, and it is never held while the model runs. Nothing
done under the lock blocks: `send` queues, and work for rank 0's transfer thread is posted.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import structlog

from disagg.core.config import Role
from disagg.core.errors import (
    BusyError,
    DisaggError,
    InvalidRequestError,
    PeerLostError,
    ProtocolError,
    RequestTimeoutError,
)
from disagg.core.ports import Clock
from disagg.core.prefixes import PrefixKey
from disagg.core.sampling import check_sampling, ending_tokens
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.tokens import TokenIds, all_below
from disagg.core.types import GroupInfo, RequestKey, SamplingParams
from disagg.kv.journal import MarkJournal
from disagg.model.beam_search import candidates_wanted
from disagg.model.spec import ModelSpec, require_one_rope
from disagg.node.ledger import LedgerStatistics
from disagg.node.plan import StepPlan
from disagg.node.prefix_news import PrefixNews
from disagg.node.reports import Reports
from transport import messages as m

log = structlog.get_logger(__name__)

IDLE_S = 0.25
"""How often an idle leader looks at its deadlines."""

Send = Callable[[str, m.Message], None]


def check_request(prompt: TokenIds, sampling: SamplingParams, spec: ModelSpec) -> None:
    """Raises `InvalidRequestError` or `PromptTooLongError` for what would fail, or be wrong, in mid-request.

    A step that fails takes the whole group with it.
    """
    if not prompt:
        raise InvalidRequestError("the prompt has no tokens; it must have 1 or more")
    if not all_below(prompt, spec.vocab_size):
        raise InvalidRequestError(
            f"the prompt has a token outside the model's vocabulary of {spec.vocab_size} tokens"
        )
    check_sampling(sampling, spec.vocab_size, spec.eos_ids)
    wanted = candidates_wanted(sampling, ending_tokens(sampling, spec.eos_ids))
    if wanted > spec.vocab_size:
        raise InvalidRequestError(
            f"beams = {sampling.beams} is not allowed: the search looks at {wanted} tokens, and the model has "
            f"{spec.vocab_size}"
        )
    require_one_rope(spec, len(prompt), sampling.max_tokens)


def finish_reason(tokens: Sequence[int], sampling: SamplingParams, eos_ids: Sequence[int]) -> str | None:
    """Why the answer ends with its last token: `stop`, `length`, or None when it goes on."""
    if tokens[-1] in ending_tokens(sampling, eos_ids):
        return "stop"
    return "length" if len(tokens) >= sampling.max_tokens else None


class LedRequest(Protocol):
    """What the base needs to know of a request."""

    key: RequestKey
    router: str
    deadline_s: float
    closing: bool
    release_asked: bool


class Scheduled(NamedTuple):
    """Requests and memory, as a scheduler counts them; see `disagg.core.status.GroupStatus`."""

    waiting: int
    running: int
    closing: int
    memory: LedgerStatistics
    preemptions: int = 0


class LedScheduler(Protocol):
    """What the base needs to know of a scheduler."""

    @property
    def requests(self) -> Mapping[RequestKey, LedRequest]:
        """Those of which anything is left."""

    def check(self) -> None:
        """Raises `InvariantError` when its books are wrong."""


class Leader(ABC):
    """Base of `PrefillLeader`, `DecodeLeader` and `ColocatedLeader`."""

    _role: ClassVar[Role]
    _scheduler: LedScheduler

    def __init__(
        self, spec: ModelSpec, send: Send, to_self: Callable[[m.Message], None], clock: Clock
    ) -> None:
        self._spec = spec
        self._channel_send = send
        self._to_self = to_self
        self._clock = clock
        self._changed = threading.Condition()
        self._group: GroupInfo | None = None
        self._reports = Reports(send, clock)
        self._prefix_news = PrefixNews(send)
        self.broken: str = ""
        """Why the group can serve nothing any more; empty while it can."""

    # --- for the rank that hosts it

    def join(self, group: GroupInfo) -> None:
        """The group is complete."""
        self._group = group

    def handle(self, peer: str, message: m.Message) -> None:
        """A message for the leader. For any thread."""
        with self._changed:
            match message:
                case m.Watch():
                    self._reports.watch(peer, message, self._status())
                    self._prefix_news.watch(peer, message)
                    self._tell_prefixes()
                case m.RankReport():
                    self._on_report(message.status)
                case _:
                    self._on_message(peer, message)
            self._changed.notify_all()

    def on_peer_lost(self, peer: str) -> None:
        """A router's requests end with it; without a rank of its own the group is broken."""
        with self._changed:
            self._reports.lost(peer)
            for request in [r for r in self._requests() if r.router == peer]:
                self._close(request.key, "the router is gone")
            if self._group and peer in {rank.control_address for rank in self._group.ranks}:
                self._break(f"lost {self._group.role} rank {peer}")
            self._changed.notify_all()

    def break_group(self, reason: str) -> None:
        """The group can compute no more: every request ends, and none is taken."""
        with self._changed:
            self._break(reason)
            self._changed.notify_all()

    def next_plan(self) -> StepPlan | None:
        """What to compute next, already sent to the other ranks; None after a while without work."""
        with self._changed:
            self._expire()
            plan = None if self.broken else self._next_step()
            if plan is None:
                self._changed.wait(IDLE_S)
                plan = None if self.broken else self._next_step()
            if plan is not None:
                self._to_others(m.Plan(plan.step, plan.encode()))
                self._reports.step_begins()
            return plan

    def wake(self) -> None:
        """Ends a `next_plan` that waits."""
        with self._changed:
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is left; False when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not list(self._requests()), timeout_s)

    def status(self) -> GroupStatus:
        """The group at this moment, with what its ranks told last."""
        with self._changed:
            return self._status()

    def check(self) -> None:
        """Raises `InvariantError` when rows or pages are lost or owned twice."""
        with self._changed:
            self._scheduler.check()

    # --- for the kinds of leader

    @property
    def max_sequences(self) -> int:
        """Answers to one request, or beams, that the group computes side by side."""
        return 1

    @abstractmethod
    def link(self, other: GroupInfo) -> None:
        """Requests may pass between this group and `other`."""

    @abstractmethod
    def statistics(self) -> object:
        """The scheduler's statistics."""

    @abstractmethod
    def _scheduled(self) -> Scheduled:
        """The scheduler's part of the group's status. Under the lock."""

    @abstractmethod
    def _on_message(self, peer: str, message: m.Message) -> None: ...

    @abstractmethod
    def _next_step(self) -> StepPlan | None: ...

    def _journal(self) -> MarkJournal | None:
        """What the prefix cache has to tell; None without one. Under the lock."""
        return None

    @abstractmethod
    def _close(self, key: RequestKey, reason: str) -> None:
        """Starts the end of a request; unknown or already closing: nothing happens."""

    def _on_report(self, status: RankStatus) -> None:
        self._reports.heard(status, self._ranks)
        if status.rank == 0:  # the one clock that all reports of the group go by
            self._reports.tell(self._status())
            self._tell_prefixes()

    def _tell_prefixes(self, news: int = 1) -> None:
        """Tells routers that want to know, of whose news there are so many, what is cached."""
        journal = self._journal()
        if journal is not None:
            assert self._group is not None, "a leader is used after join"
            switch_tokens = self._spec.rope_switch_tokens
            self._prefix_news.tell(journal, self._reports.watchers, self._group.name, switch_tokens, news)

    def _prefix(self, prompt: TokenIds, salt: str) -> PrefixKey:
        """A prompt as the prefix cache knows it.

        Where rotary embeddings change with the length, and KV with them, long prompts share nothing with short ones.
        """
        return PrefixKey.of(prompt, salt, self._spec.rope_switch_tokens)

    def _status(self) -> GroupStatus:
        assert self._group is not None, "a leader is used after join"
        scheduled, reports = self._scheduled(), self._reports
        pages, cache = scheduled.memory.pages, scheduled.memory.cache
        alone = cache.cached_pages - cache.locked_pages if cache is not None else 0
        return GroupStatus(
            self._group.name,
            self._role,
            reports.ranks,
            requests_waiting=scheduled.waiting,
            requests_running=scheduled.running,
            requests_closing=scheduled.closing,
            page_size=pages.page_size,
            pages=pages.pages,
            pages_used=pages.used_pages - alone,
            pages_cached=alone,
            tokens_held=pages.used_tokens - alone * pages.page_size,
            evicted_pages_total=cache.evicted_pages if cache is not None else 0,
            cached_tokens_total=cache.hit_tokens if cache is not None else 0,
            preemptions_total=scheduled.preemptions,
            tokens_total=reports.tokens,
            steps_total=reports.steps,
            step_s_total=reports.step_s,
            broken=self.broken,
        )

    def _requests(self) -> list[LedRequest]:
        return list(self._scheduler.requests.values())

    def _release(self, router: str, message: m.Release) -> None:
        request = self._scheduler.requests.get(message.key)
        if request is not None:
            request.release_asked = True
            self._close(message.key, message.reason)
        if self.broken or message.key not in self._scheduler.requests:
            self._send(router, m.Released(message.key))  # a broken group's memory goes with its processes

    def _tell_released(self, request: LedRequest) -> None:
        if request.release_asked and request.key not in self._scheduler.requests:
            self._send(request.router, m.Released(request.key))

    def _send(self, router: str, message: m.Message) -> None:
        """To a router or another leader. A message that is too large ends its request instead."""
        try:
            self._channel_send(router, message)
        except ProtocolError as error:
            self._fail_too_large(message, error)

    def _to_ranks(self, message: m.Message) -> None:
        """To all ranks of the group. A message that is too large goes to none of them, and ends its request."""
        try:
            self._to_others(message)
        except ProtocolError as error:
            self._fail_too_large(message, error)
        else:
            self._to_self(message)

    def _fail_too_large(self, message: m.Message, error: ProtocolError) -> None:
        key = message.ticket.key if isinstance(message, m.OpenReceive) else getattr(message, "key", None)
        request = self._scheduler.requests.get(key) if isinstance(key, RequestKey) else None
        if request is None or request.closing:
            log.error("message_too_large", role=self._role, kind=type(message).__name__, error=str(error))
        else:
            self._fail(request, error)

    def _to_others(self, message: m.Message) -> None:
        assert self._group is not None, "a leader is used after join"
        for rank in self._group.ranks[1:]:
            self._channel_send(rank.control_address, message)

    @property
    def _ranks(self) -> int:
        assert self._group is not None, "a leader is used after join"
        return len(self._group.ranks)

    def _refuse(self, router: str, key: RequestKey, error: DisaggError) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, BusyError) else 0.0
        self._send(router, m.Failed(key, error.code, str(error), error.retryable, retry_after_s))

    def _fail(self, request: LedRequest, error: DisaggError) -> None:
        """Tells the router, once, and ends the request here."""
        if not request.closing:
            self._refuse(request.router, request.key, error)
            self._close(request.key, str(error))

    def _break(self, reason: str) -> None:
        if not self.broken:
            log.error("group_broken", reason=reason)
            self.broken = reason
            if self._group is not None:
                self._reports.tell(self._status())
        for request in list(self._requests()):
            self._fail(request, PeerLostError(reason))
            if request.release_asked:  # who waits for it need not: the memory goes with the group's processes
                self._send(request.router, m.Released(request.key))

    def _expire(self) -> None:
        now_s = self._clock()
        for request in [r for r in self._requests() if now_s > r.deadline_s]:
            self._fail(request, RequestTimeoutError(f"request {request.key} is past its deadline"))

"""A colocated group's leader: it is to the router what the leaders of a prefill and a decode group are together."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import torch

from disagg.colocated.scheduler import ColocatedRequest, ColocatedScheduler, ColocatedStatistics
from disagg.core.errors import (
    BusyError,
    DisaggError,
    HandshakeError,
    InvalidRequestError,
    PeerLostError,
    RequestError,
)
from disagg.core.ports import Clock
from disagg.core.types import GroupInfo, RequestKey
from disagg.kv.journal import MarkJournal
from disagg.model.next_tokens import Chosen, next_tokens
from disagg.model.penalties import Row, history_of
from disagg.model.spec import ModelSpec
from disagg.node.leader import Leader, LedRequest, Scheduled, Send, check_request, finish_reason
from disagg.node.plan import StepPlan
from disagg.node.prefix_news import MUCH_NEWS
from transport import messages as m

log = structlog.get_logger(__name__)


class ColocatedLeader(Leader):
    """Rank 0's mail and scheduler; see `disagg.node.leader` for its threads."""

    _role = "colocated"
    _scheduler: ColocatedScheduler

    def __init__(
        self,
        scheduler: ColocatedScheduler,
        spec: ModelSpec,
        send: Send,
        to_self: Callable[[m.Message], None],
        clock: Clock,
    ) -> None:
        super().__init__(spec, send, to_self, clock)
        self._scheduler = scheduler

    def link(self, other: GroupInfo) -> None:
        """Raises `HandshakeError`: requests stay here."""
        raise HandshakeError(f"a colocated group is linked with no other, and not with {other.name}")

    def commit(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """A step ended: samples a token of each answer, the first one where a prompt is now whole, and streams it.

        `logits`: float32 `[len(plan.work), vocab]`.
        """
        with self._changed:
            requests = [self._scheduler.requests[work.key] for work in plan.work]
        whole = [i for i, work in enumerate(plan.work) if work.span.stop >= work.prompt_tokens]
        answering = [requests[i] for i in whole]
        rows = [Row(request.sampling, request.tokens, request.history) for request in answering]
        wanted = logits if len(whole) == len(requests) else logits[whole]
        found = next_tokens(wanted, rows, self._spec.eos_ids) if rows else []
        prompt_tokens = sum(len(work.tokens) for work in plan.work if work.start < work.prompt_tokens)
        with self._changed:
            generated = sum(
                self._answer(request, chosen) for request, chosen in zip(answering, found, strict=True)
            )
            self._scheduler.commit(plan)
            self._reports.step_ended(prompt_tokens + generated)
            for request in requests:
                self._tell_released(request)
            self._tell_prefixes(MUCH_NEWS)
            self._changed.notify_all()

    def statistics(self) -> ColocatedStatistics:
        """Counts at this moment."""
        with self._changed:
            return self._scheduler.statistics()

    def _scheduled(self) -> Scheduled:
        found = self._scheduler.statistics()
        running = found.reserved + found.prefilling + found.decoding
        return Scheduled(0, running, found.closing, found.memory)

    def _journal(self) -> MarkJournal | None:
        return self._scheduler.journal

    def _fail(self, request: LedRequest, error: DisaggError) -> None:
        """What it holds may be no good, so nobody else gets it."""
        assert isinstance(request, ColocatedRequest), "this leader's"
        request.prefix = None
        super()._fail(request, error)

    def _next_step(self) -> StepPlan | None:
        return self._scheduler.next_step()

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Reserve():
                self._reserve(peer, message)
            case m.Prefill():
                self._start(peer, message)
            case m.Release():
                self._release(peer, message)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def _reserve(self, router: str, message: m.Reserve) -> None:
        known = self._scheduler.requests.get(message.key)
        if known is not None and not known.closing and known.router == router:
            self._send(router, m.Reserved(known.key, known.ticket))
            return
        try:
            if known is not None:
                raise BusyError(f"request {message.key} is in use, or still being released from its last use")
            if self.broken:
                raise PeerLostError(self.broken)
            check_request(message.prompt, message.sampling, self._spec)
            if message.sampling.sequences > 1 or message.sampling.beams:
                raise InvalidRequestError(
                    "a colocated group gives one answer to a request: ask for each by itself"
                )
            deadline_s = self._clock() + message.deadline_s
            caches = self._scheduler.caches_prefixes
            request = self._scheduler.reserve(
                message.key,
                message.prompt,
                message.sampling,
                router=router,
                deadline_s=deadline_s,
                prefix=self._prefix(message.prompt, message.cache_salt) if caches else None,
            )
        except DisaggError as error:
            self._refuse(router, message.key, error)
            return
        request.history = history_of(message.prompt, message.sampling)
        self._send(router, m.Reserved(request.key, request.ticket))

    def _start(self, router: str, message: m.Prefill) -> None:
        """The prompt was told with the reservation. Of a ticket that is void nothing is computed."""
        request = self._scheduler.requests.get(message.key)
        if request and request.router == router and request.ticket.number == message.ticket.number:
            request.started = True

    def _answer(self, request: ColocatedRequest, chosen: Chosen | RequestError) -> bool:
        """Tells the router. True when it was told a token."""
        if request.closing:
            return False
        if isinstance(chosen, RequestError):
            self._fail(request, chosen)
            return False
        index = len(request.tokens)
        request.tokens.append(chosen.token)
        finish = finish_reason(request.tokens, request.sampling, self._spec.eos_ids)
        told = [] if chosen.logprobs is None else [chosen.logprobs]
        if index == 0:
            self._send(request.router, m.Prefilled(request.key, [chosen.token], told))
            if finish is not None:
                self._send(request.router, m.Tokens(request.key, 1, [], finish))
        else:
            self._send(request.router, m.Tokens(request.key, index, [chosen.token], finish, told))
        if finish is not None:
            self._close(request.key, finish)
        return True

    def _close(self, key: RequestKey, reason: str) -> None:
        request = self._scheduler.requests.get(key)
        if request is not None:
            self._scheduler.close(request)

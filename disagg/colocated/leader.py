"""The colocated group's leader: handles the messages that routers otherwise send to a prefill and a decode leader."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from disagg.core.prefixes import Tier
from disagg.core.types import GroupInfo, RequestKey
from disagg.kv.event_log import KVEventLog
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.model.sampling.sampled import Chosen
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.group_status import Scheduled
from disagg.node.kv_event_publisher import PUBLISH_AT_EVENTS
from disagg.node.leader import Send
from disagg.node.led_scheduler import LedRequest
from disagg.node.plan import StepPlan
from disagg.node.request_checks import check_request, finish_reason
from disagg.node.reserving_leader import ReservingLeader
from disagg.node.waiting import WaitingRequest
from transport.control import messages as m

log = structlog.get_logger(__name__)


class ColocatedLeader(ReservingLeader):
    """Message handlers and scheduler of rank 0; `disagg.node.leader` describes its threads."""

    _role = "colocated"
    _scheduler: ColocatedScheduler

    def __init__(
        self,
        scheduler: ColocatedScheduler,
        spec: ModelSpec,
        send: Send,
        to_self: Callable[[m.Message], None],
        clock: Clock,
        max_waiting: int,
    ) -> None:
        super().__init__(spec, send, to_self, clock, max_waiting)
        self._scheduler = scheduler
        self._sampler = Sampler(spec.eos_ids)

    def link(self, other: GroupInfo) -> None:
        """Raises `HandshakeError`: a colocated group has no links."""
        raise HandshakeError(f"a colocated group cannot be linked with another group ({other.name})")

    def commit(self, plan: StepPlan, logits: torch.Tensor, scores: PromptScores) -> None:
        """Ends a step: samples and streams a token for each request whose prompt is computed.

        `logits`: float32 `[len(plan.work), vocab]`. `scores`: log-probabilities of prompt tokens, for the routers.
        """
        with self._changed:
            requests = [self._scheduler.requests[work.key] for work in plan.work]
        whole = [i for i, work in enumerate(plan.work) if work.span.stop >= requests[i].begin_tokens]
        answering = [requests[i] for i in whole]
        rows = [
            SamplingRow(one.sampling, one.tokens, one.history, constraint=one.constraint) for one in answering
        ]
        wanted = logits if len(whole) == len(requests) else logits[whole]
        tokens = self._sampler.step(wanted, rows).result() if rows else []
        works = zip(plan.work, requests, strict=True)
        prompt_tokens = sum(len(work.tokens) for work, of in works if work.start < of.begin_tokens)
        found = scores.result()
        with self._changed, self._one_message_each():
            self._send_prompt_logprobs(plan, requests, found)
            answered = [
                (one, chosen) for one, chosen in zip(answering, tokens, strict=True) if not one.closing
            ]
            self.constraints.advance(
                [(one.constraint, chosen.token) for one, chosen in answered if isinstance(chosen, Chosen)]
            )
            generated = sum(
                self._answer(request, chosen) for request, chosen in zip(answering, tokens, strict=True)
            )
            self._scheduler.commit(plan)
            measures = prompt_tokens > generated and not plan.loads
            self._reports.step_ended(prompt_tokens + generated, prompt_tokens if measures else 0)
            for request in requests:
                self._confirm_release(request)
            self._publish_kv_events(PUBLISH_AT_EVENTS)
            self._changed.notify_all()

    def statistics(self) -> ColocatedStatistics:
        """Returns the counts at this moment."""
        with self._changed:
            return self._scheduler.statistics()

    def _scheduled(self) -> Scheduled:
        counts = self._scheduler.statistics()
        running = counts.reserved + counts.prefilling + counts.decoding
        return Scheduled(len(self.waiting), running, counts.closing, counts.memory)

    def _kv_events(self) -> Mapping[Tier, KVEventLog]:
        return self._scheduler.kv_events

    def _fail(self, request: LedRequest, error: DisaggError) -> None:
        """Fails the request without caching its pages, whose KV may be wrong."""
        assert isinstance(request, ColocatedRequest), "this leader has colocated requests only"
        request.prefix = None
        super()._fail(request, error)

    def _next_step(self) -> StepPlan | None:
        return self._scheduler.next_step()

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Reserve():
                self._reserve(peer, message)
            case m.Prefill():
                self._prefill(peer, message)
            case m.Release():
                self._release(peer, message)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def _reserve(self, router: str, message: m.Reserve) -> None:
        known = self._scheduler.requests.get(message.key)
        if known is not None and not known.closing and known.router == router:
            self._send(router, m.Reserved(known.key, known.ticket))
            return
        if self._waits(router, message):
            return
        try:
            if known is not None:
                raise BusyError(f"request {message.key} is in use, or still being released from its last use")
            self._require_admissible(message)
        except DisaggError as error:
            self._refuse(router, message.key, error)
            return
        if not self._has_ended(router, message):
            self._start_or_wait(self._arrived(router, message))

    def _require_admissible(self, message: m.Reserve) -> None:
        if self.broken:
            raise PeerLostError(self.broken)
        check_request(message.prompt, message.sampling, self._spec, message.answered)
        if message.sampling.sequences > 1 or message.sampling.beams:
            raise InvalidRequestError(
                "a colocated group computes one answer per request: send one request for each answer"
            )

    def _begin_prefetch(self, message: m.Reserve) -> None:
        if message.sampling.prompt_logprobs is None:  # otherwise the whole prompt is computed
            super()._begin_prefetch(message)

    def _start(self, one: WaitingRequest) -> None:
        message = one.reserve
        request = self._scheduler.reserve(
            message.key,
            message.prompt,
            message.sampling,
            router=one.router,
            deadline_s=one.deadline_s,
            prefix=self._prefix_of(message),
            answered=message.answered,
        )
        request.priority = message.priority
        request.history = history_of(message.prompt, message.sampling)
        request.constraint = self.constraints.answer(message.sampling.grammar, message.answered)
        if request.constraint is not None:
            request.constraint.when_ready(self.wake)
        self._send(one.router, m.Reserved(request.key, request.ticket))

    def _prefill(self, router: str, message: m.Prefill) -> None:
        """Starts a reserved request, whose prompt was received with `Reserve`; ignores an outdated ticket."""
        request, ticket = self._scheduler.requests.get(message.key), message.ticket
        if request and ticket and request.router == router and request.ticket.number == ticket.number:
            request.started = True

    def _answer(self, request: ColocatedRequest, chosen: Chosen | RequestError) -> bool:
        """Appends a sampled token to the answer and sends it, or the error, to the router.

        Returns True if a token was sent.
        """
        if isinstance(chosen, RequestError):  # of a closing request, too: its KV must not be cached
            self._fail(request, chosen)
            return False
        if request.closing:
            return False
        index = len(request.tokens)
        request.tokens.append(chosen.token)
        if request.constraint is not None:
            request.constraint.prepare(request.tokens)
        finish = finish_reason(request.tokens, request.sampling, self._spec.eos_ids)
        logprobs = [] if chosen.logprobs is None else [chosen.logprobs]
        if index == request.answered:
            cached = request.block_table.cached_tokens if request.block_table is not None else 0
            self._send(request.router, m.Prefilled(request.key, [chosen.token], logprobs, cached))
            if finish is not None:
                self._send(request.router, m.Tokens(request.key, index + 1, [], finish))
        else:
            self._send(request.router, m.Tokens(request.key, index, [chosen.token], finish, logprobs))
        if finish is not None:
            self._close(request.key, finish)
        return True

    def _close(self, key: RequestKey, reason: str) -> None:
        request = self._scheduler.requests.get(key)
        if request is not None:
            self._scheduler.close(request)

"""The colocated group's leader: handles the messages that routers otherwise send to a prefill and a decode leader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog
import torch

from disagg.colocated.sampled_step import ColocatedStep
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
from disagg.model.sampling.penalties import history_of
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.model.sampling.sampled import Chosen
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.device import wait_for
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

    def is_constrained(self, plan: StepPlan) -> bool:
        """Returns whether a sampled request of the latest plan has a grammar.

        The grammar's mask depends on the token of the previous step, which the host must read first.
        """
        with self._changed:
            found = ((self._scheduler.requests[work.key], work) for work in plan.work)
            return any(request.constraint is not None and request.samples(work) for request, work in found)

    def sample(self, plan: StepPlan, logits: torch.Tensor, scores: PromptScores) -> ColocatedStep:
        """Launches the sampling of the latest plan's tokens on the device; `commit` reads these tokens.

        `scores`: log-probabilities of prompt tokens, for the routers. `logits`: see `ColocatedStep.launch`.
        """
        with self._changed:
            requests = [self._scheduler.requests[work.key] for work in plan.work]
        return ColocatedStep.launch(plan, requests, logits, scores, self._sampler)

    def commit(self, step: ColocatedStep) -> None:
        """Ends the oldest step in flight: waits for the device, and streams the sampled tokens to the routers."""
        if self._scheduler.steps_ahead:
            wait_for(step.ended)  # a step without tokens too: otherwise the host would launch without limit
        plan, chosen, found = step.plan, step.chosen(), step.scores.result()
        works = zip(plan.work, step.requests, strict=True)
        prompt_tokens = sum(len(work.tokens) for work, of in works if work.start < of.begin_tokens)
        with self._changed, self._one_message_each():
            self._send_prompt_logprobs(plan, step.requests, found)
            self._begin_masks(chosen)
            generated = sum(self._answer(request, token) for request, token in chosen)
            self._scheduler.commit(plan)
            measures = prompt_tokens > generated and not plan.awaited_loads
            self._step_ended(prompt_tokens + generated, prompt_tokens if measures else 0)
            for request in step.requests:
                self._confirm_release(request)
            self._publish_kv_events(PUBLISH_AT_EVENTS)
            self._changed.notify_all()

    def _begin_masks(self, chosen: Sequence[tuple[ColocatedRequest, Chosen | RequestError]]) -> None:
        """Starts the computation of the masks after the chosen tokens, before the tokens are streamed."""
        self.constraints.advance(
            [
                (request.constraint, token.token)
                for request, token in chosen
                if isinstance(token, Chosen) and not request.closing
            ]
        )

    def _steps_in_flight(self) -> int:
        return self._scheduler.steps_in_flight

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

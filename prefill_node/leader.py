"""The prefill group's leader: accepts prompts, plans chunks, and sends first tokens to the decode group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import torch

from disagg.core.errors import DisaggError, NotLinkedError, PeerLostError, RequestError, error_from_code
from disagg.core.ports import Clock
from disagg.core.prefixes import Tier
from disagg.core.types import GroupInfo, RequestKey, Ticket
from disagg.kv.event_log import KVEventLog
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.device import record_event, wait_for
from disagg.node.group_status import Scheduled
from disagg.node.kv_event_publisher import PUBLISH_AT_EVENTS
from disagg.node.leader import FETCH_SHARE, Leader, Send
from disagg.node.led_scheduler import LedRequest
from disagg.node.plan import StepPlan
from disagg.node.request_checks import check_request
from prefill_node.first_tokens import SampledFirstTokens
from prefill_node.request import First, PrefillRequest
from prefill_node.sampled_chunks import SampledChunks
from prefill_node.scheduler import PrefillScheduler, PrefillStatistics
from transport.control import messages as m

log = structlog.get_logger(__name__)


class PrefillLeader(Leader):
    """Message handlers and scheduler of rank 0; see `disagg.node.leader` for its threads."""

    _role = "prefill"
    _scheduler: PrefillScheduler

    def __init__(
        self,
        scheduler: PrefillScheduler,
        spec: ModelSpec,
        send: Send,
        to_self: Callable[[m.Message], None],
        clock: Clock,
    ) -> None:
        super().__init__(spec, send, to_self, clock)
        self._scheduler = scheduler
        self.decode_leaders: dict[str, str] = {}
        """Control address of each linked decode group's leader; guarded by the lock."""

    def link(self, other: GroupInfo) -> None:
        """Accepts tickets of this decode group from now on."""
        with self._changed:
            self.decode_leaders[other.name] = other.leader.control_address

    def _on_router_lost(self, request: LedRequest) -> None:
        """Handles a request whose router is lost: finishes the transfer of a computed prompt, ends other requests.

        The decode group may still reach the router. If the decode group lost the router too, it stops the transfer.
        """
        assert isinstance(request, PrefillRequest), "this leader has prefill requests only"
        sending = request.admitted and request.computed and request.block_table is not None
        sending = sending and not request.closing
        if sending and not request.unwanted:
            request.router_lost = True
        else:
            super()._on_router_lost(request)

    def _end_without_router(self, request: PrefillRequest) -> None:
        if request.router_lost:
            self._close(request.key, "lost the router")

    def sample(self, plan: StepPlan, logits: torch.Tensor, scores: PromptScores) -> SampledChunks:
        """Launches the sampling of the first tokens of the prompts that the step completes; does not wait.

        `logits`: float32 `[len(plan.work), vocab]`. `scores`: log-probabilities of prompt tokens, for the routers.
        """
        with self._changed:
            requests = [self._scheduler.requests[work.key] for work in plan.work]
        whole = {i: requests[i] for i, work in enumerate(plan.work) if work.last}
        first = SampledFirstTokens(logits, whole, self._spec.eos_ids)
        return SampledChunks(plan, requests, first, scores, record_event(logits.device))

    def commit(self, step: SampledChunks) -> None:
        """Ends the oldest step in flight: waits for the device, and sends first tokens to the decode leader."""
        wait_for(step.ended)  # the commit may free pages, which a load could write at once
        plan, requests, first = step.plan, step.requests, step.first.result()
        found = step.scores.result()
        with self._changed:
            self._send_prompt_logprobs(plan, requests, found)
            self._send_firsts(first)  # first of all, because clients wait for the tokens
            failed = {key for key, chosen in first.items() if isinstance(chosen, RequestError)}
            for request in self._scheduler.commit(plan, failed):
                chosen = first[request.key]
                if isinstance(chosen, RequestError):
                    self._fail(request, chosen)
            for request in requests:
                self._confirm_release(request)
            self._admit()
            tokens = sum(len(work.tokens) for work in plan.work)
            self._step_ended(tokens, 0 if plan.awaited_loads else tokens)
            self._publish_kv_events(PUBLISH_AT_EVENTS)
            self._changed.notify_all()

    def _send_firsts(self, found: Mapping[RequestKey, First | RequestError]) -> None:
        """Sends the first tokens of computed prompts, or keeps them until the ticket arrives."""
        for key, chosen in found.items():
            request = self._scheduler.requests[key]
            if request.closing or request.is_head or isinstance(chosen, RequestError):
                continue  # of a head, the decode group samples the first token
            if request.ticket is None:
                request.first = chosen
            else:
                self._hand_over(request, request.ticket, chosen)

    def _fail(self, request: LedRequest, error: DisaggError) -> None:
        """Fails the request without caching its pages, whose KV may be wrong."""
        assert isinstance(request, PrefillRequest), "this leader has prefill requests only"
        request.prefix = None
        super()._fail(request, error)

    def statistics(self) -> PrefillStatistics:
        """Returns the counts at this moment."""
        with self._changed:
            return self._scheduler.statistics()

    def expire(self) -> None:
        """Fails the requests that are past their deadline, and ends prefetches that took too long."""
        super().expire()
        now_s = self._clock()
        late = [one for one in self._scheduler.requests.values() if one.fetches and now_s > one.fetch_until_s]
        for request in late:
            self._scheduler.kv_manager.end_prefetch(request.prefetch)
        if late:
            self._admit()

    def _scheduled(self) -> Scheduled:
        counts = self._scheduler.statistics()
        return Scheduled(counts.waiting, counts.computing + counts.sending, counts.closing, counts.memory)

    def _kv_events(self) -> Mapping[Tier, KVEventLog]:
        return self._scheduler.kv_events

    def _memory_freed(self) -> None:
        self._admit()

    def _next_step(self) -> StepPlan | None:
        return self._scheduler.next_step()

    def _steps_in_flight(self) -> int:
        return self._scheduler.steps_in_flight

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Prefill():
                self._submit(peer, message)
            case m.Reserved():
                self._reserved(peer, message)
            case m.Release():
                self._release(peer, message)
            case m.RankSent():
                self._sent(message)
            case m.RankStopped():
                if request := self._current(message.key, message.ticket):
                    request.unwanted = True
                    self._end_without_router(request)
            case m.RankFailed():
                if request := self._current(message.key, message.ticket):
                    self._fail(request, error_from_code(message.code, message.message))
            case m.RankClosed():
                self._closed(message)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)
        self._admit()

    def _submit(self, router: str, message: m.Prefill) -> None:
        now_s = self._clock()
        request = PrefillRequest(
            message.key,
            message.prompt,
            message.sampling,
            router,
            now_s + message.deadline_s,
            priority=message.priority,
            is_head=message.is_head,
            answered=message.answered,
            fetch_until_s=now_s + message.deadline_s * FETCH_SHARE,
        )
        try:
            if self.broken:
                raise PeerLostError(self.broken)
            check_request(message.prompt, message.sampling, self._spec, message.answered)
            if self._scheduler.caches_prefixes:
                request.prefix = self._prefix(message.prompt, message.cache_salt).extended(message.answered)
            request.constraint = self.constraints.answer(message.sampling.grammar, message.answered)
            self._scheduler.submit(request)
            if request.constraint is not None:
                request.constraint.when_ready(self.wake)
        except DisaggError as error:
            self._refuse(router, message.key, error)
        else:
            if message.ticket is not None:
                self._reserved(router, m.Reserved(message.key, message.ticket))

    def _reserved(self, router: str, message: m.Reserved) -> None:
        """Stores the ticket of a submitted request and starts sending the KV computed so far.

        A repeated message changes nothing. The ticket of an unknown request, which failed earlier, is ignored.
        """
        request, ticket = self._scheduler.requests.get(message.key), message.ticket
        if request is None or request.router != router or request.closing or request.ticket is not None:
            return
        try:
            self._require_right_ticket(request, ticket)
            open_now = self._scheduler.give_ticket(request, ticket)
        except DisaggError as error:
            self._fail(request, error)
            return
        if open_now:
            self._open(request, ticket)
        if (
            request.first is not None and not request.closing
        ):  # closing if `OpenSend` exceeded a message's size
            self._hand_over(request, ticket, request.first)

    def _require_right_ticket(self, request: PrefillRequest, ticket: Ticket) -> None:
        if ticket.group not in self.decode_leaders:
            raise NotLinkedError(f"decode group {ticket.group!r} is not linked to this prefill group")
        if ticket.tokens.stop != request.total_tokens:
            raise RequestError(
                f"the ticket of {request.key} ends at token {ticket.tokens.stop}, but the request's prompt and "
                f"answer so far have {request.total_tokens} tokens"
            )

    def _admit(self) -> None:
        for request in self._scheduler.admit():
            assert request.ticket is not None, "only requests with a ticket are admitted"
            self._open(request, request.ticket)

    def _open(self, request: PrefillRequest, ticket: Ticket) -> None:
        block_table = request.block_table
        assert block_table is not None, "an admitted request holds its memory"
        begun = request.planned_tokens > block_table.cached_tokens
        pages, row = block_table.pages, block_table.row
        self._to_ranks(m.OpenSend(request.key, ticket, pages, request.reservation, begun, row))

    def _hand_over(self, request: PrefillRequest, ticket: Ticket, first: First) -> None:
        settled = [] if first.scores else first.tokens
        cached = request.cached_tokens  # the request's block table may be freed already
        self._send(request.router, m.Prefilled(request.key, settled, first.logprobs, cached))
        leader = self.decode_leaders.get(ticket.group)
        if leader is not None:
            self._send(leader, m.FirstTokens(request.key, ticket.number, first.tokens, first.scores))

    def _sent(self, message: m.RankSent) -> None:
        request = self._current(message.key, message.ticket)
        if request is None or message.rank in request.sent_ranks:
            return
        request.nbytes += message.nbytes
        request.segments += message.segments
        request.messages += message.messages
        request.transfer_s = max(request.transfer_s, message.seconds)
        if self._scheduler.rank_sent(request, message.rank):
            done = m.Transferred(
                request.key, request.nbytes, request.segments, request.messages, request.transfer_s
            )
            self._send(request.router, done)
            self._end_without_router(request)

    def _close(self, key: RequestKey, reason: str) -> None:
        request = self._scheduler.requests.get(key)
        if request is not None and self._scheduler.close(request):
            assert request.ticket is not None, "an admitted request has a ticket"
            self._to_ranks(m.CloseTransfer(key, request.ticket.number, reason))

    def _closed(self, message: m.RankClosed) -> None:
        request = self._current(message.key, message.ticket)
        if request is not None:
            self._scheduler.rank_closed(request, message.rank)
            self._confirm_release(request)

    def _current(self, key: RequestKey, ticket: int) -> PrefillRequest | None:
        request = self._scheduler.requests.get(key)
        if request is None or request.ticket is None or request.ticket.number != ticket:
            return None
        return request

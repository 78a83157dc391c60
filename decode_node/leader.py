"""The decode group's leader: starts requests whose KV has landed, plans steps, streams tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
import torch

from decode_node.admitting_leader import AdmittingLeader
from decode_node.joining import JoiningRequests
from decode_node.launch_pace import LaunchPace
from decode_node.request import DecodeRequest
from decode_node.request import Sequence as DecodeSequence
from decode_node.sampled_step import SampledStep
from decode_node.scheduler import DecodeScheduler, DecodeStatistics
from decode_node.step_planner import Stepped
from disagg.core.errors import (
    ChecksumError,
    DisaggError,
    ProtocolError,
    RequestError,
    TransportError,
    error_from_code,
)
from disagg.core.ports import Clock
from disagg.core.prefixes import Tier
from disagg.core.sampling import MAX_SEQUENCES, ending_tokens
from disagg.core.types import GroupInfo, RequestKey, TokenLogprobs
from disagg.kv.event_log import KVEventLog
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.beam_search import BeamSearch, Candidate, candidates_wanted
from disagg.model.sampling.sampled import Chosen
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.device import wait_for
from disagg.node.group_status import Scheduled
from disagg.node.kv_event_publisher import PUBLISH_AT_EVENTS
from disagg.node.leader import Send
from disagg.node.led_scheduler import LedRequest
from disagg.node.plan import StepPlan
from disagg.node.request_checks import finish_reason
from transport.control import messages as m

log = structlog.get_logger(__name__)


class DecodeLeader(AdmittingLeader):
    """Message handlers and scheduler of rank 0; `disagg.node.leader` describes its threads."""

    _role = "decode"

    def __init__(
        self,
        scheduler: DecodeScheduler,
        eos_ids: Sequence[int],
        spec: ModelSpec,
        send: Send,
        to_self: Callable[[m.Message], None],
        clock: Clock,
        max_waiting: int,
    ) -> None:
        super().__init__(scheduler, eos_ids, spec, send, to_self, clock, max_waiting)
        self._sampler = Sampler(eos_ids)
        self._pace = LaunchPace()
        self._joining = JoiningRequests(clock, self._has_begun)

    def join(self, group: GroupInfo) -> None:
        """Sets the complete group. The rank with the least host memory determines the group's swap space."""
        super().join(group)
        with self._changed:
            self._scheduler.join(min(rank.swap_blocks for rank in group.ranks))

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences of one request."""
        return min(self._scheduler.max_sequences, MAX_SEQUENCES)

    @property
    def local_prefill_tokens(self) -> int:
        """Tokens of a step in which the group computes prompts of new requests itself; 0: it never does."""
        return self._scheduler.local_prefill_tokens

    @property
    def tail_tokens(self) -> int:
        """See `RankInfo.tail_tokens`."""
        return self._scheduler.tail_tokens

    def next_plan(self) -> StepPlan | None:
        """Returns the next plan; see `Leader.next_plan`. While a request is about to join, waits until the step in
        flight is nearly over."""
        with self._changed:
            self._wait_for_joining()
            began_s = self._clock()
            plan = super().next_plan()
            if plan is not None and plan.work:
                self._pace.planned(began_s)
            return plan

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> SampledStep:
        """Launches the sampling of the latest plan's next tokens on the device; `commit` reads these tokens.

        `logits`: float32 `[len(plan.work), vocab]`; see `SampledStep.launch`.
        """
        with self._changed:
            stepped = self._scheduler.stepped(plan)
            usual = all(one.samples and one.sequence.constraint is None for one in stepped)
            self._pace.launched(self._clock(), usual=usual)
        return SampledStep.launch(plan, stepped, logits, self._sampler)

    def is_constrained(self, plan: StepPlan) -> bool:
        """Returns whether a sampled sequence of the latest plan has a grammar.

        The grammar's mask depends on the tokens of the previous step, which the host must read first.
        """
        with self._changed:
            return any(one.samples and one.sequence.constraint for one in self._scheduler.stepped(plan))

    def commit(self, step: SampledStep) -> None:
        """Ends the oldest step in flight: waits for the device, and streams the sampled tokens to the routers."""
        wait_for(step.ended)  # the commit may free pages, which a transfer could write at once
        ended_s = self._clock()
        chosen, searched = step.chosen(), step.searched()
        with self._changed, self._one_message_each():
            prefilled = any(one.prefills for one in step.stepped if not one.samples)
            self._begin_masks(chosen)
            generated = 0
            for one, token in chosen:
                generated += self._go_on(one.request, one.sequence, token)
            branches = {request: self._advance(request, best) for request, best in searched.items()}
            for request in self._scheduler.commit(step.plan):
                if going := branches.get(request):
                    generated += len(going)
                    self._scheduler.branch(request, going)
                if request.closing:
                    self._confirm_release(request)
            seconds = self._step_ended(generated)
            self._pace.ended(ended_s, answers_only=all(one.samples for one in step.stepped))
            if not prefilled:  # otherwise the step's time is not that of a recomputation
                self._observe_step(step.plan, seconds)
            self._publish_kv_events(PUBLISH_AT_EVENTS)
            self._changed.notify_all()

    def _begin_masks(self, chosen: Sequence[tuple[Stepped, Chosen | RequestError]]) -> None:
        """Starts the computation of the masks after the chosen tokens, before the tokens are streamed."""
        if all(one.sequence.constraint is None for one, _ in chosen):
            return
        # An error ends all answers of its request.
        failed = {one.request for one, token in chosen if not isinstance(token, Chosen)}
        self.constraints.advance(
            [
                (one.sequence.constraint, token.token)
                for one, token in chosen
                if isinstance(token, Chosen)
                and not (one.sequence.ended or one.request.closing or one.request in failed)
            ]
        )

    def _go_on(self, request: DecodeRequest, sequence: DecodeSequence, chosen: Chosen | RequestError) -> bool:
        """Appends and streams a sequence's next token.

        Returns False if the sequence gets no token, because it has ended or failed.
        """
        if sequence.ended:
            return False
        if isinstance(chosen, RequestError):  # of a closing request, too: its KV must not be cached
            self._fail(request, chosen)
            return False
        if request.closing:
            return False
        sequence.add(chosen.token)
        logprobs = [] if chosen.logprobs is None else [chosen.logprobs]
        self._emit(request, sequence, len(sequence.tokens) - 1, [chosen.token], logprobs)
        return True

    def _advance(self, request: DecodeRequest, best: list[Candidate] | RequestError) -> list[Candidate]:
        """Advances a beam search; returns the beams of the next step, none if the search is over."""
        assert request.search is not None, "a beam search"
        if isinstance(best, RequestError):
            self._fail(request, best)
            return []
        if request.closing:
            return []
        going = request.search.advance(best)
        if request.search.over:
            self._send_answers(request, request.search)
        return going

    def _send_answers(self, request: DecodeRequest, search: BeamSearch) -> None:
        """Sends each answer in one message before the request closes: an answer too large for one message must fail
        the request."""
        for number, (_, tokens) in enumerate(search.answers()):
            finish = finish_reason(tokens, request.sampling, self._eos_ids)
            self._send_now(request.router, m.Tokens(request.key, 0, list(tokens), finish, answer=number))
        self._close(request.key, "the beam search has ended")

    def statistics(self) -> DecodeStatistics:
        """Returns the counts at this moment."""
        with self._changed:
            return self._scheduler.statistics()

    def _scheduled(self) -> Scheduled:
        counts = self._scheduler.statistics()
        preemptions = counts.recomputed_total + counts.swapped_total
        running = counts.receiving + counts.running
        waiting = counts.preempted + len(self.waiting)
        return Scheduled(waiting, running, counts.closing, counts.memory, preemptions)

    def _kv_events(self) -> Mapping[Tier, KVEventLog]:
        return self._scheduler.kv_events

    def _next_step(self) -> StepPlan | None:
        return self._scheduler.next_step()

    def _wait_for_joining(self) -> None:
        """Waits for requests that are about to join, as long as `LaunchPace` allows. Called under the lock, which it
        releases meanwhile.

        A group of several ranks does not wait: its other ranks launch a step later than rank 0.
        """
        if not self._joining.any_left() or self._ranks > 1 or self._scheduler.is_full:
            return
        wait_s = self._pace.wait_s(self._clock())
        if wait_s > 0:
            self._changed.wait_for(lambda: self.broken or not self._joining.any_left(), wait_s)
            self._pace.waited()

    def _steps_in_flight(self) -> int:
        return self._scheduler.steps_in_flight

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Reserve():
                self._reserve(peer, message)
            case m.Release():
                self._release(peer, message)
            case m.RankOpened():
                if (request := self._current(message.key, message.ticket)) and self._scheduler.rank_opened(
                    request, message.rank
                ):
                    self._send(request.router, m.Reserved(request.key, request.ticket))
            case m.FirstTokens():
                request = self._current(message.key, message.ticket)
                if request is not None and not (request.begun or request.samples_first):
                    self._joining.add(request)
                    self._first_tokens(peer, request, message)
            case m.EndAnswer():
                self._end_answer(peer, message)
            case m.Arriving():
                if request := self._current(message.key, message.ticket):
                    request.arriving_ranks.add(message.rank)
            case m.LandsSoon():
                if request := self._current(message.key, message.ticket):
                    self._joining.add(request)
            case m.Landed():
                if request := self._current(message.key, message.ticket):
                    self._joining.add(request)
                    self._scheduler.rank_landed(request, message.rank)
                    self._maybe_start(request)
            case m.Swapped():
                if request := self._current(message.key, message.ticket):
                    self._swapped(request, message)
            case m.RankFailed():
                if request := self._current(message.key, message.ticket):
                    self._fail(request, error_from_code(message.code, message.message))
            case m.RankClosed():
                if request := self._current(message.key, message.ticket):
                    self._scheduler.rank_closed(request, message.rank, message.landed_tokens)
                    self._confirm_release(request)
                    self._publish_kv_events(PUBLISH_AT_EVENTS)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def _fail(self, request: LedRequest, error: DisaggError) -> None:
        """Fails a request and keeps its pages out of the prefix cache, because their KV may be wrong.

        After a failed transfer the row and pages stay reserved, unless the KV is damaged: the router may continue the
        request here.
        """
        assert isinstance(request, DecodeRequest), "this leader has decode requests only"
        request.prefix = None
        if request.closing:
            another_report = isinstance(error, TransportError) and not self.broken  # for the same lost rank
            if not (request.held and another_report):
                self._close(request.key, str(error))
            return
        transfer_failed = isinstance(error, TransportError) and not isinstance(error, ChecksumError)
        held = transfer_failed and not self.broken and not self._has_begun(request)
        self._refuse(request.router, request.key, error, resumable=held)
        self._close(request.key, str(error))
        if held:
            request.held = True  # until the router releases or continues the request, or until its deadline

    def _has_begun(self, request: DecodeRequest) -> bool:
        return request.begun and len(request.landed_ranks) == self._ranks

    def _swapped(self, request: DecodeRequest, message: m.Swapped) -> None:
        preemptor = self._scheduler.preemptor
        if message.error:
            self._fail(request, TransportError(f"swap of {request.key} failed: {message.error}"))
        else:
            preemptor.rates = preemptor.rates.copied(len(request.pages()), message.seconds)
        self._scheduler.swapped(request, message.rank)
        self._confirm_release(request)

    def _observe_step(self, plan: StepPlan, seconds: float) -> None:
        tokens = sum([len(work.tokens) for work in plan.work if len(work.tokens) > 1])
        preemptor = self._scheduler.preemptor
        rates = preemptor.rates
        preemptor.rates = rates.computed(tokens, seconds) if tokens else rates.stepped(seconds)

    def _first_tokens(self, peer: str, request: DecodeRequest, message: m.FirstTokens) -> None:
        """Starts a request with its first tokens.

        While the request's grammar is being compiled, the message is deferred, so that no step waits for the grammar.
        """
        for sequence in request.sequences:
            if sequence.constraint is not None and not sequence.constraint.ready:
                sequence.constraint.when_ready(partial(self.handle, peer, message))
                return
        self._begin(request, message)
        self._maybe_start(request)

    def _begin(self, request: DecodeRequest, first: m.FirstTokens) -> None:
        """Starts a request with its first tokens: one for each answer, or the candidates of a beam search."""
        request.begun = True
        if not self._sound(request, first):
            error = f"{request.key}: the prefill group sent invalid tokens {first.tokens} with scores {first.scores}"
            self._fail(request, ProtocolError(error))
        elif request.search is not None:
            best = zip(first.scores, first.tokens, strict=True)
            going = request.search.advance([Candidate(score, 0, token) for score, token in best])
            if going:
                self._scheduler.branch(request, going)
        else:
            for sequence, token in zip(request.sequences, first.tokens, strict=True):
                sequence.add(token)

    def _sound(self, request: DecodeRequest, first: m.FirstTokens) -> bool:
        """Returns whether a message has as many first tokens and scores as the request needs, and whether all tokens
        are in the vocabulary.

        Invalid tokens would make the next step fail.
        """
        wanted, scored = len(request.sequences), 0
        if request.search is not None:
            wanted = scored = candidates_wanted(
                request.sampling, ending_tokens(request.sampling, self._eos_ids)
            )
        counts = len(first.tokens), len(first.scores)
        return counts == (wanted, scored) and max(first.tokens) < self._spec.vocab_size

    def _maybe_start(self, request: DecodeRequest) -> None:
        """Once all KV and the first tokens are present, ends the answers that are complete with their first token."""
        if (
            len(request.landed_ranks) < self._ranks
            or not request.begun
            or request.closing
            or request.prefills
        ):
            return
        if request.search is not None:
            if request.search.over:
                self._send_answers(request, request.search)
            return
        for sequence in request.sequences:
            if finish_reason(sequence.tokens, request.sampling, self._eos_ids) is not None:
                self._emit(request, sequence, len(sequence.tokens), [], [])

    def _emit(
        self,
        request: DecodeRequest,
        sequence: DecodeSequence,
        index: int,
        tokens: list[int],
        logprobs: list[TokenLogprobs],
    ) -> None:
        finish = finish_reason(sequence.tokens, request.sampling, self._eos_ids)
        if request.prefills:  # the first token, which a prefill group sends otherwise
            request.first_sent = True
            cached = sequence.block_table.cached_tokens
            self._send(request.router, m.Prefilled(request.key, tokens, logprobs, cached))
            index, tokens, logprobs = index + 1, [], []
        if tokens or finish is not None:
            self._send(
                request.router, m.Tokens(request.key, index, tokens, finish, logprobs, sequence.number)
            )
        if finish is not None and self._scheduler.end(request, sequence):
            self._close(request.key, finish)

    def _end_answer(self, router: str, message: m.EndAnswer) -> None:
        request = self._scheduler.requests.get(message.key)
        if request is None or request.router != router or request.search is not None:
            return
        for sequence in request.sequences:
            if sequence.number == message.answer and self._scheduler.end(request, sequence):
                self._close(message.key, "the router ended the last answer")

    def _close(self, key: RequestKey, reason: str) -> None:
        request = self._scheduler.requests.get(key)
        if request is None:
            return
        if request.held:
            self._scheduler.unhold(request)
        elif self._scheduler.close(request):
            self._to_ranks(m.CloseTransfer(key, request.ticket.number, reason))

    def _current(self, key: RequestKey, ticket: int) -> DecodeRequest | None:
        request = self._scheduler.requests.get(key)
        return request if request is not None and request.ticket.number == ticket else None

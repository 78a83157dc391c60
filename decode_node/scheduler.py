"""Scheduler of the decode group. Pure: no threads, no clocks, no I/O.

Owners of a request's row, pages and host blocks, and the code that frees them:

    [reserve, settled)     the request. Until all KV has landed, segments may be scattered into its pages at any time.
                           Afterwards `Preemptor` may take the pages and give the request other pages later
    settled                `_settle` frees: the request is closing, no step computes it, no rank copies its pages, and
                           every rank has confirmed that no segment can land any more (`rank_closed`). `Forks.prune`
                           frees the pages of an ended sequence earlier, between steps
    [settled, evicted)     the prefix cache, if the group has one: full pages whose KV is complete; see
                           `disagg.node.kv_manager`. Other requests share these pages from `reserve` on, read-only:
                           the tickets of these requests begin after the shared pages
    [failed, resumed)      the closing request, which is `held`: its prefill group was lost, or its transfer failed.
                           Another attempt, the `successor`, takes over row and pages when no segment can land any
                           more; or `unhold` ends the hold
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from decode_node.admission import NOTHING, DecodeAdmission
from decode_node.forks import Forks
from decode_node.preemptor import Preemptor
from decode_node.request import DecodeRequest, NewRequest, Residency, Resumption, Sequence
from decode_node.scheduler_options import SchedulerOptions
from decode_node.step_planner import Stepped, StepPlanner
from disagg.core.prefixes import Tier
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.event_log import KVEventLog
from disagg.kv.host_blocks import HostBlocks, HostStatistics
from disagg.model.sampling.beam_search import Candidate
from disagg.node.kv_manager import KVManager, KVManagerStatistics
from disagg.node.plan import StepPlan


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """Counts of the scheduler: requests, preemptions and memory."""

    receiving: int
    """Requests with a ticket whose KV or first token is missing."""
    running: int
    preempted: int
    """Requests without pages, or whose pages are being copied out or back."""
    closing: int
    memory: KVManagerStatistics
    host: HostStatistics
    recomputed_total: int
    """Preemptions by recomputation, since the start."""
    swapped_total: int
    """Preemptions by a copy to host memory, since the start."""
    swapped_pages_total: int
    """Pages copied to host memory, since the start."""
    kept_tokens_total: int
    """Tokens before the cached recurrent states from which recomputations began, since the start."""


class DecodeScheduler:
    """Continuous batching: every step computes every request whose KV has landed, up to `max_batch` sequences.

    A request holds pages for its known tokens only; `Preemptor` handles a lack of pages. The answers of one request,
    and beams, are forks of one sequence. They share the prompt's pages and later common pages (copy on write; Kwon
    et al., 2023, sections 4.3 and 4.4).
    """

    def __init__(self, kv_manager: KVManager, options: SchedulerOptions) -> None:
        self.kv_manager, self._options = kv_manager, options
        self.requests: dict[RequestKey, DecodeRequest] = {}
        self.preemptor = Preemptor(kv_manager, self.requests, options)
        self._admission = DecodeAdmission(kv_manager, options, self.preemptor)
        self._forks = Forks(kv_manager, options)
        self._planner = StepPlanner(kv_manager, options, self.requests, self.preemptor, self._forks)

    def join(self, host_blocks: int) -> None:
        """Sets the number of host memory blocks: the minimum over the ranks of the complete group."""
        self.preemptor.host = HostBlocks(host_blocks)

    # --- admission

    def reserve(self, new: NewRequest, resumption: Resumption = NOTHING) -> DecodeRequest:
        """Admits a request: reserves rows and pages, and creates the ticket; see `DecodeAdmission.reserve`."""
        request = self._admission.reserve(new, resumption)
        self.requests[new.key] = request
        return request

    def require_fits(self, prompt_tokens: int, sampling: SamplingParams, answered_tokens: int = 0) -> None:
        """Raises `InvalidRequestError` or `PromptTooLongError` unless the group has room for the request alone."""
        self._admission.require_fits(prompt_tokens, sampling, answered_tokens)

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences of one request."""
        return self._admission.max_sequences

    @property
    def local_prefill_tokens(self) -> int:
        """Tokens of a step in which the group computes prompts of new requests itself (`reserve` with the group's own
        name); 0: it never does."""
        return self._options.local_prefill_tokens

    @property
    def tail_tokens(self) -> int:
        """See `RankInfo.tail_tokens`."""
        return self._options.tail_tokens

    def prefill_here(self, request: DecodeRequest) -> None:
        """Starts an admitted request whose prompt this group computes, in chunks beside the running requests.

        As in a recomputation, the chunks end before the last known token; the step of that token samples the first
        new token. Nothing is transferred, so the ranks need not open or close a transfer.
        """
        ranks = range(self._options.ranks)
        request.local = request.begun = True
        request.opened_ranks.update(ranks)
        request.landed_ranks.update(ranks)
        request.landed_tokens = dict.fromkeys(ranks, 0)
        for sequence in request.sequences:
            sequence.computed_tokens = request.ticket.tokens.start
        request.again = request.left_tokens > 0

    def rank_opened(self, request: DecodeRequest, rank: int) -> bool:
        """Records that a rank can receive the request's segments.

        Returns True once, when all ranks can; the caller then sends the ticket to the router.
        """
        known = rank in request.opened_ranks
        request.opened_ranks.add(rank)
        return not known and len(request.opened_ranks) == self._options.ranks

    def rank_landed(self, request: DecodeRequest, rank: int) -> None:
        """Records that a rank has all KV that is sent."""
        request.landed_ranks.add(rank)
        if request.tail and len(request.landed_ranks) == self._options.ranks:
            request.begun = True

    # --- steps

    def next_step(self) -> StepPlan | None:
        """Returns the plan of the next step, None if there is nothing to plan now; see `StepPlanner.next_step`."""
        return self._planner.next_step()

    @property
    def steps_in_flight(self) -> int:
        """Number of steps that are planned and not committed."""
        return self._planner.in_flight

    @property
    def is_full(self) -> bool:
        """Whether the latest step in flight has no seat for another sequence."""
        return self._planner.is_full

    def stepped(self, plan: StepPlan) -> list[Stepped]:
        """Returns the work items of the latest plan."""
        return self._planner.stepped(plan)

    def commit(self, plan: StepPlan) -> list[DecodeRequest]:
        """Records the end of the oldest step in flight; returns the step's requests in the plan's order.

        Tokens that the step sampled for closing requests are not used.
        """
        requests = self._planner.commit(plan)
        for request in requests:
            if request.closing:
                self._settle(request)
        return requests

    def branch(self, request: DecodeRequest, beams: list[Candidate]) -> None:
        """Replaces the request's sequences by `beams`; see `Forks.branch`."""
        self._forks.branch(request, beams)

    def end(self, request: DecodeRequest, sequence: Sequence) -> bool:
        """Marks a sequence as ended. Returns True if all sequences of the request have ended; the caller then closes
        the request."""
        return self._forks.end(request, sequence)

    def swapped(self, request: DecodeRequest, rank: int) -> None:
        """Records that a rank's copy of the request's pages to host memory or back has ended or failed."""
        self.preemptor.swapped(request, rank)
        self._settle(request)

    # --- ends

    def close(self, request: DecodeRequest) -> bool:
        """Begins to close a request. Returns True the first time if the ranks have a transfer of the request; the
        caller then sends `CloseTransfer`."""
        if request.closing:
            return False
        request.closing = True
        if request.local:
            request.closed_ranks.update(range(self._options.ranks))
            self._settle(request)
        return not request.local

    def rank_closed(self, request: DecodeRequest, rank: int, landed_tokens: int = 0) -> None:
        """Records that on this rank no further KV can land in the request's pages.

        `landed_tokens`: number of the ticket's leading tokens whose KV on the rank is complete.
        """
        request.closed_ranks.add(rank)
        request.landed_tokens[rank] = landed_tokens
        self._settle(request)

    def unhold(self, request: DecodeRequest) -> None:
        """Ends the hold of a closing request: its row and pages are freed or passed on once no rank uses them."""
        request.held = False
        self._settle(request)

    def _settle(self, request: DecodeRequest) -> None:
        if request.in_step or request.copying or request.held or not request.closing:
            return
        if len(request.closed_ranks) == self._options.ranks:
            resident = request.residency is Residency.RESIDENT
            self.preemptor.drop(request)
            self._forks.cache(request, request.sequences)
            kept, *others = request.held_tables
            for block_table in others:
                self.kv_manager.release(block_table)
            if request.successor is not None and resident:
                request.kept = kept  # the leader admits the successor, which then owns this block table
            else:
                self.kv_manager.release(kept)
            del self.requests[request.key]

    def drop(self, resumption: Resumption) -> None:
        """Frees the row and pages that a settled request kept for a successor that is not admitted."""
        self._admission.drop(resumption)

    def resumption(self, request: DecodeRequest, answered: Tokens[int]) -> Resumption:
        """Returns the state of a settled request that its successor reuses: tokens, row and pages of landed KV."""
        landed_tokens = min(request.landed_tokens.values())
        have, size = request.ticket.tokens.start + landed_tokens, self.kv_manager.page_size
        if not self._options.has_kv:
            have = 0
        if request.layout is not None:
            have = 0  # the request was preempted: its pages were replaced and may lack KV
        # The successor computes at least the last token.
        last = len(request.prompt) + len(answered) - 1
        return Resumption(answered, request.kept, min(have, last) // size * size)

    # --- state

    @property
    def caches_prefixes(self) -> bool:
        """Whether the group has a prefix cache, so that `DecodeRequest.prefix` is used."""
        return self.kv_manager.caches

    @property
    def kv_events(self) -> Mapping[Tier, KVEventLog]:
        """KV events of each tier of the prefix cache, for routers; empty without a prefix cache."""
        return self.kv_manager.kv_events

    def statistics(self) -> DecodeStatistics:
        """Returns the counts at this moment."""
        requests = self.preemptor.live()
        running = sum(map(self.preemptor.runs, requests))
        preempted = sum(r.residency is not Residency.RESIDENT for r in requests)
        counts = self.preemptor.counts
        return DecodeStatistics(
            receiving=len(requests) - running - preempted,
            running=running,
            preempted=preempted,
            closing=len(self.requests) - len(requests),
            memory=self.kv_manager.statistics(),
            host=self.preemptor.host.statistics(),
            recomputed_total=counts.recomputed,
            swapped_total=counts.swapped,
            swapped_pages_total=counts.swapped_pages,
            kept_tokens_total=counts.kept_tokens,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless the requests hold exactly the reserved rows, pages and host blocks."""
        self.kv_manager.check([request.held_tables for request in self.requests.values()])
        self.preemptor.check()

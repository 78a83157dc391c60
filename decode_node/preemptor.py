"""Preemption: chooses the requests that lose their pages when the pool is full, and the requests that resume first.

Pure: no threads, no clocks, no I/O. Here a request is *older* than another if its priority number is lower or, with
equal priority numbers, its ticket (`DecodeRequest.order`). A request may take pages only from younger requests, the
youngest first, and always all pages of a victim. The pages of a *recomputed* victim are free immediately. The pages
of a *swapped* victim are copied to host memory, and are free when every rank has reported the end of its copy. The
report is needed because the next write to a page may be a transfer, which no compute stream orders.

Progress: nothing preempts the oldest running request, which can take all pages of the younger running requests. A
request needs no further page while its KV is landing, while its pages are being copied, or while the request is
closing. Afterwards the request runs (and can be a victim) or has freed its pages. Admission refuses a request that
does not fit alone. The oldest request therefore ends, then the next request is the oldest, and so on. A preempted
request resumes when the running requests leave enough pages, at the latest when no other request is resident. While a
preempted request waits, no ticket is created, so the number of preempted requests is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from decode_node.costs import Kind, cheaper
from decode_node.request import DecodeRequest, Residency
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.errors import InvariantError
from disagg.core.types import RequestKey
from disagg.kv.host_blocks import HostBlocks
from disagg.kv.page_values import PageCopy
from disagg.kv.pages import pages_for
from disagg.kv.sequence import KVSequence
from disagg.node.block_table import Layout
from disagg.node.kv_manager import KVManager
from disagg.node.plan import Swap


@dataclass(slots=True)
class PreemptionCounts:
    """Preemptions since the start."""

    recomputed: int = 0
    swapped: int = 0
    swapped_pages: int = 0
    kept_tokens: int = 0
    """Tokens of recomputed sequences before the cached states from which the recomputation began."""


class Preemptor:
    """Preempts and resumes the scheduler's `requests`. Owns the host blocks; `KVManager` owns the pages."""

    def __init__(
        self, kv_manager: KVManager, requests: Mapping[RequestKey, DecodeRequest], options: SchedulerOptions
    ) -> None:
        self._kv_manager, self._requests, self._options = kv_manager, requests, options
        self._ranks = options.ranks
        self._watermark_pages = math.ceil(options.watermark * kv_manager.pages)
        self._orders: list[Swap] = []
        self._copies: list[PageCopy] = []
        self.host = HostBlocks(0)
        """Host blocks of swapped requests; empty until the group is complete and the host memory of each rank is
        known."""
        self.rates = options.rates
        self.counts = PreemptionCounts()

    # --- called by the scheduler

    def live(self) -> list[DecodeRequest]:
        """Returns the requests that are not closing."""
        return [request for request in self._requests.values() if not request.closing]

    def spare_pages(self) -> int | None:
        """Returns the number of pages that an admission must leave free.

        Returns None if no request may be admitted, because a preempted request waits.
        """
        waits = any(r.residency in (Residency.LEAVING, Residency.OUT) for r in self.live())
        return None if waits else self._spare_pages()

    def resume(self) -> None:
        """Resumes preempted requests, the oldest first, while enough pages are free."""
        out = [r for r in self._requests.values() if r.residency is Residency.OUT and not r.closing]
        for request in sorted(out, key=_order_of):
            assert request.layout is not None, "a preempted request has its layout"
            left_pages = self._kv_manager.free_pages - request.layout.pages
            if left_pages < self._spare_pages():
                break  # no younger, smaller request overtakes
            if not request.blocks and self._begin_at_states(request, request.layout):
                continue
            pages = self._kv_manager.refill(request.block_tables, request.layout)
            if pages is None:
                break
            for sequence in request.sequences:
                sequence.published_pages = []
            if request.blocks:
                self._order(request, Residency.RETURNING, pages)
            else:
                self._begin_again(request)

    def make_room(self, chosen: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Adds slots for the next tokens of the requests in `chosen`; returns the requests that have their slots.

        The oldest request gets pages first, if necessary from preempted younger requests. A resident request without
        slots keeps its pages and waits.
        """
        if self.grow(chosen):
            return list(chosen)
        taken: set[DecodeRequest] = set()
        coming = sum(len(r.pages()) for r in self._requests.values() if r.residency is Residency.LEAVING)
        for request in sorted(chosen, key=_order_of):
            if request.residency is not Residency.RESIDENT:
                continue  # preempted for an older request
            need = len(self._growing([request]))
            fits = self.grow([request])
            while not fits and coming < need and (victim := self._youngest_behind(request)) is not None:
                coming += self.preempt(victim)
                fits = self.grow([request])
            if fits:
                taken.add(request)
            else:
                coming = max(0, coming - need)  # these pages are reserved for this request
        return [request for request in chosen if request in taken]

    def swapped(self, request: DecodeRequest, rank: int) -> None:
        """Records that a rank has copied the request's pages to host memory or back.

        The last rank's report frees the source of the copy: pages or host blocks.
        """
        request.swapped_ranks.add(rank)
        if not request.copying or len(request.swapped_ranks) < self._ranks:
            return
        request.swapped_ranks.clear()
        if request.residency is Residency.LEAVING:
            self._vacate(request)
            request.residency = Residency.OUT
        else:
            self.drop(request)
            request.residency = Residency.RESIDENT

    def drop(self, request: DecodeRequest) -> None:
        """Frees the request's host blocks."""
        self.host.free(request.blocks)
        request.blocks = []

    def take_orders(self) -> list[Swap]:
        """Returns and clears the ordered copies to and from host memory, for the next plan."""
        orders, self._orders = self._orders, []
        return orders

    def take_copies(self) -> list[PageCopy]:
        """Returns and clears the page copies (copy on write) that the next step makes before it computes."""
        copies, self._copies = self._copies, []
        return copies

    def check(self) -> None:
        """Raises `InvariantError` unless each request's blocks and pages match its residency."""
        requests = list(self._requests.values())
        self.host.check([block for request in requests for block in request.blocks])
        for request in requests:
            if request.residency is Residency.RESIDENT:
                sound = not request.blocks
            elif request.residency is Residency.OUT:
                sound = not request.pages()
            else:
                sound = bool(request.blocks) and bool(request.pages())
            if not sound:
                raise InvariantError(
                    f"{request.key} is {request.residency.value}, with block tables {request.block_tables} and host "
                    f"blocks {request.blocks}"
                )

    # --- helpers

    def _spare_pages(self) -> int:
        """Returns the number of pages to keep free: one per resident sequence, at least the watermark.

        Returns 0 without resident sequences. Without these free pages an admission would soon preempt other requests.
        The watermark is that of vLLM's block manager (Kwon et al., 2023).
        """
        resident = sum(
            len(request.sequences)
            for request in self.live()
            if request.residency in (Residency.RESIDENT, Residency.RETURNING)
        )
        return max(resident, self._watermark_pages) if resident else 0

    def _growing(self, requests: Iterable[DecodeRequest]) -> list[KVSequence]:
        """Returns the sequences of `requests` that lack a slot for the next token."""
        growing: list[KVSequence] = []
        if not self._options.has_kv:
            return growing
        for request in requests:
            if request.in_chunks:  # these tokens already have slots
                continue
            for one in request.sequences:
                sequence = one.block_table.sequence
                lacks = sequence.tokens <= one.planned_tokens + one.ahead_tokens
                if lacks and (not request.steps or one.may_go_on):
                    growing.append(sequence)
        return growing

    def grow(self, requests: Iterable[DecodeRequest]) -> bool:
        """Adds a slot for the next token of each sequence. Without enough pages, changes nothing and returns
        False."""
        copies = self._kv_manager.grow(self._growing(requests))
        if copies is None:
            return False
        self._copies += copies
        return True

    def _youngest_behind(self, request: DecodeRequest) -> DecodeRequest | None:
        victims = [r for r in self._requests.values() if r.order > request.order and self.runs(r)]
        return max(victims, key=_order_of, default=None)

    def runs(self, request: DecodeRequest) -> bool:
        """Returns whether the request has all KV and its first token, and none of its pages is being copied."""
        running = request.begun and not request.closing and request.residency is Residency.RESIDENT
        return running and len(request.landed_ranks) == self._ranks and not request.loading

    def running(self) -> list[DecodeRequest]:
        """Returns the requests that run, in the planning order."""
        return [request for request in self._requests.values() if self.runs(request)]

    def arrives(self, request: DecodeRequest) -> bool:
        """Returns whether a step of the prompt's tail may begin while the KV before it still arrives."""
        arriving = request.tail and len(request.arriving_ranks) == self._ranks and not request.begun
        return arriving and not (request.loading or request.closing)

    def preempt(self, victim: DecodeRequest) -> int:
        """Takes all pages of a request. Returns the number of pages that become free only after a copy."""
        assert not victim.in_step, "requests are preempted while no step is in flight"
        pages, kind = victim.pages(), self._kind(victim)
        blocks = self.host.alloc(len(pages)) if kind == "swap" else None
        sequences = victim.sequences
        if blocks is None:  # do not wait for host memory: its holder is itself preempted and waiting
            tokens = [sequence.known_tokens - 1 for sequence in sequences]
            victim.layout = self._kv_manager.layout(victim.block_tables, tokens)
            self._vacate(victim)
            for sequence in sequences:
                sequence.state_source, sequence.awaits_state, sequence.state_heirs = -1, False, []
            victim.residency = Residency.OUT
            self.counts.recomputed += 1
            return 0
        victim.layout = self._kv_manager.layout(
            victim.block_tables, [one.block_table.tokens for one in sequences]
        )
        victim.blocks = blocks
        self._order(victim, Residency.LEAVING, pages)
        self.counts.swapped += 1
        self.counts.swapped_pages += len(pages)
        return len(pages)

    def _vacate(self, request: DecodeRequest) -> None:
        for block_table in request.block_tables:
            self._kv_manager.vacate(block_table)

    def _begin_again(self, request: DecodeRequest) -> None:
        """Makes a preempted request resident again, with new pages whose KV must be recomputed.

        The first sequence recomputes the tokens that all sequences share.
        """
        assert request.layout is not None, "a preempted request has its layout"
        shared_tokens = request.layout.shared_tokens(self._kv_manager.page_size)
        for sequence, tokens in zip(request.sequences, shared_tokens, strict=True):
            sequence.computed_tokens = tokens
        if self._options.chunks.recurrent:
            self._pass_states(request, request.layout)
        request.residency, request.again = Residency.RESIDENT, request.left_tokens > 0

    def _begin_at_states(self, request: DecodeRequest, layout: Layout) -> bool:
        """Makes a preempted request resident again, each sequence from its last cached recurrent state.

        Returns False, changing nothing, if not every sequence has such a state and the KV before it; see
        `KVManager.refill_cached`.
        """
        if request.prefix is None or request.prefix.prompt_only:
            return False
        keys = [
            request.prefix.extended(sequence.tokens).shortened(tokens)
            for sequence, (tokens, _) in zip(request.sequences, layout.sequences, strict=True)
        ]
        if not self._kv_manager.refill_cached(request.block_tables, layout, keys, request.prompt_tokens):
            return False
        for sequence in request.sequences:
            table, sequence.published_pages = sequence.block_table, []
            assert table.state is not None, "the block table locks a state until the first step copies it"
            sequence.computed_tokens, sequence.state_source = table.cached_tokens, table.state
            self.counts.kept_tokens += table.cached_tokens
        request.residency, request.again = Residency.RESIDENT, request.left_tokens > 0
        return True

    def _pass_states(self, request: DecodeRequest, layout: Layout) -> None:
        """Determines the earlier sequence that passes its recurrent state to each sequence with shared tokens.

        One such sequence exists: pages that a sequence shares with earlier sequences are a prefix of the pages of one
        earlier sequence.
        """
        pages = [numbers for _, numbers in layout.sequences]
        for index, sequence in enumerate(request.sequences):
            count = pages_for(sequence.computed_tokens, self._kv_manager.page_size)
            if count == 0:
                continue
            source = next(at for at, numbers in enumerate(pages) if numbers[:count] == pages[index][:count])
            sequence.awaits_state = True
            heirs = request.sequences[source].state_heirs
            heirs.append((sequence.computed_tokens, sequence))
            heirs.sort(key=lambda heir: heir[0])

    def _kind(self, victim: DecodeRequest) -> Kind:
        """Returns the cheaper kind of preemption. Answer tokens that forks share are counted for each fork."""
        if victim.again:
            return "recompute"  # most of the request's pages hold no KV yet
        if any(table.state is not None for table in victim.block_tables):
            return "recompute"  # the row does not have its state yet, and without pages no state stays locked
        if self._options.preemption == "auto":
            answers = sum(len(sequence.tokens) for sequence in victim.sequences)
            tokens, steps = victim.prompt_tokens, answers if self._options.chunks.recurrent else 0
            return cheaper(len(victim.pages()), tokens + answers - steps, self.rates, steps=steps)
        return self._options.preemption

    def _order(self, request: DecodeRequest, residency: Residency, pages: list[int]) -> None:
        request.residency = residency
        out = residency is Residency.LEAVING
        self._orders.append(Swap(request.key, request.ticket.number, out, pages, list(request.blocks)))


def _order_of(request: DecodeRequest) -> tuple[int, int]:
    return request.order

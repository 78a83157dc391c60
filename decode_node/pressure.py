"""Who keeps its pages when they run out, and who comes back first. Pure: no threads, no clocks, no I/O.

A request may take pages only from younger ones (by ticket), the youngest first, each all or nothing. Such a victim
is *recomputed*: its pages are free at once; or *swapped*: its pages are copied to host memory, and free when every
rank has said that its copy is done, for the next to write there may be a transfer, which no compute stream orders.

Progress: the oldest request that runs is nobody's victim, and what it lacks comes to it. It can take all pages of the
younger ones that run. Those whose KV is still landing, those being copied and those that end need no page to get done
with it, and then run (are victims) or have freed their pages. Alone it fits: who could not is refused a ticket. So
the oldest ends, the next one is the oldest, and so on. Who was preempted comes back when those that run have left
enough, and with nobody else there at the latest: while one waits no ticket is given, so they are a finite number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from decode_node.costs import Kind, Rates, cheaper
from decode_node.request import DecodeRequest, Place
from disagg.core.config import Preemption
from disagg.core.errors import InvariantError
from disagg.core.types import RequestKey
from disagg.kv.host_blocks import HostBlocks
from disagg.kv.page_values import PageCopy
from disagg.node.ledger import Holding, Ledger
from disagg.node.plan import Swap


@dataclass(slots=True)
class Counts:
    """What has been preempted since the start."""

    recomputed: int = 0
    swapped: int = 0
    swapped_pages: int = 0


class Pressure:
    """Owns the host blocks; the pages are the ledger's. `requests` is the scheduler's, looked at only."""

    def __init__(
        self,
        ledger: Ledger,
        requests: Mapping[RequestKey, DecodeRequest],
        *,
        ranks: int,
        preemption: Preemption,
        watermark: float,
        rates: Rates,
        block_pages: int,
        has_kv: bool,
        answers_by_token: bool = False,
    ) -> None:
        """`watermark`: share of the pages that a ticket leaves free. Without KV (`has_kv`) no answer needs pages.

        `answers_by_token`: an answer that is computed again takes a step for each of its tokens.
        """
        self._ledger, self._requests, self._ranks = ledger, requests, ranks
        self._preemption, self._has_kv, self._answers_by_token = preemption, has_kv, answers_by_token
        self._watermark_pages = math.ceil(watermark * ledger.pages)
        self._orders: list[Swap] = []
        self._copies: list[PageCopy] = []
        self.host = HostBlocks(0, block_pages)
        """None of them until the group is complete and has said how much each rank has."""
        self.rates = rates
        self.counts = Counts()

    # --- for the scheduler

    def spare_pages(self) -> int | None:
        """Pages that a ticket must leave free to those who are here; None: it is not given, while one waits."""
        waits = any(r.place in (Place.LEAVING, Place.OUT) for r in self._requests.values() if not r.closing)
        return None if waits else self._spare_pages()

    def resume(self) -> None:
        """Gives pages to those who were preempted, the oldest first, while they last."""
        out = [r for r in self._requests.values() if r.place is Place.OUT and not r.closing]
        for request in sorted(out, key=_age):
            assert request.layout is not None, "one that has left has noted what it had"
            left_pages = self._ledger.free_pages - request.layout.pages
            if left_pages < self._spare_pages():
                break  # a smaller one behind does not overtake
            pages = self._ledger.refill(request.holdings, request.layout)
            if pages is None:
                break
            for sequence in request.sequences:
                sequence.told_pages = []
            if request.blocks:
                self._order(request, Place.RETURNING, pages)
            else:
                self._begin_again(request)

    def make_room(self, chosen: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Those of `chosen` that the step takes, each with a place for its next token; others wait, or are preempted.

        The oldest gets pages first. One that waits keeps what it has: it goes on when an older one has ended.
        """
        if self._grow(chosen):
            return list(chosen)
        taken: set[DecodeRequest] = set()
        coming = sum(len(r.pages()) for r in self._requests.values() if r.place is Place.LEAVING)
        for request in sorted(chosen, key=_age):
            if request.place is not Place.RESIDENT:
                continue  # an older one has taken its pages
            need = len(self._growing(request))
            fits = self._grow([request])
            while not fits and coming < need and (victim := self._youngest_behind(request)) is not None:
                coming += self._preempt(victim)
                fits = self._grow([request])
            if fits:
                taken.add(request)
            else:
                coming = max(0, coming - need)  # it waits for those pages
        return [request for request in chosen if request in taken]

    def swapped(self, request: DecodeRequest, rank: int) -> None:
        """A rank has done with the copy under way. Behind the last one the source of the copy is free."""
        request.swapped_ranks.add(rank)
        if not request.copying or len(request.swapped_ranks) < self._ranks:
            return
        request.swapped_ranks.clear()
        if request.place is Place.LEAVING:
            self._vacate(request)
            request.place = Place.OUT
        else:
            self.drop(request)
            request.place = Place.RESIDENT

    def drop(self, request: DecodeRequest) -> None:
        """Frees the request's host blocks."""
        self.host.free(request.blocks)
        request.blocks = []

    def take_orders(self) -> list[Swap]:
        """Copies to and from host memory that the next plan must order."""
        orders, self._orders = self._orders, []
        return orders

    def take_copies(self) -> list[PageCopy]:
        """Copies of pages that the next plan must have made before it computes; of what `make_room` has taken."""
        copies, self._copies = self._copies, []
        return copies

    def check(self) -> None:
        """Raises `InvariantError` unless blocks and pages are where each request's place says."""
        requests = list(self._requests.values())
        self.host.check([block for request in requests for block in request.blocks])
        for request in requests:
            if request.place is Place.RESIDENT:
                sound = not request.blocks
            elif request.place is Place.OUT:
                sound = not request.pages()
            else:
                sound = bool(request.blocks) and bool(request.pages())
            if not sound:
                raise InvariantError(
                    f"{request.key} is {request.place.value}: {request.holdings}, {request.blocks}"
                )

    # --- its parts

    def _spare_pages(self) -> int:
        """The watermark, and a page for each sequence that is here: who is admitted should not make others leave.

        Where nobody is, whatever fits is enough. Idea of the watermark: vLLM's block manager (Kwon et al., 2023).
        """
        here = sum(
            len(request.sequences)
            for request in self._requests.values()
            if not request.closing and request.place in (Place.RESIDENT, Place.RETURNING)
        )
        return max(here, self._watermark_pages) if here else 0

    def _growing(self, request: DecodeRequest) -> list[Holding]:
        """What needs one more token for the step."""
        if not self._has_kv or request.again:  # what is computed again has its places
            return []
        return [
            one.holding for one in request.sequences if one.holding.sequence.tokens <= one.computed_tokens
        ]

    def _grow(self, requests: Iterable[DecodeRequest]) -> bool:
        """A place for the next token of each sequence of all of `requests`, or, changing nothing, False."""
        growing = [holding for request in requests for holding in self._growing(request)]
        copies = self._ledger.grow(growing)
        if copies is None:
            return False
        self._copies += copies
        return True

    def _youngest_behind(self, request: DecodeRequest) -> DecodeRequest | None:
        victims = [r for r in self._requests.values() if r.age > request.age and self.runs(r)]
        return max(victims, key=_age, default=None)

    def runs(self, request: DecodeRequest) -> bool:
        """All its KV and its first token are here, and none of its pages is on the way."""
        landed = len(request.landed_ranks) == self._ranks
        return landed and request.begun and not request.closing and request.place is Place.RESIDENT

    def _preempt(self, victim: DecodeRequest) -> int:
        """Takes all its pages. Returns how many are free only when they have been copied."""
        assert not victim.in_step, "steps are planned one after the other"
        pages, kind = victim.pages(), self._kind(victim)
        blocks = self.host.alloc(len(pages)) if kind == "swap" else None
        sequences = victim.sequences
        if blocks is None:  # nor does it wait for host memory: that of one who waits himself
            tokens = [sequence.known_tokens - 1 for sequence in sequences]
            victim.layout = self._ledger.layout(victim.holdings, tokens)
            self._vacate(victim)
            victim.holds_state, victim.place = False, Place.OUT
            self.counts.recomputed += 1
            return 0
        victim.layout = self._ledger.layout(victim.holdings, [one.holding.tokens for one in sequences])
        victim.blocks = blocks
        self._order(victim, Place.LEAVING, pages)
        self.counts.swapped += 1
        self.counts.swapped_pages += len(pages)
        return len(pages)

    def _vacate(self, request: DecodeRequest) -> None:
        for holding in request.holdings:
            self._ledger.vacate(holding)

    def _begin_again(self, request: DecodeRequest) -> None:
        """It has its pages back, and they hold nothing. What sequences share the first of them computes for all."""
        assert request.layout is not None, "one that has left has noted what it had"
        known_pages = 0
        for sequence, (tokens, numbers) in zip(request.sequences, request.layout.sequences, strict=True):
            shared = sum(number < known_pages for number in numbers)
            known_pages += len(numbers) - shared
            sequence.computed_tokens = min(tokens, shared * self._ledger.page_size)
        request.place, request.again = Place.RESIDENT, request.left_tokens > 0

    def _kind(self, victim: DecodeRequest) -> Kind:
        """Where sequences share more than the prompt, more is counted than would be computed again."""
        if victim.again:
            return "recompute"  # it is being computed again: most of its pages hold nothing yet
        if self._preemption == "auto":
            answers = sum(len(sequence.tokens) for sequence in victim.sequences)
            tokens, steps = victim.prompt_tokens, answers if self._answers_by_token else 0
            return cheaper(len(victim.pages()), tokens + answers - steps, self.rates, steps=steps)
        return self._preemption

    def _order(self, request: DecodeRequest, place: Place, pages: list[int]) -> None:
        request.place = place
        out = place is Place.LEAVING
        self._orders.append(Swap(request.key, request.ticket.number, out, pages, list(request.blocks)))


def _age(request: DecodeRequest) -> int:
    return request.age

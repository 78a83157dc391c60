"""Step planning of the decode group: which sequences the next step computes, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Iterable

from decode_node.forks import Forks
from decode_node.preemptor import Preemptor
from decode_node.request import DecodeRequest, Sequence
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.types import RequestKey
from disagg.node.plan import StepPlan, Work

Stepped = tuple[DecodeRequest, Sequence]
"""The request and the sequence of one work item."""

_ONE = [1]
"""Token counts of a request with one sequence that is not recomputed."""


class StepPlanner:
    """Plans one step at a time. Pure: no threads, no clocks, no I/O. Reorders the requests of the scheduler."""

    def __init__(
        self,
        options: SchedulerOptions,
        requests: dict[RequestKey, DecodeRequest],
        preemptor: Preemptor,
        forks: Forks,
    ) -> None:
        self._requests, self._preemptor, self._forks = requests, preemptor, forks
        self._max_batch, self._chunks = options.max_batch, options.chunks
        self._step = 0
        self._stepped: list[Stepped] = []
        """Work items of the running step, in the order of its plan."""

    def next_step(self) -> StepPlan | None:
        """Returns a plan with one token of each running sequence, and chunks of recomputed ones; None if empty."""
        self._preemptor.resume()
        work = self._works()
        swaps = self._preemptor.take_orders()
        if not work and not swaps:
            return None
        self._step += 1
        return StepPlan(self._step, work, swaps, self._preemptor.take_copies())

    def stepped(self, plan: StepPlan) -> list[Stepped]:
        """Returns the (request, sequence) of each work item in the latest plan."""
        assert len(plan.work) == len(self._stepped), "one step is planned, and then it is committed"
        return self._stepped

    def commit(self, plan: StepPlan) -> list[DecodeRequest]:
        """Records the end of a step; returns its requests in the plan's order, including closing ones."""
        for work, (_, sequence) in zip(plan.work, self.stepped(plan), strict=True):
            sequence.computed_tokens = work.span.stop
        requests = list(dict.fromkeys(request for request, _ in self._stepped))
        self._stepped = []
        for request in requests:
            request.in_step = False
            request.again = request.again and request.left_tokens > 0
        return requests

    def move_back(self, request: DecodeRequest) -> None:
        """Moves the request behind all others, so that each is planned when they exceed `max_batch`."""
        self._requests[request.key] = self._requests.pop(request.key)

    def _works(self) -> list[Work]:
        """Returns the work items of the next step.

        Requests that lack pages move behind the others, like those that were planned. Otherwise they would fill the
        batch for ever, and keep out the oldest request, the only one that may preempt all of them.
        """
        tried = 0
        while tried < len(self._requests) and (batch := self._batch()):
            tried += len(batch)
            taken = dict.fromkeys(self._preemptor.make_room(list(batch)))
            for request in batch if len(taken) < len(batch) else ():
                if request not in taken:
                    self.move_back(request)
            if taken:
                work: list[Work] = []
                for request in taken:
                    self._plan(request, batch[request], work)
                return work
        return []

    def _batch(self) -> dict[DecodeRequest, list[int]]:
        """Returns the candidates of the next step, with a token count for each of their sequences.

        At most `max_batch` sequences, and of recomputed ones `chunks.chunk_tokens` tokens in all.
        """
        batch: dict[DecodeRequest, list[int]] = {}
        free, budget_tokens, must = self._max_batch, self._chunks.chunk_tokens, True
        for request in self._requests.values():
            if free == 0:
                break
            if not self._preemptor.runs(request):
                continue
            if request.some_ended and not request.again:
                self._forks.prune(request)
            count = len(request.sequences)
            if count > free:
                continue
            counts = _ONE if count == 1 else [1] * count
            if request.again:
                counts = self._recomputed(request.sequences, budget_tokens, must=must)
                budget_tokens -= sum(counts)
                if not any(counts):
                    continue
                must = False
            batch[request] = counts
            free -= count
        return batch

    def _recomputed(self, sequences: Iterable[Sequence], budget_tokens: int, *, must: bool) -> list[int]:
        """Returns how many tokens of each sequence are recomputed: not the last, which all compute in one step.

        In order: an earlier sequence computes the tokens that a later one shares with it, in this step or before.
        """
        counts: list[int] = []
        for sequence in sequences:
            left = sequence.left_tokens - 1
            start = sequence.computed_tokens
            count = self._chunks.take_behind(
                start, len(sequence.prompt), start + left, budget_tokens, must=must and not any(counts)
            )
            budget_tokens = budget_tokens - count if count == left else 0
            counts.append(count)
        return counts

    def _plan(self, request: DecodeRequest, counts: list[int], works: list[Work]) -> None:
        request.in_step = True
        for sequence, count in zip(request.sequences, counts, strict=True):
            if count == 0:
                continue
            like = request.sequences[0].block_table.row if sequence.begin_like(request.sequences[0]) else -1
            first, pages = sequence.publish_pages()
            self._stepped.append((request, sequence))
            works.append(
                Work(
                    request.key,
                    request.ticket.number,
                    sequence.block_table.row,
                    sequence.computed_tokens,
                    sequence.next_tokens(count) if request.again else sequence.tokens[-1:],
                    request.prompt_tokens,
                    pages,
                    first,
                    like,
                )
            )

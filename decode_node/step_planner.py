"""Step planning of the decode group: which sequences the next step computes, and how many tokens of each.

With `SchedulerOptions.steps_ahead` the next step is planned while a step is in flight, as in vLLM's asynchronous
scheduling and SGLang's overlap scheduler. The new plan refers to tokens that the step in flight has not sampled yet.
While a step is in flight, these rules apply:

    a sequence reaches its length limit      the sequence is not planned again
    a sampled token ends a sequence          the next step, planned before, computes one token too many, which is
                                             dropped
    pages of an ended sequence               stay allocated until no step in flight computes the request
    beams, penalties, recomputation          the request is planned again after the commit of its step, together with
                                             all such requests, so that they do not split into two batches
    preemption, or no page for a token       nothing is planned before the step in flight is committed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from decode_node.answer_states import AnswerStates
from decode_node.forks import Forks
from decode_node.preemptor import Preemptor
from decode_node.request import DecodeRequest, Sequence
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.local_prefill import pauses, prefill_room
from disagg.core.types import RequestKey
from disagg.kv.cache_operations import NO_CACHE_WORK
from disagg.model.mixed_graphs import CHUNKS
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StateCopy, StepPlan, Work

_ONE = [1]
"""Token counts of a request with one sequence that is not recomputed."""


class Stepped(msgspec.Struct, frozen=True, eq=False):
    """A work item of a step in flight."""

    request: DecodeRequest
    sequence: Sequence
    samples: bool
    """Whether the sequence's next token is sampled; False for a chunk of a prompt or of recomputed tokens."""

    @property
    def prefills(self) -> bool:
        """Whether the item is a chunk of a new request's prompt."""
        return self.request.prefills and not self.samples


class StepPlanner:
    """Plans the steps of a decode group. Pure: no threads, no clocks, no I/O. Changes the order of `requests`."""

    def __init__(
        self,
        kv_manager: KVManager,
        options: SchedulerOptions,
        requests: dict[RequestKey, DecodeRequest],
        preemptor: Preemptor,
        forks: Forks,
    ) -> None:
        self._kv_manager, self._requests = kv_manager, requests
        self._preemptor, self._forks = preemptor, forks
        self._max_batch, self._chunks = options.max_batch, options.chunks
        self._prefill_tokens = options.local_prefill_tokens
        self._answer_states = AnswerStates(kv_manager, options.chunks, options.state_interval_tokens)
        self._steps_ahead = options.steps_ahead
        self._step = 0
        self._since_prefill = 0
        """Steps since the last one with prompts of new requests."""
        self._state_copies: list[StateCopy] = []
        """Copies of recurrent states to forks before the step, in the plan under construction."""
        self._state_gifts: list[StateCopy] = []
        """Copies of recurrent states to other sequences' rows and to the prefix cache after the step, in the plan
        under construction."""
        self._in_flight: deque[list[Stepped]] = deque()
        """Work items of the steps that are planned and not committed, oldest first, in the order of their plans."""

    @property
    def in_flight(self) -> int:
        """Number of steps that are planned and not committed."""
        return len(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the latest step in flight has no seat for another sequence."""
        return bool(self._in_flight) and len(self._in_flight[-1]) >= self._max_batch

    def next_step(self) -> StepPlan | None:
        """Returns a plan with one token of each running sequence, and chunks of recomputed sequences.

        Returns None if the plan would be empty, while the limit of steps in flight is reached, or while the next step
        depends on the outcome of the steps in flight.
        """
        if self.in_flight > self._steps_ahead:
            return None
        self._state_copies, self._state_gifts = [], []
        stepped, work = self._planned()
        swaps = self._preemptor.take_orders()
        # A plan of cache operations alone would make the ranks end the step in flight first.
        goes = bool(work or swaps or not self._in_flight)
        cache = self._kv_manager.take_cache_work() if goes else NO_CACHE_WORK
        if not (work or swaps or any(cache)):
            return None
        self._step += 1
        chunks = [one for one in stepped if not one.samples]
        if work:
            prefilled = any(one.prefills for one in chunks)
            self._since_prefill = 0 if prefilled else self._since_prefill + 1
            self._in_flight.append(stepped)
            self._state_gifts += self._answer_states.launched()
        shared = self._steps_ahead > 0 and len(chunks) < len(stepped)
        copies, given = self._state_copies, self._state_gifts
        page_copies = self._preemptor.take_copies()
        arriving = next(
            (one.request.ticket.number for one in chunks if self._preemptor.arrives(one.request)), None
        )
        return StepPlan(
            self._step,
            work,
            swaps,
            page_copies,
            shared,
            copies,
            given,
            arriving_ticket=arriving,
            **cache._asdict(),
        )

    def stepped(self, plan: StepPlan) -> list[Stepped]:
        """Returns the work items of the latest plan."""
        assert len(plan.work) == len(self._in_flight[-1]), "plans are launched in their order"
        return self._in_flight[-1]

    def commit(self, plan: StepPlan) -> list[DecodeRequest]:
        """Records the end of the oldest step in flight, and moves its requests back; returns them in the plan's
        order."""
        stepped = self._in_flight.popleft()
        for work, one in zip(plan.work, stepped, strict=True):
            sequence = one.sequence
            sequence.computed_tokens = work.start + len(work.tokens)
            if one.samples:
                sequence.ahead_tokens -= 1
            else:
                sequence.chunk_ahead_tokens -= len(work.tokens)
        self._answer_states.commit()
        requests = list(dict.fromkeys([one.request for one in stepped]))
        for request in requests:
            request.steps -= 1
            if request.again:
                request.again = request.left_tokens > 0
            self.move_back(request)
        return requests

    def move_back(self, request: DecodeRequest) -> None:
        """Moves a request to the end of the planning order, so that all progress if more than `max_batch` run."""
        self._requests[request.key] = self._requests.pop(request.key)

    def _planned(self) -> tuple[list[Stepped], list[Work]]:
        """Returns the work items of the next step."""
        stepped: list[Stepped] = []
        works: list[Work] = []
        for request, counts in self._chosen().items():
            request.steps += 1
            samples = not request.in_chunks
            if counts is _ONE:
                works.append(self._plan(request, request.sequences[0], 1, samples, stepped))
                continue
            for sequence, count in zip(request.sequences, counts, strict=True):
                if count:
                    works.append(self._plan(request, sequence, count, samples, stepped))
        return stepped, works

    def _chosen(self) -> dict[DecodeRequest, list[int]]:
        """Returns the requests of the next step, with a token count for each of their sequences.

        Planned requests, and requests that lack pages, move to the end of the order. Otherwise requests that lack
        pages would fill every batch and keep out the oldest request, the only one that may preempt all others.
        """
        self._preemptor.resume()
        if self._in_flight:
            batch = self._batch()
            return batch if self._preemptor.grow(batch) else {}
        tried = 0
        while tried < len(self._requests) and (batch := self._batch()):
            tried += len(batch)
            taken = dict.fromkeys(self._preemptor.make_room(list(batch)))
            for request in batch if len(taken) < len(batch) else ():
                if request not in taken:
                    self.move_back(request)
            if taken:
                return {request: batch[request] for request in taken}
        return {}

    def _batch(self) -> dict[DecodeRequest, list[int]]:
        """Returns the candidates of the next step, with a token count for each of their sequences.

        The candidates have at most `max_batch` sequences; see `_chunks_of` for chunks. While a step is in flight, a
        sequence whose next token depends on the step's outcome is no candidate.
        """
        ready = self._preemptor.running()
        if not ready:
            return self._arriving()
        if self._in_flight and any(one.request.step_decides for one in self._in_flight[-1]):
            ready = [request for request in ready if not request.step_decides]
        chunks: dict[DecodeRequest, list[int]] = {}
        computing = [request for request in ready if request.in_chunks]
        if computing:
            ready = [request for request in ready if not request.in_chunks]
            chunks = self._chunks_of(computing, sum(len(request.sequences) for request in ready))
        return self._singles(ready, sum(len(request.sequences) for request in chunks)) | chunks

    def _singles(self, ready: Iterable[DecodeRequest], taken: int) -> dict[DecodeRequest, list[int]]:
        """Returns those of the requests that get seats beside `taken` sequences of chunks, with 1 token for each
        sequence that goes on."""
        batch: dict[DecodeRequest, list[int]] = {}
        free, in_flight = self._max_batch - taken, self.in_flight
        for request in ready:
            if free == 0:
                break
            if request.some_ended:
                self._forks.prune(request)
            count = len(request.sequences)
            if count > free:
                continue
            if count == 1 and (not in_flight or request.sequences[0].may_go_on):
                counts = _ONE
            else:
                counts = [int(not in_flight or one.may_go_on) for one in request.sequences]
                if not any(counts):
                    continue
            batch[request] = counts
            free -= count
        return batch

    def _arriving(self) -> dict[DecodeRequest, list[int]]:
        """Returns the oldest request whose prompt's tail can be computed while the KV before it still arrives.

        No other request runs, so none waits for this KV.
        """
        arriving = [one for one in self._requests.values() if one.in_chunks and self._preemptor.arrives(one)]
        first = min(arriving, key=lambda one: one.order, default=None)
        return self._first_chunks([first], self._chunks.chunk_tokens, self._max_batch) if first else {}

    def _chunks_of(self, computing: Iterable[DecodeRequest], running: int) -> dict[DecodeRequest, list[int]]:
        """Returns the requests whose chunks the next step computes, with a token count for each sequence.

        The oldest request comes first. Preempted requests get `chunks.chunk_tokens` in all. Otherwise prompts of new
        requests get what `running` sequences leave of `local_prefill_tokens`, so that no answer stalls (stall-free
        batching, Sarathi-Serve, Agrawal et al., OSDI 2024); while none runs, the tail of a prompt gets a whole chunk.
        The prompts use free seats of the batch, one if there are none, and at most `CHUNKS`, like recorded steps.
        Steps without prompts follow: more of them if more sequences run, fewer if more prompts wait.
        """
        oldest = sorted(computing, key=lambda one: one.order)
        preempted = [request for request in oldest if not request.prefills]
        batch = self._first_chunks(preempted, self._chunks.chunk_tokens, self._max_batch)
        full = running >= self._max_batch
        prompts = [request for request in oldest if request.prefills]
        if not batch and prompts and self._since_prefill >= max(pauses(running, len(prompts)), int(full)):
            seats = 1 if full else min(CHUNKS, self._max_batch - running)
            room_tokens = prefill_room(self._prefill_tokens, min(running, self._max_batch))
            if prompts[0].tail and not running:  # the router expects that the group computes it at once
                room_tokens = self._chunks.chunk_tokens
            batch = self._first_chunks(prompts, room_tokens, seats)
        return batch

    def _first_chunks(
        self, requests: Iterable[DecodeRequest], budget_tokens: int, seats: int
    ) -> dict[DecodeRequest, list[int]]:
        """Returns the first of `requests` that fit the budget and the seats, with a token count for each sequence."""
        batch: dict[DecodeRequest, list[int]] = {}
        for request in requests:
            if len(request.sequences) > seats:
                continue
            counts = self._recomputed(request.sequences, budget_tokens, must=not batch)
            if any(counts):
                budget_tokens -= sum(counts)
                seats -= len(request.sequences)
                batch[request] = counts
        return batch

    def _recomputed(self, sequences: Iterable[Sequence], budget_tokens: int, *, must: bool) -> list[int]:
        """Returns the number of tokens that the next step recomputes for each sequence.

        The last known token is not included: all sequences compute their last tokens together in one step.

        The order of sequences matters: an earlier sequence computes the tokens that a later one shares, in this step
        or before.
        """
        counts: list[int] = []
        for sequence in sequences:
            start = sequence.planned_tokens
            left = 0 if sequence.awaits_state else sequence.known_tokens - 1 - start
            stop = start + left
            if sequence.state_heirs:
                stop = min(stop, sequence.state_heirs[0][0])
            prompt = min(len(sequence.prompt), stop)
            count = self._chunks.take_behind(
                start, prompt, stop, budget_tokens, must=must and not any(counts)
            )
            budget_tokens = budget_tokens - count if count == left else 0
            counts.append(count)
        return counts

    def _plan(
        self, request: DecodeRequest, sequence: Sequence, count: int, samples: bool, stepped: list[Stepped]
    ) -> Work:
        """Returns the work item of a sequence's next `count` tokens, and adds the sequence to `stepped`."""
        leading, states = request.sequences[0], self._answer_states
        begins_like = sequence.begin_like(leading)
        first, pages = sequence.publish_pages()
        start = sequence.planned_tokens + sequence.ahead_tokens
        work = Work(
            request.key,
            request.ticket.number,
            sequence.block_table.row,
            start,
            [sequence.last_token()] if samples else sequence.next_tokens(count),
            len(request.prompt),
            pages,
            first,
            leading.block_table.row if begins_like else -1,
            saves=states.planned(request, sequence, start, start + count) if states.caches else [],
        )
        if sequence.state_source >= 0 or sequence.state_heirs:
            self._move_states(sequence, sequence.computed_tokens + count)
        sequence.work_index = len(stepped)
        if samples:
            sequence.ahead_tokens += 1
        else:
            sequence.chunk_ahead_tokens += count
        stepped.append(Stepped(request, sequence, samples))
        return work

    def _move_states(self, sequence: Sequence, stop: int) -> None:
        """Plans the copies of recurrent states before and after the step that computes `sequence` up to `stop`."""
        row = sequence.block_table.row
        if sequence.state_source >= 0:
            self._state_copies.append(StateCopy(sequence.state_source, row))
            sequence.state_source = -1
            self._kv_manager.unlock_state(sequence.block_table)  # plans order all uses of a slot
        while sequence.state_heirs and sequence.state_heirs[0][0] == stop:
            _, heir = sequence.state_heirs.pop(0)
            self._state_gifts.append(StateCopy(row, heir.block_table.row))
            heir.awaits_state = False

"""Recurrent states of forks that are preempted and recomputed: each step continues from its sequence's own state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from decode_node.costs import CostEstimates
from decode_node.request import DecodeRequest, NewRequest
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.state_slots import StateSlots
from disagg.model.chunks import PromptChunks
from disagg.model.sampling.beam_search import Candidate
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StateCopy

PAGE = 4
Choose = Callable[[int], int]
"""Returns a number below its argument."""


def kv_of(tokens: Sequence[int]) -> list[int]:
    """The KV of each position, which depends on all tokens up to it."""
    return list(itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


class StatefulRank:
    """What a rank's pools have after each plan: the tokens of the state of each row and slot, and the KV."""

    def __init__(
        self, prompt_tokens: int, sampling: SamplingParams, chunk_tokens: int, cached_states: int = 0
    ) -> None:
        kv_manager = KVManager(
            pool_tokens=512,
            page_size=PAGE,
            rows=5,
            eviction="lru" if cached_states else None,
            states=StateSlots(6, cached_states),
            receives_states=True,
        )
        chunks = PromptChunks(chunk_tokens, recurrent=True, single=True)
        options = SchedulerOptions(
            group="decode",
            ranks=1,
            max_batch=5,
            max_context_tokens=200,
            first_ticket=0,
            chunks=chunks,
            rates=CostEstimates(1e3, 1e3),
            preemption="recompute",
        )
        self.scheduler = DecodeScheduler(kv_manager, options)
        self.tokens = itertools.count(1000)
        prompt = pack_tokens(range(prompt_tokens))
        self.request = self.scheduler.reserve(
            NewRequest(
                RequestKey("r0"),
                prompt,
                sampling,
                router="",
                prefill_group="",
                deadline_s=0.0,
                prefix=PrefixKey.of(prompt) if cached_states else None,
            )
        )
        self.states = {self.request.ticket.row: tuple(prompt)}
        self.kv: dict[int, int] = {}
        self.write(self.request.sequences[0].block_table, prompt, 0, prompt_tokens)
        self.request.landed_ranks.add(0)
        self.request.begun = True
        if sampling.beams:
            self.branch([0] * sampling.beams)
        else:
            for sequence in self.request.sequences:
                sequence.tokens.append(next(self.tokens))

    def branch(self, parents: list[int]) -> None:
        beams = [Candidate(0.0, parent, next(self.tokens)) for parent in parents]
        self.scheduler.branch(self.request, beams)

    def write(self, table: BlockTable, known: Sequence[int], start: int, stop: int) -> None:
        """Writes the KV of the positions `start .. stop`."""
        kv = kv_of(known[:stop])
        self.kv |= {self.slot(table, at): kv[at] for at in range(start, stop)}

    @staticmethod
    def slot(table: BlockTable, position: int) -> int:
        return table.pages[position // PAGE] * PAGE + position % PAGE

    def make_room(self, pages: int) -> None:
        """Another sequence of the group takes pages, if necessary from the cache, and ends at once."""
        other = self.scheduler.kv_manager.reserve(pages * PAGE)
        if other is not None:
            self.write(other, [0] * (pages * PAGE), 0, pages * PAGE)
            self.scheduler.kv_manager.release(other)

    def copy(self, copies: list[StateCopy]) -> None:
        self.states |= {one.destination: self.states[one.source] for one in copies}

    def step(self, choose: Choose) -> None:
        """A step of the request, which every rank computes, with new tokens or beams at its end."""
        plan = self.scheduler.next_step()
        assert plan is not None, "the request goes on"
        self.copy(plan.state_copies)
        for page in plan.copies:
            for at in range(PAGE):
                if (kv := self.kv.get(page.source * PAGE + at)) is not None:
                    self.kv[page.destination * PAGE + at] = kv
        stepped = self.scheduler.stepped(plan)
        for work, one in zip(plan.work, stepped, strict=True):
            known = (*self.request.prompt, *one.sequence.tokens)
            state = () if work.start == 0 else self.states[work.row]
            assert state == known[: work.start], f"row {work.row} has another state"
            self.states[work.row] = known[: work.span.stop]
            self.states |= {slot: known[:tokens] for tokens, slot in work.saves}
            self.write(one.sequence.block_table, known, work.start, work.span.stop)
        for work, one in zip(plan.work, stepped, strict=True):
            known, table = (*self.request.prompt, *one.sequence.tokens), one.sequence.block_table
            found = [self.kv[self.slot(table, at)] for at in range(work.span.stop)]
            assert found == kv_of(known[: work.span.stop]), "other KV"
        self.copy(plan.state_saves)
        sampled = [one.sequence for one in stepped if one.samples]
        self.scheduler.commit(plan)
        if sampled and self.request.sampling.beams:
            self.branch([choose(len(sampled)) for _ in sampled])
        for sequence in sampled if not self.request.sampling.beams else ():
            sequence.tokens.append(next(self.tokens))
        self.scheduler.check()


@pytest.mark.parametrize("chunk_tokens", [3, 64])
@pytest.mark.parametrize("kind", ["one", "answers", "beams"])
def test_recomputation_begins_at_cached_states(kind: str, chunk_tokens: int) -> None:
    kept = recomputed = from_the_beginning = 0
    for seed in range(15):
        choose = random.Random(seed)
        count = 1 if kind == "one" else choose.randint(2, 4)
        sampling = SamplingParams(max_tokens=60, n=count, beams=count if kind == "beams" else 0)
        rank = StatefulRank(choose.randint(1, 19), sampling, chunk_tokens, choose.choice([1, 3, 9, 30]))
        preemptor = rank.scheduler.preemptor
        for _ in range(60):
            if choose.random() < 0.15:
                preemptor.preempt(rank.request)
                rank.make_room(choose.choice([1, 60, 110, 125]))
                recomputed += 1
            before = preemptor.counts.kept_tokens
            rank.step(choose.randrange)
            from_the_beginning += rank.request.again and preemptor.counts.kept_tokens == before
            kept += preemptor.counts.kept_tokens > before
            if min(answers_of(rank.request)) > 50:
                break
        rank.scheduler.close(rank.request)
        rank.scheduler.rank_closed(rank.request, 0)
        memory = rank.scheduler.statistics().memory
        assert memory.cache is not None
        assert (memory.free_rows, memory.cache.held_states, memory.cache.locked_states) == (5, 0, 0)
        assert memory.cache.locked_pages == 0
        rank.scheduler.check()
    assert recomputed > 30
    assert kept > 10, "and states and pages that were evicted"
    assert from_the_beginning > 10


def answers_of(request: DecodeRequest) -> list[int]:
    return [len(sequence.tokens) for sequence in request.sequences]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("kind", ["answers", "beams"])
def test_recomputed_forks_have_their_own_states(kind: str, chunk_tokens: int) -> None:
    recomputed = 0
    for seed in range(25):
        choose = random.Random(seed)
        count = choose.randint(2, 4)
        sampling = SamplingParams(max_tokens=60, n=count, beams=count if kind == "beams" else 0)
        rank = StatefulRank(choose.randint(1, 19), sampling, chunk_tokens)
        for _ in range(60):
            if choose.random() < 0.15:
                rank.scheduler.preemptor.preempt(rank.request)
                recomputed += 1
            rank.step(choose.randrange)
            if min(answers_of(rank.request)) > 50:
                break
        while rank.request.again:
            rank.step(choose.randrange)
        before = answers_of(rank.request)
        rank.step(choose.randrange)
        assert sum(answers_of(rank.request)) == sum(before) + count, "all sequences go on together"
    assert recomputed > 50


def test_an_ended_answer_keeps_the_row_of_its_ticket_until_the_request_ends() -> None:
    rank = StatefulRank(9, SamplingParams(max_tokens=60, n=3), 64)
    first, row = rank.request.sequences[0], rank.request.ticket.row
    rank.scheduler.end(rank.request, first)
    rank.step(lambda count: 0)
    assert rank.request.kept_row is not None
    assert rank.request.kept_row.row == row, "the forks copied its state in this step"
    rank.step(lambda count: 0)
    rank.scheduler.close(rank.request)
    rank.scheduler.rank_closed(rank.request, 0)
    assert rank.scheduler.statistics().memory.free_rows == 5
    rank.scheduler.check()

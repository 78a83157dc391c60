"""Scheduler of a colocated group. Pure: no threads, no clocks, no I/O.

Each step decodes a token of every running answer. The rest of the step's token budget goes to prompt chunks, so
prompts never stall answers (chunked prefill with stall-free batching, Sarathi-Serve, Agrawal et al., 2024).

A prompt whose cached KV is being loaded from host memory joins a step in two ways. While no answer runs, the step
waits for the load on the device, layer by layer; the prompt must be the first of the step, so that no earlier prompt
waits for the load. Otherwise the prompt joins after the last rank has reported the load, so that no answer waits.

With `steps_ahead` a step is planned while the step before is in flight: the plan refers to tokens that are not
sampled yet. A token that ends an answer is then known too late, and the next step computes one token too many, which
is dropped; see docs/design/steps.md.

Owner of a request's row and pages (its block table), and the code that frees them:

    [reserve, settled)     the request; cached pages also belong to the cache and to other requests
    settled                `_settle` frees, once the request is closing and no step in flight computes the request.
                           No report of the ranks is needed: they use pages in steps only, in the order of plans
    [computed, evicted)    the prefix cache owns full pages of prompts and answers; see `disagg.node.kv_manager`
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disagg.core.errors import BusyError, InvariantError, PromptTooLongError
from disagg.core.prefixes import PrefixKey, Tier
from disagg.core.tokens import TokenIds, tokens_at
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.kv.cache_operations import NO_CACHE_WORK
from disagg.kv.event_log import KVEventLog
from disagg.model.chunks import PromptChunks
from disagg.model.sampled_tokens import token_of
from disagg.model.sampling.constraints import AnswerConstraint
from disagg.model.sampling.penalties import TokenHistory
from disagg.node.block_table import BlockTable, awaited_loads
from disagg.node.kv_manager import KVManager, KVManagerStatistics
from disagg.node.plan import StepPlan, Work, token_after
from disagg.node.state_saves import SavedStates, StateSaves
from transport.tags import TICKET_NUMBERS


@dataclass(slots=True, eq=False)
class ColocatedRequest:
    """State of a request in a colocated group."""

    key: RequestKey
    ticket: Ticket
    prompt: TokenIds
    sampling: SamplingParams
    router: str
    deadline_s: float
    """Deadline of the request, on the leader's clock."""
    block_table: BlockTable | None
    """The request's row and pages; None once freed."""
    prefix: PrefixKey | None = None
    """Key of the prompt in the prefix cache; None if the KV must not be cached."""
    answered: int = 0
    """Number of `tokens` that a lost group generated before this attempt. Their KV is computed in chunks, like the KV
    of the prompt."""
    states: SavedStates = field(default_factory=SavedStates)
    """Recurrent states for the prefix cache."""
    started: bool = False
    """Whether the router has sent `Prefill`."""
    planned_tokens: int = 0
    """Number of tokens of prompt and earlier answer that are computed or part of a step in flight."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the answer that the host has read."""
    ahead_tokens: int = 0
    """Number of tokens after `tokens` that steps in flight sample."""
    work_index: int = 0
    """Index of the request's latest work item in its plan."""
    priority: int = 0
    """Prompts of requests with a lower number are computed first."""
    history: TokenHistory | None = None
    """Token counts for penalties, owned by the compute thread; None without penalties."""
    constraint: AnswerConstraint | None = None
    """Grammar of the answer; None without one."""
    steps: int = 0
    """Number of steps in flight that compute the request; until they end, its memory must not be freed."""
    closing: bool = False
    release_requested: bool = False
    """Whether the router waits for `Released`."""

    @property
    def begin_tokens(self) -> int:
        """Number of tokens to compute before a token is sampled: the prompt, and the answer of an earlier attempt."""
        return len(self.prompt) + self.answered

    @property
    def answers(self) -> bool:
        """Whether the prompt is computed, or part of a step in flight, so that the next work is an answer's token."""
        return len(self.tokens) + self.ahead_tokens > self.answered

    @property
    def step_decides(self) -> bool:
        """Whether the next step can be planned only after the commit of the step in flight: with penalties."""
        return self.history is not None

    def samples(self, work: Work) -> bool:
        """Returns whether a step with `work` samples a token for the request."""
        return work.span.stop >= self.begin_tokens


@dataclass(frozen=True, slots=True)
class ColocatedStatistics:
    """Counts of the scheduler at one moment."""

    reserved: int
    """Requests whose `Prefill` has not arrived."""
    prefilling: int
    decoding: int
    closing: int
    memory: KVManagerStatistics


class ColocatedScheduler:
    """Continuous batching of answers and prompt chunks; prompts are computed by priority, then first come, first
    served."""

    def __init__(
        self,
        kv_manager: KVManager,
        *,
        group: str,
        chunks: PromptChunks,
        max_batch: int,
        max_context_tokens: int,
        first_ticket: int,
        state_interval_tokens: int = 1,
        steps_ahead: int = 0,
    ) -> None:
        """`chunks.chunk_tokens`: token budget of a step; `max_batch`: largest number of answers in a step.

        If answers use the whole budget, the step still has the smallest prompt chunk, so prompts never starve.
        `state_interval_tokens`: distance between cached recurrent states of a prompt; see `GroupConfig`.
        `steps_ahead`: number of steps that may be planned while a step is in flight, 0 or 1.
        """
        self._states = StateSaves(kv_manager, chunks, state_interval_tokens)
        self.kv_manager = kv_manager
        self._group = group
        self._chunks = chunks
        self._max_batch = max_batch
        self._max_tokens = min(max_context_tokens, kv_manager.capacity_tokens)
        self._numbers = itertools.count(first_ticket)
        self._step = 0
        self.steps_ahead = steps_ahead
        """Number of steps that may be planned while a step is in flight."""
        self.steps_in_flight = 0
        """Number of steps with work that are planned and not committed."""
        self.requests: dict[RequestKey, ColocatedRequest] = {}

    def reserve(
        self,
        key: RequestKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        router: str,
        deadline_s: float,
        prefix: PrefixKey | None = None,
        answered: Sequence[int] = (),
    ) -> ColocatedRequest:
        """Reserves a row and all pages of prompt and answer, so that the request can never run out of pages.

        `prefix`: key of the prompt in the prefix cache, whose hit provides the first pages. `answered`: tokens of the
        answer so far. Raises `PromptTooLongError`, `BusyError`.
        """
        self.require_fits(len(prompt), sampling)
        total = len(prompt) + sampling.max_tokens
        begin = prefix.extended(answered) if prefix is not None and sampling.prompt_logprobs is None else None
        block_table = self.kv_manager.reserve(total, begin)
        if block_table is None:
            memory = self.kv_manager.statistics()
            raise BusyError(
                f"the group has no room for {total} tokens now ({memory.pages.free_pages} pages and "
                f"{memory.free_rows} rows are free)"
            )
        number = next(self._numbers) % TICKET_NUMBERS
        # An empty span: no KV is transferred.
        ticket = Ticket(key, number, self._group, Span(0, 0), block_table.row)
        request = ColocatedRequest(
            key, ticket, prompt, sampling, router, deadline_s, block_table, prefix, len(answered)
        )
        request.tokens.extend(answered)
        request.planned_tokens = block_table.cached_tokens
        if prefix is not None:
            request.states = self._states.begin(block_table, request.begin_tokens)
        self.requests[key] = request
        return request

    def require_fits(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        """Raises `PromptTooLongError` if the request would not even fit an empty group."""
        if prompt_tokens + sampling.max_tokens > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} and answer of up to {sampling.max_tokens} tokens do not fit the group, "
                f"which takes {self._max_tokens} in all: raise colocated.max_context_tokens or "
                f"colocated.pool_tokens, or shorten prompt or answer"
            )

    def next_step(self) -> StepPlan | None:
        """Returns a plan with a token of each running answer, then prompt chunks up to the token budget.

        Returns None if the plan would be empty, or depends on the outcome of a step in flight.
        """
        if self.steps_in_flight > self.steps_ahead:
            return None
        answers = self._next_answers()
        work = [self._next_token(request) for request in answers]
        for request in answers:
            # To the end of the order: with more answers than `max_batch`, all make progress.
            self.requests[request.key] = self.requests.pop(request.key)
        work += self._prompts(self._chunks.chunk_tokens - len(work))
        # A plan of cache operations alone would make the ranks end the step in flight first.
        goes = bool(work or not self.steps_in_flight)
        cache = self.kv_manager.take_cache_work() if goes else NO_CACHE_WORK
        if not (work or any(cache)):
            return None
        self._step += 1
        self.steps_in_flight += bool(work)
        sampled = self._count_ahead(work)
        copies, saves = self._states.take_copies(), self._states.take_saves()
        return StepPlan(
            self._step,
            work,
            shared=self.steps_ahead > 0 and sampled,
            state_copies=copies,
            state_saves=saves,
            awaited_loads=awaited_loads((self.requests[one.key].block_table, one.start) for one in work),
            **cache._asdict(),
        )

    def commit(self, plan: StepPlan) -> None:
        """Commits the oldest step in flight, after the leader has stored the sampled tokens."""
        self.steps_in_flight -= bool(plan.work)
        for work in plan.work:
            request = self.requests[work.key]
            request.steps -= 1
            request.ahead_tokens -= request.samples(work)
            if work.span.stop == request.begin_tokens:  # cache now: queued requests may have the same prefix
                self._keep(request)
            self._settle(request)

    def close(self, request: ColocatedRequest) -> None:
        """Closes a request: at once, or at the end of the step that computes it. Idempotent."""
        request.closing = True
        self._settle(request)

    @property
    def caches_prefixes(self) -> bool:
        """Whether the group has a prefix cache."""
        return self.kv_manager.caches

    @property
    def kv_events(self) -> Mapping[Tier, KVEventLog]:
        """KV events of each tier of the prefix cache, for routers; empty without a prefix cache."""
        return self.kv_manager.kv_events

    def statistics(self) -> ColocatedStatistics:
        """Returns the counts at this moment."""
        live = [request for request in self.requests.values() if not request.closing]
        return ColocatedStatistics(
            reserved=sum(not r.started for r in live),
            prefilling=sum(r.started and not r.answers for r in live),
            decoding=sum(r.answers for r in live),
            closing=len(self.requests) - len(live),
            memory=self.kv_manager.statistics(),
        )

    def check(self) -> None:
        """Raises `InvariantError` unless each used row and page belongs to one request, and all steps are counted."""
        for request in self.requests.values():
            if not 0 <= request.ahead_tokens <= request.steps <= self.steps_in_flight <= 1 + self.steps_ahead:
                raise InvariantError(
                    f"{request.key}: {request.steps} steps, {request.ahead_tokens} tokens ahead"
                )
        self.kv_manager.check([[r.block_table] for r in self.requests.values() if r.block_table is not None])

    def _next_answers(self) -> list[ColocatedRequest]:
        """Returns the requests whose next token the next step computes, at most `max_batch`.

        While a step in flight decides about an answer, all such answers wait: otherwise they would split into two
        batches. After a first token only its own request waits, so that prompts never stall answers.
        """
        undecided = any(
            one.ahead_tokens and one.step_decides and len(one.tokens) > one.answered
            for one in self.requests.values()
        )
        going = (
            one
            for one in self.requests.values()
            if _goes_on(one) and not (one.step_decides and (undecided or one.ahead_tokens))
        )
        return list(itertools.islice(going, self._max_batch))

    def _count_ahead(self, works: Sequence[Work]) -> bool:
        """Counts the tokens that the planned step samples; returns whether it samples any."""
        sampled = False
        for index, work in enumerate(works):
            request = self.requests[work.key]
            request.work_index = index
            request.ahead_tokens += request.samples(work)
            sampled |= request.samples(work)
        return sampled

    def _next_token(self, request: ColocatedRequest) -> Work:
        position = len(request.prompt) + len(request.tokens) + request.ahead_tokens - 1
        known = [token_of(request.work_index)] if request.ahead_tokens else request.tokens[-1:]
        work = self._work(request, position, known)
        if request.prefix is not None and not request.prefix.prompt_only:
            self._states.answered(request.states, work.row, work.span.stop)
        return work

    def _prompts(self, left_tokens: int) -> list[Work]:
        work: list[Work] = []
        answering = any(map(_goes_on, self.requests.values()))
        for request in sorted(filter(_may_prefill, self.requests.values()), key=lambda one: one.priority):
            start, whole = request.planned_tokens, request.begin_tokens
            if (answering or work) and _awaits_load(request):
                continue  # later prompts overtake until the load ends
            prompt_tokens = len(request.prompt)
            take = self._chunks.take_behind(start, prompt_tokens, whole, left_tokens, must=not work)
            if take == 0:
                break  # no later request overtakes
            request.planned_tokens += take
            left_tokens -= take
            work.append(
                self._work(
                    request, start, tokens_at(request.prompt, request.tokens, start, request.planned_tokens)
                )
            )
        return work

    def _work(self, request: ColocatedRequest, start: int, tokens: list[int]) -> Work:
        assert request.block_table is not None, "a request owns memory until it closes"
        request.steps += 1
        pages = request.block_table.pages if start == request.block_table.cached_tokens else []
        number, row = request.ticket.number, request.block_table.row
        saves = self._states.planned(request.states, row, start + len(tokens))
        return Work(
            request.key,
            number,
            row,
            start,
            tokens,
            len(request.prompt),
            pages,
            saves=saves,
            likeliest=request.sampling.prompt_logprobs,
            next_token=token_after(request.prompt, start + len(tokens)),
        )

    def _settle(self, request: ColocatedRequest) -> None:
        if not request.closing or request.steps or request.block_table is None:
            return
        if request.planned_tokens == request.begin_tokens:
            self._keep(request)  # of an unfinished prompt, no logits have shown that the KV is valid
        self._states.drop(request.states)
        self.kv_manager.release(request.block_table)
        request.block_table = None
        del self.requests[request.key]

    def _keep(self, request: ColocatedRequest) -> None:
        """Caches the computed KV of the request; the latest token has no KV yet."""
        if request.prefix is None or request.block_table is None:
            return
        computed = request.planned_tokens + max(0, len(request.tokens) - request.answered - 1)
        if computed <= request.block_table.cached_tokens:
            return  # nothing was computed, and a part may still be loading from the second tier
        known = request.prefix.extended(request.tokens).shortened(computed)
        self._states.keep(request.states, request.block_table, known)


def _goes_on(request: ColocatedRequest) -> bool:
    """Returns whether the request gets another token: False if steps in flight reach the limit of the answer."""
    if request.closing or not request.answers:
        return False
    return len(request.tokens) + request.ahead_tokens < request.sampling.max_tokens


def _awaits_load(request: ColocatedRequest) -> bool:
    """Returns whether a step with the request's next chunk would wait for a load."""
    return request.block_table is not None and request.block_table.awaits_load(request.planned_tokens)


def _may_prefill(request: ColocatedRequest) -> bool:
    """Returns whether a step may compute more of the request's prompt; not while its grammar is being compiled."""
    if request.closing or not request.started or request.planned_tokens == request.begin_tokens:
        return False
    return request.constraint is None or request.constraint.ready

"""Admission to the decode group: decides which requests get a ticket, a row and pages."""

from __future__ import annotations

import itertools

from decode_node.preemptor import Preemptor
from decode_node.request import DecodeRequest, NewRequest, Residency, Resumption, Sequence
from decode_node.scheduler_options import SchedulerOptions
from disagg.core.errors import BusyError, DisaggError, InvalidRequestError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.sampling import sampling_of, sequences_that_fit
from disagg.core.types import SamplingParams, Span, Ticket
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager
from transport.tags import TICKET_NUMBERS

NOTHING = Resumption()
"""Default of `resumption` arguments: the request has no earlier attempt."""


class DecodeAdmission:
    """Reserves rows and pages for requests and creates their tickets. Pure: no threads, no clocks, no I/O."""

    def __init__(self, kv_manager: KVManager, options: SchedulerOptions, preemptor: Preemptor) -> None:
        self._kv_manager, self._options, self._preemptor = kv_manager, options, preemptor
        self._max_tokens = min(options.max_context_tokens, kv_manager.capacity_tokens)
        self._ages = itertools.count(options.first_ticket)

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences of one request. Each sequence needs a row, and one step computes all of them.

        The number is 1 if prompt chunks cannot end at every position. After a preemption, the shared prefix of
        several sequences is recomputed once, so a chunk must be able to end at the last shared token.
        """
        if not self._options.chunks.anywhere:
            return 1
        return min(self._options.max_batch, self._kv_manager.rows)

    def reserve(self, new: NewRequest, resumption: Resumption = NOTHING) -> DecodeRequest:
        """Reserves a row for each sequence, and pages for the KV that will be transferred.

        A prefix cache hit of the prompt provides the first pages. At least one token is transferred. The new request
        takes over the block table of `resumption`; an exception frees this block table. The ticket ends before the
        tail that the group computes; a prompt with a tail has no `resumption`.
        Raises `InvalidRequestError`, `PromptTooLongError`, `BusyError`.
        """
        prompt, sampling, answered = new.prompt, new.sampling, resumption.answered
        begin_tokens = len(prompt) + len(answered)
        try:
            self.require_fits(len(prompt), sampling, len(answered))
        except DisaggError:
            self.drop(resumption)
            raise
        begin = new.prefix.extended(answered) if new.prefix is not None else None
        sent_tokens = begin_tokens - new.tail_tokens
        if begin is not None and new.tail_tokens:
            begin = begin.shortened(sent_tokens)
        landing = (
            begin_tokens if self._options.has_kv else 1
        )  # one page: direct writes need a ticket with pages
        block_table, have_tokens = self._block_table(landing, sampling.sequences, begin, resumption)
        age = next(self._ages)
        tokens = Span(have_tokens if self._options.has_kv else begin_tokens, sent_tokens)
        first_page = tokens.start // self._kv_manager.page_size if self._options.has_kv else 0
        missing = tuple(block_table.pages[first_page:])
        number, group = age % TICKET_NUMBERS, self._options.group
        request = DecodeRequest(
            new.key,
            Ticket(new.key, number, group, tokens, block_table.row, missing),
            age,
            prompt,
            sampling,
            new.router,
            new.prefill_group,
            new.deadline_s,
            sequences=[],
            prefix=new.prefix,
        )
        for number in range(sampling.sequences):
            table = self._kv_manager.fork(block_table) if number else block_table
            assert table is not None, "a row is free for each sequence"
            own = sampling_of(sampling, number)
            one = Sequence(number, own, table, request.prompt, sent_tokens, list(answered))
            if number and self._options.chunks.recurrent:
                one.state_source = block_table.row
            request.sequences.append(one)
        request.tail = new.tail_tokens > 0
        request.again = request.tail and request.left_tokens > 0
        return request

    def drop(self, resumption: Resumption) -> None:
        """Frees the block table of an earlier attempt, if any, because no new request takes over the table."""
        if resumption.block_table is not None:
            self._kv_manager.release(resumption.block_table)

    def _passed_on(self, tokens: int, sequences: int, resumption: Resumption) -> BlockTable | None:
        """Returns the earlier attempt's block table, extended to `tokens` tokens.

        Returns None if there is no such table, or if rows or pages are short. While a preempted request waits for
        pages, the block table gets no further page.
        """
        if resumption.block_table is None:
            return None
        if resumption.kept_tokens == 0 or self._kv_manager.free_rows < sequences - 1:
            self.drop(resumption)
            return None
        spare_pages = self._preemptor.spare_pages()
        spare = self._kv_manager.free_pages if spare_pages is None else spare_pages
        return self._kv_manager.pass_on(resumption.block_table, resumption.kept_tokens, tokens, spare)

    def _block_table(
        self, tokens: int, sequences: int, prefix: PrefixKey | None, resumption: Resumption
    ) -> tuple[BlockTable, int]:
        """Reserves pages for `tokens` tokens; returns the block table and the number of leading tokens that have KV.

        Raises `BusyError` if rows or pages are short, or while a preempted request waits for pages.
        """
        passed_on = self._passed_on(tokens, sequences, resumption)
        if passed_on is not None:
            return passed_on, resumption.kept_tokens
        spare_pages = None if resumption.only_kept else self._preemptor.spare_pages()
        enough = spare_pages is not None and self._kv_manager.free_rows >= sequences
        block_table = self._kv_manager.reserve(tokens, prefix, spare_pages or 0) if enough else None
        if block_table is None:
            memory = self._kv_manager.statistics()
            preempted = sum(r.residency is not Residency.RESIDENT for r in self._preemptor.live())
            raise BusyError(
                f"the decode group has no room for {tokens} more tokens now "
                f"({self._kv_manager.free_pages} pages and {memory.free_rows} rows are free, "
                f"{preempted} requests wait for pages)"
            )
        return block_table, block_table.cached_tokens

    def require_fits(self, prompt_tokens: int, sampling: SamplingParams, answered_tokens: int = 0) -> None:
        """Raises `InvalidRequestError` or `PromptTooLongError` if a request would not even fit an empty group."""
        self._require_sequences(prompt_tokens, sampling)
        total = prompt_tokens + sampling.max_tokens
        if total > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} and answer of up to {sampling.max_tokens} tokens do not fit the decode "
                f"group, which takes {self._max_tokens} in all: raise decode.max_context_tokens or "
                f"decode.pool_tokens, or shorten prompt or answer"
            )

    def _require_sequences(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        if sampling.sequences > self.max_sequences:
            name = "beams" if sampling.beams else "n"
            raise InvalidRequestError(
                f"{name} = {sampling.sequences} is not allowed; this group computes up to {self.max_sequences} "
                f"sequences of one request (decode.max_batch, decode.max_requests; 1 if the model's prompts cannot "
                f"be cut at every position)"
            )
        size, pool_tokens = self._kv_manager.page_size, self._kv_manager.capacity_tokens
        fitting = sequences_that_fit(prompt_tokens, sampling.max_tokens, pool_tokens, size)
        if 1 < sampling.sequences > fitting:
            raise PromptTooLongError(
                f"a prompt of {prompt_tokens} tokens and {sampling.sequences} answers of up to {sampling.max_tokens} "
                f"tokens do not fit the decode group's {self._kv_manager.pages} pages of {size} tokens: raise "
                f"decode.pool_tokens, or request fewer or shorter answers"
            )

"""Changes the sequences of a request between steps: forks beams, frees ended sequences, and caches their pages."""

from __future__ import annotations

from collections.abc import Iterable

from decode_node.request import DecodeRequest, Residency, Sequence, common_pages
from decode_node.scheduler_options import SchedulerOptions
from disagg.model.sampling.beam_search import Candidate
from disagg.node.kv_manager import KVManager


class Forks:
    """Forks and frees sequences between steps. Pure: no threads, no clocks, no I/O."""

    def __init__(self, kv_manager: KVManager, options: SchedulerOptions) -> None:
        self._kv_manager, self._ranks = kv_manager, options.ranks
        self._recurrent = options.chunks.recurrent

    def branch(self, request: DecodeRequest, beams: list[Candidate]) -> None:
        """Replaces the request's sequences by `beams`, in this order; `beam.parent` indexes the old sequences.

        No step may be computing the request. An old sequence without a beam becomes a fork of a sequence with several
        beams.
        """
        before = request.sequences
        assert len(beams) == len(before), "as many beams as sequences"
        answers = [[*before[beam.parent].tokens, beam.token] for beam in beams]
        parents = {beam.parent for beam in beams}
        unused = [one for index, one in enumerate(before) if index not in parents]
        after: list[Sequence] = []
        for beam, answer in zip(beams, answers, strict=True):
            one = before[beam.parent]
            if beam.parent in parents:
                parents.discard(beam.parent)
            else:
                one = self._refork(unused.pop(), one)
            one.tokens, one.score = answer, beam.score
            after.append(one)
        request.sequences = after

    def _refork(self, unused: Sequence, parent: Sequence) -> Sequence:
        self._kv_manager.refork(unused.block_table, parent.block_table)
        unused.computed_tokens = parent.computed_tokens
        if self._recurrent:
            pending = parent.state_source >= 0
            unused.state_source = parent.state_source if pending else parent.block_table.row
        del unused.published_pages[common_pages(unused.published_pages, unused.block_table.pages) :]
        return unused

    def end(self, request: DecodeRequest, sequence: Sequence) -> bool:
        """Marks a sequence as ended. Returns whether all sequences have ended, which ends the request."""
        sequence.ended = request.some_ended = True
        return all(one.ended for one in request.sequences)

    def prune(self, request: DecodeRequest) -> None:
        """Frees the pages of ended sequences that no step in flight computes.

        During recomputation the release is deferred: the first sequence computes the tokens that all sequences share.
        """
        ended = [one for one in request.sequences if one.ended]
        unused = [one for one in ended if not one.ahead_tokens]
        request.some_ended = len(unused) < len(ended)
        for sequence in unused:
            self.cache(request, [sequence])
            request.sequences.remove(sequence)
            if sequence.block_table.row == request.ticket.row:  # the ticket keeps its row until it is closed
                if self._recurrent:  # forks may still copy the state of this row
                    self._kv_manager.vacate(sequence.block_table)
                    request.kept_row = sequence.block_table
                    continue
                heir = request.sequences[0]
                rows = heir.block_table.row, sequence.block_table.row
                sequence.block_table.row, heir.block_table.row = rows
                heir.published_pages = []
            self._kv_manager.release(sequence.block_table)

    def cache(self, request: DecodeRequest, sequences: Iterable[Sequence]) -> None:
        """Adds the full pages of the sequences to the prefix cache, if all KV has landed.

        No step may still write these pages. During a recomputation, and before the first token of a prompt that the
        group computes, nothing is added: no logits have shown yet that the KV is valid.
        """
        if request.prefills:
            return
        landed = len(request.landed_ranks) == self._ranks and request.begun and not request.loading
        if request.prefix is None or not landed or request.residency is not Residency.RESIDENT:
            return
        for sequence in sequences:
            if sequence.left_tokens > 1:
                return  # later sequences share tokens that this sequence has not recomputed yet
            known = request.prefix.extended(sequence.tokens).shortened(sequence.computed_tokens)
            self._kv_manager.keep(sequence.block_table, known)

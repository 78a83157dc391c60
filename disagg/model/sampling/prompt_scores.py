"""Log-probabilities of prompt tokens: computed in parts on the device, read by the host after the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from disagg.core.types import TokenLogprobs
from disagg.kv.upload import upload
from disagg.model.batch import StepBatch, first_indices
from disagg.model.host_copy import HostCopy
from disagg.model.sampling.fixed_point import log_softmax, top

PART_BYTES = 16 << 20
"""Size of the float32 logits of one part. The log-probabilities of a part take up to nine times as much memory."""


@dataclass(frozen=True)
class ScoredTokens:
    """Prompt tokens whose log-probabilities a step computes, or a part of them."""

    sink: PromptScores
    wanted: Sequence[tuple[int, int]]
    """For each token: block table row of its request, and number of most probable tokens to report."""
    index: torch.Tensor
    """int64 `[n]`: index, among the step's tokens, of the token before each token."""
    targets: torch.Tensor
    """int64 `[n]`: the tokens."""

    def parts(self, vocab: int) -> Iterator[ScoredTokens]:
        """Yields the tokens in parts, in order, each with logits of at most `PART_BYTES`, or of one token."""
        size = max(1, PART_BYTES // (4 * vocab))
        for at in range(0, len(self.wanted), size):
            cut = slice(at, at + size)
            yield ScoredTokens(self.sink, self.wanted[cut], self.index[cut], self.targets[cut])

    def add(self, logits: torch.Tensor, *, reads: bool) -> None:
        """Launches the log-probabilities of this part. `logits`: float32 `[n, vocab]`.

        Does nothing if not `reads`: on ranks whose host does not read the result.
        """
        if not reads:
            return
        most = min(max(count for _, count in self.wanted), logits.shape[-1])
        chosen = self.targets[:, None]
        ranks = (logits >= logits.gather(-1, chosen)).sum(dim=-1, keepdim=True)
        ids = torch.cat([chosen, top(logits, most).indices], dim=-1)
        values = torch.cat([ranks.double(), log_softmax(logits).gather(-1, ids).double()], dim=-1)
        ids = torch.cat([chosen, ids], dim=-1).double()
        self.sink.copies.append((self.wanted, HostCopy(torch.stack([ids, values], dim=-1))))


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of one step's prompt tokens. Filled and read by the compute thread of rank 0."""

    copies: list[tuple[Sequence[tuple[int, int]], HostCopy]] = field(default_factory=list)
    """Copies of the parts, float64 `[n, 2 + most, 2]`: (token, rank), (token, log-probability), and the most probable
    tokens with theirs."""

    def of(self, batch: StepBatch, device: torch.device) -> ScoredTokens:
        """Returns the tokens that the batch's `targets` name."""
        wanted: list[tuple[int, int]] = []
        index: list[int] = []
        targets: list[int] = []
        for first, one in zip(first_indices(batch.sequences), batch.sequences, strict=True):
            wanted += [(one.row, one.likeliest)] * len(one.targets)
            index += range(first, first + len(one.targets))
            targets += one.targets
        packed = upload([*index, *targets], device).view(2, -1)
        return ScoredTokens(self, wanted, packed[0], packed[1])

    def result(self) -> dict[int, list[TokenLogprobs]]:
        """Returns the log-probabilities of each request's tokens in order, by block table row. Waits for the device.

        Logits that are not finite give log-probabilities that are NaN.
        """
        found: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        for wanted, copy in self.copies:
            for (row, count), pairs in zip(wanted, copy.values(), strict=True):
                (_, rank), (token, logprob), *likely = pairs[: 2 + count]
                likeliest = tuple((int(one), value) for one, value in likely)
                found[row].append(TokenLogprobs(int(token), logprob, likeliest, int(rank)))
        return found

"""Recurrent states of an imitated model, in vLLM's layout: each cell depends on prompt, tokens, layer and place.

The division among ranks follows vLLM's weight loaders, as they were read: a rank has the channels of its heads of
each section of the window, one section after the other, and the states of its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disagg.vllm.states import RecurrentLayers, StateTensor

HEADS, HEAD_ROWS, COLUMNS, WINDOW = 4, 4, 4, 3


@dataclass(frozen=True)
class StateModel:
    """Recurrent layers of 4 heads."""

    kind: str = "MAMBA2"
    """`MAMBA2`, `GDN_ATTN`, or a kind that the connector does not know."""
    groups: int = 2
    """Groups of B and C, or heads of queries and keys."""
    channels_first: bool = True
    replicated: bool = False
    """Each rank holds all heads."""
    whole: bool = False
    """As on a CPU: only kernels know the order of elements."""

    @property
    def _sections(self) -> list[tuple[int, int]]:
        """Heads and channels of each, for each section of the window."""
        heads, shared = (HEADS, HEAD_ROWS), (self.groups, COLUMNS)
        return [shared, shared, heads] if self.kind == "GDN_ATTN" else [heads, shared, shared]

    def layers(self, tp: int) -> RecurrentLayers:
        window, state = self._state(0, 0, 0, 0, 1 if self.replicated else tp)
        tensors = (
            StateTensor(tuple(window.shape), torch.float16),
            StateTensor(tuple(state.shape), torch.float32),
        )
        return RecurrentLayers(self.kind, tensors, self.groups, self.replicated, self.whole)

    def page(self, prompt: int, tokens: int, layer: int, rank: int, tp: int) -> torch.Tensor:
        """The bytes of a block with the state after `tokens`."""
        parts = self._state(prompt, tokens, layer, *((0, 1) if self.replicated else (rank, tp)))
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])

    def _state(
        self, prompt: int, tokens: int, layer: int, rank: int, tp: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = prompt * 7919 + tokens * 3571 + layer * 1009
        sections = []
        for number, (heads, channels) in enumerate(self._sections):
            own = _own(heads, rank, tp)[:, None, None]
            cells = own * 211 + torch.arange(channels)[:, None] * 17 + torch.arange(WINDOW) + number * 5003
            sections.append(((cells + first) % 32003).to(torch.int16).flatten(0, 1))
        window = torch.cat(sections)
        rows, columns = torch.arange(HEAD_ROWS)[:, None], torch.arange(COLUMNS)
        state = _own(HEADS, rank, tp)[:, None, None] * 409 + rows * 31 + columns + first * 65537
        return window if self.channels_first else window.T, state.to(torch.int32)


def _own(heads: int, rank: int, tp: int) -> torch.Tensor:
    """Heads of a rank; with fewer heads than ranks, consecutive ranks have copies of one."""
    return torch.arange(rank * heads // tp, rank * heads // tp + max(1, heads // tp))

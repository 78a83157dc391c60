"""KV cache groups of vLLM: layers that share a block table, and the tokens that they still need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.kv.pages import pages_for
from disagg.vllm.states import RecurrentLayers

NULL_BLOCK = 0
"""vLLM's block in the place of freed and skipped ones; it holds no KV."""
BlockTables = tuple[list[int], ...]
"""Blocks of a request, for each KV cache group."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group."""

    block_size: int
    """Tokens in a block of the block tables."""
    layers: tuple[str, ...] = ()
    """Names of the layers. Layers that use the KV of other ones may be missing."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0 without a sliding window."""
    chunk: int = 0
    """Size in tokens of the chunks of chunked local attention; 0 for other attention."""
    recurrent: RecurrentLayers | None = None
    """Set for recurrent layers, whose blocks hold a state each. The state after a number of tokens is in the block of
    the last of them; vLLM frees earlier blocks."""

    @property
    def local(self) -> bool:
        """Whether vLLM frees blocks that no later token needs."""
        return bool(self.window or self.chunk or self.recurrent)

    def first_needed(self, tokens: int) -> int:
        """Returns the first token of the blocks that vLLM keeps when `tokens` are computed.

        The next token attends to a token of the first one of these blocks; see `get_num_skipped_tokens` of vLLM's
        `SingleTypeKVCacheManager`. vLLM caches this block for later prompts, so that all its tokens are needed.
        """
        first = 0
        if self.window:
            first = max(0, tokens - self.window + 1)
        elif self.chunk:
            first = tokens // self.chunk * self.chunk
        elif self.recurrent:
            first = max(0, tokens - 1)
        return first // self.block_size * self.block_size

    def kept(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """Returns the block table as vLLM has it when `tokens` are computed, with null blocks for freed ones."""
        freed = min(len(blocks), self.first_needed(tokens) // self.block_size)
        return [NULL_BLOCK] * freed + list(blocks[freed:])

    def state_block(self, blocks: Sequence[int], tokens: int) -> int:
        """Returns the block with the state after `tokens`; the null block if there is none."""
        at = max(0, tokens - 1) // self.block_size
        return blocks[at] if at < len(blocks) else NULL_BLOCK

    def describe(self) -> str:
        """Returns the kind of layers and their numbers, equal in all engines of the same model."""
        kind = f"window {self.window}" if self.window else f"chunk {self.chunk}" if self.chunk else "full"
        if self.recurrent is not None:
            kind = f"recurrent {self.recurrent.describe()}"
        return f"{kind}: {' '.join(sorted('.'.join(re.findall(r'[0-9]+', name)) or name for name in self.layers))}"


def is_plain(groups: Sequence[CacheGroup]) -> bool:
    """Returns whether one group has all layers, and vLLM keeps all blocks of a running request."""
    return len(groups) == 1 and not groups[0].local


def block_span(start: int, stop: int, block_size: int) -> slice:
    """Returns the part of a block table that has the tokens from `start` to `stop`."""
    return slice(start // block_size, pages_for(stop, block_size))


def holds(blocks: Sequence[int], part: slice) -> bool:
    """Returns whether a block table has a block at each place of `part`."""
    return len(blocks) >= part.stop and NULL_BLOCK not in blocks[part]

"""The options of `disagg bench tiers`, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from disagg.bench.tiers.engine import whole_pages
from disagg.bench.tiers.others import OTHER_PROMPT_TOKENS, OTHER_TOKENS
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.kv.event_log import MIN_UNIT_TOKENS

TransportChoice = Literal["auto", "ucx", "tls"]
Part = Literal["hits", "storage", "peer", "conversations", "others"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of the benchmark: TTFT of hits in pool and host memory, of hits in the storage, and of hits in another group;
conversations; answers beside hits."""
POOL_PREFIXES = 5
"""Size of the pool of the TTFT run, in prefixes: stores copy at most a quarter of a pool at one time."""
HIT_PREFIXES = 3
"""Room of the pool beside the running answers, in prefixes: two hits, and one that is computed."""


@dataclass(frozen=True, kw_only=True)
class TiersOptions:
    """The options of `disagg bench tiers`."""

    config: Config
    """Model and log of the run; the benchmark sets the other sections."""
    cuda: bool
    folder: Path | None
    """Folder in which a temporary folder for the storage is created; None: the system's folder."""
    tokens: int
    """Tokens of a cached beginning."""
    new_tokens: int
    answer_tokens: int
    turns: int
    turn_tokens: int
    concurrency: int
    repeats: int
    transport: TransportChoice = "auto"
    """Transport between two groups that share host memory; auto: as for groups on one host."""
    others: int = 4
    """Number of running answers beside hits."""
    parts: tuple[Part, ...] = PARTS
    """Parts to run."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a beginning that KV events do not cover."""
        if self.tokens % MIN_UNIT_TOKENS:
            raise ConfigError(f"--tokens {self.tokens}: give a multiple of {MIN_UNIT_TOKENS}")

    @property
    def history_tokens(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.turn_tokens + self.answer_tokens)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(self.tokens + self.new_tokens + self.answer_tokens, self.history_tokens)

    @property
    def other_tokens(self) -> int:
        """Tokens of a running answer beside hits."""
        return min(OTHER_TOKENS, self.longest_tokens - OTHER_PROMPT_TOKENS)

    def pool_tokens(self, page_size: int) -> int:
        """Returns the size of the pool: room for several beginnings, for all conversations under way, and for the
        running answers beside hits."""
        prefix = whole_pages(self.tokens + self.new_tokens + self.answer_tokens, page_size)
        return max(
            POOL_PREFIXES * prefix,
            self.concurrency * whole_pages(self.history_tokens, page_size),
            self.others_room(page_size) + HIT_PREFIXES * prefix if "others" in self.parts else 0,
        )

    def others_room(self, page_size: int) -> int:
        """Returns the pool tokens that the running answers take together while other prompts hit, in whole pages."""
        return self.others * whole_pages(OTHER_PROMPT_TOKENS + self.other_tokens, page_size)

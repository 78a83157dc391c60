"""Values that every layer shares. All are immutable; all can cross the wire (msgspec).

Words (see docs/design.md): a *slot* is one token's place in a KV pool, a *page* `page_size` consecutive
slots; a *shard* is the rectangle of layers x KV heads that a rank owns; a *route* the part of a shard that
one source rank sends to one destination rank; a *segment* one unit of transfer: a route x a token range x a
layer group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Literal

import msgspec


class Span(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Half-open range `[start, stop)` of integers; empty when `stop <= start`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and self.start <= item < self.stop

    def __bool__(self) -> bool:
        return self.stop > self.start

    def intersect(self, other: Span) -> Span:
        """The common part; an empty span at `start` when there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def covers(self, other: Span) -> bool:
        """True when every element of `other` is in this span."""
        return not other or (self.start <= other.start and other.stop <= self.stop)

    def shift(self, by: int) -> Span:
        """The same span moved by `by`: how a global range becomes an index into a local tensor."""
        return Span(self.start + by, self.stop + by)

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}" if len(self) > 1 else str(self.start)


DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Element types a KV pool may hold, by torch's name, with their size in bytes."""
SCALE_BYTES = 2
"""Of a head's scale, bfloat16, where its elements are codes."""
QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Element types that are codes: a pool holds a scale for each head of each token."""


def code_row_bytes(head_dim: int) -> int:
    """Of one head of one token: codes of K, codes of V, and the scales of both."""
    return 2 * (head_dim + SCALE_BYTES)


class LayerClass(msgspec.Struct, frozen=True):
    """Layers of a KV cache that have their own KV heads and head size."""

    layers: int
    kv_heads: int
    head_dim: int
    has_v: bool = True
    """False of index keys: one vector for each head and token."""


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of a whole model's KV cache, before any split over ranks.

    Layers that differ in their heads are different *classes*. The cache numbers its layers class by class, in the
    order of `classes`, and within a class in the model's order: a span of layers of one class is one rectangle.
    """

    layers: int
    """Of the first class, as are heads and planes; nearly always there is no other."""
    kv_heads: int
    head_dim: int
    dtype: str
    """Of all classes."""
    more: tuple[LayerClass, ...] = ()
    """The other classes."""
    has_v: bool = True

    @property
    def classes(self) -> tuple[KVLayout, ...]:
        """Each class as a layout by itself."""
        if not self.more:
            return (self,)
        others = (KVLayout(c.layers, c.kv_heads, c.head_dim, self.dtype, has_v=c.has_v) for c in self.more)
        return (KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype, has_v=self.has_v), *others)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The layers of each class."""
        ends = tuple(accumulate((one.layers for one in self.more), initial=self.layers))
        return tuple(Span(start, stop) for start, stop in pairwise((0, *ends)))

    def class_of(self, layers: Span) -> KVLayout:
        """The class that `layers`, which are of one class, belong to."""
        if not self.more:
            return self
        return next(one for one, span in zip(self.classes, self.spans, strict=True) if layers.start in span)

    @property
    def planes(self) -> int:
        """Of a layer: K and V apart, or codes of both in one row, with their scales; or keys alone."""
        return 2 if self.has_v and not self.quantized else 1

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane."""
        if self.quantized:
            return code_row_bytes(self.head_dim)
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def cell_bytes(self) -> int:
        """Bytes of one head of one token in one layer: K and V, with their scales if they have any."""
        return self.planes * self.head_bytes

    @property
    def quantized(self) -> bool:
        """Whether elements are codes, with scales."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K and V, all heads, all layers."""
        return sum(one.layers * one.kv_heads * one.cell_bytes for one in self.classes)

    def token_bytes_of(self, shard: Shard) -> int:
        """Bytes of one token on the rank that owns `shard`."""
        each = zip(shard.parts, self.classes, strict=True)
        return sum(len(part.layers) * len(part.heads) * one.cell_bytes for part, one in each)


class Shard(msgspec.Struct, frozen=True):
    """What rank `rank` of a group owns: global layers x global KV heads."""

    rank: int
    layers: Span
    """Of the first class of layers, as are `heads`; see `KVLayout`."""
    heads: Span
    more: tuple[Shard, ...] = ()
    """What it owns of each of the other classes."""

    @classmethod
    def of_classes(cls, rank: int, layout: KVLayout, heads_of: Callable[[int], Span]) -> Shard:
        """All layers of `layout`, and of each class the heads that `heads_of` says of its number of KV heads."""
        spans = zip(layout.spans, layout.classes, strict=True)
        first, *more = (cls(rank, layers, heads_of(one.kv_heads)) for layers, one in spans)
        return cls(rank, first.layers, first.heads, tuple(more))

    @property
    def parts(self) -> tuple[Shard, ...]:
        """What it owns of each class, as shards of one class."""
        return (Shard(self.rank, self.layers, self.heads), *self.more) if self.more else (self,)

    def part_of(self, layers: Span) -> int:
        """Number of the class that global `layers`, which are of one class, belong to."""
        if not self.more:
            return 0
        return next(number for number, part in enumerate(self.parts) if part.layers.covers(layers))


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose tokens; the defaults are greedy and change nothing. Ranges: `core.sampling.check_sampling`.

    The order is: penalties, `logit_bias`, `min_tokens`, temperature, top-k, top-p, min-p.

    With a `seed`, token `i` of a request is drawn from a generator seeded by (seed, i): no generator state
    has to travel from prefill to decode, and a continued request repeats itself.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Before so many tokens, nothing ends the answer: no EOS, no stop token, no stop string."""
    min_p: float = 0.0
    """Drops tokens whose probability is less than this share of the likeliest one's; 0 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer has already."""
    frequency_penalty: float = 0.0
    """The same, once for each time that the answer has it."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or answer have are divided by it, negative ones multiplied; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`(token, what is added to its logit)`; of a token that is named twice, both."""
    logprobs: int | None = None
    """Log-probabilities to tell: None for none, 0 for the chosen token's, k for the k likeliest tokens' too."""
    n: int = 1
    """Answers. Each is a sequence of its own; all share the prompt's KV. With a seed each has one of its own."""
    beams: int = 0
    """Of a search for the likeliest `n` answers, as transformers does it; 0: tokens are chosen one by one."""
    length_penalty: float = 1.0
    """Of beam search: the sum of an answer's log-probabilities is divided by its tokens to this power."""
    early_stopping: bool | Literal["never"] = False
    """Of beam search: it ends with as many whole answers as it has beams (true), when no better one is likely, going
    by the length so far (false), or when none is possible, going by `max_tokens` too (`never`)."""

    @property
    def sequences(self) -> int:
        """Sequences that are computed side by side."""
        return self.beams or self.n


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position of an answer, of the model's own distribution.

    That is before penalties, bias and temperature: natural logarithms of a softmax in float32.
    """

    token: int
    """The token that was chosen."""
    logprob: float
    top: tuple[tuple[int, float], ...]
    """`(token, logprob)` of the likeliest tokens, the likeliest first; the chosen one need not be among them."""


class RequestKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A request and the number of its try. A message of an earlier epoch is void."""

    request_id: str
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


class RankInfo(msgspec.Struct, frozen=True):
    """What a peer must know to exchange KV with one rank."""

    rank: int
    shard: Shard
    control_address: str
    """Where the rank's control channel listens; also its name as a peer."""
    transport_address: bytes
    """Opaque; made and read by the transport of the same name."""
    ring_bytes: int = 0
    """Size of the rank's receive ring; 0 on a rank that never receives."""
    swap_blocks: int = 0
    """Blocks of host memory that the rank has for pages of preempted requests."""
    max_sequences: int = 1
    """Of a leader: answers to one request, or beams, that its group computes side by side."""
    pool_tokens: int = 0
    """Tokens that the rank's KV pool holds; the same on all ranks of a group."""


class GroupInfo(msgspec.Struct, frozen=True):
    """One engine: the ranks that together hold one copy of the model. Compared at the handshake."""

    name: str
    role: str
    """`prefill`, `decode`, or `colocated`: both."""
    protocol_version: int
    fingerprint: str
    """Hash of the model's configuration and weights' identity: equal on groups that serve the same model."""
    layout: KVLayout
    page_size: int
    transport: str
    ranks: tuple[RankInfo, ...]
    deterministic: bool = False
    """As `ModelConfig.deterministic`."""
    checksum: bool = False
    """As `TransferConfig.checksum`."""

    @property
    def leader(self) -> RankInfo:
        """Rank 0: it plans the steps and speaks for the group."""
        return self.ranks[0]


class Ticket(msgspec.Struct, frozen=True):
    """A decode group's reservation for one request: its row and all its prompt's pages are set aside.

    `number` is unique for the life of the decode group and stands in every data tag, so a late message of an
    earlier try can never be taken for a current one.
    """

    key: RequestKey
    number: int
    group: str
    tokens: Span
    """Positions that the decode group still lacks: the prompt's KV, less a beginning that it has cached, and behind
    it a recurrent state if any."""
    row: int = -1
    """Its row on every decode rank, and so the fence word that a writer's kernel must find open."""
    pages: tuple[int, ...] = ()
    """Where those positions lie on every decode rank, from the page of the first one on. Pages before it are shared:
    who writes does not learn which they are."""


class Segment(msgspec.Struct, frozen=True):
    """One unit of transfer. Contiguous in staging as `[layer, plane, token, head, head_dim]`.

    `layers` and `heads` are global, and the layers of one class; `index` is unique per (ticket, source rank,
    destination rank).
    """

    index: int
    src_rank: int
    dst_rank: int
    layers: Span
    heads: Span
    tokens: Span
    nbytes: int


CHECKSUM_BYTES = 8
"""Of a segment's checksum; `staging.trailer` says where it stands."""
PROTOCOL_VERSION = 9

"""Immutable value types that all layers share; msgspec can encode them for the wire.

Terms (see docs/design/overview.md): a *slot* holds one token in a KV pool; a *page* is `page_size` consecutive slots;
a *shard* is the rectangle of layers x KV heads that a rank owns; a *route* is the part of a shard that one source
rank sends to one destination rank; a *segment* is one unit of transfer: a route x a token range x a layer group.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        """Returns the intersection; an empty span if the spans are disjoint."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def covers(self, other: Span) -> bool:
        """Returns whether every element of `other` is in this span."""
        return not other or (self.start <= other.start and other.stop <= self.stop)

    def shift(self, by: int) -> Span:
        """Returns the span moved by `by`, for example to convert global layers to indices of a local tensor."""
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
"""Element types of a KV pool by torch's name, with their size in bytes."""
SCALE_BYTES = 2
"""Size of the bfloat16 scale of one quantized head."""
QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Quantized element types: the pool also holds a scale for each head of each token."""


def dtype_name(dtype: object) -> str:
    """Returns the name of a `torch.dtype` without the module, as in `KVLayout.dtype`."""
    return str(dtype).removeprefix("torch.")


def quantized_row_bytes(head_dim: int) -> int:
    """Returns the bytes of one head of one token: quantized K and V, with both scales."""
    return 2 * (head_dim + SCALE_BYTES)


class LayerClass(msgspec.Struct, frozen=True):
    """Layers of a KV cache with the same KV heads and head size."""

    layers: int
    kv_heads: int
    head_dim: int
    has_v: bool = True
    """False for the index keys of sparse attention: one key per head and token, no V."""


def head_span(rank: int, ranks: int, heads: int) -> Span:
    """Returns the heads of rank `rank` of `ranks`: all of `heads` heads that its even share touches.

    For KV heads, these are the heads that the rank's query heads read. The formula covers a split (heads >= ranks),
    replicas (ranks > heads) and mixed cases. With 4 heads on 3 ranks, the shares [0, 4/3), [4/3, 8/3), [8/3, 4) touch
    heads 0-1, 1-2 and 2-3.
    """
    return Span(rank * heads // ranks, -(-(rank + 1) * heads // ranks))


def can_share_heads(heads: int, groups: int, ranks: int) -> bool:
    """Returns whether `ranks` ranks can share the heads of a recurrent layer, of which consecutive heads form
    `groups` groups: each rank needs equally many heads, of whole groups or of one group."""
    return heads > 0 and heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


class StateClass(msgspec.Struct, frozen=True):
    """Tensors of a recurrent state with the same shape and dtype; see `disagg.kv.mamba_pool`.

    For a transfer each tensor counts as a layer, and a request's whole state as one token.
    """

    layers: int
    """Number of tensors."""
    heads: int
    """Number of equal parts of each tensor. A rank owns a range of the parts, like a range of KV heads."""
    head_bytes: int
    joined: bool = False
    """Whether the parts follow those of the preceding class within the same tensors: a convolution's channels of
    keys follow those of queries."""
    layer_heads: int = 0
    """Heads of the recurrent layer, if ranks can share them; 0 if every rank holds all parts."""
    layer_groups: int = 0
    """Groups of the layer's heads. The heads of a group share parts: a key, or B and C of a state space."""

    def span(self, rank: int, ranks: int) -> Span:
        """Returns the parts that rank `rank` of `ranks` owns. All ranks that share a group hold the group's parts."""
        if not can_share_heads(self.layer_heads, self.layer_groups, ranks):
            return Span(0, self.heads)
        return head_span(rank, ranks, self.heads)


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of a model's whole KV cache, before the split over ranks, and of a request's recurrent state.

    Layers with different heads form different *classes*. The cache numbers layers class by class in the order of
    `classes`, and within a class in the model's order, so consecutive layers of one class form one rectangle. The
    tensors of a recurrent state have the numbers after the last layer of the KV cache.
    """

    layers: int
    """Number of layers of the first class. `kv_heads`, `head_dim` and `has_v` also describe the first class. Most
    models have one class."""
    kv_heads: int
    head_dim: int
    dtype: str
    """Element type of all classes."""
    more: tuple[LayerClass, ...] = ()
    """Layer classes after the first one."""
    has_v: bool = True
    states: tuple[StateClass, ...] = ()
    """Classes of a request's recurrent state. Empty for a model without recurrent layers; set by the model runner."""

    @property
    def classes(self) -> tuple[KVLayout, ...]:
        """Each class of the KV cache as a separate layout."""
        if not self.more:
            return (self,)
        others = (KVLayout(c.layers, c.kv_heads, c.head_dim, self.dtype, has_v=c.has_v) for c in self.more)
        return (KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype, has_v=self.has_v), *others)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Range of layer numbers of each class of the KV cache."""
        return self._spans(self.layers, *(one.layers for one in self.more))

    @property
    def kv_layers(self) -> int:
        """Number of layers of the KV cache, over all classes."""
        return self.layers + sum(one.layers for one in self.more)

    @property
    def state_spans(self) -> tuple[Span, ...]:
        """Range of layer numbers that the tensors of each state class have; see `KVLayout`."""
        return self._spans(self.kv_layers, *(one.layers for one in self.states))[1:]

    @property
    def all_classes(self) -> tuple[KVLayout, ...]:
        """`classes`, followed by a layout for each state class. State tensors are described as uint8 elements."""
        states = (KVLayout(c.layers, c.heads, c.head_bytes, "uint8", has_v=False) for c in self.states)
        return (*self.classes, *states)

    def class_of(self, layers: Span) -> KVLayout:
        """Returns the class that contains `layers`: a range of layers, or a range of numbers of state tensors. All of
        the range must belong to one class."""
        if not (self.more or self.states):
            return self
        return self.all_classes[self.number_of(layers)]

    def number_of(self, layers: Span) -> int:
        """Returns the index in `all_classes` of the class that contains `layers`; see `class_of`."""
        if not (self.more or self.states):
            return 0
        spans = (*self.spans, *self.state_spans)
        return next(number for number, span in enumerate(spans) if layers.start in span)

    def is_state(self, layers: Span) -> bool:
        """Returns whether `layers`, which must be of one class, are tensors of a recurrent state."""
        return layers.start >= self.kv_layers

    def moved_tokens(self, layers: Span, tokens: Span, starts: tuple[int, ...] = ()) -> Span:
        """Returns the positions that a ticket for `tokens` transfers in `layers`, which must be of one class.

        A recurrent state is the state after `tokens`. Its position is therefore the one after `tokens`. `starts`: see
        `Ticket`.
        """
        if self.is_state(layers):
            return Span(tokens.stop, tokens.stop + 1)
        if not starts:
            return tokens
        start = max(tokens.start, starts[self.number_of(layers)])
        return Span(min(start, tokens.stop), tokens.stop)

    @staticmethod
    def _spans(*counts: int) -> tuple[Span, ...]:
        return tuple(Span(start, stop) for start, stop in pairwise((0, *accumulate(counts))))

    @property
    def planes(self) -> int:
        """Number of planes per layer: 2 for separate K and V; 1 for quantized K and V in one row, or for keys
        only."""
        return 2 if self.has_v and not self.quantized else 1

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane."""
        if self.quantized:
            return quantized_row_bytes(self.head_dim)
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def cell_bytes(self) -> int:
        """Bytes of one head of one token in one layer: K and V, with scales if quantized."""
        return self.planes * self.head_bytes

    @property
    def quantized(self) -> bool:
        """Whether elements are quantized values with scales."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV: all heads of all layers."""
        return sum(one.layers * one.kv_heads * one.cell_bytes for one in self.classes)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's recurrent state; 0 without one."""
        return sum(one.layers * one.heads * one.head_bytes for one in self.states)

    def token_bytes_of(self, shard: Shard) -> int:
        """Returns the bytes of one token's KV on the rank that owns `shard`."""
        each = zip(shard.parts, self.classes, strict=True)
        return sum(len(part.layers) * len(part.heads) * one.cell_bytes for part, one in each)

    def state_bytes_of(self, ranks: int) -> int:
        """Returns the bytes of a request's recurrent state on each of `ranks` ranks; equal on all of them."""
        return sum(one.layers * len(one.span(0, ranks)) * one.head_bytes for one in self.states)


class Shard(msgspec.Struct, frozen=True):
    """KV owned by rank `rank` of a group: global layers x global KV heads."""

    rank: int
    layers: Span
    """Layers of the first class; see `KVLayout`. `heads` also belongs to the first class."""
    heads: Span
    more: tuple[Shard, ...] = ()
    """The rank's layers and heads of each further class."""
    states: tuple[Shard, ...] = ()
    """The rank's part of each class of state tensors."""

    @classmethod
    def of_classes(cls, rank: int, ranks: int, layout: KVLayout) -> Shard:
        """Returns the shard of rank `rank` of `ranks`: all layers, the rank's heads of each class, and its part of
        the recurrent state."""
        spans = zip(layout.spans, layout.classes, strict=True)
        first, *more = (cls(rank, layers, head_span(rank, ranks, one.kv_heads)) for layers, one in spans)
        states = zip(layout.state_spans, layout.states, strict=True)
        owned = tuple(cls(rank, layers, one.span(rank, ranks)) for layers, one in states)
        return cls(rank, first.layers, first.heads, tuple(more), owned)

    @property
    def parts(self) -> tuple[Shard, ...]:
        """The shard's KV split by class: one shard for each class."""
        return (
            (Shard(self.rank, self.layers, self.heads), *self.more) if self.more or self.states else (self,)
        )

    @property
    def all_parts(self) -> tuple[Shard, ...]:
        """`parts`, followed by the shard of each state class, in the order of `KVLayout.all_classes`."""
        return (*self.parts, *self.states)

    def part_of(self, layers: Span) -> int:
        """Returns the index in `all_parts` of the part with `layers`, which are global and must be of one class."""
        if not (self.more or self.states):
            return 0
        return next(number for number, part in enumerate(self.all_parts) if part.layers.covers(layers))


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling parameters; the default is greedy sampling. `disagg.core.sampling.check_sampling` has the ranges.

    Order of application: penalties, `logit_bias`, `min_tokens`, `grammar`, temperature, top-k, top-p, min-p.

    With a `seed`, the random generator of token `i` is seeded by (seed, i). Therefore no generator state moves from
    prefill to decode, and a repeated request gets the same answer.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    """Sampling temperature; 0: greedy sampling."""
    top_k: int = 0
    """Number of likeliest tokens from which a token is drawn; 0: all tokens."""
    top_p: float = 1.0
    """Share of the probability mass from which tokens are drawn, the likeliest first; 1 disables this filter."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Minimum number of answer tokens. No EOS token, stop token or stop string ends a shorter answer."""
    min_p: float = 0.0
    """Tokens less probable than this fraction of the most probable token are never drawn; 0 disables this filter."""
    presence_penalty: float = 0.0
    """Number subtracted from the logit of each token that occurs in the answer."""
    frequency_penalty: float = 0.0
    """Number subtracted from the logit of a token once per occurrence in the answer."""
    repetition_penalty: float = 1.0
    """Factor that divides positive and multiplies negative logits of tokens in the prompt or the answer; 1: no
    effect."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`(token, value added to its logit)`; repeated tokens add up."""
    logprobs: int | None = None
    """Log-probabilities to return. None: none; 0: of the chosen token only; k: also of the k most probable tokens."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens to return, from the second token on; the numbers mean the same."""
    n: int = 1
    """Number of answers: sequences with different seeds that share the prompt's KV."""
    beams: int = 0
    """Number of beams of a beam search for the `n` best answers, as in transformers; 0: sampling."""
    length_penalty: float = 1.0
    """Beam search: an answer's score is its summed log-probability divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """Beam search ends with `beams` finished answers (True), when the current length allows no better answer (False),
    or when no length up to `max_tokens` allows one (`never`)."""
    grammar: str = ""
    """Grammar that each answer follows, in the form of `disagg.core.grammars`; empty: no grammar. The grammar masks
    logits after penalties, `logit_bias` and `min_tokens`. An end token is allowed where the grammar may end."""

    @property
    def sequences(self) -> int:
        """Number of the request's sequences (beams or answers) that one decode step computes together."""
        return self.beams or self.n


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position of an answer or prompt: natural logarithms of a float32 softmax.

    The distribution is the model's, before penalties, bias and temperature.
    """

    token: int
    """Chosen token; in a prompt, the prompt's token."""
    logprob: float
    top: tuple[tuple[int, float], ...]
    """`(token, logprob)` of the most probable tokens, most probable first; may lack the chosen token."""
    rank: int = 0
    """Number of tokens at least as probable as a prompt's token, which is one of them; 0 in an answer."""


class RequestKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Id of a request, and its epoch: the number of the attempt. Messages of an earlier epoch are ignored."""

    request_id: str
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


class PageServer(msgspec.Struct, frozen=True):
    """Endpoint at which a rank serves the pages in its host memory to other groups."""

    number: int
    """Random number of the rank, which its messages carry."""
    address: bytes
    """Address of the endpoint's transport; opaque to other code."""
    transport: str
    """Name of the endpoint's transport (`Choice.name`). Ranks with different transports share no pages."""


class RankInfo(msgspec.Struct, frozen=True):
    """Description of one rank for peers that exchange KV with the rank."""

    rank: int
    shard: Shard
    control_address: str
    """Address of the rank's control channel; identifies the rank as a peer."""
    transport_address: bytes
    """Address of the rank's transport endpoint; opaque to other code."""
    ring_bytes: int = 0
    """Size of the rank's receive ring; 0 on a rank that does not receive KV."""
    swap_blocks: int = 0
    """Number of host memory blocks into which pages of preempted requests can be swapped."""
    max_sequences: int = 1
    """Largest number of answers or beams of one request; set on a leader."""
    pool_tokens: int = 0
    """Size of the rank's KV pool in tokens; the same on all ranks of a group."""
    state_slots: int = 0
    """Slots for recurrent states of requests and of the prefix cache; 0 without recurrent layers."""
    host_pages: int = 0
    """Number of prefix cache pages for which the rank's host memory has room; see `GroupConfig.host_cache_bytes`."""
    host_states: int = 0
    """Number of the prefix cache's recurrent states for which the rank's host memory has room."""
    page_server: PageServer | None = None
    """Endpoint for other groups; None without `GroupConfig.host_cache_shared`."""
    local_prefill_tokens: int = 0
    """Tokens of a step in which the decode group computes prompts itself on request; 0: it never does. Set on a
    leader."""
    tail_tokens: int = 0
    """Largest number of a prompt's last tokens that the decode group computes while a prefill group computes the
    others; 0: it never does. Set on a leader."""


class GroupInfo(msgspec.Struct, frozen=True):
    """Description of one group: the ranks that hold one copy of the model. The handshake compares two groups."""

    name: str
    role: str
    """`prefill`, `decode`, or `colocated` for both."""
    protocol_version: int
    fingerprint: str
    """Hash of the model's configuration and weights; equal in groups of the same model."""
    layout: KVLayout
    page_size: int
    transport: str
    ranks: tuple[RankInfo, ...]
    deterministic: bool = False
    """Value of `ModelConfig.deterministic`."""
    checksum: bool = False
    """Resolved value of `TransferConfig.checksum`."""
    context_tokens: int = 0
    """Longest prompt plus answer that the group accepts. Groups may differ."""
    max_requests: int = 0
    """Value of `GroupConfig.max_requests`. A router admits at most the sum over its groups that decode."""
    settings_digest: str = ""
    """Hex digest of the settings with which the group's ranks run; empty for a group of another engine. `disagg roll`
    compares it."""

    @property
    def leader(self) -> RankInfo:
        """Rank 0, which plans the steps and exchanges messages with routers."""
        return self.ranks[0]

    @property
    def shares_host_cache(self) -> bool:
        """Whether the group reads the host memory of other groups, and other groups read its host memory
        (`GroupConfig.host_cache_shared`)."""
        return any(rank.page_server is not None for rank in self.ranks)


class Ticket(msgspec.Struct, frozen=True):
    """A decode group's reservation for one request: a row and all pages of the prompt.

    `number` is unique for the life of the decode group and part of every data tag. Therefore a late message of an
    earlier attempt cannot match a current ticket.
    """

    key: RequestKey
    number: int
    group: str
    tokens: Span
    """Positions to transfer: the prompt after the decode group's prefix cache hit. Empty for a model without
    attention. The recurrent state after these positions is transferred too, if there is one (`KVLayout.states`)."""
    row: int = -1
    """Row of the request, the same on every decode rank: the slot of the recurrent state, and the index of the fence
    word that a writer's kernel checks."""
    pages: tuple[int, ...] = ()
    """Pages of the positions in `tokens`, the same on every decode rank. The ticket omits earlier pages, which are
    shared and must not be written. Empty if no rank may write to them directly."""
    starts: tuple[int, ...] = ()
    """First position to transfer of each class of the KV cache: layers with a sliding window need no earlier ones.
    Empty: `tokens.start` for all classes."""

    def check_starts(self, layout: KVLayout) -> None:
        """Raises ValueError unless `starts` fits the classes of `layout`."""
        if self.starts and len(self.starts) != len(layout.classes):
            raise ValueError(
                f"ticket {self.number} has the first positions of {len(self.starts)} layer classes, not of "
                f"{len(layout.classes)}"
            )


class Segment(msgspec.Struct, frozen=True):
    """One unit of transfer, contiguous in staging as `[layer, plane, token, head, head_dim]`.

    `layers` and `heads` are numbered within the whole model; all `layers` are of one class. A tensor of a recurrent
    state has one position, which follows the prompt's last position. `index` is unique per (ticket, source rank,
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
"""Size of a segment's checksum; `staging.trailer` defines its position."""
PROTOCOL_VERSION = 28

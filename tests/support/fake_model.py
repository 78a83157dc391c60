"""A model in a few lines whose KV says where it belongs, and whose tokens depend on all of it.

Each KV element is a function of token, position, layer, head and K or V. Every step reads the whole context back and
compares: a byte that is missing, stale or of another request raises `AssertionError` in the step that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
import torch
from simulated_constraints import SimulatedConstraint

from disagg.core.ports import LayerHook
from disagg.core.sampling import sampling_of
from disagg.core.types import KVLayout, LayerClass, SamplingParams, Shard, Span
from disagg.kv.mamba_pool import MambaPool, StateForm, StatePlace, state_classes
from disagg.kv.pool import MHATokenToKVPool, make_pool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.kv.transfer_pools import TransferPools
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.page_copies import copy_in_order
from disagg.model.sampled_tokens import token_of
from disagg.model.sampling.beam_search import BeamSearch
from disagg.model.sampling.next_tokens import BeamStep, SampledBeams, next_tokens
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.model.sampling.sampled import Chosen
from disagg.model.spec.model_spec import ModelSpec, shard_of
from disagg.router.answers import Output

VOCAB, CONTEXT_TOKENS = 64, 256
HEAD_DIM = 4
DIGITS_HEAD_DIM = 8
"""Of heads that int8 has exactly: smaller numbers, more of them."""
STATE_FORMS = tuple(
    StateForm(StatePlace(layer, 0, kind), shape, torch.float32)
    for layer in range(2)
    for kind, shape in (("conv", (3, 2)), ("recurrent", (3, 2, 2)))
)
"""State tensors of a request, of a model with a recurrent state."""


def fake_spec(
    layers: int,
    kv_heads: int,
    states: bool = False,
    *,
    any_chunks: bool = False,
    head_dim: int = HEAD_DIM,
    kv_dtype: str = "float32",
    more: tuple[tuple[int, int], ...] = (),
    eos_ids: tuple[int, ...] = (),
) -> ModelSpec:
    """What ranks must know of the model. In int8 heads must have `DIGITS_HEAD_DIM`.

    `states`: with a recurrent state; `any_chunks`: whether prompts may be cut anywhere nevertheless. `more`: layers
    and KV heads of other classes of layers. `eos_ids`: tokens beyond the vocabulary, which the model never chooses.
    """
    others = tuple(LayerClass(*sizes, head_dim) for sizes in more)
    layout = KVLayout(layers, kv_heads, head_dim, kv_dtype, others)
    if states:
        layout = msgspec.structs.replace(layout, states=state_classes(STATE_FORMS))
    spec = ModelSpec("Fake", layout, 12, layout.head_dim, layout.head_dim, VOCAB, CONTEXT_TOKENS, eos_ids)
    return msgspec.structs.replace(spec, any_chunks=any_chunks, scores_prompts=True)


def state_of(tokens: Sequence[int]) -> int:
    """A number that all of them decide."""
    state = 7
    for token in tokens:
        state = (state * 33 + token + 1) % 1_000_003
    return state


def next_token(tokens: Sequence[int]) -> int:
    """The model's choice after `tokens`."""
    return state_of(tokens) % VOCAB


def fake_logits(tokens: Sequence[int]) -> torch.Tensor:
    """float32 `[VOCAB]` after `tokens`; the largest is that of `next_token`."""
    state = state_of(tokens)
    return _logits(state % VOCAB, state % 89).clone()


@cache
def _logits(first: int, sharpness: int) -> torch.Tensor:
    ranks = (torch.arange(VOCAB) - first) * 27 % VOCAB
    return ranks.float() * -(1 + sharpness / 89) / 8


def fake_answers(prompt: Sequence[int], sampling: SamplingParams) -> list[list[int]]:
    """What every split of the model must answer."""
    if sampling.beams:
        return _fake_beams(prompt, sampling)
    return [_fake_answer(prompt, sampling_of(sampling, number)) for number in range(sampling.n)]


def check_scores(prompt: Sequence[int], sampling: SamplingParams, output: Output) -> None:
    """The first output of each answer has the log-probabilities of the prompt, if they are wanted."""
    found, wanted = output.prompt_logprobs, sampling.prompt_logprobs is not None and output.index == 0
    assert [one.token for one in found] == list(prompt[1:]) * wanted, f"scores {found}"
    for at, one in enumerate(found, 1):
        right = fake_logits(prompt[:at]).log_softmax(dim=-1)[one.token].item()
        assert abs(one.logprob - right) < 1e-4, f"{one} at {at}, not {right}"


def _fake_answer(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    answer: list[int] = []
    length = {"max_tokens": sampling.max_tokens, "seed": sampling.seed, "stop": sampling.stop}
    scores = {"prompt_logprobs": sampling.prompt_logprobs}
    if sampling == SamplingParams(**length, **scores):  # greedy
        while len(answer) < sampling.max_tokens:
            answer.append(next_token([*prompt, *answer]))
        return answer
    history = history_of(prompt, sampling)
    constraint: Any = SimulatedConstraint(sampling.grammar) if sampling.grammar else None
    while len(answer) < sampling.max_tokens:
        row = SamplingRow(sampling, answer, history, constraint=constraint)
        (chosen,) = next_tokens(fake_logits([*prompt, *answer])[None], [row], ())
        assert isinstance(chosen, Chosen)
        answer.append(chosen.token)
    return answer


def _fake_beams(prompt: Sequence[int], sampling: SamplingParams) -> list[list[int]]:
    """By the rules of `BeamSearch`, with the whole of each beam for itself."""
    search, beams, scores = BeamSearch(sampling, ()), [()], [0.0]
    while not search.over:
        logits = torch.stack([fake_logits([*prompt, *beam]) for beam in beams])
        (best,) = SampledBeams(logits, [BeamStep(sampling, beams[0], scores)], ()).result()
        assert isinstance(best, list)
        going = search.advance(best)
        beams, scores = [(*beams[one.parent], one.token) for one in going], [one.score for one in going]
    return [list(one.tokens) for one in search.answers()]


@cache
def _kv_table(layers: Span, heads: Span, head_dim: int) -> torch.Tensor:
    """float32 `[layers, 2, (VOCAB + 1) * CONTEXT_TOKENS, heads, head_dim]`: the KV of each token at each position."""
    layer = torch.arange(layers.start, layers.stop).view(-1, 1, 1, 1)
    plane = torch.arange(2).view(1, -1, 1, 1)
    place = (layer * 2 + plane) * 100 + torch.arange(heads.start, heads.stop).view(1, 1, 1, -1)
    token = torch.arange(VOCAB + 1).repeat_interleave(CONTEXT_TOKENS).view(1, 1, -1, 1)
    position = torch.arange(CONTEXT_TOKENS).repeat(VOCAB + 1).view(1, 1, -1, 1)
    mixed = (token * 31 + position * 17 + place * 7) % 1009
    numbers = torch.broadcast_tensors(token, position, place, mixed)
    if head_dim == DIGITS_HEAD_DIM:  # the largest of them is 127, so that a head's scale is 1
        longer = [digits for number in numbers[1:] for digits in (number // 100, number % 100)]
        numbers = (numbers[0], torch.full_like(numbers[0], 127), *longer)
    return torch.stack([number.float() for number in numbers], dim=-1)


def kv_of(
    tokens: torch.Tensor, positions: torch.Tensor, shard: Shard, head_dim: int = HEAD_DIM
) -> torch.Tensor:
    """float32 `[layers, 2, tokens, heads, head_dim]` of the shard; `tokens`, `positions`: int64 `[tokens]`.

    Numbers that are no tokens have the KV of another token.
    """
    places = tokens.clamp(0, VOCAB) * CONTEXT_TOKENS + positions
    return _kv_table(shard.layers, shard.heads, head_dim).index_select(2, places)


def _kv_at(pool: MHATokenToKVPool, slots: torch.Tensor) -> torch.Tensor:
    """What a pool has at `slots`, in the form of `kv_of`."""
    if pool.buffer.dtype == torch.float32:
        return pool.buffer.index_select(2, slots)
    read = [pool.read(layer, slots, torch.float32) for layer in range(pool.layers)]
    return torch.stack([torch.stack(one) for one in read])


@cache
def _positions(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)


class FakeSampledTokens:
    """Stands in for the `SampledTokenBuffer` of all ranks of a group."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def share(self, tokens: torch.Tensor | None, count: int) -> None:
        """Keeps rank 0's tokens."""
        if tokens is not None:
            self._tokens = [max(0, token) for token in tokens.tolist()]
            assert len(self._tokens) == count

    def resolve(self, token: int) -> int:
        """The token itself, or the one that it refers to."""
        return token if token >= 0 else self._tokens[token_of(0) - token]


class FakeRunner:
    """Stands in for `ModelRunner`. `between_layers` runs after each layer: others act while this rank computes."""

    def __init__(
        self,
        spec: ModelSpec,
        rank: int,
        size: int,
        page_size: int,
        pool_tokens: int,
        rows: int,
        sampled: FakeSampledTokens | None = None,
    ) -> None:
        """`sampled`: one for all ranks of a group."""
        self.sampled = sampled or FakeSampledTokens()
        self.spec, self.page_size, self.device = spec, page_size, torch.device("cpu")
        self.shard = shard_of(spec.layout, rank, size)
        slots = pool_tokens + page_size  # the first page is the trash page
        self.pool = make_pool(spec.layout, self.shard, slots, getattr(torch, spec.layout.dtype))
        self.pool.poison()
        self.weights_bytes = 0
        self.req_to_token = ReqToTokenPool(rows, spec.context_tokens)
        self.states = FakeStates(self) if spec.has_state else None
        self.between_layers: Callable[[], None] = lambda: None
        self.is_void: Callable[[], bool] = lambda: False
        """Whether the step goes on without KV that it should have waited for: what it computes is wrong."""
        self.layerwise: list[bool] = []
        """Whether each step so far was launched layer by layer."""

    @property
    def transfer_pools(self) -> TransferPools:
        """See `ModelRunner.transfer_pools`."""
        return TransferPools.of(self.pool, self.states.pool if self.states is not None else None)

    def computes_by_layer(self, batch: StepBatch) -> bool:
        """See `ModelRunner.computes_by_layer`."""
        return True

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """On the compute stream, as `forward`: done when it is launched, and others act before the step goes on."""
        copy_in_order(self.pool, self.page_size, copies)
        self.between_layers()

    def forward(
        self,
        batch: StepBatch,
        on_layer: LayerHook | None = None,
        scores: PromptScores | None = None,
        *,
        layerwise: bool = False,
    ) -> torch.Tensor:
        """float32 `[sequences, VOCAB]`. Not `layerwise`, as a recorded step: every layer reads before the first call
        of the hook. Forks that are computed again also read what their first sequence computes in the same step."""
        self.layerwise.append(layerwise)
        states = [self.states.read(one.row) for one in batch.sequences] if self.states is not None else []
        kv = [self._kv_of(one) for one in batch.sequences]
        slots = [self.req_to_token.table[one.row, one.start : one.stop].long() for one in batch.sequences]
        written = torch.cat(slots)
        for one in () if layerwise else batch.sequences:
            for _, _, pool, layer in self._places:
                self._require_read(one, pool, layer, one.start, written)
        for number, part, pool, layer in self._places:
            for where, computed in zip(slots, kv, strict=True):
                pool.write(layer, where, *computed[number][layer])
            if on_layer is not None:
                on_layer(part.layers.start + layer)
            if self.is_void():
                pool.buffer[layer].index_fill_(1, written, float("nan"))
                continue
            for one in batch.sequences if layerwise else ():
                self._require_read(one, pool, layer, one.stop, written[:0])
            self.between_layers()
        for one, read in zip(batch.sequences, states, strict=bool(states)):
            assert self.states is not None
            self.states.check(read, one.row, one.start)
            for position, slot in one.saves:
                assert one.start < position < one.stop <= max(one.prompt_tokens, one.stop)
                self.states.write(one.row, position)
                self.states.pool.copy([one.row], [slot])
            self.states.write(one.row, one.stop)
        if scores is not None and batch.scores:
            self._score(batch, scores)
        if self.is_void():
            return torch.zeros(len(batch.sequences), VOCAB)
        return torch.stack([fake_logits(self.context(one.row, one.stop)) for one in batch.sequences])

    def _require_read(
        self, one: SequenceSlice, pool: MHATokenToKVPool, layer: int, stop: int, written: torch.Tensor
    ) -> None:
        """Attention of a layer reads the positions below `stop`, all of which have KV by now, except for those in the
        slots `written`."""
        slots = self.req_to_token.table[one.row, :stop].long()
        found = pool.buffer[layer].index_select(1, slots[~torch.isin(slots, written)])
        assert not found.isnan().any(), f"row {one.row}: layer {layer} is read before all of {stop} has KV"

    def _score(self, batch: StepBatch, scores: PromptScores) -> None:
        """See `ModelRunner.forward`."""
        logits = [
            fake_logits(tokens[: at + 1])
            for one in batch.sequences
            if one.targets and (tokens := self.context(one.row, one.stop))
            for at in range(one.start, one.start + len(one.targets))
        ]
        scores.of(batch, self.device).add(torch.stack(logits), reads=True)

    def context(self, row: int, stop: int) -> list[int]:
        """The tokens below `stop`, out of the pool; every element of their KV is compared."""
        slots = self.req_to_token.table[row, :stop].long()
        tokens = torch.empty(0)
        for part, pool in zip(self.shard.parts, self.pool.parts, strict=True):
            found = _kv_at(pool, slots)
            if not len(tokens):
                tokens = torch.nan_to_num(found[0, 0, :, 0, 0], nan=-1.0).long()
            wanted = kv_of(tokens, _positions(0, stop), part, pool.head_dim)
            if not torch.equal(found, wanted):
                wrong = (found != wanted).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
                raise AssertionError(
                    f"row {row}: KV is wrong at positions {wrong} of {stop}, layers {part.layers}"
                )
        return tokens.tolist()

    def _kv_of(self, one: Any) -> list[torch.Tensor]:
        """The KV of a sequence's new tokens, for each class of layers."""
        tokens = torch.tensor([self.sampled.resolve(token) for token in one.tokens])
        positions = _positions(one.start, one.stop)
        parts = zip(self.shard.parts, self.pool.parts, strict=True)
        return [kv_of(tokens, positions, part, pool.head_dim) for part, pool in parts]

    @cached_property
    def _places(self) -> list[tuple[int, Shard, MHATokenToKVPool, int]]:
        """Number of its class, part, pool, and number within them, for each layer in the order of computation."""
        parts = list(zip(self.shard.parts, self.pool.parts, strict=True))
        most = max(pool.layers for _, pool in parts)
        return [
            (number, part, pool, layer)
            for layer in range(most)
            for number, (part, pool) in enumerate(parts)
            if layer < pool.layers
        ]


def state_tensors(tokens: Sequence[int]) -> list[torch.Tensor]:
    """The state behind `tokens`, for each of `STATE_FORMS`."""
    number = state_of(tokens)
    return [((places + number) % 1009).float() for places in _state_places()]


@cache
def _state_places() -> list[torch.Tensor]:
    """int64, in the form of each state: a number of each element."""
    counts = [math.prod(form.shape) for form in STATE_FORMS]
    return [
        (torch.arange(count) * 7 + tensor * 31).view(form.shape)
        for tensor, (count, form) in enumerate(zip(counts, STATE_FORMS, strict=True))
    ]


def stored_states(tokens: Sequence[int]) -> list[torch.Tensor]:
    """The state behind `tokens` as a storage keeps it: bytes `[layers, heads, head_bytes]` of each class."""
    pool = MambaPool(STATE_FORMS, 1)
    for (_, state), wanted in zip(pool.states(0), state_tensors(tokens), strict=True):
        state[0] = wanted
    return [view[:, 0, 0] for view in pool.class_views()]


class FakeStates:
    """Stands in for `RowStates`: every element of a request's state depends on all of its tokens."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        rows = runner.req_to_token.rows
        self.pool = MambaPool(STATE_FORMS, rows + 1 + rows)  # a trash row, and cached states
        for buffer in self.pool.buffers:
            buffer.fill_(torch.nan)

    def read(self, row: int) -> list[tuple[StatePlace, torch.Tensor]]:
        """A copy of the row's state, with which a step begins."""
        return [(place, found[0].clone()) for place, found in self.pool.states(row)]

    def check(self, read: list[tuple[StatePlace, torch.Tensor]], row: int, position: int) -> None:
        """The state that a step has read is that behind `position`, unless the request begins there. All KV of the
        row has been loaded meanwhile."""
        for (place, found), wanted in zip(read, self._wanted(row, position), strict=True):
            assert position == 0 or torch.equal(found, wanted), f"row {row}: {place} is wrong at {position}"

    def write(self, row: int, position: int) -> None:
        """The row's state becomes that behind `position`."""
        for (_, state), wanted in zip(self.pool.states(row), self._wanted(row, position), strict=True):
            state[0] = wanted

    def _wanted(self, row: int, position: int) -> list[torch.Tensor]:
        return state_tensors(self._runner.context(row, position))

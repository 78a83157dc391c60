"""Recurrent layers of a packed step: any mixture of prompt chunks and answer tokens, `[1, T]`, in one model call.

The registered modules (`registry`) read and write the states in `MambaPool` in place, by slot. The slot of a request
is its row. As in `generate()`, prompt tokens are computed with the formula for several tokens, and answer tokens with
the formula for a single token. The boundaries of chunks do not change the formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from disagg.core.errors import InvariantError
from disagg.kv.mamba_pool import MambaPool, StatePlace
from disagg.kv.upload import upload
from disagg.model.batch import SequenceSlice, StepBatch
from kernels.dispatch import Backend
from kernels.recurrent.causal_conv import causal_conv
from kernels.recurrent.gated_delta import gated_delta
from kernels.recurrent.slices import PackedSlices, Slice, uses_triton
from kernels.recurrent.state_space import StateSpace, state_space

UNBOUNDED = (0.0, float("inf"))


class Continued(NamedTuple):
    """Prompt slices that begin at a position whose recurrent state is saved."""

    rows: torch.Tensor
    """int64 `[n]`: rows whose states are saved before the slices are computed."""
    slots: torch.Tensor
    """int64 `[n]`: slots to which these states are saved."""
    slices: PackedSlices


@dataclass(frozen=True)
class RecurrentStep:
    """The slices of a step: chunks of prompts, and single tokens of answers. `prompts` or `answers` is None if the
    step has no such slices."""

    prompts: PackedSlices | None
    answers: PackedSlices | None
    continued: tuple[Continued, ...] = ()
    """The parts of the prompt slices that follow a saved position, in the order of computation. `prompts` has the
    parts before."""

    def of_prompts(self, state: torch.Tensor) -> Iterator[PackedSlices]:
        """Yields one group of prompt slices after the other; the slices of a group are computed together.

        Before each later group, copies the states to save within `state`, a layer's states `[slots, ...]`.
        """
        if self.prompts is not None:
            yield self.prompts
        for rows, slots, slices in self.continued:
            state.index_copy_(0, slots, state.index_select(0, rows))
            yield slices

    def each(self, state: torch.Tensor) -> Iterator[PackedSlices]:
        """Yields the groups of `of_prompts`, then the group of answer tokens."""
        yield from self.of_prompts(state)
        if self.answers is not None:
            yield self.answers


def is_answer(one: SequenceSlice) -> bool:
    """Returns whether a slice belongs to an answer. If the prompt length is unknown, a single token at a position
    above 0 counts as an answer token."""
    if one.prompt_tokens:
        return one.start >= one.prompt_tokens
    return one.start > 0 and len(one.tokens) == 1


def step_of(batch: StepBatch, device: torch.device) -> RecurrentStep:
    """Returns the recurrent slices of a batch. Raises InvariantError for a slice with an answer token and any other
    token."""
    rounds: list[list[Slice]] = []
    saves: list[list[tuple[int, int]]] = []
    answers: list[tuple[int, int]] = []
    first = 0
    for one in batch.sequences:
        count = len(one.tokens)
        answer_tokens = count if is_answer(one) else max(0, one.stop - (one.prompt_tokens or one.stop))
        if answer_tokens > 1 or 0 < answer_tokens < count:
            raise InvariantError(
                f"row {one.row}: recurrent layers compute an answer token by token, not tokens {one.start} to "
                f"{one.stop - 1} after a prompt of {one.prompt_tokens}"
            )
        if is_answer(one):
            answers.append((one.row, first))
        else:
            for number, piece in enumerate(_pieces(one, first)):
                if number == len(rounds):
                    rounds.append([])
                    saves.append([])
                rounds[number].append(piece)
                if number:
                    saves[number].append((one.row, one.saves[number - 1][1]))
        first += count
    return RecurrentStep(
        PackedSlices.of(rounds[0], device) if rounds else None,
        _singles(answers, device) if answers else None,
        tuple(_continued(pieces, saved, device) for pieces, saved in zip(rounds[1:], saves[1:], strict=True)),
    )


def _pieces(one: SequenceSlice, first: int) -> Iterator[Slice]:
    """Yields the parts of a prompt slice, split at the positions whose states are saved.

    `first`: index of the slice's first token among the step's tokens.
    """
    start = one.start
    for stop in (*(position for position, _ in one.saves), one.stop):
        if not start < stop <= one.stop:
            raise InvariantError(
                f"row {one.row}: no state can be saved at position {stop} of a slice {one.start}..{one.stop}"
            )
        yield Slice(one.row, first + start - one.start, stop - start, start > 0)
        start = stop


def _continued(pieces: list[Slice], saved: list[tuple[int, int]], device: torch.device) -> Continued:
    rows, slots = upload([number for pair in zip(*saved, strict=True) for number in pair], device).view(2, -1)
    return Continued(rows, slots, PackedSlices.of(pieces, device))


def _singles(answers: list[tuple[int, int]], device: torch.device) -> PackedSlices:
    slices = PackedSlices.of([Slice(row, first, 1, True) for row, first in answers], device)
    return replace(slices, host=None)


def decode_step(rows: torch.Tensor) -> RecurrentStep:
    """Returns the slices of a step with one answer token for each of `rows`, int64 `[n]`. Does not synchronize."""
    return RecurrentStep(None, PackedSlices.single(rows, torch.arange(len(rows), device=rows.device)))


class PackedStates:
    """The pool of states and the current step, used by the registered modules of one model. Owned by the compute
    thread."""

    def __init__(self, how: Backend, device: torch.device) -> None:
        """`how`: see `ModelConfig.recurrent_kernels`. Raises ConfigError if the device has no such kernels."""
        uses_triton(how, device)
        self._how = how
        self._pool: MambaPool | None = None
        self._step: RecurrentStep | None = None

    def use(self, pool: MambaPool) -> None:
        """Makes `pool` the memory of the states in all later steps."""
        self._pool = pool

    @contextmanager
    def during(self, step: RecurrentStep) -> Iterator[None]:
        """Inside the block, the model computes `step`."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool
    ) -> torch.Tensor:
        """Returns the causal convolution of a layer, `[T, channels]`. `weight`: the weight of a depthwise
        `nn.Conv1d`."""
        state, out = self._state(layer, "conv"), torch.empty_like(x)
        for slices in self._current.each(state):
            causal_conv(x, weight.squeeze(1), bias, state, slices, out, silu=silu, how=self._how)
        return out

    def state_space(
        self,
        layer: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        parameters: StateSpace,
    ) -> torch.Tensor:
        """Returns the output of a layer's state space; see `kernels.recurrent.state_space`.

        The bounds of the time step in `parameters` apply to prompts only.
        """
        state, out = self._state(layer, "recurrent"), torch.empty_like(x)
        state = state.view(len(state), *x.shape[1:], b.shape[2])
        step, unbounded = self._current, replace(parameters, dt_limit=UNBOUNDED)
        for slices in step.of_prompts(state):
            state_space(x, dt, b, c, parameters, state, slices, out, how=self._how)
        if step.answers is not None:
            state_space(x, dt, b, c, unbounded, state, step.answers, out, how=self._how)
        return out

    def gated_delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the output of a layer's gated delta rule; see `kernels.recurrent.gated_delta`."""
        state, out = self._state(layer, "recurrent"), torch.empty_like(v)
        for slices in self._current.each(state):
            gated_delta(q, k, v, decay, beta, state, slices, out, how=self._how)
        return out

    @property
    def _current(self) -> RecurrentStep:
        if self._step is None:
            raise InvariantError("a recurrent module was called outside of a step")
        return self._step

    def _state(self, layer: int, kind: str) -> torch.Tensor:
        if self._pool is None:
            raise InvariantError("a recurrent module was called before its states were allocated")
        return self._pool.at(StatePlace(layer, 0, kind))

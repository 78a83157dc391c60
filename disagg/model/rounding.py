"""Compares the log-probabilities of two engines with the difference that rounding explains.

In 16 bits, a sum depends on the batch, on the splits of contexts and on the number of ranks. Two correct engines can
therefore choose different tokens if logits are nearly equal. The engine that generated an answer is compared with a
second one, the *judging engine*. At every position of the answer, both compute log-probabilities after the same
prefix.

The effect of rounding depends on the weights, because errors can grow from layer to layer. The judging engine
therefore runs a second time with noise of one unit in the last place on each module's output. This noise is three to
five times as large as one rounding, whose root mean square is a fifth to a third of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from disagg.core.types import TokenLogprobs

View = tuple[float, ...]
"""An engine's log-probabilities at one position: of each compared token, then of `Judge.best`."""


class Judge(NamedTuple):
    """The judging engine's log-probabilities for an answer, position by position."""

    best: list[int]
    """The likeliest token of each position."""
    views: list[View]
    noisy: list[View]
    """Log-probabilities of the same tokens, computed with noise."""


class Judged(NamedTuple):
    """Difference of two engines' log-probabilities at one position of an answer, after the same prefix."""

    position: int
    token: int
    """The answer's token."""
    best: int
    """The likeliest token of the judging engine."""
    difference: float
    """Difference of the two engines' log-probabilities, in nats: the root mean square over the compared tokens."""
    gap: float
    """Log-probability of the likeliest token minus that of `token`, in nats; the larger value of the two engines."""
    explained: float
    """The largest `difference` that rounding explains. The limit of `gap` is twice this value, because two tokens
    contribute to a gap.
    """

    @property
    def within(self) -> bool:
        """Whether rounding explains `difference` and `gap`; false for NaN."""
        return self.difference <= self.explained and self.gap <= 2 * self.explained


@contextmanager
def output_noise(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, adds noise of one unit of `dtype` to the output of each module except the embeddings.

    The modules are linear layers, norms, whole attention modules and whole layers. The unit is `finfo.eps` times each
    value. Recorded steps get no noise; see `ModelRunner.eager`.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def with_noise(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        noise = torch.randn(tensor.shape, generator=generators[tensor.device], device=tensor.device)
        return (tensor.float() * (1 + torch.finfo(dtype).eps * noise)).to(tensor.dtype)

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if _is_float(output):
            return with_noise(output)
        if type(output) is tuple and output and _is_float(output[0]):
            return with_noise(output[0]), *output[1:]
        return None  # unchanged

    handles = [m.register_forward_hook(hook) for m in model.modules() if not isinstance(m, nn.Embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def view_of(logits: torch.Tensor, tokens: Sequence[int]) -> View:
    """Returns the log-probabilities of `tokens` for `logits`, `[vocab]` on any device. Synchronizes."""
    found = torch.log_softmax(logits.double(), dim=-1)[torch.tensor(tokens, device=logits.device)]
    return tuple(found.tolist())


def judge_by(
    models: Sequence[nn.Module],
    dtype: torch.dtype,
    logits: Callable[[], Iterable[torch.Tensor]],
    compared: Sequence[Sequence[int]],
) -> Judge:
    """Returns the judging engine's log-probabilities for one answer, computed without and with noise.

    `logits()` yields `[vocab]` for each position of the answer, computed by `models` in `dtype`. This function calls
    `logits` twice.
    `compared` holds the compared tokens of each position.
    """
    best: list[int] = []
    views: list[View] = []
    for row, tokens in zip(logits(), compared, strict=True):
        best.append(int(row.argmax()))
        views.append(view_of(row, [*tokens, best[-1]]))
    with ExitStack() as noise:
        for model in models:
            noise.enter_context(output_noise(model, dtype))
        again = [view_of(row, [*a, b]) for row, a, b in zip(logits(), compared, best, strict=True)]
    return Judge(best, views, again)


def compared_tokens(reported: TokenLogprobs) -> list[int]:
    """Returns the tokens whose log-probabilities are compared: the chosen one and the likeliest ones."""
    return [reported.token, *(token for token, _ in reported.top)]


def judge_answer(reported: Sequence[TokenLogprobs], judge: Judge) -> list[Judged]:
    """Compares every position of an answer. `reported`: log-probabilities of the engine that generated the answer."""
    noise = [_rms(a, b) for a, b in zip(judge.views, judge.noisy, strict=True)]
    usual = math.sqrt(sum(one * one for one in noise) / len(noise))
    found = []
    for position, (one, best, theirs) in enumerate(zip(reported, judge.best, judge.views, strict=True)):
        mine = [one.logprob, *(logprob for _, logprob in one.top)]
        gap = max(theirs[-1] - theirs[0], max(mine) - mine[0])
        explained = max(usual, noise[position])
        found.append(Judged(position, one.token, best, _rms(mine, theirs[:-1]), gap, explained))
    return found


def _rms(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(mine, theirs, strict=True)) / len(mine))


def worst_of(judged: Sequence[Judged]) -> Judged:
    """Returns the first position that rounding does not explain, else the position nearest to its limit."""
    beyond = next((one for one in judged if not one.within), None)
    return beyond or max(judged, key=lambda one: max(one.difference, one.gap / 2) / (one.explained or 1.0))


def words(judged: Judged) -> str:
    """Returns a description of a position, for a report or an error."""
    same = judged.token == judged.best
    return (
        f"token {judged.position + 1} is {judged.token}{'' if same else f', not {judged.best}'}: "
        f"log-probabilities of the likeliest tokens differ by {judged.difference:.2g} (rounding explains "
        f"{judged.explained:.2g}); the token is {judged.gap:.2g} below the likeliest one ({2 * judged.explained:.2g})"
    )

"""Whether two engines' log-probabilities differ by no more than rounding explains.

In 16 bits a sum depends on what else is in the batch, on how contexts are split and on how many ranks share a layer.
Two engines may then choose different tokens although neither is wrong: tokens whose logits are nearly equal. Here
both engines' log-probabilities are compared behind the same prefix, at every position of the answer that is judged.

What rounding does to a model depends on its weights: some let an error grow from layer to layer. So it is measured,
on the engine that judges: once more with noise of one unit of its type on the result of each of its modules. One
rounding is a fifth of a unit to a third (its root mean square), and not all of them differ between two engines.
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
"""An engine's log-probabilities at one position behind a given prefix: of the tokens asked for, then of `best`."""


class Judge(NamedTuple):
    """What the engine that judges makes of an answer, position by position."""

    best: list[int]
    """Its likeliest token."""
    views: list[View]
    shaken: list[View]
    """The same, of the same tokens, with noise."""


class Judged(NamedTuple):
    """Two engines' log-probabilities at one position of an answer, behind the same prefix."""

    position: int
    token: int
    """That the answer has."""
    best: int
    """The likeliest token of the engine that judges."""
    difference: float
    """Root mean square over the compared tokens, in nats."""
    gap: float
    """By how much the engine that judges finds `best` likelier than `token`, in nats; or the answer's own engine
    another token, if that is more."""
    explained: float
    """What rounding explains of `difference`. Of `gap` it is twice that: each of two tokens may be off by it."""

    @property
    def within(self) -> bool:
        """Whether rounding explains both. Not so for NaN."""
        return self.difference <= self.explained and self.gap <= 2 * self.explained


@contextmanager
def shaken(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, what each module gives, embeddings excepted, has noise of one unit of `dtype`: linear layers and norms,
    attention as a whole, and layers, whose result is the sum that all others are added to.

    The unit is `finfo.eps`, times each value. Recorded steps do not see it: see `ModelRunner.eager`.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        noise = torch.randn(tensor.shape, generator=generators[tensor.device], device=tensor.device)
        return (tensor.float() * (1 + torch.finfo(dtype).eps * noise)).to(tensor.dtype)

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if _is_float(output):
            return noisy(output)
        if type(output) is tuple and output and _is_float(output[0]):
            return noisy(output[0]), *output[1:]
        return None  # as it is

    handles = [m.register_forward_hook(hook) for m in model.modules() if not isinstance(m, nn.Embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def view_of(logits: torch.Tensor, tokens: Sequence[int]) -> View:
    """Log-probabilities of `tokens`; `logits`: `[vocab]`, any device. Waits for the device."""
    found = torch.log_softmax(logits.double(), dim=-1)[torch.tensor(tokens, device=logits.device)]
    return tuple(found.tolist())


def judge_by(
    models: Sequence[nn.Module],
    dtype: torch.dtype,
    logits: Callable[[], Iterable[torch.Tensor]],
    asked: Sequence[Sequence[int]],
) -> Judge:
    """`logits()`: `[vocab]` for each position of an answer, behind what the answer has before it, by `models`, which
    compute in `dtype`; called twice. `asked`: for each position, the tokens that are compared.
    """
    best: list[int] = []
    views: list[View] = []
    for row, tokens in zip(logits(), asked, strict=True):
        best.append(int(row.argmax()))
        views.append(view_of(row, [*tokens, best[-1]]))
    with ExitStack() as noise:
        for model in models:
            noise.enter_context(shaken(model, dtype))
        again = [view_of(row, [*a, b]) for row, a, b in zip(logits(), asked, best, strict=True)]
    return Judge(best, views, again)


def asked_of(told: TokenLogprobs) -> list[int]:
    """The tokens whose log-probabilities are compared: the chosen one, and the likeliest ones."""
    return [told.token, *(token for token, _ in told.top)]


def judge_answer(told: Sequence[TokenLogprobs], judge: Judge) -> list[Judged]:
    """Every position of an answer: `told` by the engine whose answer it is."""
    noise = [_rms(a, b) for a, b in zip(judge.views, judge.shaken, strict=True)]
    usual = math.sqrt(sum(one * one for one in noise) / len(noise))
    found = []
    for position, (one, best, theirs) in enumerate(zip(told, judge.best, judge.views, strict=True)):
        mine = [one.logprob, *(logprob for _, logprob in one.top)]
        gap = max(theirs[-1] - theirs[0], max(mine) - mine[0])
        explained = max(usual, noise[position])
        found.append(Judged(position, one.token, best, _rms(mine, theirs[:-1]), gap, explained))
    return found


def _rms(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(mine, theirs, strict=True)) / len(mine))


def worst_of(judged: Sequence[Judged]) -> Judged:
    """The first one that rounding does not explain; else the one that is nearest to that."""
    beyond = next((one for one in judged if not one.within), None)
    return beyond or max(judged, key=lambda one: max(one.difference, one.gap / 2) / (one.explained or 1.0))


def words(judged: Judged) -> str:
    """What a report, or an error, says of a position."""
    same = judged.token == judged.best
    return (
        f"token {judged.position + 1} is {judged.token}{'' if same else f', not {judged.best}'}: "
        f"log-probabilities of the likeliest tokens differ by {judged.difference:.2g} (rounding explains "
        f"{judged.explained:.2g}), those of the two by {judged.gap:.2g} ({2 * judged.explained:.2g})"
    )

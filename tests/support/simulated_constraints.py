"""Grammars of simulations: pure functions of the answer so far, whose masks take time and have no threads.

A constraint follows one answer, as a real matcher does. Tokens that do not continue this answer raise
`AssertionError`; a real matcher would return a wrong mask without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from disagg.model.sampling.constraints import Mask

MOST_TOKENS = 1024
"""Size of the largest vocabulary."""
Later = Callable[[Callable[[], None]], None]
"""Runs its argument some time later."""


def allowed(grammar: str, answer: Sequence[int]) -> list[int]:
    """The tokens that may follow `answer`: about half of all. They depend on every token of the answer."""
    state = len(grammar)
    for token in answer:
        state = (state * 31 + token + 1) % 10_007
    return [token for token in range(MOST_TOKENS) if (token * 7 + state) % 11 < 5]


class SimulatedConstraint:
    """Stands in for `AnswerConstraint`."""

    def __init__(self, grammar: str, answered: Sequence[int] = (), later: Later | None = None) -> None:
        """`later` calls back when the first mask is ready; None: it is ready at once."""
        self._grammar, self._known = grammar, list(answered)
        self._calls: list[Callable[[], object]] = []
        self.ready = later is None
        if later is not None:
            later(self._compiled)

    def _compiled(self) -> None:
        self.ready, calls = True, self._calls
        for call in calls:
            call()

    def when_ready(self, call: Callable[[], object]) -> None:
        """See `AnswerConstraint.when_ready`."""
        if self.ready:
            call()
        else:
            self._calls.append(call)

    def prepare(self, answer: Sequence[int]) -> None:
        """See `AnswerConstraint.prepare`."""
        known = self._known
        if len(answer) >= len(known):
            assert list(answer[: len(known)]) == known, f"the grammar followed {known}, not {answer}"
        self._known = list(answer)

    def advance(self, token: int) -> None:
        """See `Constraints.advance`."""
        assert self.ready, "a token was drawn without a mask"
        self._known.append(token)

    def mask(self, answer: Sequence[int]) -> Mask:
        """See `AnswerConstraint.mask`."""
        assert self.ready, "a step would wait for the grammar"
        self.prepare(answer)
        bits = np.zeros(MOST_TOKENS, dtype=np.uint8)
        bits[allowed(self._grammar, answer)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class SimulatedConstraints:
    """Stands in for `Constraints`."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def answer(self, grammar: str, answered: Sequence[int] = ()) -> SimulatedConstraint | None:
        """See `Constraints.answer`."""
        return SimulatedConstraint(grammar, answered, self._later) if grammar else None

    def advance(self, answers: Sequence[tuple[SimulatedConstraint | None, int]]) -> None:
        """See `Constraints.advance`."""
        for constraint, token in answers:
            if constraint is not None:
                constraint.advance(token)

    def close(self) -> None: ...

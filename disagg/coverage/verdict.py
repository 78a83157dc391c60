"""The result of the check of one model type."""

from __future__ import annotations

from typing import Literal

import msgspec

Result = Literal["exact", "refused", "wrong", "failed"]


class Verdict(msgspec.Struct, frozen=True):
    """The result of the check of one model type, with the reason."""

    model_type: str
    result: Result
    """Outcome of the check. `exact`: tokens equal those of `generate()` in every run. `refused`: rejected at start
    with an error. `wrong`: tokens differ. `failed`: any other error, a defect of the engine or of the check."""
    why: str = ""
    """The reason in one line; empty if the result is `exact`."""
    whole: tuple[str, ...] = ()
    """Names of the parts of an exact model that every rank holds whole, because tensor parallelism cannot split
    them."""

    @property
    def is_fault(self) -> bool:
        """Whether the verdict indicates a defect."""
        return self.result in ("wrong", "failed")


def one_line(exc: BaseException) -> str:
    """Returns an error's text in one line. The name of the class precedes the text, except for `ValueError`s with a
    text."""
    text = " ".join(str(exc).split())
    return text if text and isinstance(exc, ValueError) else f"{type(exc).__name__}: {text}"

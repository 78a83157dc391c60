"""What was found of a model type."""

from __future__ import annotations

from typing import Literal

import msgspec

Result = Literal["exact", "refused", "wrong", "failed"]


class Verdict(msgspec.Struct, frozen=True):
    """Of one model type. Can cross a pipe."""

    model_type: str
    result: Result
    """`exact`: tokens are those of `generate()` in every run. `refused`: in one line, at start. `wrong`: tokens
    differ. `failed`: neither, which is a fault of ours or of the check."""
    why: str = ""
    """The reason in one line, unless exact."""
    whole: tuple[str, ...] = ()
    """Parts of an exact model that every rank of a group of two holds whole."""

    @property
    def is_fault(self) -> bool:
        """Whether somebody must look at it."""
        return self.result in ("wrong", "failed")


def one_line(exc: BaseException) -> str:
    """An error's text without line breaks; its class when that is none of ours, or when it has no text."""
    text = " ".join(str(exc).split())
    return text if text and isinstance(exc, ValueError) else f"{type(exc).__name__}: {text}"

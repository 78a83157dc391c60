"""Base class of the configuration sections with its checks, and the error of a field."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from disagg.core.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20


class FieldError(ConfigError):
    """The value of one field is not allowed. `load_config` adds the section and the origin of the value."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r} is not allowed; it must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[FieldError], tuple[str, object, str]]:
        """Pickles the three arguments of the constructor, because `Exception.args` has only the message."""
        return type(self), (self.field, self.value, self.allowed)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of the sections. Its methods are checks for `__post_init__`; each raises `FieldError`."""

    def _at_least(self, minimum: float, *fields: str) -> None:
        """Refuses a field below `minimum`. None, which stands for an automatic value, is allowed."""
        for name in fields:
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise FieldError(name, value, f"at least {minimum}")

    def _positive(self, *fields: str) -> None:
        for name in fields:
            if not getattr(self, name) > 0:
                raise FieldError(name, getattr(self, name), "more than 0")

    def _one_of(self, field: str, choices: Any) -> None:
        allowed: Collection[str] = choices.__args__
        if getattr(self, field) not in allowed:
            raise FieldError(field, getattr(self, field), "one of " + ", ".join(allowed))

    def _needs(self, condition: bool, field: str, allowed: str) -> None:
        if not condition:
            raise FieldError(field, getattr(self, field), allowed)

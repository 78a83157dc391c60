"""Command-line flags as frozen dataclasses.

A field of an options class is one flag: `Annotated[type, typer.Option(...)]` with a default. A field whose type is
another dataclass stands for all flags of that class, so commands can share groups of flags. Typer gets a flat list of
all flags, so a field name may occur only once in a command.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")
Result = TypeVar("Result")


def with_options(kind: type[Options]) -> Callable[[Callable[[Options], Result]], Callable[..., Result]]:
    """Returns a decorator for a command that takes one options object of class `kind`.

    Typer parses the flags of `kind` and of its nested classes; the wrapper builds the object from their values.
    """

    def wrap(command: Callable[[Options], Result]) -> Callable[..., Result]:
        flags = [
            inspect.Parameter(
                flag.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if flag.default is MISSING else flag.default,
                annotation=annotation,
            )
            for flag, annotation in _flat_fields(kind)
        ]

        @functools.wraps(command)
        def run(**values: Any) -> Result:
            return command(_build(kind, values))

        run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
        run.__annotations__ = {flag.name: flag.annotation for flag in flags}
        return run

    return wrap


@dataclass(frozen=True)
class FlagValue:
    """One flag of an options object, with the value that it got on the command line or by default."""

    flag: str
    """The flag's first name on the command line, such as `--prefill-tp`."""
    value: Any
    is_default: bool
    metadata: tuple[Any, ...]
    """The annotations of the field, including `typer.Option(...)`."""


def flag_values(options: Any) -> Iterator[FlagValue]:
    """Yields the flags of an options object and of the objects nested in it, in the order of `--help`."""
    hints = get_type_hints(type(options), include_extras=True)
    for one in fields(options):
        value = getattr(options, one.name)
        if is_dataclass(hints[one.name]):
            yield from flag_values(value)
            continue
        metadata = hints[one.name].__metadata__
        [info] = [item for item in metadata if isinstance(item, typer.models.ParameterInfo)]
        # `typer.Option` receives the flag's first name as its parameter `default`; typer corrects that later.
        flag = info.default.split("/")[0] if isinstance(info.default, str) else one.name
        # Some versions of typer pass an empty list for a repeatable flag whose default is None.
        yield FlagValue(flag, value, value == one.default or value == [], metadata)


def _flat_fields(kind: type) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            yield from _flat_fields(hints[one.name])
        else:
            yield one, hints[one.name]


def _build(kind: type[Options], values: Mapping[str, Any]) -> Options:
    hints = get_type_hints(kind)
    arguments = {
        one.name: _build(hints[one.name], values) if is_dataclass(hints[one.name]) else values[one.name]
        for one in fields(kind)  # type: ignore[arg-type]
    }
    return kind(**arguments)

"""The flags and defaults of every command, against `flags.txt`: a change of the command line shows there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from disagg.cli.app import command_line
from disagg.cli.options import flag_values, with_options


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


def described(parameter: Any) -> str:
    """Returns e.g. `--tokens=8192`; `!` stands for a required flag."""
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    return f"{names}!" if parameter.required else f"{names}={parameter.default}"


def test_every_command_has_the_same_flags_and_defaults() -> None:
    lines = (Path(__file__).parent / "flags.txt").read_text().splitlines()
    found = [
        f"{name}: " + " ".join(described(one) for one in command.params)
        for name, command in commands(command_line())
    ]
    assert [line.strip() for line in found] == lines


@dataclass(frozen=True, kw_only=True)
class Inner:
    a: Annotated[int, typer.Option("--a/--no-a")] = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    b: Annotated[str, typer.Option("--b")]
    inner: Inner
    c: Annotated[list[str] | None, typer.Option("--c")] = None


def test_nested_options_are_flat_on_the_command_line() -> None:
    @with_options(Outer)
    def command(options: Outer) -> Outer:
        """The help."""
        return options

    flags = inspect.signature(command).parameters
    assert list(flags) == ["b", "a", "c"]
    assert flags["b"].default is inspect.Parameter.empty
    assert command.__doc__ == "The help."
    options = command(b="x", a=2, c=[])
    assert options == Outer(b="x", inner=Inner(a=2), c=[])
    assert [(one.flag, one.value, one.is_default) for one in flag_values(options)] == [
        ("--b", "x", False),
        ("--a", 2, False),
        ("--c", [], True),
    ]


def test_a_name_in_two_groups_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        first: Inner
        a: Annotated[int, typer.Option("--other")] = 0

    Twice.__annotations__["first"] = Inner
    with pytest.raises(ValueError, match="duplicate parameter name: 'a'"):
        with_options(Twice)(print)

"""`disagg launch` and `disagg scale`: flags to a `Config`, then over to `disagg.launch` and `disagg.scale`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer

from disagg.cli_group_flags import with_group_flags
from disagg.cli_run import ConfigFlag, JoinFlag, SetFlag, configuration
from disagg.core.config import Role
from disagg.core.errors import ConfigError

CountsArgument = Annotated[
    list[str], typer.Argument(metavar="ROLE=COUNT...", help="prefill=2, decode=1, or both; or colocated=2.")
]
_COUNT = re.compile(r"(prefill|decode|colocated)=([1-9]\d{0,3})")


@with_group_flags
def launch(given: Mapping[str, Any]) -> None:
    """Start groups that `disagg serve --join` serves with, until SIGINT or SIGTERM."""
    settled = configuration(given)
    from disagg.launch import run_launch  # it brings torch, Ray and transformers along

    run_launch(settled)


def scale(
    counts: CountsArgument,
    join: JoinFlag = None,
    config: ConfigFlag = None,
    settings: SetFlag = None,
) -> None:
    """Have so many groups of a running `disagg launch`: add some, or drain and stop the newest."""
    settled = configuration(dict(locals()))  # the flags by parameter name, before anything else is assigned
    wanted = _counts(counts)
    if join is None:
        raise ConfigError(
            "--join tcp://HOST:PORT is missing: which cluster? `disagg launch` says its address"
        )
    from disagg.scale import run_scale

    run_scale(settled, join, wanted)


def _counts(given: list[str]) -> dict[Role, int]:
    wanted: dict[Role, int] = {}
    for text in given:
        match = _COUNT.fullmatch(text)
        if match is None or match[1] in wanted:
            raise ConfigError(
                f"{text}: write prefill=2 or decode=1 (colocated=2 where groups do both), each at most once, with a "
                f"count from 1"
            )
        wanted[cast(Role, match[1])] = int(match[2])
    return wanted

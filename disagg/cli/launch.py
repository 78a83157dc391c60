"""`disagg launch` and `disagg scale`: flags for `disagg.commands.launch` and `disagg.commands.scale`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, cast

import typer

from disagg.cli.flags import ClusterFlags, ConfigFlags, JoinFlag, required_join
from disagg.cli.imports import heavy_imports
from disagg.cli.options import with_options
from disagg.cli.settings import configuration
from disagg.commands.early import check_launch, pinned
from disagg.core.config.read import Role
from disagg.core.errors import ConfigError

_COUNT = re.compile(r"(prefill|decode|colocated)=([1-9]\d{0,3})")


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Flags of `disagg scale`."""

    counts: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE=COUNT...",
            help="Number of groups by role: prefill=2, decode=1, or both; or colocated=2.",
        ),
    ]
    join: JoinFlag = None
    source: ConfigFlags


@with_options(ClusterFlags)
def launch(options: ClusterFlags) -> None:
    """Start groups for `disagg serve --join`, until SIGINT or SIGTERM."""
    config = configuration(options.source, options)
    check_launch(config)
    config = pinned(config)
    with heavy_imports():
        from disagg.commands.launch import run_launch  # imports torch, Ray and transformers

    run_launch(config)


@with_options(ScaleOptions)
def scale(options: ScaleOptions) -> None:
    """Set the number of groups of a running `disagg launch`: start more, or drain and stop the newest."""
    config = configuration(options.source, options)
    counts = _counts(options.counts)
    directory = required_join(options.join)
    from disagg.commands.scale import run_scale

    run_scale(config, directory, counts)


def _counts(texts: list[str]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for text in texts:
        match = _COUNT.fullmatch(text)
        if match is None or match[1] in counts:
            raise ConfigError(
                f"{text}: write prefill=2 or decode=1 (colocated=2 where groups do both), each at most once, with a "
                f"count from 1"
            )
        counts[cast(Role, match[1])] = int(match[2])
    return counts

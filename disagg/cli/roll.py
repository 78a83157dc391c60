"""`disagg roll`: flags for `disagg.commands.roll`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.flags import ConfigFlags, JoinFlag, ModelFlag, RevisionFlag, required_join
from disagg.cli.options import with_options
from disagg.cli.settings import overrides
from disagg.core.config.read import Config, Role, read_settings, with_settings


@dataclass(frozen=True, kw_only=True)
class RollOptions:
    """Flags of `disagg roll`."""

    join: JoinFlag = None
    model: ModelFlag = None
    revision: RevisionFlag = None
    source: ConfigFlags
    kind: Annotated[
        Role | None,
        typer.Option("--kind", help="Only groups of this role: prefill, decode or colocated [all roles]."),
    ] = None
    max_surge: Annotated[
        int,
        typer.Option(
            "--max-surge",
            metavar="N",
            min=0,
            help="Groups that may run in addition to the usual number; 0: end a group before its replacement.",
        ),
    ] = 1
    allow_pause: Annotated[
        bool,
        typer.Option(
            "--allow-pause",
            help="End the only group of a role first, if no device is free; requests wait for its replacement.",
        ),
    ] = False


@with_options(RollOptions)
def roll(options: RollOptions) -> None:
    """Replace the groups of a running `disagg launch`, one by one, by groups with other settings."""
    directory = required_join(options.join)
    settings = read_settings(options.source.config, os.environ, overrides(options.source, options))
    # The directory applies the other settings to those of the groups; alone they need not be a valid configuration.
    config = with_settings(Config(), [one for one in settings if one.section in ("control", "log")])
    from disagg.commands.roll import roll_request, run_roll

    kinds = () if options.kind is None else (options.kind,)
    request = roll_request(settings, kinds, options.max_surge, options.allow_pause)
    run_roll(config, directory, request, typer.echo)

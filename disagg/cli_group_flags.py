"""The flags of commands that start groups and stay: `disagg launch` and `disagg serve`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from disagg.cli_run import (
    ChunkTokensFlag,
    ColocatedFlag,
    ConfigFlag,
    DecodePageFlag,
    DecodeTpFlag,
    DeterministicFlag,
    DeviceFlag,
    DTypeFlag,
    GroupsFlag,
    ModelFlag,
    PrefillPageFlag,
    PrefillTpFlag,
    RandomInitFlag,
    RayFlag,
    RingBytesFlag,
    SetFlag,
    TpFlag,
    TransportFlag,
)


def _group_flags(
    model: ModelFlag = None,
    random_init: RandomInitFlag = None,
    dtype: DTypeFlag = None,
    deterministic: DeterministicFlag = None,
    prefill_tp: PrefillTpFlag = None,
    decode_tp: DecodeTpFlag = None,
    colocated: ColocatedFlag = False,
    tp: TpFlag = None,
    groups: GroupsFlag = None,
    device: DeviceFlag = None,
    ray: RayFlag = None,
    config: ConfigFlag = None,
    settings: SetFlag = None,
    chunk_tokens: ChunkTokensFlag = None,
    prefill_page_size: PrefillPageFlag = None,
    decode_page_size: DecodePageFlag = None,
    ring_bytes: RingBytesFlag = None,
    transport: TransportFlag = None,
) -> None:
    """Its signature is what is shared: typer reads a command's flags from there."""


def with_group_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the flags above before its own.

    It is called with a mapping of all flags by parameter name, as `cli_run.configuration` takes it, and with its own
    flags by name once more.
    """
    shared = inspect.signature(_group_flags, eval_str=True).parameters.values()
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(given, **{flag.name: given[flag.name] for flag in own})

    run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {flag.name: flag.annotation for flag in (*shared, *own)}
    return run

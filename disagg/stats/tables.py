"""Builds tables of a server's current memory use with rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.plan.transfer import describe_bytes
from disagg.stats.memory import GroupMemory, RankMemory
from disagg.stats.tiers import TierUse
from disagg.top.words import part_words, plain, time_words


def tables(groups: Sequence[GroupMemory]) -> RenderableType:
    """Returns a table of the ranks in bytes, a table of the groups in tokens, and tables of recurrent states and of
    the prefix cache's lower tiers if any group has them."""
    if not groups:
        return Text("no group has reported its memory yet", style="yellow")
    found = [_ranks_table([rank for group in groups for rank in group.ranks]), _groups_table(groups)]
    if stateful := [group for group in groups if group.state_slots]:
        found.append(_states_table(stateful))
    if tiered := [(group.name, group.tiers) for group in groups if group.tiers is not None]:
        found.append(_tiers_table(tiered))
    return Group(*found)


def _ranks_table(ranks: Sequence[RankMemory]) -> Table:
    limited = any(rank.device_bytes for rank in ranks)
    stateful = any(_state_bytes(rank) for rank in ranks)
    table = _table(
        "Memory of each rank",
        ("rank", "weights", "KV used", "waste", "cached", "free", "transfer", "in use"),
        (*(("states", "in use") if stateful else ()), *(("of its GPU",) if limited else ())),
    )
    for rank in ranks:
        kinds = rank.kinds
        transfer_bytes = kinds["transfer_used"] + kinds["transfer_free"]
        cells = [
            describe_bytes(kinds["weights"]),
            describe_bytes(kinds["kv_tokens"] + kinds["kv_waste"]),
            part_words(kinds["kv_waste"], kinds["kv_tokens"] + kinds["kv_waste"]),
            describe_bytes(kinds["kv_cached"]),
            describe_bytes(kinds["kv_free"]),
            describe_bytes(transfer_bytes),
            part_words(kinds["transfer_used"], transfer_bytes),
        ]
        if stateful:
            state_bytes = _state_bytes(rank)
            cells += [
                describe_bytes(state_bytes),
                part_words(kinds["state_used"] + kinds["state_cached"], state_bytes),
            ]
        cells += [describe_bytes(rank.device_bytes)] if limited else []
        table.add_row(Text(plain(rank.name)), *cells)
    return table


def _state_bytes(rank: RankMemory) -> int:
    kinds = rank.kinds
    return kinds["state_used"] + kinds["state_cached"] + kinds["state_free"]


def _groups_table(groups: Iterable[GroupMemory]) -> Table:
    table = _table(
        "KV pool of each group, in tokens",
        ("group", "page", "pool", "used", "waste", "cached", "free", "preempted", "pages evicted"),
    )
    for group in groups:
        counts = (
            group.page_size,
            group.pool_tokens,
            group.used_tokens,
            group.waste_tokens,
            group.cached_tokens,
            group.free_tokens,
            group.preemptions_total,
            group.evicted_pages_total,
        )
        table.add_row(Text(plain(group.name)), *(f"{count:,}" for count in counts))
    return table


def _states_table(groups: Iterable[GroupMemory]) -> Table:
    table = _table(
        "State slots of each group", ("group", "requests", "used", "cache", "cached", "states evicted")
    )
    for group in groups:
        counts = (
            group.state_slots,
            group.state_slots_used,
            group.cached_state_slots,
            group.cached_states,
            group.evicted_states_total,
        )
        table.add_row(Text(plain(group.name)), *(f"{count:,}" for count in counts))
    return table


def _tiers_table(groups: Iterable[tuple[str, TierUse]]) -> Table:
    table = _table(
        "Prefix cache of each group, and bytes moved between its tiers",
        (
            "group",
            "hits pool",
            "host",
            "storage",
            "host memory",
            "used",
            "stored",
            "loaded",
            "written",
            "fetched",
        ),
        ("under way", "saved"),
    )
    for name, tiers in groups:
        moved = (
            tiers.host_bytes,
            tiers.host_used_bytes,
            tiers.stored_bytes,
            tiers.loaded_bytes,
            tiers.written_bytes,
            tiers.fetched_bytes,
        )
        table.add_row(
            Text(plain(name)),
            *(f"{share:.0%}" for share in tiers.hits),
            *map(describe_bytes, moved),
            f"{tiers.pages_under_way:,}",
            time_words(tiers.saved_s),
        )
    return table


def _table(title: str, columns: Sequence[str], more: Sequence[str] = ()) -> Table:
    """Returns an empty table with left-aligned names in the first column and right-aligned numbers in the others."""
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.show_edge = False
    for number, column in enumerate([*columns, *more]):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table

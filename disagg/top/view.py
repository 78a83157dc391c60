"""Builds the view of a server with rich: totals, groups, flows, and the last requests."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.core.status import GroupStatus, RecentAnswer, ServiceStatus
from disagg.plan.transfer import describe_bytes
from disagg.top.rates import MOST_LINES, FlowRate, GroupRate, ServiceRates, paired, rates
from disagg.top.tiers import page_bytes, pages_under_way, saved_s, tier_hits
from disagg.top.words import count_words, part_words, plain, rate_words, time_words

LEAST_REQUESTS, MOST_REQUESTS = 3, 12
"""Minimum and maximum number of rows in the table of the last requests; the terminal's height sets the number."""
WIDE = 110
"""Minimum width of the terminal, in characters, for tables with all columns."""
WORDS = frozenset({"group", "state", "from", "to", "path", "request", "ending", "prefill", "decode"})
"""Names of the columns that contain text; all others contain numbers."""


def picture(
    pictures: Sequence[ServiceStatus], width: int, height: int | None = None, trouble: str = ""
) -> RenderableType:
    """Returns the view of the last sample in `pictures`, with rates over all of them, in `height` lines if possible.

    `trouble`: error of a query that failed after the last sample, or "".
    """
    status, growing = pictures[-1], rates(pictures)
    flows = _shown(growing.flows)
    head = [Text(plain(trouble), style="bold red")] if trouble else []
    head += _head(status, growing)
    tiered = [group for group in status.groups if group.host_pages]
    used = len(head) + _lines(status.groups) + _lines(flows) + _lines(())
    used += _lines(tiered) if tiered else 0
    room = MOST_REQUESTS if height is None else max(LEAST_REQUESTS, min(MOST_REQUESTS, height - used))
    tables: list[RenderableType] = []
    tables.append(
        _groups_table(status, growing, width >= WIDE)
        if status.groups
        else Text("no group is up", style="yellow")
    )
    if tiered:
        tables.append(_tiers_table(tiered, growing, width >= WIDE))
    if flows:
        tables.append(_flows_table(flows))
    if status.recent:
        tables.append(_requests_table(status.recent[:room], status.unix_s, width >= WIDE))
    return Group(*head, *tables)


def _lines(rows: Sequence[object]) -> int:
    """Returns the number of lines of a table with these rows, including its title and header."""
    return len(rows) + 4


def _shown(flows: Sequence[FlowRate]) -> Sequence[FlowRate]:
    if len(flows) > MOST_LINES:
        flows = paired(flows)
    return sorted(flows, key=lambda flow: -flow.bytes_per_s)[:MOST_LINES]


def _head(status: ServiceStatus, growing: ServiceRates) -> list[Text]:
    ready = status.ready == "ready"
    first = Text.assemble(
        ("disagg", "bold"),
        f" {plain(status.version)}  {plain(status.model)}  up {time_words(status.uptime_s)}  ",
        (plain(status.ready), "green" if ready else "bold yellow"),
    )
    second = Text.assemble(
        f"running {status.requests_running}/{status.max_running}  "
        f"queued {status.requests_queued}/{status.max_queued}  ",
        *_ended("refused", status.refused_total),
        *_ended("errors", status.errors_total, "red"),
        *_ended("aborted", status.aborts_total),
        *(_ended("recovered", status.recoveries_total) if status.recoveries_total else ()),
    )
    third = Text(
        f"TTFT p50 {time_words(status.ttft_p50_s)} p99 {time_words(status.ttft_p99_s)}  "
        f"ITL p50 {time_words(status.itl_p50_s)} p99 {time_words(status.itl_p99_s)}"
    )
    fourth = Text(
        f"prompts {count_words(growing.prompt_tokens_per_s)} tok/s  "
        f"answers {count_words(growing.generated_tokens_per_s)} tok/s  "
        f"KV cache {rate_words(growing.bytes_per_s)}"
    )
    return [first, second, third, fourth]


def _ended(what: str, count: int, style: str = "yellow") -> tuple[tuple[str, str], str]:
    return (f"{what} {count}", style if count else ""), "  "


def _table(title: str, *columns: str) -> Table:
    """Returns an empty table whose columns of text (`WORDS`) are left-aligned, and all others right-aligned."""
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.show_edge = False
    for column in columns:
        justify: JustifyMethod = "left" if column in WORDS else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    return table


def _groups_table(status: ServiceStatus, growing: ServiceRates, wide: bool) -> Table:
    sizes = ("ranks", "pages") if wide else ()
    stateful = any(group.state_slots for group in status.groups)
    columns = ("run", "wait", "tok/s", "busy", "used", "cached", "waste", "buffers")
    last = ("states",) if stateful else ()
    table = _table("Groups", "group", "state", *sizes, *columns, *last)
    for group in status.groups:
        cells: list[Text | str] = [Text(plain(group.name)), _state(group, status)]
        cells += [str(len(group.ranks)), str(group.pages)] if wide else []
        cells += _group_cells(group, growing.groups[group.name])
        table.add_row(*cells, *((_states(group, wide),) if stateful else ()))
    return table


def _states(group: GroupStatus, wide: bool) -> str:
    """Formats the recurrent-state slots in use, those of requests before those of the prefix cache.

    In a wide terminal the result is like `20/40 + 8/32`; in a narrow one like `50%+25%`; without states `-`.
    """
    pools = [(group.state_slots_used, group.state_slots), (group.cached_states, group.cached_state_slots)]
    shown = [(used, slots) for used, slots in pools if slots]
    if wide:
        return " + ".join(f"{used}/{slots}" for used, slots in shown) or "-"
    return "+".join(part_words(used, slots) for used, slots in shown) or "-"


def _group_cells(group: GroupStatus, rate: GroupRate) -> list[str]:
    slots = group.pages_used * group.page_size
    buffers = sum(rank.ring_bytes + rank.staging_bytes for rank in group.ranks)
    buffers_used = sum(rank.ring_used_bytes + rank.staging_used_bytes for rank in group.ranks)
    return [
        str(group.requests_running),
        str(group.requests_waiting),
        count_words(rate.tokens_per_s),
        f"{rate.busy:.0%}",
        part_words(group.pages_used, group.pages),
        part_words(group.pages_cached, group.pages),
        part_words(slots - group.tokens_held, slots),
        part_words(buffers_used, buffers),
    ]


def _tiers_table(groups: Sequence[GroupStatus], growing: ServiceRates, wide: bool) -> Table:
    """Returns a table of the lower tiers: hits now by tier, loads, pages under way, content, time saved so far."""
    more = ("stored", "skipped", "fetched", "written") if wide else ()
    hits = ("hit pool", "host", "storage")
    table = _table("Prefix cache", "group", *hits, "loads", "under way", "host used", *more, "saved")
    for group in groups:
        rate = growing.groups[group.name]
        shares = tier_hits(
            rate.queried_tokens_per_s,
            rate.cached_tokens_per_s,
            rate.loaded_tokens_per_s,
            rate.stored_tokens_per_s,
        )
        totals = (
            group.host_stored_pages_total,
            group.host_skipped_pages_total + group.storage_skipped_pages_total,
            group.storage_fetched_pages_total,
            group.storage_written_pages_total,
        )
        table.add_row(
            Text(plain(group.name)),
            *(f"{share:.0%}" if rate.queried_tokens_per_s else "-" for share in shares),
            rate_words(rate.loaded_tokens_per_s / max(1, group.page_size) * page_bytes(group)),
            str(pages_under_way(group)),
            part_words(group.host_pages_used, group.host_pages),
            *(count_words(total) for total in (totals if wide else ())),
            time_words(saved_s(group)),
        )
    return table


def _state(group: GroupStatus, status: ServiceStatus) -> Text:
    if group.broken:
        return Text(f"broken: {plain(group.broken)}", style="bold red")
    if group.name in status.suspected:
        return Text("silent", style="yellow")
    if group.name in status.draining:
        return Text("drains", style="yellow")
    return Text("up", style="green") if group.ranks else Text("silent", style="yellow")


def _flows_table(flows: Sequence[FlowRate]) -> Table:
    table = _table("Flows", "from", "to", "path", "now", "busy", "while busy", "total")
    for flow in flows:
        table.add_row(
            Text(plain(flow.source)),
            Text(plain(flow.target)),
            flow.path,
            rate_words(flow.bytes_per_s),
            f"{flow.busy:.0%}",
            rate_words(flow.bytes_per_s / flow.busy if flow.busy else 0.0),
            describe_bytes(flow.bytes_total),
        )
    return table


def _requests_table(recent: Sequence[RecentAnswer], now_s: float, wide: bool) -> Table:
    way = ("prefill", "decode", "queue", "reserve") if wide else ()
    table = _table(
        "Last requests", "request", "ending", *way, "prompt", "tokens", "TTFT", "moved", "in", "all"
    )
    for one in recent:
        cells: list[Text | str] = [Text(plain(one.id)[-12:]), _ending(one)]
        if wide:
            cells += [Text(plain(one.prefill)), Text(plain(one.decode))]
            cells += [time_words(one.turn_s), time_words(one.reserved_s - one.turn_s)]
        table.add_row(*cells, *_request_cells(one, now_s))
    return table


def _request_cells(one: RecentAnswer, now_s: float) -> list[str]:
    return [
        str(one.prompt_tokens),
        str(one.tokens),
        time_words(one.ttft_s),
        describe_bytes(one.transfer_bytes) if one.transfer_bytes else "-",
        time_words(one.transfer_s),
        time_words(one.ended_s or now_s - one.arrived_unix_s),
    ]


def _ending(one: RecentAnswer) -> Text:
    if one.ending == "error":
        return Text(f"error {plain(one.error)}".strip(), style="red")
    if one.ending == "aborted":
        return Text("aborted", style="yellow")
    return Text(one.ending) if one.ending else Text("runs", style="cyan")

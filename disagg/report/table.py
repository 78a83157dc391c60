"""The table of a demo run's requests. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from disagg.plan.transfer import describe_bytes

if TYPE_CHECKING:
    from rich.table import Table

TEXT_LIMIT = 60
"""Largest number of characters of an answer that `answer_lines` prints."""


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one request, as written to `report.json`."""

    request_id: str
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    """Time from the request's arrival to its first token."""
    total_s: float
    """Time from the request's arrival to its last token."""
    nbytes: int
    """KV bytes of the request on the wire."""
    segments: int
    """Number of data messages."""
    control_messages: int
    transfer_s: float
    """Time during which at least one segment was gathered or sent. Waiting for computation does not count."""
    exact: bool | None
    """Whether the answer's tokens equal the reference's; None without a comparison."""
    text: str
    within_rounding: bool = False
    """Whether rounding explains every difference, if `exact` is false."""

    @property
    def transfer_gb_per_s(self) -> float | None:
        """KV bytes over `transfer_s`, in 10^9 bytes a second; None without a transfer.

        Latency dominates prompts of a few MiB; only a large `nbytes` shows the bandwidth of the wire.
        """
        return self.nbytes / self.transfer_s / 1e9 if self.transfer_s > 0 and self.nbytes else None

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the answer's tokens after the first one, per second; None for an answer of one token."""
        seconds = self.total_s - self.ttft_s
        return (self.answer_tokens - 1) / seconds if self.answer_tokens > 1 and seconds > 0 else None


def report_table(reports: Sequence[RequestReport], title: str = "") -> Table:
    """Returns a table with a row for each request; with several requests, also a row of sums."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # Narrow enough for 80 columns.
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (
        "request",
        "prompt",
        "TTFT",
        "KV",
        "segs",
        "GB/s",
        "tokens",
        "tok/s",
    ):
        table.add_column(name, justify="left" if name == "request" else "right", no_wrap=True)
    table.add_column("exact", justify="center")
    for one in reports:
        table.add_row(*_cells(one), _verdict([one]))
    if len(reports) > 1:
        table.add_section()
        table.add_row(*_sums(reports), _verdict(reports))
    return table


def answer_lines(reports: Sequence[RequestReport]) -> list[str]:
    """Returns the answers, one line each, cut to `TEXT_LIMIT` characters."""
    return [f"{one.request_id}: {_shown(one.text)}" for one in reports]


def _cells(one: RequestReport) -> list[str]:
    return [
        one.request_id,
        str(one.prompt_tokens),
        f"{one.ttft_s * 1e3:.1f} ms",
        describe_bytes(one.nbytes),
        str(one.segments),
        _number(one.transfer_gb_per_s),
        str(one.answer_tokens),
        _number(one.tokens_per_s),
    ]


def _sums(reports: Sequence[RequestReport]) -> list[str]:
    return [
        "all",
        str(sum(one.prompt_tokens for one in reports)),
        "",
        describe_bytes(sum(one.nbytes for one in reports)),
        str(sum(one.segments for one in reports)),
        "",
        str(sum(one.answer_tokens for one in reports)),
        "",
    ]


def _verdict(reports: Sequence[RequestReport]) -> str:
    """Returns the worst result of all answers.

    `NO`: an answer is wrong. `-`: an answer was not compared with a reference. `rounding`: rounding explains all
    differences. `yes`: all answers are equal to the reference.
    """
    if any(one.exact is False and not one.within_rounding for one in reports):
        return "[bold red]NO[/]"
    if any(one.exact is None for one in reports):
        return "-"
    return "[green]yes[/]" if all(one.exact for one in reports) else "[yellow]rounding[/]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 1] + "…"

"""Runs the probes of `disagg doctor`, and shows their findings in a table.

A probe is a function without arguments that returns `Finding`s. An exception in a probe becomes a finding, so that a
broken library does not hide the results of other probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One row of the report. `mend` is the remedy; empty if nothing is wrong."""

    name: str
    status: Status
    detail: str
    mend: str = ""


Probe = Callable[[], list[Finding]]


def examine(probes: Iterable[Probe]) -> list[Finding]:
    """Runs the probes in order and returns their findings. An exception in a probe becomes a failure."""
    findings: list[Finding] = []
    for probe in probes:
        try:
            findings += probe()
        except Exception as exc:  # noqa: BLE001 - an exception of a library must not hide the other results
            name = probe.__name__.removeprefix("probe_")
            findings.append(
                Finding(
                    name,
                    "fail",
                    f"{type(exc).__name__}: {exc}",
                    "this check failed unexpectedly; report the error",
                )
            )
    return findings


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Returns whether no finding is a failure. Warnings are allowed."""
    return all(finding.status != "fail" for finding in findings)


def findings_table(findings: Iterable[Finding]) -> Table:
    """Returns a table with a row for each finding; the remedy stands below the detail."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1))
    colors = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for one in findings:
        detail = Text(one.detail)
        if one.mend:
            detail.append(f"\n-> {one.mend}", style="italic")
        table.add_row(Text(one.status, style=colors[one.status]), Text(one.name), detail)
    return table

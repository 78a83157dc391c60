"""`disagg doctor`: what this machine has, and how to mend what is missing. Works without a GPU.

A probe is a function without arguments that returns `Finding`s; it never raises for what it looks for. What a
probe did not foresee becomes a finding of its own, so one broken library does not hide the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `mend` says what to do; empty when all is well."""

    name: str
    status: Status
    detail: str
    mend: str = ""


Probe = Callable[[], list[Finding]]


def all_probes() -> list[Probe]:
    """Every probe, in the order of the report."""
    from disagg import doctor_gpu, doctor_host, doctor_network, doctor_sockets

    return [
        doctor_host.probe_python,
        doctor_host.probe_packages,
        doctor_host.probe_clashes,
        doctor_gpu.probe_torch,
        doctor_gpu.probe_gpus,
        doctor_network.probe_ucxx,
        doctor_network.probe_ucx,
        doctor_network.probe_transport,
        doctor_network.probe_ray,
        doctor_sockets.probe_sockets,
        doctor_host.probe_shared_memory,
        doctor_host.probe_limits,
    ]


def examine(probes: Iterable[Probe]) -> list[Finding]:
    """Runs the probes, one after another."""
    findings: list[Finding] = []
    for probe in probes:
        try:
            findings += probe()
        except Exception as exc:  # noqa: BLE001 - whatever a foreign library throws must not hide the rest
            name = probe.__name__.removeprefix("probe_")
            findings.append(
                Finding(name, "fail", f"{type(exc).__name__}: {exc}", "this check itself broke; report it")
            )
    return findings


def is_healthy(findings: Iterable[Finding]) -> bool:
    """True when nothing failed; warnings are allowed."""
    return all(finding.status != "fail" for finding in findings)


def findings_table(findings: Iterable[Finding]) -> Table:
    """A row for each finding, with the mend under the detail."""
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

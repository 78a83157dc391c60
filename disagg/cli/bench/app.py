"""`disagg bench`: registers one command for each benchmark."""

from __future__ import annotations

import typer

from disagg.cli.bench.agreement import agreement
from disagg.cli.bench.chaos import chaos
from disagg.cli.bench.collective import collective
from disagg.cli.bench.decode import decode
from disagg.cli.bench.goodput import goodput
from disagg.cli.bench.handoff import handoff
from disagg.cli.bench.kernels import kernels
from disagg.cli.bench.memory import memory
from disagg.cli.bench.overload import overload
from disagg.cli.bench.prefill import prefill
from disagg.cli.bench.router import router
from disagg.cli.bench.serve import serve
from disagg.cli.bench.storage import storage
from disagg.cli.bench.swap import swap
from disagg.cli.bench.tiers import tiers
from disagg.cli.bench.transfer import transfer
from disagg.cli.bench.wire import wire

app = typer.Typer(
    help="Run a benchmark on this machine. Results are checked, and figures are shown with their ceilings."
)
for _command in (
    kernels,
    collective,
    swap,
    storage,
    tiers,
    wire,
    transfer,
    handoff,
    decode,
    prefill,
    memory,
    agreement,
    serve,
    goodput,
    overload,
    router,
    chaos,
):
    app.command(_command.__name__)(_command)

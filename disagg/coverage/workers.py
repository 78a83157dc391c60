"""Checks each model type in its own process: a crash or a hang does not affect the other checks."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from disagg.coverage.verdict import Verdict

_END_TIMEOUT_S = 10.0


@dataclass
class _Running:
    model_type: str
    process: ForkServerProcess
    deadline_s: float


def check_in_process(model_type: str) -> Verdict:
    """Runs `check.check_type` with process-wide settings: one thread, no logs."""
    import torch

    from disagg.coverage.check import check_type, quiet

    torch.set_num_threads(1)
    quiet()
    return check_type(model_type)


def check_types(
    types: Sequence[str],
    jobs: int,
    limit_s: float,
    advance: Callable[[Verdict], None],
    check: Callable[[str], Verdict] = check_in_process,
    preload: Sequence[str] = ("disagg.coverage.check",),
) -> list[Verdict]:
    """Runs `check` on `types` in `jobs` parallel processes with `limit_s` each; returns the verdicts in order.

    Calls `advance` with each verdict as soon as it is known. The fork server imports the modules of `preload` once.
    All processes have ended when this function returns.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    waiting, running = list(reversed(types)), dict[Connection, _Running]()
    found: dict[str, Verdict] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                pipe, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, check, waiting[-1]), daemon=True)
                process.start()
                theirs.close()  # so that the pipe closes when the process ends
                running[pipe] = _Running(waiting.pop(), process, time.monotonic() + limit_s)
            for verdict in _ended(running, limit_s):
                found[verdict.model_type] = verdict
                advance(verdict)
    finally:
        for one in running.values():
            one.process.kill()
    return [found[one] for one in types]


def _ended(running: dict[Connection, _Running], limit_s: float) -> list[Verdict]:
    """Waits until a process replies, ends or times out. Removes each of these processes, and returns their
    verdicts."""
    first = min(one.deadline_s for one in running.values())
    ready = wait(list(running), timeout=max(0.0, first - time.monotonic()))
    late = [pipe for pipe, one in running.items() if time.monotonic() >= one.deadline_s]
    verdicts = []
    for pipe in [*(one for one in running if one in ready), *(one for one in late if one not in ready)]:
        one = running.pop(pipe)
        verdicts.append(_answer(pipe, one, limit_s) if pipe in ready else _late(one, limit_s))
        pipe.close()
    return verdicts


def _answer(pipe: Connection, one: _Running, limit_s: float) -> Verdict:
    try:
        verdict = pipe.recv()
    except EOFError:
        one.process.join(limit_s)
        return Verdict(one.model_type, "failed", f"its process ended with {one.process.exitcode}")
    one.process.join(_END_TIMEOUT_S)
    assert isinstance(verdict, Verdict)
    return verdict


def _late(one: _Running, limit_s: float) -> Verdict:
    one.process.kill()
    one.process.join()
    return Verdict(one.model_type, "failed", f"no verdict within {limit_s:g} s")


def _work(pipe: Connection, check: Callable[[str], Verdict], model_type: str) -> None:
    pipe.send(check(model_type))

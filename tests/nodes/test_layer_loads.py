"""A step of a real model that waits for its load layer by layer, however its other steps are recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S
from local_groups import Checkpoints
from model_helpers import make_runner, prompts

from disagg.core.types import RequestKey
from disagg.kv.cache_operations import CacheOperation, PoolTransfer
from disagg.model import piecewise
from disagg.model.runner import ModelRunner
from disagg.node.cache_controller import HostBlockCounts, HybridCacheController
from disagg.node.compute import StepExecutor
from disagg.node.plan import StepPlan, Work

PAGE, CACHED = 16, 32
SLEEP_CYCLES = 20_000_000
"""About 10 ms on the GPU before each group of layers is loaded."""
RECORDINGS: dict[str, Callable[[ModelRunner], None]] = {
    "nothing": lambda runner: None,
    "chunks": lambda runner: runner.record_chunks(64),
    "pieces": lambda runner: runner.record_pieces(64, 4),
    "answers": lambda runner: runner.record(4),
}


class Loads:
    """A controller whose loads take long on a GPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self.moved = threading.Semaphore(0)
        self.broken: list[str] = []
        self.go = threading.Event()
        """Lets the controller report loads."""
        self.controller = HybridCacheController(
            runner.transfer_pools,
            PAGE,
            HostBlockCounts(8, 0),
            layered=True,
            moved=lambda *_: self.moved.release(),
            broken=self.broken.append,
        )
        copy = self.controller.kv._copy  # noqa: SLF001

        def slow(*arguments: Any, to_host: bool, staged: bool) -> None:
            if runner.device.type == "cuda" and not to_host:
                torch.cuda._sleep(SLEEP_CYCLES)
            copy(*arguments, to_host=to_host, staged=staged)

        self.controller.kv._copy = slow  # type: ignore[method-assign]  # noqa: SLF001

    def wait(self) -> None:
        assert self.moved.acquire(timeout=PATIENCE_S), self.broken


def mark(device: torch.device) -> Any:
    """A point in the work of the current stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def work(row: int, start: int, tokens: list[int], pages: list[int]) -> Work:
    return Work(RequestKey(f"r{row}"), 1, row, start, tokens, 60, pages)


@pytest.mark.parametrize("new_tokens", [1, 18])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("device", "recording"),
    [("cpu", "nothing"), *(pytest.param("cuda", one, marks=pytest.mark.gpu) for one in RECORDINGS)],
)
def test_a_step_reads_what_was_loaded(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    recording: str,
    deterministic: bool,
    new_tokens: int,
) -> None:
    """The same logits as without a load; on a GPU, the second layer begins before it is loaded."""
    monkeypatch.setattr(piecewise, "FIRST_TOKENS", 16)
    runner = make_runner(
        checkpoints.source(), device=device, pages=40, rows=3, page_size=PAGE, deterministic=deterministic
    )
    RECORDINGS[recording](runner)
    assert runner.recorded == (recording != "nothing")
    text, layers = prompts()[2], runner.pool.layers
    executor, loads = StepExecutor(runner, 3), Loads(runner)
    executor.run(StepPlan(1, [work(0, 0, text[:CACHED], [2, 3, 4, 5])]))
    new = text[CACHED : CACHED + new_tokens]
    executor.run(
        StepPlan(2, [work(0, CACHED, new, [])], awaited_loads=[0])
    )  # compiles the kernels between the layers
    expected = executor.run(StepPlan(2, [work(0, CACHED, new, [])])).clone()

    store = CacheOperation(1, True, [PoolTransfer("kv", [2, 3], [0, 1])])
    loads.controller.order(StepPlan(3, [], cache_operations=[store]))
    loads.wait()
    runner.pool.poison()
    runner.pool.buffer[:, :, :PAGE] = 0  # padding may read the trash page, and nothing else
    load = CacheOperation(2, False, [PoolTransfer("kv", [6, 7], [0, 1])])
    loads.controller.loading.submit(loads.go.wait)  # on a CPU the load would already be reported
    loads.controller.order(StepPlan(4, [], cache_operations=[load]))
    plan = StepPlan(5, [work(1, CACHED, new, [6, 7, 8, 9])], awaited_loads=[2])
    loaded = loads.controller.order(plan)
    assert loaded.parts == layers > 1
    marks: list[Any] = []
    found = executor.run(plan, lambda layer: marks.append(mark(runner.device)), None, loaded).clone()
    ended = mark(runner.device)
    loads.go.set()
    loads.wait()
    loads.controller.stop()
    assert len(marks) == layers
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert torch.equal(found.argmax(), expected.argmax())
    assert torch.equal(found, expected) or not deterministic or recording == "answers"
    if device == "cuda":
        torch.cuda.synchronize()
        assert marks[1].elapsed_time(ended) > 5, "in ms; the second layer waits for its own part of the load"

"""Staged copies are right however the device orders the work of its streams within what their events allow."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.core.types import Span
from disagg.kv import staged_blocks
from disagg.kv.copy_engine import ByteRows
from disagg.kv.staged_blocks import HostPart, StagedCopies
from kernels.copy.page_blocks import Pages, blocks_to_pages, pages_to_blocks

LAYERS, PAGES, BLOCKS, SLOT_BYTES = 3, 8, 12, 16


class Event:
    """An event of an imitated device, recorded once."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.done, self.device = False, Device.latest

    def synchronize(self) -> None:
        self.device.run(until=self)

    def record(self, stream: Stream) -> None:
        stream.work.append(lambda: setattr(self, "done", True))


class Stream:
    """Work in order; None stands for nothing, and an event for a wait."""

    def __init__(self) -> None:
        self.work = deque[Callable[[], None] | Event]()
        self.cuda_stream = self

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    @property
    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(head := self.work[0], Event) or head.done)

    def step(self) -> None:
        head = self.work.popleft()
        if not isinstance(head, Event):
            head()


class Device:
    """Streams whose work runs in random order; stands in for `torch.cuda` in `staged_blocks`."""

    Event = Event
    latest: Device

    def __init__(self, patch: pytest.MonkeyPatch, choose: random.Random) -> None:
        Device.latest, self.choose, self.streams = self, choose, list[Stream]()
        self.current = self.stream()
        patch.setattr(
            staged_blocks, "_cuda", SimpleNamespace(Event=Event, current_stream=lambda _: self.current)
        )
        for kernel in (blocks_to_pages, pages_to_blocks):
            patch.setattr(staged_blocks, kernel.__name__, self.later(kernel))
        patch.setattr(staged_blocks, "queue_rows", self.queue_rows)

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def later(self, kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: self.current.work.append(lambda: kernel(*arguments))

    def queue_rows(
        self, device: ByteRows, host: ByteRows, row_bytes: int, rows: int, *, to_host: bool, stream: Any
    ) -> None:
        assert not any(isinstance(work, Event) for work in stream.work), "a copy waits on the device"
        copies = sum(work.__name__ == "copy" for work in stream.work)
        assert copies < 2 * staged_blocks.MOST_CALLS, "too many copies are queued"

        def copy() -> None:
            target, source = (host, device) if to_host else (device, host)
            for row in range(rows):
                there, here = (
                    target.address + row * target.pitch_bytes,
                    source.address + row * source.pitch_bytes,
                )
                ctypes.memmove(there, here, row_bytes)

        stream.work.append(copy)

    def copies(self, half_bytes: int) -> StagedCopies:
        made = StagedCopies(torch.device("cpu"), half_bytes)
        made._engine = self.stream()  # noqa: SLF001 - as on a GPU
        return made

    def run(self, until: Event | None = None) -> None:
        """Runs work until an event is done, or all work."""
        while until is None or not until.done:
            ready = [stream for stream in self.streams if stream.ready]
            if not ready:
                assert until is None
                assert not any(stream.work for stream in self.streams), "a stream waits for ever"
                return
            self.choose.choice(ready).step()


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_the_work_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each step's pages are stored, and then loaded to other pages: on one stream, or on another after the store."""
    choose = random.Random(seed)
    monkeypatch.setattr(staged_blocks, "MOST_CALLS", choose.choice([1, 5, 100]))
    device = Device(monkeypatch, choose)
    layer_bytes = SLOT_BYTES
    stores, loads = (device.copies(layer_bytes * choose.randrange(1, 3 * LAYERS)) for _ in range(2))
    on_stores = device.current
    on_loads = on_stores if seed % 2 else device.stream()
    pool = torch.zeros((LAYERS, 1, 2 * PAGES, 1, SLOT_BYTES), dtype=torch.uint8)
    memory = torch.zeros((BLOCKS, LAYERS * SLOT_BYTES), dtype=torch.uint8)
    for _ in range(5):
        count = choose.randrange(1, PAGES)
        sources, blocks = choose.sample(range(PAGES), count), sorted(choose.sample(range(BLOCKS), count))
        targets = [PAGES + page for page in choose.sample(range(PAGES), count)]
        content = torch.randint(0, 256, (LAYERS, 1, count, 1, SLOT_BYTES), dtype=torch.uint8)
        pool[:, :, sources] = content
        device.current = on_stores
        host = HostPart(memory, blocks, 0, slab_blocks=5)
        assert stores.store(Pages(pool, torch.tensor(sources), 1, Span(0, LAYERS)), host)
        stored = Event()
        stored.record(on_stores)
        if on_loads is not on_stores:
            device.run(until=stored)
            found = memory[blocks].view(count, LAYERS, SLOT_BYTES).transpose(0, 1)
            assert torch.equal(found, content[:, 0, :, 0])
        device.current = on_loads
        at = choose.randrange(LAYERS + 1)
        for layers in (Span(0, at), Span(at, LAYERS)):
            assert loads.load(Pages(pool, torch.tensor(targets), 1, layers), host)
            loaded = Event()
            loaded.record(on_loads)
            if choose.random() < 0.5:
                device.run(until=loaded)
                part = slice(layers.start, layers.stop)
                assert torch.equal(pool[part][:, :, targets], content[part])
        device.run()
        assert torch.equal(pool[:, :, targets], content)

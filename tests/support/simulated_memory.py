"""Memory and kernels of the simulation: what is freed turns to NaN; kernels run when their queue comes to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import decode_node.landing
import decode_node.verifier
import prefill_node.direct
import prefill_node.mover
from decode_node.scheduler import DecodeScheduler
from disagg.core.types import Span
from disagg.kv.pages import slots_of
from disagg.node.kv_manager import KVManager
from kernels.copy.rows import PoolSlice
from staging.allocator import Lease, StagingAllocator

POISON, POISON_WORD = 0xFF, -1
"""Bytes that are NaN in each float type, and in the scales of quantized values; a signed word of such bytes."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


WAITS = object()
"""What a kernel returns that cannot run yet."""


class Device:
    """A queue of kernels: each runs when `step` comes to it, long after it was launched."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], object]] = deque()

    def after(self, event: Any) -> None:
        """Later kernels wait for an event of another queue; None: the compute stream's work is done at once."""
        if event is not None:
            self.work.append(lambda: None if event.query() else WAITS)

    def record_event(self) -> Any:
        event = SimpleNamespace(done=False)
        self.work.append(lambda: setattr(event, "done", True))
        return SimpleNamespace(query=lambda: event.done)

    def step(self) -> None:
        if self.work:
            kernel = self.work.popleft()
            if kernel() is WAITS:
                self.work.appendleft(kernel)


class LateLoads:
    """Stands in for the stream of a controller's layered loads: its copies wait in a device's queue.

    A step waits for a part of a load as a compute stream does: nothing of the step runs before the event.
    """

    def __init__(self, rank: Any, device: Device, patch: pytest.MonkeyPatch) -> None:
        """`device`: its queue also has the work of the controller's load thread, so a load is reported at its end."""
        controller, self._device = rank.cache_controller, device
        self.waits: list[Any] = []
        """Events for which steps have waited, those that were already over too."""
        for pool in (controller.kv, controller.states):
            pool._copy = self._late(pool._copy)  # noqa: SLF001 - both kinds of copies, of which stores run on their thread
        controller._load_queue.record_event = self._record_event  # noqa: SLF001
        patch.setattr("disagg.node.loaded_layers.let_stream_wait", self._wait)

    def _late(self, copy: Callable[..., None]) -> Callable[..., None]:
        def late(*arguments: Any, to_host: bool, staged: bool) -> None:
            work = partial(copy, *arguments, to_host=to_host, staged=staged)
            work() if to_host else self._device.work.append(work)

        return late

    def _record_event(self) -> Any:
        event = SimpleNamespace(done=False, loads=self)
        event.query = lambda: event.done
        event.synchronize = lambda: None  # waits of the load thread only pace its work
        self._device.work.append(lambda: setattr(event, "done", True))
        return event

    @staticmethod
    def _wait(_: torch.device, event: Any) -> None:
        if event is not None:
            event.loads.waits.append(event)
            while not event.done:
                event.loads._device.step()  # noqa: SLF001


class LateThread:
    """Stands in for an executor with one thread: its work waits in a device's queue."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._device.work.append(partial(work, *arguments))

    def shutdown(self) -> None: ...


def replace_device(rank: Any, device: Device) -> None:
    """The copies of `rank` complete when `device` comes to them, and its freed ring or staging turns to NaN."""
    agent = rank.agent
    queue, memory = (
        (agent.parts.queue, agent.parts.ring) if rank.role == "decode" else (agent.queue, agent.space)
    )
    queue.record_event, queue.after = device.record_event, device.after
    queue.store = lambda words, *number: device.work.append(partial(words.store, None, *number))
    poison_ring(memory.allocator, memory.buffer.memory)


def poison_pages(kv_manager: KVManager, ranks: Sequence[Any]) -> None:
    """From now on freed pages turn to NaN in the pools of `ranks`, and must still be NaN when they are handed out.

    On a GPU as well, where it waits for the device: nothing that is queued may write them any more.
    """
    unused = kv_manager.allocator.unused
    take, put = unused.take, unused.put

    def slots(pages: Sequence[int]) -> torch.Tensor:
        return slots_of(pages, kv_manager.page_size, Span(0, kv_manager.page_size * len(pages))).long()

    def memories() -> Iterator[tuple[Any, torch.Tensor]]:
        """Of every rank and class of layers, in the widest words: bytes take ten times as long."""
        for rank in ranks:
            for part in rank.runner.pool.parts:
                row_bytes = part.buffer.shape[-1] * part.buffer.element_size()
                yield rank, part.buffer.view(next(word for word in WORDS if row_bytes % word.itemsize == 0))

    def checked_take(count: int) -> list[int]:
        pages = take(count)
        for rank, memory in memories() if pages else ():
            untouched = (memory.index_select(2, slots(pages).to(memory.device)) == POISON_WORD).all()
            assert untouched, f"{rank.lane}: a page was written after it was freed"
        return pages

    def poisoning_put(pages: Sequence[int]) -> None:
        """Those that others still read keep what they hold: they are not free yet."""
        put(pages)
        for _, memory in memories() if pages else ():
            memory.index_fill_(2, slots(pages).to(memory.device), POISON_WORD)
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)

    unused.take, unused.put = checked_take, poisoning_put  # type: ignore[method-assign]


def poison_host(scheduler: DecodeScheduler, ranks: Sequence[Any]) -> None:
    """From now on freed blocks of host memory turn to NaN on all `ranks`."""
    host = scheduler.preemptor.host
    free = host.free

    def poisoning_free(blocks: Sequence[int]) -> None:
        free(blocks)
        for rank in ranks:
            for block in blocks:
                rank.swapper.host.memory.block(block).fill_(POISON)

    host.free = poisoning_free  # type: ignore[method-assign]


def poison_blocks(kv_manager: KVManager, ranks: Sequence[Any]) -> None:
    """From now on freed blocks of the second tier turn to NaN on all `ranks`."""
    if kv_manager.host is None:
        return
    unused = kv_manager.host.blocks.unused
    take, put = unused.take, unused.put
    poisoned: set[int] = set()

    def checked_take(count: int) -> list[int]:
        pages = take(count)
        for rank in ranks:
            used = [page for page in pages if page in poisoned]
            for block in rank.cache_controller.kv_blocks([page - 1 for page in used]):
                assert (block == POISON).all(), f"{rank.lane}: a block was written after it was freed"
        return pages

    def poisoning_put(pages: Sequence[int]) -> None:
        put(pages)
        poisoned.update(pages)
        for rank in ranks:
            for block in rank.cache_controller.kv_blocks([page - 1 for page in pages]):
                block.fill_(POISON)

    unused.take, unused.put = checked_take, poisoning_put  # type: ignore[method-assign]


def poison_ring(ring: StagingAllocator, memory: torch.Tensor) -> None:
    """From now on freed ring space turns to NaN."""
    free = ring.free

    def poisoning_free(lease_id: int) -> Lease:
        # One that was never writable lies over space that an older lease still owns.
        owned = {lease.id for lease in ring.outstanding() if ring.writable(lease)}
        lease = free(lease_id)
        if lease.id in owned:
            memory[ring.offset(lease) : ring.offset(lease) + lease.nbytes] = POISON
        return lease

    ring.free = poisoning_free  # type: ignore[method-assign]


def late_kernels(devices: dict[int, Device], patch: pytest.MonkeyPatch) -> None:
    """Copies go to the device of the pool at that address (a write: of its source), instead of running at once."""
    scatter, sum_rows = decode_node.landing.scatter, decode_node.verifier.sum_rows

    def late(gather: Callable[..., None]) -> Callable[..., None]:
        return lambda pool, *rest: devices[pool.data_ptr()].work.append(partial(gather, pool, *rest))

    def late_scatter(view: torch.Tensor, pool: torch.Tensor, *rest: Any) -> None:
        devices[pool.data_ptr()].work.append(partial(scatter, view, pool, *rest))

    def late_sum(place: PoolSlice, check: Any) -> None:
        devices[place.pool.data_ptr()].work.append(partial(sum_rows, place, check))

    def late_move(prepare: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
        """In two parts, as on a GPU: what has read its fence word may still write after that was closed."""

        def prepared(source: PoolSlice, target: PoolSlice, *rest: Any) -> Callable[[], None]:
            *quantized, fence, ticket, check = rest
            found = torch.empty_like(fence)
            move = prepare(source, target, *quantized, found, ticket, check)
            work = devices[source.pool.data_ptr()].work
            return lambda: work.extend([partial(found.copy_, fence), move])

        return prepared

    for name in ("prepare_move", "prepare_quantized_move"):
        patch.setattr(prefill_node.direct, name, late_move(getattr(prefill_node.direct, name)))
    for name in ("gather", "gather_quantized"):
        patch.setattr(prefill_node.mover, name, late(getattr(prefill_node.mover, name)))
    patch.setattr("decode_node.landing.scatter", late_scatter)
    patch.setattr("decode_node.verifier.sum_rows", late_sum)

"""The process of one rank: the real rank, whose threads are callbacks of the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fake_model import FakeRunner
from simulated_constraints import SimulatedConstraints
from simulated_memory import Device, replace_device

from cluster_simulation.fabric import SimulatedTransport
from cluster_simulation.network import SimulatedControl
from cluster_simulation.processes import Process
from decode_node.rank import DecodeRank
from disagg.core.config.read import Config
from prefill_node.rank import PrefillRank

if TYPE_CHECKING:
    from cluster_simulation.group_process import GroupProcess
    from cluster_simulation.world import World

KERNEL_S = (1e-5, 3e-4)
POLL_S = 3e-4
"""How often a rank polls its device, whose poll interval is 0 in the product."""
SWAP_S = (1e-4, 5e-3)
COMPILE_S = (1e-4, 0.3)
"""Time until a grammar's first mask is ready."""
RANKS: dict[str, type[Any]] = {"prefill": PrefillRank, "decode": DecodeRank}


class RankProcess(Process):
    """One rank with its control thread, transfer thread, compute thread and device."""

    def __init__(self, world: World, group: GroupProcess, number: int, config: Config) -> None:
        super().__init__(world, f"{group.name}-{number}")
        self.number, self.group = number, group
        section = getattr(config, group.role)
        runner: Any = FakeRunner(
            world.spec_of(group.role),
            number,
            section.ranks,
            section.page_size,
            section.pool_tokens,
            section.max_requests,
            group.sampled,
        )
        self.device = _Device(self)
        self._turn_at_s = float("inf")
        self.control = SimulatedControl(self, world.network, world.options)
        transport = SimulatedTransport(world.fabric, self, self._wake_transfer)
        self.rank: Any = RANKS[group.role](
            rank=number,
            config=config,
            group_config=section,
            name=group.name,
            runner=runner,
            control=self.control,
            transport=transport,
            clock=world.loop.time,
        )
        for buffer in runner.transfer_pools.buffers:
            world.devices[buffer.data_ptr()] = self.device
        if self.rank.leader is not None:
            self.rank.leader.constraints = SimulatedConstraints(self._compile_later)
        self.rank.on_broken = partial(world.directory.rank_broke, self)
        self._replace_threads()

    def _replace_threads(self) -> None:
        rank = self.rank
        rank.transfer_loop.call = self._call_transfer_thread
        rank.transfer_loop.start = self._wake_transfer
        rank.compute_thread = SimpleNamespace(start=lambda: None, busy=False)
        replace_device(rank, self.device)
        controller = rank.cache_controller
        controller.storing = controller.loading = controller.reporting = _CopyThread(self)
        if self.group.role == "decode":
            rank.swapper.order = self._order_swap
        plans, put = rank.plans, rank.plans.put

        def plan_arrived(plan: Any) -> None:
            put(plan)
            self.group.plan_arrived(self)

        plans.put = plan_arrived

    def die(self) -> None:
        super().die()
        self.world.network.leave(self.name)
        self.world.fabric.kill(self.name)

    def _compile_later(self, work: Callable[[], None]) -> None:
        self.later(work, self.choose.uniform(*COMPILE_S))

    def _order_swap(self, swap: Any, after: Any) -> None:
        self.later(partial(self.rank.swapper.copy, swap, after), self.choose.uniform(*SWAP_S))

    # --- the transfer thread

    def _call_transfer_thread(self, work: Callable[[], None], timeout_s: float = 0.0) -> None:
        """Runs `work` behind all posted work, as the thread does."""
        loop, failures = self.rank.transfer_loop, list[Exception]()

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        loop.post(run)
        while loop.run_posted():
            self._require_sound()
        if failures:
            raise failures[0]

    def _wake_transfer(self) -> None:
        self._turn_in(0.0)

    def _turn_in(self, delay_s: float) -> None:
        due_s = self.loop.time() + delay_s
        if self._turn_at_s <= due_s + 1e-4:
            return
        self._turn_at_s = due_s
        self.later(partial(self._turn, due_s), delay_s or None)

    def _turn(self, due_s: float) -> None:
        if due_s != self._turn_at_s:
            return  # an earlier one was asked for
        self._turn_at_s = float("inf")
        loop, now_s = self.rank.transfer_loop, self.loop.time()
        loop.turn()
        wait_s = loop.run_timers(now_s)
        self._require_sound()
        self._turn_in(max(POLL_S, min(wait_s, loop.next_timer_s - now_s)))

    def _require_sound(self) -> None:
        """An exception on the transfer thread is a bug, and ends the simulation."""
        assert not self.rank.transfer_loop.faults, (
            f"{self.name}: an exception on the transfer thread, see the log"
        )


class _CopyThread:
    """Stands in for the executors of the cache controller: each copy ends some time after its order."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._process.later(partial(work, *arguments), self._process.choose.uniform(*SWAP_S))

    def shutdown(self) -> None: ...


class _Device(Device):
    """Kernels run one after the other, each some time after it was launched."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self.work = _Work(self._launched)
        self._running = False

    def _launched(self) -> None:
        if not self._running and self.work:
            self._running = True
            self._process.later(self._run, self._process.choose.uniform(*KERNEL_S))

    def _run(self) -> None:
        self._running = False
        self.step()
        self._launched()


class _Work(deque[Callable[[], None]]):
    """A queue that reports each addition."""

    def __init__(self, added: Callable[[], None]) -> None:
        super().__init__()
        self._added = added

    def append(self, work: Callable[[], None]) -> None:
        super().append(work)
        self._added()

    def extend(self, works: Any) -> None:
        super().extend(works)
        self._added()

"""The process of one router: the real router, dispatcher and directory's follower, with clients."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

from cluster_simulation.network import SimulatedControl
from cluster_simulation.processes import Process
from cluster_simulation.requests import ClientRequest, text_of
from disagg.core.config.read import PolicyName, RouterConfig
from disagg.core.errors import DisaggError
from disagg.router.follow import joined
from disagg.router.policy import POLICIES, Policy
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from disagg.router.status import watching

if TYPE_CHECKING:
    from cluster_simulation.world import World


class RouterProcess(Process):
    """One router on the simulation's loop."""

    def __init__(self, world: World, name: str, choose: Policy | None = None) -> None:
        super().__init__(world, name)
        policy: PolicyName = self.choose.choice(sorted(POLICIES))
        self.control = SimulatedControl(self, world.network, world.options)
        self.dispatcher = ResponseDispatcher(self.control, self.loop)
        local = world.config.router
        config = RouterConfig(
            policy,
            local_prefill_queue_tokens=local.local_prefill_queue_tokens,
            local_prefill_cost=local.local_prefill_cost,
        )
        self.router = Router(self.dispatcher, config=config, clock=self.loop.time)
        if choose is not None:
            self.router.choose = choose
        self._tasks: dict[asyncio.Task[None], ClientRequest] = {}
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Joins the directory."""
        self.dispatcher.start()
        await self._stack.enter_async_context(
            joined(self.dispatcher, self.router, self.world.directory.address)
        )
        await self._stack.enter_async_context(watching(self.router.statuses, self.world.metrics_s))

    async def stop(self) -> None:
        """Leaves the directory."""
        await self._stack.aclose()

    def die(self) -> None:
        super().die()
        self.world.network.leave(self.name)
        for task, request in self._tasks.items():
            request.gone = True
            task.cancel()
        task = self.loop.create_task(self.stop())
        self.world.keep(task)

    def submit(self, request: ClientRequest) -> None:
        """A client sends a request."""
        request.router = self.name
        task = self.loop.create_task(self._ask(request))
        self._tasks[task] = request
        task.add_done_callback(self._ended)

    def abort(self, request: ClientRequest) -> None:
        """The client disconnects."""
        for task, running in self._tasks.items():
            if running is request:
                request.aborted = True
                task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        request = self._tasks.pop(task)
        request.ended_s = self.loop.time()
        self.world.event_log.add("ended", request)
        if not task.cancelled():
            task.result()  # an error of the router or of a comparison ends the simulation

    async def _ask(self, request: ClientRequest) -> None:
        request.began_s = self.loop.time()
        answers = self.router.generate(
            request.id,
            request.prompt,
            request.sampling,
            timeout_s=request.timeout_s,
            decode=text_of,
            report=request.report,
            session=request.session,
        )
        try:
            async with aclosing(answers) as outputs:
                async for output in outputs:
                    if not request.gone:
                        request.take(output)
                    if request.outputs == request.abort_after:
                        request.aborted = True
                        return
        except DisaggError as error:
            request.error = error

"""One seed: requests and faults begin, everything settles, and all that must hold is checked."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
import structlog
from fake_model import VOCAB

from cluster_simulation import books
from cluster_simulation.faults import Faults
from cluster_simulation.policy import ErrorPolicy, recovered, unfounded_suspicions
from cluster_simulation.requests import ClientRequest, RequestSource
from cluster_simulation.scale import PEER_TIMEOUT_S, Scale, weather_of
from cluster_simulation.virtual_time import VirtualTimeLoop
from cluster_simulation.virtual_time import run as run_loop
from cluster_simulation.world import World
from disagg.core.types import SamplingParams
from disagg.router.session_driver import RELEASE_TIMEOUT_S
from disagg.router.session_events import Loss

BURSTS, BURST_S = 3, 0.5
"""Requests come at a few times together, so that they share groups, and faults strike several."""
CHECK_S = 1.0
END_SLACK_S = 2.0
"""A request ends within its deadline, the time of its release and this."""
HEAL_S = 2 * PEER_TIMEOUT_S
"""After the last fault, until groups that were cut off from each other are linked again."""
QUIET_S = 120.0
"""Within this time after the last request every fault has ended and every book is empty."""


@dataclass(slots=True)
class Run:
    """A simulation and what came of it."""

    seed: int
    world: World
    faults: Faults
    requests: list[ClientRequest] = field(default_factory=list)
    virtual_s: float = 0.0

    @property
    def outcomes(self) -> list[str]:
        """The outcome of each request."""
        return [request.outcome for request in self.requests]


def simulate(
    seed: int,
    scale: Scale | None = None,
    policy: ErrorPolicy = recovered,
    faults: int | None = None,
    first_fault: str = "",
) -> Run:
    """Runs one seed. Raises the first error, with the seed and the last events as its note.

    `first_fault`: kind of one more fault, which strikes when the first request begins. So it strikes in any case.
    """
    loop = VirtualTimeLoop()
    scale = scale or Scale()
    with pytest.MonkeyPatch.context() as patch:
        choose = random.Random(f"{seed} run")
        world = World(loop, seed, scale, weather_of(choose), patch)
        structlog.configure(processors=[world.event_log.log])
        count = choose.randint(int(scale.least * scale.faults), scale.faults) if faults is None else faults
        run = Run(seed, world, Faults(world, choose, count, scale.spread_s))
        try:
            run_loop(loop, _main(run, choose, policy, first_fault))
        except BaseException as error:
            call = f"simulate({seed}, {scale}, faults={faults}, first_fault={first_fault!r})"
            error.add_note(f"{world.event_log}\ncluster_simulation.run.{call}")
            raise
        finally:
            structlog.reset_defaults()
    return run


async def _main(run: Run, choose: random.Random, policy: ErrorPolicy, first_fault: str) -> None:
    world, loop = run.world, run.world.loop
    await world.start()
    grammars = random.Random(f"{world.seed} grammars") if world.scale.features else None
    source = RequestSource(choose, world.scale.longest_answer, grammars)
    bursts_s = [choose.uniform(0.0, world.scale.spread_s) for _ in range(BURSTS)]
    begins_s = []
    for _ in range(world.scale.draw(choose, world.scale.requests)):
        request = source.next()
        run.requests.append(request)
        begins_s.append(choose.choice(bursts_s) + choose.uniform(0.0, BURST_S))
        loop.call_later(begins_s[-1], _submit, run, choose, request)
    if first_fault:
        loop.call_later(min(begins_s), run.faults.strike, first_fault)
    await _requests_end(run)
    run.faults.end()
    _check_requests(run, policy)
    world.network.end_losses()
    await asyncio.sleep(max(0.0, run.faults.last_s - loop.time()) + HEAL_S)
    await _settle(world)
    await _every_pair_works(run)
    _check_suspicions(run)
    run.virtual_s = loop.time()


def _submit(run: Run, choose: random.Random, request: ClientRequest) -> None:
    routers = run.world.living_routers()
    if not routers:  # all died: the new one is starting
        run.world.loop.call_later(0.1, _submit, run, choose, request)
        return
    router = choose.choice(routers)
    run.world.event_log.add("submit", router.name, request.id, len(request.prompt), request.sampling)
    router.submit(request)
    if choose.random() < 0.1:
        run.world.loop.call_later(choose.uniform(0.0, 1.0), router.abort, request)


async def _requests_end(run: Run) -> None:
    """Returns when every request has ended; checks the books meanwhile."""
    while any(request.ended_s < 0 for request in run.requests):
        now_s = run.world.loop.time()
        for request in run.requests:
            limit_s = request.began_s + request.timeout_s + RELEASE_TIMEOUT_S + END_SLACK_S
            assert request.began_s < 0 or request.ended_s >= 0 or now_s < limit_s, f"never ends: {request}"
        books.check(run.world)
        run.world.look()
        await asyncio.sleep(CHECK_S)


def _check_requests(run: Run, policy: ErrorPolicy) -> None:
    for request in run.requests:
        request.check_end()
        faults = len(run.faults.struck) + unfounded_suspicions(run, request)
        assert request.losses <= faults, f"{request}: a fault costs one recovery at most"
        if request.error is not None:
            why = policy(run, request)
            assert not why, f"{request}: {why}"


def _check_suspicions(run: Run) -> None:
    """A rank that was only suspected has ended no group. A packet that is lost may turn a suspicion into a loss."""
    if set(run.faults.struck) == {"stop"} and not run.world.network.lost:
        assert run.world.directory.deaths == 0, "a suspicion broke a group"
        causes = {cause for request in run.requests for cause in request.report.recoveries}
        assert causes <= {Loss.PREFILL_SUSPECTED.value, Loss.DECODE_SUSPECTED.value}, (
            f"a suspicion is no loss: {causes}"
        )


async def _settle(world: World) -> None:
    """Returns when nothing of any request is left, and every group is back."""
    until_s = world.loop.time() + QUIET_S
    while True:
        try:
            books.check_empty(world)
        except AssertionError:
            if world.loop.time() > until_s:
                raise
            await asyncio.sleep(CHECK_S)
        else:
            return


async def _every_pair_works(run: Run) -> None:
    """After all faults, a request of each pair of groups is answered."""
    world = run.world
    wanted: list[str] = []

    def choose(engines: object, request: object) -> object:
        return next((engine for engine in engines if engine.group.name in wanted), engines[0])  # type: ignore

    router = await world.add_router(choose)
    while len(router.router.engines) < len(world.groups):
        await asyncio.sleep(0.1)
    prefills, decodes = world.directory.of("prefill"), world.directory.of("decode")
    for number, (prefill, decode) in enumerate((one, other) for one in prefills for other in decodes):
        wanted[:] = [prefill.name, decode.name]
        request = ClientRequest(f"pair-{number}", [number % VOCAB, 2, 3], SamplingParams(max_tokens=2), 30.0)
        router.submit(request)
        while request.ended_s < 0:
            await asyncio.sleep(0.1)
        works = request.outcome == "done" and not request.report.recoveries
        assert works, f"{wanted} cannot serve any more: {request}"
        request.check_end()
    await _settle(world)

"""What breaks, and when: at a time, or when some message is sent for the n-th time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster_simulation.processes import Process
from cluster_simulation.rank_process import RankProcess
from cluster_simulation.scale import PEER_TIMEOUT_S, SUSPECT_AFTER_S
from transport.control import messages as m

if TYPE_CHECKING:
    from cluster_simulation.world import World

MESSAGES: tuple[type[m.Message], ...] = (
    # Several times: most of an answer's time passes between its tokens.
    m.Reserve,
    m.Reserved,
    m.OpenReceive,
    m.RankOpened,
    m.Prefill,
    m.Prefilled,
    m.OpenSend,
    m.FirstTokens,
    m.RankSent,
    m.Landed,
    m.Plan,
    *[m.Tokens] * 3,
    *[m.StepTokens] * 2,
    m.Transferred,
    m.CloseTransfer,
    m.RankClosed,
    m.Release,
    m.Released,
    m.Failed,
    m.EndAnswer,
    m.Groups,
    m.LinkBroken,
)


class Faults:
    """The faults of one seed, drawn before the requests begin."""

    KINDS = (*["kill"] * 4, "hang", "pause", *["cut"] * 3, "isolate", "slow", "sever", "router")

    def __init__(self, world: World, choose: random.Random, count: int, spread_s: float) -> None:
        self._world, self._choose = world, choose
        self.struck: list[str] = []
        self._waiting: list[tuple[type[m.Message], int, str]] = []
        """Message type, how many of them come before the fault, and its kind."""
        self._seen: dict[type[m.Message], int] = {}
        self._over = False
        self.last_s = 0.0
        """When the last fault ends by itself."""
        world.watchers.append(self._on_message)
        for _ in range(count):
            kind = choose.choice(self.KINDS)
            if choose.random() < 0.8:
                self._waiting.append(
                    (choose.choice(MESSAGES), choose.randrange(choose.choice([2, 30])), kind)
                )
            else:
                world.loop.call_later(choose.uniform(0.0, spread_s), self._strike, kind, None)

    def _on_message(self, source: str, destination: str, message: m.Message) -> None:
        kind = type(message)
        seen = self._seen[kind] = self._seen.get(kind, -1) + 1
        for one in [one for one in self._waiting if one[0] is kind and one[1] == seen]:
            self._waiting.remove(one)
            delay_s = self._choose.choice([0.0, 0.0, 0.001, 0.05])  # not within the sender's own call
            self._world.loop.call_later(delay_s, self._strike, one[2], (source, destination))

    def strike(self, kind: str) -> None:
        """One more fault, now, between any two processes."""
        self._strike(kind, None)

    def end(self) -> None:
        """No more faults begin."""
        self._over = True

    def _strike(self, kind: str, pair: tuple[str, str] | None) -> None:
        if self._over:
            return
        pair = pair or self._any_pair()
        strike: Callable[[str, str], None] = getattr(self, f"_{kind}")
        self.struck.append(kind)
        self._world.event_log.add("fault", kind, pair)
        strike(*pair)

    def _any_pair(self) -> tuple[str, str]:
        world, choose = self._world, self._choose
        ranks = [process.name for process in world.ranks()] or [""]
        others = [*ranks, *(router.name for router in world.living_routers()), world.directory.name]
        return choose.choice(ranks), choose.choice(others)

    def _one_rank(self, names: tuple[str, str]) -> RankProcess | None:
        found = [self._world.process(name) for name in names]
        ranks = [process for process in found if isinstance(process, RankProcess)]
        return self._choose.choice(ranks) if ranks else None

    # --- kinds

    def _kill(self, *pair: str) -> None:
        rank = self._one_rank(pair)
        if rank is not None:
            self._world.kill(rank, "fault")

    def _hang(self, *pair: str) -> None:
        """The rank stops, which is noticed and ended some time later."""
        rank = self._one_rank(pair)
        if rank is not None:
            rank.pause()
            self._after(self._choose.uniform(1.0, 15.0), self._world.kill, rank, "hung")

    def _pause(self, *pair: str) -> None:
        """The rank stops for a while, then goes on as if nothing had happened."""
        rank = self._one_rank(pair)
        if rank is not None:
            rank.pause()
            self._after(self._choose.choice([0.05, 1.0, 3.0, 6.0, 20.0]), _resume, rank)

    def _stop(self, *pair: str) -> None:
        """The rank stops for long enough to be suspected, and goes on before a peer loses it. `KINDS` is without it:
        `run` requires that such faults alone break no group."""
        rank = self._one_rank(pair)
        if rank is not None:
            rank.pause()
            seconds = self._choose.uniform(SUSPECT_AFTER_S + 0.5, PEER_TIMEOUT_S - 1.5)
            self._after(seconds, _resume, rank)

    def _cut(self, source: str, destination: str) -> None:
        """One direction or both, between two processes."""
        seconds = self._seconds()
        which = self._choose.choice(["one", "other", "both", "both"])
        if which != "other":
            self._world.cut(source, destination, seconds)
        if which != "one":
            self._world.cut(destination, source, seconds)

    def _isolate(self, *pair: str) -> None:
        """One process from all others; its group gives it up if that takes long."""
        name, seconds = self._choose.choice(pair), self._seconds()
        for other in self._others(name):
            self._world.cut(name, other, seconds)
            self._world.cut(other, name, seconds)

    def _slow(self, source: str, destination: str) -> None:
        network, delay_s = self._world.network, self._choose.uniform(0.1, 3.0)
        network.slow(source, destination, delay_s)
        self._after(self._seconds(), network.slow, source, destination, 0.0)

    def _sever(self, source: str, destination: str) -> None:
        """The data connection breaks on one side."""
        self._world.fabric.sever(source, destination)

    def _router(self, *pair: str) -> None:
        """A router dies, and another one starts."""
        routers = self._world.living_routers()
        if routers:
            router = self._choose.choice(routers)
            self._world.kill(router, "fault")
            self._world.keep(self._world.loop.create_task(self._world.add_router()))

    def _seconds(self) -> float:
        """How long a cut lasts: within the peers' timeout, about as long, or longer."""
        seconds = self._choose.choice([1.0, 3.0, 5.0, 8.0, 15.0, 60.0]) * self._choose.uniform(0.8, 1.0)
        self.last_s = max(self.last_s, self._world.loop.time() + seconds)
        return seconds

    def _after(self, seconds: float, work: Callable[..., None], *arguments: object) -> None:
        self.last_s = max(self.last_s, self._world.loop.time() + seconds)
        self._world.loop.call_later(seconds, work, *arguments)

    def _others(self, name: str) -> list[str]:
        world = self._world
        every = [*world.ranks(), *world.living_routers(), world.directory]
        return [process.name for process in every if process.name != name]


def _resume(process: Process) -> None:
    if process.paused:
        process.resume()

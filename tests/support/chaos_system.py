"""A system for chaos runs without processes: answers are functions of the request, a signal ends its group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import psutil

from disagg.bench.chaos.faults import TargetRank
from disagg.bench.chaos.workload import ChaosRequest
from disagg.core.errors import DisaggError, PeerLostError
from disagg.router.answers import Output, SessionReport

Damage = Callable[[Output], list[Output]]
POLL_S = 0.001
TOKEN_S = 0.001
"""Time of each token. Without it, the clock of a simulated loop would stand still while requests run."""


def answer_token(request: ChaosRequest, answer: int, position: int) -> int:
    return 100 * request.index + 10 * answer + position


class FakeRankProcess:
    """Notes its signals; SIGKILL ends its group."""

    def __init__(self, system: FakeChaosSystem, target: TargetRank) -> None:
        self._system, self._target = system, target

    def kill(self) -> None:
        self._system.signals.append(f"kill {self._target}")
        self._system.lose(self._target.group)

    def suspend(self) -> None:
        self._system.signals.append(f"stop {self._target}")
        self._system.stopped.add(self._target.group)
        if self._system.finds_hangs:
            self._system.lose(self._target.group)

    def resume(self) -> None:
        self._system.signals.append(f"continue {self._target}")
        self._system.stopped.discard(self._target.group)


class FakeChaosSystem:
    """Groups `prefill`, `decode`, ... of one rank each; a lost one is replaced under a new name."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        recovers: bool = True,
        replaces: bool = True,
        finds_hangs: bool = True,
    ) -> None:
        """`recovers`: requests survive the loss of a group; `replaces`: groups do."""
        self.recovers, self.replaces, self.finds_hangs = recovers, replaces, finds_hangs
        self.up = {
            f"{role}-{n}": role
            for role, count in (("prefill", prefill), ("decode", decode))
            for n in range(count)
        }
        self._names = len(self.up)
        self.stopped: set[str] = set()
        self.signals: list[str] = []
        self.damage: Damage = lambda output: [output]
        """Changes outputs once a group was lost."""
        self.losses = 0
        self.replaces_from = 1
        """Number of losses from which groups are replaced; then the earlier ones too."""
        self._waiting: list[str] = []
        self.salts: list[str] = []
        self.known_obstacle = ""

    # --- the system

    def obstacle(self) -> str:
        return self.known_obstacle

    def groups(self) -> dict[str, str]:
        return dict(self.up)

    def ranks(self) -> list[TargetRank]:
        return [TargetRank(name, role, 0, pid) for pid, (name, role) in enumerate(sorted(self.up.items()))]  # type: ignore[arg-type]

    async def generate(
        self, request_id: str, request: ChaosRequest, cache_salt: str, report: SessionReport
    ) -> AsyncGenerator[Output, None]:
        self.salts.append(cache_salt)
        await self._choose(report)
        for position in range(request.sampling.max_tokens):
            while self.stopped:
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(TOKEN_S)
            if report.decode not in self.up:
                if not self.recovers:
                    raise PeerLostError(f"lost {report.decode}")
                report.recoveries.append("decode_lost")
                await self._choose(report)
            finish = "length" if position + 1 == request.sampling.max_tokens else None
            for answer in range(request.sampling.n):
                token = answer_token(request, answer, position)
                output = Output(position, (token,), "", finish, answer=answer)
                for one in self.damage(output) if self.losses else [output]:
                    yield one

    async def _choose(self, report: SessionReport) -> None:
        while len(set(self.up.values())) < 2:
            await asyncio.sleep(POLL_S)
        by_role = {role: name for name, role in sorted(self.up.items(), reverse=True)}
        report.prefill, report.decode = by_role["prefill"], by_role["decode"]

    # --- its processes

    def open(self, pid: int) -> FakeRankProcess:
        found = [target for target in self.ranks() if target.pid == pid]
        if not found:
            raise psutil.NoSuchProcess(pid)
        return FakeRankProcess(self, found[0])

    def lose(self, group: str) -> None:
        role = self.up.pop(group, None)
        if role is None:
            return
        self.losses += 1
        self.stopped.discard(group)
        self._waiting.append(role)
        while self.replaces and self.losses >= self.replaces_from and self._waiting:
            role = self._waiting.pop()
            self._names += 1
            asyncio.get_running_loop().call_later(0.01, self.up.__setitem__, f"{role}-{self._names}", role)


def failing(error: DisaggError) -> Damage:
    """Returns a damage that ends each request with `error`."""

    def fail(output: Output) -> list[Output]:
        raise error

    return fail

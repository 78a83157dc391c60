"""The groups that a router may use, and who of them gets a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import structlog

from disagg.core.errors import ChecksumError, InvalidRequestError, PeerLostError
from disagg.core.prefixes import PrefixKey
from disagg.core.sampling import MAX_SEQUENCES, check_sampling, sequences_that_fit
from disagg.core.status import GroupStatus
from disagg.core.tokens import TokenIds, pack_tokens
from disagg.core.types import GroupInfo, RequestKey, SamplingParams
from disagg.router.mail import MailRoom
from disagg.router.policy import Asking, Engine, Policy, prefix_aware
from disagg.router.session import Output, Session, SessionReport
from disagg.router.status import GroupStatuses
from disagg.router.text import Decode

log = structlog.get_logger(__name__)

TRIES = 3
"""Of one request, each with other groups."""
SHUNNED_S = 5.0
"""A pair of groups that could not reach each other is given nothing for so long, where there is another pair."""


class Router:
    """The groups a router may use, and the sessions it runs. Lives on one event loop."""

    def __init__(
        self,
        mail: MailRoom,
        groups: Iterable[GroupInfo] = (),
        *,
        reserve_retry_s: float = 0.05,
        choose: Policy = prefix_aware,
    ) -> None:
        self._mail, self._reserve_retry_s, self._choose = mail, reserve_retry_s, choose
        self._engines: dict[str, Engine] = {}
        self._shunned: dict[tuple[str, str], float] = {}
        """Pairs of a prefill and a decode group, and until when."""
        self.statuses = GroupStatuses(mail, self._living, self._compares)
        """What the groups say of themselves, once `disagg.router.status.watching` asks them."""
        self._roles: tuple[str, ...] = ("prefill", "decode")
        """Kinds of group that each request needs."""
        for group in groups:
            self.add(group)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All that requests may be with now."""
        return tuple(self._engines.values())

    def add(self, group: GroupInfo) -> None:
        """From now on requests may go to this group. Known already: nothing happens.

        A group of the same name with another leader takes the place of one that is gone. A cluster's groups are
        all colocated, or none is.
        """
        self._roles = ("colocated",) if group.role == "colocated" else ("prefill", "decode")
        known = self._engines.get(group.name)
        if known is None or known.group.leader.control_address != group.leader.control_address:
            self._engines[group.name] = Engine(group)
            self._mail.revive(rank.control_address for rank in group.ranks)
            self._mail.watch(group.leader.control_address)

    async def drain(self, name: str) -> None:
        """No new request goes to the group; returns when its requests have ended, and forgets it. Again: the same."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.draining = True
        while engine.requests and not self._lost(engine):
            await asyncio.sleep(self._reserve_retry_s)
        if self._engines.get(name) is engine:
            del self._engines[name]
            self._mail.forget(engine.group.leader.control_address)

    def remove(self, name: str) -> None:
        """The group is gone, and with it all that it was given: those requests end at once. Unknown: nothing."""
        engine = self._engines.pop(name, None)
        for rank in engine.group.ranks if engine is not None else ():
            self._mail.lose(rank.control_address)

    def _living(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if not self._lost(engine)]

    def _of(self, role: str) -> list[Engine]:
        engines = [engine for engine in self._engines.values() if engine.group.role == role]
        for engine in engines:
            engine.lost = self._lost(engine)
        return engines

    def _lost(self, engine: Engine) -> bool:
        return not self._mail.lost.isdisjoint(rank.control_address for rank in engine.group.ranks)

    def groups(self) -> tuple[GroupStatus, ...]:
        """What each group that lives said last, prefill first, in the order of their names."""
        return self.statuses.latest()

    def draining(self) -> tuple[str, ...]:
        """Names of the groups that are given nothing new."""
        return tuple(engine.group.name for engine in self._engines.values() if engine.draining)

    def max_sequences(self, prompt_tokens: int, max_tokens: int) -> int:
        """Most answers to such a request, or beams, that every group which may get it computes side by side."""
        living = [e.group for e in self._of(self._roles[-1]) if not e.lost]
        most = [
            min(
                group.leader.max_sequences,
                sequences_that_fit(prompt_tokens, max_tokens, group.leader.pool_tokens, group.page_size),
            )
            for group in living
        ]
        return min(most, default=MAX_SEQUENCES)

    def missing(self) -> list[str]:
        """Roles of which no group can be given a request; empty when requests can be served."""
        usable = {e.group.role for e in self._engines.values() if not self._lost(e) and not e.draining}
        return sorted(set(self._roles) - usable)

    def _compares(self, engine: Engine) -> bool:
        """Whether it matters what a group has cached: where there is a choice, and by a policy that looks at it."""
        kinds = Counter(e.group.role for e in self._engines.values())
        return self._choose is prefix_aware and kinds[engine.group.role] > 1

    def _asking(self, prompt: TokenIds, cache_salt: str, session: str) -> Asking:
        """What the policy looks at. A prompt is hashed only where groups that hold something are compared."""
        helds = [e.held for e in self._engines.values() if len(e.held) and self._compares(e)]
        marks = {
            (unit, switch): PrefixKey.of(prompt, cache_salt, switch).marks(unit)
            for unit, switch in {(held.unit_tokens, held.switch_tokens) for held in helds}
        }
        return Asking(len(prompt), session, marks)

    def _pair(self, asking: Asking) -> tuple[Engine, Engine]:
        """Who prefills and who decodes; a colocated group does both."""
        if len(self._roles) == 1:
            both = self._choose(self._of(self._roles[0]), asking)
            return both, both
        prefills, decodes = (self._of(role) for role in self._roles)
        met = [one for one in prefills if any(self._meet(one, other) for other in decodes)]
        prefill = self._choose(met or prefills, asking)
        met = [other for other in decodes if self._meet(prefill, other)]
        return prefill, self._choose(met or decodes, asking)

    def _meet(self, prefill: Engine, decode: Engine) -> bool:
        """Whether both can be given requests, and are not known to be cut off from each other."""
        alive = not any(one.lost or one.draining for one in (prefill, decode))
        return alive and self._shunned.get(_names(prefill, decode), 0.0) <= time.monotonic()

    def _shun(self, prefill: Engine, decode: Engine) -> None:
        """A request of the pair lost its way or its bytes. Each group may be well: the wire between may not."""
        now_s = time.monotonic()
        self._shunned = {pair: until_s for pair, until_s in self._shunned.items() if until_s > now_s}
        self._shunned[_names(prefill, decode)] = now_s + SHUNNED_S

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        decode: Decode | None = None,
        report: SessionReport | None = None,
        cache_salt: str = "",
        session: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Streams the answer to `prompt`. `decode` turns tokens into text (needed for stop strings);
        `disagg.router.text.decode_with` makes it of a tokenizer. Only prompts of one `cache_salt` share cached KV.
        Requests that name the same `session` are decoded by the same group, as far as its load allows.

        A request that loses one of its groups, or whose KV arrives damaged twice, before anything of an answer is
        known goes to others, where there are.

        Raises what ended the request: `InvalidRequestError`, `RequestInUseError`, `BusyError`, `PromptTooLongError`,
        `RequestTimeoutError`, `PeerLostError`, or any other `DisaggError`. Closing the iterator aborts the request
        on both sides.
        """
        check_sampling(sampling)  # the leaders look again, and at the vocabulary too
        tokens, deadline_s = _packed(prompt), time.monotonic() + timeout_s
        asking = self._asking(tokens, cache_salt, session)
        for epoch in range(TRIES):
            pair, told = self._pair(asking), False
            run = Session(
                self._mail,
                *pair,
                RequestKey(request_id, epoch),
                tokens,
                sampling,
                deadline_s,
                decode,
                report or SessionReport(),
                self._reserve_retry_s,
                cache_salt,
                {engine: asking.missing_tokens(engine) for engine in pair},
            )
            try:
                async with aclosing(run.run()) as outputs:
                    async for output in outputs:
                        told = True
                        yield output
                return
            except (PeerLostError, ChecksumError) as error:
                self._shun(*pair)
                if told or epoch + 1 == TRIES or not self._has_others(pair):
                    raise
                log.info("tried_elsewhere", request=request_id, not_with=_names(*pair), error=str(error))

    def _has_others(self, pair: tuple[Engine, Engine]) -> bool:
        """Whether groups that can be given a request, and meet, are there besides `pair`."""
        if len(self._roles) == 1:
            return any(not e.lost and not e.draining for e in self._of(self._roles[0]) if e is not pair[0])
        prefills, decodes = (self._of(role) for role in self._roles)
        return any(self._meet(one, other) for one in prefills for other in decodes)


def _packed(prompt: Sequence[int]) -> TokenIds:
    try:
        return pack_tokens(prompt)
    except ValueError as exc:
        raise InvalidRequestError(f"the prompt cannot be served: {exc}") from exc


def _names(prefill: Engine, decode: Engine) -> tuple[str, str]:
    return prefill.group.name, decode.group.name

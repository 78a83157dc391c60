"""One request, from its prompt to its last token. Read this first: the whole protocol hangs on it.

    router                      decode group                         prefill group
      | -- Reserve ------------> | sets a row and all pages aside      |
      | <- Reserved (ticket) --- |                                     |
      | -- Prefill (ticket) ---------------------------------------->  | computes chunk by chunk
      |                          | <== segments, layer by layer ====== | while it computes
      | <- Prefilled (token 0) --------------------------------------- | samples the first token
      |                          | <- FirstToken --------------------- |
      | <- Tokens 1, 2, ... ---- | decodes                             |
      | -- Release ------------> | -- Release -----------------------> | frees whatever is left
      | <- Released ------------ | <- Released ----------------------- |

A colocated group is both: the same messages go to its one leader, and there is nothing to send in between.

Every way out (end, stop string, client gone, timeout, error) leaves through the same `finally`: both sides
release by (request, epoch), and the session waits until both have confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import structlog

from disagg.core.errors import BusyError, DisaggError, PeerLostError, RequestTimeoutError, error_from_code
from disagg.core.prefixes import PrefixKey
from disagg.core.sampling import check_sampling
from disagg.core.status import GroupStatus
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Ticket, TokenLogprobs
from disagg.router.mail import Mail, MailRoom
from disagg.router.policy import Asking, Engine, Policy, prefix_aware
from disagg.router.status import GroupStatuses
from disagg.router.text import Decode, TextStream
from transport import messages as m

log = structlog.get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0
SHUNNED_S = 5.0
"""A pair of groups that could not reach each other is given nothing for so long, where there is another pair."""


@dataclass(frozen=True, slots=True)
class Output:
    """Some more of the answer. `finish` is None until the last one: `stop` or `length`."""

    index: int
    """Number of the first of `tokens` in the answer."""
    tokens: tuple[int, ...]
    text: str
    finish: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens` when `SamplingParams.logprobs` asked for them, else none."""


@dataclass(slots=True)
class SessionReport:
    """What a session measured, filled while it runs. Seconds since the session began."""

    prefill: str = ""
    decode: str = ""
    """Names of the groups that were chosen."""
    prompt_tokens: int = 0
    reserved_s: float = 0.0
    ttft_s: float = 0.0
    ended_s: float = 0.0
    nbytes: int = 0
    segments: int = 0
    messages: int = 0
    transfer_s: float = 0.0
    transferred_s: float = 0.0
    """When the last segment was said to have left."""
    tokens: list[int] = field(default_factory=list)
    released: bool = False
    """Both groups confirmed that nothing of the request is left."""


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

    def missing(self) -> list[str]:
        """Roles of which no group can be given a request; empty when requests can be served."""
        usable = {e.group.role for e in self._engines.values() if not self._lost(e) and not e.draining}
        return sorted(set(self._roles) - usable)

    def _compares(self, engine: Engine) -> bool:
        """Whether it matters what a group has cached: where there is a choice, and by a policy that looks at it."""
        kinds = Counter(e.group.role for e in self._engines.values())
        return self._choose is prefix_aware and kinds[engine.group.role] > 1

    def _asking(self, prompt: Sequence[int], cache_salt: str, session: str) -> Asking:
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
        """A request of the pair lost its way. Each group may be well: the network between them may not be."""
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

        Raises what ended the request: `InvalidRequestError`, `BusyError`, `PromptTooLongError`,
        `RequestTimeoutError`, `PeerLostError`, or any other `DisaggError`. Closing the iterator aborts the request
        on both sides.
        """
        check_sampling(sampling)  # the leaders look again, and at the vocabulary too
        asking = self._asking(prompt, cache_salt, session)
        pair = self._pair(asking)
        run = _Session(
            self._mail,
            *pair,
            RequestKey(request_id),
            list(prompt),
            sampling,
            time.monotonic() + timeout_s,
            TextStream(decode, sampling.stop, sampling.min_tokens) if decode else None,
            report or SessionReport(),
            self._reserve_retry_s,
            cache_salt,
            {engine: asking.missing_tokens(engine) for engine in pair},
        )
        try:
            async with aclosing(run.run()) as outputs:
                async for output in outputs:
                    yield output
        except PeerLostError:
            self._shun(*pair)
            raise


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work` also when cancelled meanwhile, however often: what it needs must not be closed before."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _names(prefill: Engine, decode: Engine) -> tuple[str, str]:
    return prefill.group.name, decode.group.name


@dataclass(slots=True)
class _Session:
    mail: MailRoom
    prefill: Engine
    decode: Engine
    key: RequestKey
    prompt: list[int]
    sampling: SamplingParams
    deadline_s: float
    stream: TextStream | None
    report: SessionReport
    reserve_retry_s: float
    cache_salt: str
    load: dict[Engine, int]
    """Tokens that it counts with its groups."""
    began_s: float = field(default_factory=time.monotonic)
    involved: set[str] = field(default_factory=set)
    """Leaders that have heard of the request, and so must release it."""
    early: dict[int, m.Tokens] = field(default_factory=dict)
    """Tokens that came before an earlier one: prefill and decode group speak to us independently."""

    async def run(self) -> AsyncGenerator[Output, None]:
        self.report.prompt_tokens = len(self.prompt)
        self.report.prefill, self.report.decode = self.prefill.group.name, self.decode.group.name
        with self.mail.open(self.key) as box:
            self._begin()
            try:
                ticket = await self._reserve(box)
                left_s, salt = self._left_s(), self.cache_salt
                self._tell(
                    self.prefill, m.Prefill(self.key, self.prompt, self.sampling, ticket, left_s, salt)
                )
                while True:
                    for output in self._outputs(await self._next(box)):
                        yield output
                        if output.finish is not None:
                            return
            finally:
                self.report.ended_s = time.monotonic() - self.began_s
                self._end()
                await _to_its_end(self._release(box))

    async def _reserve(self, box: Mail) -> Ticket:
        """Asks until the decode group has room, or the request's time is up: first come, first served."""
        try:
            async with asyncio.timeout(self._left_s()):
                await self.decode.room.acquire()
        except TimeoutError as exc:
            raise RequestTimeoutError(
                f"request {self.key} waited for room in the decode group until its time was up"
            ) from exc
        try:
            return await self._ask_for_room(box)
        finally:
            self.decode.room.release()

    async def _ask_for_room(self, box: Mail) -> Ticket:
        while True:
            prefill_group = self.prefill.group.name
            self._tell(
                self.decode,
                m.Reserve(
                    self.key, self.prompt, self.sampling, self._left_s(), prefill_group, self.cache_salt
                ),
            )
            try:
                while not isinstance(message := await self._next(box), m.Reserved):
                    pass
                self.report.reserved_s = time.monotonic() - self.began_s
                return message.ticket
            except BusyError as busy:
                pause_s = max(busy.retry_after_s, self.reserve_retry_s)
                if pause_s >= self._left_s():
                    raise
                await asyncio.sleep(pause_s)

    async def _next(self, box: Mail) -> m.Message:
        """The next message; raises what the message means when it means the end."""
        while True:
            try:
                # Not `wait_for`: in Python 3.11 it swallows a cancellation that meets a message.
                async with asyncio.timeout(self._left_s()):
                    peer, item = await box.get()
            except TimeoutError as exc:
                raise RequestTimeoutError(f"request {self.key} did not end in time") from exc
            if isinstance(item, m.Failed):
                raise _error_of(item)
            if not isinstance(item, PeerLostError):
                return item
            if peer in self.involved:
                raise PeerLostError(f"lost the {self._role(peer)} group's leader at {peer}")

    def _outputs(self, message: m.Message) -> list[Output]:
        match message:
            case m.Prefilled():
                self.report.ttft_s = time.monotonic() - self.began_s
                self._computed()
                told = [] if message.logprobs is None else [message.logprobs]
                self.early[0] = m.Tokens(self.key, 0, [message.first_token], logprobs=told)
            case m.Transferred():
                self.report.nbytes, self.report.segments = message.nbytes, message.segments
                self.report.messages, self.report.transfer_s = message.messages, message.seconds
                self.report.transferred_s = time.monotonic() - self.began_s
            case m.Tokens():
                self.early.setdefault(message.index, message)
        outputs = []
        while (tokens := self.early.pop(len(self.report.tokens), None)) is not None:
            outputs.append(self._output(tokens))
            if not tokens.tokens or outputs[-1].finish:
                break
        return outputs

    def _output(self, message: m.Tokens) -> Output:
        index, finish = len(self.report.tokens), message.finish
        self.report.tokens.extend(message.tokens)
        text = ""
        if self.stream is not None:
            text = self.stream.push(message.tokens, last=finish is not None)
            finish = "stop" if self.stream.stopped else finish
        return Output(index, tuple(message.tokens), text, finish, tuple(message.logprobs))

    async def _release(self, box: Mail) -> None:
        """Both sides free what they hold, and say so; a side that is gone holds nothing."""
        waiting = self.involved - self.mail.lost
        for peer in waiting:
            self.mail.send(peer, m.Release(self.key, "the session ended"))
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while waiting:
                    peer, item = await box.get()
                    if isinstance(item, m.Transferred):
                        self._outputs(item)
                    elif isinstance(item, m.Released | PeerLostError):
                        waiting.discard(peer)
            self.report.released = True
        except TimeoutError:
            log.warning("release_not_confirmed", request=str(self.key), peers=sorted(waiting))

    def _tell(self, engine: Engine, message: m.Message) -> None:
        peer = engine.group.leader.control_address
        if peer in self.mail.lost:  # it would not hear of the release either
            raise PeerLostError(f"lost the {self._role(peer)} group's leader at {peer}")
        self.involved.add(peer)
        self.mail.send(peer, message)

    def _begin(self) -> None:
        for engine, tokens in self.load.items():
            engine.requests += 1
            engine.served += 1
            engine.tokens += tokens

    def _computed(self) -> None:
        """A prefill group has the prompt no more before it; a colocated one goes on with it."""
        if self.prefill is not self.decode:
            self.prefill.tokens -= self.load[self.prefill]
            self.load[self.prefill] = 0

    def _end(self) -> None:
        for engine, tokens in self.load.items():
            engine.requests -= 1
            engine.tokens -= tokens

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def _role(self, address: str) -> str:
        engine = self.prefill if address == self.prefill.group.leader.control_address else self.decode
        return engine.group.role


def _error_of(failed: m.Failed) -> DisaggError:
    if failed.code == BusyError.code:
        return BusyError(failed.message, failed.retry_after_s)
    return error_from_code(failed.code, failed.message)

"""One request, from its prompt to its last token. Read this first: the whole protocol hangs on it.

    router                      decode group                         prefill group
      | -- Reserve ------------> | sets a row and all pages aside      |
      | <- Reserved (ticket) --- |                                     |
      | -- Prefill (ticket) ---------------------------------------->  | computes chunk by chunk
      |                          | <== segments, layer by layer ====== | while it computes
      | <- Prefilled (token 0) --------------------------------------- | samples the first token
      |                          | <- FirstTokens -------------------- |
      | <- Tokens 1, 2, ... ---- | decodes                             |
      | -- Release ------------> | -- Release -----------------------> | frees whatever is left
      | <- Released ------------ | <- Released ----------------------- |

Several answers to one prompt are one request: it is computed and sent once, and decoded as forks of one sequence.
An answer that ends early by its text is taken out with EndAnswer. A beam search tells nothing before its end.

A colocated group is both: the same messages go to its one leader, and there is nothing to send in between.

Every way out (end, stop string, client gone, timeout, error) leaves through the same `finally`: both sides
release by (request, epoch), and the session waits until both have confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from disagg.core.errors import BusyError, DisaggError, PeerLostError, RequestTimeoutError, error_from_code
from disagg.core.tokens import TokenIds
from disagg.core.types import RequestKey, SamplingParams, Ticket, TokenLogprobs
from disagg.router.mail import Mail, MailRoom
from disagg.router.policy import Engine
from disagg.router.text import Decode, TextStream
from transport import messages as m

log = structlog.get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Output:
    """Some more of an answer. `finish` is None until the last one: `stop` or `length`."""

    index: int
    """Number of the first of `tokens` in the answer."""
    tokens: tuple[int, ...]
    text: str
    finish: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens` when `SamplingParams.logprobs` asked for them, else none."""
    answer: int = 0
    """Which of the request's answers."""


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
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each answer."""
    released: bool = False
    """Both groups confirmed that nothing of the request is left."""

    @property
    def tokens(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0] if self.answers else []

    @property
    def generated_tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.answers))


@dataclass(slots=True)
class _Answer:
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    early: dict[int, m.Tokens] = field(default_factory=dict)
    """What came before an earlier token: prefill and decode group speak to us independently."""
    over: bool = False


@dataclass(slots=True)
class Session:
    """One request, with the groups that were chosen for it. `run` it once, to its end."""

    mail: MailRoom
    prefill: Engine
    decode: Engine
    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    deadline_s: float
    decode_text: Decode | None
    report: SessionReport
    reserve_retry_s: float
    cache_salt: str
    load: dict[Engine, int]
    """Tokens that it counts with its groups."""
    began_s: float = field(default_factory=time.monotonic)
    involved: set[str] = field(default_factory=set)
    """Leaders that have heard of the request, and so must release it."""
    answers: list[_Answer] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = [self._new_answer() for _ in range(self.sampling.n)]
        self.report.answers = [answer.tokens for answer in self.answers]

    def _new_answer(self) -> _Answer:
        decode, sampling = self.decode_text, self.sampling
        return _Answer(TextStream(decode, sampling.stop, sampling.min_tokens) if decode else None)

    async def run(self) -> AsyncGenerator[Output, None]:
        """Streams the answers as they come. Closed early, it aborts the request on both sides."""
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
                while not all(answer.over for answer in self.answers):
                    for output in self._outputs(await self._next(box)):
                        yield output
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
                return self._first_outputs(message)
            case m.Transferred():
                self.report.nbytes, self.report.segments = message.nbytes, message.segments
                self.report.messages, self.report.transfer_s = message.messages, message.seconds
                self.report.transferred_s = time.monotonic() - self.began_s
            case m.Tokens() if message.answer < len(self.answers):
                return self._take(message)
        return []

    def _first_outputs(self, message: m.Prefilled) -> list[Output]:
        logprobs = [[one] for one in message.logprobs] or [[] for _ in message.first_tokens]
        firsts = zip(message.first_tokens, logprobs, range(len(self.answers)), strict=False)
        return [
            output
            for token, told, number in firsts
            for output in self._take(m.Tokens(self.key, 0, [token], logprobs=told, answer=number))
        ]

    def _take(self, message: m.Tokens) -> list[Output]:
        """What can be told of an answer, now that this has come."""
        answer = self.answers[message.answer]
        answer.early.setdefault(message.index, message)
        outputs: list[Output] = []
        while not answer.over and (tokens := answer.early.pop(len(answer.tokens), None)) is not None:
            outputs.append(self._output(answer, tokens))
            if not tokens.tokens:
                break
        return outputs

    def _output(self, answer: _Answer, message: m.Tokens) -> Output:
        index, finish = len(answer.tokens), message.finish
        answer.tokens.extend(message.tokens)
        text = ""
        if answer.stream is not None:
            text = answer.stream.push(message.tokens, last=finish is not None)
            if answer.stream.stopped and finish is None and len(self.answers) > 1:
                self._tell(self.decode, m.EndAnswer(self.key, message.answer))
            finish = "stop" if answer.stream.stopped else finish
        answer.over = finish is not None
        return Output(index, tuple(message.tokens), text, finish, tuple(message.logprobs), message.answer)

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

    def _requests(self, engine: Engine) -> int:
        """What the request counts with a group: a decode group has each of its sequences in its steps."""
        return self.sampling.sequences if engine is self.decode else 1

    def _begin(self) -> None:
        for engine, tokens in self.load.items():
            engine.requests += self._requests(engine)
            engine.served += 1
            engine.tokens += tokens

    def _computed(self) -> None:
        """A prefill group has the prompt no more before it; a colocated one goes on with it."""
        if self.prefill is not self.decode:
            self.prefill.tokens -= self.load[self.prefill]
            self.load[self.prefill] = 0

    def _end(self) -> None:
        for engine, tokens in self.load.items():
            engine.requests -= self._requests(engine)
            engine.tokens -= tokens

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def _role(self, address: str) -> str:
        engine = self.prefill if address == self.prefill.group.leader.control_address else self.decode
        return engine.group.role


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


def _error_of(failed: m.Failed) -> DisaggError:
    if failed.code == BusyError.code:
        return BusyError(failed.message, failed.retry_after_s)
    return error_from_code(failed.code, failed.message)

"""Stands in for the router: answers from a script, holds, fails; remembers what it was asked and what was closed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from disagg.core.profile.types import ProfileRequest, TraceSummary
from disagg.core.status import GroupStatus
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.router.answers import Emit, Output, RouterRequest
from disagg.router.text import TextStream

ANSWER = b"abcdefghijklmnopqrstuvwxyz"


class FakeGenerator:
    """Answers every prompt with `ANSWER`, a token a byte. Lives on the server's loop."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], SamplingParams]] = []
        self.salts: list[str] = []
        """Of each call."""
        self.sessions: list[str] = []
        """Of each call."""
        self.priorities: list[int] = []
        """Of each call."""
        self.aborted: list[str] = []
        """Requests that were closed before their last output."""
        self.cached_tokens: int | None = None
        """Cached tokens of each prompt."""
        self.answer: Sequence[int] | None = None
        """The answer to every prompt, which ends with `stop`; None: `ANSWER` again and again."""
        self.most = 1
        """Answers that it makes to one request, where its pool has room for them."""
        self.pool_tokens = 1 << 20
        self.down: list[str] = []
        self.statuses: tuple[GroupStatus, ...] = ()
        self.hold_after: int | None = None
        """Wait for `go` after so many tokens of each answer."""
        self.go = asyncio.Event()
        self.fail_after: int = 0
        self.error: Exception | None = None
        """Raised after `fail_after` tokens of each answer, if there is one."""
        self.fail_only = ""
        """And only in requests whose id ends like this."""
        self.recoveries: Counter[str] = Counter()
        self.local_prefills: Counter[str] = Counter()
        self.moved_prompts: Counter[str] = Counter()
        self.suspicions: Counter[str] = Counter()
        self.silent: tuple[str, ...] = ()
        self.profiles: list[ProfileRequest] = []
        self.profiled: Sequence[int | TraceSummary | Exception] = ()
        """What a profile yields; an error is raised."""
        self.hold_release = False
        """Wait for `go` after the last output, as a session does whose groups are slow to release."""

    def missing(self) -> list[str]:
        return self.down

    def refused_roles(self) -> list[str]:
        return self.down

    def max_sequences(self, prompt_tokens: int, max_tokens: int) -> int:
        return min(self.most, self.pool_tokens // (prompt_tokens + max_tokens))

    def groups(self) -> tuple[GroupStatus, ...]:
        return self.statuses

    def draining(self) -> tuple[str, ...]:
        return ()

    def suspected(self) -> tuple[str, ...]:
        return self.silent

    async def profile(self, request: ProfileRequest) -> AsyncGenerator[int | TraceSummary, None]:
        """Yields or raises `profiled`, one after another."""
        self.profiles.append(request)
        for reply in self.profiled:
            if isinstance(reply, Exception):
                raise reply
            yield reply

    async def run(self, request: RouterRequest, emit: Emit) -> None:
        request_id, sampling, decode, report = (
            request.request_id,
            request.sampling,
            request.decode,
            request.report,
        )
        assert request.timeout_s > 0
        assert decode is not None
        self.calls.append((request_id, list(request.prompt), sampling))
        self.salts.append(request.cache_salt)
        self.sessions.append(request.session)
        self.priorities.append(request.priority)
        report.cached_tokens = self.cached_tokens
        report.reserved_s, report.nbytes, report.segments, report.transfer_s = 0.25, 1000, 2, 0.5
        streams = {number: TextStream(decode, sampling.stop) for number in range(sampling.n)}
        try:
            for index in range(sampling.max_tokens):
                await self._trouble(request_id, index)
                for number, stream in list(streams.items()):
                    output = self._output(stream, index, number, request)
                    if output.finish is not None:
                        del streams[number]
                    emit(output)
                if not streams:
                    break
        finally:
            if streams:
                self.aborted.append(request_id)
            elif self.hold_release:
                await self.go.wait()

    async def _trouble(self, request_id: str, index: int) -> None:
        if self.error is not None and index == self.fail_after and request_id.endswith(self.fail_only):
            raise self.error
        if self.hold_after == index:
            await self.go.wait()

    def _output(self, stream: TextStream, index: int, number: int, request: RouterRequest) -> Output:
        """The second answer begins a letter later, and so on; odd ones are likelier."""
        prompt, sampling = request.prompt, request.sampling
        token = ANSWER[(index + number) % len(ANSWER)] if self.answer is None else self.answer[index]
        last = index == sampling.max_tokens - 1
        ends = self.answer is not None and index == len(self.answer) - 1
        text = stream.push([token], last=last or ends)
        finish = "stop" if stream.stopped or ends else "length" if last else None
        logprobs: tuple[Any, ...] = ()
        if sampling.logprobs is not None:
            logprob = -0.5 if number == 0 else -1.0 / (1 + number * (number % 2))
            top = tuple((token + at, logprob - at) for at in range(sampling.logprobs))
            logprobs = (TokenLogprobs(token, logprob, top),)
        output = Output(index, (token,), text, finish, logprobs, number, stop_text=stream.stop_text)
        if index == 0 and sampling.prompt_logprobs is not None:
            scores = scores_of(prompt, sampling.prompt_logprobs)
            output = msgspec.structs.replace(output, prompt_logprobs=scores)
        return output


def scores_of(prompt: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Each token of the prompt is the second likeliest, behind the next letter."""
    return tuple(
        TokenLogprobs(token, -2.0 - at, ((token + 1, -0.5), (token, -2.0 - at), (0, -9.0))[:count], 2)
        for at, token in enumerate(prompt[1:])
    )

"""TTFT of prompts whose beginning is in the host memory of another group, and plain transfers as its ceiling."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from disagg.bench.common.report import Measurement
from disagg.bench.tiers.engine import TiersEngine, random_words, use_until
from disagg.bench.tiers.ttft import TtftSizes
from disagg.bench.transfer.wire import Backend, WireBench, measured_rates
from disagg.core.errors import InvariantError
from disagg.node.page_exchange import REPLY_BYTES
from disagg.node.renewed_exchange import PageEndpoint
from transport.keys.curve import make_keys
from transport.keys.ring import KeyRing
from transport.reach import Choice
from transport.select import TLSOptions, make_transport


class PeerRun:
    """Measures hits in the host memory of `owner`, once per repeat; the first repeat warms up and is dropped."""

    def __init__(
        self,
        reader: TiersEngine,
        owner: TiersEngine,
        sizes: TtftSizes,
        report_progress: Callable[[str], None],
    ) -> None:
        self._reader, self._owner, self._sizes = reader, owner, sizes
        self._progress, self._random = report_progress, random.Random(1)
        self.ttft_s: list[float] = []

    async def run(self) -> None:
        """Raises `InvariantError` if an answer differs from that of the same prompt without a hit, or the hit did not
        come from the other group."""
        await self._reader.share_with(self._owner)
        for number in range(self._sizes.repeats + 1):
            self._progress(f"TTFT with another group, {number} of {self._sizes.repeats}")
            ttft_s = await self._round(f"cold-peer-{number}")
            if number:
                self.ttft_s.append(ttft_s)

    async def _round(self, salt: str) -> float:
        sizes, reader = self._sizes, self._reader
        text = self._words(sizes.tokens)
        prompt = [*text, *self._words(sizes.new_tokens)]
        expected = await reader.generate(prompt, sizes.answer_tokens, salt)
        await reader.settle()
        await self._publish(text)
        before = reader.counts()
        answer = await reader.generate(prompt, sizes.answer_tokens)
        await reader.settle()
        after = reader.counts()
        came = tuple(now - then for now, then in zip(after, before, strict=True))
        if came != (0, 0, sizes.tokens):
            raise InvariantError(f"a hit of {sizes.tokens} tokens in another group came from {came}")
        if answer.tokens != expected.tokens:
            raise InvariantError(
                "an answer after a hit in another group differs from the answer without a hit"
            )
        return answer.ttft_s

    async def _publish(self, text: list[int]) -> None:
        """The owner uses `text` until it has published all pages; each use publishes a part of a long text."""
        first = self._owner.published_tokens()
        await use_until(
            self._owner,
            text,
            lambda: self._owner.published_tokens() - first >= len(text),
            f"a beginning of {len(text)} tokens was not published",
        )
        await self._reader.learn_items(self._owner)

    def _words(self, count: int) -> list[int]:
        return random_words(self._random, count, self._sizes.vocabulary)


def page_endpoint(choice: Choice) -> Callable[[], PageEndpoint]:
    """Returns a function that makes the endpoints of two groups, which have the same keys."""
    tls = TLSOptions(KeyRing(make_keys()))
    make = partial(make_transport, choice.backend, reach=choice.reach, interface=choice.interface, tls=tls)
    return lambda: PageEndpoint(make, choice.name)


def plain_transfer(choice: Choice, nbytes: int, repeats: int) -> Measurement:
    """Measures transfers between two processes, in messages of the size of a reply with pages."""
    size = REPLY_BYTES
    backend = Backend(choice.name, choice.backend, choice.reach, lanes=0)
    return measured_rates(WireBench((size,), (), max(nbytes, size), repeats), backend)[size]

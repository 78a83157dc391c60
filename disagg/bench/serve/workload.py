"""What is asked: bodies of requests, each a function of the seed and its number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from disagg.bench.serve.lengths import Lengths

# Streams of random numbers besides that of the arrivals, 0: none depends on how much another drew.
_REQUESTS, _PREFIXES, _PROBE = 1, 2, 3
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name"
)
_WORDS = _TEXT.split()


class Asked(msgspec.Struct, frozen=True):
    """One request."""

    index: int
    input_tokens: int | None
    """Exact; None where text is sent, whose tokens only the server knows."""
    output_tokens: int
    """At most; exactly with `ignore_eos`."""
    ignore_eos: bool
    body: bytes
    """JSON."""


@dataclass(frozen=True)
class Workload:
    """Draws requests."""

    model: str
    chat: bool
    """Text to `/chat/completions`, as many words as `input` says; else token ids to `/completions`."""
    input: Lengths
    output: Lengths
    prefix_tokens: int
    """In front of what `input` says; 0: prompts share nothing on purpose."""
    prefixes: int
    """How many different ones there are; each request takes one of them at random."""
    token_ids: tuple[int, int]
    """The lowest and the highest token id of prompts."""
    ignore_eos: bool
    seed: int

    def request(self, index: int) -> Asked:
        """Request number `index`, the same for the same seed."""
        random = np.random.default_rng([self.seed, _REQUESTS, index])
        prompt = self._units(random, self.input.draw(random))
        if self.prefix_tokens:
            prompt = [*self._prefixes[int(random.integers(self.prefixes))], *prompt]
        return self._asked(index, prompt, self.output.draw(random))

    def probe(self) -> Asked:
        """A request like the others that shares no prefix with them, for one token."""
        random = np.random.default_rng([self.seed, _PROBE])
        return self._asked(-1, self._units(random, self.input.draw(random)), 1)

    @cached_property
    def _prefixes(self) -> list[list[Any]]:
        random = np.random.default_rng([self.seed, _PREFIXES])
        return [self._units(random, self.prefix_tokens) for _ in range(self.prefixes)]

    def _units(self, random: np.random.Generator, count: int) -> list[Any]:
        """Token ids; or words, where text is sent."""
        if self.chat:
            return [_WORDS[i] for i in random.integers(len(_WORDS), size=count)]
        low, high = self.token_ids
        units: list[Any] = random.integers(low, high, size=count, endpoint=True).tolist()
        return units

    def _asked(self, index: int, prompt: Sequence[Any], output_tokens: int) -> Asked:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": " ".join(prompt)}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:  # not OpenAI's: sent only where it is asked for
            body["ignore_eos"] = True
        tokens = None if self.chat else len(prompt)
        return Asked(index, tokens, output_tokens, self.ignore_eos, msgspec.json.encode(body))

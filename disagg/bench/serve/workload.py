"""The workload: request bodies, each a function of the seed and the request's index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from disagg.bench.serve.lengths import Lengths
from disagg.core.errors import ConfigError

# Numbers of the random streams; the arrivals use stream 0. Draws from one stream do not affect another one.
_REQUESTS, _PREFIXES, _PROBE = 1, 2, 3
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name"
)
_WORDS = _TEXT.split()
OWN_FIELDS = frozenset(
    ["model", "max_tokens", "temperature", "stream", "stream_options", "messages", "prompt", "ignore_eos"]
)
"""Fields of a request's body that `Workload` sets, and on which the checks of answers depend."""


def parse_extra(flag: str, text: str | None) -> dict[str, Any]:
    """Returns the fields of a JSON object; {} for None.

    Raises `ConfigError`, which names the `flag`, for other text and for fields that `Workload` sets.
    """
    if text is None:
        return {}
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{flag} {text}: not a JSON object: {exc}") from None
    taken = sorted(set(found) & OWN_FIELDS)
    if taken:
        raise ConfigError(f"{flag}: {', '.join(taken)} cannot be set; other flags determine these fields")
    return found


class WorkloadRequest(msgspec.Struct, frozen=True):
    """One request."""

    index: int
    input_tokens: int | None
    """Exact number of prompt tokens; None for a text prompt, because only the server can count its tokens."""
    output_tokens: int
    """Limit of the answer's tokens; with `ignore_eos` the exact number of tokens."""
    ignore_eos: bool
    body: bytes
    """The request's body as JSON."""


@dataclass(frozen=True)
class Workload:
    """Draws the random requests of a run."""

    model: str
    chat: bool
    """True: text to `/chat/completions`, with `input` words; False: token ids to `/completions`."""
    input: Lengths
    output: Lengths
    prefix_tokens: int
    """Length of the shared prefix that precedes the `input` tokens; 0: no shared prefixes."""
    prefixes: int
    """Number of different shared prefixes; each request begins with a random one."""
    token_ids: tuple[int, int]
    """The lowest and the highest token id of prompts."""
    ignore_eos: bool
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request's body, such as a structured output."""

    def request(self, index: int) -> WorkloadRequest:
        """Returns request number `index`. Equal seeds give equal requests."""
        random = np.random.default_rng([self.seed, _REQUESTS, index])
        prompt = self._units(random, self.input.draw(random))
        if self.prefix_tokens:
            prompt = [*self._prefixes[int(random.integers(self.prefixes))], *prompt]
        return self._build(index, prompt, self.output.draw(random))

    def probe(self) -> WorkloadRequest:
        """Returns a request with an answer of one token, whose prompt shares no prefix with the other requests."""
        random = np.random.default_rng([self.seed, _PROBE])
        return self._build(-1, self._units(random, self.input.draw(random)), 1)

    @cached_property
    def _prefixes(self) -> list[list[Any]]:
        random = np.random.default_rng([self.seed, _PREFIXES])
        return [self._units(random, self.prefix_tokens) for _ in range(self.prefixes)]

    def _units(self, random: np.random.Generator, count: int) -> list[Any]:
        """Returns `count` random token ids, or `count` random words for chat."""
        if self.chat:
            return [_WORDS[i] for i in random.integers(len(_WORDS), size=count)]
        low, high = self.token_ids
        units: list[Any] = random.integers(low, high, size=count, endpoint=True).tolist()
        return units

    def _build(self, index: int, prompt: Sequence[Any], output_tokens: int) -> WorkloadRequest:
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
        if self.ignore_eos:  # not part of OpenAI's API: sent only if set
            body["ignore_eos"] = True
        body |= self.extra
        tokens = None if self.chat else len(prompt)
        return WorkloadRequest(index, tokens, output_tokens, self.ignore_eos, msgspec.json.encode(body))

"""Compares greedy answers of two servers to the same prompts, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import msgspec
import uvloop

from disagg.bench.serve.answer import error_message
from disagg.bench.serve.bench import ServeBench
from disagg.bench.serve.workload import Workload, WorkloadRequest
from disagg.core.errors import DisaggError
from disagg.core.sampling import MAX_LOGPROBS
from disagg.core.types import TokenLogprobs

PROMPTS = 8
"""Number of prompts. All prompts are sent at once, so that the server batches them."""


@dataclass(frozen=True)
class Greedy:
    """One greedy answer."""

    prompt: list[int]
    tokens: list[str]
    logprobs: list[TokenLogprobs]
    """Log-probabilities of each token; empty when the server does not provide them."""


Answers = list[Greedy]
"""An answer for each prompt."""


class Difference(msgspec.Struct, frozen=True):
    """The first difference between two answers to one prompt."""

    prompt: int
    position: int
    """Position of the first token that differs."""
    tokens: list[str | None]
    """Each server's token at the position; None if the server's answer had already ended."""


class Equality(msgspec.Struct, frozen=True):
    """Result of the comparison of two servers."""

    prompts: int
    tokens: int
    """Number of tokens in the first server's answers."""
    differences: list[Difference]
    rounding: str = ""
    """Comparison of the largest difference with rounding, as text by `disagg.bench.serve.judge`; empty if the answers
    were not judged."""
    within_rounding: bool = False
    """Whether rounding explains all differences."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []


class _CompletionChoice(msgspec.Struct):
    logprobs: _Logprobs


class _Reply(msgspec.Struct):
    choices: list[_CompletionChoice]


def request_answers(bench: ServeBench) -> Answers:
    """Returns the greedy answers to the workload's first `PROMPTS` prompts. Raises `DisaggError` unless the server
    answers all of them."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_request_all(bench, replace(bench.workload, chat=False)))
    except httpx.HTTPError as exc:
        raise DisaggError(f"{bench.url}: no answer to compare: {exc!r}") from exc


def compare_answers(one: Answers, other: Answers) -> Equality:
    """Compares the answers of two servers to the same prompts, in the same order."""
    found = [
        Difference(number, position, [_at(mine, position), _at(theirs, position)])
        for number, (mine, theirs) in enumerate(_pairs(one, other))
        if (position := _parting(mine, theirs)) is not None
    ]
    return Equality(len(one), sum(len(answer.tokens) for answer in one), found)


def _pairs(one: Answers, other: Answers) -> Iterator[tuple[list[str], list[str]]]:
    return ((mine.tokens, theirs.tokens) for mine, theirs in zip(one, other, strict=True))


async def _request_all(bench: ServeBench, workload: Workload) -> Answers:
    # With an explicit transport, httpx ignores the proxies that environment variables name.
    transport = httpx.AsyncHTTPTransport()
    async with httpx.AsyncClient(transport=transport, timeout=bench.timeout_s) as http:
        models = (await http.get(f"{bench.url}/models")).json()
        workload = replace(workload, model=workload.model or models["data"][0]["id"])
        answers = (
            _request_one(http, f"{bench.url}/completions", workload.request(i)) for i in range(PROMPTS)
        )
        return await asyncio.gather(*answers)


async def _request_one(http: httpx.AsyncClient, url: str, request: WorkloadRequest) -> Greedy:
    body = msgspec.json.decode(request.body)
    del body["stream"], body["stream_options"]
    response = await http.post(
        url, json=body | {"logprobs": MAX_LOGPROBS, "return_tokens_as_token_ids": True}
    )
    if response.status_code != 200:
        raise DisaggError(
            f"{url}: the comparison needs answers, but prompt {request.index} was answered with "
            f"{response.status_code}: {error_message(response.content)}"
        )
    found = msgspec.json.decode(response.content, type=_Reply).choices[0].logprobs
    rows = zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=False)
    logprobs = [
        TokenLogprobs(_id(token), one, tuple((_id(t), p) for t, p in top.items())) for token, one, top in rows
    ]
    return Greedy(body["prompt"], found.tokens, logprobs)


def _id(token: str) -> int:
    """Returns the number in `token_id:NUMBER`."""
    return int(token.removeprefix("token_id:"))


def _parting(one: list[str], other: list[str]) -> int | None:
    longest = max(len(one), len(other))
    return next((i for i in range(longest) if _at(one, i) != _at(other, i)), None)


def _at(tokens: list[str], position: int) -> str | None:
    return tokens[position] if position < len(tokens) else None

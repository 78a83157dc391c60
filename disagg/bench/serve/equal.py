"""Greedy answers of two servers to the same prompts, token by token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import msgspec

from disagg.bench.serve.answer import error_message
from disagg.bench.serve.bench import ServeBench
from disagg.bench.serve.workload import Asked, Workload
from disagg.core.errors import DisaggError

PROMPTS = 8
"""Asked at once, so that they meet in batches."""

Answers = list[list[str]]
"""The tokens of each prompt's answer."""


class Difference(msgspec.Struct, frozen=True):
    """Where two answers to one prompt part."""

    prompt: int
    position: int
    """Of the first token that differs."""
    tokens: list[str | None]
    """What each server said there; None where its answer had ended."""


class Equality(msgspec.Struct, frozen=True):
    """What the comparison of two servers found."""

    prompts: int
    tokens: int
    """Of the first server."""
    differences: list[Difference]


class _Logprobs(msgspec.Struct):
    tokens: list[str]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Reply(msgspec.Struct):
    choices: list[_Choice]


def ask_answers(bench: ServeBench) -> Answers:
    """Answers to the first prompts of the bench's load. Raises `DisaggError` unless all are answered."""
    try:
        return asyncio.run(_ask_all(bench, replace(bench.workload, chat=False)))
    except httpx.HTTPError as exc:
        raise DisaggError(f"{bench.url}: answers are to be compared, but none came: {exc!r}") from exc


def compare_answers(one: Answers, other: Answers) -> Equality:
    """Answers of two servers to the same prompts, in the same order."""
    found = [
        Difference(number, position, [_at(mine, position), _at(theirs, position)])
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True))
        if (position := _parting(mine, theirs)) is not None
    ]
    return Equality(len(one), sum(map(len, one)), found)


async def _ask_all(bench: ServeBench, workload: Workload) -> Answers:
    transport = httpx.AsyncHTTPTransport()  # our own: no proxy that the environment names comes in between
    async with httpx.AsyncClient(transport=transport, timeout=bench.timeout_s) as http:
        models = (await http.get(f"{bench.url}/models")).json()
        workload = replace(workload, model=workload.model or models["data"][0]["id"])
        asked = (_ask(http, f"{bench.url}/completions", workload.request(i)) for i in range(PROMPTS))
        return await asyncio.gather(*asked)


async def _ask(http: httpx.AsyncClient, url: str, asked: Asked) -> list[str]:
    body = msgspec.json.decode(asked.body)
    del body["stream"], body["stream_options"]
    response = await http.post(url, json=body | {"logprobs": 0, "return_tokens_as_token_ids": True})
    if response.status_code != 200:
        raise DisaggError(
            f"{url}: answers are to be compared, but prompt {asked.index} was answered with "
            f"{response.status_code}: {error_message(response.content)}"
        )
    return msgspec.json.decode(response.content, type=_Reply).choices[0].logprobs.tokens


def _parting(one: list[str], other: list[str]) -> int | None:
    longest = max(len(one), len(other))
    return next((i for i in range(longest) if _at(one, i) != _at(other, i)), None)


def _at(tokens: list[str], position: int) -> str | None:
    return tokens[position] if position < len(tokens) else None
